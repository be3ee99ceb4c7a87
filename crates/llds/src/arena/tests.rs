//! The arena's promises, one test each.

use super::class::CLASS_COUNT;
use super::layout::VERSION;
use super::*;
use std::collections::{BTreeMap, HashSet};
use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;

fn small() -> Options {
    Options { capacity_bytes: 64 << 20, pages: Pages::Small, ..Options::default() }
}

#[test]
fn blocks_never_overlap_and_come_back() {
    let arena = Arena::private(&Options { capacity_bytes: 512 << 20, ..small() }).unwrap();
    let seat = arena.seat().unwrap();
    let mut live: BTreeMap<u64, usize> = BTreeMap::new();
    let mut random = 0x9e37_79b9_7f4a_7c15u64;
    for round in 0..20_000 {
        random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        if live.len() > 400 || (round % 3 == 0 && !live.is_empty()) {
            let nth = (random >> 33) as usize % live.len();
            let block = *live.keys().nth(nth).unwrap();
            live.remove(&block);
            arena.free(&seat, block);
            continue;
        }
        let size = match random >> 62 {
            0 => 1 + (random >> 20) as usize % 64,
            1 => 1 + (random >> 20) as usize % 5000,
            2 => 64 * (1 + (random >> 20) as usize % 40),
            _ if (random >> 20).is_multiple_of(50) => SPAN_BYTES + (random >> 30) as usize % SPAN_BYTES,
            _ => 1 + (random >> 20) as usize % 100_000.min(SMALL_BYTES_MAX),
        };
        let block = arena.alloc(&seat, size).unwrap();
        assert!(arena.block_bytes(block) >= size as u64);
        assert!(block.is_multiple_of(16) && (!size.is_multiple_of(64) || block.is_multiple_of(64)));
        let below = live.range(..=block).next_back();
        assert!(below.is_none_or(|(start, bytes)| start + *bytes as u64 <= block));
        let above = live.range(block..).next();
        assert!(above.is_none_or(|(start, _)| block + size as u64 <= *start));
        live.insert(block, size);
        seat.settle_alloc();
    }
    let mut seen = HashSet::new();
    arena.each_block(|block| assert!(seen.insert(block)));
    assert_eq!(seen, live.keys().copied().collect());
    for block in live.into_keys() {
        arena.free(&seat, block);
    }
    let stats = arena.stats();
    assert_eq!(stats.spans.block_count, 0);
    assert_eq!(stats.spans.allocated_bytes, 0);
}

#[test]
fn the_limit_is_an_error_and_freeing_helps() {
    let arena = Arena::private(&Options { capacity_bytes: 4 * SPAN_BYTES as u64, ..small() }).unwrap();
    let seat = arena.seat().unwrap();
    let mut blocks = Vec::new();
    let error = loop {
        match arena.alloc(&seat, SMALL_BYTES_MAX) {
            Ok(block) => blocks.push(block),
            Err(error) => break error,
        }
    };
    assert!(matches!(error, Error::Full { limit_bytes } if limit_bytes == 4 * SPAN_BYTES as u64), "{error}");
    assert_eq!(blocks.len(), 8);
    assert!(matches!(arena.alloc(&seat, 4 * SPAN_BYTES), Err(Error::Full { .. })));
    for block in blocks.drain(..) {
        arena.free(&seat, block);
    }
    arena.seat().unwrap();
    // The lease keeps one span for its class; the others serve any size.
    let large = arena.alloc(&seat, 3 * SPAN_BYTES).unwrap();
    arena.free(&seat, large);
}

#[test]
fn what_is_no_block_is_not_freed() {
    let arena = Arena::private(&small()).unwrap();
    let seat = arena.seat().unwrap();
    let blocks: Vec<u64> = [64, 100, 5000, 60_000, 5 * SPAN_BYTES].map(|size| arena.alloc(&seat, size).unwrap()).into();
    seat.settle_alloc();
    let range = arena.data_range();
    let spans = (range.start..range.end).step_by(SPAN_BYTES);
    let wrong = spans.chain(blocks.iter().flat_map(|block| [block + 1, block + 16, block + (1 << 16)]));
    let wrong = wrong.chain([0, 8, range.start - 16, range.end, u64::MAX]).filter(|offset| !blocks.contains(offset));
    let freed = wrong.filter(|&offset| {
        // Debug builds say what is wrong.
        let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| arena.free(&seat, offset)));
        let mut left = Vec::new();
        arena.each_block(|block| left.push(block));
        left.len() != blocks.len() || !blocks.iter().all(|&block| arena.is_allocated(block))
    });
    let freed: Vec<u64> = freed.collect();
    assert_eq!(freed, []);
}

#[test]
fn threads_get_different_blocks_and_may_free_each_others() {
    let arena = Arena::private(&small()).unwrap();
    let (sender, receiver) = std::sync::mpsc::channel::<u64>();
    std::thread::scope(|scope| {
        let mut threads = Vec::new();
        for thread in 0..3u64 {
            let (arena, sender) = (&arena, sender.clone());
            threads.push(scope.spawn(move || {
                let seat = arena.seat().unwrap();
                for round in 0..20_000u64 {
                    let block = arena.alloc(&seat, 16 + (round % 20) as usize * 16).unwrap();
                    let word = arena.inner.word(block);
                    word.store(thread << 32 | round, Ordering::Relaxed);
                    seat.settle_alloc();
                    sender.send(block).unwrap();
                }
            }));
        }
        drop(sender);
        let seat = arena.seat().unwrap();
        let mut held = HashSet::new();
        for block in receiver {
            assert!(held.insert(block), "given out twice");
            if held.len() > 5000 {
                for block in held.drain() {
                    arena.free(&seat, block);
                }
            }
        }
        for block in held.drain() {
            arena.free(&seat, block);
        }
        // Joining waits for the end of the thread itself, where its seat is given up.
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    });
    // The threads have ended, so their leases are back.
    assert_eq!(arena.stats().spans.block_count, 0);
    assert!(arena.stats().seat_count <= 1);
}

