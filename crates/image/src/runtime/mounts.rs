//! Mounts of images, by the mount tables of all namespaces.
//!
//! A mount names its store, domain and image in the mount table: there is no separate record that could go stale. Tables can
//! be written by other users, so a name in them is a claim: it may keep an image that the store has, and do nothing else.

use crate::digest::Digest;
use crate::error::{At, Result};
use crate::in_use::{InUse, in_use};
use crate::link_farm::LinkFarm;
use crate::store::Store;
use pagefold_os::mountinfo::{self, Mount};
use rustix::process::geteuid;
use std::collections::{BTreeSet, HashSet};
use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

/// A mount of an image, as the mount tables show it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, serde::Serialize)]
pub struct MountEntry {
    /// The image.
    pub digest: Digest,
    /// Where.
    pub mountpoint: PathBuf,
    /// The mount's device number; binds of one mount share it.
    pub device: String,
    /// The mount namespace it is seen in, by inode number; 0 where that is hidden.
    pub namespace: u64,
    /// Whether changes are laid over the image.
    pub writable: bool,
    /// Whether it is a native mount: its files have page cache of their own.
    pub native: bool,
}

/// All mounts of a store and domain, in every mount namespace that this process may look into.
#[derive(Clone, Debug, Default)]
pub struct View {
    /// The mounts.
    pub mounts: Vec<MountEntry>,
    /// Processes with an unknown table: they did not answer, or the answer says nothing.
    pub silent: usize,
    /// Whether there may be mounts that no process shows: all processes of some namespace have a part of it as their root
    /// (chroot), a process of this user's in another user namespace hides its own, or this process is in a PID or user
    /// namespace of its own and does not see what happens outside.
    pub partial: bool,
}

/// How long one process's /proc entries may take: a process stuck in the kernel can make them wait with it.
const PROC_PATIENCE: Duration = Duration::from_secs(3);

/// How often the processes are listed at most: a process that ends before it was looked at may have left a child that did
/// not exist yet.
const LISTS: u32 = 8;

/// What a process shows.
enum Look {
    /// The process has ended.
    Gone,
    /// Unknown: some error that says nothing about the process.
    Unknown,
    /// Nothing that matters: a namespace that is known, or one that this user cannot see.
    Nothing,
    /// The process is this user's, and yet its namespace cannot be seen.
    Hidden,
    /// The mount table as seen from the process's root, which is unknown; `hidden` if it may be a part of the whole.
    Denied { hidden: bool, table: Vec<u8> },
    /// The mount table of its namespace; `whole` if the process has the namespace's own root.
    Table { namespace: u64, whole: bool, table: Vec<u8> },
}

/// Looks at a process, unless its namespace is among `seen`.
fn look(pid: &Path, seen: &Mutex<BTreeSet<u64>>) -> Look {
    let look = || -> io::Result<Look> {
        let namespace = fs::metadata(pid.join("ns/mnt"))?.ino();
        if seen.lock().expect("no panic while held").contains(&namespace) {
            return Ok(Look::Nothing);
        }
        let whole = fs::read_link(pid.join("root"))? == Path::new("/");
        let table = fs::read(pid.join("mountinfo"))?;
        if whole {
            seen.lock().expect("no panic while held").insert(namespace);
        }
        Ok(Look::Table { namespace, whole, table })
    };
    look().unwrap_or_else(|error| match error.raw_os_error() {
        Some(libc::EACCES | libc::EPERM) => look_denied(pid),
        other => unseen(other),
    })
}

/// Threads that are, or may be, in another mount namespace than their process, which shows its first thread's: a thread can
/// leave by itself (unshare(2), setns(2)), and can outlive the first.
fn strays(pid: &Path) -> Vec<PathBuf> {
    let tasks = pid.join("task");
    // Each thread is a subdirectory: most processes have one, beside the two links that every directory has.
    if fs::metadata(&tasks).is_ok_and(|meta| meta.nlink() == 3) {
        return Vec::new();
    }
    let namespace = |at: &Path| fs::metadata(at.join("ns/mnt")).map(|meta| meta.ino());
    let own = match namespace(pid) {
        // The threads would show no more than the process.
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => return Vec::new(),
        own => own.ok(),
    };
    let threads = fs::read_dir(&tasks).into_iter().flatten().flatten().map(|entry| entry.path());
    threads.filter(|thread| own.is_none() || namespace(thread).ok() != own).collect()
}

/// What an error says about a process.
fn unseen(errno: Option<i32>) -> Look {
    match errno {
        // EINVAL comes from the mount table of a process that has left its namespace already.
        Some(libc::ENOENT | libc::ESRCH | libc::EINVAL) => Look::Gone,
        _ => Look::Unknown,
    }
}

