//! The live view's state: samples, their history, and what the user asked to see.
//!
//! A [`Sample`] is plain data; keys change the [`View`]; [`screen`] draws both. Nothing here knows of sockets or
//! terminals, so that all of it can be tested without either.

pub mod screen;

use crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use pagefold_daemon::cold::{ColdClient, ColdStatus};
use pagefold_daemon::history::{FINE_POINTS_MAX, History, Point};
use pagefold_daemon::status::{Client, Status};
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

/// Longest filter that can be typed.
const FILTER_BYTES_MAX: usize = 40;
const CHOOSE: &str = "select a client first: up, down";

/// What all parts of pagefold do at one moment.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Sample {
    /// Time of the sample, since 1970.
    pub at: Duration,
    /// The daemon's past, which takes the place of what is known so far.
    pub past: Option<History>,
    /// The daemon's status; `None` if no daemon answers.
    pub status: Option<Status>,
    /// Why there is no status.
    pub trouble: Option<String>,
    /// Mounts of disk images.
    pub disks: Vec<Disk>,
    /// Stores of image trees.
    pub images: Vec<Images>,
}

impl Sample {
    /// The cold tier; `None` if there is none.
    pub fn cold(&self) -> Option<&ColdStatus> {
        self.status.as_ref().map(|status| &status.cold).filter(|cold| !cold.domains.is_empty())
    }
}

/// Processor time of each client's agent so far, by process id.
fn cpu_ns(sample: &Sample) -> BTreeMap<i32, u64> {
    let live = sample.status.iter().flat_map(|status| &status.clients);
    let cold = sample.cold().into_iter().flat_map(|cold| &cold.clients);
    let mut all: BTreeMap<i32, u64> = cold.map(|client| (client.pid, client.agent_cpu_ns)).collect();
    // A client of both has one agent.
    all.extend(live.map(|client| (client.pid, client.stats.agent_cpu_ns)));
    all
}

/// The sum of `of` over `all`.
pub fn sum<T>(all: &[T], of: impl Fn(&T) -> u64) -> u64 {
    all.iter().map(of).sum()
}

/// A mount of disk images, or one of its images.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Disk {
    pub name: String,
    pub resident_bytes: u64,
    /// Of the cache; of an image, its size.
    pub limit_bytes: u64,
    pub saved_bytes: u64,
    pub io_saved_bytes: u64,
    pub dirty_bytes: u64,
    pub hits: u64,
    pub misses: u64,
    pub images: Vec<Disk>,
}

/// A store of image trees.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Images {
    pub name: String,
    pub domain: String,
    pub mounts: u64,
    pub resident_bytes: u64,
    pub saved_bytes: u64,
}

/// Disk mounts and image stores at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct MountPoint {
    pub disk_saved_bytes: u64,
    pub disk_held_bytes: u64,
    /// Blocks of disk images that had to be read, per second.
    pub misses: f64,
    pub image_saved_bytes: u64,
    pub image_held_bytes: u64,
}

/// What the tables of clients are sorted by.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Sort {
    #[default]
    Shared,
    Managed,
    Volatile,
    Breaks,
    Cpu,
    Name,
    Pid,
}

impl Sort {
    const ALL: [Sort; 7] =
        [Sort::Shared, Sort::Managed, Sort::Volatile, Sort::Breaks, Sort::Cpu, Sort::Name, Sort::Pid];

    /// As shown below the table, where columns of the cold tier stand in the place of live ones.
    pub const fn word(self, pane: Pane) -> &'static str {
        match (self, pane) {
            (Sort::Shared, Pane::Cold) => "out",
            (Sort::Managed, Pane::Cold) => "back",
            (Sort::Volatile, Pane::Cold) => "waited",
            (Sort::Breaks, Pane::Cold) => "faults",
            _ => self.live_word(),
        }
    }

    const fn live_word(self) -> &'static str {
        match self {
            Sort::Shared => "shared",
            Sort::Managed => "managed",
            Sort::Volatile => "volatile",
            Sort::Breaks => "breaks",
            Sort::Cpu => "cpu",
            Sort::Name => "name",
            Sort::Pid => "pid",
        }
    }

    fn next(self) -> Sort {
        let at = Sort::ALL.iter().position(|&sort| sort == self).unwrap_or(0);
        Sort::ALL[(at + 1) % Sort::ALL.len()]
    }
}

