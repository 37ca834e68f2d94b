//! Attention to parts of the keys, merged, is attention to all keys.

use qgemm_api::{
    Attention, AttentionArgs, Context, DType, Error, Keys, MergeAttention, MergeAttentionArgs, MergeAttentionPlan,
    Queries,
};

const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const DIM: usize = 64;

/// Numbers from −1 to 1.
fn numbers(seed: u32, count: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(1);
    let next = |_| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..count).map(next).collect()
}

/// Queries, keys and values, in the type of Q.
struct Inputs {
    ctx: Context,
    dtype: DType,
    tokens: usize,
    q: Vec<u8>,
    k: Vec<u8>,
    v: Vec<u8>,
}

impl Inputs {
    fn new(dtype: DType, tokens: usize, keys: usize) -> Result<Self, Error> {
        let made = |seed, rows: usize| dtype.encode(&numbers(seed, rows * DIM));
        Ok(Self {
            ctx: Context::open("cpu")?,
            dtype,
            tokens,
            // Large scores, so that keys have different weights.
            q: dtype.encode(&numbers(1, tokens * HEADS * DIM).iter().map(|q| q * 4.0).collect::<Vec<_>>()),
            k: made(2, keys * KV_HEADS),
            v: made(3, keys * KV_HEADS),
        })
    }

    /// Results and log-sum-exps of attention to some keys.
    fn attend(&self, keys: std::ops::Range<usize>, causal: bool) -> Result<(Vec<u8>, Vec<f32>), Error> {
        let (ctx, tokens) = (&self.ctx, self.tokens);
        let (queries, count) = (Queries::each(1, tokens), Keys::each(keys.len()));
        let attention = Attention::new(self.dtype, HEADS, KV_HEADS, DIM, queries, count).log_sum_exp();
        let plan = ctx.plan_attention(&if causal { attention.causal() } else { attention })?;
        let mut workspace = ctx.workspace(plan.workspace_bytes())?;
        let row = KV_HEADS * DIM * self.dtype.bytes();
        let (k, v) = (
            ctx.upload(&self.k[keys.start * row..keys.end * row])?,
            ctx.upload(&self.v[keys.start * row..keys.end * row])?,
        );
        let q = ctx.upload(&self.q)?;
        let (mut d, mut lse) = (ctx.allocate(self.q.len())?, ctx.allocate(tokens * HEADS * 4)?);
        let mut args = AttentionArgs::new(&q, &k, &v, &mut d);
        args.lse = Some((&mut lse).into());
        args.workspace = Some(&mut workspace);
        plan.run(&ctx.default_stream(), args)?;
        Ok((ctx.download(&d)?, ctx.download(&lse)?))
    }

    /// Merges parts `[tokens, HEADS, DIM]`.
    fn merge(&self, parts: &[(Vec<u8>, Vec<f32>)]) -> Result<(Vec<u8>, Vec<f32>), Error> {
        let ctx = &self.ctx;
        let merge = MergeAttention::new(self.dtype, parts.len(), self.tokens, HEADS, DIM).log_sum_exp();
        let plan = ctx.plan_merge_attention(&merge)?;
        let partial = ctx.upload(&parts.iter().flat_map(|(d, _)| d.iter().copied()).collect::<Vec<u8>>())?;
        let partial_lse = ctx.upload(&parts.iter().flat_map(|(_, lse)| lse.iter().copied()).collect::<Vec<f32>>())?;
        let (mut d, mut lse) = (ctx.allocate(self.q.len())?, ctx.allocate(self.tokens * HEADS * 4)?);
        let args = MergeAttentionArgs::new(&partial, &partial_lse, &mut d).lse(&mut lse);
        plan.run(&ctx.default_stream(), args)?;
        Ok((ctx.download(&d)?, ctx.download(&lse)?))
    }
}

