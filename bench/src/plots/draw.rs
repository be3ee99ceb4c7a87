//! Bars and lines as SVG, for light and dark pages.

use crate::records::{cell, number};
use crate::stats::Spread;
use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};
use serde::Deserialize;
use std::error::Error;

/// As wide as a page of text.
const WIDTH: u32 = 860;
const MARGIN: i32 = 16;
/// A row of bars, and one of a plot with many.
const ROW: f64 = 24.0;
const ROW_OF_MANY: f64 = 18.0;
const MANY: usize = 30;
/// A panel of lines, with its head and its axis.
const PANEL: u32 = 270;
/// Sizes of text in pixels.
const TITLE: f64 = 19.0;
const LABEL: f64 = 13.0;
const SMALL: f64 = 11.0;
/// The library divides by this, which makes pixels of its sizes.
const OF_PIXEL: f64 = 1.24;

/// A family of contenders: it has the same colour in every plot.
#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Contender {
    /// Nothing is shared.
    Plain,
    /// What the kernel does by itself: KSM, zswap.
    Kernel,
    Pagefold,
    /// pagefold in another way, beside the first.
    PagefoldToo,
    /// overlayfs, qcow2 overlays.
    Overlay,
    Composefs,
    HardLinks,
    Erofs,
}

/// The colours for a page; colour-blind readers tell those of contenders apart.
pub struct Theme {
    pub name: &'static str,
    page: RGBColor,
    text: RGBColor,
    muted: RGBColor,
    grid: RGBColor,
    contenders: [RGBColor; 8],
}

const BLUE: RGBColor = RGBColor(0, 114, 178);
const SKY: RGBColor = RGBColor(86, 180, 233);
const ORANGE: RGBColor = RGBColor(230, 159, 0);
const GREEN: RGBColor = RGBColor(0, 158, 115);
const PURPLE: RGBColor = RGBColor(204, 121, 167);
const VERMILION: RGBColor = RGBColor(213, 94, 0);
const YELLOW: RGBColor = RGBColor(204, 187, 68);
const GREY: RGBColor = RGBColor(140, 149, 159);

/// Both, in the colours of GitHub's pages.
pub const THEMES: [Theme; 2] = [
    Theme {
        name: "light",
        page: RGBColor(255, 255, 255),
        text: RGBColor(31, 35, 40),
        muted: RGBColor(89, 99, 110),
        grid: RGBColor(222, 226, 230),
        contenders: [GREY, ORANGE, BLUE, SKY, GREEN, PURPLE, VERMILION, YELLOW],
    },
    Theme {
        name: "dark",
        page: RGBColor(13, 17, 23),
        text: RGBColor(230, 237, 243),
        muted: RGBColor(145, 152, 161),
        grid: RGBColor(48, 54, 61),
        contenders: [GREY, ORANGE, SKY, BLUE, GREEN, PURPLE, VERMILION, YELLOW],
    },
];

impl Theme {
    fn of(&self, contender: Contender) -> RGBColor {
        self.contenders[contender as usize]
    }
}

/// The values of a contender: a bar has one, at zero.
pub struct Series {
    pub name: String,
    pub contender: Contender,
    pub points: Vec<(f64, Spread)>,
}

/// A block of bars, or a panel of lines.
pub struct Block {
    pub head: String,
    pub series: Vec<Series>,
}

/// The horizontal axis of lines.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Over {
    /// The field of the rows that has it; without one, the values are pairs of it and a value.
    pub field: Option<String>,
    pub label: String,
    #[serde(default)]
    pub logarithmic: bool,
}

/// What stands above and below a plot.
pub struct Frame<'a> {
    pub title: &'a str,
    pub values: &'a str,
    pub foot: Vec<String>,
}

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type Drawn<T> = Result<T, Box<dyn Error>>;

fn text(colour: RGBColor, pixels: f64, at: HPos) -> TextStyle<'static> {
    ("sans-serif", pixels * OF_PIXEL).into_font().color(&colour).pos(Pos::new(at, VPos::Center))
}

fn bold(colour: RGBColor, pixels: f64) -> TextStyle<'static> {
    let font = ("sans-serif", pixels * OF_PIXEL).into_font().style(FontStyle::Bold);
    font.color(&colour).pos(Pos::new(HPos::Left, VPos::Center))
}

/// A text's width, if its letters are as wide as those of a wide font.
fn width(text: &str, pixels: f64) -> f64 {
    text.chars().count() as f64 * pixels * 0.57
}

