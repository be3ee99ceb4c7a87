//! Who lives: what proves that a process which took seats executes no instruction any more.
//!
//! Each handle locks one byte of the file, far behind its end and at its
//! process's id, by an open file description lock. The kernel drops that when
//! neither a descriptor nor a mapping of the open file is left: when the
//! process has ended, or has called exec. So a free byte proves a death,
//! whatever /proc shows of it. A held byte proves less, since a forked child
//! inherits the open file; then kill(2) is asked, and at last /proc, for the
//! start time tells whether an id is used again. Whatever is not sure counts
//! as alive: rather wait for somebody dead than clean up under the living.

use super::seat::Identity;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;

/// Where the byte of process 0 lies: behind anything that is stored.
const LOCKS_AT: i64 = 1 << 62;

/// Takes the byte of process `pid` for this handle alone. False if another handle of that process has it.
pub fn lock_alone(file: &File, pid: u32) -> io::Result<bool> {
    match lock(file, libc::F_OFD_SETLK, libc::F_WRLCK, pid) {
        Ok(_) => Ok(true),
        Err(error) if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EACCES)) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Takes the byte of process `pid` beside its other handles.
pub fn lock_shared(file: &File, pid: u32) -> io::Result<()> {
    lock(file, libc::F_OFD_SETLKW, libc::F_RDLCK, pid).map(drop)
}

/// Whether no handle of process `pid` is left but this one.
pub fn is_unlocked(file: &File, inode: (u64, u64), pid: u32) -> bool {
    // A program that closes descriptors which are not its own may have put another file here.
    inode_of(file).is_ok_and(|found| found == inode)
        && lock(file, libc::F_OFD_GETLK, libc::F_WRLCK, pid).is_ok_and(|kind| kind == libc::F_UNLCK)
}

/// Device and inode of a file.
pub fn inode_of(file: &File) -> io::Result<(u64, u64)> {
    file.metadata().map(|meta| (meta.dev(), meta.ino()))
}

fn lock(file: &File, command: i32, kind: i32, pid: u32) -> io::Result<i32> {
    // SAFETY: a plain structure, for which all zeros is a value.
    let mut lock: libc::flock64 = unsafe { std::mem::zeroed() };
    (lock.l_type, lock.l_whence) = (kind as i16, libc::SEEK_SET as i16);
    (lock.l_start, lock.l_len) = (LOCKS_AT + i64::from(pid), 1);
    loop {
        // SAFETY: an open descriptor and a structure of our own.
        if unsafe { libc::fcntl(file.as_raw_fd(), command, &raw mut lock) } == 0 {
            return Ok(i32::from(lock.l_type));
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

/// Whether `process` may still execute instructions, as far as the system tells. Its id and start time have meaning
/// in `namespaces`; its id has in ours.
pub fn may_run(process: Identity, namespaces: u64) -> bool {
    // SAFETY: signal 0 is none: this only asks whether there is such a process.
    let found = unsafe { libc::kill(process.pid() as i32, 0) } == 0;
    if !found && io::Error::last_os_error().raw_os_error() == Some(libc::ESRCH) {
        return false;
    }
    // Not to be seen (hidepid=, another root, no /proc) is not dead.
    let Ok((start, ended)) = start_time(process.pid()) else { return true };
    let other = ended || !Identity::new(process.pid(), start).is_process(process);
    !(other && own_namespaces().is_ok_and(|own| own == namespaces))
}

/// Start time of a process in clock ticks since boot, and whether it has ended and only waits to be reaped.
pub fn start_time(pid: u32) -> io::Result<(u64, bool)> {
    let text = std::fs::read(format!("/proc/{pid}/stat"))?;
    // The name in parentheses may hold anything, so count fields from its end; state is field 3.
    let end = text.iter().rposition(|&byte| byte == b')').unwrap_or(text.len());
    let fields: Vec<&[u8]> = text[end..].split(u8::is_ascii_whitespace).filter(|part| !part.is_empty()).collect();
    let number = |index: usize| -> io::Result<u64> {
        let field = fields.get(index).and_then(|field| std::str::from_utf8(field).ok()?.parse().ok());
        field.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "/proc/PID/stat has another form"))
    };
    // A zombie leader with more than one thread left still has threads that run.
    let ended = matches!(fields.get(1), Some(&b"Z" | &b"X" | &b"x")) && number(18)? <= 1;
    Ok((number(20)?, ended))
}

/// Where the process ids and start times that we see have meaning: inodes of our pid and time namespaces.
///
/// # Errors
/// Without a /proc that shows the ids of our own pid namespace.
pub fn own_namespaces() -> io::Result<u64> {
    let pid = std::fs::metadata("/proc/self/ns/pid")?.ino();
    // Kernels before 5.6 have no time namespaces.
    let time = std::fs::metadata("/proc/self/ns/time").map_or(0, |meta| meta.ino());
    // One id for each namespace from that of the mount down to ours.
    let status = std::fs::read("/proc/self/status")?;
    let ids = status.split(|&byte| byte == b'\n').find_map(|line| line.strip_prefix(b"NSpid:"));
    if ids.is_some_and(|ids| ids.trim_ascii().split(u8::is_ascii_whitespace).count() > 1) {
        return Err(io::Error::other("/proc is of an outer pid namespace"));
    }
    Ok(pid << 32 | time & 0xffff_ffff)
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
