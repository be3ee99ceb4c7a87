//! Half the memory: redis, which reads and writes random keys, under a limit of half of what it uses, in the cold tier and
//! with zswap.

use super::kernel::Zswap;
use super::row;
use crate::group::{self, Group};
use crate::process::{self, Failure, vmstat};
use crate::redis::Redis;
use crate::restore::folder;
use crate::stats::Spread;
use crate::tool::Daemon;
use serde_json::{Value, json};
use std::io;
use std::process::Command;

/// The system that holds cold memory.
enum ColdSystem {
    Tier(Daemon),
    Zswap { _on: Zswap },
}

impl ColdSystem {
    /// Starts one: the tier, or zswap over a swap file of `swap_bytes`.
    fn start(tier: bool, swap_bytes: u64) -> io::Result<ColdSystem> {
        match tier {
            true => Ok(ColdSystem::Tier(Daemon::start(&["--tier-dir", "none"])?)),
            false => Ok(ColdSystem::Zswap { _on: Zswap::start(swap_bytes)? }),
        }
    }

    /// Its name in rows.
    fn name(tier: bool) -> String {
        if tier { "cold tier".to_owned() } else { format!("zswap, {}", Zswap::compressor()) }
    }

    /// A program under this system.
    fn program(&self, name: &str) -> Command {
        let ColdSystem::Tier(daemon) = self else { return Command::new(name) };
        let words = daemon.run(&["--cold"]);
        let mut command = Command::new(&words[0]);
        command.args(&words[1..]).arg(name);
        command
    }

    /// Evicts all it can, so that a limit can be set; the kernel does that itself when the limit is set.
    fn park(&self) -> io::Result<()> {
        match self {
            ColdSystem::Tier(daemon) => daemon.park().map(drop),
            ColdSystem::Zswap { .. } => Ok(()),
        }
    }

    /// Pages that returned from it since it started, and the bytes that it holds.
    fn faults_and_bytes(&self) -> io::Result<(f64, f64)> {
        let ColdSystem::Tier(daemon) = self else { return Ok((Zswap::pages_in(), Zswap::bytes().0)) };
        let cold = daemon.status()?.cold;
        let faults: u64 = cold.clients.iter().map(|client| client.refaults).sum();
        Ok((faults as f64, cold.domains.iter().map(|tier| tier.memory_bytes).sum::<u64>() as f64))
    }
}

/// Bytes of a value.
const VALUE_BYTES: usize = 1000;

/// A value as caches hold them: text with numbers in it.
fn value(key: usize) -> String {
    let (mut value, mut number) = (String::new(), (key as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    while value.len() < VALUE_BYTES {
        number = number.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(key as u64);
        value += &format!("{{\"id\":{key},\"token\":\"{number:016x}\",\"path\":\"/shop/item\",\"seen\":true}},");
    }
    value.truncate(VALUE_BYTES);
    value
}

/// One run: operations per second on random keys, all memory in use, and faults per operation.
fn redis_once(tier: bool, mib: usize, requests: usize, reads: &str) -> io::Result<[f64; 3]> {
    let (dir, _gone) = folder("half")?;
    let group = Group::of_run("half")?;
    let system = ColdSystem::start(tier, (mib as u64) << 21)?;
    let (_, bytes_before) = system.faults_and_bytes()?;
    let mut command = system.program("redis-server");
    group.adopt(&mut command);
    let redis = Redis::start(command, &dir)?;
    let count = (mib << 20) / (VALUE_BYTES + 100);
    redis.set((0..count).map(|key| (format!("key:{key:012}"), value(key))))?;
    let limit = group.used() / 2;
    system.park()?;
    group.limit(limit)?;
    let run = |requests: usize| -> io::Result<f64> {
        let mut command = Command::new("redis-benchmark");
        command.args(["-q", "-c", "4", "-n", &requests.to_string(), "-r", &count.to_string(), "-s"]).arg(&redis.socket);
        let text = process::output(if reads == "reads" {
            command.args(["GET", "key:__rand_int__"])
        } else {
            command.args(["SETRANGE", "key:__rand_int__", "100", "another token of the session"])
        })?;
        let number =
            |text: &str| text.split(" requests per second").next()?.split_whitespace().next_back()?.parse().ok();
        text.rsplit('\r').find_map(number).ok_or_else(|| io::Error::other(format!("redis-benchmark said {text}")))
    };
    // Half of the keys are faulted in and evicted before it counts.
    run(requests / 4)?;
    let (faults_before, _) = system.faults_and_bytes()?;
    let rate = run(requests)?;
    let (faults, bytes) = system.faults_and_bytes()?;
    let held = group.used() as f64 + bytes - bytes_before;
    Ok([rate, held / 1e6, (faults - faults_before) / requests as f64])
}

/// As [`redis_once`]; runs again where the kernel kills the program at its limit, and counts that.
fn surviving(tier: bool, mib: usize, requests: usize, reads: &str, killed: &mut u32) -> io::Result<[f64; 3]> {
    for _ in 0..5 {
        let before = vmstat("oom_kill");
        match redis_once(tier, mib, requests, reads) {
            Err(error) if vmstat("oom_kill") > before => {
                eprintln!("redis was killed at its limit ({}): {error}", if tier { "cold tier" } else { "zswap" });
                *killed += 1;
            }
            other => return other,
        }
    }
    Err(io::Error::other("redis was killed at its limit five times"))
}

/// Measures redis with both cold systems, in turns.
pub fn redis(mib: usize, requests: usize, rounds: usize) -> Result<Vec<Value>, Failure> {
    group::zswap_lies_outside()?;
    let mut rows = Vec::new();
    for kind in ["reads", "writes"] {
        let mut runs = [Vec::new(), Vec::new()];
        let mut killed = [0u32; 2];
        for _ in 0..rounds {
            for (tier, runs) in [true, false].into_iter().zip(&mut runs) {
                runs.push(surviving(tier, mib, requests, kind, &mut killed[usize::from(!tier)])?);
            }
        }
        let names = [ColdSystem::name(true), ColdSystem::name(false)];
        for ((name, runs), killed) in names.into_iter().zip(&runs).zip(killed) {
            let column = |index: usize| Spread::of(runs.iter().map(|run| run[index]));
            let rate = column(0);
            let figures = json!({ "requests/s": rate.median, "least": rate.low, "most": rate.high,
                "MB in all": column(1).median, "faults/request": column(2).median, "killed": killed });
            rows.push(row::of("half", &name, &format!("redis, {mib} MiB, random {kind}"), figures));
        }
    }
    Ok(rows)
}
