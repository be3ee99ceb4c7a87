//! Children by forks that nobody saw, as long as they lack what their parents had: somebody must hold their descriptors open,
//! or they read zeros there.
//!
//! The keeper has each from before its first page is given until it has the last. Those that are left to wait are held by us
//! and by the keeper for as long as they live. A successor holds them too, and no more: it does not know what they have done to
//! their memory since the fork.

use pagefold_os::sync::lock;
use pagefold_os::uffd::Uffd;
use pagefold_tier::keeper::Keeper;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// The keeper's names of them.
const CHILD: &str = "child:";
/// So many share one of its names, of which clients need theirs.
const BUNDLE_MAX: usize = 200;

/// Those that wait.
pub(crate) struct Orphans {
    keeper: Arc<Mutex<Option<Keeper>>>,
    /// Tells our names from those that a daemon before us gave.
    id: u64,
    count: AtomicU64,
    /// Those that are left to wait, by the keeper's names. Taken behind `keeper`.
    held: Mutex<BTreeMap<String, Vec<Uffd>>>,
}

/// That the keeper has a child, until this is dropped.
pub(crate) struct Kept<'a> {
    orphans: &'a Orphans,
    name: String,
}

impl Drop for Kept<'_> {
    fn drop(&mut self) {
        if let Some(keeper) = lock(&self.orphans.keeper).as_ref() {
            let _ = keeper.forget_soon(&self.name);
        }
    }
}

impl Orphans {
    pub(crate) fn new(keeper: Arc<Mutex<Option<Keeper>>>) -> Orphans {
        Orphans { keeper, id: crate::cold::random(), count: AtomicU64::new(0), held: Mutex::default() }
    }

    fn name(&self) -> String {
        format!("{CHILD}{:x}:{}", self.id, self.count.fetch_add(1, Ordering::Relaxed))
    }

    /// Leaves a child with the keeper. One that does not take it is no reason to leave the child without its pages.
    pub(crate) fn keep(&self, child: &Uffd) -> Kept<'_> {
        let name = self.name();
        if let Some(keeper) = lock(&self.keeper).as_ref() {
            let _ = keeper.put_soon(&name, &[child.fd().raw()]);
        }
        Kept { orphans: self, name }
    }

    /// Has these wait for as long as they live: a process costs a descriptor, which is less than one that greets.
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

    /// Leaves all with a keeper that has none of them.
    pub(crate) fn deposit(&self, keeper: &Keeper) {
        lock(&self.held).iter().for_each(|(name, bundle)| put(keeper, name, bundle));
    }

    /// Holds those that a predecessor left, among what the keeper has under `names`. What cannot be had now stays with it.
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

    /// How many wait; those that have ended are let go, and their names.
    pub(crate) fn count(&self, keeper: Option<&Keeper>) -> usize {
        self.let_go_of_ended(keeper);
        lock(&self.held).values().map(Vec::len).sum()
    }

    /// Lets go of those that have ended, and of their names.
    pub(crate) fn let_go_of_ended(&self, keeper: Option<&Keeper>) {
        prune(keeper, &mut lock(&self.held));
    }

    /// True if the keeper's `name` is that of one.
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

/// Lets go of who has ended.
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
    fn the_keeper_has_who_waits() {
        let Some((client, _memory)) = tests::own(0, 1) else { return };
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("k");
        let act = || {
            let keeper = Keeper::connect(&path).unwrap();
            let orphans = Orphans::new(Arc::new(Mutex::new(Some(keeper))));
            let child = Uffd::from_fd(client.uffd.fd().duplicate().unwrap());
            let kept = orphans.keep(&child);
            orphans.hold(std::iter::once(child));
            drop(kept);
            lock(&orphans.held).values_mut().for_each(|bundle| *bundle = vec![tests::of_who_has_ended()]);
            orphans.count(lock(&orphans.keeper).as_ref())
        };
        let (count, asked) = with_keeper(&path, |_, _| vec![0], act);
        let kinds: Vec<u8> = asked.iter().map(|question| question[0]).collect();
        assert_eq!((count, kinds.as_slice()), (0, &b"PPDD"[..]));
        // The one that was kept first goes first, and the other is never without its name.
        assert!(asked[0][1..] == asked[2][1..] && asked[1][1..] == asked[3][1..] && asked[0] != asked[1]);
    }

    /// However many they are: clients need names as well.
    #[test]
    fn many_share_a_name() {
        let Some((client, _memory)) = tests::own(0, 1) else { return };
        let _ = pagefold_os::fd::raise_limit();
        let orphans = Orphans::new(Arc::default());
        let count = 2 * BUNDLE_MAX + 1;
        for _ in 0..count {
            let Ok(fd) = client.uffd.fd().duplicate() else { return eprintln!("SKIPPED: too few descriptors for us") };
            orphans.hold(std::iter::once(Uffd::from_fd(fd)));
        }
        assert_eq!((orphans.count(None), lock(&orphans.held).len()), (count, 3));
    }
}
