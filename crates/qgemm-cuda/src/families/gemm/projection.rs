//! `projection`: products with output segments, and with a fused norm for
//! one token (a few tokens before Ampere).
//!
//! These are kernels of the main loops compiled once more
//! (`sched/projection.cuh`, `mainloop/normalized_x.cuh`). One launch
//! replaces a norm launch and one launch for each output.

use std::sync::Arc;

use bytemuck::{Pod, Zeroable};
use qgemm_formats::{DType, Format};
use qgemm_hal::abi::{ProjectionOperands, dtype_code};
use qgemm_hal::{
    CheckedGemm, Dense, DeviceInfo, GemmOperand, Geometry, HalError, KernelId, LaunchPlan, LaunchSequence, NormKind,
    NormedX, Operand, Operands, Schedule, Segment, TileConfig, Unsupported, Variant,
};

use super::super::kernel_launch::{Addresses, KernelLaunch, MakeKernel, Params};
use super::super::launch_params::LaunchParams;
use super::super::prelude::Prelude;
use super::common::K_BLOCK;
use super::instance::Instance;
use super::instances::{Key, ListedKernels, main_loops};
use super::main_loop::{SegmentTile, XAccess};
use super::params::{Cut, GemmParams, MAP_ALIGNMENT, bound, params};
use super::spills::{fits_registers_as, key};
use super::types::Types;
use crate::spec::KernelSpec;
use crate::tensor_map::EncodedMap;

/// Family name.
pub(in crate::families) const NAME: &str = "projection";
/// Maximum features: 21 bits count tiles of 16.
const MOST_FEATURES: usize = ((1 << 21) - 1) * Segment::STEP;
/// Columns that a thread reads at once for a row's statistics.
const GROUP: usize = 8;

/// Kernels by key, listed once per process.
static KERNELS: ListedKernels = ListedKernels::new();

fn types() -> impl Iterator<Item = (Format, DType)> {
    Format::all().flat_map(|format| DType::ALL.map(|x| (format, x)))
}

/// Kernels for these types.
fn kernels(format: Format, x: DType, variant: Variant) -> &'static [Instance] {
    let key = (format, x, variant);
    let fits = |instance: &Instance| fits_registers_as(id(instance), instance);
    KERNELS.get(key, |key| list(key, &fits))
}

fn list((format, x, variant): Key, fits: &dyn Fn(&Instance) -> bool) -> Vec<Instance> {
    let of_types = |types: &Types| {
        let few: Vec<Instance> = main_loops(false).flat_map(|lists| (lists.for_projections)(types, fits)).collect();
        let tiles = main_loops(false).flat_map(|lists| lists.main_loop.segments.iter().map(move |tile| (lists, tile)));
        let of_variant = tiles.filter(|(_, tile)| tile.variants.contains(&variant));
        let of_segments = of_variant.filter_map(|(lists, tile)| lists.first_of_tokens(types, tile.tokens, fits));
        few.into_iter().chain(of_segments).collect::<Vec<_>>()
    };
    Types::new(format, x, variant).iter().flat_map(of_types).collect()
}

/// All kernels for `variant`.
pub(in crate::families) fn projection_specs(variant: Variant) -> impl Iterator<Item = KernelSpec> {
    types().flat_map(move |(format, x)| kernels(format, x, variant)).map(spec)
}

/// Checks whether each kernel fits in registers, using its
/// line of `kernels.spills`.
pub(in crate::families) fn ask_registers_of_projections(variant: Variant, fits: &dyn Fn(String, KernelSpec) -> bool) {
    let fits = |instance: &Instance| fits(key(id(instance), instance), spec(instance));
    types().for_each(|(format, x)| drop(list((format, x, variant), &fits)));
}

fn config(instance: &Instance) -> TileConfig {
    TileConfig { family: NAME, ..instance.config() }
}

fn config_on(instance: &Instance, info: &DeviceInfo) -> TileConfig {
    TileConfig { family: NAME, ..instance.config_on(info) }
}

fn id(instance: &Instance) -> KernelId {
    config(instance).kernel_id(instance.types.format)
}

fn spec(instance: &Instance) -> KernelSpec {
    let takes_tiles = instance.main_loop.schedule != Schedule::Grid;
    let constants = Prelude {
        projection: Some(1),
        resident_x: Some(instance.one_row.into()),
        segment_tiles: Some(takes_tiles.into()),
        tile_features: Some(instance.tile_n),
        ..instance.constants
    };
    instance.spec_with(id(instance), constants)
}

/// Maximum tokens with a fused norm; 0 without one. With more
/// tokens every CTA would normalize the same rows, and a
/// separate launch is no slower.
fn most_normalized(instance: &Instance) -> usize {
    match instance.main_loop.normalizes_x {
        true if instance.one_row => 1,
        true => instance.tile_m as usize,
        false => 0,
    }
}

