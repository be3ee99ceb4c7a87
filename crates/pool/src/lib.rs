//! Pages by content: slots in sealed segments.
//!
//! A pool belongs to one domain. Its slots lie in *segments*, memory files of a
//! fixed length, and are written once, in order; clients get read-only
//! descriptors and map slots privately. While a segment is being filled its
//! only way to be written is our own mapping (`F_SEAL_FUTURE_WRITE`); when it
//! is full that mapping goes, and with it the last way to change a published
//! page, for us too. `F_SEAL_WRITE` comes then as well, unless some client has
//! a page pinned for I/O at that moment; it adds nothing but proof.
//!
//! **Why a slot is never reused.** A sealed page cannot be taken back while
//! some process may still see it, and our ledger does not know all of them: a
//! forked child that never spoke to us may map it too. So space comes back per
//! segment, by closing the file: the kernel frees it when the last
//! mapping of the last process is gone, orphans included. The price is that a
//! segment with one live slot stays whole. So where most slots of a segment are
//! dead it is [retired](Pool::retire): its pages get no more sharers, those that
//! are left are moved to other slots, and it goes.
//!
//! What a process shows after that is memory all the same. The kernel tells when a file is gone ([`FileWatch`]): until then
//! a segment is *orphaned*: it is counted in [`Stats`] and towards the pool's largest size.
//!
//! **Why a segment number is reused.** Numbers end after 2 TiB; after that the
//! number that was freed longest ago is used again. No counted share still names
//! the old segment, because a segment is released only without shares. A process
//! that still holds its file identifies it by inode. An uncounted slot number in
//! an index or a plan is only a hint: pages are compared with the bytes of the
//! segment that has the number now before anything is mapped.

#![warn(missing_docs)]

mod fingerprint;
mod inherited;
mod primitive;
mod segment;
mod writable_mapping;

pub use fingerprint::{Fingerprint, Key};
pub use inherited::Refused;
pub use segment::{SEGMENT_LEN, SLOTS_PER_SEGMENT};

use inherited::Sealed;
use pagefold_os::Page;
use pagefold_os::fd::Fd;
use pagefold_os::file_watch::FileWatch;
use primitive::{AtomicU64, Mutex, Ordering, RwLock, lock, read, write};
use segment::{Segment, Standing};
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use writable_mapping::Huge;

/// Segments of a pool at most: their slots are numbers of 29 bits in ledgers and indexes.
const NUMBERS: u32 = u32::MAX / SLOTS_PER_SEGMENT / 8;

/// Segments that are filled at once at most. Two workers that fill one would cut each other's runs in pieces.
const LANES: usize = if cfg!(loom) { 1 } else { 4 };

/// Pools leave one in so many of the process's descriptors to others: a connecting client needs some, even to hear that
/// there are none.
const DESCRIPTORS_LEFT: u64 = 4;
/// More than so many they need not leave.
const DESCRIPTORS_LEFT_MAX: u64 = 8192;

/// Of the mappings that the process may have pools leave one in so many: its threads and its allocator need some, and do not
/// live without.
const MAPPINGS_LEFT: u64 = 4;

/// Slots that a pool has before it takes huge pages for more.
const HUGE_FROM: u64 = SLOTS_PER_SEGMENT as u64;

/// A page's place in the pool: segment number and place in the segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Slot(u32);

impl Slot {
    /// The slot of this number, as [`number`](Self::number) gave it.
    pub const fn from_number(number: u32) -> Slot {
        Slot(number)
    }

    /// Makes a slot from its segment and its place there.
    pub const fn new(segment: u32, index: u32) -> Slot {
        Slot(segment * SLOTS_PER_SEGMENT + index)
    }

    /// A number that tells slots of one pool apart; neighbours in a segment differ by one.
    pub const fn number(self) -> u32 {
        self.0
    }

    /// The segment's number.
    pub const fn segment(self) -> u32 {
        self.0 / SLOTS_PER_SEGMENT
    }

    /// The place in the segment.
    pub const fn index(self) -> u32 {
        self.0 % SLOTS_PER_SEGMENT
    }
}

