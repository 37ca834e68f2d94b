//! Fuzz target: plans of whole models. An accepted plan must
//! agree with what was planned, or keep all promises about its
//! memory.

use std::path::Path;

use qgemm_api::gguf::{GgufHeader, GgufScalar};
use qgemm_api::{Context, Error, Model, PlanOptions, open_model, quantize};
use rand::Rng;
use rand::rngs::StdRng;
use serde_json::Value;

use super::{FuzzCase, FuzzTarget, FuzzVerdict, mutate};

const WORDS: &[&str] = &[
    "gemm",
    "experts",
    "routing",
    "norm",
    "kv_append",
    "attention",
    "short_conv",
    "linear_attention",
    "gradient",
    "matmul",
    "optimizer",
    "f16",
    "f32",
    "bf16",
    "q8_0",
    "q4_0",
    "none",
    "silu",
    "auto",
    "exact",
    "int8",
    "weight",
    "x",
    "d",
    "residual",
    "ids",
    "workspace",
    "forward",
    "backward",
    "kernel_id",
    "top_k",
    "heads",
    "offsets",
    "products",
    "bias",
];

/// Mutated plans of two small models, on the CPU.
pub struct PlanTarget {
    ctx: Context,
    plans: Vec<(Model, Value)>,
}

impl PlanTarget {
    /// Plans the models, whose files are written to `folder`.
    ///
    /// # Errors
    /// When a model cannot be planned.
    pub fn new(folder: &Path) -> Result<Self, Error> {
        let ctx = Context::open("cpu")?;
        let mut plans = Vec::new();
        for (architecture, experts, train) in
            [("llama", None, false), ("qwen3moe", Some(4), false), ("llama", None, true)]
        {
            let path = folder.join(format!("{architecture}.gguf"));
            write_model(&path, architecture, experts);
            let mut options = PlanOptions::new(3);
            options.train = train;
            let plan = ctx.plan_model(&path, &options)?;
            plans.push((open_model(&path)?, serde_json::to_value(plan).unwrap_or_default()));
        }
        let target = Self { ctx, plans };
        for (model, plan) in &target.plans {
            assert_eq!(target.judge(&plan.to_string(), model, plan), FuzzVerdict::Accepted);
        }
        Ok(target)
    }

    fn judge(&self, text: &str, model: &Model, planned: &Value) -> FuzzVerdict {
        let Ok(loaded) = self.ctx.load_plan(text, model) else { return FuzzVerdict::Refused };
        let read = serde_json::to_value(loaded.exec_plan()).unwrap_or_default();
        let mut changed = Vec::new();
        differences(planned, &read, String::new(), &mut changed);
        if let Some(what) = contradiction(&read) {
            return FuzzVerdict::Wrong(what);
        }
        let decides = changed.iter().find(|path| !TOLD.iter().chain(PROGRAM).any(|known| matches(known, path)));
        match decides {
            Some(path) => FuzzVerdict::Wrong(format!(
                "{path} was {:?}, and is accepted as {:?}",
                planned.pointer(path),
                read.pointer(path)
            )),
            None => FuzzVerdict::Accepted,
        }
    }
}

/// Informational values of a plan. They change nothing that runs.
const TOLD: &[&str] = &[
    "ops/*/estimate_seconds",
    "ops/*/bound",
    "ops/*/candidates",
    "ops/*/rejected/**",
    "ops/*/workspace/**",
    "ops/*/prologue/**",
    "barriers/*/step",
    "barriers/*/reason",
    "barriers/*/kind",
    "memory/bytes_without_reuse",
    "runtime/device/**",
    "runtime/threads",
    "runtime/mode",
    "model/layers",
    "phases/**",
];

