//! `experts`: MoE grouped GEMM. Kernels of `gemm` whose CTAs
//! find their rows and expert in an index, and a combine
//! kernel. When grouped slots have no lists yet, kernels of
//! `routing` build them first.

mod codes;
mod convert;
mod decoded;
mod gather;
mod params;
mod staged;
mod w_map;

use std::sync::Arc;

use bytemuck::{Pod, Zeroable};
use qgemm_formats::{DType, Format};
use qgemm_hal::abi::{ExpertCombine, FLAG_D_ALIGNED16, FLAG_RESIDUAL_ALIGNED16, TileSchedule, dtype_code};
use qgemm_hal::{
    CheckedExperts, CheckedGemm, Device, DeviceInfo, ExpertForm, ExpertOperand, ExpertStep, ExpertStepSpec,
    ExpertsConfig, ExpertsPlan, Families, Family, Geometry, HalError, KernelId, LaunchSequence, ListedSlots, Operand,
    Operands, Schedule, Spec, TileConfig, Unsupported, Variant,
};

use super::gemm::{
    Cut, EarlyPrefetch, ExpertCtas, FAULTS, Instance, K_BLOCK, Key, ListedKernels, Types, counts_row_tiles,
    fits_registers_as, for_experts, instances_for_experts, params, spills_key,
};
use super::kernel_launch::{Addresses, KernelLaunch, MakeKernel, Params, load};
use super::launch_params::LaunchParams;
use super::prelude::Prelude;
use super::routing::{list_steps, list_workspace_bytes};
use crate::arch;
use crate::source;
use crate::spec::KernelSpec;
use crate::tensor_map::{EncodedMap, MapElement, TileMap};
use convert::ConvertedX;
use params::{ProductParams, SETTLED_OPERANDS, groups, places};
use w_map::w_map;

/// Family name.
const NAME: &str = "gemm";
/// Maximum CTAs along the grid's y and z axes (CUDA C
/// Programming Guide, "Technical Specifications per Compute Capability").
const MOST_GRID_YZ: usize = 65_535;
/// Threads of the combine kernel, and features of each (`RUN`).
const COMBINE_THREADS: u32 = 128;
const COMBINE_RUN: u32 = 8;
/// Extra bytes of parked tile state for each
/// warp in such kernels.
const STATE_BYTES: u32 = 16;
/// Maximum tokens of a tile whose rows may belong to different
/// experts. A single slot never fills a larger tile.
const MOST_ALONE: u32 = 16;

/// Families of `experts`.
pub(super) const FAMILIES: Families<CheckedExperts> = &[&ExpertProducts];

/// The kernel family.
#[derive(Debug)]
struct ExpertProducts;

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
    let mut all: Vec<Instance> = Types::new(format, x, variant).iter().map(for_experts).collect();
    for instance in instances_for_experts(format, x, variant, &fits) {
        // Main loops that need no check for a single weight may
        // exceed the registers with experts.
        if !all.iter().any(|other| other.config().kernel_id(format) == instance.id()) && fits(&instance) {
            all.push(narrowed(&instance));
        }
    }
    all
}

/// Checks whether each kernel that may serve experts fits in registers,
/// using its line of `kernels.spills`.
pub(super) fn ask_registers(variant: Variant, fits: &dyn Fn(String, KernelSpec) -> bool) {
    let of_plain_x = |instance: &Instance| fits(spills_key(product_id(instance), instance), product_spec(instance));
    types().for_each(|(format, x)| drop(list((format, x, variant), &of_plain_x)));
    staged::ask_registers(variant, fits);
}

fn product_spec(instance: &Instance) -> KernelSpec {
    instance.spec_with(product_id(instance), constants_of(instance, takes_tiles(instance)))
}

/// Constants that make a GEMM kernel an MoE kernel, whose CTAs
/// may take tiles of all experts in turn.
fn constants_of(instance: &Instance, takes_tiles: bool) -> Prelude<'static> {
    Prelude { experts: Some(1), expert_tiles: Some(takes_tiles.into()), ..instance.constants }
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

fn product_id(instance: &Instance) -> KernelId {
    let id = instance.id();
    match id.spec {
        Spec::Gemm(spec) => KernelId { spec: Spec::Experts(spec), ..id },
        _ => id,
    }
}

