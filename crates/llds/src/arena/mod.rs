//! Arena: memory for large structures.
//!
//! One range of address space is reserved once and filled as blocks are asked
//! for; it never moves, so a block is named by its *offset* from the start,
//! and the same offsets hold in every process that maps the same arena. The
//! range stands on the largest pages the system has ([`Pages`]); [`Stats`]
//! says which it got. Freed memory goes back to the system in units of 2 MiB,
//! but for explicit huge pages, which stay.
//!
//! An arena is private to the process, or lies in a file (in /dev/shm, on a
//! hugetlbfs, or anywhere) that several processes map. A shared arena keeps
//! everything it knows in the file: when a process is killed at any
//! instruction, whoever notices takes over what the dead threads held
//! ([`Arena::dead_seats`], [`Arena::begin_recovery`]). What remains lost is at
//! most one block per dead thread, which [`Arena::each_block`] finds.
//!
//! What it does not promise: blocks are not zeroed, and the arena does not
//! know what they hold. It is up to the structure above to say, for each block
//! a dead thread was about to link or unlink, whether it did.
//!
//! ```
//! use llds::arena::{Arena, Options};
//! let arena = Arena::private(&Options::default())?;
//! let seat = arena.seat()?;
//! let block = arena.alloc(&seat, 100)?;
//! // SAFETY: the block is ours and 8-byte aligned.
//! unsafe { arena.at(block).cast::<u64>().write(7) };
//! seat.settle_alloc();
//! arena.free(&seat, block);
//! # Ok::<(), llds::arena::Error>(())
//! ```

mod alive;
mod class;
pub mod fault;
mod map;
mod seat;
mod span;

pub use class::{LOG_BYTES_MAX, SMALL_BYTES_MAX, SPAN_BYTES, class_bytes, class_of};
pub use map::Backing;
pub use seat::{HAZARDS, INTENT_ALLOC, INTENT_RETIRE, SEATS_MAX, Seat};
pub use span::SpanStats;

use class::CLASS_COUNT;
use seat::{ABANDONED, COLLECT_EVERY, Identity};
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::ops::Deref;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::sync::{Arc, Mutex, Weak};
use std::time::Instant;

/// First bytes of an arena file.
const MAGIC: u64 = u64::from_le_bytes(*b"lldsaren");

/// Version of the layout below; any change of it, or of what blocks hold, is a new number.
const VERSION: u32 = 2;

/// Byte order, word size and page geometry in one number that no other combination shares.
const ARCHITECTURE: u32 = {
    let family = if cfg!(target_arch = "x86_64") {
        1
    } else if cfg!(target_arch = "aarch64") {
        2
    } else {
        3
    };
    let order = if cfg!(target_endian = "little") { 0x10 } else { 0x20 };
    0xa700 | order | family
};

/// Which pages an arena is asked to stand on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Pages {
    /// Explicit 2 MiB pages if enough are free for all of it, else transparent ones, else 4 KiB.
    #[default]
    Auto,
    /// 4 KiB only.
    Small,
    /// Transparent 2 MiB pages, else 4 KiB.
    Transparent,
    /// Explicit 2 MiB pages, else as [`Pages::Transparent`].
    Huge2M,
    /// Explicit 1 GiB pages, else as [`Pages::Huge2M`].
    Huge1G,
}

/// Where pages are placed on a machine with more than one memory node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Numa {
    /// On the node of the thread that touches them first.
    #[default]
    Local,
    /// On all nodes in turn.
    Interleave,
}

/// How an arena is made.
#[derive(Clone, Debug)]
pub struct Options {
    /// Bytes of blocks the arena can hold; also its reservation of address space.
    pub capacity_bytes: u64,
    /// Bytes at [`Arena::root`] for the structure's own fixed part, zero at first.
    pub root_bytes: usize,
    /// What kind of structure it holds; opening with another kind is refused.
    pub kind: u64,
    /// Pages asked for.
    pub pages: Pages,
    /// Placement on nodes.
    pub numa: Numa,
}

impl Default for Options {
    fn default() -> Options {
        Options { capacity_bytes: 256 << 30, root_bytes: 4096, kind: 0, pages: Pages::Auto, numa: Numa::Local }
    }
}

