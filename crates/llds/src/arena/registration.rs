//! Registration: a thread takes a record when it first needs one, finds it again by a thread-local word, and releases it
//! when it ends.
//!
//! A thread that ends gives its spans back; blocks it retired that are still read
//! stay in the record for its next owner. Dropping the last handle of an arena
//! releases all records taken through it. A thread can register until its very
//! end: destructors of other thread-locals, of pthread keys and of C++ objects
//! use stores too, as do functions passed to atexit(3).

use super::fork_sentinel::ForkSentinel;
use super::process_identity::Identity;
use super::span::Unit;
use super::thread_record::{ABANDONED, RECORDS_SPARE, THREADS_MAX, ThreadRecord, record_bytes, retired_max};
use super::{Arena, Error, Inner};
use std::cell::{Cell, RefCell};
use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Instant;

/// The calling thread's record. It cannot move to another thread.
pub struct ThreadRef<'a> {
    thread: &'a ThreadRecord,
    pub(super) owner: u64,
    _local: std::marker::PhantomData<*const ()>,
}

impl Deref for ThreadRef<'_> {
    type Target = ThreadRecord;

    #[inline]
    fn deref(&self) -> &ThreadRecord {
        self.thread
    }
}

impl ThreadRef<'_> {
    /// Returns the number that stands for this record in lock words: 1 to [`THREADS_MAX`].
    #[inline]
    pub fn owner(&self) -> u64 {
        self.owner
    }
}

/// Looks up the number of the calling thread's record in few steps, if the thread last used this arena.
pub struct CachedThread {
    id: u64,
    /// The sentinel's word, to save a load.
    word: *const AtomicU64,
    _sentinel: Arc<ForkSentinel>,
}

// SAFETY: `word` is only read, through an atomic, and `_sentinel` keeps it mapped.
unsafe impl Send for CachedThread {}

// SAFETY: `word` is only read, through an atomic, and `_sentinel` keeps it mapped.
unsafe impl Sync for CachedThread {}

impl CachedThread {
    /// Returns the number of the calling thread's record if the lookup takes few steps; otherwise call [`Arena::thread`].
    #[inline(always)]
    pub fn owner(&self) -> Option<u64> {
        let (id, owner) = LAST.get();
        // SAFETY: `_sentinel` keeps the word's page mapped.
        let is_here = ForkSentinel::says_here(unsafe { (*self.word).load(Ordering::Relaxed) });
        (id == self.id && is_here).then_some(owner)
    }
}

/// An arena's number, the number of the thread's record there, and the arena.
type Registration = (u64, u64, Weak<Inner>);

thread_local! {
    /// The number of the arena this thread used last, and the number of its record there.
    static LAST: Cell<(u64, u64)> = const { Cell::new((0, 0)) };
    /// All records of this thread. Without a destructor, so that it stays usable while other thread-locals are destroyed.
    static REGISTRATIONS: ManuallyDrop<RefCell<Vec<Registration>>> = const { ManuallyDrop::new(RefCell::new(Vec::new())) };
    static ENDING: Ending = const { Ending };
    /// Calls that this thread is inside of.
    static CALLS: Cell<u32> = const { Cell::new(0) };
    /// Whether the thread ends inside a call.
    static CUT_SHORT: Cell<bool> = const { Cell::new(false) };
}

/// A call in progress, for structures with callers that may end the process inside it, as a signal handler does that calls
/// exit(3). Thread-local destructors then run, but the interrupted call never continues. From then on the thread's records
/// are treated like those of a dead thread.
pub struct Call {
    _local: std::marker::PhantomData<*const ()>,
}

impl Call {
    /// Begins a call.
    #[inline]
    pub fn begin() -> Call {
        CALLS.set(CALLS.get() + 1);
        Call { _local: std::marker::PhantomData }
    }

    /// Whether this thread is inside a call.
    #[inline]
    pub fn is_any() -> bool {
        CALLS.get() != 0
    }
}

impl Drop for Call {
    #[inline]
    fn drop(&mut self) {
        CALLS.set(CALLS.get() - 1);
    }
}

/// Releases the main thread's records when its thread-locals are destroyed.
struct Ending;

impl Drop for Ending {
    fn drop(&mut self) {
        deregister_all();
    }
}

