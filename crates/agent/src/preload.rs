//! The preloaded form: it follows the program's own memory calls.
//!
//! Each function here stands before the C library's: it makes the same system
//! call, with the guard held where mappings end, and notes what the daemon
//! should know. Nothing allocates; errors are the kernel's own, in `errno`.
//!
//! Large private mappings that the program lets the kernel place are placed by
//! us, in a zone of addresses that is never used twice. So an address that the
//! program gave back through a path we do not see cannot come to life again as
//! something else while its pages are in our hands.

mod locks;
mod pins;
mod privileges;
mod tasks;
mod userfaultfd;

use crate::cold;
use crate::engine::{ask_to_leave_giving_back, start, stop, stop_giving_back, wait_begun};
use crate::filter;
use crate::guard::{Guard, Held};
use crate::listing::ALL_MIN;
use crate::maps::{Maps, POOL_NAME, pool_mappings};
use crate::plain::{keep_attributes, replace_merged};
use crate::process::{is_new_child, is_own_process, mark_origin, mark_process};
use crate::remap::copy_of;
use crate::shared::{ALL_LOCKED, MAY_FOLLOW, MAY_START, NOTHING, SHARED};
use crate::table::Note;
use crate::thread::TASK_PATH_LEN;
use core::ffi::{CStr, c_char, c_int, c_long, c_void};
use core::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use pagefold_os::fd::Fd;
use pagefold_os::raw::{Errno, Result};
use pagefold_os::{PAGE_SIZE, Range, mem, syscall};

const PAGE: u64 = PAGE_SIZE as u64;

const EVERYTHING: Range = Range { start: 0, end: u64::MAX };

#[cfg(not(test))]
#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    // A mistake of ours must not go on: the kernel's abort is clean.
    loop {
        // SAFETY: ends the process.
        let _ = unsafe { syscall!(libc::SYS_kill, libc::getpid(), libc::SIGABRT) };
    }
}

unsafe extern "C" {
    fn __errno_location() -> *mut c_int;
    fn pthread_self() -> usize;
    fn getenv(name: *const c_char) -> *const c_char;
    fn strlen(text: *const c_char) -> usize;
}

/// Mappings at least this large are placed in the zone even without `--all`: they are guest memory or alike.
const PLACE_MIN: u64 = 32 << 20;

/// Where the zone begins, and how far it may be shifted at random.
const ZONE_START: u64 = 0x1000_0000_0000;
const ZONE_END: u64 = 0x5000_0000_0000;

static ZONE_NEXT: AtomicU64 = AtomicU64::new(0);
static ACTIVE: AtomicBool = AtomicBool::new(false);

fn me() -> usize {
    // SAFETY: returns the thread's own pointer.
    unsafe { pthread_self() }
}

fn fail(errno: Errno) {
    // SAFETY: the C library's errno of this thread.
    unsafe { *__errno_location() = errno.0 };
}

fn returned(result: Result<()>) -> c_int {
    match result {
        Ok(()) => 0,
        Err(errno) => {
            fail(errno);
            -1
        }
    }
}

fn active() -> bool {
    let active = ACTIVE.load(Ordering::Relaxed);
    // Who holds the guard in a child is in the middle of a fork that is known.
    if active && !SHARED.guard.is_held_by(me()) && is_new_child() {
        // Forked by a call that nobody saw. Its agent starts with the next memory that wants one.
        begin_child(me());
    }
    if active {
        privileges::renew_if_due();
    }
    active
}

fn managed_all() -> bool {
    SHARED.all.load(Ordering::Relaxed)
}

/// A variable of the environment, while the program has not begun and nobody changes it.
fn text(name: &CStr) -> Option<&'static [u8]> {
    // SAFETY: getenv returns a C string or null.
    unsafe {
        let value = getenv(name.as_ptr());
        if value.is_null() { None } else { Some(core::slice::from_raw_parts(value.cast::<u8>(), strlen(value))) }
    }
}

/// Runs before the program's own code.
extern "C" fn begin() {
    // Before there are other threads: what serves during the first lookup is not theirs if another allocator is preloaded.
    next_free();
    next(&NEXT_REALLOC, c"realloc".as_ptr(), __libc_realloc as *const () as usize);
    let Some(socket) = text(c"PAGEFOLD_SOCKET").filter(|_| !is_instrumented()) else { return };
    let domain = text(c"PAGEFOLD_DOMAIN").unwrap_or(b"");
    let cold = text(c"PAGEFOLD_COLD") == Some(b"1");
    let all = cold || text(c"PAGEFOLD_ALL") == Some(b"1");
    if cold {
        let number = |name: &CStr| {
            let digits = text(name).unwrap_or(b"").iter().take_while(|byte| byte.is_ascii_digit()).take(18);
            digits.fold(0u64, |all, digit| all * 10 + u64::from(digit - b'0'))
        };
        cold::TOLERANCE_PPM.store(number(c"PAGEFOLD_TOLERANCE"), Ordering::Relaxed);
        cold::TIER_MAX.store(number(c"PAGEFOLD_TIER_MAX"), Ordering::Relaxed);
        cold::COLD.store(true, Ordering::Relaxed);
    }
    if !SHARED.configure(socket, domain, all) {
        return;
    }
    // The zone starts anywhere in 16 TiB, as the kernel's own placement would.
    let mut random = 0u64;
    // SAFETY: the kernel fills the 8 bytes.
    let _ = unsafe { syscall!(libc::SYS_getrandom, core::ptr::from_mut(&mut random), 8, 0) };
    ZONE_NEXT.store(ZONE_START + (random % (16 << 40)) / (2 << 20) * (2 << 20), Ordering::Relaxed);
    register_first();
    // Looked up now: later it might be in a signal handler.
    next(&NEXT_FORK, c"_Fork".as_ptr(), 0);
    next(&NEXT_LIBC_FORK, c"fork".as_ptr(), 0);
    next(&NEXT_CLONE, c"clone".as_ptr(), 0);
    mark_origin();
    privileges::look_up();
    ACTIVE.store(true, Ordering::Release);
    // The C library's allocator maps memory without our seeing it, so there may never be a better moment.
    if all {
        start_unless_away();
    }
}

#[used]
#[unsafe(link_section = ".init_array")]
static BEGIN: extern "C" fn() = begin;

type Handler = Option<extern "C" fn()>;
type RegisterFn = unsafe extern "C" fn(Handler, Handler, Handler, *const c_void) -> c_int;

static NEXT_REGISTER: AtomicUsize = AtomicUsize::new(0);

/// Registers our handlers of forks, once; before those of any library that registers through [`__register_atfork`].
///
/// Handlers that prepare a fork run from the last to the first, the others from the first to the last. So those of libraries
/// take their locks before we take the guard, and we free it before they free their locks: who holds such a lock and waits
/// for the guard has it. They may map and discard in their handlers as ever.
fn register_first() -> Option<RegisterFn> {
    static DONE: AtomicBool = AtomicBool::new(false);
    let register = match next(&NEXT_REGISTER, c"__register_atfork".as_ptr(), 0) {
        0 => return None,
        // SAFETY: the C library's function of this name has this type.
        found => unsafe { core::mem::transmute::<usize, RegisterFn>(found) },
    };
    if !DONE.swap(true, Ordering::Relaxed) {
        // SAFETY: the handlers live as long as the library, which is never unloaded (it was preloaded).
        unsafe { register(Some(before_fork), Some(parent_of_fork), Some(child_of_fork), core::ptr::null()) };
    }
    Some(register)
}

