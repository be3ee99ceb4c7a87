//! The headers of an entry, as this program writes them.

use super::entry::{ArchiveEntry, BLOCK, EntryKind};
use super::pax::encode_keyword;
use super::sparse::{Part, write_map};

/// Writes one entry's headers, PAX where ustar's fields are too small; the caller appends the data and [`pad`]s it.
pub(crate) fn write_header(out: &mut Vec<u8>, entry: &ArchiveEntry) {
    write(out, entry, None);
}

/// Writes the headers and the map of a sparse file of which the archive has `parts`, in the form 1.0 of GNU tar; the caller
/// appends them, without what is between, and [`pad`]s them.
pub(crate) fn write_sparse_header(out: &mut Vec<u8>, entry: &ArchiveEntry, parts: &[Part]) {
    let map = write_map(parts);
    let stored = map.len() as u64 + parts.iter().map(|(_, length)| length).sum::<u64>();
    write(out, entry, Some(stored));
    out.extend(map);
}

/// Writes the headers; of a sparse file the archive has the `sparse` bytes that follow.
fn write(out: &mut Vec<u8>, entry: &ArchiveEntry, sparse: Option<u64>) {
    let mut records = Vec::new();
    let mut record = |key: &[u8], value: &[u8]| {
        let rest = key.len() + value.len() + 3;
        let mut length = rest + 1;
        while length.to_string().len() + rest > length {
            length += 1;
        }
        records.extend(length.to_string().bytes());
        records.push(b' ');
        records.extend(key);
        records.push(b'=');
        records.extend(value);
        records.push(b'\n');
    };
    let (kind, size, link, device): (u8, u64, &[u8], (u32, u32)) = match &entry.kind {
        EntryKind::File(size) => (b'0', *size, b"", (0, 0)),
        EntryKind::HardLink(target) => (b'1', 0, target, (0, 0)),
        EntryKind::Symlink(target) => (b'2', 0, target, (0, 0)),
        EntryKind::Char(major, minor) => (b'3', 0, b"", (*major, *minor)),
        EntryKind::Block(major, minor) => (b'4', 0, b"", (*major, *minor)),
        EntryKind::Dir => (b'5', 0, b"", (0, 0)),
        EntryKind::Fifo => (b'6', 0, b"", (0, 0)),
    };
    let (mut path, mut stored) = (entry.path.clone(), size);
    if let Some(bytes) = sparse {
        for (key, value) in [("major", "1"), ("minor", "0"), ("realsize", &size.to_string())] {
            record(&[b"GNU.sparse.", key.as_bytes()].concat(), value.as_bytes());
        }
        record(b"GNU.sparse.name", &entry.path);
        // What readers that know no sparse files find: a directory beside the file.
        let name = path.iter().rposition(|&byte| byte == b'/').map_or(0, |slash| slash + 1);
        path.splice(name..name, *b"GNUSparseFile.0/");
        stored = bytes;
    }
    if path.len() > 100 {
        record(b"path", &path);
    }
    if link.len() > 100 {
        record(b"linkpath", link);
    }
    if stored > 0o77_777_777_777 {
        record(b"size", stored.to_string().as_bytes());
    }
    if entry.meta.uid > 0o7_777_777 {
        record(b"uid", entry.meta.uid.to_string().as_bytes());
    }
    if entry.meta.gid > 0o7_777_777 {
        record(b"gid", entry.meta.gid.to_string().as_bytes());
    }
    if entry.meta.mtime_s < 0 || entry.meta.mtime_ns != 0 || entry.meta.mtime_s > 0o77_777_777_777 {
        let value = match (entry.meta.mtime_s, entry.meta.mtime_ns) {
            (seconds, 0) => seconds.to_string(),
            (seconds, ns) if seconds >= 0 => format!("{seconds}.{ns:09}"),
            (seconds, ns) => format!("-{}.{:09}", (seconds + 1).unsigned_abs(), 1_000_000_000 - ns),
        };
        record(b"mtime", value.as_bytes());
    }
    // As text for archivers, and as attributes, as container engines write and read them.
    for (key, list) in [(&b"SCHILY.acl.access"[..], &entry.acls.access), (b"SCHILY.acl.default", &entry.acls.default)] {
        if let Some(list) = list {
            record(key, &list.text());
        }
    }
    for (name, value) in &entry.meta.xattrs {
        record(&[b"SCHILY.xattr.", &encode_keyword(name)[..]].concat(), value);
    }
    if !records.is_empty() {
        out.extend(header_block(entry, b"pax", b'x', records.len() as u64, b"", device));
        out.extend(&records);
        pad(out, records.len() as u64);
    }
    out.extend(header_block(entry, &path, kind, stored, link, device));
}

/// One header block, with the mode, owner and time of `entry`.
fn header_block(
    entry: &ArchiveEntry,
    path: &[u8],
    kind: u8,
    size: u64,
    link: &[u8],
    device: (u32, u32),
) -> [u8; BLOCK] {
    let mut block = [0u8; BLOCK];
    let octal = |block: &mut [u8; BLOCK], at: usize, width: usize, value: u64| {
        let most = (1u64 << (3 * (width - 1))) - 1;
        let digits = format!("{:0width$o}", if value > most { 0 } else { value }, width = width - 1);
        block[at..at + digits.len()].copy_from_slice(digits.as_bytes());
    };
    let count = path.len().min(100);
    block[..count].copy_from_slice(&path[..count]);
    octal(&mut block, 100, 8, entry.meta.mode.into());
    octal(&mut block, 108, 8, entry.meta.uid.into());
    octal(&mut block, 116, 8, entry.meta.gid.into());
    octal(&mut block, 124, 12, size);
    octal(&mut block, 136, 12, entry.meta.mtime_s.max(0) as u64);
    block[156] = kind;
    let count = link.len().min(100);
    block[157..157 + count].copy_from_slice(&link[..count]);
    block[257..265].copy_from_slice(b"ustar\x0000");
    octal(&mut block, 329, 8, device.0.into());
    octal(&mut block, 337, 8, device.1.into());
    block[148..156].fill(b' ');
    let sum: u64 = block.iter().map(|&byte| u64::from(byte)).sum();
    let digits = format!("{sum:06o}\0 ");
    block[148..156].copy_from_slice(digits.as_bytes());
    block
}

/// Fills up to a whole block after `size` bytes of data.
pub(crate) fn pad(out: &mut Vec<u8>, size: u64) {
    out.resize(out.len() + (BLOCK - size as usize % BLOCK) % BLOCK, 0);
}
