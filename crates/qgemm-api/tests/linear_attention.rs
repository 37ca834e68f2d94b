//! Linear attention over several runs: bits do not depend on how tokens
//! are spread over runs and batches, and any prefix of guesses can be
//! accepted.

use std::sync::Arc;

use qgemm_api::{
    Buffer, Context, DType, Decay, Error, LinearAttention, LinearAttentionArgs, LinearAttentionPlan, Queries,
};

const HEADS: usize = 2;
const KEY_HEADS: usize = 1;
const KEY_DIM: usize = 32;
const DIM: usize = 48;
const STATE: usize = HEADS * DIM * KEY_DIM;

/// Numbers from −1 to 1.
fn numbers(seed: u32, count: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(1);
    let next = |_| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..count).map(next).collect()
}

/// Devices of this machine.
fn devices(test: &str) -> Vec<Arc<Context>> {
    let open = |device: &&str| qgemm_testkit::open_or_skip(test, device);
    ["cpu", "cuda:0", "wgpu:0", "emu:sm80"].iter().filter_map(open).collect()
}

/// Inputs of a sequence.
#[derive(Clone)]
struct Inputs {
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    g: Vec<f32>,
    beta: Vec<f32>,
}

impl Inputs {
    fn new(seed: u32, tokens: usize) -> Self {
        Self {
            q: numbers(seed, tokens * KEY_HEADS * KEY_DIM),
            k: numbers(seed + 1, tokens * KEY_HEADS * KEY_DIM),
            v: numbers(seed + 2, tokens * HEADS * DIM),
            g: numbers(seed + 3, tokens * HEADS).iter().map(|g| g - 1.0).collect(),
            beta: numbers(seed + 4, tokens * HEADS).iter().map(|beta| beta + 1.0).collect(),
        }
    }

    fn part(&self, tokens: std::ops::Range<usize>) -> Self {
        let of = |all: &[f32], row: usize| all[tokens.start * row..tokens.end * row].to_vec();
        Self {
            q: of(&self.q, KEY_HEADS * KEY_DIM),
            k: of(&self.k, KEY_HEADS * KEY_DIM),
            v: of(&self.v, HEADS * DIM),
            g: of(&self.g, HEADS),
            beta: of(&self.beta, HEADS),
        }
    }

    fn then(mut self, other: &Self) -> Self {
        let both = [(&mut self.q, &other.q), (&mut self.k, &other.k), (&mut self.v, &other.v)];
        both.into_iter().for_each(|(all, others)| all.extend(others));
        self.g.extend(&other.g);
        self.beta.extend(&other.beta);
        self
    }
}

fn attention(sequences: usize, each: usize) -> LinearAttention {
    LinearAttention::new(DType::F32, HEADS, KEY_DIM, Queries::each(sequences, each), sequences)
        .key_heads(KEY_HEADS)
        .v_dim(DIM)
        .decay(Decay::per_head())
        .beta()
        .normalized(1e-6)
}

/// Bits of the results; `counts` are advance and pending of a single sequence.
fn run(
    ctx: &Context,
    plan: &LinearAttentionPlan,
    inputs: &Inputs,
    states: &mut Buffer,
    counts: Option<[u32; 2]>,
) -> Result<Vec<u32>, Error> {
    let [q, k, v] = [&inputs.q, &inputs.k, &inputs.v].map(|values| ctx.upload(values));
    let (q, k, v, g, beta) = (q?, k?, v?, ctx.upload(&inputs.g)?, ctx.upload(&inputs.beta)?);
    let mut d = ctx.allocate(inputs.v.len() * 4)?;
    let mut workspace = ctx.workspace(plan.workspace_bytes())?;
    let [advance, pending] = counts.unwrap_or_default().map(|count| ctx.upload(&[count]));
    let (advance, pending) = (advance?, pending?);
    let args = LinearAttentionArgs::new(&q, &k, &v, states, &mut d).decay(&g).beta(&beta).workspace(&mut workspace);
    let args = if counts.is_some() { args.advance(&advance).pending(&pending) } else { args };
    plan.run(&ctx.default_stream(), args)?;
    Ok(ctx.download::<f32>(&d)?.into_iter().map(f32::to_bits).collect())
}

