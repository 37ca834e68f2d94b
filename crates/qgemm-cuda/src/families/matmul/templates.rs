//! Kernels of `matmul`: main loops with their tiles.

use qgemm_formats::DType;
use qgemm_hal::abi::dtype_code;
use qgemm_hal::{FactorFormat, Math, MatmulLayout, MatmulSpec, Name, Variant};

/// Outputs that a thread stores together (`RUN` in
/// `epilogue/operands.cuh`).
const RUN: u32 = 8;

/// Identity of a main loop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MatmulLoop {
    Simt,
    Sm70TwoStage,
    Sm75TwoStage,
    Sm80CpAsync,
    Sm80CpAsyncTf32,
    Sm80Fma,
    Sm80TwoStageBf16x3,
    Sm89CpAsyncFp8,
    Sm90Fp8WgmmaWs,
    Sm90WgmmaWs,
    Sm90WgmmaWsE4M3,
    Sm90WgmmaWsTf32,
}

impl MatmulLoop {
    /// Variant and mechanism, as kernel identities print them.
    const fn name(self) -> &'static str {
        match self {
            MatmulLoop::Simt => "simt",
            MatmulLoop::Sm70TwoStage => "sm70_two_stage",
            MatmulLoop::Sm75TwoStage => "sm75_two_stage",
            MatmulLoop::Sm80CpAsync => "sm80_cp_async",
            MatmulLoop::Sm80CpAsyncTf32 => "sm80_cp_async_tf32",
            MatmulLoop::Sm80Fma => "sm80_fma",
            MatmulLoop::Sm80TwoStageBf16x3 => "sm80_two_stage_bf16x3",
            MatmulLoop::Sm89CpAsyncFp8 => "sm89_cp_async_fp8",
            MatmulLoop::Sm90Fp8WgmmaWs => "sm90_fp8_wgmma_ws",
            MatmulLoop::Sm90WgmmaWs => "sm90_wgmma_ws",
            MatmulLoop::Sm90WgmmaWsE4M3 => "sm90_wgmma_ws_e4m3",
            MatmulLoop::Sm90WgmmaWsTf32 => "sm90_wgmma_ws_tf32",
        }
    }
}

/// A main loop with a tile: a kernel without the types
/// and layouts of its factors.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Template {
    pub main_loop: MatmulLoop,
    pub entry: &'static str,
    pub symbol: &'static str,
    pub math: Math,
    pub m: u32,
    pub n: u32,
    pub k: u32,
    pub threads: u32,
    /// Warps along M and N, for matrix instructions only.
    pub warps: [u32; 2],
    pub stages: u32,
    pub ctas: u32,
    /// Expected share of the arithmetic rate, per mille.
    pub efficiency: u32,
    /// Whether CTAs support row groups (products
    /// that share one A and D).
    pub groups_rows: bool,
}

pub(super) const SIMT: Template = Template {
    main_loop: MatmulLoop::Simt,
    entry: "entry/matmul_simt.cu",
    symbol: "qg_matmul_simt",
    math: Math::FmaF32,
    m: 128,
    n: 128,
    k: 16,
    threads: 256,
    warps: [0, 0],
    stages: 2,
    ctas: 2,
    efficiency: 750,
    groups_rows: false,
};
pub(super) const SIMT_SMALL: Template = Template { m: 64, n: 64, threads: 128, ctas: 4, efficiency: 500, ..SIMT };

/// f32 factors with FMA and cp.async.
pub(super) const FMA: Template = Template {
    main_loop: MatmulLoop::Sm80Fma,
    entry: "entry/sm80_matmul_fma.cu",
    symbol: "qg_sm80_matmul_fma",
    stages: 3,
    efficiency: 900,
    ..SIMT
};

const CP_ASYNC: Template = Template {
    main_loop: MatmulLoop::Sm80CpAsync,
    entry: "entry/sm80_matmul_cp_async.cu",
    symbol: "qg_sm80_matmul_cp_async",
    math: Math::TensorF16,
    m: 128,
    n: 128,
    k: 32,
    threads: 256,
    warps: [2, 4],
    stages: 4,
    ctas: 2,
    efficiency: 650,
    groups_rows: false,
};
const CP_ASYNC_SMALL: Template =
    Template { m: 64, n: 64, threads: 128, warps: [2, 2], ctas: 4, efficiency: 400, ..CP_ASYNC };

/// f32 factors as TF32.
pub(super) const TF32: Template = Template {
    main_loop: MatmulLoop::Sm80CpAsyncTf32,
    math: Math::TensorTf32,
    k: 16,
    stages: 3,
    efficiency: 600,
    ..CP_ASYNC
};
pub(super) const TF32_SMALL: Template =
    Template { m: 64, n: 64, threads: 128, warps: [2, 2], ctas: 3, efficiency: 350, ..TF32 };

