//! What our threads do now and then: end if only they are left, take back what the program tracks no more.

use crate::runtime::thread::exit_thread;
use crate::state::{SHARED, count_threads};
use pagefold_os::fd::Fd;
use pagefold_os::uffd::{self, Uffd};
use pagefold_os::{sched, stat};

/// How often our threads look around, in nanoseconds.
const LOOKS_NS: u64 = 500_000_000;

/// Ends the calling thread of ours if the program's first thread has ended, and none but ours live on: the process must not
/// live on for us.
pub(crate) fn exit_if_alone() {
    let Ok(file) = Fd::open(c"/proc/self/stat", libc::O_RDONLY, 0) else { return };
    let mut text = [0u8; 512];
    let Ok(got) = file.read(&mut text) else { return };
    let field = |number| text.get(..got).and_then(|text| stat::field(text, number));
    let alone = |threads: &str| threads.parse() == Ok(1 + count_threads());
    if field(3) == Some("Z") && field(20).is_some_and(alone) {
        exit_thread();
    }
}

/// What our threads do now and then, since `looked`: end if they are the last ones, and take back what the program tracked
/// by a userfaultfd that is closed by now. `probe` is a descriptor of ours. False if it is too early for that.
pub(crate) fn housekeep(looked: &mut u64, me: usize, probe: Option<&Uffd>) -> bool {
    let now = sched::monotonic_ns();
    if now - *looked < LOOKS_NS {
        return false;
    }
    *looked = now;
    exit_if_alone();
    let (Some(held), Some(probe)) = (SHARED.mapping_lock.try_lock(me), probe) else { return true };
    let table = SHARED.tables(&held).table;
    let mut from = 0;
    while let Some(range) = table.first_tracked(from) {
        from = range.end;
        // The kernel takes a range from one descriptor only.
        if probe.register(range, uffd::MODE_WP).is_ok() {
            let _ = probe.unregister(range);
            table.change(range, |note| note.tracked = false);
            SHARED.changed();
        }
    }
    true
}
