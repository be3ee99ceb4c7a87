//! The memory of a region: where each page is, how it goes out, and how it comes back.
//!
//! | state | the page is | the tier has | who changes it |
//! |---|---|---|---|
//! | here | here, or never was | nothing | anybody |
//! | back | here | an old entry, discarded by the next `park`, `cool` or `unpark` | anybody |
//! | frozen | in the parker's hands | | the parker |
//! | out | in the tier | its entry | anybody |
//! | busy | in the hands of a thread that brings it or zeros | as before | that thread |
//!
//! Entries are stored and discarded by who holds `parking` only, never in the
//! handler, where nothing may be freed.

use super::fault::{self, Patience, Taken};
use super::{FAULT_PAGES_MAX, Parked, RegionError, RegionStats, Unreadable};
use crate::arena::lock;
use crate::config::Effort;
use crate::index;
use crate::stats::{Stats, count};
use crate::tier::Tier;
use pagefold_os::fd::Fd;
use pagefold_os::mem::{self, Mapping};
use pagefold_os::signal::Blocked;
use pagefold_os::uffd::{self, Uffd};
use pagefold_os::{Errno, PAGE_SIZE, Page, Range as Addresses, memfd, pagemap, sched, syscall};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

const HERE: u8 = 0;
const BACK: u8 = 1;
const FROZEN: u8 = 2;
const OUT: u8 = 3;
const BUSY: u8 = 4;

/// Pages whose missing mode is switched together: absent pages cost a fault of ours only where some are out.
const CHUNK: usize = 512;
/// Pages copied and stored at once.
const BATCH: usize = 256;
/// Pages frozen at once: how long an access waits for a comparison.
const FREEZE: usize = 64;
/// The region's number in its tier.
const REGION: u32 = 1;
/// A page that is here and faults nevertheless, so many times in a row, is not ours to mend.
const STUCK_MAX: u64 = 10_000;

/// The age of a page that is here: calls of `cool` since it was written; of a page that is out: since it went.
const AGE: u8 = 0x1f;
/// How often it came back too soon, above the age.
const STRIKE: u8 = 0x20;
const STRIKES_MAX: u8 = 3;

#[derive(Debug, Default)]
struct Counters {
    out: AtomicU64,
    parked: AtomicU64,
    back: AtomicU64,
    faults: AtomicU64,
    fault_ns: AtomicU64,
    zero_faults: AtomicU64,
    unreadable: AtomicU64,
}

/// Pages `first..end` stay here.
#[derive(Debug)]
struct Pin {
    id: u64,
    pages: Range<usize>,
}

#[derive(Debug, Default)]
struct Pins {
    next: u64,
    all: Vec<Pin>,
}

/// What the parker has.
#[derive(Debug)]
struct Parking {
    staging: Mapping,
    copies_fd: Fd,
    copies: Mapping,
    pagemap: Fd,
    /// In missing mode.
    missing: Vec<bool>,
    /// Strikes and age of each page, made by the first `cool`.
    ages: Option<Mapping>,
}

/// A handle of a region. In a child the region's mappings are not there, and their addresses may be another's: nothing
/// is unmapped.
#[derive(Clone, Debug)]
pub(super) struct Handle(Arc<Shared>);

