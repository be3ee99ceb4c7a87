//! Pulls of layers with a table of contents: what the store has does not come again, and no table can make another image.

mod common;

use common::chunked::{CHECKSUM, POSITION, bent, chunked, frame, with_headers, with_table};
use common::{Answer, Host, Image, Packed, Request, Server, answer, digest, gzip, honest, host_architecture, image_of};
use common::{noise, ok};
use pagefold_image::stat;
use serde_json::{Value, json};
use std::fs;
use std::sync::OnceLock;

/// One layer of an image version: every kind of entry, large files that all versions have, and one that `version` has alone.
fn layer(version: u32) -> Vec<u8> {
    let mut archive = tar::Builder::new(Vec::new());
    let mut add = |kind: tar::EntryType, path: &str, link: &str, bytes: &[u8], mode: u32| {
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(kind);
        header.set_size(bytes.len() as u64);
        header.set_mode(mode);
        header.set_uid(7);
        header.set_gid(8);
        header.set_mtime(1_700_000_000);
        if kind == tar::EntryType::Char {
            header.set_device_major(1).unwrap();
            header.set_device_minor(3).unwrap();
        }
        if path == "lib/large" {
            archive.append_pax_extensions([("SCHILY.xattr.user.kept", &b"value"[..])]).unwrap();
        }
        match link {
            "" => archive.append_data(&mut header, path, bytes).unwrap(),
            link => archive.append_link(&mut header, path, link).unwrap(),
        }
    };
    use tar::EntryType as Kind;
    add(Kind::Directory, "lib", "", b"", 0o755);
    add(Kind::Regular, "lib/large", "", &noise(1, 450_000), 0o4755);
    add(Kind::Regular, "lib/zeros", "", &[[0; 300_000].as_slice(), &noise(2, 40_000)].concat(), 0o644);
    add(Kind::Link, "lib/other", "lib/large", b"", 0o4755);
    add(Kind::Symlink, "lib/link", "large", b"", 0o777);
    add(Kind::Regular, "empty", "", b"", 0o600);
    add(Kind::Regular, "small", "", b"a few bytes", 0o600);
    add(Kind::Regular, "own", "", &noise(10 + version, 30_000), 0o644);
    add(Kind::Regular, "again", "", &noise(1, 450_000), 0o644);
    add(Kind::Fifo, "pipe", "", b"", 0o644);
    add(Kind::Char, "null", "", b"", 0o666);
    add(Kind::Regular, "etc/.wh.os", "", b"", 0o644);
    add(Kind::Regular, "var/.wh..wh..opq", "", b"", 0o644);
    archive.into_inner().unwrap()
}

fn base() -> Packed {
    gzip(&common::layer(&[("etc/os", b"os"), ("etc/kept", b"kept"), ("var/old", b"old")]))
}

fn image_with(layer: Packed) -> Image {
    image_of(host_architecture(), vec![base(), layer])
}

fn serves(images: [&Image; 2]) -> Server {
    let [one, two] = images.map(Image::clone);
    Server::start(move |request, _| honest(request, &[("v1", &one), ("v2", &two)]))
}

/// The registry's image with version 1, and a host that has it.
fn host_with_first() -> (Image, Host) {
    let first = image_with(chunked(&layer(1)));
    let host = Host::new();
    ok(&host.pull(&serves([&first, &first]), "v1"));
    (first, host)
}

/// The digest of version 2, as the whole layer gives it.
fn oracle() -> Value {
    static ORACLE: OnceLock<Value> = OnceLock::new();
    let pull = || {
        let whole = image_with(gzip(&layer(2)));
        ok(&Host::new().pull(&serves([&whole, &whole]), "v2"))["digest"].clone()
    };
    ORACLE.get_or_init(pull).clone()
}

/// The ranges with an end that were asked for. A whole blob is asked for from its beginning on.
fn ranges(server: &Server) -> Vec<String> {
    let requests = server.requests();
    let ranges = requests.iter().filter_map(|request| request.header("range"));
    ranges.filter(|range| !range.ends_with('-')).map(String::from).collect()
}

