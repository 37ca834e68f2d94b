//! `gemm_int8`: any number of tokens in INT8. An invocation has
//! four adjacent rows of W, read from memory, for several tokens.
//! Every workgroup quantizes X itself.

use std::sync::LazyLock;

use qgemm_formats::Format;
use qgemm_hal::{
    CheckedGemm, Device, DeviceInfo, Family, Feature, HalError, LaunchPlan, LaunchSequence, Math, Name, TileConfig,
    Unsupported,
};

use super::CONFIG;
use super::gemv::UNITS;
use super::gemv_int8::{UNIT_BYTES, X_TEXTS, XBytes, of_quantized_x};
use crate::shader::{Codes, ENTRY, FourRows, Part};

/// Family name.
const NAME: &str = "gemm_int8";
const MAIN_LOOP: &str = include_str!("../../../shaders/gemm_int8.wgsl");
pub(crate) static SOURCE_HASH: LazyLock<u64> =
    LazyLock::new(|| super::source_hash(&[&X_TEXTS[..], &[UNITS, MAIN_LOOP, ENTRY]].concat()));

/// M tile of a workgroup.
const TILE_M: u32 = 32;
/// Units of X in workgroup memory: the longest block of
/// columns with one factor.
const CHUNK_UNITS: u32 = 8;

/// From many rows to few. Efficiencies and workgroups per
/// unit are measured (H200).
pub(crate) static CONFIGS: &[TileConfig] =
    &[config(256, 256, 2, 480), config(128, 128, 4, 430), config(64, 128, 4, 280)];

const fn config(tile_n: u32, threads: u32, ctas_per_unit: u32, efficiency: u32) -> TileConfig {
    TileConfig {
        family: NAME,
        main_loop: Name::new(NAME),
        math: Math::DotI8,
        tile_n,
        tile_m: TILE_M,
        tile_k: 64,
        threads,
        ctas_per_unit,
        cluster: 1,
        shared_bytes: TILE_M * CHUNK_UNITS * UNIT_BYTES,
        efficiency: (efficiency, 500),
        ..CONFIG
    }
}

/// Tokens of an invocation.
const fn tokens(config: &TileConfig) -> u32 {
    config.tile_m * config.tile_n / 4 / config.threads
}

/// Sources and constants of a config.
pub(crate) fn part(config: &TileConfig, format: Format, x: XBytes) -> Part {
    let constants = vec![
        ("TILE_N", config.tile_n),
        ("TILE_M", config.tile_m),
        ("TOKENS", tokens(config)),
        ("MOVES", tokens(config) - 1),
        x.constant(format),
        ("CHUNK_UNITS", CHUNK_UNITS),
        ("TILE_VECTORS", config.shared_bytes / 16),
    ];
    let [units, load] = x.sources();
    let sources = vec![UNITS, units, load, MAIN_LOOP, ENTRY];
    Part { extensions: "", rows: FourRows::Beside, codes: Codes::Bytes, sources, threads: config.threads, constants }
}

/// Configs that fit into the adapter's workgroup memory.
pub(crate) fn fitting(info: &DeviceInfo) -> impl Iterator<Item = TileConfig> + use<> {
    let available = info.shared_bytes;
    // Software adapters take seconds to compile code unrolled for more tokens.
    let most = if info.features.contains(&Feature::SoftwareAdapter) { 4 } else { u32::MAX };
    CONFIGS.iter().copied().filter(move |c| c.shared_bytes <= available && tokens(c) <= most)
}

/// The kernel family.
#[derive(Debug)]
pub(crate) struct GemmInt8;

impl Family<CheckedGemm> for GemmInt8 {
    fn name(&self) -> &'static str {
        NAME
    }

    fn configs(&self, op: &CheckedGemm, info: &DeviceInfo) -> Result<Vec<TileConfig>, Unsupported> {
        super::served_in_parts(op, info, of_quantized_x(op, fitting(info))?)
    }

    fn prepare(&self, device: &dyn Device, op: &CheckedGemm, plan: &LaunchPlan) -> Result<LaunchSequence, HalError> {
        super::prepare(device, op, plan, |_, _| Some(part(&plan.config, op.format, XBytes::of(op)?)))
    }

    fn source_hash(&self, _: &CheckedGemm, _: &TileConfig) -> u64 {
        *SOURCE_HASH
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invocations_share_rows_and_tokens_without_rest() {
        for config in CONFIGS {
            assert_eq!(tokens(config) * 4 * config.threads, TILE_M * config.tile_n, "{config:?}");
            // Otherwise invocations would miss barriers while loading a chunk.
            assert_eq!(TILE_M * CHUNK_UNITS % config.threads, 0, "{config:?}");
            // Exchanged sums reuse the memory of X.
            assert!(config.threads * 16 <= config.shared_bytes, "{config:?}");
        }
        for format in Format::all() {
            assert_eq!(CHUNK_UNITS as usize * 32 % format.activation_block(), 0, "{format}");
        }
    }
}
