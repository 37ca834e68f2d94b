//! Quantized KV caches: every device writes the same bits, and
//! operands may share a buffer.

use qgemm_api::{
    Attention, AttentionArgs, Buffer, Context, DType, Error, Keys, KvAppend, KvAppendArgs, KvFormat, Queries,
};

const TOKENS: usize = 64;
const HEADS: usize = 2;
const DIM: usize = 64;

/// Values with full mantissas, one magnitude per block of 32 features.
/// Then multiples of halves, which are ties when the block's maximum
/// is the largest code. Then zeros, NaN and out-of-range values, in
/// formats that allow them.
fn values(kv: KvFormat) -> Vec<f32> {
    let mut state = 0x9e37_79b9_u32;
    let mut random = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        state >> 8
    };
    let mut values = Vec::new();
    for block in 0..TOKENS * HEADS * DIM / 32 {
        let exponent = 127 - 30 + block as u32 % 45;
        for i in 0..32 {
            let (mantissa, sign, less) = (random() & 0x7f_ffff, random() & 1, random() % 6);
            values.push(match block % 4 {
                3 if i == 0 => [127.0, 8.0, 448.0][block / 4 % 3],
                3 => [127.0, 8.0, 448.0][block / 4 % 3] - (random() % 512) as f32 * 0.5,
                _ => f32::from_bits(sign << 31 | (exponent - less) << 23 | mantissa),
            });
        }
    }
    // No other value of the block exceeds the largest code.
    for block in values.chunks_exact_mut(32).skip(3).step_by(4) {
        let most = block[0];
        block.iter_mut().for_each(|value| *value = value.max(-most));
    }
    values[..32].fill(0.0);
    if kv == KvFormat::E4M3 {
        let special = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -0.0, f32::MAX, f32::MIN_POSITIVE, 1e-40, -1e-44];
        for head in values.chunks_exact_mut(DIM).take(2 * HEADS) {
            head[8..16].copy_from_slice(&special);
        }
    }
    values
}

/// Codes and scales of keys, then of values, as `ctx` writes them, with
/// or without a Hadamard rotation.
fn appended(
    ctx: &Context,
    kv: KvFormat,
    values: &[f32],
    factors: [f32; HEADS],
    rotates: bool,
) -> Result<[Vec<u8>; 4], Error> {
    let append = KvAppend::new(DType::F32, 0, HEADS, DIM, Queries::each(1, TOKENS), Keys::each(TOKENS)).kv_format(kv);
    let append = if rotates { append.rotate_k().rotate_v() } else { append };
    let plan = ctx.plan_kv_append(&append)?;
    let reversed: Vec<f32> = values.iter().rev().copied().collect();
    let (new_k, new_v, factors) = (ctx.upload(values)?, ctx.upload(&reversed)?, ctx.upload(&factors)?);
    let poison = |bytes: usize| ctx.upload(&vec![0xffu8; bytes]);
    let (mut k, mut v) = (poison(kv.bytes_of(values.len()))?, poison(kv.bytes_of(values.len()))?);
    let blocks = kv.scale_bytes_of(values.len());
    let (mut k_scales, mut v_scales) = (poison(blocks)?, poison(blocks)?);
    let mut args = KvAppendArgs::new(&new_k, &new_v, &mut k, &mut v);
    if kv.has_factors() {
        (args.k_factors, args.v_factors) = (Some((&factors).into()), Some((&factors).into()));
    }
    if kv.has_scales() {
        (args.k_scales, args.v_scales) = (Some((&mut k_scales).into()), Some((&mut v_scales).into()));
    }
    plan.run(&ctx.default_stream(), args)?;
    Ok([ctx.download(&k)?, ctx.download(&v)?, ctx.download(&k_scales)?, ctx.download(&v_scales)?])
}

#[test]
fn codes_are_the_same_on_every_device() -> Result<(), Error> {
    let cpu = Context::open("cpu")?;
    for device in ["wgpu:0", "cuda:0", "emu:sm75", "emu:sm90"] {
        let ctx = match Context::open(device) {
            Ok(ctx) => ctx,
            Err(why) => {
                qgemm_testkit::skipped(&format!("codes_are_the_same_on_every_device on {device}"), &why.to_string());
                continue;
            }
        };
        for kv in KvFormat::ALL.into_iter().filter(|kv| !kv.is_plain()) {
            // Factors of both signs and of any magnitude.
            for (factors, rotates) in [([1.0, 0.37], false), ([3.0e-30, -5.5], false), ([1.0, 0.37], true)] {
                let values = values(kv);
                let [on_cpu, here] = [&cpu, &ctx].map(|ctx| appended(ctx, kv, &values, factors, rotates));
                let parts = ["keys", "values", "scales of keys", "scales of values"];
                for ((cpu, here), what) in on_cpu?.iter().zip(&here?).zip(parts) {
                    let differs = cpu.iter().zip(here).position(|(cpu, here)| cpu != here);
                    assert_eq!(
                        differs,
                        None,
                        "{what} in {kv} on {device}, rotated {rotates}: {:?}",
                        differs.map(|at| (cpu[at], here[at]))
                    );
                }
            }
        }
    }
    Ok(())
}

