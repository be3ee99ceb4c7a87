//! The machine and its processes: the program's side of the simulation.

use super::{Content, Rng, content_of};
use pagefold_os::fd::Fd;
use pagefold_os::sync::lock;
use pagefold_os::{PAGE_SIZE, Range};
use pagefold_pool::{Pool, Slot};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};

pub(super) const PAGE: u64 = PAGE_SIZE as u64;
/// Length of a huge page.
pub(super) const HUGE: u64 = 2 << 20;

/// What happens on a machine.
#[derive(Clone, Debug)]
pub struct Options {
    /// Contents that programs write; few, so that duplicates abound.
    pub contents: Content,
    /// How often, per mille, other threads of a program act between two inner steps of the client.
    pub interference: u32,
    /// Pages that one process maps at most.
    pub pages_max: usize,
    /// Mappings that one process may have.
    pub mappings_max: Option<usize>,
    /// Processes that may live at a time: forks beyond fail.
    pub processes_max: usize,
    /// The client compares frozen bytes before it maps. Without this the oracle must find wrong bytes.
    pub compare: bool,
    /// Processes end by themselves.
    pub exits: bool,
    /// Whole huge pages appear.
    pub huge: bool,
    /// How often, per mille, what is mapped comes to lie where something else lies, or lay.
    pub reuse: u32,
    /// Now and then an agent has neither descriptor nor mapping for a segment.
    pub lacks: bool,
    /// How often, per mille, the file of an earlier daemon's segment can be opened again.
    pub inherits: u32,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            contents: 12,
            interference: 100,
            pages_max: 400,
            mappings_max: None,
            processes_max: 6,
            compare: true,
            exits: true,
            huge: false,
            reuse: 0,
            lacks: false,
            inherits: 0,
        }
    }
}

/// A segment's file; it lives as long as a process maps it.
#[derive(Debug)]
pub(super) struct File {
    pub(super) segment: u32,
    pub(super) inode: u64,
    fd: Arc<Fd>,
    /// What each slot held when it was looked at first.
    contents: Mutex<BTreeMap<u32, Option<Content>>>,
}

impl File {
    pub(super) fn open(&self) -> Option<Fd> {
        self.fd.duplicate().ok()
    }

    fn read(&self, index: u32) -> Option<Content> {
        let mut page = [0; PAGE_SIZE];
        let got = self.fd.read_at(&mut page, u64::from(index) * PAGE);
        if got == Ok(PAGE_SIZE) { content_of(&page) } else { None }
    }

    /// The content of a slot, `None` if it is no whole one.
    pub(super) fn content(&self, index: u32) -> Option<Content> {
        *lock(&self.contents).entry(index).or_insert_with(|| self.read(index))
    }

    /// A slot with bytes that are not what they once were.
    fn changed(&self) -> Option<u32> {
        lock(&self.contents).iter().find(|(index, content)| self.read(**index) != **content).map(|(index, _)| *index)
    }
}

/// What lies behind a page's address.
#[derive(Clone, Debug)]
pub(super) enum Backing {
    /// Private anonymous memory.
    Anon,
    /// A private mapping of a pool file.
    Pool { file: Arc<File>, index: u32 },
    /// A private mapping of another file, of zeros.
    Foreign,
}

/// What a forked child gets of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum OnFork {
    Copied,
    /// `MADV_DONTFORK`.
    Left,
    /// `MADV_WIPEONFORK`.
    Wiped,
}

/// The process's own page there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Frame {
    /// None: a hole, or the file's page.
    None,
    /// The kernel's zero page.
    Zero,
    /// A page of memory; `exclusive` unless a fork shares it.
    Own { content: Content, exclusive: bool },
    /// In swap.
    Swapped { content: Content, exclusive: bool },
}

/// A page of a mapping, as the kernel keeps it.
#[derive(Clone, Debug)]
pub(super) struct Entry {
    pub(super) backing: Backing,
    pub(super) frame: Frame,
    /// Registered for asynchronous write protection.
    pub(super) watched: bool,
    /// Write-protected: silent since the last look.
    pub(super) protected: bool,
    /// A discard of this pool page by a raw call sends an event.
    pub(super) held: bool,
    /// A device may write to the page.
    pub(super) pinned: bool,
    /// Part of a huge page.
    pub(super) huge: bool,
    /// The program wants it merged.
    pub(super) managed: bool,
    /// The program said that it must not be merged, and the agent knows.
    pub(super) excluded: bool,
    /// A mark of the program's, which stays whatever lies there.
    pub(super) on_fork: OnFork,
    /// A freeze protected the page after a write that no look has told: a known limit, until it is written again.
    pub(super) hidden: bool,
}

