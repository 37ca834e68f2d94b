//! `experts`: the kernels of `gemm` whose workgroups find their rows and their expert in an index, a kernel that looks for what is
//! wrong with that, and one that adds up slots.

use std::sync::{Arc, LazyLock};

use bytemuck::{Pod, Zeroable};
use qgemm_formats::DType;
use qgemm_hal::abi::{
    FLAG_BIAS, FLAG_GATED, FLAG_K_ORDER, FLAG_LISTS, FLAG_RESIDUAL, FLAG_ROW_SCALE, FLAG_TOKEN_SCALE, FLAG_X_ALIGNED16,
    GemmShape, expert_form_code,
};
use qgemm_hal::{
    CheckedExperts, CheckedGemm, Dense, Device, DeviceInfo, ExpertForm, ExpertOperand, ExpertsConfig, ExpertsFamilies,
    ExpertsPlan, Family, Geometry, HalError, Kernel, LaunchSequence, LaunchStep, ListedSlots, Operand, Operands,
    Stream, TileConfig, Unsupported,
};

use super::dispatch::{Dispatch, MARGIN, MAX_GROUPS, submit, too_large};
use super::gemm::{gemv, of_plain_x, simt, source_hash, weight_code};
use super::modes::Modes;
use super::operands::{Bound, Touched};
use super::routing::{list_steps, list_workspace_bytes};
use super::shared_of;
use crate::event::WgpuStream;
use crate::memory::VECTOR;
use crate::pipeline::{Compiled, Interface};
use crate::shader::{
    self, ENTRY, EXPERTS_ENTRY, EXPERTS_TEXTS, Part, Shader, compose_experts_check, compose_experts_combine,
};
use crate::shared::Shared;
use crate::weight_code::{CLASS, WeightCode};

/// What a wgpu device offers of `experts`.
pub(super) const FAMILIES: ExpertsFamilies = &[&ExpertsFamily::Gemv, &ExpertsFamily::Gemm];

/// What products are given: as those of `gemm`, with the index where C is.
pub(crate) const INTERFACE: Interface =
    Interface { name: "experts", bindings: super::gemm::INTERFACE.bindings, params_bytes: size_of::<Params>() as u32 };

/// What the kernel is given that looks for faults.
pub(crate) const CHECK_INTERFACE: Interface = Interface {
    name: "experts_check",
    bindings: &[(0, false), (1, false), (2, true)],
    params_bytes: size_of::<CheckParams>() as u32,
};

/// What the kernel is given that adds up slots.
pub(crate) const COMBINE_INTERFACE: Interface = Interface {
    name: "experts_combine",
    bindings: &[(0, false), (1, false), (2, false), (7, false), (8, true)],
    params_bytes: size_of::<CombineParams>() as u32,
};

/// Invocations of a workgroup that looks for faults, and of one that adds up slots.
const CHECK_THREADS: u32 = 256;
const COMBINE_THREADS: u32 = 64;

static SOURCE_HASH: LazyLock<u64> =
    LazyLock::new(|| source_hash(&[&EXPERTS_TEXTS[..], &simt::SOURCES[..]].concat()) ^ *gemv::SOURCE_HASH);

/// `part` with the entry point of products with experts.
pub(crate) fn with_entry(mut part: Part) -> Part {
    part.sources.iter_mut().filter(|source| **source == ENTRY).for_each(|source| *source = EXPERTS_ENTRY);
    part
}

/// `Params` of `shaders/experts_params.wgsl`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
struct Params {
    shape: GemmShape,
    modes: u32,
    x_row: u32,
    x_sharers: u32,
    experts: u32,
    d_row: u32,
    residual_row: u32,
    row_pitch: u32,
    x_base: u32,
    w_base: u32,
    row_scale_base: u32,
    k_order_base: u32,
    index_base: u32,
    bias_base: u32,
    token_scale_base: u32,
    residual_base: u32,
    d_base: u32,
}

/// `Params` of `shaders/experts_check.wgsl`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
struct CheckParams {
    form: u32,
    experts: u32,
    rows: u32,
    has_weights: u32,
    index_base: u32,
    weights_base: u32,
    status_base: u32,
}

/// `Params` of `shaders/experts_combine.wgsl`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
struct CombineParams {
    modes: u32,
    tokens: u32,
    features: u32,
    top_k: u32,
    experts: u32,
    flags: u32,
    d_row: u32,
    residual_row: u32,
    products_base: u32,
    index_base: u32,
    weights_base: u32,
    residual_base: u32,
    d_base: u32,
}

