//! Each layer beside candle's own, on the CPU.

use candle_core::quantized::{GgmlDType, QMatMul, QTensor};
use candle_core::{D, DType, Device, Module, Result, Tensor};
use candle_nn::ops::{rms_norm, silu, softmax_last_dim};
use candle_nn::rotary_emb::rope_i;
use qgemm_candle::qgemm_api::{Activation, HostExperts, Rotary, XPrecision};
use qgemm_candle::{Context, Experts, FusedLinear, KvCache, KvCacheSize, Linear, RmsNorm, host_experts, host_weight};

/// NMSE of f32 sums in another order.
const EXACT: f32 = 1e-10;
/// NMSE of activations rounded to eight bits: a uniform error of half a step of 127 each.
const EIGHT_BITS: f32 = 1e-4;

fn random(dims: &[usize]) -> Tensor {
    let count: usize = dims.iter().product();
    let mut state = 0x9e37_79b9u32 ^ count as u32;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        state as f32 / u32::MAX as f32 * 2.0 - 1.0
    };
    let values: Vec<f32> = (0..count).map(|_| next()).collect();
    Tensor::from_vec(values, dims, &Device::Cpu).expect("as many values")
}

fn quantized(n: usize, k: usize, dtype: GgmlDType) -> QTensor {
    QTensor::quantize(&random(&[n, k]), dtype).expect("a format of candle")
}

/// Without rounding of X.
fn exact() -> Context {
    Context::with_x_precision(&Device::Cpu, XPrecision::Exact).expect("a CPU")
}

#[track_caller]
fn close(expected: &Tensor, got: &Tensor, limit: f32) {
    assert_eq!(expected.dims(), got.dims());
    let values = |t: &Tensor| t.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>();
    let (expected, got) = (values(expected).expect("values"), values(got).expect("values"));
    let sum = |of: &dyn Fn(f32, f32) -> f32| expected.iter().zip(&got).map(|(&a, &b)| of(a, b)).sum::<f32>();
    let nmse = sum(&|a, b| (a - b) * (a - b)) / sum(&|a, _| a * a);
    assert!(nmse <= limit, "an NMSE of {nmse:e} is more than {limit:e}");
}

/// X·Wᵀ with the dequantized weight.
fn product(x: &Tensor, weight: &QTensor) -> Result<Tensor> {
    x.broadcast_matmul(&weight.dequantize(&Device::Cpu)?.t()?)
}

#[test]
fn linear_is_the_product_of_every_format() -> Result<()> {
    use GgmlDType as G;
    let x = random(&[2, 3, 512]);
    let (exact, auto) = (exact(), Context::new(&Device::Cpu)?);
    for dtype in
        [G::F32, G::F16, G::BF16, G::Q4_0, G::Q4_1, G::Q5_0, G::Q5_1, G::Q8_0, G::Q2K, G::Q3K, G::Q4K, G::Q5K, G::Q6K]
    {
        let weight = quantized(96, 512, dtype);
        let expected = product(&x, &weight)?;
        close(&expected, &Linear::from_qtensor(&exact, &weight)?.forward(&x)?, EXACT);
        let linear = Linear::from_qtensor(&auto, &weight)?;
        close(&expected, &linear.forward(&x)?, EIGHT_BITS);
        // candle rounds its X, too.
        close(&QMatMul::from_qtensor(weight)?.forward(&x)?, &linear.forward(&x)?, 2.0 * EIGHT_BITS);
    }
    Ok(())
}

#[test]
fn linear_has_norm_bias_residual_and_types() -> Result<()> {
    let (ctx, weight) = (exact(), quantized(64, 256, GgmlDType::Q4K));
    let (x, gamma) = (random(&[5, 256]), random(&[256]));
    let (bias, residual) = (random(&[64]), random(&[5, 64]));
    let normed = product(&rms_norm(&x, &gamma, 1e-5)?, &weight)?;
    let linear = Linear::from_qtensor(&ctx, &weight)?.with_norm(&gamma, 1e-5, DType::F32)?.with_bias(&bias)?;
    let expected = (normed.broadcast_add(&bias)? + &residual)?;
    close(&expected, &linear.forward_add(&x, &residual)?, EXACT);

    let half = Linear::from_qtensor(&ctx, &weight)?.forward(&x.to_dtype(DType::F16)?)?;
    assert_eq!(half.dtype(), DType::F16);
    close(&product(&x, &weight)?, &half, 1e-6);
    let wide = Linear::from_qtensor(&ctx, &weight)?.with_output(DType::F32);
    assert_eq!(wide.forward(&x.to_dtype(DType::BF16)?)?.dtype(), DType::F32);
    Ok(())
}

