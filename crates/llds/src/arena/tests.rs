//! The arena's promises, one test each.

use super::*;
use std::collections::{BTreeMap, HashSet};

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