impl Entry {
    /// Plain memory in place of a page with the marks of `self`.
    fn again(&self) -> Entry {
        Entry { managed: self.managed, excluded: self.excluded, on_fork: self.on_fork, ..Entry::fresh() }
    }

    fn fresh() -> Entry {
        Entry {
            backing: Backing::Anon,
            frame: Frame::None,
            watched: false,
            protected: false,
            held: false,
            pinned: false,
            huge: false,
            managed: true,
            excluded: false,
            on_fork: OnFork::Copied,
            hidden: false,
        }
    }

    pub(super) fn is_pool(&self) -> bool {
        matches!(self.backing, Backing::Pool { .. })
    }

    /// What a read shows.
    pub(super) fn visible(&self) -> Option<Content> {
        match (self.frame, &self.backing) {
            (Frame::Own { content, .. } | Frame::Swapped { content, .. }, _) => Some(content),
            (_, Backing::Pool { file, index }) => file.content(*index),
            _ => Some(0),
        }
    }

    /// True if both pages may lie in one mapping, `next` right behind.
    fn joins(&self, next: &Entry) -> bool {
        let backing = match (&self.backing, &next.backing) {
            (Backing::Anon, Backing::Anon) | (Backing::Foreign, Backing::Foreign) => true,
            (Backing::Pool { file, index }, Backing::Pool { file: other, index: after }) => {
                file.inode == other.inode && index + 1 == *after
            }
            _ => false,
        };
        backing && self.watched == next.watched && self.held == next.held && self.on_fork == next.on_fork
    }
}

/// What is mapped where something else was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Memory that is to be merged.
    Managed,
    /// A file's pages.
    Foreign,
    /// Plain memory, by a system call that the agent does not see; so it is not managed.
    Unseen,
}

/// What a thread of the program does.
#[derive(Clone, Debug)]
pub(super) enum Action {
    Write(u64, Content),
    /// A write by another process.
    Poke(u64, Content),
    Read(u64),
    /// `raw`: by a system call that the agent does not see.
    Discard(Range, bool),
    Unmap(Range, bool),
    /// Maps so many pages; aligned like a huge page if the flag is set.
    Map(u64, bool),
    /// Maps this range, whatever lies there.
    MapAt(Range, Kind),
    /// What a child gets of it.
    OnFork(Range, OnFork),
    Move(Range),
    Exclude(Range),
    Fork,
    Exit,
    Pin(u64),
    Unpin(u64),
    SwapOut(Range),
    /// The kernel makes a huge page of the 2 MiB at this address, if it can.
    Collapse(u64),
}

/// One process's memory: both books.
#[derive(Debug)]
pub(super) struct Memory {
    pub(super) pid: u32,
    pub(super) alive: bool,
    pub(super) rng: Rng,
    pub(super) entries: BTreeMap<u64, Entry>,
    /// What the program wrote last, by page. Only its own actions change this book.
    pub(super) truth: BTreeMap<u64, Content>,
    /// Frozen pages in the agent's freeze area.
    pub(super) frozen: BTreeMap<u64, Frame>,
    /// The agent holds the guard, and these addresses are registered for missing pages.
    pub(super) guarded: Option<Range>,
    /// How many huge pages were merged whole.
    pub(super) whole: u64,
    /// Calls that wait for the guard.
    waiting: Vec<Action>,
    /// Writes to frozen pages: their threads wait.
    blocked: Vec<(u64, Content)>,
    /// Discards by raw calls that wait until their event is read.
    pub(super) events: Vec<Range>,
    pub(super) generation: u64,
    /// Page faults, as the kernel counts them.
    pub(super) faults: u64,
    /// The plain memory is lent: nothing of it is watched, and nothing may be merged.
    pub(super) lent: bool,
    next_addr: u64,
    /// Where something was unmapped.
    vacated: Vec<u64>,
}

#[derive(Debug)]
pub(super) struct Shared {
    pub(super) options: Options,
    seed: u64,
    next_pid: AtomicU32,
    living: AtomicU64,
    quiet: AtomicBool,
    files: Mutex<BTreeMap<u64, Weak<File>>>,
    processes: Mutex<Vec<Arc<Mutex<Memory>>>>,
    born: Mutex<Vec<Arc<Mutex<Memory>>>>,
    failure: Mutex<Option<String>>,
}

/// The machine: its processes, and the pool files that they map.
#[derive(Clone, Debug)]
pub struct Machine {
    pub(super) shared: Arc<Shared>,
}

