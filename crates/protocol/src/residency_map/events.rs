//! Events of the client's userfaultfd that change the map, and pages that are lost.
//!
//! A page that has lost its content is poisoned: an access raises SIGBUS, and never reads other bytes. The agent poisons
//! what is evicted once neither daemon nor keeper can be reached; the daemon does so when it finds that the tier is gone.

use super::{DISCARDED, EVICTED, FROZEN, RESIDENT, ResidencyMap};
use core::sync::atomic::Ordering;
use pagefold_os::fd::Fd;
use pagefold_os::raw::Errno;
use pagefold_os::uffd::{Event, Uffd};
use pagefold_os::{PAGE_SIZE, Range, syscall};

const PAGE: u64 = PAGE_SIZE as u64;

/// Poisons every evicted page; the caller holds the owner lock. Returns how many there were.
pub fn poison_evicted(uffd: &Uffd, map: &ResidencyMap) -> u64 {
    let mut lost = 0;
    let mut map_changed = true;
    // An mremap(2) in the meantime may move evicted pages to addresses that a pass has left behind.
    while core::mem::take(&mut map_changed) {
        map.for_each_run(0, u64::MAX >> 1, EVICTED, |start, end| {
            let (mut at, mut settled) = (start, start);
            let mut settle = |from: u64, to: u64| {
                for addr in (from..to).step_by(PAGE_SIZE) {
                    if map.set_state(addr, RESIDENT) == EVICTED {
                        lost += 1;
                    }
                }
            };
            let mut single = false;
            while at < end {
                // One call stays within one mapping; a run may span several.
                let stop = if single { at + PAGE } else { end };
                let (done, error) = uffd.poison(Range { start: at, end: stop }, 0);
                at += done;
                match error {
                    None => {}
                    // A discard or a move is under way: the kernel refuses until its event is read.
                    Some(Errno(libc::EAGAIN)) if uffd.is_alive() => {
                        // Pages that the move brings to the part already poisoned count as evicted again.
                        settle(settled, at);
                        settled = at;
                        // Never waits for an event: the daemon, if it is the caller, must not wait for a client.
                        if uffd.read_event_at_once().ok().flatten().is_some_and(|event| apply_event(map, event)) {
                            // The rest of the run may have changed.
                            map_changed = true;
                            break;
                        }
                        yield_now();
                    }
                    Some(Errno(libc::ENOMEM)) => yield_now(),
                    Some(_) if !single => single = true,
                    // The page is present already, or its mapping is gone.
                    Some(_) => at += PAGE,
                }
            }
            settle(settled, at);
            let _ = uffd.wake(Range { start, end });
        });
    }
    map.head().lost.fetch_add(lost, Ordering::Relaxed);
    lost
}

/// Enters what an event says of evicted or frozen pages, in the place of a dead daemon; the caller holds the owner lock.
/// Returns false if the event does not concern them.
pub fn apply_event(map: &ResidencyMap, event: Event) -> bool {
    let clear = |range: Range, then: &mut dyn FnMut(u64)| {
        for (state, left) in [(EVICTED, RESIDENT), (FROZEN, DISCARDED)] {
            map.for_each_run(range.start, range.end, state, |start, end| {
                for addr in (start..end).step_by(PAGE_SIZE) {
                    map.set_state(addr, left);
                    then(addr);
                }
            });
        }
    };
    match event {
        Event::Remove(range) | Event::Unmap(range) => clear(range, &mut |_| ()),
        Event::Remap { from, to } => {
            clear(Range { start: to, end: to.saturating_add(from.len()) }, &mut |_| ());
            // A frozen page cannot return to its new address, and must not read zeros there: it is lost like an evicted one.
            clear(from, &mut |addr| {
                let addr = to + (addr - from.start);
                if map.find_or_add(addr).is_some() {
                    map.set_state(addr, EVICTED);
                }
            });
        }
        // SAFETY: the kernel has just made the descriptor for the reader of the event, and nothing else owns it.
        Event::Fork(fd) => poison_in_child(&Uffd::from_fd(unsafe { Fd::from_raw(fd) }), map),
        _ => return false,
    }
    true
}

/// Poisons in a forked child the pages that its parent lacks. Everything else returns to the kernel when the child's
/// descriptor closes; until then the child's faults wait.
fn poison_in_child(child: &Uffd, map: &ResidencyMap) {
    for state in [EVICTED, FROZEN] {
        map.for_each_run(0, u64::MAX >> 1, state, |start, end| {
            poison_range_in_child(child, map, Range { start, end }, 0)
        });
    }
}

