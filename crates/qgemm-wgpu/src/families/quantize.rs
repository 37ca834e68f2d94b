//! `quantize`: quantization of activations (INT8, FP8, FP4).

use std::ops::Range;
use std::sync::{Arc, LazyLock};

use bytemuck::{Pod, Zeroable};
use qgemm_formats::{ScaleType, XCode, XFactor, XParts};
use qgemm_hal::abi::{FLAG_X_ALIGNED16, QuantizeShape};
use qgemm_hal::{
    CheckedQuantize, Device, DeviceInfo, Families, Family, Geometry, HalError, Kernel, KernelId, LaunchSequence,
    LaunchStep, Operand, Operands, Operation, QuantizeConfig, QuantizeOperand, QuantizePlan, QuantizeSpec, Spec,
    Stream, Unsupported,
};

use super::dispatch::{Dispatch, MARGIN, MAX_GROUPS, rows_that_fit, stride, submit, too_large};
use super::modes::Modes;
use super::operands::Touched;
use crate::device::shared_of;
use crate::event::WgpuStream;
use crate::pipeline::{Compiled, Interface};
use crate::shader::{QUANTIZE_TEXTS, compose_quantize};
use crate::shared::Shared;
use crate::source_hash::hash_of;

/// wgpu families of `quantize`.
pub(super) const FAMILIES: Families<CheckedQuantize> = &[&Quantize];

/// Kernel interface: the operands of `shaders/quantize_params.wgsl`.
pub(crate) const INTERFACE: Interface =
    Interface { name: "quantize", bindings: "rr-rwwww", params_bytes: size_of::<Params>() as u32 };

/// Family name.
const NAME: &str = "quantize";
/// Invocations of a workgroup. A block of 256
/// columns fits in one workgroup.
const THREADS: u32 = 64;
/// Columns that an invocation quantizes at once.
const COLUMNS: usize = 8;
/// Bytes of a word, the unit of all writes.
const WORD: usize = 4;

static SOURCE_HASH: LazyLock<u64> = LazyLock::new(|| hash_of(QUANTIZE_TEXTS));

/// `Params` of `shaders/quantize_params.wgsl`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
struct Params {
    shape: QuantizeShape,
    modes: u32,
    x_row: u32,
    x_col: u32,
    codes_row: u32,
    scales_row: u32,
    sums_row: u32,
    x_base: u32,
    factor_base: u32,
    codes_base: u32,
    scales_base: u32,
    token_factors_base: u32,
    sums_base: u32,
}

/// The kernel family.
#[derive(Debug)]
struct Quantize;

impl Family<CheckedQuantize> for Quantize {
    fn name(&self) -> &'static str {
        NAME
    }

    fn configs(&self, op: &CheckedQuantize, info: &DeviceInfo) -> Result<Vec<QuantizeConfig>, Unsupported> {
        parts(op, info.max_buffer_bytes)?;
        // Adapters do not report bandwidth, and there is no
        // other family to rank against.
        Ok(vec![QuantizeConfig { kernel: kernel_id(op), efficiency: 500 }])
    }

    fn prepare(&self, device: &dyn Device, op: &CheckedQuantize, _: &QuantizePlan) -> Result<LaunchSequence, HalError> {
        let shared = shared_of(device, "a quantization of the wgpu backend")?;
        let refused =
            |reason: Unsupported| HalError::Unsupported { device: shared.id, what: NAME.to_owned(), why: reason.why };
        let parts = parts(op, device.info().max_buffer_bytes).map_err(refused)?;
        let shader = compose_quantize(THREADS, &constants(&op.parts));
        let compiled = Compiled::new(shared, &INTERFACE, NAME.to_owned(), shader)?;
        let geometry = Geometry {
            grid: parts.first().map_or([0; 3], |rows| grid(op, rows.len())),
            threads: THREADS,
            shared_bytes: 3 * THREADS * WORD as u32,
        };
        let kernel = QuantizeKernel { compiled, shared: shared.clone(), op: *op, parts };
        let step = LaunchStep::new::<QuantizeOperand>(kernel_id(op), geometry, Arc::new(kernel));
        let step = step.bind_all(op.operands());
        let name = format!("{NAME}_{}_{}", op.x.dtype, op.format);
        Ok(LaunchSequence::new::<QuantizeOperand>(name, vec![step]))
    }

    fn source_hash(&self, _: &CheckedQuantize, _: &QuantizeConfig) -> u64 {
        *SOURCE_HASH
    }
}

