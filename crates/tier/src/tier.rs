//! The tier: store, load, discard, fork.
//!
//! **How a load needs no lock.** A load reads the version of the page's
//! cluster, then the page word, then copies the content out of its slot, then
//! reads the version again. Whoever takes a word away from a page raises the
//! version *before* the content may be freed; so an unchanged version says that
//! the word was there all the time, that the content was referenced all the
//! time, and that the copied bytes are its bytes. Only then is the copy
//! decompressed and compared with its fingerprint. A load that is disturbed
//! eight times takes the cluster's lock, which stores hold only to exchange a
//! word, never while they compress, allocate or write.
//!
//! **References.** A content's count is raised only by somebody who holds a
//! reference, or under the lock of its part of the content index while it is
//! in the index; it falls under that lock. So a content found in the index is
//! alive.

mod contents;
mod dictionaries;
mod load;
mod regions;
mod store;

use crate::arena::{Arena, NoSlot, Purse};
use crate::codec::{Codec, Coder, Dictionary};
use crate::config::Config;
use crate::content::{Contents, Hasher};
use crate::error::{CreateError, StoreError};
use crate::index::{Region, Sparse};
use crate::layout::{
    self, DICTIONARIES, MAGIC, PAGES_MAX, RECORD_CLUSTER, REGIONS_MAX, leaf_key, record_word, superblock,
};
use crate::stats::{Counters, Stats, count};
use crate::writeback::{BLOCK_BYTES, Backing, Blocks, Disk};
use pagefold_os::sync::{lock, read, write};
use pagefold_os::{Errno, PAGE_SIZE, Page};
use std::cell::RefCell;
use std::collections::HashMap;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, RwLock};
use twox_hash::XxHash3_64;

/// Cluster locks.
const SHARDS: usize = 1024;
/// Attempts of a load without lock.
const ATTEMPTS: usize = 8;
/// Pages that a dictionary is trained from.
pub(crate) const SAMPLES: usize = 256;
/// From fewer pages nothing is to be learned.
pub(crate) const SAMPLES_MIN: usize = SAMPLES / 4;

/// What became of a stored page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stored {
    /// One word fills the page.
    Filled,
    /// The content was there already, and costs nothing.
    Shared,
    /// A new content.
    New {
        /// How it is kept.
        codec: Codec,
        /// Bytes of the payload.
        bytes: usize,
    },
}

/// One cluster lock and its version.
#[derive(Debug, Default)]
#[repr(align(64))]
pub(crate) struct ClusterShard {
    lock: Mutex<()>,
    /// Raised when a word is taken away from a page, and when a leaf is; pairs with the fence in `Tier::attempt`.
    version: AtomicU64,
}

/// Buffers of one thread.
#[derive(Debug)]
pub(crate) struct Worker {
    pub(crate) coder: Coder,
    payload: Box<[u8; PAGE_SIZE + 8]>,
    base_payload: Box<[u8; PAGE_SIZE + 8]>,
    base: Box<Page>,
    /// Lent out by [`Worker::take_page`].
    pages: Vec<Box<Page>>,
    kept: Vec<u8>,
    /// What a payload may touch in the file.
    blocks: Blocks,
}

impl Worker {
    pub(crate) fn new() -> Worker {
        Worker {
            coder: Coder::new(),
            payload: Box::new([0; PAGE_SIZE + 8]),
            base_payload: Box::new([0; PAGE_SIZE + 8]),
            base: Box::new([0; PAGE_SIZE]),
            pages: vec![Box::new([0; PAGE_SIZE]), Box::new([0; PAGE_SIZE])],
            kept: Vec::with_capacity(PAGE_SIZE + 8),
            blocks: Blocks::new(2 * BLOCK_BYTES),
        }
    }

    /// Lends a page to read into; give it back with [`Worker::return_page`].
    pub(crate) fn take_page(&mut self) -> Box<Page> {
        self.pages.pop().unwrap_or_else(|| Box::new([0; PAGE_SIZE]))
    }

    pub(crate) fn return_page(&mut self, page: Box<Page>) {
        self.pages.push(page);
    }
}

thread_local! {
    static WORKER: RefCell<Option<Worker>> = const { RefCell::new(None) };
}

/// Runs `act` with the buffers of this thread; nothing that it calls may ask for them again.
pub(crate) fn with_worker<R>(act: impl FnOnce(&mut Worker) -> R) -> R {
    WORKER.with(|worker| act(worker.borrow_mut().get_or_insert_with(Worker::new)))
}

/// Runs `act` on a thread that lives for it alone, with buffers from `idle`, where they return: making them takes as
/// long as storing dozens of pages.
fn with_lent_worker<R>(idle: &Mutex<Vec<Worker>>, act: impl FnOnce() -> R) -> R {
    WORKER.set(lock(idle).pop());
    let result = act();
    lock(idle).extend(WORKER.take());
    result
}

