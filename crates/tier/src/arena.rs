//! The arena: slabs of size-class slots in a memory file that outlives its owner.
//!
//! The file holds only the page words, the slab table and the contents. Which
//! slots are free is known to the owner (one bit per slot), and a successor
//! finds it again. Memory is requested from the kernel before it is touched,
//! 16 KiB at a time, so that a shortage is an error here and never a SIGBUS
//! later. An empty slab is freed by punching a hole. A thread that takes a slot
//! close to the end of a slab's memory requests the next piece after it has
//! unlocked the class, so that later threads need not wait for it.
//!
//! All words are atomics: a reader may read a slot that is being reused. What
//! it read counts only after the version check in [`crate::tier`].

use crate::error::{AdoptError, CreateError};
use crate::layout::{
    CLASS_BYTES, CLASSES, HEADER_WORDS, KIND_CONTENTS, KIND_FREE, KIND_LEAVES, LEAF_LINES, LEAF_PAGES, LEAVES_PER_SLAB,
    SLAB_BYTES, SLAB_WORDS, SLABS_MAX, TABLE_WORD, class_of, first_slab, slots_per_slab, superblock,
};
use pagefold_os::Errno;
use pagefold_os::fd::Fd;
use pagefold_os::mem::Mapping;
use pagefold_os::sync::lock;
use std::collections::{BTreeSet, HashMap};
use std::sync::Mutex;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};

/// Bytes requested from the kernel at a time.
const STEP_BYTES: usize = 16 * 1024;
/// If fewer bytes of a slab's memory are left after a slot, the next piece is requested.
const AHEAD_BYTES: usize = 6 * 1024;

/// Why there is no slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NoSlot {
    /// The limit is reached.
    Full,
    /// The kernel refused memory.
    Kernel(Errno),
}

/// Whether an allocation may exceed the limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReserveClass {
    /// Stays within the limit.
    Normal,
    /// May exceed the limit by a reserve: for leaves, and for the cleaner, which frees more than it allocates.
    Reserve,
}

/// The slots of one slab.
#[derive(Debug)]
struct Slab {
    used_bits: Vec<u64>,
    used: usize,
    /// All slots below this one are used.
    hint: usize,
    /// Bytes with memory, from the slab's start.
    backed: usize,
    /// Being emptied: no slot is allocated from it.
    draining: bool,
    /// A thread is requesting more memory for it, so it must not be freed.
    growing: bool,
}

/// A piece of memory that is being requested. It is counted as held.
struct Growth {
    slab: usize,
    from: usize,
    bytes: usize,
}

impl Slab {
    fn new(slots: usize) -> Slab {
        Slab { used_bits: vec![0; slots.div_ceil(64)], used: 0, hint: 0, backed: 0, draining: false, growing: false }
    }

    /// Marks the slot used; false if it was already.
    fn take(&mut self, slot: usize) -> bool {
        let bit = 1 << (slot % 64);
        let free = self.used_bits[slot / 64] & bit == 0;
        self.used_bits[slot / 64] |= bit;
        self.used += usize::from(free);
        free
    }

    /// One past the last used slot.
    fn end(&self) -> usize {
        let last = self.used_bits.iter().rposition(|bits| *bits != 0);
        last.map_or(0, |word| word * 64 + 64 - self.used_bits[word].leading_zeros() as usize)
    }

    fn first_free(&self, slots: usize) -> Option<usize> {
        (self.hint / 64..self.used_bits.len())
            .map(|word| word * 64 + self.used_bits[word].trailing_ones() as usize)
            .find(|slot| slot % 64 != 0 || self.used_bits.get(slot / 64).is_some_and(|bits| bits & 1 == 0))
            .filter(|slot| *slot < slots)
    }
}

/// The slabs of one class.
#[derive(Debug, Default)]
struct Class {
    slabs: HashMap<usize, Slab>,
    current: Option<usize>,
    /// (slots used, slab) of the slabs with free slots, without the current one and those being emptied.
    partial: BTreeSet<(usize, usize)>,
}

#[derive(Debug)]
struct FreeSlabs {
    returned: Vec<usize>,
    next: usize,
}

/// Bytes by use, for the reports.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ArenaUsage {
    pub held: u64,
    pub free_slots: u64,
    pub slab_tails: u64,
    pub slabs: u64,
    pub leaf_bytes: u64,
    pub metadata: u64,
}

