//! Live memory: watch, index, remap.
//!
//! Three stages, as PageONE had them. *Watch* learns which pages were silent
//! for two periods, at no cost for pages that do not change ([`page`],
//! [`table`]). *Index* looks their fingerprints up and decides which slot each
//! shall show ([`domain`]). *Remap* hands runs of pages and slots to the
//! client, which freezes, compares and maps ([`plan`], [`client`]).
//!
//! Whatever an index entry or a ledger says, equality is proven on frozen
//! bytes in the client: a stale entry costs a comparison, never a wrong byte.

pub mod client;
pub mod domain;
pub mod page;
pub mod plan;
pub mod sim;
pub mod stats;
pub mod table;

pub use client::{Client, Gone};
pub use domain::{ClientId, Config, Domain, Managed, Unmerged};
