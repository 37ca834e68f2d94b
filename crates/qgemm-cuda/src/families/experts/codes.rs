//! MoE GEMM on quantized X, multiplying codes directly. Kernels read the
//! rows of an expert contiguously, so scattered slots are gathered first.

use std::sync::Arc;

use bytemuck::{Pod, Zeroable};
use qgemm_formats::prepack::PackedLayout;
use qgemm_formats::{DType, Format, XFactor, XFormat};
use qgemm_hal::abi::TileSchedule;
use qgemm_hal::{
    CheckedExperts, CheckedGemm, Dense, DeviceInfo, ExpertForm, ExpertOperand, ExpertsConfig, Geometry, HalError,
    KernelId, Operand, Operands, TileConfig, Unsupported, Variant, XPlanes,
};

use super::super::gemm::{
    BlockScaledKernel, BlockScaledX, Cut, Fp8Kernel, Fp8Matrix, block_scaled_kernels, fp8_kernels, params, serving,
};
use super::super::kernel_launch::{Addresses, KernelLaunch, Params};
use super::super::launch_params::LaunchParams;
use super::decoded::DecodedKernel;
use super::gather::GatheredX;
use super::listed_slots;
use super::params::{ProductParams, groups, places};
use super::staged::StagedKernel;
use super::w_map::w_map;
use crate::spec::KernelSpec;
use crate::tensor_map::{EncodedMap, TileMap};

/// A kernel. Except for `Staged`, CTAs take tiles
/// of all experts in turn.
#[derive(Clone, Debug)]
enum Kernel {
    /// 8-bit operands whose sums are scaled.
    Fp8(Fp8Kernel),
    /// Block-scaled `mma`.
    BlockScaled(BlockScaledKernel),
    /// Weights decoded to bytes.
    Decoded(DecodedKernel),
    /// INT8 operands, one CTA for each tile.
    Staged(StagedKernel),
}

impl Kernel {
    /// Kernels for weights of `format` and activations of `x`.
    fn all(format: Format, x: XFormat, variant: Variant) -> impl Iterator<Item = Self> {
        let fp8 = fp8_kernels(format, x, variant).into_iter().filter_map(Fp8Kernel::for_experts).map(Kernel::Fp8);
        let block_scaled = block_scaled_kernels(format, x, variant).into_iter();
        let block_scaled = block_scaled.filter_map(BlockScaledKernel::for_experts).map(Kernel::BlockScaled);
        let decoded = DecodedKernel::all(format, x, variant).map(Kernel::Decoded);
        fp8.chain(block_scaled).chain(decoded).chain(StagedKernel::all(format, x, variant).map(Kernel::Staged))
    }

    fn serves(&self, op: &CheckedGemm) -> Result<(), Unsupported> {
        match self {
            Kernel::Fp8(kernel) => kernel.serves(op),
            Kernel::BlockScaled(kernel) => kernel.serves(op),
            // TMA limits are checked for all kernels together.
            Kernel::Decoded(_) | Kernel::Staged(_) => Ok(()),
        }
    }

    fn config(&self) -> TileConfig {
        match self {
            Kernel::Fp8(kernel) => kernel.config(),
            Kernel::BlockScaled(kernel) => kernel.config(),
            Kernel::Decoded(kernel) => kernel.instance().config(),
            Kernel::Staged(kernel) => kernel.instance().config(),
        }
    }

    fn config_on(&self, info: &DeviceInfo) -> TileConfig {
        match self {
            Kernel::Fp8(kernel) => kernel.config_on(info),
            Kernel::Staged(kernel) => kernel.instance().config_on(info),
            Kernel::BlockScaled(_) | Kernel::Decoded(_) => self.config(),
        }
    }

    fn id(&self) -> KernelId {
        match self {
            Kernel::Fp8(kernel) => kernel.id(),
            Kernel::BlockScaled(kernel) => kernel.id(),
            Kernel::Decoded(kernel) => kernel.id(),
            Kernel::Staged(kernel) => kernel.id(),
        }
    }

    fn spec(&self) -> KernelSpec {
        match self {
            Kernel::Fp8(kernel) => kernel.spec(),
            Kernel::BlockScaled(kernel) => kernel.spec(),
            Kernel::Decoded(kernel) => kernel.spec(),
            Kernel::Staged(kernel) => kernel.spec(),
        }
    }

    fn layout(&self) -> &PackedLayout {
        match self {
            Kernel::Fp8(kernel) => kernel.layout(),
            Kernel::BlockScaled(kernel) => kernel.layout(),
            Kernel::Decoded(kernel) => &kernel.instance().types.layout,
            Kernel::Staged(kernel) => &kernel.instance().types.layout,
        }
    }
}

/// All kernels for `variant`.
pub(super) fn specs(variant: Variant) -> impl Iterator<Item = KernelSpec> {
    let types = Format::all().flat_map(|format| XFormat::ALL.into_iter().map(move |x| (format, x)));
    // A staged INT8 kernel serves several formats of X and is
    // listed with its main one.
    let of_types =
        move |(format, x)| Kernel::all(format, x, variant).filter(move |kernel| kernel.config().x_format == x);
    types.flat_map(of_types).map(|kernel| kernel.spec())
}

