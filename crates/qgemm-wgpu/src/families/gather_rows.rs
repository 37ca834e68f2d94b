//! `gather_rows`: rows of a packed weight by index, dequantized. Weights
//! are decoded as in products, with the same parameters and bindings; a
//! second kernel checks the ids.

use std::mem::size_of;
use std::ops::Range;
use std::sync::{Arc, LazyLock};

use bytemuck::{Pod, Zeroable};
use qgemm_formats::DType;
use qgemm_hal::abi::{FLAG_K_ORDER, FLAG_ROW_SCALE, GemmShape};
use qgemm_hal::op::gather_rows::STATUS_WORDS;
use qgemm_hal::{
    CheckedGatherRows, Device, DeviceInfo, Families, Family, GatherRowsConfig, GatherRowsOperand, GatherRowsPlan,
    GatherRowsSpec, Geometry, HalError, Kernel, KernelId, LaunchSequence, LaunchStep, Name, Operand, Operands,
    Operation, Spec, Stream, Unsupported,
};

use super::dispatch::{Dispatch, MARGIN, MAX_GROUPS, rows_that_fit, stride, submit, too_large};
use super::gemm::{INTERFACE, Params, TILE_ROWS, weight_code_of};
use super::modes::Modes;
use super::operands::Touched;
use crate::device::shared_of;
use crate::event::WgpuStream;
use crate::memory::VECTOR;
use crate::pipeline::{Compiled, Interface};
use crate::shader::{self, Codes, FourRows, Part};
use crate::shared::Shared;
use crate::weight_code::{CLASS, WeightCode};

/// wgpu families of `gather_rows`.
pub(super) const FAMILIES: Families<CheckedGatherRows> = &[&GatherRows];

/// Interface of the kernel that checks ids.
pub(crate) const STATUS_INTERFACE: Interface =
    Interface { name: "gather_rows_status", bindings: "rw", params_bytes: size_of::<StatusParams>() as u32 };

/// Family name.
const NAME: &str = "gather_rows";
const QUADS: &str = include_str!("../../shaders/quads.wgsl");
const MAIN_LOOP: &str = include_str!("../../shaders/gather_rows.wgsl");
const STATUS: &str = include_str!("../../shaders/gather_rows_status.wgsl");
const SOURCES: [&str; 2] = [QUADS, MAIN_LOOP];
static SOURCE_HASH: LazyLock<u64> = LazyLock::new(|| super::gemm::source_hash(&[QUADS, MAIN_LOOP, STATUS]));

/// Invocations of a workgroup; each has four columns.
const THREADS: u32 = 64;
const QUAD: usize = 4;
/// Invocations of the workgroup that checks ids.
const STATUS_THREADS: u32 = 256;
/// Bytes of an id and of a word of the status.
const WORD: usize = 4;

/// `Params` of `shaders/gather_rows_status.wgsl`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
struct StatusParams {
    rows: u32,
    table_rows: u32,
    ids_base: u32,
    status_base: u32,
}

/// The kernel family.
#[derive(Debug)]
struct GatherRows;

