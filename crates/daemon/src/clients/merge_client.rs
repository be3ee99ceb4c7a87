//! A live process behind its agent: the [`Client`] that the daemon merges.
//!
//! One request at a time goes over the socket; lists and pages come through the
//! channel. Nothing that stands in the channel is believed: lists are copied
//! and checked against what was asked, pages are copied before they are
//! fingerprinted. A client that does not answer in time, or answers what
//! cannot be, is gone.

use crate::clients::agent_requests::AgentRequests;
use crate::clients::attached::{Attached, NotStopped};
use crate::clients::connection::{Connection, drop_aside};
use crate::clients::handshake::{GreetError, receive_ready};
use crate::clients::held_segments::HeldSegments;
use crate::clients::leftover::State;
use crate::clients::pinning;
use crate::clients::shared_client::SharedClient;
use crate::config::Leftover;
use crate::domain_key::DomainKey;
use pagefold_entry::memory::Memory;
use pagefold_merge::client::{Client, FETCH_PAGES_MAX, Gone, MAPPINGS_MAX, Outcome, PoolMapping, RemapPiece, Written};
use pagefold_os::fd::Fd;
use pagefold_os::sync::lock;
use pagefold_os::{ADDRESS_MAX, PAGE_SIZE, Page, Range, memfd, pagemap, ranges, sock};
use pagefold_pool::Pool;
use pagefold_protocol::channel::Channel;
use pagefold_protocol::handshake::send_welcome;
use pagefold_protocol::message::{
    self, EarlierSegment, LIST_MAX, Op, PIECE_ZERO, Packet, RefusalReason, RegionEntry, SEGMENTS_PER_REQUEST,
};
use std::collections::{BTreeSet, HashMap};
use std::ffi::CString;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

const PAGE: u64 = PAGE_SIZE as u64;

/// Longest time that an answer may take before the client is given up, in milliseconds.
///
/// Long, because a stopped process (SIGSTOP, a debugger) is no enemy; its worker waits, others go on.
const ANSWER_MS_MAX: u64 = 5_000;
/// Managed ranges of one client that are asked for: four times as many as an agent notes. Those with the lowest addresses
/// are managed.
pub(crate) const REGIONS_MAX: usize = 1 << 16;
/// After so many pages the threads of an attached program go on: stops are about 5 ms long then.
const STOP_PAGES: u64 = 2048;
/// Pages that one request unshares at most. The program waits for them; an attached one stands still meanwhile.
const UNSHARE_PAGES: u64 = 512;
/// Longest pause between two such requests.
const UNSHARE_PAUSE_MAX: Duration = Duration::from_millis(10);
/// Periods after which a client's new memory may be handed to KSM too.
const HAND_PERIODS: u64 = 8;
/// Requests by which a client's memory is taken back from KSM at most: enough for any, and a liar's end.
const TAKE_BACK_MAX: usize = 1 << 16;
/// Ranges that one pagemap scan returns at most.
const SCANNED_MAX: usize = 4096;

/// A client process.
pub struct MergeClient {
    requests: AgentRequests,
    pagemap: Fd,
    shared: Arc<SharedClient>,
    held: HeldSegments,
    /// It may still have segments of earlier daemons without a number of ours.
    keeps_earlier: bool,
    /// Inodes of those that it has not.
    lacks_earlier: BTreeSet<u64>,
    scan: Vec<pagemap::ScannedRange>,
    /// Pages of the channel, from its first page for contents on, that are there.
    room: usize,
    /// It came with its plain memory in the cold tier's hands.
    away: bool,
    /// An attached process, and its memory.
    attached: Option<(Arc<Attached>, Memory)>,
    /// What the daemon does with leftovers, and the client's domain.
    policy: (Leftover, DomainKey),
    /// Periods since its leftover was handed, and of what generation of its memory.
    handed: (u64, u64),
}

