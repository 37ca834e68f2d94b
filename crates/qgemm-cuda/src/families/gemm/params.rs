//! Parameters of GEMM kernels.

use bytemuck::{Pod, Zeroable};
use qgemm_formats::{DType, XParts};
use qgemm_hal::abi::{self, CudaGemmShape, GemmPointers, TileSchedule, XPlanePointers, activation_code, dtype_code};
use qgemm_hal::{
    Activation, CheckedGemm, Dense, GemmOperand, HalError, LaunchPlan, LaunchStep, Operands, StreamK, XPlanes,
    XPrologue,
};

use super::super::kernel_launch::{Addresses, Params};
use super::super::launch_params::LaunchParams;
use super::common::{K_BLOCK, STAGE_K};
use super::instance::Instance;
use super::main_loop::XAccess;
use crate::tensor_map::{EncodedMap, MapElement, TileMap};

/// `GemmParams` in `sched/params.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub(in crate::families) struct GemmParams {
    pub shape: CudaGemmShape,
    pub at: GemmPointers,
    tiles: TileSchedule,
}

/// Alignment of a tensor map in a kernel parameter.
pub(super) const MAP_ALIGNMENT: usize = 64;
const PADDING: usize = (size_of::<GemmParams>().next_multiple_of(MAP_ALIGNMENT) - size_of::<GemmParams>()) / 8;

/// `TmaGemmParams` in `mainloop/tma_params.cuh`: adds maps of X, one for
/// whole token tiles and one for the last.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
struct MappedParams {
    gemm: GemmParams,
    padding: [u64; PADDING],
    x_maps: [EncodedMap; 2],
}

/// `SignedByteParams` in `mainloop/signed_byte_ring.cuh`: adds
/// the addresses of X's planes.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
struct PlaneParams {
    gemm: GemmParams,
    x: XPlanePointers,
}

const PLANE_PADDING: usize = (size_of::<PlaneParams>().next_multiple_of(MAP_ALIGNMENT) - size_of::<PlaneParams>()) / 8;

/// `W4A8Params` in `mainloop/sm90/w4a8_pipeline.cuh`:
/// also adds maps of X's codes.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
struct MappedPlaneParams {
    planes: PlaneParams,
    padding: [u64; PLANE_PADDING],
    x_maps: [EncodedMap; 2],
}

/// Kernel parameter without addresses.
#[derive(Debug)]
pub(super) struct GemmLaunch {
    params: GemmParams,
    /// Bytes from the gate's bias to the
    /// up's in a gated pair.
    second_bias: u64,
    tile_m: u32,
    x_dtype: DType,
    x_access: XAccess,
    /// Planes of a quantized X and their addresses.
    planes: Option<(XParts, XPlanePointers)>,
    residual_in_d: bool,
}

impl GemmLaunch {
    /// Parameter of `instance` for `plan` of `op`, with
    /// `x` as the kernel reads it. The API has checked
    /// that counts fit in 32 bits.
    pub(super) fn new(op: &CheckedGemm, x: &Dense, plan: &LaunchPlan, instance: &Instance) -> Self {
        Self {
            params: params(op, x, &Cut::of(plan)),
            second_bias: op.bias.filter(|_| op.gated).map_or(0, |dtype| op.out_features * dtype.bytes()) as u64,
            tile_m: plan.config.tile_m,
            x_dtype: x.dtype,
            x_access: instance.main_loop.x_access,
            planes: op.x.planes.map(|planes| (planes.parts, plane_pointers(&planes))),
            residual_in_d: op.residual_in_d,
        }
    }

    /// Parameter of a kernel that reads the
    /// codes of X by TMA.
    fn with_code_maps(&self, planes: PlaneParams, places: &Addresses<'_>) -> Result<LaunchParams, HalError> {
        let GemmParams { shape, at, .. } = &planes.gemm;
        let map = |tokens| {
            let size = [shape.k.into(), shape.m.into()];
            (places.encode)(&TileMap::matrix(at.x, MapElement::Byte, size, at.x_row, [STAGE_K, tokens]))
        };
        let tail = match shape.m % self.tile_m {
            0 => EncodedMap::default(),
            tokens => map(tokens)?,
        };
        let x_maps = [map(self.tile_m)?, tail];
        Ok(LaunchParams::of(&MappedPlaneParams { planes, x_maps, ..MappedPlaneParams::zeroed() }))
    }
}

