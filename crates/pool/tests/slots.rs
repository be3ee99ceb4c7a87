//! A slot, once published, keeps its bytes, whatever anybody tries; sharers are counted exactly.

#![cfg(not(loom))]

use pagefold_os::mem::Mapping;
use pagefold_os::{PAGE_SIZE, Page, memfd, syscall};
use pagefold_pool::{Pool, PublishError, Published, Room, SEGMENT_LEN, SLOTS_PER_SEGMENT, Slot};
use proptest::prelude::*;
use std::sync::{Arc, Mutex};

fn page(n: u64) -> Page {
    let mut page = [0; PAGE_SIZE];
    page.chunks_exact_mut(8).for_each(|word| word.copy_from_slice(&n.to_le_bytes()));
    page
}

#[test]
fn pages_come_back_and_runs_are_neighbours() {
    let pool = Pool::new("test", 64 << 20);
    let pages: Vec<Page> = (0..3000).map(page).collect();
    let refs: Vec<&Page> = pages.iter().collect();
    let Published { first, taken, .. } = pool.publish(&refs).unwrap();
    assert_eq!(taken, SLOTS_PER_SEGMENT as usize, "a run is cut only by the end of a segment");
    let Published { first: second, taken: rest, .. } = pool.publish(&refs[taken..]).unwrap();
    assert_eq!(rest, 3000 - taken);
    assert_eq!((first.index(), second.index(), second.segment()), (0, 0, first.segment() + 1));
    let mut out = page(0);
    for (n, expected) in pages.iter().enumerate() {
        let slot = if n < taken {
            Slot::from_number(first.number() + n as u32)
        } else {
            Slot::new(second.segment(), (n - taken) as u32)
        };
        assert!(pool.read(slot, &mut out) && out == *expected);
    }
    assert!(!pool.read(Slot::new(9, 0), &mut out));
    assert!(!pool.read(Slot::new(second.segment(), rest as u32), &mut out), "an unpublished slot is none");
}

#[test]
fn no_process_can_change_a_published_slot() {
    let pool = Pool::new("test", 64 << 20);
    let one = page(1);
    for filling in [true, false] {
        let slot = pool.publish(&[&one]).unwrap().first;
        if !filling {
            pool.close_open_segments();
        }
        let fd = pool.segment_fd(slot.segment()).unwrap();
        assert!(fd.write(b"x").is_err(), "a client's descriptor is read-only");
        let writable = memfd::reopen_read_only(&fd).and_then(|_| {
            let path = std::ffi::CString::new(format!("/proc/self/fd/{}", fd.raw())).unwrap();
            pagefold_os::fd::Fd::open(&path, libc::O_RDWR, 0)
        });
        // As root (or owner) the file opens for writing: the seals must hold even so.
        if let Ok(writable) = writable {
            assert!(writable.write(b"x").is_err());
            let prot = libc::PROT_READ | libc::PROT_WRITE;
            assert!(Mapping::file(writable.raw(), 0, SEGMENT_LEN, prot, libc::MAP_SHARED).is_err());
            // SAFETY: ftruncate(2) takes no pointer, and the seals have it fail.
            assert!(unsafe { syscall!(libc::SYS_ftruncate, writable.raw(), 0) }.is_err());
            // SAFETY: fallocate(2) takes no pointer, and the seals have it fail.
            let punched = unsafe {
                syscall!(
                    libc::SYS_fallocate,
                    writable.raw(),
                    libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE,
                    0,
                    4096
                )
            };
            assert!(punched.is_err());
        }
        let mut out = page(0);
        assert!(pool.read(slot, &mut out) && out == one);
    }
}

