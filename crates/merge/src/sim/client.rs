//! The client's side of the simulation: what agent and kernel do, with the program's threads in between.

use super::memory::{Backing, Entry, File, Frame, HUGE, Memory, OnFork, PAGE, Process, Shared, pages_of};
use super::page_of;
use crate::client::{Client, FETCH_PAGES_MAX, FREEZE_PAGES_MAX, Gone, Outcome, PoolMapping, RemapPiece, Written};
use pagefold_os::fd::Fd;
use pagefold_os::{PAGE_SIZE, Page, Range};
use pagefold_pool::{Pool, Slot};
use pagefold_protocol::message::RefusalReason;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, MutexGuard};

/// A simulated process behind its agent.
#[derive(Debug)]
pub struct SimClient {
    process: Process,
    held: Held,
}

/// The agent's descriptors, by segment.
type Held = BTreeMap<u32, Arc<File>>;

/// What the freeze found at a page.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Found {
    Left(RefusalReason),
    Frozen,
    Hole,
    Equal,
}

impl Process {
    /// The client through which a domain merges this process.
    ///
    /// It is a new connection to the agent: what an earlier one registered is gone with it.
    pub fn client(&self) -> SimClient {
        for entry in self.lock().entries.values_mut() {
            (entry.watched, entry.protected, entry.held) = (false, false, false);
        }
        SimClient::new(self.clone())
    }
}

impl SimClient {
    pub(super) fn new(process: Process) -> SimClient {
        SimClient { process, held: BTreeMap::new() }
    }

    /// As [`enter`](Self::enter), for calls that change plain memory: they are wrong while that memory is lent.
    fn enter_own(&self) -> Result<(MutexGuard<'_, Memory>, &Arc<Shared>), Gone> {
        let (memory, shared) = self.enter()?;
        if memory.lent {
            shared.fail(format!("process {} is lent and worked on", memory.pid));
        }
        Ok((memory, shared))
    }

    /// The process's memory, if it lives. Other threads of the program have had their turn.
    fn enter(&self) -> Result<(MutexGuard<'_, Memory>, &Arc<Shared>), Gone> {
        let mut memory = self.process.lock();
        step(&mut memory, &self.process.shared)?;
        Ok((memory, &self.process.shared))
    }
}

/// Between two steps other threads of the program may act, and the process may end.
fn step(memory: &mut Memory, shared: &Arc<Shared>) -> Result<(), Gone> {
    while memory.alive && !shared.is_quiet() && memory.rng.chance(shared.options.interference) {
        let action = memory.random_action(shared);
        memory.act(shared, action);
    }
    if memory.alive { Ok(()) } else { Err(Gone) }
}

/// Now and then the process has no descriptor left to read its own mappings.
fn cannot_tell(memory: &mut Memory, shared: &Shared) -> bool {
    !shared.is_quiet() && shared.options.interference > 0 && memory.rng.chance(20)
}

impl Client for SimClient {
    fn generation(&mut self) -> u64 {
        self.process.lock().generation
    }

    fn regions(&mut self) -> Result<Option<Vec<Range>>, Gone> {
        let (mut memory, shared) = self.enter()?;
        if cannot_tell(&mut memory, shared) {
            return Ok(None);
        }
        let mut ranges: Vec<Range> = Vec::new();
        for addr in memory.entries.iter().filter(|(_, entry)| entry.managed || entry.is_pool()).map(|(addr, _)| *addr) {
            match ranges.last_mut() {
                Some(last) if last.end == addr => last.end += PAGE,
                _ => ranges.push(Range::pages_from(addr, 1)),
            }
        }
        Ok(Some(ranges))
    }

    fn pool_mappings(&mut self) -> Result<Option<Vec<PoolMapping>>, Gone> {
        let (mut memory, shared) = self.enter()?;
        if cannot_tell(&mut memory, shared) {
            return Ok(None);
        }
        let mut mappings: Vec<PoolMapping> = Vec::new();
        for (addr, entry) in &memory.entries {
            let Backing::Pool { file, index } = &entry.backing else { continue };
            match mappings.last_mut() {
                Some(last)
                    if last.range.end == *addr
                        && last.inode == file.inode
                        && u64::from(last.index) + last.range.pages() == u64::from(*index) =>
                {
                    last.range.end += PAGE;
                }
                _ => {
                    mappings.push(PoolMapping { range: Range::pages_from(*addr, 1), inode: file.inode, index: *index })
                }
            }
        }
        Ok(Some(mappings))
    }

