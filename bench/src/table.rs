//! The one printer of tables: rows are JSON objects, and a line of text says which of their fields are the columns.
//!
//! Columns are separated by `|`; each is `HEAD=FIELD:FORMAT`. FIELD is a field's name or a JSON pointer; left out it is HEAD
//! with `_` for spaces. FORMAT is the number of digits, after `M` for bytes shown as MiB; a unit may follow: `:1 %`, `:M1`.
//! A list of rounds shows its median and half its range in percent, an object its median and extremes, an absent value `-`.

use crate::stats::Spread;
use serde_json::Value;

/// A column of a table.
pub struct Column {
    /// Its head.
    pub head: String,
    /// The JSON pointer of its field.
    at: String,
    digits: Option<usize>,
    is_mib: bool,
    unit: String,
}

impl Column {
    fn parse(text: &str) -> Column {
        let (name, format) = text.split_once(':').unwrap_or((text, ""));
        let (head, field) = name.split_once('=').unwrap_or((name, ""));
        let field = if field.is_empty() { head.trim().replace(' ', "_") } else { field.trim().to_owned() };
        let at = if field.starts_with('/') { field } else { format!("/{field}") };
        let is_mib = format.starts_with('M');
        let format = format.trim_start_matches('M');
        let (digits, unit) = format.split_at(format.find(|c: char| !c.is_ascii_digit()).unwrap_or(format.len()));
        Column {
            head: head.trim().to_owned(),
            at,
            digits: digits.parse().ok(),
            is_mib,
            unit: unit.trim_end().to_owned(),
        }
    }

    fn number(&self, value: f64) -> String {
        let value = if self.is_mib { value / f64::from(1 << 20) } else { value };
        match self.digits {
            _ if !value.is_finite() => "-".into(),
            Some(digits) => format!("{value:.digits$}{}", self.unit),
            None if value.fract() == 0.0 => format!("{value}{}", self.unit),
            None => format!("{}{}", digits(value), self.unit),
        }
    }

    /// Its cell in a row.
    pub fn cell(&self, row: &Value) -> String {
        match row.pointer(&self.at) {
            Some(Value::String(text)) => text.clone(),
            Some(Value::Bool(is)) => if *is { "yes" } else { "no" }.into(),
            Some(Value::Number(number)) => self.number(number.as_f64().unwrap_or(f64::NAN)),
            Some(Value::Array(rounds)) => {
                let spread = Spread::of(rounds.iter().filter_map(Value::as_f64));
                let range =
                    if rounds.len() > 1 { format!(" +-{:.0} %", spread.half_range_percent()) } else { String::new() };
                self.number(spread.median) + &range
            }
            Some(Value::Object(spread)) => {
                let [median, low, high] =
                    ["median", "low", "high"].map(|field| spread.get(field).and_then(Value::as_f64));
                let range = low.zip(high).filter(|(low, high)| low != high);
                let range = range.map(|(low, high)| format!(" ({}-{})", self.number(low), self.number(high)));
                median.map_or("-".into(), |median| self.number(median)) + &range.unwrap_or_default()
            }
            _ => "-".into(),
        }
    }
}

/// A number with as many digits as it deserves.
pub fn digits(value: f64) -> String {
    match value.abs() {
        size if size >= 100.0 => format!("{value:.0}"),
        size if size >= 10.0 => format!("{value:.1}"),
        _ => format!("{value:.2}"),
    }
}

/// The columns that a line of text names.
pub fn columns(text: &str) -> Vec<Column> {
    text.split('|').map(Column::parse).collect()
}

/// Prints rows as a table under a title, to standard output, or to standard error where JSON goes there; nothing without
/// rows.
pub fn print(title: &str, columns: &str, rows: &[Value]) {
    if rows.is_empty() {
        return;
    }
    let text = format!("\n{title}\n{}", lines(&self::columns(columns), rows));
    match std::env::args().any(|arg| arg == "--json") {
        true => eprint!("{text}"),
        false => print!("{text}"),
    }
}

fn lines(columns: &[Column], rows: &[Value]) -> String {
    let cells: Vec<Vec<String>> =
        columns.iter().map(|column| rows.iter().map(|row| column.cell(row)).collect()).collect();
    let mut text = String::new();
    for line in 0..=rows.len() {
        let mut end = String::new();
        for (column, cells) in columns.iter().zip(&cells) {
            let width = cells.iter().chain([&column.head]).map(|cell| cell.chars().count()).max().unwrap_or(0);
            let cell = if line == 0 { &column.head } else { &cells[line - 1] };
            let is_text = rows.iter().any(|row| row.pointer(&column.at).is_some_and(Value::is_string));
            end += &if is_text { format!("{cell:width$}  ") } else { format!("{cell:>width$}  ") };
        }
        text += end.trim_end();
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn columns_take_their_fields_and_formats_from_one_line() {
        let columns: Vec<Column> = "name|held=held_bytes:M1|us per page:2|share:1 %|get=/figures/get:1"
            .split('|')
            .map(Column::parse)
            .collect();
        let rows = [
            json!({ "name": "a", "held_bytes": 3 << 20, "us_per_page": { "median": 2.0, "low": 1.0, "high": 3.5 }, "share": -0.5 }),
            json!({ "name": "bcd", "figures": { "get": [10.0, 12.0, 11.0] } }),
        ];
        let expected = "name  held       us per page   share         get\n\
                        a      3.0  2.00 (1.00-3.50)  -0.5 %           -\n\
                        bcd      -                 -       -  11.0 +-9 %\n";
        assert_eq!(lines(&columns, &rows), expected);
    }
}
