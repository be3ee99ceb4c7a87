//! A file tree in memory: names, owners, modes, times and attributes; file bytes only by digest.
//!
//! Every source (directory, tar, OCI layers, our own metadata images) becomes
//! this, and every product (metadata image, tar, listing) is written from it.
//! Nothing here touches a file system, so no name can escape from it.

use crate::digest::Digest;
use crate::error::{Result, input};
use std::collections::BTreeMap;

/// Number of an inode in its tree; the root is 0.
pub type Id = u32;

/// Files up to this many bytes live in the metadata image itself.
///
/// An inline file costs a page of cache per mount, an object one page in all, so
/// inlining pays only where the object's own name (66 bytes) is longer than the file.
pub const INLINE_MAX: u64 = 64;

/// Extended attributes by full name, sorted.
pub type Xattrs = BTreeMap<Box<[u8]>, Box<[u8]>>;

/// What every kind of file has.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Meta {
    /// Permission bits, 0 to 0o7777.
    pub mode: u16,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Seconds since 1970.
    pub mtime_s: i64,
    /// Nanoseconds, below 10^9.
    pub mtime_ns: u32,
    /// Extended attributes.
    pub xattrs: Xattrs,
}

/// Where a file's bytes are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Data {
    /// Here.
    Inline(Box<[u8]>),
    /// In the object of that digest, of that many bytes.
    Object(Digest, u64),
}

impl Data {
    /// The file's size, bytes.
    pub fn size(&self) -> u64 {
        match self {
            Data::Inline(bytes) => bytes.len() as u64,
            Data::Object(_, size) => *size,
        }
    }
}

/// The kinds of file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FileKind {
    /// A directory: names to inodes, without `.` and `..`.
    Dir(BTreeMap<Box<[u8]>, Id>),
    /// A regular file.
    File(Data),
    /// A symbolic link and its target, which may point anywhere or nowhere.
    Symlink(Box<[u8]>),
    /// A character device: major, minor.
    Char(u32, u32),
    /// A block device: major, minor.
    Block(u32, u32),
    /// A named pipe.
    Fifo,
    /// A socket.
    Socket,
}

impl FileKind {
    /// The S_IFMT bits.
    pub fn type_bits(&self) -> u16 {
        (match self {
            FileKind::Dir(_) => libc::S_IFDIR,
            FileKind::File(_) => libc::S_IFREG,
            FileKind::Symlink(_) => libc::S_IFLNK,
            FileKind::Char(..) => libc::S_IFCHR,
            FileKind::Block(..) => libc::S_IFBLK,
            FileKind::Fifo => libc::S_IFIFO,
            FileKind::Socket => libc::S_IFSOCK,
        }) as u16
    }
}

/// A file of any kind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Inode {
    /// Owner, mode, times, attributes.
    pub meta: Meta,
    /// What it is.
    pub kind: FileKind,
}

/// A whole tree; inodes that no name reaches any more are ignored.
#[derive(Clone, Debug)]
pub struct Tree {
    inodes: Vec<Inode>,
    /// Steps taken to resolve paths.
    steps: u64,
}

/// The root's number.
pub const ROOT: Id = 0;

/// Longest file name, bytes: the limit of Linux and of the image format.
const NAME_MAX: usize = 255;
/// Deepest path: deeper ones cannot be opened by path on Linux anyway.
const DEPTH_MAX: usize = 2048;
/// How many symbolic links one path may pass, as in Linux.
const LINKS_MAX: usize = 40;

impl Default for Tree {
    fn default() -> Self {
        let meta = Meta { mode: 0o755, ..Meta::default() };
        Self { inodes: vec![Inode { meta, kind: FileKind::Dir(BTreeMap::new()) }], steps: 0 }
    }
}

impl Tree {
    /// The inode `id`.
    pub fn inode(&self, id: Id) -> &Inode {
        &self.inodes[id as usize]
    }

    /// The inode `id`, to change.
    pub fn inode_mut(&mut self, id: Id) -> &mut Inode {
        &mut self.inodes[id as usize]
    }

