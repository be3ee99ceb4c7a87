//! Which pages go out and when, and how they are brought back at once.
//!
//! One thread per domain. It only *stores* pages that are resident and *asks*
//! agents to let go of them; what comes back by itself is
//! [the client's](crate::cold::client) affair.
//!
//! **Probation is the first cooling.** A page that was not written for long is
//! stored by LZ4 and leaves the client; a read brings it back, and it must then
//! be silent twice as long before it is tried again. So reads are noticed at
//! the price of a fault, as they would be if the page only lay aside, but the
//! memory is free meanwhile. What stays silent is made denser by `Tier::tick`.

use crate::cold::Group;
use crate::cold::agent_connection::{ColdLink, Gone};
use crate::cold::client::{Ahead, CLUSTER_PAGES, Client};
use crate::cold::evict::transfer::{Run, put_all};
use crate::memory_limits::{SHORT, TIGHT};
use pagefold_os::sync::lock;
use pagefold_os::{PAGE_SIZE, Range, pagemap, sched};
use pagefold_protocol::residency_map::{CHUNK_BYTES, CHUNK_PAGES, EVICTED};
use pagefold_tier::policy::{Governor, Limits, Pace, Seen};
use pagefold_tier::{Effort, Tier};
use std::collections::{HashMap, VecDeque};
use std::sync::atomic::Ordering;
use std::sync::{Arc, TryLockError};
use std::time::{Duration, Instant};

const PAGE: u64 = PAGE_SIZE as u64;
/// What such a client is brought down to.
const RELIEVED: f64 = 0.92;
/// A page that came back so many times sooner than most is in use.
const SOON: f64 = 4.0;
/// Pages remembered as touched lately: they come first on unpark.
const TOUCHED_MAX: usize = 1 << 16;
/// Pages per turn that the pump takes of one client before it looks after the others.
const TURN_PAGES: u64 = 65_536;

/// Ages of the pages of a chunk, in ticks, how often each came back too early, and when it went out last, in moments.
struct Ages {
    age: [u8; CHUNK_PAGES],
    strikes: [u8; CHUNK_PAGES],
    left: [u16; CHUNK_PAGES],
}

impl Ages {
    fn new() -> Box<Ages> {
        Box::new(Ages { age: [0; CHUNK_PAGES], strikes: [0; CHUNK_PAGES], left: [0; CHUNK_PAGES] })
    }
}

/// What a moment is, in milliseconds: their number wraps after an hour.
const MOMENT_MS: u64 = 64;

/// The moment now.
fn moment() -> u16 {
    (sched::quick_monotonic_ns() / 1_000_000 / MOMENT_MS) as u16
}

/// What the pump knows of a client.
#[derive(Default)]
pub(crate) struct Policy {
    governor: Option<Governor>,
    stepped: Option<Instant>,
    /// When memory was short last.
    shorted: Option<Instant>,
    fault_ns: u64,
    regions: Vec<Range>,
    chunks: HashMap<u64, Box<Ages>>,
    touched: Vec<u64>,
    pub(crate) pace: Option<Pace>,
    /// Where the last turn of putting out ended.
    hand: u64,
    /// How long pages stayed out that came back lately, in moments.
    away: f64,
}

/// Calls `f` with the parts of `range` whose pages match `query`.
fn scan(client: &Client, range: Range, query: pagemap::Query, mut f: impl FnMut(&pagemap::Region)) -> Result<(), Gone> {
    let mut found = [pagemap::Region::default(); 512];
    let mut start = range.start;
    while start < range.end {
        let part = Range { start, end: range.end };
        let (count, walked) = pagemap::scan(&client.pagemap, part, query, &mut found).map_err(|_| Gone)?;
        found[..count].iter().for_each(&mut f);
        if walked <= start {
            break;
        }
        start = walked;
    }
    Ok(())
}

/// Resident pages of the program's own: in memory, not the kernel's zero page, no file's.
fn resident() -> pagemap::Query {
    let all_of = pagemap::PRESENT | pagemap::PFNZERO | pagemap::FILE;
    pagemap::Query {
        all_of,
        inverted: pagemap::PFNZERO | pagemap::FILE,
        report: pagemap::PRESENT,
        ..Default::default()
    }
}

