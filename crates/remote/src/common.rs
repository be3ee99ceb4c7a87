//! What pull and push are told alike.

use crate::address::Address;
use clap::Args;
use oci_client::Reference;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

/// Arguments of every action.
#[derive(Args)]
pub struct Common {
    /// Directory of the store
    #[arg(long)]
    pub store: PathBuf,
    /// Domain of the store
    #[arg(long)]
    pub domain: String,
    /// HTTP without TLS
    #[arg(long)]
    pub plain_http: bool,
    /// Seconds without a byte after which a request is tried again
    #[arg(long, default_value = "30", value_parser = seconds)]
    pub timeout: Duration,
    /// One JSON document
    #[arg(long)]
    pub json: bool,
    /// The image in a registry or in a fleet's store
    // Parsed later: a message of the parser of arguments would repeat a password.
    pub reference: String,
}

/// Where an image is, outside of this host.
pub enum Remote {
    Registry(Reference),
    Fleet(Address),
}

impl FromStr for Remote {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if Address::is_meant(text) {
            return text.parse().map(Remote::Fleet);
        }
        let parsed = text.parse().map_err(|error: oci_client::ParseError| format!("{text}: {error}"));
        parsed.map(Remote::Registry)
    }
}

fn seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| "not a number of seconds".to_string())?;
    Duration::try_from_secs_f64(seconds).map_err(|error| error.to_string())
}
