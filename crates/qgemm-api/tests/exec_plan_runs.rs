//! Runs of execution plans: whole steps, and single operations.

use std::collections::BTreeSet;
use std::path::Path;

use qgemm_api::exec::{ExecPlan, RegionKind};
use qgemm_api::{
    Args, Context, DType, DeviceKind, Error, KvFormat, LoadedPlan, Model, OpWeights, PlanArena, PlanOptions,
    PlanWeights, PrepareLimits, Problem, SamplingParameters, half::f16, open_model,
};

mod common {
    pub mod dense_model;
    pub mod models;
    pub mod plan_checks;
    pub mod schema;
}
use common::dense_model::dense;
use common::models::*;
use common::plan_checks::*;
use serde_json::json;

/// A plan with its weights and arena.
struct Program {
    ctx: Context,
    loaded: LoadedPlan,
    weights: PlanWeights,
    arena: PlanArena,
}

impl Program {
    fn new(ctx: &Context, path: &Path, options: &PlanOptions) -> Self {
        let model = open_model(path).expect("a model");
        let loaded = load(ctx, &ctx.plan_model(path, options).expect("it is served"), &model);
        let weights = loaded.load_weights(&model).expect("memory");
        let arena = loaded.arena().expect("memory").check_canaries(true);
        Self { ctx: ctx.clone(), loaded, weights, arena }
    }

    /// Logits behind `tokens`, where sequences have these lengths.
    fn step(&mut self, tokens: &[u32], lengths: &[u32]) -> Vec<f32> {
        self.put("tokens", tokens);
        self.put("kv_lengths", lengths);
        self.run();
        self.read("logits")
    }

    fn run(&mut self) {
        self.loaded.step(&self.ctx.default_stream(), &mut self.arena, &self.weights).expect("it runs");
    }

    fn words(&self, name: &str) -> Vec<u32> {
        self.ctx.download(self.arena.region(name).expect("planned")).expect("readable")
    }

    fn put(&mut self, name: &str, words: &[u32]) {
        self.ctx.upload_into(words, self.arena.region_mut(name).expect("planned")).expect("it has room");
    }

    fn read(&self, name: &str) -> Vec<f32> {
        self.ctx.download(self.arena.region(name).expect("planned")).expect("readable")
    }
}

fn load(ctx: &Context, plan: &ExecPlan, model: &Model) -> LoadedPlan {
    ctx.load_plan(&serde_json::to_string(plan).expect("JSON"), model).expect("it fits")
}

/// [`devices`], and an emulated GPU if there is a compiler.
fn devices_and_emulator(test: &str) -> Vec<Context> {
    let mut devices = devices(test);
    match Context::open("emu:sm80") {
        Ok(ctx) => devices.push(ctx),
        Err(why) => qgemm_testkit::skipped(test, &format!("on emu:sm80: {why}")),
    }
    devices
}

/// Options of a prompt of one sequence.
fn prompt(tokens: usize) -> PlanOptions {
    let mut options = PlanOptions::new(tokens);
    options.sequences = Some(1);
    options
}

fn plan(ctx: &Context, path: &Path) -> ExecPlan {
    ctx.plan_model(path, &PlanOptions::new(BATCH)).expect("it is served")
}

fn loss(got: &[f32], wanted: &[f32]) -> f32 {
    let energy: f32 = wanted.iter().map(|y| y * y).sum();
    got.iter().zip(wanted).map(|(got, y)| (got - y).powi(2)).sum::<f32>() / energy
}

