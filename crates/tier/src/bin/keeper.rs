//! `pagefold-keeper SOCKET`: holds descriptors for the daemon's successor.

use std::os::unix::ffi::OsStrExt;
use std::process::ExitCode;

fn main() -> ExitCode {
    let Some(path) = std::env::args_os().nth(1) else {
        eprintln!("usage: pagefold-keeper SOCKET");
        return ExitCode::from(2);
    };
    // A socket of a dead keeper is in the way; one of a living keeper answers.
    if pagefold_os::sock::connect(path.as_bytes()).is_ok() {
        eprintln!("pagefold-keeper: another keeper serves {}", path.display());
        return ExitCode::FAILURE;
    }
    let _ = std::fs::remove_file(&path);
    let served = pagefold_os::sock::listen(path.as_bytes())
        .map_err(|errno| std::io::Error::from_raw_os_error(errno.0))
        .and_then(|listener| pagefold_tier::keeper::serve(&listener));
    let _ = std::fs::remove_file(&path);
    match served {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("pagefold-keeper: {}: {error}", path.display());
            ExitCode::FAILURE
        }
    }
}
