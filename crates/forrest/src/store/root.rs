//! The root of a store's arena: its settings, and where its directory lies.

use super::Store;
use crate::error::Error;
use crate::hash::{Hash, Hasher, random};
use crate::table::{OFFSETS_END, SHARDS, Table};
use llds::arena::{self, Arena};

/// Kind of arena, and first word of its root: a store, layout 3.
pub(super) const KIND: u64 = u64::from_le_bytes(*b"forrest3");

/// Words of settings, followed by their checksum.
const SETTINGS: usize = 7;

/// Bytes of the root before the directory: settings, then the cursor of the incremental growth.
pub(super) const ROOT_HEAD: usize = 4096;
const CURSOR_AT: usize = 1024;
pub(super) const ROOT_BYTES: usize = ROOT_HEAD + 2 * SHARDS * 8;

impl Store {
    /// The store in `arena`, once its root was checked.
    pub(super) fn over(arena: Arena) -> Result<Store, Error> {
        if arena.data_range().end > OFFSETS_END {
            return Err(arena::Error::Damaged("it is larger than its directory can name").into());
        }
        if arena.root_bytes() < ROOT_BYTES {
            return Err(arena::Error::Damaged("it has no room for its directory").into());
        }
        let root = arena.root();
        let settings: Vec<u64> = (0..=SETTINGS)
            // SAFETY: the root has ROOT_BYTES (checked above), and its settings are not written after creation.
            .map(|index| unsafe { root.cast::<u64>().add(index).read() })
            .collect();
        if settings[0] != KIND || settings[SETTINGS] != settings_sum(&settings[..SETTINGS]) {
            return Err(arena::Error::Damaged("the settings do not fit their checksum").into());
        }
        let hash = if settings[1] == 1 { Hash::Keyed } else { Hash::Murmur { seed: settings[2] } };
        let hasher = Hasher::new(hash, [settings[3], settings[4]], [settings[5], settings[6]]);
        let limit_bytes = arena.capacity_bytes();
        let at = |offset: usize| root.wrapping_add(offset);
        let words = [at(ROOT_HEAD), at(ROOT_HEAD + SHARDS * 8), at(CURSOR_AT)];
        let table = Table::new(arena, words, hasher);
        if !table.is_directory_sound() {
            return Err(arena::Error::Damaged("its directory names places outside of it").into());
        }
        Ok(Store { table: table.into(), order: None, limit_bytes })
    }
}

/// Writes a new store's settings.
pub(super) fn init_root(arena: &Arena, hash: Hash) -> Result<(), Error> {
    let [key0, key1, mix0, mix1] = random::<4>()?;
    let (keyed, seed) = match hash {
        Hash::Keyed => (1, 0),
        Hash::Murmur { seed } => (0, seed),
    };
    let settings: [u64; SETTINGS] = [KIND, keyed, seed, key0, key1, mix0, mix1];
    let root = arena.root().cast::<u64>();
    for (index, word) in settings.into_iter().chain([settings_sum(&settings)]).enumerate() {
        // SAFETY: the root has ROOT_BYTES, and no other thread or process reads it before the store is published.
        unsafe { root.add(index).write(word) };
    }
    Ok(())
}

fn settings_sum(settings: &[u64]) -> u64 {
    let bytes: Vec<u8> = settings.iter().flat_map(|word| word.to_le_bytes()).collect();
    crate::hash::murmur64a(&bytes, 9)
}