/// Token by token, as a prompt with all logits, and as a
/// prompt with those of its last token.
#[test]
fn a_prompt_and_its_tokens_alone_give_the_same_logits() {
    let folder = Folder::new();
    let mut mixed = dense(2);
    mixed.iter_mut().filter(|(name, ..)| name.ends_with("attn_v.weight")).for_each(|tensor| tensor.2 = "q4_0");
    let mut normed = dense(2);
    normed.extend(head_norms(2));
    let models =
        [folder.model("llama", &mixed), folder.model("qwen3", &normed), folder.model("qwen3moe", &of_experts(2))];
    for ctx in devices_and_emulator("a_prompt_and_its_tokens_alone_give_the_same_logits") {
        // Shaders compile for seconds.
        let count = if ctx.info().id.kind == DeviceKind::Cpu { models.len() } else { 1 };
        for path in &models[..count] {
            let tokens = [7u32, 0, (VOCABULARY - 1) as u32, 7];
            let mut one = Program::new(&ctx, path, &PlanOptions::new(1));
            let alone: Vec<Vec<f32>> = (1..).zip(tokens).map(|(length, token)| one.step(&[token], &[length])).collect();
            assert!(loss(&alone[0], &alone[3]) > 1e-2, "the second 7 has other keys");
            let mut options = prompt(tokens.len());
            let last = Program::new(&ctx, path, &options).step(&tokens, &[tokens.len() as u32]);
            options.all_logits = true;
            let all = Program::new(&ctx, path, &options).step(&tokens, &[tokens.len() as u32]);
            assert_eq!(all.len(), tokens.len() * VOCABULARY);
            let (name, device) = (path.file_stem().expect("a name").to_string_lossy(), ctx.info().id);
            for (row, alone) in all.chunks(VOCABULARY).zip(&alone) {
                assert!(loss(row, alone) < 1e-4, "{name} on {device}: {}", loss(row, alone));
            }
            assert!(loss(&last, &alone[3]) < 1e-4, "{name} on {device}: {}", loss(&last, &alone[3]));
        }
    }
}

/// Formats, pages and rotations of the cache give the logits of
/// f16 rows, but for what the format rounds.
#[test]
fn caches_of_other_formats_and_pages_give_the_same_logits() {
    let folder = Folder::new();
    let path = folder.model("llama", &dense(2));
    for ctx in devices_and_emulator("caches_of_other_formats_and_pages_give_the_same_logits") {
        let steps = |options: &PlanOptions| -> Vec<Vec<f32>> {
            let mut program = Program::new(&ctx, &path, options);
            if let Some(size) = options.page_size {
                // Two sequences, whose pages alternate.
                let width = CONTEXT.div_ceil(size) as u32;
                program
                    .put("block_table", &(0..2).flat_map(|s| (0..width).map(move |p| 2 * p + s)).collect::<Vec<_>>());
            }
            (1..=12u32).map(|length| program.step(&[length, 3 * length], &[length; 2])).collect()
        };
        let rows = steps(&PlanOptions::new(2));
        for (format, page_size, rotate_cache, limit) in [
            (None, Some(5), false, 1e-6),
            (None, Some(5), true, 1e-3),
            (Some(KvFormat::Plain(DType::F32)), None, false, 1e-3),
            (Some(KvFormat::Plain(DType::F32)), None, true, 1e-3),
            (Some(KvFormat::E4M3), Some(16), false, 0.05),
            (Some(KvFormat::E4M3), Some(16), true, 0.05),
        ] {
            let mut options = PlanOptions::new(2);
            (options.kv_format, options.page_size, options.rotate_cache) = (format, page_size, rotate_cache);
            for (got, wanted) in steps(&options).iter().zip(&rows) {
                assert!(
                    loss(got, wanted) < limit,
                    "{format:?}, {page_size:?}, rotated {rotate_cache} on {}: {}",
                    ctx.info().id,
                    loss(got, wanted)
                );
            }
        }
    }
}

