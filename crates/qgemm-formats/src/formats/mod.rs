//! Registry of formats ([`ALL`]). Each file has one format, or formats
//! that differ by a parameter.

pub mod affine_group;
pub(crate) mod field;
pub(crate) mod fit;
pub mod fp8;
pub mod grid;
pub mod int8_channel;
pub mod int_group;
pub mod iq1_s;
pub mod iq4_nl;
pub mod iq4_xs;
pub(crate) mod linear;
pub(crate) mod matrix;
pub mod mxfp4;
pub mod mxfp8;
pub(crate) mod nibbles;
pub mod nvfp4;
pub mod plain;
pub mod q1_0;
pub mod q2_k;
pub mod q3_k;
pub mod q4_0;
pub mod q4_1;
pub mod q4_k;
pub mod q5_0;
pub mod q5_1;
pub mod q5_k;
pub mod q6_k;
pub mod q8_0;
mod scale_min;
pub mod ternary;

use crate::desc::FormatDesc;

/// All formats, in the order of tables.
pub static ALL: &[&FormatDesc] = &[
    &plain::F32,
    &plain::F16,
    &plain::BF16,
    &q4_0::Q4_0,
    &q4_1::Q4_1,
    &q5_0::Q5_0,
    &q5_1::Q5_1,
    &q8_0::Q8_0,
    &q2_k::Q2_K,
    &q3_k::Q3_K,
    &q4_k::Q4_K,
    &q5_k::Q5_K,
    &q6_k::Q6_K,
    &iq4_nl::IQ4_NL,
    &iq4_xs::IQ4_XS,
    &iq1_s::IQ1_S,
    &grid::IQ1_M,
    &grid::IQ2,
    &grid::IQ3_XXS,
    &grid::IQ3_S,
    &q1_0::Q1_0,
    &ternary::TQ2_0,
    &ternary::Q2_0_G64,
    &ternary::Q2_0_G128,
    &mxfp4::MXFP4,
    &int_group::INT2_G32,
    &int_group::INT2_G64,
    &int_group::INT2_G128,
    &int_group::INT3_G32,
    &int_group::INT3_G64,
    &int_group::INT3_G128,
    &int_group::INT4_G32,
    &int_group::INT4_G64,
    &int_group::INT4_G128,
    &int_group::INT8_G32,
    &int_group::INT8_G64,
    &int_group::INT8_G128,
    &affine_group::AFFINE2_G64,
    &affine_group::AFFINE3_G64,
    &affine_group::AFFINE4_G64,
    &affine_group::AFFINE5_G64,
    &affine_group::AFFINE6_G64,
    &affine_group::AFFINE8_G32,
    &affine_group::AFFINE8_G64,
    &affine_group::CENTERED4_G32,
    &affine_group::CENTERED4_G64,
    &int8_channel::INT8_CHANNEL,
    &fp8::FP8_E4M3,
    &fp8::FP8_E5M2,
    &fp8::FP8_E4M3_BLOCK128,
    &fp8::FP8_E5M2_BLOCK128,
    &mxfp8::MXFP8,
    &mxfp8::MXFP8_E5M2,
    &nvfp4::NVFP4,
];
