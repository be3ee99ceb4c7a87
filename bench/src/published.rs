//! What the five sources published, beside what a peer and we measure here.
//!
//! `bench/definitions/*.toml` hold the workloads, the published rows with the place and the words they stand in, and
//! for each comparable figure where our record has its value. A published figure that the source does not print as
//! such (a speed per thread, a ratio) is a formula over published rows, so that anyone can follow it.

use crate::stats::Spread;
use crate::table::digits;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;

/// The definitions, in the order of the sources.
const FILES: [(&str, &str); 5] = [
    ("pageone", include_str!("../definitions/pageone.toml")),
    ("pagecache", include_str!("../definitions/pagecache.toml")),
    ("zswap", include_str!("../definitions/zswap.toml")),
    ("llds", include_str!("../definitions/llds.toml")),
    ("erofs", include_str!("../definitions/erofs.toml")),
];

/// A source: what it measured on what, and the figures that can be compared.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Definition {
    pub name: String,
    pub title: String,
    pub source: String,
    pub machine: String,
    pub workload: String,
    pub here: String,
    pub command: String,
    /// The benches that measure its rows.
    pub reads: Vec<String>,
    pub published: Vec<Published>,
    pub figure: Vec<Figure>,
}

/// A row of the source.
#[derive(Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Published {
    /// Name in formulas.
    pub id: String,
    pub system: String,
    pub what: String,
    pub value: f64,
    pub unit: String,
    pub place: String,
    pub quote: String,
}

/// Which way is good.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Better {
    More,
    Less,
}

/// The owner of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Side {
    Published,
    Peer,
    Ours,
}

impl Side {
    pub fn name(self) -> &'static str {
        match self {
            Side::Published => "published",
            Side::Peer => "peer",
            Side::Ours => "ours",
        }
    }
}

/// A figure that can be compared: values that stand beside each other.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Figure {
    pub title: String,
    pub unit: String,
    pub better: Better,
    /// What a reader must know to compare fairly.
    pub note: Option<String>,
    pub bar: Vec<Bar>,
}

/// Where a value comes from.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Bar {
    pub side: Side,
    pub name: String,
    /// A formula over the published rows.
    pub from: Option<String>,
    /// Fields that the row of the record must have, of a list any; the last such row counts.
    #[serde(default)]
    pub row: BTreeMap<String, Value>,
    /// The JSON pointer of the value in the row.
    #[serde(default)]
    pub at: String,
    /// The value is divided by this one.
    pub by: Option<Cell>,
    /// And multiplied by this.
    pub scale: Option<f64>,
}

/// A value in a record.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cell {
    row: BTreeMap<String, Value>,
    at: String,
}

/// A line of the comparison.
#[derive(Debug, Serialize)]
pub struct Line {
    pub source: String,
    pub figure: String,
    pub unit: String,
    pub better: Better,
    pub side: Side,
    pub name: String,
    pub value: Option<f64>,
    pub low: Option<f64>,
    pub high: Option<f64>,
}

/// The definition of a source.
///
/// # Panics
/// If a definition of this program is malformed; a test reads them all.
pub fn definition(name: &str) -> Option<Definition> {
    let (_, text) = FILES.iter().find(|file| file.0 == name)?;
    Some(toml::from_str(text).unwrap_or_else(|error| panic!("bench/definitions/{name}.toml: {error}")))
}

/// The names of all sources.
pub fn names() -> impl Iterator<Item = &'static str> {
    FILES.iter().map(|file| file.0)
}

impl Definition {
    /// The figures of this source, with the values that these rows have for them.
    pub fn compare(&self, rows: &[Value]) -> Vec<Line> {
        let lines = self.figure.iter().flat_map(|figure| figure.bar.iter().map(move |bar| (figure, bar)));
        lines
            .map(|(figure, bar)| {
                let [value, low, high] = self.value(bar, rows);
                Line {
                    source: self.name.clone(),
                    figure: figure.title.clone(),
                    unit: figure.unit.clone(),
                    better: figure.better,
                    side: bar.side,
                    name: bar.name.clone(),
                    value,
                    low,
                    high,
                }
            })
            .collect()
    }

