//! `gemv`: few tokens. An invocation has one row in
//! each of four W tiles, its neighbours the next rows.
//! Slices of a workgroup split K.

use std::sync::LazyLock;

use qgemm_hal::{
    CheckedGemm, Device, DeviceInfo, Family, Feature, HalError, LaunchPlan, LaunchSequence, Name, TileConfig,
    Unsupported,
};

use super::CONFIG;
use crate::shader::{Codes, ENTRY, FourRows, Part, table_bytes};
use crate::weight_code::WeightCode;

/// Family name.
const NAME: &str = "gemv";
pub(super) const UNITS: &str = include_str!("../../../shaders/units.wgsl");
const MAIN_LOOP: &str = include_str!("../../../shaders/gemv/main_loop.wgsl");
const FACTORED: &str = include_str!("../../../shaders/gemv/factored.wgsl");
const X_F32: &str = include_str!("../../../shaders/gemv/x_f32.wgsl");
const DECODED: &str = include_str!("../../../shaders/gemv/decoded.wgsl");
const REDUCE_WORKGROUP: &str = include_str!("../../../shaders/gemv/reduce_workgroup.wgsl");
const REDUCE_SUBGROUP: &str = include_str!("../../../shaders/gemv/reduce_subgroup.wgsl");

pub(crate) static SOURCE_HASH: LazyLock<u64> = LazyLock::new(|| source_hash(&[X_F32, FACTORED, DECODED]));

/// N tile of a workgroup: four W tiles.
const TILE_N: u32 = 64;
/// Workgroup size that not every adapter supports.
pub(super) const WIDE: u32 = 512;
/// Maximum tokens. More than one tile of tokens
/// reads W once per tile.
const MAX_TOKENS: u32 = 32;
/// Maximum tokens for which scales apply to sums. For more tokens,
/// weights are scaled once for all of them.
const FACTORED_TOKENS: u32 = 2;

/// Workgroup memory of the configs for adapters with enough
/// of it, and for all adapters.
pub(super) const LARGE: u32 = 24 << 10;
pub(super) const SMALL: u32 = 12 << 10;

/// Configs for 1, 2, 4 and 8 tokens each, with more
/// K slices for weights of few rows.
pub(crate) static CONFIGS: &[TileConfig] = &[
    config(1, 256, LARGE),
    config(1, WIDE, LARGE),
    config(2, 256, LARGE),
    config(2, WIDE, LARGE),
    config(4, 256, LARGE),
    config(8, 128, LARGE),
    config(1, 128, SMALL),
    config(2, 128, SMALL),
    config(4, 128, SMALL),
    config(8, 64, SMALL),
];

pub(super) const fn config(tokens: u32, threads: u32, shared_bytes: u32) -> TileConfig {
    TileConfig {
        family: NAME,
        main_loop: Name::new(if tokens <= FACTORED_TOKENS { "gemv_factored" } else { "gemv_decoded" }),
        tile_n: TILE_N,
        tile_m: tokens,
        tile_k: 64,
        threads,
        ctas_per_unit: 1024 / threads,
        cluster: 1,
        k_groups: slices(TILE_N, threads),
        shared_bytes,
        efficiency: if threads == WIDE { (220, 480) } else { (220, 500) },
        ..CONFIG
    }
}

/// K slices of a workgroup; an invocation
/// has four rows of W.
pub(super) const fn slices(tile_n: u32, threads: u32) -> u32 {
    threads * 4 / tile_n
}

