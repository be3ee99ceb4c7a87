//! Sizes, times and shares as people write them, and back.
//!
//! `K`, `M`, `G`, `T`, `P` and `KiB` … `EiB` are powers of 1024, `kB` … `PB` powers
//! of 1000, as in the core utilities. A bare number is bytes, or seconds.

use std::time::Duration;

const SIZES: &[(&str, u64)] = &[
    ("", 1),
    ("b", 1),
    ("k", 1 << 10),
    ("kib", 1 << 10),
    ("kb", 1_000),
    ("m", 1 << 20),
    ("mib", 1 << 20),
    ("mb", 1_000_000),
    ("g", 1 << 30),
    ("gib", 1 << 30),
    ("gb", 1_000_000_000),
    ("t", 1 << 40),
    ("tib", 1 << 40),
    ("tb", 1_000_000_000_000),
    ("p", 1 << 50),
    ("pib", 1 << 50),
    ("pb", 1_000_000_000_000_000),
    ("eib", 1 << 60),
];

/// Seconds in each unit of time.
const TIMES: &[(&str, f64)] = &[
    ("", 1.0),
    ("ns", 1e-9),
    ("us", 1e-6),
    ("µs", 1e-6),
    ("ms", 1e-3),
    ("s", 1.0),
    ("sec", 1.0),
    ("m", 60.0),
    ("min", 60.0),
    ("h", 3600.0),
    ("d", 86400.0),
];

/// Splits `text` into its number and its unit in small letters.
fn number_and_unit(text: &str) -> Option<(&str, String)> {
    let text = text.trim();
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    if !number.starts_with(|c: char| c.is_ascii_digit()) {
        return None;
    }
    Some((number, unit.trim().to_lowercase()))
}

/// Parses a size such as `4096`, `512M`, `1.5GiB` and returns bytes; for clap's `value_parser`.
///
/// # Errors
/// One line that says what a size looks like.
pub fn size(text: &str) -> Result<u64, String> {
    let hint = || format!("`{text}` is no size; write 4096, 512M, 1.5GiB or 2TB");
    let (number, unit) = number_and_unit(text).ok_or_else(hint)?;
    let factor = SIZES.iter().find(|(name, _)| *name == unit).ok_or_else(hint)?.1;
    // Whole numbers keep every digit: a float would round above 2^53.
    if let Ok(whole) = number.parse::<u64>() {
        return whole.checked_mul(factor).ok_or_else(|| format!("`{text}` is more than 16 EiB"));
    }
    let bytes = number.parse::<f64>().map_err(|_| hint())? * factor as f64;
    if bytes < u64::MAX as f64 { Ok(bytes.round() as u64) } else { Err(format!("`{text}` is more than 16 EiB")) }
}

/// Parses a time such as `2`, `250ms`, `1.5m`, `1h`; for clap's `value_parser`.
///
/// # Errors
/// One line that says what a time looks like.
pub fn duration(text: &str) -> Result<Duration, String> {
    let hint = || format!("`{text}` is no time; write 2 (seconds), 250ms, 1.5m, 1h or 1d");
    let (number, unit) = number_and_unit(text).ok_or_else(hint)?;
    let factor = TIMES.iter().find(|(name, _)| *name == unit).ok_or_else(hint)?.1;
    let seconds = number.parse::<f64>().map_err(|_| hint())? * factor;
    // A hundred years: sums of times must not overflow.
    let known = Duration::try_from_secs_f64(seconds).ok().filter(|time| time.as_secs() <= 100 * 365 * 86_400);
    known.ok_or_else(|| format!("`{text}` is too long a time"))
}

