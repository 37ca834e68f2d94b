//! Small random decoders with recurrent layers, as GGUF files and
//! as safetensors checkpoints.

use std::path::{Path, PathBuf};

use qgemm_api::gguf::{GgufArray, GgufHeader, GgufScalar, GgufValue};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serde_json::{Value, json};

use super::checkpoint::{
    CONTEXT, EXPERT_INTERMEDIATE, EXPERTS, EXPERTS_PER_TOKEN, HEAD_DIM, HEADS, HIDDEN, INTERMEDIATE, KV_HEADS, Tensor,
    VOCABULARY, add_tokenizer, write_checkpoint, write_config, write_tensors,
};

/// Heads of values, and of keys.
pub const VALUE_HEADS: usize = 4;
pub const KEY_HEADS: usize = 2;
/// Features of a key, and of a value.
pub const KEY_DIM: usize = 16;
pub const VALUE_DIM: usize = 32;
/// Features of all keys, and of all values.
pub const KEYS: usize = KEY_HEADS * KEY_DIM;
pub const VALUES: usize = VALUE_HEADS * VALUE_DIM;
/// Taps of the convolution of linear attention, and of LFM2's.
pub const WIDTH: usize = 4;
pub const CONV_WIDTH: usize = 3;
/// Features of the shared expert.
pub const SHARED: usize = 96;
/// Rotated features of a head in Qwen3-Next.
pub const ROTATED: usize = HEAD_DIM / 4;

/// A kind of model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hybrid {
    Lfm2,
    Qwen3Next,
    Qwen35,
    NemotronH,
}

impl Hybrid {
    pub const ALL: [Self; 4] = [Self::Lfm2, Self::Qwen3Next, Self::Qwen35, Self::NemotronH];

    pub fn name(self) -> &'static str {
        match self {
            Self::Lfm2 => "lfm2",
            Self::Qwen3Next => "qwen3next",
            Self::Qwen35 => "qwen35",
            Self::NemotronH => "nemotron_h",
        }
    }

    /// A letter for each layer: `*` attention, `M` recurrent, `-` a
    /// feed-forward part alone.
    pub fn layers(self) -> &'static str {
        match self {
            Self::Lfm2 => "M*M",
            Self::Qwen3Next => "MMM*",
            Self::Qwen35 => "M*",
            Self::NemotronH => "M*-M",
        }
    }

    /// Whether layers have one part.
    pub fn has_one_part(self) -> bool {
        self == Self::NemotronH
    }

    pub fn has_experts(self) -> bool {
        self == Self::Qwen3Next
    }

    pub fn is_qwen(self) -> bool {
        matches!(self, Self::Qwen3Next | Self::Qwen35)
    }

    /// Name of the norm before the feed-forward part of a layer with
    /// two parts.
    pub fn ffn_norm(self) -> &'static str {
        if self.is_qwen() { "post_attention_norm" } else { "ffn_norm" }
    }
}

/// Random tensors of a model, by their names in GGUF files.
pub fn tensors(kind: Hybrid) -> Vec<Tensor> {
    let mut made = Made { rng: StdRng::seed_from_u64(23), all: Vec::new() };
    made.add("token_embd.weight", &[VOCABULARY, HIDDEN], -1.0..1.0);
    let last = if kind == Hybrid::Lfm2 { "token_embd_norm.weight" } else { "output_norm.weight" };
    made.add(last, &[HIDDEN], 0.5..1.5);
    for (layer, part) in kind.layers().chars().enumerate() {
        let layer = Layer { kind, layer };
        made.add(&layer.name("attn_norm.weight"), &[HIDDEN], 0.5..1.5);
        match part {
            '*' => layer.attention(&mut made),
            'M' if kind == Hybrid::Lfm2 => layer.short_conv(&mut made),
            'M' => layer.linear(&mut made),
            _ => layer.feed_forward(&mut made),
        }
        if !kind.has_one_part() {
            made.add(&layer.name(&format!("{}.weight", kind.ffn_norm())), &[HIDDEN], 0.5..1.5);
            layer.feed_forward(&mut made);
        }
    }
    made.all
}

