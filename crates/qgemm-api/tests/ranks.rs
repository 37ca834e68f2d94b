//! Plans of ranks: what each has, their logits, and their
//! failures.

use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use qgemm_api::exec::{ExecPlan, PlannedOp, PlannedShard, RegionKind};
use qgemm_api::{
    Collective, Context, DType, Error, HalError, LoadedPlan, Network, PlanOptions, Ranks, ThreadGroup, XPrecision,
    open_model,
};

mod common {
    pub mod dense_model;
    #[allow(dead_code, reason = "other tests use the rest")]
    pub mod models;
    pub mod plan_checks;
    pub mod schema;
}
use common::dense_model::dense;
use common::models::*;
use common::plan_checks::*;

const LIMIT: Duration = Duration::from_secs(20);
const TOKENS: [u32; 4] = [7, 0, (VOCABULARY - 1) as u32, 7];

/// The plan of a rank, made without it.
fn plan(ctx: &Context, path: &Path, options: &PlanOptions, rank: usize, world: usize) -> Result<ExecPlan, Error> {
    let mut options = *options;
    options.ranks = Some(Ranks { rank, world });
    ctx.plan_model(path, &options)
}

fn load(ctx: &Context, plan: &ExecPlan, path: &Path) -> Result<LoadedPlan, Error> {
    ctx.load_plan(&serde_json::to_string(plan).expect("JSON"), &open_model(path).expect("a model"))
}

/// Logits of all tokens, as a prompt and one by one.
fn logits(ctx: &Context, path: &Path) -> Result<[Vec<f32>; 2], Error> {
    logits_of(ctx, path, PlanOptions::new(1))
}

/// The same without rounding but to f32, and with whole experts on
/// each rank.
fn logits_by_expert(ctx: &Context, path: &Path) -> Result<[Vec<f32>; 2], Error> {
    let mut options = PlanOptions::new(1);
    (options.x_dtype, options.x_precision, options.expert_parallel) = (DType::F32, XPrecision::Exact, true);
    logits_of(ctx, path, options)
}

fn logits_of(ctx: &Context, path: &Path, options: PlanOptions) -> Result<[Vec<f32>; 2], Error> {
    let model = open_model(path).expect("a model");
    let run = |options: PlanOptions, steps: &[(&[u32], u32)]| {
        let loaded = ctx.load_exec_plan(ctx.plan_model(path, &options)?, &model)?;
        let (weights, mut arena) = (loaded.load_weights(&model)?, loaded.arena()?.check_canaries(true));
        let mut all: Vec<f32> = Vec::new();
        for (tokens, length) in steps {
            ctx.upload_into(tokens, arena.region_mut("tokens")?)?;
            ctx.upload_into(&[*length], arena.region_mut("kv_lengths")?)?;
            loaded.step(&ctx.default_stream(), &mut arena, &weights)?;
            all.extend(ctx.download::<f32>(arena.region("logits")?)?);
        }
        Ok::<_, Error>(all)
    };
    let mut prompt = options;
    (prompt.batch, prompt.sequences, prompt.all_logits) = (TOKENS.len(), Some(1), true);
    let one_by_one: Vec<(&[u32], u32)> = TOKENS.chunks(1).zip(1..).collect();
    Ok([run(prompt, &[(&TOKENS, TOKENS.len() as u32)])?, run(options, &one_by_one)?])
}

/// Devices whose ranks add in one order.
fn has_fixed_order(device: &str) -> bool {
    matches!(device, "cpu" | "cuda:0")
}

/// Runs `work` on every rank, each in a thread that owns its
/// context.
fn on_ranks<T: Send>(ranks: Vec<Context>, work: impl Fn(Context) -> T + Sync) -> Vec<T> {
    thread::scope(|scope| {
        let work = &work;
        let threads: Vec<_> = ranks.into_iter().map(|rank| scope.spawn(move || work(rank))).collect();
        threads.into_iter().map(|thread| thread.join().expect("it does not panic")).collect()
    })
}

fn loss(got: &[f32], wanted: &[f32]) -> f32 {
    assert_eq!(got.len(), wanted.len());
    let energy: f32 = wanted.iter().map(|y| y * y).sum();
    got.iter().zip(wanted).map(|(got, y)| (got - y).powi(2)).sum::<f32>() / energy
}

