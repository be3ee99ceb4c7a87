//! A thread's seat: taken when it first needs one, found again by a word of thread-local memory, given up when it ends.
//!
//! A thread that ends gives its spans back; what waits in its limbo stays for
//! whoever sits there next. A handle that goes gives up all seats that were
//! taken through it. To the very end a thread can take one: destructors of
//! other locals, of pthread keys and of C++ objects use stores too, and what is
//! given to atexit(3).

use super::seat::{ABANDONED, Identity, SEATS_MAX, SEATS_SPARE, Seat};
use super::sentinel::Sentinel;
use super::{Arena, Error, Inner};
use std::cell::{Cell, RefCell};
use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Instant;

/// The calling thread's seat. It does not move to another thread.
pub struct SeatRef<'a> {
    seat: &'a Seat,
    pub(super) owner: u64,
    _local: std::marker::PhantomData<*const ()>,
}

impl Deref for SeatRef<'_> {
    type Target = Seat;

    #[inline]
    fn deref(&self) -> &Seat {
        self.seat
    }
}

impl SeatRef<'_> {
    /// Returns the number that stands for this seat in lock words: 1 to [`SEATS_MAX`].
    #[inline]
    pub fn owner(&self) -> u64 {
        self.owner
    }
}

/// Tells the calling thread's seat quickly, where the arena is the one of which it last asked for one.
pub struct QuickSeat {
    id: u64,
    /// The sentinel's word, one load closer.
    word: *const AtomicU64,
    _sentinel: Arc<Sentinel>,
}

// SAFETY: the word is only read, through an atomic.
unsafe impl Send for QuickSeat {}

// SAFETY: as above.
unsafe impl Sync for QuickSeat {}

impl QuickSeat {
    /// Returns the number of the calling thread's seat if it takes few steps: else ask [`Arena::seat`].
    #[inline(always)]
    pub fn owner(&self) -> Option<u64> {
        let (id, owner) = LAST.get();
        // SAFETY: the word lives as long as the sentinel.
        let is_here = Sentinel::says_here(unsafe { (*self.word).load(Ordering::Relaxed) });
        (id == self.id && is_here).then_some(owner)
    }
}

/// An arena's number, the thread's seat there, and the arena.
type Taken = (u64, u64, Weak<Inner>);

thread_local! {
    /// The arena this thread used last, and its seat there.
    static LAST: Cell<(u64, u64)> = const { Cell::new((0, 0)) };
    /// All seats of this thread. Without a destructor, so that it is there whatever of the thread is gone.
    static SEATS: ManuallyDrop<RefCell<Vec<Taken>>> = const { ManuallyDrop::new(RefCell::new(Vec::new())) };
    static ENDING: Ending = const { Ending };
    /// Calls of this thread that are under way.
    static CALLS: Cell<u32> = const { Cell::new(0) };
    /// Whether the thread ends inside of one.
    static CUT_SHORT: Cell<bool> = const { Cell::new(false) };
}

/// A call under way, for structures whose callers may end the process in the middle of it, as a signal's handler does by
/// exit(3): then locals end, but what the thread was at never goes on. Its seats are as a dead one's from then on.
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

/// Gives the first thread's seats up as its locals go.
struct Ending;

impl Drop for Ending {
    fn drop(&mut self) {
        leave_all();
    }
}

fn leave_all() {
    LAST.set((0, 0));
    CUT_SHORT.set(CUT_SHORT.get() || Call::is_any());
    for (_, owner, arena) in SEATS.with(|seats| seats.take()) {
        match arena.upgrade() {
            Some(inner) if CUT_SHORT.get() => inner.abandon(owner),
            Some(inner) => inner.leave(owner, Some(Instant::now())),
            None => {}
        }
    }
}

/// Sees to it that this thread's seats are given up at its end, of which some may be over: when its locals go, and when
/// destructors of pthread keys run, after which the C library looks again for what was put under a key meanwhile. The
/// thread that ends the process has no such end; what it takes when its locals are gone is as after a death.
fn leave_at_end() {
    unsafe extern "C" fn end(_: *mut libc::c_void) {
        leave_all();
    }
    static KEY: OnceLock<Option<libc::pthread_key_t>> = OnceLock::new();
    let key = KEY.get_or_init(|| {
        let mut key = 0;
        // SAFETY: writes a number of ours; `end` looks at nothing that it is given.
        (unsafe { libc::pthread_key_create(&raw mut key, Some(end)) } == 0).then_some(key)
    });
    if let Some(key) = key {
        // SAFETY: a key that is never deleted; what is put there is no place, and not null.
        unsafe { libc::pthread_setspecific(*key, std::ptr::without_provenance(1)) };
    }
    // Destructors of keys do not run for the thread that leaves main; for others those of locals may be over.
    // SAFETY: takes nothing.
    let thread = unsafe { libc::syscall(libc::SYS_gettid) };
    if key.is_none() || thread == i64::from(std::process::id()) {
        let _ = ENDING.try_with(|_| ());
    }
}