/// A kernel of a step beside the product.
#[derive(Clone, Copy, Debug)]
struct Step {
    step: ExpertStep,
    entry: &'static str,
    symbol: &'static str,
    threads: u32,
    shared_bytes: u32,
    constants: Prelude<'static>,
}

const COMBINE: Step = Step {
    step: ExpertStep::Combine,
    entry: "entry/experts_combine.cu",
    symbol: "qg_experts_combine",
    threads: COMBINE_THREADS,
    shared_bytes: 0,
    constants: Prelude::EMPTY,
};

impl Step {
    fn id(&self, variant: Variant) -> KernelId {
        KernelId::new("experts", Some(variant), Spec::ExpertStep(ExpertStepSpec { step: self.step }))
    }

    fn spec(&self, variant: Variant) -> KernelSpec {
        let variant_number = Some(variant.number());
        let prelude = Prelude { variant: variant_number, threads: Some(self.threads), ..self.constants };
        KernelSpec {
            name: self.id(variant).to_string(),
            entry: self.entry,
            text: source::entry(self.entry),
            symbol: self.symbol,
            prelude: prelude.text(),
            arch_specific: false,
        }
    }

    fn launch(&self, variant: Variant, grid: [u32; 3], params: Arc<dyn Params>) -> KernelLaunch {
        KernelLaunch {
            id: self.id(variant),
            spec: self.spec(variant),
            geometry: Geometry { grid, threads: self.threads, shared_bytes: self.shared_bytes },
            starts_early: variant >= Variant::Sm90,
            operands: ExpertOperand::ALL,
            updated: None,
            params,
        }
    }
}

