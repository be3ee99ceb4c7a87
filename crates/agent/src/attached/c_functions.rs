//! The four functions that compiled code calls by name. No C library is there to have them.

use core::ffi::c_int;

/// # Safety
/// As memcpy(3).
#[unsafe(no_mangle)]
unsafe extern "C" fn memcpy(to: *mut u8, from: *const u8, len: usize) -> *mut u8 {
    // SAFETY: the caller's, by the contract of memcpy(3). Not a loop, which the compiler would make a call of this function.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        core::arch::asm!("rep movsb", inout("rcx") len => _, inout("rdi") to => _, inout("rsi") from => _, options(nostack));
    }
    #[cfg(not(target_arch = "x86_64"))]
    for at in 0..len {
        // SAFETY: the caller's, by the contract of memcpy(3); volatile, so that the loop stays one.
        unsafe { to.add(at).write_volatile(from.add(at).read_volatile()) };
    }
    to
}

/// # Safety
/// As memmove(3).
#[unsafe(no_mangle)]
unsafe extern "C" fn memmove(to: *mut u8, from: *const u8, len: usize) -> *mut u8 {
    if (to as usize).wrapping_sub(from as usize) >= len {
        // SAFETY: the caller's, and a copy from the first byte on overwrites nothing that it still has to read.
        return unsafe { memcpy(to, from, len) };
    }
    for at in (0..len).rev() {
        // SAFETY: the caller's, by the contract of memmove(3).
        unsafe { to.add(at).write_volatile(from.add(at).read_volatile()) };
    }
    to
}

/// # Safety
/// As memset(3).
#[unsafe(no_mangle)]
unsafe extern "C" fn memset(to: *mut u8, byte: c_int, len: usize) -> *mut u8 {
    // SAFETY: the caller's, by the contract of memset(3).
    #[cfg(target_arch = "x86_64")]
    unsafe {
        core::arch::asm!("rep stosb", inout("rcx") len => _, inout("rdi") to => _, in("al") byte as u8, options(nostack));
    }
    #[cfg(not(target_arch = "x86_64"))]
    for at in 0..len {
        // SAFETY: the caller's, by the contract of memset(3).
        unsafe { to.add(at).write_volatile(byte as u8) };
    }
    to
}

/// # Safety
/// As memcmp(3).
#[unsafe(no_mangle)]
unsafe extern "C" fn memcmp(one: *const u8, other: *const u8, len: usize) -> c_int {
    let mut at = 0;
    // By words while they are equal: pages are compared with slots here.
    while at + 32 <= len {
        let mut differ = 0;
        for word in 0..4 {
            // SAFETY: the caller's, by the contract of memcmp(3); both words lie within `len`.
            let (one, other) = unsafe {
                (
                    one.add(at + 8 * word).cast::<u64>().read_unaligned(),
                    other.add(at + 8 * word).cast::<u64>().read_unaligned(),
                )
            };
            differ |= one ^ other;
        }
        if differ != 0 {
            break;
        }
        at += 32;
    }
    while at < len {
        // SAFETY: the caller's, by the contract of memcmp(3).
        let (one, other) = unsafe { (one.add(at).read_volatile(), other.add(at).read_volatile()) };
        if one != other {
            return c_int::from(one) - c_int::from(other);
        }
        at += 1;
    }
    0
}

/// # Safety
/// As bcmp(3).
#[unsafe(no_mangle)]
unsafe extern "C" fn bcmp(one: *const u8, other: *const u8, len: usize) -> c_int {
    // SAFETY: the caller's: the contract is that of memcmp(3).
    unsafe { memcmp(one, other, len) }
}
