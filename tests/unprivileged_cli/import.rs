//! Archives that `pagefold image build` and `pagefold image import` accept or refuse.

use crate::tool::{Tool, tellers, text};
use std::collections::BTreeSet;
use std::process::{Command, Stdio};

#[test]
fn a_wrong_input_creates_no_store() {
    let tool = Tool::new();
    let path = |name: &str| tool.dir.path().join(name);
    let _socket = std::os::unix::net::UnixListener::bind(path("socket")).expect("a socket");
    for (how, name, said) in [
        ("build", "none", "none: No such file or directory (os error 2)"),
        ("import", "none", "none: No such file or directory (os error 2)"),
        ("build", "socket", "socket: No such device or address (os error 6)"),
        ("import", "/dev/null", "/dev/null: a device, from which no archive comes; give a file, or a pipe"),
    ] {
        let refused = tool.run(&["image", how, "--name", "a:1", name]);
        assert_eq!((refused.status.code(), text(&refused.stderr)), (Some(1), format!("pagefold: {said}\n")));
        assert!(!path("store").exists(), "{how} {name}");
    }
}

#[test]
fn an_image_is_read_from_a_pipe_and_a_damaged_one_is_named() {
    let (tool, _) = tellers("1");
    assert!(tool.run(&["image", "build", "--name", "a:1", "tree"]).status.success());
    assert!(tool.run(&["image", "export", "--format", "oci", "a:1", "layout"]).status.success());
    let layout = tool.dir.path().join("layout");
    assert!(
        Command::new("tar").args(["-cf", "../image.tar", "."]).current_dir(&layout).status().expect("tar").success()
    );
    let image = std::fs::File::open(tool.dir.path().join("image.tar")).expect("an archive");
    let mut pipe = Command::new("cat").stdin(image).stdout(Stdio::piped()).spawn().expect("cat runs");
    let mut import = tool.command(&["image", "import", "--name", "b:1", "-"]);
    let imported = import.stdin(pipe.stdout.take().expect("a pipe")).output().expect("the tool runs");
    assert!(pipe.wait().expect("it ends").success());
    assert!(imported.status.success(), "{}", text(&imported.stderr));
    let listed = text(&tool.run(&["image", "ls"]).stdout);
    let digests: BTreeSet<&str> = listed.lines().skip(1).filter_map(|line| line.split_whitespace().nth(1)).collect();
    assert_eq!(digests.len(), 1, "{listed}");
    // One byte of the layer is another.
    let blobs = std::fs::read_dir(layout.join("blobs/sha256")).expect("blobs").flatten();
    let layer = blobs.max_by_key(|blob| blob.metadata().map_or(0, |meta| meta.len())).expect("a layer").path();
    let mut bytes = std::fs::read(&layer).expect("a layer");
    *bytes.iter_mut().find(|byte| **byte == 7).expect("a byte of the file") = 8;
    std::fs::write(&layer, bytes).expect("a layer");
    // A layer that an image of the store has too is not read.
    assert!(tool.run(&["image", "rm", "b:1"]).status.success());
    for how in ["build", "import"] {
        let refused = tool.run(&["image", how, "--name", "c:1", "layout"]);
        let said = text(&refused.stderr);
        assert!(said.starts_with("pagefold: layout: layer 1 ") && said.contains("fetch it again"), "{said}");
    }
}

#[test]
fn an_archive_is_not_read_from_a_terminal() {
    use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
    let tool = Tool::new();
    let keyboard = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).expect("a pseudo-terminal");
    grantpt(&keyboard).and_then(|()| unlockpt(&keyboard)).expect("it is ours");
    let name = ptsname(&keyboard, Vec::new()).expect("its name");
    for how in ["build", "import"] {
        let terminal = std::fs::File::open(name.to_str().expect("ASCII")).expect("the terminal");
        // If the tool reads the terminal all the same, it finds the end of the input.
        rustix::io::write(&keyboard, b"\x04").expect("a key");
        let refused = tool.command(&["image", how, "--name", "a:1", "-"]).stdin(terminal).output().expect("it runs");
        let said = text(&refused.stderr);
        assert!(!refused.status.success() && said.contains("does not come from a terminal"), "{how}: {said}");
    }
}

#[test]
fn an_endless_device_is_refused_as_an_archive() {
    let tool = Tool::new();
    for how in ["build", "import"] {
        for path in ["/dev/zero", "-"] {
            let mut command = Command::new("timeout");
            command.args(["20", env!("CARGO_BIN_EXE_pagefold"), "image", how, "--name", "a:1", path]);
            if how == "import" {
                command.args(["--max-bytes", "1M"]);
            }
            command.env("PAGEFOLD_CONFIG", "none").env("PAGEFOLD_STORE", tool.dir.path().join("store"));
            let zeros = std::fs::File::open("/dev/zero").expect("the device");
            let refused = command.stdin(zeros).output().expect("timeout runs");
            let said = text(&refused.stderr);
            assert_eq!(refused.status.code(), Some(1), "{how} {path}: {said}");
            assert_eq!(
                said,
                format!("pagefold: {path}: a device, from which no archive comes; give a file, or a pipe\n")
            );
        }
    }
}