/// A process, as its program sees it.
#[derive(Clone, Debug)]
pub struct Process {
    pub(super) memory: Arc<Mutex<Memory>>,
    pub(super) shared: Arc<Shared>,
}

impl Machine {
    /// Makes a machine without processes; `seed` decides everything that will happen on it.
    pub fn new(seed: u64, options: Options) -> Machine {
        let shared = Shared {
            options,
            seed,
            next_pid: AtomicU32::new(1),
            living: AtomicU64::new(0),
            quiet: AtomicBool::new(false),
            files: Mutex::default(),
            processes: Mutex::default(),
            born: Mutex::default(),
            failure: Mutex::default(),
        };
        Machine { shared: Arc::new(shared) }
    }

    /// Starts a process without memory.
    pub fn spawn(&self) -> Process {
        self.shared.spawn(|_| {})
    }

    fn process(&self, memory: Arc<Mutex<Memory>>) -> Process {
        Process { memory, shared: self.shared.clone() }
    }

    /// Processes that were forked since the last call and are not clients yet.
    pub fn born(&self) -> Vec<Process> {
        let born = std::mem::take(&mut *lock(&self.shared.born));
        born.into_iter().map(|memory| self.process(memory)).collect()
    }

    /// All processes that ever lived here.
    pub fn processes(&self) -> Vec<Process> {
        lock(&self.shared.processes).iter().map(|memory| self.process(memory.clone())).collect()
    }

    /// Stops (or lets go on) all threads that act by themselves.
    pub fn set_quiet(&self, quiet: bool) {
        self.shared.quiet.store(quiet, Ordering::Relaxed);
    }

    /// The first wrong byte that any process has read.
    pub fn failure(&self) -> Option<String> {
        lock(&self.shared.failure).clone()
    }

    /// Files that exist though neither `pool` holds them nor any process maps them: leaked memory.
    pub fn idle_files(&self, pool: &Pool) -> usize {
        let mut used: BTreeSet<u64> = BTreeSet::new();
        for process in self.processes() {
            used.extend(process.lock().entries.values().filter_map(|entry| match &entry.backing {
                Backing::Pool { file, .. } => Some(file.inode),
                _ => None,
            }));
        }
        let files: Vec<Arc<File>> = lock(&self.shared.files).values().filter_map(Weak::upgrade).collect();
        let idle = |file: &&Arc<File>| !used.contains(&file.inode) && pool.segment_of_inode(file.inode).is_none();
        files.iter().filter(idle).count()
    }

    /// Checks that every slot that was ever looked at still has its bytes, and every page its truth.
    pub fn check(&self) {
        for process in self.processes() {
            process.check();
        }
        for file in lock(&self.shared.files).values().filter_map(Weak::upgrade) {
            if let Some(index) = file.changed() {
                self.shared.fail(format!("slot {index} of segment {} changed its bytes", file.segment));
            }
        }
    }
}

impl Shared {
    fn spawn(self: &Arc<Self>, prepare: impl FnOnce(&mut Memory)) -> Process {
        let pid = self.next_pid.fetch_add(1, Ordering::Relaxed);
        self.living.fetch_add(1, Ordering::Relaxed);
        let mut memory = Memory {
            pid,
            alive: true,
            rng: Rng::new(self.seed ^ u64::from(pid) << 40),
            entries: BTreeMap::new(),
            truth: BTreeMap::new(),
            frozen: BTreeMap::new(),
            guarded: None,
            whole: 0,
            waiting: Vec::new(),
            blocked: Vec::new(),
            events: Vec::new(),
            generation: 1,
            faults: 0,
            lent: false,
            next_addr: u64::from(pid) << 40,
            vacated: Vec::new(),
        };
        prepare(&mut memory);
        let process = Process { memory: Arc::new(Mutex::new(memory)), shared: self.clone() };
        lock(&self.processes).push(process.memory.clone());
        process
    }

    pub(super) fn is_quiet(&self) -> bool {
        self.quiet.load(Ordering::Relaxed)
    }

    /// The file of a segment that the pool holds.
    pub(super) fn file(&self, pool: &Pool, segment: u32) -> Option<Arc<File>> {
        let fd = pool.segment_fd(segment)?;
        let inode = pool.segment_inode(segment)?;
        let mut files = lock(&self.files);
        if let Some(file) = files.get(&inode).and_then(Weak::upgrade) {
            return Some(file);
        }
        let file = Arc::new(File { segment, inode, fd, contents: Mutex::default() });
        files.insert(inode, Arc::downgrade(&file));
        Some(file)
    }

