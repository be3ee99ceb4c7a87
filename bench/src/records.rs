//! The records in `bench/record`, and values of their rows as pages show them.

use crate::published;
use crate::stats::Spread;
use crate::table::digits;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

/// A file in `bench/record`.
pub struct Record {
    /// Processor and kernel.
    pub machine: String,
    /// Date, bench and tag.
    pub name: String,
    /// What was measured.
    pub rows: Vec<Value>,
    /// The command that measured it.
    pub command: String,
    /// Machine, kernel, date.
    pub circumstances: Value,
}

impl Record {
    fn date(&self) -> &str {
        self.circumstances["date"].as_str().unwrap_or_default()
    }

    /// Processor, memory and kernel of the machine.
    pub fn host(&self) -> String {
        let of = &self.circumstances;
        let kib: f64 = of["memory"].as_str().and_then(|text| text.split(' ').next()?.parse().ok()).unwrap_or(f64::NAN);
        let word = |field: &str| of[field].as_str().unwrap_or("unknown");
        let gib = kib / f64::from(1 << 20);
        format!("{}, {} processors, {gib:.0} GiB, Linux {}", word("cpu"), of["cpus"], word("kernel"))
    }

    /// Whether it is of this bench.
    pub fn is_of(&self, bench: &str) -> bool {
        let rest = self.name.get(11..).and_then(|rest| rest.strip_prefix(bench));
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('-'))
    }
}

/// The command of a record; what `--json` printed has its words apart.
fn command(json: &Value) -> String {
    if let Some(command) = json["command"].as_str() {
        return command.to_owned();
    }
    let words = json["arguments"].as_array().into_iter().flatten().filter_map(Value::as_str);
    let words: Vec<&str> = words.filter(|word| *word != "--json").collect();
    format!("pagefold bench {} {}", json["bench"].as_str().unwrap_or_default(), words.join(" "))
}

/// All records below `root`, the newest of each machine first.
pub fn records(root: &Path) -> Result<Vec<Record>, String> {
    let at = root.join("bench/record");
    let list = |dir: &Path| -> Result<Vec<_>, String> {
        let entries = fs::read_dir(dir).map_err(|error| format!("{}: {error}", dir.display()))?;
        Ok(entries.flatten().map(|entry| entry.path()).collect())
    };
    let name = |path: &Path| path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    let mut records = Vec::new();
    for dir in list(&at)?.into_iter().filter(|path| path.is_dir()) {
        for path in list(&dir)?.into_iter().filter(|path| path.extension().is_some_and(|end| end == "json")) {
            let text = fs::read_to_string(&path).map_err(|error| format!("{}: {error}", path.display()))?;
            let json: Value = serde_json::from_str(&text).map_err(|error| format!("{}: {error}", path.display()))?;
            records.push(Record {
                // A kernel's version has dots, so a machine's name is not cut at one.
                machine: dir.file_name().unwrap_or_default().to_string_lossy().into_owned(),
                name: name(&path),
                rows: json["rows"].as_array().cloned().unwrap_or_default(),
                command: command(&json),
                circumstances: json["circumstances"].clone(),
            });
        }
    }
    let age =
        |record: &Record| (record.name.get(..10).map(str::to_owned), record.date().to_owned(), record.name.clone());
    records.sort_by_key(|record| std::cmp::Reverse(age(record)));
    Ok(records)
}

/// The value of a cell over all rows that fit: of one row its own rounds, of several the rows are the rounds.
pub fn value(rows: &[Value], wanted: &BTreeMap<String, Value>, at: &str, scale: f64) -> Option<Spread> {
    let fitting = rows.iter().filter(|row| published::fits(row, wanted));
    let found: Vec<Spread> = fitting.filter_map(|row| published::spread(row.pointer(at)?)).collect();
    let spread = match found.as_slice() {
        [] => return None,
        [one] => *one,
        rounds => Spread::of(rounds.iter().map(|round| round.median)),
    };
    Some(spread.scaled(scale))
}

/// `EPYC`: the word of a machine's name that tells it from the others.
pub fn short(machine: &str) -> String {
    let word = machine.split('-').nth(1).unwrap_or(machine);
    if word == "epyc" {
        return word.to_uppercase();
    }
    word[..1].to_uppercase() + &word[1..]
}

/// The machines of these records, by name.
pub fn machines(records: &[Record]) -> Vec<String> {
    let mut names: Vec<String> = records.iter().map(|record| record.machine.clone()).collect();
    names.sort();
    names.dedup();
    names
}

/// `1,234`, `12.3`: a number as a reader takes it.
pub fn number(value: f64) -> String {
    let text = digits(value);
    if value.abs() < 1000.0 {
        return text;
    }
    let mut grouped = String::new();
    for (index, digit) in text.chars().enumerate() {
        if index > 0 && (text.len() - index).is_multiple_of(3) {
            grouped.push(',');
        }
        grouped.push(digit);
    }
    grouped
}

/// The median, and the extremes where they differ.
pub fn cell(spread: Spread) -> String {
    let median = number(spread.median);
    let (low, high) = (number(spread.low), number(spread.high));
    if low == high { median } else { format!("{median} ({low}–{high})") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn commands_and_numbers_are_as_a_reader_takes_them() {
        let huge = json!({ "bench": "pageone", "arguments": ["--json", "--only", "merge"] });
        assert_eq!(command(&huge), "pagefold bench pageone --only merge");
        assert_eq!(
            (number(1234567.0), number(999.0), number(12.34)),
            ("1,234,567".into(), "999".into(), "12.3".into())
        );
    }
}
