//! `--op indexer` of the command: cases, explanation and measurement of indexers.

use std::fmt;
use std::ops::Range;

use qgemm_api::{Buffer, Context, DType, Indexer, IndexerArgs, KvFormat, PlanRecord};

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use qgemm_testkit::{IndexedKeys, IndexerCase, Selection, TestCase};

use crate::bench::timing::time_launches;
use crate::bench::{Args, BenchRow, copies};
use crate::choice::{IndexerShape, Sizes};
use crate::{explain, verify};

/// Sizes of `--shape`.
pub const SHAPE: &str = "[Bx]QxSxHxD: [sequences in pages x] queries x keys x heads x features";

/// Options of `bench` that apply to this operation, but not to all.
pub const BENCH_OPTIONS: &[&str] = &[];

/// The k of top-k.
const CHOSEN: usize = 2048;
/// Seed of the numbers: scores are the same in every run.
const SEED: u64 = 25;
/// Rows of a page.
const PAGE_SIZE: usize = 64;

/// Default shapes.
const SHAPES: [IndexerShape; 4] = [
    IndexerShape { sequences: None, queries: 2048, keys: 4096, heads: 64, features: 128 },
    IndexerShape { sequences: None, queries: 2048, keys: 65536, heads: 64, features: 128 },
    IndexerShape { sequences: None, queries: 2048, keys: 65536, heads: 32, features: 128 },
    IndexerShape { sequences: Some(64), queries: 1, keys: 8192, heads: 64, features: 128 },
];

/// Queries that attend to all keys.
pub struct Subject {
    shape: IndexerShape,
    format: KvFormat,
    best: Option<usize>,
}

impl fmt::Display for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.name(), self.format)
    }
}

/// Every shape, scores and top-k, in E4M3 and, if asked for, in a
/// 16-bit type.
///
/// # Errors
/// When a shape is invalid.
pub fn subjects(args: &Args) -> anyhow::Result<Vec<Subject>> {
    let shapes: Vec<IndexerShape> = match args.shape[..] {
        [] => SHAPES.to_vec(),
        _ => args.shape.iter().map(|sizes| sizes.indexer()).collect::<anyhow::Result<_>>()?,
    };
    let formats = match args.x_dtype {
        DType::F32 => vec![KvFormat::E4M3],
        dtype => vec![KvFormat::E4M3, KvFormat::Plain(dtype)],
    };
    let kinds = |shape: IndexerShape| {
        let of = move |format| [None, Some(CHOSEN.min(shape.keys))].map(|best| Subject { shape, format, best });
        formats.clone().into_iter().flat_map(of)
    };
    Ok(shapes.into_iter().flat_map(kinds).collect())
}

impl Subject {
    fn name(&self) -> String {
        match self.best {
            None => self.shape.to_string(),
            Some(best) => format!("{} best {best}", self.shape),
        }
    }
}

