//! The signal handler: finds the region of an address, and passes other signals on.
//!
//! The handler does not allocate. It waits only for a page that another thread
//! is loading, for a decoder of the pool, and for a cluster lock of the tier.

use super::decoder::{SpinBudget, make_pool};
use super::memory::Shared;
use super::report::{REGIONS_MAX, RegionError};
use pagefold_os::Errno;
use pagefold_os::signal::{self, Mask};
use pagefold_os::sync::lock;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock};

/// An entry of the table in which the handler finds a region.
struct Slot {
    start: AtomicU64,
    end: AtomicU64,
    shared: AtomicPtr<Shared>,
    /// Handlers that use the region; it is not freed while there are any.
    users: AtomicU32,
}

static REGIONS: [Slot; REGIONS_MAX] = [const {
    Slot {
        start: AtomicU64::new(0),
        end: AtomicU64::new(0),
        shared: AtomicPtr::new(std::ptr::null_mut()),
        users: AtomicU32::new(0),
    }
}; REGIONS_MAX];
static REGISTERING: Mutex<()> = Mutex::new(());

/// Registers a region with the handler. The region must not move or be freed until [`unregister`].
pub(super) fn register(shared: *const Shared, start: u64, end: u64) -> Result<(), RegionError> {
    install()?;
    let _one = lock(&REGISTERING);
    let slot = REGIONS.iter().find(|slot| slot.shared.load(Ordering::Relaxed).is_null()).ok_or(RegionError::TooMany)?;
    slot.end.store(end, Ordering::Relaxed);
    slot.start.store(start, Ordering::Relaxed);
    slot.shared.store(shared.cast_mut(), Ordering::SeqCst);
    Ok(())
}

/// Unregisters a region, and waits until no handler uses it.
pub(super) fn unregister(shared: *const Shared) {
    for slot in REGIONS.iter().filter(|slot| slot.shared.load(Ordering::Relaxed).cast_const() == shared) {
        // Pairs with the increment in `serve`: either `serve` sees the null, or the loop below sees the user.
        slot.shared.store(std::ptr::null_mut(), Ordering::SeqCst);
        let mut budget = SpinBudget::default();
        while slot.users.load(Ordering::SeqCst) != 0 {
            budget.spin();
        }
    }
}

/// Serves the fault at `addr`; false if it lies in no region, or the page cannot be loaded.
fn serve(addr: u64) -> bool {
    for slot in &REGIONS {
        if !(slot.start.load(Ordering::Relaxed)..slot.end.load(Ordering::Relaxed)).contains(&addr) {
            continue;
        }
        slot.users.fetch_add(1, Ordering::SeqCst);
        // SAFETY: `register` stored the pointer, and `unregister` waits until `users` is 0 before the region is freed.
        let served = unsafe { slot.shared.load(Ordering::SeqCst).as_ref() }.and_then(|shared| shared.serve(addr));
        slot.users.fetch_sub(1, Ordering::SeqCst);
        if let Some(served) = served {
            return served;
        }
    }
    false
}

// The signal.

/// The previous handler.
static PREVIOUS: OnceLock<libc::sigaction> = OnceLock::new();
/// Whether a previous handler with `SA_RESETHAND` was called.
static PREVIOUS_USED: AtomicBool = AtomicBool::new(false);

