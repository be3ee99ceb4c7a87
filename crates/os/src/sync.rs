//! Locks that ignore poisoning.
//!
//! A thread that panics while it holds a lock poisons it. Every critical section of this project leaves its data whole at
//! each step, so the other threads go on with the data as they find it.

use std::sync::{Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard, TryLockError};

/// Locks `mutex`, poisoned or not.
pub fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Locks `lock` for reading, poisoned or not.
pub fn read<T: ?Sized>(lock: &RwLock<T>) -> RwLockReadGuard<'_, T> {
    lock.read().unwrap_or_else(PoisonError::into_inner)
}

/// Locks `lock` for writing, poisoned or not.
pub fn write<T: ?Sized>(lock: &RwLock<T>) -> RwLockWriteGuard<'_, T> {
    lock.write().unwrap_or_else(PoisonError::into_inner)
}

/// What a lock gave that was tried: its data, poisoned or not; `None` if another thread has it.
pub fn at_once<T>(tried: Result<T, TryLockError<T>>) -> Option<T> {
    match tried {
        Ok(held) => Some(held),
        Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_poisoned_lock_is_taken_with_the_data_it_has() {
        let (mutex, rw) = (Mutex::new(1), RwLock::new(2));
        std::thread::scope(|scope| {
            let panics = scope.spawn(|| {
                let (mut one, mut two) = (lock(&mutex), write(&rw));
                (*one, *two) = (3, 4);
                panic!("this test poisons its locks");
            });
            assert!(panics.join().is_err());
        });
        assert!(mutex.is_poisoned() && rw.is_poisoned());
        assert_eq!((*lock(&mutex), *read(&rw)), (3, 4));
        let held = at_once(mutex.try_lock());
        assert!(held.is_some_and(|held| *held == 3 && at_once(mutex.try_lock()).is_none()));
    }
}
