//! What pull and push are told alike.

use clap::Args;
use oci_client::Reference;
use std::path::PathBuf;
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
    /// The image in the registry
    pub reference: Reference,
}

fn seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| "not a number of seconds".to_string())?;
    Duration::try_from_secs_f64(seconds).map_err(|error| error.to_string())
}
