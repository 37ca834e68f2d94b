//! `matmul`: products of two matrices in device memory, of
//! any type and layout, in f32.

use std::ops::Range;
use std::sync::{Arc, LazyLock};

use bytemuck::{Pod, Zeroable};
use qgemm_formats::DType;
use qgemm_hal::abi::{
    FLAG_A_SCALE, FLAG_ACCUMULATES, FLAG_B_SCALE, FLAG_BIAS, FLAG_C, FLAG_K_GROUPED, FLAG_SLOPE, MatmulShape,
    dtype_code,
};
use qgemm_hal::{
    BatchedDense, CheckedMatmul, Device, DeviceInfo, FactorFormat, Families, Family, Geometry, HalError, Kernel,
    KernelId, LaunchSequence, LaunchStep, Math, MatmulConfig, MatmulLayout, MatmulOperand, MatmulPlan, MatmulSpec,
    Name, Operand, Operands, Operation, Spec, Stream, Unsupported,
};

use super::dispatch::{Dispatch, MARGIN, MAX_GROUPS, stride, submit, too_large};
use super::modes::Modes;
use super::operands::Touched;
use crate::device::shared_of;
use crate::event::WgpuStream;
use crate::pipeline::{Compiled, Interface};
use crate::shader::{MATMUL_TEXTS, compose_matmul};
use crate::shared::Shared;
use crate::source_hash::hash_of;

/// wgpu families of `matmul`.
pub(super) const FAMILIES: Families<CheckedMatmul> = &[&Matmul];

/// Kernel interface: the operands of `shaders/matmul_params.wgsl`.
pub(crate) const INTERFACE: Interface =
    Interface { name: "matmul", bindings: "rrrrrrr-w", params_bytes: size_of::<Params>() as u32 };

/// Family name.
const NAME: &str = "matmul";
/// Tile of a workgroup: rows and columns of D.
const TILE: u32 = 64;
/// K elements that it copies at once.
const TILE_K: u32 = 16;
/// Invocations of a workgroup, each with eight rows and four columns.
const THREADS: u32 = 128;
/// Shader constants.
pub(crate) const CONSTANTS: [(&str, u32); 4] =
    [("TILE_M", TILE), ("TILE_N", TILE), ("TILE_K", TILE_K), ("THREADS", THREADS)];

static SOURCE_HASH: LazyLock<u64> = LazyLock::new(|| hash_of(MATMUL_TEXTS));

/// `Params` of `shaders/matmul_params.wgsl`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
struct Params {
    shape: MatmulShape,
    modes: u32,
    a_row: u32,
    a_col: u32,
    a_batch: u32,
    b_row: u32,
    b_col: u32,
    b_batch: u32,
    c_row: u32,
    c_batch: u32,
    d_row: u32,
    d_batch: u32,
    a_base: u32,
    b_base: u32,
    c_base: u32,
    bias_base: u32,
    d_base: u32,
    offsets_base: u32,
    scale_bases: u32,
}

/// Maximum split-K.
const MOST_SPLITS: u32 = 32;

/// Phase of a product with split-K: partial sums, or
/// their reduction in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// The whole product.
    Whole,
    /// Partial sums of this many splits: f32 matrices for
    /// each product, contiguous.
    Parts(u32),
    /// Outputs from this many partial sums.
    Sum(u32),
    /// Whole row-grouped products. They share one A, C and D, and
    /// their batch strides are reused for other parameters.
    Rows,
}

impl Phase {
    /// Its bits of `Params::modes`: log2 of the splits in the bits
    /// of `FORM_MODE`, and the number of the phase above.
    fn packed(self) -> u32 {
        let (splits, number) = match self {
            Phase::Whole => (1, 0),
            Phase::Parts(splits) => (splits, 1),
            Phase::Sum(splits) => (splits, 2),
            Phase::Rows => (1, 3),
        };
        splits.ilog2() << 24 | number << 28
    }
}

