//! Real processes with known memory give exact counts, and the scan leaves them as they were.
//!
//! The processes are this test's own program, started again with a layout to build (see `child`); they are
//! ended by dropping their handle, also when a test fails.

use pagefold_os::mem::{self, Mapping};
use pagefold_os::procfs;
use pagefold_scan::{Config, Dump, Lost, Process, Reason, Report, Source, scan};
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Stdio};

const PAGE: usize = 4096;

/// A process that built its memory and now waits.
struct Subject {
    child: Child,
    stdin: Option<ChildStdin>,
}

impl Subject {
    fn start(layout: &str) -> Subject {
        let mut child = Command::new(std::env::current_exe().expect("we have a path"))
            .args(["--exact", "child", "--nocapture", "--test-threads", "1"])
            .env("PAGEFOLD_SCAN_LAYOUT", layout)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("the test starts itself");
        let mut lines = BufReader::new(child.stdout.take().expect("a pipe")).lines();
        let ready = lines.any(|line| line.is_ok_and(|line| line.contains("memory is built")));
        assert!(ready, "the subject did not build `{layout}`");
        // Its later output goes nowhere, but must not meet a closed pipe.
        std::thread::spawn(move || lines.for_each(drop));
        let stdin = child.stdin.take();
        Subject { child, stdin }
    }

    fn pid(&self) -> i32 {
        self.child.id() as i32
    }

    fn source(&self) -> Box<dyn Source> {
        Box::new(Process::new(self.pid()).expect("the subject runs"))
    }
}

