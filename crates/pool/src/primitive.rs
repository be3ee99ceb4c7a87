//! The one place where the standard library's locks and atomics give way to loom's, so that the model checks the code
//! that ships.

#[cfg(not(loom))]
pub use std::sync::{
    Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard,
    atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering},
};

#[cfg(loom)]
pub use loom::sync::{
    Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard,
    atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering},
};
