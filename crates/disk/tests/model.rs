//! Random operations on images that share content, against plain byte vectors.
//!
//! The cache is smaller than the images, so every run loads, shares, breaks, flushes and evicts. After each run the
//! books are checked: entries, frame records, index, free list. The seed of a failing run is in the message.

mod common;

use common::Random;
use pagefold_disk::sim::{Faults, SimFile};
use pagefold_disk::{BLOCK_BYTES, Cache, Config, FingerprintKey, Image};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Content of few kinds, so that blocks of different images are often equal, and sometimes zeros.
fn fill(random: &mut Random, data: &mut [u8]) {
    for block in data.chunks_mut(BLOCK_BYTES) {
        let kind = random.below(40) as u8;
        block.fill(kind);
        if kind > 20 {
            let own = random.below(1 << 32).to_le_bytes();
            let length = block.len().min(own.len());
            block[..length].copy_from_slice(&own[..length]);
        }
    }
}

fn config(strong: bool) -> Config {
    Config {
        cache_bytes: 4 << 20,
        workers: 1,
        sharers_max: 5,
        key: if strong { FingerprintKey::Strong([3; 32]) } else { FingerprintKey::Fast(9) },
        ..Config::default()
    }
}

const IMAGE_BYTES: u64 = 4 << 20;

/// Returns how often it shared, broke and evicted.
fn run(seed: u64, steps: usize) -> [u64; 3] {
    let mut random = Random::new(seed);
    let cache = Cache::new(config(seed.is_multiple_of(2))).unwrap();
    let mut models: Vec<Vec<u8>> = Vec::new();
    let mut files: Vec<Arc<SimFile>> = Vec::new();
    let mut images: Vec<Arc<Image>> = Vec::new();
    for n in 0..3 {
        let mut data = vec![0; (IMAGE_BYTES - random.below(10_000)) as usize];
        fill(&mut random, &mut data);
        let file = Arc::new(SimFile::new(data.clone()));
        file.set_faults(Faults { no_punch: seed.is_multiple_of(3), ..Faults::default() });
        images.push(cache.add_image(&format!("image{n}"), file.clone()).unwrap());
        files.push(file);
        models.push(data);
    }
    let mut buffer = vec![0; 400_000];
    for step in 0..steps {
        let n = random.below(3) as usize;
        let (image, model) = (&images[n], &mut models[n]);
        let size = model.len() as u64;
        let offset = random.below(size + 5000);
        let offset = if random.below(2) == 0 { offset / 4096 * 4096 } else { offset };
        let length = [1, 511, 4096, 8192, 100_000, 300_000][random.below(6) as usize] as usize;
        let length = if random.below(2) == 0 { length } else { random.below(length as u64 + 1) as usize };
        let case = random.below(100);
        let at = || format!("seed {seed} step {step} case {case}: image {n}, {length} bytes from {offset}");
        match case {
            0..45 => {
                let got = cache.read(image, offset, &mut buffer[..length]).unwrap();
                let from = (offset as usize).min(model.len());
                let expected = &model[from..(from + length).min(model.len())];
                assert!(buffer[..got] == *expected, "{}: a wrong read", at());
            }
            45..80 => {
                fill(&mut random, &mut buffer[..length]);
                cache.write(image, offset, &buffer[..length]).unwrap();
                let end = offset as usize + length;
                if length > 0 && model.len() < end {
                    model.resize(end, 0);
                }
                if length > 0 {
                    model[offset as usize..end].copy_from_slice(&buffer[..length]);
                }
            }
            80..84 => {
                let size = random.below(IMAGE_BYTES + 100_000);
                cache.set_size(image, size).unwrap();
                model.resize(size as usize, 0);
            }
            84..88 => {
                let clear = if length % 2 == 0 { Cache::punch } else { Cache::zero };
                clear(&cache, image, offset, length as u64).unwrap();
                let from = (offset as usize).min(model.len());
                let to = (from + length).min(model.len());
                model[from..to].fill(0);
            }
            88..92 => {
                assert!(cache.sync(image, 0..u64::MAX), "{}", at());
                assert!(files[n].data() == *model, "{}: the disk differs after a sync", at());
            }
            92..94 => {
                cache.flush_tick();
            }
            94..96 => cache.read_ahead(image, offset..offset + length as u64),
            96..97 => {
                files[n].change_externally(|data| {
                    let mid = data.len() / 2;
                    fill(&mut random, &mut data[mid..]);
                });
                // Unwritten blocks win over the change; without any, the file's content counts.
                assert!(cache.sync(image, 0..u64::MAX));
                cache.detect_change(image);
                *model = files[n].data();
                let got = cache.read(image, 0, &mut vec![0; model.len()]).unwrap();
                assert_eq!(got, model.len(), "{}", at());
            }
            97..99 => {
                cache.reserve(image, offset, length as u64 + 1, random.below(2) == 0).unwrap();
                if image.size() as usize > model.len() {
                    model.resize(image.size() as usize, 0);
                }
            }
            _ => {
                cache.discard_image(image);
                let file = Arc::new(SimFile::new(model.clone()));
                images[n] = cache.add_image("again", file.clone()).unwrap();
                files[n] = file;
            }
        }
        assert_eq!(images[n].size() as usize, models[n].len(), "{}", at());
        if step % 64 == 0 {
            cache.verify().unwrap_or_else(|why| panic!("{}: {why}", at()));
        }
    }
    cache.verify().unwrap_or_else(|why| panic!("seed {seed} at the end: {why}"));
    let status = cache.status();
    [status.shared_on_load + status.shared_after_writeback, status.cow_breaks, status.evictions]
}

