//! A domain: its clients, its index, its pool, and the step that a worker takes with one client.
//!
//! Several workers call [`Domain::step`]; a client is in the hands of one
//! worker at a time, index and pool are everybody's. What one client's step
//! finds out about another client's page becomes a notice for that client.

mod compact;
mod heal;
mod huge_pages;
mod index_entry;
mod index_stage;
mod inherit;
mod ledger;
mod listed_ranges;
mod member;
mod not_inherited;
mod remap;
mod replicated_slots;
mod slot_budget;
mod sweep;
mod unlisted_slots;
mod watch_stage;
mod written_pages;

use index_entry::{ChunkRefs, IndexEntry};
use member::{Member, Work};
use not_inherited::NotInherited;

use crate::client::{Client, Gone};
use crate::page::PageState;
use crate::stats::{ClientStats, DomainCounters, DomainStats, add, why_word};
use crate::table::{Chunk, Table};
use llds::sd_tree::{SdTree, SweepCursor};
use pagefold_os::sync::{at_once, lock, read, write};
use pagefold_os::{PAGE_SIZE, Page, Range};
use pagefold_pool::{Key, Pool, Room, SLOTS_PER_SEGMENT, Slot};
use pagefold_protocol::message::RefusalReason;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, RwLock};

/// Tells the clients of a domain apart; never reused.
pub type ClientId = u32;

/// How a domain works.
#[derive(Clone, Debug)]
pub struct Config {
    /// Its name.
    pub name: String,
    /// User id of its clients, if the pool tells its segments from another user's.
    pub user: Option<u32>,
    /// One pass of the watch stage, in nanoseconds.
    pub period_ns: u64,
    /// Largest size of the pool in bytes.
    pub pool_max_bytes: u64,
    /// Whether there is memory for more of it.
    pub room: Room,
    /// Mappings that merging may add to one client, [`VMA_BUDGET_MAX`](crate::client::VMA_BUDGET_MAX) at most.
    pub vma_budget: u64,
    /// Candidates that the index is made for at first; it grows.
    pub index_capacity: usize,
    /// Periods after which a broken page is healed.
    pub heal_periods: u32,
    /// Predict that the page after a merged one shows the slot after its slot, and let the comparison prove it.
    pub predict: bool,
    /// Number of slots without sharers, in the whole pool, from which on segments with many of them are emptied.
    pub dead_slots_min: u64,
    /// Equal slots that a content gets where very many neighbours have it; 1 for no such runs.
    pub copies: u32,
    /// Neighbours with one content from which on it gets them.
    pub copies_from: u32,
    /// Pages of a client from which on its faults are counted: while there are none, most looks are left out. Below, a look
    /// costs no more than the count.
    pub idle_pages_min: u64,
}

impl Default for Config {
    fn default() -> Self {
        Config {
            name: "default".into(),
            user: None,
            period_ns: 1_000_000_000,
            pool_max_bytes: 1 << 40,
            room: Room::default(),
            vma_budget: 16_000,
            index_capacity: 1 << 16,
            heal_periods: 3,
            predict: true,
            dead_slots_min: u64::from(SLOTS_PER_SEGMENT),
            copies: 64,
            // A page costs as much as 17 mappings.
            copies_from: 64 * 17,
            // 32 MiB.
            idle_pages_min: 8192,
        }
    }
}

/// Time after which room for fetched pages is taken to be unused.
const BUFFERS_UNUSED_NS: u64 = 2_000_000_000;

/// Periods that short runs wait at most for others that may lie beside them.
const SHORT_WAIT_PERIODS: u64 = 3;

/// Mappings that a run of slots between plain pages adds.
const EDGES: i64 = 2;

/// The managed memory of a client, as the process listed it last.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Managed {
    /// In order of address; none overlaps another.
    pub ranges: Vec<Range>,
    /// The client's [generation](Client::generation) before it listed them; `None` before the first list.
    pub generation: Option<u64>,
}

/// What became of a client's shared pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Unmerged {
    /// Pages that are private again.
    pub pages: u64,
    /// Pages that the pool backs still: a device may be reading into them, or there is no memory for copies.
    pub left: u64,
}

/// What a step leaves to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Next {
    /// When the client wants its next step, in the clock of `now_ns`.
    pub due_ns: u64,
    /// Whether the step did anything beyond looking.
    pub worked: bool,
}

