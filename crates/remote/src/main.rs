//! pagefold-remote: images of a store from registries and fleets' stores, and to them.
//!
//! `pagefold image pull` and `push` run it. It is a program of its own, so that `pagefold` and the daemon contain neither
//! tokio nor TLS nor HTTP.

mod address;
mod common;
mod credentials;
mod downloads;
mod error;
mod fetch;
mod fleet;
mod parts;
mod pull;
mod push;
mod registry;
mod start_profile;

use address::StoreAddress;
use clap::{Parser, Subcommand};
use common::{Common, Remote, Server};
use error::Error;
use pagefold_image::mount::{MountKind, Options};
use pagefold_image::oci::Platform;
use pagefold_image::store::check_name;
use pagefold_os::sanitize::clean;
use serde::Deserialize;
use serde::de::IntoDeserializer;
use std::path::PathBuf;
use std::process::ExitCode;

/// Threads that move bytes; the main thread unpacks.
const THREADS: usize = 2;

/// Pulls images from registries and fleets' stores into a store, and pushes images of a store.
///
/// `pagefold image pull` and `push` run it with the store that they have found, and `ls`, `rm` and `gc` with a fleet's
/// store.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    #[command(subcommand)]
    action: Action,
}

#[derive(Subcommand)]
enum Action {
    /// Store an image of a registry or of a fleet's store
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
    /// Mount an image of a fleet's store before its objects are here, and serve the mount until it ends
    Mount {
        #[command(flatten)]
        common: Common,
        /// Name to store it under when all of it is here
        #[arg(long)]
        name: String,
        /// Where to mount it
        #[arg(long)]
        mountpoint: PathBuf,
        #[command(flatten)]
        how: How,
        /// Fetch only what is opened
        #[arg(long)]
        only_opened: bool,
    },
    /// Upload an image of the store to a registry or to a fleet's store
    Push {
        #[command(flatten)]
        common: Common,
        /// Name of the image
        #[arg(long)]
        name: String,
    },
    /// List the images of a fleet's store
    Ls {
        #[command(flatten)]
        server: Server,
    },
    /// Take images away from a fleet's store
    Rm {
        #[command(flatten)]
        server: Server,
        /// Each NAME or NAME:TAG
        #[arg(required = true)]
        names: Vec<String>,
    },
    /// Remove what no image of a fleet's store needs
    Gc {
        #[command(flatten)]
        server: Server,
        #[command(flatten)]
        wanted: fleet::Wanted,
    },
}

/// How the image is mounted.
#[derive(clap::Args)]
struct How {
    /// How the metadata is mounted
    #[arg(long, default_value = "auto", value_parser = kind)]
    kind: MountKind,
    /// Directory that keeps changes
    #[arg(long)]
    upper: Option<PathBuf>,
    /// Ignore set-user-id bits
    #[arg(long)]
    nosuid: bool,
    /// Refuse device nodes
    #[arg(long)]
    nodev: bool,
    /// Refuse to run programs
    #[arg(long)]
    noexec: bool,
    /// Do not fetch first what the start profile names
    #[arg(long)]
    no_prefetch: bool,
}

/// Reads the kind of a mount by the name that output has for it.
fn kind(name: &str) -> Result<MountKind, serde::de::value::Error> {
    MountKind::deserialize(name.into_deserializer())
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
            let wanted = pull::Wanted { platform, max_bytes, max_entries };
            match &remote(&common)? {
                Remote::Registry(reference) => pull::pull(&runtime, &common, reference, &name, &wanted),
                Remote::Fleet(address) => fleet::pull(&runtime, &common, address, &name, &wanted),
            }
        }
        Action::Mount { common, name, mountpoint, how, only_opened } => {
            check_name(&name)?;
            let Remote::Fleet(address) = &remote(&common)? else {
                return Err(Error::Said(format!(
                    "{}: only images of a fleet's store come as they are read; \
                    image pull brings one of a registry",
                    common.server.reference
                )));
            };
            let How { kind, upper, nosuid, nodev, noexec, no_prefetch } = how;
            let options = Options { kind, upper, nosuid, nodev, noexec, no_prefetch, coming: None };
            let wish = fleet::Wish { address, name: &name, mountpoint: &mountpoint, options, only_opened };
            let wanted = pull::Wanted { platform: None, max_bytes: None, max_entries: None };
            fleet::mount(&runtime, &common, &wish, &wanted)
        }
        Action::Push { common, name } => match &remote(&common)? {
            Remote::Registry(reference) => push::push(&runtime, &common, reference, &name),
            Remote::Fleet(address) => fleet::push(&runtime, &common, address, &name),
        },
        Action::Ls { server } => runtime.block_on(fleet::list(&server, &store_address(&server)?)),
        Action::Rm { server, names } => runtime.block_on(fleet::take_away(&server, &store_address(&server)?, &names)),
        Action::Gc { server, wanted } => runtime.block_on(fleet::collect(&server, &store_address(&server)?, &wanted)),
    }
}

fn store_address(server: &Server) -> Result<StoreAddress, Error> {
    server.reference.parse().map_err(Error::Said)
}

fn remote(common: &Common) -> Result<Remote, Error> {
    common.server.reference.parse().map_err(Error::Said)
}
