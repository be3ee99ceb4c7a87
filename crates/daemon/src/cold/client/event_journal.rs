//! What was read of a client's userfaultfd and is not obeyed yet.
//!
//! The kernel lets a thread that discards, unmaps or moves memory go on as soon as its event is read. So an event that a
//! daemon read and did not obey must not die with it. read(2) writes the events straight into this page of a memory file,
//! which the keeper holds too. A daemon that is killed has not read an event, and its successor reads it; or it has, and the
//! successor finds it here.
//!
//! Each event is removed when all it asks for is in residency map and tier, and may be obeyed twice. A move is obeyed in two
//! steps, because its first one, which clears the target, must not be repeated after its second one.
//!
//! The client never has this file: a number that it wrote here would name another descriptor, or another page.

use pagefold_os::fd::Fd;
use pagefold_os::mem::Mapping;
use pagefold_os::uffd::{Event, Message, Uffd};
use pagefold_os::{Errno, PAGE_SIZE, memfd, syscall};
use std::sync::atomic::{AtomicU64, Ordering};

/// Events read before the thread looks at anything else.
pub(crate) const EVENTS: usize = 64;
const WORDS: usize = size_of::<Message>() / size_of::<u64>();

/// The page.
#[repr(C)]
struct Page {
    /// As the kernel writes them. An entry that begins with 0 is none.
    messages: [[AtomicU64; WORDS]; EVENTS],
    /// The entry, counted from 1, of the move that has cleared its target.
    cleared: AtomicU64,
}

const _: () = assert!(size_of::<Page>() <= PAGE_SIZE && WORDS * size_of::<u64>() == size_of::<Message>());

/// A mapped journal.
pub(crate) struct EventJournal(Mapping);

/// Creates the file of a journal.
///
/// # Errors
/// As memfd_create(2).
pub(crate) fn create() -> Result<Fd, Errno> {
    let file = memfd::create(c"pagefold-event-journal", PAGE_SIZE as u64)?;
    memfd::add_seals(&file, memfd::SEAL_SHRINK)?;
    Ok(file)
}

impl EventJournal {
    /// Maps the journal in `file`.
    ///
    /// # Errors
    /// As mmap(2); `EPROTO` if the file is none.
    pub(crate) fn of(file: &Fd) -> Result<EventJournal, Errno> {
        let (len, _) = memfd::len_and_inode(file.raw())?;
        if len != PAGE_SIZE as u64 || memfd::seals(file)? & memfd::SEAL_SHRINK == 0 {
            return Err(Errno(libc::EPROTO));
        }
        let prot = libc::PROT_READ | libc::PROT_WRITE;
        let map = Mapping::file(file.raw(), 0, PAGE_SIZE, prot, libc::MAP_SHARED | libc::MAP_POPULATE)?;
        // The kernel takes an event off its list before it writes it here. A page that had to be brought in from swap then
        // is the one moment in which a kill could come between.
        // SAFETY: the mapping is ours; nothing changes but where the kernel may keep its page. A limit may forbid it.
        let _ = unsafe { syscall!(libc::SYS_mlock, map.addr(), PAGE_SIZE) };
        Ok(EventJournal(map))
    }

    fn page(&self) -> &Page {
        // SAFETY: the mapping is as long, and lives as long as `self`. The file cannot shrink, and any bytes are a valid
        // page.
        unsafe { &*(self.0.addr() as *const Page) }
    }

    /// Reads what events there are, and returns how many; never waits. The journal must be empty.
    pub(crate) fn read(&mut self, uffd: &Uffd) -> usize {
        // SAFETY: the page begins with so many messages, `self` is the only one of this process to use them, and the keeper
        // only holds the file.
        let messages = unsafe { std::slice::from_raw_parts_mut(self.0.addr() as *mut Message, EVENTS) };
        uffd.read_messages(messages).unwrap_or(0)
    }

    /// The event at `place`.
    pub(crate) fn event(&self, place: usize) -> Option<Event> {
        let words = self.page().messages[place].each_ref().map(|word| word.load(Ordering::Relaxed));
        (words[0] != 0).then(|| Message::from(words).event())
    }

    /// All that the event at `place` asks for is done.
    pub(crate) fn remove(&mut self, place: usize) {
        let page = self.page();
        page.messages[place][0].swap(0, Ordering::SeqCst);
        // Last: it says nothing of a place without an event.
        let _ = page.cleared.compare_exchange(place as u64 + 1, 0, Ordering::SeqCst, Ordering::Relaxed);
    }

    /// True if the target of the move at `place` has been cleared.
    pub(crate) fn is_cleared(&self, place: usize) -> bool {
        self.page().cleared.load(Ordering::SeqCst) == place as u64 + 1
    }

    /// The target of the move at `place` has been cleared.
    pub(crate) fn set_cleared(&mut self, place: usize) {
        self.page().cleared.swap(place as u64 + 1, Ordering::SeqCst);
    }

    /// Writes an event as the kernel would.
    #[cfg(test)]
    pub(crate) fn put(&mut self, place: usize, message: [u64; WORDS]) {
        for (word, value) in self.page().messages[place].iter().zip(message) {
            word.store(value, Ordering::Relaxed);
        }
    }
}
