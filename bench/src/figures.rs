//! Draws the page of figures, and the tables of figures in other documents, from the newest records of each machine.
//!
//! `bench/figures.toml` names the parts, the figures and where their values stand; see there.

use crate::published::{self, Better, Definition, Side};
use crate::records::{Record, cell, machines, number, records, short, value};
use crate::stats::Spread;
use crate::table::{self, digits};
use serde::Deserialize;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::fs;
use std::path::Path;

/// The page that is drawn as a whole.
const PAGE: &str = "docs/benchmarks.md";
/// The document beside those in `docs` that may have tables.
const README: &str = "README.md";
/// Around a table of a document. The name of the table stands between the first two.
const MARKS: [&str; 3] = ["<!-- figures ", ": drawn by `pagefold bench figures` -->\n", "<!-- end of figures -->"];

/// What the page shows.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct DocumentPage {
    intro: String,
    part: Vec<Part>,
    /// Listings of other documents, by the name of the table there.
    #[serde(default)]
    listing: BTreeMap<String, Listing>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Part {
    title: String,
    /// The definition whose published rows stand below the table.
    source: Option<String>,
    text: String,
    #[serde(default)]
    figure: Vec<Figure>,
    listing: Option<Listing>,
}

/// A row of a table, on each machine that has measured it.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Figure {
    what: String,
    bench: String,
    better: Better,
    ours: BTreeMap<String, Value>,
    peer: Option<BTreeMap<String, Value>>,
    at: String,
    scale: Option<f64>,
    /// What other documents call it, by the name of the table there.
    #[serde(default)]
    tables: BTreeMap<String, String>,
    /// It is new: the page has it as soon as a record has.
    #[serde(default)]
    pending: bool,
}

/// A table of the rows of a bench, the newest of each key.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Listing {
    bench: String,
    /// The fields of its rows; without any it has all.
    #[serde(default)]
    rows: BTreeMap<String, Value>,
    key: String,
    columns: String,
}

/// A figure as one machine has it.
struct Measured<'a> {
    record: &'a Record,
    ours: Spread,
    peer: Option<Spread>,
}

impl Measured<'_> {
    fn gain(&self, better: Better) -> Option<f64> {
        let (ours, peer) = (self.ours.median, self.peer?.median);
        let gain = if better == Better::More { ours / peer } else { peer / ours };
        // As the page shows it, so that the verdict follows from the cell.
        Some((gain * 100.0).round() / 100.0)
    }
}

impl Figure {
    /// The figure from the newest record of a machine that has both sides.
    fn measured<'a>(&self, records: &'a [Record], machine: &str) -> Option<Measured<'a>> {
        let scale = self.scale.unwrap_or(1.0);
        let of = |record: &&Record| record.machine == machine && record.is_of(&self.bench);
        records.iter().filter(of).find_map(|record| {
            let ours = value(&record.rows, &self.ours, &self.at, scale)?;
            let peer = match &self.peer {
                Some(wanted) => Some(value(&record.rows, wanted, &self.at, scale)?),
                None => None,
            };
            Some(Measured { record, ours, peer })
        })
    }
}

/// What a gain means.
fn verdict(gain: f64) -> &'static str {
    match gain {
        gain if gain < 0.95 => "**loses**",
        gain if gain <= 1.05 => "even",
        _ => "wins",
    }
}

/// The command without its number of rounds.
fn without_rounds(command: &str) -> String {
    let mut words = command.split(' ');
    let mut kept = Vec::new();
    while let Some(word) = words.next() {
        if word == "--rounds" {
            words.next();
        } else {
            kept.push(word);
        }
    }
    kept.join(" ")
}

fn draw_figures(text: &mut String, part: &Part, records: &[Record]) -> Result<(), String> {
    // Of those that differ in the number of rounds alone, the last: each record has its own.
    let mut commands = BTreeMap::new();
    text.push_str("\n|figure|machine|pagefold|peer|gain|verdict|record|\n|---|---|---|---|---|---|---|\n");
    for figure in &part.figure {
        let before = text.len();
        for machine in machines(records) {
            let Some(measured) = figure.measured(records, &machine) else { continue };
            let what = if text.len() == before { figure.what.as_str() } else { "" };
            let gain = measured.gain(figure.better);
            let command = measured.record.command.as_str();
            commands.insert(without_rounds(command), command);
            let _ = writeln!(
                text,
                "|{what}|{}|{}|{}|{}|{}|[{}](../bench/record/{machine}/{}.json)|",
                short(&machine),
                cell(measured.ours),
                measured.peer.map_or("–".into(), cell),
                gain.map_or("–".into(), digits),
                gain.map_or("–", verdict),
                measured.record.name.get(5..10).unwrap_or_default(),
                measured.record.name,
            );
        }
        if text.len() == before && !figure.pending {
            return Err(format!("bench/figures.toml: no record has {:?} of bench {}", figure.what, figure.bench));
        }
    }
    let commands: Vec<&str> = commands.into_values().collect();
    let _ = write!(text, "\nCommands of these records:\n\n```text\n{}\n```\n", commands.join("\n"));
    Ok(())
}

