//! Plans that FMA bounds although the chip has matrix instructions
//! for their types: all of them, as data.

use std::collections::BTreeMap;

use qgemm_api::{
    Attention, Context, DType, Error, FactorFormat, Indexer, Keys, KvFormat, MaskBits, Matmul, PlanRecord, Queries,
    XPrecision,
};

/// Variants, oldest first.
const DEVICES: [&str; 6] = ["emu:sm70", "emu:sm75", "emu:sm80", "emu:sm89", "emu:sm90", "emu:sm120"];

/// Slow paths: the problem, and the variants whose plans take them.
const SLOW: &[(&str, &[&str])] = &[
    ("attention decode, D 256, f16", &["sm70", "sm75"]),
    // Codes of long heads, or of two formats, would be dequantized
    // in front of `attention_decode`, which takes longer there.
    ("attention decode, D 256, q8_0, bf16", &["sm89", "sm120"]),
    ("attention decode, D 256, q8_0, f16", &["sm70", "sm75", "sm89", "sm120"]),
    ("attention decode, D 512, f16", &["sm70", "sm75"]),
    ("attention decode, f16", &["sm70", "sm75"]),
    ("attention decode, q8_0 and q4_0, bf16", &["sm89", "sm120"]),
    ("attention decode, q8_0 and q4_0, f16", &["sm70", "sm75", "sm89", "sm120"]),
    // Long heads do not fit shared memory with a mask.
    ("attention prefill, D 256, mask, f16", &["sm70", "sm75"]),
    ("attention prefill, D 512, mask, f16", &["sm70", "sm75"]),
    // The workspace of dequantized keys grows with the batch.
    ("attention prefill, q8_0, batch-invariant, bf16", &["sm80", "sm89", "sm90", "sm120"]),
    ("attention prefill, q8_0, batch-invariant, f16", &["sm70", "sm75", "sm80", "sm89", "sm90", "sm120"]),
    // Copies are of 16 bytes.
    ("attention prefill, unaligned, bf16", &["sm80", "sm89", "sm90", "sm120"]),
    ("attention prefill, unaligned, f16", &["sm70", "sm75", "sm80", "sm89", "sm90", "sm120"]),
    ("matmul, unaligned, bf16", &["sm120"]),
    ("matmul, unaligned, f16", &["sm120"]),
];

/// A problem of many multiply-adds for each byte.
type Explain = fn(&Context, DType) -> Result<PlanRecord, Error>;

/// Prefill of 512 queries over 2048 keys.
fn prefill(ctx: &Context, dtype: DType, with: impl FnOnce(Attention) -> Attention) -> Result<PlanRecord, Error> {
    prefill_of(ctx, dtype, 128, with)
}

fn prefill_of(
    ctx: &Context,
    dtype: DType,
    dim: usize,
    with: impl FnOnce(Attention) -> Attention,
) -> Result<PlanRecord, Error> {
    let attention = Attention::new(dtype, 32, 8, dim, Queries::each(1, 512), Keys::each(2048)).causal();
    ctx.explain_attention(&with(attention))
}

/// Decoding of one query of 32 heads that share a head of keys.
fn decode_of(
    ctx: &Context,
    dtype: DType,
    dim: usize,
    with: impl FnOnce(Attention) -> Attention,
) -> Result<PlanRecord, Error> {
    ctx.explain_attention(&with(Attention::new(dtype, 64, 1, dim, Queries::each(1, 1), Keys::each(8192))))
}

fn gemm(ctx: &Context, format: &str, m: usize, dtype: DType, precision: XPrecision) -> Result<PlanRecord, Error> {
    let weight = ctx.describe_weight(format.parse()?, 4096, 4096)?;
    ctx.explain(&weight.problem(m).x_dtype(dtype).x_precision(precision))
}

fn indexer(ctx: &Context, format: KvFormat) -> Result<PlanRecord, Error> {
    ctx.explain_indexer(&Indexer::new(format, 512, 64, 128, 8192))
}