/// Pulls version 2 with `packed` as its layer from a registry that answers requests for that layer by `other`, where that
/// has an answer. The image must be the same as by the whole layer. Returns the report and what was said.
fn pull_second(
    packed: Packed,
    other: impl Fn(&[u8], &Request, usize) -> Option<Answer> + Send + Sync + 'static,
) -> (Value, String, Server) {
    let (first, host) = host_with_first();
    let second = image_with(packed);
    let (name, there) = (second.layers[1].clone(), second.clone());
    let server = Server::start(move |request, before| {
        let is_it = request.path.ends_with(&name);
        let own = if is_it { other(&there.blobs[&name], request, before) } else { None };
        own.unwrap_or_else(|| honest(request, &[("v1", &first), ("v2", &there)]))
    });
    let output = host.pull(&server, "v2");
    let pulled = ok(&output);
    assert_eq!(pulled["digest"], oracle());
    assert_eq!(host.file("v2", "own").unwrap(), noise(12, 30_000));
    assert!(stat::verify(&host.store(), &[], false).unwrap().damaged.is_empty());
    assert!(host.downloads().is_empty(), "{:?}", host.downloads());
    assert!(fs::read_dir(host.store_path().join("domains/default/staging")).unwrap().next().is_none());
    // The next pull knows the layers by their chain IDs.
    assert_eq!(ok(&host.pull(&server, "v2"))["layers_known"], 2);
    (pulled, String::from_utf8_lossy(&output.stderr).into_owned(), server)
}

/// The whole layer came.
fn assert_whole(what: &str, pulled: &Value, packed_bytes: usize) {
    let (fetched, parts) = (pulled["bytes_fetched"].as_u64().unwrap(), &pulled["layers_in_parts"]);
    assert!(fetched >= packed_bytes as u64 && *parts == 0, "{what}: {pulled:#}");
    assert_eq!((&pulled["files_known"], &pulled["bytes_known"]), (&json!(0), &json!(0)), "{what}");
}

#[test]
fn only_contents_that_the_store_lacks_are_fetched() {
    let packed = chunked(&layer(2));
    let size = packed.blob.len();
    let (pulled, said, server) = pull_second(packed, |_, _, _| None);
    assert_eq!(said, "");
    assert_eq!((&pulled["layers_known"], &pulled["layers_fetched"]), (&json!(1), &json!(1)));
    // The large content twice, and the one that is mostly zeros.
    assert_eq!((&pulled["layers_in_parts"], &pulled["files_known"]), (&json!(1), &json!(3)));
    let fetched = pulled["bytes_fetched"].as_u64().unwrap();
    assert!(fetched < 40_000 && pulled["bytes_known"].as_u64().unwrap() > 900_000, "{fetched} of {size}");
    let ranges = ranges(&server);
    assert_eq!(ranges.len(), 5, "the table and four ranges: {ranges:?}");
}

#[test]
fn with_a_copy_of_the_headers_nothing_comes_beside_the_missing_contents() {
    let (pulled, said, server) = pull_second(with_headers(&layer(2), |_, _| ()), |_, _, _| None);
    assert_eq!((said.as_str(), &pulled["layers_in_parts"], &pulled["files_known"]), ("", &json!(1), &json!(3)));
    assert_eq!(ranges(&server).len(), 2, "the table with the headers, and the new file: {:?}", ranges(&server));
    // Nothing but headers is new.
    let (first, host) = host_with_first();
    let mut archive = tar::Builder::new(Vec::new());
    let mut header = tar::Header::new_gnu();
    header.set_size(450_000);
    header.set_mode(0o600);
    archive.append_data(&mut header, "renamed", &noise(1, 450_000)[..]).unwrap();
    let renamed = image_with(with_headers(&archive.into_inner().unwrap(), |_, _| ()));
    let server = serves([&first, &renamed]);
    let pulled = ok(&host.pull(&server, "v2"));
    assert_eq!((&pulled["layers_in_parts"], ranges(&server).len()), (&json!(1), 1), "only the table");
    assert_eq!(host.file("v2", "renamed").unwrap(), noise(1, 450_000));
}

