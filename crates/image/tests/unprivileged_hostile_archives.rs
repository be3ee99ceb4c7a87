//! Archives that attack: each gets one clear line, nothing is written outside the store, and what was stored stays.

#[path = "common/archive.rs"]
mod archive_bytes;

use archive_bytes::{END, archive, file, header, padded, pax, seal};
use pagefold_image::build::{Omissions, apply_archive};
use pagefold_image::config::Limits;
use pagefold_image::oci::{self, Wanted};
use pagefold_image::progress::Progress;
use pagefold_image::store::Store;
use pagefold_image::tree::{FileKind, ROOT, Tree};
use pagefold_image::{Error, unpack};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

struct Bench {
    dir: tempfile::TempDir,
    store: Store,
}

impl Bench {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(&dir.path().join("store"), "default").unwrap().without_sync();
        Self { dir, store }
    }

    fn read_with(&self, archive: &[u8], limits: Limits) -> Result<(Tree, Vec<String>), Error> {
        let (build, mut tree, mut notes) = (self.store.build()?, Tree::default(), Omissions::default());
        apply_archive(&build, &mut tree, unpack(archive, limits)?, limits, &mut notes, &Progress::silent())?;
        Ok((tree, notes.lines()))
    }

    fn read(&self, archive: &[u8]) -> Result<(Tree, Vec<String>), Error> {
        self.read_with(archive, Limits::default())
    }

    /// The archive is refused, by one line that has `words`, and the directory around the store is as before.
    fn refused(&self, archive: &[u8], words: &str) {
        let error = self.read(archive).expect_err(words);
        let text = error.to_string();
        assert!(text.contains(words), "{text:?} should say {words:?}");
        assert!(!text.contains('\n') && text.len() < 600, "one line: {text:?}");
        let around: Vec<_> = std::fs::read_dir(self.dir.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert_eq!(around, ["store"]);
    }
}

#[test]
fn paths_cannot_leave_the_tree() {
    let bench = Bench::new();
    for path in [&b"../evil"[..], b"a/../../evil", b"..", b"/../evil"] {
        bench.refused(&archive(&[file(path, b"x")]), "would leave the tree");
    }
    bench.refused(&archive(&[file(b"a/..", b"x")]), "the root of the tree must be a directory");
    let (mut tree, _) = bench.read(&archive(&[file(b"a/../inside", b"x")])).unwrap();
    assert!(tree.find(b"inside").is_some() && tree.find(b"a").is_none());
    // Absolute names are taken below the root, as tar does.
    let (mut tree, _) = bench.read(&archive(&[file(b"/etc/evil", b"x")])).unwrap();
    assert!(tree.find(b"etc/evil").is_some());
    assert!(!Path::new("/etc/evil").exists());
}

#[test]
fn links_lead_nowhere_outside() {
    let bench = Bench::new();
    // Dangling and absolute links are content; what is written through them stays in the tree.
    let parts =
        [header(b"out", b'2', 0, b"/tmp/../../etc"), file(b"out/evil", b"x"), header(b"gone", b'2', 0, b"nowhere")];
    let (mut tree, _) = bench.read(&archive(&parts)).unwrap();
    assert!(tree.find(b"etc/evil").is_some());
    assert!(matches!(tree.inode(tree.clone().find(b"gone").unwrap()).kind, FileKind::Symlink(_)));
    let loops = [header(b"a", b'2', 0, b"b"), header(b"b", b'2', 0, b"a"), file(b"a/x", b"x")];
    bench.refused(&archive(&loops), "symbolic links");
    for target in [&b"/etc/passwd"[..], b"missing", b"../../etc/passwd"] {
        let error = bench.read(&archive(&[header(b"hard", b'1', 0, target)])).unwrap_err().to_string();
        assert!(error.contains("hard") || error.contains("leave the tree"), "{error}");
    }
    // A hard link to a directory would be a loop.
    let parts = [header(b"d", b'5', 0, b""), header(b"d/loop", b'1', 0, b"d")];
    bench.refused(&archive(&parts), "no file of this image");
}

#[test]
fn sizes_that_disagree_are_refused() {
    let bench = Bench::new();
    // The body hides a second archive from readers that believe the ustar size.
    let hidden = archive(&[file(b"hidden", b"x")]);
    let parts = [pax(&[("size", hidden.len().to_string().as_bytes())]), header(b"f", b'0', 512, b""), hidden.clone()];
    bench.refused(&archive(&parts), "in its PAX header");
    // Zero in the header is how writers say "see PAX": the PAX size holds, and the hidden file is content.
    let parts = [pax(&[("size", hidden.len().to_string().as_bytes())]), header(b"f", b'0', 0, b""), hidden];
    let (mut tree, _) = bench.read(&archive(&parts)).unwrap();
    assert!(tree.find(b"f").is_some() && tree.find(b"hidden").is_none());
    // Data where none can be.
    for kind in [b'1', b'2', b'3', b'5', b'6'] {
        bench.refused(&archive(&[header(b"f", kind, 512, b"x"), vec![0; 512]]), "can have none");
    }
    bench.refused(&archive(&[pax(&[("size", b"-1")]), header(b"f", b'0', 0, b"")]), "is no number");
    bench.refused(&archive(&[pax(&[("size", b"1"), ("size", b"2")]), header(b"f", b'0', 0, b"")]), "twice");
    bench.refused(&archive(&[pax(&[]), pax(&[]), header(b"f", b'0', 0, b"")]), "two PAX headers");
    let mut huge = header(b"f", b'0', 0, b"");
    huge[124..136].copy_from_slice(&[0x80, 0, 0, 0, 0x7f, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff]);
    seal(&mut huge);
    bench.refused(&archive(&[huge]), "the limit leaves room for");
}

/// A header of GNU tar's oldest form, for a file of `size` bytes of which `stored` are in these parts.
fn sparse_header(stored: u64, parts: &[(u64, u64)], size: u64) -> Vec<u8> {
    let mut block = header(b"f", b'S', stored, b"");
    for (index, (place, length)) in parts.iter().enumerate() {
        let at = 386 + 24 * index;
        // In base 256.
        block[at] = 0x80;
        block[at + 4..at + 12].copy_from_slice(&place.to_be_bytes());
        block[at + 12] = 0x80;
        block[at + 16..at + 24].copy_from_slice(&length.to_be_bytes());
    }
    block[483] = 0x80;
    block[487..495].copy_from_slice(&size.to_be_bytes());
    seal(&mut block);
    block
}