/// What pthread_atfork(3) is in every object that calls it. Constructors of libraries do so before ours runs.
///
/// # Safety
/// As pthread_atfork(3); `object` is the caller's, or null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn __register_atfork(
    prepare: Handler,
    parent: Handler,
    child: Handler,
    object: *const c_void,
) -> c_int {
    match register_first() {
        // SAFETY: passed on.
        Some(register) => unsafe { register(prepare, parent, child, object) },
        None => libc::ENOMEM,
    }
}

/// What pthread_atfork(3) calls: it cannot refuse, and [`fork`] has seen before whether there is room.
extern "C" fn before_fork() {
    if active() {
        let _ = prepare_fork(true);
    }
}

extern "C" fn parent_of_fork() {
    if active() {
        after_fork_parent();
    }
}

extern "C" fn child_of_fork() {
    if ACTIVE.load(Ordering::Relaxed) {
        after_fork_child();
    }
}

/// Readies memory for being copied, and takes the guard until [`after_fork_parent`].
///
/// # Errors
/// `ENOMEM`, without the guard, if a limit of memory has no room for what the child must have; not if it is to be done
/// `whatever_it_takes`.
fn prepare_fork(whatever_it_takes: bool) -> Result<()> {
    // No page may be in the staging area when the child's memory is copied.
    let held = SHARED.guard.lock(me());
    // Nor out: the child has nobody to ask. Nothing goes out while the guard is held.
    cold::before_fork(whatever_it_takes, |addr, end| {
        let (end, note) = SHARED.tables(&held).table.stretch(addr, end);
        (end, note.dont_fork)
    })?;
    core::mem::forget(held);
    Ok(())
}

/// [`prepare_fork`] for calls that may fail; false with `errno` set.
fn may_fork() -> bool {
    prepare_fork(false).inspect_err(|errno| fail(*errno)).is_ok()
}

fn after_fork_parent() {
    SHARED.guard.unlock_forgotten(me());
}

fn after_fork_child() {
    SHARED.guard.unlock_forgotten(me());
    let _ = is_new_child();
    if begin_child(me()) {
        start_unless_away();
    }
}

/// In a forked child, in which the frames of `goes_on` go on, or none (0). True if it needs an agent at once: its merged
/// pages do; a child without any may never need it, unless all its memory is managed.
fn begin_child(goes_on: usize) -> bool {
    mark_process();
    SHARED.guard.reset(goes_on);
    AWAY.reset(goes_on);
    START.store(false, Ordering::Relaxed);
    privileges::forget_due();
    cold::after_fork_child();
    SHARED.thread.forget();
    SHARED.holds.store(false, Ordering::Relaxed);
    let phase = SHARED.phase.load(Ordering::Relaxed);
    // What made the agent give up is inherited: a filter, or a lack.
    if phase != 3 {
        SHARED.phase.store(0, Ordering::Relaxed);
    }
    let held = SHARED.guard.lock(me());
    let tables = SHARED.tables(&held);
    let merged = !tables.merged.is_empty();
    // Locks are not inherited.
    tables.table.change_noted(|note| note.locked = false);
    drop(held);
    ALL_LOCKED.store(false, Ordering::Release);
    SHARED.forked.store(merged, Ordering::Relaxed);
    // Another thread of the parent's may have sent the agent away for a moment.
    phase != 3 && (merged || managed_all())
}

/// The pages of `len` bytes at `addr`; nothing where the kernel refuses that address or length, and changes nothing.
fn range_of(addr: *mut c_void, len: usize) -> Option<Range> {
    let start = addr as u64;
    let end = start.checked_add((len as u64).checked_next_multiple_of(PAGE)?)?;
    start.is_multiple_of(PAGE).then_some(Range { start, end })
}

/// Starts the agent now if the program has memory for it.
fn wanted() {
    if SHARED.phase.load(Ordering::Relaxed) == 0 {
        start_unless_away();
    }
    SHARED.changed();
}

/// Held by the thread that sends the agent away, until that is back: two at a time would each take the other's agent for its
/// own. It is taken before the guard, never by who holds that: the agent may be waiting for the guard.
static AWAY: Guard = Guard::new();

/// Somebody wants an agent to start that could not take [`AWAY`].
static START: AtomicBool = AtomicBool::new(false);

/// Has [`AWAY`]. Starts the agent in the end if somebody wanted it meanwhile.
struct Away(Option<Held<'static>>);

impl Away {
    fn take() -> Away {
        Away(Some(AWAY.lock(me())))
    }

    /// True if this is a handler, which interrupted a frame that has it.
    fn is_nested(&self) -> bool {
        self.0.as_ref().is_some_and(Held::is_nested)
    }
}

impl Drop for Away {
    fn drop(&mut self) {
        drop(self.0.take());
        if START.load(Ordering::SeqCst) {
            start_unless_away();
        }
    }
}

/// True if this is a handler, which interrupted a frame that the agent, or who waits for that, may be waiting for: who waited
/// for the agent here would wait for ever.
fn is_in_the_way() -> bool {
    SHARED.guard.is_held_by(me()) || AWAY.is_held_by(me())
}

/// Starts the agent, now or when whoever has sent it away has made his call. Never waits.
fn start_unless_away() {
    // Else it would end with a child that is another program soon.
    if !is_own_process() {
        return;
    }
    START.store(true, Ordering::SeqCst);
    while START.load(Ordering::SeqCst) {
        match AWAY.try_lock(me()) {
            Some(held) if !held.is_nested() => {
                START.store(false, Ordering::SeqCst);
                start();
            }
            // Who holds it looks once more when it has let go.
            _ => return,
        }
    }
}

/// Where in the zone a block of `len` bytes is to be; nothing if there is no room. What asks for more than that uses up none.
fn place(len: u64) -> Option<u64> {
    let size = len.checked_next_multiple_of(PAGE).filter(|size| *size < ZONE_END)?;
    // Blocks that can hold huge pages begin where huge pages begin.
    let align = if size >= 2 << 20 { 2 << 20 } else { PAGE };
    let step = |at: u64| (at != 0 && at + align + size < ZONE_END).then_some(at + align + size);
    let at = ZONE_NEXT.fetch_update(Ordering::Relaxed, Ordering::Relaxed, step).ok()?;
    Some(at.next_multiple_of(align))
}

fn map(addr: *mut c_void, len: usize, prot: c_int, flags: c_int, fd: c_int, offset: i64) -> Result<u64> {
    let large = len as u64 >= if managed_all() { ALL_MIN } else { PLACE_MIN };
    let plain = flags & (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS) == libc::MAP_PRIVATE | libc::MAP_ANONYMOUS
        && flags & (libc::MAP_STACK | libc::MAP_GROWSDOWN | libc::MAP_HUGETLB | libc::MAP_LOCKED | libc::MAP_32BIT)
            == 0
        && prot & libc::PROT_EXEC == 0;
    if addr.is_null() && large && plain && flags & (libc::MAP_FIXED | libc::MAP_FIXED_NOREPLACE) == 0 {
        // A wish, without MAP_FIXED_NOREPLACE, which sandboxes may not know. Where the kernel has a reason to put it elsewhere, as
        // it puts small memory, its end is seen if an interposed call makes it.
        let place = place(len as u64).unwrap_or(0);
        // SAFETY: the program's own call, with a wish.
        let place = unsafe { mem::map(place, len as u64, prot, flags, fd, offset as u64) }?;
        if managed_all()
            && prot == libc::PROT_READ | libc::PROT_WRITE
            && let Some(range) = range_of(place as *mut c_void, len)
        {
            note(range, |note| note.seen = true);
            wanted();
        }
        return Ok(place);
    }
    if flags & libc::MAP_FIXED != 0
        && flags & libc::MAP_FIXED_NOREPLACE != libc::MAP_FIXED_NOREPLACE
        && let Some(range) = range_of(addr, len)
    {
        let held = SHARED.guard.lock(me());
        let mapped = cold::voiding(range, || {
            // SAFETY: the program's own call.
            unsafe { mem::map(addr as u64, len as u64, prot, flags, fd, offset as u64) }
        })?;
        let mut tables = SHARED.tables(&held);
        tables.table.forget(range);
        let seen = managed_all() && plain && large && prot == libc::PROT_READ | libc::PROT_WRITE;
        if seen {
            tables.table.change(range, |note| note.seen = true);
        }
        let _ = &mut tables;
        drop(held);
        if seen {
            wanted();
        }
        return Ok(mapped);
    }
    // SAFETY: the program's own call.
    unsafe { mem::map(addr as u64, len as u64, prot, flags, fd, offset as u64) }
}

fn note(range: Range, change: impl Fn(&mut Note)) {
    let held = SHARED.guard.lock(me());
    SHARED.tables(&held).table.change(range, change);
}

/// mmap(2), with large private memory placed in the zone.
///
/// # Safety
/// As mmap(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mmap(
    addr: *mut c_void,
    len: usize,
    prot: c_int,
    flags: c_int,
    fd: c_int,
    offset: i64,
) -> *mut c_void {
    let result = if active() {
        map(addr, len, prot, flags, fd, offset)
    } else {
        // SAFETY: the program's own call.
        unsafe { mem::map(addr as u64, len as u64, prot, flags, fd, offset as u64) }
    };
    match result {
        Ok(addr) => {
            if flags & libc::MAP_LOCKED != 0
                && active()
                && let Some(range) = range_of(addr as *mut c_void, len)
            {
                note(range, |note| note.locked = true);
            }
            addr as *mut c_void
        }
        Err(errno) => {
            fail(errno);
            libc::MAP_FAILED
        }
    }
}

