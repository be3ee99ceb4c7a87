//! What passes between the steps of an eviction.

use pagefold_os::Range;

/// A run of pages to evict, and the managed range around it.
pub(crate) type Run = (Range, Range);

/// What of `range` lies in each of the managed ranges `regions`, which are in order.
pub(crate) fn runs_within(range: Range, regions: &[Range]) -> impl Iterator<Item = Run> {
    let first = regions.partition_point(|region| region.end <= range.start);
    let near = regions[first..].iter().take_while(move |region| region.start < range.end);
    near.map(move |region| (range.intersection(region), *region)).filter(|(part, _)| !part.is_empty())
}

/// A page that the agent copied to the channel.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Copied {
    /// Its number.
    pub(crate) page: u64,
    /// Where its copy lies in the channel.
    pub(crate) place: u32,
    /// The managed range that it lies in.
    pub(crate) around: Range,
}