impl Family<CheckedGatherRows> for GatherRows {
    fn name(&self) -> &'static str {
        NAME
    }

    fn configs(&self, op: &CheckedGatherRows, info: &DeviceInfo) -> Result<Vec<GatherRowsConfig>, Unsupported> {
        dispatched_rows(op, &weight_code_of(op.format)?, info.max_buffer_bytes)?;
        // Adapters do not report bandwidth, and there is no
        // other family to rank against.
        Ok(vec![GatherRowsConfig { kernel: kernel_id(op), launches: 2, efficiency: 500 }])
    }

    fn prepare(
        &self,
        device: &dyn Device,
        op: &CheckedGatherRows,
        plan: &GatherRowsPlan,
    ) -> Result<LaunchSequence, HalError> {
        let (info, name) = (device.info(), op.kernel_name());
        let shared = shared_of(device, "a plan of the wgpu backend")?;
        let refused =
            |reason: Unsupported| HalError::Unsupported { device: info.id, what: name.clone(), why: reason.why };
        let code = weight_code_of(op.format).map_err(refused)?;
        let rows = dispatched_rows(op, &code, info.max_buffer_bytes).map_err(refused)?;
        // Parts of products need the tile's constants.
        let constants = vec![("TILE_N", THREADS), ("TILE_M", 1)];
        let sources = SOURCES.to_vec();
        let part = Part {
            extensions: "",
            rows: FourRows::Beside,
            codes: Codes::Numbers,
            sources,
            threads: THREADS,
            constants,
        };
        let compiled = Compiled::new(shared, &INTERFACE, name.clone(), shader::compose(op.format, &code, &part))?;
        let tile_bytes = code.row_of_tiles_bytes(op.stored_k);
        let kernel = GatherKernel { compiled, shared: shared.clone(), op: *op, rows, tile_bytes };
        let geometry = Geometry { grid: kernel.grid(), threads: THREADS, shared_bytes: 0 };
        let gather = LaunchStep::new::<GatherRowsOperand>(plan.config.kernel, geometry, Arc::new(kernel));
        let bound = op.operands().into_iter().filter(|operand| *operand != GatherRowsOperand::Status);
        let gather = bound.fold(gather, |step, operand| step.bind(operand, operand));

        let shader = shader::compose_parts(STATUS_THREADS, &[STATUS]);
        let compiled = Compiled::new(shared, &STATUS_INTERFACE, STATUS_INTERFACE.name.to_owned(), shader)?;
        let kernel = StatusKernel { compiled, shared: shared.clone(), op: *op };
        let geometry = Geometry { grid: [1, 1, 1], threads: STATUS_THREADS, shared_bytes: 0 };
        let status = LaunchStep::new::<GatherRowsOperand>(plan.config.kernel, geometry, Arc::new(kernel));
        let status = status
            .bind(GatherRowsOperand::Ids, GatherRowsOperand::Ids)
            .bind(GatherRowsOperand::Status, GatherRowsOperand::Status);
        Ok(LaunchSequence::new::<GatherRowsOperand>(name, vec![gather, status]))
    }

    fn source_hash(&self, _: &CheckedGatherRows, _: &GatherRowsConfig) -> u64 {
        *SOURCE_HASH
    }
}

fn kernel_id(op: &CheckedGatherRows) -> KernelId {
    KernelId::new(NAME, None, Spec::GatherRows(GatherRowsSpec { main_loop: Name::new(NAME), w: op.format }))
}

/// Rows of W that one dispatch binds: as many whole tiles
/// as fit in a binding of `limit` bytes. Each dispatch binds
/// all of D.
fn dispatched_rows(op: &CheckedGatherRows, code: &WeightCode, limit: u64) -> Result<usize, Unsupported> {
    if op.class != CLASS {
        return Err(Unsupported::new(format!("reads weights packed as {CLASS:?}, and these are {:?}", op.class)));
    }
    if op.rows > MAX_GROUPS as usize * MAX_GROUPS as usize {
        return Err(Unsupported::new(format!("gathers at most {MAX_GROUPS} x {MAX_GROUPS} rows")));
    }
    if op.rows > rows_that_fit("D", &op.d, op.k, limit)? {
        let bytes = op.d.extent(op.rows, op.k).map_or(u64::MAX, |e| e * op.d.dtype.bytes() as u64);
        return Err(too_large("D", bytes, limit));
    }
    let whole =
        [("the row scales", op.table_rows * 4), ("the column order", op.stored_k * 4), ("the ids", op.rows * WORD)];
    if let Some((name, bytes)) = whole.into_iter().find(|&(_, bytes)| bytes as u64 + MARGIN > limit) {
        return Err(too_large(name, bytes as u64, limit));
    }
    let bytes = code.row_of_tiles_bytes(op.stored_k) as u64;
    match limit.saturating_sub(MARGIN) / bytes {
        0 => Err(too_large(&format!("{TILE_ROWS} rows of W"), bytes, limit)),
        tiles => Ok((tiles as usize).saturating_mul(TILE_ROWS)),
    }
}

/// The kernel that gathers rows.
#[derive(Debug)]
struct GatherKernel {
    compiled: Compiled,
    shared: Arc<Shared>,
    op: CheckedGatherRows,
    /// Rows of W of a dispatch.
    rows: usize,
    /// Bytes of a row tile over all of K.
    tile_bytes: usize,
}

impl GatherKernel {
    /// Workgroups of a dispatch: columns, then rows of D.
    fn grid(&self) -> [u32; 3] {
        // Whole k-tiles, so that padded columns of an order are visited.
        let columns = self.op.stored_k.next_multiple_of(QUAD * THREADS as usize) / QUAD;
        let rows = self.op.rows as u32;
        let y = rows.min(MAX_GROUPS);
        [(columns as u32).div_ceil(THREADS), y, rows.div_ceil(y.max(1))]
    }

