//! What is said of a client's memory that is not managed: reasons with more than a little.

use crate::output::clean;
use crate::units::show_size;
use pagefold_daemon::status::{Client, FILE_PAGES, UnmanagedMemory};

/// Less is not worth a word.
const MUCH: u64 = 1 << 20;

/// Each reason with its size, the largest first; a reason alone where the daemon may not look. Pages that are a file's own
/// are shared by the kernel, and not named.
pub fn reasons(client: &Client) -> Vec<String> {
    let is_shown = |memory: &&UnmanagedMemory| match memory.bytes {
        0 => true,
        bytes => bytes >= MUCH && memory.reason != FILE_PAGES,
    };
    let say = |memory: &UnmanagedMemory| match memory.bytes {
        0 => clean(&memory.reason),
        bytes => format!("{} {}", show_size(bytes), clean(&memory.reason)),
    };
    client.unmanaged.iter().filter(is_shown).map(say).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn much_memory_is_named_and_memory_that_is_not_seen() {
        let memory = |reason: &str, bytes| UnmanagedMemory { reason: reason.into(), bytes };
        let of = |unmanaged| reasons(&Client { unmanaged, ..Client::default() });
        let list = vec![
            memory("shared memory", 9 << 20),
            memory("locked (mlock)", 1 << 20),
            memory("little", 4096),
            memory(FILE_PAGES, 9 << 20),
        ];
        assert_eq!(of(list), ["9.00 MiB shared memory", "1.00 MiB locked (mlock)"]);
        assert_eq!(of(vec![memory("unknown: no right", 0)]), ["unknown: no right"]);
        assert!(of(Vec::new()).is_empty());
    }
}
