//! `pagefold bench erofs`: the memory that image trees save, and what the mounts cost.
//!
//! Memory is counted on the files themselves (cachestat, or mincore through a mount), every inode once, never by the
//! system's `Cached` line. Between two readings the counted files are taken out of the page cache by fadvise.
//!
//! Peers: plain directories, overlayfs with a shared base layer, a hard-linked store, self-contained EROFS images, and
//! composefs' own mkcomposefs and mount.composefs where they are installed or `bench/fetch-images.sh` has put them.
//!
//! `--quick` makes two versions of a tree from local system directories. `--full` takes the real pairs that
//! `bench/fetch-images.sh` has fetched, each laid over one Debian base, runs their programs from the mounts, and fills a
//! store with 10,000 images; `--counts` leaves out what is timed, for machines that are busy, and `--timed` all else. Needs root.

use crate::record;
use pagefold_image::ingest::Notes;
use pagefold_image::mount::{self, Options};
use pagefold_image::progress::Progress;
use pagefold_image::scan;
use pagefold_image::stat::resident_bytes;
use pagefold_image::store::{Record, Store};
use pagefold_image::tree::{Inode, Kind, Meta, Tree};
use pagefold_image::{build, export, gc, stat};
use serde_json::{Value, json};
use std::collections::{HashMap, HashSet};
use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

type Error = Box<dyn std::error::Error>;

/// The source's figures for the same pairs: read-all and run time, per cent.
const SOURCE: [(&str, u32, u32); 6] = [
    ("redis", 33, 4),
    ("postgres", 28, 37),
    ("tensorflow", 16, 10),
    ("mariadb", 21, 11),
    ("nginx", 44, 26),
    ("tomcat", 49, 47),
];

/// What the programs do, in a shell in the tree.
const WORKLOADS: [(&str, &str); 6] = [
    (
        "redis",
        "redis-server --port 0 --unixsocket /tmp/r.sock --save '' >/dev/null & \
        for i in 1 2 3 4 5 6 7 8 9 10; do sleep 0.2; redis-cli -s /tmp/r.sock ping >/dev/null 2>&1 && break; done; \
        redis-cli -s /tmp/r.sock set a b; redis-cli -s /tmp/r.sock get a; redis-cli -s /tmp/r.sock shutdown nosave; wait",
    ),
    ("nginx", "mkdir -p /var/log/nginx /var/lib/nginx /run; nginx -t && nginx -v"),
    (
        "mariadb",
        "mkdir -p /tmp/data && echo 'select 1;' | mariadbd --no-defaults --user=root --bootstrap --datadir=/tmp/data \
        --innodb-fast-shutdown=2",
    ),
    (
        "postgres",
        "mkdir -p /tmp/pg && chown 65534:65534 /tmp/pg && cd /tmp/pg && \
        run='setpriv --reuid=65534 --regid=65534 --clear-groups' && \
        $run /opt/postgres/bin/initdb -D /tmp/pg/data --locale=C -N >/dev/null && \
        echo 'select 6*7 as answer, version()' | $run /opt/postgres/bin/postgres --single -D /tmp/pg/data postgres | grep 42",
    ),
    (
        "tensorflow",
        "export LD_LIBRARY_PATH=/opt/python/lib PYTHONHOME=/opt/python PYTHONPATH=/opt/site PYTHONDONTWRITEBYTECODE=1; \
        export TF_CPP_MIN_LOG_LEVEL=3; \
        /opt/python/bin/python3.10 -c 'import tensorflow as tf; print(int(tf.constant(40)+2))' 2>/dev/null | grep 42",
    ),
    (
        "tomcat",
        "export JAVA_HOME=/usr/lib/jvm/java CATALINA_HOME=/opt/tomcat; cd /opt/tomcat && \
        sed -i 's/port=\"8080\"/port=\"18080\"/; s/port=\"8005\"/port=\"-1\"/' conf/server.xml && \
        (bin/catalina.sh run >/tmp/tomcat.log 2>&1 & echo $! >/tmp/tomcat.pid); \
        for i in $(seq 100); do grep -q 'Server startup' /tmp/tomcat.log && break; sleep 0.3; done; \
        kill $(cat /tmp/tomcat.pid); grep 'Server startup' /tmp/tomcat.log",
    ),
];

struct Scratch {
    dir: PathBuf,
    keep: bool,
}

impl Scratch {
    fn sub(&self, name: &str) -> Result<PathBuf, Error> {
        let path = self.dir.join(name);
        fs::create_dir_all(&path)?;
        Ok(path)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let table = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        let ours =
            table.lines().filter_map(|line| line.split(' ').nth(4)).filter(|at| Path::new(at).starts_with(&self.dir));
        for at in ours.collect::<Vec<_>>().into_iter().rev() {
            let _ = Command::new("umount").args(["-l", at]).status();
        }
        if !self.keep {
            let _ = fs::remove_dir_all(&self.dir);
        }
    }
}

fn sh(script: &str) -> Result<(), Error> {
    let out = Command::new("sh").args(["-ec", script]).output()?;
    if out.status.success() {
        return Ok(());
    }
    Err(format!("{script}: {}", String::from_utf8_lossy(&out.stderr).trim()).into())
}

/// All regular files below `root`, each inode once.
fn files(root: &Path) -> Vec<(PathBuf, u64)> {
    let (mut seen, mut list, mut todo) = (HashSet::new(), Vec::new(), vec![root.to_path_buf()]);
    while let Some(dir) = todo.pop() {
        for entry in fs::read_dir(&dir).into_iter().flatten().flatten() {
            let Ok(meta) = entry.metadata() else { continue };
            if meta.is_dir() {
                todo.push(entry.path());
            } else if meta.is_file() && seen.insert((meta.dev(), meta.ino())) {
                list.push((entry.path(), meta.len()));
            }
        }
    }
    list.sort();
    list
}

fn evict(paths: impl IntoIterator<Item = PathBuf>) {
    for path in paths {
        if let Ok(file) = File::open(&path) {
            // SAFETY: posix_fadvise takes a descriptor and numbers and touches no memory of ours.
            unsafe { libc::posix_fadvise(std::os::fd::AsRawFd::as_raw_fd(&file), 0, 0, libc::POSIX_FADV_DONTNEED) };
        }
    }
}

fn read_all(list: &[(PathBuf, u64)]) -> Result<u64, Error> {
    let (mut buffer, mut total) = (vec![0; 1 << 20], 0);
    for (path, _) in list {
        let mut file = File::open(path)?;
        loop {
            match file.read(&mut buffer)? {
                0 => break,
                count => total += count as u64,
            }
        }
    }
    Ok(total)
}

