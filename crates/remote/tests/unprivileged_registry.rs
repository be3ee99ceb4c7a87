//! Pushes to and pulls from the registry that the distribution has.

mod common;

use common::{Host, failed, ok, wait_until};
use pagefold_image::build::{self, Omissions};
use pagefold_image::profile::Profile;
use pagefold_image::progress::Progress;
use pagefold_image::stat;
use serde_json::json;
use std::fs;
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::process::{Child, Command, Stdio};

/// The login of the registry, as bcrypt has it: user, secret-words.
const LOGIN: &str = "user:$2y$04$/qHful9wn9rPT6bI18B9.u4NH58e2kwsRxfJdR4VEkhyhpftg.kTq\n";

/// A registry of this test alone.
struct Registry {
    host: String,
    child: Child,
    _dir: tempfile::TempDir,
}

impl Registry {
    /// `None` after saying why there is none.
    fn start() -> Option<Self> {
        let dir = tempfile::tempdir().unwrap();
        // Free at this moment; if another process takes it first, the registry ends and the test with it.
        let host = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
        let at = |name: &str| dir.path().join(name).display().to_string();
        fs::write(at("logins"), LOGIN).unwrap();
        let config = json!({
            "version": 0.1,
            "log": { "level": "error" },
            "storage": { "filesystem": { "rootdirectory": at("data") } },
            "http": { "addr": host, "secret": "of this test" },
            "auth": { "htpasswd": { "realm": "test", "path": at("logins") } },
        });
        // YAML includes JSON.
        fs::write(at("config.yml"), config.to_string()).unwrap();
        let mut command = Command::new("docker-registry");
        command.args(["serve", &at("config.yml")]).stdout(Stdio::null()).stderr(Stdio::null());
        let mut child = match command.spawn() {
            Ok(child) => child,
            Err(error) => {
                println!("SKIPPED: docker-registry: {error}");
                return None;
            }
        };
        wait_until("the registry listens", || {
            assert!(child.try_wait().unwrap().is_none(), "the registry has ended");
            TcpStream::connect(&host).is_ok()
        });
        Some(Self { host, child, _dir: dir })
    }

    fn image(&self, name: &str) -> String {
        format!("{}/{name}", self.host)
    }
}

