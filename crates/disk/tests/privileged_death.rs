//! The server is killed at any instant, with writers running and readers waiting.
//!
//! The worst outcome would be a mount point that hangs, and the second worst the loss of a write that a sync acknowledged.

mod common;

use common::{Mount, Random, Setup, in_time};
use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

#[test]
fn the_process_that_serves() {
    common::serve_if_asked();
}

/// Stops the server and waits until all its threads are stopped, which takes a while after the signal.
fn stop(mount: &Mount) {
    let pid = rustix::process::Pid::from_child(mount.child.as_ref().unwrap());
    rustix::process::kill_process(pid, rustix::process::Signal::STOP).unwrap();
    let stopped = |task: std::io::Result<std::fs::DirEntry>| {
        let stat = std::fs::read_to_string(task.unwrap().path().join("stat")).unwrap_or_default();
        stat.rsplit(')').next().is_some_and(|rest| rest.trim_start().starts_with('T'))
    };
    while !std::fs::read_dir(format!("/proc/{}/task", mount.pid())).unwrap().all(stopped) {
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn after_a_death_every_call_returns_and_the_mount_point_is_cleaned() {
    skip_unless_mountable!();
    let mut mount = Mount::new(Setup::default());
    std::fs::write(mount.path("x"), vec![1; 1 << 20]).unwrap();
    let file = OpenOptions::new().read(true).write(true).open(mount.path("x")).unwrap();
    // Calls under way at its death: stop the process, let the calls wait, kill it.
    stop(&mount);
    let waiting: Vec<_> = (0..4)
        .map(|n| {
            let file = file.try_clone().unwrap();
            let at = mount.at();
            std::thread::spawn(move || match n {
                0 => file.read_at(&mut [0; 4096], 0).map(drop),
                1 => file.write_at(&[2; 4096], 0).map(drop),
                2 => file.sync_all(),
                _ => std::fs::read_dir(at).map(drop),
            })
        })
        .collect();
    std::thread::sleep(Duration::from_millis(300));
    assert!(waiting.iter().all(|thread| !thread.is_finished()), "the test needs calls under way");
    mount.kill();
    for thread in waiting {
        let result = in_time("a call that was under way", move || thread.join().unwrap());
        let code = result.unwrap_err().raw_os_error();
        // By rings, `ECANCELED` is the kernel's answer to a request that was on its way to the process.
        let is_answer = matches!(code, Some(libc::ECONNABORTED | libc::ENOTCONN | libc::ECANCELED));
        assert!(is_answer, "{code:?}");
    }
    // Every later call fails immediately.
    let (at, path) = (mount.at(), mount.path("x"));
    let codes = in_time("a later call", move || {
        let mut codes = vec![
            file.read_at(&mut [0; 10], 0).map(drop).unwrap_err().raw_os_error(),
            file.sync_all().unwrap_err().raw_os_error(),
            std::fs::metadata(&at).unwrap_err().raw_os_error(),
            std::fs::read_dir(&at).map(drop).unwrap_err().raw_os_error(),
            std::fs::File::open(&path).map(drop).unwrap_err().raw_os_error(),
        ];
        drop(file);
        codes.dedup();
        codes
    });
    assert_eq!(codes, [Some(libc::ENOTCONN)]);
    // The next mount removes the dead one.
    mount.start();
    assert_eq!(std::fs::metadata(mount.path("x")).unwrap().len(), 1 << 20);
    mount.kill();
    // An unmount does so, too.
    let at = mount.at();
    assert!(in_time("cleaning", move || pagefold_disk::mount::clean_stale(&at)).unwrap());
    assert!(!pagefold_disk::mount::is_mounted(&mount.at()));
}

#[test]
fn no_call_waits_for_ever_after_any_kind_of_death() {
    skip_unless_mountable!();
    use rustix::process::Signal;
    let signals =
        [Signal::KILL, Signal::ABORT, Signal::SEGV, Signal::BUS, Signal::ILL, Signal::FPE, Signal::SYS, Signal::TERM];
    let mut mount = Mount::new(Setup::default());
    std::fs::write(mount.path("x"), vec![1; 1 << 20]).unwrap();
    for signal in signals {
        // Callers of all kinds run all the time, so that some calls are under way at the signal.
        let threads: Vec<_> = (0..6)
            .map(|n| {
                let (path, at) = (mount.path("x"), mount.at());
                let file = OpenOptions::new().read(true).write(true).open(&path).unwrap();
                std::thread::spawn(move || {
                    let mut bytes = [0; 8192];
                    let call = |bytes: &mut [u8]| match n {
                        0 => file.read_at(bytes, 4096).map(drop),
                        1 => file.write_at(bytes, 8192).map(drop),
                        2 => file.write_at(bytes, 65536).and_then(|_| file.sync_data()),
                        3 => std::fs::read_dir(&at).map(drop),
                        4 => std::fs::metadata(&path).map(drop),
                        _ => std::fs::write(at.join("y"), b"y"),
                    };
                    while call(&mut bytes).is_ok() {
                        // After a clean unmount the names are those of the empty directory below.
                        if !pagefold_disk::mount::is_mounted(&at) {
                            return;
                        }
                    }
                })
            })
            .collect();
        std::thread::sleep(Duration::from_millis(100));
        let pid = rustix::process::Pid::from_child(mount.child.as_ref().unwrap());
        rustix::process::kill_process(pid, signal).unwrap();
        if matches!(signal, Signal::SEGV | Signal::BUS) {
            // The standard library's handler returns from the first signal and expects the instruction to fault again. A
            // second signal that arrives while the first is pending is merged with it.
            let began = Instant::now();
            while mount.child.as_mut().unwrap().try_wait().unwrap().is_none() {
                assert!(began.elapsed() < Duration::from_secs(60), "{signal:?} does not end it");
                std::thread::sleep(Duration::from_millis(50));
                let _ = rustix::process::kill_process(pid, signal);
            }
        }
        for (n, thread) in threads.into_iter().enumerate() {
            in_time(&format!("caller {n} after {signal:?}"), move || thread.join().unwrap());
        }
        let mut child = mount.child.take().unwrap();
        in_time("the server's end", move || child.wait().unwrap());
        let at = mount.at();
        in_time("cleaning", move || pagefold_disk::mount::clean_stale(&at)).unwrap();
        // A caller may have created files in the empty directory below the mount.
        let _ = std::fs::remove_file(mount.path("y"));
        mount.start();
        assert_eq!(std::fs::metadata(mount.path("x")).unwrap().len(), 1 << 20, "after {signal:?}");
    }
}

#[test]
fn a_stopped_server_can_be_cut_off() {
    skip_unless_mountable!();
    let mut mount = Mount::new(Setup::default());
    std::fs::write(mount.path("x"), b"1").unwrap();
    stop(&mount);
    let path = mount.path("x");
    let reader = std::thread::spawn(move || std::fs::read(path));
    std::thread::sleep(Duration::from_millis(200));
    assert!(!reader.is_finished(), "a stopped server keeps its callers waiting");
    pagefold_disk::mount::cut_off(&mount.at(), &mount.socket()).unwrap();
    assert!(in_time("a reader of a cut mount", move || reader.join().unwrap()).is_err());
    mount.kill();
}

/// The content of block `block` in round `round` of a writer.
fn content(seed: u64, block: u64, round: u64) -> Vec<u8> {
    let mut bytes = vec![0; 4096];
    Random::new(seed ^ block.wrapping_mul(7919) ^ round.wrapping_mul(104_729)).fill(&mut bytes);
    bytes[..8].copy_from_slice(&round.to_le_bytes());
    bytes
}

#[test]
fn all_synced_data_survives_a_kill_during_writes() {
    skip_unless_mountable!();
    const WRITERS: u64 = 3;
    const BLOCKS: u64 = 200;
    let mut random = Random::new(77);
    let mut mount = Mount::new(Setup { flush_ms: 10, cache_mib: 8, ..Setup::default() });
    let mut synced_total = 0;
    for round in 0..12 {
        // Each writer overwrites its image in rounds and syncs after each; the last synced round must survive.
        let promises: Vec<Arc<AtomicU64>> = (0..WRITERS).map(|_| Arc::new(AtomicU64::new(0))).collect();
        let threads: Vec<_> = (0..WRITERS)
            .map(|writer| {
                let promise = promises[writer as usize].clone();
                let path = mount.path(&format!("image{writer}"));
                std::thread::spawn(move || {
                    let file = OpenOptions::new().create(true).truncate(false).write(true).open(path).unwrap();
                    for pass in 1.. {
                        for block in 0..BLOCKS {
                            if file.write_all_at(&content(writer + round, block, pass), block * 4096).is_err() {
                                return;
                            }
                        }
                        if file.sync_data().is_err() {
                            return;
                        }
                        promise.store(pass, Ordering::SeqCst);
                    }
                })
            })
            .collect();
        std::thread::sleep(Duration::from_millis(100 + random.below(400)));
        // Read before the kill: these rounds must survive.
        let read = || -> Vec<u64> { promises.iter().map(|p| p.load(Ordering::SeqCst)).collect() };
        let began = Instant::now();
        while read().iter().sum::<u64>() < 2 && began.elapsed() < Duration::from_secs(30) {
            std::thread::sleep(Duration::from_millis(5));
        }
        let promised = read();
        mount.kill();
        for thread in threads {
            in_time("a writer", move || thread.join().unwrap());
        }
        mount.start();
        for (writer, &promised) in promised.iter().enumerate() {
            synced_total += promised;
            if promised == 0 {
                continue;
            }
            let file = std::fs::File::open(mount.path(&format!("image{writer}"))).unwrap();
            let mut bytes = vec![0; 4096];
            for block in 0..BLOCKS {
                file.read_exact_at(&mut bytes, block * 4096).unwrap();
                let pass = u64::from_le_bytes(bytes[..8].try_into().unwrap());
                assert!(
                    pass >= promised,
                    "round {round}: block {block} of image{writer} has pass {pass} of {promised}"
                );
                assert!(bytes == content(writer as u64 + round, block, pass), "round {round}: a torn block {block}");
            }
        }
        for writer in 0..WRITERS {
            std::fs::remove_file(mount.path(&format!("image{writer}"))).unwrap();
        }
    }
    assert!(synced_total > 20, "only {synced_total} syncs: too few to prove anything");
    println!("12 kills, {synced_total} synced passes of {BLOCKS} blocks kept");
}