fn resident(list: impl IntoIterator<Item = PathBuf>, mapped: bool) -> u64 {
    list.into_iter().map(|path| resident_bytes(&path, mapped).unwrap_or(0)).sum()
}

/// Mounts a self-contained EROFS image from its plain file, without caching the file a second time.
fn mount_erofs(file: &Path, at: &Path) -> Result<(), Error> {
    use std::os::unix::ffi::OsStrExt;
    let path = |path: &Path| std::ffi::CString::new(path.as_os_str().as_bytes());
    let (source, target) = (path(file)?, path(at)?);
    // SAFETY: all four strings live across the call.
    let result = unsafe {
        libc::mount(source.as_ptr(), target.as_ptr(), c"erofs".as_ptr(), libc::MS_RDONLY, c"directio".as_ptr().cast())
    };
    if result == 0 {
        return Ok(());
    }
    sh(&format!("mount -t erofs -o ro,loop {} {}", file.display(), at.display()))
}

/// CPU time of this thread, seconds: what a warm read costs, whoever else is running.
fn cpu_s() -> f64 {
    // SAFETY: timespec is plain numbers, and the clock is written into it.
    let time = unsafe {
        let mut time: libc::timespec = std::mem::zeroed();
        libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time);
        time
    };
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

fn median(mut values: Vec<f64>) -> (f64, f64, f64) {
    values.sort_by(f64::total_cmp);
    (values[values.len() / 2], values[0], values[values.len() - 1])
}

fn build_tree(store: &Store, name: &str, dir: &Path) -> Result<(Record, Duration), Error> {
    let start = Instant::now();
    let (building, mut notes) = (store.build()?, Notes::default());
    let tree = build::from_directory(&building, dir, Default::default(), &mut notes, &Progress::silent())?;
    let record = building.publish(name, &tree, "bench", Default::default(), notes.lines())?;
    Ok((record, start.elapsed()))
}

/// composefs' own tools: from the system, or from `bench/fetch-composefs.sh`, run by their own loader.
struct Composefs {
    tree: Option<PathBuf>,
}

impl Composefs {
    fn find(inputs: &Path) -> Option<Self> {
        if Command::new("mkcomposefs").arg("--help").output().is_ok() {
            return Some(Self { tree: None });
        }
        let tree = inputs.join("composefs");
        tree.join("usr/bin/mkcomposefs").exists().then_some(Self { tree: Some(tree) })
    }

    fn command(&self, program: &str) -> Command {
        let Some(tree) = &self.tree else { return Command::new(program) };
        let libraries = ["usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu"].map(|dir| tree.join(dir));
        let libraries = libraries.iter().find(|dir| dir.is_dir()).expect("a Debian tree");
        let loader = ["ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"].map(|name| libraries.join(name));
        let mut command = Command::new(loader.iter().find(|path| path.exists()).expect("a Debian tree"));
        let binary = ["usr/bin", "usr/sbin"].map(|dir| tree.join(dir).join(program));
        let binary = binary.iter().find(|path| path.exists()).expect("both tools are of one package");
        command.arg("--library-path").arg(libraries).arg(binary);
        command
    }

    fn run(command: &mut Command) -> Result<(), Error> {
        let out = command.output()?;
        if out.status.success() {
            return Ok(());
        }
        Err(format!("{command:?}: {}", String::from_utf8_lossy(&out.stderr).trim()).into())
    }

    fn build(&self, objects: &Path, dir: &Path, image: &Path) -> Result<(), Error> {
        let mut store = std::ffi::OsString::from("--digest-store=");
        store.push(objects);
        Self::run(self.command("mkcomposefs").arg(store).arg(dir).arg(image))
    }

    fn mount(&self, objects: &Path, image: &Path, at: &Path) -> Result<(), Error> {
        let mut base = std::ffi::OsString::from("basedir=");
        base.push(objects);
        Self::run(self.command("mount.composefs").arg("-o").arg(base).arg(image).arg(at))
    }

    fn version(&self) -> String {
        let fetched = self.tree.as_ref().and_then(|tree| fs::read_to_string(tree.join("version")).ok());
        let version = fetched.or_else(|| record::first_line(&["dpkg-query", "-W", "-f=${Version}", "composefs"]));
        format!("composefs {}", version.as_deref().unwrap_or("of unknown version").trim())
    }
}

fn names_below(root: &Path) -> Vec<PathBuf> {
    files(root).into_iter().map(|(path, _)| path).collect()
}

/// What the files that lie inside the metadata images hold in memory, per mount.
fn inline_memory(mounts: &[PathBuf]) -> u64 {
    let all = mounts.iter().flat_map(|at| files(at));
    let inline = all.filter(|(_, size)| (1..=pagefold_image::tree::INLINE_MAX).contains(size));
    inline.map(|(path, _)| resident_bytes(&path, true).unwrap_or(0)).sum()
}

/// The store's objects, metadata images, and the inline files of the mounts: all that a mount can have in memory.
fn pagefold_memory(store: &Store, mounts: &[PathBuf]) -> (u64, u64) {
    let objects = resident(names_below(&store.objects_dir()), false);
    let trees = resident(names_below(store.objects_dir().parent().expect("a domain").join("trees").as_path()), false);
    (objects, trees + inline_memory(mounts))
}

fn evict_store(store: &Store, mounts: &[PathBuf]) {
    mounts.iter().for_each(|at| evict(names_below(at)));
    evict(names_below(&store.objects_dir()));
    evict(names_below(store.objects_dir().parent().expect("a domain").join("trees").as_path()));
}

/// One pair of versions: what reading everything holds in memory, by each way of keeping the trees.
struct Pair<'a> {
    name: &'a str,
    /// Plain copies of both trees, on the scratch file system.
    plain: [PathBuf; 2],
    /// Base and the two layers, when the trees are made of them.
    layers: Option<[PathBuf; 3]>,
}

