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
    let thread = arena.thread().unwrap();
    let mut live: BTreeMap<u64, usize> = BTreeMap::new();
    let mut random = fastrand::Rng::with_seed(7);
    for round in 0..20_000 {
        if live.len() > 400 || (round % 3 == 0 && !live.is_empty()) {
            let nth = random.usize(..live.len());
            let block = *live.keys().nth(nth).unwrap();
            live.remove(&block);
            arena.free(&thread, block);
            continue;
        }
        let size = match random.u8(..4) {
            0 => random.usize(1..=64),
            1 => random.usize(1..=5000),
            2 => 64 * random.usize(1..=40),
            _ if random.u8(..50) == 0 => random.usize(SPAN_BYTES..2 * SPAN_BYTES),
            _ => random.usize(1..=100_000.min(SMALL_BYTES_MAX)),
        };
        let block = arena.alloc(&thread, size).unwrap();
        assert!(arena.block_bytes(block) >= size as u64);
        assert!(block.is_multiple_of(16) && (!size.is_multiple_of(64) || block.is_multiple_of(64)));
        let below = live.range(..=block).next_back();
        assert!(below.is_none_or(|(start, bytes)| start + *bytes as u64 <= block));
        let above = live.range(block..).next();
        assert!(above.is_none_or(|(start, _)| block + size as u64 <= *start));
        live.insert(block, size);
        thread.settle_alloc();
    }
    let mut seen = HashSet::new();
    arena.each_block(|block| assert!(seen.insert(block)));
    assert_eq!(seen, live.keys().copied().collect());
    for block in live.into_keys() {
        arena.free(&thread, block);
    }
    let stats = arena.stats();
    assert_eq!(stats.spans.block_count, 0);
    assert_eq!(stats.spans.allocated_bytes, 0);
}

#[test]
fn the_limit_is_an_error_and_freeing_helps() {
    let arena = Arena::private(&Options { capacity_bytes: 4 * SPAN_BYTES as u64, ..small() }).unwrap();
    let thread = arena.thread().unwrap();
    let mut blocks = Vec::new();
    let error = loop {
        match arena.alloc(&thread, SMALL_BYTES_MAX) {
            Ok(block) => blocks.push(block),
            Err(error) => break error,
        }
    };
    assert!(matches!(error, Error::Full { limit_bytes } if limit_bytes == 4 * SPAN_BYTES as u64), "{error}");
    assert_eq!(blocks.len(), 8);
    assert!(matches!(arena.alloc(&thread, 4 * SPAN_BYTES), Err(Error::Full { .. })));
    for block in blocks.drain(..) {
        arena.free(&thread, block);
    }
    arena.thread().unwrap();
    // The thread still owns one span of the class; the others serve any size.
    let large = arena.alloc(&thread, 3 * SPAN_BYTES).unwrap();
    arena.free(&thread, large);
}

#[test]
fn free_ignores_offsets_without_a_block() {
    let arena = Arena::private(&small()).unwrap();
    let thread = arena.thread().unwrap();
    let blocks: Vec<u64> =
        [64, 100, 5000, 60_000, 5 * SPAN_BYTES].map(|size| arena.alloc(&thread, size).unwrap()).into();
    thread.settle_alloc();
    let range = arena.data_range();
    let spans = (range.start..range.end).step_by(SPAN_BYTES);
    let wrong = spans.chain(blocks.iter().flat_map(|block| [block + 1, block + 16, block + (1 << 16)]));
    let wrong = wrong.chain([0, 8, range.start - 16, range.end, u64::MAX]).filter(|offset| !blocks.contains(offset));
    let freed = wrong.filter(|&offset| {
        // Debug builds say what is wrong.
        let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| arena.free(&thread, offset)));
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
        for number in 0..3u64 {
            let (arena, sender) = (&arena, sender.clone());
            threads.push(scope.spawn(move || {
                let thread = arena.thread().unwrap();
                for round in 0..20_000u64 {
                    let block = arena.alloc(&thread, 16 + (round % 20) as usize * 16).unwrap();
                    let word = arena.inner.word(block);
                    word.store(number << 32 | round, Ordering::Relaxed);
                    thread.settle_alloc();
                    sender.send(block).unwrap();
                }
            }));
        }
        drop(sender);
        let thread = arena.thread().unwrap();
        let mut held = HashSet::new();
        for block in receiver {
            assert!(held.insert(block), "given out twice");
            if held.len() > 5000 {
                for block in held.drain() {
                    arena.free(&thread, block);
                }
            }
        }
        for block in held.drain() {
            arena.free(&thread, block);
        }
        // Joining waits for the end of the thread itself, where its record is released.
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    });
    // The threads have ended, so they own no spans any more.
    assert_eq!(arena.stats().spans.block_count, 0);
    assert!(arena.stats().thread_count <= 1);
}

#[test]
fn freed_memory_goes_back_to_the_system() {
    let arena = Arena::private(&Options { capacity_bytes: 512 << 20, ..small() }).unwrap();
    let thread = arena.thread().unwrap();
    let blocks: Vec<u64> = (0..2000)
        .map(|_| {
            let block = arena.alloc(&thread, 60_000).unwrap();
            // SAFETY: the block has 60,000 bytes.
            unsafe { std::ptr::write_bytes(arena.at(block), 1, 60_000) };
            block
        })
        .collect();
    let resident = |arena: &Arena| -> u64 {
        let range = arena.data_range();
        let pages = (range.end - range.start) as usize / 4096;
        let mut present = vec![0u8; pages];
        // SAFETY: mincore reads no memory of the mapping and writes one byte per page into the vector, which has that many.
        let done = unsafe {
            libc::mincore(arena.at(range.start).cast(), (range.end - range.start) as usize, present.as_mut_ptr())
        };
        assert_eq!(done, 0);
        present.iter().filter(|&&page| page & 1 == 1).count() as u64 * 4096
    };
    let full = resident(&arena);
    assert!(full >= 2000 * 60_000 / 10 * 9, "{full}");
    for block in blocks {
        arena.free(&thread, block);
    }
    arena.trim(&thread);
    let empty = resident(&arena);
    assert!(empty < full / 20, "{empty} of {full} bytes still present");
}

