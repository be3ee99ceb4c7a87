//! `pagefold unmerge`, `pause`, `resume`, `verify`: one request to the daemon each.

use crate::error::Error;
use crate::output::print_json;
use crate::{completion_values, daemon_client, units};
use crate::{note, say};
use pagefold_daemon::control::{Answer, Request};
use pagefold_daemon::status::Status;
use std::process::ExitCode;

const PAGE: u64 = pagefold_os::PAGE_SIZE as u64;

/// The clients that a command concerns, some by process id or all of them, and how it asks and answers.
#[derive(clap::Args)]
#[command(group(clap::ArgGroup::new("selected").required(true).args(["clients", "all"])))]
struct Selected {
    /// Process ids of clients
    #[arg(value_name = "PID", value_parser = units::pid, add = completion_values::clients())]
    clients: Vec<i32>,
    /// All clients
    #[arg(long)]
    all: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    daemon: daemon_client::DaemonArg,
}

/// Turn a client's merged pages back into private memory
#[derive(clap::Args)]
#[command(
    after_help = "Examples:\n  pagefold unmerge 4711\n  pagefold unmerge $(pidof redis-server)\n  pagefold unmerge --all\n\nThe program goes on meanwhile: 2 MiB at a time become private, about 2 s per GiB.\npagefold resume 4711 lets it merge again."
)]
pub struct Unmerge {
    #[command(flatten)]
    selected: Selected,
}

/// Stop merging a client; merged pages stay merged
#[derive(clap::Args)]
#[command(
    after_help = "Examples:\n  pagefold pause --all\n  pagefold pause 4711 4712\n\nA pause lasts until pagefold resume or the daemon's end. Programs that start later are merged."
)]
pub struct Pause {
    #[command(flatten)]
    selected: Selected,
}

/// Merge a paused client again
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  pagefold resume --all\n  pagefold resume 4711 4712")]
pub struct Resume {
    #[command(flatten)]
    selected: Selected,
}

/// Compare every shared page with its slot through the kernel's page tables
#[derive(clap::Args)]
#[command(
    after_help = "Examples:\n  pagefold verify\n  pagefold verify --json\n\nExit status: 0 if all pages are right, 1 if any is wrong or could not be compared."
)]
pub struct Verify {
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    daemon: daemon_client::DaemonArg,
}

/// What `--json` prints.
#[derive(serde::Serialize)]
struct Done {
    /// Clients.
    count: u64,
}

/// What `unmerge --json` prints.
#[derive(serde::Serialize)]
struct Unmerged {
    /// Pages that are private again.
    count: u64,
    /// Pages that stay shared.
    left: u64,
}

/// Calls `ask` for each of `targets`, once even if a target is named twice. A failure does not stop the others: it is
/// printed, and the exit status is 1. If all fail, the result is their errors.
pub(super) fn for_each<T, U>(targets: &[T], ask: impl Fn(&T) -> Result<U, Error>) -> Result<(Vec<U>, ExitCode), Error>
where
    T: PartialEq,
{
    let (mut done, mut errors) = (Vec::new(), Vec::new());
    for (_, one) in targets.iter().enumerate().filter(|(at, one)| !targets[..*at].contains(one)) {
        match ask(one) {
            Ok(answer) => done.push(answer),
            Err(error) => errors.push(error.to_string()),
        }
    }
    errors.dedup();
    if done.is_empty() && !errors.is_empty() {
        return Err(errors.join("; ").into());
    }
    for error in &errors {
        note!("pagefold: {error}");
    }
    Ok((done, if errors.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }))
}

/// Sends one request for each selected client, or one for all of them, and prints one count.
fn done(selected: &Selected, request: impl Fn(Option<i32>) -> Request, words: [&str; 2]) -> Result<ExitCode, Error> {
    let socket = selected.daemon.socket()?;
    let targets: Vec<Option<i32>> =
        if selected.all { vec![None] } else { selected.clients.iter().copied().map(Some).collect() };
    let (counts, code) = for_each(&targets, |pid| match daemon_client::ask(&socket, &request(*pid))? {
        Answer::Done { count } => Ok(count),
        other => Err(format!("the daemon answered {other:?}").into()),
    })?;
    let count = counts.iter().sum();
    if selected.json {
        print_json(&Done { count })?;
    } else {
        say!("{} {}", units::show_count(count), words[usize::from(count != 1)]);
    }
    Ok(code)
}

