//! Encoding and decoding of the NBD protocol. Numbers are big endian; every length is checked before it is used.

/// Starts the server's greeting.
pub const MAGIC: u64 = 0x4e42_444d_4147_4943;
/// Starts every option, and ends the server's greeting.
pub const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
/// Starts every reply to an option.
pub const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
/// Starts every request.
pub const REQUEST_MAGIC: u32 = 0x2560_9513;
/// Starts every reply.
pub const REPLY_MAGIC: u32 = 0x6744_6698;
/// Starts every chunk of a reply.
pub const CHUNK_MAGIC: u32 = 0x668e_33ef;

/// Longest data of a read or write: QEMU's limit, which is announced to every client.
pub const DATA_BYTES_MAX: u32 = 32 << 20;
/// Longest option data: an export name has at most 4096 bytes.
pub const OPTION_BYTES_MAX: u32 = 8192;

/// Server and client both speak fixed newstyle.
pub const FIXED_NEWSTYLE: u16 = 1;
/// No 124 zero bytes after the reply to `EXPORT_NAME`.
pub const NO_ZEROES: u16 = 2;

/// Transmission flags: what an export supports.
pub mod export_flag {
    /// The other flags are valid.
    pub const HAS_FLAGS: u16 = 1 << 0;
    /// Writes are refused.
    pub const READ_ONLY: u16 = 1 << 1;
    /// Flush.
    pub const FLUSH: u16 = 1 << 2;
    /// Force unit access.
    pub const FUA: u16 = 1 << 3;
    /// Trim.
    pub const TRIM: u16 = 1 << 5;
    /// Write zeroes.
    pub const WRITE_ZEROES: u16 = 1 << 6;
    /// A read may be answered as a whole, on request.
    pub const DONT_FRAGMENT: u16 = 1 << 7;
    /// A flush on one connection covers all of them.
    pub const MULTI_CONN: u16 = 1 << 8;
    /// Read ahead on request.
    pub const CACHE: u16 = 1 << 10;
}

/// Options a client may send.
pub mod option {
    /// Choose an export. The server can refuse it only by closing the connection.
    pub const EXPORT_NAME: u32 = 1;
    /// End the negotiation.
    pub const ABORT: u32 = 2;
    /// List all exports.
    pub const LIST: u32 = 3;
    /// Describe an export.
    pub const INFO: u32 = 6;
    /// Describe an export and choose it.
    pub const GO: u32 = 7;
    /// Answer reads in chunks.
    pub const STRUCTURED_REPLY: u32 = 8;
    /// List kinds of metadata.
    pub const LIST_META_CONTEXT: u32 = 9;
    /// Choose kinds of metadata.
    pub const SET_META_CONTEXT: u32 = 10;
}

/// Kinds of replies to options.
pub mod reply {
    /// Done.
    pub const ACK: u32 = 1;
    /// The name of an export.
    pub const SERVER: u32 = 2;
    /// Part of a description.
    pub const INFO: u32 = 3;
    /// A kind of metadata.
    pub const META_CONTEXT: u32 = 4;
    /// The server does not support the option.
    pub const UNSUPPORTED: u32 = (1 << 31) + 1;
    /// The option's data is invalid.
    pub const INVALID: u32 = (1 << 31) + 3;
    /// No such export.
    pub const UNKNOWN: u32 = (1 << 31) + 6;
    /// Too long.
    pub const TOO_BIG: u32 = (1 << 31) + 9;
}

/// Kinds of chunks.
pub mod chunk {
    /// An offset, and data from there on.
    pub const DATA: u16 = 1;
    /// The state of ranges.
    pub const BLOCK_STATUS: u16 = 5;
    /// An error.
    pub const ERROR: u16 = (1 << 15) + 1;
}

/// The number under which `base:allocation` is served.
pub const ALLOCATION_ID: u32 = 1;
/// State of a range: it takes no space.
pub const HOLE: u32 = 1;
/// State of a range: it reads as zeros.
pub const ZERO: u32 = 2;

