//! GGUF, the file format of ggml and llama.cpp: reader (versions 2
//! and 3) and writer (version 3).
//!
//! ```text
//! "GGUF" | version u32 | tensor count u64 | pair count u64 | pairs: key, type, value | tensor descriptions
//! | padding | tensor data, each tensor at a multiple of `general.alignment` (32 when absent)
//! ```
//!
//! Numbers are little-endian. Dimensions are innermost first (K before N).
//! Definition: `docs/gguf.md` of ggml.
//!
//! Metadata strings should be UTF-8. Other strings are kept as bytes
//! and written back unchanged. Keys and tensor names must be UTF-8,
//! because programs look them up.

mod reader;
pub(super) mod split;
mod value;
mod writer;

pub use reader::{GgufFile, GgufTensor};
pub use value::{GgufArray, GgufScalar, GgufValue};
pub use writer::{GgufHeader, GgufWriter};

/// Magic number: the first four bytes of a file.
pub(super) const MAGIC: &[u8; 4] = b"GGUF";
/// Alignment of tensor data without `general.alignment`.
const DEFAULT_ALIGNMENT: usize = 32;
const ALIGNMENT_KEY: &str = "general.alignment";
/// Maximum number of dimensions in ggml.
const MAX_DIMS: usize = 4;

/// Buffer size of a tensor name in ggml, with the terminating
/// zero. Names must be shorter.
pub const NAME_BYTES: usize = 64;

/// ggml's name of a tensor type, including known removed types.
pub fn ggml_type_name(ggml_type: u32) -> Option<&'static str> {
    Some(match ggml_type {
        0 => "F32",
        1 => "F16",
        2 => "Q4_0",
        3 => "Q4_1",
        4 => "Q4_2",
        5 => "Q4_3",
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
        31 => "Q4_0_4_4",
        32 => "Q4_0_4_8",
        33 => "Q4_0_8_8",
        34 => "TQ1_0",
        35 => "TQ2_0",
        36 => "IQ4_NL_4_4",
        37 => "IQ4_NL_4_8",
        38 => "IQ4_NL_8_8",
        39 => "MXFP4",
        40 => "NVFP4",
        41 => "Q1_0",
        42 => "Q2_0",
        _ => return None,
    })
}

/// `general.file_type` (`enum llama_ftype`) for files that are
/// mostly of type `ggml_type`.
///
/// `None` without an llama.cpp number. K-quants have the number of the
/// pure type, not of a mixture.
pub fn file_type(ggml_type: u32) -> Option<u32> {
    Some(match ggml_type {
        0 => 0,
        1 => 1,
        2 => 2,
        3 => 3,
        8 => 7,
        6 => 8,
        7 => 9,
        10 => 10,
        11 => 11,
        12 => 14,
        13 => 16,
        14 => 18,
        20 => 25,
        23 => 30,
        30 => 32,
        35 => 37,
        39 => 38,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Format;

    #[test]
    fn every_gguf_format_has_a_file_type_of_its_own() {
        let types: Vec<u32> = Format::all().filter_map(|format| format.ggml_type).collect();
        let mut file_types: Vec<u32> = types.iter().filter_map(|&ggml_type| file_type(ggml_type)).collect();
        file_types.sort_unstable();
        file_types.dedup();
        assert_eq!(file_types.len(), types.len());
    }
}
