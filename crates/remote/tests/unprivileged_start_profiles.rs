//! What `image exec --record-profile` has learned on one host goes to another with a push and a pull.

mod common;

use common::{Answer, Host, Request, Server, answer, digest, noise, ok};
use pagefold_image::build::{self, Omissions};
use pagefold_image::digest::Digest;
use pagefold_image::profile::Profile;
use pagefold_image::progress::Progress;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::sync::{Arc, Mutex};

const KIND: &str = "application/vnd.pagefold.start-profile.v1+json";

/// What a registry has: blobs, and manifests by digest and tag.
#[derive(Default)]
struct Content {
    blobs: BTreeMap<String, Vec<u8>>,
    manifests: BTreeMap<String, Vec<u8>>,
}

impl Content {
    /// What a registry that lists what refers to a manifest answers, and one that does not.
    fn answer(&mut self, request: &Request, lists: bool) -> Answer {
        let (path, query) = request.path.split_once('?').unwrap_or((&request.path, ""));
        let name = path.rsplit('/').next().unwrap();
        match (request.method.as_str(), path.split('/').nth(3).unwrap_or_default()) {
            ("GET", "") => answer(200, b"{}"),
            ("POST", _) => answer(202, b"").with("location", "/v2/app/blobs/uploads/one"),
            ("PUT", "blobs") => {
                self.blobs.insert(digest(&request.body), request.body.clone());
                answer(201, b"").with("location", &format!("/v2/app/blobs/{}", digest(&request.body)))
            }
            ("PUT", _) => {
                self.manifests.insert(name.into(), request.body.clone());
                self.manifests.insert(digest(&request.body), request.body.clone());
                answer(201, b"").with("location", path)
            }
            (_, "referrers") if lists => {
                assert_eq!(query, format!("artifactType={}", KIND.replace('+', "%2B")));
                answer(200, self.referrers(name).to_string().as_bytes())
            }
            (_, "manifests") => self.manifests.get(name).map_or(answer(404, b"{}"), |bytes| answer(200, bytes)),
            (_, "blobs") => self.blobs.get(name).map_or(answer(404, b"{}"), |bytes| answer(200, bytes)),
            _ => answer(404, b"404 page not found"),
        }
    }

    fn referrers(&self, subject: &str) -> Value {
        let mut entries = BTreeMap::new();
        for bytes in self.manifests.values() {
            let manifest: Value = serde_json::from_slice(bytes).unwrap();
            if manifest["subject"]["digest"] == subject {
                let entry = json!({ "mediaType": manifest["mediaType"], "digest": digest(bytes), "size": bytes.len(),
                    "artifactType": manifest["artifactType"], "annotations": manifest["annotations"] });
                entries.insert(digest(bytes), entry);
            }
        }
        json!({ "schemaVersion": 2, "mediaType": "application/vnd.oci.image.index.v1+json",
            "manifests": entries.into_values().collect::<Vec<_>>() })
    }
}

fn start(lists: bool) -> (Server, Arc<Mutex<Content>>) {
    let content = Arc::new(Mutex::new(Content::default()));
    let own = content.clone();
    (Server::start(move |request, _| own.lock().unwrap().answer(request, lists)), content)
}

/// Builds the image `app`; returns the digest of its tree.
fn build(host: &Host) -> Digest {
    let dir = host.dir.path().join("tree");
    fs::create_dir(&dir).unwrap();
    fs::write(dir.join("app"), noise(1, 100_000)).unwrap();
    let store = host.store();
    let (build, mut notes) = (store.build().unwrap(), Omissions::default());
    let tree = build::from_directory(&build, &dir, Default::default(), &mut notes, &Progress::silent()).unwrap();
    build.publish("app", &tree, "test", Default::default(), notes.lines()).unwrap().digest
}

