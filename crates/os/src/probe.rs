//! What this kernel and this user may do, found by trying.

use crate::cpu_latency;
use crate::exec_events::ExecEvents;
use crate::fd::Fd;
use crate::uffd::{self, Uffd};
use std::fs;
use std::path::Path;

/// One thing that pagefold needs or can use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// What was tried.
    pub name: &'static str,
    /// Whether it works.
    pub works: bool,
    /// Whether pagefold cannot merge without it.
    pub needed: bool,
    /// What was seen.
    pub detail: String,
    /// The one command or act that mends it, if it does not work.
    pub cure: String,
}

/// Features of userfaultfd that merging needs.
pub const MERGE_FEATURES: u64 = uffd::FEATURE_PAGEFAULT_FLAG_WP
    | uffd::FEATURE_WP_ASYNC
    | uffd::FEATURE_MOVE
    | uffd::FEATURE_WP_HUGETLBFS_SHMEM
    | uffd::FEATURE_EVENT_REMOVE
    | uffd::FEATURE_MISSING_SHMEM
    | uffd::FEATURE_MINOR_SHMEM;

/// Tries everything.
pub fn all() -> Vec<Finding> {
    let mut all = vec![kernel(), userfaultfd()];
    // Seldom absent, and then what else is asked there is no answer.
    if !Path::new("/proc/self/pagemap").exists() {
        all.insert(0, no_proc());
    }
    // A user who may make no userfaultfd at all is told of the device by the finding above.
    if all.iter().all(|finding| finding.works) {
        all.push(device());
    }
    let attach = attach();
    let enters = attach.works;
    all.push(attach);
    // Programs that could not be entered need not be found.
    all.extend(enters.then(exec_events));
    all.extend([map_count(), thp(), short_wakes(), idle_reads(), ksm(), zswap()]);
    all
}

/// How this user gets to open `device`.
fn access(device: &str) -> String {
    let uid = crate::user::effective();
    if uid == 0 {
        return format!("let this container have {device}");
    }
    format!(
        "as root, until the next boot: setfacl -m u:{uid}:rw {device} (Debian's package acl); for good: 70-pagefold.rules \
         of dist/udev (in the package) and this user in the group kvm"
    )
}

fn no_proc() -> Finding {
    Finding {
        name: "/proc",
        works: false,
        needed: true,
        detail: "not there, or without this kernel's page maps".into(),
        cure: "mount -t proc proc /proc".into(),
    }
}

/// The kernel's release, of uname(2).
pub fn release() -> String {
    uname(|names| &names.release)
}

/// The machine's name, of uname(2).
pub fn host_name() -> String {
    uname(|names| &names.nodename)
}

fn uname(of: fn(&libc::utsname) -> &[libc::c_char]) -> String {
    // SAFETY: all-zero is a valid utsname.
    let mut names: libc::utsname = unsafe { core::mem::zeroed() };
    // SAFETY: the kernel writes into `names`, strings with a NUL behind them.
    unsafe {
        libc::uname(&raw mut names);
        std::ffi::CStr::from_ptr(of(&names).as_ptr()).to_string_lossy().into_owned()
    }
}

/// Why this kernel is too old, if it is: no right and no setting mends that.
pub fn too_old() -> Option<Finding> {
    Some(kernel()).filter(|finding| !finding.works)
}

fn kernel() -> Finding {
    let release = release();
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(|n| n.parse::<u32>().unwrap_or(0));
    let version = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    Finding {
        name: "kernel 6.8 or later",
        works: version >= (6, 8),
        needed: true,
        detail: release,
        cure: "boot a kernel of 6.8 or later (UFFDIO_MOVE came with it)".into(),
    }
}

fn userfaultfd() -> Finding {
    let device = uffd::open_device().ok();
    let made = Uffd::new(device.as_ref(), MERGE_FEATURES);
    let (works, detail, cure) = match &made {
        Ok(_) if device.is_some() => (true, "through /dev/userfaultfd".to_owned(), String::new()),
        Ok(_) => (true, "through the system call".to_owned(), String::new()),
        Err(crate::Errno(libc::EINVAL)) => (
            false,
            "the kernel lacks asynchronous write protection or UFFDIO_MOVE".into(),
            "boot a kernel of 6.8 or later with CONFIG_USERFAULTFD".into(),
        ),
        Err(errno) => (false, format!("refused: {errno}"), access("/dev/userfaultfd")),
    };
    Finding { name: "userfaultfd with kernel faults", works, needed: true, detail, cure }
}

fn device() -> Finding {
    let device = uffd::open_device();
    Finding {
        name: "/dev/userfaultfd for unprivileged clients",
        works: device.is_ok(),
        needed: false,
        detail: device.err().map_or("open".to_owned(), |errno| format!("{errno}")),
        cure: access("/dev/userfaultfd"),
    }
}

