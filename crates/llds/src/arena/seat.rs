//! Seats: what one thread holds of an arena, written down where others can see it.
//!
//! A seat carries the thread's process, the spans it allocates from, the
//! blocks its guards read (hazards), the blocks it unlinked and may not free
//! yet (limbo), and what it was about to do (intents). In a shared arena all
//! of this lies in the shared memory, so that whoever notices a death can put
//! back what the dead thread held: nothing of it is known to that thread alone.
//!
//! A seat is written by its owner only, except under recovery, which excludes
//! itself by the `state` word.

use super::class::CLASS_COUNT;
use std::io;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Seats of an arena: threads of all processes that use it at one time.
pub const SEATS_MAX: usize = 1024;

/// Blocks one thread can hold under guards at one time; more guards copy.
pub const HAZARDS: usize = 8;

/// Retired blocks between two collections.
pub(super) const COLLECT_EVERY: u64 = 64;

/// Limbo of a seat. All hazards of all seats cannot fill it, so a retire always finds room.
pub(super) const LIMBO: usize = SEATS_MAX * HAZARDS + 2 * COLLECT_EVERY as usize;

/// Intent slot: a block taken from the allocator and not yet linked anywhere.
pub const INTENT_ALLOC: usize = 0;
/// Intent slot: a block about to be unlinked and not yet in limbo.
pub const INTENT_RETIRE: usize = 1;

// `state` holds who sits here, in one word so that one compare-and-swap takes the seat:
// 22 bits of process id (the kernel's limit), 40 bits of its start time, 2 bits of kind; 0 is free.
const KIND_BITS: u32 = 2;
const START_BITS: u32 = 40;
/// Kind: a thread sits here.
const KIND_TAKEN: u64 = 1;
/// Kind: the named process is cleaning up after the one that sat here.
const KIND_RECOVERING: u64 = 2;

/// One seat, in arena memory.
#[repr(C, align(64))]
pub struct Seat {
    pub(super) state: AtomicU64,
    /// Inode of the process-id namespace in which `state` has meaning.
    pub(super) namespace: AtomicU64,
    pub(super) intents: [AtomicU64; 2],
    /// Bytes and number of blocks retired since the last collection.
    pub(super) retired_bytes: AtomicU64,
    pub(super) retired: AtomicU64,
    /// Limbo entries at and above this index are zero.
    pub(super) limbo_high: AtomicU64,
    _pad: u64,
    pub(super) hazards: [AtomicU64; HAZARDS],
    /// Span leased per class, plus one; 0 is none.
    pub(super) leases: [AtomicU32; CLASS_COUNT],
    /// Bitmap word per class at which the last block was found.
    pub(super) cursors: [AtomicU32; CLASS_COUNT],
    /// Retired blocks; 0 is an empty entry.
    pub(super) limbo: [AtomicU64; LIMBO],
}

impl Seat {
    /// Returns what the seat's owner was about to do with a block, 0 for nothing.
    pub fn intent(&self, which: usize) -> u64 {
        self.intents[which].load(Ordering::Acquire)
    }

    /// Writes down that `block` is about to be unlinked. Must come before the store that unlinks it.
    #[inline]
    pub fn intend_retire(&self, block: u64) {
        self.intents[INTENT_RETIRE].store(block, Ordering::Release);
    }

    /// Strikes out the intent to link a block: it is linked, or was freed.
    #[inline]
    pub fn settle_alloc(&self) {
        self.intents[INTENT_ALLOC].store(0, Ordering::Release);
    }

    /// Strikes out the intent to retire a block.
    #[inline]
    pub fn settle_retire(&self) {
        self.intents[INTENT_RETIRE].store(0, Ordering::Release);
    }

    /// Returns the index of a hazard that is not in use.
    pub fn hazard_free(&self) -> Option<usize> {
        self.hazards.iter().position(|hazard| hazard.load(Ordering::Relaxed) == 0)
    }

