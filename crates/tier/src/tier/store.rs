//! Pages in.

use super::{ClusterShard, SAMPLES, Stored, Tier, Worker, with_lent_worker, with_worker};
use crate::arena::{NoSlot, Purse};
use crate::codec::{self, Codec, PATCH_HEAD, RAW_ABOVE_BYTES};
use crate::config::Effort;
use crate::error::StoreError;
use crate::index::Region;
use crate::layout::{self, LEAF_PAGES, Meta, PATCHES_SHIFT, Shown, leaf_key};
use crate::stats::count;
use pagefold_os::Page;
use pagefold_os::sched::{self, Cpus};
use pagefold_os::sync::lock;
use std::sync::atomic::Ordering;

/// Which processors each of some threads takes, the caller among them: the kernel may well put threads that live for a
/// few milliseconds onto the processor of the one that started them, and then they work one after the other.
#[derive(Clone, Copy)]
struct Seats {
    cpus: Cpus,
    own: usize,
    count: usize,
}

impl Seats {
    fn of(count: usize) -> Seats {
        let cpus = Cpus::of_thread().unwrap_or(Cpus::NONE);
        let here = sched::cpu();
        let own = cpus.iter().position(|cpu| Some(cpu) == here).unwrap_or(0);
        Seats { cpus, own, count }
    }

    /// Binds the calling thread, the `number`-th behind the caller; where there are too few processors, to none.
    fn take(&self, number: usize) {
        let share = self.cpus.share((self.own + number) % self.count, self.count);
        if share != Cpus::NONE {
            // Only a matter of time.
            let _ = share.bind_thread();
        }
    }
}

impl Tier {
    /// Takes a copy of a page; what the tier had for it is replaced.
    ///
    /// # Errors
    /// The tier is full, the kernel gives no memory, or the name is out of range. What was there before stays.
    pub fn store(&self, region: u32, page: u64, data: &Page, effort: Effort) -> Result<Stored, StoreError> {
        let region = self.region_or_new(region, page, None)?;
        let mut room_made = 0;
        loop {
            let result = self.word_for(data, effort).and_then(|(word, stored)| {
                self.publish(&region, page, word).map(|()| stored).inspect_err(|_| self.release_word(word))
            });
            match result {
                Ok(stored) => {
                    count(&self.counters.stores);
                    if stored == Stored::Shared {
                        count(&self.counters.stores_shared);
                    }
                    return Ok(stored);
                }
                Err(NoSlot::Full) if room_made < 2 && self.make_room() => room_made += 1,
                Err(error) => return Err(self.refuse(error)),
            }
        }
    }

    /// Takes copies of many pages of a region, on several threads; the results stand in the order of the pages.
    ///
    /// A dense batch of 256 pages or more trains the domain's dictionary first, if there is none.
    pub fn store_many(&self, region: u32, pages: &[(u64, &Page)], effort: Effort) -> Vec<Result<Stored, StoreError>> {
        if effort == Effort::Dense && self.dictionary.load(Ordering::Acquire) == 0 && pages.len() >= 256 {
            let step = pages.len().div_ceil(SAMPLES);
            let usable = pages.iter().step_by(step).filter(|(_, page)| codec::same_filled(page).is_none());
            self.train_on(&usable.flat_map(|(_, page)| page.iter().copied()).collect::<Vec<u8>>());
        }
        let store = |pages: &[(u64, &Page)]| -> Vec<Result<Stored, StoreError>> {
            pages.iter().map(|(page, data)| self.store(region, *page, data, effort)).collect()
        };
        let workers = self.config.workers.min(pages.len() / 64).max(1);
        if workers == 1 {
            return store(pages);
        }
        let part = pages.len().div_ceil(workers).next_multiple_of(LEAF_PAGES);
        let (own, rest) = pages.split_at(part.min(pages.len()));
        let seats = Seats::of(workers);
        std::thread::scope(|scope| {
            let aside = |(number, part)| {
                let work = move || {
                    seats.take(number + 1);
                    with_lent_worker(&self.idle_workers, || store(part))
                };
                (part, std::thread::Builder::new().spawn_scoped(scope, work))
            };
            let handles: Vec<_> = rest.chunks(part).enumerate().map(aside).collect();
            // Who waits on our processor for its turn finds its own now.
            std::thread::yield_now();
            let mut stored = store(own);
            for (part, handle) in handles {
                stored.extend(match handle {
                    Ok(handle) => handle.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
                    // No thread is to be had.
                    Err(_) => store(part),
                });
            }
            stored
        })
    }