/// A rotated cache is stated by the append and undone in place, and a
/// changed rotation is refused.
#[test]
fn a_rotated_cache_is_undone_behind_attention() {
    let folder = Folder::new();
    let path = folder.model("llama", &dense(2));
    let (ctx, model) = (Context::open("cpu").expect("always there"), open_model(&path).expect("a model"));
    let mut options = PlanOptions::new(BATCH);
    options.rotate_cache = true;
    let plan = ctx.plan_model(&path, &options).expect("it is served");
    check_schemas(&plan);
    check_memory(&plan);
    let place = plan.ops.iter().position(|op| op.op_id == "blk.1.attn_rotation").expect("planned");
    let [append, attention, undo, output] = &plan.ops[place - 2..place + 2] else { panic!("four operations") };
    let heads = append.heads.as_ref().expect("of an append");
    assert!(heads.rotate_k && heads.rotate_v, "{heads:?}");
    assert_eq!((&undo.x, &undo.d, &undo.d), (&attention.d, &attention.d, &output.x));
    assert_eq!(undo.rotation.as_ref().map(|of| (of.heads, of.head_dim)), Some((HEADS, HEAD_DIM)));
    let good = serde_json::to_value(&plan).expect("JSON");
    ctx.load_plan(&good.to_string(), &model).expect("it fits");
    for (pointer, value, named) in [
        ("rotation/heads", json!(HEADS + 1), "shape.k"),
        ("rotation/head_dim", json!(usize::MAX), "shape.k"),
        ("d", json!("logits"), "d"),
        ("d_dtype", json!("f32"), "d_dtype"),
        ("kernel_id", json!("kv_append:none:-:x"), "kernel_id"),
    ] {
        let mut plan = good.clone();
        *plan.pointer_mut(&format!("/ops/{place}/{pointer}")).expect("it is there") = value;
        match ctx.load_plan(&plan.to_string(), &model) {
            Err(Error::PlanMismatch { at, .. }) => {
                assert_eq!(at, format!("ops[{place}] (blk.1.attn_rotation).{named}"));
            }
            other => panic!("{pointer}: {other:?}"),
        }
    }
    // In training, caches are activations.
    (options.train, options.sequences) = (true, Some(1));
    let trained = ctx.plan_model(&path, &options).expect("it is served");
    assert!(trained.ops.iter().all(|op| op.rotation.is_none()));
}

/// A prompt's plan hands its cache to that of a decoding step,
/// which feeds itself: tokens stay on the device.
#[test]
fn a_sampled_token_is_the_input_of_the_next_step() {
    let folder = Folder::new();
    let path = folder.model("llama", &dense(2));
    for ctx in devices_and_emulator("a_sampled_token_is_the_input_of_the_next_step") {
        let greedy = SamplingParameters { temperature: 0.0, ..SamplingParameters::default() };
        let (tokens, page_size) = ([7u32, 3, 70], 4);
        let paged = |mut options: PlanOptions| {
            (options.page_size, options.pages, options.sampling) = (Some(page_size), Some(20), true);
            options
        };
        let start = Program::new(&ctx, &path, &paged(prompt(tokens.len())));
        let next = Program::new(&ctx, &path, &paged(PlanOptions::new(1)));
        let arena = start.loaded.arena_beside(&[&next.loaded]).expect("memory").check_canaries(true);
        let mut start = Program { arena, ..start };
        let inputs = |program: &mut Program, length: u32| {
            program.put("kv_lengths", &[length]);
            program.put("block_table", &(0..CONTEXT.div_ceil(page_size) as u32).collect::<Vec<_>>());
            program.put("sampling_parameters", &greedy.words());
        };
        inputs(&mut start, 3);
        start.put("tokens", &tokens);
        start.run();
        let mut sampled = start.words("sampled");
        next.loaded.enter(&ctx.default_stream(), &mut start.arena).expect("the same caches");
        let mut next = Program { arena: start.arena, ..next };
        next.put("tokens", &sampled);
        for length in 4..8 {
            inputs(&mut next, length);
            next.run();
            sampled.extend(next.words("tokens"));
        }
        // The same by logits on the host.
        let mut plain = Program::new(&ctx, &path, &PlanOptions::new(1));
        let mut all = tokens.to_vec();
        for length in 1..=7 {
            let logits = plain.step(&[all[length - 1]], &[length as u32]);
            let best = (0..VOCABULARY as u32).rev().max_by(|&a, &b| logits[a as usize].total_cmp(&logits[b as usize]));
            if all.len() == length {
                all.extend(best);
            }
        }
        assert_eq!(sampled, all[3..], "{}", ctx.info().id);
        let other = plain.loaded.enter(&ctx.default_stream(), &mut next.arena);
        assert!(matches!(other, Err(Error::PlanMismatch { .. })), "{other:?}");
    }
}

/// Kernels are made ready in parallel, once for operations that share them.
#[test]
fn kernels_of_a_plan_are_made_ready() {
    let folder = Folder::new();
    let path = folder.model("llama", &dense(2));
    for ctx in devices("kernels_of_a_plan_are_made_ready") {
        let planned = plan(&ctx, &path);
        let loaded = load(&ctx, &planned, &open_model(&path).expect("a model"));
        let mut seen = Vec::new();
        let prepared = loaded.prepare_within(PrepareLimits::default(), |done, of| seen.push((done, of)));
        let made = prepared.expect("served");
        assert!(made > 1 && made < planned.ops.len(), "{made} of {}", planned.ops.len());
        assert_eq!(seen, (1..=made).map(|done| (done, made)).collect::<Vec<_>>());
        assert_eq!(loaded.prepare_within(PrepareLimits::default(), |_, _| ()).expect("served"), 0);
    }
}

