//! The state of one page, in four bytes.
//!
//! ```text
//! Unknown -> Armed -> (silent twice) -> Candidate -> Shared -> Broken -> (healed) -> Armed
//!              |  \-> (written again) -> Sleeping -> Arming -> Armed
//!              \----> (all zero) -> Zero
//! ```

use pagefold_pool::Slot;
use pagefold_protocol::message::RefusalReason;

/// Silent periods after which a page is a candidate.
pub const SILENT_PERIODS: u32 = 2;
/// Highest back-off: a page that keeps changing is looked at every 2^7 periods.
pub const BACKOFF_MAX: u32 = 7;

/// What we know about a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageState {
    /// Never seen, or gone.
    Unknown,
    /// Protected; `silent` periods without a write. `fresh`: reported in this very period.
    Armed {
        /// Periods without a write.
        silent: u32,
        /// How often it was caught writing.
        backoff: u32,
        /// Reported in this period.
        fresh: bool,
    },
    /// Volatile: not looked at for `periods` more, nor protected again after its next write.
    Sleeping {
        /// Periods left.
        periods: u32,
        /// How often it was caught writing.
        backoff: u32,
    },
    /// Volatile: to be looked at again in the next period.
    Arming {
        /// How often it was caught writing.
        backoff: u32,
    },
    /// Silent; in the index if `indexed`.
    Candidate {
        /// Whether its fingerprint was looked up.
        indexed: bool,
        /// How often it was caught writing.
        backoff: u32,
    },
    /// Shows this slot.
    Shared(Slot),
    /// Was shared, was written: a private page in a pool mapping, for `age` periods.
    Broken {
        /// Periods since it was found.
        age: u32,
        /// How often it was caught writing.
        backoff: u32,
    },
    /// Was zero and was dropped: a hole that reads as zero.
    Zero,
    /// Could not be merged; tried again after `periods`.
    Refused {
        /// Why.
        why: RefusalReason,
        /// Periods left.
        periods: u32,
    },
}

const TAG: u32 = 29;
const MASK: u32 = (1 << TAG) - 1;

/// A state, packed: three bits of tag, 29 of value.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Packed(u32);

impl PageState {
    /// Packs the state; numbers that do not fit are cut off at their largest.
    pub fn pack(self) -> Packed {
        let (tag, value) = match self {
            PageState::Unknown => (0, 0),
            PageState::Zero => (0, 1),
            PageState::Arming { backoff } => (0, 2 | backoff.min(BACKOFF_MAX) << 4),
            PageState::Armed { silent, backoff, fresh } => {
                (1, silent.min(3) | backoff.min(BACKOFF_MAX) << 4 | u32::from(fresh) << 8)
            }
            PageState::Sleeping { periods, backoff } => (2, periods.min(0xffff) << 4 | backoff.min(BACKOFF_MAX)),
            PageState::Candidate { indexed, backoff } => (3, u32::from(indexed) | backoff.min(BACKOFF_MAX) << 4),
            PageState::Shared(slot) => (4, slot.number() & MASK),
            PageState::Broken { age, backoff } => (5, age.min(0xffff) << 4 | backoff.min(BACKOFF_MAX)),
            PageState::Refused { why, periods } => (6, why as u32 | periods.min(0xffff) << 8),
        };
        Packed(tag << TAG | value)
    }
}

impl Packed {
    /// The packed state with its value increased by `by`: for runs of slots.
    pub(crate) fn plus(self, by: u32) -> Packed {
        Packed(self.0.wrapping_add(by))
    }

    /// Unpacks the state.
    pub fn get(self) -> PageState {
        let value = self.0 & MASK;
        match self.0 >> TAG {
            1 => PageState::Armed { silent: value & 3, backoff: value >> 4 & 7, fresh: value >> 8 & 1 != 0 },
            2 => PageState::Sleeping { periods: value >> 4, backoff: value & 7 },
            3 => PageState::Candidate { indexed: value & 1 != 0, backoff: value >> 4 & 7 },
            4 => PageState::Shared(Slot::from_number(value)),
            5 => PageState::Broken { age: value >> 4, backoff: value & 7 },
            6 => PageState::Refused { why: RefusalReason::from_number(value & 0xff), periods: value >> 8 },
            _ => match value & 3 {
                0 => PageState::Unknown,
                1 => PageState::Zero,
                _ => PageState::Arming { backoff: value >> 4 & 7 },
            },
        }
    }
}