fn models(folder: &Folder) -> Vec<std::path::PathBuf> {
    let mut normed = dense(2);
    normed.extend(head_norms(2));
    let mut post_normed = normed.clone();
    for layer in 0..2 {
        let roles = ["post_attention_norm", "post_ffw_norm"];
        post_normed.extend(roles.map(|role| norm(&format!("blk.{layer}.{role}"), HIDDEN)));
    }
    // One KV head, which both ranks have.
    let mut shared = dense(2);
    shared.iter_mut().filter(|(name, ..)| name.contains("attn_k") || name.contains("attn_v")).for_each(|tensor| {
        tensor.1[0] = HEAD_DIM;
    });
    let of_one = folder.0.path().join("one_kv_head.gguf");
    std::fs::rename(folder.file("llama", &shared, 1), &of_one).expect("renamed");
    vec![
        folder.model("llama", &dense(2)),
        folder.model("qwen3", &normed),
        folder.model("qwen3moe", &of_experts(2)),
        folder.model("gemma3", &post_normed),
        of_one,
    ]
}

#[test]
fn two_ranks_have_the_logits_of_one_device() {
    let test = "two_ranks_have_the_logits_of_one_device";
    let folder = Folder::new();
    let models = models(&folder);
    for device in ["cpu", "emu:sm80", "wgpu:0", "cuda:0"] {
        let Some(one) = qgemm_testkit::open_for_ranks_or_skip(test, device) else { continue };
        // Shaders and emulated kernels compile for seconds.
        let count = if has_fixed_order(device) { models.len() } else { 1 };
        for path in &models[..count] {
            let name = path.file_stem().expect("a name").to_string_lossy();
            let whole = logits(&one, path).expect("it runs");
            let run = || {
                let ranks = Context::open_ranks(device, 2, LIMIT).expect("two ranks");
                on_ranks(ranks, |ctx| logits(&ctx, path).expect("it runs"))
            };
            let ranks = run();
            assert_eq!(ranks[0], ranks[1], "{name} on {device}: ranks have the same bits");
            for (got, wanted) in ranks[0].iter().zip(&whole) {
                assert!(loss(got, wanted) < 1e-5, "{name} on {device}: {}", loss(got, wanted));
            }
            if has_fixed_order(device) {
                assert_eq!(run(), ranks, "{name}: every run has the same bits");
            }
        }
    }
}

/// Five experts, and heads that four ranks can have.
fn uneven_experts() -> Vec<Tensor> {
    let mut tensors = of_experts(2);
    for (name, shape, format) in &mut tensors {
        if name.contains("_exps") || name.contains("ffn_gate_inp") {
            shape[0] = 5;
        }
        if name.contains("attn_output") {
            *format = "f16";
        }
    }
    tensors
}

/// With two of five experts for each token, a rank has none of a
/// step's in most steps of one token.
#[test]
fn ranks_with_whole_experts_have_the_logits_of_one_device() {
    let test = "ranks_with_whole_experts_have_the_logits_of_one_device";
    let folder = Folder::new();
    let path = folder.model("qwen3moe", &uneven_experts());
    for (device, worlds) in [("cpu", &[2, 4][..]), ("emu:sm80", &[2]), ("wgpu:0", &[2]), ("cuda:0", &[2])] {
        let Some(one) = qgemm_testkit::open_for_ranks_or_skip(test, device) else { continue };
        let whole = logits_by_expert(&one, &path).expect("it runs");
        for &world in worlds {
            let run = || {
                let ranks = Context::open_ranks(device, world, LIMIT).expect("ranks");
                on_ranks(ranks, |ctx| logits_by_expert(&ctx, &path).expect("it runs"))
            };
            let ranks = run();
            assert!(ranks.iter().all(|rank| *rank == ranks[0]), "{device}: {world} ranks have the same bits");
            for (got, wanted) in ranks[0].iter().zip(&whole) {
                assert!(loss(got, wanted) < 1e-10, "{device}, {world} ranks: {}", loss(got, wanted));
            }
            if has_fixed_order(device) {
                assert_eq!(run(), ranks, "every run has the same bits");
            }
        }
    }
}