/// What the table below the graphs shows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Pane {
    #[default]
    Live,
    Disks,
    Images,
    Cold,
}

impl Pane {
    /// All of them, in the order of their keys.
    pub const ALL: [Pane; 4] = [Pane::Live, Pane::Disks, Pane::Images, Pane::Cold];

    /// As shown in the list of panes.
    pub const fn word(self) -> &'static str {
        match self {
            Pane::Live => "live",
            Pane::Disks => "disks",
            Pane::Images => "images",
            Pane::Cold => "cold",
        }
    }
}

/// All that the screen shows.
#[derive(Clone, Debug, Default)]
pub struct View {
    sample: Sample,
    /// The last one, which is not on show while the picture is kept still.
    last: Sample,
    history: History,
    mounts: VecDeque<MountPoint>,
    /// Processors in use by each client's agent, on show and of the last sample.
    cpu_of: BTreeMap<i32, f64>,
    last_cpu_of: BTreeMap<i32, f64>,
    pub pane: Pane,
    pub sort: Sort,
    pub reverse: bool,
    /// Only this domain's clients.
    pub domain: Option<String>,
    /// The selected client, by process id, so that it stays selected when the order changes.
    pub selected: Option<i32>,
    /// True while the user keeps the picture still; samples go into the history all the same.
    pub frozen: bool,
    pub help: bool,
    /// Only clients whose name, domain or process id contains this, in any case.
    pub filter: String,
    /// True while the filter is typed.
    pub typing: bool,
    /// What the user has to confirm.
    pub question: Option<Order>,
    /// What came of the last order, until the next key.
    pub message: Option<String>,
    /// True if colours are wanted.
    pub color: bool,
}

/// What the user asks of the daemon for one client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    Park(i32),
    Unpark(i32),
    Unmerge(i32),
}

/// What a key asks of the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Act {
    /// Nothing changed.
    None,
    /// Draw again.
    Draw,
    /// Ask the daemon, and draw again.
    Ask(Order),
    /// End.
    Quit,
}

impl View {
    /// An empty view, with colours or without.
    pub fn new(color: bool) -> View {
        View { color, ..View::default() }
    }

    /// Takes a new sample. A daemon that was started anew counts from zero: rates are then zero, not negative.
    pub fn push(&mut self, mut sample: Sample) {
        if let Some(past) = sample.past.take() {
            self.history = past;
        }
        let before = &self.last;
        let seconds = sample.at.saturating_sub(before.at).as_secs_f64();
        let per_second = |now: u64, then: Option<u64>| match then {
            Some(then) if seconds > 0.0 => now.saturating_sub(then) as f64 / seconds,
            _ => 0.0,
        };
        if let Some(status) = &sample.status {
            self.history.push(sample.at.as_secs_f64(), status);
        }
        let then = cpu_ns(before);
        let share = |(pid, now): (i32, u64)| (pid, per_second(now, then.get(&pid).copied()) / 1e9);
        self.last_cpu_of = cpu_ns(&sample).into_iter().map(share).collect();
        let misses = |disks: &[Disk]| disks.iter().map(|disk| disk.misses).sum();
        // Mounts come and go: what the first sample with one counted was not read in this second.
        let then = (before.disks.len() == sample.disks.len()).then(|| misses(&before.disks));
        if self.mounts.len() == FINE_POINTS_MAX {
            self.mounts.pop_front();
        }
        self.mounts.push_back(MountPoint {
            disk_saved_bytes: sum(&sample.disks, |disk| disk.saved_bytes),
            disk_held_bytes: sum(&sample.disks, |disk| disk.resident_bytes),
            misses: per_second(misses(&sample.disks), then),
            image_saved_bytes: sum(&sample.images, |store| store.saved_bytes),
            image_held_bytes: sum(&sample.images, |store| store.resident_bytes),
        });
        self.last = sample;
        if !self.frozen {
            self.sample = self.last.clone();
            self.cpu_of = self.last_cpu_of.clone();
            let gone = |domain: &String| self.domains().iter().all(|known| known != domain);
            if self.domain.as_ref().is_some_and(gone) {
                self.domain = None;
            }
        }
    }

