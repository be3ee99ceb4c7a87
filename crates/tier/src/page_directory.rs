//! From (client, page) to the leaf that holds the page's word.
//!
//! There are two kinds. A client with a known number of pages is *dense*: its
//! pages are neighbours, and a flat array of leaf numbers, allocated piece by
//! piece, is best in time and memory (half a byte per page). A client without
//! a known end is *sparse*: a flat array would be as large as the address
//! space, so its leaves are found by (client, cluster) in a B-tree of `llds`
//! that all sparse clients share. Both lead to the same leaves, which lie in
//! the arena and survive a crash. A successor rebuilds the directories from
//! them. `pagefold bench zswap` measures both, and peers.
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
/// Most pages of a client with a flat directory: 256 GiB. Its array of pieces takes 128 KiB.
const FLAT_PAGES_MAX: u64 = 1 << 26;

/// Leaf 0 never exists: slab 0 is the superblock.
const NO_LEAF: u32 = 0;

/// The leaves of one client, by cluster.
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

/// A sparse client's part of the tree.
pub(crate) struct Tree {
    leaves: Arc<BTree<u64>>,
    client: u32,
}

impl Tree {
    fn key(&self, cluster: u64) -> u64 {
        leaf_key(self.client, cluster)
    }
}

/// The tree of all sparse clients, created for the first of them.
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
    /// Makes the directory of a client with `pages` pages (`None`: unknown); `None` if the tree cannot be created.
    pub(crate) fn new(client: u32, pages: Option<u64>, sparse: &Sparse) -> Option<Directory> {
        Some(match pages.filter(|pages| *pages <= FLAT_PAGES_MAX) {
            Some(pages) => {
                let pieces = pages.div_ceil((LEAF_PAGES * PIECE) as u64) as usize;
                Directory::Flat(Flat { pieces: (0..pieces).map(|_| OnceLock::new()).collect() })
            }
            None => Directory::Tree(Tree { leaves: sparse.tree()?, client }),
        })
    }

    /// The leaf of `cluster`.
    pub(crate) fn get(&self, cluster: u64) -> Option<u32> {
        match self {
            Directory::Flat(flat) => {
                let piece = flat.pieces.get(cluster as usize / PIECE)?.get()?;
                Some(piece[cluster as usize % PIECE].load(Ordering::Acquire)).filter(|leaf| *leaf != NO_LEAF)
            }
            // A larger cluster number would be another client's key.
            Directory::Tree(_) if cluster >= RECORD_CLUSTER => None,
            Directory::Tree(tree) => tree.leaves.get(tree.key(cluster)).map(|leaf| leaf as u32),
        }
    }

    /// Enters the leaf of `cluster`; false if the cluster lies beyond the client's end, or memory is short.
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

    /// Removes the leaf of `cluster`.
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

    /// The clusters in `from..to` that have a leaf. Clusters that change meanwhile may be included or not.
    pub(crate) fn range(&self, from: u64, to: u64) -> Clusters<'_> {
        if to == from.saturating_add(1) {
            // A fault looks up one cluster, which needs no scan.
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

    /// Bytes it takes, without the shared tree.
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

/// The cold pages of one client.
#[derive(Debug)]
pub(crate) struct ClientPages {
    pub(crate) id: u32,
    /// How many pages the client has, if known.
    pub(crate) pages: Option<u64>,
    pub(crate) directory: Directory,
    /// Pages in the tier.
    pub(crate) stored: AtomicU64,
    /// Loaded pages, 64 per entry, by page / 64.
    touched: Mutex<BTreeMap<u64, Touched>>,
    /// Leaf that holds the client's record, if it has one.
    pub(crate) record: OnceLock<u32>,
}

/// A bit per page.
#[derive(Clone, Copy, Debug, Default)]
struct Touched {
    /// Loaded since [`ClientPages::take_touched`].
    ever: u64,
    /// Loaded since the cleaner's last walk, which spares the page once.
    lately: u64,
}

impl ClientPages {
    /// Makes a client without pages; `None` if the tree of sparse clients cannot be created.
    pub(crate) fn new(id: u32, pages: Option<u64>, sparse: &Sparse) -> Option<ClientPages> {
        Some(ClientPages {
            id,
            pages,
            directory: Directory::new(id, pages, sparse)?,
            stored: AtomicU64::new(0),
            touched: Mutex::new(BTreeMap::new()),
            record: OnceLock::new(),
        })
    }

    /// Notes that the page was loaded.
    pub(crate) fn touch(&self, page: u64) {
        let mut touched = lock(&self.touched);
        let entry = touched.entry(page / 64).or_default();
        entry.ever |= 1 << (page % 64);
        entry.lately |= 1 << (page % 64);
    }

    /// Returns true if the page was loaded since the last call.
    pub(crate) fn spare(&self, page: u64) -> bool {
        let mut touched = lock(&self.touched);
        let Some(entry) = touched.get_mut(&(page / 64)) else { return false };
        let lately = entry.lately & 1 << (page % 64) != 0;
        entry.lately &= !(1 << (page % 64));
        lately
    }

    /// Takes the list of loaded pages, in order.
    pub(crate) fn take_touched(&self) -> Vec<u64> {
        let touched = std::mem::take(&mut *lock(&self.touched));
        let pages = |(at, bits): (u64, Touched)| {
            (0..64).filter(move |bit| bits.ever & 1 << bit != 0).map(move |bit| at * 64 + bit)
        };
        touched.into_iter().flat_map(pages).collect()
    }

    /// Bytes it takes outside the arena.
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
            // Clients with neighbouring numbers: their leaves must not be found.
            for client in [6, 8] {
                prop_assert!(Directory::new(client, None, &sparse).unwrap().set(3, 1));
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
        let client = ClientPages::new(1, None, &Sparse::default()).unwrap();
        client.touch(130);
        client.touch(5);
        assert!(client.spare(130) && !client.spare(130) && !client.spare(131));
        assert_eq!(client.take_touched(), [5, 130]);
        assert_eq!(client.take_touched(), [0; 0]);
    }

    /// Page numbers derived from 57-bit addresses may be larger than a key can hold.
    #[test]
    fn a_page_beyond_the_last_one_is_not_another_clients() {
        let sparse = Sparse::default();
        let [one, other] = [2, 3].map(|client| Directory::new(client, None, &sparse).unwrap());
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
