//! The fields of a header block: text, numbers and times.

use super::entry::BLOCK;
use crate::error::{Result, input};
use crate::tree::show;

/// A field up to its first NUL.
pub(super) fn text(field: &[u8]) -> &[u8] {
    field.split(|&byte| byte == 0).next().unwrap_or_default()
}

/// The header's checksum must be right: the sum of its bytes, its own field as spaces.
pub(super) fn check_sum(header: &[u8; BLOCK]) -> Result<()> {
    let sum = |bytes: &[u8]| bytes.iter().map(|&byte| u64::from(byte)).sum::<u64>();
    let expected = sum(&header[..148]) + 8 * u64::from(b' ') + sum(&header[156..]);
    match number(&header[148..156], "checksum") {
        Ok(found) if found == expected => Ok(()),
        _ => Err(input!("tar: a header with a wrong checksum (is this a tar archive?)")),
    }
}

/// A number field: octal digits with spaces or NULs around, or base 256 when the top bit is set.
pub(super) fn number(field: &[u8], what: &str) -> Result<u64> {
    if field[0] & 0x80 != 0 {
        let (first, rest) = (field[0] & 0x7f, &field[1..]);
        let bytes = rest.iter().try_fold(u64::from(first), |sum, &byte| sum.checked_mul(256)?.checked_add(byte.into()));
        return bytes.ok_or_else(|| input!("tar: {what} is out of range"));
    }
    let digits = field.trim_ascii_start();
    let end = digits.iter().position(|byte| matches!(byte, 0 | b' ')).unwrap_or(digits.len());
    let (digits, rest) = digits.split_at(end);
    if rest.iter().any(|byte| !matches!(byte, 0 | b' ')) || digits.iter().any(|digit| !(b'0'..=b'7').contains(digit)) {
        return Err(input!("tar: {what} {} is not a number", show(field)));
    }
    digits
        .iter()
        .try_fold(0u64, |sum, digit| sum.checked_mul(8)?.checked_add(u64::from(digit - b'0')))
        .ok_or_else(|| input!("tar: {what} is out of range"))
}

/// A time field: a number, or two's complement in base 256 before 1970.
pub(super) fn mtime(field: &[u8]) -> Result<i64> {
    if field[0] & 0xc0 != 0xc0 {
        return Ok(i64::try_from(number(field, "mtime")?).unwrap_or(i64::MAX));
    }
    let (sign, value) = field.split_at(field.len() - 8);
    let value = i64::from_be_bytes(value.try_into().expect("8 bytes"));
    if value >= 0 || sign.iter().any(|&byte| byte != 0xff) {
        return Err(input!("tar: mtime is out of range"));
    }
    Ok(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_before_1970_in_a_header() {
        // 1969-06-01, as GNU tar writes it.
        assert_eq!(mtime(b"\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xe5\xdf\x00").unwrap(), -18_489_600);
        assert_eq!(mtime(b"\xff\xff\xff\xff\x80\0\0\0\0\0\0\0").unwrap(), i64::MIN);
        assert_eq!(mtime(b"\x80\0\0\0\0\0\0\0\0\0\0\x05").unwrap(), 5);
        for outside in
            [b"\xff\xff\xff\xff\x7f\xff\xff\xff\xff\xff\xff\xff", b"\xff\xff\xff\xfe\xff\xff\xff\xff\xff\xff\xff\xff"]
        {
            assert!(mtime(outside).unwrap_err().to_string().contains("out of range"));
        }
    }
}
