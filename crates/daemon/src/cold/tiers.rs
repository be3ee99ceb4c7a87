//! The tiers of all domains, and what they share.

use super::client::Client;
use super::config::Config;
use super::group::Group;
use super::groups::Groups;
use super::handover::deposit;
use super::handover::pending_children::PendingChildren;
use super::prefetcher::Prefetcher;
use super::random_id::random_id;
use super::selector::ClientSelector;
use super::threads;
use crate::domain_key::DomainKey;
use pagefold_os::cpu_latency::Awake;
use pagefold_os::fd::Fd;
use pagefold_os::sync::lock;
use pagefold_os::wait::Bell;
use pagefold_tier::keeper::Keeper;
use pagefold_tier::{Backing, BackingFile, Tier};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Most domains at a time: each has three threads and a file.
const DOMAINS_MAX: usize = 1024;
/// How long a starting daemon keeps asking an unresponsive keeper for its descriptor list before it gives up.
const KEEPER_TIMEOUT: Duration = Duration::from_secs(30);

/// Where the keeper of the daemon at `socket` listens.
pub fn keeper_path(socket: &Path) -> PathBuf {
    let mut path = socket.as_os_str().to_owned();
    path.push(OsStr::from_bytes(pagefold_protocol::message::KEEPER_SUFFIX));
    path.into()
}

/// The tiers of all domains.
pub(crate) struct Tiers {
    pub(crate) config: Config,
    pub(crate) groups: Arc<Groups>,
    pub(crate) keeper: Arc<Mutex<Option<Keeper>>>,
    pub(crate) keeper_path: PathBuf,
    /// The keeper's ends of agents' sockets, for the next keeper. Locked after `keeper`.
    pub(crate) keepers_ends: Mutex<Vec<Fd>>,
    /// There is another keeper.
    pub(crate) keeper_changed: Bell,
    /// Children that wait for pages as long as they live.
    pub(crate) pending_children: Arc<PendingChildren>,
    pub(crate) awake: Arc<Awake>,
    /// The daemon stops in good order: nothing is evicted any more. Read under each client's link.
    pub(crate) closing: Arc<AtomicBool>,
    /// On an orderly stop pages stay out, for a successor that is about to come. A request to stop may change it.
    pub(crate) hand_over: AtomicBool,
    /// The lack of a keeper was reported, and there was none since.
    pub(crate) is_keeper_missed: AtomicBool,
    pub(crate) keeper_timeout: Duration,
}

impl Tiers {
    pub(crate) fn new(config: Config, socket: &Path) -> Tiers {
        let awake = Arc::new(Awake::new(config.keep_awake));
        let keeper = Arc::default();
        Tiers {
            hand_over: AtomicBool::new(config.hand_over),
            config,
            groups: Arc::default(),
            pending_children: Arc::new(PendingChildren::new(Arc::clone(&keeper))),
            keeper,
            keeper_path: keeper_path(socket),
            keepers_ends: Mutex::default(),
            keeper_changed: Bell::new().expect("the first descriptors are there"),
            awake,
            closing: Arc::default(),
            is_keeper_missed: AtomicBool::new(false),
            keeper_timeout: KEEPER_TIMEOUT,
        }
    }

    /// The configuration of a tier with a first client that names `bytes_max`, 0 for as much as is allowed.
    pub(crate) fn tier_config(&self, bytes_max: u64) -> pagefold_tier::Config {
        let most = self.config.tier_max_bytes;
        let bytes_max = if bytes_max == 0 { most } else { bytes_max.min(most) };
        let ticks = |after: Duration| after.as_nanos().div_ceil(self.config.tick.as_nanos().max(1));
        pagefold_tier::Config {
            bytes_max: bytes_max.clamp(4 << 20, 200 << 30),
            patches: self.config.patches,
            write_back_ticks: self.config.file_after.map_or(0, |after| ticks(after).min(u16::MAX.into()) as u16),
            ..pagefold_tier::Config::default()
        }
    }

