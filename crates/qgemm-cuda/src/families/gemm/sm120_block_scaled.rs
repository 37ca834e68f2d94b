//! `gemm` main loop with block-scaled `mma` on consumer Blackwell: MXFP4 ×
//! MXFP4, NVFP4 × NVFP4, and MXFP4 or MXFP8 × MXFP8.
//!
//! A producer warpgroup copies packed W, and codes and scales of
//! X, into a ring. Consumer warps multiply codes; the instructions apply
//! the block scales. Tokens are the rows of the instructions. Token
//! and row factors apply to accumulators.

use std::sync::Arc;

use bytemuck::{Pod, Zeroable};
use qgemm_formats::float8::E2M1_DOUBLED;
use qgemm_formats::prepack::{FragmentLayout, PackedLayout};
use qgemm_formats::{DType, Encoding, Format, ScaleType, XCode, XFactor, XFormat};
use qgemm_hal::abi::dtype_code;
use qgemm_hal::{
    CheckedGemm, Dense, GemmOperand, HalError, KernelId, LaunchPlan, Math, Operands, Spec, TileConfig, Unsupported,
    Variant, XPlanes,
};

use super::super::kernel_launch::{Addresses, Params};
use super::super::launch_params::LaunchParams;
use super::super::prelude::Prelude;
use super::common::{ALIGNMENT, BARRIER, FLAG, PRODUCER_WARPS, SCHEDULER_STATE};
use super::fp8::{Fp8Matrix, WARP_STAGING};
use super::instance::{MOST_MAPPED, MOST_STRIDE_BYTES};
use super::main_loop::{MainLoop, MainLoopKind, XAccess};
use super::params::{Cut, GemmParams, params};
use crate::arch::most_shared;
use crate::source;
use crate::spec::KernelSpec;
use crate::tensor_map::{EncodedMap, MapElement, MapSwizzle, TileMap};

static MAIN_LOOP: MainLoop = MainLoop {
    arch_specific: true,
    ..MainLoop::new(
        MainLoopKind::Sm120BlockScaledWs,
        ("entry/sm120_gemm_block_scaled_ws.cu", "qg_sm120_gemm_block_scaled_ws"),
        XAccess::TmaOfPlanes,
    )
};

/// Bytes of a token's codes in a stage (`X_STAGE_BYTES`).
const X_STAGE_BYTES: u32 = 64;
/// Rows of a packed tile.
const TILE_ROWS: u32 = 16;
/// With experts: parked state of a warp, including the
/// rows of its tile; and memory of the warps that
/// check for index faults.
const EXPERT_STATE: u32 = SCHEDULER_STATE + 16;
const FAULTS: u32 = 32;
/// Maximum split-K of a work tile.
const MOST_SPLITS: u32 = 16;
/// Instructions on bytes process half as many
/// columns in the same time.
const SHARE_OF_BYTES: u32 = 2;

/// A tile and its split over the warps of a CTA.
#[derive(Clone, Copy, Debug)]
struct Tile {
    tokens: u32,
    features: u32,
    /// Warps along tokens and along features.
    warps: (u32, u32),
    /// Estimated shares of the FP4 rate and of the bandwidth, per
    /// mille. Not measured on a chip.
    efficiency: (u32, u32),
}

const fn tile(tokens: u32, features: u32, warps: (u32, u32), efficiency: (u32, u32)) -> Tile {
    Tile { tokens, features, warps, efficiency }
}

/// Shares of the bandwidth, per mille, that ring copies
/// reach on Hopper: for weights from memory, and for
/// weights mostly re-read from L2.
const FROM_MEMORY: u32 = 740;
const FROM_CACHE: u32 = 1500;

/// Warps have 32 features, so that W is converted to
/// operand order once for as many tokens as registers
/// allow. The 128 × 128 tile splits tokens over two warps
/// nevertheless: a single warp on an SM sub-partition would
/// leave it idle while it converts.
const TILES: [Tile; 4] = [
    tile(32, 128, (1, 4), (300, FROM_MEMORY)),
    tile(64, 128, (1, 4), (420, FROM_MEMORY)),
    tile(128, 128, (2, 4), (580, FROM_MEMORY)),
    tile(128, 256, (1, 8), (680, FROM_CACHE)),
];