#[test]
fn random_operations_on_three_images_match_plain_vectors() {
    let mut all = [0; 3];
    for seed in 1..=12 {
        let counts = run(seed, 1200);
        all.iter_mut().zip(counts).for_each(|(all, count)| *all += count);
    }
    assert!(all.iter().all(|&count| count > 1000), "shared, broke, evicted {all:?}: the runs must exercise all three");
}

#[test]
fn many_threads_read_and_write_their_own_stripes() {
    // Each thread owns every 7th 1000-byte stripe of both images: neighbours share blocks, so partial writes,
    // loads and breaks of one block race while every byte has one writer.
    let cache = Arc::new(Cache::new(config(false)).unwrap());
    let size = 6 << 20;
    let images: Vec<_> =
        (0..2).map(|n| cache.add_image(&format!("image{n}"), Arc::new(SimFile::new(vec![0; size]))).unwrap()).collect();
    const THREADS: u64 = 7;
    let stop = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let flusher = {
        let (cache, stop) = (cache.clone(), stop.clone());
        std::thread::spawn(move || {
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                cache.flush_tick();
                std::thread::yield_now();
            }
        })
    };
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (cache, images) = (&cache, &images);
            scope.spawn(move || {
                let mut random = Random::new(thread + 1);
                let stripes = size as u64 / 1000 / THREADS;
                let mut last = [vec![0u8; stripes as usize], vec![0u8; stripes as usize]];
                let mut buffer = vec![0; 1000];
                for round in 0..3000 {
                    let n = random.below(2) as usize;
                    let stripe = random.below(stripes);
                    let offset = (stripe * THREADS + thread) * 1000;
                    if random.below(3) == 0 {
                        let value = random.below(4) as u8;
                        cache.write(&images[n], offset, &[value; 1000]).unwrap();
                        last[n][stripe as usize] = value;
                    } else {
                        assert_eq!(cache.read(&images[n], offset, &mut buffer).unwrap(), 1000);
                        let expected = last[n][stripe as usize];
                        assert!(buffer.iter().all(|&b| b == expected), "thread {thread} round {round}");
                    }
                    if random.below(500) == 0 {
                        assert!(cache.sync(&images[n], 0..u64::MAX));
                    }
                }
            });
        }
    });
    stop.store(true, std::sync::atomic::Ordering::Relaxed);
    flusher.join().unwrap();
    cache.verify().unwrap();
}

