//! The packets that agent and daemon exchange, and the entries of their lists.
//!
//! Requests and answers are fixed-size packets on a `SOCK_SEQPACKET` socket. Lists and page contents lie in the
//! [`channel`](crate::channel). The daemon sends one request at a time, and the agent answers it.

use pagefold_os::Range;

/// First word of every packet.
pub const MAGIC: u32 = 0x5046_4c44;
/// Version of this protocol; agent and daemon must use the same.
pub const VERSION: u32 = 3;

/// Maximum of pages that one request copies to the channel.
pub const FETCH_PAGES_MAX: usize = 512;
/// Maximum of pages that are frozen together: it bounds how long an access waits.
pub const FREEZE_PAGES_MAX: usize = 128;
/// Maximum of entries of a list in the channel.
pub const LIST_MAX: usize = 2048;
/// Pool segments that an agent keeps mapped; segment `n` takes place `n % SEGMENTS_HELD`.
pub const SEGMENTS_HELD: usize = 256;
/// Maximum of segment descriptors that one request carries.
pub const SEGMENTS_PER_REQUEST: usize = 48;

/// Maximum of bytes of a domain's name.
pub const DOMAIN_NAME_MAX: usize = 64;

/// Name of the keeper's socket: the name of the daemon's socket, followed by this.
pub const KEEPER_SUFFIX: &[u8] = b".keeper";
/// What a packet is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Op {
    /// Agent: begin a connection; `a` = flags, the domain's name in `text`. Carries the agent's pagemap, and with
    /// [`HELLO_ATTACHED`] perhaps the keeper's end of a new socket between agent and keeper.
    Hello = 1,
    /// Daemon: answer to `Hello`. Carries the channel and, if the daemon has one, /dev/userfaultfd. An agent that has just
    /// entered a program gets two of its own before it greets: one with that device, the other with the file of its code.
    Welcome = 2,
    /// Agent: it is set up (`status` 0), or cannot work (an error number). For the cold tier it carries userfaultfd and
    /// residency map; `a` = 1 if the former is not enabled yet, `b` = processor time that the agent has taken until now,
    /// `sequence` and `count` = what [`HELLO_COLD`] says of `b` and `count`.
    Ready = 3,
    /// List the managed ranges. The answer's list holds [`RegionEntry`].
    Regions = 4,
    /// Watch these ranges for writes (list of [`Range`]); the answer's list holds one error number each.
    Watch = 5,
    /// Copy these runs (list of [`Range`]) to the channel; the answer's list holds the pages copied of each.
    Fetch = 6,
    /// Map pool slots over pages (list of [`RemapPiece`]); the answer's list holds [`Outcome`].
    Remap = 7,
    /// Replace pool mappings by private memory (list of [`Range`]).
    Unshare = 8,
    /// Stop managing; merged pages stay. To the agent of a lent client's cold side: every page is resident again, end.
    Leave = 9,
    /// The pool has released these segments (list of ids): close them. Mapped pages stay.
    CloseSegments = 10,
    /// Lend the anonymous memory to the cold tier (`a` = 1): stop watching it, and become a client of the tier as well. Or
    /// take it back (`a` = 0) if the tier did not accept the client; the tier ends an accepted one by `Leave`.
    Lend = 11,
    /// Agent to the keeper: the program has forked. Carries the userfaultfd of the child's memory.
    ForkedChild = 12,
    /// Hand the plain memory that is managed and large private mappings of files to the kernel's KSM (`a` = 1), or only the
    /// latter (`a` = 2): the answer's count is 1 if there are any. Or take back what was handed (`a` = 0): the count is 1 if
    /// there is more of it. Counted in [`AgentCounters::leftover_bytes`](crate::channel::AgentCounters).
    Leftover = 13,
    /// Agent to the keeper, and keeper to the daemon as the first packet of a connection: carries the end of a new socket,
    /// on which the agent greets. For programs that do not reach the daemon's socket by its path.
    Connect = 14,
    /// Hand over the file of an earlier daemon's segment: `a` = its inode; the answer carries it. For a daemon that may not
    /// open what the process shows.
    OpenEarlier = 15,
    /// Daemon, to the agent of a cold client: begin; `a` = epoch.
    ColdStart = 16,
    /// Copy these runs (list of [`RegionEntry`]) to the channel; the answer's list holds one byte per page.
    ColdCopy = 17,
    /// Evict these pages if they equal their copies (list of [`EvictEntry`]); `a` = the time of the request by the daemon's
    /// monotonic clock in nanoseconds. The answer's list holds one byte per place.
    ColdEvict = 18,
    /// No page of these ranges (list of [`Range`]) is evicted: the kernel serves faults there again.
    ColdUnregister = 19,
    /// These segments of earlier daemons have numbers now (list of [`EarlierSegment`]): they are held like those that this
    /// daemon brings. The answer's list holds 1 for each that the agent has, else 0. With `a` = 1 all others are closed.
    NameEarlier = 20,
}

/// The smallest memory in one piece that is managed without a request of the program's, in bytes. Pages of a JavaScript heap
/// have 256 KiB.
pub const ALL_MIN: u64 = 128 << 10;

