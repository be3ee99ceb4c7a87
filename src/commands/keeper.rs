//! `pagefold keeper`: the daemon starts it by itself.

use crate::error::Error;
use pagefold_tier::keeper::Options;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

/// How long a keeper that holds nothing waits for a daemon.
const UNUSED_FOR: Duration = Duration::from_secs(60);

/// Hold descriptors for the daemon's successor
#[derive(clap::Args)]
pub struct Args {
    /// Where to listen
    socket: PathBuf,
}

/// Runs until told to end.
pub fn run(args: Args) -> Result<ExitCode, Error> {
    // The daemon that started us may be ended with all of its session: we are to outlive it.
    // SAFETY: takes nothing; fails harmlessly for the leader of a process group.
    unsafe { libc::setsid() };
    let children = pagefold_daemon::ForkedChildren::of_keeper(&args.socket);
    let take_socket = |socket| children.take(socket);
    let options = Options { take_socket: Some(&take_socket), unused_for: Some(UNUSED_FOR) };
    pagefold_tier::keeper::run(&args.socket, options)
        .map_err(|error| format!("keeper at {}: {error}", args.socket.display()))?;
    // Memory of children that live on is answered for, also when no daemon needs a keeper any more.
    children.wait_for_end();
    Ok(ExitCode::SUCCESS)
}
