//! Making and opening arenas, private ones and those in files.
//!
//! Nothing in a file is trusted before its header was checked against what this
//! code writes. From [`Inner::enter`] on, other processes see that ours uses the
//! file.

use super::class::SPAN_BYTES;
use super::fork_sentinel::ForkSentinel;
use super::layout::{ARCHITECTURE, Layout, MAGIC, SEALED_WORDS, SPANS_MAX, VERSION, checksum};
use super::process_identity::Identity;
use super::span::SMALL_PAGE_SPANS;
use super::thread_record::{ABANDONED, RECORDS_SPARE, THREADS_MAX};
use super::{Arena, Error, Inner, Options, Pages, liveness, map, process_identity};
use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

impl Arena {
    /// Makes an arena that is private to this process.
    ///
    /// # Errors
    /// [`Error::Reserve`] when not even a 64th of the capacity can be reserved.
    pub fn private(options: &Options) -> Result<Arena, Error> {
        let mut capacity = options.capacity_bytes.max(SPAN_BYTES as u64);
        let least = (capacity / 64).max(SPAN_BYTES as u64);
        loop {
            let layout = Layout::new(span_count(capacity), options.root_bytes);
            match map::Mapping::private(layout.bytes, options.pages, options.numa) {
                Ok(map) => {
                    // The arena touches few words of its fixed part, and a small one few of its spans; on huge pages they
                    // would take megabytes.
                    map.small_pages((layout.data + SMALL_PAGE_SPANS * SPAN_BYTES).min(layout.bytes));
                    let arena = Arena::over(map, layout, None)?;
                    arena.inner.format(options.kind);
                    return Ok(arena);
                }
                // Strict overcommit limits reservations: try a smaller one.
                Err(_) if capacity / 2 >= least => capacity /= 2,
                Err(error) => return Err(error),
            }
        }
    }

    /// Makes an arena in the empty file `file`. No other process may map the file before this returns.
    ///
    /// # Errors
    /// The file system's, or [`Error::Reserve`].
    pub fn create(file: File, options: &Options) -> Result<Arena, Error> {
        let mut capacity = options.capacity_bytes.max(SPAN_BYTES as u64);
        if let Some((page_bytes, free_bytes)) = map::hugetlbfs_free_bytes(&file) {
            let fixed = Layout::new(span_count(capacity), options.root_bytes).data;
            let left = free_bytes.saturating_sub(fixed) / page_bytes * page_bytes;
            capacity = capacity.min((left as u64).max(SPAN_BYTES as u64));
        }
        let mut layout = Layout::new(span_count(capacity), options.root_bytes);
        if let Some((page_bytes, _)) = map::hugetlbfs_free_bytes(&file) {
            layout.bytes = layout.bytes.next_multiple_of(page_bytes);
        }
        check_file_limit(layout.bytes as u64)?;
        file.set_len(layout.bytes as u64)?;
        let map = map::Mapping::shared(file, layout.bytes, options.pages)?;
        // Header and root are written without securing pages first, so allocate their pages now. Tables get theirs with the
        // spans, records with the threads.
        map.secure(0, layout.records)?;
        map.secure(layout.root, layout.root_bytes)?;
        let arena = Arena::over(map, layout, Some(own_identity()?.0))?;
        arena.inner.format(options.kind);
        (1..=RECORDS_SPARE as u64).try_for_each(|owner| arena.inner.secure_record(owner))?;
        arena.inner.enter(true)?;
        Ok(arena)
    }

    /// Opens the arena in `file`.
    ///
    /// # Errors
    /// [`Error::Foreign`], [`Error::Version`], [`Error::Architecture`], [`Error::Truncated`] or [`Error::Damaged`]
    /// when it is not an arena this code can use; [`Error::Namespace`] when deaths could not be noticed.
    pub fn open(file: File, kind: u64, pages: Pages) -> Result<Arena, Error> {
        Arena::open_as(file, kind, pages, false)
    }

