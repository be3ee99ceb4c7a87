//! Memory that equals other memory at another place within its page is counted, as allocators make it that begin blocks at
//! any cache line; what is merged as it is, or is equal by chance, is not.

use pagefold_scan::{Config, Identity, Lost, PageKind, Pages, Report, ScanPlan, Source, WorkUnit, scan};

const PAGE: usize = 4096;
/// Pages of the block that sources have.
const BLOCK: usize = 1024;

/// Memory of whole pages.
struct Memory {
    domain: u64,
    bytes: Vec<u8>,
}

impl Source for Memory {
    fn identity(&self) -> Identity {
        Identity { pid: None, name: "memory".into(), domain: self.domain }
    }

    fn plan(&self) -> Result<ScanPlan, Lost> {
        // Two units: a block goes on from one to the next.
        let (pages, cut) = ((self.bytes.len() / PAGE) as u64, 300);
        let unit = |first_page, page_count| WorkUnit {
            first_page,
            page_count,
            kind: PageKind::Own,
            reason: None,
            continues: first_page > 0,
        };
        Ok(ScanPlan { units: vec![unit(0, cut), unit(cut, pages - cut)], ..ScanPlan::default() })
    }

    fn read(&self, unit: &WorkUnit, _buffer: &mut [u8], pages: &mut Pages) -> Result<(), Lost> {
        let start = unit.first_page as usize * PAGE;
        pages.take(unit.first_page, false, false, &self.bytes[start..start + unit.page_count as usize * PAGE]);
        Ok(())
    }
}

fn noise(seed: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    fastrand::Rng::with_seed(seed).fill(&mut bytes);
    bytes
}

/// The block, which begins `shift` bytes into other memory of the source.
fn block_at(shift: usize, number: u64) -> Memory {
    let mut bytes = noise(number + 2, (BLOCK + 8) * PAGE);
    bytes[PAGE + shift..PAGE + shift + BLOCK * PAGE].copy_from_slice(&noise(1, BLOCK * PAGE));
    Memory { domain: 1, bytes }
}

fn scanned(memories: Vec<Memory>, one_in: u32) -> Report {
    let config = Config { seed: 7, one_in, ..Config::default() };
    let sources = memories.into_iter().map(|memory| Box::new(memory) as Box<dyn Source>).collect();
    scan(sources, &config, &mut |_| ())
}

fn shifted(memories: Vec<Memory>) -> Vec<u64> {
    let report = scanned(memories, 1);
    let each: Vec<u64> = report.sources.iter().map(|source| source.totals.duplicate_shifted).collect();
    assert_eq!(report.totals.duplicate_shifted, each.iter().sum::<u64>());
    each
}

fn is_nearly_the_block(pages: u64) -> bool {
    (BLOCK as u64 * 9 / 10..=BLOCK as u64).contains(&pages)
}

#[test]
fn a_block_at_another_cache_line_counts_once() {
    let report = scanned(vec![block_at(0, 1), block_at(192, 2)], 1);
    assert_eq!(report.totals.duplicate_across, 0, "no page is equal");
    let pages = shifted(vec![block_at(0, 1), block_at(192, 2), block_at(4032, 3)]);
    assert!(pages[0] == 0 && pages[1..].iter().all(|pages| is_nearly_the_block(*pages)), "{pages:?}");
    // A copy that is merged as it is does not count, and what it is a copy of may still be the first of others.
    let pages = shifted(vec![block_at(0, 1), block_at(0, 2), block_at(64, 3)]);
    assert!(pages[..2] == [0, 0] && is_nearly_the_block(pages[2]), "{pages:?}");
}

#[test]
fn what_is_merged_or_differs_or_repeats_does_not_count() {
    assert_eq!(shifted(vec![block_at(0, 1), block_at(8192, 2)]), [0, 0], "equal pages");
    let noise_of = |number| Memory { domain: 1, bytes: noise(number, BLOCK * PAGE) };
    assert_eq!(shifted(vec![noise_of(20), noise_of(21)]), [0, 0]);
    // Records of 192 bytes that are all equal have no place where they begin.
    let record: Vec<u8> = noise(30, 192).into_iter().cycle().take(BLOCK * PAGE).collect();
    assert_eq!(shifted(vec![Memory { domain: 1, bytes: record }, noise_of(22)]), [0, 0]);
    let other = Memory { domain: 2, ..block_at(192, 2) };
    assert_eq!(shifted(vec![block_at(0, 1), other]), [0, 0], "another domain's");
    assert_eq!(scanned(vec![block_at(0, 1), block_at(192, 2)], 16).totals.duplicate_shifted, 0, "a sample");
}