/// One kernel.
#[derive(Clone, Debug)]
pub(in crate::families) struct BlockScaledKernel {
    format: Format,
    x: XFormat,
    /// Code type of X.
    code: XCode,
    layout: PackedLayout,
    tile: Tile,
    stages: u32,
    /// Whether this is the MoE kernel, whose CTAs take
    /// tiles of all experts in turn.
    experts: bool,
}

/// Kernels for weights of `format` and activations of `x`; none when
/// no block-scaled instruction supports both.
pub(in crate::families) fn block_scaled_kernels(
    format: Format,
    x: XFormat,
    variant: Variant,
) -> Vec<BlockScaledKernel> {
    let code = operands(format, x).filter(|_| variant == Variant::Sm120);
    let Some((code, layout)) = code.zip(PackedLayout::new(format, FragmentLayout::MmaM16)) else { return Vec::new() };
    let kernel = |&tile| {
        let of_one = BlockScaledKernel { format, x, code, layout: layout.clone(), tile, stages: 1, experts: false };
        of_one.with_all_stages()
    };
    TILES.iter().map(kernel).collect()
}

/// Code type of X, if an instruction supports both
/// operands: E2M1 with equal scale types and block lengths,
/// or X in E4M3 and W in E4M3 or E2M1, both
/// with UE8M0 scales of equal block length.
fn operands(format: Format, x: XFormat) -> Option<XCode> {
    let (Some(parts), [plane], [scale]) = (x.parts(false, None), format.scale_planes, format.float_scales) else {
        return None;
    };
    let is_e2m1 = matches!(format.encoding, Encoding::Codebook(table) if *table == E2M1_DOUBLED);
    let codes = match parts.code {
        XCode::E2M1 => is_e2m1,
        XCode::E4M3 => (is_e2m1 || format.encoding == Encoding::E4M3) && scale.kind == ScaleType::E8M0,
        XCode::Int8 => false,
    };
    let scales = parts.block == Some(plane.span) && parts.scale == Some(scale.kind) && plane.rows == 1;
    (codes && scales).then_some(parts.code)
}

impl BlockScaledKernel {
    /// The MoE version of this kernel, if any.
    pub(in crate::families) fn for_experts(self) -> Option<Self> {
        Some(Self { experts: true, ..self }.with_all_stages())
    }

    /// The kernel with as many stages as fit.
    fn with_all_stages(self) -> Self {
        let room = most_shared(Variant::Sm120).saturating_sub(self.outside_stages() + ALIGNMENT);
        Self { stages: room / self.stage_bytes(), ..self }
    }

    /// Packed layout of W.
    pub(in crate::families) fn layout(&self) -> &PackedLayout {
        &self.layout
    }

    /// Tokens of a tile.
    pub(in crate::families) fn tokens(&self) -> u32 {
        self.tile.tokens
    }

    /// TMA map of X's codes, `tokens` rows at a time.
    pub(in crate::families) fn x_map(&self, x: &Fp8Matrix, tokens: u32) -> TileMap {
        let columns = x.columns * u64::from(self.x_bits());
        let size = [columns.div_ceil(8), x.rows];
        let map = TileMap::matrix(x.address, MapElement::Byte, size, x.row_bytes, [X_STAGE_BYTES, tokens]);
        TileMap { swizzle: MapSwizzle::Bytes64, ..map }
    }

    fn x_bits(&self) -> u32 {
        if self.code == XCode::E2M1 { 4 } else { 8 }
    }

    /// Columns of a stage (`STAGE_K`).
    fn stage_k(&self) -> u32 {
        X_STAGE_BYTES * 8 / self.x_bits()
    }

    fn consumers(&self) -> u32 {
        self.tile.warps.0 * self.tile.warps.1 * 32
    }

    fn threads(&self) -> u32 {
        self.consumers() + PRODUCER_WARPS * 32
    }

    /// Bytes of a stage and its mbarriers: codes of X, packed
    /// k-tiles of W, and X scales in whole words.
    fn stage_bytes(&self) -> u32 {
        let Tile { tokens, features, .. } = self.tile;
        let k_tiles = self.stage_k() / self.layout.k_tile as u32;
        let words = (self.stage_k() / (4 * self.format.sub_block as u32)).max(1);
        let w = features / TILE_ROWS * k_tiles * self.layout.k_tile_bytes as u32;
        tokens * X_STAGE_BYTES + w + tokens * words * 4 + 2 * BARRIER
    }