    /// Opens the arena in `file`, which no other process has open or opens before this returns. All owners of its thread
    /// records are therefore dead, whatever their process ids say here, and the arena moves to our namespaces. Validates
    /// the table of spans.
    ///
    /// # Errors
    /// As [`Arena::open`].
    pub fn open_alone(file: File, kind: u64, pages: Pages) -> Result<Arena, Error> {
        Arena::open_as(file, kind, pages, true)
    }

    fn open_as(file: File, kind: u64, pages: Pages, alone: bool) -> Result<Arena, Error> {
        use std::os::unix::fs::FileExt;
        let mut bytes = [0u8; 128];
        let found = file.metadata()?.size();
        if found < 4096 {
            return Err(Error::Truncated { found, expected: 4096 });
        }
        file.read_exact_at(&mut bytes, 0).or_else(|error| read_mapped(&file, &mut bytes).ok_or(error))?;
        let word = |index: usize| u64::from_ne_bytes(bytes[index * 8..index * 8 + 8].try_into().unwrap_or_default());
        if word(0).swap_bytes() == MAGIC {
            return Err(Error::Architecture { found: (word(1) >> 32) as u32, expected: ARCHITECTURE });
        }
        if word(0) != MAGIC {
            return Err(Error::Foreign);
        }
        let half = |at: usize| u32::from_ne_bytes(bytes[at..at + 4].try_into().unwrap_or_default());
        if half(8) != VERSION {
            return Err(Error::Version { found: half(8), expected: VERSION });
        }
        if half(12) != ARCHITECTURE {
            return Err(Error::Architecture { found: half(12), expected: ARCHITECTURE });
        }
        let sealed: Vec<u64> = (0..SEALED_WORDS).map(word).collect();
        if checksum(&sealed) != word(SEALED_WORDS) {
            return Err(Error::Damaged("the header's checksum is wrong"));
        }
        if word(2) != kind {
            let digit = |kind: u64| char::from((kind >> 56) as u8).to_digit(10);
            return Err(match (digit(word(2)), digit(kind)) {
                (Some(found), Some(expected)) if (word(2) ^ kind) << 8 == 0 => Error::Version { found, expected },
                _ => Error::Foreign,
            });
        }
        if word(3) != SPAN_BYTES as u64 || word(5) != THREADS_MAX as u64 {
            return Err(Error::Damaged("the geometry is not this version's"));
        }
        let (spans, root_bytes, expected) = (word(4), word(6), word(7));
        if spans > SPANS_MAX as u64 || root_bytes > 1 << 40 {
            return Err(Error::Damaged("the geometry is impossible"));
        }
        let mut layout = Layout::new(spans as usize, root_bytes as usize);
        if expected < layout.bytes as u64 {
            return Err(Error::Damaged("the geometry is impossible"));
        }
        layout.bytes = expected as usize;
        if found < expected {
            return Err(Error::Truncated { found, expected });
        }
        let map = map::Mapping::shared(file, layout.bytes, pages)?;
        let arena = Arena::over(map, layout, Some(own_identity()?.0))?;
        if alone && !arena.inner.is_table_sound() {
            return Err(Error::Damaged("its table of spans names what cannot be"));
        }
        arena.inner.enter(alone)?;
        Ok(arena)
    }

    /// Opens the arena in the file at `path`; see [`Arena::open`].
    ///
    /// # Errors
    /// As [`Arena::open`].
    pub fn open_path(path: &Path, kind: u64, pages: Pages) -> Result<Arena, Error> {
        Arena::open(File::options().read(true).write(true).open(path)?, kind, pages)
    }

