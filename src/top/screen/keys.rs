//! The last line, and the help: what can be typed.

use super::palette::Palette;
use crate::output::shorten;
use crate::top::{Order, Pane, View};
use crate::units::show_size;
use ratatui::Frame;
use ratatui::layout::Rect;
use ratatui::text::{Line, Span};
use ratatui::widgets::{Block, Clear, Paragraph};

const PAGE: u64 = pagefold_os::PAGE_SIZE as u64;

/// A question, the filter that is typed, a message, or the keys.
pub(super) fn last_line(view: &View, palette: Palette, width: u16) -> Line<'static> {
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

pub(super) fn draw_help(frame: &mut Frame, area: Rect, palette: Palette) {
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
