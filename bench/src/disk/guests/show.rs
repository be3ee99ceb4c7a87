//! The tables as people read them.

use super::Results;
use super::pressure::{PASSES, READERS};
use crate::disk::files::mib;

/// Prints the tables.
pub(in crate::disk) fn show(results: &Results) {
    if !results.sharing.is_empty() {
        show_sharing(results);
    }
    if !results.overhead.is_empty() {
        show_overhead(results);
    }
    if !results.front_ends.is_empty() {
        show_front_ends(results);
    }
    if !results.pressure.is_empty() {
        show_pressure(results);
    }
}

fn show_sharing(results: &Results) {
    println!(
        "\nGuests (QEMU, emulated; Linux {}) read a kernel tree, one image each, installed apart",
        results.guest_kernel
    );
    println!(
        "{:52} {:>7} {:>12} {:>10} {:>8} {:>15} {:>6}",
        "", "guests", "pages saved", "looked at", "CPU s", "host cache MiB", "s"
    );
    for row in &results.sharing {
        println!(
            "{:52} {:>7} {:>12} {:>10} {:>8.2} {:>15.1} {:>6.1}",
            row.name,
            row.guests,
            row.pages_saved,
            row.pages_scanned,
            row.cpu_s,
            mib(row.host_cache_bytes),
            row.seconds
        );
    }
    for rows in results.sharing.chunk_by(|a, b| a.guests == b.guests) {
        if let (Some(ours), Some(ksm)) = (rows.first(), rows.iter().find(|row| row.name.ends_with("equal scan budget")))
        {
            let against = match ksm.pages_saved {
                0 => "KSM saved no page at an equal scan budget".to_owned(),
                n => format!("{:.1} x the pages of KSM at an equal scan budget", ours.pages_saved as f64 / n as f64),
            };
            println!("{} guests: {against}", ours.guests);
        }
    }
}

fn show_overhead(results: &Results) {
    println!("\nProcessor time of guests with a kernel tree, their own caches emptied, the host's warm");
    println!(
        "{:20} {:34} {:>10} {:>9} {:>9} {:>15} {:>16}",
        "", "", "guests' s", "+-", "server s", "server's share", "all vs plain"
    );
    for row in &results.overhead {
        println!(
            "{:20} {:34} {:>10.2} {:>7.1} % {:>9.3} {:>13.2} % {:>7.1} % +- {:.1}",
            row.work,
            row.name,
            row.guest_cpu_s,
            row.spread_percent,
            row.server_cpu_s,
            row.server_share_percent,
            row.total_against_plain_percent,
            row.total_range_percent
        );
    }
}

fn show_front_ends(results: &Results) {
    println!("\n4 KiB reads of one guest past its cache, one at a time (median of rounds)");
    println!("{:40} {:>10} {:>8} {:>14} {:>22}", "", "reads/s", "+-", "CPU us a read", "guest memory");
    for row in &results.front_ends {
        println!(
            "{:40} {:>10.0} {:>6.1} % {:>14.1} {:>22}",
            row.name,
            row.reads_per_s,
            row.spread_percent,
            row.cpu_us_per_read,
            if row.guest_memory_private { "private, can merge" } else { "shared, cannot merge" }
        );
    }
}

fn show_pressure(results: &Results) {
    let limit = results.pressure.first().map_or(0, |row| row.limit_bytes);
    println!(
        "\n{READERS} guests read an independent copy of one file {PASSES} times, host memory for the guests and one copy ({:.0} MiB)",
        mib(limit)
    );
    println!(
        "{:48} {:>10} {:>9} {:>10} {:>9} {:>10} {:>7}",
        "", "swap MiB", "change", "disk MiB", "change", "peak MiB", "s"
    );
    for row in &results.pressure {
        println!(
            "{:48} {:>10.1} {:>7.1} % {:>10.1} {:>7.1} % {:>10.1} {:>7.1}",
            row.name,
            mib(row.swap_bytes),
            row.swap_change_percent,
            mib(row.disk_read_bytes),
            row.disk_change_percent,
            mib(row.peak_bytes),
            row.seconds
        );
    }
}