/// A step is its operations one by one, in an arena and in
/// memory alone.
#[test]
fn a_step_is_its_operations() {
    let folder = Folder::new();
    let path = folder.model("llama", &dense(2));
    for ctx in devices("a_step_is_its_operations") {
        let mut whole = Program::new(&ctx, &path, &PlanOptions::new(BATCH));
        let (tokens, lengths) = ([3u32, 4, 5], [1u32; BATCH]);
        let logits = whole.step(&tokens, &lengths);
        let table = open_model(&path).expect("a model").weight("token_embd").expect("there");
        let rows: Vec<f32> = tokens.iter().flat_map(|&token| table.dequantize_row(token as usize)).collect();
        let mut parts = Program::new(&ctx, &path, &PlanOptions::new(BATCH));
        parts.put("tokens", &tokens);
        parts.put("kv_lengths", &lengths);
        for op in &parts.loaded.exec_plan().ops {
            let weights = parts.weights.of(op);
            parts.loaded.run(&ctx.default_stream(), &op.op_id, &mut parts.arena, weights).expect("it runs");
            if op.op_id == "token_embd" {
                let got: Vec<f32> = ctx.download(parts.arena.region("hidden.0").expect("planned")).expect("readable");
                assert_eq!(got, rows);
            }
        }
        assert_eq!(parts.read("logits"), logits);

        let Program { loaded, weights, arena, .. } = whole;
        let mut memory = arena.into_memory();
        for (name, words) in [("tokens", &tokens), ("kv_lengths", &lengths)] {
            let range = loaded.region_range(name).expect("planned");
            ctx.upload_into(&words[..], memory.slice_mut(range).expect("in range")).expect("it has room");
        }
        loaded.step_in(&ctx.default_stream(), memory.view_mut(), &weights).expect("it runs");
        let range = loaded.region_range("logits").expect("planned");
        let got: Vec<f32> = ctx.download(memory.slice(range).expect("in range")).expect("readable");
        assert_eq!(got, logits);
        let short = loaded.step_in(&ctx.default_stream(), memory.slice_mut(0..256).expect("in range"), &weights);
        assert!(matches!(short, Err(Error::BufferTooShort { .. })), "{short:?}");
    }
}

/// A step of the caller between operations keeps the plan's
/// step from running.
#[test]
fn a_step_of_the_callers_is_named() {
    let folder = Folder::new();
    let ctx = Context::open("cpu").expect("always there");
    let mut mixed = of_experts(1);
    mixed.iter_mut().filter(|(name, ..)| name.ends_with("ffn_up_exps.weight")).for_each(|tensor| tensor.2 = "q8_0");
    let model = folder.model("qwen3moe", &mixed);
    let plan = ctx.plan_model(&model, &PlanOptions::new(1)).expect("it is served");
    let plan = ctx.load_exec_plan(plan, &open_model(&model).expect("a model")).expect("it fits");
    let refused = plan.check_step();
    assert!(matches!(&refused, Err(Error::CallersStep { step }) if step == "multiply: blk.0.ffn"), "{refused:?}");
}

/// Gate and up of two formats are a pair in f16, with the values of
/// the file.
#[test]
fn gate_and_up_may_differ_in_format() {
    let folder = Folder::new();
    let ctx = Context::open("cpu").expect("always there");
    let logits = |role: &str, format: &'static str| {
        let mut tensors = dense(1);
        tensors.iter_mut().filter(|(name, ..)| name.contains("ffn_")).for_each(|tensor| tensor.2 = "f16");
        tensors.iter_mut().filter(|(name, ..)| name.contains(role)).for_each(|tensor| tensor.2 = format);
        let mut program = Program::new(&ctx, &folder.model("llama", &tensors), &PlanOptions::new(1));
        program.step(&[7], &[1])
    };
    let loss = |got: &[f32], of: &[f32]| {
        let squares = |values: &mut dyn Iterator<Item = f32>| values.map(|v| v * v).sum::<f32>();
        squares(&mut got.iter().zip(of).map(|(a, b)| a - b)) / squares(&mut of.iter().copied())
    };
    let plain = logits("ffn_", "f16");
    for role in ["ffn_gate.", "ffn_up."] {
        let loss = loss(&logits(role, "q8_0"), &plain);
        assert!(loss > 0.0 && loss < 1e-3, "{role}: {loss}");
    }
}

