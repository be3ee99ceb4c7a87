//! `pagefold image pull`, `push` and all that has `--remote`: the program of its own that talks to registries and fleets'
//! stores takes this process over.

use super::args::{PullArgs, PushArgs, RegistryArgs};
use crate::error::Error;
use std::env;
use std::ffi::{OsStr, OsString};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The program's name.
const PROGRAM: &str = "pagefold-remote";

/// How to get the program.
pub const CURE: &str = "install the package pagefold-remote, or build it: cargo build --release -p pagefold-remote";

/// The program: beside this one, else in PATH.
pub fn program() -> Option<PathBuf> {
    let beside = env::current_exe().ok().and_then(|path| Some(path.parent()?.join(PROGRAM)));
    let path = env::var_os("PATH").unwrap_or_default();
    let all =
        beside.into_iter().chain(env::split_paths(&path).filter(|dir| dir.is_absolute()).map(|dir| dir.join(PROGRAM)));
    all.into_iter().find(|path| path.is_file())
}

/// Becomes the program that stores an image of a registry or of a fleet's store. Returns only if that fails.
pub fn pull(store: &Path, domain: &str, args: &PullArgs) -> Error {
    let mut more = of_store(store, domain);
    more.extend(
        [
            format!("--name={}", args.name.as_deref().unwrap_or(name_of(&args.reference))),
            format!("--max-bytes={}", args.limits.max_bytes),
            format!("--max-entries={}", args.limits.max_entries),
        ]
        .map(OsString::from),
    );
    more.extend(args.platform.as_ref().map(|platform| format!("--platform={platform}").into()));
    become_program("pull", more, &args.registry, &[&args.reference])
}

/// The name under which an image is stored by default.
fn name_of(reference: &str) -> &str {
    let is_address = reference.contains("://");
    reference.rsplit('/').next().filter(|_| is_address).unwrap_or(reference)
}

/// Becomes the program that uploads an image. Returns only if that fails.
pub fn push(store: &Path, domain: &str, args: &PushArgs) -> Error {
    let mut more = of_store(store, domain);
    more.push(format!("--name={}", args.name).into());
    become_program("push", more, &args.registry, &[&args.reference])
}

/// Becomes the program that does `action` with the images `names` of a fleet's store, or with all. Returns only if that
/// fails.
pub fn of_fleet(action: &str, remote: &str, more: Vec<String>, names: &[String], registry: &RegistryArgs) -> Error {
    let words: Vec<&str> = [remote].into_iter().chain(names.iter().map(String::as_str)).collect();
    become_program(action, more.into_iter().map(OsString::from).collect(), registry, &words)
}

fn of_store(store: &Path, domain: &str) -> Vec<OsString> {
    ["--domain".as_ref(), domain.as_ref(), "--store".as_ref(), store.as_os_str()].map(OsStr::to_owned).to_vec()
}

fn become_program(action: &str, more: Vec<OsString>, registry: &RegistryArgs, words: &[&str]) -> Error {
    let Some(program) = program() else { return format!("{PROGRAM} is not here; {CURE}").into() };
    let mut command = Command::new(&program);
    command.arg(action).args(more).arg(format!("--timeout={}", registry.timeout.as_secs_f64()));
    command.args(registry.plain_http.then_some("--plain-http")).args(registry.json.then_some("--json"));
    let error = command.arg("--").args(words).exec();
    format!("{}: {error}", program.display()).into()
}
