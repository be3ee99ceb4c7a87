//! Children of forks that their agent did not see, as long as they lack pages of their parents. A child reads zeros in place
//! of those pages as soon as no process holds its userfaultfd open.
//!
//! The keeper holds each child's descriptor from before its first page is copied until it has the last. Children that are
//! left to wait are held by the daemon and the keeper for as long as they live. A successor only holds them too: it does not
//! know what they have done to their memory since the fork.

use crate::cold::random_id::random_id;
use pagefold_os::sync::lock;
use pagefold_os::uffd::Uffd;
use pagefold_tier::keeper::Keeper;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// First word of their names at the keeper.
const CHILD: &str = "child:";
/// Most children under one of the keeper's names: clients need names as well.
const BUNDLE_MAX: usize = 200;

/// The children that wait.
pub(crate) struct PendingChildren {
    keeper: Arc<Mutex<Option<Keeper>>>,
    /// Tells our names from those that a daemon before us gave.
    id: u64,
    count: AtomicU64,
    /// The children that are left to wait, by the keeper's names. Locked after `keeper`.
    held: Mutex<BTreeMap<String, Vec<Uffd>>>,
}

/// The keeper holds a child until this is dropped.
pub(crate) struct Kept<'a> {
    pending_children: &'a PendingChildren,
    name: String,
}

impl Drop for Kept<'_> {
    fn drop(&mut self) {
        if let Some(keeper) = lock(&self.pending_children.keeper).as_ref() {
            let _ = keeper.forget_soon(&self.name);
        }
    }
}

impl PendingChildren {
    pub(crate) fn new(keeper: Arc<Mutex<Option<Keeper>>>) -> PendingChildren {
        PendingChildren { keeper, id: random_id(), count: AtomicU64::new(0), held: Mutex::default() }
    }

    fn name(&self) -> String {
        format!("{CHILD}{:x}:{}", self.id, self.count.fetch_add(1, Ordering::Relaxed))
    }

    /// Leaves a child with the keeper. If the keeper does not take it, the child still gets its pages.
    pub(crate) fn keep(&self, child: &Uffd) -> Kept<'_> {
        let name = self.name();
        if let Some(keeper) = lock(&self.keeper).as_ref() {
            let _ = keeper.put_soon(&name, &[child.fd().raw()]);
        }
        Kept { pending_children: self, name }
    }

    /// Has these children wait for as long as they live. Each costs a descriptor, which is less than a client costs.
    pub(crate) fn hold(&self, children: impl Iterator<Item = Uffd>) {
        let keeper = lock(&self.keeper);
        let mut held = lock(&self.held);
        prune(keeper.as_ref(), &mut held);
        let mut changed = BTreeSet::new();
        for child in children.filter(Uffd::is_alive) {
            let with_room = held.iter().find(|(_, bundle)| bundle.len() < BUNDLE_MAX);
            let name = with_room.map_or_else(|| self.name(), |(name, _)| name.clone());
            held.entry(name.clone()).or_default().push(child);
            changed.insert(name);
        }
        if let Some(keeper) = keeper.as_ref() {
            changed.iter().for_each(|name| put(keeper, name, &held[name]));
        }
    }

    /// Leaves all children with a new keeper.
    pub(crate) fn deposit(&self, keeper: &Keeper) {
        lock(&self.held).iter().for_each(|(name, bundle)| put(keeper, name, bundle));
    }

    /// Holds the children that a predecessor left, among the keeper's `names`. One that it cannot give now stays with it.
    pub(crate) fn adopt(&self, keeper: &Keeper, names: &[String]) {
        let mut held = lock(&self.held);
        for name in names.iter().filter(|name| name.starts_with(CHILD)) {
            if let Ok(fds) = keeper.get(name) {
                held.insert(name.clone(), fds.into_iter().map(Uffd::from_fd).filter(Uffd::is_one).collect());
            }
        }
        prune(Some(keeper), &mut held);
        let count: usize = held.values().map(Vec::len).sum();
        if count > 0 {
            eprintln!("pagefold: {count} children of an earlier daemon's clients are left to wait for their pages");
        }
    }

    /// How many wait; children that have ended are dropped first, with their names.
    pub(crate) fn count(&self, keeper: Option<&Keeper>) -> usize {
        self.drop_ended(keeper);
        lock(&self.held).values().map(Vec::len).sum()
    }

    /// Drops children that have ended, and their names.
    pub(crate) fn drop_ended(&self, keeper: Option<&Keeper>) {
        prune(keeper, &mut lock(&self.held));
    }

    /// True if the keeper's `name` is that of children.
    pub(crate) fn is_name(name: &str) -> bool {
        name.starts_with(CHILD)
    }
}

fn put(keeper: &Keeper, name: &str, bundle: &[Uffd]) {
    let fds: Vec<i32> = bundle.iter().map(|child| child.fd().raw()).collect();
    if let Err(error) = keeper.put(name, &fds) {
        eprintln!(
            "pagefold: the keeper does not take {} children that wait ({error}): they wait while we live",
            fds.len()
        );
    }
}

/// Drops children that have ended.
fn prune(keeper: Option<&Keeper>, held: &mut BTreeMap<String, Vec<Uffd>>) {
    held.retain(|name, bundle| {
        bundle.retain(Uffd::is_alive);
        if let Some(keeper) = keeper.filter(|_| bundle.is_empty()) {
            let _ = keeper.forget(name);
        }
        !bundle.is_empty()
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cold::client::tests;
    use crate::cold::handover::keeper::tests::with_keeper;

    /// From before it is given its pages until it has ended.
    #[test]
    fn the_keeper_holds_children_that_wait() {
        let Some((client, _memory)) = tests::own(0, 1) else { return };
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("k");
        let act = || {
            let keeper = Keeper::connect(&path).unwrap();
            let pending_children = PendingChildren::new(Arc::new(Mutex::new(Some(keeper))));
            let child = Uffd::from_fd(client.uffd.fd().duplicate().unwrap());
            let kept = pending_children.keep(&child);
            pending_children.hold(std::iter::once(child));
            drop(kept);
            lock(&pending_children.held).values_mut().for_each(|bundle| *bundle = vec![tests::of_an_ended_process()]);
            pending_children.count(lock(&pending_children.keeper).as_ref())
        };
        let (count, asked) = with_keeper(&path, |_, _| vec![0], act);
        let kinds: Vec<u8> = asked.iter().map(|question| question[0]).collect();
        assert_eq!((count, kinds.as_slice()), (0, &b"PPDD"[..]));
        // The first entry goes first, and the child is never without an entry.
        assert!(asked[0][1..] == asked[2][1..] && asked[1][1..] == asked[3][1..] && asked[0] != asked[1]);
    }

    /// Clients need names as well.
    #[test]
    fn many_children_share_a_name() {
        let Some((client, _memory)) = tests::own(0, 1) else { return };
        let _ = pagefold_os::fd::raise_limit();
        let pending_children = PendingChildren::new(Arc::default());
        let count = 2 * BUNDLE_MAX + 1;
        for _ in 0..count {
            let Ok(fd) = client.uffd.fd().duplicate() else { return eprintln!("SKIPPED: too few descriptors for us") };
            pending_children.hold(std::iter::once(Uffd::from_fd(fd)));
        }
        assert_eq!((pending_children.count(None), lock(&pending_children.held).len()), (count, 3));
    }
}
