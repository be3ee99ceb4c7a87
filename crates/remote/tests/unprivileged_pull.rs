//! Pulls from registries that work, fail and lie.

mod common;
#[path = "../../../tests/common/executable.rs"]
mod executable;

use common::{
    Answer, Host, Image, Request, Server, answer, digest, failed, honest, host_architecture, image, image_for, layer,
    noise, ok, wait_until,
};
use pagefold_image::gc;
use pagefold_image::stat;
use serde_json::json;
use std::fs;
use std::process::Stdio;
use std::sync::Arc;

/// Two versions of an image: one base of two layers, and a layer of each version's own.
fn versions() -> (Image, Image) {
    let base = layer(&[("etc/os", b"os"), ("lib/base", &noise(1, 300_000)), ("app", b"old")]);
    let middle = layer(&[("lib/.wh.none", b""), ("lib/middle", &noise(2, 100_000))]);
    let own = |number: u32| layer(&[("app", &noise(10 + number, 50_000)), (".wh.etc", b"")]);
    (image(&[base.clone(), middle.clone(), own(1)]), image(&[base, middle, own(2)]))
}

fn serves(image: &Image) -> Server {
    let image = image.clone();
    Server::start(move |request, _| honest(request, &[("v1", &image)]))
}

/// A registry in which the requests for blob `name` get an answer of their own, as long as there is one.
fn serves_but(
    image: &Image,
    name: &str,
    other: impl Fn(&[u8], &Request, usize) -> Option<Answer> + Send + Sync + 'static,
) -> Server {
    let (image, name) = (image.clone(), name.to_string());
    Server::start(move |request, before| {
        let is_it = request.path.ends_with(&name);
        let own = if is_it { other(&image.blobs[&name], request, before) } else { None };
        own.unwrap_or_else(|| honest(request, &[("v1", &image)]))
    })
}

/// No image has come, and the store is whole.
fn assert_unchanged(host: &Host) {
    let store = host.store();
    assert!(store.images().unwrap().is_empty());
    assert!(stat::verify(&store, &[], false).unwrap().damaged.is_empty());
}

#[test]
fn layers_that_the_store_knows_are_not_fetched() {
    let (first, second) = versions();
    let (one, two) = (first.clone(), second.clone());
    let server = Server::start(move |request, _| honest(request, &[("v1", &one), ("v2", &two)]));
    let host = Host::new();
    let pulled = ok(&host.pull(&server, "v1"));
    assert_eq!((&pulled["layers_known"], &pulled["layers_fetched"]), (&json!(0), &json!(3)));
    assert_eq!(pulled["manifest"], digest(&first.manifest));
    assert_eq!(host.file("v1", "lib/base").unwrap(), noise(1, 300_000));
    assert_eq!(host.file("v1", "app").unwrap(), noise(11, 50_000));
    assert!(host.file("v1", "etc/os").is_none(), "the top layer deletes it");
    assert!(host.downloads().is_empty(), "{:?}", host.downloads());

    server.forget();
    let pulled = ok(&host.pull(&server, "v2"));
    assert_eq!((&pulled["layers_known"], &pulled["layers_fetched"]), (&json!(2), &json!(1)));
    let new = [&second.layers[2], &second.config].map(|name| second.blobs[name].len()).iter().sum::<usize>();
    assert_eq!(pulled["bytes_fetched"], new + second.manifest.len(), "the new layer and the documents");
    for known in &second.layers[..2] {
        assert!(server.asked_for(known).is_empty(), "{known}");
    }
    assert_eq!(host.file("v2", "app").unwrap(), noise(12, 50_000));
    // A pull that knows nothing gives the same tree.
    let other = Host::new();
    assert_eq!(ok(&other.pull(&server, "v2"))["digest"], pulled["digest"]);

    server.forget();
    let again = ok(&host.pull(&server, "v2"));
    assert_eq!((&again["layers_fetched"], &again["digest"]), (&json!(0), &pulled["digest"]));
    assert!(second.layers.iter().all(|layer| server.asked_for(layer).is_empty()));
}

