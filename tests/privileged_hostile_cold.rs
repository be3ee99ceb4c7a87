//! Clients of the cold tier that lie: they are dropped, or wait at their own cost. The daemon lives, and an honest client
//! beside them has every byte right.
//!
//! Each lie is told by a process of its own, which is this program again: only its end frees what it claimed.

mod common;

use common::cold::{Host, Served, program};
use common::{Reaped, TOOL, can_merge, wait_for};
use pagefold_os::fd::Fd;
use pagefold_os::mem::Mapping;
use pagefold_os::uffd::{self, Uffd};
use pagefold_os::{PAGE_SIZE, Range, memfd, sock};
use pagefold_protocol::channel::Channel;
use pagefold_protocol::message::{self, Op, Packet, RegionEntry};
use pagefold_protocol::residency_map::{self, EVICTED, FROZEN, OWNER_AGENT, ResidencyMap};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

const PAGE: u64 = PAGE_SIZE as u64;
/// Pages that a liar claims as its region.
const PAGES: usize = 512;

/// What a liar has: its side of a greeting.
struct Liar {
    socket: Fd,
    channel: Channel,
    device: Option<Fd>,
    memory: Mapping,
}

/// A table as the agent makes it, of `len` bytes and sealed as told.
fn table(len: usize, seals: i32) -> (Fd, Option<(Mapping, ResidencyMap)>) {
    let fd = memfd::create(residency_map::FILE_NAME, len as u64).expect("a table");
    memfd::add_seals(&fd, seals).expect("seals");
    if len < residency_map::FILE_BYTES {
        return (fd, None);
    }
    let prot = libc::PROT_READ | libc::PROT_WRITE;
    let map = Mapping::file(fd.raw(), 0, len, prot, libc::MAP_SHARED).expect("mapped");
    // SAFETY: that long, and kept beside it.
    let table = unsafe { ResidencyMap::at(map.addr()) };
    (fd, Some((map, table)))
}

const SEALS: i32 = memfd::SEAL_SHRINK | memfd::SEAL_GROW | memfd::SEAL_SEAL;

impl Liar {
    fn greet(socket: &[u8]) -> Liar {
        let socket = sock::connect(socket).expect("the daemon listens");
        sock::set_timeout(&socket, 20_000).expect("a timeout");
        let pagemap = Fd::open(c"/proc/self/pagemap", libc::O_RDONLY, 0).expect("pagemap");
        let hello = Packet { a: message::HELLO_ALL | message::HELLO_COLD, ..Packet::new(Op::Hello) };
        sock::send(&socket, hello.bytes(), &[pagemap.raw()]).expect("hello");
        let mut buffer = [0; size_of::<Packet>()];
        let (_, mut fds) = sock::receive(&socket, &mut buffer, 0).expect("welcome");
        let channel = fds.take(0).expect("a channel");
        let channel = Channel::open(channel).expect("mapped");
        let memory = Mapping::anonymous(PAGES * PAGE_SIZE).expect("memory");
        Liar { socket, channel, device: fds.take(1), memory }
    }

    fn range(&self) -> Range {
        Range::pages_from(self.memory.addr(), PAGES as u64)
    }

    fn uffd(&self) -> Uffd {
        Uffd::bare(self.device.as_ref()).expect("userfaultfd")
    }

    /// Ends the greeting; what the daemon says to it, `None` if it hung up.
    fn ready(&self, bare: bool, fds: &[i32]) -> Option<i32> {
        let ready = Packet { a: u64::from(bare), ..Packet::new(Op::Ready) };
        sock::send(&self.socket, ready.bytes(), fds).expect("ready");
        let mut buffer = [0; size_of::<Packet>()];
        let (got, _) = sock::receive(&self.socket, &mut buffer, 0).ok()?;
        Some(Packet::parse(&buffer[..got])?.status)
    }

    /// A greeting that is accepted: a true descriptor and a table, which `forge` has written into.
    fn accepted(&self, forge: impl FnOnce(ResidencyMap)) -> (Uffd, ResidencyMap) {
        let uffd = self.uffd();
        let (fd, map) = table(residency_map::FILE_BYTES, SEALS);
        let (map, table) = map.expect("long enough");
        std::mem::forget(map);
        table.initialize();
        forge(table);
        assert_eq!(self.ready(true, &[uffd.fd().raw(), fd.raw()]), Some(0), "the greeting was refused");
        (uffd, table)
    }

