//! Rows of the tables.

use crate::stats::{Spread, quantile};
use crate::table::{self, Column};
use serde_json::Value;

/// A row: its names, and its figures with their units in the column names.
#[derive(Debug, serde::Serialize)]
pub struct Row {
    /// Which part.
    pub part: &'static str,
    /// What was measured.
    pub name: String,
    /// On what.
    pub on: String,
    /// Column and value.
    #[serde(serialize_with = "by_column")]
    pub figures: Vec<(&'static str, f64)>,
}

/// An object with a value per column; a figure that was not measured is null.
fn by_column<S: serde::Serializer>(figures: &[(&str, f64)], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_map(figures.iter().copied())
}

impl Row {
    /// The row of single times in microseconds.
    pub fn of_times(part: &'static str, name: &str, on: String, mut us: Vec<f64>) -> Row {
        let mean = us.iter().sum::<f64>() / us.len() as f64;
        us.sort_by(f64::total_cmp);
        let at = |share| quantile(&us, share).unwrap_or(f64::NAN);
        Row {
            part,
            name: name.to_owned(),
            on,
            figures: vec![("p50 us", at(0.5)), ("p99 us", at(0.99)), ("us/page", mean)],
        }
    }

    /// Median and extremes of rounds in three columns.
    pub fn rounds(name: &'static str, rates: &[f64]) -> Vec<(&'static str, f64)> {
        let spread = Spread::of(rates.iter().copied());
        vec![(name, spread.median), ("least", spread.low), ("most", spread.high)]
    }
}

/// Prints rows, a table for each run of rows with the same columns, and records them.
pub fn show(rows: Vec<Row>) {
    for rows in
        rows.chunk_by(|a, b| a.figures.iter().map(|figure| figure.0).eq(b.figures.iter().map(|figure| figure.0)))
    {
        let mut columns = vec![Column::new("what", "/name".into()), Column::new("on", "/on".into())];
        for (name, _) in &rows[0].figures {
            columns.push(Column::new(name, format!("/figures/{}", name.replace('/', "~1"))));
        }
        table::print_columns(rows[0].part, &columns, &rows.iter().map(value).collect::<Vec<_>>());
    }
    crate::record::emit(rows.iter().map(value).collect());
}

fn value(row: &Row) -> Value {
    serde_json::to_value(row).expect("plain data")
}