/// Clients that may share pages with each other, and with no others.
pub struct Domain {
    config: Config,
    key: Key,
    index: SdTree,
    pool: Pool,
    /// Locked to be changed for one chunk at a time: others wait while it is.
    chunks: RwLock<ChunkRefs>,
    members: RwLock<BTreeMap<ClientId, Arc<Member>>>,
    /// Held shared while a member is added or removed, and exclusively while all members' pages are counted. First of all
    /// locks.
    roster: RwLock<()>,
    /// Audits that want all clients at rest: no step begins.
    auditing: AtomicUsize,
    next_id: AtomicU64,
    /// The latest time that a step was told.
    now_ns: AtomicU64,
    /// Members that have pages to look up.
    indexing: AtomicUsize,
    sweep: Mutex<Sweep>,
    /// Changes whenever something happened that may leave dead entries in the index.
    index_changes: AtomicU64,
    compaction: Mutex<compact::Compaction>,
    /// First slots of runs of equal ones.
    repeats: RwLock<BTreeSet<Slot>>,
    unlisted: Mutex<unlisted_slots::UnlistedSlots>,
    /// Room for fetched pages, for each worker at work one.
    buffers: Mutex<Vec<Vec<Page>>>,
    /// When the last of them was used, as a step was told the time.
    buffers_used_ns: AtomicU64,
    counters: DomainCounters,
}

/// The sweep of the index for dead entries: a part in each period, until a whole round found nothing to do.
struct Sweep {
    cursor: SweepCursor,
    /// `Domain::index_changes` when it was last looked at.
    seen: u64,
    /// Parts left of the round.
    left: usize,
}

impl Domain {
    /// Makes an empty domain with a random key.
    ///
    /// # Errors
    /// If the kernel gives neither memory nor random numbers.
    pub fn new(config: Config) -> io::Result<Domain> {
        let key = Key::random()?;
        Domain::with_key(config, key)
    }

    /// Makes an empty domain with `key`, for runs that must replay.
    ///
    /// # Errors
    /// If the kernel gives no memory.
    pub fn with_key(config: Config, key: Key) -> io::Result<Domain> {
        Ok(Domain {
            key,
            // Its bytes count towards the 16 that records may take for a page.
            index: SdTree::dense(config.index_capacity, true)?,
            pool: Pool::within(&config.name, config.pool_max_bytes, config.room.clone()).of_user(config.user),
            chunks: RwLock::default(),
            members: RwLock::default(),
            roster: RwLock::default(),
            auditing: AtomicUsize::new(0),
            next_id: AtomicU64::new(1),
            now_ns: AtomicU64::new(0),
            indexing: AtomicUsize::new(0),
            sweep: Mutex::new(Sweep { cursor: SweepCursor::new(), seen: 0, left: 0 }),
            index_changes: AtomicU64::new(0),
            compaction: Mutex::default(),
            repeats: RwLock::default(),
            unlisted: Mutex::default(),
            buffers: Mutex::default(),
            buffers_used_ns: AtomicU64::new(0),
            counters: DomainCounters::default(),
            config,
        })
    }

    /// How it works.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Its pool.
    pub fn pool(&self) -> &Pool {
        &self.pool
    }

    /// Adds a client, due at once.
    pub fn add(&self, client: Box<dyn Client>) -> ClientId {
        let _roster = read(&self.roster);
        let id = self.next_id.fetch_add(1, Ordering::Relaxed) as ClientId;
        let lent = client.is_lent();
        let work = Work {
            client,
            table: Table::default(),
            generation: None,
            period: 0,
            next_period_ns: 0,
            mappings: 0,
            foreign: Vec::new(),
            healed_unknown: Vec::new(),
            not_inherited: NotInherited::default(),
            probes: Vec::new(),
            deferred: Vec::new(),
            deferred_mappings: 0,
            deferred_since: 0,
            held_segments: BTreeMap::new(),
            rest_until: 0,
            left_out_since: None,
            heal_from: 0,
            idle: None,
            lane: 0,
            block: index_stage::BLOCK_MIN,
            cow_breaks: 0,
            refused: BTreeMap::new(),
        };
        let member = Arc::new(Member {
            id,
            work: Mutex::new(work),
            notices: Mutex::default(),
            mappings_claimed: AtomicI64::new(0),
            due_ns: AtomicU64::new(0),
            cpu: AtomicU64::new(0),
            paused: AtomicBool::new(false),
            lent: AtomicBool::new(lent),
            gone: AtomicBool::new(false),
            indexing: AtomicBool::new(false),
            stats: Mutex::new(ClientStats { paused: lent, ..ClientStats::default() }),
            managed: Mutex::default(),
        });
        write(&self.members).insert(id, member);
        id
    }

