//! Extended attributes as inodes hold them: an entry each, with a number for a common prefix of the name.

use super::on_disk::{METACOPY, PREFIXES, REDIRECT};

/// Bytes of attributes that an inode can hold: the format counts them as a 16-bit number of words.
pub(super) const XATTRS_MAX: usize = 4 * (u16::MAX as usize - 1);

/// The prefix number of `trusted.`.
pub(super) const TRUSTED: u8 = 4;

/// Added to an entry of the image's own prefix table, in place of a prefix number.
pub(super) const LONG_PREFIX: u8 = 0x80;

/// Splits an attribute's name into prefix number and rest.
pub(super) fn split_prefix(name: &[u8]) -> Option<(u8, &[u8])> {
    PREFIXES.iter().find_map(|(index, prefix)| Some((*index, name.strip_prefix(*prefix)?)))
}

/// Returns true if the format can hold this attribute.
pub(crate) fn xattr_fits(name: &[u8], value: &[u8]) -> bool {
    let exact = |index| matches!(index, 2 | 3);
    matches!(split_prefix(name), Some((index, rest)) if rest.len() < 255 && (exact(index) == rest.is_empty()))
        && value.len() <= usize::from(u16::MAX)
}

/// Appends an attribute: `name` is what follows the prefix `index`.
pub(super) fn push_xattr(out: &mut Vec<u8>, index: u8, name: &[u8], value: &[u8]) {
    out.push(name.len() as u8);
    out.push(index);
    out.extend((value.len() as u16).to_le_bytes());
    out.extend(name);
    out.extend(value);
    out.resize(out.len().next_multiple_of(4), 0);
}

/// Appends the two attributes by which overlayfs finds a file's object at `path` of the data-only layer.
pub(super) fn push_redirect(out: &mut Vec<u8>, path: &str) {
    push_xattr(out, TRUSTED, without_trusted(METACOPY), b"");
    push_xattr(out, TRUSTED, without_trusted(REDIRECT), path.as_bytes());
}

/// What follows `trusted.` in a name that begins with it.
pub(super) fn without_trusted(name: &'static [u8]) -> &'static [u8] {
    name.strip_prefix(b"trusted.").expect("callers pass names of trusted attributes")
}