#[test]
fn a_thread_can_register_until_it_has_ended() {
    struct Last(Arena, std::sync::mpsc::Sender<Result<(), Error>>);
    impl Drop for Last {
        fn drop(&mut self) {
            let used = self.0.thread().and_then(|thread| {
                let block = self.0.alloc(&thread, 100)?;
                thread.settle_alloc();
                self.0.free(&thread, block);
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
            // Thread-locals are destroyed in the opposite order of their first use: this one after the thread's records.
            LAST.with(|last| assert!(last.set(Last(arena.clone(), sender)).is_ok()));
            arena.thread().unwrap();
        })
        .join()
        .unwrap();
        receiver.recv().unwrap().unwrap();
    }
    assert_eq!(arena.stats().thread_count, 0, "released after all that");
}

#[test]
fn a_hazard_keeps_a_retired_block() {
    let arena = Arena::private(&small()).unwrap();
    let thread = arena.thread().unwrap();
    let block = arena.alloc(&thread, 64).unwrap();
    thread.settle_alloc();
    let (told, tell) = (std::sync::Barrier::new(2), std::sync::Barrier::new(2));
    std::thread::scope(|scope| {
        let (told, tell, arena) = (&told, &tell, &arena);
        scope.spawn(move || {
            let thread = arena.thread().unwrap();
            let index = thread.hazard_free().unwrap();
            thread.hazard_set(index, block);
            told.wait();
            tell.wait();
            thread.hazard_clear(index);
            told.wait();
            tell.wait();
        });
        told.wait();
        thread.intend_retire(block);
        arena.retire(&thread, block);
        arena.collect(&thread);
        assert!(arena.is_allocated(block), "freed under a guard");
        tell.wait();
        told.wait();
        arena.collect(&thread);
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
    let thread = one.thread().unwrap();
    let block = one.alloc(&thread, 100).unwrap();
    thread.settle_alloc();
    one.inner.word(block).store(77, Ordering::Relaxed);
    let two = Arena::open_path(&path.0, 5, Pages::Auto).unwrap();
    assert_eq!(two.inner.word(block).load(Ordering::Relaxed), 77);
    let other = two.thread().unwrap();
    assert_ne!(other.owner(), one.thread().unwrap().owner());
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
fn a_forked_child_is_detected() {
    child_is_told();
}

#[test]
fn a_forked_child_is_detected_without_wipe_on_fork() {
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
    let _ = arena.thread().unwrap();
    // SAFETY: the child only reads memory and ends with _exit.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let refused = arena.is_forked() && matches!(arena.thread(), Err(Error::Forked));
        // SAFETY: _exit ends the child without running destructors of the parent's threads.
        unsafe { libc::_exit(if refused { 0 } else { 1 }) };
    }
    let mut status = 0;
    // SAFETY: waitpid writes only the status; the child was just forked.
    unsafe { libc::waitpid(child, &raw mut status, 0) };
    assert_eq!(status, 0);
    assert!(!arena.is_forked());
}

/// Filter result that lets a call fail with `number`.
fn errno(number: i32) -> u32 {
    libc::SECCOMP_RET_ERRNO | number as u32
}

/// Installs a filter for this thread: the kernel does `what` (`SECCOMP_RET_`...) at calls numbered `call` if the low half of
/// their argument `argument` passes `test` against `value`.
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
        let thread = arena.thread().unwrap();
        let block = arena.alloc(&thread, 5 * SPAN_BYTES).unwrap();
        arena.free(&thread, block);
    })
    .join()
    .unwrap();
}

/// Such as systemd's `SystemCallFilter=@system-service`, which has all other calls of an arena.
#[test]
fn a_service_seccomp_filter_kills_no_caller() {
    // SAFETY: the child makes an arena of its own and ends with _exit.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let filtered = refuse_calls(libc::SYS_mincore, libc::SECCOMP_RET_KILL_PROCESS, 0, libc::BPF_JGE, 0);
        let code = filtered.map_or(2, |()| {
            let (_path, file) = temp("filtered");
            let arena = Arena::create(file, &Options { pages: Pages::Auto, ..small() }).unwrap();
            let thread = arena.thread().unwrap();
            i32::from(arena.alloc(&thread, 100).is_err())
        });
        // SAFETY: _exit ends the child without running destructors of the parent's threads.
        unsafe { libc::_exit(code) };
    }
    let mut status = 0;
    // SAFETY: waitpid writes only the status; the child was just forked.
    unsafe { libc::waitpid(child, &raw mut status, 0) };
    if status == 2 << 8 {
        println!("SKIPPED: no seccomp filter here");
    } else {
        assert_eq!(status, 0);
    }
}

#[test]
fn free_spans_with_pages_are_used_when_no_page_is_left() {
    std::thread::spawn(|| {
        let (_path, file) = temp("no-pages");
        let arena = Arena::create(file, &small()).unwrap();
        let thread = arena.thread().unwrap();
        let (holes, kept) = (arena.alloc(&thread, 4 << 20).unwrap(), arena.alloc(&thread, 4 * SPAN_BYTES).unwrap());
        let blocked = arena.alloc(&thread, 33 * SPAN_BYTES).unwrap();
        arena.free(&thread, holes);
        arena.trim(&thread);
        arena.free(&thread, kept);
        // The first free spans are holes, those after them have pages: these need no pages again.
        if let Err(error) = refuse_calls(libc::SYS_fallocate, errno(libc::ENOSPC), 3, libc::BPF_JGE, 0) {
            println!("SKIPPED: no seccomp filter here: {error}");
            return;
        }
        assert_eq!(arena.stats().spans.kept_bytes, 4 * SPAN_BYTES as u64);
        let inside = |block: u64| (kept..kept + 4 * SPAN_BYTES as u64).contains(&block);
        let array = arena.alloc_log(&thread, 1024, false).unwrap();
        let large = arena.alloc(&thread, 2 * SPAN_BYTES).unwrap();
        let record = arena.alloc(&thread, 1000).unwrap();
        assert!([array, large, record].map(inside) == [true; 3]);
        let none = arena.alloc(&thread, 2 * SPAN_BYTES);
        assert!(matches!(none, Err(Error::NoMemory { .. })), "{none:?}");
        // No further extent either: the next array lies in the existing one.
        while arena.alloc(&thread, SPAN_BYTES).is_ok() {}
        arena.inner.disown_all(&thread, thread.owner);
        assert_eq!(arena.log_of(arena.alloc_log(&thread, 4096, true).unwrap()), arena.log_of(array));
        arena.free(&thread, blocked);
    })
    .join()
    .unwrap();
}

#[test]
fn spare_records_have_pages() {
    let (path, file) = temp("records");
    let arena = Arena::create(file, &small()).unwrap();
    let used = || std::fs::metadata(&path.0).unwrap().blocks() * 512;
    let created = used();
    if created.is_multiple_of(2 << 20) {
        println!("SKIPPED: /dev/shm gives huge pages, which hold many records");
        return;
    }
    let taken: Vec<_> = (0..6).map(|_| arena.inner.register().unwrap()).collect();
    assert_eq!(taken, [1, 2, 3, 4, 5, 6]);
    // Pages exist for those six records and the spare ones; the first four got theirs at creation, and pages are not
    // records.
    assert!(used() >= created + 5 * thread_record::record_bytes(6) as u64, "{created} bytes became {}", used());
}

