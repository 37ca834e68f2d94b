//! `dequantize`: dequantization of X for products that
//! do not support its format.

use std::ops::Range;
use std::sync::{Arc, LazyLock};

use bytemuck::{Pod, Zeroable};
use qgemm_formats::{XFactor, XParts};
use qgemm_hal::abi::DequantizeShape;
use qgemm_hal::{
    CheckedDequantize, DequantizeConfig, DequantizeOperand, DequantizePlan, DequantizeSpec, Device, DeviceInfo,
    Families, Family, Geometry, HalError, Kernel, KernelId, LaunchSequence, LaunchStep, Operand, Operands, Operation,
    Spec, Stream, Unsupported,
};

use super::dispatch::{Dispatch, MARGIN, MAX_GROUPS, stride, submit, too_large};
use super::operands::Touched;
use crate::device::shared_of;
use crate::event::WgpuStream;
use crate::pipeline::{Compiled, Interface};
use crate::shader::{DEQUANTIZE_TEXTS, compose_dequantize};
use crate::shared::Shared;
use crate::source_hash::hash_of;

/// wgpu families of `dequantize`.
pub(super) const FAMILIES: Families<CheckedDequantize> = &[&Dequantize];

/// Kernel interface: the operands of `shaders/dequantize.wgsl`.
pub(crate) const INTERFACE: Interface =
    Interface { name: "dequantize", bindings: "rrrw", params_bytes: size_of::<Params>() as u32 };

/// Family name.
const NAME: &str = "dequantize";
/// Invocations of a workgroup.
const THREADS: u32 = 64;
/// Bytes of a word, the unit of all writes.
const WORD: usize = 4;

static SOURCE_HASH: LazyLock<u64> = LazyLock::new(|| hash_of(DEQUANTIZE_TEXTS));

/// `Params` of `shaders/dequantize.wgsl`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
struct Params {
    shape: DequantizeShape,
    codes_row: u32,
    scales_row: u32,
    codes_base: u32,
    scales_base: u32,
    factors_base: u32,
    d_base: u32,
}

/// The kernel family.
#[derive(Debug)]
struct Dequantize;

impl Family<CheckedDequantize> for Dequantize {
    fn name(&self) -> &'static str {
        NAME
    }

    fn configs(&self, op: &CheckedDequantize, info: &DeviceInfo) -> Result<Vec<DequantizeConfig>, Unsupported> {
        dispatches(op, info.max_buffer_bytes)?;
        // Adapters do not report bandwidth, and there is no
        // other family to rank against.
        Ok(vec![DequantizeConfig { kernel: kernel_id(op), efficiency: 500 }])
    }

    fn prepare(
        &self,
        device: &dyn Device,
        op: &CheckedDequantize,
        _: &DequantizePlan,
    ) -> Result<LaunchSequence, HalError> {
        let shared = shared_of(device, "a dequantization of the wgpu backend")?;
        let refused =
            |reason: Unsupported| HalError::Unsupported { device: shared.id, what: NAME.to_owned(), why: reason.why };
        let rows = dispatches(op, device.info().max_buffer_bytes).map_err(refused)?;
        let compiled =
            Compiled::new(shared, &INTERFACE, NAME.to_owned(), compose_dequantize(THREADS, &op.planes.parts))?;
        let grid = rows.first().map_or([0; 3], |rows| grid(op, rows.len()));
        let kernel = DequantizeKernel { compiled, shared: shared.clone(), op: *op, dispatches: rows };
        let geometry = Geometry { grid, threads: THREADS, shared_bytes: 0 };
        let step = LaunchStep::new::<DequantizeOperand>(kernel_id(op), geometry, Arc::new(kernel));
        let step = step.bind_all(op.operands());
        Ok(LaunchSequence::new::<DequantizeOperand>(format!("{NAME}_{}", op.format), vec![step]))
    }

    fn source_hash(&self, _: &CheckedDequantize, _: &DequantizeConfig) -> u64 {
        *SOURCE_HASH
    }
}

fn kernel_id(op: &CheckedDequantize) -> KernelId {
    KernelId::new(NAME, None, Spec::Dequantize(DequantizeSpec::of(op)))
}

/// Constants of `shaders/dequantize.wgsl` that describe a format.
pub(crate) fn constants(parts: &XParts) -> impl Iterator<Item = (&'static str, u32)> {
    let of_shader = ["CODE", "SCALE", "FACTOR", "BLOCK"];
    super::quantize::constants(parts).into_iter().filter(move |(name, _)| of_shader.contains(name))
}

