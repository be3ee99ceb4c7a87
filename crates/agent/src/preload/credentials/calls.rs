//! The C library's functions that take something away from a thread, and from the others that it knows.

use super::follow;
use crate::preload::active::active;
use crate::preload::c_library::{fail, next};
use core::ffi::{c_char, c_int, c_void};
use core::sync::atomic::AtomicUsize;
use pagefold_os::raw::Errno;

macro_rules! followed {
    ($($name:ident($($argument:ident: $type:ty),*);)*) => {
        #[allow(non_upper_case_globals)]
        mod cache {
            use super::AtomicUsize;
            $(pub(super) static $name: AtomicUsize = AtomicUsize::new(0);)*
        }

        /// Looks up what is called through here: later it might be in a signal handler.
        pub(in super::super) fn look_up() {
            $(next(&cache::$name, concat!(stringify!($name), "\0").as_ptr().cast(), 0);)*
        }

        $(
            /// The C library's function of this name; our threads give up what it takes away.
            ///
            /// # Safety
            /// As the C library's.
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $name($($argument: $type),*) -> c_int {
                let found = next(&cache::$name, concat!(stringify!($name), "\0").as_ptr().cast(), 0);
                if found == 0 {
                    fail(Errno(libc::ENOSYS));
                    return -1;
                }
                // SAFETY: the C library's function of this name has this type.
                let call = unsafe { core::mem::transmute::<usize, unsafe extern "C" fn($($type),*) -> c_int>(found) };
                // SAFETY: the program's own call with its own arguments, as its caller promised.
                let result = unsafe { call($($argument),*) };
                if result == 0 && active() {
                    follow();
                }
                result
            }
        )*
    };
}

followed! {
    setuid(user: libc::uid_t);
    setgid(group: libc::gid_t);
    seteuid(user: libc::uid_t);
    setegid(group: libc::gid_t);
    setreuid(real: libc::uid_t, effective: libc::uid_t);
    setregid(real: libc::gid_t, effective: libc::gid_t);
    setresuid(real: libc::uid_t, effective: libc::uid_t, saved: libc::uid_t);
    setresgid(real: libc::gid_t, effective: libc::gid_t, saved: libc::gid_t);
    setgroups(count: usize, groups: *const libc::gid_t);
    initgroups(user: *const c_char, group: libc::gid_t);
    capset(head: *mut c_void, data: *const c_void);
}