/// Results and log-sum-exps of attention over the appended keys, with
/// operands placed by `memory`.
fn attended(
    ctx: &Context,
    kv: KvFormat,
    mut memory: impl FnMut(usize) -> Result<Buffer, Error>,
) -> Result<[Vec<u8>; 2], Error> {
    let values: Vec<f32> = (0..TOKENS * HEADS * DIM).map(|i| ((i * 37) % 101) as f32 * 0.02 - 1.0).collect();
    let (len, bytes) = (values.len(), values.len() * 4);
    let (queries, keys) = (Queries::each(1, TOKENS), Keys::each(TOKENS));
    let stream = ctx.default_stream();
    let (mut q, mut d, mut lse) = (memory(bytes)?, memory(bytes)?, memory(TOKENS * HEADS * 4)?);
    let mut factors = memory(HEADS * 4)?;
    ctx.upload_into(&values, &mut q)?;
    ctx.upload_into(&[0.01f32, 0.02], &mut factors)?;
    let (mut k, mut v) = (memory(kv.bytes_of(len))?, memory(kv.bytes_of(len))?);
    let blocks = kv.scale_bytes_of(len).max(4);
    let (mut k_scales, mut v_scales) = (memory(blocks)?, memory(blocks)?);

    let append = KvAppend::new(DType::F32, 0, HEADS, DIM, queries, keys).kv_format(kv);
    let mut args = KvAppendArgs::new(&q, &q, &mut k, &mut v);
    if kv.has_factors() {
        (args.k_factors, args.v_factors) = (Some((&factors).into()), Some((&factors).into()));
    } else {
        (args.k_scales, args.v_scales) = (Some((&mut k_scales).into()), Some((&mut v_scales).into()));
    }
    ctx.plan_kv_append(&append)?.run(&stream, args)?;

    let attention = Attention::new(DType::F32, HEADS, HEADS, DIM, queries, keys).kv_format(kv).causal().log_sum_exp();
    let plan = ctx.plan_attention(&attention)?;
    let mut workspace = ctx.workspace(plan.workspace_bytes())?;
    let mut args = AttentionArgs::new(&q, &k, &v, &mut d);
    if kv.has_factors() {
        (args.k_factors, args.v_factors) = (Some((&factors).into()), Some((&factors).into()));
    } else {
        (args.k_scales, args.v_scales) = (Some((&k_scales).into()), Some((&v_scales).into()));
    }
    args.lse = Some((&mut lse).into());
    args.workspace = Some(&mut workspace);
    plan.run(&stream, args)?;
    let read = |buffer: &Buffer, bytes: usize| Ok::<_, Error>(ctx.download::<u8>(buffer)?[..bytes].to_vec());
    Ok([read(&d, bytes)?, read(&lse, TOKENS * HEADS * 4)?])
}

#[test]
fn caches_and_all_else_may_lie_in_one_arena() -> Result<(), Error> {
    for device in ["cpu", "wgpu:0", "cuda:0"] {
        let ctx = match Context::open(device) {
            Ok(ctx) => ctx,
            Err(why) => {
                qgemm_testkit::skipped(
                    &format!("caches_and_all_else_may_lie_in_one_arena on {device}"),
                    &why.to_string(),
                );
                continue;
            }
        };
        for kv in KvFormat::ALL.into_iter().filter(|kv| !kv.is_plain()) {
            let apart = attended(&ctx, kv, |bytes| ctx.allocate(bytes))?;
            let mut rest = ctx.allocate(1 << 20)?;
            let in_arena = attended(&ctx, kv, |bytes| {
                let behind = rest.split_off(bytes.next_multiple_of(256))?;
                Ok(std::mem::replace(&mut rest, behind))
            })?;
            assert!(apart == in_arena, "{kv} on {device}");
            assert!(apart[0].iter().any(|&byte| byte != 0));
        }
    }
    Ok(())
}

#[test]
fn caches_that_shaders_cannot_count_are_refused_with_a_reason() {
    let ctx = match Context::open("wgpu:0") {
        Ok(ctx) => ctx,
        Err(why) => {
            return qgemm_testkit::skipped(
                "caches_that_shaders_cannot_count_are_refused_with_a_reason",
                &why.to_string(),
            );
        }
    };
    let (queries, keys) = (Queries::each(1, 1), Keys::paged(1 << 20, 64, 8));
    let append = KvAppend::new(DType::F16, 0, HEADS, DIM, queries, keys).kv_format(KvFormat::Q4_0);
    let attention = Attention::new(DType::F16, HEADS, HEADS, DIM, queries, keys).kv_format(KvFormat::Q4_0);
    for refusal in [ctx.plan_kv_append(&append).map(drop), ctx.plan_attention(&attention).map(drop)] {
        let why = refusal.expect_err("2^33 elements").to_string();
        assert!(
            why.contains("32 bits") && why.contains(&(1u64 << 33).to_string()) && why.contains("fewer pages"),
            "{why}"
        );
    }
}
