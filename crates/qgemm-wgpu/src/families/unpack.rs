//! `unpack`: transposed rows of a packed weight, dequantized. Weights are
//! decoded as in products, with the same parameters and bindings.

use std::sync::{Arc, LazyLock};

use qgemm_formats::DType;
use qgemm_hal::abi::{FLAG_GATED, FLAG_K_ORDER, FLAG_ROW_SCALE, GemmShape};
use qgemm_hal::{
    CheckedUnpack, Device, DeviceInfo, Families, Family, Geometry, HalError, Kernel, KernelId, LaunchSequence,
    LaunchStep, Name, Operand, Operands, Operation, Spec, Stream, UnpackConfig, UnpackOperand, UnpackPlan, UnpackSpec,
    Unsupported,
};

use super::dispatch::{Dispatch, MARGIN, MAX_GROUPS, rows_that_fit, stride, submit, too_large};
use super::gemm::{INTERFACE, Params, TILE_ROWS, weight_code_of};
use super::modes::Modes;
use super::operands::Touched;
use super::shared_of;
use crate::event::WgpuStream;
use crate::memory::VECTOR;
use crate::pipeline::Compiled;
use crate::shader::{self, Codes, ENTRY, FourRows, Part};
use crate::shared::Shared;
use crate::weight_code::{CLASS, WeightCode};

/// wgpu families of `unpack`.
pub(super) const FAMILIES: Families<CheckedUnpack> = &[&Unpack];

/// Family name.
const NAME: &str = "unpack";
const QUADS: &str = include_str!("../../shaders/quads.wgsl");
const MAIN_LOOP: &str = include_str!("../../shaders/unpack.wgsl");
const SOURCES: [&str; 3] = [QUADS, MAIN_LOOP, ENTRY];
static SOURCE_HASH: LazyLock<u64> = LazyLock::new(|| super::gemm::source_hash(&SOURCES));

/// Rows and columns of W of a workgroup. Its
/// invocations have four of each.
const TILE: usize = 64;
const THREADS: u32 = (TILE / 4 * (TILE / 4)) as u32;
/// Columns that are decoded together.
const QUAD: usize = 4;

/// The kernel family.
#[derive(Debug)]
struct Unpack;

impl Family<CheckedUnpack> for Unpack {
    fn name(&self) -> &'static str {
        NAME
    }

    fn configs(&self, op: &CheckedUnpack, info: &DeviceInfo) -> Result<Vec<UnpackConfig>, Unsupported> {
        dispatched_rows(op, &weight_code_of(op.format)?, info.max_buffer_bytes)?;
        // Adapters do not report bandwidth, and there is no
        // other family to rank against.
        Ok(vec![UnpackConfig { kernel: kernel_id(op), efficiency: 500 }])
    }

    fn prepare(&self, device: &dyn Device, op: &CheckedUnpack, plan: &UnpackPlan) -> Result<LaunchSequence, HalError> {
        let info = device.info();
        let name = op.kernel_name(NAME);
        let shared = shared_of(device, "a plan of the wgpu backend")?;
        let refused =
            |reason: Unsupported| HalError::Unsupported { device: info.id, what: name.clone(), why: reason.why };
        let code = weight_code_of(op.format).map_err(refused)?;
        let rows = dispatched_rows(op, &code, info.max_buffer_bytes).map_err(refused)?;
        let constants = vec![("TILE_N", TILE as u32), ("TILE_M", TILE as u32)];
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
        let kernel =
            UnpackKernel { compiled, shared: shared.clone(), op: *op, rows, tile_bytes: tile_bytes(op, &code) };
        let geometry = Geometry { grid: kernel.grid(rows.min(op.stored_rows())), threads: THREADS, shared_bytes: 0 };
        let step = LaunchStep::new::<UnpackOperand>(plan.config.kernel, geometry, Arc::new(kernel));
        let step = step.bind_all(op.operands());
        Ok(LaunchSequence::new::<UnpackOperand>(name, vec![step]))
    }

    fn source_hash(&self, _: &CheckedUnpack, _: &UnpackConfig) -> u64 {
        *SOURCE_HASH
    }
}

fn kernel_id(op: &CheckedUnpack) -> KernelId {
    let spec = UnpackSpec { main_loop: Name::new(NAME), w: op.format, n: TILE as u32 };
    KernelId::new(NAME, None, Spec::Unpack(spec))
}

/// Bytes of a row tile over all of K.
fn tile_bytes(op: &CheckedUnpack, code: &WeightCode) -> usize {
    code.row_of_tiles_bytes(op.stored_k)
}

