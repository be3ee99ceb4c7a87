//! containerd's filters: `labels."containerd.io/snapshot.ref"==sha256:…,parent=="…"`.
//!
//! containerd itself asks a snapshotter with one filter only, after a Prepare was answered with ALREADY_EXISTS; clients'
//! filters are applied by containerd. Regular expressions (`~=`) are refused.

use crate::database::{Snapshot, SnapshotKind};
use crate::error::{Error, Result};

/// What one selector compares.
#[derive(Debug, PartialEq, Eq)]
enum Test {
    Present,
    Equal(String),
    Different(String),
}

/// Selectors, all of which must match.
#[derive(Debug, PartialEq, Eq)]
struct Filter(Vec<(Vec<String>, Test)>);

/// Filters, any of which must match; without any, all snapshots do.
#[derive(Debug, PartialEq, Eq)]
pub struct Filters(Vec<Filter>);

impl Filters {
    /// Reads filters.
    ///
    /// # Errors
    /// One that breaks the syntax, or has a regular expression.
    pub fn parse(texts: &[String]) -> Result<Self> {
        texts.iter().map(|text| Filter::parse(text)).collect::<Result<_>>().map(Self)
    }

    /// Returns true if `snapshot` is one of those that are asked for.
    pub fn match_snapshot(&self, snapshot: &Snapshot) -> bool {
        self.0.is_empty() || self.0.iter().any(|filter| filter.matches(snapshot))
    }
}

impl Filter {
    fn parse(text: &str) -> Result<Self> {
        let mut parser = Parser { text, rest: text };
        let mut selectors = Vec::new();
        while !parser.rest.is_empty() {
            if !selectors.is_empty() {
                parser.expect(',')?;
            }
            selectors.push(parser.selector()?);
        }
        Ok(Self(selectors))
    }

    fn matches(&self, snapshot: &Snapshot) -> bool {
        self.0.iter().all(|(path, test)| {
            let value = field(snapshot, path);
            match test {
                Test::Present => value.is_some(),
                Test::Equal(wanted) => value == Some(wanted),
                Test::Different(wanted) => value != Some(wanted),
            }
        })
    }
}

/// A snapshot's field, if it has one that is not empty.
fn field<'a>(snapshot: &'a Snapshot, path: &[String]) -> Option<&'a str> {
    let names: Vec<&str> = path.iter().map(String::as_str).collect();
    match *names {
        ["kind"] => Some(match snapshot.kind {
            SnapshotKind::View => "view",
            SnapshotKind::Active => "active",
            SnapshotKind::Committed => "committed",
        }),
        ["name"] => Some(&snapshot.name),
        ["parent"] => Some(&snapshot.parent),
        ["labels", ref label @ ..] => snapshot.labels.get(&label.join(".")).map(String::as_str),
        _ => None,
    }
}

struct Parser<'a> {
    text: &'a str,
    rest: &'a str,
}