fn memory_of_pair(
    scratch: &Scratch,
    pair: &Pair,
    composefs: Option<&Composefs>,
    out: &mut Vec<Value>,
) -> Result<(Store, [PathBuf; 2], [Record; 2]), Error> {
    let name = pair.name;
    let lists = [files(&pair.plain[0]), files(&pair.plain[1])];
    let predicted = scan::trees(&pair.plain, &Progress::silent())?;
    let both = || lists.iter().flatten().map(|(path, _)| path.clone());
    let mut row = |peer: &str, bytes: u64, metadata: u64, plain: u64| {
        let saved = plain.saturating_sub(bytes + metadata);
        out.push(json!({
            "bench": "read-all", "pair": name, "peer": peer, "resident_bytes": bytes, "metadata_bytes": metadata,
            "saved_percent": (saved as f64 * 1000.0 / plain as f64).round() / 10.0,
            "of_ideal_percent": (plain.saturating_sub(bytes) as f64 * 1000.0 / predicted.file.duplicate_bytes.max(1) as f64).round() / 10.0,
        }));
    };

    evict(both());
    lists.iter().try_for_each(|list| read_all(list).map(drop))?;
    let plain = resident(both(), false);
    row("plain directories", plain, 0, plain);
    evict(both());

    if let Some([base, first, second]) = &pair.layers {
        let mut mounts = Vec::new();
        for (number, layer) in [first, second].into_iter().enumerate() {
            let at = scratch.sub(&format!("overlay-{name}-{number}"))?;
            sh(&format!(
                "mount -t overlay -o ro,lowerdir={}:{} bench {}",
                layer.display(),
                base.display(),
                at.display()
            ))?;
            mounts.push(at);
        }
        let lower = || [base, first, second].into_iter().flat_map(|dir| names_below(dir));
        evict(lower());
        mounts.iter().try_for_each(|at| read_all(&files(at)).map(drop))?;
        row("overlayfs, shared base layer", resident(lower(), false), 0, plain);
        evict(lower());
        for at in mounts {
            sh(&format!("umount {}", at.display()))?;
        }
    }

    // A hard-linked store: one inode per content, with one owner, mode and time for all its names.
    let linked = scratch.sub(&format!("linked-{name}"))?;
    let mut first_of: HashMap<String, PathBuf> = HashMap::new();
    for (number, list) in lists.iter().enumerate() {
        for (count, (path, _)) in list.iter().enumerate() {
            let digest = pagefold_image::digest::hash_reader(&mut File::open(path)?)?.0.hex();
            let target = linked.join(format!("{number}-{count}"));
            match first_of.get(&digest) {
                Some(first) => fs::hard_link(first, &target).or_else(|_| fs::copy(path, &target).map(drop))?,
                None => {
                    fs::copy(path, &target)?;
                    first_of.insert(digest, target);
                }
            }
        }
    }
    sh(&format!("sync -f {}", linked.display()))?;
    evict(both().chain(names_below(&linked)));
    read_all(&files(&linked))?;
    row("hard-linked store", resident(names_below(&linked), false), 0, plain);
    fs::remove_dir_all(&linked)?;

    // Self-contained EROFS images, mounted from their files.
    let store = Store::open(&scratch.dir.join(format!("store-{name}")), "default")?;
    let (one, _) = build_tree(&store, "1", &pair.plain[0])?;
    let (two, _) = build_tree(&store, "2", &pair.plain[1])?;
    let records = [one, two];
    let mut erofs_resident = 0;
    for (number, record) in records.iter().enumerate() {
        let (file, at) =
            (scratch.dir.join(format!("{name}-{number}.erofs")), scratch.sub(&format!("erofs-{name}-{number}"))?);
        export::erofs_full(&store, &store.tree(&record.digest)?, &file, &Progress::silent())?;
        evict([file.clone()]);
        mount_erofs(&file, &at)?;
        let list = files(&at);
        read_all(&list)?;
        erofs_resident += resident(list.into_iter().map(|(path, _)| path), false) + resident_bytes(&file, false)?;
        sh(&format!("umount {}", at.display()))?;
        fs::remove_file(&file)?;
    }
    row("EROFS images", erofs_resident, 0, plain);

    if let Some(composefs) = composefs {
        let (objects, images) = (scratch.sub(&format!("cfs-{name}"))?, scratch.sub(&format!("cfs-images-{name}"))?);
        let mut mounts = Vec::new();
        for (number, dir) in pair.plain.iter().enumerate() {
            let image = images.join(number.to_string());
            composefs.build(&objects, dir, &image)?;
            let at = scratch.sub(&format!("cfs-{name}-{number}"))?;
            composefs.mount(&objects, &image, &at)?;
            mounts.push(at);
        }
        sh(&format!("sync -f {}", objects.display()))?;
        let all = || names_below(&objects).into_iter().chain(names_below(&images));
        mounts.iter().for_each(|at| evict(names_below(at)));
        evict(all());
        mounts.iter().try_for_each(|at| read_all(&files(at)).map(drop))?;
        row(
            "composefs' own tools",
            resident(names_below(&objects), false),
            resident(names_below(&images), false),
            plain,
        );
        for at in &mounts {
            sh(&format!("umount {}", at.display()))?;
        }
        fs::remove_dir_all(&objects)?;
        fs::remove_dir_all(&images)?;
    }

    let mounts = [scratch.sub(&format!("mnt-{name}-1"))?, scratch.sub(&format!("mnt-{name}-2"))?];
    for (record, at) in records.iter().zip(&mounts) {
        mount::mount(&store, record, at, &Options::default())?;
    }
    sh(&format!("sync -f {}", store.root().display()))?;
    evict(both());
    evict_store(&store, &mounts);
    let read: Vec<u64> = mounts.iter().map(|at| read_all(&files(at))).collect::<Result<_, _>>()?;
    let expected: Vec<u64> = lists.iter().map(|list| list.iter().map(|(_, size)| size).sum()).collect();
    if read != expected {
        return Err(format!("{name}: the mounts gave {read:?} bytes, the directories {expected:?}").into());
    }
    let (objects, metadata) = pagefold_memory(&store, &mounts);
    let inline_plain: u64 = 0;
    row("pagefold", objects + inline_plain, metadata, plain);
    let (total, _) = stat::stat(&store, &[])?;
    out.push(json!({ "bench": "stat", "pair": name, "memory_saved_bytes": total.memory_saved_bytes,
        "plain_minus_pagefold_bytes": plain.saturating_sub(objects + metadata) }));
    out.push(json!({ "bench": "predicted", "pair": name, "total_bytes": predicted.total_bytes,
        "file_percent": predicted.file.percent, "chunk_64k_percent": predicted.chunk_64k.percent,
        "chunk_16k_percent": predicted.chunk_16k.percent, "page_4k_percent": predicted.page_4k.percent }));
    Ok((store, mounts, records))
}

/// A whole file mapped shared and read-only, at an address of the kernel's choice.
struct Mapped {
    start: *mut libc::c_void,
    size: usize,
}

