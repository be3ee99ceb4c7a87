//! The evictor: which pages leave their clients, and when.
//!
//! One thread for each domain. It only *stores* pages that are resident, and *asks* agents to drop them; the client's own
//! thread handles pages that fault back in. What is known of a page's age is in [`PageAges`](crate::cold::client::ages).

use super::batch::{Run, runs_within};
use super::bring_back::{bring_back, pages_out};
use super::resident::{evict_resident, resident, scan};
use super::transfer::put_all;
use crate::cold::agent_connection::{AgentConnection, Gone};
use crate::cold::client::Client;
use crate::cold::client::ages::{EvictionState, PageAges, now};
use crate::cold::group::Group;
use crate::cold::idle::signals;
use crate::memory_limits::{SHORT, TIGHT, Usage};
use pagefold_os::sync::{at_once, lock};
use pagefold_os::{PAGE_SIZE, Range, pagemap};
use pagefold_tier::Effort;
use pagefold_tier::policy::{Governor, Limits, Seen};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

const PAGE: u64 = PAGE_SIZE as u64;
/// Share of its limit down to which a client that is short of memory is brought.
const RELIEVED: f64 = 0.92;
/// Most pages that the evictor takes of one client before it looks after the others.
const TURN_PAGES: u64 = 65_536;
/// Fewest pages that a client that is short of memory is relieved of in a turn.
const RELIEF_PAGES_MIN: u64 = 1024;

/// What a look at a client says about the next.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Step {
    /// There is more to do right away.
    pub more: bool,
    /// Memory may soon be short.
    pub tight: bool,
}

/// One look at one client: silent pages are evicted at its governor's pace, and more of them if memory is short. A client
/// that is being parked or unparked is skipped.
pub(crate) fn step(group: &Group, client: &Arc<Client>) -> Step {
    let Some(mut held) = at_once(client.link.try_lock()) else {
        // Parking and unparking may take minutes, in which others at their limits must not wait for memory.
        return Step { more: false, tight: true };
    };
    let Some(link) = held.as_mut().filter(|_| !group.is_closing()) else { return Step::default() };
    let stepped = try_step(group, client, link);
    // The park policy must not take it for the program's.
    client.note_agent_cpu(link.agent_cpu_ns);
    match stepped {
        Ok(step) => step,
        Err(Gone) => {
            // The client's thread finds out whether the process has ended.
            link.socket.shut();
            *held = None;
            Step::default()
        }
    }
}

fn try_step(group: &Group, client: &Arc<Client>, link: &mut AgentConnection) -> Result<Step, Gone> {
    let mut state = lock(&client.eviction);
    let EvictionState { ages, pacing } = &mut *state;
    let mut more = obey_hints(group, client, link, ages)?;
    let lacks_memory = client.lacks_memory.swap(false, Ordering::Relaxed);
    let usage = client.limits.usage();
    let used = usage.share();
    let short = used > SHORT || lacks_memory;
    let due = pacing.stepped.is_none_or(|at| at.elapsed() >= group.config.tick);
    let tight = short || used > TIGHT;
    if !short {
        client.rang_evictor.store(false, Ordering::Release);
    }
    if !due && !short {
        return Ok(Step { more, tight });
    }
    if signals::is_suspended(client.pid) {
        // Its agent cannot answer, and would be taken for gone.
        return Ok(Step { more: false, tight });
    }
    if short {
        pacing.shorted = Some(Instant::now());
    }
    let lately_short = pacing.shorted.is_some_and(|at| at.elapsed() < 4 * group.config.tick);
    let first = pacing.stepped.is_none();
    let elapsed_s = pacing.stepped.map_or(0.0, |at| at.elapsed().as_secs_f64());
    if due || short && elapsed_s > 0.5 {
        look(ages, client, link)?;
        ages.record_refaults(group.tier.take_touched(client.client_id), now(), lately_short);
        set_pace(group, client, &mut state, elapsed_s, used);
    } else {
        ages.record_refaults(group.tier.take_touched(client.client_id), now(), lately_short);
    }
    let EvictionState { ages, pacing } = &mut *state;
    let tick_s = group.config.tick.as_secs_f64();
    let (mut ticks, mut budget) = (1, 0);
    if let Some(pace) = pacing.pace.filter(|_| due && !first && group.config.automatic) {
        budget = (pace.pages_per_s * tick_s) as u64;
        ticks = (pace.idle_s / tick_s).ceil().max(1.0) as u64;
    }
    if short {
        budget = budget.max(pages_to_relieve(usage));
        ticks = 0;
    }
    if budget == 0 {
        return Ok(Step { more, tight });
    }
    let runs = ages.take_oldest(ticks, budget.min(TURN_PAGES), now(), |range, found| {
        scan(client, range, resident(), |region| found(Range { start: region.start, end: region.end }))
    })?;
    let gone = put_all(client, link, &group.tier, runs, Effort::Fast)?;
    if gone > 0 {
        more |= short;
        client.rang_evictor.store(false, Ordering::Release);
    }
    Ok(Step { more, tight })
}

