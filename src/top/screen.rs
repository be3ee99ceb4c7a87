//! Draws a [`View`]: a line of sums, graphs over time, a line per product, a table, and the keys.
//!
//! Made for 80 columns and 24 lines; smaller screens lose the graphs first, then the reasons, never the keys.

use super::{MountPoint, Order, Pane, View, sum};
use crate::output::shorten;
use crate::units::{show_count, show_counted, show_duration, show_percent, show_size, show_size_signed};
use crate::unmanaged_memory;
use pagefold_daemon::cold::ColdDomain;
use pagefold_daemon::history::Point;
use pagefold_daemon::status::Host;
use pagefold_daemon::waits::Waits;
use ratatui::Frame;
use ratatui::layout::{Alignment, Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Block, Borders, Cell, Clear, Paragraph, Row, Sparkline, Table, TableState};
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

const PAGE: u64 = pagefold_os::PAGE_SIZE as u64;
/// Lines from which on graphs fit.
const GRAPH_LINES_MIN: u16 = 18;
/// Columns from which on zero pages and domains both fit into the table of clients.
const ZERO_COLUMNS_MIN: u16 = 90;
/// Lines from which on the reasons fit.
const REASON_LINES_MIN: u16 = 14;

/// Colours by meaning; without colour, by weight.
#[derive(Clone, Copy)]
struct Palette {
    color: bool,
}

impl Palette {
    fn of(self, color: Color, plain: Modifier) -> Style {
        if self.color { Style::new().fg(color) } else { Style::new().add_modifier(plain) }
    }

    fn title(self) -> Style {
        Style::new().add_modifier(Modifier::BOLD)
    }

    fn good(self) -> Style {
        self.of(Color::Green, Modifier::BOLD)
    }

    fn warn(self) -> Style {
        self.of(Color::Yellow, Modifier::BOLD)
    }

    fn dim(self) -> Style {
        self.of(Color::DarkGray, Modifier::DIM)
    }

    fn graph(self) -> Style {
        self.of(Color::Cyan, Modifier::empty())
    }
}

/// Draws all of it.
pub fn draw(frame: &mut Frame, view: &View) {
    let palette = Palette { color: view.color };
    let area = frame.area();
    let graph_lines = if area.height >= GRAPH_LINES_MIN { (area.height / 5).clamp(4, 10) } else { 0 };
    let products = product_lines(view, palette);
    let reasons = if area.height >= REASON_LINES_MIN { 2 } else { 0 };
    let [head, graphs, others, table, why, keys] = Layout::vertical([
        Constraint::Length(2),
        Constraint::Length(graph_lines),
        Constraint::Length(products.len() as u16),
        Constraint::Min(0),
        Constraint::Length(reasons),
        Constraint::Length(1),
    ])
    .areas(area);
    frame.render_widget(Paragraph::new(head_lines(view, palette, area.width)), head);
    draw_graphs(frame, graphs, view, palette);
    frame.render_widget(Paragraph::new(products), others);
    match view.pane {
        Pane::Live => draw_clients(frame, table, view, palette),
        Pane::Disks => draw_disks(frame, table, view, palette),
        Pane::Images => draw_images(frame, table, view, palette),
        Pane::Cold => draw_cold(frame, table, view, palette),
    }
    frame.render_widget(Paragraph::new(reason_lines(view, palette)), why);
    frame.render_widget(Paragraph::new(last_line(view, palette, area.width)), keys);
    if view.help {
        draw_help(frame, area, palette);
    }
}

fn head_lines(view: &View, palette: Palette, width: u16) -> Vec<Line<'static>> {
    let still = if view.frozen { " [still]" } else { "" };
    let Some(status) = &view.sample().status else {
        let trouble = view.sample().trouble.clone().unwrap_or_else(|| "waiting for the daemon".into());
        return vec![
            Line::from(vec![Span::styled("pagefold", palette.title()), Span::raw(still)]),
            Line::styled(trouble, palette.warn()),
        ];
    };
    let Point { merged, cow_breaks, cpu, .. } = view.now();
    let totals = &status.totals;
    let saved_bytes = status.saved_bytes(view.domain.as_deref());
    let (domain, pages) = match &view.domain {
        None => (String::new(), totals.pages),
        Some(name) => {
            let mine = status.domains.iter().filter(|domain| domain.name == *name);
            (format!("  {}", shorten(name, 20)), mine.map(|domain| domain.pages).sum())
        }
    };
    let mut first = Line::from(vec![
        Span::styled("pagefold", palette.title()),
        Span::raw(format!("{domain}  saves ")),
        Span::styled(show_size_signed(saved_bytes), if saved_bytes > 0 { palette.good() } else { palette.warn() }),
        Span::raw(format!(
            " of {} managed ({})",
            show_size(pages * PAGE),
            show_percent(saved_bytes.max(0).unsigned_abs(), pages * PAGE)
        )),
        Span::styled(still, palette.warn()),
    ]);
    // The machine, as much of it as fits at the right.
    let room = usize::from(width).saturating_sub(first.width() + 2);
    if let Some(text) = host_texts(&status.host).into_iter().find(|text| text.chars().count() <= room) {
        first.push_span(Span::styled(format!("  {text:>room$}"), palette.dim()));
    }
    let second = format!(
        "merging {}/s  breaks {}/s  cpu {:.1} %  pool {}  records {}  clients {}",
        show_count(merged.round() as u64),
        show_count(cow_breaks.round() as u64),
        cpu * 100.0,
        show_size(totals.pool_bytes + totals.pool_orphaned_bytes),
        show_size(totals.metadata_bytes + totals.mapping_bytes),
        status.clients.len(),
    );
    vec![first, Line::raw(second)]
}