#[test]
fn known_layers_outlive_a_collection_and_the_image_that_brought_them() {
    let (first, second) = versions();
    let (one, two) = (first.clone(), second.clone());
    let server = Server::start(move |request, _| honest(request, &[("v1", &one), ("v2", &two)]));
    let host = Host::new();
    ok(&host.pull(&server, "v1"));
    ok(&host.pull(&server, "v2"));
    let store = host.store();
    store.remove("v1").unwrap();
    let collected = gc::collect(&store, false).unwrap();
    assert!(collected.objects_removed > 0, "the first version's own file");
    assert_eq!(ok(&host.pull(&server, "v1"))["layers_known"], 2);
    for name in ["v1", "v2"] {
        store.remove(name).unwrap();
    }
    let collected = gc::collect(&store, false).unwrap();
    assert_eq!((collected.objects_kept, collected.trees_kept), (0, 0), "{collected:?}");
    let pulled = ok(&host.pull(&server, "v1"));
    assert_eq!((&pulled["layers_known"], &pulled["layers_fetched"]), (&json!(0), &json!(3)));
}

#[test]
fn a_damaged_object_makes_its_layers_unknown() {
    let (first, second) = versions();
    let (one, two) = (first.clone(), second.clone());
    let server = Server::start(move |request, _| honest(request, &[("v1", &one), ("v2", &two)]));
    let host = Host::new();
    ok(&host.pull(&server, "v1"));
    let store = host.store();
    // The base's own object: all three trees have it.
    let base = noise(1, 300_000);
    fs::write(store.object_path(&pagefold_image::digest::Digest::of(&base)), "damaged").unwrap();
    let pulled = ok(&host.pull(&server, "v2"));
    assert_eq!((&pulled["layers_known"], &pulled["layers_fetched"]), (&json!(0), &json!(3)));
    assert_eq!(host.file("v2", "lib/base").unwrap(), base);
    assert!(stat::verify(&store, &[], false).unwrap().damaged.is_empty());
}

#[test]
fn blobs_with_another_digest_are_refused() {
    let (first, _) = versions();
    for name in [&first.layers[1], &first.config] {
        let server = serves_but(&first, name, |blob, _, _| {
            let mut blob = blob.to_vec();
            let middle = blob.len() / 2;
            blob[middle] ^= 1;
            Some(answer(200, &blob))
        });
        let host = Host::new();
        let error = failed(&host.pull(&server, "v1"));
        assert!(error.contains("digest is sha256:") && error.contains(name.as_str()), "{error}");
        assert_unchanged(&host);
        assert!(!host.downloads().iter().any(|(file, bytes)| name.ends_with(file.as_str()) && *bytes > 0));
    }
}

#[test]
fn a_manifest_with_another_digest_is_refused() {
    let (first, second) = versions();
    let host = Host::new();
    let named = digest(&first.manifest);
    // The registry says that the other manifest is this one.
    let (image, named_there) = (second.clone(), named.clone());
    let server = Server::start(move |request, _| match request.path.ends_with(&named_there) {
        true => answer(200, &image.manifest),
        false => honest(request, &[("v2", &image)]),
    });
    let reference = format!("{}/app@{named}", server.host);
    let error = failed(&host.command("pull", "x", &reference).output().unwrap());
    assert!(error.contains(&named) && error.contains("manifest: digest is"), "{error}");
    assert_unchanged(&host);
}

#[test]
fn a_layer_that_unpacks_to_another_digest_is_refused_and_not_kept() {
    let (mut first, second) = versions();
    let mut config: serde_json::Value = serde_json::from_slice(&first.blobs[&first.config]).unwrap();
    config["rootfs"]["diff_ids"][1] = json!(digest(b"something else"));
    let config = serde_json::to_vec(&config).unwrap();
    let text = String::from_utf8(first.manifest.clone()).unwrap();
    let length = first.blobs[&first.config].len();
    assert_eq!(length, config.len());
    first.manifest = text.replace(&first.config, &digest(&config)).into_bytes();
    first.config = digest(&config);
    first.blobs.insert(first.config.clone(), config);
    let host = Host::new();
    let error = failed(&host.pull(&serves(&first), "v1"));
    assert!(error.contains("layer 2") && error.contains(&digest(b"something else")), "{error}");
    assert_unchanged(&host);
    assert!(host.downloads().len() < 3, "what was unpacked is not kept: {:?}", host.downloads());
    drop(second);
}

