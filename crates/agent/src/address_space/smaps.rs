//! What the kernel says about the program's mappings: nothing else tells an agent that was not there when the program said
//! it.
//!
//! The list of mappings names no advice, locks or keys; /proc/PID/smaps does, in its line `VmFlags`.

use crate::address_space::maps::POOL_NAME;
use crate::range_attributes::Attributes;
use pagefold_os::Range;
use pagefold_os::fd::Fd;
use pagefold_os::maps::{self, Line};
use pagefold_os::raw::Result;

/// A mapping, and what the program said about it.
#[derive(Debug)]
// The preloaded form asks only what the program said.
#[cfg_attr(feature = "preload", allow(dead_code))]
pub(crate) struct SmapsEntry {
    pub(crate) range: Range,
    /// It is of a pool file.
    pub(crate) is_pool: bool,
    /// It is private memory that can be read and written.
    pub(crate) is_plain: bool,
    /// It is a private mapping of another file that can be read and written.
    pub(crate) is_private_file: bool,
    pub(crate) said: Attributes,
}

/// Calls `f` with each mapping.
///
/// # Errors
/// As reading /proc/thread-self/smaps.
pub(crate) fn for_each(mut f: impl FnMut(SmapsEntry)) -> Result<()> {
    let smaps = Fd::open(c"/proc/thread-self/smaps", libc::O_RDONLY, 0)?;
    let mut buffer = [0u8; 16 << 10];
    let mut mapping = None;
    let mut at = 0;
    maps::for_each(
        &mut buffer,
        |out| smaps.read_at(out, at).inspect(|got| at += *got as u64),
        |line| match line {
            Line::Mapping(map) => {
                let is_pool = map.name.starts_with(POOL_NAME) && !map.shared;
                mapping = Some(SmapsEntry {
                    range: map.range,
                    is_pool,
                    is_plain: map.is_plain_anonymous(),
                    is_private_file: map.is_private_file() && !is_pool,
                    said: Attributes::default(),
                });
            }
            Line::Detail(line) => {
                if let Some(key) = line.strip_prefix(b"ProtectionKey:") {
                    if let Some(mapping) = &mut mapping {
                        mapping.said.keyed = key.trim_ascii() != b"0";
                    }
                } else if let Some(flags) = line.strip_prefix(b"VmFlags:")
                    && let Some(mapping) = mapping.take()
                {
                    // The last line of a mapping.
                    f(SmapsEntry { said: Attributes { keyed: mapping.said.keyed, ..of_flags(flags) }, ..mapping });
                }
            }
        },
    )
}

/// What the line `VmFlags` says.
fn of_flags(flags: &[u8]) -> Attributes {
    let has = |name: &[u8; 2]| flags.split(|byte| *byte == b' ').any(|flag| flag == name);
    Attributes {
        locked: has(b"lo"),
        sealed: has(b"sl"),
        dont_fork: has(b"dc"),
        wipe_on_fork: has(b"wf"),
        huge: has(b"hg"),
        small: has(b"nh"),
        mergeable: has(b"mg"),
        dont_dump: has(b"dd"),
        // Stacks grow; device memory and special mappings are none of ours.
        excluded: has(b"gd") || has(b"io") || has(b"pf") || has(b"mm") || has(b"ht"),
        ..Attributes::default()
    }
}
