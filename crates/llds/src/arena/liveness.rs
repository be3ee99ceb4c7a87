//! Liveness: the proof that a process which took thread records will execute no further instruction.
//!
//! Each handle locks one byte of the file with an open file description lock.
//! The byte lies far beyond the end of the file, at an offset given by the
//! process id. The kernel drops the lock when neither a descriptor nor a mapping
//! of the open file is left: when the process has ended, or has called exec. An
//! unlocked byte therefore proves a death, whatever /proc shows. A locked byte
//! proves less, because a forked child inherits the open file. In that case
//! kill(2) is asked, and finally /proc: the start time tells whether the process
//! id was reused. Every doubtful case counts as alive: waiting for a dead process
//! is harmless, cleaning up after a live one is not.

use super::process_identity::{Identity, own_namespaces, start_time};
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;

/// Offset of the lock byte of process 0: beyond anything that is stored.
const LOCKS_AT: i64 = 1 << 62;

/// Locks the byte of process `pid` exclusively for this handle. Returns false if another handle of that process holds it.
pub fn lock_alone(file: &File, pid: u32) -> io::Result<bool> {
    match lock(file, libc::F_OFD_SETLK, libc::F_WRLCK, pid) {
        Ok(_) => Ok(true),
        Err(error) if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EACCES)) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Locks the byte of process `pid`, shared with the process's other handles.
pub fn lock_shared(file: &File, pid: u32) -> io::Result<()> {
    lock(file, libc::F_OFD_SETLKW, libc::F_RDLCK, pid).map(drop)
}

/// Returns true if no other handle of process `pid` is left.
pub fn is_unlocked(file: &File, inode: (u64, u64), pid: u32) -> bool {
    // A program that closes descriptors it does not own may have reused this number for another file.
    inode_of(file).is_ok_and(|found| found == inode)
        && lock(file, libc::F_OFD_GETLK, libc::F_WRLCK, pid).is_ok_and(|kind| kind == libc::F_UNLCK)
}

/// Device and inode of a file.
pub fn inode_of(file: &File) -> io::Result<(u64, u64)> {
    file.metadata().map(|meta| (meta.dev(), meta.ino()))
}

fn lock(file: &File, command: i32, kind: i32, pid: u32) -> io::Result<i32> {
    // SAFETY: flock64 consists of integers, so all zeros is a valid value.
    let mut lock: libc::flock64 = unsafe { std::mem::zeroed() };
    (lock.l_type, lock.l_whence) = (kind as i16, libc::SEEK_SET as i16);
    (lock.l_start, lock.l_len) = (LOCKS_AT + i64::from(pid), 1);
    loop {
        // SAFETY: the descriptor is open while `file` is borrowed, and the kernel writes only into `lock`.
        if unsafe { libc::fcntl(file.as_raw_fd(), command, &raw mut lock) } == 0 {
            return Ok(i32::from(lock.l_type));
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

/// Returns true if `process` may still execute instructions, as far as the kernel tells. Its start time has meaning in
/// `namespaces`, its id both there and in our pid namespace.
pub fn may_run(process: Identity, namespaces: u64) -> bool {
    // SAFETY: kill takes no pointers; signal 0 sends nothing and only checks that the process exists.
    let found = unsafe { libc::kill(process.pid() as i32, 0) } == 0;
    if !found && io::Error::last_os_error().raw_os_error() == Some(libc::ESRCH) {
        return false;
    }
    // An invisible process (hidepid=, another root, no /proc) is not a dead one.
    let Ok((start, ended)) = start_time(process.pid()) else { return true };
    let other = ended || !Identity::new(process.pid(), start).is_process(process);
    !(other && own_namespaces().is_ok_and(|own| own == namespaces))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_living_and_a_dead_process_are_told_apart() {
        let here = own_namespaces().unwrap();
        let own = Identity::own().unwrap();
        assert!(may_run(own, here));
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let (start, ended) = start_time(child.id()).unwrap();
        assert!(!ended);
        let process = Identity::new(child.id(), start);
        assert!(may_run(process, here));
        let other = Identity::new(child.id(), start + 1);
        assert!(!may_run(other, here), "another start time");
        assert!(may_run(other, here ^ 1), "a start time by the clock of another namespace");
        child.kill().unwrap();
        // Not reaped yet: a zombie can execute nothing.
        while may_run(process, here) {
            std::thread::yield_now();
        }
        child.wait().unwrap();
        assert!(!may_run(process, here));
    }
}