#[test]
fn freed_memory_goes_back_to_the_system() {
    let arena = Arena::private(&Options { capacity_bytes: 512 << 20, ..small() }).unwrap();
    let seat = arena.seat().unwrap();
    let blocks: Vec<u64> = (0..2000)
        .map(|_| {
            let block = arena.alloc(&seat, 60_000).unwrap();
            // SAFETY: the block has 60,000 bytes.
            unsafe { std::ptr::write_bytes(arena.at(block), 1, 60_000) };
            block
        })
        .collect();
    let resident = |arena: &Arena| -> u64 {
        let range = arena.data_range();
        let pages = (range.end - range.start) as usize / 4096;
        let mut present = vec![0u8; pages];
        // SAFETY: asks about our own mapping, one byte of answer per page.
        let done = unsafe {
            libc::mincore(arena.at(range.start).cast(), (range.end - range.start) as usize, present.as_mut_ptr())
        };
        assert_eq!(done, 0);
        present.iter().filter(|&&page| page & 1 == 1).count() as u64 * 4096
    };
    let full = resident(&arena);
    assert!(full >= 2000 * 60_000 / 10 * 9, "{full}");
    for block in blocks {
        arena.free(&seat, block);
    }
    arena.trim(&seat);
    let empty = resident(&arena);
    assert!(empty < full / 20, "{empty} of {full} bytes still present");
}

#[test]
fn a_thread_has_a_seat_to_its_very_end() {
    struct Last(Arena, std::sync::mpsc::Sender<Result<(), Error>>);
    impl Drop for Last {
        fn drop(&mut self) {
            let used = self.0.seat().and_then(|seat| {
                let block = self.0.alloc(&seat, 100)?;
                seat.settle_alloc();
                self.0.free(&seat, block);
                Ok(())
            });
            let _ = self.1.send(used);
        }
    }
    thread_local! {
        static LAST: std::cell::OnceCell<Last> = const { std::cell::OnceCell::new() };
    }
    let (_path, file) = temp("late");
    let arena = Arena::create(file, &small()).unwrap();
    for _ in 0..3 {
        let (sender, receiver) = std::sync::mpsc::channel();
        let arena = arena.clone();
        std::thread::spawn(move || {
            // Locals end in the opposite order of their first use: this one after the thread's seats.
            LAST.with(|last| assert!(last.set(Last(arena.clone(), sender)).is_ok()));
            arena.seat().unwrap();
        })
        .join()
        .unwrap();
        receiver.recv().unwrap().unwrap();
    }
    assert_eq!(arena.stats().seat_count, 0, "given up behind all that");
}

#[test]
fn a_hazard_keeps_a_retired_block() {
    let arena = Arena::private(&small()).unwrap();
    let seat = arena.seat().unwrap();
    let block = arena.alloc(&seat, 64).unwrap();
    seat.settle_alloc();
    let (told, tell) = (std::sync::Barrier::new(2), std::sync::Barrier::new(2));
    std::thread::scope(|scope| {
        let (told, tell, arena) = (&told, &tell, &arena);
        scope.spawn(move || {
            let seat = arena.seat().unwrap();
            let index = seat.hazard_free().unwrap();
            seat.hazard_set(index, block);
            told.wait();
            tell.wait();
            seat.hazard_clear(index);
            told.wait();
            tell.wait();
        });
        told.wait();
        seat.intend_retire(block);
        arena.retire(&seat, block);
        arena.collect(&seat);
        assert!(arena.is_allocated(block), "freed under a guard");
        tell.wait();
        told.wait();
        arena.collect(&seat);
        assert!(!arena.is_allocated(block), "kept without a guard");
        tell.wait();
    });
}

struct TempFile(std::path::PathBuf);

impl Drop for TempFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

fn temp(name: &str) -> (TempFile, File) {
    let path = std::path::PathBuf::from(format!("/dev/shm/llds-test-{}-{name}", std::process::id()));
    let file = File::options().read(true).write(true).create(true).truncate(true).open(&path).unwrap();
    (TempFile(path), file)
}

#[test]
fn two_mappings_of_a_file_see_one_arena() {
    let (path, file) = temp("two");
    let one = Arena::create(file, &Options { kind: 5, ..small() }).unwrap();
    let seat = one.seat().unwrap();
    let block = one.alloc(&seat, 100).unwrap();
    seat.settle_alloc();
    one.inner.word(block).store(77, Ordering::Relaxed);
    let two = Arena::open_path(&path.0, 5, Pages::Auto).unwrap();
    assert_eq!(two.inner.word(block).load(Ordering::Relaxed), 77);
    let other = two.seat().unwrap();
    assert_ne!(other.owner(), one.seat().unwrap().owner());
    let second = two.alloc(&other, 100).unwrap();
    assert_ne!(second, block);
    two.free(&other, block);
    assert!(!one.is_allocated(block));
}

#[test]
fn files_that_are_not_ours_are_refused_by_name() {
    use std::os::unix::fs::FileExt;
    let (path, file) = temp("refuse");
    drop(Arena::create(file, &Options { kind: 5, ..small() }).unwrap());
    let open = |kind| Arena::open_path(&path.0, kind, Pages::Auto).map(drop);
    let file = File::options().read(true).write(true).open(&path.0).unwrap();
    open(5).unwrap();
    assert!(matches!(open(6), Err(Error::Foreign)));
    let mut sound = [0u8; 128];
    file.read_exact_at(&mut sound, 0).unwrap();
    let patch = |at: usize, byte: u8| {
        let mut bad = sound;
        bad[at] = byte;
        file.write_all_at(&bad, 0).unwrap();
    };
    patch(0, b'X');
    assert!(matches!(open(5), Err(Error::Foreign)));
    patch(8, 99);
    assert!(matches!(open(5), Err(Error::Version { found: 99, expected: VERSION })));
    patch(12, 0x33);
    assert!(matches!(open(5), Err(Error::Architecture { .. })));
    for at in (16..72).step_by(5) {
        patch(at, sound[at] ^ 0x40);
        assert!(matches!(open(5), Err(Error::Damaged(_))), "byte {at}");
    }
    file.write_all_at(&sound, 0).unwrap();
    open(5).unwrap();
    let length = file.metadata().unwrap().len();
    file.set_len(length - 1).unwrap();
    assert!(matches!(open(5), Err(Error::Truncated { .. })));
    file.set_len(100).unwrap();
    assert!(matches!(open(5), Err(Error::Truncated { .. })));
}

#[test]
fn a_forked_child_is_told() {
    child_is_told();
}

#[test]
fn a_forked_child_is_told_where_the_kernel_wipes_no_pages() {
    std::thread::spawn(|| {
        let advice = libc::MADV_WIPEONFORK as u32;
        match refuse_calls(libc::SYS_madvise, errno(libc::EINVAL), 2, libc::BPF_JEQ, advice) {
            Ok(()) => child_is_told(),
            Err(error) => println!("SKIPPED: no seccomp filter here: {error}"),
        }
    })
    .join()
    .unwrap();
}