    /// Bindings and parameters of the dispatch of W's rows from
    /// `first` on.
    fn dispatch<'a>(&'a self, first: usize, operands: &'a Operands<'a>) -> Result<Dispatch<'a, Params>, HalError> {
        use GatherRowsOperand as O;
        let (shared, op) = (&self.shared, &self.op);
        let end = op.table_rows.min(first + self.rows);
        let touched = |operand: O, bytes: Range<usize>, width: usize| Touched {
            what: operand.name(),
            view: operands.get(operand),
            bytes,
            width,
        };
        let none = || Touched { what: "nothing", view: None, bytes: 0..0, width: 4 }.bind(shared);
        let flags = [(FLAG_ROW_SCALE, op.row_scale), (FLAG_K_ORDER, op.k_order)];
        let mut p = Params {
            shape: GemmShape {
                m: op.rows as u32,
                stored_rows: end as u32,
                k: op.k as u32,
                stored_k: op.stored_k as u32,
                flags: flags.iter().filter(|(_, set)| *set).fold(0, |flags, (flag, _)| flags | flag),
                out_features: op.table_rows as u32,
                ..GemmShape::default()
            },
            modes: Modes { d: Some(op.d.dtype), ..Modes::default() }.packed(),
            d_row: stride(op.rows, op.d.row_stride),
            n_first: first as u32,
            x_row: op.scale.to_bits(),
            ..Params::default()
        };
        let tiles = first / TILE_ROWS * self.tile_bytes..end.div_ceil(TILE_ROWS) * self.tile_bytes;
        let d_bytes = op.d.extent(op.rows, op.k).unwrap_or(0) as usize * op.d.dtype.bytes();
        let (w, row_scale, k_order, ids, d);
        (w, p.w_base) = touched(O::W, tiles, VECTOR as usize).bind_vectors(shared)?;
        let scales = if op.row_scale { op.table_rows * DType::F32.bytes() } else { 0 };
        (row_scale, p.row_scale_base) = touched(O::RowScale, 0..scales, WORD).bind(shared)?;
        let order = if op.k_order { op.stored_k * WORD } else { 0 };
        (k_order, p.k_order_base) = touched(O::KOrder, 0..order, WORD).bind(shared)?;
        (ids, p.c_base) = touched(O::Ids, 0..op.rows * WORD, WORD).bind(shared)?;
        (d, p.d_base) = touched(O::D, 0..d_bytes, op.d.dtype.bytes()).bind_written(shared)?;
        let ((x, _), (bias, _), (token_scale, _), (residual, _)) = (none()?, none()?, none()?, none()?);
        let bindings = vec![x, w, row_scale, k_order, ids, bias, token_scale, residual, d];
        Ok(Dispatch { params: p, bindings, grid: self.grid() })
    }
}

impl Kernel for GatherKernel {
    fn launch(&self, stream: &Stream, operands: Operands<'_>) -> Result<(), HalError> {
        WgpuStream::check(&self.shared, stream)?;
        let firsts = (0..self.op.table_rows).step_by(self.rows);
        let dispatches: Vec<_> = firsts.map(|first| self.dispatch(first, &operands)).collect::<Result<_, _>>()?;
        submit(&self.shared, &INTERFACE, &self.compiled, &dispatches)
    }
}

/// The kernel that checks ids.
#[derive(Debug)]
struct StatusKernel {
    compiled: Compiled,
    shared: Arc<Shared>,
    op: CheckedGatherRows,
}

impl Kernel for StatusKernel {
    fn launch(&self, stream: &Stream, operands: Operands<'_>) -> Result<(), HalError> {
        use GatherRowsOperand as O;
        WgpuStream::check(&self.shared, stream)?;
        let touched = |operand: O, words: usize| Touched {
            what: operand.name(),
            view: operands.get(operand),
            bytes: 0..words * WORD,
            width: WORD,
        };
        let (ids, ids_base) = touched(O::Ids, self.op.rows).bind(&self.shared)?;
        let (status, status_base) = touched(O::Status, STATUS_WORDS).bind_written(&self.shared)?;
        let (rows, table_rows) = (self.op.rows as u32, self.op.table_rows as u32);
        let params = StatusParams { rows, table_rows, ids_base, status_base };
        let dispatch = Dispatch { params, bindings: vec![ids, status], grid: [1, 1, 1] };
        submit(&self.shared, &STATUS_INTERFACE, &self.compiled, &[dispatch])
    }
}