/// Why a page could not be given a slot.
#[derive(Debug, thiserror::Error)]
pub enum PublishError {
    /// The pool has its largest size.
    #[error("the pool is full at {max_bytes} bytes")]
    Full {
        /// The limit.
        max_bytes: u64,
    },
    /// The kernel gave no memory or no descriptor.
    #[error("no new pool segment: {0}")]
    System(#[from] std::io::Error),
    /// There is no [`Room`] for more pages.
    #[error("no room for a new pool segment: raise the limits of memory and mappings")]
    NoRoom,
}

/// Says whether there is memory for so many more bytes of pages: at a limit of its control group the kernel would rather end
/// a process than refuse it a page. Without anything else: always.
#[derive(Clone, Default)]
pub struct Room(Option<Arc<dyn Fn(u64) -> bool + Send + Sync>>);

impl Room {
    /// Calls `has` before a segment is made, and when a keeper of page records asks.
    pub fn new(has: impl Fn(u64) -> bool + Send + Sync + 'static) -> Room {
        Room(Some(Arc::new(has)))
    }

    /// True if there is some for as many bytes.
    pub fn has(&self, bytes: impl FnOnce() -> u64) -> bool {
        self.0.as_ref().is_none_or(|has| has(bytes()))
    }
}

impl std::fmt::Debug for Room {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(if self.0.is_some() { "Room(asked)" } else { "Room(any)" })
    }
}

/// Pages that were published.
#[derive(Debug)]
pub struct Published {
    /// The first page's slot; the others have the next ones.
    pub first: Slot,
    /// How many pages were taken, at least one.
    pub taken: usize,
    /// Keeps the slots until they are shared, or shall not be.
    pub hold: Hold,
}

/// Keeps a segment that has no sharer yet: its holder will count one before it drops the hold.
#[derive(Debug)]
pub struct Hold(Arc<Segment>);

impl Hold {
    fn new(segment: Arc<Segment>) -> Hold {
        segment.hold();
        Hold(segment)
    }

    /// The segment's number.
    pub fn segment(&self) -> u32 {
        self.0.number()
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        self.0.give_up();
    }
}

/// Counters of a pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Segments that the pool holds.
    pub segments: u64,
    /// Slots that were ever published in them.
    pub slots_published: u64,
    /// Slots with at least one sharer now.
    pub pages_shared: u64,
    /// Mappings of slots.
    pub pages_sharing: u64,
    /// Bytes of pages in memory.
    pub bytes: u64,
    /// Bytes of our own records about them.
    pub metadata_bytes: u64,
    /// Released segments.
    pub segments_released: u64,
    /// Bytes of pages in released segments that a process still maps or has open.
    pub orphaned_bytes: u64,
}

/// Released segments whose files the kernel has not freed yet.
#[derive(Debug, Default)]
struct OrphanedSegments {
    /// Made with the first segment. Where the kernel has no watch, orphaned segments are not counted.
    watch: Option<FileWatch>,
    /// Bytes of pages, by the watch's name of the segment.
    bytes: HashMap<i32, u64>,
}

impl OrphanedSegments {
    fn add(&mut self, segment: &Segment) {
        if self.watch.is_none() {
            self.watch = FileWatch::new().ok();
        }
        if let Some(Ok(id)) = self.watch.as_ref().map(|watch| watch.add(&segment.reader())) {
            self.bytes.insert(id, segment.bytes());
        }
    }

    /// Removes the segments that the kernel has freed by now.
    fn look(&mut self) {
        let Some(watch) = self.watch.as_ref().filter(|_| !self.bytes.is_empty()) else { return };
        let mut gone = Vec::new();
        if watch.look(|id| gone.push(id)) {
            for id in gone {
                self.bytes.remove(&id);
            }
        } else {
            // Without events none would ever be removed: it counts too few rather than too many for ever.
            self.bytes.clear();
        }
    }
}

/// Segments by number, and their numbers by the inodes of their files.
#[derive(Debug, Default)]
struct Segments {
    all: Vec<Option<Arc<Segment>>>,
    by_inode: HashMap<u64, u32>,
}

