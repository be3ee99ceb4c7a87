//! PAX headers: records of `length key=value`, and what they say about the entry after them.

use super::entry::Acls;
use super::sparse::SparseRecords;
use crate::error::{Result, input};
use crate::format::acl::Acl;
use crate::tree::{Xattrs, show, show_start};

/// What PAX headers say about the entry after them.
#[derive(Clone, Default)]
pub(super) struct Pax {
    pub(super) path: Option<Vec<u8>>,
    pub(super) linkpath: Option<Vec<u8>>,
    pub(super) size: Option<u64>,
    pub(super) uid: Option<u64>,
    pub(super) gid: Option<u64>,
    pub(super) mtime: Option<(i64, u32)>,
    pub(super) xattrs: Xattrs,
    pub(super) uname: Option<Vec<u8>>,
    pub(super) gname: Option<Vec<u8>>,
    pub(super) acls: Acls,
    pub(super) has_foreign_acl: bool,
    pub(super) sparse: SparseRecords,
}

/// Reads PAX records, `length key=value\n`, into `pax`.
pub(super) fn parse_pax(mut records: &[u8], pax: &mut Pax) -> Result<()> {
    let bad = || input!("tar: a PAX record that is not `length key=value`");
    let mut seen = std::collections::HashSet::new();
    let (mut of_libarchive, mut selinux) = (Vec::new(), None);
    while !records.is_empty() {
        let space = records.iter().take(20).position(|&byte| byte == b' ').ok_or_else(bad)?;
        let length = decimal(&records[..space]).ok_or_else(bad)? as usize;
        if length <= space + 1 || length > records.len() || records[length - 1] != b'\n' {
            return Err(bad());
        }
        let record = &records[space + 1..length - 1];
        records = &records[length..];
        let equals = record.iter().position(|&byte| byte == b'=').ok_or_else(bad)?;
        let (key, value) = (&record[..equals], &record[equals + 1..]);
        if !seen.insert(key.to_vec()) && !SparseRecords::is_repeated(key) {
            return Err(input!("tar: {} is twice in one PAX header", show(key)));
        }
        let whole = || decimal(value).ok_or_else(|| input!("tar: PAX {} {:?} is no number", show(key), show(value)));
        let named = || {
            let fits = !value.is_empty() && value.len() <= 4096 && !value.contains(&0);
            fits.then(|| value.to_vec()).ok_or_else(|| input!("tar: a PAX {} of {} bytes", show(key), value.len()))
        };
        match key {
            // POSIX: an empty value takes back what an earlier header said of it, as if the record were absent.
            b"path" if value.is_empty() => pax.path = None,
            b"linkpath" if value.is_empty() => pax.linkpath = None,
            b"size" if value.is_empty() => pax.size = None,
            b"uid" if value.is_empty() => pax.uid = None,
            b"gid" if value.is_empty() => pax.gid = None,
            b"mtime" if value.is_empty() => pax.mtime = None,
            b"uname" => pax.uname = owner(value),
            b"gname" => pax.gname = owner(value),
            b"hdrcharset" if value.is_empty() => {}
            b"path" => pax.path = Some(named()?),
            b"linkpath" => pax.linkpath = Some(named()?),
            b"size" => pax.size = Some(whole()?),
            b"uid" => pax.uid = Some(whole()?),
            b"gid" => pax.gid = Some(whole()?),
            b"mtime" => pax.mtime = Some(time(value).ok_or_else(|| input!("tar: PAX mtime {:?}", show(value)))?),
            b"hdrcharset" if value != b"BINARY" && value != b"ISO-IR 10646 2000 UTF-8" => {
                return Err(input!("tar: character set {}", show(value)));
            }
            b"SCHILY.acl.access" => pax.acls.access = acl(key, value)?,
            b"SCHILY.acl.default" => pax.acls.default = acl(key, value)?,
            b"SCHILY.acl.ace" => pax.has_foreign_acl = !value.is_empty(),
            b"RHT.security.selinux" if !value.is_empty() => selinux = Some([value, b"\0"].concat()),
            _ => {
                if let Some(key) = key.strip_prefix(b"GNU.sparse.") {
                    pax.sparse.record(key, value)?;
                } else if let Some(name) = key.strip_prefix(b"LIBARCHIVE.xattr.") {
                    let read = (percent_decoded(name), base64_decoded(value));
                    let (Some(name), Some(value)) = read else {
                        return Err(input!("tar: {} is not a percent-encoded name with a value in base64", show(key)));
                    };
                    if name.is_empty() || name.contains(&0) {
                        return Err(input!("tar: an attribute without a name"));
                    }
                    of_libarchive.push((name, value));
                } else if let Some(name) = key.strip_prefix(b"SCHILY.xattr.") {
                    if name.is_empty() || name.contains(&0) {
                        return Err(input!("tar: an attribute without a name"));
                    }
                    if pax.xattrs.insert(decode_keyword(name).into(), value.into()).is_some() {
                        return Err(input!("tar: attribute {} is twice in one PAX header", show(name)));
                    }
                }
            }
        }
    }
    // libarchive writes each attribute in both forms, unless it is told to write one: the plain one goes first.
    for (name, value) in of_libarchive {
        pax.xattrs.entry(name.into()).or_insert_with(|| value.into());
    }
    if let Some(label) = selinux {
        pax.xattrs.entry((*b"security.selinux").into()).or_insert_with(|| label.into());
    }
    Ok(())
}