/// mmap64, the same function on our architectures.
///
/// # Safety
/// As mmap(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mmap64(
    addr: *mut c_void,
    len: usize,
    prot: c_int,
    flags: c_int,
    fd: c_int,
    offset: i64,
) -> *mut c_void {
    // SAFETY: passed on.
    unsafe { mmap(addr, len, prot, flags, fd, offset) }
}

/// munmap(2).
///
/// # Safety
/// As munmap(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn munmap(addr: *mut c_void, len: usize) -> c_int {
    // SAFETY: the program's own call.
    let call = || unsafe { mem::unmap(addr as u64, len as u64) };
    let Some(range) = range_of(addr, len).filter(|_| active()) else { return returned(call()) };
    let held = SHARED.guard.lock(me());
    let result = cold::voiding(range, call);
    if result.is_ok() {
        let tables = SHARED.tables(&held);
        let known = tables.table.entries().iter().any(|(entry, _)| entry.overlaps(&range));
        if known {
            tables.table.forget(range);
            SHARED.changed();
        }
    }
    drop(held);
    returned(result)
}

/// mremap(2): merged pages become private first, for a pool mapping must neither grow nor lie about its neighbours.
///
/// # Safety
/// As mremap(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mremap(
    addr: *mut c_void,
    len: usize,
    new_len: usize,
    flags: c_int,
    new_addr: *mut c_void,
) -> *mut c_void {
    let call = || {
        // SAFETY: the program's own call.
        unsafe { mem::remap(addr as u64, len as u64, new_len as u64, flags, new_addr as u64) }
    };
    let ranges = || Some((range_of(addr, len)?, range_of(addr, new_len)?));
    let fixed = if flags & libc::MREMAP_FIXED != 0 { range_of(new_addr, new_len) } else { Some(NOTHING) };
    let result = if active()
        && let (Some((range, resized)), Some(fixed)) = (ranges(), fixed)
    {
        let held = SHARED.guard.lock(me());
        let shrinks = new_len <= len && flags & (libc::MREMAP_FIXED | libc::MREMAP_DONTUNMAP) == 0;
        let back = if shrinks { Ok(()) } else { cold::before_move(range) };
        // Other threads may write to what only grows, so it is not copied: there is no room for it here.
        let stays = !shrinks && flags & (libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED) == 0;
        let gathered = if back.is_err() {
            back
        } else if shrinks || len == 0 || !SHARED.tables(&held).merged.may_overlap(range) {
            Ok(())
        } else if !stays {
            gather(range)
        } else if pool_mappings(range, |_, _| true).unwrap_or(true) {
            Err(Errno(libc::ENOMEM))
        } else {
            Ok(())
        };
        // What the call takes away.
        let voided = if shrinks { Range { start: resized.end, end: range.end } } else { fixed };
        let result = match gathered.and_then(|()| cold::voiding(voided, call)) {
            // More than one mapping, perhaps by us: what was given back does not join with what never was the pool's.
            Err(Errno(libc::EFAULT)) if stays => Err(Errno(libc::ENOMEM)),
            Err(Errno(libc::EFAULT)) if !shrinks => gather(range).and_then(|()| cold::voiding(voided, call)),
            other => other,
        };
        if let Ok(moved) = result {
            let table = SHARED.tables(&held).table;
            if shrinks {
                table.forget(voided);
            } else {
                let keeps = flags & libc::MREMAP_DONTUNMAP != 0;
                table.carry(range, Range { start: moved, end: moved + resized.len() }, keeps);
                if keeps {
                    // The lock has moved with the pages.
                    table.change(range, |note| note.locked = false);
                }
            }
            SHARED.changed();
        }
        drop(held);
        result
    } else {
        call()
    };
    match result {
        Ok(addr) => addr as *mut c_void,
        Err(errno) => {
            fail(errno);
            libc::MAP_FAILED
        }
    }
}

/// mprotect(2).
///
/// # Safety
/// As mprotect(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mprotect(addr: *mut c_void, len: usize, prot: c_int) -> c_int {
    if !active() {
        // SAFETY: the program's own call.
        return returned(unsafe { mem::protect(addr as u64, len as u64, prot) });
    }
    let held = SHARED.guard.lock(me());
    // SAFETY: the program's own call.
    let result = unsafe { mem::protect(addr as u64, len as u64, prot) };
    drop(held);
    returned(result)
}

