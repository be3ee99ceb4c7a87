//! Which files a pool takes in as segments of an earlier one, and which it refuses, whatever a client sends.

#![cfg(not(loom))]

use pagefold_os::fd::Fd;
use pagefold_os::mem::Mapping;
use pagefold_os::{PAGE_SIZE, Page, memfd};
use pagefold_pool::{Pool, Refused, SEGMENT_LEN, Slot};

const NAME: &std::ffi::CStr = c"pagefold-pool:d";
const LENGTH: i32 = memfd::SEAL_SHRINK | memfd::SEAL_GROW;

fn pool() -> Pool {
    Pool::new("d", 64 << 20)
}

fn page(n: u8) -> Page {
    [n; PAGE_SIZE]
}

/// Hands `file` to `pool` as a client does; returns the slots that it got, or why not.
fn inherit(pool: &Pool, file: &Fd) -> Result<Vec<(Slot, u8)>, Refused> {
    let (_, inode) = memfd::len_and_inode(file.raw()).unwrap();
    let mut slots = Vec::new();
    let hold = pool.inherit(file, inode, |slot, page| slots.push((slot, page[9])))?;
    assert_eq!(pool.segment_of_inode(inode), Some(hold.segment()));
    Ok(slots)
}

/// A file of one written page with this name, length and seals.
fn file(name: &std::ffi::CStr, len: usize, seals: i32) -> Fd {
    let file = memfd::create(name, len as u64).unwrap();
    assert_eq!(file.write(&page(7)), Ok(PAGE_SIZE));
    memfd::add_seals(&file, seals).unwrap();
    file
}

#[test]
fn a_segment_is_taken_in_when_its_pool_has_ended() {
    let earlier = pool();
    // A number that the next pool uses for another segment.
    let published = earlier.publish(&[&page(1), &page(2), &page(3)]).unwrap();
    let shown = earlier.segment_fd(published.first.segment()).unwrap();
    let later = pool();
    later.publish(&[&page(9)]).unwrap();
    assert_eq!(inherit(&later, &shown), Err(Refused::NotSealed), "its pool can still write");
    drop((published, earlier));
    let slots = inherit(&later, &shown).unwrap();
    assert_eq!(slots, [(Slot::new(1, 0), 1), (Slot::new(1, 1), 2), (Slot::new(1, 2), 3)]);
    assert!(memfd::seals(&shown).unwrap() & memfd::SEAL_WRITE != 0);
    assert_eq!(inherit(&later, &shown), Ok(Vec::new()), "it is there already");
    // A segment like others: sharers are counted, and with the last one it goes.
    let (_, inode) = memfd::len_and_inode(shown.raw()).unwrap();
    assert!(later.adopt_sharer(Slot::new(1, 1), inode) && later.add_sharers(Slot::new(1, 1), 1));
    assert!(!later.adopt_sharer(Slot::new(1, 3), inode), "it was never written");
    assert_eq!((later.stats().pages_shared, later.stats().pages_sharing, later.unshared()), (1, 2, Vec::new()));
    later.remove_sharer(Slot::new(1, 1));
    later.remove_sharer(Slot::new(1, 1));
    assert_eq!(later.unshared(), [1]);
    assert!(later.release(1, |_, _| ()));
    assert_eq!(later.stats().bytes, PAGE_SIZE as u64);
}

#[test]
fn only_sealed_files_of_the_domain_are_taken_in() {
    let sealed = LENGTH | memfd::SEAL_WRITE;
    let refused = |file: Fd| inherit(&pool(), &file).unwrap_err();
    assert_eq!(refused(file(c"pagefold-pool:e", SEGMENT_LEN, sealed)), Refused::NotOurs, "another domain's");
    assert_eq!(refused(file(c"pagefold-pool:d2", SEGMENT_LEN, sealed)), Refused::NotOurs, "another domain's");
    assert_eq!(refused(file(NAME, SEGMENT_LEN - PAGE_SIZE, sealed)), Refused::NotSealed, "too short");
    assert_eq!(refused(file(NAME, 2 * SEGMENT_LEN, sealed)), Refused::NotSealed, "too long");
    for seals in [0, LENGTH, memfd::SEAL_WRITE, memfd::SEAL_WRITE | memfd::SEAL_GROW, memfd::SEAL_FUTURE_WRITE] {
        assert_eq!(refused(file(NAME, SEGMENT_LEN, seals)), Refused::NotSealed, "seals {seals:#x}");
    }
    for path in [c"/dev/zero", c"/proc/self/maps", c"/"] {
        assert_eq!(refused(Fd::open(path, libc::O_RDONLY, 0).unwrap()), Refused::NotSealed, "{path:?}");
    }
    let good = file(NAME, SEGMENT_LEN, sealed);
    assert!(matches!(pool().inherit(&good, 1, |_, _| ()), Err(Refused::NotSealed)), "another file than it shows");
    assert_eq!(inherit(&pool(), &good), Ok(vec![(Slot::new(0, 0), 7)]), "what was never written is no slot");
}

/// A client that forges a segment keeps no way to write to it.
#[test]
fn a_forged_segment_that_its_maker_can_write_to_is_refused() {
    let forged = memfd::create(NAME, SEGMENT_LEN as u64).unwrap();
    let rights = libc::PROT_READ | libc::PROT_WRITE;
    let writes = Mapping::file(forged.raw(), 0, PAGE_SIZE, rights, libc::MAP_SHARED).unwrap();
    memfd::add_seals(&forged, LENGTH | memfd::SEAL_FUTURE_WRITE).unwrap();
    assert_eq!(inherit(&pool(), &forged), Err(Refused::NotSealed));
    drop(writes);
    assert_eq!(inherit(&pool(), &forged), Ok(Vec::new()));
    assert!(Mapping::file(forged.raw(), 0, PAGE_SIZE, rights, libc::MAP_SHARED).is_err(), "it can be written again");
}

/// A daemon of one user has domains of others: a file made for one is none of another's, though their names are alike.
#[test]
fn a_segment_of_another_users_domain_is_refused() {
    let me = pagefold_os::user::effective();
    if me != 0 {
        return eprintln!("SKIPPED: only root has clients of several users");
    }
    let of = |user| pool().of_user(Some(user));
    for (maker, taker, taken) in [(1000, 1000, true), (1000, 1001, false), (me, 1000, false), (me, me, true)] {
        let earlier = of(maker);
        let first = earlier.publish(&[&page(1)]).unwrap().first;
        let shown = earlier.segment_fd(first.segment()).unwrap();
        drop(earlier);
        let found = inherit(&of(taker), &shown);
        assert_eq!(found.as_ref().err(), (!taken).then_some(&Refused::NotOurs), "made for {maker}, asked by {taker}");
    }
}

#[test]
fn a_full_pool_takes_nothing_in() {
    let full = Pool::new("d", SEGMENT_LEN as u64);
    full.publish(&[&page(1)]).unwrap();
    let more = file(NAME, SEGMENT_LEN, LENGTH | memfd::SEAL_WRITE);
    assert_eq!(inherit(&full, &more), Err(Refused::NoRoom));
}
