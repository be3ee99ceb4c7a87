//! `pagefold-keeper SOCKET`: holds descriptors for the daemon's successor.

use std::process::ExitCode;

fn main() -> ExitCode {
    let Some(path) = std::env::args_os().nth(1) else {
        eprintln!("usage: pagefold-keeper SOCKET");
        return ExitCode::from(2);
    };
    match pagefold_tier::keeper::run(path.as_ref(), pagefold_tier::keeper::Options::default()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("pagefold-keeper: {}: {error}", std::path::Path::new(&path).display());
            ExitCode::FAILURE
        }
    }
}