/// Why an arena could not be made or opened, or a block not be given.
#[derive(Debug)]
#[non_exhaustive]
pub enum Error {
    /// The address space (or the explicit huge pages) could not be reserved.
    Reserve {
        /// Bytes asked for.
        bytes: u64,
        /// The kernel's reason.
        source: io::Error,
    },
    /// The arena's capacity is used up.
    Full {
        /// The capacity.
        limit_bytes: u64,
    },
    /// The system has no memory left for the file, e.g. the tmpfs is full.
    NoMemory {
        /// The kernel's reason.
        source: io::Error,
    },
    /// All seats are taken by living threads.
    Seats,
    /// The arena was made before this process was forked off.
    Forked,
    /// The file is not an arena, or of another kind.
    Foreign,
    /// The file was written by another version of the code.
    Version {
        /// The file's version.
        found: u32,
        /// The version this code writes.
        expected: u32,
    },
    /// The file was written on another kind of machine.
    Architecture {
        /// The file's mark.
        found: u32,
        /// The mark of this machine.
        expected: u32,
    },
    /// The file is shorter than its header says.
    Truncated {
        /// Bytes it has.
        found: u64,
        /// Bytes it must have.
        expected: u64,
    },
    /// The header's checksum or geometry does not fit.
    Damaged(&'static str),
    /// Processes of another pid or time namespace use the file, so deaths could not be noticed.
    Namespace,
    /// The file system's own error.
    Io(io::Error),
}

impl std::fmt::Display for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Error::Reserve { bytes, source } => write!(
                f,
                "cannot reserve {bytes} bytes of address space: {source}; choose a smaller capacity, or raise ulimit -v"
            ),
            Error::Full { limit_bytes } => {
                write!(f, "the limit of {limit_bytes} bytes is reached; delete something or choose a larger capacity")
            }
            Error::NoMemory { source } => write!(f, "the system has no memory left for the store: {source}"),
            Error::Seats => write!(f, "{SEATS_MAX} threads use the store already; end some, or share them"),
            Error::Forked => write!(f, "the store was opened before fork; open it again in the child"),
            Error::Foreign => write!(f, "the file is not a store of this kind; choose another name"),
            Error::Version { found, expected } => write!(
                f,
                "the file has layout version {found}, this code has {expected}; use the matching version, or remove it"
            ),
            Error::Architecture { found, expected } => write!(
                f,
                "the file was written on another kind of machine (mark {found:#x}, here {expected:#x}); remove it"
            ),
            Error::Truncated { found, expected } => {
                write!(f, "the file is truncated: {found} bytes instead of {expected}; remove it")
            }
            Error::Damaged(what) => write!(f, "the file is damaged: {what}; remove it"),
            Error::Namespace => write!(
                f,
                "processes of another pid or time namespace use the store; share theirs (e.g. --pid=host) to use it too"
            ),
            Error::Io(source) => write!(f, "{source}"),
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Error::Reserve { source, .. } | Error::NoMemory { source } | Error::Io(source) => Some(source),
            _ => None,
        }
    }
}

impl From<io::Error> for Error {
    fn from(error: io::Error) -> Error {
        Error::Io(error)
    }
}

/// What an arena stands on and holds.
#[derive(Clone, Copy, Debug)]
pub struct Stats {
    /// Pages under it.
    pub backing: Backing,
    /// Bytes of blocks it may hold.
    pub capacity_bytes: u64,
    /// Spans and blocks.
    pub spans: SpanStats,
    /// Seats taken.
    pub seat_count: u64,
    /// Deaths that were cleaned up since the arena was made.
    pub recovery_count: u64,
}

/// The first page of an arena. The part up to `checksum` never changes after creation.
#[repr(C)]
struct Header {
    magic: u64,
    version: u32,
    architecture: u32,
    kind: u64,
    span_bytes: u64,
    span_count: u64,
    seat_count: u64,
    root_bytes: u64,
    file_bytes: u64,
    checksum: u64,
    _pad: [u64; 7],
    /// Spans at and above this index were never used.
    fresh: AtomicU64,
    /// Free spans that still have pages; a hint.
    kept: AtomicU64,
    /// Seats at and above this index were never taken.
    seats_high: AtomicU64,
    /// Deaths cleaned up.
    recoveries: AtomicU64,
    /// The namespaces in which seats' states have meaning; changes only while a process has the file alone.
    namespaces: AtomicU64,
    /// `recoveries` when idle spans without a hint were last looked for.
    swept: AtomicU64,
    /// `recoveries` when lost memory was last looked for.
    audited: AtomicU64,
}

/// Words of the header that the checksum covers.
const SEALED_WORDS: usize = 8;

/// Where the parts of an arena lie, in bytes from its start.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Layout {
    spans: usize,
    seats: usize,
    table: usize,
    hints: usize,
    hint_words: usize,
    root: usize,
    root_bytes: usize,
    data: usize,
    bytes: usize,
}

impl Layout {
    fn new(spans: usize, root_bytes: usize) -> Layout {
        let seats = 4096;
        let table = seats + SEATS_MAX * size_of::<Seat>();
        let hints = table + spans * size_of::<span::Entry>();
        let hint_words = spans.div_ceil(64);
        let root = (hints + CLASS_COUNT * hint_words * 8).next_multiple_of(2 << 20);
        let data = (root + root_bytes).next_multiple_of(2 << 20);
        let bytes = (data + spans * SPAN_BYTES).next_multiple_of(2 << 20);
        Layout { spans, seats, table, hints, hint_words, root, root_bytes, data, bytes }
    }
}

struct Inner {
    id: u64,
    map: map::Mapping,
    layout: Layout,
    /// Who we are in seats; `None` for a private arena, whose threads cannot die alone.
    identity: Option<Identity>,
    /// A page the kernel wipes in a forked child: non-zero in the process that made the arena.
    sentinel: Sentinel,
    /// Seats taken through this handle.
    taken: Mutex<Vec<u16>>,
    /// Extents freed through this handle whose pages are still there: since when, first span, spans. Oldest first.
    late: Mutex<VecDeque<(Instant, usize, usize)>>,
}

/// A handle to an arena; clones are the same arena.
#[derive(Clone)]
pub struct Arena {
    inner: Arc<Inner>,
}

/// The calling thread's seat. It does not move to another thread.
pub struct SeatRef<'a> {
    seat: &'a Seat,
    owner: u64,
    _local: std::marker::PhantomData<*const ()>,
}

impl Deref for SeatRef<'_> {
    type Target = Seat;

    #[inline]
    fn deref(&self) -> &Seat {
        self.seat
    }
}

impl SeatRef<'_> {
    /// Returns the number that stands for this seat in lock words: 1 to [`SEATS_MAX`].
    #[inline]
    pub fn owner(&self) -> u64 {
        self.owner
    }
}

/// A dead seat under recovery by this thread; it becomes free when dropped through [`Arena::end_recovery`].
pub struct DeadSeat<'a> {
    seat: &'a Seat,
    owner: u64,
}

