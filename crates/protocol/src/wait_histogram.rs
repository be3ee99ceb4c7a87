//! Buckets of the durations for which accesses of a program waited.

/// Number of buckets: four to an octave; the last bucket holds everything longer than about 100 ms.
pub const BUCKETS: usize = 64;

/// The bucket of a duration in microseconds.
pub const fn bucket(us: u64) -> usize {
    if us < 4 {
        return us as usize;
    }
    let octave = us.ilog2() as usize;
    let bucket = (octave - 1) * 4 + (us >> (octave - 2)) as usize - 4;
    if bucket < BUCKETS { bucket } else { BUCKETS - 1 }
}

/// The first duration in microseconds that is too long for `bucket`.
pub const fn bucket_end(bucket: usize) -> u64 {
    if bucket < 4 {
        return bucket as u64 + 1;
    }
    let octave = bucket / 4 + 1;
    (bucket as u64 % 4 + 5) << (octave - 2)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_of_durations_follow_each_other() {
        let mut last = 0;
        for us in 0..200_000u64 {
            let index = bucket(us);
            assert!(index == last || index == last + 1, "{us}");
            last = index;
            if index + 1 < BUCKETS {
                assert!(us < bucket_end(index), "{us} in {index}");
                assert!(index == 0 || us >= bucket_end(index - 1), "{us} in {index}");
            }
        }
        assert_eq!(bucket(u64::MAX), BUCKETS - 1);
    }
}
