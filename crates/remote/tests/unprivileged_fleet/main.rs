//! Fleets' stores: in directories, behind web servers, and in a bucket that does as it is told.

#[path = "../common/mod.rs"]
mod common;
mod gc;

use common::fleet::{Fleet, build, part, version, web};
use common::{Answer, Host, Request, Server, answer, digest, failed, noise, ok, wait_until};
use pagefold_image::digest::Digest;
use pagefold_image::fleet::{self, Head, Indexed, Manifest, PIECE, PieceLocation};
use pagefold_image::tree::{Data, FileKind, Inode, Meta, Tree};
use pagefold_image::{erofs, gc as local_gc, stat};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::sync::{Arc, Mutex};

fn run(host: &Host, action: &str, name: &str, address: &str) -> Output {
    host.command(action, name, address).output().unwrap()
}

fn number(value: &Value, name: &str) -> u64 {
    value[name].as_u64().unwrap_or_else(|| panic!("{name} of {value}"))
}

/// One line, which says all of these.
fn says(output: &Output, words: &[&str]) -> String {
    let error = failed(output);
    assert_eq!(error.lines().count(), 1, "{error}");
    words.iter().for_each(|word| assert!(error.contains(word), "{word}: {error}"));
    error
}

/// No image, and nothing in the store is damaged.
fn assert_unchanged(host: &Host) {
    assert!(host.store().images().unwrap().is_empty());
    assert!(stat::verify(&host.store(), &[], false).unwrap().damaged.is_empty());
}

#[test]
fn only_what_the_other_side_lacks_is_moved() {
    let (fleet, here, there) = (Fleet::new(), Host::new(), Host::new());
    let first = build(&here, "one", &version(1));
    let pushed = ok(&run(&here, "push", "one", &fleet.address("app:1")));
    assert_eq!((&pushed["digest"], &pushed["pieces_known"]), (&json!(first), &json!(0)));
    // 200 small files, one of three pieces, two others.
    assert_eq!(number(&pushed, "pieces_uploaded"), 205);
    let packs = fleet.files("pack");
    assert!(packs.len() <= 2 && packs.len() == fleet.files("index").len(), "{packs:?}");
    assert!(packs.iter().all(|pack| fs::metadata(pack).unwrap().len() <= u64::from(fleet::PACK_MAX)));
    for pack in &packs {
        assert_eq!(digest(&fs::read(pack).unwrap()), format!("sha256:{}", pack.file_stem().unwrap().to_str().unwrap()));
    }
    let pulled = ok(&run(&there, "pull", "it", &fleet.address("app:1")));
    assert_eq!((&pulled["digest"], &pulled["objects_known"]), (&json!(first), &json!(0)));
    for (path, bytes) in version(1) {
        assert!(there.file("it", path).unwrap() == bytes, "{path}");
    }

    let second = build(&here, "two", &version(2));
    // The new file, and for 204 objects the manifest with what the tree says of them.
    let most = 100_000 * 105 / 100 + 30_000;
    let pushed = ok(&run(&here, "push", "two", &fleet.address("app:2")));
    assert_eq!((&pushed["pieces_known"], &pushed["pieces_uploaded"]), (&json!(204), &json!(1)));
    let moved = number(&pushed, "bytes_uploaded");
    assert!((100_000..most).contains(&moved), "{moved}");
    let pulled = ok(&run(&there, "pull", "two", &fleet.address("app:2")));
    assert_eq!((&pulled["digest"], &pulled["objects_fetched"]), (&json!(second), &json!(1)));
    let moved = number(&pulled, "bytes_fetched");
    assert!((100_000..most).contains(&moved), "{moved}");
    assert!(there.file("two", "app").unwrap() == noise(12, 100_000));
    // The host that has pulled pushes the same, and there is nothing to move.
    let again = ok(&run(&there, "push", "two", &fleet.address("app:2")));
    assert_eq!(number(&again, "bytes_uploaded"), 0, "{again}");
    assert!(stat::verify(&there.store(), &[], false).unwrap().damaged.is_empty());
}

