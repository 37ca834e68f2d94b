//! [`Prefetch`]: software prefetching. Hardware prefetchers do not follow tiles that are read in turns, and stream a single tile at half the rate.

use qgemm_formats::prepack::PackedLayout;

/// A position to prefetch, possibly none. Addresses that
/// are not memory are harmless.
#[derive(Clone, Copy, Debug)]
pub struct Prefetch(*const u8);

impl Default for Prefetch {
    fn default() -> Self {
        Self(std::ptr::null())
    }
}

impl Prefetch {
    /// Position `at`, or after it.
    pub fn new(at: *const u8) -> Self {
        Self(at)
    }

    /// The position `bytes` later.
    #[inline(always)]
    pub fn skip(self, bytes: usize) -> Self {
        Self(self.0.wrapping_add(bytes))
    }

    /// Prefetches the scale records of the k-tile of
    /// `layout` at this position.
    #[inline(always)]
    pub fn fetch_records(self, layout: &PackedLayout) {
        let codes = layout.scales.first().map_or(layout.k_tile_bytes, |plane| plane.offset);
        self.skip(codes).fetch(layout.k_tile_bytes - codes);
    }

    /// Prefetches `bytes` bytes to the L2 cache, from where they arrive
    /// in time. Prefetching to the L1 cache is much slower.
    #[inline(always)]
    pub fn fetch(self, bytes: usize) {
        const LINE: usize = 64;
        for line in (0..bytes).step_by(LINE) {
            #[cfg(target_arch = "x86_64")]
            {
                use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
                // SAFETY: every x86-64 CPU has the instruction. It reads nothing that
                // the program sees, and ignores addresses that are not memory.
                unsafe { _mm_prefetch::<_MM_HINT_T1>(self.0.wrapping_add(line).cast()) };
            }
            #[cfg(target_arch = "aarch64")]
            // SAFETY: as on x86-64.
            unsafe {
                std::arch::asm!(
                    "prfm pldl2keep, [{at}]",
                    at = in(reg) self.0.wrapping_add(line),
                    options(nostack, preserves_flags, readonly)
                );
            }
            #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
            let _ = line;
        }
    }
}
