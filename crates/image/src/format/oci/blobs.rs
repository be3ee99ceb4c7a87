//! Blobs of a layout, a plain directory, or an archive.

use super::documents::BLOBS;
use crate::config::Limits;
use crate::digest::Digest;
use crate::error::{At, Error, Result, input};
use crate::format::tar::{EntryKind, Reader};
use crate::proc_fd::proc_fd_path;
use crate::tree::show;
use rustix::fs::{FileType, Mode, OFlags, ResolveFlags};
use serde::de::DeserializeOwned;
use std::collections::HashMap;
use std::fs::File;
use std::io::{BufReader, Read};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;

/// Named blobs: the files of a directory, or of a tar archive. Without a layout they are in the directory itself.
pub(super) enum Blobs {
    Directory { dir: OwnedFd, layout: bool },
    Archive { file: File, members: HashMap<Vec<u8>, Member> },
}

pub(super) enum Member {
    File { offset: u64, size: u64 },
    Link(Vec<u8>),
}

/// A range of a file, read without changing the file's own position.
pub(super) struct Range<'a> {
    pub(super) file: &'a File,
    pub(super) at: u64,
    pub(super) left: u64,
}

impl Read for Range<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let want = self.left.min(buffer.len() as u64) as usize;
        let count = self.file.read_at(&mut buffer[..want], self.at)?;
        self.at += count as u64;
        self.left -= count as u64;
        Ok(count)
    }
}

/// Joins a link's target to the directory of the link, as old docker-archives use it; one with a leading `/` counts
/// from the archive's root.
fn join_link(from: &[u8], target: &[u8]) -> Vec<u8> {
    let mut parts: Vec<&[u8]> = from.split(|&byte| byte == b'/').collect();
    parts.pop();
    if target.starts_with(b"/") {
        parts.clear();
    }
    for part in target.split(|&byte| byte == b'/') {
        match part {
            b"" | b"." => {}
            b".." => drop(parts.pop()),
            _ => parts.push(part),
        }
    }
    parts.join(&b'/')
}

impl Blobs {
    /// Opens the blob `path`. Returns its size too.
    pub(super) fn open(&self, path: &str) -> Result<(Box<dyn Read + '_>, u64)> {
        match self {
            Blobs::Directory { dir, layout } => open_in_directory(dir, *layout, path),
            Blobs::Archive { file, members } => {
                let mut name = path.as_bytes().to_vec();
                for _ in 0..8 {
                    match members.get(&name).ok_or_else(|| missing(path))? {
                        Member::File { offset, size } => {
                            return Ok((Box::new(Range { file, at: *offset, left: *size }), *size));
                        }
                        Member::Link(target) => name = join_link(&name, target),
                    }
                }
                Err(input!("{path}: too many links"))
            }
        }
    }

    /// Returns true if an archive has the member `name`.
    pub(super) fn has_member(&self, name: &str) -> bool {
        matches!(self, Blobs::Archive { members, .. } if members.contains_key(name.as_bytes()))
    }

    /// Reads the JSON document `path`, which must have the digest and size `expect`.
    pub(super) fn json<T: DeserializeOwned>(
        &self,
        path: &str,
        expect: Option<(Digest, u64)>,
        limits: Limits,
    ) -> Result<T> {
        let (mut reader, size) = self.open(path)?;
        if size > limits.json_bytes {
            return Err(input!("{path}: {size} bytes of JSON; {} are allowed", limits.json_bytes));
        }
        let mut bytes = Vec::new();
        reader.read_to_end(&mut bytes).at(path)?;
        if let Some((digest, size)) = expect {
            let found = Digest::of(&bytes);
            if found != digest || bytes.len() as u64 != size {
                let (expected, found) = (digest.to_string(), found.to_string());
                return Err(Error::Digest { what: path.into(), expected, found });
            }
        }
        serde_json::from_slice(&bytes).map_err(|error| input!("{path}: {error}"))
    }
}

