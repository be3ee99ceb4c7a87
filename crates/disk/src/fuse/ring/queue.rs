//! One queue: an io_uring of one processor, and the entries in which the kernel places requests.
//!
//! An entry is memory that the kernel and this process use in turns. While the kernel has it, the [`Queue`] keeps its
//! [`Slot`] and nothing refers to the memory. When a request has arrived, the caller gets the slot, reads the request,
//! writes the answer and commits the slot to the kernel. The rest of the kernel's interface is in [`super::wire`].
//!
//! This is the only file of the transport with `unsafe`.

use super::wire::{HEADER_BYTES, command};
use crate::fuse::file_system::REQUEST_BYTES_MAX;
use io_uring::{IoUring, cqueue, opcode, squeue, types};
use rustix::event::{EventfdFlags, eventfd};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;

/// Bytes of an entry's payload: the kernel's largest request.
pub(super) const PAYLOAD_BYTES: usize = REQUEST_BYTES_MAX as usize;
/// The header follows the payload, on a page of its own.
const SLOT_BYTES: usize = PAYLOAD_BYTES + 4096;

/// The memory of one entry, held by this process: nothing else accesses it.
pub(super) struct Slot {
    memory: NonNull<u8>,
    index: u16,
}

// SAFETY: a slot owns its mapping, plain memory without thread affinity.
unsafe impl Send for Slot {}

impl Slot {
    fn new(index: u16) -> io::Result<Self> {
        // SAFETY: a fresh anonymous mapping at an address that the kernel chooses touches no existing memory.
        let memory = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                SLOT_BYTES,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if memory == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(Self { memory: NonNull::new(memory.cast()).expect("the kernel never maps at address zero"), index })
    }

    /// Header and payload.
    pub(super) fn parts(&mut self) -> (&mut [u8; HEADER_BYTES], &mut [u8]) {
        // SAFETY: both ranges lie inside the mapping of SLOT_BYTES and do not overlap; it is initialised (anonymous memory
        // is). The kernel does not access an entry between a request's arrival and its commit, and a `Slot` exists outside
        // of the queue only then, so the exclusive borrow of the slot is one of the memory.
        unsafe {
            let header = self.memory.as_ptr().add(PAYLOAD_BYTES).cast::<[u8; HEADER_BYTES]>();
            (&mut *header, std::slice::from_raw_parts_mut(self.memory.as_ptr(), PAYLOAD_BYTES))
        }
    }

    fn vectors(&self) -> [libc::iovec; 2] {
        let payload = self.memory.as_ptr();
        [
            libc::iovec { iov_base: payload.wrapping_add(PAYLOAD_BYTES).cast(), iov_len: HEADER_BYTES },
            libc::iovec { iov_base: payload.cast(), iov_len: PAYLOAD_BYTES },
        ]
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        // SAFETY: the range is exactly the mapping of `new`; the slot is dropped only while this process holds it (the
        // queue's own `drop` keeps the others), so the kernel does not write there any more.
        unsafe { libc::munmap(self.memory.as_ptr().cast(), SLOT_BYTES) };
    }
}

/// Wakes the thread of a queue.
pub(super) struct Waker(OwnedFd);

impl Waker {
    pub(super) fn wake(&self) {
        // It fails only if the counter is full; the queue has a wakeup pending then.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }
}

/// `user_data` of the wakeup; entries have their numbers.
const WAKE: u64 = u64::MAX;

/// The queue of one processor, used by one thread.
pub(super) struct Queue {
    ring: IoUring<squeue::Entry128, cqueue::Entry>,
    number: u16,
    /// By number: the entries that the kernel has, or will have with the next submission.
    entries: Vec<Option<Slot>>,
    in_kernel: usize,
    /// Slots whose requests arrived during registration.
    early: Vec<Slot>,
    waker: Arc<Waker>,
}

impl Queue {
    /// Makes the queue of processor `number` with `depth` entries, and tries each call that it makes later: the kernel sends
    /// nothing at all through a connection that has agreed to rings and does not get them.
    ///
    /// # Errors
    /// The kernel, a seccomp filter or `kernel.io_uring_disabled` refuses io_uring, or there is no memory.
    pub(super) fn new(number: u16, depth: u16) -> io::Result<Self> {
        // Requests arrive as task work of this thread, and it asks for them: nothing interrupts it.
        let mut builder = IoUring::<squeue::Entry128, cqueue::Entry>::builder();
        builder.setup_single_issuer().setup_defer_taskrun();
        let mut ring = builder.build(u32::from(depth) + 1)?;
        // SAFETY: a no-op refers to no memory.
        unsafe { ring.submission().push(&opcode::Nop::new().build().into()) }.map_err(io::Error::other)?;
        ring.submit_and_wait(1)?;
        ring.completion().for_each(drop);
        let waker = Arc::new(Waker(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?));
        // The first file is replaced by the connection.
        ring.submitter().register_files(&[waker.0.as_raw_fd()])?;
        let entries = (0..depth).map(|index| Slot::new(index).map(Some)).collect::<io::Result<Vec<_>>>()?;
        Ok(Self { ring, number, entries, in_kernel: 0, early: Vec::new(), waker })
    }

