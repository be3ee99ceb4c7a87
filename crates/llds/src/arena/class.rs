//! Size classes: which block sizes a span is cut into.
//!
//! Steps of 16 bytes up to 512, then 16 steps per doubling, so a block wastes
//! at most 1/16 of its size above 256 bytes. Every multiple of 64 up to 2048
//! is a class of its own: structures made of cache lines waste nothing there.

/// Bytes of a span, the unit in which memory is assigned to a class.
///
/// Small under `--cfg pagefold_stress`, so that spans fill, empty and move in every run.
pub const SPAN_BYTES: usize = if cfg!(pagefold_stress) { 64 << 10 } else { 512 << 10 };

/// Bytes of a tile. A split span is cut into tiles, and a slab of tiles holds blocks of one class: in a small arena whole
/// spans would be mostly empty.
pub const TILE_BYTES: usize = 4096;

/// Tiles of a split span.
pub const TILES: usize = SPAN_BYTES / TILE_BYTES;

/// Largest block that shares a span; anything larger takes whole spans.
pub const SMALL_BYTES_MAX: usize = SPAN_BYTES / 2;

/// Number of classes. Class 0 is not a block size: it names free spans. The last two are logs.
pub const CLASS_COUNT: usize = LOG + 2;

/// The first of two classes of extents that are filled from front to back with blocks of any size.
pub const LOG: usize = class_of(SMALL_BYTES_MAX) + 1;

/// Spans of the largest log extent.
pub const LOG_SPANS_MAX: usize = 64;

/// Largest block that goes into a log extent.
pub const LOG_BYTES_MAX: usize = LOG_SPANS_MAX * SPAN_BYTES / 4;

/// Spans of a log extent for blocks of `size` bytes. An extent holds 16 to 32 blocks: the unused end, and partly filled
/// extents, are a small part of a structure of thousands of blocks. Powers of two, aligned to their size: an extent fits
/// exactly where an earlier one was freed.
pub const fn log_spans(size: usize) -> usize {
    let spans = (size * 16).div_ceil(SPAN_BYTES).next_power_of_two();
    if spans > LOG_SPANS_MAX { LOG_SPANS_MAX } else { spans }
}

/// How a log extent of `spans` spans is cut: into cache lines, of which a block takes any number.
pub const fn log_cut(spans: usize) -> Cut {
    let first = (spans * SPAN_BYTES / 64 / 8).next_multiple_of(64);
    let count = (spans * SPAN_BYTES - first) / 64;
    Cut { block_bytes: 64, first: first as u32, count: count as u32, words: count.div_ceil(64) as u32 }
}

/// Returns the smallest class with blocks of at least `size` bytes (`size` <= [`SMALL_BYTES_MAX`]).
#[inline]
pub const fn class_of(size: usize) -> usize {
    if size <= 512 {
        return if size == 0 { 1 } else { size.div_ceil(16) };
    }
    // Which doubling (512 << shift, 1024 << shift], and which of its 16 steps.
    let shift = (size - 1).ilog2() as usize - 9;
    let step = 32usize << shift;
    32 + shift * 16 + (size - (512 << shift)).div_ceil(step)
}

/// Returns the block size of `class` in bytes.
#[inline]
pub const fn class_bytes(class: usize) -> usize {
    if class <= 32 {
        return class * 16;
    }
    let shift = (class - 33) / 16;
    (512 << shift) + ((class - 33) % 16 + 1) * (32 << shift)
}

/// How a span of one class is cut: where its first block is and how many there are.
#[derive(Clone, Copy)]
pub struct Cut {
    /// Bytes of one block.
    pub block_bytes: u32,
    /// Offset of block 0 from the start of the span; the bitmap lies before it when it does not fit the table.
    pub first: u32,
    /// Number of blocks.
    pub count: u32,
    /// Words of the bitmap; 1 means it lives in the span table.
    pub words: u32,
}

/// How `bytes` bytes are cut into blocks of `size` bytes.
const fn cut_of(bytes: usize, size: usize) -> Cut {
    let mut count = bytes / size;
    let mut words = count.div_ceil(64);
    let mut first = 0;
    if words > 1 {
        first = (words * 8).next_multiple_of(64);
        count = (bytes - first) / size;
        words = count.div_ceil(64);
        if words == 1 {
            // The bitmap would just fit the table: keep the in-span form, words > 1 is the switch.
            words = 2;
        }
    }
    Cut { block_bytes: size as u32, first: first as u32, count: count as u32, words: words as u32 }
}

/// The cut of a whole span for every class below [`LOG`].
pub static CUTS: [Cut; LOG] = {
    let mut cuts = [Cut { block_bytes: 1, first: 0, count: 0, words: 1 }; LOG];
    let mut class = 1;
    while class < LOG {
        cuts[class] = cut_of(SPAN_BYTES, class_bytes(class));
        class += 1;
    }
    cuts
};

/// Tiles of a slab for every class below [`LOG`]: the fewest of which blocks leave at most an eighth unused.
pub const SLAB_TILES: [usize; LOG] = {
    let mut tiles = [0; LOG];
    let mut class = 1;
    while class < LOG {
        tiles[class] = 1;
        loop {
            let bytes = tiles[class] * TILE_BYTES;
            let cut = cut_of(bytes, class_bytes(class));
            if bytes - cut.count as usize * class_bytes(class) <= bytes / 8 {
                break;
            }
            tiles[class] += 1;
        }
        class += 1;
    }
    tiles
};

/// The cut of a slab for every class below [`LOG`].
pub static SLAB_CUTS: [Cut; LOG] = {
    let mut cuts = [Cut { block_bytes: 1, first: 0, count: 0, words: 1 }; LOG];
    let mut class = 1;
    while class < LOG {
        cuts[class] = cut_of(SLAB_TILES[class] * TILE_BYTES, class_bytes(class));
        class += 1;
    }
    cuts
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_size_gets_the_smallest_class_that_holds_it() {
        for size in 1..=SMALL_BYTES_MAX {
            let class = class_of(size);
            assert!(class_bytes(class) >= size, "size {size} class {class}");
            assert!(class == 1 || class_bytes(class - 1) < size, "size {size} class {class}");
        }
        assert_eq!(class_bytes(LOG - 1), SMALL_BYTES_MAX);
    }

    #[test]
    fn lines_waste_nothing() {
        for lines in 1..=32 {
            assert_eq!(class_bytes(class_of(lines * 64)), lines * 64);
        }
    }

    #[test]
    fn cuts_fit_their_span_or_slab() {
        for class in 1..LOG {
            for (cut, bytes) in [(&CUTS[class], SPAN_BYTES), (&SLAB_CUTS[class], SLAB_TILES[class] * TILE_BYTES)] {
                let used = cut.count as usize * cut.block_bytes as usize;
                assert!(cut.first as usize + used <= bytes);
                assert!(cut.count as usize <= cut.words as usize * 64);
                assert!(cut.words == 1 || cut.words as usize * 8 <= cut.first as usize);
                assert!(
                    cut.count > 0 && (bytes == SPAN_BYTES || used >= bytes / 8 * 7),
                    "class {class}: {used} of {bytes}"
                );
            }
            assert!(CUTS[class].count >= 2 && SLAB_TILES[class] <= TILES);
        }
    }
}
