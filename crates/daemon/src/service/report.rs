//! Collects the daemon's status.

use crate::domain_key::DomainKey;
use crate::service::daemon::Daemon;

use crate::clients::shared_client::SharedClient;
use crate::cold;
use crate::status::{Client, Leftover, Status, Totals};
use pagefold_merge::Domain;
use pagefold_merge::stats::DomainStats;
use pagefold_os::sync::lock;
use pagefold_os::{ksm, procfs};
use pagefold_protocol::wait_histogram;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

/// Memory of an agent in its client: data, stack and tables; estimated (64 to 80 KiB in programs of 40 MiB).
const AGENT_BYTES: u64 = 96 << 10;
/// Memory of the keeper, estimated.
const KEEPER_BYTES: u64 = 1 << 20;

/// The whole status. It waits for no client: what the kernel may keep its reader waiting for is as the last look found it.
pub(crate) fn status(daemon: &Daemon) -> Status {
    // Under one lock: a domain that is being dropped counts as one of these or in the past.
    let (domains, past): (Vec<(DomainKey, Arc<Domain>)>, Totals) = {
        let live = lock(&daemon.live.domains);
        (live.iter().map(|(key, one)| (key.clone(), one.domain.clone())).collect(), *lock(&daemon.live.past))
    };
    let of = |key: &DomainKey, domain: &Domain| DomainStats { uid: key.0, ..domain.stats() };
    let mut stats: Vec<_> = domains.iter().map(|(key, domain)| (key.clone(), of(key, domain))).collect();
    let me = std::process::id() as i32;
    let resident_bytes = procfs::rss(me);
    let mut agents_cpu_ns = cold::status::agents_cpu_ns(&daemon.cold);
    let connected = lock(&daemon.live.connected);
    agents_cpu_ns += daemon.live.past_cpu_ns.load(Ordering::Relaxed);
    let clients: Vec<Client> = connected
        .iter()
        .map(|client| {
            agents_cpu_ns += client.shared.cpu_ns();
            let of_domain = stats.iter_mut().find(|(key, _)| *key == client.key);
            let mut client_status = Client {
                pid: client.shared.pid,
                uid: client.shared.uid,
                name: client.shared.name.clone(),
                domain: client.key.1.clone(),
                stats: of_domain.and_then(|(_, domain)| domain.clients.get(&client.id).cloned()).unwrap_or_default(),
                ..Client::default()
            };
            client_status.read_counters(client.shared.counters());
            (client_status.waits, client_status.waits_recent) = lock(&client.shared.past_counts).waits(
                Instant::now(),
                &client_status.freeze_us,
                wait_histogram::bucket_end,
                client_status.freeze_ns_max,
            );
            client_status.unmanaged = lock(&client.shared.look).unmanaged.clone();
            client_status.leftover = leftover(&client.shared);
            client_status.attached = client.shared.attached.is_some();
            [client_status.stops, client_status.stop_ns, client_status.stop_ns_max] =
                client.shared.attached.as_ref().map_or([0; 3], |attached| attached.stops());
            client_status
        })
        .collect();
    drop(connected);
    let cpu_ns = procfs::cpu_ns(me).unwrap_or(0) + agents_cpu_ns;
    let mut totals = Totals { cpu_ns, ..past };
    for (_, domain) in &stats {
        totals.pages_shared += domain.pages_shared;
        totals.pages_sharing += domain.pages_sharing;
        totals.pages_zero += domain.pages_zero;
        totals.pages_unshared += domain.pages_unshared;
        totals.pages_volatile += domain.pages_volatile;
        totals.pages += domain.pages;
        totals.full_scans += domain.events.full_scans;
        totals.cow_breaks += domain.events.cow_breaks;
        totals.pages_merged += domain.events.pages_merged;
        totals.pages_zeroed += domain.events.pages_zeroed;
        totals.deduplicated_bytes += domain.deduplicated_bytes;
        totals.pool_bytes += domain.pool_bytes;
        totals.pool_orphaned_bytes += domain.pool_orphaned_bytes;
        totals.metadata_bytes += domain.metadata_bytes;
        totals.mapping_bytes += domain.mapping_bytes;
        totals.general_profit += domain.general_profit;
    }
    let cold = cold::status::status(&daemon.cold);
    let records = totals.metadata_bytes + cold.domains.iter().map(|tier| tier.metadata_bytes).sum::<u64>();
    let agents = (clients.len() + cold.clients.len()) as u64;
    totals.process_bytes = procfs::anonymous(me).saturating_sub(records)
        + agents * AGENT_BYTES
        + if cold.keeper { KEEPER_BYTES } else { 0 };
    totals.saved_bytes = totals.general_profit - totals.process_bytes as i64;
    Status {
        version: env!("CARGO_PKG_VERSION").into(),
        pid: me,
        service: daemon.config.service.clone().unwrap_or_default(),
        uptime_s: daemon.started.elapsed().as_secs_f64(),
        workers: daemon.config.workers,
        scan_interval_s: daemon.config.period.as_secs_f64(),
        resident_bytes,
        host: crate::status::Host::here(),
        totals,
        domains: stats.into_iter().map(|(_, domain)| domain).collect(),
        clients,
        unmanaged_processes: daemon.refusals.all(),
        cold,
        verifying: crate::status::Verifying {
            pages: daemon.verified[0].load(Ordering::Relaxed),
            pages_total: daemon.verified[1].load(Ordering::Relaxed),
        },
    }
}

