//! Compressed streams: their first bytes decide the format, and the limits how far they may grow.

use crate::config::Limits;
use crate::error::{Result, input};
use lzma_rust2::XzReader;
use ruzstd::decoding::errors::{FrameDecoderError, ReadFrameHeaderError};
use ruzstd::decoding::{BlockDecodingStrategy, FrameDecoder};
use std::io::{self, BufRead, BufReader, Read};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Counts the bytes that pass, in a shared counter.
struct Counting<R> {
    inner: R,
    count: Arc<AtomicU64>,
}

impl<R: Read> Read for Counting<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.inner.read(buffer)?;
        self.count.fetch_add(count as u64, Ordering::Relaxed);
        Ok(count)
    }
}

/// Refuses a stream that grows too much: a bomb.
struct Bounded<R> {
    inner: R,
    source: Arc<AtomicU64>,
    out: u64,
    limits: Limits,
}

impl<R: Read> Read for Bounded<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.inner.read(buffer)?;
        self.out += count as u64;
        let source = self.source.load(Ordering::Relaxed);
        if self.out > self.limits.bytes
            || (self.out > self.limits.ratio_from_bytes && self.out / self.limits.ratio > source)
        {
            let limit = if self.out > self.limits.bytes {
                format!("{} bytes are the limit", self.limits.bytes)
            } else {
                format!("{}:1 is the limit; unpack it first if you trust it", self.limits.ratio)
            };
            return Err(io::Error::other(format!(
                "{source} compressed bytes unpack to more than {} ({limit})",
                self.out - 1
            )));
        }
        Ok(count)
    }
}

/// Zstandard frames one after another; skippable frames are skipped.
struct Zstd<R> {
    source: R,
    decoder: FrameDecoder,
    in_frame: bool,
}

impl<R: BufRead> Zstd<R> {
    /// Starts the next frame; false at the end of the stream.
    fn start(&mut self) -> io::Result<bool> {
        while !self.source.fill_buf()?.is_empty() {
            match self.decoder.reset(&mut self.source) {
                Ok(()) => {
                    self.in_frame = true;
                    return Ok(true);
                }
                Err(FrameDecoderError::ReadFrameHeaderError(ReadFrameHeaderError::SkipFrame { length, .. })) => {
                    let passed = io::copy(&mut (&mut self.source).take(length.into()), &mut io::sink())?;
                    if passed < u64::from(length) {
                        return Err(io::ErrorKind::UnexpectedEof.into());
                    }
                }
                Err(error) => return Err(io::Error::other(error.to_string())),
            }
        }
        Ok(false)
    }
}

impl<R: BufRead> Read for Zstd<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if buffer.is_empty() {
            return Ok(0);
        }
        loop {
            if !self.in_frame && !self.start()? {
                return Ok(0);
            }
            while self.decoder.can_collect() == 0 && !self.decoder.is_finished() {
                self.decoder
                    .decode_blocks(&mut self.source, BlockDecodingStrategy::UptoBlocks(1))
                    .map_err(|error| io::Error::other(error.to_string()))?;
            }
            let count = self.decoder.read(buffer)?;
            if count > 0 {
                return Ok(count);
            }
            // The decoder reads the frame's checksum and leaves the comparison to its caller.
            let stored = self.decoder.get_checksum_from_data();
            if stored.is_some() && stored != self.decoder.get_calculated_checksum() {
                return Err(io::Error::other("zstd: the content does not match its checksum; fetch or pack it again"));
            }
            self.in_frame = false;
        }
    }
}

/// Most memory that the unpacking of an xz stream may take, KiB: four times what the strongest level of `xz` asks for. The
/// stream itself says how much it needs.
const XZ_MEMORY_KIB: u32 = 256 << 10;

/// Xz streams one after another.
struct Xz<R: Read>(XzReader<R>);

impl<R: Read> Read for Xz<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        // The decoder takes a read of no bytes for the end of a block.
        if buffer.is_empty() {
            return Ok(0);
        }
        self.0.read(buffer).map_err(|error| match error.kind() {
            io::ErrorKind::OutOfMemory => io::Error::other(format!(
                "xz: unpacking takes more than {} MiB of memory; pack it again (xz -9 or less)",
                XZ_MEMORY_KIB >> 10
            )),
            _ => error,
        })
    }
}

/// How a stream is packed.
enum Packing {
    None,
    Gzip,
    Zstd,
    Xz,
    Bzip2,
    /// A known format that is not read.
    Other,
}

fn packing(magic: &[u8]) -> Packing {
    // A zstd stream may begin with a skippable frame (magic 0x184D2A50 to 5F).
    let skippable = magic.len() >= 4 && magic[0] & 0xf0 == 0x50 && magic[1..4] == [0x2a, 0x4d, 0x18];
    match magic {
        [0x1f, 0x8b, ..] => Packing::Gzip,
        [0x28, 0xb5, 0x2f, 0xfd, ..] => Packing::Zstd,
        _ if skippable => Packing::Zstd,
        [0xfd, b'7', b'z', b'X', b'Z', ..] => Packing::Xz,
        [b'B', b'Z', b'h', ..] => Packing::Bzip2,
        [0x04, 0x22, 0x4d, 0x18, ..] | [b'L', b'Z', b'I', b'P', ..] | [0x1f, 0x9d, ..] => Packing::Other,
        _ => Packing::None,
    }
}

/// Returns true if a stream that begins with `magic`, its first five bytes, is packed.
pub(crate) fn is_packed(magic: &[u8]) -> bool {
    !matches!(packing(magic), Packing::None)
}

/// Unpacks `source` by what its first bytes say: gzip, zstd, xz, bzip2, or nothing to unpack.
///
/// # Errors
/// A compression that is not read; the source's errors.
pub fn unpack<'a>(source: impl Read + 'a, limits: Limits) -> Result<Box<dyn Read + 'a>> {
    let count = Arc::new(AtomicU64::new(0));
    let mut source = BufReader::with_capacity(1 << 17, Counting { inner: source, count: count.clone() });
    let magic = source.fill_buf().map_err(|error| input!("reading the archive: {error}"))?;
    let bounded = |inner: Box<dyn Read + 'a>| Box::new(Bounded { inner, source: count.clone(), out: 0, limits });
    match packing(magic) {
        Packing::None => Ok(Box::new(source)),
        Packing::Gzip => Ok(bounded(Box::new(flate2::bufread::MultiGzDecoder::new(source)))),
        Packing::Zstd => Ok(bounded(Box::new(Zstd { source, decoder: FrameDecoder::new(), in_frame: false }))),
        Packing::Xz => Ok(bounded(Box::new(Xz(XzReader::new_mem_limit(source, true, XZ_MEMORY_KIB))))),
        Packing::Bzip2 => Ok(bounded(Box::new(bzip2::bufread::MultiBzDecoder::new(source)))),
        Packing::Other => Err(input!(
            "this archive is packed with lz4, lzip or compress, which are not read; unpack it first, or pack it with zstd, \
             gzip, xz or bzip2"
        )),
    }
}
