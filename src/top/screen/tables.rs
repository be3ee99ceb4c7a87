//! A table for each pane.

use super::palette::Palette;
use super::reasons::waits;
use crate::output::shorten;
use crate::top::{Pane, View, sum};
use crate::units::{show_count, show_duration, show_percent, show_short, show_size};
use ratatui::Frame;
use ratatui::layout::{Alignment, Constraint, Layout, Rect};
use ratatui::style::{Modifier, Style};
use ratatui::text::Line;
use ratatui::widgets::{Cell, Paragraph, Row, Table, TableState};
use std::time::Duration;

const PAGE: u64 = pagefold_os::PAGE_SIZE as u64;
/// Columns from which on zero pages and domains both fit into the table of clients.
const ZERO_COLUMNS_MIN: u16 = 90;

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

pub(super) fn draw_clients(frame: &mut Frame, area: Rect, view: &View, palette: Palette) {
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

pub(super) fn draw_disks(frame: &mut Frame, area: Rect, view: &View, palette: Palette) {
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

pub(super) fn draw_images(frame: &mut Frame, area: Rect, view: &View, palette: Palette) {
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

pub(super) fn draw_cold(frame: &mut Frame, area: Rect, view: &View, palette: Palette) {
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
