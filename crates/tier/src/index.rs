//! From (region, page) to the leaf that holds the page's word.
//!
//! Keys are two kinds. A region whose length is known is *dense*: its pages
//! are neighbours, and a flat array of leaf numbers, allocated in pieces as
//! the region fills, wins by time and by bytes (half a byte per page). A
//! region of unknown extent is *sparse*: a flat array would be as large as
//! the address space, so its leaves are found through the B-tree of `llds`,
//! one for all of them, by (region, cluster). Both lead to the same leaves,
//! which lie in the arena and survive; what is here is derived from them by
//! whoever adopts the arena. `pagefold bench zswap` measures both, and peers.
//!
//! Readers take no lock that a store holds while it compresses or allocates.

use crate::layout::{LEAF_PAGES, RECORD_CLUSTER, leaf_key, split_key};
use llds::b_tree::{BTree, Scan};
use pagefold_os::sync::lock;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

/// Clusters per piece of a flat directory: 32 MiB of pages, 4 KiB of memory.
const PIECE: usize = 1024;
/// Largest region, in pages, that gets a flat directory: 256 GiB, whose array of pieces takes 128 KiB.
const FLAT_PAGES_MAX: u64 = 1 << 26;

/// Leaf 0 never exists: slab 0 is the superblock.
const NO_LEAF: u32 = 0;

/// The leaves of one region, by cluster.
pub(crate) enum Directory {
    Flat(Flat),
    Tree(Tree),
}

impl std::fmt::Debug for Directory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(if matches!(self, Directory::Flat(_)) { "Flat" } else { "Tree" })
    }
}

/// A flat array, allocated piece by piece.
pub(crate) struct Flat {
    pieces: Vec<OnceLock<Box<[AtomicU32]>>>,
}

/// A region's part of the tree.
pub(crate) struct Tree {
    leaves: Arc<BTree<u64>>,
    region: u32,
}

impl Tree {
    fn key(&self, cluster: u64) -> u64 {
        leaf_key(self.region, cluster)
    }
}

/// The tree of all sparse regions, made for the first of them.
#[derive(Default)]
pub(crate) struct Sparse(OnceLock<Option<Arc<BTree<u64>>>>);

impl std::fmt::Debug for Sparse {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Sparse: {} bytes", self.bytes())
    }
}

impl Sparse {
    /// The tree; `None` if there is no address space for it.
    fn tree(&self) -> Option<Arc<BTree<u64>>> {
        self.0.get_or_init(|| BTree::new().ok().map(Arc::new)).clone()
    }

    /// Bytes it takes.
    pub(crate) fn bytes(&self) -> u64 {
        self.0.get().and_then(Option::as_ref).map_or(0, |tree| tree.memory_bytes())
    }
}

/// Clusters of a range and their leaves, in order.
pub(crate) enum Clusters<'a> {
    Flat { flat: &'a Flat, next: usize, end: usize },
    Tree(Scan<'a, u64>),
    One(Option<(u64, u32)>),
}

impl Iterator for Clusters<'_> {
    type Item = (u64, u32);

    fn next(&mut self) -> Option<(u64, u32)> {
        match self {
            Clusters::Flat { flat, next, end } => {
                while *next < *end {
                    let cluster = *next;
                    let Some(piece) = flat.pieces[cluster / PIECE].get() else {
                        *next = (cluster / PIECE + 1) * PIECE;
                        continue;
                    };
                    *next += 1;
                    let leaf = piece[cluster % PIECE].load(Ordering::Acquire);
                    if leaf != NO_LEAF {
                        return Some((cluster as u64, leaf));
                    }
                }
                None
            }
            Clusters::One(one) => one.take(),
            Clusters::Tree(scan) => scan.next().map(|(key, leaf)| (split_key(key).1, leaf as u32)),
        }
    }
}

impl Directory {
    /// Chooses for a region of `pages` pages (`None`: unknown); nothing if the tree cannot be made.
    pub(crate) fn new(region: u32, pages: Option<u64>, sparse: &Sparse) -> Option<Directory> {
        Some(match pages.filter(|pages| *pages <= FLAT_PAGES_MAX) {
            Some(pages) => {
                let pieces = pages.div_ceil((LEAF_PAGES * PIECE) as u64) as usize;
                Directory::Flat(Flat { pieces: (0..pieces).map(|_| OnceLock::new()).collect() })
            }
            None => Directory::Tree(Tree { leaves: sparse.tree()?, region }),
        })
    }