fn missing(path: &str) -> Error {
    input!("{path}: not in the layout; copy the whole image (skopeo copy … oci:DIR)")
}

/// Opens the blob `path` of a directory. A layout may be another user's directory: no link may lead out of it, and only
/// regular files are opened, since opening a pipe is seen by its writer, and opening some devices acts on them.
fn open_in_directory<'a>(dir: &OwnedFd, layout: bool, path: &str) -> Result<(Box<dyn Read + 'a>, u64)> {
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    let open = |path: &str| rustix::fs::openat2(dir, path, flags, Mode::empty(), ResolveFlags::BENEATH);
    let file = match path.strip_prefix(BLOBS).filter(|_| !layout) {
        // Manifests that an index lists have a suffix of their own.
        Some(name) => open(name).or_else(|_| open(&format!("{name}.manifest.json"))),
        None => open(path),
    };
    let file = match file {
        Err(rustix::io::Errno::NOENT) => return Err(missing(path)),
        other => other.at(path)?,
    };
    let found = rustix::fs::fstat(&file).at(path)?;
    if FileType::from_raw_mode(found.st_mode) != FileType::RegularFile {
        return Err(input!("{path}: not a regular file"));
    }
    let file = File::open(proc_fd_path(&file)).at(path)?;
    Ok((Box::new(file), found.st_size as u64))
}

/// Calls `each` with the members of a plain tar archive, a regular file, until it returns false. Only headers are read.
pub(super) fn each_member(
    file: &File,
    limits: Limits,
    mut each: impl FnMut(Vec<u8>, Member) -> Result<bool>,
) -> Result<()> {
    struct Positioned<'a> {
        inner: BufReader<&'a File>,
        at: u64,
    }
    impl Read for Positioned<'_> {
        fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
            let count = self.inner.read(buffer)?;
            self.at += count as u64;
            Ok(count)
        }
    }
    let end = file.metadata().map_err(|error| input!("tar: {error}"))?.len();
    let mut reader = Reader::new(Positioned { inner: BufReader::new(file), at: 0 }, limits);
    let mut first = true;
    while let Some(entry) = reader.next_entry().map_err(|error| if first { error.foreign() } else { error })? {
        first = false;
        let path = entry.path.strip_prefix(b"./").unwrap_or(&entry.path).to_vec();
        let offset = reader.get_ref().at;
        if entry.is_sparse {
            return Err(input!("tar: {}: a sparse file in an image's archive; pack it without --sparse", show(&path)));
        }
        let member = match entry.kind {
            EntryKind::File(size) if size > end.saturating_sub(offset) => {
                return Err(input!("tar: cut off in {}", show(&path)));
            }
            EntryKind::File(size) => Member::File { offset, size },
            EntryKind::Symlink(target) => Member::Link(target),
            // Relative to the archive's root, unlike a symbolic link's target.
            EntryKind::HardLink(target) => Member::Link([&b"/"[..], &target].concat()),
            _ => continue,
        };
        if !each(path, member)? {
            break;
        }
        reader.pass_over(|stream, bytes| {
            stream.at += bytes;
            stream.inner.seek_relative(bytes as i64)
        })?;
    }
    Ok(())
}

/// The members of a plain tar archive with their places in the file.
pub(super) fn index_archive(file: &File, limits: Limits) -> Result<HashMap<Vec<u8>, Member>> {
    let (mut members, mut names) = (HashMap::new(), 0);
    each_member(file, limits, |path, member| {
        // Unlike in a tree, each path is kept whole here.
        names += path.len() as u64;
        if names > limits.names_bytes {
            return Err(input!("archive: the paths in it are more than the limit's {} bytes", limits.names_bytes));
        }
        // As unpacking would have it, the later member replaces an earlier one. What it holds is checked by its digest.
        members.insert(path, member);
        Ok(true)
    })?;
    Ok(members)
}
