//! The house stays in order: what a reader relies on when walking through the code is checked here, not by reviewers.
//!
//! - Files of production code do not import each other in circles.
//! - A crate depends only on the crates that the picture in DESIGN.md shows below it.
//! - No function is longer than [`FUNCTION_LINES_MAX`] lines.
//! - Comments name their actor: lines that say "who" or "nobody" only become fewer.
//! - A comment is no wider than [`COMMENT_COLUMNS_MAX`]: rustfmt wraps code alone.
//! - A SAFETY note names the check it rests on: it does not say "as above" or "numbers only".
//! - A dependency has a licence that `deny.toml` allows, and comes from the registry.
//!
//! The files are read as text: strings and comments are blanked out first, then brackets and paths are enough.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Lines from the one with `fn` to its closing bracket.
const FUNCTION_LINES_MAX: usize = 100;
/// Functions that may be longer, each with its reason.
const LONG_FUNCTIONS: [(&str, &str); 0] = [];
/// Circles that are an idiom of the language: each is named by its files.
const CIRCLES: [&[&str]; 1] = [
    // An iterator that borrows the store that makes it.
    &["crates/forrest/src/scan.rs", "crates/forrest/src/store.rs"],
];
/// Characters of a line that is a comment, but for examples.
const COMMENT_COLUMNS_MAX: usize = 125;
/// Comment lines with an actor-word. Lower it with every line that is mended; never raise it.
const ACTOR_LINES_MAX: usize = 30;
const ACTOR_WORDS: [&str; 9] = ["who", "whose", "whoever", "whom", "nobody", "somebody", "his", "him", "he"];

/// Beginnings of a SAFETY note that names no check, in lower case.
const EMPTY_NOTES: [&str; 9] = [
    "as above",
    "as before",
    "as in `",
    "see above",
    "the same.",
    "the same;",
    "numbers only",
    "takes numbers",
    "the call takes numbers",
];

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// The files below `directory` with one of `endings`, by path.
fn files(directory: &Path, endings: &[&str], found: &mut Vec<PathBuf>) {
    let Ok(entries) = fs::read_dir(directory) else { return };
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.expect("an entry").path()).collect();
    paths.sort();
    for path in paths {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if path.is_dir() && !name.starts_with('.') && name != "target" {
            files(&path, endings, found);
        } else if endings.iter().any(|ending| name.ends_with(ending)) {
            found.push(path);
        }
    }
}

fn named(path: &Path) -> String {
    path.strip_prefix(root()).unwrap_or(path).display().to_string()
}

/// Source roots of the workspace's crates, by package: the tool, the benchmarks and everything in `crates`.
fn crates() -> Vec<PathBuf> {
    let mut crates = vec![root(), root().join("bench")];
    let mut rest: Vec<PathBuf> =
        fs::read_dir(root().join("crates")).expect("crates").map(|entry| entry.expect("an entry").path()).collect();
    rest.sort();
    crates.append(&mut rest);
    crates
}

/// The text without comments and literals, each byte of which becomes a blank: lines and columns stay.
fn code_of(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut code = bytes.to_vec();
    let mut at = 0;
    while at < bytes.len() {
        let end = match &bytes[at..] {
            [b'/', b'/', ..] => at + text[at..].find('\n').unwrap_or(text.len() - at),
            [b'/', b'*', ..] => end_of_block_comment(bytes, at),
            [b'"', ..] => end_of_string(bytes, at),
            [b'r', b'"' | b'#', ..] if at == 0 || !is_word(bytes[at - 1]) || bytes[at - 1] == b'b' => {
                end_of_raw_string(bytes, at)
            }
            [b'\'', b'\\', ..] => {
                at + 2 + text[at + 2..].bytes().skip(1).position(|byte| byte == b'\'').unwrap_or(0) + 2
            }
            [b'\'', _, b'\'', ..] => at + 3,
            _ => {
                at += 1;
                continue;
            }
        };
        let end = end.clamp(at + 1, bytes.len());
        code[at..end].iter_mut().filter(|byte| **byte != b'\n').for_each(|byte| *byte = b' ');
        at = end;
    }
    String::from_utf8_lossy(&code).into_owned()
}

fn is_word(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'_'
}