/// Parses a share such as `1/16`, `6.25%`, `0.0625` and returns N of "one in N", at least 1; for clap's `value_parser`.
///
/// # Errors
/// One line that says what a share looks like.
pub fn one_in(text: &str) -> Result<u32, String> {
    let hint = || format!("`{text}` is no share; write 1/16, 6.25% or 0.0625");
    let share = if let Some((part, whole)) = text.split_once('/') {
        let part: f64 = part.trim().parse().map_err(|_| hint())?;
        part / whole.trim().parse::<f64>().map_err(|_| hint())?
    } else if let Some(percent) = text.strip_suffix('%') {
        percent.trim().parse::<f64>().map_err(|_| hint())? / 100.0
    } else {
        text.trim().parse().map_err(|_| hint())?
    };
    let one_in = (1.0 / share).round();
    if share > 0.0 && share <= 1.0 && one_in <= 1e6 { Ok(one_in as u32) } else { Err(hint()) }
}

/// Parses a process id; for clap's `value_parser`.
///
/// # Errors
/// One line that says where to get one.
pub fn pid(text: &str) -> Result<i32, String> {
    let known = text.parse().ok().filter(|pid| *pid > 0);
    known.ok_or_else(|| format!("`{text}` is no process id; pidof tells it by name"))
}