#[test]
fn maps_of_sparse_files_that_lie_are_refused() {
    let bench = Bench::new();
    let began = std::time::Instant::now();
    let data = vec![7; 1024];
    for (parts, size, words) in [
        (&[(0, 512), (256, 512)][..], 4096, "overlaps another"),
        (&[(2048, 512), (0, 512)], 4096, "overlaps another"),
        (&[(0, 512), (4096, 512)], 4096, "passes the end"),
        (&[(0, 512), (u64::MAX, 512)], 4096, "passes the end"),
        (&[(0, 512), (u64::MAX - 511, 512)], u64::MAX, "passes the end"),
        (&[(0, 512)], 4096, "1024 bytes, and a map of 512"),
        (&[(0, 1024), (2048, 1024)], 4096, "1024 bytes, and a map of 2048"),
        // Readers differ about where the second part begins.
        (&[(0, 500), (1000, 524)], 4096, "ends in a block"),
        (&[(0, 512), (1 << 60, 512)], (1 << 60) + 512, "the limit leaves room for"),
        (&[(0, 1024)], 1 << 60, "the limit leaves room for"),
    ] {
        bench.refused(&archive(&[sparse_header(1024, parts, size), data.clone()]), words);
    }
    // As large as the limit allows, past what the format can tell.
    let limits = Limits { bytes: 1 << 62, ..Limits::default() };
    let huge = archive(&[sparse_header(1024, &[(0, 1024)], 1 << 60), data.clone()]);
    assert!(bench.read_with(&huge, limits).unwrap_err().to_string().contains("8 TiB is the most"));
    // The map goes on in blocks that are missing.
    let mut more = sparse_header(1024, &[(0, 512)], 4096);
    more[482] = 1;
    seal(&mut more);
    bench.refused(&more, "cut off in the map");
    bench.refused(&sparse_header(1024, &[(0, 1024)], 4096), "cut off");

    let map = |text: &[u8]| {
        let records: [(&str, &[u8]); 4] = [
            ("GNU.sparse.major", b"1"),
            ("GNU.sparse.minor", b"0"),
            ("GNU.sparse.name", b"f"),
            ("GNU.sparse.realsize", b"4096"),
        ];
        let body = [padded(text), data.clone()].concat();
        archive(&[pax(&records), header(b"GNUSparseFile.0/f", b'0', body.len() as u64, b""), body])
    };
    assert!(bench.read(&map(b"2\n0\n512\n2048\n512\n")).is_ok());
    for (text, words) in [
        (&b"2\n0\n512\n256\n512\n"[..], "overlaps another"),
        (b"99999999999999\n", "more than 1048576 parts"),
        (b"-1\n", "for a number"),
        (b"1\n0\n", "for a number"),
        (&[b'1'; 400], "for a number"),
        // It goes on in the data.
        (b"400\n", "for a number"),
    ] {
        bench.refused(&map(text), words);
    }
    let known = |records: &[(&str, &[u8])]| archive(&[pax(records), header(b"f", b'0', 1024, b""), data.clone()]);
    let (size, count) = (("GNU.sparse.size", &b"4096"[..]), ("GNU.sparse.numblocks", &b"1"[..]));
    assert!(bench.read(&known(&[size, count, ("GNU.sparse.map", b"0,1024")])).is_ok());
    for (records, words) in [
        (&[size, count, ("GNU.sparse.map", b"0")][..], "is not understood"),
        (&[size, ("GNU.sparse.map", b"0,1024")], "without a size or map"),
        (&[count, ("GNU.sparse.map", b"0,1024")], "without a size or map"),
        (&[size, count, ("GNU.sparse.map", b"0,512,1024,512")], "without a size or map"),
        (&[size, count, ("GNU.sparse.offset", b"0"), ("GNU.sparse.offset", b"0")], "is not understood"),
        (&[size, count, ("GNU.sparse.numbytes", b"1024")], "is not understood"),
        (&[size, ("GNU.sparse.major", b"2")], "version 2.0"),
        (&[("GNU.sparse.major", b"1")], "without a size or map"),
    ] {
        bench.refused(&known(records), words);
    }
    let link = archive(&[pax(&[size, ("GNU.sparse.numblocks", b"0")]), header(b"f", b'2', 0, b"x")]);
    bench.refused(&link, "no plain file");
    assert!(began.elapsed().as_secs() < 20, "{:?}", began.elapsed());
}

/// What `tar --label` and `tar --listed-incremental` write.
#[test]
fn labels_and_lists_of_names_are_passed_over() {
    let bench = Bench::new();
    let names = b"Yx\0\0";
    let parts = [
        header(b"label", b'V', 0, b""),
        header(b"d/", b'D', 4, b""),
        padded(names),
        file(b"d/x", b"1"),
        header(b"label", b'V', 0, b""),
    ];
    let (tree, _) = bench.read(&archive(&parts)).unwrap();
    let mut found = Vec::new();
    tree.walk(|path, _| found.push(String::from_utf8(path.to_vec()).unwrap()));
    assert_eq!(found, ["", "d", "d/x"]);
    bench.refused(&header(b"d/", b'D', 4, b""), "cut off");
}

#[test]
fn truncated_and_garbled_archives_are_refused() {
    let bench = Bench::new();
    let good = archive(&[file(b"a", &[7; 3000]), file(b"b", b"y")]);
    for cut in [1, 100, 511, 513, 2000, 3583, 3600, 4100] {
        bench.refused(&good[..cut], "cut off");
    }
    // Between two entries, and behind the last.
    for cut in [3584, good.len() - END.len()] {
        bench.refused(&good[..cut], "no end mark after");
    }
    bench.refused(&[], "empty");
    bench.refused(
        b"this is no archive at all, but long enough to look at it as one".repeat(20).as_slice(),
        "is this a tar",
    );
    let mut flipped = good.clone();
    flipped[3] ^= 1;
    bench.refused(&flipped, "checksum");
    bench.refused(&[good.clone(), good].concat(), "behind the archive's end");
    bench.refused(&archive(&[header(b"f", b'Z', 0, b"")]), "not known");
}

fn gzip() -> flate2::write::GzEncoder<Vec<u8>> {
    flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best())
}

fn bzip2() -> bzip2::write::BzEncoder<Vec<u8>> {
    bzip2::write::BzEncoder::new(Vec::new(), bzip2::Compression::best())
}

fn xz(preset: u32) -> lzma_rust2::XzWriter<Vec<u8>> {
    lzma_rust2::XzWriter::new(Vec::new(), lzma_rust2::XzOptions::with_preset(preset)).unwrap()
}

/// Gives `bytes` to a packer.
fn packed<W: Write>(mut packer: W, mut bytes: impl Read) -> W {
    std::io::copy(&mut bytes, &mut packer).unwrap();
    packer
}

#[test]
fn an_xz_stream_does_not_say_how_much_memory_is_taken() {
    let bench = Bench::new();
    let mut stream = packed(xz(0), &archive(&[file(b"a", b"1")])[..]).finish().unwrap();
    assert!(bench.read(&stream).is_ok());
    // The first block's header: its size in words, flags, the number of LZMA2, the size of its properties, and they are the
    // dictionary's size: now 1.5 GiB. A checksum ends it.
    let end = 12 + 4 * usize::from(stream[12]);
    assert_eq!(stream[14..16], [0x21, 1]);
    stream[16] = 37;
    let mut sum = flate2::Crc::new();
    sum.update(&stream[12..end]);
    stream[end..end + 4].copy_from_slice(&sum.sum().to_le_bytes());
    bench.refused(&stream, "more than 256 MiB of memory");
}

#[test]
fn bombs_stop_early() {
    let bench = Bench::new();
    let bomb = || std::io::Cursor::new(header(b"bomb", b'0', 100 << 20, b""));
    let zeros = || std::io::repeat(0).take(100 << 20);
    for packed in [
        packed(gzip(), bomb().chain(zeros())).finish().unwrap(),
        packed(xz(0), bomb().chain(zeros())).finish().unwrap(),
        packed(bzip2(), bomb().chain(zeros())).finish().unwrap(),
    ] {
        bench.refused(&packed, "200:1 is the limit");
    }

    let limits = Limits { bytes: 1000, entries: 3, ..Limits::default() };
    let error = |parts: &[Vec<u8>]| bench.read_with(&archive(parts), limits).unwrap_err().to_string();
    assert!(error(&[file(b"a", &[1; 600]), file(b"b", &[1; 600])]).contains("b: 600 bytes of content"));
    let many: Vec<Vec<u8>> = (0..5u8).map(|i| header(&[b'a' + i], b'5', 0, b"")).collect();
    assert!(error(&many).contains("more than 3 entries"));
    // A header that wants all our memory.
    bench.refused(&header(b"pax", b'x', 1 << 32, b""), "are allowed");
    // Deep nesting ends before the stack or the kernel's path limit does.
    let deep = [b"d/".repeat(3000), b"x".to_vec()].concat();
    bench.refused(&archive(&[pax(&[("path", &deep)]), header(b"f", b'5', 0, b"")]), "PAX path");
}