/// What a report of a write makes of a page (its sharer, if it had one, is settled by the caller).
pub fn on_written(state: PageState) -> PageState {
    match state {
        PageState::Unknown | PageState::Zero | PageState::Refused { .. } => {
            PageState::Armed { silent: 0, backoff: 0, fresh: true }
        }
        PageState::Arming { backoff } => PageState::Armed { silent: 0, backoff, fresh: true },
        PageState::Armed { backoff, .. } => caught(backoff),
        // A candidate was silent for long: its first write costs it nothing but the candidacy.
        PageState::Candidate { backoff, .. } => PageState::Armed { silent: 0, backoff, fresh: true },
        PageState::Sleeping { .. } => state,
        PageState::Shared(_) | PageState::Broken { .. } => PageState::Armed { silent: 0, backoff: 1, fresh: true },
    }
}

/// A page was written though it had been protected a period ago: look away, longer each time.
fn caught(backoff: u32) -> PageState {
    let backoff = (backoff + 1).min(BACKOFF_MAX);
    PageState::Sleeping { periods: (1 << backoff) - 1, backoff }
}

/// What the end of a period makes of a page that needs a look (armed, sleeping, refused, broken).
pub fn on_period(state: PageState) -> PageState {
    match state {
        PageState::Armed { backoff, fresh: true, .. } => PageState::Armed { silent: 0, backoff, fresh: false },
        PageState::Armed { silent, backoff, fresh: false } if silent + 1 >= SILENT_PERIODS => {
            PageState::Candidate { indexed: false, backoff }
        }
        PageState::Armed { silent, backoff, fresh: false } => {
            PageState::Armed { silent: silent + 1, backoff, fresh: false }
        }
        // Protected since it was caught, looked at again, and silent: it has come to rest.
        PageState::Arming { backoff } => PageState::Armed { silent: 1, backoff, fresh: false },
        PageState::Sleeping { periods, backoff } if periods <= 1 => PageState::Arming { backoff },
        PageState::Sleeping { periods, backoff } => PageState::Sleeping { periods: periods - 1, backoff },
        PageState::Refused { periods, .. } if periods <= 1 => PageState::Armed { silent: 0, backoff: 0, fresh: false },
        PageState::Refused { why, periods } => PageState::Refused { why, periods: periods - 1 },
        PageState::Broken { age, backoff } => PageState::Broken { age: age + 1, backoff },
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packing_keeps_every_state() {
        let mut states = vec![PageState::Unknown, PageState::Zero, PageState::Shared(Slot::from_number(MASK))];
        for backoff in 0..=BACKOFF_MAX {
            states.push(PageState::Arming { backoff });
            states.push(PageState::Broken { age: 9, backoff });
            states.push(PageState::Sleeping { periods: 127, backoff });
            for flag in [false, true] {
                states.push(PageState::Candidate { indexed: flag, backoff });
                states.extend((0..3).map(|silent| PageState::Armed { silent, backoff, fresh: flag }));
            }
        }
        states.extend(RefusalReason::ALL.map(|why| PageState::Refused { why, periods: 60 }));
        for state in states {
            assert_eq!(state.pack().get(), state);
        }
        assert_eq!(Packed::default().get(), PageState::Unknown);
    }

    #[test]
    fn two_silent_periods_make_a_candidate() {
        let mut state = on_written(PageState::Unknown);
        state = on_period(state);
        for _ in 0..SILENT_PERIODS {
            assert!(matches!(state, PageState::Armed { .. }));
            state = on_period(state);
        }
        assert_eq!(state, PageState::Candidate { indexed: false, backoff: 0 });
    }

    #[test]
    fn a_page_that_comes_to_rest_becomes_a_candidate() {
        for writes in 1..40 {
            let mut state = on_period(on_written(PageState::Unknown));
            for period in 0..1000 {
                if period < writes && matches!(state, PageState::Armed { .. } | PageState::Arming { .. }) {
                    state = on_written(state);
                }
                state = on_period(state);
            }
            assert!(matches!(state, PageState::Candidate { .. }), "{writes} writes: {state:?}");
        }
    }

    #[test]
    fn a_page_that_keeps_changing_is_looked_at_ever_more_rarely() {
        let mut state = on_period(on_written(PageState::Unknown));
        let mut looks = 0;
        for _ in 0..1000 {
            // The page is written all the time, so every look at it is a report.
            if matches!(state, PageState::Armed { .. } | PageState::Arming { .. }) {
                looks += 1;
                state = on_written(state);
            }
            state = on_period(state);
        }
        assert!(looks < 40, "{looks} looks in 1000 periods");
    }
}
