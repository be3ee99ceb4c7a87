//! Requests to the agent of a cold client: one at a time, with lists and pages in the channel.
//!
//! The channel's content is not trusted: pages are copied before they are stored, and whether a page left the client is read
//! from the residency map, under its owner lock.

use crate::clients::attached::{Attached, NotStopped, Still};
use crate::clients::connection::Connection;
use pagefold_os::fd::Fd;
use pagefold_os::{ADDRESS_END, Errno, PAGE_SIZE, Range, sched, sock};
use pagefold_protocol::channel::Channel;
use pagefold_protocol::message::{EVICT_BUSY, EvictEntry, FETCH_PAGES_MAX, LIST_MAX, Op, Packet, RegionEntry};
use std::sync::Arc;

/// Longest time that an answer may take before the connection is given up, in milliseconds.
const ANSWER_MS_MAX: u64 = 10_000;
/// Addresses that a client may have managed: nothing below the first MiB (see `Uffd::is_alive`).
const LOWEST: u64 = 1 << 20;
const HIGHEST: u64 = ADDRESS_END;
/// Regions that a client may have: more than the kernel lets a process have mappings by default.
const REGIONS_MAX: usize = 1 << 20;

/// The agent does not answer, or not sensibly.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Gone;

/// A connection to an agent.
pub(crate) struct AgentConnection {
    pub socket: Arc<Connection>,
    channel: Arc<Channel>,
    /// Pages of the channel, from the first on, that are populated.
    room: usize,
    sequence: u64,
    pub agent_cpu_ns: u64,
    /// The process ran before it became a client.
    pub attached: Option<Arc<Attached>>,
}

impl AgentConnection {
    pub(crate) fn new(socket: Arc<Connection>) -> Result<AgentConnection, Errno> {
        let channel = Arc::new(Channel::create(c"pagefold-cold-channel")?);
        sock::set_timeout(&socket, ANSWER_MS_MAX)?;
        Ok(AgentConnection { socket, channel, room: 0, sequence: 0, agent_cpu_ns: 0, attached: None })
    }

    /// Where the pages lie that were copied last.
    pub(crate) fn channel(&self) -> &Arc<Channel> {
        &self.channel
    }

    fn ask(&mut self, op: Op, count: usize) -> Result<usize, Gone> {
        self.ask_with(op, count, 0, 0)
    }

    fn ask_with(&mut self, op: Op, count: usize, a: u64, b: u64) -> Result<usize, Gone> {
        self.ask_then(op, count, a, b, |_| ())
    }

    /// Asks, calls `sent` with the socket, and returns the count of the answer that comes there: 0 where the agent refuses,
    /// and nothing that stands in the channel is an answer then.
    fn ask_then(&mut self, op: Op, count: usize, a: u64, b: u64, sent: impl FnOnce(&Fd)) -> Result<usize, Gone> {
        self.sequence += 1;
        let request = Packet { sequence: self.sequence, count: count as u64, a, b, ..Packet::new(op) };
        sock::send(&self.socket, request.bytes(), &[]).map_err(|_| Gone)?;
        sent(&self.socket);
        let mut buffer = [0; size_of::<Packet>()];
        let got = self.socket.receive_plain(&mut buffer).map_err(|_| Gone)?;
        let answer = Packet::parse(&buffer[..got]).ok_or(Gone)?;
        if answer.op != op as u32 || answer.sequence != self.sequence || answer.count > LIST_MAX as u64 {
            return Err(Gone);
        }
        self.agent_cpu_ns = answer.a;
        Ok(if answer.status == 0 { answer.count as usize } else { 0 })
    }