fn child_is_told() {
    let arena = Arena::private(&small()).unwrap();
    let _ = arena.seat().unwrap();
    // SAFETY: the child only reads memory and leaves by _exit.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let refused = arena.is_forked() && matches!(arena.seat(), Err(Error::Forked));
        // SAFETY: leaves the child without running destructors of the parent's threads.
        unsafe { libc::_exit(if refused { 0 } else { 1 }) };
    }
    let mut status = 0;
    // SAFETY: waits for the child just made.
    unsafe { libc::waitpid(child, &raw mut status, 0) };
    assert_eq!(status, 0);
    assert!(!arena.is_forked());
}

/// What a filter says of a call that fails.
fn errno(number: i32) -> u32 {
    libc::SECCOMP_RET_ERRNO | number as u32
}

/// Has the kernel do `what` (`SECCOMP_RET_`...) at this thread's calls numbered `call`, if the low half of their argument
/// `argument` passes `test` against `value`.
fn refuse_calls(call: i64, what: u32, argument: u32, test: u32, value: u32) -> io::Result<()> {
    const LOAD: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
    const RETURN: u16 = (libc::BPF_RET | libc::BPF_K) as u16;
    let jump = |test: u32| (libc::BPF_JMP | test | libc::BPF_K) as u16;
    let step = |code, jt, jf, k| libc::sock_filter { code, jt, jf, k };
    let low_half = if cfg!(target_endian = "little") { 0 } else { 4 };
    let mut steps = [
        // The call's number, then the argument.
        step(LOAD, 0, 0, 0),
        step(jump(libc::BPF_JEQ), 0, 3, call as u32),
        step(LOAD, 0, 0, 16 + argument * 8 + low_half),
        step(jump(test), 0, 1, value),
        step(RETURN, 0, 0, what),
        step(RETURN, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog { len: steps.len() as u16, filter: steps.as_mut_ptr() };
    // SAFETY: the program outlives the call, which copies it; it concerns this thread alone.
    let done = unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
            && libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program) == 0
    };
    if done { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[test]
fn signals_do_not_keep_memory_from_being_secured() {
    std::thread::spawn(|| {
        // As if a signal came in each that is long enough.
        if let Err(error) = refuse_calls(libc::SYS_fallocate, errno(libc::EINTR), 3, libc::BPF_JGT, 300 << 10) {
            println!("SKIPPED: no seccomp filter here: {error}");
            return;
        }
        let (_path, file) = temp("signals");
        let arena = Arena::create(file, &small()).unwrap();
        let seat = arena.seat().unwrap();
        let block = arena.alloc(&seat, 5 * SPAN_BYTES).unwrap();
        arena.free(&seat, block);
    })
    .join()
    .unwrap();
}

/// Such as systemd's `SystemCallFilter=@system-service`, which has all other calls of an arena.
#[test]
fn a_filter_for_services_ends_nobody() {
    // SAFETY: the child makes an arena of its own and leaves by _exit.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let filtered = refuse_calls(libc::SYS_mincore, libc::SECCOMP_RET_KILL_PROCESS, 0, libc::BPF_JGE, 0);
        let code = filtered.map_or(2, |()| {
            let (_path, file) = temp("filtered");
            let arena = Arena::create(file, &Options { pages: Pages::Auto, ..small() }).unwrap();
            let seat = arena.seat().unwrap();
            i32::from(arena.alloc(&seat, 100).is_err())
        });
        // SAFETY: leaves the child without running destructors of the parent's threads.
        unsafe { libc::_exit(code) };
    }
    let mut status = 0;
    // SAFETY: waits for the child just made.
    unsafe { libc::waitpid(child, &raw mut status, 0) };
    if status == 2 << 8 {
        println!("SKIPPED: no seccomp filter here");
    } else {
        assert_eq!(status, 0);
    }
}

#[test]
fn free_spans_with_pages_serve_when_there_are_no_more_pages() {
    std::thread::spawn(|| {
        let (_path, file) = temp("no-pages");
        let arena = Arena::create(file, &small()).unwrap();
        let seat = arena.seat().unwrap();
        let (holes, kept) = (arena.alloc(&seat, 4 << 20).unwrap(), arena.alloc(&seat, 4 * SPAN_BYTES).unwrap());
        let blocked = arena.alloc(&seat, SPAN_BYTES).unwrap();
        arena.free(&seat, holes);
        arena.trim(&seat);
        arena.free(&seat, kept);
        // The first free spans are holes, those behind have pages: of these none is asked for again.
        if let Err(error) = refuse_calls(libc::SYS_fallocate, errno(libc::ENOSPC), 3, libc::BPF_JGE, 0) {
            println!("SKIPPED: no seccomp filter here: {error}");
            return;
        }
        assert_eq!(arena.stats().spans.kept_bytes, 4 * SPAN_BYTES as u64);
        let inside = |block: u64| (kept..kept + 4 * SPAN_BYTES as u64).contains(&block);
        let array = arena.alloc_log(&seat, 1024, false).unwrap();
        let large = arena.alloc(&seat, 2 * SPAN_BYTES).unwrap();
        let record = arena.alloc(&seat, 1000).unwrap();
        assert!([array, large, record].map(inside) == [true; 3]);
        let none = arena.alloc(&seat, 2 * SPAN_BYTES);
        assert!(matches!(none, Err(Error::NoMemory { .. })), "{none:?}");
        // Not even an extent: the next array lies in the one there is.
        while arena.alloc(&seat, SPAN_BYTES).is_ok() {}
        arena.inner.drop_leases(&seat, seat.owner);
        assert_eq!(arena.log_of(arena.alloc_log(&seat, 4096, true).unwrap()), arena.log_of(array));
        arena.free(&seat, blocked);
    })
    .join()
    .unwrap();
}

#[test]
fn the_next_seats_have_memory_already() {
    let (path, file) = temp("seats");
    let arena = Arena::create(file, &small()).unwrap();
    let used = || std::fs::metadata(&path.0).unwrap().blocks() * 512;
    let created = used();
    if created.is_multiple_of(2 << 20) {
        println!("SKIPPED: /dev/shm gives huge pages, which hold many seats");
        return;
    }
    let taken: Vec<_> = (0..6).map(|_| arena.inner.take_seat().unwrap()).collect();
    assert_eq!(taken, [1, 2, 3, 4, 5, 6]);
    // Those six and the next ones; four of them when it was created, and pages are not seats.
    assert!(used() >= created + 5 * size_of::<Seat>() as u64, "{created} bytes became {}", used());
}

#[test]
fn a_descriptor_that_another_file_took_tells_no_deaths() {
    use std::os::fd::AsRawFd;
    let (path, file) = temp("closed");
    let one = Arena::create(file, &Options { kind: 5, ..small() }).unwrap();
    let state = Identity::new(1, 0).taken();
    let file = one.inner.map.file().unwrap();
    assert!(alive::is_unlocked(file, one.inner.map.inode(), 1), "init uses no file of ours");
    assert!(!one.inner.may_live(state), "nor began it with the clock");
    // Another file takes the descriptor's number: nothing can be known any more from its locks.
    let other = File::open("/dev/null").unwrap();
    let kept = file.try_clone().unwrap();
    // SAFETY: puts another file in the place of ours for a moment; nobody else knows that number.
    assert!(unsafe { libc::dup2(other.as_raw_fd(), file.as_raw_fd()) } >= 0);
    assert!(!alive::is_unlocked(file, one.inner.map.inode(), 1));
    // SAFETY: as above, back again.
    assert!(unsafe { libc::dup2(kept.as_raw_fd(), file.as_raw_fd()) } >= 0);
    assert!(alive::is_unlocked(file, one.inner.map.inode(), 1));
    drop(path);
}

#[test]
fn a_descriptor_that_another_file_took_is_not_closed() {
    use std::os::fd::{AsRawFd, FromRawFd};
    let (_path, file) = temp("not-ours");
    let arena = Arena::create(file, &small()).unwrap();
    let number = arena.inner.map.file().unwrap().as_raw_fd();
    let other = File::open("/dev/null").unwrap();
    // SAFETY: puts another file in the place of ours; nobody else knows that number.
    assert!(unsafe { libc::dup2(other.as_raw_fd(), number) } >= 0);
    drop(arena);
    // SAFETY: the number is nobody's else.
    let taken = unsafe { File::from_raw_fd(number) };
    assert_eq!(alive::inode_of(&taken).unwrap(), alive::inode_of(&other).unwrap());
}

#[test]
fn a_file_that_took_the_descriptor_is_left_alone() {
    use std::os::fd::AsRawFd;
    let (path, file) = temp("foreign");
    let arena = Arena::create(file, &small()).unwrap();
    let seat = arena.seat().unwrap();
    let block = arena.alloc(&seat, 16 << 20).unwrap();
    seat.settle_alloc();
    let (other_path, other) = temp("foreign-other");
    let bytes = vec![7; arena.data_range().end as usize];
    std::fs::write(&other_path.0, &bytes).unwrap();
    let file = arena.inner.map.file().unwrap();
    let kept = file.try_clone().unwrap();
    let used = || std::fs::metadata(&path.0).unwrap().blocks() * 512;
    let full = used();
    // SAFETY: puts another file in the place of ours for a while; nobody else knows that number.
    assert!(unsafe { libc::dup2(other.as_raw_fd(), file.as_raw_fd()) } >= 0);
    arena.free(&seat, block);
    arena.trim(&seat);
    let refused = arena.alloc(&seat, 32 << 20);
    // SAFETY: as above, back again.
    assert!(unsafe { libc::dup2(kept.as_raw_fd(), file.as_raw_fd()) } >= 0);
    assert!(std::fs::read(&other_path.0).unwrap() == bytes, "another file was changed");
    assert!(matches!(refused, Err(Error::Io(_))), "{refused:?}");
    assert!(used() + (14 << 20) < full, "pages are given back without the descriptor");
    arena.alloc(&seat, 32 << 20).unwrap();
}

#[test]
fn spans_that_extents_pass_over_are_used_before_the_limit() {
    let arena = Arena::private(&Options { capacity_bytes: 256 << 20, ..small() }).unwrap();
    let seat = arena.seat().unwrap();
    let mut bytes = 0;
    // Extents are aligned, and small blocks between them see to it that the next one never begins where the last ended.
    'full: loop {
        for _ in 0..1000 {
            match arena.alloc(&seat, 1024) {
                Ok(_) => bytes += 1024,
                Err(error) => break 'full assert!(matches!(error, Error::Full { .. }), "{error}"),
            }
        }
        for _ in 0..8 {
            bytes += arena.alloc_log(&seat, 1 << 20, false).map_or(0, |_| 1 << 20);
        }
    }
    let held = arena.stats().spans.held_bytes;
    assert_eq!(held, 256 << 20, "full with {} MiB of 256 in blocks", bytes >> 20);
}