#[test]
fn a_damaged_object_is_named_and_all_others_stay() {
    let (fleet, here) = (Fleet::new(), Host::new());
    build(&here, "one", &version(1));
    ok(&run(&here, "push", "one", &fleet.address("app:1")));
    for (path, content) in [("app", noise(11, 100_000)), ("lib/large", noise(1, 2 * PIECE as usize + 1000))] {
        let there = Host::new();
        fleet.damage(&content);
        let object = digest(&content);
        says(&run(&there, "pull", "it", &fleet.address("app:1")), &[&object, path, "packs/", "is damaged"]);
        assert_unchanged(&there);
        // The same change again mends it.
        fleet.damage(&content);
        let pulled = ok(&run(&there, "pull", "it", &fleet.address("app:1")));
        assert_eq!((&pulled["objects_fetched"], &pulled["objects_known"]), (&json!(1), &json!(202)));
        assert!(there.file("it", path).unwrap() == content);
    }
}

#[test]
fn objects_of_another_content_are_not_stored() {
    let (fleet, here, there) = (Fleet::new(), Host::new(), Host::new());
    let (honest, other) = (noise(7, 5000), noise(8, 5000));
    build(&here, "one", &[("file", honest.clone())]);
    build(&here, "two", &[("file", other)]);
    for image in ["one", "two"] {
        ok(&run(&here, "push", image, &fleet.address(image)));
    }
    // The manifest of the first image with the locations of the second.
    let at = |image: &str| fleet.0.path().join(format!("images/{image}/latest"));
    let read = |image: &str| fleet::decode_manifest(&fs::read(at(image)).unwrap()).unwrap();
    let mixed = Manifest { packs: read("two").packs, locations: read("two").locations, ..read("one") };
    fs::write(at("mixed"), "").unwrap_or_else(|_| fs::create_dir_all(at("mixed").parent().unwrap()).unwrap());
    fs::write(at("mixed"), fleet::encode_manifest(&mixed)).unwrap();
    // The other pack has it.
    ok(&run(&there, "pull", "it", &fleet.address("mixed")));
    assert_eq!(there.file("it", "file").unwrap(), honest);
    let last = Host::new();
    let packs = fleet.0.path().join("packs");
    fs::remove_file(packs.join(format!("{}.pack", read("one").packs[0].hex()))).unwrap();
    says(&run(&last, "pull", "it", &fleet.address("mixed")), &[&digest(&honest), "file"]);
    assert_unchanged(&last);
}

#[test]
fn a_lost_pack_is_named_and_the_next_push_brings_it_again() {
    let (fleet, here, there) = (Fleet::new(), Host::new(), Host::new());
    build(&here, "one", &version(1));
    ok(&run(&here, "push", "one", &fleet.address("app:1")));
    let pack_of_app = || {
        let is_app =
            |(path, piece): &(PathBuf, Indexed)| piece.object == Digest::of(&noise(11, 100_000)) && path.exists();
        fleet.pieces().into_iter().find(is_app).unwrap().0
    };
    let path = pack_of_app();
    let pack = path.file_name().unwrap().to_str().unwrap();
    fs::remove_file(&path).unwrap();
    says(&run(&there, "pull", "it", &fleet.address("app:1")), &[pack, "is missing"]);
    assert_unchanged(&there);
    let pushed = ok(&run(&here, "push", "one", &fleet.address("app:1")));
    assert!(number(&pushed, "pieces_uploaded") > 0);
    ok(&run(&there, "pull", "it", &fleet.address("app:1")));
    // One that has lost its end loses what was there.
    let (last, path) = (Host::new(), pack_of_app());
    let pack = fs::read(&path).unwrap();
    fs::write(&path, &pack[..pack.len() / 2]).unwrap();
    says(&run(&last, "pull", "it", &fleet.address("app:1")), &["object sha256:"]);
    ok(&run(&here, "push", "one", &fleet.address("app:1")));
    ok(&run(&last, "pull", "it", &fleet.address("app:1")));
    assert!(stat::verify(&last.store(), &[], false).unwrap().damaged.is_empty());
}