/// Problems by name, for both 16-bit types.
const PROBLEMS: &[(&str, Explain)] = &[
    ("attention prefill", |ctx, dtype| prefill(ctx, dtype, |attention| attention)),
    ("attention prefill, mask", |ctx, dtype| prefill(ctx, dtype, |attention| attention.mask(MaskBits::of_tokens()))),
    ("attention prefill, sinks", |ctx, dtype| prefill(ctx, dtype, Attention::sinks)),
    ("attention prefill, e4m3", |ctx, dtype| prefill(ctx, dtype, |a| a.kv_format(KvFormat::E4M3))),
    ("attention prefill, q8_0", |ctx, dtype| prefill(ctx, dtype, |a| a.kv_format(KvFormat::Q8_0))),
    ("attention prefill, q4_0", |ctx, dtype| prefill(ctx, dtype, |a| a.kv_format(KvFormat::Q4_0))),
    ("attention prefill, q8_0, batch-invariant", |ctx, dtype| {
        prefill(ctx, dtype, |a| a.kv_format(KvFormat::Q8_0).batch_invariant())
    }),
    ("attention prefill, unaligned", |ctx, dtype| {
        prefill(ctx, dtype, |attention| attention.alignment(2).kv_alignment(2))
    }),
    ("attention prefill, D 256", |ctx, dtype| prefill_of(ctx, dtype, 256, |attention| attention)),
    ("attention prefill, D 256, mask", |ctx, dtype| prefill_of(ctx, dtype, 256, |a| a.mask(MaskBits::of_tokens()))),
    ("attention prefill, D 512", |ctx, dtype| prefill_of(ctx, dtype, 512, |attention| attention)),
    ("attention prefill, D 512, mask", |ctx, dtype| prefill_of(ctx, dtype, 512, |a| a.mask(MaskBits::of_tokens()))),
    ("attention prefill, gate", |ctx, dtype| prefill(ctx, dtype, Attention::gated)),
    ("attention prefill, q8_0 and q4_0", |ctx, dtype| {
        prefill(ctx, dtype, |a| a.kv_formats(KvFormat::Q8_0, KvFormat::Q4_0))
    }),
    ("attention decode", |ctx, dtype| decode_of(ctx, dtype, 128, |attention| attention)),
    ("attention decode, D 256", |ctx, dtype| decode_of(ctx, dtype, 256, |attention| attention)),
    ("attention decode, D 512", |ctx, dtype| decode_of(ctx, dtype, 512, |attention| attention)),
    ("attention decode, D 256, q8_0", |ctx, dtype| decode_of(ctx, dtype, 256, |a| a.kv_format(KvFormat::Q8_0))),
    ("attention decode, q8_0 and q4_0", |ctx, dtype| {
        decode_of(ctx, dtype, 128, |a| a.kv_formats(KvFormat::Q8_0, KvFormat::Q4_0))
    }),
    ("gemm q4_k, 16 tokens", |ctx, dtype| gemm(ctx, "q4_k", 16, dtype, XPrecision::Auto)),
    ("gemm q4_k, 512 tokens", |ctx, dtype| gemm(ctx, "q4_k", 512, dtype, XPrecision::Auto)),
    ("gemm f16, 512 tokens", |ctx, dtype| gemm(ctx, "f16", 512, dtype, XPrecision::Auto)),
    ("gemm bf16, 512 tokens", |ctx, dtype| gemm(ctx, "bf16", 512, dtype, XPrecision::Auto)),
    ("gemm f32, 512 tokens", |ctx, dtype| gemm(ctx, "f32", 512, dtype, XPrecision::Auto)),
    ("gemm q4_k, 512 tokens, exact", |ctx, dtype| gemm(ctx, "q4_k", 512, dtype, XPrecision::Exact)),
    ("matmul", |ctx, dtype| ctx.explain_matmul(&Matmul::new([512, 4096, 4096], dtype, dtype, dtype))),
    ("matmul, unaligned", |ctx, dtype| {
        ctx.explain_matmul(&Matmul::new([512, 4096, 4096], dtype, dtype, dtype).alignment(2, 2))
    }),
    ("indexer", |ctx, dtype| indexer(ctx, KvFormat::Plain(dtype))),
    ("indexer, e4m3", |ctx, _| indexer(ctx, KvFormat::E4M3)),
];

