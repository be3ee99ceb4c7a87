//! The runs behind `--full`, which `bench/full.toml` lists.

use serde::Deserialize;

/// A run of a benchmark: its name, the tag of its record, its options.
pub type Run = (String, String, Vec<String>);

fn all() -> Vec<Run> {
    #[derive(Deserialize)]
    struct File {
        runs: Vec<Run>,
    }
    toml::from_str::<File>(include_str!("../full.toml")).expect("a test reads it").runs
}

/// The runs of these benchmarks, in their order.
pub fn runs(benches: &[&str]) -> impl Iterator<Item = Run> {
    all().into_iter().filter(|run| benches.contains(&run.0.as_str()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn every_bench_has_runs_and_no_record_overwrites_another() {
        let all = all();
        let tags: BTreeSet<(&str, &str)> = all.iter().map(|(bench, tag, _)| (&**bench, &**tag)).collect();
        assert_eq!(tags.len(), all.len());
        let benches: BTreeSet<&str> = tags.iter().map(|tag| tag.0).collect();
        assert_eq!(benches, crate::BENCHES.iter().map(|bench| bench.0).collect());
    }
}