impl Drop for Registry {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn fill(dir: &Path, version: &str) {
    fs::create_dir_all(dir.join("bin")).unwrap();
    fs::write(dir.join("bin/tool"), common::noise(7, 500_000)).unwrap();
    fs::set_permissions(dir.join("bin/tool"), fs::Permissions::from_mode(0o4755)).unwrap();
    fs::hard_link(dir.join("bin/tool"), dir.join("bin/other")).unwrap();
    fs::write(dir.join("version"), version).unwrap();
    fs::write(dir.join("empty"), "").unwrap();
    symlink("bin/tool", dir.join("link")).unwrap();
}

/// Builds the image `name` of a directory with one of each kind of file.
fn build(host: &Host, name: &str, version: &str) -> String {
    let dir = host.dir.path().join(format!("tree-{version}"));
    fill(&dir, version);
    let store = host.store();
    let (build, mut notes) = (store.build().unwrap(), Omissions::default());
    let tree = build::from_directory(&build, &dir, Default::default(), &mut notes, &Progress::silent()).unwrap();
    build.publish(name, &tree, "test", Default::default(), notes.lines()).unwrap().digest.to_string()
}

#[test]
fn a_pushed_image_comes_back_as_the_same_tree() {
    let Some(registry) = Registry::start() else { return };
    let (here, there) = (Host::new(), Host::new());
    let digest = build(&here, "app", "1");
    let reference = registry.image("team/app:1");
    let push = |host: &Host, name: &str, reference: &str| host.command("push", name, reference).output().unwrap();
    let error = failed(&push(&here, "app", &reference));
    assert!(error.contains("wants another login"), "{error}");
    here.log_in(&registry.host, "user", "secret-words");
    there.log_in(&registry.host, "user", "secret-words");
    let pushed = ok(&push(&here, "app", &reference));
    assert_eq!((&pushed["blobs_known"], &pushed["blobs_uploaded"]), (&json!(0), &json!(2)));
    let pulled = ok(&there.command("pull", "it", &reference).output().unwrap());
    assert_eq!(pulled["digest"], digest);
    assert_eq!(pulled["manifest"], pushed["manifest"]);
    // By digest too, and nothing is fetched again.
    let by_digest = registry.image(&format!("team/app@{}", pushed["manifest"].as_str().unwrap()));
    let again = ok(&there.command("pull", "again", &by_digest).output().unwrap());
    assert_eq!((&again["digest"], &again["layers_fetched"]), (&json!(digest), &json!(0)));

    // Debian's registry lists nothing that refers to an image: a tag does.
    let store = here.store();
    let image = store.image("app").unwrap().digest;
    let files = json!([{ "path": "bin/tool", "parts": [[0, 4096]] }]);
    let profile = Profile::from_outside(&json!({ "format": 1, "files": files })).unwrap();
    profile.save(&store, &image).unwrap();
    assert_eq!(ok(&push(&here, "app", &reference))["start_profile"], true);
    assert_eq!(ok(&there.command("pull", "it", &reference).output().unwrap())["start_profile"], true);
    assert_eq!(Profile::load(&there.store(), &image), Some(profile));

    // The same tree gives the same bytes, in another store and under another name: the registry has them.
    let pushed_again = ok(&push(&there, "it", &registry.image("team/app:2")));
    assert_eq!((&pushed_again["blobs_known"], &pushed_again["bytes_uploaded"]), (&json!(2), &json!(0)));
    // The platform stands in the configuration, and the pulled image has one.
    assert_eq!(pushed_again["manifest"], pushed["manifest"]);
    let error = failed(&push(&here, "none", &reference));
    assert!(error.contains("no image \"none\""), "{error}");
    assert!(fs::read_dir(here.store_path().join("domains/default/staging")).unwrap().next().is_none());
    assert!(stat::verify(&there.store(), &[], false).unwrap().damaged.is_empty());
}

#[test]
fn skopeo_and_pagefold_read_what_the_other_has_pushed() {
    let Some(registry) = Registry::start() else { return };
    if Command::new("skopeo").arg("--version").stdout(Stdio::null()).status().is_err() {
        println!("SKIPPED: skopeo is not installed");
        return;
    }
    let host = Host::new();
    host.log_in(&registry.host, "user", "secret-words");
    let digest = build(&host, "app", "1");
    ok(&host.command("push", "app", &registry.image("app:1")).output().unwrap());
    let layout = host.dir.path().join("layout");
    let skopeo = |from: &str, to: &str| {
        let mut command = Command::new("skopeo");
        command.args(["--insecure-policy", "copy", "-q", "--src-tls-verify=false", "--dest-tls-verify=false"]);
        // The login that pagefold-remote has used, in the very file.
        command.arg("--authfile").arg(host.dir.path().join("run/containers/auth.json"));
        let output = command.args(["--dest-compress-format=zstd", from, to]).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    };
    skopeo(&format!("docker://{}", registry.image("app:1")), &format!("oci:{}:x", layout.display()));
    skopeo(&format!("oci:{}:x", layout.display()), &format!("docker://{}", registry.image("other:1")));
    let there = Host::new();
    there.log_in(&registry.host, "user", "secret-words");
    let pulled = there.command("pull", "it", &registry.image("other:1")).output().unwrap();
    assert_eq!(ok(&pulled)["digest"], digest);
}

#[test]
fn layers_by_skopeo_with_a_table_come_in_parts() {
    let Some(registry) = Registry::start() else { return };
    let host = Host::new();
    host.log_in(&registry.host, "user", "secret-words");
    let mut digests = Vec::new();
    for version in ["1", "2"] {
        digests.push(build(&host, "app", version));
        ok(&host.command("push", "app", &registry.image(&format!("app:{version}"))).output().unwrap());
        let image = |name: &str| format!("docker://{}", registry.image(&format!("{name}:{version}")));
        let mut command = Command::new("skopeo");
        command.args(["--insecure-policy", "copy", "-q", "--src-tls-verify=false", "--dest-tls-verify=false"]);
        command.arg("--authfile").arg(host.dir.path().join("run/containers/auth.json"));
        command.args(["--dest-compress-format=zstd:chunked", &image("app"), &image("chunked")]);
        match command.output() {
            Ok(output) => assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr)),
            Err(error) => {
                println!("SKIPPED: skopeo: {error}");
                return;
            }
        }
    }
    let pull = |host: &Host, version: &str| {
        host.log_in(&registry.host, "user", "secret-words");
        let reference = registry.image(&format!("chunked:{version}"));
        ok(&host.command("pull", version, &reference).output().unwrap())
    };
    let (parts, whole) = (Host::new(), Host::new());
    let first = pull(&parts, "1");
    assert_eq!((&first["digest"], &first["layers_in_parts"]), (&json!(digests[0]), &json!(0)));
    let second = pull(&parts, "2");
    assert_eq!((&second["digest"], &second["layers_in_parts"]), (&json!(digests[1]), &json!(1)), "{second:#}");
    assert!(second["bytes_fetched"].as_u64().unwrap() < 10_000, "{second:#}");
    assert_eq!(pull(&whole, "2")["digest"], second["digest"]);
    assert!(stat::verify(&parts.store(), &[], false).unwrap().damaged.is_empty());
}