fn kernel_id(op: &CheckedQuantize) -> KernelId {
    KernelId::new(NAME, None, Spec::Quantize(QuantizeSpec::of(op)))
}

/// Whether one workgroup processes a whole row.
fn is_of_tokens(parts: &XParts) -> bool {
    parts.factor == XFactor::PerToken || (parts.scale.is_some() && parts.block.is_none())
}

/// Constants of `shaders/quantize.wgsl` that describe a format.
pub(crate) fn constants(parts: &XParts) -> [(&'static str, u32); 6] {
    let code = match parts.code {
        XCode::Int8 => 0,
        XCode::E4M3 => 1,
        XCode::E2M1 => 2,
    };
    let scale = match parts.scale {
        None => 0,
        Some(ScaleType::E8M0) => 2,
        Some(ScaleType::E4M3) => 3,
        Some(_) => 1,
    };
    let factor = match parts.factor {
        XFactor::None => 0,
        XFactor::Given => 1,
        XFactor::PerToken => 2,
    };
    [
        ("CODE", code),
        ("SCALE", scale),
        ("FACTOR", factor),
        ("BLOCK", parts.block.unwrap_or(0) as u32),
        ("SUM_SPAN", parts.sum_span.unwrap_or(0) as u32),
        ("OF_TOKEN", is_of_tokens(parts).into()),
    ]
}

/// Rows of each dispatch, with bindings of at most `limit` bytes.
///
/// # Errors
/// The operand whose row exceeds a binding, and the limit.
fn parts(op: &CheckedQuantize, limit: u64) -> Result<Vec<Range<usize>>, Unsupported> {
    let CheckedQuantize { rows, columns, x, parts, .. } = op;
    for (name, size) in [("rows", *rows), ("columns", *columns)] {
        if size >= 1 << 31 {
            return Err(Unsupported::new(format!("there are {size} {name}, and kernels count in 31 bits")));
        }
    }
    let mut each = rows_that_fit("X", x, *columns, limit)?.min(*rows);
    let planes = [
        ("the codes", op.codes_row, parts.code_bytes(*columns)),
        ("the scales", op.scales_row, parts.scale_bytes(*columns)),
        ("the sums", op.sums_row, parts.sums(*columns) * WORD),
        ("the token factors", WORD as u64, WORD),
    ];
    for (name, row_stride, row_bytes) in planes {
        let room = limit.saturating_sub(MARGIN).checked_sub(row_bytes as u64);
        let room = room.ok_or_else(|| too_large(&format!("a row of {name}"), row_bytes as u64, limit))?;
        each = each.min(usize::try_from(room / row_stride.max(1)).unwrap_or(usize::MAX).saturating_add(1));
    }
    Ok((0..*rows).step_by(each).map(|first| first..(first + each).min(*rows)).collect())
}

/// Workgroups for this many rows.
fn grid(op: &CheckedQuantize, rows: usize) -> [u32; 3] {
    let along = (op.parts.columns(op.columns) / COLUMNS).div_ceil(THREADS as usize);
    let along = if is_of_tokens(&op.parts) { 1 } else { along.min(MAX_GROUPS as usize) };
    let y = (rows as u32).min(MAX_GROUPS);
    [along as u32, y, (rows as u32).div_ceil(y)]
}

/// A kernel for one operation. A launch allocates no device memory.
#[derive(Debug)]
struct QuantizeKernel {
    compiled: Compiled,
    shared: Arc<Shared>,
    op: CheckedQuantize,
    parts: Vec<Range<usize>>,
}

impl QuantizeKernel {
    /// Bindings and parameters of the dispatch of `rows`.
    fn dispatch<'a>(
        &'a self,
        rows: &Range<usize>,
        operands: &'a Operands<'a>,
    ) -> Result<Dispatch<'a, Params>, HalError> {
        use QuantizeOperand as O;
        let (shared, op, k) = (&self.shared, &self.op, self.op.columns);
        let words = |row_stride: u64| stride(op.rows, row_stride / WORD as u64);
        let mut p = Params {
            shape: QuantizeShape {
                rows: rows.len() as u32,
                columns: k as u32,
                stored_columns: op.parts.columns(k) as u32,
                flags: if op.x.aligned16 && op.x.col_stride == 1 { FLAG_X_ALIGNED16 } else { 0 },
                chunks: 1,
            },
            modes: Modes { x: Some(op.x.dtype), ..Modes::default() }.packed(),
            x_row: stride(op.rows, op.x.row_stride),
            x_col: if k > 1 { op.x.col_stride as u32 } else { 1 },
            codes_row: words(op.codes_row),
            scales_row: words(op.scales_row),
            sums_row: words(op.sums_row),
            ..Params::default()
        };
        let touched = |operand: O, bytes: Range<usize>, width| Touched {
            what: operand.name(),
            view: operands.get(operand),
            bytes,
            width,
        };
        let plane = |operand: O, row_stride: u64, row_bytes: usize| {
            let row = |row: usize| row * row_stride as usize;
            let bytes = if row_bytes == 0 { 0..0 } else { row(rows.start)..row(rows.end - 1) + row_bytes };
            touched(operand, bytes, WORD).bind_written(shared)
        };
        let width = op.x.dtype.bytes();
        let first = rows.start * op.x.row_stride as usize;
        let last = (rows.end - 1) * op.x.row_stride as usize + (k - 1) * op.x.col_stride as usize;
        let given = if op.parts.factor == XFactor::Given { 0..WORD } else { 0..0 };
        let of_token = if op.parts.factor == XFactor::PerToken { WORD } else { 0 };
        let (x, factor, order, codes, scales, token_factors, sums);
        (x, p.x_base) = touched(O::X, first * width..(last + 1) * width, width).bind_vectors(shared)?;
        (factor, p.factor_base) = touched(O::Factor, given, WORD).bind(shared)?;
        (order, _) = Touched { what: "the column order", view: None, bytes: 0..0, width: WORD }.bind(shared)?;
        (codes, p.codes_base) = plane(O::Codes, op.codes_row, op.parts.code_bytes(k))?;
        (scales, p.scales_base) = plane(O::Scales, op.scales_row, op.parts.scale_bytes(k))?;
        (token_factors, p.token_factors_base) = plane(O::TokenFactors, WORD as u64, of_token)?;
        (sums, p.sums_base) = plane(O::Sums, op.sums_row, op.parts.sums(k) * WORD)?;
        let bindings = vec![x, factor, order, codes, scales, token_factors, sums];
        Ok(Dispatch { params: p, bindings, grid: grid(op, rows.len()) })
    }
}

