//! The tier against a plain map: after any operations in any order, every page loads exactly what was stored last, and the
//! tier holds nothing else.

mod common;

use common::{Pages, dup, page_of};
use pagefold_tier::{BackingFile, Config, Effort, LoadError, Tier};
use proptest::prelude::*;
use std::collections::HashMap;

#[derive(Clone, Debug)]
enum Step {
    Store { client: u32, page: u64, content: u16, dense: bool },
    StoreMany { client: u32, first: u64, contents: Vec<u16> },
    Load { client: u32, page: u64 },
    LoadCluster { client: u32, page: u64 },
    Discard { client: u32, first: u64, count: u64 },
    Fork { from: u32, to: u32 },
    CopyPage { client: u32, from: u64, to: u64 },
    RemoveRegion { client: u32 },
    Tick,
    RecompressAll,
    Compact,
    WriteBack { bytes: u64 },
    Adopt,
}

/// Clients 1 and 2 have a known length, 3 and 4 have not.
fn client() -> impl Strategy<Value = u32> {
    1_u32..5
}

fn page() -> impl Strategy<Value = u64> {
    prop_oneof![4 => 0_u64..64, 1 => 0_u64..4096]
}

fn step() -> impl Strategy<Value = Step> {
    let content = || 0_u16..96;
    prop_oneof![
        8 => (client(), page(), content(), any::<bool>())
            .prop_map(|(client, page, content, dense)| Step::Store { client, page, content, dense }),
        2 => (client(), page(), proptest::collection::vec(content(), 1..80))
            .prop_map(|(client, first, contents)| Step::StoreMany { client, first, contents }),
        6 => (client(), page()).prop_map(|(client, page)| Step::Load { client, page }),
        2 => (client(), page()).prop_map(|(client, page)| Step::LoadCluster { client, page }),
        4 => (client(), page(), 1_u64..40).prop_map(|(client, first, count)| Step::Discard { client, first, count }),
        1 => (client(), client()).prop_map(|(from, to)| Step::Fork { from, to }),
        2 => (client(), page(), page()).prop_map(|(client, from, to)| Step::CopyPage { client, from, to }),
        1 => client().prop_map(|client| Step::RemoveRegion { client }),
        2 => Just(Step::Tick),
        1 => Just(Step::RecompressAll),
        1 => Just(Step::Compact),
        2 => (1_u64..200_000).prop_map(|bytes| Step::WriteBack { bytes }),
        1 => Just(Step::Adopt),
    ]
}

const PAGES: u64 = 8192;

fn config() -> Config {
    Config { bytes_max: 16 << 20, key: [3, 4], recompress_ticks: 1, workers: 2, ..Config::default() }
}

fn create() -> Tier {
    let backing = BackingFile::create(&std::env::temp_dir(), 64 << 20).unwrap();
    let tier = Tier::create(config(), Some(Box::new(backing))).unwrap();
    tier.add_client(1, PAGES).unwrap();
    tier.add_client(2, PAGES).unwrap();
    tier
}

/// Compares everything: pages, neighbours, counts.
fn check(tier: &Tier, model: &Pages) {
    let mut data = [0; 4096];
    for ((client, page), content) in model {
        tier.load(*client, *page, &mut data).unwrap();
        assert_eq!(data, page_of(*content), "client {client}, page {page}");
    }
    for client in 1..5 {
        let mut expected: Vec<u64> = model.keys().filter(|key| key.0 == client).map(|key| key.1).collect();
        expected.sort_unstable();
        assert_eq!(tier.neighbours(client, 0, usize::MAX), expected);
        assert_eq!(tier.client_pages(client), expected.len() as u64);
    }
    let stats = tier.stats();
    assert_eq!(stats.pages, model.len() as u64);
    let distinct: std::collections::HashSet<u16> = model.values().copied().filter(|content| content % 8 != 0).collect();
    // A patch's base may stay without pages, and a content may exist twice while it is moved.
    assert!(stats.contents >= distinct.len() as u64);
    assert!(stats.bytes_held <= stats.bytes_max + stats.bytes_max / 64 + (4 << 20));
}