/// Products in the arena equal separate ones, and a byte written
/// past a region is found.
#[test]
fn products_run_in_the_arena_and_canaries_are_watched() {
    for ctx in devices("products_run_in_the_arena_and_canaries_are_watched") {
        products_run_in_the_arena_of(&ctx);
    }
}

fn products_run_in_the_arena_of(ctx: &Context) {
    let folder = Folder::new();
    let path = folder.model("llama", &dense(1));
    let model = open_model(&path).expect("a model");
    let text = serde_json::to_string(&plan(ctx, &path)).expect("JSON");
    let loaded = ctx.load_plan(&text, &model).expect("it fits");
    let mut arena = loaded.arena().expect("memory").check_canaries(true);
    let stream = ctx.default_stream();
    let x: Vec<f16> = values(BATCH * HIDDEN, 5).into_iter().map(f16::from_f32).collect();
    let weight = ctx.load(&model.weight("token_embd").expect("there")).expect("memory");
    ctx.upload_into(&x, arena.region_mut("output_norm").expect("there")).expect("it fits");
    loaded.run(&stream, "output", &mut arena, &weight).expect("it runs");
    let got: Vec<u8> = ctx.download(arena.region("logits").expect("there")).expect("readable");
    let alone = ctx.plan(&Problem::new(&weight, BATCH).x_dtype(DType::F16).d_dtype(DType::F32)).expect("served");
    let (input, mut output) = (ctx.upload(&x).expect("memory"), ctx.allocate(got.len()).expect("memory"));
    let mut workspace = ctx.workspace(alone.workspace_bytes()).expect("memory");
    alone.run(&stream, Args::new(&input, &weight, &mut output).workspace(&mut workspace)).expect("it runs");
    assert_eq!(got, ctx.download::<u8>(&output).expect("readable"));
    assert!(got.iter().collect::<BTreeSet<_>>().len() > 8, "results are not all alike");
    let weights = loaded.load_weights(&model).expect("memory");
    ctx.upload_into(&[1u32; BATCH], arena.region_mut("kv_lengths").expect("there")).expect("it fits");
    ctx.upload_into(&[0u32; BATCH], arena.region_mut("tokens").expect("there")).expect("it fits");
    loaded.step(&stream, &mut arena, &weights).expect("it runs");

    // One byte past the region, as a faulty caller's step might write.
    let written = region(loaded.exec_plan(), "logits");
    let end = written.offset - loaded.exec_plan().memory.weights_end + written.bytes;
    let (len, behind) = (written.bytes, end..end + 1);
    let memory = arena.memory();
    ctx.upload_into(&[1u8], memory.slice_mut(behind).expect("within the arena")).expect("it fits");
    match loaded.check_canaries(&stream, "output", &arena) {
        Err(Error::CanaryOverwritten { op, region, len: of, byte: 0 }) => {
            assert_eq!((op.as_str(), region.as_str(), of), ("output", "logits", len));
        }
        other => panic!("{other:?}"),
    }
    let found = loaded.run(&stream, "output", &mut arena, &weight);
    assert!(matches!(found, Err(Error::CanaryOverwritten { .. })), "{found:?}");
    let silent = loaded.run(&stream, "output", &mut arena.check_canaries(false), &weight);
    silent.expect("nobody looks");
    let regions = &loaded.exec_plan().memory.regions;
    assert!(regions.iter().any(|r| r.kind == RegionKind::Weight && r.name == "blk.0.attn_qkv.weight"));
}

/// Norm, KV append and attention in the arena equal those on their own buffers.
#[test]
fn what_stands_between_products_runs_in_the_arena() {
    for ctx in devices("what_stands_between_products_runs_in_the_arena") {
        what_stands_between_products_runs_in_the_arena_of(&ctx);
    }
}

