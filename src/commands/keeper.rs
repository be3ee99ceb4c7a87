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
    pagefold_tier::keeper::run(&args.socket)
        .map_err(|error| format!("keeper at {}: {error}", args.socket.display()))?;
    Ok(ExitCode::SUCCESS)
}