    /// Shared memory outside the stages.
    fn outside_stages(&self) -> u32 {
        let (parked, faults) = if self.experts { (EXPERT_STATE, FAULTS) } else { (SCHEDULER_STATE, 0) };
        self.consumers() / 32 * (WARP_STAGING + parked) + FLAG + faults
    }

    /// `sizeof(SharedStorage)` of the kernel, which asserts it.
    fn shared_bytes(&self) -> u32 {
        (self.stages * self.stage_bytes() + self.outside_stages()).next_multiple_of(ALIGNMENT)
    }

    /// Whether the kernel supports `op`.
    ///
    /// # Errors
    /// The refusal.
    pub(in crate::families) fn serves(&self, op: &CheckedGemm) -> Result<(), Unsupported> {
        if op.m.max(op.stored_rows).max(op.stored_k) > MOST_MAPPED || op.x.row_stride >= MOST_STRIDE_BYTES {
            return Err(Unsupported::new("TMA reaches 2^31 rows and columns, and 2^40 bytes from a row to the next"));
        }
        Ok(())
    }

    pub(in crate::families) fn config(&self) -> TileConfig {
        let Tile { tokens, features, efficiency: (arithmetic, bandwidth), .. } = self.tile;
        let share = if self.code == XCode::E2M1 { 1 } else { SHARE_OF_BYTES };
        TileConfig {
            family: MAIN_LOOP.kind.family(),
            main_loop: MAIN_LOOP.kind.name(),
            variant: Some(Variant::Sm120),
            math: Math::TensorBlockScaled,
            tile_n: features,
            tile_m: tokens,
            tile_k: self.stage_k(),
            threads: self.threads(),
            ctas_per_unit: 1,
            cluster: 1,
            schedule: MAIN_LOOP.schedule,
            max_splits: MOST_SPLITS,
            warps_n: self.tile.warps.1,
            k_groups: 1,
            stages: self.stages,
            shared_bytes: self.shared_bytes(),
            x_format: self.x,
            x_prologue: None,
            rounded_weights: None,
            normalizes_x: false,
            efficiency: (arithmetic / share, bandwidth),
        }
    }

    /// Kernel identity.
    pub(in crate::families) fn id(&self) -> KernelId {
        let id = self.config().kernel_id(self.format);
        match id.spec {
            Spec::Gemm(spec) if self.experts => KernelId { spec: Spec::Experts(spec), ..id },
            _ => id,
        }
    }

    pub(in crate::families) fn spec(&self) -> KernelSpec {
        let prelude = Prelude {
            variant: Some(Variant::Sm120.number()),
            state_in_shared: Some(1),
            x_bits: Some(self.x_bits()),
            experts: Some(self.experts.into()),
            expert_tiles: Some(self.experts.into()),
            // The type here does not matter: TMA addresses
            // rows of X by number.
            x_dtype: self.experts.then(|| dtype_code(DType::F16)),
            sub_block: Some(self.format.sub_block as u32),
            // There are no f32 block scales.
            w_block_scales: Some(0),
            x_block_scales: Some(0),
            tile_m: Some(self.tile.tokens),
            tile_n: Some(self.tile.features),
            warps_m: Some(self.tile.warps.0),
            warps_n: Some(self.tile.warps.1),
            stages: Some(self.stages),
            threads: Some(self.threads()),
            consumers: Some(self.consumers()),
            shared_bytes: Some(self.shared_bytes()),
            ..Prelude::PRODUCT
        };
        KernelSpec {
            name: self.id().to_string(),
            entry: MAIN_LOOP.entry,
            text: source::entry(MAIN_LOOP.entry),
            symbol: MAIN_LOOP.symbol,
            prelude: prelude.with_layout(&self.layout).text(),
            arch_specific: MAIN_LOOP.arch_specific,
        }
    }

