//! Epochs: memory that was unlinked is used again only when nobody can still hold it.
//!
//! The idea is the classic one of three ages. A thread that is about to follow links *pins*: it
//! publishes the epoch it saw. The epoch moves from `e` to `e + 1` only when every pinned thread
//! has published `e`. Memory unlinked and then stamped with `e` can be used again once the epoch
//! is `e + 2`: whoever pinned before the unlinking has left by then.
//!
//! This module keeps time and nothing else. It holds no garbage, runs no destructor and allocates
//! nothing: each structure keeps its own limbo list, stamped with [`Clock::now`], and asks
//! [`Clock::is_past`]. So a structure may be dropped while threads are pinned elsewhere, and its
//! memory may lie in a file that several mappings show.
//!
//! What it does not promise: a thread that stops while pinned stops the clock. Nobody waits for
//! it, but what is unlinked meanwhile is not used again until it goes on. In a forked child that is for ever, if another
//! thread of the parent was pinned at the fork: structures stay right there, but use nothing again.

use crate::primitive::{AtomicU64, Ordering, fence};

#[cfg(loom)]
const PARTICIPANTS: usize = 3;
#[cfg(not(loom))]
const PARTICIPANTS: usize = 512;

/// Set in a participant's word by the thread that owns it.
const OWNED: u64 = 1;
/// Set in a participant's word while its owner is pinned; the epoch stands above it.
const PINNED: u64 = 2;
const EPOCH_SHIFT: u32 = 2;

/// One thread's place on the board. Two cache lines, for the neighbour-line prefetcher.
#[repr(align(128))]
struct Participant {
    /// `epoch << 2 | PINNED | OWNED`. Written by its owner, read by whoever advances the clock.
    word: AtomicU64,
}

/// The board of epochs that a set of structures shares.
pub struct Clock {
    epoch: AtomicU64,
    /// Pinned threads that found no place on the board: while there are any, time stands still.
    unplaced: AtomicU64,
    /// Places ever taken: how far whoever advances has to look.
    places: AtomicU64,
    board: [Participant; PARTICIPANTS],
}

impl Clock {
    /// Makes a clock at epoch 2, so that "two epochs ago" always exists.
    #[cfg(not(loom))]
    pub const fn new() -> Self {
        Self {
            epoch: AtomicU64::new(2),
            unplaced: AtomicU64::new(0),
            places: AtomicU64::new(0),
            board: [const { Participant { word: AtomicU64::new(0) } }; PARTICIPANTS],
        }
    }

    /// Makes a clock at epoch 2, so that "two epochs ago" always exists.
    #[cfg(loom)]
    pub fn new() -> Self {
        Self {
            epoch: AtomicU64::new(2),
            unplaced: AtomicU64::new(0),
            places: AtomicU64::new(0),
            board: std::array::from_fn(|_| Participant { word: AtomicU64::new(0) }),
        }
    }

    /// Reads the epoch: the stamp for what has just been unlinked.
    pub fn now(&self) -> u64 {
        // The caller's unlinking comes before the stamp; pairs with the fence in `announce`.
        fence(Ordering::SeqCst);
        self.epoch.load(Ordering::SeqCst)
    }

    /// Tells whether whatever was unlinked before the stamp was taken can be used again.
    pub fn is_past(&self, stamp: u64) -> bool {
        self.epoch.load(Ordering::Acquire) >= stamp + 2
    }

    /// Moves the epoch on by one if every pinned thread has seen it; never waits.
    pub fn try_advance(&self) -> bool {
        let epoch = self.epoch.load(Ordering::SeqCst);
        // Pairs with the fence in `announce`: either we see a thread's word, or it sees all that
        // was unlinked before this.
        fence(Ordering::SeqCst);
        if self.unplaced.load(Ordering::SeqCst) != 0 || !self.may_advance(epoch) {
            return false;
        }
        // The first look was cheap and may have missed a thread whose word was still on its way; this one does not.
        #[cfg(all(target_arch = "x86_64", target_os = "linux", not(loom), not(miri)))]
        if light::is_on() && !(light::fence_all() && self.may_advance(epoch)) {
            return false;
        }
        self.epoch.compare_exchange(epoch, epoch + 1, Ordering::SeqCst, Ordering::Relaxed).is_ok()
    }

