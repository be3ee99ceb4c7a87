//! The page of a command, made from the same definitions as `--help`.

use super::roff::{escaped, paragraphs};
use clap::{Arg, ArgAction, Command};
use std::path::Path;

/// Where things lie, for the tool's own page.
const FILES: &str = "\
  /etc/pagefold/pagefold.toml
      defaults for options, for all users
  $XDG_CONFIG_HOME/pagefold/pagefold.toml
      the same for one user; in ~/.config where that is not set
  /run/pagefold/
      root's sockets and agent; other users' lie in
      $XDG_RUNTIME_DIR/pagefold/, else in /tmp/pagefold-UID/
  /var/lib/pagefold/images/
      root's image trees; other users' lie in
      ~/.local/share/pagefold/images/";

/// Commands that belong together, beside the members of a group.
const RELATED: &[&[&str]] = &[
    &["run", "env", "daemon", "status"],
    &["status", "top", "verify"],
    &["pause", "resume", "unmerge"],
    &["park", "unpark"],
    &["attach", "detach"],
    &["doctor", "scan", "demo"],
];

/// Writes the page of `command`, which lies below `above`, and those of the commands below it.
pub(super) fn write(command: &Command, above: &[&Command], dir: &Path) -> std::io::Result<()> {
    let path = [above, &[command]].concat();
    let members: Vec<&Command> = command.get_subcommands().filter(|below| !below.is_hide_set()).collect();
    for member in &members {
        write(member, &path, dir)?;
    }
    let man = clap_mangen::Man::new(in_order(command).subcommand_help_heading("COMMANDS"))
        .title(page_name(command).to_uppercase())
        .source(concat!("pagefold ", env!("CARGO_PKG_VERSION")))
        .manual("User Commands");
    let mut page = Vec::new();
    man.render_title(&mut page)?;
    man.render_name_section(&mut page)?;
    page.extend_from_slice(synopsis(command).as_bytes());
    man.render_description_section(&mut page)?;
    man.render_options_section(&mut page)?;
    if !members.is_empty() {
        man.render_subcommands_section(&mut page)?;
    }
    let more = command.get_after_long_help().or_else(|| command.get_after_help());
    let files = above.is_empty().then_some(("FILES", FILES));
    page.extend_from_slice(sections(&more.map(ToString::to_string).unwrap_or_default(), files).as_bytes());
    page.extend_from_slice(see_also(command, above).as_bytes());
    std::fs::write(dir.join(man.get_filename()), page)
}

fn page_name(command: &Command) -> &str {
    command.get_display_name().unwrap_or_else(|| command.get_name())
}

/// The command with its own options before those that all have.
fn in_order(command: &Command) -> Command {
    command.clone().mut_args(|arg| match arg.get_id().as_str() {
        "config" => arg.display_order(901),
        "help" => arg.display_order(902),
        "version" => arg.display_order(903),
        _ if arg.is_global_set() => arg.display_order(900),
        _ => arg,
    })
}

/// How it is called, but for the options that all commands have.
fn synopsis(command: &Command) -> String {
    let name = command.get_bin_name().unwrap_or_else(|| command.get_name());
    let own = |arg: &&Arg| !arg.is_hide_set() && !["help", "version", "config"].contains(&arg.get_id().as_str());
    let (options, places): (Vec<&Arg>, Vec<&Arg>) =
        command.get_arguments().filter(own).partition(|arg| !arg.is_positional());
    let mut words: Vec<String> = options.into_iter().chain(places).map(usage).collect();
    if command.get_subcommands().next().is_some() {
        words.push("\\fICOMMAND\\fR".to_owned());
    }
    format!(".SH SYNOPSIS\n.nh\n.ad l\n\\fB{}\\fR {}\n.ad b\n.hy\n", escaped(name), words.join(" "))
}

/// An option or argument as a synopsis has it: in one line, in brackets if it may be left out.
fn usage(arg: &Arg) -> String {
    let names = arg.get_value_names().unwrap_or_default().join(" ");
    let value = format!("\\fI{}\\fR", escaped(&names).replace(' ', "\\ "));
    let several = arg.get_num_args().is_some_and(|range| range.max_values() > 1);
    let again = if several || matches!(arg.get_action(), ArgAction::Append) { "..." } else { "" };
    let option =
        arg.get_long().map(|long| format!("--{long}")).or_else(|| arg.get_short().map(|short| format!("-{short}")));
    let text = match option {
        None if arg.is_last_set() => format!("\\-\\-\\ {value}{again}"),
        None if arg.is_trailing_var_arg_set() => format!("[\\-\\-]\\ {value}..."),
        None => format!("{value}{again}"),
        Some(option) => {
            let option = format!("\\fB{}\\fR", escaped(&option));
            match arg.get_num_args().map(|range| (range.min_values(), range.max_values())) {
                None | Some((_, 0)) => option,
                Some((0, _)) => format!("{option}[={value}]"),
                Some(_) => format!("{option}\\ {value}"),
            }
        }
    };
    match (arg.is_required_set(), arg.is_positional()) {
        (true, _) => text,
        // The dots of an argument stand for more of it, those of an option for the option once more.
        (false, true) => format!("[{text}]"),
        (false, false) => format!("[{text}]{again}"),
    }
}

