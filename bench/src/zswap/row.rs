//! Rows of the tables.

use crate::record;
use crate::stats::{median, quantile};
use serde_json::{Value, json};

/// A row: its part, what was measured on what, and its figures, with their units in their names.
pub fn of(part: &str, name: &str, on: &str, figures: Value) -> Value {
    json!({ "part": part, "name": name, "on": on, "figures": figures })
}

/// The percents of the times at which a row says how long they took.
const PERCENTS: [f64; 16] =
    [1.0, 5.0, 10.0, 20.0, 30.0, 40.0, 50.0, 60.0, 70.0, 80.0, 90.0, 95.0, 98.0, 99.0, 99.5, 99.9];

/// Single times in microseconds, in short: median, 99 % and mean, then the times of which these percents took no longer.
pub fn in_short(mut us: Vec<f64>) -> Vec<f64> {
    let mean = us.iter().sum::<f64>() / us.len() as f64;
    us.sort_by(f64::total_cmp);
    let at = |percent: f64| quantile(&us, percent / 100.0).unwrap_or(0.0);
    [at(50.0), at(99.0), mean].into_iter().chain(PERCENTS.map(at)).collect()
}

/// A row of times in short. Its distribution is pairs of a time and a percent.
pub fn of_times(part: &str, name: &str, on: &str, short: &[f64]) -> Value {
    let mut row = of(part, name, on, json!({ "p50 us": short[0], "p99 us": short[1], "us/page": short[2] }));
    row["distribution_us"] = short[3..].iter().zip(PERCENTS).map(|(us, percent)| json!([us, percent])).collect();
    row
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