fn deregister_all() {
    LAST.set((0, 0));
    CUT_SHORT.set(CUT_SHORT.get() || Call::is_any());
    for (_, owner, arena) in REGISTRATIONS.with(|registrations| registrations.take()) {
        match arena.upgrade() {
            Some(inner) if CUT_SHORT.get() => inner.abandon(owner),
            Some(inner) => inner.deregister(owner, Some(Instant::now())),
            None => {}
        }
    }
}

/// Arranges that this thread's records are released when it ends, even if it registers late. Two hooks run: the
/// destructor of a thread-local, and the destructor of a pthread key, which the C library repeats while keys are set.
/// The thread that ends the process runs no key destructors: a record it takes after its thread-locals are destroyed is
/// recovered like that of a dead thread.
fn deregister_at_end() {
    unsafe extern "C" fn end(_: *mut libc::c_void) {
        deregister_all();
    }
    static KEY: OnceLock<Option<libc::pthread_key_t>> = OnceLock::new();
    let key = KEY.get_or_init(|| {
        let mut key = 0;
        // SAFETY: pthread_key_create writes only `key`; `end` ignores its argument.
        (unsafe { libc::pthread_key_create(&raw mut key, Some(end)) } == 0).then_some(key)
    });
    if let Some(key) = key {
        // SAFETY: the key is never deleted; the value is not NULL, so the destructor runs, and it is never dereferenced.
        unsafe { libc::pthread_setspecific(*key, std::ptr::without_provenance(1)) };
    }
    // Key destructors do not run for the thread that leaves main; for other threads the thread-local may be destroyed.
    // SAFETY: gettid takes no arguments and cannot fail.
    let thread = unsafe { libc::syscall(libc::SYS_gettid) };
    if key.is_none() || thread == i64::from(std::process::id()) {
        let _ = ENDING.try_with(|_| ());
    }
}

impl Arena {
    /// Returns the calling thread's record, and takes one if it has none. The thread keeps it until it ends.
    ///
    /// # Errors
    /// [`Error::TooManyThreads`] when all are taken, [`Error::Forked`] in a forked child.
    #[inline]
    pub fn thread(&self) -> Result<ThreadRef<'_>, Error> {
        self.thread_cached().map_or_else(|| self.thread_slow(), Ok)
    }

    /// Returns the calling thread's record if the thread last used this arena; otherwise call [`Arena::thread`].
    #[inline]
    pub fn thread_cached(&self) -> Option<ThreadRef<'_>> {
        let (id, owner) = LAST.get();
        (id == self.inner.id && !self.is_forked()).then(|| self.thread_ref(owner))
    }

    /// Returns a lookup that finds the calling thread's record in the fewest steps.
    pub fn cached_thread(&self) -> CachedThread {
        let sentinel = self.inner.sentinel.clone();
        CachedThread { id: self.inner.id, word: sentinel.word(), _sentinel: sentinel }
    }

    #[cold]
    fn thread_slow(&self) -> Result<ThreadRef<'_>, Error> {
        if self.is_forked() {
            return Err(Error::Forked);
        }
        // The interrupted call may hold a lock that is never released: this thread would wait for itself.
        if CUT_SHORT.get() {
            return Err(Error::TooManyThreads);
        }
        let known = REGISTRATIONS.with(|registrations| {
            registrations.borrow().iter().find(|known| known.0 == self.inner.id).map(|known| known.1)
        });
        let owner = match known {
            Some(owner) => owner,
            None => {
                let owner = self.inner.register()?;
                deregister_at_end();
                REGISTRATIONS.with(|registrations| {
                    let mut registrations = registrations.borrow_mut();
                    registrations.retain(|known| known.2.strong_count() > 0);
                    registrations.push((self.inner.id, owner, Arc::downgrade(&self.inner)));
                });
                owner
            }
        };
        LAST.set((self.inner.id, owner));
        Ok(self.thread_ref(owner))
    }

    #[inline]
    fn thread_ref(&self, owner: u64) -> ThreadRef<'_> {
        ThreadRef { thread: self.inner.record_at(owner), owner, _local: std::marker::PhantomData }
    }
}

