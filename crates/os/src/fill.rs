//! Reads that go on until the buffer is full: one call may give less than there is.

use std::io;

/// Fills `buffer` by `read`, which gets what is left of it and how many bytes there are already. Returns how many bytes
/// there are in the end: fewer than the buffer holds only where `read` has returned 0. Interrupted calls are made again.
///
/// # Errors
/// Those of `read`.
pub fn fill(buffer: &mut [u8], mut read: impl FnMut(&mut [u8], usize) -> io::Result<usize>) -> io::Result<usize> {
    let mut filled = 0;
    while filled < buffer.len() {
        match read(&mut buffer[filled..], filled) {
            Ok(0) => break,
            Ok(count) => filled += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(filled)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_is_filled_to_its_end_or_to_the_last_byte() {
        for (there, room, expected) in [(0, 7, 0), (5, 7, 5), (7, 7, 7), (9, 7, 7), (9, 0, 0)] {
            let source: Vec<u8> = (1..=there).collect();
            let mut buffer = vec![0; room];
            let mut calls = 0;
            // Every second call is interrupted; the others give two bytes.
            let filled = fill(&mut buffer, |rest, filled| {
                calls += 1;
                if calls % 2 == 0 {
                    return Err(io::ErrorKind::Interrupted.into());
                }
                let count = rest.len().min(2).min(source.len() - filled);
                rest[..count].copy_from_slice(&source[filled..filled + count]);
                Ok(count)
            });
            assert_eq!(filled.unwrap(), expected);
            assert_eq!(buffer[..expected], source[..expected]);
        }
        let broken = fill(&mut [0; 3], |_, filled| if filled == 0 { Ok(1) } else { Err(io::ErrorKind::Other.into()) });
        assert_eq!(broken.unwrap_err().kind(), io::ErrorKind::Other);
    }
}