/// Whether programs that run already can be entered, and their forks followed.
fn attach() -> Finding {
    let scope = fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope").unwrap_or_default();
    let device = uffd::open_device().ok();
    let forks = Uffd::new(device.as_ref(), MERGE_FEATURES | uffd::FEATURE_EVENT_FORK).map(drop);
    let (works, detail, cure) = match forks {
        _ if !cfg!(target_arch = "x86_64") => {
            (false, "on x86-64 only".to_owned(), "start programs by `pagefold run`".to_owned())
        }
        _ if scope.trim() == "3" => {
            let cure = "boot without kernel.yama.ptrace_scope=3, which cannot be changed later; or start programs by `pagefold run`";
            (false, "kernel.yama.ptrace_scope = 3: no process may trace another".to_owned(), cure.to_owned())
        }
        Ok(()) => (true, "programs can be entered, and their forks followed".to_owned(), String::new()),
        Err(errno) => {
            let cure = "sudo pagefold attach PID (a daemon of root's has CAP_SYS_PTRACE)";
            (false, format!("forks of programs cannot be followed: {errno}"), cure.to_owned())
        }
    };
    Finding { name: "attach: programs that run already", works, needed: false, detail, cure }
}

/// Whether the daemon is told of programs that begin under `pagefold run` and cannot load the agent.
fn exec_events() -> Finding {
    let opened = ExecEvents::open();
    Finding {
        name: "attach: static programs under run",
        works: opened.is_ok(),
        needed: false,
        detail: opened.err().map_or("the kernel tells of programs that begin".to_owned(), |errno| {
            format!("the kernel does not tell of programs that begin: {errno}")
        }),
        cure: "sudo pagefold daemon (it takes CAP_NET_ADMIN, and a kernel with CONFIG_PROC_EVENTS)".into(),
    }
}

fn map_count() -> Finding {
    let count: u64 =
        fs::read_to_string("/proc/sys/vm/max_map_count").ok().and_then(|text| text.trim().parse().ok()).unwrap_or(0);
    Finding {
        name: "mappings per process",
        works: count >= 262_144,
        needed: false,
        detail: format!("vm.max_map_count = {count}; a quarter of it is ours"),
        cure: "sudo sysctl vm.max_map_count=1048576 (more scattered pages can merge)".into(),
    }
}

fn thp() -> Finding {
    let text = fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled").unwrap_or_default();
    let works = !text.contains("[never]") && !text.is_empty();
    Finding {
        name: "huge pages for our indexes",
        works,
        needed: false,
        detail: format!("transparent_hugepage: {}", text.trim()),
        cure: "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled".into(),
    }
}

fn short_wakes() -> Finding {
    let opened = Fd::open(cpu_latency::PATH, libc::O_WRONLY | libc::O_CLOEXEC, 0);
    Finding {
        name: "processors kept awake while cold pages come back",
        works: opened.is_ok(),
        needed: false,
        detail: opened
            .err()
            .map_or("/dev/cpu_dma_latency opens".to_owned(), |errno| format!("/dev/cpu_dma_latency: {errno}")),
        cure: access("/dev/cpu_dma_latency"),
    }
}

/// Whether the kernel can tell which pages no thread reads.
fn idle_reads() -> Finding {
    let device = uffd::open_device().ok();
    let made = Uffd::new(device.as_ref(), uffd::FEATURE_RWP_ASYNC);
    Finding {
        name: "reads of idle pages seen by the kernel (Linux 7.3)",
        works: made.is_ok(),
        needed: false,
        detail: match made {
            Ok(_) => "userfaultfd has RWP_ASYNC; the cold tier does not use it yet".into(),
            Err(errno) => {
                format!("userfaultfd has no RWP_ASYNC: {errno}; pages that are read and not written count as idle")
            }
        },
        cure: "none is needed: the cold tier goes by writes, and by how often pages return".into(),
    }
}

fn ksm() -> Finding {
    let run = crate::ksm::read("run").ok();
    Finding {
        name: "KSM, for --backend ksm and for what the budget of mappings keeps private",
        works: run.is_some(),
        needed: false,
        detail: match run {
            None => "absent".into(),
            Some(1) => "it runs, and is first to merge what programs mark as mergeable (echo 2 | sudo tee \
                        /sys/kernel/mm/ksm/run ends that)"
                .into(),
            Some(_) => {
                "it rests; with it (echo 1 | sudo tee /sys/kernel/mm/ksm/run) scattered equal pages that status \
                        shows as beyond the budget of mappings are merged too, across users, but for programs with \
                        a --domain"
                    .into()
            }
        },
        cure: "boot a kernel with CONFIG_KSM".into(),
    }
}

fn zswap() -> Finding {
    let enabled = fs::read_to_string("/sys/module/zswap/parameters/enabled").unwrap_or_default();
    let on = enabled.trim() == "Y";
    Finding {
        name: "kernel zswap off (it would compress what we hold)",
        works: !on,
        needed: false,
        detail: if enabled.is_empty() { "absent".into() } else { format!("enabled = {}", enabled.trim()) },
        cure: "echo N | sudo tee /sys/module/zswap/parameters/enabled".into(),
    }
}