    /// Forgets a client: it is gone, or shall not be managed. Its mappings of slots, if it lives, stay its own; the
    /// kernel keeps their memory. False if there is no such client (any more).
    pub fn remove(&self, id: ClientId) -> bool {
        let _roster = read(&self.roster);
        self.mark_index_dirty();
        let Some(member) = write(&self.members).remove(&id) else { return false };
        let mut work = lock(&member.work);
        // Set under the work lock: a worker that waits for the lock finds the mark and leaves the client alone.
        member.gone.store(true, Ordering::Release);
        self.drop_all(&mut work);
        drop(work);
        self.note_indexing(&member, false);
        if read(&self.members).is_empty() {
            // No client is left that would do it in its period.
            self.pool.close_open_segments();
        }
        self.release_segments();
        true
    }

    fn drop_all(&self, work: &mut Work) {
        let pool = &self.pool;
        let drop_page = |_, state| {
            if let PageState::Shared(slot) = state {
                pool.remove_sharer(slot);
            }
        };
        work.table.set_ranges(&[], |_| (0, Arc::default()), drop_page, |id| write(&self.chunks).give_back(id));
        work.take_deferred();
        work.held_segments.clear();
    }

    /// The clients.
    pub fn clients(&self) -> Vec<ClientId> {
        read(&self.members).keys().copied().collect()
    }

    /// Stops or resumes work on a client; merged pages stay merged. A step in hand ends first. False if there is no such
    /// client.
    pub fn pause(&self, id: ClientId, paused: bool) -> bool {
        // Not under the lock: what rests is noted with another look at the members.
        let Some(member) = read(&self.members).get(&id).cloned() else { return false };
        // At once, so that no step begins.
        member.paused.store(paused, Ordering::Release);
        let mut work = lock(&member.work);
        self.note_pause(&member, &mut work);
        true
    }

    /// Notes whether a client is paused. Then no worker waits for its lookups, and no memory is kept for its merges.
    fn note_pause(&self, member: &Member, work: &mut Work) {
        let rests = member.is_at_rest();
        lock(&member.stats).paused = rests;
        if rests {
            self.note_indexing(member, false);
            work.held_segments.clear();
        }
    }

    /// Lends a client's plain memory to the cold tier (`lent`), or takes it back, after the current step. Merged
    /// pages stay merged and in the books; until the memory is back no work is done on the client. False if the client
    /// cannot do that.
    ///
    /// # Errors
    /// [`Gone`] if there is no such client (any more).
    pub fn lend_memory(&self, id: ClientId, lent: bool) -> Result<bool, Gone> {
        let member = read(&self.members).get(&id).cloned().ok_or(Gone)?;
        // At once, so that no step begins.
        member.lent.store(true, Ordering::Release);
        let mut work = lock(&member.work);
        if member.gone.load(Ordering::Acquire) {
            return Err(Gone);
        }
        work.idle = None;
        let parted = work.client.lend_memory(lent);
        member.lent.store(lent && parted == Ok(true), Ordering::Release);
        // The tier watched it in another way: all of it must be watched anew.
        work.generation = None;
        work.next_period_ns = 0;
        member.due_ns.store(0, Ordering::Release);
        self.note_pause(&member, &mut work);
        drop(work);
        if parted.is_err() {
            self.remove(id);
        }
        parted
    }

    /// Gives a client its pages back as private memory, all that it lets go of, and pauses it.
    ///
    /// # Errors
    /// [`Gone`] if there is no such client (any more).
    pub fn unmerge(&self, id: ClientId) -> Result<Unmerged, Gone> {
        let member = read(&self.members).get(&id).cloned().ok_or(Gone)?;
        member.paused.store(true, Ordering::Release);
        lock(&member.notices).clear();
        let mut work = lock(&member.work);
        if member.gone.load(Ordering::Acquire) {
            return Err(Gone);
        }
        self.note_pause(&member, &mut work);
        let result = self.unmerge_all(&mut work);
        self.snapshot(&member, &mut work);
        result
    }

