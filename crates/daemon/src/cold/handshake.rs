//! Handshake: a process becomes a client of the cold tier, or turns out to be one that the daemon knows.
//!
//! Everything that it hands over is checked before it is used. The keeper holds its descriptors, and its fault thread runs,
//! before the answer allows its first eviction. A process that cannot be kept or served is refused, and keeps its memory.

use super::agent_connection::AgentConnection;
use super::client::{Client, ClientDescriptors, Identity, event_journal};
use super::evict;
use super::group::Group;
use super::handover::deposit::deposit_client;
use super::handover::keeper::ensure_keeper;
use super::random_id::random_id;
use super::selector::ClientSelector;
use super::threads;
use super::tiers::Tiers;
use crate::clients::attached::Attached;
use crate::clients::connection::Connection;
use crate::clients::handshake::{GreetError, receive_ready};
use crate::domain_key::DomainKey;
use crate::memory_limits::{self, CLIENT_BYTES};
use pagefold_os::fd::Fd;
use pagefold_os::sync::lock;
use pagefold_os::uffd::{self, Uffd};
use pagefold_os::{Errno, pagemap, sock};
use pagefold_protocol::handshake::send_welcome;
use pagefold_protocol::message::{HELLO_LENT, Op, Packet};
use pagefold_protocol::residency_map::{OWNER_DAEMON, poison_evicted};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Clients that one process may be: one, another while an exec(2) ends it, and what tests and debuggers make of it. Each
/// costs a thread.
const CLIENTS_PER_PROCESS: usize = 8;
/// How long a client may hold the owner lock before its earlier pages are left unpoisoned, in microseconds.
const POISON_LOCK_US: u64 = 1_000_000;

/// Greets an agent: see `agent::cold::connect` for the other half.
///
/// # Errors
/// [`GreetError`].
pub(crate) fn greet(
    tiers: &Tiers,
    socket: Fd,
    hello: &Packet,
    mut fds: sock::Fds,
    device: Option<&Fd>,
    key: DomainKey,
) -> Result<(), GreetError> {
    let cred = sock::peer(&socket)?;
    let pagemap = fds.take(0).filter(pagemap::is_one).ok_or(GreetError::Protocol)?;
    if tiers.closing.load(Ordering::SeqCst) {
        return Err(GreetError::Cold("the daemon stops".into()));
    }
    ensure_keeper(tiers);
    let socket = Arc::new(Connection::from(socket));
    let mut link = AgentConnection::new(socket.clone())?;
    link.attached = Attached::of_peer(&socket, cred.pid, hello)?;
    send_welcome(&socket, link.channel(), device)?;
    let (ready, mut fds) = receive_ready(&socket)?;
    let (Some(uffd), Some(table)) = (fds.take(0), fds.take(1)) else {
        return Err(GreetError::Protocol);
    };
    let handed = ClientDescriptors { uffd: Uffd::from_fd(uffd), table, pagemap };
    let who = Identity { client_id: 0, token: 0, pid: cred.pid, uid: cred.uid };
    // Last: a process that greets and hangs up must not make a group.
    let tier_max = if link.attached.is_some() { ready.count } else { hello.count };
    let group = tiers.group(&key, tier_max).map_err(GreetError::Cold)?;
    let result = attach(tiers, &group, who, handed, link, &ready, hello);
    result.map_err(|errno| {
        match sock::send(&socket, Packet { status: errno.0, ..Packet::new(Op::ColdStart) }.bytes(), &[]) {
            Err(Errno(libc::EPIPE | libc::ECONNRESET)) => GreetError::HungUp,
            _ => GreetError::Cold(format!("the cold tier cannot serve it: {errno}")),
        }
    })
}

/// Makes a client of the descriptors, or finds the client that they belong to, and connects it.
fn attach(
    tiers: &Tiers,
    group: &Arc<Group>,
    who: Identity,
    descriptors: ClientDescriptors,
    link: AgentConnection,
    ready: &Packet,
    hello: &Packet,
) -> Result<(), Errno> {
    // The descriptor is new: UFFDIO_API was not yet called on it.
    let is_bare = ready.a == 1;
    enable(&descriptors.uffd, is_bare)?;
    let journal = event_journal::create()?;
    let new = Client::new(who, descriptors, journal, group.prefetcher.clone(), group.pending_children.clone())?;
    let known = match find_known(group, &new) {
        // Its agent never heard that it was a client, and has registered nothing with the earlier descriptor.
        Some(client) if is_bare => {
            group.remove(client.client_id);
            None
        }
        known => known,
    };
    if is_bare {
        check_limits(tiers, &new)?;
    }
    let client = known.map_or_else(|| add(tiers, group, new), Ok)?;
    connect(group, &client, link, ready, hello)?;
    // It was unparked while its agent was on the way to this daemon, and could not be asked to give the loan back.
    let is_over = !client.is_parked() && client.pages_out(&group.tier) == 0;
    if !is_bare && client.lent.load(Ordering::Relaxed) && is_over {
        evict::park::unpark(group, &client);
    }
    Ok(())
}

