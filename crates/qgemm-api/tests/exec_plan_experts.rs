//! Training plans of MoE models: contents and runs.

use qgemm_api::exec::Phase;
use qgemm_api::{
    Context, DType, Error, HostExperts, HostWeight, LoadedPlan, Model, OpWeights, PlanArena, PlanOptions, open_model,
};
use serde_json::json;

mod common {
    pub mod models;
    pub mod plan_checks;
    pub mod schema;
}
use common::models::*;
use common::plan_checks::*;

/// Rows are sorted by expert, so expert products have both gradients,
/// each over its expert's rows.
#[test]
fn training_goes_back_through_experts() {
    for ctx in devices("training_goes_back_through_experts") {
        training_goes_back_through_experts_on(&ctx);
    }
}

fn training_goes_back_through_experts_on(ctx: &Context) {
    let folder = Folder::new();
    let mut options = PlanOptions::new(BATCH);
    options.train = true;
    let path = folder.model("qwen3moe", &of_experts(2));
    let plan = ctx.plan_model(&path, &options).expect("it is served");
    check_schemas(&plan);
    check_memory(&plan);
    let ids = |phase: Phase| -> Vec<&str> {
        let of_layer = plan.ops.iter().filter(|op| op.phase == phase && op.op_id.starts_with("blk.1."));
        of_layer.map(|op| op.op_id.as_str()).filter(|id| id.contains("ffn_") || id.contains("routing")).collect()
    };
    let forward = ["ffn_norm", "ffn_router", "routing", "ffn_gate", "ffn_up", "ffn_down"];
    assert_eq!(ids(Phase::Forward), forward.map(|role| format!("blk.1.{role}")));
    let mut backward: Vec<String> = ["ffn_down", "ffn_up", "ffn_gate", "ffn_router"]
        .iter()
        .flat_map(|role| ["dx", "dw"].map(|what| format!("blk.1.{role}.{what}")))
        .collect();
    let trained = ["ffn_down_exps", "ffn_up_exps", "ffn_gate_exps", "ffn_gate_inp"];
    backward.extend(trained.map(|tensor| format!("blk.1.{tensor}.weight.optimizer")));
    assert_eq!(ids(Phase::Backward), backward);
    let op = |id: &str| plan.ops.iter().find(|op| op.op_id == id).unwrap_or_else(|| panic!("no {id}"));
    let offsets = Some("blk.0.ffn_offsets");
    for id in ["ffn_gate", "ffn_down", "ffn_gate.dx", "ffn_down.dw"] {
        assert_eq!(op(&format!("blk.0.{id}")).offsets.as_deref(), offsets, "{id}");
    }
    assert_eq!(region(&plan, "blk.0.ffn_offsets").bytes, (EXPERTS + 1) * 4);
    // The gate accumulates onto the up's gradient, and the router onto
    // that of the sorted rows.
    assert!(op("blk.0.ffn_up.dx").residual.is_none() && op("blk.0.ffn_gate.dx").residual.is_some());
    assert_eq!(op("blk.0.ffn_router.dx").residual.as_deref(), Some("blk.0.ffn_norm.grad"));
    let (gate, dw) = (op("blk.0.ffn_gate.dx"), op("blk.0.ffn_gate.dw"));
    assert_eq!((gate.shape.m, gate.shape.n, gate.shape.k), (BATCH * 2, HIDDEN, INNER));
    assert_eq!((dw.shape.m, dw.shape.n, dw.shape.k, dw.products), (INNER, HIDDEN, BATCH * 2, Some(EXPERTS)));
    for part in ["grad", "master", "moment1", "moment2"] {
        assert_eq!(region(&plan, &format!("blk.0.ffn_gate_exps.weight.{part}")).bytes, EXPERTS * INNER * HIDDEN * 4);
    }
    let steps = |step: &str| plan.barriers.iter().filter(|b| b.step.as_deref() == Some(step)).count();
    for step in ["sort rows by expert", "sort rows by expert backward"] {
        assert_eq!(steps(&format!("{step}: blk.0.ffn_sorted")), 1, "{step}");
    }
    assert_eq!(steps("sum of slots: hidden.1") + steps("sum of slots backward: hidden.1"), 2);
    assert_eq!(steps("routing backward: blk.0.router_weights"), 1);
    let text = serde_json::to_string(&plan).expect("JSON");
    let loaded = ctx.load_plan(&text, &open_model(&path).expect("a model")).expect("it fits");
    experts_gradients_run_in_the_arena(ctx, &loaded, &open_model(&path).expect("a model"));
    let mut wrong = serde_json::to_value(&plan).expect("JSON");
    let place = plan.ops.iter().position(|op| op.op_id == "blk.1.ffn_up.dx").expect("above");
    wrong["ops"][place]["offsets"] = json!("optimizer_step");
    let refused = ctx.load_plan(&wrong.to_string(), &open_model(&path).expect("a model"));
    assert!(matches!(refused, Err(Error::PlanMismatch { .. })), "{refused:?}");
}

