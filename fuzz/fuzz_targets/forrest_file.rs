//! A file whose first page is anything is opened or refused, never followed.
#![no_main]

use forrest::Options;
use libfuzzer_sys::fuzz_target;
use std::os::unix::fs::FileExt;

fuzz_target!(|data: &[u8]| {
    let path = std::path::PathBuf::from(format!("/dev/shm/forrest-fuzz-{}", std::process::id()));
    let _ = std::fs::remove_file(&path);
    let options = Options::new().limit_bytes(1 << 20);
    drop(options.create_path(&path).expect("room in /dev/shm"));
    let file = std::fs::File::options().read(true).write(true).open(&path).expect("just made");
    // First two bytes: where to write the rest; a short tail also cuts the file.
    if let [low, high, patch @ ..] = data {
        let at = u64::from(u16::from_le_bytes([*low, *high]) % 96);
        let _ = file.write_all_at(&patch[..patch.len().min(72)], at);
        if patch.len() % 7 == 3 {
            let _ = file.set_len(u64::from(u16::from_le_bytes([*high, *low])) * 64);
        }
    }
    drop(options.open_existing_path(&path));
    let _ = std::fs::remove_file(&path);
});