/// The slots of one domain.
#[derive(Debug)]
pub struct Pool {
    segments: RwLock<Segments>,
    /// Numbers of segments that were let go, the oldest first; changed under the lock of `segments`.
    free: Mutex<VecDeque<u32>>,
    /// Segments have numbers below this.
    numbers: u32,
    /// Mappings that the process may have.
    mappings_max: u64,
    /// The segment that each lane fills; its lock orders the lane's publications.
    open: [Mutex<Option<Arc<Segment>>>; LANES],
    max_bytes: u64,
    room: Room,
    live_segments: AtomicU64,
    released: AtomicU64,
    shared: AtomicU64,
    sharing: AtomicU64,
    published: AtomicU64,
    bytes: AtomicU64,
    huge: Huge,
    /// Nothing else is locked under it.
    orphaned: std::sync::Mutex<OrphanedSegments>,
    name: String,
    /// User id of the domain's clients, if the pool tells its segments from another user's.
    user: Option<u32>,
}

impl Pool {
    /// Makes an empty pool that holds at most `max_bytes` of pages, rounded down to whole segments, but at least one.
    /// Orphaned segments count.
    pub fn new(name: &str, max_bytes: u64) -> Pool {
        Pool::within(name, max_bytes, Room::default())
    }

    /// As [`new`](Self::new), and makes segments only while `room` has some for them.
    pub fn within(name: &str, max_bytes: u64, room: Room) -> Pool {
        Pool {
            segments: RwLock::new(Segments::default()),
            free: Mutex::new(VecDeque::new()),
            numbers: NUMBERS,
            mappings_max: pagefold_os::procfs::mappings_max(),
            open: std::array::from_fn(|_| Mutex::new(None)),
            max_bytes: (max_bytes / SEGMENT_LEN as u64).max(1) * SEGMENT_LEN as u64,
            room,
            live_segments: AtomicU64::new(0),
            released: AtomicU64::new(0),
            shared: AtomicU64::new(0),
            sharing: AtomicU64::new(0),
            published: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            huge: Huge::default(),
            orphaned: std::sync::Mutex::default(),
            name: name.chars().filter(|c| c.is_ascii_alphanumeric() || "-_.".contains(*c)).take(64).collect(),
            user: None,
        }
    }

    /// The pool of a domain of this user's clients.
    #[must_use]
    pub fn of_user(self, user: Option<u32>) -> Pool {
        Pool { user, ..self }
    }

    /// Bytes of pages that it holds at most.
    pub fn max_bytes(&self) -> u64 {
        self.max_bytes
    }

    /// Publishes `pages` in neighbouring slots as far as the open segment reaches. Call again with the rest.
    ///
    /// # Errors
    /// [`PublishError::Full`] at the size limit; [`PublishError::System`] if the kernel refuses a new segment, and
    /// [`PublishError::NoRoom`] before it would.
    pub fn publish(&self, pages: &[&Page]) -> Result<Published, PublishError> {
        self.publish_in(0, pages)
    }

    /// As [`publish`](Self::publish), behind what was published in this `lane`, any number of a worker's: two workers that
    /// filled one segment would cut each other's runs in pieces. There are few lanes, and at the size limit they are shared.
    ///
    /// # Errors
    /// As [`publish`](Self::publish).
    pub fn publish_in(&self, lane: usize, pages: &[&Page]) -> Result<Published, PublishError> {
        let mut failure = None;
        for lane in (lane % LANES..LANES).chain(0..lane % LANES) {
            let mut open = lock(&self.open[lane]);
            if open.is_none() && failure.is_none() {
                match self.add_segment() {
                    Ok(segment) => *open = Some(segment),
                    Err(error) => failure = Some(error),
                }
            }
            if let Some(segment) = open.clone() {
                let published = self.fill(&segment, pages);
                if segment.is_full() {
                    segment.close();
                    *open = None;
                }
                return Ok(published);
            }
        }
        Err(failure.unwrap_or(PublishError::Full { max_bytes: self.max_bytes }))
    }

