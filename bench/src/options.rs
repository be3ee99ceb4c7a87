//! What the benches of indexes and stores have in common: options and sizes.

use clap::{Args, Parser, ValueEnum};
use std::process::ExitCode;

/// What a rate is taken by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Clock {
    /// Time on the wall: for a machine of one's own.
    Wall,
    /// Time on a processor: for a machine that others use meanwhile.
    Cpu,
}

/// A number of things of which one at least is wanted.
fn positive(text: &str) -> Result<usize, String> {
    text.parse().ok().filter(|number| *number > 0).ok_or_else(|| "a whole number, 1 at least".to_owned())
}

/// Options that mean the same wherever they stand.
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
    /// Rates by time on the wall or by time on a processor.
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
    /// Keys, where nothing else is said: `full` of them with --full.
    pub fn keys(&self, full: usize) -> usize {
        self.keys.unwrap_or(if self.quick {
            200_000
        } else if self.full {
            full
        } else {
            1_000_000
        })
    }

    /// Rounds, where nothing else is said.
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

/// Answers `--help`, and options and words that a bench does not know, before it measures anything: `None` if all are known.
///
/// `flags` stand alone, `valued` take the next word, `words` are parts of the bench.
pub fn refuse(usage: &str, args: &[String], flags: &[&str], valued: &[&str], words: &[&str]) -> Option<ExitCode> {
    if args.iter().any(|arg| arg == "--help" || arg == "-h") {
        println!("{usage}");
        return Some(ExitCode::SUCCESS);
    }
    let mut rest = args.iter().map(String::as_str);
    while let Some(arg) = rest.next() {
        if valued.contains(&arg) {
            if rest.next().is_none() {
                eprintln!("{arg} wants a value\n{usage}");
                return Some(ExitCode::from(2));
            }
        } else if !flags.contains(&arg) && !words.contains(&arg) {
            eprintln!("{arg}: not known here\n{usage}");
            return Some(ExitCode::from(2));
        }
    }
    None
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
    fn nothing_is_measured_of_nothing() {
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
