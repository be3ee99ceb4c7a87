//! Collections in fleets' stores: what no image needs goes, and nothing else, whatever happens at the same time.

use super::*;
use std::time::{Duration, SystemTime};

/// Builds the two versions and pushes them as `app:1` and `app:2`. The second has one pack of its own.
fn two_versions(fleet: &Fleet, host: &Host) {
    for (name, number) in [("one", 1), ("two", 2)] {
        build(host, name, &version(number));
        ok(&run(host, "push", name, &fleet.address(&format!("app:{number}"))));
    }
}

impl Fleet {
    fn store(&self) -> String {
        format!("file://{}", self.0.path().display())
    }

    fn manifest(&self, tag: &str) -> PathBuf {
        self.0.path().join("images/app").join(tag)
    }

    fn take_away(&self, tag: &str) {
        fs::remove_file(self.manifest(tag)).unwrap();
    }

    /// A lease as a push on another host has, written so long ago.
    fn lease(&self, name: &str, ago: Duration) -> PathBuf {
        let path = self.0.path().join("leases").join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        let file = fs::File::create(&path).unwrap();
        file.set_modified(SystemTime::now() - ago).unwrap();
        path
    }

    /// Files that killed hosts have not written to their ends.
    fn unfinished(&self) -> Vec<PathBuf> {
        let of = |place: &str| fs::read_dir(self.0.path().join(place)).into_iter().flatten().flatten();
        let all = ["packs", "leases", "collections", "images/app"].into_iter().flat_map(of).map(|entry| entry.path());
        all.filter(|path| path.to_str().unwrap().contains('#')).collect()
    }

    /// Leases and unfinished files are those of hosts that died an hour ago.
    fn let_hosts_die(&self) {
        let leases = fs::read_dir(self.0.path().join("leases")).into_iter().flatten().flatten();
        for path in leases.map(|entry| entry.path()).chain(self.unfinished()) {
            let file = fs::File::options().write(true).open(path).unwrap();
            file.set_modified(SystemTime::now() - Duration::from_secs(3600)).unwrap();
        }
    }

    fn collect(&self, host: &Host, more: &[&str]) -> Value {
        ok(&host.collection(0, &self.store()).args(more).output().unwrap())
    }

    /// Each image that the store names comes whole to a new host.
    fn assert_whole(&self) {
        for entry in fs::read_dir(self.0.path().join("images/app")).unwrap() {
            let (tag, there) = (entry.unwrap().file_name().into_string().unwrap(), Host::new());
            if tag.contains('#') {
                continue;
            }
            ok(&run(&there, "pull", "it", &self.address(&format!("app:{tag}"))));
            assert!(stat::verify(&there.store(), &[], false).unwrap().damaged.is_empty());
        }
    }
}