impl DeadSeat<'_> {
    /// Returns the number the dead thread wrote into lock words.
    pub fn owner(&self) -> u64 {
        self.owner
    }

    /// Returns the block the dead thread was about to link, 0 for none.
    pub fn alloc_intent(&self) -> u64 {
        self.seat.intent(INTENT_ALLOC)
    }

    /// Returns the block the dead thread was about to unlink, 0 for none.
    pub fn retire_intent(&self) -> u64 {
        self.seat.intent(INTENT_RETIRE)
    }

    /// Writes down, in the dead thread's place, that `block` is about to be unlinked. Its own intent must be settled.
    pub fn intend_retire(&self, block: u64) {
        self.seat.intend_retire(block);
    }
}

thread_local! {
    /// The arena this thread used last, and its seat there.
    static LAST: Cell<(u64, u64)> = const { Cell::new((0, 0)) };
    /// All seats of this thread; released when it ends.
    static SEATS: RefCell<ThreadSeats> = const { RefCell::new(ThreadSeats(Vec::new())) };
}

struct ThreadSeats(Vec<(u64, u64, Weak<Inner>)>);

impl Drop for ThreadSeats {
    fn drop(&mut self) {
        LAST.set((0, 0));
        for (_, owner, arena) in self.0.drain(..) {
            if let Some(inner) = arena.upgrade() {
                inner.leave(owner);
            }
        }
    }
}

impl Arena {
    /// Makes an arena that only this process sees.
    ///
    /// # Errors
    /// [`Error::Reserve`] when not even a 64th of the capacity can be reserved.
    pub fn private(options: &Options) -> Result<Arena, Error> {
        let mut capacity = options.capacity_bytes.max(SPAN_BYTES as u64);
        let least = (capacity / 64).max(SPAN_BYTES as u64);
        loop {
            let layout = Layout::new(span_count(capacity), options.root_bytes);
            match map::Mapping::private(layout.bytes, options.pages, options.numa) {
                Ok(map) => {
                    // A few words here and there: on huge pages they would take megabytes.
                    map.small_pages(layout.data);
                    let arena = Arena::over(map, layout, None)?;
                    arena.inner.format(options.kind);
                    return Ok(arena);
                }
                // Strict overcommit counts reservations: take what is given.
                Err(_) if capacity / 2 >= least => capacity /= 2,
                Err(error) => return Err(error),
            }
        }
    }

    /// Makes an arena in the empty file `file`. Nobody else may map it before this returns.
    ///
    /// # Errors
    /// The file system's, or [`Error::Reserve`].
    pub fn create(file: File, options: &Options) -> Result<Arena, Error> {
        let mut capacity = options.capacity_bytes.max(SPAN_BYTES as u64);
        if let Some((page_bytes, free_bytes)) = map::hugetlbfs_free_bytes(&file) {
            let fixed = Layout::new(span_count(capacity), options.root_bytes).data;
            let left = free_bytes.saturating_sub(fixed) / page_bytes * page_bytes;
            capacity = capacity.min((left as u64).max(SPAN_BYTES as u64));
        }
        let mut layout = Layout::new(span_count(capacity), options.root_bytes);
        if let Some((page_bytes, _)) = map::hugetlbfs_free_bytes(&file) {
            layout.bytes = layout.bytes.next_multiple_of(page_bytes);
        }
        file.set_len(layout.bytes as u64)?;
        let map = map::Mapping::shared(file, layout.bytes, options.pages)?;
        // Everything below `data` is touched without asking, so it must not run out.
        let near = layout.seats + 4 * size_of::<Seat>();
        map.secure(0, near)?;
        map.secure(layout.table, layout.root - layout.table)?;
        map.secure(layout.root, layout.root_bytes)?;
        let arena = Arena::over(map, layout, Some(own_identity()?.0))?;
        arena.inner.format(options.kind);
        arena.inner.enter(true)?;
        Ok(arena)
    }

    /// Opens the arena in `file`.
    ///
    /// # Errors
    /// [`Error::Foreign`], [`Error::Version`], [`Error::Architecture`], [`Error::Truncated`] or [`Error::Damaged`]
    /// when it is not an arena this code can use; [`Error::Namespace`] when deaths could not be noticed.
    pub fn open(file: File, kind: u64, pages: Pages) -> Result<Arena, Error> {
        Arena::open_as(file, kind, pages, false)
    }

    /// Opens the arena in `file`, which nobody else has open, nor opens before this returns: whoever sat in a seat is
    /// dead, whatever his id says here, and from now on the arena is used in our namespaces.
    ///
    /// # Errors
    /// As [`Arena::open`].
    pub fn open_alone(file: File, kind: u64, pages: Pages) -> Result<Arena, Error> {
        Arena::open_as(file, kind, pages, true)
    }

