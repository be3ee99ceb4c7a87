//! A successor adopts an arena with arbitrary bytes in it: it refuses the arena, or serves only bytes that were stored.

#[path = "common/hostile.rs"]
mod hostile;

use proptest::prelude::*;

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn any_words_are_refused_or_harmless(input in proptest::collection::vec(any::<u8>(), 0..400)) {
        hostile::adopt_written_by(&input);
    }
}

#[test]
fn an_untouched_arena_is_adopted() {
    hostile::adopt_written_by(&[]);
}
