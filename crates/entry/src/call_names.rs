//! Names of the system calls that an agent makes, for messages.

use libc::c_long;
use std::borrow::Cow;

macro_rules! named {
    ($($name:ident => $number:ident),* $(,)?) => {
        &[$((libc::$number, stringify!($name))),*]
    };
}

/// The name of a system call, or its number.
pub(crate) fn name_of_call(number: c_long) -> Cow<'static, str> {
    let found = NAMES.iter().find(|(listed, _)| *listed == number);
    found.map_or_else(|| format!("number {number}").into(), |(_, name)| (*name).into())
}

const NAMES: &[(c_long, &str)] = named! {
    brk => SYS_brk,
    clock_gettime => SYS_clock_gettime,
    clone => SYS_clone,
    close => SYS_close,
    close_range => SYS_close_range,
    connect => SYS_connect,
    dup3 => SYS_dup3,
    exit => SYS_exit,
    fcntl => SYS_fcntl,
    fstat => SYS_fstat,
    ftruncate => SYS_ftruncate,
    futex => SYS_futex,
    getdents64 => SYS_getdents64,
    geteuid => SYS_geteuid,
    getpid => SYS_getpid,
    getrandom => SYS_getrandom,
    getrusage => SYS_getrusage,
    getsockopt => SYS_getsockopt,
    gettid => SYS_gettid,
    ioctl => SYS_ioctl,
    madvise => SYS_madvise,
    memfd_create => SYS_memfd_create,
    mmap => SYS_mmap,
    mprotect => SYS_mprotect,
    mremap => SYS_mremap,
    munmap => SYS_munmap,
    nanosleep => SYS_nanosleep,
    openat => SYS_openat,
    ppoll => SYS_ppoll,
    prctl => SYS_prctl,
    pread64 => SYS_pread64,
    preadv2 => SYS_preadv2,
    pwrite64 => SYS_pwrite64,
    read => SYS_read,
    readlinkat => SYS_readlinkat,
    recvmsg => SYS_recvmsg,
    rt_sigprocmask => SYS_rt_sigprocmask,
    sched_getaffinity => SYS_sched_getaffinity,
    sched_setaffinity => SYS_sched_setaffinity,
    sched_yield => SYS_sched_yield,
    sendmsg => SYS_sendmsg,
    set_tid_address => SYS_set_tid_address,
    setsockopt => SYS_setsockopt,
    socket => SYS_socket,
    socketpair => SYS_socketpair,
    userfaultfd => SYS_userfaultfd,
    write => SYS_write,
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_call_of_the_agent_has_a_name() {
        for number in pagefold_protocol::seccomp_filter::called_when_attached() {
            assert!(!name_of_call(number).starts_with("number"), "{number}");
        }
        assert_eq!(name_of_call(-1), "number -1");
    }
}