/// What can be said of the machine, longest first.
fn host_texts(host: &Host) -> Vec<String> {
    if host.memory_bytes == 0 {
        return Vec::new();
    }
    let used = host.memory_bytes.saturating_sub(host.available_bytes);
    let memory = format!("{} of {} used", show_size(used), show_size(host.memory_bytes));
    let short = format!("{} used", show_percent(used, host.memory_bytes));
    vec![
        format!("{}  {memory}", shorten(&host.name, 30)),
        format!("{}  {short}", shorten(&host.name, 16)),
        memory,
        short,
    ]
}

/// A graph: its title, how its numbers are written, and its values, oldest first.
struct Graph {
    title: String,
    show: fn(u64) -> String,
    values: Vec<u64>,
}

impl Graph {
    fn new<T>(title: String, show: fn(u64) -> String, points: &VecDeque<T>, of: impl Fn(&T) -> f64) -> Graph {
        // A sparkline has whole numbers.
        Graph { title, show, values: points.iter().map(|point| of(point).max(0.0).round() as u64).collect() }
    }
}

/// Three graphs beside each other, the newest point at the right, each with the value that its full height stands for.
fn draw_graphs(frame: &mut Frame, area: Rect, view: &View, palette: Palette) {
    if area.height < 2 {
        return;
    }
    let thirds: [Rect; 3] = Layout::horizontal([Constraint::Ratio(1, 3); 3]).areas(area);
    for (area, Graph { title, show, values }) in thirds.into_iter().zip(graphs(view)) {
        let area = Rect { width: area.width.saturating_sub(1), ..area };
        let room = usize::from(area.width);
        let mut data = vec![0; room.saturating_sub(values.len())];
        data.extend(&values[values.len().saturating_sub(room)..]);
        let most = data.iter().max().copied().unwrap_or_default();
        let scale = format!("max {}", show(most));
        let has_room = title.chars().count() + scale.chars().count() < room;
        let mut block = Block::new().borders(Borders::TOP).border_style(palette.dim()).title(title);
        if has_room && most > 0 {
            block = block.title_top(Line::styled(scale, palette.dim()).right_aligned());
        }
        frame.render_widget(Sparkline::default().block(block).style(palette.graph()).data(data), area);
    }
}

fn graphs(view: &View) -> [Graph; 3] {
    let (now, points, mounts) = (view.now(), view.history(), view.mounts());
    let held = mounts.back().copied().unwrap_or_default();
    let rate = |name: &str, rate: f64| format!("{name} {}/s", show_short(rate.round() as u64));
    let size = |name: &str, bytes: u64| format!("{name} {}", show_size(bytes));
    let signed = |name: &str, bytes: f64| format!("{name} {}", show_size_signed(bytes as i64));
    let cpu = || {
        let show = |parts: u64| format!("{:.1} %", parts as f64 / 1e2);
        Graph::new(format!("cpu {:.1} %", now.cpu * 1e2), show, points, |point| point.cpu * 1e4)
    };
    match view.pane {
        Pane::Live => [
            Graph::new(signed("saved", now.saved_bytes), show_size, points, |point| point.saved_bytes),
            Graph::new(rate("merged", now.merged), show_short, points, |point| point.merged),
            Graph::new(rate("breaks", now.cow_breaks), show_short, points, |point| point.cow_breaks),
        ],
        Pane::Cold => [
            Graph::new(signed("cold", now.cold_bytes), show_size, points, |point| point.cold_bytes),
            Graph::new(rate("faults", now.faults), show_short, points, |point| point.faults),
            cpu(),
        ],
        Pane::Disks => [
            Graph::new(size("saves", held.disk_saved_bytes), show_size, mounts, |at: &MountPoint| {
                at.disk_saved_bytes as f64
            }),
            Graph::new(size("holds", held.disk_held_bytes), show_size, mounts, |at| at.disk_held_bytes as f64),
            Graph::new(rate("misses", held.misses), show_short, mounts, |at| at.misses),
        ],
        Pane::Images => [
            Graph::new(size("saves", held.image_saved_bytes), show_size, mounts, |at| at.image_saved_bytes as f64),
            Graph::new(size("holds", held.image_held_bytes), show_size, mounts, |at| at.image_held_bytes as f64),
            cpu(),
        ],
    }
}