    /// The sample on show.
    pub const fn sample(&self) -> &Sample {
        &self.sample
    }

    /// The points so far of what is on show, oldest first.
    pub fn history(&self) -> &VecDeque<Point> {
        self.history.fine(self.domain.as_deref())
    }

    /// The last point, if there is a daemon.
    pub fn now(&self) -> Point {
        let last = self.history().back().filter(|_| self.last.status.is_some());
        last.copied().unwrap_or_default()
    }

    /// The points so far of mounts and stores, which have no domain, oldest first.
    pub const fn mounts(&self) -> &VecDeque<MountPoint> {
        &self.mounts
    }

    /// Processors in use by a client's agent.
    pub fn cpu_of(&self, pid: i32) -> f64 {
        self.cpu_of.get(&pid).copied().unwrap_or_default()
    }

    /// Names of the domains on show, of all products, in order.
    pub fn domains(&self) -> Vec<String> {
        let sample = &self.sample;
        let live = sample.status.iter().flat_map(|status| status.domains.iter().map(|domain| domain.name.clone()));
        let cold = sample.cold().into_iter().flat_map(|cold| cold.domains.iter().map(|tier| tier.name.clone()));
        let images = sample.images.iter().map(|store| store.domain.clone());
        let mut names: Vec<String> = live.chain(cold).chain(images).collect();
        names.sort();
        names.dedup();
        names
    }

    /// True if what belongs to `domain` is on show.
    pub fn shows(&self, domain: &str) -> bool {
        self.domain.as_ref().is_none_or(|shown| shown == domain)
    }

    /// True if the filter lets a client through.
    fn passes(&self, pid: i32, name: &str, domain: &str) -> bool {
        let wanted = self.filter.to_lowercase();
        let has = |text: &str| text.to_lowercase().contains(&wanted);
        self.shows(domain) && (has(name) || has(domain) || pid.to_string().contains(&wanted))
    }

    /// `order`, the other way round where that was asked for.
    fn turned(&self, order: std::cmp::Ordering) -> std::cmp::Ordering {
        if self.reverse { order.reverse() } else { order }
    }

    /// The clients of the cold tier to show, in order.
    pub fn cold_clients(&self) -> Vec<&ColdClient> {
        let all = self.sample.cold().into_iter().flat_map(|cold| &cold.clients);
        let mut clients: Vec<&ColdClient> =
            all.filter(|client| self.passes(client.pid, &client.name, &client.domain)).collect();
        clients.sort_by(|a, b| {
            let order = match self.sort {
                Sort::Shared => b.pages_out.cmp(&a.pages_out),
                Sort::Managed => b.pages_returned.cmp(&a.pages_returned),
                Sort::Volatile => b.fault_ns.cmp(&a.fault_ns),
                Sort::Breaks => b.refaults.cmp(&a.refaults),
                Sort::Cpu => self.cpu_of(b.pid).total_cmp(&self.cpu_of(a.pid)),
                Sort::Name => a.name.cmp(&b.name),
                Sort::Pid => a.pid.cmp(&b.pid),
            };
            self.turned(order).then(a.pid.cmp(&b.pid))
        });
        clients
    }

    /// Process ids of the table on show, in order.
    fn rows(&self) -> Vec<i32> {
        match self.pane {
            Pane::Live => self.clients().iter().map(|client| client.pid).collect(),
            Pane::Cold => self.cold_clients().iter().map(|client| client.pid).collect(),
            Pane::Disks | Pane::Images => Vec::new(),
        }
    }