#[test]
fn a_layer_goes_on_where_a_broken_connection_has_ended() {
    let (first, _) = versions();
    let name = &first.layers[0];
    let size = first.blobs[name].len();
    for stalls in [false, true] {
        let server = serves_but(&first, name, move |blob, _, before| {
            let cut = Answer { sent: Some(blob.len() / 2), stalls, ..answer(200, blob) };
            (before == 0).then_some(cut)
        });
        let host = Host::impatient();
        let pulled = ok(&host.pull(&server, "v1"));
        let asked = server.asked_for(name);
        assert_eq!(asked.len(), 2, "{asked:?}");
        assert_eq!(asked[1].header("range"), Some(format!("bytes={}-", size / 2).as_str()));
        let all: usize = first.blobs.values().map(Vec::len).sum::<usize>() + first.manifest.len();
        assert_eq!(pulled["bytes_fetched"], all, "no byte twice");
        assert_eq!(host.file("v1", "lib/base").unwrap(), noise(1, 300_000));
    }
}

#[test]
fn a_registry_that_sends_no_parts_is_asked_again_for_the_whole() {
    let (first, _) = versions();
    let name = &first.layers[0];
    let server = serves_but(&first, name, |blob, _, before| {
        Some(Answer { sent: (before == 0).then_some(blob.len() / 2), ..answer(200, blob) })
    });
    let host = Host::new();
    ok(&host.pull(&server, "v1"));
    assert_eq!(server.asked_for(name).len(), 2);
    assert_eq!(host.file("v1", "lib/base").unwrap(), noise(1, 300_000));
}

#[test]
fn a_busy_registry_is_asked_again_and_an_absent_one_named() {
    let (first, _) = versions();
    let image = first.clone();
    // Each path fails at first, the manifest and the configuration too.
    let server = Server::start(move |request, before| match before {
        0 => answer(503, b"busy"),
        _ => honest(request, &[("v1", &image)]),
    });
    ok(&Host::new().pull(&server, "v1"));

    let host = Host::new();
    let server = serves_but(&first, &first.layers[2], |_, _, _| Some(answer(503, b"busy \x1b[2Jfor ever")));
    let error = failed(&host.pull(&server, "v1"));
    assert!(error.contains("503: busy ?[2Jfor ever") && error.contains(&server.host), "{error:?}");
    assert_unchanged(&host);

    let error = failed(&host.pull(&server, "v9"));
    assert!(error.contains("404: no such image"), "{error}");
    let gone = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let error = failed(&host.command("pull", "x", &format!("{gone}/app:1")).output().unwrap());
    assert!(error.contains(&gone.to_string()) && error.contains("refused"), "{error}");
}

#[test]
fn wrong_lengths_are_found() {
    let (first, _) = versions();
    let name = &first.layers[0];
    // More than there is: the connection ends early, again and again.
    let server = serves_but(&first, name, |blob, _, _| {
        Some(Answer { said_length: Some(blob.len()), sent: Some(blob.len() - 7), ..answer(200, blob) })
    });
    let host = Host::new();
    failed(&host.pull(&server, "v1"));
    assert_unchanged(&host);
    // Less than there is: the last bytes never come.
    let server = serves_but(&first, name, |blob, _, _| Some(Answer { said_length: Some(100), ..answer(200, blob) }));
    let error = failed(&host.pull(&server, "v1"));
    assert!(error.contains("ended after 100 of"), "{error}");
    assert_unchanged(&host);
    // Another blob's end behind it, and bytes without end.
    for endless in [false, true] {
        let server = serves_but(&first, name, move |blob, _, _| {
            Some(Answer { endless, ..answer(200, &[blob, &[0; 1000]].concat()) })
        });
        let host = Host::new();
        let error = failed(&host.pull(&server, "v1"));
        assert!(error.contains("more than the") && error.contains("bytes that the manifest says"), "{error}");
        assert_unchanged(&host);
    }
}