/// Installs the handler once. It is never removed, because a later handler may call it.
fn install() -> Result<(), RegionError> {
    static INSTALLED: Mutex<bool> = Mutex::new(false);
    let mut installed = lock(&INSTALLED);
    if *installed {
        return Ok(());
    }
    make_pool();
    let error = || RegionError::Memory(Errno(std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EINVAL)));
    // SAFETY: all-zero is a valid sigaction.
    let mut before: libc::sigaction = unsafe { std::mem::zeroed() };
    // SAFETY: the kernel writes to `before`, which outlives the call.
    if unsafe { libc::sigaction(libc::SIGBUS, std::ptr::null(), &raw mut before) } != 0 {
        return Err(error());
    }
    // Before the handler can run.
    PREVIOUS.get_or_init(|| before);
    // SAFETY: all-zero is a valid sigaction.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = on_sigbus as *const () as usize;
    // On the thread's own stack, because alternative stacks are often too small.
    action.sa_flags = libc::SA_SIGINFO | libc::SA_RESTART;
    // SAFETY: the set is a field of `action`.
    unsafe { libc::sigfillset(&raw mut action.sa_mask) };
    // SAFETY: the kernel reads `action`, which is complete; the handler has the signature that SA_SIGINFO requires.
    if unsafe { libc::sigaction(libc::SIGBUS, &raw const action, std::ptr::null_mut()) } != 0 {
        return Err(error());
    }
    *installed = true;
    Ok(())
}

extern "C" fn on_sigbus(signal: i32, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: errno is a variable of this thread.
    let errno = unsafe { *libc::__errno_location() };
    // SAFETY: the kernel passes a valid structure to a handler with SA_SIGINFO.
    let (code, addr) = unsafe { ((*info).si_code, (*info).si_addr() as u64) };
    let served = code == libc::BUS_ADRERR && serve(addr);
    // SAFETY: errno is a variable of this thread.
    unsafe { *libc::__errno_location() = errno };
    if !served {
        // SAFETY: the kernel passed both pointers to this handler.
        unsafe { chain(signal, info, context) };
    }
}

/// The first eight bytes of a signal set, which the kernel uses.
fn kernel_mask(set: &libc::sigset_t) -> Mask {
    // SAFETY: a `sigset_t` is longer than a mask, and any bytes are a valid mask.
    unsafe { std::ptr::from_ref(set).cast::<Mask>().read_unaligned() }
}

/// Handles the signal as the process did before the handler was installed.
///
/// # Safety
/// `info` and `context` must be those that the kernel passed to the handler.
unsafe fn chain(signal: i32, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel passed `info` (the function's contract).
    let sent = unsafe { (*info).si_code } <= 0;
    let Some(before) = PREVIOUS.get() else { return };
    let handler = match before.sa_sigaction {
        _ if PREVIOUS_USED.load(Ordering::Relaxed) => libc::SIG_DFL,
        // A fault cannot be ignored.
        libc::SIG_IGN if sent => return,
        libc::SIG_IGN => libc::SIG_DFL,
        handler => handler,
    };
    if handler == libc::SIG_DFL {
        // SAFETY: all-zero is a valid sigaction: the default.
        let default: libc::sigaction = unsafe { std::mem::zeroed() };
        // SAFETY: the structure outlives the call.
        unsafe { libc::sigaction(signal, &raw const default, std::ptr::null_mut()) };
        if sent {
            // It is delivered when this handler returns. A fault repeats by itself.
            // SAFETY: raise takes a number only.
            unsafe { libc::raise(signal) };
        }
        return;
    }
    if before.sa_flags & libc::SA_RESETHAND != 0 && PREVIOUS_USED.swap(true, Ordering::Relaxed) {
        return;
    }
    // SAFETY: the kernel passed `context` (the function's contract); `kernel_mask` reads only the part that it filled.
    let interrupted = kernel_mask(unsafe { &(*context.cast::<libc::ucontext_t>()).uc_sigmask });
    let own = if before.sa_flags & libc::SA_NODEFER == 0 { 1 << (signal - 1) } else { 0 };
    signal::set_mask(interrupted | kernel_mask(&before.sa_mask) | own);
    if before.sa_flags & libc::SA_SIGINFO != 0 {
        // SAFETY: installed with SA_SIGINFO, so it has this signature.
        let handler: extern "C" fn(i32, *mut libc::siginfo_t, *mut libc::c_void) =
            unsafe { std::mem::transmute(handler) };
        handler(signal, info, context);
    } else {
        // SAFETY: installed without SA_SIGINFO, so it has this signature.
        let handler: extern "C" fn(i32) = unsafe { std::mem::transmute(handler) };
        handler(signal);
    }
}