    /// The leaf of `cluster`.
    pub(crate) fn get(&self, cluster: u64) -> Option<u32> {
        match self {
            Directory::Flat(flat) => {
                let piece = flat.pieces.get(cluster as usize / PIECE)?.get()?;
                Some(piece[cluster as usize % PIECE].load(Ordering::Acquire)).filter(|leaf| *leaf != NO_LEAF)
            }
            // What lies beyond would be another region's.
            Directory::Tree(_) if cluster >= RECORD_CLUSTER => None,
            Directory::Tree(tree) => tree.leaves.get(tree.key(cluster)).map(|leaf| leaf as u32),
        }
    }

    /// Enters the leaf of `cluster`; false if the cluster lies outside of the region, or there is no room.
    pub(crate) fn set(&self, cluster: u64, leaf: u32) -> bool {
        match self {
            Directory::Flat(flat) => {
                let Some(piece) = flat.pieces.get(cluster as usize / PIECE) else { return false };
                let piece = piece.get_or_init(|| (0..PIECE).map(|_| AtomicU32::new(NO_LEAF)).collect());
                piece[cluster as usize % PIECE].store(leaf, Ordering::Release);
                true
            }
            Directory::Tree(tree) => tree.leaves.insert_or_replace(tree.key(cluster), u64::from(leaf)).is_ok(),
        }
    }

    /// Takes the leaf of `cluster` out.
    pub(crate) fn remove(&self, cluster: u64) {
        match self {
            Directory::Flat(flat) => {
                if let Some(piece) = flat.pieces.get(cluster as usize / PIECE).and_then(OnceLock::get) {
                    piece[cluster as usize % PIECE].store(NO_LEAF, Ordering::Release);
                }
            }
            Directory::Tree(tree) => drop(tree.leaves.remove(tree.key(cluster))),
        }
    }

    /// The clusters in `from..to` that have a leaf; those that come or go meanwhile may be seen or not.
    pub(crate) fn range(&self, from: u64, to: u64) -> Clusters<'_> {
        if to == from.saturating_add(1) {
            // A fault's: no scan for that.
            return Clusters::One(self.get(from).map(|leaf| (from, leaf)));
        }
        match self {
            Directory::Flat(flat) => {
                let end = to.min((flat.pieces.len() * PIECE) as u64) as usize;
                Clusters::Flat { flat, next: from.min(end as u64) as usize, end }
            }
            Directory::Tree(tree) => {
                let to = to.min(RECORD_CLUSTER);
                Clusters::Tree(tree.leaves.scan(tree.key(from.min(to))..tree.key(to)))
            }
        }
    }

    /// Bytes it takes, without the tree that all share.
    fn bytes(&self) -> u64 {
        match self {
            Directory::Flat(flat) => {
                let pieces = flat.pieces.iter().filter(|piece| piece.get().is_some()).count();
                (flat.pieces.len() * size_of::<OnceLock<Box<[AtomicU32]>>>() + pieces * PIECE * 4) as u64
            }
            Directory::Tree(_) => 0,
        }
    }
}

/// A region: the pages of one mapping of one client.
#[derive(Debug)]
pub(crate) struct Region {
    pub(crate) id: u32,
    /// Pages in the region, if known.
    pub(crate) pages: Option<u64>,
    pub(crate) directory: Directory,
    /// Pages in the tier.
    pub(crate) stored: AtomicU64,
    /// Pages brought back, 64 per entry, by page / 64.
    touched: Mutex<BTreeMap<u64, Touched>>,
    /// Leaf that holds the region's record, if it has one.
    pub(crate) record: OnceLock<u32>,
}

/// A bit per page.
#[derive(Clone, Copy, Debug, Default)]
struct Touched {
    /// Brought back since [`Region::take_touched`].
    ever: u64,
    /// Brought back since the cleaner last came by: spared once.
    lately: u64,
}

impl Region {
    /// Makes an empty region; nothing if the sparse ones have no tree.
    pub(crate) fn new(id: u32, pages: Option<u64>, sparse: &Sparse) -> Option<Region> {
        Some(Region {
            id,
            pages,
            directory: Directory::new(id, pages, sparse)?,
            stored: AtomicU64::new(0),
            touched: Mutex::new(BTreeMap::new()),
            record: OnceLock::new(),
        })
    }

