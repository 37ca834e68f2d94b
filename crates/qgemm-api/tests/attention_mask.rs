//! Bit masks of attention: operand checks, and skipping
//! of fully masked tiles.

use qgemm_api::{Attention, AttentionArgs, Context, DType, Error, Keys, MaskBits, Queries};

const HEADS: usize = 2;
const DIM: usize = 8;
const QUERIES: usize = 3;
const KEYS: usize = 70;

fn attention() -> Attention {
    Attention::new(DType::F32, HEADS, HEADS, DIM, Queries::each(1, QUERIES), Keys::each(KEYS))
}

/// Attention results for equal scores, with values that are key numbers.
/// A result is the mean of the visible keys.
fn run(ctx: &Context, attention: &Attention, mask: Option<&[u32]>) -> Result<Vec<f32>, Error> {
    let plan = ctx.plan_attention(attention)?;
    let (q, k) = (ctx.upload(&[0f32; QUERIES * HEADS * DIM])?, ctx.upload(&[1f32; KEYS * HEADS * DIM])?);
    let values: Vec<f32> = (0..KEYS).flat_map(|key| vec![key as f32; HEADS * DIM]).collect();
    let v = ctx.upload(&values)?;
    let mut d = ctx.allocate(4 * QUERIES * HEADS * DIM)?;
    let mask = mask.map(|words| ctx.upload(words)).transpose()?;
    let mut workspace = ctx.workspace(plan.workspace_bytes())?;
    let mut args = AttentionArgs::new(&q, &k, &v, &mut d);
    args.mask = mask.as_ref().map(Into::into);
    args.workspace = Some(&mut workspace);
    plan.run(&ctx.default_stream(), args)?;
    let all: Vec<f32> = ctx.download(&d)?;
    Ok(all.into_iter().step_by(DIM).collect())
}

#[test]
fn a_mask_is_given_if_and_only_if_the_attention_has_one() -> Result<(), Error> {
    let ctx = Context::open("cpu")?;
    let masked = attention().mask(MaskBits::of_tokens());
    let words = [u32::MAX; QUERIES * 3];
    assert!(matches!(run(&ctx, &masked, None), Err(Error::MissingOperand { operand: "mask", .. })));
    assert!(matches!(run(&ctx, &attention(), Some(&words)), Err(Error::UnexpectedOperand { operand: "mask" })));
    let short = run(&ctx, &masked, Some(&words[1..])).expect_err("a word is missing").to_string();
    assert!(short.contains("mask") && short.contains("36"), "{short}");
    assert_eq!(run(&ctx, &masked, Some(&words))?, run(&ctx, &attention(), None)?);
    // Masks per head have `heads` times as many rows.
    let of_heads = run(&ctx, &masked.mask(MaskBits::of_tokens().per_head()), Some(&words)).expect_err("one head's");
    assert!(of_heads.to_string().contains("72"), "{of_heads}");
    Ok(())
}

#[test]
fn a_mask_of_more_bytes_than_there_are_addresses_is_refused() {
    let most = i32::MAX as usize;
    let huge = Attention::new(DType::F16, 1 << 15, 1, DIM, Queries::each(1, most), Keys::each(most));
    let ctx = Context::open("cpu").expect("there is a processor");
    let refused = ctx.plan_attention(&huge.mask(MaskBits::of_tokens().per_head())).expect_err("2^75 bits");
    assert!(matches!(refused, Error::ExtentOverflow { operand: "mask", .. }), "{refused}");
}

#[test]
fn bits_are_those_of_keys_in_their_order_for_each_head() -> Result<(), Error> {
    let ctx = Context::open("cpu")?;
    // The second head attends to the last key. The first head attends
    // to one more key with each query. Causality hides the last key
    // from its first queries.
    let mut words = [0u32; HEADS * QUERIES * 3];
    for query in 0..QUERIES {
        words[query * 3] = (2 << query) - 1;
        words[(QUERIES + query) * 3 + 2] = 1 << (KEYS - 1 - 64);
    }
    let masked = attention().mask(MaskBits::shared().per_head()).causal();
    assert_eq!(run(&ctx, &masked, Some(&words))?, [0.0, 0.0, 0.5, 0.0, 1.0, 69.0]);
    Ok(())
}

/// Number of matrix instructions of an f16 attention whose queries attend
/// to the keys `visible`, of 1024.
#[cfg(feature = "emu")]
fn instructions(ctx: &Context, queries: usize, visible: std::ops::Range<usize>) -> Result<u64, Error> {
    const MANY: usize = 1024;
    const FEATURES: usize = 64;
    let problem = Attention::new(DType::F16, 1, 1, FEATURES, Queries::each(1, queries), Keys::each(MANY));
    let plan = ctx.plan_attention(&problem.mask(MaskBits::of_tokens()))?;
    let zeros = |rows: usize| ctx.upload(&vec![0u8; 2 * rows * FEATURES]);
    let (q, k, v, mut d) = (zeros(queries)?, zeros(MANY)?, zeros(MANY)?, zeros(queries)?);
    let bits = |word: usize| (0..32).filter(|bit| visible.contains(&(word * 32 + bit))).map(|bit| 1u32 << bit).sum();
    let row: Vec<u32> = (0..MANY / 32).map(bits).collect();
    let mask = ctx.upload(&row.repeat(queries))?;
    let mut workspace = ctx.workspace(plan.workspace_bytes())?;
    let mut args = AttentionArgs::new(&q, &k, &v, &mut d);
    args.mask = Some((&mask).into());
    args.workspace = Some(&mut workspace);
    plan.run(&ctx.default_stream(), args)?;
    let kernels = qgemm_api::emu::take_counters(ctx)?;
    Ok(kernels.values().flat_map(|kernel| kernel.mma.values()).sum())
}

#[cfg(feature = "emu")]
#[test]
fn tiles_without_a_bit_are_not_multiplied() -> Result<(), Error> {
    for (device, queries) in [("emu:sm75", 64), ("emu:sm80", 4), ("emu:sm80", 64), ("emu:sm90", 64)] {
        let ctx = match Context::open(device) {
            Err(error @ Error::Hal(qgemm_api::HalError::NoDevice { .. })) => {
                qgemm_testkit::skipped(device, &error.to_string());
                continue;
            }
            ctx => ctx?,
        };
        let all = instructions(&ctx, queries, 0..1024)?;
        assert!(all > 0, "{device}, {queries} queries");
        assert_eq!(16 * instructions(&ctx, queries, 512..576)?, all, "{device}, {queries} queries");
        assert_eq!(instructions(&ctx, queries, 0..0)?, 0, "{device}, {queries} queries");
    }
    Ok(())
}
