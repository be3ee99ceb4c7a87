//! Home buckets: the two buckets in which an entry may lie.
//!
//! Both follow from different bits of a hash's remainder and from the length of the
//! shard's array. Secret numbers spread the hashes, so an attacker cannot choose
//! the buckets of its keys.

/// The two buckets in which an entry may lie; both may be the same bucket.
///
/// A new entry goes to the one with fewer entries, so buckets fill evenly. At a fill of 0.8, one insert in 150 finds no room
/// in either bucket; at 0.92, one in five. Then one of those 16 entries can be displaced to its other home.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Homes {
    pub first: usize,
    pub second: usize,
}

impl Homes {
    /// The homes of an entry in an array of `buckets`, at least one and below 2^32.
    ///
    /// The first keeps its order whatever the length of the array.
    #[inline(always)]
    pub fn of(remainder: u64, buckets: usize) -> Homes {
        let place = |part: u64| ((part * buckets as u64) >> 32) as usize;
        Homes { first: place(remainder >> 20 & 0xffff_ffff), second: place(remainder & 0xffff_ffff) }
    }

    /// The home that is not `bucket`; `bucket` itself if both are the same.
    #[inline]
    pub fn other(self, bucket: usize) -> usize {
        if bucket == self.first { self.second } else { self.first }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn homes_lie_in_the_array_and_know_of_each_other() {
        for remainder in (0..20_000u64).map(|i| i.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 12).chain([0, (1 << 52) - 1]) {
            for buckets in [1, 2, 3, 5, 16, 257, 4096, 100_003, (1 << 18) - 1] {
                let homes = Homes::of(remainder, buckets);
                assert!(homes.first < buckets && homes.second < buckets, "{remainder:#x} of {buckets}: {homes:?}");
                assert_eq!((homes.other(homes.first), homes.other(homes.second)), (homes.second, homes.first));
            }
        }
    }
}