#[test]
fn a_copy_of_the_headers_that_lies_makes_no_other_image() {
    let layer = layer(2);
    let size = chunked(&layer).blob.len();
    // Not bound by the table: it is not looked at, and the frames have the headers.
    let not_bound = with_headers(&layer, |table, _| drop(table["tarSplitDigest"].take()));
    let (pulled, said, server) = pull_second(not_bound, |_, _, _| None);
    assert_eq!((said.as_str(), &pulled["layers_in_parts"], ranges(&server).len()), ("", &json!(1), 5));
    let bound = |change: &dyn Fn(String) -> String| {
        with_headers(&layer, |table, headers| {
            *headers = change(String::from_utf8(std::mem::take(headers)).unwrap()).into_bytes();
            table["tarSplitDigest"] = json!(digest(&frame(headers)));
        })
    };
    // Another owner, another order, or a file less.
    let owner = bound(&|text| text.replacen("MDAwMDAwNw", "MDAwMDAwNg", 1));
    let lines = |text: String| text.lines().map(String::from).collect::<Vec<_>>();
    let order = bound(&|text| {
        let mut lines = lines(text);
        lines.swap(0, 2);
        lines.join("\n")
    });
    let less = bound(&|text| {
        let mut lines = lines(text);
        let large = lines.iter().position(|line| line.contains("lib/zeros")).unwrap();
        lines.remove(large);
        lines.join("\n")
    });
    let other_digest = with_headers(&layer, |table, _| table["tarSplitDigest"] = json!(digest(b"other")));
    for (what, packed, text) in [
        ("owner", owner, "put together by its table"),
        ("order", order, "put together by its table"),
        ("less", less, "other contents than the table"),
        ("no JSON", bound(&|_| "no JSON".into()), "copy of the headers"),
        ("digest", other_digest, "copy of the headers: digest is"),
    ] {
        let (pulled, said, _) = pull_second(packed, |_, _, _| None);
        assert!(said.contains(text) && said.contains("whole") && said.lines().count() == 1, "{what}: {said}");
        assert_whole(what, &pulled, size);
    }
}

#[test]
fn a_store_without_images_and_small_layers_ask_for_no_table() {
    let first = image_with(chunked(&layer(1)));
    let (host, server) = (Host::new(), serves([&first, &first]));
    let pulled = ok(&host.pull(&server, "v1"));
    assert_eq!(pulled["layers_in_parts"], 0);
    assert_eq!(server.asked_for(&first.layers[1]).len(), 1);
    let small = image_with(chunked(&common::layer(&[("small", &noise(1, 200_000))])));
    let server = serves([&small, &small]);
    assert_eq!(ok(&host.pull(&server, "v2"))["layers_in_parts"], 0);
    assert_eq!(server.asked_for(&small.layers[1]).len(), 1);
}

#[test]
fn little_in_common_is_not_worth_the_requests() {
    let (_, host) = host_with_first();
    let other = image_with(chunked(&common::layer(&[("own", &noise(11, 30_000)), ("rest", &noise(50, 400_000))])));
    let server = serves([&other, &other]);
    assert_eq!(ok(&host.pull(&server, "v2"))["layers_in_parts"], 0);
    let asked = server.asked_for(&other.layers[1]);
    assert_eq!(asked.len(), 2, "the table, and the whole");
    assert_eq!(asked[1].header("range"), Some("bytes=0-"));
}

#[test]
fn tables_that_are_not_bound_are_not_looked_at() {
    for missing in [POSITION, CHECKSUM] {
        let mut packed = chunked(&layer(2));
        packed.annotations.remove(missing);
        let size = packed.blob.len();
        let (pulled, said, server) = pull_second(packed, |_, _, _| None);
        assert_whole(missing, &pulled, size);
        assert_eq!(said, "");
        assert!(ranges(&server).is_empty());
    }
}

