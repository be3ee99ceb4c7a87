//! What is not ours goes to whoever was there before: a page that cannot be proven, a fault elsewhere, a sent signal.
//!
//! SIGBUS belongs to the whole process: one test, and children that are this program again.

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

/// What the handler that was there before saw.
static CALLS: AtomicUsize = AtomicUsize::new(0);
static ADDRESS: AtomicUsize = AtomicUsize::new(0);
static MASK: AtomicU64 = AtomicU64::new(0);

/// Ends the thread alone, if it was a fault.
extern "C" fn before(_: i32, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    MASK.store(signal::set_mask(signal::Mask::MAX), Ordering::Relaxed);
    // SAFETY: passed as the kernel passed it.
    let (code, address) = unsafe { ((*info).si_code, (*info).si_addr()) };
    ADDRESS.store(if code > 0 { address as usize } else { 0 }, Ordering::Relaxed);
    CALLS.fetch_add(1, Ordering::SeqCst);
    if code > 0 {
        // SAFETY: ends this thread, which nobody joins and which holds nothing.
        unsafe { libc::syscall(libc::SYS_exit, 0) };
    }
}

fn install_before() {
    // SAFETY: a valid structure and a handler of the signature that SA_SIGINFO asks for.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = before as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO;
        libc::sigaddset(&raw mut action.sa_mask, libc::SIGUSR1);
        assert_eq!(libc::sigaction(libc::SIGBUS, &raw const action, std::ptr::null_mut()), 0);
    }
}

/// A region whose pages are out, and its arena.
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

/// Noise, which is kept as it is: its bytes can be found in the arena.
fn content(page: usize) -> [u8; PAGE] {
    page_of(page as u16 * 8 + 1)
}

/// Damages what the arena holds of `page`; returns where and what was there.
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

/// A mapping of a file that ends before it.
fn beyond_the_end() -> (Fd, Mapping) {
    let file = memfd::create(c"short", PAGE as u64).unwrap();
    let map = Mapping::file(file.raw(), 0, 2 * PAGE, libc::PROT_READ, libc::MAP_SHARED).unwrap();
    (file, map)
}

/// Reads a byte in a thread of its own and waits until the handler before was called by it.
fn killed_by(address: usize) {
    let calls = CALLS.load(Ordering::SeqCst);
    std::thread::spawn(move || {
        // SAFETY: a mapped address, whose touch is SIGBUS: the thread ends in the handler.
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
fn what_is_not_ours_goes_to_the_handler_before() {
    if std::env::var_os("PAGEFOLD_CHILD").is_some() {
        return;
    }
    install_before();
    let Some((region, arena)) = parked() else { return };
    // A page that cannot be proven: for who touches it, at each touch, and for nobody else.
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
    // The kernel's own, elsewhere.
    let (_file, short) = beyond_the_end();
    killed_by(short.addr() as usize + PAGE);
    // A sent one: the handler returns, and so does the call.
    let calls = CALLS.load(Ordering::SeqCst);
    // SAFETY: numbers only.
    assert_eq!(unsafe { libc::raise(libc::SIGBUS) }, 0);
    assert_eq!((CALLS.load(Ordering::SeqCst), ADDRESS.load(Ordering::Relaxed)), (calls + 1, 0));
    // Nothing was guessed and nothing forgotten: with its bytes back the page is the page.
    write(&arena, at, bytes);
    assert!(region[9 * PAGE..][..PAGE] == content(9));
}

/// The children's part: the default was there before.
#[test]
fn child() {
    let Some(what) = std::env::var_os("PAGEFOLD_CHILD") else { return };
    // SAFETY: the default. The standard library has one of its own for overflowing stacks.
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
            // SAFETY: mapped; the touch is SIGBUS.
            unsafe { short.as_ptr().add(PAGE).read_volatile() };
        }
        // SAFETY: numbers only.
        _ => drop(unsafe { libc::raise(libc::SIGBUS) }),
    }
    std::process::exit(1);
}

#[test]
fn without_a_handler_before_the_process_dies_of_sigbus() {
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