    /// Announces that this thread reads `block`. The caller must check afterwards that the block is still linked.
    #[inline]
    pub fn hazard_set(&self, index: usize, block: u64) {
        self.hazards[index].store(block, Ordering::Relaxed);
        // Pairs with the fence in `collect`: either the collector sees the hazard, or our caller's
        // check sees that the block was unlinked before.
        std::sync::atomic::fence(Ordering::SeqCst);
    }

    /// Ends the announcement of [`Seat::hazard_set`].
    #[inline]
    pub fn hazard_clear(&self, index: usize) {
        // Release: our reads of the block come before whoever frees it.
        self.hazards[index].store(0, Ordering::Release);
    }
}

/// Who a process is: its id and its start time, so that a reused id is another process.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Identity(u64);

impl Identity {
    /// Returns the identity of this process.
    pub fn own() -> io::Result<Identity> {
        let pid = std::process::id();
        match start_time(pid)? {
            Some(start) => Ok(Identity::new(pid, start)),
            None => Err(io::Error::new(io::ErrorKind::NotFound, "/proc/self/stat does not show this process")),
        }
    }

    fn new(pid: u32, start: u64) -> Identity {
        let start = start & ((1 << START_BITS) - 1);
        Identity((u64::from(pid) << (START_BITS + KIND_BITS)) | (start << KIND_BITS))
    }

    pub fn taken(self) -> u64 {
        self.0 | KIND_TAKEN
    }

    pub fn recovering(self) -> u64 {
        self.0 | KIND_RECOVERING
    }

    /// Whether the process named in a seat's non-zero `state` can still execute instructions.
    pub fn state_is_alive(state: u64) -> bool {
        let pid = (state >> (START_BITS + KIND_BITS)) as u32;
        let start = (state >> KIND_BITS) & ((1 << START_BITS) - 1);
        match start_time(pid) {
            Ok(Some(now)) => now & ((1 << START_BITS) - 1) == start,
            Ok(None) => false,
            // Unreadable /proc: rather wait for somebody alive than clean up under him.
            Err(_) => true,
        }
    }
}

/// Start time of a process in clock ticks since boot; `None` when no thread of it can run any more.
fn start_time(pid: u32) -> io::Result<Option<u64>> {
    let text = match std::fs::read(format!("/proc/{pid}/stat")) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) if error.raw_os_error() == Some(libc::ESRCH) => return Ok(None),
        Err(error) => return Err(error),
    };
    // The name in parentheses may hold anything, so count fields from its end; state is field 3.
    let Some(end) = text.iter().rposition(|&byte| byte == b')') else { return Ok(None) };
    let fields: Vec<&[u8]> = text[end + 1..].split(u8::is_ascii_whitespace).filter(|part| !part.is_empty()).collect();
    let number = |index: usize| -> u64 {
        let field = fields.get(index).copied().unwrap_or_default();
        std::str::from_utf8(field).ok().and_then(|field| field.parse().ok()).unwrap_or(0)
    };
    // A zombie leader with more than one thread left still has threads that run.
    let ended = matches!(fields.first(), Some(&b"Z") | Some(&b"X") | Some(&b"x"));
    if ended && number(17) <= 1 {
        return Ok(None);
    }
    Ok(Some(number(19)))
}

/// Inode of this process's process-id namespace, 0 if it cannot be told.
pub(super) fn own_namespace() -> u64 {
    use std::os::unix::fs::MetadataExt;
    std::fs::metadata("/proc/self/ns/pid").map_or(0, |meta| meta.ino())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_living_and_a_dead_process_are_told_apart() {
        let own = Identity::own().unwrap();
        assert!(Identity::state_is_alive(own.taken()));
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let start = start_time(child.id()).unwrap().unwrap();
        let state = Identity::new(child.id(), start).taken();
        assert!(Identity::state_is_alive(state));
        assert!(!Identity::state_is_alive(Identity::new(child.id(), start + 1).taken()), "another start time");
        child.kill().unwrap();
        // Not reaped yet: a zombie can execute nothing.
        while Identity::state_is_alive(state) {
            std::thread::yield_now();
        }
        child.wait().unwrap();
        assert!(!Identity::state_is_alive(state));
    }
}
