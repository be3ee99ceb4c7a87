//! Where the table of contents of a layer is, by the layer's annotations in the manifest.

use crate::config::Limits;
use crate::digest::Digest;
use crate::error::{Error, Result, input};
use crate::format::decompress::unpack;
use std::collections::HashMap;
use std::io::Read;

/// What the annotations' names begin with: today, and in images that containers/storage wrote until 2022.
const PREFIXES: [&str; 2] = ["io.github.containers.zstd-chunked", "io.containers.zstd-chunked"];

/// Magic and length of a zstd frame that readers skip.
const FRAME_HEAD: u64 = 8;

/// Most bytes of a table, packed and unpacked.
const TABLE_MAX: u64 = 64 << 20;

/// The place of a layer's table of contents. The manifest says it, so the manifest's digest proves it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TablePlace {
    /// Where the packed table begins in the packed layer.
    pub offset: u64,
    /// Its bytes there.
    pub packed_bytes: u64,
    /// Its bytes when unpacked.
    pub bytes: u64,
    /// The digest of the packed table.
    pub digest: Digest,
}

impl TablePlace {
    /// The table of a layer of `size` packed bytes. `None` if the annotations name none, or no digest for it, or one that
    /// cannot be.
    pub fn find(annotations: &HashMap<String, String>, size: u64) -> Option<Self> {
        let of = |prefix: &str| {
            let value = |name: &str| annotations.get(&format!("{prefix}.{name}"));
            Some((value("manifest-position")?, value("manifest-checksum")?))
        };
        let (position, checksum) = PREFIXES.iter().find_map(|prefix| of(prefix))?;
        let numbers: Option<Vec<u64>> = position.split(':').map(|number| number.parse().ok()).collect();
        let [offset, packed_bytes, bytes, 1] = numbers?[..] else { return None };
        let is_inside = offset >= FRAME_HEAD && offset.checked_add(packed_bytes)? <= size;
        if !is_inside || packed_bytes == 0 || packed_bytes.max(bytes) > TABLE_MAX {
            return None;
        }
        Some(Self { offset, packed_bytes, bytes, digest: Digest::parse(checksum).ok()? })
    }

    /// Where the frames of the archive end in the packed layer.
    pub fn archive_end(&self) -> u64 {
        self.offset - FRAME_HEAD
    }

    /// Unpacks the table, of which `packed` are the packed bytes.
    ///
    /// # Errors
    /// Another digest or size than the manifest says.
    pub fn unpack(&self, packed: &[u8], what: &str) -> Result<Vec<u8>> {
        let found = Digest::of(packed);
        if found != self.digest {
            let what = format!("{what}: its table of contents");
            return Err(Error::Digest { what, expected: self.digest.to_string(), found: found.to_string() });
        }
        let mut table = Vec::new();
        let read = unpack(packed, Limits::default())?.take(self.bytes + 1).read_to_end(&mut table);
        if read.map_err(|error| input!("{what}: its table of contents: {error}"))? as u64 != self.bytes {
            return Err(input!("{what}: its table of contents has another size than the manifest says"));
        }
        Ok(table)
    }
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
            TablePlace::find(&HashMap::from(all), 1000)
        };
        for prefix in PREFIXES {
            let place = find(prefix, "500:100:300:1", &digest).unwrap();
            assert_eq!((place.offset, place.packed_bytes, place.bytes, place.archive_end()), (500, 100, 300, 492));
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
        let alone = HashMap::from([(format!("{}.manifest-position", PREFIXES[0]), "500:100:300:1".to_string())]);
        assert_eq!(TablePlace::find(&alone, 1000), None);
    }
}