    /// Notes that the page came back.
    pub(crate) fn touch(&self, page: u64) {
        let mut touched = lock(&self.touched);
        let entry = touched.entry(page / 64).or_default();
        entry.ever |= 1 << (page % 64);
        entry.lately |= 1 << (page % 64);
    }

    /// True if the page came back since this was last asked.
    pub(crate) fn spare(&self, page: u64) -> bool {
        let mut touched = lock(&self.touched);
        let Some(entry) = touched.get_mut(&(page / 64)) else { return false };
        let lately = entry.lately & 1 << (page % 64) != 0;
        entry.lately &= !(1 << (page % 64));
        lately
    }

    /// The pages that came back, in order; forgets them.
    pub(crate) fn take_touched(&self) -> Vec<u64> {
        let touched = std::mem::take(&mut *lock(&self.touched));
        let pages = |(at, bits): (u64, Touched)| {
            (0..64).filter(move |bit| bits.ever & 1 << bit != 0).map(move |bit| at * 64 + bit)
        };
        touched.into_iter().flat_map(pages).collect()
    }

    /// Bytes that it takes outside of the arena.
    pub(crate) fn bytes(&self) -> u64 {
        self.directory.bytes() + lock(&self.touched).len() as u64 * 36
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn both_directories_are_ordered_maps(
            steps in proptest::collection::vec((0_u64..5000, any::<bool>()), 1..200),
            from in 0_u64..5000,
            to in 0_u64..5000,
        ) {
            let sparse = Sparse::default();
            // Other regions on both sides, which must not show.
            for region in [6, 8] {
                prop_assert!(Directory::new(region, None, &sparse).unwrap().set(3, 1));
            }
            for pages in [Some(40_000), None] {
                let directory = Directory::new(7, pages, &sparse).unwrap();
                let mut model = BTreeMap::new();
                for (index, (cluster, insert)) in steps.iter().enumerate() {
                    if *insert {
                        prop_assert!(directory.set(*cluster, index as u32 + 1));
                        model.insert(*cluster, index as u32 + 1);
                    } else {
                        directory.remove(*cluster);
                        model.remove(cluster);
                    }
                    prop_assert_eq!(directory.get(*cluster), model.get(cluster).copied());
                }
                let expected: Vec<_> = model.range(from..to.max(from)).map(|(cluster, leaf)| (*cluster, *leaf)).collect();
                prop_assert_eq!(directory.range(from, to).collect::<Vec<_>>(), expected);
                prop_assert_eq!(directory.range(0, u64::MAX).count(), model.len());
                for (cluster, _) in &steps {
                    let one = model.get(cluster).map(|leaf| (*cluster, *leaf));
                    prop_assert_eq!(directory.range(*cluster, cluster + 1).collect::<Vec<_>>(), Vec::from_iter(one));
                }
            }
        }
    }

    #[test]
    fn a_touched_page_is_spared_once_and_remembered_until_taken() {
        let region = Region::new(1, None, &Sparse::default()).unwrap();
        region.touch(130);
        region.touch(5);
        assert!(region.spare(130) && !region.spare(130) && !region.spare(131));
        assert_eq!(region.take_touched(), [5, 130]);
        assert_eq!(region.take_touched(), [0; 0]);
    }

    /// Whoever asks by addresses may have some of 57 bits.
    #[test]
    fn beyond_the_last_page_there_is_nobody_elses() {
        let sparse = Sparse::default();
        let [one, other] = [2, 3].map(|region| Directory::new(region, None, &sparse).unwrap());
        assert!(other.set(5, 1));
        let beyond = 5 | 1 << crate::layout::CLUSTER_BITS;
        assert_eq!(
            (one.get(beyond), one.range(beyond, beyond + 1).next(), one.range(beyond, beyond + 2).next()),
            (None, None, None)
        );
        assert_eq!((other.get(5), other.get(RECORD_CLUSTER)), (Some(1), None));
    }

    #[test]
    fn outside_of_a_flat_region_is_refused() {
        let directory = Directory::new(1, Some(8 * PIECE as u64), &Sparse::default()).unwrap();
        assert!(directory.set(PIECE as u64 - 1, 5));
        assert!(!directory.set(PIECE as u64, 5));
        assert_eq!(directory.get(PIECE as u64), None);
    }
}