#[test]
fn extents_that_threads_leave_are_filled_on() {
    let arena = Arena::private(&small()).unwrap();
    let count = 2 * (64 << 20) / SPAN_BYTES;
    for second in [false, true] {
        for _ in 0..count {
            let one = || {
                let seat = arena.seat().unwrap();
                arena.alloc_log(&seat, 64, second).unwrap();
                seat.settle_alloc();
            };
            // Joining waits for the end of the thread itself, where its seat is given up.
            std::thread::scope(|scope| scope.spawn(one).join().unwrap());
        }
    }
    let seat = arena.seat().unwrap();
    arena.alloc(&seat, 1000).unwrap();
    let mut blocks = HashSet::new();
    arena.each_block(|block| assert!(blocks.insert(block)));
    assert_eq!(blocks.len(), 2 * count + 1);
}

#[test]
fn more_threads_than_spans_have_arrays() {
    let options = Options { capacity_bytes: 128 * SPAN_BYTES as u64, ..small() };
    let arena = Arena::private(&options).unwrap();
    let (sender, receiver) = std::sync::mpsc::channel();
    let count = 400;
    let end = Mutex::new(());
    std::thread::scope(|scope| {
        // They all live until the last one has what he asked for.
        let held = end.lock();
        for _ in 0..count {
            let (arena, end, sender) = (&arena, &end, sender.clone());
            let work = move || {
                let seat = arena.seat().unwrap();
                sender.send([false, true].map(|second| arena.alloc_log(&seat, 64, second).ok())).unwrap();
                seat.settle_alloc();
                drop(end.lock());
            };
            std::thread::Builder::new().stack_size(256 << 10).spawn_scoped(scope, work).unwrap();
            // One after the other: who is stopped with an extent in his hand keeps it meanwhile.
            let blocks = receiver.recv().unwrap();
            assert!(blocks.iter().all(Option::is_some), "{blocks:?}");
        }
        drop(held);
    });
    let seat = arena.seat().unwrap();
    arena.alloc(&seat, 64 * SPAN_BYTES).unwrap();
}

