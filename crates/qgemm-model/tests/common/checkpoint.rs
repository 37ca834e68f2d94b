//! Small random decoders as GGUF files and as safetensors checkpoints.

use std::fs;
use std::path::{Path, PathBuf};

use qgemm_api::gguf::{GgufArray, GgufHeader, GgufScalar, GgufValue};
use qgemm_api::{Format, quantize};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::fp4_experts;

pub const HIDDEN: usize = 64;
pub const INTERMEDIATE: usize = 96;
pub const HEADS: usize = 4;
pub const KV_HEADS: usize = 2;
/// Not `HIDDEN / HEADS`; a whole block of quantized caches.
pub const HEAD_DIM: usize = 32;
pub const LAYERS: usize = 2;
pub const EXPERTS: usize = 5;
pub const EXPERTS_PER_TOKEN: usize = 2;
/// Not `INTERMEDIATE`; no multiple of the rows that experts are padded to in memory.
pub const EXPERT_INTERMEDIATE: usize = 64;
pub const CONTEXT: usize = 128;
pub const WINDOW: usize = 5;
/// All bytes, then these special tokens.
pub const SPECIAL: [&str; 3] = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"];
pub const VOCABULARY: usize = 256 + SPECIAL.len();
const TEMPLATE: &str = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}\
    {% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

/// Differences among small models.
#[derive(Clone, Copy)]
pub struct Recipe {
    pub architecture: &'static str,
    /// Formats of most weights, and of value projections.
    pub formats: [&'static str; 2],
    pub qkv_bias: bool,
    pub head_norms: bool,
    /// Frequency base.
    pub rotary_base: f64,
    /// Whether rotary frequencies have divisors (`rope_freqs`).
    pub rotary_factors: bool,
    /// Experts instead of dense feed-forward parts.
    pub experts: bool,
    /// First layer with a sliding window, in safetensors.
    pub window_from: Option<usize>,
    /// All layers but every n-th have a sliding window.
    pub window_pattern: Option<usize>,
    /// Second norms of parts.
    pub post_norms: bool,
    /// Whether gammas are stored less 1 in safetensors.
    pub gamma_offset: bool,
    /// Sinks of the query heads.
    pub sinks: bool,
    /// Biases of the output projection, the router and the experts.
    pub biases: bool,
    /// Experts whose values MXFP4 stores exactly, and gpt-oss's tensors of them in safetensors.
    pub fp4_experts: bool,
    /// A tensor that no decoder has.
    pub extra: Option<&'static str>,
}

pub const LLAMA: Recipe = Recipe {
    architecture: "llama",
    formats: ["q8_0", "q8_0"],
    qkv_bias: false,
    head_norms: false,
    rotary_base: 10_000.0,
    rotary_factors: false,
    experts: false,
    window_from: None,
    window_pattern: None,
    post_norms: false,
    gamma_offset: false,
    sinks: false,
    biases: false,
    fp4_experts: false,
    extra: None,
};

impl Recipe {
    /// Name in `config.json`.
    fn model_type(&self) -> &'static str {
        match self.architecture {
            "qwen3moe" => "qwen3_moe",
            "gemma3" => "gemma3_text",
            "gpt-oss" => "gpt_oss",
            other => other,
        }
    }

    /// Name of the norm before the feed-forward part.
    fn ffn_norm(&self) -> &'static str {
        if self.architecture == "gpt-oss" { "post_attention_norm.weight" } else { "ffn_norm.weight" }
    }
}

/// A tensor's name in GGUF, its shape and values.
pub struct Tensor {
    pub name: String,
    pub shape: Vec<usize>,
    pub values: Vec<f32>,
}

/// A tensor of a safetensors file.
#[derive(Clone)]
pub struct Stored {
    pub name: String,
    pub dtype: &'static str,
    pub shape: Vec<usize>,
    pub bytes: Vec<u8>,
}

/// In f32.
impl From<Tensor> for Stored {
    fn from(tensor: Tensor) -> Self {
        Self { name: tensor.name, dtype: "F32", shape: tensor.shape, bytes: bytes(&tensor.values) }
    }
}

