//! The kinds of program: what each needs, how it is built, and how it is started.

use crate::files::HOLDERS;
use crate::process;
use serde::Deserialize;
use std::fs;
use std::path::{Path, PathBuf};

/// A kind of program; `bench/holders/kinds.toml` says what the fields mean.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProgramKind {
    /// Its name in the table.
    pub name: String,
    /// Whether `--quick` measures it.
    #[serde(default, rename = "quick")]
    pub is_quick: bool,
    #[serde(default)]
    build: String,
    start: String,
    #[serde(default)]
    needs: Vec<String>,
}

/// All kinds, in the order of the table.
pub fn all() -> Vec<ProgramKind> {
    #[derive(Deserialize)]
    struct File {
        kind: Vec<ProgramKind>,
    }
    toml::from_str::<File>(include_str!("../../holders/kinds.toml")).expect("a test reads it").kind
}

/// Copies the sources of all kinds into `dir`.
pub fn unpack(dir: &Path) -> std::io::Result<()> {
    process::run("cp", &["-r", &format!("{HOLDERS}/."), &dir.display().to_string()])
}

impl ProgramKind {
    /// Builds it in the directory of the sources; returns the words that start it there, or why it cannot be measured here.
    pub fn prepare(&self, dir: &Path) -> Result<Vec<String>, String> {
        let first = [&self.build, &self.start].into_iter().filter_map(|line| line.split(' ').next());
        let is_program = |word: &&str| !word.is_empty() && !word.starts_with("./");
        let mut needed = first.filter(is_program).chain(self.needs.iter().map(String::as_str));
        if let Some(absent) = needed.find(|name| in_path(name).is_none()) {
            return Err(format!("{absent} is not installed"));
        }
        if !self.build.is_empty() {
            let script = format!("cd '{}' && {}", dir.display(), self.build);
            process::run("sh", &["-c", &script]).map_err(|error| first_line(&error.to_string()))?;
        }
        let word = |word: &str| match word {
            "POSTGRES" => postgres().map(|dir| dir.display().to_string()).ok_or("initdb is not installed".to_owned()),
            _ => Ok(word.to_owned()),
        };
        self.start.split(' ').map(word).collect()
    }
}

/// What a compiler says at length, in a line.
fn first_line(text: &str) -> String {
    let said = |line: &&str| line.contains("error") || line.contains("cannot find");
    text.lines().find(said).or(text.lines().next()).unwrap_or_default().trim().to_owned()
}

fn in_path(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|dir| dir.join(name)).find(|file| file.is_file())
}

/// Where the server's programs are: Debian keeps them out of the path.
fn postgres() -> Option<PathBuf> {
    let versions = fs::read_dir("/usr/lib/postgresql").into_iter().flatten().flatten();
    let mut dirs: Vec<PathBuf> = versions.map(|version| version.path().join("bin")).collect();
    dirs.extend(in_path("initdb").and_then(|file| Some(file.parent()?.to_owned())));
    dirs.into_iter().find(|dir| dir.join("initdb").is_file())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn every_kind_has_a_name_of_its_own_and_its_source() {
        let kinds = all();
        assert_eq!(kinds.iter().map(|kind| &kind.name).collect::<BTreeSet<_>>().len(), kinds.len());
        for kind in &kinds {
            let words = || [&kind.build, &kind.start].into_iter().flat_map(|line| line.split(' '));
            let is_source = |word: &str| word.contains('.') && Path::new(HOLDERS).join(word).is_file();
            assert!(words().any(|word| is_source(word) || word == "Hold"), "{}", kind.name);
            assert!(words().any(|word| word == "FILE"), "{}", kind.name);
        }
        assert!((3..=4).contains(&kinds.iter().filter(|kind| kind.is_quick).count()));
    }

    #[test]
    fn what_is_not_installed_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let kind = |build: &str, start: &str| ProgramKind {
            name: "a kind".into(),
            is_quick: false,
            build: build.into(),
            start: start.into(),
            needs: Vec::new(),
        };
        let absent = kind("", "no-such-interpreter hold.py FILE 65536");
        assert_eq!(absent.prepare(dir.path()).unwrap_err(), "no-such-interpreter is not installed");
        let broken = kind("cat no-such-file", "./nothing FILE");
        assert!(broken.prepare(dir.path()).unwrap_err().contains("no-such-file"));
        assert_eq!(first_line("x: exit 1: note\nerror: no target\nmore"), "error: no target");
    }
}
