//! The rows as people read them.

use super::SOURCE;
use serde_json::Value;

/// Everything that is not told by a row's own columns.
pub(super) fn print_table(rows: &[Value]) {
    let mib = |value: &Value| value.as_u64().unwrap_or(0) as f64 / (1 << 20) as f64;
    let number = |value: &Value| value.as_f64().unwrap_or(f64::NAN);
    let text = |value: &Value| value.as_str().unwrap_or_default().to_string();
    for row in rows {
        match text(&row["bench"]).as_str() {
            "read-all" => println!(
                "read all {:10} {:30} {:8.1} MiB + {:4.1} metadata  saved {:5.1} %  of ideal {:5.1} %",
                text(&row["pair"]),
                text(&row["peer"]),
                mib(&row["resident_bytes"]),
                mib(&row["metadata_bytes"]),
                number(&row["saved_percent"]),
                number(&row["of_ideal_percent"])
            ),
            "predicted" => println!(
                "predicted {:9} {:8.1} MiB: files {} %, 64K {} %, 16K {} %, 4K {} %",
                text(&row["pair"]),
                mib(&row["total_bytes"]),
                row["file_percent"],
                row["chunk_64k_percent"],
                row["chunk_16k_percent"],
                row["page_4k_percent"]
            ),
            "stat" => println!(
                "stat     {:10} memory_saved_bytes {:.1} MiB, plain minus pagefold {:.1} MiB",
                text(&row["pair"]),
                mib(&row["memory_saved_bytes"]),
                mib(&row["plain_minus_pagefold_bytes"])
            ),
            "run time" if row["error"].is_string() => {
                println!("run time {:10} {}", text(&row["pair"]), text(&row["error"]))
            }
            "run time" => {
                let source = SOURCE.iter().find(|(name, ..)| *name == text(&row["pair"])).map_or(0, |row| row.2);
                println!(
                    "run time {:10} plain {:.1} MiB, pagefold {:.1} MiB: saved {} % (source {source} %)",
                    text(&row["pair"]),
                    mib(&row["plain_bytes"]),
                    mib(&row["pagefold_bytes"]),
                    row["saved_percent"]
                );
            }
            "warm" => println!(
                "warm {:26} {:5} files {:7.1} MiB: ext4 {:.2} GB/s, pagefold {:.2} GB/s: {:.3} x ({:.3} to {:.3}); of \
                 the fastest {:.3}",
                text(&row["what"]),
                row["files"],
                mib(&row["bytes"]),
                number(&row["ext4_gb_per_s"]),
                number(&row["pagefold_gb_per_s"]),
                number(&row["ratio"]),
                number(&row["ratio_min"]),
                number(&row["ratio_max"]),
                number(&row["ratio_of_fastest"])
            ),
            "cold start" => println!(
                "cold start {:20} {:.60}: {:.1} ms ({:.1} to {:.1}): {:.3} x; of the fastest {:.3}; round by round {:.3} \
                 ({:.3} to {:.3}); CPU {:.3}",
                text(&row["peer"]),
                text(&row["command"]),
                number(&row["ms"]),
                number(&row["ms_min"]),
                number(&row["ms_max"]),
                number(&row["ratio"]),
                number(&row["ratio_of_fastest"]),
                number(&row["round_ratio"]),
                number(&row["round_ratio_low"]),
                number(&row["round_ratio_high"]),
                number(&row["cpu_ratio"])
            ),
            "build" => println!(
                "build    {:22} {:8.1} MiB in {:.3} s ({:.3} to {:.3}); a first build takes {:.2} times this",
                text(&row["peer"]),
                mib(&row["bytes"]),
                number(&row["seconds"]),
                number(&row["seconds_min"]),
                number(&row["seconds_max"]),
                number(&row["first_build_over_this"])
            ),
            "many images" => println!(
                "{} images over {} bases ({} objects): list {:.2} s, stat {:.2} s, gc {:.2} s (removed {}); peak memory \
                 {:.1}, {:.1}, {:.1} MiB (a process that does nothing: {:.1})",
                row["images"],
                row["bases"],
                row["objects"],
                number(&row["list_s"]),
                number(&row["stat_s"]),
                number(&row["gc_s"]),
                row["gc_removed_objects"],
                number(&row["list_rss_mib"]),
                number(&row["stat_rss_mib"]),
                number(&row["gc_rss_mib"]),
                number(&row["rss_mib_of_nothing"])
            ),
            _ => println!("{row}"),
        }
    }
    for (name, read, _) in SOURCE {
        let ours =
            rows.iter().find(|row| row["bench"] == "read-all" && row["pair"] == name && row["peer"] == "pagefold");
        if let Some(row) = ours {
            println!("source   {name:10} read all {read} %, here {} %", row["saved_percent"]);
        }
    }
}
