//! Fuzz target: checkpoints of one layer. Settings are mutated as
//! JSON and as text, tensors in name, type, shape and contents.

use std::collections::BTreeMap;

use half::f16;
use qgemm_formats::SharedBytes;
use qgemm_formats::model::{Model, ModelOptions, NamedFile};
use rand::Rng;
use rand::rngs::StdRng;
use serde_json::{Value, json};

use super::layer::{Tensor, Tensors, Values};
use super::meaning::meanings;
use super::{FuzzCase, FuzzTarget, FuzzVerdict, mutate};
use crate::random::pick;

/// Keys and values of settings.
const WORDS: &[&str] = &[
    "gptq",
    "awq",
    "fp8",
    "auto-round",
    "compressed-tensors",
    "modelopt",
    "bitsandbytes",
    "gptq_v2",
    "gemm",
    "gemv",
    "marlin",
    "auto_round",
    "auto_round:auto_gptq",
    "auto_round:gptqmodel",
    "auto_round:auto_awq",
    "ue8m0",
    "float",
    "int",
    "quant_method",
    "bits",
    "w_bit",
    "group_size",
    "q_group_size",
    "checkpoint_format",
    "packing_format",
    "version",
    "weight_block_size",
    "scale_fmt",
    "quantization_config",
    "compression_config",
    "text_config",
    "dynamic",
    "extra_config",
    "sym",
    "zero_point",
    "desc_act",
    "config_groups",
    "num_bits",
    "symmetric",
    "strategy",
    "model_type",
];
/// Tensor names of layers.
const PARTS: &[&str] = &[
    ".weight",
    ".qweight",
    ".qzeros",
    ".scales",
    ".biases",
    ".SCB",
    ".g_idx",
    ".weight_scale",
    ".weight_scale_inv",
    ".weight_scale_2",
    ".weight_packed",
    ".weight_global_scale",
    ".weight_zero_point",
    ".weight_shape",
    ".weight_g_idx",
    ".scale",
    "_blocks",
    "_scales",
    ".bias",
    ".input_scale",
    ".more",
];
const TYPES: &[&str] =
    &["F32", "F16", "BF16", "I32", "I8", "U8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "I64", "U32", "BOOL"];

/// A checkpoint and its meaning.
struct Seed {
    name: String,
    settings: Option<Value>,
    tensors: Tensors,
    values: Values,
}

/// Mutated checkpoints of GPTQ, AWQ, pack-quantized, MLX, INT8, FP8, MXFP4
/// and NVFP4.
pub struct CheckpointTarget(Vec<Seed>);

impl CheckpointTarget {
    /// # Panics
    /// When a checkpoint's meaning is not what it was made from.
    pub fn new() -> Self {
        let target = Self(seeds());
        for seed in &target.0 {
            let text = seed.settings.as_ref().map(Value::to_string);
            assert!(meanings(text.as_deref(), &seed.tensors).iter().any(|v| same(v, &seed.values)), "{}", seed.name);
            let read = read(text.as_deref(), &file_of(&seed.tensors));
            assert!(read.as_ref().is_some_and(|v| same(v, &seed.values)), "{} is not read", seed.name);
        }
        target
    }
}

impl Default for CheckpointTarget {
    fn default() -> Self {
        Self::new()
    }
}

/// The layer's values as the library reads them; `None` if it
/// refuses the checkpoint.
fn read(settings: Option<&str>, file: &[u8]) -> Option<Values> {
    let file = NamedFile { name: "model.safetensors".into(), contents: SharedBytes::from(file.to_vec()) };
    let settings = settings.map(|text| NamedFile { name: "config.json".to_owned(), contents: text });
    let model = Model::from_files(&[file], settings.as_slice(), ModelOptions::default()).ok()?;
    model.tensors().iter().for_each(|tensor| drop(model.dense(&tensor.name)));
    let weight = model.weight("layer").ok()?;
    Some((0..weight.n()).flat_map(|row| weight.dequantize_row(row)).collect())
}

/// Whether values are equal. Any NaN equals any other.
fn same(a: &[f32], b: &[f32]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a == b || a.is_nan() && b.is_nan())
}