/// The arena.
#[derive(Debug)]
pub(crate) struct Arena {
    fd: Fd,
    map: Mapping,
    slabs: usize,
    bytes_max: u64,
    held: AtomicU64,
    free_slabs: Mutex<FreeSlabs>,
    /// The size classes, then the leaves.
    classes: [Mutex<Class>; CLASSES + 1],
    /// Test hook: the error number of requests for kernel memory, 0 for none.
    pub(crate) fail_backing: AtomicI32,
}

/// Index of the leaves among the classes.
const LEAVES: usize = CLASSES;

const fn slots_of(class: usize) -> usize {
    if class == LEAVES { LEAVES_PER_SLAB } else { slots_per_slab(class) }
}

/// The end of the memory that `slot` needs, from the slab's start. A leaf slab needs all of it.
const fn slot_end(class: usize, slot: usize) -> usize {
    if class == LEAVES { SLAB_BYTES } else { (slot + 1) * CLASS_BYTES[class] }
}

/// Slabs of an arena that may hold `bytes_max`: a quarter more for contents that are being moved, and the fixed part.
pub(crate) fn slabs_for(bytes_max: u64) -> usize {
    let slabs = (bytes_max + bytes_max / 4).div_ceil(SLAB_BYTES as u64) as usize + 2 * CLASSES;
    slabs + first_slab(slabs)
}

impl Arena {
    /// Creates the memory file.
    pub(crate) fn create(bytes_max: u64) -> Result<Arena, CreateError> {
        if !(4 << 20..=200 << 30).contains(&bytes_max) {
            return Err(CreateError::Size { bytes: bytes_max });
        }
        let slabs = slabs_for(bytes_max);
        let fd =
            pagefold_os::memfd::create(c"pagefold-tier", (slabs * SLAB_BYTES) as u64).map_err(CreateError::Memory)?;
        pagefold_os::memfd::set_mode(&fd, 0o600).map_err(CreateError::Memory)?;
        let seals = pagefold_os::memfd::SEAL_SHRINK | pagefold_os::memfd::SEAL_GROW;
        pagefold_os::memfd::add_seals(&fd, seals).map_err(CreateError::Memory)?;
        let arena = Arena::map(fd, slabs, bytes_max).map_err(CreateError::Memory)?;
        arena.allocate_range(0, STEP_BYTES).map_err(CreateError::Memory)?;
        arena.allocate_range(TABLE_WORD, slabs * 8).map_err(CreateError::Memory)?;
        Ok(arena)
    }

    /// Maps a predecessor's file; the caller checks its content.
    pub(crate) fn open(fd: Fd) -> Result<Arena, AdoptError> {
        let seals = pagefold_os::memfd::seals(&fd).map_err(|_| AdoptError::Format("not a memory file"))?;
        if seals & pagefold_os::memfd::SEAL_SHRINK == 0 {
            return Err(AdoptError::Format("not sealed against shrinking"));
        }
        let (len, _) = pagefold_os::memfd::len_and_inode(fd.raw()).map_err(AdoptError::Memory)?;
        let slabs = (len / SLAB_BYTES as u64) as usize;
        if len % SLAB_BYTES as u64 != 0 || !(first_slab(slabs) + 1..=SLABS_MAX).contains(&slabs) {
            return Err(AdoptError::Format("length"));
        }
        Arena::map(fd, slabs, 0).map_err(AdoptError::Memory)
    }

    fn map(fd: Fd, slabs: usize, bytes_max: u64) -> Result<Arena, Errno> {
        let prot = libc::PROT_READ | libc::PROT_WRITE;
        let map = Mapping::file(fd.raw(), 0, slabs * SLAB_BYTES, prot, libc::MAP_SHARED | libc::MAP_NORESERVE)?;
        for advice in [libc::MADV_DONTDUMP, libc::MADV_DONTFORK] {
            // SAFETY: the advice does not change the bytes of the range. Clients' memory must not be in a core dump of
            // this process, and a child does not need it; a refusal is harmless.
            let _ = unsafe { pagefold_os::mem::advise(map.addr(), map.len() as u64, advice) };
        }
        Ok(Arena {
            fd,
            map,
            slabs,
            bytes_max,
            held: AtomicU64::new(0),
            free_slabs: Mutex::new(FreeSlabs { returned: Vec::new(), next: first_slab(slabs) }),
            classes: std::array::from_fn(|_| Mutex::default()),
            fail_backing: AtomicI32::new(0),
        })
    }

