//! `--op attention` of the command: cases, explanation and measurement of attention.

use std::fmt;
use std::num::NonZeroUsize;

use qgemm_api::{Attention, AttentionArgs, Buffer, Context, DType, KvFormat, KvFormats, MaskBits, PlanRecord, Queries};

use qgemm_testkit::{AttentionCase, AttentionStorage, Selection, TestCase};

use crate::bench::timing::time_launches;
use crate::bench::{Args, BenchRow, copies};
use crate::choice::{Sizes, keys_of};
use crate::{explain, verify};

/// Sizes of `--shape`.
pub const SHAPE: &str = "BxQxSxHxGxD: sequences x queries x keys of each x heads x KV heads x head dimension";

/// Options of `bench` that apply to this operation, but not to all.
pub const BENCH_OPTIONS: &[&str] =
    &["--family", "--page-size", "--kv-format", "--v-format", "--mask-bits", "--sinks", "--output-gate"];

/// Default shapes: sequences, queries and keys of each, heads, KV
/// heads and head dimension.
const SHAPES: [[usize; 6]; 4] =
    [[1, 1, 8192, 32, 8, 128], [32, 1, 8192, 32, 8, 128], [1, 4096, 4096, 32, 8, 128], [1, 16384, 16384, 32, 8, 128]];

/// A causal attention to measure.
pub struct Subject {
    shape: [usize; 6],
    kv: KvFormats,
}

impl fmt::Display for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} kv={}", self.name(), self.kv)
    }
}

/// Every shape with the given KV format. By default: the type of
/// Q and, for one query, every quantized format.
///
/// # Errors
/// When a shape is invalid.
pub fn subjects(args: &Args) -> anyhow::Result<Vec<Subject>> {
    let shapes: Vec<[usize; 6]> = match args.shape[..] {
        [] => SHAPES.to_vec(),
        _ => args.shape.iter().map(|sizes| sizes.attention()).collect::<anyhow::Result<_>>()?,
    };
    let v_format = args.v_format;
    let kinds = |shape: [usize; 6]| {
        let plain = KvFormat::Plain(args.x_dtype);
        let of_codes = [KvFormat::E4M3, KvFormat::Q8_0, KvFormat::Q4_0].into_iter();
        let of_codes = of_codes.filter(move |kv| shape[1] == 1 && shape[5].is_multiple_of(kv.step()));
        let formats = match args.kv_format {
            Some(kv) => vec![kv],
            None => std::iter::once(plain).chain(of_codes).collect(),
        };
        formats.into_iter().map(move |k| Subject { shape, kv: KvFormats { k, v: v_format.unwrap_or(k) } })
    };
    Ok(shapes.into_iter().flat_map(kinds).collect())
}

impl Subject {
    fn name(&self) -> String {
        self.shape.map(|size| size.to_string()).join("x")
    }

    /// KV storage and mask in tables.
    fn format(&self, args: &Args) -> String {
        let pages = args.page_size.map_or(String::new(), |size| format!(" pages={size}"));
        let options = [(args.mask_bits, " mask"), (args.sinks, " sinks"), (args.output_gate, " gate")];
        let options: String = options.into_iter().filter(|(given, _)| *given).map(|(_, name)| name).collect();
        format!("{}{pages}{options}", self.kv)
    }
}

/// `count` numbers below 1 in magnitude, encoded in a format.
fn numbers(kv: KvFormat, count: usize) -> Vec<u8> {
    // E4M3: numbers of both signs from 2^-3 up to 1/4.
    let code = |i: usize| (i.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) as u8 & 0x87 | 0x20;
    match kv {
        KvFormat::Plain(dtype) => {
            let value = |i: usize| (i.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) as f32 / (1 << 23) as f32 - 1.0;
            dtype.encode(&(0..count).map(value).collect::<Vec<_>>())
        }
        _ => (0..kv.bytes_of(count)).map(code).collect(),
    }
}

/// A page table in shuffled order, and the lengths of sequences.
fn paging(
    ctx: &Context,
    sequences: usize,
    keys: usize,
    size: NonZeroUsize,
) -> Result<(Buffer, Buffer), qgemm_api::Error> {
    let pages = sequences * keys.div_ceil(size.get());
    let mut table: Vec<u32> = (0..pages as u32).collect();
    table.sort_by_key(|page| page.wrapping_mul(0x9e37_79b1));
    Ok((ctx.upload(&table)?, ctx.upload(&vec![keys as u32; sequences])?))
}