impl MergeClient {
    /// Answers the greeting `hello` that came with `fds` and makes the link.
    ///
    /// # Errors
    /// [`GreetError`].
    pub fn greet(
        socket: Arc<Connection>,
        hello: &Packet,
        mut fds: sock::Fds,
        device: Option<&Fd>,
        policy: (Leftover, DomainKey),
    ) -> Result<MergeClient, GreetError> {
        let cred = sock::peer(&socket)?;
        let pagemap = fds.take(0).filter(pagemap::is_one).ok_or(GreetError::Protocol)?;
        let channel = Channel::create(c"pagefold-channel")?;
        sock::set_timeout(&socket, ANSWER_MS_MAX)?;
        send_welcome(&socket, &channel, device)?;
        receive_ready(&socket)?;
        let name = pagefold_os::procfs::name(cred.pid).unwrap_or_else(|| "?".into());
        let attached = Attached::of_peer(&socket, cred.pid, hello)?.map(with_memory).transpose()?;
        Ok(MergeClient {
            requests: AgentRequests::new(socket),
            pagemap,
            shared: Arc::new(SharedClient::new(
                (cred.pid, cred.uid),
                name,
                hello.a & message::HELLO_ALL != 0,
                attached.as_ref().map(|(process, _)| process.clone()),
                channel,
            )),
            held: HeldSegments::new(),
            keeps_earlier: true,
            lacks_earlier: BTreeSet::new(),
            scan: vec![pagemap::ScannedRange::default(); SCANNED_MAX],
            room: 0,
            away: hello.a & message::HELLO_LENT != 0,
            attached,
            policy,
            handed: (0, 0),
        })
    }

    /// What others may see of the link.
    pub fn shared(&self) -> Arc<SharedClient> {
        self.shared.clone()
    }

    /// A request that replaces mappings. No call of an attached program is followed, so its threads stand still meanwhile;
    /// `EBUSY` if that is not to be had now.
    fn ask_while_stopped(
        &mut self,
        op: Op,
        count: usize,
        a: u64,
        fds: &[i32],
    ) -> Result<Result<usize, pagefold_os::Errno>, Gone> {
        let requests = &mut self.requests;
        let Some((process, _)) = &self.attached else { return requests.ask_for(op, count, a, 0, fds) };
        match process.while_stopped(|still| requests.ask_then(op, count, a, 0, fds, |socket| still.hurry(socket))) {
            Ok(answer) => answer,
            Err(NotStopped::Ended) => Err(Gone),
            Err(NotStopped::Busy) => Ok(Err(pagefold_os::Errno(libc::EBUSY))),
        }
    }

    /// Reads `runs` of an attached program. Its agent must not wait for a page: the agent sees no call that takes memory
    /// away, and might wait for an answer of its own. This way of reading waits for none.
    fn read_attached(memory: &Memory, runs: &[Range], out: &mut [Page], readable: &mut [bool]) {
        let addresses = runs.iter().flat_map(|run| (run.start..run.end).step_by(PAGE_SIZE));
        for ((addr, page), readable) in addresses.zip(out).zip(readable) {
            *readable = memory.read(addr, page).is_ok();
        }
    }

    /// The first of `pieces` that one request can ask for: as many as bring few enough new segments. Freezes stay whole
    /// unless one alone needs more. It has no piece if the pool has no longer the segment of the first one.
    fn next_batch(&self, pool: &Pool, pieces: &[RemapPiece]) -> Batch {
        let mut batch = Batch::default();
        let mut places = HashMap::new();
        let mut pages = 0;
        for piece in pieces {
            let begins_freeze = batch.pieces == 0 || piece.freeze != pieces[batch.pieces - 1].freeze;
            if self.attached.is_some() && begins_freeze && pages >= STOP_PAGES {
                break;
            }
            pages += piece.range.pages();
            if let Some(slot) = piece.slot {
                let id = slot.segment();
                // Two segments of one place cannot serve one request.
                if *places.entry(HeldSegments::place(id)).or_insert(id) != id {
                    break;
                }
                // The caller holds a slot of it, so it stays the same segment until the request is answered.
                let Some(inode) = pool.segment_inode(id) else { break };
                if !self.held.has(id, inode) && batch.new_segments.iter().all(|new| (new.id, new.inode) != (id, inode))
                {
                    if batch.new_segments.len() == SEGMENTS_PER_REQUEST {
                        break;
                    }
                    let Some(file) = pool.segment_fd(id) else { break };
                    batch.new_segments.push(NewSegment { id, inode, file });
                }
            }
            batch.pieces += 1;
        }
        batch
    }