/// Times the planned kernel of a subject, rotating copies of
/// queries and keys.
///
/// # Errors
/// When no kernel supports it, or the device fails.
pub fn measure(ctx: &Context, args: &Args, subject: &Subject, bandwidth: f64) -> anyhow::Result<BenchRow> {
    let &Subject { shape, format, best } = subject;
    let IndexerShape { sequences, queries, keys, heads, features } = shape;
    let (all, rows) = (queries * sequences.unwrap_or(1), keys.next_multiple_of(PAGE_SIZE) * sequences.unwrap_or(1));
    let indexer = Indexer::new(format, all, heads, features, keys);
    let width = keys.div_ceil(PAGE_SIZE);
    let indexer = match sequences {
        Some(sequences) => indexer.paged(sequences, rows / PAGE_SIZE, PAGE_SIZE, width),
        None => indexer,
    };
    let indexer = if let Some(count) = best { indexer.best(count) } else { indexer };
    let plan = ctx.plan_indexer(&indexer)?;
    let (of_q, of_k) = (format.bytes_of(all * heads * features), format.bytes_of(rows * features));
    let places: Vec<usize> = (0..copies(ctx, of_q + of_k)).collect();
    // Small E4M3 numbers of both signs, whose bits are small numbers
    // in 16-bit types, too.
    let mut numbers = StdRng::seed_from_u64(SEED);
    let mut codes =
        |bytes: usize| (0..bytes).map(|_| numbers.random_range(0..61) | numbers.random_range(0..2u8) << 7).collect();
    let (queries_bytes, keys_bytes): (Vec<u8>, Vec<u8>) = (codes(of_q), codes(of_k));
    let uploaded = |bytes: &[u8]| places.iter().map(|_| ctx.upload(bytes)).collect::<Result<Vec<Buffer>, _>>();
    let (q, k) = (uploaded(&queries_bytes)?, uploaded(&keys_bytes)?);
    let mut factors =
        |range: Range<f32>, count: usize| (0..count).map(|_| numbers.random_range(range.clone())).collect::<Vec<f32>>();
    let weights = ctx.upload(&factors(-1.0..1.0, all * heads))?;
    let scales = ctx.upload(&factors(1.0..2.0, rows))?;
    let lengths = ctx.upload(&vec![keys as u32; sequences.unwrap_or(0)])?;
    let table = ctx.upload(&(0..(rows / PAGE_SIZE) as u32).collect::<Vec<u32>>())?;
    let mut result = ctx.allocate(all * best.unwrap_or(plan.op().most_keys()) * 4)?;
    let mut workspace = ctx.workspace(plan.workspace_bytes())?;
    let stream = ctx.new_stream()?;
    let launch = |&place: &usize| {
        let mut args = IndexerArgs::new(&q[place], &k[place], &weights, &mut result).workspace(&mut workspace);
        if format.has_factors() {
            args = args.k_scales(&scales);
        }
        if sequences.is_some() {
            args.lengths = Some((&lengths).into());
            args.block_table = Some((&table).into());
        }
        plan.run(&stream, args)
    };
    let timing = time_launches(ctx, &stream, &places, args.pace(), launch)?;
    Ok(BenchRow {
        shape: subject.name(),
        format: format.to_string(),
        x_dtype: format.to_string(),
        kernel: plan.kernel_name().to_owned(),
        kernel_id: plan.kernel_id().map(|id| id.to_string()),
        unused_math: plan.unused_math().map(|math| math.name().to_owned()),
        flops: plan.flops() / timing.median,
        ..BenchRow::timed(ctx, timing, plan.bytes(), bandwidth, places.len())
    })
}

/// Each shape with every format: scores and their top 2048.
///
/// # Errors
/// When a shape is invalid, or a format cannot store it.
pub fn cases(args: &verify::Args, _: &Selection) -> anyhow::Result<Vec<Box<dyn TestCase>>> {
    let mut cases: Vec<Box<dyn TestCase>> = Vec::new();
    for sizes in &args.shape {
        let IndexerShape { sequences, queries, keys, heads, features } = sizes.indexer()?;
        for format in Indexer::FORMATS {
            let (all, keys) = match sequences {
                None => (queries, IndexedKeys::All(keys)),
                Some(count) => (queries * count, IndexedKeys::Paged(64, vec![keys; count])),
            };
            let best = Some(Indexer::MOST_CHOSEN);
            cases.push(Box::new(IndexerCase { best, ..IndexerCase::new(all, (heads, features), format, keys) }));
        }
    }
    Ok(cases)
}

/// Plan record of the shape.
///
/// # Errors
/// When the shape is invalid.
pub fn explain(_: &explain::Args, ctx: &Context, sizes: &Sizes) -> anyhow::Result<PlanRecord> {
    let IndexerShape { sequences, queries, keys, heads, features } = sizes.indexer()?;
    let of = |queries| Indexer::new(KvFormat::E4M3, queries, heads, features, keys);
    Ok(ctx.explain_indexer(&match sequences {
        None => of(queries),
        Some(count) => of(queries * count).paged(count, count * keys.div_ceil(64), 64, keys.div_ceil(64)),
    })?)
}
