//! Output of all commands: tables, colours for terminals only, and progress with rate and time left.
//!
//! Results go to standard output; progress goes to standard error, and only if that is a terminal.

use crate::units::{show_duration, show_size};
pub use pagefold_os::sanitize::clean;
use std::io::{self, IsTerminal, Write};
use std::time::{Duration, Instant};

/// Writes `text` to standard output; a reader that left early (`| head`) is not an error.
///
/// # Errors
/// As write(2), but never `EPIPE`.
pub fn print(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        other => other.map_err(on_stdout),
    }
}

/// The error of a write to standard output, with the name of where it happened.
pub fn on_stdout(error: io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("standard output: {error}"))
}

/// Prints a line of results to standard output, as [`print()`] does; the function must return a `Result`.
#[macro_export]
macro_rules! say {
    ($($arguments:tt)*) => { $crate::output::print(&format!("{}\n", format_args!($($arguments)*)))? };
}

/// Writes `text` to standard error. That its reader has left is no reason to end, as a failed `eprintln!` would.
pub fn complain(text: &str) {
    let _ = io::stderr().write_all(text.as_bytes());
}

/// Prints a line to standard error, as [`complain`] does, and makes it [`clean`]: errors tell what others have written.
#[macro_export]
macro_rules! note {
    ($($arguments:tt)*) => {
        $crate::output::complain(&($crate::output::clean(&format_args!($($arguments)*).to_string()) + "\n"))
    };
}

/// Writes `value` as indented JSON and a newline to standard output.
///
/// # Errors
/// As [`print()`].
pub fn print_json(value: &impl serde::Serialize) -> io::Result<()> {
    let mut text = serde_json::to_string_pretty(value)?;
    text.push('\n');
    print(&text)
}

/// Text attributes, empty strings when standard output is no terminal, `NO_COLOR` is set or the terminal is dumb.
#[derive(Clone, Copy, Debug)]
pub struct Style {
    on: bool,
}

impl Style {
    /// The style for standard output.
    pub fn stdout() -> Style {
        let no_color = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
        let dumb = std::env::var_os("TERM").is_none_or(|term| term == "dumb");
        Style { on: io::stdout().is_terminal() && !no_color && !dumb }
    }

    /// A style without attributes.
    #[cfg(test)]
    pub const fn plain() -> Style {
        Style { on: false }
    }

    fn wrap(self, code: &str, text: &str) -> String {
        if self.on { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_owned() }
    }

    /// Headings and totals.
    pub fn bold(self, text: &str) -> String {
        self.wrap("1", text)
    }

    /// What works, what is saved.
    pub fn good(self, text: &str) -> String {
        self.wrap("32", text)
    }

    /// What is missing and needed.
    pub fn bad(self, text: &str) -> String {
        self.wrap("31", text)
    }

    /// What deserves a look.
    pub fn warn(self, text: &str) -> String {
        self.wrap("33", text)
    }

    /// Remarks.
    pub fn dim(self, text: &str) -> String {
        self.wrap("2", text)
    }
}

/// Columns of the terminal on standard output; 80 if it is none.
pub fn columns() -> usize {
    if !io::stdout().is_terminal() {
        return 80;
    }
    crossterm::terminal::size().map_or(80, |(columns, _)| usize::from(columns).max(20))
}

/// How a column of a [`Table`] is set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Align {
    /// Words.
    Left,
    /// Numbers.
    Right,
}

/// Rows under a heading, columns as wide as their widest cell, two blanks between.
#[derive(Debug)]
pub struct Table {
    align: Vec<Align>,
    rows: Vec<Vec<String>>,
    style: Style,
}

impl Table {
    /// Starts a table with `heading`; a name that begins with `>` makes a column of numbers.
    pub fn new(style: Style, heading: &[&str]) -> Table {
        let align = heading.iter().map(|name| if name.starts_with('>') { Align::Right } else { Align::Left }).collect();
        let names = heading.iter().map(|name| name.trim_start_matches('>').to_owned()).collect();
        Table { align, rows: vec![names], style }
    }

    /// Adds a row; missing cells are empty. Text is made [`clean`], because it may come from other programs.
    pub fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        self.styled_row(cells.into_iter().map(|cell| clean(&cell)));
    }

    /// Adds a row of our own words, which may have attributes.
    pub fn styled_row(&mut self, cells: impl IntoIterator<Item = String>) {
        self.rows.push(cells.into_iter().take(self.align.len()).collect());
    }

    /// True if there is nothing under the heading.
    pub fn is_empty(&self) -> bool {
        self.rows.len() == 1
    }

    /// The table as text, each line indented by `indent` blanks.
    pub fn render(&self, indent: usize) -> String {
        let width = |column: usize| {
            self.rows.iter().filter_map(|row| row.get(column)).map(|cell| visible_width(cell)).max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..self.align.len()).map(width).collect();
        let mut text = String::new();
        for (index, row) in self.rows.iter().enumerate() {
            let mut line = " ".repeat(indent);
            for (column, cell) in row.iter().enumerate() {
                let blanks = " ".repeat(widths[column] - visible_width(cell));
                if column > 0 {
                    line.push_str("  ");
                }
                match self.align[column] {
                    Align::Left => line.extend([cell.as_str(), blanks.as_str()]),
                    Align::Right => line.extend([blanks.as_str(), cell.as_str()]),
                }
            }
            let line = line.trim_end();
            text.push_str(&if index == 0 { self.style.bold(line) } else { line.to_owned() });
            text.push('\n');
        }
        text
    }
}

