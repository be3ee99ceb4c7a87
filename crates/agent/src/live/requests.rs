//! What the daemon asks for, one request at a time.
//!
//! Lists and pages go through the channel, a file that the daemon can write to at any time: entries are copied before they
//! are looked at, and every number in them may be any. Pages are copied by the kernel, so that one which is gone is an error
//! and not a fault in the program. Between two requests the events of merged memory are answered, with the mapping lock
//! held.

use super::earlier_segments::EarlierSegments;
use super::events::serve_events;
use super::session::{Agent, PAGE, Segment};
use crate::address_space::anonymous::watch_anonymous;
use crate::address_space::regions::{Listed, list};
use crate::attached;
use crate::cold;
use crate::live::remap_huge::pieces_of_one;
use crate::owned_ranges::hide;
use crate::runtime::housekeeping::housekeep;
use crate::runtime::thread::trim_stack;
use crate::state::{AGENT, ATTACHED, MAY_START, SHARED, is_lent};
use core::sync::atomic::Ordering;
use pagefold_os::fd::Fd;
use pagefold_os::raw::{Errno, Result};
use pagefold_os::uffd::Uffd;
use pagefold_os::{PAGE_SIZE, Range, mem, memfd, sched, sock};
use pagefold_protocol::handshake::WATCH_FEATURES;
use pagefold_protocol::message::{
    EarlierSegment, FETCH_PAGES_MAX, FREEZE_PAGES_MAX, LIST_MAX, Op, Outcome, Packet, RefusalReason, RemapPiece,
    SEGMENTS_HELD, SEGMENTS_PER_REQUEST,
};

/// How long the agent waits for requests before it looks whether the program changed its mappings or wants it to leave:
/// while its mappings change, and after [`BUSY_NS`] without a change.
const PAUSES_MS: [i32; 2] = [100, 500];
const BUSY_NS: u64 = 3_000_000_000;

