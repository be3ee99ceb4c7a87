//! `pagefold daemon`: serves clients until told to stop.

use super::stop;
use crate::error::Error;
use crate::note;
use crate::{args, attach_rules, config, daemon_client, units};
use pagefold_daemon::http::ListenAddress;
use pagefold_daemon::{AttachRule, Config, Daemon, VMA_BUDGET_MAX, cold};
use pagefold_os::procfs;
use pagefold_os::wait::Bell;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// Serve clients; `pagefold run` starts a daemon if none runs
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  pagefold daemon
  pagefold daemon --workers 4 --scan-interval 5s --pool-max 16G
  pagefold daemon --metrics 127.0.0.1:9199
  pagefold daemon --web 127.0.0.1:9200   then open http://127.0.0.1:9200/
  pagefold daemon --replace --web 127.0.0.1:9200   instead of another
  systemctl enable --now pagefold        (with the package's unit)

From another machine: ssh -L 9200:127.0.0.1:9200 HOST, then the same address.

The daemon may be killed at any time: clients keep their merged pages and connect to the next
daemon. A small process, pagefold keeper, holds the cold tier and starts the next daemon.
pagefold stop ends daemon and keeper.")]
pub struct Args {
    /// Where to listen [default: $PAGEFOLD_SOCKET, else this user's]
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
    /// Worker threads per domain; `auto`: one per processor, at most 8
    #[arg(long, value_name = "N", default_value = "auto", value_parser = workers)]
    workers: Setting<usize>,
    /// How often memory is scanned for writes; pages unwritten for two scans are merged
    #[arg(long, value_name = "TIME", default_value = "2s", value_parser = scan_interval)]
    scan_interval: Duration,
    /// Largest size of each domain's pool, 8M at least; `auto`: half of the machine's memory
    #[arg(long, value_name = "SIZE", default_value = "auto", value_parser = pool_max)]
    pool_max: Setting<u64>,
    /// Mappings that merging may add to one client, 524288 at most; `auto`: a quarter of vm.max_map_count
    #[arg(long, value_name = "N", default_value = "auto", value_parser = vma_budget)]
    vma_budget: Setting<u64>,
    /// What becomes of equal pages that this budget keeps private
    #[arg(long, value_enum, default_value_t = Leftover::Ksm)]
    leftover: Leftover,
    /// Scheduling of the workers
    #[arg(long, value_enum, default_value_t = Priority::Idle)]
    priority: Priority,
    /// Serve OpenMetrics at HOST:PORT (loopback), unix:PATH or unix:PATH,group=NAME; or `none`
    #[arg(long, value_name = "ADDRESS", default_value = "none", value_parser = address)]
    metrics: Setting<String>,
    /// Serve a read-only page for browsers at such an address; on loopback every local user can see it
    #[arg(long, value_name = "ADDRESS", default_value = "none", value_parser = address)]
    web: Setting<String>,
    /// Attach programs as they appear: `exe=GLOB,cgroup=PATH,user=NAME,min=SIZE,domain=NAME`, more rules after `;`; or
    /// `none`
    #[arg(long, value_name = "RULES", default_value = "none", value_parser = rules)]
    attach: Setting<Vec<AttachRule>>,
    /// Exit after this long without clients; `never`: stay
    #[arg(long, value_name = "TIME", default_value = "never", value_parser = duration_or_never)]
    idle_exit: Setting<Duration>,
    /// Exit after a minute without clients, unless --idle-exit is given: `run` started this daemon
    #[arg(long, hide = true)]
    on_demand: bool,
    /// Memory limit of a domain's cold tier; its first client may set less; `auto`: a quarter of memory
    #[arg(long, value_name = "SIZE", default_value = "auto", value_parser = tier_max)]
    tier_max: Setting<u64>,
    /// Directory for the file of a cold tier whose memory is full; `none` for no file
    #[arg(long, value_name = "DIR", default_value = "/var/tmp")]
    tier_dir: PathBuf,
    /// Largest size of that file
    #[arg(long, value_name = "SIZE", default_value = "64G", value_parser = units::size)]
    tier_file_max: u64,
    /// Write to that file what was not used for so long, even while there is memory for it; `never`: only when memory is
    /// full
    #[arg(long, value_name = "TIME", default_value = "never", value_parser = tier_file_after)]
    tier_file_after: Setting<Duration>,
    /// Percent of run time that clients may lose to refaults of cold pages
    #[arg(long, value_name = "PERCENT", default_value = "1", value_parser = args::percent)]
    refault_budget: f64,
    /// How often the cold tier scans memory for writes
    #[arg(long, value_name = "TIME", default_value = "5s", value_parser = cold_scan_interval)]
    cold_scan_interval: Duration,
    /// Least idle time before a page is evicted, unless memory is short
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = units::duration)]
    cold_idle: Duration,
    /// What evicts pages to the cold tier
    #[arg(long, value_enum, default_value_t = ColdPolicy::Auto)]
    cold_policy: ColdPolicy,
    /// Park clients that were idle for so long, 100ms at least; `never`: only `park` does
    #[arg(long, value_name = "TIME", default_value = "never", value_parser = park_idle)]
    park_idle: Setting<Duration>,
    /// Spread the parking of a client over this time, no longer than --park-idle; `auto`: 10s, or --park-idle if that is
    /// shorter
    #[arg(long, value_name = "TIME", default_value = "auto", value_parser = park_within)]
    park_within: Setting<Duration>,
    /// Memory of the host to keep available: below it pools do not grow, and --park-idle is an eighth; `none`: no reserve
    #[arg(long, value_name = "SIZE", default_value = "none", value_parser = reserve)]
    reserve: Setting<u64>,
    /// Let processors enter deep idle states during faults: slower faults, less power
    #[arg(long)]
    allow_idle_states: bool,
    /// On an orderly stop, leave cold pages with the keeper for the next daemon (upgrades)
    #[arg(long)]
    keep_cold_on_exit: bool,
    /// Stop the daemon that listens there and take its place; clients keep merged and cold pages
    #[arg(long)]
    replace: bool,
    /// Start no keeper: cold pages die with this daemon (for measurements)
    #[arg(long, hide = true)]
    no_keeper: bool,
    /// Fingerprint every page instead of predicting a run from its start (for measurements)
    #[arg(long, hide = true)]
    no_predict: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Priority {
    /// Workers compete with other programs for processor time
    Normal,
    /// Workers take only processor time that no other program wants
    Idle,
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Leftover {
    /// The kernel's KSM merges them, where it runs; not those of clients with a --domain
    Ksm,
    /// They stay private
    Private,
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum ColdPolicy {
    /// Idle pages are evicted, within the refault budget
    Auto,
    /// Only `park`, hints of programs and shortage of memory evict pages
    Manual,
}

/// An option's value, or `None` for the word that leaves it to the daemon.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Setting<T>(Option<T>);

/// Reads `text` by `parse`, unless it is `word`.
fn unless<T>(word: &str, text: &str, parse: impl Fn(&str) -> Result<T, String>) -> Result<Setting<T>, String> {
    if text == word {
        return Ok(Setting(None));
    }
    parse(text).map(|value| Setting(Some(value))).map_err(|error| format!("{error}, or {word}"))
}

fn workers(text: &str) -> Result<Setting<usize>, String> {
    let number = |text: &str| text.parse().ok().filter(|count| (1..=1024).contains(count));
    unless("auto", text, |text| number(text).ok_or_else(|| "takes 1 to 1024".to_owned()))
}

fn scan_interval(text: &str) -> Result<Duration, String> {
    args::no_shorter(10, text)
}

fn cold_scan_interval(text: &str) -> Result<Duration, String> {
    args::no_shorter(50, text)
}

fn pool_max(text: &str) -> Result<Setting<u64>, String> {
    // With less there is no room for the first segment.
    unless("auto", text, |text| args::at_least(8 << 20, text))
}

fn tier_max(text: &str) -> Result<Setting<u64>, String> {
    unless("auto", text, args::tier_max)
}

fn vma_budget(text: &str) -> Result<Setting<u64>, String> {
    unless("auto", text, |text| match text.parse() {
        Ok(budget) if budget <= VMA_BUDGET_MAX => Ok(budget),
        // The agent follows at most twice that many mappings of a client.
        Ok(_) => Err(format!("takes {VMA_BUDGET_MAX} at most")),
        Err(_) => Err("takes a whole number".to_owned()),
    })
}

fn duration_or_never(text: &str) -> Result<Setting<Duration>, String> {
    unless("never", text, units::duration)
}

fn park_idle(text: &str) -> Result<Setting<Duration>, String> {
    unless("never", text, |text| args::no_shorter(100, text))
}

fn tier_file_after(text: &str) -> Result<Setting<Duration>, String> {
    unless("never", text, |text| args::no_shorter(100, text))
}

fn park_within(text: &str) -> Result<Setting<Duration>, String> {
    unless("auto", text, |text| args::no_shorter(10, text))
}

fn reserve(text: &str) -> Result<Setting<u64>, String> {
    unless("none", text, |text| args::at_least(1 << 20, text))
}

/// The bytes to keep available on a machine with `total` bytes of memory.
fn reserve_bytes(reserve: Option<u64>, total: u64) -> Result<u64, String> {
    match reserve {
        Some(size) if size > total => Err(format!(
            "--reserve {} is more than this machine's memory, {}: set it to less",
            units::show_size(size),
            units::show_size(total)
        )),
        size => Ok(size.unwrap_or(0)),
    }
}

/// The policy that parks idle clients; `None` if there is none.
fn park_policy(idle: Option<Duration>, within: Option<Duration>) -> Result<Option<cold::ParkPolicy>, String> {
    match (idle, within) {
        (None, None) => Ok(None),
        (None, Some(_)) => Err("--park-within needs --park-idle: clients are parked only by request".to_owned()),
        (Some(idle), Some(within)) if within > idle => Err(format!(
            "--park-within {} is longer than --park-idle {}: set it to that or less",
            units::show_duration(within),
            units::show_duration(idle)
        )),
        (Some(idle), within) => {
            Ok(Some(cold::ParkPolicy { idle, within: within.unwrap_or(PARK_WITHIN_MAX.min(idle)) }))
        }
    }
}

fn rules(text: &str) -> Result<Setting<Vec<AttachRule>>, String> {
    unless("none", text, attach_rules::parse)
}

fn address(text: &str) -> Result<Setting<String>, String> {
    let parse = |text: &str| match ListenAddress::parse(text) {
        Ok(_) => Ok(text.to_owned()),
        Err(error) => Err(error.to_string()),
    };
    // `unix:none` is a socket.
    if text.starts_with("unix:") { parse(text).map(|at| Setting(Some(at))) } else { unless("none", text, parse) }
}

/// How long a daemon that `run` started stays without clients.
const ON_DEMAND_IDLE: Duration = Duration::from_secs(60);

/// Time of a parking, if none is given.
const PARK_WITHIN_MAX: Duration = Duration::from_secs(10);

/// Pause before another try to take a running daemon's place.
const RETRY: Duration = Duration::from_millis(20);

static STOP: OnceLock<Bell> = OnceLock::new();

extern "C" fn on_signal(_: libc::c_int) {
    if let Some(bell) = STOP.get() {
        bell.ring();
    }
}

/// Runs the daemon.
pub fn run(args: Args) -> Result<ExitCode, Error> {
    if let Some(lack) = pagefold_os::probe::too_old() {
        return Err(format!("daemon needs {}: this is {}; {}", lack.name, lack.detail, lack.cure).into());
    }
    let park = park_policy(args.park_idle.0, args.park_within.0)?;
    let (_, total) = procfs::available_and_total();
    let reserve_bytes = reserve_bytes(args.reserve.0, total)?;
    let socket = daemon_client::socket(args.socket.as_deref())?;
    let program = std::env::current_exe()?.into_os_string();
    // A daemon that a keeper started has inherited SIG_IGN for SIGCHLD.
    // SAFETY: sets the default action; no other thread runs yet.
    unsafe { libc::signal(libc::SIGCHLD, libc::SIG_DFL) };
    if args.tier_dir.as_os_str() != "none" && !args.tier_dir.is_dir() {
        note!(
            "pagefold: note: --tier-dir {} is not a directory: cold tiers have only their memory",
            args.tier_dir.display()
        );
    }
    // Of its own services systemd starts the next one itself. A successor finds no daemon that it could replace.
    let successor: Vec<OsString> = match own_service() {
        Some(_) => Vec::new(),
        None => std::iter::once(program.clone())
            .chain(config::arguments().into_iter().filter(|word| word != "--replace"))
            .collect(),
    };
    let daemon = Daemon::new(Config {
        socket: socket.clone(),
        workers: args.workers.0.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, |n| n.get().min(8))),
        period: args.scan_interval,
        pool_max_bytes: args.pool_max.0.unwrap_or(total / 2),
        reserve_bytes,
        vma_budget: args.vma_budget.0.unwrap_or_else(|| (procfs::mappings_max() / 4).min(VMA_BUDGET_MAX)),
        leftover: match args.leftover {
            Leftover::Ksm => pagefold_daemon::Leftover::Ksm,
            Leftover::Private => pagefold_daemon::Leftover::Private,
        },
        idle_priority: args.priority == Priority::Idle,
        idle_exit: args.idle_exit.0.or(args.on_demand.then_some(ON_DEMAND_IDLE)),
        on_demand: args.on_demand,
        service: own_service(),
        metrics: args.metrics.0,
        web: args.web.0,
        attached_agent: daemon_client::ATTACHED_AGENT,
        attach: args.attach.0.unwrap_or_default(),
        predict: !args.no_predict,
        cold: cold::Config {
            tier_max_bytes: args.tier_max.0.unwrap_or_else(daemon_client::tier_max_auto),
            directory: (args.tier_dir.as_os_str() != "none").then_some(args.tier_dir),
            file_max_bytes: args.tier_file_max,
            file_after: args.tier_file_after.0,
            tolerance: args.refault_budget,
            tick: args.cold_scan_interval,
            idle_min: args.cold_idle,
            park,
            reserve_bytes,
            automatic: args.cold_policy == ColdPolicy::Auto,
            keeper: (!args.no_keeper).then(|| vec![program, "keeper".into()]),
            successor: successor.clone(),
            hand_over: args.keep_cold_on_exit,
            keep_awake: !args.allow_idle_states,
            ..cold::Config::default()
        },
    });
    daemon.add_metrics(more_metrics);
    daemon.add_status(crate::remote_status::add_to);
    // Each pool segment and each client takes descriptors.
    let _ = pagefold_os::fd::raise_limit();
    let stop = STOP.get_or_init(|| Bell::new().expect("the first descriptors are there"));
    for signal in [libc::SIGTERM, libc::SIGINT] {
        // SAFETY: the handler only writes to a descriptor.
        unsafe { libc::signal(signal, on_signal as *const () as libc::sighandler_t) };
    }
    let watch = daemon.clone();
    std::thread::spawn(move || {
        let mut polls = [libc::pollfd { fd: stop.fd().raw(), events: libc::POLLIN, revents: 0 }];
        while pagefold_os::fd::poll(&mut polls, -1) != Ok(1) {}
        watch.stop();
    });
    let to_supervise: &[OsString] = if args.no_keeper { &[] } else { &successor };
    let ran = if args.replace { replace(&daemon, &socket, to_supervise)? } else { pagefold_daemon::run(&daemon) };
    // The command that started this daemon may not have asked it yet.
    if args.on_demand && ran.as_ref().err().is_none_or(|error| error.kind() == std::io::ErrorKind::AddrInUse) {
        daemon_client::tell_gave_way();
    }
    ran.map_err(|error| {
        if is_taken(&error) {
            let named = args.socket.map_or(String::new(), |path| format!(" --socket {}", path.display()));
            return format!(
                "{error}; this command with --replace takes its place, pagefold stop{named} ends it; clients keep merged pages"
            );
        }
        format!("daemon at {}: {error}", socket.display())
    })?;
    Ok(ExitCode::SUCCESS)
}