#[test]
fn a_full_pool_says_so_and_gives_space_back_with_its_segments() {
    let pool = Pool::new("test", 2 * SEGMENT_LEN as u64);
    let zero = page(7);
    let refs = vec![&zero; SLOTS_PER_SEGMENT as usize];
    let Published { first, hold, .. } = pool.publish(&refs).unwrap();
    pool.publish(&refs).unwrap();
    assert!(matches!(pool.publish(&refs), Err(PublishError::Full { .. })));
    assert!(pool.add_sharers(first, 2));
    assert!(!pool.release(first.segment(), |_, _| {}), "somebody shares it");
    pool.remove_sharer(first);
    pool.remove_sharer(first);
    assert!(!pool.release(first.segment(), |_, _| {}), "somebody will share it");
    assert!(pool.unshared().iter().all(|segment| *segment != hold.segment()));
    drop(hold);
    let mut forgotten = 0;
    assert!(pool.release(first.segment(), |_, page| forgotten += usize::from(*page == zero)));
    assert!(!pool.add_sharers(first, 1), "it is gone");
    assert_eq!(forgotten, SLOTS_PER_SEGMENT as usize);
    assert!(pool.publish(&refs).is_ok());
    assert_eq!(pool.stats().segments_released, 1);
}

/// A reader touches a slot's place before the slot is published, which maps a page of zeros there.
#[test]
fn a_slot_that_was_read_too_early_shows_its_page_later() {
    let pool = Pool::new("test", 64 << 20);
    let first = pool.publish(&[&page(1)]).unwrap().first;
    let fd = pool.segment_fd(first.segment()).unwrap();
    let shown = Mapping::file(fd.raw(), 0, SEGMENT_LEN, libc::PROT_READ, libc::MAP_SHARED).unwrap();
    // SAFETY: inside the mapping; the byte may change at any time.
    let byte = |index: usize| unsafe { shown.as_ptr().add(index * PAGE_SIZE + 104).read_volatile() };
    for index in [2, 3, 6] {
        assert_eq!(byte(index), 0);
    }
    // Neighbours in our memory, and one that is not.
    let pages: Vec<Page> = (2..=8).map(page).collect();
    let mut refs: Vec<&Page> = pages.iter().collect();
    refs.swap(3, 4);
    assert_eq!(pool.publish(&refs).unwrap().taken, 7);
    for (index, expected) in [1, 2, 3, 4, 6, 5, 7, 8].into_iter().enumerate() {
        let mut out = page(0);
        assert!(pool.read(Slot::new(first.segment(), index as u32), &mut out));
        assert_eq!((out, byte(index)), (page(expected), page(expected)[104]), "slot {index}");
    }
}

/// The slots of a large pool lie on huge pages where the kernel has them: what is begun of one counts.
#[test]
fn a_large_pool_says_what_memory_it_takes() {
    const HUGE: u64 = 2 << 20;
    let pool = Pool::new("test", 1 << 30);
    let pages: Vec<Page> = (0..=250).map(page).collect();
    let mut slots = Vec::new();
    while slots.len() < 5000 {
        let refs: Vec<&Page> = (0..1 + slots.len() % 97).map(|more| &pages[(slots.len() + more) % 251]).collect();
        let Published { first, taken, .. } = pool.publish(&refs).unwrap();
        slots.extend((0..taken as u32).map(|offset| Slot::from_number(first.number() + offset)));
        let (stats, written) = (pool.stats(), (slots.len() * PAGE_SIZE) as u64);
        assert_eq!(stats.slots_published, slots.len() as u64);
        assert!((written..written + HUGE).contains(&stats.bytes), "{} bytes for {written}", stats.bytes);
        assert!(written > SEGMENT_LEN as u64 || stats.bytes == written, "a small pool takes what it needs");
    }
    for (number, slot) in slots.iter().enumerate() {
        let mut out = page(0);
        assert!(pool.read(*slot, &mut out) && out == pages[number % 251], "{slot:?}");
    }
    pool.close_open_segments();
    for segment in pool.unshared() {
        assert!(pool.release(segment, |_, _| {}));
    }
    assert_eq!((pool.stats().segments, pool.stats().bytes), (0, 0));
}

