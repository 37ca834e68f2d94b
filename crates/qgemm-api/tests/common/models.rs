//! Files of small models.

use std::fs;
use std::path::{Path, PathBuf};

use qgemm_api::exec::{ExecPlan, Region};
use qgemm_api::gguf::{GgufHeader, GgufScalar};
use qgemm_api::{Context, Format, quantize};

pub const HIDDEN: usize = 64;
pub const KV: usize = 32;
pub const HEADS: usize = 4;
pub const KV_HEADS: usize = 2;
pub const HEAD_DIM: usize = HIDDEN / HEADS;
pub const CONTEXT: usize = 48;
pub const INNER: usize = 96;
pub const VOCABULARY: usize = 80;
pub const EXPERTS: usize = 4;
pub const BATCH: usize = 3;

/// Tensor: name, shape, format.
pub type Tensor = (String, Vec<usize>, &'static str);

/// Devices for plans: the CPU, and an adapter if there is one.
pub fn devices(test: &str) -> Vec<Context> {
    let mut devices = vec![Context::open("cpu").expect("always there")];
    match Context::open("wgpu:0") {
        Ok(ctx) => devices.push(ctx),
        Err(why) => qgemm_testkit::skipped(test, &format!("on wgpu:0: {why}")),
    }
    devices
}

pub fn values(count: usize, seed: usize) -> Vec<f32> {
    (0..count).map(|i| (((i + seed) * 37 % 101) as f32 - 50.0) / 50.0).collect()
}

fn write(path: &Path, architecture: &str, tensors: &[Tensor], kv_heads: usize) {
    let mut header = GgufHeader::new();
    header.metadata("general.architecture", architecture.into()).expect("a new key");
    let layers = (0..).take_while(|i| tensors.iter().any(|(name, ..)| name.starts_with(&format!("blk.{i}."))));
    let mut counts = vec![
        ("block_count", layers.count()),
        ("embedding_length", HIDDEN),
        ("feed_forward_length", INNER),
        ("expert_used_count", 2),
        ("attention.head_count", HEADS),
        ("attention.head_count_kv", kv_heads),
        ("context_length", CONTEXT),
    ];
    if let Some((_, shape, _)) = tensors.iter().find(|(name, ..)| name.contains("_exps")) {
        counts.push(("expert_count", shape[0]));
    }
    if tensors.iter().any(|(name, ..)| name.contains("ssm_")) {
        counts.extend([
            ("ssm.conv_kernel", 4),
            ("ssm.inner_size", HEADS * HEAD_DIM),
            ("ssm.state_size", HEAD_DIM),
            ("ssm.time_step_rank", HEADS),
            ("ssm.group_count", KV_HEADS),
            ("full_attention_interval", 2),
        ]);
    }
    for (name, count) in counts {
        header.metadata(&format!("{architecture}.{name}"), (count as u32).into()).expect("a new key");
    }
    for name in ["layer_norm_rms_epsilon", "layer_norm_epsilon"] {
        let eps = GgufScalar::F32(1e-5).into();
        header.metadata(&format!("{architecture}.attention.{name}"), eps).expect("a new key");
    }
    let parsed = |format: &str| -> Format { format.parse().expect("a format") };
    for (name, shape, format) in tensors {
        header.tensor(name, shape, parsed(format)).expect("it fits");
    }
    let mut writer = header.write(fs::File::create(path).expect("writable")).expect("writable");
    for (seed, (_, shape, format)) in tensors.iter().enumerate() {
        let (k, rows) = (shape[shape.len() - 1], shape[..shape.len() - 1].iter().product());
        let (weight, _) = quantize(&values(rows * k, seed), rows, k, parsed(format)).expect("K suits");
        writer.tensor(weight.blocks()).expect("the right size");
    }
    writer.finish().expect("complete");
}

/// Tensor of a norm.
pub fn norm(name: &str, columns: usize) -> Tensor {
    (format!("{name}.weight"), vec![columns], "f32")
}

/// Head norms of qwen3.
pub fn head_norms(layers: usize) -> Vec<Tensor> {
    let of_layer = |layer| ["q", "k"].map(|role| norm(&format!("blk.{layer}.attn_{role}_norm"), HEAD_DIM));
    (0..layers).flat_map(of_layer).collect()
}

pub fn attention(layer: usize) -> Vec<Tensor> {
    let parts =
        [("attn_q", HIDDEN, HIDDEN), ("attn_k", KV, HIDDEN), ("attn_v", KV, HIDDEN), ("attn_output", HIDDEN, HIDDEN)];
    parts.map(|(role, n, k)| (format!("blk.{layer}.{role}.weight"), vec![n, k], "q8_0")).to_vec()
}

pub fn of_experts(layers: usize) -> Vec<Tensor> {
    let tables = ["token_embd.weight", "output.weight"];
    let mut tensors = tables.map(|name| (name.to_owned(), vec![VOCABULARY, HIDDEN], "q8_0")).to_vec();
    tensors.push(norm("output_norm", HIDDEN));
    tensors.extend(head_norms(layers));
    for layer in 0..layers {
        tensors.extend(attention(layer));
        tensors.extend(["attn_norm", "ffn_norm"].map(|role| norm(&format!("blk.{layer}.{role}"), HIDDEN)));
        tensors.push((format!("blk.{layer}.ffn_gate_inp.weight"), vec![EXPERTS, HIDDEN], "f32"));
        for (role, n, k) in [("ffn_gate", INNER, HIDDEN), ("ffn_up", INNER, HIDDEN), ("ffn_down", HIDDEN, INNER)] {
            tensors.push((format!("blk.{layer}.{role}_exps.weight"), vec![EXPERTS, n, k], "q4_0"));
        }
    }
    tensors
}

pub struct Folder(pub tempfile::TempDir);

impl Folder {
    pub fn new() -> Self {
        Self(tempfile::tempdir().expect("writable"))
    }

    pub fn model(&self, architecture: &str, tensors: &[Tensor]) -> PathBuf {
        self.file(architecture, tensors, KV_HEADS)
    }

    pub fn file(&self, architecture: &str, tensors: &[Tensor], kv_heads: usize) -> PathBuf {
        let path = self.0.path().join(format!("{architecture}.gguf"));
        write(&path, architecture, tensors, kv_heads);
        path
    }
}

pub fn region<'p>(plan: &'p ExecPlan, name: &str) -> &'p Region {
    plan.memory.regions.iter().find(|r| r.name == name).unwrap_or_else(|| panic!("{name} has no region"))
}