    /// Sets the limit, read from the superblock.
    pub(crate) fn set_bytes_max(&mut self, bytes_max: u64) {
        self.bytes_max = bytes_max;
    }

    /// The memory file.
    pub(crate) fn fd(&self) -> &Fd {
        &self.fd
    }

    /// Slabs, used or not.
    pub(crate) fn slabs(&self) -> usize {
        self.slabs
    }

    /// Bytes of memory held.
    pub(crate) fn held(&self) -> u64 {
        self.held.load(Ordering::Relaxed)
    }

    /// Bytes it may hold.
    pub(crate) fn bytes_max(&self) -> u64 {
        self.bytes_max
    }

    /// All words.
    pub(crate) fn words(&self) -> &[AtomicU64] {
        // SAFETY: the mapping is readable and writable, aligned to a page, `slabs * SLAB_WORDS` words long, and lives
        // as long as `self`. The file is sealed against shrinking, so no access lies beyond its end. Another process that
        // maps the file may write to it: the words are atomics, and every value of a word is valid.
        unsafe { std::slice::from_raw_parts(self.map.as_ptr().cast::<AtomicU64>(), self.slabs * SLAB_WORDS) }
    }

    /// The word at offset `at`.
    pub(crate) fn word(&self, at: usize) -> &AtomicU64 {
        &self.words()[at]
    }

    /// Key of leaf `leaf`.
    pub(crate) fn leaf_key(&self, leaf: u32) -> &AtomicU64 {
        self.word((leaf >> 12) as usize * SLAB_WORDS + (leaf & 0xfff) as usize)
    }

    /// The page words of leaf `leaf`.
    pub(crate) fn leaf(&self, leaf: u32) -> &[AtomicU64] {
        let at = (leaf >> 12) as usize * SLAB_WORDS + LEAF_LINES + (leaf & 0xfff) as usize * LEAF_PAGES;
        &self.words()[at..at + LEAF_PAGES]
    }

    /// Allocates a leaf; its key and words are 0.
    pub(crate) fn new_leaf(&self, reserve_class: ReserveClass) -> Result<u32, NoSlot> {
        let (slab, slot) = self.take_slot(LEAVES, reserve_class)?;
        Ok((slab << 12 | slot) as u32)
    }

    /// Frees a leaf; the caller has set its key and words to 0.
    pub(crate) fn free_leaf(&self, leaf: u32) {
        self.free_slot(LEAVES, (leaf >> 12) as usize, (leaf & 0xfff) as usize);
    }

    /// Allocates a slot for a header and `payload` bytes; returns its word offset.
    pub(crate) fn new_content(&self, payload: usize, reserve_class: ReserveClass) -> Result<usize, NoSlot> {
        let class = class_of(HEADER_WORDS * 8 + payload);
        let (slab, slot) = self.take_slot(class, reserve_class)?;
        Ok(slab * SLAB_WORDS + slot * (CLASS_BYTES[class] / 8))
    }

    /// Frees the slot at word offset `at`.
    pub(crate) fn free_content(&self, at: usize) {
        let slab = at / SLAB_WORDS;
        if let Some(class) = self.class_of_slab(slab) {
            self.free_slot(class, slab, at % SLAB_WORDS / (CLASS_BYTES[class] / 8));
        }
    }

    /// Class of the content slab `slab`; `None` if it is not a content slab.
    pub(crate) fn class_of_slab(&self, slab: usize) -> Option<usize> {
        let word = self.words().get(TABLE_WORD + slab)?.load(Ordering::Acquire);
        let class = (word >> 8) as usize;
        (slab >= first_slab(self.slabs) && slab < self.slabs && word & 0xff == KIND_CONTENTS && class < CLASSES)
            .then_some(class)
    }

    /// Returns true if `at` is the start of a slot of a content slab that can hold `payload` bytes of payload.
    pub(crate) fn is_slot(&self, at: u64, payload: usize) -> bool {
        let Some(class) = usize::try_from(at).ok().and_then(|at| self.class_of_slab(at / SLAB_WORDS)) else {
            return false;
        };
        let (offset, words) = (at as usize % SLAB_WORDS, CLASS_BYTES[class] / 8);
        offset % words == 0
            && offset / words < slots_per_slab(class)
            && HEADER_WORDS * 8 + payload <= CLASS_BYTES[class]
    }