#[test]
fn a_plan_states_whole_experts_and_is_checked() {
    let folder = Folder::new();
    let path = folder.model("qwen3moe", &uneven_experts());
    let (ctx, model) = (Context::open("cpu").expect("always there"), open_model(&path).expect("a model"));
    let mut options = PlanOptions::new(BATCH);
    options.expert_parallel = true;
    let plans: Vec<ExecPlan> = (0..2).map(|rank| plan(&ctx, &path, &options, rank, 2).expect("it is served")).collect();
    for (rank, (plan, (first, count))) in plans.iter().zip([(0, 3), (3, 2)]).enumerate() {
        check_schemas(plan);
        check_memory(plan);
        let of = |id: &str| plan.ops.iter().find(|op| op.op_id == id).expect("planned");
        let local = of("blk.1.routing").local_experts.clone().expect("not all");
        assert_eq!((local.axis.as_str(), local.first, local.count), ("experts", first, count));
        for id in ["blk.0.ffn_gate_up", "blk.0.ffn_down"] {
            let weight = of(id).weight.as_ref().expect("a weight");
            assert!(weight.experts == Some(count) && weight.shards.iter().all(|shard| *shard == local), "{rank} {id}");
            assert!(of(id).status.is_none(), "ids of other ranks are no faults");
            assert_eq!(of(id).routed_to, Some(5), "a share of the rows");
        }
        assert!(load(&ctx, plan, &path).is_ok());
    }
    fn of<'p>(plan: &'p mut ExecPlan, id: &str) -> &'p mut PlannedOp {
        plan.ops.iter_mut().find(|op| op.op_id == id).expect("planned")
    }
    let refused = |change: &dyn Fn(&mut ExecPlan), part: &str| {
        let mut plan = plans[1].clone();
        change(&mut plan);
        let result = load(&ctx, &plan, &path).and_then(|plan| plan.load_weights(&model).map(drop));
        let error = result.err().unwrap_or_else(|| panic!("{part}")).to_string();
        assert!(error.contains(part), "{error}");
    };
    let local = |plan: &mut ExecPlan, first, count| {
        let local = of(plan, "blk.0.routing").local_experts.as_mut().expect("not all");
        (local.first, local.count) = (first, count);
    };
    refused(&|plan| local(plan, 4, 2), "local experts 4 to 6");
    refused(&|plan| local(plan, 0, 0), "expected one or more of the 5 experts");
    refused(&|plan| of(plan, "blk.0.routing").local_experts.as_mut().expect("some").axis = "rows".into(), "experts");
    let first = |plan: &mut ExecPlan, first| {
        let weight = of(plan, "blk.0.ffn_gate_up").weight.as_mut().expect("a weight");
        weight.shards.iter_mut().for_each(|shard| shard.first = first);
    };
    refused(&|plan| first(plan, 4), "experts 4..6 of 5");
    refused(&|plan| first(plan, usize::MAX), "shards.count");
    refused(&|plan| of(plan, "blk.0.ffn_down").weight.as_mut().expect("some").shards[0].count = 1, "shards.count");
    refused(
        &|plan| of(plan, "blk.0.attn_output").weight.as_mut().expect("some").shards[0] = local_shard(&plans),
        "axis",
    );

    // What a rank reads.
    let network = Network::read(&model, &path).expect("it is served");
    let bytes = |rank, by_expert| {
        network.of_rank(Ranks { rank, world: 2 }, by_expert).expect("it is divided").weight_bytes(1000)
    };
    let whole = network.weight_bytes(1000);
    assert!(bytes(0, true) > bytes(1, true) && bytes(0, true) < 0.75 * whole, "{whole}");
    assert!(bytes(0, false) + bytes(1, false) < 1.2 * whole && bytes(0, false) + bytes(1, false) >= whole);
    options.expert_parallel = true;
    let error = plan(&ctx, &path, &options, 0, 8).expect_err("too many").to_string();
    assert!(error.contains("8 ranks"), "{error}");
}

fn local_shard(plans: &[ExecPlan]) -> PlannedShard {
    plans[1].ops.iter().find_map(|op| op.local_experts.clone()).expect("a routing")
}