/// Makes every page that is shown from the pool in `range` the program's own. The guard is held.
///
/// Where the program may write, the kernel's own copy on write does it, so that no write of another thread is lost; the
/// daemon makes such pages plain memory later. Elsewhere nobody can be writing but devices, and the bytes are copied.
fn unmerge(range: Range) -> Result<()> {
    for_each_merged(range, |part, prot| match prot & libc::PROT_WRITE {
        // A copy would leave behind who still reads into the page.
        0 if pins::are_registered() => Ok(()),
        0 => gather(part),
        _ => populate(part),
    })
}

/// Makes `range`, if part of it is or was shown from the pool, one plain private mapping with the same bytes, rights and
/// attributes, as it would be had nothing been merged: calls that take one mapping only will take it. The guard is held.
///
/// Calls that need this are about memory that nobody else may be writing to at the same time.
///
/// # Errors
/// `ENOMEM` if there is no memory for it; then nothing has changed.
#[inline(never)]
fn gather(range: Range) -> Result<()> {
    let maps = Maps::open()?;
    // Not on the stack, which may be a small one.
    let room = mem::Mapping::anonymous(8 << 10)?;
    // SAFETY: the mapping is ours, writable, and that long.
    let buffer = unsafe { core::slice::from_raw_parts_mut(room.as_ptr(), room.len()) };
    // One mapping, to the program, is a row of neighbours with the same rights, all anonymous or ours.
    let (mut end, mut rights, mut merged, mut one, mut pieces) = (range.start, None, false, true, 0);
    maps.for_each(buffer, |map| {
        if !map.range.overlaps(&range) {
            return;
        }
        let pool = map.name.starts_with(POOL_NAME) && !map.shared;
        merged |= pool;
        pieces += 1;
        one &= (pool || !map.shared && map.inode == 0)
            && map.range.start <= end
            && *rights.get_or_insert(map.prot) == map.prot;
        end = map.range.end;
    })?;
    let Some(rights) = rights.filter(|_| one && (merged || pieces > 1) && end >= range.end) else { return Ok(()) };
    let fresh = copy_of(range.start, range.len())?;
    // SAFETY: the fresh memory is ours; nothing is read or written there until it is the program's.
    unsafe { mem::protect(fresh.addr(), range.len(), rights) }?;
    let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
    // SAFETY: replaces what lies there by memory of the same bytes.
    unsafe { mem::remap(fresh.addr(), range.len(), range.len(), flags, range.start) }?;
    core::mem::forget(fresh);
    let held = SHARED.guard.lock(me());
    keep_attributes(range, SHARED.tables(&held).table, true);
    Ok(())
}

/// Makes the pages of `part`, which the program may write, its own, all but those that are guarded.
fn populate(part: Range) -> Result<()> {
    // SAFETY: changes no bytes.
    let write = |range: Range| unsafe { mem::advise(range.start, range.len(), libc::MADV_POPULATE_WRITE) };
    match write(part) {
        Err(Errno(libc::EFAULT)) => {
            (part.start..part.end).step_by(PAGE_SIZE).try_for_each(|addr| match write(Range::pages_from(addr, 1)) {
                Err(Errno(libc::EFAULT)) => Ok(()),
                other => other,
            })
        }
        other => other,
    }
}

/// [`gather`] for each pool mapping in `range`.
fn gather_all(range: Range) -> Result<()> {
    for_each_merged(range, |part, _| gather(part))
}

/// Calls `act` with each pool mapping in `range` and its rights; what failed first is the result.
fn for_each_merged(range: Range, act: impl Fn(Range, c_int) -> Result<()>) -> Result<()> {
    let mut failed = None;
    pool_mappings(range, |part, prot| {
        failed = failed.or(act(part, prot).err());
        false
    })?;
    failed.map_or(Ok(()), Err)
}

/// Makes what is merged in `range` plain where nobody can write to it just now, so that a copy loses nothing. The guard is
/// held.
///
/// # Errors
/// `refused` if some of it can be written to, which is left as it is; and as [`gather`].
fn gather_unwritable(range: Range, refused: i32) -> Result<()> {
    for_each_merged(range, |part, prot| if prot & libc::PROT_WRITE != 0 { Err(Errno(refused)) } else { gather(part) })
}

/// `MADV_WIPEONFORK`, which the kernel refuses for a file's pages: what is merged is plain memory first.
fn wipe_on_fork(range: Range) -> Result<()> {
    // SAFETY: changes no bytes of this process.
    let call = || unsafe { mem::advise(range.start, range.len(), libc::MADV_WIPEONFORK) };
    let held = SHARED.guard.lock(me());
    let tables = SHARED.tables(&held);
    let merged = tables.merged.may_overlap(range) && pool_mappings(range, |_, _| true).unwrap_or(true);
    // From here on, so that none of it is merged again behind us.
    tables.table.change(range, |note| note.excluded = true);
    drop(held);
    if merged {
        // Where other threads may be writing the agent's thread gives back; what it did not is refused, as a copy made here
        // may lose one of their writes.
        without_thread(libc::EINVAL, range, || {
            let _held = SHARED.guard.lock(me());
            gather_unwritable(range, libc::EINVAL).and_then(|()| call()).map(|()| 0)
        })?;
    } else {
        call()?;
    }
    // So that a copy of it is wiped as well.
    note(range, |note| note.wipe_on_fork = true);
    SHARED.changed();
    Ok(())
}