    pub(super) fn fail(&self, what: String) {
        lock(&self.failure).get_or_insert(what);
    }
}

impl Process {
    pub(super) fn lock(&self) -> MutexGuard<'_, Memory> {
        lock(&self.memory)
    }

    fn act(&self, action: Action) {
        self.lock().act(&self.shared, action);
    }

    /// The process's number on its machine.
    pub fn pid(&self) -> u32 {
        self.lock().pid
    }

    /// False once it has exited.
    pub fn is_alive(&self) -> bool {
        self.lock().alive
    }

    /// Maps `pages` pages of private anonymous memory that is to be merged.
    pub fn map(&self, pages: u64) -> Range {
        self.lock().map(pages, false)
    }

    /// As [`map`](Self::map), on whole huge pages.
    pub fn map_huge(&self, pages: u64) -> Range {
        let mut memory = self.lock();
        let range = memory.map(pages, true);
        for addr in (range.start..range.end).step_by(HUGE as usize) {
            memory.act(&self.shared, Action::Collapse(addr));
        }
        range
    }

    /// Writes `content` to the page at `addr`.
    pub fn write(&self, addr: u64, content: Content) {
        self.act(Action::Write(addr, content));
    }

    /// As [`write`](Self::write), by another process, as debuggers do.
    pub fn poke(&self, addr: u64, content: Content) {
        self.act(Action::Poke(addr, content));
    }

    /// What the program wrote last to each of its pages: the truth.
    pub fn pages(&self) -> Vec<(u64, Content)> {
        self.lock().truth.iter().map(|(addr, content)| (*addr, *content)).collect()
    }

    /// Discards a range as `madvise(MADV_DONTNEED)` does; `raw` if the agent does not see the call.
    pub fn discard(&self, range: Range, raw: bool) {
        self.act(Action::Discard(range, raw));
    }

    /// Unmaps a range; `raw` if the agent does not see the call.
    pub fn unmap(&self, range: Range, raw: bool) {
        self.act(Action::Unmap(range, raw));
    }

    /// Asks that a range be merged no more: its pages are private again, as `MADV_UNMERGEABLE` makes them.
    pub fn exclude(&self, range: Range) {
        self.act(Action::Exclude(range));
    }

    /// Moves a range elsewhere, as `mremap(2)` does.
    pub fn remap(&self, range: Range) {
        self.act(Action::Move(range));
    }

    /// Forks; the child is among [`Machine::born`].
    pub fn fork(&self) {
        self.act(Action::Fork);
    }

    /// Ends the process.
    pub fn exit(&self) {
        self.act(Action::Exit);
    }

    pub(super) fn exit_if_alive(&self) {
        if self.is_alive() {
            self.exit();
        }
    }

    /// Pins or unpins a page for a device.
    pub fn pin(&self, addr: u64, pinned: bool) {
        self.act(if pinned { Action::Pin(addr) } else { Action::Unpin(addr) });
    }

    /// Unpins everything.
    pub fn unpin_all(&self) {
        self.lock().entries.values_mut().for_each(|entry| entry.pinned = false);
    }

    /// Changes the generation, as any seen change of the managed ranges does.
    pub fn touch(&self) {
        self.lock().generation += 1;
    }

    /// Lets a thread of the program do something that its seed decides.
    pub fn act_randomly(&self) {
        let mut memory = self.lock();
        let action = memory.random_action(&self.shared);
        memory.act(&self.shared, action);
    }

    /// Reads every page and compares it with the truth.
    pub fn check(&self) {
        let memory = self.lock();
        if memory.alive {
            memory.truth.keys().for_each(|addr| memory.check(&self.shared, *addr));
        }
    }

    /// The pages that show a slot now: address, segment, place in the segment.
    pub fn slots(&self) -> BTreeSet<(u64, u32, u32)> {
        let memory = self.lock();
        let shown = memory.entries.iter().filter_map(|(addr, entry)| match (&entry.backing, entry.frame) {
            (Backing::Pool { file, index }, Frame::None) => Some((*addr, file.segment, *index)),
            _ => None,
        });
        shown.collect()
    }

    /// The pages that show a slot of `pool` now.
    pub fn slots_of(&self, pool: &Pool) -> BTreeSet<(u64, Slot)> {
        let memory = self.lock();
        let shown = memory.entries.iter().filter_map(|(addr, entry)| match (&entry.backing, entry.frame) {
            (Backing::Pool { file, index }, Frame::None) => Some((*addr, file, *index)),
            _ => None,
        });
        let held = shown.filter_map(|(addr, file, index)| Some((addr, pool.segment_of_inode(file.inode)?, index)));
        held.map(|(addr, segment, index)| (addr, Slot::new(segment, index))).collect()
    }

    /// The pages that the owner of `pool` can merge, zero pages apart, with their contents, and whether each is.
    ///
    /// Left out: pages that the program excluded, that a fork shared and that were not written since, that are pinned, in
    /// swap or part of a huge page, or show slots of an earlier daemon; the kernel or the policy leaves those alone. Of
    /// pages with a hidden write is unknown.
    pub fn mergeable(&self, pool: &Pool) -> Vec<(u64, Content, bool)> {
        let memory = self.lock();
        let pages = memory.entries.iter().filter_map(|(addr, entry)| {
            let content = *memory.truth.get(addr).filter(|content| **content != 0)?;
            let (able, merged) = match (&entry.backing, entry.frame) {
                (Backing::Pool { file, .. }, Frame::None) => (pool.segment_of_inode(file.inode).is_some(), true),
                (_, Frame::Own { exclusive: true, .. }) => (entry.managed && !entry.pinned && !entry.huge, false),
                _ => (false, false),
            };
            (able && !entry.hidden).then_some((*addr, content, merged))
        });
        pages.collect()
    }

    /// How many of its huge pages were merged whole.
    pub fn merged_whole(&self) -> u64 {
        self.lock().whole
    }

    /// How many mappings the process has.
    pub fn mappings(&self) -> usize {
        self.lock().mappings()
    }
}

