//! MoE GEMM on unquantized X: kernels of `gemm` with one CTA for
//! each tile of an expert's rows, or with CTAs that take tiles
//! of all experts in turn.

use std::sync::Arc;

use bytemuck::{Pod, Zeroable};
use qgemm_formats::{DType, Format};
use qgemm_hal::abi::TileSchedule;
use qgemm_hal::{
    CheckedExperts, CheckedGemm, DeviceInfo, ExpertForm, ExpertOperand, ExpertsConfig, Geometry, HalError, Operand,
    Operands, Schedule, Unsupported, Variant,
};

use super::super::grid::{MOST_CTAS_YZ, two_dimensions};
use super::super::list::ListStage;
use super::super::planned::PlannedExperts;
use super::identity::{constants_of, product_id};
use super::params::{ProductParams, READY_OPERANDS, groups, places};
use super::w_map::w_map;
use crate::arch;
use crate::families::gemm::{
    Cut, EarlyPrefetch, ExpertCtas, FAULTS, Instance, K_BLOCK, Key, ListedKernels, Types, counts_row_tiles,
    fits_registers_as, for_experts, instances_for_experts, params, spills_key,
};
use crate::families::kernel_launch::{Addresses, KernelLaunch, Params};
use crate::families::launch_params::LaunchParams;
use crate::spec::KernelSpec;
use crate::tensor_map::{EncodedMap, MapElement, TileMap};

/// Extra bytes of parked tile state for each
/// warp in such kernels.
const STATE_BYTES: u32 = 16;
/// Maximum tokens of a tile whose rows may belong to different
/// experts. A single slot never fills a larger tile.
const MOST_ALONE: u32 = 16;

/// Kernels by key, listed once per process.
static KERNELS: ListedKernels = ListedKernels::new();

fn types() -> impl Iterator<Item = (Format, DType)> {
    Format::all().flat_map(|format| DType::ALL.map(|x| (format, x)))
}

/// Kernels for these types.
fn kernels(format: Format, x: DType, variant: Variant) -> &'static [Instance] {
    let fits = |instance: &Instance| fits_registers_as(product_id(instance), instance);
    let key = (format, x, variant);
    KERNELS.get(key, |key| list(key, &fits))
}

/// A kernel that reads X with any layout, and kernels of
/// other main loops with tiles that suit experts. `fits` tells
/// whether a kernel fits in registers.
fn list((format, x, variant): Key, fits: &dyn Fn(&Instance) -> bool) -> Vec<Instance> {
    let narrowed = |instance: &Instance| {
        let parked = if instance.state_in_shared { instance.warps_n * STATE_BYTES } else { 0 };
        let own = if takes_tiles(instance) { FAULTS + parked + instance.tile_info_bytes } else { 0 };
        Instance { shared_bytes: instance.shared_bytes + own, ..instance.clone() }
    };
    let fits = |instance: &Instance| {
        let narrowed = narrowed(instance);
        narrowed.shared_bytes <= arch::most_shared(variant) && fits(&narrowed)
    };
    let mut all: Vec<Instance> = Types::new(format, x, variant).iter().filter_map(for_experts).collect();
    for instance in instances_for_experts(format, x, variant, &fits) {
        // Main loops that need no check for a single weight may
        // exceed the registers with experts.
        if !all.iter().any(|other| other.config().kernel_id(format) == instance.id()) && fits(&instance) {
            all.push(narrowed(&instance));
        }
    }
    all
}

/// All kernels for `variant`.
pub(super) fn specs(variant: Variant) -> impl Iterator<Item = KernelSpec> {
    types().flat_map(move |(format, x)| kernels(format, x, variant)).map(product_spec)
}

/// Checks whether each kernel that may serve experts fits in registers,
/// using its line of `kernels.spills`.
pub(super) fn ask_registers(variant: Variant, fits: &dyn Fn(String, KernelSpec) -> bool) {
    let of_plain_x = |instance: &Instance| fits(spills_key(product_id(instance), instance), product_spec(instance));
    types().for_each(|(format, x)| drop(list((format, x, variant), &of_plain_x)));
}

/// The kernel of a config.
pub(super) fn spec_of(op: &CheckedExperts, config: &ExpertsConfig, variant: Variant) -> Option<KernelSpec> {
    find(op, config, config.tile.x_format.plain()?, variant).map(product_spec)
}

