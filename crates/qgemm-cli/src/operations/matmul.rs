//! `--op matmul` of the command: cases, explanation and measurement of products of two matrices.

use std::fmt;

use anyhow::ensure;
use qgemm_api::{Buffer, Context, DType, FactorFormat, Matmul, MatmulArgs, MatmulLayout, PlanRecord, XPrecision};
use qgemm_testkit::{ActivationKind, MatmulCase, Selection, TestCase, activations};

use crate::bench::subject::{ROWS, repeated};
use crate::bench::timing::time_launches;
use crate::bench::{Args, BenchRow, copies};
use crate::choice::{self, Shape, Sizes};
use crate::{explain, verify};

/// Sizes of `--shape`.
pub const SHAPE: &str = "MxNxK: rows of D x columns of D x summed values";

/// Options of `bench` that apply to this operation, but not to all.
pub const BENCH_OPTIONS: &[&str] = &["--layout", "--factors", "--batch", "--groups"];

/// Default M, N and K.
const SHAPES: [&str; 3] = ["512x512x512", "1024x1024x1024", "4096x4096x4096"];

/// A matmul to measure.
pub struct Subject {
    shape: Shape,
    batch: usize,
    layout: MatmulLayout,
    /// Format of A and B.
    factors: FactorFormat,
    /// Type of D, unless K is grouped.
    dtype: DType,
    /// Whether products have ranges of one K, with D in f32.
    k_grouped: bool,
    precision: XPrecision,
    /// Index of a candidate in the cost model's order, if not the
    /// first.
    candidate: Option<usize>,
}

impl fmt::Display for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parts = if self.k_grouped { " by parts of K" } else { "" };
        write!(f, "{}x {} {} {}{parts}", self.batch, self.shape, self.layout, self.factors)
    }
}

/// Every shape in every layout of the options.
///
/// # Errors
/// When a shape is invalid.
pub fn subjects(args: &Args) -> anyhow::Result<Vec<Subject>> {
    let shapes = match args.shape[..] {
        [] => SHAPES.iter().map(|shape| shape.parse()).collect::<anyhow::Result<_>>()?,
        _ => choice::gemm_shapes(&args.shape)?,
    };
    ensure!(args.batch > 0, "--batch: expected a number above 0");
    let layouts = args.layout.map_or(MatmulLayout::ALL.to_vec(), |layout| vec![layout]);
    let (precision, candidate) = (args.x_precision, args.candidate);
    let factors = args.factors.unwrap_or(args.x_dtype.into());
    // Block scales run along K.
    let layouts = if factors.has_scales() { vec![MatmulLayout::Nt] } else { layouts };
    let is_nt = args.layout.is_none_or(|layout| layout == MatmulLayout::Nt);
    ensure!(is_nt || !factors.has_scales(), "--layout: {factors} is multiplied NT");
    if let Some(groups) = args.groups {
        ensure!(groups > 0, "--groups: expected a number above 0");
        let layout = if factors.has_scales() { MatmulLayout::Nt } else { MatmulLayout::Tn };
        let (batch, dtype) = (groups, args.x_dtype);
        let of = |shape| Subject { shape, batch, layout, factors, dtype, k_grouped: true, precision, candidate };
        return Ok(shapes.into_iter().map(of).collect());
    }
    let (batch, dtype) = (args.batch, args.x_dtype);
    let of = |shape| {
        let of =
            move |&layout| Subject { shape, batch, layout, factors, dtype, k_grouped: false, precision, candidate };
        layouts.iter().map(of)
    };
    Ok(shapes.into_iter().flat_map(of).collect())
}