/// Keeps that a start reads so many bytes of the program.
fn record(host: &Host, image: &Digest, bytes: u64) -> Profile {
    let object = digest(&noise(1, 100_000)).replace("sha256:", "");
    let files = json!([{ "path": "app", "object": object, "parts": [[0, bytes]] }]);
    let profile = Profile::from_outside(&json!({ "format": 1, "files": files })).unwrap();
    profile.save(&host.store(), image).unwrap();
    profile
}

fn push(host: &Host, server: &Server) -> Value {
    ok(&host.command("push", "app", &format!("{}/app:v1", server.host)).output().unwrap())
}

#[test]
fn a_profile_goes_with_the_image() {
    for lists in [true, false] {
        let (server, content) = start(lists);
        let here = Host::new();
        let image = build(&here);
        assert_eq!(push(&here, &server)["start_profile"], false);
        let early = Host::new();
        assert_eq!(ok(&early.pull(&server, "v1"))["start_profile"], false);

        let profile = record(&here, &image, 4096);
        let pushed = push(&here, &server);
        assert_eq!((&pushed["start_profile"], &pushed["blobs_uploaded"]), (&json!(true), &json!(0)));
        let before = content.lock().unwrap().manifests.clone();
        push(&here, &server);
        assert_eq!(content.lock().unwrap().manifests, before, "the same again");
        // With the image, and to a host that has it already.
        for host in [&Host::new(), &early] {
            let pulled = ok(&host.pull(&server, "v1"));
            assert_eq!((&pulled["digest"], &pulled["start_profile"]), (&json!(image.to_string()), &json!(true)));
            assert_eq!(Profile::load(&host.store(), &image), Some(profile.clone()), "listed: {lists}");
        }
        // What this host has recorded itself it knows better, and asks for nothing.
        let own = record(&early, &image, 8192);
        server.forget();
        ok(&early.pull(&server, "v1"));
        assert_eq!(Profile::load(&early.store(), &image), Some(own));
        assert!(!server.requests().iter().any(|request| request.path.contains("referrers")));
    }
}

#[test]
fn a_later_profile_replaces_an_earlier_one_and_nothing_of_others() {
    for lists in [true, false] {
        let (server, content) = start(lists);
        let here = Host::new();
        let image = build(&here);
        let manifest = push(&here, &server)["manifest"].as_str().unwrap().to_string();
        let tag = manifest.replace(':', "-");
        let signature = json!({ "mediaType": "application/vnd.oci.image.manifest.v1+json", "digest": digest(b"s"),
            "size": 1, "artifactType": "application/vnd.example.signature", "unknown": [1] });
        if !lists {
            let list = json!({ "schemaVersion": 2, "manifests": [signature] });
            content.lock().unwrap().manifests.insert(tag.clone(), list.to_string().into_bytes());
        }
        record(&here, &image, 4096);
        push(&here, &server);
        let later = record(&here, &image, 12_288);
        let file = here.store_path().join("domains/default/trees").join(format!("{}.start", image.hex()));
        let time = fs::metadata(&file).unwrap().modified().unwrap() + std::time::Duration::from_secs(60);
        fs::File::options().write(true).open(&file).unwrap().set_modified(time).unwrap();
        push(&here, &server);
        let there = Host::new();
        ok(&there.pull(&server, "v1"));
        assert_eq!(Profile::load(&there.store(), &image), Some(later));
        if !lists {
            let list: Value = serde_json::from_slice(&content.lock().unwrap().manifests[&tag]).unwrap();
            assert_eq!(list["manifests"].as_array().unwrap().len(), 2, "{list:#}");
            assert_eq!(list["manifests"][0], signature);
        }
    }
}