/// The command of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Command {
    /// Read data.
    Read,
    /// Write data.
    Write,
    /// Close the connection.
    Disconnect,
    /// Make earlier writes durable.
    Flush,
    /// Discard a range.
    Trim,
    /// Read a range ahead.
    Cache,
    /// Make a range zeros.
    WriteZeroes,
    /// Tell which ranges are holes.
    BlockStatus,
    /// Any other command.
    Unknown,
}

/// A request, without its data.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Request {
    /// The command.
    pub command: Command,
    /// Durable before the reply.
    pub fua: bool,
    /// Write zeros without a hole: disk space stays reserved.
    pub no_hole: bool,
    /// Tell the state of one range only.
    pub one: bool,
    /// Identifies the request in its reply.
    pub cookie: u64,
    /// First byte.
    pub offset: u64,
    /// Byte count.
    pub length: u32,
}

/// Size of a request's head.
pub const REQUEST_BYTES: usize = 28;

impl Request {
    /// Decodes a request's head; `None` if the magic is wrong, after which the stream cannot be decoded any further.
    pub fn parse(bytes: &[u8; REQUEST_BYTES]) -> Option<Self> {
        if number(&bytes[..4]) != u64::from(REQUEST_MAGIC) {
            return None;
        }
        let command = match number(&bytes[6..8]) {
            0 => Command::Read,
            1 => Command::Write,
            2 => Command::Disconnect,
            3 => Command::Flush,
            4 => Command::Trim,
            5 => Command::Cache,
            6 => Command::WriteZeroes,
            7 => Command::BlockStatus,
            _ => Command::Unknown,
        };
        let flags = number(&bytes[4..6]);
        Some(Self {
            command,
            fua: flags & 1 != 0,
            no_hole: flags & 2 != 0,
            one: flags & 8 != 0,
            cookie: number(&bytes[8..16]),
            offset: number(&bytes[16..24]),
            length: number(&bytes[24..28]) as u32,
        })
    }
}

/// A big-endian number of up to eight bytes.
pub fn number(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0, |value, &byte| value << 8 | u64::from(byte))
}

/// The head of a reply.
pub fn reply_head(cookie: u64, error: u32) -> [u8; 16] {
    let mut head = [0; 16];
    head[..4].copy_from_slice(&REPLY_MAGIC.to_be_bytes());
    head[4..8].copy_from_slice(&error.to_be_bytes());
    head[8..].copy_from_slice(&cookie.to_be_bytes());
    head
}

/// The head of a chunk with `length` bytes behind it.
pub fn chunk_head(cookie: u64, is_last: bool, kind: u16, length: u32) -> [u8; 20] {
    let mut head = [0; 20];
    head[..4].copy_from_slice(&CHUNK_MAGIC.to_be_bytes());
    head[4..6].copy_from_slice(&u16::from(is_last).to_be_bytes());
    head[6..8].copy_from_slice(&kind.to_be_bytes());
    head[8..16].copy_from_slice(&cookie.to_be_bytes());
    head[16..].copy_from_slice(&length.to_be_bytes());
    head
}

/// A chunk of a reply.
pub fn chunk(cookie: u64, is_last: bool, kind: u16, parts: &[&[u8]]) -> Vec<u8> {
    let length = parts.iter().map(|part| part.len() as u32).sum();
    [&chunk_head(cookie, is_last, kind, length)[..], &parts.concat()].concat()
}

/// A reply to an option.
pub fn option_reply(option: u32, kind: u32, data: &[u8]) -> Vec<u8> {
    let mut out = OPTION_REPLY_MAGIC.to_be_bytes().to_vec();
    out.extend_from_slice(&option.to_be_bytes());
    out.extend_from_slice(&kind.to_be_bytes());
    out.extend_from_slice(&(data.len() as u32).to_be_bytes());
    out.extend_from_slice(data);
    out
}

