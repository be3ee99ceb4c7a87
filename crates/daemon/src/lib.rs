//! State, pacing, metrics and the control socket.
//!
//! The daemon owns domains and their workers. Processes come by connecting:
//! agents greet and become clients ([`link`]), people send one JSON request
//! ([`control`]), browsers and collectors over HTTP ([`web`], [`metrics`]). It may
//! be killed at any instant: clients keep what is merged,
//! for the kernel holds it, and greet the next daemon.

pub mod cold;
pub mod control;
pub mod http;
mod lease;
pub mod link;
pub mod metrics;
pub mod peer;
pub mod server;
pub mod status;
mod verify;
pub mod web;

pub use pagefold_merge::client::VMA_BUDGET_MAX;
pub use server::{Config, Daemon};