/// Whether a kernel without a fused norm writes the
/// segments of `tokens` tokens.
fn writes(instance: &Instance, tokens: usize) -> bool {
    let is_of = |tile: &&SegmentTile| tile.tokens == instance.tile_m;
    let tile = instance.main_loop.segments.iter().find(is_of);
    tokens <= instance.most_tokens() && tile.is_some_and(|tile| tile.serves.contains(&tokens))
}

/// Maximum columns of a kernel that keeps all of X.
fn most_columns(instance: &Instance) -> usize {
    instance.constants.x_blocks.map_or(usize::MAX, |count| count as usize * K_BLOCK as usize)
}

/// The kernel of `config`.
fn kernel(op: &CheckedGemm, config: &TileConfig) -> Option<&'static Instance> {
    let (x, variant) = (config.x_format.plain()?, config.variant?);
    kernels(op.format, x, variant).iter().find(|instance| id(instance) == config.kernel_id(op.format))
}

/// Source hash of the config's kernel.
pub(in crate::families) fn projection_source_hash(op: &CheckedGemm, config: &TileConfig) -> u64 {
    kernel(op, config).map_or(0, |instance| spec(instance).source_hash().short())
}

/// Configs that support `op`.
///
/// # Errors
/// The refusal.
pub(in crate::families) fn projection_configs(
    op: &CheckedGemm,
    variant: Variant,
    info: &DeviceInfo,
) -> Result<Vec<TileConfig>, Unsupported> {
    let refuse = |why: &str| Err(Unsupported::new(why));
    if op.norm.is_none() && op.segments.is_empty() {
        return refuse("normalizes X or writes several outputs");
    }
    let multiplied = op.plain_x()?;
    if op.k_order {
        return refuse("reads columns of X in their order");
    }
    let borders = |instance: &&Instance| {
        let is_eligible = |s: &Segment| s.first.is_multiple_of(instance.tile_n as usize) && s.first < MOST_FEATURES;
        op.segments.iter().all(is_eligible)
    };
    let has_room = |instance: &&Instance| {
        let columns = instance.types.layout.k_tiles(op.stored_k) * instance.tile_k as usize;
        instance.shared_bytes <= info.shared_bytes && columns <= most_columns(instance)
    };
    let in_order = multiplied.aligned16 && multiplied.col_stride == 1;
    let all: Vec<_> = kernels(op.format, multiplied.dtype, variant).iter().filter(borders).filter(has_room).collect();
    let refusal = |takes_f32| op.norm.and_then(|norm| not_inside(&norm, (multiplied.dtype, takes_f32), op.k));
    let normalizes = |i: &Instance| op.norm.is_some() && refusal(i.main_loop.normalizes_f32).is_none();
    // Kernels with a fused norm, with the smallest sufficient token tile,
    // if they support the norm or read X unchanged.
    let tile = all.iter().map(|i| most_normalized(i)).filter(|&tile| tile >= op.m).min();
    let is_plain = in_order && op.k.is_multiple_of(GROUP) && !op.segments.is_empty();
    let few = all.iter().filter(|i| (normalizes(i) || is_plain) && Some(most_normalized(i)) == tile);
    let few = few.map(|i| TileConfig { normalizes_x: normalizes(i), ..config_on(i, info) });
    // Kernels without a fused norm, after a norm launch if needed.
    let others = all.iter().filter(|i| !op.segments.is_empty() && writes(i, op.m) && i.serves(op, in_order));
    let others: Vec<_> = others.collect();
    let is_smaller = |a: &Instance, b: &Instance| a.main_loop.kind == b.main_loop.kind && a.tile_m < b.tile_m;
    let largest = others.iter().filter(|i| !others.iter().any(|other| is_smaller(i, other)));
    let others = largest.map(|instance| config_on(instance, info));
    let configs: Vec<_> = few.chain(others).collect();
    if configs.is_empty() {
        return refuse(refusal(true).unwrap_or("serves no such X, number of tokens, columns or segments"));
    }
    Ok(configs)
}

/// Why a norm cannot be fused; `None` when it can. A kernel may
/// take X in f32, whatever it multiplies.
fn not_inside(norm: &NormedX, (multiplied, takes_f32): (DType, bool), k: usize) -> Option<&'static str> {
    let NormedX { function, x } = norm;
    if function.kind != NormKind::Rms || function.beta.is_some() {
        return Some("normalizes X by RMSNorm without beta only");
    }
    if x.dtype != multiplied && !(takes_f32 && x.dtype == DType::F32) {
        return Some("reads X in the type in which it is multiplied");
    }
    let is_read = x.aligned16 && x.col_stride == 1 && k.is_multiple_of(GROUP);
    (!is_read).then_some("reads rows of X that begin at multiples of 16 bytes, in whole groups of eight columns")
}

