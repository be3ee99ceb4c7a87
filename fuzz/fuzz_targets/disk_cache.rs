//! Operations on two images that share content do what they do on two vectors, and the books agree.

#![no_main]

use libfuzzer_sys::fuzz_target;
use pagefold_disk::sim::SimFile;
use pagefold_disk::{Cache, Config, FingerprintKey};
use std::sync::Arc;

fuzz_target!(|data: &[u8]| {
    let config =
        Config { cache_bytes: 4 << 20, workers: 1, sharers_max: 3, key: FingerprintKey::Fast(1), ..Config::default() };
    let cache = Cache::new(config).unwrap();
    let mut models = [vec![1u8; 40_000], vec![1u8; 40_000]];
    let files = models.each_ref().map(|model| Arc::new(SimFile::new(model.clone())));
    let images = files.each_ref().map(|file| cache.add_image("image", file.clone()).unwrap());
    let mut buffer = vec![0; 70_000];
    for step in data.chunks_exact(6) {
        let n = usize::from(step[0] & 1);
        let (image, model) = (&images[n], &mut models[n]);
        let offset = usize::from(u16::from_le_bytes([step[1], step[2]]));
        let length = usize::from(u16::from_le_bytes([step[3], step[4]]));
        match (step[0] >> 1) % 8 {
            0 | 1 => {
                let count = cache.read(image, offset as u64, &mut buffer[..length]).unwrap();
                let from = offset.min(model.len());
                assert!(buffer[..count] == model[from..(from + length).min(model.len())]);
            }
            2 | 3 if length > 0 => {
                cache.write(image, offset as u64, &vec![step[5] % 4; length]).unwrap();
                if model.len() < offset + length {
                    model.resize(offset + length, 0);
                }
                model[offset..offset + length].fill(step[5] % 4);
            }
            4 => {
                cache.set_size(image, offset as u64).unwrap();
                model.resize(offset, 0);
            }
            5 => {
                let clear = if step[5] & 4 == 0 { Cache::punch } else { Cache::zero };
                clear(&cache, image, offset as u64, length as u64).unwrap();
                let (from, to) = (offset.min(model.len()), (offset + length).min(model.len()));
                model[from..to].fill(0);
            }
            6 => {
                cache.flush_tick();
            }
            _ => {
                assert!(cache.sync(image, 0..u64::MAX));
                assert!(files[n].data() == *model);
            }
        }
    }
    cache.verify().unwrap();
});