impl Mapped {
    fn new(path: &Path) -> Result<Self, Error> {
        use std::os::fd::AsRawFd;
        let file = File::open(path)?;
        let size = file.metadata()?.len() as usize;
        // SAFETY: a new read-only mapping of a file that we hold open.
        let start =
            unsafe { libc::mmap(std::ptr::null_mut(), size, libc::PROT_READ, libc::MAP_SHARED, file.as_raw_fd(), 0) };
        if start == libc::MAP_FAILED {
            return Err(std::io::Error::last_os_error().into());
        }
        Ok(Self { start, size })
    }

    fn sum(&self) -> u64 {
        // SAFETY: the mapping is whole pages of a file that nobody cuts short during the bench; it is read within its
        // size, and lives as long as `self`.
        let words = unsafe { std::slice::from_raw_parts(self.start.cast::<u64>(), self.size / 8) };
        words.iter().fold(0u64, |sum, word| sum.wrapping_add(*word))
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and no slice of it outlives a call of `sum`.
        unsafe { libc::munmap(self.start, self.size) };
    }
}

/// Warm reads and maps, plain against mount, in turn: of the largest file, and of files below 2 MiB (most of a tree).
/// `mapped` reads a standing mapping, `map and read` maps the file anew each time, page faults and all.
fn throughput(plain: &Path, mounted: &Path, rounds: usize, out: &mut Vec<Value>) -> Result<(), Error> {
    let all = files(plain);
    let largest = all.iter().max_by_key(|(_, size)| *size).ok_or("an empty tree")?.clone();
    let mut small: Vec<_> = all.into_iter().filter(|(_, size)| (64 << 10..2 << 20).contains(size)).collect();
    small.sort_by_key(|(_, size)| std::cmp::Reverse(*size));
    small.truncate(100);
    for (what, list) in [
        ("read", vec![largest.clone()]),
        ("read, small files", small.clone()),
        ("mapped", vec![largest.clone()]),
        ("map and read", vec![largest]),
        ("map and read, small files", small),
    ] {
        let there = |(path, size): &(PathBuf, u64)| -> Result<(PathBuf, u64), Error> {
            Ok((mounted.join(path.strip_prefix(plain)?), *size))
        };
        let other = list.iter().map(there).collect::<Result<Vec<_>, Error>>()?;
        let bytes: u64 = list.iter().map(|(_, size)| size).sum();
        if bytes == 0 {
            continue;
        }
        // Enough passes that a round takes tens of milliseconds of CPU time.
        let passes = ((512 << 20) / bytes).clamp(1, 200);
        let once = |list: &[(PathBuf, u64)]| -> Result<f64, Error> {
            let standing = match what {
                "mapped" => list.iter().map(|(path, _)| Mapped::new(path)).collect::<Result<Vec<_>, _>>()?,
                _ => Vec::new(),
            };
            std::hint::black_box(standing.iter().map(Mapped::sum).fold(0, u64::wrapping_add));
            let start = cpu_s();
            for _ in 0..passes {
                if what.starts_with("read") {
                    std::hint::black_box(read_all(list)?);
                } else if what == "mapped" {
                    std::hint::black_box(standing.iter().map(Mapped::sum).fold(0, u64::wrapping_add));
                } else {
                    for (path, _) in list {
                        std::hint::black_box(Mapped::new(path)?.sum());
                    }
                }
            }
            Ok((bytes * passes) as f64 / (cpu_s() - start) / 1e9)
        };
        once(&list)?;
        once(&other)?;
        let (mut a, mut b, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..rounds {
            a.push(once(&list)?);
            b.push(once(&other)?);
            ratios.push(b.last().expect("just pushed") / a.last().expect("just pushed"));
        }
        let (ratio, low, high) = median(ratios);
        let (a, b) = (median(a), median(b));
        out.push(json!({ "bench": "warm", "what": what, "bytes": bytes, "files": list.len(), "rounds": rounds,
            "ext4_gb_per_s": a.0, "pagefold_gb_per_s": b.0, "ratio_of_fastest": b.2 / a.2,
            "ratio": ratio, "ratio_min": low, "ratio_max": high }));
    }
    Ok(())
}

/// CPU time of ended children, seconds.
fn children_cpu_s() -> f64 {
    // SAFETY: rusage is plain numbers, and the call writes into it.
    let usage = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        libc::getrusage(libc::RUSAGE_CHILDREN, &mut usage);
        usage
    };
    let seconds = |time: libc::timeval| time.tv_sec as f64 + time.tv_usec as f64 / 1e6;
    seconds(usage.ru_utime) + seconds(usage.ru_stime)
}

/// Starts `command` with everything out of the kernel's caches, names and inodes too, from a plain directory and from
/// mounts in turn; the order turns each round. What others do to the disk only adds, so the fastest tell as well.
fn cold_start(
    scratch: &Scratch,
    plain: &Path,
    mounted: &Path,
    composefs: Option<&Composefs>,
    command: &[&str],
    rounds: usize,
    out: &mut Vec<Value>,
) -> Result<(), Error> {
    let run = |root: &Path| -> Result<(f64, f64), Error> {
        // SAFETY: sync takes nothing and cannot fail.
        unsafe { libc::sync() };
        fs::write("/proc/sys/vm/drop_caches", "3")?;
        // The program that leads into the tree is the host's: it starts warm for all.
        Command::new("chroot").arg("--version").stdout(Stdio::null()).status()?;
        let (start, cpu) = (Instant::now(), children_cpu_s());
        let mut child = Command::new("chroot");
        let status = child.arg(root).args(command).stdout(Stdio::null()).stderr(Stdio::null()).status()?;
        if !status.success() {
            return Err(format!("{command:?} in {}: {status}", root.display()).into());
        }
        Ok((start.elapsed().as_secs_f64() * 1e3, (children_cpu_s() - cpu) * 1e3))
    };
    if let Err(error) = fs::OpenOptions::new().write(true).open("/proc/sys/vm/drop_caches") {
        eprintln!("bench erofs: SKIPPED: cold starts: /proc/sys/vm/drop_caches: {error}");
        return Ok(());
    }
    let mut roots = vec![("plain directory", plain.to_path_buf()), ("pagefold", mounted.to_path_buf())];
    let place = scratch.sub("cold-composefs")?;
    if let Some(composefs) = composefs {
        let at = scratch.sub("cold-composefs/mnt")?;
        composefs.build(&scratch.sub("cold-composefs/objects")?, plain, &place.join("image"))?;
        composefs.mount(&place.join("objects"), &place.join("image"), &at)?;
        roots.push(("composefs' own tools", at));
    }
    // Programs find themselves and their libraries through /proc.
    let with_proc: Vec<_> = roots.iter().map(|(_, root)| root.join("proc")).filter(|proc| proc.is_dir()).collect();
    for proc in &with_proc {
        sh(&format!("mount -t proc proc {}", proc.display()))?;
    }
    for (_, root) in &roots {
        run(root)?;
    }
    let mut times = vec![Vec::new(); roots.len()];
    for round in 0..rounds {
        for step in 0..roots.len() {
            let which = (round + step) % roots.len();
            times[which].push(run(&roots[which].1)?);
        }
    }
    for proc in &with_proc {
        sh(&format!("umount {}", proc.display()))?;
    }
    if composefs.is_some() {
        sh(&format!("umount {}", place.join("mnt").display()))?;
    }
    fs::remove_dir_all(&place)?;
    let wall = |which: usize| median(times[which].iter().map(|run| run.0).collect());
    let cpu = |which: usize| median(times[which].iter().map(|run| run.1).collect()).0;
    for (which, (peer, _)) in roots.iter().enumerate() {
        let mut ratios: Vec<f64> = times[which].iter().zip(&times[0]).map(|(run, plain)| run.0 / plain.0).collect();
        ratios.sort_by(f64::total_cmp);
        let (middle, fastest, slowest) = wall(which);
        out.push(json!({ "bench": "cold start", "peer": peer, "command": command.join(" "), "rounds": rounds,
            "ms": middle, "ms_min": fastest, "ms_max": slowest, "cpu_ms": cpu(which),
            "ratio": middle / wall(0).0, "ratio_of_fastest": fastest / wall(0).1, "cpu_ratio": cpu(which) / cpu(0),
            "round_ratio": ratios[rounds / 2], "round_ratio_low": ratios[rounds / 4],
            "round_ratio_high": ratios[rounds - 1 - rounds / 4] }));
    }
    Ok(())
}