/// A safetensors file.
fn file_of(tensors: &Tensors) -> Vec<u8> {
    let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
    for (name, Tensor { dtype, shape, bytes }) in tensors {
        let offsets = [data.len(), data.len() + bytes.len()];
        header.insert(name.clone(), json!({ "dtype": dtype, "shape": shape, "data_offsets": offsets }));
        data.extend(bytes);
    }
    let header = Value::Object(header).to_string();
    [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &data].concat()
}

/// The tensors of a safetensors file, parsed by the format's
/// definition; `None` if invalid.
fn tensors_of(file: &[u8]) -> Option<Tensors> {
    let (length, rest) = file.split_first_chunk::<8>()?;
    let (header, data) = rest.split_at_checked(usize::try_from(u64::from_le_bytes(*length)).ok()?)?;
    let header: BTreeMap<String, Value> = serde_json::from_slice(header).ok()?;
    let tensor = |info: &Value| -> Option<Tensor> {
        let offset = |i: usize| usize::try_from(info["data_offsets"][i].as_u64()?).ok();
        let shape =
            info["shape"].as_array()?.iter().map(|v| usize::try_from(v.as_u64()?).ok()).collect::<Option<_>>()?;
        Some(Tensor {
            dtype: info["dtype"].as_str()?.to_owned(),
            shape,
            bytes: data.get(offset(0)?..offset(1)?)?.to_vec(),
        })
    };
    let tensors = header.iter().filter(|(name, _)| *name != "__metadata__");
    tensors.map(|(name, info)| Some((name.clone(), tensor(info)?))).collect()
}

/// Mutates a tensor's name, type, shape or contents.
fn mutate_tensors(rng: &mut StdRng, tensors: &mut Tensors) -> String {
    let names: Vec<String> = tensors.keys().cloned().collect();
    let Some(name) = (!names.is_empty()).then(|| names[rng.random_range(0..names.len())].clone()) else {
        return "nothing".into();
    };
    let Some(mut tensor) = tensors.remove(&name) else { return "nothing".into() };
    let (mut called, mut said) = (name.clone(), String::new());
    match rng.random_range(0..8) {
        0 => return format!("{name}: removed"),
        1 => {
            called = format!("layer{}", pick(rng, PARTS));
            said = format!("{name}: renamed to {called}");
        }
        2 => {
            let before = tensor.dtype.clone();
            tensor.dtype = pick(rng, TYPES).into();
            said = format!("{name}: {before} as {}", tensor.dtype);
        }
        3 => {
            let before = tensor.shape.clone();
            reshape(rng, &mut tensor.shape);
            said = format!("{name}: shape {before:?} as {:?}", tensor.shape);
        }
        4 => {
            // One row more or less, in contents and shape.
            if let Some(first) = tensor.shape.first_mut().filter(|rows| (1..4096).contains(*rows)) {
                let row = tensor.bytes.len() / *first;
                let more = rng.random_ratio(1, 2);
                *first = if more { *first + 1 } else { *first - 1 };
                tensor.bytes.resize(row * *first, 1);
                said = format!("{name}: shape {:?}", tensor.shape);
            }
        }
        _ => {
            let length = tensor.bytes.len();
            let at = rng.random_range(0..length.max(1));
            if let Some(byte) = tensor.bytes.get_mut(at) {
                *byte = rng.random();
                said = format!("{name}: byte {at} is {byte}");
            }
        }
    }
    tensors.insert(called, tensor);
    said
}

