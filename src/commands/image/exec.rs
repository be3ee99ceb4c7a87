//! `pagefold image exec`: becomes a command with an image as its root.

use super::args::ExecArgs;
use crate::error::Error;
use crate::{exit, inherited_state, note};
use pagefold_image::Error as ImageError;
use pagefold_image::exec;
use pagefold_image::store::Store;
use std::env::VarError;
use std::process::ExitCode;
use std::time::Duration;

/// Becomes the command; returns the exit status of a failure.
pub fn run(open: impl Fn(&str) -> Result<Store, Error>, args: ExecArgs) -> ExitCode {
    let error = exec_image(open, args);
    note!("pagefold: {error}");
    ExitCode::from(match error.downcast_ref() {
        Some(ImageError::Exec { source, .. }) => exit::of_exec(source),
        _ => exit::FAILED,
    })
}

/// Becomes the command; returns only why not.
fn exec_image(open: impl Fn(&str) -> Result<Store, Error>, args: ExecArgs) -> Error {
    let prepare = || -> Result<_, Error> {
        let store = open(&args.name)?;
        let run = exec::ExecOptions {
            env: environment(&args.env, |name| std::env::var(name))?,
            binds: args.binds,
            mount: args.options.options(),
            command: args.command,
            user: args.user,
            workdir: args.workdir,
            scratch: args.rw,
            learn: args.record_profile.map(|seconds| Duration::from_secs(seconds.into())),
        };
        Ok((store, run))
    };
    let (store, run) = match prepare() {
        Ok(prepared) => prepared,
        Err(error) => return error,
    };
    match store.hold(&args.name) {
        Ok((record, lease)) => exec::exec(&store, &record, &lease, &run, inherited_state::exec_as).into(),
        Err(error) => error.into(),
    }
}

/// What -e asks for, as NAME=VALUE; `caller` is the caller's environment.
fn environment(wanted: &[String], caller: impl Fn(&str) -> Result<String, VarError>) -> Result<Vec<String>, String> {
    let one = |pair: &String| match pair.split_once('=') {
        Some(("", _)) => Err(format!("-e {pair}: give NAME=VALUE")),
        Some(_) => Ok(pair.clone()),
        None => match caller(pair) {
            Ok(value) => Ok(format!("{pair}={value}")),
            Err(error) => Err(format!("-e {pair}: {error} here; give {pair}=VALUE")),
        },
    };
    wanted.iter().map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_variable_without_a_value_is_the_callers_or_refused() {
        let caller = |name: &str| if name == "HERE" { Ok("a=b".to_string()) } else { Err(VarError::NotPresent) };
        let all = |wanted: &[&str]| environment(&wanted.iter().map(ToString::to_string).collect::<Vec<_>>(), caller);
        assert_eq!(all(&["A=1", "HERE", "B="]).unwrap(), ["A=1", "HERE=a=b", "B="]);
        for wanted in ["MISSING", "=1", ""] {
            assert!(all(&["A=1", wanted]).unwrap_err().starts_with(&format!("-e {wanted}: ")));
        }
    }
}