    /// The word that shows `data`, with a reference if it names a content.
    pub(super) fn word_for(&self, data: &Page, effort: Effort) -> Result<(u64, Stored), NoSlot> {
        let halves_equal = |word: &u64| word >> 32 == word & 0xffff_ffff;
        if let Some(word) = codec::same_filled(data).filter(halves_equal) {
            self.counters.pages_filled.fetch_add(1, Ordering::Relaxed);
            return Ok((Shown::Fill(word as u32).word(), Stored::Filled));
        }
        let fingerprint = self.hasher.fingerprint(data);
        if let Some(at) = self.find_equal(fingerprint, data) {
            return Ok((Shown::Content(at as u64).word(), Stored::Shared));
        }
        let (at, codec, bytes) =
            with_worker(|worker| self.new_content(fingerprint, data, effort, None, worker, Purse::Store))?;
        self.contents.shard(fingerprint, self.arena.words()).insert(at);
        if effort == Effort::Dense {
            self.sample(data);
        }
        Ok((Shown::Content(at as u64).word(), Stored::New { codec, bytes }))
    }

    /// A referenced content whose bytes are equal, proven.
    pub(super) fn find_equal(&self, fingerprint: u64, data: &Page) -> Option<usize> {
        let shard = self.contents.shard(fingerprint, self.arena.words());
        let at = shard.find()?;
        self.add_ref(at);
        drop(shard);
        let equal = with_worker(|worker| {
            let mut page = worker.take_page();
            let equal = self.read_content(at, worker, &mut page).is_ok() && *page == *data;
            worker.return_page(page);
            equal
        });
        if !equal {
            self.release(at);
        }
        equal.then_some(at)
    }

    /// Compresses `data` and writes it as a content with one reference; does not enter it into the index.
    ///
    /// `predecessor` is the content that this one is to replace: it must not become its base.
    pub(crate) fn new_content(
        &self,
        fingerprint: u64,
        data: &Page,
        effort: Effort,
        predecessor: Option<usize>,
        worker: &mut Worker,
        purse: Purse,
    ) -> Result<(usize, Codec, usize), NoSlot> {
        let mut kept = std::mem::take(&mut worker.kept);
        kept.clear();
        let mut dictionary = 0;
        let mut base = None;
        let codec = if let Some(word) = codec::same_filled(data) {
            kept.extend_from_slice(&word.to_le_bytes());
            Codec::Fill
        } else {
            let own = match effort {
                Effort::Fast => worker.coder.lz4(data, RAW_ABOVE_BYTES).map(|bytes| (Codec::Lz4, bytes)),
                Effort::Dense => {
                    let (number, trained) = self.current_dictionary();
                    dictionary = number;
                    worker.coder.zstd(data, trained, RAW_ABOVE_BYTES).map(|bytes| (Codec::Zstd, bytes))
                }
            };
            let mut codec = match own {
                Some((codec, bytes)) => {
                    kept.extend_from_slice(bytes);
                    codec
                }
                None => {
                    dictionary = 0;
                    kept.extend_from_slice(data);
                    Codec::Raw
                }
            };
            if effort == Effort::Dense {
                base = self.patch(data, predecessor, worker, &mut kept);
                if base.is_some() {
                    codec = Codec::Patch;
                    dictionary = 0;
                }
            }
            codec
        };
        let meta = Meta { len: kept.len() as u16, codec: codec as u8, dictionary };
        let written = self.write_content(fingerprint, meta, &kept, purse);
        let bytes = kept.len();
        worker.kept = kept;
        match written {
            Ok(at) => {
                // What patches may build on.
                if matches!(codec, Codec::Raw | Codec::Zstd) {
                    self.contents.remember(&self.hasher, data, at);
                }
                Ok((at, codec, bytes))
            }
            Err(error) => {
                if let Some(base) = base {
                    self.arena.word(base + 2).fetch_sub(1 << PATCHES_SHIFT, Ordering::Relaxed);
                    self.release(base);
                }
                Err(error)
            }
        }
    }

    /// Tries to express `data` as a patch that takes less than three quarters of `kept`.
    ///
    /// Replaces `kept` and returns the base, with a reference and counted as one, if that works.
    pub(super) fn patch(
        &self,
        data: &Page,
        predecessor: Option<usize>,
        worker: &mut Worker,
        kept: &mut Vec<u8>,
    ) -> Option<usize> {
        let len_max = (kept.len() * 3 / 4).checked_sub(PATCH_HEAD + 16)?;
        let mut near = self.contents.near(&self.hasher, data).filter(|at| Some(*at) != predecessor).peekable();
        near.peek()?;
        if !self.contents.worth.pays() {
            return None;
        }
        let at = near.find(|at| self.try_ref(*at))?;
        let count = self.arena.word(at + 2).load(Ordering::Relaxed) >> PATCHES_SHIFT;
        // Not LZ4: a base stays as it is as long as patches build on it.
        let fits = [Codec::Zstd as u8, Codec::Raw as u8].contains(&self.meta(at).codec);
        let usable = fits && count < 0xffff - 1024;
        let mut page = worker.take_page();
        let patched = usable && self.read_content(at, worker, &mut page).is_ok() && {
            let patch = worker.coder.patch(data, &page, len_max);
            self.contents.worth.note(patch.map_or(0, |patch| kept.len().saturating_sub(patch.len() + PATCH_HEAD)));
            if let Some(patch) = patch {
                kept.clear();
                kept.extend_from_slice(&(at as u64).to_le_bytes());
                kept.extend_from_slice(patch);
            }
            patch.is_some()
        };
        worker.return_page(page);
        if patched {
            self.arena.word(at + 2).fetch_add(1 << PATCHES_SHIFT, Ordering::Relaxed);
            Some(at)
        } else {
            self.release(at);
            None
        }
    }

