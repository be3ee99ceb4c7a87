//! The line of /proc/PID/stat.

/// Field `number`, from 3 on as in proc_pid_stat(5), of a process or thread; the name before them may hold any bytes.
pub fn field(stat: &[u8], number: usize) -> Option<&str> {
    let name_end = stat.iter().rposition(|byte| *byte == b')')?;
    str::from_utf8(stat.get(name_end + 1..)?).ok()?.split_ascii_whitespace().nth(number.checked_sub(3)?)
}
