//! The tier: store, load, discard, fork.
//!
//! **How a load needs no lock.** A load reads the version of the page's
//! cluster, then the page word, then copies the content out of its slot, then
//! reads the version again. A thread that replaces or clears a page word raises
//! the version *before* the content may be freed. So an unchanged version proves
//! that the word stayed, that the content was referenced all the time, and that
//! the copied bytes are its bytes. Only then is the copy decompressed and
//! compared with its fingerprint. A load that is disturbed eight times takes the
//! cluster's lock. Stores hold that lock only to exchange a word, never while
//! they compress, allocate or write.
//!
//! **References.** A thread raises a content's count only if it holds a
//! reference, or under the lock of the content's index shard while the content
//! is in that index. The count falls under the same lock. So a content found in
//! the index is alive.

mod clients;
mod content;
mod dictionaries;
mod load;
mod store;

use crate::arena::{Arena, NoSlot, ReserveClass};
use crate::backing_file::{Backing, Disk, ReadAhead};
use crate::codec::{Codec, Coder, Dictionary};
use crate::config::Config;
use crate::content_index::{Contents, Hasher};
use crate::error::{CreateError, StoreError};
use crate::layout::{
    self, CLIENTS_MAX, DICTIONARIES, MAGIC, PAGES_MAX, RECORD_CLUSTER, leaf_key, record_word, superblock,
};
use crate::page_directory::{ClientPages, Sparse};
use crate::stats::{Counters, Stats, count};
use pagefold_os::sync::{lock, read, write};
use pagefold_os::{Errno, PAGE_SIZE, Page};
use std::cell::RefCell;
use std::collections::HashMap;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, RwLock};
use twox_hash::XxHash3_64;

/// Number of cluster locks.
const SHARDS: usize = 1024;
/// Attempts of a load without the lock.
const ATTEMPTS: usize = 8;
/// Pages that a dictionary is trained from.
pub(crate) const SAMPLES: usize = 256;
/// Fewer pages do not make a useful dictionary.
pub(crate) const SAMPLES_MIN: usize = SAMPLES / 4;

/// How a page was stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stored {
    /// One word fills the page.
    Filled,
    /// The content was in the tier already, and takes no memory.
    Shared,
    /// A new content.
    New {
        /// How it is encoded.
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
    /// Raised when a page word is replaced or cleared, and when a leaf is freed. Pairs with the fence in `Tier::attempt`.
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
    encoded: Vec<u8>,
    ahead: ReadAhead,
}

impl Worker {
    pub(crate) fn new() -> Worker {
        Worker {
            coder: Coder::new(),
            payload: Box::new([0; PAGE_SIZE + 8]),
            base_payload: Box::new([0; PAGE_SIZE + 8]),
            base: Box::new([0; PAGE_SIZE]),
            pages: vec![Box::new([0; PAGE_SIZE]), Box::new([0; PAGE_SIZE])],
            encoded: Vec::with_capacity(PAGE_SIZE + 8),
            ahead: ReadAhead::new(),
        }
    }