/// The name of a user or group; an empty one is none, and no system has longer ones.
fn owner(name: &[u8]) -> Option<Vec<u8>> {
    (1..=256).contains(&name.len()).then(|| name.to_vec())
}

/// Reads an access control list; an empty one is none.
fn acl(key: &[u8], text: &[u8]) -> Result<Option<Acl>> {
    if text.is_empty() {
        return Ok(None);
    }
    let acl = Acl::parse(text)
        .ok_or_else(|| input!("tar: {} {:?} is no access control list", show(key), show_start(text)))?;
    Ok(Some(acl))
}

/// Decodes `%41` and the like; `None` where two hexadecimal digits are missing.
fn percent_decoded(mut text: &[u8]) -> Option<Vec<u8>> {
    let digit = |byte: u8| (byte as char).to_digit(16).map(|digit| digit as u8);
    let mut out = Vec::with_capacity(text.len());
    while let Some((&first, rest)) = text.split_first() {
        if first == b'%' {
            out.push(digit(*rest.first()?)? << 4 | digit(*rest.get(1)?)?);
            text = &rest[2..];
        } else {
            out.push(first);
            text = rest;
        }
    }
    Some(out)
}

/// Decodes base64 of the usual alphabet, with or without `=` at its end; `None` if it is not that.
fn base64_decoded(text: &[u8]) -> Option<Vec<u8>> {
    let end = text.iter().rposition(|&byte| byte != b'=').map_or(0, |last| last + 1);
    let mut out = Vec::with_capacity(end / 4 * 3 + 2);
    for group in text[..end].chunks(4) {
        let mut bits = 0u32;
        for &byte in group {
            let value = match byte {
                b'A'..=b'Z' => byte - b'A',
                b'a'..=b'z' => byte - b'a' + 26,
                b'0'..=b'9' => byte - b'0' + 52,
                b'+' => 62,
                b'/' => 63,
                _ => return None,
            };
            bits = bits << 6 | u32::from(value);
        }
        let bytes = match group.len() {
            4 => 3,
            3 => 2,
            2 => 1,
            _ => return None,
        };
        bits <<= 6 * (4 - group.len());
        out.extend(&bits.to_be_bytes()[1..=bytes]);
    }
    Some(out)
}

/// An attribute's name as a PAX keyword, which ends at its first `=`; escaped as GNU tar does.
pub(super) fn encode_keyword(name: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(name.len());
    for &byte in name {
        match byte {
            b'%' => out.extend(b"%25"),
            b'=' => out.extend(b"%3D"),
            _ => out.push(byte),
        }
    }
    out
}