/// One line for each other product that has something to tell.
fn product_lines(view: &View, palette: Palette) -> Vec<Line<'static>> {
    let sample = view.sample();
    let mut lines = Vec::new();
    let mut line = |name: &'static str, text: String| {
        lines.push(Line::from(vec![Span::styled(format!("{name:7}"), palette.title()), Span::raw(text)]));
    };
    if let Some(status) = &sample.status {
        let size = |pages: u64| show_size(pages * PAGE);
        line(
            "pages",
            format!(
                "shared {} in {}  zero {}  unshared {}  volatile {}",
                size(status.totals.pages_sharing),
                size(status.totals.pages_shared),
                size(status.totals.pages_zero),
                size(status.totals.pages_unshared),
                size(status.totals.pages_volatile),
            ),
        );
    }
    if !sample.disks.is_empty() {
        let sum = |f: fn(&super::Disk) -> u64| sample.disks.iter().map(f).sum::<u64>();
        let (hits, misses) = (sum(|disk| disk.hits), sum(|disk| disk.misses));
        line(
            "disks",
            format!(
                "{}  saves {}  I/O {}  holds {}  hits {}",
                show_counted(sample.disks.len() as u64, "mount", "mounts"),
                show_size(sum(|disk| disk.saved_bytes)),
                show_size(sum(|disk| disk.io_saved_bytes)),
                show_size(sum(|disk| disk.resident_bytes)),
                show_percent(hits, hits + misses)
            ),
        );
    }
    if !sample.images.is_empty() {
        let sum = |f: fn(&super::Images) -> u64| sample.images.iter().map(f).sum::<u64>();
        line(
            "images",
            format!(
                "{}  saves {}  holds {}",
                show_counted(sum(|store| store.mounts), "mount", "mounts"),
                show_size(sum(|store| store.saved_bytes)),
                show_size(sum(|store| store.resident_bytes))
            ),
        );
    }
    if let Some(cold) = sample.cold() {
        let sum = |f: fn(&ColdDomain) -> u64| super::sum(&cold.domains, f);
        let (cold_bytes, memory_bytes) = (sum(|tier| tier.cold_bytes), sum(|tier| tier.memory_bytes));
        line(
            "cold",
            format!(
                "{} in {} of memory and {} on disk  saves {}",
                show_size(cold_bytes),
                show_size(memory_bytes),
                show_size(sum(|tier| tier.disk_bytes)),
                show_size_signed(cold_bytes as i64 - memory_bytes as i64)
            ),
        );
    }
    lines
}

fn right(text: String) -> Cell<'static> {
    Cell::from(Line::raw(text).alignment(Alignment::Right))
}

