//! The tables as people read them.

use super::files::mib;
use super::pressure::{OTHER_MIB, PASSES, READERS};
use super::{ROUNDS, Results, SLICES, guests};

pub(super) fn show(results: &Results) {
    show_reads(results);
    show_memory(results);
    show_growth(results);
    guests::show(&results.guests);
    for skipped in &results.skipped {
        println!("SKIPPED: {skipped}");
    }
}

fn show_reads(results: &Results) {
    if results.reads.is_empty() {
        return;
    }
    println!(
        "Warm reads through one file handle, one thread (median of {SLICES}, spread = half between the quartiles)"
    );
    println!("{:42} {:>14} {:>8} {:>14} {:>8}", "", "4 KiB random/s", "+-", "1 MiB seq MiB/s", "+-");
    for row in &results.reads {
        println!(
            "{:42} {:>14.0} {:>6.1} % {:>14.0} {:>6.1} %",
            row.name,
            row.random_4k_per_s,
            row.random_spread_percent,
            row.sequential_mib_per_s,
            row.sequential_spread_percent
        );
    }
    if let [kernel, plain, ours, _] = &results.reads[..] {
        println!(
            "pagefold disk / plain FUSE: random {:.2}, sequential {:.2}; kernel / pagefold disk: random {:.1}, sequential {:.1}",
            ours.random_4k_per_s / plain.random_4k_per_s,
            ours.sequential_mib_per_s / plain.sequential_mib_per_s,
            kernel.random_4k_per_s / ours.random_4k_per_s,
            kernel.sequential_mib_per_s / ours.sequential_mib_per_s,
        );
    }
}

fn show_memory(results: &Results) {
    if results.memory.is_empty() && results.pressure.is_empty() {
        return;
    }
    println!("\nMemory for images that differ by one upgrade, everything in them read");
    println!("{:46} {:42} {:>7} {:>10} {:>11} {:>9}", "", "", "images", "MiB", "unique MiB", "over it");
    for row in &results.memory {
        println!(
            "{:46} {:42} {:>7} {:>10.1} {:>11.1} {:>7.1} %",
            row.what,
            row.name,
            row.images,
            mib(row.bytes),
            mib(row.unique_bytes),
            row.over_unique_percent
        );
    }
    println!(
        "\n{READERS} independent copies of one file read {PASSES} times at once, memory for 1.25 of one and {OTHER_MIB} MiB for programs"
    );
    println!("{:60} {:>12} {:>10} {:>8}", "", "disk MiB", "change", "s");
    for row in &results.pressure {
        println!(
            "{:60} {:>12.1} {:>8.1} % {:>8.2}",
            row.name,
            mib(row.disk_read_bytes),
            row.against_kernel_percent,
            row.seconds
        );
    }
}

fn show_growth(results: &Results) {
    if results.growth.is_empty() {
        return;
    }
    println!("\nGrowth (median of {ROUNDS}, spread = half the range)");
    println!("{:52} {:>6} {:>10} {:>8} {:>14} {:>10}", "", "", "4 KiB/s", "+-", "resident MiB", "books MiB");
    for row in &results.growth {
        println!(
            "{:52} {:>6} {:>10.0} {:>6.1} % {:>14.1} {:>10.2}",
            row.what,
            row.value,
            row.per_s,
            row.spread_percent,
            mib(row.resident_bytes),
            mib(row.metadata_bytes)
        );
    }
}