/// Enables the userfaultfd, if the client has left that to the daemon.
///
/// # Errors
/// The descriptor is not a userfaultfd: the client's thread would wait for events that cannot come, and would not notice the
/// client's end. Or the kernel lacks a feature.
fn enable(uffd: &Uffd, is_bare: bool) -> Result<(), Errno> {
    if !uffd.is_one() {
        return Err(Errno(libc::EPROTO));
    }
    if is_bare {
        let features = uffd::FEATURE_PAGEFAULT_FLAG_WP
            | uffd::FEATURE_WP_ASYNC
            | uffd::FEATURE_MOVE
            | uffd::FEATURE_POISON
            | uffd::FEATURE_THREAD_ID
            | uffd::FEATURE_EVENT_REMOVE
            | uffd::FEATURE_EVENT_UNMAP
            | uffd::FEATURE_EVENT_REMAP;
        // The kernel reports forks, which the agent may not see, to privileged daemons only.
        if uffd.enable(features | uffd::FEATURE_EVENT_FORK).is_err() {
            uffd.enable(features)?;
        }
    }
    Ok(())
}

/// The client of the group that `new` is already, by its residency map.
fn find_known(group: &Group, new: &Client) -> Option<Arc<Client>> {
    let head = new.table.head();
    let client_id = head.client_id.load(Ordering::Acquire) as u32;
    let (token, arena) = (head.token.load(Ordering::Relaxed), head.arena.load(Ordering::Relaxed));
    let known = lock(&group.clients).get(&client_id).cloned();
    known.filter(|client| {
        arena == group.id
            && client.token == token
            && client.uid == new.uid
            && same_file(&client.table_fd, &new.table_fd)
    })
}

/// Checks that there is room for a process without evicted pages. One with evicted pages is served in any case.
fn check_limits(tiers: &Tiers, new: &Client) -> Result<(), Errno> {
    if memory_limits::own().free_apart(&new.limits) < CLIENT_BYTES {
        return Err(Errno(libc::ENOMEM));
    }
    // Processes of a pid namespace that the daemon does not see all have the number 0.
    if new.pid > 0 && tiers.clients_of(&ClientSelector::Pid(new.pid)).len() >= CLIENTS_PER_PROCESS {
        return Err(Errno(libc::EUSERS));
    }
    Ok(())
}

/// Adds a client to the group, leaves it with the keeper, and starts its thread.
fn add(tiers: &Tiers, group: &Arc<Group>, mut new: Client) -> Result<Arc<Client>, Errno> {
    poison_earlier(&new);
    let client_id = group.next_client_id.fetch_add(1, Ordering::Relaxed);
    (new.client_id, new.token) = (client_id, random_id());
    let client = Arc::new(new);
    // In the group before it is left with the keeper: a keeper that replaces this one is given all clients of the group.
    let mut clients = lock(&group.clients);
    if group.is_over() {
        // The handshake took longer than a tier without clients is kept.
        return Err(Errno(libc::EAGAIN));
    }
    clients.insert(client_id, client.clone());
    drop(clients);
    let head = client.table.head();
    head.token.store(client.token, Ordering::Relaxed);
    head.arena.store(group.id, Ordering::Relaxed);
    head.client_id.store(u64::from(client_id), Ordering::Release);
    let kept = lock(&tiers.keeper).as_ref().map_or(Ok(()), |keeper| deposit_client(group, keeper, &client));
    if let Err(error) = kept.and_then(|()| threads::start_client(group, &client)) {
        // It keeps its memory, and may ask again.
        head.client_id.store(0, Ordering::Release);
        group.remove(client_id);
        return Err(Errno(error.raw_os_error().unwrap_or(libc::EAGAIN)));
    }
    Ok(client)
}