/// A layer with a table that is no longer true, by what is wrong with it, and what is said about it.
fn odd_tables() -> Vec<(&'static str, Packed, &'static str)> {
    let layer = layer(2);
    let large = |table: &mut Value, path: &str| {
        let entries = table["entries"].as_array().unwrap();
        entries.iter().position(|entry| entry["name"] == path && entry["type"] == "reg").unwrap()
    };
    let change = |path: &'static str, key: &'static str, value: Value| {
        bent(&layer, move |table| {
            let number = large(table, path);
            table["entries"][number][key] = value;
        })
    };
    let mut other_bytes = chunked(&layer);
    other_bytes.annotations.insert(CHECKSUM.into(), digest(b"other"));
    let mut other_size = chunked(&layer);
    let position = other_size.annotations[POSITION].clone();
    let mut numbers: Vec<&str> = position.split(':').collect();
    numbers[2] = "100";
    other_size.annotations.insert(POSITION.into(), numbers.join(":"));
    vec![
        ("another digest", other_bytes, "table of contents: digest is"),
        ("another size", other_size, "another size"),
        ("no JSON", with_table(&layer, b"not JSON", &[]), "table of contents"),
        ("a count that is huge", with_table(&layer, b"{\"version\":1e99,\"entries\":[]}", &[]), "table of contents"),
        ("version", bent(&layer, |table| table["version"] = json!(2)), "version 2"),
        ("outside", change("again", "endOffset", json!(1u64 << 50)), "content at"),
        ("backwards", change("again", "endOffset", json!(1)), "content at"),
        ("overlap", change("lib/large", "endOffset", json!(500_000)), "overlap"),
        (
            "one content twice",
            bent(&layer, |table| {
                let entries = table["entries"].as_array_mut().unwrap();
                entries.push(entries[1].clone());
            }),
            "overlap",
        ),
        // It is not the object's size, so the content is fetched, and so is too little left.
        ("a file that is missing", bent(&layer, |table| table["entries"] = json!([])), ""),
        // The store has the object, and it is another content of the layer's.
        ("another content", change("lib/zeros", "digest", json!(digest(&noise(1, 450_000)))), ""),
        ("an end too early", change("lib/zeros", "endOffset", Value::Null), ""),
    ]
}

#[test]
fn an_odd_table_leads_to_the_whole_layer() {
    for (what, packed, text) in odd_tables() {
        let size = packed.blob.len();
        let (pulled, said, _) = pull_second(packed, |_, _, _| None);
        assert!(said.contains(text) && said.lines().count() <= 1, "{what}: {said}");
        if text.is_empty() {
            // A part of the table was of use, or nothing of it.
            continue;
        }
        assert!(said.contains("whole"), "{what}: {said}");
        assert_whole(what, &pulled, size);
    }
}

#[test]
fn a_table_that_lies_about_contents_makes_no_other_image() {
    let layer = layer(2);
    let entry = |table: &Value, path: &str| {
        let entries = table["entries"].as_array().unwrap();
        entries.iter().position(|entry| entry["name"] == path && entry["type"] == "reg").unwrap()
    };
    // In the place of the second version's own file, the first version's, which the store has.
    let other_file = bent(&layer, |table| {
        let number = entry(table, "own");
        table["entries"][number]["digest"] = json!(digest(&noise(11, 30_000)));
    });
    // One chunk less than the content has.
    let early_end = bent(&layer, |table| {
        let number = entry(table, "lib/large");
        let chunk = table["entries"][number + 1]["offset"].clone();
        table["entries"][number]["endOffset"] = chunk;
    });
    // The next header is taken for a part of the content.
    let late_end = bent(&layer, |table| {
        let (number, next) = (entry(table, "lib/large"), entry(table, "lib/zeros"));
        let begin = table["entries"][next]["offset"].clone();
        table["entries"][number]["endOffset"] = begin;
    });
    // The contents of two files change places.
    let swapped = bent(&layer, |table| {
        let (one, two) = (entry(table, "lib/large"), entry(table, "lib/zeros"));
        for key in ["digest", "size"] {
            let value = table["entries"][one][key].take();
            table["entries"][one][key] = table["entries"][two][key].take();
            table["entries"][two][key] = value;
        }
    });
    for (what, packed) in [("file", other_file), ("early end", early_end), ("late end", late_end), ("swapped", swapped)]
    {
        let size = packed.blob.len();
        let (pulled, said, _) = pull_second(packed, |_, _, _| None);
        assert!(said.contains("put together by its table of contents"), "{what}: {said}");
        assert!(said.contains("read as a whole") && said.lines().count() == 1, "{what}: {said}");
        assert_whole(what, &pulled, size);
    }
}