/// The text in lines that fit the plot.
fn wrapped(text: &str) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in text.split(' ') {
        let last = lines.last_mut().expect("there is a line");
        if width(&format!("{last} {word}"), SMALL) > f64::from(WIDTH) - 2.0 * f64::from(MARGIN) {
            lines.push(format!("    {word}"));
        } else {
            *last = format!("{last} {word}").trim_start().to_owned();
        }
    }
    lines
}

/// A number at an axis: no more digits than it needs.
fn tick(value: f64) -> String {
    let text = number(value + 0.0);
    if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.').to_owned() } else { text }
}

/// Draws title and foot, and between them what `draw` draws in `height` pixels.
fn framed(frame: &Frame, height: u32, theme: &Theme, draw: impl FnOnce(&Area) -> Drawn<()>) -> Drawn<String> {
    let foot: Vec<String> = frame.foot.iter().flat_map(|line| wrapped(line)).collect();
    let (above, below) = (62, 16 * foot.len() as u32 + 14);
    let mut svg = String::new();
    {
        let root = SVGBackend::with_string(&mut svg, (WIDTH, above + height + below)).into_drawing_area();
        root.fill(&theme.page)?;
        root.draw_text(frame.title, &bold(theme.text, TITLE), (MARGIN, 24))?;
        root.draw_text(frame.values, &text(theme.muted, LABEL, HPos::Left), (MARGIN, 47))?;
        let (_, rest) = root.split_vertically(above);
        let (plot, rest) = rest.split_vertically(height);
        draw(&plot)?;
        for (at, line) in foot.iter().enumerate() {
            rest.draw_text(line, &text(theme.muted, SMALL, HPos::Left), (MARGIN, 12 + 16 * at as i32))?;
        }
        root.present()?;
    }
    Ok(svg)
}

/// Bars from zero, block below block: the median, its value, and a line from the lowest to the highest round.
pub fn bars(frame: &Frame, blocks: &[Block], theme: &Theme) -> Drawn<String> {
    // A row for each head and each bar, and half a row between blocks; from the top, as (row, what it has).
    let (mut rows, mut row) = (Vec::new(), 0.0);
    for block in blocks {
        if !block.head.is_empty() {
            rows.push((row + 0.5, block.head.as_str(), None));
            row += 1.0;
        }
        for series in &block.series {
            rows.push((row + 0.5, series.name.as_str(), Some((series.contender, series.points[0].1))));
            row += 1.0;
        }
        row += 0.4;
    }
    let widest = |texts: &mut dyn Iterator<Item = String>| texts.map(|text| width(&text, LABEL)).fold(0.0, f64::max);
    let bars = || rows.iter().filter_map(|(at, name, bar)| Some((*at, *name, (*bar)?)));
    let left = widest(&mut bars().map(|(_, name, _)| name.to_owned())) + 10.0;
    let label = widest(&mut bars().map(|(_, _, (_, value))| cell(value))) + 10.0;
    let most = bars().map(|(_, _, (_, value))| value.high).fold(0.0, f64::max);
    let pixels = f64::from(WIDTH) - 2.0 * f64::from(MARGIN) - left;
    let end = most * pixels / (pixels - label);
    let row_pixels = if rows.len() > MANY { ROW_OF_MANY } else { ROW };
    framed(frame, (row * row_pixels) as u32 + 26, theme, |area| {
        let mut chart = ChartBuilder::on(area)
            .margin_left(MARGIN)
            .margin_right(MARGIN)
            .y_label_area_size(left as u32)
            .x_label_area_size(26)
            .build_cartesian_2d(0.0..end, 0.0..row)?;
        chart
            .configure_mesh()
            .disable_y_mesh()
            .disable_y_axis()
            .x_labels(7)
            .x_label_formatter(&|value| tick(*value))
            .label_style(text(theme.muted, SMALL, HPos::Center))
            .axis_style(theme.grid)
            .bold_line_style(theme.grid)
            .light_line_style(TRANSPARENT)
            .draw()?;
        let beside = |x: f64, at: f64, name: &str, offset: i32, style| {
            EmptyElement::at((x, row - at)) + Text::new(name.to_owned(), (offset, 0), style)
        };
        for (at, name, bar) in &rows {
            let Some((contender, value)) = bar else {
                chart.draw_series([beside(0.0, *at, name, -(left as i32), bold(theme.text, LABEL))])?;
                continue;
            };
            let colour = theme.of(*contender).filled();
            let y = row - at;
            chart.draw_series([Rectangle::new([(0.0, y + 0.36), (value.median, y - 0.36)], colour)])?;
            chart.draw_series(whiskers(value).map(|[low, high, cap]| {
                PathElement::new(vec![(low, y - cap), (high, y + cap)], theme.text.stroke_width(1))
            }))?;
            chart.draw_series([
                beside(0.0, *at, name, -8, text(theme.text, LABEL, HPos::Right)),
                beside(value.high, *at, &cell(*value), 7, text(theme.text, LABEL, HPos::Left)),
            ])?;
        }
        Ok(())
    })
}