/// The main loop of a family of `gemm`, with experts.
#[derive(Debug)]
enum ExpertsFamily {
    /// For experts with few rows.
    Gemv,
    /// For any number of rows.
    Gemm,
}

impl ExpertsFamily {
    fn part(&self, config: &TileConfig, code: &WeightCode) -> Part {
        match self {
            ExpertsFamily::Gemv => with_entry(gemv::part(config, code, false)),
            ExpertsFamily::Gemm => with_entry(simt::part(config)),
        }
    }
}

impl Family<CheckedExperts> for ExpertsFamily {
    fn name(&self) -> &'static str {
        match self {
            ExpertsFamily::Gemv => "gemv",
            ExpertsFamily::Gemm => "gemm",
        }
    }

    fn configs(&self, op: &CheckedExperts, info: &DeviceInfo) -> Result<Vec<ExpertsConfig>, Unsupported> {
        check(op, info)?;
        let typical = CheckedGemm { m: op.mean_rows(), ..op.each.clone() };
        let tiles: Vec<TileConfig> = match self {
            ExpertsFamily::Gemv => {
                gemv::check_tokens(&typical)?;
                of_plain_x(&op.each, gemv::fitting(gemv::CONFIGS, &typical, info))?.collect()
            }
            ExpertsFamily::Gemm => of_plain_x(&op.each, simt::fitting(&typical, info))?.collect(),
        };
        if tiles.is_empty() {
            return Err(Unsupported::new(format!("{} bytes of workgroup memory are too few", info.shared_bytes)));
        }
        let indexed = matches!(op.form, ExpertForm::Indexed { .. });
        let lists = match op.lists {
            true => Some(0),
            false => listed_slots(op, info).map(|listed| listed.bytes()),
        };
        let ways = |tile: TileConfig| {
            let by_expert = if indexed { lists } else { Some(0) };
            let by_expert = by_expert.map(|scratch_bytes| ExpertsConfig { tile, grouped: true, scratch_bytes });
            let by_slot = indexed.then_some(ExpertsConfig { tile, grouped: false, scratch_bytes: 0 });
            by_slot.into_iter().chain(by_expert)
        };
        Ok(tiles.into_iter().flat_map(ways).collect())
    }

    fn prepare(
        &self,
        device: &dyn Device,
        op: &CheckedExperts,
        plan: &ExpertsPlan,
    ) -> Result<LaunchSequence, HalError> {
        use ExpertOperand as O;
        let shared = shared_of(device, "a plan of the wgpu backend")?;
        let config = plan.config.tile;
        let name = op.kernel_name(config.family);
        let refused =
            |reason: Unsupported| HalError::Unsupported { device: shared.id, what: name.clone(), why: reason.why };
        check(op, device.info()).map_err(refused)?;
        let code = weight_code(&op.each).map_err(refused)?;
        let part = self.part(&config, &code);
        let compiled = |interface, name: &str, shader: Shader| -> Result<Compiled, HalError> {
            Compiled::new(shared, interface, name.to_owned(), shader)
        };
        let id = plan.config.kernel_id(op);
        let grouped = plan.config.grouped && matches!(op.form, ExpertForm::Indexed { .. });
        let extents = Extents::of(op, &code).map_err(refused)?;
        let kernel = |what: What, compiled: Compiled, grid: [u32; 3], threads: u32| {
            let geometry = Geometry { grid, threads, shared_bytes: config.shared_bytes };
            let kernel =
                ExpertsKernel { what, compiled, shared: shared.clone(), op: op.clone(), extents, grid, grouped };
            LaunchStep::new::<O>(id, geometry, Arc::new(kernel)).of_operation().unbind(O::Workspace)
        };
        let products = plan.products..plan.products + plan.product_bytes;
        let mut listing = Vec::new();
        let mut lists = None;
        if grouped && !op.lists {
            let listed = listed_slots(op, device.info()).filter(|listed| listed.bytes() <= plan.config.scratch_bytes);
            let listed = listed.ok_or_else(|| refused(Unsupported::new("the plan has no room for lists of slots")))?;
            let steps = list_steps(shared, &listed.routing, device.info())?;
            listing.extend(steps.into_iter().map(|step| listed.bound(step, plan)));
            lists = Some(listed.in_workspace(plan));
        }

        let check = compiled(&CHECK_INTERFACE, "experts_check", compose_experts_check(CHECK_THREADS))?;
        let check = kernel(What::Check, check, [1, 1, 1], CHECK_THREADS).unbind(O::Products);
        let threads = part.threads();
        let product = compiled(&INTERFACE, &name, shader::compose_experts(op.each.format, &code, &part))?;
        let mut product =
            kernel(What::Product, product, product_grid(op, &config, grouped), threads).unbind(O::Products);
        if let Some(lists) = lists {
            product = product.bind_part(O::Lists, O::Workspace, lists);
        }
        let mut steps = if op.checks_index { vec![check] } else { Vec::new() };
        steps.extend(listing);
        if op.combine.is_none() {
            steps.push(product);
        } else {
            // The residual is the sum's.
            product = product.unbind(O::Residual).bind_part(O::D, O::Workspace, products.clone());
            let combine = compiled(&COMBINE_INTERFACE, "experts_combine", compose_experts_combine(COMBINE_THREADS))?;
            let combine = kernel(What::Combine, combine, combine_grid(op), COMBINE_THREADS);
            steps.extend([product, combine.bind_part(O::Products, O::Workspace, products)]);
        }
        Ok(LaunchSequence::new::<O>(name, steps))
    }

    fn source_hash(&self, _: &CheckedExperts, _: &ExpertsConfig) -> u64 {
        *SOURCE_HASH
    }
}

