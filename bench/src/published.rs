//! What the five sources published, beside what a peer and we measure here.
//!
//! `bench/definitions/*.toml` hold the workloads, the published rows with the place and the words they stand in, and
//! for each comparable figure where our record has its value. A published figure that the source does not print as
//! such (a speed per thread, a ratio) is a formula over published rows, so that anyone can follow it.

use crate::stats::Spread;
use serde::Deserialize;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;

/// A source: what it measured on what, and the figures that can be compared. The file has more, for its readers.
#[derive(Debug, Deserialize)]
pub struct Definition {
    pub title: String,
    pub machine: String,
    /// The benches that measure its rows.
    pub reads: Vec<String>,
    /// Rows of the source: a name (`id`), a value, the place, the words.
    pub published: Vec<Value>,
    pub figure: Vec<Figure>,
}

/// Which way is good.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Better {
    More,
    Less,
}

/// The owner of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Side {
    Published,
    Peer,
    Ours,
}

/// A figure that can be compared: values that stand beside each other.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Figure {
    pub title: String,
    pub unit: String,
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
    from: Option<String>,
    /// Fields that the row of the record must have, of a list any; the last such row counts.
    #[serde(default)]
    row: BTreeMap<String, Value>,
    /// The JSON pointer of the value in the row.
    #[serde(default)]
    at: String,
    /// The value is divided by this one.
    by: Option<Cell>,
    /// And multiplied by this.
    scale: Option<f64>,
}

/// A value in a record.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Cell {
    row: BTreeMap<String, Value>,
    at: String,
}

impl Definition {
    /// Reads the definition of a source in the source tree `root`.
    pub fn read(root: &Path, name: &str) -> Result<Definition, String> {
        let path = root.join(format!("bench/definitions/{name}.toml"));
        let text = std::fs::read_to_string(&path).map_err(|error| format!("{}: {error}", path.display()))?;
        toml::from_str(&text).map_err(|error| format!("{}: {error}", path.display()))
    }

    /// The value of a bar in these rows, if they have it.
    pub fn value(&self, bar: &Bar, rows: &[Value]) -> Result<Option<f64>, String> {
        if let Some(formula) = &bar.from {
            return self.calculate(formula).map(Some);
        }
        let mut value = look(rows, &bar.row, &bar.at);
        if let Some(by) = &bar.by {
            value = value.zip(look(rows, &by.row, &by.at)).map(|(value, by)| value / by);
        }
        Ok(value.map(|value| value * bar.scale.unwrap_or(1.0)).filter(|value| value.is_finite()))
    }

    /// The value of a formula: numbers, names of published rows, `+ - * /` and parentheses.
    fn calculate(&self, formula: &str) -> Result<f64, String> {
        let mut rest = formula.trim_start();
        let value = self.terms(&mut rest, 0)?;
        if rest.is_empty() { Ok(value) } else { Err(format!("{formula}: what is {rest:?}?")) }
    }

    /// The value of terms that are joined by signs which bind more closely than `least`; the rest is left.
    fn terms(&self, rest: &mut &str, least: usize) -> Result<f64, String> {
        let end = rest.find(|c: char| !(c.is_ascii_alphanumeric() || "_.".contains(c))).unwrap_or(rest.len());
        let word = &rest[..end];
        let named = self.published.iter().find(|row| row["id"] == word).and_then(|row| row["value"].as_f64());
        *rest = rest[end..].trim_start();
        let mut value = match rest.strip_prefix('(').filter(|_| word.is_empty()) {
            Some(inner) => {
                *rest = inner.trim_start();
                let value = self.terms(rest, 0)?;
                *rest = rest.strip_prefix(')').ok_or_else(|| format!("no ) before {rest:?}"))?.trim_start();
                value
            }
            None => named.or_else(|| word.parse().ok()).ok_or_else(|| format!("no published row {word:?}"))?,
        };
        while let Some(sign) =
            rest.chars().next().and_then(|first| "+-*/".find(first)).filter(|sign| sign / 2 + 1 > least)
        {
            *rest = rest[1..].trim_start();
            let next = self.terms(rest, sign / 2 + 1)?;
            value = [value + next, value - next, value * next, value / next][sign];
        }
        Ok(value)
    }
}

