//! One client is parked: everything of it is evicted. Or it is unparked: everything is brought back.

use super::batch::{Run, runs_within};
use super::bring_back::{bring_back, bring_batches, pages_out};
use super::resident::{evict_resident, resident, scan};
use crate::cold::agent_connection::{AgentConnection, Gone};
use crate::cold::client::{CLUSTER_PAGES, Client};
use crate::cold::group::Group;
use crate::cold::idle::signals;
use pagefold_os::sync::lock;
use pagefold_os::{PAGE_SIZE, Range, sched};
use pagefold_tier::Effort;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Resident pages that are evicted between two looks whether the client works: tens of milliseconds.
const PART_PAGES: u64 = 4096;
/// Pages that come ahead of a waking client's faults at a time: the program waits for the last of them.
const AHEAD_PAGES: usize = 8;

/// Puts everything of a client out that can go; returns the pages that went. What is quickest comes first: the cleaner
/// makes dense what is out.
pub(crate) fn park(group: &Group, client: &Arc<Client>) -> Option<u64> {
    with_agent(group, client, |link| {
        client.set_parked(true);
        let regions = begin(group, client, link)?;
        let parts = regions.into_iter().map(|region| (region, region)).collect();
        let gone = evict_resident(client, link, &group.tier, parts, Effort::Dense);
        link.release_pages();
        gone
    })
}

/// Begins a parking that is done part by part with [`park_part`]: returns ranges with some thousand resident pages each.
/// `None` if no agent answers, or the daemon stops.
pub(crate) fn parts(group: &Group, client: &Arc<Client>) -> Option<Vec<Vec<Run>>> {
    with_agent(group, client, |link| {
        let regions = begin(group, client, link)?;
        let mut parts = Parts::default();
        for around in regions {
            scan(client, around, resident(), |found| {
                parts.add(Range { start: found.start, end: found.end }, around);
            })?;
        }
        Ok(parts.done)
    })
}

/// Evicts the resident pages of one part, as far as they are still managed; returns the pages that went. `None` if no
/// agent answers, or the daemon stops.
pub(crate) fn park_part(group: &Group, client: &Arc<Client>, part: &[Run]) -> Option<u64> {
    with_agent(group, client, |link| {
        let regions = link.regions()?;
        let managed = part.iter().flat_map(|(range, _)| runs_within(*range, &regions));
        evict_resident(client, link, &group.tier, managed.collect(), Effort::Dense)
    })
}

/// Ends a parking that was done part by part: a client that waits needs no room for copies of its pages.
pub(crate) fn end_parts(group: &Group, client: &Client) {
    with_agent(group, client, |link| {
        link.release_pages();
        Ok(())
    });
}

/// Does `act` with the agent of a client, unless the daemon stops or the client is suspended. The connection is given up if
/// the agent does not answer.
fn with_agent<T>(
    group: &Group,
    client: &Client,
    act: impl FnOnce(&mut AgentConnection) -> Result<T, Gone>,
) -> Option<T> {
    let mut held = lock(&client.link);
    let link = held.as_mut().filter(|_| !group.is_closing() && !signals::is_suspended(client.pid))?;
    let done = act(link);
    // Else what the agent did would count as the program's work.
    client.note_agent_cpu(link.agent_cpu_ns);
    if done.is_err() {
        link.socket.shut();
        *held = None;
    }
    done.ok()
}

/// Returns the managed ranges, watched for writes, and begins to remember anew which pages are touched.
fn begin(group: &Group, client: &Client, link: &mut AgentConnection) -> Result<Vec<Range>, Gone> {
    let regions = link.regions()?;
    link.watch(&regions)?;
    lock(&client.eviction).ages.park(regions.clone(), group.tier.take_touched(client.client_id));
    Ok(regions)
}

/// Ranges of addresses, grouped by the resident pages in them.
#[derive(Default)]
struct Parts {
    done: Vec<Vec<Run>>,
    /// Resident pages in the last of them.
    pages: u64,
}

