//! Shared stores: names, settings, refusals, several handles at the same time, memory that is given back.

use forrest::{Error, Hash, Options, Store};
use std::collections::HashMap;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::PathBuf;

/// A name of this test's own; its store is removed when the test ends, also if it fails.
struct Name(String);

impl Name {
    fn new(what: &str) -> Name {
        Name(format!("test-{what}-{}", std::process::id()))
    }

    fn path(&self) -> PathBuf {
        PathBuf::from(format!("/dev/shm/forrest.{}", self.0))
    }
}

impl Drop for Name {
    fn drop(&mut self) {
        let _ = Store::remove(&self.0);
    }
}

#[test]
fn a_store_outlives_its_handles_until_removed() {
    let name = Name::new("outlives");
    let options = Options::new().limit_bytes(64 << 20);
    assert!(matches!(options.open_existing(&name.0), Err(Error::NotFound(_))));
    let one = options.create(&name.0).unwrap();
    assert!(matches!(options.create(&name.0), Err(Error::Exists(_))));
    one.set(b"key", &[5; 300]).unwrap();
    let two = Store::open(&name.0).unwrap();
    assert_eq!(two.get(b"key").unwrap(), &[5; 300]);
    let held = two.get_ref(b"key").unwrap();
    one.set(b"key", &[6; 300]).unwrap();
    one.set(b"other", b"value").unwrap();
    assert_eq!(*held, [5; 300], "a guard in one process holds against writers in another");
    drop(held);
    drop((one, two));
    let again = options.open_existing(&name.0).unwrap();
    assert_eq!(again.get(b"key").unwrap(), &[6; 300]);
    assert_eq!(again.len(), 2);
    assert_eq!(again.check().unwrap().lost_blocks, 0);
    Store::remove(&name.0).unwrap();
    assert!(matches!(Store::remove(&name.0), Err(Error::NotFound(_))));
    assert!(again.set(b"still", b"works").is_ok());
}

#[test]
fn a_guard_belongs_to_its_process() {
    let name = Name::new("guard");
    let store = Options::new().limit_bytes(64 << 20).create(&name.0).unwrap();
    store.set(b"key", &[5; 300]).unwrap();
    let held = store.get_ref(b"key").unwrap();
    // SAFETY: the child drops a copy of the guard and leaves by _exit.
    let child = unsafe { libc::fork() };
    if child == 0 {
        drop(held);
        // SAFETY: _exit ends the child without running destructors of the parent's threads.
        unsafe { libc::_exit(0) };
    }
    // SAFETY: waitpid writes only the status; the child was just forked.
    unsafe { libc::waitpid(child, std::ptr::null_mut(), 0) };
    for round in 0..1000u32 {
        store.set(b"key", &[round as u8; 300]).unwrap();
        store.set(&[b"other".as_slice(), &round.to_le_bytes()].concat(), &[9; 296]).unwrap();
    }
    assert_eq!(*held, [5; 300], "a forked child ended the guard of its parent");
}

#[test]
fn a_child_forked_by_a_visitor_cannot_continue_the_iteration() {
    let name = Name::new("visitor");
    let store = Options::new().limit_bytes(64 << 20).create(&name.0).unwrap();
    for number in 0..1000u64 {
        store.set(&number.to_le_bytes(), b"value").unwrap();
    }
    let (mut child, mut visited) = (-1, 0);
    let done = store.for_each(|_, _| {
        if child < 0 {
            // SAFETY: the child goes on here, changes nothing of the store and leaves by _exit.
            child = unsafe { libc::fork() };
        }
        visited += 1;
        child >= 0
    });
    if child == 0 {
        let refused = done.is_err_and(|error| error.to_string().contains("fork"));
        // SAFETY: _exit ends the child without running destructors of the parent's threads.
        unsafe { libc::_exit(i32::from(!refused)) };
    }
    let mut status = 0;
    // SAFETY: waitpid writes only the status; the child was just forked.
    unsafe { libc::waitpid(child, &raw mut status, 0) };
    assert_eq!((status, visited), (0, 1000), "{done:?}");
}

