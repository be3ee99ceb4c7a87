//! Loading pages.

use super::{ATTEMPTS, Tier, Unreadable, Worker, with_worker};
use crate::codec::{self, Codec};
use crate::error::LoadError;
use crate::layout::{LEAF_PAGES, Shown};
use crate::page_directory::ClientPages;
use crate::stats::count;
use pagefold_os::Page;
use pagefold_os::sync::lock;
use std::ops::Range;
use std::sync::atomic::{Ordering, fence};
use std::time::Instant;

/// The result of an attempt to load.
enum Attempt {
    Done,
    Nothing,
    /// The page was changed meanwhile.
    Disturbed,
    /// The content is in the file, so a reference is needed.
    OnDisk,
    Damaged(&'static str),
}

/// What keeps a content from being freed while it is read after the attempts failed.
enum Protection {
    /// A reference: other threads may change the page meanwhile.
    Reference,
    /// The cluster's lock: no reference is dropped, so no content is freed by this thread.
    ClusterLock,
}

impl Tier {
    /// Loads a page; the tier keeps its entry until [`Tier::discard`].
    ///
    /// # Errors
    /// The tier does not hold the page, it is damaged, or it cannot be read from the file. `data` is undefined then.
    pub fn load(&self, client: u32, page: u64, data: &mut Page) -> Result<(), LoadError> {
        let start = Instant::now();
        let found = self.client(client).ok_or(LoadError::NotStored { client, page })?;
        let result = with_worker(|worker| self.load_from(&found, page, data, worker, Protection::Reference));
        match &result {
            Ok(()) => {
                found.touch(page);
                self.counters.loaded(start.elapsed().as_nanos() as u64);
            }
            Err(LoadError::NotStored { .. }) => {}
            Err(_) => count(&self.counters.loads_failed),
        }
        result
    }

    fn load_from(
        &self,
        client: &ClientPages,
        page: u64,
        data: &mut Page,
        worker: &mut Worker,
        protection: Protection,
    ) -> Result<(), LoadError> {
        let id = client.id;
        for _ in 0..ATTEMPTS {
            match self.attempt(client, page, data, worker) {
                Attempt::Done => return Ok(()),
                Attempt::Nothing => return Err(LoadError::NotStored { client: id, page }),
                Attempt::Damaged(what) => return Err(LoadError::Damaged { client: id, page, what }),
                Attempt::Disturbed => count(&self.counters.loads_retried),
                Attempt::OnDisk => break,
            }
        }
        // Under the lock, which keeps the page word.
        let cluster = page / LEAF_PAGES as u64;
        let guard = lock(&self.cluster_shard(id, cluster).lock);
        let word = match client.directory.get(cluster) {
            Some(leaf) => self.arena.leaf(leaf)[page as usize % LEAF_PAGES].load(Ordering::Acquire),
            None => 0,
        };
        match Shown::from_word(word) {
            Shown::Nothing => Err(LoadError::NotStored { client: id, page }),
            Shown::Lost => Err(LoadError::Damaged { client: id, page, what: "lost before the tier was adopted" }),
            Shown::Fill(pattern) => {
                codec::fill(u64::from(pattern) << 32 | u64::from(pattern), data);
                Ok(())
            }
            Shown::Content(at) => {
                let result = match protection {
                    Protection::Reference => {
                        self.add_ref(at as usize);
                        drop(guard);
                        let result = self.read_content(at as usize, worker, data);
                        self.release(at as usize);
                        result
                    }
                    Protection::ClusterLock => self.read_content(at as usize, worker, data),
                };
                result.map_err(|error| match error {
                    Unreadable::Damaged(what) => LoadError::Damaged { client: id, page, what },
                    Unreadable::Io(source) => LoadError::ReadBack { client: id, page, source },
                })
            }
        }
    }

    /// Loads in a signal handler: as [`Tier::load`], but it allocates and frees nothing and does not record the load. The
    /// cluster's lock replaces the reference, because dropping a reference could free a content. No thread waits for a
    /// page of a region while it holds that lock, and this thread cannot hold it already: code that does has signals
    /// blocked (see [`crate::region`]).
    pub(crate) fn load_in_fault(
        &self,
        client: &ClientPages,
        page: u64,
        data: &mut Page,
        worker: &mut Worker,
    ) -> Result<(), LoadError> {
        let result = self.load_from(client, page, data, worker, Protection::ClusterLock);
        match &result {
            Ok(()) => count(&self.counters.loads),
            Err(LoadError::NotStored { .. }) => {}
            Err(_) => count(&self.counters.loads_failed),
        }
        result
    }