/// Looks at a process that hides its namespace and root, but usually not its mount table. Every user has such
/// processes: they cannot be dumped, or have one capability more. In this process's user namespace they do not matter:
/// there, only root could have mounted anything.
fn look_denied(pid: &Path) -> Look {
    let me = geteuid();
    let own = match fs::metadata(pid) {
        Ok(meta) => meta.uid() == me.as_raw(),
        Err(error) => return unseen(error.raw_os_error()),
    };
    if !own && !me.is_root() {
        return Look::Nothing;
    }
    let look = || -> io::Result<Look> {
        let elsewhere = fs::read(pid.join("uid_map"))? != fs::read("/proc/self/uid_map")?;
        Ok(Look::Denied { hidden: own && elsewhere, table: fs::read(pid.join("mountinfo"))? })
    };
    look().unwrap_or_else(|error| match error.raw_os_error() {
        Some(libc::EACCES | libc::EPERM) => {
            if own {
                Look::Hidden
            } else {
                Look::Nothing
            }
        }
        other => unseen(other),
    })
}

/// What a look at some processes found.
#[derive(Default)]
struct Looked {
    /// Processes that did not answer.
    silent: Vec<PathBuf>,
    /// Threads to look at by themselves.
    strays: Vec<PathBuf>,
    /// Whether a process had ended.
    gone: bool,
    /// Whether a process of this user's did not show its namespace.
    hidden: bool,
}

/// Looks at `pids` once. Calls `each` with each table, its namespace if that is known, and whether it is the whole table.
fn look_at(
    pids: Vec<PathBuf>,
    seen: &Arc<Mutex<BTreeSet<u64>>>,
    each: &mut impl FnMut(Option<u64>, bool, &[u8]),
) -> Looked {
    let pids = Arc::new(pids);
    let (mut next, mut looked) = (0, Looked::default());
    while next < pids.len() {
        let (sender, answers) = mpsc::channel();
        let (list, known, from) = (pids.clone(), seen.clone(), next);
        // A worker of its own: if a process holds it up, it is left behind and another one goes on.
        std::thread::spawn(move || {
            list[from..].iter().try_for_each(|pid| sender.send((look(pid, &known), strays(pid))))
        });
        while next < pids.len() {
            let answer = answers.recv_timeout(PROC_PATIENCE);
            next += 1;
            let answer = answer.map(|(look, mut strays)| {
                looked.strays.append(&mut strays);
                look
            });
            match answer {
                Ok(Look::Table { namespace, whole, table }) => each(Some(namespace), whole, &table),
                Ok(Look::Denied { hidden, table }) => {
                    looked.hidden |= hidden;
                    each(None, false, &table);
                }
                Ok(Look::Nothing) => {}
                Ok(Look::Hidden) => looked.hidden = true,
                Ok(Look::Gone) => looked.gone = true,
                Ok(Look::Unknown) => looked.silent.push(pids[next - 1].clone()),
                Err(_) => {
                    looked.silent.push(pids[next - 1].clone());
                    break;
                }
            }
        }
    }
    looked
}

/// Calls `each` with the mount tables of all processes that `list` names, as [`look_at`] does. A process is silent if it did
/// not answer in time twice: on a busy machine it may only have been slow, or about to end.
fn each_table(
    mut list: impl FnMut() -> io::Result<Vec<PathBuf>>,
    mut each: impl FnMut(Option<u64>, bool, &[u8]),
) -> io::Result<Looked> {
    let (seen, mut done) = (Arc::new(Mutex::new(BTreeSet::new())), HashSet::new());
    let mut look_at = |pids| {
        let mut looked = look_at(pids, &seen, &mut each);
        let threads = look_at(std::mem::take(&mut looked.strays), &seen, &mut each);
        looked.silent.extend(threads.silent);
        looked.gone |= threads.gone;
        looked.hidden |= threads.hidden;
        looked
    };
    let (mut silent, mut hidden) = (Vec::new(), false);
    for _ in 0..LISTS {
        let new: Vec<PathBuf> = list()?.into_iter().filter(|pid| done.insert(pid.clone())).collect();
        let mut looked = look_at(new);
        silent.append(&mut looked.silent);
        hidden |= looked.hidden;
        if !looked.gone {
            break;
        }
    }
    let mut looked = look_at(silent);
    looked.hidden |= hidden;
    Ok(looked)
}

/// Returns true if /proc has all processes and they show what they have mounted: a PID namespace hides the processes outside
/// of it, and in a user namespace this process has no right to look at those outside.
fn sees_all() -> bool {
    // PID_NS_INIT_INO and USER_NS_INIT_INO of linux/nsfs.h.
    let first =
        |kind: &str, number: u64| fs::metadata(format!("/proc/self/ns/{kind}")).is_ok_and(|ns| ns.ino() == number);
    first("pid", 0xEFFF_FFFC) && first("user", 0xEFFF_FFFD)
}