#[test]
fn a_store_never_uses_the_standard_descriptors() {
    let name = Name::new("stdio");
    // SAFETY: the child opens a store, looks at its first descriptors and leaves by _exit.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let is_open = |descriptor| {
            // SAFETY: only asks about a descriptor.
            unsafe { libc::fcntl(descriptor, libc::F_GETFD) >= 0 }
        };
        // SAFETY: nothing of this process uses them any more.
        (0..3).for_each(|descriptor| unsafe { assert!(libc::close(descriptor) == 0) });
        let options = Options::new().limit_bytes(16 << 20);
        let made = options.create(&name.0);
        let after_making = (0..3).any(is_open);
        let opened = options.open(&name.0);
        let sound = made.is_ok() && opened.is_ok() && !after_making && !(0..3).any(is_open);
        // SAFETY: _exit ends the child without running destructors of the parent's threads.
        unsafe { libc::_exit(i32::from(!sound)) };
    }
    let mut status = 0;
    // SAFETY: waitpid writes only the status; the child was just forked.
    unsafe { libc::waitpid(child, &raw mut status, 0) };
    assert_eq!(status, 0);
}

#[test]
fn names_and_settings_are_checked() {
    for name in ["", "a/b", ".hidden", &"x".repeat(201)] {
        assert!(matches!(Store::open(name), Err(Error::Name(_))), "{name}");
    }
    let name = Name::new("settings");
    let options = Options::new().limit_bytes(32 << 20);
    drop(options.clone().hash(Hash::Keyed).create(&name.0).unwrap());
    assert!(options.open(&name.0).is_ok(), "settings not named are taken from the store");
    assert!(matches!(options.clone().hash(Hash::Murmur { seed: 9 }).open(&name.0), Err(Error::Settings("hash"))));
}

#[test]
fn damaged_or_foreign_files_are_refused() {
    use std::os::unix::fs::FileExt;
    let name = Name::new("refused");
    let options = Options::new().limit_bytes(32 << 20);
    let error = |name: &Name| options.open(&name.0).err().map(|error| error.to_string()).unwrap_or_default();
    std::fs::write(name.path(), vec![7u8; 8192]).unwrap();
    std::fs::set_permissions(name.path(), std::fs::Permissions::from_mode(0o600)).unwrap();
    assert!(error(&name).contains("not a store"), "{}", error(&name));
    std::fs::write(name.path(), b"short").unwrap();
    assert!(error(&name).contains("truncated"), "{}", error(&name));
    std::fs::remove_file(name.path()).unwrap();
    drop(options.create(&name.0).unwrap());
    let file = std::fs::File::options().read(true).write(true).open(name.path()).unwrap();
    let mut head = [0u8; 72];
    file.read_exact_at(&mut head, 0).unwrap();
    let refuse = |at: usize, byte: u8, expected: &str| {
        let mut bad = head;
        bad[at] = byte;
        file.write_all_at(&bad, 0).unwrap();
        assert!(error(&name).contains(expected), "byte {at}: {}", error(&name));
        file.write_all_at(&head, 0).unwrap();
    };
    refuse(8, 200, "layout version 200");
    refuse(12, 0x33, "another kind of machine");
    refuse(32, head[32] ^ 1, "damaged");
    assert!(options.open(&name.0).is_ok());
    file.set_len(file.metadata().unwrap().len() / 2).unwrap();
    assert!(error(&name).contains("truncated"), "{}", error(&name));
}