    /// A greeting that is accepted, and the memory registered as the agent does it.
    fn registered(&self) -> (Uffd, ResidencyMap) {
        let (uffd, table) = self.accepted(|_| ());
        uffd.register(self.range(), uffd::MODE_MISSING | uffd::MODE_WP).expect("registered");
        (uffd, table)
    }

    /// Answers what is asked by `answer` until the daemon hangs up.
    fn serve(&self, mut answer: impl FnMut(&Liar, Packet) -> Packet) {
        let mut buffer = [0; size_of::<Packet>()];
        while let Ok((got, _)) = sock::receive(&self.socket, &mut buffer, 0)
            && let Some(request) = Packet::parse(&buffer[..got])
        {
            if sock::send(&self.socket, answer(self, request).bytes(), &[]).is_err() {
                return;
            }
        }
    }

    /// An answer that claims the whole memory, and otherwise says yes to everything.
    fn yes(&self, request: Packet) -> Packet {
        if request.op == Op::Regions as u32 {
            let range = self.range();
            self.channel.put_answer(0, RegionEntry { start: range.start, end: range.end, inode: 0, slot: 0 });
            return Packet { count: 1, ..request };
        }
        (0..message::FETCH_PAGES_MAX).for_each(|place| self.channel.put_answer_of_page(place, 1));
        let count = if request.op == Op::ColdCopy as u32 { message::FETCH_PAGES_MAX as u64 } else { request.count };
        Packet { count, ..request }
    }
}

/// Says that everything is out: of its own memory, of addresses that it does not have, and of all that the table can name.
fn claim_everything(table: ResidencyMap, own: Range) {
    for chunk in
        (own.start / residency_map::CHUNK_BYTES..=own.end / residency_map::CHUNK_BYTES).chain([0, 1 << 26, 1 << 34])
    {
        if table.find_or_add(chunk * residency_map::CHUNK_BYTES).is_some() {
            for page in 0..residency_map::CHUNK_PAGES as u64 {
                table.set_state(chunk * residency_map::CHUNK_BYTES + page * PAGE, EVICTED);
            }
        }
    }
    table.head().evicted.store(u64::MAX, Ordering::Relaxed);
    for (start, end) in [(0, u64::MAX), (u64::MAX - 1, u64::MAX), (own.start | 1, own.end)] {
        for advice in [libc::MADV_COLD, libc::MADV_PAGEOUT, libc::MADV_WILLNEED, 12345] {
            table.hint(start, end, advice);
        }
    }
}

fn touch(range: Range) {
    for addr in (range.start..range.end).step_by(PAGE_SIZE) {
        // SAFETY: memory of the liar's own; the touch may end it.
        unsafe { (addr as *const u8).read_volatile() };
    }
}

fn for_ever() -> ! {
    loop {
        std::thread::sleep(Duration::from_secs(60));
    }
}