fn bits(ctx: &Context, states: &Buffer) -> Result<Vec<u32>, Error> {
    Ok(ctx.download::<f32>(states)?.into_iter().map(f32::to_bits).collect())
}

#[test]
fn runs_and_batches_do_not_change_bits() -> Result<(), Error> {
    for ctx in devices("runs_and_batches_do_not_change_bits") {
        let (tokens, others) = (21, 3);
        let inputs: Vec<Inputs> = (0..others).map(|i| Inputs::new(10 * i + 1, tokens)).collect();
        let initial = numbers(99, others as usize * STATE);
        let mut states = ctx.upload(&initial)?;
        let all = inputs[1..].iter().fold(inputs[0].clone(), |all, one| all.then(one));
        let together =
            run(&ctx, &ctx.plan_linear_attention(&attention(others as usize, tokens))?, &all, &mut states, None)?;
        let expected = bits(&ctx, &states)?;
        // The second sequence alone, in runs of 1, 4, … tokens.
        let mut alone = ctx.upload(&initial[STATE..2 * STATE])?;
        let mut results = Vec::new();
        for (first, end) in [(0, 1), (1, 5), (5, 6), (6, 20), (20, 21)] {
            let plan = ctx.plan_linear_attention(&attention(1, end - first))?;
            results.extend(run(&ctx, &plan, &inputs[1].part(first..end), &mut alone, None)?);
        }
        let row = tokens * HEADS * DIM;
        assert!(results == together[row..2 * row], "{}: results", ctx.info().id);
        assert!(bits(&ctx, &alone)? == expected[STATE..2 * STATE], "{}: states", ctx.info().id);
    }
    Ok(())
}

#[test]
fn any_prefix_of_guesses_can_be_accepted() -> Result<(), Error> {
    for ctx in devices("any_prefix_of_guesses_can_be_accepted") {
        let guesses = Inputs::new(1, 5);
        let initial = numbers(7, STATE);
        let plan = |tokens| ctx.plan_linear_attention(&attention(1, tokens).advance().pending());
        for accepted in 0..=5 {
            // The first verification leaves the state as it is.
            let mut states = ctx.upload(&initial)?;
            let verified = run(&ctx, &plan(5)?, &guesses, &mut states, Some([0, 0]))?;
            assert!(bits(&ctx, &states)? == initial.iter().map(|s| s.to_bits()).collect::<Vec<_>>());
            // The next one begins with the accepted guesses.
            let (kept, next) = (guesses.part(0..accepted), Inputs::new(50, 4));
            let count = accepted as u32;
            let both = kept.clone().then(&next);
            let outputs = run(&ctx, &plan(accepted + 4)?, &both, &mut states, Some([count, count]))?;
            // Plain decoding of the same tokens.
            let mut plain = ctx.upload(&initial)?;
            let row = accepted * HEADS * DIM;
            if accepted > 0 {
                let first = run(&ctx, &ctx.plan_linear_attention(&attention(1, accepted))?, &kept, &mut plain, None)?;
                assert!(first == verified[..row]);
            }
            assert!(bits(&ctx, &states)? == bits(&ctx, &plain)?, "{}: {accepted} accepted", ctx.info().id);
            let after = run(&ctx, &ctx.plan_linear_attention(&attention(1, 4))?, &next, &mut plain, None)?;
            assert!(after == outputs[row..], "{}: {accepted} accepted", ctx.info().id);
            assert!(outputs[..row].iter().all(|&bits| bits == 0), "pending tokens have no output");
        }
    }
    Ok(())
}