/// Builds `dir` anew, again unchanged, and beside other builders; the input is in memory, the output durable.
fn build_speed(
    scratch: &Scratch,
    dir: &Path,
    composefs: Option<&Composefs>,
    rounds: usize,
    out: &mut Vec<Value>,
) -> Result<(), Error> {
    let list = files(dir);
    let bytes: u64 = list.iter().map(|(_, size)| size).sum();
    let has_mkfs = Command::new("mkfs.erofs").arg("-V").output().is_ok();
    const PEERS: [&str; 5] =
        ["pagefold", "pagefold, no change", "mkcomposefs and sync", "mkfs.erofs and sync", "cp -a and sync"];
    let mut times: [Vec<f64>; 5] = Default::default();
    read_all(&list)?;
    for round in 0..rounds {
        let root = scratch.dir.join(format!("speed-{round}"));
        let place = scratch.sub("speed-peer")?;
        let sync = format!("sync -f {}", scratch.dir.display());
        sh(&sync)?;
        let store = Store::open(&root, "default")?;
        times[0].push(build_tree(&store, "a", dir)?.1.as_secs_f64());
        times[1].push(build_tree(&store, "b", dir)?.1.as_secs_f64());
        let timed = |run: &dyn Fn() -> Result<(), Error>| -> Result<f64, Error> {
            sh(&sync)?;
            let start = Instant::now();
            run()?;
            sh(&sync)?;
            Ok(start.elapsed().as_secs_f64())
        };
        if let Some(composefs) = composefs {
            fs::create_dir(place.join("objects"))?;
            times[2].push(timed(&|| composefs.build(&place.join("objects"), dir, &place.join("image.cfs")))?);
        }
        if has_mkfs {
            let image = place.join("peer.erofs");
            times[3].push(timed(&|| sh(&format!("mkfs.erofs --quiet {} {}", image.display(), dir.display())))?);
        }
        let copy = place.join("copy");
        times[4].push(timed(&|| sh(&format!("cp -a {} {}", dir.display(), copy.display())))?);
        fs::remove_dir_all(&root)?;
        fs::remove_dir_all(&place)?;
    }
    let first = median(times[0].clone()).0;
    for (peer, seconds) in PEERS.iter().zip(times).filter(|(_, seconds)| !seconds.is_empty()) {
        let (middle, low, high) = median(seconds);
        out.push(json!({ "bench": "build", "peer": peer, "bytes": bytes, "files": list.len(), "seconds": middle,
            "seconds_min": low, "seconds_max": high, "mb_per_s": bytes as f64 / middle / 1e6, "rounds": rounds,
            "first_build_over_this": first / middle }));
    }
    Ok(())
}

/// Makes a store of `images` images over `bases` bases: 200 files of each base, 3 of each image's own.
fn fill(root: &Path, images: u32, bases: u32) -> Result<Store, Error> {
    let store = Store::open(root, "default")?.without_sync();
    let (base_files, own_files) = (200, 3);
    let file = |data| Inode { meta: Meta { mode: 0o644, ..Meta::default() }, kind: Kind::File(data) };
    let content = |kind: u32, image: u32, number: u32| {
        let mut bytes = format!("{kind} {image} {number} ").repeat(12);
        bytes.truncate(100);
        bytes.into_bytes()
    };
    for base in 0..bases {
        let build = store.build()?;
        let mut tree = Tree::default();
        for number in 0..base_files {
            tree.put(format!("base/{number}").as_bytes(), file(build.put_bytes(&content(0, base, number))?))?;
        }
        for image in (base..images).step_by(bases as usize) {
            let mut tree = tree.clone();
            for number in 0..own_files {
                tree.put(format!("own/{number}").as_bytes(), file(build.put_bytes(&content(1, image, number))?))?;
            }
            build.publish(&format!("image-{image}"), &tree, "bench", Default::default(), vec![])?;
        }
    }
    Ok(store)
}

/// One look at a store, in a process of its own so that its memory is its own: a count, and its peak memory in KiB.
fn look(what: &str, root: &Path) -> Result<(u64, u64), Error> {
    let store = Store::open(root, "default")?;
    let count = match what {
        "list" => store.images()?.len() as u64,
        "stat" => stat::stat(&store, &[])?.0.objects,
        "gc" => gc::collect(&store, false)?.objects_removed,
        _ => 0,
    };
    // Of this program alone: what wait4 tells a parent begins with the parent's own size.
    let status = fs::read_to_string("/proc/self/status")?;
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).ok_or("no VmHWM")?;
    Ok((count, peak.trim().trim_end_matches(" kB").parse()?))
}