/// What became of a client's leftover.
fn leftover(client: &SharedClient) -> Leftover {
    let state = lock(&client.leftover).text();
    let handed_bytes = client.counters().leftover_bytes.load(Ordering::Relaxed);
    let stat = if handed_bytes > 0 { lock(&client.look).ksm } else { ksm::ProcessStat::default() };
    Leftover { state, handed_bytes, ksm_pages: stat.merged_pages, ksm_profit_bytes: stat.profit_bytes.unwrap_or(0) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clients::domains::tests::connected;
    use crate::service::daemon::tests::daemon;
    use std::sync::atomic::{AtomicBool, AtomicU64};
    use std::thread;

    /// What clients write into their channel is theirs, and spoils no sum.
    #[test]
    fn counters_of_a_hostile_client_do_not_overflow() {
        let daemon = daemon();
        let me = std::process::id() as i32;
        for _ in 0..3 {
            let client = connected(me);
            let counters = client.shared.counters();
            counters.cpu_ns.store(u64::MAX, Ordering::Relaxed);
            counters.freeze_us.iter().for_each(|count| count.store(u64::MAX, Ordering::Relaxed));
            lock(&daemon.live.connected).push(client);
        }
        let most = || 4 * procfs::cpu_ns(me).unwrap();
        let before = status(&daemon);
        assert!((1..=most()).contains(&before.totals.cpu_ns), "{}", before.totals.cpu_ns);
        crate::service::metrics::render(&before);
        daemon.live.forget(|_| true);
        let later = status(&daemon).totals.cpu_ns;
        assert!((before.totals.cpu_ns..=most()).contains(&later), "{later}");
    }

    /// Also while clients come and go: a collector takes a counter that falls for one that began anew.
    #[test]
    fn processor_time_never_falls() {
        let daemon = daemon();
        let me = std::process::id() as i32;
        let (over, read) = (AtomicBool::new(false), AtomicU64::new(0));
        thread::scope(|scope| {
            let reader = scope.spawn(|| {
                let mut before = 0;
                while !over.load(Ordering::Relaxed) {
                    let now = status(&daemon).totals.cpu_ns;
                    read.fetch_add(1, Ordering::Relaxed);
                    if now < before {
                        return Some((before, now));
                    }
                    before = now;
                }
                None
            });
            for _ in 0..200 {
                let clients: Vec<_> = (0..16).map(|_| connected(me)).collect();
                let counters = clients.iter().map(|client| client.shared.counters());
                counters.for_each(|counters| counters.cpu_ns.store(u64::MAX, Ordering::Relaxed));
                lock(&daemon.live.connected).extend(clients);
                let seen = read.load(Ordering::Relaxed) + 2;
                while read.load(Ordering::Relaxed) < seen && !reader.is_finished() {
                    thread::yield_now();
                }
                daemon.live.forget(|_| true);
            }
            over.store(true, Ordering::Relaxed);
            assert_eq!(reader.join().unwrap(), None);
        });
    }
}