/// Rows of a bench, a table for each machine.
fn draw_listing(text: &mut String, listing: &Listing, records: &[Record]) {
    let columns = table::columns(&listing.columns);
    for machine in machines(records) {
        let mut rows: Vec<&Value> = Vec::new();
        let of = |record: &&Record| record.machine == machine && record.is_of(&listing.bench);
        let fits = |row: &&Value| published::fits(row, &listing.rows);
        for row in records.iter().filter(of).flat_map(|record| &record.rows).filter(fits) {
            if !rows.iter().any(|known| known[&listing.key] == row[&listing.key]) {
                rows.push(row);
            }
        }
        if rows.is_empty() {
            continue;
        }
        rows.sort_by_key(|row| row[&listing.key].to_string().to_lowercase());
        let heads: Vec<&str> = columns.iter().map(|column| column.head.as_str()).collect();
        let _ = write!(text, "\nOn {machine}:\n\n|{}|\n|{}\n", heads.join("|"), "---|".repeat(heads.len()));
        for row in rows {
            // Medians alone: the record has the spread.
            let median = |cell: String| {
                cell.split(" (").flat_map(|cell| cell.split(" +-")).next().unwrap_or_default().to_owned()
            };
            let cells: Vec<String> = columns.iter().map(|column| median(column.cell(row))).collect();
            let _ = writeln!(text, "|{}|", cells.join("|"));
        }
    }
}

/// What the source published, beside what is measured here.
fn draw_published(text: &mut String, definition: &Definition, records: &[Record]) -> Result<(), String> {
    let _ = write!(
        text,
        "\nPublished: {}. Machine: {}.\n\n|published|there|here|\n|---|---|---|\n",
        definition.title, definition.machine
    );
    for figure in &definition.figure {
        let bars = |rows: &[Value], is_published: bool| -> Result<Vec<String>, String> {
            let mut cells = Vec::new();
            for bar in figure.bar.iter().filter(|bar| (bar.side == Side::Published) == is_published) {
                // The sum makes zero of negative zero.
                let value = definition.value(bar, rows)?;
                cells.extend(value.map(|value| format!("{} {}", bar.name, digits(value + 0.0))));
            }
            Ok(cells)
        };
        // All values of a figure come from one record: the one that has most of them, or the newest of these.
        let mut most: Option<(&Record, Vec<String>)> = None;
        for record in records.iter().filter(|record| definition.reads.iter().any(|bench| record.is_of(bench))) {
            let here = bars(&record.rows, false)?;
            if here.len() > most.as_ref().map_or(0, |most| most.1.len()) {
                most = Some((record, here));
            }
        }
        let Some((record, here)) = most else { continue };
        let note = figure.note.as_ref().map_or(String::new(), |note| format!(". {note}"));
        let (there, machine) = (bars(&[], true)?.join("; "), short(&record.machine));
        let _ = writeln!(text, "|{}, {}{note}|{there}|{machine}: {}|", figure.title, figure.unit, here.join("; "));
    }
    Ok(())
}

/// What each machine is, from its newest record.
fn draw_machines(text: &mut String, records: &[Record]) {
    for machine in machines(records) {
        let newest = records.iter().find(|record| record.machine == machine && record.circumstances["cpu"].is_string());
        let Some(newest) = newest else { continue };
        let _ = writeln!(text, "- *{}*: {}", short(&machine), newest.host());
    }
}

fn page(root: &Path, page: &DocumentPage, records: &[Record]) -> Result<String, String> {
    let mut text = format!("# Benchmarks\n\n{}\n", page.intro);
    draw_machines(&mut text, records);
    for part in &page.part {
        let waits = |figure: &Figure| figure.pending && !records.iter().any(|record| record.is_of(&figure.bench));
        if !part.figure.is_empty() && part.figure.iter().all(waits) {
            continue;
        }
        let _ = write!(text, "\n## {}\n\n{}", part.title, part.text);
        if !part.figure.is_empty() {
            draw_figures(&mut text, part, records)?;
        }
        if let Some(listing) = &part.listing {
            draw_listing(&mut text, listing, records);
        }
        if let Some(source) = &part.source {
            draw_published(&mut text, &Definition::read(root, source)?, records)?;
        }
    }
    Ok(text)
}

