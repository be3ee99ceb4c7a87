//! POSIX access control lists: the text that archives have, the attribute that Linux has, and the mode that a list stands
//! for.
//!
//! A file with a list shows the list's mask in its mode, in the place of the owning group's permission. Where the list is
//! lost and the mode stays, the group has more than it was given: [`Acl::narrow_mode`] is the mode that grants no user more.

use std::collections::HashMap;

/// The attribute that holds a file's list.
pub(crate) const ACCESS: &[u8] = b"system.posix_acl_access";

/// The attribute that holds the list that new files in a directory get.
pub(crate) const DEFAULT: &[u8] = b"system.posix_acl_default";

/// Version of the attribute's form.
const VERSION: u32 = 2;
/// Bytes of one entry of the attribute.
const ENTRY_BYTES: usize = 8;
/// The number of an entry that is for no user or group of its own.
const NO_ID: u32 = u32::MAX;
/// Most entries that an attribute of 64 KiB can hold.
const ENTRIES_MAX: usize = (u16::MAX as usize - 4) / ENTRY_BYTES;

/// The kinds of entries, numbered as in the attribute.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Tag {
    Owner = 1,
    User = 2,
    OwningGroup = 4,
    Group = 8,
    Mask = 16,
    Other = 32,
}

/// The user or group that an entry is for.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Qualifier {
    Absent,
    Id(u32),
    Name(Box<[u8]>),
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct AclEntry {
    tag: Tag,
    qualifier: Qualifier,
    permissions: u8,
}

/// A whole list, in the order of the attribute.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Acl(Vec<AclEntry>);

/// The mode of a file that cannot have the attribute `name`: without its access control list the mask in the mode would be
/// the owning group's permission.
pub(crate) fn mode_without(name: &[u8], value: &[u8], mode: u16) -> u16 {
    match Acl::from_attribute(value) {
        Some(list) if name == ACCESS => mode & 0o7000 | list.narrow_mode(),
        _ => mode,
    }
}

impl Acl {
    /// Reads a list in its text form: entries `tag:name:permissions`, between commas or line ends. Some archivers put the
    /// number of a named user or group behind. `None` for anything else, and for a list without the three entries of a mode.
    pub(crate) fn parse(text: &[u8]) -> Option<Self> {
        let mut entries = Vec::new();
        for line in text.split(|&byte| byte == b'\n') {
            let line = line.split(|&byte| byte == b'#').next()?;
            for item in line.split(|&byte| byte == b',').map(<[u8]>::trim_ascii).filter(|item| !item.is_empty()) {
                if entries.len() == ENTRIES_MAX {
                    return None;
                }
                entries.push(entry(item)?);
            }
        }
        entries.sort();
        let list = Self(entries);
        [Tag::Owner, Tag::OwningGroup, Tag::Other].into_iter().all(|tag| list.count(tag) == 1).then_some(list)
    }

    fn count(&self, tag: Tag) -> usize {
        self.0.iter().filter(|entry| entry.tag == tag).count()
    }

    /// Reads the value of an attribute.
    pub(crate) fn from_attribute(value: &[u8]) -> Option<Self> {
        let (version, rest) = value.split_first_chunk()?;
        let (entries, odd) = rest.as_chunks::<ENTRY_BYTES>();
        if u32::from_le_bytes(*version) != VERSION || !odd.is_empty() || entries.len() > ENTRIES_MAX {
            return None;
        }
        let entry = |&[t0, t1, p0, p1, i0, i1, i2, i3]: &[u8; ENTRY_BYTES]| {
            let tag = match u16::from_le_bytes([t0, t1]) {
                1 => Tag::Owner,
                2 => Tag::User,
                4 => Tag::OwningGroup,
                8 => Tag::Group,
                16 => Tag::Mask,
                32 => Tag::Other,
                _ => return None,
            };
            let id = u32::from_le_bytes([i0, i1, i2, i3]);
            let qualifier = if matches!(tag, Tag::User | Tag::Group) { Qualifier::Id(id) } else { Qualifier::Absent };
            let permissions = u8::try_from(u16::from_le_bytes([p0, p1])).ok().filter(|bits| *bits <= 7)?;
            Some(AclEntry { tag, qualifier, permissions })
        };
        Self(entries.iter().map(entry).collect::<Option<_>>()?).checked()
    }

