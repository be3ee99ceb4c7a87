//! The signal handler: which region an address is in, and what to do with a signal that is not ours.
//!
//! Nothing here allocates or waits for anything but a page that another thread
//! is bringing, a buffer of the pool, and a cluster's lock of the tier.

use super::RegionError;
use super::decoder::{Patience, make_decoders};
use super::memory::Shared;
use pagefold_os::Errno;
use pagefold_os::signal::{self, Mask};
use pagefold_os::sync::lock;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock};

/// Regions at once.
pub(super) const SLOTS: usize = 64;

/// A region that the handler can find.
struct Slot {
    start: AtomicU64,
    end: AtomicU64,
    shared: AtomicPtr<Shared>,
    /// Handlers that look at the region; it goes when there are none.
    users: AtomicU32,
}

static REGIONS: [Slot; SLOTS] = [const {
    Slot {
        start: AtomicU64::new(0),
        end: AtomicU64::new(0),
        shared: AtomicPtr::new(std::ptr::null_mut()),
        users: AtomicU32::new(0),
    }
}; SLOTS];
static ENTERING: Mutex<()> = Mutex::new(());

/// Lets the handler find a region, which stays where it is until [`leave`].
pub(super) fn enter(shared: *const Shared, start: u64, end: u64) -> Result<(), RegionError> {
    install()?;
    let _one = lock(&ENTERING);
    let slot = REGIONS.iter().find(|slot| slot.shared.load(Ordering::Relaxed).is_null()).ok_or(RegionError::TooMany)?;
    slot.end.store(end, Ordering::Relaxed);
    slot.start.store(start, Ordering::Relaxed);
    slot.shared.store(shared.cast_mut(), Ordering::SeqCst);
    Ok(())
}

/// The handler finds the region no more, and no handler looks at it.
pub(super) fn leave(shared: *const Shared) {
    for slot in REGIONS.iter().filter(|slot| slot.shared.load(Ordering::Relaxed).cast_const() == shared) {
        // Pairs with the increment in `serve`: either that one sees the null, or we see the user.
        slot.shared.store(std::ptr::null_mut(), Ordering::SeqCst);
        let mut patience = Patience::default();
        while slot.users.load(Ordering::SeqCst) != 0 {
            patience.wait();
        }
    }
}

/// Serves the fault at `addr`; false if it is none of ours, or the page cannot be brought back.
fn serve(addr: u64) -> bool {
    for slot in &REGIONS {
        if !(slot.start.load(Ordering::Relaxed)..slot.end.load(Ordering::Relaxed)).contains(&addr) {
            continue;
        }
        slot.users.fetch_add(1, Ordering::SeqCst);
        // SAFETY: entered by `enter`, and `leave` waits until we are done.
        let served = unsafe { slot.shared.load(Ordering::SeqCst).as_ref() }.and_then(|shared| shared.serve(addr));
        slot.users.fetch_sub(1, Ordering::SeqCst);
        if let Some(served) = served {
            return served;
        }
    }
    false
}

// The signal.

/// Who was there before.
static BEFORE: OnceLock<libc::sigaction> = OnceLock::new();
/// A handler that wanted to be called once was.
static BEFORE_ENDED: AtomicBool = AtomicBool::new(false);

/// Installs the handler, once and for good: others may have chained to it.
fn install() -> Result<(), RegionError> {
    static INSTALLED: Mutex<bool> = Mutex::new(false);
    let mut installed = lock(&INSTALLED);
    if *installed {
        return Ok(());
    }
    make_decoders();
    let error = || RegionError::Memory(Errno(std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EINVAL)));
    // SAFETY: all-zero is a valid sigaction.
    let mut before: libc::sigaction = unsafe { std::mem::zeroed() };
    // SAFETY: the structure is filled.
    if unsafe { libc::sigaction(libc::SIGBUS, std::ptr::null(), &raw mut before) } != 0 {
        return Err(error());
    }
    // Before the first signal can come.
    BEFORE.get_or_init(|| before);
    // SAFETY: as above.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = on_sigbus as *const () as usize;
    // On the thread's own stack: alternative ones are made for less than we need.
    action.sa_flags = libc::SA_SIGINFO | libc::SA_RESTART;
    // SAFETY: the set is filled; the handler has the signature that SA_SIGINFO asks for.
    unsafe { libc::sigfillset(&raw mut action.sa_mask) };
    // SAFETY: as above.
    if unsafe { libc::sigaction(libc::SIGBUS, &raw const action, std::ptr::null_mut()) } != 0 {
        return Err(error());
    }
    *installed = true;
    Ok(())
}

extern "C" fn on_sigbus(signal: i32, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the thread's own variable.
    let errno = unsafe { *libc::__errno_location() };
    // SAFETY: the kernel passes a valid structure to a handler with SA_SIGINFO.
    let (code, addr) = unsafe { ((*info).si_code, (*info).si_addr() as u64) };
    let served = code == libc::BUS_ADRERR && serve(addr);
    // SAFETY: as above.
    unsafe { *libc::__errno_location() = errno };
    if !served {
        // SAFETY: passed on as the kernel passed them.
        unsafe { pass_on(signal, info, context) };
    }
}

/// The first eight bytes of a set: the kernel's part.
fn kernel_mask(set: &libc::sigset_t) -> Mask {
    // SAFETY: a set is at least that long, and any bytes are a mask.
    unsafe { std::ptr::from_ref(set).cast::<Mask>().read_unaligned() }
}

/// Does with the signal what would have been done without us.
///
/// # Safety
/// `info` and `context` are the kernel's.
unsafe fn pass_on(signal: i32, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: as the caller says.
    let sent = unsafe { (*info).si_code } <= 0;
    let Some(before) = BEFORE.get() else { return };
    let handler = match before.sa_sigaction {
        _ if BEFORE_ENDED.load(Ordering::Relaxed) => libc::SIG_DFL,
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
            // It comes when we return; a fault comes again by itself.
            // SAFETY: numbers only.
            unsafe { libc::raise(signal) };
        }
        return;
    }
    if before.sa_flags & libc::SA_RESETHAND != 0 && BEFORE_ENDED.swap(true, Ordering::Relaxed) {
        return;
    }
    // SAFETY: the kernel's structure; only the part of the mask that it has is read.
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