/// A spread as strokes: from, to, and half the height of the stroke.
fn whiskers(value: &Spread) -> impl Iterator<Item = [f64; 3]> + use<> {
    let Spread { low, high, .. } = *value;
    let strokes = [[low, high, 0.0], [low, low, 0.16], [high, high, 0.16]];
    strokes.into_iter().filter(move |_| low < high)
}

/// Lines over a common axis, two panels side by side: medians, and a stroke from the lowest to the highest round.
pub fn lines(frame: &Frame, blocks: &[Block], over: &Over, theme: &Theme) -> Drawn<String> {
    let points = || blocks.iter().flat_map(|block| &block.series).flat_map(|series| &series.points);
    let (first, last) = points().fold((f64::MAX, f64::MIN), |ends, (x, _)| (ends.0.min(*x), ends.1.max(*x)));
    // A logarithmic axis is a linear one of logarithms: every tenfold is a whole number, or every double of a short axis.
    let base: f64 = if last < first * 100.0 { 2.0 } else { 10.0 };
    let place = |x: f64| if over.logarithmic { x.log(base) } else { x };
    let (first, last) = (place(first), place(last));
    let most = points().map(|(_, value)| value.high).fold(0.0, f64::max);
    let ticks = if over.logarithmic { (last - first) as usize + 1 } else { 6 };
    let columns = blocks.len().min(2);
    let legend = 28;
    framed(frame, legend + PANEL * blocks.len().div_ceil(columns) as u32, theme, |area| {
        let (above, panels) = area.split_vertically(legend);
        let mut x = MARGIN;
        for series in &blocks[0].series {
            above.draw(&PathElement::new([(x, 10), (x + 24, 10)], theme.of(series.contender).stroke_width(4)))?;
            above.draw_text(&series.name, &text(theme.text, LABEL, HPos::Left), (x + 31, 10))?;
            x += 55 + width(&series.name, LABEL) as i32;
        }
        for (block, panel) in blocks.iter().zip(panels.split_evenly((blocks.len().div_ceil(columns), columns))) {
            panel.draw_text(&block.head, &bold(theme.text, LABEL), (MARGIN, 10))?;
            let mut chart = ChartBuilder::on(&panel)
                .margin_top(if block.head.is_empty() { 4 } else { 26 })
                .margin_left(MARGIN)
                .margin_right(MARGIN * 2)
                .margin_bottom(8)
                .y_label_area_size(40)
                .x_label_area_size(44)
                .build_cartesian_2d(first..last, 0.0..most * 1.04)?;
            chart
                .configure_mesh()
                .x_labels(ticks)
                .y_labels(6)
                .x_label_formatter(&|x| tick(if over.logarithmic { base.powf(*x) } else { *x }))
                .y_label_formatter(&|y| tick(*y))
                .label_style(text(theme.muted, SMALL, HPos::Center))
                .x_desc(&over.label)
                .axis_desc_style(text(theme.muted, SMALL, HPos::Center))
                .axis_style(theme.grid)
                .bold_line_style(theme.grid)
                .light_line_style(TRANSPARENT)
                .draw()?;
            for Series { contender, points, .. } in &block.series {
                let colour = theme.of(*contender);
                let medians = || points.iter().map(|(x, value)| (place(*x), value.median));
                chart.draw_series(LineSeries::new(medians(), colour.stroke_width(3)))?;
                // Dots on many points would hide the line.
                let dots = medians().filter(|_| points.len() < 20);
                chart.draw_series(dots.map(|at| Circle::new(at, 4, colour.filled())))?;
                chart.draw_series(points.iter().filter(|(_, value)| value.low < value.high).map(|(x, value)| {
                    PathElement::new(vec![(place(*x), value.low), (place(*x), value.high)], theme.text.stroke_width(1))
                }))?;
            }
        }
        Ok(())
    })
}