#[test]
fn views_are_read_in_place_and_transposed_ones_copied() -> Result<()> {
    let (ctx, weight) = (exact(), quantized(32, 256, GgmlDType::Q8_0));
    let linear = Linear::from_qtensor(&ctx, &weight)?;
    let (all, table) = (random(&[1 + 4 * 256]), random(&[256, 3]));
    let shifted = all.narrow(0, 1, 4 * 256)?.reshape((4, 256))?; // four bytes behind an aligned address
    close(&product(&shifted, &weight)?, &linear.forward(&shifted)?, EXACT);
    let transposed = table.t()?;
    close(&product(&transposed.contiguous()?, &weight)?, &linear.forward(&transposed)?, EXACT);
    assert_eq!(linear.forward(&random(&[4, 256]).narrow(0, 0, 0)?)?.dims(), [0, 32]);
    Ok(())
}

#[test]
fn gated_is_silu_of_gate_times_up() -> Result<()> {
    let (ctx, x) = (exact(), random(&[4, 256]));
    let (gate, up) = (quantized(96, 256, GgmlDType::Q4_1), random(&[96, 256]).affine(-0.5, 0.1)?);
    let up = QTensor::quantize(&up, GgmlDType::Q4_1)?;
    let pair = Linear::gated(&ctx, &host_weight(&gate)?, &host_weight(&up)?, Activation::Silu)?;
    let expected = (silu(&product(&x, &gate)?)? * product(&x, &up)?)?;
    close(&expected, &pair.forward(&x)?, EXACT);
    Ok(())
}

#[test]
fn fused_products_are_the_separate_ones() -> Result<()> {
    let (ctx, gamma) = (exact(), random(&[256]));
    let weights = [(64, GgmlDType::Q4K), (32, GgmlDType::Q4K), (24, GgmlDType::Q6K)];
    let weights = weights.map(|(n, dtype)| quantized(n, 256, dtype));
    let host: Vec<_> = weights.iter().map(host_weight).collect::<Result<_>>()?;
    let fused = FusedLinear::new(&ctx, &host.iter().collect::<Vec<_>>())?.with_norm(&gamma, 1e-6, DType::F32)?;
    for rows in [1, 3, 40] {
        let x = random(&[rows, 256]);
        let outputs = fused.forward(&x)?.split()?;
        for (weight, output) in weights.iter().zip(&outputs) {
            close(&product(&rms_norm(&x, &gamma, 1e-6)?, weight)?, output, EXACT);
        }
    }
    Ok(())
}

#[test]
fn norm_is_candles() -> Result<()> {
    let (x, gamma) = (random(&[2, 7, 320]), random(&[320]));
    let norm = RmsNorm::new(&exact(), &gamma, 1e-5, DType::F32)?;
    close(&rms_norm(&x, &gamma, 1e-5)?, &norm.forward(&x)?, EXACT);
    Ok(())
}

const SIZE: KvCacheSize = KvCacheSize { layers: 2, sequences: 2, capacity: 48, heads: 6, kv_heads: 2, head_dim: 32 };

/// Attention as in candle's quantized Llama, of `[sequences, tokens, heads, head_dim]`.
struct Reference {
    cache: Option<(Tensor, Tensor)>,
}