    /// Publishes in a segment that has room.
    fn fill(&self, segment: &Arc<Segment>, pages: &[&Page]) -> Published {
        // Of a huge page that is begun the rest is memory as well: little beside what a large pool has, and much for a
        // small.
        let large = self.published.load(Ordering::Relaxed) >= HUGE_FROM;
        let before = segment.bytes();
        let (index, taken) = segment.fill(pages, large.then_some(&self.huge));
        self.bytes.fetch_add(segment.bytes() - before, Ordering::Relaxed);
        self.published.fetch_add(taken as u64, Ordering::Relaxed);
        // Before it is closed: a closed segment that nothing keeps may be let go.
        Published { first: Slot::new(segment.number(), index), taken, hold: Hold::new(segment.clone()) }
    }

    /// Begins new segments with the next publications, so that those that are open can be let go of. The rest of these costs
    /// what of a huge page was begun, and no more: pages that were never written take no memory.
    pub fn close_open_segments(&self) {
        for open in &self.open {
            if let Some(segment) = lock(open).take() {
                segment.close();
            }
        }
    }

    fn add_segment(&self) -> Result<Arc<Segment>, PublishError> {
        let mut segments = write(&self.segments);
        self.check_limits()?;
        if !self.room.has(|| self.unfilled() + SEGMENT_LEN as u64) {
            return Err(PublishError::NoRoom);
        }
        self.number_segment(&mut segments, |number| Segment::create(&self.name, self.user, number))
    }

    /// Takes in a segment of an earlier pool of this domain, by a descriptor that a client may have sent, and returns its
    /// number. It stays while the hold lives, for the caller to count its sharers. `each` gets the published slots; to it
    /// the segment is one of the pool already. Does not call it where another thread has taken the segment in.
    ///
    /// # Errors
    /// [`Refused`]. A file that is not sealed may be later.
    pub fn inherit(&self, file: &Fd, inode: u64, mut each: impl FnMut(Slot, &Page)) -> Result<Hold, Refused> {
        let Sealed { reader, slots } = inherited::check(file, inode, &self.name, self.user)?;
        let (hold, segment) = {
            let mut segments = write(&self.segments);
            let known = segments.by_inode.get(&inode).and_then(|number| segments.all[*number as usize].clone());
            if let Some(known) = known {
                return Ok(Hold::new(known));
            }
            // Its memory is there already: nothing is asked of the control group.
            let numbered = self.check_limits().and_then(|()| {
                self.number_segment(&mut segments, |number| Segment::inherit(reader, inode, slots, number))
            });
            let segment = numbered.map_err(|_| Refused::NoRoom)?;
            // Under the lock: it has no sharer yet, and could be released.
            (Hold::new(segment.clone()), segment)
        };
        self.published.fetch_add(u64::from(segment.published()), Ordering::Relaxed);
        self.bytes.fetch_add(segment.bytes(), Ordering::Relaxed);
        for index in 0..segment.published() {
            if let Some(page) = segment.page(index) {
                each(Slot::new(segment.number(), index), page);
            }
        }
        segment.rest();
        Ok(hold)
    }

    /// Returns whether the pool and the process have room for one more segment. Call it with the lock of `segments`, for
    /// others add some as well.
    fn check_limits(&self) -> Result<(), PublishError> {
        let held = self.live_segments.load(Ordering::Relaxed) + self.orphaned(|orphaned| orphaned.bytes.len() as u64);
        if (held + 1) * SEGMENT_LEN as u64 > self.max_bytes {
            return Err(PublishError::Full { max_bytes: self.max_bytes });
        }
        let mappings_left = self.mappings_max / MAPPINGS_LEFT;
        if segment::mapped() + mappings_left >= self.mappings_max { Err(PublishError::NoRoom) } else { Ok(()) }
    }

    /// Makes a segment with the next number.
    fn number_segment(
        &self,
        segments: &mut Segments,
        create: impl FnOnce(u32) -> std::io::Result<Segment>,
    ) -> Result<Arc<Segment>, PublishError> {
        let full = PublishError::Full { max_bytes: self.max_bytes };
        // As late as possible, and the number that rested longest: an agent may still hold an old segment under its number,
        // and may be about to compare with one of its slots.
        let mut free = lock(&self.free);
        let reused = if segments.all.len() as u32 >= self.numbers { Some(*free.front().ok_or(full)?) } else { None };
        let number = reused.unwrap_or(segments.all.len() as u32);
        let segment = Arc::new(create(number)?);
        leave_descriptors(segment.reader().raw())?;
        segments.by_inode.insert(segment.inode(), number);
        if reused.is_some() {
            free.pop_front();
            segments.all[number as usize] = Some(segment.clone());
        } else {
            segments.all.push(Some(segment.clone()));
        }
        self.live_segments.fetch_add(1, Ordering::Relaxed);
        Ok(segment)
    }