fn find(op: &CheckedExperts, config: &ExpertsConfig, x: DType, variant: Variant) -> Option<&'static Instance> {
    kernels(op.each.format, x, variant).iter().find(|i| product_id(i) == config.kernel_id(op))
}

fn product_spec(instance: &Instance) -> KernelSpec {
    instance.spec_with(product_id(instance), constants_of(instance, takes_tiles(instance)))
}

/// Whether CTAs take tiles of all experts in turn;
/// otherwise each CTA has one tile.
fn takes_tiles(instance: &Instance) -> bool {
    instance.main_loop.expert_ctas == ExpertCtas::Tiles
}

/// Whether CTAs share the row tiles of all experts.
fn takes_row_tiles(instance: &Instance) -> bool {
    instance.main_loop.expert_ctas == ExpertCtas::RowTiles
}

/// Alignment of a tensor map in a kernel parameter.
const MAP_ALIGNMENT: usize = 64;
const PADDING: usize = (size_of::<ProductParams>().next_multiple_of(MAP_ALIGNMENT) - size_of::<ProductParams>()) / 8;

/// `TmaGemmParams` in `mainloop/tma_params.cuh`, for MoE GEMM.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
struct MappedParams {
    product: ProductParams,
    padding: [u64; PADDING],
    x_map: EncodedMap,
    w_map: EncodedMap,
}

/// Kernel parameter without addresses.
#[derive(Debug)]
struct ProductLaunch {
    params: ProductParams,
    /// Byte offset of the slots in the lists.
    list: usize,
    /// TMA map of X without its address, when rows are contiguous.
    x_map: Option<TileMap>,
    /// TMA map of W without its address, for
    /// kernels that use one.
    w_map: Option<TileMap>,
}

impl Params for ProductLaunch {
    fn with(&self, operands: &Operands<'_>, places: &Addresses<'_>) -> Result<LaunchParams, HalError> {
        let mut params = self.params;
        params.find(operands, places, self.list)?;
        let Some(w_map) = self.w_map else { return Ok(LaunchParams::of(&params)) };
        let w_map = (places.encode)(&TileMap { address: params.gemm.at.w, ..w_map })?;
        let x_map = match self.x_map {
            Some(map) => {
                let mut map = TileMap { address: params.gemm.at.x, ..map };
                map.size[1] = operands.rows(map.size[1] as usize) as u64;
                (places.encode)(&map)?
            }
            None => EncodedMap::default(),
        };
        Ok(LaunchParams::of(&MappedParams { product: params, x_map, w_map, ..MappedParams::zeroed() }))
    }

    fn takes_portions(&self) -> bool {
        true
    }
}

/// Configs for an unquantized X.
///
/// # Errors
/// The refusal of a quantized X.
pub(in super::super) fn configs(
    op: &CheckedExperts,
    info: &DeviceInfo,
    variant: Variant,
) -> Result<Vec<ExpertsConfig>, Unsupported> {
    let each = &op.each;
    let x = each.plain_x()?;
    let typical = CheckedGemm { m: op.mean_rows(), ..each.clone() };
    let in_order = x.aligned16 && !each.k_order;
    let indexed = matches!(op.form, ExpertForm::Indexed { .. });
    let scratch_bytes = if op.lists { None } else { ListStage::of(op, info).map(|stage| stage.end()) };
    // Producers that gather rows use 32-bit byte offsets (`GatheredRows`).
    let x_bytes = (op.x_rows() as u64).saturating_mul(x.row_stride).saturating_mul(x.dtype.bytes() as u64);
    let finds_rows = x_bytes <= u64::from(u32::MAX);
    // Single slots, for kernels with one CTA per
    // tile; and grouped slots.
    let alone = |i: &Instance| i.main_loop.schedule == Schedule::Grid && i.tile_m <= MOST_ALONE;
    let configs_of = |i: &'static Instance| {
        let prefetches_early = i.main_loop.expert_prefetch != EarlyPrefetch::Never;
        let config = |grouped, scratch_bytes| ExpertsConfig {
            tile: i.config_on(info),
            grouped,
            scratch_bytes,
            prefetches_early,
        };
        let fits = |grouped| match places(op, i.tile_m as usize, grouped) {
            places if takes_row_tiles(i) => {
                counts_row_tiles(op.experts, places, each.stored_rows.div_ceil(i.tile_n as usize))
            }
            places => takes_tiles(i) || places.max(op.tokens()) < MOST_CTAS_YZ,
        };
        let by_slot = (indexed && alone(i) && fits(false)).then(|| config(false, 0));
        let by_expert = match (indexed && !op.lists, scratch_bytes) {
            _ if !fits(true) || (indexed && takes_tiles(i) && !finds_rows) => None,
            (true, None) => None,
            (true, Some(bytes)) => Some(config(true, bytes)),
            (false, _) => Some(config(true, 0)),
        };
        by_slot.into_iter().chain(by_expert)
    };
    let serves = |i: &&Instance| i.serves(&typical, in_order) && i.shared_bytes <= info.shared_bytes;
    let serving = kernels(each.format, x.dtype, variant).iter().filter(serves);
    Ok(serving.flat_map(configs_of).collect())
}

