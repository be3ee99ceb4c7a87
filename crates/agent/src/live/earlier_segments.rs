//! Files of segments that a daemon gave us and that outlive it, because merged memory shows them.
//!
//! The next daemon wants to go on with them. It can open them through the kernel's list of our mappings only if it has a
//! privilege of root's; for all others we keep the descriptors until it has asked for them.

use crate::address_space::maps::Maps;
use crate::owned_ranges::Owned;
use crate::runtime::sparse_table::{COUNT, SparseTable};
use pagefold_os::fd::Fd;
use pagefold_os::memfd;

/// At most as many as one connection has. Each keeps a whole segment in memory, so none is kept that nothing shows.
pub(super) struct EarlierSegments(SparseTable<Earlier>);

struct Earlier {
    inode: u64,
    fd: Fd,
}

impl EarlierSegments {
    pub(super) const fn none() -> EarlierSegments {
        EarlierSegments(SparseTable::new(Owned::EarlierSegments))
    }

    /// Keeps those of `segments` that the process shows, and closes the others.
    pub(super) fn keep(&mut self, segments: impl Iterator<Item = Fd>, maps: &Maps) {
        for fd in segments {
            let Ok((_, inode)) = memfd::len_and_inode(fd.raw()) else { continue };
            if let Some(free) = self.0.first_free().filter(|_| self.number(inode).is_none()) {
                self.0.put(free, Earlier { inode, fd });
            }
        }
        self.close_unseen(maps);
    }

    /// Closes what the process shows no more. Keeps all if the kernel does not tell.
    fn close_unseen(&mut self, maps: &Maps) {
        if self.0.iter().next().is_none() {
            return;
        }
        let mut is_shown = [false; COUNT];
        let seen = maps.pool_inodes(|inode| {
            if let Some(number) = self.number(inode) {
                is_shown[number] = true;
            }
        });
        if seen.is_ok() {
            let unseen = is_shown.into_iter().enumerate().filter(|(_, is_shown)| !is_shown);
            unseen.for_each(|(number, _)| drop(self.0.take(number)));
        }
    }

    fn number(&self, inode: u64) -> Option<usize> {
        self.0.iter().find(|(_, segment)| segment.inode == inode).map(|(number, _)| number)
    }

    /// The descriptor of the file with this inode.
    pub(super) fn file(&self, inode: u64) -> Option<i32> {
        self.0.get(self.number(inode)?).map(|segment| segment.fd.raw())
    }

    /// As [`file`](Self::file), and leaves it to the caller.
    pub(super) fn take(&mut self, inode: u64) -> Option<Fd> {
        self.0.take(self.number(inode)?).map(|segment| segment.fd)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagefold_os::{PAGE_SIZE, mem};

    #[test]
    fn what_merged_memory_shows_is_kept_until_it_does_not() {
        let maps = Maps::open().unwrap();
        let segments = [(); 3].map(|()| memfd::create(c"pagefold-pool:earlier", PAGE_SIZE as u64).unwrap());
        let inodes = segments.each_ref().map(|fd| memfd::len_and_inode(fd.raw()).unwrap().1);
        let map = |fd: &Fd, flags| mem::Mapping::file(fd.raw(), 0, PAGE_SIZE, libc::PROT_READ, flags).unwrap();
        let shown = [map(&segments[0], libc::MAP_PRIVATE), map(&segments[1], libc::MAP_PRIVATE)];
        // As the agent itself maps it, to compare.
        let read = map(&segments[2], libc::MAP_SHARED);
        let mut earlier = EarlierSegments::none();
        earlier.keep(segments.into_iter(), &maps);
        let kept =
            |earlier: &EarlierSegments| inodes.iter().map(|inode| earlier.file(*inode).is_some()).collect::<Vec<_>>();
        assert_eq!(kept(&earlier), [true, true, false], "the agent's own mapping shows nothing");
        // The connection after that brought nothing.
        earlier.keep(std::iter::empty(), &maps);
        assert_eq!(kept(&earlier), [true, true, false]);
        let [first, second] = shown;
        drop(first);
        earlier.close_unseen(&maps);
        assert_eq!(kept(&earlier), [false, true, false]);
        assert_eq!(memfd::len_and_inode(earlier.take(inodes[1]).unwrap().raw()).unwrap().1, inodes[1]);
        assert_eq!(kept(&earlier), [false; 3]);
        drop((second, read));
    }
}
