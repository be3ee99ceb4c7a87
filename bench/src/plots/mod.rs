//! Draws the plots and their page from the newest records of each machine.
//!
//! `bench/plots.toml` names the plots, their contenders and where the values stand; see there.

mod draw;

use crate::published;
use crate::records::{Record, machines, records, short, value};
use crate::stats::Spread;
use draw::{Block, Contender, Frame, Over, Series, Theme};
use serde::Deserialize;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::fs;
use std::path::Path;

/// The page that shows all plots.
const PAGE: &str = "docs/plots.md";
/// The folder of the plots, from that page.
const FOLDER: &str = "images/plots";

/// Fields that a row has.
type Fields = BTreeMap<String, Value>;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Document {
    intro: String,
    plot: Vec<Plot>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Plot {
    /// The name of its files.
    name: String,
    title: String,
    /// What the values are, their unit, and which way is good.
    values: String,
    text: String,
    bench: String,
    #[serde(default)]
    row: Fields,
    /// The JSON pointer of the values, if all contenders and groups have the same.
    at: Option<String>,
    scale: Option<f64>,
    #[serde(default = "one_group")]
    groups: Vec<Group>,
    contenders: Vec<Contestant>,
    /// Lines over this, not bars.
    over: Option<Over>,
    /// It is new: the page has it as soon as a record has.
    #[serde(default)]
    pending: bool,
}

/// A block of bars, or a panel of lines.
#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Group {
    #[serde(default)]
    label: String,
    #[serde(default)]
    row: Fields,
    at: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Contestant {
    label: String,
    colour: Contender,
    #[serde(default)]
    row: Fields,
    at: Option<String>,
}

fn one_group() -> Vec<Group> {
    vec![Group::default()]
}

impl Plot {
    /// The values of a contender in a group, from one record.
    fn points(&self, rows: &[Value], group: &Group, contestant: &Contestant) -> Option<Vec<(f64, Spread)>> {
        let fields = [&self.row, &group.row, &contestant.row].into_iter().flatten();
        let wanted: Fields = fields.map(|(field, value)| (field.clone(), value.clone())).collect();
        let at = [&contestant.at, &group.at, &self.at].into_iter().flatten().next()?;
        let scale = self.scale.unwrap_or(1.0);
        let Some(over) = &self.over else { return Some(vec![(0.0, value(rows, &wanted, at, scale)?)]) };
        let fitting = rows.iter().filter(|row| published::fits(row, &wanted));
        let mut points: Vec<(f64, Spread)> = match &over.field {
            Some(field) => {
                fitting.filter_map(|row| Some((row[field].as_f64()?, published::spread(row.pointer(at)?)?))).collect()
            }
            None => {
                let pairs = fitting.filter_map(|row| row.pointer(at)?.as_array()).next()?;
                pairs.iter().filter_map(|pair| Some((pair[0].as_f64()?, published::spread(&pair[1])?))).collect()
            }
        };
        points.retain(|(x, _)| !over.logarithmic || *x > 0.0);
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
        points.iter_mut().for_each(|(_, value)| *value = value.scaled(scale));
        (points.len() > 1).then_some(points)
    }

    /// All groups of the newest record of a machine that has every value.
    fn measured<'a>(&self, records: &'a [Record], machine: &str) -> Option<(&'a Record, Vec<Block>)> {
        let of = |record: &&Record| record.machine == machine && record.is_of(&self.bench);
        records.iter().filter(of).find_map(|record| {
            let series = |group: &Group, contestant: &Contestant| {
                let points = self.points(&record.rows, group, contestant)?;
                Some(Series { name: contestant.label.clone(), contender: contestant.colour, points })
            };
            let block = |group: &Group| {
                let series = self.contenders.iter().map(|contestant| series(group, contestant));
                Some(Block { head: group.label.clone(), series: series.collect::<Option<_>>()? })
            };
            Some((record, self.groups.iter().map(block).collect::<Option<_>>()?))
        })
    }

    /// Its part of the page, and its pictures by path.
    fn draw(&self, records: &[Record], page: &mut String) -> Result<Vec<(String, String)>, String> {
        let machines = machines(records);
        let measured: Vec<_> = machines.iter().filter_map(|machine| self.measured(records, machine)).collect();
        if measured.is_empty() {
            let missing =
                format!("bench/plots.toml: no record has all values of {:?} of bench {}", self.name, self.bench);
            return if self.pending { Ok(Vec::new()) } else { Err(missing) };
        }
        let name = &self.name;
        let _ = write!(
            page,
            "\n## {}\n\n<picture>\n<source media=\"(prefers-color-scheme: dark)\" srcset=\"{FOLDER}/{name}-dark.svg\">\n\
             <img alt=\"{}: {}\" src=\"{FOLDER}/{name}-light.svg\">\n</picture>\n\n{}\nRecords:",
            self.title, self.title, self.values, self.text
        );
        let (mut blocks, mut foot) = (Vec::new(), Vec::new());
        let is_alone = measured.len() == 1;
        for (record, found) in measured {
            let (machine, file) = (short(&record.machine), &record.name);
            let date = file.get(..10).unwrap_or_default();
            let comma = if foot.is_empty() { "" } else { "," };
            let _ = write!(page, "{comma} [{machine} {}](../bench/record/{}/{file}.json)", &date[5..], record.machine);
            foot.push(format!("{machine}: {}, {date}: {}", record.host(), record.command));
            blocks.extend(found.into_iter().map(|block| {
                let heads = [if is_alone { "" } else { &machine }, &block.head];
                let heads: Vec<&str> = heads.into_iter().filter(|head| !head.is_empty()).collect();
                Block { head: heads.join(", "), ..block }
            }));
        }
        page.push_str(".\n");
        let frame = Frame { title: &self.title, values: &self.values, foot };
        let drawn = |theme: &Theme| {
            let svg = match &self.over {
                None => draw::bars(&frame, &blocks, theme),
                Some(over) => draw::lines(&frame, &blocks, over, theme),
            };
            let svg = svg.map_err(|error| format!("{name}: {error}"))?;
            Ok((format!("docs/{FOLDER}/{name}-{}.svg", theme.name), svg))
        };
        draw::THEMES.iter().map(drawn).collect()
    }
}

