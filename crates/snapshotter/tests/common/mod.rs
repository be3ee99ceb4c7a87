//! What the tests share: a snapshotter process below a temporary directory, a client, and mounts as containerd makes them.

#![allow(dead_code)]

#[path = "../../../image/tests/common/scratch.rs"]
mod scratch;

pub mod oci;

pub use scratch::{Scratch, unmount};

use hyper_util::rt::TokioIo;
use pagefold_snapshotter::api::snapshots_client::SnapshotsClient;
use pagefold_snapshotter::api::{self, Mount};
use rustix::mm::{MapFlags, ProtFlags};
use std::collections::HashMap;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::{Duration, Instant};
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status};

/// A process that is killed when the test ends.
pub struct Process(pub Child);

impl Process {
    pub fn kill(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

/// The command that starts a snapshotter with everything below `dir`.
pub fn command(dir: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pagefold-snapshotter"));
    command.arg("--root").arg(dir.join("root")).arg("--store").arg(dir.join("store"));
    command.arg("--socket").arg(dir.join("snapshotter.sock"));
    command
}

/// Starts a snapshotter with everything below `dir`, and waits until it listens.
pub fn start(dir: &Path) -> Process {
    let process = Process(command(dir).spawn().unwrap());
    until("the snapshotter listens", || std::os::unix::net::UnixStream::connect(dir.join("snapshotter.sock")).is_ok());
    process
}

/// Waits until `is_so`.
pub fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let began = Instant::now();
    while !is_so() {
        assert!(began.elapsed() < Duration::from_secs(60), "{what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// A client of one snapshotter, as containerd is one.
pub struct Client {
    runtime: tokio::runtime::Runtime,
    client: SnapshotsClient<Channel>,
}

impl Client {
    /// A client of the snapshotter below `dir`, which connects again after a restart.
    pub fn new(dir: &Path) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let socket = dir.join("snapshotter.sock");
        let connector = tower::service_fn(move |_| {
            let socket = socket.clone();
            async move { tokio::net::UnixStream::connect(socket).await.map(TokioIo::new) }
        });
        let channel = {
            let _inside = runtime.enter();
            Endpoint::from_static("http://snapshotter").connect_with_connector_lazy(connector)
        };
        Self { runtime, client: SnapshotsClient::new(channel) }
    }

    pub fn prepare_labelled(&self, key: &str, parent: &str, labels: &[(&str, &str)]) -> Result<Vec<Mount>, Status> {
        let (key, parent, labels) = (key.into(), parent.into(), map(labels));
        let request = api::PrepareSnapshotRequest { key, parent, labels, ..Default::default() };
        let answer = self.runtime.block_on(self.client.clone().prepare(request))?;
        Ok(answer.into_inner().mounts)
    }

    pub fn prepare(&self, key: &str, parent: &str) -> Result<Vec<Mount>, Status> {
        self.prepare_labelled(key, parent, &[])
    }

    pub fn view(&self, key: &str, parent: &str) -> Result<Vec<Mount>, Status> {
        let request = api::ViewSnapshotRequest { key: key.into(), parent: parent.into(), ..Default::default() };
        Ok(self.runtime.block_on(self.client.clone().view(request))?.into_inner().mounts)
    }

    pub fn mounts(&self, key: &str) -> Result<Vec<Mount>, Status> {
        let request = api::MountsRequest { key: key.into(), ..Default::default() };
        Ok(self.runtime.block_on(self.client.clone().mounts(request))?.into_inner().mounts)
    }

    pub fn commit_labelled(&self, name: &str, key: &str, labels: &[(&str, &str)]) -> Result<(), Status> {
        let (name, key, labels) = (name.into(), key.into(), map(labels));
        let request = api::CommitSnapshotRequest { name, key, labels, ..Default::default() };
        self.runtime.block_on(self.client.clone().commit(request)).map(|_| ())
    }

    pub fn commit(&self, name: &str, key: &str) -> Result<(), Status> {
        self.commit_labelled(name, key, &[])
    }

    pub fn remove(&self, key: &str) -> Result<(), Status> {
        let request = api::RemoveSnapshotRequest { key: key.into(), ..Default::default() };
        self.runtime.block_on(self.client.clone().remove(request)).map(|_| ())
    }

    pub fn stat(&self, key: &str) -> Result<api::Info, Status> {
        let request = api::StatSnapshotRequest { key: key.into(), ..Default::default() };
        Ok(self.runtime.block_on(self.client.clone().stat(request))?.into_inner().info.unwrap())
    }

    pub fn update(&self, info: api::Info, paths: &[&str]) -> Result<api::Info, Status> {
        let paths = paths.iter().map(|path| path.to_string()).collect();
        let update_mask = Some(prost_types::FieldMask { paths });
        let request = api::UpdateSnapshotRequest { info: Some(info), update_mask, ..Default::default() };
        Ok(self.runtime.block_on(self.client.clone().update(request))?.into_inner().info.unwrap())
    }

    pub fn list(&self, filters: &[&str]) -> Result<Vec<api::Info>, Status> {
        let filters = filters.iter().map(|filter| filter.to_string()).collect();
        let request = api::ListSnapshotsRequest { filters, ..Default::default() };
        self.runtime.block_on(async {
            let mut stream = self.client.clone().list(request).await?.into_inner();
            let mut all = Vec::new();
            while let Some(message) = stream.message().await? {
                all.extend(message.info);
            }
            Ok(all)
        })
    }

    pub fn usage(&self, key: &str) -> Result<api::UsageResponse, Status> {
        let request = api::UsageRequest { key: key.into(), ..Default::default() };
        Ok(self.runtime.block_on(self.client.clone().usage(request))?.into_inner())
    }

    pub fn clean_up(&self) -> Result<(), Status> {
        self.runtime.block_on(self.client.clone().cleanup(api::CleanupRequest::default())).map(|_| ())
    }
}

fn map(labels: &[(&str, &str)]) -> HashMap<String, String> {
    labels.iter().map(|(name, value)| (name.to_string(), value.to_string())).collect()
}

/// The code of an answer that must be an error.
pub fn code<T: std::fmt::Debug>(answer: Result<T, Status>) -> Code {
    answer.unwrap_err().code()
}

/// Mounts as containerd does: by mount(2), with the options as one text. It skips a remount without any.
pub fn mount(mounts: &[Mount], at: &Path) {
    fs::create_dir_all(at).unwrap();
    let does_nothing = |mount: &Mount| mount.options == ["remount"];
    let [mount, rest @ ..] = mounts else { panic!("no mount") };
    assert!(rest.iter().all(does_nothing), "{mounts:?}");
    let (flags, data): (Vec<&str>, Vec<&str>) =
        mount.options.iter().map(String::as_str).partition(|option| ["ro", "rw", "rbind"].contains(option));
    let mut command = Command::new("mount");
    command.args(["-i", "-t", if mount.r#type == "bind" { "none" } else { &mount.r#type }]);
    command.arg("-o").arg([flags, data].concat().join(",")).arg(&mount.source).arg(at);
    let out = command.output().unwrap();
    assert!(out.status.success(), "{mounts:?}: {}", String::from_utf8_lossy(&out.stderr));
}

/// The directory that a mount's option names.
pub fn option(mounts: &[Mount], name: &str) -> Option<PathBuf> {
    mounts[0].options.iter().find_map(|option| Some(option.strip_prefix(name)?.strip_prefix('=')?.into()))
}

/// The directory into which containerd's applier writes: the upper directory, or what is bound.
pub fn upper(mounts: &[Mount]) -> PathBuf {
    option(mounts, "upperdir").unwrap_or_else(|| mounts[0].source.clone().into())
}

/// The physical frames of a file's pages, as a program that maps it has them.
pub fn frames(path: &Path) -> Vec<u64> {
    const PAGE: u64 = 4096;
    let file = File::open(path).unwrap();
    let size = file.metadata().unwrap().len() as usize;
    // SAFETY: a new read-only mapping at an address of the kernel's choice replaces no other one; no test cuts the file
    // short.
    let start = unsafe {
        rustix::mm::mmap(std::ptr::null_mut(), size, ProtFlags::READ, MapFlags::SHARED | MapFlags::POPULATE, &file, 0)
    };
    let start = start.unwrap();
    let mut raw = vec![0u8; size.div_ceil(PAGE as usize) * 8];
    File::open("/proc/self/pagemap").unwrap().read_exact_at(&mut raw, start as u64 / PAGE * 8).unwrap();
    // SAFETY: the mapping was made above, and nothing refers to it.
    unsafe { rustix::mm::munmap(start, size).unwrap() };
    let entries = raw.chunks_exact(8).map(|entry| u64::from_le_bytes(entry.try_into().unwrap()));
    let frames: Vec<u64> = entries.map(|entry| entry & ((1 << 55) - 1)).collect();
    assert!(frames.iter().all(|frame| *frame != 0), "{}: pages that are not there", path.display());
    frames
}
