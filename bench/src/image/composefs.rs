//! The peer by the same mechanism.

use crate::process::{Failure, output};
use crate::record;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// composefs' own tools: the system's, or those of `bench/fetch-composefs.sh`.
pub(super) struct Composefs {
    fetched: Option<PathBuf>,
}

impl Composefs {
    pub(super) fn find(inputs: &Path) -> Option<Self> {
        if Command::new("mkcomposefs").arg("--help").output().is_ok() {
            return Some(Self { fetched: None });
        }
        let fetched = inputs.join("composefs");
        fetched.join("run/mkcomposefs").exists().then_some(Self { fetched: Some(fetched) })
    }

    fn command(&self, program: &str) -> Command {
        Command::new(self.fetched.as_ref().map_or_else(|| program.into(), |fetched| fetched.join("run").join(program)))
    }

    pub(super) fn build(&self, objects: &Path, dir: &Path, image: &Path) -> Result<(), Failure> {
        let store = format!("--digest-store={}", objects.display());
        Ok(output(self.command("mkcomposefs").arg(store).arg(dir).arg(image)).map(drop)?)
    }

    pub(super) fn mount(&self, objects: &Path, image: &Path, at: &Path) -> Result<(), Failure> {
        let base = format!("basedir={}", objects.display());
        Ok(output(self.command("mount.composefs").args(["-o", &base]).arg(image).arg(at)).map(drop)?)
    }

    pub(super) fn version(&self) -> String {
        let fetched = self.fetched.as_ref().and_then(|dir| fs::read_to_string(dir.join("version")).ok());
        let version = fetched.or_else(|| record::first_line(&["dpkg-query", "-W", "-f=${Version}", "composefs"]));
        format!("composefs {}", version.as_deref().unwrap_or("of unknown version").trim())
    }
}