/// Resident pages of some ranges, found when they are asked for: who puts them out need not wait for the last.
struct Found<'a> {
    client: &'a Client,
    parts: std::vec::IntoIter<Run>,
    /// What is left of a part, and the managed range around it.
    rest: Run,
    found: VecDeque<Run>,
    is_gone: bool,
}

/// Addresses that are looked at at once.
const LOOK_BYTES: u64 = 16 << 20;

impl<'a> Found<'a> {
    fn of(client: &'a Client, parts: Vec<Run>) -> Found<'a> {
        let nothing = Range { start: 0, end: 0 };
        Found { client, parts: parts.into_iter(), rest: (nothing, nothing), found: VecDeque::new(), is_gone: false }
    }
}

impl Iterator for Found<'_> {
    type Item = Run;

    fn next(&mut self) -> Option<Run> {
        while self.found.is_empty() && !self.is_gone {
            if self.rest.0.is_empty() {
                self.rest = self.parts.next()?;
                continue;
            }
            let (rest, around) = &mut self.rest;
            let piece = Range { start: rest.start, end: rest.end.min(rest.start + LOOK_BYTES) };
            rest.start = piece.end;
            let found = &mut self.found;
            let seen = scan(self.client, piece, resident(), |run| {
                found.push_back((Range { start: run.start, end: run.end }, *around));
            });
            self.is_gone = seen.is_err();
        }
        self.found.pop_front()
    }
}

/// Puts out what is resident in `parts`.
fn put_out_found(
    client: &Client,
    link: &mut ColdLink,
    tier: &Tier,
    parts: Vec<Run>,
    crowded: Effort,
) -> Result<u64, Gone> {
    let mut found = Found::of(client, parts);
    let gone = put_all(client, link, tier, &mut found, crowded)?;
    if found.is_gone { Err(Gone) } else { Ok(gone) }
}

impl Policy {
    /// Looks which pages were written since the last look, and lets the others grow older.
    fn look(&mut self, client: &Client, link: &mut ColdLink, tier: &Tier, short: bool) -> Result<(), Gone> {
        let regions = link.regions()?;
        if regions != self.regions {
            link.watch(&regions)?;
            self.set_regions(regions);
        }
        for ages in self.chunks.values_mut() {
            for age in &mut ages.age {
                *age = age.saturating_add(1);
            }
        }
        let wanted = pagemap::WPALLOWED | pagemap::WRITTEN | pagemap::PRESENT;
        let query = pagemap::Query { all_of: wanted, report: wanted, flags: pagemap::PROTECT, ..Default::default() };
        for range in &self.regions {
            let chunks = &mut self.chunks;
            scan(client, *range, query, |region| {
                for addr in (region.start..region.end).step_by(PAGE_SIZE) {
                    let ages = chunks.entry(addr / CHUNK_BYTES).or_insert_with(Ages::new);
                    ages.age[(addr % CHUNK_BYTES) as usize / PAGE_SIZE] = 0;
                }
            })?;
        }
        self.welcome(client, tier, short);
        Ok(())
    }

    /// These are managed now. What is known of other addresses goes: memory may never be there again.
    fn set_regions(&mut self, regions: Vec<Range>) {
        self.chunks.retain(|chunk, _| {
            let (start, end) = (chunk * CHUNK_BYTES, (chunk + 1) * CHUNK_BYTES);
            let at = regions.partition_point(|region| region.end <= start);
            regions.get(at).is_some_and(|region| region.start < end)
        });
        self.regions = regions;
    }