fn reshape(rng: &mut StdRng, shape: &mut Vec<usize>) {
    match (rng.random_range(0..5), shape.len()) {
        (0, _) => shape.reverse(),
        (1, _) => shape.push(1),
        (2, 2..) => {
            let last = shape.pop().unwrap_or(1);
            if let Some(before) = shape.last_mut() {
                *before = before.saturating_mul(last);
            }
        }
        (3, 1..) => {
            let at = rng.random_range(0..shape.len());
            shape[at] = pick(rng, &[0, 1, 2, 3, 1 << 31, 1 << 62, usize::MAX]);
        }
        (_, 2..) => {
            let (at, factor) = (rng.random_range(0..shape.len() - 1), pick(rng, &[2, 4, 8]));
            if shape[at].is_multiple_of(factor) {
                (shape[at], shape[at + 1]) = (shape[at] / factor, shape[at + 1].saturating_mul(factor));
            } else {
                shape.swap(at, at + 1);
            }
        }
        _ => shape.insert(0, 1),
    }
}

impl FuzzTarget for CheckpointTarget {
    fn name(&self) -> &'static str {
        "checkpoints"
    }

    fn draw<'a>(&'a self, rng: &mut StdRng) -> FuzzCase<'a> {
        let seed = &self.0[rng.random_range(0..self.0.len())];
        let (mut settings, mut tensors) = (seed.settings.clone(), seed.tensors.clone());
        let mut said = vec![seed.name.clone()];
        let (mut as_text, mut raw) = (false, false);
        for _ in 0..rng.random_range(1..4) {
            match (rng.random_range(0..10), &mut settings) {
                (0..=4, Some(settings)) => said.push(mutate::json(rng, settings, WORDS)),
                (5, Some(_)) => as_text = true,
                (6, _) => raw = true,
                _ => said.push(mutate_tensors(rng, &mut tensors)),
            }
        }
        let mut text = settings.as_ref().map(Value::to_string);
        if let Some(text) = text.as_mut().filter(|_| as_text) {
            said.push(mutate::text(rng, text));
        }
        let mut file = file_of(&tensors);
        if raw {
            let header = file.first_chunk::<8>().map_or(8, |length| 8 + u64::from_le_bytes(*length) as usize);
            said.push(mutate::bytes(rng, &mut file, header));
        }
        let judge = move || {
            let Some(values) = read(text.as_deref(), &file) else { return FuzzVerdict::Refused };
            let tensors = tensors_of(&file).unwrap_or_default();
            let meant = || meanings(text.as_deref(), &tensors);
            if same(&values, &seed.values) || meant().iter().any(|meaning| same(meaning, &values)) {
                return FuzzVerdict::Accepted;
            }
            let settings: String = text.iter().flat_map(|text| text.chars().take(600)).collect();
            let shapes: Vec<String> =
                tensors.iter().map(|(name, t)| format!("{name} {} {:?}", t.dtype, t.shape)).collect();
            FuzzVerdict::Wrong(format!(
                "{} meanings, none of which is {:?}…; tensors {shapes:?}; settings {settings}",
                meant().len(),
                values.get(..3)
            ))
        };
        FuzzCase { mutations: said.join("; "), read: Box::new(judge) }
    }
}

/// A deterministic stream of numbers.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, limit: u32) -> u32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) % u64::from(limit)) as u32
    }

    fn bytes(&mut self, count: usize) -> Vec<u8> {
        // Finite in both FP8 types.
        (0..count).map(|_| (self.below(0x78) | self.below(2) << 7) as u8).collect()
    }

    fn f16(&mut self, count: usize) -> Vec<u8> {
        (0..count).flat_map(|_| f16::from_f32(0.01 + self.below(500) as f32 * 1e-3).to_le_bytes()).collect()
    }

    fn f32(&mut self, count: usize) -> Vec<u8> {
        (0..count).flat_map(|_| (0.01 + self.below(500) as f32 * 1e-3).to_le_bytes()).collect()
    }

    fn powers(&mut self, count: usize) -> Vec<u8> {
        (0..count).map(|_| 120 + self.below(10) as u8).collect()
    }
}

fn tensor(dtype: &str, shape: &[usize], bytes: Vec<u8>) -> Tensor {
    Tensor { dtype: dtype.into(), shape: shape.to_vec(), bytes }
}