fn end_of_block_comment(bytes: &[u8], at: usize) -> usize {
    let mut depth = 0;
    let mut end = at;
    while end < bytes.len() {
        match &bytes[end..] {
            [b'/', b'*', ..] => {
                depth += 1;
                end += 2;
            }
            [b'*', b'/', ..] => {
                depth -= 1;
                end += 2;
                if depth == 0 {
                    break;
                }
            }
            _ => end += 1,
        }
    }
    end
}

fn end_of_string(bytes: &[u8], at: usize) -> usize {
    let mut end = at + 1;
    while end < bytes.len() && bytes[end] != b'"' {
        end += if bytes[end] == b'\\' { 2 } else { 1 };
    }
    end + 1
}

/// The end of a raw string; the byte after `at` where there is none, as in `r#type`.
fn end_of_raw_string(bytes: &[u8], at: usize) -> usize {
    let hashes = bytes[at + 1..].iter().take_while(|byte| **byte == b'#').count();
    if bytes.get(at + 1 + hashes) != Some(&b'"') {
        return at + 1;
    }
    let close: Vec<u8> = std::iter::once(b'"').chain(std::iter::repeat_n(b'#', hashes)).collect();
    let from = at + 2 + hashes;
    bytes[from..]
        .windows(close.len())
        .position(|part| part == close)
        .map_or(bytes.len(), |end| from + end + close.len())
}

/// The code without its test modules.
fn production(code: &str) -> String {
    let mut kept = String::new();
    let mut rest = code;
    while let Some(found) = rest.find("#[cfg(test)]") {
        let (before, after) = rest.split_at(found);
        kept.push_str(before);
        let body = after.find(['{', ';']).unwrap_or(after.len() - 1);
        let end = if after.as_bytes()[body] == b';' { body + 1 } else { closing(after, body) };
        rest = &after[end..];
    }
    kept + rest
}

/// The end of the block that opens at `open`.
fn closing(code: &str, open: usize) -> usize {
    let mut depth = 0usize;
    for (at, byte) in code.bytes().enumerate().skip(open) {
        match byte {
            b'{' => depth += 1,
            b'}' => depth -= 1,
            _ => continue,
        }
        if depth == 0 {
            return at + 1;
        }
    }
    code.len()
}

/// A path of names, from the root of its crate.
type Names = Vec<String>;

/// One file of a crate.
struct Module {
    file: String,
    code: String,
    /// Modules that this file declares in files of their own.
    children: BTreeSet<String>,
    /// What the file names by `pub use`, to where it is defined.
    exports: BTreeMap<String, Names>,
    /// Exports of everything in a module.
    globs: Vec<Names>,
}

/// The modules of a crate by their path; none for a crate without sources.
fn modules_of(package: &Path) -> BTreeMap<Names, Module> {
    let source = package.join("src");
    let mut found = Vec::new();
    files(&source, &[".rs"], &mut found);
    let mut modules = BTreeMap::new();
    for path in found {
        let relative = path.strip_prefix(&source).expect("below the sources").with_extension("");
        let mut names: Names = relative.iter().map(|part| part.to_string_lossy().into_owned()).collect();
        if names.first().is_some_and(|first| first == "bin") || names.last().is_some_and(|last| last == "tests") {
            continue;
        }
        if matches!(names.last().map(String::as_str), Some("mod" | "lib" | "main")) {
            names.pop();
        }
        let code = production(&code_of(&fs::read_to_string(&path).expect("a source file")));
        let children = words(&code)
            .windows(3)
            .filter(|words| words[0].1 == "mod" && words[2].1 == ";")
            .map(|words| words[1].1.to_string())
            .collect();
        let module = Module { file: named(&path), code, children, exports: BTreeMap::new(), globs: Vec::new() };
        modules.insert(names, module);
    }
    let exports: Vec<(Names, Vec<(Names, String)>)> = modules
        .iter()
        .map(|(names, module)| (names.clone(), paths_in(&module.code, names, module, &modules, Wanted::Exports)))
        .collect();
    for (names, exported) in exports {
        let module = modules.get_mut(&names).expect("known");
        for (path, name) in exported {
            if name == "*" {
                module.globs.push(path);
            } else {
                module.exports.insert(name, path);
            }
        }
    }
    modules
}