impl Arena {
    /// Returns the calling thread's seat, and takes one if it has none. The thread keeps it until it ends.
    ///
    /// # Errors
    /// [`Error::Seats`] when all are taken, [`Error::Forked`] in a forked child.
    #[inline]
    pub fn seat(&self) -> Result<SeatRef<'_>, Error> {
        self.seat_last().map_or_else(|| self.seat_slow(), Ok)
    }

    /// Returns the calling thread's seat if this is the arena of which it last asked for one: else ask [`Arena::seat`].
    #[inline]
    pub fn seat_last(&self) -> Option<SeatRef<'_>> {
        let (id, owner) = LAST.get();
        (id == self.inner.id && !self.is_forked()).then(|| self.seat_ref(owner))
    }

    /// Returns what tells a thread's seat in the fewest steps.
    pub fn quick_seat(&self) -> QuickSeat {
        let sentinel = self.inner.sentinel.clone();
        QuickSeat { id: self.inner.id, word: sentinel.word(), _sentinel: sentinel }
    }

    #[cold]
    fn seat_slow(&self) -> Result<SeatRef<'_>, Error> {
        if self.is_forked() {
            return Err(Error::Forked);
        }
        // It may hold a lock that nobody gives up, and would wait for itself.
        if CUT_SHORT.get() {
            return Err(Error::Seats);
        }
        let known = SEATS.with(|seats| seats.borrow().iter().find(|seat| seat.0 == self.inner.id).map(|seat| seat.1));
        let owner = match known {
            Some(owner) => owner,
            None => {
                let owner = self.inner.take_seat()?;
                leave_at_end();
                SEATS.with(|seats| {
                    let mut seats = seats.borrow_mut();
                    seats.retain(|seat| seat.2.strong_count() > 0);
                    seats.push((self.inner.id, owner, Arc::downgrade(&self.inner)));
                });
                owner
            }
        };
        LAST.set((self.inner.id, owner));
        Ok(self.seat_ref(owner))
    }

    #[inline]
    fn seat_ref(&self, owner: u64) -> SeatRef<'_> {
        SeatRef { seat: self.inner.seat_at(owner), owner, _local: std::marker::PhantomData }
    }
}

impl Inner {
    pub(super) fn take_seat(&self) -> Result<u64, Error> {
        let mine = self.identity.map_or(1, Identity::taken);
        for owner in 1..=SEATS_MAX as u64 {
            if owner > self.seats_high() {
                self.secure_seat(owner)?;
            }
            let seat = self.seat_at(owner);
            if seat.state.load(Ordering::Relaxed) != 0
                || seat.state.compare_exchange(0, mine, Ordering::SeqCst, Ordering::SeqCst).is_err()
            {
                continue;
            }
            let spare = owner + SEATS_SPARE as u64;
            if self.header().seats_high.fetch_max(owner, Ordering::SeqCst) < owner && spare <= SEATS_MAX as u64 {
                // Who needs it may come when there is no memory left, to delete something. He asks for it again.
                let _ = self.secure_seat(spare);
            }
            // Limbo is inherited; everything else begins empty.
            for lease in &seat.leases {
                lease.store(0, Ordering::Relaxed);
            }
            for hazard in &seat.hazards {
                hazard.store(0, Ordering::Relaxed);
            }
            seat.settle_alloc();
            seat.settle_retire();
            self.taken.lock().unwrap_or_else(std::sync::PoisonError::into_inner).push(owner as u16);
            return Ok(owner);
        }
        Err(Error::Seats)
    }

    fn secure_seat(&self, owner: u64) -> Result<(), Error> {
        let offset = self.layout.seats + (owner as usize - 1) * size_of::<Seat>();
        self.map.secure(offset, size_of::<Seat>())
    }

    /// Gives a seat up: its spans go back, and the pages that are due `now` or, without it, all that wait; its limbo stays
    /// for the next one to sit there.
    pub(super) fn leave(&self, owner: u64, now: Option<Instant>) {
        if self.sentinel.is_wiped() {
            return;
        }
        let mut taken = self.taken.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let Some(index) = taken.iter().position(|&seat| u64::from(seat) == owner) else { return };
        let seat = self.seat_at(owner);
        if seat.hazards.iter().any(|hazard| hazard.load(Ordering::Acquire) != 0) {
            // A guard outlives its thread (leaked): what it reads must stay, so the seat does.
            return;
        }
        taken.swap_remove(index);
        drop(taken);
        self.collect(seat, owner);
        self.drop_leases(seat, owner);
        self.give_back_late(now, owner);
        self.give_back_rests_at_end(owner);
        seat.state.store(0, Ordering::SeqCst);
    }

    /// Leaves a seat as a death would: its thread ends in the middle of something.
    fn abandon(&self, owner: u64) {
        if self.sentinel.is_wiped() || self.identity.is_none() {
            return;
        }
        let mut taken = self.taken.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        taken.retain(|&seat| u64::from(seat) != owner);
        self.seat_at(owner).state.store(ABANDONED, Ordering::SeqCst);
    }

    /// Gives back every span this seat leases.
    pub(super) fn drop_leases(&self, seat: &Seat, owner: u64) {
        for class in 0..seat.leases.len() {
            self.end_lease(seat, owner, class);
        }
    }

    /// Lets go of what a seat leases of one class, if anything.
    pub(super) fn end_lease(&self, seat: &Seat, owner: u64, class: usize) {
        let leased = seat.leases[class].swap(0, Ordering::Relaxed);
        if leased != 0 {
            self.drop_lease(leased as usize - 1, owner);
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if self.sentinel.is_wiped() {
            return;
        }
        if self.identity.is_none() {
            return;
        }
        let seats = || self.taken.lock().unwrap_or_else(std::sync::PoisonError::into_inner).clone();
        if seats().is_empty() && !self.late.lock().unwrap_or_else(std::sync::PoisonError::into_inner).is_empty() {
            // All who freed have left; nobody but us knows of these pages.
            let _ = self.take_seat();
        }
        for owner in seats() {
            self.leave(u64::from(owner), None);
        }
    }
}
