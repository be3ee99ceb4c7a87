//! The pool: allocates and frees nodes, and gives their memory back to the system.
//!
//! Nodes are numbered and lie in chunks of one huge page. A chunk's state is one word, so that
//! allocating, freeing and releasing are each one compare-and-swap. A chunk of free nodes only goes
//! back to the system. Node memory stays readable for ever, and a node's version never goes back, so
//! a reader with a stale number detects that by the version and needs no epoch.

use super::NODE_LINES;
use crate::line_memory::{LINE_BYTES, LineMemory};
use crate::primitive::{AtomicU64, Ordering};

/// Nodes in a chunk: 2 MiB of them.
#[cfg(all(not(loom), not(pagefold_stress)))]
pub(super) const CHUNK_NODES: u64 = (2 << 20) / (NODE_LINES * LINE_BYTES as u64);
#[cfg(all(not(loom), pagefold_stress))]
pub(super) const CHUNK_NODES: u64 = 64;
#[cfg(loom)]
pub(super) const CHUNK_NODES: u64 = 10;

/// A chunk's state: `changes:24 | RELEASING | touched:13 | used:13 | top:13`. `top` is the first free
/// node plus one, `used` counts the nodes in use.
#[derive(Clone, Copy)]
struct Chunk(u64);

const FIELD: u64 = (1 << 13) - 1;

impl Chunk {
    const RELEASING: u64 = 1 << 39;

    fn top(self) -> u64 {
        self.0 & FIELD
    }

    fn used(self) -> u64 {
        self.0 >> 13 & FIELD
    }

    /// Nodes allocated at least once since the chunk was last empty.
    fn touched(self) -> u64 {
        self.0 >> 26 & FIELD
    }

    fn next(self, top: u64, used: u64, touched: u64, flags: u64) -> Self {
        Self(((self.0 >> 40) + 1) << 40 | flags | touched << 26 | used << 13 | top)
    }
}

pub(super) struct Pool {
    /// The nodes, followed by one word per chunk.
    pub(super) memory: LineMemory,
    chunk_count: u64,
    /// Chunks ever used.
    chunks_touched: AtomicU64,
    /// No chunk below this one has a free node, as far as is known.
    hint: AtomicU64,
    /// Every node allocated in released memory starts above this version.
    version_floor: AtomicU64,
    used: AtomicU64,
}

impl Pool {
    pub(super) fn new(chunk_count: u64, huge: bool) -> std::io::Result<Self> {
        let memory = LineMemory::reserve(chunk_count * CHUNK_NODES * NODE_LINES + chunk_count.div_ceil(8), huge)?;
        let pool = Self {
            memory,
            chunk_count,
            chunks_touched: AtomicU64::new(1),
            hint: AtomicU64::new(0),
            version_floor: AtomicU64::new(super::VERSION_STEP),
            used: AtomicU64::new(0),
        };
        // Node 0 is the anchor.
        pool.chunk(0).store(Chunk(0).next(0, 1, 1, 0).0, Ordering::Relaxed);
        Ok(pool)
    }

    fn chunk(&self, index: u64) -> &AtomicU64 {
        self.memory.word(self.chunk_count * CHUNK_NODES * NODE_LINES + index / 8, (index % 8) as usize)
    }

    fn link(&self, node: u64) -> &AtomicU64 {
        self.memory.word(node * NODE_LINES, 1)
    }

    fn version(&self, node: u64) -> &AtomicU64 {
        self.memory.word(node * NODE_LINES, 0)
    }

    /// Allocates a node. It is marked obsolete; the caller sets its version (`publish`) when it is filled.
    pub(super) fn allocate(&self) -> Option<u64> {
        let start = self.hint.load(Ordering::Relaxed);
        // Nodes below the hint are free only if another thread freed them at this moment: search there last.
        for range in [start..self.chunk_count, 0..start] {
            for chunk in range {
                if let Some(node) = self.allocate_in(chunk) {
                    if chunk != start {
                        self.chunks_touched.fetch_max(chunk + 1, Ordering::Relaxed);
                        let _ = self.hint.compare_exchange(start, chunk, Ordering::Relaxed, Ordering::Relaxed);
                    }
                    self.used.fetch_add(1, Ordering::Relaxed);
                    return Some(node);
                }
            }
        }
        None
    }

    fn allocate_in(&self, index: u64) -> Option<u64> {
        let word = self.chunk(index);
        let mut chunk = Chunk(word.load(Ordering::Acquire));
        loop {
            if chunk.0 & Chunk::RELEASING != 0 {
                return None;
            }
            let (node, next) = if chunk.top() != 0 {
                let node = index * CHUNK_NODES + chunk.top() - 1;
                // The node may be in use by now; then the count of changes differs.
                let below = self.link(node).load(Ordering::Relaxed) & FIELD;
                (node, chunk.next(below, chunk.used() + 1, chunk.touched(), 0))
            } else if chunk.touched() < CHUNK_NODES {
                let node = index * CHUNK_NODES + chunk.touched();
                (node, chunk.next(0, chunk.used() + 1, chunk.touched() + 1, 0))
            } else {
                return None;
            };
            match word.compare_exchange(chunk.0, next.0, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => {
                    if self.version(node).load(Ordering::Relaxed) == 0 {
                        let floor = self.version_floor.load(Ordering::Relaxed);
                        self.version(node).store(floor | super::OBSOLETE, Ordering::Relaxed);
                    }
                    return Some(node);
                }
                Err(seen) => chunk = Chunk(seen),
            }
        }
    }

    /// Frees a node that is marked obsolete and that no new reader can reach.
    pub(super) fn free(&self, node: u64) {
        self.used.fetch_sub(1, Ordering::Relaxed);
        let (index, inside) = (node / CHUNK_NODES, node % CHUNK_NODES);
        let word = self.chunk(index);
        self.version_floor.fetch_max(
            (self.version(node).load(Ordering::Relaxed) & !(super::VERSION_STEP - 1)) + super::VERSION_STEP,
            Ordering::Relaxed,
        );
        let mut chunk = Chunk(word.load(Ordering::Acquire));
        loop {
            let empty = chunk.used() == 1;
            let next = if empty {
                chunk.next(0, 0, 0, Chunk::RELEASING)
            } else {
                self.link(node).store(chunk.top(), Ordering::Relaxed);
                chunk.next(inside + 1, chunk.used() - 1, chunk.touched(), 0)
            };
            match word.compare_exchange(chunk.0, next.0, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) if empty => {
                    let first = index * CHUNK_NODES;
                    self.memory.release(first * NODE_LINES..(first + CHUNK_NODES) * NODE_LINES);
                    word.store(next.next(0, 0, 0, 0).0, Ordering::Release);
                    break;
                }
                Ok(_) => break,
                Err(seen) => chunk = Chunk(seen),
            }
        }
        self.hint.fetch_min(index, Ordering::Relaxed);
    }

    /// Nodes in use, the anchor not counted.
    pub(super) fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    /// Bytes of memory that the nodes have touched and not given back.
    pub(super) fn touched_bytes(&self) -> u64 {
        let touched: u64 = (0..self.chunks_touched.load(Ordering::Relaxed))
            .map(|index| Chunk(self.chunk(index).load(Ordering::Relaxed)).touched())
            .sum();
        touched * NODE_LINES * LINE_BYTES as u64
    }
}
