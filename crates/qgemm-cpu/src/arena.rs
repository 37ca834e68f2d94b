//! Per-thread scratch memory, kept between launches. A launch does not
//! allocate once its threads have run one of its size.

use std::cell::Cell;
use std::thread::LocalKey;

use bytemuck::{Pod, Zeroable};

/// One cache line.
#[repr(C, align(64))]
#[derive(Clone, Copy, Pod, Zeroable)]
struct Line([f32; LINE]);

const LINE: usize = 16;

type Arena = Cell<Vec<Line>>;

thread_local! {
    static ACTIVATIONS: Arena = const { Cell::new(Vec::new()) };
    static TILE: Arena = const { Cell::new(Vec::new()) };
    static SUMS: Arena = const { Cell::new(Vec::new()) };
}

/// Calls `work` with `len` floats for activations, shared by all threads
/// of a launch. The contents are unspecified.
pub fn with_activations<R>(len: usize, work: impl FnOnce(&mut [f32]) -> R) -> R {
    with(&ACTIVATIONS, len, work)
}

/// Calls `work` with `len` floats for one thread's results.
/// The contents are unspecified.
pub fn with_tile<R>(len: usize, work: impl FnOnce(&mut [f32]) -> R) -> R {
    with(&TILE, len, work)
}

/// Calls `work` with `len` floats for accumulators. The
/// contents are unspecified.
pub fn with_sums<R>(len: usize, work: impl FnOnce(&mut [f32]) -> R) -> R {
    with(&SUMS, len, work)
}

/// Grows this thread's memory for activations, accumulators and
/// results to this many floats.
pub fn reserve(activations: usize, sums: usize, tile: usize) {
    with_activations(activations, |_| ());
    with_sums(sums, |_| ());
    with_tile(tile, |_| ());
}

/// Floats of this thread's memory, in the order of [`reserve`].
#[cfg(test)]
pub fn reserved() -> [usize; 3] {
    [&ACTIVATIONS, &SUMS, &TILE].map(|arena| {
        let lines = arena.take();
        let len = lines.len() * LINE;
        arena.set(lines);
        len
    })
}

/// The memory is taken out while in use. If the thread
/// pool runs another launch on this thread meanwhile, that
/// launch allocates separate memory.
fn with<R>(arena: &'static LocalKey<Arena>, len: usize, work: impl FnOnce(&mut [f32]) -> R) -> R {
    let mut lines = arena.take();
    let needed = len.div_ceil(LINE);
    if lines.len() < needed {
        lines.resize(needed, Line::zeroed());
    }
    let result = work(&mut bytemuck::cast_slice_mut(&mut lines)[..len]);
    arena.set(lines);
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_kept_aligned_and_not_shared_by_nested_uses() {
        let first = with_tile(100, |a| {
            a.fill(1.0);
            let nested = with_tile(100, |b| b.as_ptr() as usize);
            assert_ne!(a.as_ptr() as usize, nested);
            a.as_ptr() as usize
        });
        assert_eq!(first % 64, 0);
        assert_eq!(with_tile(50, |a| (a.len(), a.as_ptr() as usize, a[49])), (50, first, 1.0));
    }
}