    fn value(&self, bar: &Bar, rows: &[Value]) -> [Option<f64>; 3] {
        if let Some(formula) = &bar.from {
            return [Some(self.calculate(formula).expect("a test calculates all formulas")), None, None];
        }
        let mut found = look(rows, &bar.row, &bar.at);
        if let Some(by) = &bar.by {
            // Extremes of a quotient of two medians mean nothing.
            let [by, ..] = look(rows, &by.row, &by.at);
            found = [found[0].zip(by).map(|(value, by)| value / by), None, None];
        }
        let scale = bar.scale.unwrap_or(1.0);
        let [value, low, high] = found.map(|value| value.map(|value| value * scale).filter(|value| value.is_finite()));
        if scale < 0.0 { [value, high, low] } else { [value, low, high] }
    }

    /// The value of a formula: numbers, names of published rows, `+ - * /` and parentheses.
    pub fn calculate(&self, formula: &str) -> Result<f64, String> {
        let mut rest = formula;
        let value = self.sum(&mut rest)?;
        if rest.trim().is_empty() { Ok(value) } else { Err(format!("{formula}: what is {rest:?}?")) }
    }

    fn sum(&self, rest: &mut &str) -> Result<f64, String> {
        let mut value = self.product(rest)?;
        while let Some(sign) = take(rest, "+-") {
            let next = self.product(rest)?;
            value = if sign == '+' { value + next } else { value - next };
        }
        Ok(value)
    }

    fn product(&self, rest: &mut &str) -> Result<f64, String> {
        let mut value = self.term(rest)?;
        while let Some(sign) = take(rest, "*/") {
            let next = self.term(rest)?;
            value = if sign == '*' { value * next } else { value / next };
        }
        Ok(value)
    }

    fn term(&self, rest: &mut &str) -> Result<f64, String> {
        if take(rest, "(").is_some() {
            let value = self.sum(rest)?;
            return take(rest, ")").map(|_| value).ok_or_else(|| format!("no ) before {rest:?}"));
        }
        let text = rest.trim_start();
        let end = text.find(|c: char| !(c.is_ascii_alphanumeric() || "_.".contains(c))).unwrap_or(text.len());
        let (word, after) = text.split_at(end);
        *rest = after;
        let named = self.published.iter().find(|row| row.id == word).map(|row| row.value);
        named.or_else(|| word.parse().ok()).ok_or_else(|| format!("no published row {word:?}"))
    }
}

fn take(rest: &mut &str, of: &str) -> Option<char> {
    let text = rest.trim_start();
    let first = text.chars().next().filter(|c| of.contains(*c))?;
    *rest = &text[1..];
    Some(first)
}

/// Whether a row has these fields; of a list any value fits.
pub fn fits(row: &Value, wanted: &BTreeMap<String, Value>) -> bool {
    wanted.iter().all(|(field, value)| match value {
        Value::Array(any) => any.iter().any(|value| same(&row[field], value)),
        value => same(&row[field], value),
    })
}

/// Value, least and most of a cell, from the last row that has it.
fn look(rows: &[Value], wanted: &BTreeMap<String, Value>, at: &str) -> [Option<f64>; 3] {
    rows.iter().rev().filter(|row| fits(row, wanted)).find_map(|row| row.pointer(at)).map_or([None; 3], spread)
}

fn same(a: &Value, b: &Value) -> bool {
    a == b || a.as_f64().is_some_and(|a| Some(a) == b.as_f64())
}

/// A number, the median and the extremes of a list, or what `{median, low, high}` says.
pub fn spread(value: &Value) -> [Option<f64>; 3] {
    match value {
        Value::Array(rounds) => {
            let spread = Spread::of(rounds.iter().filter_map(Value::as_f64));
            [spread.median, spread.low, spread.high].map(|value| Some(value).filter(|value| value.is_finite()))
        }
        Value::Object(spread) => ["median", "low", "high"].map(|name| spread.get(name).and_then(Value::as_f64)),
        number => [number.as_f64(), None, None],
    }
}