/// Times the planned kernel of a subject, rotating copies of its
/// factors.
///
/// # Errors
/// When no kernel supports it, or the device fails.
pub fn measure(ctx: &Context, args: &Args, subject: &Subject, bandwidth: f64) -> anyhow::Result<BenchRow> {
    let &Subject { shape: shape @ Shape { m, n, k }, batch, layout, factors, dtype, k_grouped, precision, candidate } =
        subject;
    let d_dtype = if k_grouped { DType::F32 } else { dtype };
    let mut matmul = Matmul::new([m, n, k], factors, factors, d_dtype).batch(batch).operand_precision(precision);
    if k_grouped {
        matmul = matmul.k_grouped(batch);
    }
    if !layout.a_by_rows() {
        matmul = matmul.a_transposed();
    }
    if !layout.b_by_rows() {
        matmul = matmul.b_transposed();
    }
    let plan = match candidate {
        None => ctx.plan_matmul(&matmul)?,
        Some(candidate) => {
            let mut all = ctx.plan_matmul_candidates(&matmul)?;
            ensure!(candidate < all.len(), "--candidate {candidate}: there are {} candidates", all.len());
            all.swap_remove(candidate)
        }
    };
    // Products share one K.
    let matrices = if k_grouped { 1 } else { batch };
    // Rows of block-scaled codes have whole blocks.
    let stored_k = if factors.has_scales() { k.next_multiple_of(FactorFormat::BLOCK) } else { k };
    let [a_bytes, b_bytes] = [m, n].map(|outer| outer * stored_k * matrices * factors.bytes());
    let d_bytes = m * n * batch * d_dtype.bytes();
    let normal = activations(ActivationKind::Normal, ROWS, stored_k, DType::F32, 1);
    let mut few = vec![0; normal.len() * factors.bytes()];
    normal.into_iter().enumerate().for_each(|(i, value)| factors.write(&mut few, i, value));
    let (a, b) = (repeated(&few, a_bytes), repeated(&few, b_bytes));
    let places: Vec<usize> = (0..copies(ctx, a_bytes + b_bytes)).collect();
    let copied = |bytes: &[u8]| places.iter().map(|_| ctx.upload(bytes)).collect::<Result<Vec<Buffer>, _>>();
    let (a, b) = (copied(&a)?, copied(&b)?);
    let scales = |outer: usize| match factors.has_scales() {
        true => Ok::<_, anyhow::Error>(Some(ctx.upload(&vec![0.5f32; outer * k.div_ceil(FactorFormat::BLOCK)])?)),
        false => Ok(None),
    };
    let (a_scales, b_scales) = (scales(m)?, scales(n)?);
    let mut d = ctx.allocate(d_bytes)?;
    let mut workspace = ctx.workspace(plan.workspace_bytes())?;
    let stream = ctx.new_stream()?;
    let offsets: Vec<u32> = (0..=batch).map(|group| (k * group / batch) as u32).collect();
    let offsets = if k_grouped { Some(ctx.upload(&offsets)?) } else { None };
    let launch = |&place: &usize| {
        let mut args = MatmulArgs::new(&a[place], &b[place], &mut d).workspace(&mut workspace);
        args.offsets = offsets.as_ref().map(Into::into);
        (args.a_scale, args.b_scale) = (a_scales.as_ref().map(Into::into), b_scales.as_ref().map(Into::into));
        plan.run(&stream, args)
    };
    let timing = time_launches(ctx, &stream, &places, args.pace(), launch)?;
    Ok(BenchRow {
        shape: if batch == 1 { shape.to_string() } else { format!("{batch}x {shape}") },
        format: if k_grouped { format!("{layout} k-grouped") } else { layout.to_string() },
        x_dtype: factors.to_string(),
        kernel: plan.kernel_name().to_owned(),
        kernel_id: plan.kernel_id().map(|id| id.to_string()),
        unused_math: plan.unused_math().map(|math| math.name().to_owned()),
        flops: 2.0 * matrices as f64 * m as f64 * n as f64 * k as f64 / timing.median,
        ..BenchRow::timed(ctx, timing, plan.bytes(), bandwidth, places.len())
    })
}

/// Each shape with every layout and type.
///
/// # Errors
/// When a shape is invalid, or a format cannot store it.
pub fn cases(args: &verify::Args, _: &Selection) -> anyhow::Result<Vec<Box<dyn TestCase>>> {
    let mut cases: Vec<Box<dyn TestCase>> = Vec::new();
    let layouts = args.layout.map_or(MatmulLayout::ALL.to_vec(), |layout| vec![layout]);
    for shape in choice::gemm_shapes(&args.shape)? {
        for &layout in &layouts {
            // Block scales run along K.
            let served =
                |format: &FactorFormat| !format.has_scales() || (layout == MatmulLayout::Nt && args.batch == 1);
            for format in FactorFormat::ALL.into_iter().filter(served) {
                let case = MatmulCase { layout, batch: args.batch, ..MatmulCase::new([shape.m, shape.n, shape.k]) };
                let d_dtype = format.plain().unwrap_or(DType::F32);
                cases.push(Box::new(MatmulCase { types: [format; 2], d_dtype, ..case }));
            }
        }
    }
    Ok(cases)
}

/// Plan record of the shape.
///
/// # Errors
/// When the shape is invalid.
pub fn explain(args: &explain::Args, ctx: &Context, sizes: &Sizes) -> anyhow::Result<PlanRecord> {
    let shape = sizes.gemm()?;
    let dtype = args.x_dtype;
    let product = Matmul::new([shape.m, shape.n, shape.k], dtype, dtype, dtype);
    Ok(ctx.explain_matmul(&product.operand_precision(args.x_precision))?)
}
