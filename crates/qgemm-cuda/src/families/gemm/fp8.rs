//! GEMM kernels that multiply 8-bit operands directly (FP8 or INT8),
//! shared parts of their main loops.
//!
//! Tokens are the rows of the instructions. For floating-point
//! operands, the sums of 128 columns are scaled and added in
//! f32; integer sums are exact.

use std::sync::Arc;

use bytemuck::{Pod, Zeroable};
use qgemm_formats::prepack::{FragmentLayout, PackedLayout};
use qgemm_formats::{DType, Encoding, Format, ScalePlane, ScaleType, XCode, XFactor, XFormat};
use qgemm_hal::abi::dtype_code;
use qgemm_hal::{
    CheckedGemm, Dense, DeviceInfo, GemmOperand, HalError, KernelId, LaunchPlan, Math, Operands, Spec, TileConfig,
    Unsupported, Variant, XPlanes,
};

use super::super::kernel_launch::{Addresses, Params};
use super::super::launch_params::LaunchParams;
use super::super::prelude::Prelude;
use super::common::STAGE_K;
use super::instance::{MOST_MAPPED, MOST_STRIDE_BYTES};
use super::main_loop::MainLoop;
use super::params::{Cut, GemmParams, params};
use super::shares::Shares;
use crate::source;
use crate::spec::KernelSpec;
use crate::tensor_map::TileMap;

/// Columns that share a power-of-two scale.
const POWER_K: u32 = 32;
/// Rows that share a scale record.
pub(super) const SCALE_ROWS: u32 = 8;
/// `sizeof(WarpStaging)` in `epilogue/token_rows_store.cuh`.
pub(super) const WARP_STAGING: u32 = 16 * 32 * 4;

/// Product of 8-bit operands: what the kernels of a main loop
/// have in common.
#[derive(Debug)]
pub(super) struct Fp8Product {
    /// The main loop.
    pub main_loop: &'static MainLoop,
    /// Supported variants.
    pub variants: &'static [Variant],
    /// Whether it supports a weight format.
    pub takes: fn(Format) -> bool,
    /// Whether a tile's kernel supports power-of-two scales (UE8M0) for every
    /// 32 columns of a row, and fits in registers then.
    pub takes_ue8m0_scales: fn(&Fp8Tile) -> bool,
    /// Codes of X, and the instructions.
    pub x_code: XCode,
    pub math: Math,
    /// Maximum columns whose sums cannot overflow.
    pub most_k: fn(&Fp8Tile) -> usize,
    pub tiles: &'static [Fp8Tile],
    /// Reference rates of the tiles' efficiency.
    pub shares: Shares,
    /// Whether a tile's kernel fits in registers on a variant,
    /// according to `kernels.lock`.
    pub fits_registers: fn(&Fp8Tile, Variant) -> bool,
    /// Threads that hold accumulators. All other threads are producers.
    pub consumers: fn(&Fp8Tile) -> u32,
    pub producers: u32,
    /// The tile for a weight layout; `None` when unsupported.
    pub tile_of: fn(&Fp8Tile, &PackedLayout) -> Option<Fp8Tile>,
    /// `sizeof(SharedStorage)` of the kernel, which asserts it.
    pub shared_bytes: fn(&Fp8Tile) -> u32,
    /// MoE kernel, if any.
    pub experts: Option<Fp8Experts>,
    /// Kernel parameter of a launch.
    pub params: fn(&Fp8Launch, &Fp8Params, &Addresses<'_>) -> Result<LaunchParams, HalError>,
}

/// MoE kernel of a main loop, whose CTAs take tiles of
/// all experts in turn. Each expert's rows are contiguous.
#[derive(Debug)]
pub(super) struct Fp8Experts {
    /// Source file and kernel symbol.
    pub entry: &'static str,
    pub symbol: &'static str,
    /// Whether a tile suits the rows of experts.
    pub is_eligible: fn(&Fp8Tile) -> bool,
    /// Reached share of the bandwidth, per mille.
    pub bandwidth: u32,
    /// `sizeof(SharedStorage)` of the kernel, which asserts it.
    pub shared_bytes: fn(&Fp8Tile) -> u32,
    /// TMA maps of X and W for a tile, from the
    /// location of X's codes and rows, columns and address of W.
    /// `None` when the kernel uses addresses.
    pub maps: Option<ExpertMaps>,
}

/// See [`Fp8Experts::maps`].
pub(super) type ExpertMaps = fn(&PackedLayout, &Fp8Tile, &Fp8Matrix, [usize; 2], u64) -> ExpertTileMaps;

/// TMA maps of an MoE kernel: X, W, and the last
/// k-tiles of W if W is copied in whole cache lines.
#[derive(Clone, Copy, Debug)]
pub(in crate::families) struct ExpertTileMaps {
    pub x: TileMap,
    pub w: TileMap,
    pub w_last: Option<TileMap>,
}

/// Location of X's codes.
#[derive(Clone, Copy, Debug)]
pub(in crate::families) struct Fp8Matrix {
    pub address: u64,
    pub rows: u64,
    pub columns: u64,
    pub row_bytes: u64,
}

/// A tile and its split over the warps of a CTA.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fp8Tile {
    /// Tokens and output features of a CTA.
    pub tokens: u32,
    pub features: u32,
    pub stages: u32,
    /// CTAs of a cluster along M. They share a work tile
    /// of `cluster · tokens` tokens and multicast W to each other.
    pub cluster: u32,
    /// Bytes of the cache lines of a row tile in a
    /// stage, when W is copied in whole lines because its k-tiles
    /// are not line-aligned. Otherwise 0.
    pub lines: u32,
    /// Split over the warps.
    pub division: Fp8Division,
    /// Estimated shares of matrix rate and bandwidth, per mille of the
    /// rates that [`Fp8Product::shares`] names.
    pub efficiency: (u32, u32),
}