#[test]
fn ranks_that_divide_experts_otherwise_are_refused() {
    let folder = Folder::new();
    let path = folder.model("qwen3moe", &of_experts(1));
    let ranks = Context::open_ranks("cpu", 2, LIMIT).expect("two ranks");
    let results = on_ranks(ranks, |ctx| match ctx.communicator().expect("a rank").rank() {
        1 => logits_by_expert(&ctx, &path),
        _ => logits(&ctx, &path),
    });
    for result in results {
        let error = result.expect_err("they differ").to_string();
        assert!(error.contains("experts by expert"), "{error}");
    }
}

fn weight_bytes(plan: &ExecPlan) -> usize {
    plan.memory.regions.iter().filter(|region| region.kind == RegionKind::Weight).map(|region| region.bytes).sum()
}

#[test]
fn a_plan_states_its_rank_and_is_read_without_it() {
    let folder = Folder::new();
    let path = folder.model("qwen3moe", &of_experts(2));
    let ctx = Context::open("cpu").expect("always there");
    let whole = ctx.plan_model(&path, &PlanOptions::new(BATCH)).expect("it is served");
    assert!(whole.runtime.ranks.is_none() && whole.collectives().next().is_none());
    let of_group = &Context::open_ranks("cpu", 2, LIMIT).expect("two ranks")[0];
    let of_group = of_group.plan_model(&path, &PlanOptions::new(BATCH)).expect("it is served");
    check_schemas(&of_group);
    assert!(of_group.collectives().all(|(op, _)| op.algorithm.as_deref() == Some("host_memory")));
    let plans: Vec<ExecPlan> =
        (0..2).map(|rank| plan(&ctx, &path, &PlanOptions::new(BATCH), rank, 2).expect("it is served")).collect();
    for (rank, plan) in plans.iter().enumerate() {
        check_schemas(plan);
        check_memory(plan);
        assert_eq!(plan.runtime.ranks, Some(Ranks { rank, world: 2 }));
        let ids: Vec<&str> = plan.collectives().map(|(op, _)| op.op_id.as_str()).collect();
        assert_eq!(
            ids,
            ["blk.0.attn_reduce", "blk.0.ffn_reduce", "blk.1.attn_reduce", "blk.1.ffn_reduce", "logits_gather"]
        );
        assert!(load(&ctx, plan, &path).is_ok());
    }
    let of = |rank: usize, id: &str| -> &PlannedOp {
        plans[rank].ops.iter().find(|op| op.op_id == id).unwrap_or_else(|| panic!("{id} is planned"))
    };
    let shards = |rank, id: &str| {
        let weight = of(rank, id).weight.as_ref().expect("a weight");
        weight.shards.iter().map(|shard| (shard.axis.as_str(), shard.first, shard.count)).collect::<Vec<_>>()
    };
    // 96 features in blocks of 32, 80 tokens in runs of 32.
    assert_eq!(shards(0, "blk.0.ffn_gate_up"), [("rows", 0, 64); 2]);
    assert_eq!(shards(1, "blk.0.ffn_down"), [("columns", 64, 32)]);
    assert_eq!(shards(1, "blk.1.attn_output"), [("columns", 32, 32)]);
    assert_eq!(shards(1, "output"), [("rows", 64, 16)]);
    assert_eq!(of(0, "logits_gather").columns.as_deref(), Some(&[64, 16][..]));
    assert!(shards(1, "blk.0.ffn_router").is_empty(), "every rank routes");
    let [first, second] = [0, 1].map(|rank| weight_bytes(&plans[rank]));
    assert!(second < first && first < weight_bytes(&whole) * 3 / 4, "{first} and {second}");
}