#[test]
fn short_archives_do_not_make_large_trees() {
    let bench = Bench::new();
    // Attributes that every entry would have a copy of.
    let mut global = pax(&[("SCHILY.xattr.user.a", &[b'x'; 60_000])]);
    global[156] = b'g';
    seal(&mut global);
    bench.refused(&archive(&[global, file(b"a", b"")]), "global header with attributes");
    let mut global = pax(&[("mtime", b"7"), ("comment", b"as git archive has it")]);
    global[156] = b'g';
    seal(&mut global);
    let (mut tree, _) = bench.read(&archive(&[global, file(b"a", b"")])).unwrap();
    let id = tree.find(b"a").unwrap();
    assert_eq!(tree.inode(id).meta.mtime_s, 7);

    // Directories that only paths name count as entries do,
    let limits = Limits { entries: 6, ..Limits::default() };
    assert!(bench.read_with(&archive(&[file(b"1/2/3/4/5", b"")]), limits).is_ok());
    for parts in [&[file(b"1/2/3/4/5/6/7", b"")][..], &[file(b"1/2/3/4/5", b""), file(b"6", b""), file(b"7", b"")]] {
        let error = bench.read_with(&archive(parts), limits).unwrap_err().to_string();
        assert!(error.contains("more than 6 entries"), "{error}");
    }
    // and are few beside the entries.
    let deep = |number: u32| {
        let path = [format!("{number}/").into_bytes(), b"d/".repeat(2030), b"f".to_vec()].concat();
        [pax(&[("path", &path)]), header(b"f", b'0', 0, b"")].concat()
    };
    let bomb: Vec<Vec<u8>> = (0..1000).map(deep).collect();
    bench.refused(&archive(&bomb), "directories that have no entry");
    let honest: Vec<Vec<u8>> = (0..30_000).map(|i| file(format!("{i}/lib/src/file").as_bytes(), b"")).collect();
    assert_eq!(bench.read(&archive(&honest)).unwrap().0.inode_count(), 120_001);
}

#[test]
fn links_do_not_lead_deeper_than_paths() {
    let bench = Bench::new();
    let steps = b"d/".repeat(1000);
    let mut parts = Vec::new();
    for number in 0..38 {
        let place = b"l/".repeat(number);
        let link = [&place[..], b"l"].concat();
        let path = [&place[..], &steps, b"f"].concat();
        parts.push([pax(&[("path", &path)]), header(b"f", b'0', 0, b"")].concat());
        parts.push([pax(&[("path", &link), ("linkpath", &steps)]), header(b"l", b'2', 0, b"")].concat());
    }
    bench.refused(&archive(&parts), "deeper than 2048 directories");
}

#[test]
fn links_do_not_lead_a_long_way_again_and_again() {
    let bench = Bench::new();
    // A short path that takes thirty thousand steps.
    let mut parts = vec![header(b"d", b'5', 0, b"")];
    let there_and_back = b"d/../".repeat(400);
    for number in 1..38 {
        let target = [&there_and_back[..], format!("l{}", number - 1).as_bytes()].concat();
        parts.push([pax(&[("linkpath", &target)]), header(format!("l{number}").as_bytes(), b'2', 0, b"")].concat());
    }
    parts.push(header(b"l0", b'2', 0, b"d"));
    let once = [&parts[..], &[file(b"l37/f", b"")]].concat();
    let (mut tree, _) = bench.read(&archive(&once)).unwrap();
    assert!(tree.find(b"d/f").is_some());
    for entry in [file(b"l37/f", b""), header(b"h", b'1', 0, b"l37/f")] {
        let many: Vec<Vec<u8>> = std::iter::repeat_n(entry, 1000).collect();
        bench.refused(&archive(&[once.concat(), many.concat()]), "steps, links followed");
    }
}

#[test]
fn times_before_1970_and_attributes_as_gnu_tar_writes_them() {
    let bench = Bench::new();
    let mut old = header(b"old", b'0', 0, b"");
    old[136..148].copy_from_slice(&[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xfb]);
    seal(&mut old);
    let attributes = pax(&[("SCHILY.xattr.user.a%3Db", b"v=w"), ("SCHILY.xattr.user.%25%41", b"")]);
    let (mut tree, _) = bench.read(&archive(&[attributes, old])).unwrap();
    let id = tree.find(b"old").unwrap();
    let meta = tree.inode(id).meta.clone();
    assert_eq!(meta.mtime_s, -5);
    let names: Vec<_> = meta.xattrs.keys().map(|name| &**name).collect();
    assert_eq!(names, [&b"user.%%41"[..], b"user.a=b"]);
    assert_eq!(*meta.xattrs[&b"user.a=b"[..]], *b"v=w");
    let twice = pax(&[("SCHILY.xattr.user.%", b"1"), ("SCHILY.xattr.user.%25", b"2")]);
    bench.refused(&archive(&[twice, file(b"f", b"")]), "is twice");
}

#[test]
fn names_that_are_not_utf8_and_impossible_names() {
    let bench = Bench::new();
    let (mut tree, _) = bench.read(&archive(&[file(b"caf\xe9/\xff\xfe", b"x")])).unwrap();
    assert!(tree.find(b"caf\xe9/\xff\xfe").is_some());
    let record = {
        let build = bench.store.build().unwrap();
        build.publish("latin", &tree, "test", Default::default(), vec![]).unwrap()
    };
    assert!(bench.store.tree(&record.digest).unwrap().find(b"caf\xe9/\xff\xfe").is_some());
    let long = vec![b'n'; 256];
    bench.refused(&archive(&[pax(&[("path", &long)]), header(b"f", b'5', 0, b"")]), "not a file name");
    bench.refused(&archive(&[pax(&[("path", b"a\0b")]), header(b"f", b'5', 0, b"")]), "PAX path");
}

/// As GNU tar and bsdtar take it, whatever wrote it.
#[test]
fn a_name_with_a_slash_at_its_end_is_a_directory() {
    let bench = Bench::new();
    for (kind, magic) in [(b'0', &b"ustar\x0000"[..]), (0, b"ustar\x0000"), (0, &[0; 8]), (b'0', b"ustar  \0")] {
        let mut dir = header(b"d/", kind, 0, b"");
        dir[257..265].copy_from_slice(magic);
        seal(&mut dir);
        let (mut tree, _) = bench.read(&archive(&[dir, file(b"d/x", b"1")])).unwrap();
        assert!(tree.find(b"d/x").is_some(), "{kind} {magic:?}");
        let id = tree.find(b"d").unwrap();
        assert_eq!(tree.inode(id).meta.mode, 0o644);
    }
    // Some would pass over what it has, and some read it as entries.
    bench.refused(&archive(&[header(b"d/", b'0', 512, b""), vec![0; 512]]), "can have none");
}