#[test]
fn documents_without_end_take_no_memory() {
    let (first, _) = versions();
    let image = first.clone();
    let server = Server::start(move |request, _| match request.path.contains("/manifests/") {
        true => Answer { endless: true, ..answer(200, &vec![b' '; 1 << 20]) },
        false => honest(request, &[("v1", &image)]),
    });
    let error = failed(&Host::new().pull(&server, "v1"));
    assert!(error.contains("a manifest of more than 4194304 bytes"), "{error}");
    let server = serves_but(&first, &first.config, |_, _, _| {
        Some(Answer { endless: true, ..answer(200, &vec![b' '; 1 << 20]) })
    });
    let error = failed(&Host::new().pull(&server, "v1"));
    assert!(error.contains("that the manifest says"), "{error}");
    let text = String::from_utf8(first.manifest.clone()).unwrap();
    let size = format!("\"size\":{}", first.blobs[&first.config].len());
    let mut large = first.clone();
    large.manifest = text.replace(&size, "\"size\":99999999999").into_bytes();
    let error = failed(&Host::new().pull(&serves(&large), "v1"));
    assert!(error.contains("99999999999 bytes of JSON"), "{error}");
}

#[test]
fn a_login_does_not_follow_to_another_host() {
    let (first, _) = versions();
    let image = first.clone();
    let elsewhere = Server::start_at("127.0.0.2", move |request, _| honest(request, &[("v1", &image)]));
    let (image, other) = (first.clone(), elsewhere.host.clone());
    let login = "Basic dXNlcjpzZWNyZXQtd29yZHM=";
    let server = Server::start(move |request, _| {
        if request.header("authorization") != Some(login) {
            return answer(401, b"{}").with("www-authenticate", "Basic realm=\"app\"");
        }
        match request.path.contains("/blobs/") {
            true => answer(307, b"").with("location", &format!("http://{other}{}?X-Signature=signed", request.path)),
            false => honest(request, &[("v1", &image)]),
        }
    });
    let host = Host::new();
    let error = failed(&host.pull(&server, "v1"));
    assert!(error.contains("401: it wants another login"), "{error}");
    host.log_in(&server.host, "user", "secret-words");
    // The address elsewhere has a query, which ends no path here.
    let pulled = host.pull(&server, "v1");
    let requests = elsewhere.requests();
    assert!(!requests.is_empty());
    assert!(requests.iter().all(|request| request.header("authorization").is_none()), "{requests:?}");
    // The query is a signature: the failed pull does not show it.
    let error = failed(&pulled);
    assert!(!error.contains("signed") && !error.contains("secret"), "{error}");
}

#[test]
fn redirects_lead_to_blobs() {
    let (first, _) = versions();
    let image = first.clone();
    let elsewhere = Server::start_at("127.0.0.2", move |request, _| honest(request, &[("v1", &image)]));
    let (image, other) = (first.clone(), elsewhere.host.clone());
    let server = Server::start(move |request, _| match request.path.contains("/blobs/") {
        true => answer(307, b"").with("location", &format!("http://{other}{}", request.path)),
        false => honest(request, &[("v1", &image)]),
    });
    ok(&Host::new().pull(&server, "v1"));
    assert_eq!(elsewhere.requests().len(), 4);
    // Round and round.
    let image = first.clone();
    let server = Server::start(move |request, _| match request.path.contains("/blobs/") {
        true => answer(307, b"").with("location", &request.path),
        false => honest(request, &[("v1", &image)]),
    });
    failed(&Host::new().pull(&server, "v1"));
}

