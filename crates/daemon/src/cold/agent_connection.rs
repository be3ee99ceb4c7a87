//! The conversation with the agent of a cold client: one request at a time, lists and pages through the channel.
//!
//! Nothing that stands in the channel is believed: pages are copied before they are stored, and whether a page left the
//! client is read from the table, under the pact.

use crate::clients::connection::Peer;
use pagefold_agent::wire::{
    CHANNEL_IN, CHANNEL_LEN, CHANNEL_OUT, CHANNEL_PAGES, DROP_BUSY, DropEntry, FETCH_PAGES_MAX, LIST_MAX, Op, Packet,
    RegionEntry,
};
use pagefold_os::fd::Fd;
use pagefold_os::mem::Mapping;
use pagefold_os::{Errno, PAGE_SIZE, Page, Range, memfd, sched, sock};
use std::sync::Arc;

/// Longest time that an answer may take before the connection is given up, in milliseconds.
const ANSWER_MS_MAX: u64 = 10_000;
/// Addresses that a client may have managed: nothing below the first MiB (see `Uffd::is_alive`).
const LOWEST: u64 = 1 << 20;
const HIGHEST: u64 = 1 << 47;
/// Regions that a client may have: more than the kernel lets a process have mappings by default.
const REGIONS_MAX: usize = 1 << 20;

/// The agent does not answer, or not sensibly.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Gone;

/// Memory that agent and daemon share.
pub(crate) struct Channel {
    fd: Fd,
    map: Mapping,
}

impl Channel {
    pub(crate) fn new() -> Result<Channel, Errno> {
        let fd = memfd::create(c"pagefold-cold-channel", CHANNEL_LEN as u64)?;
        memfd::add_seals(&fd, memfd::SEAL_SHRINK | memfd::SEAL_GROW | memfd::SEAL_SEAL)?;
        let prot = libc::PROT_READ | libc::PROT_WRITE;
        let map = Mapping::file(fd.raw(), 0, CHANNEL_LEN, prot, libc::MAP_SHARED)?;
        Ok(Channel { fd, map })
    }

    /// Copies what lies in place `place` to memory of ours: nothing is done with bytes that may change meanwhile.
    pub(crate) fn read(&self, place: u32, page: &mut Page) {
        let place = place as usize;
        assert!(place < FETCH_PAGES_MAX);
        // SAFETY: the page lies in the channel. The other side may write meanwhile; then we have a torn copy, which will
        // not equal the page when it is frozen.
        unsafe {
            let from = self.map.as_ptr().add(CHANNEL_PAGES + place * PAGE_SIZE);
            core::ptr::copy_nonoverlapping(from, page.as_mut_ptr(), PAGE_SIZE);
        }
    }

    /// Puts a page there, as the agent does.
    #[cfg(test)]
    pub(crate) fn write(&self, place: u32, page: &Page) {
        assert!((place as usize) < FETCH_PAGES_MAX);
        // SAFETY: the place lies in the channel.
        unsafe {
            let to = self.map.as_ptr().add(CHANNEL_PAGES + place as usize * PAGE_SIZE);
            core::ptr::copy_nonoverlapping(page.as_ptr(), to, PAGE_SIZE);
        }
    }

    /// Byte `place` of the answer's list.
    fn said(&self, place: usize) -> u8 {
        assert!(place < FETCH_PAGES_MAX);
        // SAFETY: inside the channel; volatile, because the other side may write at any time.
        unsafe { core::ptr::read_volatile(self.map.as_ptr().add(CHANNEL_OUT + place)) }
    }
}

/// A connection to an agent.
pub(crate) struct ColdLink {
    pub socket: Arc<Peer>,
    channel: Arc<Channel>,
    /// Places of the channel, from the first on, whose memory is there.
    room: usize,
    sequence: u64,
    pub agent_cpu_ns: u64,
}

impl ColdLink {
    pub(crate) fn new(socket: Arc<Peer>) -> Result<ColdLink, Errno> {
        let channel = Arc::new(Channel::new()?);
        sock::set_timeout(&socket, ANSWER_MS_MAX)?;
        Ok(ColdLink { socket, channel, room: 0, sequence: 0, agent_cpu_ns: 0 })
    }

    pub(crate) fn channel_fd(&self) -> &Fd {
        &self.channel.fd
    }

    /// Where the pages lie that were copied last.
    pub(crate) fn channel(&self) -> &Arc<Channel> {
        &self.channel
    }