/// Random tensors of a model.
pub fn tensors(recipe: &Recipe) -> Vec<Tensor> {
    let mut rng = StdRng::seed_from_u64(11);
    let mut all = Vec::new();
    let mut add = |name: String, shape: &[usize], center: f32, width: f32| {
        let is_fp4 = recipe.fp4_experts && name.ends_with("_exps.weight");
        let mut value = || match is_fp4 {
            true => fp4_experts::E2M1[rng.random_range(0..16)] * 2f32.powi(fp4_experts::EXPONENT),
            false => center + rng.random_range(-width..width),
        };
        let values = (0..shape.iter().product()).map(|_| value()).collect();
        all.push(Tensor { name, shape: shape.to_vec(), values });
    };
    add("token_embd.weight".into(), &[VOCABULARY, HIDDEN], 0.0, 1.0);
    add("output_norm.weight".into(), &[HIDDEN], 1.0, 0.5);
    for layer in 0..LAYERS {
        let name = |part: &str| format!("blk.{layer}.{part}");
        add(name("attn_norm.weight"), &[HIDDEN], 1.0, 0.5);
        add(name(recipe.ffn_norm()), &[HIDDEN], 1.0, 0.5);
        if recipe.post_norms {
            add(name("post_attention_norm.weight"), &[HIDDEN], 1.0, 0.5);
            add(name("post_ffw_norm.weight"), &[HIDDEN], 1.0, 0.5);
        }
        if recipe.sinks {
            add(name("attn_sinks.weight"), &[HEADS], 0.5, 1.0);
        }
        for (part, heads) in [("attn_q", HEADS), ("attn_k", KV_HEADS), ("attn_v", KV_HEADS)] {
            add(name(&format!("{part}.weight")), &[heads * HEAD_DIM, HIDDEN], 0.0, 0.3);
            if recipe.qkv_bias {
                add(name(&format!("{part}.bias")), &[heads * HEAD_DIM], 0.0, 0.5);
            }
        }
        if recipe.head_norms {
            add(name("attn_q_norm.weight"), &[HEAD_DIM], 1.0, 0.5);
            add(name("attn_k_norm.weight"), &[HEAD_DIM], 1.0, 0.5);
        }
        add(name("attn_output.weight"), &[HIDDEN, HEADS * HEAD_DIM], 0.0, 0.3);
        if recipe.biases {
            add(name("attn_output.bias"), &[HIDDEN], 0.0, 0.5);
            add(name("ffn_gate_inp.bias"), &[EXPERTS], 0.0, 0.5);
            add(name("ffn_gate_exps.bias"), &[EXPERTS, EXPERT_INTERMEDIATE], 0.0, 0.5);
            add(name("ffn_up_exps.bias"), &[EXPERTS, EXPERT_INTERMEDIATE], 0.0, 0.5);
            add(name("ffn_down_exps.bias"), &[EXPERTS, HIDDEN], 0.0, 0.5);
        }
        if recipe.experts {
            add(name("ffn_gate_inp.weight"), &[EXPERTS, HIDDEN], 0.0, 0.5);
            add(name("ffn_gate_exps.weight"), &[EXPERTS, EXPERT_INTERMEDIATE, HIDDEN], 0.0, 0.3);
            add(name("ffn_up_exps.weight"), &[EXPERTS, EXPERT_INTERMEDIATE, HIDDEN], 0.0, 0.3);
            add(name("ffn_down_exps.weight"), &[EXPERTS, HIDDEN, EXPERT_INTERMEDIATE], 0.0, 0.5);
        } else {
            add(name("ffn_gate.weight"), &[INTERMEDIATE, HIDDEN], 0.0, 0.3);
            add(name("ffn_up.weight"), &[INTERMEDIATE, HIDDEN], 0.0, 0.3);
            add(name("ffn_down.weight"), &[HIDDEN, INTERMEDIATE], 0.0, 0.3);
        }
    }
    if recipe.rotary_factors {
        add("rope_freqs.weight".into(), &[HEAD_DIM / 2], 4.0, 3.0);
    }
    if let Some(extra) = recipe.extra {
        add(extra.into(), &[HIDDEN], 1.0, 0.5);
    }
    all
}

/// Writes a model as GGUF.
pub fn write_gguf(folder: &Path, recipe: &Recipe) -> PathBuf {
    let path = folder.join(format!("{}.gguf", recipe.architecture));
    let format = |tensor: &Tensor| -> Format {
        // Converters leave routers in f32.
        let is_plain =
            tensor.shape.len() == 1 || tensor.name.contains("ffn_gate_inp") || tensor.name.ends_with(".bias");
        let name = match is_plain {
            true => "f32",
            false => recipe.formats[usize::from(tensor.name.contains("attn_v"))],
        };
        name.parse().expect("a format")
    };
    let mut header = GgufHeader::new();
    metadata(&mut header, recipe);
    write_tensors(&path, header, &tensors(recipe), format);
    path
}

/// Writes a GGUF file of these tensors.
pub fn write_tensors(path: &Path, mut header: GgufHeader, all: &[Tensor], format: impl Fn(&Tensor) -> Format) {
    for tensor in all {
        header.tensor(&tensor.name, &tensor.shape, format(tensor)).expect("it fits");
    }
    let mut writer = header.write(fs::File::create(path).expect("writable")).expect("writable");
    for tensor in all {
        match tensor.shape[..] {
            [.., k] if tensor.shape.len() > 1 => {
                let n = tensor.values.len() / k;
                let (weight, _) = quantize(&tensor.values, n, k, format(tensor)).expect("K suits");
                writer.tensor(weight.blocks()).expect("the right size");
            }
            _ => writer.tensor(&bytes(&tensor.values)).expect("the right size"),
        }
    }
    writer.finish().expect("complete");
}

