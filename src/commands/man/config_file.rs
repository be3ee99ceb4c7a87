//! The page of the configuration file, made from the file that is shipped.

use super::roff::{escaped, paragraphs};
use crate::config::SHIPPED;

/// `pagefold.toml(5)`.
pub(super) fn page() -> String {
    let mut blocks = SHIPPED.split("\n\n").map(Block::of);
    let header = blocks.next().map(|block| block.prose).unwrap_or_default();
    // Its first line is the file's title.
    let description = header.split_once('\n').map_or("", |(_, rest)| rest.trim_start());
    let mut page = format!(
        ".TH PAGEFOLD.TOML 5 \"\" \"pagefold {}\" \"File Formats\"\n\
         .SH NAME\npagefold.toml \\- defaults for the options of pagefold\n\
         .SH DESCRIPTION\n{}.SH \"ALL COMMANDS\"\n",
        env!("CARGO_PKG_VERSION"),
        paragraphs(description)
    );
    for Block { prose, line } in blocks {
        page += &match line {
            Some(line) if line.starts_with('[') => format!(".SH \"{}\"\n", escaped(line)),
            Some(line) => format!(".TP\n\\fB{}\\fR\n", escaped(line)),
            None => ".PP\n".to_owned(),
        };
        page += &paragraphs(&prose);
    }
    page + ".SH \"SEE ALSO\"\n.BR pagefold (1),\n.BR pagefold\\-daemon (1),\n.BR pagefold (7)\n"
}

/// Lines of the file between empty ones: prose, and then a key or the head of a section.
struct Block<'a> {
    prose: String,
    line: Option<&'a str>,
}

impl Block<'_> {
    fn of(text: &str) -> Block<'_> {
        let (mut prose, mut line) = (String::new(), None);
        for text in text.lines() {
            // A key is commented by `#`, prose by `# `.
            match text.strip_prefix('#') {
                Some(rest) if !rest.starts_with(|c: char| c.is_ascii_lowercase()) => {
                    prose += rest.strip_prefix(' ').unwrap_or(rest);
                    prose.push('\n');
                }
                Some(key) => line = Some(key),
                None => line = Some(text),
            }
        }
        Block { prose, line }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_key_stands_below_its_section() {
        let page = page();
        let place = |text: &str| page.find(text).unwrap_or_else(|| panic!("{text} is not in {page}"));
        let [socket, daemon, workers] =
            ["\\fBsocket = ", ".SH \"[daemon]\"", "\\fBworkers = \"auto\"\\fR\nWorker threads"].map(place);
        assert!(place(".SH \"ALL COMMANDS\"") < socket && socket < daemon && daemon < workers);
        assert!(workers < place(".SH \"[park]\"") && place("[disk]") < place("\\fBread_ahead = "));
        let keys = SHIPPED.lines().filter(|line| line.starts_with('#') && line[1..].starts_with(char::is_lowercase));
        assert_eq!(page.matches(".TP\n").count(), keys.count());
        assert!(!page.contains("\n#") && !page.contains("for the options of the command line"));
    }
}
