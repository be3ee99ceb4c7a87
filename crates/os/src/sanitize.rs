//! Text of other programs, made safe for a terminal.

/// Replaces control characters by `?`. The name of a process, a file or a domain then cannot send commands to the terminal,
/// or make one line look like two.
pub fn clean(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '?' } else { c }).collect()
}