/// All processes, this one first.
fn processes() -> io::Result<Vec<PathBuf>> {
    let digits = |name: &OsStr| name.as_bytes().iter().all(u8::is_ascii_digit);
    let mut all = vec![PathBuf::from("/proc/self")];
    for entry in fs::read_dir("/proc")? {
        let entry = entry?;
        all.extend(digits(&entry.file_name()).then(|| entry.path()));
    }
    Ok(all)
}

/// The image that a mount names.
fn claimed(mount: &Mount, prefix: &[u8], trees: &Path) -> Option<Digest> {
    let source = mount.source.as_os_str().as_bytes();
    if mount.kind == "overlay" {
        return Digest::from_hex(source.strip_prefix(prefix)?);
    }
    if mount.kind != "erofs" || mount.source.parent()?.canonicalize().ok()? != trees {
        return None;
    }
    Digest::from_hex(mount.source.file_name()?.as_bytes().strip_suffix(b".full.erofs")?)
}

/// What the mount tables show of this store and domain.
///
/// # Errors
/// /proc is not readable.
pub fn view(store: &Store) -> Result<View> {
    let (prefix, trees) = (store.mount_source_prefix(), store.path("trees"));
    let trees = trees.canonicalize().at(&trees)?;
    let (mut found, mut whole, mut parts) = (BTreeSet::new(), BTreeSet::new(), BTreeSet::new());
    let mut nowhere = BTreeSet::new();
    let looked = each_table(processes, |namespace, all, table| {
        if let Some(namespace) = namespace {
            if all { &mut whole } else { &mut parts }.insert(namespace);
        }
        let found = if namespace.is_some() { &mut found } else { &mut nowhere };
        let namespace = namespace.unwrap_or(0);
        for mount in mountinfo::parse(table) {
            let Some(digest) = claimed(&mount, prefix.as_bytes(), &trees) else { continue };
            // An image that the store does not have cannot be mounted from it.
            if store.knows(&digest) {
                let (writable, native) = (mount.has_option("upperdir"), mount.kind == "erofs");
                let (mountpoint, device) = (mount.at, mount.device);
                found.insert(MountEntry { digest, mountpoint, device, namespace, writable, native });
            }
        }
    });
    let looked = looked.at("/proc")?;
    // Most of these mounts are in a namespace that other processes show.
    nowhere.retain(|mount: &MountEntry| {
        !found.iter().any(|known: &MountEntry| MountEntry { namespace: 0, ..known.clone() } == *mount)
    });
    found.append(&mut nowhere);
    let partial = looked.hidden || !parts.is_subset(&whole) || !sees_all();
    Ok(View { mounts: found.into_iter().collect(), silent: looked.silent.len(), partial })
}

/// All mounts of this store and domain, in every mount namespace that this process may look into.
///
/// # Errors
/// /proc is not readable.
pub fn mounts(store: &Store) -> Result<Vec<MountEntry>> {
    Ok(view(store)?.mounts)
}

