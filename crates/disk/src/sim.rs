//! A simulated disk: an image file in memory. It logs every write, can cut the power at any point of that log, and fails
//! on request. For tests, fuzzing and models; nothing in the product uses it.

use crate::file::{Allocate, BlockFile, Stamp};
use crate::geometry::BLOCK_BYTES;
use parking_lot::Mutex;
use std::io::{self, IoSlice, IoSliceMut};
use std::time::Duration;

/// The smallest unit that a power cut leaves whole.
pub const SECTOR_BYTES: usize = 512;

/// A change that reached the disk.
#[derive(Clone, Debug)]
pub enum Event {
    /// Bytes at an offset.
    Write(u64, Vec<u8>),
    /// A new size.
    SetLen(u64),
    /// A range that reads as zeros from now on.
    Punch(u64, u64),
    /// Everything before it is on stable storage.
    Sync,
}

/// Errors and delays of later calls.
#[derive(Clone, Copy, Debug, Default)]
pub struct Faults {
    /// The error number of every write, while set.
    pub write: Option<i32>,
    /// Whether writes hang, while set.
    pub hang: bool,
    /// How long each read and write takes, at least.
    pub latency: Duration,
    /// A block that refuses every write with `EIO`, while set.
    pub bad_block: Option<u64>,
    /// The error number of every read, while set.
    pub read: Option<i32>,
    /// The error number of the next sync.
    pub sync_once: Option<i32>,
    /// The error number of every query of the file's version, while set.
    pub stamp: Option<i32>,
    /// Whether punching and zeroing are refused as unsupported.
    pub no_punch: bool,
    /// The error number of punching and zeroing, which then clear the first half only.
    pub punch_half: Option<i32>,
}

/// The simulated file.
pub struct SimFile {
    state: Mutex<SimState>,
}

struct SimState {
    data: Vec<u8>,
    log: Vec<Event>,
    faults: Faults,
    version: i64,
    reads: u64,
}

impl SimFile {
    /// A disk that holds `data` durably.
    pub fn new(data: Vec<u8>) -> Self {
        let state = SimState { data, log: Vec::new(), faults: Faults::default(), version: 1, reads: 0 };
        Self { state: Mutex::new(state) }
    }

    /// The content now.
    pub fn data(&self) -> Vec<u8> {
        self.state.lock().data.clone()
    }

    /// All events so far.
    pub fn log(&self) -> Vec<Event> {
        self.state.lock().log.clone()
    }

    /// How many events there were so far.
    pub fn log_len(&self) -> usize {
        self.state.lock().log.len()
    }

    /// Blocks read so far.
    pub fn blocks_read(&self) -> u64 {
        self.state.lock().reads
    }

    /// Sets the errors of later calls.
    pub fn set_faults(&self, faults: Faults) {
        self.state.lock().faults = faults;
    }

    fn delay(&self) {
        let latency = self.state.lock().faults.latency;
        if !latency.is_zero() {
            std::thread::sleep(latency);
        }
    }

    /// Changes the data as another program would: the version changes too.
    pub fn change_externally(&self, change: impl FnOnce(&mut Vec<u8>)) {
        let mut state = self.state.lock();
        change(&mut state.data);
        state.version += 1;
    }
}

/// The disk after a power cut: `before` and the log up to the last sync in `log`, then each later sector for which
/// `survives` returns true.
pub fn after_power_cut(before: &[u8], log: &[Event], mut survives: impl FnMut() -> bool) -> Vec<u8> {
    let synced = log.iter().rposition(|event| matches!(event, Event::Sync)).map_or(0, |at| at + 1);
    let mut data = before.to_vec();
    for event in &log[..synced] {
        apply(&mut data, event);
    }
    for event in &log[synced..] {
        match event {
            Event::Write(offset, bytes) => {
                for (n, sector) in bytes.chunks(SECTOR_BYTES).enumerate() {
                    if survives() {
                        apply(&mut data, &Event::Write(offset + (n * SECTOR_BYTES) as u64, sector.to_vec()));
                    }
                }
            }
            // Metadata is journalled: it survives whole or not at all.
            _ if survives() => apply(&mut data, event),
            _ => {}
        }
    }
    data
}