impl Handle {
    pub(super) fn new(tier: Tier, bytes: usize) -> Result<Handle, RegionError> {
        let memory = own(bytes)?;
        let pages = memory.len() / PAGE_SIZE;
        tier.add_region(REGION, pages as u64)?;
        let index = tier.region(REGION).ok_or(RegionError::Memory(Errno(libc::ENOMEM)))?;
        let ours = Mapping::anonymous(PAGE_SIZE).map_err(RegionError::Memory)?;
        // SAFETY: the page is ours, nobody else knows it; the advice changes no bytes here.
        unsafe {
            ours.as_ptr().write(1);
            mem::advise(ours.addr(), PAGE_SIZE as u64, libc::MADV_WIPEONFORK).map_err(RegionError::Memory)?;
        }
        let features = uffd::FEATURE_SIGBUS | uffd::FEATURE_MOVE | uffd::FEATURE_WP_ASYNC;
        let uffd =
            Uffd::user_mode_only(features | uffd::FEATURE_PAGEFAULT_FLAG_WP).map_err(RegionError::Userfaultfd)?;
        let staging = own(FREEZE * PAGE_SIZE)?;
        for map in [&memory, &staging] {
            // A move wants both ends to be ours.
            let range = Addresses { start: map.addr(), end: map.addr() + map.len() as u64 };
            uffd.register(range, uffd::MODE_WP).map_err(RegionError::Userfaultfd)?;
        }
        let copies_fd = memfd::create(c"pagefold-copies", (BATCH * PAGE_SIZE) as u64).map_err(RegionError::Memory)?;
        let (prot, len) = (libc::PROT_READ | libc::PROT_WRITE, BATCH * PAGE_SIZE);
        let copies = Mapping::file(copies_fd.raw(), 0, len, prot, libc::MAP_SHARED).map_err(RegionError::Memory)?;
        let parking = Parking {
            staging,
            copies_fd,
            copies,
            pagemap: Fd::open(c"/proc/self/pagemap", libc::O_RDONLY, 0).map_err(RegionError::Memory)?,
            missing: vec![false; pages.div_ceil(CHUNK)],
            ages: None,
        };
        let range = Addresses { start: memory.addr(), end: memory.addr() + memory.len() as u64 };
        let shared = Arc::new(Shared {
            states: own(pages)?,
            memory,
            ours,
            uffd,
            tier,
            index,
            counters: Counters::default(),
            window_end: AtomicU64::new(u64::MAX),
            window_pages: AtomicU64::new(1),
            stuck: AtomicU64::new(0),
            closed: AtomicBool::new(false),
            parking: Mutex::new(parking),
            pins: Mutex::default(),
        });
        fault::enter(Arc::as_ptr(&shared), range.start, range.end)?;
        Ok(Handle(shared))
    }
}

impl std::ops::Deref for Handle {
    type Target = Shared;
    fn deref(&self) -> &Shared {
        &self.0
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        if !self.0.is_ours() {
            std::mem::forget(self.0.clone());
        }
    }
}

/// A region, shared by its handles and found by the handler.
#[derive(Debug)]
pub(super) struct Shared {
    memory: Mapping,
    states: Mapping,
    /// One byte that is 1 in this process and 0 in a child.
    ours: Mapping,
    uffd: Uffd,
    tier: Tier,
    index: Arc<index::Region>,
    counters: Counters,
    /// One past the last page that a fault brought, and how many it brought.
    window_end: AtomicU64,
    window_pages: AtomicU64,
    /// A page that was here when it faulted, and how often in a row: see [`STUCK_MAX`].
    stuck: AtomicU64,
    pub closed: AtomicBool,
    parking: Mutex<Parking>,
    pins: Mutex<Pins>,
}

/// A mapping of our own: a child does not have it.
fn own(len: usize) -> Result<Mapping, RegionError> {
    let map = Mapping::anonymous(len).map_err(RegionError::Memory)?;
    // SAFETY: changes no bytes.
    unsafe { mem::advise(map.addr(), map.len() as u64, libc::MADV_DONTFORK) }.map_err(RegionError::Memory)?;
    Ok(map)
}

impl Shared {
    pub(super) fn memory(&self) -> &Mapping {
        &self.memory
    }

    fn pages(&self) -> usize {
        self.memory.len() / PAGE_SIZE
    }

    /// The pages that a range of bytes touches.
    pub(super) fn pages_of(&self, bytes: &Range<usize>) -> Range<usize> {
        let len = self.memory.len();
        assert!(bytes.start <= bytes.end && bytes.end <= len, "bytes {bytes:?} of a region of {len}");
        if bytes.is_empty() {
            return 0..0;
        }
        bytes.start / PAGE_SIZE..bytes.end.div_ceil(PAGE_SIZE)
    }

    fn state(&self, page: usize) -> &AtomicU8 {
        assert!(page < self.pages());
        // SAFETY: a byte of the mapping, as just checked, only ever used as an atomic.
        unsafe { AtomicU8::from_ptr(self.states.as_ptr().add(page)) }
    }

