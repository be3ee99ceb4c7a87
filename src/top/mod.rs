//! The live view's state: samples, their history, and what the user asked to see.
//!
//! A [`Sample`] is plain data; keys change the [`View`]; [`screen`] draws both. Nothing here knows of sockets or
//! terminals, so that all of it can be tested without either.

pub mod screen;

use crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use pagefold_daemon::cold::{ColdClient, ColdStatus};
use pagefold_daemon::status::{Client, Status, Totals};
use std::collections::VecDeque;
use std::time::Duration;

/// Points of history that are kept: ten minutes at one a second.
pub const HISTORY: usize = 600;

/// What all parts of pagefold do at one moment.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Sample {
    /// Time of the sample, since any fixed moment.
    pub at: Duration,
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

/// What happened between two samples, per second.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Rates {
    pub merged: f64,
    pub cow_breaks: f64,
    /// Processors in use, 1.0 is one.
    pub cpu: f64,
    /// Touches of cold pages.
    pub faults: f64,
    /// Blocks of disk images that had to be read.
    pub misses: f64,
}

/// One point of the graphs.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Point {
    pub saved_bytes: i64,
    pub cold_bytes: u64,
    pub cold_memory_bytes: u64,
    pub disk_saved_bytes: u64,
    pub disk_held_bytes: u64,
    pub image_saved_bytes: u64,
    pub image_held_bytes: u64,
    pub rates: Rates,
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
    history: VecDeque<Point>,
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
    /// True if colours are wanted.
    pub color: bool,
}

/// What a key asks of the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Act {
    /// Nothing changed.
    None,
    /// Draw again.
    Draw,
    /// End.
    Quit,
}

impl View {
    /// An empty view, with colours or without.
    pub fn new(color: bool) -> View {
        View { color, ..View::default() }
    }

    /// Takes a new sample. A daemon that was started anew counts from zero: rates are then zero, not negative.
    pub fn push(&mut self, sample: Sample) {
        let before = &self.last;
        let seconds = sample.at.saturating_sub(before.at).as_secs_f64();
        let per_second = |now: u64, then: Option<u64>| match then {
            Some(then) if seconds > 0.0 => now.saturating_sub(then) as f64 / seconds,
            _ => 0.0,
        };
        let mut point = Point::default();
        if let Some(status) = &sample.status {
            let (now, then) = (&status.totals, before.status.as_ref().map(|status| &status.totals));
            let merged = |totals: &Totals| totals.pages_merged + totals.pages_zeroed;
            point.saved_bytes = now.saved_bytes;
            point.rates.merged = per_second(merged(now), then.map(merged));
            point.rates.cow_breaks = per_second(now.cow_breaks, then.map(|totals| totals.cow_breaks));
            point.rates.cpu = per_second(now.cpu_ns, then.map(|totals| totals.cpu_ns)) / 1e9;
        }
        if let Some(cold) = sample.cold() {
            let faults = |cold: &ColdStatus| sum(&cold.clients, |client| client.refaults);
            point.cold_bytes = sum(&cold.domains, |tier| tier.cold_bytes);
            point.cold_memory_bytes = sum(&cold.domains, |tier| tier.memory_bytes);
            point.rates.faults = per_second(faults(cold), before.cold().map(faults));
        }
        let misses = |disks: &[Disk]| disks.iter().map(|disk| disk.misses).sum();
        // Mounts come and go: what the first sample with one counted was not read in this second.
        let then = (before.disks.len() == sample.disks.len()).then(|| misses(&before.disks));
        point.rates.misses = per_second(misses(&sample.disks), then);
        point.disk_saved_bytes = sample.disks.iter().map(|disk| disk.saved_bytes).sum();
        point.disk_held_bytes = sample.disks.iter().map(|disk| disk.resident_bytes).sum();
        point.image_saved_bytes = sample.images.iter().map(|store| store.saved_bytes).sum();
        point.image_held_bytes = sample.images.iter().map(|store| store.resident_bytes).sum();
        if self.history.len() == HISTORY {
            self.history.pop_front();
        }
        self.history.push_back(point);
        self.last = sample;
        if !self.frozen {
            self.sample = self.last.clone();
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

    /// The points so far, oldest first.
    pub fn history(&self) -> impl ExactSizeIterator<Item = &Point> {
        self.history.iter()
    }

    /// The last point.
    pub fn now(&self) -> Point {
        self.history.back().copied().unwrap_or_default()
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

    /// `order`, the other way round where that was asked for.
    fn turned(&self, order: std::cmp::Ordering) -> std::cmp::Ordering {
        if self.reverse { order.reverse() } else { order }
    }

    /// The clients of the cold tier to show, in order.
    pub fn cold_clients(&self) -> Vec<&ColdClient> {
        let all = self.sample.cold().into_iter().flat_map(|cold| &cold.clients);
        let mut clients: Vec<&ColdClient> = all.filter(|client| self.shows(&client.domain)).collect();
        clients.sort_by(|a, b| {
            let order = match self.sort {
                Sort::Shared => b.pages_out.cmp(&a.pages_out),
                Sort::Managed => b.pages_returned.cmp(&a.pages_returned),
                Sort::Volatile => b.fault_ns.cmp(&a.fault_ns),
                Sort::Breaks => b.refaults.cmp(&a.refaults),
                Sort::Cpu => b.agent_cpu_ns.cmp(&a.agent_cpu_ns),
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
        let mut clients: Vec<&Client> = all.filter(|client| self.shows(&client.domain)).collect();
        let shown = |client: &Client| client.stats.pages_sharing + client.stats.pages_zero;
        clients.sort_by(|a, b| {
            // Largest number first, names and process ids from the front.
            let order = match self.sort {
                Sort::Shared => shown(b).cmp(&shown(a)),
                Sort::Managed => b.stats.pages.cmp(&a.stats.pages),
                Sort::Volatile => b.stats.pages_volatile.cmp(&a.stats.pages_volatile),
                Sort::Breaks => b.stats.cow_breaks.cmp(&a.stats.cow_breaks),
                Sort::Cpu => b.stats.agent_cpu_ns.cmp(&a.stats.agent_cpu_ns),
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
        match key.code {
            KeyCode::Char('q') => return Act::Quit,
            KeyCode::Esc if self.selected.is_none() && self.domain.is_none() => return Act::Quit,
            KeyCode::Esc => (self.selected, self.domain) = (None, None),
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
    fn rates_are_differences_and_never_negative() {
        let mut view = View::new(false);
        view.push(sample(10, 1000));
        assert_eq!(view.now().rates, Rates::default(), "one sample has no rate");
        view.push(sample(12, 3000));
        assert_eq!(view.now().rates.merged, 1000.0);
        view.push(sample(13, 5));
        assert_eq!(view.now().rates.merged, 0.0, "the daemon was started anew");
        view.push(Sample::default());
        view.push(sample(13, 5));
        assert_eq!(view.now().rates, Rates::default());
    }

    #[test]
    fn history_is_a_ring() {
        let mut view = View::new(false);
        (0..HISTORY as u64 + 50).for_each(|second| view.push(sample(second, second)));
        assert_eq!(view.history().len(), HISTORY);
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
        assert_eq!(view.now().rates.merged, 200.0, "since the last sample, not since the one on show");
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