    /// Has the agent show `pieces`, which need `new_segments`.
    fn remap_batch(
        &mut self,
        pieces: &[RemapPiece],
        new_segments: &[NewSegment],
        out: &mut Vec<Outcome>,
    ) -> Result<(), Gone> {
        for (index, piece) in pieces.iter().enumerate() {
            let (segment, slot) = piece.slot.map_or((PIECE_ZERO, 0), |slot| (slot.segment(), slot.index()));
            self.shared.channel.put_request(
                index,
                message::RemapPiece {
                    addr: piece.range.start,
                    pages: piece.range.pages() as u32,
                    segment,
                    slot,
                    freeze: piece.freeze,
                    follows: piece.follows.into(),
                },
            );
        }
        for (index, new) in new_segments.iter().enumerate() {
            self.shared.channel.put_request(LIST_MAX - 1 - index, new.id);
            self.held.note(new.id, new.inode);
        }
        let fds: Vec<i32> = new_segments.iter().map(|new| new.file.raw()).collect();
        let answer = self.ask_while_stopped(Op::Remap, pieces.len(), new_segments.len() as u64, &fds)?;
        if answer.is_err() {
            new_segments.iter().for_each(|new| self.held.doubt(new.id));
        }
        let count = answer.unwrap_or(0);
        for (index, piece) in pieces.iter().enumerate() {
            let outcome = if index < count { self.shared.channel.answer(index) } else { message::Outcome::default() };
            let pages = piece.range.pages() as u32;
            if outcome.merged > pages {
                return Err(Gone);
            }
            let why =
                if outcome.merged == pages { RefusalReason::Done } else { RefusalReason::from_number(outcome.reason) };
            if let Some(slot) = piece.slot.filter(|_| outcome.merged == 0 && why == RefusalReason::NotAnonymous) {
                // As it says, too, when it has no such segment: no descriptor or no mapping was left for it.
                self.held.doubt(slot.segment());
            }
            out.push(Outcome { merged: outcome.merged, why });
        }
        Ok(())
    }

    /// Has room for `pages` pages in the channel; false if there is none.
    fn make_room(&mut self, pages: usize) -> bool {
        let there = pages <= self.room || self.shared.channel.populate(self.room..pages);
        if there {
            self.room = self.room.max(pages);
        }
        there
    }

    fn scan_all(
        &mut self,
        range: Range,
        query: pagemap::Query,
        mut f: impl FnMut(&pagemap::ScannedRange),
    ) -> Result<(), Gone> {
        let mut start = range.start;
        while start < range.end {
            let part = Range { start, end: range.end };
            match pagemap::scan(&self.pagemap, part, query, &mut self.scan) {
                Ok((count, walked)) => {
                    self.scan[..count].iter().for_each(&mut f);
                    if walked <= start {
                        return Ok(());
                    }
                    start = walked;
                }
                // The process has ended (its memory is gone), or the range is nonsense.
                Err(_) => return Err(Gone),
            }
        }
        Ok(())
    }