    /// Bytes that the open segments may still take; of one that is being filled, all.
    fn unfilled(&self) -> u64 {
        let rest = |lane: &Mutex<Option<Arc<Segment>>>| match lane.try_lock() {
            Ok(open) => open.as_ref().map_or(0, |segment| SEGMENT_LEN as u64 - segment.bytes()),
            Err(_) => SEGMENT_LEN as u64,
        };
        // One is the caller's, which has none open.
        self.open.iter().map(rest).sum::<u64>() - SEGMENT_LEN as u64
    }

    fn orphaned<T>(&self, f: impl FnOnce(&mut OrphanedSegments) -> T) -> T {
        let mut orphaned = pagefold_os::sync::lock(&self.orphaned);
        orphaned.look();
        f(&mut orphaned)
    }

    fn segment(&self, number: u32) -> Option<Arc<Segment>> {
        let segments = read(&self.segments);
        segments.all.get(number as usize)?.clone()
    }

    /// Copies the content of `slot` to `out`; false if there is no such slot (any more).
    pub fn read(&self, slot: Slot, out: &mut Page) -> bool {
        self.with_page(slot, |page| out.copy_from_slice(page)).is_some()
    }

    /// Calls `f` with the content of `slot`, if there is such a slot.
    pub fn with_page<T>(&self, slot: Slot, f: impl FnOnce(&Page) -> T) -> Option<T> {
        let segment = self.segment(slot.segment())?;
        segment.page(slot.index()).map(f)
    }

    /// How many slots from `slot` on were published in its segment and can be shared; 0 if it is none.
    pub fn published_from(&self, slot: Slot) -> u32 {
        let segment = self.segment(slot.segment()).filter(|segment| !segment.is(Standing::Retired));
        segment.map_or(0, |segment| segment.published().saturating_sub(slot.index()))
    }

    /// A read-only descriptor of `segment`, for a client; `None` if it was let go.
    pub fn segment_fd(&self, segment: u32) -> Option<Arc<Fd>> {
        self.segment(segment).map(|segment| segment.reader())
    }

    /// Inode of `segment`'s file, by which mappings of it are known in /proc/PID/maps.
    pub fn segment_inode(&self, segment: u32) -> Option<u64> {
        self.segment(segment).map(|segment| segment.inode())
    }

    /// Finds the segment by the inode of its file, if the pool holds it.
    pub fn segment_of_inode(&self, inode: u64) -> Option<u32> {
        read(&self.segments).by_inode.get(&inode).copied()
    }

    /// Counts `by` more mappings of `slot`; false if its segment was let go or retired, and then nothing may be mapped.
    pub fn add_sharers(&self, slot: Slot, by: u32) -> bool {
        self.count_sharers(slot, by, None)
    }

    /// Counts a mapping of `slot` that is there already, a forked child's, of the file with this inode; false if its segment
    /// was let go.
    pub fn adopt_sharer(&self, slot: Slot, inode: u64) -> bool {
        self.count_sharers(slot, 1, Some(inode))
    }

    fn count_sharers(&self, slot: Slot, by: u32, mapped: Option<u64>) -> bool {
        // The lock is held while counting, so that `release` cannot let go between our look and our count.
        let segments = read(&self.segments);
        let Some(Some(segment)) = segments.all.get(slot.segment() as usize) else { return false };
        // The number of what is mapped may be another segment's by now.
        let may = mapped.map_or(!segment.is(Standing::Retired), |inode| segment.inode() == inode);
        if slot.index() >= segment.published() || !may {
            return false;
        }
        if segment.add_sharers(slot.index(), by) == 0 && by > 0 {
            self.shared.fetch_add(1, Ordering::Relaxed);
        }
        self.sharing.fetch_add(u64::from(by), Ordering::Relaxed);
        true
    }

