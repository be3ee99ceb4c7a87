//! What a shell offers for an argument: programs, clients, names, mounts. What does not answer at once offers nothing.
//!
//! The names on the line are not known here: the daemon and the store are those of the environment, else the usual ones.

use crate::daemon_client;
use clap_complete::engine::{ArgValueCandidates, CompletionCandidate};
use pagefold_daemon::control::{self, Answer, Request};
use pagefold_daemon::status::Client;
use pagefold_image::store::{self, Store};
use pagefold_os::{private_dir, procfs};
use std::collections::BTreeSet;
use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

/// A person waits.
const PATIENCE: Duration = Duration::from_millis(300);

/// Values, each with what it stands for.
fn explained<T: Into<OsString>>(found: impl Iterator<Item = (T, String)>) -> Vec<CompletionCandidate> {
    found.map(|(value, text)| CompletionCandidate::new(value).help(Some(text.into()))).collect()
}

/// Values that say enough.
fn plain<T: Into<OsString>>(found: impl IntoIterator<Item = T>) -> Vec<CompletionCandidate> {
    found.into_iter().map(CompletionCandidate::new).collect()
}

/// The daemon's clients.
fn asked() -> Vec<Client> {
    let named = std::env::var_os("PAGEFOLD_SOCKET").filter(|path| !path.is_empty()).map(PathBuf::from);
    let Some(socket) = named.or_else(|| Some(private_dir::runtime_dir().ok()?.join(daemon_client::SOCKET))) else {
        return Vec::new();
    };
    match control::ask_within(&socket, &Request::Counts {}, PATIENCE) {
        Ok(Answer::Status(status)) => status.clients,
        _ => Vec::new(),
    }
}

/// Clients, by process id.
pub fn clients() -> ArgValueCandidates {
    ArgValueCandidates::new(|| explained(asked().into_iter().map(|client| (client.pid.to_string(), client.name))))
}

/// Programs with memory that this user may look at, by process id.
pub fn programs() -> ArgValueCandidates {
    ArgValueCandidates::new(|| {
        let own = std::process::id() as i32;
        // What has no memory of its own is the kernel's thread.
        let pids = procfs::pids().into_iter().filter(|pid| *pid != own && procfs::anonymous(*pid) > 0);
        explained(pids.filter_map(|pid| Some((pid.to_string(), procfs::name(pid)?))))
    })
}

/// Domains of live memory.
pub fn domains() -> ArgValueCandidates {
    ArgValueCandidates::new(|| plain(asked().into_iter().map(|client| client.domain).collect::<BTreeSet<String>>()))
}

/// The domains of the store of images.
fn image_domains() -> Vec<String> {
    Store::domains(&store::default_root()).unwrap_or_default()
}

fn image_stores() -> impl Iterator<Item = Store> {
    image_domains().into_iter().filter_map(|domain| Store::open_existing(&store::default_root(), &domain).ok()?)
}

/// Trust boundaries in the store of images.
pub fn domains_of_images() -> ArgValueCandidates {
    ArgValueCandidates::new(|| plain(image_domains()))
}

/// Images, of all domains.
pub fn images() -> ArgValueCandidates {
    ArgValueCandidates::new(|| {
        let of_store = |store: Store| store.images().unwrap_or_default();
        plain(image_stores().flat_map(of_store).map(|image| image.name).collect::<BTreeSet<String>>())
    })
}

/// Where images are mounted, as this process sees it.
pub fn image_mounts() -> ArgValueCandidates {
    ArgValueCandidates::new(|| {
        let of_store = |store: Store| pagefold_image::mounts::mounts(&store).unwrap_or_default();
        let places: BTreeSet<PathBuf> = image_stores().flat_map(of_store).map(|mount| mount.mountpoint).collect();
        plain(places.into_iter().filter(|path| path.is_dir()))
    })
}

/// Where directories of disk images are mounted.
pub fn disk_mounts() -> ArgValueCandidates {
    ArgValueCandidates::new(|| {
        let mounts = pagefold_disk::control::statuses(PATIENCE);
        explained(mounts.into_iter().map(|status| (status.mountpoint, status.directory)))
    })
}
