//! What the daemon offers: its socket, control requests, metrics, the page.

mod admission;
pub mod control;
pub mod http;
pub mod listener;
pub mod metrics;
mod park;
mod report;
mod verify;
pub mod web;