struct Made {
    rng: StdRng,
    all: Vec<Tensor>,
}

impl Made {
    fn add(&mut self, name: &str, shape: &[usize], range: std::ops::Range<f32>) {
        let values = (0..shape.iter().product()).map(|_| self.rng.random_range(range.clone())).collect();
        self.all.push(Tensor { name: name.to_owned(), shape: shape.to_vec(), values });
    }
}

#[derive(Clone, Copy)]
struct Layer {
    kind: Hybrid,
    layer: usize,
}

impl Layer {
    fn name(&self, part: &str) -> String {
        format!("blk.{}.{part}", self.layer)
    }

    fn attention(&self, made: &mut Made) {
        let gates = if self.kind.is_qwen() { 2 } else { 1 };
        made.add(&self.name("attn_q.weight"), &[gates * HEADS * HEAD_DIM, HIDDEN], -0.3..0.3);
        made.add(&self.name("attn_k.weight"), &[KV_HEADS * HEAD_DIM, HIDDEN], -0.3..0.3);
        made.add(&self.name("attn_v.weight"), &[KV_HEADS * HEAD_DIM, HIDDEN], -0.3..0.3);
        made.add(&self.name("attn_output.weight"), &[HIDDEN, HEADS * HEAD_DIM], -0.3..0.3);
        if self.kind != Hybrid::NemotronH {
            made.add(&self.name("attn_q_norm.weight"), &[HEAD_DIM], 0.5..1.5);
            made.add(&self.name("attn_k_norm.weight"), &[HEAD_DIM], 0.5..1.5);
        }
    }

    fn short_conv(&self, made: &mut Made) {
        made.add(&self.name("shortconv.in_proj.weight"), &[3 * HIDDEN, HIDDEN], -0.3..0.3);
        made.add(&self.name("shortconv.conv.weight"), &[HIDDEN, CONV_WIDTH], -1.0..1.0);
        made.add(&self.name("shortconv.out_proj.weight"), &[HIDDEN, HIDDEN], -0.3..0.3);
    }

    fn linear(&self, made: &mut Made) {
        let (channels, heads) = (2 * KEYS + VALUES, VALUE_HEADS);
        match self.kind {
            Hybrid::NemotronH => {
                made.add(&self.name("ssm_in.weight"), &[VALUES + channels + heads, HIDDEN], -0.3..0.3);
                made.add(&self.name("ssm_conv1d.bias"), &[channels], -0.5..0.5);
                made.add(&self.name("ssm_d"), &[heads, 1], -1.0..1.0);
                made.add(&self.name("ssm_norm.weight"), &[KEY_HEADS, VALUES / KEY_HEADS], 0.5..1.5);
            }
            _ => {
                made.add(&self.name("attn_qkv.weight"), &[channels, HIDDEN], -0.3..0.3);
                made.add(&self.name("attn_gate.weight"), &[VALUES, HIDDEN], -0.3..0.3);
                made.add(&self.name("ssm_norm.weight"), &[VALUE_DIM], 0.5..1.5);
            }
        }
        match self.kind {
            Hybrid::Qwen3Next => made.add(&self.name("ssm_ba.weight"), &[2 * heads, HIDDEN], -0.3..0.3),
            Hybrid::Qwen35 => {
                made.add(&self.name("ssm_beta.weight"), &[heads, HIDDEN], -0.3..0.3);
                made.add(&self.name("ssm_alpha.weight"), &[heads, HIDDEN], -0.3..0.3);
            }
            _ => {}
        }
        made.add(&self.name("ssm_conv1d.weight"), &[channels, WIDTH], -1.0..1.0);
        let of_heads = if self.kind == Hybrid::NemotronH { vec![heads, 1] } else { vec![heads] };
        made.add(&self.name("ssm_a"), &of_heads, -1.5..-0.1);
        made.add(&self.name("ssm_dt.bias"), &[heads], -2.0..0.0);
        made.add(&self.name("ssm_out.weight"), &[HIDDEN, VALUES], -0.3..0.3);
    }

