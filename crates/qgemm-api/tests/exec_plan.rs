//! Execution plans: contents, refusals, and runs.

use std::fs;
use std::path::Path;

use qgemm_api::exec::{ExecPlan, Phase, PlannedOp, Region, RegionKind};
use qgemm_api::tuning::SplitAxis;
use qgemm_api::{
    Context, DType, Error, Gradient, GradientArgs, HostExperts, HostWeight, LoadedPlan, Model, MoeArgs, OpWeights,
    Optimizer, OptimizerStep, PlanArena, PlanOptions, open_model, quantize,
};
use serde_json::{Value, json};

mod common {
    pub mod dense_model;
    pub mod models;
    pub mod plan_checks;
    pub mod schema;
}
use common::dense_model::dense;
use common::models::*;
use common::plan_checks::*;

fn plan(ctx: &Context, path: &Path) -> ExecPlan {
    ctx.plan_model(path, &PlanOptions::new(BATCH)).expect("it is served")
}

#[test]
fn a_plan_has_every_operation_of_every_layer() {
    let folder = Folder::new();
    let ctx = Context::open("cpu").expect("always there");
    for architecture in ["llama", "qwen3"] {
        let mut tensors = dense(2);
        let qwen = architecture == "qwen3";
        tensors.extend(head_norms(if qwen { 2 } else { 0 }));
        let path = folder.model(architecture, &tensors);
        let plan = plan(&ctx, &path);
        let roles = [
            ("attn_qkv", "gemm"),
            ("kv_append", "kv_append"),
            ("attn", "attention"),
            ("attn_output", "gemm"),
            ("ffn_gate_up", "gemm"),
            ("ffn_down", "gemm"),
        ];
        let of_layer = |layer: usize| roles.iter().map(move |(role, kind)| (format!("blk.{layer}.{role}"), *kind));
        let mut expected = vec![("token_embd".to_owned(), "gather_rows")];
        expected.extend((0..2).flat_map(of_layer));
        expected.extend([("output_norm".to_owned(), "norm"), ("output".to_owned(), "gemm")]);
        let got: Vec<_> = plan.ops.iter().map(|op| (op.op_id.clone(), op.operation.as_str())).collect();
        assert_eq!(got, expected);
        let append = plan.ops.iter().find(|op| op.op_id == "blk.1.kv_append").and_then(|op| op.heads.as_ref());
        let of_heads = append.and_then(|heads| heads.head_norms.as_ref());
        let gammas = of_heads.map(|norms| norms.each_ref().map(|norm| norm.gamma.as_str()));
        assert_eq!(gammas, qwen.then_some(["blk.1.attn_q_norm.weight", "blk.1.attn_k_norm.weight"]));
        let products = plan.ops.iter().filter(|op| op.operation == "gemm");
        assert!(products.clone().all(|op| op.reduction.is_some()));
        let axis = |op: &PlannedOp| op.dispatch.as_ref().map(|dispatch| dispatch.split_axis);
        assert!(plan.ops.iter().all(|op| match op.operation.as_str() {
            "norm" | "kv_append" => axis(op) == Some(SplitAxis::M),
            "attention" => axis(op) == Some(SplitAxis::Head),
            _ => axis(op).is_some(),
        }));
        check_schemas(&plan);
        check_memory(&plan);
        // Exact sizes, and memory shared by layers.
        assert_eq!(region(&plan, "blk.1.ffn").bytes, BATCH * INNER * 2);
        assert_eq!(region(&plan, "logits").bytes, BATCH * VOCABULARY * 4);
        let later = region(&plan, "blk.1.ffn");
        let shares = |r: &&Region| r.offset < later.offset + later.reserved && later.offset < r.offset + r.reserved;
        assert!(plan.memory.regions.iter().filter(|r| r.name.starts_with("blk.0.")).any(|r| shares(&r)));
        assert!(plan.memory.arena_bytes < plan.memory.bytes_without_reuse);
        // Every layer has a permanent cache, which its append writes
        // and its attention reads.
        let (op, last) = (|id: &str| plan.ops.iter().find(|op| op.op_id == id).expect("above"), plan.ops.len() - 1);
        for layer in 0..2 {
            let cache = region(&plan, &format!("blk.{layer}.k_cache"));
            assert_eq!((cache.kind, cache.bytes), (RegionKind::KvCache, BATCH * CONTEXT * KV * 2));
            assert_eq!((cache.first_op, cache.last_op), (0, last));
        }
        let append = op("blk.1.kv_append").heads.as_ref().expect("it has some");
        let pairs = if qwen { "neox" } else { "interleaved" };
        assert_eq!(append.rotary.as_ref().map(|r| (r.dim, r.pairs.as_str())), Some((HEAD_DIM, pairs)));
        assert_eq!((append.sequences, append.heads, append.kv_heads), (BATCH, HEADS, KV_HEADS));
        let barrier = |op: &str| plan.barriers.iter().find(|b| b.before == op && !b.after.is_empty()).expect("one");
        assert_eq!(barrier("blk.1.attn").after, ["blk.1.kv_append"]);
        // The norm is the prologue of the products behind it, and the head shares the
        // table of the embedding.
        let (qkv, gate_up) = (op("blk.1.attn_qkv"), op("blk.1.ffn_gate_up"));
        let gammas = [qkv, gate_up].map(|op| op.norm.as_ref().map(|norm| norm.gamma.as_str()));
        assert_eq!(gammas, [Some("blk.1.attn_norm.weight"), Some("blk.1.ffn_norm.weight")]);
        let segments: Vec<_> = qkv.segments.iter().map(|s| (s.first, s.features, s.d.as_str())).collect();
        assert_eq!(segments, [(HIDDEN, KV, "blk.1.k"), (HIDDEN + KV, KV, "blk.1.v")]);
        let table = |id: &str| op(id).weight.as_ref().map(|weight| weight.region.as_str());
        assert_eq!((table("token_embd"), table("output")), (Some("output.weight"), Some("output.weight")));
        assert_eq!((op("token_embd").d_dtype.as_str(), qkv.x_dtype.as_str()), ("f32", "f32"));
        // Operations outside the library are the caller's, at the beginning and
        // the end, with the reason.
        let of_caller: Vec<_> = plan.barriers.iter().filter(|b| b.step.is_some()).collect();
        assert_eq!(of_caller.iter().map(|b| b.before.as_str()).collect::<Vec<_>>(), ["token_embd", "end"]);
        assert_eq!(
            (&of_caller[0].writes, &of_caller[1].reads),
            (&vec!["tokens".into(), "kv_lengths".into()], &vec!["logits".into()])
        );
        assert!(of_caller.iter().all(|b| b.reason.as_ref().is_some_and(|why| !why.is_empty())));
        let text = serde_json::to_string(&plan).expect("JSON");
        let loaded = ctx.load_plan(&text, &open_model(&path).expect("a model")).expect("it fits");
        let again = loaded.exec_plan();
        assert_eq!((&again.memory, &again.barriers, &again.model), (&plan.memory, &plan.barriers, &plan.model));
        let kernels = |plan: &ExecPlan| plan.ops.iter().map(|op| op.kernel_id.clone()).collect::<Vec<_>>();
        assert_eq!(kernels(again), kernels(&plan));
    }
}