    fn open_segment(&mut self, mapping: &PoolMapping) -> Option<Fd> {
        let mut memory = self.process.lock();
        let opens = memory.rng.chance(self.process.shared.options.inherits);
        let file = memory.entries.values().find_map(|entry| match &entry.backing {
            Backing::Pool { file, .. } if file.inode == mapping.inode => Some(file),
            _ => None,
        });
        file.filter(|_| opens)?.open()
    }

    fn watch(&mut self, ranges: &[Range]) -> Result<(), Gone> {
        let (mut memory, shared) = self.enter()?;
        for range in ranges {
            step(&mut memory, shared)?;
            // Another descriptor has the pool mappings, or all: the kernel refuses the whole range.
            if memory.lent || memory.entries.range(range.start..range.end).any(|(_, entry)| entry.is_pool()) {
                continue;
            }
            memory.entries.range_mut(range.start..range.end).for_each(|(_, entry)| entry.watched = true);
        }
        Ok(())
    }

    fn faults(&mut self) -> Option<u64> {
        let memory = self.process.lock();
        // Some kernels, and some mounts of /proc, do not tell.
        (memory.alive && memory.pid % 8 != 7).then_some(memory.faults)
    }

    fn touched(&mut self, range: Range, out: &mut Vec<Range>) -> Result<(), Gone> {
        let (memory, _) = self.enter()?;
        for (addr, entry) in memory.entries.range(range.start..range.end) {
            if !entry.protected || entry.frame == Frame::None && !entry.is_pool() {
                match out.last_mut() {
                    Some(last) if last.end == *addr => last.end += PAGE,
                    _ => out.push(Range::pages_from(*addr, 1)),
                }
            }
        }
        Ok(())
    }

    fn written(&mut self, range: Range, huge: bool, out: &mut Vec<Written>) -> Result<(), Gone> {
        let (mut memory, shared) = self.enter_own()?;
        let addrs: Vec<u64> = memory.entries.range(range.start..range.end).map(|(addr, _)| *addr).collect();
        for (count, addr) in addrs.into_iter().enumerate() {
            if count % 64 == 63 {
                step(&mut memory, shared)?;
            }
            let Some(entry) = memory.entries.get_mut(&addr) else { continue };
            let absent = matches!(entry.frame, Frame::None | Frame::Swapped { .. });
            if absent || !entry.watched || entry.protected {
                continue;
            }
            if !entry.huge || huge {
                entry.protected = true;
            }
            let (zero, swapped) = (entry.frame == Frame::Zero, false);
            let is_huge = entry.huge;
            match out.last_mut() {
                Some(last)
                    if last.range.end == addr && (last.zero, last.huge, last.swapped) == (zero, is_huge, swapped) =>
                {
                    last.range.end += PAGE;
                }
                _ => out.push(Written { range: Range::pages_from(addr, 1), zero, huge: is_huge, swapped }),
            }
        }
        Ok(())
    }

    fn broken(&mut self, range: Range, out: &mut Vec<Range>) -> Result<(), Gone> {
        let (mut memory, _) = self.enter()?;
        for (addr, entry) in memory.entries.range_mut(range.start..range.end) {
            entry.protected |= entry.held && entry.is_pool() && entry.frame == Frame::None;
            if !entry.watched && entry.frame != Frame::None {
                match out.last_mut() {
                    Some(last) if last.end == *addr => last.end += PAGE,
                    _ => out.push(Range::pages_from(*addr, 1)),
                }
            }
        }
        Ok(())
    }

    fn mapped_alone(&mut self, range: Range, out: &mut Vec<u64>) {
        let Ok((memory, _)) = self.enter() else { return };
        let is_shared = |addr: &u64| {
            memory.entries.get(addr).is_some_and(|entry| matches!(entry.frame, Frame::Own { exclusive: false, .. }))
        };
        out.extend(pages_of(range).filter(|addr| !is_shared(addr)));
    }

