//! Where the table of contents of a layer is, by the layer's annotations in the manifest.

use super::table::TableOfContents;
use crate::config::Limits;
use crate::digest::Digest;
use crate::error::{Error, Result, input};
use crate::format::decompress::unpack;
use std::collections::HashMap;
use std::io::Read;
use std::ops::Range;

/// What the annotations' names begin with: today, and in images that containers/storage wrote until 2022.
const PREFIXES: [&str; 2] = ["io.github.containers.zstd-chunked", "io.containers.zstd-chunked"];

/// Magic and length of a zstd frame that readers skip.
const FRAME_HEAD: u64 = 8;

/// Most bytes of a table, packed and unpacked.
const TABLE_MAX: u64 = 64 << 20;

/// Where a layer's table of contents is. The manifest says it, so the manifest's digest proves it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TableLocation {
    /// Where the packed table begins in the packed layer.
    pub offset: u64,
    /// Its bytes there.
    pub packed_bytes: u64,
    /// Its bytes when unpacked.
    pub bytes: u64,
    /// The digest of the packed table.
    pub digest: Digest,
    /// The packed and the unpacked bytes of the copy of the archive's headers, in the frame after the table.
    pub headers: Option<(u64, u64)>,
}

impl TableLocation {
    /// The table of a layer of `size` packed bytes. `None` if the annotations name none, or no digest for it, or one that
    /// cannot be.
    pub fn find(annotations: &HashMap<String, String>, size: u64) -> Option<Self> {
        let of = |prefix: &str| {
            let value = |name: &str| annotations.get(&format!("{prefix}.{name}"));
            Some((value("manifest-position")?, value("manifest-checksum")?, value("tarsplit-position")))
        };
        let (position, checksum, headers) = PREFIXES.iter().find_map(|prefix| of(prefix))?;
        let [offset, packed_bytes, bytes, 1] = numbers(position)?[..] else { return None };
        let is_inside = offset >= FRAME_HEAD && offset.checked_add(packed_bytes)? <= size;
        if !is_inside || packed_bytes == 0 || packed_bytes.max(bytes) > TABLE_MAX {
            return None;
        }
        let headers = headers.and_then(|headers| match numbers(headers)?[..] {
            [begin, packed, bytes] => {
                let is_next =
                    begin.checked_sub(FRAME_HEAD)? == offset + packed_bytes && begin.checked_add(packed)? <= size;
                (is_next && packed > 0 && packed.max(bytes) <= TABLE_MAX).then_some((packed, bytes))
            }
            _ => None,
        });
        Some(Self { offset, packed_bytes, bytes, digest: Digest::parse(checksum).ok()?, headers })
    }

    /// The bytes of the packed layer with the table, and the copy of the headers if there is one.
    pub fn range(&self) -> Range<u64> {
        let table_end = self.offset + self.packed_bytes;
        self.offset..self.headers.map_or(table_end, |(packed, _)| table_end + FRAME_HEAD + packed)
    }

    /// Bytes of table and headers when unpacked.
    pub fn bytes_in_all(&self) -> u64 {
        self.bytes + self.headers.map_or(0, |(_, bytes)| bytes)
    }

    /// Where the frames of the archive end in the packed layer.
    pub fn archive_end(&self) -> u64 {
        self.offset - FRAME_HEAD
    }

    /// Reads the table from `packed`, the bytes of [`TableLocation::range`].
    ///
    /// # Errors
    /// Another digest or size than the manifest says; a table that cannot be used.
    pub fn read(&self, packed: &[u8]) -> Result<TableOfContents> {
        let short = || input!("table of contents: it is cut off");
        let (table, rest) = packed.split_at_checked(self.packed_bytes as usize).ok_or_else(short)?;
        check("table of contents", table, self.digest)?;
        let mut table = TableOfContents::parse(&unpacked(table, self.bytes)?, self.archive_end())?;
        if let (Some((packed, bytes)), Some(digest)) = (self.headers, table.headers_digest()) {
            let headers = rest.get(FRAME_HEAD as usize..).filter(|headers| headers.len() as u64 == packed);
            let headers = headers.ok_or_else(short)?;
            check("copy of the headers", headers, digest)?;
            table.add_headers(&unpacked(headers, bytes)?)?;
        }
        Ok(table)
    }
}

fn numbers(text: &str) -> Option<Vec<u64>> {
    text.split(':').map(|number| number.parse().ok()).collect()
}

fn check(what: &str, bytes: &[u8], digest: Digest) -> Result<()> {
    let found = Digest::of(bytes);
    if found == digest {
        return Ok(());
    }
    Err(Error::Digest { what: what.into(), expected: digest.to_string(), found: found.to_string() })
}

/// Unpacks exactly `size` bytes.
fn unpacked(packed: &[u8], size: u64) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let read = unpack(packed, Limits::default())?.take(size + 1).read_to_end(&mut bytes);
    if read.map_err(|error| input!("table of contents: {error}"))? as u64 != size {
        return Err(input!("table of contents: it has another size than the manifest says"));
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_without_a_digest_or_outside_of_its_layer_is_none() {
        let digest = Digest::of(b"table").to_string();
        let find = |prefix: &str, position: &str, digest: &str| {
            let name = |end| format!("{prefix}.{end}");
            let all = [(name("manifest-position"), position.into()), (name("manifest-checksum"), digest.to_string())];
            TableLocation::find(&HashMap::from(all), 1000)
        };
        for prefix in PREFIXES {
            let location = find(prefix, "500:100:300:1", &digest).unwrap();
            assert_eq!(
                (location.offset, location.packed_bytes, location.bytes, location.archive_end()),
                (500, 100, 300, 492)
            );
        }
        for position in [
            "",
            "500:100:300",
            "500:100:300:2",
            "500:100:300:1:1",
            "-500:100:300:1",
            "7:100:300:1",
            "901:100:300:1",
            "500:0:300:1",
            "18446744073709551615:100:300:1",
            "500:100:99999999999:1",
        ] {
            assert_eq!(find(PREFIXES[0], position, &digest), None, "{position}");
        }
        assert_eq!(find(PREFIXES[0], "500:100:300:1", ""), None);
        assert_eq!(find(PREFIXES[0], "500:100:300:1", "sha512:00"), None);
        // The copy of the headers follows the table, or is not used.
        for (headers, found) in [
            ("608:50:70", Some((50, 70))),
            ("609:50:70", None),
            ("608:393:70", None),
            ("608:50", None),
            ("608:0:70", None),
        ] {
            let name = |end| format!("{}.{end}", PREFIXES[0]);
            let location = TableLocation::find(
                &HashMap::from([
                    (name("manifest-position"), "500:100:300:1".into()),
                    (name("manifest-checksum"), digest.clone()),
                    (name("tarsplit-position"), headers.into()),
                ]),
                1000,
            );
            assert_eq!(location.unwrap().headers, found, "{headers}");
        }
        let far = [("manifest-position", "18446744073709551500:100:9:1"), ("tarsplit-position", "0:1:1")];
        let all = far.into_iter().chain([("manifest-checksum", digest.as_str())]);
        let all = all.map(|(end, value)| (format!("{}.{end}", PREFIXES[0]), value.to_string())).collect();
        assert_eq!(TableLocation::find(&all, u64::MAX).unwrap().headers, None, "no sum is too large");
        let alone = HashMap::from([(format!("{}.manifest-position", PREFIXES[0]), "500:100:300:1".to_string())]);
        assert_eq!(TableLocation::find(&alone, 1000), None);
    }
}