impl Memory {
    fn map(&mut self, pages: u64, aligned: bool) -> Range {
        // Addresses that were never used, as in the agent's zone.
        let align = if aligned { HUGE } else { PAGE };
        let start = self.next_addr.next_multiple_of(align);
        let gap = if aligned { 0 } else { self.rng.below(3) };
        self.next_addr = start + (pages + gap) * PAGE;
        let range = Range::pages_from(start, pages);
        self.map_at(range, Kind::Managed);
        range
    }

    fn map_at(&mut self, range: Range, kind: Kind) {
        self.split(range);
        let backing = if kind == Kind::Foreign { Backing::Foreign } else { Backing::Anon };
        let entry = Entry { backing, managed: kind == Kind::Managed, ..Entry::fresh() };
        for addr in pages_of(range) {
            self.entries.insert(addr, entry.clone());
            self.truth.insert(addr, 0);
        }
        self.generation += u64::from(kind != Kind::Unseen);
    }

    pub(super) fn act(&mut self, shared: &Arc<Shared>, action: Action) {
        if !self.alive {
            return;
        }
        let waits = self.guarded.is_some()
            && match action {
                Action::Discard(_, raw) | Action::Unmap(_, raw) => !raw,
                Action::Map(..) | Action::Move(_) | Action::Exclude(_) | Action::Fork | Action::OnFork(..) => true,
                Action::MapAt(_, kind) => kind != Kind::Unseen,
                _ => false,
            };
        if waits {
            return self.waiting.push(action);
        }
        match action {
            Action::Write(addr, content) => self.write(addr, content),
            Action::Poke(addr, content) => self.write_as(addr, content, true),
            Action::Read(addr) => self.read(shared, addr),
            Action::Discard(range, raw) => self.discard_call(range, raw),
            Action::Unmap(range, raw) => {
                for addr in pages_of(range) {
                    self.entries.remove(&addr);
                    self.truth.remove(&addr);
                }
                self.split(range);
                self.vacated.push(range.start);
                self.generation += u64::from(!raw);
            }
            Action::Map(pages, aligned) => drop(self.map(pages, aligned)),
            // A known limit, left out here: nothing keeps a bare call away from a frozen range.
            Action::MapAt(range, Kind::Unseen) if self.guarded.is_some_and(|frozen| frozen.overlaps(&range)) => {}
            Action::MapAt(range, kind) => self.map_at(range, kind),
            Action::OnFork(range, on_fork) => self.mark_on_fork(range, on_fork),
            Action::Move(range) => self.move_to(range),
            Action::Exclude(range) => {
                self.unmerge(range);
                for (_, entry) in self.entries.range_mut(range.start..range.end) {
                    (entry.managed, entry.excluded) = (false, true);
                }
                self.generation += 1;
            }
            Action::Fork => self.fork(shared),
            Action::Exit => self.exit(shared),
            Action::Pin(addr) => {
                // A pin for writing breaks sharing first.
                let content = self.truth.get(&addr).copied();
                if let (Some(content), false) = (content, self.frozen.contains_key(&addr)) {
                    self.write(addr, content);
                    self.entries.entry(addr).and_modify(|entry| entry.pinned = true);
                }
            }
            Action::Unpin(addr) => drop(self.entries.entry(addr).and_modify(|entry| entry.pinned = false)),
            Action::SwapOut(range) => {
                for (_, entry) in self.entries.range_mut(range.start..range.end) {
                    if let (Frame::Own { content, exclusive }, false, false) = (entry.frame, entry.pinned, entry.huge) {
                        entry.frame = Frame::Swapped { content, exclusive };
                    }
                }
            }
            Action::Collapse(addr) => self.collapse(addr),
        }
    }

