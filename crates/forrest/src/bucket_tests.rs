//! Slots and headers, bit by bit.

use crate::bucket::{Bucket, Head, Mark, SlotKind};
use std::sync::atomic::Ordering;

#[test]
fn slots_are_found_by_their_whole_remainder() {
    let bucket = Bucket::empty();
    let remainders = [0x1234_5678_9abc, 0x1234_5678_9abd, 0x0234_5678_9abc, 0x1234_5679_9abc];
    for (slot, remainder) in remainders.into_iter().enumerate() {
        bucket.fill(slot, SlotKind::RECORD, 11 << 48 | remainder, slot as u64);
    }
    let head = Head(0xf);
    for (slot, remainder) in remainders.into_iter().enumerate() {
        assert_eq!(bucket.matches(head, remainder), 1 << slot);
        assert_eq!(bucket.matches(head.without(slot), remainder), 0);
        assert_eq!(bucket.remainder(slot), 11 << 48 | remainder);
        assert_eq!(
            (bucket.mark(slot).kind(), bucket.words[slot].load(Ordering::Relaxed)),
            (SlotKind::RECORD, slot as u64)
        );
        assert!(bucket.mark(slot).fits(11 << 48 | remainder) && !bucket.mark(slot).fits(10 << 48 | remainder));
    }
    for bit in 0..48 {
        assert_eq!(bucket.matches(Head(0xff), 0x7777_7777_7777 ^ 1 << bit), 0);
    }
    bucket.fill(2, SlotKind::inline(3), remainders[0], 9);
    assert_eq!(bucket.matches(head, remainders[0]), 0b101);
}

#[test]
fn head_fields_do_not_touch_each_other() {
    let mut head = Head(u64::MAX << 8).next();
    assert_eq!(head.0, 0, "the version wraps into nothing else");
    for slot in 0..8 {
        assert_eq!((head.free_slot(), head.is_full()), (slot, false));
        assert_eq!(head.filled(), head.with(slot));
        head = head.filled();
        assert_eq!((head.used(), head.0 >> 8), ((2 << slot) - 1, slot as u64 + 1));
    }
    assert!(head.is_full());
    head = head.without(5).without(2);
    assert_eq!((head.used(), head.free_slot(), head.0 >> 8), (0b1101_1011, 2, 10));
    assert_eq!(head.filled().used(), 0b1101_1111);
    assert_eq!(Mark::new(SlotKind::SECOND, 9 << 48).0, 0xb9);
}