    fn take_slot(&self, index: usize, reserve_class: ReserveClass) -> Result<(usize, usize), NoSlot> {
        let mut class = lock(&self.classes[index]);
        let (slab, slot) = self.take_slot_in(&mut class, index, reserve_class)?;
        let growth = class.slabs.get_mut(&slab).and_then(|state| self.start_growing(index, state, slab, slot));
        drop(class);
        if let Some(growth) = growth {
            self.grow(index, &growth);
        }
        Ok((slab, slot))
    }

    fn take_slot_in(
        &self,
        class: &mut Class,
        index: usize,
        reserve_class: ReserveClass,
    ) -> Result<(usize, usize), NoSlot> {
        let slots = slots_of(index);
        let slab = match class.current.filter(|slab| class.slabs.get(slab).is_some_and(|slab| slab.used < slots)) {
            Some(slab) => slab,
            // The fullest first, because emptier ones may become empty.
            None => match class.partial.pop_last() {
                Some((_, slab)) => slab,
                None => {
                    let slab = self.new_slab(index)?;
                    class.slabs.insert(slab, Slab::new(slots));
                    slab
                }
            },
        };
        class.current = Some(slab);
        let reserve = if reserve_class == ReserveClass::Reserve { (4 << 20) + self.bytes_max / 64 } else { 0 };
        match self.take_slot_of(index, class.slabs.entry(slab).or_insert_with(|| Slab::new(slots)), slab, reserve) {
            Ok(slot) => Ok((slab, slot)),
            Err(error) => {
                // No new memory: look for a free slot in memory that is held already.
                let has_backed_slot = |(_, slab): &&(usize, usize)| {
                    let free =
                        class.slabs.get(slab).and_then(|state| state.first_free(slots).map(|slot| (state, slot)));
                    free.is_some_and(|(state, slot)| slot_end(index, slot) <= state.backed)
                };
                let (used, other) = *class.partial.iter().rev().find(has_backed_slot).ok_or(error)?;
                class.partial.remove(&(used, other));
                class.current = Some(other);
                self.file_slab(class, index, slab);
                let state = class.slabs.get_mut(&other).ok_or(error)?;
                Ok((other, self.take_slot_of(index, state, other, reserve)?))
            }
        }
    }

    /// Files a slab that is no longer the current one, or no longer growing: frees it if empty, else offers its free slots.
    fn file_slab(&self, class: &mut Class, index: usize, slab: usize) {
        let Some(state) = class.slabs.get(&slab).filter(|state| class.current != Some(slab) && !state.growing) else {
            return;
        };
        if state.used == 0 {
            let backed = class.slabs.remove(&slab).map_or(0, |slab| slab.backed);
            self.release_slab(slab, backed);
        } else if state.used < slots_of(index) && !state.draining {
            class.partial.insert((state.used, slab));
        }
    }

    /// Takes the first free slot of a slab, and requests memory for it if needed.
    fn take_slot_of(&self, index: usize, state: &mut Slab, slab: usize, reserve: u64) -> Result<usize, NoSlot> {
        let slot = state.first_free(slots_of(index)).ok_or(NoSlot::Full)?;
        let end = slot_end(index, slot);
        if end > state.backed {
            let bytes = (end - state.backed).next_multiple_of(STEP_BYTES).min(SLAB_BYTES - state.backed);
            if self.held() + bytes as u64 > self.bytes_max + reserve {
                return Err(NoSlot::Full);
            }
            self.populate(slab * SLAB_BYTES + state.backed, bytes).map_err(NoSlot::Kernel)?;
            self.held.fetch_add(bytes as u64, Ordering::Relaxed);
            state.backed += bytes;
        }
        state.take(slot);
        state.hint = slot + 1;
        Ok(slot)
    }

    /// Decides whether a slab grows after `slot` was taken from it, because that slot is close to the end of its memory.
    fn start_growing(&self, index: usize, state: &mut Slab, slab: usize, slot: usize) -> Option<Growth> {
        let bytes = STEP_BYTES.min(SLAB_BYTES - state.backed);
        let close = slot_end(index, slot) + AHEAD_BYTES > state.backed;
        if state.growing || bytes == 0 || !close || self.held() + bytes as u64 > self.bytes_max {
            return None;
        }
        state.growing = true;
        self.held.fetch_add(bytes as u64, Ordering::Relaxed);
        Some(Growth { slab, from: state.backed, bytes })
    }

