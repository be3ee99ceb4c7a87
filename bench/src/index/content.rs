//! Raw pages as keys: the tree over content against trees over fingerprints.
//!
//! The content-keyed row is PageONE's idea in its plain form: a lock-free trie over the page's bits in
//! which a search looks at each bit of the key once, in the branches or in one comparison with a page
//! of the tree; an insert is one compare-and-swap on a link. Its inner nodes are only ever added.

use super::maps::FastBuild;
use super::median_and_spread;
use super::run::{Random, key};
use llds::sd_tree::SdTree;
use llds::sd_tree::key::{Exact, Resolve, fingerprint_bytes};
use std::collections::{BTreeMap, HashMap};
use std::process::ExitCode;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, RwLock};
use std::time::Instant;

type Page = [u8; 4096];

/// Makes an index over pages, with its name.
type Maker = (&'static str, fn(&Pages) -> Box<dyn Content + '_>);

/// The pages that are keys; a value is a page's index.
struct Pages {
    bytes: Vec<u8>,
    count: usize,
}

impl Pages {
    /// Distinct pages: `zeros` zero bytes, then random ones; or, with `late`, equal but for the last eight bytes.
    fn new(count: usize, zeros: usize, late: bool) -> Self {
        let mut bytes = vec![0u8; count * 4096];
        let mut random = Random::new(count as u64);
        for (index, page) in bytes.chunks_exact_mut(4096).enumerate() {
            // Around the wanted number of zeros, as in the published test.
            let head = if late { 4088 } else { random.below(2 * zeros as u64 + 1) as usize };
            for chunk in page[head..].chunks_mut(8) {
                chunk.copy_from_slice(&random.next().to_le_bytes()[..chunk.len()]);
            }
            page[4088..].copy_from_slice(&key(index as u64).to_be_bytes());
        }
        Self { bytes, count }
    }

    fn page(&self, index: usize) -> &Page {
        self.bytes[index * 4096..][..4096].try_into().expect("4096 bytes")
    }
}

impl Resolve for Pages {
    fn with_key<T>(&self, value: u64, read: impl FnOnce(&[u8]) -> T) -> T {
        read(self.page(value as usize))
    }
}

/// Finds the index of an equal page, or stores this one.
trait Content: Sync {
    fn find(&self, page: &Page) -> Option<u64>;
    fn insert(&self, page: &Page, value: u64);
}

impl Content for Exact<&Pages> {
    fn find(&self, page: &Page) -> Option<u64> {
        self.get(page)
    }

    fn insert(&self, page: &Page, value: u64) {
        self.get_or_insert(page, value).expect("fingerprints are well spread");
    }
}

/// The SD tree as the engine uses it: the fingerprint alone, proof elsewhere.
struct Fingerprints(SdTree);

impl Content for Fingerprints {
    fn find(&self, page: &Page) -> Option<u64> {
        self.0.get(fingerprint_bytes(page, 7))
    }

    fn insert(&self, page: &Page, value: u64) {
        self.0.get_or_insert(fingerprint_bytes(page, 7), value).expect("fingerprints are well spread");
    }
}

struct Sharded<'a>(Vec<Mutex<HashMap<u64, u64, FastBuild>>>, &'a Pages);

impl Content for Sharded<'_> {
    fn find(&self, page: &Page) -> Option<u64> {
        let fingerprint = fingerprint_bytes(page, 7);
        let found = self.0[(fingerprint >> 56) as usize].lock().expect("no panics").get(&fingerprint).copied();
        found.filter(|&value| self.1.page(value as usize) == page)
    }

    fn insert(&self, page: &Page, value: u64) {
        let fingerprint = fingerprint_bytes(page, 7);
        self.0[(fingerprint >> 56) as usize].lock().expect("no panics").insert(fingerprint, value);
    }
}

/// As the kernel's KSM orders its stable tree: by the pages' content, one comparison per level.
struct Ordered<'a>(RwLock<BTreeMap<&'a Page, u64>>, &'a Pages);

impl Content for Ordered<'_> {
    fn find(&self, page: &Page) -> Option<u64> {
        self.0.read().expect("no panics").get(page).copied()
    }

    fn insert(&self, _page: &Page, value: u64) {
        self.0.write().expect("no panics").insert(self.1.page(value as usize), value);
    }
}

/// The trie over content. A link is 0, a page (`index << 1 | 1`), or a node (`index << 1`).
struct Trie<'a> {
    nodes: Vec<Branch>,
    used: AtomicU64,
    root: AtomicU64,
    pages: &'a Pages,
}

/// Keys whose bit at `position` is 0 are behind `below[0]`, the others behind `below[1]`.
#[derive(Default)]
struct Branch {
    position: AtomicU32,
    below: [AtomicU64; 2],
}

impl<'a> Trie<'a> {
    fn new(pages: &'a Pages) -> Self {
        // Node 0 stays unused: its link would be the empty one. Losers of a race leave a node unused.
        let nodes = (0..2 * pages.count + 1024).map(|_| Branch::default()).collect();
        Self { nodes, used: AtomicU64::new(1), root: AtomicU64::new(0), pages }
    }

    fn bit(page: &Page, position: u32) -> usize {
        usize::from(page[position as usize / 8] >> (7 - position % 8) & 1)
    }

    /// The page that the key's bits lead to: it is the key if the key is there.
    fn representative(&self, page: &Page) -> Option<u64> {
        let mut link = self.root.load(Ordering::Acquire);
        loop {
            match link {
                0 => return None,
                leaf if leaf & 1 == 1 => return Some(leaf >> 1),
                node => {
                    let node = &self.nodes[node as usize >> 1];
                    link = node.below[Self::bit(page, node.position.load(Ordering::Relaxed))].load(Ordering::Acquire);
                }
            }
        }
    }