#[test]
fn tokens_are_asked_for_with_the_login_and_nothing_shows_either() {
    let (first, _) = versions();
    let host = Host::new();
    let tokens = Server::start_at("127.0.0.2", |request, _| {
        let login = request.header("authorization").unwrap_or("none");
        match login == "Basic dXNlcjpzZWNyZXQtd29yZHM=" {
            true => answer(200, br#"{"token": "token-words"}"#),
            // It repeats what it has got.
            false => answer(400, format!("wrong login: {login}").as_bytes()),
        }
    });
    let (image, realm) = (first.clone(), tokens.host.clone());
    let server = Server::start(move |request, _| match request.header("authorization") {
        Some("Bearer token-words") if request.path.ends_with("v9") => {
            answer(400, b"I have got Bearer token-words, dXNlcjpzZWNyZXQtd29yZHM= and secret-words")
        }
        Some("Bearer token-words") => honest(request, &[("v1", &image)]),
        _ => answer(401, b"{}")
            .with("www-authenticate", &format!("Bearer realm=\"http://{realm}/token\",service=\"app\"")),
    });
    host.log_in(&server.host, "user", "other-words");
    let error = failed(&host.pull(&server, "v1"));
    assert!(error.contains("wants another login") && !error.contains("dXNlc"), "{error}");
    host.log_in(&server.host, "user", "secret-words");
    ok(&host.pull(&server, "v1"));
    let error = failed(&host.pull(&server, "v9"));
    assert!(error.contains("I have got Bearer ***, *** and ***"), "{error}");
    assert!(tokens.requests().iter().all(|request| request.path.contains("scope=repository%3Aapp%3Apull")));
}

#[test]
fn a_helper_program_gives_the_login_and_its_words_are_not_shown() {
    let (first, _) = versions();
    let image = first.clone();
    let server = Server::start(move |request, _| match request.header("authorization") {
        Some("Basic dXNlcjpzZWNyZXQtd29yZHM=") => honest(request, &[("v1", &image)]),
        _ => answer(401, b"{}").with("www-authenticate", "Basic realm=\"app\""),
    });
    let host = Host::new();
    let bin = host.dir.path().join("bin");
    fs::create_dir(&bin).unwrap();
    fs::create_dir(host.dir.path().join(".docker")).unwrap();
    let config = json!({ "credHelpers": { server.host.as_str(): "test" } });
    fs::write(host.dir.path().join(".docker/config.json"), config.to_string()).unwrap();
    let pull = |script: &str| {
        let path = bin.join("docker-credential-test");
        executable::script(&format!("#!/bin/sh\nread -r server || :\n{script}\n"), &path);
        let path = std::env::join_paths([bin.clone(), "/bin".into(), "/usr/bin".into()]).unwrap();
        host.command("pull", "v1", &format!("{}/app:v1", server.host)).env("PATH", path).output().unwrap()
    };
    let asked = host.dir.path().join("asked");
    let answer = r#"echo '{"ServerURL":"x","Username":"user","Secret":"secret-words"}'"#;
    ok(&pull(&format!("echo \"$1 $server\" > {}\n{answer}", asked.display())));
    assert_eq!(fs::read_to_string(&asked).unwrap(), format!("get {}\n", server.host));
    for broken in ["echo secret-words; exit 1", "echo secret-words >&2; exit 2", "echo 'secret-words'"] {
        let error = failed(&pull(broken));
        assert!(error.contains("docker-credential-test: ") && !error.contains("secret"), "{error}");
    }
    let error = failed(&pull("echo 'credentials not found in native keychain'; exit 1"));
    assert!(error.contains("wants another login"), "{error}");
}

#[test]
fn the_image_of_the_wanted_platform_is_taken() {
    let one = |name: &str| image_for(name, &[layer(&[("arch", name.as_bytes())])]);
    let other = if host_architecture() == "arm64" { "amd64" } else { "arm64" };
    let (ours, theirs) = (one(host_architecture()), one(other));
    let entry = |image: &Image, architecture: &str| {
        json!({ "mediaType": "application/vnd.oci.image.manifest.v1+json", "digest": digest(&image.manifest),
            "size": image.manifest.len(), "platform": { "os": "linux", "architecture": architecture } })
    };
    let index = json!({ "schemaVersion": 2, "manifests": [entry(&theirs, other), entry(&ours, host_architecture())] });
    let index = Image { manifest: serde_json::to_vec(&index).unwrap(), ..Image::default() };
    let server = Server::start(move |request, _| honest(request, &[("v1", &index), ("a", &ours), ("b", &theirs)]));
    let host = Host::new();
    ok(&host.pull(&server, "v1"));
    assert_eq!(host.file("v1", "arch").unwrap(), host_architecture().as_bytes());
    let reference = format!("{}/app:v1", server.host);
    let pull = |platform: &str| {
        host.command("pull", "other", &reference).arg(format!("--platform={platform}")).output().unwrap()
    };
    let pulled = pull(&format!("linux/{other}"));
    assert_eq!(ok(&pulled)["config"]["platform"], format!("linux/{other}"));
    assert!(String::from_utf8_lossy(&pulled.stderr).contains("do not run on this machine"));
    assert_eq!(host.file("other", "arch").unwrap(), other.as_bytes());
    let error = failed(&pull("linux/s390x"));
    assert!(error.contains("no image for linux/s390x") && error.contains(&format!("linux/{other}")), "{error}");
}

#[test]
fn a_killed_pull_leaves_the_store_whole_and_the_next_goes_on() {
    let (first, _) = versions();
    let name = first.layers[0].clone();
    let half = first.blobs[&name].len() / 2;
    let server = serves_but(&first, &name, move |blob, _, before| {
        (before % 2 == 0).then(|| Answer { sent: Some(half), stalls: true, ..answer(200, blob) })
    });
    let host = Host::new();
    host.log_in(&server.host, "user", "secret-words");
    let file = name.trim_start_matches("sha256:").to_string();
    let killed = || {
        let mut command = host.command("pull", "v1", &format!("{}/app:v1", server.host));
        let mut child = command.stderr(Stdio::null()).stdout(Stdio::null()).spawn().unwrap();
        wait_until("half of the layer comes", || host.downloads().get(&file) == Some(&(half as u64)));
        let words = fs::read(format!("/proc/{}/cmdline", child.id())).unwrap();
        assert!(!String::from_utf8_lossy(&words).contains("secret"));
        child.kill().unwrap();
        child.wait().unwrap();
        assert_unchanged(&host);
    };
    killed();
    let pulled = ok(&host.pull(&server, "v1"));
    let asked = server.asked_for(&name);
    assert_eq!(asked[1].header("range"), Some(format!("bytes={half}-").as_str()));
    assert_eq!(host.file("v1", "lib/base").unwrap(), noise(1, 300_000));
    assert!(pulled["bytes_fetched"].as_u64().unwrap() < first.blobs.values().map(Vec::len).sum::<usize>() as u64);
    assert!(host.downloads().is_empty());
    // What no pull will use, the collector removes.
    host.store().remove("v1").unwrap();
    gc::collect(&host.store(), false).unwrap();
    killed();
    assert!(gc::collect(&host.store(), true).unwrap().other_bytes_removed >= half as u64);
    assert!(!host.downloads().is_empty(), "a dry run removes nothing");
    gc::collect(&host.store(), false).unwrap();
    assert!(host.downloads().is_empty(), "{:?}", host.downloads());
}

#[test]
fn bytes_that_were_lost_after_a_kill_are_fetched_again() {
    let (first, _) = versions();
    let server = serves(&first);
    let host = Host::new();
    let name = &first.layers[0];
    let dir = host.store_path().join("domains/default/downloads");
    drop(host.store());
    fs::create_dir_all(&dir).unwrap();
    // As after a loss of power: the length of the file has reached the disk, its bytes have not.
    let file = dir.join(name.trim_start_matches("sha256:"));
    for left in [1000, first.blobs[name].len(), first.blobs[name].len() + 1000] {
        fs::write(&file, vec![0; left]).unwrap();
        ok(&host.pull(&server, "v1"));
        assert_eq!(host.file("v1", "lib/base").unwrap(), noise(1, 300_000));
        host.store().remove("v1").unwrap();
        gc::collect(&host.store(), false).unwrap();
    }
}

#[test]
fn pulls_at_the_same_time_fetch_each_layer_once() {
    let (first, second) = versions();
    let (one, two) = (first.clone(), second.clone());
    let server = Arc::new(Server::start(move |request, _| honest(request, &[("v1", &one), ("v2", &two)])));
    let host = Host::new();
    let children: Vec<_> = (0..8)
        .map(|number| {
            let tag = if number % 2 == 0 { "v1" } else { "v2" };
            let mut command = host.command("pull", &format!("image-{number}"), &format!("{}/app:{tag}", server.host));
            command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
        })
        .collect();
    for child in children {
        ok(&child.wait_with_output().unwrap());
    }
    for name in first.layers.iter().chain(&second.layers) {
        assert_eq!(server.asked_for(name).len(), 1, "{name}");
    }
    assert_eq!(host.store().images().unwrap().len(), 8);
    assert!(stat::verify(&host.store(), &[], false).unwrap().damaged.is_empty());
    assert!(host.downloads().is_empty());
}