#[test]
fn a_reused_descriptor_proves_no_death() {
    use std::os::fd::AsRawFd;
    let (path, file) = temp("closed");
    let one = Arena::create(file, &Options { kind: 5, ..small() }).unwrap();
    let state = Identity::new(1, 0).registered();
    let file = one.inner.map.file().unwrap();
    assert!(liveness::is_unlocked(file, one.inner.map.inode(), 1), "init uses no file of ours");
    assert!(!one.inner.may_live(state), "nor began it with the clock");
    // Another file takes the descriptor's number: its locks prove nothing.
    let other = File::open("/dev/null").unwrap();
    let kept = file.try_clone().unwrap();
    // SAFETY: dup2 puts another file in the place of ours for a moment; no other thread uses that number.
    assert!(unsafe { libc::dup2(other.as_raw_fd(), file.as_raw_fd()) } >= 0);
    assert!(!liveness::is_unlocked(file, one.inner.map.inode(), 1));
    // SAFETY: dup2 puts the first file back; no other thread uses that number.
    assert!(unsafe { libc::dup2(kept.as_raw_fd(), file.as_raw_fd()) } >= 0);
    assert!(liveness::is_unlocked(file, one.inner.map.inode(), 1));
    drop(path);
}

#[test]
fn a_reused_descriptor_is_not_closed() {
    use std::os::fd::{AsRawFd, FromRawFd};
    let (_path, file) = temp("not-ours");
    let arena = Arena::create(file, &small()).unwrap();
    let number = arena.inner.map.file().unwrap().as_raw_fd();
    let other = File::open("/dev/null").unwrap();
    // SAFETY: dup2 puts another file in the place of ours; no other thread uses that number.
    assert!(unsafe { libc::dup2(other.as_raw_fd(), number) } >= 0);
    drop(arena);
    // SAFETY: no other `File` owns the number: the arena leaves a foreign file alone.
    let taken = unsafe { File::from_raw_fd(number) };
    assert_eq!(liveness::inode_of(&taken).unwrap(), liveness::inode_of(&other).unwrap());
}

#[test]
fn a_file_with_the_reused_descriptor_is_left_alone() {
    use std::os::fd::AsRawFd;
    let (path, file) = temp("foreign");
    let arena = Arena::create(file, &small()).unwrap();
    let thread = arena.thread().unwrap();
    let block = arena.alloc(&thread, 16 << 20).unwrap();
    thread.settle_alloc();
    let (other_path, other) = temp("foreign-other");
    let bytes = vec![7; arena.data_range().end as usize];
    std::fs::write(&other_path.0, &bytes).unwrap();
    let file = arena.inner.map.file().unwrap();
    let kept = file.try_clone().unwrap();
    let used = || std::fs::metadata(&path.0).unwrap().blocks() * 512;
    let full = used();
    // SAFETY: dup2 puts another file in the place of ours for a while; no other thread uses that number.
    assert!(unsafe { libc::dup2(other.as_raw_fd(), file.as_raw_fd()) } >= 0);
    arena.free(&thread, block);
    arena.trim(&thread);
    let refused = arena.alloc(&thread, 32 << 20);
    // SAFETY: dup2 puts the first file back; no other thread uses that number.
    assert!(unsafe { libc::dup2(kept.as_raw_fd(), file.as_raw_fd()) } >= 0);
    assert!(std::fs::read(&other_path.0).unwrap() == bytes, "another file was changed");
    assert!(matches!(refused, Err(Error::Io(_))), "{refused:?}");
    assert!(used() + (14 << 20) < full, "pages are given back without the descriptor");
    arena.alloc(&thread, 32 << 20).unwrap();
}

#[test]
fn spans_skipped_by_extents_are_used_before_the_limit() {
    let arena = Arena::private(&Options { capacity_bytes: 256 << 20, ..small() }).unwrap();
    let thread = arena.thread().unwrap();
    let mut bytes = 0;
    // Extents are aligned, and because of small blocks between them none begins where the last one ended.
    'full: loop {
        for _ in 0..1000 {
            match arena.alloc(&thread, 1024) {
                Ok(_) => bytes += 1024,
                Err(error) => break 'full assert!(matches!(error, Error::Full { .. }), "{error}"),
            }
        }
        for _ in 0..8 {
            bytes += arena.alloc_log(&thread, 1 << 20, false).map_or(0, |_| 1 << 20);
        }
    }
    let held = arena.stats().spans.held_bytes;
    assert_eq!(held, 256 << 20, "full with {} MiB of 256 in blocks", bytes >> 20);
}

#[test]
fn extents_of_ended_threads_are_filled_further() {
    let arena = Arena::private(&small()).unwrap();
    let count = 2 * (64 << 20) / SPAN_BYTES;
    for second in [false, true] {
        for _ in 0..count {
            let one = || {
                let thread = arena.thread().unwrap();
                arena.alloc_log(&thread, 64, second).unwrap();
                thread.settle_alloc();
            };
            // Joining waits for the end of the thread itself, where its record is released.
            std::thread::scope(|scope| scope.spawn(one).join().unwrap());
        }
    }
    let thread = arena.thread().unwrap();
    arena.alloc(&thread, 1000).unwrap();
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
        // All threads live until the last one has its block.
        let held = end.lock();
        for _ in 0..count {
            let (arena, end, sender) = (&arena, &end, sender.clone());
            let work = move || {
                let thread = arena.thread().unwrap();
                sender.send([false, true].map(|second| arena.alloc_log(&thread, 64, second).ok())).unwrap();
                thread.settle_alloc();
                drop(end.lock());
            };
            std::thread::Builder::new().stack_size(256 << 10).spawn_scoped(scope, work).unwrap();
            // One after the other: a thread stopped while it owns an extent keeps it.
            let blocks = receiver.recv().unwrap();
            assert!(blocks.iter().all(Option::is_some), "{blocks:?}");
        }
        drop(held);
    });
    let thread = arena.thread().unwrap();
    arena.alloc(&thread, 64 * SPAN_BYTES).unwrap();
}

/// Returns how many of the `bytes` from `block` on lie on present pages.
fn present_bytes(arena: &Arena, block: u64, bytes: usize) -> usize {
    let start = block & !4095;
    let mut present = vec![0u8; (block as usize + bytes).div_ceil(4096) - start as usize / 4096];
    // SAFETY: mincore reads no memory of the mapping and writes one byte per page into the vector, which has that many.
    let done = unsafe { libc::mincore(arena.at(start).cast(), present.len() * 4096, present.as_mut_ptr()) };
    assert_eq!(done, 0);
    present.iter().filter(|&&page| page & 1 == 1).count() * 4096
}