impl Parts {
    /// Adds resident pages of the managed range `around`, which lie behind those added before.
    fn add(&mut self, mut found: Range, around: Range) {
        while !found.is_empty() {
            if self.pages >= PART_PAGES || self.done.is_empty() {
                self.done.push(Vec::new());
                self.pages = 0;
            }
            let end = found.end.min(found.start + (PART_PAGES - self.pages) * PAGE_SIZE as u64);
            self.pages += (end - found.start) / PAGE_SIZE as u64;
            let part = self.done.last_mut().expect("one was added");
            match part.last_mut() {
                // What lies between two runs is absent, and costs nothing.
                Some((range, of)) if of.start == around.start => range.end = end,
                _ => part.push((Range { start: found.start, end }, around)),
            }
            found.start = end;
        }
    }
}

/// Brings back what a client that has just woken is likely to touch, as far as there is room for it, unless the daemon
/// stops.
pub(crate) fn bring_ahead(group: &Group, client: &Client) {
    // Nothing goes out meanwhile.
    let held = lock(&client.link);
    if held.is_some() && !group.is_closing() {
        bring_batches(group, client, || {
            let mut pages = client.wakings.next(AHEAD_PAGES);
            // The rest of a long run is left to its faults.
            pages.truncate(CLUSTER_PAGES);
            pages
        });
    }
}

/// Brings everything of a client back that there is room for, the pages touched last time first, and lets one go that is
/// merged live as well if that is all; returns the pages that came.
pub(crate) fn unpark(group: &Group, client: &Arc<Client>) -> u64 {
    client.set_parked(false);
    // Nothing goes out meanwhile: what was loaded must still be what is out when it is copied.
    let mut held = lock(&client.link);
    let mut first = lock(&client.eviction).ages.unpark();
    first.extend(group.tier.take_touched(client.client_id));
    first.sort_unstable();
    first.dedup();
    let before = client.counters.pages_returned.load(Ordering::Relaxed);
    bring_back(group, client, &first);
    let rest = pages_out(&group.tier, client, Range { start: 0, end: u64::MAX });
    // Two hands: decompression is what takes the time.
    let (left, right) = rest.split_at(rest.len() / 2);
    let here = sched::cpu();
    std::thread::scope(|scope| {
        let other = std::thread::Builder::new().spawn_scoped(scope, || {
            sched::keep_off(here);
            bring_back(group, client, right);
        });
        bring_back(group, client, left);
        if other.is_err() {
            bring_back(group, client, right);
        }
    });
    let came = client.counters.pages_returned.load(Ordering::Relaxed) - before;
    // What its limit has no room for stays out under the loan: to end that its agent brings all, whatever it takes.
    // Nor may it have to bring what could not be read or copied for now: it would wait for us with its guard held.
    let everything = Range { start: 0, end: u64::MAX };
    let all_here = pages_out(&group.tier, client, everything).is_empty();
    if !client.bring_all_moved(&group.tier) {
        return came;
    }
    // The agent of a suspended client cannot answer. What is asked of it below can also be left out.
    let all_here = all_here && !signals::is_suspended(client.pid);
    if client.lent.load(Ordering::Relaxed) && all_here {
        if let Some(mut link) = held.take() {
            link.leave();
            // That it has left is seen later.
            client.lent.store(false, Ordering::Relaxed);
        }
        return came;
    }
    // The kernel serves fresh pages alone again. Not while something is out: what a bare mremap(2) takes of it elsewhere
    // meanwhile would read zeros there.
    if let Some(link) = held.as_mut().filter(|_| all_here) {
        let released = link.regions().and_then(|regions| link.release(&regions));
        if released.is_err() {
            link.socket.shut();
            *held = None;
        }
    }
    came
}