/// True if another daemon has the socket; an address for metrics or the page may be taken as well.
fn is_taken(error: &std::io::Error) -> bool {
    error.kind() == std::io::ErrorKind::AddrInUse && error.to_string().contains("a daemon listens")
}

/// Stops the daemon at `socket`, and runs `daemon` in its place. A daemon that a program starts at the same time may take
/// the place first: it is replaced too.
fn replace(daemon: &Arc<Daemon>, socket: &Path, successor: &[OsString]) -> Result<std::io::Result<()>, Error> {
    let end = Instant::now() + daemon_client::DAEMON_START_MAX;
    loop {
        // Lives until the new daemon has ended: the keeper starts a daemon when this connection ends before it listens.
        let _keeper = stop::make_way(socket, successor)?;
        match pagefold_daemon::run(daemon) {
            Err(error) if is_taken(&error) && Instant::now() < end => std::thread::sleep(RETRY),
            ran => return Ok(ran),
        }
    }
}

/// How systemctl names the service that this process is; `None` if systemd did not start this very process.
fn own_service() -> Option<String> {
    std::env::var("SYSTEMD_EXEC_PID").ok().filter(|pid| *pid == std::process::id().to_string())?;
    let groups = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    Some(service_of(&groups))
}

/// The service at the end of a process's control group, as systemctl names it.
fn service_of(groups: &str) -> String {
    // Version 2 has one line; of version 1 systemd uses the hierarchy with its name.
    let line = groups.lines().find(|line| line.starts_with("0::/") || line.contains(":name=systemd:"));
    let names = line.and_then(|line| line.rsplit(':').next()).unwrap_or_default().split('/');
    let services: Vec<&str> = names.filter(|name| name.ends_with(".service")).collect();
    match services[..] {
        [manager, .., unit] if manager.starts_with("user@") => format!("--user {unit}"),
        [.., unit] => unit.to_owned(),
        [] => "pagefold.service".to_owned(),
    }
}