fn metadata(header: &mut GgufHeader, recipe: &Recipe) {
    let mut add = |key: &str, value: GgufValue| header.metadata(key, value).expect("a new key");
    let architecture = recipe.architecture;
    add("general.architecture", architecture.into());
    let experts = if recipe.experts { EXPERTS } else { 0 };
    let numbers = [
        ("block_count", LAYERS),
        ("embedding_length", HIDDEN),
        ("feed_forward_length", INTERMEDIATE),
        ("attention.head_count", HEADS),
        ("attention.head_count_kv", KV_HEADS),
        ("attention.key_length", HEAD_DIM),
        ("context_length", CONTEXT),
        ("expert_count", experts),
        ("expert_used_count", EXPERTS_PER_TOKEN),
        ("expert_feed_forward_length", EXPERT_INTERMEDIATE),
    ];
    for (key, value) in numbers {
        add(&format!("{architecture}.{key}"), (value as u32).into());
    }
    add(&format!("{architecture}.attention.layer_norm_rms_epsilon"), GgufScalar::F32(1e-5).into());
    add(&format!("{architecture}.rope.freq_base"), GgufScalar::F32(recipe.rotary_base as f32).into());
    if let Some(every) = recipe.window_pattern {
        add(&format!("{architecture}.attention.sliding_window"), (WINDOW as u32).into());
        add(&format!("{architecture}.attention.sliding_window_pattern"), (every as u32).into());
    }
    add_tokenizer(header);
}

/// Adds the tokenizer and the chat template.
pub fn add_tokenizer(header: &mut GgufHeader) {
    let mut add = |key: &str, value: GgufValue| header.metadata(key, value).expect("a new key");
    let strings = |items: Vec<String>| GgufValue::Array(GgufArray::Strings(items));
    add("tokenizer.ggml.model", "gpt2".into());
    add("tokenizer.ggml.pre", "smollm".into());
    add("tokenizer.ggml.tokens", strings(vocabulary()));
    add("tokenizer.ggml.merges", strings(Vec::new()));
    let types: Vec<u8> = (0..VOCABULARY).flat_map(|id| if id < 256 { 1u32 } else { 3 }.to_le_bytes()).collect();
    add("tokenizer.ggml.token_type", GgufValue::Array(GgufArray::Scalars { kind: 4, bytes: types.into() }));
    add("tokenizer.ggml.eos_token_id", 258u32.into());
    add("tokenizer.chat_template", TEMPLATE.into());
}

/// Writes a model as a checkpoint folder of `transformers`, in f32.
pub fn write_safetensors(folder: &Path, recipe: &Recipe) {
    let all = tensors(recipe);
    let layers = if recipe.fp4_experts { 0..LAYERS } else { 0..0 };
    let experts: Vec<Stored> = layers.flat_map(|layer| fp4_experts::of_layer(layer, &all)).collect();
    let others = all.into_iter().filter(|tensor| !recipe.fp4_experts || !tensor.name.contains("_exps."));
    let others = others.flat_map(|tensor| of_transformers(recipe, tensor)).map(Stored::from);
    write_checkpoint(folder, others.chain(experts));
    let mut config = serde_json::json!({
        "model_type": recipe.model_type(), "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM,
        "num_hidden_layers": LAYERS, "rms_norm_eps": 1e-5, "rope_theta": recipe.rotary_base, "max_position_embeddings": CONTEXT,
        "eos_token_id": 258, "tie_word_embeddings": true,
    });
    if recipe.experts {
        config["num_experts"] = EXPERTS.into();
        config["num_experts_per_tok"] = EXPERTS_PER_TOKEN.into();
        config["moe_intermediate_size"] = EXPERT_INTERMEDIATE.into();
        config["norm_topk_prob"] = true.into();
    }
    if recipe.fp4_experts {
        config["quantization_config"] = serde_json::json!({ "quant_method": "mxfp4" });
    }
    if let Some(every) = recipe.window_pattern {
        config["sliding_window"] = WINDOW.into();
        config["sliding_window_pattern"] = every.into();
    }
    if let Some(first) = recipe.window_from {
        config["sliding_window"] = WINDOW.into();
        config["use_sliding_window"] = true.into();
        config["max_window_layers"] = first.into();
    }
    write_config(folder, &config);
}