    /// The names in directory `id`; empty for anything else.
    pub fn children(&self, id: Id) -> impl Iterator<Item = (&[u8], Id)> {
        let dir = match &self.inode(id).kind {
            FileKind::Dir(names) => Some(names),
            _ => None,
        };
        dir.into_iter().flatten().map(|(name, id)| (&**name, *id))
    }

    /// How many inodes were ever added, reachable or not.
    pub fn inode_count(&self) -> usize {
        self.inodes.len()
    }

    /// How many steps the resolution of all paths so far has taken: names on the way, including those in symbolic links.
    pub fn step_count(&self) -> u64 {
        self.steps
    }

    fn dir(&self, id: Id) -> Option<&BTreeMap<Box<[u8]>, Id>> {
        match &self.inode(id).kind {
            FileKind::Dir(names) => Some(names),
            _ => None,
        }
    }

    fn dir_mut(&mut self, id: Id) -> &mut BTreeMap<Box<[u8]>, Id> {
        match &mut self.inode_mut(id).kind {
            FileKind::Dir(names) => names,
            _ => unreachable!("callers pass directories"),
        }
    }

    /// Adds an inode that has no name yet.
    pub fn add(&mut self, inode: Inode) -> Id {
        self.inodes.push(inode);
        (self.inodes.len() - 1) as Id
    }

    /// Gives inode `id` the name `name` in directory `dir`, replacing the inode that had it.
    ///
    /// # Errors
    /// A name that no file can have; a `dir` that is not a directory.
    pub fn link(&mut self, dir: Id, name: &[u8], id: Id) -> Result<()> {
        check_name(name)?;
        if self.dir(dir).is_none() {
            return Err(input!("{}: its parent is not a directory", show(name)));
        }
        self.dir_mut(dir).insert(name.into(), id);
        Ok(())
    }

    /// The inode under `name` in `dir`.
    pub fn child(&self, dir: Id, name: &[u8]) -> Option<Id> {
        self.dir(dir)?.get(name).copied()
    }

    /// Takes `name` out of `dir`; what was below it is gone with it.
    pub fn unlink(&mut self, dir: Id, name: &[u8]) -> Option<Id> {
        self.dir(dir)?;
        self.dir_mut(dir).remove(name)
    }

    /// Empties directory `dir`.
    pub fn clear(&mut self, dir: Id) {
        if self.dir(dir).is_some() {
            self.dir_mut(dir).clear();
        }
    }

    /// Finds the directory and last name of `path`, following symbolic links inside the tree as a
    /// process rooted there would; missing directories are made when `make` is set.
    ///
    /// # Errors
    /// `..` in the path, names that cannot be, a file where a directory is needed, link loops; a place too deep.
    pub fn resolve_parent(&mut self, path: &[u8], make: bool) -> Result<Option<(Id, Vec<u8>)>> {
        self.resolve_parent_over(path, make, |_, _| false)
    }

