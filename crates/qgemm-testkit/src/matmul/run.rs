//! Runs one matmul on a device and judges the result.

use std::sync::Arc;

use qgemm_api::{Context, DeviceKind, Error, Matmul, MatmulArgs, MatmulPlan, Workspace};
use qgemm_formats::{DType, Format, HostWeight, SharedBytes};
use qgemm_hal::{Activation, FactorFormat, Math};

use super::case::MatmulCase;
use crate::compare::{compare, first_difference};
use crate::gemm::{Added, Expected, Resolution, activate, multiply};
use crate::limits::{EXACT_SUMS, path, rounded_to};
use crate::operand::Operand;
use crate::outcome::{Exemption, Failure, Outcome, Verdict};

/// Exemptions. An exemption fails if the case can be planned.
const EXEMPTIONS: &[Exemption<MatmulCase>] = &[];

/// Runs `case` on poisoned memory, twice where a second run may
/// differ, and compares with the oracle.
pub fn run(ctx: &Context, case: &MatmulCase) -> Outcome {
    let mut outcome = Outcome::new(case);
    let result = judge(ctx, case, &mut outcome);
    outcome.verdict = Verdict::of(result, ctx, case, EXEMPTIONS);
    outcome
}

/// The matrices of an operand, one after another, with rows of
/// NaN between them.
#[derive(Clone, Copy)]
struct Stack {
    operand: Operand,
    matrices: usize,
    rows: usize,
    /// Rows from one matrix to the next.
    apart: usize,
}

impl Stack {
    fn new(
        dtype: FactorFormat,
        matrices: usize,
        [rows, columns]: [usize; 2],
        between: usize,
        gap: usize,
        offset: usize,
    ) -> Self {
        let apart = rows + between;
        let all = if matrices == 0 { 0 } else { (matrices - 1) * apart + rows };
        Self { operand: Operand::new(dtype, all, columns, gap, offset), matrices, rows, apart }
    }

    /// Elements from one matrix to the next; 0 if all products share
    /// one.
    fn stride(&self) -> u64 {
        if self.matrices == 1 { 0 } else { (self.apart * self.operand.row_stride()) as u64 }
    }

    /// A buffer with the stored matrices of `values`.
    fn encode(&self, values: impl Fn(usize) -> Vec<f32>) -> Vec<u8> {
        let columns = self.operand.columns();
        let mut all = Vec::new();
        for matrix in 0..self.matrices {
            all.resize(matrix * self.apart * columns, f32::NAN);
            all.extend(values(matrix));
        }
        self.operand.encode(&all)
    }

    /// The values of a matrix.
    fn matrix<'v>(&self, values: &'v [f32], matrix: usize) -> &'v [f32] {
        let columns = self.operand.columns();
        &values[matrix * self.apart * columns..][..self.rows * columns]
    }

    /// Whether the rows between matrices are still NaN.
    fn is_untouched_between(&self, values: &[f32]) -> bool {
        let columns = self.operand.columns().max(1);
        values.chunks(columns).enumerate().all(|(row, values)| row % self.apart < self.rows || values[0].is_nan())
    }
}

/// Memory layout of a case's operands.
struct Stored {
    a: Stack,
    b: Stack,
    /// Scales of A and B, per tensor or per block.
    scales: [Operand; 2],
    c: Stack,
    bias: Operand,
    d: Stack,
}

impl Stored {
    fn new(case: &MatmulCase) -> Self {
        let ([m, n, k], strides) = (case.shape, case.strides);
        let [a_gap, b_gap, d_gap] = strides.gaps;
        let several = |shared: bool| if shared { 1 } else { case.batch };
        let stack = |dtype: FactorFormat, matrices, shape, gap| {
            Stack::new(dtype, matrices, shape, strides.between, gap, strides.offset)
        };
        let oriented =
            |by_rows: bool, [rows, columns]: [usize; 2]| if by_rows { [rows, columns] } else { [columns, rows] };
        let (a_shape, b_shape) = (oriented(case.layout.a_by_rows(), [m, k]), oriented(case.layout.b_by_rows(), [k, n]));
        let blocks = k.div_ceil(FactorFormat::BLOCK);
        let scales = |outer: usize, gap: usize| Operand::new(DType::F32, outer, blocks, gap, strides.offset);
        Self {
            scales: [scales(m, a_gap), scales(n, b_gap)],
            a: stack(case.types[0], several(strides.one_a), a_shape, a_gap),
            b: stack(case.types[1], several(strides.one_b), b_shape, b_gap),
            c: stack(case.c.map_or(DType::F32, |(_, dtype)| dtype).into(), several(strides.one_c), [m, n], d_gap),
            bias: Operand::new(case.bias.unwrap_or(DType::F32), 1, n, 0, strides.offset),
            d: match strides.d_beside {
                true => stack(case.d_dtype.into(), 1, [m, case.batch * n], d_gap),
                false => stack(case.d_dtype.into(), several(case.rows_grouped), [m, n], d_gap),
            },
        }
    }

