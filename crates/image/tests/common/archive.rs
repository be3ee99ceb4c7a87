//! Archives byte by byte, as no archiver writes them.

/// A raw ustar header, with whatever the attack needs.
pub fn header(path: &[u8], kind: u8, size: u64, link: &[u8]) -> Vec<u8> {
    let mut block = vec![0u8; 512];
    block[..path.len()].copy_from_slice(path);
    block[100..108].copy_from_slice(b"0000644\0");
    block[108..116].copy_from_slice(b"0000000\0");
    block[116..124].copy_from_slice(b"0000000\0");
    block[124..136].copy_from_slice(format!("{size:011o}\0").as_bytes());
    block[136..148].copy_from_slice(b"00000000000\0");
    block[156] = kind;
    block[157..157 + link.len()].copy_from_slice(link);
    block[257..265].copy_from_slice(b"ustar\x0000");
    seal(&mut block);
    block
}

pub fn seal(block: &mut [u8]) {
    block[148..156].fill(b' ');
    let sum: u32 = block[..512].iter().map(|&byte| u32::from(byte)).sum();
    block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
}

pub fn padded(bytes: &[u8]) -> Vec<u8> {
    let mut out = bytes.to_vec();
    out.resize(out.len().next_multiple_of(512), 0);
    out
}

pub fn pax(records: &[(&str, &[u8])]) -> Vec<u8> {
    let mut body = Vec::new();
    for (key, value) in records {
        let rest = key.len() + value.len() + 3;
        let mut length = rest + 1;
        while length.to_string().len() + rest > length {
            length += 1;
        }
        body.extend(format!("{length} {key}=").bytes());
        body.extend(*value);
        body.push(b'\n');
    }
    [header(b"pax", b'x', body.len() as u64, b""), padded(&body)].concat()
}

pub fn file(path: &[u8], text: &[u8]) -> Vec<u8> {
    [header(path, b'0', text.len() as u64, b""), padded(text)].concat()
}

/// The mark at the end of an archive.
pub const END: [u8; 1024] = [0; 1024];

pub fn archive(parts: &[Vec<u8>]) -> Vec<u8> {
    [parts.concat(), END.to_vec()].concat()
}