#[test]
fn experts_are_routed_and_multiplied() {
    for ctx in devices("experts_are_routed_and_multiplied") {
        experts_are_routed_and_multiplied_on(&ctx);
    }
}

fn experts_are_routed_and_multiplied_on(ctx: &Context) {
    let folder = Folder::new();
    let path = folder.model("qwen3moe", &of_experts(2));
    let plan = plan(ctx, &path);
    let of_layer: Vec<_> =
        plan.ops.iter().filter(|op| op.op_id.starts_with("blk.1.ffn") || op.operation == "routing").collect();
    let names: Vec<_> = of_layer.iter().map(|op| (op.op_id.as_str(), op.operation.as_str())).collect();
    let expected = [
        ("blk.0.routing", "routing"),
        ("blk.1.ffn_norm", "norm"),
        ("blk.1.ffn_router", "gemm"),
        ("blk.1.routing", "routing"),
        ("blk.1.ffn_gate_up", "experts"),
        ("blk.1.ffn_down", "experts"),
    ];
    assert_eq!(names, expected);
    assert_eq!(region(&plan, "blk.1.ffn").bytes, BATCH * 2 * INNER * 2, "a row a slot");
    check_schemas(&plan);
    check_memory(&plan);
    let text = serde_json::to_string(&plan).expect("JSON");
    let loaded = ctx.load_plan(&text, &open_model(&path).expect("a model")).expect("it fits");
    assert!(matches!(loaded.product("blk.0.ffn_down"), Err(Error::NotInPlan { what: "product", .. })));
    experts_run_in_the_arena(ctx, &loaded, &open_model(&path).expect("a model"));
}

