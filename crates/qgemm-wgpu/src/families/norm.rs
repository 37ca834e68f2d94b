//! `norm`: RMSNorm and LayerNorm. Also the X prologue
//! of products with a norm.

use std::ops::Range;
use std::sync::{Arc, LazyLock};

use bytemuck::{Pod, Zeroable};
use qgemm_formats::{DType, XFactor};
use qgemm_hal::abi::{
    FLAG_BETA, FLAG_CENTERED, FLAG_GAMMA, FLAG_GATE, FLAG_GATE_BEFORE, FLAG_RESIDUAL, FLAG_RESIDUAL_IN_SUM,
    FLAG_SIGMOID, FLAG_X_IN_D, FLAG_X_IN_SUM, NormShape, dtype_code,
};
use qgemm_hal::{
    CheckedNorm, Dense, Device, DeviceInfo, Families, Family, GateFunction, Geometry, HalError, Kernel, KernelId,
    LaunchSequence, LaunchStep, NormConfig, NormKind, NormLaunch, NormOperand, NormQuantizeSpec, NormSpec, Operand,
    Operands, Operation, QuantizedD, Spec, Stream, Unsupported, XOverwrite, XPlanes,
};

use super::dispatch::{Dispatch, MARGIN, MAX_GROUPS, rows_that_fit, stride, submit, too_large};
use super::operands::Touched;
use super::quantize::constants;
use crate::device::shared_of;
use crate::event::WgpuStream;
use crate::pipeline::{Compiled, Interface};
use crate::shader::{NORM_TEXTS, compose_norm, compose_norm_quantized};
use crate::shared::Shared;
use crate::source_hash::hash_of;

/// wgpu families of `norm`.
pub(super) const FAMILIES: Families<CheckedNorm> = &[&Norm];

/// Kernel interface: the operands of
/// `shaders/norm_params.wgsl` and `norm_d_params.wgsl`.
pub(crate) const INTERFACE: Interface =
    Interface { name: "norm", bindings: "rrrrww", params_bytes: size_of::<Params>() as u32 };

/// Kernel interface with a quantized result: `norm_planes_params.wgsl`.
pub(crate) const QUANTIZED_INTERFACE: Interface =
    Interface { name: "norm_quantize", bindings: "rrrrwwww", params_bytes: size_of::<QuantizedParams>() as u32 };

/// Family name.
const NAME: &str = "norm";
/// Invocations of a workgroup.
const THREADS: u32 = 256;
/// Total columns that the rows of a workgroup cache in its
/// memory: 16 KiB minus sums and magnitudes.
const KEPT: u32 = 3328;
/// Bytes of workgroup memory: `var<workgroup>` of the shader.
const SHARED_BYTES: u32 = KEPT * 4 + THREADS * 12;
/// Bytes of a word, the unit of all writes to planes.
const WORD: usize = 4;
/// Adjacent columns of an invocation.
const COLUMNS: usize = 2;

static SOURCE_HASH: LazyLock<u64> = LazyLock::new(|| hash_of(NORM_TEXTS));

/// Common first fields of `Params` in `shaders/norm_d_params.wgsl` and
/// `shaders/norm_planes_params.wgsl`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
struct RowParams {
    shape: NormShape,
    x_row: u32,
    residual_row: u32,
    sum_row: u32,
    x_base: u32,
    residual_base: u32,
    gamma_base: u32,
    beta_base: u32,
    sum_base: u32,
    feature_groups: u32,
}

/// `Params` of `shaders/norm_d_params.wgsl`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
struct Params {
    rows: RowParams,
    d_row: u32,
    d_base: u32,
}

/// `Params` of `shaders/norm_planes_params.wgsl`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
struct QuantizedParams {
    rows: RowParams,
    codes_row: u32,
    scales_row: u32,
    others_row: u32,
    codes_base: u32,
    scales_base: u32,
    others_base: u32,
}

/// The kernel family.
#[derive(Debug)]
struct Norm;

