//! The ways to merge the instances of a kind, and the measure of one.

use crate::instance::Instance;
use crate::ksm_peer;
use crate::process::{self, Failure};
use crate::restore;
use crate::tool::Daemon;
use pagefold_os::{ksm, procfs};
use serde_json::Value;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// What merges.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// Nothing: the memory that the others are compared with.
    Nothing,
    /// The kernel's KSM at full speed, for all memory of the programs (`PR_SET_MEMORY_MERGE`).
    Ksm,
    /// `pagefold attach` of programs that hold their data already.
    Attach,
    /// `pagefold run --manage all`.
    Run,
}

/// Instances of each kind.
const INSTANCES: usize = 3;

/// What was measured.
pub struct Measured {
    /// What merged.
    pub way: Way,
    /// The sum of Pss of all processes of all instances, once it changes no more.
    pub pss_mib: f64,
    /// What merging itself takes beside them: the daemon's memory, or KSM's records.
    pub own_mib: f64,
    /// What a dry run finds in these instances, in the end: with nothing, all that could be saved. Where blocks lie in pages
    /// by chance, other instances of the same kind have more or less. `None` with KSM: a dry run does not know which pages
    /// KSM has merged.
    pub left_mib: Option<f64>,
    /// Whether every instance still holds its data.
    pub is_right: bool,
    /// What the tool says about programs that it does not manage.
    pub notes: Vec<String>,
}

/// The engine while it runs; its settings are restored when this is dropped.
enum RunningEngine {
    Nothing,
    Ksm { _restored: ksm::Settings },
    Ours(Daemon),
}

impl Way {
    /// In this order they are measured.
    pub const ALL: [Way; 4] = [Way::Nothing, Way::Ksm, Way::Attach, Way::Run];

    /// As the table calls it.
    pub fn name(self) -> &'static str {
        match self {
            Way::Nothing => "nothing",
            Way::Ksm => "KSM",
            Way::Attach => "attach",
            Way::Run => "run",
        }
    }

    fn engine(self) -> Result<RunningEngine, Failure> {
        Ok(match self {
            Way::Nothing => RunningEngine::Nothing,
            Way::Ksm => RunningEngine::Ksm { _restored: ksm_peer::at_full_speed()? },
            Way::Attach | Way::Run => RunningEngine::Ours(Daemon::start(&[])?),
        })
    }

    /// The command that starts an instance in `dir`.
    fn command(self, engine: &RunningEngine, words: &[String], dir: &Path) -> Command {
        let wrapper = match (self, engine) {
            (Way::Run, RunningEngine::Ours(daemon)) => daemon.run(&["--manage", "all"]),
            _ => Vec::new(),
        };
        let words: Vec<&String> = wrapper.iter().chain(words).collect();
        let mut command = Command::new(words[0]);
        command.args(&words[1..]).current_dir(dir).stderr(Stdio::null());
        if self == Way::Ksm {
            ksm_peer::merge_all(&mut command);
        }
        command
    }

    /// Starts the instances, merges them until their memory changes no more, and has each compare its data.
    pub fn measure(self, words: &[String], data: &Path, dir: &Path, rest: Rest) -> Result<Measured, Failure> {
        let (home, _removed) = restore::folder(&format!("coverage-{}", self.name()))?;
        let engine = self.engine()?;
        let start = |number: usize| -> Result<Instance, Failure> {
            let own = home.join(number.to_string());
            std::fs::create_dir(&own)?;
            let word = |word: &String| match word.as_str() {
                "FILE" => data.display().to_string(),
                "DIR" => own.display().to_string(),
                _ => word.clone(),
            };
            Ok(Instance::start(&mut self.command(&engine, &words.iter().map(word).collect::<Vec<_>>(), dir))?)
        };
        let mut instances = (0..INSTANCES).map(start).collect::<Result<Vec<_>, _>>()?;
        instances.iter().try_for_each(Instance::ready)?;
        let mut notes = Vec::new();
        match (self, &engine) {
            (Way::Ksm, _) => ksm::write("run", 1)?,
            (Way::Attach, RunningEngine::Ours(daemon)) => notes.extend(attach(daemon, &instances)),
            _ => {}
        }
        let pss = settle(&instances, if self == Way::Nothing { Rest::ALONE } else { rest });
        let own = match &engine {
            RunningEngine::Nothing => 0,
            RunningEngine::Ksm { .. } => ksm_peer::records_bytes(instances.iter().flat_map(Instance::pids)),
            RunningEngine::Ours(daemon) => daemon.own_bytes()?,
        };
        if let RunningEngine::Ours(daemon) = &engine {
            let processes = daemon.status()?.unmanaged_processes;
            notes
                .extend(processes.iter().map(|process| format!("{} is not managed: {}", process.name, process.reason)));
        }
        let left = (self != Way::Ksm).then(|| found(&instances)).transpose()?;
        let mut is_right = true;
        for instance in &mut instances {
            if let Err(why) = instance.ask("") {
                is_right = false;
                notes.push(why);
            }
        }
        let notes = notes.into_iter().map(|note| format!("{}: {note}", self.name())).collect();
        let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
        Ok(Measured { way: self, pss_mib: mib(pss), own_mib: mib(own), left_mib: left.map(mib), is_right, notes })
    }
}