#[test]
fn slow_paths_are_those_of_the_list() {
    let mut found = BTreeMap::<String, Vec<&str>>::new();
    for device in DEVICES {
        let ctx = Context::open(device).expect("an emulated device");
        for (name, explain) in PROBLEMS {
            for dtype in [DType::F16, DType::BF16] {
                let record = explain(&ctx, dtype).unwrap_or_else(|error| panic!("{name} {dtype} on {device}: {error}"));
                if record.unused_math.is_some() {
                    found.entry(format!("{name}, {dtype}")).or_default().push(&device["emu:".len()..]);
                }
            }
        }
    }
    let listed: BTreeMap<String, Vec<&str>> = SLOW.iter().map(|(name, on)| ((*name).to_owned(), on.to_vec())).collect();
    assert_eq!(found, listed, "slow paths and the list of them differ");
}

/// Main loops of FP8 instructions, by variant.
const OF_CODES: [(&str, &str); 3] =
    [("emu:sm89", "sm89_cp_async_fp8"), ("emu:sm90", "sm90_wgmma_ws_e4m3"), ("emu:sm120", "sm89_cp_async_fp8")];

#[test]
fn codes_of_every_layout_and_alignment_are_multiplied_by_fp8_instructions() {
    const E4M3: FactorFormat = FactorFormat::E4M3;
    for (device, main_loop) in OF_CODES {
        let ctx = Context::open(device).expect("an emulated device");
        for (a_transposed, b_transposed, alignment) in
            [false, true].into_iter().flat_map(|a| [(a, false, 16), (a, true, 16), (a, false, 1), (a, true, 1)])
        {
            let matmul = Matmul::new([4096, 4096, 4096], E4M3, E4M3, DType::BF16).alignment(alignment, alignment);
            let matmul = if a_transposed { matmul.a_transposed() } else { matmul };
            let matmul = if b_transposed { matmul.b_transposed() } else { matmul };
            let record = ctx.explain_matmul(&matmul).expect("a plan");
            let (what, kernel) = (format!("{matmul:?} on {device}"), record.kernel_id.unwrap_or_default());
            assert!(kernel.contains(main_loop), "{what}: {kernel}");
            // A copy is made of what is not along K, or not aligned.
            let copies = a_transposed || !b_transposed || alignment < 16;
            assert_eq!(record.workspace_bytes > 4096 * 4096, copies, "{what}");
        }
    }
}

#[test]
fn explain_says_what_a_permission_to_round_x_would_gain() {
    let ctx = Context::open("emu:sm120").expect("an emulated chip");
    let record = gemm(&ctx, "mxfp4", 4096, DType::F16, XPrecision::Auto).expect("a record");
    let gain = record.permissions.iter().find(|permission| permission.x_format == "mxfp4");
    let gain = gain.unwrap_or_else(|| panic!("block-scaled instructions are faster: {record}"));
    assert_eq!(gain.x_precision, "mxfp4");
    let permitted = gemm(&ctx, "mxfp4", 4096, DType::F16, XPrecision::MxFp4).expect("a record");
    assert_eq!(permitted.chosen().map(|chosen| chosen.seconds), Some(gain.seconds), "{permitted}");
    assert!(record.to_string().contains("permission  mxfp4"), "{record}");

    let hopper = Context::open("emu:sm90").expect("an emulated chip");
    let record = gemm(&hopper, "nvfp4", 1, DType::F16, XPrecision::Auto).expect("a record");
    assert!(record.permissions.iter().all(|permission| permission.x_format != "nvfp4"), "{record}");
}