fn apply(data: &mut Vec<u8>, event: &Event) {
    match event {
        Event::Write(offset, bytes) => {
            let from = *offset as usize;
            let to = from + bytes.len();
            if data.len() < to {
                data.resize(to, 0);
            }
            data[from..to].copy_from_slice(bytes);
        }
        Event::SetLen(size) => data.resize(*size as usize, 0),
        Event::Punch(offset, length) => {
            let from = (*offset as usize).min(data.len());
            let to = (from + *length as usize).min(data.len());
            data[from..to].fill(0);
        }
        Event::Sync => {}
    }
}

fn fault(errno: Option<i32>) -> io::Result<()> {
    errno.map_or(Ok(()), |errno| Err(io::Error::from_raw_os_error(errno)))
}

impl BlockFile for SimFile {
    fn read_at(&self, buffers: &mut [IoSliceMut<'_>], offset: u64) -> io::Result<usize> {
        self.delay();
        let mut state = self.state.lock();
        fault(state.faults.read)?;
        let mut done = 0;
        for buffer in buffers {
            let from = (offset as usize + done).min(state.data.len());
            let count = buffer.len().min(state.data.len() - from);
            buffer[..count].copy_from_slice(&state.data[from..from + count]);
            done += count;
        }
        state.reads += done.div_ceil(BLOCK_BYTES) as u64;
        Ok(done)
    }

    fn write_at(&self, buffers: &[IoSlice<'_>], offset: u64) -> io::Result<()> {
        while self.state.lock().faults.hang {
            std::thread::sleep(Duration::from_millis(1));
        }
        self.delay();
        let mut state = self.state.lock();
        fault(state.faults.write)?;
        let bytes: Vec<u8> = buffers.iter().flat_map(|buffer| buffer.iter().copied()).collect();
        let blocks = offset / BLOCK_BYTES as u64..(offset + bytes.len() as u64).div_ceil(BLOCK_BYTES as u64);
        if state.faults.bad_block.is_some_and(|bad| blocks.contains(&bad)) {
            return fault(Some(libc::EIO));
        }
        state.version += 1;
        let event = Event::Write(offset, bytes);
        apply(&mut state.data, &event);
        state.log.push(event);
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        let mut state = self.state.lock();
        fault(state.faults.sync_once.take())?;
        state.log.push(Event::Sync);
        Ok(())
    }

    fn set_len(&self, size: u64) -> io::Result<()> {
        let mut state = self.state.lock();
        state.version += 1;
        apply(&mut state.data, &Event::SetLen(size));
        state.log.push(Event::SetLen(size));
        Ok(())
    }

    fn allocate(&self, how: Allocate, offset: u64, length: u64) -> io::Result<()> {
        let mut state = self.state.lock();
        if how != Allocate::Reserve {
            if state.faults.no_punch {
                return fault(Some(libc::EOPNOTSUPP));
            }
            let done = if state.faults.punch_half.is_some() { length / 2 } else { length };
            state.version += 1;
            apply(&mut state.data, &Event::Punch(offset, done));
            state.log.push(Event::Punch(offset, done));
            return fault(state.faults.punch_half);
        }
        Ok(())
    }

    fn stamp(&self) -> io::Result<Stamp> {
        let state = self.state.lock();
        fault(state.faults.stamp)?;
        let time = (state.version, 0);
        Ok(Stamp { size: state.data.len() as u64, mtime: time, ctime: time, dev: 1, ino: 1 })
    }

    fn seek(&self, offset: u64, data: bool) -> io::Result<u64> {
        let size = self.state.lock().data.len() as u64;
        match (offset < size, data) {
            (true, true) => Ok(offset),
            (true, false) => Ok(size),
            _ => Err(io::Error::from_raw_os_error(libc::ENXIO)),
        }
    }

    fn direct(&self) -> bool {
        true
    }

    fn writable(&self) -> bool {
        true
    }
}
