//! All structures of this build: ours and the peers.

use super::forrest::Forrest;
use bench_peers::{BATCH, Maker, Map, map};
use forrest::{Options, Pages};
use llds::b_tree::BTree;
use llds::sd_tree::SdTree;

/// All structures of this build, ours first. All have huge pages.
pub fn all() -> Vec<Maker> {
    let mut makers: Vec<Maker> = vec![
        ("sd-tree", |keys| Box::new(Tree(SdTree::with_pages(keys, true).expect("address space")))),
        ("b-tree", |_| Box::new(Ordered(BTree::with_pages(true).expect("address space")))),
        ("forrest", |_| Box::new(Forrest(Options::new().pages(Pages::Auto).private().expect("address space")))),
    ];
    makers.extend(bench_peers::all());
    makers
}

struct Tree(SdTree);

impl Map for Tree {
    fn get(&self, key: u64) -> Option<u64> {
        self.0.get(key)
    }

    fn insert(&self, key: u64, value: u64) -> bool {
        self.0.get_or_insert(key, value).expect("keys are well spread").is_none()
    }

    fn remove(&self, key: u64, value: u64) -> bool {
        self.0.remove(key, value)
    }

    fn get_many(&self, keys: &[u64], found: &mut [Option<u64>]) -> bool {
        self.0.lookup_many(keys, found);
        true
    }

    fn insert_many(&self, pairs: &[(u64, u64)]) -> bool {
        self.0.get_or_insert_many(pairs, &mut [None; BATCH][..pairs.len()]).expect("keys are well spread");
        true
    }
}

struct Ordered(BTree<u64>);

map! { Ordered, map, key, value,
    map.0.get(key),
    map.0.insert_or_replace(key, value).expect("memory").is_none(),
    map.0.remove(key).is_some(),
    fn get_many(&self, keys: &[u64], found: &mut [Option<u64>]) -> bool {
        self.0.get_many(keys, found);
        true
    }
}
