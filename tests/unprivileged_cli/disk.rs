//! `pagefold disk`: mount points that cannot be used, and servers that do not end.

use crate::tool::{Tool, text};

#[test]
fn a_forced_umount_does_not_wait_for_a_server_that_never_ends() {
    use std::io::{BufRead, BufReader, Write};
    let tool = Tool::new();
    let (run, at) = (tool.dir.path().join("run"), tool.dir.path().join("at"));
    std::fs::create_dir(&at).expect("a directory");
    std::fs::create_dir(&run).expect("a directory");
    std::fs::set_permissions(&run, std::os::unix::fs::PermissionsExt::from_mode(0o700)).expect("its mode");
    let named = pagefold_disk::control::socket_path(&at.canonicalize().expect("a path"));
    let socket = run.join(named.file_name().expect("a name"));
    let listener = std::os::unix::net::UnixListener::bind(&socket).expect("a socket");
    let status = pagefold_disk::Status { pid: std::process::id(), ..Default::default() };
    std::thread::spawn(move || {
        let mut open = Vec::new();
        for mut stream in listener.incoming().flatten() {
            let mut line = String::new();
            let _ = BufReader::new(&stream).read_line(&mut line);
            if line.starts_with("status") {
                let _ = writeln!(stream, "{}", serde_json::to_string(&status).expect("plain data"));
            } else {
                let _ = writeln!(stream, "{{\"stopping\":true}}");
                open.push(stream);
            }
        }
    });
    let ended = tool.run(&["disk", "umount", "--force", at.to_str().expect("a path")]);
    assert_eq!(ended.status.code(), Some(1));
    let said = text(&ended.stderr);
    assert!(said.contains("does not end; what it had not written back is lost"), "{said}");
}

/// With the path, the cause and the cure; nothing is mounted, and nothing left.
#[test]
fn a_mount_without_a_place_for_its_socket_fails_in_one_line() {
    let tool = Tool::new();
    let long = tool.dir.path().join("l".repeat(100));
    for name in ["images", "mnt"] {
        std::fs::create_dir(tool.dir.path().join(name)).expect("a directory");
    }
    std::fs::write(tool.dir.path().join("images/a"), vec![1; 4096]).expect("a file");
    let below_a_file = std::path::Path::new("/etc/passwd/run");
    for (run, why) in [(long.as_path(), "too long for sockets"), (below_a_file, "Not a directory")] {
        for more in [&[][..], &["--background"]] {
            let mut mount = tool.command(&["disk", "mount", "images", "mnt"]);
            let refused = mount.args(more).env("PAGEFOLD_RUNTIME_DIR", run).output().expect("the tool runs");
            let said = text(&refused.stderr);
            assert_eq!(refused.status.code(), Some(1), "{said}");
            let told = [run.to_str().expect("UTF-8"), why, "; set PAGEFOLD_RUNTIME_DIR to another directory\n"];
            assert!(said.lines().count() == 1 && told.iter().all(|part| said.contains(part)), "{said}");
        }
    }
    assert!(!long.exists());
    let nbd = tool.run(&["disk", "mount", "images", "mnt", "--nbd", &long.display().to_string()]);
    let said = text(&nbd.stderr);
    assert!(said.contains("107 bytes at most; name a shorter one\n") && said.lines().count() == 1, "{said}");
}