    fn over(map: map::Mapping, layout: Layout, identity: Option<Identity>) -> Result<Arena, Error> {
        static NEXT_ID: AtomicU64 = AtomicU64::new(1);
        let id = NEXT_ID.fetch_add(1, Ordering::Relaxed);
        let sentinel = Arc::new(ForkSentinel::new()?);
        let (registered, deferred, next_trim) = Default::default();
        Ok(Arena { inner: Arc::new(Inner { id, map, layout, identity, sentinel, registered, deferred, next_trim }) })
    }
}

impl Inner {
    /// Registers this handle as a user of the file: from here on other processes see that its process lives.
    fn enter(&self, alone: bool) -> Result<(), Error> {
        let (Some(identity), Some(file)) = (self.identity, self.map.file()) else { return Ok(()) };
        let (_, namespaces) = own_identity()?;
        if alone {
            self.header().namespaces.store(namespaces, Ordering::SeqCst);
        } else if self.header().namespaces.load(Ordering::SeqCst) != namespaces {
            return Err(Error::Namespace);
        }
        // Without another handle, records under our process id belong to an earlier process with the same id, or to this
        // process before it called exec.
        let first = liveness::lock_alone(file, identity.pid())?;
        for owner in 1..=self.records_high() {
            let thread = self.record_at(owner);
            if alone {
                self.drop_invalid_retired(thread);
            }
            let state = &thread.state;
            let found = state.load(Ordering::SeqCst);
            if found != 0 && (alone || (first && Identity::of(found).pid() == identity.pid())) {
                // If this fails, a recovery took the record, which is as good.
                let _ = state.compare_exchange(found, ABANDONED, Ordering::SeqCst, Ordering::SeqCst);
            }
        }
        Ok(liveness::lock_shared(file, identity.pid())?)
    }
}

/// Returns the identity of this process, and the namespaces in which it has meaning.
fn own_identity() -> Result<(Identity, u64), Error> {
    let own = || Ok((Identity::own()?, process_identity::own_namespaces()?));
    own().map_err(|error: io::Error| {
        let what = format!("a shared store needs /proc of this pid namespace to notice deaths: {error}");
        Error::Io(io::Error::new(error.kind(), what))
    })
}

/// Refuses a file larger than RLIMIT_FSIZE: growing it would end the process with SIGXFSZ.
fn check_file_limit(bytes: u64) -> Result<(), Error> {
    let mut limit = libc::rlimit { rlim_cur: libc::RLIM_INFINITY, rlim_max: libc::RLIM_INFINITY };
    // SAFETY: getrlimit writes only into `limit`.
    unsafe { libc::getrlimit(libc::RLIMIT_FSIZE, &raw mut limit) };
    if limit.rlim_cur == libc::RLIM_INFINITY || bytes <= limit.rlim_cur {
        return Ok(());
    }
    let source = io::Error::from_raw_os_error(libc::EFBIG);
    let what = format!("{source}: {bytes} bytes; choose a smaller capacity, or raise ulimit -f");
    Err(Error::Io(io::Error::new(source.kind(), what)))
}

fn span_count(capacity_bytes: u64) -> usize {
    usize::try_from(capacity_bytes.div_ceil(SPAN_BYTES as u64)).unwrap_or(usize::MAX).min(SPANS_MAX)
}

/// Reads the first bytes of a file that refuses `read`, as hugetlbfs of old kernels does.
fn read_mapped(file: &File, bytes: &mut [u8; 128]) -> Option<()> {
    use std::os::fd::AsRawFd;
    let (page_bytes, _) = map::hugetlbfs_free_bytes(file)?;
    // SAFETY: maps one page of the file read-only, copies from it and unmaps it; a failure is checked.
    unsafe {
        let at = libc::mmap(std::ptr::null_mut(), page_bytes, libc::PROT_READ, libc::MAP_SHARED, file.as_raw_fd(), 0);
        if at == libc::MAP_FAILED {
            return None;
        }
        std::ptr::copy_nonoverlapping(at.cast::<u8>(), bytes.as_mut_ptr(), bytes.len());
        libc::munmap(at, page_bytes);
    }
    Some(())
}