/// The children's part. Ends with 0 if it was refused as it should be.
#[test]
fn liar() {
    let (Some(what), Some(socket)) = (std::env::var_os("PAGEFOLD_LIE"), std::env::var_os("PAGEFOLD_AT")) else {
        return;
    };
    let what = what.to_str().expect("text");
    let liar = Liar::greet(socket.as_bytes());
    let null = Fd::open(c"/dev/null", libc::O_RDWR, 0).expect("/dev/null");
    let refused = |bare: bool, fds: &[i32]| {
        let answer = liar.ready(bare, fds);
        assert!(answer.is_none_or(|status| status != 0), "{what}: accepted");
    };
    match what {
        "no descriptors" => refused(true, &[]),
        "a table that is none" => refused(true, &[liar.uffd().fd().raw(), null.raw()]),
        "a table that is too small" => refused(true, &[liar.uffd().fd().raw(), table(PAGE_SIZE, SEALS).0.raw()]),
        "a table that can shrink" => {
            let (fd, map) = table(residency_map::FILE_BYTES, memfd::SEAL_GROW);
            map.expect("long enough").1.initialize();
            refused(true, &[liar.uffd().fd().raw(), fd.raw()]);
        }
        "a table without its mark" => {
            refused(true, &[liar.uffd().fd().raw(), table(residency_map::FILE_BYTES, SEALS).0.raw()])
        }
        "a userfaultfd that is none" | "one that is none, made by an earlier daemon" => {
            let (fd, map) = table(residency_map::FILE_BYTES, SEALS);
            map.expect("long enough").1.initialize();
            refused(what == "a userfaultfd that is none", &[null.raw(), fd.raw()]);
        }
        "the pact, from the start" => {
            let (fd, map) = table(residency_map::FILE_BYTES, SEALS);
            let (_map, table) = map.expect("long enough");
            table.initialize();
            table.head().owner.store(OWNER_AGENT, Ordering::SeqCst);
            refused(true, &[liar.uffd().fd().raw(), fd.raw()]);
        }
        "somebody else's region" => {
            liar.accepted(|table| {
                table.head().client_id.store(1, Ordering::Relaxed);
                table.head().token.store(1, Ordering::Relaxed);
                table.head().arena.store(1, Ordering::Relaxed);
            });
            liar.serve(Liar::yes);
            for_ever()
        }
        "everything, before the greeting" => {
            let own = liar.range();
            liar.accepted(|table| claim_everything(table, own));
            liar.serve(Liar::yes);
            for_ever()
        }
        "everything, after it" => {
            let (_uffd, table) = liar.registered();
            claim_everything(table, liar.range());
            std::thread::scope(|scope| {
                // Never stored, so lost: it dies of that.
                scope.spawn(|| touch(liar.range()));
                liar.serve(Liar::yes);
            });
            for_ever()
        }
        "the pact, for ever" => {
            let (_uffd, table) = liar.registered();
            while !table.lock_within(1000) {}
            std::thread::scope(|scope| {
                scope.spawn(|| touch(liar.range()));
                liar.serve(Liar::yes);
            });
            for_ever()
        }
        "states that change all the time" => {
            let (_uffd, table) = liar.registered();
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    let own = liar.range();
                    for round in 0.. {
                        for addr in (own.start..own.end).step_by(PAGE_SIZE) {
                            table.find_or_add(addr);
                            table.set_state(addr, [EVICTED, FROZEN, 0, 77][(round + addr as usize / PAGE_SIZE) % 4]);
                        }
                        table.head().epoch.fetch_add(1, Ordering::Relaxed);
                    }
                });
                liar.serve(Liar::yes);
                for_ever()
            })
        }
        "a storm of faults" => {
            let _uffd = liar.registered();
            std::thread::scope(|scope| {
                for _ in 0..3 {
                    scope.spawn(|| {
                        loop {
                            touch(liar.range());
                            // SAFETY: the range is the liar's own mapping, to which no Rust reference exists; any bytes are
                            // valid there.
                            let _ = unsafe {
                                pagefold_os::mem::advise(liar.memory.addr(), liar.range().len(), libc::MADV_DONTNEED)
                            };
                        }
                    });
                }
                liar.serve(Liar::yes);
                for_ever()
            })
        }
        "a descriptor that waits" => {
            let (uffd, _table) = liar.registered();
            // SAFETY: F_SETFL takes no pointer, and `uffd` is open.
            assert_eq!(unsafe { libc::fcntl(uffd.fd().raw(), libc::F_SETFL, 0) }, 0);
            // SAFETY: the mapping has that many pages and no Rust reference to it exists. Written pages exist, so the daemon
            // asks for them.
            unsafe { liar.memory.as_ptr().write_bytes(7, PAGES * PAGE_SIZE) };
            liar.serve(Liar::yes);
            for_ever()
        }
        "yes to everything" => {
            liar.accepted(|_| ());
            // SAFETY: the mapping has that many pages and no Rust reference to it exists. Written pages exist, so the daemon
            // asks for them.
            unsafe { liar.memory.as_ptr().write_bytes(7, PAGES * PAGE_SIZE) };
            liar.serve(Liar::yes);
            for_ever()
        }
        "counts without end" => {
            liar.accepted(|_| ());
            liar.serve(|_, request| Packet { count: u64::MAX, ..request });
        }
        "answers to other questions" => {
            liar.accepted(|_| ());
            liar.serve(|_, request| Packet { sequence: request.sequence + 1, op: Op::Hello as u32, ..request });
        }
        "regions that cannot be" => {
            liar.accepted(|_| ());
            liar.serve(|me, request| {
                me.channel.put_answer(0, RegionEntry { start: 0x9001, end: 0x1000, inode: 0, slot: 0 });
                Packet { count: 1, ..request }
            });
        }
        "no answer" => {
            liar.accepted(|_| ());
            for_ever()
        }
        _ => unreachable!("{what}"),
    }
    std::process::exit(0);
}

