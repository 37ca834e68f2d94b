//! `gemm`: any number of tokens, tiles of W and X decoded into workgroup memory.

use std::sync::Arc;

use qgemm_hal::{
    CheckedGemm, Device, DeviceInfo, HalError, Kernel, KernelFamily, LaunchPlan, Math, Schedule, TileConfig,
    Unsupported,
};

use super::MAX_GROUPS;

/// Name of the family.
const NAME: &str = "gemm";
/// The main loop.
pub(crate) const SOURCE: &str = include_str!("../../shaders/gemm.wgsl");

const TILE_K: u32 = 32;

/// From the most reuse of what was decoded to the least waste for few tokens.
pub(crate) static CONFIGS: &[TileConfig] =
    &[config(64, 64, (500, 500)), config(32, 32, (350, 500)), config(64, 16, (300, 600))];

/// Every invocation computes 4 × 4 outputs.
const fn config(tile_n: u32, tile_m: u32, efficiency: (u32, u32)) -> TileConfig {
    TileConfig {
        family: NAME,
        math: Math::FmaF32,
        tile_n,
        tile_m,
        tile_k: TILE_K,
        threads: (tile_n / 4) * (tile_m / 4),
        blocks_per_unit: 2,
        schedule: Schedule::Grid,
        max_splits: 1,
        stages: 1,
        // Each tile row is padded by one.
        shared_bytes: TILE_K * (tile_n + tile_m + 2) * 4,
        staged_x: None,
        rounded_weights: None,
        efficiency,
    }
}

/// The configurations that an adapter's workgroup memory and grid allow.
fn fitting(op: &CheckedGemm, info: &DeviceInfo) -> impl Iterator<Item = TileConfig> {
    let (m, shared_bytes) = (op.m, info.shared_bytes);
    CONFIGS
        .iter()
        .copied()
        .filter(move |c| c.shared_bytes <= shared_bytes && m.div_ceil(c.tile_m as usize) <= MAX_GROUPS as usize)
}

/// The family.
#[derive(Debug)]
pub(crate) struct Gemm;

impl KernelFamily for Gemm {
    fn name(&self) -> &'static str {
        NAME
    }

    fn supports(&self, op: &CheckedGemm, info: &DeviceInfo) -> Result<(), Unsupported> {
        if fitting(op, info).next().is_none() {
            return Err(Unsupported::new(format!(
                "{} tokens exceed {MAX_GROUPS} tiles, or {} bytes of workgroup memory are too few",
                op.m, info.shared_bytes
            )));
        }
        super::check(op, info)
    }

    fn candidates(&self, op: &CheckedGemm, info: &DeviceInfo) -> Vec<TileConfig> {
        fitting(op, info).collect()
    }

    fn prepare(&self, device: &dyn Device, op: &CheckedGemm, plan: &LaunchPlan) -> Result<Arc<dyn Kernel>, HalError> {
        super::prepare(SOURCE, device, op, plan)
    }
}