    /// The clients to show, in order.
    pub fn clients(&self) -> Vec<&Client> {
        let all = self.sample.status.iter().flat_map(|status| &status.clients);
        let mut clients: Vec<&Client> =
            all.filter(|client| self.passes(client.pid, &client.name, &client.domain)).collect();
        let shown = |client: &Client| client.stats.pages_sharing + client.stats.pages_zero;
        clients.sort_by(|a, b| {
            // Largest number first, names and process ids from the front.
            let order = match self.sort {
                Sort::Shared => shown(b).cmp(&shown(a)),
                Sort::Managed => b.stats.pages.cmp(&a.stats.pages),
                Sort::Volatile => b.stats.pages_volatile.cmp(&a.stats.pages_volatile),
                Sort::Breaks => b.stats.cow_breaks.cmp(&a.stats.cow_breaks),
                Sort::Cpu => self.cpu_of(b.pid).total_cmp(&self.cpu_of(a.pid)),
                Sort::Name => a.name.cmp(&b.name),
                Sort::Pid => a.pid.cmp(&b.pid),
            };
            self.turned(order).then(a.pid.cmp(&b.pid))
        });
        clients
    }

    /// Place of the selected client among those on show.
    pub fn selected_row(&self) -> Option<usize> {
        let selected = self.selected?;
        self.rows().iter().position(|pid| *pid == selected)
    }

    /// Moves the selection by `step` rows; from nowhere to the first row, or up to the last.
    fn select(&mut self, step: isize) {
        let row = match self.selected_row() {
            Some(row) => row.saturating_add_signed(step),
            None if step > 0 => 0,
            None => usize::MAX,
        };
        self.select_row(row);
    }

    /// Selects row `row`, or the last.
    fn select_row(&mut self, row: usize) {
        let rows = self.rows();
        self.selected = rows.get(row).or(rows.last()).copied();
    }

    /// Does what `key` means.
    pub fn key(&mut self, key: KeyEvent) -> Act {
        if key.modifiers.contains(KeyModifiers::CONTROL) && key.code == KeyCode::Char('c') {
            return Act::Quit;
        }
        if self.help {
            self.help = false;
            return if key.code == KeyCode::Char('q') { Act::Quit } else { Act::Draw };
        }
        let had_message = self.message.take().is_some();
        if let Some(order) = self.question.take() {
            return if key.code == KeyCode::Char('y') { Act::Ask(order) } else { Act::Draw };
        }
        if self.typing {
            return self.type_filter(key.code);
        }
        match key.code {
            KeyCode::Char('q') => return Act::Quit,
            KeyCode::Esc if had_message => {}
            KeyCode::Esc if self.selected.is_none() && self.domain.is_none() && self.filter.is_empty() => {
                return Act::Quit;
            }
            KeyCode::Esc => {
                (self.selected, self.domain) = (None, None);
                self.filter.clear();
            }
            KeyCode::Char('/') => self.typing = matches!(self.pane, Pane::Live | Pane::Cold),
            KeyCode::Char('p') => return self.park(),
            KeyCode::Char('u') => match self.chosen() {
                Some(pid) => self.question = Some(Order::Unmerge(pid)),
                None => self.message = Some(CHOOSE.into()),
            },
            KeyCode::Char('?' | 'h') | KeyCode::F(1) => self.help = true,
            KeyCode::Char('s') => self.sort = self.sort.next(),
            KeyCode::Char('r') => self.reverse = !self.reverse,
            KeyCode::Char('d') => self.next_domain(),
            KeyCode::Char(' ') => self.frozen = !self.frozen,
            KeyCode::Char(digit @ '1'..='4') => self.pane = Pane::ALL[digit as usize - '1' as usize],
            KeyCode::Tab => self.pane = Pane::ALL[(self.pane as usize + 1) % Pane::ALL.len()],
            KeyCode::Up | KeyCode::Char('k') => self.select(-1),
            KeyCode::Down | KeyCode::Char('j') => self.select(1),
            KeyCode::PageUp => self.select(-10),
            KeyCode::PageDown => self.select(10),
            KeyCode::Home => self.select_row(0),
            KeyCode::End => self.select_row(usize::MAX),
            _ if !had_message => return Act::None,
            _ => {}
        }
        Act::Draw
    }

