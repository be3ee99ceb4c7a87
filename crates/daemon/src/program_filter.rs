//! Which programs of the machine a command or a rule is about: by executable file, control group, user and size.

use crate::cold::ClientSelector;
use pagefold_os::procfs;
use std::ffi::CString;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;

/// Conditions, all of which a program must satisfy.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ProgramFilter {
    /// The path of its executable file matches this pattern, as a shell's does.
    pub exe: Option<CString>,
    /// It is in this control group or below it.
    pub cgroup: Option<String>,
    /// Its user.
    pub user: Option<u32>,
    /// It has at least as many bytes of memory.
    pub rss_min: u64,
}

impl ProgramFilter {
    /// True if process `pid` satisfies all conditions. Threads of the kernel, and pagefold itself, never do.
    pub fn has(&self, pid: i32) -> bool {
        let directory = format!("/proc/{pid}");
        // A thread of the kernel has no executable file.
        let Ok(file) = fs::read_link(format!("{directory}/exe")) else { return false };
        pid != std::process::id() as i32
            && procfs::name(pid).is_some_and(|name| !name.starts_with("pagefold"))
            && self.user.is_none_or(|user| fs::metadata(&directory).is_ok_and(|meta| meta.uid() == user))
            && self.exe.as_ref().is_none_or(|pattern| matches(pattern, file.as_os_str().as_bytes()))
            && self.cgroup.clone().is_none_or(|path| ClientSelector::Cgroup(path).has(pid))
            && (self.rss_min == 0 || procfs::rss(pid) >= self.rss_min)
    }

    /// The processes that satisfy all conditions now.
    pub fn find(&self) -> Vec<i32> {
        procfs::pids().into_iter().filter(|pid| self.has(*pid)).collect()
    }
}

/// True if `path` matches `pattern` as a shell's does.
fn matches(pattern: &CString, path: &[u8]) -> bool {
    let Ok(path) = CString::new(path) else { return false };
    // SAFETY: both are strings that end with a NUL byte.
    unsafe { libc::fnmatch(pattern.as_ptr(), path.as_ptr(), 0) == 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_must_satisfy_all_conditions() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let pid = child.id() as i32;
        let me = pagefold_os::user::effective();
        let exe = |pattern: &str| Some(CString::new(pattern).unwrap());
        // Between fork and exec it is this program still.
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(30);
        let sleeps = ProgramFilter { exe: exe("*/sleep"), ..ProgramFilter::default() };
        let busybox = ProgramFilter { exe: exe("*/coreutils"), ..ProgramFilter::default() };
        while !sleeps.has(pid) && !busybox.has(pid) && std::time::Instant::now() < deadline {
            std::thread::yield_now();
        }
        let filter = |user, rss_min, exe| ProgramFilter { exe, cgroup: None, user: Some(user), rss_min };
        assert!(filter(me, 0, exe("/*")).has(pid));
        assert!(!filter(me + 1, 0, exe("/*")).has(pid));
        assert!(!filter(me, 1 << 40, exe("/*")).has(pid));
        assert!(!filter(me, 0, exe("/nowhere/*")).has(pid));
        assert!(!ProgramFilter::default().has(std::process::id() as i32), "it is the caller itself");
        assert!(!ProgramFilter::default().has(2), "it is a thread of the kernel");
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