    fn feed_forward(&self, made: &mut Made) {
        if !self.kind.has_experts() {
            if self.kind != Hybrid::NemotronH {
                made.add(&self.name("ffn_gate.weight"), &[INTERMEDIATE, HIDDEN], -0.3..0.3);
            }
            made.add(&self.name("ffn_up.weight"), &[INTERMEDIATE, HIDDEN], -0.3..0.3);
            made.add(&self.name("ffn_down.weight"), &[HIDDEN, INTERMEDIATE], -0.3..0.3);
            return;
        }
        made.add(&self.name("ffn_gate_inp.weight"), &[EXPERTS, HIDDEN], -0.5..0.5);
        made.add(&self.name("ffn_gate_exps.weight"), &[EXPERTS, EXPERT_INTERMEDIATE, HIDDEN], -0.3..0.3);
        made.add(&self.name("ffn_up_exps.weight"), &[EXPERTS, EXPERT_INTERMEDIATE, HIDDEN], -0.3..0.3);
        made.add(&self.name("ffn_down_exps.weight"), &[EXPERTS, HIDDEN, EXPERT_INTERMEDIATE], -0.5..0.5);
        made.add(&self.name("ffn_gate_inp_shexp.weight"), &[HIDDEN], -0.5..0.5);
        made.add(&self.name("ffn_gate_shexp.weight"), &[SHARED, HIDDEN], -0.3..0.3);
        made.add(&self.name("ffn_up_shexp.weight"), &[SHARED, HIDDEN], -0.3..0.3);
        made.add(&self.name("ffn_down_shexp.weight"), &[HIDDEN, SHARED], -0.3..0.3);
    }
}

/// Writes a model as GGUF, with weights in `format`.
pub fn write_gguf(folder: &Path, kind: Hybrid, format: &str) -> PathBuf {
    let path = folder.join(format!("{}.gguf", kind.name()));
    // Converters leave these in f32.
    const PLAIN: [&str; 7] = ["ffn_gate_inp", "conv1d", "shortconv.conv", "ssm_a", "ssm_d", "ssm_norm", "ssm_ba"];
    let of = |tensor: &Tensor| {
        let is_plain = tensor.shape.len() == 1 || PLAIN.iter().any(|part| tensor.name.contains(part));
        (if is_plain { "f32" } else { format }).parse().expect("a format")
    };
    let mut header = GgufHeader::new();
    metadata(&mut header, kind);
    add_tokenizer(&mut header);
    write_tensors(&path, header, &tensors(kind), of);
    path
}

fn metadata(header: &mut GgufHeader, kind: Hybrid) {
    let mut add = |key: &str, value: GgufValue| header.metadata(key, value).expect("a new key");
    add("general.architecture", kind.name().into());
    let of_layers = |value: usize, letters: &str| {
        let bytes = kind.layers().chars().flat_map(|letter| {
            let value = if letters.contains(letter) { value as u32 } else { 0 };
            value.to_le_bytes()
        });
        GgufValue::Array(GgufArray::Scalars { kind: 4, bytes: bytes.collect::<Vec<u8>>().into() })
    };
    let number = |value: usize| GgufValue::from(value as u32);
    let lists = matches!(kind, Hybrid::Lfm2 | Hybrid::NemotronH);
    let mut pairs = vec![
        ("block_count", number(kind.layers().len())),
        ("embedding_length", number(HIDDEN)),
        ("context_length", number(CONTEXT)),
        ("attention.head_count", number(HEADS)),
        ("attention.head_count_kv", if lists { of_layers(KV_HEADS, "*") } else { number(KV_HEADS) }),
        ("attention.key_length", number(HEAD_DIM)),
        ("attention.layer_norm_rms_epsilon", GgufScalar::F32(1e-5).into()),
        ("feed_forward_length", if kind.has_one_part() { of_layers(INTERMEDIATE, "-") } else { number(INTERMEDIATE) }),
    ];
    match kind {
        Hybrid::Lfm2 => pairs.push(("shortconv.l_cache", number(CONV_WIDTH))),
        _ => pairs.extend([
            ("ssm.conv_kernel", number(WIDTH)),
            ("ssm.inner_size", number(VALUES)),
            ("ssm.state_size", number(KEY_DIM)),
            ("ssm.time_step_rank", number(VALUE_HEADS)),
            ("ssm.group_count", number(KEY_HEADS)),
        ]),
    }
    if kind.is_qwen() {
        pairs.push(("rope.dimension_count", number(ROTATED)));
        pairs.push(("full_attention_interval", number(kind.layers().len())));
    }
    if kind.has_experts() {
        pairs.extend([
            ("expert_count", number(EXPERTS)),
            ("expert_used_count", number(EXPERTS_PER_TOKEN)),
            ("expert_feed_forward_length", number(EXPERT_INTERMEDIATE)),
            ("expert_shared_feed_forward_length", number(SHARED)),
        ]);
    }
    pairs.into_iter().for_each(|(key, value)| add(&format!("{}.{key}", kind.name()), value));
}

