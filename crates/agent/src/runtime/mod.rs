//! The agent's own threads: how they start, run, are woken and end.

pub(crate) mod affinity;
pub(crate) mod connection;
pub(crate) mod housekeeping;
pub(crate) mod signals;
pub(crate) mod sparse_table;
pub(crate) mod thread;
pub(crate) mod wakeup;