    /// Copies pages of a client, at most [`FETCH_PAGES_MAX`](crate::client::FETCH_PAGES_MAX), as it sees them, one after the
    /// other, and tells for each whether it could be read.
    ///
    /// # Errors
    /// [`Gone`] if there is no such client (any more).
    pub fn fetch(&self, id: ClientId, runs: &[Range], out: &mut [Page], readable: &mut [bool]) -> Result<(), Gone> {
        let member = read(&self.members).get(&id).cloned().ok_or(Gone)?;
        let mut work = lock(&member.work);
        if member.gone.load(Ordering::Acquire) {
            return Err(Gone);
        }
        let fetched = work.client.fetch(runs, out, readable);
        work.client.release_buffers();
        drop(work);
        if fetched.is_err() {
            self.remove(id);
        }
        fetched
    }

    /// The earliest time at which a client is due, of those that no worker holds; a worker reschedules the client it holds.
    pub fn due_ns(&self) -> Option<u64> {
        if self.auditing.load(Ordering::Acquire) > 0 {
            return None;
        }
        read(&self.members)
            .values()
            .filter(|member| !member.is_at_rest() && at_once(member.work.try_lock()).is_some())
            .map(|member| member.due_ns.load(Ordering::Acquire))
            .min()
    }

    /// Takes one step with some client that is due at `now_ns`, if there is one that no worker holds.
    /// `gone` gets a client that turned out to be gone; it is already forgotten.
    ///
    /// Of clients that are due the worker on processor `cpu` takes those first that had their last step there, unless
    /// another has waited for a period: a process that ran on two processors pays for both whenever its page table changes.
    pub fn step_any(&self, now_ns: u64, cpu: Option<u64>, gone: &mut Vec<ClientId>) -> Option<Next> {
        if self.auditing.load(Ordering::Acquire) > 0 {
            return None;
        }
        let cpu = cpu.map_or(0, |cpu| cpu + 1);
        let mut due: Vec<(bool, u64, Arc<Member>)> = read(&self.members)
            .values()
            .filter(|member| !member.is_at_rest())
            .map(|member| (member.due_ns.load(Ordering::Acquire), member))
            .filter(|(due, _)| *due <= now_ns)
            .map(|(due, member)| {
                let last = member.cpu.load(Ordering::Relaxed);
                let elsewhere = last != 0 && last != cpu && now_ns - due < self.config.period_ns;
                (elsewhere, due, member.clone())
            })
            .collect();
        due.sort_by_key(|(elsewhere, due, member)| (*elsewhere, *due, member.id));
        for (.., member) in due {
            let Some(mut work) = at_once(member.work.try_lock()) else { continue };
            // It was free when the list was made: others may have stepped, paused or removed it since.
            let due = member.due_ns.load(Ordering::Acquire) <= now_ns;
            if !due || member.is_at_rest() || member.gone.load(Ordering::Acquire) {
                continue;
            }
            member.cpu.store(cpu, Ordering::Relaxed);
            work.lane = cpu as usize;
            let result = self.step_with(&member, &mut work, now_ns);
            drop(work);
            match result {
                Ok(next) => return Some(next),
                Err(Gone) => {
                    if self.remove(member.id) {
                        gone.push(member.id);
                    }
                }
            }
        }
        None
    }

    /// Takes one step with client `id`, unless it is paused or lent.
    ///
    /// # Errors
    /// [`Gone`] if there is no such client; it is forgotten then.
    pub fn step(&self, id: ClientId, now_ns: u64) -> Result<Next, Gone> {
        let member = read(&self.members).get(&id).cloned().ok_or(Gone)?;
        let mut work = lock(&member.work);
        if member.gone.load(Ordering::Acquire) {
            return Err(Gone);
        }
        if member.is_at_rest() {
            return Ok(Next { due_ns: now_ns + self.config.period_ns, worked: false });
        }
        let result = self.step_with(&member, &mut work, now_ns);
        drop(work);
        if result.is_err() {
            self.remove(id);
        }
        result
    }

    fn mark_index_dirty(&self) {
        self.index_changes.fetch_add(1, Ordering::Relaxed);
    }