    fn ask(&mut self, op: Op, count: usize) -> Result<usize, Gone> {
        self.ask_with(op, count, 0, 0)
    }

    /// Asks, and returns the count of the answer: 0 where the agent refuses, and nothing that stands in the channel is an
    /// answer then.
    fn ask_with(&mut self, op: Op, count: usize, a: u64, b: u64) -> Result<usize, Gone> {
        self.sequence += 1;
        let request = Packet { sequence: self.sequence, count: count as u64, a, b, ..Packet::new(op) };
        sock::send(&self.socket, request.bytes(), &[]).map_err(|_| Gone)?;
        let mut buffer = [0; size_of::<Packet>()];
        let got = self.socket.receive_plain(&mut buffer).map_err(|_| Gone)?;
        let answer = Packet::parse(&buffer[..got]).ok_or(Gone)?;
        if answer.op != op as u32 || answer.sequence != self.sequence || answer.count > LIST_MAX as u64 {
            return Err(Gone);
        }
        self.agent_cpu_ns = answer.a;
        Ok(if answer.status == 0 { answer.count as usize } else { 0 })
    }

    fn put<T: Copy>(&self, index: usize, value: T) {
        const { assert!(size_of::<T>() <= 32) };
        assert!(index < LIST_MAX);
        // SAFETY: inside the channel; volatile, because the other side may look at any time.
        unsafe { core::ptr::write_volatile(self.channel.map.as_ptr().add(CHANNEL_IN + index * 32).cast(), value) }
    }

    /// The managed ranges of plain memory, in order.
    pub(crate) fn regions(&mut self) -> Result<Vec<Range>, Gone> {
        let mut all: Vec<Range> = Vec::new();
        loop {
            let from = all.last().map_or(0, |last| last.end);
            let count = self.ask_with(Op::Regions, 0, 0, from)?;
            for index in 0..count {
                let at = CHANNEL_OUT + index * 32;
                // SAFETY: inside the channel; any bytes are a valid entry of integers.
                let entry: RegionEntry = unsafe { core::ptr::read_volatile(self.channel.map.as_ptr().add(at).cast()) };
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
            batch.iter().enumerate().for_each(|(index, range)| self.put(index, *range));
            self.ask(Op::Watch, batch.len())?;
        }
        Ok(())
    }

    /// Absent pages of these ranges are the kernel's again, where nothing is out.
    pub(crate) fn release(&mut self, ranges: &[Range]) -> Result<(), Gone> {
        for batch in ranges.chunks(LIST_MAX / 2) {
            batch.iter().enumerate().for_each(|(index, range)| self.put(index, *range));
            self.ask(Op::ColdRelease, batch.len())?;
        }
        Ok(())
    }

    /// Has the agent copy the pages of `runs` to the channel, at most `count_max` of them, from place `first` on; says of
    /// each whether it lies there.
    pub(crate) fn copy(&mut self, runs: &[Range], first: usize, count_max: usize) -> Result<Vec<bool>, Gone> {
        runs.iter().enumerate().for_each(|(index, range)| {
            self.put(index, RegionEntry { start: range.start, end: range.end, inode: 0, slot: 0 });
        });
        let room = count_max.min(FETCH_PAGES_MAX - first);
        let pages = (runs.iter().map(Range::pages).sum::<u64>()).min(room as u64) as usize;
        let behind = first + pages;
        if behind > self.room {
            if !crate::clients::merge_client::populate(&self.channel.map, self.room..behind) {
                return Ok(Vec::new());
            }
            self.room = behind;
        }
        let end = self.ask_with(Op::ColdCopy, runs.len(), first as u64, 0)?;
        Ok((first..end.min(behind)).map(|place| self.channel.said(place) == 1).collect())
    }

    /// Has the agent take these pages away, if they equal what was copied last. Returns the places of pages that could
    /// not be moved and are worth another attempt.
    pub(crate) fn drop_pages(&mut self, entries: &[DropEntry]) -> Result<Vec<u32>, Gone> {
        entries.iter().enumerate().for_each(|(index, entry)| self.put(index, *entry));
        if self.ask_with(Op::ColdDrop, entries.len(), sched::quick_monotonic_ns(), 0)? == 0 {
            return Ok(Vec::new());
        }
        Ok((0..FETCH_PAGES_MAX as u32).filter(|place| self.channel.said(*place as usize) == DROP_BUSY).collect())
    }
}