/// The page and the pictures as the records in `root` have them, by path.
pub fn draw(root: &Path) -> Result<Vec<(String, String)>, String> {
    let from = "bench/plots.toml";
    let text = fs::read_to_string(root.join(from)).map_err(|error| format!("{from}: {error}"))?;
    let document: Document = toml::from_str(&text).map_err(|error| format!("{from}: {error}"))?;
    let records = records(root)?;
    let (mut page, mut files) = (format!("# Plots\n\n{}", document.intro), Vec::new());
    for plot in &document.plot {
        files.extend(plot.draw(&records, &mut page)?);
    }
    files.push((PAGE.into(), page));
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use std::collections::BTreeSet;

    #[test]
    fn the_plots_show_the_records() {
        let root = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."));
        let drawn = draw(root).unwrap();
        for (path, drawn) in &drawn {
            let is = fs::read_to_string(root.join(path)).unwrap_or_default();
            assert!(is == *drawn, "{path} is not what the records say; run `pagefold bench plots`");
        }
        let folder = format!("docs/{FOLDER}");
        let there = fs::read_dir(root.join(&folder)).unwrap().flatten();
        let there: BTreeSet<_> =
            there.map(|entry| format!("{folder}/{}", entry.file_name().to_string_lossy())).collect();
        let drawn: BTreeSet<_> = drawn.into_iter().map(|(path, _)| path).filter(|path| path != PAGE).collect();
        assert_eq!(there, drawn, "plots that are there, and those that bench/plots.toml names");
    }

    fn plot(more: &str) -> Plot {
        let text = "name = 'n'\ntitle = 't'\nvalues = 'v'\ntext = ''\nbench = 'b'\nat = '/v'\n\
                    contenders = [{ label = 'a', colour = 'pagefold', row = { e = 'a' } }, { label = 'k', colour = 'kernel', row = { e = 'k' } }]\n";
        toml::from_str(&format!("{text}{more}")).unwrap()
    }

    fn record(name: &str, rows: Value) -> Record {
        let rows = rows.as_array().unwrap().clone();
        Record { machine: "m".into(), name: name.into(), rows, command: String::new(), circumstances: Value::Null }
    }

    #[test]
    fn a_plot_takes_the_newest_record_that_has_all_its_values() {
        let records = [
            record("2026-02-02-b", json!([{ "e": "a", "v": 9 }])),
            record("2026-01-01-b", json!([{ "e": "a", "v": [1, 3, 2] }, { "e": "k", "v": 4 }])),
        ];
        let (of, blocks) = plot("").measured(&records, "m").unwrap();
        assert_eq!(of.name, "2026-01-01-b");
        let [_, of_ours] = [0, 1].map(|at| blocks[0].series[at].points[0].1);
        assert_eq!((blocks[0].series[0].points[0].1.high, of_ours.median), (3.0, 4.0));
        let mut page = String::new();
        assert!(plot("").draw(&records[..1], &mut page).is_err(), "a plot without values");
        assert!(plot("pending = true").draw(&records[..1], &mut page).unwrap().is_empty() && page.is_empty());
    }

    #[test]
    fn lines_go_over_rows_or_over_pairs() {
        let of_rows =
            [2, 0, 1].map(|x| [json!({ "e": "a", "x": x, "v": x * 10 }), json!({ "e": "k", "x": x, "v": x })]);
        let records = [
            record("2026-01-01-b", json!(of_rows.concat())),
            record("2026-01-01-b", json!([{ "e": "a", "v": [[1, 2], [2, 4]] }, { "e": "k", "v": [[1, 3], [2, 5]] }])),
        ];
        let xs = |more: &str, record: usize| {
            let (_, blocks) = plot(more).measured(&records[record..=record], "m").unwrap();
            blocks[0].series[0].points.iter().map(|(x, value)| (*x, value.median)).collect::<Vec<_>>()
        };
        assert_eq!(xs("over = { field = 'x', label = '' }\nscale = 2", 0), [(0.0, 0.0), (1.0, 20.0), (2.0, 40.0)]);
        assert_eq!(xs("over = { field = 'x', label = '', logarithmic = true }", 0), [(1.0, 10.0), (2.0, 20.0)]);
        assert_eq!(xs("over = { label = '' }", 1), [(1.0, 2.0), (2.0, 4.0)]);
    }
}
