//! Empty operations: every operation plans and runs with no tokens,
//! rows, queries or sequences.
//!
//! Nothing is launched and no operand is written, except for empty
//! lists and a clean status.

use qgemm_api::{
    Activation, Args, Attention, AttentionArgs, Buffer, Context, Conversion, ConversionArgs, DType, Error, ExpertArgs,
    ExpertProblem, Experts, FusedArgs, FusedProblem, Gradient, GradientArgs, HalError, HostExperts, HostWeight,
    Indexer, IndexerArgs, Keys, KvAppend, KvAppendArgs, KvFormat, Matmul, MatmulArgs, MoeArgs, Norm, NormArgs,
    NormFunction, Optimizer, OptimizerArgs, Problem, Quantization, Queries, Routing, RoutingArgs, RoutingLists, Weight,
    XFormat, XPrecision, quantize,
};

const DEVICES: [&str; 4] = ["cpu", "noop", "wgpu:0", "emu:sm80"];
/// Contents of every written operand before a run.
const BEFORE: [u8; 256] = [0x5a; 256];

/// Runs an empty operation, whose results go to the buffer.
type Run = fn(&Context, &mut Buffer) -> Result<(), Error>;

fn host() -> HostWeight {
    quantize(&[0.5; 32 * 32], 32, 32, "q8_0".parse().expect("a format")).expect("valid").0
}

fn weight(ctx: &Context) -> Weight {
    ctx.load(&host()).expect("memory")
}

fn experts(ctx: &Context) -> Experts {
    ctx.load_experts(&HostExperts::new(&[host(), host()]).expect("alike")).expect("memory")
}

fn expert_run(ctx: &Context, d: &mut Buffer, problem: ExpertProblem, tokens: Option<usize>) -> Result<(), Error> {
    let experts = experts(ctx);
    let plan = ctx.plan_experts(&problem)?;
    let read = ctx.allocate(0)?;
    let index = ctx.allocate(16)?;
    let (mut status, mut workspace) = (ctx.upload(&[1u32, 7])?, ctx.workspace(plan.workspace_bytes())?);
    let mut args = ExpertArgs::new(&read, &experts, &index, d).status(&mut status).workspace(&mut workspace);
    args.tokens = tokens;
    plan.run(&ctx.default_stream(), args)?;
    // A fault of an earlier run does not count.
    plan.check_status(ctx, &status)
}

fn attend(ctx: &Context, d: &mut Buffer, queries: Queries) -> Result<(), Error> {
    let attention = Attention::new(DType::F16, 2, 1, 32, queries, Keys::each(4));
    let plan = ctx.plan_attention(&attention)?;
    assert!(plan.kernel_id().is_none());
    let (q, kv) = (ctx.allocate(0)?, ctx.allocate(3 * 4 * 32 * 2)?);
    plan.run(&ctx.default_stream(), AttentionArgs::new(&q, &kv, &kv, d))
}