impl Kernel for QuantizeKernel {
    fn launch(&self, stream: &Stream, operands: Operands<'_>) -> Result<(), HalError> {
        WgpuStream::check(&self.shared, stream)?;
        let all = operands.rows(self.op.rows);
        let of_portion = self.parts.iter().filter(|rows| rows.start < all);
        let dispatches: Vec<_> = of_portion
            .map(|rows| self.dispatch(&(rows.start..rows.end.min(all)), &operands))
            .collect::<Result<_, _>>()?;
        submit(&self.shared, &INTERFACE, &self.compiled, &dispatches)
    }

    fn takes_portions(&self) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use qgemm_formats::{DType, XFormat};
    use qgemm_hal::Dense;

    use super::*;

    fn op(rows: usize, columns: usize, format: XFormat) -> CheckedQuantize {
        let parts = format.parts(false, None).expect("it has codes");
        CheckedQuantize {
            rows,
            columns,
            x: Dense::rows_of(DType::F32, columns),
            format,
            parts,
            codes_row: parts.code_bytes(columns) as u64,
            scales_row: parts.scale_bytes(columns) as u64,
            sums_row: parts.sums(columns) as u64 * 4,
        }
    }

    #[test]
    fn rows_are_cut_into_bindings_and_those_that_fit_none_are_refused() {
        let op_of = |rows| op(rows, 4096, XFormat::MxFp8);
        assert_eq!(parts(&op_of(100), 1 << 27).expect("cut"), std::slice::from_ref(&(0..100)));
        let cut = parts(&op_of(20_000), 1 << 27).expect("cut");
        assert!(cut.len() > 1 && cut.iter().map(ExactSizeIterator::len).sum::<usize>() == 20_000);
        assert!(cut.iter().all(|rows| rows.len() as u64 * 4096 * 4 + MARGIN <= 1 << 27));
        let why = parts(&op(1, 4096, XFormat::MxFp8), 1 << 12).expect_err("X is 16 KiB").why;
        assert!(why.contains("a row of X") && why.contains("4096"), "{why}");
        assert!(parts(&op(1, 1 << 31, XFormat::Q8_1), u64::MAX).expect_err("too many").why.contains("31 bits"));
    }

    #[test]
    fn whole_rows_are_one_workgroups_where_tokens_share_a_scale() {
        assert_eq!(grid(&op(70_000, 4096, XFormat::Int8Token), 70_000), [1, 65_535, 2]);
        assert_eq!(grid(&op(3, 4096, XFormat::Q8_1), 3), [8, 3, 1]);
    }
}