impl Agent {
    /// Answers requests until the daemon is gone or we are asked to leave.
    pub(super) fn serve(&mut self, socket: &Fd) -> Result<()> {
        let mut looked = 0;
        let (mut busy, mut told) = (0, 0);
        // Greetings and merges call deep.
        let mut was_deep = true;
        loop {
            let looks = housekeep(&mut looked, AGENT, Some(&self.watch));
            if looks && SHARED.all.load(Ordering::Relaxed) && self.rss_watch.has_grown() {
                SHARED.changed();
            }
            // A thread that asked before the wakeup page was registered could not wake this one.
            if SHARED.phase.load(Ordering::Acquire) != 1 {
                return Ok(());
            }
            let now = sched::monotonic_ns();
            if ATTACHED && self.list_clock.is_due() {
                SHARED.changed();
            }
            let pause_ms = if now - busy < BUSY_NS { PAUSES_MS[0] } else { PAUSES_MS[1] };
            let mut polls =
                [socket.raw(), self.hold.fd().raw()].map(|fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 });
            let ready = pagefold_os::fd::poll(&mut polls, pause_ms)?;
            let generation = SHARED.generation.load(Ordering::Acquire);
            self.counters().generation.store(generation, Ordering::Release);
            // Requests wake this thread by themselves.
            if generation != told {
                (busy, told) = (now, generation);
            }
            if attached::is_asked_to_leave() {
                SHARED.give_up();
                return Ok(());
            }
            // A loan that ended by itself: the daemon learns it from the next greeting.
            if SHARED.phase.load(Ordering::Acquire) != 1 || self.is_lent && !is_lent() {
                return Ok(());
            }
            if ready == 0 {
                if core::mem::take(&mut was_deep) {
                    trim_stack();
                }
                continue;
            }
            if polls[1].revents != 0 {
                self.list_clock.note_event();
                // With the mapping lock no call replaces the mapping while a discard is being answered.
                let _held = self.lock_mappings();
                serve_events(&self.hold, &self.maps, &self.watch, self.counters());
            }
            if polls[0].revents == 0 {
                continue;
            }
            let mut buffer = [0u8; size_of::<Packet>()];
            let (got, mut fds) = sock::receive(socket, &mut buffer, libc::MSG_DONTWAIT)?;
            let Some(request) = Packet::parse(&buffer[..got]) else { return Err(Errno(libc::EPROTO)) };
            if let Some(cpu) = request.cpu.checked_sub(1) {
                // It waits for the answer, so its processor is free.
                self.affinity.follow(cpu);
            }
            let mut answer = Packet { status: 0, count: 0, ..request };
            if request.op == Op::Leave as u32 {
                SHARED.give_up();
                return sock::send(socket, answer.bytes(), &[]);
            }
            was_deep |= [Op::Remap, Op::Unshare, Op::Lend].map(|op| op as u32).contains(&request.op);
            let mut carried = None;
            if request.op == Op::OpenEarlier as u32 {
                carried = self.earlier.file(request.a);
            }
            match self.answer(&request, &mut fds) {
                Ok(count) => answer.count = count as u64,
                Err(Errno(errno)) => answer.status = errno,
            }
            self.tell_cpu_time();
            sock::send(socket, answer.bytes(), carried.as_slice())?;
        }
    }

    fn answer(&mut self, request: &Packet, fds: &mut sock::Fds) -> Result<usize> {
        let count = (request.count as usize).min(LIST_MAX);
        const REGIONS: u32 = Op::Regions as u32;
        const WATCH: u32 = Op::Watch as u32;
        const FETCH: u32 = Op::Fetch as u32;
        const REMAP: u32 = Op::Remap as u32;
        const HEAL: u32 = Op::Unshare as u32;
        const FORGET: u32 = Op::CloseSegments as u32;
        const PART: u32 = Op::Lend as u32;
        const LEFTOVER: u32 = Op::Leftover as u32;
        const OPEN_EARLIER: u32 = Op::OpenEarlier as u32;
        const NAME_EARLIER: u32 = Op::NameEarlier as u32;
        match request.op {
            REGIONS => self.regions(request.a == 1, request.b),
            WATCH => {
                for index in 0..count {
                    let range: Range = self.channel.request(index);
                    // A call of the program does not find a part watched that was not when it looked.
                    let _held = self.lock_mappings();
                    let status = watch_anonymous(&self.watch, range).map_or_else(|errno| errno.0, |()| 0);
                    self.channel.put_answer(index, status);
                }
                Ok(count)
            }
            FETCH => self.fetch(count),
            PART => self.lend(request.a == 1).map(|()| 0),
            LEFTOVER if request.a == 1 => self.hand_leftover().map(|()| 0),
            LEFTOVER if request.a == 2 => self.hand_file_copies().map(usize::from),
            LEFTOVER => self.take_back_leftover().map(usize::from),
            REMAP => {
                // In any case: the daemon does not bring them again.
                self.take_segments(request.a, fds);
                if is_lent() {
                    return Err(Errno(libc::EBUSY));
                }
                if ATTACHED && self.list_clock.is_old() {
                    self.refresh_attributes()?;
                }
                self.remap(count)
            }
            HEAL => {
                for index in 0..count {
                    let range: Range = self.channel.request(index);
                    let status = self.unshare(range).map_or_else(|errno| errno.0, |()| 0);
                    self.channel.put_answer(index, status);
                }
                Ok(count)
            }
            FORGET => {
                for index in 0..count {
                    let id: u32 = self.channel.request(index);
                    let place = id as usize % SEGMENTS_HELD;
                    if self.segments.get(place).is_some_and(|held| held.id == id) {
                        drop(self.segments.take(place));
                    }
                }
                Ok(count)
            }
            OPEN_EARLIER => self.earlier.file(request.a).map(|_| 0).ok_or(Errno(libc::ENOENT)),
            NAME_EARLIER => Ok(self.name_earlier(count, request.a == 1)),
            _ => Err(Errno(libc::ENOSYS)),
        }
    }

    /// Holds the earlier segments of the list by their new numbers; closes all others if that `is_all`.
    fn name_earlier(&mut self, count: usize, is_all: bool) -> usize {
        for index in 0..count {
            let EarlierSegment { inode, id } = self.channel.request(index);
            let named = self.earlier.take(inode).is_some_and(|fd| self.hold_segment(id as u32, fd));
            self.channel.put_answer(index, u64::from(named));
        }
        if is_all {
            self.earlier = EarlierSegments::none();
        }
        count
    }

    /// Leaves the plain memory to the cold tier, which a second thread is the client of, or asks for it back. The thread
    /// tells when it is ours again, by changing the generation.
    fn lend(&mut self, lends: bool) -> Result<()> {
        if !lends {
            self.is_lent = false;
            cold::ask_end_of_loan();
            return Ok(());
        }
        if !MAY_START.load(Ordering::Acquire) {
            return Err(Errno(libc::EPERM));
        }
        // The thread that is started has our place.
        self.affinity.leave();
        cold::lend(|| {
            // Watches nothing: the kernel takes a range from one descriptor only.
            self.watch = Uffd::new(self.device.as_ref(), WATCH_FEATURES)?;
            self.huge_freeze_area = None;
            self.freeze_area.register_again(&self.watch)
        })
    }

    /// Splits the list of pieces into freezes, and merges them one by one; those that cover a huge page together, if it can.
    fn remap(&mut self, count: usize) -> Result<usize> {
        let mut pieces = [RemapPiece::default(); FREEZE_PAGES_MAX];
        let mut outcomes = [Outcome::default(); FREEZE_PAGES_MAX];
        let mut at = 0;
        let mut whole = true;
        while at < count {
            let first: RemapPiece = self.channel.request(at);
            // Each is copied before it is looked at, and not read again.
            let ahead = pieces.iter_mut().zip(at..count).map(|(piece, index)| {
                *piece = self.channel.request(index);
                *piece
            });
            let huge = pieces_of_one(ahead).filter(|_| first.follows == 0 || whole);
            let len = match huge {
                Some(len) if self.remap_huge(&pieces[..len], &mut outcomes[..len]) => len,
                _ => self.remap_first(at..count, whole, &mut pieces, &mut outcomes),
            };
            for (index, outcome) in outcomes[..len].iter().enumerate() {
                self.channel.put_answer(at + index, *outcome);
            }
            whole = outcomes[len - 1].merged == pieces[len - 1].pages;
            at += len;
        }
        Ok(count)
    }

    /// Merges the first freeze of the pieces `left`, those before which are merged as a `whole` or not; returns how many
    /// pieces it has.
    fn remap_first(
        &mut self,
        left: core::ops::Range<usize>,
        whole: bool,
        pieces: &mut [RemapPiece; FREEZE_PAGES_MAX],
        outcomes: &mut [Outcome; FREEZE_PAGES_MAX],
    ) -> usize {
        let first: RemapPiece = self.channel.request(left.start);
        let mut len = 0;
        for index in left.take(pieces.len()) {
            let piece: RemapPiece = self.channel.request(index);
            if piece.freeze != first.freeze {
                break;
            }
            pieces[len] = piece;
            len += 1;
        }
        let (pieces, outcomes) = (&pieces[..len], &mut outcomes[..len]);
        let ascending = pieces.windows(2).all(|pair| {
            pair[0].addr + u64::from(pair[0].pages) * PAGE <= pair[1].addr && pair[0].pages > 0 && pair[1].pages > 0
        });
        if first.follows == 1 && !whole {
            outcomes.fill(Outcome { merged: 0, reason: RefusalReason::Changed as u32 });
        } else if ascending {
            self.remap_range(pieces, outcomes);
        } else {
            outcomes.fill(Outcome { merged: 0, reason: RefusalReason::NotAnonymous as u32 });
        }
        len
    }

    /// Copies runs of pages to the channel.
    fn fetch(&mut self, count: usize) -> Result<usize> {
        let mut place = 0;
        for index in 0..count {
            let range: Range = self.channel.request(index);
            self.channel.put_answer(index, (self.channel.copy_in(range, place) / PAGE_SIZE) as u64);
            place += if range.is_empty() { 0 } else { range.pages().min((FETCH_PAGES_MAX - place) as u64) as usize };
        }
        Ok(count)
    }

    /// Lists the managed ranges, or (`pool`) the mappings of pool files, from address `from` on.
    fn regions(&mut self, pool: bool, from: u64) -> Result<usize> {
        let begins = !pool && from == 0;
        if begins {
            self.rss_watch.note_listed();
        }
        if ATTACHED && begins {
            self.refresh_attributes()?;
        }
        // Reading the table needs the mapping lock, reading maps does not; both are short.
        let held = self.lock_mappings();
        let table = SHARED.tables(&held).table;
        if begins {
            self.note_leftover(table);
        }
        let what = if pool { Listed::Pool } else { Listed::Managed };
        let count = list(&self.maps, table, what, from, |index, entry| self.channel.put_answer(index, entry));
        if SHARED.executable.load(Ordering::Relaxed) {
            self.freeze_area.add_executable(&self.watch);
        }
        count
    }

    /// Brings the table up to what the kernel says about the memory of an attached program: the agent sees none of its
    /// calls.
    fn refresh_attributes(&mut self) -> Result<()> {
        let held = self.lock_mappings();
        self.fill_what_was_discarded();
        self.list_clock.measure(|| crate::address_space::vm_flags::refresh(SHARED.tables(&held).table))
    }

    fn take_segments(&mut self, ids: u64, fds: &mut sock::Fds) {
        // The ids of the descriptors stand at the end of the input list.
        for index in 0..(ids as usize).min(fds.len()).min(SEGMENTS_PER_REQUEST) {
            let id: u32 = self.channel.request(LIST_MAX - 1 - index);
            // Whatever becomes of the new one: what has the place may be an older segment of the same id.
            drop(self.segments.take(id as usize % SEGMENTS_HELD));
            let _ = fds.take(index).is_some_and(|fd| self.hold_segment(id, fd));
        }
    }

    /// Maps the segment behind `fd` and has it by number `id`; false if that cannot be, and it is closed then.
    fn hold_segment(&mut self, id: u32, fd: Fd) -> bool {
        let Ok((len, _)) = memfd::len_and_inode(fd.raw()) else { return false };
        // A file that can shrink could kill the program by SIGBUS: refuse it.
        let sealed = memfd::seals(&fd).is_ok_and(|seals| {
            seals & memfd::SEAL_SHRINK != 0 && seals & (memfd::SEAL_WRITE | memfd::SEAL_FUTURE_WRITE) != 0
        });
        if !sealed {
            return false;
        }
        let flags = libc::MAP_SHARED;
        let Ok(map) = mem::Mapping::file(fd.raw(), 0, len as usize, libc::PROT_READ, flags) else { return false };
        hide(&map);
        self.segments.put(id as usize % SEGMENTS_HELD, Segment { id, fd, map, pages: (len / PAGE) as u32 })
    }
}
