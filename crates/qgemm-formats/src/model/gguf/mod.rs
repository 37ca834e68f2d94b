//! GGUF, the file format of ggml and llama.cpp: reader (versions 2 and 3) and writer (version 3).
//!
//! ```text
//! "GGUF" | version u32 | tensor count u64 | pair count u64 | pairs: key, type, value | tensor descriptions
//! | padding | tensor data, each tensor at a multiple of `general.alignment` (32 when absent)
//! ```
//!
//! Everything is little-endian; a tensor's dimensions stand innermost first (K before N). Definition:
//! `docs/gguf.md` of ggml.

mod reader;
mod value;
mod writer;

pub use reader::{GgufFile, GgufTensor};
pub use value::{GgufArray, GgufScalar, GgufValue};
pub use writer::{GgufHeader, GgufWriter};

/// First four bytes of a file.
pub(super) const MAGIC: &[u8; 4] = b"GGUF";
/// Alignment of tensor data where `general.alignment` does not say otherwise.
const DEFAULT_ALIGNMENT: usize = 32;
const ALIGNMENT_KEY: &str = "general.alignment";
/// ggml has no tensors of more dimensions.
const MAX_DIMS: usize = 4;

/// What ggml calls the tensor type `ggml_type`, as far as it is known here.
pub fn ggml_type_name(ggml_type: u32) -> Option<&'static str> {
    Some(match ggml_type {
        0 => "F32",
        1 => "F16",
        2 => "Q4_0",
        3 => "Q4_1",
        6 => "Q5_0",
        7 => "Q5_1",
        8 => "Q8_0",
        9 => "Q8_1",
        10 => "Q2_K",
        11 => "Q3_K",
        12 => "Q4_K",
        13 => "Q5_K",
        14 => "Q6_K",
        15 => "Q8_K",
        16 => "IQ2_XXS",
        17 => "IQ2_XS",
        18 => "IQ3_XXS",
        19 => "IQ1_S",
        20 => "IQ4_NL",
        21 => "IQ3_S",
        22 => "IQ2_S",
        23 => "IQ4_XS",
        24 => "I8",
        25 => "I16",
        26 => "I32",
        27 => "I64",
        28 => "F64",
        29 => "IQ1_M",
        30 => "BF16",
        34 => "TQ1_0",
        35 => "TQ2_0",
        39 => "MXFP4",
        40 => "NVFP4",
        _ => return None,
    })
}