impl Reference {
    fn attention(&mut self, q: &Tensor, k: &Tensor, v: &Tensor, position: usize) -> Result<Tensor> {
        let tokens = q.dim(1)?;
        let angles: Vec<f32> = (position..position + tokens)
            .flat_map(|p| (0..SIZE.head_dim / 2).map(move |i| p as f32 * 10_000f32.powf(-2.0 * i as f32 / 32.0)))
            .collect();
        let angles = Tensor::from_vec(angles, (tokens, SIZE.head_dim / 2), &Device::Cpu)?;
        let rotated = |x: &Tensor| rope_i(&x.transpose(1, 2)?.contiguous()?, &angles.cos()?, &angles.sin()?);
        let (q, k, v) = (rotated(q)?, rotated(k)?, v.transpose(1, 2)?.contiguous()?);
        let (k, v) = match self.cache.take() {
            Some((earlier_k, earlier_v)) => (Tensor::cat(&[&earlier_k, &k], 2)?, Tensor::cat(&[&earlier_v, &v], 2)?),
            None => (k, v),
        };
        self.cache = Some((k.clone(), v.clone()));
        let group = SIZE.heads / SIZE.kv_heads;
        let repeat = |x: Tensor| candle_transformers::utils::repeat_kv(x, group);
        let (k, v) = (repeat(k)?, repeat(v)?);
        let scores = (q.matmul(&k.t()?)? / (SIZE.head_dim as f64).sqrt())?;
        let mask: Vec<f32> = (0..tokens)
            .flat_map(|i| (0..position + tokens).map(move |j| if j > position + i { f32::NEG_INFINITY } else { 0.0 }))
            .collect();
        let mask = Tensor::from_vec(mask, (tokens, position + tokens), &Device::Cpu)?;
        let weights = softmax_last_dim(&scores.broadcast_add(&mask)?)?;
        weights.matmul(&v.contiguous()?)?.transpose(1, 2)?.flatten_from(2)
    }
}

#[test]
fn attention_with_a_cache_is_candles() -> Result<()> {
    let ctx = exact();
    let mut cache = KvCache::new(&ctx, SIZE, DType::F32, Some(Rotary::interleaved(SIZE.head_dim)))?;
    let mut reference = Reference { cache: None };
    let mut position = 0;
    for tokens in [9, 1, 4] {
        cache.begin(position, tokens)?;
        let heads = |count: usize| random(&[SIZE.sequences, tokens, count, SIZE.head_dim]);
        let (q, k, v) = (heads(SIZE.heads), heads(SIZE.kv_heads), heads(SIZE.kv_heads).affine(0.5, 0.2)?);
        let expected = reference.attention(&q, &k, &v, position)?;
        close(&expected, &cache.attention_of(1, &q, &k, &v)?, 1e-9);
        position += tokens;
    }
    // A step at an earlier position forgets what came later.
    let (q, k) = (random(&[2, 1, 6, 32]), random(&[2, 1, 2, 32]));
    cache.begin(0, 1)?;
    let expected = Reference { cache: None }.attention(&q, &k, &k, 0)?;
    close(&expected, &cache.attention_of(1, &q, &k, &k.copy()?)?, 1e-9);
    assert!(cache.begin(40, 9).unwrap_err().to_string().contains("expected at most 48 keys, got 49"));
    Ok(())
}

#[test]
fn fused_projections_feed_the_cache() -> Result<()> {
    let ctx = exact();
    let features = [SIZE.heads, SIZE.kv_heads, SIZE.kv_heads].map(|heads| heads * SIZE.head_dim);
    let weights = features.map(|n| quantized(n, 128, GgmlDType::Q8_0));
    let host: Vec<_> = weights.iter().map(host_weight).collect::<Result<_>>()?;
    let fused = FusedLinear::new(&ctx, &host.iter().collect::<Vec<_>>())?;
    let mut cache = KvCache::new(&ctx, SIZE, DType::F32, Some(Rotary::interleaved(SIZE.head_dim)))?;
    let (mut reference, x) = (Reference { cache: None }, random(&[SIZE.sequences, 5, 128]));
    cache.begin(0, 5)?;
    let of = |weight| product(&x, weight)?.reshape((SIZE.sequences, 5, (), SIZE.head_dim));
    let expected = reference.attention(&of(&weights[0])?, &of(&weights[1])?, &of(&weights[2])?, 0)?;
    close(&expected, &cache.attention(0, &fused.forward(&x)?)?, 1e-9);
    Ok(())
}