fn heading(names: &[&'static str], palette: Palette, underlined: Option<&str>) -> Row<'static> {
    let cells = names.iter().map(|name| {
        let (name, alignment) =
            name.strip_prefix('>').map_or((*name, Alignment::Left), |name| (name, Alignment::Right));
        let style =
            if underlined == Some(name) { palette.title().add_modifier(Modifier::UNDERLINED) } else { palette.title() };
        Cell::from(Line::styled(name, style).alignment(alignment))
    });
    Row::new(cells.collect::<Vec<_>>())
}

fn draw_clients(frame: &mut Frame, area: Rect, view: &View, palette: Palette) {
    let clients = view.clients();
    if clients.is_empty() {
        let text = match &view.sample().status {
            Some(_) if !view.filter.is_empty() => "No client fits the filter; Esc drops it",
            Some(_) => "No clients. Start one: pagefold run -- CMD",
            None => "",
        };
        frame.render_widget(Paragraph::new(text), area);
        return;
    }
    // Domains take room only if there are several.
    let domains = view.domains().len() > 1;
    let mut names = vec![">pid", "name"];
    let mut widths = vec![Constraint::Length(7), Constraint::Fill(1)];
    if domains {
        names.push("domain");
        widths.push(Constraint::Max(12));
    }
    // On a narrow screen the name is worth more.
    let zero = area.width >= ZERO_COLUMNS_MIN || !domains;
    names.extend([">managed", ">shared"]);
    names.extend(zero.then_some(">zero"));
    names.extend([">volatile", ">breaks", ">cpu"]);
    widths.extend(vec![Constraint::Length(8); if zero { 4 } else { 3 }]);
    widths.extend([6, 8].map(Constraint::Length));
    let rows = clients.iter().map(|client| {
        let size = |pages: u64| right(show_size(pages * PAGE));
        let paused = if client.stats.paused { "‖ " } else { "" };
        let mut cells =
            vec![right(client.pid.to_string()), Cell::from(format!("{paused}{}", shorten(&client.name, 24)))];
        if domains {
            cells.push(Cell::from(shorten(&client.domain, 12)));
        }
        cells.extend([size(client.stats.pages), size(client.stats.pages_sharing)]);
        cells.extend(zero.then(|| size(client.stats.pages_zero)));
        cells.extend([
            size(client.stats.pages_volatile),
            right(show_short(client.stats.cow_breaks)),
            right(format!("{:.1} %", view.cpu_of(client.pid) * 1e2)),
        ]);
        Row::new(cells)
    });
    let rows: Vec<Row> = rows.collect();
    let table = Table::new(rows, widths)
        .header(heading(&names, palette, Some(view.sort.word(Pane::Live))))
        .row_highlight_style(Style::new().add_modifier(Modifier::REVERSED));
    let mut state = TableState::new().with_selected(view.selected_row());
    frame.render_stateful_widget(table, area, &mut state);
}

/// A count in at most six letters.
fn show_short(count: u64) -> String {
    match count {
        0..10_000 => show_count(count),
        10_000..10_000_000 => format!("{}k", show_count(count / 1000)),
        _ => format!("{}M", show_count(count / 1_000_000)),
    }
}

fn draw_disks(frame: &mut Frame, area: Rect, view: &View, palette: Palette) {
    if view.sample().disks.is_empty() {
        frame.render_widget(Paragraph::new("No disk images are mounted: pagefold disk --help"), area);
        return;
    }
    // A mount, then its images, which stand a little to the right.
    let lines = view.sample().disks.iter().flat_map(|disk| {
        let images = disk.images.iter().map(|image| (format!("  {}", shorten(&image.name, 38)), image));
        std::iter::once((shorten(&disk.name, 40), disk)).chain(images)
    });
    let rows = lines.map(|(name, disk)| {
        Row::new(vec![
            Cell::from(name),
            right(show_size(disk.resident_bytes)),
            right(show_size(disk.limit_bytes)),
            right(show_size(disk.saved_bytes)),
            right(show_size(disk.io_saved_bytes)),
            right(show_size(disk.dirty_bytes)),
            right(show_percent(disk.hits, disk.hits + disk.misses)),
        ])
    });
    let widths = [Constraint::Fill(1)].into_iter().chain([9, 9, 9, 9, 9, 8].map(Constraint::Length));
    let names = ["mount and images", ">holds", ">of", ">saves", ">I/O saved", ">dirty", ">hits"];
    frame.render_widget(Table::new(rows, widths).header(heading(&names, palette, None)), area);
}

fn draw_images(frame: &mut Frame, area: Rect, view: &View, palette: Palette) {
    if view.sample().images.is_empty() {
        frame.render_widget(Paragraph::new("No image store is known here: pagefold image --help"), area);
        return;
    }
    let rows = view.sample().images.iter().filter(|store| view.shows(&store.domain)).map(|store| {
        Row::new(vec![
            Cell::from(shorten(&store.name, 40)),
            Cell::from(shorten(&store.domain, 12)),
            right(show_count(store.mounts)),
            right(show_size(store.resident_bytes)),
            right(show_size(store.saved_bytes)),
        ])
    });
    let widths = [Constraint::Fill(1)].into_iter().chain([12, 8, 10, 10].map(Constraint::Length));
    let names = ["store", "domain", ">mounts", ">holds", ">saves"];
    frame.render_widget(Table::new(rows, widths).header(heading(&names, palette, None)), area);
}

fn draw_cold(frame: &mut Frame, area: Rect, view: &View, palette: Palette) {
    let Some(cold) = view.sample().cold() else {
        frame.render_widget(Paragraph::new("No client of the cold tier. Start one: pagefold run --cold -- CMD"), area);
        return;
    };
    let sums = Line::from(format!(
        "tier  {} of {} in memory, {} on disk; {} pages evicted, {} returned",
        show_size(sum(&cold.domains, |tier| tier.memory_bytes)),
        show_size(sum(&cold.domains, |tier| tier.max_bytes)),
        show_size(sum(&cold.domains, |tier| tier.disk_bytes)),
        show_short(sum(&cold.clients, |client| client.pages_evicted)),
        show_short(sum(&cold.clients, |client| client.pages_returned))
    ));
    let clients = view.cold_clients();
    let chosen = view.selected_row().map_or(&clients[..], |row| &clients[row..=row]);
    let each = chosen.iter().map(|client| (client.waits_recent, client.waits));
    let waits = Line::styled(waits(each), palette.dim());
    let [top, area] = Layout::vertical([Constraint::Length(2), Constraint::Min(0)]).areas(area);
    frame.render_widget(Paragraph::new(vec![sums, waits]), top);
    // There should be none lost: on a narrow screen the names are worth more.
    let lost = area.width >= ZERO_COLUMNS_MIN || clients.iter().any(|client| client.pages_lost > 0);
    let rows = clients.iter().map(|client| {
        let mut cells = vec![
            right(client.pid.to_string()),
            Cell::from(format!("{}{}", shorten(&client.name, 24), client.state_suffix())),
            Cell::from(shorten(&client.domain, 10)),
            right(show_size(client.pages_out * PAGE)),
            right(show_size(client.pages_returned * PAGE)),
            right(show_short(client.refaults)),
            right(show_duration(Duration::from_nanos(client.fault_ns))),
        ];
        cells.extend(lost.then(|| right(show_short(client.pages_lost))));
        Row::new(cells)
    });
    let rows: Vec<Row> = rows.collect();
    let mut widths = vec![Constraint::Length(7), Constraint::Fill(1), Constraint::Max(10)];
    widths.extend([8, 8, 7, 8].map(Constraint::Length));
    let mut names = vec![">pid", "name", "domain", ">out", ">back", ">faults", ">waited"];
    if lost {
        widths.push(Constraint::Length(6));
        names.push(">lost");
    }
    let table = Table::new(rows, widths)
        .header(heading(&names, palette, Some(view.sort.word(Pane::Cold))))
        .row_highlight_style(Style::new().add_modifier(Modifier::REVERSED));
    let mut state = TableState::new().with_selected(view.selected_row());
    frame.render_stateful_widget(table, area, &mut state);
}

/// Why pages were not merged, of the selected client or of all on show; and what of the selected client's memory is not
/// managed, or the last process that could not be.
fn reason_lines(view: &View, palette: Palette) -> Vec<Line<'static>> {
    if view.pane != Pane::Live || view.sample().status.is_none() {
        return Vec::new();
    }
    let clients = view.clients();
    let chosen: Vec<_> = match view.selected_row() {
        Some(row) => vec![clients[row]],
        None => clients,
    };
    let mut pages_of: BTreeMap<&str, u64> = BTreeMap::new();
    for client in &chosen {
        let stats = &client.stats;
        let refused = stats.not_merged.iter().map(|(reason, pages)| (reason.as_str(), *pages));
        for (reason, pages) in refused.chain([("in huge pages left whole", stats.pages_huge)]) {
            *pages_of.entry(reason).or_default() += pages;
        }
    }
    let mut reasons: Vec<_> = pages_of.into_iter().filter(|(_, pages)| *pages > 0).collect();
    reasons.sort_by(|a, b| b.1.cmp(&a.1).then_with(|| a.0.cmp(b.0)));
    let selected = match (view.selected_row(), chosen.first()) {
        (Some(_), Some(client)) => format!("{} ", client.pid),
        _ => String::new(),
    };
    let text = reasons.iter().map(|(reason, pages)| format!("{reason} {}", show_count(*pages)));
    let text = text.collect::<Vec<_>>().join(", ");
    let text = if text.is_empty() { "none".to_owned() } else { text };
    let mut lines =
        vec![Line::from(vec![Span::styled(format!("{selected}not merged: "), palette.title()), Span::raw(text)])];
    let of_selected = view.selected_row().and(chosen.first()).map(|client| unmanaged_memory::reasons(client));
    let unmanaged = view.sample().status.iter().flat_map(|status| &status.unmanaged_processes).last();
    lines.push(match (of_selected.filter(|reasons| !reasons.is_empty()), unmanaged) {
        (Some(reasons), _) => Line::styled(format!("{selected}not managed: {}", reasons.join("; ")), palette.warn()),
        (None, Some(process)) => {
            let name = format!("{} {}", process.pid, process.name);
            Line::styled(format!("not managed: {}: {}", shorten(&name, 20), process.reason), palette.warn())
        }
        (None, None) => {
            let each = chosen.iter().map(|client| (client.waits_recent, client.waits));
            Line::styled(waits(each), palette.dim())
        }
    });
    lines
}

/// How long the program waited that waited longest: half of its waits, 99 of 100 and all, in the last minutes and ever.
fn waits(each: impl Iterator<Item = (Waits, Waits)>) -> String {
    let none = (Waits::default(), Waits::default());
    let (recent, all) = each.fold(none, |(recent, all), one| (recent.worst(one.0), all.worst(one.1)));
    let show = |waits: Waits| {
        let times = [waits.p50_us, waits.p99_us, waits.max_us];
        match waits.count {
            0 => "none".to_owned(),
            _ => times.map(|us| show_duration(Duration::from_micros(us))).join("/"),
        }
    };
    format!("5 min p50/p99/most wait {}; ever {}", show(recent), show(all))
}

/// A question, the filter that is typed, a message, or the keys.
fn last_line(view: &View, palette: Palette, width: u16) -> Line<'static> {
    if let Some(order) = view.question {
        return Line::styled(question(view, order), palette.warn());
    }
    if view.typing {
        let text = format!("filter: {}_  Enter keeps it, Esc drops it", shorten(&view.filter, 40));
        return Line::styled(text, palette.title());
    }
    match &view.message {
        Some(message) => Line::styled(shorten(message, usize::from(width)), palette.warn()),
        None => key_line(view, palette, width),
    }
}

