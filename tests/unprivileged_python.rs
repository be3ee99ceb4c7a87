//! The Python package: its tests, against this libforrest and this tool, and its types.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// Says why a test is not tried, past the harness, which hides the output of tests that pass.
fn skipped(why: &str) {
    let _ = writeln!(std::io::stderr(), "SKIPPED: {why}");
}

fn package() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("bindings/python")
}

fn python(arguments: &[&str]) -> Option<Output> {
    let mut command = Command::new("python3");
    command.args(arguments).current_dir(package());
    // Beside the test's program, for it is among what the test depends on.
    let built = std::env::current_exe().expect("a program").with_file_name("libforrest.so");
    assert!(built.exists(), "{} was not built", built.display());
    command.env("PYTHONPATH", package().join("src")).env("PAGEFOLD_FORREST", built);
    command.env("PAGEFOLD_TOOL", env!("CARGO_BIN_EXE_pagefold")).env("PYTHONDONTWRITEBYTECODE", "1");
    command.output().ok()
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

#[test]
fn the_python_package_passes_its_own_tests() {
    let old = "import sys; sys.exit(sys.version_info < (3, 9))";
    if !python(&["-c", old]).is_some_and(|output| output.status.success()) {
        return skipped("no python3 of 3.9 or later here");
    }
    let output = python(&["-m", "unittest", "discover", "-v", "-s", "tests"]).expect("python3 runs");
    let text = said(&output);
    assert!(output.status.success(), "{text}");
    for line in text.lines().filter(|line| line.contains("skipped")) {
        skipped(line);
    }
    // If the tests were not found, none would fail: count them.
    let ran = text.lines().find_map(|line| line.strip_prefix("Ran ")?.split(' ').next()?.parse::<u32>().ok());
    assert!(ran.is_some_and(|ran| ran >= 20), "{text}");
}

#[test]
fn its_types_are_right() {
    // A python3 of the user's own need not be the one that has it.
    let mut mypy = Command::new("mypy");
    if !mypy.arg("--version").output().is_ok_and(|output| output.status.success()) {
        return skipped("no mypy here to check the Python package's types (apt-get install mypy)");
    }
    let cache = tempfile::tempdir().expect("a directory");
    let mut mypy = Command::new("mypy");
    mypy.args(["--strict", "--config-file=", "src/pagefold", "tests", "--cache-dir"]).arg(cache.path());
    let output = mypy.current_dir(package()).output().expect("mypy");
    assert!(output.status.success(), "{}", said(&output));
}

#[test]
fn its_page_is_what_its_words_say() {
    let Some(output) = python(&["api_page.py"]).filter(|output| output.status.success()) else {
        return skipped("no python3 of 3.9 or later here");
    };
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/python.md");
    let is = std::fs::read_to_string(page).expect("docs/python.md");
    assert!(is == said(&output), "run `python3 bindings/python/api_page.py > docs/python.md`");
}

/// A wheel has the library, which Python finds without any other.
#[test]
fn its_wheel_has_the_library_inside() {
    let able = "import sys, setuptools, wheel; sys.exit(sys.version_info < (3, 9))";
    // Debian's Python has what builds a wheel; a python3 of the user's own may lack it.
    let mut pythons = ["/usr/bin/python3", "python3"].into_iter();
    let able =
        |python: &&str| Command::new(python).args(["-c", able]).output().is_ok_and(|output| output.status.success());
    let Some(python) = pythons.find(able) else {
        return skipped("no python3 with setuptools and wheel here (apt-get install python3-setuptools python3-wheel)");
    };
    let dir = tempfile::tempdir().expect("a directory");
    let built = std::env::current_exe().expect("a program").with_file_name("libforrest.so");
    // setuptools writes beside its input.
    let source = dir.path().join("source");
    let copied = Command::new("cp").arg("-r").arg(package()).arg(&source).status().expect("cp");
    assert!(copied.success());
    let mut build = Command::new(python);
    build.args(["setup.py", "--quiet", "bdist_wheel", "--dist-dir"]).arg(dir.path()).current_dir(&source);
    let output = build.env("PAGEFOLD_FORREST", built).output().expect("python3 runs");
    assert!(output.status.success(), "{}", said(&output));
    let wheels = std::fs::read_dir(dir.path()).expect("a directory").flatten().map(|entry| entry.path());
    let wheel = wheels.into_iter().find(|path| path.extension().is_some_and(|end| end == "whl")).expect("a wheel");
    let name = wheel.file_name().expect("a name").to_string_lossy().into_owned();
    assert!(name.contains("-py3-none-linux_"), "{name}");
    let installed = dir.path().join("installed");
    let unpack = "import sys, zipfile; zipfile.ZipFile(sys.argv[1]).extractall(sys.argv[2])";
    let unpacked = Command::new(python).args(["-c", unpack]).args([&wheel, &installed]).status().expect("python3 runs");
    assert!(unpacked.success());
    let program =
        "import pagefold; s = pagefold.Store(); s[b'a'] = b'1'; print(dict(s), pagefold._library.load()._name)";
    let mut run = Command::new(python);
    let output = run.args(["-c", program]).env("PYTHONPATH", &installed).env_remove("PAGEFOLD_FORREST").output();
    let text = said(&output.expect("python3 runs"));
    let own = installed.join("pagefold/libforrest.so");
    assert!(text.contains("{b'a': b'1'}") && text.contains(&*own.to_string_lossy()), "{text}");
}

/// The README's program runs as it stands.
#[test]
fn the_example_in_its_readme_runs() {
    if !python(&["--version"]).is_some_and(|output| output.status.success()) {
        return skipped("no python3 here");
    }
    let readme = std::fs::read_to_string(package().join("README.md")).expect("a README");
    let program = readme.split("```python\n").nth(1).and_then(|rest| rest.split("```").next()).expect("an example");
    // What asks a daemon for a process that is not there is the other tests' business.
    let stores = program.split("daemon = ").next().expect("a beginning").replace("\"sessions\"", "NAME");
    let run = format!(
        "import os; NAME = f'readme-{{os.getpid()}}'\n{stores}\n\
         assert pagefold.Store(NAME, existing=True)[b'user:7'] == b'Ada'\npagefold.Store.remove(NAME)\n"
    );
    let output = python(&["-c", &run]).expect("python3 runs");
    assert!(output.status.success(), "{run}\n{}", said(&output));
}