    fn addr(&self, page: usize) -> u64 {
        self.memory.addr() + (page * PAGE_SIZE) as u64
    }

    fn addresses(&self, pages: &Range<usize>) -> Addresses {
        Addresses { start: self.addr(pages.start), end: self.addr(pages.end) }
    }

    /// False in a child of a fork: our descriptor is the parent's memory, our mappings are not there, and a lock may be
    /// held by a thread that is not there either.
    pub(super) fn is_ours(&self) -> bool {
        // SAFETY: one byte of our own mapping.
        unsafe { self.ours.as_ptr().read_volatile() == 1 }
    }

    fn usable(&self) -> bool {
        self.is_ours() && !self.closed.load(Ordering::Acquire)
    }

    pub(super) fn stats(&self) -> RegionStats {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let counters = &self.counters;
        let pinned = if !self.is_ours() {
            0
        } else {
            let _quiet = Blocked::all();
            lock(&self.pins).all.iter().map(|pin| pin.pages.len() as u64).sum()
        };
        RegionStats {
            pages: self.pages() as u64,
            pages_out: get(&counters.out),
            pages_parked: get(&counters.parked),
            pages_back: get(&counters.back),
            faults: get(&counters.faults),
            fault_ns: get(&counters.fault_ns),
            zero_faults: get(&counters.zero_faults),
            pages_unreadable: get(&counters.unreadable),
            pages_pinned: pinned,
        }
    }

    pub(super) fn tier_stats(&self) -> Stats {
        let _quiet = Blocked::all();
        self.tier.stats()
    }

    // In: in the handler, or with signals blocked.

    /// Serves a fault; `None` if the address is not ours, false if the page cannot be brought back.
    pub(super) fn serve(&self, addr: u64) -> Option<bool> {
        let page = usize::try_from(addr.checked_sub(self.memory.addr())?).ok()? / PAGE_SIZE;
        if page >= self.pages() || !self.is_ours() {
            return None;
        }
        let state = self.state(page);
        let mut patience = Patience::default();
        let mut waited = false;
        loop {
            match state.load(Ordering::Acquire) {
                OUT => {
                    if state.compare_exchange(OUT, BUSY, Ordering::Acquire, Ordering::Relaxed).is_ok() {
                        return Some(self.bring_fault(page));
                    }
                }
                // Somebody brought it while we waited.
                HERE | BACK if waited => return Some(true),
                here @ (HERE | BACK) => {
                    if state.compare_exchange(here, BUSY, Ordering::Acquire, Ordering::Relaxed).is_ok() {
                        let served = self.bring_zeros(page);
                        state.store(here, Ordering::Release);
                        return Some(served);
                    }
                }
                _ => {
                    waited = true;
                    patience.wait();
                }
            }
        }
    }

    /// An absent page that never was, in a chunk where others are out. The page is busy.
    fn bring_zeros(&self, page: usize) -> bool {
        count(&self.counters.zero_faults);
        let mut patience = Patience::default();
        loop {
            match self.uffd.zero(Addresses::pages_from(self.addr(page), 1), uffd::DONTWAKE).1 {
                Some(Errno(libc::EAGAIN | libc::ENOMEM)) if !patience.ended() => patience.wait(),
                Some(Errno(libc::ENOMEM)) => return false,
                // It is here: somebody was quicker. Unless that never ends: the kernel has another reason.
                Some(Errno(libc::EEXIST)) => {
                    let before = self.stuck.load(Ordering::Relaxed);
                    let times = if before >> 16 == page as u64 { before & 0xffff } else { 0 };
                    self.stuck.store((page as u64) << 16 | (times + 1), Ordering::Relaxed);
                    return times < STUCK_MAX;
                }
                // No longer in missing mode: the kernel serves it.
                _ => {
                    self.stuck.store(0, Ordering::Relaxed);
                    return true;
                }
            }
        }
    }