/// Two guests write to parts of blocks that they share, each to the same block concurrently: the first one copies the block
/// while the other is about to write it in place.
#[test]
fn a_broken_block_never_contains_its_last_sharers_write() {
    use std::sync::atomic::{AtomicUsize, Ordering};
    const BLOCKS: usize = 1024;
    let mut data = vec![0; BLOCKS * BLOCK_BYTES];
    for round in 0..8u64 {
        for (n, block) in data.chunks_mut(BLOCK_BYTES).enumerate() {
            block[..8].copy_from_slice(&((round << 32) + n as u64 + 1).to_le_bytes());
        }
        let cache = Cache::new(Config { cache_bytes: 32 << 20, ..config(false) }).unwrap();
        let images = [(); 2].map(|()| cache.add_image("image", Arc::new(SimFile::new(data.clone()))).unwrap());
        let mut bytes = vec![0; data.len()];
        for image in &images {
            cache.read(image, 0, &mut bytes).unwrap();
        }
        let arrived = AtomicUsize::new(0);
        // The end of a block is copied last.
        let offset = |n: usize, side: usize| n * BLOCK_BYTES + 4000 + 8 * side;
        std::thread::scope(|scope| {
            for (side, image) in images.iter().enumerate() {
                let (cache, arrived) = (&cache, &arrived);
                scope.spawn(move || {
                    for n in 0..BLOCKS {
                        arrived.fetch_add(1, Ordering::SeqCst);
                        let began = Instant::now();
                        while arrived.load(Ordering::SeqCst) < 2 * (n + 1) {
                            assert!(began.elapsed() < Duration::from_secs(60), "the other has ended");
                            std::thread::yield_now();
                        }
                        cache.write(image, offset(n, side) as u64, &[side as u8 + 1; 8]).unwrap();
                    }
                });
            }
        });
        for (side, image) in images.iter().enumerate() {
            let mut expected = data.clone();
            (0..BLOCKS).for_each(|n| expected[offset(n, side)..][..8].fill(side as u8 + 1));
            cache.read(image, 0, &mut bytes).unwrap();
            let wrong = bytes.chunks(BLOCK_BYTES).zip(expected.chunks(BLOCK_BYTES)).filter(|(is, must)| is != must);
            assert_eq!(wrong.count(), 0, "round {round}: blocks of image {side} with bytes of the other");
        }
        cache.verify().unwrap();
    }
}

/// Requests that together need more frames than the cache has, as those of many NBD connections.
#[test]
fn concurrent_requests_that_need_more_frames_than_there_are_all_complete() {
    let cache = Cache::new(config(false)).unwrap();
    let mut random = Random::new(1);
    let images = [(); 4].map(|()| {
        let mut data = vec![0; 12 << 20];
        data.chunks_mut(512).for_each(|sector| sector[..8].copy_from_slice(&random.below(u64::MAX).to_le_bytes()));
        let file = SimFile::new(data);
        file.set_faults(Faults { latency: std::time::Duration::from_millis(3), ..Faults::default() });
        cache.add_image("image", Arc::new(file)).unwrap()
    });
    std::thread::scope(|scope| {
        for thread in 0..100 {
            let (cache, images) = (&cache, &images);
            scope.spawn(move || {
                let mut random = Random::new(thread + 1);
                let mut buffer = vec![0; 1 << 20];
                for _ in 0..6 {
                    let (image, offset) = (&images[random.below(4) as usize], random.below(11 << 20));
                    if random.below(2) == 0 {
                        buffer.chunks_mut(512).for_each(|sector| sector[0] = random.below(256) as u8);
                        // Each write has two partly written blocks, which evict each other.
                        buffer.chunks(60_000).try_for_each(|part| cache.write(image, offset, part)).unwrap();
                    } else {
                        assert_eq!(cache.read(image, offset, &mut buffer).unwrap(), buffer.len());
                    }
                }
            });
        }
    });
    cache.verify().unwrap();
}