    /// Has the agent hand over a segment of an earlier daemon.
    fn open_earlier(&mut self, inode: u64) -> Option<Fd> {
        if !self.keeps_earlier || self.lacks_earlier.contains(&inode) {
            return None;
        }
        let (is_granted, mut fds) = self.requests.ask_for_files(Op::OpenEarlier, inode).ok()?;
        match fds.take(0) {
            Some(file) if is_granted && fds.len() == 1 && memfd::is_one(&file) => Some(file),
            other => {
                self.lacks_earlier.insert(inode);
                // What else a client sends may be slow to close.
                drop_aside((other, fds));
                None
            }
        }
    }

    /// What the process lists, all of it or (`None`: it cannot read its own mappings now) nothing.
    fn list(&mut self, pool: bool) -> Result<Option<Vec<RegionEntry>>, Gone> {
        let mut all: Vec<RegionEntry> = Vec::new();
        let mut from = 0;
        loop {
            let Ok(count) = self.requests.ask_for(Op::Regions, 0, u64::from(pool), from, &[])? else { return Ok(None) };
            for index in 0..count {
                let entry: RegionEntry = self.shared.channel.answer(index);
                let aligned = entry.start.is_multiple_of(PAGE) && entry.end.is_multiple_of(PAGE);
                let ascending = all.last().is_none_or(|last| last.end <= entry.start);
                if !aligned || !ascending || entry.start >= entry.end || entry.end > ADDRESS_MAX || entry.slot > 1 << 24
                {
                    return Err(Gone);
                }
                all.push(entry);
            }
            if all.len() > MAPPINGS_MAX {
                return Err(Gone);
            }
            if count < LIST_MAX || !pool && all.len() >= REGIONS_MAX {
                return Ok(Some(all));
            }
            from = all.last().map_or(u64::MAX, |last| last.end);
        }
    }

    /// Has the agent hand private mappings of files to KSM, once for each `generation` of the client's memory: of all that
    /// is managed, only KSM can merge pages that were written there.
    fn hand_file_copies(&mut self, generation: u64) -> Result<(), Gone> {
        let is_due = self.handed.1 != generation && self.handed.0 >= HAND_PERIODS;
        if !self.shared.manages_all || !is_due {
            return Ok(());
        }
        self.handed.0 = 0;
        if self.before_asking().is_none() {
            self.handed.1 = generation;
            if self.requests.ask_for(Op::Leftover, 0, 2, 0, &[])? == Ok(1) {
                *lock(&self.shared.leftover) = State::FilesHanded;
            }
        }
        Ok(())
    }

    /// What becomes of a leftover without asking the agent; `None` if the agent shall hand it.
    fn before_asking(&self) -> Option<State> {
        State::before_asking(self.policy.0, &self.policy.1)
    }
}

/// What one request can ask for.
#[derive(Default)]
struct Batch {
    /// How many of the pieces that are left.
    pieces: usize,
    /// What the agent needs for them and does not hold.
    new_segments: Vec<NewSegment>,
}

/// A segment that the agent does not hold.
struct NewSegment {
    id: u32,
    inode: u64,
    file: Arc<Fd>,
}

/// An attached process with its memory: opened by a number, which is the process's if it lives still.
fn with_memory(process: Arc<Attached>) -> Result<(Arc<Attached>, Memory), GreetError> {
    let memory = Memory::open(process.traces.pid)
        .map_err(|error| GreetError::System(pagefold_os::Errno(error.raw_os_error().unwrap_or(libc::EIO))))?;
    if process.has_ended() { Err(GreetError::HungUp) } else { Ok((process, memory)) }
}

impl Client for MergeClient {
    fn generation(&mut self) -> u64 {
        self.shared.counters().generation.load(Ordering::Acquire)
    }

    fn regions(&mut self) -> Result<Option<Vec<Range>>, Gone> {
        let range = |entry: &RegionEntry| Range { start: entry.start, end: entry.end };
        Ok(self.list(false)?.map(|entries| entries.iter().map(range).collect()))
    }