/// Number of a factor format in the shader: that of the
/// element type, or `E4M3` and `E4M3_BLOCK` in `shaders/matmul.wgsl`.
fn factor_code(format: FactorFormat) -> u32 {
    format.plain().map_or(if format.has_scales() { 4 } else { 3 }, dtype_code)
}

/// The kernel family.
#[derive(Debug)]
struct Matmul;

impl Family<CheckedMatmul> for Matmul {
    fn name(&self) -> &'static str {
        NAME
    }

    fn configs(&self, op: &CheckedMatmul, info: &DeviceInfo) -> Result<Vec<MatmulConfig>, Unsupported> {
        let parts = parts(op, info.max_buffer_bytes)?;
        Ok(vec![MatmulConfig {
            kernel: kernel_id(op),
            math: Math::FmaF32,
            tile_m: TILE,
            tile_n: TILE,
            tile_k: TILE_K,
            ctas_per_unit: 1,
            max_splits: if parts.len() == 1 && !op.rows_grouped { most_splits(op, info.max_buffer_bytes) } else { 1 },
            // There is no other family to rank against.
            efficiency: 300,
            factor_bytes: 0,
        }])
    }

    fn prepare(&self, device: &dyn Device, op: &CheckedMatmul, plan: &MatmulPlan) -> Result<LaunchSequence, HalError> {
        let shared = shared_of(device, "a product of the wgpu backend")?;
        let refused =
            |reason: Unsupported| HalError::Unsupported { device: shared.id, what: NAME.to_owned(), why: reason.why };
        let parts = parts(op, device.info().max_buffer_bytes).map_err(refused)?;
        let step = |phase: Phase| {
            let compiled = Compiled::new(shared, &INTERFACE, op.kernel_name(NAME), compose_matmul(&CONSTANTS))?;
            let grid = parts.first().map_or([0; 3], |part| part.grid_of(op, phase));
            let geometry = Geometry { grid, threads: THREADS, shared_bytes: 2 * TILE * TILE_K * 4 };
            let kernel = MatmulKernel { compiled, shared: shared.clone(), op: op.clone(), parts: parts.clone(), phase };
            Ok::<_, HalError>(LaunchStep::new::<MatmulOperand>(kernel_id(op), geometry, Arc::new(kernel)))
        };
        use MatmulOperand as O;
        let steps = if plan.splits > 1 {
            let first = plan.workspace.partials;
            let sums = first..first + partial_bytes(op, plan.splits) as usize;
            let of_factors = |operand: &O| match operand {
                O::AScale | O::BScale => op.has_block_scales(),
                _ => matches!(operand, O::A | O::B | O::Offsets),
            };
            let (factors, others): (Vec<O>, Vec<O>) = op.operands().into_iter().partition(of_factors);
            let adds = factors.into_iter().fold(step(Phase::Parts(plan.splits))?, |step, o| step.bind(o, o));
            let ends = others.into_iter().fold(step(Phase::Sum(plan.splits))?, |step, o| step.bind(o, o));
            vec![adds.bind_part(O::D, O::Workspace, sums.clone()), ends.bind_part(O::A, O::Workspace, sums)]
        } else {
            let phase = if op.rows_grouped { Phase::Rows } else { Phase::Whole };
            vec![op.operands().into_iter().fold(step(phase)?, |step, operand| step.bind(operand, operand))]
        };
        Ok(LaunchSequence::new::<MatmulOperand>(op.kernel_name(NAME), steps))
    }

    fn source_hash(&self, _: &CheckedMatmul, _: &MatmulConfig) -> u64 {
        *SOURCE_HASH
    }
}

fn kernel_id(op: &CheckedMatmul) -> KernelId {
    let (a, b, layout) = (op.a.dtype, op.b.dtype, MatmulLayout::Any);
    let spec = MatmulSpec { main_loop: Name::new("simt"), a, b, layout, m: TILE, n: TILE, k: TILE_K };
    KernelId::new(NAME, None, Spec::Matmul(spec))
}

/// Bytes of the partial sums of all products.
fn partial_bytes(op: &CheckedMatmul, splits: u32) -> u64 {
    let values = (op.batch as u64).saturating_mul(op.m as u64).saturating_mul(op.n as u64);
    values.saturating_mul(u64::from(splits)).saturating_mul(size_of::<f32>() as u64)
}