const OPERATIONS: [(&str, Run); 17] = [
    ("gemm", |ctx, d| {
        let weight = weight(ctx);
        let plan = ctx.plan(&Problem::new(&weight, 0).x_dtype(DType::F16).bias(DType::F32))?;
        let (x, bias) = (ctx.allocate(0)?, ctx.allocate(128)?);
        plan.run(&ctx.default_stream(), Args::new(&x, &weight, d).bias(&bias))
    }),
    ("layer", |ctx, d| {
        let weight = weight(ctx);
        let layer = ctx.layer(&weight, |problem| problem.x_dtype(DType::F16))?;
        let x = ctx.allocate(0)?;
        layer.run(&ctx.default_stream(), 0, layer.args(&x, d))
    }),
    ("linear", |ctx, _| {
        let y = ctx.linear(&weight(ctx), &[], 0, XPrecision::Auto)?;
        assert!(y.is_empty());
        Ok(())
    }),
    ("fused", |ctx, d| {
        let fused = ctx.load_fused(&[&host(), &host()])?;
        let plan = ctx.plan_fused(&FusedProblem::new(&fused, 0, DType::F16))?;
        let (x, mut workspace) = (ctx.allocate(0)?, ctx.workspace(plan.workspace_bytes())?);
        let (first, second) = d.split_at_mut(128)?;
        let outputs = &mut [first, second];
        plan.run(&ctx.default_stream(), FusedArgs::new(&x, &fused, outputs, &mut workspace))
    }),
    ("experts, sorted", |ctx, d| expert_run(ctx, d, ExpertProblem::contiguous(&experts(ctx), 0), None)),
    ("experts, masked", |ctx, d| expert_run(ctx, d, ExpertProblem::masked(&experts(ctx), 0), None)),
    ("experts, indexed", |ctx, d| expert_run(ctx, d, ExpertProblem::indexed(&experts(ctx), 0, 2), None)),
    ("experts, none of some", |ctx, d| expert_run(ctx, d, ExpertProblem::indexed(&experts(ctx), 3, 2), Some(0))),
    ("moe", |ctx, d| {
        let (up, down) = (experts(ctx), experts(ctx));
        let layer =
            ctx.moe_layer(&up, &down, 1, |moe| moe.activation(Activation::Relu).routed(DType::F32, |routing| routing))?;
        let mut workspace = layer.workspace(0)?;
        let empty = ctx.allocate(0)?;
        layer.run(&ctx.default_stream(), 0, MoeArgs::from_logits(&empty, &empty, d), &mut workspace)
    }),
    ("conversion", |ctx, d| {
        let plan = ctx.plan_conversion(&Conversion::new(0, 4, DType::F32, DType::F16))?;
        plan.run(&ctx.default_stream(), ConversionArgs::new(&ctx.allocate(0)?, d))
    }),
    ("quantization", |ctx, _| {
        let stated = Quantization::new(0, 32, DType::F32, XFormat::Q8_1);
        let x = ctx.quantize_x(&stated, &ctx.allocate(0)?)?;
        assert_eq!(x.rows(), 0);
        Ok(())
    }),
    ("matmul", |ctx, d| {
        let plan = ctx.plan_matmul(&Matmul::new([0, 4, 4], DType::F32, DType::F32, DType::F32))?;
        let (a, b) = (ctx.allocate(0)?, ctx.allocate(64)?);
        plan.run(&ctx.default_stream(), MatmulArgs::new(&a, &b, d))
    }),
    ("attention", |ctx, d| {
        for queries in [Queries::each(0, 1), Queries::each(3, 0)] {
            attend(ctx, d, queries)?;
        }
        Ok(())
    }),
    ("norm", |ctx, d| {
        let plan = ctx.plan_norm(&Norm::new(0, 32, DType::F16, NormFunction::rms(1e-5)))?;
        plan.run(&ctx.default_stream(), NormArgs::new(&ctx.allocate(0)?, d))
    }),
    ("append", |ctx, d| {
        for queries in [Queries::each(0, 1), Queries::each(2, 0)] {
            let plan = ctx.plan_kv_append(&KvAppend::new(DType::F16, 0, 1, 8, queries, Keys::each(1)))?;
            let (new, mut v) = (ctx.allocate(0)?, ctx.allocate(64)?);
            plan.run(&ctx.default_stream(), KvAppendArgs::new(&new, &new, &mut *d, &mut v))?;
        }
        Ok(())
    }),
    ("indexer", |ctx, d| {
        let indexer = Indexer::new(KvFormat::Plain(DType::F16), 0, 2, 16, 4);
        for indexer in [indexer.clone(), indexer.best(2)] {
            let plan = ctx.plan_indexer(&indexer)?;
            let (empty, k) = (ctx.allocate(0)?, ctx.allocate(4 * 16 * 2)?);
            plan.run(&ctx.default_stream(), IndexerArgs::new(&empty, &k, &empty, &mut *d))?;
        }
        Ok(())
    }),
    ("gradient and optimizer", |ctx, d| {
        let weight = weight(ctx);
        let plan = ctx.plan_gradient(&weight, &Gradient::new(0, DType::F16, DType::F16))?;
        plan.run(&ctx.default_stream(), GradientArgs::new(&ctx.allocate(0)?, &weight, &mut *d))?;
        let plan = ctx.plan_gradient(&experts(ctx), &Gradient::new(0, DType::F16, DType::F16))?;
        let (experts, offsets) = (experts(ctx), ctx.allocate(12)?);
        plan.run(&ctx.default_stream(), GradientArgs::new(&ctx.allocate(0)?, &experts, &mut *d).offsets(&offsets))?;
        let plan = ctx.plan_optimizer(&Optimizer::sgd(0))?;
        plan.run(&ctx.default_stream(), OptimizerArgs::new(d, &ctx.allocate(0)?, &ctx.allocate(16)?))
    }),
];

/// Every available device; the others are reported as skipped.
fn devices(test: &str) -> impl Iterator<Item = Context> {
    DEVICES.into_iter().filter_map(move |name| match Context::open(name) {
        Ok(ctx) => Some(ctx),
        Err(why @ (Error::Hal(HalError::NoDevice { .. }) | Error::BackendNotBuilt { .. })) => {
            qgemm_testkit::skipped(&format!("{test} on {name}"), &why.to_string());
            None
        }
        Err(other) => panic!("{name}: {other}"),
    })
}