    /// Brings a page back that is busy and was out, and those behind it if the program walks upwards.
    fn bring_fault(&self, page: usize) -> bool {
        let start = sched::quick_monotonic_ns();
        count(&self.counters.faults);
        let (end, last) = (self.window_end.load(Ordering::Relaxed), self.window_pages.load(Ordering::Relaxed));
        // Within the next window counts as behind: the pages between may be here.
        let behind = page as u64 >= end && page as u64 - end < last * 2;
        let window = if behind { (last * 2).min(FAULT_PAGES_MAX as u64) } else { (last / 2).max(1) };
        self.window_pages.store(window, Ordering::Relaxed);
        self.window_end.store(page as u64 + window, Ordering::Relaxed);
        let len = self.claim_behind(page, window as usize);
        let brought = self.bring(page, len);
        self.counters.fault_ns.fetch_add(sched::quick_monotonic_ns().saturating_sub(start), Ordering::Relaxed);
        brought > 0
    }

    /// Makes pages behind `page`, which is busy, busy as far as they are out: so many in all, at most `max`, of one chunk.
    fn claim_behind(&self, page: usize, max: usize) -> usize {
        let end = (page + max).min((page / CHUNK + 1) * CHUNK).min(self.pages());
        let claim =
            |page: &usize| self.state(*page).compare_exchange(OUT, BUSY, Ordering::Acquire, Ordering::Relaxed).is_ok();
        (page + 1..end).take_while(claim).count() + 1
    }

    /// Brings pages back that are busy and were out; returns how many from the first on came. The others are out again.
    fn bring(&self, page: usize, len: usize) -> usize {
        let mut came = 0;
        if let Some(mut decoder) = Taken::take() {
            let fault::Decoder { worker, pages } = &mut *decoder;
            let mut loaded = 0;
            let mut load =
                |at: usize| self.tier.load_in_fault(&self.index, (page + at) as u64, &mut pages[at], worker).is_ok();
            while loaded < len && load(loaded) {
                loaded += 1;
            }
            if loaded < len {
                count(&self.counters.unreadable);
            }
            came = self.copy_in(page, &pages[..loaded]);
        }
        for at in page..page + len {
            self.state(at).store(if at < page + came { BACK } else { OUT }, Ordering::Release);
        }
        self.counters.out.fetch_sub(came as u64, Ordering::Relaxed);
        self.counters.back.fetch_add(came as u64, Ordering::Relaxed);
        came
    }

    fn copy_in(&self, page: usize, data: &[Page]) -> usize {
        let mut came = 0;
        let mut patience = Patience::default();
        // A copy stays within one mapping; the program may have cut ours.
        let mut single = false;
        while came < data.len() {
            let wanted = if single { 1 } else { data.len() - came };
            let (source, len) = (data[came..].as_ptr() as u64, (wanted * PAGE_SIZE) as u64);
            // SAFETY: the pages are ours and lie one behind the other.
            let (done, error) = unsafe { self.uffd.copy(self.addr(page + came), source, len, uffd::DONTWAKE) };
            came += done as usize / PAGE_SIZE;
            match error {
                None => {}
                Some(Errno(libc::EAGAIN | libc::ENOMEM)) if !patience.ended() => patience.wait(),
                Some(Errno(libc::ENOENT)) if !single => single = true,
                Some(_) => break,
            }
        }
        came
    }

    /// Reads a byte of each page, which brings those that are absent. Not with signals blocked.
    pub(super) fn touch(&self, pages: Range<usize>) {
        if !self.usable() {
            return;
        }
        for page in pages {
            // SAFETY: a byte of the mapping; volatile, because the read is what counts.
            unsafe { (self.addr(page) as *const u8).read_volatile() };
        }
    }