    fn fetch(&mut self, runs: &[Range], out: &mut [Page], readable: &mut [bool]) -> Result<(), Gone> {
        let (mut memory, shared) = self.enter()?;
        readable.fill(false);
        let addrs = runs.iter().flat_map(|range| pages_of(*range)).take(FETCH_PAGES_MAX);
        for ((addr, page), readable) in addrs.zip(out).zip(readable) {
            let Some(entry) = memory.entries.get_mut(&addr) else { continue };
            let before = entry.frame;
            match (entry.frame, &entry.backing) {
                (Frame::None, Backing::Anon) => entry.frame = Frame::Zero,
                (Frame::Swapped { content, exclusive }, _) => entry.frame = Frame::Own { content, exclusive },
                _ => {}
            }
            let faulted = entry.frame != before;
            *readable = true;
            *page = entry.visible().map_or([0xA5; PAGE_SIZE], page_of);
            memory.faults += u64::from(faulted);
            step(&mut memory, shared)?;
            // A write meanwhile leaves half of the old bytes in the copy.
            if let Some(now) = memory.entries.get(&addr).and_then(Entry::visible) {
                page[PAGE_SIZE / 2..].copy_from_slice(&page_of(now)[PAGE_SIZE / 2..]);
            }
        }
        Ok(())
    }

    fn remap(&mut self, pool: &Pool, pieces: &[RemapPiece], out: &mut Vec<Outcome>) -> Result<(), Gone> {
        let segments: BTreeSet<u32> = pieces.iter().filter_map(|piece| piece.slot).map(Slot::segment).collect();
        for segment in segments {
            let lacks =
                self.process.shared.options.lacks && cannot_tell(&mut self.process.lock(), &self.process.shared);
            match self.process.shared.file(pool, segment).filter(|_| !lacks) {
                Some(file) => self.held.insert(segment, file),
                None => self.held.remove(&segment),
            };
        }
        let (mut memory, shared) = self.enter_own()?;
        let held = &self.held;
        let mut at = 0;
        let mut whole = true;
        while at < pieces.len() {
            step(&mut memory, shared)?;
            let wrong = pieces[at].follows && !whole;
            let huge = pieces_of_one(&pieces[at..]).filter(|len| !wrong && is_huge(&memory, &pieces[at..at + len]));
            if let Some(len) = huge
                && remap_freeze(&mut memory, shared, held, &pieces[at..at + len], true, out)?
            {
                whole = out[out.len() - len..].iter().all(|outcome| outcome.why == RefusalReason::Done);
                at += len;
                continue;
            }
            let len = pieces[at..].iter().take_while(|piece| piece.freeze == pieces[at].freeze).count();
            let frozen = &pieces[at..at + len];
            if wrong {
                out.extend(frozen.iter().map(|_| Outcome { merged: 0, why: RefusalReason::Changed }));
            } else {
                remap_freeze(&mut memory, shared, held, frozen, false, out)?;
            }
            whole = out.last().is_some_and(|last| u64::from(last.merged) == frozen[len - 1].range.pages());
            at += len;
        }
        Ok(())
    }

    fn heal(&mut self, ranges: &[Range], out: &mut Vec<bool>) -> Result<(), Gone> {
        let (mut memory, shared) = self.enter()?;
        if memory.entries.values().any(|entry| entry.pinned) {
            out.extend(ranges.iter().map(|_| false));
            return Ok(());
        }
        for range in ranges {
            step(&mut memory, shared)?;
            let healed = heal(&mut memory, shared, *range)?;
            out.push(healed);
        }
        Ok(())
    }

    fn forget(&mut self, pool: &Pool) -> Result<(), Gone> {
        self.held.retain(|segment, file| pool.segment_inode(*segment) == Some(file.inode));
        Ok(())
    }

    fn lend_memory(&mut self, lent: bool) -> Result<bool, Gone> {
        let (mut memory, _) = self.enter()?;
        memory.lent = lent;
        memory.generation += 1;
        for entry in memory.entries.values_mut().filter(|entry| !entry.is_pool()) {
            (entry.watched, entry.protected) = (false, false);
        }
        Ok(true)
    }

    fn is_lent(&self) -> bool {
        self.process.lock().lent
    }
}

/// How many of the first pieces cover exactly the pages of one huge page, side by side.
fn pieces_of_one(pieces: &[RemapPiece]) -> Option<usize> {
    let start = pieces.first().map(|piece| piece.range.start).filter(|start| start.is_multiple_of(HUGE))?;
    let joined = pieces.windows(2).take_while(|pair| pair[0].range.end == pair[1].range.start).count() + 1;
    pieces[..joined].iter().position(|piece| piece.range.end == start + HUGE).map(|last| last + 1)
}