#[test]
fn a_reset_forgets_even_nan() -> Result<(), Error> {
    for ctx in devices("a_reset_forgets_even_nan") {
        let mut inputs = Inputs::new(3, 3);
        inputs.g[..HEADS].fill(f32::NEG_INFINITY);
        let plan = ctx.plan_linear_attention(&attention(1, 3))?;
        let mut broken = ctx.upload(&vec![f32::NAN; STATE])?;
        let mut zero = ctx.allocate(STATE * 4)?;
        let results = run(&ctx, &plan, &inputs, &mut broken, None)?;
        assert!(results == run(&ctx, &plan, &inputs, &mut zero, None)?, "{}", ctx.info().id);
        assert!(results.iter().all(|&bits| f32::from_bits(bits).is_finite()));
        // A plan that begins from zero does not read it either.
        let mut broken = ctx.upload(&vec![f32::NAN; STATE])?;
        let of_zero = ctx.plan_linear_attention(&attention(1, 3).from_zero())?;
        assert!(results == run(&ctx, &of_zero, &inputs, &mut broken, None)?, "{}", ctx.info().id);
        assert!(bits(&ctx, &broken)? == bits(&ctx, &zero)?);
    }
    Ok(())
}

#[test]
fn attention_that_is_none_is_refused() -> Result<(), Error> {
    let ctx = Context::open("cpu")?;
    let of = |heads, dim| LinearAttention::new(DType::F16, heads, dim, Queries::each(2, 3), 2);
    let plan =
        |attention: LinearAttention| -> Result<LinearAttentionPlan, Error> { ctx.plan_linear_attention(&attention) };
    for dim in [0, 8, 24, 272] {
        assert!(matches!(plan(of(2, dim)), Err(Error::HeadDim { step: 16, most: 256, .. })), "{dim}");
        assert!(matches!(plan(of(2, 64).v_dim(dim)), Err(Error::HeadDim { .. })), "{dim}");
    }
    assert!(matches!(plan(of(4, 64).key_heads(3)), Err(Error::HeadsNotShared { heads: 4, kv_heads: 3 })));
    assert!(matches!(plan(of(2, 64).scale(f32::NAN)), Err(Error::NonFiniteScalar { name: "scale", .. })));
    assert!(matches!(plan(of(2, 64).normalized(-1.0)), Err(Error::NegativeEps { .. })));
    assert!(matches!(plan(of(2, 64).d_strides(64, 64)), Err(Error::OverlappingHeads { .. })));
    for stride in [2 * 64 * 64 - 4, 2 * 64 * 64 + 2] {
        assert!(
            matches!(plan(of(2, 64).slot_stride(stride)), Err(Error::SlotStride { expected: 8192, .. })),
            "{stride}"
        );
    }
    let few = LinearAttention::new(DType::F16, 2, 64, Queries::each(3, 1), 2);
    assert!(matches!(plan(few.clone()), Err(Error::OutOfRange { name: "slots", least: 3, .. })));
    assert!(plan(few.slot_indices()).is_ok());
    assert_eq!(plan(LinearAttention::new(DType::F16, 2, 64, Queries::each(2, 0), 2))?.kernel_name(), "none");
    Ok(())
}

#[test]
fn a_time_step_needs_a_decay_that_is_made_of_one() {
    let ctx = Context::open("cpu").expect("always there");
    let attention = LinearAttention::new(DType::F32, 1, 16, Queries::each(1, 1), 1).time_step_beta();
    let others = [Decay::per_head(), Decay::per_feature().softplus(DType::F32)];
    for attention in others.map(|decay| attention.clone().decay(decay)).into_iter().chain([attention.clone()]) {
        let refused = ctx.plan_linear_attention(&attention).map(drop);
        assert!(matches!(refused, Err(Error::NoTimeStep)), "{refused:?}");
    }
    ctx.plan_linear_attention(&attention.decay(Decay::per_head().softplus(DType::F32))).expect("it has one");
}