    pub(super) fn unpark(&self, pages: Range<usize>) -> Result<u64, Unreadable> {
        let mut brought = 0;
        let mut lost: Option<Unreadable> = None;
        if !self.usable() {
            return Ok(0);
        }
        let mut page = pages.start;
        while page < pages.end {
            // A short time each: signals wait.
            let _quiet = Blocked::all();
            let state = self.state(page);
            match state.load(Ordering::Acquire) {
                OUT if state.compare_exchange(OUT, BUSY, Ordering::Acquire, Ordering::Relaxed).is_ok() => {
                    let len = self.claim_behind(page, FAULT_PAGES_MAX.min(pages.end - page));
                    let came = self.bring(page, len);
                    brought += came as u64;
                    page += came;
                    if came == 0 {
                        lost.get_or_insert(Unreadable { first: page * PAGE_SIZE, pages: 0 }).pages += 1;
                        page += 1;
                    }
                }
                HERE | BACK => page += 1,
                // Somebody has it in hand: when that is over, it is here or out.
                _ => self.wait_for(page),
            }
        }
        let end = pages.end;
        for chunk in pages.start / CHUNK..end.div_ceil(CHUNK) {
            let _quiet = Blocked::all();
            let mut parking = lock(&self.parking);
            let all = chunk * CHUNK..((chunk + 1) * CHUNK).min(self.pages());
            self.sweep(all.clone());
            let out = |page| self.state(page).load(Ordering::Acquire) == OUT;
            if parking.missing[chunk] && !all.clone().any(out) {
                // Nothing goes out while we have `parking`: absent pages are the kernel's again.
                let range = self.addresses(&all);
                let released = self.uffd.unregister(range).and_then(|()| self.uffd.register(range, uffd::MODE_WP));
                parking.missing[chunk] = released.is_err() && parking.missing[chunk];
            }
        }
        lost.map_or(Ok(brought), Err)
    }

    fn wait_for(&self, page: usize) {
        let mut patience = Patience::default();
        while matches!(self.state(page).load(Ordering::Acquire), BUSY | FROZEN) {
            patience.wait();
        }
    }

    // Out: with `parking` and with signals blocked.

    /// Takes a page into the parker's hands; what it was.
    fn take(&self, page: usize) -> u8 {
        let state = self.state(page);
        loop {
            match state.load(Ordering::Acquire) {
                BUSY | FROZEN => self.wait_for(page),
                before => {
                    if state.compare_exchange(before, FROZEN, Ordering::Acquire, Ordering::Relaxed).is_ok() {
                        return before;
                    }
                }
            }
        }
    }

    /// Discards the old entries of pages that came back.
    fn sweep(&self, pages: Range<usize>) {
        let swept =
            |page: &usize| self.state(*page).compare_exchange(BACK, HERE, Ordering::AcqRel, Ordering::Relaxed).is_ok();
        for_runs(pages.filter(swept), usize::MAX, |run| {
            self.tier.discard(REGION, run.start as u64..run.end as u64);
        });
    }

    /// Discards the entry of a page that was stored and did not go out.
    fn forget(&self, page: usize) {
        match self.take(page) {
            OUT => self.state(page).store(OUT, Ordering::Release),
            _ => {
                self.tier.discard(REGION, page as u64..page as u64 + 1);
                self.state(page).store(HERE, Ordering::Release);
            }
        }
    }

    pub(super) fn park(&self, pages: Range<usize>, effort: Effort) -> Parked {
        let mut parked = Parked::default();
        for start in pages.clone().step_by(BATCH) {
            if !self.usable() {
                break;
            }
            // A short time each: signals wait.
            let _quiet = Blocked::all();
            let mut parking = lock(&self.parking);
            let some = start..(start + BATCH).min(pages.end);
            self.sweep(some.clone());
            let mut chosen = Vec::with_capacity(some.len());
            scan(&parking.pagemap, self.addresses(&some), resident(), |range| chosen.extend(self.pages_in(range)));
            self.put_out(&mut parking, &chosen, effort, &mut parked);
        }
        parked
    }

    fn pages_in(&self, range: Addresses) -> Range<usize> {
        let page = |addr: u64| (addr - self.memory.addr()) as usize / PAGE_SIZE;
        page(range.start)..page(range.end)
    }