    /// Makes `page` of `region` show `word`, whose reference goes to the page.
    pub(crate) fn publish(&self, region: &Region, page: u64, word: u64) -> Result<(), NoSlot> {
        let (cluster, index) = (page / LEAF_PAGES as u64, page as usize % LEAF_PAGES);
        let shard = self.cluster_shard(region.id, cluster);
        let guard = lock(&shard.lock);
        let old = match region.directory.get(cluster) {
            Some(leaf) => {
                let old = self.arena.leaf(leaf)[index].swap(word, Ordering::AcqRel);
                if old != 0 {
                    shard.version.fetch_add(1, Ordering::Release);
                }
                if word == 0 {
                    self.drop_leaf_if_empty(region, cluster, leaf, shard);
                }
                old
            }
            None if word == 0 => 0,
            None => {
                let leaf = self.arena.new_leaf(Purse::Reserve)?;
                self.arena.leaf(leaf)[index].store(word, Ordering::Release);
                // Publishes the leaf to a successor, with its first word in it.
                self.arena.leaf_key(leaf).store(leaf_key(region.id, cluster), Ordering::Release);
                if !region.directory.set(cluster, leaf) {
                    self.arena.leaf_key(leaf).store(0, Ordering::Release);
                    self.arena.leaf(leaf)[index].store(0, Ordering::Release);
                    self.arena.free_leaf(leaf);
                    return Err(NoSlot::Full);
                }
                0
            }
        };
        drop(guard);
        let change = i64::from(word != 0) - i64::from(old != 0);
        region.stored.fetch_add(change as u64, Ordering::Relaxed);
        self.counters.pages.fetch_add(change as u64, Ordering::Relaxed);
        self.release_word(old);
        Ok(())
    }

    /// Gives an empty leaf back; the cluster's lock is held.
    pub(super) fn drop_leaf_if_empty(&self, region: &Region, cluster: u64, leaf: u32, shard: &ClusterShard) {
        if self.arena.leaf(leaf).iter().all(|word| word.load(Ordering::Relaxed) == 0) {
            region.directory.remove(cluster);
            self.arena.leaf_key(leaf).store(0, Ordering::Release);
            shard.version.fetch_add(1, Ordering::Release);
            self.arena.free_leaf(leaf);
        }
    }

    /// Whether `leaf` is the leaf of that cluster; the cluster's lock is held. Its slab may be another's since it was
    /// found, with contents that look like a key and words: only the region itself knows.
    fn is_leaf_of(&self, leaf: u32, key: u64) -> bool {
        let (region, cluster) = layout::split_key(key);
        self.region(region).is_some_and(|region| region.directory.get(cluster) == Some(leaf))
    }

    /// Exchanges the word of a page if it is still `old`; the reference of `new` goes to the page, that of `old` to
    /// the caller.
    pub(crate) fn exchange(&self, leaf: u32, index: usize, key: u64, old: u64, new: u64) -> bool {
        let (region, cluster) = layout::split_key(key);
        let shard = self.cluster_shard(region, cluster);
        let _guard = lock(&shard.lock);
        let word = &self.arena.leaf(leaf)[index];
        if !self.is_leaf_of(leaf, key) || word.load(Ordering::Relaxed) != old {
            return false;
        }
        word.store(new, Ordering::Release);
        shard.version.fetch_add(1, Ordering::Release);
        true
    }

    /// The word of a page of leaf `leaf`, with a reference to its content.
    pub(crate) fn word_with_ref(&self, leaf: u32, index: usize, key: u64) -> Option<(u64, usize)> {
        let (region, cluster) = layout::split_key(key);
        let _guard = lock(&self.cluster_shard(region, cluster).lock);
        if !self.is_leaf_of(leaf, key) {
            return None;
        }
        let word = self.arena.leaf(leaf)[index].load(Ordering::Acquire);
        let Shown::Content(at) = Shown::from_word(word) else { return None };
        self.add_ref(at as usize);
        Some((word, at as usize))
    }
}