/// What it takes to list slots.
fn listed_slots(op: &CheckedExperts, info: &DeviceInfo) -> Option<ListedSlots> {
    let mut bytes = Ok(0);
    let listed = ListedSlots::of(op, |routing| {
        bytes = list_workspace_bytes(routing, info);
        *bytes.as_ref().unwrap_or(&0)
    });
    // What is too much for a binding, nobody lists.
    listed.filter(|_| bytes.is_ok())
}

/// Whether the kernels serve `op`.
fn check(op: &CheckedExperts, info: &DeviceInfo) -> Result<(), Unsupported> {
    let each = &op.each;
    if each.class != CLASS {
        return Err(Unsupported::new(format!("reads weights packed as {CLASS:?}, and these are {:?}", each.class)));
    }
    if each.c.is_some() {
        return Err(Unsupported::new("adds no C: the index takes its binding, of which a kernel has nine"));
    }
    let code = weight_code(each)?;
    let sizes = [
        ("rows", each.m),
        ("stored rows", op.experts.saturating_mul(op.row_pitch)),
        ("columns", each.k.max(each.stored_k)),
    ];
    for (name, size) in sizes {
        if size >= 1 << 31 {
            return Err(Unsupported::new(format!("there are {size} {name}, and kernels count in 31 bits")));
        }
    }
    if each.stored_rows.div_ceil(LEAST_TILE_N) > MAX_GROUPS as usize {
        return Err(Unsupported::new(format!("{} rows of W are too many for a grid", each.stored_rows)));
    }
    let limit = info.max_buffer_bytes;
    for (what, bytes) in Extents::of(op, &code)?.all() {
        if bytes as u64 + MARGIN > limit {
            return Err(too_large(what, bytes as u64, limit));
        }
    }
    Ok(())
}

/// The smallest tile along N.
const LEAST_TILE_N: usize = 64;

/// Bytes that kernels touch of each operand.
#[derive(Clone, Copy, Debug)]
struct Extents {
    x: usize,
    w: usize,
    row_scale: usize,
    k_order: usize,
    index: usize,
    bias: usize,
    token_scale: usize,
    residual: usize,
    /// What products are written to.
    d: usize,
}

impl Extents {
    fn of(op: &CheckedExperts, code: &WeightCode) -> Result<Self, Unsupported> {
        let each = &op.each;
        let of_experts = |there: bool, bytes: usize| if there { op.weights().saturating_mul(bytes) } else { 0 };
        let pitch = if op.row_pitch > 0 { op.row_pitch } else { each.stored_rows.next_multiple_of(TILE_ROWS) };
        let columns = each.stored_k.next_multiple_of(code.k_tile());
        let of_weights = Self {
            x: 0,
            w: of_experts(true, pitch / TILE_ROWS * code.row_of_tiles_bytes(each.stored_k)),
            row_scale: of_experts(each.row_scale, if op.row_pitch > 0 { pitch } else { each.stored_rows } * 4),
            k_order: of_experts(each.k_order, columns * 4),
            index: 0,
            bias: of_experts(each.bias.is_some(), each.bias.map_or(0, |dtype| each.bias_len() * dtype.bytes())),
            token_scale: 0,
            residual: 0,
            d: 0,
        };
        of_weights.of_portion(op)
    }

