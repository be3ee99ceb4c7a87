//! State, pacing, metrics and the control socket.
//!
//! The daemon owns domains and their workers. Processes come by connecting: agents greet and become clients (`clients` if
//! they are merged live, [`cold`] if their idle memory is evicted), operators send one JSON request ([`control`]), browsers
//! and collectors use HTTP ([`web`], [`metrics`]). The daemon may be killed at any instant: clients keep their merged pages,
//! since the kernel holds them, and greet the next daemon.

mod clients;
pub mod cold;
mod config;
mod domain_key;
pub mod history;
mod memory_limits;
mod program_filter;
mod service;
pub mod status;
pub mod waits;

pub use clients::forked_children::ForkedChildren;
pub use config::{AttachRule, Config, Leftover};
pub use pagefold_entry::look::FILTERS_CURE;
pub use pagefold_merge::client::VMA_BUDGET_MAX;
pub use program_filter::ProgramFilter;
pub use service::daemon::Daemon;
pub use service::listener::run;
pub use service::{control, http, metrics, web};