/// Times the planned kernel of a subject, rotating copies of keys
/// and values.
///
/// # Errors
/// When no kernel supports it, or the device fails.
pub fn measure(ctx: &Context, args: &Args, subject: &Subject, bandwidth: f64) -> anyhow::Result<BenchRow> {
    let [sequences, queries, keys, heads, kv_heads, dim] = subject.shape;
    let dtype: DType = args.x_dtype;
    let places = keys_of(sequences, keys, args.page_size);
    let attention = Attention::new(dtype, heads, kv_heads, dim, Queries::each(sequences, queries), places)
        .kv_formats(subject.kv.k, subject.kv.v)
        .causal();
    let attention = if args.mask_bits { attention.mask(MaskBits::of_tokens()) } else { attention };
    let attention = if args.sinks { attention.sinks() } else { attention };
    let attention = if args.output_gate { attention.gated() } else { attention };
    let plan = ctx.plan_attention(&args.family.iter().fold(attention, Attention::family))?;
    let rows = args.page_size.map_or(keys, |size| keys.next_multiple_of(size.get()));
    let [of_keys, of_values] =
        [subject.kv.k, subject.kv.v].map(|format| numbers(format, sequences * rows * kv_heads * dim));
    let places: Vec<usize> = (0..copies(ctx, of_keys.len() + of_values.len())).collect();
    let upload = |_: &usize| Ok::<_, qgemm_api::Error>((ctx.upload(&of_keys)?, ctx.upload(&of_values)?));
    let kv: Vec<(Buffer, Buffer)> = places.iter().map(upload).collect::<Result<_, _>>()?;
    let of_queries = sequences * queries * heads * dim;
    let q = ctx.upload(&numbers(KvFormat::Plain(dtype), of_queries))?;
    let factors = ctx.upload(&vec![1.0f32; kv_heads])?;
    let upload_scales = |format: KvFormat| {
        let count = format.scale_bytes_of(sequences * rows * kv_heads * dim) / DType::F16.bytes();
        ctx.upload(&DType::F16.encode(&vec![1.0 / 64.0; count]))
    };
    let (k_scales, v_scales) = (upload_scales(subject.kv.k)?, upload_scales(subject.kv.v)?);
    let gates = if args.output_gate { of_queries } else { 0 };
    let gate = ctx.upload(&numbers(KvFormat::Plain(dtype), gates))?;
    let of_pages = args.page_size.map(|size| paging(ctx, sequences, keys, size)).transpose()?;
    let words = if args.mask_bits { sequences * queries * MaskBits::words(keys) } else { 0 };
    let mask = ctx.upload(&vec![u32::MAX; words])?;
    let sinks = ctx.upload(&vec![0.5f32; if args.sinks { heads } else { 0 }])?;
    let mut d = ctx.allocate(of_queries * dtype.bytes())?;
    let mut workspace = ctx.workspace(plan.workspace_bytes())?;
    let stream = ctx.new_stream()?;
    let has_sinks = args.sinks;
    let launch = |&place: &usize| {
        let (k, v) = &kv[place];
        let mut args = AttentionArgs::new(&q, k, v, &mut d).workspace(&mut workspace);
        args.k_scales = subject.kv.k.has_scales().then(|| (&k_scales).into());
        args.v_scales = subject.kv.v.has_scales().then(|| (&v_scales).into());
        args.k_factors = subject.kv.k.has_factors().then(|| (&factors).into());
        args.v_factors = subject.kv.v.has_factors().then(|| (&factors).into());
        args.gate = (gates > 0).then(|| (&gate).into());
        (args.block_table, args.kv_lengths) =
            of_pages.as_ref().map(|(table, lengths)| (table.into(), lengths.into())).unzip();
        args.mask = (words > 0).then(|| (&mask).into());
        args.sinks = has_sinks.then(|| (&sinks).into());
        plan.run(&stream, args)
    };
    let timing = time_launches(ctx, &stream, &places, args.pace(), launch)?;
    Ok(BenchRow {
        shape: subject.name(),
        format: subject.format(args),
        x_dtype: dtype.to_string(),
        kernel: plan.kernel_name().to_owned(),
        kernel_id: plan.kernel_id().map(|id| id.to_string()),
        unused_math: plan.unused_math().map(|math| math.name().to_owned()),
        flops: plan.flops() / timing.median,
        ..BenchRow::timed(ctx, timing, plan.bytes(), bandwidth, places.len())
    })
}

/// Each shape with every type of queries and keys, contiguous and
/// paged.
///
/// # Errors
/// When a shape is invalid, or a format cannot store it.
pub fn cases(args: &verify::Args, _: &Selection) -> anyhow::Result<Vec<Box<dyn TestCase>>> {
    let mut cases: Vec<Box<dyn TestCase>> = Vec::new();
    for sizes in &args.shape {
        let [sequences, queries, keys, heads, kv_heads, dim] = sizes.attention()?;
        for dtype in DType::ALL {
            let case = AttentionCase::new(&vec![(queries, keys); sequences], (heads, kv_heads), dim, dtype);
            let of_codes =
                [KvFormat::E4M3, KvFormat::Q8_0, KvFormat::Q4_0].into_iter().filter(|kv| dim.is_multiple_of(kv.step()));
            for kv in std::iter::once(KvFormat::Plain(dtype)).chain(of_codes) {
                for places in [AttentionStorage::Each, AttentionStorage::Paged(64)] {
                    cases.push(Box::new(AttentionCase { kv, places, ..case.clone() }));
                }
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
    let [sequences, queries, keys, heads, kv_heads, dim] = sizes.attention()?;
    let (queries, keys) = (Queries::each(sequences, queries), keys_of(sequences, keys, args.page_size));
    let attention = Attention::new(args.x_dtype, heads, kv_heads, dim, queries, keys).causal();
    let attention = if args.mask_bits { attention.mask(MaskBits::of_tokens()) } else { attention };
    let attention = if args.sinks { attention.sinks() } else { attention };
    let attention = if args.output_gate { attention.gated() } else { attention };
    let formats = args.kv_format.map(|k| (k, args.v_format.unwrap_or(k)));
    let attention = formats.into_iter().fold(attention, |attention, (k, v)| attention.kv_formats(k, v));
    let attention = if args.batch_invariant { attention.batch_invariant() } else { attention };
    Ok(ctx.explain_attention(&args.family.iter().fold(attention, Attention::family))?)
}