    /// Requests the memory for the slab. If it is refused, a later allocation that needs it reports the error.
    fn grow(&self, index: usize, growth: &Growth) {
        let &Growth { slab, from, bytes } = growth;
        let is_populated = self.populate(slab * SLAB_BYTES + from, bytes).is_ok();
        let mut class = lock(&self.classes[index]);
        let mut grown = 0;
        if let Some(state) = class.slabs.get_mut(&slab) {
            state.growing = false;
            // Another thread may have needed, and requested, a part of it meanwhile.
            if is_populated && from + bytes > state.backed {
                grown = from + bytes - state.backed;
                state.backed += grown;
            }
        }
        self.held.fetch_sub((bytes - grown) as u64, Ordering::Relaxed);
        self.file_slab(&mut class, index, slab);
    }

    fn new_slab(&self, index: usize) -> Result<usize, NoSlot> {
        let mut free = lock(&self.free_slabs);
        let slab = match free.returned.pop() {
            Some(slab) => slab,
            None if free.next < self.slabs => {
                free.next += 1;
                free.next - 1
            }
            None => return Err(NoSlot::Full),
        };
        let kind = if index == LEAVES { KIND_LEAVES } else { KIND_CONTENTS | (index as u64) << 8 };
        // Before any slot of it is used: a successor that sees a page word also sees the kind of the slab it names.
        self.word(TABLE_WORD + slab).store(kind, Ordering::Release);
        Ok(slab)
    }

    fn free_slot(&self, index: usize, slab: usize, slot: usize) {
        let mut class = lock(&self.classes[index]);
        let class = &mut *class;
        let Some(state) = class.slabs.get_mut(&slab) else { return };
        let before = state.used;
        state.used_bits[slot / 64] &= !(1 << (slot % 64));
        state.used -= 1;
        state.hint = state.hint.min(slot);
        class.partial.remove(&(before, slab));
        self.file_slab(class, index, slab);
    }

    /// Returns an empty slab to the kernel.
    fn release_slab(&self, slab: usize, backed: usize) {
        self.word(TABLE_WORD + slab).store(KIND_FREE, Ordering::Release);
        punch(&self.fd, (slab * SLAB_BYTES) as u64, SLAB_BYTES as u64);
        self.held.fetch_sub(backed as u64, Ordering::Relaxed);
        lock(&self.free_slabs).returned.push(slab);
    }

    /// Returns the error of the test hook, if it is set.
    fn check_fail_hook(&self) -> Result<(), Errno> {
        match self.fail_backing.load(Ordering::Relaxed) {
            0 => Ok(()),
            errno => Err(Errno(errno)),
        }
    }

    /// Requests the memory of a range and maps it, so that later accesses do not fault.
    fn populate(&self, at: usize, bytes: usize) -> Result<(), Errno> {
        self.check_fail_hook()?;
        loop {
            // SAFETY: the range is a part of `self.map`; the advice does not change its bytes.
            let result = unsafe {
                pagefold_os::mem::advise(self.map.addr() + at as u64, bytes as u64, libc::MADV_POPULATE_WRITE)
            };
            match result {
                Err(Errno(libc::EINTR)) => {}
                // An access would raise SIGBUS.
                Err(Errno(libc::EFAULT)) => return Err(Errno(libc::ENOMEM)),
                result => return result,
            }
        }
    }

