//! Medians and spreads.

use serde::Serialize;

/// Median and extremes of what was measured; not a number where nothing was.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Spread {
    /// The middle value.
    pub median: f64,
    /// The least.
    pub low: f64,
    /// The most.
    pub high: f64,
}

impl Spread {
    /// Of these values.
    pub fn of(values: impl IntoIterator<Item = f64>) -> Spread {
        let mut values: Vec<f64> = values.into_iter().collect();
        values.sort_by(f64::total_cmp);
        let at = |index: usize| values.get(index).copied().unwrap_or(f64::NAN);
        Spread { median: at(values.len() / 2), low: at(0), high: at(values.len().wrapping_sub(1)) }
    }

    /// In another unit.
    pub fn scaled(self, scale: f64) -> Spread {
        Spread { median: self.median * scale, low: self.low * scale, high: self.high * scale }
    }

    /// Half the distance between the extremes, in percent of the median.
    pub fn half_range_percent(&self) -> f64 {
        if self.median > 0.0 { 50.0 * (self.high - self.low) / self.median } else { 0.0 }
    }
}

/// The median.
pub fn median(values: impl IntoIterator<Item = f64>) -> f64 {
    Spread::of(values).median
}

/// Median of many samples, and half the distance between the quartiles in percent of it.
pub fn quartiles(mut samples: Vec<f64>) -> (f64, f64) {
    samples.sort_by(f64::total_cmp);
    let at = |part: usize| samples[samples.len() * part / 4];
    (at(2), 50.0 * (at(3) - at(1)) / at(2))
}

/// The value at `share` of ascending values.
pub fn quantile<T: Copy>(ascending: &[T], share: f64) -> Option<T> {
    ascending.get((ascending.len() as f64 * share) as usize).or(ascending.last()).copied()
}

/// The numbers below `count` in a random order, the same for the same seed.
pub fn order(count: usize, seed: u64) -> Vec<usize> {
    let mut order: Vec<usize> = (0..count).collect();
    fastrand::Rng::with_seed(seed).shuffle(&mut order);
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_spread_has_the_median_and_the_extremes() {
        let spread = Spread::of([3.0, 1.0, 2.0]);
        assert_eq!((spread.median, spread.low, spread.high), (2.0, 1.0, 3.0));
        assert_eq!(spread.half_range_percent(), 50.0);
        assert!(Spread::of([]).median.is_nan());
        assert_eq!((quantile(&[1, 2, 3], 0.99), quantile::<u64>(&[], 0.5)), (Some(3), None));
    }
}