/// From logits to combined expert outputs, equal to a MoE
/// layer on its own buffers.
fn experts_run_in_the_arena(ctx: &Context, loaded: &LoadedPlan, model: &Model) {
    let stream = ctx.default_stream();
    let mut arena = loaded.arena().expect("small").check_canaries(true);
    let all = |role: &str| -> Vec<HostWeight> {
        let name = format!("blk.0.{role}_exps.weight");
        (0..EXPERTS).map(|expert| model.stacked_weight(&name, expert).expect("in the model")).collect()
    };
    let pairs: Vec<_> = all("ffn_gate").into_iter().zip(all("ffn_up")).collect();
    let up = ctx.load_experts(&HostExperts::gated(&pairs).expect("alike")).expect("they fit");
    let down = ctx.load_experts(&HostExperts::new(&all("ffn_down")).expect("alike")).expect("they fit");
    let put = |arena: &mut PlanArena, name: &str, bytes: &[u8]| {
        ctx.upload_into(bytes, arena.region_mut(name).expect("planned")).expect("it has room");
    };
    let x = DType::F16.encode(&values(BATCH * HIDDEN, 3));
    let logits = DType::F32.encode(&values(BATCH * EXPERTS, 4));
    put(&mut arena, "blk.0.router_logits", &logits);
    loaded.run(&stream, "blk.0.routing", &mut arena, OpWeights::default()).expect("planned");
    put(&mut arena, "blk.0.ffn_norm", &x);
    put(&mut arena, "blk.0.attn_residual", &vec![0; BATCH * HIDDEN * 4]);
    loaded.run(&stream, "blk.0.ffn_gate_up", &mut arena, &up).expect("planned");
    loaded.run(&stream, "blk.0.ffn_down", &mut arena, &down).expect("planned");
    let got: Vec<f32> = ctx.download(arena.region("hidden.1").expect("planned")).expect("readable");

    let layer = ctx.moe_layer(&up, &down, 2, |moe| moe.routed(DType::F32, |routing| routing.renormalized()));
    let layer = layer.expect("served");
    let mut workspace = layer.workspace(BATCH).expect("small");
    let (x, logits) = (ctx.upload(&DType::F16.decode(&x)).expect("small"), ctx.upload(&logits).expect("small"));
    let mut d = ctx.allocate(BATCH * HIDDEN * 4).expect("small");
    layer.run(&stream, BATCH, MoeArgs::from_logits(&x, &logits, &mut d), &mut workspace).expect("all given");
    let wanted = ctx.download::<f32>(&d).expect("readable");
    let energy: f32 = wanted.iter().map(|y| y * y).sum();
    let error: f32 = got.iter().zip(&wanted).map(|(got, y)| (got - y).powi(2)).sum();
    assert!(energy > 0.0 && error < 1e-4 * energy, "{error} of {energy}");
    let missing = loaded.run(&stream, "blk.0.ffn_down", &mut arena, OpWeights::default());
    assert!(matches!(&missing, Err(Error::MissingWeight { op, .. }) if op == "blk.0.ffn_down"), "{missing:?}");
}

#[test]
fn an_encoder_has_biases_and_no_logits() {
    let folder = Folder::new();
    let mut tensors = attention(0);
    for name in ["token_embd_norm", "blk.0.attn_output_norm", "blk.0.layer_output_norm"] {
        tensors.extend([norm(name, HIDDEN), (format!("{name}.bias"), vec![HIDDEN], "f32")]);
    }
    for tensor in tensors.iter_mut().filter(|(name, ..)| name.contains("attn_k.") || name.contains("attn_v.")) {
        tensor.1 = vec![HIDDEN, HIDDEN];
    }
    tensors.push(("blk.0.ffn_up.weight".into(), vec![INNER, HIDDEN], "q8_0"));
    tensors.push(("blk.0.ffn_down.weight".into(), vec![HIDDEN, INNER], "q8_0"));
    let path = folder.file("bert", &tensors, HEADS);
    let ctx = Context::open("cpu").expect("always there");
    let plan = plan(&ctx, &path);
    let activations: Vec<_> = plan.ops.iter().map(|op| (op.op_id.as_str(), op.activation.as_str())).collect();
    assert!(activations.contains(&("blk.0.ffn_up", "gelu_erf")) && plan.ops.len() == 10, "{activations:?}");
    let (kinds, norms): (Vec<_>, Vec<_>) = plan.ops.iter().map(|op| (op.operation.as_str(), op.norm.as_ref())).unzip();
    assert!(kinds.contains(&"attention") && !kinds.contains(&"kv_append"), "{kinds:?}");
    let norms: Vec<_> = norms.into_iter().flatten().collect();
    assert!(norms.len() == 3 && norms.iter().all(|norm| norm.function == "layer" && norm.beta.is_some()), "{norms:?}");
    assert!(plan.memory.regions.iter().all(|r| r.name != "logits"));
    check_schemas(&plan);
    check_memory(&plan);
}

