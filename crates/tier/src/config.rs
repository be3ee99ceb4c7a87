//! The owner's settings.

/// How much time to spend on compressing a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Effort {
    /// LZ4: fastest to load.
    #[default]
    Fast,
    /// As [`Fast`](Self::Fast), and the cleaner leaves it so: for a page that is likely to be loaded soon.
    Ready,
    /// Zstandard with the domain's dictionary, or a patch against a near page: smallest.
    Dense,
}

/// Settings of a [`Tier`](crate::Tier).
#[derive(Clone, Debug)]
pub struct Config {
    /// Bytes of memory that the tier may hold, between 4 MiB and 200 GiB. Default 1 GiB.
    pub bytes_max: u64,
    /// Secret key of the domain's fingerprints. One tier serves one domain. Default: random.
    pub key: [u64; 2],
    /// Whether near pages are kept as patches at [`Effort::Dense`]. Default: yes.
    pub patches: bool,
    /// Most entries of the table that finds near pages, 8 bytes each, rounded up to a power of two. The table grows with
    /// the contents. 0 stands for one per KiB of `bytes_max`, but at most 2^24. Default 0.
    pub similar_entries: usize,
    /// Ticks (calls of [`Tier::tick`](crate::Tier::tick)) after which a page is compressed again, densely. Default 2.
    pub recompress_ticks: u16,
    /// Ticks after which a content that was neither stored nor loaded is written to the backing file although there is
    /// memory for it, at most 16,384. 0: only when memory is short. Default 0.
    pub write_back_ticks: u16,
    /// Share of the memory in content slabs, in percent, that may be free slots before the slabs are compacted. Default 10.
    pub waste_percent: u8,
    /// Threads that [`Tier::store_many`](crate::Tier::store_many) spreads a batch over. Default: one per processor, at most
    /// 8.
    pub workers: usize,
}

impl Default for Config {
    fn default() -> Config {
        Config {
            bytes_max: 1 << 30,
            key: random_key(),
            patches: true,
            similar_entries: 0,
            recompress_ticks: 2,
            write_back_ticks: 0,
            waste_percent: 10,
            workers: std::thread::available_parallelism().map_or(1, |count| count.get().min(8)),
        }
    }
}

/// 128 random bits from the kernel; without /dev/urandom, from the seed of the standard library's hash maps.
fn random_key() -> [u64; 2] {
    let mut bytes = [0_u8; 16];
    let mut got = 0;
    if let Ok(mut file) = std::fs::File::open("/dev/urandom") {
        got = std::io::Read::read(&mut file, &mut bytes).unwrap_or(0);
    }
    if got < bytes.len() {
        use std::hash::{BuildHasher, RandomState};
        return [RandomState::new().hash_one(1_u8), RandomState::new().hash_one(2_u8)];
    }
    let word = |half: usize| u64::from_ne_bytes(bytes[half..half + 8].try_into().unwrap_or([0; 8]));
    [word(0), word(8)]
}