/// Runs [`look`] as a child; returns its count, seconds, and peak memory in MiB.
fn look_apart(what: &str, root: &Path) -> Result<(u64, f64, f64), Error> {
    let start = Instant::now();
    let out = Command::new(std::env::current_exe()?).args(["erofs", "--look", what]).arg(root).output()?;
    let seconds = start.elapsed().as_secs_f64();
    let text = String::from_utf8_lossy(&out.stdout);
    let (count, peak_kib) = text
        .trim()
        .split_once(' ')
        .ok_or_else(|| format!("{what} of {}: {}", root.display(), String::from_utf8_lossy(&out.stderr).trim()))?;
    Ok((count.parse()?, seconds, peak_kib.parse::<f64>()? / 1024.0))
}

/// Many images over few bases: list, stat, gc, and what memory each takes at its peak.
fn many_images(scratch: &Scratch, images: u32, bases: u32, out: &mut Vec<Value>) -> Result<(), Error> {
    let root = scratch.dir.join(format!("many-{images}"));
    let start = Instant::now();
    let store = fill(&root, images, bases)?;
    let built = start.elapsed().as_secs_f64();
    let (_, _, nothing) = look_apart("nothing", &root)?;
    let (count, list_s, list_mib) = look_apart("list", &root)?;
    let (objects, stat_s, stat_mib) = look_apart("stat", &root)?;
    // Every tenth image of each base, so that only their own files go.
    let gone: Vec<u32> = (0..images).filter(|image| image / bases % 10 == 1).collect();
    for image in &gone {
        store.remove(&format!("image-{image}"))?;
    }
    let (removed, gc_s, gc_mib) = look_apart("gc", &root)?;
    if (count, removed) != (images.into(), gone.len() as u64 * 3) {
        return Err(format!("{count} images listed, {removed} objects collected").into());
    }
    out.push(json!({ "bench": "many images", "images": count, "bases": bases, "objects": objects, "build_s": built,
        "list_s": list_s, "stat_s": stat_s, "gc_s": gc_s, "gc_removed_objects": removed, "rss_mib_of_nothing": nothing,
        "list_rss_mib": list_mib, "stat_rss_mib": stat_mib, "gc_rss_mib": gc_mib }));
    fs::remove_dir_all(&root)?;
    Ok(())
}

/// Runs the pair's programs from plain directories and from mounts, and counts the trees' pages in memory.
fn run_time(
    scratch: &Scratch,
    pair: &Pair,
    store: &Store,
    records: &[Record; 2],
    out: &mut Vec<Value>,
) -> Result<(), Error> {
    let Some((_, workload)) = WORKLOADS.iter().find(|(name, _)| *name == pair.name) else { return Ok(()) };
    let upper = scratch.sub(&format!("run-{}", pair.name))?;
    sh(&format!("mount -t tmpfs tmpfs {}", upper.display()))?;
    let run = |root: &Path| -> Result<(), Error> {
        sh(&format!(
            "mount -t proc proc {0}/proc && mount --bind /dev {0}/dev && mount -t tmpfs tmpfs {0}/tmp",
            root.display()
        ))?;
        let outcome =
            Command::new("timeout").args(["400", "chroot"]).arg(root).args(["/bin/sh", "-c", workload]).output()?;
        sh(&format!("umount -l {0}/tmp {0}/dev {0}/proc", root.display()))?;
        if outcome.status.success() {
            return Ok(());
        }
        let text = String::from_utf8_lossy(&outcome.stderr).chars().take(300).collect::<String>();
        Err(format!("{}: {}: {text}", pair.name, outcome.status).into())
    };
    let plain_files = || pair.plain.iter().flat_map(|dir| names_below(dir));
    evict(plain_files());
    for root in &pair.plain {
        // Over a scratch layer as well, so that both do the same.
        let at = scratch.sub("run-plain")?;
        let layer = upper.join(format!("plain-{}", root.file_name().expect("a name").to_string_lossy()));
        sh(&format!(
            "mkdir -p {0}/u {0}/w && mount -t overlay -o lowerdir={1},upperdir={0}/u,workdir={0}/w bench {2}",
            layer.display(),
            root.display(),
            at.display()
        ))?;
        let result = run(&at);
        sh(&format!("umount -l {}", at.display()))?;
        result?;
    }
    let plain = resident(plain_files(), false);
    evict(plain_files());
    evict_store(store, &[]);
    let mut tops = Vec::new();
    for (number, record) in records.iter().enumerate() {
        let at = scratch.sub(&format!("run-mnt-{number}"))?;
        let options = Options { upper: Some(upper.join(format!("mount-{number}"))), ..Options::default() };
        mount::mount(store, record, &at, &options)?;
        let result = run(&at);
        tops.push(at);
        result?;
    }
    let (objects, metadata) = pagefold_memory(store, &[]);
    for at in tops {
        mount::umount(&at, true)?;
    }
    sh(&format!("umount -l {}", upper.display()))?;
    let saved = plain.saturating_sub(objects + metadata);
    out.push(
        json!({ "bench": "run time", "pair": pair.name, "plain_bytes": plain, "pagefold_bytes": objects + metadata,
        "saved_percent": (saved as f64 * 1000.0 / plain.max(1) as f64).round() / 10.0 }),
    );
    Ok(())
}

fn quick(scratch: &Scratch, composefs: Option<&Composefs>, out: &mut Vec<Value>) -> Result<(), Error> {
    let plain = [scratch.sub("plain-1")?, scratch.sub("plain-2")?];
    let sources = ["/usr/lib/python3", "/usr/lib/python3.11", "/usr/share/perl"];
    for dir in &plain {
        for source in sources.iter().filter(|source| Path::new(source).is_dir()) {
            sh(&format!(
                "mkdir -p {0}/usr/lib {0}/usr/share && cp -a {source} {0}$(dirname {source})/",
                dir.display()
            ))?;
        }
        // A program and what it is linked with, so that it starts in the tree.
        sh(&format!(
            "for p in /usr/bin/python3.11 /bin/sh; do for f in $p $(ldd $p | grep -o '/[^ ]*'); do mkdir -p {0}$(dirname $f); cp -L $f {0}$f; done; done",
            dir.display()
        ))?;
    }
    let mut seed = 1u64;
    let noise: Vec<u8> = std::iter::repeat_with(|| {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (seed >> 56) as u8
    })
    .take(48 << 20)
    .collect();
    for dir in &plain {
        fs::write(dir.join("large"), &noise)?;
    }
    drop(noise);
    // The second version: every tenth file changed, every hundredth gone.
    for (number, (path, _)) in files(&plain[1]).into_iter().enumerate() {
        if path.extension().is_some_and(|end| end == "py" || end == "pyc") && number % 10 == 0 {
            use std::io::Write;
            File::options().append(true).open(&path)?.write_all(b"\n# changed\n")?;
        } else if path.extension().is_some_and(|end| end == "py") && number % 100 == 1 {
            fs::remove_file(&path)?;
        }
    }
    sh(&format!("sync -f {}", scratch.dir.display()))?;
    let pair = Pair { name: "local", plain, layers: None };
    let (_store, mounts, _) = memory_of_pair(scratch, &pair, composefs, out)?;
    throughput(&pair.plain[0], &mounts[0], 15, out)?;
    cold_start(
        scratch,
        &pair.plain[0],
        &mounts[0],
        composefs,
        &["/usr/bin/python3.11", "-S", "-c", "import json, email, http.client"],
        9,
        out,
    )?;
    build_speed(scratch, &pair.plain[0], composefs, 3, out)?;
    many_images(scratch, 50, 10, out)?;
    many_images(scratch, 500, 10, out)
}