    pub(crate) fn make_group(&self, key: DomainKey, tier: Tier, id: u64) -> Arc<Group> {
        let (prefetcher, jobs) = Prefetcher::new();
        let group = Arc::new(Group {
            key,
            tier,
            id,
            clients: Mutex::default(),
            past_cpu_ns: AtomicU64::new(0),
            next_client_id: AtomicU32::new(1),
            config: self.config.clone(),
            keeper: self.keeper.clone(),
            awake: self.awake.clone(),
            closing: self.closing.clone(),
            pending_children: self.pending_children.clone(),
            prefetcher: Arc::new(prefetcher),
            bell: AtomicU32::new(0),
            parked: AtomicU32::new(0),
            last_busy: Mutex::new(Instant::now()),
            over: AtomicBool::new(false),
        });
        threads::start_prefetcher(&group, jobs);
        group
    }

    pub(crate) fn group(&self, key: &DomainKey, bytes_max: u64) -> Result<Arc<Group>, String> {
        let mut groups = lock(&self.groups.all);
        if let Some(group) = groups.get(key) {
            *lock(&group.last_busy) = Instant::now();
            return Ok(group.clone());
        }
        if groups.len() >= DOMAINS_MAX {
            return Err(format!("there are {DOMAINS_MAX} domains of the cold tier already"));
        }
        let backing = match &self.config.directory {
            None => None,
            Some(directory) => match BackingFile::create(directory, self.config.file_max_bytes) {
                Ok(file) => Some(Box::new(file) as Box<dyn Backing>),
                Err(error) => {
                    eprintln!("pagefold: no file in {}: {error}; the tier is in memory only", directory.display());
                    None
                }
            },
        };
        let tier = Tier::create(self.tier_config(bytes_max), backing).map_err(|error| error.to_string())?;
        let group = self.make_group(key.clone(), tier, random_id());
        groups.insert(key.clone(), group.clone());
        drop(groups);
        // After it was inserted, and without that lock: a keeper that replaces this one is given all known groups.
        if let Some(keeper) = lock(&self.keeper).as_ref() {
            deposit::deposit_arena(&group, keeper);
        }
        threads::start_evictor_and_cleaner(&group, &self.groups);
        Ok(group)
    }

    pub(crate) fn all_groups(&self) -> Vec<Arc<Group>> {
        lock(&self.groups.all).values().cloned().collect()
    }

    pub(crate) fn clients_of(&self, selector: &ClientSelector) -> Vec<(Arc<Group>, Arc<Client>)> {
        let of = |group: &Arc<Group>| -> Vec<(Arc<Group>, Arc<Client>)> {
            let clients = lock(&group.clients);
            clients.values().filter(|client| selector.has(client.pid)).map(|one| (group.clone(), one.clone())).collect()
        };
        self.all_groups().iter().flat_map(of).collect()
    }

    /// True if the process is a client with a connected agent.
    pub(crate) fn is_linked(&self, pid: i32) -> bool {
        self.clients_of(&ClientSelector::Pid(pid)).iter().any(|(_, client)| lock(&client.link).is_some())
    }

    /// Pages of the process that are in the tier.
    pub(crate) fn pages_out(&self, pid: i32) -> u64 {
        let clients = self.clients_of(&ClientSelector::Pid(pid));
        clients.iter().map(|(group, client)| client.pages_out(&group.tier)).sum()
    }

    /// The processes among these clients that are merged live as well.
    pub(crate) fn lent(&self, selector: &ClientSelector) -> Vec<i32> {
        let clients = self.clients_of(selector);
        clients.iter().filter(|(_, one)| one.lent.load(Ordering::Relaxed)).map(|(_, one)| one.pid).collect()
    }

    /// True if there is a client.
    pub(crate) fn is_in_use(&self) -> bool {
        lock(&self.groups.all).values().any(|group| !lock(&group.clients).is_empty())
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A tier with a group, and the directory of its keeper's socket.
    pub(crate) fn with_group(config: Config) -> (tempfile::TempDir, Tiers, Arc<Group>) {
        let dir = tempfile::tempdir().unwrap();
        let cold = Tiers::new(config, &dir.path().join("s"));
        let group = cold.group(&(0, "default".into()), 4 << 20).unwrap();
        (dir, cold, group)
    }

    #[test]
    fn a_client_may_name_less_than_the_daemon_allows_and_no_more() {
        let config = Config { tier_max_bytes: 8 << 20, ..Config::default() };
        let cold = Tiers::new(config, "/nowhere/s".as_ref());
        let made = [0, 5 << 20, 200 << 30].map(|named| cold.tier_config(named).bytes_max);
        assert_eq!(made, [8 << 20, 5 << 20, 8 << 20]);
    }
}