#[test]
fn a_prepared_array_has_its_pages() {
    const BYTES: usize = 40 << 10;
    for pages in [Pages::Small, Pages::Transparent] {
        let arena = Arena::private(&Options { capacity_bytes: 256 << 20, pages, ..Options::default() }).unwrap();
        let thread = arena.thread().unwrap();
        let mut extents = std::collections::BTreeSet::new();
        // Arrays of several extents, and of all places in one.
        for turn in 0..100 {
            arena.ready_log(&thread, BYTES);
            let block = arena.alloc_log(&thread, BYTES, false).unwrap();
            thread.settle_alloc();
            assert!(present_bytes(&arena, block, BYTES) >= BYTES, "array {turn}, {pages:?}");
            extents.insert(arena.log_of(block).unwrap());
        }
        assert!(extents.len() > 3, "{extents:?}");
        let all: usize = extents.iter().map(|(extent, _)| present_bytes(&arena, *extent, SPAN_BYTES)).sum();
        assert!(pages != Pages::Small || all <= 101 * BYTES + extents.len() * 3 * 4096, "{all} bytes for 100 arrays");
    }
}

#[test]
fn a_prepared_array_that_is_never_allocated_is_not_lost() {
    let arena = Arena::private(&small()).unwrap();
    let thread = arena.thread().unwrap();
    while let Ok(_block) = arena.alloc(&thread, SPAN_BYTES) {}
    thread.settle_alloc();
    // No extent is available, and none is kept.
    arena.ready_log(&thread, 4096);
    assert_eq!(arena.log_room(&thread, false), 0);
    // Above what lies in extents.
    arena.ready_log(&thread, 64 * SPAN_BYTES);
}

#[test]
fn space_left_in_extents_is_used_before_the_limit() {
    let arena = Arena::private(&small()).unwrap();
    let thread = arena.thread().unwrap();
    // Extents of both logs, each with one block, and no free span but those.
    let logs: Vec<u64> = [(64, true), (4 * SPAN_BYTES / 16, true), (64, false)]
        .map(|(size, second)| {
            let block = arena.alloc_log(&thread, size, second).unwrap();
            arena.inner.disown_all(&thread, thread.owner);
            block
        })
        .into();
    let full = std::iter::from_fn(|| arena.alloc(&thread, SPAN_BYTES).ok()).map(|block| (block, SPAN_BYTES as u64));
    let mut blocks: Vec<(u64, u64)> = full.collect();
    let count = blocks.len();
    while let Ok(block) = arena.alloc_log(&thread, SPAN_BYTES / 4, false) {
        blocks.push((block, SPAN_BYTES as u64 / 4));
    }
    assert!(blocks.len() > count + 4, "{} arrays", blocks.len() - count);
    let count = blocks.len();
    while let Ok(block) = arena.alloc(&thread, 300) {
        assert!(arena.is_allocated(block));
        blocks.push((block, 300));
    }
    thread.settle_alloc();
    assert!(blocks.len() > count + 100, "{} records", blocks.len() - count);
    blocks.extend(logs.iter().map(|&block| (block, 64)));
    blocks.sort_unstable();
    assert!(blocks.windows(2).all(|pair| pair[0].0 + pair[0].1 <= pair[1].0), "two blocks in one place");
    blocks.iter().for_each(|&(block, _)| arena.free(&thread, block));
    arena.trim(&thread);
    arena.alloc(&thread, 64 << 20).unwrap();
}

/// Recovers every dead thread; none of their blocks were linked.
#[cfg(any(debug_assertions, pagefold_stress))]
fn recover_unlinked(arena: &Arena) {
    for owner in arena.dead_threads() {
        if let Some(dead) = arena.begin_recovery(owner) {
            arena.recover_alloc(&dead);
            arena.recover_retire(&dead);
            arena.end_recovery(dead);
        }
    }
}

#[test]
#[cfg(any(debug_assertions, pagefold_stress))]
fn spans_claimed_by_a_dead_thread_are_freed() {
    // Spans claimed, pages secured, heads written, rests written: a death at each stage of a block of many spans.
    let spans = 100;
    for point in [1, 2, 3, 10, 50, 99, 100, 101, 102, 103, 150, 199, 200] {
        let (path, file) = temp("claimed");
        let arena = Arena::create(file, &small()).unwrap();
        let thread = arena.thread().unwrap();
        let used = || std::fs::metadata(&path.0).unwrap().blocks() * 512;
        let empty = used();
        assert!(fault::dies(point, || {
            let arena = Arena::open_path(&path.0, 0, Pages::Auto).unwrap();
            let thread = arena.thread().unwrap();
            let _ = arena.alloc(&thread, spans * SPAN_BYTES);
        }));
        recover_unlinked(&arena);
        arena.trim(&thread);
        let stats = arena.stats().spans;
        assert_eq!((stats.block_count, stats.held_bytes), (0, 0), "death at point {point}");
        // A record and a page or two of bookkeeping.
        assert!(used() < empty + (1 << 20), "death at point {point}: {empty} to {} bytes in an empty arena", used());
        let whole = arena.alloc(&thread, 64 << 20);
        assert!(whole.is_ok(), "death at point {point}: {whole:?}");
        thread.settle_alloc();
    }
}

#[test]
#[cfg(any(debug_assertions, pagefold_stress))]
fn what_a_dead_recoverer_freed_is_not_freed_again() {
    let (path, file) = temp("freed");
    let arena = Arena::create(file, &small()).unwrap();
    let thread = arena.thread().unwrap();
    let large = || arena.alloc(&thread, 4 * SPAN_BYTES).unwrap();
    for point in 1.. {
        // A process allocates a large block and dies before it links it; the recovering process dies too.
        let taken = fault::dies(0, || {
            let arena = Arena::open_path(&path.0, 0, Pages::Auto).unwrap();
            let _ = arena.alloc(&arena.thread().unwrap(), 4 * SPAN_BYTES);
            // SAFETY: ends this process, which still owns its record.
            unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
        });
        assert!(taken);
        let died = fault::dies(point, || recover_unlinked(&Arena::open_path(&path.0, 0, Pages::Auto).unwrap()));
        // Others go on before anybody notices.
        let ours = [large(), large()];
        thread.settle_alloc();
        recover_unlinked(&arena);
        assert!(ours.iter().all(|&block| arena.is_allocated(block)), "recoverer's death at point {point}");
        // An audit finds what the two deaths lost.
        let mut all = Vec::new();
        arena.each_block(|block| all.push(block));
        assert!(all.len() <= 3, "{all:?}");
        all.into_iter().for_each(|block| arena.free(&thread, block));
        if !died {
            break;
        }
    }
}

