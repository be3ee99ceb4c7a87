//! What others have written, on its way to a terminal.

/// The text with `?` for control letters, so that nobody writes to the terminal through the name of a process, a file or
/// a domain, nor makes one line look like two.
pub fn clean(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '?' } else { c }).collect()
}