/// Pages that are evicted to another tier, which no longer exists, or that are falsely marked as evicted, are lost.
fn poison_earlier(new: &Client) {
    let head = new.table.head();
    let _ = head.owner.compare_exchange(OWNER_DAEMON, 0, Ordering::AcqRel, Ordering::Relaxed);
    if head.evicted.load(Ordering::Relaxed) > 0 && new.take_owner_lock(POISON_LOCK_US) {
        let lost = poison_evicted(&new.uffd, &new.table);
        new.table.unlock();
        eprintln!("pagefold: {} ({}): {lost} pages died with an earlier tier", new.name, new.pid);
    }
}

/// Reconciles the client with the tier, answers its greeting, and takes its connection.
fn connect(group: &Group, client: &Client, link: AgentConnection, ready: &Packet, hello: &Packet) -> Result<(), Errno> {
    // Once: a client that connects to this daemon again still reports its time since it began.
    client.cpu_before_ns.get_or_init(|| ready.b);
    let tolerance_ppm = if link.attached.is_some() { ready.sequence } else { hello.b };
    client.tolerance_ppm.store(tolerance_ppm, Ordering::Relaxed);
    *lock(&client.attached) = link.attached.clone();
    client.lent.store(hello.a & HELLO_LENT != 0, Ordering::Relaxed);
    // A thread that holds a broken link gives it up soon.
    let mut held = lock(&client.link);
    if !client.reconcile(&group.tier) {
        return Err(Errno(libc::ETIMEDOUT));
    }
    // While the link is locked: the answer to the greeting comes before any request of the evictor.
    let go = Packet { a: u64::from(client.table.head().epoch.load(Ordering::Relaxed)), ..Packet::new(Op::ColdStart) };
    sock::send(&link.socket, go.bytes(), &[])?;
    *lock(&client.socket) = Some(link.socket.clone());
    *held = Some(link);
    group.ring();
    Ok(())
}

