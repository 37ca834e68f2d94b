//! Families of an operation that support something on a device.
//! If some families are for some chips only, a few problems are
//! asked; otherwise all families count.
//! a kernel for one of a few problems; of others all.

use qgemm_api::{Attention, Context, DType, Indexer, Keys, KvFormat, MaskBits, PlanRecord, Queries};

/// Tokens of a decode step, a speculative step and a prompt.
const TOKENS: [usize; 3] = [1, 8, 256];
/// Features of a head.
const FEATURES: [usize; 3] = [64, 128, 256];
/// Keys per sequence.
const KEYS: usize = 1024;

/// The subset of `families` of `operation` that supports
/// something.
pub fn serving(
    ctx: &Context,
    operation: &str,
    families: Vec<&'static str>,
) -> Result<Vec<&'static str>, qgemm_api::Error> {
    let records = match operation {
        "attention" => attention(ctx)?,
        "indexer" => indexer(ctx)?,
        _ => return Ok(families),
    };
    let serves = |name: &&str| records.iter().flat_map(|record| &record.candidates).any(|of| of.family == *name);
    Ok(families.into_iter().filter(serves).collect())
}

/// Attention plans for every type and KV format, with and without
/// a mask.
fn attention(ctx: &Context) -> Result<Vec<PlanRecord>, qgemm_api::Error> {
    let mut records = Vec::new();
    for (tokens, features) in TOKENS.into_iter().flat_map(|tokens| FEATURES.map(|features| (tokens, features))) {
        for (dtype, kv) in DType::ALL.into_iter().flat_map(|dtype| KvFormat::ALL.map(|kv| (dtype, kv))) {
            let plain = Attention::new(dtype, 8, 2, features, Queries::each(2, tokens), Keys::each(KEYS)).kv_format(kv);
            records.push(ctx.explain_attention(&plain)?);
            records.push(ctx.explain_attention(&plain.mask(MaskBits::shared()))?);
        }
    }
    Ok(records)
}

/// Indexer plans for scores and top-k in every format, contiguous
/// and paged.
fn indexer(ctx: &Context) -> Result<Vec<PlanRecord>, qgemm_api::Error> {
    const PAGE: usize = 64;
    let mut records = Vec::new();
    for (tokens, format) in TOKENS.into_iter().flat_map(|tokens| Indexer::FORMATS.map(|format| (tokens, format))) {
        let rows = Indexer::new(format, tokens, 64, 128, KEYS);
        let paged = Indexer::new(format, 2 * tokens, 64, 128, KEYS).paged(2, 2 * KEYS / PAGE, PAGE, KEYS / PAGE);
        for problem in [rows.clone().best(64), rows, paged.clone().best(64), paged] {
            records.push(ctx.explain_indexer(&problem)?);
        }
    }
    Ok(records)
}