    /// Requests the memory of a range, parts of which may have it already.
    fn allocate_range(&self, word: usize, bytes: usize) -> Result<(), Errno> {
        self.check_fail_hook()?;
        loop {
            // SAFETY: fallocate(2) takes no pointer, and without a mode it changes no byte of the file.
            let result = unsafe { libc::fallocate64(self.fd.raw(), 0, (word * 8) as i64, bytes as i64) };
            match (result, std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO)) {
                (0, _) => break,
                (_, libc::EINTR) => {}
                (_, errno) => return Err(Errno(errno)),
            }
        }
        self.held.fetch_add(bytes as u64, Ordering::Relaxed);
        Ok(())
    }

    /// Marks content slabs with mostly free slots as draining, emptiest first, at most `slabs_max`.
    ///
    /// A slab is chosen only if the free slots of the others of its class can hold its contents, so that emptying it
    /// frees memory.
    pub(crate) fn start_draining(&self, slabs_max: usize) -> usize {
        let mut count = 0;
        for index in 0..CLASSES {
            let slots = slots_of(index);
            let mut class = lock(&self.classes[index]);
            let class = &mut *class;
            let mut free: usize = class.partial.iter().map(|(used, _)| slots - used).sum();
            free += class.current.and_then(|slab| class.slabs.get(&slab)).map_or(0, |slab| slots - slab.used);
            while let Some((used, slab)) = class.partial.first().copied() {
                let Some(free_elsewhere) = free.checked_sub(slots - used) else { break };
                if count >= slabs_max || free_elsewhere < used || used * 4 > slots * 3 {
                    break;
                }
                class.partial.remove(&(used, slab));
                if let Some(state) = class.slabs.get_mut(&slab) {
                    state.draining = true;
                }
                free = free_elsewhere - used;
                count += 1;
            }
        }
        count
    }

    /// Allows allocation from slabs that could not be emptied.
    pub(crate) fn stop_draining(&self) {
        for (index, class) in self.classes.iter().enumerate() {
            let mut class = lock(class);
            let class = &mut *class;
            for (slab, state) in &mut class.slabs {
                if std::mem::take(&mut state.draining) && state.used < slots_of(index) {
                    class.partial.insert((state.used, *slab));
                }
            }
        }
    }

    /// The slabs being emptied.
    pub(crate) fn draining(&self) -> std::collections::HashSet<usize> {
        let draining = |class: &Mutex<Class>| -> Vec<usize> {
            lock(class).slabs.iter().filter(|(_, state)| state.draining).map(|(slab, _)| *slab).collect()
        };
        self.classes.iter().flat_map(draining).collect()
    }

    /// Counts what the bytes are used for.
    pub(crate) fn usage(&self) -> ArenaUsage {
        let mut usage = ArenaUsage { held: self.held(), ..ArenaUsage::default() };
        for (index, class) in self.classes.iter().enumerate() {
            let class = lock(class);
            for slab in class.slabs.values() {
                usage.slabs += 1;
                usage.metadata += (slab.used_bits.len() * 8 + size_of::<(usize, Slab)>() + 24) as u64;
                if index == LEAVES {
                    usage.leaf_bytes += slab.backed as u64;
                    continue;
                }
                let slots = slab.backed / CLASS_BYTES[index];
                usage.free_slots += (slots.saturating_sub(slab.used) * CLASS_BYTES[index]) as u64;
                usage.slab_tails += (slab.backed - slots * CLASS_BYTES[index]) as u64;
            }
        }
        usage
    }

    /// Leaf slabs of the arena, from the slab table.
    pub(crate) fn leaf_slabs(&self) -> Vec<usize> {
        (first_slab(self.slabs)..self.slabs)
            .filter(|slab| self.word(TABLE_WORD + slab).load(Ordering::Acquire) == KIND_LEAVES)
            .collect()
    }

    /// Adoption: marks the slot of a content as used; false if it was marked already.
    pub(crate) fn adopt_content(&self, at: usize) -> bool {
        let slab = at / SLAB_WORDS;
        let Some(index) = self.class_of_slab(slab) else { return false };
        self.adopt_slot(index, slab, at % SLAB_WORDS / (CLASS_BYTES[index] / 8))
    }

    /// Adoption: returns true if the slot of a content is marked.
    pub(crate) fn is_taken(&self, at: usize) -> bool {
        let slab = at / SLAB_WORDS;
        let Some(index) = self.class_of_slab(slab) else { return false };
        let slot = at % SLAB_WORDS / (CLASS_BYTES[index] / 8);
        lock(&self.classes[index])
            .slabs
            .get(&slab)
            .is_some_and(|slab| slab.used_bits[slot / 64] & 1 << (slot % 64) != 0)
    }

    /// Adoption: marks a leaf as used.
    pub(crate) fn adopt_leaf(&self, leaf: u32) -> bool {
        self.adopt_slot(LEAVES, (leaf >> 12) as usize, (leaf & 0xfff) as usize)
    }

    fn adopt_slot(&self, index: usize, slab: usize, slot: usize) -> bool {
        let slots = slots_of(index);
        let mut class = lock(&self.classes[index]);
        class.slabs.entry(slab).or_insert_with(|| Slab::new(slots)).take(slot)
    }

    /// Adoption, after every used slot was marked: frees the other slabs and counts the held memory.
    ///
    /// A used slab gets memory up to its last used slot, so that no later access can fail; the rest becomes a hole.
    pub(crate) fn finish_adoption(&self) -> Result<(), Errno> {
        let first = first_slab(self.slabs);
        let dictionaries = self.word(superblock::DICTIONARIES).load(Ordering::Relaxed) != 0;
        self.allocate_range(0, if dictionaries { SLAB_BYTES } else { STEP_BYTES })?;
        self.allocate_range(TABLE_WORD, self.slabs * 8)?;
        let mut used = std::collections::HashSet::new();
        for (index, class) in self.classes.iter().enumerate() {
            let mut class = lock(class);
            let class = &mut *class;
            for (slab, state) in &mut class.slabs {
                used.insert(*slab);
                state.backed = if index == LEAVES {
                    SLAB_BYTES
                } else {
                    (state.end() * CLASS_BYTES[index]).next_multiple_of(STEP_BYTES).min(SLAB_BYTES)
                };
                self.allocate_range(slab * SLAB_WORDS, state.backed)?;
                punch(&self.fd, (slab * SLAB_BYTES + state.backed) as u64, (SLAB_BYTES - state.backed) as u64);
                if state.used < slots_of(index) {
                    class.partial.insert((state.used, *slab));
                }
            }
        }
        // Unused slabs at the end are punched as one hole: most of them are holes already.
        let mut returned = Vec::new();
        let mut last = first;
        for slab in (first..self.slabs).rev() {
            if used.contains(&slab) {
                last = last.max(slab + 1);
            } else if slab < last {
                self.word(TABLE_WORD + slab).store(KIND_FREE, Ordering::Release);
                punch(&self.fd, (slab * SLAB_BYTES) as u64, SLAB_BYTES as u64);
                returned.push(slab);
            }
        }
        for slab in last..self.slabs {
            self.word(TABLE_WORD + slab).store(KIND_FREE, Ordering::Release);
        }
        punch(&self.fd, (last * SLAB_BYTES) as u64, ((self.slabs - last) * SLAB_BYTES) as u64);
        *lock(&self.free_slabs) = FreeSlabs { returned, next: last };
        Ok(())
    }

    /// Requests the memory of all dictionaries.
    pub(crate) fn allocate_dictionaries(&self) -> Result<(), Errno> {
        self.allocate_range(STEP_BYTES / 8, SLAB_BYTES - STEP_BYTES)
    }
}