    fn pool_mappings(&mut self) -> Result<Option<Vec<PoolMapping>>, Gone> {
        let mapping = |entry: &RegionEntry| PoolMapping {
            range: Range { start: entry.start, end: entry.end },
            inode: entry.inode,
            index: entry.slot as u32,
        };
        Ok(self.list(true)?.map(|entries| entries.iter().map(mapping).collect()))
    }

    fn open_segment(&mut self, mapping: &PoolMapping) -> Option<Fd> {
        let Range { start, end } = mapping.range;
        let path = CString::new(format!("/proc/{}/map_files/{start:x}-{end:x}", self.shared.pid)).ok()?;
        // Nothing is opened but the path: by now there may be a file that its file system is slow to open.
        Fd::open(&path, libc::O_PATH, 0).ok().or_else(|| self.open_earlier(mapping.inode))
    }

    fn keeps_earlier_segments(&self) -> bool {
        self.keeps_earlier
    }

    fn name_earlier_segments(&mut self, names: &[(u64, u32)]) -> Result<(), Gone> {
        let mut lists = names.chunks(LIST_MAX).peekable();
        loop {
            // The last one, which may be empty, says that no other follows.
            let names = lists.next().unwrap_or_default();
            let is_last = lists.peek().is_none();
            for (index, (inode, id)) in names.iter().enumerate() {
                self.shared.channel.put_request(index, EarlierSegment { inode: *inode, id: u64::from(*id) });
            }
            let count = self.requests.ask(Op::NameEarlier, names.len(), u64::from(is_last), 0)?.min(names.len());
            for (index, (inode, id)) in names[..count].iter().enumerate() {
                if self.shared.channel.answer::<u64>(index) == 1 {
                    self.held.note(*id, *inode);
                }
            }
            if is_last {
                break;
            }
        }
        self.keeps_earlier = false;
        self.lacks_earlier = BTreeSet::new();
        self.held.ask_again();
        Ok(())
    }

    fn watch(&mut self, ranges: &[Range]) -> Result<(), Gone> {
        for batch in ranges.chunks(LIST_MAX / 2) {
            batch.iter().enumerate().for_each(|(index, range)| self.shared.channel.put_request(index, *range));
            // A range that cannot be watched is never reported as written: it is simply not merged.
            self.requests.ask(Op::Watch, batch.len(), 0, 0)?;
        }
        Ok(())
    }

    fn faults(&mut self) -> Option<u64> {
        pagefold_os::procfs::faults(self.shared.pid)
    }

    fn mapped_alone(&mut self, range: Range, out: &mut Vec<u64>) {
        // What the kernel does not tell the freeze finds out.
        let before = out.len();
        if pagemap::each_alone(&self.pagemap, range, |addr| out.push(addr)).is_err() {
            out.truncate(before);
            out.extend((range.start..range.end).step_by(PAGE_SIZE));
        }
    }

    fn touched(&mut self, range: Range, out: &mut Vec<Range>) -> Result<(), Gone> {
        // For just this question the kernel has a loop that reads the page table and nothing else.
        let query = pagemap::Query { all_of: pagemap::WRITTEN, report: pagemap::WRITTEN, ..Default::default() };
        self.scan_all(range, query, |scanned| {
            ranges::append(out, Range { start: scanned.start, end: scanned.end });
        })
    }

    fn written(&mut self, range: Range, huge: bool, out: &mut Vec<Written>) -> Result<(), Gone> {
        let report = pagemap::PFNZERO | pagemap::HUGE;
        let push = |scanned: &pagemap::ScannedRange, out: &mut Vec<Written>, huge: bool| {
            out.push(Written {
                range: Range { start: scanned.start, end: scanned.end },
                zero: scanned.categories & pagemap::PFNZERO != 0,
                swapped: false,
                huge,
            });
        };
        // Absent pages count as written for the kernel; there is nothing to merge in them.
        let wanted = pagemap::WPALLOWED | pagemap::WRITTEN | pagemap::PRESENT;
        let query = if huge {
            pagemap::Query { all_of: wanted, report, flags: pagemap::PROTECT, ..Default::default() }
        } else {
            let all_of = wanted | pagemap::HUGE;
            pagemap::Query { all_of, inverted: pagemap::HUGE, report, flags: pagemap::PROTECT, ..Default::default() }
        };
        self.scan_all(range, query, |scanned| push(scanned, out, huge && scanned.categories & pagemap::HUGE != 0))?;
        if !huge {
            let all_of = wanted | pagemap::HUGE;
            let query = pagemap::Query { all_of, report, ..Default::default() };
            self.scan_all(range, query, |scanned| push(scanned, out, true))?;
        }
        Ok(())
    }