/// Writes a model as a checkpoint folder of `transformers`, in
/// f32.
pub fn write_safetensors(folder: &Path, kind: Hybrid) {
    write_checkpoint(folder, of_transformers(kind, tensors(kind)));
    write_config(folder, &config(kind));
}

fn config(kind: Hybrid) -> Value {
    let mut config = json!({
        "model_type": kind.name(), "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM,
        "num_hidden_layers": kind.layers().len(), "max_position_embeddings": CONTEXT,
        "eos_token_id": 258, "tie_word_embeddings": true,
    });
    let of_delta = json!({
        "rms_norm_eps": 1e-5, "partial_rotary_factor": 0.25, "full_attention_interval": kind.layers().len(),
        "linear_conv_kernel_dim": WIDTH, "linear_num_value_heads": VALUE_HEADS, "linear_num_key_heads": KEY_HEADS,
        "linear_key_head_dim": KEY_DIM, "linear_value_head_dim": VALUE_DIM, "hidden_act": "silu",
    });
    let more = match kind {
        Hybrid::Lfm2 => {
            let types: Vec<&str> =
                kind.layers().chars().map(|letter| if letter == '*' { "full_attention" } else { "conv" }).collect();
            json!({ "norm_eps": 1e-5, "conv_L_cache": CONV_WIDTH, "layer_types": types,
                "block_auto_adjust_ff_dim": true, "block_ff_dim": 3 * INTERMEDIATE / 2 - 16, "block_multiple_of": 32,
                "block_ffn_dim_multiplier": 1.0 })
        }
        Hybrid::Qwen3Next => {
            let mut config = of_delta;
            config["model_type"] = "qwen3_next".into();
            config["num_experts"] = EXPERTS.into();
            config["num_experts_per_tok"] = EXPERTS_PER_TOKEN.into();
            config["moe_intermediate_size"] = EXPERT_INTERMEDIATE.into();
            config["shared_expert_intermediate_size"] = SHARED.into();
            config["norm_topk_prob"] = true.into();
            config
        }
        Hybrid::Qwen35 => {
            let mut config = of_delta;
            config["model_type"] = "qwen3_5_text".into();
            config
        }
        Hybrid::NemotronH => json!({
            "layer_norm_epsilon": 1e-5, "hybrid_override_pattern": kind.layers(), "conv_kernel": WIDTH,
            "mamba_num_heads": VALUE_HEADS, "n_groups": KEY_HEADS, "ssm_state_size": KEY_DIM,
            "mamba_head_dim": VALUE_DIM, "mlp_hidden_act": "relu2", "mamba_hidden_act": "silu",
            "time_step_limit": [0.0, 1e38],
        }),
    };
    let more = more.as_object().expect("an object").clone();
    config.as_object_mut().expect("an object").extend(more);
    config
}

