//! An NBD client may send anything: the server answers or breaks off, and never leaves the bounds of the disk.

#![no_main]

use libfuzzer_sys::fuzz_target;
use pagefold_disk::nbd::{Disk, serve_stream};
use std::sync::Mutex;

struct Small(Mutex<Vec<u8>>);

impl Disk for Small {
    fn size(&self) -> u64 {
        10_000
    }
    fn read_only(&self) -> bool {
        false
    }
    fn read(&self, offset: u64, buffer: &mut [u8]) -> Result<(), i32> {
        buffer.copy_from_slice(&self.0.lock().unwrap()[offset as usize..][..buffer.len()]);
        Ok(())
    }
    fn write(&self, offset: u64, data: &[u8]) -> Result<(), i32> {
        self.0.lock().unwrap()[offset as usize..][..data.len()].copy_from_slice(data);
        Ok(())
    }
    fn zero(&self, offset: u64, length: u64, _hole: bool) -> Result<(), i32> {
        self.0.lock().unwrap()[offset as usize..][..length as usize].fill(0);
        Ok(())
    }
    fn flush(&self) -> Result<(), i32> {
        Ok(())
    }
    fn extent(&self, offset: u64) -> Result<(u64, bool), i32> {
        Ok((offset / 512 * 512 + 512, offset / 512 % 2 == 0))
    }
}

fuzz_target!(|data: &[u8]| {
    let Some((&mode, data)) = data.split_first() else { return };
    // Half of the runs start after a handshake, where most of the protocol is.
    let mut input = Vec::new();
    if mode % 2 == 0 {
        input.extend_from_slice(&3u32.to_be_bytes());
        if mode % 4 == 0 {
            // Structured replies, and which ranges are holes.
            for (option, data) in [(8u32, &b""[..]), (10, b"\0\0\0\0\0\0\0\x01\0\0\0\x0fbase:allocation")] {
                input.extend_from_slice(&pagefold_disk::nbd::wire::OPTION_MAGIC.to_be_bytes());
                input.extend_from_slice(&option.to_be_bytes());
                input.extend_from_slice(&(data.len() as u32).to_be_bytes());
                input.extend_from_slice(data);
            }
        }
        input.extend_from_slice(&pagefold_disk::nbd::wire::OPTION_MAGIC.to_be_bytes());
        input.extend_from_slice(&1u32.to_be_bytes());
        input.extend_from_slice(&0u32.to_be_bytes());
    }
    input.extend_from_slice(data);
    let _ = serve_stream(
        &input[..],
        std::io::sink(),
        || vec![b"a".to_vec()],
        |_| Some(Small(Mutex::new(vec![0; 10_000]))),
        0,
    );
});
