//! Storing pages.

use super::{ClusterShard, SAMPLES, Stored, Tier, Worker, with_lent_worker, with_worker};
use crate::arena::{NoSlot, ReserveClass};
use crate::codec::{self, Codec, PATCH_HEAD, RAW_ABOVE_BYTES};
use crate::config::Effort;
use crate::error::StoreError;
use crate::layout::{self, LEAF_PAGES, Meta, PATCHES_SHIFT, Shown, TRIED, leaf_key};
use crate::page_directory::ClientPages;
use crate::stats::count;
use pagefold_os::Page;
use pagefold_os::sched::{self, Cpus};
use pagefold_os::sync::lock;
use std::sync::atomic::Ordering;

/// Which processors each of some threads uses, the caller among them. Without it the kernel may run threads that live for
/// a few milliseconds on the processor of the thread that started them, one after the other.
#[derive(Clone, Copy)]
struct CpuAssignment {
    cpus: Cpus,
    own: usize,
    count: usize,
}

impl CpuAssignment {
    fn of(count: usize) -> CpuAssignment {
        let cpus = Cpus::of_thread().unwrap_or(Cpus::NONE);
        let here = sched::cpu();
        let own = cpus.iter().position(|cpu| Some(cpu) == here).unwrap_or(0);
        CpuAssignment { cpus, own, count }
    }

    /// Binds the calling thread, which is the `number`-th after the caller. Does nothing if there are too few processors.
    fn bind(&self, number: usize) {
        let share = self.cpus.share((self.own + number) % self.count, self.count);
        if share != Cpus::NONE {
            // An unbound thread is slower, nothing else.
            let _ = share.bind_thread();
        }
    }
}

impl Tier {
    /// Stores a copy of a page, which replaces an earlier one.
    ///
    /// # Errors
    /// The tier is full, the kernel refuses memory, or client or page is out of range. An earlier copy stays.
    pub fn store(&self, client: u32, page: u64, data: &Page, effort: Effort) -> Result<Stored, StoreError> {
        let client = self.client_or_new(client, page, None)?;
        let mut reclaimed = 0;
        loop {
            let result = self.word_for(data, effort).and_then(|(word, stored)| {
                self.publish(&client, page, word).map(|()| stored).inspect_err(|_| self.release_word(word))
            });
            match result {
                Ok(stored) => {
                    count(&self.counters.stores);
                    if stored == Stored::Shared {
                        count(&self.counters.stores_shared);
                    }
                    return Ok(stored);
                }
                Err(NoSlot::Full) if reclaimed < 2 && self.reclaim() => reclaimed += 1,
                Err(error) => return Err(self.refuse(error)),
            }
        }
    }

    /// Stores copies of many pages of a client, with several threads. The results are in the order of the pages.
    ///
    /// A dense batch of 256 pages or more trains the domain's dictionary first, if there is none.
    pub fn store_many(&self, client: u32, pages: &[(u64, &Page)], effort: Effort) -> Vec<Result<Stored, StoreError>> {
        if effort == Effort::Dense && self.dictionary.load(Ordering::Acquire) == 0 && pages.len() >= 256 {
            let step = pages.len().div_ceil(SAMPLES);
            let usable = pages.iter().step_by(step).filter(|(_, page)| codec::same_filled(page).is_none());
            self.train_on(&usable.flat_map(|(_, page)| page.iter().copied()).collect::<Vec<u8>>());
        }
        let store = |pages: &[(u64, &Page)]| -> Vec<Result<Stored, StoreError>> {
            pages.iter().map(|(page, data)| self.store(client, *page, data, effort)).collect()
        };
        let workers = self.config.workers.min(pages.len() / 64).max(1);
        if workers == 1 {
            return store(pages);
        }
        let part = pages.len().div_ceil(workers).next_multiple_of(LEAF_PAGES);
        let (own, rest) = pages.split_at(part.min(pages.len()));
        let cpus = CpuAssignment::of(workers);
        std::thread::scope(|scope| {
            let spawn = |(number, part)| {
                let work = move || {
                    cpus.bind(number + 1);
                    with_lent_worker(&self.idle_workers, || store(part))
                };
                (part, std::thread::Builder::new().spawn_scoped(scope, work))
            };
            let handles: Vec<_> = rest.chunks(part).enumerate().map(spawn).collect();
            // A new thread that waits for this processor can now run and bind itself to its own.
            std::thread::yield_now();
            let mut stored = store(own);
            for (part, handle) in handles {
                stored.extend(match handle {
                    Ok(handle) => handle.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
                    // The thread could not be started.
                    Err(_) => store(part),
                });
            }
            stored
        })
    }

