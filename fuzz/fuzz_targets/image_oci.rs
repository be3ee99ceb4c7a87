//! The JSON documents of OCI layouts and docker-archives take any bytes.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    if let Err(error) = pagefold_image::oci::parse_document(data) {
        assert!(!error.to_string().contains('\n'), "one line");
    }
});
