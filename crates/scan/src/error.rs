//! Why a source could not be scanned.

use pagefold_os::Errno;

/// A source that is left out of the scan.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Lost {
    /// It ended or was replaced meanwhile; nothing that was read of it counts.
    #[error("ended during the scan")]
    Vanished,
    /// It was not there to begin with.
    #[error("no such process or file")]
    Absent,
    /// We may not look at it.
    #[error("may not be read ({0}); run as its owner, or as root with CAP_SYS_PTRACE")]
    Refused(Errno),
    /// It has no pages: a directory, a pipe, a terminal.
    #[error("{0}")]
    Unfit(&'static str),
    /// It does not answer: a page under its own userfaultfd, or a file on a dead server.
    #[error("holds whoever reads it")]
    Stuck,
    /// The kernel said no.
    #[error("cannot be read: {0}")]
    Failed(Errno),
}

impl From<Errno> for Lost {
    fn from(errno: Errno) -> Lost {
        match errno.0 {
            libc::ESRCH => Lost::Vanished,
            libc::ENOENT => Lost::Absent,
            libc::EPERM | libc::EACCES => Lost::Refused(errno),
            libc::ENOTTY => Lost::Unfit("needs PAGEMAP_SCAN: boot a kernel of 6.8 or later"),
            _ => Lost::Failed(errno),
        }
    }
}

impl From<std::io::Error> for Lost {
    fn from(error: std::io::Error) -> Lost {
        Errno(error.raw_os_error().unwrap_or(libc::EIO)).into()
    }
}