    /// The page word for `data`, with a reference if it names a content.
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
            with_worker(|worker| self.new_content(fingerprint, data, effort, None, worker, ReserveClass::Normal))?;
        self.contents.shard(fingerprint, self.arena.words()).insert(at);
        if effort == Effort::Dense {
            self.sample(data);
        }
        Ok((Shown::Content(at as u64).word(), Stored::New { codec, bytes }))
    }

    /// Finds a content with equal bytes, which are compared, and takes a reference to it.
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

    /// Compresses `data` and writes it as a content with one reference. Does not enter it into the index.
    ///
    /// `predecessor` is the content that this one replaces: it must not become its base.
    pub(crate) fn new_content(
        &self,
        fingerprint: u64,
        data: &Page,
        effort: Effort,
        predecessor: Option<usize>,
        worker: &mut Worker,
        reserve_class: ReserveClass,
    ) -> Result<(usize, Codec, usize), NoSlot> {
        let mut encoded = std::mem::take(&mut worker.encoded);
        encoded.clear();
        let mut dictionary = 0;
        let mut base = None;
        let codec = if let Some(word) = codec::same_filled(data) {
            encoded.extend_from_slice(&word.to_le_bytes());
            Codec::Fill
        } else {
            let own = match effort {
                Effort::Fast | Effort::Ready => {
                    worker.coder.lz4(data, RAW_ABOVE_BYTES).map(|bytes| (Codec::Lz4, bytes))
                }
                Effort::Dense => {
                    let (number, trained) = self.current_dictionary();
                    dictionary = number;
                    worker.coder.zstd(data, trained, RAW_ABOVE_BYTES).map(|bytes| (Codec::Zstd, bytes))
                }
            };
            let mut codec = match own {
                Some((codec, bytes)) => {
                    encoded.extend_from_slice(bytes);
                    codec
                }
                None => {
                    dictionary = 0;
                    encoded.extend_from_slice(data);
                    Codec::Raw
                }
            };
            if effort == Effort::Dense {
                base = self.patch(data, predecessor, worker, &mut encoded);
                if base.is_some() {
                    codec = Codec::Patch;
                    dictionary = 0;
                }
            }
            codec
        };
        let meta = Meta { len: encoded.len() as u16, codec: codec as u8, dictionary };
        let written = self.write_content(fingerprint, meta, &encoded, reserve_class);
        let bytes = encoded.len();
        worker.encoded = encoded;
        match written {
            Ok(at) => {
                if effort == Effort::Ready && codec == Codec::Lz4 {
                    self.arena.word(at + 1).fetch_or(TRIED, Ordering::Relaxed);
                }
                // Only these codecs may be the base of a patch.
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

    /// Tries to express `data` as a patch that takes less than three quarters of `encoded`.
    ///
    /// If it can, replaces `encoded` and returns the base, with a reference and its patch count raised.
    pub(super) fn patch(
        &self,
        data: &Page,
        predecessor: Option<usize>,
        worker: &mut Worker,
        encoded: &mut Vec<u8>,
    ) -> Option<usize> {
        let len_max = (encoded.len() * 3 / 4).checked_sub(PATCH_HEAD + 16)?;
        let mut near = self.contents.near(&self.hasher, data).filter(|at| Some(*at) != predecessor).peekable();
        near.peek()?;
        if !self.contents.patch_benefit.is_worth_trying() {
            return None;
        }
        let at = near.find(|at| self.try_ref(*at))?;
        let count = self.arena.word(at + 2).load(Ordering::Relaxed) >> PATCHES_SHIFT;
        // Not LZ4: a base is not recompressed as long as patches use it.
        let fits = [Codec::Zstd as u8, Codec::Raw as u8].contains(&self.meta(at).codec);
        let usable = fits && count < 0xffff - 1024;
        let mut page = worker.take_page();
        let patched = usable && self.read_content(at, worker, &mut page).is_ok() && {
            let patch = worker.coder.patch(data, &page, len_max);
            self.contents
                .patch_benefit
                .note(patch.map_or(0, |patch| encoded.len().saturating_sub(patch.len() + PATCH_HEAD)));
            if let Some(patch) = patch {
                encoded.clear();
                encoded.extend_from_slice(&(at as u64).to_le_bytes());
                encoded.extend_from_slice(patch);
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

    /// Sets the page word of `page` of `client`. The reference of `word` passes to the page.
    pub(crate) fn publish(&self, client: &ClientPages, page: u64, word: u64) -> Result<(), NoSlot> {
        let (cluster, index) = (page / LEAF_PAGES as u64, page as usize % LEAF_PAGES);
        let shard = self.cluster_shard(client.id, cluster);
        let guard = lock(&shard.lock);
        let old = match client.directory.get(cluster) {
            Some(leaf) => {
                let old = self.arena.leaf(leaf)[index].swap(word, Ordering::AcqRel);
                if old != 0 {
                    shard.version.fetch_add(1, Ordering::Release);
                }
                if word == 0 {
                    self.drop_leaf_if_empty(client, cluster, leaf, shard);
                }
                old
            }
            None if word == 0 => 0,
            None => {
                let leaf = self.arena.new_leaf(ReserveClass::Reserve)?;
                self.arena.leaf(leaf)[index].store(word, Ordering::Release);
                // Publishes the leaf, with its first word, to a successor.
                self.arena.leaf_key(leaf).store(leaf_key(client.id, cluster), Ordering::Release);
                if !client.directory.set(cluster, leaf) {
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
        client.stored.fetch_add(change as u64, Ordering::Relaxed);
        self.counters.pages.fetch_add(change as u64, Ordering::Relaxed);
        self.release_word(old);
        Ok(())
    }

    /// Frees the leaf if it is empty; the cluster's lock is held.
    pub(super) fn drop_leaf_if_empty(&self, client: &ClientPages, cluster: u64, leaf: u32, shard: &ClusterShard) {
        if self.arena.leaf(leaf).iter().all(|word| word.load(Ordering::Relaxed) == 0) {
            client.directory.remove(cluster);
            self.arena.leaf_key(leaf).store(0, Ordering::Release);
            shard.version.fetch_add(1, Ordering::Release);
            self.arena.free_leaf(leaf);
        }
    }

    /// Returns true if `leaf` is the leaf of that cluster; the cluster's lock is held. The leaf's slab may have been reused
    /// since the leaf was found, for contents that look like a key and words. Only the client's directory decides.
    fn is_leaf_of(&self, leaf: u32, key: u64) -> bool {
        let (client, cluster) = layout::split_key(key);
        self.client(client).is_some_and(|client| client.directory.get(cluster) == Some(leaf))
    }

    /// Exchanges the word of a page if it is still `old`. The reference of `new` passes to the page, that of `old` to the
    /// caller.
    pub(crate) fn exchange(&self, leaf: u32, index: usize, key: u64, old: u64, new: u64) -> bool {
        let (client, cluster) = layout::split_key(key);
        let shard = self.cluster_shard(client, cluster);
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
        let (client, cluster) = layout::split_key(key);
        let _guard = lock(&self.cluster_shard(client, cluster).lock);
        if !self.is_leaf_of(leaf, key) {
            return None;
        }
        let word = self.arena.leaf(leaf)[index].load(Ordering::Acquire);
        let Shown::Content(at) = Shown::from_word(word) else { return None };
        self.add_ref(at as usize);
        Some((word, at as usize))
    }
}