/// Pages that a client must be relieved of.
fn pages_to_relieve(usage: Usage) -> u64 {
    let excess = ((usage.share() - RELIEVED).max(0.02) * usage.limit as f64) as u64 / PAGE;
    excess.max(RELIEF_PAGES_MIN)
}

/// Asks the governor for the pace until the next look, from the time that the client lost to faults since the last one.
fn set_pace(group: &Group, client: &Client, state: &mut EvictionState, elapsed_s: f64, used: f64) {
    let pacing = &mut state.pacing;
    let tolerance = match client.tolerance_ppm.load(Ordering::Relaxed) {
        0 => group.config.tolerance,
        ppm => ppm as f64 / 1e6,
    };
    let idle_s_min = group.config.idle_min.as_secs_f64().max(0.05);
    let limits = Limits { tolerance, idle_s_min, ..Limits::default() };
    let fault_ns = client.counters.fault_ns.load(Ordering::Relaxed);
    let refault_s = (fault_ns - pacing.fault_ns) as f64 / 1e9;
    pacing.fault_ns = fault_ns;
    let client_stalled = client.limits.stalled();
    let governor = pacing.governor.get_or_insert_with(|| Governor::starting_at(limits, 12.0 * idle_s_min));
    if pacing.stepped.is_some() {
        pacing.pace = Some(governor.step(&Seen { elapsed_s, refault_s, client_stalled, used }));
    }
    pacing.stepped = Some(Instant::now());
}

/// Looks which pages were written since the last look, and lets the others grow older.
fn look(ages: &mut PageAges, client: &Client, link: &mut AgentConnection) -> Result<(), Gone> {
    let regions = link.regions()?;
    if regions != ages.regions() {
        link.watch(&regions)?;
        ages.set_regions(regions);
    }
    ages.grow_older();
    let wanted = pagemap::WPALLOWED | pagemap::WRITTEN | pagemap::PRESENT;
    let query = pagemap::Query { all_of: wanted, report: wanted, flags: pagemap::PROTECT, ..Default::default() };
    let mut written = 0;
    for range in ages.regions().to_vec() {
        scan(client, range, query, |region| {
            written += (region.end - region.start) / PAGE;
            ages.note_written(Range { start: region.start, end: region.end });
        })?;
    }
    client.counters.pages_written.fetch_add(written, Ordering::Relaxed);
    Ok(())
}

/// The resident pages of `range` are old enough for the next turn.
fn make_old(ages: &mut PageAges, client: &Client, range: Range) -> Result<(), Gone> {
    scan(client, range, resident(), |found| ages.make_old(Range { start: found.start, end: found.end }))
}

