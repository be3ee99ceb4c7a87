//! What pull and push are told alike.

use crate::address::Address;
use crate::error::{Error, Result};
use clap::Args;
use oci_client::Reference;
use pagefold_image::store::Store;
use std::io::{self, Write};
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

/// Arguments of pull and push.
#[derive(Args)]
pub struct Common {
    /// Directory of the store
    #[arg(long)]
    pub store: PathBuf,
    /// Domain of the store
    #[arg(long)]
    pub domain: String,
    #[command(flatten)]
    pub server: Server,
}

/// Arguments of every action.
#[derive(Args)]
pub struct Server {
    /// HTTP without TLS
    #[arg(long)]
    pub plain_http: bool,
    /// Seconds without a byte after which a request is tried again
    #[arg(long, default_value = "30", value_parser = seconds)]
    pub timeout: Duration,
    /// One JSON document
    #[arg(long)]
    pub json: bool,
    /// The image in a registry or in a fleet's store; for ls, rm and gc the store itself
    // Parsed later: a message of the parser of arguments would repeat a password.
    pub reference: String,
}

impl Common {
    /// The store, which is to have image `name`.
    ///
    /// # Errors
    /// There is no store.
    pub fn open_with(&self, name: &str) -> Result<Store> {
        let missing = || pagefold_image::Error::NoImage {
            name: name.into(),
            domain: self.domain.clone(),
            store: self.store.clone(),
        };
        Ok(Store::open_existing(&self.store, &self.domain)?.ok_or_else(missing)?)
    }
}

/// Prints what an action has done.
///
/// # Errors
/// Standard output cannot be written.
pub fn say(text: &str) -> Result<()> {
    writeln!(io::stdout(), "{text}").map_err(|error| Error::Said(format!("standard output: {error}")))
}

/// Bytes that no other host and no other run has.
///
/// # Errors
/// The kernel's.
pub fn random() -> Result<[u8; 16]> {
    pagefold_os::random::bytes().map_err(|error| Error::Said(format!("the kernel's generator: {error}")))
}

/// Bytes in MiB.
pub fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

/// Where an image is, outside of this host.
pub enum Remote {
    Registry(Reference),
    Fleet(Address),
}

impl FromStr for Remote {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, Self::Err> {
        if Address::is_meant(text) {
            return text.parse().map(Remote::Fleet);
        }
        let parsed = text.parse().map_err(|error: oci_client::ParseError| format!("{text}: {error}"));
        parsed.map(Remote::Registry)
    }
}

/// Reads a number of seconds.
///
/// # Errors
/// Anything else.
pub fn seconds(text: &str) -> std::result::Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| "not a number of seconds".to_string())?;
    Duration::try_from_secs_f64(seconds).map_err(|error| error.to_string())
}