/// All kernels of the family for `variant`.
pub(super) fn specs(variant: Variant) -> impl Iterator<Item = KernelSpec> {
    let products = types().flat_map(move |(format, x)| kernels(format, x, variant)).map(product_spec);
    let steps = [COMBINE.spec(variant), gather::spec(variant)].into_iter().chain(convert::specs(variant));
    steps.chain(products).chain(codes::specs(variant))
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

impl Params for ExpertCombine {
    fn with(&self, operands: &Operands<'_>, places: &Addresses<'_>) -> Result<LaunchParams, HalError> {
        let mut params = *self;
        params.products = places.of(operands, ExpertOperand::Products)?;
        params.index = places.of(operands, ExpertOperand::Index)?;
        params.router_weights = places.of(operands, ExpertOperand::RouterWeights)?;
        params.residual = places.of(operands, ExpertOperand::Residual)?;
        params.d = places.of(operands, ExpertOperand::D)?;
        params.tokens = operands.rows(self.tokens as usize) as u32;
        Ok(LaunchParams::of(&params))
    }

    fn takes_portions(&self) -> bool {
        true
    }
}

/// Launch sequence of `plan` on a device like `info`.
/// `make` prepares its kernels.
///
/// # Errors
/// [`HalError::KernelUnavailable`] when the backend lacks the plan's
/// kernel, [`HalError::WrongDevice`] when the device has no kernel
/// variant, and errors of `make`.
pub(super) fn sequence(
    op: &CheckedExperts,
    plan: &ExpertsPlan,
    info: &DeviceInfo,
    make: &mut MakeKernel<'_>,
) -> Result<LaunchSequence, HalError> {
    use ExpertOperand as O;
    let variant = info.variant.ok_or(HalError::WrongDevice { device: info.id, what: "a CUDA kernel" })?;
    let unavailable = |why: String| HalError::KernelUnavailable {
        kernel: plan.config.kernel_id(op).to_string(),
        target: info.arch.clone(),
        why,
    };
    let none = || unavailable("it is none of the variant's kernels".to_owned());
    let products = plan.products..plan.products + plan.product_bytes;

    let grouped = plan.config.grouped && matches!(op.form, ExpertForm::Indexed { .. });
    let mut steps = Vec::new();
    let gathered = op.each.x.planes.and_then(|planes| Some((planes, codes::gathered(op, &planes, info)?)));
    let gathered = gathered.filter(|_| grouped);
    let converted = plan.config.tile.x_prologue.and_then(|_| ConvertedX::of(op, variant, list_bytes(op, info)));
    let launch = match &op.each.x.planes {
        Some(planes) => {
            let read = gathered.as_ref().map_or(planes, |(_, gathered)| &gathered.planes);
            codes::launch(op, read, &plan.config, info, variant).ok_or_else(none)?
        }
        None => {
            let of_x = converted.as_ref().map_or(op, |converted| &converted.product);
            let x = of_x.each.plain_x().map_err(|reason| unavailable(reason.why))?;
            let mut all = kernels(op.each.format, x.dtype, variant).iter();
            let instance = all.find(|i| product_id(i) == plan.config.kernel_id(op)).ok_or_else(none)?;
            product_launch(of_x, instance, info, variant, grouped)
                .ok_or_else(|| unavailable("its grid is larger than one can be".to_owned()))?
        }
    };
    let mut product = launch.step::<O>(make)?;
    let of_x = [O::X, O::XScales, O::XPlaneFactors];
    for operand in of_x.into_iter().chain([O::W, O::RowScale, O::KOrder, O::C, O::Bias, O::TokenScale, O::Index]) {
        product = product.bind(operand, operand);
    }
    if let Some(converted) = &converted {
        product = converted.read_by(product, plan);
        steps.push(converted.step(op, plan, variant, make)?);
    }
    let mut gathering = None;
    if let Some((planes, gathered)) = &gathered {
        product = gathered.read_by(product, plan);
        gathering = Some(gathered.step(op, planes, plan, variant, make)?);
    }
    if op.checks_index {
        product = product.bind(O::Status, O::Status);
    }
    if grouped && op.lists {
        product = product.bind(O::Lists, O::Lists);
        gathering = gathering.map(|step| step.bind(O::Lists, O::Lists));
    } else if grouped {
        let listed = listed_slots(op, info.units).filter(|listed| listed.bytes() <= plan.config.scratch_bytes);
        let listed = listed.ok_or_else(|| unavailable("the plan has no room for lists of slots".to_owned()))?;
        let listing = list_steps(&listed.routing, info, make)?;
        steps.extend(listing.into_iter().map(|step| listed.bound(step, plan)));
        product = product.bind_part(O::Lists, O::Workspace, listed.in_workspace(plan));
        gathering = gathering.map(|step| step.bind_part(O::Lists, O::Workspace, listed.in_workspace(plan)));
    }
    steps.extend(gathering);
    let name = op.kernel_name(NAME);
    match op.combine {
        None => steps.push(product.bind(O::Residual, O::Residual).bind(O::D, O::D)),
        Some(_) => {
            if op.checks_index {
                product = product.bind(O::RouterWeights, O::RouterWeights);
            }
            product = product.bind_part(O::D, O::Workspace, products.clone());
            let mut combine =
                COMBINE.launch(variant, combine_grid(op), Arc::new(combine_params(op))).step::<O>(make)?;
            for operand in [O::Index, O::RouterWeights, O::Residual, O::D] {
                combine = combine.bind(operand, operand);
            }
            steps.extend([product, combine.bind_part(O::Products, O::Workspace, products)]);
        }
    }
    Ok(LaunchSequence::new::<O>(name, steps))
}

/// Bytes of the lists that a run builds itself.
fn list_bytes(op: &CheckedExperts, info: &DeviceInfo) -> usize {
    if op.lists { 0 } else { listed_slots(op, info.units).map_or(0, |listed| listed.bytes()) }
}

/// The list step on a device with `units` SMs.
fn listed_slots(op: &CheckedExperts, units: u32) -> Option<ListedSlots> {
    ListedSlots::of(op, |routing| list_workspace_bytes(routing, units))
}

/// The product launch; `None` when its grid would be too large.
fn product_launch(
    op: &CheckedExperts,
    instance: &Instance,
    info: &DeviceInfo,
    variant: Variant,
    grouped: bool,
) -> Option<KernelLaunch> {
    let each = &op.each;
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
        starts_early: variant >= Variant::Sm90,
        operands: if early { &SETTLED_OPERANDS } else { ExpertOperand::ALL },
        updated: None,
        params: Arc::new(ProductLaunch {
            list: op.list_parts()?[1].start,
            x_map,
            w_map: takes_tiles.then(|| w_map(op, layout, instance.run_k_tiles(), config.tile_n)),
            params: ProductParams::new(params(each, &x, &cut), groups(op, layout), early),
        }),
    })
}

