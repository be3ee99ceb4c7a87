//! Idle clients are parked without a request: when a client is idle, and how the parking is paced.
//!
//! `policy` decides, as a function of time and samples. `signals` takes the samples. `parker` is the thread of a group that
//! acts on the decisions. `waking` remembers what a client touches first.

pub(crate) mod parker;
pub(crate) mod policy;
pub(crate) mod signals;
pub(crate) mod waking;