    fn write(&mut self, addr: u64, content: Content) {
        self.write_as(addr, content, false);
    }

    /// `by_another`: by another process, such as a debugger, so that the faults are not counted here.
    fn write_as(&mut self, addr: u64, content: Content, by_another: bool) {
        if self.frozen.contains_key(&addr) {
            return self.blocked.push((addr, content));
        }
        let Some(entry) = self.entries.get_mut(&addr) else { return };
        let Some(truth) = self.truth.get_mut(&addr) else { return };
        *truth = content;
        let faults = entry.protected || !matches!(entry.frame, Frame::Own { exclusive: true, .. });
        self.faults += u64::from(faults && !by_another);
        entry.frame = Frame::Own { content, exclusive: true };
        let splits = entry.huge && entry.protected;
        (entry.protected, entry.hidden) = (false, false);
        if splits {
            self.split(Range::pages_from(addr, 1));
        }
    }

    fn read(&mut self, shared: &Shared, addr: u64) {
        self.check(shared, addr);
        let Some(entry) = self.entries.get_mut(&addr) else { return };
        match (entry.frame, &entry.backing) {
            (Frame::None, Backing::Anon) if !self.frozen.contains_key(&addr) => entry.frame = Frame::Zero,
            (Frame::Swapped { content, exclusive }, _) => entry.frame = Frame::Own { content, exclusive },
            _ => return,
        }
        self.faults += 1;
    }

    pub(super) fn check(&self, shared: &Shared, addr: u64) {
        // A thread that reads a frozen page waits.
        let (Some(truth), false) = (self.truth.get(&addr), self.frozen.contains_key(&addr)) else { return };
        let Some(entry) = self.entries.get(&addr) else {
            return shared.fail(format!("process {}: page {addr:#x} is gone", self.pid));
        };
        let seen = entry.visible();
        if seen != Some(*truth) {
            shared.fail(format!(
                "process {}: page {addr:#x} reads {seen:?}, but {truth} was written last: {entry:?}",
                self.pid
            ));
        }
    }

    /// Whole huge pages that `range` cuts are huge no more.
    pub(super) fn split(&mut self, range: Range) {
        let start = range.start / HUGE * HUGE;
        let end = range.end.next_multiple_of(HUGE);
        for (_, entry) in self.entries.range_mut(start..end) {
            entry.huge = false;
        }
    }

    fn discard_call(&mut self, range: Range, raw: bool) {
        if raw {
            // An event goes out if part of the range is held, and the caller waits until it is read.
            let frozen = self.guarded.is_some_and(|frozen| frozen.overlaps(&range));
            let held = self.entries.range(range.start..range.end).any(|(_, entry)| entry.held);
            if frozen || held {
                self.events.push(range);
                if self.guarded.is_none() {
                    self.serve_events();
                }
                return;
            }
            // A pool mapping that no userfaultfd holds shows its bytes again: a known limit, left out here.
            if self.entries.range(range.start..range.end).any(|(_, entry)| entry.is_pool()) {
                return;
            }
            self.discard(range);
        } else {
            self.replace_merged(range, false);
            self.generation += 1;
            self.discard(range);
        }
    }

    /// The kernel's part of a discard.
    pub(super) fn discard(&mut self, range: Range) {
        let cut: Vec<u64> =
            self.entries.range(range.start..range.end).filter(|(_, e)| e.huge).map(|(a, _)| *a).collect();
        for (_, entry) in self.entries.range_mut(range.start..range.end) {
            entry.frame = Frame::None;
            entry.protected = false;
        }
        for (_, truth) in self.truth.range_mut(range.start..range.end) {
            *truth = 0;
        }
        cut.into_iter().for_each(|addr| self.split(Range::pages_from(addr, 1)));
    }

