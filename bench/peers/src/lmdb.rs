//! LMDB as a store that processes share.

use heed::types::Bytes;
use heed::{Database, Env, EnvFlags, EnvOpenOptions};
use std::path::Path;

/// An environment in a directory of its own.
pub struct Lmdb(Env);

impl Lmdb {
    /// Opens or makes the environment; nothing in it has to survive a crash.
    pub fn open(path: &Path) -> Option<Lmdb> {
        std::fs::create_dir_all(path).ok()?;
        let mut options = EnvOpenOptions::new();
        // SAFETY: the files are in a directory that this run has made, and only LMDB changes them.
        unsafe { options.map_size(16 << 30).flags(EnvFlags::NO_SYNC).open(path) }.ok().map(Lmdb)
    }

    /// Stores each key with itself as its value.
    pub fn fill(&self, keys: impl Iterator<Item = u64>) -> Option<()> {
        let mut write = self.0.write_txn().ok()?;
        let base: Database<Bytes, Bytes> = self.0.create_database(&mut write, None).ok()?;
        for key in keys {
            base.put(&mut write, &key.to_le_bytes(), &key.to_le_bytes()).ok()?;
        }
        write.commit().ok()
    }

    /// Gives `act` a lookup of single keys, within one transaction.
    pub fn read<T>(&self, act: impl FnOnce(&dyn Fn(u64) -> Option<u64>) -> T) -> T {
        let read = self.0.read_txn().expect("a reader slot");
        let base: Database<Bytes, Bytes> =
            self.0.open_database(&read, None).expect("it opens").expect("the driver made it");
        act(&|key| {
            let value = base.get(&read, &key.to_le_bytes()).expect("readable")?;
            Some(value.try_into().map_or(u64::MAX, u64::from_le_bytes))
        })
    }
}
