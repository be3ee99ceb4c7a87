//! Whether a seccomp filter lets the agent work.
//!
//! A filter is a small program that the kernel runs at every system call. A program that installs one does so through an
//! interposed call, so the preloaded agent runs the filter first, for each call that the agent and the interposed functions
//! make. If it allows them all, the agent stays, as under QEMU's sandbox, which forbids only calls that an emulator does not
//! need. Otherwise the agent leaves before the filter comes: the kernel may kill a process for a forbidden call.
//!
//! The filters of a program that runs already the entering process reads, and asks them the same
//! ([`judge_attached`]). The default filters of container engines allow all of it.

use core::ffi::{c_int, c_long};
use libc::sock_filter;
use pagefold_os::mem::{READ_WRITE, READ_WRITE_EXECUTE};
use pagefold_os::{maps, pagemap, uffd};

/// How the agent's threads are made.
pub const THREAD_FLAGS: i32 = libc::CLONE_VM
    | libc::CLONE_FS
    | libc::CLONE_FILES
    | libc::CLONE_SIGHAND
    | libc::CLONE_THREAD
    | libc::CLONE_SYSVSEM
    | libc::CLONE_PARENT_SETTID
    | libc::CLONE_CHILD_CLEARTID;

/// How the threads of an attached program's agent are made. QEMU's sandbox takes a clone(2) for a new process unless it has
/// all flags of the C library's threads, one for thread-local storage among them. The agent has none: the pointer to it is
/// 0.
pub const ATTACHED_THREAD_FLAGS: i32 = THREAD_FLAGS | libc::CLONE_SETTLS;

/// Most instructions that the kernel takes.
pub const INSTRUCTIONS_MAX: usize = 4096;

/// What a filter says about us.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Verdict {
    /// The agent can stay.
    pub stay: bool,
    /// It may choose its processor.
    pub follow: bool,
    /// Its thread may be started (again).
    pub start: bool,
    /// It may map memory that can be executed, and so merge such memory.
    pub execute: bool,
}

/// A system call as a filter sees it.
#[derive(Clone, Copy)]
struct Call {
    number: c_long,
    args: [u64; 6],
}

/// What filters leave the agent of an attached program, beside what it cannot do without.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Leeway {
    /// It may choose its processor.
    pub follow: bool,
    /// It may map memory that can be written and executed, and so merge such memory.
    pub execute: bool,
    /// Its code may become executable where it was written.
    pub code_in_place: bool,
    /// Its code may be mapped from a file.
    pub code_of_file: bool,
}

impl Leeway {
    /// Of a program without filters.
    pub const ALL: Leeway = Leeway { follow: true, execute: true, code_in_place: true, code_of_file: true };
}

/// Arguments that a filter cannot mean: a pointer, a length, a descriptor.
const P: u64 = 0x7f12_3456_7000;
const L: u64 = 4096;
const FD: u64 = 40;

const fn call(number: c_long, args: [u64; 6]) -> Call {
    Call { number, args }
}

const fn map(prot: c_int, flags: c_int) -> Call {
    call(libc::SYS_mmap, [P, L, prot as u64, flags as u64, FD, 0])
}

const fn advise(advice: c_int) -> Call {
    call(libc::SYS_madvise, [P, L, advice as u64, 0, 0, 0])
}

const fn futex(operation: c_int) -> Call {
    call(libc::SYS_futex, [P, operation as u64, 1, P, 0, 0])
}

const fn open(flags: c_int) -> Call {
    call(libc::SYS_openat, [libc::AT_FDCWD as u64, P, (flags | libc::O_CLOEXEC) as u64, 0, 0, 0])
}

const FIXED: c_int = libc::MAP_PRIVATE | libc::MAP_FIXED | libc::MAP_NORESERVE;