/// Of the `bytes` from `block` on, how many lie on pages that are there.
fn present_bytes(arena: &Arena, block: u64, bytes: usize) -> usize {
    let start = block & !4095;
    let mut present = vec![0u8; (block as usize + bytes).div_ceil(4096) - start as usize / 4096];
    // SAFETY: asks about our own mapping, one byte of answer per page.
    let done = unsafe { libc::mincore(arena.at(start).cast(), present.len() * 4096, present.as_mut_ptr()) };
    assert_eq!(done, 0);
    present.iter().filter(|&&page| page & 1 == 1).count() * 4096
}

#[test]
fn the_next_array_has_its_memory_already() {
    const BYTES: usize = 40 << 10;
    for pages in [Pages::Small, Pages::Transparent] {
        let arena = Arena::private(&Options { capacity_bytes: 256 << 20, pages, ..Options::default() }).unwrap();
        let seat = arena.seat().unwrap();
        let mut extents = std::collections::BTreeSet::new();
        // Arrays of several extents, and of all places in one.
        for turn in 0..100 {
            arena.ready_log(&seat, BYTES);
            let block = arena.alloc_log(&seat, BYTES, false).unwrap();
            seat.settle_alloc();
            assert!(present_bytes(&arena, block, BYTES) >= BYTES, "array {turn}, {pages:?}");
            extents.insert(arena.log_of(block).unwrap());
        }
        assert!(extents.len() > 3, "{extents:?}");
        let all: usize = extents.iter().map(|(extent, _)| present_bytes(&arena, *extent, SPAN_BYTES)).sum();
        assert!(pages != Pages::Small || all <= 101 * BYTES + extents.len() * 3 * 4096, "{all} bytes for 100 arrays");
    }
}

#[test]
fn an_array_that_does_not_come_is_no_loss() {
    let arena = Arena::private(&small()).unwrap();
    let seat = arena.seat().unwrap();
    while let Ok(_block) = arena.alloc(&seat, SPAN_BYTES) {}
    seat.settle_alloc();
    // No extent is to be had, nor is one kept.
    arena.ready_log(&seat, 4096);
    assert_eq!(arena.log_room(&seat, false), 0);
    // Above what lies in extents.
    arena.ready_log(&seat, 64 * SPAN_BYTES);
}

#[test]
fn what_is_left_in_extents_serves_before_the_limit() {
    let arena = Arena::private(&small()).unwrap();
    let seat = arena.seat().unwrap();
    // Extents of both logs, each with one block, and no free span but those.
    let logs: Vec<u64> = [(64, true), (4 * SPAN_BYTES / 16, true), (64, false)]
        .map(|(size, second)| {
            let block = arena.alloc_log(&seat, size, second).unwrap();
            arena.inner.drop_leases(&seat, seat.owner);
            block
        })
        .into();
    let full = std::iter::from_fn(|| arena.alloc(&seat, SPAN_BYTES).ok()).map(|block| (block, SPAN_BYTES as u64));
    let mut blocks: Vec<(u64, u64)> = full.collect();
    let count = blocks.len();
    while let Ok(block) = arena.alloc_log(&seat, SPAN_BYTES / 4, false) {
        blocks.push((block, SPAN_BYTES as u64 / 4));
    }
    assert!(blocks.len() > count + 4, "{} arrays", blocks.len() - count);
    let count = blocks.len();
    while let Ok(block) = arena.alloc(&seat, 300) {
        assert!(arena.is_allocated(block));
        blocks.push((block, 300));
    }
    seat.settle_alloc();
    assert!(blocks.len() > count + 100, "{} records", blocks.len() - count);
    blocks.extend(logs.iter().map(|&block| (block, 64)));
    blocks.sort_unstable();
    assert!(blocks.windows(2).all(|pair| pair[0].0 + pair[0].1 <= pair[1].0), "two blocks in one place");
    blocks.iter().for_each(|&(block, _)| arena.free(&seat, block));
    arena.trim(&seat);
    arena.alloc(&seat, 64 << 20).unwrap();
}

/// Cleans up after every dead seat, none of whose blocks were linked.
#[cfg(any(debug_assertions, pagefold_stress))]
fn recover_unlinked(arena: &Arena) {
    for owner in arena.dead_seats() {
        if let Some(dead) = arena.begin_recovery(owner) {
            arena.recover_alloc(&dead);
            arena.recover_retire(&dead);
            arena.end_recovery(dead);
        }
    }
}

#[test]
#[cfg(any(debug_assertions, pagefold_stress))]
fn spans_that_the_dead_claimed_come_back() {
    // Spans claimed, pages secured, heads written, rests written: a death at each stage of a block of many spans.
    let spans = 100;
    for point in [1, 2, 3, 10, 50, 99, 100, 101, 102, 103, 150, 199, 200] {
        let (path, file) = temp("claimed");
        let arena = Arena::create(file, &small()).unwrap();
        let seat = arena.seat().unwrap();
        let used = || std::fs::metadata(&path.0).unwrap().blocks() * 512;
        let empty = used();
        assert!(fault::dies(point, || {
            let arena = Arena::open_path(&path.0, 0, Pages::Auto).unwrap();
            let seat = arena.seat().unwrap();
            let _ = arena.alloc(&seat, spans * SPAN_BYTES);
        }));
        recover_unlinked(&arena);
        arena.trim(&seat);
        let stats = arena.stats().spans;
        assert_eq!((stats.block_count, stats.held_bytes), (0, 0), "death at point {point}");
        // A seat and a page or two of bookkeeping.
        assert!(used() < empty + (1 << 20), "death at point {point}: {empty} to {} bytes in an empty arena", used());
        let whole = arena.alloc(&seat, 64 << 20);
        assert!(whole.is_ok(), "death at point {point}: {whole:?}");
        seat.settle_alloc();
    }
}

#[test]
#[cfg(any(debug_assertions, pagefold_stress))]
fn what_a_dead_recoverer_freed_is_not_freed_again() {
    let (path, file) = temp("freed");
    let arena = Arena::create(file, &small()).unwrap();
    let seat = arena.seat().unwrap();
    let large = || arena.alloc(&seat, 4 * SPAN_BYTES).unwrap();
    for point in 1.. {
        // One takes a large block and dies before he links it, the one who cleans up after him dies too.
        let taken = fault::dies(0, || {
            let arena = Arena::open_path(&path.0, 0, Pages::Auto).unwrap();
            let _ = arena.alloc(&arena.seat().unwrap(), 4 * SPAN_BYTES);
            // SAFETY: ends this process, with its seat taken.
            unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
        });
        assert!(taken);
        let died = fault::dies(point, || recover_unlinked(&Arena::open_path(&path.0, 0, Pages::Auto).unwrap()));
        // Others go on before anybody notices.
        let ours = [large(), large()];
        seat.settle_alloc();
        recover_unlinked(&arena);
        assert!(ours.iter().all(|&block| arena.is_allocated(block)), "recoverer's death at point {point}");
        // What the two deaths lost, an audit finds.
        let mut all = Vec::new();
        arena.each_block(|block| all.push(block));
        assert!(all.len() <= 3, "{all:?}");
        all.into_iter().for_each(|block| arena.free(&seat, block));
        if !died {
            break;
        }
    }
}

