//! Tensor names of decoders, without `.weight`.

/// Names of one file format.
#[derive(Debug)]
pub struct TensorNames {
    /// Embedding; also the output head if there is no `head`.
    pub embedding: &'static str,
    /// Norm before the head.
    pub output_norm: &'static str,
    /// Output head.
    pub head: &'static str,
    /// Prefix of a layer, before its number.
    pub layer: &'static str,
    /// Norm before attention.
    pub attention_norm: &'static str,
    /// Query, key and value.
    pub qkv: [&'static str; 3],
    /// Norms of the heads of queries and keys.
    pub head_norms: [&'static str; 2],
    /// Output projection of attention.
    pub attention_output: &'static str,
    /// Norm of attention's result, in architectures with second norms.
    pub attention_post_norm: &'static str,
    /// Sinks of the query heads, in architectures with sinks.
    pub sinks: &'static str,
    /// Norm before the feed-forward part.
    pub ffn_norm: &'static str,
    /// Norm of the feed-forward part's result, in architectures with second norms.
    pub ffn_post_norm: &'static str,
    /// Gate projection.
    pub gate: &'static str,
    /// Up projection.
    pub up: &'static str,
    /// Down projection.
    pub down: &'static str,
    /// Router and experts.
    pub experts: ExpertNames,
    /// Divisors of rotary frequencies, one for each pair.
    pub rotary_factors: &'static str,
}

/// Names of a layer of experts: a stack each, or a tensor for each expert, whose number is `{}`.
/// Gate and up with one name are a stack of alternating rows.
#[derive(Debug)]
pub struct ExpertNames {
    /// Router.
    pub router: &'static str,
    /// Gate projections.
    pub gate: &'static str,
    /// Up projections.
    pub up: &'static str,
    /// Down projections.
    pub down: &'static str,
}

/// GGUF.
pub static GGUF: TensorNames = PLAIN_GGUF;

/// GGUF files of Gemma 3.
pub static GGUF_GEMMA3: TensorNames =
    TensorNames { attention_post_norm: "post_attention_norm", ffn_post_norm: "post_ffw_norm", ..PLAIN_GGUF };

/// GGUF files of gpt-oss, where the norm before the feed-forward part has the name of another.
pub static GGUF_GPT_OSS: TensorNames =
    TensorNames { sinks: "attn_sinks", ffn_norm: "post_attention_norm", ..PLAIN_GGUF };

/// Names of most GGUF files.
const PLAIN_GGUF: TensorNames = TensorNames {
    embedding: "token_embd",
    output_norm: "output_norm",
    head: "output",
    layer: "blk.",
    attention_norm: "attn_norm",
    qkv: ["attn_q", "attn_k", "attn_v"],
    head_norms: ["attn_q_norm", "attn_k_norm"],
    attention_output: "attn_output",
    attention_post_norm: "",
    sinks: "",
    ffn_norm: "ffn_norm",
    ffn_post_norm: "",
    gate: "ffn_gate",
    up: "ffn_up",
    down: "ffn_down",
    experts: ExpertNames { router: "ffn_gate_inp", gate: "ffn_gate_exps", up: "ffn_up_exps", down: "ffn_down_exps" },
    rotary_factors: "rope_freqs",
};

/// Checkpoints of `transformers`, in safetensors.
pub static HUGGING_FACE: TensorNames = PLAIN;

/// Checkpoints of Mixtral, whose experts have names of their own.
pub static MIXTRAL: TensorNames = TensorNames {
    experts: ExpertNames {
        router: "block_sparse_moe.gate",
        gate: "block_sparse_moe.experts.{}.w1",
        up: "block_sparse_moe.experts.{}.w3",
        down: "block_sparse_moe.experts.{}.w2",
    },
    ..PLAIN
};

/// Checkpoints of Gemma 3, whose layers have four norms.
pub static GEMMA3: TensorNames = TensorNames {
    attention_post_norm: "post_attention_layernorm",
    ffn_norm: "pre_feedforward_layernorm",
    ffn_post_norm: "post_feedforward_layernorm",
    ..PLAIN
};

/// Checkpoints of gpt-oss.
pub static GPT_OSS: TensorNames = TensorNames {
    sinks: "self_attn.sinks",
    experts: ExpertNames {
        router: "mlp.router",
        gate: "mlp.experts.gate_up_proj",
        up: "mlp.experts.gate_up_proj",
        down: "mlp.experts.down_proj",
    },
    ..PLAIN
};

/// Names of most checkpoints of `transformers`.
const PLAIN: TensorNames = TensorNames {
    embedding: "model.embed_tokens",
    output_norm: "model.norm",
    head: "lm_head",
    layer: "model.layers.",
    attention_norm: "input_layernorm",
    qkv: ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    head_norms: ["self_attn.q_norm", "self_attn.k_norm"],
    attention_output: "self_attn.o_proj",
    attention_post_norm: "",
    sinks: "",
    ffn_norm: "post_attention_layernorm",
    ffn_post_norm: "",
    gate: "mlp.gate_proj",
    up: "mlp.up_proj",
    down: "mlp.down_proj",
    experts: ExpertNames {
        router: "mlp.gate",
        gate: "mlp.experts.{}.gate_proj",
        up: "mlp.experts.{}.up_proj",
        down: "mlp.experts.{}.down_proj",
    },
    rotary_factors: "",
};