/// What is called as long as an agent is there.
const WORK: &[Call] = &[
    call(libc::SYS_ppoll, [P, 2, P, 0, 8, 0]),
    call(libc::SYS_read, [FD, P, L, 0, 0, 0]),
    call(libc::SYS_pread64, [FD, P, L, 0, 0, 0]),
    call(libc::SYS_write, [FD, P, 10, 0, 0, 0]),
    call(libc::SYS_pwrite64, [FD, P, L, 0, 0, 0]),
    call(libc::SYS_close, [FD, 0, 0, 0, 0, 0]),
    call(libc::SYS_fstat, [FD, P, 0, 0, 0, 0]),
    call(libc::SYS_getdents64, [FD, P, L, 0, 0, 0]),
    call(libc::SYS_readlinkat, [FD, P, P, L, 0, 0]),
    call(libc::SYS_fcntl, [FD, libc::F_GETFL as u64, 0, 0, 0, 0]),
    call(libc::SYS_fcntl, [FD, libc::F_GET_SEALS as u64, 0, 0, 0, 0]),
    call(libc::SYS_fcntl, [FD, libc::F_ADD_SEALS as u64, 7, 0, 0, 0]),
    call(libc::SYS_ftruncate, [FD, L, 0, 0, 0, 0]),
    call(libc::SYS_memfd_create, [P, 3, 0, 0, 0, 0]),
    open(libc::O_RDONLY),
    open(libc::O_RDWR),
    map(READ_WRITE, FIXED),
    map(READ_WRITE, FIXED | libc::MAP_ANONYMOUS),
    map(READ_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS),
    map(READ_WRITE, libc::MAP_SHARED),
    map(libc::PROT_READ, libc::MAP_SHARED),
    map(libc::PROT_NONE, FIXED | libc::MAP_ANONYMOUS),
    map(libc::PROT_NONE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE),
    call(libc::SYS_munmap, [P, L, 0, 0, 0, 0]),
    call(libc::SYS_mprotect, [P, L, READ_WRITE as u64, 0, 0, 0]),
    call(libc::SYS_mremap, [P, L, L, (libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED) as u64, P, 0]),
    call(
        libc::SYS_mremap,
        [P, L, L, (libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED | libc::MREMAP_DONTUNMAP) as u64, P, 0],
    ),
    advise(libc::MADV_DONTNEED),
    advise(libc::MADV_POPULATE_READ),
    advise(libc::MADV_POPULATE_WRITE),
    advise(libc::MADV_DONTFORK),
    advise(libc::MADV_DONTDUMP),
    advise(libc::MADV_MERGEABLE),
    advise(libc::MADV_UNMERGEABLE),
    advise(libc::MADV_HUGEPAGE),
    advise(libc::MADV_NOHUGEPAGE),
    advise(pagefold_os::mem::MADV_GUARD_INSTALL),
    futex(libc::FUTEX_WAIT),
    futex(libc::FUTEX_WAKE),
    futex(libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG),
    futex(libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG),
    call(libc::SYS_clock_gettime, [libc::CLOCK_MONOTONIC as u64, P, 0, 0, 0, 0]),
    call(libc::SYS_clock_gettime, [libc::CLOCK_THREAD_CPUTIME_ID as u64, P, 0, 0, 0, 0]),
    call(libc::SYS_sched_yield, [0; 6]),
    call(libc::SYS_rt_sigprocmask, [libc::SIG_SETMASK as u64, P, P, 8, 0, 0]),
    call(libc::SYS_sched_getaffinity, [0, 1024, P, 0, 0, 0]),
    call(libc::SYS_getpid, [0; 6]),
    call(libc::SYS_brk, [0; 6]),
    call(libc::SYS_socket, [libc::AF_UNIX as u64, (libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC) as u64, 0, 0, 0, 0]),
    call(libc::SYS_connect, [FD, P, 110, 0, 0, 0]),
    call(libc::SYS_sendmsg, [FD, P, libc::MSG_NOSIGNAL as u64, 0, 0, 0]),
    call(libc::SYS_recvmsg, [FD, P, libc::MSG_CMSG_CLOEXEC as u64, 0, 0, 0]),
    call(libc::SYS_recvmsg, [FD, P, (libc::MSG_CMSG_CLOEXEC | libc::MSG_DONTWAIT) as u64, 0, 0, 0]),
    call(libc::SYS_setsockopt, [FD, libc::SOL_SOCKET as u64, libc::SO_RCVTIMEO as u64, P, 16, 0]),
    call(libc::SYS_setsockopt, [FD, libc::SOL_SOCKET as u64, libc::SO_SNDTIMEO as u64, P, 16, 0]),
    call(libc::SYS_userfaultfd, [(libc::O_CLOEXEC | libc::O_NONBLOCK) as u64, 0, 0, 0, 0, 0]),
    call(libc::SYS_exit, [0; 6]),
];

