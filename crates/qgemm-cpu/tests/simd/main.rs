//! SIMD levels against plain computations, and with other tokens
//! or tiles in the same call.

mod attention;
mod decoding;
mod epilogue;
mod products;
mod rows;

use qgemm_cpu::simd::{Quantization, Simd};
use qgemm_formats::Format;
use qgemm_formats::prepack::{FragmentLayout, PackedLayout};
use qgemm_hal::SimdLevel;

/// Every level that this CPU supports.
pub fn levels() -> impl Iterator<Item = &'static Simd> {
    SimdLevel::ALL.into_iter().filter_map(Simd::new)
}

/// Reproducible pseudo-random words.
pub fn words(seed: u32) -> impl FnMut() -> u32 {
    let mut state = seed;
    move || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        state >> 8
    }
}

/// Formats with integer codes of up to 8 bits.
pub fn integer_formats() -> impl Iterator<Item = (PackedLayout, Quantization)> {
    Format::all().filter_map(|format| {
        let layout = PackedLayout::new(format, FragmentLayout::Simd16).expect("a layout");
        Quantization::new(format, format.activation_block()).map(|how| (layout, how))
    })
}
