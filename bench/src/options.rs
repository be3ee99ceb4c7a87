//! Options that several benches have, and how they are parsed.

use crate::process::Failure;
use clap::{Args, Parser, ValueEnum};
use std::process::ExitCode;

/// The clock of a rate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Clock {
    /// Wall-clock time: for a quiet machine.
    Wall,
    /// Processor time: for a busy machine.
    Cpu,
}

/// A number of things, at least one.
fn positive(text: &str) -> Result<usize, String> {
    text.parse().ok().filter(|number| *number > 0).ok_or_else(|| "a whole number, at least 1".to_owned())
}

/// Options of the benches of indexes and stores.
#[derive(Args, Debug)]
pub struct Common {
    /// Keys in the structure.
    #[arg(long, value_name = "N", value_parser = positive)]
    pub keys: Option<usize>,
    /// Threads, as a list: each number is measured.
    #[arg(long, value_name = "N,…", value_delimiter = ',', default_value = "1,2", value_parser = positive)]
    pub threads: Vec<usize>,
    /// Rounds; the median and the spread are shown.
    #[arg(long, value_name = "N", value_parser = positive)]
    pub rounds: Option<usize>,
    /// Rates by wall-clock time or by processor time.
    #[arg(long, value_enum, default_value = "wall")]
    pub clock: Clock,
    /// A minute: 200,000 keys, one round.
    #[arg(long, conflicts_with = "full")]
    pub quick: bool,
    /// The published figures: tens of millions of keys, five rounds.
    #[arg(long)]
    pub full: bool,
    /// JSON instead of text.
    #[arg(long)]
    pub json: bool,
    /// One measurement in this process (used by the driver).
    #[arg(long, hide = true, value_name = "PLAN")]
    pub child: Option<String>,
}

impl Common {
    /// The number of keys; without --keys, `full` with --full.
    pub fn keys(&self, full: usize) -> usize {
        self.keys.unwrap_or(if self.quick {
            200_000
        } else if self.full {
            full
        } else {
            1_000_000
        })
    }

    /// The number of rounds.
    pub fn rounds(&self) -> usize {
        self.rounds.unwrap_or(if self.quick { 1 } else { 5 })
    }
}

/// Parses the options of one bench; on an error or --help, what the program should exit with.
pub fn parse<T: Parser>(name: &str, args: &[String]) -> Result<T, ExitCode> {
    T::try_parse_from(std::iter::once(format!("pagefold bench {name}")).chain(args.iter().cloned())).map_err(|error| {
        let _ = error.print();
        ExitCode::from(if error.use_stderr() { 2 } else { 0 })
    })
}

/// The exit code of a bench; a failure is printed.
pub fn exit_code(name: &str, outcome: Result<(), Failure>) -> ExitCode {
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("pagefold bench {name}: {error}");
            ExitCode::FAILURE
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Parser, Debug)]
    struct Bench {
        #[command(flatten)]
        common: Common,
    }

    #[test]
    fn a_measurement_of_nothing_is_refused() {
        let parsed = |option: &str, value: &str| {
            let args = [option.to_owned(), value.to_owned()];
            parse::<Bench>("kv", &args).map(|bench| bench.common.keys(7))
        };
        for (option, value) in [("--keys", "0"), ("--threads", "1,0"), ("--rounds", "0"), ("--keys", "x")] {
            assert!(parsed(option, value).is_err(), "{option} {value}");
        }
        assert_eq!(parsed("--keys", "5").unwrap(), 5);
    }
}
