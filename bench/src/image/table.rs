//! The tables: rows of one kind each.

use crate::table::{counted, print as print_rows};
use serde_json::Value;

/// Kind of a row, title of its table, columns.
const TABLES: [(&str, &str, &str); 6] = [
    (
        "read-all",
        "Every file of both versions read: memory by each way of keeping the trees",
        "pair|peer|MiB=resident_bytes:M1|metadata MiB=metadata_bytes:M1|saved=saved_percent:1 %|of ideal=of_ideal_percent:1 %",
    ),
    (
        "run time",
        "Programs of both versions run: pages of the trees in memory",
        "pair|plain MiB=plain_bytes:M1|pagefold MiB=pagefold_bytes:M1|saved=saved_percent:1 %|error",
    ),
    (
        "warm",
        "Warm reads and maps, of processor time",
        "what|files|MiB=bytes:M1|ext4 GB/s=ext4_gb_per_s:2|pagefold GB/s=pagefold_gb_per_s:2|ratio:3 x|least=ratio_min:3|\
         most=ratio_max:3|of the fastest=ratio_of_fastest:3",
    ),
    (
        "cold start",
        "Programs started with cold caches, against a plain directory",
        "peer|command|ms:1|least=ms_min:1|most=ms_max:1|ratio:3 x|of the fastest=ratio_of_fastest:3|CPU=cpu_ratio:3",
    ),
    (
        "build",
        "Trees built into images",
        "peer|MiB=bytes:M1|s=seconds:3|least=seconds_min:3|most=seconds_max:3|a first build takes=first_build_over_this:2 x",
    ),
    (
        "many images",
        "Many images in one store; peak memory beside that of a process that does nothing",
        "images|bases|objects|list s=list_s:2|stat s=stat_s:2|gc s=gc_s:2|removed=gc_removed_objects|\
         list MiB=list_rss_mib:1|stat MiB=stat_rss_mib:1|gc MiB=gc_rss_mib:1|nothing MiB=rss_mib_of_nothing:1",
    ),
];

/// Prints all rows.
pub(super) fn print(rows: &[Value]) {
    for (kind, title, columns) in TABLES {
        let own: Vec<Value> = rows.iter().filter(|row| row["bench"] == kind).cloned().collect();
        print_rows(&format!("{title} ({})", counted(own.len() as u64, "row")), columns, &own);
    }
}