/// Makes the inputs of the full bench: some ten minutes, by the package managers of this system.
fn fetch(cache: &Path) -> Result<(), Error> {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/fetch-images.sh");
    eprintln!("bench erofs: {}: no inputs there; {script} makes them", cache.display());
    let status = Command::new(script).arg(cache).stdout(Stdio::null()).status();
    match status {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(format!("{script} {}: {status}; what it said stands above", cache.display()).into()),
        Err(error) => Err(format!("{script}: {error}").into()),
    }
}

/// Which part of the full bench to run.
#[derive(Clone, Copy, PartialEq)]
enum Part {
    All,
    /// Without what is timed.
    Counts,
    /// Only what is timed.
    Timed,
}

fn full(
    scratch: &Scratch,
    cache: &Path,
    only: Option<&str>,
    part: Part,
    composefs: Option<&Composefs>,
    out: &mut Vec<Value>,
) -> Result<(), Error> {
    let base = cache.join("base");
    let mut first = true;
    for (name, ..) in SOURCE {
        let layers = [base.clone(), cache.join(format!("layers/{name}-1")), cache.join(format!("layers/{name}-2"))];
        if only.is_some_and(|only| only != name) || !layers[1].is_dir() || !layers[2].is_dir() {
            eprintln!("bench erofs: {name}: left out");
            continue;
        }
        eprintln!("bench erofs: {name}");
        let mut plain = Vec::new();
        for (number, layer) in layers.iter().enumerate().skip(1).take(2) {
            let (at, dir) = (scratch.sub("merged")?, scratch.sub(&format!("plain-{name}-{number}"))?);
            sh(&format!(
                "mount -t overlay -o ro,lowerdir={}:{} bench {3} && cp -a {3}/. {2}/ && umount {3}",
                layer.display(),
                base.display(),
                dir.display(),
                at.display()
            ))?;
            plain.push(dir);
        }
        sh(&format!("sync -f {}", scratch.dir.display()))?;
        let pair = Pair { name, plain: [plain.remove(0), plain.remove(0)], layers: Some(layers) };
        let (store, mounts) = if part == Part::Timed {
            let store = Store::open(&scratch.dir.join(format!("store-{name}")), "default")?;
            let (record, _) = build_tree(&store, "1", &pair.plain[0])?;
            let at = scratch.sub(&format!("mnt-{name}-1"))?;
            mount::mount(&store, &record, &at, &Options::default())?;
            (store, vec![at])
        } else {
            let (store, mounts, records) = memory_of_pair(scratch, &pair, composefs, out)?;
            if let Err(error) = run_time(scratch, &pair, &store, &records, out) {
                out.push(json!({ "bench": "run time", "pair": name, "error": error.to_string() }));
            }
            (store, mounts.to_vec())
        };
        if part != Part::Counts {
            let start = match name {
                "redis" => &["/usr/bin/redis-server", "--version"][..],
                "postgres" => &["/opt/postgres/bin/postgres", "--version"],
                "tensorflow" => &[
                    "/usr/bin/env",
                    "LD_LIBRARY_PATH=/opt/python/lib",
                    "/opt/python/bin/python3.10",
                    "-c",
                    "import json, email, http.client, decimal",
                ],
                "tomcat" => &["/usr/lib/jvm/java/bin/java", "-version"],
                "mariadb" => &["/usr/sbin/mariadbd", "--version"],
                _ => &["/usr/sbin/nginx", "-v"],
            };
            cold_start(scratch, &pair.plain[0], &mounts[0], composefs, start, 21, out)?;
            if name == "tensorflow" {
                throughput(&pair.plain[0], &mounts[0], 15, out)?;
            }
            if name == "postgres" {
                build_speed(scratch, &pair.plain[0], composefs, 5, out)?;
            }
        }
        for at in &mounts {
            mount::umount(at, true)?;
        }
        for dir in pair.plain.iter().chain([&store.root().to_path_buf()]) {
            sh(&format!("rm -rf {}", dir.display()))?;
        }
        first = false;
    }
    if first {
        return Err("no pair was there to measure".into());
    }
    Ok(())
}