impl Drop for Subject {
    fn drop(&mut self) {
        drop(self.stdin.take());
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Fills page `number` of `mapping` with a content that depends on `seed` in every word.
fn fill(mapping: &Mapping, number: usize, seed: u64) {
    assert!((number + 1) * PAGE <= mapping.len());
    for word in 0..PAGE / 8 {
        let value = (seed << 20 | word as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        // SAFETY: the page lies in the mapping, which is ours and readable and writable.
        unsafe { mapping.as_ptr().add(number * PAGE).cast::<u64>().add(word).write_volatile(value) };
    }
}

fn zero(mapping: &Mapping, number: usize) {
    // SAFETY: the page lies in the mapping, which is ours and readable and writable.
    unsafe { mapping.as_ptr().add(number * PAGE).write_volatile(0) };
}

fn area(pages: usize) -> Mapping {
    Mapping::anonymous(pages * PAGE).expect("memory")
}

/// Builds the layout of `PAGEFOLD_SCAN_LAYOUT` and waits until standard input ends; a test of its own that
/// passes at once when run as one.
#[test]
fn child() {
    let Ok(layout) = std::env::var("PAGEFOLD_SCAN_LAYOUT") else { return };
    let mut kept = Vec::new();
    for part in layout.split(' ') {
        let numbers: Vec<u64> = part.split([':', '+']).skip(1).map(|n| n.parse().expect("a number")).collect();
        let name = part.split(':').next().expect("a name");
        let range = |mapping: &Mapping| (mapping.addr(), mapping.len() as u64);
        match name {
            // fill:SEED+COUNT: pages of consecutive contents, once.
            "fill" | "dontdump" | "locked" | "wipe" | "readonly" | "exec" => {
                let pages = area(numbers[1] as usize);
                (0..numbers[1]).for_each(|n| fill(&pages, n as usize, numbers[0] + n));
                let (addr, len) = range(&pages);
                // SAFETY: advice and protection concern a mapping of this test that is not written any more.
                unsafe {
                    match name {
                        "dontdump" => mem::advise(addr, len, libc::MADV_DONTDUMP).expect("advice"),
                        "wipe" => mem::advise(addr, len, libc::MADV_WIPEONFORK).expect("advice"),
                        "readonly" => mem::protect(addr, len, libc::PROT_READ).expect("protection"),
                        "exec" => mem::protect(addr, len, libc::PROT_READ | libc::PROT_EXEC).expect("protection"),
                        "locked" => assert_eq!(libc::mlock(addr as *const _, len as usize), 0, "mlock"),
                        _ => {}
                    }
                }
                kept.push(pages);
            }
            // zero:COUNT: pages of their own that hold zeros.
            "zero" => {
                let pages = area(numbers[0] as usize);
                (0..numbers[0]).for_each(|n| zero(&pages, n as usize));
                kept.push(pages);
            }
            // read:COUNT: pages that were only read: the kernel's zero page.
            "read" => {
                let pages = area(numbers[0] as usize);
                for n in 0..numbers[0] as usize {
                    // SAFETY: the page lies in the mapping.
                    assert_eq!(unsafe { pages.as_ptr().add(n * PAGE).read_volatile() }, 0);
                }
                kept.push(pages);
            }
            // absent:COUNT: never touched.
            "absent" => kept.push(area(numbers[0] as usize)),
            // shared:SEED+COUNT: a mapping that others would see.
            "shared" => {
                let flags = libc::MAP_SHARED | libc::MAP_ANONYMOUS;
                let prot = libc::PROT_READ | libc::PROT_WRITE;
                let pages = Mapping::file(-1, 0, numbers[1] as usize * PAGE, prot, flags).expect("memory");
                (0..numbers[1]).for_each(|n| fill(&pages, n as usize, numbers[0] + n));
                kept.push(pages);
            }
            other => panic!("no layout {other}"),
        }
    }
    println!("\nmemory is built");
    std::io::stdout().flush().expect("standard output");
    let _ = std::io::stdin().read_line(&mut String::new());
}

fn scan_all(sources: Vec<Box<dyn Source>>) -> Report {
    scan(sources, &Config { workers: 2, ..Config::default() }, &mut |_| {})
}

/// What two processes' reports count beyond that of two processes without a layout: a runtime has pages too.
fn beyond_bare(report: &Report, field: impl Fn(&pagefold_scan::Totals) -> u64) -> i64 {
    let bare: Vec<Subject> = report.sources.iter().map(|_| Subject::start("absent:1")).collect();
    let bare = scan_all(bare.iter().map(Subject::source).collect());
    field(&report.totals) as i64 - field(&bare.totals) as i64
}

#[test]
fn known_pages_are_counted_exactly() {
    // 300 contents in both, 40 of them a second time in the first, 10 that only one has, zeros.
    let one = Subject::start("fill:1000+300 fill:1000+40 fill:5000+10 zero:25 read:7 absent:4000");
    let two = Subject::start("fill:1000+300 zero:5");
    let rss_before = procfs::memory(one.pid()).expect("we may look").rss;
    let report = scan_all(vec![one.source(), two.source()]);
    assert!(report.notes.is_empty(), "{:?}", report.notes);
    // The processes' own runtime differs by a few pages from run to run.
    let near = |found: i64, expected: i64, what: &str| {
        assert!((found - expected).abs() <= 12, "{what}: {found}, not {expected}: {:?}", report.totals);
    };
    near(beyond_bare(&report, |totals| totals.zero), 30, "zero");
    near(beyond_bare(&report, |totals| totals.zero_mapped), 7, "kernel's zero page");
    near(beyond_bare(&report, |totals| totals.duplicate_inside), 40, "inside");
    near(beyond_bare(&report, |totals| totals.duplicate_across), 300, "across");
    near(beyond_bare(&report, |totals| totals.unique), 10, "unique");
    // The second mapping of 40 repeats slots of the first: three long runs in all.
    let long: u64 = report.runs.histogram.iter().filter(|bucket| bucket.from >= 32).map(|bucket| bucket.pages).sum();
    assert_eq!(long, 640, "{:?}", report.runs.histogram);
    let rss_after = procfs::memory(one.pid()).expect("we may look").rss;
    assert!(rss_after <= rss_before + 16 * PAGE as u64, "the scan faulted pages in: {rss_before} -> {rss_after}");
}

#[test]
fn runs_in_other_orders_save_what_their_construction_says_with_any_number_of_workers() {
    const RUN: u64 = 16;
    // Runs 0 to 19 are in all three processes, each in an order of its own; 4 runs are of each process alone.
    let layout = |process: u64| {
        let common = (0..20).map(|run| 1000 + (run * 7 + process * 3) % 20 * RUN);
        let own = (0..4).map(|run| 100_000 * (process + 1) + run * RUN);
        common.chain(own).map(|seed| format!("fill:{seed}+{RUN}")).collect::<Vec<_>>().join(" ")
    };
    let subjects: Vec<Subject> = (0..3).map(|process| Subject::start(&layout(process))).collect();
    let expected = 2 * 20 * RUN as i64;
    let bare: Vec<Subject> = (0..3).map(|_| Subject::start("absent:1")).collect();
    for workers in [1, 2] {
        let saved = |subjects: &[Subject]| {
            let config = Config { workers, ..Config::default() };
            let report = scan(subjects.iter().map(Subject::source).collect(), &config, &mut |_| {});
            ((report.cost.duplicate_bytes + report.cost.zero_bytes) / PAGE as u64) as i64
        };
        // The processes' own runtime differs by a few pages from run to run.
        let found = saved(&subjects) - saved(&bare);
        assert!((found - expected).abs() <= 18, "{workers} workers: {found}, not {expected}");
    }
}

#[test]
fn what_cannot_merge_is_told_with_its_reason() {
    let subject = Subject::start(
        "shared:1+50 dontdump:100+60 locked:200+70 wipe:300+20 readonly:400+30 exec:500+40 fill:100+60 fill:200+70",
    );
    let report = scan_all(vec![subject.source()]);
    let pages = |reason| report.not_merged.get(&reason).copied().unwrap_or(0);
    assert!((50..=60).contains(&pages(Reason::SharedMapping)), "{:?}", report.not_merged);
    assert_eq!(pages(Reason::DontDump), 60, "{:?}", report.not_merged);
    assert_eq!(pages(Reason::WipeOnFork), 20, "{:?}", report.not_merged);
    assert_eq!(pages(Reason::Executable), 40, "{:?}", report.not_merged);
    assert!(pages(Reason::PageCache) > 100, "{:?}", report.not_merged);
    assert!(pages(Reason::ReadOnly) >= 30, "{:?}", report.not_merged);
    // Locking also locks nothing else; its twins are duplicates for KSM alone.
    assert_eq!(pages(Reason::Locked), 70, "{:?}", report.not_merged);
    assert!(report.totals.duplicate_inside <= 12, "secrets and locked pages have no twins: {:?}", report.totals);
    assert!(report.ksm.deduplicated_bytes >= 70 * PAGE as u64, "{:?}", report.ksm);
}

#[test]
fn users_are_not_compared_with_each_other() {
    let (one, two) = (Subject::start("fill:1+200"), Subject::start("fill:1+200"));
    let process = |subject: &Subject, domain| Process::new(subject.pid()).expect("it runs").with_domain(domain);
    let report = scan_all(vec![Box::new(process(&one, 1)), Box::new(process(&two, 2))]);
    assert_eq!(report.totals.duplicate_across, 0);
    let report = scan_all(vec![Box::new(process(&one, 7)), Box::new(process(&two, 7))]);
    assert!(report.totals.duplicate_across >= 200);
}

#[test]
fn pages_that_fork_shares_already_are_not_saved_again() {
    let pages = area(128);
    (0..128).for_each(|n| fill(&pages, n, n as u64 + 1));
    // SAFETY: the child makes two system calls and no other call; it needs no lock that another thread may hold.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        // SAFETY: `PR_SET_PDEATHSIG` and pause(2) take no pointer.
        unsafe {
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
            loop {
                libc::pause();
            }
        }
    }
    assert!(pid > 0, "fork");
    let report = scan_all(vec![Box::new(Process::new(pid).expect("it runs"))]);
    // SAFETY: the process is our child and not yet waited for.
    unsafe {
        libc::kill(pid, libc::SIGKILL);
        libc::waitpid(pid, std::ptr::null_mut(), 0);
    }
    assert!(report.totals.shared_already >= 128, "{:?}", report.totals);
    assert!(report.totals.duplicate_inside < 64, "{:?}", report.totals);
}

/// Processes that end at every stage of a scan are notes; what is left is counted as if they had never been.
#[test]
fn a_process_that_ends_midway_is_a_note() {
    let stays = Subject::start("fill:1+500");
    let mut ended_midway = 0;
    for round in 0..12u64 {
        let goes = Subject::start("fill:1+4000");
        let sources = vec![goes.source(), stays.source()];
        let killer = std::thread::spawn(move || {
            std::thread::sleep(std::time::Duration::from_micros(round * 400));
            drop(goes);
        });
        let report = scan_all(sources);
        killer.join().expect("the killer ends");
        match report.notes.as_slice() {
            [] => assert_eq!(report.sources.len(), 2),
            [note] => {
                ended_midway += 1;
                assert_eq!((note.what.as_str(), note.failure), ("ended during the scan", false));
                assert_eq!(report.sources.len(), 1);
                assert!(report.totals.duplicate_across == 0 && report.totals.unique >= 500, "{:?}", report.totals);
            }
            more => panic!("{more:?}"),
        }
    }
    let gone = Subject::start("absent:1");
    let (pid, source) = (gone.pid(), gone.source());
    drop(gone);
    assert_eq!(Process::new(pid).map(drop), Err(Lost::Absent));
    let report = scan_all(vec![source]);
    assert_eq!(report.notes.len(), 1);
    println!("{ended_midway} of 12 ended midway");
}

#[test]
fn files_of_any_size_are_pages() {
    let dir = tempfile::tempdir().expect("a directory");
    let write = |name: &str, bytes: &[u8]| {
        let path = dir.path().join(name);
        std::fs::write(&path, bytes).expect("a file");
        path
    };
    let page = |n: u8| [n; PAGE];
    let one = [page(1), page(2), page(3), [0; PAGE]].concat();
    // Page 3 again, and two bytes that count as a page with zeros behind.
    let two = [page(3).as_slice(), &[9, 9]].concat();
    let mut three = [0; PAGE];
    three[..2].fill(9);
    let paths = [write("empty", &[]), write("one", &one), write("two", &two), write("three", &three)];
    let open = |path: &std::path::PathBuf| Box::new(Dump::open(path).expect("it opens")) as Box<dyn Source>;
    let report = scan_all(paths.iter().map(open).collect());
    let totals = &report.totals;
    assert_eq!((totals.examined, totals.zero, totals.unique), (7, 1, 2), "{totals:?}");
    assert_eq!((totals.duplicate_inside, totals.duplicate_across), (0, 2), "{totals:?}");
    assert_eq!(report.sources.iter().map(|source| source.totals.examined).collect::<Vec<_>>(), [0, 4, 2, 1]);

    // Cores: their pages begin where their headers end; the second one is cut within its last page.
    let core = |headers: u64, pages: &[u8]| {
        let mut bytes = vec![0; headers as usize];
        bytes[..6].copy_from_slice(b"\x7fELF\x02\x01");
        let words =
            [(16, 4, 2), (32, 64, 8), (54, 56, 2), (56, 2, 2), (64, 4, 4), (72, 176, 8), (96, headers - 176, 8)];
        let of_pages = [(120, 1, 4), (128, headers, 8), (152, pages.len() as u64, 8)];
        for (at, value, len) in words.into_iter().chain(of_pages) {
            bytes[at..at + len].copy_from_slice(&u64::to_le_bytes(value)[..len]);
        }
        [bytes.as_slice(), pages].concat()
    };
    let two = core(1000, &[page(3), page(5), page(1)].concat());
    let paths = [write("core1", &core(936, &one)), write("core2", &two[..two.len() - 7])];
    let report = scan_all(paths.iter().map(open).collect());
    let totals = &report.totals;
    assert_eq!((totals.examined, totals.zero, totals.unique, totals.duplicate_across), (7, 1, 4, 1), "{totals:?}");

    let sparse = dir.path().join("sparse");
    std::fs::File::create(&sparse).expect("a file").set_len(1 << 40).expect("a hole of a tebibyte");
    let report = scan_all(vec![open(&sparse)]);
    assert_eq!((report.totals.examined, report.totals.zero), (1 << 28, 1 << 28));

    assert!(matches!(Dump::open(dir.path()), Err(Lost::Unfit(_))));
    assert!(matches!(Dump::open("/dev/zero".as_ref()), Err(Lost::Unfit(_))));
    assert_eq!(Dump::open(&dir.path().join("nowhere")).map(drop), Err(Lost::Absent));
}
