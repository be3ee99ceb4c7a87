//! Half the memory: redis under a limit of half of what it uses, in the cold tier and with zswap.

use super::kernel::Zswap;
use super::side::{Side, connect, said, start};
use super::{Row, median};
use crate::group::Group;
use crate::undo::Undo;
use crate::vm::join_group;
use std::fs;
use std::io::{self, Read, Write};
use std::path::Path;
use std::process::Command;

/// Bytes of a value.
const VALUE_BYTES: usize = 1000;

/// Values as caches hold them: text with numbers in it.
fn fill(socket: &Path, count: usize) -> io::Result<()> {
    let mut stream = connect(socket)?;
    for first in (0..count).step_by(500) {
        let mut request = String::new();
        let last = (first + 500).min(count);
        for key in first..last {
            let mut value = String::new();
            let mut number = (key as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
            while value.len() < VALUE_BYTES {
                number = number.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(key as u64);
                value +=
                    &format!("{{\"id\":{key},\"token\":\"{number:016x}\",\"path\":\"/shop/item\",\"seen\":true}},");
            }
            value.truncate(VALUE_BYTES);
            request += &format!("*3\r\n$3\r\nSET\r\n$16\r\nkey:{key:012}\r\n${VALUE_BYTES}\r\n{value}\r\n");
        }
        stream.write_all(request.as_bytes())?;
        stream.read_exact(&mut vec![0; 5 * (last - first)])?;
    }
    Ok(())
}

/// One run; operations per second on random keys, the memory that all of it takes, and faults per operation.
fn once(tier: bool, mib: usize, requests: usize, reads: &str) -> io::Result<[f64; 3]> {
    let dir = std::env::temp_dir().join(format!("pagefold-bench-half-{}", std::process::id()));
    fs::create_dir_all(&dir)?;
    let made = dir.clone();
    let _dir = Undo::later(move || drop(fs::remove_dir_all(made)));
    let socket = dir.join("r");
    let group = Group::new("half")?;
    let used = || group.number(&["memory.usage_in_bytes", "memory.current"]).unwrap_or(0);
    let side = Side::start(tier, &dir, (mib as u64) << 21)?;
    let before = Zswap::bytes();
    let mut command = side.program("redis-server");
    command.args(["--port", "0", "--save", "", "--appendonly", "no", "--unixsocket"]).arg(&socket);
    join_group(&mut command, &group.path);
    let (_, _redis) = start(command)?;
    let count = (mib << 20) / (VALUE_BYTES + 100);
    fill(&socket, count)?;
    let limit = used() / 2;
    side.park()?;
    group.limit(limit)?;
    let run = |requests: usize| -> io::Result<f64> {
        let mut command = Command::new("redis-benchmark");
        command.args(["-q", "-c", "4", "-n", &requests.to_string(), "-r", &count.to_string(), "-s"]).arg(&socket);
        let text = said(if reads == "reads" {
            command.args(["GET", "key:__rand_int__"])
        } else {
            command.args(["SETRANGE", "key:__rand_int__", "100", "another token of the session"])
        })?;
        let number =
            |text: &str| text.split(" requests per second").next()?.split_whitespace().next_back()?.parse().ok();
        text.rsplit('\r').find_map(number).ok_or_else(|| io::Error::other(format!("redis-benchmark said {text}")))
    };
    let sum = |of: &serde_json::Value, field: &str| -> f64 {
        of.as_array().into_iter().flatten().filter_map(|one| one[field].as_f64()).sum()
    };
    // Faults on pages that were out.
    let faults = || -> io::Result<f64> {
        if tier { Ok(sum(&side.status()?["cold"]["clients"], "refaults")) } else { Ok(Zswap::pages_in()) }
    };
    // Half of the keys come in and go out before it counts.
    run(requests / 4)?;
    let earlier = faults()?;
    let rate = run(requests)?;
    let faults = (faults()? - earlier) / requests as f64;
    let held = if tier { sum(&side.status()?["cold"]["domains"], "held_bytes") } else { Zswap::bytes().0 - before.0 };
    Ok([rate, (used() as f64 + held) / 1e6, faults])
}

/// As [`once`]; where the kernel kills the program at its limit, again, and that is counted.
fn surviving(tier: bool, mib: usize, requests: usize, reads: &str, killed: &mut u32) -> io::Result<[f64; 3]> {
    for _ in 0..5 {
        let before = Group::killed();
        match once(tier, mib, requests, reads) {
            Err(error) if Group::killed() > before => {
                eprintln!("redis was killed at its limit ({}): {error}", if tier { "cold tier" } else { "zswap" });
                *killed += 1;
            }
            other => return other,
        }
    }
    Err(io::Error::other("redis was killed at its limit five times"))
}

/// Measures both, in turns.
pub fn measure(mib: usize, requests: usize, rounds: usize) -> io::Result<Vec<Row>> {
    crate::group::zswap_lies_outside()?;
    let mut rows = Vec::new();
    for kind in ["reads", "writes"] {
        let mut runs = [Vec::new(), Vec::new()];
        let mut killed = [0; 2];
        for _ in 0..rounds {
            for (tier, runs) in [true, false].into_iter().zip(&mut runs) {
                runs.push(surviving(tier, mib, requests, kind, &mut killed[usize::from(!tier)])?);
            }
        }
        let names = [Side::name(true), Side::name(false)];
        for ((name, runs), killed) in names.into_iter().zip(&runs).zip(killed) {
            let column = |index: usize| -> Vec<f64> { runs.iter().map(|run| run[index]).collect() };
            let rates = column(0);
            rows.push(Row {
                part: "half",
                name,
                on: format!("redis, {mib} MiB, random {kind}"),
                figures: vec![
                    ("requests/s", median(&mut rates.clone())),
                    ("least", rates.iter().copied().fold(f64::INFINITY, f64::min)),
                    ("most", rates.iter().copied().fold(0.0, f64::max)),
                    ("MB in all", median(&mut column(1))),
                    ("faults/request", median(&mut column(2))),
                    ("killed", f64::from(killed)),
                ],
            });
        }
    }
    Ok(rows)
}