const fn clone(flags: i32) -> Call {
    call(libc::SYS_clone, [flags as u64, P, P, P, 0, 0])
}

/// What starting the agent's thread takes, beside a clone(2).
const START: &[Call] = &[
    call(libc::SYS_close_range, [0, u32::MAX as u64, libc::CLOSE_RANGE_UNSHARE as u64, 0, 0, 0]),
    call(libc::SYS_prctl, [libc::PR_SET_NAME as u64, P, 0, 0, 0, 0]),
];

/// What merging memory that can be executed takes.
const EXECUTE: &[Call] = &[
    map(READ_WRITE_EXECUTE, FIXED),
    map(READ_WRITE_EXECUTE, FIXED | libc::MAP_ANONYMOUS),
    call(libc::SYS_mprotect, [P, L, READ_WRITE_EXECUTE as u64, 0, 0, 0]),
];

/// What the agent can do without.
const FOLLOW: Call = call(libc::SYS_sched_setaffinity, [0, 1024, P, 0, 0, 0]);

/// What the agent of an attached program, and the thread that is borrowed to start it, call beside all of the above. Of a
/// signal, with which a broken agent ends, no filter is asked.
const ATTACHED: &[Call] = &[
    call(libc::SYS_rt_sigprocmask, [libc::SIG_SETMASK as u64, P, 0, 8, 0, 0]),
    map(READ_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE | libc::MAP_NORESERVE),
    clone(ATTACHED_THREAD_FLAGS),
    call(libc::SYS_nanosleep, [P, 0, 0, 0, 0, 0]),
    call(libc::SYS_getrandom, [P, 8, 0, 0, 0, 0]),
    call(libc::SYS_prctl, [libc::PR_GET_DUMPABLE as u64, 0, 0, 0, 0, 0]),
    call(libc::SYS_socketpair, [libc::AF_UNIX as u64, (libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC) as u64, 0, P, 0, 0]),
    call(libc::SYS_getsockopt, [FD, libc::SOL_SOCKET as u64, libc::SO_PEERCRED as u64, P, P, 0]),
    call(libc::SYS_dup3, [FD, FD, libc::O_CLOEXEC as u64, 0, 0, 0]),
    call(libc::SYS_fcntl, [FD, libc::F_SETFL as u64, libc::O_NONBLOCK as u64, 0, 0, 0]),
    call(libc::SYS_preadv2, [FD, P, 1, u64::MAX, u64::MAX, libc::RWF_NOWAIT as u64]),
    call(libc::SYS_geteuid, [0; 6]),
    call(libc::SYS_gettid, [0; 6]),
    call(libc::SYS_getrusage, [libc::RUSAGE_SELF as u64, P, 0, 0, 0, 0]),
    call(libc::SYS_set_tid_address, [P, 0, 0, 0, 0, 0]),
];

/// How the agent's code becomes executable where it was written.
const CODE_IN_PLACE: Call = call(libc::SYS_mprotect, [P, L, (libc::PROT_READ | libc::PROT_EXEC) as u64, 0, 0, 0]);

/// How it becomes so where the first way is closed, as by systemd's `MemoryDenyWriteExecute`: it is mapped from a file.
const CODE_OF_FILE: &[Call] = &[
    call(libc::SYS_memfd_create, [P, (libc::MFD_CLOEXEC | MFD_EXEC) as u64, 0, 0, 0, 0]),
    call(libc::SYS_write, [FD, P, L, 0, 0, 0]),
    map(libc::PROT_READ | libc::PROT_EXEC, libc::MAP_PRIVATE | libc::MAP_FIXED),
];

