//! A session: the mount's connection to the kernel, and the transport that serves it.

use super::classic::Classic;
use super::file_system::DiskFs;
use super::ring::{self, Access, Rings, Support};
use fuser::{BackgroundSession, SessionACL};
use std::io;
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// How requests of the kernel arrive.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Transport {
    /// By rings if the kernel serves them, else by /dev/fuse.
    #[default]
    Auto,
    /// By rings: FUSE over io_uring.
    Ring,
    /// By /dev/fuse.
    Classic,
}

impl Transport {
    /// Its name in options and status.
    pub fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Ring => "ring",
            Self::Classic => "classic",
        }
    }
}

/// Why a session could not be started.
#[derive(Debug)]
pub enum StartError {
    /// Rings are demanded, and there are none.
    Ring(String),
    /// The mount failed.
    Mount(io::Error),
}

/// A mount that is served.
pub struct Session {
    classic: BackgroundSession,
    ring: Option<ring::Session>,
    transport: Transport,
}

/// The command that turns rings on.
pub const ENABLE: &str = "echo Y | sudo tee /sys/module/fuse/parameters/enable_uring";

/// Why there are no rings, before any try.
fn lack(support: Support) -> Option<String> {
    match support {
        Support::On => None,
        Support::Off => Some(format!("the kernel has FUSE over io_uring turned off; to turn it on: {ENABLE}")),
        Support::Missing => Some("the kernel has no FUSE over io_uring (Linux 6.14, CONFIG_FUSE_IO_URING)".to_owned()),
    }
}

impl Session {
    /// Mounts `fs` and serves it. `complain` gets one line if the kernel offers rings and refuses them.
    ///
    /// # Errors
    /// [`StartError`]; nothing stays mounted.
    pub fn start(
        fs: DiskFs,
        mountpoint: &Path,
        config: &fuser::Config,
        wanted: Transport,
        complain: impl Fn(&str),
    ) -> Result<Self, StartError> {
        let fs = Arc::new(fs);
        let lack = if wanted == Transport::Classic { None } else { lack(Support::of_kernel()) };
        let prepared = match (wanted, lack) {
            (Transport::Ring, Some(lack)) => return Err(StartError::Ring(lack)),
            (Transport::Classic, _) | (_, Some(_)) => None,
            (_, None) => match Rings::prepare(fs.clone(), access(config.acl), config.n_threads.unwrap_or(1)) {
                Ok(rings) => Some(rings),
                Err(error) => {
                    refuse(wanted, &error, &complain)?;
                    None
                }
            },
        };
        Self::mount(fs, mountpoint, config, wanted, prepared, complain)
    }

    fn mount(
        fs: Arc<DiskFs>,
        mountpoint: &Path,
        config: &fuser::Config,
        wanted: Transport,
        prepared: Option<Rings>,
        complain: impl Fn(&str),
    ) -> Result<Self, StartError> {
        let agreed = Arc::new(AtomicBool::new(prepared.is_some()));
        let session = fuser::Session::new(Classic { fs, ring: agreed.clone() }, mountpoint, config);
        let session = session.map_err(StartError::Mount)?;
        let mut ring = None;
        let mut transport = Transport::Classic;
        match prepared {
            Some(rings) if agreed.load(Ordering::Relaxed) => {
                let (threads, started) = rings.start(session.as_fd());
                ring = Some(threads);
                match started {
                    Ok(()) => transport = Transport::Ring,
                    Err(error) => refuse(wanted, &error, &complain)?,
                }
            }
            Some(_) => refuse(wanted, &io::ErrorKind::Unsupported.into(), &complain)?,
            None => {}
        }
        Ok(Self { classic: session.spawn().map_err(StartError::Mount)?, ring, transport })
    }

    /// The transport that serves.
    pub fn transport(&self) -> Transport {
        self.transport
    }

    /// Waits for the end.
    ///
    /// # Errors
    /// Why the connection broke.
    pub fn join(self) -> io::Result<()> {
        let ended = self.classic.join();
        if let Some(ring) = self.ring {
            ring.join();
        }
        ended
    }
}

/// The kernel offers rings and refuses them: an error only where they are demanded.
fn refuse(wanted: Transport, error: &io::Error, complain: &impl Fn(&str)) -> Result<(), StartError> {
    let why = format!("the kernel offers FUSE over io_uring and refuses it: {error}");
    if wanted == Transport::Ring {
        return Err(StartError::Ring(why));
    }
    complain(&format!("{why}; the classic transport serves"));
    Ok(())
}

fn access(acl: SessionACL) -> Access {
    let owner = rustix::process::geteuid().as_raw();
    match acl {
        SessionACL::All => Access::All,
        SessionACL::RootAndOwner => Access::RootAnd(owner),
        SessionACL::Owner => Access::Only(owner),
    }
}

#[cfg(test)]
#[path = "../../tests/common/ring_switch.rs"]
mod ring_switch;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use crate::engine::Engine;
    use fuser::MountOption;
    use std::cell::Cell;

    /// The kernel agrees to rings, and then refuses a queue.
    #[test]
    fn if_the_kernel_refuses_a_queue_the_classic_transport_serves() {
        let is_root = rustix::process::geteuid().is_root() && Path::new("/dev/fuse").exists();
        if let Some(why) = (!is_root).then_some("mounting needs root and /dev/fuse").or_else(ring_switch::cannot_ring) {
            println!("SKIPPED: {why}");
            return;
        }
        let _on = ring_switch::RingsOn::new();
        let base = tempfile::tempdir_in("/var/tmp").unwrap();
        let (images, at) = (base.path().join("images"), base.path().join("mnt"));
        std::fs::create_dir(&images).and_then(|()| std::fs::create_dir(&at)).unwrap();
        std::fs::write(images.join("x"), b"text").unwrap();
        let engine = Engine::start(&images, Config { cache_bytes: 4 << 20, ..Config::default() }, None, false).unwrap();
        let fs = Arc::new(DiskFs::new(engine.clone()).unwrap());
        let mut config = fuser::Config::default();
        config.mount_options = vec![MountOption::FSName("refused".to_owned())];
        for transport in [Transport::Auto, Transport::Ring] {
            // The kernel has no such processor.
            let rings = Rings::with_queues(60_000..60_001, fs.clone(), Access::All, 1).unwrap();
            let lines = Cell::new(0);
            let session =
                Session::mount(fs.clone(), &at, &config, transport, Some(rings), |_| lines.set(lines.get() + 1));
            if transport == Transport::Ring {
                assert!(matches!(session, Err(StartError::Ring(_))));
                assert_eq!(std::fs::read_dir(&at).unwrap().count(), 0, "nothing is mounted");
                continue;
            }
            let session = session.unwrap();
            assert_eq!((session.transport(), lines.get()), (Transport::Classic, 1));
            assert_eq!(std::fs::read(at.join("x")).unwrap(), b"text");
            // The child of another test may have the file open until its exec.
            rustix::mount::unmount(&at, rustix::mount::UnmountFlags::DETACH).unwrap();
            session.join().unwrap();
        }
        assert!(engine.shut_down().is_empty());
    }
}