fn same_file(a: &Fd, b: &Fd) -> bool {
    let inode = |fd: &Fd| pagefold_os::memfd::len_and_inode(fd.raw()).ok().map(|(_, inode)| inode);
    inode(a).is_some() && inode(a) == inode(b)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cold::handover::keeper::tests::with_keeper;
    use crate::cold::status::agents_cpu_ns;
    use crate::cold::{Config, client};
    use pagefold_tier::keeper::Keeper;

    /// What the agent of one that greets has taken before.
    const CPU_BEFORE_NS: u64 = 1 << 40;

    fn bare() -> Uffd {
        Uffd::bare(uffd::open_device().ok().as_ref()).unwrap()
    }

    /// Greets as one that is this process.
    fn attach(cold: &Tiers, group: &Arc<Group>) -> (Result<(), Errno>, ClientDescriptors) {
        let (handed, _) = client::tests::handed(bare());
        (attach_as(cold, group, &handed), handed)
    }

    /// Greets as the one that has this, which its descriptor has not done before.
    fn attach_as(cold: &Tiers, group: &Arc<Group>, handed: &ClientDescriptors) -> Result<(), Errno> {
        let copy = ClientDescriptors {
            uffd: Uffd::from_fd(handed.uffd.fd().duplicate().unwrap()),
            table: handed.table.duplicate().unwrap(),
            pagemap: handed.pagemap.duplicate().unwrap(),
        };
        let (ours, _theirs) = sock::pair().unwrap();
        let link = AgentConnection::new(Arc::new(ours.into())).unwrap();
        let who = Identity { client_id: 0, token: 0, pid: std::process::id() as i32, uid: 0 };
        let ready = Packet { a: 1, b: CPU_BEFORE_NS, ..Packet::new(Op::Ready) };
        super::attach(cold, group, who, copy, link, &ready, &Packet::new(Op::Hello))
    }

    fn table_of(handed: &ClientDescriptors) -> u64 {
        let mut word = [0; 8];
        // The client id is the second word of the head.
        handed.table.read_at(&mut word, 8).unwrap();
        u64::from_ne_bytes(word)
    }

    #[test]
    fn a_client_the_keeper_cannot_hold_is_refused_and_clients_of_a_process_are_bounded() {
        if client::tests::own(uffd::FEATURE_EVENT_REMOVE, 1).is_none() {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let cold = Tiers::new(Config::default(), &dir.path().join("s"));
        let group = cold.group(&(0, "default".into()), 4 << 20).unwrap();
        let (full, handed) = with_keeper(
            &cold.keeper_path,
            |_, _| vec![libc::ENOSPC as u8],
            || {
                *lock(&cold.keeper) = Some(Keeper::connect(&cold.keeper_path).unwrap());
                let attached = attach(&cold, &group);
                *lock(&cold.keeper) = None;
                attached
            },
        )
        .0;
        assert_eq!((full, table_of(&handed)), (Err(Errno(libc::ENOSPC)), 0));
        assert!(lock(&group.clients).is_empty());
        let greeted: Vec<_> = (0..=CLIENTS_PER_PROCESS).map(|_| attach(&cold, &group)).collect();
        let (last, first) = greeted.split_last().unwrap();
        assert!(first.iter().all(|(attached, handed)| attached.is_ok() && table_of(handed) > 0));
        assert_eq!((&last.0, table_of(&last.1)), (&Err(Errno(libc::EUSERS)), 0));
        // What their agents cost is counted when they are gone as well.
        let regions: Vec<u32> = lock(&group.clients).keys().copied().collect();
        for client in lock(&group.clients).values() {
            client.counters.agent_cpu_ns.store(5, std::sync::atomic::Ordering::Relaxed);
        }
        assert_eq!(agents_cpu_ns(&cold), 5 * regions.len() as u64);
        regions.into_iter().for_each(|client_id| group.remove(client_id));
        assert_eq!(agents_cpu_ns(&cold), 5 * CLIENTS_PER_PROCESS as u64);
    }

    #[test]
    fn a_process_that_greets_a_retired_tier_is_told_to_retry() {
        if client::tests::own(uffd::FEATURE_EVENT_REMOVE, 1).is_none() {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let cold = Tiers::new(Config::default(), &dir.path().join("s"));
        let group = cold.group(&(0, "default".into()), 4 << 20).unwrap();
        assert!(cold.groups.retire(&group, std::time::Duration::ZERO));
        let (attached, handed) = attach(&cold, &group);
        assert_eq!((attached, table_of(&handed)), (Err(Errno(libc::EAGAIN)), 0));
        assert!(lock(&group.clients).is_empty());
    }

    /// A daemon that replaces another counts what an agent takes from then on.
    #[test]
    fn what_an_agent_took_before_it_greeted_is_not_counted() {
        if client::tests::own(uffd::FEATURE_EVENT_REMOVE, 1).is_none() {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let cold = Tiers::new(Config::default(), &dir.path().join("s"));
        let group = cold.group(&(0, "default".into()), 4 << 20).unwrap();
        let (attached, _handed) = attach(&cold, &group);
        assert_eq!(attached, Ok(()));
        let client = lock(&group.clients).values().next().cloned().unwrap();
        let counted = |said| {
            client.note_agent_cpu(said);
            agents_cpu_ns(&cold)
        };
        assert_eq!(counted(CPU_BEFORE_NS), 0);
        assert_eq!(counted(CPU_BEFORE_NS + 1), 1);
        group.remove(client.client_id);
    }

    /// The answer to a greeting does not arrive, so the agent greets again, with another descriptor and the same table.
    #[test]
    fn a_client_that_greets_again_is_served_by_its_new_descriptor() {
        if client::tests::own(uffd::FEATURE_EVENT_REMOVE, 1).is_none() {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let cold = Tiers::new(Config::default(), &dir.path().join("s"));
        let group = cold.group(&(0, "default".into()), 4 << 20).unwrap();
        let (mut handed, _map) = client::tests::handed(bare());
        assert_eq!(attach_as(&cold, &group, &handed), Ok(()));
        handed.uffd = bare();
        assert_eq!(attach_as(&cold, &group, &handed), Ok(()));
        let clients: Vec<_> = lock(&group.clients).values().cloned().collect();
        assert_eq!(clients.len(), 1);
        let memory = pagefold_os::mem::Mapping::anonymous(pagefold_os::PAGE_SIZE).unwrap();
        let range = pagefold_os::Range::pages_from(memory.addr(), 1);
        handed.uffd.register(range, uffd::MODE_MISSING).unwrap();
        // No other descriptor may, not even of the same process.
        let registered = clients[0].uffd.register(range, uffd::MODE_MISSING);
        // Else the mapping's end would wait for a reader that a wrong answer says is not there.
        handed.uffd.unregister(range).unwrap();
        assert_eq!(registered, Ok(()));
        group.remove(clients[0].client_id);
    }
}
