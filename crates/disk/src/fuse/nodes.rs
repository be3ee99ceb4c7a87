//! The files that the kernel knows: their node numbers and their names.
//!
//! A file of the directory's own device has its inode number as node number; others get one from a counter. The kernel
//! counts its look-ups and sends a forget; until then the file is found by the names kept here.

use crate::file::FileKey;
use fuser::{FileType, INodeNo};
use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
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

    pub(super) fn path(&self, number: u64) -> Option<PathBuf> {
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

/// One entry of a directory, as read when it was opened.
pub(super) struct DirEntry {
    pub(super) number: u64,
    pub(super) kind: FileType,
    pub(super) name: OsString,
}