fn advise(range: Range, advice: c_int) -> Result<()> {
    const MADV_FREE: c_int = libc::MADV_FREE;
    // SAFETY: the program's own call.
    let call = |advice| unsafe { mem::advise(range.start, range.len(), advice) };
    if matches!(advice, libc::MADV_POPULATE_READ | libc::MADV_POPULATE_WRITE) {
        // Touches, one after the other: what waits for a page must not hold up what makes room for it.
        return call(advice);
    }
    if advice == libc::MADV_WIPEONFORK {
        return wipe_on_fork(range);
    }
    let held = SHARED.guard.lock(me());
    let merged = SHARED.tables(&held).merged.may_overlap(range);
    let result = match advice {
        libc::MADV_DONTNEED | MADV_FREE | libc::MADV_DONTNEED_LOCKED if merged => {
            // A pool mapping would show its old bytes again: put fresh memory in its place first. Where it is locked the kernel
            // gets no further.
            let table = SHARED.tables(&held).table;
            let locked = table.first_locked(range).filter(|_| advice != libc::MADV_DONTNEED_LOCKED);
            let reached = Range { start: range.start, end: locked.unwrap_or(range.end) };
            // Who cannot see the mappings (a root directory without /proc, no descriptors left) leaves it to the agent, which
            // hears of the discard, but does not know the table meanwhile.
            let seen = match Maps::open() {
                Ok(maps) => replace_merged(&maps, reached, None, Some(table)).map(|_| true)?,
                Err(_) if SHARED.holds.load(Ordering::Acquire) => false,
                Err(errno) => return Err(errno),
            };
            SHARED.changed();
            // What lies between may be out.
            if seen {
                cold::voiding(range, || call(advice))
            } else {
                // The agent has heard of it when this returns (as of a discard, which the other may be), and has done it when
                // the pages can be read.
                let advice = if advice == MADV_FREE { libc::MADV_DONTNEED } else { advice };
                let result = cold::voiding(range, || call(advice));
                cold::read_in(range);
                keep_attributes(range, table, true);
                result
            }
        }
        libc::MADV_UNMERGEABLE if merged => {
            unmerge(range)?;
            call(advice)
        }
        libc::MADV_REMOVE if merged => Err(Errno(libc::EINVAL)),
        mem::MADV_GUARD_INSTALL => {
            // Where pages of a file bear marks the kernel tries for ever; and when the guard goes they read zero, so neither
            // what is merged nor what is out may come back. It may refuse, too: until then the bytes stay.
            let gathered = if merged { gather_all(range).inspect(|()| SHARED.changed()) } else { Ok(()) };
            gathered.and_then(|()| call(advice)).inspect(|()| {
                let _ = cold::voiding(range, || call(libc::MADV_DONTNEED));
            })
        }
        // The tier is where the program's cold pages go; there need be no swap. With none of ours, the kernel decides.
        libc::MADV_COLD | libc::MADV_PAGEOUT | libc::MADV_WILLNEED if cold::hint(range, advice) => Ok(()),
        libc::MADV_DONTNEED | MADV_FREE | libc::MADV_DONTNEED_LOCKED | libc::MADV_REMOVE => {
            cold::voiding(range, || call(advice))
        }
        _ => call(advice),
    };
    if advice == libc::MADV_MERGEABLE || result.is_ok() {
        let tables = SHARED.tables(&held);
        let mut changed = true;
        match advice {
            // KSM may be absent from this kernel (EINVAL); the program's wish stands all the same.
            libc::MADV_MERGEABLE => tables.table.change(range, |note| {
                note.mergeable = true;
                note.excluded = false;
            }),
            libc::MADV_UNMERGEABLE => tables.table.change(range, |note| {
                note.mergeable = false;
                note.excluded = true;
            }),
            libc::MADV_DONTFORK => tables.table.change(range, |note| note.dont_fork = true),
            libc::MADV_DOFORK => tables.table.change(range, |note| note.dont_fork = false),
            libc::MADV_KEEPONFORK => tables.table.change(range, |note| note.wipe_on_fork = false),
            // What must not be dumped is secret: it is managed only if the program asked for just that.
            libc::MADV_DONTDUMP => tables.table.change(range, |note| {
                note.dont_dump = true;
                note.seen = false;
            }),
            libc::MADV_DODUMP => tables.table.change(range, |note| note.dont_dump = false),
            libc::MADV_HUGEPAGE => tables.table.change(range, |note| (note.huge, note.small) = (true, false)),
            libc::MADV_NOHUGEPAGE => tables.table.change(range, |note| (note.huge, note.small) = (false, true)),
            _ => changed = false,
        }
        drop(held);
        if changed {
            if advice == libc::MADV_MERGEABLE {
                wanted();
            } else {
                SHARED.changed();
            }
        }
    }
    if advice == libc::MADV_MERGEABLE { Ok(()) } else { result }
}

/// madvise(2): discards, merging and attributes are followed.
///
/// # Safety
/// As madvise(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn madvise(addr: *mut c_void, len: usize, advice: c_int) -> c_int {
    match range_of(addr, len) {
        Some(range) if !range.is_empty() && active() => returned(advise(range, advice)),
        // SAFETY: the program's own call.
        _ => returned(unsafe { mem::advise(addr as u64, len as u64, advice) }),
    }
}

/// posix_madvise(3): as the C library, `POSIX_MADV_DONTNEED` does nothing.
///
/// # Safety
/// As posix_madvise(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn posix_madvise(addr: *mut c_void, len: usize, advice: c_int) -> c_int {
    if advice == libc::POSIX_MADV_DONTNEED {
        return 0;
    }
    // SAFETY: the program's own call.
    unsafe { mem::advise(addr as u64, len as u64, advice) }.map_or_else(|errno| errno.0, |()| 0)
}

/// prctl(2): `PR_SET_MEMORY_MERGE` manages all memory; a seccomp filter that forbids what the agent does makes it leave first.
///
/// # Safety
/// As prctl(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn prctl(option: c_int, a: usize, b: usize, c: usize, d: usize) -> c_int {
    const PR_SET_MEMORY_MERGE: c_int = 67;
    if active() {
        match option {
            PR_SET_MEMORY_MERGE if b == 0 && c == 0 && d == 0 && a <= 1 => {
                SHARED.all.store(a == 1, Ordering::Relaxed);
                if a == 1 {
                    wanted();
                }
            }
            libc::PR_SET_SECCOMP if a == libc::SECCOMP_MODE_STRICT as usize => leave_for_filter(),
            libc::PR_SET_SECCOMP if b != 0 => meet_filter(b as u64, false),
            _ => {}
        }
    }
    // SAFETY: the program's own call.
    match unsafe { syscall!(libc::SYS_prctl, option, a, b, c, d) } {
        Ok(value) => {
            if active() {
                privileges::taken_by_prctl(option).follow();
            }
            value as c_int
        }
        Err(errno) => {
            fail(errno);
            -1
        }
    }
}

/// The program is about to install the filter at `at`, a `sock_fprog`, for `all` its threads: stays if the agent can live with
/// it, else leaves. Our thread has it too, by the kernel's hand or since it is replaced.
fn meet_filter(at: u64, all: bool) {
    if !is_own_process() {
        return;
    }
    let verdict = filter_at(at).filter(|verdict| verdict.stay && (verdict.start || all));
    let Some(verdict) = verdict else { return leave_for_filter() };
    if !verdict.start && is_in_the_way() {
        return leave_for_filter();
    }
    if !verdict.start {
        // Now or never. Who has nothing to merge yet may have later.
        let away = Away::take();
        start();
        drop(away);
        wait_begun();
        MAY_START.store(false, Ordering::Release);
    }
    MAY_FOLLOW.fetch_and(verdict.follow, Ordering::AcqRel);
}

/// What the filter of the program's at `at` says about us; nothing if it cannot be read, which the kernel will say too.
fn filter_at(at: u64) -> Option<filter::Verdict> {
    // Through the kernel: the program may pass anything.
    let memory = Fd::open(c"/proc/thread-self/mem", libc::O_RDONLY, 0).ok()?;
    let mut head = [0u8; size_of::<libc::sock_fprog>()];
    (memory.read_at(&mut head, at) == Ok(head.len())).then_some(())?;
    // SAFETY: plain integers and a pointer that is not followed; the array is as long, and need not be aligned.
    let head: libc::sock_fprog = unsafe { core::ptr::read_unaligned(head.as_ptr().cast()) };
    let count = usize::from(head.len);
    if count == 0 || count > filter::INSTRUCTIONS_MAX {
        return None;
    }
    let room = mem::Mapping::anonymous(count * size_of::<libc::sock_filter>()).ok()?;
    // SAFETY: the mapping is ours, writable, and at least that long.
    let bytes = unsafe { core::slice::from_raw_parts_mut(room.as_ptr(), count * size_of::<libc::sock_filter>()) };
    (memory.read_at(bytes, head.filter as u64) == Ok(bytes.len())).then_some(())?;
    // SAFETY: page aligned, `count` instructions long, and any bytes are instructions of integers.
    let program = unsafe { core::slice::from_raw_parts(room.as_ptr() as *const libc::sock_filter, count) };
    Some(filter::judge(program))
}