#[cfg(test)]
mod tests {
    use super::super::evictor::tests::{beside_agent, group, linked};
    use super::*;
    use crate::cold::client::tests as client_tests;
    use crate::memory_limits::tests::limited;
    use pagefold_os::Errno;
    use pagefold_protocol::residency_map::EVICTED;

    const PAGE: u64 = PAGE_SIZE as u64;

    #[test]
    fn parts_have_as_many_resident_pages_each_and_miss_none() {
        let mut parts = Parts::default();
        let around = |index: u64| Range::pages_from(index << 40, 1 << 28);
        let mut added = 0;
        // Far apart, in two managed ranges; one run is longer than a part.
        for (region, at, pages) in [(1, 0, 10), (1, 1 << 20, 5000), (1, 1 << 25, 1), (2, 0, 3), (2, 50, PART_PAGES)] {
            parts.add(Range::pages_from(around(region).start + at * PAGE, pages), around(region));
            added += pages;
        }
        let full = added / PART_PAGES;
        assert_eq!((parts.done.len() as u64, parts.pages), (full + 1, added % PART_PAGES));
        let all: Vec<Run> = parts.done.into_iter().flatten().collect();
        assert!(all.is_sorted_by(|one, other| one.0.end <= other.0.start), "{all:?}");
        let covers = |page: u64| all.iter().any(|(range, _)| range.start <= page && page < range.end);
        assert!(covers(around(1).start) && covers(around(1).start + (1 << 25) * PAGE));
        assert!(covers(around(2).start + (50 + PART_PAGES - 1) * PAGE));
        assert!(all.iter().all(|(range, of)| of.start <= range.start && range.end <= of.end));
    }

    /// Its agent would make absent pages the kernel's, and a page that is awaited would read zero.
    #[test]
    fn moved_pages_are_brought_in_before_a_client_leaves() {
        let Some((client, memory, agent)) = linked(2) else { return };
        let (_cold, group) = group();
        let [to, from] = [memory.addr() + PAGE, 1 << 30];
        group.tier.store(client.client_id, from / PAGE, &[7; PAGE_SIZE], Effort::Fast).unwrap();
        client_tests::await_moved(&client, from, to);
        client.lent.store(true, Ordering::Relaxed);
        let is_there = std::thread::scope(|scope| {
            let asked = scope.spawn(|| {
                let mut request = [0; 256];
                let (len, _) = pagefold_os::sock::receive(&agent, &mut request, 0).unwrap();
                let there = client.uffd.zero(Range::pages_from(to, 1), 0).1 == Some(Errno(libc::EEXIST));
                pagefold_os::sock::send(&agent, &request[..len], &[]).unwrap();
                there
            });
            unpark(&group, &client);
            asked.join().unwrap()
        });
        assert!(is_there && lock(&client.link).is_none() && !client.lent.load(Ordering::Relaxed));
        // SAFETY: there, mapped and ours.
        assert_eq!(unsafe { (to as *const u8).read_volatile() }, 7);
    }

    /// A bare mremap(2) may take it to where the missing mode has just ended.
    #[test]
    fn the_missing_mode_ends_when_nothing_is_out() {
        let Some((mut client, memory, agent)) = linked(1) else { return };
        let dir = tempfile::tempdir().unwrap();
        Arc::get_mut(&mut client).unwrap().limits = limited(dir.path(), 999, 1000);
        let (_cold, group) = group();
        let page = memory.addr() / PAGE;
        group.tier.store(client.client_id, page, &[7; PAGE_SIZE], Effort::Fast).unwrap();
        client.table.find_or_add(memory.addr()).unwrap();
        client.table.set_state(memory.addr(), EVICTED);
        let asks = beside_agent(&agent, || {
            [(); 2].map(|()| {
                let came = unpark(&group, &client);
                limited(dir.path(), 100, 1000);
                came
            })
        });
        // For its regions, when the page was there.
        assert_eq!(asks, ([0, 1], 1));
    }
}