impl Parser<'_> {
    fn wrong(&self, what: &str) -> Error {
        Error::Invalid(format!("filter {:?}: {what} at byte {}", self.text, self.text.len() - self.rest.len()))
    }

    fn expect(&mut self, sign: char) -> Result<()> {
        self.rest = self.rest.strip_prefix(sign).ok_or_else(|| self.wrong(&format!("{sign:?} is missing")))?;
        Ok(())
    }

    fn selector(&mut self) -> Result<(Vec<String>, Test)> {
        let mut path = vec![self.field()?];
        while let Some(rest) = self.rest.strip_prefix('.') {
            self.rest = rest;
            path.push(self.field()?);
        }
        for (sign, test) in [("==", Test::Equal as fn(String) -> Test), ("!=", Test::Different)] {
            if let Some(rest) = self.rest.strip_prefix(sign) {
                self.rest = rest;
                return Ok((path, test(self.value()?)));
            }
        }
        if self.rest.starts_with("~=") {
            return Err(self.wrong("regular expressions are not supported"));
        }
        Ok((path, Test::Present))
    }

    fn take(&mut self, is_part: impl Fn(char) -> bool) -> String {
        let end = self.rest.find(|sign| !is_part(sign)).unwrap_or(self.rest.len());
        let (taken, rest) = self.rest.split_at(end);
        self.rest = rest;
        taken.to_string()
    }

    fn field(&mut self) -> Result<String> {
        if self.rest.starts_with('"') {
            return self.quoted();
        }
        let name = self.take(|sign| sign.is_ascii_alphanumeric() || sign == '_');
        if name.is_empty() { Err(self.wrong("a field is missing")) } else { Ok(name) }
    }

    fn value(&mut self) -> Result<String> {
        if self.rest.starts_with('"') {
            return self.quoted();
        }
        let value = self.take(|sign| !sign.is_whitespace() && sign != ',');
        if value.is_empty() { Err(self.wrong("a value is missing")) } else { Ok(value) }
    }

    /// A string as Go quotes it.
    fn quoted(&mut self) -> Result<String> {
        let mut value = Vec::new();
        let mut signs = self.rest[1..].char_indices();
        while let Some((at, sign)) = signs.next() {
            match sign {
                '"' => {
                    self.rest = &self.rest[at + 2..];
                    return String::from_utf8(value).map_err(|_| self.wrong("a string that is not UTF-8 ends"));
                }
                '\\' => {
                    let Some((_, escape)) = signs.next() else { break };
                    let mut number = |digits: usize, radix| {
                        let text: String = signs.by_ref().take(digits).map(|(_, sign)| sign).collect();
                        u32::from_str_radix(&text, radix).ok().filter(|_| text.len() == digits)
                    };
                    let plain = |sign: u8| Some(vec![sign]);
                    let unicode =
                        |code: Option<u32>| code.and_then(char::from_u32).map(|sign| sign.to_string().into_bytes());
                    let bytes = match escape {
                        'a' => plain(7),
                        'b' => plain(8),
                        'f' => plain(12),
                        'n' => plain(b'\n'),
                        'r' => plain(b'\r'),
                        't' => plain(b'\t'),
                        'v' => plain(11),
                        '\\' | '"' => plain(escape as u8),
                        'x' => number(2, 16).map(|byte| vec![byte as u8]),
                        'u' => unicode(number(4, 16)),
                        'U' => unicode(number(8, 16)),
                        _ => None,
                    };
                    value.extend(bytes.ok_or_else(|| self.wrong("a string has an unknown escape"))?);
                }
                other => value.extend(other.to_string().as_bytes()),
            }
        }
        Err(self.wrong("a string has no end"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    fn snapshot() -> Snapshot {
        Snapshot {
            id: 1,
            name: "default/2/sha256:aa".into(),
            parent: "default/1/sha256:\u{e4}\"b".into(),
            kind: SnapshotKind::Committed,
            created: (0, 0),
            updated: (0, 0),
            labels: BTreeMap::from([("containerd.io/snapshot.ref".into(), "sha256:aa".into())]),
            metacopy: false,
            digest: None,
        }
    }

    fn matches(text: &str) -> bool {
        Filters::parse(&[text.to_string()]).unwrap().match_snapshot(&snapshot())
    }

    #[test]
    fn the_filter_that_containerd_asks_with() {
        let filter =
            |target: &str, parent: &str| format!(r#"labels."containerd.io/snapshot.ref"=={target},parent=="{parent}""#);
        let parent = r#"default/1/sha256:\u00e4\"b"#;
        assert!(matches(&filter("sha256:aa", parent)));
        assert!(!matches(&filter("sha256:ab", parent)) && !matches(&filter("sha256:aa", "")));
    }

    #[test]
    fn all_else_that_the_grammar_has() {
        assert!(matches("kind==committed") && !matches("kind==active") && matches("kind!=view"));
        assert!(matches(r#"labels."containerd.io/snapshot.ref""#) && !matches("labels.other") && !matches("nothing"));
        assert!(matches("") && matches("name==default/2/sha256:aa,parent"));
        let any = ["kind==view".to_string(), "kind==committed".to_string()];
        assert!(Filters::parse(&any).unwrap().match_snapshot(&snapshot()));
        assert!(Filters::parse(&[]).unwrap().match_snapshot(&snapshot()));
    }

    #[test]
    fn what_breaks_the_grammar_is_refused() {
        for bad in
            ["name==", "==x", "name~=x", "name==\"x", "name==\"\\q\"", "name==\"\\x0\"", "kind==a b", ",", "a,,b"]
        {
            let error = Filters::parse(&[bad.to_string()]).unwrap_err();
            assert!(matches!(&error, Error::Invalid(text) if text.starts_with("filter ")), "{bad}: {error}");
        }
    }
}
