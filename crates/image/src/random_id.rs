//! Ids that no other process uses.

use crate::error::{At, Result};
use std::fs::File;
use std::io::Read;

/// 64 random bits, hexadecimal.
pub(crate) fn random_id() -> Result<String> {
    let mut bytes = [0u8; 8];
    File::open("/dev/urandom").and_then(|mut file| file.read_exact(&mut bytes)).at("/dev/urandom")?;
    Ok(format!("{:016x}", u64::from_le_bytes(bytes)))
}