/// When the memory is taken to change no more.
#[derive(Clone, Copy)]
pub struct Rest {
    /// The longest time to the first change: the daemon first looks for some seconds what is written.
    first: Duration,
    /// After a change, for how long there is no other.
    quiet: Duration,
}

impl Rest {
    /// With nothing that merges: programs come to rest by themselves.
    const ALONE: Rest = Rest { first: Duration::from_secs(1), quiet: Duration::from_secs(1) };

    /// With an engine.
    pub fn new(is_quick: bool) -> Rest {
        let [first, quiet] = if is_quick { [8, 3] } else { [12, 4] }.map(Duration::from_secs);
        Rest { first, quiet }
    }
}

/// The longest time for one measure.
const SETTLE_MAX: Duration = Duration::from_secs(90);
/// Programs write a little all the time: less than this is no change.
const CHANGE: u64 = 1 << 20;
/// Processes with less memory of their own than this hold none of the data: a shell that starts a server.
const SMALL: u64 = 4 << 20;

fn pss(instances: &[Instance]) -> u64 {
    let pids = instances.iter().flat_map(Instance::pids);
    pids.filter_map(|pid| procfs::memory(pid).ok()).map(|memory| memory.pss).sum()
}

/// Waits until the memory changes no more; returns it.
fn settle(instances: &[Instance], rest: Rest) -> u64 {
    let began = Instant::now();
    let (mut last, mut at) = (pss(instances), None);
    while began.elapsed() < SETTLE_MAX {
        match at {
            None if began.elapsed() > rest.first => break,
            Some(at) if Instant::elapsed(&at) > rest.quiet => break,
            _ => std::thread::sleep(Duration::from_millis(250)),
        }
        let now = pss(instances);
        if now.abs_diff(last) > CHANGE {
            (last, at) = (now, Some(Instant::now()));
        }
    }
    pss(instances)
}

/// Attaches all processes that hold something; returns what is said about those that refuse.
fn attach(daemon: &Daemon, instances: &[Instance]) -> Vec<String> {
    let pids = instances
        .iter()
        .flat_map(Instance::pids)
        .filter(|pid| procfs::memory(*pid).is_ok_and(|memory| memory.private > SMALL));
    let answers = pids.map(|pid| daemon.attach(pid));
    answers.filter_map(Result::err).map(|error| error.to_string()).collect()
}

/// The bytes that a dry run over all processes says could be shared.
fn found(instances: &[Instance]) -> Result<u64, Failure> {
    let pids = instances.iter().flat_map(Instance::pids).map(|pid| pid.to_string());
    let text = process::output(Command::new(process::tool()?).args(["scan", "--json", "--one-domain"]).args(pids))?;
    let scan: Value = serde_json::from_str(&text)?;
    let bytes = |field: &str| scan["cost"][field].as_u64().ok_or_else(|| format!("scan says nothing of {field}"));
    Ok(bytes("duplicate_bytes")? + bytes("zero_bytes")?)
}
