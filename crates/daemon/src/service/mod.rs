//! What the daemon offers: its socket, control requests, metrics, the page.
//!
//! The modules of a floor import only from lower floors: service, then `clients` and `cold`, then the state that those
//! share (`config`, `domain_key`, `memory_limits`, `status`).

mod admission;
mod attach;
pub mod control;
pub mod daemon;
pub mod http;
mod idle;
pub mod listener;
pub mod metrics;
mod park;
mod report;
mod sampler;
mod started_programs;
mod verify;
pub mod web;
