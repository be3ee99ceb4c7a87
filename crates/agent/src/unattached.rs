//! What stands for `attached` in the other forms, whose agent no process has put into the program.

use pagefold_os::fd::Fd;
use pagefold_os::raw::Result;
use pagefold_os::uffd::Uffd;
use pagefold_protocol::message::Packet;

pub(crate) const fn new_socket_for_children() -> Result<Option<(Fd, Fd)>> {
    Ok(None)
}

pub(crate) fn begin_children(_: Fd) {}

pub(crate) const fn socket_for_children() -> i32 {
    -1
}

pub(crate) const fn is_asked_to_leave() -> bool {
    false
}

pub(crate) const fn take_socket() -> Option<Fd> {
    None
}

pub(crate) const fn take_hold() -> Option<Uffd> {
    None
}

pub(crate) const fn describe_entry(_: &mut Packet) {}

/// The agent's last thread ends.
pub(crate) fn leave() -> ! {
    crate::runtime::thread::exit_thread()
}