#[test]
fn pushes_at_the_same_time_lose_nothing() {
    let fleet = Fleet::new();
    let hosts: Vec<Host> = (0..4).map(|_| Host::new()).collect();
    for (host, number) in hosts.iter().zip(1..) {
        build(host, "image", &version(number));
    }
    let addresses: Vec<String> = (1..=4).map(|number| fleet.address(&format!("app:{number}"))).collect();
    let commands = hosts.iter().zip(&addresses).map(|(host, address)| {
        let mut command = host.command("push", "image", address);
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    });
    let running: Vec<_> = commands.collect();
    for child in running {
        ok(&child.wait_with_output().unwrap());
    }
    let there = Host::new();
    for (address, number) in addresses.iter().zip(1..) {
        ok(&run(&there, "pull", address, address));
        assert!(there.file(address, "app").unwrap() == noise(10 + number, 100_000), "{address}");
    }
}

/// `PAGEFOLD_PULLS=N` starts N pulls at the same time, `PAGEFOLD_PULL_ROUNDS=N` does so N times.
#[test]
fn pulls_and_kills_at_the_same_time_leave_a_whole_store() {
    let setting = |name: &str, usual| std::env::var(name).map_or(usual, |text| text.parse::<u32>().unwrap());
    let (fleet, here, there) = (Fleet::new(), Host::new(), Host::new());
    for number in 1..=2 {
        build(&here, &format!("image-{number}"), &version(number));
        ok(&run(&here, "push", &format!("image-{number}"), &fleet.address(&format!("app:{number}"))));
    }
    let mut dice = noise(99, 4096).into_iter().cycle();
    let mut die = |sides: u8| dice.next().unwrap() % sides;
    let (mut killed, mut done) = (0, 0);
    for round in 0..setting("PAGEFOLD_PULL_ROUNDS", 2) {
        let start = |number| {
            let address = fleet.address(&format!("app:{}", 1 + number % 2));
            let mut command = there.command("pull", &format!("name-{number}"), &address);
            command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
        };
        let running: Vec<_> = (0..setting("PAGEFOLD_PULLS", 8)).map(start).collect();
        // What is collected meanwhile is nothing that a pull has or needs.
        if there.store_path().exists() {
            local_gc::collect(&there.store(), false).unwrap();
        }
        // Half of them are killed, each at a time of its own: so many processes need the longer the more there are.
        let (mut victims, others): (Vec<_>, Vec<_>) = running.into_iter().zip(0..).partition(|_| die(2) == 0);
        for _ in 0..victims.len() {
            std::thread::sleep(std::time::Duration::from_millis(u64::from(die(40))));
            let (mut child, _) = victims.swap_remove(usize::from(die(u8::MAX)) % victims.len());
            child.kill().unwrap();
            let by_signal = std::os::unix::process::ExitStatusExt::signal(&child.wait().unwrap()).is_some();
            *if by_signal { &mut killed } else { &mut done } += 1;
        }
        for (child, number) in others {
            ok(&child.wait_with_output().unwrap());
            done += 1;
            let (path, content) = ("app", noise(11 + number % 2, 100_000));
            assert!(there.file(&format!("name-{number}"), path).unwrap() == content, "round {round}, pull {number}");
        }
        assert!(stat::verify(&there.store(), &[], false).unwrap().damaged.is_empty());
        // Nothing of the killed ones stays, and nothing of the others is lost.
        let store = there.store();
        store.images().unwrap().iter().for_each(|image| drop(store.remove(&image.name)));
        local_gc::collect(&store, false).unwrap();
        let left = |place: &str| fs::read_dir(there.store_path().join("domains/default").join(place)).unwrap().count();
        assert_eq!((left("staging"), left("leases"), left("images")), (0, 0, 0));
        assert_eq!(stat::stat(&store, &[]).unwrap().0.objects, 0);
    }
    println!("{killed} pulls were killed, {done} ended");
}