    /// Takes note of what came back.
    ///
    /// It is younger than it looks. While memory is `short` everything comes back some time, and only what did so much
    /// sooner than most is worth keeping: of pages read again and again no page table tells.
    fn welcome(&mut self, client: &Client, tier: &Tier, short: bool) {
        let now = moment();
        let (mut sum, mut count) = (0.0, 0u32);
        for page in tier.take_touched(client.region) {
            if let Some(ages) = self.chunks.get_mut(&(page * PAGE / CHUNK_BYTES)) {
                let at = page as usize % CHUNK_PAGES;
                let away = f64::from(now.wrapping_sub(ages.left[at]));
                (sum, count) = (sum + away, count + 1);
                ages.age[at] = 0;
                ages.strikes[at] = if short && away * SOON > self.away {
                    ages.strikes[at] / 2
                } else {
                    ages.strikes[at].saturating_add(1).min(5)
                };
            }
            if self.touched.len() < TOUCHED_MAX {
                self.touched.push(page);
            }
        }
        if count > 0 {
            let mean = sum / f64::from(count);
            self.away = if self.away == 0.0 { mean } else { 0.8 * self.away + 0.2 * mean };
        }
    }

    /// The pages of `range` are old enough for the next turn, if nothing writes to them meanwhile. Only of what is in memory
    /// is an age kept: a program may say this of all addresses that it has.
    fn make_old(&mut self, client: &Client, range: Range) -> Result<(), Gone> {
        scan(client, range, resident(), |found| {
            for addr in (found.start..found.end).step_by(PAGE_SIZE) {
                let ages = self.chunks.entry(addr / CHUNK_BYTES).or_insert_with(Ages::new);
                let at = (addr % CHUNK_BYTES) as usize / PAGE_SIZE;
                ages.age[at] = 254;
                ages.strikes[at] = 0;
            }
        })
    }

    /// The oldest resident pages, at most `pages_max`, that were silent for `ticks` and more (more by their strikes).
    fn oldest(&mut self, client: &Client, ticks: u64, pages_max: u64) -> Result<Vec<Run>, Gone> {
        let mut by_age: Vec<Vec<Run>> = (0..=255).map(|_| Vec::new()).collect();
        for around in &self.regions {
            scan(client, *around, resident(), |region| {
                for addr in (region.start..region.end).step_by(PAGE_SIZE) {
                    let Some(ages) = self.chunks.get(&(addr / CHUNK_BYTES)) else { continue };
                    let at = (addr % CHUNK_BYTES) as usize / PAGE_SIZE;
                    let (age, strikes) = (ages.age[at], ages.strikes[at]);
                    // The effective age: a page that came back early counts as younger.
                    let age = age >> strikes;
                    if u64::from(age) < ticks {
                        continue;
                    }
                    let runs = &mut by_age[usize::from(age)];
                    match runs.last_mut() {
                        Some((range, around)) if range.end == addr && addr < around.end => range.end = addr + PAGE,
                        _ => runs.push((Range::pages_from(addr, 1), *around)),
                    }
                }
            })?;
        }
        let mut room = pages_max;
        let mut runs = Vec::new();
        let now = moment();
        for mut same_age in by_age.into_iter().rev() {
            // On from where the last turn ended: what came back behind the hand shall stay for a round.
            let behind = same_age.partition_point(|(range, _)| range.end <= self.hand);
            same_age.rotate_left(behind);
            for (range, around) in same_age {
                if room == 0 {
                    return Ok(runs);
                }
                let end = range.end.min(range.start + room * PAGE);
                room -= (end - range.start) / PAGE;
                self.hand = end;
                for addr in (range.start..end).step_by(PAGE_SIZE) {
                    if let Some(ages) = self.chunks.get_mut(&(addr / CHUNK_BYTES)) {
                        ages.left[(addr % CHUNK_BYTES) as usize / PAGE_SIZE] = now;
                    }
                }
                runs.push((Range { start: range.start, end }, around));
            }
        }
        Ok(runs)
    }
}

/// What a look at a client says about the next.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Step {
    /// There is more to do at once.
    pub more: bool,
    /// Memory may soon be short.
    pub tight: bool,
}

/// One look at one client: what is silent goes out at its governor's pace, more if memory is short. One that somebody else
/// is at work on is passed by.
pub(crate) fn step(group: &Group, client: &Arc<Client>) -> Step {
    let mut held = match client.link.try_lock() {
        Ok(held) => held,
        Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
        // Parking and unparking it may take minutes, in which others at their limits must not wait for room.
        Err(TryLockError::WouldBlock) => return Step { more: false, tight: true },
    };
    let Some(link) = held.as_mut().filter(|_| !group.is_closing()) else { return Step::default() };
    match try_step(group, client, link) {
        Ok(step) => step,
        Err(Gone) => {
            // The client's thread finds out whether the process has ended.
            link.socket.shut();
            *held = None;
            Step::default()
        }
    }
}

