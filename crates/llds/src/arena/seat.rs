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

use super::alive;
use super::class::CLASS_COUNT;
use std::io;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Seats of an arena: threads of all processes that use it at one time.
pub const SEATS_MAX: usize = 1024;

/// Seats that have memory beside those that were ever taken: what frees memory takes a seat, also when there is none left.
pub(super) const SEATS_SPARE: usize = 4;

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

// `state` holds who sits here, in one word so that one compare-and-swap takes the seat: 22 bits of process id (the
// kernel's limit), 28 bits of its start time (31 days), 12 bits that tell its programs apart, one exec after the other,
// 2 bits of kind; 0 is free.
const KIND_BITS: u32 = 2;
const IMAGE_BITS: u32 = 12;
const START_BITS: u32 = 28;
const START_SHIFT: u32 = KIND_BITS + IMAGE_BITS;
const PID_SHIFT: u32 = START_SHIFT + START_BITS;
/// Kind: a thread sits here.
const KIND_TAKEN: u64 = 1;
/// Kind: the named process is cleaning up after the one that sat here.
const KIND_RECOVERING: u64 = 2;
/// The whole `state` of a seat whose process is known to be dead, whoever it was.
pub(super) const ABANDONED: u64 = 3;

/// One seat, in arena memory.
#[repr(C, align(64))]
pub struct Seat {
    pub(super) state: AtomicU64,
    pub(super) intents: [AtomicU64; 2],
    /// Bytes and number of blocks retired since the last collection.
    pub(super) retired_bytes: AtomicU64,
    pub(super) retired: AtomicU64,
    /// Limbo entries at and above this index are zero.
    pub(super) limbo_high: AtomicU64,
    _pad: [u64; 2],
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

/// Who a process is: its id, its start time, so that a reused id is another process, and which program it runs.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Identity(u64);

impl Identity {
    /// Returns the identity of this process.
    ///
    /// # Errors
    /// Without a /proc that shows it.
    pub fn own() -> io::Result<Identity> {
        let pid = std::process::id();
        let (start, _) = alive::start_time(pid)?;
        Ok(Identity(Identity::new(pid, start).0 | image() << KIND_BITS))
    }

    pub fn new(pid: u32, start: u64) -> Identity {
        Identity(u64::from(pid) << PID_SHIFT | (start & ((1 << START_BITS) - 1)) << START_SHIFT)
    }

    /// Returns the process named in a seat's `state`.
    pub fn of(state: u64) -> Identity {
        Identity(state >> KIND_BITS << KIND_BITS)
    }

    pub fn pid(self) -> u32 {
        (self.0 >> PID_SHIFT) as u32
    }

    /// Whether both are one process, whatever program it runs.
    pub fn is_process(self, other: Identity) -> bool {
        self.0 >> START_SHIFT == other.0 >> START_SHIFT
    }

    pub fn taken(self) -> u64 {
        self.0 | KIND_TAKEN
    }

    pub fn recovering(self) -> u64 {
        self.0 | KIND_RECOVERING
    }
}

/// What tells this program from the one before and after it: exec keeps process id and start time, not this.
///
/// Made from the bytes that the kernel draws at each exec, so that it is the same for every copy of this code in the
/// process.
fn image() -> u64 {
    // SAFETY: asks for a word of the auxiliary vector, which stays as the kernel wrote it.
    let drawn = unsafe { libc::getauxval(libc::AT_RANDOM) } as *const [u8; 16];
    // SAFETY: the kernel put 16 bytes there, which stay as long as the process; where it has none, it names no place.
    let drawn = if drawn.is_null() { [0; 16] } else { unsafe { drawn.read() } };
    let hash = drawn
        .iter()
        .fold(0xcbf2_9ce4_8422_2325, |sum: u64, &byte| (sum ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3));
    // The low bits of the sum are the worse ones.
    1 + (hash >> 32) % ((1 << IMAGE_BITS) - 1)
}
