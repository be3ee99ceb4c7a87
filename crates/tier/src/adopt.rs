//! Adoption: a successor takes over the arena of a dead owner.
//!
//! The arena has no index that must be trusted or repaired. One walk over the
//! leaves finds every content that a page word names, counts its references,
//! marks its slot, and enters it into the indexes. A slot that no word names
//! was being written or freed when the owner died, and is free. A word that
//! cannot name a content is replaced by "lost": loads of its page fail, and
//! never return wrong bytes.
//!
//! The file may hold any bytes: every number is checked before it is used. It is fuzzed (`fuzz/fuzz_targets/tier_adopt.rs`).

use crate::arena::Arena;
use crate::backing_file::{Backing, ZONE_BYTES};
use crate::codec::Codec;
use crate::config::Config;
use crate::error::AdoptError;
use crate::layout::{
    self, DICTIONARIES, LEAF_PAGES, LEAVES_PER_SLAB, MAGIC, PATCHES_SHIFT, RECORD_CLUSTER, Shown, record_pages,
    split_key, superblock,
};
use crate::page_directory::ClientPages;
use crate::tier::Tier;
use pagefold_os::Errno;
use pagefold_os::fd::Fd;
use pagefold_os::procfs::start_time_of_running;
use pagefold_os::sync::write;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// What an adoption found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Adopted {
    /// Pages that the tier holds.
    pub pages: u64,
    /// Their contents.
    pub contents: u64,
    /// Their clients.
    pub clients: u64,
    /// Pages with a word that does not name a valid content: lost.
    pub pages_lost: u64,
}

/// The leaves and the record found for one client.
#[derive(Default)]
struct Found {
    pages: u64,
    leaves: Vec<(u64, u32)>,
    record: Option<(u64, u32)>,
}

impl Tier {
    /// Adopts the arena `fd` of a dead owner, with its backing file if it had one.
    ///
    /// Limit and key come from the arena, all other settings from `config`.
    ///
    /// # Errors
    /// It is not an arena of this version, its owner is alive, or the kernel refuses memory.
    pub fn adopt(fd: Fd, backing: Option<Box<dyn Backing>>, config: Config) -> Result<(Tier, Adopted), AdoptError> {
        let mut arena = Arena::open(fd)?;
        let word = |arena: &Arena, at: usize| arena.word(at).load(Ordering::Acquire);
        if word(&arena, superblock::MAGIC) != MAGIC {
            return Err(AdoptError::Format("magic number"));
        }
        if word(&arena, superblock::GEOMETRY) != layout::geometry() {
            return Err(AdoptError::Version);
        }
        if word(&arena, superblock::SLABS) != arena.slabs() as u64 {
            return Err(AdoptError::Format("length"));
        }
        let key = [word(&arena, superblock::KEY), word(&arena, superblock::KEY + 1)];
        let bytes_max = word(&arena, superblock::BYTES_MAX);
        arena.set_bytes_max(bytes_max);
        let check = word(&arena, superblock::CHECK);
        let pid = word(&arena, superblock::OWNER_PID) as u32;
        if pid != 0
            && start_time_of_running(pid as i32).is_some_and(|start| start == word(&arena, superblock::OWNER_START))
        {
            return Err(AdoptError::OwnerAlive { pid });
        }
        let tier = Tier::with_arena(arena, Config { bytes_max, key, ..config }, backing);
        if tier.superblock_check() != check {
            return Err(AdoptError::Format("checksum"));
        }
        if crate::arena::slabs_for(bytes_max.min(1 << 40)) != tier.arena.slabs() {
            return Err(AdoptError::Format("length"));
        }
        // The newest dictionary is loaded last, and used for new contents.
        for number in 1..=DICTIONARIES {
            tier.load_dictionary(number);
        }
        let adopted = tier.rebuild()?;
        tier.set_owner();
        Ok((tier, adopted))
    }

