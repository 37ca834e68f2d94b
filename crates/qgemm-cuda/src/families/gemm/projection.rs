//! Products of one token, before Ampere of a few, whose kernels normalize X themselves, and write segments where they belong: those of the
//! main loops for a few tokens, compiled once more (`sched/projection.cuh`, `mainloop/normalized_x.cuh`). One launch does what else takes that of a norm before,
//! and one for each output behind.

use std::sync::Arc;

use bytemuck::{Pod, Zeroable};
use qgemm_formats::{DType, Format};
use qgemm_hal::abi::{ProjectionOperands, dtype_code};
use qgemm_hal::{
    CheckedGemm, Dense, DeviceInfo, GemmOperand, Geometry, HalError, KernelId, LaunchPlan, LaunchSequence, NormKind,
    NormedX, Operand, Operands, Segment, TileConfig, Unsupported, Variant,
};

use super::super::kernel_launch::{KernelLaunch, MakeKernel, Params, Places};
use super::super::launch_params::LaunchParams;
use super::super::prelude::macro_line;
use super::common::K_BLOCK;
use super::instance::Instance;
use super::instances::{Key, ListedKernels};
use super::params::{Cut, GemmParams, bound, params};
use super::spills::{fits_registers_as, key};
use super::types::Types;
use super::{gemm_sliced_k, gemv};
use crate::spec::KernelSpec;

/// Name of the family.
pub(in crate::families) const NAME: &str = "projection";
/// Features that 21 bits count in tiles of 16.
const MOST_FEATURES: usize = ((1 << 21) - 1) * Segment::STEP;
/// Columns that threads read at once to find a row's statistics.
const GROUP: usize = 8;

/// The kernels of each key, listed once a process.
static KERNELS: ListedKernels = ListedKernels::new();

fn types() -> impl Iterator<Item = (Format, DType)> {
    Format::all().flat_map(|format| DType::ALL.map(|x| (format, x)))
}

/// The kernels for these types.
fn kernels(format: Format, x: DType, variant: Variant) -> &'static [Instance] {
    let key = (format, x, variant);
    let fits = |instance: &Instance| fits_registers_as(id(instance), instance);
    KERNELS.get(key, |key| list(key, &fits))
}

fn list((format, x, variant): Key, fits: &dyn Fn(&Instance) -> bool) -> Vec<Instance> {
    let of = |types: &Types| match gemm_sliced_k::for_projections(types, fits) {
        None => gemv::for_projections(types).into_iter().filter(|instance| fits(instance)).collect(),
        Some(instance) => vec![instance],
    };
    Types::new(format, x, variant).iter().flat_map(of).collect()
}

/// Every kernel on devices of `variant`.
pub(in crate::families) fn projection_specs(variant: Variant) -> impl Iterator<Item = KernelSpec> {
    types().flat_map(move |(format, x)| kernels(format, x, variant)).map(spec)
}

/// Asks of each kernel whether it fits in registers, by its line of `kernels.spills`.
pub(in crate::families) fn ask_registers_of_projections(variant: Variant, fits: &dyn Fn(String, KernelSpec) -> bool) {
    let fits = |instance: &Instance| fits(key(id(instance), instance), spec(instance));
    types().for_each(|(format, x)| drop(list((format, x, variant), &fits)));
}

fn config(instance: &Instance) -> TileConfig {
    TileConfig { family: NAME, ..instance.config() }
}

fn id(instance: &Instance) -> KernelId {
    config(instance).kernel_id(instance.types.format)
}

fn spec(instance: &Instance) -> KernelSpec {
    let mut own = String::new();
    for (name, value) in [("QG_PROJECTION", 1), ("QG_X_ROWS", tokens(instance) as u32)] {
        macro_line(&mut own, name, &value.to_string());
    }
    instance.spec_with(id(instance), &own)
}

/// Tokens that a kernel serves: for more, whose rows all CTAs would normalize alike, a launch before takes no longer.
fn tokens(instance: &Instance) -> usize {
    if gemm_sliced_k::is_for_one(instance) { 1 } else { instance.tile_m as usize }
}

/// Columns that a kernel has room for, where it keeps all of X.
fn most_columns(instance: &Instance) -> usize {
    let k_blocks = instance.constants.iter().find(|(name, _)| *name == gemm_sliced_k::X_BLOCKS);
    k_blocks.map_or(usize::MAX, |&(_, count)| count as usize * K_BLOCK as usize)
}

