//! `pagefold image pull` and `push`: the program of its own that talks to registries and fleets' stores takes this process
//! over.

use super::args::{PullArgs, PushArgs, RegistryArgs};
use crate::error::Error;
use std::env;
use std::ffi::OsStr;
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
    let mut more = vec![
        format!("--name={}", args.name.as_deref().unwrap_or(name_of(&args.reference))),
        format!("--max-bytes={}", args.limits.max_bytes),
        format!("--max-entries={}", args.limits.max_entries),
    ];
    more.extend(args.platform.as_ref().map(|platform| format!("--platform={platform}")));
    become_program("pull", store, domain, &more, &args.registry, &args.reference)
}

/// The name under which an image is stored by default.
fn name_of(reference: &str) -> &str {
    let is_address = reference.contains("://");
    reference.rsplit('/').next().filter(|_| is_address).unwrap_or(reference)
}

/// Becomes the program that uploads an image. Returns only if that fails.
pub fn push(store: &Path, domain: &str, args: &PushArgs) -> Error {
    become_program("push", store, domain, &[format!("--name={}", args.name)], &args.registry, &args.reference)
}

fn become_program(
    action: &str,
    store: &Path,
    domain: &str,
    more: &[String],
    registry: &RegistryArgs,
    reference: &str,
) -> Error {
    let Some(program) = program() else { return format!("{PROGRAM} is not here; {CURE}").into() };
    let mut command = Command::new(&program);
    command.args([action, "--domain", domain]).args([OsStr::new("--store"), store.as_os_str()]).args(more);
    command.arg(format!("--timeout={}", registry.timeout.as_secs_f64()));
    command.args(registry.plain_http.then_some("--plain-http")).args(registry.json.then_some("--json"));
    let error = command.args(["--", reference]).exec();
    format!("{}: {error}", program.display()).into()
}