    /// Kernel parameter of `plan` without addresses.
    pub(in crate::families) fn launch(&self, op: &CheckedGemm, planes: &XPlanes, plan: &LaunchPlan) -> Arc<dyn Params> {
        // The kernel does not use the element type of X. `codes_row`
        // is the row stride in bytes.
        let x = Dense { dtype: op.d.dtype, row_stride: planes.codes_row, col_stride: 1, aligned16: true };
        Arc::new(Launch {
            params: params(op, &x, &Cut::of(plan)),
            planes: *planes,
            kernel: self.clone(),
            second_bias: op.bias.filter(|_| op.gated).map_or(0, |dtype| op.out_features * dtype.bytes()) as u64,
            residual_in_d: op.residual_in_d,
        })
    }
}

/// Parameters of X beside its codes.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub(in crate::families) struct BlockScaledX {
    scales: u64,
    scale_row: u64,
    factors: u64,
    factor_row: u64,
}

impl BlockScaledX {
    /// For scales and factors at these addresses.
    pub(in crate::families) fn new(planes: &XPlanes, scales: u64, factors: u64) -> Self {
        let (factors, factor_row) = match planes.parts.factor {
            XFactor::None => (0, 0),
            XFactor::Given => (factors, 0),
            XFactor::PerToken => (factors, size_of::<f32>() as u64),
        };
        Self { scales, scale_row: planes.scales_row, factors, factor_row }
    }
}

/// `BlockScaledParams` in `mainloop/sm120/block_scaled_params.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
struct BlockScaledParams {
    gemm: GemmParams,
    x: BlockScaledX,
}

/// Padding up to the tensor maps, which are
/// aligned to 64 bytes.
const PADDING: usize = size_of::<BlockScaledParams>().next_multiple_of(64) - size_of::<BlockScaledParams>();

/// `TmaBlockScaledParams`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
struct MappedParams {
    x: BlockScaledParams,
    padding: [u64; PADDING / 8],
    maps: [EncodedMap; 2],
}

/// Kernel parameter without addresses.
#[derive(Debug)]
struct Launch {
    params: GemmParams,
    planes: XPlanes,
    kernel: BlockScaledKernel,
    /// Bytes from the gate's bias to the
    /// up's in a gated pair.
    second_bias: u64,
    residual_in_d: bool,
}

impl Params for Launch {
    fn with(&self, operands: &Operands<'_>, places: &Addresses<'_>) -> Result<LaunchParams, HalError> {
        let mut gemm = self.params;
        gemm.find(operands, places, self.residual_in_d, self.second_bias)?;
        let scales = places.of(operands, GemmOperand::XScales)?;
        let factors = places.of(operands, GemmOperand::XPlaneFactors)?;
        let GemmParams { shape, at, .. } = &gemm;
        let x = Fp8Matrix { address: at.x, rows: shape.m.into(), columns: shape.k.into(), row_bytes: at.x_row };
        let map = |tokens| (places.encode)(&self.kernel.x_map(&x, tokens));
        let tokens = self.kernel.tokens();
        let tail = match gemm.shape.m % tokens {
            0 => EncodedMap::default(),
            rest => map(rest)?,
        };
        let maps = [map(tokens)?, tail];
        let x = BlockScaledParams { gemm, x: BlockScaledX::new(&self.planes, scales, factors) };
        Ok(LaunchParams::of(&MappedParams { x, maps, ..MappedParams::zeroed() }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all() -> impl Iterator<Item = BlockScaledKernel> {
        let pairs = Format::all().flat_map(|format| XFormat::ALL.into_iter().map(move |x| (format, x)));
        pairs.flat_map(|(format, x)| block_scaled_kernels(format, x, Variant::Sm120))
    }

    #[test]
    fn pairs_of_formats_are_those_of_the_instructions() {
        let mut names: Vec<_> = all().map(|kernel| (kernel.format.name, kernel.x.name())).collect();
        names.dedup();
        assert_eq!(names, [("mxfp4", "mxfp8"), ("mxfp4", "mxfp4"), ("mxfp8", "mxfp8"), ("nvfp4", "nvfp4")]);
    }

    #[test]
    fn rings_have_two_stages_at_least_and_fit_in_shared_memory() {
        for kernel in all().chain(all().filter_map(BlockScaledKernel::for_experts)) {
            assert!(kernel.stages >= 2 && kernel.shared_bytes() <= most_shared(Variant::Sm120), "{kernel:?}");
        }
    }
}