/// Split of a tile over the warps of a CTA.
#[derive(Clone, Copy, Debug)]
pub(super) enum Fp8Division {
    /// Warps along tokens and along features.
    Warps(u32, u32),
    /// Features of a `wgmma`, and `wgmma`s side by side in
    /// a warpgroup.
    Wgmma(u32, u32),
}

/// One kernel.
#[derive(Clone, Debug)]
pub(in crate::families) struct Fp8Kernel {
    product: &'static Fp8Product,
    format: Format,
    x: XFormat,
    variant: Variant,
    layout: PackedLayout,
    tile: Fp8Tile,
    /// The MoE kernel, if this is one.
    experts: Option<&'static Fp8Experts>,
}

impl Fp8Product {
    /// Kernels for weights of `format` and activations of `x`.
    /// None when the codes are unsupported or a scale spans
    /// another number of values.
    pub(super) fn kernels(&'static self, format: Format, x: XFormat, variant: Variant) -> Vec<Fp8Kernel> {
        let serves = self.variants.contains(&variant) && (self.takes)(format);
        let (scaled, powers) = (takes_scales(format), has_ue8m0_scales(format));
        if !serves || !(scaled || powers) || !takes_activations(x, self.x_code) {
            return Vec::new();
        }
        let Some(layout) = PackedLayout::new(format, FragmentLayout::MmaM16) else { return Vec::new() };
        let x = listed_as(x);
        let kernel =
            |tile| Fp8Kernel { product: self, format, x, variant, layout: layout.clone(), tile, experts: None };
        let fits =
            |tile: &&Fp8Tile| (self.fits_registers)(tile, variant) && (scaled || (self.takes_ue8m0_scales)(tile));
        let tiles = self.tiles.iter().filter(fits).filter_map(|tile| (self.tile_of)(tile, &layout));
        tiles.map(kernel).collect()
    }
}

/// Whether weights have one scale for all columns, or f32 scales
/// for whole stages and many rows.
fn takes_scales(format: Format) -> bool {
    let scales: Vec<_> = format.float_scales.iter().map(|scale| scale.kind).collect();
    match (format.scale_planes, scales.as_slice()) {
        ([], []) => true,
        ([plane], [ScaleType::F32]) => {
            plane.span == STAGE_K as usize && plane.rows >= SCALE_ROWS as usize && plane.bytes == 4
        }
        _ => false,
    }
}

/// Whether each row has a UE8M0 scale for every 32 columns.
fn has_ue8m0_scales(format: Format) -> bool {
    let scales: Vec<_> = format.float_scales.iter().map(|scale| scale.kind).collect();
    let is_record = |plane: &ScalePlane| (plane.bytes, plane.span, plane.rows) == (1, POWER_K as usize, 1);
    format.scale_planes.len() == 1 && format.scale_planes.iter().all(is_record) && scales == [ScaleType::E8M0]
}

fn takes_activations(x: XFormat, code: XCode) -> bool {
    let spans = |block: Option<usize>| block.is_none_or(|columns| columns == STAGE_K as usize);
    let scaled = |scale: Option<ScaleType>| scale.is_none_or(|scale| scale == ScaleType::F32);
    x.parts(false, None).is_some_and(|p| p.code == code && spans(p.block) && scaled(p.scale))
}