#[test]
fn plans_of_other_ranks_and_false_collectives_are_refused() {
    let folder = Folder::new();
    let path = folder.model("llama", &dense(1));
    let ctx = Context::open("cpu").expect("always there");
    let good = plan(&ctx, &path, &PlanOptions::new(1), 1, 2).expect("it is served");
    let refused = |change: &dyn Fn(&mut ExecPlan), part: &str| {
        let mut plan = good.clone();
        change(&mut plan);
        let error = load(&ctx, &plan, &path).err().unwrap_or_else(|| panic!("{part}")).to_string();
        assert!(error.contains(part), "{error}");
    };
    fn of<'p>(plan: &'p mut ExecPlan, id: &str) -> &'p mut PlannedOp {
        plan.ops.iter_mut().find(|op| op.op_id == id).expect("planned")
    }
    refused(&|plan| plan.runtime.ranks = Some(Ranks { rank: 2, world: 2 }), "runtime.ranks.rank");
    refused(&|plan| plan.runtime.ranks = None, "single rank");
    refused(&|plan| of(plan, "logits_gather").columns = Some(vec![64, 16, 0]), "2 ranks");
    refused(&|plan| of(plan, "logits_gather").columns = Some(vec![16, 64]), "shape.k");
    refused(&|plan| of(plan, "logits_gather").columns = Some(vec![usize::MAX, 16]), "overflow");
    refused(&|plan| of(plan, "logits_gather").columns = None, "all_reduce");
    refused(&|plan| of(plan, "blk.0.attn_reduce").shape.k = 1, "shape.k");
    refused(&|plan| of(plan, "blk.0.attn_reduce").x = "hidden.0".into(), ".d");
    let mut shifted = good.clone();
    let weight = of(&mut shifted, "blk.0.ffn_down").weight.as_mut().expect("a weight");
    weight.shards[0].first = usize::MAX;
    let model = open_model(&path).expect("a model");
    let error = load(&ctx, &shifted, &path).and_then(|plan| plan.load_weights(&model)).expect_err("beyond the tensor");
    assert!(error.to_string().contains("columns"), "{error}");

    let mut ranks = Context::open_ranks("cpu", 2, LIMIT).expect("two ranks");
    let error = load(&ranks[0], &plan(&ranks[0], &path, &PlanOptions::new(1), 1, 2).expect("planned"), &path);
    assert!(error.expect_err("rank 0").to_string().contains("runtime.ranks.rank"));
    let own = ranks.remove(1);
    let planned = own.plan_model(&path, &PlanOptions::new(1)).expect("planned");
    assert_eq!(planned.runtime.ranks, Some(Ranks { rank: 1, world: 2 }), "the context's rank");

    let loaded = load(&ctx, &good, &path).expect("it fits");
    let weights = loaded.load_weights(&model).expect("memory");
    let run = loaded.step(&ctx.default_stream(), &mut loaded.arena().expect("memory"), &weights);
    assert!(matches!(run, Err(Error::NoCommunicator)), "{run:?}");
}

#[test]
fn what_cannot_be_divided_is_named_with_its_numbers() {
    let folder = Folder::new();
    let ctx = Context::open("cpu").expect("always there");
    let refused = |tensors: &[Tensor], options: &PlanOptions, rank, world, parts: &[&str]| {
        let path = folder.model("llama", tensors);
        let error = plan(&ctx, &path, options, rank, world).expect_err("it cannot be divided").to_string();
        assert!(parts.iter().all(|part| error.contains(part)), "{error}");
    };
    let options = PlanOptions::new(1);
    refused(&dense(1), &options, 0, 3, &["4 query heads of 2 KV heads", "among 3 ranks", "multiple"]);
    refused(&dense(1), &options, 3, 4, &["among 4 ranks", "blocks of 32 columns keep 2 of 2 query heads"]);
    refused(&dense(1), &options, 2, 2, &["rank = 2", "0 to 1"]);
    refused(&dense(1), &options, 0, usize::MAX, &["query heads"]);
    let mut train = options;
    train.train = true;
    refused(&dense(1), &train, 0, 2, &["a training step"]);
    let mut fine = dense(1);
    fine.iter_mut().filter(|(name, ..)| name.contains("attn_output")).for_each(|tensor| tensor.2 = "f16");
    refused(&fine, &options, 0, 4, &["96 features of a feed-forward part", "multiples of 32", "3 runs"]);
}