/// Everything that is not told by a row's own columns.
fn print_table(rows: &[Value]) {
    let mib = |value: &Value| value.as_u64().unwrap_or(0) as f64 / (1 << 20) as f64;
    let number = |value: &Value| value.as_f64().unwrap_or(f64::NAN);
    let text = |value: &Value| value.as_str().unwrap_or_default().to_string();
    for row in rows {
        match text(&row["bench"]).as_str() {
            "read-all" => println!(
                "read all {:10} {:30} {:8.1} MiB + {:4.1} metadata  saved {:5.1} %  of ideal {:5.1} %",
                text(&row["pair"]),
                text(&row["peer"]),
                mib(&row["resident_bytes"]),
                mib(&row["metadata_bytes"]),
                number(&row["saved_percent"]),
                number(&row["of_ideal_percent"])
            ),
            "predicted" => println!(
                "predicted {:9} {:8.1} MiB: files {} %, 64K {} %, 16K {} %, 4K {} %",
                text(&row["pair"]),
                mib(&row["total_bytes"]),
                row["file_percent"],
                row["chunk_64k_percent"],
                row["chunk_16k_percent"],
                row["page_4k_percent"]
            ),
            "stat" => println!(
                "stat     {:10} memory_saved_bytes {:.1} MiB, plain minus pagefold {:.1} MiB",
                text(&row["pair"]),
                mib(&row["memory_saved_bytes"]),
                mib(&row["plain_minus_pagefold_bytes"])
            ),
            "run time" if row["error"].is_string() => {
                println!("run time {:10} {}", text(&row["pair"]), text(&row["error"]))
            }
            "run time" => {
                let source = SOURCE.iter().find(|(name, ..)| *name == text(&row["pair"])).map_or(0, |row| row.2);
                println!(
                    "run time {:10} plain {:.1} MiB, pagefold {:.1} MiB: saved {} % (source {source} %)",
                    text(&row["pair"]),
                    mib(&row["plain_bytes"]),
                    mib(&row["pagefold_bytes"]),
                    row["saved_percent"]
                );
            }
            "warm" => println!(
                "warm {:26} {:5} files {:7.1} MiB: ext4 {:.2} GB/s, pagefold {:.2} GB/s: {:.3} x ({:.3} to {:.3}); of \
                 the fastest {:.3}",
                text(&row["what"]),
                row["files"],
                mib(&row["bytes"]),
                number(&row["ext4_gb_per_s"]),
                number(&row["pagefold_gb_per_s"]),
                number(&row["ratio"]),
                number(&row["ratio_min"]),
                number(&row["ratio_max"]),
                number(&row["ratio_of_fastest"])
            ),
            "cold start" => println!(
                "cold start {:20} {:.60}: {:.1} ms ({:.1} to {:.1}): {:.3} x; of the fastest {:.3}; round by round {:.3} \
                 ({:.3} to {:.3}); CPU {:.3}",
                text(&row["peer"]),
                text(&row["command"]),
                number(&row["ms"]),
                number(&row["ms_min"]),
                number(&row["ms_max"]),
                number(&row["ratio"]),
                number(&row["ratio_of_fastest"]),
                number(&row["round_ratio"]),
                number(&row["round_ratio_low"]),
                number(&row["round_ratio_high"]),
                number(&row["cpu_ratio"])
            ),
            "build" => println!(
                "build    {:22} {:8.1} MiB in {:.3} s ({:.3} to {:.3}); a first build takes {:.2} times this",
                text(&row["peer"]),
                mib(&row["bytes"]),
                number(&row["seconds"]),
                number(&row["seconds_min"]),
                number(&row["seconds_max"]),
                number(&row["first_build_over_this"])
            ),
            "many images" => println!(
                "{} images over {} bases ({} objects): list {:.2} s, stat {:.2} s, gc {:.2} s (removed {}); peak memory \
                 {:.1}, {:.1}, {:.1} MiB (a process that does nothing: {:.1})",
                row["images"],
                row["bases"],
                row["objects"],
                number(&row["list_s"]),
                number(&row["stat_s"]),
                number(&row["gc_s"]),
                row["gc_removed_objects"],
                number(&row["list_rss_mib"]),
                number(&row["stat_rss_mib"]),
                number(&row["gc_rss_mib"]),
                number(&row["rss_mib_of_nothing"])
            ),
            _ => println!("{row}"),
        }
    }
    for (name, read, _) in SOURCE {
        let ours =
            rows.iter().find(|row| row["bench"] == "read-all" && row["pair"] == name && row["peer"] == "pagefold");
        if let Some(row) = ours {
            println!("source   {name:10} read all {read} %, here {} %", row["saved_percent"]);
        }
    }
}

/// Runs the bench.
pub fn run(args: &[String]) -> ExitCode {
    let value = |name: &str| args.iter().position(|arg| arg == name).and_then(|at| args.get(at + 1)).cloned();
    let has = |name: &str| args.iter().any(|arg| arg == name);
    if let [first, what, root, ..] = args
        && first == "--look"
    {
        return match look(what, Path::new(root)) {
            Ok((count, peak_kib)) => {
                println!("{count} {peak_kib}");
                ExitCode::SUCCESS
            }
            Err(error) => {
                eprintln!("bench erofs: {error}");
                ExitCode::FAILURE
            }
        };
    }
    if has("--help") {
        println!(
            "pagefold-bench erofs [--quick | --full [--inputs DIR] [--pair NAME] [--counts] | --many]\n    \
             [--dir SCRATCH] [--json]\n\n\
             --quick   two versions made of this machine's own directories\n\
             --full    the pairs that bench/fetch-images.sh makes, made if need be; --counts leaves out what is timed, --timed all else\n\
             --many    10,000 images over 100 bases: list, stat, gc"
        );
        return ExitCode::SUCCESS;
    }
    // SAFETY: geteuid takes nothing and cannot fail.
    if unsafe { libc::geteuid() } != 0 {
        eprintln!("SKIPPED: bench erofs needs root to mount");
        record::emit(Value::Array(Vec::new()));
        return ExitCode::SUCCESS;
    }
    let target = PathBuf::from(std::env::var_os("CARGO_TARGET_DIR").unwrap_or_else(|| "target".into()));
    let parent = value("--dir").map_or_else(|| target.clone(), PathBuf::from);
    let dir = parent.join(format!("bench-erofs-{}", std::process::id()));
    if let Err(error) = fs::create_dir_all(&dir) {
        eprintln!("bench erofs: {}: {error}", dir.display());
        return ExitCode::FAILURE;
    }
    let scratch = Scratch { dir: dir.canonicalize().unwrap_or(dir), keep: has("--keep") };
    let mut rows = Vec::new();
    let inputs = value("--inputs").map_or_else(|| target.join("bench-images"), PathBuf::from);
    // The file that the script writes last.
    if has("--full")
        && !inputs.join("versions").exists()
        && let Err(error) = fetch(&inputs)
    {
        eprintln!("bench erofs: {error}");
        return ExitCode::FAILURE;
    }
    let composefs = Composefs::find(&inputs);
    if composefs.is_none() {
        eprintln!(
            "bench erofs: composefs' tools are not here (bench/fetch-composefs.sh gets them); their rows are left out"
        );
    }
    let result = if has("--full") {
        let part = match (has("--counts"), has("--timed")) {
            (true, _) => Part::Counts,
            (_, true) => Part::Timed,
            _ => Part::All,
        };
        full(&scratch, &inputs, value("--pair").as_deref(), part, composefs.as_ref(), &mut rows)
    } else if has("--many") {
        many_images(&scratch, 1_000, 100, &mut rows).and_then(|()| many_images(&scratch, 10_000, 100, &mut rows))
    } else {
        quick(&scratch, composefs.as_ref(), &mut rows)
    };
    record::emit_versions(json!({
        "composefs": composefs.as_ref().map(Composefs::version),
        "mkfs.erofs": record::first_line(&["mkfs.erofs", "--version"]),
        "inputs": fs::read_to_string(inputs.join("versions")).unwrap_or_default().lines().collect::<Vec<_>>(),
    }));
    record::emit(Value::Array(rows.clone()));
    if !has("--json") {
        print_table(&rows);
    }
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bench erofs: {error}");
            ExitCode::FAILURE
        }
    }
}
