//! `gemm`: any number of tokens. Tiles of W and X are
//! decoded into workgroup memory.

use std::sync::LazyLock;

use qgemm_hal::{
    CheckedGemm, Device, DeviceInfo, Family, HalError, LaunchPlan, LaunchSequence, Name, TileConfig, Unsupported,
};

use super::CONFIG;
use crate::shader::{Codes, ENTRY, FourRows, Part, table_bytes};

/// Family name.
const NAME: &str = "gemm";
const QUADS: &str = include_str!("../../../shaders/quads.wgsl");
const MAIN_LOOP: &str = include_str!("../../../shaders/gemm.wgsl");
pub(crate) const SOURCES: [&str; 3] = [QUADS, MAIN_LOOP, ENTRY];
static SOURCE_HASH: LazyLock<u64> = LazyLock::new(|| super::source_hash(&SOURCES));

/// Small enough that an unrolled step fits the instruction cache.
const TILE_K: u32 = 16;
/// Outputs of an invocation along N.
const THREAD_N: u32 = 8;

/// From the most reuse of decoded values to the least waste
/// for few tokens. Efficiencies are measured (H200).
pub(crate) static CONFIGS: &[TileConfig] = &[
    config(128, 128, 8, (420, 500)),
    config(128, 64, 8, (460, 500)),
    config(64, 64, 8, (350, 500)),
    config(64, 32, 4, (400, 500)),
];

/// Every invocation computes 8 × `thread_m` outputs.
const fn config(tile_n: u32, tile_m: u32, thread_m: u32, efficiency: (u32, u32)) -> TileConfig {
    let threads = (tile_n / THREAD_N) * (tile_m / thread_m);
    TileConfig {
        family: NAME,
        main_loop: Name::new(NAME),
        tile_n,
        tile_m,
        tile_k: TILE_K,
        threads,
        ctas_per_unit: 512 / threads,
        cluster: 1,
        shared_bytes: TILE_K * (tile_n + tile_m) * 4,
        efficiency,
        ..CONFIG
    }
}

/// Sources and constants of a config.
pub(crate) fn part(config: &TileConfig) -> Part {
    let thread_m = config.tile_m * config.tile_n / (THREAD_N * config.threads);
    let constants = vec![
        ("TILE_N", config.tile_n),
        ("TILE_M", config.tile_m),
        ("TILE_K", config.tile_k),
        ("THREAD_M_VECTORS", thread_m / 4),
    ];
    Part {
        extensions: "",
        rows: FourRows::Beside,
        codes: Codes::Numbers,
        sources: SOURCES.to_vec(),
        threads: config.threads,
        constants,
    }
}

/// Configs that fit into the adapter's workgroup memory.
pub(crate) fn fitting(op: &CheckedGemm, info: &DeviceInfo) -> impl Iterator<Item = TileConfig> {
    let available = info.shared_bytes.saturating_sub(table_bytes(op.format));
    CONFIGS.iter().copied().filter(move |c| c.shared_bytes <= available)
}

/// The kernel family.
#[derive(Debug)]
pub(crate) struct Gemm;

impl Family<CheckedGemm> for Gemm {
    fn name(&self) -> &'static str {
        NAME
    }

    fn configs(&self, op: &CheckedGemm, info: &DeviceInfo) -> Result<Vec<TileConfig>, Unsupported> {
        super::served_in_parts(op, info, super::of_plain_x(op, fitting(op, info))?)
    }

    fn prepare(&self, device: &dyn Device, op: &CheckedGemm, plan: &LaunchPlan) -> Result<LaunchSequence, HalError> {
        super::prepare(device, op, plan, |_, _| Some(part(&plan.config)))
    }

    fn source_hash(&self, _: &CheckedGemm, _: &TileConfig) -> u64 {
        *SOURCE_HASH
    }
}