    /// The first bit in which two pages differ.
    fn first_difference(a: &Page, b: &Page) -> Option<u32> {
        let word = |page: &Page, at: usize| u64::from_be_bytes(page[at * 8..at * 8 + 8].try_into().expect("8 bytes"));
        (0..512).find_map(|at| {
            let difference = word(a, at) ^ word(b, at);
            (difference != 0).then(|| at as u32 * 64 + difference.leading_zeros())
        })
    }
}

impl Content for Trie<'_> {
    fn find(&self, page: &Page) -> Option<u64> {
        self.representative(page).filter(|&found| self.pages.page(found as usize) == page)
    }

    fn insert(&self, page: &Page, value: u64) {
        loop {
            let Some(near) = self.representative(page) else {
                if self.root.compare_exchange(0, value << 1 | 1, Ordering::AcqRel, Ordering::Acquire).is_ok() {
                    return;
                }
                continue;
            };
            let Some(position) = Self::first_difference(page, self.pages.page(near as usize)) else { return };
            // The link that the new branch goes into: above the first branch that is further down the key.
            let mut edge = &self.root;
            let mut link = edge.load(Ordering::Acquire);
            while link & 1 == 0 {
                let node = &self.nodes[link as usize >> 1];
                let at = node.position.load(Ordering::Relaxed);
                if at > position {
                    break;
                }
                edge = &node.below[Self::bit(page, at)];
                link = edge.load(Ordering::Acquire);
            }
            let index = self.used.fetch_add(1, Ordering::Relaxed);
            let branch = &self.nodes[index as usize];
            let own = Self::bit(page, position);
            branch.position.store(position, Ordering::Relaxed);
            branch.below[own].store(value << 1 | 1, Ordering::Relaxed);
            branch.below[1 - own].store(link, Ordering::Relaxed);
            if edge.compare_exchange(link, index << 1, Ordering::AcqRel, Ordering::Acquire).is_ok() {
                return;
            }
        }
    }
}

/// Runs the race and prints it.
pub fn run(quick: bool, json: bool) -> ExitCode {
    let (count, rounds) = if quick { (5_000, 1) } else { (100_000, 5) };
    let mut rows = Vec::new();
    for (shape, zeros, late) in [
        ("random from the first byte", 0, false),
        ("zero prefix of 128 bytes", 128, false),
        ("equal but for the last 8 bytes", 0, true),
    ] {
        let pages = Pages::new(count, zeros, late);
        // A second copy of each page to look up with, so that a lookup reads the key from memory of its own.
        let copies = pages.bytes.clone();
        let makers: [Maker; 5] = [
            ("sd-tree fingerprints", |_| Box::new(Fingerprints(SdTree::with_capacity_hint(0).expect("address space")))),
            ("sd-tree exact", |pages| {
                Box::new(Exact::new(SdTree::with_capacity_hint(0).expect("address space"), pages, 7))
            }),
            ("content trie", |pages| Box::new(Trie::new(pages))),
            ("sharded hash exact", |pages| Box::new(Sharded((0..256).map(|_| Mutex::default()).collect(), pages))),
            ("ordered by memcmp", |pages| Box::new(Ordered(RwLock::new(BTreeMap::new()), pages))),
        ];
        let mut figures: Vec<[Vec<f64>; 2]> = makers.iter().map(|_| Default::default()).collect();
        for round in 0..rounds {
            for ((_, make), figures) in makers.iter().zip(&mut figures) {
                let index = make(&pages);
                let start = Instant::now();
                for value in 0..count {
                    index.insert(pages.page(value), value as u64);
                }
                figures[0].push(start.elapsed().as_secs_f64() * 1e9 / count as f64);
                let mut random = Random::new(round);
                let start = Instant::now();
                let mut wrong = 0;
                for _ in 0..count {
                    let at = random.below(count as u64) as usize;
                    let page: &Page = copies[at * 4096..][..4096].try_into().expect("4096 bytes");
                    wrong += usize::from(index.find(page) != Some(at as u64));
                }
                figures[1].push(start.elapsed().as_secs_f64() * 1e9 / count as f64);
                assert!(wrong <= 1, "{wrong} lookups went wrong");
            }
        }
        for ((name, _), figures) in makers.iter().zip(&figures) {
            rows.push((shape, *name, median_and_spread(&figures[0]), median_and_spread(&figures[1])));
        }
    }
    let lines: Vec<_> = rows
        .iter()
        .map(|(shape, name, insert, find)| {
            serde_json::json!({"pages": shape, "structure": name, "insert_ns": insert.0, "insert_spread_percent": insert.1,
                "find_ns": find.0, "find_spread_percent": find.1})
        })
        .collect();
    crate::record::emit(
        serde_json::json!({"bench": "index", "table": "content", "count": count, "rounds": rounds, "rows": lines}),
    );
    if json {
        return ExitCode::SUCCESS;
    }
    println!(
        "{count} raw pages as keys, one thread; nanoseconds per operation, median of {rounds} (+-: half the spread)"
    );
    let mut last = "";
    for (shape, name, insert, find) in rows {
        if shape != last {
            println!("\npages {shape}\n{:24}{:>16}{:>16}", "", "insert", "find");
            last = shape;
        }
        println!(
            "{name:24}{:>16}{:>16}",
            format!("{:.0} +-{:.0}%", insert.0, insert.1),
            format!("{:.0} +-{:.0}%", find.0, find.1)
        );
    }
    ExitCode::SUCCESS
}