fn run(steps: &[Step]) {
    let mut tier = create();
    let mut model: Pages = HashMap::new();
    for step in steps {
        match step.clone() {
            Step::Store { client, page, content, dense } => {
                let effort = if dense { Effort::Dense } else { Effort::Fast };
                tier.store(client, page, &page_of(content), effort).unwrap();
                model.insert((client, page), content);
            }
            Step::StoreMany { client, first, contents } => {
                let pages: Vec<(u64, [u8; 4096])> =
                    (first..).zip(contents.iter()).map(|(page, content)| (page, page_of(*content))).collect();
                let pages: Vec<(u64, &[u8; 4096])> = pages.iter().map(|(page, data)| (*page, data)).collect();
                assert!(tier.store_many(client, &pages, Effort::Dense).iter().all(Result::is_ok));
                model.extend((first..).zip(contents).map(|(page, content)| ((client, page), content)));
            }
            Step::Load { client, page } => {
                let mut data = [0; 4096];
                match model.get(&(client, page)) {
                    Some(content) => {
                        tier.load(client, page, &mut data).unwrap();
                        assert_eq!(data, page_of(*content));
                    }
                    None => {
                        let error = tier.load(client, page, &mut data).unwrap_err();
                        assert!(matches!(error, LoadError::NotStored { .. }), "{error}");
                    }
                }
            }
            Step::LoadCluster { client, page } => {
                let mut cluster = [[0; 4096]; 8];
                if let Ok(run) = tier.load_cluster(client, page, &mut cluster) {
                    assert!(run.contains(&page));
                    for page in run.clone() {
                        assert_eq!(cluster[page as usize % 8], page_of(model[&(client, page)]));
                    }
                    let missing = |page: u64| !model.contains_key(&(client, page));
                    assert!(run.end % 8 == 0 || missing(run.end));
                    assert!(run.start % 8 == 0 || missing(run.start - 1));
                } else {
                    assert!(!model.contains_key(&(client, page)));
                }
            }
            Step::Discard { client, first, count } => {
                let before = model.len();
                model.retain(|(at, page), _| *at != client || !(first..first + count).contains(page));
                assert_eq!(tier.discard(client, first..first + count), (before - model.len()) as u64);
            }
            Step::Fork { from, to } => {
                // A child starts without pages.
                if from != to {
                    tier.remove_client(to);
                    model.retain(|(client, _), _| *client != to);
                    let copies: Vec<_> = model
                        .iter()
                        .filter(|(key, _)| key.0 == from)
                        .map(|(key, content)| ((to, key.1), *content))
                        .collect();
                    assert_eq!(tier.fork_client(from, to).unwrap(), copies.len() as u64);
                    model.extend(copies);
                }
            }
            Step::CopyPage { client, from, to } => {
                let content = model.get(&(client, from)).copied();
                assert_eq!(tier.copy_page(client, from, to).unwrap(), content.is_some());
                if let Some(content) = content {
                    model.insert((client, to), content);
                }
            }
            Step::RemoveRegion { client } => {
                tier.remove_client(client);
                model.retain(|(at, _), _| *at != client);
            }
            Step::Tick => drop(tier.tick()),
            Step::RecompressAll => drop(tier.recompress_all()),
            Step::Compact => drop(tier.compact_now()),
            Step::WriteBack { bytes } => drop(tier.write_back_now(bytes)),
            Step::Adopt => {
                let (arena, file) = tier.fds();
                let (arena, file) = (dup(arena), dup(file.unwrap()));
                drop(tier);
                let backing = BackingFile::from_fd(file, 64 << 20);
                let (successor, adopted) = Tier::adopt(arena, Some(Box::new(backing)), config()).unwrap();
                assert_eq!((adopted.pages, adopted.pages_lost), (model.len() as u64, 0));
                tier = successor;
            }
        }
    }
    check(&tier, &model);
    for client in 1..5 {
        tier.remove_client(client);
    }
    let stats = tier.stats();
    assert_eq!(
        (stats.pages, stats.contents, stats.payload_bytes, stats.pages_filled),
        (0, 0, 0, 0),
        "something leaked"
    );
    assert_eq!((stats.disk_bytes, stats.disk_bytes_held), (0, 0), "space in the file leaked");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, max_shrink_iters: 2000, ..ProptestConfig::default() })]

    #[test]
    fn reads_back_what_was_stored(steps in proptest::collection::vec(step(), 1..60)) {
        run(&steps);
    }
}

/// Every page is a near copy of another, so that patches, their bases and moves interact.
#[test]
fn patches_survive_moves_and_writeback() {
    let tier = create();
    let mut model: Pages = HashMap::new();
    let contents: Vec<u16> = (0..4000_u32).map(|n| (n % 4096) as u16).collect();
    let pages: Vec<[u8; 4096]> = contents.iter().map(|content| page_of(*content)).collect();
    for (page, data) in pages.iter().enumerate() {
        tier.store(3, page as u64, data, Effort::Fast).unwrap();
        model.insert((3, page as u64), contents[page]);
    }
    assert!(tier.recompress_all() > 0);
    let stats = tier.stats();
    assert!(stats.contents_patch > 100 && stats.dictionaries == 1, "{stats:?}");
    for round in 0..3 {
        for page in (0..4000).filter(|page| page % 4 == round) {
            tier.discard(3, page..page + 1);
            model.remove(&(3, page));
        }
        tier.compact_now();
        tier.write_back_now(100_000);
        check(&tier, &model);
    }
    assert!(tier.stats().moved > 0 && tier.stats().written_back > 0);
}