#[test]
fn a_name_taken_by_another_user_is_refused() {
    let name = Name::new("squat");
    let options = Options::new().limit_bytes(16 << 20);
    let refuse = |what: &str| {
        for result in [options.open(&name.0), options.open_existing(&name.0)] {
            let error = result.err().unwrap_or_else(|| panic!("opened, although {what}"));
            assert!(matches!(error, Error::Untrusted { .. }), "{what}: {error}");
            let text = error.to_string();
            assert!(text.contains(&name.0) && text.contains(what) && text.lines().count() == 1, "{text}");
        }
    };
    let mode = |mode| std::fs::set_permissions(name.path(), std::fs::Permissions::from_mode(mode)).unwrap();
    drop(options.create(&name.0).unwrap());
    for bits in [0o660, 0o606, 0o602] {
        mode(bits);
        refuse("may write it");
        // The caller chose the path, and the users that may write there.
        assert!(options.open_path(&name.path()).is_ok());
    }
    mode(0o644);
    assert!(options.open(&name.0).is_ok());
    // SAFETY: geteuid takes no arguments and cannot fail.
    let own = unsafe { libc::geteuid() };
    if std::os::unix::fs::chown(name.path(), Some(own + 1), None).is_ok() {
        refuse(&format!("belongs to user {}", own + 1));
        std::os::unix::fs::chown(name.path(), Some(own), None).unwrap();
    } else {
        println!("SKIPPED: not root, so the store cannot be given to another user");
    }
    mode(0o600);
    assert!(options.open(&name.0).is_ok());

    let elsewhere = Name::new("squat-elsewhere");
    std::fs::rename(name.path(), elsewhere.path()).unwrap();
    std::os::unix::fs::symlink(elsewhere.path(), name.path()).unwrap();
    refuse("symbolic link");
    assert!(options.open_path(&name.path()).is_ok());
    std::fs::remove_file(elsewhere.path()).unwrap();
    refuse("symbolic link");
    std::fs::remove_file(name.path()).unwrap();

    let path = std::ffi::CString::new(name.path().to_str().unwrap()).unwrap();
    // SAFETY: a NUL-terminated path.
    assert_eq!(unsafe { libc::mkfifo(path.as_ptr(), 0o600) }, 0);
    refuse("not a regular file");
    assert!(matches!(options.open_path(&name.path()), Err(Error::Untrusted { .. })));
}

#[test]
fn a_dangling_link_is_an_error() {
    let name = Name::new("dangling");
    std::os::unix::fs::symlink(name.path().with_extension("nowhere"), name.path()).unwrap();
    let options = Options::new().limit_bytes(16 << 20);
    assert!(matches!(options.open_path(&name.path()), Err(Error::Exists(_))));
    assert!(matches!(options.create_path(&name.path()), Err(Error::Exists(_))));
    assert!(matches!(options.open_existing_path(&name.path()), Err(Error::NotFound(_))));
}

#[test]
fn memory_comes_back_after_delete() {
    let name = Name::new("memory");
    let store = Options::new().limit_bytes(512 << 20).create(&name.0).unwrap();
    let used = || {
        use std::os::unix::fs::MetadataExt;
        std::fs::metadata(name.path()).unwrap().blocks() * 512
    };
    let empty = used();
    for number in 0..100_000u64 {
        store.set(&number.to_le_bytes(), &[1; 500]).unwrap();
    }
    let full = used();
    assert!(full > empty + 50_000_000, "{empty} to {full}");
    for number in 0..100_000u64 {
        assert!(store.delete(&number.to_le_bytes()).unwrap());
    }
    store.trim().unwrap();
    let after = used();
    println!("file: {empty} bytes empty, {full} with 100,000 values of 500 bytes, {after} after deleting them");
    assert!(after < empty + (full - empty) / 20, "{empty}, {full}, {after}");
}