    /// The selected client, if it is on show.
    fn chosen(&self) -> Option<i32> {
        self.selected_row().and(self.selected)
    }

    /// Parks the selected client; one that is parked comes back.
    fn park(&mut self) -> Act {
        let Some(pid) = self.chosen() else {
            self.message = Some(CHOOSE.into());
            return Act::Draw;
        };
        let mut cold = self.sample.cold().into_iter().flat_map(|cold| &cold.clients);
        let is_parked = cold.any(|client| client.pid == pid && client.parked);
        Act::Ask(if is_parked { Order::Unpark(pid) } else { Order::Park(pid) })
    }

    fn type_filter(&mut self, key: KeyCode) -> Act {
        match key {
            KeyCode::Char(letter) if self.filter.len() < FILTER_BYTES_MAX => self.filter.push(letter),
            KeyCode::Backspace => drop(self.filter.pop()),
            KeyCode::Enter => self.typing = false,
            KeyCode::Esc => {
                self.typing = false;
                self.filter.clear();
            }
            _ => return Act::None,
        }
        Act::Draw
    }

    /// From all to the first domain, through all, and back to all.
    fn next_domain(&mut self) {
        let domains = self.domains();
        let at = self.domain.as_ref().and_then(|domain| domains.iter().position(|known| known == domain));
        self.domain = match (&self.domain, at) {
            (None, _) => domains.first().cloned(),
            (Some(_), Some(at)) => domains.get(at + 1).cloned(),
            (Some(_), None) => None,
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagefold_daemon::cold::ColdDomain;
    use pagefold_daemon::status::Totals;
    use pagefold_merge::stats::{ClientStats, DomainStats};

    fn client(pid: i32, domain: &str, sharing: u64) -> Client {
        let stats = ClientStats { pages_sharing: sharing, ..ClientStats::default() };
        Client { pid, name: format!("client-{pid}"), domain: domain.into(), stats, ..Client::default() }
    }

    fn sample(second: u64, merged: u64) -> Sample {
        let domain = |name: &str| DomainStats { name: name.into(), ..DomainStats::default() };
        Sample {
            at: Duration::from_secs(second),
            status: Some(Status {
                totals: Totals { pages_merged: merged, saved_bytes: 1 << 20, ..Totals::default() },
                domains: vec![domain("a"), domain("b")],
                clients: vec![client(1, "a", 5), client(2, "b", 50), client(3, "a", 7)],
                ..Status::default()
            }),
            ..Sample::default()
        }
    }

    fn press(view: &mut View, keys: &str) {
        for letter in keys.chars() {
            view.key(KeyCode::Char(letter).into());
        }
    }

    fn pids(view: &View) -> Vec<i32> {
        view.clients().iter().map(|client| client.pid).collect()
    }

    #[test]
    fn graphs_begin_with_the_past_of_the_daemon() {
        let mut past = History::default();
        for second in 0..30u64 {
            past.push(second as f64, sample(0, second * 10).status.as_ref().expect("a status"));
        }
        let mut view = View::new(false);
        view.push(Sample { past: Some(past), ..sample(31, 310) });
        assert_eq!(view.history().len(), 31);
        assert_eq!(view.now().merged, 10.0, "its rate follows from the daemon's last sample");
        view.domain = Some("a".into());
        assert_eq!(view.history().len(), 31);
    }

    #[test]
    fn rates_are_differences_and_never_negative() {
        let mut view = View::new(false);
        view.push(sample(10, 1000));
        assert_eq!((view.now().merged, view.now().cpu), (0.0, 0.0), "one sample has no rate");
        view.push(sample(12, 3000));
        assert_eq!(view.now().merged, 1000.0);
        view.push(sample(13, 5));
        assert_eq!(view.now().merged, 0.0, "the daemon was started anew");
        view.push(Sample::default());
        view.push(sample(13, 5));
        assert_eq!(view.now().merged, 0.0);
    }

    #[test]
    fn history_is_a_ring() {
        let mut view = View::new(false);
        (0..FINE_POINTS_MAX as u64 + 50).for_each(|second| view.push(sample(second, second)));
        assert_eq!((view.history().len(), view.mounts().len()), (FINE_POINTS_MAX, FINE_POINTS_MAX));
    }

    #[test]
    fn a_domain_has_graphs_of_its_own() {
        let mut view = View::new(false);
        for second in 0..3 {
            let mut sample = sample(second, 0);
            if let Some(status) = &mut sample.status {
                status.domains[1].general_profit = 5 << 20;
                status.domains[1].events.cow_breaks = second * 40;
            }
            view.push(sample);
        }
        press(&mut view, "d");
        assert_eq!((view.now().saved_bytes, view.now().cow_breaks), (0.0, 0.0));
        press(&mut view, "d");
        assert_eq!((view.now().saved_bytes, view.now().cow_breaks), ((5 << 20) as f64, 40.0));
    }

    #[test]
    fn what_is_typed_filters_clients() {
        let mut view = View::new(false);
        view.push(sample(0, 0));
        press(&mut view, "/CLIENT-3");
        assert_eq!((pids(&view), view.typing), (vec![3], true));
        view.key(KeyCode::Backspace.into());
        assert_eq!(pids(&view).len(), 3);
        view.key(KeyCode::Esc.into());
        assert_eq!((view.filter.as_str(), view.typing), ("", false));
        press(&mut view, "/q");
        assert_eq!(pids(&view), [0; 0], "letters are no keys now");
        view.key(KeyCode::Enter.into());
        assert_eq!(view.key(KeyCode::Char('u').into()), Act::Draw);
        assert_eq!(view.message.as_deref(), Some(CHOOSE));
        assert_eq!(view.key(KeyCode::Esc.into()), Act::Draw, "the message goes first");
        assert_eq!((view.key(KeyCode::Esc.into()), view.filter.as_str()), (Act::Draw, ""));
        assert_eq!(view.key(KeyCode::Esc.into()), Act::Quit);
    }

    #[test]
    fn a_client_is_unmerged_after_a_question_and_parked_at_once() {
        let mut view = View::new(false);
        view.push(sample(0, 0));
        assert_eq!(view.key(KeyCode::Char('p').into()), Act::Draw, "no client is selected");
        press(&mut view, "ju");
        assert_eq!(view.question, Some(Order::Unmerge(2)));
        assert_eq!(view.key(KeyCode::Enter.into()), Act::Draw, "anything but y is no");
        assert_eq!(view.question, None);
        press(&mut view, "u");
        assert_eq!(view.key(KeyCode::Char('y').into()), Act::Ask(Order::Unmerge(2)));
        assert_eq!(view.key(KeyCode::Char('p').into()), Act::Ask(Order::Park(2)));
        let mut parked = sample(1, 0);
        if let Some(status) = &mut parked.status {
            let tier = ColdDomain { name: "b".into(), ..ColdDomain::default() };
            let client = ColdClient { pid: 2, parked: true, ..ColdClient::default() };
            status.cold = ColdStatus { domains: vec![tier], clients: vec![client], ..ColdStatus::default() };
        }
        view.push(parked);
        assert_eq!(view.key(KeyCode::Char('p').into()), Act::Ask(Order::Unpark(2)));
        press(&mut view, "/none");
        view.key(KeyCode::Enter.into());
        press(&mut view, "u");
        assert_eq!(view.question, None, "a client that is not on show is not unmerged");
    }

    #[test]
    fn processor_time_is_shown_as_it_is_used() {
        let mut view = View::new(false);
        for second in 0..2 {
            let mut sample = sample(second, 0);
            if let Some(status) = &mut sample.status {
                status.clients[0].stats.agent_cpu_ns = 9_000_000_000 + second * 250_000_000;
            }
            view.push(sample);
        }
        assert_eq!((view.cpu_of(1), view.cpu_of(2)), (0.25, 0.0));
    }

    #[test]
    fn keys_sort_filter_and_select() {
        let mut view = View::new(false);
        view.push(sample(0, 0));
        assert_eq!(pids(&view), [2, 3, 1], "most shared first");
        press(&mut view, "r");
        assert_eq!(pids(&view), [1, 3, 2]);
        press(&mut view, "r");
        press(&mut view, "ssssss");
        assert_eq!((view.sort, pids(&view)), (Sort::Pid, vec![1, 2, 3]));
        press(&mut view, "d");
        assert_eq!((view.domain.as_deref(), pids(&view)), (Some("a"), vec![1, 3]));
        press(&mut view, "d");
        assert_eq!(pids(&view), [2]);
        press(&mut view, "d");
        assert_eq!(view.domain, None);
        press(&mut view, "jj");
        assert_eq!(view.selected, Some(2));
        press(&mut view, "s");
        assert_eq!((view.selected, view.selected_row()), (Some(2), Some(0)), "the client stays selected");
        view.key(KeyCode::End.into());
        assert_eq!(view.selected_row(), Some(2));
        view.key(KeyCode::Home.into());
        assert_eq!(view.selected_row(), Some(0));
        assert_eq!(view.key(KeyCode::Esc.into()), Act::Draw);
        assert_eq!(view.key(KeyCode::Esc.into()), Act::Quit);
    }

    #[test]
    fn the_cold_pane_sorts_filters_and_selects_its_own_clients() {
        let cold = |pid, domain: &str, out, faults| ColdClient {
            pid,
            domain: domain.into(),
            pages_out: out,
            refaults: faults,
            ..ColdClient::default()
        };
        let mut view = View::new(false);
        let clients = vec![cold(7, "c", 1, 9), cold(8, "a", 5, 0)];
        let tier = |name: &str| ColdDomain { name: name.into(), ..ColdDomain::default() };
        let mut sample = sample(0, 0);
        if let Some(status) = &mut sample.status {
            status.cold = ColdStatus { domains: vec![tier("a"), tier("c")], clients, ..ColdStatus::default() };
        }
        view.push(sample);
        let pids = |view: &View| view.cold_clients().iter().map(|client| client.pid).collect::<Vec<_>>();
        press(&mut view, "4");
        assert_eq!(pids(&view), [8, 7], "most out first");
        press(&mut view, "sss");
        assert_eq!((view.sort.word(view.pane), pids(&view)), ("faults", vec![7, 8]));
        press(&mut view, "j");
        assert_eq!((view.selected, view.selected_row()), (Some(7), Some(0)));
        press(&mut view, "ddd");
        assert_eq!((view.domain.as_deref(), pids(&view)), (Some("c"), vec![7]), "a domain of the tier alone");
    }

    #[test]
    fn a_domain_that_goes_takes_its_filter_along() {
        let mut view = View::new(false);
        view.push(sample(0, 0));
        press(&mut view, "d");
        view.push(Sample::default());
        assert_eq!(view.domain, None);
        press(&mut view, "dj");
        assert_eq!((view.domain.clone(), view.selected), (None, None));
    }

    #[test]
    fn a_still_picture_goes_on_counting() {
        let mut view = View::new(false);
        view.push(sample(0, 0));
        press(&mut view, " ");
        view.push(sample(1, 100));
        view.push(sample(2, 300));
        assert_eq!((view.sample().at, view.history().len()), (Duration::ZERO, 3));
        assert_eq!(view.now().merged, 200.0, "since the last sample, not since the one on show");
    }

    #[test]
    fn ctrl_c_ends_whatever_is_shown() {
        let mut view = View::new(false);
        press(&mut view, "?");
        assert!(view.help);
        assert_eq!(view.key(KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL)), Act::Quit);
        assert_eq!(view.key(KeyCode::Char('x').into()), Act::Draw, "any key closes the help");
        assert_eq!(view.key(KeyCode::Char('x').into()), Act::None);
    }
}