/// A table of another document: a listing, or the figures that name it, on the first machine that has them.
///
/// # Errors
/// If no record has a row of the listing.
fn table_of(name: &str, page: &DocumentPage, records: &[Record]) -> Result<String, String> {
    if let Some(listing) = page.listing.get(name) {
        let mut text = String::new();
        draw_listing(&mut text, listing, records);
        if text.is_empty() {
            return Err(format!("bench/figures.toml: no record has a row of the table {name:?}"));
        }
        return Ok(text + "\n");
    }
    let mut text = String::from("\n| | machine | pagefold | peer | gain |\n|---|---|---|---|---|\n");
    for figure in page.part.iter().flat_map(|part| &part.figure) {
        let Some(label) = figure.tables.get(name) else { continue };
        let machines = machines(records);
        let Some((machine, measured)) =
            machines.iter().find_map(|machine| Some((machine, figure.measured(records, machine)?)))
        else {
            continue;
        };
        let bold = |text: String, wins: bool| if wins { format!("**{text}**") } else { text };
        let gain = measured.gain(figure.better);
        let [ours, peer] =
            [Some(measured.ours), measured.peer].map(|side| side.map_or("–".into(), |side| number(side.median)));
        let _ = writeln!(
            text,
            "| {label} | {} | {} | {} | {} |",
            short(machine),
            bold(ours, gain.is_some_and(|gain| gain > 1.0)),
            bold(peer, gain.is_some_and(|gain| gain < 1.0)),
            gain.map_or("–".into(), digits),
        );
    }
    Ok(text + "\n")
}

/// The document with its tables drawn anew; `waiting` loses their names.
fn with_tables(
    path: &str,
    document: &str,
    waiting: &mut BTreeSet<&str>,
    table: impl Fn(&str) -> Result<String, String>,
) -> Result<String, String> {
    let (mut drawn, mut rest) = (String::new(), document);
    while let Some((before, after)) = rest.split_once(MARKS[0]) {
        let (name, after) =
            after.split_once(MARKS[1]).ok_or_else(|| format!("{path}: a mark of figures has no end"))?;
        let (_, after) = after.split_once(MARKS[2]).ok_or_else(|| format!("{path}: figures {name:?} have no end"))?;
        if !waiting.remove(name) {
            return Err(format!("{path}: bench/figures.toml has no table {name:?}, or two documents have it"));
        }
        drawn.extend([before, MARKS[0], name, MARKS[1], &table(name)?, MARKS[2]]);
        rest = after;
    }
    Ok(drawn + rest)
}

/// The documents that may have tables, by path.
fn documents(root: &Path) -> Result<Vec<String>, String> {
    let mut found = vec![README.to_owned()];
    let mut dirs = vec!["docs".to_owned()];
    while let Some(dir) = dirs.pop() {
        for entry in fs::read_dir(root.join(&dir)).map_err(|error| format!("{dir}: {error}"))?.flatten() {
            let path = format!("{dir}/{}", entry.file_name().to_string_lossy());
            if entry.path().is_dir() {
                dirs.push(path);
            } else if path.ends_with(".md") && path != PAGE {
                found.push(path);
            }
        }
    }
    Ok(found)
}