    /// Whether every pinned thread has seen this epoch.
    fn may_advance(&self, epoch: u64) -> bool {
        let places = self.places.load(Ordering::SeqCst) as usize;
        for participant in &self.board[..places] {
            let word = participant.word.load(Ordering::Acquire);
            if word == 0 {
                continue;
            }
            if word & PINNED != 0 && word >> EPOCH_SHIFT != epoch {
                return false;
            }
        }
        true
    }

    /// Takes a free place on the board.
    fn register(&self) -> Option<usize> {
        #[cfg(all(target_arch = "x86_64", target_os = "linux", not(loom), not(miri)))]
        light::choose();
        let place = self.board.iter().position(|participant| {
            participant.word.load(Ordering::Relaxed) == 0
                && participant.word.compare_exchange(0, OWNED, Ordering::AcqRel, Ordering::Relaxed).is_ok()
        })?;
        // Before the first pin at this place, so that its fence covers this too.
        self.places.fetch_max(place as u64 + 1, Ordering::SeqCst);
        Some(place)
    }

    fn deregister(&self, place: usize) {
        self.board[place].word.store(0, Ordering::Release);
    }

    fn announce(&self, place: Option<usize>) {
        match place {
            Some(place) => {
                // Acquire: a thread that sees an epoch also sees what was unlinked before the stamps that it made old.
                let epoch = self.epoch.load(Ordering::Acquire);
                #[cfg(all(target_arch = "x86_64", target_os = "linux", not(loom), not(miri)))]
                if light::is_on() {
                    // `try_advance` makes this thread pass a full fence, so here the order is the compiler's alone.
                    self.board[place].word.store(epoch << EPOCH_SHIFT | PINNED | OWNED, Ordering::Relaxed);
                    std::sync::atomic::compiler_fence(Ordering::SeqCst);
                    return;
                }
                // On x86 an exchange is a full fence, and cheaper than one.
                if cfg!(all(target_arch = "x86_64", not(loom), not(miri))) {
                    self.board[place].word.swap(epoch << EPOCH_SHIFT | PINNED | OWNED, Ordering::SeqCst);
                    std::sync::atomic::compiler_fence(Ordering::SeqCst);
                    return;
                }
                self.board[place].word.store(epoch << EPOCH_SHIFT | PINNED | OWNED, Ordering::Relaxed);
            }
            None => {
                self.unplaced.fetch_add(1, Ordering::SeqCst);
            }
        }
        // Pairs with the fences in `now` and `try_advance`.
        fence(Ordering::SeqCst);
    }

    fn withdraw(&self, place: Option<usize>) {
        match place {
            // Release: all that was done while pinned comes before whoever sees us gone.
            Some(place) => self.board[place].word.store(OWNED, Ordering::Release),
            None => {
                self.unplaced.fetch_sub(1, Ordering::Release);
            }
        }
    }
}

/// Pins without a fence: whoever advances the clock makes all threads of the process pass one, by membarrier(2). A pin is
/// taken with every change of a tree, the clock advances once in thousands of them.
///
/// Why a plain store is enough: say a thread is about to follow a link, and its word is still in its store buffer. If the
/// word was written before the fence that membarrier made it pass, it is visible now, and the clock stands. If after,
/// the loads that follow it come after the fence too, and see all that was unlinked before the advance. (The processors of
/// this module keep loads in order among themselves, and stores too.)
#[cfg(all(target_arch = "x86_64", target_os = "linux", not(loom), not(miri)))]
mod light {
    use std::sync::atomic::{AtomicU8, Ordering};

    const UNKNOWN: u8 = 0;
    const OFF: u8 = 1;
    const ON: u8 = 2;

    /// Chosen before the first pin that finds a place, and never changed after.
    static MODE: AtomicU8 = AtomicU8::new(UNKNOWN);