    fn open_as(file: File, kind: u64, pages: Pages, alone: bool) -> Result<Arena, Error> {
        use std::os::unix::fs::FileExt;
        let mut bytes = [0u8; 128];
        let found = file.metadata()?.size();
        if found < 4096 {
            return Err(Error::Truncated { found, expected: 4096 });
        }
        file.read_exact_at(&mut bytes, 0).or_else(|error| read_mapped(&file, &mut bytes).ok_or(error))?;
        let word = |index: usize| u64::from_ne_bytes(bytes[index * 8..index * 8 + 8].try_into().unwrap_or_default());
        if word(0).swap_bytes() == MAGIC {
            return Err(Error::Architecture { found: (word(1) >> 32) as u32, expected: ARCHITECTURE });
        }
        if word(0) != MAGIC {
            return Err(Error::Foreign);
        }
        let half = |at: usize| u32::from_ne_bytes(bytes[at..at + 4].try_into().unwrap_or_default());
        if half(8) != VERSION {
            return Err(Error::Version { found: half(8), expected: VERSION });
        }
        if half(12) != ARCHITECTURE {
            return Err(Error::Architecture { found: half(12), expected: ARCHITECTURE });
        }
        let sealed: Vec<u64> = (0..SEALED_WORDS).map(word).collect();
        if checksum(&sealed) != word(SEALED_WORDS) {
            return Err(Error::Damaged("the header's checksum is wrong"));
        }
        if word(2) != kind {
            return Err(Error::Foreign);
        }
        if word(3) != SPAN_BYTES as u64 || word(5) != SEATS_MAX as u64 {
            return Err(Error::Damaged("the geometry is not this version's"));
        }
        let (spans, root_bytes, expected) = (word(4), word(6), word(7));
        if spans > 1 << 32 || root_bytes > 1 << 40 {
            return Err(Error::Damaged("the geometry is impossible"));
        }
        let mut layout = Layout::new(spans as usize, root_bytes as usize);
        if expected < layout.bytes as u64 {
            return Err(Error::Damaged("the geometry is impossible"));
        }
        layout.bytes = expected as usize;
        if found < expected {
            return Err(Error::Truncated { found, expected });
        }
        let map = map::Mapping::shared(file, layout.bytes, pages)?;
        let arena = Arena::over(map, layout, Some(own_identity()?.0))?;
        arena.inner.enter(alone)?;
        Ok(arena)
    }

    /// Opens the arena in the file at `path`; see [`Arena::open`].
    ///
    /// # Errors
    /// As [`Arena::open`].
    pub fn open_path(path: &Path, kind: u64, pages: Pages) -> Result<Arena, Error> {
        Arena::open(File::options().read(true).write(true).open(path)?, kind, pages)
    }

    fn over(map: map::Mapping, layout: Layout, identity: Option<Identity>) -> Result<Arena, Error> {
        static NEXT_ID: AtomicU64 = AtomicU64::new(1);
        let id = NEXT_ID.fetch_add(1, Ordering::Relaxed);
        let sentinel = Sentinel::new()?;
        let (taken, late) = Default::default();
        Ok(Arena { inner: Arc::new(Inner { id, map, layout, identity, sentinel, taken, late }) })
    }

    /// Returns the address of `offset`; the same block has other addresses in other processes.
    ///
    /// The offset must lie inside the arena; what is there is the caller's business.
    #[inline]
    pub fn at(&self, offset: u64) -> *mut u8 {
        debug_assert!((offset as usize) < self.inner.layout.bytes);
        self.inner.map.base().wrapping_add(offset as usize)
    }

    /// Returns the address of the structure's fixed part, 2 MiB aligned.
    pub fn root(&self) -> *mut u8 {
        self.at(self.inner.layout.root as u64)
    }

    /// Returns the offsets at which blocks can lie.
    #[inline]
    pub fn data_range(&self) -> std::ops::Range<u64> {
        self.inner.layout.data as u64..(self.inner.layout.data + self.inner.layout.spans * SPAN_BYTES) as u64
    }

    /// Whether the calling process is a forked child of the one that made this handle.
    #[inline]
    pub fn is_forked(&self) -> bool {
        self.inner.sentinel.is_wiped()
    }

    /// Whether other processes can use this arena.
    #[inline]
    pub fn is_shared(&self) -> bool {
        self.inner.identity.is_some()
    }