impl GemmParams {
    /// Tensor maps of X, of type `x`: one for `tile` tokens,
    /// one for the remaining tokens. Unused when the kernel reads an
    /// unaligned X through registers.
    pub(super) fn x_maps(&self, x: DType, tile: u32, places: &Addresses<'_>) -> Result<[EncodedMap; 2], HalError> {
        let Self { shape, at, .. } = self;
        let in_place = shape.flags & abi::FLAG_X_ALIGNED16 != 0 && shape.flags & abi::FLAG_K_ORDER == 0;
        let map = |tokens| {
            let size = [shape.k.into(), shape.m.into()];
            let row_bytes = at.x_row * x.bytes() as u64;
            let map = TileMap::matrix(at.x, MapElement::Number(x), size, row_bytes, [K_BLOCK, tokens]);
            if in_place && tokens > 0 { (places.encode)(&map) } else { Ok(EncodedMap::default()) }
        };
        Ok([map(tile)?, map(shape.m % tile)?])
    }

    /// Fills in the operands' addresses and derived fields. `second_bias` is
    /// the offset in bytes from the gate's bias to the up's.
    pub(in crate::families) fn find(
        &mut self,
        operands: &Operands<'_>,
        places: &Addresses<'_>,
        residual_in_d: bool,
        second_bias: u64,
    ) -> Result<(), HalError> {
        use GemmOperand as O;
        let at = &mut self.at;
        at.x = places.of(operands, O::X)?;
        at.w = places.of(operands, O::W)?;
        at.row_scale = places.of(operands, O::RowScale)?;
        at.k_order = places.of(operands, O::KOrder)?;
        at.c = places.of(operands, O::C)?;
        at.bias = places.of(operands, O::Bias)?;
        at.token_scale = places.of(operands, O::TokenScale)?;
        at.residual = places.of(operands, if residual_in_d { O::D } else { O::Residual })?;
        at.d = places.of(operands, O::D)?;
        at.x_factor = places.of(operands, O::XFactor)?;
        at.partials = places.of(operands, O::Partials)?;
        at.counters = places.of(operands, O::Counters)?;
        let has_bias = self.shape.flags & abi::FLAG_BIAS != 0;
        if has_bias && [at.bias, at.bias + second_bias].iter().all(|at| at.is_multiple_of(16)) {
            self.shape.flags |= abi::FLAG_BIAS_ALIGNED16;
        }
        Ok(())
    }
}

impl Params for GemmLaunch {
    fn with(&self, operands: &Operands<'_>, places: &Addresses<'_>) -> Result<LaunchParams, HalError> {
        use GemmOperand as O;
        let mut params = self.params;
        params.find(operands, places, self.residual_in_d, self.second_bias)?;
        if let Some((parts, mut x)) = self.planes {
            x.scales = places.of(operands, O::XScales)?;
            x.factors = places.of(operands, O::XPlaneFactors)?;
            x.sums = places.of(operands, O::XSums)?;
            if self.x_access == XAccess::TmaOfPlanes {
                return self.with_code_maps(PlaneParams { gemm: params, x }, places);
            }
            // One scale for each token is a factor of its accumulators.
            if parts.scale.is_some() && parts.block.is_none() {
                params.shape.flags |= abi::FLAG_X_FACTOR;
                params.at.x_factor = x.scales;
            }
            let params = PlaneParams { gemm: params, x };
            return Ok(LaunchParams::of(&params));
        }
        if self.x_access != XAccess::Tma {
            return Ok(LaunchParams::of(&params));
        }
        let x_maps = params.x_maps(self.x_dtype, self.tile_m, places)?;
        Ok(LaunchParams::of(&MappedParams { gemm: params, x_maps, ..MappedParams::zeroed() }))
    }
}

/// Strides of the planes of a quantized X.
pub(in crate::families) fn plane_pointers(planes: &XPlanes) -> XPlanePointers {
    XPlanePointers {
        scales_row: planes.scales_row,
        sums_row: planes.sums_row,
        block_shift: planes.parts.block.map_or(0, |block| block.trailing_zeros()),
        ..XPlanePointers::default()
    }
}