#[test]
#[cfg(any(debug_assertions, pagefold_stress))]
fn spans_of_a_block_being_freed_at_a_death_are_freed() {
    for point in 1.. {
        let (path, file) = temp("freeing");
        let arena = Arena::create(file, &small()).unwrap();
        let thread = arena.thread().unwrap();
        let died = fault::dies(0, || {
            let arena = Arena::open_path(&path.0, 0, Pages::Auto).unwrap();
            let thread = arena.thread().unwrap();
            let block = arena.alloc(&thread, 5 * SPAN_BYTES).unwrap();
            thread.settle_alloc();
            fault::arm(point);
            arena.free(&thread, block);
            // SAFETY: _exit ends the child without running destructors of the parent's threads.
            unsafe { libc::_exit(0) };
        });
        recover_unlinked(&arena);
        assert_eq!(arena.orphan_bytes(), 0, "death at point {point}");
        // A death before the block got shorter leaves it to the audit.
        let mut lost = Vec::new();
        arena.each_block(|block| lost.push(block));
        assert!(lost.len() <= 1);
        lost.into_iter().for_each(|block| arena.free(&thread, block));
        let whole = arena.alloc(&thread, 64 << 20);
        assert!(whole.is_ok(), "death at point {point}: {whole:?}");
        if !died {
            assert!(point > 8, "{point}");
            break;
        }
    }
}

#[test]
#[cfg(any(debug_assertions, pagefold_stress))]
fn an_empty_span_without_a_hint_is_freed_again() {
    for (point, audit) in (1..).flat_map(|point| [(point, true), (point, false)]) {
        let (path, file) = temp("unhinted");
        let arena = Arena::create(file, &small()).unwrap();
        let thread = arena.thread().unwrap();
        // The process that frees the only block of an unowned span dies.
        let block = arena.alloc(&thread, 1000).unwrap();
        thread.settle_alloc();
        arena.inner.disown_all(&thread, thread.owner);
        // Until then other threads that looked for room have seen no hint.
        let (hints, bytes) = arena.inner.layout.hints_of(0);
        (hints..hints + bytes).step_by(8).for_each(|word| arena.inner.word(word as u64).store(0, Ordering::Relaxed));
        let died = fault::dies(0, || {
            let arena = Arena::open_path(&path.0, 0, Pages::Auto).unwrap();
            let thread = arena.thread().unwrap();
            fault::arm(point);
            arena.free(&thread, block);
            // SAFETY: _exit ends the child without running destructors of the parent's threads.
            unsafe { libc::_exit(0) };
        });
        recover_unlinked(&arena);
        // The span is found by a thread that opens the arena alone, and by one that finds no room.
        if audit {
            arena.release_lost(&thread);
        }
        let whole = arena.alloc(&thread, 64 << 20);
        assert!(whole.is_ok(), "death at point {point}: {whole:?}");
        if !died && !audit {
            break;
        }
    }
}

#[test]
#[cfg(any(debug_assertions, pagefold_stress))]
fn extents_of_a_dead_thread_are_filled_further() {
    // The extent was left by another thread, or made by the dying one; and the recovering process may die too.
    for (idle, recoverer) in [(true, 0), (true, 2), (true, 5), (false, 0), (false, 4)] {
        for point in 1.. {
            let (path, file) = temp("filling");
            let arena = Arena::create(file, &small()).unwrap();
            let thread = arena.thread().unwrap();
            // An extent's length in an arena of this size.
            let size = 8 * SPAN_BYTES / 16;
            let mut ours = Vec::new();
            let mut fill = |count: usize| {
                for _ in 0..count {
                    ours.push(arena.alloc_log(&thread, size, false).unwrap());
                    thread.settle_alloc();
                }
                arena.inner.disown_all(&thread, thread.owner);
                ours.clone()
            };
            fill(usize::from(idle));
            let died = fault::dies(0, || {
                let arena = Arena::open_path(&path.0, 0, Pages::Auto).unwrap();
                let thread = arena.thread().unwrap();
                fault::arm(point);
                let _ = arena.alloc_log(&thread, size, false);
                thread.settle_alloc();
                arena.inner.deregister(thread.owner, Some(Instant::now()));
                // SAFETY: _exit ends the child without running destructors of the parent's threads.
                unsafe { libc::_exit(0) };
            });
            if recoverer > 0 {
                fault::dies(recoverer, || recover_unlinked(&Arena::open_path(&path.0, 0, Pages::Auto).unwrap()));
            }
            recover_unlinked(&arena);
            assert_eq!(arena.orphan_bytes(), 0, "death at point {point}");
            let ours = fill(5);
            let distinct: HashSet<&u64> = ours.iter().collect();
            assert_eq!(distinct.len(), ours.len(), "death at point {point}, of the recovery at {recoverer}");
            assert!(ours.iter().all(|&block| arena.is_allocated(block)));
            let extents: HashSet<_> = ours.iter().map(|&block| arena.log_of(block).unwrap()).collect();
            // A death right before the hint hides one until there is no other.
            assert!(extents.len() <= 2, "death at point {point}, of the recovery at {recoverer}");
            let mut lost = Vec::new();
            arena.each_block(|block| lost.push(block));
            assert!(lost.len() <= ours.len() + 1, "death at point {point}");
            lost.into_iter().for_each(|block| arena.free(&thread, block));
            let whole = arena.alloc(&thread, 64 << 20);
            assert!(whole.is_ok(), "death at point {point}, of the recovery at {recoverer}: {whole:?}");
            if !died {
                assert!(point > 3, "{point}");
                break;
            }
        }
    }
}

#[test]
#[cfg(any(debug_assertions, pagefold_stress))]
fn spans_hidden_by_a_death_are_used_before_the_limit() {
    // A class has slabs in an arena that is nearly empty, and whole spans where many are in use.
    for (used, hidden_min) in [(0, 0), (16, 2)] {
        hide_spans(used, hidden_min);
    }
}