    /// The same; a file or link on the way is replaced by a directory if `gives_way` returns true for its directory and
    /// name.
    pub(crate) fn resolve_parent_over(
        &mut self,
        path: &[u8],
        make: bool,
        gives_way: impl Fn(Id, &[u8]) -> bool,
    ) -> Result<Option<(Id, Vec<u8>)>> {
        let mut parts = split(path)?;
        let Some(last) = parts.pop() else { return Ok(None) };
        let too_deep = || input!("{}: deeper than {DEPTH_MAX} directories", show_start(path));
        if parts.len() >= DEPTH_MAX {
            return Err(too_deep());
        }
        let mut todo: Vec<Vec<u8>> = parts.into_iter().rev().map(<[u8]>::to_vec).collect();
        let (mut stack, mut links) = (vec![ROOT], 0);
        while let Some(part) = todo.pop() {
            self.steps += 1;
            let here = *stack.last().expect("root stays");
            if part == b".." {
                // Only a symbolic link's target can bring one; the root's parent is the root.
                if stack.len() > 1 {
                    stack.pop();
                }
                continue;
            }
            // Links can lead a short path this deep.
            if stack.len() >= DEPTH_MAX {
                return Err(too_deep());
            }
            match self.child(here, &part).map(|id| (id, &self.inode(id).kind)) {
                Some((id, FileKind::Dir(_))) => stack.push(id),
                Some((_, FileKind::Symlink(target))) if !(make && gives_way(here, &part)) => {
                    links += 1;
                    if links > LINKS_MAX {
                        return Err(input!("{}: more than {LINKS_MAX} symbolic links on the way", show(path)));
                    }
                    if target.first() == Some(&b'/') {
                        stack.truncate(1);
                    }
                    let steps = target.split(|&byte| byte == b'/').filter(|step| !step.is_empty() && *step != b".");
                    let mut steps: Vec<Vec<u8>> = steps.map(<[u8]>::to_vec).collect();
                    steps.reverse();
                    todo.extend(steps);
                    if todo.len() > DEPTH_MAX {
                        return Err(input!("{}: symbolic links lead too deep", show(path)));
                    }
                }
                found if make && (found.is_none() || gives_way(here, &part)) => {
                    check_name(&part)?;
                    let meta = Meta { mode: 0o755, ..Meta::default() };
                    let id = self.add(Inode { meta, kind: FileKind::Dir(BTreeMap::new()) });
                    self.dir_mut(here).insert(part.into(), id);
                    stack.push(id);
                }
                None => return Ok(None),
                Some(_) if make => {
                    return Err(input!("{}: {} on the way is not a directory", show(path), show(&part)));
                }
                Some(_) => return Ok(None),
            }
        }
        Ok(Some((*stack.last().expect("root stays"), last.to_vec())))
    }

    /// Puts `inode` at `path` as an archive's entry does: directories merge, everything else replaces.
    ///
    /// # Errors
    /// See [`Tree::resolve_parent`].
    pub fn put(&mut self, path: &[u8], inode: Inode) -> Result<Id> {
        let Some((dir, name)) = self.resolve_parent(path, true)? else {
            if matches!(inode.kind, FileKind::Dir(_)) {
                self.inodes[0].meta = inode.meta;
                return Ok(ROOT);
            }
            return Err(input!("the root of the tree must be a directory"));
        };
        self.put_in(dir, &name, inode)
    }

    /// The same for `name` in directory `dir`.
    pub(crate) fn put_in(&mut self, dir: Id, name: &[u8], inode: Inode) -> Result<Id> {
        if let (Some(old), FileKind::Dir(_)) = (self.child(dir, name), &inode.kind)
            && self.dir(old).is_some()
        {
            self.inode_mut(old).meta = inode.meta;
            return Ok(old);
        }
        check_name(name)?;
        let id = self.add(inode);
        self.dir_mut(dir).insert(name.into(), id);
        Ok(id)
    }

    /// Makes `path` another name of the file at `target`.
    ///
    /// # Errors
    /// A target that is not in the tree, or is a directory.
    pub fn put_link(&mut self, path: &[u8], target: &[u8]) -> Result<()> {
        let id = self.link_target(path, target)?;
        let Some((dir, name)) = self.resolve_parent(path, true)? else {
            return Err(input!("the root of the tree must be a directory"));
        };
        self.link(dir, &name, id)
    }

    /// The file that a hard link at `path` to `target` is another name of.
    pub(crate) fn link_target(&mut self, path: &[u8], target: &[u8]) -> Result<Id> {
        let found = self.resolve_parent(target, false)?.and_then(|(dir, name)| self.child(dir, &name));
        found
            .filter(|&id| self.dir(id).is_none())
            .ok_or_else(|| input!("{}: hard link to {}, which is no file of this image", show(path), show(target)))
    }

    /// Finds `path` without following a symbolic link at its end.
    pub fn find(&mut self, path: &[u8]) -> Option<Id> {
        match self.resolve_parent(path, false).ok()? {
            Some((dir, name)) => self.child(dir, &name),
            None => split(path).ok()?.is_empty().then_some(ROOT),
        }
    }