#[test]
fn experts_are_the_weighted_sum() -> Result<()> {
    let (ctx, experts, top_k) = (exact(), 4, 2);
    let stack = |n: usize, k: usize, scale: f64| -> Result<QTensor> {
        QTensor::quantize(&random(&[experts, n, k]).affine(scale, 0.0)?, GgmlDType::Q4_0)
    };
    let (gate, up, down) = (stack(64, 96, 0.5)?, stack(64, 96, 0.3)?, stack(96, 64, 0.4)?);
    let pairs: Vec<_> = host_experts(&gate)?.into_iter().zip(host_experts(&up)?).collect();
    let packed = HostExperts::gated(&pairs).expect("alike");
    let of_down = HostExperts::new(&host_experts(&down)?).expect("alike");
    let f32 = qgemm_candle::qgemm_api::DType::F32;
    let layer = Experts::new(&ctx, &packed, &of_down, top_k, [DType::F32; 2], |moe| {
        moe.routed(f32, |routing| routing.renormalized()).residual(f32)
    })?;
    for tokens in [1, 3, 17] {
        let (x, logits) = (random(&[tokens, 96]), random(&[tokens, experts]).affine(3.0, 0.0)?);
        let expected = mixture(&x, &logits, [&gate, &up, &down], top_k)?;
        close(&(expected + &x)?, &layer.forward_add(&x, &logits, &x.copy()?)?, EXACT);
    }
    Ok(())
}

/// The layer token by token, as candle's quantized Llama routes.
fn mixture(x: &Tensor, logits: &Tensor, weights: [&QTensor; 3], top_k: usize) -> Result<Tensor> {
    let [gate, up, down] = weights.map(|weight| weight.dequantize(&Device::Cpu).expect("blocks"));
    let token = |t: usize| -> Result<Tensor> {
        let probabilities = softmax_last_dim(&logits.get(t)?)?.to_vec1::<f32>()?;
        let mut order: Vec<usize> = (0..probabilities.len()).collect();
        order.sort_by(|&a, &b| probabilities[b].total_cmp(&probabilities[a]));
        order.truncate(top_k);
        let sum: f32 = order.iter().map(|&e| probabilities[e]).sum();
        let x = x.narrow(0, t, 1)?;
        let of = |e: usize| -> Result<Tensor> {
            let hidden = (silu(&x.matmul(&gate.get(e)?.t()?)?)? * x.matmul(&up.get(e)?.t()?)?)?;
            hidden.matmul(&down.get(e)?.t()?)?.affine((probabilities[e] / sum).into(), 0.0)
        };
        order[1..].iter().try_fold(of(order[0])?, |all, &e| all + of(e)?)
    };
    let rows: Vec<Tensor> = (0..x.dim(0)?).map(token).collect::<Result<_>>()?;
    Tensor::cat(&rows, 0)
}

#[test]
fn what_does_not_fit_is_refused_with_both_values() -> Result<()> {
    let (ctx, weight) = (exact(), quantized(32, 256, GgmlDType::Q4K));
    let linear = Linear::from_qtensor(&ctx, &weight)?;
    let refused = |result: Result<Tensor>, text: &str| {
        let error = result.expect_err(text).to_string();
        assert!(error.contains(text), "{error:?} has no {text:?}");
    };
    refused(linear.forward(&random(&[2, 128])), "X: expected rows of 256, got [2, 128]");
    refused(linear.forward(&random(&[2, 256]).to_dtype(DType::F64)?), "expected f32, f16, bf16 or u32, got f64");
    refused(
        linear.forward_add(&random(&[2, 256]), &random(&[2, 31])),
        "residual: expected F32 [2, 32], got F32 [2, 31]",
    );
    let other = host_weight(&quantized(32, 256, GgmlDType::Q8_0))?;
    let mixed = Linear::gated(&ctx, &host_weight(&weight)?, &other, Activation::Silu);
    assert!(mixed.unwrap_err().to_string().contains("q8_0"));
    let cache = KvCache::new(&ctx, SIZE, DType::F32, None)?;
    let q = random(&[2, 1, 6, 32]);
    refused(cache.attention_of(0, &q, &q, &q), "does not support aliased operands");
    refused(cache.attention_of(0, &q, &q.copy()?, &q.copy()?), "a step begins with");
    assert!(q.sum(D::Minus1).is_ok());
    Ok(())
}

#[test]
fn threads_share_a_layer() -> Result<()> {
    let (ctx, weight, x) = (exact(), quantized(512, 1024, GgmlDType::Q4K), random(&[8, 1024]));
    let linear = Linear::from_qtensor(&ctx, &weight)?;
    let expected = linear.forward(&x)?;
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| close(&expected, &linear.forward(&x).expect("a product"), EXACT));
        }
    });
    Ok(())
}