/// Why a content could not be read, while it is referenced.
pub(crate) enum Unreadable {
    Damaged(&'static str),
    Io(std::io::Error),
}

#[derive(Debug, Default)]
struct Samples {
    pages: Vec<u8>,
    seen: u64,
    /// Trained, or found unfit: no more samples.
    done: bool,
}

/// Cold pages of one domain.
///
/// All methods take `&self` and may be called from any thread.
#[derive(Debug)]
pub struct Tier {
    pub(crate) arena: Arena,
    pub(crate) hasher: Hasher,
    pub(crate) contents: Contents,
    pub(crate) disk: Option<Disk>,
    pub(crate) regions: RwLock<HashMap<u32, Arc<Region>>>,
    pub(crate) sparse: Sparse,
    shards: Vec<ClusterShard>,
    dictionaries: [OnceLock<Arc<Dictionary>>; DICTIONARIES],
    /// Number of the dictionary for new contents, 0 for none.
    dictionary: AtomicU8,
    samples: Mutex<Samples>,
    pub(crate) tick: AtomicU64,
    pub(crate) cleaner: Mutex<crate::clean::Cleaner>,
    /// Stores that wait for the cleaner: it lets them pass.
    pub(crate) hurried: AtomicU32,
    /// Rooms made; tells a store that waited for the cleaner that room was made meanwhile.
    pub(crate) rooms: AtomicU64,
    /// Buffers of threads that ended.
    idle_workers: Mutex<Vec<Worker>>,
    pub(crate) counters: Counters,
    pub(crate) config: Config,
}

impl Tier {
    /// Makes an empty tier, with a file to write back to if there is one.
    ///
    /// # Errors
    /// The limit is out of range, or the kernel gives no memory file.
    pub fn create(config: Config, backing: Option<Box<dyn Backing>>) -> Result<Tier, CreateError> {
        let arena = Arena::create(config.bytes_max)?;
        let tier = Tier::over(arena, config, backing);
        let word = |at: usize, value: u64| tier.arena.word(at).store(value, Ordering::Relaxed);
        word(superblock::GEOMETRY, layout::geometry());
        word(superblock::SLABS, tier.arena.slabs() as u64);
        word(superblock::KEY, tier.config.key[0]);
        word(superblock::KEY + 1, tier.config.key[1]);
        word(superblock::BYTES_MAX, tier.config.bytes_max);
        word(superblock::CHECK, tier.superblock_check());
        tier.own();
        // Last: a file without it is no arena.
        tier.arena.word(superblock::MAGIC).store(MAGIC, Ordering::Release);
        Ok(tier)
    }

    pub(crate) fn over(arena: Arena, config: Config, backing: Option<Box<dyn Backing>>) -> Tier {
        Tier {
            arena,
            hasher: Hasher::new(config.key),
            contents: Contents::new(match (config.patches, config.similar_entries) {
                (false, _) => 0,
                (true, 0) => (config.bytes_max / 1024).clamp(1 << 10, 1 << 24) as usize,
                (true, entries) => entries,
            }),
            disk: backing.map(Disk::new),
            regions: RwLock::default(),
            sparse: Sparse::default(),
            shards: (0..SHARDS).map(|_| ClusterShard::default()).collect(),
            dictionaries: std::array::from_fn(|_| OnceLock::new()),
            dictionary: AtomicU8::new(0),
            samples: Mutex::default(),
            tick: AtomicU64::new(0),
            cleaner: Mutex::default(),
            hurried: AtomicU32::new(0),
            rooms: AtomicU64::new(0),
            idle_workers: Mutex::default(),
            counters: Counters::default(),
            config,
        }
    }

    /// Checksum of the superblock's fixed words.
    pub(crate) fn superblock_check(&self) -> u64 {
        let mut bytes = [0; (superblock::CHECK - superblock::GEOMETRY) * 8];
        for (chunk, at) in bytes.chunks_exact_mut(8).zip(superblock::GEOMETRY..) {
            chunk.copy_from_slice(&self.arena.word(at).load(Ordering::Relaxed).to_le_bytes());
        }
        XxHash3_64::oneshot_with_seed(MAGIC, &bytes)
    }

    /// Writes this process down as the owner.
    pub(crate) fn own(&self) {
        let pid = std::process::id();
        let start = pagefold_os::procfs::start_time(pid as i32).unwrap_or(0);
        self.arena.word(superblock::OWNER_START).store(start, Ordering::Relaxed);
        self.arena.word(superblock::OWNER_PID).store(u64::from(pid), Ordering::Release);
    }

    /// The memory file, and the backing file if it has a descriptor: what the keeper holds for a successor.
    pub fn fds(&self) -> (RawFd, Option<RawFd>) {
        (self.arena.fd().raw(), self.disk.as_ref().and_then(Disk::fd))
    }