    /// Puts pages out, in order: at most [`BATCH`].
    fn put_out(&self, parking: &mut Parking, chosen: &[usize], effort: Effort, parked: &mut Parked) {
        debug_assert!(chosen.len() <= BATCH);
        let mut places = Vec::with_capacity(chosen.len());
        {
            let pins = lock(&self.pins);
            let free = |page: &&usize| !pins.all.iter().any(|pin| pin.pages.contains(page));
            places.extend(chosen.iter().filter(free).copied());
        }
        parked.pinned += (chosen.len() - places.len()) as u64;
        let mut copied = 0;
        for_runs(places.iter().copied(), BATCH, |run| {
            if copied < BATCH && self.copy_out(parking, &run, copied) {
                copied += run.len();
            } else {
                copied = usize::MAX;
            }
        });
        if copied != places.len() {
            // A page went between the look and the copy: it is not silent.
            parked.busy += places.len() as u64;
            return;
        }
        // SAFETY: the mapping is that long, and nobody writes to it before we return.
        let copies = unsafe { std::slice::from_raw_parts(parking.copies.as_ptr().cast::<Page>(), places.len()) };
        let pages: Vec<(u64, &Page)> = places.iter().map(|page| *page as u64).zip(copies).collect();
        let stored = self.tier.store_many(REGION, &pages, effort);
        // Runs of pages that are stored, with the place of their copies.
        let mut place = 0;
        while place < places.len() {
            let first = place;
            let mut end = place;
            while end < places.len()
                && end - first < FREEZE
                && stored[end].is_ok()
                && places[end] == places[first] + (end - first)
                && places[end] / CHUNK == places[first] / CHUNK
            {
                end += 1;
            }
            if end == first {
                parked.refused += 1;
                place += 1;
                continue;
            }
            self.freeze(parking, places[first]..places[end - 1] + 1, &copies[first..end], parked);
            place = end;
        }
    }

    /// Copies pages to the file of copies from `place` on, by the kernel: a page that is gone is an error and no fault.
    fn copy_out(&self, parking: &Parking, run: &Range<usize>, place: usize) -> bool {
        let (mut from, end) = (self.addr(run.start), self.addr(run.end));
        let mut to = (place * PAGE_SIZE) as u64;
        while from < end {
            // SAFETY: the kernel reads the region's memory and reports what it cannot read.
            match unsafe { syscall!(libc::SYS_pwrite64, parking.copies_fd.raw(), from, end - from, to) } {
                Ok(bytes) if bytes > 0 => {
                    from += bytes as u64;
                    to += bytes as u64;
                }
                _ => return false,
            }
        }
        true
    }

    /// Takes pages of one chunk away that equal their copies, which are stored; the others stay, and their entries go.
    fn freeze(&self, parking: &mut Parking, run: Range<usize>, copies: &[Page], parked: &mut Parked) {
        let chunk = run.start / CHUNK;
        if !parking.missing[chunk] {
            let all = chunk * CHUNK..((chunk + 1) * CHUNK).min(self.pages());
            let range = self.addresses(&all);
            parking.missing[chunk] = self.uffd.register(range, uffd::MODE_MISSING | uffd::MODE_WP).is_ok();
        }
        // Held until the pages are out or back: who pins meanwhile waits, and then finds and brings them.
        let pins = lock(&self.pins);
        let pinned = pins.all.iter().any(|pin| pin.pages.start < run.end && run.start < pin.pages.end);
        if pinned || !parking.missing[chunk] {
            drop(pins);
            parked.busy += run.len() as u64;
            run.for_each(|page| self.forget(page));
            return;
        }
        for page in run.clone() {
            self.take(page);
        }
        let base = parking.staging.addr();
        let mut at = 0;
        let mut patience = Patience::default();
        let mut single = false;
        while at < run.len() {
            let end = if single { at + 1 } else { run.len() };
            let source = Addresses { start: self.addr(run.start + at), end: self.addr(run.start + end) };
            let mode = uffd::MOVE_ALLOW_SRC_HOLES | uffd::DONTWAKE;
            let (moved, error) = self.uffd.move_pages(base + (at * PAGE_SIZE) as u64, source, mode);
            at += moved as usize / PAGE_SIZE;
            match error {
                None => {}
                Some(Errno(libc::EAGAIN)) if !patience.ended() => patience.wait(),
                Some(Errno(libc::EINVAL)) if !single => single = true,
                // In a device's hands, say: it stays.
                Some(_) => at += 1,
            }
        }
        let mut staged = [0_u8; FREEZE];
        // SAFETY: the kernel writes one byte for each page of the run.
        let known = unsafe { syscall!(libc::SYS_mincore, base, run.len() * PAGE_SIZE, staged.as_mut_ptr()) }.is_ok();
        let mut went = 0;
        for (at, page) in run.clone().enumerate() {
            // SAFETY: the page is in the staging area, where nobody but us comes.
            let frozen = || unsafe { &*((base + (at * PAGE_SIZE) as u64) as *const Page) };
            if known && staged[at] & 1 != 0 && *frozen() == copies[at] {
                went += 1;
                self.counters.out.fetch_add(1, Ordering::Relaxed);
                self.state(page).store(OUT, Ordering::Release);
            } else {
                self.move_back(page, base + (at * PAGE_SIZE) as u64);
                self.tier.discard(REGION, page as u64..page as u64 + 1);
                self.state(page).store(HERE, Ordering::Release);
            }
        }
        drop(pins);
        self.counters.parked.fetch_add(went, Ordering::Relaxed);
        parked.pages += went;
        parked.busy += run.len() as u64 - went;
        // SAFETY: the staging area is ours; what is there is out.
        let _ = unsafe { mem::advise(base, (FREEZE * PAGE_SIZE) as u64, libc::MADV_DONTNEED) };
        if let Some(ages) = &parking.ages {
            // SAFETY: a byte for each page; nobody else looks at it without `parking`.
            let ages = unsafe { std::slice::from_raw_parts_mut(ages.as_ptr(), self.pages()) };
            ages[run].iter_mut().for_each(|age| *age &= !AGE);
        }
    }