/// The agent leaves, for good, and merged pages become the program's own: looking after them takes system calls that
/// the filter may not allow.
fn leave_for_filter() {
    if is_own_process() && is_in_the_way() {
        // It is asked for, and does not come back.
        MAY_START.store(false, Ordering::Release);
        return ask_to_leave(true);
    }
    leave_with_all(3);
}

/// What an agent that leaves with all, perhaps for good, gives back. Where devices may be reading into memory the frames stay, so
/// that is made the program's own where it is, by the kernel. Behind a filter nobody may be able to look after what is the pool's
/// still, so then it stays only for buffers that are registered.
fn all_but_pinned(for_good: bool) -> Range {
    let held = || if for_good { pins::are_registered() } else { pins::may_be_there() };
    if has_merged() && held() { NOTHING } else { EVERYTHING }
}

/// Asks the agent to leave, perhaps for good, and does not wait for it: the caller [`is_in_the_way`].
fn ask_to_leave(for_good: bool) {
    ask_to_leave_giving_back(all_but_pinned(for_good));
}

/// As [`stop_giving_back`] for all memory, whatever the program may do there; not if the caller [`is_in_the_way`].
fn leave_with_all(final_phase: u32) {
    if !is_own_process() {
        return;
    }
    let _away = Away::take();
    if SHARED.phase.load(Ordering::Acquire) == 3 {
        return;
    }
    if has_merged() {
        // Nobody else can give back what is merged.
        start();
    }
    stop_giving_back(all_but_pinned(final_phase == 3), final_phase);
    let held = SHARED.guard.lock(me());
    if SHARED.tables(&held).merged.is_empty() {
        return;
    }
    // What the agent did not give back. Others may be writing there: then the kernel makes the copies, in mappings that are the
    // pool's still.
    if unmerge(EVERYTHING).is_ok() && pool_mappings(EVERYTHING, |_, _| true) == Ok(false) {
        SHARED.tables(&held).merged.clear();
    }
}

/// Makes all that is still shown from the pool the program's own; nobody else may be writing to it.
fn gather_everything() {
    let held = SHARED.guard.lock(me());
    if !SHARED.tables(&held).merged.is_empty() && gather_all(EVERYTHING).is_ok() {
        SHARED.tables(&held).merged.clear();
    }
}

fn has_merged() -> bool {
    let held = SHARED.guard.lock(me());
    !SHARED.tables(&held).merged.is_empty()
}

/// How often a call that our thread stood in the way of is tried again, a millisecond apart, once that is gone.
const ALONE_TRIES: u32 = 20;

/// The same while the thread is still listed, which has ended and waits for a processor, or where the daemon has yet to close
/// its copies of a userfaultfd.
const BUSY_TRIES: u32 = 2000;

/// Makes `call` with the agent's thread gone, which may have been why it fails with `errno`, and what `range` shows from the
/// pool plain memory. Nothing is done (`ENOMEM`) where a limit of memory has no room for all that is out.
fn without_thread(errno: i32, range: Range, call: impl Fn() -> Result<usize>) -> Result<usize> {
    // Waiting for the agent, which may wait for the guard, would be for ever.
    if !active() || !is_own_process() || SHARED.guard.is_held_by(me()) {
        return call();
    }
    let away = Away::take();
    if away.is_nested() {
        return call();
    }
    if !range.is_empty() && SHARED.phase.load(Ordering::Acquire) == 0 {
        // Nobody else can give back what is merged.
        start();
    }
    let mut ran = SHARED.phase.load(Ordering::Acquire) == 1;
    if ran && !MAY_START.load(Ordering::Acquire) {
        // It could not come back.
        leave_with_all(3);
        ran = false;
    }
    // The daemon has copies of what a cold client registers its memory with.
    let is_shared = errno == libc::EBUSY && (cold::COLD.load(Ordering::Relaxed) || cold::is_leased());
    let mut buffers = [[0; TASK_PATH_LEN]; 2];
    let [first, second] = &mut buffers;
    let paths = [SHARED.thread.path(b"", first), cold::second_thread().path(b"", second)];
    if ran {
        let held = SHARED.guard.lock(me());
        cold::before_leaving()?;
        drop(held);
        // Where the call needs plain memory it is refused only for what is held for good: a device that has a page for a moment
        // may be reading anywhere.
        let held = !range.is_empty() && if errno == 0 { pins::may_be_there() } else { pins::are_registered() };
        stop_giving_back(if held { NOTHING } else { range }, 0);
    }
    let mut result = call();
    // The kernel tells us that a thread has ended before it no longer counts, on a busy machine long before.
    let (mut tries, mut busy_tries) = (ALONE_TRIES, BUSY_TRIES);
    while ran && result == Err(Errno(errno)) && tries > 0 {
        if busy_tries > 0 && (is_shared || paths.into_iter().flatten().any(|path| is_there(path))) {
            busy_tries -= 1;
        } else {
            tries -= 1;
        }
        let _ = pagefold_os::fd::poll(&mut [], 1);
        result = call();
    }
    if ran {
        start();
    }
    result
}

fn is_there(path: &CStr) -> bool {
    Fd::open(path, libc::O_PATH, 0).is_ok()
}

/// Makes `call`, again with the agent's thread gone if it fails as calls do that want a process of one thread.
fn alone(call: impl Fn() -> Result<usize>) -> c_int {
    let result = match call() {
        Err(Errno(libc::EINVAL)) if active() => {
            let result = without_thread(libc::EINVAL, NOTHING, call);
            if result.is_ok() && is_own_process() && SHARED.phase.load(Ordering::Acquire) == 0 {
                // No thread can be made here any more, as before the first child of a new namespace of processes. The caller is
                // the only one, so nobody is writing.
                gather_everything();
            }
            result
        }
        result => result,
    };
    returned(result.map(drop))
}

/// unshare(2).
///
/// # Safety
/// As unshare(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unshare(flags: c_int) -> c_int {
    // SAFETY: the program's own call.
    alone(|| unsafe { syscall!(libc::SYS_unshare, flags) })
}

/// setns(2).
///
/// # Safety
/// As setns(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn setns(fd: c_int, kind: c_int) -> c_int {
    // SAFETY: the program's own call.
    alone(|| unsafe { syscall!(libc::SYS_setns, fd, kind) })
}