#[test]
fn other_formats_are_refused_by_name() {
    let (fleet, here, there) = (Fleet::new(), Host::new(), Host::new());
    build(&here, "one", &[("file", noise(3, 5000))]);
    ok(&run(&here, "push", "one", &fleet.address("app:1")));
    let manifest = fleet.0.path().join("images/app/1");
    let index = fleet.files("index").remove(0);
    for path in [&manifest, &index] {
        let mut bytes = fs::read(path).unwrap();
        bytes[7] = b'2';
        fs::write(path, bytes).unwrap();
    }
    says(&run(&there, "pull", "it", &fleet.address("app:1")), &["app:1", "manifest of format 2", "reads format 1"]);
    says(&run(&here, "push", "one", &fleet.address("app:2")), &["pack index of format 2"]);
    fs::write(&manifest, "something else").unwrap();
    says(&run(&there, "pull", "it", &fleet.address("app:1")), &["not a manifest of pagefold"]);
    assert!(!there.store_path().exists(), "nothing to store");
}

#[test]
fn manifests_that_lie_are_refused() {
    let (fleet, here, there) = (Fleet::new(), Host::new(), Host::new());
    build(&here, "one", &[("file", noise(3, 5000))]);
    ok(&run(&here, "push", "one", &fleet.address("app:1")));
    let path = fleet.0.path().join("images/app/1");
    let whole = fleet::decode_manifest(&fs::read(&path).unwrap()).unwrap();
    let head = |change: fn(&mut Head)| {
        let mut manifest = whole.clone();
        change(&mut manifest.head);
        manifest
    };
    let place = PieceLocation { pack: 0, offset: 0, packed: 1 };
    for (manifest, word) in [
        (head(|head| head.tree = Digest::of(b"other")), "digest is"),
        (head(|head| head.tree_bytes += 1), "damaged"),
        (head(|head| head.tree_bytes = u64::MAX), "are allowed"),
        (Manifest { locations: vec![], ..whole.clone() }, "damaged"),
        (Manifest { locations: vec![place; 2], ..whole.clone() }, "damaged"),
        (Manifest { locations: vec![place], ..whole.clone() }, "is damaged"),
        (Manifest { tree: b"none".to_vec(), ..whole.clone() }, "damaged"),
    ] {
        fs::write(&path, fleet::encode_manifest(&manifest)).unwrap();
        let output = run(&there, "pull", "it", &fleet.address("app:1"));
        if word == "is damaged" {
            // The index knows better.
            ok(&output);
        } else {
            says(&output, &["app:1", word]);
        }
    }
    fs::write(&path, fleet::encode_manifest(&whole)).unwrap();
    let last = Host::new();
    for (limit, word) in [("--max-bytes=4999", "4999 are allowed"), ("--max-entries=1", "manifest: ")] {
        let output = last.command("pull", "it", &fleet.address("app:1")).arg(limit).output().unwrap();
        says(&output, &[word]);
    }
}

