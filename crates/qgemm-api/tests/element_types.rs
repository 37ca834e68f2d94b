//! Element types of buffers: every plan refuses a wrong
//! type and names the operand.

use std::cell::RefCell;

use qgemm_api::half::{bf16, f16};
use qgemm_api::{
    Args, Attention, AttentionArgs, Buffer, Context, Conversion, ConversionArgs, DType, ElementType, Error, ExpertArgs,
    ExpertProblem, Experts, FactorFormat, FusedArgs, FusedProblem, Gradient, GradientArgs, HostExperts, Indexer,
    IndexerArgs, Keys, KvAppend, KvAppendArgs, KvFormat, MaskBits, Matmul, MatmulArgs, Norm, NormArgs, NormFunction,
    Optimizer, OptimizerArgs, Problem, Quantization, QuantizationArgs, QuantizedX, QuantizedXParts, Queries, Rotary,
    Routing, RoutingArgs, RoutingLists, UpdateRule, Weight, XFormat, cpu, quantize,
};

const F32: ElementType = ElementType::Number(DType::F32);
const F16: ElementType = ElementType::Number(DType::F16);
const BF16: ElementType = ElementType::Number(DType::BF16);
const I32: ElementType = ElementType::Int32;
const I8: ElementType = ElementType::Int8;
/// Codes that are not INT8.
const CODES: ElementType = ElementType::Bytes;

/// Operands of a run, one of which may have a wrong type.
struct Operands<'a> {
    ctx: &'a Context,
    changed: Option<(&'static str, ElementType)>,
    made: RefCell<Vec<(&'static str, ElementType)>>,
}

impl Operands<'_> {
    /// Zeroed buffer of `count` elements.
    fn of(&self, name: &'static str, element: ElementType, count: usize) -> Buffer {
        self.made.borrow_mut().push((name, element));
        let stated = self.changed.filter(|(changed, _)| *changed == name).map_or(element, |(_, element)| element);
        self.ctx.allocate_elements(element, count).expect("memory").typed(stated)
    }
}