fn seed(name: impl Into<String>, settings: Option<Value>, tensors: Vec<(&str, Tensor)>) -> Seed {
    let tensors: Tensors = tensors.into_iter().map(|(part, tensor)| (format!("layer{part}"), tensor)).collect();
    let text = settings.as_ref().map(Value::to_string);
    let values = meanings(text.as_deref(), &tensors).into_iter().next().unwrap_or_default();
    Seed { name: name.into(), settings, tensors, values }
}

fn seeds() -> Vec<Seed> {
    let mut numbers = Numbers(7);
    let mut seeds = grouped_seeds(&mut numbers);
    seeds.extend(pack_quantized_seeds(&mut numbers));
    seeds.extend(mlx_seeds(&mut numbers));
    seeds.extend(eight_bit_seeds(&mut numbers));
    seeds.extend(four_bit_seeds(&mut numbers));
    seeds
}

fn grouped_seeds(numbers: &mut Numbers) -> Vec<Seed> {
    let mut seeds = Vec::new();
    let (n, k) = (32, 192);
    for (bits, group, format, is_ordered) in [
        (4, 64, "gptq", false),
        (4, 32, "gptq_v2", false),
        (8, 64, "gptq", true),
        (3, 96, "gptq", false),
        (2, 192, "gptq_v2", true),
    ] {
        let groups = k / group;
        let mut tensors = vec![
            (".qweight", tensor("I32", &[k * bits / 32, n], numbers.bytes(k * bits / 8 * n))),
            (".qzeros", tensor("I32", &[groups, n * bits / 32], numbers.bytes(groups * n * bits / 8))),
            (".scales", tensor("F16", &[groups, n], numbers.f16(groups * n))),
        ];
        if is_ordered {
            let order: Vec<u8> = (0..k as u32).flat_map(|column| (column * 7 % groups as u32).to_le_bytes()).collect();
            tensors.push((".g_idx", tensor("I32", &[k], order)));
        }
        let settings = json!({ "quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": is_ordered,
            "sym": false, "checkpoint_format": format });
        let name = format!("GPTQ of {bits} bits in groups of {group}, {format}");
        let nested = json!({ "model_type": "llama", "architectures": ["LlamaForCausalLM"], "quantization_config": settings.clone() });
        seeds.push(seed(name, Some(if bits == 4 { nested } else { settings }), tensors));
    }
    seeds.extend(symmetric_seeds(numbers));
    let groups = k / 64;
    let awq = vec![
        (".qweight", tensor("I32", &[k, n / 8], numbers.bytes(k * n / 2))),
        (".qzeros", tensor("I32", &[groups, n / 8], numbers.bytes(groups * n / 2))),
        (".scales", tensor("F16", &[groups, n], numbers.f16(groups * n))),
    ];
    let settings = json!({ "quantization_config": { "quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm",
        "zero_point": true, "modules_to_not_convert": null }, "model_type": "qwen2" });
    seeds.push(seed("AWQ", Some(settings), awq));
    seeds
}

/// GPTQ and AutoRound layers whose zero points are all 8, stored, mislabelled or left out.
fn symmetric_seeds(numbers: &mut Numbers) -> Vec<Seed> {
    let (n, k, groups) = (32, 128, 2);
    let gptq = json!({ "quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": false, "sym": true,
        "checkpoint_format": "gptq" });
    let auto_round = |packing: &str| {
        json!({ "quantization_config": { "quant_method": "auto-round", "bits": 4, "group_size": 64, "sym": true,
            "packing_format": packing } })
    };
    let mut symmetric = |name: &str, settings: Value, stored: Option<u8>| {
        let mut tensors = vec![
            (".qweight", tensor("I32", &[k / 8, n], numbers.bytes(k / 2 * n))),
            (".scales", tensor("F16", &[groups, n], numbers.f16(groups * n))),
        ];
        if let Some(stored) = stored {
            tensors.push((".qzeros", tensor("I32", &[groups, n / 8], vec![stored | stored << 4; groups * n / 2])));
        }
        seed(name, Some(settings), tensors)
    };
    vec![
        symmetric("symmetric GPTQ", gptq.clone(), Some(7)),
        symmetric("symmetric GPTQ v2 labelled v1", gptq.clone(), Some(8)),
        symmetric("symmetric GPTQ without qzeros", gptq, None),
        symmetric("AutoRound", auto_round("auto_round"), Some(8)),
        symmetric("AutoRound, packed as AutoGPTQ", auto_round("auto_round:auto_gptq"), Some(7)),
    ]
}