    /// Those of `op`, a portion of the operation that these are of.
    fn of_portion(self, op: &CheckedExperts) -> Result<Self, Unsupported> {
        let each = &op.each;
        Ok(Self {
            x: dense_bytes("X", &each.plain_x()?, op.x_rows(), each.k)?,
            index: op.index_len() * 4,
            token_scale: if each.token_scale { each.m * 4 } else { 0 },
            residual: match &each.residual {
                Some(residual) => dense_bytes("the residual", residual, each.m, each.out_features)?,
                None => 0,
            },
            d: dense_bytes("D", &each.d, each.m, each.out_features)?,
            ..self
        })
    }

    fn all(&self) -> [(&'static str, usize); 9] {
        [
            ("X", self.x),
            ("the weights of all experts", self.w),
            ("the row scales", self.row_scale),
            ("the column orders", self.k_order),
            ("the index", self.index),
            ("the biases", self.bias),
            ("the row factors", self.token_scale),
            ("the residual", self.residual),
            ("D", self.d),
        ]
    }
}

/// Bytes of `rows` rows.
fn dense_bytes(what: &str, dense: &Dense, rows: usize, columns: usize) -> Result<usize, Unsupported> {
    let bytes = dense.extent(rows, columns).and_then(|e| e.checked_mul(dense.dtype.bytes() as u64));
    let bytes = bytes.and_then(|bytes| usize::try_from(bytes).ok());
    bytes.ok_or_else(|| Unsupported::new(format!("the extent of {what} overflows")))
}

/// Rows of a row of tiles of W, of which an expert has whole ones.
const TILE_ROWS: usize = super::gemm::TILE_ROWS;

/// Tiles of W along x, and tiles of rows along y and z: as many as there can be at most.
fn product_grid(op: &CheckedExperts, config: &TileConfig, grouped: bool) -> [u32; 3] {
    let (m, tile_m) = (op.each.m, config.tile_m as usize);
    let places = match op.form {
        ExpertForm::Indexed { .. } if !grouped => m,
        ExpertForm::Masked { capacity } => op.experts * capacity.div_ceil(tile_m),
        // Each expert with rows may have a tile that is not full.
        _ => (m + op.experts.min(m) * (tile_m - 1)) / tile_m,
    };
    let [y, z] = two_dimensions(places);
    [(op.each.stored_rows as u32).div_ceil(config.tile_n), y, z]
}

fn combine_grid(op: &CheckedExperts) -> [u32; 3] {
    let [y, z] = two_dimensions(op.tokens());
    [(op.each.out_features as u32).div_ceil(4).div_ceil(COMBINE_THREADS), y, z]
}

/// At least `count` workgroups.
fn two_dimensions(count: usize) -> [u32; 2] {
    let y = count.clamp(1, MAX_GROUPS as usize);
    [y as u32, count.div_ceil(y).max(1) as u32]
}

/// Which kernel of the sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum What {
    Check,
    Product,
    Combine,
}

/// One kernel of an operation.
#[derive(Debug)]
struct ExpertsKernel {
    what: What,
    compiled: Compiled,
    shared: Arc<Shared>,
    op: CheckedExperts,
    extents: Extents,
    grid: [u32; 3],
    /// Whether slots are multiplied expert by expert.
    grouped: bool,
}

impl Kernel for ExpertsKernel {
    fn launch(&self, stream: &Stream, operands: Operands<'_>) -> Result<(), HalError> {
        WgpuStream::check(&self.shared, stream)?;
        let op = self.op.of_portion(operands.portion());
        let extents = self.extents.of_portion(&op).map_err(|reason| self.refused(reason))?;
        let run = Run { kernel: self, op, extents };
        match self.what {
            What::Check => submit(&self.shared, &CHECK_INTERFACE, &self.compiled, &[run.check(&operands)?]),
            What::Product => submit(&self.shared, &INTERFACE, &self.compiled, &[run.product(&operands)?]),
            What::Combine => submit(&self.shared, &COMBINE_INTERFACE, &self.compiled, &[run.combine(&operands)?]),
        }
    }

    fn takes_portions(&self) -> bool {
        true
    }
}

impl ExpertsKernel {
    fn refused(&self, reason: Unsupported) -> HalError {
        HalError::Unsupported { device: self.shared.id, what: self.compiled.name.clone(), why: reason.why }
    }
}