fn try_step(group: &Group, client: &Arc<Client>, link: &mut ColdLink) -> Result<Step, Gone> {
    let tier = &group.tier;
    let mut policy = lock(&client.policy);
    let policy = &mut *policy;
    let mut more = obey_hints(group, client, link, policy)?;
    let starved = client.starved.swap(false, Ordering::Relaxed);
    let usage = client.room.usage();
    let used = usage.share();
    let short = used > SHORT || starved;
    let due = policy.stepped.is_none_or(|at| at.elapsed() >= group.config.tick);
    let tight = short || used > TIGHT;
    if !short {
        client.called.store(false, Ordering::Release);
    }
    if !due && !short {
        return Ok(Step { more, tight });
    }
    if short {
        policy.shorted = Some(Instant::now());
    }
    let lately = policy.shorted.is_some_and(|at| at.elapsed() < 4 * group.config.tick);
    let first = policy.stepped.is_none();
    let elapsed_s = policy.stepped.map_or(0.0, |at| at.elapsed().as_secs_f64());
    if due || short && elapsed_s > 0.5 {
        policy.look(client, link, tier, lately)?;
        let tolerance = match client.tolerance_ppm.load(Ordering::Relaxed) {
            0 => group.config.tolerance,
            ppm => ppm as f64 / 1e6,
        };
        let idle_s_min = group.config.idle_min.as_secs_f64().max(0.05);
        let limits = Limits { tolerance, idle_s_min, ..Limits::default() };
        let fault_ns = client.counters.fault_ns.load(Ordering::Relaxed);
        let refault_s = (fault_ns - policy.fault_ns) as f64 / 1e9;
        policy.fault_ns = fault_ns;
        let client_stalled = client.room.stalled();
        let governor = policy.governor.get_or_insert_with(|| Governor::starting_at(limits, 12.0 * idle_s_min));
        if !first {
            policy.pace = Some(governor.step(&Seen { elapsed_s, refault_s, client_stalled, used }));
        }
        policy.stepped = Some(Instant::now());
    } else if short {
        policy.welcome(client, tier, lately);
    }
    let mut budget = 0;
    let mut ticks = 1;
    if let Some(pace) = policy.pace.filter(|_| due && !first && group.config.automatic) {
        budget = (pace.pages_per_s * group.config.tick.as_secs_f64()) as u64;
        ticks = (pace.idle_s / group.config.tick.as_secs_f64()).ceil().max(1.0) as u64;
    }
    if short {
        let excess = ((used - RELIEVED).max(0.02) * usage.limit as f64) as u64 / PAGE;
        budget = budget.max(excess).max(1024);
        ticks = 0;
    }
    budget = budget.min(TURN_PAGES);
    if budget == 0 {
        return Ok(Step { more, tight });
    }
    let runs = policy.oldest(client, ticks, budget)?;
    let gone = put_all(client, link, tier, runs, Effort::Fast)?;
    if gone > 0 {
        more |= short;
        client.called.store(false, Ordering::Release);
    }
    Ok(Step { more, tight })
}

/// What the program itself said by madvise(2).
fn obey_hints(group: &Group, client: &Arc<Client>, link: &mut ColdLink, policy: &mut Policy) -> Result<bool, Gone> {
    let mut hints = Vec::new();
    client.table.take_hints(|number, start, end, advice| hints.push((number, Range { start, end }, advice)));
    let Some(first) = hints.iter().map(|(number, ..)| *number).min() else { return Ok(false) };
    // In the order in which they were given; the number wraps.
    hints.sort_unstable_by_key(|(number, ..)| number.wrapping_sub(first.wrapping_add(1 << 31)));
    let regions = link.regions()?;
    link.watch(&regions)?;
    policy.set_regions(regions);
    for (_, range, advice) in hints {
        let parts: Vec<Run> = policy
            .regions
            .iter()
            .map(|region| {
                let part = Range { start: range.start.max(region.start), end: range.end.min(region.end) };
                (part, *region)
            })
            .filter(|(part, _)| part.start < part.end)
            .collect();
        match advice {
            libc::MADV_PAGEOUT => {
                put_out_found(client, link, &group.tier, parts, Effort::Fast)?;
            }
            libc::MADV_COLD => {
                for (part, _) in &parts {
                    policy.make_old(client, *part)?;
                }
            }
            libc::MADV_WILLNEED => {
                bring_back(group, client, &pages_out(&group.tier, client, range));
            }
            _ => {}
        }
    }
    Ok(true)
}