/// The name that [`encode_keyword`] has written; any other `%` stands for itself.
fn decode_keyword(mut name: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(name.len());
    while let Some((&first, rest)) = name.split_first() {
        let (byte, rest) = match rest {
            [b'2', b'5', rest @ ..] if first == b'%' => (b'%', rest),
            [b'3', b'D', rest @ ..] if first == b'%' => (b'=', rest),
            _ => (first, rest),
        };
        out.push(byte);
        name = rest;
    }
    out
}

fn decimal(digits: &[u8]) -> Option<u64> {
    if digits.is_empty() {
        return None;
    }
    digits.iter().try_fold(0u64, |sum, digit| match digit {
        b'0'..=b'9' => sum.checked_mul(10)?.checked_add(u64::from(digit - b'0')),
        _ => None,
    })
}

/// Seconds and nanoseconds of a PAX time, which may be negative and may have any number of decimals.
fn time(text: &[u8]) -> Option<(i64, u32)> {
    let (negative, text) = match text.strip_prefix(b"-") {
        Some(rest) => (true, rest),
        None => (false, text),
    };
    let mut halves = text.splitn(2, |&byte| byte == b'.');
    let seconds = decimal(halves.next()?)?;
    let mut ns = 0u32;
    let decimals = halves.next().unwrap_or_default();
    for place in 0..9 {
        ns = ns * 10
            + match decimals.get(place) {
                None => 0,
                Some(digit @ b'0'..=b'9') => u32::from(digit - b'0'),
                Some(_) => return None,
            };
    }
    if decimals.iter().any(|digit| !digit.is_ascii_digit()) {
        return None;
    }
    let before = 0i64.checked_sub_unsigned(seconds);
    Some(match (negative, ns) {
        (false, _) => (i64::try_from(seconds).ok()?, ns),
        (true, 0) => (before?, 0),
        (true, _) => (before?.checked_sub(1)?, 1_000_000_000 - ns),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_of_libarchive_are_read_where_no_plain_ones_are() {
        let record = |key: &str, value: &str| {
            let body = format!(" {key}={value}\n");
            let length = (1..).find(|length: &usize| length.to_string().len() + body.len() == *length).unwrap();
            format!("{length}{body}").into_bytes()
        };
        let mut pax = Pax { uid: Some(5), ..Pax::default() };
        let mut records = record("LIBARCHIVE.xattr.user.both", "Zmlyc3Q");
        records.extend(record("SCHILY.xattr.user.both", "second"));
        records.extend(record("LIBARCHIVE.xattr.user.%41b", "AP8="));
        records.extend(record("uid", ""));
        parse_pax(&records, &mut pax).unwrap();
        let expected = [(&b"user.Ab"[..], &b"\0\xff"[..]), (b"user.both", b"second")];
        assert_eq!(pax.xattrs, expected.into_iter().map(|(name, value)| (name.into(), value.into())).collect());
        assert_eq!(pax.uid, None, "an empty value takes back an earlier one");
        for bad in ["A", "A*==", "AAAAA"] {
            assert!(parse_pax(&record("LIBARCHIVE.xattr.user.a", bad), &mut Pax::default()).is_err(), "{bad}");
        }
    }

    #[test]
    fn times_before_1970() {
        assert_eq!((decimal(&[b'0'; 30]), decimal(b"18446744073709551616"), decimal(b"")), (Some(0), None, None));
        assert_eq!(time(b"-1.5"), Some((-2, 500_000_000)));
        assert_eq!(time(b"3.0000000019"), Some((3, 1)));
        assert_eq!(time(b"1e5"), None);
        assert_eq!(time(b"-9223372036854775808"), Some((i64::MIN, 0)));
        assert_eq!((time(b"9223372036854775808"), time(b"-9223372036854775808.1")), (None, None));
    }
}