#[test]
#[cfg(any(debug_assertions, pagefold_stress))]
fn spans_of_a_block_that_the_dead_were_freeing_come_back() {
    for point in 1.. {
        let (path, file) = temp("freeing");
        let arena = Arena::create(file, &small()).unwrap();
        let seat = arena.seat().unwrap();
        let died = fault::dies(0, || {
            let arena = Arena::open_path(&path.0, 0, Pages::Auto).unwrap();
            let seat = arena.seat().unwrap();
            let block = arena.alloc(&seat, 5 * SPAN_BYTES).unwrap();
            seat.settle_alloc();
            fault::arm(point);
            arena.free(&seat, block);
            // SAFETY: leaves the child without running destructors of the parent's threads.
            unsafe { libc::_exit(0) };
        });
        recover_unlinked(&arena);
        assert_eq!(arena.orphan_bytes(), 0, "death at point {point}");
        // A death before the block got shorter leaves it to the audit.
        let mut lost = Vec::new();
        arena.each_block(|block| lost.push(block));
        assert!(lost.len() <= 1);
        lost.into_iter().for_each(|block| arena.free(&seat, block));
        let whole = arena.alloc(&seat, 64 << 20);
        assert!(whole.is_ok(), "death at point {point}: {whole:?}");
        if !died {
            assert!(point > 8, "{point}");
            break;
        }
    }
}

#[test]
#[cfg(any(debug_assertions, pagefold_stress))]
fn an_empty_span_that_nobody_knows_of_comes_back() {
    for (point, audit) in (1..).flat_map(|point| [(point, true), (point, false)]) {
        let (path, file) = temp("unhinted");
        let arena = Arena::create(file, &small()).unwrap();
        let seat = arena.seat().unwrap();
        // The only block of an idle span, and he who frees it dies.
        let block = arena.alloc(&seat, 1000).unwrap();
        seat.settle_alloc();
        arena.inner.drop_leases(&seat, seat.owner);
        // As far as he knows, others who look for room have seen no hint.
        for index in 0..arena.inner.layout.hint_words * CLASS_COUNT {
            arena.inner.word((arena.inner.layout.hints + index * 8) as u64).store(0, Ordering::Relaxed);
        }
        let died = fault::dies(0, || {
            let arena = Arena::open_path(&path.0, 0, Pages::Auto).unwrap();
            let seat = arena.seat().unwrap();
            fault::arm(point);
            arena.free(&seat, block);
            // SAFETY: leaves the child without running destructors of the parent's threads.
            unsafe { libc::_exit(0) };
        });
        recover_unlinked(&arena);
        // Found by who is alone, and by who finds no room.
        if audit {
            arena.release_lost(&seat);
        }
        let whole = arena.alloc(&seat, 64 << 20);
        assert!(whole.is_ok(), "death at point {point}: {whole:?}");
        if !died && !audit {
            break;
        }
    }
}

#[test]
#[cfg(any(debug_assertions, pagefold_stress))]
fn extents_that_the_dead_were_filling_are_filled_on() {
    // An extent that another left, or one that he makes himself; and one who cleans up may die too.
    for (idle, recoverer) in [(true, 0), (true, 2), (true, 5), (false, 0), (false, 4)] {
        for point in 1.. {
            let (path, file) = temp("filling");
            let arena = Arena::create(file, &small()).unwrap();
            let seat = arena.seat().unwrap();
            // As many spans as an arena of this size has in an extent.
            let size = 8 * SPAN_BYTES / 16;
            let mut ours = Vec::new();
            let mut fill = |count: usize| {
                for _ in 0..count {
                    ours.push(arena.alloc_log(&seat, size, false).unwrap());
                    seat.settle_alloc();
                }
                arena.inner.drop_leases(&seat, seat.owner);
                ours.clone()
            };
            fill(usize::from(idle));
            let died = fault::dies(0, || {
                let arena = Arena::open_path(&path.0, 0, Pages::Auto).unwrap();
                let seat = arena.seat().unwrap();
                fault::arm(point);
                let _ = arena.alloc_log(&seat, size, false);
                seat.settle_alloc();
                arena.inner.leave(seat.owner, Some(Instant::now()));
                // SAFETY: leaves the child without running destructors of the parent's threads.
                unsafe { libc::_exit(0) };
            });
            if recoverer > 0 {
                fault::dies(recoverer, || recover_unlinked(&Arena::open_path(&path.0, 0, Pages::Auto).unwrap()));
            }
            recover_unlinked(&arena);
            assert_eq!(arena.orphan_bytes(), 0, "death at point {point}");
            let ours = fill(5);
            let distinct: HashSet<&u64> = ours.iter().collect();
            assert_eq!(distinct.len(), ours.len(), "death at point {point}, of who cleaned up at {recoverer}");
            assert!(ours.iter().all(|&block| arena.is_allocated(block)));
            let extents: HashSet<_> = ours.iter().map(|&block| arena.log_of(block).unwrap()).collect();
            // A death right before the hint hides one until there is no other.
            assert!(extents.len() <= 2, "death at point {point}, of who cleaned up at {recoverer}");
            let mut lost = Vec::new();
            arena.each_block(|block| lost.push(block));
            assert!(lost.len() <= ours.len() + 1, "death at point {point}");
            lost.into_iter().for_each(|block| arena.free(&seat, block));
            let whole = arena.alloc(&seat, 64 << 20);
            assert!(whole.is_ok(), "death at point {point}, of who cleaned up at {recoverer}: {whole:?}");
            if !died {
                assert!(point > 3, "{point}");
                break;
            }
        }
    }
}