#[test]
fn trees_that_no_build_writes_are_refused() {
    let (fleet, there) = (Fleet::new(), Host::new());
    let at = fleet.0.path().join("images/app");
    fs::create_dir_all(&at).unwrap();
    let file = |size| Inode { meta: Meta::default(), kind: FileKind::File(Data::Object(Digest::of(b"x"), size)) };
    let mut led_astray = Tree::default();
    led_astray.inode_mut(0).meta.xattrs.insert((*b"trusted.overlay.redirect").into(), (*b"/other").into());
    let mut too_small = Tree::default();
    too_small.put(b"file", file(1)).unwrap();
    let mut two_sizes = Tree::default();
    two_sizes.put(b"one", file(5000)).unwrap();
    two_sizes.put(b"two", file(6000)).unwrap();
    for tree in [led_astray, too_small, two_sizes] {
        let metadata = erofs::write(&tree, erofs::Layout::Metadata).unwrap().head;
        let mut packed = vec![0; zstd_safe::compress_bound(metadata.len())];
        let length = zstd_safe::compress(&mut packed[..], &metadata, 3).unwrap();
        packed.truncate(length);
        let (tree, tree_bytes) = (Digest::of(&metadata), metadata.len() as u64);
        let head = Head { tree, tree_bytes, config: Default::default(), notes: vec![], profile: None };
        let locations = vec![PieceLocation { pack: 0, offset: 0, packed: 1 }];
        let manifest = Manifest { head, tree: packed, packs: vec![Digest::of(b"pack")], locations };
        fs::write(at.join("latest"), fleet::encode_manifest(&manifest)).unwrap();
        says(&run(&there, "pull", "it", &fleet.address("app")), &["app:latest", "a tree that pagefold does not write"]);
    }
    assert!(!there.store_path().exists());
}

#[test]
fn damage_of_a_host_does_not_spread() {
    let (fleet, here) = (Fleet::new(), Host::new());
    let content = noise(3, 5000);
    build(&here, "one", &[("file", content.clone())]);
    fs::write(here.store().object_path(&Digest::of(&content)), noise(4, 5000)).unwrap();
    says(&run(&here, "push", "one", &fleet.address("app:1")), &["objects/", "damaged"]);
    assert!(fleet.files("pack").is_empty() && !fleet.0.path().join("images").exists());
}

#[test]
fn what_is_no_address_is_refused_in_one_line() {
    let host = Host::new();
    build(&host, "one", &[("file", noise(3, 5000))]);
    let dir = host.dir.path().display();
    for (action, address, word) in [
        ("push", "s3://key:secret-words@bucket/app".to_string(), "no login"),
        ("push", "ftp://host/app".into(), "s3://"),
        ("push", format!("file://{dir}/none/none/app"), "No such file"),
        ("pull", format!("file://{dir}/none/app"), "no such directory"),
        ("pull", format!("file://{dir}/app"), "no such image"),
        ("push", "http://127.0.0.1:1/app".into(), "only read by http"),
        ("push", "s3://bucket/app".into(), "s3://bucket/images/app/latest: "),
    ] {
        let mut command = host.command(action, "one", &address);
        // Nothing listens there.
        command.envs([("AWS_ACCESS_KEY_ID", "key"), ("AWS_SECRET_ACCESS_KEY", "secret-words")]);
        command.envs([("AWS_ENDPOINT_URL", "http://127.0.0.1:1"), ("AWS_REGION", "here")]);
        let error = says(&command.output().unwrap(), &[]);
        assert!(!error.contains("secret-words"), "{error}");
        assert!(error.contains(word), "{address}: {error}");
    }
    let output =
        host.command("pull", "it", &format!("file://{dir}/app")).arg("--platform=linux/amd64").output().unwrap();
    says(&output, &["--platform"]);
}

/// The files of a server, by path.
type Files = Arc<Mutex<BTreeMap<String, Vec<u8>>>>;

