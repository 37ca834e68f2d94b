//! Grids of GGUF's IQ types, which are constants of these
//! types in ggml.
//!
//! An entry packs the numbers of consecutive values, low
//! bits first: eight of two bits, or four of four bits. A
//! number is the index of a magnitude in the type's
//! ascending list, or of a value in −1, 0, 1.

mod iq1;
mod iq2;
mod iq3;

pub(super) use iq1::IQ1;
pub(super) use iq2::{IQ2_S, IQ2_XS, IQ2_XXS};
pub(super) use iq3::{IQ3_S, IQ3_XXS};
