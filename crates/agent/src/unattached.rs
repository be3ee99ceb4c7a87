//! What stands for `attached` in the other forms, whose agent no process has put into the program.

use crate::runtime::connection::ACCEPT_MS;
use crate::state::read_settings;
use pagefold_os::fd::Fd;
use pagefold_os::raw::Result;
use pagefold_os::sock;
use pagefold_os::uffd::Uffd;
use pagefold_protocol::message::Packet;

pub(crate) const fn new_keeper_socket() -> Result<Option<(Fd, Fd)>> {
    Ok(None)
}

pub(crate) fn begin_keeper_socket(_: Fd) {}

pub(crate) const fn is_keeper_there() -> bool {
    false
}

pub(crate) const fn is_asked_to_leave() -> bool {
    false
}

/// A connection to the daemon.
pub(crate) fn connect() -> Result<Fd> {
    sock::connect_within(read_settings().0, ACCEPT_MS)
}

pub(crate) const fn take_hold() -> Option<Uffd> {
    None
}

pub(crate) const fn describe_entry(_: &mut Packet) {}

/// The agent's last thread ends.
pub(crate) fn leave() -> ! {
    crate::runtime::thread::exit_thread()
}