    /// Loads without a lock: see the head of `tier.rs`.
    fn attempt(&self, client: &ClientPages, page: u64, data: &mut Page, worker: &mut Worker) -> Attempt {
        let (cluster, index) = (page / LEAF_PAGES as u64, page as usize % LEAF_PAGES);
        let version = &self.cluster_shard(client.id, cluster).version;
        let before = version.load(Ordering::Acquire);
        let unchanged = || {
            // Pairs with the release fence in `write_content` and the release stores in `publish`.
            fence(Ordering::Acquire);
            version.load(Ordering::Relaxed) == before
        };
        let word = match client.directory.get(cluster) {
            Some(leaf) => self.arena.leaf(leaf)[index].load(Ordering::Acquire),
            None => 0,
        };
        let at = match Shown::from_word(word) {
            Shown::Nothing if unchanged() => return Attempt::Nothing,
            Shown::Lost if unchanged() => return Attempt::Damaged("lost before the tier was adopted"),
            Shown::Fill(pattern) if unchanged() => {
                codec::fill(u64::from(pattern) << 32 | u64::from(pattern), data);
                return Attempt::Done;
            }
            Shown::Content(at) => at as usize,
            _ => return Attempt::Disturbed,
        };
        let Worker { coder, payload, base_payload, base, .. } = worker;
        let damaged = |what| if unchanged() { Attempt::Damaged(what) } else { Attempt::Disturbed };
        let Some((fingerprint, meta, bytes)) = self.copy_out(at, payload) else { return damaged("length") };
        if meta.is_on_disk() {
            return if unchanged() { Attempt::OnDisk } else { Attempt::Disturbed };
        }
        let Some(codec) = Codec::from_number(meta.codec) else { return damaged("codec") };
        let base = match codec {
            Codec::Patch => match self.read_base(bytes, coder, base_payload, base) {
                Ok(base) => Some(base),
                Err(what) => return damaged(what),
            },
            _ => None,
        };
        if !unchanged() {
            return Attempt::Disturbed;
        }
        match self.decode_verified(coder, bytes, meta, base, fingerprint, data) {
            Ok(()) => Attempt::Done,
            Err(what) => Attempt::Damaged(what),
        }
    }

    /// Loads a page and its stored neighbours, in one unbroken run within the aligned group of `cluster.len()` pages.
    ///
    /// Page `p` of the run is loaded into `cluster[p % cluster.len()]`. A neighbour that cannot be loaded ends the run.
    ///
    /// # Errors
    /// As [`Tier::load`], for `page` itself.
    pub fn load_cluster(&self, client: u32, page: u64, cluster: &mut [Page]) -> Result<Range<u64>, LoadError> {
        let window = (cluster.len() as u64).max(1);
        let first = page / window * window;
        let Some(slot) = cluster.get_mut((page - first) as usize) else { return Ok(page..page) };
        self.load(client, page, slot)?;
        let Some(found) = self.client(client) else { return Ok(page..page + 1) };
        let mut load_one = |page: u64| {
            let slot = &mut cluster[(page - first) as usize];
            with_worker(|worker| self.load_from(&found, page, slot, worker, Protection::Reference)).is_ok()
        };
        let end = (page + 1..first + window).find(|page| !load_one(*page)).unwrap_or(first + window);
        let start = (first..page).rev().find(|page| !load_one(*page)).map_or(first, |page| page + 1);
        self.counters.loads.fetch_add(end - start - 1, Ordering::Relaxed);
        Ok(start..end)
    }

    /// Loads a neighbour of a faulting page: it does not count as touched, nor in the histogram. False if that fails.
    pub fn load_quietly(&self, client: u32, page: u64, data: &mut Page) -> bool {
        let Some(found) = self.client(client) else { return false };
        let loaded = with_worker(|worker| self.load_from(&found, page, data, worker, Protection::Reference)).is_ok();
        if loaded {
            count(&self.counters.loads);
        }
        loaded
    }

    /// Stored pages of a client from `from` on, in order, at most `count_max`.
    pub fn neighbours(&self, client: u32, from: u64, count_max: usize) -> Vec<u64> {
        let Some(client) = self.client(client) else { return Vec::new() };
        let leaf_pages = LEAF_PAGES as u64;
        let stored = |(cluster, leaf): (u64, u32)| {
            let words = self.arena.leaf(leaf).iter().zip(cluster * leaf_pages..);
            words.filter(|(word, _)| word.load(Ordering::Relaxed) != 0).map(|(_, page)| page)
        };
        let clusters = client.directory.range(from / leaf_pages, u64::MAX);
        clusters.flat_map(stored).filter(|page| *page >= from).take(count_max).collect()
    }

    /// Returns true if the tier holds the page.
    pub fn contains(&self, client: u32, page: u64) -> bool {
        self.client(client)
            .and_then(|client| client.directory.get(page / LEAF_PAGES as u64))
            .is_some_and(|leaf| self.arena.leaf(leaf)[page as usize % LEAF_PAGES].load(Ordering::Relaxed) != 0)
    }
}