/// Lies that are refused in the greeting, or end the connection soon.
const REFUSED: [&str; 11] = [
    "no descriptors",
    "a table that is none",
    "a table that is too small",
    "a table that can shrink",
    "a table without its mark",
    "a userfaultfd that is none",
    "one that is none, made by an earlier daemon",
    "the pact, from the start",
    "counts without end",
    "answers to other questions",
    "regions that cannot be",
];

/// Lies that cost the liar.
const BORNE: [&str; 9] = [
    "somebody else's region",
    "everything, before the greeting",
    "everything, after it",
    "the pact, for ever",
    "states that change all the time",
    "a storm of faults",
    "a descriptor that waits",
    "yes to everything",
    "no answer",
];

fn tell(host: &Host, what: &str) -> Reaped {
    let mut command = Command::new(std::env::current_exe().expect("this program"));
    command.args(["--exact", "liar", "--nocapture", "--test-threads=1"]);
    command.env("PAGEFOLD_LIE", what).env("PAGEFOLD_AT", &host.socket);
    command.stdin(Stdio::null()).stdout(Stdio::null()).process_group(0);
    Reaped(command.spawn().expect("a liar"))
}

/// Runs the tool; it must come back, whatever liars do. The time is only there to end what hangs.
fn comes_back(host: &Host, what: &[&str]) {
    let (command, rest) = what.split_first().expect("a command");
    let mut child = Reaped(
        Command::new(TOOL)
            .arg(command)
            .arg("--socket")
            .arg(&host.socket)
            .args(rest)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("the tool runs"),
    );
    wait_for(&format!("{what:?} to come back"), 120, || child.0.try_wait().expect("wait").is_some());
}

#[test]
fn liars_harm_themselves_only() {
    if !can_merge() || program().is_none() {
        return;
    }
    let mut host = Host::start(&["--cold-scan-interval", "500ms"]);
    let daemon = host.pid();
    let mut honest = Served::start(&host, &[], 12);
    wait_for("the honest client's pages to go", 60, || host.park(honest.pid()) > 1000);
    // One at a time, so that each is told to a daemon that has nothing else to refuse.
    for what in REFUSED {
        let mut liar = tell(&host, what);
        let mut ended = None;
        wait_for(&format!("the daemon to hang up on {what:?}"), 60, || {
            ended = liar.0.try_wait().expect("wait");
            ended.is_some()
        });
        assert!(ended.is_some_and(|status| status.success()), "{what}: {ended:?}");
        honest.does("peek 200");
    }
    // All liars run at the same time, beside the honest client.
    let mut liars: Vec<(&str, Reaped)> = BORNE.iter().map(|what| (*what, tell(&host, what))).collect();
    wait_for("the liars to be clients", 60, || {
        let status = host.status();
        status["cold"]["clients"].as_array().is_some_and(|all| all.len() > BORNE.len() - 2)
    });
    let end = Instant::now() + Duration::from_secs(8);
    while Instant::now() < end {
        host.park(honest.pid());
        honest.does("storm 500");
        honest.does("check");
    }
    comes_back(&host, &["park", "--all"]);
    honest.does("check");
    comes_back(&host, &["unpark", "--all"]);
    honest.does("fork");
    // Memory from which the program just discarded something is left alone for a moment.
    wait_for("the honest client to be served as ever", 60, || host.park(honest.pid()) > 1000);
    assert_eq!(
        (host.pid(), host.number(honest.pid(), "pages_lost")),
        (daemon, 0),
        "the daemon died, or pages were lost"
    );
    // A successor has them all to deal with, and the honest one too.
    host.kill_daemon();
    honest.does("check");
    host.wait();
    host.wait_for_client(honest.pid());
    honest.does("storm 300");
    for (_, liar) in &mut liars {
        let _ = liar.0.kill();
    }
    drop(liars);
    wait_for("the daemon to forget them", 60, || {
        host.status()["cold"]["clients"].as_array().is_some_and(|all| all.len() == 1)
    });
    honest.does("check");
    assert_eq!(host.number(honest.pid(), "pages_lost"), 0);
}