#[cfg(any(debug_assertions, pagefold_stress))]
fn hide_spans(used: usize, hidden_min: u32) {
    let mut hidden = 0;
    for point in 1.. {
        let (path, file) = temp("hidden");
        let arena = Arena::create(file, &small()).unwrap();
        let thread = arena.thread().unwrap();
        if used > 0 {
            arena.alloc(&thread, used * SPAN_BYTES).unwrap();
            assert!((0..SPAN_BYTES / 1000).all(|_| arena.alloc(&thread, 1000).is_ok()));
        }
        let block = arena.alloc(&thread, 1000).unwrap();
        thread.settle_alloc();
        arena.inner.disown_all(&thread, thread.owner);
        let died = fault::dies(0, || {
            let arena = Arena::open_path(&path.0, 0, Pages::Auto).unwrap();
            let thread = arena.thread().unwrap();
            fault::arm(point);
            arena.alloc(&thread, 1000).unwrap();
            thread.settle_alloc();
            arena.inner.deregister(thread.owner, Some(Instant::now()));
            // SAFETY: _exit ends the child without running destructors of the parent's threads.
            unsafe { libc::_exit(0) };
        });
        recover_unlinked(&arena);
        let hint = arena.inner.layout.hint(class_of(1000), 0);
        hidden += u32::from(arena.inner.word(hint as u64).load(Ordering::Relaxed) == 0);
        while arena.alloc(&thread, SPAN_BYTES).is_ok() {}
        let more = arena.alloc(&thread, 1000);
        assert!(
            more.as_ref().is_ok_and(|more| more.abs_diff(block) < SPAN_BYTES as u64),
            "death at point {point}: {more:?}"
        );
        if !died {
            break;
        }
    }
    assert!(hidden >= hidden_min, "{hidden} spans were hidden");
}

#[test]
#[cfg(any(debug_assertions, pagefold_stress))]
fn a_death_is_audited_once() {
    let (path, file) = temp("audited");
    let arena = Arena::create(file, &small()).unwrap();
    let thread = arena.thread().unwrap();
    for _ in 0..2 {
        assert!(arena.is_audited());
        assert!(fault::dies(2, || {
            let arena = Arena::open_path(&path.0, 0, Pages::Auto).unwrap();
            let _ = arena.alloc(&arena.thread().unwrap(), 1000);
        }));
        recover_unlinked(&arena);
        assert!(!arena.is_audited());
        arena.release_lost(&thread);
    }
}

#[test]
fn an_orphaned_tail_of_a_block_is_found() {
    let arena = Arena::private(&small()).unwrap();
    let thread = arena.thread().unwrap();
    let block = arena.alloc(&thread, 5 * SPAN_BYTES).unwrap();
    thread.settle_alloc();
    arena.inner.orphan_tail(block);
    assert_eq!(arena.orphan_bytes(), SPAN_BYTES as u64);
    arena.release_lost(&thread);
    assert_eq!(arena.orphan_bytes(), 0);
    arena.free(&thread, block);
    arena.alloc(&thread, 64 << 20).unwrap();
}

#[test]
fn holes_that_were_filled_again_are_trimmed() {
    let (path, file) = temp("holes");
    let arena = Arena::create(file, &small()).unwrap();
    let thread = arena.thread().unwrap();
    let block = arena.alloc(&thread, 32 << 20).unwrap();
    thread.settle_alloc();
    let used = || std::fs::metadata(&path.0).unwrap().blocks() * 512;
    let full = used();
    arena.free(&thread, block);
    arena.trim(&thread);
    let empty = used();
    assert!(empty + (30 << 20) < full, "{empty} of {full} bytes");
    // A late reader: each page that it touches is there again.
    for at in (block..block + (32 << 20)).step_by(4096) {
        arena.inner.word(at).load(Ordering::Relaxed);
    }
    assert!(used() > empty + (30 << 20), "on this file system holes stay holes when they are read");
    arena.trim(&thread);
    assert_eq!(used(), empty);
    assert_eq!(arena.stats().spans.held_bytes, 0);
}

#[test]
fn pages_of_freed_extents_stay_a_while() {
    let (path, file) = temp("late");
    let arena = Arena::create(file, &Options { capacity_bytes: 512 << 20, ..small() }).unwrap();
    let thread = arena.thread().unwrap();
    let used = || std::fs::metadata(&path.0).unwrap().blocks() * 512;
    let fill = || -> Vec<u64> {
        let blocks = (0..1000).map(|_| arena.alloc_log(&thread, 64 << 10, false).unwrap());
        let blocks = blocks.inspect(|&block| arena.inner.word(block).store(7, Ordering::Relaxed)).collect();
        thread.settle_alloc();
        blocks
    };
    let blocks = fill();
    let full = used();
    blocks.iter().for_each(|&block| arena.free(&thread, block));
    assert_eq!(used(), full, "given back immediately");
    assert_eq!(arena.inner.word(blocks[0]).load(Ordering::Relaxed), 7);
    let day = std::time::Duration::from_secs(86_400);
    arena.inner.give_back_deferred(Some(Instant::now() + day), thread.owner);
    assert!(used() < full - (50 << 20), "{} of {full} bytes kept", used());
    // What serves again meanwhile is not given back; `trim` waits for nothing.
    fill().iter().for_each(|&block| arena.free(&thread, block));
    let blocks = fill();
    arena.inner.give_back_deferred(Some(Instant::now() + day), thread.owner);
    assert!(blocks.iter().all(|&block| arena.inner.word(block).load(Ordering::Relaxed) == 7));
    blocks.iter().for_each(|&block| arena.free(&thread, block));
    arena.trim(&thread);
    assert_eq!(arena.stats().spans.held_bytes, 0);
}

#[test]
fn an_impossible_table_is_refused_when_opened_alone() {
    let word = |state: u64, class: usize, spans: u64| state | (class as u64) << 8 | spans << 32;
    let cases = [
        ("no state", word(9, 0, 0)),
        ("a free span of many", word(1, 0, 2)),
        ("a class that is none", word(3, CLASS_COUNT, 0)),
        ("blocks of class 0", word(3, 0, 0)),
        ("small blocks in an extent", word(3, 5, 2)),
        ("an extent of nothing", word(3, CLASS_COUNT - 1, 0)),
        ("an extent too long", word(3, CLASS_COUNT - 1, 1 << 20)),
        ("a large block beyond the end", word(4, 0, u64::from(u32::MAX) / 2)),
        ("a split span of many", word(6, 0, 2)),
    ];
    for (what, meta) in cases {
        let (path, file) = temp("table");
        let arena = Arena::create(file, &small()).unwrap();
        // The table has pages where a span was ever claimed.
        let thread = arena.thread().unwrap();
        arena.free(&thread, arena.alloc(&thread, SPAN_BYTES).unwrap());
        arena.inner.damage(100, meta);
        drop(arena);
        let file = File::options().read(true).write(true).open(&path.0).unwrap();
        let opened = Arena::open_alone(file, 0, Pages::Small);
        assert!(matches!(opened, Err(Error::Damaged(_))), "{what}");
    }
}