/// syscall(2): the raw ways into what is followed above.
///
/// # Safety
/// As syscall(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn syscall(number: c_long, a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) -> c_long {
    if active() {
        match number {
            // Libraries probe for it with no filter, or with flags that strict mode does not take: nothing is installed then.
            libc::SYS_seccomp if a == libc::SECCOMP_SET_MODE_STRICT as usize && b == 0 => leave_for_filter(),
            libc::SYS_seccomp if a == libc::SECCOMP_SET_MODE_FILTER as usize && c != 0 => {
                meet_filter(c as u64, b & libc::SECCOMP_FILTER_FLAG_TSYNC as usize != 0);
            }
            // SAFETY: the same call by its C name.
            libc::SYS_madvise => return c_long::from(unsafe { madvise(a as *mut _, b, c as c_int) }),
            // SAFETY: as above.
            libc::SYS_munmap => return c_long::from(unsafe { munmap(a as *mut _, b) }),
            // SAFETY: as above.
            libc::SYS_mmap => {
                return unsafe { mmap(a as *mut _, b, c as c_int, d as c_int, e as c_int, f as i64) } as c_long;
            }
            // SAFETY: as above.
            libc::SYS_mremap => return unsafe { mremap(a as *mut _, b, c, d as c_int, e as *mut _) } as c_long,
            // SAFETY: as above.
            libc::SYS_mprotect => return c_long::from(unsafe { mprotect(a as *mut _, b, c as c_int) }),
            // SAFETY: as above.
            libc::SYS_prctl => return c_long::from(unsafe { prctl(a as c_int, b, c, d, e) }),
            // SAFETY: as above.
            libc::SYS_ioctl => {
                return c_long::from(unsafe {
                    userfaultfd::ioctl(a as c_int, b as core::ffi::c_ulong, c as *mut c_void)
                });
            }
            // SAFETY: as above.
            libc::SYS_mlock => return c_long::from(unsafe { locks::mlock(a as *mut _, b) }),
            // SAFETY: as above.
            libc::SYS_mlock2 => return c_long::from(unsafe { locks::mlock2(a as *mut _, b, c as core::ffi::c_uint) }),
            // SAFETY: as above.
            libc::SYS_munlock => return c_long::from(unsafe { locks::munlock(a as *mut _, b) }),
            // SAFETY: as above.
            libc::SYS_mlockall => return c_long::from(unsafe { locks::mlockall(a as c_int) }),
            // SAFETY: as above.
            libc::SYS_munlockall => return c_long::from(unsafe { locks::munlockall() }),
            // SAFETY: as above.
            libc::SYS_unshare => return c_long::from(unsafe { unshare(a as c_int) }),
            // SAFETY: as above.
            libc::SYS_setns => return c_long::from(unsafe { setns(a as c_int, b as c_int) }),
            _ => {}
        }
    }
    let forks = is_fork(number, a, b);
    if forks && active() && !may_fork() {
        return -1;
    }
    // SAFETY: the program's own call.
    let result = unsafe { syscall!(number, a, b, c, d, e, f) };
    if forks && active() {
        if result == Ok(0) { after_fork_child() } else { after_fork_parent() }
    }
    if active() && result.is_ok() {
        privileges::taken_by(number).follow();
    }
    match result {
        Ok(value) => value as c_long,
        Err(errno) => {
            fail(errno);
            -1
        }
    }
}

type ForkFn = unsafe extern "C" fn() -> c_int;
type CloneFn = unsafe extern "C" fn(
    extern "C" fn(*mut c_void) -> c_int,
    *mut c_void,
    c_int,
    *mut c_void,
    *mut c_void,
    *mut c_void,
    *mut c_void,
) -> c_int;

static NEXT_FORK: AtomicUsize = AtomicUsize::new(0);
static NEXT_LIBC_FORK: AtomicUsize = AtomicUsize::new(0);
static NEXT_CLONE: AtomicUsize = AtomicUsize::new(0);

/// The C library's `name`, a fork; nothing, with `errno` set, if it has none.
fn next_fork(cache: &AtomicUsize, name: *const c_char) -> Option<ForkFn> {
    match next(cache, name, 0) {
        0 => {
            fail(Errno(libc::ENOSYS));
            None
        }
        // SAFETY: both forks have this type.
        function => Some(unsafe { core::mem::transmute::<usize, ForkFn>(function) }),
    }
}

/// fork(2): refused with `ENOMEM` where a limit of memory has no room for what the child must have.
///
/// # Safety
/// As fork(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fork() -> c_int {
    let Some(call) = next_fork(&NEXT_LIBC_FORK, c"fork".as_ptr()) else { return -1 };
    if active() {
        if !may_fork() {
            return -1;
        }
        // The handlers, ours behind the others', do the rest: they may wait for who waits for the guard.
        after_fork_parent();
    }
    // SAFETY: the program's own call.
    unsafe { call() }
}

/// _Fork(3): a fork without the handlers of pthread_atfork(3); ours are needed all the same.
///
/// # Safety
/// As fork(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn _Fork() -> c_int {
    let Some(call) = next_fork(&NEXT_FORK, c"_Fork".as_ptr()) else { return -1 };
    if !active() {
        // SAFETY: the program's own call.
        return unsafe { call() };
    }
    if !may_fork() {
        return -1;
    }
    // SAFETY: the program's own call.
    let pid = unsafe { call() };
    if pid == 0 {
        after_fork_child()
    } else {
        after_fork_parent()
    }
    pid
}

/// What a cloned child begins with.
struct Begin {
    function: extern "C" fn(*mut c_void) -> c_int,
    argument: *mut c_void,
}

extern "C" fn begin_clone(begin: *mut c_void) -> c_int {
    let _ = is_new_child();
    // It has a stack of its own.
    if begin_child(0) {
        start_unless_away();
    }
    // SAFETY: the parent's frame, of which the child has a copy.
    let begin = unsafe { &*begin.cast::<Begin>() };
    let status = (begin.function)(begin.argument);
    // The C library ends this thread only, and expects that to be the end of the process.
    let _away = Away::take();
    stop(3);
    status
}

/// clone(3): without `CLONE_VM` it is a fork.
///
/// # Safety
/// As clone(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn clone(
    function: extern "C" fn(*mut c_void) -> c_int,
    stack: *mut c_void,
    flags: c_int,
    argument: *mut c_void,
    parent_tid: *mut c_void,
    tls: *mut c_void,
    child_tid: *mut c_void,
) -> c_int {
    let found = next(&NEXT_CLONE, c"clone".as_ptr(), 0);
    if found == 0 {
        fail(Errno(libc::ENOSYS));
        return -1;
    }
    // SAFETY: it is the C library's `clone`; arguments that the caller did not give are passed on as they came.
    let call: CloneFn = unsafe { core::mem::transmute(found) };
    if !active() || flags & libc::CLONE_VM != 0 || stack.is_null() {
        // SAFETY: the program's own call.
        return unsafe { call(function, stack, flags, argument, parent_tid, tls, child_tid) };
    }
    let mut begin = Begin { function, argument };
    if !may_fork() {
        return -1;
    }
    // SAFETY: the program's own call; `begin` lives in this frame, which the child's copy of memory has too.
    let pid =
        unsafe { call(begin_clone, stack, flags, core::ptr::from_mut(&mut begin).cast(), parent_tid, tls, child_tid) };
    after_fork_parent();
    pid
}

/// True for the raw calls that copy the address space.
fn is_fork(number: c_long, a: usize, b: usize) -> bool {
    #[cfg(target_arch = "x86_64")]
    if number == libc::SYS_fork {
        return true;
    }
    let flags = match number {
        libc::SYS_clone => a as u64,
        libc::SYS_clone3 => match clone_flags(a, b) {
            Some(flags) => flags,
            None => return false,
        },
        _ => return false,
    };
    flags & libc::CLONE_VM as u64 == 0
}