fn what_stands_between_products_runs_in_the_arena_of(ctx: &Context) {
    let folder = Folder::new();
    let mut tensors = dense(1);
    tensors.extend(head_norms(1));
    let path = folder.model("qwen3", &tensors);
    let model = open_model(&path).expect("a model");
    let loaded = ctx.load_plan(&serde_json::to_string(&plan(ctx, &path)).expect("JSON"), &model).expect("it fits");
    let (stream, mut arena) = (ctx.default_stream(), loaded.arena().expect("memory").check_canaries(true));
    let put = |arena: &mut PlanArena, name: &str, bytes: &[u8]| {
        ctx.upload_into(bytes, arena.region_mut(name).expect("planned")).expect("it has room");
    };
    let read = |arena: &PlanArena, name: &str| -> Vec<f32> {
        DType::F16.decode(&ctx.download::<u8>(arena.region(name).expect("planned")).expect("readable"))
    };
    let gamma = |name: &str| ctx.upload(&model.dense(name).expect("there").to_f32()).expect("memory");
    let (hidden, gamma_of_output) = (values(BATCH * HIDDEN, 9), gamma("output_norm"));
    put(&mut arena, "hidden.1", &DType::F32.encode(&hidden));
    let of_output = OpWeights::default().gamma(&gamma_of_output);
    loaded.run(&stream, "output_norm", &mut arena, of_output).expect("planned");
    let normed = read(&arena, "output_norm");
    let of_gamma = model.dense("output_norm").expect("there").to_f32();
    for (row, got) in hidden.chunks(HIDDEN).zip(normed.chunks(HIDDEN)) {
        let root = (row.iter().map(|x| x * x).sum::<f32>() / HIDDEN as f32 + 1e-5).sqrt();
        let is_near = |((x, gamma), got): ((&f32, &f32), &f32)| (x / root * gamma - got).abs() < 4e-3;
        assert!(row.iter().zip(&of_gamma).zip(got).all(is_near));
    }
    // Each sequence has one key, its own. Attention then returns its value,
    // whatever queries and keys are.
    let v = values(BATCH * KV, 11);
    for (name, columns) in [("q", HIDDEN), ("k", KV)] {
        put(&mut arena, &format!("blk.0.{name}"), &DType::F16.encode(&values(BATCH * columns, 12)));
    }
    put(&mut arena, "blk.0.v", &DType::F16.encode(&v));
    put(&mut arena, "kv_lengths", &[1u32.to_le_bytes(); BATCH].concat());
    let q = read(&arena, "blk.0.q");
    let [of_q, of_k] = ["q", "k"].map(|role| gamma(&format!("blk.0.attn_{role}_norm")));
    let of_heads = OpWeights::default().head_gammas(&of_q, &of_k);
    loaded.run(&stream, "blk.0.kv_append", &mut arena, of_heads).expect("planned");
    // Position 0 turns nothing.
    let of_gamma = model.dense("blk.0.attn_q_norm").expect("there").to_f32();
    for (head, got) in q.chunks(HEAD_DIM).zip(read(&arena, "blk.0.q").chunks(HEAD_DIM)) {
        let root = (head.iter().map(|x| x * x).sum::<f32>() / HEAD_DIM as f32 + 1e-5).sqrt();
        let is_near = |((x, gamma), got): ((&f32, &f32), &f32)| (x / root * gamma - got).abs() < 4e-3;
        assert!(head.iter().zip(&of_gamma).zip(got).all(is_near), "{head:?} {got:?}");
    }
    loaded.run(&stream, "blk.0.attn", &mut arena, OpWeights::default()).expect("planned");
    let attended = read(&arena, "blk.0.attn");
    let (v, cache) = (DType::F16.decode(&DType::F16.encode(&v)), read(&arena, "blk.0.v_cache"));
    for token in 0..BATCH {
        assert_eq!(cache[token * CONTEXT * KV..][..KV], v[token * KV..][..KV]);
        for head in 0..HEADS {
            let of_v = token * KV + head / (HEADS / KV_HEADS) * HEAD_DIM;
            let got = &attended[token * HIDDEN + head * HEAD_DIM..][..HEAD_DIM];
            assert!(got.iter().zip(&v[of_v..]).all(|(got, v)| (got - v).abs() < 1e-3), "{got:?}");
        }
    }
    let missing = loaded.run(&stream, "blk.0.kv_append", &mut arena, OpWeights::default());
    assert!(matches!(missing, Err(Error::MissingWeight { what: "gammas of heads", .. })), "{missing:?}");
}
