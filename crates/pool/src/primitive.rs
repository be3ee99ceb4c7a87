//! The one place where the standard library's locks and atomics give way to loom's, so that the model checks the code
//! that ships.

#[cfg(not(loom))]
pub use pagefold_os::sync::{lock, read, write};
#[cfg(not(loom))]
pub use std::sync::{
    Mutex, RwLock,
    atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering},
};

#[cfg(loom)]
pub use loom::sync::{
    Mutex, RwLock,
    atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering},
};
#[cfg(loom)]
pub use model::{lock, read, write};

/// As `pagefold_os::sync`, for loom's locks: a panic ends the model.
#[cfg(loom)]
mod model {
    use loom::sync::{Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard};

    pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
        mutex.lock().expect("not poisoned")
    }

    pub fn read<T>(lock: &RwLock<T>) -> RwLockReadGuard<'_, T> {
        lock.read().expect("not poisoned")
    }

    pub fn write<T>(lock: &RwLock<T>) -> RwLockWriteGuard<'_, T> {
        lock.write().expect("not poisoned")
    }
}