#[test]
fn a_layer_with_another_diff_id_is_refused_however_it_comes() {
    let (first, host) = host_with_first();
    let mut packed = chunked(&layer(2));
    packed.diff_id = digest(b"another layer");
    let second = image_with(packed);
    let output = host.pull(&serves([&first, &second]), "v2");
    let error = common::failed(&output);
    assert!(error.contains(&digest(b"another layer")) && error.contains("digest is"), "{error}");
    let names: Vec<_> = host.store().images().unwrap().into_iter().map(|image| image.name).collect();
    assert_eq!(names, ["v1"]);
    assert!(host.downloads().is_empty(), "the next pull would find the same");
}

/// The answer to a request for a range, changed.
fn of_range(request: &Request, blob: &[u8], change: impl FnOnce(Answer) -> Answer) -> Option<Answer> {
    let (begin, end) = request.header("range")?.strip_prefix("bytes=")?.split_once('-')?;
    let (begin, end): (usize, usize) = (begin.parse().ok()?, end.parse().ok()?);
    Some(change(answer(206, &blob[begin..=end])))
}

#[test]
fn a_registry_that_sends_no_ranges_sends_the_whole_layer() {
    let size = chunked(&layer(2)).blob.len();
    let whole = |what: &str, other: fn(&[u8], &Request) -> Option<Answer>| {
        let (pulled, said, _) = pull_second(chunked(&layer(2)), move |blob, request, _| other(blob, request));
        assert_whole(what, &pulled, size);
        said
    };
    assert_eq!(whole("ignores them", |blob, _| Some(answer(200, blob))), "");
    let refused = |_: &[u8], request: &Request| {
        let is_range = request.header("range").is_some_and(|range| !range.ends_with('-'));
        is_range.then(|| answer(416, b""))
    };
    assert_eq!(whole("refuses them", refused), "");
    // The table comes, and then no other range.
    let no_others = |blob: &[u8], request: &Request| {
        let is_first = request.header("range").is_some_and(|range| range.starts_with("bytes=0-"));
        is_first.then(|| answer(200, blob))
    };
    assert_eq!(whole("only the table", no_others), "");
    let too_much = |blob: &[u8], request: &Request| {
        of_range(request, blob, |mut answer| {
            answer.body.extend([0; 100]);
            answer
        })
    };
    assert_eq!(whole("more than the range", too_much), "");
    let said = whole("another range", |blob, request| {
        let is_first = request.header("range").is_some_and(|range| range.starts_with("bytes=0-"));
        is_first.then(|| of_range(request, &blob[5..], |answer| answer))?
    });
    assert!(said.contains("read as a whole") && said.lines().count() == 1, "{said}");
}

#[test]
fn broken_ranges_are_asked_for_again() {
    let (pulled, said, server) = pull_second(chunked(&layer(2)), |blob, request, before| match before {
        0 => Some(answer(503, b"busy")),
        1 | 3 => of_range(request, blob, |answer| Answer { sent: Some(answer.body.len() / 2), ..answer }),
        _ => None,
    });
    assert_eq!((said.as_str(), &pulled["layers_in_parts"]), ("", &json!(1)));
    assert!(ranges(&server).len() >= 8, "{:?}", ranges(&server));
}

#[test]
fn a_layer_that_an_earlier_pull_has_begun_comes_as_a_whole() {
    let (first, host) = host_with_first();
    let second = image_with(chunked(&layer(2)));
    let name = &second.layers[1];
    let dir = host.store_path().join("domains/default/downloads");
    fs::create_dir_all(&dir).unwrap();
    fs::write(dir.join(name.trim_start_matches("sha256:")), &second.blobs[name][..700_000]).unwrap();
    let server = serves([&first, &second]);
    let pulled = ok(&host.pull(&server, "v2"));
    assert_eq!((&pulled["layers_in_parts"], &pulled["digest"]), (&json!(0), &oracle()));
    assert_eq!(server.asked_for(name)[0].header("range"), Some("bytes=700000-"));
}

#[test]
fn a_layer_that_is_in_an_image_twice_comes_as_a_whole() {
    let (first, host) = host_with_first();
    let second = image_of(host_architecture(), vec![base(), chunked(&layer(2)), gzip(b""), chunked(&layer(2))]);
    let pulled = ok(&host.pull(&serves([&first, &second]), "v2"));
    assert_eq!(pulled["layers_in_parts"], 0);
    assert_eq!(host.file("v2", "own").unwrap(), noise(12, 30_000));
}