/// Whether a row has these fields; of a list any value fits.
pub fn fits(row: &Value, wanted: &BTreeMap<String, Value>) -> bool {
    wanted.iter().all(|(field, value)| match value {
        Value::Array(any) => any.iter().any(|value| same(&row[field], value)),
        value => same(&row[field], value),
    })
}

/// The value of a cell, from the last row that has it.
fn look(rows: &[Value], wanted: &BTreeMap<String, Value>, at: &str) -> Option<f64> {
    rows.iter().rev().filter(|row| fits(row, wanted)).find_map(|row| spread(row.pointer(at)?)).map(|found| found.median)
}

fn same(a: &Value, b: &Value) -> bool {
    a == b || a.as_f64().is_some_and(|a| Some(a) == b.as_f64())
}

/// A number, the median and the extremes of a list, or what `{median, low, high}` says.
pub fn spread(value: &Value) -> Option<Spread> {
    match value {
        Value::Array(rounds) => Some(Spread::of(rounds.iter().filter_map(Value::as_f64))),
        Value::Object(spread) => {
            let field = |name: &str| spread.get(name).and_then(Value::as_f64);
            let median = field("median")?;
            Some(Spread { median, low: field("low").unwrap_or(median), high: field("high").unwrap_or(median) })
        }
        number => number.as_f64().map(|number| Spread::of([number])),
    }
    .filter(|spread| spread.median.is_finite())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn definition(name: &str) -> Definition {
        Definition::read(Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/..")), name).unwrap()
    }

    #[test]
    fn definitions_hold_together() {
        for name in ["pageone", "pagecache", "zswap", "llds", "erofs"] {
            let definition = definition(name);
            let mut ids: Vec<_> = definition.published.iter().map(|row| row["id"].as_str().unwrap()).collect();
            ids.sort_unstable();
            assert!(ids.windows(2).all(|pair| pair[0] != pair[1]), "{name}: an id is there twice");
            for row in &definition.published {
                let says = |field: &str| row[field].as_str().is_some_and(|text| !text.is_empty());
                assert!(says("place") && says("quote"), "{name}: {} does not say where it stands", row["id"]);
            }
            for figure in &definition.figure {
                let has = |side: Side| figure.bar.iter().any(|bar| bar.side == side);
                assert!(has(Side::Published) && has(Side::Ours), "{name}: {}: nothing to compare", figure.title);
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
        let definition = definition("pageone");
        let is = |formula: &str, value: f64| assert!((definition.calculate(formula).unwrap() - value).abs() < 1e-9);
        is("1 + 2 * 3 - 4 / 2", 5.0);
        is("(1 + 2) * (3 - 4) / 2", -1.5);
        is("ksm_s / pageone_s", 796.0 / 58.0);
        for wrong in ["", "1 +", "(1", "1)", "no_such_row"] {
            assert!(definition.calculate(wrong).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn values_come_from_the_last_row_that_fits() {
        let row = |engine: &str, speed: Value| json!({ "engine": engine, "speed": speed });
        let rows = [row("a", json!(1.5)), row("a", json!([3.0, 1.0, 2.0])), row("b", json!({ "median": 7 }))];
        let of = |engine: &str| look(&rows, &BTreeMap::from([("engine".to_owned(), json!(engine))]), "/speed");
        assert_eq!((of("a"), of("b")), (Some(2.0), Some(7.0)));
        assert_eq!(of("c"), None, "what was not measured has no value");
        assert_eq!(spread(&json!([3.0, 1.0, 2.0])).map(|spread| (spread.low, spread.high)), Some((1.0, 3.0)));
        assert!(spread(&json!(null)).is_none() && spread(&json!([])).is_none());
    }
}
