//! What the scan asks of something that has pages: the trait is written by its
//! user, the scan; processes, dumps and the tests' synthetic memory implement it.

use crate::error::Lost;
use crate::record::{PageKind, PageRecord, Printer};
use crate::shifted::{self, Anchor};
use crate::smaps::Reason;
use pagefold_os::page::is_zero;
use pagefold_os::{PAGE_SIZE, Page};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Identifies a source.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Identity {
    /// Process id, if it is a process.
    pub pid: Option<i32>,
    /// Command name, or path of the file.
    pub name: String,
    /// Pages are compared only inside one domain.
    pub domain: u64,
}

/// A piece of a source that one worker reads at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkUnit {
    /// First page, counted from address or offset 0.
    pub first_page: u64,
    /// Number of pages, present or not.
    pub page_count: u64,
    /// What its pages are at most.
    pub kind: PageKind,
    /// Why only the kernel could merge them, for [`PageKind::KernelOnly`].
    pub reason: Option<Reason>,
    /// True if it is the same mapping as the unit before it.
    pub continues: bool,
}

/// What a source has.
#[derive(Clone, Debug, Default)]
pub struct ScanPlan {
    /// The pieces to read.
    pub units: Vec<WorkUnit>,
    /// Bytes that will probably be read.
    pub bytes: u64,
    /// Present pages that are not read, and why.
    pub left_out: BTreeMap<Reason, u64>,
    /// Pages that pagefold shares already; in memory, but not necessarily in the process's page tables.
    pub merged: u64,
    /// Pages in swap, which a scan does not touch.
    pub swapped: u64,
    /// Pages that devices hold (`VmPin`), at most; they are among the others.
    pub pinned: u64,
}

/// Something with pages.
pub trait Source: Send + Sync + 'static {
    /// Identifies the source.
    fn identity(&self) -> Identity;

    /// Finds out what there is to read.
    ///
    /// # Errors
    /// Why the source cannot be scanned.
    fn plan(&self) -> Result<ScanPlan, Lost>;

    /// Reads `unit` and hands its present pages to `pages` in the order of their addresses; `buffer` is
    /// scratch space of whole pages.
    ///
    /// # Errors
    /// Why the source must be left out after all.
    fn read(&self, unit: &WorkUnit, buffer: &mut [u8], pages: &mut Pages) -> Result<(), Lost>;

    /// Gives back what reading took; called after the last unit.
    fn close(&self) {}
}

/// What was found in one unit.
#[derive(Debug)]
pub struct Pages {
    printer: Printer,
    unit: WorkUnit,
    beat: Arc<AtomicU64>,
    pub(crate) records: Vec<PageRecord>,
    /// None in a sample, which does not know the pages around them.
    pub(crate) anchors: Vec<Anchor>,
    pub(crate) counts: Counts,
    /// Number of the first recorded page; for joining units.
    pub(crate) first_page: Option<u64>,
    /// Number of the last recorded page.
    pub(crate) last_page: Option<u64>,
}

/// Pages that leave no record.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    /// Read, sampled or not.
    pub examined: u64,
    pub zero: u64,
    pub zero_kernel_only: u64,
    pub zero_shared: u64,
    pub zero_mapped: u64,
    pub left_out: BTreeMap<Reason, u64>,
}

impl Pages {
    pub(crate) fn new(printer: Printer, unit: WorkUnit, beat: Arc<AtomicU64>) -> Pages {
        let counts = Counts::default();
        let (records, anchors) = (Vec::new(), Vec::new());
        Pages { printer, unit, beat, records, anchors, counts, first_page: None, last_page: None }
    }

    /// Takes the pages from number `first_page` on, with the content `bytes`. `shared` pages belong to others as
    /// well, `huge` ones are part of a huge page.
    pub fn take(&mut self, first_page: u64, shared: bool, huge: bool, bytes: &[u8]) {
        let (pages, rest) = bytes.as_chunks::<PAGE_SIZE>();
        assert!(rest.is_empty(), "whole pages only");
        let kind = if shared && self.unit.kind != PageKind::Pool { PageKind::Shared } else { self.unit.kind };
        for (page_number, page) in (first_page..).zip(pages) {
            self.take_page(page_number, kind, huge, page);
        }
        // The pool's pages belong to no process; they are read only to know what is there.
        self.counts.examined += if kind == PageKind::Pool { 0 } else { pages.len() as u64 };
        self.beat.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        if let (PageKind::KernelOnly, Some(reason)) = (kind, self.unit.reason) {
            *self.counts.left_out.entry(reason).or_default() += pages.len() as u64;
        }
    }

    fn take_page(&mut self, page_number: u64, kind: PageKind, huge: bool, page: &Page) {
        if is_zero(page) {
            match kind {
                PageKind::Own => self.counts.zero += 1,
                PageKind::KernelOnly => self.counts.zero_kernel_only += 1,
                PageKind::Shared => self.counts.zero_shared += 1,
                PageKind::Pool => {}
            }
            return;
        }
        let Some(print) = self.printer.print(page) else { return };
        let mut record = PageRecord::new(print, kind, huge);
        if page_number > 0 && self.last_page == Some(page_number - 1) {
            record.set_follows();
        }
        if kind == PageKind::Own && self.printer.keeps_all() {
            shifted::choose(page, page_number, self.records.len(), self.printer.key(), &mut self.anchors);
        }
        self.records.push(record);
        self.first_page.get_or_insert(page_number);
        self.last_page = Some(page_number);
    }

    /// Takes `count` pages that are zero and need no reading: holes of a file.
    pub fn take_holes(&mut self, count: u64) {
        self.counts.examined += count;
        self.counts.zero += count;
        self.beat.fetch_add(count * PAGE_SIZE as u64, Ordering::Relaxed);
    }

    /// Takes `count` pages that already are the kernel's zero page.
    pub fn take_zero_mapped(&mut self, count: u64) {
        self.counts.zero_mapped += count;
        self.beat.fetch_add(1, Ordering::Relaxed);
    }

    /// Tells that the reader is alive though it has found nothing.
    pub fn beat(&self) {
        self.beat.fetch_add(1, Ordering::Relaxed);
    }
}
