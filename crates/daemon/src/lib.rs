//! State, pacing, metrics and the control socket.
//!
//! The daemon owns domains and their workers. Processes come by connecting:
//! agents greet and become clients ([`link`]), people send one JSON request
//! ([`control`]), browsers and collectors over HTTP ([`web`], [`metrics`]). It may
//! be killed at any instant: clients keep what is merged,
//! for the kernel holds it, and greet the next daemon.

mod clients;
pub mod cold;
mod memory_limits;
mod service;
pub mod status;

pub use pagefold_merge::client::VMA_BUDGET_MAX;
pub use service::listener::{Config, Daemon};
pub use service::{control, http, metrics, web};