/// Flag of `Hello`: every large private anonymous mapping is managed.
pub const HELLO_ALL: u64 = 1;
/// Flag of `Hello`: the process was forked from one that had merged pages.
pub const HELLO_FORKED: u64 = 2;
/// Flag of `Hello`: a client of the cold tier; `b` = refault budget in millionths, `count` = limit of the tier in bytes,
/// which the daemon's own limit bounds; 0 for the daemon's default. With [`HELLO_ATTACHED`] only `Ready` has them.
pub const HELLO_COLD: u64 = 4;
/// Flag of `Hello`: the anonymous memory is lent to the cold tier. With [`HELLO_COLD`] the sender is the borrower.
pub const HELLO_LENT: u64 = 8;

/// Flag of `Hello`: the agent entered a program that ran already. Its threads are to be stopped while mappings are replaced,
/// and while pages are evicted. `b` and `count` are address and length of the agent's memory, `sequence` the address of the
/// code by which it leaves.
pub const HELLO_ATTACHED: u64 = 16;

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
    /// Number of the request; the answer repeats it.
    pub sequence: u64,
    /// Entries in the list.
    pub count: u64,
    /// Depends on `op`.
    pub a: u64,
    /// Depends on `op`.
    pub b: u64,
    /// Number, plus one, of the processor that made the request, 0 if unknown. The agent answers on the same processor,
    /// because waking an idle one costs more than most requests.
    pub cpu: u64,
    /// Depends on `op`: a domain's name in `Hello`, padded with zeros.
    pub text: [u8; DOMAIN_NAME_MAX],
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
            text: [0; DOMAIN_NAME_MAX],
        }
    }

    /// The packet as bytes.
    pub const fn bytes(&self) -> &[u8; size_of::<Packet>()] {
        // SAFETY: the structure is `repr(C)` of integers without padding (checked below).
        unsafe { &*core::ptr::from_ref(self).cast() }
    }

    /// Reads a packet; `None` if the bytes are not a packet of this version.
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
    /// Inode of the pool file that backs the pages; 0 for anonymous memory.
    pub inode: u64,
    /// Page offset in the pool file.
    pub slot: u64,
}

/// A segment of an earlier daemon, which is one of this daemon's now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct EarlierSegment {
    /// Inode of its file.
    pub inode: u64,
    /// Its number from now on.
    pub id: u64,
}

/// What to put over a run of pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct RemapPiece {
    /// Address of the first page.
    pub addr: u64,
    /// Pages.
    pub pages: u32,
    /// Pool segment, or [`PIECE_ZERO`].
    pub segment: u32,
    /// First slot in the segment.
    pub slot: u32,
    /// Neighbouring pieces with the same number are frozen together.
    pub freeze: u32,
    /// 1 if the piece is not worth trying after a piece that was not merged completely: both rest on the same guess.
    pub follows: u64,
}

/// Answer to `ColdEvict` for a page: evicted.
pub const EVICT_DONE: u8 = 1;
/// Answer to `ColdEvict` for a page: the kernel refused to move it. The agent has made the page exclusive since; unless the
/// page is pinned, another request can evict it.
pub const EVICT_BUSY: u8 = 2;

/// A run of pages to evict.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct EvictEntry {
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

/// `RemapPiece::segment` of zero pages: they become holes.
pub const PIECE_ZERO: u32 = u32::MAX;

/// The result of a piece.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Outcome {
    /// Pages merged, from the first one on; `reason` is about the next page.
    pub merged: u32,
    /// [`RefusalReason`] of the first page that was not merged, 0 if all were.
    pub reason: u32,
}

/// RefusalReason a page was not merged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u32)]
pub enum RefusalReason {
    /// No page was refused.
    Done = 0,
    /// The bytes differ from the slot.
    Changed = 1,
    /// Pinned for I/O, or shared with a forked process that lives.
    Pinned = 2,
    /// Not, or no longer, private anonymous memory.
    NotAnonymous = 3,
    /// No page is present.
    Absent = 4,
    /// The kernel refused a mapping: a limit of mappings or of memory.
    Limit = 5,
    /// The program discarded it while it was frozen.
    Discarded = 6,
}

impl RefusalReason {
    /// All reasons.
    pub const ALL: [RefusalReason; 7] = [
        RefusalReason::Done,
        RefusalReason::Changed,
        RefusalReason::Pinned,
        RefusalReason::NotAnonymous,
        RefusalReason::Absent,
        RefusalReason::Limit,
        RefusalReason::Discarded,
    ];

    /// The reason with this number; unknown numbers are `NotAnonymous`.
    pub fn from_number(number: u32) -> RefusalReason {
        RefusalReason::ALL.get(number as usize).copied().unwrap_or(RefusalReason::NotAnonymous)
    }
}

const _: () = assert!(
    size_of::<EvictEntry>() == 32
        && size_of::<RemapPiece>() == 32
        && size_of::<RegionEntry>() == 32
        && size_of::<Range>() <= 32
);
