//! Our LZ4 compressor: whatever the page and the limit are, it stays inside both, and the C library reads what it wrote.

#![no_main]

#[path = "../../crates/tier/src/lz4.rs"]
mod lz4;

use pagefold_os::{PAGE_SIZE, Page};

libfuzzer_sys::fuzz_target!(|input: (u16, bool, &[u8])| {
    let (len_max, repeats, bytes) = input;
    // The rest of the page is zeros, or the same again.
    let mut page: Page = [0; PAGE_SIZE];
    for (at, byte) in page.iter_mut().enumerate() {
        *byte = match bytes.get(at) {
            Some(byte) => *byte,
            None if repeats && !bytes.is_empty() => bytes[at % bytes.len()],
            None => 0,
        };
    }
    let mut encoder = lz4::Encoder::new();
    for len_max in [usize::from(len_max), PAGE_SIZE] {
        let mut block = [0xa5; PAGE_SIZE + lz4::SLOP];
        let len = encoder.encode(&page, &mut block, len_max);
        assert!(
            block[PAGE_SIZE.min(len_max) + lz4::SLOP..].iter().all(|byte| *byte == 0xa5),
            "written behind the limit"
        );
        let Some(len) = len else { continue };
        assert!(len <= len_max);
        let mut read: Page = [0; PAGE_SIZE];
        assert!(lz4::decode(&block[..len], &mut read) && read == page, "{len} bytes are read as another page");
    }
});
