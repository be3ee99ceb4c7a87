//! Tables of contents of layers take any bytes, and so do copies of headers behind them. Every plan asks for ranges of the
//! layer in their order, and has a range for each packed piece.

#![no_main]

use libfuzzer_sys::fuzz_target;
use pagefold_image::oci::{Part, Plan, TableOfContents, TableLocation};
use std::collections::HashMap;

/// The size of the packed layer. Small, so that offsets in the input meet its end.
const END: u64 = 100_000;

fuzz_target!(|data: &[u8]| {
    let Some((&known, data)) = data.split_first() else { return };
    let (table, headers) = match data.iter().position(|&byte| byte == 0) {
        Some(end) => (&data[..end], &data[end + 1..]),
        None => (data, &[][..]),
    };
    if let Ok(text) = std::str::from_utf8(table) {
        let name = |end: &str| format!("io.github.containers.zstd-chunked.{end}");
        let all = ["manifest-position", "tarsplit-position"].map(|end| (name(end), text.to_string()));
        let checksum = (name("manifest-checksum"), pagefold_image::digest::Digest::of(data).to_string());
        if let Some(place) = TableLocation::find(&HashMap::from_iter(all.into_iter().chain([checksum])), END) {
            assert!(place.range().end <= END && place.archive_end() < place.offset);
            let _ = place.read(data);
        }
    }
    let Ok(mut table) = TableOfContents::parse(table, END) else { return };
    if !headers.is_empty() {
        let _ = table.add_headers(headers);
    }
    let is_known: Vec<bool> = (0..table.contents().len()).map(|number| known >> (number % 8) & 1 == 1).collect();
    let Some(plan) = Plan::new(table, &is_known) else { return };
    assert!(plan.ranges.iter().all(|range| range.start < range.end && range.end <= END));
    assert!(plan.ranges.windows(2).all(|pair| pair[0].end < pair[1].start));
    let needed: u64 = plan.ranges.iter().map(|range| range.end - range.start).sum();
    assert_eq!(needed + plan.bytes_left_out, END);
    for part in &plan.parts {
        if let Part::Packed(part) = part {
            assert!(plan.ranges.iter().any(|range| range.start <= part.start && part.end <= range.end));
        }
    }
});