#[test]
fn failures_of_a_rank_are_errors_of_the_others() {
    let folder = Folder::new();
    let path = folder.model("llama", &dense(2));
    // A rank that returns with an error of its own.
    let ranks = Context::open_ranks("cpu", 2, LIMIT).expect("two ranks");
    let results = on_ranks(ranks, |ctx| match ctx.communicator().expect("a rank").rank() {
        1 => Err(Error::NoCommunicator),
        _ => logits(&ctx, &path),
    });
    assert!(matches!(results[0], Err(Error::Hal(HalError::RankGone { rank: 1, .. }))), "{:?}", results[0]);
    // Another plan, which is seen before its first collective.
    let ranks = Context::open_ranks("cpu", 2, LIMIT).expect("two ranks");
    let other = folder.model("qwen3moe", &of_experts(2));
    let results = on_ranks(ranks, |ctx| match ctx.communicator().expect("a rank").rank() {
        1 => logits(&ctx, &other),
        _ => logits(&ctx, &path),
    });
    for result in results {
        let error = result.expect_err("they differ");
        assert!(matches!(error, Error::Hal(HalError::CollectiveMismatch { .. })), "{error}");
        assert!(error.to_string().contains("llama") && error.to_string().contains("qwen3moe"), "{error}");
    }
    // A rank that never comes.
    let limit = Duration::from_millis(50);
    let ranks = Context::open_ranks("cpu", 2, limit).expect("two ranks");
    let error = logits(&ranks[0], &path).expect_err("rank 1 does nothing");
    assert!(matches!(error, Error::Hal(HalError::RankSilent { rank: 1, .. })), "{error}");
    drop(ranks);
}

/// Products of an engine of its own: gate and up column-parallel,
/// down row-parallel, and a sum.
#[test]
fn an_engine_divides_its_own_products() {
    use qgemm_api::{Activation, Args, Problem, ShardAxis, quantize};
    let (hidden, inner, m) = (64, 96, 3);
    let format = "q8_0".parse().expect("a format");
    let weight = |n, k, seed| quantize(&values(n * k, seed), n, k, format).expect("K suits").0;
    let (gate, up, down) = (weight(inner, hidden, 1), weight(inner, hidden, 2), weight(hidden, inner, 3));
    let x = values(m * hidden, 4);
    let part = |ctx: &Context, rank, world| {
        let cut = |weight: &qgemm_api::HostWeight, axis| weight.shard(axis, rank, world).expect("it is cut");
        // 96 features are three blocks, of which rank 0 has two.
        let features = down.shard_features(ShardAxis::Columns, rank, world).expect("a shard").len();
        let first = if rank == 0 { 0 } else { inner - features };
        let rows =
            |weight: &qgemm_api::HostWeight| weight.slice(ShardAxis::Rows, first..first + features).expect("rows");
        let pair = ctx.load_gated(&rows(&gate), &rows(&up))?;
        let down = ctx.load(&cut(&down, ShardAxis::Columns))?;
        let (x, mut inner) = (ctx.upload(&x)?, ctx.allocate_elements(DType::F32, m * features)?);
        let mut d = ctx.allocate_elements(DType::F32, m * hidden)?;
        let stream = ctx.default_stream();
        let first = ctx.plan(&Problem::new(&pair, m).x_dtype(DType::F32).activation(Activation::Silu))?;
        let second = ctx.plan(&Problem::new(&down, m).x_dtype(DType::F32))?;
        let mut workspace = ctx.workspace(first.workspace_bytes().max(second.workspace_bytes()))?;
        first.run(&stream, Args::new(&x, &pair, &mut inner).workspace(&mut workspace))?;
        second.run(&stream, Args::new(&inner, &down, &mut d).workspace(&mut workspace))?;
        if world > 1 {
            let sum = Collective::AllReduce { dtype: DType::F32, count: m * hidden };
            ctx.submit(&stream, &sum, None, &mut d)?;
        }
        ctx.download::<f32>(&d)
    };
    let one = Context::open("cpu").expect("always there");
    let whole = part(&one, 0, 1).expect("it runs");
    let group = ThreadGroup::create(2, LIMIT).expect("ranks");
    let ranks = group.into_iter().map(|rank| one.clone().with_communicator(Arc::new(rank))).collect();
    let parts = on_ranks(ranks, |ctx| part(&ctx, ctx.communicator().expect("a rank").rank(), 2).expect("it runs"));
    assert!(parts[0] == parts[1] && loss(&parts[0], &whole) < 1e-6, "{}", loss(&parts[0], &whole));
    let mut d = one.allocate(4).expect("memory");
    let sum = Collective::AllReduce { dtype: DType::F32, count: 1 };
    assert!(matches!(one.submit(&one.default_stream(), &sum, None, &mut d), Err(Error::NoCommunicator)));
}