type Run = fn(&Context, &Operands<'_>) -> Result<(), Error>;

/// Runs with correct types, with untyped operands, and with
/// each operand's type wrong.
fn check(what: &str, run: Run) {
    let ctx = Context::open("cpu").expect("always there");
    let with = |changed| {
        let operands = Operands { ctx: &ctx, changed, made: RefCell::default() };
        let result = run(&ctx, &operands);
        (result, operands.made.into_inner())
    };
    let (ran, made) = with(None);
    ran.unwrap_or_else(|error| panic!("{what}: {error}"));
    for (name, element) in made {
        let (ran, _) = with(Some((name, ElementType::Bytes)));
        ran.unwrap_or_else(|error| panic!("{what}: {name} whose type nobody stated: {error}"));
        let others = [F32, F16, BF16, I32, I8].into_iter().filter(|other| *other != element);
        for other in others {
            let (ran, _) = with(Some((name, other)));
            let Err(Error::WrongElementType { operand, expected, got }) = ran else {
                panic!("{what}: {name} in {other}: {ran:?}");
            };
            assert_eq!((operand, expected, got), (name, element, other), "{what}");
        }
    }
}

fn weight(ctx: &Context) -> Weight {
    ctx.load(&quantize(&[0.5; 32 * 32], 32, 32, "q8_0".parse().expect("a format")).expect("valid").0).expect("memory")
}

fn experts(ctx: &Context) -> Experts {
    let one = || quantize(&[0.5; 32 * 32], 32, 32, "q8_0".parse().expect("a format")).expect("valid").0;
    ctx.load_experts(&HostExperts::new(&[one(), one()]).expect("alike")).expect("memory")
}

#[test]
fn products_refuse_operands_of_another_type() {
    check("gemm", |ctx, make| {
        let weight = weight(ctx);
        let norm = NormFunction::layer(1e-5).gamma(DType::F16).beta(DType::BF16);
        let problem = Problem::new(&weight, 2).x_dtype(DType::F16).d_dtype(DType::BF16).norm(norm);
        let problem = problem.c(1.0, DType::F16).bias(DType::F32).token_scale().residual(DType::F32);
        let plan = ctx.plan(&problem)?;
        let (x, mut d) = (make.of("X", F16, 64), make.of("D", BF16, 64));
        let (c, bias, token_scale) = (make.of("C", F16, 64), make.of("bias", F32, 32), make.of("token scales", F32, 2));
        let (residual, gamma) = (make.of("residual", F32, 64), make.of("gamma", F16, 32));
        let beta = make.of("beta", BF16, 32);
        let mut workspace = ctx.workspace(plan.workspace_bytes())?;
        let args = Args::new(&x, &weight, &mut d).c(&c).bias(&bias).token_scale(&token_scale).residual(&residual);
        plan.run(&ctx.default_stream(), args.gamma(&gamma).beta(&beta).workspace(&mut workspace))
    });
    check("experts", |ctx, make| {
        let experts = experts(ctx);
        let problem = ExpertProblem::indexed(&experts, 1, 2).combined().listed();
        let plan = ctx.plan_experts(&problem.each(|p| p.x_dtype(DType::F16).bias(DType::F16).residual(DType::F32)))?;
        let [_, rows] = qgemm_api::expert_lists(2, 2).expect("short");
        let (x, mut d, index) = (make.of("X", F16, 32), make.of("D", F16, 32), make.of("index", I32, 2));
        let (bias, residual) = (make.of("bias", F16, 64), make.of("residual", F32, 32));
        let (weights, lists) = (make.of("router weights", F32, 2), make.of("lists", I32, rows.end / 4));
        let (mut status, mut workspace) = (make.of("status", I32, 2), ctx.workspace(plan.workspace_bytes())?);
        let args = ExpertArgs::new(&x, &experts, &index, &mut d).bias(&bias).residual(&residual).lists(&lists);
        let args = args.router_weights(&weights).status(&mut status).workspace(&mut workspace);
        plan.run(&ctx.default_stream(), args)
    });
    check("fused", |ctx, make| {
        let one = || quantize(&[0.5; 32 * 32], 32, 32, "q8_0".parse().expect("a format")).expect("valid").0;
        let fused = ctx.load_fused(&[&one(), &one()])?;
        let plan = ctx.plan_fused(&FusedProblem::new(&fused, 1, DType::F32).output_dtype(1, DType::F16))?;
        let (x, mut first) = (make.of("X", F32, 32), make.of("D", F32, 32));
        let mut second = make.of("d of segment 2", F16, 32);
        let mut workspace = ctx.workspace(plan.workspace_bytes())?;
        let outputs = &mut [(&mut first).into(), (&mut second).into()];
        plan.run(&ctx.default_stream(), FusedArgs::new(&x, &fused, outputs, &mut workspace))
    });
    check("gradient", |ctx, make| {
        let experts = experts(ctx);
        let plan = ctx.plan_gradient(&experts, &Gradient::new(2, DType::F16, DType::BF16))?;
        let (dy, mut dx, offsets) = (make.of("dY", F16, 64), make.of("dX", BF16, 64), make.of("offsets", I32, 3));
        let mut workspace = ctx.workspace(plan.workspace_bytes())?;
        let args = GradientArgs::new(&dy, &experts, &mut dx).offsets(&offsets).workspace(&mut workspace);
        plan.run(&ctx.default_stream(), args)
    });
    check("matmul", |ctx, make| {
        let matmul = Matmul::new([2, 3, 4], DType::F16, DType::BF16, DType::F32).c(1.0, DType::F16).bias(DType::BF16);
        let plan = ctx.plan_matmul(&matmul)?;
        let (a, b, mut d) = (make.of("A", F16, 8), make.of("B", BF16, 12), make.of("D", F32, 6));
        let (c, bias) = (make.of("C", F16, 6), make.of("bias", BF16, 3));
        plan.run(&ctx.default_stream(), MatmulArgs::new(&a, &b, &mut d).c(&c).bias(&bias))
    });
    check("matmul of E4M3 with factors, by groups of rows", |ctx, make| {
        let matmul = Matmul::new([2, 3, 4], FactorFormat::E4M3, FactorFormat::E4M3, DType::F32);
        let plan = ctx.plan_matmul(&matmul.a_scaled().b_scaled().rows_grouped(1))?;
        let (a, b, mut d) = (make.of("A", CODES, 8), make.of("B", CODES, 12), make.of("D", F32, 6));
        let (a_scale, b_scale) = (make.of("A's factor", F32, 1), make.of("B's factor", F32, 1));
        let offsets = make.of("offsets", I32, 2);
        let args = MatmulArgs::new(&a, &b, &mut d).a_scale(&a_scale).b_scale(&b_scale).offsets(&offsets);
        plan.run(&ctx.default_stream(), args)
    });
    check("matmul of E4M3 with scales of blocks", |ctx, make| {
        let matmul = Matmul::new([2, 3, 128], FactorFormat::E4M3Block, FactorFormat::E4M3Block, DType::F32);
        let plan = ctx.plan_matmul(&matmul.b_transposed())?;
        let (a, b, mut d) = (make.of("A", CODES, 256), make.of("B", CODES, 384), make.of("D", F32, 6));
        let (a_scale, b_scale) = (make.of("A's scales", F32, 2), make.of("B's scales", F32, 3));
        plan.run(&ctx.default_stream(), MatmulArgs::new(&a, &b, &mut d).a_scale(&a_scale).b_scale(&b_scale))
    });
}

#[test]
fn conversions_norms_and_optimizers_refuse_operands_of_another_type() {
    check("conversion", |ctx, make| {
        let conversion = Conversion::new(2, 4, DType::F32, DType::F16).gathered(3).row_factors();
        let plan = ctx.plan_conversion(&conversion)?;
        let (x, mut d, order) = (make.of("X", F32, 8), make.of("D", F16, 6), make.of("column order", I32, 3));
        let mut row_factors = make.of("row factors", F32, 2);
        let args = ConversionArgs::new(&x, &mut d).order(&order).row_factors(&mut row_factors);
        plan.run(&ctx.default_stream(), args)
    });
    check("norm", |ctx, make| {
        let function = NormFunction::layer(1e-5).gamma(DType::F16).beta(DType::BF16);
        let norm = Norm::new(2, 32, DType::F32, function).d_dtype(DType::F16);
        let plan = ctx.plan_norm(&norm.residual(DType::BF16))?;
        let (x, mut d, gamma) = (make.of("X", F32, 64), make.of("D", F16, 64), make.of("gamma", F16, 32));
        let (beta, residual) = (make.of("beta", BF16, 32), make.of("residual", BF16, 64));
        let mut sum = make.of("sum", BF16, 64);
        let args = NormArgs::new(&x, &mut d).gamma(&gamma).beta(&beta).residual(&residual).sum(&mut sum);
        plan.run(&ctx.default_stream(), args)
    });
    check("optimizer", |ctx, make| {
        let plan = ctx.plan_optimizer(&Optimizer::adamw(4).gradient_dtype(DType::BF16).copy(DType::F16))?;
        let (mut weights, gradient, step) =
            (make.of("parameters", F32, 4), make.of("gradient", BF16, 4), make.of("step", F32, 4));
        let (mut m, mut v) = (make.of("first moments", F32, 4), make.of("second moments", F32, 4));
        let mut copy = make.of("copy", F16, 4);
        let args = OptimizerArgs::new(&mut weights, &gradient, &step).moment1(&mut m).moment2(&mut v).copy(&mut copy);
        plan.run(&ctx.default_stream(), args)
    });
    check("optimizer with momentum", |ctx, make| {
        let plan = ctx.plan_optimizer(&Optimizer::sgd(4).rule(UpdateRule::Sgd { momentum: 0.5 }))?;
        let (mut weights, gradient, step) =
            (make.of("parameters", F32, 4), make.of("gradient", F32, 4), make.of("step", F32, 4));
        let mut m = make.of("first moments", F32, 4);
        plan.run(&ctx.default_stream(), OptimizerArgs::new(&mut weights, &gradient, &step).moment1(&mut m))
    });
}

#[test]
fn quantizations_refuse_operands_of_another_type() {
    check("quantization to q8_1", |ctx, make| {
        let plan = ctx.plan_quantization(&Quantization::new(2, 32, DType::F16, XFormat::Q8_1))?;
        let (x, mut codes) = (make.of("X", F16, 64), make.of("codes", I8, 64));
        let (mut scales, mut sums) = (make.of("scales", F32, 2), make.of("sums", F32, 2));
        let mut args = QuantizationArgs::new(&x, &mut codes);
        (args.scales, args.sums) = (Some((&mut scales).into()), Some((&mut sums).into()));
        plan.run(&ctx.default_stream(), args)
    });
    check("quantization to nvfp4", |ctx, make| {
        let plan = ctx.plan_quantization(&Quantization::new(2, 64, DType::F32, XFormat::NvFp4))?;
        let (x, mut codes) = (make.of("X", F32, 128), make.of("codes", CODES, 64));
        let (mut scales, mut factors) = (make.of("scales", CODES, 8), make.of("token factors", F32, 2));
        let mut args = QuantizationArgs::new(&x, &mut codes);
        (args.scales, args.token_factors) = (Some((&mut scales).into()), Some((&mut factors).into()));
        plan.run(&ctx.default_stream(), args)
    });
    check("quantization to e4m3_tensor", |ctx, make| {
        let plan = ctx.plan_quantization(&Quantization::new(2, 32, DType::F32, XFormat::E4M3Tensor))?;
        let (x, mut codes, factor) = (make.of("X", F32, 64), make.of("codes", CODES, 64), make.of("factor", F32, 1));
        plan.run(&ctx.default_stream(), QuantizationArgs::new(&x, &mut codes).factor(&factor))
    });
    check("planes of the caller's", |_, make| {
        let mut planes = QuantizedXParts::new(make.of("codes", I8, 64));
        (planes.scales, planes.sums) = (Some(make.of("scales", F32, 2)), Some(make.of("sums", F32, 2)));
        QuantizedX::from_parts(&Quantization::new(2, 32, DType::F32, XFormat::Q8_1), planes).map(drop)
    });
    check("a product of a quantized X", |ctx, make| {
        let weight = weight(ctx);
        let plan = ctx.plan(&Problem::new(&weight, 1).x_format(XFormat::E4M3Tensor).d_dtype(DType::F32))?;
        let codes = ctx.allocate(32)?;
        let stated = Quantization::new(1, 32, DType::F32, XFormat::E4M3Tensor);
        let x = QuantizedX::from_parts(&stated, QuantizedXParts::new(codes))?;
        let (factor, mut d) = (make.of("x factor", F32, 1), make.of("D", F32, 32));
        let mut workspace = ctx.workspace(plan.workspace_bytes())?;
        let args = Args::new(&x, &weight, &mut d).x_factor(&factor).workspace(&mut workspace);
        plan.run(&ctx.default_stream(), args)
    });
    check("a norm that writes codes", |ctx, make| {
        let norm = Norm::new(2, 32, DType::F32, NormFunction::layer(1e-5)).d_format(XFormat::Q8_0);
        let plan = ctx.plan_norm(&norm)?;
        let (x, mut codes, mut scales) = (make.of("X", F32, 64), make.of("D", I8, 64), make.of("scales", F32, 2));
        let mut args = NormArgs::new(&x, &mut codes);
        args.scales = Some((&mut scales).into());
        plan.run(&ctx.default_stream(), args)
    });
}

#[test]
fn routings_refuse_operands_of_another_type() {
    check("routing of logits", |ctx, make| {
        let plan = ctx.plan_routing(&Routing::from_logits(2, 4, 2, DType::BF16).biased().lists())?;
        let (logits, bias) = (make.of("logits", BF16, 8), make.of("bias", F32, 4));
        let (mut ids, mut weights, mut status) =
            (make.of("ids", I32, 4), make.of("weights", F32, 4), make.of("status", I32, 4));
        let (mut offsets, mut counts, mut rows) =
            (make.of("offsets", I32, 5), make.of("counts", I32, 4), make.of("rows", I32, 4));
        let mut workspace = ctx.workspace(plan.workspace_bytes())?;
        let mut args = RoutingArgs::of_logits(&logits, &mut ids, &mut weights, &mut status);
        let (offsets, counts, rows) = ((&mut offsets).into(), (&mut counts).into(), (&mut rows).into());
        (args.bias, args.lists) = (Some((&bias).into()), Some(RoutingLists { offsets, counts, rows }));
        plan.run(&ctx.default_stream(), args.workspace(&mut workspace))
    });
    check("routing of ids", |ctx, make| {
        let plan = ctx.plan_routing(&Routing::from_ids(2, 4, 2))?;
        let (ids, mut status) = (make.of("given ids", I32, 4), make.of("status", I32, 4));
        let (mut offsets, mut counts, mut rows) =
            (make.of("offsets", I32, 5), make.of("counts", I32, 4), make.of("rows", I32, 4));
        let mut workspace = ctx.workspace(plan.workspace_bytes())?;
        let (offsets, counts, rows) = ((&mut offsets).into(), (&mut counts).into(), (&mut rows).into());
        let args = RoutingArgs::of_ids(&ids, RoutingLists { offsets, counts, rows }, &mut status);
        plan.run(&ctx.default_stream(), args.workspace(&mut workspace))
    });
}

/// Attention of one paged sequence, with a mask and log-sum-exp, over a cache
/// in `kv` of elements `element`.
fn attends(ctx: &Context, make: &Operands<'_>, kv: KvFormat, element: ElementType) -> Result<(), Error> {
    let (queries, keys) = (Queries::offsets(1, 2, 2), Keys::paged(2, 4, 1));
    let attention = Attention::new(DType::F16, 2, 1, 32, queries, keys).kv_format(kv).mask(MaskBits::of_tokens());
    let plan = ctx.plan_attention(&attention.log_sum_exp())?;
    let (q, k, v) = (make.of("q", F16, 128), make.of("k", element, 256), make.of("v", element, 256));
    let (mut d, mut lse) = (make.of("d", F16, 128), make.of("lse", F32, 4));
    let (q_offsets, lengths) = (make.of("q offsets", I32, 2), make.of("kv lengths", I32, 1));
    let (table, mask) = (make.of("block table", I32, 1), make.of("mask", I32, 2));
    let scales = kv.has_scales().then(|| [make.of("k scales", F16, 8), make.of("v scales", F16, 8)]);
    let factors = (kv == KvFormat::E4M3).then(|| [make.of("k factors", F32, 1), make.of("v factors", F32, 1)]);
    let mut workspace = ctx.workspace(plan.workspace_bytes())?;
    let mut args = AttentionArgs::new(&q, &k, &v, &mut d);
    (args.q_offsets, args.kv_lengths) = (Some((&q_offsets).into()), Some((&lengths).into()));
    (args.block_table, args.mask, args.lse) = (Some((&table).into()), Some((&mask).into()), Some((&mut lse).into()));
    if let Some([k, v]) = &scales {
        (args.k_scales, args.v_scales) = (Some(k.into()), Some(v.into()));
    }
    if let Some([k, v]) = &factors {
        (args.k_factors, args.v_factors) = (Some(k.into()), Some(v.into()));
    }
    args.workspace = Some(&mut workspace);
    plan.run(&ctx.default_stream(), args)
}

/// Append of two tokens of one sequence, with angle tables, to a cache in `kv`.
fn appends(ctx: &Context, make: &Operands<'_>, kv: KvFormat, element: ElementType) -> Result<(), Error> {
    let (queries, keys) = (Queries::each(1, 2), Keys::offsets(4, 4));
    let append = KvAppend::new(DType::F16, 2, 1, 32, queries, keys).kv_format(kv).positions();
    let plan = ctx.plan_kv_append(&append.rotary(Rotary::neox(32).tables(4)))?;
    let (mut q, new_k, new_v) = (make.of("q", F16, 128), make.of("new k", F16, 64), make.of("new v", F16, 64));
    let (mut k, mut v) = (make.of("k", element, 128), make.of("v", element, 128));
    let (offsets, positions) = (make.of("kv offsets", I32, 2), make.of("positions", I32, 2));
    let (cos, sin) = (make.of("cos", F32, 64), make.of("sin", F32, 64));
    let mut scales = kv.has_scales().then(|| [make.of("k scales", F16, 4), make.of("v scales", F16, 4)]);
    let factors = (kv == KvFormat::E4M3).then(|| [make.of("k factors", F32, 1), make.of("v factors", F32, 1)]);
    let mut args = KvAppendArgs::new(&new_k, &new_v, &mut k, &mut v).q(&mut q);
    (args.kv_offsets, args.positions) = (Some((&offsets).into()), Some((&positions).into()));
    (args.cos, args.sin) = (Some((&cos).into()), Some((&sin).into()));
    if let Some([k, v]) = &mut scales {
        (args.k_scales, args.v_scales) = (Some(k.into()), Some(v.into()));
    }
    if let Some([k, v]) = &factors {
        (args.k_factors, args.v_factors) = (Some(k.into()), Some(v.into()));
    }
    plan.run(&ctx.default_stream(), args)
}

#[test]
fn attention_and_caches_refuse_operands_of_another_type() {
    check("attention to bf16", |ctx, make| attends(ctx, make, KvFormat::Plain(DType::BF16), BF16));
    check("attention to e4m3", |ctx, make| attends(ctx, make, KvFormat::E4M3, CODES));
    check("attention to q8_0", |ctx, make| attends(ctx, make, KvFormat::Q8_0, I8));
    check("attention to q4_0", |ctx, make| attends(ctx, make, KvFormat::Q4_0, CODES));
    check("append to f32", |ctx, make| appends(ctx, make, KvFormat::Plain(DType::F32), F32));
    check("append to e4m3", |ctx, make| appends(ctx, make, KvFormat::E4M3, CODES));
    check("append to q8_0", |ctx, make| appends(ctx, make, KvFormat::Q8_0, I8));
}

#[test]
fn indexers_refuse_operands_of_another_type() {
    check("scores of ranges", |ctx, make| {
        let indexer = Indexer::new(KvFormat::E4M3, 2, 2, 16, 4).ranges().q_scales();
        let plan = ctx.plan_indexer(&indexer)?;
        let (q, k, weights) = (make.of("q", CODES, 64), make.of("k", CODES, 64), make.of("weights", F32, 4));
        let (q_scales, k_scales) = (make.of("q scales", F32, 4), make.of("k scales", F32, 4));
        let (starts, ends, mut scores) =
            (make.of("starts", I32, 2), make.of("ends", I32, 2), make.of("scores", F32, 8));
        let mut args = IndexerArgs::new(&q, &k, &weights, &mut scores);
        (args.q_scales, args.k_scales) = (Some((&q_scales).into()), Some((&k_scales).into()));
        (args.starts, args.ends) = (Some((&starts).into()), Some((&ends).into()));
        plan.run(&ctx.default_stream(), args)
    });
    check("the best of pages", |ctx, make| {
        let indexer = Indexer::new(KvFormat::Plain(DType::BF16), 2, 2, 16, 4).paged(1, 2, 4, 1).best(3);
        let plan = ctx.plan_indexer(&indexer)?;
        let (q, k, weights) = (make.of("q", BF16, 64), make.of("k", BF16, 128), make.of("weights", F32, 4));
        let (lengths, table, mut best) =
            (make.of("lengths", I32, 1), make.of("block table", I32, 1), make.of("indices", I32, 6));
        let mut workspace = ctx.workspace(plan.workspace_bytes())?;
        let mut args = IndexerArgs::new(&q, &k, &weights, &mut best);
        (args.lengths, args.block_table) = (Some((&lengths).into()), Some((&table).into()));
        plan.run(&ctx.default_stream(), args.workspace(&mut workspace))
    });
}

#[test]
fn f32_for_a_plan_in_f16_is_no_plausible_number() -> Result<(), Error> {
    let ctx = Context::open("cpu")?;
    let weight = weight(&ctx);
    let plan = ctx.plan(&Problem::new(&weight, 1).x_dtype(DType::F16).d_dtype(DType::F32))?;
    let mut d = ctx.allocate_elements(DType::F32, 32)?;
    let x = ctx.upload(&[2.0f32; 32])?;
    let refused = plan.run(&ctx.default_stream(), Args::new(&x, &weight, &mut d)).expect_err("f32");
    assert_eq!(refused.to_string(), "X: expected f16, got f32");
    let x = ctx.upload(&[f16::from_f32(2.0); 32])?;
    plan.run(&ctx.default_stream(), Args::new(&x, &weight, &mut d))?;
    assert!(ctx.download::<f32>(&d)?.iter().all(|v| (v - 32.0).abs() < 0.1));
    Ok(())
}

#[test]
fn copies_are_of_the_type_that_a_buffer_has() -> Result<(), Error> {
    let ctx = Context::open("cpu")?;
    let uploaded = [
        ctx.upload(&[1.0f32; 4])?,
        ctx.upload(&[f16::ONE; 4])?,
        ctx.upload(&[bf16::ONE; 4])?,
        ctx.upload(&[1i32; 4])?,
        ctx.upload(&[1u32; 4])?,
        ctx.upload(&[1i8; 4])?,
        ctx.upload(&[1u8; 4])?,
        ctx.allocate(4)?,
        ctx.allocate_elements(DType::F16, 4)?,
    ];
    let elements = uploaded.each_ref().map(Buffer::element);
    assert_eq!(elements, [F32, F16, BF16, I32, I32, I8, CODES, CODES, F16]);
    assert_eq!(uploaded.map(|buffer| buffer.len()), [16, 8, 8, 16, 16, 4, 4, 4, 8]);

    // Numbers can be downloaded in their type, and as bytes. Signed and unsigned
    // integers are interchangeable.
    let mut numbers = ctx.upload(&[1.5f32, 2.5])?;
    assert!(matches!(
        ctx.download::<f16>(&numbers),
        Err(Error::WrongElementType { operand: "source of a download", expected: F16, got: F32 })
    ));
    assert!(matches!(ctx.download::<u32>(numbers.slice(0..4)?), Err(Error::WrongElementType { .. })));
    assert_eq!(ctx.download::<u8>(&numbers)?, DType::F32.encode(&[1.5, 2.5]));
    assert_eq!(ctx.download::<u32>(&ctx.upload(&[-1i32])?)?, [u32::MAX]);
    assert!(matches!(
        ctx.upload_into(&[f16::ONE], &mut numbers),
        Err(Error::WrongElementType { operand: "destination of an upload", expected: F16, got: F32 })
    ));
    ctx.upload_into(&DType::F32.encode(&[3.0]), &mut numbers)?;
    assert_eq!(ctx.download::<f32>(&numbers)?, [3.0, 2.5]);
    // Untyped memory can be downloaded as any type.
    let mut bytes = ctx.allocate(8)?;
    ctx.upload_into(&[1.0f32], &mut bytes)?;
    ctx.upload_into(&[f16::ONE], bytes.slice_mut(4..8)?)?;
    assert_eq!(ctx.download::<f16>(bytes.slice(4..6)?)?, [f16::ONE]);

    assert!(matches!(cpu::values::<u32>(&numbers), Err(Error::WrongElementType { .. })));
    assert!(matches!(cpu::values_mut::<f16>(&mut numbers), Err(Error::WrongElementType { .. })));
    let (values, conversion) = ([1.0f32, 2.0], Conversion::new(1, 2, DType::F16, DType::F16));
    let mut d = ctx.allocate(4)?;
    let x = cpu::slice(&values);
    let refused = ctx.plan_conversion(&conversion)?.run(&ctx.default_stream(), ConversionArgs::new(&x, &mut d));
    assert!(matches!(refused, Err(Error::WrongElementType { operand: "X", expected: F16, got: F32 })));
    Ok(())
}