/// The launch of `plan`.
///
/// # Errors
/// [`HalError::KernelUnavailable`] when the family lacks the plan's
/// kernel, and errors of `make`.
pub(super) fn projection_sequence(
    op: &CheckedGemm,
    plan: &LaunchPlan,
    info: &DeviceInfo,
    make: &mut MakeKernel<'_>,
) -> Result<LaunchSequence, HalError> {
    let unavailable = || HalError::KernelUnavailable {
        kernel: plan.config.kernel_id(op.format).to_string(),
        target: info.arch.clone(),
        why: "it is none of the variant's kernels".to_owned(),
    };
    let instance = kernel(op, &plan.config).ok_or_else(unavailable)?;
    let norm = op.norm.filter(|_| plan.config.normalizes_x);
    let x = norm.map_or_else(|| op.plain_x(), |norm| Ok(norm.x)).map_err(|_| unavailable())?;
    let launch = KernelLaunch {
        id: id(instance),
        spec: spec(instance),
        geometry: Geometry {
            grid: plan.grid_of_ctas(),
            threads: plan.config.threads,
            shared_bytes: plan.config.shared_bytes,
        },
        starts_early: instance.types.variant >= Variant::Sm90,
        operands: GemmOperand::ALL,
        updated: op.residual_in_d.then(|| GemmOperand::D.slot()),
        params: Arc::new(ProjectionLaunch::new(op, norm.as_ref(), &x, plan, instance)),
    };
    let mut step = bound(launch.step::<GemmOperand>(make)?, op, plan);
    if norm.is_some_and(|norm| norm.function.gamma.is_some()) {
        step = step.bind(GemmOperand::Gamma, GemmOperand::Gamma);
    }
    for (operand, ..) in op.outputs().skip(1) {
        step = step.bind(operand, operand);
    }
    Ok(LaunchSequence::new::<GemmOperand>(op.kernel_name(plan.config.family), vec![step]))
}

/// `GemmParams` in `sched/params.cuh`, with projection operands.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
struct ProjectionParams {
    gemm: GemmParams,
    projection: ProjectionOperands,
}

const PADDING: usize =
    (size_of::<ProjectionParams>().next_multiple_of(MAP_ALIGNMENT) - size_of::<ProjectionParams>()) / 8;

/// `TmaGemmParams` in `mainloop/tma_params.cuh`, with projection operands.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
struct MappedProjectionParams {
    of_all: ProjectionParams,
    padding: [u64; PADDING],
    x_maps: [EncodedMap; 2],
}

/// Kernel parameter without addresses.
#[derive(Debug)]
struct ProjectionLaunch {
    params: ProjectionParams,
    /// Bytes from the gate's bias to the
    /// up's in a gated pair.
    second_bias: u64,
    residual_in_d: bool,
    /// Type of X and tokens of a tile, for
    /// kernels that read X by TMA.
    mapped: Option<(DType, u32)>,
}

impl ProjectionLaunch {
    fn new(op: &CheckedGemm, norm: Option<&NormedX>, x: &Dense, plan: &LaunchPlan, instance: &Instance) -> Self {
        const BITS: usize = 21;
        let gamma = norm.and_then(|norm| norm.function.gamma);
        let reads_f32 = norm.is_some() && x.dtype == DType::F32;
        let mut types = gamma.map_or(0, dtype_code) | u32::from(norm.is_some()) << 16 | u32::from(reads_f32) << 20;
        let (mut firsts, mut rows) = (u64::MAX, [0; Segment::MOST - 1]);
        for (index, segment) in op.segments.iter().enumerate() {
            let place = index + 1;
            types |= dtype_code(segment.d.dtype) << (4 * place) | u32::from(segment.d.aligned16) << (16 + place);
            firsts &= !(((1 << BITS) - 1) << (BITS * index));
            firsts |= ((segment.first / Segment::STEP) as u64) << (BITS * index);
            rows[index] = segment.d.row_stride;
        }
        let [d1_row, d2_row, d3_row] = rows;
        let eps = norm.map_or(0.0, |norm| norm.function.eps);
        let projection =
            ProjectionOperands { d1_row, d2_row, d3_row, firsts, types, eps, ..ProjectionOperands::default() };
        Self {
            params: ProjectionParams { gemm: params(op, x, &Cut::of(plan)), projection },
            second_bias: op.bias.filter(|_| op.gated).map_or(0, |dtype| op.out_features * dtype.bytes()) as u64,
            residual_in_d: op.residual_in_d,
            mapped: (instance.main_loop.x_access == XAccess::Tma).then_some((x.dtype, instance.tile_m)),
        }
    }
}

impl Params for ProjectionLaunch {
    fn with(&self, operands: &Operands<'_>, places: &Addresses<'_>) -> Result<LaunchParams, HalError> {
        let mut params = self.params;
        params.gemm.find(operands, places, self.residual_in_d, self.second_bias)?;
        let at = &mut params.projection;
        at.gamma = places.of(operands, GemmOperand::Gamma)?;
        at.d1 = places.of(operands, GemmOperand::D2)?;
        at.d2 = places.of(operands, GemmOperand::D3)?;
        at.d3 = places.of(operands, GemmOperand::D4)?;
        let Some((x, tokens)) = self.mapped else { return Ok(LaunchParams::of(&params)) };
        let x_maps = params.gemm.x_maps(x, tokens, places)?;
        Ok(LaunchParams::of(&MappedProjectionParams { of_all: params, x_maps, ..MappedProjectionParams::zeroed() }))
    }
}