#[test]
fn equal_images_take_the_memory_of_one() {
    let cache = Cache::new(Config { cache_bytes: 16 << 20, ..Config::default() }).unwrap();
    let mut data = vec![0; 2 << 20];
    for (n, block) in data.chunks_mut(BLOCK_BYTES).enumerate() {
        block[..8].copy_from_slice(&(n as u64 + 1).to_le_bytes());
    }
    let images: Vec<_> =
        (0..4).map(|n| cache.add_image(&format!("{n}"), Arc::new(SimFile::new(data.clone()))).unwrap()).collect();
    let mut buffer = vec![0; 2 << 20];
    for image in &images {
        assert_eq!(cache.read(image, 0, &mut buffer).unwrap(), buffer.len());
        assert!(buffer == data);
    }
    let status = cache.status();
    assert_eq!(status.resident_bytes, 2 << 20);
    assert_eq!(status.memory_saved_bytes, 3 * (2 << 20));
    assert_eq!(status.images.iter().map(|i| i.memory_saved_bytes).sum::<u64>(), status.memory_saved_bytes);
    // A write to one image breaks one block of that image only.
    cache.write(&images[2], 4096, b"mine").unwrap();
    let status = cache.status();
    assert_eq!((status.cow_breaks, status.resident_bytes), (1, (2 << 20) + 4096));
    assert_eq!(status.images[2].dirty_bytes, 4096);
    cache.read(&images[1], 4096, &mut buffer[..4]).unwrap();
    assert_eq!(buffer[..4], data[4096..4100]);
    // With its old content written back, it is shared again.
    cache.write(&images[2], 4096, &data[4096..4100]).unwrap();
    cache.flush_tick();
    let status = cache.status();
    assert_eq!((status.shared_after_writeback, status.resident_bytes, status.dirty_bytes), (1, 2 << 20, 0));
}

#[test]
fn fingerprints_save_reads_and_never_survive_a_change() {
    let key = [5; 32];
    let config = Config { key: FingerprintKey::Strong(key), cache_bytes: 16 << 20, ..Config::default() };
    let mut data = vec![0; 1 << 20];
    for (n, block) in data.chunks_mut(BLOCK_BYTES).enumerate() {
        block[..8].copy_from_slice(&(n as u64).to_le_bytes());
    }
    let dir = tempfile::tempdir().unwrap();
    let store = pagefold_disk::fingerprint_file::FingerprintDir::open(dir.path()).unwrap();
    let mut buffer = vec![0; 1 << 20];
    {
        let cache = Cache::new(config.clone()).unwrap();
        let image = cache.add_image("b", Arc::new(SimFile::new(data.clone()))).unwrap();
        cache.load_fingerprints(&image, &store);
        cache.read(&image, 0, &mut buffer).unwrap();
        cache.save_fingerprints(&image, &store).unwrap();
    }
    let cache = Cache::new(config).unwrap();
    let a = cache.add_image("a", Arc::new(SimFile::new(data.clone()))).unwrap();
    let file = Arc::new(SimFile::new(data.clone()));
    let b = cache.add_image("b", file.clone()).unwrap();
    cache.load_fingerprints(&b, &store);
    cache.read(&a, 0, &mut buffer).unwrap();
    cache.read(&b, 0, &mut buffer).unwrap();
    assert!(buffer == data);
    assert_eq!(file.blocks_read(), 0, "all of b is in a");
    assert_eq!(cache.status().io_saved_bytes, 1 << 20);

    // The same, but another program changed b in between: the disk is read.
    let file = Arc::new(SimFile::new(data.clone()));
    let b2 = cache.add_image("b", file.clone()).unwrap();
    cache.load_fingerprints(&b2, &store);
    file.change_externally(|data| data[5000] = 77);
    cache.read(&b2, 0, &mut buffer).unwrap();
    assert_eq!((buffer[5000], file.blocks_read()), (77, 256));
    cache.verify().unwrap();
}