/// Sources and constants of a config.
pub(crate) fn part(config: &TileConfig, code: &WeightCode, subgroups: bool) -> Part {
    // A unit of X takes one vector more than its values.
    let unit = code.unit as u32;
    let unit_bytes = (unit / 4 + 1) * 16;
    let chunk_units = (config.shared_bytes / unit_bytes / config.tile_m).next_power_of_two() / 2;
    let x_vectors = config.tile_m * chunk_units * (unit / 4 + 1);
    let constants = vec![
        ("TILE_N", config.tile_n),
        ("TILE_M", config.tile_m),
        ("CHUNK_UNITS", chunk_units),
        ("TILE_VECTORS", x_vectors.max(config.threads * config.tile_m)),
    ];
    let multiply = if config.tile_m <= FACTORED_TOKENS { FACTORED } else { DECODED };
    Part {
        extensions: "",
        rows: FourRows::OfTiles,
        codes: Codes::Numbers,
        sources: sources(&[X_F32, multiply], subgroups),
        threads: config.threads,
        constants,
    }
}

/// Sources of a few-token shader, with `own` for
/// loading X and multiplying.
pub(super) fn sources(own: &[&'static str], subgroups: bool) -> Vec<&'static str> {
    let mut sources = vec!["alias Accumulators = array<vec4<f32>, TILE_M>;", UNITS, MAIN_LOOP];
    sources.extend(own);
    match subgroups {
        true => sources.push(REDUCE_SUBGROUP),
        false => sources.extend([REDUCE_WORKGROUP, ENTRY]),
    }
    sources
}

/// Hash of the sources that a few-token family composes with
/// `own`, with or without subgroups.
pub(super) fn source_hash(own: &[&'static str]) -> u64 {
    super::source_hash(&[own, &[UNITS, MAIN_LOOP, REDUCE_WORKGROUP, REDUCE_SUBGROUP, ENTRY]].concat())
}

/// The `configs` that fit the adapter's limits, with
/// the most workgroup memory.
pub(crate) fn fitting<'a>(
    configs: &'a [TileConfig],
    op: &CheckedGemm,
    info: &DeviceInfo,
) -> impl Iterator<Item = TileConfig> + use<'a> {
    let available = info.shared_bytes.saturating_sub(table_bytes(op.format));
    let size = configs.iter().map(|c| c.shared_bytes).filter(|&bytes| bytes <= available).max();
    // Software adapters take seconds to compile code
    // unrolled for eight tokens.
    let most = if info.features.contains(&Feature::SoftwareAdapter) { 4 } else { 8 };
    let tokens = (op.m as u32).next_power_of_two().min(most);
    let threads = if info.features.contains(&Feature::WideWorkgroups) { WIDE } else { 256 };
    let fits = move |c: &TileConfig| Some(c.shared_bytes) == size && c.tile_m == tokens && c.threads <= threads;
    configs.iter().copied().filter(fits)
}

/// Checks that the problem has few tokens.
pub(crate) fn check_tokens(op: &CheckedGemm) -> Result<(), Unsupported> {
    if op.m > MAX_TOKENS as usize {
        return Err(Unsupported::new(format!("serves at most {MAX_TOKENS} tokens")));
    }
    if op.batch_invariant {
        return Err(Unsupported::new("adds in another order than gemm, which serves larger batches"));
    }
    Ok(())
}

/// The kernel family.
#[derive(Debug)]
pub(crate) struct Gemv;

impl Family<CheckedGemm> for Gemv {
    fn name(&self) -> &'static str {
        NAME
    }

    fn configs(&self, op: &CheckedGemm, info: &DeviceInfo) -> Result<Vec<TileConfig>, Unsupported> {
        check_tokens(op)?;
        super::served_in_parts(op, info, super::of_plain_x(op, fitting(CONFIGS, op, info))?)
    }

    fn prepare(&self, device: &dyn Device, op: &CheckedGemm, plan: &LaunchPlan) -> Result<LaunchSequence, HalError> {
        let subgroups = device.info().features.contains(&Feature::Subgroups);
        super::prepare(device, op, plan, |code, _| Some(part(&plan.config, code, subgroups)))
    }

    fn source_hash(&self, _: &CheckedGemm, _: &TileConfig) -> u64 {
        *SOURCE_HASH
    }
}