    fn broken(&mut self, range: Range, out: &mut Vec<Range>) -> Result<(), Gone> {
        // Pages of the pool file are protected; what is written from now on is told by the next look.
        let query = pagemap::Query { all_of: pagemap::MERGED, flags: pagemap::PROTECT, ..Default::default() };
        pagemap::protect(&self.pagemap, range, query).map_err(|_| Gone)?;
        // In memory or swap, and not a file's page: a private copy.
        let all_of = pagemap::FILE;
        let any_of = pagemap::PRESENT | pagemap::SWAPPED;
        let query = pagemap::Query { all_of, inverted: all_of, any_of, report: pagemap::PRESENT, ..Default::default() };
        self.scan_all(range, query, |scanned| out.push(Range { start: scanned.start, end: scanned.end }))
    }

    fn fetch(&mut self, runs: &[Range], out: &mut [Page], readable: &mut [bool]) -> Result<(), Gone> {
        readable.fill(false);
        let pages: u64 = runs.iter().map(Range::pages).sum();
        if pages > FETCH_PAGES_MAX as u64 || pages as usize > out.len() || runs.len() > LIST_MAX {
            return Ok(());
        }
        if let Some((_, memory)) = &self.attached {
            MergeClient::read_attached(memory, runs, out, readable);
            return Ok(());
        }
        if !self.make_room(pages as usize) {
            return Ok(());
        }
        runs.iter().enumerate().for_each(|(index, range)| self.shared.channel.put_request(index, *range));
        let count = self.requests.ask(Op::Fetch, runs.len(), 0, 0)?;
        let mut at = 0;
        for (index, range) in runs.iter().enumerate() {
            let wanted = range.pages() as usize;
            let copied =
                if index < count { (self.shared.channel.answer::<u64>(index) as usize).min(wanted) } else { 0 };
            for page in at..at + copied {
                self.shared.channel.read_page(page, &mut out[page]);
                readable[page] = true;
            }
            at += wanted;
        }
        Ok(())
    }

    fn remap(&mut self, pool: &Pool, pieces: &[RemapPiece], out: &mut Vec<Outcome>) -> Result<(), Gone> {
        let mut rest = pieces;
        while !rest.is_empty() {
            let batch = self.next_batch(pool, rest);
            let pieces;
            (pieces, rest) = rest.split_at(batch.pieces.max(1));
            if batch.pieces == 0 {
                out.push(Outcome { merged: 0, why: RefusalReason::NotAnonymous });
            } else {
                self.remap_batch(pieces, &batch.new_segments, out)?;
            }
        }
        Ok(())
    }

    fn heal(&mut self, ranges: &[Range], out: &mut Vec<bool>) -> Result<(), Gone> {
        if pinning::way(self.shared.pid).is_some() {
            out.extend(ranges.iter().map(|_| false));
            return Ok(());
        }
        for batch in batches(ranges, UNSHARE_PAGES) {
            let began = Instant::now();
            batch.iter().enumerate().for_each(|(index, range)| self.shared.channel.put_request(index, *range));
            let count = self.ask_while_stopped(Op::Unshare, batch.len(), 0, &[])?.unwrap_or(0);
            out.extend((0..batch.len()).map(|index| index < count && self.shared.channel.answer::<i32>(index) == 0));
            // An agent that never rests is what the scheduler preempts first, also while the program waits for it. The
            // program gets half of the time.
            if pages_of(batch) > UNSHARE_PAGES / 2 {
                std::thread::sleep(began.elapsed().min(UNSHARE_PAUSE_MAX));
            }
        }
        Ok(())
    }

