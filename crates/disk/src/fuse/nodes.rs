//! The files that the kernel knows: their node numbers and their names.
//!
//! A file of the directory's own device has its inode number as node number; others get one from a counter. The kernel
//! counts its look-ups and sends a forget; until then the file is found by the names kept here.

use super::DiskFs;
use crate::file::FileKey;
use fuser::INodeNo;
use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::io;
use std::path::PathBuf;

/// A file that the kernel refers to.
pub(super) struct Node {
    /// Parent and name. A file with hard links has several; the one looked up last is at the end.
    pub(super) names: Vec<(u64, OsString)>,
    pub(super) key: FileKey,
    pub(super) lookups: u64,
}

impl Node {
    pub(super) fn add_name(&mut self, parent: INodeNo, name: &OsStr) {
        self.remove_name(parent, name);
        self.names.push((parent.0, name.to_owned()));
    }

    pub(super) fn remove_name(&mut self, parent: INodeNo, name: &OsStr) {
        self.names.retain(|(at, own)| (*at, &**own) != (parent.0, name));
    }
}

/// All nodes, by number and by file.
pub(super) struct Nodes {
    pub(super) by_number: HashMap<u64, Node>,
    pub(super) by_key: HashMap<FileKey, u64>,
    /// For files of other devices: their inode numbers may equal those of the directory's device.
    pub(super) next_foreign: u64,
    pub(super) root: FileKey,
}

pub(super) const ROOT: u64 = 1;
/// Node numbers of files of other devices are greater than this.
const FIRST_FOREIGN: u64 = 1 << 62;

impl Nodes {
    pub(super) fn number(&mut self, key: FileKey) -> u64 {
        if let Some(&number) = self.by_key.get(&key) {
            return number;
        }
        let number = if key == self.root {
            ROOT
        } else if key.0 == self.root.0 && key.1 > ROOT && key.1 < FIRST_FOREIGN {
            key.1
        } else {
            self.next_foreign += 1;
            FIRST_FOREIGN + self.next_foreign
        };
        self.by_key.insert(key, number);
        number
    }

    fn path(&self, number: u64) -> Option<PathBuf> {
        let mut names = Vec::new();
        let mut at = number;
        while at != ROOT {
            let (parent, name) = self.by_number.get(&at)?.names.last()?;
            names.push(name);
            at = *parent;
            if names.len() > 4096 {
                return None;
            }
        }
        let path: PathBuf = names.into_iter().rev().collect();
        Some(if path.as_os_str().is_empty() { PathBuf::from(".") } else { path })
    }
}

impl DiskFs {
    pub(super) fn path(&self, number: INodeNo) -> io::Result<PathBuf> {
        self.nodes.read().path(number.0).ok_or_else(|| io::Error::from_raw_os_error(libc::ESTALE))
    }

    pub(super) fn child(&self, parent: INodeNo, name: &OsStr) -> io::Result<PathBuf> {
        // Not `./name` in the root, because images are named by their paths.
        Ok(if parent.0 == ROOT { PathBuf::from(name) } else { self.path(parent)?.join(name) })
    }

    pub(super) fn key(&self, number: INodeNo) -> Option<FileKey> {
        self.nodes.read().by_number.get(&number.0).map(|node| node.key)
    }

    pub(super) fn forget_number(&self, number: u64, count: u64) {
        let mut nodes = self.nodes.write();
        if let Some(node) = nodes.by_number.get_mut(&number) {
            node.lookups = node.lookups.saturating_sub(count);
            if node.lookups == 0 {
                let key = node.key;
                nodes.by_number.remove(&number);
                nodes.by_key.remove(&key);
            }
        }
    }
}