    /// Counts one mapping of `slot` less. More than were counted is our own mistake and panics in tests.
    pub fn remove_sharer(&self, slot: Slot) {
        if let Some(segment) = self.segment(slot.segment()) {
            let before = segment.remove_sharer(slot.index());
            debug_assert!(before > 0, "{slot:?} had no sharer to remove");
            if before == 1 {
                self.shared.fetch_sub(1, Ordering::Relaxed);
            }
            if before > 0 {
                self.sharing.fetch_sub(1, Ordering::Relaxed);
            }
        }
    }

    /// Mappings of `slot`.
    pub fn sharers(&self, slot: Slot) -> u32 {
        self.segment(slot.segment()).map_or(0, |segment| segment.sharers(slot.index()))
    }

    /// Closed segments of which no slot is shared or [held](Hold): they can be let go.
    pub fn unshared(&self) -> Vec<u32> {
        let segments = read(&self.segments);
        let closed = segments.all.iter().flatten().filter(|segment| segment.is_closed());
        closed.filter(|segment| segment.is_unshared()).map(|segment| segment.number()).collect()
    }

    /// The closed segment with the most dead slots (published, without sharers), of those in which they outnumber the
    /// mappings of the others: moving these takes less memory for the moment than the segment gives back. `None` as well
    /// while dead slots are fewer than `dead_min` or a quarter of all.
    pub fn wasteful(&self, dead_min: u64) -> Option<u32> {
        let published = self.published.load(Ordering::Relaxed);
        let dead = published.saturating_sub(self.shared.load(Ordering::Relaxed));
        if dead < dead_min || dead * 4 < published {
            return None;
        }
        let segments = read(&self.segments);
        let offered =
            segments.all.iter().flatten().filter(|segment| segment.is_closed() && segment.is(Standing::Offered));
        let dead = |segment: &Segment| u64::from(segment.published().saturating_sub(segment.live()));
        // Each live slot has a mapping at least: most segments need no count of them.
        let mostly_dead = offered.filter(|segment| (1..dead(segment)).contains(&segment.live().into()));
        let pays = mostly_dead.filter(|segment| segment.mappings() < dead(segment));
        pays.max_by_key(|segment| dead(segment)).map(|segment| segment.number())
    }

    /// Gives no more sharers to the slots of `segment`: a worker that finds their content publishes another slot.
    pub fn retire(&self, segment: u32) {
        if let Some(segment) = self.segment(segment) {
            segment.set_standing(Standing::Retired);
        }
    }

    /// Undoes the retirement of `segment`, for good: one of its sharers cannot be moved. Calls `shared` with each
    /// shared slot, so that indexes know it again.
    pub fn keep(&self, segment: u32, mut shared: impl FnMut(Slot, &Page)) {
        let Some(held) = self.segment(segment) else { return };
        held.set_standing(Standing::Kept);
        for index in (0..held.published()).filter(|index| held.sharers(*index) > 0) {
            if let Some(page) = held.page(index) {
                shared(Slot::new(segment, index), page);
            }
        }
    }

    /// Releases `segment` if no slot of it is shared or held; first calls `forget` with each published page, so that
    /// indexes drop them. Returns whether it was released.
    pub fn release(&self, segment: u32, mut forget: impl FnMut(Slot, &Page)) -> bool {
        let Some(held) = self.segment(segment).filter(|held| held.is_closed() && held.is_unshared()) else {
            return false;
        };
        for index in 0..held.published() {
            if let Some(page) = held.page(index) {
                forget(Slot::new(segment, index), page);
            }
        }
        let mut segments = write(&self.segments);
        // A worker may have begun to share a slot meanwhile; then the segment stays, and its next duplicate finds it again.
        if !held.is_unshared() {
            return false;
        }
        // Two may let go of one segment at once: it goes, and is counted, once.
        if segments.all[segment as usize].take().is_none() {
            return false;
        }
        segments.by_inode.remove(&held.inode());
        // While we have it: it is not gone yet.
        self.orphaned(|orphaned| orphaned.add(&held));
        lock(&self.free).push_back(segment);
        self.live_segments.fetch_sub(1, Ordering::Relaxed);
        self.released.fetch_add(1, Ordering::Relaxed);
        self.published.fetch_sub(u64::from(held.published()), Ordering::Relaxed);
        self.bytes.fetch_sub(held.bytes(), Ordering::Relaxed);
        true
    }

