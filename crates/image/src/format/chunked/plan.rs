//! How a layer is put together from a few ranges of its packed form and contents that the store has.

use super::headers::ArchivePart;
use super::table::{Content, TableOfContents};
use crate::digest::Digest;
use std::collections::HashSet;
use std::ops::Range;

/// Fewest bytes between two ranges: fewer come with them, for a request takes longer.
const GAP_MIN: u64 = 16 << 10;

/// Most ranges of a layer.
const RANGES_MAX: usize = 256;

/// A layer is read in parts only if at least one of so many of its packed bytes is left out.
const WORTH: u64 = 8;

/// The next bytes of an unpacked layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Part {
    /// What these bytes of the packed layer unpack to.
    Packed(Range<u64>),
    /// An object of the store.
    Object(Digest),
    /// These.
    Bytes(Vec<u8>),
}

/// How a layer is put together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// The parts, in the order of the archive.
    pub parts: Vec<Part>,
    /// The ranges of the packed layer that hold all packed parts, in their order. They do not overlap.
    pub ranges: Vec<Range<u64>>,
    /// Contents that come from the store.
    pub contents: u64,
    /// Bytes of the packed layer that are not needed.
    pub bytes_left_out: u64,
}

impl Plan {
    /// Plans to take the contents of `table` that `is_known` from the store, in the order of
    /// [`TableOfContents::contents`]. `None` if that is not worthwhile.
    pub fn new(table: TableOfContents, is_known: &[bool]) -> Option<Self> {
        let TableOfContents { contents, archive_end, archive_parts, .. } = table;
        let mut parts = Vec::new();
        let content = |(content, is_known): (Content, &bool)| match is_known {
            true => Part::Object(content.digest),
            false => Part::Packed(content.packed),
        };
        let mut contents = contents.into_iter().zip(is_known);
        if let Some(archive_parts) = archive_parts {
            for archive_part in archive_parts {
                match archive_part {
                    ArchivePart::Bytes(bytes) => push(&mut parts, Part::Bytes(bytes)),
                    ArchivePart::Content => push(&mut parts, content(contents.next()?)),
                }
            }
        } else {
            let mut at = 0;
            for next in contents {
                let Range { start, end } = next.0.packed;
                push(&mut parts, Part::Packed(at..start));
                push(&mut parts, content(next));
                at = end;
            }
            push(&mut parts, Part::Packed(at..archive_end));
        }
        let ranges = ranges(&parts);
        let bytes_left_out = archive_end - ranges.iter().map(|range| range.end - range.start).sum::<u64>();
        let contents = parts.iter().filter(|part| matches!(part, Part::Object(_))).count() as u64;
        let is_worthwhile = contents > 0 && bytes_left_out > 0 && bytes_left_out >= archive_end / WORTH;
        is_worthwhile.then_some(Self { parts, ranges, contents, bytes_left_out })
    }
}

/// Adds a part, to the one before it where frames follow each other.
fn push(parts: &mut Vec<Part>, part: Part) {
    match (parts.last_mut(), part) {
        (_, Part::Packed(next)) if next.is_empty() => {}
        (Some(Part::Packed(last)), Part::Packed(next)) if last.end == next.start => last.end = next.end,
        (_, part) => parts.push(part),
    }
}