#[derive(Clone, Copy, PartialEq)]
enum Wanted {
    /// What `pub use` names.
    Exports,
    /// Every other path.
    Imports,
}

/// Words and single signs of the code with their places.
fn words(code: &str) -> Vec<(usize, &str)> {
    let bytes = code.as_bytes();
    let mut words = Vec::new();
    let mut at = 0;
    while at < bytes.len() {
        let end = match bytes[at] {
            byte if is_word(byte) => at + bytes[at..].iter().take_while(|byte| is_word(**byte)).count(),
            b':' if bytes.get(at + 1) == Some(&b':') => at + 2,
            byte if byte.is_ascii_whitespace() || !byte.is_ascii() => {
                at += 1;
                continue;
            }
            _ => at + 1,
        };
        words.push((at, &code[at..end]));
        at = end;
    }
    words
}

/// Paths in `code` to this crate's own modules, made absolute, each with the name that it brings.
fn paths_in(
    code: &str,
    here: &Names,
    module: &Module,
    modules: &BTreeMap<Names, Module>,
    wanted: Wanted,
) -> Vec<(Names, String)> {
    let words = words(code);
    let mut found = Vec::new();
    let mut at = 0;
    while at < words.len() {
        let is_use = words[at].1 == "use";
        let is_public = is_use && at > 0 && (words[at - 1].1 == "pub" || words[at - 1].1 == ")");
        let begins = at == 0 || words[at - 1].1 != "::";
        if is_use {
            let mut parsed = Vec::new();
            let end = use_tree(&words, at + 1, &mut Vec::new(), &mut parsed);
            if (wanted == Wanted::Exports) == is_public {
                let own = parsed.into_iter().filter_map(|(path, name)| Some((absolute(&path, here, module)?, name)));
                found.extend(own);
            }
            at = end.max(at + 1);
        } else if wanted == Wanted::Imports && begins && words.get(at + 1).is_some_and(|word| word.1 == "::") {
            let mut path = vec![words[at].1.to_string()];
            let mut next = at + 1;
            while words.get(next).is_some_and(|word| word.1 == "::")
                && words.get(next + 1).is_some_and(|word| is_word(word.1.as_bytes()[0]))
            {
                path.push(words[next + 1].1.to_string());
                next += 2;
            }
            let name = path.last().cloned().unwrap_or_default();
            // A name in a body that a local `use` or a type shadows is no module: only declared children count.
            let is_own = matches!(path[0].as_str(), "crate" | "super") || module.children.contains(&path[0]);
            if is_own {
                found.extend(absolute(&path, here, module).map(|path| (path, name)));
            }
            at = next;
        } else {
            at += 1;
        }
    }
    found.retain(|(path, _)| !path.is_empty() || modules.contains_key(path));
    found
}

/// Reads one tree of a `use` from word `at` on; returns the place after it.
fn use_tree(words: &[(usize, &str)], mut at: usize, prefix: &mut Names, found: &mut Vec<(Names, String)>) -> usize {
    let depth = prefix.len();
    while let Some((_, word)) = words.get(at) {
        match *word {
            "{" => {
                at += 1;
                while words.get(at).is_some_and(|word| word.1 != "}" && word.1 != ";") {
                    at = use_tree(words, at, prefix, found).max(at + 1);
                    at += usize::from(words.get(at).is_some_and(|word| word.1 == ","));
                }
                prefix.truncate(depth);
                return at + 1;
            }
            "::" => at += 1,
            "*" => {
                found.push((prefix.clone(), "*".to_string()));
                prefix.truncate(depth);
                return at + 1;
            }
            "as" => {
                let name = words.get(at + 1).map_or("", |word| word.1).to_string();
                found.push((prefix.clone(), name));
                prefix.truncate(depth);
                return at + 2;
            }
            name if !is_word(name.as_bytes()[0]) => break,
            name => {
                if name != "self" || prefix.is_empty() {
                    prefix.push(name.to_string());
                }
                at += 1;
            }
        }
    }
    if prefix.len() > depth || depth > 0 {
        found.push((prefix.clone(), prefix.last().cloned().unwrap_or_default()));
    }
    prefix.truncate(depth);
    at
}