/// Rows of each dispatch, with bindings of at most `limit` bytes.
///
/// # Errors
/// The operand whose row exceeds a binding, and the limit.
fn dispatches(op: &CheckedDequantize, limit: u64) -> Result<Vec<Range<usize>>, Unsupported> {
    let &CheckedDequantize { rows, columns, planes, .. } = op;
    for (name, size) in [("rows", rows), ("columns", columns)] {
        if size >= 1 << 31 {
            return Err(Unsupported::new(format!("there are {size} {name}, and kernels count in 31 bits")));
        }
    }
    let d_row = op.d_columns().saturating_mul(WORD);
    let touched = [
        ("the codes", planes.codes_row, planes.parts.code_bytes(columns)),
        ("the scales", planes.scales_row, planes.parts.scale_bytes(columns)),
        ("the factors", WORD as u64, WORD),
        ("X as plain numbers", d_row as u64, d_row),
    ];
    let mut each = rows;
    for (name, row_stride, row_bytes) in touched {
        let room = limit.saturating_sub(MARGIN).checked_sub(row_bytes as u64);
        let room = room.ok_or_else(|| too_large(&format!("a row of {name}"), row_bytes as u64, limit))?;
        each = each.min(usize::try_from(room / row_stride.max(1)).unwrap_or(usize::MAX).saturating_add(1));
    }
    Ok((0..rows).step_by(each).map(|first| first..(first + each).min(rows)).collect())
}

/// Workgroups for this many rows.
fn grid(op: &CheckedDequantize, rows: usize) -> [u32; 3] {
    let along = op.d_columns().div_ceil(THREADS as usize).min(MAX_GROUPS as usize);
    let y = (rows as u32).min(MAX_GROUPS);
    [along as u32, y, (rows as u32).div_ceil(y)]
}

/// A kernel for one operation. A launch allocates no device memory.
#[derive(Debug)]
struct DequantizeKernel {
    compiled: Compiled,
    shared: Arc<Shared>,
    op: CheckedDequantize,
    dispatches: Vec<Range<usize>>,
}

impl DequantizeKernel {
    /// Bindings and parameters of the dispatch of `rows`.
    fn dispatch<'a>(
        &'a self,
        rows: &Range<usize>,
        operands: &'a Operands<'a>,
    ) -> Result<Dispatch<'a, Params>, HalError> {
        use DequantizeOperand as O;
        let (shared, op, planes) = (&self.shared, &self.op, &self.op.planes);
        let d_row = op.d_columns() * WORD;
        let words = |row_stride: u64| stride(op.rows, row_stride / WORD as u64);
        let touched = |operand: O, row_stride: u64, row_bytes: usize| {
            let row = |row: usize| row * row_stride as usize;
            let bytes = if row_bytes == 0 { 0..0 } else { row(rows.start)..row(rows.end - 1) + row_bytes };
            Touched { what: operand.name(), view: operands.get(operand), bytes, width: WORD }
        };
        let of_factor = match planes.parts.factor {
            XFactor::None => touched(O::Factors, 0, 0),
            XFactor::Given => touched(O::Factors, 0, WORD),
            XFactor::PerToken => touched(O::Factors, WORD as u64, WORD),
        };
        let (codes, codes_base) =
            touched(O::Codes, planes.codes_row, planes.parts.code_bytes(op.columns)).bind(shared)?;
        let (scales, scales_base) =
            touched(O::Scales, planes.scales_row, planes.parts.scale_bytes(op.columns)).bind(shared)?;
        let (factors, factors_base) = of_factor.bind(shared)?;
        let (d, d_base) = touched(O::D, d_row as u64, d_row).bind_written(shared)?;
        let params = Params {
            shape: DequantizeShape {
                rows: rows.len() as u32,
                columns: op.d_columns() as u32,
                chunks: 1,
                ..DequantizeShape::default()
            },
            codes_row: words(planes.codes_row),
            scales_row: words(planes.scales_row),
            codes_base,
            scales_base,
            factors_base,
            d_base,
        };
        Ok(Dispatch { params, bindings: vec![codes, scales, factors, d], grid: grid(op, rows.len()) })
    }
}

impl Kernel for DequantizeKernel {
    fn launch(&self, stream: &Stream, operands: Operands<'_>) -> Result<(), HalError> {
        WgpuStream::check(&self.shared, stream)?;
        let all = operands.rows(self.op.rows);
        let of_portion = self.dispatches.iter().filter(|rows| rows.start < all);
        let dispatches: Vec<_> = of_portion
            .map(|rows| self.dispatch(&(rows.start..rows.end.min(all)), &operands))
            .collect::<Result<_, _>>()?;
        submit(&self.shared, &INTERFACE, &self.compiled, &dispatches)
    }

    fn takes_portions(&self) -> bool {
        true
    }
}