fn more_metrics(out: &mut String) {
    pagefold_disk::metrics::render(&crate::remote_status::disks(), out);
    crate::remote_status::render_images(out);
}

#[cfg(test)]
mod tests {
    use super::{park_idle, park_policy, park_within, reserve, reserve_bytes, service_of};
    use std::time::Duration;

    #[test]
    fn a_park_policy_is_whole_or_is_refused_with_the_cure() {
        let s = Duration::from_secs;
        assert_eq!(park_policy(None, None), Ok(None));
        let within = |idle, within| park_policy(Some(s(idle)), within).map(|policy| policy.map(|policy| policy.within));
        assert_eq!(within(300, None), Ok(Some(s(10))));
        assert_eq!(within(4, None), Ok(Some(s(4))));
        assert_eq!(within(4, Some(s(4))), Ok(Some(s(4))));
        let wrong = within(4, Some(s(5))).unwrap_err();
        assert_eq!(wrong, "--park-within 5.0 s is longer than --park-idle 4.0 s: set it to that or less");
        assert!(park_policy(None, Some(s(5))).unwrap_err().contains("needs --park-idle"));
        for nonsense in ["0", "0s", "soon", "-5s", "10ms", "1e99", "", "5 parsecs"] {
            let wrong = park_idle(nonsense).unwrap_err();
            assert!(wrong.ends_with(", or never") && wrong.lines().count() == 1, "{nonsense}: {wrong}");
        }
        assert!(reserve("0").is_err() && reserve("2 TB or so").is_err() && reserve("none").is_ok());
        let wrong = reserve_bytes(Some(9 << 30), 8 << 30).unwrap_err();
        assert_eq!(wrong, "--reserve 9.00 GiB is more than this machine's memory, 8.00 GiB: set it to less");
        assert_eq!((reserve_bytes(Some(8 << 30), 8 << 30), reserve_bytes(None, 0)), (Ok(8 << 30), Ok(0)));
        assert!(park_within("0").is_err() && park_within("9ms").is_err() && park_within("10ms").is_ok());
    }

    #[test]
    fn a_service_is_named_as_systemctl_names_it() {
        for (groups, name) in [
            ("0::/system.slice/pagefold.service\n", "pagefold.service"),
            ("0::/system.slice/system-pagefold.slice/pagefold@kvm.service\n", "pagefold@kvm.service"),
            (
                "0::/user.slice/user-7.slice/user@7.service/app.slice/pagefold-user.service\n",
                "--user pagefold-user.service",
            ),
            ("4:cpu:/x.service\n1:name=systemd:/system.slice/pagefold.service\n", "pagefold.service"),
            ("", "pagefold.service"),
        ] {
            assert_eq!(service_of(groups), name, "{groups}");
        }
    }
}