/// Maximum split-K of `op`, which must be one dispatch: limited by
/// a binding of `limit` bytes and by the grid.
fn most_splits(op: &CheckedMatmul, limit: u64) -> u32 {
    let fits = |&splits: &u32| {
        let groups = (op.batch as u64).saturating_mul(u64::from(splits));
        partial_bytes(op, splits).saturating_add(MARGIN) <= limit && groups <= u64::from(MAX_GROUPS)
    };
    (0..).map(|power| 1 << power).take_while(|&splits| splits <= MOST_SPLITS).filter(fits).last().unwrap_or(1)
}

/// The part that one dispatch computes.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Part {
    products: Range<usize>,
    rows: Range<usize>,
}

/// Bytes of `products` matrices with elements of `width` bytes,
/// from the first row to the last.
fn bytes_of<T>(
    dense: &BatchedDense<T>,
    width: usize,
    products: &Range<usize>,
    rows: &Range<usize>,
    columns: usize,
) -> Option<Range<u64>> {
    if columns == 0 || rows.is_empty() || products.is_empty() {
        return Some(0..0);
    }
    let width = width as u64;
    let first = (products.start as u64 * dense.batch_stride).checked_add(rows.start as u64 * dense.row_stride)?;
    let len = dense.extent(products.len(), rows.len(), columns)?;
    Some(first.checked_mul(width)?..first.checked_add(len)?.checked_mul(width)?)
}

impl Part {
    /// Byte ranges of A, B, C, D, and of the
    /// scales of A and B.
    fn touches(&self, op: &CheckedMatmul) -> Option<[(MatmulOperand, Range<u64>); 6]> {
        use MatmulOperand as O;
        let Self { products, rows } = self;
        let c = op.c.as_ref().map_or(Some(0..0), |c| bytes_of(c, c.dtype.bytes(), products, rows, op.n))?;
        const WIDTH: u64 = size_of::<f32>() as u64;
        let scales = |scaled: bool, scale_row: u64, outer: &Range<usize>| match op.has_block_scales() {
            true => {
                let first = (outer.start as u64).checked_mul(scale_row)?;
                let end = first.checked_add(op.scales_extent(outer.len(), scale_row)?)?;
                Some(first.checked_mul(WIDTH)?..end.checked_mul(WIDTH)?)
            }
            false => Some(0..if scaled { WIDTH } else { 0 }),
        };
        Some([
            (O::A, bytes_of(&op.a, op.a.dtype.bytes(), products, rows, op.k)?),
            (O::B, bytes_of(&op.b, op.b.dtype.bytes(), products, &(0..op.k), op.n)?),
            (O::C, c),
            (O::D, bytes_of(&op.d, op.d.dtype.bytes(), products, rows, op.n)?),
            (O::AScale, scales(op.a_scaled, op.a_scale_row, rows)?),
            (O::BScale, scales(op.b_scaled, op.b_scale_row, &(0..op.n))?),
        ])
    }

    /// Grid: N tiles, M tiles, products.
    fn grid(&self, op: &CheckedMatmul) -> [u32; 3] {
        let tiles = |len: usize| (len as u32).div_ceil(TILE);
        let (rows, products) = (tiles(self.rows.len()), self.products.len() as u32);
        // Each group may end within a tile.
        if op.rows_grouped { [tiles(op.n), rows.saturating_add(products), 1] } else { [tiles(op.n), rows, products] }
    }

    /// Grid of a step of `phase`.
    fn grid_of(&self, op: &CheckedMatmul, phase: Phase) -> [u32; 3] {
        let [along_n, along_m, products] = self.grid(op);
        match phase {
            Phase::Parts(splits) => [along_n, along_m, products * splits],
            Phase::Whole | Phase::Sum(_) | Phase::Rows => [along_n, along_m, products],
        }
    }