/// `linux/memfd.h`, since Linux 6.3.
const MFD_EXEC: u32 = 0x10;

/// How a process makes another, with memory that an agent of its own must look after.
const FORKS: &[Call] = &[
    #[cfg(target_arch = "x86_64")]
    call(libc::SYS_fork, [0; 6]),
    call(libc::SYS_clone, [libc::SIGCHLD as u64, 0, 0, 0, 0, 0]),
    call(
        libc::SYS_clone,
        [(libc::CLONE_CHILD_SETTID | libc::CLONE_CHILD_CLEARTID | libc::SIGCHLD) as u64, 0, 0, P, P, 0],
    ),
    call(libc::SYS_clone3, [P, 88, 0, 0, 0, 0]),
];

/// The requests of our ioctl(2) calls.
fn requests() -> impl Iterator<Item = Call> {
    let requests = uffd::REQUESTS.into_iter().chain([pagemap::REQUEST, maps::REQUEST]);
    requests.map(|request| call(libc::SYS_ioctl, [FD, u64::from(request), P, 0, 0, 0]))
}

/// What a filter says; one that is not a program of the kernel's forbids everything.
pub fn judge(program: &[sock_filter]) -> Verdict {
    let allows = |call: &Call| allows(program, call);
    let start = allows(&clone(THREAD_FLAGS)) && START.iter().all(allows);
    let work = WORK.iter().all(allows) && requests().all(|call| allows(&call));
    let execute = EXECUTE.iter().all(allows);
    Verdict { stay: work && (start || !FORKS.iter().any(allows)), follow: allows(&FOLLOW), start, execute }
}

/// What `filters` leave the agent of an attached program. The agent `makes_userfaultfd` by userfaultfd(2) if the daemon has
/// no device for it.
///
/// # Errors
/// The number of the first call that one of them forbids, and that the agent cannot do without.
pub fn judge_attached(filters: &[&[sock_filter]], makes_userfaultfd: bool) -> Result<Leeway, c_long> {
    let is_made = |call: &Call| call.number != libc::SYS_userfaultfd || makes_userfaultfd;
    let is_allowed = |call: &Call| filters.iter().all(|filter| allows(filter, call));
    let needed = [WORK, START, ATTACHED].into_iter().flatten().copied().chain(requests());
    if let Some(call) = needed.filter(is_made).find(|call| !is_allowed(call)) {
        return Err(call.number);
    }
    let leeway = Leeway {
        follow: is_allowed(&FOLLOW),
        execute: EXECUTE.iter().all(is_allowed),
        code_in_place: is_allowed(&CODE_IN_PLACE),
        code_of_file: CODE_OF_FILE.iter().all(is_allowed),
    };
    if leeway.code_in_place || leeway.code_of_file { Ok(leeway) } else { Err(CODE_IN_PLACE.number) }
}

/// All calls of an attached program's agent.
fn attached_calls() -> impl Iterator<Item = Call> {
    let lists = [WORK, START, EXECUTE, &[FOLLOW, CODE_IN_PLACE], CODE_OF_FILE, ATTACHED];
    lists.into_iter().flatten().copied().chain(requests())
}

fn allows(program: &[sock_filter], call: &Call) -> bool {
    let verdict = run(program, &data_of(call)).unwrap_or(libc::SECCOMP_RET_KILL_PROCESS);
    matches!(verdict & libc::SECCOMP_RET_ACTION_FULL, libc::SECCOMP_RET_ALLOW | libc::SECCOMP_RET_LOG)
}

/// Numbers of all calls of an attached program's agent, in no order, some of them several times.
pub fn called_when_attached() -> impl Iterator<Item = c_long> {
    attached_calls().map(|call| call.number)
}