#[test]
fn the_limit_is_an_error_and_nothing_is_lost() {
    let store = Options::new().limit_bytes(16 << 20).private().unwrap();
    let mut count = 0u64;
    let error = loop {
        match store.set(&count.to_le_bytes(), &[7; 1000]) {
            Ok(_) => count += 1,
            Err(error) => break error,
        }
    };
    assert!(error.is_full(), "{error}");
    assert!(error.to_string().contains("limit"), "{error}");
    assert!(count > 10_000, "{count} values of 1000 bytes in 16 MiB");
    assert!((0..count).all(|number| store.get(&number.to_le_bytes()).is_some()));
    assert_eq!(store.check().unwrap().entries, count);
    assert!(store.delete(&0u64.to_le_bytes()).unwrap());
}

/// Where buckets are full and no array may grow, a change happens as a whole or not at all: also one that needs another
/// slot, and room for it. Deletes need none.
#[test]
fn changes_refused_by_a_full_store_change_nothing() {
    let store = Options::new().limit_bytes(4 << 20).private().unwrap();
    let mut model: HashMap<u64, Vec<u8>> = HashMap::new();
    let mut number = 0u64;
    let error = loop {
        match store.set(&number.to_le_bytes(), &number.to_le_bytes()) {
            Ok(_) => drop(model.insert(number, number.to_le_bytes().to_vec())),
            Err(error) => break error,
        }
        number += 1;
    };
    assert!(error.is_full() && number > 50_000, "{error} at {number}");
    let agrees = |model: &HashMap<u64, Vec<u8>>, what: &str| {
        for (key, value) in model {
            assert_eq!(store.get(&key.to_le_bytes()).as_deref(), Some(&value[..]), "{key} after {what}");
        }
        let report = store.check().unwrap();
        assert_eq!((report.entries, report.lost_blocks), (model.len() as u64, 0), "{what}");
    };
    let mut refused = 0;
    for (turn, key) in (0..number).filter(|key| key % 3 != 0).enumerate() {
        let (name, old) = (key.to_le_bytes(), model[&key].clone());
        let new = [vec![1; 5], vec![2; 8], vec![3; 40], vec![]][turn % 4].clone();
        let done = match turn % 8 {
            0..4 => store.set(&name, &new).map(|existed| assert!(existed)),
            4 | 5 => store.compare_swap(&name, Some(&old), Some(&new)).map(|done| assert!(done)),
            _ => store.set_many(&[(name, &new)]),
        };
        match done {
            Ok(()) => drop(model.insert(key, new)),
            Err(error) => {
                assert!(error.is_full(), "{error}");
                refused += 1;
            }
        }
        if turn % 16 == 0 {
            assert!(store.delete(&(key - key % 3).to_le_bytes()).unwrap());
            model.remove(&(key - key % 3));
        }
    }
    agrees(&model, "changes");
    assert!(refused > 0, "none was refused");
    // New ones, of which some find room by moving others.
    for key in number..number + 5000 {
        if store.set(&key.to_le_bytes(), &key.to_le_bytes()).is_ok() {
            model.insert(key, key.to_le_bytes().to_vec());
        }
    }
    agrees(&model, "inserts");
    for key in model.keys() {
        assert!(store.delete(&key.to_le_bytes()).unwrap());
    }
    agrees(&HashMap::new(), "deletes");
}

#[test]
fn values_that_were_replaced_do_not_fill_a_small_store() {
    let store = Options::new().limit_bytes(1 << 20).private().unwrap();
    for round in 0..100u8 {
        store.set(b"k", &vec![round; 100_000]).unwrap();
    }
    assert!(store.get(b"k").unwrap().iter().all(|&byte| byte == 99));
    // Few blocks, each a large part of the store: none of them waits for more to come.
    let store = Options::new().limit_bytes(8 << 20).private().unwrap();
    for round in 0..100u8 {
        store.set(b"k", &vec![round; 3 << 20]).unwrap();
    }
    assert!(store.delete(b"k").unwrap());
    assert!(store.set(b"other", &vec![1; 6 << 20]).is_ok());
}

