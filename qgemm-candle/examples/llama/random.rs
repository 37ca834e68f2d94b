//! A model of random weights,
//! for times without a download.

use std::borrow::Cow;
use std::io::Cursor;

use candle_core::quantized::gguf_file::{self, Value};
use candle_core::quantized::{GgmlDType, QStorage, QTensor};
use candle_core::{Device, Error, Result};
use qgemm_candle::qgemm_api::{DType, quantize};

const HIDDEN: usize = 4096;
const FEED_FORWARD: usize = 14_336;
const HEADS: usize = 32;
const KV_HEADS: usize = 8;
const HEAD_DIM: usize = HIDDEN / HEADS;
const VOCABULARY: usize = 32_000;

/// GGUF file of `layers` equal layers,
/// in the shapes of Llama 3 8B and in Q4_K.
pub fn model(layers: usize) -> Result<Vec<u8>> {
    let of_model = [
        ("token_embd", matrix(1, VOCABULARY, HIDDEN)?),
        ("output", matrix(2, VOCABULARY, HIDDEN)?),
        ("output_norm", ones()?),
    ];
    let of_layer = [
        ("attn_norm", ones()?),
        ("attn_q", matrix(3, HIDDEN, HIDDEN)?),
        ("attn_k", matrix(4, KV_HEADS * HEAD_DIM, HIDDEN)?),
        ("attn_v", matrix(5, KV_HEADS * HEAD_DIM, HIDDEN)?),
        ("attn_output", matrix(6, HIDDEN, HIDDEN)?),
        ("ffn_norm", ones()?),
        ("ffn_gate", matrix(7, FEED_FORWARD, HIDDEN)?),
        ("ffn_up", matrix(8, FEED_FORWARD, HIDDEN)?),
        ("ffn_down", matrix(9, HIDDEN, FEED_FORWARD)?),
    ];
    let of_model = of_model.iter().map(|(name, tensor)| (format!("{name}.weight"), tensor));
    let of_layers =
        (0..layers).flat_map(|i| of_layer.iter().map(move |(name, tensor)| (format!("blk.{i}.{name}.weight"), tensor)));
    let tensors: Vec<(String, &QTensor)> = of_model.chain(of_layers).collect();
    let metadata = [
        ("general.architecture", Value::String("llama".into())),
        ("llama.attention.head_count", Value::U32(HEADS as u32)),
        ("llama.attention.head_count_kv", Value::U32(KV_HEADS as u32)),
        ("llama.attention.layer_norm_rms_epsilon", Value::F32(1e-5)),
        ("llama.block_count", Value::U32(layers as u32)),
        ("llama.embedding_length", Value::U32(HIDDEN as u32)),
        ("llama.rope.dimension_count", Value::U32(HEAD_DIM as u32)),
        ("llama.rope.freq_base", Value::F32(500_000.0)),
    ];
    let mut file = Cursor::new(Vec::new());
    let metadata: Vec<(&str, &Value)> = metadata.iter().map(|(key, value)| (*key, value)).collect();
    let tensors: Vec<(&str, &QTensor)> = tensors.iter().map(|(name, tensor)| (&**name, *tensor)).collect();
    gguf_file::write(&mut file, &metadata, &tensors)?;
    Ok(file.into_inner())
}

/// Weights that keep the magnitude
/// of normalized rows.
fn matrix(seed: u32, n: usize, k: usize) -> Result<QTensor> {
    let scale = (3.0 / k as f32).sqrt();
    let mut state = seed;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        scale * (state as f32 / u32::MAX as f32 * 2.0 - 1.0)
    };
    let values: Vec<f32> = (0..n * k).map(|_| next()).collect();
    let format = "q4_k".parse().map_err(Error::wrap)?;
    let (weight, _) = quantize(&values, n, k, format).map_err(Error::wrap)?;
    let blocks = QStorage::from_data(Cow::Borrowed(weight.blocks()), &Device::Cpu, GgmlDType::Q4K)?;
    QTensor::new(blocks, (n, k))
}

fn ones() -> Result<QTensor> {
    let values = DType::F32.encode(&vec![1.0; HIDDEN]);
    QTensor::new(QStorage::from_data(Cow::Owned(values), &Device::Cpu, GgmlDType::F32)?, HIDDEN)
}