/// Asks the kernel whether the image's metadata is open elsewhere. Only root is told; other users see their own mounts in
/// the tables.
pub(crate) fn image_in_use(store: &Store, digest: &Digest) -> Result<InUse> {
    let mut all = InUse::No;
    for path in [store.tree_path(digest), LinkFarm::of(store, digest).metadata(), store.full_path(digest)] {
        match in_use(&path)? {
            InUse::Yes => return Ok(InUse::Yes),
            InUse::Unknown => all = InUse::Unknown,
            InUse::No => {}
        }
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{CWD, FileType, Mode};
    use std::os::unix::fs::symlink;

    fn process(at: &Path, namespace: &str, root: &str) -> PathBuf {
        fs::create_dir_all(at.join("ns")).unwrap();
        // A file's inode number stands for the namespace's.
        let of = at.parent().unwrap().join(namespace);
        fs::write(&of, "").unwrap();
        fs::hard_link(of, at.join("ns/mnt")).unwrap();
        symlink(root, at.join("root")).unwrap();
        at.to_path_buf()
    }

    #[test]
    fn a_process_that_does_not_answer_does_not_block_the_others() {
        let dir = tempfile::tempdir().unwrap();
        // A pipe without a writer stands for a /proc entry that waits with its process.
        let stuck = process(&dir.path().join("1"), "a", "/");
        let good = process(&dir.path().join("2"), "b", "/");
        rustix::fs::mknodat(CWD, stuck.join("mountinfo"), FileType::Fifo, Mode::RUSR, 0).unwrap();
        fs::write(good.join("mountinfo"), "table").unwrap();
        let mut tables = Vec::new();
        let silent = each_table(|| Ok(vec![stuck.clone(), good.clone()]), |_, _, table| tables.push(table.to_vec()));
        assert_eq!((silent.unwrap().silent.len(), tables), (1, vec![b"table".to_vec()]));
    }

    #[test]
    fn a_process_that_cannot_be_read_has_not_ended() {
        let dir = tempfile::tempdir().unwrap();
        let process = process(&dir.path().join("1"), "a", "/");
        // A link to itself stands for a lack of memory or descriptors: no answer, and no missing permission.
        symlink("mountinfo", process.join("mountinfo")).unwrap();
        assert_eq!(each_table(|| Ok(vec![process.clone()]), |_, _, _| unreachable!()).unwrap().silent.len(), 1);
        fs::remove_file(process.join("mountinfo")).unwrap();
        assert_eq!(each_table(|| Ok(vec![process.clone()]), |_, _, _| unreachable!()).unwrap().silent.len(), 0);
    }

    #[test]
    fn a_namespace_is_known_by_any_process_with_the_whole_table() {
        let dir = tempfile::tempdir().unwrap();
        let jailed = process(&dir.path().join("1"), "a", "/jail");
        let whole = process(&dir.path().join("2"), "a", "/");
        let third = process(&dir.path().join("3"), "a", "/");
        // This process has ended when it is looked at; its child is listed the next time only.
        let ended = dir.path().join("4");
        let child = process(&dir.path().join("5"), "b", "/");
        for pid in [&jailed, &whole, &third, &child] {
            fs::write(pid.join("mountinfo"), pid.file_name().unwrap().as_bytes()).unwrap();
        }
        let (mut lists, mut tables) = (0, Vec::new());
        let list = || {
            lists += 1;
            let mut all = vec![jailed.clone(), whole.clone(), third.clone(), ended.clone()];
            all.extend((lists > 1).then(|| child.clone()));
            Ok(all)
        };
        let silent = each_table(list, |_, whole, table| tables.push((whole, table.to_vec()))).unwrap().silent;
        assert!(silent.is_empty());
        assert_eq!(tables, [(false, b"1".to_vec()), (true, b"2".to_vec()), (true, b"5".to_vec())]);
    }

    #[test]
    fn a_thread_shows_a_namespace_that_its_process_does_not() {
        let dir = tempfile::tempdir().unwrap();
        let (first, ended) = (process(&dir.path().join("1"), "a", "/"), dir.path().join("2"));
        fs::write(first.join("mountinfo"), "1").unwrap();
        for (thread, namespace) in [("1/task/1", "a"), ("1/task/3", "b"), ("1/task/4", "a"), ("2/task/5", "c")] {
            let at = process(&dir.path().join(thread), &format!("../../{namespace}"), "/");
            fs::write(at.join("mountinfo"), thread).unwrap();
        }
        // The first thread of a process stays as long as others do, and has no namespace any more.
        fs::create_dir_all(ended.join("task/2")).unwrap();
        let mut tables = Vec::new();
        let list = || Ok(vec![first.clone(), ended.clone()]);
        each_table(list, |_, whole, table| tables.push((whole, table.to_vec()))).unwrap();
        assert_eq!(tables, [&b"1"[..], b"1/task/3", b"2/task/5"].map(|table| (true, table.to_vec())));
    }

    #[test]
    fn only_mounts_of_this_store_are_claims() {
        let (hex, trees) = ("ab".repeat(32), tempfile::tempdir().unwrap());
        let at = trees.path().canonicalize().unwrap();
        let table = format!(
            "36 35 0:53 / /mnt/with\\040space ro shared:1 - overlay pagefold:1:default:{hex} ro,lowerdir=x\n\
             37 35 0:54 / /other ro - overlay pagefold:2:default:{hex} ro\n\
             38 35 0:55 / /false ro - tmpfs pagefold:1:default:{hex} ro\n\
             39 35 0:56 / /false ro - tmpfs {0}/{hex}.full.erofs ro\n\
             40 35 0:57 / /false ro - erofs /elsewhere/{hex}.full.erofs ro\n\
             41 35 0:58 / /native ro - erofs {0}/{hex}.full.erofs ro\n\
             42 35 0:59 / /plain rw - ext4 /dev/vda rw\n",
            at.display()
        );
        let claims = mountinfo::parse(table.as_bytes())
            .filter(|mount| claimed(mount, b"pagefold:1:default:", &at).is_some())
            .map(|mount| mount.at);
        assert_eq!(claims.collect::<Vec<_>>(), [Path::new("/mnt/with space"), Path::new("/native")]);
    }
}
