//! The bad days of rings: FUSE over io_uring.
//!
//! `common` mounts by rings in test binaries whose names begin as this one's. `privileged_ring_mount` and
//! `privileged_ring_death` are the tests of the classic transport, once more.

mod common;

use common::{Mount, Random, Setup, in_time};
use pagefold_disk::fuse::Transport;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

#[test]
fn the_process_that_serves() {
    common::serve_if_asked();
}

/// Far more requests than a queue has entries, most of them for blocks that are on the disk only: all wait their turn.
#[test]
fn more_requests_than_entries_are_all_answered() {
    skip_unless_mountable!();
    const IMAGE: usize = 48 << 20;
    let mount = Mount::new(Setup { cache_mib: 8, ..Setup::default() });
    let mut data = vec![0; IMAGE];
    Random::new(3).fill(&mut data);
    std::fs::write(mount.dir().join("x"), &data).unwrap();
    std::thread::scope(|scope| {
        for n in 0..256 {
            let (data, mount) = (&data, &mount);
            scope.spawn(move || {
                let path = mount.path(&format!("own-{n}"));
                let own = OpenOptions::new().create_new(true).read(true).write(true).open(path).unwrap();
                let file = File::open(mount.path("x")).unwrap();
                let (mut random, mut bytes) = (Random::new(n + 100), vec![0; 20_000]);
                for _ in 0..12 {
                    let at = random.below((IMAGE - bytes.len()) as u64);
                    file.read_exact_at(&mut bytes, at).unwrap();
                    assert!(bytes == data[at as usize..][..bytes.len()], "at {at}");
                    own.write_all_at(&bytes, at % 5000).unwrap();
                    let mut back = vec![0; bytes.len()];
                    own.read_exact_at(&mut back, at % 5000).unwrap();
                    assert!(back == bytes, "own file, at {at}");
                }
            });
        }
    });
    let status = mount.status();
    assert!(status.misses > 1000 && status.hits > 1000, "{} misses, {} hits", status.misses, status.hits);
}

/// A connection that is cut with requests in all states: each call returns, and the server ends.
#[test]
fn a_cut_connection_answers_every_call_and_ends_the_server() {
    skip_unless_mountable!();
    let mut random = Random::new(17);
    for _ in 0..6 {
        let mut mount = Mount::new(Setup { cache_mib: 8, ..Setup::default() });
        let mut data = vec![0; 16 << 20];
        random.fill(&mut data);
        std::fs::write(mount.dir().join("x"), &data).unwrap();
        let cut = Arc::new(AtomicBool::new(false));
        let callers: Vec<_> = (0..48)
            .map(|n| {
                let file = OpenOptions::new().read(true).write(true).open(mount.path("x")).unwrap();
                let (cut, mut random) = (cut.clone(), Random::new(n));
                std::thread::spawn(move || {
                    let mut bytes = [0; 8192];
                    loop {
                        let at = random.below(16 << 20);
                        let called = match n % 4 {
                            0 => file.write_at(&bytes, at).map(drop),
                            1 => file.write_at(&bytes, at).and_then(|_| file.sync_data()),
                            _ => file.read_at(&mut bytes, at).map(drop),
                        };
                        if let Err(error) = called {
                            return (cut.load(Ordering::Relaxed), error.raw_os_error());
                        }
                    }
                })
            })
            .collect();
        std::thread::sleep(Duration::from_millis(20 + random.below(60)));
        cut.store(true, Ordering::Relaxed);
        pagefold_disk::mount::abort(&mount.at()).unwrap();
        for caller in callers {
            let (was_cut, code) = in_time("a caller", move || caller.join().unwrap());
            assert!(was_cut && matches!(code, Some(libc::ENOTCONN | libc::ECONNABORTED)), "{was_cut} {code:?}");
        }
        let mut child = mount.child.take().unwrap();
        in_time("the server's end", move || child.wait().unwrap());
    }
}

/// A filter of a container may forbid io_uring, all of it or a part, where the kernel offers rings.
#[test]
fn where_rings_are_refused_the_classic_transport_serves() {
    skip_unless_mountable!();
    for refused in [libc::SYS_io_uring_setup, libc::SYS_io_uring_enter, libc::SYS_io_uring_register] {
        let refused_call = Some(refused as u32);
        let mut mount = Mount::new(Setup { transport: Transport::Auto, refused_call, ..Setup::default() });
        std::fs::write(mount.path("x"), b"text").unwrap();
        assert_eq!(std::fs::read(mount.path("x")).unwrap(), b"text");
        assert_eq!(mount.status().transport, "classic");
        let (ok, said) = mount.terminate();
        assert!(
            ok && said.lines().filter(|line| line.contains("offers FUSE over io_uring and refuses it")).count() == 1,
            "{said}"
        );

        let _on = common::ring_switch::RingsOn::new();
        mount.setup.transport = Transport::Ring;
        let (ok, said) = mount.try_another(&mount.dir(), &mount.at());
        assert!(
            !ok && said.contains("--transport ring: the kernel offers FUSE over io_uring and refuses it"),
            "{said}"
        );
        assert!(!pagefold_disk::mount::is_mounted(&mount.at()));
    }
}

/// A large file, in requests of all sizes, by many entries at the same time.
#[test]
fn requests_of_all_sizes_carry_the_bytes() {
    skip_unless_mountable!();
    let mount = Mount::new(Setup::default());
    let file = OpenOptions::new().create_new(true).read(true).write(true).open(mount.path("x")).unwrap();
    let mut model = vec![0u8; 6 << 20];
    let mut random = Random::new(23);
    random.fill(&mut model);
    file.write_all_at(&model, 0).unwrap();
    for size in [1, 511, 4096, 4097, 65_536, 1 << 20, (1 << 20) + 1, 3 << 20] {
        for _ in 0..8 {
            let at = random.below((model.len() - size) as u64) as usize;
            let mut bytes = vec![0; size];
            file.read_exact_at(&mut bytes, at as u64).unwrap();
            assert!(bytes == model[at..at + size], "{size} bytes at {at}");
            random.fill(&mut bytes);
            file.write_all_at(&bytes, at as u64).unwrap();
            model[at..at + size].copy_from_slice(&bytes);
        }
    }
    mount.flush();
    assert!(std::fs::read(mount.dir().join("x")).unwrap() == model, "the file differs");
}
