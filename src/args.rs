//! Value parsers that several commands share.

use crate::units;
use std::time::Duration;

/// The smallest memory of a cold tier: less has no room for the first pages.
const TIER_MIN_BYTES: u64 = 1 << 20;

/// A share from a percentage.
pub fn percent(text: &str) -> Result<f64, String> {
    let number: f64 = text.trim_end_matches('%').parse().map_err(|_| "a percentage, such as 1 or 0.5".to_owned())?;
    if number > 0.0 && number <= 50.0 { Ok(number / 100.0) } else { Err("more than 0 and at most 50".into()) }
}

/// A size of at least `least` bytes.
pub fn at_least(least: u64, text: &str) -> Result<u64, String> {
    let size = units::size(text)?;
    if size >= least { Ok(size) } else { Err(format!("takes at least {}", units::show_size(least))) }
}

/// The memory limit of a cold tier.
pub fn tier_max(text: &str) -> Result<u64, String> {
    at_least(TIER_MIN_BYTES, text)
}

/// A time of at least `than_ms` milliseconds.
pub fn no_shorter(than_ms: u64, text: &str) -> Result<Duration, String> {
    let time = units::duration(text)?;
    if time >= Duration::from_millis(than_ms) { Ok(time) } else { Err(format!("takes at least {than_ms}ms")) }
}

/// Refuses what cannot be the name of a domain of live memory.
pub fn domain(name: &str) -> Result<(), String> {
    if name.is_empty() || name.len() > 64 || name.chars().any(char::is_control) {
        return Err("a domain's name has 1 to 64 bytes and no control characters".into());
    }
    Ok(())
}
