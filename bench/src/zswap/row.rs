//! Rows of the tables.

use crate::record;
use crate::stats::{median, quantile};
use serde_json::{Value, json};

/// A row: its part, what was measured on what, and its figures, with their units in their names.
pub fn of(part: &str, name: &str, on: &str, figures: Value) -> Value {
    json!({ "part": part, "name": name, "on": on, "figures": figures })
}

/// The figures of single times in microseconds.
pub fn of_times(mut us: Vec<f64>) -> Value {
    let mean = us.iter().sum::<f64>() / us.len() as f64;
    us.sort_by(f64::total_cmp);
    json!({ "p50 us": quantile(&us, 0.5), "p99 us": quantile(&us, 0.99), "us/page": mean })
}

fn names(row: &Value) -> Vec<&String> {
    row["figures"].as_object().into_iter().flat_map(|figures| figures.keys()).collect()
}

/// The row with the medians of the same row's rounds.
pub fn of_rounds(rounds: &[Value]) -> Value {
    let mut row = rounds[0].clone();
    for name in names(&rounds[0]) {
        let values = rounds.iter().filter_map(|round| round["figures"][name].as_f64());
        row["figures"][name] = json!(median(values));
    }
    row
}

/// Prints rows, a table for each run of rows with the same figures, and records them.
pub fn show(rows: &[Value]) {
    for rows in rows.chunk_by(|a, b| names(a) == names(b)) {
        let column = |name: &String| format!("|{name}=/figures/{}", name.replace('/', "~1"));
        let columns: String = names(&rows[0]).into_iter().map(column).collect();
        record::table(rows[0]["part"].as_str().unwrap_or_default(), &format!("what=name|on{columns}"), rows.to_vec());
    }
}