/// Values that only the file defines. Another value is another
/// plan, whose names and memory still fit together.
/// Reading does not check that it computes the model.
const PROGRAM: &[&str] = &[
    "barriers/**",
    "ops/*/op_id",
    "ops/*/phase",
    "ops/*/x",
    "ops/*/d",
    "ops/*/b",
    "ops/*/b_dtype",
    "ops/*/bias",
    "ops/*/bias_dtype",
    "ops/*/residual",
    "ops/*/ids",
    "ops/*/offsets",
    "ops/*/router_weights",
    "ops/*/status",
    "ops/*/products",
    "ops/*/scale",
    "ops/*/top_k",
    "ops/*/renormalized",
    "ops/*/batch_invariant",
    "ops/*/activation",
    "ops/*/x_precision",
    "ops/*/x_dtype",
    "ops/*/d_dtype",
    "ops/*/shape/*",
    "ops/*/norm/**",
    "ops/*/heads/**",
    "ops/*/optimizer/**",
    "ops/*/weight/tensors/**",
    "ops/*/weight/gated",
    "ops/*/weight/region",
    "ops/*/weight/bytes",
    "model/batch",
    "model/sequences",
    "model/context",
    "memory/**",
];

/// A contradiction in an accepted plan.
fn contradiction(plan: &Value) -> Option<String> {
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    let number = |value: &Value| value.as_u64().unwrap_or(u64::MAX);
    let (ops, regions) = (list(&plan["ops"]), list(&plan["memory"]["regions"]));
    let is_op = |name: &Value| ops.iter().any(|op| op["op_id"] == *name);
    let region = |name: &Value| regions.iter().find(|region| region["name"] == *name);
    for barrier in list(&plan["barriers"]) {
        let before_any = barrier["before"] == "end" || is_op(&barrier["before"]);
        let has_regions =
            [&barrier["reads"], &barrier["writes"]].into_iter().flat_map(list).all(|name| region(&name).is_some());
        if !before_any || !list(&barrier["after"]).iter().all(is_op) || !has_regions {
            return Some(format!("a barrier names what is not there: {barrier}"));
        }
    }
    for (place, op) in ops.iter().enumerate() {
        let optional =
            [&op["b"], &op["bias"], &op["residual"], &op["ids"], &op["offsets"], &op["router_weights"], &op["status"]];
        let operands = [&op["x"], &op["d"]].into_iter().chain(optional.into_iter().filter(|name| !name.is_null()));
        for name in operands {
            let lives =
                |region: &Value| (number(&region["first_op"])..=number(&region["last_op"])).contains(&(place as u64));
            if !region(name).is_some_and(lives) {
                return Some(format!("{name} of operation {place} is no region that lives then"));
            }
        }
    }
    let arena = number(&plan["memory"]["arena_bytes"]);
    let end = |region: &Value| number(&region["offset"]).saturating_add(number(&region["reserved"]));
    for (place, a) in regions.iter().enumerate() {
        if end(a) > arena || number(&a["bytes"]) > number(&a["reserved"]) {
            return Some(format!("a region leaves the arena or its own bytes: {a}"));
        }
        for b in &regions[place + 1..] {
            let live =
                number(&a["first_op"]) <= number(&b["last_op"]) && number(&b["first_op"]) <= number(&a["last_op"]);
            if live && number(&a["offset"]) < end(b) && number(&b["offset"]) < end(a) {
                return Some(format!("two regions share bytes: {a}, {b}"));
            }
        }
    }
    None
}

/// Whether `path` matches `pattern`, in which `*` is one step and
/// `**` the rest.
fn matches(pattern: &str, path: &str) -> bool {
    let mut steps = path.split('/').skip(1);
    for part in pattern.split('/') {
        match (part, steps.next()) {
            ("**", _) => return true,
            ("*", Some(_)) => {}
            (part, Some(step)) if part == step => {}
            _ => return false,
        }
    }
    steps.next().is_none()
}

/// Paths at which two plans differ.
fn differences(a: &Value, b: &Value, path: String, into: &mut Vec<String>) {
    match (a, b) {
        (Value::Object(a), Value::Object(b)) => {
            for key in a.keys().chain(b.keys().filter(|key| !a.contains_key(*key))) {
                let of = |map: &serde_json::Map<String, Value>| map.get(key).cloned().unwrap_or_default();
                differences(&of(a), &of(b), format!("{path}/{key}"), into);
            }
        }
        (Value::Array(a), Value::Array(b)) if a.len() == b.len() => {
            a.iter().zip(b).enumerate().for_each(|(i, (a, b))| differences(a, b, format!("{path}/{i}"), into));
        }
        // Names of formats are the same in capitals.
        (Value::String(a), Value::String(b)) if path.ends_with("/format") && a.eq_ignore_ascii_case(b) => {}
        _ if a != b => into.push(path),
        _ => {}
    }
}