/// Shows bytes as `17 B`, `4.0 KiB`, `512 MiB`: three digits that matter.
pub fn show_size(bytes: u64) -> String {
    const NAMES: &[&str] = &["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    let mut value = bytes as f64 / 1024.0;
    let mut name = 0;
    // 1023.95 would be shown as 1024.
    while value >= 999.5 && name + 1 < NAMES.len() {
        value /= 1024.0;
        name += 1;
    }
    format!("{} {}", three_digits(value), NAMES[name])
}

/// Shows a difference in bytes, with its sign if it is below zero.
pub fn show_size_signed(bytes: i64) -> String {
    let size = show_size(bytes.unsigned_abs());
    if bytes < 0 { format!("-{size}") } else { size }
}

fn three_digits(value: f64) -> String {
    if value < 9.995 {
        format!("{value:.2}")
    } else if value < 99.95 {
        format!("{value:.1}")
    } else {
        format!("{value:.0}")
    }
}

/// Shows a number with a comma between thousands.
pub fn show_count(count: u64) -> String {
    let digits = count.to_string();
    let mut text = String::with_capacity(digits.len() + digits.len() / 3);
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// A count in at most six letters.
pub fn show_short(count: u64) -> String {
    match count {
        0..10_000 => show_count(count),
        10_000..10_000_000 => format!("{}k", show_count(count / 1000)),
        _ => format!("{}M", show_count(count / 1_000_000)),
    }
}

/// Shows how many there are of what: `1 file`, `1,024 files`.
pub fn show_counted(count: u64, one: &str, more: &str) -> String {
    format!("{} {}", show_count(count), if count == 1 { one } else { more })
}

/// Shows `part` of `whole` as a percentage; `-` of nothing.
pub fn show_percent(part: u64, whole: u64) -> String {
    if whole == 0 {
        return "-".into();
    }
    let percent = part as f64 * 100.0 / whole as f64;
    if percent > 0.0 && percent < 0.05 { "<0.1 %".into() } else { format!("{percent:.1} %") }
}

/// Shows a time as `850 ns`, `12.3 ms`, `4.2 s`, `3 m 05 s`, `2 h 10 m`, `3 d 4 h`.
pub fn show_duration(time: Duration) -> String {
    let seconds = time.as_secs_f64();
    if time.as_nanos() < 1000 {
        format!("{} ns", time.as_nanos())
    } else if seconds < 999.5e-6 {
        format!("{} us", three_digits(seconds * 1e6))
    } else if seconds < 0.9995 {
        format!("{} ms", three_digits(seconds * 1e3))
    } else if seconds < 59.95 {
        format!("{seconds:.1} s")
    } else {
        let whole = seconds.round() as u64;
        match whole {
            0..3600 => format!("{} m {:02} s", whole / 60, whole % 60),
            3600..86400 => format!("{} h {:02} m", whole / 3600, whole % 3600 / 60),
            _ => format!("{} d {} h", whole / 86400, whole % 86400 / 3600),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_is_no_more_than_one() {
        let shown = [0, 1, 2, 1024].map(|count| show_counted(count, "file", "files"));
        assert_eq!(shown, ["0 files", "1 file", "2 files", "1,024 files"]);
    }

    #[test]
    fn sizes_are_read_as_people_write_them() {
        for (text, bytes) in [
            ("0", 0),
            ("4096", 4096),
            ("512M", 512 << 20),
            ("512 MiB", 512 << 20),
            ("1.5GiB", 3 << 29),
            ("1.5g", 3 << 29),
            ("2TB", 2_000_000_000_000),
            ("10kB", 10_000),
            ("16k", 16384),
            ("18446744073709551615", u64::MAX),
        ] {
            assert_eq!(size(text), Ok(bytes), "{text}");
        }
        for text in ["", "M", "-1", "1x", "1..5M", "1e9", "16777216T", "99999999999999999999", ".5G", "1 2"] {
            assert!(size(text).is_err(), "{text}");
        }
    }

    #[test]
    fn times_are_read_as_people_write_them() {
        for (text, ms) in
            [("2", 2000), ("250ms", 250), ("1.5m", 90_000), ("1h", 3_600_000), ("0", 0), ("1 min", 60_000)]
        {
            assert_eq!(duration(text), Ok(Duration::from_millis(ms)), "{text}");
        }
        for text in ["", "s", "-1s", "1y", "1e300", "99999999999999999999999h", "40000d"] {
            assert!(duration(text).is_err(), "{text}");
        }
    }

    #[test]
    fn shares_are_read_as_people_write_them() {
        for (text, n) in [("1/16", 16), ("1", 1), ("6.25%", 16), ("0.5", 2), ("100%", 1), ("2/32", 16)] {
            assert_eq!(one_in(text), Ok(n), "{text}");
        }
        for text in ["", "0", "0/3", "3/0", "2", "150%", "-1/4", "x/y", "nan"] {
            assert!(one_in(text).is_err(), "{text}");
        }
    }

    #[test]
    fn process_ids_are_positive_numbers() {
        assert_eq!(pid("4711"), Ok(4711));
        for text in ["", "0", "-1", "abc", "99999999999"] {
            assert_eq!(pid(text), Err(format!("`{text}` is no process id; pidof tells it by name")));
        }
    }

    #[test]
    fn what_is_shown_has_three_digits_that_matter() {
        for (bytes, text) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1.00 KiB"),
            (4096, "4.00 KiB"),
            (512 << 20, "512 MiB"),
            (1000 << 20, "0.98 GiB"),
            ((1 << 30) - 1, "1.00 GiB"),
            (u64::MAX, "16.0 EiB"),
        ] {
            assert_eq!(show_size(bytes), text);
        }
        assert_eq!(show_size_signed(-4096), "-4.00 KiB");
        assert_eq!(show_size_signed(i64::MIN), "-8.00 EiB");
        assert_eq!(
            (show_count(0), show_count(999), show_count(1_234_567)),
            ("0".into(), "999".into(), "1,234,567".into())
        );
        assert_eq!(show_percent(1, 3), "33.3 %");
        assert_eq!(show_percent(1, 1_000_000), "<0.1 %");
        assert_eq!(show_percent(0, 0), "-");
    }

    #[test]
    fn times_are_shown_in_the_unit_that_fits() {
        for (nanos, text) in [
            (0, "0 ns"),
            (999, "999 ns"),
            (1500, "1.50 us"),
            (999_600, "1.00 ms"),
            (12_340_000, "12.3 ms"),
            (4_200_000_000, "4.2 s"),
            (59_960_000_000, "1 m 00 s"),
            (185_000_000_000, "3 m 05 s"),
            (7_800_000_000_000, "2 h 10 m"),
            (273_600_000_000_000, "3 d 4 h"),
        ] {
            assert_eq!(show_duration(Duration::from_nanos(nanos)), text);
        }
    }

    #[test]
    fn what_is_shown_can_be_read_back() {
        for exponent in 0..64 {
            let bytes = 1u64 << exponent;
            let back = size(&show_size(bytes)).unwrap_or(0) as f64;
            assert!((back / bytes as f64 - 1.0).abs() < 0.03, "{bytes} became {back}");
        }
    }
}