/// Whether one huge page is where they are that can be moved as it is.
fn is_huge(memory: &Memory, pieces: &[RemapPiece]) -> bool {
    let range = Range { start: pieces[0].range.start, end: pieces[pieces.len() - 1].range.end };
    let able = |entry: &Entry| {
        let own = matches!((&entry.backing, entry.frame), (Backing::Anon, Frame::Own { exclusive: true, .. }));
        own && entry.huge && !entry.pinned
    };
    pages_of(range).all(|addr| memory.entries.get(&addr).is_some_and(able))
}

/// Freeze, compare, map: the agent's steps, each with the program's other threads in between. Returns false if that was to
/// be done with a huge page as a `whole`, and something is not equal: then it is as it was.
fn remap_freeze(
    memory: &mut Memory,
    shared: &Arc<Shared>,
    held: &Held,
    pieces: &[RemapPiece],
    as_whole: bool,
    out: &mut Vec<Outcome>,
) -> Result<bool, Gone> {
    let range = Range { start: pieces[0].range.start, end: pieces[pieces.len() - 1].range.end };
    let ascending = pieces.windows(2).all(|pair| pair[0].range.end <= pair[1].range.start);
    let whole = pieces.iter().all(|piece| !piece.range.is_empty() && piece.range.start % PAGE == 0);
    if !ascending || !whole || !as_whole && range.pages() > FREEZE_PAGES_MAX {
        shared.fail(format!("pieces that no agent accepts: {pieces:?}"));
        out.extend(pieces.iter().map(|_| Outcome { merged: 0, why: RefusalReason::NotAnonymous }));
        return Ok(true);
    }
    // What the daemon has listed may have been excluded since.
    if memory.entries.range(range.start..range.end).any(|(_, entry)| entry.excluded) {
        if !as_whole {
            out.extend(pieces.iter().map(|_| Outcome { merged: 0, why: RefusalReason::NotAnonymous }));
        }
        return Ok(!as_whole);
    }
    memory.guarded = Some(range);
    let mut found: BTreeMap<u64, Found> = BTreeMap::new();
    let mut written: BTreeSet<u64> = BTreeSet::new();
    for (addr, entry) in memory.entries.range_mut(range.start..range.end) {
        if !entry.protected && !pieces.iter().any(|piece| piece.range.contains(&Range::pages_from(*addr, 1))) {
            written.insert(*addr);
        }
        (entry.watched, entry.protected) = (false, false);
    }
    if !as_whole {
        memory.split(range);
    }
    for addr in pages_of(range) {
        found.insert(addr, freeze(memory, addr));
        if !as_whole {
            step(memory, shared)?;
        }
    }
    let mut outcomes: Vec<Outcome> = Vec::new();
    for piece in pieces {
        outcomes.push(compare(memory, shared, held, piece, &mut found));
        step(memory, shared)?;
    }
    let equal = pieces.iter().zip(&outcomes).all(|(piece, outcome)| u64::from(outcome.merged) == piece.range.pages());
    if as_whole && !equal {
        found.values_mut().for_each(|found| *found = Found::Frozen);
    } else {
        memory.split(range);
    }
    // What differs goes back. A thread that discards meanwhile waits until its event is read.
    for addr in pages_of(range) {
        if matches!(found[&addr], Found::Frozen | Found::Hole) {
            drop_discarded(memory, &mut found);
            put_back(memory, addr);
            step(memory, shared)?;
        }
    }
    let mapped = if as_whole && !equal { &[] } else { pieces };
    for (piece, outcome) in mapped.iter().zip(&mut outcomes) {
        let equal = pages_of(piece.range).take_while(|addr| found[addr] == Found::Equal).count() as u32;
        if equal < outcome.merged {
            *outcome = Outcome { merged: equal, why: RefusalReason::Discarded };
        }
        let mapped = piece.range.start + u64::from(outcome.merged) * PAGE;
        for addr in pages_of(Range { start: mapped, end: piece.range.end }).filter(|addr| found[addr] == Found::Equal) {
            put_back(memory, addr);
        }
        map_piece(memory, shared, held, piece, outcome);
        step(memory, shared)?;
    }
    for addr in pages_of(range) {
        if let Some(entry) = memory.entries.get_mut(&addr) {
            entry.watched = !entry.is_pool();
            let merged = entry.is_pool() && entry.frame == Frame::None;
            entry.protected = merged || entry.watched && found[&addr] == Found::Frozen;
            entry.hidden |= entry.protected && written.contains(&addr);
        }
    }
    memory.frozen.clear();
    memory.wake(shared);
    if as_whole && !equal {
        return Ok(false);
    }
    if as_whole {
        memory.whole += 1;
    }
    out.extend(outcomes);
    Ok(true)
}

