//! Stores and mounts of plain users.

use crate::fixture::{PlainUser, Scratch, alone, noise, rootless_refused, runnable, said};
use pagefold_image::store::Store;
use rustix::fs::{CWD, FileType, Mode};
use std::fs;
use std::io::Read;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

#[test]
fn a_plain_user_mounts_in_a_user_namespace() {
    let _alone = alone();
    let Some(scratch) = Scratch::new() else { return };
    let user = PlainUser::with(&scratch, |tree| {
        fs::write(tree.join("shadow"), noise(21, 5000)).unwrap();
        fs::set_permissions(tree.join("shadow"), fs::Permissions::from_mode(0o000)).unwrap();
    });
    let out = user.mounts().output().unwrap();
    let text = said(&out);
    if !out.status.success() && rootless_refused(&text) {
        return;
    }
    assert!(text.contains("MOUNTED Directory true") && text.contains("TOOL true"), "{text}");
    assert!(text.contains("DAMAGED []"), "{text}");
    // Each kind of thing that a plain user cannot have is reported once.
    for note in ["device nodes are missing", "files show your own user", "attributes are missing"] {
        assert!(text.contains(note), "{note}: {text}");
    }
    // Outside of the namespace the user may not read a file of mode 000, even as its owner.
    let out =
        user.runs("children::child_that_verifies", &[]).env("PAGEFOLD_TEST_VERIFY", &user.store).output().unwrap();
    assert!(said(&out).contains("DAMAGED []"), "{}", said(&out));
}

#[test]
fn devices_that_exec_provides_are_not_reported_missing() {
    let _alone = alone();
    let Some(scratch) = Scratch::new() else { return };
    // The sample has two devices elsewhere.
    let user = PlainUser::with(&scratch, |tree| {
        runnable(tree);
        let (kind, device) = (FileType::CharacterDevice, rustix::fs::makedev(1, 3));
        rustix::fs::mknodat(CWD, tree.join("dev/null"), kind, Mode::RUSR, device).unwrap();
    });
    let mut exec = user.runs("children::child_that_execs", &["-Urm"]);
    exec.env("PAGEFOLD_TEST_EXEC", format!("{}\nuser\nro\n: </dev/null && echo ran", user.store.display()));
    let out = exec.output().unwrap();
    let text = said(&out);
    if !out.status.success() && rootless_refused(&text) {
        return;
    }
    assert!(
        text.contains("ran") && text.contains("note: device nodes are missing: making them needs root (2)"),
        "{text}"
    );
    assert!(!text.contains("missing in /dev"), "{text}");
}

#[test]
fn the_store_of_another_user_is_refused() {
    let Some(scratch) = Scratch::new() else { return };
    let root = scratch.dir("store");
    let give = |path: &Path, user| std::os::unix::fs::lchown(path, Some(user), Some(user)).unwrap();
    // The owner of the directory is not the owner of the store.
    give(&root, 65534);
    Store::open(&root, "default").unwrap();
    let format = root.join("pagefold-image-store");
    for top in [65534, 0] {
        give(&root, top);
        Store::open(&root, "default").unwrap();
        give(&format, 65534);
        for domain in ["default", "new"] {
            let error = Store::open(&root, domain).unwrap_err().to_string();
            assert!(error.contains("store of user 65534"), "{error}");
        }
        assert_eq!(fs::read_dir(&root).unwrap().count(), 2, "the format and the domains");
        assert!(!root.join("domains/new").exists());
        give(&format, 0);
    }
    // A link to a file of root's does not make the store root's.
    let own = scratch.dir("own").join("format");
    fs::rename(&format, &own).unwrap();
    symlink(&own, &format).unwrap();
    give(&format, 65534);
    Store::open(&root, "default").unwrap_err();
}

#[test]
fn namespaces_with_different_id_maps_have_separate_metadata() {
    let _alone = alone();
    let Some(scratch) = Scratch::new() else { return };
    let user = PlainUser::with(&scratch, |tree| {
        fs::write(tree.join("private"), noise(20, 5000)).unwrap();
        fs::set_permissions(tree.join("private"), fs::Permissions::from_mode(0o600)).unwrap();
        std::os::unix::fs::chown(tree.join("private"), Some(33), Some(33)).unwrap();
    });
    // In both orders: the directory made by the first is not used by the other.
    for (maps, owner) in [("0 65534 1\n1 100000 60000", 33), ("0 65534 1", 0), ("0 65534 1\n1 100000 60000", 33)] {
        // The child becomes root by an exec after the ids are mapped, which this process does.
        let script = "echo ready; read line; exec \"$0\" --exact children::child_that_looks_at_owners --nocapture";
        let mut child = Command::new("unshare")
            .args(["-Um", "sh", "-c", script])
            .arg(&user.program)
            .env("PAGEFOLD_TEST_OWNERS", format!("{}\n{}", user.store.display(), user.at.display()))
            .uid(65534)
            .gid(65534)
            .current_dir("/")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let ready = child.stdout.as_mut().unwrap().read_exact(&mut [0; 6]).is_ok();
        for file in ["uid_map", "gid_map"].iter().filter(|_| ready) {
            fs::write(format!("/proc/{}/{file}", child.id()), maps).unwrap();
        }
        drop(child.stdin.take());
        let out = child.wait_with_output().unwrap();
        let text = said(&out);
        if rootless_refused(&text) {
            return;
        }
        assert!(text.contains(&format!("OWNER {owner} Ok(true)")), "{maps}: {text}");
    }
}
