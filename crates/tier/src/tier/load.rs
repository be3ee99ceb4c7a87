//! Pages out.

use super::{ATTEMPTS, Tier, Unreadable, Worker, with_worker};
use crate::codec::{self, Codec};
use crate::error::LoadError;
use crate::index::Region;
use crate::layout::{LEAF_PAGES, Shown};
use crate::stats::count;
use pagefold_os::Page;
use pagefold_os::sync::lock;
use std::ops::Range;
use std::sync::atomic::{Ordering, fence};
use std::time::Instant;

/// What an attempt to load came to.
enum Attempt {
    Done,
    Nothing,
    /// Something changed meanwhile.
    Disturbed,
    /// Needs a reference: the content is in the file.
    Slow,
    Damaged(&'static str),
}

/// What keeps a content while it is read in peace.
enum Kept {
    /// A reference of its own: others may change the page meanwhile.
    Referenced,
    /// The cluster's lock: no reference is returned that could free a content.
    Locked,
}

impl Tier {
    /// Brings a page back; the tier keeps its entry until [`Tier::discard`].
    ///
    /// # Errors
    /// The page is not here, is damaged, or cannot be read from the file; `data` then holds anything.
    pub fn load(&self, region: u32, page: u64, data: &mut Page) -> Result<(), LoadError> {
        let start = Instant::now();
        let found = self.region(region).ok_or(LoadError::NotStored { region, page })?;
        let result = with_worker(|worker| self.load_from(&found, page, data, worker, Kept::Referenced));
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
        region: &Region,
        page: u64,
        data: &mut Page,
        worker: &mut Worker,
        kept: Kept,
    ) -> Result<(), LoadError> {
        let id = region.id;
        for _ in 0..ATTEMPTS {
            match self.attempt(region, page, data, worker) {
                Attempt::Done => return Ok(()),
                Attempt::Nothing => return Err(LoadError::NotStored { region: id, page }),
                Attempt::Damaged(what) => return Err(LoadError::Damaged { region: id, page, what }),
                Attempt::Disturbed => count(&self.counters.loads_retried),
                Attempt::Slow => break,
            }
        }
        // In peace.
        let cluster = page / LEAF_PAGES as u64;
        let guard = lock(&self.cluster_shard(id, cluster).lock);
        let word = match region.directory.get(cluster) {
            Some(leaf) => self.arena.leaf(leaf)[page as usize % LEAF_PAGES].load(Ordering::Acquire),
            None => 0,
        };
        match Shown::from_word(word) {
            Shown::Nothing => Err(LoadError::NotStored { region: id, page }),
            Shown::Lost => Err(LoadError::Damaged { region: id, page, what: "lost before the tier was adopted" }),
            Shown::Fill(pattern) => {
                codec::fill(u64::from(pattern) << 32 | u64::from(pattern), data);
                Ok(())
            }
            Shown::Content(at) => {
                let result = match kept {
                    Kept::Referenced => {
                        self.add_ref(at as usize);
                        drop(guard);
                        let result = self.read_content(at as usize, worker, data);
                        self.release(at as usize);
                        result
                    }
                    Kept::Locked => self.read_content(at as usize, worker, data),
                };
                result.map_err(|error| match error {
                    Unreadable::Damaged(what) => LoadError::Damaged { region: id, page, what },
                    Unreadable::Io(source) => LoadError::ReadBack { region: id, page, source },
                })
            }
        }
    }

    /// Loads for a signal handler: as [`Tier::load`], but it allocates and frees nothing, keeps no record of the touch,
    /// and the cluster's lock stands for the reference, whose return could free a content. Nobody holds that lock and
    /// waits for a page of a region; who holds it in this thread has signals blocked (see `region`).
    pub(crate) fn load_in_fault(
        &self,
        region: &Region,
        page: u64,
        data: &mut Page,
        worker: &mut Worker,
    ) -> Result<(), LoadError> {
        let result = self.load_from(region, page, data, worker, Kept::Locked);
        match &result {
            Ok(()) => count(&self.counters.loads),
            Err(LoadError::NotStored { .. }) => {}
            Err(_) => count(&self.counters.loads_failed),
        }
        result
    }