    /// Checks that one dispatch can address all of it.
    fn check(&self, op: &CheckedMatmul, limit: u64) -> Result<(), Unsupported> {
        let overflow = || Unsupported::new("the extent of an operand overflows");
        for (operand, bytes) in self.touches(op).ok_or_else(overflow)? {
            let len = bytes.end - bytes.start;
            if len + MARGIN > limit {
                return Err(too_large(operand.name(), len, limit));
            }
        }
        let [along_n, ..] = self.grid(op);
        if along_n > MAX_GROUPS {
            return Err(Unsupported::new(format!("has at most {} columns, not {}", MAX_GROUPS * TILE, op.n)));
        }
        match self.grid(op).iter().all(|&groups| groups <= MAX_GROUPS) {
            true => Ok(()),
            false => Err(Unsupported::new("more workgroups than a grid has")),
        }
    }
}

/// Dispatches of `op`: as many products as fit in bindings of
/// `limit` bytes, or as many rows of one product.
///
/// # Errors
/// The operand that exceeds a binding with a single tile's rows.
fn parts(op: &CheckedMatmul, limit: u64) -> Result<Vec<Part>, Unsupported> {
    let (mut products, mut rows) = (op.batch, op.m);
    loop {
        // The last part is as large as any.
        let fits = Part { products: 0..products, rows: 0..rows }.check(op, limit);
        match fits {
            Ok(()) => break,
            Err(_) if products > 1 => products = products.div_ceil(2),
            Err(_) if rows > TILE as usize => rows = rows.div_ceil(2).next_multiple_of(TILE as usize),
            Err(reason) => return Err(reason),
        }
    }
    let ranges = |len: usize, step: usize| (0..len).step_by(step).map(move |at| at..(at + step).min(len));
    let of_products =
        |products: Range<usize>| ranges(op.m, rows).map(move |rows| Part { products: products.clone(), rows });
    Ok(ranges(op.batch, products).flat_map(of_products).collect())
}

/// A kernel for one operation. A launch allocates no device memory.
#[derive(Debug)]
struct MatmulKernel {
    compiled: Compiled,
    shared: Arc<Shared>,
    op: CheckedMatmul,
    parts: Vec<Part>,
    phase: Phase,
}

impl MatmulKernel {
    /// Parameters of a part without base offsets.
    fn params(&self, part: &Part) -> Params {
        let op = &self.op;
        let flags = [
            (FLAG_C, op.c.is_some()),
            (FLAG_BIAS, op.bias.is_some()),
            (FLAG_ACCUMULATES, op.accumulates),
            (FLAG_SLOPE, op.slope),
            (FLAG_K_GROUPED, op.k_grouped),
            (FLAG_A_SCALE, op.a_scaled),
            (FLAG_B_SCALE, op.b_scaled),
        ];
        let (products, rows) = (part.products.len(), part.rows.len());
        // With block scales there is one matrix of scales.
        let [a_batch, b_batch] = match op.has_block_scales() {
            true => [stride(rows, op.a_scale_row), stride(op.n, op.b_scale_row)],
            false => [op.a.batch_stride, op.b.batch_stride].map(|apart| stride(products, apart)),
        };
        // A stride of 1 marks the contiguous dimension,
        // even for a single element.
        let along = |count: usize, by: u64| if by == 1 { 1 } else { stride(count, by) };
        Params {
            shape: MatmulShape {
                m: rows as u32,
                n: op.n as u32,
                k: op.k as u32,
                flags: flags.iter().filter(|(_, set)| *set).fold(0, |flags, (flag, _)| flags | flag),
                alpha: op.alpha,
                beta: op.beta,
            },
            modes: Modes {
                activation: op.activation,
                d: Some(op.d.dtype),
                c: op.c.map(|c| c.dtype),
                bias: op.bias,
                ..Modes::default()
            }
            .packed_with(factor_code(op.a.dtype), factor_code(op.b.dtype))
                | self.phase.packed(),
            a_row: along(rows, op.a.row_stride),
            a_col: along(op.k, op.a.col_stride),
            a_batch,
            b_row: along(op.k, op.b.row_stride),
            b_col: along(op.n, op.b.col_stride),
            b_batch,
            c_row: op.c.map_or(0, |c| stride(rows, c.row_stride)),
            c_batch: op.c.map_or(0, |c| stride(products, c.batch_stride)),
            d_row: stride(rows, op.d.row_stride),
            d_batch: stride(products, op.d.batch_stride),
            ..Params::default()
        }
    }