    /// Lends a page to read into. The caller returns it with [`Worker::return_page`].
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

/// Runs `act` with the buffers of this thread. `act` must not call this function again.
pub(crate) fn with_worker<R>(act: impl FnOnce(&mut Worker) -> R) -> R {
    WORKER.with(|worker| act(worker.borrow_mut().get_or_insert_with(Worker::new)))
}

/// Runs `act` on a short-lived thread with buffers from `idle`, and puts them back. New buffers would take as long as
/// storing dozens of pages.
fn with_lent_worker<R>(idle: &Mutex<Vec<Worker>>, act: impl FnOnce() -> R) -> R {
    WORKER.set(lock(idle).pop());
    let result = act();
    lock(idle).extend(WORKER.take());
    result
}

/// Why a referenced content could not be read.
pub(crate) enum Unreadable {
    Damaged(&'static str),
    Io(std::io::Error),
}

#[derive(Debug, Default)]
struct Samples {
    pages: Vec<u8>,
    seen: u64,
    /// A dictionary was trained, or the samples make none: no more samples are taken.
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
    pub(crate) clients: RwLock<HashMap<u32, Arc<ClientPages>>>,
    pub(crate) sparse: Sparse,
    shards: Vec<ClusterShard>,
    dictionaries: [OnceLock<Arc<Dictionary>>; DICTIONARIES],
    /// Number of the dictionary for new contents, 0 for none.
    dictionary: AtomicU8,
    samples: Mutex<Samples>,
    pub(crate) tick: AtomicU64,
    pub(crate) cleaner: Mutex<crate::cleaner_state::CleanerState>,
    /// Stores that wait for the cleaner, which then stops early.
    pub(crate) waiting_stores: AtomicU32,
    /// Successful reclaims. A store that waited for the cleaner sees here that another store has freed memory.
    pub(crate) reclaims: AtomicU64,
    /// Buffers of threads that ended.
    idle_workers: Mutex<Vec<Worker>>,
    pub(crate) counters: Counters,
    pub(crate) config: Config,
}

impl Tier {
    /// Creates an empty tier, with a backing file if one is given.
    ///
    /// # Errors
    /// The limit is out of range, or the kernel refuses the memory file.
    pub fn create(config: Config, backing: Option<Box<dyn Backing>>) -> Result<Tier, CreateError> {
        let arena = Arena::create(config.bytes_max)?;
        let tier = Tier::with_arena(arena, config, backing);
        let word = |at: usize, value: u64| tier.arena.word(at).store(value, Ordering::Relaxed);
        word(superblock::GEOMETRY, layout::geometry());
        word(superblock::SLABS, tier.arena.slabs() as u64);
        word(superblock::KEY, tier.config.key[0]);
        word(superblock::KEY + 1, tier.config.key[1]);
        word(superblock::BYTES_MAX, tier.config.bytes_max);
        word(superblock::CHECK, tier.superblock_check());
        tier.set_owner();
        // Last: a file without the magic number is not an arena.
        tier.arena.word(superblock::MAGIC).store(MAGIC, Ordering::Release);
        Ok(tier)
    }