#[test]
fn thread_records_of_dead_processes_are_reused() {
    let name = Name::new("records");
    let store = Options::new().limit_bytes(64 << 20).create(&name.0).unwrap();
    // SAFETY: the child opens the store for itself, and leaves by a signal or by _exit.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let taken = Options::new().open_existing(&name.0).is_ok_and(|store| {
            let all = std::sync::Barrier::new(llds::arena::THREADS_MAX + 1);
            std::thread::scope(|scope| {
                for _ in 0..llds::arena::THREADS_MAX {
                    let (all, store) = (&all, &store);
                    let thread = std::thread::Builder::new().stack_size(64 << 10);
                    let work = move || {
                        let done = store.for_each(|_, _| true);
                        all.wait();
                        // All of them hold their thread records when they die.
                        all.wait();
                        drop(done);
                    };
                    if thread.spawn_scoped(scope, work).is_err() {
                        // SAFETY: _exit ends the child without running destructors of the parent's threads.
                        unsafe { libc::_exit(1) };
                    }
                }
                all.wait();
                // SAFETY: ends this process alone.
                unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
            });
            true
        });
        // SAFETY: _exit ends the child without running destructors of the parent's threads.
        unsafe { libc::_exit(i32::from(!taken)) };
    }
    let mut status = 0;
    // SAFETY: waitpid writes only the status; the child was just forked.
    unsafe { libc::waitpid(child, &raw mut status, 0) };
    if !libc::WIFSIGNALED(status) {
        println!("SKIPPED: the system does not allow so many threads");
        return;
    }
    assert_eq!(store.stats().thread_count, llds::arena::THREADS_MAX as u64);
    // A thread without a record.
    std::thread::scope(|scope| scope.spawn(|| store.set(b"key", b"value").map(drop)).join().unwrap()).unwrap();
    assert!(store.stats().thread_count <= 2);
}

#[test]
fn short_lives_do_not_fill_a_small_store() {
    let name = Name::new("short-lives");
    let store = Options::new().limit_bytes(64 << 20).create(&name.0).unwrap();
    for number in 0..300u64 {
        let one = || store.set(&number.to_le_bytes(), b"value").map(drop);
        // Joining waits for the end of the thread itself, where its record is released.
        std::thread::scope(|scope| scope.spawn(one).join().unwrap()).unwrap();
    }
    for number in 300..600u64 {
        // SAFETY: the child opens the store for itself, and leaves by a signal or by _exit.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let store = Options::new().open_existing(&name.0);
            let done = store.is_ok_and(|store| {
                let done = store.set(&number.to_le_bytes(), b"value").is_ok();
                // SAFETY: ends this process alone.
                done && unsafe { libc::kill(libc::getpid(), libc::SIGKILL) } == 0
            });
            // SAFETY: _exit ends the child without running destructors of the parent's threads.
            unsafe { libc::_exit(i32::from(!done)) };
        }
        let mut status = 0;
        // SAFETY: waitpid writes only the status; the child was just forked.
        unsafe { libc::waitpid(child, &raw mut status, 0) };
        assert!(libc::WIFSIGNALED(status), "process {number} found no room");
    }
    store.set(b"record", &[1; 300]).unwrap();
    assert_eq!(store.len(), 601);
    store.check().unwrap();
    let held = store.stats().held_bytes;
    assert!(held < 8 << 20, "{held} bytes are held");
}

#[test]
fn threads_count_together_and_read_while_others_write() {
    let store = Options::new().limit_bytes(256 << 20).private().unwrap();
    std::thread::scope(|scope| {
        for thread in 0..4u64 {
            let store = &store;
            scope.spawn(move || {
                for round in 0..20_000u64 {
                    store.add(b"total", 1).unwrap();
                    let length = 1 + (round * 7 + thread) % 400;
                    store.set(b"shared", &vec![round as u8; length as usize]).unwrap();
                    let value = store.get_ref(b"shared").unwrap();
                    assert!(value.iter().all(|&byte| byte == value[0]), "a mixture of two values");
                    let value = store.get(b"shared").unwrap();
                    assert!(value.iter().all(|&byte| byte == value[0]), "a mixture of two values");
                    store.set(&(thread << 32 | round).to_le_bytes(), b"x").unwrap();
                }
            });
        }
    });
    assert_eq!(store.add(b"total", 0).unwrap(), 80_000);
    assert_eq!(store.len(), 80_002);
    assert_eq!(store.check().unwrap().lost_blocks, 0);
}