#[test]
#[cfg(any(debug_assertions, pagefold_stress))]
fn spans_that_the_dead_hid_serve_before_the_limit() {
    let mut hidden = 0;
    for point in 1.. {
        let (path, file) = temp("hidden");
        let arena = Arena::create(file, &small()).unwrap();
        let seat = arena.seat().unwrap();
        let block = arena.alloc(&seat, 1000).unwrap();
        seat.settle_alloc();
        arena.inner.drop_leases(&seat, seat.owner);
        let died = fault::dies(0, || {
            let arena = Arena::open_path(&path.0, 0, Pages::Auto).unwrap();
            let seat = arena.seat().unwrap();
            fault::arm(point);
            arena.alloc(&seat, 1000).unwrap();
            seat.settle_alloc();
            arena.inner.leave(seat.owner, Some(Instant::now()));
            // SAFETY: leaves the child without running destructors of the parent's threads.
            unsafe { libc::_exit(0) };
        });
        recover_unlinked(&arena);
        let hint = arena.inner.layout.hints + class_of(1000) * arena.inner.layout.hint_words * 8;
        hidden += u32::from(arena.inner.word(hint as u64).load(Ordering::Relaxed) == 0);
        while arena.alloc(&seat, SPAN_BYTES).is_ok() {}
        let more = arena.alloc(&seat, 1000);
        assert!(
            more.as_ref().is_ok_and(|more| more.abs_diff(block) < SPAN_BYTES as u64),
            "death at point {point}: {more:?}"
        );
        if !died {
            break;
        }
    }
    assert!(hidden > 1, "{hidden} spans were hidden");
}

#[test]
#[cfg(any(debug_assertions, pagefold_stress))]
fn a_death_is_audited_once() {
    let (path, file) = temp("audited");
    let arena = Arena::create(file, &small()).unwrap();
    let seat = arena.seat().unwrap();
    for _ in 0..2 {
        assert!(arena.is_audited());
        assert!(fault::dies(2, || {
            let arena = Arena::open_path(&path.0, 0, Pages::Auto).unwrap();
            let _ = arena.alloc(&arena.seat().unwrap(), 1000);
        }));
        recover_unlinked(&arena);
        assert!(!arena.is_audited());
        arena.release_lost(&seat);
    }
}

#[test]
fn the_rest_of_a_block_that_is_gone_is_found() {
    let arena = Arena::private(&small()).unwrap();
    let seat = arena.seat().unwrap();
    let block = arena.alloc(&seat, 5 * SPAN_BYTES).unwrap();
    seat.settle_alloc();
    arena.inner.orphan_tail(block);
    assert_eq!(arena.orphan_bytes(), SPAN_BYTES as u64);
    arena.release_lost(&seat);
    assert_eq!(arena.orphan_bytes(), 0);
    arena.free(&seat, block);
    arena.alloc(&seat, 64 << 20).unwrap();
}

#[test]
fn holes_that_were_filled_again_are_trimmed() {
    let (path, file) = temp("holes");
    let arena = Arena::create(file, &small()).unwrap();
    let seat = arena.seat().unwrap();
    let block = arena.alloc(&seat, 32 << 20).unwrap();
    seat.settle_alloc();
    let used = || std::fs::metadata(&path.0).unwrap().blocks() * 512;
    let full = used();
    arena.free(&seat, block);
    arena.trim(&seat);
    let empty = used();
    assert!(empty + (30 << 20) < full, "{empty} of {full} bytes");
    // A late reader: each page that it touches is there again.
    for at in (block..block + (32 << 20)).step_by(4096) {
        arena.inner.word(at).load(Ordering::Relaxed);
    }
    assert!(used() > empty + (30 << 20), "on this file system holes stay holes when they are read");
    arena.trim(&seat);
    assert_eq!(used(), empty);
    assert_eq!(arena.stats().spans.held_bytes, 0);
}

#[test]
fn pages_of_freed_extents_stay_a_while() {
    let (path, file) = temp("late");
    let arena = Arena::create(file, &Options { capacity_bytes: 512 << 20, ..small() }).unwrap();
    let seat = arena.seat().unwrap();
    let used = || std::fs::metadata(&path.0).unwrap().blocks() * 512;
    let fill = || -> Vec<u64> {
        let blocks = (0..1000).map(|_| arena.alloc_log(&seat, 64 << 10, false).unwrap());
        let blocks = blocks.inspect(|&block| arena.inner.word(block).store(7, Ordering::Relaxed)).collect();
        seat.settle_alloc();
        blocks
    };
    let blocks = fill();
    let full = used();
    blocks.iter().for_each(|&block| arena.free(&seat, block));
    assert_eq!(used(), full, "given back at once");
    assert_eq!(arena.inner.word(blocks[0]).load(Ordering::Relaxed), 7);
    let day = std::time::Duration::from_secs(86_400);
    arena.inner.give_back_late(Some(Instant::now() + day), seat.owner);
    assert!(used() < full - (50 << 20), "{} of {full} bytes kept", used());
    // What serves again meanwhile is not given back; `trim` waits for nothing.
    fill().iter().for_each(|&block| arena.free(&seat, block));
    let blocks = fill();
    arena.inner.give_back_late(Some(Instant::now() + day), seat.owner);
    assert!(blocks.iter().all(|&block| arena.inner.word(block).load(Ordering::Relaxed) == 7));
    blocks.iter().for_each(|&block| arena.free(&seat, block));
    arena.trim(&seat);
    assert_eq!(arena.stats().spans.held_bytes, 0);
}

#[test]
fn a_table_that_cannot_be_is_refused_by_who_is_alone() {
    let word = |state: u64, class: usize, spans: u64| state | (class as u64) << 8 | spans << 32;
    let cases = [
        ("no state", word(9, 0, 0)),
        ("a free span of many", word(1, 0, 2)),
        ("a class that is none", word(3, CLASS_COUNT, 0)),
        ("blocks of class 0", word(3, 0, 0)),
        ("small blocks in an extent", word(3, 5, 2)),
        ("an extent of nothing", word(3, CLASS_COUNT - 1, 0)),
        ("an extent too long", word(3, CLASS_COUNT - 1, 1 << 20)),
        ("a large block beyond the end", word(4, 0, u64::from(u32::MAX))),
    ];
    for (what, meta) in cases {
        let (path, file) = temp("table");
        let arena = Arena::create(file, &small()).unwrap();
        arena.inner.damage(100, meta);
        drop(arena);
        let file = File::options().read(true).write(true).open(&path.0).unwrap();
        let opened = Arena::open_alone(file, 0, Pages::Small);
        assert!(matches!(opened, Err(Error::Damaged(_))), "{what}");
    }
}