/// Tensors with the names, shapes, order and offsets of
/// `transformers`.
fn of_transformers(kind: Hybrid, all: Vec<Tensor>) -> Vec<Tensor> {
    let mut found: Vec<Tensor> = Vec::new();
    for mut tensor in all {
        let part = tensor.name.rsplit("blk.").next().unwrap_or_default().to_owned();
        if kind.is_qwen() && part.contains("norm.weight") && !part.contains("ssm_norm") {
            tensor.values.iter_mut().for_each(|gamma| *gamma -= 1.0);
        }
        if part.ends_with("ssm_a") {
            tensor.values.iter_mut().for_each(|rate| *rate = (-*rate).ln());
        }
        match tensor.shape[..] {
            [channels, width] if part.contains("conv1d") || part.contains("shortconv.conv") => {
                tensor.shape = vec![channels, 1, width];
            }
            _ if ["ssm_a", "ssm_d", "ssm_norm.weight"].iter().any(|end| part.ends_with(end)) => {
                tensor.shape = vec![tensor.values.len()];
            }
            [k] if part.ends_with("ffn_gate_inp_shexp.weight") => tensor.shape = vec![1, k],
            _ => {}
        }
        if kind == Hybrid::Qwen35 {
            group_heads(&mut tensor, &part);
        }
        tensor.name = hugging_face_name(kind, &tensor.name);
        match (&tensor.shape[..], tensor.name.contains("{}")) {
            (&[count, n, k], true) => found.extend((0..count).map(|expert| Tensor {
                name: tensor.name.replace("{}", &expert.to_string()),
                shape: vec![n, k],
                values: tensor.values[expert * n * k..][..n * k].to_vec(),
            })),
            _ => found.push(tensor),
        }
    }
    if kind == Hybrid::Qwen3Next { interleaved(found) } else { found }
}

/// Heads of values in the order of `transformers`: those of a key
/// head are neighbours.
fn group_heads(tensor: &mut Tensor, part: &str) {
    let shared = VALUE_HEADS / KEY_HEADS;
    let tiled = |head: usize| head % shared * KEY_HEADS + head / shared;
    let columns = tensor.shape[1..].iter().product::<usize>();
    let (first, rows) = match part.split_once('.').map_or("", |(_, part)| part) {
        "attn_qkv.weight" | "ssm_conv1d.weight" => (2 * KEYS, VALUE_DIM),
        "attn_gate.weight" => (0, VALUE_DIM),
        "ssm_beta.weight" | "ssm_alpha.weight" | "ssm_a" | "ssm_dt.bias" => (0, 1),
        "ssm_out.weight" => {
            let old = tensor.values.clone();
            for (row, new) in tensor.values.chunks_exact_mut(VALUES).enumerate() {
                for (column, value) in new.iter_mut().enumerate() {
                    *value = old[row * VALUES + tiled(column / VALUE_DIM) * VALUE_DIM + column % VALUE_DIM];
                }
            }
            return;
        }
        _ => return,
    };
    let old = tensor.values.clone();
    for head in 0..VALUE_HEADS {
        let (to, from) = ((first + head * rows) * columns, (first + tiled(head) * rows) * columns);
        tensor.values[to..to + rows * columns].copy_from_slice(&old[from..from + rows * columns]);
    }
}

/// Qwen3-Next's `in_proj_qkvz`: query, key, values and gates of
/// one key head after the other.
fn interleaved(all: Vec<Tensor>) -> Vec<Tensor> {
    let (gates, mut others): (Vec<_>, Vec<_>) = all.into_iter().partition(|tensor| tensor.name.contains("in_proj_z."));
    for gate in gates {
        let name = gate.name.replace("in_proj_z.", "in_proj_qkv.");
        let qkv = others.iter_mut().find(|tensor| tensor.name == name).expect("beside its gate");
        let values = VALUES / KEY_HEADS;
        let row =
            |tensor: &[f32], first: usize, count: usize| tensor[first * HIDDEN..(first + count) * HIDDEN].to_vec();
        let of_head = |head: usize| {
            [
                row(&qkv.values, head * KEY_DIM, KEY_DIM),
                row(&qkv.values, KEYS + head * KEY_DIM, KEY_DIM),
                row(&qkv.values, 2 * KEYS + head * values, values),
                row(&gate.values, head * values, values),
            ]
            .concat()
        };
        let all: Vec<f32> = (0..KEY_HEADS).flat_map(of_head).collect();
        let shape = vec![all.len() / HIDDEN, HIDDEN];
        *qkv = Tensor { name: name.replace("in_proj_qkv.", "in_proj_qkvz."), shape, values: all };
    }
    others
}

