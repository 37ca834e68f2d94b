//! Attention on the CPU: a query's bits depend on neither the other
//! queries, nor the number of threads; every vector level is right.

use std::sync::Arc;

use half::f16;
use qgemm_api::{Attention, AttentionArgs, Buffer, Context, DType, Keys, KvFormat, Queries, cpu};
use qgemm_cpu::CpuDevice;
use qgemm_cpu::rayon::ThreadPoolBuilder;
use qgemm_hal::SimdLevel;
use qgemm_testkit::{Selection, Verdict, suite};

const HEADS: usize = 6;
const KV_HEADS: usize = 2;
const DIM: usize = 64;
/// More than two chunks of keys.
const KEYS: usize = 1300;

/// Reproducible values in −1..1.
fn noise(len: usize, seed: u32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(747_796_405).wrapping_add(1);
    let next = |_| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..len).map(next).collect()
}

/// Keys or values in a format, and their scales.
fn cache(ctx: &Context, format: KvFormat, seed: u32) -> (Buffer, Buffer) {
    let values = noise(KEYS * KV_HEADS * DIM, seed);
    let scales: Vec<f16> = values.iter().step_by(32).map(|value| f16::from_f32(value * 0.01)).collect();
    let codes = values[..format.bytes_of(values.len()).min(values.len())].iter();
    let numbers = match format {
        KvFormat::Plain(_) => ctx.upload(&values.iter().map(|value| f16::from_f32(*value)).collect::<Vec<_>>()),
        _ => ctx.upload(&codes.map(|value| ((value * 127.0) as i8).cast_unsigned()).collect::<Vec<_>>()),
    };
    (numbers.expect("host memory"), ctx.upload(&scales).expect("host memory"))
}

/// The last `queries` queries of the sequence, causal, in
/// the order of positions.
fn attend(ctx: &Context, format: KvFormat, queries: usize) -> Vec<f32> {
    let attention = Attention::new(DType::F32, HEADS, KV_HEADS, DIM, Queries::each(1, queries), Keys::each(KEYS));
    let plan = ctx.plan_attention(&attention.kv_format(format).causal()).expect("every format is served");
    let all = noise(100 * HEADS * DIM, 1);
    let q = ctx.upload(&all[all.len() - queries * HEADS * DIM..]).expect("host memory");
    let ((k, k_scales), (v, v_scales)) = (cache(ctx, format, 2), cache(ctx, format, 3));
    let mut d = ctx.allocate(queries * HEADS * DIM * 4).expect("host memory");
    let mut args = AttentionArgs::new(&q, &k, &v, &mut d);
    if format.has_scales() {
        args = args.k_scales(&k_scales).v_scales(&v_scales);
    }
    plan.run(&ctx.default_stream(), args).expect("valid operands");
    ctx.download(&d).expect("host memory")
}

#[test]
fn a_querys_bits_depend_on_neither_other_queries_nor_threads() {
    let with = |threads: usize| Context::from_device(cpu::open_with_threads(threads).expect("threads"));
    let contexts = [with(1), with(2), with(7)];
    for format in [KvFormat::Plain(DType::F16), KvFormat::Q8_0, KvFormat::Q4_0] {
        let all = attend(&contexts[0], format, 100);
        assert!(all.iter().all(|value| value.is_finite() && *value != 0.0), "{format}");
        for ctx in &contexts {
            for queries in [1, 2, 8, 22, 100] {
                let last = &all[all.len() - queries * HEADS * DIM..];
                assert_eq!(attend(ctx, format, queries), last, "{queries} queries of {format}");
            }
        }
    }
}

#[test]
fn only_work_that_is_shared_expects_to_wake_threads() {
    let expected = |threads: usize, keys: usize| {
        let ctx = Context::from_device(cpu::open_with_threads(threads).expect("threads"));
        let attention = Attention::new(DType::F32, HEADS, KV_HEADS, DIM, Queries::each(1, 1), Keys::each(keys));
        let plan = ctx.plan_attention(&attention).expect("every format is served");
        (plan.launch().expect("there is work").estimate, ctx.info().launch_seconds)
    };
    let (small, wake_up) = expected(7, 16);
    assert!(small < wake_up, "{small}");
    assert!(expected(7, 100_000).0 > wake_up);
}

#[test]
fn random_cases_pass_at_every_vector_level() {
    let wanted = Selection::default();
    let levels = SimdLevel::ALL.into_iter().filter(|level| level.is_available());
    for (i, level) in levels.enumerate() {
        let threads = [3, 1][i % 2];
        let pool = ThreadPoolBuilder::new().num_threads(threads).build().expect("threads");
        let device = CpuDevice::new().with_pool(Arc::new(pool)).with_simd(level).expect("an available level");
        let ctx = Context::from_device(Arc::new(device));
        for operation in ["attention", "kv_append", "norm"] {
            let suite = suite(operation).expect("an operation with a suite");
            for seed in 0..60 {
                let outcome = suite.random_case(&wanted, 1000 * i as u64 + seed).run(&ctx);
                if let Verdict::Fail(failure) = outcome.verdict {
                    panic!("{} on {threads} threads, seed {seed}: {}: {failure}", level.name(), outcome.case);
                }
            }
        }
    }
}