#[test]
fn workers_beside_each_other_publish_runs() {
    let pool = Pool::new("test", 4 * SEGMENT_LEN as u64);
    let contents: Vec<Page> = (0..40).map(page).collect();
    let mut next = [None; 2];
    for step in 0..20 {
        for lane in [0, 1] {
            let Published { first, taken, .. } = pool.publish_in(lane, &[&contents[step * 2 + lane]]).unwrap();
            assert_eq!(taken, 1);
            assert!(next[lane].is_none_or(|next| next == first), "{first:?} does not follow");
            next[lane] = Some(Slot::from_number(first.number() + 1));
            let mut out = page(99);
            assert!(pool.read(first, &mut out) && out == contents[step * 2 + lane]);
        }
    }
    assert_eq!(pool.stats().segments, 2);
    pool.close_open_segments();
    assert_eq!(pool.unshared().len(), 2);
}

/// Where there is room for one segment all lanes share it.
#[test]
fn at_the_size_limit_lanes_are_shared() {
    let pool = Pool::new("test", SEGMENT_LEN as u64);
    let one = page(1);
    let slots = [5, 0, 2, 5].map(|lane| pool.publish_in(lane, &[&one]).unwrap().first.number());
    assert_eq!(slots, [0, 1, 2, 3].map(|more| slots[0] + more));
    let rest = vec![&one; SLOTS_PER_SEGMENT as usize];
    assert_eq!(pool.publish_in(1, &rest).unwrap().taken, SLOTS_PER_SEGMENT as usize - 4);
    assert!((0..8).all(|lane| matches!(pool.publish_in(lane, &[&one]), Err(PublishError::Full { .. }))));
}

/// What the open segments will take is memory that is not there for others.
#[test]
fn a_segment_is_made_where_there_is_room_for_what_is_open_as_well() {
    const LEN: u64 = SEGMENT_LEN as u64;
    let asked = Arc::new(Mutex::new(Vec::new()));
    let pool = {
        let asked = asked.clone();
        let has = move |bytes| {
            asked.lock().unwrap().push(bytes);
            bytes <= 2 * LEN
        };
        Pool::within("test", 64 << 20, Room::new(has))
    };
    let one = page(1);
    let publish = |lane| pool.publish_in(lane, &[&one]).map(|published| published.first.segment());
    let slots = [0, 1, 2].map(|lane| publish(lane).unwrap());
    // The third of them has no room, and takes a slot of another.
    assert!(slots[0] != slots[1] && (slots[2] == slots[0] || slots[2] == slots[1]), "{slots:?}");
    assert_eq!(*asked.lock().unwrap(), [LEN, 2 * LEN - 4096, 3 * LEN - 2 * 4096]);
    let refused = Pool::within("test", 64 << 20, Room::new(|_| false)).publish(&[&one]);
    assert!(matches!(refused, Err(PublishError::NoRoom)));
}

#[test]
fn a_retired_segment_takes_no_sharers_and_one_that_is_kept_does_again() {
    let pool = Pool::new("test", 64 << 20);
    let pages: Vec<Page> = (1..=8).map(page).collect();
    let first = pool.publish(&pages.iter().collect::<Vec<_>>()).unwrap().first;
    let slot = |index| Slot::new(first.segment(), index);
    assert!(pool.add_sharers(slot(0), 2) && pool.add_sharers(slot(1), 2));
    assert_eq!(pool.wasteful(1), None, "it is being filled");
    pool.close_open_segments();
    assert_eq!(pool.wasteful(1), Some(first.segment()));
    assert_eq!(pool.wasteful(7), None, "six are dead");
    assert!(pool.add_sharers(slot(1), 2));
    assert_eq!(pool.wasteful(1), None, "moving six pages gives back six");
    pool.remove_sharer(slot(1));
    pool.retire(first.segment());
    assert_eq!(pool.wasteful(1), None, "one attempt each");
    assert!(!pool.add_sharers(slot(1), 1) && pool.published_from(slot(1)) == 0);
    assert!(
        pool.adopt_sharer(slot(1), pool.segment_inode(slot(1).segment()).unwrap()),
        "a forked child's mapping is there already"
    );
    let mut again = Vec::new();
    pool.keep(first.segment(), |slot, page| again.push((slot, *page)));
    assert_eq!(again, [(slot(0), page(1)), (slot(1), page(2))]);
    assert!(pool.add_sharers(slot(3), 1) && pool.published_from(slot(1)) == 7);
    assert_eq!(pool.wasteful(1), None, "it was kept for good");
}