    fn step_with(&self, member: &Member, work: &mut Work, now_ns: u64) -> Result<Next, Gone> {
        self.now_ns.fetch_max(now_ns, Ordering::Relaxed);
        let mut worked = false;
        if now_ns >= work.next_period_ns {
            self.pass_period(member, work)?;
            work.next_period_ns = now_ns + self.config.period_ns;
            worked = true;
        }
        worked |= self.probe_huge(work)?;
        let probing = !work.probes.is_empty();
        let resting = work.is_resting();
        let (mut more, mut indexed) = (false, false);
        if !resting {
            indexed = self.take_inbox(member, work)?;
            let (looked_up, left) = self.index_fresh(work)?;
            indexed |= looked_up;
            worked |= indexed;
            more = left;
        }
        self.note_indexing(member, more);
        if !resting && self.may_merge_short(work) {
            let merged = self.merge_deferred(work)?;
            worked |= merged;
            indexed |= merged;
        }
        if work.deferred.is_empty() {
            work.held_segments.clear();
        }
        if indexed {
            self.mark_index_dirty();
        }
        if !more && !probing {
            work.client.release_buffers();
        }
        let has_notices = !resting && !lock(&member.notices).is_empty();
        let due_ns = if probing || (more || has_notices) && !work.is_resting() { now_ns } else { work.next_period_ns };
        member.due_ns.store(due_ns, Ordering::Release);
        member.mappings_claimed.store(work.mappings + work.deferred_mappings, Ordering::Relaxed);
        self.snapshot(member, work);
        Ok(Next { due_ns, worked })
    }

    /// Notes whether `member` has pages to look up; when the last one is done, short runs need not wait any longer.
    fn note_indexing(&self, member: &Member, indexing: bool) {
        if member.indexing.swap(indexing, Ordering::AcqRel) == indexing {
            return;
        }
        if indexing {
            self.indexing.fetch_add(1, Ordering::AcqRel);
        } else if self.indexing.fetch_sub(1, Ordering::AcqRel) == 1 {
            read(&self.members).values().for_each(|member| self.schedule_now(member));
        }
    }

    /// Schedules a client for now; clients that are due already come first.
    fn schedule_now(&self, member: &Member) {
        member.due_ns.fetch_min(self.now_ns.load(Ordering::Relaxed), Ordering::AcqRel);
    }

    /// Calls `f` with room for `pages` fetched pages.
    fn with_buffer<T>(&self, pages: usize, f: impl FnOnce(&mut [Page]) -> T) -> T {
        let mut buffer = lock(&self.buffers).pop().unwrap_or_default();
        if buffer.len() < pages {
            buffer.resize(pages, [0; PAGE_SIZE]);
        }
        let result = f(&mut buffer[..pages]);
        self.buffers_used_ns.store(self.now_ns.load(Ordering::Relaxed), Ordering::Relaxed);
        lock(&self.buffers).push(buffer);
        result
    }

    /// Gives the room for fetched pages back if no client has needed it for some time; returns true if there was any.
    pub fn release_buffers(&self, now_ns: u64) -> bool {
        let used_ns = self.buffers_used_ns.load(Ordering::Relaxed);
        let is_unused = now_ns.saturating_sub(used_ns) >= BUFFERS_UNUSED_NS;
        is_unused && !std::mem::take(&mut *lock(&self.buffers)).is_empty()
    }

    /// Returns true if short runs should be merged now: no worker is about to find more of them, with pages between
    /// these; a page merged alone costs several times one that is merged with its neighbours. Or they waited long enough.
    fn may_merge_short(&self, work: &Work) -> bool {
        self.indexing.load(Ordering::Acquire) == 0 || work.period - work.deferred_since >= SHORT_WAIT_PERIODS
    }

    /// Sends notices to the owners of candidates.
    fn notify_owners(&self, notices: &[(IndexEntry, Option<Slot>)]) {
        if notices.is_empty() {
            return;
        }
        let chunks = read(&self.chunks);
        let members = read(&self.members);
        // Where the run that is being told of goes on.
        let mut next = None;
        for (entry, slot) in notices {
            let Some((client, addr)) = chunks.place(*entry) else { continue };
            let Some(member) = members.get(&client) else { continue };
            lock(&member.notices).push((addr, *slot));
            if let Some(slot) = slot {
                if next != Some((client, addr, slot.number())) {
                    member.mappings_claimed.fetch_add(EDGES, Ordering::Relaxed);
                }
                next = Some((client, addr + PAGE_SIZE as u64, slot.number() + 1));
            }
            self.schedule_now(member);
        }
    }

