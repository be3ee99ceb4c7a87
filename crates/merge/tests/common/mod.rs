//! What several tests need.

use pagefold_merge::client::{Client, Gone, Outcome, PoolMapping, RemapPiece, Written};
use pagefold_merge::sim::SimClient;
use pagefold_os::{Page, Range};
use pagefold_pool::Pool;

/// Says whatever it is told to about its memory, and tells of what it is asked.
pub struct Scripted {
    pub honest: SimClient,
    /// Regions and pool mappings.
    pub claims: Option<(Vec<Range>, Vec<PoolMapping>)>,
    /// Called with the names of some calls before they are done, and with "remapped" after a remap.
    pub at: Box<dyn FnMut(&'static str) -> Result<(), Gone> + Send>,
}

impl Client for Scripted {
    fn generation(&mut self) -> u64 {
        if self.claims.is_some() { 1 } else { self.honest.generation() }
    }
    fn regions(&mut self) -> Result<Option<Vec<Range>>, Gone> {
        (self.at)("regions")?;
        self.claims.as_ref().map_or_else(|| self.honest.regions(), |claims| Ok(Some(claims.0.clone())))
    }
    fn pool_mappings(&mut self) -> Result<Option<Vec<PoolMapping>>, Gone> {
        self.claims.as_ref().map_or_else(|| self.honest.pool_mappings(), |claims| Ok(Some(claims.1.clone())))
    }
    fn watch(&mut self, ranges: &[Range]) -> Result<(), Gone> {
        self.honest.watch(ranges)
    }
    fn touched(&mut self, range: Range, out: &mut Vec<Range>) -> Result<(), Gone> {
        (self.at)("touched")?;
        self.honest.touched(range, out)
    }
    fn written(&mut self, range: Range, huge: bool, out: &mut Vec<Written>) -> Result<(), Gone> {
        self.honest.written(range, huge, out)
    }
    fn broken(&mut self, range: Range, out: &mut Vec<Range>) -> Result<(), Gone> {
        self.honest.broken(range, out)
    }
    fn fetch(&mut self, runs: &[Range], out: &mut [Page], readable: &mut [bool]) -> Result<(), Gone> {
        (self.at)("fetch")?;
        self.honest.fetch(runs, out, readable)
    }
    fn remap(&mut self, pool: &Pool, pieces: &[RemapPiece], out: &mut Vec<Outcome>) -> Result<(), Gone> {
        (self.at)("remap")?;
        let done = self.honest.remap(pool, pieces, out);
        (self.at)("remapped")?;
        done
    }
    fn heal(&mut self, ranges: &[Range], out: &mut Vec<bool>) -> Result<(), Gone> {
        if (self.at)("heal").is_err() {
            // A refusal, as of a client that may be reading from a device.
            out.resize(out.len() + ranges.len(), false);
            return Ok(());
        }
        self.honest.heal(ranges, out)
    }
}