    /// Elements from one D to the next.
    fn d_stride(&self, case: &MatmulCase) -> u64 {
        if case.strides.d_beside { case.shape[1] as u64 } else { self.d.stride() }
    }
}

fn judge(ctx: &Context, case: &MatmulCase, outcome: &mut Outcome) -> Result<(), Failure> {
    let stored = Stored::new(case);
    let matmul = matmul(case, &stored);
    if !case.every_kernel {
        let plan = ctx.plan_matmul(&matmul).map_err(Failure::of_plan)?;
        return judge_plan(ctx, case, &stored, &plan, outcome);
    }
    let mut judged = Vec::new();
    for plan in ctx.plan_matmul_candidates(&matmul).map_err(Failure::of_plan)? {
        // Of each kernel only the cost model's best split runs.
        if !judged.contains(&plan.kernel_id()) {
            judge_plan(ctx, case, &stored, &plan, outcome)?;
            judged.push(plan.kernel_id());
        }
    }
    Ok(())
}

fn judge_plan(
    ctx: &Context,
    case: &MatmulCase,
    stored: &Stored,
    plan: &MatmulPlan,
    outcome: &mut Outcome,
) -> Result<(), Failure> {
    outcome.comparison = None;
    outcome.kernel = Some(plan.kernel_name().to_owned());
    outcome.kernel_id = plan.kernel_id();
    Failure::check_launched(plan.sequence(), plan.kernel_id())?;
    let math = plan.launch().map_or(Math::FmaF32, |launch| launch.config.math);
    let path = path(math).ok_or_else(|| Failure::NoModel(format!("the arithmetic `{}`", math.name())))?;

    let mut workspace = ctx.workspace(plan.workspace_bytes()).map_err(Failure::of_run)?;
    let first = run_on(ctx, plan, case, stored, &mut workspace).map_err(Failure::of_run)?;
    let nmse = if case.is_exact() { EXACT_SUMS } else { path.of_sums(None) };
    let tolerance = rounded_to(case.d_dtype, nmse);
    outcome.limit = Some(tolerance.nmse);
    let all = stored.d.operand.decode(&first);
    let held = stored.d.operand.decode(&held(case, stored));
    if let Some(row) = unowned_rows(case).find(|&row| !is_same_row(case, stored, [&all, &held], row)) {
        return Err(Failure::WroteOutside(row));
    }
    for product in (0..case.batch).filter(|&product| !case.rows_of(product).is_empty()) {
        let got = of_product(case, stored, &all, product);
        let expected = expected(case, product, math, Resolution { nmse, ..Resolution::default() });
        let comparison = compare(&got, &expected, tolerance);
        let known = outcome.comparison.map_or(0.0, |c| c.nmse.max(c.worst_tile));
        if outcome.comparison.is_none() || comparison.nmse.max(comparison.worst_tile) > known {
            outcome.comparison = Some(comparison);
        }
        if !comparison.within(tolerance) {
            return Err(Failure::Inaccurate(comparison));
        }
        if case.is_exact() {
            let round = |value| case.d_dtype.decode(&case.d_dtype.encode(&[value]))[0];
            if let Some(mismatch) = first_difference(&got, &expected, round) {
                return Err(Failure::NotExact(mismatch));
            }
        }
    }
    if let Some(byte) = stored.d.operand.first_written_outside(&first) {
        return Err(Failure::WroteOutside(byte));
    }
    if !stored.d.is_untouched_between(&all) {
        return Err(Failure::WroteOutside(0));
    }
    // Emulated threads run in one order, but the workspace that the
    // first run leaves must not change the second.
    if ctx.info().id.kind != DeviceKind::Emu || plan.workspace_bytes() > 0 {
        let second = run_on(ctx, plan, case, stored, &mut workspace).map_err(Failure::of_run)?;
        Failure::check_same(&first, &second)?;
    }
    Ok(())
}