fn question(view: &View, order: Order) -> String {
    let (Order::Unmerge(pid) | Order::Park(pid) | Order::Unpark(pid)) = order;
    let clients = view.clients();
    let shared = clients.iter().find(|client| client.pid == pid).map_or(0, |client| client.stats.pages_sharing);
    format!("unmerge {pid}? Its {} of shared pages become private: y, or any other key", show_size(shared * PAGE))
}

fn key_line(view: &View, palette: Palette, width: u16) -> Line<'static> {
    let domain = view.domain.as_deref().map_or_else(|| "all domains".to_owned(), |name| shorten(name, 12));
    let order = if view.reverse { "↑" } else { "" };
    let filter = if view.filter.is_empty() { "filter".to_owned() } else { shorten(&view.filter, 12) };
    let has_clients = matches!(view.pane, Pane::Live | Pane::Cold);
    let sort = has_clients.then(|| format!("{}{order}", view.sort.word(view.pane)));
    let still = if view.frozen { "go on" } else { "still" };
    // The most wanted first: what finds no room stands in the help.
    let keys = [
        ("q", Some("quit".into())),
        ("?", Some("help".into())),
        ("Tab", Some(view.pane.word().into())),
        ("s", sort),
        ("d", Some(domain)),
        ("/", has_clients.then_some(filter)),
        ("p", has_clients.then(|| "park".into())),
        ("u", has_clients.then(|| "unmerge".into())),
        ("Space", Some(still.into())),
    ];
    let mut line = Line::default();
    for (key, word) in keys {
        let Some(word) = word else { continue };
        let (gap, word) = (if line.spans.is_empty() { "" } else { "  " }, format!(" {word}"));
        let more = Line::from(vec![gap.into(), Span::styled(key, palette.title()), Span::styled(word, palette.dim())]);
        if line.width() + more.width() <= usize::from(width) {
            line.extend(more.spans);
        }
    }
    line
}

