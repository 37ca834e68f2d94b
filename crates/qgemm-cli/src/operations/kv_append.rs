//! `--op kv_append` of the command: cases, explanation and measurement of KV-cache append.

use std::fmt;

use qgemm_api::{Buffer, Context, DType, Keys, KvAppend, KvAppendArgs, KvFormat, PlanRecord, Queries, Rotary};

use qgemm_testkit::{AttentionCase, AttentionStorage, KvAppendCase, Selection, TestCase};

use crate::bench::timing::time_launches;
use crate::bench::{Args, BenchRow, copies};
use crate::choice::Sizes;
use crate::{explain, verify};

/// Sizes of `--shape`.
pub const SHAPE: &str = "TxHxGxD: tokens x heads x KV heads x head dimension";

/// Options of `bench` that apply to this operation, but not to all.
pub const BENCH_OPTIONS: &[&str] = &["--rotate-cache"];

/// Default tokens, heads, KV heads and head dimension.
const SHAPES: [[usize; 4]; 3] = [[1, 32, 8, 128], [64, 32, 8, 128], [4096, 32, 8, 128]];

/// Tokens of one sequence to append, rotated by frequencies.
pub struct Subject {
    shape: [usize; 4],
    kv: KvFormat,
}

impl fmt::Display for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} kv={}", self.name(), self.kv)
    }
}

/// Every shape, with a cache in the type of Q and in E4M3.
///
/// # Errors
/// When a shape is invalid.
pub fn subjects(args: &Args) -> anyhow::Result<Vec<Subject>> {
    let shapes: Vec<[usize; 4]> = match args.shape[..] {
        [] => SHAPES.to_vec(),
        _ => args.shape.iter().map(|sizes| sizes.kv_append()).collect::<anyhow::Result<_>>()?,
    };
    let kinds = |shape: [usize; 4]| {
        let all = [KvFormat::Plain(args.x_dtype), KvFormat::E4M3, KvFormat::Q8_0, KvFormat::Q4_0];
        all.into_iter().filter(move |kv| shape[3].is_multiple_of(kv.step())).map(move |kv| Subject { shape, kv })
    };
    Ok(shapes.into_iter().flat_map(kinds).collect())
}

impl Subject {
    fn name(&self) -> String {
        self.shape.map(|size| size.to_string()).join("x")
    }
}

/// Times the planned kernel of a subject, rotating copies of all
/// large operands.
///
/// # Errors
/// When no kernel supports it, or the device fails.
pub fn measure(ctx: &Context, args: &Args, subject: &Subject, bandwidth: f64) -> anyhow::Result<BenchRow> {
    let [tokens, heads, kv_heads, dim] = subject.shape;
    let dtype: DType = args.x_dtype;
    let append = KvAppend::new(dtype, heads, kv_heads, dim, Queries::each(1, tokens), Keys::lengths(tokens))
        .kv_format(subject.kv)
        .rotary(Rotary::neox(dim));
    let append = if args.rotate_cache == Some(true) { append.rotate_k().rotate_v() } else { append };
    let plan = ctx.plan_kv_append(&append)?;
    let (of_queries, of_keys) = (tokens * heads * dim, tokens * kv_heads * dim);
    let bytes = (of_queries + 2 * of_keys) * dtype.bytes() + subject.kv.bytes_of(2 * of_keys);
    let places: Vec<usize> = (0..copies(ctx, bytes)).collect();
    let numbers = |count: usize| dtype.encode(&(0..count).map(|i| (i % 37) as f32 * 0.05 - 0.9).collect::<Vec<_>>());
    let (queries, keys) = (numbers(of_queries), numbers(of_keys));
    let uploaded = |bytes: &[u8]| places.iter().map(|_| ctx.upload(bytes)).collect::<Result<Vec<Buffer>, _>>();
    let (mut q, new_k, new_v) = (uploaded(&queries)?, uploaded(&keys)?, uploaded(&keys)?);
    let allocated =
        || places.iter().map(|_| ctx.allocate(subject.kv.bytes_of(of_keys))).collect::<Result<Vec<Buffer>, _>>();
    let (mut k, mut v) = (allocated()?, allocated()?);
    let scale_bytes = subject.kv.scale_bytes_of(of_keys);
    let (mut k_scales, mut v_scales) = (ctx.allocate(scale_bytes)?, ctx.allocate(scale_bytes)?);
    let lengths = ctx.upload(&[tokens as u32])?;
    let factors = ctx.upload(&vec![1.0f32; kv_heads])?;
    let stream = ctx.new_stream()?;
    let launch = |&place: &usize| {
        let mut args = KvAppendArgs::new(&new_k[place], &new_v[place], &mut k[place], &mut v[place])
            .q(&mut q[place])
            .kv_lengths(&lengths);
        if subject.kv.has_factors() {
            args.k_factors = Some((&factors).into());
            args.v_factors = Some((&factors).into());
        }
        if subject.kv.has_scales() {
            args.k_scales = Some((&mut k_scales).into());
            args.v_scales = Some((&mut v_scales).into());
        }
        plan.run(&stream, args)
    };
    let timing = time_launches(ctx, &stream, &places, args.pace(), launch)?;
    Ok(BenchRow {
        shape: subject.name(),
        format: subject.kv.to_string(),
        x_dtype: dtype.to_string(),
        kernel: plan.kernel_name().to_owned(),
        kernel_id: plan.kernel_id().map(|id| id.to_string()),
        ..BenchRow::timed(ctx, timing, plan.bytes(), bandwidth, places.len())
    })
}

/// Each shape with every pair of types, contiguous and paged, with
/// and without a Hadamard rotation.
/// Each token is a sequence.
///
/// # Errors
/// When a shape is invalid, or a format cannot store it.
pub fn cases(args: &verify::Args, _: &Selection) -> anyhow::Result<Vec<Box<dyn TestCase>>> {
    let mut cases: Vec<Box<dyn TestCase>> = Vec::new();
    for sizes in &args.shape {
        let [tokens, heads, kv_heads, dim] = sizes.kv_append()?;
        let all = DType::ALL.into_iter().flat_map(|dtype| KvFormat::ALL.map(|kv| (dtype, kv)));
        for (dtype, kv) in all.filter(|(_, kv)| dim.is_multiple_of(kv.step())) {
            for places in [AttentionStorage::Each, AttentionStorage::Paged(16)] {
                let of = AttentionCase::new(&vec![(1, 9); tokens], (heads, kv_heads), dim, dtype);
                let plain = KvAppendCase::new(AttentionCase { kv, places, ..of });
                let hadamard = [true; 2];
                cases.extend([plain.clone(), KvAppendCase { hadamard, ..plain }].map(|c| Box::new(c) as _));
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
    let [tokens, heads, kv_heads, dim] = sizes.kv_append()?;
    let (queries, keys) = (Queries::each(tokens, 1), Keys::lengths(1));
    let append = KvAppend::new(args.x_dtype, heads, kv_heads, dim, queries, keys);
    Ok(ctx.explain_kv_append(&append.rotary(Rotary::neox(dim)))?)
}