/// Numbers of the calls without which the agent does not stay, in no order, some of them several times.
pub fn needed() -> impl Iterator<Item = c_long> {
    WORK.iter().map(|call| call.number).chain([libc::SYS_ioctl])
}

#[cfg(target_arch = "x86_64")]
const ARCH: u32 = 0xc000_003e;
#[cfg(target_arch = "aarch64")]
const ARCH: u32 = 0xc000_00b7;

/// `struct seccomp_data`, in words as a filter loads them.
fn data_of(call: &Call) -> [u32; 16] {
    let mut words = [0; 16];
    words[0] = call.number as u32;
    words[1] = ARCH;
    for (pair, arg) in words[4..].chunks_exact_mut(2).zip(call.args) {
        let [low, high] = [arg as u32, (arg >> 32) as u32];
        pair.copy_from_slice(&[low, high]);
    }
    words
}

/// Runs a filter on a call: what it returns, or nothing if it is not one (bpf(4), seccomp(2)).
fn run(program: &[sock_filter], data: &[u32; 16]) -> Option<u32> {
    let (mut a, mut x) = (0u32, 0u32);
    let mut memory = [0u32; 16];
    let mut at = 0usize;
    // Jumps lead forward only, so this ends.
    loop {
        let one = program.get(at)?;
        at += 1;
        let (code, k) = (one.code, one.k);
        let operand = if code & 0x08 == 0 { k } else { x };
        let load = |memory: &[u32; 16]| match code & 0xe0 {
            0x00 => Some(k),
            0x20 if k % 4 == 0 => data.get(k as usize / 4).copied(),
            0x60 => memory.get(k as usize).copied(),
            0x80 => Some(size_of_val(data) as u32),
            _ => None,
        };
        match code & 0x07 {
            0 => a = load(&memory)?,
            1 => x = load(&memory)?,
            2 => *memory.get_mut(k as usize)? = a,
            3 => *memory.get_mut(k as usize)? = x,
            4 => {
                a = match code & 0xf0 {
                    0x00 => a.wrapping_add(operand),
                    0x10 => a.wrapping_sub(operand),
                    0x20 => a.wrapping_mul(operand),
                    0x30 => a.checked_div(operand)?,
                    0x40 => a | operand,
                    0x50 => a & operand,
                    0x60 => a.wrapping_shl(operand),
                    0x70 => a.wrapping_shr(operand),
                    0x80 => a.wrapping_neg(),
                    0xa0 => a ^ operand,
                    _ => return None,
                }
            }
            5 => {
                let taken = match code & 0xf0 {
                    0x00 => {
                        at = at.checked_add(k as usize)?;
                        continue;
                    }
                    0x10 => a == operand,
                    0x20 => a > operand,
                    0x30 => a >= operand,
                    0x40 => a & operand != 0,
                    _ => return None,
                };
                at += usize::from(if taken { one.jt } else { one.jf });
            }
            6 => return Some(if code & 0x18 == 0x10 { a } else { k }),
            _ => {
                if code & 0xf8 == 0x80 {
                    a = x;
                } else {
                    x = a;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOAD_NUMBER: sock_filter = sock_filter { code: 0x20, jt: 0, jf: 0, k: 0 };

    fn jump(code: u16, k: u32, jt: u8, jf: u8) -> sock_filter {
        sock_filter { code, jt, jf, k }
    }

    fn give(k: u32) -> sock_filter {
        sock_filter { code: 0x06, jt: 0, jf: 0, k }
    }

    const ALLOW: u32 = libc::SECCOMP_RET_ALLOW;
    const KILL: u32 = libc::SECCOMP_RET_KILL_PROCESS;
    const REFUSE: u32 = libc::SECCOMP_RET_ERRNO | 1;

    /// A filter that treats these calls in one way and all others in the other.
    fn filter(numbers: &[c_long], these: u32, others: u32) -> Vec<sock_filter> {
        let mut program = vec![LOAD_NUMBER];
        for number in numbers {
            program.extend([jump(0x15, *number as u32, 0, 1), give(these)]);
        }
        program.push(give(others));
        program
    }

    fn all_but(numbers: &[c_long]) -> Verdict {
        judge(&filter(numbers, REFUSE, ALLOW))
    }

    #[test]
    fn a_filter_that_allows_everything_changes_nothing() {
        let all = Verdict { stay: true, follow: true, start: true, execute: true };
        assert_eq!(judge(&[give(ALLOW)]), all);
        assert_eq!(judge(&[give(libc::SECCOMP_RET_LOG)]), all);
        assert_eq!(all_but(&[libc::SYS_reboot, libc::SYS_execve]), all);
    }

    #[test]
    fn each_call_that_is_needed_is_needed() {
        for number in needed() {
            for answer in [REFUSE, KILL, libc::SECCOMP_RET_TRAP, libc::SECCOMP_RET_TRACE, libc::SECCOMP_RET_USER_NOTIF]
            {
                assert!(!judge(&filter(&[number], answer, ALLOW)).stay, "{number}");
            }
        }
        let listed: Vec<c_long> = needed().collect();
        assert_eq!(
            judge(&filter(&listed, ALLOW, KILL)),
            Verdict { stay: true, follow: false, start: false, execute: true }
        );
    }

    #[test]
    fn a_filter_that_allows_forks_must_allow_an_agent_to_start() {
        let without = all_but(&[libc::SYS_sched_setaffinity]);
        assert_eq!(without, Verdict { stay: true, follow: false, start: true, execute: true });
        assert!(!all_but(&[libc::SYS_close_range]).stay);
        let no_fork: Vec<c_long> = FORKS.iter().map(|call| call.number).collect();
        assert_eq!(all_but(&no_fork), Verdict { stay: true, follow: true, start: false, execute: true });
    }

    #[test]
    fn arguments_are_looked_at() {
        // The low word of the third argument of madvise(2).
        let refuses = |advice: c_int| {
            judge(&[
                LOAD_NUMBER,
                jump(0x15, libc::SYS_madvise as u32, 0, 3),
                sock_filter { code: 0x20, jt: 0, jf: 0, k: 32 },
                jump(0x15, advice as u32, 0, 1),
                give(REFUSE),
                give(ALLOW),
            ])
        };
        assert!(!refuses(libc::MADV_POPULATE_READ).stay);
        assert!(refuses(libc::MADV_SEQUENTIAL).stay);
    }

    /// As systemd's `MemoryDenyWriteExecute`: it looks at the rights of a mapping.
    #[test]
    fn a_filter_against_code_that_can_be_written_leaves_an_agent_without_such_memory() {
        for number in [libc::SYS_mmap, libc::SYS_mprotect] {
            // The low word of the third argument, and in it the bit for execution.
            let program = [
                LOAD_NUMBER,
                jump(0x15, number as u32, 0, 3),
                sock_filter { code: 0x20, jt: 0, jf: 0, k: 32 },
                jump(0x45, libc::PROT_EXEC as u32, 0, 1),
                give(REFUSE),
                give(ALLOW),
            ];
            assert_eq!(judge(&program), Verdict { stay: true, follow: true, start: true, execute: false });
        }
    }

    /// As QEMU's sandbox and systemd's `SystemCallFilter=~@resources` are: neither lets a program choose its processors.
    #[test]
    fn an_attached_program_may_forbid_what_its_agent_can_do_without() {
        let judge = |numbers: &[c_long]| judge_attached(&[&[give(ALLOW)], &filter(numbers, KILL, ALLOW)], true);
        assert_eq!(judge(&[libc::SYS_reboot]), Ok(Leeway::ALL));
        assert_eq!(judge(&[libc::SYS_sched_setaffinity]), Ok(Leeway { follow: false, ..Leeway::ALL }));
        for needed in [libc::SYS_socketpair, libc::SYS_close_range, libc::SYS_ioctl, libc::SYS_userfaultfd] {
            assert_eq!(judge(&[needed]), Err(needed));
        }
        assert_eq!(judge_attached(&[&filter(&[libc::SYS_userfaultfd], KILL, ALLOW)], false), Ok(Leeway::ALL));
    }

    /// As systemd's `MemoryDenyWriteExecute` is: memory does not become executable, but files may be mapped so.
    #[test]
    fn an_attached_program_may_forbid_that_memory_becomes_executable() {
        // The low word of the third argument has all these bits.
        let with_rights = |number: c_long, rights: c_int| {
            vec![
                LOAD_NUMBER,
                jump(0x15, number as u32, 0, 4),
                sock_filter { code: 0x20, jt: 0, jf: 0, k: 32 },
                sock_filter { code: 0x54, jt: 0, jf: 0, k: rights as u32 },
                jump(0x15, rights as u32, 0, 1),
                give(REFUSE),
                give(ALLOW),
            ]
        };
        let protect = with_rights(libc::SYS_mprotect, libc::PROT_EXEC);
        let map_both = with_rights(libc::SYS_mmap, libc::PROT_EXEC | libc::PROT_WRITE);
        let only_of_file = Leeway { execute: false, code_in_place: false, ..Leeway::ALL };
        assert_eq!(judge_attached(&[&protect, &map_both], true), Ok(only_of_file));
        let map = with_rights(libc::SYS_mmap, libc::PROT_EXEC);
        assert_eq!(judge_attached(&[&protect, &map], true), Err(libc::SYS_mprotect));
    }

    #[test]
    fn instructions_do_what_they_say() {
        let data = data_of(&call(5, [0x1_0000_0002, 3, 0, 0, 0, 0]));
        let one = |code: u16, k: u32| sock_filter { code, jt: 0, jf: 0, k };
        let returns_a = one(0x16, 0);
        let result = |program: &[sock_filter]| {
            let mut program = program.to_vec();
            program.push(returns_a);
            run(&program, &data)
        };
        assert_eq!(result(&[one(0x20, 4)]), Some(ARCH));
        assert_eq!(result(&[one(0x20, 16)]), Some(2));
        assert_eq!(result(&[one(0x20, 20)]), Some(1));
        assert_eq!(result(&[one(0x20, 24)]), Some(3));
        assert_eq!(result(&[one(0x80, 0)]), Some(64));
        assert_eq!(result(&[one(0x20, 64)]), None);
        assert_eq!(result(&[one(0x20, 2)]), None);
        for (code, expected) in
            [(0x04, 15), (0x14, 9), (0x24, 36), (0x34, 4), (0x44, 15), (0x54, 0), (0x64, 96), (0x74, 1), (0xa4, 15)]
        {
            assert_eq!(result(&[one(0x00, 12), one(code, 3)]), Some(expected), "{code:#x}");
            // The same with the operand in the other register.
            assert_eq!(result(&[one(0x01, 3), one(0x00, 12), one(code | 8, 0)]), Some(expected), "{code:#x}");
        }
        assert_eq!(result(&[one(0x00, 1), one(0x84, 0)]), Some(u32::MAX));
        assert_eq!(result(&[one(0x00, 1), one(0x34, 0)]), None);
        // Memory, and moves between the registers.
        assert_eq!(result(&[one(0x00, 7), one(0x02, 3), one(0x00, 0), one(0x60, 3)]), Some(7));
        assert_eq!(result(&[one(0x01, 9), one(0x03, 15), one(0x60, 15)]), Some(9));
        assert_eq!(result(&[one(0x00, 7), one(0x07, 0), one(0x00, 0), one(0x87, 0)]), Some(7));
        assert_eq!(result(&[one(0x02, 16)]), None);
        assert_eq!(run(&[give(ALLOW)], &data), Some(ALLOW));
        assert_eq!(run(&[one(0x05, 7)], &data), None);
        assert_eq!(run(&[], &data), None);
        for (code, taken) in [(0x15, false), (0x25, true), (0x35, true), (0x45, true)] {
            let branch = run(&[one(0x00, 6), jump(code, 4, 1, 0), give(0), give(1)], &data);
            assert_eq!(branch, Some(u32::from(taken)), "{code:#x}");
        }
    }
}