    /// Moves a staged page back to where it was, if there is one.
    fn move_back(&self, page: usize, from: u64) {
        let range = Addresses::pages_from(from, 1);
        let mode = uffd::MOVE_ALLOW_SRC_HOLES | uffd::DONTWAKE;
        let mut patience = Patience::default();
        loop {
            match self.uffd.move_pages(self.addr(page), range, mode).1 {
                Some(Errno(libc::EAGAIN | libc::ENOMEM | libc::EBUSY)) => patience.wait(),
                // Marked for write protection, which a move does not take for empty, but a copy does; or nothing there.
                Some(Errno(libc::EEXIST)) => {
                    let mut staged = 0_u8;
                    // SAFETY: the kernel writes one byte.
                    let known =
                        unsafe { syscall!(libc::SYS_mincore, from, PAGE_SIZE, std::ptr::from_mut(&mut staged)) };
                    if known.is_err() || staged & 1 == 0 {
                        return;
                    }
                    // SAFETY: the page is in the staging area.
                    match unsafe { self.uffd.copy(self.addr(page), from, PAGE_SIZE as u64, uffd::DONTWAKE) }.1 {
                        Some(Errno(libc::EAGAIN | libc::ENOMEM)) => patience.wait(),
                        _ => return,
                    }
                }
                _ => return,
            }
        }
    }

