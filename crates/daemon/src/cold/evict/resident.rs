//! Resident pages are found by the kernel's page map, and evicted.

use super::batch::Run;
use super::transfer::put_all;
use crate::cold::agent_connection::{AgentConnection, Gone};
use crate::cold::client::Client;
use pagefold_os::{Range, pagemap};
use pagefold_tier::{Effort, Tier};
use std::collections::VecDeque;

/// Calls `f` with the parts of `range` that match `query`.
pub(crate) fn scan(
    client: &Client,
    range: Range,
    query: pagemap::Query,
    mut f: impl FnMut(&pagemap::ScannedRange),
) -> Result<(), Gone> {
    let mut found = [pagemap::ScannedRange::default(); 512];
    let mut start = range.start;
    while start < range.end {
        let part = Range { start, end: range.end };
        let (count, walked) = pagemap::scan(&client.pagemap, part, query, &mut found).map_err(|_| Gone)?;
        found[..count].iter().for_each(&mut f);
        if walked <= start {
            break;
        }
        start = walked;
    }
    Ok(())
}

/// Resident pages of the program's own: in memory, not the kernel's zero page, no file's.
pub(crate) fn resident() -> pagemap::Query {
    let all_of = pagemap::PRESENT | pagemap::PFNZERO | pagemap::FILE;
    pagemap::Query {
        all_of,
        inverted: pagemap::PFNZERO | pagemap::FILE,
        report: pagemap::PRESENT,
        ..Default::default()
    }
}

/// Resident pages of some ranges. They are found as they are asked for: the eviction of the first need not wait for the
/// last.
struct Found<'a> {
    client: &'a Client,
    parts: std::vec::IntoIter<Run>,
    /// The rest of a part, and the managed range around it.
    rest: Run,
    found: VecDeque<Run>,
    is_gone: bool,
}

/// Bytes of addresses that are scanned at a time.
const LOOK_BYTES: u64 = 16 << 20;

impl<'a> Found<'a> {
    fn of(client: &'a Client, parts: Vec<Run>) -> Found<'a> {
        let nothing = Range { start: 0, end: 0 };
        Found { client, parts: parts.into_iter(), rest: (nothing, nothing), found: VecDeque::new(), is_gone: false }
    }
}

impl Iterator for Found<'_> {
    type Item = Run;

    fn next(&mut self) -> Option<Run> {
        while self.found.is_empty() && !self.is_gone {
            if self.rest.0.is_empty() {
                self.rest = self.parts.next()?;
                continue;
            }
            let (rest, around) = &mut self.rest;
            let piece = Range { start: rest.start, end: rest.end.min(rest.start + LOOK_BYTES) };
            rest.start = piece.end;
            let found = &mut self.found;
            let seen = scan(self.client, piece, resident(), |run| {
                found.push_back((Range { start: run.start, end: run.end }, *around));
            });
            self.is_gone = seen.is_err();
        }
        self.found.pop_front()
    }
}

/// Evicts the resident pages of `parts`.
pub(crate) fn evict_resident(
    client: &Client,
    link: &mut AgentConnection,
    tier: &Tier,
    parts: Vec<Run>,
    crowded: Effort,
) -> Result<u64, Gone> {
    let mut found = Found::of(client, parts);
    let gone = put_all(client, link, tier, &mut found, crowded)?;
    if found.is_gone { Err(Gone) } else { Ok(gone) }
}