#[test]
fn labels_of_another_systems_policy_come_by_no_layer() {
    let bench = Bench::new();
    let label =
        pax(&[("SCHILY.xattr.security.selinux", b"system_u:object_r:bin_t:s0\0"), ("SCHILY.xattr.user.a", b"1")]);
    let bytes = archive(&[label.clone(), header(b"./", b'5', 0, b""), label, header(b"f", b'0', 0, b"")]);
    let has = |tree: &Tree, path: &[u8]| {
        let id = tree.clone().find(path).unwrap();
        tree.inode(id).meta.xattrs.keys().map(|name| String::from_utf8(name.to_vec()).unwrap()).collect::<Vec<_>>()
    };
    let dir = tempfile::tempdir().unwrap();
    layout(dir.path(), &[&bytes], |_| ());
    let (build, mut notes, silent) = (bench.store.build().unwrap(), Omissions::default(), Progress::silent());
    let (tree, _) =
        oci::import(&build, dir.path(), &Wanted::default(), Limits::default(), &mut notes, &silent).unwrap();
    assert_eq!([has(&tree, b""), has(&tree, b"f")], [["user.a"], ["user.a"]]);
    assert!(notes.lines().len() == 1 && notes.lines()[0].contains("SELinux labels of layers were left out (2; "));
    // An archive of a tree has its own.
    let (tree, notes) = bench.read(&bytes).unwrap();
    assert_eq!([has(&tree, b""), has(&tree, b"f")], [["security.selinux", "user.a"], ["security.selinux", "user.a"]]);
    assert!(notes.is_empty());
}

#[test]
fn attributes_cannot_steer_overlayfs() {
    let bench = Bench::new();
    let steal = format!("/{}", pagefold_image::digest::Digest::of(b"secret").object_path());
    let parts = [
        pax(&[
            ("SCHILY.xattr.trusted.overlay.redirect", steal.as_bytes()),
            ("SCHILY.xattr.user.overlay.metacopy", b""),
            ("SCHILY.xattr.trusted.erofs.fingerprint", b"sha256:"),
            ("SCHILY.xattr.user.kept", b"v"),
        ]),
        header(b"f", b'0', 0, b""),
        // Overlayfs's own mark of a deleted file.
        header(b"w", b'3', 0, b""),
    ];
    let (mut tree, notes) = bench.read(&archive(&parts)).unwrap();
    let id = tree.find(b"f").unwrap();
    let names: Vec<_> = tree.inode(id).meta.xattrs.keys().map(|name| name.to_vec()).collect();
    assert_eq!(names, [b"user.kept".to_vec()]);
    assert!(tree.find(b"w").is_none());
    assert_eq!(notes.len(), 2, "{notes:?}");
    assert!(notes.iter().any(|note| note.contains(" (3; first: ")), "{notes:?}");
}

#[test]
fn a_million_entries_in_one_directory() {
    let bench = Bench::new();
    let mut bytes = Vec::new();
    for number in 0..1_000_000u32 {
        bytes.extend(header(format!("d/{number:07}").as_bytes(), b'0', 0, b""));
    }
    bytes.extend(END);
    let (tree, _) = bench.read(&bytes).unwrap();
    drop(bytes);
    let build = bench.store.build().unwrap();
    let record = build.publish("million", &tree, "test", Default::default(), vec![]).unwrap();
    assert_eq!(record.entries, 1_000_001);
    drop(tree);
    let mut tree = bench.store.tree(&record.digest).unwrap();
    assert!(tree.find(b"d/0000000").is_some() && tree.find(b"d/0999999").is_some());
}