/// The export's name in the data of `INFO` or `GO`; `None` if the lengths do not fit.
pub fn chosen_name(data: &[u8]) -> Option<&[u8]> {
    let length = usize::try_from(number(data.get(..4)?)).ok()?;
    let name = data.get(4..4usize.checked_add(length)?)?;
    let rest = &data[4 + length..];
    let count = number(rest.get(..2)?) as usize;
    (rest.len() == 2 + 2 * count).then_some(name)
}

/// The export and the queries in the data of an option about metadata; `None` if the lengths do not fit.
pub fn metadata_queries(data: &[u8]) -> Option<(&[u8], Vec<&[u8]>)> {
    let text = |data: &'_ [u8]| -> Option<(usize, usize)> {
        let length = usize::try_from(number(data.get(..4)?)).ok()?;
        let end = 4usize.checked_add(length)?;
        data.get(4..end).map(|_| (4, end))
    };
    let (begin, end) = text(data)?;
    let (export, mut rest) = (&data[begin..end], &data[end..]);
    let count = number(rest.get(..4)?);
    rest = &rest[4..];
    let mut queries = Vec::new();
    for _ in 0..count {
        let (begin, end) = text(rest)?;
        queries.push(&rest[begin..end]);
        rest = &rest[end..];
    }
    rest.is_empty().then_some((export, queries))
}

/// The NBD error for an error number; the protocol defines few.
pub fn error_code(errno: i32) -> u32 {
    match errno {
        libc::EPERM | libc::EBADF | libc::EROFS | libc::EACCES => 1,
        libc::ENOMEM => 12,
        libc::EINVAL => 22,
        libc::ENOSPC | libc::EFBIG | libc::EDQUOT => 28,
        libc::EOPNOTSUPP => 95,
        // The mount has ended: `ESHUTDOWN` of the protocol.
        libc::ENOTCONN => 108,
        _ => 5,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_is_decoded_field_by_field() {
        let mut bytes = [0; REQUEST_BYTES];
        bytes[..4].copy_from_slice(&REQUEST_MAGIC.to_be_bytes());
        bytes[5] = 1;
        bytes[7] = 1;
        bytes[15] = 7;
        bytes[22] = 2;
        bytes[26] = 16;
        let expected = Request {
            command: Command::Write,
            fua: true,
            no_hole: false,
            one: false,
            cookie: 7,
            offset: 512,
            length: 4096,
        };
        assert_eq!(Request::parse(&bytes), Some(expected));
        bytes[5] = 2;
        assert_eq!(Request::parse(&bytes), Some(Request { fua: false, no_hole: true, ..expected }));
        bytes[0] = 0;
        assert_eq!(Request::parse(&bytes), None);
    }

    #[test]
    fn queries_are_accepted_only_if_their_lengths_fit() {
        let good = b"\0\0\0\x01a\0\0\0\x02\0\0\0\x02xy\0\0\0\0";
        assert_eq!(metadata_queries(good), Some((&b"a"[..], vec![&b"xy"[..], b""])));
        assert_eq!(metadata_queries(b"\0\0\0\0\0\0\0\0"), Some((&b""[..], vec![])));
        (0..good.len()).for_each(|length| assert_eq!(metadata_queries(&good[..length]), None, "{length}"));
        assert_eq!(metadata_queries(b"\0\0\0\x01a\0\0\0\0more"), None);
        assert_eq!(metadata_queries(b"\xff\xff\xff\xffa\0\0\0\0"), None);
    }

    #[test]
    fn a_name_is_accepted_only_if_its_lengths_fit() {
        assert_eq!(chosen_name(b"\0\0\0\x02ab\0\x01\0\x03"), Some(&b"ab"[..]));
        for bad in [&b""[..], b"\0\0\0\x02a", b"\0\0\0\x02ab", b"\0\0\0\x02ab\0\x02\0\0", b"\xff\xff\xff\xffab\0\0"] {
            assert_eq!(chosen_name(bad), None, "{bad:?}");
        }
    }
}