fn freeze(memory: &mut Memory, addr: u64) -> Found {
    let Some(entry) = memory.entries.get_mut(&addr) else { return Found::Left(RefusalReason::Absent) };
    if !matches!(entry.backing, Backing::Anon) {
        return Found::Left(RefusalReason::NotAnonymous);
    }
    let found = match entry.frame {
        _ if entry.pinned => return Found::Left(RefusalReason::Pinned),
        Frame::Own { exclusive: false, .. } | Frame::Swapped { exclusive: false, .. } => {
            return Found::Left(RefusalReason::Pinned);
        }
        // Pages in swap are moved as well, but not compared.
        Frame::None | Frame::Swapped { .. } => Found::Hole,
        Frame::Zero | Frame::Own { .. } => Found::Frozen,
    };
    memory.frozen.insert(addr, std::mem::replace(&mut entry.frame, Frame::None));
    found
}

fn compare(
    memory: &Memory,
    shared: &Shared,
    held: &Held,
    piece: &RemapPiece,
    found: &mut BTreeMap<u64, Found>,
) -> Outcome {
    let file = piece.slot.and_then(|slot| held.get(&slot.segment()));
    if piece.slot.is_some() && file.is_none() {
        return Outcome { merged: 0, why: RefusalReason::NotAnonymous };
    }
    for (page, addr) in pages_of(piece.range).enumerate() {
        let why = match found[&addr] {
            Found::Left(why) => why,
            Found::Equal => RefusalReason::NotAnonymous,
            Found::Hole => RefusalReason::Absent,
            Found::Frozen => {
                let content = match memory.frozen.get(&addr) {
                    Some(Frame::Own { content, .. }) => *content,
                    _ => 0,
                };
                let wanted = match (&file, piece.slot) {
                    (Some(file), Some(slot)) => file.content(slot.index() + page as u32),
                    _ => Some(0),
                };
                if wanted == Some(content) || !shared.options.compare {
                    RefusalReason::Done
                } else {
                    RefusalReason::Changed
                }
            }
        };
        if why != RefusalReason::Done {
            return Outcome { merged: page as u32, why };
        }
        found.insert(addr, Found::Equal);
    }
    Outcome { merged: piece.range.pages() as u32, why: RefusalReason::Done }
}

/// Reads the events of discards: what is frozen of their ranges is void, and the discarding threads go on.
fn drop_discarded(memory: &mut Memory, found: &mut BTreeMap<u64, Found>) {
    for range in std::mem::take(&mut memory.events) {
        for addr in pages_of(range) {
            if let Some(frame) = memory.frozen.get_mut(&addr) {
                *frame = Frame::None;
                found.insert(addr, Found::Hole);
            }
        }
        // Pool mappings in its range outside the freeze are replaced after the remap.
        let outside: Vec<Range> = pages_of(range)
            .filter(|addr| memory.entries.get(addr).is_some_and(Entry::is_pool))
            .map(|addr| Range::pages_from(addr, 1))
            .collect();
        for addr in pages_of(range).filter(|addr| !outside.iter().any(|page| page.start == *addr)) {
            memory.discard(Range::pages_from(addr, 1));
        }
        memory.events.extend(outside);
    }
}

fn forget(memory: &mut Memory, addr: u64) {
    memory.frozen.remove(&addr);
}

fn put_back(memory: &mut Memory, addr: u64) {
    if let (Some(frame), Some(entry)) = (memory.frozen.remove(&addr), memory.entries.get_mut(&addr)) {
        entry.frame = frame;
    }
}