/// Runs `unmerge`.
pub fn unmerge(Unmerge { selected }: Unmerge) -> Result<ExitCode, Error> {
    let socket = selected.daemon.socket()?;
    let healed = |status: &Status| -> u64 { status.domains.iter().map(|one| one.events.pages_restored).sum() };
    let clients = match selected.all {
        true => daemon_client::status(&socket)?.clients.iter().map(|client| client.pid).collect(),
        false => selected.clients,
    };
    let (counts, code) = for_each(&clients, |&pid| {
        let shared = |status: &Status| -> u64 {
            status.clients.iter().filter(|one| one.pid == pid).map(|one| one.stats.pages_sharing).sum()
        };
        let answer = daemon_client::ask_and_watch(&socket, &Request::Unmerge { pid }, "unmerge", |before, now| {
            (healed(now).saturating_sub(healed(before)) * PAGE, shared(before) * PAGE)
        })?;
        match answer {
            Answer::Unmerged { count, left } => Ok((count, left)),
            other => Err(format!("the daemon answered {other:?}").into()),
        }
    })?;
    let (count, left) = counts.iter().fold((0, 0), |(count, left), one| (count + one.0, left + one.1));
    if selected.json {
        print_json(&Unmerged { count, left })?;
    } else {
        let words = if count == 1 { "page is private again" } else { "pages are private again" };
        say!("{} {words}", units::show_count(count));
    }
    if left > 0 {
        let words = if left == 1 { "page stays shared" } else { "pages stay shared" };
        let left = units::show_count(left);
        return Err(format!(
            "{left} {words}: the program may be reading into its memory from a device (O_DIRECT, io_uring, vfio), or there is \
             no memory for copies. It is left alone from now on"
        )
        .into());
    }
    Ok(code)
}

/// Runs `pause`.
pub fn pause(args: Pause) -> Result<ExitCode, Error> {
    done(&args.selected, |pid| Request::Pause { pid }, ["client paused", "clients paused"])
}

/// Runs `resume`.
pub fn resume(args: Resume) -> Result<ExitCode, Error> {
    done(&args.selected, |pid| Request::Resume { pid }, ["client resumed", "clients resumed"])
}

/// Runs `verify`.
pub fn verify(args: Verify) -> Result<ExitCode, Error> {
    let socket = args.daemon.socket()?;
    let answer = daemon_client::ask_and_watch(&socket, &Request::Verify {}, "verify", |_, now| {
        (now.verifying.pages * PAGE, now.verifying.pages_total * PAGE)
    })?;
    let Answer::Verified(found) = answer else {
        return Err("the daemon answered something else".into());
    };
    if args.json {
        print_json(&found)?;
    } else {
        say!("{} compared", units::show_counted(found.pages, "shared page", "shared pages"));
        say!("{:>12} show the slot's own frame", units::show_count(found.same_frame));
        if found.same_bytes > 0 {
            say!("{:>12} show the slot's bytes (frames are visible to root only)", units::show_count(found.same_bytes));
        }
        say!("{:>12} were written meanwhile", units::show_count(found.broken));
        say!("{:>12} were not in memory", units::show_count(found.absent));
        if found.unseen > 0 {
            let why = "the daemon may not read the page tables of a process that is not dumpable";
            say!("{:>12} were not compared ({why})", units::show_count(found.unseen));
        }
        say!("{:>12} are wrong", units::show_count(found.wrong_pages));
        if found.wrong_pages == 0 && !found.wrong.is_empty() {
            say!("inconsistent records:");
        }
        for line in &found.wrong {
            say!("  {line}");
        }
    }
    Ok(if found.wrong.is_empty() && found.unseen == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_that_fails_does_not_keep_the_others_from_their_turn() {
        let even = |number: &i32| if number % 2 == 0 { Ok(*number) } else { Err(Error::from("odd")) };
        let code = |whom: &[i32]| for_each(whom, even).map(|(done, code)| (done, format!("{code:?}")));
        let (good, bad) = (format!("{:?}", ExitCode::SUCCESS), format!("{:?}", ExitCode::FAILURE));
        assert_eq!(code(&[2, 4]).unwrap(), (vec![2, 4], good));
        assert_eq!(code(&[1, 2, 3, 4]).unwrap(), (vec![2, 4], bad));
        assert_eq!(code(&[1, 3]).unwrap_err().to_string(), "odd");
        assert_eq!(code(&[2, 4, 2]).unwrap().0, [2, 4], "named twice");
    }
}