impl Family<CheckedNorm> for Norm {
    fn name(&self) -> &'static str {
        NAME
    }

    fn configs(&self, op: &CheckedNorm, info: &DeviceInfo) -> Result<Vec<NormConfig>, Unsupported> {
        check(op, info)?;
        // Adapters do not report bandwidth, and there is no
        // other family to rank against.
        Ok(vec![NormConfig { kernel: kernel_id(op), efficiency: 500 }])
    }

    fn prepare(&self, device: &dyn Device, op: &CheckedNorm, _: &NormLaunch) -> Result<LaunchSequence, HalError> {
        let step = step(device, op)?;
        let step = step.bind_all(op.operands());
        Ok(LaunchSequence::new::<NormOperand>(op.kernel_name(), vec![step]))
    }

    fn source_hash(&self, _: &CheckedNorm, _: &NormConfig) -> u64 {
        *SOURCE_HASH
    }
}

fn kernel_id(op: &CheckedNorm) -> KernelId {
    let plain = Spec::Norm(NormSpec::any(0));
    let of_codes = op.quantized.map(|quantized| Spec::NormQuantize(NormQuantizeSpec::new(0, &quantized)));
    KernelId::new(NAME, None, of_codes.unwrap_or(plain))
}

/// Checks that the kernel supports `op`.
pub(super) fn check(op: &CheckedNorm, info: &DeviceInfo) -> Result<(), Unsupported> {
    rows_of_part(op, info.max_buffer_bytes).map(|_| ())
}

/// The kernel of `op` as a step without bound operands.
pub(super) fn step(device: &dyn Device, op: &CheckedNorm) -> Result<LaunchStep, HalError> {
    let shared = shared_of(device, "a norm of the wgpu backend")?;
    let refused =
        |reason: Unsupported| HalError::Unsupported { device: shared.id, what: NAME.to_owned(), why: reason.why };
    let each = rows_of_part(op, device.info().max_buffer_bytes).map_err(refused)?;
    let (interface, shader) = match &op.quantized {
        None => (&INTERFACE, compose_norm(THREADS, KEPT)),
        Some(to) => (&QUANTIZED_INTERFACE, compose_norm_quantized(THREADS, KEPT, &constants(&to.planes.parts))),
    };
    let compiled = Compiled::new(shared, interface, interface.name.to_owned(), shader)?;
    let parts: Vec<Range<usize>> = (0..op.rows).step_by(each).map(|first| first..op.rows.min(first + each)).collect();
    let grid = parts.first().map_or([0; 3], |part| grid(op, part.len()));
    let geometry = Geometry { grid, threads: THREADS, shared_bytes: SHARED_BYTES };
    let kernel = NormKernel { compiled, shared: shared.clone(), op: *op, parts };
    Ok(LaunchStep::new::<NormOperand>(kernel_id(op), geometry, Arc::new(kernel)))
}

/// Invocations that share a row of this many columns.
fn row_threads(columns: usize) -> u32 {
    (columns.div_ceil(COLUMNS).min(THREADS as usize) as u32).next_power_of_two()
}

/// Workgroups for `rows` rows.
fn grid(op: &CheckedNorm, rows: usize) -> [u32; 3] {
    let of = op.of_groups();
    let groups = ((rows * op.groups) as u32).div_ceil(THREADS / row_threads(of.columns.max(of.d_columns)));
    let x = groups.min(MAX_GROUPS);
    [x, groups.div_ceil(x), 1]
}