/// Letters of `text` that take room: all but escape sequences.
fn visible_width(text: &str) -> usize {
    let mut width = 0;
    let mut escape = false;
    for letter in text.chars() {
        match letter {
            '\x1b' => escape = true,
            'm' if escape => escape = false,
            _ if !escape => width += 1,
            _ => {}
        }
    }
    width
}

/// Shortens `text`, made [`clean`], to `width` letters, marking the cut with `…`.
pub fn shorten(text: &str, width: usize) -> String {
    let clean = clean(text);
    if clean.chars().count() <= width {
        return clean;
    }
    clean.chars().take(width.saturating_sub(1)).chain(['…']).collect()
}

/// A bar of `width` letters that shows `part` of `whole`, in eighths of a letter.
pub fn bar(part: u64, whole: u64, width: usize) -> String {
    const EIGHTHS: [char; 8] = [' ', '▏', '▎', '▍', '▌', '▋', '▊', '▉'];
    if whole == 0 {
        return String::new();
    }
    let eighths = (part.min(whole) as u128 * width as u128 * 8 / u128::from(whole)) as usize;
    let mut text = "█".repeat(eighths / 8);
    if !eighths.is_multiple_of(8) {
        text.push(EIGHTHS[eighths % 8]);
    } else if part > 0 && eighths == 0 {
        text.push('▏');
    }
    text
}

/// One line on standard error that tells how far a long job is; silent in the first
/// second, and altogether if standard error is no terminal.
#[derive(Debug)]
pub struct Progress {
    what: &'static str,
    started: Instant,
    shown: Option<Instant>,
    live: bool,
}

impl Progress {
    /// Starts the clock of the job `what`.
    pub fn new(what: &'static str) -> Progress {
        Progress { what, started: Instant::now(), shown: None, live: io::stderr().is_terminal() }
    }

    /// True if standard error is a terminal.
    pub const fn is_shown(&self) -> bool {
        self.live
    }

    /// Shows that `done` of `total` bytes are done, at most five times a second.
    pub fn update(&mut self, done: u64, total: u64) {
        let elapsed = self.started.elapsed();
        let due = self.shown.is_none_or(|shown| shown.elapsed() >= Duration::from_millis(200));
        if self.live && due && elapsed >= Duration::from_secs(1) {
            complain(&format!("\r\x1b[K{}", progress_line(self.what, done, total, elapsed)));
            self.shown = Some(Instant::now());
        }
    }

    /// Clears the line.
    pub fn finish(&mut self) {
        if self.shown.take().is_some() {
            complain("\r\x1b[K");
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.finish();
    }
}

fn progress_line(what: &str, done: u64, total: u64, elapsed: Duration) -> String {
    let rate = done as f64 / elapsed.as_secs_f64().max(1e-9);
    let left = Duration::try_from_secs_f64(total.saturating_sub(done) as f64 / rate).ok();
    let left = left.map_or("?".into(), show_duration);
    format!("{what}: {} of {}, {}/s, {left} left", show_size(done), show_size(total), show_size(rate as u64))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_as_wide_as_their_widest_cell() {
        let mut table = Table::new(Style::plain(), &["name", ">pages", "note"]);
        table.row(["a".into(), "1".into()]);
        table.row(["long name".into(), "12,345".into(), "x".into()]);
        assert_eq!(table.render(1), " name        pages  note\n a               1\n long name  12,345  x\n");
        assert!(!table.is_empty());
    }

    #[test]
    fn colour_takes_no_room() {
        let style = Style { on: true };
        assert_eq!(visible_width(&style.good("ok")), 2);
        assert_eq!(style.good("ok"), "\x1b[32mok\x1b[0m");
        assert_eq!(Style::plain().bad("no"), "no");
    }

    #[test]
    fn names_cannot_write_to_the_terminal() {
        assert_eq!(shorten("a\x1b[2Jb", 20), "a?[2Jb");
        assert_eq!(clean("a\u{9b}31m\nb\tc\u{7f}é"), "a?31m?b?c?é");
        let mut table = Table::new(Style { on: true }, &["name", ">pages"]);
        table.row(["a\x1b[31mb\n".into(), "1".into()]);
        table.styled_row([Style { on: true }.bold("ours"), "2".into()]);
        assert!(
            table.render(0).ends_with("\na?[31mb?      1\n\x1b[1mours\x1b[0m          2\n"),
            "{:?}",
            table.render(0)
        );
        assert_eq!(shorten("qemu-system-x86_64", 8), "qemu-sy…");
        assert_eq!(shorten("qemu", 4), "qemu");
    }

    #[test]
    fn a_bar_shows_something_for_anything() {
        assert_eq!(bar(0, 10, 4), "");
        assert_eq!(bar(1, 1_000_000, 4), "▏");
        assert_eq!(bar(5, 10, 4), "██");
        assert_eq!(bar(10, 10, 4), "████");
        assert_eq!(bar(11, 10, 4), "████");
        assert_eq!(bar(u64::MAX, u64::MAX, 4), "████");
        assert_eq!(bar(1, 0, 4), "");
    }

    #[test]
    fn progress_tells_rate_and_time_left() {
        assert_eq!(
            progress_line("scan", 1 << 30, 3 << 30, Duration::from_secs(1)),
            "scan: 1.00 GiB of 3.00 GiB, 1.00 GiB/s, 2.0 s left"
        );
        assert_eq!(progress_line("scan", 0, 10, Duration::from_secs(2)), "scan: 0 B of 10 B, 0 B/s, ? left");
    }
}