/// What a bucket of S3 answers.
fn bucket(request: &Request, files: &Files) -> Answer {
    let mut files = files.lock().unwrap();
    let tag = |bytes: &[u8]| format!("\"{}\"", &digest(bytes)[7..39]);
    let (path, query) = request.path.split_once('?').unwrap_or((&request.path, ""));
    let Some(key) = path.strip_prefix("/bucket").map(|key| key.trim_start_matches('/')) else {
        return answer(404, b"");
    };
    if query.contains("list-type=2") {
        let prefix = query.split('&').find_map(|part| part.strip_prefix("prefix=")).unwrap_or("").replace("%2F", "/");
        let contents: String = files
            .iter()
            .filter(|(key, _)| key.starts_with(&prefix))
            .map(|(key, bytes)| {
                let (size, time) = (bytes.len(), "2026-01-01T00:00:00.000Z");
                format!("<Contents><Key>{key}</Key><Size>{size}</Size><LastModified>{time}</LastModified></Contents>")
            })
            .collect();
        return answer(200, format!("<ListBucketResult>{contents}</ListBucketResult>").as_bytes());
    }
    let there = files.get(key).cloned();
    if request.method == "PUT" {
        let is_new = request.header("if-none-match").is_none_or(|_| there.is_none());
        let is_same = request.header("if-match").is_none_or(|is| there.as_ref().is_some_and(|there| tag(there) == is));
        if !is_new || !is_same {
            return answer(412, b"<Error><Code>PreconditionFailed</Code></Error>");
        }
        files.insert(key.into(), request.body.clone());
        return answer(200, b"").with("etag", &tag(&request.body));
    }
    if request.method == "DELETE" {
        files.remove(key);
        return answer(204, b"");
    }
    let Some(bytes) = there else { return answer(404, b"<Error><Code>NoSuchKey</Code></Error>") };
    part(request, &bytes).with("etag", &tag(&bytes)).with("last-modified", "Thu, 01 Jan 2026 00:00:00 GMT")
}

fn s3(host: &Host, server: &Server, action: &str, name: &str, image: &str) -> Command {
    let mut command = host.command(action, name, &format!("s3://bucket/fleet/{image}"));
    command.arg("--plain-http").envs([("AWS_ACCESS_KEY_ID", "key"), ("AWS_SECRET_ACCESS_KEY", "secret-words")]);
    command.envs([("AWS_ENDPOINT_URL", format!("http://{}", server.host).as_str()), ("AWS_REGION", "here")]);
    command
}

#[test]
fn a_bucket_that_is_busy_slow_and_broken_at_first_serves_in_the_end() {
    let (here, there, files) = (Host::impatient(), Host::impatient(), Files::default());
    let held = files.clone();
    let server = Server::start(move |request, before| match before {
        0 => answer(503, b"<Error><Code>SlowDown</Code></Error>"),
        1 if request.method == "GET" => {
            let whole = bucket(request, &held);
            // Half of the answer, and then nothing or the end.
            Answer { sent: Some(whole.body.len() / 2), stalls: request.path.contains("images"), ..whole }
        }
        _ => bucket(request, &held),
    });
    let digest = build(&here, "one", &version(1));
    let pushed = ok(&s3(&here, &server, "push", "one", "app:1").output().unwrap());
    assert_eq!(pushed["digest"], digest);
    assert!(files.lock().unwrap().keys().all(|key| key.starts_with("fleet/packs/") || key == "fleet/images/app/1"));
    for request in server.requests() {
        let login = request.header("authorization").unwrap();
        assert!(login.starts_with("AWS4-HMAC-SHA256") && !format!("{request:?}").contains("secret-words"));
    }
    server.forget();
    let pulled = ok(&s3(&there, &server, "pull", "it", "app:1").output().unwrap());
    assert_eq!(pulled["digest"], digest);
    assert!(server.requests().iter().any(|request| request.header("range").is_some()));
    assert!(there.file("it", "lib/large").unwrap() == noise(1, 2 * PIECE as usize + 1000));
}