    /// The agent's answer to discards by raw calls.
    pub(super) fn serve_events(&mut self) {
        for range in std::mem::take(&mut self.events) {
            self.replace_merged(range, true);
            self.generation += 1;
            self.discard(range);
        }
    }

    fn replace_merged(&mut self, range: Range, watched: bool) {
        for (_, entry) in self.entries.range_mut(range.start..range.end).filter(|(_, entry)| entry.is_pool()) {
            *entry = Entry { watched, ..entry.again() };
        }
    }

    /// Private memory of the same bytes in place of pool mappings, by the agent in the program's own call.
    fn unmerge(&mut self, range: Range) {
        for (_, entry) in self.entries.range_mut(range.start..range.end).filter(|(_, entry)| entry.is_pool()) {
            let frame = match entry.visible() {
                Some(content) => Frame::Own { content, exclusive: true },
                None => continue,
            };
            *entry = Entry { frame, ..entry.again() };
        }
    }

    fn mark_on_fork(&mut self, range: Range, on_fork: OnFork) {
        if on_fork == OnFork::Wiped {
            // The kernel knows that of plain memory only.
            if self.entries.range(range.start..range.end).any(|(_, entry)| matches!(entry.backing, Backing::Foreign)) {
                return;
            }
            self.unmerge(range);
        }
        for (_, entry) in self.entries.range_mut(range.start..range.end) {
            entry.on_fork = on_fork;
            if on_fork == OnFork::Wiped {
                (entry.managed, entry.excluded) = (false, true);
            }
        }
        self.generation += 1;
    }

    fn move_to(&mut self, range: Range) {
        self.unmerge(range);
        self.split(range);
        self.vacated.push(range.start);
        let target = self.map(range.pages(), false);
        for (from, to) in pages_of(range).zip(pages_of(target)) {
            match (self.entries.remove(&from), self.truth.remove(&from)) {
                (Some(entry), Some(truth)) => {
                    self.entries.insert(to, Entry { watched: false, protected: false, ..entry });
                    self.truth.insert(to, truth);
                }
                _ => {
                    self.entries.remove(&to);
                    self.truth.remove(&to);
                }
            }
        }
        self.generation += 1;
    }

    fn fork(&mut self, shared: &Arc<Shared>) {
        if shared.living.load(Ordering::Relaxed) >= shared.options.processes_max as u64 {
            return;
        }
        for entry in self.entries.values_mut().filter(|entry| !entry.pinned && entry.on_fork == OnFork::Copied) {
            match &mut entry.frame {
                Frame::Own { exclusive, .. } | Frame::Swapped { exclusive, .. } => *exclusive = false,
                _ => {}
            }
        }
        let child = shared.spawn(|child| {
            child.truth = self.truth.clone();
            child.next_addr = self.next_addr.max(child.next_addr);
            child.vacated = self.vacated.clone();
            child.entries = self.entries.clone();
            child.entries.retain(|_, entry| entry.on_fork != OnFork::Left);
            child.truth.retain(|addr, _| child.entries.contains_key(addr));
            for (addr, entry) in &mut child.entries {
                if entry.on_fork == OnFork::Wiped {
                    entry.frame = Frame::None;
                    child.truth.entry(*addr).and_modify(|truth| *truth = 0);
                }
                // Registrations stay with the parent; a pinned page is copied at once.
                if let (Frame::Own { exclusive, .. }, true) = (&mut entry.frame, entry.pinned) {
                    *exclusive = true;
                }
                (entry.watched, entry.protected, entry.held, entry.pinned) = (false, false, false, false);
                entry.huge &= entry.on_fork != OnFork::Wiped;
            }
        });
        lock(&shared.born).push(child.memory);
    }

    pub(super) fn exit(&mut self, shared: &Shared) {
        self.alive = false;
        self.entries.clear();
        self.truth.clear();
        self.frozen.clear();
        self.waiting.clear();
        self.blocked.clear();
        self.events.clear();
        shared.living.fetch_sub(1, Ordering::Relaxed);
    }

    fn collapse(&mut self, addr: u64) {
        let start = addr / HUGE * HUGE;
        let able = |entry: &Entry| {
            matches!(
                (&entry.backing, entry.frame),
                (Backing::Anon, Frame::None | Frame::Zero | Frame::Own { exclusive: true, .. })
            ) && !entry.protected
                && !entry.pinned
        };
        let pages = self.entries.range(start..start + HUGE).filter(|(_, entry)| able(entry)).count() as u64;
        if pages != HUGE / PAGE || self.guarded.is_some() {
            return;
        }
        for (addr, entry) in self.entries.range_mut(start..start + HUGE) {
            entry.huge = true;
            entry.frame = Frame::Own { content: self.truth.get(addr).copied().unwrap_or(0), exclusive: true };
        }
    }