/// A launch of one, for all of its tokens or a portion of them: the grid is that for all.
struct Run<'k> {
    kernel: &'k ExpertsKernel,
    op: CheckedExperts,
    extents: Extents,
}

impl Run<'_> {
    /// The first `bytes` bytes of an operand, accessed `width` at a time.
    fn touched<'a>(
        &self,
        operands: &'a Operands<'_>,
        operand: ExpertOperand,
        bytes: usize,
        width: usize,
    ) -> Touched<'a> {
        Touched { what: operand.name(), view: operands.get(operand), bytes: 0..bytes, width }
    }

    fn index<'a>(&'a self, operands: &'a Operands<'_>) -> Result<Bound<'a>, HalError> {
        self.touched(operands, ExpertOperand::Index, self.op.index_len() * 4, 4).bind(&self.kernel.shared)
    }

    fn router_weights<'a>(&'a self, operands: &'a Operands<'_>) -> Result<Bound<'a>, HalError> {
        let bytes = if self.op.combine.is_some() { self.op.each.m * 4 } else { 0 };
        self.touched(operands, ExpertOperand::RouterWeights, bytes, 4).bind(&self.kernel.shared)
    }

    /// Rows as kernels count them: with a capacity, those of one expert.
    fn rows(&self) -> u32 {
        match self.op.form {
            ExpertForm::Masked { capacity } => capacity as u32,
            _ => self.op.each.m as u32,
        }
    }

    fn check<'a>(&'a self, operands: &'a Operands<'_>) -> Result<Dispatch<'a, CheckParams>, HalError> {
        let (index, index_base) = self.index(operands)?;
        let (weights, weights_base) = self.router_weights(operands)?;
        let status = self.touched(operands, ExpertOperand::Status, 8, 4).bind_written(&self.kernel.shared)?;
        let params = CheckParams {
            form: expert_form_code(self.op.form),
            experts: self.op.experts as u32,
            rows: self.rows(),
            has_weights: self.op.combine.is_some().into(),
            index_base,
            weights_base,
            status_base: status.1,
        };
        Ok(Dispatch { params, bindings: vec![index, weights, status.0], grid: self.kernel.grid })
    }

    fn product<'a>(&'a self, operands: &'a Operands<'_>) -> Result<Dispatch<'a, Params>, HalError> {
        use ExpertOperand as O;
        let (op, each, shared) = (&self.op, &self.op.each, &self.kernel.shared);
        let x_dense = each.plain_x().map_err(|reason| self.kernel.refused(reason))?;
        let extents = &self.extents;
        let of = |dense: Option<&Dense>| dense.map_or(4, |dense| dense.dtype.bytes());
        let touched = |operand, bytes, width| self.touched(operands, operand, bytes, width);
        let mut p = params(op, &x_dense, self.rows(), self.kernel.grouped);
        let (x, w, row_scale, k_order, index, bias, token_scale, residual, d);
        (x, p.x_base) = touched(O::X, extents.x, x_dense.dtype.bytes()).bind_vectors(shared)?;
        (w, p.w_base) = touched(O::W, extents.w, VECTOR as usize).bind_vectors(shared)?;
        (row_scale, p.row_scale_base) = touched(O::RowScale, extents.row_scale, 4).bind(shared)?;
        (k_order, p.k_order_base) = touched(O::KOrder, extents.k_order, 4).bind(shared)?;
        (index, p.index_base) = match (self.kernel.grouped, op.list_parts()) {
            (true, Some([_, slots])) => touched(O::Lists, slots.end, 4).bind(shared)?,
            _ => self.index(operands)?,
        };
        let bias_width = each.bias.map_or(4, DType::bytes);
        (bias, p.bias_base) = touched(O::Bias, extents.bias, bias_width).bind(shared)?;
        (token_scale, p.token_scale_base) = touched(O::TokenScale, extents.token_scale, 4).bind(shared)?;
        (residual, p.residual_base) =
            touched(O::Residual, extents.residual, of(each.residual.as_ref())).bind(shared)?;
        (d, p.d_base) = touched(O::D, extents.d, of(Some(&each.d))).bind_written(shared)?;
        let bindings = vec![x, w, row_scale, k_order, index, bias, token_scale, residual, d];
        Ok(Dispatch { params: p, bindings, grid: self.kernel.grid })
    }

    fn combine<'a>(&'a self, operands: &'a Operands<'_>) -> Result<Dispatch<'a, CombineParams>, HalError> {
        use ExpertOperand as O;
        let (op, each, shared) = (&self.op, &self.op.each, &self.kernel.shared);
        let ExpertForm::Indexed { top_k, .. } = op.form else {
            let why = "only slots are added up".to_owned();
            return Err(HalError::Unsupported { device: shared.id, what: self.kernel.compiled.name.clone(), why });
        };
        let (d, residual) = op.combine.map_or((each.d, None), |combine| (combine.d, combine.residual));
        let tokens = op.tokens();
        let bytes = |dense: &Dense| {
            dense.extent(tokens, each.out_features).map_or(0, |elements| elements as usize * dense.dtype.bytes())
        };
        let touched = |operand, bytes, width| self.touched(operands, operand, bytes, width);
        let (products, products_base) = touched(O::Products, each.m * each.out_features * 4, 4).bind(shared)?;
        let (index, index_base) = self.index(operands)?;
        let (weights, weights_base) = self.router_weights(operands)?;
        let residual_width = residual.map_or(4, |dense| dense.dtype.bytes());
        let (residual_binding, residual_base) =
            touched(O::Residual, residual.as_ref().map_or(0, bytes), residual_width).bind(shared)?;
        let (d_binding, d_base) = touched(O::D, bytes(&d), d.dtype.bytes()).bind_written(shared)?;
        let modes = Modes { d: Some(d.dtype), residual: residual.map(|dense| dense.dtype), ..Modes::default() };
        let params = CombineParams {
            modes: modes.packed(),
            tokens: tokens as u32,
            features: each.out_features as u32,
            top_k: top_k as u32,
            experts: op.experts as u32,
            flags: if residual.is_some() { FLAG_RESIDUAL } else { 0 },
            d_row: row_stride(&d, tokens),
            residual_row: residual.map_or(0, |dense| row_stride(&dense, tokens)),
            products_base,
            index_base,
            weights_base,
            residual_base,
            d_base,
        };
        let bindings = vec![products, index, weights, residual_binding, d_binding];
        Ok(Dispatch { params, bindings, grid: self.kernel.grid })
    }
}