#[test]
#[cfg(any(debug_assertions, pagefold_stress))]
fn what_damage_says_is_to_be_freed_is_not() {
    use std::mem::offset_of;
    use std::os::unix::fs::FileExt;
    let (path, file) = temp("strays");
    let arena = Arena::create(file, &small()).unwrap();
    let blocks: Vec<u64> = [100, 5 * SPAN_BYTES].map(|size| arena.alloc(&arena.seat().unwrap(), size).unwrap()).into();
    arena.seat().unwrap().settle_alloc();
    let (range, first) = (arena.data_range(), arena.inner.layout.seats);
    drop(arena);
    // Two seats, one of a process that is gone and one in which nobody sits.
    let file = File::options().read(true).write(true).open(&path.0).unwrap();
    let strays = [8, blocks[0] + 16, blocks[1] + SPAN_BYTES as u64, range.start + (32 << 20), range.end, u64::MAX];
    for (seat, state) in [(0, Identity::new(1, 0).taken()), (1, 0)] {
        let write = |at: usize, word: u64| {
            file.write_all_at(&word.to_ne_bytes(), (first + seat * size_of::<Seat>() + at) as u64).unwrap();
        };
        write(offset_of!(Seat, state), state);
        write(offset_of!(Seat, intents) + 8 * INTENT_RETIRE, blocks[0] + 32);
        write(offset_of!(Seat, limbo_high), strays.len() as u64);
        strays.iter().enumerate().for_each(|(index, &stray)| write(offset_of!(Seat, limbo) + index * 8, stray));
    }
    file.write_all_at(&2u64.to_ne_bytes(), offset_of!(layout::Header, seats_high) as u64).unwrap();
    let arena = Arena::open_alone(file, 0, Pages::Small).unwrap();
    recover_unlinked(&arena);
    arena.trim(&arena.seat().unwrap());
    let mut left = Vec::new();
    arena.each_block(|block| left.push(block));
    assert_eq!(left, blocks);
}

#[test]
fn another_layout_of_the_same_structure_is_another_version() {
    let kind = |name: &[u8; 8]| u64::from_le_bytes(*name);
    let (path, file) = temp("kinds");
    drop(Arena::create(file, &Options { kind: kind(b"kindly 3"), ..small() }).unwrap());
    let open = |name| Arena::open_path(&path.0, kind(name), Pages::Auto).map(drop);
    open(b"kindly 3").unwrap();
    assert!(matches!(open(b"kindly 4"), Err(Error::Version { found: 3, expected: 4 })));
    for name in [b"kindlz 3", b"kindly_4", b"kindly x", b"Kindly 4"] {
        assert!(matches!(open(name), Err(Error::Foreign)), "{name:?}");
    }
}

#[test]
fn pages_that_wait_go_when_their_handle_closes() {
    // Freed by the thread that closes, or by one that has ended by then.
    for elsewhere in [false, true] {
        let (path, file) = temp("closed");
        let arena = Arena::create(file, &Options { capacity_bytes: 512 << 20, ..small() }).unwrap();
        let used = || std::fs::metadata(&path.0).unwrap().blocks() * 512;
        let fill_and_free = || {
            let seat = arena.seat().unwrap();
            let blocks: Vec<u64> = (0..1000).map(|_| arena.alloc_log(&seat, 64 << 10, false).unwrap()).collect();
            seat.settle_alloc();
            blocks.iter().for_each(|&block| arena.free(&seat, block));
        };
        if elsewhere {
            std::thread::scope(|scope| scope.spawn(fill_and_free).join().unwrap());
        } else {
            fill_and_free();
        }
        let full = used();
        assert!(full > 60 << 20, "{full} bytes: given back at once");
        drop(arena);
        assert!(used() < full - (50 << 20), "{} of {full} bytes kept", used());
    }
}

#[test]
fn rests_of_huge_pages_go_back_when_a_thread_ends() {
    const BYTES: usize = 5 << 10;
    const COUNT: usize = (5 << 20) / 2 / BYTES;
    let options = Options { capacity_bytes: 256 << 20, pages: Pages::Transparent, ..Options::default() };
    let arena = Arena::private(&options).unwrap();
    if arena.stats().backing != Backing::Transparent {
        return println!("SKIPPED: no transparent huge pages here");
    }
    let start = arena.data_range().start;
    let present = || present_bytes(&arena, start, 16 << 20);
    let fill = |value: u8| -> Vec<u64> {
        let arena = arena.clone();
        let thread = std::thread::spawn(move || {
            let seat = arena.seat().unwrap();
            let take = |second| {
                arena.ready_log(&seat, BYTES);
                let block = arena.alloc_log(&seat, BYTES, second).unwrap();
                // SAFETY: the block is ours and so long.
                unsafe { arena.at(block).write_bytes(value, BYTES) };
                seat.settle_alloc();
                block
            };
            (0..COUNT).map(|turn| take(turn % 100 == 99)).collect()
        });
        thread.join().unwrap()
    };
    let is = |blocks: &[u64], value: u8| {
        // SAFETY: blocks of so many bytes, which nobody writes any more.
        blocks.iter().all(|&block| unsafe { std::slice::from_raw_parts(arena.at(block), BYTES) } == [value; BYTES])
    };
    let mut all = Vec::new();
    for value in 1..4 {
        let blocks = fill(value);
        all.push((blocks, value));
        // Each extent has a bitmap, and pages that it fills in part.
        let extents: HashSet<_> =
            all.iter().flat_map(|(blocks, _)| blocks.iter().map(|block| arena.log_of(*block).unwrap())).collect();
        let most = all.len() * COUNT * BYTES + extents.len() * (16 << 10);
        assert!(present() <= most, "{} bytes for {most}, {} extents", present(), extents.len());
        assert!(all.iter().all(|(blocks, value)| is(blocks, *value)));
    }
    // What is freed at the front of an extent goes as well.
    let seat = arena.seat().unwrap();
    let (before, extent) = (present(), arena.log_of(all[0].0[0]));
    let front = all[0].0.iter().take_while(|block| arena.log_of(**block) == extent).count() / 2;
    all[0].0.drain(..front).for_each(|block| arena.free(&seat, block));
    arena.trim(&seat);
    assert!(present() + front * BYTES <= before + (8 << 10), "{} bytes of {before} for {front} blocks less", present());
    assert!(all.iter().all(|(blocks, value)| is(blocks, *value)));
    all.iter().flat_map(|(blocks, _)| blocks).for_each(|block| arena.free(&seat, *block));
    arena.trim(&seat);
    assert_eq!((present(), arena.stats().spans.held_bytes), (0, 0));
}