/// The host commits an image's times later than its data: after a power cut new data may carry the times that the
/// fingerprint file was made for.
#[test]
fn a_fingerprint_file_is_removed_before_the_first_change_and_saved_only_for_durable_data() {
    let config = Config { key: FingerprintKey::Strong([5; 32]), cache_bytes: 16 << 20, ..Config::default() };
    let dir = tempfile::tempdir().unwrap();
    let store = pagefold_disk::fingerprint_file::FingerprintDir::open(dir.path()).unwrap();
    let cache = Cache::new(config).unwrap();
    let file = Arc::new(SimFile::new(vec![3; 1 << 16]));
    let image = cache.add_image("image", file.clone()).unwrap();
    let files = || {
        let entries = std::fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().path());
        entries.filter(|path| path.extension().is_some_and(|extension| extension == "fp")).count()
    };
    cache.load_fingerprints(&image, &store);
    cache.read(&image, 0, &mut vec![0; 1 << 16]).unwrap();
    // Written back and not synced: the disk may have the data or not.
    cache.write(&image, 0, &[1; 4096]).unwrap();
    cache.flush_tick();
    file.set_faults(Faults { sync_once: Some(libc::EIO), ..Faults::default() });
    cache.save_fingerprints(&image, &store).unwrap();
    assert_eq!(files(), 0, "no file is saved for data that the disk may not have");
    let refuse = Faults { write: Some(libc::EIO), ..Faults::default() };
    let changes: [&dyn Fn(); 4] = [
        &|| {
            cache.write(&image, 0, &[2; 4096]).unwrap();
            assert_eq!(files(), 1, "the disk has not changed yet");
            // The write fails at the disk: the file was removed before it.
            file.set_faults(refuse);
            cache.flush_tick();
        },
        &|| cache.write(&image, 1 << 16, &[1; 100]).unwrap(),
        &|| cache.set_size(&image, 1 << 15).unwrap(),
        &|| cache.punch(&image, 0, 1 << 13).unwrap(),
    ];
    for (n, change) in changes.iter().enumerate() {
        cache.save_fingerprints(&image, &store).unwrap();
        assert_eq!(files(), 1, "before change {n}");
        change();
        assert_eq!(files(), 0, "after change {n}");
        file.set_faults(Faults::default());
    }
}

#[test]
fn growing_an_image_keeps_data_that_another_program_appended() {
    let file = Arc::new(SimFile::new(vec![1; 4096]));
    let cache = Cache::new(config(false)).unwrap();
    let image = cache.add_image("image", file.clone()).unwrap();
    let grown = |bytes: usize, byte: u8| file.change_externally(|data| data.resize(bytes, byte));
    grown(3 * 4096, 2);
    cache.write(&image, 4096 + 100, &[3; 100]).unwrap();
    assert!(cache.sync(&image, 0..u64::MAX));
    let expected = [vec![1; 4096], vec![2; 100], vec![3; 100], vec![2; 4096 + 3896]].concat();
    assert!(file.data() == expected, "{} bytes are left", file.data().len());
    let mut buffer = vec![0; 4 * 4096];
    assert_eq!(cache.read(&image, 0, &mut buffer).unwrap(), 3 * 4096);
    assert!(buffer[..3 * 4096] == expected);
    grown(6 * 4096, 4);
    cache.reserve(&image, 0, 5 * 4096, false).unwrap();
    assert_eq!(file.data().len(), 6 * 4096);
    cache.verify().unwrap();
}

#[test]
fn a_missing_fingerprint_directory_does_not_prevent_writes() {
    let config = Config { key: FingerprintKey::Strong([5; 32]), cache_bytes: 16 << 20, ..Config::default() };
    let dir = tempfile::tempdir().unwrap();
    let kept = dir.path().join("deep/fp");
    std::fs::create_dir(dir.path().join("deep")).unwrap();
    let store = pagefold_disk::fingerprint_file::FingerprintDir::open(&kept).unwrap();
    let cache = Cache::new(config).unwrap();
    let file = Arc::new(SimFile::new(vec![3; 1 << 16]));
    let image = cache.add_image("image", file.clone()).unwrap();
    cache.load_fingerprints(&image, &store);
    std::fs::remove_dir_all(dir.path().join("deep")).unwrap();
    cache.write(&image, 0, &[1; 4096]).unwrap();
    assert!(cache.sync(&image, 0..u64::MAX));
    assert_eq!(file.data()[0], 1);
}