    /// Returns the calling thread's seat, and takes one if it has none. The thread keeps it until it ends.
    ///
    /// # Errors
    /// [`Error::Seats`] when all are taken, [`Error::Forked`] in a forked child.
    #[inline]
    pub fn seat(&self) -> Result<SeatRef<'_>, Error> {
        self.seat_last().map_or_else(|| self.seat_slow(), Ok)
    }

    /// Returns the calling thread's seat if this is the arena of which it last asked for one: else ask [`Arena::seat`].
    #[inline]
    pub fn seat_last(&self) -> Option<SeatRef<'_>> {
        let (id, owner) = LAST.get();
        (id == self.inner.id && !self.is_forked()).then(|| self.seat_ref(owner))
    }

    #[cold]
    fn seat_slow(&self) -> Result<SeatRef<'_>, Error> {
        if self.is_forked() {
            return Err(Error::Forked);
        }
        let known = SEATS
            .try_with(|seats| seats.borrow().0.iter().find(|seat| seat.0 == self.inner.id).map(|seat| seat.1))
            .map_err(|_| Error::Seats)?;
        let owner = match known {
            Some(owner) => owner,
            None => {
                let owner = self.inner.take_seat()?;
                SEATS.with(|seats| {
                    let seats = &mut seats.borrow_mut().0;
                    seats.retain(|seat| seat.2.strong_count() > 0);
                    seats.push((self.inner.id, owner, Arc::downgrade(&self.inner)));
                });
                owner
            }
        };
        LAST.set((self.inner.id, owner));
        Ok(self.seat_ref(owner))
    }

    #[inline]
    fn seat_ref(&self, owner: u64) -> SeatRef<'_> {
        SeatRef { seat: self.inner.seat_at(owner), owner, _local: std::marker::PhantomData }
    }

    /// Gives out a block of at least `size` bytes, aligned to 16 (to 64 if `size` is a multiple of 64).
    ///
    /// The seat notes the intent to link it; [`Seat::settle_alloc`] strikes that out once it is linked.
    ///
    /// # Errors
    /// [`Error::Full`] at the capacity, [`Error::NoMemory`] when the system has none.
    #[inline]
    pub fn alloc(&self, seat: &SeatRef<'_>, size: usize) -> Result<u64, Error> {
        self.inner.alloc(seat, seat.owner, size)
    }

    /// Gives out `size` bytes, a multiple of 64, right behind what the thread got by this call before.
    ///
    /// For arrays that are copied to grow: blocks of any size lie densely, and their memory comes back when all
    /// neighbours are gone, so copy them in the order in which they were made. [`Arena::is_log_sparse`] says when a
    /// block keeps memory for itself. Blocks made out of that order should go to a `second` log, lest they keep the
    /// first one's memory. Blocks over [`LOG_BYTES_MAX`] are given as by [`Arena::alloc`].
    ///
    /// # Errors
    /// As [`Arena::alloc`].
    pub fn alloc_log(&self, seat: &SeatRef<'_>, size: usize, second: bool) -> Result<u64, Error> {
        self.inner.alloc_log(seat, seat.owner, size, second)
    }

    /// Bytes left where [`Arena::alloc_log`] gives next: who may take a little more or less leaves none at the end.
    pub fn log_room(&self, seat: &SeatRef<'_>, second: bool) -> usize {
        self.inner.log_room(seat, second)
    }

    /// Returns the extent in which a block from [`Arena::alloc_log`] lies, and whether it is of a second log.
    pub fn log_of(&self, block: u64) -> Option<(u64, bool)> {
        self.inner.log_of(block)
    }

    /// Whether a block from [`Arena::alloc_log`] holds memory that few others share, so that moving it frees some.
    pub fn is_log_sparse(&self, block: u64, size: usize) -> bool {
        self.inner.is_log_sparse(block, size)
    }

    /// Takes a block back at once. Nobody may be able to reach it any more. Where no block begins, nothing is done.
    pub fn free(&self, seat: &SeatRef<'_>, block: u64) {
        self.inner.free(block, seat.owner);
    }

    /// Takes back a block that was just unlinked, as soon as no guard reads it, and strikes out the intent.
    #[inline]
    pub fn retire(&self, seat: &SeatRef<'_>, block: u64) {
        self.retire_sized(seat, block, self.inner.block_bytes(block));
    }

    /// Takes a block back as [`Arena::retire`] does, when the caller knows its size (log blocks do not tell theirs).
    #[inline]
    pub fn retire_sized(&self, seat: &SeatRef<'_>, block: u64, bytes: u64) {
        self.inner.retire(seat, block, bytes);
        fault::point();
        seat.settle_retire();
        let count = seat.retired.load(Ordering::Relaxed);
        // A small arena must not be full of what waits here.
        let bytes_max = (1 << 20).min((self.inner.layout.spans * SPAN_BYTES / 64) as u64);
        if count >= COLLECT_EVERY || seat.retired_bytes.load(Ordering::Relaxed) > bytes_max {
            self.inner.collect(seat, seat.owner);
        }
    }

    /// Frees what this thread retired and nobody reads.
    pub fn collect(&self, seat: &SeatRef<'_>) {
        self.inner.collect(seat, seat.owner);
    }

    /// Gives the pages of free memory back to the system.
    pub fn trim(&self, seat: &SeatRef<'_>) {
        self.inner.collect(seat, seat.owner);
        self.inner.drop_leases(seat, seat.owner);
        self.inner.trim(seat.owner);
    }

    /// Returns the size of the block at `block` in bytes, 0 if there is none. Log blocks do not tell: 64.
    pub fn block_bytes(&self, block: u64) -> u64 {
        self.inner.block_bytes(block)
    }

    /// Whether a block that is given out begins at `block`.
    pub fn is_allocated(&self, block: u64) -> bool {
        self.inner.is_allocated(block)
    }

    /// Calls `visit` with every block that is given out. Exact only while nobody allocates or frees.
    pub fn each_block(&self, visit: impl FnMut(u64)) {
        self.inner.each_block(visit);
    }

    /// Puts back memory that a death left where nobody finds it, though no block lies there, and ends an audit: from here
    /// [`Arena::is_audited`]. Nobody else may use the arena meanwhile.
    pub fn release_lost(&self, seat: &SeatRef<'_>) {
        self.inner.release_lost(seat.owner);
        let header = self.inner.header();
        header.audited.store(header.recoveries.load(Ordering::SeqCst), Ordering::SeqCst);
    }

    /// Whether [`Arena::release_lost`] was called since the last death was cleaned up.
    pub fn is_audited(&self) -> bool {
        let header = self.inner.header();
        header.audited.load(Ordering::SeqCst) == header.recoveries.load(Ordering::SeqCst)
    }

    /// Bytes that [`Arena::release_lost`] would find in spans that are part of no block. Exact only while nobody allocates
    /// or frees.
    pub fn orphan_bytes(&self) -> u64 {
        let mut bytes = 0;
        self.inner.each_orphan(|_| bytes += SPAN_BYTES as u64);
        bytes
    }

    /// Calls `visit` with every block in any limbo.
    pub fn each_retired(&self, mut visit: impl FnMut(u64)) {
        for owner in 1..=self.inner.seats_high() {
            for entry in self.inner.limbo(self.inner.seat_at(owner)) {
                let block = entry.load(Ordering::Acquire);
                if block != 0 {
                    visit(block);
                }
            }
        }
    }

    /// Returns what the arena stands on and holds. Walks all spans.
    pub fn stats(&self) -> Stats {
        let inner = &self.inner;
        Stats {
            backing: inner.map.backing(),
            capacity_bytes: (inner.layout.spans * SPAN_BYTES) as u64,
            spans: inner.span_stats(),
            seat_count: (1..=inner.seats_high())
                .filter(|&owner| inner.seat_at(owner).state.load(Ordering::Relaxed) != 0)
                .count() as u64,
            recovery_count: inner.header().recoveries.load(Ordering::Relaxed),
        }
    }

    /// Whether the seat numbered `owner` belongs to a process that is dead, so that [`Arena::begin_recovery`] is due.
    pub fn is_dead(&self, owner: u64) -> bool {
        if self.inner.identity.is_none() || owner == 0 || owner > SEATS_MAX as u64 {
            return false;
        }
        let state = self.inner.seat_at(owner).state.load(Ordering::Acquire);
        state != 0 && !self.inner.may_live(state)
    }

    /// Returns the numbers of all seats whose processes are dead.
    pub fn dead_seats(&self) -> Vec<u64> {
        let mut known: Vec<(u64, bool)> = Vec::new();
        (1..=self.inner.seats_high())
            .filter(|&owner| {
                let state = self.inner.seat_at(owner).state.load(Ordering::Acquire);
                if state == 0 || self.inner.identity.is_none() {
                    return false;
                }
                // Threads of one process share its fate: ask the system once.
                let process = state | 3;
                if let Some(&(_, dead)) = known.iter().find(|(other, _)| *other == process) {
                    return dead;
                }
                let dead = !self.inner.may_live(state);
                known.push((process, dead));
                dead
            })
            .collect()
    }

    /// Whether any seat is taken, or being cleaned up, by a living process other than through this handle.
    pub fn is_used_elsewhere(&self) -> bool {
        let taken = self.inner.taken.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        (1..=self.inner.seats_high()).any(|owner| {
            let state = self.inner.seat_at(owner).state.load(Ordering::Acquire);
            state != 0 && !taken.contains(&(owner as u16)) && self.inner.may_live(state)
        })
    }

    /// Begins to clean up after the dead owner of a seat. `None` if he is not dead or somebody else does it.
    ///
    /// The caller resolves the dead thread's locks and intents, then calls [`Arena::end_recovery`]. If the caller
    /// dies meanwhile, the next one starts over, so each step must bear repetition.
    pub fn begin_recovery(&self, owner: u64) -> Option<DeadSeat<'_>> {
        let identity = self.inner.identity?;
        let seat = self.inner.seat_at(owner);
        let state = seat.state.load(Ordering::Acquire);
        if state == 0 || self.is_forked() || self.inner.may_live(state) {
            return None;
        }
        let mine = identity.recovering();
        seat.state.compare_exchange(state, mine, Ordering::SeqCst, Ordering::SeqCst).ok()?;
        fault::point();
        Some(DeadSeat { seat, owner })
    }

    /// Frees the block a dead thread had taken but not linked.
    pub fn recover_alloc(&self, dead: &DeadSeat<'_>) {
        let block = dead.alloc_intent();
        // Strike out first: nothing keeps others from taking a large block again once it is free, so whoever repeated
        // this would free theirs. A death in between loses the block until the next audit.
        dead.seat.settle_alloc();
        fault::point();
        if block != 0 && self.inner.is_allocated(block) {
            self.inner.free(block, dead.owner);
        }
    }

    /// Keeps the block a dead thread had linked.
    pub fn keep_alloc(&self, dead: &DeadSeat<'_>) {
        dead.seat.settle_alloc();
    }

    /// Puts the block a dead thread had unlinked into its limbo, if it did not get there itself.
    pub fn recover_retire(&self, dead: &DeadSeat<'_>) {
        let block = dead.retire_intent();
        let limbo = self.inner.limbo(dead.seat);
        if block != 0 && !limbo.iter().any(|entry| entry.load(Ordering::Acquire) == block) {
            self.inner.retire(dead.seat, block, self.inner.block_bytes(block));
        }
        fault::point();
        dead.seat.settle_retire();
    }

    /// Keeps the block a dead thread had meant to unlink and did not.
    pub fn keep_retire(&self, dead: &DeadSeat<'_>) {
        dead.seat.settle_retire();
    }

    /// Ends a recovery: spans, hazards and limbo of the dead seat are put back, the seat is free.
    pub fn end_recovery(&self, dead: DeadSeat<'_>) {
        let seat = dead.seat;
        for hazard in &seat.hazards {
            hazard.store(0, Ordering::Release);
        }
        fault::point();
        self.inner.release_spans_of(dead.owner);
        fault::point();
        self.inner.collect(seat, dead.owner);
        // Counted before the seat is free: whoever finds all seats clean also finds that there may be something to sweep.
        self.inner.header().recoveries.fetch_add(1, Ordering::SeqCst);
        seat.state.store(0, Ordering::SeqCst);
    }
}

