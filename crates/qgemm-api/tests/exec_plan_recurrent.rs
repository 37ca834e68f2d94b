//! Execution plans of models with recurrent layers: contents,
//! states, refusals.

use std::path::Path;

use qgemm_api::exec::{PlannedRows, RegionKind};
use qgemm_api::{Context, Error, PlanOptions, open_model};
use serde_json::{Value, json};

#[allow(dead_code, reason = "other plan tests use the rest")]
mod common {
    pub mod models;
    pub mod plan_checks;
    pub mod schema;
}
use common::models::*;
use common::plan_checks::*;

const SLOTS: usize = 5;
const KEYS: usize = KV_HEADS * HEAD_DIM;

/// A layer of the gated delta rule,
/// and one of gated attention (qwen35).
fn recurrent() -> Vec<Tensor> {
    let (keys, values) = (KV_HEADS * HEAD_DIM, HEADS * HEAD_DIM);
    let matrix = |name: &str, n, k| (format!("{name}.weight"), vec![n, k], "q8_0");
    let mut tensors = vec![matrix("token_embd", VOCABULARY, HIDDEN), norm("output_norm", HIDDEN)];
    for layer in 0..2 {
        tensors.extend(["attn_norm", "post_attention_norm"].map(|role| norm(&format!("blk.{layer}.{role}"), HIDDEN)));
        for (role, n, k) in [("ffn_gate", INNER, HIDDEN), ("ffn_up", INNER, HIDDEN), ("ffn_down", HIDDEN, INNER)] {
            tensors.push(matrix(&format!("blk.{layer}.{role}"), n, k));
        }
    }
    tensors.extend([
        matrix("blk.0.attn_qkv", 2 * keys + values, HIDDEN),
        matrix("blk.0.attn_gate", values, HIDDEN),
        matrix("blk.0.ssm_beta", HEADS, HIDDEN),
        matrix("blk.0.ssm_alpha", HEADS, HIDDEN),
        matrix("blk.0.ssm_out", HIDDEN, values),
        ("blk.0.ssm_conv1d.weight".into(), vec![2 * keys + values, 4], "f32"),
        ("blk.0.ssm_a".into(), vec![HEADS], "f32"),
        ("blk.0.ssm_dt.bias".into(), vec![HEADS], "f32"),
        norm("blk.0.ssm_norm", HEAD_DIM),
        matrix("blk.1.attn_q", 2 * HIDDEN, HIDDEN),
        matrix("blk.1.attn_k", KV, HIDDEN),
        matrix("blk.1.attn_v", KV, HIDDEN),
        matrix("blk.1.attn_output", HIDDEN, HIDDEN),
    ]);
    tensors.extend(["q", "k"].map(|role| norm(&format!("blk.1.attn_{role}_norm"), HEAD_DIM)));
    tensors
}

fn options() -> PlanOptions {
    let mut options = PlanOptions::new(BATCH);
    options.slots = Some(SLOTS);
    options
}

#[test]
fn a_plan_has_the_mixer_of_each_layer_and_states_by_slot() {
    let folder = Folder::new();
    let path = folder.model("qwen35", &recurrent());
    for ctx in devices("a_plan_has_the_mixer_of_each_layer_and_states_by_slot") {
        let plan = ctx.plan_model(&path, &options()).expect("it is served");
        check_schemas(&plan);
        check_memory(&plan);
        let of_layer = |layer: &str| {
            let of = plan.ops.iter().filter_map(|op| Some((op.op_id.strip_prefix(layer)?, op.operation.as_str())));
            of.collect::<Vec<_>>()
        };
        let feed_forward = [("ffn_gate_up", "gemm"), ("ffn_down", "gemm")];
        let recurrent = [
            ("linear_qkvgate", "gemm"),
            ("linear_conv", "short_conv"),
            ("linear_attn", "linear_attention"),
            ("linear_gated_norm", "norm"),
            ("linear_output", "gemm"),
        ];
        // Four heads are too few for segments of one product.
        let got: Vec<_> =
            of_layer("blk.0.").into_iter().filter(|(id, _)| !["linear_beta", "linear_step"].contains(id)).collect();
        assert_eq!(got, [&recurrent[..], &feed_forward].concat());
        let of_attention =
            [("attn_qgatekv", "gemm"), ("kv_append", "kv_append"), ("attn", "attention"), ("attn_output", "gemm")];
        assert_eq!(of_layer("blk.1."), [&of_attention[..], &feed_forward].concat());

        // Query and gate of each head are neighbours in one tensor.
        let op = |id: &str| plan.ops.iter().find(|op| op.op_id == id).expect("above");
        let weight = op("blk.1.attn_qgatekv").weight.as_ref().expect("of a product");
        let rows = |rows: PlannedRows| (rows.first, rows.count, rows.every);
        let rows: Vec<_> = weight.rows.iter().map(|of| of.map(rows)).collect();
        let from = |first| Some((first, HEAD_DIM, 2 * HEAD_DIM));
        assert_eq!(rows, [from(0), from(HEAD_DIM), None, None]);
        assert_eq!(weight.tensors[..2], ["blk.1.attn_q.weight", "blk.1.attn_q.weight"]);

        let last = plan.ops.len() - 1;
        let channels = 2 * KEYS + HEADS * HEAD_DIM;
        for (name, bytes) in [
            ("blk.0.conv_state", SLOTS * 3 * channels * 2),
            ("blk.0.linear_state", SLOTS * HEADS * HEAD_DIM * HEAD_DIM * 4),
        ] {
            let state = region(&plan, name);
            assert_eq!((state.kind, state.bytes), (RegionKind::RecurrentState, bytes), "{name}");
            assert_eq!((state.first_op, state.last_op), (0, last), "{name}");
        }
        assert_eq!(region(&plan, "state_slots").kind, RegionKind::Input);
        let barrier = plan.barriers.iter().find(|barrier| barrier.step.is_some()).expect("inputs");
        assert!(barrier.writes.iter().any(|region| region == "state_slots"), "{barrier:?}");
    }
}