/// Returns true if the kernel makes a huge page in /dev/shm on request, now.
fn has_huge_shared_pages() -> std::io::Result<()> {
    const HUGE: usize = 2 << 20;
    // SAFETY: a mapping of our own, aligned within twice its size; it ends with the test.
    unsafe {
        let flags = libc::MAP_SHARED | libc::MAP_ANONYMOUS;
        let map = libc::mmap(std::ptr::null_mut(), 2 * HUGE, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0);
        assert_ne!(map, libc::MAP_FAILED);
        let huge = (map as usize).next_multiple_of(HUGE) as *mut u8;
        huge.write_volatile(1);
        match libc::madvise(huge.cast(), HUGE, libc::MADV_COLLAPSE) {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        }
    }
}

#[test]
fn a_shared_store_stands_on_huge_pages_of_a_plain_tmpfs() {
    if let Err(error) = has_huge_shared_pages() {
        eprintln!("SKIPPED: the kernel makes no huge page in shared memory: {error}");
        return;
    }
    let name = Name::new("huge");
    let store = Options::new().limit_bytes(64 << 20).create(&name.0).unwrap();
    let other = Options::new().open_existing(&name.0).unwrap();
    for number in 0..400_000u64 {
        let store = if number % 2 == 0 { &store } else { &other };
        store.set(&number.to_le_bytes(), &number.to_le_bytes()).unwrap();
    }
    assert_eq!(store.stats().backing.name(), "transparent 2 MiB");
    let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let ours = smaps.split_once(&format!("forrest.{}", name.0)).unwrap().1;
    let line = ours.lines().find(|line| line.starts_with("ShmemPmdMapped:")).unwrap();
    let kib: u64 = line.split_whitespace().nth(1).unwrap().parse().unwrap();
    assert!(kib >= 4096, "{line}");
    // Memory comes back as it does from small pages.
    let held = std::fs::metadata(name.path()).unwrap().blocks() * 512;
    store.clear().unwrap();
    drop(other);
    store.trim().unwrap();
    let left = std::fs::metadata(name.path()).unwrap().blocks() * 512;
    assert!(left + (4 << 20) < held, "{left} bytes of {held} are left");
}

/// Several writers set and delete values of many sizes, and then live on, idle. Returns the store's statistics and the bytes
/// of its file.
fn churn(name: &Name, writers: u64, keys: u64, sizes: [u64; 2], limit_mib: u64) -> (forrest::Stats, u64) {
    let store = &Options::new().limit_bytes(limit_mib << 20).pages(forrest::Pages::Small).create(&name.0).unwrap();
    let all = &std::sync::Barrier::new(writers as usize + 1);
    std::thread::scope(|scope| {
        for writer in 0..writers {
            scope.spawn(move || {
                let mut numbers = fastrand::Rng::with_seed(writer);
                let mut done = Ok(());
                for _ in 0..160_000 / writers {
                    let random = numbers.u64(..);
                    let key = format!("s{}", random % keys).into_bytes();
                    // One in 32 may be longer.
                    let most = sizes[usize::from(random >> 40 & 31 == 0)];
                    let value = vec![writer as u8; ((random >> 20) % most) as usize];
                    let change = if random >> 50 & 1 == 0 { store.delete(&key) } else { store.set(&key, &value) };
                    done = done.and(change.map(drop).map_err(|error| error.to_string()));
                }
                all.wait();
                all.wait();
                done.unwrap();
            });
        }
        all.wait();
        let stats = store.stats();
        all.wait();
        store.check().unwrap();
        (stats, std::fs::metadata(name.path()).unwrap().blocks() * 512)
    })
}

