//! Lists of ranges in order of address.

use crate::Range;

/// Appends `range`, which joins the last one where the two touch.
pub fn append(ranges: &mut Vec<Range>, range: Range) {
    match ranges.last_mut() {
        Some(last) if last.end == range.start => last.end = range.end,
        _ => ranges.push(range),
    }
}

/// The parts of `whole` that lie in none of `others`, which are in order and do not overlap one another.
pub fn outside(whole: Range, others: impl IntoIterator<Item = Range>) -> Vec<Range> {
    let mut parts = Vec::new();
    let mut at = whole.start;
    for other in others {
        if other.end <= at {
            continue;
        }
        if other.start >= whole.end {
            break;
        }
        if at < other.start {
            parts.push(Range { start: at, end: other.start });
        }
        at = other.end;
    }
    if at < whole.end {
        parts.push(Range { start: at, end: whole.end });
    }
    parts
}