    /// Frozen pages are in place again: the waiting threads go on.
    pub(super) fn wake(&mut self, shared: &Arc<Shared>) {
        self.guarded = None;
        for (addr, content) in std::mem::take(&mut self.blocked) {
            self.write(addr, content);
        }
        self.serve_events();
        for action in std::mem::take(&mut self.waiting) {
            self.act(shared, action);
        }
    }

    pub(super) fn mappings(&self) -> usize {
        let mut count = 0;
        let mut last: Option<(&u64, &Entry)> = None;
        for (addr, entry) in &self.entries {
            let joined = last.is_some_and(|(before, other)| before + PAGE == *addr && other.joins(entry));
            count += usize::from(!joined);
            last = Some((addr, entry));
        }
        count
    }

    fn random_page(&mut self) -> Option<u64> {
        let at = self.rng.below(self.truth.len() as u64) as usize;
        self.truth.keys().nth(at).copied()
    }

    /// Where something lay, or lies.
    fn used_place(&mut self) -> Option<u64> {
        let at = self.rng.below(self.vacated.len() as u64 + 1) as usize;
        match self.vacated.get(at) {
            Some(_) => Some(self.vacated.swap_remove(at)),
            None => self.random_page(),
        }
    }

    fn random_range(&mut self, pages_max: u64) -> Option<Range> {
        let start = self.random_page()?;
        let pages = 1 + self.rng.below(pages_max);
        Some(Range::pages_from(start, pages))
    }

    pub(super) fn random_action(&mut self, shared: &Shared) -> Action {
        let options = &shared.options;
        let pages_max = options.pages_max;
        let map = |memory: &mut Memory| {
            if memory.rng.chance(options.reuse)
                && let Some(start) = memory.used_place()
            {
                let kind = [Kind::Managed, Kind::Managed, Kind::Foreign, Kind::Unseen][memory.rng.below(4) as usize];
                return Action::MapAt(Range::pages_from(start, 1 + memory.rng.below(40)), kind);
            }
            let huge = options.huge && memory.rng.chance(200);
            let pages = if huge { HUGE / PAGE } else { 1 + memory.rng.below(40) };
            Action::Map(pages, huge)
        };
        let Some(page) = self.random_page() else { return map(self) };
        let content = self.rng.below(u64::from(options.contents)) as Content;
        let raw = self.rng.chance(400);
        let chosen = self.rng.below(1000);
        match chosen {
            0..450 => Action::Write(page, content),
            // Neighbours with contents in order, so that there are runs.
            450..600 => {
                let pages = 1 + self.rng.below(30);
                let last = (1..pages).map(|n| page + n * PAGE).take_while(|addr| self.truth.contains_key(addr)).last();
                for addr in pages_of(Range { start: page, end: last.unwrap_or(page) }) {
                    let content = 1 + ((addr / PAGE) as u32 % options.contents.max(2));
                    self.write(addr, content);
                }
                Action::Write(page, content)
            }
            600..720 => Action::Read(page),
            720..780 => Action::Write(page, 0),
            780..830 => self.random_range(12).map_or(Action::Read(page), |range| Action::Discard(range, raw)),
            830..860 => self.random_range(10).map_or(Action::Read(page), |range| Action::Unmap(range, raw)),
            860..900 if self.entries.len() < pages_max => map(self),
            860..900 => Action::Unmap(Range::pages_from(page, 30), raw),
            900..915 => self.random_range(8).map_or(Action::Read(page), Action::Move),
            915..919 => Action::Exclude(Range::pages_from(page, 2)),
            919 => {
                let on_fork = [OnFork::Copied, OnFork::Left, OnFork::Wiped][self.rng.below(3) as usize];
                Action::OnFork(Range::pages_from(page, 1 + self.rng.below(8)), on_fork)
            }
            920..935 => Action::Fork,
            935..950 => Action::Pin(page),
            950..970 => Action::Unpin(page),
            970..985 => Action::SwapOut(Range::pages_from(page, 5)),
            985..995 if options.huge => Action::Collapse(page),
            995..998 => Action::Poke(page, content),
            998.. if options.exits => Action::Exit,
            _ => Action::Write(page, content),
        }
    }
}

/// The addresses of a range's pages.
pub(super) fn pages_of(range: Range) -> impl Iterator<Item = u64> {
    (range.start..range.end).step_by(PAGE_SIZE)
}