    fn membarrier(command: libc::c_int) -> bool {
        // SAFETY: membarrier takes no pointers; it touches no memory of ours.
        unsafe { libc::syscall(libc::SYS_membarrier, command, 0, 0) == 0 }
    }

    /// Asks the kernel once. A kernel or a seccomp filter that refuses means pins with a fence.
    pub(super) fn choose() {
        if MODE.load(Ordering::Acquire) == UNKNOWN {
            let mode = if membarrier(libc::MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED) { ON } else { OFF };
            // Of threads that ask at once the first one's answer holds.
            let _ = MODE.compare_exchange(UNKNOWN, mode, Ordering::AcqRel, Ordering::Acquire);
        }
    }

    #[inline(always)]
    pub(super) fn is_on() -> bool {
        MODE.load(Ordering::Relaxed) == ON
    }

    /// Makes every running thread of this process pass a full fence. False if the kernel refuses: then nobody may rely
    /// on it, and the clock stands still.
    pub(super) fn fence_all() -> bool {
        membarrier(libc::MEMBARRIER_CMD_PRIVATE_EXPEDITED)
    }
}

impl Default for Clock {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(not(loom))]
static CLOCK: Clock = Clock::new();

#[cfg(loom)]
loom::lazy_static! {
    static ref CLOCK: Clock = Clock::new();
}

/// Gives the clock that all structures of this process share.
pub fn clock() -> &'static Clock {
    &CLOCK
}

/// A thread's registration: its place and how many pins it holds. Without a destructor, so that it is there for pins
/// that other thread-locals hold or take as the thread ends.
struct Registration {
    place: std::cell::Cell<Place>,
    depth: std::cell::Cell<u32>,
}

#[derive(Clone, Copy)]
enum Place {
    Unasked,
    At(usize),
    /// The thread is ending: its last pin gives the place up.
    #[cfg_attr(loom, allow(dead_code))]
    Last(usize),
    None,
}

impl Registration {
    const fn new() -> Self {
        Self { place: std::cell::Cell::new(Place::Unasked), depth: std::cell::Cell::new(0) }
    }

    #[inline]
    fn place(&self) -> Option<usize> {
        match self.place.get() {
            Place::At(place) | Place::Last(place) => Some(place),
            Place::None => None,
            Place::Unasked => self.register(),
        }
    }

    #[cold]
    fn register(&self) -> Option<usize> {
        // Who cannot tell that the thread ends keeps no place. Under loom the clock dies with the model's execution,
        // before the threads' locals.
        #[cfg(not(loom))]
        let place = ENDING.try_with(|_| clock().register()).unwrap_or(None);
        #[cfg(loom)]
        let place = clock().register();
        self.place.set(place.map_or(Place::None, Place::At));
        place
    }

    /// The last pin of the thread goes.
    #[inline]
    fn leave(&self) {
        match self.place.get() {
            Place::At(place) => clock().withdraw(Some(place)),
            Place::Last(place) => {
                clock().deregister(place);
                self.place.set(Place::None);
            }
            Place::None | Place::Unasked => clock().withdraw(None),
        }
    }
}

/// Gives the thread's place up as it ends.
#[cfg(not(loom))]
struct Ending;

#[cfg(not(loom))]
impl Drop for Ending {
    fn drop(&mut self) {
        REGISTRATION.with(|registration| {
            if let Place::At(place) = registration.place.get() {
                if registration.depth.get() == 0 {
                    clock().deregister(place);
                    registration.place.set(Place::None);
                } else {
                    registration.place.set(Place::Last(place));
                }
            }
        });
    }
}

#[cfg(not(loom))]
thread_local! {
    static REGISTRATION: Registration = const { Registration::new() };
    static ENDING: Ending = const { Ending };
}

#[cfg(loom)]
loom::thread_local! {
    static REGISTRATION: Registration = Registration::new();
}

/// Proof that this thread is pinned; the last one to be dropped leaves.
pub struct Pin {
    /// A pin belongs to the thread that made it.
    _not_send: std::marker::PhantomData<*const ()>,
}

