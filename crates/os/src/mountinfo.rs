//! Mount tables, as proc_pid_mountinfo(5) gives them.
//!
//! They are bytes: the kernel escapes blanks in names, and leaves alone what is not UTF-8.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;

/// One mount.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mount {
    /// Device number of the file system, MAJOR:MINOR; binds of one mount share it.
    pub device: String,
    /// Where it is, as the table's process sees it.
    pub at: PathBuf,
    /// Type of the file system.
    pub kind: String,
    /// What was mounted: a device, or a name of the mounter's choice.
    pub source: PathBuf,
    /// The file system's own options, as the table has them: escaped, with commas between.
    pub options: Vec<u8>,
}

impl Mount {
    /// Whether the file system has option `name`, with or without a value.
    pub fn has_option(&self, name: &str) -> bool {
        let key = |option: &[u8]| option.split(|byte| *byte == b'=').next() == Some(name.as_bytes());
        self.options.split(|byte| *byte == b',').any(key)
    }
}

/// The mounts of a table, lowest first; lines that are none are left out.
pub fn parse(table: &[u8]) -> impl Iterator<Item = Mount> + '_ {
    table.split(|byte| *byte == b'\n').filter_map(|line| {
        // ... mount-id parent device root MOUNT-POINT options optional... - FS-TYPE source options
        let mut fields = line.split(|byte| *byte == b' ').skip(2);
        let device = String::from_utf8_lossy(fields.next()?).into_owned();
        let at = unescape(fields.nth(1)?);
        let mut behind = fields.skip(1).skip_while(|field| *field != b"-").skip(1);
        let kind = String::from_utf8_lossy(behind.next()?).into_owned();
        let source = unescape(behind.next()?);
        Some(Mount { device, at, kind, source, options: behind.next().unwrap_or_default().to_vec() })
    })
}

/// Undoes the table's octal escapes.
fn unescape(field: &[u8]) -> PathBuf {
    let (mut out, mut at) = (Vec::with_capacity(field.len()), 0);
    while at < field.len() {
        let octal = field.get(at + 1..at + 4).filter(|_| field[at] == b'\\');
        let value = octal.and_then(|digits| u8::from_str_radix(std::str::from_utf8(digits).ok()?, 8).ok());
        out.push(value.unwrap_or(field[at]));
        at += if value.is_some() { 4 } else { 1 };
    }
    OsString::from_vec(out).into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::ffi::OsStrExt;

    #[test]
    fn a_table_is_read_whatever_its_names() {
        let table = b"36 35 0:53 / /mnt/with\\040space\\134 ro shared:1 master:2 - overlay a\\040name ro,lowerdir=x\n\
            garbage\n\
            37 35 0:54 /root /caf\xe9 ro - tmpfs caf\xe9 ro\n\
            38 35 0:55 / /cut - ext4\n\
            39 35 8:1 / /plain\\0 rw - ext4 /dev/vda rw";
        let mounts: Vec<Mount> = parse(table).collect();
        assert_eq!(mounts.len(), 3, "{mounts:?}");
        let shown =
            |at: usize| (mounts[at].device.as_str(), mounts[at].at.as_os_str().as_bytes(), mounts[at].kind.as_str());
        assert_eq!(shown(0), ("0:53", &b"/mnt/with space\\"[..], "overlay"));
        assert_eq!(mounts[0].source, PathBuf::from("a name"));
        assert_eq!(shown(1), ("0:54", &b"/caf\xe9"[..], "tmpfs"));
        assert_eq!(mounts[1].source.as_os_str().as_bytes(), b"caf\xe9");
        assert!(mounts[0].has_option("lowerdir") && mounts[0].has_option("ro") && !mounts[0].has_option("lower"));
        assert_eq!(shown(2), ("8:1", &b"/plain\\0"[..], "ext4"));
    }
}
