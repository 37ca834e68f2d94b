//! `convert`: type and layout conversion. Also the X prologue of products.

use std::ops::Range;
use std::sync::{Arc, LazyLock};

use bytemuck::{Pod, Zeroable};
use qgemm_formats::DType;
use qgemm_hal::abi::{ConvertShape, FLAG_K_ORDER, FLAG_X_ALIGNED16, FLAG_X_FACTOR};
use qgemm_hal::{
    CheckedConvert, ConvertConfig, ConvertOperand, ConvertPlan, ConvertSpec, Device, DeviceInfo, Families, Family,
    Geometry, HalError, Kernel, KernelId, LaunchSequence, LaunchStep, Operand, Operands, Spec, Stream, Unsupported,
};

use super::dispatch::{Dispatch, MARGIN, MAX_GROUPS, rows_that_fit, stride, submit, too_large};
use super::modes::Modes;
use super::operands::Touched;
use crate::device::shared_of;
use crate::event::WgpuStream;
use crate::memory::VECTOR;
use crate::pipeline::{Compiled, Interface};
use crate::shader::{CONVERT_TEXTS, compose_convert};
use crate::shared::Shared;
use crate::source_hash::hash_of;

/// wgpu families of `convert`.
pub(super) const FAMILIES: Families<CheckedConvert> = &[&Convert];

/// Kernel interface: the operands of `shaders/convert_params.wgsl`, with
/// the binding numbers of products.
pub(crate) const INTERFACE: Interface =
    Interface { name: "convert", bindings: "r--r----ww", params_bytes: size_of::<Params>() as u32 };

/// Family name.
const NAME: &str = "convert";
/// Invocations of a workgroup.
const THREADS: u32 = 256;
/// Columns that an invocation converts at once.
const COLUMNS: usize = 8;
/// Rows of a workgroup for a column-major X,
/// whose rows are adjacent.
const ROWS_BESIDE: u32 = 32;
/// Maximum workgroups along a row. For longer rows, invocations loop.
const MAX_ALONG: usize = 1 << 10;

static SOURCE_HASH: LazyLock<u64> = LazyLock::new(|| hash_of(CONVERT_TEXTS));

/// `Params` of `shaders/convert_params.wgsl`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
struct Params {
    shape: ConvertShape,
    modes: u32,
    rows_together: u32,
    rows_beside: u32,
    x_row: u32,
    x_col: u32,
    d_row: u32,
    x_base: u32,
    k_order_base: u32,
    d_base: u32,
    factor_base: u32,
}

/// The kernel family.
#[derive(Debug)]
struct Convert;

impl Family<CheckedConvert> for Convert {
    fn name(&self) -> &'static str {
        NAME
    }

    fn configs(&self, op: &CheckedConvert, info: &DeviceInfo) -> Result<Vec<ConvertConfig>, Unsupported> {
        check(op, info)?;
        // Adapters do not report bandwidth, and there is no
        // other family to rank against.
        Ok(vec![ConvertConfig { kernel: kernel_id(op), efficiency: 500 }])
    }

    fn prepare(&self, device: &dyn Device, op: &CheckedConvert, _: &ConvertPlan) -> Result<LaunchSequence, HalError> {
        let name = format!("{NAME}_{}_{}", op.x.dtype, op.d.dtype);
        Ok(LaunchSequence::new::<ConvertOperand>(name, vec![step(device, op)?.of_operation()]))
    }

    fn source_hash(&self, _: &CheckedConvert, _: &ConvertConfig) -> u64 {
        *SOURCE_HASH
    }
}

/// Checks that the kernel supports `op`.
pub(super) fn check(op: &CheckedConvert, info: &DeviceInfo) -> Result<(), Unsupported> {
    parts(op, info.max_buffer_bytes).map(|_| ())
}

/// The kernel of `op` as a step without bound operands.
pub(super) fn step(device: &dyn Device, op: &CheckedConvert) -> Result<LaunchStep, HalError> {
    let shared = shared_of(device, "a conversion of the wgpu backend")?;
    let refused =
        |reason: Unsupported| HalError::Unsupported { device: shared.id, what: NAME.to_owned(), why: reason.why };
    let parts = parts(op, device.info().max_buffer_bytes).map_err(refused)?;
    let by_vectors = writes_vectors(op);
    let shader = compose_convert(THREADS, by_vectors);
    let compiled = Compiled::new(shared, &INTERFACE, NAME.to_owned(), shader)?;
    let parts: Vec<_> = parts.iter().map(|part| part.launch(op)).collect();
    let geometry =
        Geometry { grid: parts.first().map_or([0; 3], |part| part.grid), threads: THREADS, shared_bytes: THREADS * 4 };
    let d_access = if by_vectors { VECTOR as usize } else { op.d.dtype.bytes() };
    let kernel = ConvertKernel { compiled, shared: shared.clone(), op: *op, d_access, parts };
    Ok(LaunchStep::new::<ConvertOperand>(kernel_id(op), geometry, Arc::new(kernel)))
}