    /// Calls `visit` for every name, parents first and names in byte order, with its path and inode;
    /// the root comes first with an empty path.
    pub fn walk(&self, mut visit: impl FnMut(&[u8], Id)) {
        let mut path = Vec::new();
        visit(&path, ROOT);
        // One path buffer for all: many deep names would be many long paths.
        let mut open = vec![(0, self.children(ROOT))];
        while let Some((length, names)) = open.last_mut() {
            let Some((name, id)) = names.next() else {
                open.pop();
                continue;
            };
            path.truncate(*length);
            if !path.is_empty() {
                path.push(b'/');
            }
            path.extend_from_slice(name);
            visit(&path, id);
            open.push((path.len(), self.children(id)));
        }
    }

    /// A name of inode `id`, for messages.
    pub(crate) fn path_of(&self, id: Id) -> String {
        let mut found = None;
        self.walk(|path, here| {
            if here == id && found.is_none() {
                found = Some(format!("/{}", show(path)));
            }
        });
        found.unwrap_or_default()
    }

    /// Every reachable inode once, the root first, in breadth-first order, and how many names each has.
    pub fn reachable(&self) -> (Vec<Id>, Vec<u32>) {
        let mut names = vec![0u32; self.inodes.len()];
        let mut order = vec![ROOT];
        names[0] = 1;
        let mut next = 0;
        while next < order.len() {
            for (_, child) in self.children(order[next]) {
                names[child as usize] += 1;
                if names[child as usize] == 1 {
                    order.push(child);
                }
            }
            next += 1;
        }
        (order, names)
    }

    /// The objects of the tree, sorted by digest: digest, size in bytes, and how many files (inodes) show it.
    pub fn objects(&self) -> Vec<(Digest, u64, u32)> {
        let mut all: BTreeMap<Digest, (u64, u32)> = BTreeMap::new();
        for id in self.reachable().0 {
            if let FileKind::File(Data::Object(digest, size)) = &self.inode(id).kind {
                all.entry(*digest).or_insert((*size, 0)).1 += 1;
            }
        }
        all.into_iter().map(|(digest, (size, files))| (digest, size, files)).collect()
    }
}

/// Splits a path from an archive into names; `/` at the ends and `.` fall away, and `..` takes back the name before it,
/// as container engines read such a path.
///
/// # Errors
/// A `..` that leads out of the tree.
pub fn split(path: &[u8]) -> Result<Vec<&[u8]>> {
    let mut parts: Vec<&[u8]> = Vec::new();
    for part in path.split(|&byte| byte == b'/').filter(|part| !part.is_empty() && *part != b".") {
        if part != b".." {
            parts.push(part);
        } else if parts.pop().is_none() {
            return Err(input!("{}: a path with .. would leave the tree", show(path)));
        }
    }
    Ok(parts)
}

/// Refuses names that no Linux file can have.
fn check_name(name: &[u8]) -> Result<()> {
    if name.is_empty()
        || name == b"."
        || name == b".."
        || name.len() > NAME_MAX
        || name.iter().any(|b| matches!(b, 0 | b'/'))
    {
        return Err(input!(
            "{:?}: not a file name (1 to {NAME_MAX} bytes, no / and no NUL)",
            show(&name[..name.len().min(300)])
        ));
    }
    Ok(())
}

/// A path for messages: what is not printable is escaped.
pub fn show(path: &[u8]) -> String {
    let mut text = String::new();
    for chunk in path.utf8_chunks() {
        for letter in chunk.valid().chars() {
            if letter.is_control() || letter == '\\' {
                text.extend(letter.escape_default());
            } else {
                text.push(letter);
            }
        }
        for byte in chunk.invalid() {
            text.push_str(&format!("\\x{byte:02x}"));
        }
    }
    text
}

/// The beginning of a path, for messages about long ones.
pub(crate) fn show_start(path: &[u8]) -> String {
    if path.len() <= 200 { show(path) } else { format!("{}…", show(&path[..200])) }
}