/// Rows of a dispatch, with bindings of at most `limit` bytes.
///
/// # Errors
/// An unsupported feature, or the operand that exceeds the
/// limit however it is split.
fn rows_of_part(op: &CheckedNorm, limit: u64) -> Result<usize, Unsupported> {
    let CheckedNorm { rows, columns, d_columns, function, x, d, added, gathers, gate, .. } = *op;
    if op.is_gated() && (added.is_some() || op.quantized.is_some()) {
        return Err(Unsupported::new("gates rows and groups of features without residual and quantization"));
    }
    let (residual, sum) = (added.map(|added| added.residual), added.map(|added| added.sum));
    let matrices = [
        ("X", Some(x), columns),
        ("the residual", residual, columns),
        ("the sum", sum, columns),
        ("the gate", gate.map(|gate| gate.z), columns),
        ("the result", Some(d).filter(|_| op.quantized.is_none()), d_columns),
    ];
    if gathers || matrices.iter().any(|(_, dense, _)| dense.is_some_and(|dense| dense.col_stride != 1)) {
        return Err(Unsupported::new("reads and writes row-major matrices, whose columns keep their order"));
    }
    for (name, size) in [("groups of rows", rows.saturating_mul(op.groups)), ("columns", columns.max(d_columns))] {
        if size >= 1 << 31 {
            return Err(Unsupported::new(format!("there are {size} {name}, and kernels count in 31 bits")));
        }
    }
    for (name, dtype) in [("gamma", function.gamma), ("beta", function.beta)] {
        let bytes = dtype.map_or(0, |dtype| columns as u64 * dtype.bytes() as u64);
        if bytes + MARGIN > limit {
            return Err(too_large(name, bytes, limit));
        }
    }
    let mut fitting = rows;
    for (name, dense, columns) in matrices {
        if let Some(dense) = dense {
            fitting = fitting.min(rows_that_fit(name, &dense, columns, limit)?);
        }
    }
    for (name, row_stride, row_bytes) in op.quantized.iter().flat_map(|to| planes(op, to)) {
        let room = limit.saturating_sub(MARGIN).checked_sub(row_bytes as u64);
        let room = room.ok_or_else(|| too_large(&format!("a row of {}", name.name()), row_bytes as u64, limit))?;
        fitting = fitting.min(usize::try_from(room / row_stride.max(1)).unwrap_or(usize::MAX).saturating_add(1));
    }
    Ok(fitting)
}

/// The codes, the scales, and the sums or token factors,
/// each with its row stride and row size in bytes.
/// Absent planes have 0 bytes.
fn planes(op: &CheckedNorm, to: &QuantizedD) -> [(NormOperand, u64, usize); 3] {
    use NormOperand as O;
    let (XPlanes { parts, codes_row, scales_row, sums_row }, k) = (to.planes, op.columns);
    let others = match parts.factor {
        XFactor::PerToken => (O::TokenFactors, WORD as u64, WORD),
        XFactor::Given => (O::Factor, 0, WORD),
        XFactor::None => (O::Sums, sums_row, parts.sums(k) * WORD),
    };
    [(O::Codes, codes_row, parts.code_bytes(k)), (O::Scales, scales_row, parts.scale_bytes(k)), others]
}

/// A kernel for one operation. A launch allocates no device memory.
#[derive(Debug)]
struct NormKernel {
    compiled: Compiled,
    shared: Arc<Shared>,
    op: CheckedNorm,
    /// Rows of each dispatch.
    parts: Vec<Range<usize>>,
}

