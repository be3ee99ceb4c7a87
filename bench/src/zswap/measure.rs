//! Memory and clocks of the parts.

use crate::process::cpu_s;
use pagefold_os::mem::Mapping;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

/// Anonymous memory on small pages.
pub struct Area(pub Mapping);

impl Area {
    /// Maps `len` bytes.
    pub fn new(len: usize) -> io::Result<Area> {
        Mapping::anonymous(len).map(Area).map_err(|errno| io::Error::from_raw_os_error(errno.0))
    }

    /// All of it.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: the mapping is readable, writable and of that length, and is borrowed mutably as long as the slice.
        unsafe { std::slice::from_raw_parts_mut(self.0.as_ptr(), self.0.len()) }
    }

    /// Reads one byte of a page, which may fault it in.
    pub fn touch(&self, page: usize) {
        assert!(page * 4096 < self.0.len());
        // SAFETY: inside the mapping, as just checked; volatile, because the read is what counts.
        unsafe { self.0.as_ptr().add(page * 4096).read_volatile() };
    }

    /// Asks the kernel to evict all pages.
    pub fn page_out(&self) {
        // SAFETY: the range is this mapping; the advice changes no byte that can be read.
        let _ = unsafe { pagefold_os::mem::advise(self.0.addr(), self.0.len() as u64, libc::MADV_PAGEOUT) };
    }
}

/// The pages of a set, with their numbers.
pub fn as_pages(set: &[u8]) -> Vec<(u64, &[u8; 4096])> {
    (0..).zip(set.as_chunks::<4096>().0).collect()
}

/// Time of storing a set, without the preparation before and the cleaning up after.
#[derive(Default)]
pub struct Spent {
    /// Wall time.
    pub seconds: f64,
    /// Processor time.
    pub cpu_s: f64,
}

impl Spent {
    /// Adds the time of `act`.
    pub fn on<T>(&mut self, act: impl FnOnce() -> T) -> T {
        let (start, cpu) = (Instant::now(), cpu_s(libc::RUSAGE_SELF));
        let result = act();
        self.seconds += start.elapsed().as_secs_f64();
        self.cpu_s += cpu_s(libc::RUSAGE_SELF) - cpu;
        result
    }
}

/// Microseconds of each of `count` acts.
pub fn timed(count: usize, mut act: impl FnMut(usize)) -> Vec<f64> {
    let time = |at| {
        let start = Instant::now();
        act(at);
        start.elapsed().as_secs_f64() * 1e6
    };
    (0..count).map(time).collect()
}

/// Keeps every processor busy while this lives.
pub struct Busy {
    stop: Arc<AtomicBool>,
    threads: Vec<std::thread::JoinHandle<()>>,
}

impl Busy {
    /// Starts a thread for each processor.
    pub fn start() -> Busy {
        let stop = Arc::new(AtomicBool::new(false));
        let spin = || {
            let stop = stop.clone();
            std::thread::spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            })
        };
        let threads = (0..std::thread::available_parallelism().map_or(1, usize::from)).map(|_| spin()).collect();
        Busy { stop, threads }
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}