    fn forget(&mut self, pool: &Pool) -> Result<(), Gone> {
        let released = self.held.take_released(pool);
        released.iter().enumerate().for_each(|(index, id)| self.shared.channel.put_request(index, *id));
        if !released.is_empty() {
            self.requests.ask(Op::CloseSegments, released.len(), 0, 0)?;
        }
        Ok(())
    }

    fn lend_memory(&mut self, lent: bool) -> Result<bool, Gone> {
        Ok(self.requests.ask_for(Op::Lend, 0, u64::from(lent), 0, &[])?.is_ok())
    }

    fn is_lent(&self) -> bool {
        self.away
    }

    fn settle_leftover(&mut self, left_out: bool) -> Result<(), Gone> {
        let before = *lock(&self.shared.leftover);
        let is_handed = self.shared.counters().leftover_bytes.load(Ordering::Relaxed) > 0;
        self.handed.0 += 1;
        let generation = self.generation();
        if matches!(before, State::None | State::FilesHanded) && !left_out {
            // An earlier daemon had the agent hand it, and this one would not.
            let withdraws = is_handed && matches!(self.before_asking(), Some(State::Off | State::Named));
            return if withdraws { self.take_back_leftover() } else { self.hand_file_copies(generation) };
        }
        // New memory of the program is handed as well, at a measured pace: each time the agent looks at all mappings.
        if before == State::Handed && (!left_out && self.handed.1 == generation || self.handed.0 < HAND_PERIODS) {
            return Ok(());
        }
        let state = match self.before_asking() {
            Some(state) => state,
            None => {
                self.handed = (0, generation);
                self.requests.ask_for(Op::Leftover, 0, 1, 0, &[])?.map_or_else(State::Refused, |_| State::Handed)
            }
        };
        *lock(&self.shared.leftover) = state;
        Ok(())
    }

    fn take_back_leftover(&mut self) -> Result<(), Gone> {
        // It is not handed again before the program has other memory.
        self.handed = (0, self.generation());
        for _ in 0..TAKE_BACK_MAX {
            let began = Instant::now();
            // What the kernel has no memory for stays KSM's, and `status` goes on to count it.
            if self.requests.ask(Op::Leftover, 0, 0, 0)? == 0 {
                break;
            }
            // The program gets half of the time.
            std::thread::sleep(began.elapsed().min(UNSHARE_PAUSE_MAX));
        }
        *lock(&self.shared.leftover) = State::None;
        Ok(())
    }

    fn release_buffers(&mut self) {
        if std::mem::take(&mut self.room) > 0 {
            self.shared.channel.release_pages();
        }
    }

    fn cpu_ns(&mut self) -> u64 {
        self.shared.cpu_ns()
    }
}

impl Drop for MergeClient {
    fn drop(&mut self) {
        self.requests.shut();
    }
}

/// Pages of all `ranges`.
fn pages_of(ranges: &[Range]) -> u64 {
    ranges.iter().map(Range::pages).sum()
}

/// `ranges` in batches of `pages_max` pages at most. A longer range is a batch of its own.
fn batches(mut ranges: &[Range], pages_max: u64) -> impl Iterator<Item = &[Range]> {
    std::iter::from_fn(move || {
        let mut pages = 0;
        let fits = ranges.iter().take(LIST_MAX).take_while(|range| {
            pages += range.pages();
            pages <= pages_max
        });
        let (batch, rest) = ranges.split_at(fits.count().max(1).min(ranges.len()));
        ranges = rest;
        (!batch.is_empty()).then_some(batch)
    })
}

#[cfg(test)]
mod tests;