#[test]
#[cfg(any(debug_assertions, pagefold_stress))]
fn damaged_retired_entries_are_not_freed() {
    use std::mem::offset_of;
    use std::os::unix::fs::FileExt;
    let (path, file) = temp("strays");
    let arena = Arena::create(file, &small()).unwrap();
    let blocks: Vec<u64> =
        [100, 5 * SPAN_BYTES].map(|size| arena.alloc(&arena.thread().unwrap(), size).unwrap()).into();
    arena.thread().unwrap().settle_alloc();
    let (range, first) = (arena.data_range(), arena.inner.layout.records);
    drop(arena);
    // Two records, one of a dead process and one without an owner.
    let file = File::options().read(true).write(true).open(&path.0).unwrap();
    let strays = [8, blocks[0] + 16, blocks[1] + SPAN_BYTES as u64, range.start + (32 << 20), range.end, u64::MAX];
    for (thread, state) in [(0, Identity::new(1, 0).registered()), (1, 0)] {
        let write = |at: usize, word: u64| {
            file.write_all_at(&word.to_ne_bytes(), (first + thread * size_of::<ThreadRecord>() + at) as u64).unwrap();
        };
        write(offset_of!(ThreadRecord, state), state);
        write(offset_of!(ThreadRecord, intents) + 8 * INTENT_RETIRE, blocks[0] + 32);
        write(offset_of!(ThreadRecord, retired_high), strays.len() as u64);
        strays
            .iter()
            .enumerate()
            .for_each(|(index, &stray)| write(offset_of!(ThreadRecord, retired) + index * 8, stray));
    }
    file.write_all_at(&2u64.to_ne_bytes(), offset_of!(layout::Header, records_high) as u64).unwrap();
    let arena = Arena::open_alone(file, 0, Pages::Small).unwrap();
    recover_unlinked(&arena);
    arena.trim(&arena.thread().unwrap());
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
fn deferred_pages_go_back_when_the_handle_closes() {
    // Freed by the thread that closes the arena, or by one that has ended by then.
    for elsewhere in [false, true] {
        let (path, file) = temp("closed");
        let arena = Arena::create(file, &Options { capacity_bytes: 512 << 20, ..small() }).unwrap();
        let used = || std::fs::metadata(&path.0).unwrap().blocks() * 512;
        let fill_and_free = || {
            let thread = arena.thread().unwrap();
            let blocks: Vec<u64> = (0..1000).map(|_| arena.alloc_log(&thread, 64 << 10, false).unwrap()).collect();
            thread.settle_alloc();
            blocks.iter().for_each(|&block| arena.free(&thread, block));
        };
        if elsewhere {
            std::thread::scope(|scope| scope.spawn(fill_and_free).join().unwrap());
        } else {
            fill_and_free();
        }
        let full = used();
        assert!(full > 60 << 20, "{full} bytes: given back immediately");
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
            let thread = arena.thread().unwrap();
            let take = |second| {
                arena.ready_log(&thread, BYTES);
                let block = arena.alloc_log(&thread, BYTES, second).unwrap();
                // SAFETY: the block was just allocated with at least that many bytes.
                unsafe { arena.at(block).write_bytes(value, BYTES) };
                thread.settle_alloc();
                block
            };
            (0..COUNT).map(|turn| take(turn % 100 == 99)).collect()
        });
        thread.join().unwrap()
    };
    let is = |blocks: &[u64], value: u8| {
        // SAFETY: the blocks have at least that many bytes, and the writing threads have ended.
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
    // Space freed at the front of an extent is given back as well.
    let thread = arena.thread().unwrap();
    let (before, extent) = (present(), arena.log_of(all[0].0[0]));
    let front = all[0].0.iter().take_while(|block| arena.log_of(**block) == extent).count() / 2;
    all[0].0.drain(..front).for_each(|block| arena.free(&thread, block));
    arena.trim(&thread);
    assert!(present() + front * BYTES <= before + (8 << 10), "{} bytes of {before} for {front} blocks less", present());
    assert!(all.iter().all(|(blocks, value)| is(blocks, *value)));
    all.iter().flat_map(|(blocks, _)| blocks).for_each(|block| arena.free(&thread, *block));
    arena.trim(&thread);
    assert_eq!((present(), arena.stats().spans.held_bytes), (0, 0));
}

/// Allocates blocks as the calling thread.
fn allocate(arena: &Arena, size: usize, count: usize) -> Vec<u64> {
    let thread = arena.thread().unwrap();
    let blocks = (0..count).map(|_| arena.alloc(&thread, size).unwrap()).collect();
    thread.settle_alloc();
    blocks
}

#[test]
fn an_arena_takes_little_more_than_its_blocks() {
    // One block of each class, then so many that slabs and whole spans hold them.
    for count in [1, 10, 300] {
        let arena = Arena::private(&Options { capacity_bytes: 1 << 30, ..small() }).unwrap();
        let sizes = (1..class::LOG).map(class_bytes).filter(|size| size * count < 8 << 20);
        let live: usize = sizes.map(|size| allocate(&arena, size, count).len() * size).sum();
        let stats = arena.stats().spans;
        assert_eq!(stats.allocated_bytes, live as u64);
        let most = live + live / 2 + (64 << 10) + (1 << 20);
        assert!(stats.held_bytes <= most as u64, "{count} of each: {live} bytes live, {stats:?}");
    }
}

#[test]
fn an_empty_arena_takes_less_than_a_mebibyte() {
    let (path, file) = temp("empty");
    let arena = Arena::create(file, &Options { capacity_bytes: 64 << 30, ..small() }).unwrap();
    let used = || std::fs::metadata(&path.0).unwrap().blocks() * 512;
    if used().is_multiple_of(2 << 20) {
        return println!("SKIPPED: /dev/shm gives huge pages");
    }
    assert!(used() < 1 << 20, "{} bytes", used());
    let thread = arena.thread().unwrap();
    arena.free(&thread, allocate(&arena, 100, 1)[0]);
    arena.inner.disown_all(&thread, thread.owner);
    assert!(used() < 1 << 20, "{} bytes after one block", used());
}