/// At least `count` CTAs along y and z.
fn two_dimensions(count: usize) -> [u32; 2] {
    let y = count.clamp(1, MOST_GRID_YZ);
    [y as u32, count.div_ceil(y).max(1) as u32]
}

fn combine_grid(op: &CheckedExperts) -> [u32; 3] {
    let [y, z] = two_dimensions(op.tokens());
    [(op.each.out_features as u32).div_ceil(COMBINE_THREADS * COMBINE_RUN), y, z]
}

fn combine_params(op: &CheckedExperts) -> ExpertCombine {
    let (d, residual) = op.combine.map_or((op.each.d, None), |combine| (combine.d, combine.residual));
    let tokens = op.tokens();
    ExpertCombine {
        d_row: d.row_stride,
        residual_row: residual.map_or(0, |residual| residual.row_stride),
        tokens: tokens as u32,
        features: op.each.out_features as u32,
        top_k: (op.each.m / tokens) as u32,
        experts: op.experts as u32,
        d_dtype: dtype_code(d.dtype),
        residual_dtype: residual.map_or(0, |residual| dtype_code(residual.dtype)),
        flags: if d.aligned16 { FLAG_D_ALIGNED16 } else { 0 }
            | if residual.is_some_and(|residual| residual.aligned16) { FLAG_RESIDUAL_ALIGNED16 } else { 0 },
        ..ExpertCombine::default()
    }
}

/// Configs for an unquantized X.
fn plain_configs(op: &CheckedExperts, info: &DeviceInfo, variant: Variant) -> Result<Vec<ExpertsConfig>, Unsupported> {
    let each = &op.each;
    let x = each.plain_x()?;
    let typical = CheckedGemm { m: op.mean_rows(), ..each.clone() };
    let in_order = x.aligned16 && !each.k_order;
    let indexed = matches!(op.form, ExpertForm::Indexed { .. });
    let scratch_bytes = if op.lists { None } else { listed_slots(op, info.units).map(|listed| listed.bytes()) };
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
            places => takes_tiles(i) || places.max(op.tokens()) < MOST_GRID_YZ * MOST_GRID_YZ,
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

impl Family<CheckedExperts> for ExpertProducts {
    fn name(&self) -> &'static str {
        NAME
    }

    fn configs(&self, op: &CheckedExperts, info: &DeviceInfo) -> Result<Vec<ExpertsConfig>, Unsupported> {
        let each = &op.each;
        let variant = info.variant.ok_or_else(|| Unsupported::new("runs on CUDA devices only"))?;
        let expected = arch::fragment_layout(variant);
        if each.class != expected {
            return Err(Unsupported::new(format!("reads weights in layout {expected:?}, not {:?}", each.class)));
        }
        if let Some(planes) = &each.x.planes {
            return codes::configs(op, planes, info, variant);
        }
        let mut configs = plain_configs(op, info, variant)?;
        if let Some(converted) = ConvertedX::of(op, variant, list_bytes(op, info)) {
            let (scratch_bytes, x_prologue) = (converted.end(), Some(converted.prologue));
            let of_converted = plain_configs(&converted.product, info, variant)?.into_iter();
            configs.extend(of_converted.map(|config| {
                let tile = TileConfig { x_prologue, ..config.tile };
                ExpertsConfig { tile, scratch_bytes, ..config }
            }));
        }
        if configs.is_empty() {
            let why = "has no kernel of this format for so many rows, or with so little shared memory as the device's";
            return Err(Unsupported::new(why));
        }
        Ok(configs)
    }

    fn prepare(
        &self,
        device: &dyn Device,
        op: &CheckedExperts,
        plan: &ExpertsPlan,
    ) -> Result<LaunchSequence, HalError> {
        sequence(op, plan, device.info(), &mut load(device))
    }

    fn source_hash(&self, op: &CheckedExperts, config: &ExpertsConfig) -> u64 {
        if let (Some(_), Some(variant)) = (op.each.x.planes, config.tile.variant) {
            return codes::source_hash(op, config, variant);
        }
        let types = config.tile.x_format.plain().zip(config.tile.variant);
        let all = types.map_or(Default::default(), |(x, variant)| kernels(op.each.format, x, variant));
        let kernel = all.iter().find(|i| product_id(i) == config.kernel_id(op));
        kernel.map_or(0, |kernel| product_spec(kernel).source_hash().short())
    }
}