/// The first format with the codes and blocks of `x`. Kernels read one factor
/// of all tokens as they read token scales, with a stride of 0.
fn listed_as(x: XFormat) -> XFormat {
    let product = |x: XFormat| x.parts(false, None).map(|parts| (parts.code, parts.block));
    XFormat::ALL.into_iter().find(|&other| product(other) == product(x)).unwrap_or(x)
}

impl Fp8Kernel {
    /// The MoE version of this kernel, if any.
    pub(in crate::families) fn for_experts(self) -> Option<Self> {
        let experts = self.product.experts.as_ref().filter(|experts| (experts.is_eligible)(&self.tile))?;
        Some(Self { experts: Some(experts), ..self })
    }

    /// Packed layout of W.
    pub(in crate::families) fn layout(&self) -> &PackedLayout {
        &self.layout
    }

    /// TMA maps of X, and of W with these rows and
    /// columns. `None` unless it is an MoE kernel with maps.
    pub(in crate::families) fn maps(&self, x: &Fp8Matrix, rows: [usize; 2], w: u64) -> Option<ExpertTileMaps> {
        self.experts?.maps.map(|maps| maps(&self.layout, &self.tile, x, rows, w))
    }

    /// Whether W has UE8M0 scales.
    fn has_ue8m0_scales(&self) -> bool {
        has_ue8m0_scales(self.format)
    }

    fn shared_bytes(&self) -> u32 {
        let powers =
            self.tile.stages * if self.has_ue8m0_scales() { self.tile.features * (STAGE_K / POWER_K) } else { 0 };
        powers
            + match self.experts {
                Some(experts) => (experts.shared_bytes)(&self.tile),
                None => (self.product.shared_bytes)(&self.tile),
            }
    }

    fn consumers(&self) -> u32 {
        (self.product.consumers)(&self.tile)
    }

    fn threads(&self) -> u32 {
        self.consumers() + self.product.producers
    }

    /// Whether the kernel supports `op`.
    ///
    /// # Errors
    /// The refusal.
    pub(in crate::families) fn serves(&self, op: &CheckedGemm) -> Result<(), Unsupported> {
        if op.m.max(op.stored_rows).max(op.stored_k) > MOST_MAPPED || op.x.row_stride >= MOST_STRIDE_BYTES {
            return Err(Unsupported::new("TMA reaches 2^31 rows and columns, and 2^40 bytes from a row to the next"));
        }
        if self.tile.lines > 0 && self.layout.k_tiles(op.stored_k) < 2 {
            return Err(Unsupported::new("copies lines of the cache that begin before a single k-tile"));
        }
        match (self.product.most_k)(&self.tile) {
            most if op.stored_k > most => Err(Unsupported::new(format!("adds up {most} columns at most"))),
            _ => Ok(()),
        }
    }

    pub(in crate::families) fn config(&self) -> TileConfig {
        let Fp8Tile { tokens, features, stages, cluster, efficiency, .. } = self.tile;
        // Most experts' weights are read only once.
        let bandwidth = self.experts.map_or(efficiency.1, |experts| experts.bandwidth);
        TileConfig {
            family: self.product.main_loop.kind.family(),
            main_loop: self.product.main_loop.kind.name(),
            variant: Some(self.variant),
            math: self.product.math,
            tile_n: features,
            tile_m: tokens * cluster,
            tile_k: STAGE_K,
            threads: self.threads(),
            ctas_per_unit: 1,
            cluster,
            schedule: self.product.main_loop.schedule,
            max_splits: 16,
            warps_n: self.consumers() / 32,
            k_groups: 1,
            stages,
            shared_bytes: self.shared_bytes(),
            x_format: self.x,
            x_prologue: None,
            rounded_weights: None,
            normalizes_x: false,
            efficiency: (efficiency.0, bandwidth),
        }
    }

    /// The config with efficiencies relative to the chip's rates.
    pub(in crate::families) fn config_on(&self, info: &DeviceInfo) -> TileConfig {
        let config = self.config();
        TileConfig { efficiency: self.product.shares.on(config.efficiency, config.math, info), ..config }
    }

    /// Kernel identity.
    pub(in crate::families) fn id(&self) -> KernelId {
        let id = self.config().kernel_id(self.format);
        match (self.experts, id.spec) {
            (Some(_), Spec::Gemm(spec)) => KernelId { spec: Spec::Experts(spec), ..id },
            _ => id,
        }
    }