    /// Sorts the entries. `None` if there are not one for the owner, the owning group and others, at most one for each user
    /// and group, and a mask where users or groups are named.
    fn checked(mut self) -> Option<Self> {
        self.0.sort();
        let named = self.count(Tag::User) + self.count(Tag::Group) > 0;
        let whole = [Tag::Owner, Tag::OwningGroup, Tag::Other].into_iter().all(|tag| self.count(tag) == 1);
        let masked = self.count(Tag::Mask) == 1 || self.count(Tag::Mask) == 0 && !named;
        let twice =
            self.0.windows(2).any(|pair| (pair[0].tag, &pair[0].qualifier) == (pair[1].tag, &pair[1].qualifier));
        let no_id = self.0.iter().any(|entry| entry.qualifier == Qualifier::Id(NO_ID));
        (whole && masked && !twice && !no_id).then_some(self)
    }

    /// The value of the attribute; `None` while a user or group has only a name.
    pub(crate) fn to_attribute(&self) -> Option<Box<[u8]>> {
        let mut value = VERSION.to_le_bytes().to_vec();
        for entry in &self.0 {
            let id = match &entry.qualifier {
                Qualifier::Absent => NO_ID,
                Qualifier::Id(id) => *id,
                Qualifier::Name(_) => return None,
            };
            value.extend((entry.tag as u16).to_le_bytes());
            value.extend(u16::from(entry.permissions).to_le_bytes());
            value.extend(id.to_le_bytes());
        }
        Some(value.into())
    }

    /// The text form, which GNU tar, bsdtar and star read.
    pub(crate) fn text(&self) -> Vec<u8> {
        let mut text = Vec::new();
        for entry in &self.0 {
            if !text.is_empty() {
                text.push(b',');
            }
            text.extend(match entry.tag {
                Tag::Owner | Tag::User => &b"user:"[..],
                Tag::OwningGroup | Tag::Group => b"group:",
                Tag::Mask => b"mask:",
                Tag::Other => b"other:",
            });
            match &entry.qualifier {
                Qualifier::Absent => {}
                Qualifier::Id(id) => text.extend(id.to_string().bytes()),
                Qualifier::Name(name) => text.extend(&name[..]),
            }
            text.push(b':');
            let letter = |bit, letter| if entry.permissions & bit != 0 { letter } else { b'-' };
            text.extend([letter(4, b'r'), letter(2, b'w'), letter(1, b'x')]);
        }
        text
    }

    /// The list with a number for each name. `None` if `names` lacks one, and for a list that Linux would refuse: two
    /// entries for one user, or no mask.
    pub(crate) fn resolved(&self, names: &Names) -> Option<Self> {
        let entry = |entry: &AclEntry| {
            let qualifier = match (&entry.qualifier, entry.tag) {
                (Qualifier::Name(name), Tag::User) => Qualifier::Id(find(&names.users, name)?),
                (Qualifier::Name(name), _) => Qualifier::Id(find(&names.groups, name)?),
                (known, _) => known.clone(),
            };
            Some(AclEntry { qualifier, ..entry.clone() })
        };
        Self(self.0.iter().map(entry).collect::<Option<_>>()?).checked()
    }

    /// Returns true if the list says no more than a mode does.
    pub(crate) fn is_plain(&self) -> bool {
        self.0.len() == 3
    }

    fn permissions(&self, tag: Tag) -> u16 {
        self.0.iter().filter(|entry| entry.tag == tag).fold(7, |all, entry| all & u16::from(entry.permissions))
    }

    /// The permission bits that Linux shows for a file with this list.
    pub(crate) fn mode(&self) -> u16 {
        let has_mask = self.0.iter().any(|entry| entry.tag == Tag::Mask);
        let group = self.permissions(if has_mask { Tag::Mask } else { Tag::OwningGroup });
        self.permissions(Tag::Owner) << 6 | group << 3 | self.permissions(Tag::Other)
    }

