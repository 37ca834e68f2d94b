//! Tensor names of encoders, without `.weight`.

/// Names of one file format.
#[derive(Debug)]
pub struct EncoderNames {
    /// Prefix that some checkpoints put before all names.
    pub prefix: &'static str,
    /// Word embeddings.
    pub words: &'static str,
    /// Position embeddings.
    pub positions: &'static str,
    /// Segment embeddings.
    pub segments: &'static str,
    /// LayerNorm of the sum of embeddings.
    pub norm: &'static str,
    /// Prefix of a layer, before its number.
    pub layer: &'static str,
    /// Query, key and value.
    pub qkv: [&'static str; 3],
    /// Output projection of attention.
    pub attention_output: &'static str,
    /// LayerNorm behind attention.
    pub attention_norm: &'static str,
    /// Up projection.
    pub up: &'static str,
    /// Down projection.
    pub down: &'static str,
    /// LayerNorm behind the feed-forward part.
    pub ffn_norm: &'static str,
    /// Beginnings of names of heads, which embeddings do not need.
    pub heads: &'static [&'static str],
}

/// GGUF.
pub static GGUF: EncoderNames = EncoderNames {
    prefix: "",
    words: "token_embd",
    positions: "position_embd",
    segments: "token_types",
    norm: "token_embd_norm",
    layer: "blk.",
    qkv: ["attn_q", "attn_k", "attn_v"],
    attention_output: "attn_output",
    attention_norm: "attn_output_norm",
    up: "ffn_up",
    down: "ffn_down",
    ffn_norm: "layer_output_norm",
    heads: &[],
};

/// Checkpoints of `transformers`, in safetensors.
pub static HUGGING_FACE: EncoderNames = EncoderNames {
    prefix: "bert.",
    words: "embeddings.word_embeddings",
    positions: "embeddings.position_embeddings",
    segments: "embeddings.token_type_embeddings",
    norm: "embeddings.LayerNorm",
    layer: "encoder.layer.",
    qkv: ["attention.self.query", "attention.self.key", "attention.self.value"],
    attention_output: "attention.output.dense",
    attention_norm: "attention.output.LayerNorm",
    up: "intermediate.dense",
    down: "output.dense",
    ffn_norm: "output.LayerNorm",
    heads: &["pooler.", "cls."],
};