impl Inner {
    fn format(&self, kind: u64) {
        let layout = &self.layout;
        let sealed = [
            MAGIC,
            0,
            kind,
            SPAN_BYTES as u64,
            layout.spans as u64,
            SEATS_MAX as u64,
            layout.root_bytes as u64,
            layout.bytes as u64,
        ];
        let header = self.map.base().cast::<Header>();
        // SAFETY: the header is ours alone until the arena is published; the mapping is larger than a header.
        unsafe {
            (&raw mut (*header).magic).write(MAGIC);
            (&raw mut (*header).version).write(VERSION);
            (&raw mut (*header).architecture).write(ARCHITECTURE);
            (&raw mut (*header).kind).write(kind);
            (&raw mut (*header).span_bytes).write(sealed[3]);
            (&raw mut (*header).span_count).write(sealed[4]);
            (&raw mut (*header).seat_count).write(sealed[5]);
            (&raw mut (*header).root_bytes).write(sealed[6]);
            (&raw mut (*header).file_bytes).write(sealed[7]);
            let words = std::slice::from_raw_parts(header.cast::<u64>(), SEALED_WORDS).to_vec();
            (&raw mut (*header).checksum).write(checksum(&words));
        }
    }

    #[inline]
    fn header(&self) -> &Header {
        // SAFETY: the mapping begins with a header; what changes in it after creation is atomic.
        unsafe { &*self.map.base().cast::<Header>() }
    }