impl NormKernel {
    /// Parameters for `rows` rows without base offsets.
    fn params(&self, rows: usize) -> RowParams {
        let (op, function, of) = (&self.op, &self.op.function, self.op.of_groups());
        let in_place = op.added.is_some_and(|added| added.in_place);
        let flags = [
            (FLAG_RESIDUAL, op.added.is_some()),
            (FLAG_CENTERED, function.kind == NormKind::Layer),
            (FLAG_GAMMA, function.gamma.is_some()),
            (FLAG_BETA, function.beta.is_some()),
            (FLAG_X_IN_D, op.x_overwrite == XOverwrite::D),
            (FLAG_X_IN_SUM, op.x_overwrite == XOverwrite::Sum),
            (FLAG_RESIDUAL_IN_SUM, in_place),
            (FLAG_GATE, op.gate.is_some()),
            (FLAG_GATE_BEFORE, op.gate.is_some_and(|gate| gate.before)),
            (FLAG_SIGMOID, op.gate.is_some_and(|gate| gate.function == GateFunction::Sigmoid)),
        ];
        let dtype = |dense: Option<Dense>| dense.map(|dense| dense.dtype);
        let (residual, sum) =
            (op.gate.map(|gate| gate.z).or(op.added.map(|added| added.residual)), op.added.map(|added| added.sum));
        let types = [Some(op.x.dtype), dtype(residual), dtype(sum), Some(op.d.dtype), function.gamma, function.beta];
        let row_threads = row_threads(of.columns.max(of.d_columns));
        let row = |dense: Option<Dense>| dense.map_or(0, |dense| stride(rows, dense.row_stride));
        let shape = NormShape {
            rows: (rows * op.groups) as u32,
            columns: of.columns as u32,
            d_columns: of.d_columns as u32,
            flags: flags.iter().filter(|(_, set)| *set).fold(0, |flags, (flag, _)| flags | flag),
            types: types.iter().rev().fold(0, |types, dtype: &Option<DType>| types << 4 | dtype.map_or(0, dtype_code)),
            row_threads,
            kept_columns: (of.columns as u32).min(KEPT / (THREADS / row_threads)),
            eps: function.eps,
        };
        RowParams {
            shape,
            x_row: row(Some(op.x)),
            residual_row: row(residual),
            sum_row: row(sum),
            feature_groups: op.groups as u32,
            ..RowParams::default()
        }
    }

    /// Bindings of a part except the result, and its parameters.
    fn rows<'a>(
        &'a self,
        part: &Range<usize>,
        operands: &'a Operands<'a>,
    ) -> Result<(RowParams, Vec<wgpu::BufferBinding<'a>>), HalError> {
        use NormOperand as O;
        let (shared, op, mut p) = (&self.shared, &self.op, self.params(part.len()));
        let touched = |operand: O, bytes: Range<usize>, width: usize| Touched {
            what: operand.name(),
            view: operands.get(operand),
            bytes,
            width,
        };
        // An input that is overwritten is not bound a second time.
        let rows = |operand: O, dense: Option<Dense>, columns: usize| match dense {
            Some(dense) => {
                let (width, row) = (dense.dtype.bytes(), |row: usize| row * dense.row_stride as usize);
                touched(operand, row(part.start) * width..(row(part.end - 1) + columns) * width, width)
            }
            None => touched(operand, 0..0, 4),
        };
        let of_columns = |operand: O, dtype: Option<DType>| {
            let width = dtype.map_or(0, DType::bytes);
            touched(operand, 0..op.columns * width, width.max(1))
        };
        let own_x = (op.x_overwrite == XOverwrite::Own).then_some(op.x);
        let own_residual = op.added.filter(|added| !added.in_place).map(|added| added.residual);
        let (x, residual, gamma, beta, sum);
        (x, p.x_base) = rows(O::X, own_x, op.columns).bind(shared)?;
        let (beside, dense) = match op.gate {
            Some(gate) => (O::Gate, Some(gate.z)),
            None => (O::Residual, own_residual),
        };
        (residual, p.residual_base) = rows(beside, dense, op.columns).bind(shared)?;
        (gamma, p.gamma_base) = of_columns(O::Gamma, op.function.gamma).bind(shared)?;
        (beta, p.beta_base) = of_columns(O::Beta, op.function.beta).bind(shared)?;
        let sum_operand = op.sum_operand().unwrap_or(O::Sum);
        (sum, p.sum_base) = rows(sum_operand, op.added.map(|added| added.sum), op.columns).bind_written(shared)?;
        Ok((p, vec![x, residual, gamma, beta, sum]))
    }

    /// Dispatch of a part with an unquantized result.
    fn dispatch<'a>(
        &'a self,
        part: &Range<usize>,
        operands: &'a Operands<'a>,
    ) -> Result<Dispatch<'a, Params>, HalError> {
        let op = &self.op;
        let (rows, mut bindings) = self.rows(part, operands)?;
        let (width, row) = (op.d.dtype.bytes(), |row: usize| row * op.d.row_stride as usize);
        let bytes = row(part.start) * width..(row(part.end - 1) + op.d_columns) * width;
        let operand = op.d_operand();
        let touched = Touched { what: operand.name(), view: operands.get(operand), bytes, width };
        let (d, d_base) = touched.bind_written(&self.shared)?;
        bindings.push(d);
        let params = Params { rows, d_row: stride(part.len(), op.d.row_stride), d_base };
        Ok(Dispatch { params, bindings, grid: grid(op, part.len()) })
    }

    /// Dispatch of a part with a quantized result.
    fn quantized_dispatch<'a>(
        &'a self,
        to: &QuantizedD,
        part: &Range<usize>,
        operands: &'a Operands<'a>,
    ) -> Result<Dispatch<'a, QuantizedParams>, HalError> {
        let op = &self.op;
        let (rows, mut bindings) = self.rows(part, operands)?;
        let mut at = [(0, 0); 3];
        for ((operand, row_stride, row_bytes), at) in planes(op, to).into_iter().zip(&mut at) {
            let row = |row: usize| row * row_stride as usize;
            let bytes = if row_bytes == 0 { 0..0 } else { row(part.start)..row(part.end - 1) + row_bytes };
            let touched = Touched { what: operand.name(), view: operands.get(operand), bytes, width: WORD };
            let (plane, base) = touched.bind_written(&self.shared)?;
            bindings.push(plane);
            *at = (stride(part.len(), row_stride / WORD as u64), base);
        }
        let [(codes_row, codes_base), (scales_row, scales_base), (others_row, others_base)] = at;
        let params = QuantizedParams { rows, codes_row, scales_row, others_row, codes_base, scales_base, others_base };
        Ok(Dispatch { params, bindings, grid: grid(op, part.len()) })
    }
}