    pub(crate) fn with_arena(arena: Arena, config: Config, backing: Option<Box<dyn Backing>>) -> Tier {
        Tier {
            arena,
            hasher: Hasher::new(config.key),
            contents: Contents::new(match (config.patches, config.similar_entries) {
                (false, _) => 0,
                (true, 0) => (config.bytes_max / 1024).clamp(1 << 10, 1 << 24) as usize,
                (true, entries) => entries,
            }),
            disk: backing.map(Disk::new),
            clients: RwLock::default(),
            sparse: Sparse::default(),
            shards: (0..SHARDS).map(|_| ClusterShard::default()).collect(),
            dictionaries: std::array::from_fn(|_| OnceLock::new()),
            dictionary: AtomicU8::new(0),
            samples: Mutex::default(),
            tick: AtomicU64::new(0),
            cleaner: Mutex::default(),
            waiting_stores: AtomicU32::new(0),
            reclaims: AtomicU64::new(0),
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

    /// Enters this process as the owner.
    pub(crate) fn set_owner(&self) {
        let pid = std::process::id();
        let start = pagefold_os::procfs::start_time(pid as i32).unwrap_or(0);
        self.arena.word(superblock::OWNER_START).store(start, Ordering::Relaxed);
        self.arena.word(superblock::OWNER_PID).store(u64::from(pid), Ordering::Release);
    }

    /// The descriptors that the keeper holds for a successor: the memory file, and the backing file if it has one.
    pub fn fds(&self) -> (RawFd, Option<RawFd>) {
        (self.arena.fd().raw(), self.disk.as_ref().and_then(Disk::fd))
    }

    /// Adds a client with a known number of pages, which gets the faster directory.
    ///
    /// A client that is not added has no known end. Does nothing if the client exists.
    ///
    /// # Errors
    /// [`StoreError::Name`].
    pub fn add_client(&self, client: u32, pages: u64) -> Result<(), StoreError> {
        if pages > PAGES_MAX {
            return Err(StoreError::Name { client, page: pages });
        }
        if self.client(client).is_some() {
            return Ok(());
        }
        let found = self.client_or_new(client, 0, Some(pages))?;
        // A successor finds the length in the arena.
        let leaf = self.arena.new_leaf(ReserveClass::Reserve).map_err(|error| self.refuse(error))?;
        self.arena.leaf(leaf)[0].store(record_word(pages), Ordering::Release);
        if found.pages == Some(pages) && found.record.set(leaf).is_ok() {
            self.arena.leaf_key(leaf).store(leaf_key(client, RECORD_CLUSTER), Ordering::Release);
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

    pub(crate) fn client(&self, client: u32) -> Option<Arc<ClientPages>> {
        read(&self.clients).get(&client).cloned()
    }

    fn client_or_new(&self, id: u32, page: u64, pages: Option<u64>) -> Result<Arc<ClientPages>, StoreError> {
        if !(1..CLIENTS_MAX).contains(&id) || page >= PAGES_MAX {
            return Err(StoreError::Name { client: id, page });
        }
        let client = match self.client(id) {
            Some(client) => client,
            None => {
                let mut clients = write(&self.clients);
                match clients.get(&id) {
                    Some(client) => client.clone(),
                    None => {
                        let client = ClientPages::new(id, pages, &self.sparse);
                        let client = Arc::new(client.ok_or(StoreError::NoMemory(Errno(libc::ENOMEM)))?);
                        clients.insert(id, client.clone());
                        client
                    }
                }
            }
        };
        match client.pages {
            Some(pages) if page >= pages && page > 0 => Err(StoreError::Name { client: id, page }),
            _ => Ok(client),
        }
    }

    pub(crate) fn cluster_shard(&self, client: u32, cluster: u64) -> &ClusterShard {
        let hash = (cluster ^ u64::from(client) << 20).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        &self.shards[(hash >> 54) as usize % SHARDS]
    }

    /// Does in advance what the first store would wait for: the kernel takes some 20 ms to prepare the epochs of the index,
    /// once per process.
    pub fn warm_up(&self) {
        drop(llds::epoch::pin());
    }

    /// Returns true if the tier holds more than three quarters of its limit.
    pub fn is_crowded(&self) -> bool {
        self.arena.held() > self.arena.bytes_max() / 4 * 3
    }

    /// The figures now.
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
        let clients: u64 = {
            let clients = read(&self.clients);
            clients.values().map(|client| client.bytes() + size_of::<ClientPages>() as u64).sum()
        };
        let dictionaries: usize = self.dictionaries.iter().filter_map(OnceLock::get).map(|one| one.bytes()).sum();
        let samples = lock(&self.samples).pages.capacity();
        let shards = SHARDS * size_of::<ClusterShard>();
        stats.bytes_metadata = self.contents.bytes()
            + self.sparse.bytes()
            + usage.metadata
            + clients
            + (dictionaries + samples + shards) as u64;
        if let Some(disk) = &self.disk {
            stats.disk_bytes = disk.live();
            stats.disk_bytes_held = disk.held();
        }
        stats
    }

    /// How many pages of a client the tier holds.
    pub fn client_pages(&self, client: u32) -> u64 {
        self.client(client).map_or(0, |client| client.stored.load(Ordering::Relaxed))
    }

    /// The clients of the tier, in order, as a successor finds them.
    pub fn client_ids(&self) -> Vec<u32> {
        let mut ids: Vec<u32> = read(&self.clients).keys().copied().collect();
        ids.sort_unstable();
        ids
    }

    /// Test hook: from now on, requests for kernel memory fail with `errno`; 0 ends that.
    #[doc(hidden)]
    pub fn fail_memory(&self, errno: i32) {
        self.arena.fail_backing.store(errno, Ordering::Relaxed);
    }
}

impl Drop for Tier {
    /// Leaves the arena to a process that holds its file, which is the first half of an upgrade. Without a keeper no
    /// process does, and the kernel frees it.
    fn drop(&mut self) {
        self.arena.word(superblock::OWNER_PID).store(0, Ordering::Release);
    }
}
