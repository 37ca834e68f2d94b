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
    /// Short convolution: input projection, kernel, output projection.
    pub short_conv: [&'static str; 3],
    /// Linear attention.
    pub linear: LinearNames,
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
    /// Gate of the shared expert: a row.
    pub shared_gate: &'static str,
    /// Gate, up and down of the shared expert.
    pub shared: [&'static str; 3],
}

/// Names of linear attention: gated delta rule or Mamba-2.
///
/// Projections with one name are rows of one tensor.
#[derive(Debug)]
pub struct LinearNames {
    /// Queries, keys and values, and the gate of the result.
    pub projections: [&'static str; 2],
    /// β and the summand of the time step.
    pub gates: [&'static str; 2],
    /// Kernel of the convolution.
    pub conv: &'static str,
    /// Logarithm of the decay rate. The rate itself, negative, in GGUF files.
    pub a_log: &'static str,
    /// Bias of the time step.
    pub dt_bias: &'static str,
    /// Factor of values in the result (Mamba-2).
    pub skip: &'static str,
    /// Norm of the result.
    pub norm: &'static str,
    /// Output projection.
    pub output: &'static str,
}

impl LinearNames {
    /// Names of architectures without it.
    const NONE: Self =
        Self { projections: [""; 2], gates: [""; 2], conv: "", a_log: "", dt_bias: "", skip: "", norm: "", output: "" };
}

/// GGUF.
pub static GGUF: TensorNames = PLAIN_GGUF;

/// GGUF files of Gemma 3.
pub static GGUF_GEMMA3: TensorNames =
    TensorNames { attention_post_norm: "post_attention_norm", ffn_post_norm: "post_ffw_norm", ..PLAIN_GGUF };

/// GGUF files of gpt-oss, where the norm before the feed-forward part has the name of another.
pub static GGUF_GPT_OSS: TensorNames =
    TensorNames { sinks: "attn_sinks", ffn_norm: "post_attention_norm", ..PLAIN_GGUF };

/// GGUF files of LFM2, where the last norm has the name of the embedding's.
pub static GGUF_LFM2: TensorNames = TensorNames {
    output_norm: "token_embd_norm",
    short_conv: ["shortconv.in_proj", "shortconv.conv", "shortconv.out_proj"],
    ..PLAIN_GGUF
};

/// GGUF files of Qwen3-Next.
pub static GGUF_QWEN3_NEXT: TensorNames =
    TensorNames { ffn_norm: "post_attention_norm", linear: GGUF_DELTA, ..PLAIN_GGUF };

/// GGUF files of Qwen3.5.
pub static GGUF_QWEN35: TensorNames = TensorNames {
    ffn_norm: "post_attention_norm",
    linear: LinearNames { gates: ["ssm_beta", "ssm_alpha"], ..GGUF_DELTA },
    ..PLAIN_GGUF
};

/// GGUF files of Nemotron-H, whose layers have one norm.
pub static GGUF_NEMOTRON_H: TensorNames = TensorNames {
    ffn_norm: "attn_norm",
    gate: "",
    linear: LinearNames { projections: ["ssm_in"; 2], gates: ["", "ssm_in"], skip: "ssm_d", ..GGUF_DELTA },
    ..PLAIN_GGUF
};

const GGUF_DELTA: LinearNames = LinearNames {
    projections: ["attn_qkv", "attn_gate"],
    gates: ["ssm_ba"; 2],
    conv: "ssm_conv1d",
    a_log: "ssm_a",
    dt_bias: "ssm_dt.bias",
    skip: "",
    norm: "ssm_norm",
    output: "ssm_out",
};

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
    short_conv: [""; 3],
    linear: LinearNames::NONE,
    attention_post_norm: "",
    sinks: "",
    ffn_norm: "ffn_norm",
    ffn_post_norm: "",
    gate: "ffn_gate",
    up: "ffn_up",
    down: "ffn_down",
    experts: ExpertNames {
        router: "ffn_gate_inp",
        gate: "ffn_gate_exps",
        up: "ffn_up_exps",
        down: "ffn_down_exps",
        shared_gate: "ffn_gate_inp_shexp",
        shared: ["ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp"],
    },
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
        ..PLAIN_EXPERTS
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
        ..PLAIN_EXPERTS
    },
    ..PLAIN
};

/// Checkpoints of LFM2.
pub static LFM2: TensorNames = TensorNames {
    output_norm: "model.embedding_norm",
    attention_norm: "operator_norm",
    head_norms: ["self_attn.q_layernorm", "self_attn.k_layernorm"],
    attention_output: "self_attn.out_proj",
    short_conv: ["conv.in_proj", "conv.conv", "conv.out_proj"],
    ffn_norm: "ffn_norm",
    gate: "feed_forward.w1",
    up: "feed_forward.w3",
    down: "feed_forward.w2",
    ..PLAIN
};

/// Checkpoints of Qwen3-Next.
pub static QWEN3_NEXT: TensorNames = TensorNames { linear: DELTA, ..PLAIN };

/// Checkpoints of Qwen3.5.
pub static QWEN35: TensorNames = TensorNames {
    linear: LinearNames {
        projections: ["linear_attn.in_proj_qkv", "linear_attn.in_proj_z"],
        gates: ["linear_attn.in_proj_b", "linear_attn.in_proj_a"],
        ..DELTA
    },
    ..PLAIN
};

/// Checkpoints of Nemotron-H.
pub static NEMOTRON_H: TensorNames = TensorNames {
    embedding: "backbone.embeddings",
    output_norm: "backbone.norm_f",
    layer: "backbone.layers.",
    attention_norm: "norm",
    qkv: ["mixer.q_proj", "mixer.k_proj", "mixer.v_proj"],
    attention_output: "mixer.o_proj",
    linear: LinearNames {
        projections: ["mixer.in_proj"; 2],
        gates: ["", "mixer.in_proj"],
        conv: "mixer.conv1d",
        a_log: "mixer.A_log",
        dt_bias: "mixer.dt_bias",
        skip: "mixer.D",
        norm: "mixer.norm",
        output: "mixer.out_proj",
    },
    ffn_norm: "norm",
    gate: "",
    up: "mixer.up_proj",
    down: "mixer.down_proj",
    ..PLAIN
};

const DELTA: LinearNames = LinearNames {
    projections: ["linear_attn.in_proj_qkvz"; 2],
    gates: ["linear_attn.in_proj_ba"; 2],
    conv: "linear_attn.conv1d",
    a_log: "linear_attn.A_log",
    dt_bias: "linear_attn.dt_bias",
    skip: "",
    norm: "linear_attn.norm",
    output: "linear_attn.out_proj",
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
    short_conv: [""; 3],
    linear: LinearNames::NONE,
    attention_post_norm: "",
    sinks: "",
    ffn_norm: "post_attention_layernorm",
    ffn_post_norm: "",
    gate: "mlp.gate_proj",
    up: "mlp.up_proj",
    down: "mlp.down_proj",
    experts: PLAIN_EXPERTS,
    rotary_factors: "",
};

const PLAIN_EXPERTS: ExpertNames = ExpertNames {
    router: "mlp.gate",
    gate: "mlp.experts.{}.gate_proj",
    up: "mlp.experts.{}.up_proj",
    down: "mlp.experts.{}.down_proj",
    shared_gate: "mlp.shared_expert_gate",
    shared: ["mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj", "mlp.shared_expert.down_proj"],
};