/// Does what the program asked for by madvise(2); true if it asked for anything.
fn obey_hints(
    group: &Group,
    client: &Arc<Client>,
    link: &mut AgentConnection,
    ages: &mut PageAges,
) -> Result<bool, Gone> {
    let mut hints = Vec::new();
    client.table.take_hints(|number, start, end, advice| hints.push((number, Range { start, end }, advice)));
    let Some(first) = hints.iter().map(|(number, ..)| *number).min() else { return Ok(false) };
    // In the order in which they were given; the number wraps.
    hints.sort_unstable_by_key(|(number, ..)| number.wrapping_sub(first.wrapping_add(1 << 31)));
    let regions = link.regions()?;
    link.watch(&regions)?;
    ages.set_regions(regions);
    for (_, range, advice) in hints {
        let parts: Vec<Run> = runs_within(range, ages.regions()).collect();
        match advice {
            libc::MADV_PAGEOUT => {
                evict_resident(client, link, &group.tier, parts, Effort::Fast)?;
            }
            libc::MADV_COLD => {
                for (part, _) in parts {
                    make_old(ages, client, part)?;
                }
            }
            libc::MADV_WILLNEED => bring_back(group, client, &pages_out(&group.tier, client, range)),
            _ => {}
        }
    }
    Ok(true)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::super::park::park;
    use super::*;
    use crate::cold::client::tests as client_tests;
    use crate::cold::client::tests::own;
    use crate::cold::config::Config;
    use crate::cold::handover::shutdown;
    use crate::cold::tiers::Tiers;
    use crate::memory_limits::tests::limited;
    use pagefold_os::fd::Fd;
    use pagefold_os::mem::Mapping;
    use pagefold_os::{ADDRESS_END, Errno};
    use pagefold_protocol::residency_map::{CHUNK_BYTES, EVICTED};
    use pagefold_tier::Tier;
    use std::os::fd::IntoRawFd;
    use std::time::Duration;

    #[test]
    fn hints_cost_what_there_is_and_not_what_they_name() {
        let Some((client, memory)) = client_tests::own(0, 4) else { return };
        let place = memory.addr() / PAGE;
        let source = [7_u8; PAGE_SIZE];
        // SAFETY: the source is ours.
        assert_eq!(unsafe { client.uffd.copy((place + 2) * PAGE, source.as_ptr() as u64, PAGE, 0) }.1, None);
        let everything = Range { start: 1 << 20, end: ADDRESS_END - PAGE };
        let mut ages = PageAges::default();
        assert!(make_old(&mut ages, &client, everything).is_ok());
        assert_eq!((ages.age(place + 2), ages.age(place + 1).unwrap_or(0)), (Some(254), 0));
        let entered = ages.covered_bytes();
        assert!(entered < 1 << 36, "{entered} bytes of addresses have ages");
        // Of what a table claims counts what the tier has.
        let tier = Tier::create(pagefold_tier::Config { bytes_max: 4 << 20, ..Default::default() }, None).unwrap();
        for chunk in 1..200 {
            let index = client.table.find_or_add(chunk * CHUNK_BYTES).unwrap();
            client.table.states(index).iter().for_each(|state| state.store(EVICTED, Ordering::Relaxed));
        }
        let stored = [600, 5_000, 60_000];
        for page in stored {
            tier.store(client.client_id, page, &source, Effort::Fast).unwrap();
        }
        assert_eq!(pages_out(&tier, &client, everything), stored);
        assert_eq!(pages_out(&tier, &client, Range { start: 601 * PAGE, end: 60_000 * PAGE }), stored[1..2]);
    }

    /// A client that is this process and has a link, with the other end of it.
    pub(crate) fn linked(pages: u64) -> Option<(Arc<Client>, Mapping, Fd)> {
        let (client, memory) = own(0, pages)?;
        let (ours, agent) = std::os::unix::net::UnixDatagram::pair().unwrap();
        // SAFETY: each descriptor has one owner.
        let [ours, agent] = [ours, agent].map(|one| unsafe { Fd::from_raw(one.into_raw_fd()) });
        *lock(&client.link) = Some(AgentConnection::new(Arc::new(ours.into())).unwrap());
        Some((Arc::new(client), memory, agent))
    }

    /// Does `act` beside an agent that manages nothing; tells how often that was asked for something.
    pub(crate) fn beside_agent<T>(agent: &Fd, act: impl FnOnce() -> T) -> (T, u32) {
        let over = std::sync::atomic::AtomicBool::new(false);
        pagefold_os::sock::set_timeout(agent, 10).unwrap();
        std::thread::scope(|scope| {
            let asked = scope.spawn(|| {
                let (mut request, mut asked) = ([0; 256], 0);
                while !over.load(Ordering::Acquire) {
                    if let Ok((len, _)) = pagefold_os::sock::receive(agent, &mut request, 0) {
                        asked += 1;
                        pagefold_os::sock::send(agent, &request[..len], &[]).unwrap();
                    }
                }
                asked
            });
            let done = act();
            over.store(true, Ordering::Release);
            (done, asked.join().unwrap())
        })
    }

    pub(crate) fn group() -> (Tiers, Arc<Group>) {
        let cold = Tiers::new(Config::default(), std::path::Path::new("/nowhere"));
        let group = cold.group(&(0, "default".into()), 8 << 20).unwrap();
        (cold, group)
    }

    #[test]
    fn nothing_is_evicted_after_an_orderly_stop() {
        let Some((client, memory, agent)) = linked(4) else { return };
        let (cold, group) = group();
        assert!(shutdown::stop(&cold));
        client.table.hint(memory.addr(), memory.addr() + 4 * PAGE, libc::MADV_PAGEOUT);
        client.lacks_memory.store(true, Ordering::Relaxed);
        let step = step(&group, &client);
        let parked = park(&group, &client);
        let mut request = [0; 256];
        let asked = pagefold_os::sock::receive(&agent, &mut request, libc::MSG_DONTWAIT);
        assert_eq!(asked.err(), Some(Errno(libc::EAGAIN)), "the agent was asked for pages");
        assert!(!step.more && parked.is_none() && lock(&client.link).is_some());
    }

    #[test]
    fn a_client_that_is_no_longer_short_may_call_again() {
        let Some((mut client, _memory, agent)) = linked(1) else { return };
        // Whatever the machine is short of.
        let dir = tempfile::tempdir().unwrap();
        Arc::get_mut(&mut client).unwrap().limits = limited(dir.path(), 100, 1000);
        let (_cold, group) = group();
        let looked = beside_agent(&agent, || {
            [true, false].map(|lacks_memory| {
                client.lacks_memory.store(lacks_memory, Ordering::Relaxed);
                client.rang_evictor.store(true, Ordering::Relaxed);
                let step = step(&group, &client);
                (step.tight, client.rang_evictor.load(Ordering::Relaxed))
            })
        })
        .0;
        assert_eq!(looked[0], (true, true), "the evictor looks again in any case");
        assert!(!looked[1].1);
    }

    #[test]
    fn the_evictor_does_not_wait_for_a_park() {
        let Some((client, _memory, _agent)) = linked(1) else { return };
        let (_cold, group) = group();
        let (done, is_done) = std::sync::mpsc::channel();
        let held = lock(&client.link);
        let waits = std::thread::scope(|scope| {
            scope.spawn(|| done.send(step(&group, &client)).unwrap());
            let step = is_done.recv_timeout(Duration::from_secs(60));
            drop(held);
            step.is_err_and(|_| true)
        });
        assert!(!waits, "the evictor waits for the link");
    }
}
