//! Slots and headers, bit by bit.

use crate::bucket::{Bucket, Head, Kind, REACH_MAX};

#[test]
fn slots_are_found_by_their_whole_remainder() {
    let bucket = Bucket::empty();
    let remainders = [0x1234_5678_9abc, 0x1234_5678_9abd, 0x0234_5678_9abc, 0x1234_5679_9abc];
    for (slot, remainder) in remainders.into_iter().enumerate() {
        bucket.fill(slot, remainder, slot as u64);
    }
    for (slot, remainder) in remainders.into_iter().enumerate() {
        assert_eq!(bucket.matches(remainder), 1 << slot);
        assert_eq!(bucket.remainder(Head(0).with_entry(slot, Kind::RECORD, 11 << 48), slot), 11 << 48 | remainder);
    }
    for bit in 0..48 {
        assert_eq!(bucket.matches(0x7777_7777_7777 ^ 1 << bit), 0);
    }
    bucket.fill(2, remainders[0], 9);
    assert_eq!(bucket.matches(remainders[0]), 0b101);
}

#[test]
fn head_fields_do_not_touch_each_other() {
    let mut head = Head(u64::MAX << 36).next();
    assert_eq!(head.0, 0, "the version wraps into nothing else");
    head = head.with_reach(REACH_MAX).with_kind(3, Kind::SECOND).with_kind(0, Kind::inline(8)).next();
    assert_eq!((head.reach(), head.kind(3), head.kind(0), head.kind(1)), (REACH_MAX, Kind(11), Kind(9), Kind(0)));
    assert_eq!(head.free_slot(), Some(1));
    for reach in 0..=REACH_MAX {
        let given = head.with_reach(reach).reach();
        assert!(given >= reach && given < reach + reach / 2 + 2, "{reach} became {given}");
    }
    assert_eq!(head.with_kind(3, Kind::EMPTY).kind(2), Kind::EMPTY);
}