fn matmul(case: &MatmulCase, stored: &Stored) -> Matmul {
    let row_stride = |stack: &Stack| stack.operand.row_stride() as u64;
    let mut matmul = Matmul::new(case.shape, case.types[0], case.types[1], case.d_dtype)
        .batch(case.batch)
        .operand_precision(case.operand_precision)
        .alpha(case.alpha)
        .a_row_stride(row_stride(&stored.a))
        .b_row_stride(row_stride(&stored.b))
        .d_row_stride(row_stride(&stored.d))
        .a_batch_stride(stored.a.stride())
        .b_batch_stride(stored.b.stride())
        .d_batch_stride(stored.d_stride(case))
        .alignment(stored.a.operand.alignment(), stored.b.operand.alignment());
    if case.k_grouped {
        matmul = matmul.k_grouped(case.batch);
    }
    if case.rows_grouped {
        matmul = matmul.rows_grouped(case.batch);
    }
    if case.has_scales() {
        let [a, b] = stored.scales.map(|scales| scales.row_stride() as u64);
        matmul = matmul.a_scale_row_stride(a).b_scale_row_stride(b);
    }
    if case.scales[0].is_some() {
        matmul = matmul.a_scaled();
    }
    if case.scales[1].is_some() {
        matmul = matmul.b_scaled();
    }
    if !case.layout.a_by_rows() {
        matmul = matmul.a_transposed();
    }
    if !case.layout.b_by_rows() {
        matmul = matmul.b_transposed();
    }
    if let Some((beta, dtype)) = case.c {
        matmul = if case.slope { matmul.through(case.activation, dtype) } else { matmul.c(beta, dtype) };
        matmul = matmul.c_row_stride(row_stride(&stored.c)).c_batch_stride(stored.c.stride());
    }
    if let Some(beta) = case.accumulate {
        matmul = matmul.accumulate(beta);
    }
    if let Some(dtype) = case.bias {
        matmul = matmul.bias(dtype);
    }
    if !case.slope {
        matmul = matmul.activation(case.activation);
    }
    matmul.d_alignment(stored.d.operand.alignment()).c_alignment(stored.c.operand.alignment())
}

/// The transpose of a matrix of `rows` rows.
fn transposed(values: &[f32], rows: usize) -> Vec<f32> {
    let columns = values.len() / rows.max(1);
    (0..columns).flat_map(|column| (0..rows).map(move |row| values[row * columns + column])).collect()
}

/// Runs the plan on new buffers, and returns the buffer around D.
fn run_on(
    ctx: &Context,
    plan: &MatmulPlan,
    case: &MatmulCase,
    stored: &Stored,
    workspace: &mut Workspace,
) -> Result<Vec<u8>, Error> {
    let [m, n, _] = case.shape;
    let blocks = case.blocks();
    let a = stored.a.encode(|product| match case.layout.a_by_rows() {
        true => blocks.as_ref().map_or_else(|| case.a(product), |[a, _]| a.codes.clone()),
        false => transposed(&case.a(product), m),
    });
    let b = stored.b.encode(|product| match case.layout.b_by_rows() {
        true => transposed(&case.b(product), n),
        false => blocks.as_ref().map_or_else(|| case.b(product), |[_, b]| b.codes.clone()),
    });
    let (a, b) = (ctx.upload(&a)?, ctx.upload(&b)?);
    let c = match case.c {
        Some((_, dtype)) => Some(ctx.upload(&stored.c.encode(|product| case.c_values(product, dtype)))?),
        None => None,
    };
    let bias = match case.bias {
        Some(dtype) => Some(ctx.upload(&stored.bias.encode(&case.bias_values(dtype)))?),
        None => None,
    };
    let mut d = ctx.upload(&held(case, stored))?;
    let range = |stack: &Stack| stack.operand.range();
    let (of_a, of_b) = (a.slice(range(&stored.a))?, b.slice(range(&stored.b))?);
    let grouped = case.k_grouped || case.rows_grouped;
    let offsets = grouped.then(|| ctx.upload(&case.offsets())).transpose()?;
    let mut args = MatmulArgs::new(of_a, of_b, d.slice_mut(range(&stored.d))?).workspace(workspace);
    let [a_scale, b_scale] = case.scales.map(|scale| scale.map(|scale| ctx.upload(&[scale])).transpose());
    let (a_scale, b_scale) = (a_scale?, b_scale?);
    (args.a_scale, args.b_scale) = (a_scale.as_ref().map(Into::into), b_scale.as_ref().map(Into::into));
    let scales = blocks.map(|[a, b]| [stored.scales[0].encode(&a.scales), stored.scales[1].encode(&b.scales)]);
    let scales = scales.map(|[a, b]| Ok::<_, Error>([ctx.upload(&a)?, ctx.upload(&b)?])).transpose()?;
    if let Some([a, b]) = &scales {
        args = args.a_scale(a.slice(stored.scales[0].range())?).b_scale(b.slice(stored.scales[1].range())?);
    }
    if let Some(offsets) = &offsets {
        args = args.offsets(offsets);
    }
    if let Some(c) = &c {
        args = args.c(c.slice(range(&stored.c))?);
    }
    if let Some(bias) = &bias {
        args = args.bias(bias.slice(stored.bias.range())?);
    }
    plan.run(&ctx.default_stream(), args)?;
    let written = ctx.download(&d)?;
    d.raw().check_guards()?;
    Ok(written)
}

