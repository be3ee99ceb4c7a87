//! What agent and daemon say to each other.
//!
//! Requests and answers are fixed-size packets on a socket of whole packets;
//! lists and page contents lie in the *channel*, a sealed memory file that both
//! have mapped. The daemon asks, the agent answers, one request at a time. The
//! daemon takes nothing in the channel for granted: it copies before it checks.

use pagefold_os::{PAGE_SIZE, Range};

/// First bytes of a greeting.
pub const MAGIC: u32 = 0x5046_4c44;
/// Version of this protocol; both ends must agree.
pub const VERSION: u32 = 2;

/// Pages that one fetch copies at most.
pub const FETCH_PAGES_MAX: usize = 512;
/// Pages that are frozen at once at most: it bounds how long an access waits.
pub const FREEZE_PAGES_MAX: usize = 128;
/// Entries of a list in the channel at most.
pub const LIST_MAX: usize = 2048;
/// Pool segments that an agent keeps mapped; segment `n` lives in place `n % SEGMENTS_HELD`.
pub const SEGMENTS_HELD: usize = 256;
/// Segments that one request brings at most.
pub const SEGMENTS_PER_REQUEST: usize = 48;

/// Offset of the counters in the channel.
pub const CHANNEL_COUNTERS: usize = 0;
/// Offset of the list that the daemon writes.
pub const CHANNEL_IN: usize = PAGE_SIZE;
/// Offset of the list that the agent writes.
pub const CHANNEL_OUT: usize = CHANNEL_IN + LIST_MAX * 32;
/// Offset of the fetched pages.
pub const CHANNEL_PAGES: usize = CHANNEL_OUT + LIST_MAX * 32;
/// Length of the channel in bytes.
pub const CHANNEL_LEN: usize = CHANNEL_PAGES + FETCH_PAGES_MAX * PAGE_SIZE;

/// What a packet is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Op {
    /// Agent: here I am; `a` = flags, name in `text`. Carries its pagemap.
    Hello = 1,
    /// Daemon: welcome; `a` = log2 of the VMA budget's divisor. Carries the channel and, if it has one, /dev/userfaultfd.
    Welcome = 2,
    /// Agent: I can work (`status` 0) or not (an error number).
    Ready = 3,
    /// Which ranges are managed? The answer's list holds [`RegionEntry`].
    Regions = 4,
    /// Watch these ranges for writes (list of [`Range`]); the answer's list holds one error number each.
    Watch = 5,
    /// Copy these runs (list of [`Range`]) to the channel; the answer's list holds the pages copied of each.
    Fetch = 6,
    /// Map slots over pages (list of [`Piece`]); the answer's list holds [`Outcome`].
    Remap = 7,
    /// Give private memory back (list of [`Range`]); `a` = 1: even where pages are still shared.
    Heal = 8,
    /// Stop managing; merged pages stay. To the agent of a cold client that parted: all is back, end.
    Leave = 9,
    /// The pool has let go of these segments (list of ids): close them. What is mapped stays.
    Forget = 10,
    /// Leave the plain memory to the cold tier (`a` = 1): watch it no more, and become a client of the tier beside. Or take
    /// it back (0), should that not have come about; the tier ends what has, by `Leave`.
    Part = 11,
    /// Daemon to an agent of a cold client: begin; `a` = epoch. Answers `Ready`, which carries userfaultfd and table, and tells
    /// whether the former is bare (`a`) and what processor time the agent has taken until then (`b`).
    ColdGo = 16,
    /// Copy these runs (list of [`RegionEntry`]) to the channel; one byte per page in the answer's list.
    ColdCopy = 17,
    /// Take these pages away if they equal their copies (list of [`DropEntry`]), now by the daemon's clock (`a`, monotonic
    /// nanoseconds); one byte per place in the answer's list.
    ColdDrop = 18,
    /// Nothing of these ranges (list of [`Range`]) is out: absent pages are the kernel's again.
    ColdRelease = 19,
}

