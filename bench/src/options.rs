//! Options that several benches have, and how they are parsed.

use crate::process::Failure;
use clap::{Args, Parser};
use std::process::ExitCode;

/// How much a bench measures, and how it prints that.
#[derive(Args, Debug)]
pub struct Extent {
    /// Seconds to minutes: small inputs, one round.
    #[arg(long, conflicts_with = "full")]
    pub quick: bool,
    /// The sizes of the published figures, as far as they fit into this machine.
    #[arg(long)]
    pub full: bool,
    /// JSON instead of tables.
    #[arg(long)]
    pub json: bool,
}

impl Extent {
    /// The number of rounds; without --rounds one with --quick, else five.
    pub fn rounds(&self, asked: Option<usize>) -> usize {
        asked.unwrap_or(if self.quick { 1 } else { 5 })
    }
}

/// The rows of a table that are wanted.
#[derive(Args, Debug)]
pub struct Only {
    /// Rows with this name only, or with names that begin so; may be repeated.
    #[arg(long, value_name = "NAME")]
    only: Vec<String>,
}

impl Only {
    /// Whether the row `name` is wanted; `None` if no row is named.
    pub fn wants(&self, name: &str) -> Option<bool> {
        (!self.only.is_empty()).then(|| self.only.iter().any(|only| name.starts_with(only.as_str())))
    }
}

/// A number of things, at least one.
pub fn positive() -> impl clap::builder::TypedValueParser<Value = usize> {
    clap::builder::RangedU64ValueParser::<usize>::new().range(1..)
}

/// A size, as `512M` or `8G`, in bytes.
pub fn size(text: &str) -> Result<u64, String> {
    let (number, shift) = match text.char_indices().last() {
        Some((at, 'K')) => (&text[..at], 10),
        Some((at, 'M')) => (&text[..at], 20),
        Some((at, 'G')) => (&text[..at], 30),
        _ => (text, 0),
    };
    let bytes = number.parse().ok().filter(|number| *number > 0).and_then(|number: u64| number.checked_mul(1 << shift));
    bytes.ok_or_else(|| "not a size, as 512M or 8G".into())
}

/// Options of the benches of indexes and stores.
#[derive(Args, Debug)]
pub struct Common {
    /// Keys in the structure; without it a million (with --quick 200,000, with --full ten million).
    #[arg(long, value_name = "N", value_parser = positive())]
    pub keys: Option<usize>,
    /// Threads, as a list: each number is measured.
    #[arg(long, value_name = "N,…", value_delimiter = ',', default_value = "1,2", value_parser = positive())]
    pub threads: Vec<usize>,
    /// Rounds; the median and the spread are shown.
    #[arg(long, value_name = "N", value_parser = positive())]
    pub rounds: Option<usize>,
    #[command(flatten)]
    pub extent: Extent,
    /// One measurement in this process (used by the driver).
    #[arg(long, hide = true, value_name = "PLAN")]
    pub child: Option<String>,
}

impl Common {
    /// The number of keys.
    pub fn keys(&self) -> usize {
        self.keys.unwrap_or(if self.extent.quick {
            200_000
        } else if self.extent.full {
            10_000_000
        } else {
            1_000_000
        })
    }

    /// The number of rounds.
    pub fn rounds(&self) -> usize {
        self.extent.rounds(self.rounds)
    }
}

/// Runs one bench with its options; returns what the program should exit with. A failure is printed.
pub fn run<T: Parser>(name: &str, args: &[String], measure: impl FnOnce(T) -> Result<(), Failure>) -> ExitCode {
    let words = std::iter::once(format!("pagefold bench {name}")).chain(args.iter().cloned());
    match T::try_parse_from(words) {
        Ok(args) => measure(args).map_or_else(
            |error| {
                eprintln!("pagefold bench {name}: {error}");
                ExitCode::FAILURE
            },
            |()| ExitCode::SUCCESS,
        ),
        Err(error) => {
            let _ = error.print();
            ExitCode::from(if error.use_stderr() { 2 } else { 0 })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_size_has_a_unit_or_none() {
        assert_eq!([size("8G"), size("512M"), size("4K"), size("7")], [Ok(8 << 30), Ok(512 << 20), Ok(4 << 10), Ok(7)]);
        assert!(["", "G", "0", "0M", "-1", "8GiB", "99999999999G"].iter().all(|text| size(text).is_err()));
    }
}
