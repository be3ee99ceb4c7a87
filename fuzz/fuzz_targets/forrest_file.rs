//! A file with arbitrary bytes in the store's bookkeeping is opened or refused, never followed to invalid memory.
#![no_main]

use forrest::Options;
use libfuzzer_sys::fuzz_target;
use llds::arena::{THREADS_MAX, ThreadRecord};
use std::os::unix::fs::FileExt;

const LIMIT: u64 = 1 << 20;
const HUGE: u64 = 2 << 20;
const RECORD: u64 = size_of::<ThreadRecord>() as u64;

fuzz_target!(|data: &[u8]| {
    let path = std::path::PathBuf::from(format!("/dev/shm/forrest-fuzz-{}", std::process::id()));
    let _ = std::fs::remove_file(&path);
    let options = Options::new().limit_bytes(LIMIT);
    let store = options.create_path(&path).expect("room in /dev/shm");
    for number in 0..100u64 {
        store.set(&number.to_le_bytes(), b"short").expect("room for a few");
        store.set(&number.to_be_bytes(), &[7; 300]).expect("room for a few");
    }
    drop(store);
    let file = std::fs::File::options().read(true).write(true).open(&path).expect("just made");
    let length = file.metadata().expect("just made").len();
    // Header, thread records, table of spans and hints; then the words of the store: settings, directory, locks.
    let root = length - LIMIT.next_multiple_of(HUGE) - HUGE;
    let table = 4096 + THREADS_MAX as u64 * RECORD;
    let places = [
        (0, 320),
        (4096, 1024),
        (4096, 2 * RECORD),
        (table, 32),
        (table, 4096),
        (root, 2048),
        (root + 4096, 32 << 10),
        (root + 4096 + (32 << 10), 32 << 10),
    ];
    // Each patch: where, how many bytes, the bytes. A short tail also cuts the file.
    let mut rest = data;
    while let [place, low, high, bytes, tail @ ..] = rest {
        let (start, room) = places[usize::from(*place) % places.len()];
        let (patch, tail) = tail.split_at(tail.len().min(usize::from(*bytes) % 73));
        let at = start + u64::from(u16::from_le_bytes([*low, *high])) * 2 % room;
        let _ = file.write_all_at(patch, at);
        rest = tail;
    }
    if let [low, high, 3] = rest {
        let _ = file.set_len(u64::from(u16::from_le_bytes([*high, *low])) * 64);
    }
    drop(options.open_existing_path(&path));
    let _ = std::fs::remove_file(&path);
});
