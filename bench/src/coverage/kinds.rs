//! The kinds of program: what each needs, how it is built, and how it is started.

use crate::process;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// The sources, from `bench/holders`: its README says what they do.
const SOURCES: &[(&str, &str)] = &[
    ("Hold.java", include_str!("../../holders/Hold.java")),
    ("hold.c", include_str!("../../holders/hold.c")),
    ("hold.escript", include_str!("../../holders/hold.escript")),
    ("hold.go", include_str!("../../holders/hold.go")),
    ("hold.hs", include_str!("../../holders/hold.hs")),
    ("hold.js", include_str!("../../holders/hold.js")),
    ("hold.lisp", include_str!("../../holders/hold.lisp")),
    ("hold.lua", include_str!("../../holders/hold.lua")),
    ("hold.ml", include_str!("../../holders/hold.ml")),
    ("hold.php", include_str!("../../holders/hold.php")),
    ("hold.pl", include_str!("../../holders/hold.pl")),
    ("hold.py", include_str!("../../holders/hold.py")),
    ("hold.rb", include_str!("../../holders/hold.rb")),
    ("hold.rs", include_str!("../../holders/hold.rs")),
    ("hold.scm", include_str!("../../holders/hold.scm")),
    ("hold.sh", include_str!("../../holders/hold.sh")),
    ("hold.tcl", include_str!("../../holders/hold.tcl")),
    ("postgres.sh", include_str!("../../holders/postgres.sh")),
    ("redis.sh", include_str!("../../holders/redis.sh")),
];

/// A kind of program.
pub struct ProgramKind {
    /// Its name in the table.
    pub name: &'static str,
    /// Whether `--quick` measures it.
    pub is_quick: bool,
    /// A command that builds it in the directory of the sources; nothing for a script.
    build: &'static str,
    /// The words that start an instance: FILE is the data, DIR a directory of the instance's own, POSTGRES that of the server's
    /// programs. The first word must be a program that is installed, or was built.
    start: &'static str,
}

const fn kind(name: &'static str, build: &'static str, start: &'static str) -> ProgramKind {
    ProgramKind { name, is_quick: false, build, start }
}

const fn quick(name: &'static str, build: &'static str, start: &'static str) -> ProgramKind {
    ProgramKind { name, is_quick: true, build, start }
}

const C: &str = "cc -O2 -o hold-c hold.c -pthread";
const JAVA: &str = "javac Hold.java";

/// All kinds, in the order of the table.
pub const ALL: &[ProgramKind] = &[
    kind("C, 4 KiB", C, "./hold-c FILE 4080"),
    kind("C, 64 KiB", C, "./hold-c FILE 65536"),
    kind("C, 256 KiB", C, "./hold-c FILE 262144"),
    kind("C, second thread", C, "./hold-c FILE 65536 thread"),
    quick("C, static", "cc -O2 -static -o hold-static hold.c -pthread", "./hold-static FILE 65536"),
    kind("C, musl", "musl-gcc -O2 -o hold-musl hold.c -pthread", "./hold-musl FILE 65536"),
    kind(
        "C, musl, static",
        "musl-gcc -O2 -static -o hold-musl-static hold.c -pthread",
        "./hold-musl-static FILE 65536",
    ),
    kind("C, jemalloc", "cc -O2 -o hold-jemalloc hold.c -pthread -l:libjemalloc.so.2", "./hold-jemalloc FILE 65536"),
    kind(
        "C, tcmalloc",
        "cc -O2 -o hold-tcmalloc hold.c -pthread -l:libtcmalloc_minimal.so.4",
        "./hold-tcmalloc FILE 65536",
    ),
    kind("C, mimalloc", "cc -O2 -o hold-mimalloc hold.c -pthread -l:libmimalloc.so.2", "./hold-mimalloc FILE 65536"),
    quick("Go", "go build -o hold-go hold.go", "./hold-go FILE 65536"),
    kind("Rust", "rustc -O -o hold-rust hold.rs", "./hold-rust FILE 65536"),
    kind(
        "Rust, musl",
        "rustc -O --target x86_64-unknown-linux-musl -o hold-rust-musl hold.rs",
        "./hold-rust-musl FILE 65536",
    ),
    kind("Haskell", "ghc -O1 -o hold-haskell hold.hs", "./hold-haskell FILE 65536"),
    kind("OCaml", "", "ocaml hold.ml FILE 65536"),
    quick("Python", "", "python3 hold.py FILE 65536"),
    kind("Ruby", "", "ruby hold.rb FILE 65536"),
    kind("PHP", "", "php -d memory_limit=-1 hold.php FILE 65536"),
    kind("Perl", "", "perl hold.pl FILE 65536"),
    kind("Tcl", "", "tclsh hold.tcl FILE 65536"),
    kind("Lua", "", "lua5.4 hold.lua FILE 65536"),
    kind("LuaJIT", "", "luajit hold.lua FILE 65536"),
    kind("Guile", "", "guile --no-auto-compile hold.scm FILE 65536"),
    kind("SBCL", "", "sbcl --script hold.lisp FILE 65536"),
    kind("Erlang", "", "escript hold.escript FILE 65536"),
    kind("Node, buffers", "", "node hold.js FILE 65536"),
    kind("Node, strings", "", "node hold.js FILE 65536 strings"),
    kind("Java, G1", JAVA, "java -XX:+UseG1GC -Xmx400m Hold FILE 65536"),
    kind("Java, Serial", JAVA, "java -XX:+UseSerialGC -Xmx400m Hold FILE 65536"),
    kind("Java, Parallel", JAVA, "java -XX:+UseParallelGC -Xmx400m Hold FILE 65536"),
    kind("Java, ZGC", JAVA, "java -XX:+UseZGC -Xmx400m Hold FILE 65536"),
    kind("busybox sh, static", "", "busybox sh hold.sh FILE"),
    kind("redis", "", "sh redis.sh FILE 262144 DIR"),
    kind("PostgreSQL", "", "sh postgres.sh FILE 65536 POSTGRES"),
];

