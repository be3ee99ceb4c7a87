//! Ids that no other process uses.

use crate::error::{At, Result};
use pagefold_os::random;

/// 64 random bits, hexadecimal.
pub(crate) fn random_id() -> Result<String> {
    Ok(format!("{:016x}", u64::from_le_bytes(random::bytes().at("the kernel's generator")?)))
}