    fn rebuild(&self) -> Result<Adopted, AdoptError> {
        let mut adopted = Adopted::default();
        let leaves = self.find_leaves();
        let mut clients: HashMap<u32, Found> = HashMap::new();
        for (key, leaf) in leaves {
            let (client, cluster) = split_key(key);
            if cluster == RECORD_CLUSTER {
                let pages = record_pages(self.arena.leaf(leaf)[0].load(Ordering::Relaxed));
                if pages.is_some() {
                    self.arena.adopt_leaf(leaf);
                    clients.entry(client).or_default().record = pages.map(|pages| (pages, leaf));
                } else {
                    self.clear_leaf(leaf);
                }
                continue;
            }
            let mut held = 0;
            for word in self.arena.leaf(leaf) {
                let shown = match Shown::from_word(word.load(Ordering::Relaxed)) {
                    Shown::Content(at) if !self.adopt_content(at) => Shown::Lost,
                    shown => shown,
                };
                if shown != Shown::Nothing {
                    held += 1;
                    word.store(shown.word(), Ordering::Relaxed);
                }
                adopted.pages_lost += u64::from(shown == Shown::Lost);
                if matches!(shown, Shown::Fill(_)) {
                    self.counters.pages_filled.fetch_add(1, Ordering::Relaxed);
                }
            }
            if held == 0 {
                self.arena.leaf_key(leaf).store(0, Ordering::Release);
                continue;
            }
            self.arena.adopt_leaf(leaf);
            let found = clients.entry(client).or_default();
            found.pages += held;
            found.leaves.push((cluster, leaf));
            adopted.pages += held;
        }
        self.arena.finish_adoption().map_err(AdoptError::Memory)?;
        if let Some(disk) = &self.disk {
            disk.finish_adoption();
        }
        adopted.clients = clients.len() as u64;
        adopted.contents = self.counters.contents.load(Ordering::Relaxed);
        self.counters.pages.store(adopted.pages, Ordering::Relaxed);
        let mut map = write(&self.clients);
        for (id, found) in clients {
            let inside =
                |pages: u64| found.leaves.iter().all(|(cluster, _)| *cluster < pages.div_ceil(LEAF_PAGES as u64));
            // A recorded length that is shorter than the found pages is ignored.
            let pages = found.record.map(|(pages, _)| pages).filter(|pages| inside(*pages));
            let client = ClientPages::new(id, pages, &self.sparse).ok_or(AdoptError::Memory(Errno(libc::ENOMEM)))?;
            if let Some((_, leaf)) = found.record {
                let _ = client.record.set(leaf);
            }
            for (cluster, leaf) in found.leaves {
                client.directory.set(cluster, leaf);
            }
            client.stored.store(found.pages, Ordering::Relaxed);
            map.insert(id, Arc::new(client));
        }
        Ok(adopted)
    }

    /// Finds the leaves that have a key, one for each key.
    fn find_leaves(&self) -> Vec<(u64, u32)> {
        let mut leaves = Vec::new();
        for slab in self.arena.leaf_slabs() {
            for slot in 0..LEAVES_PER_SLAB {
                let leaf = (slab << 12 | slot) as u32;
                let key = self.arena.leaf_key(leaf).load(Ordering::Acquire);
                if split_key(key).0 != 0 {
                    leaves.push((key, leaf));
                } else {
                    // Words without a key belong to a leaf that was being created.
                    self.clear_leaf(leaf);
                }
            }
        }
        leaves.sort_unstable();
        // An owner never writes a key twice; in a hostile file the first one counts.
        let mut last = None;
        leaves.retain(|(key, leaf)| {
            let first = last.replace(*key) != Some(*key);
            if !first {
                self.clear_leaf(*leaf);
            }
            first
        });
        leaves
    }

    /// Clears a leaf for reuse. Writes only to non-zero words, so that holes in the file stay holes.
    fn clear_leaf(&self, leaf: u32) {
        let words = std::iter::once(self.arena.leaf_key(leaf)).chain(self.arena.leaf(leaf));
        for word in words.filter(|word| word.load(Ordering::Relaxed) != 0) {
            word.store(0, Ordering::Relaxed);
        }
    }

    /// Counts a reference to a content, and marks its slot for the first one; false if `at` cannot be a content.
    fn adopt_content(&self, at: u64) -> bool {
        if !self.arena.is_slot(at, 0) {
            return false;
        }
        let at = at as usize;
        let meta = self.meta(at);
        let len = meta.len as usize;
        let codec = Codec::from_number(meta.codec_number());
        // A patch never leaves for the file.
        let is_plausible =
            codec.is_some_and(|codec| codec.may_have_len(len)) && !(codec == Some(Codec::Patch) && meta.is_on_disk());
        if !is_plausible || !self.arena.is_slot(at as u64, meta.resident_len()) {
            return false;
        }
        let in_file = |offset: u64| {
            let fits = |disk: &crate::backing_file::Disk| {
                let end = offset.checked_add(len as u64);
                end.is_some_and(|end| end <= disk.end()) && offset % ZONE_BYTES as u64 + len as u64 <= ZONE_BYTES as u64
            };
            self.disk.as_ref().is_some_and(fits)
        };
        if meta.is_on_disk() && !in_file(self.payload_word(at)) {
            return false;
        }
        if codec == Some(Codec::Patch) {
            let base = self.payload_word(at);
            let is_base = self.arena.is_slot(base, 0) && {
                let meta = self.meta(base as usize);
                !meta.is_on_disk() && meta.codec != Codec::Patch as u8
            };
            // The base gets one reference per patch, not per page.
            if !is_base {
                return false;
            }
            if !self.arena.is_taken(at) {
                if !self.adopt_content(base) {
                    return false;
                }
                self.arena.word(base as usize + 2).fetch_add(1 << PATCHES_SHIFT, Ordering::Relaxed);
            }
        }
        let words = self.arena.words();
        if self.arena.adopt_content(at) {
            // One reference, tick 0, no patches: the dead owner's counts are discarded.
            words[at + 2].store(1, Ordering::Relaxed);
            self.count_content(meta, 1);
            if let Some(disk) = self.disk.as_ref().filter(|_| meta.is_on_disk()) {
                disk.add_live(self.payload_word(at), len);
            }
            self.contents.shard(words[at].load(Ordering::Relaxed), words).insert(at);
        } else {
            self.add_ref(at);
        }
        true
    }
}