impl Kernel for NormKernel {
    fn launch(&self, stream: &Stream, operands: Operands<'_>) -> Result<(), HalError> {
        WgpuStream::check(&self.shared, stream)?;
        let parts = self.parts.iter();
        match &self.op.quantized {
            None => {
                let dispatches: Vec<_> = parts.map(|part| self.dispatch(part, &operands)).collect::<Result<_, _>>()?;
                submit(&self.shared, &INTERFACE, &self.compiled, &dispatches)
            }
            Some(to) => {
                let dispatches: Vec<_> =
                    parts.map(|part| self.quantized_dispatch(to, part, &operands)).collect::<Result<_, _>>()?;
                submit(&self.shared, &QUANTIZED_INTERFACE, &self.compiled, &dispatches)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use qgemm_hal::NormFunction;

    use super::*;

    fn op(rows: usize, columns: usize) -> CheckedNorm {
        let (x, d) = (Dense::rows_of(DType::F32, columns), Dense::rows_of(DType::F16, columns));
        CheckedNorm {
            rows,
            columns,
            d_columns: columns,
            function: NormFunction::rms(1e-6).gamma(DType::F32),
            x,
            d,
            quantized: None,
            added: None,
            x_overwrite: XOverwrite::Own,
            gathers: false,
            groups: 1,
            gate: None,
        }
    }

    #[test]
    fn rows_are_cut_into_bindings_and_share_workgroups() {
        assert_eq!(rows_of_part(&op(100, 1000), 1 << 27).expect("fits"), 100);
        assert_eq!(rows_of_part(&op(100, 1000), 1 << 16).expect("cut"), 16);
        let why = rows_of_part(&op(1, 1 << 20), 1 << 20).expect_err("too long").why;
        assert!(why.contains("gamma") && why.contains("1048576"), "{why}");
        assert_eq!([1, 2, 128, 300, 5000].map(row_threads), [1, 1, 64, 256, 256]);
        assert_eq!(grid(&op(9, 128), 9), [3, 1, 1]);
        assert_eq!(grid(&op(70_000, 4096), 70_000), [65_535, 2, 1]);
    }

    #[test]
    fn workgroup_memory_is_what_every_adapter_has() {
        const { assert!(SHARED_BYTES <= 16 << 10) };
    }
}
