//! `pagefold image export`: what the format cannot hold is reported, and a failure leaves no file.

use crate::tool::{Tool, tellers, text};
use std::process::Command;
use std::time::Duration;

#[test]
fn sockets_left_out_of_an_archive_are_reported() {
    let (tool, _) = tellers("1");
    let _socket = std::os::unix::net::UnixListener::bind(tool.dir.path().join("tree/s")).expect("a socket");
    assert!(tool.run(&["image", "build", "--name", "a:1", "tree"]).status.success());
    for (format, output, said) in
        [("tar", "out.tar", true), ("tar", "-", true), ("oci", "out", true), ("erofs", "e", false)]
    {
        let exported = tool.run(&["image", "export", "--format", format, "a:1", output]);
        assert!(exported.status.success(), "{format}");
        assert_eq!(text(&exported.stderr).contains("1 socket is left out"), said, "{format}");
    }
}

/// The system takes no longer ones, and so most programs that unpack archives do not either.
#[test]
fn paths_that_few_programs_can_unpack_are_reported() {
    let tool = Tool::new();
    // As long as a path may be, and one more, by an archive's one header each.
    let long = |bytes: usize| {
        let path = "0123456789/".repeat(bytes / 11) + &"f".repeat(bytes % 11);
        let record = format!("{} path={path}\n", bytes + 11);
        assert_eq!(record.len(), bytes + 11);
        let header = |kind: u8, size: usize| {
            let mut block = [0; 512];
            block[0] = b'f';
            block[100..107].copy_from_slice(b"0000644");
            block[124..135].copy_from_slice(format!("{size:011o}").as_bytes());
            block[156] = kind;
            block[257..263].copy_from_slice(b"ustar\0");
            block[148..156].fill(b' ');
            let sum: u64 = block.iter().map(|&byte| u64::from(byte)).sum();
            block[148..155].copy_from_slice(format!("{sum:06o}\0").as_bytes());
            block
        };
        let mut bytes = header(b'x', record.len()).to_vec();
        bytes.extend(record.as_bytes());
        bytes.resize(bytes.len().next_multiple_of(512), 0);
        bytes.extend(header(b'0', 0));
        bytes
    };
    for (name, paths, said) in
        [("a:1", &[4095][..], None), ("a:2", &[4095, 4096], Some("1 path has more than 4,095 bytes"))]
    {
        let mut archive: Vec<u8> = paths.iter().flat_map(|&bytes| long(bytes)).collect();
        archive.extend([0; 1024]);
        std::fs::write(tool.dir.path().join("in.tar"), archive).expect("an archive");
        let built = tool.run(&["image", "build", "--name", name, "in.tar"]);
        assert!(built.status.success(), "{}", text(&built.stderr));
        for format in ["tar", "oci", "erofs"] {
            let exported = tool.run(&["image", "export", "--format", format, name, &format!("{name}.{format}")]);
            let notes = text(&exported.stderr);
            assert!(exported.status.success(), "{notes}");
            match said.filter(|_| format != "erofs") {
                Some(said) => assert!(notes.lines().count() == 1 && notes.contains(said), "{format}: {notes}"),
                None => assert_eq!(notes, "", "{name} {format}"),
            }
        }
        let again = tool.run(&["image", "build", "--name", "b:1", &format!("{name}.tar")]);
        assert!(again.status.success(), "{}", text(&again.stderr));
    }
    let listed = text(&tool.run(&["image", "ls"]).stdout);
    let digest = |name: &str| {
        listed.lines().find_map(|line| line.strip_prefix(name)?.split_whitespace().next().map(str::to_owned))
    };
    assert!(digest("b:1").is_some() && digest("b:1") == digest("a:2"), "{listed}");
}

#[test]
fn a_failed_export_leaves_nothing_and_names_its_file() {
    let (tool, _) = tellers("1");
    assert!(tool.run(&["image", "build", "--name", "a:1", "tree"]).status.success());
    let digest = text(&tool.run(&["image", "ls", "a:1", "--json"]).stdout);
    let at = digest.find("\"sha256:").expect("a file with an object") + 8;
    let object = tool.dir.path().join("store/domains/default/objects");
    let object = object.join(&digest[at..at + 2]).join(&digest[at + 2..at + 64]);
    std::fs::remove_file(&object).unwrap_or_else(|error| panic!("{}: {error}", object.display()));
    let names = || {
        let all = std::fs::read_dir(tool.dir.path()).expect("the directory").flatten();
        all.map(|entry| entry.file_name().into_string().expect("UTF-8"))
            .filter(|name| name.starts_with("out"))
            .collect::<Vec<_>>()
    };
    for format in ["tar", "oci", "erofs"] {
        let failed = tool.run(&["image", "export", "--format", format, "a:1", "out"]);
        assert_eq!(failed.status.code(), Some(1), "{format}");
        assert_eq!(names(), [""; 0], "{format}: {}", text(&failed.stderr));
    }
    // What had the name has it still.
    std::fs::write(tool.dir.path().join("out"), "before").expect("a file");
    std::fs::create_dir(tool.dir.path().join("out-dir")).expect("a directory");
    for (format, output) in [("tar", "out"), ("erofs", "out"), ("oci", "out-dir")] {
        assert_eq!(
            tool.run(&["image", "export", "--format", format, "a:1", output]).status.code(),
            Some(1),
            "{format}"
        );
        assert_eq!(std::fs::read(tool.dir.path().join("out")).expect("it is there"), b"before", "{format}");
    }
    assert_eq!(std::fs::read_dir(tool.dir.path().join("out-dir")).expect("it is there").count(), 0);
    // Killed where it waits for an object that does not come.
    assert!(Command::new("mkfifo").arg(&object).status().expect("mkfifo runs").success());
    for (format, half) in [("tar", "out."), ("erofs", "out."), ("oci", "out-dir/blobs/sha256/.layer")] {
        let output = if format == "oci" { "out-dir" } else { "out" };
        let mut child = tool.command(&["image", "export", "--format", format, "a:1", output]).spawn().expect("it runs");
        let began = std::time::Instant::now();
        let begun = || match format {
            "oci" => tool.dir.path().join(half).exists(),
            _ => names().iter().any(|name: &String| name.starts_with(half)),
        };
        while !begun() && began.elapsed() < Duration::from_secs(60) {
            std::thread::sleep(Duration::from_millis(5));
        }
        child.kill().and_then(|()| child.wait()).expect("it ends");
        assert_eq!(std::fs::read(tool.dir.path().join("out")).expect("it is there"), b"before", "{format}");
        assert!(!tool.dir.path().join("out-dir/index.json").exists(), "{format}");
        names().iter().filter(|name| name.starts_with("out.")).for_each(|name| {
            std::fs::remove_file(tool.dir.path().join(name)).expect("a half");
        });
    }
    std::fs::remove_file(&object).expect("a pipe");
    let full = tool.run(&["image", "export", "a:1", "/dev/full"]);
    assert!(std::path::Path::new("/dev/full").exists());
    assert_eq!(full.status.code(), Some(1));
}
