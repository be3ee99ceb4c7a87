//! The book holds together: every page is in its summary, every link leads somewhere, and the reference names every
//! schema and every metric.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

fn root() -> &'static str {
    env!("CARGO_MANIFEST_DIR")
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The pages of the book, and the pages beside it that link into it.
fn pages() -> Vec<PathBuf> {
    let mut pages = Vec::new();
    for dir in ["docs", "docs/design", "docs/decisions", "."] {
        let dir = Path::new(root()).join(dir);
        let entries = std::fs::read_dir(&dir).unwrap_or_else(|error| panic!("{}: {error}", dir.display()));
        pages.extend(
            entries.flatten().map(|entry| entry.path()).filter(|path| path.extension().is_some_and(|e| e == "md")),
        );
    }
    pages.sort();
    assert!(pages.len() > 15, "{pages:?}");
    pages
}

/// The text without code, in which brackets are not links.
fn without_code(text: &str) -> String {
    let mut plain = String::new();
    for (number, part) in text.split("```").enumerate() {
        if number % 2 == 0 {
            plain.extend(part.split('`').step_by(2));
        }
    }
    plain
}

/// The targets of the links in a page.
fn links(text: &str) -> Vec<String> {
    let plain = without_code(text);
    let targets = plain.split("](").skip(1).filter_map(|rest| rest.split_once(')'));
    targets.map(|(target, _)| target.split_whitespace().next().unwrap_or_default().to_owned()).collect()
}

/// How a heading is named in links.
fn anchor(heading: &str) -> String {
    let kept = heading.to_lowercase();
    kept.chars().filter(|c| c.is_alphanumeric() || " -_".contains(*c)).collect::<String>().trim().replace(' ', "-")
}

#[test]
fn every_link_leads_somewhere() {
    let mut wrong = Vec::new();
    for page in pages() {
        for link in links(&read(&page)) {
            if link.starts_with("http://") || link.starts_with("https://") {
                continue;
            }
            let (file, part) = link.split_once('#').unwrap_or((&link, ""));
            let target = if file.is_empty() { page.clone() } else { page.parent().expect("a directory").join(file) };
            if !target.exists() {
                wrong.push(format!("{}: {link}", page.display()));
            } else if !part.is_empty() {
                let text = read(&target);
                let headings =
                    text.lines().filter(|line| line.starts_with('#')).map(|line| anchor(line.trim_matches('#')));
                if !headings.into_iter().any(|heading| heading == part) {
                    wrong.push(format!("{}: {link}: no such heading", page.display()));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "links that lead nowhere:\n{}", wrong.join("\n"));
}

#[test]
fn every_page_is_in_the_summary() {
    let docs = Path::new(root()).join("docs");
    let listed: BTreeSet<PathBuf> = links(&read(&docs.join("SUMMARY.md"))).iter().map(|link| docs.join(link)).collect();
    let there: BTreeSet<PathBuf> = pages()
        .into_iter()
        .filter(|page| page.starts_with(&docs) && page.file_name().is_some_and(|name| name != "SUMMARY.md"))
        .collect();
    assert_eq!(listed, there, "docs/SUMMARY.md on the left, what is there on the right");
    let book = read(&docs.join("book.toml"));
    assert!(book.contains("src = \".\""), "the pages lie beside docs/book.toml");
}

#[test]
fn the_testing_page_counts_what_is_there() {
    match std::process::Command::new(Path::new(root()).join("tests/count")).arg("--check").output() {
        Ok(output) => assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr)),
        Err(error) => println!("SKIPPED: tests/count needs python3: {error}"),
    }
}

#[test]
fn the_reference_names_every_schema() {
    let reference = read(&Path::new(root()).join("docs/reference.md"));
    for entry in std::fs::read_dir(Path::new(root()).join("docs/schemas")).expect("schemas").flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        assert!(reference.contains(&format!("(schemas/{name})")), "docs/reference.md does not tell of {name}");
    }
}

#[test]
fn the_reference_names_every_metric() {
    let reference = read(&Path::new(root()).join("docs/reference.md"));
    let mut text = String::new();
    pagefold_disk::metrics::render(&[pagefold_disk::Status::default()], &mut text);
    let mut status = pagefold_daemon::status::Status::default();
    status.cold.domains.push(Default::default());
    status.cold.clients.push(Default::default());
    text += &pagefold_daemon::metrics::render(&status);
    let families: Vec<&str> = text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next()).collect();
    assert!(families.len() > 30, "{families:?}");
    let missing: Vec<&&str> =
        families.iter().filter(|family| !reference.contains(&format!("| `{family}` |"))).collect();
    assert!(missing.is_empty(), "docs/reference.md does not tell of {missing:?}");
}

