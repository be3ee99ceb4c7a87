//! Packets of the agent's protocol and lines of /proc/PID/maps: whatever the other side sends, nothing panics, and what
//! is accepted is what was said.

#![no_main]

use libfuzzer_sys::fuzz_target;
use pagefold_protocol::message::{MAGIC, Packet, VERSION, RefusalReason};
use pagefold_os::Range;
use pagefold_os::maps::{Line, for_each, parse_line};

fuzz_target!(|data: &[u8]| {
    if let Some(packet) = Packet::parse(data) {
        assert_eq!(packet.bytes()[..], *data, "a packet is its bytes");
        assert_eq!((packet.magic, packet.version), (MAGIC, VERSION));
        let _ = RefusalReason::from_number(packet.op);
    }
    if let Some(map) = parse_line(data) {
        assert!(map.range.start <= map.range.end);
        assert!(data.ends_with(map.name));
        let _ = map.is_plain_anonymous();
    }
    // The same comes out however the text is cut into reads; the first two bytes say how.
    let [buffer_len, read_len, text @ ..] = data else { return };
    let (buffer_len, read_len) = (usize::from(*buffer_len) + 1, usize::from(*read_len) + 1);
    let mut rest = text;
    let (mut told, mut details) = (Vec::new(), Vec::new());
    let read = |out: &mut [u8]| {
        let count = read_len.min(out.len()).min(rest.len());
        out[..count].copy_from_slice(&rest[..count]);
        rest = &rest[count..];
        Ok::<usize, ()>(count)
    };
    for_each(&mut vec![0; buffer_len], read, |line| match line {
        Line::Mapping(map) => told.push((map.range, map.inode, map.name.to_vec())),
        Line::Detail(line) => details.push(line.to_vec()),
    })
    .unwrap();
    let mut whole: Vec<&[u8]> = text.split(|byte| *byte == b'\n').collect();
    if whole.last().is_some_and(|line| line.is_empty()) {
        whole.pop();
    }
    // A line that fits the buffer with its newline always comes; one that does not fit never does.
    let fits = |line: &&[u8]| line.len() < buffer_len;
    let (mut mappings, mut expected, mut end, mut is_new) = (Vec::new(), Vec::new(), 0, false);
    for line in whole.iter().copied().filter(fits) {
        let Some(map) = parse_line(line) else {
            expected.extend(is_new.then_some(line));
            continue;
        };
        is_new = map.range.end > end;
        if is_new {
            // What was told before is not told again.
            let range = Range { start: map.range.start.max(end), end: map.range.end };
            mappings.push((range, map.inode, map.name.to_vec()));
            end = map.range.end;
        }
    }
    assert_eq!((told, details), (mappings, expected.into_iter().map(<[u8]>::to_vec).collect()));
});
