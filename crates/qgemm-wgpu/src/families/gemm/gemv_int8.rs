//! `gemv_int8`: few tokens in INT8. An invocation has four adjacent
//! rows of W, and slices of a workgroup split K. Every
//! workgroup quantizes X itself.

use std::sync::LazyLock;

use qgemm_formats::{Format, ScaleType, XCode, XFactor};
use qgemm_hal::{
    CheckedGemm, Device, DeviceInfo, Family, Feature, HalError, LaunchPlan, LaunchSequence, Math, Name, TileConfig,
    Unsupported,
};

use super::gemv::{self, LARGE, SMALL, WIDE, slices};
use crate::shader::{Codes, FourRows, Part};

/// Family name.
const NAME: &str = "gemv_int8";
const X_UNITS: &str = include_str!("../../../shaders/x_units.wgsl");
const X_INT8: &str = include_str!("../../../shaders/x_int8.wgsl");
const X_CODES: &str = include_str!("../../../shaders/x_codes.wgsl");
/// Sources that load X to workgroup memory.
pub(super) const X_TEXTS: [&str; 3] = [X_UNITS, X_INT8, X_CODES];
const INTEGER: &str = include_str!("../../../shaders/gemv/integer.wgsl");
pub(crate) static SOURCE_HASH: LazyLock<u64> =
    LazyLock::new(|| gemv::source_hash(&[&X_TEXTS[..], &[INTEGER]].concat()));

/// Bytes of a unit of X in workgroup memory: 32 codes,
/// their factor and their sums.
pub(super) const UNIT_BYTES: u32 = 48;

/// Configs for 1, 2, 4 and 8 tokens, with tiles of
/// 64 rows for weights of few rows. Efficiencies are measured (H200).
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
        main_loop: Name::new(NAME),
        math: Math::DotI8,
        tile_n,
        k_groups: slices(tile_n, threads),
        efficiency: match (tile_n, tokens) {
            (128, 8) => (350, 780),
            (128, _) => (230, 780),
            (_, 8) => (270, 700),
            _ => (180, 700),
        },
        // Eight tokens take so many registers that fewer workgroups fit.
        ctas_per_unit: if tokens == 8 { 3 } else { 1024 / threads },
        cluster: 1,
        ..gemv::config(tokens, threads, shared_bytes)
    }
}

/// Sources and constants of a config.
pub(crate) fn part(config: &TileConfig, format: Format, x: XBytes, subgroups: bool) -> Part {
    let chunk_units = 1 << (config.shared_bytes / UNIT_BYTES / config.tile_m).ilog2();
    let x_vectors = config.tile_m * chunk_units * (UNIT_BYTES / 16);
    let constants = vec![
        ("TILE_N", config.tile_n),
        ("TILE_M", config.tile_m),
        x.constant(format),
        ("CHUNK_UNITS", chunk_units),
        ("TILE_VECTORS", x_vectors.max(config.threads * config.tile_m)),
    ];
    let sources = gemv::sources(&[&x.sources()[..], &[INTEGER]].concat(), subgroups);
    Part { extensions: "", rows: FourRows::Beside, codes: Codes::Bytes, sources, threads: config.threads, constants }
}

/// Source of the INT8 X.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum XBytes {
    /// Kernels quantize X.
    Quantized,
    /// X is given in INT8, with a scale for this many
    /// columns; 0 for token scales.
    Given(u32),
}

impl XBytes {
    /// The source for `op`; `None` when X has another
    /// quantized format or is permuted.
    pub fn of(op: &CheckedGemm) -> Option<Self> {
        let Some(planes) = op.x.planes else { return Some(Self::Quantized) };
        let parts = planes.parts;
        let scaled = parts.scale == Some(ScaleType::F32) && parts.factor == XFactor::None;
        let serves = parts.code == XCode::Int8 && scaled && !op.k_order;
        serves.then_some(Self::Given(parts.block.unwrap_or(0) as u32))
    }

    /// WGSL sources.
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

/// Whether weights of `format` are integers of up to 8
/// bits. Codebook values would need individual lookups,
/// which cost as much as f32 products.
pub(crate) fn holds_bytes(format: Format) -> bool {
    format.encoding.is_integer()
}

/// The `configs` for X that kernels quantize, or
/// that is given in INT8.
///
/// # Errors
/// Why INT8 must not be used.
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

/// The kernel family.
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
        let subgroups = device.info().features.contains(&Feature::Subgroups);
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
            // Otherwise invocations would miss barriers while loading a chunk.
            assert_eq!(of("TILE_M") * of("CHUNK_UNITS") % part.threads, 0, "{config:?}");
            // Otherwise a block of columns with one factor would be split.
            assert_eq!(of("CHUNK_UNITS") * 32 % of("X_BLOCK"), 0, "{config:?}");
            assert!(of("TILE_VECTORS") * 16 <= config.shared_bytes, "{config:?}");
        }
    }
}
