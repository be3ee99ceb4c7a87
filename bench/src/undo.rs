//! What a run changes, and puts back when it is done with it; [`crate::guard`] sees to it where the run was killed.

use crate::guard;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// An act that runs when this is dropped.
pub struct Undo(Option<Box<dyn FnOnce()>>);

impl Undo {
    /// Keeps `act` for later.
    pub fn later(act: impl FnOnce() + 'static) -> Undo {
        Undo(Some(Box::new(act)))
    }

    /// Sets a switch of the kernel, one that the guard knows; it gets its old value back.
    ///
    /// # Errors
    /// There is no such switch, or it refuses.
    pub fn set(path: &'static str, value: &str) -> io::Result<Undo> {
        debug_assert!(guard::SETTINGS.contains(&path), "{path} would stay as it is after a kill");
        let old = guard::value(path).ok_or_else(|| io::Error::other(format!("{path}: no such switch")))?;
        fs::write(path, value)?;
        Ok(Undo::later(move || drop(fs::write(path, old))))
    }
}

impl Drop for Undo {
    fn drop(&mut self) {
        if let Some(act) = self.0.take() {
            act();
        }
    }
}

/// A swap file, in use while this lives.
pub struct SwapFile {
    _on: Undo,
    _file: Undo,
}

impl SwapFile {
    /// Makes a file of `bytes` at `path`, and has the kernel swap to it.
    ///
    /// # Errors
    /// A tool is missing or refuses: not root, no room, a file system without swap files.
    pub fn new(path: PathBuf, bytes: u64) -> io::Result<SwapFile> {
        let name = path.to_string_lossy().into_owned();
        let file = Undo::later(move || drop(fs::remove_file(path)));
        command("fallocate", &["-l", &bytes.to_string(), &name])?;
        fs::set_permissions(Path::new(&name), std::os::unix::fs::PermissionsExt::from_mode(0o600))?;
        command("mkswap", &[&name])?;
        command("swapon", &[&name])?;
        Ok(SwapFile { _on: Undo::later(move || drop(command("swapoff", &[&name]))), _file: file })
    }
}

/// Runs a tool to its end.
///
/// # Errors
/// It is not there, or what it said when it failed.
pub fn command(program: &str, args: &[&str]) -> io::Result<()> {
    let named = |error: io::Error| io::Error::new(error.kind(), format!("{program}: {error}"));
    let output = Command::new(program).args(args).stdin(Stdio::null()).output().map_err(named)?;
    let error = || io::Error::other(format!("{program}: {}", String::from_utf8_lossy(&output.stderr).trim()));
    if output.status.success() { Ok(()) } else { Err(error()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;
    use std::rc::Rc;

    #[test]
    fn an_act_runs_once_when_dropped() {
        let runs = Rc::new(Cell::new(0));
        let seen = Rc::clone(&runs);
        let undo = Undo::later(move || seen.set(seen.get() + 1));
        assert_eq!(runs.get(), 0);
        drop(undo);
        assert_eq!(runs.get(), 1);
    }

    #[test]
    fn a_tool_that_is_missing_is_named() {
        assert!(command("pagefold-no-such-tool", &[]).unwrap_err().to_string().contains("pagefold-no-such-tool"));
        assert!(command("false", &[]).is_err());
    }
}
