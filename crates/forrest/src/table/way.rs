//! Ways: the buckets in which an entry may lie, in the order in which they are tried.
//!
//! A way follows from the low bits of a hash, the table's secret multiplier
//! and the length of the segment's array. Readers, writers and copies to
//! another array all go by it; the home's header says how far.

use super::Table;

/// Neighbours, the home among them, with which the way begins: mostly one page, so one miss of the TLB.
pub(super) const NEAR: usize = 4;

/// The buckets in which an entry may lie, in the order in which they are tried.
///
/// After the neighbours they lie anywhere. Were they the next ones, as in linear probing, full buckets would cluster: from
/// 0.90 of all slots filled on an entry often found no room within its reach. So arrays are filled to 0.99 before one fails.
#[derive(Clone, Copy)]
pub struct Way {
    spread: u64,
    buckets: u64,
}

impl Way {
    /// The bucket in which an entry belongs.
    #[inline]
    pub fn home(self) -> usize {
        (((self.spread >> 32) * self.buckets) >> 32) as usize
    }

    /// The `step`-th bucket; the 0th is the home. Some may be named twice.
    #[inline]
    pub fn at(self, step: usize) -> usize {
        let home = self.home();
        match step {
            0 => home,
            1..NEAR => {
                let neighbour = home ^ step;
                if neighbour < self.buckets as usize { neighbour } else { home }
            }
            _ => {
                // Steps of one length, however chosen, come round to the same few buckets for some keys.
                let mixed = self.spread.wrapping_add((step as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15));
                let place = (mixed ^ mixed >> 32).wrapping_mul(0xd6e8_feb8_6659_fd93) >> 32;
                ((place * self.buckets) >> 32) as usize
            }
        }
    }
}

impl Table {
    /// The way of an entry through an array of `buckets`, at least one.
    #[inline]
    pub fn way(&self, remainder: u64, buckets: usize) -> Way {
        // Twice, so that chosen remainders in arithmetic progression do not stay one.
        let once = remainder.wrapping_mul(self.place);
        Way { spread: (once ^ (once >> 29)).wrapping_mul(self.place), buckets: buckets as u64 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bucket::REACH_MAX;

    /// Steps of equal length would come round to a few buckets for some keys, and an array half empty would be full.
    #[test]
    fn ways_stay_in_the_array_and_come_by_many_buckets() {
        let hard = (0..64).flat_map(|bit| [1u64 << bit, u64::MAX << bit, u64::MAX >> bit, (u64::MAX / 3) << bit]);
        let spread = (0..20_000u64).map(|i| i.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ i << 7);
        for spread in hard.chain(spread).chain((1..1000).map(|part| u64::MAX / part)) {
            for buckets in [1u64, 2, 3, 5, 16, 257, 4096, 100_003] {
                let way = Way { spread, buckets };
                let mut seen: Vec<usize> = (0..=REACH_MAX).map(|step| way.at(step)).collect();
                assert_eq!(seen[0], way.home());
                assert!(seen.iter().all(|&bucket| bucket < buckets as usize), "{spread:#x} of {buckets}: {seen:?}");
                seen.sort_unstable();
                seen.dedup();
                let least =
                    [(1, 1), (16, 8), (257, 40)].into_iter().rfind(|&(from, _)| buckets >= from).unwrap_or((1, 1)).1;
                assert!(seen.len() >= least, "{spread:#x} of {buckets}: only {seen:?}");
            }
        }
    }
}
