//! The peer by the same mechanism.

use crate::process::{Failure, output};
use crate::record;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// composefs' own tools: from the system, or from `bench/fetch-composefs.sh`, run by their own loader.
pub(super) struct Composefs {
    tree: Option<PathBuf>,
}

impl Composefs {
    pub(super) fn find(inputs: &Path) -> Option<Self> {
        if Command::new("mkcomposefs").arg("--help").output().is_ok() {
            return Some(Self { tree: None });
        }
        let tree = inputs.join("composefs");
        tree.join("usr/bin/mkcomposefs").exists().then_some(Self { tree: Some(tree) })
    }

    fn command(&self, program: &str) -> Command {
        let Some(tree) = &self.tree else { return Command::new(program) };
        let libraries = ["usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu"].map(|dir| tree.join(dir));
        let libraries = libraries.iter().find(|dir| dir.is_dir()).expect("a Debian tree");
        let loader = ["ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"].map(|name| libraries.join(name));
        let mut command = Command::new(loader.iter().find(|path| path.exists()).expect("a Debian tree"));
        let binary = ["usr/bin", "usr/sbin"].map(|dir| tree.join(dir).join(program));
        let binary = binary.iter().find(|path| path.exists()).expect("both tools are of one package");
        command.arg("--library-path").arg(libraries).arg(binary);
        command
    }

    pub(super) fn build(&self, objects: &Path, dir: &Path, image: &Path) -> Result<(), Failure> {
        let mut store = std::ffi::OsString::from("--digest-store=");
        store.push(objects);
        output(self.command("mkcomposefs").arg(store).arg(dir).arg(image))?;
        Ok(())
    }

    pub(super) fn mount(&self, objects: &Path, image: &Path, at: &Path) -> Result<(), Failure> {
        let mut base = std::ffi::OsString::from("basedir=");
        base.push(objects);
        output(self.command("mount.composefs").arg("-o").arg(base).arg(image).arg(at))?;
        Ok(())
    }

    pub(super) fn version(&self) -> String {
        let fetched = self.tree.as_ref().and_then(|tree| fs::read_to_string(tree.join("version")).ok());
        let version = fetched.or_else(|| record::first_line(&["dpkg-query", "-W", "-f=${Version}", "composefs"]));
        format!("composefs {}", version.as_deref().unwrap_or("of unknown version").trim())
    }
}