    /// The permission bits that give each user at most what the list gives. Where the entry of a named
    /// user or group is lost, the kernel counts that one to the owning group or to the others. So these get no more than any
    /// of them.
    pub(crate) fn narrow_mode(&self) -> u16 {
        let mask = self.permissions(Tag::Mask);
        let named = |tag| if self.0.iter().any(|entry| entry.tag == tag) { self.permissions(tag) & mask } else { 7 };
        let group = self.permissions(Tag::OwningGroup) & mask & named(Tag::User);
        let other = self.permissions(Tag::Other) & named(Tag::User) & named(Tag::Group);
        self.permissions(Tag::Owner) << 6 | group << 3 | other
    }

    /// The list of the three entries that say what [`Acl::narrow_mode`] does.
    pub(crate) fn narrow(&self) -> Self {
        let bits = self.narrow_mode();
        let entry =
            |tag, shift: u16| AclEntry { tag, qualifier: Qualifier::Absent, permissions: (bits >> shift & 7) as u8 };
        Self(vec![entry(Tag::Owner, 6), entry(Tag::OwningGroup, 3), entry(Tag::Other, 0)])
    }

    /// About how many bytes of memory the list takes.
    pub(crate) fn memory_bytes(&self) -> usize {
        let name = |qualifier: &Qualifier| if let Qualifier::Name(name) = qualifier { name.len() } else { 0 };
        self.0.iter().map(|entry| size_of::<AclEntry>() + name(&entry.qualifier)).sum()
    }
}

/// Reads one entry of the text form.
fn entry(item: &[u8]) -> Option<AclEntry> {
    let mut parts: Vec<&[u8]> = item.split(|&byte| byte == b':').map(<[u8]>::trim_ascii).collect();
    if matches!(parts[0], b"default" | b"d") {
        parts.remove(0);
    }
    let is_user = match *parts.first()? {
        b"user" | b"u" => true,
        b"group" | b"g" => false,
        word => {
            let tag = match word {
                b"mask" | b"m" => Tag::Mask,
                b"other" | b"o" => Tag::Other,
                _ => return None,
            };
            // Solaris writes one colon.
            let ([_, b"", bits] | [_, bits]) = parts[..] else { return None };
            return Some(AclEntry { tag, qualifier: Qualifier::Absent, permissions: permissions(bits)? });
        }
    };
    let (name, bits, id) = match parts[..] {
        [_, name, bits] => (name, bits, None),
        [_, name, bits, id] => (name, bits, Some(number(id)?)),
        _ => return None,
    };
    let permissions = permissions(bits)?;
    if name.is_empty() {
        let tag = if is_user { Tag::Owner } else { Tag::OwningGroup };
        return id.is_none().then_some(AclEntry { tag, qualifier: Qualifier::Absent, permissions });
    }
    let qualifier = match number(name).or(id) {
        Some(id) => Qualifier::Id(id),
        None => Qualifier::Name(unescaped(name).into()),
    };
    Some(AclEntry { tag: if is_user { Tag::User } else { Tag::Group }, qualifier, permissions })
}

fn number(digits: &[u8]) -> Option<u32> {
    let all_digits = !digits.is_empty() && digits.iter().all(u8::is_ascii_digit);
    std::str::from_utf8(digits).ok().filter(|_| all_digits)?.parse().ok()
}

/// Reads `rwx`, with `-` for each permission that is not given.
fn permissions(letters: &[u8]) -> Option<u8> {
    if letters.is_empty() || letters.len() > 3 {
        return None;
    }
    letters.iter().try_fold(0, |bits, letter| match letter {
        b'r' => Some(bits | 4),
        b'w' => Some(bits | 2),
        b'x' => Some(bits | 1),
        b'-' => Some(bits),
        _ => None,
    })
}

/// Reads `\072` and the like, which stand for bytes that separate entries.
fn unescaped(mut name: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(name.len());
    while let Some((&first, rest)) = name.split_first() {
        match rest {
            [a @ b'0'..=b'3', b @ b'0'..=b'7', c @ b'0'..=b'7', rest @ ..] if first == b'\\' => {
                out.push((a - b'0') << 6 | (b - b'0') << 3 | (c - b'0'));
                name = rest;
            }
            _ => {
                out.push(first);
                name = rest;
            }
        }
    }
    out
}