fn map_piece(memory: &mut Memory, shared: &Shared, held: &Held, piece: &RemapPiece, outcome: &mut Outcome) {
    let range = Range::pages_from(piece.range.start, u64::from(outcome.merged));
    let Some(slot) = piece.slot else {
        // Zero pages: what was there is dropped, and a hole stays.
        pages_of(range).for_each(|addr| forget(memory, addr));
        return;
    };
    let file = held.get(&slot.segment());
    let before = memory.entries.clone_range(range);
    let mut refused = file.is_none();
    if let Some(file) = file {
        for (page, addr) in pages_of(range).enumerate() {
            // Unmapped meanwhile by a raw call: the mapping that appears belongs to no client until the process ends.
            let before = memory.entries.get(&addr);
            let managed = before.is_some_and(|entry| entry.managed);
            let excluded = before.is_some_and(|entry| entry.excluded);
            let on_fork = before.map_or(OnFork::Copied, |entry| entry.on_fork);
            let backing = Backing::Pool { file: file.clone(), index: slot.index() + page as u32 };
            let frame = Frame::None;
            let entry = Entry {
                backing,
                frame,
                watched: false,
                protected: false,
                held: true,
                pinned: false,
                huge: false,
                managed,
                excluded,
                on_fork,
                hidden: false,
            };
            memory.entries.insert(addr, entry);
        }
        refused = shared.options.mappings_max.is_some_and(|max| memory.mappings() > max);
    }
    if refused {
        pages_of(range).for_each(|addr| drop(memory.entries.remove(&addr)));
        memory.entries.extend(before);
        pages_of(range).for_each(|addr| put_back(memory, addr));
        *outcome = Outcome { merged: 0, why: RefusalReason::Limit };
        return;
    }
    pages_of(range).for_each(|addr| forget(memory, addr));
}

trait CloneRange {
    fn clone_range(&self, range: Range) -> Vec<(u64, Entry)>;
}

impl CloneRange for BTreeMap<u64, Entry> {
    fn clone_range(&self, range: Range) -> Vec<(u64, Entry)> {
        self.range(range.start..range.end).map(|(addr, entry)| (*addr, entry.clone())).collect()
    }
}

/// Private memory in place of a pool mapping, by two moves of mappings.
fn heal(memory: &mut Memory, shared: &Arc<Shared>, range: Range) -> Result<bool, Gone> {
    let mapping = pages_of(range).all(|addr| memory.entries.get(&addr).is_some_and(Entry::is_pool));
    let joined =
        memory.entries.range(range.start..range.end).zip(memory.entries.range(range.start + PAGE..range.end)).all(
            |((_, entry), (_, next))| match (&entry.backing, &next.backing) {
                (Backing::Pool { file, index }, Backing::Pool { file: other, index: after }) => {
                    file.inode == other.inode && index + 1 == *after
                }
                _ => false,
            },
        );
    if range.is_empty() || range.pages() > FREEZE_PAGES_MAX || !mapping || !joined {
        return Ok(false);
    }
    memory.guarded = Some(range);
    let bytes: Vec<Option<u32>> = pages_of(range).map(|addr| memory.entries[&addr].visible()).collect();
    for addr in pages_of(range) {
        memory.frozen.insert(addr, Frame::None);
    }
    step(memory, shared)?;
    for (addr, content) in pages_of(range).zip(bytes) {
        let frame = content.map_or(Frame::None, |content| Frame::Own { content, exclusive: true });
        if let Some(entry) = memory.entries.get_mut(&addr) {
            entry.backing = Backing::Anon;
            entry.frame = frame;
            (entry.watched, entry.protected, entry.held) = (true, true, false);
        }
    }
    memory.frozen.clear();
    memory.wake(shared);
    Ok(true)
}

/// A client that lies, in every way that the trait leaves open. Only its own process may suffer.
#[derive(Debug)]
pub struct Hostile {
    honest: SimClient,
    rng: super::Rng,
}

impl Hostile {
    /// Makes a liar of an honest client.
    pub fn new(honest: SimClient, seed: u64) -> Hostile {
        Hostile { honest, rng: super::Rng::new(seed) }
    }

    fn lies(&mut self) -> bool {
        self.rng.chance(300)
    }

    fn nonsense(&mut self) -> Range {
        const LIMITS: [u64; 6] = [0, PAGE, 1 << 40, 1 << 47, 1 << 57, u64::MAX];
        let start = LIMITS[self.rng.below(6) as usize].wrapping_add(self.rng.below(1 << 14));
        let len = LIMITS[self.rng.below(6) as usize].wrapping_add(self.rng.below(1 << 14));
        let mut range = Range { start, end: start.saturating_add(len) };
        if self.rng.chance(500) {
            range.start &= !(PAGE - 1);
            range.end &= !(PAGE - 1);
        }
        if self.rng.chance(100) {
            std::mem::swap(&mut range.start, &mut range.end);
        }
        range
    }
}

impl Client for Hostile {
    fn generation(&mut self) -> u64 {
        self.rng.number()
    }