const HELP: &[(&str, &str)] = &[
    ("q, Ctrl-C", "quit"),
    ("1 2 3 4, Tab", "live memory, disks, images, cold tier"),
    ("s, r", "next sort key, reverse"),
    ("d", "next domain, then all"),
    ("up, down, PgUp, PgDn", "select a client; shows why its pages do not merge"),
    ("/", "show only clients whose name, domain or pid contains a word"),
    ("p, u", "park the selected client or bring it back; unmerge it"),
    ("Space", "freeze the display"),
    ("Esc", "drop selection and filters; then quit"),
    ("", ""),
    ("managed", "client memory that pagefold scans"),
    ("shared", "mapped from one copy in the pool"),
    ("zero", "zero pages dropped"),
    ("unshared", "unwritten for two scans, without an equal page"),
    ("volatile", "written within the last two scans"),
    ("cow_breaks", "merged pages that were written again"),
    ("cpu", "of one processor, now: all of pagefold; the client's agent"),
    ("graphs", "one column a sample; the full height stands for max"),
    ("out, back", "pages in the cold tier, pages that returned from it"),
    ("faults, waited", "faults on cold pages, and the time they took"),
];

fn draw_help(frame: &mut Frame, area: Rect, palette: Palette) {
    let lines: Vec<Line> = HELP
        .iter()
        .map(|(key, text)| Line::from(vec![Span::styled(format!(" {key:21}"), palette.title()), Span::raw(*text)]))
        .collect();
    let width = area.width.min(74);
    let height = area.height.min(lines.len() as u16 + 2);
    let place = Rect { x: area.x + (area.width - width) / 2, y: area.y + (area.height - height) / 2, width, height };
    frame.render_widget(Clear, place);
    let block = Block::bordered().title(" keys and words; any key goes back ");
    frame.render_widget(Paragraph::new(lines).block(block), place);
}

