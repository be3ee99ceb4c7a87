//! Keys chosen by an attacker: all of one hash, or of similar hashes. Each costs a bounded number of steps, and lookups
//! stay correct.

use forrest::{Hash, Options, Store, murmur64a};

const M: u64 = 0xc6a4_a793_5bd1_e995;

fn inverse(odd: u64) -> u64 {
    (0..6).fold(odd, |inverse, _| inverse.wrapping_mul(2u64.wrapping_sub(odd.wrapping_mul(inverse))))
}

/// A key of 16 bytes with the same hash under seed 9 as every other key made here: the first 8 bytes are free, the last 8
/// compensate for them. An attacker that knows the seed can do this.
fn colliding_key(first: u64) -> [u8; 16] {
    let mix = |word: u64| {
        let word = word.wrapping_mul(M);
        (word ^ word >> 47).wrapping_mul(M)
    };
    let unmix = |word: u64| {
        let word = word.wrapping_mul(inverse(M));
        (word ^ word >> 47).wrapping_mul(inverse(M))
    };
    let start = 9 ^ 16u64.wrapping_mul(M);
    let after_first = (start ^ mix(first)).wrapping_mul(M);
    // The state before the last multiplication and the finish is to be 42 for all keys.
    let second = unmix(after_first ^ 42);
    let mut key = [0; 16];
    key[..8].copy_from_slice(&first.to_le_bytes());
    key[8..].copy_from_slice(&second.to_le_bytes());
    key
}

fn fill_and_check(store: &Store, count: u64) {
    for number in 0..count {
        assert!(store.insert(&colliding_key(number), &number.to_le_bytes()).unwrap(), "{number}");
    }
    for number in 0..count {
        assert_eq!(store.get(&colliding_key(number)).unwrap(), &number.to_le_bytes());
        assert!(!store.insert(&colliding_key(number), b"again").unwrap());
    }
    assert!(store.get(&colliding_key(count)).is_none());
}

#[test]
fn keys_of_one_hash_go_by_their_second_hash() {
    let hash = murmur64a(&colliding_key(0), 9);
    assert!((0..1000).all(|number| murmur64a(&colliding_key(number), 9) == hash), "the attack does not work");
    let store = Store::new().unwrap();
    let count = 50_000;
    fill_and_check(&store, count);
    let report = store.check().unwrap();
    assert_eq!(report.entries, count);
    // Eight stay where the attacker sent them; the secret hash spreads the rest.
    assert_eq!(report.second, count - 8);
    assert!(report.in_first_bucket > count / 2, "{report:?}");
    for number in (0..count).step_by(2) {
        assert_eq!(store.take(&colliding_key(number)).unwrap(), Some(number.to_le_bytes().to_vec()));
    }
    for number in 0..count {
        assert_eq!(store.contains(&colliding_key(number)), number % 2 == 1);
    }
    assert_eq!(store.clear().unwrap(), count / 2);
    assert_eq!(store.check().unwrap().lost_blocks, 0);
}

#[test]
fn a_keyed_store_is_not_affected() {
    let store = Options::new().hash(Hash::Keyed).private().unwrap();
    fill_and_check(&store, 20_000);
    assert_eq!(store.check().unwrap().second, 0);
}

/// A key of 8 bytes with a MurmurHash64A under seed 9 that shares the 24 highest bits with all others made here.
fn key_of_like_hash(number: u64) -> [u8; 8] {
    let invert = |hash: u64| {
        let hash = (hash ^ hash >> 47).wrapping_mul(inverse(M));
        let hash = (hash ^ hash >> 47).wrapping_mul(inverse(M));
        let word = (hash ^ 9 ^ 8u64.wrapping_mul(M)).wrapping_mul(inverse(M));
        (word ^ word >> 47).wrapping_mul(inverse(M))
    };
    invert(0xabc_def << 40 | number).to_le_bytes()
}

/// Where a key lies is the store's own secret: keys of like hashes are spread as any others are.
#[test]
fn keys_of_similar_hashes_are_spread() {
    let key = key_of_like_hash;
    assert_eq!(murmur64a(&key(5), 9), 0xabc_def << 40 | 5);
    let store = Store::new().unwrap();
    let count = 100_000;
    let mut counts = [0; 4096];
    for number in 0..count {
        store.set(&key(number), &number.to_le_bytes()).unwrap();
        counts[store.shard_of(&key(number))] += 1;
    }
    let most = counts.iter().max().unwrap();
    assert!(*most < 80, "{most} of {count} keys lie in one of 4,096 shards");
    let report = store.check().unwrap();
    assert_eq!((report.entries, report.second), (count, 0));
    for number in 0..count {
        assert_eq!(store.get(&key(number)).unwrap(), &number.to_le_bytes());
    }
}