/// The ranges that hold all packed parts: they end where the largest gaps are.
fn ranges(parts: &[Part]) -> Vec<Range<u64>> {
    let packed = || {
        parts.iter().filter_map(|part| match part {
            Part::Packed(range) => Some(range),
            _ => None,
        })
    };
    // Each gap that is large enough, with its end.
    let mut gaps: Vec<(u64, u64)> =
        packed().zip(packed().skip(1)).map(|(one, next)| (next.start - one.end, next.start)).collect();
    gaps.retain(|(gap, _)| *gap >= GAP_MIN);
    gaps.sort_unstable_by_key(|&gap| std::cmp::Reverse(gap));
    let begins: HashSet<u64> = gaps.into_iter().take(RANGES_MAX - 1).map(|(_, begin)| begin).collect();
    let mut ranges: Vec<Range<u64>> = Vec::new();
    for range in packed() {
        match ranges.last_mut() {
            Some(last) if !begins.contains(&range.start) => last.end = range.end,
            _ => ranges.push(range.clone()),
        }
    }
    ranges
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn entry(name: &str, range: Range<u64>) -> serde_json::Value {
        json!({ "type": "reg", "name": name, "size": 100_000, "digest": Digest::of(name.as_bytes()).to_string(),
            "offset": range.start, "endOffset": range.end })
    }

    fn table(entries: &[serde_json::Value], end: u64) -> crate::Result<TableOfContents> {
        TableOfContents::parse(json!({ "version": 1, "entries": entries }).to_string().as_bytes(), end)
    }

    fn digest(name: &str) -> Digest {
        Digest::of(name.as_bytes())
    }

    /// Two large contents, and a small one between them.
    fn three() -> TableOfContents {
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
        table(&entries, 200_050).unwrap()
    }

    #[test]
    fn known_contents_are_left_out() {
        let names: Vec<Digest> = three().contents().iter().map(|content| content.digest).collect();
        assert_eq!(names, [digest("a"), digest("small"), digest("b")]);
        let plan = Plan::new(three(), &[true; 3]).unwrap();
        let parts = [
            Part::Packed(0..100),
            Part::Object(digest("a")),
            Part::Packed(100_000..100_200),
            Part::Object(digest("small")),
            Part::Packed(100_900..120_000),
            Part::Object(digest("b")),
            Part::Packed(200_000..200_050),
        ];
        // The small content comes with the headers around it.
        let ranges = vec![0..100, 100_000..120_000, 200_000..200_050];
        assert_eq!(plan, Plan { parts: parts.into(), ranges, contents: 3, bytes_left_out: 179_900 });
        let plan = Plan::new(three(), &[true, false, false]).unwrap();
        let parts = [Part::Packed(0..100), Part::Object(digest("a")), Part::Packed(100_000..200_050)];
        assert_eq!((&plan.parts[..], plan.contents), (&parts[..], 1));
        assert_eq!(Plan::new(three(), &[false, true, false]), None, "700 bytes are not worth a request");
        assert_eq!(Plan::new(three(), &[false; 3]), None);
    }

    #[test]
    fn with_a_copy_of_the_headers_only_unknown_contents_are_fetched() {
        let text = r#"{"type":2,"payload":"b25l"} {"type":1,"size":100000} {"type":2,"payload":"dHdv"}
            {"type":1,"size":100000} {"type":1,"size":100000} {"type":2,"payload":"ZW5k"}"#;
        let with_headers = || {
            let mut table = three();
            table.add_headers(text.as_bytes()).unwrap();
            table
        };
        let plan = Plan::new(with_headers(), &[true, false, true]).unwrap();
        let bytes = |text: &[u8]| Part::Bytes(text.to_vec());
        let (a, small, b) = (Part::Object(digest("a")), Part::Packed(100_200..100_900), Part::Object(digest("b")));
        assert_eq!(plan.parts, [bytes(b"one"), a, bytes(b"two"), small, b, bytes(b"end")]);
        assert_eq!((plan.ranges.len(), &plan.ranges[0], plan.bytes_left_out), (1, &(100_200..100_900), 199_350));
        let all = Plan::new(with_headers(), &[true; 3]).unwrap();
        assert_eq!((all.ranges.len(), all.bytes_left_out), (0, 200_050));
        assert_eq!(Plan::new(with_headers(), &[false; 3]), None);
    }

    #[test]
    fn less_than_an_eighth_is_not_worthwhile() {
        for (end, is_worthwhile) in [(100_000, true), (99_999, false)] {
            let table = table(&[entry("a", 0..end)], 800_001).unwrap();
            assert_eq!(Plan::new(table, &[true]).is_some(), is_worthwhile);
        }
    }

    #[test]
    fn only_so_many_ranges_are_asked_for() {
        // Many of them are equal.
        let sizes = |number: u64| 20_000 + number / 400 * 5_000;
        let entries: Vec<_> = (0..900)
            .map(|number| entry(&number.to_string(), number * 40_000..number * 40_000 + sizes(number)))
            .collect();
        let plan = Plan::new(table(&entries, 40_000_000).unwrap(), &[true; 900]).unwrap();
        assert_eq!(plan.contents, 900);
        // The largest gaps are left out, and what is before the first range.
        assert_eq!(plan.ranges.len(), RANGES_MAX);
        assert_eq!(plan.bytes_left_out, sizes(0) + 100 * sizes(800) + 155 * sizes(400));
        assert!(plan.ranges.windows(2).all(|pair| pair[0].end + GAP_MIN <= pair[1].start));
        let packed = plan.parts.iter().filter_map(|part| match part {
            Part::Packed(range) => Some(range),
            _ => None,
        });
        for part in packed {
            assert!(plan.ranges.iter().any(|range| range.start <= part.start && part.end <= range.end));
        }
    }

    #[test]
    fn odd_tables_are_refused() {
        let outside = table(&[entry("a", 10..201)], 200).unwrap_err().to_string();
        assert!(outside.contains("10..201 of 200"), "{outside}");
        let overlap = table(&[entry("a", 10..101), entry("b", 100..200)], 200).unwrap_err().to_string();
        assert!(overlap.contains("overlap"), "{overlap}");
        let twice = table(&[entry("a", 10..100), entry("a", 10..100)], 200).unwrap_err().to_string();
        assert!(twice.contains("overlap"), "{twice}");
        let mut odd = [(); 4].map(|()| entry("a", 0..10));
        odd[0]["offset"] = json!(11);
        odd[1]["digest"] = "sha256:0".into();
        odd[2]["offset"] = json!(-1);
        odd[3]["size"] = json!(1e300);
        for odd in odd {
            assert!(table(std::slice::from_ref(&odd), 200).is_err(), "{odd}");
        }
        for document in ["", "[]", "{}", r#"{"version":2,"entries":[]}"#, r#"{"version":1}"#] {
            assert!(TableOfContents::parse(document.as_bytes(), 200).is_err(), "{document}");
        }
    }
}
