//! What an archive may use, and what it has used so far: counted in one way by every reader of archives.

use crate::config::{Limits, Used};
use crate::error::{Result, input};
use crate::tree::{show, show_start};

/// An archive may name directories only by paths, at a cost of two bytes each: this many are allowed,
const IMPLIED_FREE: u64 = 65_536;
/// plus this many for each of its entries.
const IMPLIED_PER_ENTRY: u64 = 4;
/// A path of a few bytes may lead by symbolic links through tens of thousands of names: the paths of an archive may take
/// this many steps,
const STEPS_FREE: u64 = 1 << 20;
/// plus this many for each entry.
const STEPS_PER_ENTRY: u64 = 64;

/// The limits of an archive with its counts.
pub(crate) struct Budget {
    /// The format's name, which begins each message.
    format: &'static str,
    limits: Limits,
    entries: u64,
    implied: u64,
    steps: u64,
    names: u64,
    content: u64,
}

impl Budget {
    /// Nothing is used yet.
    pub(super) fn new(format: &'static str, limits: Limits) -> Self {
        Self { format, limits, entries: 0, implied: 0, steps: 0, names: 0, content: 0 }
    }

    /// What the entries so far have used of the limits.
    pub(crate) fn used(&self) -> Used {
        Used { entries: self.entries + self.implied, names_bytes: self.names, bytes: self.content }
    }

    /// The entries so far.
    pub(super) fn entries(&self) -> u64 {
        self.entries
    }

    /// Counts an entry.
    ///
    /// # Errors
    /// More than the limit.
    pub(super) fn count_entry(&mut self) -> Result<()> {
        self.entries += 1;
        if self.entries + self.implied > self.limits.entries {
            let (format, limit) = (self.format, self.limits.entries);
            return Err(input!("{format}: more than {limit} entries, all that the limit leaves room for"));
        }
        Ok(())
    }

    /// Counts the directories that `path` has made without entries of their own: in memory they are as large.
    ///
    /// # Errors
    /// More than the limit of entries, or than an honest archive has.
    pub(crate) fn count_implied(&mut self, path: &[u8], made: u64) -> Result<()> {
        self.implied += made;
        let (format, entries, implied) = (self.format, self.entries, self.implied);
        if entries + implied > self.limits.entries {
            let limit = self.limits.entries;
            return Err(input!("{format}: more than {limit} entries, counting the directories on their paths"));
        }
        if implied > IMPLIED_FREE + IMPLIED_PER_ENTRY * entries {
            return Err(input!(
                "{format}: {}: {entries} entries bring {implied} directories that have no entry; pack the directories, too",
                show_start(path)
            ));
        }
        Ok(())
    }

    /// Counts the steps that resolving `path` has taken beyond those along its own names, which the archive has brought.
    ///
    /// # Errors
    /// More than an honest archive has.
    pub(crate) fn count_steps(&mut self, path: &[u8], taken: u64) -> Result<()> {
        self.steps += taken.saturating_sub(path.split(|&byte| byte == b'/').count() as u64);
        if self.steps > STEPS_FREE + STEPS_PER_ENTRY * self.entries {
            return Err(input!(
                "{}: {}: the paths of {} entries take {} steps, links followed, which no honest archive's do",
                self.format,
                show_start(path),
                self.entries,
                self.steps
            ));
        }
        Ok(())
    }

    /// Counts a file's content.
    ///
    /// # Errors
    /// More than the limit.
    pub(super) fn count_content(&mut self, path: &[u8], size: u64) -> Result<()> {
        let left = self.limits.bytes - self.content;
        if size > left {
            return Err(input!(
                "{}: {}: {size} bytes of content, the limit leaves room for {left}",
                self.format,
                show(path)
            ));
        }
        self.content += size;
        Ok(())
    }

    /// Counts bytes of owners' names, which stay in memory; the next entry's names are refused when they are too many.
    pub(super) fn count_owners(&mut self, bytes: usize) {
        self.names += bytes as u64;
    }

    /// Counts an entry's name, link target and `attributes` bytes of attributes, which stay in memory.
    ///
    /// # Errors
    /// More than the limit.
    pub(super) fn count_names(&mut self, path: &[u8], target: &[u8], attributes: usize) -> Result<()> {
        let name = path.rsplit(|&byte| byte == b'/').find(|part| !part.is_empty()).unwrap_or_default();
        self.names += (name.len() + target.len() + attributes) as u64;
        if self.names > self.limits.names_bytes {
            return Err(input!(
                "{}: {}: with its name, link target and attributes there are more than the limit's {} bytes of them",
                self.format,
                show_start(path),
                self.limits.names_bytes
            ));
        }
        Ok(())
    }

    /// Refuses the target of a symbolic link that no tree can hold.
    ///
    /// # Errors
    /// It is one.
    pub(super) fn check_link_target(&self, path: &[u8], target: &[u8]) -> Result<()> {
        if target.is_empty() || target.len() > 4095 || target.contains(&0) {
            return Err(input!("{}: {}: a link target of {} bytes", self.format, show(path), target.len()));
        }
        Ok(())
    }

    /// Refuses a header of `size` bytes, which are read into memory, above the limit.
    ///
    /// # Errors
    /// It is larger.
    pub(super) fn check_header(&self, size: u64, what: &str) -> Result<()> {
        if size > self.limits.header_bytes {
            let (format, limit) = (self.format, self.limits.header_bytes);
            return Err(input!("{format}: {what} of {size} bytes; {limit} are allowed"));
        }
        Ok(())
    }
}
