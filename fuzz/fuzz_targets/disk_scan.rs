//! An image of any content is looked into without a panic.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let read = |offset: u64, length: usize| {
        let from = usize::try_from(offset).ok()?;
        data.get(from..from.checked_add(length)?).map(<[u8]>::to_vec)
    };
    pagefold_disk::scan::problems(&data[..data.len().min(65536)], read);
});