/// Forward and backward through a layer's gates. One expert has
/// most rows and one has none.
fn experts_gradients_run_in_the_arena(ctx: &Context, loaded: &LoadedPlan, model: &Model) {
    const ROWS: usize = BATCH * 2;
    let stream = ctx.default_stream();
    let mut arena = loaded.arena().expect("small").check_canaries(true);
    let gates: Vec<HostWeight> = (0..EXPERTS)
        .map(|expert| model.stacked_weight("blk.0.ffn_gate_exps.weight", expert).expect("in the model"))
        .collect();
    let experts = ctx.load_experts(&HostExperts::new(&gates).expect("alike")).expect("they fit");
    let put = |arena: &mut PlanArena, name: &str, bytes: &[u8]| {
        ctx.upload_into(bytes, arena.region_mut(name).expect("planned")).expect("it has room");
    };
    let get = |arena: &PlanArena, name: &str| -> Vec<u8> {
        ctx.download(arena.region(name).expect("planned")).expect("readable")
    };
    let offsets = [0u32, 1, 1, 5, 6];
    let owner = |row: usize| (0..EXPERTS).find(|&e| (offsets[e]..offsets[e + 1]).contains(&(row as u32))).expect("one");
    let halves = |seed: usize, columns: usize| DType::F16.encode(&values(ROWS * columns, seed));
    let (x, dy) = (halves(3, HIDDEN), halves(5, INNER));
    put(&mut arena, "blk.0.ffn_offsets", &offsets.map(u32::to_le_bytes).concat());
    put(&mut arena, "blk.0.ffn_sorted", &x);
    loaded.run(&stream, "blk.0.ffn_gate", &mut arena, &experts).expect("planned");
    let y = DType::F16.decode(&get(&arena, "blk.0.ffn_gated"));
    put(&mut arena, "blk.0.ffn_gated.grad", &dy);
    put(&mut arena, "blk.0.ffn_sorted.grad", &vec![0; ROWS * HIDDEN * 2]);
    loaded.run(&stream, "blk.0.ffn_gate.dx", &mut arena, &experts).expect("planned");
    let dx = DType::F16.decode(&get(&arena, "blk.0.ffn_sorted.grad"));
    loaded.run(&stream, "blk.0.ffn_gate.dw", &mut arena, OpWeights::default()).expect("planned");
    let dw: Vec<f32> = DType::F32.decode(&get(&arena, "blk.0.ffn_gate_exps.weight.grad"));
    let (x, dy) = (DType::F16.decode(&x), DType::F16.decode(&dy));
    let rows: Vec<Vec<Vec<f32>>> =
        gates.iter().map(|gate| (0..INNER).map(|row| gate.dequantize_row(row)).collect()).collect();
    let near = |got: f32, expected: f32, what: &str| {
        assert!((got - expected).abs() < 0.02 + expected.abs() * 0.02, "{what}: {got} is not {expected}");
    };
    for row in 0..ROWS {
        let w = &rows[owner(row)];
        for (n, of_n) in w.iter().enumerate() {
            let sum = (0..HIDDEN).map(|k| x[row * HIDDEN + k] * of_n[k]).sum();
            near(y[row * INNER + n], sum, "y");
        }
        for k in 0..HIDDEN {
            near(dx[row * HIDDEN + k], (0..INNER).map(|n| dy[row * INNER + n] * w[n][k]).sum(), "dx");
        }
    }
    for (expert, of_expert) in dw.chunks(INNER * HIDDEN).enumerate() {
        for (i, &got) in of_expert.iter().enumerate() {
            let of_row = |row: usize| dy[row * INNER + i / HIDDEN] * x[row * HIDDEN + i % HIDDEN];
            near(got, (0..ROWS).filter(|&row| owner(row) == expert).map(of_row).sum(), "dw");
        }
    }
}

/// A plan for an absent chip has kernels for all operations of both phases,
/// and can be loaded again.
#[test]
fn training_is_planned_for_a_chip_that_is_not_here() {
    let ctx = match Context::open("emu:sm90") {
        Ok(ctx) => ctx,
        Err(why) => return qgemm_testkit::skipped("training_is_planned_for_a_chip_that_is_not_here", &why.to_string()),
    };
    let folder = Folder::new();
    let mut options = PlanOptions::new(BATCH);
    options.train = true;
    let path = folder.model("qwen3moe", &of_experts(1));
    let plan = ctx.plan_model(&path, &options).expect("it is served");
    check_memory(&plan);
    let kernel =
        |id: &str| plan.ops.iter().find(|op| op.op_id == id).map(|op| op.kernel_id.clone()).unwrap_or_default();
    let (dx, dw) = (kernel("blk.0.ffn_up.dx"), kernel("blk.0.ffn_up.dw"));
    assert!(dx.contains("sm80_cp_async_rows") && dw.contains("layout=tn"), "{dx}, {dw}");
    let text = serde_json::to_string(&plan).expect("JSON");
    ctx.load_plan(&text, &open_model(&path).expect("a model")).expect("it fits");
}