/// Configs for X with `planes`.
///
/// # Errors
/// The refusal.
pub(super) fn configs(
    op: &CheckedExperts,
    planes: &XPlanes,
    info: &DeviceInfo,
    variant: Variant,
) -> Result<Vec<ExpertsConfig>, Unsupported> {
    let each = &op.each;
    if each.k_order {
        return Err(Unsupported::new("multiplies codes of X in the order of its columns"));
    }
    let all: Vec<_> = Kernel::all(each.format, each.x.format, variant).collect();
    if all.is_empty() {
        let (w, x) = (each.format, each.x.format);
        return Err(Unsupported::new(format!("has no kernel that multiplies codes of {w} and {x} with experts")));
    }
    // TMA row coordinates have 31 bits.
    if weight_rows(op).max(each.m) > i32::MAX as usize || planes.codes_row >= 1 << 40 {
        return Err(Unsupported::new("TMA reaches 2^31 rows, and 2^40 bytes from a row to the next"));
    }
    let all = serving(all, |kernel| kernel.serves(each))?;
    let scratch_bytes = scratch_bytes(op, planes, info)?;
    let config = |kernel: &Kernel| ExpertsConfig {
        tile: kernel.config_on(info),
        grouped: true,
        scratch_bytes,
        prefetches_early: false,
    };
    let fits = |config: &ExpertsConfig| config.tile.shared_bytes <= info.shared_bytes;
    Ok(all.iter().map(config).filter(fits).collect())
}

/// Bytes of slot lists and gathered planes.
fn scratch_bytes(op: &CheckedExperts, planes: &XPlanes, info: &DeviceInfo) -> Result<usize, Unsupported> {
    if !matches!(op.form, ExpertForm::Indexed { .. }) {
        return Ok(0);
    }
    let gathered =
        gathered(op, planes, info).ok_or_else(|| Unsupported::new("lists fewer slots, or of fewer experts"))?;
    Ok(gathered.end())
}

/// Gathered planes of X, after the lists if the run
/// builds them. `None` when rows are not slots, or the
/// slots cannot be listed.
pub(super) fn gathered(op: &CheckedExperts, planes: &XPlanes, info: &DeviceInfo) -> Option<GatheredX> {
    let lists = if op.lists { 0 } else { listed_slots(op, info.units)?.bytes() };
    GatheredX::of(op, planes, lists)
}

/// Weight rows of all experts, or of the one they share.
fn weight_rows(op: &CheckedExperts) -> usize {
    if op.row_pitch == 0 { op.each.stored_rows } else { op.experts.saturating_mul(op.row_pitch) }
}

/// Source hash of the config's kernel.
pub(super) fn source_hash(op: &CheckedExperts, config: &ExpertsConfig, variant: Variant) -> u64 {
    find(op, config, variant).map_or(0, |kernel| kernel.spec().source_hash().short())
}

fn find(op: &CheckedExperts, config: &ExpertsConfig, variant: Variant) -> Option<Kernel> {
    Kernel::all(op.each.format, op.each.x.format, variant).find(|kernel| kernel.id() == config.kernel_id(op))
}

/// The launch of a config for X in `planes`, with each
/// expert's rows contiguous. `None` when the variant lacks its kernel.
pub(super) fn launch(
    op: &CheckedExperts,
    planes: &XPlanes,
    config: &ExpertsConfig,
    info: &DeviceInfo,
    variant: Variant,
) -> Option<KernelLaunch> {
    let (kernel, each) = (find(op, config, variant)?, &op.each);
    let tile = kernel.config();
    let n_tiles = (each.stored_rows as u32).div_ceil(tile.tile_n);
    let tiles = TileSchedule { n_tiles, m_tiles: 1, swizzle_group: 1, cut_tiles: 0, cut_ctas: 0, cut_k_tiles: 1 };
    let k_tiles = each.stored_k.div_ceil(tile.tile_k as usize) as u32;
    let cut = Cut { k_tiles, splits: 1, has_factors: false, tiles };
    let grid = match &kernel {
        Kernel::Staged(kernel) => kernel.grid(op, n_tiles),
        _ => {
            let clusters = ((info.units / tile.cluster) as usize).saturating_mul(tile.ctas_per_unit as usize);
            let most = places(op, tile.tile_m as usize, true).saturating_mul(n_tiles as usize);
            [clusters.min(most).max(1) as u32 * tile.cluster, 1, 1]
        }
    };
    // The kernel does not use the element type of X.
    let x = Dense { dtype: DType::F16, row_stride: planes.codes_row, col_stride: 1, aligned16: true };
    Some(KernelLaunch {
        id: kernel.id(),
        spec: kernel.spec(),
        geometry: Geometry { grid, threads: tile.threads, shared_bytes: tile.shared_bytes },
        starts_early: variant >= Variant::Sm90,
        operands: ExpertOperand::ALL,
        updated: None,
        params: Arc::new(Launch {
            params: ProductParams { gemm: params(each, &x, &cut), groups: groups(op, kernel.layout()) },
            list: op.list_parts()?[1].start,
            planes: *planes,
            rows: each.m,
            columns: each.k,
            w: [weight_rows(op), each.stored_k],
            w_map: w_map(op, kernel.layout(), tile.tile_k / kernel.layout().k_tile as u32, tile.tile_n),
            kernel,
        }),
    })
}