    pub(super) fn cool(&self, silent: u8) -> Parked {
        let mut parked = Parked::default();
        if !self.usable() {
            return parked;
        }
        let _quiet = Blocked::all();
        let mut parking = lock(&self.parking);
        if parking.ages.is_none() {
            parking.ages = own(self.pages()).ok();
        }
        let Some(ages) = &parking.ages else { return parked };
        // SAFETY: a byte for each page; nobody else looks at it without `parking`.
        let ages = unsafe { std::slice::from_raw_parts_mut(ages.as_ptr(), self.pages()) };
        for chunk in (0..parking.missing.len()).filter(|chunk| parking.missing[*chunk]) {
            let all = chunk * CHUNK..((chunk + 1) * CHUNK).min(self.pages());
            for page in all.clone() {
                let age = &mut ages[page];
                match self.state(page).load(Ordering::Acquire) {
                    OUT => *age += u8::from(*age & AGE < AGE),
                    BACK => {
                        let strikes = match *age / STRIKE {
                            strikes if *age & AGE <= silent => (strikes + 1).min(STRIKES_MAX),
                            strikes => strikes.saturating_sub(1),
                        };
                        *age = strikes * STRIKE;
                    }
                    _ => {}
                }
            }
            self.sweep(all);
        }
        let everything = self.addresses(&(0..self.pages()));
        let mut query = resident();
        query.all_of |= pagemap::WRITTEN;
        query.flags = pagemap::PROTECT;
        scan(&parking.pagemap, everything, query, |range| {
            ages[self.pages_in(range)].iter_mut().for_each(|age| *age &= !AGE);
        });
        let mut chosen = Vec::new();
        scan(&parking.pagemap, everything, resident(), |range| {
            for page in self.pages_in(range) {
                let age = &mut ages[page];
                *age += u8::from(*age & AGE < AGE);
                let wanted = u32::from(silent) << (*age / STRIKE);
                // One since it was seen to be written.
                if u32::from(*age & AGE) > wanted.min(u32::from(AGE) - 1) {
                    chosen.push(page);
                }
            }
        });
        for some in chosen.chunks(BATCH) {
            self.put_out(&mut parking, some, Effort::Fast, &mut parked);
        }
        drop(parking);
        self.tier.tick();
        parked
    }

    pub(super) fn discard(&self, pages: Range<usize>) {
        if !self.usable() {
            return;
        }
        let _quiet = Blocked::all();
        let _parking = lock(&self.parking);
        for start in pages.clone().step_by(CHUNK) {
            let some = start..(start + CHUNK).min(pages.end);
            let out = some.clone().filter(|page| self.take(*page) == OUT).count();
            self.counters.out.fetch_sub(out as u64, Ordering::Relaxed);
            let range = self.addresses(&some);
            // SAFETY: the caller has the region to itself and wants zeros.
            let _ = unsafe { mem::advise(range.start, range.len(), libc::MADV_DONTNEED) };
            self.tier.discard(REGION, some.start as u64..some.end as u64);
            some.for_each(|page| self.state(page).store(HERE, Ordering::Release));
        }
    }

    pub(super) fn pin(&self, pages: Range<usize>) -> u64 {
        if !self.is_ours() {
            return 0;
        }
        let _quiet = Blocked::all();
        let mut pins = lock(&self.pins);
        pins.next += 1;
        let id = pins.next;
        pins.all.push(Pin { id, pages });
        id
    }

    pub(super) fn unpin(&self, id: u64) {
        if self.is_ours() {
            let _quiet = Blocked::all();
            lock(&self.pins).all.retain(|pin| pin.id != id);
        }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        fault::leave(self);
    }
}

/// Pages of the program's own that are here, and not the kernel's zero page.
fn resident() -> pagemap::Query {
    let all_of = pagemap::PRESENT | pagemap::PFNZERO;
    pagemap::Query { all_of, inverted: pagemap::PFNZERO, report: pagemap::PRESENT, ..Default::default() }
}

/// Calls `f` with the parts of `range` whose pages match; a scan that fails finds nothing, and nothing goes out.
fn scan(pagemap: &Fd, range: Addresses, query: pagemap::Query, mut f: impl FnMut(Addresses)) {
    let mut found = [pagemap::Region::default(); 128];
    let mut start = range.start;
    while start < range.end {
        let part = Addresses { start, end: range.end };
        let Ok((count, walked)) = pagemap::scan(pagemap, part, query, &mut found) else { return };
        found[..count].iter().for_each(|region| f(Addresses { start: region.start, end: region.end }));
        if walked <= start {
            return;
        }
        start = walked;
    }
}

/// Calls `f` with runs of neighbours, each at most `max` long.
fn for_runs(pages: impl Iterator<Item = usize>, max: usize, mut f: impl FnMut(Range<usize>)) {
    let mut run = 0..0;
    for page in pages {
        if page == run.end && !run.is_empty() && run.len() < max {
            run.end += 1;
            continue;
        }
        if !run.is_empty() {
            f(run);
        }
        run = page..page + 1;
    }
    if !run.is_empty() {
        f(run);
    }
}