/// Poisons the pages `lacked` by the parent in the child, where they lie `by` bytes further on.
fn poison_range_in_child(child: &Uffd, map: &ResidencyMap, lacked: Range, by: u64) {
    let mut at = lacked.start;
    while at < lacked.end {
        // Page by page: a run may span several mappings, and the child may have unmapped some.
        let (_, error) = child.poison(Range::pages_from(at.wrapping_add(by), 1), 0);
        match error {
            Some(Errno(libc::EAGAIN)) if child.is_alive() => {
                match child.read_event_at_once() {
                    Ok(Some(Event::Fork(fd))) => {
                        // SAFETY: the kernel has just made the descriptor for the reader of the event, and nothing else
                        // owns it.
                        poison_in_child(&Uffd::from_fd(unsafe { Fd::from_raw(fd) }), map);
                    }
                    Ok(Some(Event::Remap { from, to })) => {
                        let by = to.wrapping_sub(from.start);
                        for state in [EVICTED, FROZEN] {
                            map.for_each_run(from.start, from.end, state, |start, end| {
                                poison_range_in_child(child, map, Range { start, end }, by);
                            });
                        }
                    }
                    _ => yield_now(),
                }
            }
            Some(Errno(libc::ENOMEM)) => yield_now(),
            // Poisoned, or not the child's.
            _ => at += PAGE,
        }
    }
}

fn yield_now() {
    // SAFETY: the call takes no arguments.
    let _ = unsafe { syscall!(libc::SYS_sched_yield) };
}

#[cfg(test)]
mod tests {
    use super::super::tests::with_map;
    use super::super::{CHUNK_BYTES, OWNER_AGENT};
    use super::*;
    use pagefold_os::{fd, mem, uffd};

    /// A child made by a raw fork; no daemon reads its events.
    #[test]
    fn a_child_loses_what_its_parent_lacks() {
        let features = uffd::FEATURE_EVENT_FORK | uffd::FEATURE_POISON;
        let device = uffd::open_device().ok();
        let Ok(uffd) = Uffd::new(device.as_ref(), features) else {
            return eprintln!("SKIPPED: this user may not have a userfaultfd that reports forks");
        };
        with_map(|map| {
            assert!(map.try_lock(OWNER_AGENT));
            let memory = mem::Mapping::anonymous(3 * PAGE_SIZE).unwrap();
            uffd.register(Range::pages_from(memory.addr(), 3), uffd::MODE_MISSING).unwrap();
            let page_at = |number: u64| memory.addr() + number * PAGE;
            // They may lie in two chunks.
            for number in [0, 2] {
                map.find_or_add(page_at(number)).unwrap();
            }
            map.set_state(page_at(0), EVICTED);
            map.set_state(page_at(2), FROZEN);
            let child = std::thread::scope(|scope| {
                scope.spawn(|| {
                    let mut polls = [libc::pollfd { fd: uffd.fd().raw(), events: libc::POLLIN, revents: 0 }];
                    assert_eq!(fd::poll(&mut polls, 60_000), Ok(1), "no event of the fork");
                    apply_event(&map, uffd.read_event_at_once().unwrap().expect("an event"));
                });
                // SAFETY: a raw clone; the child makes system calls only, and ends.
                unsafe {
                    let child = syscall!(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0).unwrap();
                    if child == 0 {
                        let is_there = |number| mem::advise(page_at(number), PAGE, libc::MADV_POPULATE_READ).is_ok();
                        let seen = (0..3).map(|number| i32::from(is_there(number)) << number).sum();
                        libc::_exit(seen);
                    }
                    child as i32
                }
            });
            let mut status = 0;
            // SAFETY: the status lives across the call.
            assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
            assert_eq!(
                (libc::WIFEXITED(status), libc::WEXITSTATUS(status)),
                (true, 2),
                "bits of pages that read zeros"
            );
            assert_eq!(
                (map.state(page_at(0)), map.state(page_at(2))),
                (EVICTED, FROZEN),
                "the parent has lost nothing"
            );
        });
    }

    #[test]
    fn a_frozen_page_that_is_moved_counts_as_evicted() {
        with_map(|map| {
            let chunk = |number: u64| number * CHUNK_BYTES;
            map.find_or_add(chunk(1)).unwrap();
            map.set_state(chunk(1), FROZEN);
            map.set_state(chunk(1) + PAGE, EVICTED);
            assert!(apply_event(&map, Event::Remap { from: Range::pages_from(chunk(1), 3), to: chunk(2) }));
            let states = |number: u64| [0, 1, 2].map(|page| map.state(chunk(number) + page * PAGE));
            assert_eq!(states(1), [DISCARDED, RESIDENT, RESIDENT]);
            assert_eq!(states(2), [EVICTED, EVICTED, RESIDENT]);
        });
    }
}