/// A path from the root of the crate; `None` if it leads out of it.
fn absolute(path: &[String], here: &Names, module: &Module) -> Option<Names> {
    let mut from = here.clone();
    let mut rest = path;
    match path.first()?.as_str() {
        "crate" => {
            from.clear();
            rest = &path[1..];
        }
        "self" => rest = &path[1..],
        "super" => {
            while rest.first().is_some_and(|name| name == "super") {
                from.pop();
                rest = &rest[1..];
            }
        }
        child if module.children.contains(child) => {}
        _ => return None,
    }
    from.extend(rest.iter().cloned());
    Some(from)
}

/// The module that defines what `path` names, through what others export.
fn defined_in(path: &Names, modules: &BTreeMap<Names, Module>, depth: usize) -> Option<Names> {
    let longest = (0..=path.len()).rev().find(|len| modules.contains_key(&path[..*len]))?;
    let names = path[..longest].to_vec();
    let Some(next) = path.get(longest).filter(|_| depth < 8) else { return Some(names) };
    let module = &modules[&names];
    if let Some(target) = module.exports.get(next) {
        return defined_in(target, modules, depth + 1).or(Some(names));
    }
    let declares = |module: &Module| {
        let words = words(&module.code);
        words.windows(2).any(|pair| {
            matches!(pair[0].1, "fn" | "struct" | "enum" | "trait" | "type" | "const" | "static" | "union" | "mod")
                && pair[1].1 == next
        })
    };
    if !declares(module) {
        for glob in &module.globs {
            if modules.get(glob).is_some_and(&declares) {
                return Some(glob.clone());
            }
        }
    }
    Some(names)
}

/// Which files of a crate import which.
fn imports(modules: &BTreeMap<Names, Module>) -> BTreeMap<&str, BTreeSet<&str>> {
    let mut arrows: BTreeMap<&Names, BTreeSet<&Names>> = BTreeMap::new();
    for (names, module) in modules {
        for (path, _) in paths_in(&module.code, names, module, modules, Wanted::Imports) {
            let Some((target, _)) = defined_in(&path, modules, 0).and_then(|at| modules.get_key_value(&at)) else {
                continue;
            };
            if target != names {
                arrows.entry(names).or_default().insert(target);
            }
        }
    }
    // The head of a folder calls into its files, and they use what it defines: a folder is read as one. So the head imports
    // what the files import that it calls.
    let mut found: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for names in arrows.keys() {
        let (mut seen, mut left) = (BTreeSet::new(), vec![names]);
        while let Some(inside) = left.pop() {
            for target in arrows.get(inside).into_iter().flatten() {
                if !target.starts_with(names) {
                    found.entry(&modules[*names].file).or_default().insert(&modules[*target].file);
                } else if !names.is_empty() && target != names && seen.insert(target) {
                    left.push(target);
                }
            }
        }
    }
    found
}

/// Sets of files that reach each other, each sorted.
fn circles<'a>(arrows: &BTreeMap<&'a str, BTreeSet<&'a str>>) -> Vec<Vec<&'a str>> {
    let reach = |from: &'a str| {
        let mut seen: BTreeSet<&str> = BTreeSet::new();
        let mut left = vec![from];
        while let Some(file) = left.pop() {
            for next in arrows.get(file).into_iter().flatten() {
                if seen.insert(next) {
                    left.push(next);
                }
            }
        }
        seen
    };
    let reached: BTreeMap<&str, BTreeSet<&str>> = arrows.keys().map(|file| (*file, reach(file))).collect();
    let mut found: BTreeSet<Vec<&str>> = BTreeSet::new();
    for (file, seen) in &reached {
        if seen.contains(file) {
            let back = seen.iter().filter(|other| reached.get(*other).is_some_and(|seen| seen.contains(file)));
            found.insert(back.copied().collect());
        }
    }
    found.into_iter().collect()
}