#[test]
fn packs_that_no_image_names_are_removed_and_all_others_stay() {
    let (fleet, here) = (Fleet::new(), Host::new());
    two_versions(&fleet, &here);
    let packs = fleet.files("pack").len() as u64;
    let same = fleet.collect(&here, &[]);
    assert_eq!((number(&same, "packs_removed"), number(&same, "packs_kept"), number(&same, "images")), (0, packs, 2));
    fleet.take_away("2");
    let dry = fleet.collect(&here, &["--dry-run"]);
    assert_eq!((number(&dry, "packs_removed"), &dry["dry_run"]), (1, &json!(true)));
    let young = ok(&here.collection(3600, &fleet.store()).output().unwrap());
    assert_eq!(number(&young, "packs_removed"), 0);
    assert_eq!((fleet.files("pack").len() as u64, fleet.files("index").len() as u64), (packs, packs));
    let collected = fleet.collect(&here, &[]);
    assert_eq!((number(&collected, "packs_removed"), number(&collected, "packs_kept")), (1, packs - 1));
    assert!((100_000..130_000).contains(&number(&collected, "bytes_removed")), "{collected}");
    assert_eq!((fleet.files("pack").len() as u64, fleet.files("index").len() as u64), (packs - 1, packs - 1));
    fleet.assert_whole();
    // The other version again, and then it alone: packs stay for the pieces that both have.
    assert_eq!(number(&ok(&run(&here, "push", "two", &fleet.address("app:2"))), "pieces_uploaded"), 1);
    fleet.take_away("1");
    let collected = fleet.collect(&here, &[]);
    assert_eq!((number(&collected, "packs_removed"), number(&collected, "packs_kept")), (0, packs));
    assert!((100_000..130_000).contains(&number(&collected, "bytes_unused")), "{collected}");
    fleet.assert_whole();
    fleet.take_away("2");
    fleet.collect(&here, &[]);
    // What a host was writing when it died.
    let unfinished = [("packs/x.pack#1", 3600), ("images/app/1#2", 3600), ("packs/young.pack#1", 0)];
    for (name, age) in unfinished {
        let file = fs::File::create(fleet.0.path().join(name)).unwrap();
        file.set_modified(SystemTime::now() - Duration::from_secs(age)).unwrap();
    }
    assert_eq!(number(&fleet.collect(&here, &["--dry-run"]), "unfinished_removed"), 2);
    assert_eq!(number(&fleet.collect(&here, &[]), "unfinished_removed"), 2);
    assert_eq!(fleet.unfinished(), [fleet.0.path().join("packs/young.pack#1")]);
    fs::remove_file(fleet.0.path().join("packs/young.pack#1")).unwrap();
    for place in ["packs", "leases", "collections"] {
        assert_eq!(fs::read_dir(fleet.0.path().join(place)).unwrap().count(), 0, "{place}");
    }
}