impl Inner {
    pub(super) fn register(&self) -> Result<u64, Error> {
        let mine = self.identity.map_or(1, Identity::registered);
        for owner in 1..=THREADS_MAX as u64 {
            if owner > self.records_high() {
                self.secure_record(owner)?;
            }
            let thread = self.record_at(owner);
            if thread.state.load(Ordering::Relaxed) != 0
                || thread.state.compare_exchange(0, mine, Ordering::SeqCst, Ordering::SeqCst).is_err()
            {
                continue;
            }
            let spare = owner + RECORDS_SPARE as u64;
            if self.header().records_high.fetch_max(owner, Ordering::SeqCst) < owner && spare <= THREADS_MAX as u64 {
                // A later thread may register when no memory is left, in order to delete. On failure it tries again.
                let _ = self.secure_record(spare);
            }
            // Retired blocks are inherited; everything else begins empty.
            for owned in &thread.owned_spans {
                owned.store(0, Ordering::Relaxed);
            }
            thread.owned_bytes.store(0, Ordering::Relaxed);
            for hazard in &thread.hazards {
                hazard.store(0, Ordering::Relaxed);
            }
            thread.settle_alloc();
            thread.settle_retire();
            self.registered.lock().unwrap_or_else(std::sync::PoisonError::into_inner).push(owner as u16);
            return Ok(owner);
        }
        Err(Error::TooManyThreads)
    }

    /// Allocates the pages of a record, and those that its hazards need in the records before it.
    pub(super) fn secure_record(&self, owner: u64) -> Result<(), Error> {
        let high = owner as usize;
        let first = if retired_max(high) > retired_max(high - 1) { 1 } else { high };
        (first..=high).try_for_each(|record| {
            let offset = self.layout.records + (record - 1) * size_of::<ThreadRecord>();
            self.map.secure(offset, record_bytes(high))
        })
    }

    /// Releases a record: its spans go back, and so do the deferred pages that are due `now` (all of them without `now`).
    /// Blocks that are still read stay in the record for its next owner.
    pub(super) fn deregister(&self, owner: u64, now: Option<Instant>) {
        if self.sentinel.is_forked_child() {
            return;
        }
        let mut registered = self.registered.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let Some(index) = registered.iter().position(|&thread| u64::from(thread) == owner) else { return };
        let thread = self.record_at(owner);
        if thread.hazards.iter().any(|hazard| hazard.load(Ordering::Acquire) != 0) {
            // A leaked guard outlives its thread: the block it reads must stay, and so must the record with the hazard.
            return;
        }
        registered.swap_remove(index);
        drop(registered);
        self.collect(thread, owner);
        self.disown_all(thread, owner);
        self.give_back_deferred(now, owner);
        self.give_back_rests_at_end(owner);
        thread.state.store(0, Ordering::SeqCst);
    }

    /// Marks a record as a death would leave it: its thread ends inside a call.
    fn abandon(&self, owner: u64) {
        if self.sentinel.is_forked_child() || self.identity.is_none() {
            return;
        }
        let mut registered = self.registered.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        registered.retain(|&thread| u64::from(thread) != owner);
        self.record_at(owner).state.store(ABANDONED, Ordering::SeqCst);
    }

    /// Gives up the ownership of every unit that the thread owns.
    pub(super) fn disown_all(&self, thread: &ThreadRecord, owner: u64) {
        for class in 0..thread.owned_spans.len() {
            self.disown(thread, owner, class);
        }
    }

    /// Gives up the ownership of the thread's unit of one class, if it has one.
    pub(super) fn disown(&self, thread: &ThreadRecord, owner: u64, class: usize) {
        if let Some(unit) = Unit::unlist(thread, class) {
            self.disown_unit(unit, owner);
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if self.sentinel.is_forked_child() {
            return;
        }
        if self.identity.is_none() {
            return;
        }
        let registered = || self.registered.lock().unwrap_or_else(std::sync::PoisonError::into_inner).clone();
        if registered().is_empty()
            && !self.deferred.lock().unwrap_or_else(std::sync::PoisonError::into_inner).is_empty()
        {
            // The threads that freed these extents have ended; only this handle knows of the pages.
            let _ = self.register();
        }
        for owner in registered() {
            self.deregister(u64::from(owner), None);
        }
    }
}