/// Whether X is closer to column-major than to row-major.
fn is_transposed(op: &CheckedConvert) -> bool {
    op.rows > 1 && op.columns > 1 && op.x.col_stride > op.x.row_stride
}

/// Whether rows of D are whole 16-byte vectors, so that
/// kernels write nothing smaller.
fn writes_vectors(op: &CheckedConvert) -> bool {
    op.d.aligned16 && op.d_columns.is_multiple_of(COLUMNS)
}

fn kernel_id(op: &CheckedConvert) -> KernelId {
    let transposed = is_transposed(op);
    let spec = ConvertSpec { transposed, row_factors: false, whole_groups: false, ..ConvertSpec::of(op) };
    KernelId::new(NAME, None, Spec::Convert(spec))
}

/// The part that one dispatch converts.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Part {
    rows: Range<usize>,
    /// Columns of D.
    columns: Range<usize>,
}

/// Dispatches of `op`, with bindings of at most `limit` bytes.
///
/// # Errors
/// An unsupported feature, or the operand that exceeds the
/// limit however it is split.
fn parts(op: &CheckedConvert, limit: u64) -> Result<Vec<Part>, Unsupported> {
    let CheckedConvert { rows, columns, d_columns, x, d, gathers, row_factors } = *op;
    if d.col_stride != 1 {
        return Err(Unsupported::new("writes row-major results"));
    }
    if row_factors && d.dtype != DType::F16 {
        return Err(Unsupported::new(format!("gives rows factors for f16, and the result is in {}", d.dtype)));
    }
    for (name, size) in [("rows", rows), ("columns of X", columns), ("columns of the result", d_columns)] {
        if size >= 1 << 31 {
            return Err(Unsupported::new(format!("there are {size} {name}, and kernels count in 31 bits")));
        }
    }
    for (name, dense, columns) in [("X", x, columns), ("the result", d, d_columns)] {
        let bytes = dense.extent(rows, columns).and_then(|elements| elements.checked_mul(dense.dtype.bytes() as u64));
        if bytes.and_then(|bytes| usize::try_from(bytes).ok()).is_none() {
            return Err(Unsupported::new(format!("the extent of {name} overflows")));
        }
    }
    // Number of elements with this stride that one binding holds.
    let room = limit.saturating_sub(MARGIN);
    let fitting = |width: usize, stride: u64| {
        let apart = stride.saturating_mul(width as u64).max(1);
        usize::try_from(room.saturating_sub(width as u64) / apart).unwrap_or(usize::MAX).saturating_add(1)
    };
    let mut step = d_columns.min(fitting(d.dtype.bytes(), 1));
    if gathers {
        step = step.min(fitting(size_of::<u32>(), 1));
    } else {
        let of_x = fitting(x.dtype.bytes(), x.col_stride);
        step = if of_x >= columns { step } else { step.min(of_x) };
    }
    if step < d_columns {
        if row_factors {
            let why = "finds the largest value of a row in one dispatch, whose bindings do not hold a row of X, of the column \
                       order or of the result";
            return Err(Unsupported::new(format!("{why}: max_storage_buffer_binding_size is {limit}")));
        }
        // Whole vectors, so that rows stay aligned.
        step = if step > COLUMNS { step / COLUMNS * COLUMNS } else { step };
    }
    let x_columns = if gathers || row_factors { columns } else { columns.min(step) };
    let mut row_step = rows_that_fit("X", &x, x_columns, limit)?.min(rows_that_fit("D", &d, step, limit)?);
    if row_factors {
        row_step = row_step.min(fitting(size_of::<f32>(), 1));
    }
    if limit <= MARGIN {
        return Err(too_large("an element", x.dtype.bytes() as u64, limit));
    }
    let ranges = |len: usize, step: usize| (0..len).step_by(step).map(move |at| at..(at + step).min(len));
    let of_rows = |rows: Range<usize>| ranges(d_columns, step).map(move |columns| Part { rows: rows.clone(), columns });
    Ok(ranges(rows, row_step).flat_map(of_rows).collect())
}