/// The sources and what is built from them, in one directory.
pub struct Programs {
    dir: PathBuf,
}

impl Programs {
    /// Writes the sources into `dir`.
    pub fn unpack(dir: &Path) -> io::Result<Programs> {
        SOURCES.iter().try_for_each(|(name, text)| fs::write(dir.join(name), text))?;
        Ok(Programs { dir: dir.to_owned() })
    }

    /// Builds a kind; returns the words that start it in this directory, or why it cannot be measured here.
    pub fn prepare(&self, kind: &ProgramKind) -> Result<Vec<String>, String> {
        let mut needed: Vec<&str> = [kind.build, kind.start].iter().filter_map(|line| line.split(' ').next()).collect();
        needed.retain(|word| !word.is_empty() && !word.starts_with("./") && *word != "sh");
        // The scripts of servers start programs of these names.
        match kind.name {
            "redis" => needed.extend(["redis-server", "redis-cli"]),
            "PostgreSQL" => needed.extend(["setpriv"]),
            _ => {}
        }
        if let Some(absent) = needed.iter().find(|name| in_path(name).is_none()) {
            return Err(format!("{absent} is not installed"));
        }
        if !kind.build.is_empty() {
            let script = format!("cd '{}' && {}", self.dir.display(), kind.build);
            process::run("sh", &["-c", &script]).map_err(|error| first_line(&error.to_string()))?;
        }
        let word = |word: &str| match word {
            "POSTGRES" => postgres().map(|dir| dir.display().to_string()).ok_or("initdb is not installed".to_owned()),
            _ => Ok(word.to_owned()),
        };
        kind.start.split(' ').map(word).collect()
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
        let names: BTreeSet<&str> = ALL.iter().map(|kind| kind.name).collect();
        assert_eq!(names.len(), ALL.len());
        for kind in ALL {
            let words = || [kind.build, kind.start].into_iter().flat_map(|line| line.split(' '));
            let is_source = |word: &str| SOURCES.iter().any(|(name, _)| *name == word);
            assert!(words().any(is_source), "{}", kind.name);
            assert!(words().any(|word| word == "FILE"), "{}", kind.name);
        }
        let used = |source: &str| ALL.iter().any(|kind| [kind.build, kind.start].join(" ").contains(source));
        assert!(SOURCES.iter().all(|(name, _)| used(name)), "a source that no kind starts");
        assert!((3..=4).contains(&ALL.iter().filter(|kind| kind.is_quick).count()));
    }

    #[test]
    fn what_is_not_installed_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let programs = Programs::unpack(dir.path()).unwrap();
        let absent = kind("nothing", "", "no-such-interpreter hold.py FILE 65536");
        assert_eq!(programs.prepare(&absent).unwrap_err(), "no-such-interpreter is not installed");
        let broken = kind("broken", "cat no-such-file", "./nothing FILE");
        assert!(programs.prepare(&broken).unwrap_err().contains("no-such-file"));
        assert_eq!(first_line("x: exit 1: note\nerror: no target\nmore"), "error: no target");
    }
}