#[test]
fn a_killed_push_leaves_no_image_and_the_next_uploads_the_rest() {
    let (here, there, files) = (Host::new(), Host::new(), Files::default());
    let (held, is_slow) = (files.clone(), Arc::new(Mutex::new(true)));
    let slow = is_slow.clone();
    let server = Server::start(move |request, _| {
        if request.method == "PUT" && request.path.contains("images") && *slow.lock().unwrap() {
            wait_until("the host is dead", || !*slow.lock().unwrap());
            return answer(503, b"");
        }
        bucket(request, &held)
    });
    build(&here, "one", &version(1));
    let mut command = s3(&here, &server, "push", "one", "app:1");
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    wait_until("the manifest comes", || {
        server.requests().iter().any(|request| request.method == "PUT" && request.path.contains("images"))
    });
    let words = fs::read(format!("/proc/{}/cmdline", child.id())).unwrap();
    assert!(!String::from_utf8_lossy(&words).contains("secret-words"));
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(files.lock().unwrap().keys().all(|key| !key.contains("/images/")));
    says(&s3(&there, &server, "pull", "it", "app:1").output().unwrap(), &["app:1", "no such image"]);
    *is_slow.lock().unwrap() = false;
    // A pack without an index is of no use, and its pieces are uploaded again.
    let index = files.lock().unwrap().keys().find(|key| key.ends_with(".index")).cloned().unwrap();
    files.lock().unwrap().remove(&index);
    let pushed = ok(&s3(&here, &server, "push", "one", "app:1").output().unwrap());
    assert!(number(&pushed, "pieces_known") > 0 && number(&pushed, "pieces_uploaded") > 0, "{pushed}");
    ok(&s3(&there, &server, "pull", "it", "app:1").output().unwrap());
}

#[test]
fn a_push_does_not_replace_what_another_host_has_pushed_meanwhile() {
    let (here, files) = (Host::new(), Files::default());
    let (held, other) = (files.clone(), Arc::new(Mutex::new(None::<Vec<u8>>)));
    let meanwhile = other.clone();
    let server = Server::start(move |request, _| {
        let other = meanwhile.lock().unwrap().take_if(|_| request.method == "PUT" && request.path.contains("images"));
        if let Some(other) = other {
            held.lock().unwrap().insert("fleet/images/app/1".into(), other);
        }
        bucket(request, &held)
    });
    let push = |image: &str| s3(&here, &server, "push", image, "app:1").output().unwrap();
    for (image, content) in [("one", 3), ("two", 4), ("three", 5)] {
        build(&here, image, &[("file", noise(content, 5000))]);
    }
    // Where no image was, and where one was.
    for image in ["one", "two"] {
        *other.lock().unwrap() = Some(format!("of another host, before {image}").into_bytes());
        says(&push(image), &["app:1", "another push has replaced it meanwhile"]);
        assert_eq!(files.lock().unwrap()["fleet/images/app/1"], format!("of another host, before {image}").as_bytes());
    }
    ok(&push("three"));
    let pulled = ok(&s3(&Host::new(), &server, "pull", "it", "app:1").output().unwrap());
    assert_eq!(pulled["name"], "it");
}

#[test]
fn a_refused_login_is_one_line_without_the_login() {
    let host = Host::new();
    let server = Server::start(|request, _| answer(403, format!("{request:?} secret-words").as_bytes()));
    let error =
        says(&s3(&host, &server, "pull", "it", "app:1").output().unwrap(), &["403", "AWS_ACCESS_KEY_ID", "app/1"]);
    assert!(!error.contains("secret-words") && !error.contains("Signature"), "{error}");
}

#[test]
fn a_web_server_with_the_files_is_enough_for_pulls() {
    let (fleet, here, there) = (Fleet::new(), Host::new(), Host::new());
    build(&here, "one", &version(1));
    ok(&run(&here, "push", "one", &fleet.address("app:1")));
    let root = fleet.0.path().to_path_buf();
    let server = Server::start(move |request, _| web(request, &root));
    let address = format!("http://{}/static/app:1", server.host);
    ok(&run(&there, "pull", "it", &address));
    for (path, bytes) in version(1) {
        assert!(there.file("it", path).unwrap() == bytes, "{path}");
    }
    let last = Host::new();
    fleet.damage(&noise(11, 100_000));
    says(&run(&last, "pull", "it", &address), &[&digest(&noise(11, 100_000)), "is damaged"]);
    assert_unchanged(&last);
    // A server that does not send parts is not enough.
    let root = fleet.0.path().to_path_buf();
    let server = Server::start(move |request, _| {
        let whole = Request { headers: BTreeMap::new(), ..request.clone() };
        web(&whole, &root)
    });
    says(&run(&last, "pull", "it", &format!("http://{}/static/app:1", server.host)), &["object sha256:"]);
}