#[test]
fn files_do_not_import_each_other_in_circles() {
    let mut unknown = Vec::new();
    for package in crates() {
        let modules = modules_of(&package);
        let arrows = imports(&modules);
        for circle in circles(&arrows) {
            if CIRCLES.iter().any(|known| circle.iter().all(|file| known.contains(file))) {
                continue;
            }
            let mut lines = vec![format!("{} files import each other:", circle.len())];
            for file in &circle {
                let inside: Vec<&str> = arrows[file].iter().filter(|other| circle.contains(other)).copied().collect();
                lines.push(format!("  {file} -> {}", inside.join(", ")));
            }
            unknown.push(lines.join("\n"));
        }
    }
    assert!(unknown.is_empty(), "{} circles\n{}", unknown.len(), unknown.join("\n"));
}

#[test]
fn crates_depend_on_what_the_picture_shows() {
    let design = fs::read_to_string(root().join("DESIGN.md")).expect("DESIGN.md");
    let mut pictured: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for line in design.lines() {
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        if let [_, name, below, _, _] = cells[..]
            && name.starts_with('`')
        {
            let bare = |name: &str| name.trim().trim_matches('`').to_string();
            let below = below.split(',').map(bare).filter(|name| !name.is_empty() && name != "-").collect();
            pictured.insert(bare(name), below);
        }
    }
    let mut wrong = Vec::new();
    for package in crates() {
        let manifest = fs::read_to_string(package.join("Cargo.toml")).expect("a manifest");
        let short = |name: &str| name.strip_prefix("pagefold-").unwrap_or(name).to_string();
        let known: BTreeSet<String> = crates()
            .iter()
            .map(|package| package.file_name().unwrap_or_default().to_string_lossy().into_owned())
            .collect();
        let (mut name, mut section) = (String::new(), "");
        let mut depends = BTreeSet::new();
        for line in manifest.lines() {
            if line.starts_with('[') {
                section = line;
            }
            let Some(key) = line.split(['.', ' ', '=']).next().filter(|_| line.contains('=')) else { continue };
            if section == "[package]" && key == "name" {
                name = short(line.split('"').nth(1).expect("a name"));
            } else if section == "[dependencies]" && known.contains(&short(key)) {
                depends.insert(short(key));
            }
        }
        match pictured.get(&name) {
            None => wrong.push(format!("{name} is not in DESIGN.md's table of crates")),
            Some(shown) if *shown != depends => {
                wrong.push(format!("{name} depends on {depends:?}, DESIGN.md shows {shown:?}"));
            }
            Some(_) => {}
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn functions_are_short() {
    let mut long = Vec::new();
    for package in crates() {
        for module in modules_of(&package).values() {
            let words = words(&module.code);
            for (index, (at, word)) in words.iter().enumerate() {
                let named = words.get(index + 1).map_or("", |word| word.1);
                if *word != "fn" || !named.bytes().next().is_some_and(is_word) {
                    continue;
                }
                let Some(open) = module.code[*at..].find(['{', ';']).map(|open| at + open) else { continue };
                if module.code.as_bytes()[open] == b';' {
                    continue;
                }
                let lines = module.code[*at..closing(&module.code, open)].lines().count();
                let may = LONG_FUNCTIONS.iter().any(|(name, _)| *name == format!("{}:{named}", module.file));
                if lines > FUNCTION_LINES_MAX && !may {
                    long.push(format!("{}: {named} has {lines} lines", module.file));
                }
            }
        }
    }
    assert!(long.is_empty(), "above {FUNCTION_LINES_MAX} lines:\n{}", long.join("\n"));
}

/// Comment lines of Rust and C with an actor-word, and all comment lines.
fn actor_lines() -> (Vec<String>, usize) {
    let mut found = Vec::new();
    files(&root(), &[".rs", ".c", ".h"], &mut found);
    let mut lines = Vec::new();
    let mut all = 0;
    for path in found.iter().filter(|path| !path.ends_with("unprivileged_tidy.rs")) {
        for (number, line) in fs::read_to_string(path).unwrap_or_default().lines().enumerate() {
            let line = line.trim_start();
            if !["//", "/*", "* "].iter().any(|begin| line.starts_with(begin)) {
                continue;
            }
            all += 1;
            let mut words = line.split(|sign: char| !sign.is_alphanumeric() && sign != '_' && sign != '\'');
            if words.any(|word| ACTOR_WORDS.contains(&word.to_lowercase().as_str())) {
                lines.push(format!("{}:{}: {line}", named(path), number + 1));
            }
        }
    }
    (lines, all)
}

#[test]
fn comments_name_their_actor() {
    let (lines, all) = actor_lines();
    assert!(
        lines.len() <= ACTOR_LINES_MAX,
        "{} of {all} comment lines have an actor-word ({ACTOR_LINES_MAX} were recorded): name the thread, process or caller\n{}",
        lines.len(),
        lines.join("\n")
    );
    println!("{} of {all} comment lines have an actor-word", lines.len());
}

#[test]
fn comments_are_no_wider_than_a_page() {
    let mut found = Vec::new();
    files(&root(), &[".rs"], &mut found);
    let (mut wide, mut all) = (Vec::new(), 0);
    for path in &found {
        let mut is_example = false;
        for (number, line) in fs::read_to_string(path).unwrap_or_default().lines().enumerate() {
            if !line.trim_start().starts_with("//") {
                continue;
            }
            all += 1;
            is_example ^= line.contains("```");
            if !is_example && line.chars().count() > COMMENT_COLUMNS_MAX {
                wide.push(format!("{}:{}", named(path), number + 1));
            }
        }
    }
    assert!(all > 0, "no comment is read");
    assert!(wide.is_empty(), "these comments are wider than {COMMENT_COLUMNS_MAX} characters:\n{}", wide.join("\n"));
}

#[test]
fn safety_notes_name_their_check() {
    let mut found = Vec::new();
    files(&root(), &[".rs"], &mut found);
    let (mut empty, mut all) = (Vec::new(), 0);
    for path in found.iter().filter(|path| !path.ends_with("unprivileged_tidy.rs")) {
        for (number, line) in fs::read_to_string(path).unwrap_or_default().lines().enumerate() {
            let Some((_, note)) = line.split_once("// SAFETY:") else { continue };
            all += 1;
            let note = note.trim().to_lowercase();
            if EMPTY_NOTES.iter().any(|empty| note.starts_with(empty)) {
                empty.push(format!("{}:{}: {}", named(path), number + 1, line.trim()));
            }
        }
    }
    assert!(all > 0, "no SAFETY note is read");
    assert!(empty.is_empty(), "these SAFETY notes name no check:\n{}", empty.join("\n"));
}

/// What `cargo deny --workspace check licenses sources` finds, without that program: it takes minutes to build.
#[test]
fn dependencies_are_those_that_deny_toml_allows() {
    let text = fs::read_to_string(root().join("deny.toml")).expect("rules");
    let rules = toml::de::DeTable::parse(&text).expect("TOML").into_inner();
    let allowed = rules["licenses"].get_ref()["allow"].get_ref().as_array().expect("a list");
    let allowed: BTreeSet<&str> = allowed.iter().map(|name| name.get_ref().as_str().expect("a name")).collect();
    let targets = rules["graph"].get_ref()["targets"].get_ref().as_array().expect("a list");
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["metadata", "--format-version=1", "--locked", "--manifest-path"]).arg(root().join("Cargo.toml"));
    for target in targets {
        cargo.arg("--filter-platform").arg(target.get_ref().as_str().expect("a name"));
    }
    let output = cargo.output().expect("cargo runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let found: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let (mut wrong, mut used) = (Vec::new(), BTreeSet::new());
    for package in found["packages"].as_array().expect("a list") {
        let (name, source) = (&package["name"], package["source"].as_str());
        if source.is_some_and(|source| !source.starts_with("registry+")) {
            wrong.push(format!("{name} comes from {source:?}"));
        }
        let licence = package["license"].as_str().unwrap_or_default();
        let parsed = spdx::Expression::parse_mode(licence, spdx::ParseMode::LAX);
        let is_allowed = parsed.is_ok_and(|expression| {
            expression.evaluate(|wanted| {
                let name = allowed.get(&*wanted.to_string());
                used.extend(name);
                name.is_some()
            })
        });
        if !is_allowed {
            wrong.push(format!("{name} is under {licence:?}"));
        }
    }
    assert!(wrong.is_empty(), "deny.toml allows other dependencies:\n{}", wrong.join("\n"));
    assert_eq!(used, allowed, "deny.toml allows a licence that nothing is under");
}