/// The users and groups that an archive's headers have both names and numbers for.
#[derive(Default)]
pub(crate) struct Names {
    users: HashMap<Box<[u8]>, Option<u32>>,
    groups: HashMap<Box<[u8]>, Option<u32>>,
}

impl Names {
    /// Notes that the user `name` has the number `id`. Returns how many bytes of memory that took.
    pub(crate) fn add_user(&mut self, name: &[u8], id: u32) -> usize {
        add(&mut self.users, name, id)
    }

    /// Notes that the group `name` has the number `id`. Returns how many bytes of memory that took.
    pub(crate) fn add_group(&mut self, name: &[u8], id: u32) -> usize {
        add(&mut self.groups, name, id)
    }
}

fn add(names: &mut HashMap<Box<[u8]>, Option<u32>>, name: &[u8], id: u32) -> usize {
    match names.get_mut(name) {
        // A name with two numbers says nothing.
        Some(known) => {
            *known = known.filter(|known| *known == id);
            0
        }
        None => {
            names.insert(name.into(), Some(id));
            name.len()
        }
    }
}

fn find(names: &HashMap<Box<[u8]>, Option<u32>>, name: &[u8]) -> Option<u32> {
    match names.get(name) {
        Some(id) => *id,
        None => (name == b"root").then_some(0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(acl: &Acl) -> String {
        String::from_utf8(acl.text()).unwrap()
    }

    #[test]
    fn a_file_without_its_list_has_a_narrow_mode() {
        let list = Acl::parse(b"user::rw-,user:1:rwx,group::r--,mask::rwx,other::---").unwrap().to_attribute().unwrap();
        assert_eq!(mode_without(ACCESS, &list, 0o4670), 0o4640);
        assert_eq!(mode_without(DEFAULT, &list, 0o670), 0o670);
        assert_eq!(mode_without(b"user.a", b"1", 0o670), 0o670);
    }

    #[test]
    fn lists_are_read_as_archivers_write_them() {
        let plain = "user::rw-,user:1234:rwx,group::r--,group:7:r-x,mask::rwx,other::r--";
        for written in [
            plain,
            // GNU tar, star and bsdtar, Solaris, and by hand.
            "user::rw-\nuser:1234:rwx\ngroup::r--\ngroup:7:r-x\nmask::rwx\nother::r--\n",
            "user::rw-,user:joe:rwx:1234,group::r--,group:staff:r-x:7,mask::rwx,other::r--",
            "user::rw-,user:1234:rwx,group::r--,group:7:r-x,mask:rwx,other:r--",
            " other::r # all others\n u::rw, m::rwx, g:7:xr, u:1234:rwx, g::r",
            "default:user::rw-,default:user:1234:rwx,d:group::r--,group:7:r-x,mask::rwx,other::r--",
        ] {
            let found = Acl::parse(written.as_bytes()).unwrap_or_else(|| panic!("{written}"));
            assert_eq!((text(&found), found.resolved(&Names::default())), (plain.to_string(), Some(found.clone())));
            let attribute = found.to_attribute().unwrap();
            assert_eq!(attribute.len(), 4 + 6 * ENTRY_BYTES);
            assert_eq!(Acl::from_attribute(&attribute), Some(found));
        }
        let expected = [2, 0, 0, 0, 1, 0, 6, 0, 255, 255, 255, 255, 4, 0, 4, 0, 255, 255, 255, 255, 32, 0, 0, 0];
        let attribute = Acl::parse(b"user::rw-,group::r--,other::---").unwrap().to_attribute().unwrap();
        assert_eq!(attribute[..24], expected);
    }

    #[test]
    fn what_linux_would_refuse_is_no_list() {
        for bad in [
            "",
            "user::rw-,group::r--",
            "user::rw-,group::r--,other::r--,other::r--",
            "user::rw-,group::r--,other::r-y",
            "user::rw-,group::r--,other::",
            "user::rw-,group::r--,other:1:r--",
            "user::rw-,group::r--,other::r--,everyone@:r:allow",
            "user::rw-:5,group::r--,other::r--",
        ] {
            assert_eq!(Acl::parse(bad.as_bytes()), None, "{bad}");
        }
        for bad in [
            // libarchive writes lists without a mask.
            "user::rw-,user:1:r--,group::r--,other::r--",
            "user::rw-,user:1:r--,user:01:rw-,group::r--,mask::r--,other::r--",
            "user::rw-,group::r--,mask::r--,mask::rw-,other::r--",
            "user::rw-,user:4294967295:r--,group::r--,mask::r--,other::r--",
        ] {
            assert_eq!(Acl::parse(bad.as_bytes()).unwrap().resolved(&Names::default()), None, "{bad}");
        }
        let good = Acl::parse(b"user::rw-,user:5:r--,group::r--,mask::r--,other::r--").unwrap().to_attribute().unwrap();
        for (at, value) in [(0, 3), (4, 3), (6, 8), (7, 1), (4, 2)] {
            let mut bad = good.clone();
            bad[at] = value;
            assert_eq!(Acl::from_attribute(&bad), None, "byte {at} = {value}");
        }
        assert_eq!(Acl::from_attribute(&good[..good.len() - 1]), None);
        let many = |count: usize| {
            let users: String = (0..count - 4).map(|id| format!("user:{id}:r--,")).collect();
            Acl::parse(format!("user::rw-,{users}group::r--,mask::r--,other::r--").as_bytes())
        };
        assert!(many(ENTRIES_MAX).unwrap().to_attribute().unwrap().len() <= usize::from(u16::MAX));
        assert_eq!(many(ENTRIES_MAX + 1), None);
    }

    #[test]
    fn names_have_the_numbers_of_the_archive() {
        let list = Acl::parse(b"user::rw-,user:a\\072b:rw-,user:root:r--,group::r--,group:g:r--,mask::rw-,other::r--");
        let (list, mut names) = (list.unwrap(), Names::default());
        assert_eq!((list.to_attribute(), list.resolved(&names)), (None, None));
        assert_eq!((names.add_user(b"a:b", 3), names.add_group(b"g", 4), names.add_group(b"g", 4)), (3, 1, 0));
        let resolved = "user::rw-,user:0:r--,user:3:rw-,group::r--,group:4:r--,mask::rw-,other::r--";
        assert_eq!(text(&list.resolved(&names).unwrap()), resolved);
        // One user by two names, and one name for two groups.
        let twice = Acl::parse(b"user::rw-,user:a\\072b:rw-,user:3:r--,group::r--,mask::rw-,other::r--").unwrap();
        assert_eq!(twice.resolved(&names), None);
        names.add_group(b"g", 5);
        assert_eq!(list.resolved(&names), None);
    }

    #[test]
    fn a_mode_without_its_list_grants_no_user_more() {
        for (list, mode, narrow) in [
            ("user::rw-,group::r--,other::---", 0o640, 0o640),
            ("user::rw-,group::rw-,mask::r--,other::---", 0o640, 0o640),
            // The mask is what the named user needs, and more than the group has.
            ("user::rw-,user:1:rwx,group::r--,mask::rwx,other::r--", 0o674, 0o644),
            // Users and groups that are kept out.
            ("user::rw-,user:1:---,group::r--,mask::rwx,other::r--", 0o674, 0o600),
            ("user::rw-,group::r--,group:1:---,mask::rwx,other::r--", 0o674, 0o640),
            ("user::rwx,user:1:rwx,group::r-x,mask::--x,other::r-x", 0o715, 0o711),
            // No mask, as no system has it.
            ("user::rwx,user:1:r-x,group::rwx,other::rwx", 0o777, 0o755),
        ] {
            let acl = Acl::parse(list.as_bytes()).unwrap();
            assert_eq!((acl.mode(), acl.narrow_mode()), (mode, narrow), "{list}");
            assert_eq!((acl.narrow().mode(), acl.narrow().is_plain()), (narrow, true));
        }
    }
}