    fn snapshot(&self, member: &Member, work: &mut Work) {
        let counts = work.table.counts();
        let huge = work.table.chunks().iter().filter(|chunk| matches!(chunk.huge, crate::table::Huge::Wait(..)));
        let pages_huge = huge.map(Chunk::page_count).sum();
        let agent_cpu_ns = work.client.cpu_ns();
        let mut stats = lock(&member.stats);
        *stats = ClientStats {
            pages: work.table.page_count(),
            pages_sharing: u64::from(counts.shared),
            pages_zero: u64::from(counts.zero),
            pages_volatile: u64::from(counts.volatile()),
            pages_unshared: u64::from(counts.candidate),
            pages_broken: u64::from(counts.broken),
            cow_breaks: work.cow_breaks,
            mappings: work.mappings.max(0) as u64,
            pages_huge,
            not_merged: not_merged(work),
            metadata_bytes: work.table.memory_bytes(),
            agent_cpu_ns,
            paused: member.is_at_rest(),
        };
    }

    /// Counters of the domain and its clients, as of their last steps.
    pub fn stats(&self) -> DomainStats {
        let clients: BTreeMap<ClientId, ClientStats> =
            read(&self.members).values().map(|member| (member.id, lock(&member.stats).clone())).collect();
        let pool = self.pool.stats();
        let sum = |f: fn(&ClientStats) -> u64| clients.values().map(f).sum::<u64>();
        let pages_zero = sum(|client| client.pages_zero);
        let metadata_bytes = sum(|client| client.metadata_bytes)
            + self.index.memory_bytes()
            + self.unlisted_bytes()
            + pool.metadata_bytes;
        let mapping_bytes = sum(|client| client.mappings) * MAPPING_BYTES;
        let deduplicated_bytes = (pool.pages_sharing + pages_zero) * PAGE_SIZE as u64;
        DomainStats {
            name: self.config.name.clone(),
            uid: 0,
            pages_shared: pool.pages_shared,
            pages_sharing: pool.pages_sharing,
            pages_zero,
            pages_unshared: sum(|client| client.pages_unshared),
            pages_volatile: sum(|client| client.pages_volatile),
            pages: sum(|client| client.pages),
            pool_bytes: pool.bytes,
            pool_orphaned_bytes: pool.orphaned_bytes,
            pool_max_bytes: self.pool.max_bytes(),
            metadata_bytes,
            mapping_bytes,
            deduplicated_bytes,
            general_profit: deduplicated_bytes as i64
                - (pool.bytes + pool.orphaned_bytes + metadata_bytes + mapping_bytes) as i64,
            events: self.counters.events(),
            clients,
        }
    }

    /// The managed memory of a client; `None` if there is no such client (any more).
    pub fn managed(&self, id: ClientId) -> Option<Managed> {
        let member = read(&self.members).get(&id).cloned()?;
        let managed = lock(&member.managed).clone();
        Some(managed)
    }

    /// What the domain knows about a client's page: why it is, or is not, merged.
    pub fn page_state(&self, id: ClientId, addr: u64) -> PageState {
        let member = read(&self.members).get(&id).cloned();
        member.map_or(PageState::Unknown, |member| lock(&member.work).table.state(addr))
    }

    fn refuse(work: &mut Work, why: RefusalReason) {
        *work.refused.entry(why).or_default() += 1;
    }

    fn count(&self, f: impl Fn(&DomainCounters) -> &AtomicU64, by: u64) {
        add(f(&self.counters), by);
    }
}

/// Pages that could not be merged, by reason: those that show slots of an earlier pool that could not be taken in as well.
fn not_merged(work: &Work) -> BTreeMap<String, u64> {
    let refused = work.refused.iter().map(|(why, count)| (why_word(*why).to_owned(), *count));
    let inherited = work.not_inherited.pages.iter().map(|(why, count)| (format!("inherited, and {why}"), *count));
    refused.chain(inherited).collect()
}

/// Bytes of kernel structures per mapping: vm_area_struct, its place in the tree, its link to anonymous memory.
const MAPPING_BYTES: u64 = 245;