    /// Parameters of row-grouped products. Instead of batch strides they hold
    /// the number of products, the first product and the first row.
    fn params_of_rows(&self, part: &Part) -> Params {
        let Part { products, rows } = part;
        let (a_batch, c_batch, d_batch) = (products.len() as u32, products.start as u32, rows.start as u32);
        Params { a_batch, c_batch, d_batch, ..self.params(part) }
    }

    /// Parameters of a step that writes partial sums.
    fn params_of_parts(&self, part: &Part) -> Params {
        let (op, whole) = (&self.op, self.params(part));
        let shape = MatmulShape { flags: whole.shape.flags & FLAG_K_GROUPED, alpha: 1.0, beta: 0.0, ..whole.shape };
        let modes = Modes { d: Some(DType::F32), ..Modes::default() };
        Params {
            shape,
            modes: modes.packed_with(factor_code(op.a.dtype), factor_code(op.b.dtype)) | self.phase.packed(),
            d_row: op.n as u32,
            d_batch: (op.m * op.n) as u32,
            ..whole
        }
    }

    /// Bindings and parameters of a part.
    fn dispatch<'a>(&'a self, part: &Part, operands: &'a Operands<'a>) -> Result<Dispatch<'a, Params>, HalError> {
        use MatmulOperand as O;
        let (op, shared, phase) = (&self.op, &self.shared, self.phase);
        let mut p = match phase {
            Phase::Parts(_) => self.params_of_parts(part),
            Phase::Rows => self.params_of_rows(part),
            Phase::Whole | Phase::Sum(_) => self.params(part),
        };
        let touches = part.touches(op).unwrap_or_else(|| unreachable!("parts were checked"));
        let [of_a, of_b, of_c, of_d, of_a_scale, of_b_scale] = touches.map(|(operand, bytes)| {
            let width = match operand {
                O::A => op.a.dtype.bytes(),
                O::B => op.b.dtype.bytes(),
                O::D => op.d.dtype.bytes(),
                O::AScale | O::BScale => size_of::<f32>(),
                _ => op.c.map_or(4, |c| c.dtype.bytes()),
            };
            let bytes = bytes.start as usize..bytes.end as usize;
            let (bytes, width) = match (phase, operand) {
                (Phase::Parts(splits), O::D) | (Phase::Sum(splits), O::A) => {
                    (0..partial_bytes(op, splits) as usize, size_of::<f32>())
                }
                (Phase::Parts(_), O::C) | (Phase::Sum(_), O::B) => (0..0, width),
                // Whole-matrix factors apply to sums, block scales to products.
                (Phase::Parts(_), O::AScale | O::BScale) if !op.has_block_scales() => (0..0, width),
                (Phase::Sum(_), O::AScale | O::BScale) if op.has_block_scales() => (0..0, width),
                _ => (bytes, width),
            };
            Touched { what: operand.name(), view: operands.get(operand), bytes, width }
        });
        let finishes = !matches!(phase, Phase::Parts(_));
        let width = op.bias.map_or(4, |dtype| dtype.bytes());
        let bytes = 0..op.bias.filter(|_| finishes).map_or(0, |_| op.n * width);
        let of_bias = Touched { what: O::Bias.name(), view: operands.get(O::Bias), bytes, width };
        let products = match op.k_grouped {
            true if matches!(phase, Phase::Sum(_)) => 0..0,
            true => part.products.start * 4..(part.products.end + 1) * 4,
            // Row groups need the offsets of all earlier groups.
            false if op.rows_grouped => 0..(part.products.end + 1) * 4,
            false => 0..0,
        };
        let of_groups = Touched {
            what: O::Offsets.name(),
            view: operands.get(O::Offsets),
            bytes: products,
            width: size_of::<u32>(),
        };
        let (a, b, a_scale, b_scale, c, bias, offsets, d);
        let (a_scale_base, b_scale_base);
        (a_scale, a_scale_base) = of_a_scale.bind(shared)?;
        (b_scale, b_scale_base) = of_b_scale.bind(shared)?;
        // Each base is below the offset alignment of bindings.
        p.scale_bases = a_scale_base | b_scale_base << 16;
        (a, p.a_base) = of_a.bind(shared)?;
        (b, p.b_base) = of_b.bind(shared)?;
        (c, p.c_base) = of_c.bind(shared)?;
        (bias, p.bias_base) = of_bias.bind(shared)?;
        (offsets, p.offsets_base) = of_groups.bind(shared)?;
        (d, p.d_base) = of_d.bind_written(shared)?;
        Ok(Dispatch {
            params: p,
            bindings: vec![a, b, a_scale, b_scale, c, bias, offsets, d],
            grid: part.grid_of(op, phase),
        })
    }
}