fn check_near(dtype: DType, got: &(Vec<u8>, Vec<f32>), expected: &(Vec<u8>, Vec<f32>)) {
    // Results are means of values below 1. In 16 bits
    // each part is rounded, and so is the result.
    let limit = match dtype {
        DType::F32 => 2e-6,
        DType::F16 => 1e-3,
        DType::BF16 => 8e-3,
    };
    for (i, (got, expected)) in dtype.decode(&got.0).into_iter().zip(dtype.decode(&expected.0)).enumerate() {
        assert!((got - expected).abs() <= limit, "{dtype} {i}: {got}, expected {expected}");
    }
    for (got, expected) in got.1.iter().zip(&expected.1) {
        assert!((got - expected).abs() <= 1e-5 || got == expected, "{dtype}: log-sum-exp {got}, expected {expected}");
    }
}

#[test]
fn halves_of_the_keys_merge_to_all() -> Result<(), Error> {
    for dtype in DType::ALL {
        let inputs = Inputs::new(dtype, 9, 200)?;
        let all = inputs.attend(0..200, false)?;
        let halves = [inputs.attend(0..100, false)?, inputs.attend(100..200, false)?];
        check_near(dtype, &inputs.merge(&halves)?, &all);
        assert!(halves[0].0 != all.0 && halves[0].1 != all.1);
        // One part is its result.
        assert_eq!(inputs.merge(&halves[..1])?, halves[0]);
    }
    Ok(())
}

#[test]
fn a_prefix_and_a_causal_suffix_merge_to_causal_attention() -> Result<(), Error> {
    let inputs = Inputs::new(DType::F32, 12, 90)?;
    let all = inputs.attend(0..90, true)?;
    // Query i sees keys up to 78 + i: all of the prefix, and
    // i keys of the suffix.
    let prefix = [inputs.attend(0..40, false)?, inputs.attend(40..79, false)?];
    let suffix = inputs.attend(79..90, true)?;
    assert_eq!(suffix.1[..HEADS], [f32::NEG_INFINITY; HEADS]);
    let [first, second] = prefix;
    check_near(DType::F32, &inputs.merge(&[first.clone(), second.clone(), suffix.clone()])?, &all);
    // A merge of merges is a merge of all.
    let rest = inputs.merge(&[second, suffix])?;
    check_near(DType::F32, &inputs.merge(&[first, rest])?, &all);
    Ok(())
}

#[test]
fn merges_that_are_none_are_refused() -> Result<(), Error> {
    let ctx = Context::open("cpu")?;
    let plan = |merge: MergeAttention| -> Result<MergeAttentionPlan, Error> { ctx.plan_merge_attention(&merge) };
    let of = |parts, dim| MergeAttention::new(DType::F16, parts, 2, 2, dim);
    for merge in [of(0, 64), of(257, 64), MergeAttention::new(DType::F16, 2, 2, 0, 64)] {
        assert!(matches!(plan(merge), Err(Error::OutOfRange { .. })));
    }
    for dim in [0, 12, 584] {
        assert!(matches!(plan(of(2, dim)), Err(Error::HeadDim { most: 576, .. })), "{dim}");
    }
    assert!(matches!(plan(of(2, 64).d_strides(64, 64)), Err(Error::OverlappingHeads { .. })));
    let ready = plan(of(2, 64))?;
    let (partial, mut d) = (ctx.allocate(2 * 512)?, ctx.allocate(512)?);
    let (short, partial_lse) = (ctx.allocate(28)?, ctx.allocate(32)?);
    let mut run = |partial_lse, lse: bool| {
        let mut other = ctx.allocate(16)?;
        let args = MergeAttentionArgs::new(&partial, partial_lse, &mut d);
        ready.run(&ctx.default_stream(), if lse { args.lse(&mut other) } else { args })
    };
    assert!(matches!(run(&short, false), Err(Error::BufferTooShort { expected: 32, got: 28, .. })));
    assert!(matches!(run(&partial_lse, true), Err(Error::UnexpectedOperand { .. })));
    run(&partial_lse, false)?;
    assert_eq!(plan(MergeAttention::new(DType::F16, 2, 0, 2, 64))?.kernel_name(), "none");
    Ok(())
}