    /// Counters now.
    pub fn stats(&self) -> Stats {
        let segments = self.live_segments.load(Ordering::Relaxed);
        let published = self.published.load(Ordering::Relaxed);
        Stats {
            segments,
            slots_published: published,
            pages_shared: self.shared.load(Ordering::Relaxed),
            pages_sharing: self.sharing.load(Ordering::Relaxed),
            bytes: self.bytes.load(Ordering::Relaxed),
            metadata_bytes: segments * segment::METADATA_BYTES as u64,
            segments_released: self.released.load(Ordering::Relaxed),
            orphaned_bytes: self.orphaned(|orphaned| orphaned.bytes.values().sum()),
        }
    }
}

/// # Errors
/// `EMFILE` if there are few descriptors above `newest`: the kernel gives the lowest number that is free.
fn leave_descriptors(newest: i32) -> std::io::Result<()> {
    let limit = pagefold_os::fd::limit()?;
    let left = (limit / DESCRIPTORS_LEFT).min(DESCRIPTORS_LEFT_MAX);
    if newest as u64 + left < limit { Ok(()) } else { Err(std::io::Error::from_raw_os_error(libc::EMFILE)) }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use pagefold_os::PAGE_SIZE;

    #[test]
    fn mappings_are_left_for_others() {
        let page = [1; PAGE_SIZE];
        let is_refused =
            |pool: Pool| matches!((pool.publish(&[&page]), pool.stats().segments), (Err(PublishError::NoRoom), 0));
        let pool = |mappings_max| Pool { mappings_max, ..Pool::new("mappings", SEGMENT_LEN as u64) };
        // Each segment of this process takes one, those of other tests too.
        assert!(!is_refused(pool(1 << 12)));
        let slots: Vec<_> = (0..12).map(|_| Segment::create("mappings", None, 0).unwrap()).collect();
        assert!(is_refused(pool(16)));
        drop(slots);
    }

    #[test]
    fn numbers_are_given_again_when_there_are_no_others() {
        let pool = Pool { numbers: 3, ..Pool::new("numbers", 16 * SEGMENT_LEN as u64) };
        let publish = |byte: u8| {
            let slot = pool.publish(&[&[byte; PAGE_SIZE]]).map(|published| published.first);
            pool.close_open_segments();
            slot
        };
        let number = |slot: Result<Slot, PublishError>| slot.map(Slot::segment).ok();
        assert_eq!([1, 2, 3].map(|byte| number(publish(byte))), [Some(0), Some(1), Some(2)]);
        assert!(matches!(publish(4), Err(PublishError::Full { .. })), "all numbers are in use");
        let old = pool.segment_inode(1).unwrap();
        for segment in [1, 0] {
            assert!(pool.release(segment, |_, _| ()));
        }
        // The one that was let go first comes first, and is another segment.
        let slot = publish(5).unwrap();
        assert_eq!((slot.segment(), slot.index()), (1, 0));
        let mut page = [0; PAGE_SIZE];
        assert!(pool.read(slot, &mut page) && page == [5; PAGE_SIZE]);
        let new = pool.segment_inode(1).unwrap();
        assert!(new != old && pool.segment_of_inode(old).is_none());
        assert_eq!([1, 2].map(|number| pool.segment_of_inode(pool.segment_inode(number).unwrap())), [Some(1), Some(2)]);
        assert!(!pool.adopt_sharer(slot, old), "a mapping of the old segment");
        assert!(pool.adopt_sharer(slot, new) && pool.sharers(slot) == 1);
        assert_eq!((number(publish(6)), number(publish(7))), (Some(0), None));
        let stats = pool.stats();
        assert_eq!((stats.segments, stats.segments_released, stats.pages_shared), (3, 2, 1));
    }
}
