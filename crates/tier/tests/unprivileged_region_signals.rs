//! Other SIGBUS signals go to the previous handler: a page that fails verification, a fault elsewhere, a sent signal.
//!
//! SIGBUS handlers are process-wide, so this is one test, with children that run this program again.

mod common;

use common::{dup, page_of};
use pagefold_os::fd::Fd;
use pagefold_os::mem::Mapping;
use pagefold_os::{memfd, signal};
use pagefold_tier::region::{ColdRegion, RegionError};
use pagefold_tier::{Config, Effort, Tier};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::os::unix::process::ExitStatusExt;
use std::process::Command;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

const PAGE: usize = 4096;
const PAGES: usize = 64;

/// What the previous handler saw.
static CALLS: AtomicUsize = AtomicUsize::new(0);
static ADDRESS: AtomicUsize = AtomicUsize::new(0);
static MASK: AtomicU64 = AtomicU64::new(0);

/// The previous handler. Ends the thread if the signal is a fault.
extern "C" fn before(_: i32, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    MASK.store(signal::set_mask(signal::Mask::MAX), Ordering::Relaxed);
    // SAFETY: the region's handler passes the kernel's pointer.
    let (code, address) = unsafe { ((*info).si_code, (*info).si_addr()) };
    ADDRESS.store(if code > 0 { address as usize } else { 0 }, Ordering::Relaxed);
    CALLS.fetch_add(1, Ordering::SeqCst);
    if code > 0 {
        // SAFETY: ends this thread, which is never joined and holds no lock or memory.
        unsafe { libc::syscall(libc::SYS_exit, 0) };
    }
}

fn install_before() {
    // SAFETY: the structure is valid, and the handler has the signature that SA_SIGINFO requires.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = before as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO;
        libc::sigaddset(&raw mut action.sa_mask, libc::SIGUSR1);
        assert_eq!(libc::sigaction(libc::SIGBUS, &raw const action, std::ptr::null_mut()), 0);
    }
}

/// A region with evicted pages, and its arena.
fn parked() -> Option<(ColdRegion, Fd)> {
    let tier = Tier::create(Config { bytes_max: 4 << 20, workers: 1, ..Config::default() }, None).unwrap();
    let arena = dup(tier.fds().0);
    let mut region = match ColdRegion::new(tier, PAGES * PAGE) {
        Ok(region) => region,
        Err(error @ RegionError::Userfaultfd(_)) => {
            let _ = writeln!(std::io::stderr(), "SKIPPED: {error}");
            return None;
        }
        Err(error) => panic!("{error}"),
    };
    for page in 0..PAGES {
        region[page * PAGE..][..PAGE].copy_from_slice(&content(page));
    }
    assert_eq!(region.parker().park(0..PAGES * PAGE, Effort::Fast).pages, PAGES as u64);
    Some((region, arena))
}

/// Noise, which is stored uncompressed, so that its bytes can be found in the arena.
fn content(page: usize) -> [u8; PAGE] {
    page_of(page as u16 * 8 + 1)
}

/// Damages the arena's bytes of `page`; returns their offset and old value.
fn damage(arena: &Fd, page: usize) -> (u64, [u8; 16]) {
    let file = std::fs::File::open(format!("/proc/self/fd/{}", arena.raw())).unwrap();
    let mut bytes = vec![0; 4 << 20];
    file.read_exact_at(&mut bytes, 0).unwrap();
    let wanted = &content(page)[512..528];
    let at = bytes.windows(16).position(|window| window == wanted).expect("kept as it is") as u64;
    write(arena, at, [0x55; 16]);
    (at, wanted.try_into().unwrap())
}

fn write(arena: &Fd, at: u64, bytes: [u8; 16]) {
    let file = std::fs::File::options().write(true).open(format!("/proc/self/fd/{}", arena.raw())).unwrap();
    file.write_all_at(&bytes, at).unwrap();
}

/// A mapping beyond the end of its file.
fn beyond_the_end() -> (Fd, Mapping) {
    let file = memfd::create(c"short", PAGE as u64).unwrap();
    let map = Mapping::file(file.raw(), 0, 2 * PAGE, libc::PROT_READ, libc::MAP_SHARED).unwrap();
    (file, map)
}

