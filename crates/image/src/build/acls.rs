//! Access control lists of an archive's entries: kept as Linux's attributes. Where a list cannot be kept, the file's mode
//! grants no user more than the list did.

use super::omissions::Omissions;
use crate::format::acl::{ACCESS, Acl, DEFAULT, Names};
use crate::format::tar::{Acls, EntryKind};
use crate::tree::{Id, Meta, Tree, show_start};
use std::collections::HashMap;

/// Why a list is left out.
const NOT_OF_LINUX: &str = "access control lists that Linux cannot have (users or groups with names alone, no mask) were left \
                            out, and modes narrowed; tar --numeric-owner packs numbers";
const NO_LIST: &str = "attributes that are no access control lists were left out, and modes narrowed";

/// Lists with names that no entry so far has a number for, by inode, each with a path for messages.
#[derive(Default)]
pub(super) struct Unresolved(HashMap<Id, (String, Acls)>);

impl Unresolved {
    /// Notes that inode `id` has new metadata, and lists that wait for numbers, if any.
    pub(super) fn set(&mut self, id: Id, path: &[u8], lists: Option<Acls>) {
        match lists {
            Some(lists) => drop(self.0.insert(id, (show_start(path), lists))),
            None if self.0.is_empty() => {}
            None => drop(self.0.remove(&id)),
        }
    }

    /// Gives the lists to the inodes, now that all names of the archive are known.
    pub(super) fn resolve(self, tree: &mut Tree, names: &Names, omissions: &mut Omissions) {
        let mut all: Vec<_> = self.0.into_iter().collect();
        all.sort_unstable_by_key(|(id, _)| *id);
        for (id, (path, lists)) in all {
            let meta = &mut tree.inode_mut(id).meta;
            if !set_access(meta, lists.access.as_ref(), names) | !set_default(meta, lists.default.as_ref(), names) {
                omissions.add(NOT_OF_LINUX, path.as_bytes());
            }
            super::omissions::clean_xattrs(&mut meta.xattrs, path.as_bytes(), omissions);
        }
    }
}

/// Sets the attributes and mode that the lists of an entry ask for. Returns the lists that wait for numbers of their names;
/// until they have them, the mode is narrow.
pub(super) fn set_acls(
    meta: &mut Meta,
    kind: &EntryKind,
    path: &[u8],
    acls: Acls,
    names: &Names,
    omissions: &mut Omissions,
) -> Option<Acls> {
    // In Linux links have no lists, and only directories have those for new files.
    let (has_access, has_default) = (!matches!(kind, EntryKind::Symlink(_)), *kind == EntryKind::Dir);
    let (access, default) = (meta.xattrs.remove(ACCESS), meta.xattrs.remove(DEFAULT));
    let mut lists = Acls { access: acls.access.filter(|_| has_access), default: acls.default.filter(|_| has_default) };
    if let (None, true, Some(value)) = (&lists.access, has_access, access) {
        lists.access = Acl::from_attribute(&value);
        if lists.access.is_none() {
            // The mode may have the mask of a list.
            meta.mode &= !0o070;
            omissions.add(NO_LIST, path);
        }
    }
    if let (None, true, Some(value)) = (&lists.default, has_default, default) {
        lists.default = Acl::from_attribute(&value);
        if lists.default.is_none() {
            omissions.add(NO_LIST, path);
        }
    }
    let kept = set_access(meta, lists.access.as_ref(), names) & set_default(meta, lists.default.as_ref(), names);
    (!kept).then_some(lists)
}

/// Returns false if the list cannot be kept.
fn set_access(meta: &mut Meta, list: Option<&Acl>, names: &Names) -> bool {
    let Some(list) = list else { return true };
    let with_bits = |bits| meta.mode & 0o7000 | bits;
    let Some((list, value)) = resolved(list, names) else {
        meta.mode = with_bits(list.narrow_mode());
        return false;
    };
    meta.mode = with_bits(list.mode());
    // Linux keeps no list that the mode says in full.
    if !list.is_plain() {
        meta.xattrs.insert(ACCESS.into(), value);
    }
    true
}

/// The same for the list that new files get.
fn set_default(meta: &mut Meta, list: Option<&Acl>, names: &Names) -> bool {
    let Some(list) = list else { return true };
    let found = resolved(list, names);
    let is_kept = found.is_some();
    let narrow = || list.narrow().to_attribute().expect("a list without names");
    meta.xattrs.insert(DEFAULT.into(), found.map_or_else(narrow, |(_, value)| value));
    is_kept
}

/// The list with numbers, and its attribute.
fn resolved(list: &Acl, names: &Names) -> Option<(Acl, Box<[u8]>)> {
    let list = list.resolved(names)?;
    let value = list.to_attribute()?;
    Some((list, value))
}