/// Returns a range of the file to the kernel. Callers rely on it: fresh leaves must be zero, and the memory is no longer
/// counted. It cannot fail for a memory file that is not sealed against writing.
fn punch(fd: &Fd, offset: u64, len: u64) {
    if len > 0 {
        let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        // SAFETY: fallocate(2) takes no pointer; the range holds no used slot, and the words of `map` there become zero,
        // which is a valid value.
        unsafe { libc::fallocate64(fd.raw(), mode, offset as i64, len as i64) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_distinct_and_freed_memory_is_returned() {
        let arena = Arena::create(8 << 20).unwrap();
        let empty = arena.held();
        let mut slots: Vec<usize> =
            (0..3000).map(|n| arena.new_content(n % 4096, ReserveClass::Normal).unwrap()).collect();
        slots.sort_unstable();
        slots.dedup();
        assert_eq!(slots.len(), 3000);
        assert!(slots.iter().all(|at| arena.is_slot(*at as u64, 0)));
        for at in slots {
            arena.free_content(at);
        }
        // Each class keeps its current slab, nothing else.
        assert!(arena.usage().slabs <= CLASSES as u64);
        assert!(arena.held() - empty <= CLASSES as u64 * SLAB_BYTES as u64);
    }

    #[test]
    fn only_reserve_allocations_exceed_the_limit() {
        let arena = Arena::create(4 << 20).unwrap();
        while arena.new_content(4096, ReserveClass::Normal).is_ok() {}
        assert!(arena.held() <= 4 << 20);
        assert_eq!(arena.new_content(4096, ReserveClass::Normal), Err(NoSlot::Full));
        assert!(arena.new_content(4096, ReserveClass::Reserve).is_ok());
    }

    #[test]
    fn a_freed_slot_is_used_again_before_new_memory() {
        let arena = Arena::create(8 << 20).unwrap();
        let slots: Vec<usize> = (0..500).map(|_| arena.new_content(1000, ReserveClass::Normal).unwrap()).collect();
        let held = arena.held();
        slots.iter().step_by(2).for_each(|at| arena.free_content(*at));
        for _ in 0..250 {
            arena.new_content(1000, ReserveClass::Normal).unwrap();
        }
        assert_eq!(arena.held(), held);
    }
}