/// Puts everything of a client out that can go; returns the pages that went. What is quickest comes first: the cleaner
/// makes dense what is out.
pub(crate) fn park(group: &Group, client: &Arc<Client>) -> Option<u64> {
    let mut held = lock(&client.link);
    let link = held.as_mut().filter(|_| !group.is_closing())?;
    client.set_parked(true);
    let mut all = || -> Result<u64, Gone> {
        let regions = link.regions()?;
        link.watch(&regions)?;
        let mut policy = lock(&client.policy);
        policy.set_regions(regions.clone());
        // What came back in the life that ends now comes back first in the next one.
        policy.touched = group.tier.take_touched(client.region);
        drop(policy);
        let parts = regions.into_iter().map(|region| (region, region)).collect();
        put_out_found(client, link, &group.tier, parts, Effort::Dense)
    };
    match all() {
        Ok(gone) => Some(gone),
        Err(Gone) => {
            link.socket.shut();
            *held = None;
            None
        }
    }
}

/// Brings everything of a client back that there is room for, the pages touched last time first, and lets one go that is
/// merged live as well if that is all; returns the pages that came.
pub(crate) fn unpark(group: &Group, client: &Arc<Client>) -> u64 {
    client.set_parked(false);
    // Nothing goes out meanwhile: what was loaded must still be what is out when it is copied.
    let mut held = lock(&client.link);
    let mut first: Vec<u64> = {
        let mut policy = lock(&client.policy);
        policy.chunks.clear();
        let mut touched = std::mem::take(&mut policy.touched);
        touched.extend(group.tier.take_touched(client.region));
        touched
    };
    first.sort_unstable();
    first.dedup();
    let before = client.counters.pages_back.load(Ordering::Relaxed);
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
    let came = client.counters.pages_back.load(Ordering::Relaxed) - before;
    // What its limit has no room for stays out under the lease: to end that its agent brings all, whatever it takes.
    // Nor may it have to bring what could not be read or copied for now: it would wait for us with its guard held.
    let everything = Range { start: 0, end: u64::MAX };
    let all_here = pages_out(&group.tier, client, everything).is_empty();
    if !client.bring_all_moved(&group.tier) {
        return came;
    }
    if client.leased.load(Ordering::Relaxed) && all_here {
        if let Some(mut link) = held.take() {
            link.leave();
            // That it has left is seen later.
            client.leased.store(false, Ordering::Relaxed);
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

/// The pages of `range` that are out: of what the tier has, not of what the table claims, which may be far more.
fn pages_out(tier: &Tier, client: &Client, range: Range) -> Vec<u64> {
    let (mut from, end) = (range.start / PAGE, range.end / PAGE);
    let mut pages = Vec::new();
    while from < end
        && let stored = tier.neighbours(client.region, from, 4096)
        && let Some(last) = stored.last()
    {
        from = last + 1;
        pages.extend(stored.into_iter().filter(|page| *page < end && client.table.state(page * PAGE) == EVICTED));
    }
    pages
}

/// Brings these pages back, as far as they are out and the client's limit has room for them. The caller holds the client's
/// link.
fn bring_back(group: &Group, client: &Client, pages: &[u64]) {
    let tier = &group.tier;
    let mut buffer = vec![[0; PAGE_SIZE]; CLUSTER_PAGES];
    let mut at = 0;
    let mut refused = 0;
    while at < pages.len() && !client.gone.load(Ordering::Relaxed) {
        let mut len = 1;
        while at + len < pages.len() && len < CLUSTER_PAGES && pages[at + len] == pages[at] + len as u64 {
            len += 1;
        }
        if client.room.grant(len as u64) < len as u64 {
            // What would fill the client's limit stays out; a touch brings it when there is room.
            return;
        }
        let (start, end) = (pages[at], pages[at] + len as u64);
        // Loading needs no lock: what is true at the end counts.
        let loaded: Vec<bool> = (start..end)
            .map(|page| {
                client.table.state(page * PAGE) == EVICTED
                    && tier.load(client.region, page, &mut buffer[(page - start) as usize]).is_ok()
            })
            .collect();
        let mut again = false;
        {
            let service = client.take_service();
            if !client.take_pact(2000) {
                refused += 1;
                if refused > 1000 {
                    break;
                }
                continue;
            }
            again |= !client.copy_loaded(tier, start..end, &loaded, &buffer);
            client.table.unlock();
            drop(service);
        }
        if again && refused < 1000 {
            // Events wait, or memory does.
            refused += 1;
            client.serve(tier, &mut Ahead::default());
            if refused > 8 {
                std::thread::sleep(Duration::from_millis(1));
            }
            continue;
        }
        at += len;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cold::{Cold, Config};
    use crate::memory_limits::tests::limited;
    use pagefold_os::Errno;
    use pagefold_os::fd::Fd;
    use pagefold_os::mem::Mapping;
    use std::os::fd::IntoRawFd;

    #[test]
    fn hints_cost_what_there_is_and_not_what_they_name() {
        let Some((client, memory)) = crate::cold::client::tests::own(0, 4) else { return };
        let place = memory.addr() / PAGE;
        let source = [7_u8; PAGE_SIZE];
        // SAFETY: the source is ours.
        assert_eq!(unsafe { client.uffd.copy((place + 2) * PAGE, source.as_ptr() as u64, PAGE, 0) }.1, None);
        let everything = Range { start: 1 << 20, end: (1 << 47) - PAGE };
        let mut policy = Policy::default();
        assert!(policy.make_old(&client, everything).is_ok());
        let age =
            |page: u64| policy.chunks.get(&(page * PAGE / CHUNK_BYTES)).map(|one| one.age[page as usize % CHUNK_PAGES]);
        assert_eq!((age(place + 2), age(place + 1).unwrap_or(0)), (Some(254), 0));
        let entered = policy.chunks.len() as u64 * CHUNK_BYTES;
        assert!(entered < 1 << 36, "{entered} bytes of addresses have ages");
        // Of what a table claims counts what the tier has.
        let tier = Tier::create(pagefold_tier::Config { bytes_max: 4 << 20, ..Default::default() }, None).unwrap();
        for chunk in 1..200 {
            let index = client.table.find_or_add(chunk * CHUNK_BYTES).unwrap();
            client.table.states(index).iter().for_each(|state| state.store(EVICTED, Ordering::Relaxed));
        }
        let stored = [600, 5_000, 60_000];
        for page in stored {
            tier.store(client.region, page, &source, Effort::Fast).unwrap();
        }
        assert_eq!(pages_out(&tier, &client, everything), stored);
        assert_eq!(pages_out(&tier, &client, Range { start: 601 * PAGE, end: 60_000 * PAGE }), stored[1..2]);
    }

    /// A program that takes its memory at new addresses again and again.
    #[test]
    fn of_memory_that_is_gone_nothing_is_kept() {
        let mut policy = Policy::default();
        let region = |chunk: u64, pages| Range::pages_from(chunk * CHUNK_BYTES + 7 * PAGE, pages);
        for chunk in 2..1000 {
            policy.chunks.insert(chunk, Ages::new());
            let regions = [region(1, 1), region(chunk - 1, 1), region(chunk, CHUNK_PAGES as u64), region(5000, 1)];
            policy.set_regions(regions.to_vec());
        }
        let mut left: Vec<u64> = policy.chunks.into_keys().collect();
        left.sort_unstable();
        assert_eq!(left, [998, 999]);
    }

    /// A client that is this process and has a link, with the other end of it.
    fn linked(pages: u64) -> Option<(Arc<Client>, Mapping, Fd)> {
        let (client, memory) = crate::cold::client::tests::own(0, pages)?;
        let (ours, agent) = std::os::unix::net::UnixDatagram::pair().unwrap();
        // SAFETY: each descriptor has one owner.
        let [ours, agent] = [ours, agent].map(|one| unsafe { Fd::from_raw(one.into_raw_fd()) });
        *lock(&client.link) = Some(ColdLink::new(Arc::new(ours.into())).unwrap());
        Some((Arc::new(client), memory, agent))
    }

    /// Does `act` beside an agent that manages nothing; tells how often that was asked for something.
    fn beside_agent<T>(agent: &Fd, act: impl FnOnce() -> T) -> (T, u32) {
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

    fn group() -> (Cold, Arc<Group>) {
        let cold = Cold::new(Config::default(), std::path::Path::new("/nowhere"));
        let group = cold.group(&(0, "default".into()), 8 << 20).unwrap();
        (cold, group)
    }

    #[test]
    fn nothing_goes_out_behind_an_orderly_stop() {
        let Some((client, memory, agent)) = linked(4) else { return };
        let (cold, group) = group();
        assert!(cold.stop());
        client.table.hint(memory.addr(), memory.addr() + 4 * PAGE, libc::MADV_PAGEOUT);
        client.starved.store(true, Ordering::Relaxed);
        let step = step(&group, &client);
        let parked = park(&group, &client);
        let mut request = [0; 256];
        let asked = pagefold_os::sock::receive(&agent, &mut request, libc::MSG_DONTWAIT);
        assert_eq!(asked.err(), Some(Errno(libc::EAGAIN)), "the agent was asked for pages");
        assert!(!step.more && parked.is_none() && lock(&client.link).is_some());
    }

    /// Its agent would make absent pages the kernel's, and a page that is awaited would read zero.
    #[test]
    fn what_was_moved_is_there_before_a_client_is_let_go() {
        let Some((client, memory, agent)) = linked(2) else { return };
        let (_cold, group) = group();
        let [to, from] = [memory.addr() + PAGE, 1 << 30];
        group.tier.store(client.region, from / PAGE, &[7; PAGE_SIZE], Effort::Fast).unwrap();
        crate::cold::client::tests::await_moved(&client, from, to);
        client.leased.store(true, Ordering::Relaxed);
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
        assert!(is_there && lock(&client.link).is_none() && !client.leased.load(Ordering::Relaxed));
        // SAFETY: there, mapped and ours.
        assert_eq!(unsafe { (to as *const u8).read_volatile() }, 7);
    }

    /// A bare mremap(2) may take it to where the missing mode has just ended.
    #[test]
    fn the_missing_mode_ends_when_nothing_is_out() {
        let Some((mut client, memory, agent)) = linked(1) else { return };
        let dir = tempfile::tempdir().unwrap();
        Arc::get_mut(&mut client).unwrap().room = limited(dir.path(), 999, 1000);
        let (_cold, group) = group();
        let page = memory.addr() / PAGE;
        group.tier.store(client.region, page, &[7; PAGE_SIZE], Effort::Fast).unwrap();
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

    #[test]
    fn who_is_not_short_any_more_may_call_again() {
        let Some((mut client, _memory, agent)) = linked(1) else { return };
        // Whatever the machine is short of.
        let dir = tempfile::tempdir().unwrap();
        Arc::get_mut(&mut client).unwrap().room = limited(dir.path(), 100, 1000);
        let (_cold, group) = group();
        let looked = beside_agent(&agent, || {
            [true, false].map(|starved| {
                client.starved.store(starved, Ordering::Relaxed);
                client.called.store(true, Ordering::Relaxed);
                let step = step(&group, &client);
                (step.tight, client.called.load(Ordering::Relaxed))
            })
        })
        .0;
        assert_eq!(looked[0], (true, true), "the pump looks again in any case");
        assert!(!looked[1].1);
    }

    #[test]
    fn the_pump_does_not_wait_for_whoever_parks() {
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
        assert!(!waits, "the pump waits for the link");
    }
}
