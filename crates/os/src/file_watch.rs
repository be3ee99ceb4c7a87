//! Tells when files are gone: memory files have no name, and only the kernel knows which processes still map them.

use crate::fd::Fd;
use crate::raw::Result;
use crate::syscall;
use std::ffi::CString;

/// A list of files that the kernel strikes out when they are gone.
#[derive(Debug)]
pub struct FileWatch(Fd);

/// As in the kernel's header; a name of some bytes may follow.
#[repr(C)]
#[derive(Clone, Copy)]
struct Event {
    id: i32,
    mask: u32,
    _cookie: u32,
    name_len: u32,
}

const EVENT_LEN: usize = size_of::<Event>();
/// Events that one call reads.
const EVENTS: usize = 256;

impl FileWatch {
    /// Makes an empty list.
    ///
    /// # Errors
    /// As inotify_init1(2).
    pub fn new() -> Result<FileWatch> {
        // SAFETY: inotify_init1(2) takes no pointer; the descriptor is new and has this one owner.
        unsafe {
            let fd = syscall!(libc::SYS_inotify_init1, libc::IN_CLOEXEC | libc::IN_NONBLOCK)?;
            Ok(FileWatch(Fd::from_raw(fd as i32)))
        }
    }

    /// Adds the file behind `fd`, which may be closed then. The file counts as gone once no process has it open or maps it.
    /// Returns its name from now on.
    ///
    /// # Errors
    /// As inotify_add_watch(2) of `/proc/self/fd/N`.
    pub fn add(&self, fd: &Fd) -> Result<i32> {
        let path = CString::new(format!("/proc/self/fd/{}", fd.raw())).map_err(|_| crate::Errno(libc::EINVAL))?;
        // SAFETY: the path is a valid C string for the duration of the call.
        unsafe { syscall!(libc::SYS_inotify_add_watch, self.0.raw(), path.as_ptr(), libc::IN_DELETE_SELF) }
            .map(|id| id as i32)
    }

    /// Calls `gone` for each file that is gone since the last call. False if there were too many to tell: any may be.
    pub fn look(&self, mut gone: impl FnMut(i32)) -> bool {
        let mut told = true;
        let mut buffer = [0; EVENTS * EVENT_LEN];
        while let Ok(got @ 1..) = self.0.read(&mut buffer) {
            let mut rest = &buffer[..got.min(buffer.len())];
            while rest.len() >= EVENT_LEN {
                // SAFETY: the slice holds as many bytes, and any bytes are an event.
                let event: Event = unsafe { rest.as_ptr().cast::<Event>().read_unaligned() };
                told &= event.mask & libc::IN_Q_OVERFLOW == 0;
                if event.mask & libc::IN_IGNORED != 0 {
                    gone(event.id);
                }
                rest = rest.get(EVENT_LEN + event.name_len as usize..).unwrap_or_default();
            }
        }
        told
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mem::Mapping;
    use crate::memfd;

    #[test]
    fn a_file_is_gone_when_nobody_maps_it_any_more() {
        let watch = FileWatch::new().unwrap();
        let looked = || {
            let mut gone = Vec::new();
            assert!(watch.look(|id| gone.push(id)));
            gone
        };
        let file = memfd::create(c"gone", 4096).unwrap();
        let other = memfd::create(c"stays", 4096).unwrap();
        let (id, _) = (watch.add(&file).unwrap(), watch.add(&other).unwrap());
        let mapping = Mapping::file(file.raw(), 0, 4096, libc::PROT_READ, libc::MAP_SHARED).unwrap();
        drop(file);
        assert!(looked().is_empty());
        drop(mapping);
        assert_eq!(looked(), [id]);
        assert!(looked().is_empty(), "told once");
    }
}