    pub(in crate::families) fn spec(&self) -> KernelSpec {
        let of_one = (self.product.main_loop.entry, self.product.main_loop.symbol);
        let (entry, symbol) = self.experts.map_or(of_one, |experts| (experts.entry, experts.symbol));
        KernelSpec {
            name: self.id().to_string(),
            entry,
            text: source::entry(entry),
            symbol,
            prelude: self.prelude().text(),
            arch_specific: self.product.main_loop.arch_specific,
        }
    }

    fn prelude(&self) -> Prelude<'_> {
        let Fp8Tile { tokens, features, division, stages, cluster, lines, .. } = self.tile;
        let scales = self.layout.scales.first();
        let (has_experts, has_ue8m0_scales) = (self.experts.is_some(), self.has_ue8m0_scales());
        let ([warps_m, warps_n], [part_n, parts]) = match division {
            Fp8Division::Warps(m, n) => ([Some(m), Some(n)], [None; 2]),
            Fp8Division::Wgmma(part, parts) => ([None; 2], [Some(part), Some(parts)]),
        };
        Prelude {
            variant: Some(self.variant.number()),
            w_e5m2: Some((self.format.encoding == Encoding::E5M2).into()),
            integers: Some((self.product.math == Math::TensorS8).into()),
            x_bits: Some(0),
            w_powers: Some(has_ue8m0_scales.into()),
            cluster: Some(cluster),
            w_lines: Some((lines > 0).into()),
            experts: Some(has_experts.into()),
            expert_tiles: Some(has_experts.into()),
            // The type here does not matter: TMA addresses rows by
            // number, other kernels count bytes.
            x_dtype: has_experts.then(|| dtype_code(DType::F16)),
            k_tile: Some(self.layout.k_tile as u32),
            k_tile_bytes: Some(self.layout.k_tile_bytes as u32),
            scale_offset: Some(scales.map_or(0, |plane| plane.offset as u32)),
            w_block_scales: Some((scales.is_some() && !has_ue8m0_scales).into()),
            w_scale_rows: Some(self.format.scale_planes.first().map_or(1, |plane| plane.rows as u32)),
            x_block_scales: Some(self.x.parts(false, None).is_some_and(|parts| parts.block.is_some()).into()),
            tile_m: Some(tokens),
            tile_n: Some(features),
            warps_m,
            warps_n,
            part_n,
            parts,
            stages: Some(stages),
            threads: Some(self.threads()),
            consumers: Some(self.consumers()),
            shared_bytes: Some(self.shared_bytes()),
            ..Prelude::PRODUCT
        }
    }

    /// Kernel parameter of `plan` without addresses.
    pub(in crate::families) fn launch(&self, op: &CheckedGemm, planes: &XPlanes, plan: &LaunchPlan) -> Arc<dyn Params> {
        // The kernel does not use the element type of X.
        let x = Dense { dtype: op.d.dtype, row_stride: planes.codes_row, col_stride: 1, aligned16: true };
        Arc::new(Fp8Launch {
            product: self.product,
            params: params(op, &x, &Cut::of(plan)),
            planes: *planes,
            layout: self.layout.clone(),
            tile: self.tile,
            stored_rows: op.stored_rows,
            stored_k: op.stored_k,
            second_bias: op.bias.filter(|_| op.gated).map_or(0, |dtype| op.out_features * dtype.bytes()) as u64,
            residual_in_d: op.residual_in_d,
        })
    }
}

/// `Fp8GemmParams` in `mainloop/fp8_codes.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub(super) struct Fp8Params {
    pub gemm: GemmParams,
    pub x_scales: u64,
    pub x_scale_row: u64,
}

/// Kernel parameter without addresses.
#[derive(Debug)]
pub(super) struct Fp8Launch {
    product: &'static Fp8Product,
    params: GemmParams,
    planes: XPlanes,
    pub layout: PackedLayout,
    pub tile: Fp8Tile,
    pub stored_rows: usize,
    pub stored_k: usize,
    /// Bytes from the gate's bias to the
    /// up's in a gated pair.
    second_bias: u64,
    residual_in_d: bool,
}

impl Params for Fp8Launch {
    fn with(&self, operands: &Operands<'_>, places: &Addresses<'_>) -> Result<LaunchParams, HalError> {
        let mut gemm = self.params;
        gemm.find(operands, places, self.residual_in_d, self.second_bias)?;
        let (scales, x_scale_row) = match self.planes.parts.factor {
            XFactor::None => (GemmOperand::XScales, self.planes.scales_row),
            XFactor::Given | XFactor::PerToken => (GemmOperand::XPlaneFactors, 0),
        };
        let x_scales = places.of(operands, scales)?;
        (self.product.params)(self, &Fp8Params { gemm, x_scales, x_scale_row }, places)
    }
}
