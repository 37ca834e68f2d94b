//! `gemv_int8`: few tokens, quantized to eight bits. An invocation has four neighbouring rows of W, and slices of a
//! workgroup share K; every workgroup quantizes X for itself.

use std::sync::LazyLock;

use qgemm_formats::{Format, ScaleType, XCode, XFactor};
use qgemm_hal::{
    CheckedGemm, Device, DeviceInfo, Family, HalError, LaunchPlan, LaunchSequence, Math, TileConfig, Unsupported,
};

use super::gemv::{self, LARGE, SMALL, WIDE, slices};
use crate::shader::{Codes, FourRows, Part};

/// Name of the family.
const NAME: &str = "gemv_int8";
const X_UNITS: &str = include_str!("../../../shaders/x_units.wgsl");
const X_INT8: &str = include_str!("../../../shaders/x_int8.wgsl");
const X_CODES: &str = include_str!("../../../shaders/x_codes.wgsl");
/// What brings X to workgroup memory.
pub(super) const X_TEXTS: [&str; 3] = [X_UNITS, X_INT8, X_CODES];
const INTEGER: &str = include_str!("../../../shaders/gemv/integer.wgsl");
pub(crate) static SOURCE_HASH: LazyLock<u64> =
    LazyLock::new(|| gemv::source_hash(&[&X_TEXTS[..], &[INTEGER]].concat()));

/// Bytes of a unit of X in workgroup memory: 32 codes, their factor and their sums.
pub(super) const UNIT_BYTES: u32 = 48;

/// For 1, 2, 4 and 8 tokens; tiles of 64 rows for weights of few rows. Efficiencies as measured on an H200 with Q4_0,
/// 28672x8192.
pub(crate) static CONFIGS: &[TileConfig] = &[
    config(128, 1, WIDE, LARGE),
    config(128, 1, 256, LARGE),
    config(64, 1, 256, LARGE),
    config(128, 2, WIDE, LARGE),
    config(128, 2, 256, LARGE),
    config(64, 2, 256, LARGE),
    config(128, 4, 256, LARGE),
    config(64, 4, 256, LARGE),
    config(128, 8, 128, LARGE),
    config(64, 8, 128, LARGE),
    config(64, 1, 128, SMALL),
    config(64, 2, 128, SMALL),
    config(64, 4, 128, SMALL),
    config(64, 8, 64, SMALL),
];

const fn config(tile_n: u32, tokens: u32, threads: u32, shared_bytes: u32) -> TileConfig {
    TileConfig {
        family: NAME,
        main_loop: NAME,
        math: Math::DotI8,
        tile_n,
        k_groups: slices(tile_n, threads),
        efficiency: match (tile_n, tokens) {
            (128, 8) => (350, 780),
            (128, _) => (230, 780),
            (_, 8) => (270, 700),
            _ => (180, 700),
        },
        // Eight tokens take so many registers that no more have room.
        ctas_per_unit: if tokens == 8 { 3 } else { 1024 / threads },
        cluster: 1,
        ..gemv::config(tokens, threads, shared_bytes)
    }
}

/// The sources and constants of a configuration.
pub(crate) fn part(config: &TileConfig, format: Format, x: XBytes, subgroups: bool) -> Part {
    let chunk_units = 1 << (config.shared_bytes / UNIT_BYTES / config.tile_m).ilog2();
    let x_vectors = config.tile_m * chunk_units * (UNIT_BYTES / 16);
    let constants = vec![
        ("TILE_N", config.tile_n),
        ("TILE_M", config.tile_m),
        ("THREADS", config.threads),
        x.constant(format),
        ("CHUNK_UNITS", chunk_units),
        ("TILE_VECTORS", x_vectors.max(config.threads * config.tile_m)),
    ];
    let sources = gemv::sources(&[&x.sources()[..], &[INTEGER]].concat(), subgroups);
    Part { extensions: "", rows: FourRows::Beside, codes: Codes::Bytes, sources, constants }
}

/// How X becomes bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum XBytes {
    /// Kernels quantize it.
    Quantized,
    /// It is given so, with a scale for so many columns, 0 for all of a token.
    Given(u32),
}