/// Rows of W that one dispatch decodes: as many whole
/// tiles as fit in a binding of `limit` bytes. Each
/// dispatch binds all of D.
fn dispatched_rows(op: &CheckedUnpack, code: &WeightCode, limit: u64) -> Result<usize, Unsupported> {
    if op.class != CLASS {
        return Err(Unsupported::new(format!("reads weights packed as {CLASS:?}, and these are {:?}", op.class)));
    }
    let most = MAX_GROUPS as usize * TILE;
    if op.stored_k >= most {
        return Err(Unsupported::new(format!("decodes rows of fewer than {most} columns, not {}", op.stored_k)));
    }
    if op.features > rows_that_fit("D", &op.d, op.columns(), limit)? {
        let bytes = op.d.extent(op.features, op.columns()).map_or(u64::MAX, |e| e * op.d.dtype.bytes() as u64);
        return Err(too_large("D", bytes, limit));
    }
    let whole = [("the row scales", op.stored_rows() * 4), ("the column order", op.stored_k * 4)];
    if let Some((name, bytes)) = whole.into_iter().find(|&(_, bytes)| bytes as u64 + MARGIN > limit) {
        return Err(too_large(name, bytes as u64, limit));
    }
    let bytes = tile_bytes(op, code) as u64;
    match limit.saturating_sub(MARGIN) / bytes {
        0 => Err(too_large(&format!("{TILE_ROWS} rows of W"), bytes, limit)),
        tiles => Ok((tiles as usize).saturating_mul(TILE_ROWS).min(most)),
    }
}

/// A kernel for one operation.
#[derive(Debug)]
struct UnpackKernel {
    compiled: Compiled,
    shared: Arc<Shared>,
    op: CheckedUnpack,
    /// Rows of a dispatch.
    rows: usize,
    tile_bytes: usize,
}

impl UnpackKernel {
    /// The decoded stored columns, in whole quads.
    fn columns(&self) -> std::ops::Range<usize> {
        let columns = self.op.stored_columns();
        columns.start / QUAD * QUAD..columns.end
    }

    /// Workgroups of a dispatch of `rows` rows.
    fn grid(&self, rows: usize) -> [u32; 3] {
        [rows.div_ceil(TILE) as u32, self.columns().len().div_ceil(TILE) as u32, 1]
    }

    /// Bindings and parameters of the dispatch of rows from `first` on.
    fn dispatch<'a>(&'a self, first: usize, operands: &'a Operands<'a>) -> Result<Dispatch<'a, Params>, HalError> {
        use UnpackOperand as O;
        let (shared, op) = (&self.shared, &self.op);
        let end = op.stored_rows().min(first + self.rows);
        let touched = |operand: O, bytes: std::ops::Range<usize>, width: usize| Touched {
            what: operand.name(),
            view: operands.get(operand),
            bytes,
            width,
        };
        let none = || Touched { what: "nothing", view: None, bytes: 0..0, width: 4 }.bind(shared);
        let flags = [(FLAG_ROW_SCALE, op.row_scale), (FLAG_K_ORDER, op.k_order), (FLAG_GATED, op.gated)];
        let modes = Modes { d: Some(op.d.dtype), ..Modes::default() };
        let mut p = Params {
            shape: GemmShape {
                m: op.features as u32,
                stored_rows: end as u32,
                k: op.k as u32,
                stored_k: op.stored_k as u32,
                flags: flags.iter().filter(|(_, set)| *set).fold(0, |flags, (flag, _)| flags | flag),
                out_features: op.out_features as u32,
                ..GemmShape::default()
            },
            modes: modes.packed(),
            x_row: op.first as u32,
            x_col: self.columns().start as u32,
            d_row: stride(op.features, op.d.row_stride),
            n_first: first as u32,
            ..Params::default()
        };
        let tiles = first / TILE_ROWS * self.tile_bytes..end.div_ceil(TILE_ROWS) * self.tile_bytes;
        let d_bytes = op.d.extent(op.features, op.columns()).unwrap_or(0) as usize * op.d.dtype.bytes();
        let (w, row_scale, k_order, d);
        (w, p.w_base) = touched(O::W, tiles, VECTOR as usize).bind_vectors(shared)?;
        let scales = if op.row_scale { op.stored_rows() * DType::F32.bytes() } else { 0 };
        (row_scale, p.row_scale_base) = touched(O::RowScale, 0..scales, 4).bind(shared)?;
        let order = if op.k_order { op.stored_k * 4 } else { 0 };
        (k_order, p.k_order_base) = touched(O::KOrder, 0..order, 4).bind(shared)?;
        (d, p.d_base) = touched(O::D, 0..d_bytes, op.d.dtype.bytes()).bind_written(shared)?;
        let ((x, _), (c, _), (bias, _), (token_scale, _), (residual, _)) =
            (none()?, none()?, none()?, none()?, none()?);
        let bindings = vec![x, w, row_scale, k_order, c, bias, token_scale, residual, d];
        Ok(Dispatch { params: p, bindings, grid: self.grid(end - first) })
    }
}

impl Kernel for UnpackKernel {
    fn launch(&self, stream: &Stream, operands: Operands<'_>) -> Result<(), HalError> {
        WgpuStream::check(&self.shared, stream)?;
        let firsts = (0..self.op.stored_rows()).step_by(self.rows);
        let dispatches: Vec<_> = firsts.map(|first| self.dispatch(first, &operands)).collect::<Result<_, _>>()?;
        submit(&self.shared, &INTERFACE, &self.compiled, &dispatches)
    }
}