/// A store takes at most 1.5 times what lives in it, 64 KiB for each writer, and what an empty one takes.
#[test]
fn values_of_many_sizes_do_not_fill_a_store_early() {
    let cases = [
        (4, 2000, [600, 600], 64),
        (32, 32_000, [600, 600], 4096),
        (1, 2000, [600, 30_000], 64),
        (4, 300, [4000, 200_000], 64),
    ];
    for (writers, keys, sizes, limit_mib) in cases {
        let (stats, file) = churn(&Name::new("sizes"), writers, keys, sizes, limit_mib);
        let most = stats.allocated_bytes * 3 / 2 + (writers << 16) + (1 << 20);
        assert!(stats.held_bytes <= most, "{writers} writers, at most {most}: {stats:?}");
        // Thread records, tables, and free tiles between runs come on top.
        let huge = file.is_multiple_of(2 << 20);
        assert!(huge || file <= most + (1 << 20), "{writers} writers, at most {most}: the file has {file} bytes");
        assert!(huge || file < 12 << 20, "{writers} writers: the file has {file} bytes, {stats:?}");
    }
}

#[test]
fn an_empty_store_takes_less_than_a_mebibyte() {
    let name = Name::new("empty");
    let store = Options::new().create(&name.0).unwrap();
    let file = || std::fs::metadata(name.path()).unwrap().blocks() * 512;
    if file().is_multiple_of(2 << 20) {
        return println!("SKIPPED: /dev/shm gives huge pages");
    }
    assert!(file() <= 1 << 20, "{} bytes", file());
    store.set(b"key", &[1; 100]).unwrap();
    store.delete(b"key").unwrap();
    assert!(file() <= 1 << 20, "{} bytes after one entry", file());
}

/// A thread that has ended its work and lives on holds no room that others need.
#[test]
fn a_store_is_full_of_entries_and_not_of_idle_threads() {
    const SIZES: u64 = 40;
    let name = Name::new("idle");
    let store = &Options::new().limit_bytes(64 << 20).create(&name.0).unwrap();
    // About a MiB of each size, and then nothing: the thread owns a span of each, all of them empty.
    let fill_and_delete = || {
        for number in 0..3000 * SIZES {
            store.set(&number.to_le_bytes(), &vec![1; (16 * (number % SIZES)) as usize]).unwrap();
        }
        for number in 0..3000 * SIZES {
            store.delete(&number.to_le_bytes()).unwrap();
        }
        // What it retired last is of one size.
        (0..100).for_each(|_| assert!(store.set(b"key", &[1; 16]).is_ok()));
    };
    std::thread::scope(|scope| {
        let (tell, told) = std::sync::mpsc::channel();
        let (go_on, going) = std::sync::mpsc::channel::<()>();
        scope.spawn(move || {
            fill_and_delete();
            tell.send(()).unwrap();
            let _ = going.recv();
        });
        told.recv().unwrap();
        let owned = store.stats().held_bytes;
        let refused =
            (0u64..).find_map(|number| store.set(&number.to_le_bytes(), &[2; 490]).err().map(|error| (number, error)));
        let (count, error) = refused.unwrap();
        assert!(error.is_full() && error.to_string().contains("limit of 67108864 bytes"), "{error}");
        // Without what the thread held it would be 49 MiB at most.
        assert!(
            count * 512 >= 52 << 20,
            "full with {count} entries; {owned} bytes were held before: {:?}",
            store.stats()
        );
        // A delete makes room that all threads find.
        store.delete(&7u64.to_le_bytes()).unwrap();
        store.recover();
        store.set(b"further", &[2; 490]).unwrap();
        drop(go_on);
    });
}