/// Contents of D and its surroundings before a run. With a factor
/// of 0 they are poison, and must not be read.
fn held(case: &MatmulCase, stored: &Stored) -> Vec<u8> {
    let [m, n, _] = case.shape;
    match case.accumulate {
        None | Some(0.0) => stored.d.operand.poison(),
        Some(_) if case.strides.d_beside => {
            let all: Vec<Vec<f32>> = (0..case.batch).map(|product| case.c_values(product, case.d_dtype)).collect();
            stored
                .d
                .encode(|_| (0..m).flat_map(|row| all.iter().flat_map(move |d| d[row * n..][..n].to_vec())).collect())
        }
        Some(_) => stored.d.encode(|product| case.c_values(product, case.d_dtype)),
    }
}

/// Rows of D without a product.
fn unowned_rows(case: &MatmulCase) -> impl Iterator<Item = usize> {
    let owned: Vec<_> = (0..case.batch).map(|product| case.rows_of(product)).collect();
    (0..case.shape[0]).filter(move |row| !owned.iter().any(|rows| rows.contains(row)))
}

/// Whether a row of the shared D has the same bits in both
/// buffers.
fn is_same_row(case: &MatmulCase, stored: &Stored, both: [&[f32]; 2], row: usize) -> bool {
    let [_, n, _] = case.shape;
    let [left, right] = both.map(|all| &stored.d.matrix(all, 0)[row * n..][..n]);
    left.iter().zip(right).all(|(left, right)| left.to_bits() == right.to_bits())
}

/// D of a product, contiguous.
fn of_product(case: &MatmulCase, stored: &Stored, all: &[f32], product: usize) -> Vec<f32> {
    let [_, n, _] = case.shape;
    let rows = case.rows_of(product);
    match case.strides.d_beside {
        _ if case.rows_grouped => stored.d.matrix(all, 0)[rows.start * n..rows.end * n].to_vec(),
        true => all.chunks(case.batch * n).flat_map(|row| row[product * n..][..n].to_vec()).collect(),
        false => stored.d.matrix(all, product).to_vec(),
    }
}

/// Rounds to TF32, to nearest, ties away from zero.
fn tf32(value: f32) -> f32 {
    if value.is_finite() { f32::from_bits((value.to_bits() + 0x1000) & !0x1fff) } else { value }
}

/// The oracle's D of a product, from the oracle of `gemm` with B
/// as the weight.
fn expected(case: &MatmulCase, product: usize, math: Math, resolution: Resolution) -> Expected {
    let [_, n, all_of_k] = case.shape;
    let rows = case.rows_of(product);
    let m = rows.len();
    let part = case.k_of(product);
    let k = part.len();
    let of_part = |all: Vec<f32>| -> Vec<f32> {
        let multiplied = |&value: &f32| if math == Math::TensorTf32 { tf32(value) } else { value };
        all.chunks(all_of_k).flat_map(|row| row[part.clone()].iter().map(multiplied)).collect()
    };
    // K = 0: one product of zeros.
    let (a, b) = match k {
        0 => (vec![0.0; m], vec![0.0; n]),
        _ => {
            let a = case.a(product)[rows.start * all_of_k..rows.end * all_of_k].to_vec();
            (of_part(a), of_part(case.b(product)))
        }
    };
    let plain: Format = "f32".parse().unwrap_or_else(|_| unreachable!("f32 is a format"));
    let bytes = SharedBytes::new(Arc::new(DType::F32.encode(&b)));
    let weight = HostWeight::new(plain, n, k.max(1), bytes).unwrap_or_else(|e| unreachable!("B is a weight: {e}"));
    let c = case.c.or(case.accumulate.map(|beta| (beta, case.d_dtype))).filter(|(beta, _)| *beta != 0.0);
    let c = c.map(|(beta, dtype)| (beta, case.c_values(product, dtype)[rows.start * n..rows.end * n].to_vec()));
    let (c, z) = if case.slope { (None, c.map(|(_, z)| z)) } else { (c, None) };
    let bias = case.bias.map(|dtype| case.bias_values(dtype));
    let added = Added {
        alpha: case.scales.into_iter().flatten().fold(case.alpha, |alpha, scale| alpha * scale),
        c: c.as_ref().map(|(beta, c)| (*beta, c.as_slice())),
        bias: bias.as_deref(),
        activation: if case.slope { Activation::Identity } else { case.activation },
        resolution,
        ..Added::default()
    };
    let mut expected = multiply(&weight, &a, &added);
    for (i, &z) in z.iter().flatten().enumerate() {
        let slope = match case.activation {
            Activation::Relu => f64::from(u8::from(z > 0.0)),
            other => activate(other, z.into()).1,
        };
        expected.values[i] *= slope;
        // Slopes are f32; small ones err by a share of the largest.
        expected.energy[i] *= (slope.abs() + 0.01).powi(2);
        expected.floor[i] *= slope.abs() + 1.0;
    }
    expected
}