/// Makes an OCI layout of `layers` (already compressed or not) and returns its directory.
fn layout(dir: &Path, layers: &[&[u8]], spoil: impl Fn(&mut serde_json::Value)) {
    use pagefold_image::digest::Digest;
    let blobs = dir.join("blobs/sha256");
    std::fs::create_dir_all(&blobs).unwrap();
    let put = |bytes: &[u8]| {
        let digest = Digest::of(bytes);
        std::fs::write(blobs.join(digest.hex()), bytes).unwrap();
        serde_json::json!({ "mediaType": "", "digest": digest, "size": bytes.len() })
    };
    let config = put(br#"{"config":{"Env":["A=1"],"Cmd":["/bin/x"]}}"#);
    let layers: Vec<_> = layers.iter().map(|layer| put(layer)).collect();
    let mut manifest = serde_json::json!({ "schemaVersion": 2, "config": config, "layers": layers });
    spoil(&mut manifest);
    let manifest = put(manifest.to_string().as_bytes());
    std::fs::write(dir.join("index.json"), serde_json::json!({ "manifests": [manifest] }).to_string()).unwrap();
    std::fs::write(dir.join("oci-layout"), r#"{"imageLayoutVersion":"1.0.0"}"#).unwrap();
}

fn import(bench: &Bench, path: &Path) -> Result<Tree, Error> {
    let build = bench.store.build()?;
    oci::import(&build, path, &Wanted::default(), Limits::default(), &mut Omissions::default(), &Progress::silent())
        .map(|(tree, _)| tree)
}

#[test]
fn layers_apply_with_whiteouts_and_opaque_directories() {
    let bench = Bench::new();
    let dir = tempfile::tempdir().unwrap();
    let base = archive(&[file(b"keep", b"1"), file(b"gone", b"1"), file(b"d/old", b"1"), file(b"d/sub/old", b"1")]);
    // The new file comes before the opaque mark: the mark must not take it.
    let top =
        archive(&[file(b"d/new", b"2"), file(b"d/.wh..wh..opq", b""), file(b".wh.gone", b""), file(b".wh.never", b"")]);
    layout(dir.path(), &[&base, &top], |_| ());
    let mut tree = import(&bench, dir.path()).unwrap();
    for (path, there) in
        [("keep", true), ("gone", false), ("d/old", false), ("d/sub", false), ("d/new", true), (".wh.gone", false)]
    {
        assert_eq!(tree.find(path.as_bytes()).is_some(), there, "{path}");
    }
    let dir = tempfile::tempdir().unwrap();
    layout(dir.path(), &[&archive(&[file(b".wh...", b"")])], |_| ());
    assert!(import(&bench, dir.path()).unwrap_err().to_string().contains("whiteout"));
}

/// What container engines unpack without a word, this reads.
#[test]
fn layers_of_no_bytes_and_odd_links_are_read() {
    let bench = Bench::new();
    let dir = tempfile::tempdir().unwrap();
    let link = header(b"link", b'2', 0, b"f");
    let nothing = gzip().finish().unwrap();
    layout(dir.path(), &[&archive(&[file(b"f", b"1"), link]), b"", &nothing], |_| ());
    let mut tree = import(&bench, dir.path()).unwrap();
    let id = tree.find(b"link").unwrap();
    assert_eq!(tree.inode(id).meta.mode, 0o777, "the header said 0644");
    // A whole archive of no bytes was cut off.
    bench.refused(b"", "empty");

    // Of two members of one name the later one counts.
    let first = file(b"oci-layout", b"{}");
    let whole = [first, layout_archive(dir.path(), false)].concat();
    let path = dir.path().join("twice.tar");
    std::fs::write(&path, whole).unwrap();
    assert!(import(&bench, &path).unwrap().find(b"f").is_some());
}

#[test]
fn a_layer_reaches_through_no_link_of_a_lower_one() {
    let bench = Bench::new();
    let base = archive(&[header(b"a", b'2', 0, b"b"), file(b"b/x", b"1"), file(b"b/y", b"1")]);
    let own_link = header(b"own", b'2', 0, b"b");
    for (top, expected, notes) in [
        // A directory that only a path names hides the link.
        (&[file(b"a/z", b"2")][..], &["a", "a/z", "b", "b/x", "b/y"][..], 0),
        (&[file(b"a/.wh..wh..opq", b"")], &["a", "b", "b/x", "b/y"], 0),
        (&[file(b"a/.wh.x", b"")], &["a", "b", "b/x", "b/y"], 0),
        // Through links of its own a layer writes, as in unpacking, and deletes nothing.
        (&[own_link.clone(), file(b"own/z", b"2")], &["a", "b", "b/x", "b/y", "b/z", "own"], 0),
        (&[own_link.clone(), file(b"own/.wh..wh..opq", b"")], &["a", "b", "b/x", "b/y", "own"], 1),
        (&[own_link, file(b"own/.wh.x", b"")], &["a", "b", "b/x", "b/y", "own"], 1),
    ] {
        let (dir, mut said) = (tempfile::tempdir().unwrap(), Omissions::default());
        layout(dir.path(), &[&base, &archive(top)], |_| ());
        let (build, wanted, silent) = (bench.store.build().unwrap(), Wanted::default(), Progress::silent());
        let (tree, _) = oci::import(&build, dir.path(), &wanted, Limits::default(), &mut said, &silent).unwrap();
        let mut names = Vec::new();
        tree.walk(|path, _| names.push(String::from_utf8(path.to_vec()).unwrap()));
        assert_eq!(
            (&names[1..], said.lines().len()),
            (&expected.iter().map(|name| name.to_string()).collect::<Vec<_>>()[..], notes)
        );
    }
}

#[test]
fn a_directory_in_a_layer_replaces_a_file_of_that_name_below() {
    let bench = Bench::new();
    let base = archive(&[file(b"a", b"1"), file(b"b", b"1")]);
    let (new, gone) = (file(b"a/sub/x", b"2"), file(b".wh.a", b""));
    for top in [&[new.clone(), gone.clone()][..], &[gone, new.clone()], std::slice::from_ref(&new)] {
        let layers = tempfile::tempdir().unwrap();
        layout(layers.path(), &[&base, &archive(top)], |_| ());
        let tree = import(&bench, layers.path()).unwrap();
        let mut names = Vec::new();
        tree.walk(|path, _| names.push(String::from_utf8(path.to_vec()).unwrap()));
        assert_eq!(names, ["", "a", "a/sub", "a/sub/x", "b"]);
    }
    // Within one layer a file is no directory.
    let layers = tempfile::tempdir().unwrap();
    layout(layers.path(), &[&base, &archive(&[file(b"a", b"2"), new])], |_| ());
    assert!(import(&bench, layers.path()).unwrap_err().to_string().contains("not a directory"));
}

/// In whatever order they come.
#[test]
fn a_whiteout_hides_the_lower_content_of_a_directory_in_the_same_layer() {
    let bench = Bench::new();
    let base = archive(&[file(b"d/secret", b"1"), file(b"d/sub/old", b"1"), file(b"f", b"1")]);
    let dir = header(b"d", b'5', 0, b"");
    for top in [
        [dir.clone(), file(b"d/new", b"2"), file(b"d/sub/new", b"2"), file(b".wh.d", b""), file(b"f", b"2")],
        [dir.clone(), file(b".wh.d", b""), file(b"d/new", b"2"), file(b"d/sub/new", b"2"), file(b"f", b"2")],
        [file(b".wh.d", b""), dir, file(b"d/new", b"2"), file(b"d/sub/new", b"2"), file(b"f", b"2")],
    ] {
        let layers = tempfile::tempdir().unwrap();
        // Of a file that the layer has, too, the whiteout hides the lower one only.
        let top = archive(&[&top[..], &[file(b".wh.f", b"")]].concat());
        layout(layers.path(), &[&base, &top], |_| ());
        let tree = import(&bench, layers.path()).unwrap();
        let mut names = Vec::new();
        tree.walk(|path, _| names.push(String::from_utf8(path.to_vec()).unwrap()));
        assert_eq!(names, ["", "d", "d/new", "d/sub", "d/sub/new", "f"]);
    }
}

/// The files below `dir` as an archive; with `hard`, the blobs are hard links to files of another directory.
fn layout_archive(dir: &Path, hard: bool) -> Vec<u8> {
    let mut parts = Vec::new();
    for entry in std::fs::read_dir(dir.join("blobs/sha256")).unwrap() {
        let (name, bytes) = (entry.as_ref().unwrap().file_name(), std::fs::read(entry.unwrap().path()).unwrap());
        let name = name.to_str().unwrap();
        let (blob, cached) = (format!("blobs/sha256/{name}"), format!("cache/{name}"));
        if hard {
            parts.push(file(cached.as_bytes(), &bytes));
            parts.push(header(blob.as_bytes(), b'1', 0, cached.as_bytes()));
        } else {
            parts.push(file(blob.as_bytes(), &bytes));
        }
    }
    for name in ["index.json", "oci-layout"] {
        parts.push(file(name.as_bytes(), &std::fs::read(dir.join(name)).unwrap()));
    }
    archive(&parts)
}

#[test]
fn archives_come_through_pipes_and_with_hard_links() {
    use std::os::fd::AsRawFd;
    let bench = Bench::new();
    let dir = tempfile::tempdir().unwrap();
    layout(dir.path(), &[&archive(&[file(b"a", &[9; 5000])])], |_| ());
    let plain = layout_archive(dir.path(), false);
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    gzip.write_all(&plain).unwrap();
    for bytes in [plain, gzip.finish().unwrap(), layout_archive(dir.path(), true)] {
        let path = dir.path().join("archive");
        std::fs::write(&path, &bytes).unwrap();
        assert!(import(&bench, &path).unwrap().find(b"a").is_some());
        let (reader, mut writer) = std::io::pipe().unwrap();
        let feeder = std::thread::spawn(move || writer.write_all(&bytes));
        let pipe = PathBuf::from(format!("/proc/self/fd/{}", reader.as_raw_fd()));
        assert!(import(&bench, &pipe).unwrap().find(b"a").is_some());
        feeder.join().unwrap().unwrap();
    }
    // One that is too large is not said to be cut off.
    let (reader, mut writer) = std::io::pipe().unwrap();
    let bytes = layout_archive(dir.path(), false);
    let feeder = std::thread::spawn(move || writer.write_all(&bytes));
    let pipe = PathBuf::from(format!("/proc/self/fd/{}", reader.as_raw_fd()));
    let (build, limits) = (bench.store.build().unwrap(), Limits { bytes: 4000, ..Limits::default() });
    let error = oci::import(&build, &pipe, &Wanted::default(), limits, &mut Omissions::default(), &Progress::silent())
        .unwrap_err();
    assert!(error.to_string().contains("more than the limit's 4000 bytes"), "{error}");
    drop(reader);
    let _ = feeder.join();
}

/// What `skopeo copy … dir:DIR` and `podman save --format docker-dir` write: blobs by their digests alone, and `version`.
#[test]
fn a_directory_of_blobs_is_an_image() {
    let bench = Bench::new();
    let (laid, plain) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let layers = [archive(&[file(b"a", b"1"), file(b"b", b"1")]), archive(&[file(b".wh.a", b""), file(b"c", b"2")])];
    layout(laid.path(), &layers.each_ref().map(|layer| &layer[..]), |_| ());
    let index: serde_json::Value =
        serde_json::from_slice(&std::fs::read(laid.path().join("index.json")).unwrap()).unwrap();
    let name = |value: &serde_json::Value| value["digest"].as_str().unwrap()["sha256:".len()..].to_string();
    let (blobs, at) = (laid.path().join("blobs/sha256"), plain.path());
    for blob in std::fs::read_dir(&blobs).unwrap().map(|blob| blob.unwrap()) {
        std::fs::copy(blob.path(), at.join(blob.file_name())).unwrap();
    }
    let manifest = name(&index["manifests"][0]);
    std::fs::rename(at.join(&manifest), at.join("manifest.json")).unwrap();
    assert!(!oci::is_image(at).unwrap());
    std::fs::write(at.join("version"), "Directory Transport Version: 1.1\n").unwrap();
    assert!(oci::is_image(at).unwrap());
    let names = |tree: &Tree| tree.children(ROOT).map(|(name, _)| name.to_vec()).collect::<Vec<_>>();
    assert_eq!(names(&import(&bench, at).unwrap()), [b"b".to_vec(), b"c".to_vec()]);
    // `skopeo copy --all` writes a list, and the manifests beside it.
    std::fs::rename(at.join("manifest.json"), at.join(format!("{manifest}.manifest.json"))).unwrap();
    std::fs::write(at.join("manifest.json"), index.to_string()).unwrap();
    assert_eq!(names(&import(&bench, at).unwrap()), [b"b".to_vec(), b"c".to_vec()]);
    // Blobs are what their names say, and lie in the directory.
    let first = std::fs::read_dir(at).unwrap().map(|file| file.unwrap().path());
    let blob =
        first.filter(|path| path.file_name().unwrap().len() == 64).max_by_key(|path| path.metadata().unwrap().len());
    let blob = blob.unwrap();
    let bytes = std::fs::read(&blob).unwrap();
    std::fs::write(&blob, [&bytes[..600], &b"x"[..], &bytes[601..]].concat()).unwrap();
    assert!(matches!(import(&bench, at).unwrap_err(), Error::Digest { .. }));
    let outside = laid.path().join("outside");
    std::fs::write(&outside, &bytes).unwrap();
    std::fs::remove_file(&blob).unwrap();
    std::os::unix::fs::symlink(&outside, &blob).unwrap();
    assert!(import(&bench, at).is_err());
    std::fs::remove_file(&blob).unwrap();
    let error = import(&bench, at).unwrap_err().to_string();
    assert!(error.contains("copy the whole image"), "{error}");
}

/// An import never opens a pipe in the place of a layer: its writer keeps waiting for a reader.
#[test]
fn special_files_in_a_layout_are_not_opened() {
    let bench = Bench::new();
    let dir = tempfile::tempdir().unwrap();
    let layer = archive(&[file(b"a", b"1")]);
    layout(dir.path(), &[&layer], |_| ());
    assert!(import(&bench, dir.path()).is_ok());
    let blobs = std::fs::read_dir(dir.path().join("blobs/sha256")).unwrap().map(|blob| blob.unwrap().path());
    let layer = blobs.max_by_key(|blob| blob.metadata().unwrap().len()).unwrap();
    std::fs::remove_file(&layer).unwrap();
    rustix::fs::mknodat(rustix::fs::CWD, &layer, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
    let (sender, receiver) = std::sync::mpsc::channel();
    let writer = std::thread::spawn({
        let layer = layer.clone();
        move || sender.send(std::fs::File::options().write(true).open(layer).map(drop))
    });
    std::thread::sleep(std::time::Duration::from_millis(100));
    let error = import(&bench, dir.path()).unwrap_err().to_string();
    assert!(error.contains("not a regular file"), "{error}");
    assert!(receiver.recv_timeout(std::time::Duration::from_millis(300)).is_err(), "it was opened");
    // Lets the waiting writer end.
    drop(std::fs::File::open(&layer).unwrap());
    writer.join().unwrap().unwrap();
}

#[test]
fn a_directory_with_a_file_of_that_name_is_no_image() {
    let dir = tempfile::tempdir().unwrap();
    let docker = br#"[{"Config": "c", "Layers": ["l"]}]"#;
    let looks = |parts: &[Vec<u8>]| {
        let path = dir.path().join("archive");
        std::fs::write(&path, archive(parts)).unwrap();
        oci::is_image(&path).unwrap()
    };
    // As an extension of a browser has it, and other programs.
    for other in [&b"{}"[..], b"[]", br#"[{"name": "x"}]"#, b"", b"\xff"] {
        assert!(!looks(&[file(b"manifest.json", other), file(b"index.json", b"{}")]));
    }
    assert!(!looks(&[file(b"oci-layout", b"{}"), file(b"d/index.json", b"{}")]));
    let many: Vec<Vec<u8>> = (0..5000).map(|number| file(format!("blobs/{number}").as_bytes(), b"x")).collect();
    assert!(looks(&[many.concat(), file(b"index.json", b"{}"), file(b"./oci-layout", b"{}")]));
    assert!(looks(&[many.concat(), file(b"manifest.json", docker), file(b"index.json", b"{}")]));
    // Cut off behind its last header.
    let cut = [file(b"manifest.json", docker), header(b"large", b'0', 1 << 20, b"")].concat();
    std::fs::write(dir.path().join("cut"), cut).unwrap();
    assert!(!oci::is_image(&dir.path().join("cut")).unwrap());

    // A pipe is not opened: its writer would see a reader come and go.
    let (fifo, (sender, receiver)) = (dir.path().join("fifo"), std::sync::mpsc::channel());
    rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
    std::thread::spawn(move || sender.send(oci::is_image(&fifo)));
    assert!(!receiver.recv_timeout(std::time::Duration::from_secs(60)).expect("it waits for a writer").unwrap());
}

#[test]
fn an_image_is_found_by_its_tag_as_docker_writes_it_and_by_digest() {
    let bench = Bench::new();
    let dir = tempfile::tempdir().unwrap();
    let take_for = |reference: Option<&str>, platform: Option<&str>| -> Result<Vec<String>, String> {
        let build = bench.store.build().unwrap();
        let (mut notes, silent) = (Omissions::default(), Progress::silent());
        let wanted = Wanted {
            reference: reference.map(str::to_owned),
            platform: platform.map(|platform| platform.parse().unwrap()),
        };
        let (tree, _) = oci::import(&build, dir.path(), &wanted, Limits::default(), &mut notes, &silent)
            .map_err(|error| error.to_string())?;
        let mut names = Vec::new();
        tree.walk(|path, _| names.push(String::from_utf8(path.to_vec()).unwrap()));
        Ok(names[1..].to_vec())
    };
    let take = |reference: Option<&str>| take_for(reference, None);
    let mut descriptors = Vec::new();
    for (name, full) in
        [("one", "docker.io/library/a:latest"), ("two", "localhost/b:latest"), ("three", "x.org/c/b:v1")]
    {
        layout(dir.path(), &[&archive(&[file(name.as_bytes(), b"1")])], |_| ());
        let index: serde_json::Value =
            serde_json::from_slice(&std::fs::read(dir.path().join("index.json")).unwrap()).unwrap();
        let mut descriptor = index["manifests"][0].clone();
        let tag = full.rsplit(':').next().unwrap();
        descriptor["annotations"] =
            serde_json::json!({ "org.opencontainers.image.ref.name": tag, "io.containerd.image.name": full });
        descriptors.push(descriptor);
    }
    // The first under a second tag, too.
    let mut again = descriptors[0].clone();
    again["annotations"]["io.containerd.image.name"] = "docker.io/library/a:v1.0".into();
    descriptors.push(again);
    let put = |descriptors: &[serde_json::Value]| {
        let index = serde_json::json!({ "manifests": descriptors }).to_string();
        std::fs::write(dir.path().join("index.json"), &index).unwrap();
        index
    };
    put(&descriptors);
    for (reference, name) in [
        ("docker.io/library/a:latest", "one"),
        ("a:latest", "one"),
        ("library/a:v1.0", "one"),
        ("b:latest", "two"),
        ("v1", "three"),
        (descriptors[1]["digest"].as_str().unwrap(), "two"),
    ] {
        assert_eq!(take(Some(reference)).unwrap(), [name], "{reference}");
    }
    let text = take(Some("latest")).unwrap_err();
    assert!(
        text.contains("2 images fit")
            && text.contains(&format!("localhost/b:latest = {}", descriptors[1]["digest"].as_str().unwrap())),
        "{text}"
    );
    assert!(take(Some("est")).unwrap_err().contains("0 images fit"));
    assert!(take(None).unwrap_err().contains("3 images fit"));

    // In an index of its own, two for processors that differ in their variant only.
    for (number, descriptor) in descriptors.iter_mut().enumerate() {
        descriptor["platform"] =
            serde_json::json!({ "os": "linux", "architecture": "arm", "variant": format!("v{number}") });
    }
    let inner = put(&descriptors[..2]);
    let digest = pagefold_image::digest::Digest::of(inner.as_bytes());
    std::fs::write(dir.path().join("blobs/sha256").join(digest.hex()), &inner).unwrap();
    let media = "application/vnd.oci.image.index.v1+json";
    put(&[serde_json::json!({ "mediaType": media, "digest": digest, "size": inner.len() })]);
    assert_eq!(take(Some(descriptors[1]["digest"].as_str().unwrap())).unwrap(), ["two"]);
    assert!(take(None).unwrap_err().contains("for linux/arm/v1"));
    assert!(take(Some(&pagefold_image::digest::Digest::of(b"none").to_string())).unwrap_err().contains("0 images fit"));
    assert_eq!(take_for(None, Some("linux/arm/v1")).unwrap(), ["two"]);
    let text = take_for(None, Some("linux/riscv64")).unwrap_err();
    assert!(text.contains("no image for linux/riscv64; --platform names another"), "{text}");

    // What is meant where no variant is named; and an attestation, which is for no machine.
    for (descriptor, (architecture, variant)) in
        descriptors.iter_mut().zip([("arm64", "v9"), ("arm64", "v8"), ("unknown", "")])
    {
        descriptor["platform"] = serde_json::json!({ "os": "linux", "architecture": architecture, "variant": variant });
    }
    descriptors[2]["platform"]["os"] = "unknown".into();
    put(&descriptors[..3]);
    assert_eq!(take_for(None, Some("linux/arm64")).unwrap(), ["two"]);
    assert_eq!(take_for(None, Some("linux/arm64/v9")).unwrap(), ["one"]);

    // One image, of which the index says nothing: its own word counts.
    let config = br#"{"os":"linux","architecture":"s390x"}"#;
    let digest = pagefold_image::digest::Digest::of(config);
    std::fs::write(dir.path().join("blobs/sha256").join(digest.hex()), config).unwrap();
    layout(dir.path(), &[&archive(&[file(b"alone", b"1")])], |manifest| {
        manifest["config"] = serde_json::json!({ "digest": digest, "size": config.len() });
    });
    assert_eq!(take(None).unwrap(), ["alone"]);
    assert_eq!(take_for(None, Some("linux/s390x")).unwrap(), ["alone"]);
    assert!(take_for(None, Some("linux/amd64")).unwrap_err().contains("is for linux/s390x, not for linux/amd64"));
}

#[test]
fn the_limit_of_bytes_is_for_all_layers_together() {
    let bench = Bench::new();
    let packed = |name: &[u8]| {
        let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        gzip.write_all(&archive(&[file(name, &[1; 100_000])])).unwrap();
        gzip.finish().unwrap()
    };
    let layers = [packed(b"a"), packed(b"b"), packed(b"c")];
    let layers: Vec<&[u8]> = layers.iter().map(|layer| &layer[..]).collect();
    let dir = tempfile::tempdir().unwrap();
    layout(dir.path(), &layers, |_| ());
    let docker = dir.path().join("docker.tar");
    let names = ["1", "2", "3"];
    let manifest = serde_json::json!([{ "Config": "config.json", "RepoTags": null, "Layers": names }]).to_string();
    let mut parts = vec![file(b"manifest.json", manifest.as_bytes()), file(b"config.json", b"{}")];
    parts.extend(names.iter().zip(&layers).map(|(name, layer)| file(name.as_bytes(), layer)));
    std::fs::write(&docker, archive(&parts)).unwrap();
    for path in [dir.path(), &docker] {
        let import = |bytes| {
            let (build, limits) = (bench.store.build().unwrap(), Limits { bytes, ..Limits::default() });
            oci::import(&build, path, &Wanted::default(), limits, &mut Omissions::default(), &Progress::silent())
                .map(|(tree, _)| tree)
        };
        assert!(import(300_000).unwrap().find(b"c").is_some());
        let text = import(299_999).unwrap_err().to_string();
        assert!(text.contains("layer 3") && text.contains("c: 100000 bytes"), "{text}");
        assert!(text.contains("room for 99999"), "{text}");
    }
}

#[test]
fn memory_use_is_limited_for_all_layers_together() {
    let bench = Bench::new();
    // Names of 2 bytes, an attribute of 6 + 1000, and links of 500: 1508 bytes an entry, and a replaced one takes as much.
    let part = |name: &[u8]| {
        let attribute = [b'x'; 1000];
        let link = [b't'; 500];
        [pax(&[("SCHILY.xattr.user.a", &attribute), ("linkpath", &link)]), header(name, b'2', 0, b"")].concat()
    };
    let layer = archive(&[part(b"l1"), part(b"l2"), part(b"l1")]);
    let dir = tempfile::tempdir().unwrap();
    layout(dir.path(), &[&layer, &layer], |_| ());
    let import = |entries, names_bytes| {
        let (build, limits) = (bench.store.build().unwrap(), Limits { entries, names_bytes, ..Limits::default() });
        let imported =
            oci::import(&build, dir.path(), &Wanted::default(), limits, &mut Omissions::default(), &Progress::silent());
        imported.map(|_| ()).map_err(|error| error.to_string())
    };
    // Extended headers are entries, too.
    import(12, 6 * 1508).unwrap();
    let text = import(12, 6 * 1508 - 1).unwrap_err();
    assert!(text.contains("layer 2") && text.contains("l1: with its name, link target and attributes"), "{text}");
    let text = import(11, 6 * 1508).unwrap_err();
    assert!(text.contains("layer 2") && text.contains("more than 5 entries"), "{text}");
}

/// An archive of an image is listed before it is read, and a path may be as long as an extended header.
#[test]
fn the_paths_of_an_images_archive_are_limited() {
    let bench = Bench::new();
    let dir = tempfile::tempdir().unwrap();
    layout(dir.path(), &[&archive(&[file(b"a", b"1")])], |_| ());
    let long = |number: u8| {
        let path = [&[b'0' + number][..], &b"/d".repeat(2000)].concat();
        [header(b"././@LongLink", b'L', path.len() as u64, b""), padded(&path), file(b"short", b"")].concat()
    };
    let path = dir.path().join("archive");
    std::fs::write(&path, [(0..5).flat_map(long).collect(), layout_archive(dir.path(), false)].concat()).unwrap();
    let import = |names_bytes| {
        let (build, limits) = (bench.store.build().unwrap(), Limits { names_bytes, ..Limits::default() });
        let imported =
            oci::import(&build, &path, &Wanted::default(), limits, &mut Omissions::default(), &Progress::silent());
        imported.map(|_| ()).map_err(|error| error.to_string())
    };
    import(5 * 4001 + 1000).unwrap();
    let text = import(5 * 4001 - 1).unwrap_err();
    assert!(text.contains("paths in it are more than the limit's 20004 bytes"), "{text}");
}

#[test]
fn layers_that_are_not_themselves_are_refused() {
    use pagefold_image::digest::Digest;
    let bench = Bench::new();
    let good = archive(&[file(b"a", &[9; 5000])]);
    let spoiled = |spoil: &dyn Fn(&Path, &mut serde_json::Value)| {
        let dir = tempfile::tempdir().unwrap();
        layout(dir.path(), &[&good], |manifest| spoil(dir.path(), manifest));
        import(&bench, dir.path()).unwrap_err().to_string()
    };
    let blob = dir_blob(&good);
    let text = spoiled(&|dir, _| {
        let mut bytes = good.clone();
        bytes[700] ^= 1;
        std::fs::write(dir.join(&blob), bytes).unwrap();
    });
    assert!(text.contains("layer 1") && text.contains("fetch it again"), "{text}");
    let text = spoiled(&|dir, _| std::fs::write(dir.join(&blob), &good[..1000]).unwrap());
    assert!(text.contains("layer 1") && text.contains("bytes"), "{text}");
    let text = spoiled(&|_, manifest| manifest["layers"][0]["digest"] = "sha256:../../../etc/passwd".into());
    assert!(text.contains("is not a sha256 digest"), "{text}");
    let text = spoiled(&|_, manifest| manifest["layers"][0]["digest"] = Digest::of(b"other").to_string().into());
    assert!(text.contains("not in the layout"), "{text}");
    let text = spoiled(&|_, manifest| manifest["config"]["size"] = 1.into());
    assert!(text.contains("config") || text.contains("digest"), "{text}");
    // A blob that is a link to a file outside.
    let text = spoiled(&|dir, _| {
        std::fs::remove_file(dir.join(&blob)).unwrap();
        std::os::unix::fs::symlink("/etc/passwd", dir.join(&blob)).unwrap();
    });
    assert!(!text.contains("root:"), "{text}");
    fn dir_blob(bytes: &[u8]) -> String {
        format!("blobs/sha256/{}", Digest::of(bytes).hex())
    }
}

#[test]
fn errors_name_their_cause() {
    let bench = Bench::new();
    let dir = tempfile::tempdir().unwrap();
    layout(dir.path(), &[&archive(&[file(b"a", &[9; 5000])])], |_| ());
    let plain = layout_archive(dir.path(), false);
    let path = dir.path().join("archive");
    let text = |bytes: &[u8]| {
        std::fs::write(&path, bytes).unwrap();
        import(&bench, &path).map(|_| ()).unwrap_err().to_string()
    };
    for packed in [&b"LZIP and more"[..], b"\x1f\x9d and more", b"\x04\x22\x4d\x18 and more"] {
        assert!(text(packed).contains("packed with lz4"), "{}", text(packed));
    }
    // A frame to be skipped comes first, as pzstd writes it.
    let zstd = ruzstd::encoding::compress_to_vec(&plain[..], ruzstd::encoding::CompressionLevel::Fastest);
    std::fs::write(&path, [&[0x50, 0x2a, 0x4d, 0x18, 4, 0, 0, 0][..], b"skip", &zstd].concat()).unwrap();
    assert!(import(&bench, &path).unwrap().find(b"a").is_some());
    // A layer of a docker-archive, which has no digest of its own, that ends in the middle of a file.
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::none());
    gzip.write_all(&archive(&[file(b"large", &[3; 50_000])])).unwrap();
    let mut layer = gzip.finish().unwrap();
    layer.truncate(20_000);
    let manifest = serde_json::json!([{ "Config": "config.json", "RepoTags": null, "Layers": ["1"] }]).to_string();
    let docker = [file(b"manifest.json", manifest.as_bytes()), file(b"config.json", b"{}"), file(b"1", &layer)];
    let said = text(&archive(&docker));
    assert!(said.starts_with("layer 1 (1): ") && said.contains("large"), "{said}");
    // Larger than the format can tell, known before it is read.
    let mut huge = header(b"huge", b'0', 0, b"");
    huge[124..136].copy_from_slice(&[0x80, 0, 0, 0, 0, 0, 8, 0, 0, 0, 0, 1]);
    seal(&mut huge);
    let limits = Limits { bytes: 1 << 50, ..Limits::default() };
    let said = bench.read_with(&huge, limits).unwrap_err().to_string();
    assert!(said.contains("huge: 8796093022209 bytes; 8 TiB is the most"), "{said}");
}

#[test]
fn corrupt_compressed_layers_are_refused() {
    let bench = Bench::new();
    let plain = archive(&[file(b"a", &[3; 9000])]);
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    gzip.write_all(&plain).unwrap();
    let gzip = gzip.finish().unwrap();
    let zstd = ruzstd::encoding::compress_to_vec(&plain[..], ruzstd::encoding::CompressionLevel::Fastest);
    let in_bzip2 = |bytes: &[u8]| packed(bzip2(), bytes).finish().unwrap();
    let in_xz = |bytes: &[u8]| packed(xz(6), bytes).finish().unwrap();
    for packed in [&gzip, &zstd, &in_bzip2(&plain), &in_xz(&plain)] {
        let (mut tree, _) = bench.read(packed).unwrap();
        assert!(tree.find(b"a").is_some());
        assert!(bench.read(&packed[..packed.len() / 2]).is_err());
        let mut split = packed.clone();
        split.truncate(20);
        assert!(bench.read(&split).is_err());
    }
    let skippable = [&[0x50, 0x2a, 0x4d, 0x18, 4, 0, 0, 0][..], b"skip", &zstd].concat();
    assert!(bench.read(&skippable).is_ok());
    // Several streams are one, as parallel packers write them, and no flipped bit changes the content.
    let (head, tail) = plain.split_at(4000);
    for both in [[in_bzip2(head), in_bzip2(tail)].concat(), [in_xz(head), in_xz(tail)].concat()] {
        let content = |(mut tree, _): (Tree, _)| tree.find(b"a").map(|id| tree.inode(id).kind.clone());
        let whole = content(bench.read(&both).unwrap());
        assert!(whole.is_some());
        for at in (0..both.len()).step_by(3) {
            let mut spoiled = both.clone();
            spoiled[at] ^= 1;
            // The size of bzip2's blocks is only the most that they may have.
            assert!(
                bench.read(&spoiled).is_err() || content(bench.read(&spoiled).unwrap()) == whole,
                "byte {at} of {}",
                both.len()
            );
        }
    }
    // A flipped bit in what is stored as it is: only the frame's checksum can tell, in the last frame, too.
    use ruzstd::encoding::{CompressionLevel::Uncompressed, compress_to_vec};
    let frames = [compress_to_vec(head, Uncompressed), compress_to_vec(tail, Uncompressed)];
    assert!(bench.read(&frames.concat()).is_ok());
    for (frame, at) in [(0, 2000), (0, frames[0].len() - 1), (1, 2000), (1, frames[1].len() - 1)] {
        let mut spoiled = frames.clone();
        spoiled[frame][at] ^= 1;
        bench.refused(&spoiled.concat(), "does not match its checksum");
    }
}