/// Reads a byte in a new thread and waits until the previous handler was called.
fn killed_by(address: usize) {
    let calls = CALLS.load(Ordering::SeqCst);
    std::thread::spawn(move || {
        // SAFETY: the address is mapped; the read raises SIGBUS, and the thread ends in the handler.
        unsafe { (address as *const u8).read_volatile() };
        unreachable!("the touch did not fault");
    });
    while CALLS.load(Ordering::SeqCst) == calls {
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!((CALLS.load(Ordering::SeqCst), ADDRESS.load(Ordering::Relaxed) / PAGE), (calls + 1, address / PAGE));
    let of = |number: i32| 1_u64 << (number - 1);
    assert_eq!(MASK.load(Ordering::Relaxed) & of(libc::SIGUSR1), of(libc::SIGUSR1), "the mask that it asked for");
    assert_eq!(MASK.load(Ordering::Relaxed) & of(libc::SIGTERM), 0, "and no more");
}

#[test]
fn other_signals_go_to_the_previous_handler() {
    if std::env::var_os("PAGEFOLD_CHILD").is_some() {
        return;
    }
    install_before();
    let Some((region, arena)) = parked() else { return };
    // A page that fails verification: at each touch, for the touching thread only.
    let (at, bytes) = damage(&arena, 9);
    let address = region.as_ptr() as usize + 9 * PAGE + 100;
    killed_by(address);
    killed_by(address);
    for page in (0..PAGES).filter(|page| *page != 9) {
        assert!(region[page * PAGE..][..PAGE] == content(page), "page {page}");
    }
    let error = region.parker().unpark(0..PAGES * PAGE).unwrap_err();
    assert_eq!((error.first, error.pages), (9 * PAGE, 1), "{error}");
    assert!(region.pin(9 * PAGE..10 * PAGE).is_err() && region.stats().pages_pinned == 0);
    assert!(region.stats().pages_unreadable >= 3 && region.stats().pages_out == 1, "{:?}", region.stats());
    // A fault of the kernel's, outside the region.
    let (_file, short) = beyond_the_end();
    killed_by(short.addr() as usize + PAGE);
    // A sent signal: the handler returns, and so does the call.
    let calls = CALLS.load(Ordering::SeqCst);
    // SAFETY: raise(3) takes no pointer; the test's own handler counts the call.
    assert_eq!(unsafe { libc::raise(libc::SIGBUS) }, 0);
    assert_eq!((CALLS.load(Ordering::SeqCst), ADDRESS.load(Ordering::Relaxed)), (calls + 1, 0));
    // After its bytes are restored the page can be loaded again.
    write(&arena, at, bytes);
    assert!(region[9 * PAGE..][..PAGE] == content(9));
}

/// The children's part, in which the previous handler is the default.
#[test]
fn child() {
    let Some(what) = std::env::var_os("PAGEFOLD_CHILD") else { return };
    // SAFETY: SIG_DFL replaces the standard library's handler, which detects stack overflows.
    unsafe { libc::signal(libc::SIGBUS, if what == "ignored" { libc::SIG_IGN } else { libc::SIG_DFL }) };
    let Some((region, arena)) = parked() else { std::process::exit(77) };
    assert!(region[..PAGE] == content(0));
    match what.to_str() {
        Some("damaged" | "ignored") => {
            damage(&arena, 9);
            assert!(region[9 * PAGE] == 1, "not reached");
        }
        Some("elsewhere") => {
            let (_file, short) = beyond_the_end();
            // SAFETY: the address is mapped; the read raises SIGBUS, which ends the process.
            unsafe { short.as_ptr().add(PAGE).read_volatile() };
        }
        // SAFETY: raise(3) takes no pointer; the signal ends this process, as the test wants.
        _ => drop(unsafe { libc::raise(libc::SIGBUS) }),
    }
    std::process::exit(1);
}

#[test]
fn without_a_previous_handler_the_process_dies_of_sigbus() {
    if std::env::var_os("PAGEFOLD_CHILD").is_some() {
        return;
    }
    for what in ["damaged", "ignored", "elsewhere", "sent"] {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "child", "--nocapture", "--test-threads=1"]).env("PAGEFOLD_CHILD", what);
        let output = command.output().unwrap();
        if output.status.code() == Some(77) {
            let _ = writeln!(std::io::stderr(), "SKIPPED: no userfaultfd");
            return;
        }
        assert_eq!(output.status.signal(), Some(libc::SIGBUS), "{what}: {output:?}");
    }
}