impl FuzzTarget for PlanTarget {
    fn name(&self) -> &'static str {
        "plans"
    }

    fn draw<'a>(&'a self, rng: &mut StdRng) -> FuzzCase<'a> {
        let (model, planned) = &self.plans[rng.random_range(0..self.plans.len())];
        let mut plan = planned.clone();
        let mut said: Vec<String> = (0..rng.random_range(1..3)).map(|_| mutate::json(rng, &mut plan, WORDS)).collect();
        let mut text = plan.to_string();
        if rng.random_ratio(1, 8) {
            said.push(mutate::text(rng, &mut text));
        }
        FuzzCase { mutations: said.join("; "), read: Box::new(move || self.judge(&text, model, planned)) }
    }
}

/// A model of one layer, with `experts` or without.
fn write_model(path: &Path, architecture: &str, experts: Option<usize>) {
    let (hidden, inner) = (64, 96);
    let mut header = GgufHeader::new();
    let mut state = |name: &str, value: qgemm_api::gguf::GgufValue| header.metadata(name, value).expect("a new key");
    state("general.architecture", architecture.into());
    let counts = [
        ("block_count", 1u32),
        ("embedding_length", hidden as u32),
        ("feed_forward_length", inner as u32),
        ("expert_count", experts.unwrap_or(0) as u32),
        ("expert_used_count", 2),
        ("attention.head_count", 4),
        ("attention.head_count_kv", 2),
        ("context_length", 48),
    ];
    counts.into_iter().for_each(|(name, count)| state(&format!("{architecture}.{name}"), count.into()));
    state(&format!("{architecture}.attention.layer_norm_rms_epsilon"), GgufScalar::F32(1e-5).into());
    let mut tensors: Vec<(String, Vec<usize>, &str)> = Vec::new();
    let mut add =
        |name: &str, shape: &[usize], format| tensors.push((format!("{name}.weight"), shape.to_vec(), format));
    add("token_embd", &[80, hidden], "q8_0");
    add("output", &[80, hidden], "q8_0");
    ["output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"].iter().for_each(|name| add(name, &[hidden], "f32"));
    [("q", hidden), ("k", 32), ("v", 32), ("output", hidden)]
        .iter()
        .for_each(|(role, n)| add(&format!("blk.0.attn_{role}"), &[*n, hidden], "q8_0"));
    let feed_forward = [("ffn_gate", inner, hidden), ("ffn_up", inner, hidden), ("ffn_down", hidden, inner)];
    match experts {
        None => feed_forward.iter().for_each(|(role, n, k)| add(&format!("blk.0.{role}"), &[*n, *k], "q4_0")),
        Some(experts) => {
            ["q", "k"].iter().for_each(|role| add(&format!("blk.0.attn_{role}_norm"), &[hidden / 4], "f32"));
            add("blk.0.ffn_gate_inp", &[experts, hidden], "f32");
            feed_forward.iter().for_each(|(role, n, k)| add(&format!("blk.0.{role}_exps"), &[experts, *n, *k], "q4_0"));
        }
    }
    for (name, shape, format) in &tensors {
        header.tensor(name, shape, format.parse().expect("a format")).expect("it fits");
    }
    let mut writer = header.write(std::fs::File::create(path).expect("writable")).expect("writable");
    for (_, shape, format) in &tensors {
        let (k, rows) = (shape[shape.len() - 1], shape[..shape.len() - 1].iter().product());
        let (weight, _) = quantize(&vec![0.5; rows * k], rows, k, format.parse().expect("a format")).expect("K suits");
        writer.tensor(weight.blocks()).expect("the right size");
    }
    writer.finish().expect("complete");
}