    pub(super) fn waker(&self) -> Arc<Waker> {
        self.waker.clone()
    }

    /// Hands all entries to the kernel's connection `device`. Those that it refuses are dropped.
    ///
    /// # Errors
    /// The kernel accepted none. It then sends requests through /dev/fuse.
    ///
    /// # Panics
    /// A call fails that succeeded in `new`.
    pub(super) fn register(&mut self, device: BorrowedFd<'_>) -> io::Result<()> {
        self.ring.submitter().register_files_update(0, &[device.as_raw_fd()]).expect("files were registered before");
        self.arm_waker();
        // The kernel reads the vectors during submission.
        let vectors: Vec<_> = self.entries.iter().flatten().map(Slot::vectors).collect();
        for (index, vectors) in vectors.iter().enumerate() {
            let mut entry = opcode::UringCmd80::new(types::Fixed(0), command::REGISTER)
                .cmd(command::arguments(self.number, 0))
                .addr(Some(vectors.as_ptr() as u64))
                .build()
                .user_data(index as u64);
            const { assert!(size_of::<squeue::Entry128>() == 128) };
            // SAFETY: `Entry128` is the kernel's submission entry of 128 bytes (the assertion), whose `len` is the aligned
            // word at byte 24. The builder has no field for it, and leaves it zero.
            unsafe { std::ptr::from_mut(&mut entry).cast::<u32>().add(6).write(vectors.len() as u32) };
            self.push(&entry);
            self.in_kernel += 1;
        }
        self.ring.submit().expect("entries were submitted before");
        let mut error = None;
        let mut early = Vec::new();
        self.collect(&mut early, |refused| error = Some(refused));
        self.early = early;
        match error {
            Some(error) if self.in_kernel + self.early.len() == 0 => Err(error),
            _ => Ok(()),
        }
    }

    /// How many entries the kernel has.
    pub(super) fn in_kernel(&self) -> usize {
        self.in_kernel
    }

    /// Gives an answered entry to the kernel, with the next [`Queue::wait`].
    pub(super) fn commit(&mut self, mut slot: Slot) {
        let index = slot.index;
        let id = super::wire::commit_id(slot.parts().0);
        self.entries[usize::from(index)] = Some(slot);
        self.in_kernel += 1;
        let entry = opcode::UringCmd80::new(types::Fixed(0), command::COMMIT_AND_FETCH)
            .cmd(command::arguments(self.number, id))
            .build()
            .user_data(index.into());
        self.push(&entry);
    }

    /// Submits what was committed, waits for a request, a wakeup or the end, and adds the arrived requests to `ready`.
    ///
    /// # Errors
    /// The kernel refuses the call; no request can be answered any more.
    pub(super) fn wait(&mut self, ready: &mut Vec<Slot>) -> io::Result<()> {
        ready.append(&mut self.early);
        let wanted = usize::from(ready.is_empty());
        loop {
            match self.ring.submit_and_wait(wanted) {
                Ok(_) => break,
                Err(error) if error.raw_os_error() == Some(libc::EINTR) => {}
                Err(error) => return Err(error),
            }
        }
        // An entry that comes back with an error is gone: the connection has ended.
        self.collect(ready, drop);
        Ok(())
    }

    fn collect(&mut self, ready: &mut Vec<Slot>, mut refused: impl FnMut(io::Error)) {
        let mut is_armed = true;
        for event in self.ring.completion() {
            if event.user_data() == WAKE {
                is_armed = cqueue::more(event.flags());
                continue;
            }
            let Some(slot) = self.entries[event.user_data() as usize].take() else { continue };
            self.in_kernel -= 1;
            match event.result() {
                0 => ready.push(slot),
                error => refused(io::Error::from_raw_os_error(-error)),
            }
        }
        if !is_armed {
            self.arm_waker();
        }
    }

    /// Has each wakeup complete one event. The counter is never read: a multishot poll reports each write.
    fn arm_waker(&mut self) {
        let poll = opcode::PollAdd::new(types::Fd(self.waker.0.as_raw_fd()), (libc::POLLIN as u32) | EPOLLET);
        self.push(&squeue::Entry128::from(poll.multi(true).build()).user_data(WAKE));
    }

    fn push(&mut self, entry: &squeue::Entry128) {
        // SAFETY: the entry refers to no memory but vectors that live until the submission (`register`), and names slots
        // that stay mapped while the kernel has them (`Drop for Queue`).
        unsafe { self.ring.submission().push(entry) }.expect("the ring has room for all entries and the wakeup");
    }
}

/// In a poll: report changes, not states.
const EPOLLET: u32 = 1 << 31;

impl Drop for Queue {
    fn drop(&mut self) {
        // The kernel may still write to entries that it has. Their memory is never used for anything else.
        self.entries.drain(..).flatten().filter(|_| self.in_kernel > 0).for_each(std::mem::forget);
    }
}