/// The pages of the group that it belongs to, of what is near it, and the tool's own.
fn see_also(command: &Command, above: &[&Command]) -> String {
    let [root, ..] = above else {
        return ".SH \"SEE ALSO\"\n.BR pagefold.toml (5),\n.BR pagefold (7)\n".to_owned();
    };
    let mut pages: Vec<String> = above.iter().map(|above| page_name(above).to_owned()).collect();
    let mut add = |page: String| {
        if page != page_name(command) && !pages.contains(&page) {
            pages.push(page);
        }
    };
    match above {
        [_, .., group] => group.get_subcommands().for_each(|member| add(page_name(member).to_owned())),
        _ => {
            let near = RELATED.iter().filter(|group| group.contains(&command.get_name()));
            near.copied().flatten().for_each(|name| add(format!("{}-{name}", page_name(root))));
        }
    }
    let lines: Vec<String> = pages.iter().map(|page| format!(".BR {} (1)", escaped(page))).collect();
    format!(".SH \"SEE ALSO\"\n{}\n", lines.join(",\n"))
}

/// The text after the options as sections, in the usual order: its paragraphs begin with the section's name, or are notes.
fn sections(text: &str, more: Option<(&'static str, &str)>) -> String {
    const ORDER: [&str; 5] = ["EXIT STATUS", "ENVIRONMENT", "FILES", "NOTES", "EXAMPLES"];
    const NAMED: [(&str, &str); 3] =
        [("Examples:", "EXAMPLES"), ("Exit status:", "EXIT STATUS"), ("Environment:", "ENVIRONMENT")];
    const USUAL: &str = "0 on success, 1 on failure, 2 on wrong usage.";
    let mut parts: Vec<(&str, String)> = more.into_iter().map(|(name, body)| (name, body.to_owned())).collect();
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
    parts.sort_by_key(|(name, _)| ORDER.iter().position(|known| known == name));
    let mut page = String::new();
    for (name, body) in parts {
        page += &format!(".SH \"{name}\"\n");
        // A sentence goes on behind its name; the lines of a list stand below it, and stay as they are.
        let body = body.strip_prefix(' ').filter(|rest| !rest.starts_with(' ')).unwrap_or(&body);
        page += &paragraphs(body.trim_matches('\n'));
    }
    page
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn paragraphs_become_sections() {
        let text = "Examples:\n  pagefold -x 'a\\b'\n.dot\n\nA note.\n\nExit status: 3 is odd.\n\nAnother.";
        assert_eq!(
            sections(text, Some(("FILES", "  /a"))),
            ".SH \"EXIT STATUS\"\n3 is odd.\n\
             .SH \"FILES\"\n.nf\n  /a\n.fi\n\
             .SH \"NOTES\"\nA note.\n.PP\nAnother.\n\
             .SH \"EXAMPLES\"\n.nf\n  pagefold \\-x 'a\\eb'\n.fi\n\\&.dot\n"
        );
        assert!(sections("", None).contains("0 on success, 1 on failure, 2 on wrong usage."));
    }

    /// The indent of a section takes seven of eighty columns.
    #[test]
    fn lines_that_stay_lines_fit_a_terminal() {
        let mut root = crate::Cli::command().disable_help_subcommand(true);
        root.build();
        let mut todo = vec![&root];
        while let Some(command) = todo.pop() {
            todo.extend(command.get_subcommands());
            let more = command.get_after_long_help().or_else(|| command.get_after_help());
            let text = format!("{FILES}\n{}", more.map(ToString::to_string).unwrap_or_default());
            for line in text.lines().filter(|line| line.starts_with(' ')) {
                assert!(line.chars().count() <= 73, "{}: {line}", page_name(command));
            }
        }
    }

    #[test]
    fn a_synopsis_says_what_is_wanted() {
        let mut root = crate::Cli::command().disable_help_subcommand(true);
        root.build();
        let of = |path: &[&str]| {
            let found = path.iter().fold(&root, |command, name| command.find_subcommand(name).expect("a command"));
            synopsis(found).lines().find(|line| line.contains("\\fBpagefold")).expect("a line").to_owned()
        };
        assert_eq!(of(&[]), "\\fBpagefold\\fR \\fICOMMAND\\fR");
        let mount = of(&["disk", "mount"]);
        assert!(mount.contains(" [\\fB\\-\\-cache\\-size\\fR\\ \\fISIZE\\fR] "), "{mount}");
        assert!(mount.ends_with(" \\fIDIRECTORY\\fR \\fIMOUNTPOINT\\fR"), "{mount}");
        let build = of(&["image", "build"]);
        assert!(build.contains(" \\fB\\-\\-name\\fR\\ \\fINAME\\fR "), "{build}");
        let exec = of(&["image", "exec"]);
        assert!(exec.contains("[\\fB\\-\\-record\\-profile\\fR[=\\fISECONDS\\fR]]"), "{exec}");
        assert!(exec.ends_with(" [\\-\\-\\ \\fICOMMAND\\fR...]"), "{exec}");
    }
}