#[test]
fn safetensors_are_planned_by_their_config() {
    let folder = Folder::new();
    let names = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"];
    let mut tensors: Vec<(String, [usize; 2])> =
        names.map(|name| (format!("model.layers.0.{name}.weight"), [HIDDEN, HIDDEN])).to_vec();
    for (name, shape) in [("gate", [INNER, HIDDEN]), ("up", [INNER, HIDDEN]), ("down", [HIDDEN, INNER])] {
        tensors.push((format!("model.layers.0.mlp.{name}_proj.weight"), shape));
    }
    tensors.push(("model.embed_tokens.weight".into(), [VOCABULARY, HIDDEN]));
    tensors.push(("model.layers.0.self_attn.q_proj.bias".into(), [1, HIDDEN]));
    for name in ["model.norm", "model.layers.0.input_layernorm", "model.layers.0.post_attention_layernorm"] {
        tensors.push((format!("{name}.weight"), [1, HIDDEN]));
    }
    let (mut header, mut end) = (serde_json::Map::new(), 0);
    for (name, [n, k]) in &tensors {
        let shape = if *n == 1 { vec![*k] } else { vec![*n, *k] };
        header.insert(name.clone(), json!({"dtype": "BF16", "shape": shape, "data_offsets": [end, end + n * k * 2]}));
        end += n * k * 2;
    }
    let header = Value::Object(header).to_string();
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.resize(bytes.len() + end, 0);
    fs::write(folder.0.path().join("model.safetensors"), bytes).expect("writable");
    let config = |text: &str| fs::write(folder.0.path().join("config.json"), text).expect("writable");
    let ctx = Context::open("cpu").expect("always there");

    let scaling = json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                         "original_max_position_embeddings": 8192});
    let llama = json!({"model_type": "llama", "num_hidden_layers": 1, "hidden_size": HIDDEN,
                       "intermediate_size": INNER, "num_attention_heads": HEADS, "rms_norm_eps": 1e-6, "rope_theta": 5e5,
                       "max_position_embeddings": 131072, "rope_scaling": scaling});
    config(&llama.to_string());
    let plan = plan(&ctx, folder.0.path());
    assert_eq!(plan.ops.len(), 10);
    let rotary = plan.ops[3].heads.as_ref().and_then(|heads| heads.rotary.as_ref()).expect("queries are rotated");
    let scaling = rotary.scaling.as_ref().expect("it is stated");
    assert_eq!((rotary.pairs.as_str(), rotary.base, scaling.kind.as_str()), ("neox", 5e5, "llama3"));
    assert_eq!(plan.model.context, 4096);
    assert_eq!(plan.ops[1].bias.as_deref(), Some("model.layers.0.self_attn.q_proj.bias"));
    check_schemas(&plan);

    // Python's JSON dialect, with a byte-order mark.
    config(&format!("\u{feff}{}", llama.to_string().replacen('{', r#"{"time_step_limit": [0.0, Infinity], "#, 1)));
    ctx.plan_model(folder.0.path(), &PlanOptions::new(BATCH)).expect("not strict JSON");

    // An unsupported rotary scaling is the caller's. A missing number is named.
    let mut other = llama.clone();
    other["rope_scaling"] = json!({"rope_type": "longrope"});
    config(&other.to_string());
    let plan = ctx.plan_model(folder.0.path(), &PlanOptions::new(BATCH)).expect("served");
    let step = plan.barriers.iter().find(|b| b.before == "blk.0.kv_append" && b.step.is_some()).expect("the caller's");
    assert!(step.reason.as_ref().is_some_and(|why| why.contains("longrope")) && step.reads == step.writes, "{step:?}");
    other.as_object_mut().expect("an object").remove("num_attention_heads");
    config(&other.to_string());
    let error = ctx.plan_model(folder.0.path(), &PlanOptions::new(BATCH)).expect_err("no heads").to_string();
    assert!(error.contains("num_attention_heads"), "{error}");
    let mut uneven = PlanOptions::new(BATCH);
    uneven.sequences = Some(2);
    config(&llama.to_string());
    let refused = ctx.plan_model(folder.0.path(), &uneven);
    assert!(matches!(refused, Err(Error::UnevenSequences { batch: BATCH, sequences: 2 })), "{refused:?}");

    config(r#"{"model_type": "mamba"}"#);
    let error = ctx.plan_model(folder.0.path(), &PlanOptions::new(1)).expect_err("another architecture");
    let text = error.to_string();
    assert!(matches!(error, Error::UnservedArchitecture { .. }), "{text}");
    assert!(text.contains("state-space layers") && text.contains("qwen3moe"), "{text}");
    config(r#"{"model_type": "abc"}"#);
    let error = ctx.plan_model(folder.0.path(), &PlanOptions::new(1)).expect_err("no architecture");
    assert!(matches!(&error, Error::UnknownArchitecture { architecture, .. } if architecture == "abc"), "{error}");
}

/// Every product has two gradients, each after its inputs, with its own memory.
#[test]
fn training_goes_back_over_every_product() {
    for ctx in devices("training_goes_back_over_every_product") {
        training_goes_back_on(&ctx);
    }
}

fn training_goes_back_on(ctx: &Context) {
    let folder = Folder::new();
    let mut options = PlanOptions::new(BATCH);
    options.train = true;
    let path = folder.model("llama", &dense(2));
    let plan = ctx.plan_model(&path, &options).expect("it is served");
    check_schemas(&plan);
    check_memory(&plan);
    let forward: Vec<&str> =
        plan.ops.iter().filter(|op| op.phase == Phase::Forward).map(|op| op.op_id.as_str()).collect();
    let backward: Vec<&str> =
        plan.ops.iter().filter(|op| op.phase == Phase::Backward).map(|op| op.op_id.as_str()).collect();
    let of_products = plan.ops.iter().filter(|op| op.phase == Phase::Forward && op.operation == "gemm");
    let products: Vec<&str> = of_products.map(|op| op.op_id.as_str()).collect();
    let mut expected: Vec<String> =
        products.iter().rev().flat_map(|id| [format!("{id}.dx"), format!("{id}.dw")]).collect();
    let tensor = |id: &&str| if *id == "output" { "token_embd".to_owned() } else { (*id).to_owned() };
    expected.extend(products.iter().rev().map(|id| format!("{}.weight.optimizer", tensor(id))));
    assert_eq!(backward, expected);
    assert!(forward.contains(&"blk.1.kv_append") && forward.contains(&"blk.1.attn"));
    assert_eq!(
        plan.phases.iter().map(|p| (p.phase, p.last.as_str())).collect::<Vec<_>>(),
        [(Phase::Forward, "output"), (Phase::Backward, "blk.0.attn_q.weight.optimizer")]
    );
    let op = |id: &str| plan.ops.iter().find(|op| op.op_id == id).unwrap_or_else(|| panic!("no {id}"));
    // Three products share X. The first writes its
    // gradient, the others accumulate.
    assert_eq!(op("blk.1.attn_v.dx").residual, None);
    assert_eq!(op("blk.1.attn_k.dx").residual.as_ref(), Some(&op("blk.1.attn_k.dx").d));
    assert_eq!(
        (op("blk.1.ffn_gate.dw").b.as_deref(), op("blk.1.ffn_gate.dw").d_dtype.as_str()),
        (Some("blk.1.ffn_norm"), "f32")
    );
    let (gate, weight) = (op("blk.0.ffn_gate.dx"), "blk.0.ffn_gate.weight");
    assert_eq!((gate.shape.m, gate.shape.n, gate.shape.k), (BATCH, HIDDEN, INNER));
    for part in ["grad", "master", "moment1", "moment2"] {
        assert_eq!(region(&plan, &format!("{weight}.{part}")).bytes, INNER * HIDDEN * 4);
    }
    // The pre-activation is live until its gradient is computed.
    let upped = region(&plan, "blk.0.ffn_upped");
    assert!(plan.ops[upped.last_op].phase == Phase::Backward, "it ends in {}", plan.ops[upped.last_op].op_id);
    let caches = region(&plan, "blk.0.k_cache");
    assert!(caches.kind == RegionKind::Activation && plan.ops[caches.last_op].phase == Phase::Backward);
    let step = |prefix: &str| {
        plan.barriers
            .iter()
            .filter(|b| b.step.as_ref().is_some_and(|step| step.starts_with(prefix)))
            .collect::<Vec<_>>()
    };
    assert_eq!((step("store: ").len(), step("attention backward: ").len()), (products.len(), 2));
    let of_attention = step("attention backward: blk.0")[0];
    assert!(
        of_attention.reads.contains(&"blk.0.k_cache".into()) && of_attention.writes.contains(&"blk.0.k.grad".into())
    );
    assert_eq!(step("loss")[0].writes, ["logits.grad", "optimizer_step"]);

    let text = serde_json::to_string(&plan).expect("JSON");
    let loaded = ctx.load_plan(&text, &open_model(&path).expect("a model")).expect("it fits");
    gradients_run_in_the_arena(ctx, &loaded, gate);
    let mut wrong = serde_json::to_value(&plan).expect("JSON");
    let place = plan.ops.iter().position(|op| op.op_id == "blk.1.attn_q.dw").expect("above");
    wrong["ops"][place]["b"] = json!("blk.1.q");
    wrong["ops"][place]["shape"]["k"] = json!(BATCH + 1);
    let refused = ctx.load_plan(&wrong.to_string(), &open_model(&path).expect("a model"));
    assert!(matches!(refused, Err(Error::PlanMismatch { .. })), "{refused:?}");
}

/// `gate` is the input gradient of a layer, equal to a separate
/// plan on its own buffers.
fn gradients_run_in_the_arena(ctx: &Context, loaded: &LoadedPlan, gate: &PlannedOp) {
    let stream = ctx.default_stream();
    let mut arena = loaded.arena().expect("small").check_canaries(true);
    let planned = gate.weight.as_ref().expect("of a layer");
    let values: Vec<f32> = (0..INNER * HIDDEN).map(|i| (i % 37) as f32 / 16.0 - 1.0).collect();
    let format = planned.format.parse().expect("a format");
    let weight = ctx.load(&quantize(&values, INNER, HIDDEN, format).expect("finite").0).expect("small");
    let dy: Vec<f32> = (0..BATCH * INNER).map(|i| (i % 11) as f32 / 8.0 - 0.5).collect();
    let x: Vec<f32> = (0..BATCH * HIDDEN).map(|i| (i % 7) as f32 / 4.0 - 0.75).collect();
    let (dy, x) = (DType::F16.encode(&dy), DType::F16.encode(&x));
    let put = |arena: &mut PlanArena, name: &str, bytes: &[u8]| {
        ctx.upload_into(bytes, arena.region_mut(name).expect("planned")).expect("it has room");
    };
    put(&mut arena, &gate.x, &dy);
    put(&mut arena, "blk.0.ffn_norm", &x);
    put(&mut arena, &gate.d, &vec![0; BATCH * HIDDEN * 2]);
    loaded.run(&stream, &gate.op_id, &mut arena, &weight).expect("planned");
    let got: Vec<u8> = ctx.download(arena.region(&gate.d).expect("planned")).expect("readable");
    let plan = ctx.plan_gradient(&weight, &Gradient::new(BATCH, DType::F16, DType::F16)).expect("served");
    let (dy_here, mut dx) = (ctx.upload(&dy).expect("small"), ctx.allocate(BATCH * HIDDEN * 2).expect("small"));
    let mut workspace = ctx.workspace(plan.workspace_bytes()).expect("small");
    plan.run(&stream, GradientArgs::new(&dy_here, &weight, &mut dx).workspace(&mut workspace)).expect("all given");
    assert_eq!(got, ctx.download::<u8>(&dx).expect("readable"));
    assert!(got.iter().any(|&byte| byte != 0));

    loaded.run(&stream, "blk.0.ffn_gate.dw", &mut arena, OpWeights::default()).expect("planned");
    let dw: Vec<f32> = ctx.download(arena.region("blk.0.ffn_gate.weight.grad").expect("planned")).expect("readable");
    let (dy, x) = (DType::F16.decode(&dy), DType::F16.decode(&x));
    for (n, k) in [(0, 0), (3, 5), (INNER - 1, HIDDEN - 1)] {
        let expected: f32 = (0..BATCH).map(|t| dy[t * INNER + n] * x[t * HIDDEN + k]).sum();
        assert!((dw[n * HIDDEN + k] - expected).abs() < 1e-4, "{} is not {expected}", dw[n * HIDDEN + k]);
    }
    // Operations without a backward pass become caller's steps, with a reason.
    for what in ["norm backward", "attention backward"] {
        let mut steps = loaded.exec_plan().barriers.iter().filter_map(|barrier| barrier.step.as_deref());
        let step = steps.find(|step| step.contains(what)).unwrap_or_else(|| panic!("no {what}"));
        let refused = loaded.run(&stream, step, &mut arena, &weight).expect_err("the caller's");
        assert!(matches!(&refused, Error::CallersStep { step: got } if got == step), "{refused}");
    }
    let missing = loaded.run(&stream, &gate.op_id, &mut arena, OpWeights::default());
    assert!(matches!(missing, Err(Error::MissingWeight { .. })), "{missing:?}");

    let optimizer = ctx.plan_optimizer(&Optimizer::adamw(INNER * HIDDEN)).expect("served");
    let step = optimizer.step(&OptimizerStep::new(1, 0.01)).expect("finite");
    put(&mut arena, "optimizer_step", &DType::F32.encode(&step));
    for part in ["master", "moment1", "moment2"] {
        put(&mut arena, &format!("blk.0.ffn_gate.weight.{part}"), &vec![0; INNER * HIDDEN * 4]);
    }
    loaded.run(&stream, "blk.0.ffn_gate.weight.optimizer", &mut arena, OpWeights::default()).expect("planned");
    let moved: Vec<f32> =
        ctx.download(arena.region("blk.0.ffn_gate.weight.master").expect("planned")).expect("readable");
    // The first step of AdamW has the length of its rate, against the gradient.
    let is_right = |(w, g): (&f32, &f32)| if *g == 0.0 { *w == 0.0 } else { (w + 0.01 * g.signum()).abs() < 1e-4 };
    assert!(moved.iter().zip(&dw).all(is_right));
}

/// A changed plan is refused with the first mismatch.
#[test]
fn what_does_not_fit_is_named() {
    let folder = Folder::new();
    let path = folder.model("llama", &dense(1));
    let model = open_model(&path).expect("a model");
    let ctx = Context::open("cpu").expect("always there");
    let good = serde_json::to_value(plan(&ctx, &path)).expect("JSON");
    ctx.load_plan(&good.to_string(), &model).expect("it fits");
    // One block too many per row: the first row would be
    // right, all others garbage.
    let row_bytes = (HIDDEN / 32 + 1) * 34;
    let shared = good["memory"]["regions"].as_array().expect("regions").iter().position(|r| r["name"] == "blk.0.k");
    let of_shared = |field: &str| format!("/memory/regions/{}/{field}", shared.expect("it is there"));
    let q =
        &good["memory"]["regions"].as_array().expect("regions").iter().find(|r| r["name"] == "blk.0.q").expect("there");
    let mut every_second = good["ops"][7]["norm"].clone();
    every_second["every"] = json!(2);
    let cases = [
        ("/schema".to_owned(), json!("qgemm.exec.v2"), "schema"),
        ("/memory/schema".into(), json!("qgemm.memory.v0"), "memory.schema"),
        ("/runtime/device/arch".into(), json!("sm_90"), "runtime.device.arch"),
        ("/runtime/device/driver".into(), json!("999.1"), "runtime.device.driver"),
        ("/runtime/device/units".into(), json!(4096), "runtime.device.units"),
        ("/model/tensors".into(), json!("0".repeat(64)), "model.tensors"),
        ("/ops/1/weight/row_bytes".into(), json!(row_bytes), "ops[1] (blk.0.attn_qkv).weight.row_bytes"),
        ("/ops/5/weight/bytes".into(), json!(7), "ops[5] (blk.0.ffn_gate_up).weight.bytes"),
        ("/ops/0/weight/bytes".into(), json!(7), "ops[0] (token_embd).weight.bytes"),
        ("/ops/6/source_hash".into(), json!("0123456789abcdef"), "ops[6] (blk.0.ffn_down).source_hash"),
        ("/ops/1/kernel_id".into(), json!("gemm:none:-:x"), "ops[1] (blk.0.attn_qkv).kernel_id"),
        ("/ops/1/dispatch/grid".into(), json!([9, 9, 9]), "ops[1] (blk.0.attn_qkv).dispatch"),
        ("/ops/7/dispatch/split_axis".into(), json!("k"), "ops[7] (output_norm).dispatch"),
        ("/ops/3/dispatch/parts".into(), json!(99), "ops[3] (blk.0.attn).dispatch"),
        ("/ops/1/x".into(), json!("nowhere"), "ops[1] (blk.0.attn_qkv).x"),
        ("/ops/7/norm/function".into(), json!("batch"), "norm.function"),
        ("/ops/1/norm/function".into(), json!("batch"), "norm.function"),
        ("/ops/7/norm/gamma".into(), json!("nowhere"), "ops[7] (output_norm).norm.gamma"),
        ("/ops/7/norm".into(), every_second, "memory.regions (hidden.1).bytes"),
        ("/ops/1/segments/0/first".into(), json!(HIDDEN + 16), "segments"),
        ("/ops/1/segments/1/features".into(), json!(KV + 16), "segments"),
        ("/ops/1/segments/0/d".into(), json!("nowhere"), "ops[1] (blk.0.attn_qkv).segments.d"),
        ("/ops/2/heads/capacity".into(), json!(CONTEXT + 1), "memory.regions (blk.0.k_cache).bytes"),
        ("/ops/2/heads/rotary/pairs".into(), json!("all"), "heads.rotary.pairs"),
        ("/ops/3/kernel_id".into(), json!("attention:none:-:x"), "ops[3] (blk.0.attn).kernel_id"),
        ("/memory/arena_bytes".into(), json!(1u64 << 50), "memory.arena_bytes"),
        ("/ops/1/reduction/order".into(), json!("last-arriver-in-order"), "ops[1] (blk.0.attn_qkv).reduction"),
        (of_shared("bytes"), json!(1), "memory.regions (blk.0.k).bytes"),
        (of_shared("offset"), q["offset"].clone(), "memory.regions ("),
        (of_shared("offset"), json!(1), "memory.regions (blk.0.k).offset"),
        (of_shared("last_op"), json!(1000), "memory.regions (blk.0.k).last_op"),
    ];
    for (pointer, value, named) in cases {
        let mut plan = good.clone();
        *plan.pointer_mut(&pointer).unwrap_or_else(|| panic!("{pointer} is not there")) = value;
        match ctx.load_plan(&plan.to_string(), &model) {
            Err(Error::PlanMismatch { at, expected, got }) => {
                assert!(at.starts_with(named) && expected != got, "{pointer}: {at}: {expected}, {got}");
            }
            other => panic!("{pointer}: {other:?}"),
        }
    }
    assert!(matches!(ctx.load_plan("[", &model), Err(Error::BadPlanFile(_))));
    let other = open_model(folder.model("llama", &dense(2))).expect("a model");
    let error = ctx.load_plan(&good.to_string(), &other).expect_err("another model").to_string();
    assert!(error.contains("model.tensors"), "{error}");
}

/// A plan for an absent chip fits matching devices only.
#[test]
fn chips_that_are_not_here_can_be_planned_for() {
    let folder = Folder::new();
    let path = folder.model("qwen3moe", &of_experts(1));
    let ctx = match Context::open("emu:sm90") {
        Ok(ctx) => ctx,
        Err(why) => return qgemm_testkit::skipped("chips_that_are_not_here_can_be_planned_for", &why.to_string()),
    };
    let plan = plan(&ctx, &path);
    assert!(plan.ops.iter().all(|op| op.kernel_id.contains(":sm90:")), "{:?}", plan.ops[0].kernel_id);
    check_schemas(&plan);
    let text = serde_json::to_string(&plan).expect("JSON");
    let model = open_model(&path).expect("a model");
    ctx.load_plan(&text, &model).expect("it fits");
    let other = Context::open("emu:sm80").expect("there as well").load_plan(&text, &model);
    assert!(matches!(other, Err(Error::PlanMismatch { at, .. }) if at == "runtime.device.arch"));

    // Planning takes time in proportion to the layers: eight times as many, far from the square of that.
    let least_seconds = |layers| {
        let path = folder.model("qwen3moe", &of_experts(layers));
        let timed = || {
            let start = std::time::Instant::now();
            let text = serde_json::to_string_pretty(&self::plan(&ctx, &path)).expect("JSON");
            assert!(text.contains(&format!("blk.{}.ffn_down", layers - 1)));
            start.elapsed().as_secs_f64()
        };
        // Other tests run concurrently.
        (0..3).map(|_| timed()).fold(f64::INFINITY, f64::min)
    };
    let (few, many) = (least_seconds(8), least_seconds(64));
    assert!(many < 24.0 * few, "64 layers: {many} s, 8 layers: {few} s");
}
