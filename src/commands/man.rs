//! `pagefold man`: the manual pages, made from the same definitions as `--help`.

use super::Error;
use clap::{Command, CommandFactory};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Write the manual pages into a directory
#[derive(clap::Args)]
#[command(after_help = "Examples:
  pagefold man ~/.local/share/man/man1
  pagefold man /tmp/man && man -l /tmp/man/pagefold-scan.1")]
pub struct Args {
    /// Directory for the pages; made if it is not there
    dir: PathBuf,
}

/// Writes one page per command, and one for each command of a group.
pub fn run(args: Args) -> Result<ExitCode, Error> {
    let cannot = |error: std::io::Error| format!("man: cannot write into {}: {error}", args.dir.display());
    if args.dir.exists() && !args.dir.is_dir() {
        return Err(format!("man: {} is no directory", args.dir.display()).into());
    }
    std::fs::create_dir_all(&args.dir).map_err(cannot)?;
    let mut command = crate::Cli::command().disable_help_subcommand(true);
    command.build();
    write(&command, &args.dir).map_err(cannot)?;
    Ok(ExitCode::SUCCESS)
}

fn write(command: &Command, dir: &Path) -> std::io::Result<()> {
    for below in command.get_subcommands().filter(|below| !below.is_hide_set()) {
        write(below, dir)?;
    }
    let man = clap_mangen::Man::new(command.clone());
    let mut page = Vec::new();
    man.render_title(&mut page)?;
    man.render_name_section(&mut page)?;
    man.render_synopsis_section(&mut page)?;
    man.render_description_section(&mut page)?;
    man.render_options_section(&mut page)?;
    if command.get_subcommands().any(|below| !below.is_hide_set()) {
        man.render_subcommands_section(&mut page)?;
    }
    let more = command.get_after_long_help().or_else(|| command.get_after_help());
    page.extend_from_slice(sections(&more.map(ToString::to_string).unwrap_or_default()).as_bytes());
    man.render_version_section(&mut page)?;
    std::fs::write(dir.join(man.get_filename()), page)
}

/// The text after the options as sections: its paragraphs begin with the section's name, or are notes. Lines stay
/// lines, for examples and tables would be no more if they were filled.
fn sections(text: &str) -> String {
    const NAMED: [(&str, &str); 3] =
        [("Examples:", "EXAMPLES"), ("Exit status:", "EXIT STATUS"), ("Environment:", "ENVIRONMENT")];
    const USUAL: &str = "0 on success, 1 on failure, 2 on wrong usage.";
    let mut parts: Vec<(&str, String)> = Vec::new();
    for paragraph in text.split("\n\n").filter(|paragraph| !paragraph.trim().is_empty()) {
        let named = NAMED.iter().find_map(|(begin, name)| Some((*name, paragraph.strip_prefix(begin)?)));
        let (name, body) = named.unwrap_or(("NOTES", paragraph));
        match parts.iter_mut().find(|(known, _)| *known == name) {
            Some((_, known)) => *known += &format!("\n\n{body}"),
            None => parts.push((name, body.to_owned())),
        }
    }
    if !parts.iter().any(|(name, _)| *name == "EXIT STATUS") {
        parts.push(("EXIT STATUS", USUAL.to_owned()));
    }
    let mut page = String::new();
    for (name, body) in parts {
        page += &format!(".SH \"{name}\"\n.nf\n");
        // A sentence goes on behind its name; the lines of a list stand below it, and stay as they are.
        let body = body.strip_prefix(' ').unwrap_or(&body);
        for line in body.trim_matches('\n').lines() {
            page += &format!("{}\n", escaped(line.trim_end()));
        }
        page += ".fi\n";
    }
    page
}

/// A line as roff shows it letter by letter.
fn escaped(line: &str) -> String {
    let plain = line.replace('\\', "\\e").replace('-', "\\-").replace('`', "\\(ga").replace('~', "\\(ti");
    // A dot or quote in the first column would be a request.
    if plain.starts_with(['.', '\'']) { format!("\\&{plain}") } else { plain }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paragraphs_become_sections() {
        let page = sections("Examples:\n  pagefold -x 'a\\b'\n.dot\n\nA note.\n\nExit status: 3 is odd.\n\nAnother.");
        assert_eq!(
            page,
            ".SH \"EXAMPLES\"\n.nf\n  pagefold \\-x 'a\\eb'\n\\&.dot\n.fi\n\
             .SH \"NOTES\"\n.nf\nA note.\n\nAnother.\n.fi\n\
             .SH \"EXIT STATUS\"\n.nf\n3 is odd.\n.fi\n"
        );
        assert!(sections("").contains("0 on success, 1 on failure, 2 on wrong usage."));
    }
}