fn pack_quantized_seeds(numbers: &mut Numbers) -> Vec<Seed> {
    let (n, k, groups) = (24usize, 128usize, 4usize);
    let settings = |bits: usize, symmetric: bool| {
        Some(json!({ "model_type": "llama", "quantization_config": { "quant_method": "compressed-tensors",
            "format": "pack-quantized", "config_groups": { "group_0": { "targets": ["Linear"], "weights": { "num_bits": bits,
            "type": "int", "strategy": "group", "group_size": k / groups, "symmetric": symmetric } } } } }))
    };
    let shape: Vec<u8> = [n as i64, k as i64].iter().flat_map(|d| d.to_le_bytes()).collect();
    let mut packed = |name: &str, bits: usize, symmetric: bool| {
        let words = k * bits / 32;
        let mut tensors = vec![
            (".weight_packed", tensor("I32", &[n, words], numbers.bytes(n * words * 4))),
            (".weight_scale", tensor("F16", &[n, groups], numbers.f16(n * groups))),
            (".weight_shape", tensor("I64", &[2], shape.clone())),
        ];
        if !symmetric {
            let words = (n * bits).div_ceil(32);
            tensors.push((".weight_zero_point", tensor("I32", &[words, groups], numbers.bytes(words * groups * 4))));
        }
        seed(name, settings(bits, symmetric), tensors)
    };
    vec![
        packed("pack-quantized, 4 bits", 4, true),
        packed("pack-quantized, 4 bits with zero points", 4, false),
        packed("pack-quantized, 3 bits", 3, false),
        packed("pack-quantized, 8 bits", 8, true),
    ]
}

fn mlx_seeds(numbers: &mut Numbers) -> Vec<Seed> {
    let (n, k) = (24usize, 128usize);
    let settings = |bits: usize, group: usize, mode: &str| {
        let stated = json!({ "group_size": group, "bits": bits, "mode": mode });
        Some(json!({ "model_type": "qwen3", "quantization_config": stated }))
    };
    let mut seeds = Vec::new();
    for (bits, group) in [(4usize, 64usize), (8, 32), (3, 64), (6, 128)] {
        let (words, groups) = (k * bits / 32, k / group);
        let tensors = vec![
            (".weight", tensor("U32", &[n, words], numbers.bytes(n * words * 4))),
            (".scales", tensor("F16", &[n, groups], numbers.f16(n * groups))),
            (".biases", tensor("F16", &[n, groups], numbers.f16(n * groups))),
        ];
        seeds.push(seed(format!("MLX, {bits} bits in groups of {group}"), settings(bits, group, "affine"), tensors));
    }
    let tensors = vec![
        (".weight", tensor("U32", &[n, k / 8], numbers.bytes(n * k / 2))),
        (".scales", tensor("U8", &[n, k / 32], numbers.powers(n * k / 32))),
    ];
    seeds.push(seed("MLX MXFP4", settings(4, 32, "mxfp4"), tensors));
    let eight = json!({ "quantization_config": { "quant_method": "bitsandbytes", "load_in_8bit": true } });
    let tensors =
        vec![(".weight", tensor("I8", &[n, k], numbers.bytes(n * k))), (".SCB", tensor("F32", &[n], numbers.f32(n)))];
    seeds.push(seed("LLM.int8()", Some(eight), tensors));
    seeds
}

