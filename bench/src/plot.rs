//! One plot per source: a panel per figure, a bar per value, as SVG.
//!
//! Written by hand: bars and labels are forty lines, a plotting library is forty crates. Colours are told apart in grey
//! too, labels carry the values, and the text is real text, so a plot can be searched and read aloud.

use crate::published::{self, Definition, Line, Side};
use crate::record;
use serde_json::Value;
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

const WIDTH: f64 = 960.0;
const LABEL: f64 = 330.0;
const BAR: f64 = 470.0;
const ROW: f64 = 22.0;

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

fn colour(side: Side) -> &'static str {
    match side {
        Side::Published => "#8a8f98",
        Side::Peer => "#d9a441",
        Side::Ours => "#2563a8",
    }
}

/// Words in lines of at most `width` characters.
fn wrapped(text: &str, width: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in text.split_whitespace() {
        let last = lines.last_mut().expect("there is always one");
        match last.is_empty() {
            true => last.push_str(word),
            false if last.len() + word.len() < width => *last += &format!(" {word}"),
            false => lines.push(word.to_string()),
        }
    }
    lines.retain(|line| !line.is_empty());
    lines
}

/// The plot of a source.
pub fn svg(definition: &Definition, lines: &[Line]) -> String {
    let mut body = String::new();
    let mut y = 34.0;
    let mut text = |y: f64, x: f64, class: &str, anchor: &str, said: &str| {
        let _ = writeln!(
            body,
            r#"<text class="{class}" x="{x}" y="{y:.1}" text-anchor="{anchor}">{}</text>"#,
            escaped(said)
        );
    };
    text(y, 20.0, "title", "start", &format!("{}: published, peer and pagefold", definition.title));
    for said in wrapped(
        &format!(
            "{}. There: {}. {}. Here: {}.",
            definition.source, definition.machine, definition.workload, definition.here
        ),
        150,
    ) {
        y += 16.0;
        text(y, 20.0, "note", "start", &said);
    }
    let mut bars = String::new();
    for figure in &definition.figure {
        y += 38.0;
        let good = if figure.better == published::Better::More { "more" } else { "less" };
        text(y, 20.0, "head", "start", &format!("{} [{}], {good} is better", figure.title, figure.unit));
        y += 8.0;
        let lines: Vec<&Line> = lines.iter().filter(|line| line.figure == figure.title).collect();
        let most = lines
            .iter()
            .filter_map(|line| [line.value, line.high].into_iter().flatten().reduce(f64::max))
            .fold(0.0, f64::max);
        for line in lines {
            y += ROW;
            text(y, LABEL - 8.0, "label", "end", &format!("{} ({})", line.name, line.side.name()));
            let Some(value) = line.value else {
                text(y, LABEL + 4.0, "none", "start", "not in this record");
                continue;
            };
            let across = |value: f64| if most > 0.0 { value.max(0.0) / most * BAR } else { 0.0 };
            let _ = writeln!(
                bars,
                r#"<rect class="bar {}" x="{LABEL}" y="{:.1}" width="{:.1}" height="{:.1}" fill="{}"><title>{}</title></rect>"#,
                line.side.name(),
                y - 12.0,
                across(value),
                ROW - 7.0,
                colour(line.side),
                escaped(&format!("{}: {} {}", line.name, published::show(value), line.unit)),
            );
            if let (Some(low), Some(high)) = (line.low, line.high) {
                let (low, high, middle) = (LABEL + across(low), LABEL + across(high), y - 4.5);
                let _ = writeln!(bars, r##"<path d="M{low:.1} {middle:.1}H{high:.1}" stroke="#111"/>"##);
            }
            let end = LABEL + across(value).max(line.high.map_or(0.0, across)) + 6.0;
            text(y, end, "value", "start", &published::show(value));
        }
        for note in figure.note.iter().flat_map(|note| wrapped(note, 150)) {
            y += 18.0;
            text(y, 20.0, "note", "start", &note);
        }
    }
    y += 34.0;
    text(y, 20.0, "note", "start", &format!("{}; bar: median, line: least to most of the rounds", definition.command));
    let height = y + 16.0;
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height:.0}\" width=\"{WIDTH}\" \
         height=\"{height:.0}\" role=\"img\" font-family=\"system-ui, sans-serif\" font-size=\"13\">\n\
         <title>{}</title>\n<style>.title{{font-size:19px;font-weight:600}}.head{{font-size:14px;font-weight:600}}\
         .note{{font-size:11px;fill:#555}}.none{{fill:#999;font-style:italic}}.value{{font-weight:600}}</style>\n\
         <rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n{bars}{body}</svg>\n",
        escaped(&format!("{}: published, peer and pagefold", definition.title)),
    )
}

/// Writes the plot of a source from rows to `DIR/NAME.svg`.
///
/// # Errors
/// The system's.
pub fn write(dir: &Path, definition: &Definition, rows: &[Value]) -> std::io::Result<PathBuf> {
    fs::create_dir_all(dir)?;
    let path = dir.join(format!("{}.svg", definition.name));
    fs::write(&path, svg(definition, &definition.compare(rows)))?;
    Ok(path)
}