impl Part {
    /// Columns of X that this part reads.
    fn x_columns(&self, op: &CheckedConvert) -> Range<usize> {
        match op.gathers || op.row_factors {
            true => 0..op.columns,
            false => self.columns.start.min(op.columns)..self.columns.end.min(op.columns),
        }
    }

    /// A dispatch without views.
    fn launch(&self, op: &CheckedConvert) -> Launch {
        let CheckedConvert { x, d, .. } = op;
        let (rows, columns, x_columns) = (self.rows.len(), self.columns.len(), self.x_columns(op));
        let extent = |first: u64, row_stride: u64, columns: usize, col_stride: u64, width: usize| {
            if columns == 0 {
                return 0..0;
            }
            let last = first + (rows as u64 - 1) * row_stride + (columns as u64 - 1) * col_stride;
            first as usize * width..(last as usize + 1) * width
        };
        let x_first = self.rows.start as u64 * x.row_stride + x_columns.start as u64 * x.col_stride;
        let d_first = self.rows.start as u64 * d.row_stride + self.columns.start as u64;
        let of = |there: bool, range: &Range<usize>| if there { range.start * 4..range.end * 4 } else { 0..0 };
        let flags = [
            (FLAG_K_ORDER, op.gathers),
            (FLAG_X_ALIGNED16, x.aligned16 && x.col_stride == 1),
            (FLAG_X_FACTOR, op.row_factors),
        ];
        let beside = is_transposed(op);
        // As many invocations along a row as have work.
        let eights = columns.div_ceil(COLUMNS);
        let lanes = (eights.min(THREADS as usize) as u32).next_power_of_two();
        let rows_together = if beside { ROWS_BESIDE } else { THREADS / lanes };
        let lanes = (THREADS / rows_together) as usize;
        let along = if op.row_factors { 1 } else { eights.div_ceil(lanes).min(MAX_ALONG) };
        let groups = (rows as u32).div_ceil(rows_together);
        let y = groups.min(MAX_GROUPS);
        Launch {
            params: Params {
                shape: ConvertShape {
                    rows: rows as u32,
                    columns: x_columns.len() as u32,
                    d_columns: columns as u32,
                    flags: flags.iter().filter(|(_, set)| *set).fold(0, |flags, (flag, _)| flags | flag),
                },
                modes: Modes { x: Some(x.dtype), d: Some(d.dtype), ..Modes::default() }.packed(),
                rows_together,
                rows_beside: beside.into(),
                x_row: stride(rows, x.row_stride),
                x_col: if x_columns.len() > 1 { x.col_stride as u32 } else { 1 },
                d_row: stride(rows, d.row_stride),
                ..Params::default()
            },
            x: extent(x_first, x.row_stride, x_columns.len(), x.col_stride, x.dtype.bytes()),
            order: of(op.gathers, &self.columns),
            d: extent(d_first, d.row_stride, columns, 1, d.dtype.bytes()),
            factors: of(op.row_factors, &self.rows),
            grid: [along as u32, y, groups.div_ceil(y)],
        }
    }
}

/// A dispatch, and the bytes of every operand that it touches.
#[derive(Debug)]
struct Launch {
    /// Parameters without the `*_base` fields, which
    /// depend on a launch's views.
    params: Params,
    x: Range<usize>,
    order: Range<usize>,
    d: Range<usize>,
    factors: Range<usize>,
    grid: [u32; 3],
}

/// A kernel for one operation. A launch allocates no device memory.
#[derive(Debug)]
struct ConvertKernel {
    compiled: Compiled,
    shared: Arc<Shared>,
    op: CheckedConvert,
    /// Bytes of D that the kernel writes at once.
    d_access: usize,
    parts: Vec<Launch>,
}

impl ConvertKernel {
    /// Bindings and parameters of a part.
    fn dispatch<'a>(&'a self, part: &Launch, operands: &'a Operands<'a>) -> Result<Dispatch<'a, Params>, HalError> {
        use ConvertOperand as O;
        let (shared, op, mut p) = (&self.shared, &self.op, part.params);
        let touched = |operand: O, bytes: &Range<usize>, width| Touched {
            what: operand.name(),
            view: operands.get(operand),
            bytes: bytes.clone(),
            width,
        };
        let (x, order, d, factors);
        (x, p.x_base) = touched(O::X, &part.x, op.x.dtype.bytes()).bind_vectors(shared)?;
        (order, p.k_order_base) = touched(O::Order, &part.order, 4).bind(shared)?;
        (d, p.d_base) = touched(O::D, &part.d, self.d_access).bind_written(shared)?;
        p.d_base *= (self.d_access / op.d.dtype.bytes()) as u32;
        (factors, p.factor_base) = touched(O::RowFactors, &part.factors, 4).bind_written(shared)?;
        Ok(Dispatch { params: p, bindings: vec![x, order, d, factors], grid: part.grid })
    }
}

