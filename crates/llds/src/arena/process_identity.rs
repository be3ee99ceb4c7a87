//! The identity of a process: process id, start time and the program it runs, packed into one word.
//!
//! A thread record names its process with such a word, so that one
//! compare-and-swap takes the record. Ids and start times only have meaning in
//! one pid namespace and one time namespace: [`own_namespaces`] names them.

use std::io;
use std::os::unix::fs::MetadataExt;

// Layout of a record's `state`: 22 bits of process id (the kernel's limit), 28 bits of start time (31 days of clock
// ticks), 12 bits that tell the programs of one process apart (one exec after the other), 2 bits of kind. 0 is free.
const KIND_BITS: u32 = 2;
const IMAGE_BITS: u32 = 12;
const START_BITS: u32 = 28;
const START_SHIFT: u32 = KIND_BITS + IMAGE_BITS;
const PID_SHIFT: u32 = START_SHIFT + START_BITS;
/// Kind: a thread of the process owns the record.
const KIND_REGISTERED: u64 = 1;
/// Kind: the named process is cleaning up after the record's dead owner.
const KIND_RECOVERING: u64 = 2;

/// A process: its id, its start time (a reused id is another process), and the program it runs.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Identity(u64);

impl Identity {
    /// Returns the identity of this process.
    ///
    /// # Errors
    /// Without a /proc that shows it.
    pub fn own() -> io::Result<Identity> {
        let pid = std::process::id();
        let (start, _) = start_time(pid)?;
        Ok(Identity(Identity::new(pid, start).0 | image() << KIND_BITS))
    }

    pub fn new(pid: u32, start: u64) -> Identity {
        Identity(u64::from(pid) << PID_SHIFT | (start & ((1 << START_BITS) - 1)) << START_SHIFT)
    }

    /// Returns the process named in a record's `state`.
    pub fn of(state: u64) -> Identity {
        Identity(state >> KIND_BITS << KIND_BITS)
    }

    pub fn pid(self) -> u32 {
        (self.0 >> PID_SHIFT) as u32
    }

    /// Whether both are one process, whatever program it runs.
    pub fn is_process(self, other: Identity) -> bool {
        self.0 >> START_SHIFT == other.0 >> START_SHIFT
    }

    pub fn registered(self) -> u64 {
        self.0 | KIND_REGISTERED
    }

    pub fn recovering(self) -> u64 {
        self.0 | KIND_RECOVERING
    }
}

/// A number that tells this program from those before and after an exec, which keeps process id and start time.
///
/// It is a hash of the random bytes that the kernel draws at each exec, so every copy of this code in the process
/// computes the same number.
fn image() -> u64 {
    // SAFETY: getauxval takes no pointer; it reads the auxiliary vector, which the kernel wrote at exec.
    let drawn = unsafe { libc::getauxval(libc::AT_RANDOM) } as *const [u8; 16];
    // SAFETY: AT_RANDOM is the address of 16 bytes that stay for the life of the process; NULL was ruled out.
    let drawn = if drawn.is_null() { [0; 16] } else { unsafe { drawn.read() } };
    let hash = drawn
        .iter()
        .fold(0xcbf2_9ce4_8422_2325, |sum: u64, &byte| (sum ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3));
    // FNV-1a mixes its low bits least, so use the high ones.
    1 + (hash >> 32) % ((1 << IMAGE_BITS) - 1)
}

/// Returns the start time of a process in clock ticks since boot, and whether it is a zombie without running threads.
pub fn start_time(pid: u32) -> io::Result<(u64, bool)> {
    let text = std::fs::read(format!("/proc/{pid}/stat"))?;
    // The name in parentheses may hold anything, so count fields from its end; state is field 3.
    let end = text.iter().rposition(|&byte| byte == b')').unwrap_or(text.len());
    let fields: Vec<&[u8]> = text[end..].split(u8::is_ascii_whitespace).filter(|part| !part.is_empty()).collect();
    let number = |index: usize| -> io::Result<u64> {
        let field = fields.get(index).and_then(|field| std::str::from_utf8(field).ok()?.parse().ok());
        field.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "/proc/PID/stat has another form"))
    };
    // A zombie leader of a process with more than one thread left still has running threads.
    let ended = matches!(fields.get(1), Some(&b"Z" | &b"X" | &b"x")) && number(18)? <= 1;
    Ok((number(20)?, ended))
}

/// Returns the inodes of our pid and time namespaces: the scope of the process ids and start times that we see.
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