/// A forked child that we know nothing of sees its pages after we let go of the segment.
#[test]
fn an_orphan_keeps_its_pages() {
    let pool = Pool::new("test", 64 << 20);
    let slot = pool.publish(&[&page(42)]).unwrap().first;
    pool.close_open_segments();
    let fd = pool.segment_fd(slot.segment()).unwrap();
    let orphan = Mapping::file(fd.raw(), 0, PAGE_SIZE, libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE).unwrap();
    drop(fd);
    assert!(pool.release(slot.segment(), |_, _| {}));
    // SAFETY: the mapping is one page long and ours.
    assert_eq!(unsafe { *orphan.as_ptr().cast::<Page>() }, page(42));
    let bytes = |pool: &Pool| (pool.stats().bytes, pool.stats().orphaned_bytes);
    assert_eq!(bytes(&pool), (0, PAGE_SIZE as u64), "it is counted");
    drop(orphan);
    assert_eq!(bytes(&pool), (0, 0));
}

/// A released segment that is still mapped takes memory: it counts towards the largest size until it is unmapped.
#[test]
fn a_released_segment_counts_towards_the_limit_while_mapped() {
    let pool = Pool::new("test", 2 * SEGMENT_LEN as u64);
    let fill = || {
        let slot = pool.publish(&[&page(42)]).map(|published| published.first);
        pool.close_open_segments();
        slot
    };
    let [first, second] = [(); 2].map(|()| fill().unwrap());
    let fd = pool.segment_fd(first.segment()).unwrap();
    assert!(pool.release(first.segment(), |_, _| {}) && pool.release(second.segment(), |_, _| {}));
    assert!(fill().is_ok(), "one is orphaned, one is freed");
    assert!(matches!(fill(), Err(PublishError::Full { .. })));
    drop(fd);
    assert!(fill().is_ok());
}

proptest! {
    #[test]
    fn sharers_are_exact(ops in proptest::collection::vec((0u32..40, any::<bool>()), 1..400)) {
        let pool = Pool::new("test", 64 << 20);
        let pages: Vec<Page> = (0..40).map(page).collect();
        pool.publish(&pages.iter().collect::<Vec<_>>()).unwrap();
        let mut model = [0u32; 40];
        for (index, add) in ops {
            let slot = Slot::new(0, index);
            if add {
                prop_assert!(pool.add_sharers(slot, 1));
                model[index as usize] += 1;
            } else if model[index as usize] > 0 {
                pool.remove_sharer(slot);
                model[index as usize] -= 1;
            }
            prop_assert_eq!(pool.sharers(slot), model[index as usize]);
        }
        let stats = pool.stats();
        prop_assert_eq!(stats.pages_sharing, model.iter().map(|n| u64::from(*n)).sum::<u64>());
        prop_assert_eq!(stats.pages_shared, model.iter().filter(|n| **n > 0).count() as u64);
    }
}

/// Several workers that begin a segment each at the limit.
#[test]
fn the_limit_holds_for_all_that_add_at_once() {
    for _ in 0..500 {
        let pool = Pool::new("limit", SEGMENT_LEN as u64);
        let start = std::sync::Barrier::new(4);
        std::thread::scope(|scope| {
            for lane in 0..4 {
                let (pool, start) = (&pool, &start);
                scope.spawn(move || {
                    start.wait();
                    let _ = pool.publish_in(lane, &[&page(1)]);
                });
            }
        });
        assert_eq!(pool.stats().segments, 1);
    }
}