/// The comparison as text; figures of which nothing was measured are left out.
pub fn table(definition: &Definition, lines: &[Line]) -> String {
    use std::fmt::Write;
    let mut text = format!(
        "\n{}: {}\n  there: {}\n         {}\n  here:  {}\n         {}\n",
        definition.title,
        definition.source,
        definition.workload,
        definition.machine,
        definition.here,
        definition.command
    );
    let measured = |figure: &&Figure| {
        lines.iter().any(|line| line.figure == figure.title && line.side != Side::Published && line.value.is_some())
    };
    if !definition.figure.iter().any(|figure| measured(&figure)) {
        return String::new();
    }
    let shown: Vec<&Figure> = definition.figure.iter().filter(measured).collect();
    let formulas: Vec<&str> =
        shown.iter().flat_map(|figure| &figure.bar).filter_map(|bar| bar.from.as_deref()).collect();
    let words = |formula: &str| -> Vec<String> {
        formula.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_')).map(str::to_string).collect()
    };
    let used: Vec<String> = formulas.into_iter().flat_map(words).collect();
    for row in definition.published.iter().filter(|row| used.contains(&row.id)) {
        let _ = writeln!(text, "    {}: {}: {} {} ({})", row.system, row.what, row.value, row.unit, row.place);
    }
    for figure in shown {
        let _ = writeln!(text, "  {}, {} ({:?} is better)", figure.title, figure.unit, figure.better);
        for line in lines.iter().filter(|line| line.figure == figure.title) {
            let value = line.value.map_or("not in these rows".into(), digits);
            let range = line.low.zip(line.high).filter(|(low, high)| low != high);
            let range = range.map(|(low, high)| format!("  ({} to {})", digits(low), digits(high))).unwrap_or_default();
            let _ = writeln!(text, "    {:10} {:36} {value:>9}{range}", line.side.name(), line.name);
        }
        if let Some(note) = &figure.note {
            let _ = writeln!(text, "    {note}");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn definitions_parse_and_hold_together() {
        for name in names() {
            let definition = definition(name).unwrap();
            assert_eq!(definition.name, name);
            let mut ids: Vec<_> = definition.published.iter().map(|row| &row.id).collect();
            ids.sort();
            assert!(ids.windows(2).all(|pair| pair[0] != pair[1]), "{name}: an id is there twice");
            for row in &definition.published {
                assert!(
                    !row.place.is_empty() && !row.quote.is_empty(),
                    "{name}: {} does not say where it stands",
                    row.id
                );
            }
            for figure in &definition.figure {
                for bar in &figure.bar {
                    let what = format!("{name}: {}: {}", figure.title, bar.name);
                    assert_eq!(bar.from.is_some(), bar.side == Side::Published, "{what}");
                    match &bar.from {
                        Some(formula) => assert!(definition.calculate(formula).unwrap() > 0.0, "{what}"),
                        None => assert!(bar.at.starts_with('/') && !bar.row.is_empty(), "{what}"),
                    }
                }
            }
        }
    }

    #[test]
    fn formulas_follow_the_rules_of_arithmetic() {
        let definition = definition("pageone").unwrap();
        let is = |formula: &str, value: f64| assert!((definition.calculate(formula).unwrap() - value).abs() < 1e-9);
        is("1 + 2 * 3 - 4 / 2", 5.0);
        is("(1 + 2) * (3 - 4) / 2", -1.5);
        is("ksm_s / pageone_s", 796.0 / 58.0);
        for wrong in ["", "1 +", "(1", "1)", "no_such_row"] {
            assert!(definition.calculate(wrong).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn the_sources_own_percentages_follow_from_their_megabytes() {
        let definition = definition("erofs").unwrap();
        for pair in ["redis", "postgres", "tensorflow", "mariadb", "nginx", "tomcat"] {
            for table in ["", "_run"] {
                let at = |what: &str| definition.calculate(&format!("{pair}{table}_{what}")).unwrap();
                let (no, yes, percent) = (at("no"), at("yes"), at("percent"));
                // The source rounds, not always to the nearest.
                let follows = 100.0 * (no - yes) / no;
                assert!((follows - percent).abs() < 1.0, "{pair}{table}: {follows} against {percent}");
            }
        }
    }

    #[test]
    fn values_come_from_the_last_row_that_fits() {
        let definition = definition("pageone").unwrap();
        let row = |speed: f64| json!({ "part": "merge", "layout": "files", "engine": "pagefold, 1 worker", "speed_against_ksm": speed });
        let lines = definition.compare(&[row(1.5), row(2.5), json!({ "part": "idle" })]);
        let ours = lines.iter().find(|line| line.side == Side::Ours).unwrap();
        assert_eq!(ours.value, Some(2.5));
        let peer = lines.iter().find(|line| line.side == Side::Peer).unwrap();
        assert_eq!(peer.value, None, "what was not measured has no value");
    }

    #[test]
    fn medians_and_extremes_of_rounds() {
        assert_eq!(spread(&json!([3.0, 1.0, 2.0])), [Some(2.0), Some(1.0), Some(3.0)]);
        assert_eq!(spread(&json!({ "median": 2, "low": 1, "high": 3 })), [Some(2.0), Some(1.0), Some(3.0)]);
        assert_eq!(spread(&json!(7)), [Some(7.0), None, None]);
        assert_eq!(spread(&json!(null)), [None, None, None]);
    }
}