#[test]
fn every_operation_does_nothing_for_nothing() {
    for ctx in devices("every_operation_does_nothing_for_nothing") {
        for (name, run) in OPERATIONS {
            let mut d = ctx.upload(&BEFORE).expect("memory");
            run(&ctx, &mut d).unwrap_or_else(|error| panic!("{name} on {}: {error}", ctx.info().id));
            assert_eq!(ctx.download::<u8>(&d).expect("memory"), BEFORE, "{name} on {}", ctx.info().id);
        }
    }
}

#[test]
fn a_routing_of_no_tokens_writes_lists_without_slots() {
    for ctx in devices("a_routing_of_no_tokens_writes_lists_without_slots") {
        let plans = [
            (Routing::from_logits(0, 3, 2, DType::F32).lists(), None),
            (Routing::from_logits(5, 3, 2, DType::F32).lists(), Some(0)),
            (Routing::from_ids(0, 3, 2), None),
            (Routing::from_ids(5, 3, 2), Some(0)),
        ];
        for (routing, tokens) in plans {
            // The no-op device refuses launches that may be for fewer tokens. An empty
            // operation launches nothing.
            let plan = ctx.plan_routing(&routing).expect("it is served");
            assert_eq!(plan.kernel_id().is_none(), tokens.is_none(), "{plan}");
            let before = || ctx.upload(&[7u32; 8]).expect("memory");
            let (given, mut ids, mut weights, mut status) = (before(), before(), before(), before());
            let (mut offsets, mut counts, mut rows) = (before(), before(), before());
            let lists =
                RoutingLists { offsets: (&mut offsets).into(), counts: (&mut counts).into(), rows: (&mut rows).into() };
            let mut args = match plan.op().logits() {
                Some(_) => {
                    let logits = given.view().typed(DType::F32);
                    let written = ids.view_mut();
                    let weights = weights.view_mut().typed(DType::F32);
                    RoutingArgs::of_logits(logits, written, weights, &mut status).lists(lists)
                }
                None => RoutingArgs::of_ids(&given, lists, &mut status),
            };
            args.tokens = tokens;
            plan.run(&ctx.default_stream(), args).unwrap_or_else(|error| panic!("{plan}: {error}"));
            plan.check_status(&ctx, &status).expect("nothing is wrong");
            let words = |buffer: &Buffer| ctx.download::<u32>(buffer).expect("memory");
            assert_eq!(words(&offsets), [0, 0, 0, 0, 7, 7, 7, 7], "{plan}");
            assert_eq!(words(&counts), [0, 0, 0, 7, 7, 7, 7, 7], "{plan}");
            assert_eq!((words(&rows), words(&ids)), (vec![7; 8], vec![7; 8]), "{plan}");
        }
    }
}

#[test]
fn no_tokens_can_be_explained() {
    for ctx in devices("no_tokens_can_be_explained") {
        let record = ctx.explain_routing(&Routing::from_logits(0, 3, 2, DType::F32)).expect("valid");
        assert!(record.kernel_id.is_none() && record.why.contains("nothing is launched"), "{record:?}");
        let (weight, experts) = (weight(&ctx), experts(&ctx));
        let no_query = Attention::new(DType::F16, 2, 1, 32, Queries::each(0, 1), Keys::each(4));
        let no_token = KvAppend::new(DType::F16, 0, 1, 8, Queries::each(0, 1), Keys::each(1));
        let records = [
            ctx.explain(&Problem::new(&weight, 0)),
            ctx.explain_experts(&ExpertProblem::indexed(&experts, 0, 2)),
            ctx.explain_conversion(&Conversion::new(0, 4, DType::F32, DType::F16)),
            ctx.explain_quantization(&Quantization::new(0, 32, DType::F32, XFormat::Q8_1)),
            ctx.explain_matmul(&Matmul::new([0, 4, 4], DType::F32, DType::F32, DType::F32)),
            ctx.explain_gradient(&weight, &Gradient::new(0, DType::F16, DType::F16)),
            ctx.explain_attention(&no_query),
            ctx.explain_norm(&Norm::new(0, 32, DType::F16, NormFunction::rms(1e-5))),
            ctx.explain_optimizer(&Optimizer::sgd(0)),
            ctx.explain_kv_append(&no_token),
            ctx.explain_indexer(&Indexer::new(KvFormat::Plain(DType::F16), 0, 2, 16, 4)),
        ];
        for record in records {
            let record = record.expect("valid");
            assert!(!record.to_string().is_empty() && record.kernel_id.is_none(), "{record:?}");
        }
    }
}