#[cfg(test)]
mod tests {
    use super::super::*;
    use super::*;
    use pagefold_daemon::cold::ColdStatus;
    use pagefold_daemon::status::{Status, Totals, UnmanagedMemory};
    use pagefold_merge::stats::{ClientStats, DomainStats};
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    fn rendered(view: &View, width: u16, height: u16) -> Vec<String> {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).expect("a test terminal");
        terminal.draw(|frame| draw(frame, view)).expect("it draws");
        let buffer = terminal.backend().buffer().clone();
        let line = |y| (0..width).map(|x| buffer[(x, y)].symbol().to_owned()).collect::<String>();
        (0..height).map(|y| line(y).trim_end().to_owned()).collect()
    }

    fn busy() -> View {
        let mut view = View::new(false);
        for second in 0..100u64 {
            let client = |pid: i32| Client {
                pid,
                name: format!("qemu\x1b[2J-{pid}"),
                domain: if pid % 2 == 0 { "alice" } else { "bob" }.into(),
                stats: ClientStats {
                    pages: 1 << 17,
                    pages_sharing: 1000 * pid.unsigned_abs() as u64,
                    pages_zero: 50,
                    pages_volatile: 77,
                    cow_breaks: 123_456,
                    agent_cpu_ns: 1_500_000_000,
                    not_merged: [("pinned".into(), 5), ("mapping limit".into(), 7)].into(),
                    ..ClientStats::default()
                },
                waits: Waits { count: 100, p50_us: 4, p99_us: 96, max_us: 60 + pid.unsigned_abs() as u64 },
                waits_recent: Waits { count: u64::from(pid == 7), p50_us: 3, p99_us: 5, max_us: 5 },
                unmanaged: vec![UnmanagedMemory { reason: "shared memory".into(), bytes: (pid as u64) << 20 }],
                ..Client::default()
            };
            let domain = |name: &str| DomainStats { name: name.into(), ..DomainStats::default() };
            view.push(Sample {
                at: Duration::from_secs(second),
                status: Some(Status {
                    totals: Totals {
                        pages: 1 << 20,
                        pages_sharing: 300_000,
                        pages_shared: 100_000,
                        saved_bytes: (second as i64) << 23,
                        pages_merged: second * second * 10,
                        cow_breaks: second * 3,
                        cpu_ns: second * 20_000_000,
                        ..Totals::default()
                    },
                    domains: vec![domain("alice"), domain("bob")],
                    host: Host { name: "vm-17".into(), available_bytes: 1 << 30, memory_bytes: 4 << 30 },
                    clients: (1..=30).map(client).collect(),
                    cold: ColdStatus {
                        domains: vec![ColdDomain {
                            name: "alice".into(),
                            cold_bytes: 1000 * PAGE,
                            memory_bytes: 1 << 20,
                            ..ColdDomain::default()
                        }],
                        clients: vec![ColdClient {
                            pid: 99,
                            name: "sleeper".into(),
                            domain: "alice".into(),
                            pages_out: 1000,
                            refaults: second * 7,
                            waits: Waits { count: 3, p50_us: 16, p99_us: 128, max_us: 100 },
                            connected: true,
                            parked: true,
                            ..ColdClient::default()
                        }],
                        ..ColdStatus::default()
                    },
                    ..Status::default()
                }),
                disks: vec![Disk { name: "/mnt".into(), saved_bytes: 5 << 20, hits: 3, misses: 1, ..Disk::default() }],
                images: vec![Images { name: "/var/lib/images".into(), mounts: 2, ..Images::default() }],
                ..Sample::default()
            });
        }
        view
    }

    #[test]
    fn all_products_fit_on_80_by_24() {
        let screen = rendered(&busy(), 80, 24);
        let text = screen.join("\n");
        for part in [
            "saves 795 MiB of 4.00 GiB managed (19.4 %)",
            "merging 1,970/s  breaks 3/s  cpu 2.0 %",
            "vm-17  75.0 % used",
            "pages  shared 1.14 GiB in 391 MiB",
            "disks  1 mount  saves 5.00 MiB",
            "images 2 mounts",
            "cold   3.91 MiB in 1.00 MiB",
            "saved 795 MiB──max 795 MiB",
            "merged 1,970/s",
            "max 1,970",
            "not merged: mapping limit 210, pinned 150",
            "5 min p50/p99/most wait 3.00 us/5.00 us/5.00 us; ever 4.00 us/96.0 us/90.0 us",
            "q quit  ? help  Tab live  s shared  d all domains  / filter  p park  u unmerge",
        ] {
            assert!(text.contains(part), "`{part}` is not on\n{text}");
        }
        assert!(text.contains("qemu?[2J-30"), "names cannot write to the terminal\n{text}");
        assert!(screen.iter().any(|line| line.trim_start().starts_with("30 qemu")), "most shared first\n{text}");
        assert!(text.contains('█') || text.contains('▇'), "graphs\n{text}");
    }

    #[test]
    fn the_last_line_asks_takes_a_filter_and_answers() {
        let mut view = busy();
        let last = |view: &View| rendered(view, 80, 24).pop().unwrap_or_default();
        let press = |view: &mut View, letter| view.key(crossterm::event::KeyCode::Char(letter).into());
        press(&mut view, 'j');
        press(&mut view, 'u');
        assert_eq!(last(&view), "unmerge 30? Its 117 MiB of shared pages become private: y, or any other key");
        press(&mut view, 'n');
        press(&mut view, '/');
        press(&mut view, '9');
        assert_eq!(last(&view), "filter: 9_  Enter keeps it, Esc drops it");
        let text = rendered(&view, 80, 24).join("\n");
        assert!(text.contains(" 29 qemu") && !text.contains(" 28 qemu"), "{text}");
        view.key(crossterm::event::KeyCode::Enter.into());
        view.message = Some("29: 12 pages evicted".into());
        assert_eq!(last(&view), "29: 12 pages evicted");
        press(&mut view, 'r');
        view.domain = Some("a-long-domain-name".into());
        assert!(last(&view).contains("s shared↑  d a-long-doma…  / 9  p park"), "{}", last(&view));
    }

    #[test]
    fn every_size_draws() {
        let mut view = busy();
        for (width, height) in [(1, 1), (5, 3), (20, 10), (40, 13), (80, 18), (132, 50), (300, 100)] {
            for pane in Pane::ALL {
                view.pane = pane;
                view.help = height % 2 == 0;
                assert_eq!(rendered(&view, width, height).len(), usize::from(height));
            }
        }
        view.help = false;
        let small = rendered(&view, 80, 12).join("\n");
        assert!(small.contains("q quit"), "the keys stay\n{small}");
    }

    #[test]
    fn selection_scrolls_into_sight_and_tells_its_reasons() {
        let mut view = busy();
        view.key(crossterm::event::KeyCode::End.into());
        let text = rendered(&view, 80, 24).join("\n");
        assert!(text.contains("      1 qemu"), "the last client is on the screen\n{text}");
        assert!(text.contains("1 not merged: mapping limit 7, pinned 5"), "{text}");
        assert!(text.contains("1 not managed: 1.00 MiB shared memory"), "{text}");
    }

    #[test]
    fn panes_show_their_tables() {
        let mut view = busy();
        for (pane, part) in [
            (Pane::Disks, "75.0 %"),
            (Pane::Images, "/var/lib/images"),
            (Pane::Cold, "sleeper (parked)"),
            (Pane::Cold, "faults 7/s"),
            (Pane::Cold, "5 min p50/p99/most wait none; ever 16.0 us/128 us/100 us"),
        ] {
            view.pane = pane;
            let text = rendered(&view, 80, 24).join("\n");
            assert!(text.contains(part), "`{part}` is not on\n{text}");
        }
    }

    #[test]
    fn without_a_daemon_it_says_what_to_do() {
        let mut view = View::new(false);
        view.push(Sample { trouble: Some("no daemon: pagefold run starts one".into()), ..Sample::default() });
        let text = rendered(&view, 80, 24).join("\n");
        assert!(text.contains("no daemon: pagefold run starts one"), "{text}");
        let mut view = View::new(true);
        view.push(Sample { status: Some(Status::default()), ..Sample::default() });
        assert!(rendered(&view, 80, 24).join("\n").contains("No clients. Start one: pagefold run -- CMD"));
    }

    #[test]
    fn colours_only_if_wanted() {
        let mut terminal = Terminal::new(TestBackend::new(80, 24)).expect("a test terminal");
        let colored = |view: &View, terminal: &mut Terminal<TestBackend>| {
            terminal.draw(|frame| draw(frame, view)).expect("it draws");
            terminal.backend().buffer().content.iter().any(|cell| cell.fg != Color::Reset)
        };
        let mut view = busy();
        assert!(!colored(&view, &mut terminal));
        view.color = true;
        assert!(colored(&view, &mut terminal));
    }
}