/// Drops the attributes that would steer overlayfs instead of describing the file; returns how many.
///
/// A hostile archive could otherwise name another image's object by `trusted.overlay.redirect`.
pub fn drop_overlay_xattrs(xattrs: &mut Xattrs) -> usize {
    let before = xattrs.len();
    xattrs.retain(|name, _| {
        !name.starts_with(b"trusted.overlay.")
            && !name.starts_with(b"user.overlay.")
            && !name.starts_with(b"trusted.erofs.")
    });
    before - xattrs.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(text: &str) -> Inode {
        Inode { meta: Meta::default(), kind: FileKind::File(Data::Inline(text.as_bytes().into())) }
    }

    fn link(target: &str) -> Inode {
        Inode { meta: Meta::default(), kind: FileKind::Symlink(target.as_bytes().into()) }
    }

    #[test]
    fn links_on_the_way_stay_inside() {
        let mut tree = Tree::default();
        tree.put(b"usr/lib/x", file("1")).unwrap();
        tree.put(b"lib", link("usr/lib")).unwrap();
        tree.put(b"up", link("../../../usr")).unwrap();
        let a = tree.put(b"lib/y", file("2")).unwrap();
        let b = tree.put(b"up/lib/z", file("3")).unwrap();
        assert_eq!(tree.find(b"usr/lib/y"), Some(a));
        assert_eq!(tree.find(b"/usr//lib/./z"), Some(b));
        tree.put(b"loop", link("loop")).unwrap();
        assert!(tree.put(b"loop/x", file("")).is_err());
        assert!(tree.put(b"usr/../../etc", file("")).is_err());
        assert!(tree.put(b"usr/lib/x/y", file("")).is_err(), "a file is no directory");
    }

    #[test]
    fn hard_links_must_stay_in_the_image() {
        let mut tree = Tree::default();
        tree.put(b"a", file("1")).unwrap();
        tree.put_link(b"b", b"/a").unwrap();
        assert_eq!(tree.find(b"a"), tree.find(b"b"));
        for outside in [&b"/etc/passwd"[..], b"../a", b"missing", b"", b"/"] {
            assert!(tree.put_link(b"c", outside).is_err(), "{}", show(outside));
        }
    }

    #[test]
    fn directories_merge_and_files_replace() {
        let mut tree = Tree::default();
        tree.put(b"d/x", file("1")).unwrap();
        let dir = Inode { meta: Meta { mode: 0o700, ..Meta::default() }, kind: FileKind::Dir(BTreeMap::new()) };
        tree.put(b"d", dir).unwrap();
        assert!(tree.find(b"d/x").is_some());
        tree.put(b"d", file("now a file")).unwrap();
        assert!(tree.find(b"d/x").is_none());
        let (order, names) = tree.reachable();
        assert_eq!(order.len(), 2);
        assert_eq!(names.iter().sum::<u32>(), 2);
    }

    #[test]
    fn links_lead_no_deeper_than_paths() {
        let (mut tree, steps) = (Tree::default(), "d/".repeat(1000));
        let mut place = Vec::new();
        // Each link is beside the thousand directories that it leads down, at the end of those before.
        for _ in 0..2 {
            tree.put(&[&place[..], steps.as_bytes(), b"f"].concat(), file("")).unwrap();
            tree.put(&[&place[..], b"l"].concat(), link(&steps)).unwrap();
            place.extend(b"l/");
        }
        let before = tree.inode_count();
        tree.put(&[&place[..], b"f/"].concat(), file("")).unwrap();
        let error = tree.put(&[&place[..], b"d/".repeat(48).as_slice(), b"f"].concat(), file("")).unwrap_err();
        assert!(error.to_string().contains("deeper than 2048"), "{error}");
        assert!(tree.inode_count() <= before + 48);
        let mut deepest = 0;
        tree.walk(|path, _| deepest = deepest.max(path.split(|&byte| byte == b'/').count()));
        assert_eq!(deepest, DEPTH_MAX - 1);
    }

    #[test]
    fn a_walk_goes_down_before_it_goes_on() {
        let mut tree = Tree::default();
        for path in [&b"b/y/z"[..], b"a", b"b/x", b"c/y", b"b-"] {
            tree.put(path, file("")).unwrap();
        }
        let mut seen = Vec::new();
        tree.walk(|path, _| seen.push(show(path)));
        assert_eq!(seen, ["", "a", "b", "b/x", "b/y", "b/y/z", "b-", "c", "c/y"]);
    }

    #[test]
    fn a_message_never_carries_control_characters() {
        assert_eq!(show(b"a\n\xff\x1b[2J"), "a\\n\\xff\\u{1b}[2J");
    }
}