const HELP: &str = "pagefold-bench plot DIR [--records DIR] [--json]: all five plots from the records, without a run

  DIR            where the plots go
  --records DIR  where the records are (default: bench/record)
  --json         the sources' rows and the values as JSON instead of tables";

/// Plots and tables from records alone.
pub fn run(args: &[String]) -> ExitCode {
    let (mut out, mut records, mut as_json) = (None, PathBuf::from("bench/record"), false);
    let mut rest = args.iter();
    while let Some(arg) = rest.next() {
        match arg.as_str() {
            "--help" => {
                println!("{HELP}");
                return ExitCode::SUCCESS;
            }
            "--json" => as_json = true,
            "--records" if rest.len() > 0 => records = rest.next().expect("just looked").into(),
            option if option.starts_with('-') || out.is_some() => {
                eprintln!("pagefold-bench plot: what is {option}?\n{HELP}");
                return ExitCode::from(2);
            }
            dir => out = Some(PathBuf::from(dir)),
        }
    }
    let Some(out) = out else {
        eprintln!("{HELP}");
        return ExitCode::from(2);
    };
    let mut all = Vec::new();
    for definition in published::names().filter_map(published::definition) {
        let rows = match record::read_all(&records, &definition.reads) {
            Ok(rows) => rows,
            Err(error) => {
                eprintln!("pagefold-bench plot: {}: {error}", records.display());
                return ExitCode::FAILURE;
            }
        };
        let lines = definition.compare(&rows);
        if !as_json {
            print!("{}", published::table(&definition, &lines));
        }
        match write(&out, &definition, &rows) {
            Ok(path) => eprintln!("plotted: {}", path.display()),
            Err(error) => {
                eprintln!("pagefold-bench plot: {}: {error}", out.display());
                return ExitCode::FAILURE;
            }
        }
        all.push(serde_json::json!({
            "source": definition.source, "name": definition.name, "published": definition.published, "figures": lines,
        }));
    }
    if as_json {
        println!("{}", serde_json::to_string_pretty(&all).expect("plain data"));
    }
    ExitCode::SUCCESS
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_plot_has_a_bar_for_each_value_and_says_what_is_missing() {
        for name in published::names() {
            let definition = published::definition(name).unwrap();
            let rows =
                record::read_all(Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/record")), &definition.reads).unwrap();
            for rows in [rows, Vec::new()] {
                let lines = definition.compare(&rows);
                let plot = svg(&definition, &lines);
                let tree = roxmltree::Document::parse(&plot).unwrap_or_else(|error| panic!("{name}: {error}"));
                let count = |tag: &str, class: &str| {
                    let of = |node: &roxmltree::Node| node.attribute("class").is_some_and(|is| is.starts_with(class));
                    tree.descendants()
                        .filter(|node| node.has_tag_name(("http://www.w3.org/2000/svg", tag)))
                        .filter(of)
                        .count()
                };
                assert_eq!(count("rect", "bar"), lines.iter().filter(|line| line.value.is_some()).count(), "{name}");
                assert_eq!(count("text", "none"), lines.iter().filter(|line| line.value.is_none()).count(), "{name}");
                assert_eq!(count("text", "label"), lines.len(), "{name}");
                if rows.is_empty() {
                    let published = lines.iter().filter(|line| line.side == Side::Published).count();
                    assert_eq!(count("rect", "bar"), published, "{name}: without rows only the source speaks");
                }
            }
        }
    }

    #[test]
    fn the_records_have_a_value_of_ours_for_every_source() {
        for name in published::names() {
            let definition = published::definition(name).unwrap();
            let rows =
                record::read_all(Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/record")), &definition.reads).unwrap();
            let lines = definition.compare(&rows);
            let ours = |side: Side| lines.iter().any(|line| line.side == side && line.value.is_some());
            assert!(ours(Side::Ours) && ours(Side::Peer), "{name}: definition and record do not fit: {lines:?}");
        }
    }

    #[test]
    fn longer_bars_are_larger_values() {
        let definition = published::definition("pageone").unwrap();
        let row = |engine: &str, speed: f64| json!({ "part": "merge", "layout": "files", "engine": engine, "speed_against_ksm": speed });
        let lines = definition.compare(&[row("pagefold, 1 worker", 4.0), row("KSM, smart_scan 1", 1.0)]);
        let plot = svg(&definition, &lines);
        let tree = roxmltree::Document::parse(&plot).unwrap();
        let width = |side: &str| {
            let bar = tree.descendants().find(|node| node.attribute("class") == Some(side)).unwrap();
            bar.attribute("width").unwrap().parse::<f64>().unwrap()
        };
        assert!((width("bar ours") - 4.0 * width("bar peer")).abs() < 0.2);
    }

    #[test]
    fn text_is_escaped() {
        assert_eq!(escaped("a<b & \"c\">"), "a&lt;b &amp; &quot;c&quot;&gt;");
    }
}