    fn regions(&mut self) -> Result<Option<Vec<Range>>, Gone> {
        let Some(mut regions) = self.honest.regions()? else { return Ok(None) };
        if self.rng.chance(100) {
            match self.rng.below(4) {
                0 => regions.insert(0, self.nonsense()),
                1 => regions.push(self.nonsense()),
                2 => regions.reverse(),
                _ => regions.extend(regions.clone()),
            }
        }
        Ok(Some(regions))
    }

    fn pool_mappings(&mut self) -> Result<Option<Vec<PoolMapping>>, Gone> {
        let Some(mut mappings) = self.honest.pool_mappings()? else { return Ok(None) };
        if self.lies() {
            match self.rng.below(4) {
                0 => mappings.clear(),
                1 => {
                    let range = self.nonsense();
                    let inode = mappings.first().map_or(1, |mapping| mapping.inode);
                    mappings.push(PoolMapping { range, inode, index: self.rng.number() as u32 });
                }
                2 => mappings.reverse(),
                _ => {
                    let shift = self.rng.below(3000) as u32;
                    mappings.iter_mut().for_each(|mapping| mapping.index = mapping.index.wrapping_add(shift));
                }
            }
        }
        Ok(Some(mappings))
    }

    fn open_segment(&mut self, mapping: &PoolMapping) -> Option<Fd> {
        self.honest.open_segment(mapping)
    }

    fn watch(&mut self, ranges: &[Range]) -> Result<(), Gone> {
        if self.lies() { Ok(()) } else { self.honest.watch(ranges) }
    }

    fn touched(&mut self, range: Range, out: &mut Vec<Range>) -> Result<(), Gone> {
        self.honest.touched(range, out)?;
        if self.lies() {
            out.push(if self.rng.chance(500) { self.nonsense() } else { range });
        }
        Ok(())
    }

    fn written(&mut self, range: Range, huge: bool, out: &mut Vec<Written>) -> Result<(), Gone> {
        self.honest.written(range, huge, out)?;
        if self.lies() {
            let (zero, is_huge, swapped) = (self.rng.chance(200), self.rng.chance(200), self.rng.chance(200));
            let lie = if self.rng.chance(500) { self.nonsense() } else { range };
            out.push(Written { range: lie, zero, huge: is_huge, swapped });
        }
        Ok(())
    }

    fn broken(&mut self, range: Range, out: &mut Vec<Range>) -> Result<(), Gone> {
        self.honest.broken(range, out)?;
        if self.lies() {
            out.push(if self.rng.chance(500) { self.nonsense() } else { range });
        }
        Ok(())
    }

    fn fetch(&mut self, runs: &[Range], out: &mut [Page], readable: &mut [bool]) -> Result<(), Gone> {
        self.honest.fetch(runs, out, readable)?;
        if self.lies() {
            let content = self.rng.below(20) as u32;
            out.iter_mut().for_each(|page| *page = page_of(content));
            readable.fill(true);
        }
        Ok(())
    }

    fn remap(&mut self, pool: &Pool, pieces: &[RemapPiece], out: &mut Vec<Outcome>) -> Result<(), Gone> {
        self.honest.remap(pool, pieces, out)?;
        if self.lies() {
            match self.rng.below(4) {
                0 => out.clear(),
                1 => out.extend(out.clone()),
                2 => out.iter_mut().for_each(|outcome| outcome.merged = u32::MAX),
                _ => out.iter_mut().for_each(|outcome| *outcome = Outcome { merged: 0, why: RefusalReason::Done }),
            }
        }
        Ok(())
    }

    fn heal(&mut self, ranges: &[Range], out: &mut Vec<bool>) -> Result<(), Gone> {
        self.honest.heal(ranges, out)?;
        if self.lies() {
            match self.rng.below(3) {
                0 => out.clear(),
                1 => out.extend(out.clone()),
                _ => out.iter_mut().for_each(|done| *done = !*done),
            }
        }
        Ok(())
    }

    fn forget(&mut self, pool: &Pool) -> Result<(), Gone> {
        self.honest.forget(pool)
    }

    fn lend_memory(&mut self, lent: bool) -> Result<bool, Gone> {
        // A liar reports that it left and stays.
        if self.lies() {
            self.honest.lend_memory(false).map(|_| self.rng.chance(500))
        } else {
            self.honest.lend_memory(lent)
        }
    }

    fn is_lent(&self) -> bool {
        self.honest.is_lent()
    }
}