/// The image comes whatever the registry says of its profile, and a note says what was wrong.
#[test]
fn a_registry_that_lies_about_a_profile_loses_the_profile_only() {
    let (server, content) = start(true);
    let here = Host::new();
    let image = build(&here);
    record(&here, &image, 4096);
    push(&here, &server);
    let right = content.lock().unwrap().manifests.clone();
    let (name, artifact) = right
        .iter()
        .map(|(name, bytes)| (name, serde_json::from_slice::<Value>(bytes).unwrap()))
        .find(|(_, manifest)| manifest["artifactType"] == KIND)
        .unwrap();
    let blob = artifact["layers"][0]["digest"].as_str().unwrap().to_string();
    let profile = content.lock().unwrap().blobs[&blob].clone();
    let other = |change: &dyn Fn(&mut Value)| {
        let mut artifact = artifact.clone();
        change(&mut artifact);
        artifact.to_string().into_bytes()
    };
    // The artifact's manifest, the blob, and what the note says.
    let cases: [(Vec<u8>, Vec<u8>, &str); 6] = [
        (b"{}".to_vec(), profile.clone(), "is no start profile"),
        (other(&|artifact| artifact["layers"] = json!([])), profile.clone(), "is no start profile"),
        (other(&|artifact| artifact["layers"][0]["size"] = 1.into()), profile.clone(), "more than the 1 bytes"),
        (other(&|artifact| artifact["layers"][0]["size"] = (1u64 << 40).into()), profile.clone(), "bytes of JSON"),
        (other(&|_| ()), b"[]".to_vec(), "expected"),
        (other(&|artifact| artifact["config"] = json!({})), Vec::new(), "expected"),
    ];
    for (number, (manifest, bytes, words)) in cases.iter().enumerate() {
        let mut changed = content.lock().unwrap();
        changed.manifests.remove(name);
        changed.manifests.insert(digest(manifest), manifest.clone());
        // The list is what the registry says it is.
        let list = json!({ "manifests": [{ "artifactType": KIND, "digest": digest(manifest), "size": 1 }] });
        changed.blobs.insert(blob.clone(), bytes.clone());
        drop(changed);
        let own = content.clone();
        let list = list.to_string().into_bytes();
        let liar = Server::start(move |request, _| match request.path.contains("/referrers/") {
            true => answer(200, &list),
            false => own.lock().unwrap().answer(request, true),
        });
        let there = Host::new();
        let output = there.pull(&liar, "v1");
        assert_eq!(ok(&output)["start_profile"], false, "{number}");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(said.contains("came without its start profile") && said.contains(words), "{number}: {said}");
        assert_eq!(said.lines().count(), 1, "{said}");
        assert_eq!(there.file("v1", "app").unwrap(), noise(1, 100_000));
        assert!(Profile::load(&there.store(), &image).is_none());
    }
    // A list that is none; one without end; a server that is busy with it.
    let answers = [answer(200, b"<html>"), Answer { endless: true, ..answer(200, &[b' '; 65536]) }, answer(503, b"")];
    for (wrong, is_said) in answers.into_iter().zip([true, true, false]) {
        let own = content.clone();
        let liar = Server::start(move |request, _| match request.path.contains("/referrers/") {
            true => wrong.clone(),
            false => own.lock().unwrap().answer(request, true),
        });
        let there = Host::new();
        let output = there.pull(&liar, "v1");
        assert_eq!(ok(&output)["start_profile"], false);
        assert_eq!(!output.stderr.is_empty(), is_said, "{}", String::from_utf8_lossy(&output.stderr));
    }
}

#[test]
fn a_registry_that_takes_no_artifacts_takes_the_image() {
    let content = Arc::new(Mutex::new(Content::default()));
    let own = content.clone();
    let server = Server::start(move |request, _| {
        let is_artifact = request.method == "PUT" && String::from_utf8_lossy(&request.body).contains("artifactType");
        if is_artifact { answer(400, b"{}") } else { own.lock().unwrap().answer(request, true) }
    });
    let here = Host::new();
    let image = build(&here);
    record(&here, &image, 4096);
    let output = here.command("push", "app", &format!("{}/app:v1", server.host)).output().unwrap();
    assert_eq!(ok(&output)["start_profile"], false);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("is pushed, its start profile is not") && said.contains("400"), "{said}");
    assert_eq!(ok(&Host::new().pull(&server, "v1"))["digest"], image.to_string());
}