    /// Loads without a lock; see the head of this file.
    fn attempt(&self, region: &Region, page: u64, data: &mut Page, worker: &mut Worker) -> Attempt {
        let (cluster, index) = (page / LEAF_PAGES as u64, page as usize % LEAF_PAGES);
        let version = &self.cluster_shard(region.id, cluster).version;
        let before = version.load(Ordering::Acquire);
        let unchanged = || {
            // Pairs with the release fence in `write_content` and the release stores in `publish`.
            fence(Ordering::Acquire);
            version.load(Ordering::Relaxed) == before
        };
        let word = match region.directory.get(cluster) {
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
            return if unchanged() { Attempt::Slow } else { Attempt::Disturbed };
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
        match self.prove(coder, codec, bytes, meta, base, fingerprint, data) {
            Ok(()) => Attempt::Done,
            Err(what) => Attempt::Damaged(what),
        }
    }

    /// Brings a page back with the neighbours that are here too, in one unbroken run within the `cluster.len()`
    /// aligned pages around it.
    ///
    /// Page `p` of the run lands in `cluster[p % cluster.len()]`. A neighbour that cannot be read ends the run.
    ///
    /// # Errors
    /// As [`Tier::load`], for `page` itself.
    pub fn load_cluster(&self, region: u32, page: u64, cluster: &mut [Page]) -> Result<Range<u64>, LoadError> {
        let window = (cluster.len() as u64).max(1);
        let first = page / window * window;
        let Some(slot) = cluster.get_mut((page - first) as usize) else { return Ok(page..page) };
        self.load(region, page, slot)?;
        let Some(found) = self.region(region) else { return Ok(page..page + 1) };
        let mut bring = |page: u64| {
            let slot = &mut cluster[(page - first) as usize];
            with_worker(|worker| self.load_from(&found, page, slot, worker, Kept::Referenced)).is_ok()
        };
        let end = (page + 1..first + window).find(|page| !bring(*page)).unwrap_or(first + window);
        let start = (first..page).rev().find(|page| !bring(*page)).map_or(first, |page| page + 1);
        self.counters.loads.fetch_add(end - start - 1, Ordering::Relaxed);
        Ok(start..end)
    }

    /// Brings a neighbour back: it does not count as touched, nor in the histogram. False if it cannot be read.
    pub fn load_quietly(&self, region: u32, page: u64, data: &mut Page) -> bool {
        let Some(found) = self.region(region) else { return false };
        let loaded = with_worker(|worker| self.load_from(&found, page, data, worker, Kept::Referenced)).is_ok();
        if loaded {
            count(&self.counters.loads);
        }
        loaded
    }

    /// Stored pages of a region from `from` on, in order, at most `count_max`.
    pub fn neighbours(&self, region: u32, from: u64, count_max: usize) -> Vec<u64> {
        let Some(region) = self.region(region) else { return Vec::new() };
        let leaf_pages = LEAF_PAGES as u64;
        let stored = |(cluster, leaf): (u64, u32)| {
            let words = self.arena.leaf(leaf).iter().zip(cluster * leaf_pages..);
            words.filter(|(word, _)| word.load(Ordering::Relaxed) != 0).map(|(_, page)| page)
        };
        let clusters = region.directory.range(from / leaf_pages, u64::MAX);
        clusters.flat_map(stored).filter(|page| *page >= from).take(count_max).collect()
    }

    /// True if the tier holds the page.
    pub fn contains(&self, region: u32, page: u64) -> bool {
        self.region(region)
            .and_then(|region| region.directory.get(page / LEAF_PAGES as u64))
            .is_some_and(|leaf| self.arena.leaf(leaf)[page as usize % LEAF_PAGES].load(Ordering::Relaxed) != 0)
    }
}
