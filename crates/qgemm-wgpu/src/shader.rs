//! WGSL sources, and how they become one shader: named constants, the ABI, the shared parts, the format's
//! `dequant/<stem>.wgsl`, the epilogue, the way D is stored, and the main loop of the family.

use std::fmt::Write;

use qgemm_formats::{DType, Encoding, Format};
use qgemm_hal::TileConfig;
use qgemm_hal::abi::dtype_code;

const ABI: &str = include_str!("../shaders/generated/abi.wgsl");
const PARAMS: &str = include_str!("../shaders/params.wgsl");
const NUMBERS: &str = include_str!("../shaders/numbers.wgsl");
const CODES: &str = include_str!("../shaders/codes.wgsl");
const CODEBOOK: &str = include_str!("../shaders/codebook.wgsl");
const OPERANDS: &str = include_str!("../shaders/operands.wgsl");
const EPILOGUE: &str = include_str!("../shaders/epilogue.wgsl");
const STORE_F32: &str = include_str!("../shaders/store_f32.wgsl");
const STORE_HALF: &str = include_str!("../shaders/store_half.wgsl");

macro_rules! snippets {
    ($($stem:literal)*) => {
        &[$(($stem, include_str!(concat!("../shaders/dequant/", $stem, ".wgsl"))),)*]
    };
}

/// Stem and source of every dequantization snippet.
static DEQUANT: &[(&str, &str)] = snippets![
    "f32" "f16" "bf16"
    "q4_0" "q4_1" "q5_0" "q5_1" "q8_0"
    "q2_k" "q3_k" "q4_k" "q5_k" "q6_k"
    "iq4_nl" "iq4_xs" "mxfp4" "nvfp4"
    "int2" "int3" "int4" "int8" "int8_channel"
    "fp8_e4m3" "fp8_e5m2" "fp8_e4m3_block128" "fp8_e5m2_block128"
];

/// The snippet of a format, if there is one.
pub(crate) fn dequant(format: Format) -> Option<&'static str> {
    DEQUANT.iter().find(|(stem, _)| *stem == format.dequant).map(|(_, source)| *source)
}

/// The constants that a shader is specialised by.
pub(crate) fn prelude(format: Format, x: DType, config: &TileConfig) -> String {
    let mut text = String::new();
    for (name, value) in [
        ("BLOCK_LEN", format.block_len as u32),
        ("BLOCK_BYTES", format.block_bytes as u32),
        ("X_DTYPE", dtype_code(x)),
        ("TILE_N", config.tile_n),
        ("TILE_M", config.tile_m),
        ("TILE_K", config.tile_k),
        ("THREADS", config.threads),
    ] {
        let _ = writeln!(text, "const {name}: u32 = {value}u;");
    }
    match format.encoding {
        Encoding::IntOffset { offset } => {
            let _ = writeln!(text, "const OFFSET: f32 = {offset}.0;");
        }
        Encoding::Codebook(table) => {
            let [a, b, c, d]: [u32; 4] = std::array::from_fn(|word| {
                u32::from_le_bytes(std::array::from_fn(|byte| table[4 * word + byte] as u8))
            });
            let _ = writeln!(text, "const TABLE: vec4<u32> = vec4<u32>({a:#x}u, {b:#x}u, {c:#x}u, {d:#x}u);");
        }
        _ => {}
    }
    text
}

/// A whole shader, entry point `main`.
pub(crate) fn compose(prelude: &str, format: Format, d: DType, dequant: &str, main: &str) -> String {
    let codebook = if matches!(format.encoding, Encoding::Codebook(_)) { CODEBOOK } else { "" };
    let store = if d == DType::F32 { STORE_F32 } else { STORE_HALF };
    [prelude, ABI, PARAMS, NUMBERS, CODES, codebook, dequant, OPERANDS, EPILOGUE, store, main].join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::families::{gemm, gemv};
    use wgpu::naga;

    fn validate(source: &str, what: &str) {
        let module = naga::front::wgsl::parse_str(source)
            .unwrap_or_else(|e| panic!("{what} does not parse:\n{}", e.emit_to_string(source)));
        naga::valid::Validator::new(naga::valid::ValidationFlags::all(), naga::valid::Capabilities::IMMEDIATES)
            .validate(&module)
            .unwrap_or_else(|e| panic!("{what} is invalid:\n{}", e.emit_to_string(source)));
    }

    #[test]
    fn every_shader_is_valid() {
        let mut count = 0;
        for format in Format::all() {
            let dequant = dequant(format).unwrap_or_else(|| panic!("{format} has no dequant/{}.wgsl", format.dequant));
            for (main, configs) in [(gemv::SOURCE, gemv::CONFIGS), (gemm::SOURCE, gemm::CONFIGS)] {
                for config in configs {
                    for (x, d) in DType::ALL.into_iter().flat_map(|x| DType::ALL.map(|d| (x, d))) {
                        let prelude = prelude(format, x, config);
                        let what = format!("{} of {format} with {x} to {d}", config.family);
                        validate(&compose(&prelude, format, d, dequant, main), &what);
                        count += 1;
                    }
                }
            }
        }
        assert_eq!(count, Format::all().count() * (gemv::CONFIGS.len() + gemm::CONFIGS.len()) * 9);
    }

    #[test]
    fn every_snippet_belongs_to_a_format() {
        for (stem, _) in DEQUANT {
            assert!(Format::all().any(|f| f.dequant == *stem), "no format uses dequant/{stem}.wgsl");
        }
    }
}
