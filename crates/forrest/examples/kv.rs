//! A store in a few lines: private, then shared by name.
//!
//!     cargo run --release -p forrest --example kv

use forrest::{Options, Store};

fn main() -> Result<(), forrest::Error> {
    let store = Store::new()?;
    store.set(b"user:7", b"Ada")?;
    store.add(b"visits", 1)?;
    println!("user:7 is {:?}, {} entries", store.get(b"user:7"), store.len());

    // Replaces the value only if it did not change since it was read.
    let seen = store.get(b"user:7");
    let done = store.compare_swap(b"user:7", seen.as_deref(), Some(b"Grace"))?;
    println!("swapped: {done}, now {:?}", store.get(b"user:7"));

    // Lookups in a batch overlap their cache misses.
    let keys = ["user:7", "visits", "missing"];
    store.get_many(&keys, |index, value| println!("{}: {} bytes", keys[index], value.map_or(0, <[u8]>::len)));

    // Any process that opens the same name sees the same entries, until the store is removed.
    let name = format!("example-{}", std::process::id());
    let shared = Options::new().limit_bytes(64 << 20).create(&name)?;
    shared.set(b"from", b"this process")?;
    println!("shared as /dev/shm/forrest.{name}: {}", shared.stats().to_json());
    Store::remove(&name)
}
