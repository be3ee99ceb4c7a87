//! The user of a command, by the tree's own passwd and group files.

use super::run::ExecOptions;
use crate::error::{At, Error, Result};
use crate::progress;
use crate::store::ImageRecord;
use std::fs;
use std::io::{self, Read};
use std::os::fd::AsFd;

/// File system type of pipes without a name.
const PIPEFS_MAGIC: rustix::fs::FsWord = 0x5049_5045;

/// The user that the command runs as.
#[derive(Debug, PartialEq, Eq)]
struct User {
    uid: u32,
    gid: u32,
    /// Supplementary groups.
    groups: Vec<u32>,
    home: String,
}

/// Most bytes read of the tree's passwd and group files.
const DATABASE_BYTES_MAX: u64 = 16 << 20;

/// A file of users or groups, empty if there is none. The image's file may be of any kind and size.
fn database(path: &str) -> Result<String> {
    if !fs::metadata(path).is_ok_and(|meta| meta.is_file()) {
        return Ok(String::new());
    }
    let mut bytes = Vec::new();
    fs::File::open(path).and_then(|file| file.take(DATABASE_BYTES_MAX).read_to_end(&mut bytes)).at(path)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

impl User {
    /// Looks up `wanted`, USER[:GROUP], in the contents of passwd(5) and group(5).
    fn find(wanted: &str, passwd: &str, group: &str) -> Result<Self> {
        fn lines(text: &str) -> impl Iterator<Item = Vec<&str>> {
            text.lines().map(|line| line.split(':').collect())
        }
        let number = |text: &str| text.parse::<u32>().ok().filter(|&id| id != u32::MAX);
        let unknown = |what: &str, name: &str| {
            Error::Refused(format!("exec: no {what} {name:?} in the image's /etc; give a number, or another --user"))
        };
        let (name, group_name) = wanted.split_once(':').unwrap_or((wanted, ""));
        // A name that looks like a number is a name, as with other engines.
        let fits = |fields: &[&str], key: &str| {
            fields.len() > 2 && (fields[0] == key || number(key).is_some_and(|id| number(fields[2]) == Some(id)))
        };
        let entry = lines(passwd).find(|fields| fits(fields, name) && fields.len() > 5);
        let ids = match &entry {
            Some(fields) => number(fields[2]).zip(number(fields[3])),
            // Trees without passwd have a root too.
            None => number(name).or((name == "root").then_some(0)).zip(Some(0)),
        };
        let (uid, gid) = ids.ok_or_else(|| unknown("user", name))?;
        let home = entry.as_ref().map_or("", |fields| fields[5]);
        let mut user = Self { uid, gid, groups: Vec::new(), home: home.into() };
        if user.home.is_empty() {
            user.home = if uid == 0 { "/root" } else { "/" }.into();
        }
        if group_name.is_empty() {
            let member = entry.as_ref().map_or(name, |fields| fields[0]);
            let has = |fields: &Vec<&str>| fields.len() > 3 && fields[3].split(',').any(|name| name == member);
            user.groups = lines(group).filter(has).filter_map(|fields| number(fields[2])).collect();
        } else {
            let entry = lines(group).find(|fields| fits(fields, group_name));
            let gid = entry.map_or_else(|| number(group_name), |fields| number(fields[2]));
            user.gid = gid.ok_or_else(|| unknown("group", group_name))?;
        }
        Ok(user)
    }

    /// Makes this process, which has one thread, run as the user.
    fn apply(&self) -> io::Result<()> {
        use rustix::fs::{Gid, Uid};
        use rustix::thread::{set_thread_groups, set_thread_res_gid, set_thread_res_uid};
        let (uid, gid) = (Uid::from_raw(self.uid), Gid::from_raw(self.gid));
        let groups: Vec<Gid> = self.groups.iter().copied().map(Gid::from_raw).collect();
        set_thread_groups(&groups)?;
        // Programs reopen their output by /dev/stdout, and a pipe belongs to the user that made it.
        let (input, output, error) = (io::stdin(), io::stdout(), io::stderr());
        for pipe in [input.as_fd(), output.as_fd(), error.as_fd()] {
            if rustix::fs::fstatfs(pipe).is_ok_and(|fs| fs.f_type == PIPEFS_MAGIC) {
                let _ = rustix::fs::fchown(pipe, Some(uid), None);
            }
        }
        set_thread_res_gid(gid, gid, gid)?;
        set_thread_res_uid(uid, uid, uid)?;
        Ok(())
    }
}

/// Makes this process run as the user that the operator or the image asks for. Returns the home directory.
///
/// Only root of the initial user namespace (`is_system_root`) has other users. For a plain user, an image that asks for
/// another user runs as that plain user, and a note says so.
pub(super) fn become_user(record: &ImageRecord, run: &ExecOptions, is_system_root: bool) -> Result<String> {
    let wanted = if run.user.is_empty() { &record.config.user } else { &run.user };
    if wanted.is_empty() {
        return Ok("/root".into());
    }
    let user = database("/etc/passwd").and_then(|users| User::find(wanted, &users, &database("/etc/group")?));
    let home = user.and_then(|user| match user.apply() {
        Ok(()) => Ok(user.home),
        // In a user namespace this process is root already.
        Err(_) if !is_system_root && (user.uid, user.gid) == (0, 0) => Ok(user.home),
        Err(error) => Err(Error::Refused(format!("exec: user {wanted}: {error}; only root has other users"))),
    });
    home.or_else(|error| {
        if is_system_root || !run.user.is_empty() {
            return Err(error);
        }
        progress::note(&format!("the command runs as you, not as the image's user {wanted}: that needs root"));
        Ok("/root".into())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_are_names_of_the_tree_or_numbers() {
        let passwd = "root:x:0:0::/root:/bin/sh\nbroken\napp:x:1001:1002:An app:/home/app:\n77:x:5:6::/h:\nbad:x:y:z::/:\nhalf:x:8:z::/:\n";
        let group = "app:x:1002:\nextra:x:1003:other,app\nmore:x:1004:app\nnone:x:1005:apps\n";
        let user = |uid, gid, groups: &[u32], home: &str| User { uid, gid, groups: groups.into(), home: home.into() };
        for (wanted, expected) in [
            ("root", user(0, 0, &[], "/root")),
            ("app", user(1001, 1002, &[1003, 1004], "/home/app")),
            ("1001", user(1001, 1002, &[1003, 1004], "/home/app")),
            ("app:extra", user(1001, 1003, &[], "/home/app")),
            ("app:9", user(1001, 9, &[], "/home/app")),
            ("77", user(5, 6, &[], "/h")),
            ("1000", user(1000, 0, &[], "/")),
            ("1000:more", user(1000, 1004, &[], "/")),
            ("0:0", user(0, 0, &[], "/root")),
        ] {
            assert_eq!(User::find(wanted, passwd, group).unwrap(), expected, "{wanted}");
        }
        assert_eq!(User::find("5:6", "", "").unwrap(), user(5, 6, &[], "/"));
        assert_eq!(User::find("root", "", "").unwrap(), user(0, 0, &[], "/root"));
        for wanted in ["nobody", "app:none-such", "4294967295", "-1", "bad", "half", ":5", "broken"] {
            let error = User::find(wanted, passwd, group).unwrap_err().to_string();
            assert!(error.contains("in the image's /etc") && !error.contains('\n'), "{error}");
        }
    }
}