/// Binds the product's operands as the kernel of `plan` uses them.
pub(super) fn bound(step: LaunchStep, op: &CheckedGemm, plan: &LaunchPlan) -> LaunchStep {
    use GemmOperand as O;
    let mut step = step.bind(O::W, O::W).bind(O::D, O::D);
    for operand in op.x.planes.iter().flat_map(XPlanes::operands) {
        step = step.bind(operand, operand);
    }
    let optional = [
        (op.row_scale, O::RowScale),
        (op.k_order, O::KOrder),
        (op.c.is_some(), O::C),
        (op.bias.is_some(), O::Bias),
        (op.token_scale, O::TokenScale),
        (op.residual.is_some() && !op.residual_in_d, O::Residual),
    ];
    for (_, operand) in optional.into_iter().filter(|(present, _)| *present) {
        step = step.bind(operand, operand);
    }
    let layout = &plan.workspace;
    step = match &layout.x {
        None => step.bind(O::X, O::X),
        Some(region) => {
            let step = step.bind_part(O::X, O::Workspace, region.x_of(op.m));
            match region.factors_of(op.m) {
                None => step,
                Some(factors) => step.bind_part(O::XFactor, O::Workspace, factors),
            }
        }
    };
    if layout.partial_bytes == 0 {
        return step;
    }
    let counters = layout.counters..layout.counters + plan.shared_tiles() as usize * 4;
    step.bind_part(O::Partials, O::Workspace, layout.partials..layout.partials + layout.partial_bytes).bind_part(
        O::Counters,
        O::Workspace,
        counters,
    )
}

/// The part of a plan that kernel parameters need.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::families) struct Cut {
    pub k_tiles: u32,
    pub splits: u32,
    pub has_factors: bool,
    pub tiles: TileSchedule,
}

impl Cut {
    pub(super) fn of(plan: &LaunchPlan) -> Self {
        Self {
            k_tiles: plan.k_tiles,
            splits: plan.splits,
            has_factors: matches!(plan.config.x_prologue, Some(XPrologue::Convert { row_factors: true })),
            tiles: tile_schedule(plan),
        }
    }
}

/// Kernel parameter without addresses.
pub(in crate::families) fn params(op: &CheckedGemm, x: &Dense, cut: &Cut) -> GemmParams {
    let flag = |present: bool, flag: u32| if present { flag } else { 0 };
    // Pairs have no C; its fields hold the numbers.
    let swiglu = match op.activation {
        Activation::ClampedSwiglu(swiglu) if op.gated => Some(swiglu),
        _ => None,
    };
    let shape = CudaGemmShape {
        m: op.m as u32,
        stored_rows: op.stored_rows as u32,
        k: op.k as u32,
        stored_k: op.stored_k as u32,
        flags: flag(op.row_scale, abi::FLAG_ROW_SCALE)
            | flag(op.k_order, abi::FLAG_K_ORDER)
            | flag(op.c.is_some(), abi::FLAG_C)
            | flag(op.bias.is_some(), abi::FLAG_BIAS)
            | flag(x.aligned16, abi::FLAG_X_ALIGNED16)
            | flag(op.token_scale, abi::FLAG_TOKEN_SCALE)
            | flag(op.residual.is_some(), abi::FLAG_RESIDUAL)
            | flag(op.gated, abi::FLAG_GATED)
            | flag(op.d.aligned16, abi::FLAG_D_ALIGNED16)
            | flag(op.c.is_some_and(|c| c.aligned16), abi::FLAG_C_ALIGNED16)
            | flag(op.residual.is_some_and(|r| r.aligned16), abi::FLAG_RESIDUAL_ALIGNED16)
            | flag(cut.has_factors, abi::FLAG_X_FACTOR),
        out_features: op.out_features as u32,
        alpha: op.alpha,
        beta: swiglu.map_or(op.beta, |swiglu| swiglu.beta),
        k_tiles: cut.k_tiles,
        splits: cut.splits,
        activation: activation_code(op.activation),
        x_dtype: dtype_code(x.dtype),
        d_dtype: dtype_code(op.d.dtype),
        c_dtype: op.c.map_or(0, |c| dtype_code(c.dtype)),
        bias_dtype: op.bias.map_or(0, dtype_code),
        residual_dtype: op.residual.map_or(0, |r| dtype_code(r.dtype)),
    };
    let at = GemmPointers {
        x_row: x.row_stride,
        x_col: x.col_stride,
        c_row: match swiglu {
            Some(swiglu) => u64::from(swiglu.limit.to_bits()) << 32 | u64::from(swiglu.alpha.to_bits()),
            None => op.c.map_or(0, |c| c.row_stride),
        },
        d_row: op.d.row_stride,
        residual_row: op.residual.map_or(0, |r| r.row_stride),
        ..GemmPointers::default()
    };
    GemmParams { shape, at, tiles: cut.tiles }
}

fn tile_schedule(plan: &LaunchPlan) -> TileSchedule {
    let StreamK { cut_tiles, cut_ctas, cut_k_tiles, swizzle_group } = plan.stream_k.unwrap_or_default();
    TileSchedule { n_tiles: plan.n_tiles, m_tiles: plan.m_tiles, swizzle_group, cut_tiles, cut_ctas, cut_k_tiles }
}