impl Kernel for ConvertKernel {
    fn launch(&self, stream: &Stream, operands: Operands<'_>) -> Result<(), HalError> {
        WgpuStream::check(&self.shared, stream)?;
        let dispatches: Vec<_> =
            self.parts.iter().map(|part| self.dispatch(part, &operands)).collect::<Result<_, _>>()?;
        submit(&self.shared, &INTERFACE, &self.compiled, &dispatches)
    }
}

#[cfg(test)]
mod tests {
    use qgemm_hal::Dense;

    use super::*;

    fn op(rows: usize, columns: usize, d_columns: usize) -> CheckedConvert {
        let (x, d) = (Dense::rows_of(DType::F32, columns), Dense::rows_of(DType::F16, d_columns));
        CheckedConvert { rows, columns, d_columns, x, d, gathers: false, row_factors: false }
    }

    fn cut(op: &CheckedConvert, limit: u64) -> Result<Vec<Part>, String> {
        let parts = parts(op, limit).map_err(|reason| reason.why)?;
        let mut written = 0;
        for part in &parts {
            let launch = part.launch(op);
            for bytes in [&launch.x, &launch.order, &launch.d, &launch.factors] {
                assert!(bytes.len() as u64 + MARGIN <= limit, "{launch:?}");
            }
            assert!(launch.grid.iter().all(|&groups| (1..=MAX_GROUPS).contains(&groups)), "{launch:?}");
            written += part.rows.len() * part.columns.len();
        }
        assert_eq!(written, op.rows * op.d_columns);
        Ok(parts)
    }

    #[test]
    fn what_fits_is_one_dispatch_and_what_does_not_is_cut() {
        for op in [op(1, 1, 1), op(512, 4096, 4096), op(3, 5, 9), op(3, 9, 5), op(40_000_000, 1, 1)] {
            assert_eq!(cut(&op, u32::MAX.into()).map(|parts| parts.len()), Ok(1), "{op:?}");
        }
        // Split by rows; the last part has fewer.
        let parts = cut(&op(100, 1000, 1000), 1 << 16).expect("cut");
        assert!(parts.len() == 7 && parts.iter().all(|part| part.columns == (0..1000)), "{parts:?}");
        // Split by columns in whole vectors. Rows of the result
        // continue beyond the end of X.
        let parts = cut(&op(2, 1000, 3000), 1024).expect("cut");
        assert!(parts.iter().all(|part| part.columns.start.is_multiple_of(8)), "{parts:?}");
        // Columns of X with a large stride.
        let x = Dense { row_stride: 1, col_stride: 64, ..op(64, 1000, 1000).x };
        assert!(cut(&CheckedConvert { x, ..op(64, 1000, 1000) }, 1 << 14).expect("cut").len() > 10);
        // More rows than workgroups along one grid dimension.
        let part = &cut(&op(70_000, 4096, 4096), u32::MAX.into()).expect("whole")[0];
        assert_eq!(part.launch(&op(70_000, 4096, 4096)).grid, [2, 65_535, 2]);
    }

    #[test]
    fn what_is_not_served_says_why() {
        let refused = |op: CheckedConvert, limit| cut(&op, limit).expect_err("refused");
        let base = op(2, 1000, 1000);
        let why = refused(CheckedConvert { row_factors: true, ..base }, 1024);
        assert!(why.contains("in one dispatch") && why.contains("1024"), "{why}");
        assert!(refused(CheckedConvert { gathers: true, ..base }, 1024).contains("a row of X"));
        let d = Dense { dtype: DType::BF16, ..base.d };
        assert!(refused(CheckedConvert { row_factors: true, d, ..base }, 1 << 20).contains("bf16"));
        let d = Dense { col_stride: 2, ..base.d };
        assert!(refused(CheckedConvert { d, ..base }, 1 << 20).contains("row-major"));
        assert!(refused(op(1, 1 << 31, 1), 1 << 20).contains("31 bits"));
        let x = Dense { col_stride: u64::MAX / 2, ..base.x };
        assert!(refused(CheckedConvert { x, ..base }, 1 << 20).contains("extent of X overflows"));
    }
}
