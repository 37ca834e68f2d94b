//! `gemv`: few tokens, a few outputs a workgroup, K spread over its invocations.

use std::sync::Arc;

use qgemm_hal::{
    CheckedGemm, Device, DeviceInfo, HalError, Kernel, KernelFamily, LaunchPlan, Math, Schedule, TileConfig,
    Unsupported,
};

/// Name of the family.
const NAME: &str = "gemv";
/// The main loop.
pub(crate) const SOURCE: &str = include_str!("../../shaders/gemv.wgsl");

const MAX_TOKENS: u32 = 4;
/// Outputs a workgroup: the shader stores them as one vec4.
const TILE_N: u32 = 4;
const THREADS: u32 = 64;

/// One configuration for 1, 2 and 4 tokens each.
pub(crate) static CONFIGS: &[TileConfig] = &[config(1), config(2), config(MAX_TOKENS)];

const fn config(tokens: u32) -> TileConfig {
    TileConfig {
        family: NAME,
        math: Math::FmaF32,
        tile_n: TILE_N,
        tile_m: tokens,
        tile_k: 8,
        threads: THREADS,
        blocks_per_unit: 8,
        schedule: Schedule::Grid,
        max_splits: 1,
        stages: 1,
        shared_bytes: TILE_N * tokens * THREADS * 4,
        staged_x: None,
        rounded_weights: None,
        efficiency: (300, 600),
    }
}

/// The family.
#[derive(Debug)]
pub(crate) struct Gemv;

impl KernelFamily for Gemv {
    fn name(&self) -> &'static str {
        NAME
    }

    fn supports(&self, op: &CheckedGemm, info: &DeviceInfo) -> Result<(), Unsupported> {
        if op.m > MAX_TOKENS as usize {
            return Err(Unsupported::new(format!("serves at most {MAX_TOKENS} tokens")));
        }
        if op.batch_invariant {
            return Err(Unsupported::new("adds in another order than gemm, which serves larger batches"));
        }
        super::check(op, info)
    }

    fn candidates(&self, op: &CheckedGemm, _info: &DeviceInfo) -> Vec<TileConfig> {
        CONFIGS.iter().find(|config| config.tile_m as usize >= op.m).copied().into_iter().collect()
    }

    fn prepare(&self, device: &dyn Device, op: &CheckedGemm, plan: &LaunchPlan) -> Result<Arc<dyn Kernel>, HalError> {
        super::prepare(SOURCE, device, op, plan)
    }
}