impl Kernel for MatmulKernel {
    fn launch(&self, stream: &Stream, operands: Operands<'_>) -> Result<(), HalError> {
        WgpuStream::check(&self.shared, stream)?;
        let dispatches: Vec<_> =
            self.parts.iter().map(|part| self.dispatch(part, &operands)).collect::<Result<_, _>>()?;
        submit(&self.shared, &INTERFACE, &self.compiled, &dispatches)
    }
}

#[cfg(test)]
mod tests {
    use qgemm_hal::{Activation, XPrecision};

    use super::*;

    fn op(batch: usize, [m, n, k]: [usize; 3]) -> CheckedMatmul {
        let dense = |rows: usize, columns: usize| BatchedDense {
            dtype: DType::F32,
            row_stride: columns as u64,
            col_stride: 1,
            batch_stride: (rows * columns) as u64,
            aligned16: false,
        };
        CheckedMatmul {
            batch,
            m,
            n,
            k,
            a: dense(m, k).into(),
            b: dense(k, n).into(),
            a_scaled: false,
            b_scaled: false,
            a_scale_row: 0,
            b_scale_row: 0,
            d: dense(m, n),
            c: None,
            slope: false,
            k_grouped: false,
            rows_grouped: false,
            operand_precision: XPrecision::Exact,
            accumulates: false,
            bias: None,
            alpha: 1.0,
            beta: 0.0,
            activation: Activation::Identity,
        }
    }

    #[test]
    fn parts_of_k_are_as_many_as_a_binding_holds() {
        assert_eq!(most_splits(&op(1, [64, 64, 4096]), u64::MAX), MOST_SPLITS);
        assert_eq!(most_splits(&op(1, [64, 64, 4096]), (9 * 64 * 64 * 4) + MARGIN), 8);
        assert_eq!(most_splits(&op(1, [64, 64, 4096]), 0), 1);
        assert_eq!(most_splits(&op(20_000, [1, 1, 4096]), u64::MAX), 2);
        assert_eq!((Phase::Whole.packed(), Phase::Sum(4).packed()), (0, 0x2200_0000));
    }

    #[test]
    fn what_bindings_do_not_hold_is_cut_by_products_and_rows() {
        assert_eq!(parts(&op(3, [64, 64, 64]), 1 << 20).expect("fits").len(), 1);
        for (op, limit) in [(op(100, [64, 64, 64]), 1 << 18), (op(2, [4096, 64, 64]), 1 << 16)] {
            let parts = parts(&op, limit).expect("is cut");
            let outputs: usize = parts.iter().map(|part| part.products.len() * part.rows.len()).sum();
            assert_eq!(outputs, op.batch * op.m, "{parts:?}");
            assert!(parts.len() > 1 && parts.iter().all(|part| part.check(&op, limit).is_ok()), "{parts:?}");
        }
        let why = parts(&op(1, [64, 4096, 4096]), 1 << 20).expect_err("B is too large").why;
        assert!(why.contains('b') && why.contains("1048576"), "{why}");
    }
}