impl XBytes {
    /// Of `op`; `None` where X is in other codes, or permuted.
    pub fn of(op: &CheckedGemm) -> Option<Self> {
        let Some(planes) = op.x.planes else { return Some(Self::Quantized) };
        let parts = planes.parts;
        let scaled = parts.scale == Some(ScaleType::F32) && parts.factor == XFactor::None;
        let serves = parts.code == XCode::Int8 && scaled && !op.k_order;
        serves.then_some(Self::Given(parts.block.unwrap_or(0) as u32))
    }

    /// Its texts.
    pub fn sources(self) -> [&'static str; 2] {
        [X_UNITS, if self == Self::Quantized { X_INT8 } else { X_CODES }]
    }

    /// Columns that share a factor.
    pub fn constant(self, format: Format) -> (&'static str, u32) {
        match self {
            Self::Quantized => ("X_BLOCK", format.activation_block() as u32),
            Self::Given(block) => ("SCALE_BLOCK", block),
        }
    }
}

/// Whether weights of `format` are integers of up to eight bits. Numbers of a table would have to be looked up one by
/// one, which costs as much as multiplying them in f32 (on an H200 with IQ4_NL).
pub(crate) fn holds_bytes(format: Format) -> bool {
    format.encoding.is_integer()
}

/// `configs` for X that kernels quantize themselves, or that is given as bytes.
///
/// # Errors
/// Why integers may not be multiplied instead of activations and weights.
pub(crate) fn of_quantized_x(
    op: &CheckedGemm,
    configs: impl Iterator<Item = TileConfig>,
) -> Result<impl Iterator<Item = TileConfig>, Unsupported> {
    let x = XBytes::of(op).ok_or_else(|| {
        Unsupported::new(format!(
            "multiplies signed bytes with scales in f32, not permuted, and X is in {}",
            op.x.format
        ))
    })?;
    if x == XBytes::Quantized && !op.x_precision.allows_q8() {
        return Err(Unsupported::new("quantizes activations, which the problem does not allow"));
    }
    if !holds_bytes(op.format) {
        return Err(Unsupported::new(format!("multiplies integers of eight bits, which {} does not hold", op.format)));
    }
    let x_format = match x {
        XBytes::Quantized => op.format.activation_format(),
        XBytes::Given(_) => op.x.format,
    };
    Ok(configs.map(move |config| TileConfig { x_format, ..config }))
}

/// The family.
#[derive(Debug)]
pub(crate) struct GemvInt8;

impl Family<CheckedGemm> for GemvInt8 {
    fn name(&self) -> &'static str {
        NAME
    }

    fn configs(&self, op: &CheckedGemm, info: &DeviceInfo) -> Result<Vec<TileConfig>, Unsupported> {
        gemv::check_tokens(op)?;
        super::served_in_parts(op, info, of_quantized_x(op, gemv::fitting(CONFIGS, op, info))?)
    }

    fn prepare(&self, device: &dyn Device, op: &CheckedGemm, plan: &LaunchPlan) -> Result<LaunchSequence, HalError> {
        let subgroups = device.info().features.contains("subgroups");
        super::prepare(device, op, plan, |_, _| Some(part(&plan.config, op.format, XBytes::of(op)?, subgroups)))
    }

    fn source_hash(&self, _: &CheckedGemm, _: &TileConfig) -> u64 {
        *SOURCE_HASH
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_of_activations_fit_and_take_all_invocations() {
        for config in CONFIGS {
            let part = part(config, "q4_k".parse().expect("a format"), XBytes::Quantized, true);
            let of = |name| part.constants.iter().find(|(n, _)| *n == name).expect("a constant").1;
            // Else invocations would miss barriers while they bring a chunk.
            assert_eq!(of("TILE_M") * of("CHUNK_UNITS") % of("THREADS"), 0, "{config:?}");
            // Else a block of columns that share a factor would be cut.
            assert_eq!(of("CHUNK_UNITS") * 32 % of("X_BLOCK"), 0, "{config:?}");
            assert!(of("TILE_VECTORS") * 16 <= config.shared_bytes, "{config:?}");
        }
    }
}
