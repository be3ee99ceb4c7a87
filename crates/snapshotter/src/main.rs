//! pagefold-snapshotter: containerd's snapshots on an image store.

use clap::Parser;
use pagefold_image::store::{self, Store};
use pagefold_snapshotter::snapshots::Snapshots;
use pagefold_snapshotter::{notify, service};
use std::error::Error;
use std::fs::{self, Permissions};
use std::future::poll_fn;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::task::Poll;
use tokio::net::UnixListener;
use tokio::signal::unix::{SignalKind, signal};

/// Requests that may wait for the disk at the same time.
const THREADS: usize = 32;

/// Keeps containerd's snapshots in an image store: equal files of any two containers share page cache.
///
/// containerd calls it over the socket, as a proxy plugin of type snapshot. Mounts are the kernel's: containers go on while
/// it is away, and it may be restarted at any time.
#[derive(Parser)]
#[command(version)]
struct Args {
    /// Directory for what containers change, and for the list of snapshots
    #[arg(long, value_name = "DIR", default_value = "/var/lib/pagefold/snapshotter")]
    root: PathBuf,
    /// The image store; files become objects without a copy if it is on the file system of --root
    #[arg(long, value_name = "DIR", default_value_os_t = store::default_root())]
    store: PathBuf,
    /// Domain of the store: files are shared within it only
    #[arg(long, value_name = "NAME", default_value = "default")]
    domain: String,
    /// Socket to listen at
    #[arg(long, value_name = "PATH", default_value = "/run/pagefold/snapshotter.sock")]
    socket: PathBuf,
}

fn main() -> ExitCode {
    match run(&Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("pagefold-snapshotter: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Args) -> Result<(), Box<dyn Error>> {
    if !rustix::process::geteuid().is_root() {
        return Err("needs root, as containerd does; start it as root".into());
    }
    let snapshots = Arc::new(Snapshots::open(&args.root, Store::open(&args.store, &args.domain)?)?);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().max_blocking_threads(THREADS).build()?;
    runtime.block_on(async {
        let mut terminate = signal(SignalKind::terminate())?;
        let mut interrupt = signal(SignalKind::interrupt())?;
        let listener = listen(&args.socket)?;
        notify::ready();
        let end = poll_fn(|context| match (terminate.poll_recv(context), interrupt.poll_recv(context)) {
            (Poll::Pending, Poll::Pending) => Poll::Pending,
            _ => Poll::Ready(()),
        });
        service::serve(snapshots, listener, end).await?;
        fs::remove_file(&args.socket)?;
        Ok(())
    })
}

/// Listens at `path`, in the place of a socket at which no process listens any more.
fn listen(path: &Path) -> Result<UnixListener, Box<dyn Error>> {
    let named = |error: std::io::Error| format!("--socket {}: {error}", path.display());
    if let Some(dir) = path.parent() {
        fs::create_dir_all(dir).map_err(named)?;
    }
    if fs::symlink_metadata(path).is_ok_and(|meta| meta.file_type().is_socket()) {
        if std::os::unix::net::UnixStream::connect(path).is_ok() {
            return Err(format!(
                "--socket {}: another process listens there; end it, or give another path",
                path.display()
            )
            .into());
        }
        fs::remove_file(path).map_err(named)?;
    }
    let listener = UnixListener::bind(path).map_err(named)?;
    fs::set_permissions(path, Permissions::from_mode(0o600)).map_err(named)?;
    Ok(listener)
}