/// Writes the configuration of a checkpoint and its tokenizer.
pub fn write_config(folder: &Path, config: &serde_json::Value) {
    fs::write(folder.join("config.json"), config.to_string()).expect("writable");
    fs::write(folder.join("tokenizer.json"), tokenizer_json().to_string()).expect("writable");
    let tokenizer_config = serde_json::json!({ "eos_token": { "content": "<|im_end|>" }, "chat_template": TEMPLATE });
    fs::write(folder.join("tokenizer_config.json"), tokenizer_config.to_string()).expect("writable");
}

/// Writes tensors as `model.safetensors`.
pub fn write_checkpoint(folder: &Path, tensors: impl IntoIterator<Item = impl Into<Stored>>) {
    let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
    for tensor in tensors.into_iter().map(Into::into) {
        let begin = data.len();
        data.extend(&tensor.bytes);
        let entry =
            serde_json::json!({ "dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [begin, data.len()] });
        header.insert(tensor.name, entry);
    }
    let header = serde_json::Value::from(header).to_string().into_bytes();
    let file = [&(header.len() as u64).to_le_bytes()[..], &header, &data].concat();
    fs::write(folder.join("model.safetensors"), file).expect("writable");
}

fn tokenizer_json() -> serde_json::Value {
    let tokens = vocabulary();
    let ids: serde_json::Map<_, _> = tokens.iter().cloned().zip((0..).map(|id: u32| id.into())).collect();
    let added: Vec<_> = (256..VOCABULARY)
        .map(|id| {
            serde_json::json!({ "id": id, "content": tokens[id], "special": true, "normalized": false,
                "single_word": false, "lstrip": false, "rstrip": false })
        })
        .collect();
    serde_json::json!({
        "version": "1.0",
        "added_tokens": added,
        "pre_tokenizer": { "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true },
        "decoder": { "type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true },
        "model": { "type": "BPE", "vocab": ids, "merges": [] },
    })
}

/// A tensor of GGUF as a checkpoint of `transformers` has it: a stack of experts is a tensor for each.
fn of_transformers(recipe: &Recipe, mut tensor: Tensor) -> Vec<Tensor> {
    if recipe.gamma_offset && tensor.name.contains("norm") {
        tensor.values.iter_mut().for_each(|gamma| *gamma -= 1.0);
    }
    let name = hugging_face_name(recipe, &tensor.name);
    let &[experts, n, k] = &tensor.shape[..] else { return vec![Tensor { name, ..tensor }] };
    let expert = |(i, values): (usize, &[f32])| Tensor {
        name: name.replace("{}", &i.to_string()),
        shape: vec![n, k],
        values: values.to_vec(),
    };
    assert_eq!(experts * n * k, tensor.values.len());
    tensor.values.chunks_exact(n * k).enumerate().map(expert).collect()
}

fn hugging_face_name(recipe: &Recipe, gguf: &str) -> String {
    let ffn_norm = if recipe.post_norms { "pre_feedforward_layernorm" } else { "post_attention_layernorm" };
    let names = [
        ("token_embd", "model.embed_tokens"),
        ("output_norm", "model.norm"),
        ("blk.", "model.layers."),
        ("attn_norm", "input_layernorm"),
        ("ffn_norm", ffn_norm),
        ("post_attention_norm", "post_attention_layernorm"),
        ("post_ffw_norm", "post_feedforward_layernorm"),
        ("attn_q_norm", "self_attn.q_norm"),
        ("attn_k_norm", "self_attn.k_norm"),
        ("attn_q.", "self_attn.q_proj."),
        ("attn_k.", "self_attn.k_proj."),
        ("attn_v.", "self_attn.v_proj."),
        ("attn_output", "self_attn.o_proj"),
        ("attn_sinks.weight", "self_attn.sinks"),
        ("ffn_gate_inp", if recipe.architecture == "gpt-oss" { "mlp.router" } else { "mlp.gate" }),
        ("ffn_gate_exps", "mlp.experts.{}.gate_proj"),
        ("ffn_up_exps", "mlp.experts.{}.up_proj"),
        ("ffn_down_exps", "mlp.experts.{}.down_proj"),
        ("ffn_gate", "mlp.gate_proj"),
        ("ffn_up", "mlp.up_proj"),
        ("ffn_down", "mlp.down_proj"),
    ];
    names.iter().fold(gguf.to_owned(), |name, (from, to)| name.replace(from, to))
}

/// GPT-2's characters of all bytes, then special tokens.
fn vocabulary() -> Vec<String> {
    let is_printable = |byte: u32| matches!(byte, 33..=126 | 161..=172 | 174..=255);
    let mut others = 256..;
    let bytes = (0..256).map(|byte| if is_printable(byte) { byte } else { others.next().expect("endless") });
    let characters: Vec<String> = bytes.map(|c| char::from_u32(c).expect("a character").to_string()).collect();
    characters.into_iter().chain(SPECIAL.map(str::to_owned)).collect()
}

/// Values in f32.
pub fn bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}