/// The text of all Rust files below a directory.
fn rust_text(dir: &Path) -> String {
    let entries = std::fs::read_dir(dir).unwrap_or_else(|error| panic!("{}: {error}", dir.display()));
    let paths = entries.flatten().map(|entry| entry.path());
    paths
        .map(|path| match path.extension() {
            _ if path.is_dir() => rust_text(&path),
            Some(extension) if extension == "rs" => read(&path),
            _ => String::new(),
        })
        .collect()
}

/// Names of tests (three underscores or more; an ellipsis cuts the end off) and paths of tests.
#[test]
fn the_specification_cites_existing_tests() {
    let root = Path::new(root());
    let sources: String = ["tests", "crates", "src", "bench"].iter().map(|dir| rust_text(&root.join(dir))).collect();
    let specification = read(&root.join("SPECIFICATION.md"));
    let mut missing = Vec::new();
    for span in specification.split('`').skip(1).step_by(2) {
        let is_word = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_' || c == '…';
        let exists = if !span.chars().all(is_word) || span.matches('_').count() < 3 {
            !span.contains("tests/") || span.contains(['*', ' ']) || root.join(span).exists()
        } else if let Some(start) = span.strip_suffix('…') {
            sources.contains(&format!("fn {start}"))
        } else {
            // A function, or a row of a macro that makes functions.
            sources.contains(&format!("fn {span}(")) || sources.contains(&format!("{span}: \""))
        };
        if !exists {
            missing.push(span);
        }
    }
    assert!(missing.is_empty(), "SPECIFICATION.md cites what is not there: {missing:?}");
}

/// Numbers of the status that are not a metric, and why.
const NOT_METRICS: &[(&str, &str)] = &[
    ("pid", "a label, or the identity of a process"),
    ("uid", "a label"),
    ("stop_ns_max", "the longest ever: a collector has the times in all"),
    ("pages_total", "progress of one `verify`, which its caller watches"),
    ("clients", "live clients: a series for each counter and process would flood a collector; domains have the sums"),
];

/// How a key is named among the metrics: times are in seconds, as collectors want them.
fn metric_of(prefix: &str, key: &str) -> String {
    let prefix = if key.starts_with(prefix) { "" } else { prefix };
    let stem = ["_us_log2", "_us", "_ns", "_s"].iter().find_map(|unit| key.strip_suffix(unit));
    stem.map_or_else(|| format!("pagefold_{prefix}{key}"), |stem| format!("pagefold_{prefix}{stem}_seconds"))
}

#[test]
fn every_counter_of_the_status_is_a_metric_of_the_same_name() {
    let mut status = pagefold_daemon::status::Status::default();
    status.domains.push(Default::default());
    status.cold.domains.push(Default::default());
    let fault_us_log2 = vec![0];
    status.cold.clients.push(pagefold_daemon::cold::ColdClient { fault_us_log2, ..Default::default() });
    let mut text = pagefold_daemon::metrics::render(&status);
    pagefold_disk::metrics::render(&[pagefold_disk::Status::default()], &mut text);
    let families: BTreeSet<&str> =
        text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next()).collect();
    let whole = serde_json::to_value(&status).expect("JSON");
    let disk = serde_json::to_value(pagefold_disk::Status::default()).expect("JSON");
    let mut keys = 0;
    let mut missing = Vec::new();
    for (prefix, object) in [
        ("", &whole),
        ("", &whole["totals"]),
        ("", &whole["domains"][0]),
        ("", &whole["domains"][0]["events"]),
        ("cold_", &whole["cold"]["domains"][0]),
        ("cold_", &whole["cold"]["clients"][0]),
        ("disk_", &disk),
    ] {
        for (key, value) in object.as_object().expect("an object") {
            let is_count = value.is_number() || key.ends_with("_log2");
            if !is_count || NOT_METRICS.iter().any(|(known, _)| known == key) {
                continue;
            }
            keys += 1;
            let metric = metric_of(prefix, key);
            if !families.contains(metric.as_str()) {
                missing.push(metric);
            }
        }
    }
    assert!(keys > 80, "{keys}");
    assert!(missing.is_empty(), "no metrics: {missing:?}");
}