    #[inline]
    fn seat_at(&self, owner: u64) -> &Seat {
        let index = owner as usize - 1;
        assert!(index < SEATS_MAX);
        // SAFETY: the seats lie inside the mapping, 64-byte aligned, and consist of atomics.
        unsafe { &*self.map.base().add(self.layout.seats).cast::<Seat>().add(index) }
    }

    #[inline]
    fn word(&self, offset: u64) -> &AtomicU64 {
        debug_assert!(offset.is_multiple_of(8) && (offset as usize) < self.layout.bytes);
        // SAFETY: offsets come from the layout or from a span's cut, so they lie inside the mapping and are aligned.
        unsafe { &*self.map.base().add(offset as usize).cast::<AtomicU64>() }
    }

    fn seats_high(&self) -> u64 {
        self.header().seats_high.load(Ordering::Acquire).min(SEATS_MAX as u64)
    }

    /// Makes this handle one of those that use the file: from here on others see that its process lives.
    fn enter(&self, alone: bool) -> Result<(), Error> {
        let (Some(identity), Some(file)) = (self.identity, self.map.file()) else { return Ok(()) };
        let (_, namespaces) = own_identity()?;
        if alone {
            self.header().namespaces.store(namespaces, Ordering::SeqCst);
        } else if self.header().namespaces.load(Ordering::SeqCst) != namespaces {
            return Err(Error::Namespace);
        }
        // Without another handle, seats under our id are of a process before us, or of ours before it called exec.
        let first = alive::lock_alone(file, identity.pid())?;
        for owner in 1..=self.seats_high() {
            let state = &self.seat_at(owner).state;
            let found = state.load(Ordering::SeqCst);
            if found != 0 && (alone || (first && Identity::of(found).pid() == identity.pid())) {
                // Who lost it to a recovery needs nothing more.
                let _ = state.compare_exchange(found, ABANDONED, Ordering::SeqCst, Ordering::SeqCst);
            }
        }
        Ok(alive::lock_shared(file, identity.pid())?)
    }

    /// Whether the process named in a seat's non-zero `state` may still execute instructions.
    fn may_live(&self, state: u64) -> bool {
        let (Some(own), Some(file)) = (self.identity, self.map.file()) else { return true };
        let process = Identity::of(state);
        if process.pid() == own.pid() || state == ABANDONED {
            return process == own;
        }
        !alive::is_unlocked(file, self.map.inode(), process.pid())
            && alive::may_run(process, self.header().namespaces.load(Ordering::Relaxed))
    }

    fn take_seat(&self) -> Result<u64, Error> {
        let mine = self.identity.map_or(1, Identity::taken);
        for owner in 1..=SEATS_MAX as u64 {
            if owner > self.seats_high() {
                let offset = self.layout.seats + (owner as usize - 1) * size_of::<Seat>();
                self.map.secure(offset, size_of::<Seat>())?;
            }
            let seat = self.seat_at(owner);
            if seat.state.load(Ordering::Relaxed) != 0
                || seat.state.compare_exchange(0, mine, Ordering::SeqCst, Ordering::SeqCst).is_err()
            {
                continue;
            }
            self.header().seats_high.fetch_max(owner, Ordering::SeqCst);
            // Limbo is inherited; everything else begins empty.
            for lease in &seat.leases {
                lease.store(0, Ordering::Relaxed);
            }
            for hazard in &seat.hazards {
                hazard.store(0, Ordering::Relaxed);
            }
            seat.settle_alloc();
            seat.settle_retire();
            self.taken.lock().unwrap_or_else(std::sync::PoisonError::into_inner).push(owner as u16);
            return Ok(owner);
        }
        Err(Error::Seats)
    }

    /// Gives a seat up: its spans go back, its limbo stays for the next one to sit there.
    fn leave(&self, owner: u64) {
        if self.sentinel.is_wiped() {
            return;
        }
        let mut taken = self.taken.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let Some(index) = taken.iter().position(|&seat| u64::from(seat) == owner) else { return };
        let seat = self.seat_at(owner);
        if seat.hazards.iter().any(|hazard| hazard.load(Ordering::Acquire) != 0) {
            // A guard outlives its thread (leaked): what it reads must stay, so the seat does.
            return;
        }
        taken.swap_remove(index);
        drop(taken);
        self.collect(seat, owner);
        self.drop_leases(seat, owner);
        seat.state.store(0, Ordering::SeqCst);
    }

    /// Gives back every span this seat leases.
    fn drop_leases(&self, seat: &Seat, owner: u64) {
        for lease in &seat.leases {
            let leased = lease.swap(0, Ordering::Relaxed);
            if leased != 0 {
                self.drop_lease(leased as usize - 1, owner);
            }
        }
    }

