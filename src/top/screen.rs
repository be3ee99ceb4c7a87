//! Draws a [`View`]: a line of sums, graphs over time, a line per product, a table, and the keys.
//!
//! Made for 80 columns and 24 lines; smaller screens lose the graphs first, then the reasons, never the keys.

mod graphs;
mod keys;
mod palette;
mod reasons;
mod tables;

use graphs::draw_graphs;
use keys::{draw_help, last_line};
use palette::Palette;
use reasons::reason_lines;
use tables::{draw_clients, draw_cold, draw_disks, draw_images};

use super::{Pane, View};
use crate::output::shorten;
use crate::units::{show_count, show_counted, show_percent, show_size, show_size_signed};
use pagefold_daemon::cold::ColdDomain;
use pagefold_daemon::history::Point;
use pagefold_daemon::status::Host;
use ratatui::Frame;
use ratatui::layout::{Constraint, Layout};
use ratatui::text::{Line, Span};
use ratatui::widgets::Paragraph;

const PAGE: u64 = pagefold_os::PAGE_SIZE as u64;
/// Lines from which on graphs fit.
const GRAPH_LINES_MIN: u16 = 18;
/// Lines from which on the reasons fit.
const REASON_LINES_MIN: u16 = 14;

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

#[cfg(test)]
mod tests {
    use super::super::*;
    use super::*;
    use pagefold_daemon::cold::ColdStatus;
    use pagefold_daemon::status::{Status, Totals, UnmanagedMemory};
    use pagefold_daemon::waits::Waits;
    use pagefold_merge::stats::{ClientStats, DomainStats};
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;
    use ratatui::style::Color;

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
