//! The calls of ptrace(2) that an entry needs, typed. Each belongs to the thread that made [`Tracer`]: the kernel knows
//! tracers by thread, and ends the tracing when that thread ends.

use std::io;
use std::marker::PhantomData;
use std::ptr;

/// Registers of a thread of the program.
pub use libc::user_regs_struct as Registers;

/// The calling thread as a tracer.
#[derive(Debug, Default)]
pub struct Tracer {
    /// Not to be sent to another thread.
    _thread: PhantomData<*const ()>,
}

/// What a traced thread reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Report {
    /// It stands still, before it handles this signal; 0 if it was merely interrupted.
    Stopped {
        /// To be passed on when it goes on.
        signal: i32,
        /// The whole program is stopped, as by SIGSTOP.
        group: bool,
    },
    /// It has ended.
    Ended,
}

fn call(request: libc::c_uint, thread: i32, address: usize, data: usize) -> io::Result<i64> {
    // SAFETY: the requests of this module write only where `data` or `address` points, which their callers own.
    let result = unsafe { libc::ptrace(request as _, thread, address, data) };
    if result == -1 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

impl Tracer {
    /// True if this process may call ptrace(2) at all: a seccomp filter of its own may forbid that.
    pub fn is_allowed() -> bool {
        // There is no thread 0.
        let refused = call(libc::PTRACE_DETACH, 0, 0, 0).err();
        refused.and_then(|error| error.raw_os_error()) == Some(libc::ESRCH)
    }

    /// Begins to trace `thread`, which goes on running.
    ///
    /// # Errors
    /// `EPERM` if it is another tracer's or this process may not; `ESRCH` if it has ended.
    pub fn seize(&self, thread: i32) -> io::Result<()> {
        call(libc::PTRACE_SEIZE, thread, 0, 0).map(drop)
    }

    /// Suspends the seccomp filters of `thread`, which stands still, until [`resume_filters`](Self::resume_filters) or the
    /// end of the tracing; reports of its calls are told from signals meanwhile.
    ///
    /// # Errors
    /// `EPERM` without `CAP_SYS_ADMIN`, or if this thread has a filter itself; `EINVAL` if the kernel cannot.
    pub fn suspend_filters(&self, thread: i32) -> io::Result<()> {
        const SUSPEND_SECCOMP: i32 = 1 << 21;
        call(libc::PTRACE_SETOPTIONS, thread, 0, (SUSPEND_SECCOMP | libc::PTRACE_O_TRACESYSGOOD) as usize).map(drop)
    }

    /// The filters of `thread`, which stands still, are in force again.
    ///
    /// # Errors
    /// `ESRCH` if it has ended.
    pub fn resume_filters(&self, thread: i32) -> io::Result<()> {
        call(libc::PTRACE_SETOPTIONS, thread, 0, 0).map(drop)
    }

    /// The seccomp filters of `thread`, which stands still; the newest first.
    ///
    /// # Errors
    /// `EACCES` without `CAP_SYS_ADMIN`, or if this thread has a filter itself; `EINVAL` in the strict mode.
    pub fn filters(&self, thread: i32) -> io::Result<Vec<Vec<libc::sock_filter>>> {
        const SECCOMP_GET_FILTER: libc::c_uint = 0x420c;
        let mut filters = Vec::new();
        loop {
            let count = match call(SECCOMP_GET_FILTER, thread, filters.len(), 0) {
                Ok(count) => count as usize,
                Err(error) if error.raw_os_error() == Some(libc::ENOENT) => return Ok(filters),
                Err(error) => return Err(error),
            };
            let mut program = vec![libc::sock_filter { code: 0, jt: 0, jf: 0, k: 0 }; count];
            call(SECCOMP_GET_FILTER, thread, filters.len(), program.as_mut_ptr() as usize)?;
            filters.push(program);
        }
    }

    /// Lets `thread`, which stands still, run to the beginning or the end of its next system call, where it reports
    /// [`IN_CALL`](Self::IN_CALL) as its signal.
    ///
    /// # Errors
    /// `ESRCH` if it has ended.
    pub fn run_to_call(&self, thread: i32) -> io::Result<()> {
        call(libc::PTRACE_SYSCALL, thread, 0, 0).map(drop)
    }

    /// See [`run_to_call`](Self::run_to_call).
    pub const IN_CALL: i32 = libc::SIGTRAP | 0x80;

    /// Asks `thread` to stand still as soon as it is about to run code of the program's.
    ///
    /// # Errors
    /// `ESRCH` if it has ended.
    pub fn interrupt(&self, thread: i32) -> io::Result<()> {
        call(libc::PTRACE_INTERRUPT, thread, 0, 0).map(drop)
    }

    /// What the next traced thread reports, of all (-1) or of `thread`; `None` if there is nothing now.
    ///
    /// # Errors
    /// `ECHILD` if there is no traced thread left.
    pub fn poll(&self, thread: i32) -> io::Result<Option<(i32, Report)>> {
        let mut status = 0;
        // SAFETY: the kernel writes one number.
        let got = unsafe { libc::waitpid(thread, &mut status, libc::__WALL | libc::__WNOTHREAD | libc::WNOHANG) };
        match got {
            0 => Ok(None),
            -1 => Err(io::Error::last_os_error()),
            thread if libc::WIFSTOPPED(status) => {
                let (signal, event) = (libc::WSTOPSIG(status), status >> 16);
                let group = event == libc::PTRACE_EVENT_STOP && signal != libc::SIGTRAP;
                let signal = if event == 0 { signal } else { 0 };
                Ok(Some((thread, Report::Stopped { signal, group })))
            }
            thread => Ok(Some((thread, Report::Ended))),
        }
    }

    /// The registers of `thread`, which stands still.
    ///
    /// # Errors
    /// `ESRCH` if it does not stand still.
    pub fn registers(&self, thread: i32) -> io::Result<Registers> {
        // SAFETY: all-zero is a valid structure of numbers.
        let mut registers: Registers = unsafe { std::mem::zeroed() };
        let mut part = libc::iovec { iov_base: (&raw mut registers).cast(), iov_len: size_of::<Registers>() };
        call(libc::PTRACE_GETREGSET, thread, libc::NT_PRSTATUS as usize, (&raw mut part) as usize)?;
        if part.iov_len == size_of::<Registers>() {
            Ok(registers)
        } else {
            // A thread in 32-bit mode has fewer.
            Err(io::Error::from_raw_os_error(libc::ENOEXEC))
        }
    }

    /// Sets the registers of `thread`, which stands still.
    ///
    /// # Errors
    /// `ESRCH` if it does not stand still.
    pub fn set_registers(&self, thread: i32, registers: &Registers) -> io::Result<()> {
        let mut part =
            libc::iovec { iov_base: ptr::from_ref(registers).cast_mut().cast(), iov_len: size_of::<Registers>() };
        call(libc::PTRACE_SETREGSET, thread, libc::NT_PRSTATUS as usize, (&raw mut part) as usize).map(drop)
    }

    /// The signals that `thread` lets wait, signal 1 in bit 0.
    ///
    /// # Errors
    /// `ESRCH` if it does not stand still.
    pub fn signal_mask(&self, thread: i32) -> io::Result<u64> {
        let mut mask = 0u64;
        call(libc::PTRACE_GETSIGMASK, thread, size_of::<u64>(), (&raw mut mask) as usize)?;
        Ok(mask)
    }

    /// Writes `bytes`, whole words, at address `at` of the memory of `thread`, which stands still; also where the program
    /// may only read: it gets a page of its own there. Kernels that forbid such writes through /proc/PID/mem allow them to a
    /// tracer.
    ///
    /// # Errors
    /// `EIO` if part of it is not mapped, `ESRCH` if the thread does not stand still.
    pub fn write(&self, thread: i32, at: u64, bytes: &[u8]) -> io::Result<()> {
        for (index, word) in bytes.chunks_exact(8).enumerate() {
            let value = word.iter().rev().fold(0usize, |all, byte| all << 8 | usize::from(*byte));
            call(libc::PTRACE_POKEDATA, thread, at as usize + 8 * index, value)?;
        }
        Ok(())
    }

    /// Lets `thread`, which stands still, go on untraced, to handle `signal` first unless that is 0.
    ///
    /// # Errors
    /// `ESRCH` if it has ended.
    pub fn detach(&self, thread: i32, signal: i32) -> io::Result<()> {
        call(libc::PTRACE_DETACH, thread, 0, signal as usize).map(drop)
    }
}