/// Flag of `Hello`: every large private anonymous mapping is managed.
pub const HELLO_ALL: u64 = 1;
/// Flag of `Hello`: the process was forked from one that had merged pages.
pub const HELLO_FORKED: u64 = 2;
/// Flag of `Hello`: a client of the cold tier; `b` = tolerance in millionths, `count` = limit of the tier in bytes, which is
/// the daemon's at most, 0 each for the daemon's default.
pub const HELLO_COLD: u64 = 4;

/// Flag of `Hello`: the plain memory is the cold tier's for a while; with [`HELLO_COLD`], this is who has it.
pub const HELLO_AWAY: u64 = 8;

/// A packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Packet {
    /// [`MAGIC`].
    pub magic: u32,
    /// [`VERSION`].
    pub version: u32,
    /// [`Op`].
    pub op: u32,
    /// 0 or an error number, in answers.
    pub status: i32,
    /// Counts requests; an answer repeats it.
    pub sequence: u64,
    /// Entries in the list.
    pub count: u64,
    /// Depends on `op`.
    pub a: u64,
    /// Depends on `op`.
    pub b: u64,
    /// Number, plus one, of the processor on which a request was made, 0 if it is not known: the agent answers on the
    /// same one, for waking a processor that rests costs more than most requests.
    pub cpu: u64,
    /// Depends on `op`: a domain's name in `Hello`, padded with zeros.
    pub text: [u8; 64],
}

impl Packet {
    /// Makes a packet.
    pub const fn new(op: Op) -> Packet {
        Packet {
            magic: MAGIC,
            version: VERSION,
            op: op as u32,
            status: 0,
            sequence: 0,
            count: 0,
            a: 0,
            b: 0,
            cpu: 0,
            text: [0; 64],
        }
    }

    /// The packet as bytes.
    pub const fn bytes(&self) -> &[u8; size_of::<Packet>()] {
        // SAFETY: the structure is `repr(C)` of integers without padding (checked below).
        unsafe { &*core::ptr::from_ref(self).cast() }
    }

    /// Reads a packet; `None` if the bytes are none of this version.
    pub fn parse(bytes: &[u8]) -> Option<Packet> {
        if bytes.len() != size_of::<Packet>() {
            return None;
        }
        // SAFETY: the length is right, and any bytes are a valid packet of integers.
        let packet: Packet = unsafe { core::ptr::read_unaligned(bytes.as_ptr().cast()) };
        (packet.magic == MAGIC && packet.version == VERSION).then_some(packet)
    }
}

const _: () = assert!(size_of::<Packet>() == 120);

/// A managed range.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct RegionEntry {
    /// First address.
    pub start: u64,
    /// First address after it.
    pub end: u64,
    /// For the pages that a pool file backs: its inode and first slot; 0 for plain memory.
    pub inode: u64,
    /// Page offset in the pool file.
    pub slot: u64,
}

/// What to put over a run of pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Piece {
    /// Address of the first page.
    pub addr: u64,
    /// Pages.
    pub pages: u32,
    /// Pool segment, or [`PIECE_ZERO`].
    pub segment: u32,
    /// First slot in the segment.
    pub slot: u32,
    /// Neighbours of one number are frozen together.
    pub span: u32,
    /// 1 if it is not worth trying where the piece before it was not merged whole: both are one guess.
    pub follows: u64,
}

/// Answer to `ColdDrop` for a page: the kernel would not move it. It has been made the process's own since; if it is
/// not pinned, it can go when asked for again.
pub const DROP_BUSY: u8 = 2;

/// A run of pages to take away.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct DropEntry {
    /// Address of the first page.
    pub start: u64,
    /// First address of the managed range around it.
    pub around_start: u64,
    /// First address after that range.
    pub around_end: u64,
    /// Pages.
    pub pages: u32,
    /// Place of the first page's copy in the channel.
    pub place: u32,
}

