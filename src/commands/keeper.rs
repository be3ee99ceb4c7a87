//! `pagefold keeper`: the daemon starts it by itself.

use crate::error::Error;
use std::path::PathBuf;
use std::process::ExitCode;

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
    pagefold_tier::keeper::run(&args.socket, Some(&|socket| children.take(socket)))
        .map_err(|error| format!("keeper at {}: {error}", args.socket.display()))?;
    // Memory of children that live on is answered for, also when no daemon needs a keeper any more.
    children.wait_for_end();
    Ok(ExitCode::SUCCESS)
}
