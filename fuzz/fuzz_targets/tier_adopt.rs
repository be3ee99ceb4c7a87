//! Adoption of an arena that a stranger wrote into: refused, or only stored bytes come out.

#![no_main]

#[path = "../../crates/tier/tests/common/hostile.rs"]
mod hostile;

libfuzzer_sys::fuzz_target!(|input: &[u8]| hostile::adopt_written_by(input));