    /// Tells how many pages a region has, which gives it the quicker index.
    ///
    /// Without it a region has no known end. Does nothing if the region is there.
    ///
    /// # Errors
    /// [`StoreError::Name`].
    pub fn add_region(&self, region: u32, pages: u64) -> Result<(), StoreError> {
        if pages > PAGES_MAX {
            return Err(StoreError::Name { region, page: pages });
        }
        if self.region(region).is_some() {
            return Ok(());
        }
        let found = self.region_or_new(region, 0, Some(pages))?;
        // A successor finds the length in the arena.
        let leaf = self.arena.new_leaf(Purse::Reserve).map_err(|error| self.refuse(error))?;
        self.arena.leaf(leaf)[0].store(record_word(pages), Ordering::Release);
        if found.pages == Some(pages) && found.record.set(leaf).is_ok() {
            self.arena.leaf_key(leaf).store(leaf_key(region, RECORD_CLUSTER), Ordering::Release);
        } else {
            self.arena.leaf(leaf)[0].store(0, Ordering::Release);
            self.arena.free_leaf(leaf);
        }
        Ok(())
    }

    fn refuse(&self, error: NoSlot) -> StoreError {
        count(&self.counters.stores_refused);
        match error {
            NoSlot::Full => StoreError::Full { bytes_held: self.arena.held(), bytes_max: self.arena.bytes_max() },
            NoSlot::Kernel(errno) => StoreError::NoMemory(errno),
        }
    }

    pub(crate) fn region(&self, region: u32) -> Option<Arc<Region>> {
        read(&self.regions).get(&region).cloned()
    }

    fn region_or_new(&self, id: u32, page: u64, pages: Option<u64>) -> Result<Arc<Region>, StoreError> {
        if !(1..REGIONS_MAX).contains(&id) || page >= PAGES_MAX {
            return Err(StoreError::Name { region: id, page });
        }
        let region = match self.region(id) {
            Some(region) => region,
            None => {
                let mut regions = write(&self.regions);
                match regions.get(&id) {
                    Some(region) => region.clone(),
                    None => {
                        let region = Region::new(id, pages, &self.sparse);
                        let region = Arc::new(region.ok_or(StoreError::NoMemory(Errno(libc::ENOMEM)))?);
                        regions.insert(id, region.clone());
                        region
                    }
                }
            }
        };
        match region.pages {
            Some(pages) if page >= pages && page > 0 => Err(StoreError::Name { region: id, page }),
            _ => Ok(region),
        }
    }

    pub(crate) fn cluster_shard(&self, region: u32, cluster: u64) -> &ClusterShard {
        let hash = (cluster ^ u64::from(region) << 20).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        &self.shards[(hash >> 54) as usize % SHARDS]
    }

    /// Has done what the first pages that go in would wait for: the kernel takes some 20 ms to get ready for the epochs of
    /// the index, once for each process.
    pub fn warm_up(&self) {
        drop(llds::epoch::pin());
    }

    /// Whether three quarters of the room are taken.
    pub fn is_crowded(&self) -> bool {
        self.arena.held() > self.arena.bytes_max() / 4 * 3
    }

    /// The figures of the moment.
    pub fn stats(&self) -> Stats {
        let mut stats = Stats::default();
        self.counters.fill(&mut stats);
        let usage = self.arena.usage();
        stats.bytes_held = usage.held;
        stats.bytes_max = self.arena.bytes_max();
        stats.bytes_leaves = usage.leaf_bytes;
        stats.bytes_free_slots = usage.free_slots;
        let headers = stats.contents * layout::HEADER_BYTES as u64;
        let fixed = (crate::layout::first_slab(self.arena.slabs()) * 8) as u64;
        let accounted = usage.leaf_bytes + usage.free_slots + headers + stats.payload_bytes + fixed;
        stats.bytes_rounding = usage.held.saturating_sub(accounted);
        let regions: u64 = {
            let regions = read(&self.regions);
            regions.values().map(|region| region.bytes() + size_of::<Region>() as u64).sum()
        };
        let dictionaries: usize = self.dictionaries.iter().filter_map(OnceLock::get).map(|one| one.bytes()).sum();
        let samples = lock(&self.samples).pages.capacity();
        let shards = SHARDS * size_of::<ClusterShard>();
        stats.bytes_metadata = self.contents.bytes()
            + self.sparse.bytes()
            + usage.metadata
            + regions
            + (dictionaries + samples + shards) as u64;
        if let Some(disk) = &self.disk {
            stats.disk_bytes = disk.live();
            stats.disk_bytes_held = disk.held();
        }
        stats
    }

    /// Pages that a region has in the tier.
    pub fn region_pages(&self, region: u32) -> u64 {
        self.region(region).map_or(0, |region| region.stored.load(Ordering::Relaxed))
    }

    /// Regions of the tier, in order: what a successor finds.
    pub fn region_ids(&self) -> Vec<u32> {
        let mut ids: Vec<u32> = read(&self.regions).keys().copied().collect();
        ids.sort_unstable();
        ids
    }

    /// Test hook: asking the kernel for memory fails with `errno` from now on; 0 ends it.
    #[doc(hidden)]
    pub fn fail_memory(&self, errno: i32) {
        self.arena.fail_backing.store(errno, Ordering::Relaxed);
    }
}

impl Drop for Tier {
    /// Leaves the arena to whoever holds its file: the first half of an upgrade. Without a keeper that is nobody, and
    /// the kernel frees it.
    fn drop(&mut self) {
        self.arena.word(superblock::OWNER_PID).store(0, Ordering::Release);
    }
}
