//! Bytes from the kernel's generator.

use std::io;

/// `N` bytes, 256 at most, that no other process has.
///
/// # Errors
/// As getrandom(2).
pub fn bytes<const N: usize>() -> io::Result<[u8; N]> {
    const { assert!(N <= 256, "the kernel gives so many in one call") };
    let mut bytes = [0; N];
    // SAFETY: the kernel writes into the array, which is as long as said.
    let got = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), N, 0) };
    if got == N as isize { Ok(bytes) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    #[test]
    fn no_two_are_equal() {
        let found: std::collections::HashSet<[u8; 16]> = (0..100).map(|_| super::bytes().unwrap()).collect();
        assert_eq!(found.len(), 100);
    }
}