/// One or two consumer warpgroups with 64 rows of A
/// each, and a producer warpgroup. The grid is
/// persistent with `ctas` CTAs per SM.
const WGMMA: Template = Template {
    main_loop: MatmulLoop::Sm90WgmmaWs,
    entry: "entry/sm90_matmul_wgmma_ws.cu",
    symbol: "qg_sm90_matmul_wgmma_ws",
    math: Math::TensorF16,
    m: 128,
    n: 256,
    k: 64,
    threads: 384,
    warps: [0, 0],
    stages: 4,
    ctas: 1,
    efficiency: 800,
    groups_rows: false,
};
const WGMMA_MIDDLE: Template = Template { n: 128, stages: 6, efficiency: 700, ..WGMMA };
const WGMMA_SMALL: Template = Template { m: 64, n: 128, threads: 256, stages: 8, efficiency: 500, ..WGMMA };

/// `WGMMA` on TF32, with factors that an earlier launch has rounded
/// and made contiguous along K (`copies.rs`).
pub(super) const WGMMA_TF32: Template =
    Template { main_loop: MatmulLoop::Sm90WgmmaWsTf32, math: Math::TensorTf32, k: 32, efficiency: 750, ..WGMMA };
pub(super) const WGMMA_TF32_MIDDLE: Template = Template { n: 128, stages: 6, efficiency: 650, ..WGMMA_TF32 };
pub(super) const WGMMA_TF32_SMALL: Template =
    Template { m: 64, n: 128, threads: 256, stages: 8, efficiency: 450, ..WGMMA_TF32 };

/// `WGMMA` on E4M3 along K. The sums of a
/// stage are added in f32.
const WGMMA_E4M3: Template = Template {
    main_loop: MatmulLoop::Sm90WgmmaWsE4M3,
    math: Math::TensorFp8,
    n: 128,
    k: 128,
    stages: 6,
    efficiency: 400,
    ..WGMMA
};
const WGMMA_E4M3_SMALL: Template = Template { m: 64, threads: 256, stages: 8, efficiency: 280, ..WGMMA_E4M3 };

/// `WGMMA` on E4M3 with block scales; a stage is one block.
/// One producer warp copies codes, the others copy scales.
const WGMMA_FP8: Template = Template {
    main_loop: MatmulLoop::Sm90Fp8WgmmaWs,
    entry: "entry/sm90_matmul_fp8_wgmma_ws.cu",
    symbol: "qg_sm90_matmul_fp8_wgmma_ws",
    math: Math::TensorFp8,
    n: 128,
    k: 128,
    stages: 6,
    efficiency: 450,
    ..WGMMA
};
const WGMMA_FP8_SMALL: Template = Template { m: 64, threads: 256, stages: 8, efficiency: 300, ..WGMMA_FP8 };

const TWO_STAGE: Template = Template {
    main_loop: MatmulLoop::Sm75TwoStage,
    entry: "entry/sm70_matmul_two_stage.cu",
    symbol: "qg_sm70_matmul_two_stage",
    stages: 2,
    // Two CTAs would spill registers, because of the loads in flight.
    ctas: 1,
    efficiency: 400,
    ..CP_ASYNC
};
const TWO_STAGE_SMALL: Template =
    Template { m: 64, n: 64, threads: 128, warps: [2, 2], ctas: 4, efficiency: 250, ..TWO_STAGE };

/// E4M3 factors with block scales, whose block sums need
/// registers beside the total sums.
const BLOCKS: &[Template] = &[TWO_STAGE, BLOCKS_SMALL];
const BLOCKS_SMALL: Template = Template { ctas: 3, ..TWO_STAGE_SMALL };

/// E4M3 `mma`; rows must be 16-byte aligned along K.
const FP8: Template = Template {
    main_loop: MatmulLoop::Sm89CpAsyncFp8,
    math: Math::TensorFp8,
    k: 64,
    // Block sums need registers beside the total sums.
    ctas: 1,
    efficiency: 500,
    ..CP_ASYNC
};
const FP8_SMALL: Template = Template { m: 64, n: 64, threads: 128, warps: [2, 2], ctas: 3, efficiency: 350, ..FP8 };

/// f32 factors as two bf16 each.
pub(super) const BF16X3: Template =
    Template { main_loop: MatmulLoop::Sm80TwoStageBf16x3, math: Math::TensorBf16x3, efficiency: 600, ..TWO_STAGE };