/// Plans of other batches have the states at the same place.
#[test]
fn plans_of_one_model_share_states() {
    let folder = Folder::new();
    let path = folder.model("qwen35", &recurrent());
    let (ctx, model) = (Context::open("cpu").expect("always there"), open_model(&path).expect("a model"));
    let plan = |batch, slots| {
        let mut options = PlanOptions::new(batch);
        (options.sequences, options.slots, options.context) = (Some(1), Some(slots), Some(CONTEXT));
        ctx.load_exec_plan(ctx.plan_model(&path, &options).expect("it is served"), &model).expect("it fits")
    };
    let (prompt, step, other) = (plan(8, SLOTS), plan(1, SLOTS), plan(1, 2));
    let mut arena = prompt.arena_beside(&[&step]).expect("memory");
    let stream = ctx.default_stream();
    let state = |arena: &qgemm_api::PlanArena| -> Vec<u8> {
        ctx.download(arena.region("blk.0.linear_state").expect("planned")).expect("readable")
    };
    let ones = vec![1u8; state(&arena).len()];
    ctx.upload_into(&ones, arena.region_mut("blk.0.linear_state").expect("planned")).expect("it has room");
    step.enter(&stream, &mut arena).expect("the same states");
    assert!(state(&arena) == ones);
    let refused = other.enter(&stream, &mut arena);
    assert!(matches!(refused, Err(Error::PlanMismatch { .. })), "{refused:?}");

    step.clear_slot(&stream, &mut arena, 1).expect("it exists");
    let each = ones.len() / SLOTS;
    let cleared = state(&arena);
    assert!(cleared.iter().enumerate().all(|(at, &byte)| (byte == 0) == (at / each == 1)));
    let refused = step.clear_slot(&stream, &mut arena, SLOTS);
    assert!(matches!(refused, Err(Error::OutOfRange { name: "slot", .. })), "{refused:?}");
}

fn refused(ctx: &Context, path: &Path, change: impl FnOnce(&mut Value)) -> String {
    let model = open_model(path).expect("a model");
    let mut plan = serde_json::to_value(ctx.plan_model(path, &options()).expect("it is served")).expect("JSON");
    change(&mut plan);
    ctx.load_plan(&plan.to_string(), &model).map(drop).expect_err("refused").to_string()
}

fn op<'p>(plan: &'p mut Value, id: &str) -> &'p mut Value {
    let ops = plan["ops"].as_array_mut().expect("a list");
    ops.iter_mut().find(|op| op["op_id"] == id).expect("planned")
}

#[test]
fn plans_with_other_states_or_columns_are_refused() {
    let folder = Folder::new();
    let path = folder.model("qwen35", &recurrent());
    let ctx = Context::open("cpu").expect("always there");
    let columns = refused(&ctx, &path, |plan| op(plan, "blk.0.linear_attn")["linear"]["v"] = json!(1 << 20));
    assert!(columns.contains("linear") && columns.contains("columns within"), "{columns}");
    let gate = refused(&ctx, &path, |plan| op(plan, "blk.0.linear_conv")["conv"]["input_gate"] = json!(1));
    assert!(gate.contains("conv") && gate.contains("columns within"), "{gate}");
    let slots =
        refused(&ctx, &path, |plan| op(plan, "blk.0.linear_attn")["linear"]["state"]["slots"] = json!(SLOTS + 1));
    assert!(slots.contains("blk.0.linear_state") && slots.contains("or more"), "{slots}");
    let huge = refused(&ctx, &path, |plan| op(plan, "blk.0.linear_conv")["conv"]["state"]["slots"] = json!(u64::MAX));
    assert!(!huge.is_empty());
    let function =
        refused(&ctx, &path, |plan| op(plan, "blk.0.linear_gated_norm")["norm"]["gate"]["function"] = json!("tanh"));
    assert!(function.contains("norm.gate.function") && function.contains("silu or sigmoid"), "{function}");
    let without = refused(&ctx, &path, |plan| {
        op(plan, "blk.0.linear_conv").as_object_mut().expect("an object").remove("conv");
    });
    assert!(without.contains("blk.0.linear_conv"), "{without}");
}

#[test]
fn rows_that_a_tensor_has_not_are_refused_when_they_are_loaded() {
    let folder = Folder::new();
    let path = folder.model("qwen35", &recurrent());
    let (ctx, model) = (Context::open("cpu").expect("always there"), open_model(&path).expect("a model"));
    for rows in [json!({ "first": 8, "count": 16, "every": 16 }), json!({ "first": 0, "count": 16, "every": 0 })] {
        let mut plan = serde_json::to_value(ctx.plan_model(&path, &options()).expect("it is served")).expect("JSON");
        op(&mut plan, "blk.1.attn_qgatekv")["weight"]["rows"][0] = rows;
        let loaded = ctx.load_plan(&plan.to_string(), &model).expect("rows are read with the weights");
        let refused = loaded.load_weights(&model).expect_err("refused");
        assert!(matches!(refused, Error::NotInPlan { what: "tensor of", .. }), "{refused}");
    }
}
