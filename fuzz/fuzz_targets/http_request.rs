//! The head of an HTTP request: whatever comes, it is taken, refused or waited for, and what is taken is within bounds.
#![no_main]

use libfuzzer_sys::fuzz_target;
use pagefold_daemon::http::{HEAD_BYTES_MAX, is_own_name, parse};

fuzz_target!(|bytes: &[u8]| {
    match parse(bytes) {
        Ok(Some(request)) => {
            assert!(bytes.len() <= HEAD_BYTES_MAX && bytes.starts_with(b"GET /"));
            assert!(request.path.starts_with('/'));
            if let Some(host) = &request.host {
                let _ = is_own_name(host);
            }
            // Nothing shorter is a request already.
            assert!(!matches!(parse(&bytes[..bytes.len() - 1]), Ok(Some(_))));
        }
        Ok(None) => assert!(bytes.len() < HEAD_BYTES_MAX),
        Err(refusal) => assert!(refusal.status.starts_with('4') || refusal.status.starts_with('5')),
    }
});
