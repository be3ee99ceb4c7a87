//! The same work on many items, by all processors.

use crate::error::Result;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

/// Calls `work` for each of `items` and returns the results in the order of the items.
///
/// # Errors
/// One of those of `work`. No item is begun after the first error.
pub(crate) fn map<'a, T: Sync, R: Send>(items: &'a [T], work: impl Fn(&'a T) -> Result<R> + Sync) -> Result<Vec<R>> {
    let (next, failed) = (AtomicUsize::new(0), AtomicBool::new(false));
    let done = Mutex::new(Vec::with_capacity(items.len()));
    let worker = || -> Result<()> {
        let mut own = Vec::new();
        while !failed.load(Ordering::Relaxed) {
            let index = next.fetch_add(1, Ordering::Relaxed);
            let Some(item) = items.get(index) else { break };
            let result = work(item).inspect_err(|_| failed.store(true, Ordering::Relaxed))?;
            own.push((index, result));
        }
        done.lock().expect("no panic while held").append(&mut own);
        Ok(())
    };
    let workers = thread::available_parallelism().map_or(1, usize::from).min(items.len());
    thread::scope(|scope| {
        // Where no thread can be made, there are fewer.
        let threads = (1..workers).filter_map(|_| thread::Builder::new().spawn_scoped(scope, worker).ok());
        let threads: Vec<_> = threads.collect();
        let first = worker();
        let rest = threads.into_iter().map(|thread| thread.join().expect("workers do not panic"));
        rest.fold(first, Result::and)
    })?;
    let mut done = done.into_inner().expect("no panic while held");
    done.sort_unstable_by_key(|(index, _)| *index);
    Ok(done.into_iter().map(|(_, result)| result).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;

    #[test]
    fn results_are_in_order_and_an_error_is_returned() {
        let numbers: Vec<u64> = (0..10_000).collect();
        assert_eq!(map(&numbers, |number| Ok(number * 2)).unwrap(), numbers.iter().map(|n| n * 2).collect::<Vec<_>>());
        assert!(map(&[], |number: &u64| Ok(*number)).unwrap().is_empty());
        let work = |number: &u64| if *number == 5 { Err(Error::Refused("five".into())) } else { Ok(*number) };
        assert_eq!(map(&numbers, work).unwrap_err().to_string(), "five");
    }
}
