//! pagefold-remote: images of a store from registries and to them.
//!
//! `pagefold image pull` and `push` run it. It is a program of its own, so that `pagefold` and the daemon contain neither
//! tokio nor TLS nor HTTP.

mod common;
mod credentials;
mod error;
mod fetch;
mod pull;
mod push;
mod registry;

use clap::{Parser, Subcommand};
use common::Common;
use error::Error;
use pagefold_image::oci::Platform;
use pagefold_image::store::check_name;
use pagefold_os::sanitize::clean;
use std::process::ExitCode;

/// Threads that move bytes; the main thread unpacks.
const THREADS: usize = 2;

/// Pulls images from registries into a store, and pushes images of a store.
///
/// `pagefold image pull` and `pagefold image push` run it with the store that they have found.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    #[command(subcommand)]
    action: Action,
}

#[derive(Subcommand)]
enum Action {
    /// Store an image of a registry
    Pull {
        #[command(flatten)]
        common: Common,
        /// Name to store it under
        #[arg(long)]
        name: String,
        /// What its programs run on [default: this machine]
        #[arg(long)]
        platform: Option<Platform>,
        /// Most bytes of unpacked content, of all layers together
        #[arg(long)]
        max_bytes: Option<u64>,
        /// Most entries, of all layers together
        #[arg(long)]
        max_entries: Option<u64>,
    },
    /// Upload an image of the store to a registry
    Push {
        #[command(flatten)]
        common: Common,
        /// Name of the image
        #[arg(long)]
        name: String,
    },
}

fn main() -> ExitCode {
    match run(Arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("pagefold: {}", clean(&error.to_string()));
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: Arguments) -> Result<(), Error> {
    // A provider may be installed once only; there is no other in this program.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(THREADS).enable_all().build();
    let runtime = runtime.map_err(|error| Error::Said(error.to_string()))?;
    match arguments.action {
        Action::Pull { common, name, platform, max_bytes, max_entries } => {
            check_name(&name)?;
            pull::pull(&runtime, &common, &name, &pull::Wanted { platform, max_bytes, max_entries })
        }
        Action::Push { common, name } => push::push(&runtime, &common, &name),
    }
}
