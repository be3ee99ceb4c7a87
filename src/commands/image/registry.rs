//! `pagefold image pull`, `push` and all that has `--remote`: the program of its own that talks to registries and fleets'
//! stores takes this process over.

use super::args::{MountArgs, PullArgs, PushArgs, RegistryArgs};
use crate::daemon_client::create_log;
use crate::error::Error;
use crate::note;
use crate::output::{complain, print};
use pagefold_disk::control;
use std::env;
use std::ffi::{OsStr, OsString};
use std::io::Read;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

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

/// Starts the program that mounts an image before it is here, and waits until it is mounted. The program serves the mount
/// from then on; what it says goes on in the file that is named.
pub fn mount(store: &Path, domain: &str, args: &MountArgs) -> Result<ExitCode, Error> {
    if !args.name.contains("://") {
        return Err(format!(
            "{}: with --lazy give an address: s3://BUCKET/PREFIX/NAME:TAG, file:///DIR/NAME:TAG",
            args.name
        )
        .into());
    }
    // The program stays when this directory is left.
    let at = std::path::absolute(&args.mountpoint)?;
    let log_path = log_path(&at);
    let mut more = of_store(store, domain);
    let options = args.options.options();
    more.push(format!("--name={}", args.store_as.as_deref().unwrap_or(name_of(&args.name))).into());
    more.extend(["--mountpoint".into(), at.into_os_string(), format!("--kind={}", args.options.kind.name()).into()]);
    if let Some(upper) = options.upper {
        more.extend(["--upper".into(), std::path::absolute(upper)?.into_os_string()]);
    }
    let flags = [
        ("--nosuid", options.nosuid),
        ("--nodev", options.nodev),
        ("--noexec", options.noexec),
        ("--no-prefetch", options.no_prefetch),
        ("--only-opened", args.only_opened),
    ];
    more.extend(flags.into_iter().filter(|(_, is_set)| *is_set).map(|(flag, _)| flag.into()));
    let mut command = command("mount", more, &args.registry, &[&args.name])?;
    control::make_own(&control::runtime_dir())?;
    // A process that has served a mount at this place may still have the old one open.
    let _ = std::fs::remove_file(&log_path);
    let log = create_log(&log_path).map_err(|error| format!("{}, for messages: {error}", log_path.display()))?;
    // Out of this terminal's job: its interrupt key is not meant for the mount.
    let command = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(log).process_group(0);
    let mut child = command.spawn().map_err(|error| format!("{PROGRAM}: {error}"))?;
    let mut told = String::new();
    // The program closes it when the image is mounted, or when it ends.
    child.stdout.take().expect("a pipe").read_to_string(&mut told)?;
    if told.is_empty() {
        let status = child.wait()?;
        complain(&std::fs::read_to_string(&log_path)?);
        let _ = std::fs::remove_file(&log_path);
        return Ok(crate::exit::of_child(status));
    }
    print(&told)?;
    if !args.registry.json {
        note!("pagefold: messages are in {}", log_path.display());
    }
    Ok(ExitCode::SUCCESS)
}

/// Where the program that serves the mount at `mountpoint` writes.
fn log_path(mountpoint: &Path) -> PathBuf {
    let disk = control::socket_path(mountpoint).with_extension("log");
    let name = disk.file_name().unwrap_or_default().to_string_lossy().replacen("disk", "image", 1);
    disk.with_file_name(name)
}

fn of_store(store: &Path, domain: &str) -> Vec<OsString> {
    ["--domain".as_ref(), domain.as_ref(), "--store".as_ref(), store.as_os_str()].map(OsStr::to_owned).to_vec()
}

fn become_program(action: &str, more: Vec<OsString>, registry: &RegistryArgs, words: &[&str]) -> Error {
    match command(action, more, registry, words) {
        Ok(mut command) => {
            let error = command.exec();
            format!("{}: {error}", command.get_program().to_string_lossy()).into()
        }
        Err(error) => error,
    }
}

fn command(action: &str, more: Vec<OsString>, registry: &RegistryArgs, words: &[&str]) -> Result<Command, Error> {
    let program = program().ok_or_else(|| format!("{PROGRAM} is not here; {CURE}"))?;
    let mut command = Command::new(&program);
    command.arg(action).args(more).arg(format!("--timeout={}", registry.timeout.as_secs_f64()));
    command.args(registry.plain_http.then_some("--plain-http")).args(registry.json.then_some("--json"));
    command.arg("--").args(words);
    Ok(command)
}