    /// The managed ranges of plain memory, in order.
    pub(crate) fn regions(&mut self) -> Result<Vec<Range>, Gone> {
        let mut all: Vec<Range> = Vec::new();
        loop {
            let from = all.last().map_or(0, |last| last.end);
            let count = self.ask_with(Op::Regions, 0, 0, from)?;
            for index in 0..count {
                let entry: RegionEntry = self.channel.answer(index);
                let page = PAGE_SIZE as u64;
                let aligned = entry.start.is_multiple_of(page) && entry.end.is_multiple_of(page);
                let ascending = all.last().is_none_or(|last| last.end <= entry.start);
                if !aligned || !ascending || entry.start >= entry.end || entry.start < LOWEST || entry.end > HIGHEST {
                    return Err(Gone);
                }
                all.push(Range { start: entry.start, end: entry.end });
            }
            if count < LIST_MAX || all.len() > REGIONS_MAX {
                return Ok(all);
            }
        }
    }

    /// Ends the agent's part for the tier, for a client that parted from live merging.
    pub(crate) fn leave(&mut self) {
        let _ = self.ask(Op::Leave, 0);
    }

    /// Watches ranges for writes.
    pub(crate) fn watch(&mut self, ranges: &[Range]) -> Result<(), Gone> {
        for batch in ranges.chunks(LIST_MAX / 2) {
            batch.iter().enumerate().for_each(|(index, range)| self.channel.put_request(index, *range));
            self.ask(Op::Watch, batch.len())?;
        }
        Ok(())
    }

    /// Absent pages of these ranges are the kernel's again, where nothing is out.
    pub(crate) fn release(&mut self, ranges: &[Range]) -> Result<(), Gone> {
        for batch in ranges.chunks(LIST_MAX / 2) {
            batch.iter().enumerate().for_each(|(index, range)| self.channel.put_request(index, *range));
            self.ask(Op::ColdUnregister, batch.len())?;
        }
        Ok(())
    }

    /// Has the agent copy the pages of `runs` to the channel, at most `count_max` of them, from place `first` on; says of
    /// each whether it lies there.
    pub(crate) fn copy(&mut self, runs: &[Range], first: usize, count_max: usize) -> Result<Vec<bool>, Gone> {
        runs.iter().enumerate().for_each(|(index, range)| {
            self.channel.put_request(index, RegionEntry { start: range.start, end: range.end, inode: 0, slot: 0 });
        });
        let room = count_max.min(FETCH_PAGES_MAX - first);
        let pages = (runs.iter().map(Range::pages).sum::<u64>()).min(room as u64) as usize;
        let behind = first + pages;
        if behind > self.room {
            if !self.channel.populate(self.room..behind) {
                return Ok(Vec::new());
            }
            self.room = behind;
        }
        let end = self.ask_with(Op::ColdCopy, runs.len(), first as u64, 0)?;
        Ok((first..end.min(behind)).map(|place| self.channel.answer_of_page(place) == 1).collect())
    }

    /// Frees the memory of what was copied last. The next copy makes it anew.
    pub(crate) fn release_pages(&mut self) {
        self.channel.release_pages();
        self.room = 0;
    }

    /// Has the agent take these pages away, if they equal what was copied last. Returns the places of pages that could
    /// not be moved and are worth another attempt.
    ///
    /// The agent of an attached program sees no call of it. The program's threads stand still meanwhile, so none moves a
    /// page that is frozen, forks, or is in the middle of a discard.
    pub(crate) fn drop_pages(&mut self, entries: &[EvictEntry]) -> Result<Vec<u32>, Gone> {
        entries.iter().enumerate().for_each(|(index, entry)| self.channel.put_request(index, *entry));
        let attached = self.attached.clone();
        let mut ask = |still: Option<&Still<'_>>| {
            let hurry = |socket: &Fd| still.iter().for_each(|still| still.hurry(socket));
            self.ask_then(Op::ColdEvict, entries.len(), sched::quick_monotonic_ns(), 0, hurry)
        };
        let asked = match attached {
            None => ask(None),
            Some(process) => process.while_stopped(|still| ask(Some(still))).unwrap_or_else(|why| match why {
                NotStopped::Ended => Err(Gone),
                NotStopped::Busy => Ok(0),
            }),
        };
        if asked? == 0 {
            return Ok(Vec::new());
        }
        Ok((0..FETCH_PAGES_MAX as u32)
            .filter(|place| self.channel.answer_of_page(*place as usize) == EVICT_BUSY)
            .collect())
    }
}