#[test]
fn images_are_listed_and_taken_away() {
    let (fleet, here) = (Fleet::new(), Host::new());
    two_versions(&fleet, &here);
    // No images: what a host was writing when it died, and what others put there.
    let others = ["images/app/3#1", "images/readme", "images/.x/1"];
    for other in others {
        let path = fleet.0.path().join(other);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, "").unwrap();
    }
    let images = || {
        let listed = ok(&here.fleet_command("ls", &[&fleet.store()]).output().unwrap());
        let images = listed.as_array().unwrap().iter();
        images.map(|image| image["reference"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(images(), [fleet.address("app:1"), fleet.address("app:2")]);
    let rm = |names: &[&str]| here.fleet_command("rm", &[&[fleet.store().as_str()], names].concat()).output().unwrap();
    for (wrong, said) in [
        (&["app:1", "app:3"][..], "app:3: the store has no such image"),
        (&["app"], "app:latest: the store has no such image"),
        (&["../app:1"], "a NAME or NAME:TAG is wanted"),
        (&["app:"], "letters, digits"),
    ] {
        let error = failed(&rm(wrong));
        assert!(error.contains(said) && error.lines().count() == 1, "{wrong:?}: {error}");
    }
    assert_eq!(images().len(), 2, "an error takes nothing away");
    assert_eq!(ok(&rm(&["app:2"]))["removed"], json!(["app:2"]));
    assert_eq!(images(), [fleet.address("app:1")]);
    // A collection takes each file there for a manifest.
    others.iter().for_each(|other| fs::remove_file(fleet.0.path().join(other)).unwrap());
    assert_eq!(number(&fleet.collect(&here, &[]), "packs_removed"), 1);
    fleet.assert_whole();
    assert!(
        failed(&here.fleet_command("ls", &["file:///nowhere/at/all"]).output().unwrap()).contains("no such directory")
    );
}

#[test]
fn what_a_push_in_progress_relies_on_stays() {
    let (fleet, here) = (Fleet::new(), Host::new());
    two_versions(&fleet, &here);
    let (manifest, packs) = (fs::read(fleet.manifest("2")).unwrap(), fleet.files("pack").len());
    fleet.take_away("2");
    let lease = fleet.lease("push", Duration::ZERO);
    // It does not wait for long.
    let collected = fleet.collect(&here, &["--wait=0.2"]);
    assert_eq!((number(&collected, "packs_removed"), number(&collected, "packs_waiting")), (0, 1));
    assert_eq!(
        (fleet.files("pack").len(), fleet.files("index").len()),
        (packs, packs - 1),
        "later pushes do not see it"
    );
    // It waits, and the push ends with an image that needs the pack.
    let mut command = here.collection(0, &fleet.store());
    let collection = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    wait_until("the collection looks at the time", || {
        fs::read_dir(fleet.0.path().join("collections")).is_ok_and(|mut files| files.next().is_some())
    });
    fs::write(fleet.manifest("2"), manifest).unwrap();
    fs::remove_file(lease).unwrap();
    let collected = ok(&collection.wait_with_output().unwrap());
    assert_eq!((number(&collected, "packs_removed"), fleet.files("pack").len()), (0, packs));
    fleet.assert_whole();
    // A push of a host that has died holds nothing up.
    fleet.take_away("2");
    let dead = fleet.lease("dead", Duration::from_secs(3600));
    assert_eq!(number(&fleet.collect(&here, &[]), "packs_removed"), 1);
    assert!(!dead.exists());
    fleet.assert_whole();
}

#[test]
fn a_killed_collection_leaves_the_rest_for_the_next() {
    let (fleet, here) = (Fleet::new(), Host::new());
    two_versions(&fleet, &here);
    let packs = fleet.files("pack").len();
    fleet.take_away("2");
    let lease = fleet.lease("push", Duration::ZERO);
    let mut command = here.collection(0, &fleet.store());
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    wait_until("the index is gone", || fleet.files("index").len() < packs);
    child.kill().unwrap();
    child.wait().unwrap();
    fleet.assert_whole();
    // What has lost its index is uploaded again, under another name.
    assert_eq!(number(&ok(&run(&here, "push", "two", &fleet.address("app:2"))), "pieces_uploaded"), 1);
    assert_eq!(fleet.files("pack").len(), packs + 1);
    fs::remove_file(lease).unwrap();
    assert_eq!(number(&fleet.collect(&here, &[]), "packs_removed"), 1);
    fleet.assert_whole();
}

#[test]
fn damage_removes_nothing_that_an_image_needs() {
    let (fleet, here) = (Fleet::new(), Host::new());
    two_versions(&fleet, &here);
    let packs = fleet.files("pack").len() as u64;
    for index in fleet.files("index") {
        let mut bytes = fs::read(&index).unwrap();
        bytes[50] ^= 1;
        fs::write(&index, bytes).unwrap();
    }
    assert_eq!(number(&fleet.collect(&here, &[]), "packs_kept"), packs);
    fleet.assert_whole();
    let manifest = fs::read(fleet.manifest("2")).unwrap();
    fleet.take_away("1");
    for (at, word) in [(7, "manifest of format"), (300, "damaged")] {
        let mut bytes = manifest.clone();
        bytes[at] = bytes[at].wrapping_add(2);
        fs::write(fleet.manifest("2"), bytes).unwrap();
        let refused = here.collection(0, &fleet.store()).output().unwrap();
        says(&refused, &["images/app/2", word, "nothing is removed"]);
        assert_eq!((fleet.files("pack").len() as u64, fleet.files("index").len() as u64), (packs, packs));
    }
    fs::write(fleet.manifest("2"), manifest).unwrap();
    fleet.assert_whole();
    fleet.take_away("2");
    assert_eq!(number(&fleet.collect(&here, &[]), "packs_removed"), packs);
}

/// `PAGEFOLD_FLEET_SEEDS=N` runs that many, `PAGEFOLD_FLEET_SEED=N` this one.
#[test]
fn pushes_collections_and_kills_at_the_same_time_lose_no_image() {
    let setting = |name: &str| std::env::var(name).ok().map(|text| text.parse::<u32>().unwrap());
    let first = setting("PAGEFOLD_FLEET_SEED");
    let seeds = first.map_or(1..1 + setting("PAGEFOLD_FLEET_SEEDS").unwrap_or(2), |seed| seed..seed + 1);
    let hosts: Vec<Host> = (0..3).map(|_| Host::new()).collect();
    for host in &hosts {
        for number in 1..=4 {
            build(host, &format!("image-{number}"), &version(number));
        }
    }
    for seed in seeds {
        let (fleet, mut dice) = (Fleet::new(), noise(seed, 4096).into_iter().cycle());
        let mut die = |sides: u8| dice.next().unwrap() % sides;
        for _ in 0..3 {
            let mut running = Vec::new();
            for (number, host) in hosts.iter().enumerate() {
                let (image, address) = (format!("image-{}", 1 + die(4)), fleet.address(&format!("app:{number}")));
                // Some images are taken away while other hosts rely on their packs.
                if die(2) == 0 && fleet.manifest(&number.to_string()).exists() {
                    fleet.take_away(&number.to_string());
                }
                running.push((host.command("push", &image, &address), die(4) == 0));
            }
            for _ in 0..2 {
                let mut collection = hosts[0].collection(0, &fleet.store());
                collection.arg("--wait=0.5");
                running.push((collection, die(3) == 0));
            }
            if !fleet.0.path().join("packs").exists() {
                ok(&run(&hosts[0], "push", "image-1", &fleet.address("app:first")));
            }
            let spawn = |(mut command, is_killed): (Command, bool)| {
                (command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap(), is_killed)
            };
            for (mut child, is_killed) in running.into_iter().map(spawn).collect::<Vec<_>>() {
                if is_killed {
                    std::thread::sleep(Duration::from_millis(u64::from(die(60))));
                    child.kill().unwrap();
                    child.wait().unwrap();
                } else {
                    let output = child.wait_with_output().unwrap();
                    assert!(output.status.success(), "seed {seed}: {}", String::from_utf8_lossy(&output.stderr));
                }
            }
            fleet.let_hosts_die();
            fleet.assert_whole();
        }
        // Nothing is left that no image needs.
        fleet.collect(&hosts[0], &[]);
        assert_eq!(fleet.unfinished(), Vec::<PathBuf>::new());
        fleet.assert_whole();
        let manifests = fs::read_dir(fleet.0.path().join("images/app")).unwrap().map(|entry| entry.unwrap().path());
        let needed = manifests.flat_map(|path| fleet::decode_manifest(&fs::read(path).unwrap()).unwrap().packs);
        let needed: std::collections::BTreeSet<String> = needed.map(|pack| pack.hex()).collect();
        let there = fleet.files("pack").into_iter().map(|path| path.file_stem().unwrap().to_str().unwrap().to_owned());
        assert_eq!(there.collect::<std::collections::BTreeSet<_>>(), needed, "seed {seed}");
    }
}

#[test]
fn a_bucket_is_collected_and_stores_that_cannot_be_are_refused() {
    let (here, files) = (Host::new(), Files::default());
    let held = files.clone();
    let server =
        Server::start(move |request, before| if before == 0 { answer(503, b"") } else { bucket(request, &held) });
    for (name, number) in [("one", 1), ("two", 2)] {
        build(&here, name, &version(number));
        ok(&s3(&here, &server, "push", name, &format!("app:{number}")).output().unwrap());
    }
    files.lock().unwrap().remove("fleet/images/app/1");
    files.lock().unwrap().remove("fleet/images/app/2");
    // Of another store in the same bucket.
    files.lock().unwrap().insert("fleet-2/packs/other".into(), vec![1]);
    let mut collection = here.collection(0, "s3://bucket/fleet");
    collection.arg("--plain-http").envs([("AWS_ACCESS_KEY_ID", "key"), ("AWS_SECRET_ACCESS_KEY", "secret-words")]);
    collection.envs([("AWS_ENDPOINT_URL", format!("http://{}", server.host).as_str()), ("AWS_REGION", "here")]);
    assert!(number(&ok(&collection.output().unwrap()), "packs_removed") > 1);
    assert_eq!(files.lock().unwrap().keys().collect::<Vec<_>>(), ["fleet-2/packs/other"]);

    let missing = here.dir.path().join("missing");
    for (address, word) in [
        (format!("file://{}", missing.display()), "no such directory"),
        (format!("http://{}/x", server.host), "only read by http"),
        ("app:1".into(), "not an address of a store"),
        ("s3://key:secret-words@bucket".into(), "no login"),
    ] {
        let error = says(&here.collection(0, &address).output().unwrap(), &[word]);
        assert!(!error.contains("secret-words"), "{error}");
    }
    assert!(!missing.exists());
}
