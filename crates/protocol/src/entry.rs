//! The page by which a process that enters a running program and the agent's first thread there talk, before they have a
//! socket.
//!
//! The entering process writes the page through /proc/PID/mem and reads it the same way. The agent polls it: neither side
//! can wake the other yet. All of it is the program's memory, so the entering process believes nothing that it reads here.

use core::sync::atomic::{AtomicI32, AtomicU32};

/// Longest path of a daemon's socket, as sockaddr_un has it.
pub const SOCKET_MAX: usize = 108;

/// What the entering process says, in [`EntryPage::order`].
pub mod order {
    /// Wait: the agent's code is being written.
    pub const WAIT: u32 = 0;
    /// Begin: the agent's code is there.
    pub const BEGIN: u32 = 1;
    /// The entering process has the other end of the agent's socket.
    pub const TAKEN: u32 = 2;
    /// End the thread and unmap everything: the entry failed.
    pub const GIVE_UP: u32 = 3;
    /// Leave: nothing is merged any more.
    pub const LEAVE: u32 = 4;
    /// Open another socket: the agent has no daemon, and finds none.
    pub const CONNECT: u32 = 5;
}

/// How far the agent is, in [`EntryPage::stage`].
pub mod stage {
    /// Its socket is open.
    pub const OPEN: u32 = 1;
    /// It cannot go on; [`EntryPage::error`](super::EntryPage::error) says why.
    pub const FAILED: u32 = 2;
}

/// The page. The first words are used by the code that waits for the agent's own, so their places are fixed.
#[repr(C)]
#[derive(Debug)]
pub struct EntryPage {
    /// One of [`order`].
    pub order: AtomicU32,
    /// Thread id of the agent's first thread; the kernel writes it.
    pub thread: AtomicI32,
    /// The thread that was borrowed has left the code of the entry.
    pub left: AtomicU32,
    /// One of [`stage`].
    pub stage: AtomicU32,
    /// Error number of the step that failed.
    pub error: AtomicI32,
    /// The end of the agent's connection that the entering process takes, of the first or of one that it asks for.
    pub requests: AtomicI32,
    /// Bytes of the path in `socket`.
    pub socket_len: u32,
    /// 1 if all large private memory is managed, 0 if only what the program marks as mergeable.
    pub all: u32,
    /// 1 if idle memory is evicted to the cold tier, 0 if equal pages are merged.
    pub cold: u32,
    /// 1 if the program's filters let the agent choose its processor.
    pub may_follow: u16,
    /// 1 if they let it map memory that can be written and executed.
    pub may_execute: u16,
    /// Refault budget in millionths, and limit of the tier in bytes, for [`cold`](Self::cold); 0 for the daemon's default.
    pub cold_options: [u64; 2],
    /// Where everything of ours begins, and how long it is, stack and this page included.
    pub image: [u64; 2],
    /// Where the agent's first stack begins, and where it ends.
    pub stack: [u64; 2],
    /// Code that unmaps the range in its first two arguments and ends the thread; it lies outside of the image.
    pub leave_at: u64,
    /// Name of the domain, padded with zeros.
    pub domain: [u8; 64],
    /// Where the daemon listens, for a later connection.
    pub socket: [u8; SOCKET_MAX],
}

const _: () = assert!(core::mem::offset_of!(EntryPage, order) == 0);
const _: () = assert!(core::mem::offset_of!(EntryPage, thread) == 4);
const _: () = assert!(core::mem::offset_of!(EntryPage, left) == 8);
// A daemon finds its way in pages that earlier versions have written.
const _: () = assert!(core::mem::offset_of!(EntryPage, cold_options) == 40);
const _: () = assert!(size_of::<EntryPage>() <= pagefold_os::PAGE_SIZE);