pub(super) const BF16X3_SMALL: Template =
    Template { m: 64, n: 64, threads: 128, warps: [2, 2], ctas: 3, efficiency: 400, ..BF16X3 };

/// Kernels with row groups. Small tiles, because groups have any length.
pub(super) const SIMT_ROWS: Template = Template { groups_rows: true, ..SIMT_SMALL };
pub(super) const CP_ASYNC_ROWS: Template = Template { groups_rows: true, ..CP_ASYNC_SMALL };
pub(super) const TWO_STAGE_ROWS: Template = Template { groups_rows: true, ..TWO_STAGE_SMALL };

impl Template {
    /// Main loop of a kernel's identity; it also says whether
    /// the kernel supports row groups.
    pub fn name(&self) -> Name {
        let rows = if self.groups_rows { "_rows" } else { "" };
        Name::new(&format!("{}{rows}", self.main_loop.name()))
    }

    /// Adapts the template to `variant`: with 100 KiB two
    /// CTAs of three stages fit.
    pub fn on(self, variant: Variant) -> Self {
        match variant {
            // Two CTAs; on Ada they would spill registers.
            Variant::Sm120 if self == FMA => Self { stages: 2, ..self },
            Variant::Sm89 | Variant::Sm120 if self.stages > 3 => Self { stages: 3, ..self },
            // Identities name the instructions.
            Variant::Sm70 if self.main_loop == MatmulLoop::Sm75TwoStage => {
                Self { main_loop: MatmulLoop::Sm70TwoStage, ..self }
            }
            // Transposes need more registers on this chip than two CTAs leave.
            Variant::Sm120 if self == TF32 => Self { ctas: 1, ..self },
            // `mma.sync` reaches about half of the `wgmma` rate.
            Variant::Sm90 if !self.stays() && matches!(self.math, Math::TensorF16 | Math::TensorBf16x3) => {
                Self { efficiency: self.efficiency / 2, ..self }
            }
            // `mma.sync` reaches about a third of the TF32 rate.
            Variant::Sm90 if !self.stays() && self.math == Math::TensorTf32 => {
                Self { efficiency: self.efficiency * 19 / 60, ..self }
            }
            _ => self,
        }
    }

    /// Whether kernels of `spec` support K groups. Group borders
    /// are arbitrary, so rows must not be along K; with block
    /// scales groups are whole blocks. Large tiles lack the
    /// registers, except those filled by TMA.
    pub fn may_group_k(&self, spec: &MatmulSpec) -> bool {
        match spec.layout {
            _ if self.groups_rows => false,
            MatmulLayout::Nt => spec.a.has_scales(),
            MatmulLayout::Any | MatmulLayout::Tn => self.m * self.n < 128 * 128 || self.stays(),
            _ => false,
        }
    }

    /// Operand type of the matrix instructions for factors of `format`.
    pub fn multiplied(&self, format: FactorFormat) -> DType {
        match format.plain() {
            Some(_) if self.math == Math::TensorBf16x3 => DType::BF16,
            Some(dtype) => dtype,
            None => DType::F16,
        }
    }

    /// Whether one kernel supports all layouts.
    pub fn takes_any_layout(&self) -> bool {
        self.main_loop == MatmulLoop::Simt
    }

    /// Whether the grid is persistent and fed by TMA. Other
    /// CTAs compute one tile each.
    pub fn stays(&self) -> bool {
        use MatmulLoop::{Sm90Fp8WgmmaWs, Sm90WgmmaWs, Sm90WgmmaWsE4M3, Sm90WgmmaWsTf32};
        matches!(self.main_loop, Sm90WgmmaWs | Sm90WgmmaWsTf32 | Sm90WgmmaWsE4M3 | Sm90Fp8WgmmaWs)
    }

    /// Whether an earlier launch rounds and copies the
    /// factors, for any storage order.
    pub fn rounds_factors(&self) -> bool {
        self.main_loop == MatmulLoop::Sm90WgmmaWsTf32
    }

    /// Whether factors must be along K, where an earlier launch
    /// copies others (`copies.rs`).
    pub fn is_along_k(&self) -> bool {
        self.rounds_factors() || self.math == Math::TensorFp8
    }