/// The pages as the records in `root` have them, by path.
pub fn draw(root: &Path) -> Result<Vec<(String, String)>, String> {
    let read = |path: &str| fs::read_to_string(root.join(path)).map_err(|error| format!("{path}: {error}"));
    let figures: DocumentPage =
        toml::from_str(&read("bench/figures.toml")?).map_err(|error| format!("bench/figures.toml: {error}"))?;
    let records = records(root)?;
    let of_tables = figures.part.iter().flat_map(|part| &part.figure).flat_map(|figure| figure.tables.keys());
    let mut waiting: BTreeSet<&str> = of_tables.chain(figures.listing.keys()).map(String::as_str).collect();
    let mut drawn = vec![(PAGE.into(), page(root, &figures, &records)?)];
    for path in documents(root)? {
        let document = read(&path)?;
        if document.contains(MARKS[0]) {
            let text = with_tables(&path, &document, &mut waiting, |name| table_of(name, &figures, &records))?;
            drawn.push((path, text));
        }
    }
    match waiting.first() {
        Some(name) => Err(format!("bench/figures.toml: no document has the table {name:?}")),
        None => Ok(drawn),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn root() -> &'static Path {
        Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
    }

    #[test]
    fn the_pages_show_the_records() {
        for (path, drawn) in draw(root()).unwrap() {
            let is = fs::read_to_string(root().join(&path)).unwrap();
            let differs = is.lines().zip(drawn.lines()).find(|(is, drawn)| is != drawn);
            assert!(is == drawn, "{path} is not what the records say; run `pagefold bench figures`: {differs:?}");
        }
    }

    #[test]
    fn what_the_page_shows_is_still_measured() {
        // A part that is gone from the benches would leave its rows on the page, and no run could measure them again.
        let mut sources = String::new();
        let mut dirs = vec![root().join("bench/src")];
        while let Some(dir) = dirs.pop() {
            for path in fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()) {
                if path.is_dir() {
                    dirs.push(path);
                } else {
                    sources += &fs::read_to_string(path).unwrap();
                }
            }
        }
        let page: DocumentPage =
            toml::from_str(&fs::read_to_string(root().join("bench/figures.toml")).unwrap()).unwrap();
        for figure in page.part.iter().flat_map(|part| &part.figure) {
            for (field, value) in figure.ours.iter().chain(figure.peer.iter().flatten()) {
                let Some(text) = value.as_str().filter(|_| ["part", "table", "bench"].contains(&field.as_str())) else {
                    continue;
                };
                assert!(sources.contains(&format!("{text:?}")), "{}: no bench has {field} {text:?}", figure.what);
            }
        }
    }

    #[test]
    fn a_document_keeps_what_stands_around_its_tables() {
        let [open, drawn, end] = MARKS;
        let document = format!("a\n{open}one{drawn}old\n{end}\nb\n{open}two{drawn}{end}c");
        let draw = |names: &[&'static str]| {
            let mut waiting = names.iter().copied().collect();
            with_tables("d.md", &document, &mut waiting, |name| Ok(format!("new {name}\n")))
        };
        let expected = format!("a\n{open}one{drawn}new one\n{end}\nb\n{open}two{drawn}new two\n{end}c");
        assert_eq!(draw(&["one", "two"]), Ok(expected));
        assert!(draw(&["one"]).is_err(), "a table of no figures");
        let cut = |text: &str| with_tables("d.md", text, &mut BTreeSet::from(["one"]), |_| Ok(String::new())).is_err();
        assert!(cut(&format!("{open}one")) && cut(&format!("{open}one{drawn}old")), "a mark without an end");
    }

    #[test]
    fn the_page_stays_short() {
        let words = fs::read_to_string(root().join(PAGE)).unwrap().split_whitespace().count();
        assert!(words <= 2000, "{PAGE} has {words} words; at most 2000");
    }

    #[test]
    fn the_newest_record_with_both_sides_counts() {
        let record = |name: &str, rows: Value| Record {
            machine: "m".into(),
            name: name.into(),
            rows: rows.as_array().unwrap().clone(),
            command: String::new(),
            circumstances: Value::Null,
        };
        let records = [
            record("2026-03-03-pageone-x", json!([{ "e": "a", "v": 9 }])),
            record(
                "2026-02-02-pageone-y",
                json!([{ "e": "a", "v": [1, 2, 6] }, { "e": "k", "v": 4 }, { "e": "k", "v": 5 }]),
            ),
            record("2026-01-01-pageone-z", json!([{ "e": "a", "v": 7 }, { "e": "k", "v": 7 }])),
        ];
        let figure =
            "what = 'w'\nbench = 'pageone'\nbetter = 'less'\nours = { e = 'a' }\npeer = { e = 'k' }\nat = '/v'";
        let figure: Figure = toml::from_str(figure).unwrap();
        let measured = figure.measured(&records, "m").unwrap();
        assert_eq!(measured.record.name, "2026-02-02-pageone-y");
        assert_eq!(
            (cell(measured.ours), cell(measured.peer.unwrap())),
            ("2.00 (1.00–6.00)".into(), "5.00 (4.00–5.00)".into())
        );
        assert_eq!(measured.gain(Better::Less), Some(2.5));
        assert_eq!(measured.gain(Better::More), Some(0.4));
        assert!(figure.measured(&records, "other").is_none());
        assert!(!records[0].is_of("page"), "a bench is a whole word");
    }

    #[test]
    fn a_losing_row_says_so() {
        assert_eq!([0.5, 0.95, 1.0, 1.05, 1.06].map(verdict), ["**loses**", "even", "even", "even", "wins"]);
    }
}