/// The flags in the arguments of a clone3(2), `size` bytes at `at`; nothing if the kernel will refuse them, or if there is no
/// agent that a child could miss.
fn clone_flags(at: usize, size: usize) -> Option<u64> {
    /// The shortest that the kernel takes. Flags come first.
    const SIZE_MIN: usize = 64;
    if size < SIZE_MIN || !active() || SHARED.phase.load(Ordering::Acquire) == 3 {
        return None;
    }
    let at = at as u64;
    let end = at.checked_add(SIZE_MIN as u64)?.checked_next_multiple_of(PAGE)?;
    // The program may pass anything.
    cold::read_in(Range { start: at & !(PAGE - 1), end })
        // SAFETY: the kernel could read there just now; any bytes are a number.
        .then(|| unsafe { core::ptr::read_unaligned(at as *const u64) })
}

static NEXT_FREE: AtomicUsize = AtomicUsize::new(0);
static NEXT_REALLOC: AtomicUsize = AtomicUsize::new(0);

unsafe extern "C" {
    fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void;
    fn __libc_free(block: *mut c_void);
    fn __libc_realloc(block: *mut c_void, size: usize) -> *mut c_void;
}

/// The next `name` after ours in the order of libraries, looked up once; `meanwhile` serves the lookup itself.
fn next_with(cache: &AtomicUsize, name: *const c_char, meanwhile: usize, fallback: usize) -> usize {
    const RTLD_NEXT: *mut c_void = -1isize as *mut c_void;
    match cache.load(Ordering::Acquire) {
        0 => {
            cache.store(meanwhile, Ordering::Release);
            // SAFETY: a valid C string.
            let found = unsafe { dlsym(RTLD_NEXT, name) } as usize;
            let found = if found == 0 { fallback } else { found };
            cache.store(found, Ordering::Release);
            found
        }
        found => found,
    }
}

/// The next `name` after ours, or `fallback` if there is none.
fn next(cache: &AtomicUsize, name: *const c_char, fallback: usize) -> usize {
    next_with(cache, name, fallback, fallback)
}

/// No function: the next `free` is being looked up.
const LOOKING: usize = 1;

/// The next `free`, or [`LOOKING`].
fn next_free() -> usize {
    next_with(&NEXT_FREE, c"free".as_ptr(), LOOKING, __libc_free as *const () as usize)
}

/// Whether a sanitizer or valgrind looks at every access: they keep shadows of all memory, at addresses of their own.
fn is_instrumented() -> bool {
    let names = [c"__asan_init", c"__tsan_init", c"__msan_init", c"__hwasan_init", c"__lsan_init"];
    // SAFETY: valid C strings.
    let has = |name: &CStr| !unsafe { dlsym(core::ptr::null_mut(), name.as_ptr()) }.is_null();
    let preloaded = text(c"LD_PRELOAD").unwrap_or(b"");
    names.into_iter().any(has) || preloaded.windows(10).any(|part| part == b"/vgpreload")
}

/// The size of `block` if the C library's allocator mapped it for itself and we manage such blocks.
///
/// # Safety
/// `block` is a live block of the C library's allocator.
unsafe fn own_mapping(block: *mut c_void, next: usize, libc_own: usize) -> Option<Range> {
    const MAPPED: usize = 2;
    if next != libc_own || block.is_null() || !active() || !managed_all() {
        return None;
    }
    // SAFETY: the word before a block of this allocator is its size with three flag bits.
    let size = unsafe { *block.cast::<usize>().sub(1) };
    (size & MAPPED != 0)
        .then(|| Range { start: (block as u64 - 16) & !(PAGE - 1), end: block as u64 - 16 + (size & !7) as u64 })
}

/// free(3): the end of a block that has a mapping of its own is an munmap(2) inside the C library.
///
/// # Safety
/// As free(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn free(block: *mut c_void) {
    let own = __libc_free as *const () as usize;
    let function = next_free();
    if function == LOOKING {
        // The text of an earlier error, perhaps another allocator's.
        return;
    }
    // SAFETY: the block is live, as the caller promises.
    let mapped = unsafe { own_mapping(block, function, libc_free_of_next(own)) };
    // SAFETY: `function` is a `free`.
    let call: unsafe extern "C" fn(*mut c_void) = unsafe { core::mem::transmute(function) };
    match mapped {
        // SAFETY: passed on.
        None => unsafe { call(block) },
        Some(range) => {
            let held = SHARED.guard.lock(me());
            let _ = cold::voiding(range, || {
                // SAFETY: passed on.
                unsafe { call(block) };
                Ok(())
            });
            SHARED.tables(&held).table.forget(range);
            drop(held);
            SHARED.changed();
        }
    }
}

/// What `dlsym` gives for the C library's own `free`: its public name, not the internal one.
fn libc_free_of_next(own: usize) -> usize {
    static OWN: AtomicUsize = AtomicUsize::new(0);
    match OWN.load(Ordering::Acquire) {
        0 => {
            // Both names stand for one function in the C library; the public one is what the lookup finds.
            let found = NEXT_FREE.load(Ordering::Acquire);
            let same = if found == own || same_object(found, own) { found } else { usize::MAX };
            OWN.store(same, Ordering::Release);
            same
        }
        found => found,
    }
}

/// True if both addresses lie in the same loaded object.
fn same_object(a: usize, b: usize) -> bool {
    #[repr(C)]
    struct Info {
        name: *const c_char,
        base: *mut c_void,
        symbol: *const c_char,
        addr: *mut c_void,
    }
    unsafe extern "C" {
        fn dladdr(addr: *const c_void, info: *mut Info) -> c_int;
    }
    let base = |addr: usize| {
        let mut info = Info {
            name: core::ptr::null(),
            base: core::ptr::null_mut(),
            symbol: core::ptr::null(),
            addr: core::ptr::null_mut(),
        };
        // SAFETY: fills the structure for any address.
        let known = unsafe { dladdr(addr as *const c_void, &mut info) };
        (known != 0).then_some(info.base as usize)
    };
    base(a).is_some() && base(a) == base(b)
}

/// realloc(3): as free(3); a block with a mapping of its own may move by mremap(2) inside the C library.
///
/// # Safety
/// As realloc(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn realloc(block: *mut c_void, size: usize) -> *mut c_void {
    let own = __libc_realloc as *const () as usize;
    let function = next(&NEXT_REALLOC, c"realloc".as_ptr(), own);
    let free_function = next(&NEXT_FREE, c"free".as_ptr(), __libc_free as *const () as usize);
    // SAFETY: the block is live, as the caller promises.
    let mapped = unsafe { own_mapping(block, free_function, libc_free_of_next(__libc_free as *const () as usize)) };
    // SAFETY: `function` is a `realloc`.
    let call: unsafe extern "C" fn(*mut c_void, usize) -> *mut c_void = unsafe { core::mem::transmute(function) };
    match mapped {
        // SAFETY: passed on.
        None => unsafe { call(block, size) },
        Some(range) => {
            let held = SHARED.guard.lock(me());
            let merged = SHARED.tables(&held).merged.may_overlap(range);
            // What is out first: gathering copies what is here.
            let back = cold::before_move(range);
            if back.and_then(|()| if merged { gather(range) } else { Ok(()) }).is_err() {
                drop(held);
                fail(Errno(libc::ENOMEM));
                return core::ptr::null_mut();
            }
            // SAFETY: passed on.
            let moved = unsafe { call(block, size) };
            SHARED.tables(&held).table.forget(range);
            drop(held);
            SHARED.changed();
            moved
        }
    }
}