fn eight_bit_seeds(numbers: &mut Numbers) -> Vec<Seed> {
    let (n, k) = (130, 160);
    let weight = |dtype: &str| (".weight", tensor(dtype, &[n, k], Numbers(dtype.len() as u64).bytes(n * k)));
    let fp8 = |more: Value| {
        let mut settings = json!({ "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic" });
        settings.as_object_mut().into_iter().for_each(|map| map.extend(more.as_object().cloned().unwrap_or_default()));
        Some(json!({ "model_type": "deepseek_v3", "quantization_config": settings }))
    };
    let group = json!({ "group_0": { "targets": ["Linear"], "weights": { "num_bits": 8, "type": "float", "strategy": "channel",
        "symmetric": true, "dynamic": false, "group_size": null, "block_structure": null }, "input_activations": { "num_bits": 8,
        "type": "float", "strategy": "token", "dynamic": true } } });
    let compressed = json!({ "model_type": "llama", "quantization_config": { "quant_method": "compressed-tensors",
        "format": "float-quantized", "config_groups": group, "ignore": ["lm_head"] } });
    vec![
        seed(
            "FP8 of blocks",
            fp8(json!({ "weight_block_size": [128, 128] })),
            vec![weight("F8_E4M3"), (".weight_scale_inv", tensor("F32", &[2, 2], numbers.f32(4)))],
        ),
        seed(
            "FP8 of MX blocks",
            fp8(json!({ "weight_block_size": [1, 32], "scale_fmt": "ue8m0" })),
            vec![weight("F8_E4M3"), (".weight_scale_inv", tensor("U8", &[n, 5], numbers.powers(n * 5)))],
        ),
        seed(
            "FP8 of a tensor",
            fp8(json!({})),
            vec![weight("F8_E5M2"), (".weight_scale", tensor("F32", &[1], numbers.f32(1)))],
        ),
        seed(
            "FP8 of channels",
            Some(compressed),
            vec![weight("F8_E4M3"), (".weight_scale", tensor("BF16", &[n, 1], numbers.f16(n)))],
        ),
        seed(
            "INT8 with zero points",
            None,
            vec![
                weight("I8"),
                (".weight_scale", tensor("F32", &[n, 1], numbers.f32(n))),
                (".weight_zero_point", tensor("I8", &[n, 1], numbers.bytes(n))),
            ],
        ),
        seed("INT8", None, vec![weight("I8"), (".weight_scale", tensor("F32", &[n], numbers.f32(n)))]),
    ]
}

fn four_bit_seeds(numbers: &mut Numbers) -> Vec<Seed> {
    let (n, k) = (24, 128);
    let modelopt = json!({ "quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16 });
    let compressed = json!({ "quantization_config": { "quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized",
        "config_groups": { "group_0": { "weights": { "num_bits": 4, "type": "float", "group_size": 16 } } } } });
    let (codes, scales) = (
        tensor("U8", &[n, k / 2], numbers.bytes(n * k / 2)),
        tensor("F8_E4M3", &[n, k / 16], numbers.bytes(n * k / 16)),
    );
    let factor = tensor("F32", &[1], 0.25f32.to_le_bytes().to_vec());
    vec![
        seed(
            "MXFP4",
            Some(json!({ "quantization_config": { "quant_method": "mxfp4" } })),
            vec![
                ("_blocks", tensor("U8", &[n, k / 32, 16], numbers.bytes(n * k / 2))),
                ("_scales", tensor("U8", &[n, k / 32], numbers.powers(n * k / 32))),
            ],
        ),
        seed(
            "MXFP4 in rows",
            None,
            vec![
                (".weight", tensor("U8", &[n, k / 2], numbers.bytes(n * k / 2))),
                (".weight_scale", tensor("F8_E8M0", &[n, k / 32], numbers.powers(n * k / 32))),
            ],
        ),
        seed(
            "NVFP4",
            Some(modelopt),
            vec![(".weight", codes.clone()), (".weight_scale", scales.clone()), (".weight_scale_2", factor.clone())],
        ),
        seed(
            "NVFP4, packed",
            Some(compressed),
            vec![(".weight_packed", codes), (".weight_scale", scales), (".weight_global_scale", factor)],
        ),
    ]
}
