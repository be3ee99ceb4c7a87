//! The graphs over time.

use super::palette::Palette;
use crate::top::{MountPoint, Pane, View};
use crate::units::{show_short, show_size, show_size_signed};
use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::text::Line;
use ratatui::widgets::{Block, Borders, Sparkline};
use std::collections::VecDeque;

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
pub(super) fn draw_graphs(frame: &mut Frame, area: Rect, view: &View, palette: Palette) {
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
