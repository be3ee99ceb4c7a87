//! What an image cannot carry, and what was left out of one.

use crate::format::{acl, erofs};
use crate::tree::{self, FileKind, Xattrs, show};
use std::collections::BTreeMap;

/// What was left out of an image, counted by reason.
#[derive(Clone, Debug, Default)]
pub struct Omissions {
    counted: BTreeMap<&'static str, (u64, String)>,
    /// Lines about layers that were known already.
    of_known: Vec<String>,
}

impl Omissions {
    /// Counts one more thing left out for `reason`; the first `example` is kept.
    pub fn add(&mut self, reason: &'static str, example: &[u8]) {
        self.counted.entry(reason).or_insert_with(|| (0, show(example))).0 += 1;
    }

    /// Takes over what was noted when known layers were unpacked.
    pub(super) fn of_known(&mut self, lines: Vec<String>) {
        self.of_known = lines;
    }

    /// One line per reason, and those of known layers.
    pub fn lines(&self) -> Vec<String> {
        let line =
            |(reason, (count, example)): (&&str, &(u64, String))| format!("{reason} ({count}; first: {example})");
        self.of_known.iter().cloned().chain(self.counted.iter().map(line)).collect()
    }
}

/// Removes the attributes that no image can carry, and counts them.
pub(super) fn clean_xattrs(xattrs: &mut Xattrs, path: &[u8], omissions: &mut Omissions) {
    for _ in 0..tree::drop_overlay_xattrs(xattrs) {
        omissions.add("attributes that steer overlayfs or EROFS were left out", path);
    }
    let size = |name: &[u8], value: &[u8]| name.len() + value.len() + 8;
    // An access control list goes before all others: its file's mode has the list's mask for the group, and without the list
    // would grant the group more.
    let mut total = xattrs.get(acl::ACCESS).map_or(0, |value| size(acl::ACCESS, value));
    xattrs.retain(|name, value| {
        if **name == *acl::ACCESS {
            return true;
        }
        // Linux reads no names longer than 255 bytes. Half of the format's space, so that the attributes that lead to an
        // object always fit.
        let size = size(name, value);
        let fits = name.len() <= 255 && erofs::xattr_fits(name, value) && total + size < 1 << 17;
        if fits {
            total += size;
        } else {
            omissions.add("attributes with a name or size that EROFS cannot hold were left out", path);
        }
        fits
    });
}

/// The reason for leaving out what [`is_whiteout`] finds.
pub(super) const WHITEOUT: &str = "character devices 0:0, overlayfs's mark of a deleted file, were left out";

/// Returns true if overlayfs would take the file for its own mark of a deleted name.
pub(super) fn is_whiteout(kind: &FileKind) -> bool {
    matches!(kind, FileKind::Char(0, 0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_attribute_that_does_not_fit_takes_no_room_from_others() {
        let mut xattrs = Xattrs::new();
        let long = |length: usize| [&b"user."[..], &vec![b'n'; length - 5]].concat();
        for (name, size) in [
            (b"user.a".to_vec(), 100_000),
            (b"user.b".to_vec(), 60_000),
            (long(255), 1),
            (long(256), 1),
            (b"user.z".to_vec(), 60_000),
            (acl::ACCESS.to_vec(), 10_000),
        ] {
            xattrs.insert(name.into(), vec![0; size].into());
        }
        let mut omissions = Omissions::default();
        clean_xattrs(&mut xattrs, b"file", &mut omissions);
        let kept: Vec<&[u8]> = xattrs.keys().map(|name| &**name).collect();
        assert_eq!(kept, [acl::ACCESS, b"user.b", &long(255), b"user.z"]);
        assert!(omissions.lines()[0].contains("cannot hold were left out (2; first: "), "{:?}", omissions.lines());
    }
}