/// Elements between rows; of one row, whose stride plays no part, none.
fn row_stride(dense: &Dense, rows: usize) -> u32 {
    super::dispatch::stride(rows, dense.row_stride)
}

/// The parameters of a product, but the `*_base` fields.
fn params(op: &CheckedExperts, x: &Dense, rows: u32, grouped: bool) -> Params {
    let each = &op.each;
    let flags = [
        (FLAG_ROW_SCALE, each.row_scale),
        (FLAG_K_ORDER, each.k_order),
        (FLAG_BIAS, each.bias.is_some()),
        (FLAG_TOKEN_SCALE, each.token_scale),
        (FLAG_RESIDUAL, each.residual.is_some()),
        (FLAG_GATED, each.gated),
        (FLAG_X_ALIGNED16, x.aligned16),
        (FLAG_LISTS, grouped),
    ];
    let modes = Modes {
        activation: each.activation,
        x: Some(x.dtype),
        d: Some(each.d.dtype),
        bias: each.bias,
        residual: each.residual.map(|residual| residual.dtype),
        form: Some(if grouped { ExpertForm::Contiguous } else { op.form }),
        ..Modes::default()
    };
    let x_sharers = match op.form {
        ExpertForm::Indexed { top_k, x_per_slot: false } => top_k as u32,
        _ => 1,
    };
    Params {
        shape: GemmShape {
            m: rows,
            stored_rows: each.stored_rows as u32,
            k: each.k as u32,
            stored_k: each.stored_k as u32,
            flags: flags.iter().filter(|(_, set)| *set).fold(0, |flags, (flag, _)| flags | flag),
            out_features: each.out_features as u32,
            alpha: each.alpha,
            beta: 0.0,
        },
        modes: modes.packed(),
        x_row: row_stride(x, op.x_rows()),
        x_sharers,
        experts: op.experts as u32,
        d_row: row_stride(&each.d, each.m),
        residual_row: each.residual.map_or(0, |residual| row_stride(&residual, each.m)),
        row_pitch: op.row_pitch as u32,
        ..Params::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grids_have_room_for_every_tile() {
        assert_eq!(two_dimensions(0), [1, 1]);
        for count in [1, 65_535, 65_536, 1_000_000] {
            let [y, z] = two_dimensions(count);
            assert!(y <= MAX_GROUPS && y as usize * z as usize >= count, "{count}");
        }
    }
}