/// The launch of a plan's kernel for `op`, whose X is unquantized.
///
/// # Errors
/// [`HalError::KernelUnavailable`] when the variant lacks the kernel, or
/// the grid would be too large.
pub(super) fn launch(planned: &PlannedExperts<'_>, op: &CheckedExperts) -> Result<KernelLaunch, HalError> {
    let x = op.each.plain_x().map_err(|reason| planned.unavailable(reason.why))?;
    let instance = find(op, &planned.plan.config, x.dtype, planned.variant);
    let instance = instance.ok_or_else(|| planned.unavailable("it is none of the variant's kernels"))?;
    tiled_launch(planned, op, instance).ok_or_else(|| planned.unavailable("its grid is larger than one can be"))
}

/// The product launch; `None` when its grid would be too large.
fn tiled_launch(planned: &PlannedExperts<'_>, op: &CheckedExperts, instance: &Instance) -> Option<KernelLaunch> {
    let (info, each, grouped) = (planned.info, &op.each, planned.groups_slots());
    let layout = &instance.types.layout;
    let k_tiles = layout.k_tiles(each.stored_k);
    let config = instance.config();
    let n_tiles = (each.stored_rows as u32).div_ceil(config.tile_n);
    // Main loops with a persistent-grid variant that run one CTA per
    // tile here find their tile along the grid's x axis.
    let tiles = TileSchedule { n_tiles, m_tiles: 1, swizzle_group: 1, cut_tiles: 0, cut_ctas: 0, cut_k_tiles: 1 };
    let cut = Cut { k_tiles: k_tiles as u32, splits: 1, has_factors: false, tiles };
    // Checked when the kernel was offered: X is not quantized.
    let x = each.plain_x().unwrap_or(each.d);
    let places = places(op, config.tile_m as usize, grouped);
    let takes_tiles = takes_tiles(instance);
    let grid = if takes_tiles || takes_row_tiles(instance) {
        let ctas = (info.units as usize).saturating_mul(config.ctas_per_unit as usize);
        [ctas.min(places.saturating_mul(n_tiles as usize)).max(1) as u32, 1, 1]
    } else {
        // The last place checks for index faults.
        let [y, z] = two_dimensions(places.checked_add(1)?);
        [n_tiles, y, z]
    };
    let x_map = (takes_tiles && !grouped).then(|| {
        let size = [each.k as u64, op.x_rows() as u64];
        let row_bytes = x.row_stride * x.dtype.bytes() as u64;
        TileMap::matrix(0, MapElement::Number(x.dtype), size, row_bytes, [K_BLOCK, config.tile_m])
    });
    // Other kernels wait for all earlier work.
    let is_by_slot = matches!(op.form, ExpertForm::Indexed { .. }) && !grouped;
    let is_known = match is_by_slot {
        true => instance.main_loop.expert_prefetch == EarlyPrefetch::WithIndex,
        false => grouped && op.lists && instance.main_loop.expert_prefetch == EarlyPrefetch::WithLists,
    };
    let early = op.index_ready && is_known;
    Some(KernelLaunch {
        id: product_id(instance),
        spec: product_spec(instance),
        geometry: Geometry { grid, threads: config.threads, shared_bytes: config.shared_bytes },
        starts_early: planned.variant >= Variant::Sm90,
        operands: if early { &READY_OPERANDS } else { ExpertOperand::ALL },
        updated: None,
        params: Arc::new(ProductLaunch {
            list: op.list_parts()?[1].start,
            x_map,
            w_map: takes_tiles.then(|| w_map(op, layout, instance.run_k_tiles(), config.tile_n)),
            params: ProductParams::new(params(each, &x, &cut), groups(op, layout), early),
        }),
    })
}