fn hugging_face_name(kind: Hybrid, gguf: &str) -> String {
    let names: &[(&str, &str)] = match kind {
        Hybrid::Lfm2 => &[
            ("token_embd_norm", "model.embedding_norm"),
            ("attn_norm", "operator_norm"),
            ("shortconv", "conv"),
            ("attn_q_norm", "self_attn.q_layernorm"),
            ("attn_k_norm", "self_attn.k_layernorm"),
            ("attn_output", "self_attn.out_proj"),
            ("ffn_gate", "feed_forward.w1"),
            ("ffn_up", "feed_forward.w3"),
            ("ffn_down", "feed_forward.w2"),
        ],
        Hybrid::NemotronH => &[
            ("token_embd", "backbone.embeddings"),
            ("output_norm", "backbone.norm_f"),
            ("blk.", "backbone.layers."),
            ("attn_norm", "norm"),
            ("attn_q", "mixer.q_proj"),
            ("attn_k", "mixer.k_proj"),
            ("attn_v", "mixer.v_proj"),
            ("attn_output", "mixer.o_proj"),
            ("ffn_up", "mixer.up_proj"),
            ("ffn_down", "mixer.down_proj"),
            ("ssm_in", "mixer.in_proj"),
            ("ssm_d.", "mixer.D."),
            ("ssm_dt.bias", "mixer.dt_bias"),
            ("ssm_", "mixer."),
        ],
        _ => &[
            ("post_attention_norm", "post_attention_layernorm"),
            ("attn_qkv", "linear_attn.in_proj_qkv"),
            ("attn_gate", "linear_attn.in_proj_z"),
            ("ssm_ba", "linear_attn.in_proj_ba"),
            ("ssm_beta", "linear_attn.in_proj_b"),
            ("ssm_alpha", "linear_attn.in_proj_a"),
            ("ssm_dt.bias", "linear_attn.dt_bias"),
            ("ssm_", "linear_attn."),
            ("ffn_gate_inp_shexp", "mlp.shared_expert_gate"),
            ("ffn_gate_shexp", "mlp.shared_expert.gate_proj"),
            ("ffn_up_shexp", "mlp.shared_expert.up_proj"),
            ("ffn_down_shexp", "mlp.shared_expert.down_proj"),
        ],
    };
    let common = [
        ("token_embd", "model.embed_tokens"),
        ("output_norm", "model.norm"),
        ("blk.", "model.layers."),
        ("attn_norm", "input_layernorm"),
        ("attn_q_norm", "self_attn.q_norm"),
        ("attn_k_norm", "self_attn.k_norm"),
        ("attn_q.", "self_attn.q_proj."),
        ("attn_k.", "self_attn.k_proj."),
        ("attn_v.", "self_attn.v_proj."),
        ("attn_output", "self_attn.o_proj"),
        ("ffn_gate_inp", "mlp.gate"),
        ("ffn_gate_exps", "mlp.experts.{}.gate_proj"),
        ("ffn_up_exps", "mlp.experts.{}.up_proj"),
        ("ffn_down_exps", "mlp.experts.{}.down_proj"),
        ("ffn_gate", "mlp.gate_proj"),
        ("ffn_up", "mlp.up_proj"),
        ("ffn_down", "mlp.down_proj"),
    ];
    // The last part of some names, which are parts of others.
    const ENDS: [(&str, &str); 5] = [
        ("mixer.a", "mixer.A_log"),
        ("mixer.d", "mixer.D"),
        ("mixer.out.weight", "mixer.out_proj.weight"),
        ("linear_attn.a", "linear_attn.A_log"),
        ("linear_attn.out.weight", "linear_attn.out_proj.weight"),
    ];
    let name = names.iter().chain(&common).fold(gguf.to_owned(), |name, (from, to)| name.replace(from, to));
    match ENDS.iter().find(|(end, _)| name.ends_with(end)) {
        Some((end, to)) => format!("{}{to}", name.trim_end_matches(end)),
        None => name,
    }
}