/// Pins this thread to the current epoch until the guard is dropped. A thread may hold several, and drop them in any order.
pub fn pin() -> Pin {
    REGISTRATION.with(|registration| {
        let depth = registration.depth.get();
        registration.depth.set(depth + 1);
        if depth == 0 {
            clock().announce(registration.place());
        }
    });
    Pin { _not_send: std::marker::PhantomData }
}

impl Drop for Pin {
    fn drop(&mut self) {
        REGISTRATION.with(|registration| {
            let depth = registration.depth.get() - 1;
            registration.depth.set(depth);
            if depth == 0 {
                registration.leave();
            }
        });
    }
}

/// This thread's place on the board, which no other thread has meanwhile; `None` if there is none left for it.
#[inline]
pub(crate) fn thread_place() -> Option<usize> {
    REGISTRATION.with(Registration::place)
}

/// A small number that tells this thread from most others: which shard of a counter to use.
pub(crate) fn thread_index() -> usize {
    thread_place().unwrap_or(0)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn pinned_thread_holds_the_clock_and_leaving_frees_it() {
        let clock = Clock::new();
        let place = clock.register();
        clock.announce(place);
        let stamp = clock.now();
        assert!(clock.try_advance(), "a thread pinned at this epoch lets it move once");
        assert!(!clock.try_advance(), "but not twice");
        assert!(!clock.is_past(stamp));
        clock.withdraw(place);
        assert!(clock.try_advance());
        assert!(clock.is_past(stamp));
    }

    #[test]
    fn threads_beyond_the_board_still_hold_the_clock() {
        let clock = Clock::new();
        while clock.register().is_some() {}
        clock.announce(None);
        assert!(!clock.try_advance());
        clock.withdraw(None);
        assert!(clock.try_advance());
    }

    #[test]
    fn a_pin_may_end_after_its_thread_s_registration() {
        /// A pin, its place, and whom to tell what the place says before the pin ends.
        type Held = (Pin, usize, std::sync::mpsc::Sender<(u64, usize)>);
        struct Holder(std::cell::RefCell<Option<Held>>);
        impl Drop for Holder {
            fn drop(&mut self) {
                let Some((pin, place, sender)) = self.0.take() else { return };
                let gone = ENDING.try_with(|_| ()).is_err();
                let held = if gone { CLOCK.board[place].word.load(Ordering::SeqCst) } else { 0 };
                drop(pin);
                let _ = sender.send((held, place));
            }
        }
        thread_local! {
            static HOLDER: Holder = const { Holder(std::cell::RefCell::new(None)) };
        }
        let (sender, receiver) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            // Locals end in the opposite order of their first use.
            HOLDER.with(|holder| {
                let pin = pin();
                let place = thread_place().expect("the board has room");
                *holder.0.borrow_mut() = Some((pin, place, sender));
            });
        })
        .join()
        .unwrap();
        let (held, place) = receiver.recv().unwrap();
        assert_ne!(held & PINNED, 0, "the pin holds the clock to its end");
        // Others take the place for a while.
        let patience = std::time::Instant::now() + std::time::Duration::from_secs(60);
        while CLOCK.board[place].word.load(Ordering::SeqCst) != 0 {
            assert!(std::time::Instant::now() < patience, "the place is never free again");
            std::thread::yield_now();
        }
    }

    #[test]
    fn the_last_pin_of_a_thread_leaves_whichever_it_is() {
        for outer_first in [false, true] {
            let (mut first, mut last) = (pin(), pin());
            if !outer_first {
                std::mem::swap(&mut first, &mut last);
            }
            let stamp = CLOCK.now();
            drop(first);
            let place = thread_place().expect("the board has room");
            assert_ne!(CLOCK.board[place].word.load(Ordering::SeqCst) & PINNED, 0);
            // Other tests advance this clock as well: it moves once at most.
            for _ in 0..3 {
                CLOCK.try_advance();
            }
            assert!(!CLOCK.is_past(stamp), "the clock passed a pin that is held");
            drop(last);
            assert_eq!(CLOCK.board[place].word.load(Ordering::SeqCst) & PINNED, 0);
        }
    }
}