#[test]
fn units_of_idle_threads_are_taken_back_under_pressure() {
    let arena = &Arena::private(&Options { capacity_bytes: 8 * SPAN_BYTES as u64, ..small() }).unwrap();
    // Slabs with room, and an empty one, of a thread that lives on.
    std::thread::scope(|scope| {
        let (tell, told) = std::sync::mpsc::channel();
        let (go_on, going) = std::sync::mpsc::channel::<()>();
        let idle = scope.spawn(move || {
            let thread = arena.thread().unwrap();
            arena.free(&thread, allocate(arena, 300, 1)[0]);
            tell.send([1000, SMALL_BYTES_MAX / 8].map(|size| (allocate(arena, size, 1)[0], size))).unwrap();
            going.recv().unwrap();
            // It goes on as if nothing had happened.
            [1000, SMALL_BYTES_MAX / 8, 300].map(|size| (allocate(arena, size, 1)[0], size))
        });
        let ours = told.recv().unwrap();
        let thread = arena.thread().unwrap();
        let mut blocks: Vec<(u64, usize)> = Vec::new();
        for size in [SPAN_BYTES, SMALL_BYTES_MAX / 8, 1000, 300] {
            while let Ok(block) = arena.alloc(&thread, size) {
                blocks.push((block, size));
            }
        }
        thread.settle_alloc();
        let beside = |block: &&(u64, usize)| block.1 == 1000 && block.0 / 4096 == ours[0].0 / 4096;
        assert_eq!(blocks.iter().filter(beside).count(), 3, "the idle thread's slab is not used");
        assert_eq!(arena.stats().spans.kept_bytes, 0);
        // What is freed now, the idle thread finds.
        let (gone, left): (Vec<_>, Vec<_>) = blocks.into_iter().enumerate().partition(|(at, _)| at % 2 == 0);
        gone.into_iter().for_each(|(_, (block, _))| arena.free(&thread, block));
        arena.relieve().unwrap();
        go_on.send(()).unwrap();
        let mut all: Vec<(u64, usize)> = left.into_iter().map(|(_, block)| block).chain(ours).collect();
        all.extend(idle.join().unwrap());
        all.sort_unstable();
        assert!(all.windows(2).all(|pair| pair[0].0 + pair[0].1 as u64 <= pair[1].0), "two blocks in one place");
    });
}

/// Threads allocate, write and free in an arena so small that each takes from the others what they own.
#[test]
fn blocks_stay_whole_while_threads_take_units_from_each_other() {
    const THREADS: u64 = 4;
    let arena = &Arena::private(&Options { capacity_bytes: 6 * SPAN_BYTES as u64, ..small() }).unwrap();
    let rounds = if cfg!(debug_assertions) { 20_000 } else { 100_000 };
    let refused = &AtomicU64::new(0);
    std::thread::scope(|scope| {
        let work = |number: u64| {
            move || {
                let thread = arena.thread().unwrap();
                let mut numbers = fastrand::Rng::with_seed(number);
                let mut held: VecDeque<(u64, usize, u64)> = VecDeque::new();
                for round in 0..rounds {
                    let random = numbers.u64(..);
                    let size = 16 + (random >> 8) as usize % if random & 15 == 0 { SMALL_BYTES_MAX / 2 } else { 700 };
                    let stamp = number << 56 | round;
                    match arena.alloc(&thread, size) {
                        Ok(block) => {
                            let words = size as u64 / 8;
                            (0..words).for_each(|at| arena.inner.word(block + at * 8).store(stamp, Ordering::Relaxed));
                            thread.settle_alloc();
                            held.push_back((block, size, stamp));
                        }
                        Err(_) => drop(refused.fetch_add(1, Ordering::Relaxed)),
                    }
                    if random >> 60 == 0 {
                        arena.relieve().unwrap();
                    }
                    let most = (6 * SPAN_BYTES / 600) / THREADS as usize;
                    while held.len() > most || random >> 56 & 3 == 0 && held.len() > most / 2 {
                        let (block, size, stamp) = held.pop_front().unwrap();
                        for at in 0..size as u64 / 8 {
                            let found = arena.inner.word(block + at * 8).load(Ordering::Relaxed);
                            assert_eq!(found, stamp, "block {block:#x} of {size} bytes is another's");
                        }
                        arena.free(&thread, block);
                    }
                }
                held.into_iter().for_each(|(block, ..)| arena.free(&thread, block));
            }
        };
        let threads: Vec<_> = (1..=THREADS).map(|number| scope.spawn(work(number))).collect();
        // Joining waits for the end of the thread itself, where its record is released.
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    });
    let stats = arena.stats().spans;
    assert_eq!(
        (stats.block_count, stats.held_bytes - stats.kept_bytes),
        (0, 0),
        "{} refused",
        refused.load(Ordering::Relaxed)
    );
    let thread = arena.thread().unwrap();
    arena.alloc(&thread, 6 * SPAN_BYTES).unwrap();
}

/// A process dies at each store while it splits a span, allocates and frees slabs, makes the span whole again, and takes
/// units back from others; nothing is lost but the one block that its intent does not name any more.
#[test]
#[cfg(any(debug_assertions, pagefold_stress))]
fn a_death_among_runs_loses_at_most_one_block() {
    let work = |arena: &Arena| {
        let thread = arena.thread().unwrap();
        // Of one tile, of several, of many words.
        let sizes = [1000, 3000, 16, SMALL_BYTES_MAX / 3];
        let blocks = sizes.map(|size| arena.alloc(&thread, size).inspect(|_| thread.settle_alloc()).unwrap());
        arena.inner.relieve(&thread, thread.owner);
        blocks.iter().for_each(|&block| arena.free(&thread, block));
        arena.inner.deregister(thread.owner, Some(Instant::now()));
    };
    for point in 1.. {
        let (path, file) = temp("slabs");
        let arena = Arena::create(file, &small()).unwrap();
        let thread = arena.thread().unwrap();
        // Slabs that this living thread owns, from which the other process takes.
        let ours: Vec<u64> = [1000, 500, 3000].iter().flat_map(|&size| allocate(&arena, size, 1)).collect();
        let died = fault::dies(point, || {
            work(&Arena::open_path(&path.0, 0, Pages::Auto).unwrap());
            // SAFETY: _exit ends the child without running destructors of the parent's threads.
            unsafe { libc::_exit(0) };
        });
        recover_unlinked(&arena);
        assert!(ours.iter().all(|&block| arena.is_allocated(block)), "death at point {point}");
        let more: Vec<u64> = [1000, 500, 3000].iter().flat_map(|&size| allocate(&arena, size, 3)).collect();
        let distinct: HashSet<&u64> = ours.iter().chain(&more).collect();
        assert_eq!(distinct.len(), 12, "death at point {point}");
        let mut all = Vec::new();
        arena.each_block(|block| all.push(block));
        assert!(all.len() <= 12 + 4, "death at point {point}: {}", all.len());
        all.into_iter().for_each(|block| arena.free(&thread, block));
        let whole = arena.alloc(&thread, 64 << 20);
        assert!(whole.is_ok(), "death at point {point}: {whole:?}, {:?}", arena.stats().spans);
        if !died {
            assert!(point > 40, "{point}");
            break;
        }
    }
}