/// `Fp8GemmParams` in `mainloop/fp8_codes.cuh`, for MoE GEMM.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
struct Fp8Params {
    product: ProductParams,
    x_scales: u64,
    x_scale_row: u64,
}

/// `BlockScaledParams` in
/// `mainloop/sm120/block_scaled_params.cuh`, for MoE GEMM.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
struct BlockScaledParams {
    product: ProductParams,
    x: BlockScaledX,
}

/// Padding in words after `bytes` bytes of parameters, up to the
/// 64-byte alignment of tensor maps.
const fn padding(bytes: usize) -> usize {
    (bytes.next_multiple_of(64) - bytes) / 8
}

/// `TmaFp8GemmParams` in `mainloop/sm90/fp8_pipeline.cuh`, for MoE
/// GEMM. The second map is unused, and the last is read
/// only if W is copied in cache lines.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
struct MappedFp8Params {
    fp8: Fp8Params,
    padding: [u64; padding(size_of::<Fp8Params>())],
    maps: [EncodedMap; 4],
}

/// `TmaBlockScaledParams`, for MoE GEMM. The second map is unused.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
struct MappedBlockScaledParams {
    x: BlockScaledParams,
    padding: [u64; padding(size_of::<BlockScaledParams>())],
    maps: [EncodedMap; 2],
}

/// Kernel parameter without addresses.
#[derive(Debug)]
struct Launch {
    params: ProductParams,
    /// Byte offset of the slots in the lists.
    list: usize,
    planes: XPlanes,
    /// Rows of X.
    rows: usize,
    columns: usize,
    /// Weight rows of all experts, and columns.
    w: [usize; 2],
    /// TMA map of W in packed k-tiles, without its address,
    /// for kernels that use one.
    w_map: TileMap,
    kernel: Kernel,
}

impl Launch {
    fn fp8(
        &self,
        kernel: &Fp8Kernel,
        product: ProductParams,
        x: &Fp8Matrix,
        [scales, factors]: [u64; 2],
        at: &Addresses<'_>,
    ) -> Result<LaunchParams, HalError> {
        let (x_scales, x_scale_row) = match self.planes.parts.factor {
            XFactor::None => (scales, self.planes.scales_row),
            XFactor::Given | XFactor::PerToken => (factors, 0),
        };
        let fp8 = Fp8Params { product, x_scales, x_scale_row };
        let Some(tiles) = kernel.maps(x, self.w, product.gemm.at.w) else { return Ok(LaunchParams::of(&fp8)) };
        let last = tiles.w_last.as_ref().map_or(Ok(EncodedMap::default()), |map| (at.encode)(map))?;
        let maps = [(at.encode)(&tiles.x)?, EncodedMap::default(), (at.encode)(&tiles.w)?, last];
        Ok(LaunchParams::of(&MappedFp8Params { fp8, maps, ..MappedFp8Params::zeroed() }))
    }
}

impl Params for Launch {
    fn with(&self, operands: &Operands<'_>, at: &Addresses<'_>) -> Result<LaunchParams, HalError> {
        let mut product = self.params;
        product.find(operands, at, self.list)?;
        let scales = at.of(operands, ExpertOperand::XScales)?;
        let factors = at.of(operands, ExpertOperand::XPlaneFactors)?;
        let x = Fp8Matrix {
            address: product.gemm.at.x,
            rows: operands.rows(self.rows) as u64,
            columns: self.columns as u64,
            row_bytes: self.planes.codes_row,
        };
        match &self.kernel {
            Kernel::Fp8(kernel) => self.fp8(kernel, product, &x, [scales, factors], at),
            Kernel::BlockScaled(kernel) => {
                let map = (at.encode)(&kernel.x_map(&x, kernel.tokens()))?;
                let x = BlockScaledParams { product, x: BlockScaledX::new(&self.planes, scales, factors) };
                let maps = [map, EncodedMap::default()];
                Ok(LaunchParams::of(&MappedBlockScaledParams { x, maps, ..MappedBlockScaledParams::zeroed() }))
            }
            Kernel::Decoded(kernel) => kernel.params(product, &x, &self.planes, scales, &self.w_map, at),
            Kernel::Staged(kernel) => Ok(kernel.params(product, &self.planes, scales)),
        }
    }

    fn takes_portions(&self) -> bool {
        true
    }
}
