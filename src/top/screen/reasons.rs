//! Why pages of what is selected are not merged, and how long programs wait.

use super::palette::Palette;
use crate::output::shorten;
use crate::top::{Pane, View};
use crate::units::{show_count, show_duration};
use crate::unmanaged_memory;
use pagefold_daemon::waits::Waits;
use ratatui::text::{Line, Span};
use std::collections::BTreeMap;
use std::time::Duration;

/// Why pages were not merged, of the selected client or of all on show; and what of the selected client's memory is not
/// managed, or the last process that could not be.
pub(super) fn reason_lines(view: &View, palette: Palette) -> Vec<Line<'static>> {
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
pub(super) fn waits(each: impl Iterator<Item = (Waits, Waits)>) -> String {
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