    fn limbo<'a>(&self, seat: &'a Seat) -> &'a [AtomicU64] {
        let high = (seat.limbo_high.load(Ordering::Acquire) as usize).min(seat.limbo.len());
        &seat.limbo[..high]
    }

    #[inline]
    fn retire(&self, seat: &Seat, block: u64, bytes: u64) {
        let bytes = seat.retired_bytes.load(Ordering::Relaxed) + bytes;
        // New entries go above the old ones; `collect` lowers the mark. There is always room: see `LIMBO`.
        let mut index = seat.limbo_high.load(Ordering::Relaxed) as usize;
        if index >= seat.limbo.len() {
            index = seat.limbo.iter().position(|entry| entry.load(Ordering::Relaxed) == 0).unwrap_or(0);
        }
        seat.limbo[index].store(block, Ordering::Release);
        fault::point();
        seat.limbo_high.fetch_max(index as u64 + 1, Ordering::AcqRel);
        seat.retired_bytes.store(bytes, Ordering::Relaxed);
        seat.retired.store(seat.retired.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
    }

    /// Frees the blocks in `seat`'s limbo that no hazard names.
    fn collect(&self, seat: &Seat, owner: u64) {
        seat.retired.store(0, Ordering::Relaxed);
        seat.retired_bytes.store(0, Ordering::Relaxed);
        if self.limbo(seat).is_empty() {
            return;
        }
        // Pairs with the fence in `hazard_set`: a reader whose hazard we miss will see our unlinking.
        fence(Ordering::SeqCst);
        let mut read: Vec<u64> = Vec::new();
        for other in 1..=self.seats_high() {
            let other = self.seat_at(other);
            if other.state.load(Ordering::Relaxed) != 0 {
                read.extend(other.hazards.iter().map(|hazard| hazard.load(Ordering::Acquire)).filter(|&b| b != 0));
            }
        }
        read.sort_unstable();
        let mut high = 0;
        for (index, entry) in self.limbo(seat).iter().enumerate() {
            let block = entry.load(Ordering::Relaxed);
            if block == 0 {
                continue;
            }
            if read.binary_search(&block).is_ok() {
                high = index as u64 + 1;
                continue;
            }
            // Strike out first: a death in between loses the block until the next audit, and never frees it twice.
            entry.store(0, Ordering::SeqCst);
            fault::point();
            self.free(block, owner);
        }
        seat.limbo_high.store(high, Ordering::Release);
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if self.sentinel.is_wiped() {
            return;
        }
        let taken: Vec<u16> = self.taken.lock().unwrap_or_else(std::sync::PoisonError::into_inner).clone();
        if self.identity.is_some() {
            for owner in taken {
                self.leave(u64::from(owner));
            }
        }
    }
}

/// A page that is not inherited by children: it tells a forked process from the one that made the arena,
/// even when fork was called as a raw system call.
///
/// Where the kernel cannot do that, the page says which process made the arena.
struct Sentinel(*mut AtomicU64);

/// What the page says in the process that made the arena, if the kernel wipes it in others.
const WIPED_ELSEWHERE: u64 = u64::MAX;

// SAFETY: the page is only read after creation, through an atomic.
unsafe impl Send for Sentinel {}
// SAFETY: as above.
unsafe impl Sync for Sentinel {}

impl Sentinel {
    fn new() -> Result<Sentinel, Error> {
        // SAFETY: a fresh private page at an address the kernel chooses; the advice covers exactly that page.
        unsafe {
            let page = libc::mmap(
                std::ptr::null_mut(),
                4096,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            );
            if page == libc::MAP_FAILED {
                return Err(Error::Io(io::Error::last_os_error()));
            }
            let wiped = libc::madvise(page, 4096, libc::MADV_WIPEONFORK) == 0;
            let word = if wiped { WIPED_ELSEWHERE } else { u64::from(std::process::id()) };
            page.cast::<AtomicU64>().write(AtomicU64::new(word));
            Ok(Sentinel(page.cast()))
        }
    }

    #[inline]
    fn is_wiped(&self) -> bool {
        // SAFETY: the page lives as long as we do.
        match unsafe { (*self.0).load(Ordering::Relaxed) } {
            WIPED_ELSEWHERE => false,
            0 => true,
            maker => maker != u64::from(std::process::id()),
        }
    }
}

impl Drop for Sentinel {
    fn drop(&mut self) {
        // SAFETY: nobody else holds the page.
        unsafe { libc::munmap(self.0.cast(), 4096) };
    }
}

/// Who we are, and the namespaces in which that has meaning.
fn own_identity() -> Result<(Identity, u64), Error> {
    let own = || Ok((Identity::own()?, alive::own_namespaces()?));
    own().map_err(|error: io::Error| {
        let what = format!("a shared store needs /proc of this pid namespace to notice deaths: {error}");
        Error::Io(io::Error::new(error.kind(), what))
    })
}

fn span_count(capacity_bytes: u64) -> usize {
    usize::try_from(capacity_bytes.div_ceil(SPAN_BYTES as u64)).unwrap_or(usize::MAX)
}

/// FNV-1a over words: it finds damage, it does not resist forgery.
fn checksum(words: &[u64]) -> u64 {
    words
        .iter()
        .fold(0xcbf2_9ce4_8422_2325, |sum, word| (sum ^ word).wrapping_mul(0x0000_0100_0000_01b3).rotate_left(23))
}

/// Reads the first bytes of a file that refuses `read`, as hugetlbfs of old kernels does.
fn read_mapped(file: &File, bytes: &mut [u8; 128]) -> Option<()> {
    use std::os::fd::AsRawFd;
    let (page_bytes, _) = map::hugetlbfs_free_bytes(file)?;
    // SAFETY: maps one page of the file read-only, copies from it and unmaps it; a failure is checked.
    unsafe {
        let at = libc::mmap(std::ptr::null_mut(), page_bytes, libc::PROT_READ, libc::MAP_SHARED, file.as_raw_fd(), 0);
        if at == libc::MAP_FAILED {
            return None;
        }
        std::ptr::copy_nonoverlapping(at.cast::<u8>(), bytes.as_mut_ptr(), bytes.len());
        libc::munmap(at, page_bytes);
    }
    Some(())
}

#[cfg(test)]
mod tests;
