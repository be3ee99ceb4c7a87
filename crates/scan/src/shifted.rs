//! Memory that equals other memory at another place within its page: no merge of pages can share it.
//!
//! Some allocators begin each large block at another cache line, so that equal blocks have no equal page. The scan keeps one
//! line of 64 bytes in about 256, chosen by its content: an *anchor*, which a block has wherever it begins. Where two
//! anchors in a row lie as far apart as they do elsewhere, what is between them counts as equal too. That is an estimate,
//! and the low one: a block with fewer than two anchors does not count.

use pagefold_os::{PAGE_SIZE, Page};
use std::collections::HashMap;
use xxhash_rust::xxh3::xxh3_64_with_seed;

const LINE: usize = 64;
const LINES: u64 = (PAGE_SIZE / LINE) as u64;
/// Furthest that two anchors in a row lie apart, in lines: on average it is 256.
const APART: u64 = 2048;
/// Most anchors of one page: lines of one kind may all begin with the same word.
const OF_PAGE: usize = 4;

/// A line that was chosen by its content.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Anchor {
    /// Of its content, in its domain.
    print: u64,
    /// Its address in lines.
    line: u64,
    /// The record of its page, counted from the first of its unit or source.
    record: usize,
}

impl Anchor {
    /// The same where `before` records come before those of its unit.
    pub(crate) const fn after(self, before: usize) -> Anchor {
        Anchor { record: before + self.record, ..self }
    }
}

/// Chooses the anchors of a page.
pub(crate) fn choose(page: &Page, page_number: u64, record: usize, key: u64, anchors: &mut Vec<Anchor>) {
    let most = anchors.len() + OF_PAGE;
    for (content, line) in page.as_chunks::<LINE>().0.iter().zip(page_number * LINES..) {
        let (words, _) = content.as_chunks::<8>();
        // The first word chooses: a hash of each line would take as long as that of the page.
        let is_chosen = (u64::from_le_bytes(words[0]) ^ key).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56 == 0;
        if is_chosen && words.iter().any(|word| *word != words[0]) && anchors.len() < most {
            anchors.push(Anchor { print: xxh3_64_with_seed(content, key), line, record });
        }
    }
}

/// How many pages of each source are such memory, first copies not counted. A source is its anchors, and the number of its
/// first record. `has_twin` tells of a record whether its page is merged as it is.
pub(crate) fn count(sources: Vec<(Vec<Anchor>, usize)>, has_twin: impl Fn(usize) -> bool) -> Vec<u64> {
    // Where each anchor was seen first.
    let mut firsts: HashMap<u64, (usize, u64)> = HashMap::new();
    let in_source = |(number, (anchors, first_record)): (usize, (Vec<Anchor>, usize))| {
        let mut lines = 0;
        let mut last = None;
        for anchor in anchors {
            let (source, first) = *firsts.entry(anchor.print).or_insert((number, anchor.line));
            // How far it is from there; modulo 2^64, which the lines of a page divide.
            let apart = (source, anchor.line.wrapping_sub(first));
            if let Some((before, line)) = last
                && before == apart
                && anchor.line - line <= APART
                && apart.1 % LINES != 0
                && !has_twin(first_record + anchor.record)
            {
                lines += anchor.line - line;
            }
            last = Some((apart, anchor.line));
        }
        lines / LINES
    };
    sources.into_iter().enumerate().map(in_source).collect()
}
