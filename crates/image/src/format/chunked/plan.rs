//! How a layer is put together from a few ranges of its packed form and contents that the store has.

use super::table::{Content, Table};
use crate::digest::Digest;
use std::ops::Range;

/// Fewest packed bytes of a content that are left out: each content that is left out costs one more request.
const LEFT_OUT_MIN: u64 = 16 << 10;

/// Most ranges of a layer.
const RANGES_MAX: usize = 256;

/// A layer is read by parts only if at least one of so many of its packed bytes is left out.
const WORTH: u64 = 8;

/// The next bytes of an unpacked layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Piece {
    /// What these bytes of the packed layer unpack to.
    Packed(Range<u64>),
    /// An object of the store.
    Object(Digest),
}

/// How a layer is put together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// The pieces, in the order of the archive.
    pub pieces: Vec<Piece>,
    /// Contents that come from the store.
    pub contents: u64,
    /// Bytes of the packed layer that are not needed.
    pub bytes_left_out: u64,
}

impl Plan {
    /// Plans to leave out the contents of `table` that `is_known`, in the order of [`Table::contents`]. `None` if that is not
    /// worthwhile.
    pub fn new(table: &Table, is_known: &[bool]) -> Option<Self> {
        let length = |content: &&Content| content.packed.end - content.packed.start;
        let known = table.contents().iter().zip(is_known).filter(|(_, is_known)| **is_known);
        let mut left_out: Vec<&Content> =
            known.map(|(content, _)| content).filter(|content| length(content) >= LEFT_OUT_MIN).collect();
        if left_out.len() >= RANGES_MAX {
            left_out.sort_by_key(|content| std::cmp::Reverse(length(content)));
            left_out.truncate(RANGES_MAX - 1);
            left_out.sort_by_key(|content| content.packed.start);
        }
        let bytes_left_out: u64 = left_out.iter().map(length).sum();
        if bytes_left_out == 0 || bytes_left_out < table.archive_end() / WORTH {
            return None;
        }
        let (mut pieces, mut at) = (Vec::with_capacity(2 * left_out.len() + 1), 0);
        for content in &left_out {
            if content.packed.start > at {
                pieces.push(Piece::Packed(at..content.packed.start));
            }
            pieces.push(Piece::Object(content.digest));
            at = content.packed.end;
        }
        if table.archive_end() > at {
            pieces.push(Piece::Packed(at..table.archive_end()));
        }
        Some(Self { pieces, contents: left_out.len() as u64, bytes_left_out })
    }

    /// The ranges of the packed layer that are needed, in their order. They do not overlap.
    pub fn ranges(&self) -> impl Iterator<Item = &Range<u64>> {
        self.pieces.iter().filter_map(|piece| match piece {
            Piece::Packed(range) => Some(range),
            Piece::Object(_) => None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn entry(name: &str, range: Range<u64>) -> serde_json::Value {
        json!({ "type": "reg", "name": name, "size": 100_000, "digest": Digest::of(name.as_bytes()).to_string(),
            "offset": range.start, "endOffset": range.end })
    }

    fn table(entries: &[serde_json::Value], end: u64) -> crate::Result<Table> {
        Table::parse(json!({ "version": 1, "entries": entries }).to_string().as_bytes(), end)
    }

    #[test]
    fn known_contents_that_are_large_enough_are_left_out() {
        let digest = |name: &str| Digest::of(name.as_bytes());
        // In any order; what is no file, and what has no end, is left as it is.
        let entries = [
            entry("b", 120_000..200_000),
            entry("a", 100..100_000),
            entry("small", 100_200..100_900),
            json!({ "type": "dir", "name": "d", "offset": 5, "endOffset": 3 }),
            json!({ "type": "chunk", "name": "b", "offset": 150_000 }),
            json!({ "type": "reg", "name": "empty", "digest": "" }),
            json!({ "type": "reg", "name": "no end", "size": 7, "offset": 150_000 }),
        ];
        let table = table(&entries, 200_050).unwrap();
        let names: Vec<Digest> = table.contents().iter().map(|content| content.digest).collect();
        assert_eq!(names, [digest("a"), digest("small"), digest("b")]);
        let plan = Plan::new(&table, &[true; 3]).unwrap();
        let pieces = [
            Piece::Packed(0..100),
            Piece::Object(digest("a")),
            Piece::Packed(100_000..120_000),
            Piece::Object(digest("b")),
            Piece::Packed(200_000..200_050),
        ];
        assert_eq!(plan, Plan { pieces: pieces.into(), contents: 2, bytes_left_out: 179_900 });
        assert_eq!(plan.ranges().count(), 3);
        assert_eq!(Plan::new(&table, &[false, true, false]), None, "700 bytes are not worth a request");
        assert_eq!(Plan::new(&table, &[false; 3]), None);
        // Less than an eighth.
        let wide =
            Table::parse(json!({ "version": 1, "entries": [entry("a", 0..100_000)] }).to_string().as_bytes(), 800_001);
        assert!(Plan::new(&wide.unwrap(), &[true]).is_some());
        let wide =
            Table::parse(json!({ "version": 1, "entries": [entry("a", 0..99_999)] }).to_string().as_bytes(), 800_001);
        assert_eq!(Plan::new(&wide.unwrap(), &[true]), None);
    }

    #[test]
    fn only_so_many_ranges_are_asked_for() {
        // Every third one is larger.
        let entries: Vec<_> = (0..900u64)
            .map(|number| entry(&number.to_string(), number * 40_000..number * 40_000 + 20_000 + number % 3 * 1000))
            .collect();
        let table = table(&entries, 40_000_000).unwrap();
        let plan = Plan::new(&table, &[true; 900]).unwrap();
        assert_eq!(plan.contents, 255);
        assert!(plan.ranges().count() <= RANGES_MAX);
        assert_eq!(plan.bytes_left_out, 255 * 22_000);
        let mut at = 0;
        for range in plan.ranges() {
            assert!(range.start >= at && range.end > range.start);
            at = range.end;
        }
        assert_eq!(at, 40_000_000);
    }

    #[test]
    fn odd_tables_are_refused() {
        let outside = table(&[entry("a", 10..201)], 200).unwrap_err().to_string();
        assert!(outside.contains("10..201 of 200"), "{outside}");
        let overlap = table(&[entry("a", 10..101), entry("b", 100..200)], 200).unwrap_err().to_string();
        assert!(overlap.contains("overlap"), "{overlap}");
        let twice = table(&[entry("a", 10..100), entry("a", 10..100)], 200).unwrap_err().to_string();
        assert!(twice.contains("overlap"), "{twice}");
        let mut odd = [entry("a", 100..10), entry("a", 0..10), entry("a", 0..10), entry("a", 0..10)];
        odd[1]["digest"] = "sha256:0".into();
        odd[2]["offset"] = json!(-1);
        odd[3]["size"] = json!(1e300);
        for odd in odd {
            assert!(table(&[odd.clone()], 200).is_err(), "{odd}");
        }
        for document in ["", "[]", "{}", r#"{"version":2,"entries":[]}"#, r#"{"version":1}"#] {
            assert!(Table::parse(document.as_bytes(), 200).is_err(), "{document}");
        }
    }
}