/// The kernel of `config`.
fn kernel(op: &CheckedGemm, config: &TileConfig) -> Option<&'static Instance> {
    let (x, variant) = (config.x_format.plain()?, config.variant?);
    kernels(op.format, x, variant).iter().find(|instance| id(instance) == config.kernel_id(op.format))
}

/// Of the sources of the configuration's kernel.
pub(in crate::families) fn projection_source_hash(op: &CheckedGemm, config: &TileConfig) -> u64 {
    kernel(op, config).map_or(0, |instance| spec(instance).source_hash().short())
}

/// The configurations that compute `op`.
///
/// # Errors
/// Why none does.
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
        let suits = |s: &Segment| s.first.is_multiple_of(instance.tile_n as usize) && s.first < MOST_FEATURES;
        op.segments.iter().all(suits)
    };
    let has_room = |instance: &&Instance| {
        let columns = instance.types.layout.k_tiles(op.stored_k) * instance.tile_k as usize;
        instance.shared_bytes <= info.shared_bytes && columns <= most_columns(instance)
    };
    let all: Vec<_> = kernels(op.format, multiplied.dtype, variant).iter().filter(borders).filter(has_room).collect();
    let most = all.iter().map(|i| tokens(i)).max().unwrap_or(0);
    let tile = all.iter().map(|i| tokens(i)).filter(|&tile| tile >= op.m).min();
    let tile = tile.ok_or_else(|| {
        Unsupported::new(format!("serves at most {most} tokens with so many columns and such segments, not {}", op.m))
    })?;
    let refused = op.norm.and_then(|norm| not_inside(&norm, multiplied.dtype, op.k));
    let normalizes_x = op.norm.is_some() && refused.is_none();
    let reads = normalizes_x || multiplied.aligned16 && multiplied.col_stride == 1 && op.k.is_multiple_of(GROUP);
    if !reads || !normalizes_x && op.segments.is_empty() {
        return refuse(refused.unwrap_or("reads aligned rows of X, in whole groups of eight columns"));
    }
    let of_tile = all.into_iter().filter(|i| tokens(i) == tile);
    Ok(of_tile.map(|instance| TileConfig { normalizes_x, ..config(instance) }).collect())
}

/// Why a norm is no kernel's own; `None` where it may be.
fn not_inside(norm: &NormedX, multiplied: DType, k: usize) -> Option<&'static str> {
    let NormedX { function, x } = norm;
    if function.kind != NormKind::Rms || function.beta.is_some() {
        return Some("normalizes X by RMSNorm without beta only");
    }
    if x.dtype != multiplied {
        return Some("reads X in the type in which it is multiplied");
    }
    let is_read = x.aligned16 && x.col_stride == 1 && k.is_multiple_of(GROUP);
    (!is_read).then_some("reads rows of X that begin at multiples of 16 bytes, in whole groups of eight columns")
}

/// The launch of `plan`.
///
/// # Errors
/// [`HalError::KernelUnavailable`] when the plan's kernel is none of the family's, and those of `make`.
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
        params: Arc::new(ProjectionLaunch::new(op, norm.as_ref(), &x, plan)),
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

/// `GemmParams` in `sched/params.cuh`, of such kernels.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
struct ProjectionParams {
    gemm: GemmParams,
    projection: ProjectionOperands,
}

/// Everything but the addresses.
#[derive(Debug)]
struct ProjectionLaunch {
    params: ProjectionParams,
    /// Bytes from the gate's bias to the up's, of a gated pair.
    second_bias: u64,
    residual_in_d: bool,
}

impl ProjectionLaunch {
    fn new(op: &CheckedGemm, norm: Option<&NormedX>, x: &Dense, plan: &LaunchPlan) -> Self {
        const BITS: usize = 21;
        let gamma = norm.and_then(|norm| norm.function.gamma);
        let mut types = gamma.map_or(0, dtype_code) | u32::from(norm.is_some()) << 16;
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
        }
    }
}

impl Params for ProjectionLaunch {
    fn with(&self, operands: &Operands<'_>, places: &Places<'_>) -> Result<LaunchParams, HalError> {
        let mut params = self.params;
        params.gemm.find(operands, places, self.residual_in_d, self.second_bias)?;
        let at = &mut params.projection;
        at.gamma = places.of(operands, GemmOperand::Gamma)?;
        at.d1 = places.of(operands, GemmOperand::D2)?;
        at.d2 = places.of(operands, GemmOperand::D3)?;
        at.d3 = places.of(operands, GemmOperand::D4)?;
        Ok(LaunchParams::of(&params))
    }
}