/// `Piece::segment` of pages that are all zero: they become holes.
pub const PIECE_ZERO: u32 = u32::MAX;

/// How a piece went.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Outcome {
    /// Pages merged, from the first on; the next page is the reason why it ended.
    pub merged: u32,
    /// [`Why`] it ended early, 0 if it did not.
    pub why: u32,
}

/// Why a page was not merged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u32)]
pub enum Why {
    /// All were.
    Done = 0,
    /// The bytes differ from the slot.
    Changed = 1,
    /// Pinned for I/O, or shared with a forked process.
    Pinned = 2,
    /// Not plain anonymous memory (any more).
    NotPlain = 3,
    /// Nothing there.
    Absent = 4,
    /// The kernel refused a mapping: limit of mappings or of memory.
    Limit = 5,
    /// Discarded by the program meanwhile.
    Discarded = 6,
}

impl Why {
    /// All reasons.
    pub const ALL: [Why; 7] =
        [Why::Done, Why::Changed, Why::Pinned, Why::NotPlain, Why::Absent, Why::Limit, Why::Discarded];

    /// The reason of this number; unknown numbers are `NotPlain`.
    pub fn from_number(number: u32) -> Why {
        Why::ALL.get(number as usize).copied().unwrap_or(Why::NotPlain)
    }
}

/// Buckets of durations: four to an octave, the last one for all that is longer than some 100 ms.
pub const FREEZE_BUCKETS: usize = 64;

/// The bucket of a duration in microseconds.
pub const fn freeze_bucket(us: u64) -> usize {
    if us < 4 {
        return us as usize;
    }
    let octave = us.ilog2() as usize;
    let bucket = (octave - 1) * 4 + (us >> (octave - 2)) as usize - 4;
    if bucket < FREEZE_BUCKETS { bucket } else { FREEZE_BUCKETS - 1 }
}

/// The first duration in microseconds that is too long for `bucket`.
pub const fn freeze_bucket_end(bucket: usize) -> u64 {
    if bucket < 4 {
        return bucket as u64 + 1;
    }
    let octave = bucket / 4 + 1;
    (bucket as u64 % 4 + 5) << (octave - 2)
}

/// Counters that the agent keeps in the channel, for the daemon to show.
#[derive(Debug)]
#[repr(C)]
pub struct Counters {
    /// Changes of the managed ranges; another value means: ask for `Regions`.
    pub generation: core::sync::atomic::AtomicU64,
    /// Freezes.
    pub freezes: core::sync::atomic::AtomicU64,
    /// Longest freeze in nanoseconds.
    pub freeze_ns_max: core::sync::atomic::AtomicU64,
    /// Freezes by duration, in buckets of [`freeze_bucket`].
    pub freeze_us: [core::sync::atomic::AtomicU64; FREEZE_BUCKETS],
    /// Ranges that the program discarded over merged pages.
    pub discards: core::sync::atomic::AtomicU64,
    /// Processor time of the agent's thread in nanoseconds.
    pub cpu_ns: core::sync::atomic::AtomicU64,
}

const _: () = assert!(size_of::<Counters>() <= PAGE_SIZE);
const _: () = assert!(
    size_of::<DropEntry>() == 32
        && size_of::<Piece>() == 32
        && size_of::<RegionEntry>() == 32
        && size_of::<Range>() <= 32
);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_of_durations_follow_each_other() {
        let mut last = 0;
        for us in 0..200_000u64 {
            let bucket = freeze_bucket(us);
            assert!(bucket == last || bucket == last + 1, "{us}");
            last = bucket;
            if bucket + 1 < FREEZE_BUCKETS {
                assert!(us < freeze_bucket_end(bucket), "{us} in {bucket}");
                assert!(bucket == 0 || us >= freeze_bucket_end(bucket - 1), "{us} in {bucket}");
            }
        }
        assert_eq!(freeze_bucket(u64::MAX), FREEZE_BUCKETS - 1);
    }
}