    /// `sizeof(SharedStorage)`, which the kernels assert.
    pub fn shared_bytes(&self) -> u32 {
        let (storage, alignment) = match self.math {
            // Pitches are padded by four words.
            Math::FmaF32 => (self.stages * self.k * (self.m + 4 + self.n + 4) * 4, 16),
            _ if self.stays() => {
                let of_outer = match self.math {
                    // Codes of a block and their scale.
                    Math::TensorFp8 if self.main_loop == MatmulLoop::Sm90Fp8WgmmaWs => self.k + 4,
                    Math::TensorFp8 => self.k,
                    Math::TensorTf32 => self.k * 4,
                    _ => self.k * 2,
                };
                let stages = self.stages * (self.m + self.n) * of_outer;
                let barriers = self.stages * 2 * 8;
                // Staging of each consumer warp: 16 rows of 32 columns, padded.
                let staging = (self.threads - 128) / 32 * 16 * (32 + 8) * 4;
                let ring = (stages + barriers).next_multiple_of(1024);
                (ring + staging, 1024)
            }
            _ => {
                let stages = match self.math {
                    // Rows are padded by four words.
                    Math::TensorTf32 => self.stages * (self.m + self.n) * (self.k + 4) * 4,
                    // Two 16-bit halves.
                    Math::TensorBf16x3 => self.stages * (self.m + self.n) * self.k * 4,
                    Math::TensorFp8 => self.stages * (self.m + self.n) * self.k,
                    _ => self.stages * (self.m + self.n) * self.k * 2,
                };
                let staging = self.threads / 32 * 16 * (self.n / self.warps[1] + RUN) * 4;
                (stages.max(staging), 128)
            }
        };
        // The word that tells a CTA whether it is the last.
        (storage + 4).next_multiple_of(alignment)
    }
}

/// Whether `variant` has matrix instructions for factors of `dtype`.
pub(super) fn has_instructions(dtype: DType, variant: Variant) -> bool {
    match dtype {
        DType::F32 => false,
        DType::F16 => true,
        DType::BF16 => variant >= Variant::Sm80,
    }
}

/// Matrix-instruction kernels for `variant`, for
/// aligned or unaligned factors.
pub(super) fn of_instructions(variant: Variant, aligned: bool) -> &'static [Template] {
    match (variant >= Variant::Sm80, aligned) {
        (true, true) if variant == Variant::Sm90 => &[WGMMA, WGMMA_MIDDLE, WGMMA_SMALL, CP_ASYNC, CP_ASYNC_SMALL],
        (true, true) => &[CP_ASYNC, CP_ASYNC_SMALL],
        // Loads of single elements dominate, whatever the tile.
        (true, false) => &[TWO_STAGE_SMALL],
        (false, _) => &[TWO_STAGE, TWO_STAGE_SMALL],
    }
}

/// TF32 kernels for `variant`, for aligned or unaligned f32 factors.
pub(super) fn of_tf32(variant: Variant, aligned: bool) -> &'static [Template] {
    match (variant, aligned) {
        (Variant::Sm90, true) => &[WGMMA_TF32, WGMMA_TF32_MIDDLE, WGMMA_TF32_SMALL, TF32, TF32_SMALL],
        // The rounding launch reads any alignment.
        (Variant::Sm90, false) => &[WGMMA_TF32, WGMMA_TF32_MIDDLE, WGMMA_TF32_SMALL],
        (_, true) => &[TF32, TF32_SMALL],
        (_, false) => &[],
    }
}

/// Kernels for `variant` and E4M3 factors without scales. FP8
/// instructions read them along K, others as f16, in which
/// they are exact.
pub(super) fn of_e4m3(variant: Variant) -> &'static [Template] {
    match variant {
        Variant::Sm90 => &[WGMMA_E4M3, WGMMA_E4M3_SMALL, TWO_STAGE, TWO_STAGE_SMALL],
        Variant::Sm89 | Variant::Sm120 => &[FP8, FP8_SMALL, TWO_STAGE, TWO_STAGE_SMALL],
        _ => &[TWO_STAGE, TWO_STAGE_SMALL],
    }
}

/// Kernels for `variant` and factors with block scales, aligned or
/// unaligned. Every kernel supports aligned ones.
pub(super) fn of_blocks(variant: Variant, aligned: bool) -> &'static [Template] {
    match variant {
        Variant::Sm90 if aligned => &[WGMMA_FP8, WGMMA_FP8_SMALL, TWO_STAGE, BLOCKS_SMALL],
        Variant::Sm89 | Variant::Sm120 if aligned => &[FP8, FP8_SMALL, TWO_STAGE, BLOCKS_SMALL],
        _ => BLOCKS,
    }
}

/// Number of a factor format in CUDA-core kernels: that of the
/// element type, or `FACTOR_E4M3` in `entry/matmul_simt.cu`.
/// Block scales are unsupported.
pub(super) fn factor_code(format: FactorFormat) -> u32 {
    format.plain().map_or(3, dtype_code)
}
