//! The commands, one file each. A command takes its parsed arguments and
//! returns its exit code, or an error whose text names the cause and the cure.

mod attach;
mod bench;
mod completions;
mod control;
mod daemon;
mod demo;
mod disk;
mod doctor;
mod env;
mod image;
mod keeper;
mod man;
mod park;
mod run;
mod scan;
mod scan_tree;
mod status;
mod stop;
mod top;

use crate::error::Error;
pub use completions::answer as answer_shell;
use std::process::ExitCode;

/// All commands of the tool.
#[derive(clap::Subcommand)]
pub enum Command {
    /// Merge a program that runs already, static or not
    Attach(attach::Attach),
    /// Measure pagefold beside its peers (from a source tree)
    Bench(bench::Args),
    /// Print the completions for a shell
    Completions(completions::Args),
    /// Serve clients; `pagefold run` starts a daemon if none runs
    Daemon(daemon::Args),
    /// Merge the memory of real processes, beside the kernel's KSM
    Demo(demo::Args),
    /// One process of the demonstration
    #[command(hide = true)]
    DemoClient(demo::ClientArgs),
    /// Give an attached program private memory, and leave it
    Detach(attach::Detach),
    /// Serve disk images through one page cache that keeps equal blocks once
    Disk(disk::Args),
    /// Check what works on this machine, and say how to fix what does not
    Doctor(doctor::Args),
    /// Print the environment that makes a program a client
    Env(env::Args),
    /// Store trees by content and mount them so that equal files share page cache
    Image(image::Args),
    /// Hold descriptors for the daemon's successor
    #[command(hide = true)]
    Keeper(keeper::Args),
    /// Write the manual pages into a directory
    Man(man::Args),
    /// Evict an idle client's memory to the cold tier now
    Park(park::Park),
    /// Stop merging a client; merged pages stay merged
    Pause(control::Pause),
    /// Merge a paused client again
    Resume(control::Resume),
    /// Run a program and merge its pages with those of all others
    Run(run::Args),
    /// Predict what merging would save, changing nothing
    Scan(scan::Args),
    /// Show what is merged and what it costs
    Status(status::Args),
    /// End this user's daemon; merged pages stay merged, cold pages return first
    Stop(stop::Args),
    /// Show what is merged, live
    Top(top::Args),
    /// Return a parked client's memory now
    Unpark(park::Unpark),
    /// Turn a client's merged pages back into private memory
    Unmerge(control::Unmerge),
    /// Compare every shared page with its slot through the kernel's page tables
    Verify(control::Verify),
}

/// Runs `command`.
///
/// # Errors
/// The command's own error; its text is one line.
pub fn run(command: Command) -> Result<ExitCode, Error> {
    match command {
        Command::Attach(args) => attach::attach(args),
        Command::Detach(args) => attach::detach(args),
        Command::Bench(args) => bench::run(args),
        Command::Completions(args) => completions::run(args),
        Command::Daemon(args) => daemon::run(args),
        Command::Demo(args) => demo::run(args),
        Command::DemoClient(args) => demo::client(args),
        Command::Disk(args) => disk::run(args),
        Command::Doctor(args) => doctor::run(args),
        Command::Env(args) => env::run(args),
        Command::Image(args) => image::run(args),
        Command::Keeper(args) => keeper::run(args),
        Command::Man(args) => man::run(args),
        Command::Park(args) => park::park(args),
        Command::Pause(args) => control::pause(args),
        Command::Resume(args) => control::resume(args),
        Command::Run(args) => run::run(args),
        Command::Scan(args) => scan::run(args),
        Command::Status(args) => status::run(args),
        Command::Stop(args) => stop::run(args),
        Command::Top(args) => top::run(args),
        Command::Unpark(args) => park::unpark(args),
        Command::Unmerge(args) => control::unmerge(args),
        Command::Verify(args) => control::verify(args),
    }
}
