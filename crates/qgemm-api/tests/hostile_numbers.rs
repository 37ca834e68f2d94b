//! Every free number of the public surface, with values that nobody means: each is refused with a typed error, or planned and run.
//! Debug builds panic where arithmetic overflows, so that what is not refused has not overflowed either.

use qgemm_api::{
    ActivationFormat, Args, Attention, AttentionArgs, Budget, BufferMut, BufferRef, Context, Conversion,
    ConversionArgs, DType, DeviceId, DeviceKind, Error, ExpertArgs, ExpertProblem, Experts, FusedProblem, Gradient,
    GradientArgs, HostExperts, HostWeight, Indexer, IndexerArgs, Keys, KvAppend, KvAppendArgs, KvFormat, KvStrides,
    MaskBits, Matmul, MatmulArgs, Norm, NormArgs, NormFunction, Optimizer, OptimizerArgs, OptimizerStep, PackedWeight,
    PrepareLimits, Problem, Quantization, QuantizationArgs, QuantizedX, Queries, Rotary, RotaryScaling, Routing,
    RoutingArgs, RoutingLists, TuneProblem, UpdateRule, Weight, WeightOrder, XFormat, cpu, expert_lists, format_for_k,
    quantize,
};

/// Counts of rows, tokens, heads and the like.
const COUNTS: [usize; 11] =
    [0, 1, 2, 3, 33, 1 << 31, u32::MAX as usize, 1 << 32, 1 << 62, usize::MAX / 2 + 1, usize::MAX];
/// Bytes of every operand, zeros: what small descriptions need, and larger ones find too short.
const ROOM: usize = 1 << 16;

/// Zeros for the operands of a run.
struct Room {
    ctx: Context,
    read: qgemm_api::Buffer,
    written: Vec<qgemm_api::Buffer>,
    workspace: qgemm_api::Workspace,
}

impl Room {
    fn new(ctx: &Context) -> Self {
        let buffer = || ctx.allocate(ROOM).expect("memory");
        let written = (0..5).map(|_| buffer()).collect();
        Self { ctx: ctx.clone(), read: buffer(), written, workspace: ctx.workspace(ROOM).expect("memory") }
    }
}

type Try = fn(&mut Room, usize) -> Result<(), Error>;
type Refused = fn(usize) -> bool;

/// Tries every count; `refused` says which of them planning must refuse. A run may find its operands too short.
fn try_counts(name: &str, numbers: &[usize], refused: Refused, attempt: Try) {
    let ctx = Context::open("cpu").expect("always there");
    let mut room = Room::new(&ctx);
    for &number in numbers {
        let result = match attempt(&mut room, number) {
            Err(Error::BufferTooShort { .. }) => Ok(()),
            other => other,
        };
        assert_eq!(result.is_err(), refused(number), "{name} = {number}: {result:?}");
    }
}

/// No number but those from `least` on that kernels count to.
fn beyond_32_bits(number: usize) -> bool {
    number > u32::MAX as usize
}

fn weight(ctx: &Context) -> Weight {
    ctx.load(&host()).expect("memory")
}

fn host() -> HostWeight {
    quantize(&[0.5; 32 * 32], 32, 32, "q8_0".parse().expect("a format")).expect("valid").0
}

fn experts(ctx: &Context) -> Experts {
    ctx.load_experts(&HostExperts::new(&[host(), host()]).expect("alike")).expect("memory")
}

fn run_gemm(room: &mut Room, m: usize, describe: impl FnOnce(Problem) -> Problem) -> Result<(), Error> {
    let ctx = room.ctx.clone();
    let weight = weight(&ctx);
    let problem = describe(Problem::new(&weight, m).x_dtype(DType::F32));
    let plan = ctx.plan(&problem)?;
    let read: BufferRef<'_> = (&room.read).into();
    let [d, ..] = &mut room.written[..] else { unreachable!() };
    let mut args = Args::new(read, &weight, d).workspace(&mut room.workspace);
    let op = plan.op();
    args.c = op.c.map(|_| read);
    args.residual = op.residual.filter(|_| !op.residual_in_d).map(|_| read);
    plan.run(&ctx.default_stream(), args)
}

fn stride_below(columns: usize) -> impl Fn(usize) -> bool {
    // Two rows: the second begins within an address space.
    move |stride| stride < columns || stride > (isize::MAX as usize) / 4 - columns
}

/// [`stride_below`] of 32 columns.
fn bad_stride(stride: usize) -> bool {
    stride_below(32)(stride)
}

/// What is no power of two, or less than an f32 has.
fn bad_alignment(bytes: usize) -> bool {
    !bytes.is_power_of_two() || bytes < 4
}

const ALIGNMENTS: [usize; 8] = [0, 1, 2, 3, 4, 48, 1 << 63, usize::MAX];

#[test]
fn products() {
    // Rows of D in f32 reach 2³² · 32 · 4 bytes, which an address space has.
    try_counts("Problem::new.m", &COUNTS, beyond_32_bits, |room, m| run_gemm(room, m, |p| p));
    let strides: [(&str, Try); 4] = [
        ("Problem.x_row_stride", |room, n| run_gemm(room, 2, |p| p.x_row_stride(n as u64))),
        ("Problem.d_row_stride", |room, n| run_gemm(room, 2, |p| p.d_row_stride(n as u64))),
        ("Problem.c_row_stride", |room, n| run_gemm(room, 2, |p| p.c(1.0, DType::F32).c_row_stride(n as u64))),
        ("Problem.residual_row_stride", |room, n| {
            run_gemm(room, 2, |p| p.residual(DType::F32).residual_row_stride(n as u64))
        }),
    ];
    for (name, attempt) in strides {
        try_counts(name, &COUNTS, bad_stride, attempt);
    }
    let alignments: [(&str, Try); 4] = [
        ("Problem.x_alignment", |room, n| run_gemm(room, 2, |p| p.x_alignment(n))),
        ("Problem.d_alignment", |room, n| run_gemm(room, 2, |p| p.d_alignment(n))),
        ("Problem.c_alignment", |room, n| run_gemm(room, 2, |p| p.c(1.0, DType::F32).c_alignment(n))),
        ("Problem.residual_alignment", |room, n| run_gemm(room, 2, |p| p.residual(DType::F32).residual_alignment(n))),
    ];
    for (name, attempt) in alignments {
        try_counts(name, &ALIGNMENTS, bad_alignment, attempt);
    }
    // 0 bytes leave kernels that need none.
    try_counts("Problem.max_workspace", &COUNTS, |_| false, |room, n| run_gemm(room, 2, |p| p.max_workspace(n)));
}

/// The floating-point numbers of `attempt`, of which those that `refused` names must be refused.
fn try_floats(name: &str, refused: fn(f32) -> bool, attempt: impl Fn(f32) -> Result<(), Error>) {
    let numbers =
        [0.0, -0.0, 1.0, -1.0, f32::MAX, f32::MIN_POSITIVE, 1e-45, f32::INFINITY, f32::NEG_INFINITY, f32::NAN];
    for number in numbers {
        let result = attempt(number);
        assert_eq!(result.is_err(), refused(number), "{name} = {number}: {result:?}");
    }
}

#[test]
fn factors() {
    let ctx = Context::open("cpu").expect("always there");
    let weight = weight(&ctx);
    let not_finite: fn(f32) -> bool = |number| !number.is_finite();
    try_floats("Problem.alpha", not_finite, |v| ctx.plan(&Problem::new(&weight, 1).alpha(v)).map(drop));
    try_floats("Problem.c.beta", not_finite, |v| ctx.plan(&Problem::new(&weight, 1).c(v, DType::F32)).map(drop));
    let matmul = || Matmul::new([2, 2, 2], DType::F32, DType::F32, DType::F32);
    try_floats("Matmul.alpha", not_finite, |v| ctx.plan_matmul(&matmul().alpha(v)).map(drop));
    try_floats("Matmul.c.beta", not_finite, |v| ctx.plan_matmul(&matmul().c(v, DType::F32)).map(drop));
    try_floats("Matmul.accumulate", not_finite, |v| ctx.plan_matmul(&matmul().accumulate(v)).map(drop));
    let gradient = || Gradient::new(1, DType::F32, DType::F32);
    try_floats("Gradient.alpha", not_finite, |v| ctx.plan_gradient(&weight, &gradient().alpha(v)).map(drop));
    try_floats("Gradient.accumulate", not_finite, |v| ctx.plan_gradient(&weight, &gradient().accumulate(v)).map(drop));
    let routing = || Routing::from_logits(1, 4, 2, DType::F32);
    try_floats("Routing.scale", not_finite, |v| ctx.plan_routing(&routing().scale(v)).map(drop));
    let attention = || Attention::new(DType::F32, 1, 1, 8, Queries::each(1, 1), Keys::each(1));
    try_floats("Attention.scale", not_finite, |v| ctx.plan_attention(&attention().scale(v)).map(drop));
    let not_positive: fn(f32) -> bool = |number| !(number.is_finite() && number > 0.0);
    try_floats("Attention.soft_cap", not_positive, |v| ctx.plan_attention(&attention().soft_cap(v)).map(drop));
    let negative: fn(f32) -> bool = |number| !(number.is_finite() && number >= 0.0);
    let norm = |eps| Norm::new(1, 4, DType::F32, NormFunction::rms(eps));
    try_floats("NormFunction.eps", negative, |v| ctx.plan_norm(&norm(v)).map(drop));
    let normed = |eps| Problem::new(&weight, 1).norm(NormFunction::layer(eps));
    try_floats("Problem.norm.eps", negative, |v| ctx.plan(&normed(v)).map(drop));
    let no_share: fn(f32) -> bool = |number| !(0.0..1.0).contains(&number);
    let adamw = |beta1, beta2, eps| Optimizer::adamw(2).rule(UpdateRule::AdamW { beta1, beta2, eps });
    try_floats("AdamW.beta1", no_share, |v| ctx.plan_optimizer(&adamw(v, 0.9, 0.0)).map(drop));
    try_floats("AdamW.beta2", no_share, |v| ctx.plan_optimizer(&adamw(0.9, v, 0.0)).map(drop));
    try_floats("AdamW.eps", negative, |v| ctx.plan_optimizer(&adamw(0.9, 0.9, v)).map(drop));
    let sgd = |momentum| Optimizer::sgd(2).rule(UpdateRule::Sgd { momentum });
    try_floats("Sgd.momentum", no_share, |v| ctx.plan_optimizer(&sgd(v)).map(drop));
    let plan = ctx.plan_optimizer(&Optimizer::adamw(2)).expect("valid");
    try_floats("OptimizerStep.rate", not_finite, |v| plan.step(&OptimizerStep::new(1, v)).map(drop));
    let step = OptimizerStep::new(u64::MAX, 0.1);
    try_floats("OptimizerStep.weight_decay", not_finite, |v| plan.step(&step.weight_decay(v)).map(drop));
    try_floats("OptimizerStep.gradient_scale", not_finite, |v| plan.step(&step.gradient_scale(v)).map(drop));
    for number in [0, 1, 2, 1 << 31, u64::MAX] {
        let factors = plan.step(&OptimizerStep::new(number, 0.1));
        assert_eq!(factors.is_err(), number == 0, "OptimizerStep.number = {number}");
        assert!(factors.is_ok_and(|all| all.iter().all(|v| v.is_finite())) || number == 0);
    }
    let append = |rotary| KvAppend::new(DType::F32, 1, 1, 8, Queries::each(1, 1), Keys::each(1)).rotary(rotary);
    let neox = Rotary::neox(8);
    try_floats("Rotary.amplitude", not_finite, |v| ctx.plan_kv_append(&append(neox.amplitude(v))).map(drop));
}

#[test]
fn rotary_numbers() {
    let ctx = Context::open("cpu").expect("always there");
    let planned = |rotary| {
        let append = KvAppend::new(DType::F32, 1, 1, 8, Queries::each(1, 1), Keys::each(1)).rotary(rotary);
        ctx.plan_kv_append(&append).map(drop)
    };
    let numbers = [0.0, 1.0, -1.0, 0.5, 4.0, f64::MAX, f64::MIN_POSITIVE, 5e-324, f64::INFINITY, f64::NAN];
    let of = Rotary::neox(8);
    for v in numbers {
        let refused = [
            ("base", !(v.is_finite() && v >= 1.0), of.base(v)),
            // A factor so close to 0 makes frequencies beyond every number.
            ("Linear.factor", !(v.is_finite() && v > 1e-300), of.scaling(RotaryScaling::Linear { factor: v })),
            (
                "Llama3.factor",
                !(v.is_finite() && v > 0.0),
                of.scaling(RotaryScaling::Llama3 { factor: v, low: 1.0, high: 4.0, original: 8192 }),
            ),
            (
                "Llama3.low",
                !(v > 0.0 && v < 4.0),
                of.scaling(RotaryScaling::Llama3 { factor: 8.0, low: v, high: 4.0, original: 8192 }),
            ),
            (
                "Llama3.high",
                !(v.is_finite() && v > 1.0),
                of.scaling(RotaryScaling::Llama3 { factor: 8.0, low: 1.0, high: v, original: 8192 }),
            ),
            (
                "Yarn.fast",
                !(v.is_finite() && v > 1.0),
                of.scaling(RotaryScaling::Yarn { factor: 8.0, fast: v, slow: 1.0, original: 8192 }),
            ),
            (
                "Yarn.slow",
                !(v > 0.0 && v < 32.0),
                of.scaling(RotaryScaling::Yarn { factor: 8.0, fast: 32.0, slow: v, original: 8192 }),
            ),
        ];
        for (name, expected, rotary) in refused {
            let result = planned(rotary);
            let is_doubtful = name == "Llama3.factor" && v > 0.0 && v < 1e-300;
            assert!(is_doubtful || result.is_err() == expected, "RotaryScaling::{name} = {v}: {result:?}");
        }
    }
    for original in [0, 1, usize::MAX] {
        planned(of.scaling(RotaryScaling::Llama3 { factor: 8.0, low: 1.0, high: 4.0, original })).expect("positions");
        planned(of.scaling(RotaryScaling::Yarn { factor: 8.0, fast: 32.0, slow: 1.0, original })).expect("positions");
    }
    for dim in [0, 1, 2, 3, 8, 10, usize::MAX - 1, usize::MAX] {
        for rotary in [Rotary::neox(dim), Rotary::interleaved(dim), Rotary::neox(dim).tables(4)] {
            let result = planned(rotary);
            assert_eq!(result.is_err(), !matches!(dim, 2 | 8), "Rotary.dim = {dim}: {result:?}");
        }
    }
    for positions in [0, 1, u32::MAX as usize, 1 << 32, usize::MAX] {
        let result = planned(of.tables(positions));
        assert_eq!(result.is_err(), positions > u32::MAX as usize, "Rotary.tables = {positions}: {result:?}");
    }
    for stride in [0, 3, 4, 1 << 60, u64::MAX] {
        let result = planned(of.tables(3).table_row_stride(stride));
        assert_eq!(result.is_err(), !(4..1 << 60).contains(&stride), "Rotary.table_row_stride = {stride}: {result:?}");
    }
}

fn run_experts(room: &mut Room, problem: ExpertProblem, tokens: Option<usize>) -> Result<(), Error> {
    let ctx = room.ctx.clone();
    let plan = ctx.plan_experts(&problem.unchecked())?;
    let [d, ..] = &mut room.written[..] else { unreachable!() };
    let experts = experts(&ctx);
    let mut args = ExpertArgs::new(&room.read, &experts, &room.read, d).workspace(&mut room.workspace);
    args.tokens = tokens;
    plan.run(&ctx.default_stream(), args)
}

#[test]
fn experts_and_routings() {
    let beyond_half: Refused = |n| n > u32::MAX as usize / 2;
    let each: [(&str, Refused, Try); 6] = [
        ("ExpertProblem::contiguous.rows", beyond_32_bits, |room, n| {
            let problem = ExpertProblem::contiguous(&experts(&room.ctx), n);
            run_experts(room, problem, None)
        }),
        ("ExpertProblem::masked.capacity", beyond_half, |room, n| {
            let problem = ExpertProblem::masked(&experts(&room.ctx), n);
            run_experts(room, problem, None)
        }),
        ("ExpertProblem::indexed.tokens", beyond_half, |room, n| {
            let problem = ExpertProblem::indexed(&experts(&room.ctx), n, 2);
            run_experts(room, problem, None)
        }),
        (
            "ExpertProblem::indexed.top_k",
            |n| n == 0 || n > u32::MAX as usize / 2,
            |room, n| {
                let problem = ExpertProblem::indexed(&experts(&room.ctx), 2, n);
                run_experts(room, problem, None)
            },
        ),
        (
            "ExpertArgs.tokens",
            |n| n > 3,
            |room, n| {
                let problem = ExpertProblem::indexed(&experts(&room.ctx), 3, 2);
                run_experts(room, problem, Some(n))
            },
        ),
        (
            "Weight::shared_by.groups",
            |n| n == 0 || beyond_32_bits(n),
            |room, n| weight(&room.ctx).shared_by(n).map(drop),
        ),
    ];
    for (name, refused, attempt) in each {
        try_counts(name, &COUNTS, refused, attempt);
    }
    let routing: [(&str, Refused, Try); 5] = [
        ("Routing.tokens", |n| n > 1 << 20, |room, n| route(room, &Routing::from_logits(n, 4, 2, DType::F32), None)),
        (
            "Routing.experts",
            |n| !(2..=1024).contains(&n),
            |room, n| route(room, &Routing::from_logits(2, n, 2, DType::F32), None),
        ),
        (
            "Routing.top_k",
            |n| !(1..=4).contains(&n),
            |room, n| route(room, &Routing::from_logits(2, 4, n, DType::F32), None),
        ),
        (
            "Routing.row_stride",
            |n| stride_below(4)(n),
            |room, n| route(room, &Routing::from_logits(2, 4, 2, DType::F32).row_stride(n as u64), None),
        ),
        ("RoutingArgs.tokens", |n| n > 2, |room, n| route(room, &Routing::from_logits(2, 4, 2, DType::F32), Some(n))),
    ];
    for (name, refused, attempt) in routing {
        try_counts(name, &COUNTS, refused, attempt);
    }
    try_counts("Routing.alignment", &ALIGNMENTS, bad_alignment, |room, n| {
        route(room, &Routing::from_logits(2, 4, 2, DType::F32).alignment(n), None)
    });
    for groups in COUNTS {
        for chosen in COUNTS {
            let ctx = Context::open("cpu").expect("always there");
            let planned = ctx.plan_routing(&Routing::from_logits(1, 4, 2, DType::F32).groups(groups, chosen));
            let is_fit = matches!((groups, chosen), (1, 1) | (2, 1 | 2));
            assert_eq!(planned.is_ok(), is_fit, "Routing.groups = ({groups}, {chosen}): {planned:?}");
        }
    }
    for (experts, slots) in COUNTS.into_iter().flat_map(|a| COUNTS.map(|b| (a, b))) {
        let lists = expert_lists(experts, slots);
        assert!(lists.is_none_or(|[offsets, rows]| offsets.end <= rows.start), "expert_lists({experts}, {slots})");
    }
    let ctx = Context::open("cpu").expect("always there");
    let of_one = experts(&ctx);
    for top_k in COUNTS {
        let layer = ctx.moe_layer(&of_one, &of_one, top_k, |moe| moe.routed(DType::F32, |routing| routing));
        assert_eq!(layer.is_ok(), matches!(top_k, 1 | 2), "Context::moe_layer.top_k = {top_k}: {:?}", layer.err());
    }
    let layer = ctx.moe_layer(&of_one, &of_one, 1, |moe| moe.routed(DType::F32, |routing| routing)).expect("valid");
    for tokens in COUNTS {
        assert_eq!(layer.plan(tokens).is_err(), tokens > 1 << 20, "MoeLayer::plan({tokens})");
    }
    assert!(matches!(layer.workspace(usize::MAX), Err(Error::OutOfRange { .. })));
}

fn route(room: &mut Room, routing: &Routing, tokens: Option<usize>) -> Result<(), Error> {
    let ctx = room.ctx.clone();
    let plan = ctx.plan_routing(routing)?;
    let [ids, weights, status, ..] = &mut room.written[..] else { unreachable!() };
    let mut args = RoutingArgs::of_logits((&room.read).into(), ids.into(), weights.into(), status.into());
    (args.tokens, args.workspace) = (tokens, Some(&mut room.workspace));
    plan.run(&ctx.default_stream(), args)
}

#[test]
fn conversions_and_quantizations() {
    fn converted(room: &mut Room, conversion: &Conversion) -> Result<(), Error> {
        let plan = room.ctx.plan_conversion(conversion)?;
        let [d, ..] = &mut room.written[..] else { unreachable!() };
        plan.run(&room.ctx.default_stream(), ConversionArgs::new(&room.read, d))
    }
    fn of(rows: usize, columns: usize) -> Conversion {
        Conversion::new(rows, columns, DType::F32, DType::F32)
    }
    let cases: [(&str, Refused, Try); 5] = [
        ("Conversion.rows", beyond_32_bits, |room, n| converted(room, &of(n, 3))),
        ("Conversion.columns", beyond_32_bits, |room, n| converted(room, &of(2, n))),
        ("Conversion.d_columns", beyond_32_bits, |room, n| converted(room, &of(2, 3).d_columns(n))),
        (
            "Conversion.x_row_stride",
            |n| stride_below(3)(n),
            |room, n| converted(room, &of(2, 3).x_row_stride(n as u64)),
        ),
        (
            "Conversion.d_row_stride",
            |n| stride_below(3)(n),
            |room, n| converted(room, &of(2, 3).d_row_stride(n as u64)),
        ),
    ];
    for (name, refused, attempt) in cases {
        try_counts(name, &COUNTS, refused, attempt);
    }
    try_counts("Conversion.x_alignment", &ALIGNMENTS, bad_alignment, |room, n| {
        converted(room, &of(2, 3).x_alignment(n))
    });
    try_counts("Conversion.d_alignment", &ALIGNMENTS, bad_alignment, |room, n| {
        converted(room, &of(2, 3).d_alignment(n))
    });

    fn quantized(room: &mut Room, quantization: &Quantization) -> Result<(), Error> {
        let plan = room.ctx.plan_quantization(quantization)?;
        let [codes, scales, sums, ..] = &mut room.written[..] else { unreachable!() };
        let mut args = QuantizationArgs::new(&room.read, codes);
        (args.scales, args.sums) = (Some(scales.into()), Some(sums.into()));
        plan.run(&room.ctx.default_stream(), args)
    }
    fn q8_1(rows: usize, columns: usize) -> Quantization {
        Quantization::new(rows, columns, DType::F32, XFormat::Q8_1)
    }
    let cases: [(&str, Refused, Try); 6] = [
        ("Quantization.rows", beyond_32_bits, |room, n| quantized(room, &q8_1(n, 3))),
        ("Quantization.columns", beyond_32_bits, |room, n| quantized(room, &q8_1(2, n))),
        (
            "Quantization.x_row_stride",
            |n| stride_below(3)(n),
            |room, n| quantized(room, &q8_1(2, 3).x_row_stride(n as u64)),
        ),
        (
            "Quantization.codes_row_stride",
            |n| n < 32 || !n.is_multiple_of(16) || n >= 1 << 63,
            |room, n| quantized(room, &q8_1(2, 3).codes_row_stride(n as u64)),
        ),
        (
            "Quantization.scales_row_stride",
            |n| n < 4 || !n.is_multiple_of(4) || n >= 1 << 63,
            |room, n| quantized(room, &q8_1(2, 3).scales_row_stride(n as u64)),
        ),
        (
            "Quantization.sums_row_stride",
            |n| n < 4 || !n.is_multiple_of(4) || n >= 1 << 63,
            |room, n| quantized(room, &q8_1(2, 3).sums_row_stride(n as u64)),
        ),
    ];
    for (name, refused, attempt) in cases {
        try_counts(name, &COUNTS, refused, attempt);
    }
    let spans = [0, 1, 8, 16, 32, 64, usize::MAX];
    let no_span: Refused = |n| n != 16 && n != 32;
    try_counts("Quantization.sums_of", &spans, no_span, |room, n| quantized(room, &q8_1(2, 3).sums_of(n)));
    for (format, span) in XFormat::ALL.into_iter().flat_map(|format| spans.map(|span| (format, span))) {
        let parts = format.parts(false, Some(span));
        assert_eq!(parts.is_some(), !no_span(span) && format.plain().is_none(), "{format}.parts({span})");
        for (parts, k) in parts.into_iter().flat_map(|parts| COUNTS.map(|k| (parts, k))) {
            assert!(parts.columns(k) >= k && parts.scales(k) <= parts.columns(k).max(1), "{format}.columns({k})");
            assert!(parts.sums(k) <= parts.columns(k) && parts.code_bytes(k) <= parts.columns(k), "{format} of {k}");
        }
    }
    let ctx = Context::open("cpu").expect("always there");
    for (rows, columns) in COUNTS.into_iter().flat_map(|rows| COUNTS.map(|columns| (rows, columns))) {
        let made = QuantizedX::from_blocks(&ctx, ActivationFormat::Q8_1, rows, columns, &[]);
        let is_empty = (rows == 0 || columns == 0) && !beyond_32_bits(rows) && !beyond_32_bits(columns);
        assert_eq!(made.is_ok(), is_empty, "QuantizedX::from_blocks({rows}, {columns})");
    }
}

#[test]
fn norms_optimizers_and_gradients() {
    fn normed(room: &mut Room, norm: &Norm) -> Result<(), Error> {
        let plan = room.ctx.plan_norm(norm)?;
        let [d, sum, ..] = &mut room.written[..] else { unreachable!() };
        let mut args = NormArgs::new(&room.read, d);
        if plan.op().added.is_some() {
            (args.residual, args.sum) = (Some((&room.read).into()), Some(sum.into()));
        }
        plan.run(&room.ctx.default_stream(), args)
    }
    fn of(rows: usize, columns: usize) -> Norm {
        Norm::new(rows, columns, DType::F32, NormFunction::rms(1e-5))
    }
    let cases: [(&str, Refused, Try); 7] = [
        ("Norm.rows", beyond_32_bits, |room, n| normed(room, &of(n, 3))),
        ("Norm.columns", beyond_32_bits, |room, n| normed(room, &of(2, n))),
        ("Norm.d_columns", |n| n < 3 || beyond_32_bits(n), |room, n| normed(room, &of(2, 3).d_columns(n))),
        ("Norm.x_row_stride", |n| stride_below(3)(n), |room, n| normed(room, &of(2, 3).x_row_stride(n as u64))),
        ("Norm.d_row_stride", |n| stride_below(3)(n), |room, n| normed(room, &of(2, 3).d_row_stride(n as u64))),
        (
            "Norm.residual_row_stride",
            |n| stride_below(3)(n),
            |room, n| normed(room, &of(2, 3).residual(DType::F32).residual_row_stride(n as u64)),
        ),
        (
            "Norm.sum_row_stride",
            |n| stride_below(3)(n),
            |room, n| normed(room, &of(2, 3).residual(DType::F32).sum_row_stride(n as u64)),
        ),
    ];
    for (name, refused, attempt) in cases {
        try_counts(name, &COUNTS, refused, attempt);
    }
    let alignments: [(&str, Try); 4] = [
        ("Norm.x_alignment", |room, n| normed(room, &of(2, 3).x_alignment(n))),
        ("Norm.d_alignment", |room, n| normed(room, &of(2, 3).d_alignment(n))),
        ("Norm.residual_alignment", |room, n| normed(room, &of(2, 3).residual(DType::F32).residual_alignment(n))),
        ("Norm.sum_alignment", |room, n| normed(room, &of(2, 3).residual(DType::F32).sum_alignment(n))),
    ];
    for (name, attempt) in alignments {
        try_counts(name, &ALIGNMENTS, bad_alignment, attempt);
    }
    try_counts(
        "Optimizer.len",
        &COUNTS,
        |n| n > isize::MAX as usize / 4,
        |room, n| {
            let plan = room.ctx.plan_optimizer(&Optimizer::sgd(n))?;
            let [weights, ..] = &mut room.written[..] else { unreachable!() };
            plan.run(&room.ctx.default_stream(), OptimizerArgs::new(weights, &room.read, &room.read))
        },
    );
    fn gradient(room: &mut Room, gradient: &Gradient) -> Result<(), Error> {
        let weight = weight(&room.ctx);
        let plan = room.ctx.plan_gradient(&weight, gradient)?;
        let [dx, ..] = &mut room.written[..] else { unreachable!() };
        let args = GradientArgs::new(&room.read, &weight, dx).workspace(&mut room.workspace);
        plan.run(&room.ctx.default_stream(), args)
    }
    fn of_tokens(tokens: usize) -> Gradient {
        Gradient::new(tokens, DType::F32, DType::F32)
    }
    let cases: [(&str, Refused, Try); 4] = [
        ("Gradient.tokens", beyond_32_bits, |room, n| gradient(room, &of_tokens(n))),
        ("Gradient.dy_row_stride", bad_stride, |room, n| gradient(room, &of_tokens(2).dy_row_stride(n as u64))),
        ("Gradient.dx_row_stride", bad_stride, |room, n| gradient(room, &of_tokens(2).dx_row_stride(n as u64))),
        ("Gradient.max_scratch", |_| false, |room, n| gradient(room, &of_tokens(2).max_scratch(n))),
    ];
    for (name, refused, attempt) in cases {
        try_counts(name, &COUNTS, refused, attempt);
    }
    try_counts("Gradient.alignment", &ALIGNMENTS, bad_alignment, |room, n| {
        gradient(room, &of_tokens(2).alignment(n, 4))
    });
    try_counts("Gradient.alignment", &ALIGNMENTS, bad_alignment, |room, n| {
        gradient(room, &of_tokens(2).alignment(4, n))
    });
}

#[test]
fn matrix_products() {
    fn multiplied(room: &mut Room, matmul: &Matmul) -> Result<(), Error> {
        let plan = room.ctx.plan_matmul(matmul)?;
        let [d, ..] = &mut room.written[..] else { unreachable!() };
        let mut args = MatmulArgs::new(&room.read, &room.read, d).workspace(&mut room.workspace);
        args.c = plan.op().c.as_ref().map(|_| (&room.read).into());
        if plan.op().k_grouped || plan.op().rows_grouped {
            args.offsets = Some((&room.read).into());
        }
        plan.run(&room.ctx.default_stream(), args)
    }
    fn of(m: usize, n: usize, k: usize) -> Matmul {
        Matmul::new([m, n, k], DType::F32, DType::F32, DType::F32)
    }
    let cases: [(&str, Refused, Try); 14] = [
        ("Matmul.m", beyond_32_bits, |room, n| multiplied(room, &of(n, 2, 3))),
        ("Matmul.n", beyond_32_bits, |room, n| multiplied(room, &of(2, n, 3))),
        ("Matmul.k", beyond_32_bits, |room, n| multiplied(room, &of(2, 3, n))),
        ("Matmul.batch", beyond_32_bits, |room, n| multiplied(room, &of(2, 3, 4).batch(n))),
        ("Matmul.k_grouped", beyond_32_bits, |room, n| multiplied(room, &of(2, 3, 4).a_transposed().k_grouped(n))),
        ("Matmul.rows_grouped", beyond_32_bits, |room, n| multiplied(room, &of(2, 3, 4).rows_grouped(n))),
        (
            "Matmul.a_row_stride",
            |n| stride_below(4)(n),
            |room, n| multiplied(room, &of(2, 3, 4).a_row_stride(n as u64)),
        ),
        (
            "Matmul.b_row_stride",
            |n| n < 3 || n >= 1 << 59,
            |room, n| multiplied(room, &of(2, 3, 4).b_row_stride(n as u64)),
        ),
        (
            "Matmul.d_row_stride",
            |n| stride_below(3)(n),
            |room, n| multiplied(room, &of(2, 3, 4).d_row_stride(n as u64)),
        ),
        (
            "Matmul.c_row_stride",
            |n| stride_below(3)(n),
            |room, n| multiplied(room, &of(2, 3, 4).c(1.0, DType::F32).c_row_stride(n as u64)),
        ),
        (
            "Matmul.a_batch_stride",
            |n| n >= 1 << 61,
            |room, n| multiplied(room, &of(2, 3, 4).batch(2).a_batch_stride(n as u64)),
        ),
        (
            "Matmul.b_batch_stride",
            |n| n >= 1 << 61,
            |room, n| multiplied(room, &of(2, 3, 4).batch(2).b_batch_stride(n as u64)),
        ),
        (
            "Matmul.d_batch_stride",
            |n| n < 6 || n >= 1 << 61,
            |room, n| multiplied(room, &of(2, 3, 4).batch(2).d_batch_stride(n as u64)),
        ),
        (
            "Matmul.c_batch_stride",
            |n| n >= 1 << 61,
            |room, n| multiplied(room, &of(2, 3, 4).batch(2).c(1.0, DType::F32).c_batch_stride(n as u64)),
        ),
    ];
    for (name, refused, attempt) in cases {
        try_counts(name, &COUNTS, refused, attempt);
    }
    let alignments: [(&str, Try); 4] = [
        ("Matmul.alignment", |room, n| multiplied(room, &of(2, 3, 4).alignment(n, 4))),
        ("Matmul.alignment", |room, n| multiplied(room, &of(2, 3, 4).alignment(4, n))),
        ("Matmul.d_alignment", |room, n| multiplied(room, &of(2, 3, 4).d_alignment(n))),
        ("Matmul.c_alignment", |room, n| multiplied(room, &of(2, 3, 4).c(1.0, DType::F32).c_alignment(n))),
    ];
    for (name, attempt) in alignments {
        try_counts(name, &ALIGNMENTS, bad_alignment, attempt);
    }
    fn of_blocks() -> Matmul {
        Matmul::new([2, 3, 4], qgemm_api::FactorFormat::E4M3Block, qgemm_api::FactorFormat::E4M3Block, DType::F32)
            .b_transposed()
    }
    let planned: Try = |room, n| room.ctx.plan_matmul(&of_blocks().a_scale_row_stride(n as u64)).map(drop);
    try_counts("Matmul.a_scale_row_stride", &COUNTS, |n| stride_below(1)(n), planned);
    let planned: Try = |room, n| room.ctx.plan_matmul(&of_blocks().b_scale_row_stride(n as u64)).map(drop);
    try_counts("Matmul.b_scale_row_stride", &COUNTS, |n| n == 0 || n >= 1 << 60, planned);
}

/// Attention that finds keys and queries as `describe` says, run with zeros.
fn attended(room: &mut Room, attention: &Attention, has_table: bool, has_lengths: bool) -> Result<(), Error> {
    let plan = room.ctx.plan_attention(attention)?;
    let [d, lse, ..] = &mut room.written[..] else { unreachable!() };
    let read: BufferRef<'_> = (&room.read).into();
    let mut args = AttentionArgs::new(read, read, read, d);
    let used = |is_used: bool| is_used.then_some(read);
    (args.block_table, args.kv_lengths) = (used(has_table), used(has_lengths));
    args.mask = used(plan.op().mask.is_some());
    args.lse = plan.op().lse.then(|| lse.into());
    args.workspace = Some(&mut room.workspace);
    plan.run(&room.ctx.default_stream(), args)
}

fn attention(heads: usize, kv_heads: usize, head_dim: usize) -> Attention {
    Attention::new(DType::F32, heads, kv_heads, head_dim, Queries::each(2, 2), Keys::each(3))
}

fn beyond_31_bits(number: usize) -> bool {
    number > i32::MAX as usize
}

#[test]
fn attention_and_caches() {
    let cases: [(&str, Refused, Try); 12] = [
        ("Attention.heads", |n| n == 0 || n > 1 << 16, |room, n| attended(room, &attention(n, 1, 8), false, false)),
        ("Attention.kv_heads", |n| !matches!(n, 1 | 2), |room, n| attended(room, &attention(2, n, 8), false, false)),
        ("Attention.head_dim", |_| true, |room, n| attended(room, &attention(1, 1, n), false, false)),
        ("Attention.v_dim", |_| true, |room, n| attended(room, &attention(1, 1, 8).v_dim(n), false, false)),
        ("Attention.window", |_| false, |room, n| attended(room, &attention(1, 1, 8).causal().window(n), false, false)),
        ("Queries::each.sequences", beyond_31_bits, |room, n| {
            let attention = Attention::new(DType::F32, 1, 1, 8, Queries::each(n, 1), Keys::each(1));
            attended(room, &attention, false, false)
        }),
        ("Queries::each.count", beyond_31_bits, |room, n| {
            let attention = Attention::new(DType::F32, 1, 1, 8, Queries::each(1, n), Keys::each(1));
            attended(room, &attention, false, false)
        }),
        ("Keys::each.count", beyond_31_bits, |room, n| {
            let attention = Attention::new(DType::F32, 1, 1, 8, Queries::each(1, 1), Keys::each(n));
            attended(room, &attention, false, false)
        }),
        ("Keys::lengths.capacity", beyond_31_bits, |room, n| {
            let attention = Attention::new(DType::F32, 1, 1, 8, Queries::each(1, 1), Keys::lengths(n));
            attended(room, &attention, false, true)
        }),
        ("Keys::paged.pages", beyond_31_bits, |room, n| {
            let attention = Attention::new(DType::F32, 1, 1, 8, Queries::each(1, 1), Keys::paged(n, 2, 1));
            attended(room, &attention, true, true)
        }),
        (
            "Keys::paged.page_size",
            |n| n == 0 || beyond_31_bits(n),
            |room, n| {
                let attention = Attention::new(DType::F32, 1, 1, 8, Queries::each(1, 1), Keys::paged(2, n, 1));
                attended(room, &attention, true, true)
            },
        ),
        (
            "Keys::paged.width",
            |n| n > i32::MAX as usize / 2,
            |room, n| {
                let attention = Attention::new(DType::F32, 1, 1, 8, Queries::each(1, 1), Keys::paged(2, 2, n));
                attended(room, &attention, true, true)
            },
        ),
    ];
    for (name, refused, attempt) in cases {
        try_counts(name, &COUNTS, refused, attempt);
    }
    let ctx = Context::open("cpu").expect("always there");
    let numbers = COUNTS.into_iter().filter(|&n| n <= i32::MAX as usize);
    for most in numbers {
        let keys = Keys::offsets(4, most);
        ctx.plan_attention(&Attention::new(DType::F32, 1, 1, 8, Queries::offsets(1, 4, most), keys.most(most)))
            .unwrap_or_else(|error| panic!("Queries::offsets.most, Keys::offsets.most, Keys.most = {most}: {error}"));
        ctx.plan_attention(&attention(1, 1, 8).mask(MaskBits::shared().per_head())).expect("valid");
    }
    let masked: Try = |room, n| {
        let queries = Queries::offsets(1, n, n);
        let attention = Attention::new(DType::F32, 1, 1, 8, queries, Keys::each(1 << 30)).mask(MaskBits::of_tokens());
        room.ctx.plan_attention(&attention).map(drop)
    };
    try_counts("Attention.mask", &COUNTS, beyond_31_bits, masked);
    // Strides of two tokens and two heads, whose last element must have an address.
    let far: Refused = |n| n >= 1 << 60;
    let strided: [(&str, Refused, Try); 4] = [
        ("Attention.q_strides", far, |room, n| {
            attended(room, &attention(2, 2, 8).q_strides(n as u64, 8), false, false)
        }),
        (
            "Attention.d_strides",
            |n| n < 16 || n >= 1 << 60,
            |room, n| attended(room, &attention(2, 2, 8).d_strides(n as u64, 8), false, false),
        ),
        ("Attention.k_strides.page", far, |room, n| {
            let strides = KvStrides { page: n as u64, token: 16, head: 8 };
            attended(room, &attention(2, 2, 8).k_strides(strides), false, false)
        }),
        ("Attention.v_strides.token", far, |room, n| {
            let strides = KvStrides { page: 48, token: n as u64, head: 8 };
            attended(room, &attention(2, 2, 8).v_strides(strides), false, false)
        }),
    ];
    for (name, refused, attempt) in strided {
        try_counts(name, &COUNTS, refused, attempt);
    }
    let alignments: [(&str, Try); 2] = [
        ("Attention.alignment", |room, n| attended(room, &attention(1, 1, 8).alignment(n), false, false)),
        ("Attention.kv_alignment", |room, n| attended(room, &attention(1, 1, 8).kv_alignment(n), false, false)),
    ];
    for (name, attempt) in alignments {
        try_counts(name, &ALIGNMENTS, bad_alignment, attempt);
    }
}

fn appended(room: &mut Room, append: &KvAppend) -> Result<(), Error> {
    let plan = room.ctx.plan_kv_append(append)?;
    let [q, k, v, ..] = &mut room.written[..] else { unreachable!() };
    let (q, k, v): (BufferMut<'_>, BufferMut<'_>, BufferMut<'_>) = (q.into(), k.into(), v.into());
    let mut args = KvAppendArgs::new(&room.read, &room.read, k, v);
    args.q = (plan.op().heads > 0).then_some(q);
    plan.run(&room.ctx.default_stream(), args)
}

#[test]
fn appends_and_indexers() {
    fn of(heads: usize, kv_heads: usize, head_dim: usize) -> KvAppend {
        KvAppend::new(DType::F32, heads, kv_heads, head_dim, Queries::each(2, 2), Keys::each(3))
    }
    let far: Refused = |n| n >= 1 << 60;
    let cases: [(&str, Refused, Try); 9] = [
        ("KvAppend.heads", |n| n > 1 << 16, |room, n| appended(room, &of(n, 1, 8))),
        ("KvAppend.kv_heads", |n| n == 0 || n > 1 << 16, |room, n| appended(room, &of(2, n, 8))),
        ("KvAppend.head_dim", |_| true, |room, n| appended(room, &of(1, 1, n))),
        ("KvAppend.v_dim", |_| true, |room, n| appended(room, &of(1, 1, 8).v_dim(n))),
        (
            "KvAppend.q_strides",
            |n| n < 16 || n >= 1 << 60,
            |room, n| appended(room, &of(2, 1, 8).q_strides(n as u64, 8)),
        ),
        ("KvAppend.new_k_strides", far, |room, n| appended(room, &of(1, 2, 8).new_k_strides(n as u64, 8))),
        ("KvAppend.new_v_strides", far, |room, n| appended(room, &of(1, 2, 8).new_v_strides(16, n as u64))),
        (
            "KvAppend.k_strides",
            |n| n < 48 || n >= 1 << 60,
            |room, n| appended(room, &of(1, 2, 8).k_strides(KvStrides { page: n as u64, token: 16, head: 8 })),
        ),
        (
            "KvAppend.v_strides",
            |_| true,
            |room, n| {
                // Heads lie within a token of 16 elements: no stride of the table leaves room for both.
                appended(room, &of(1, 2, 8).v_strides(KvStrides { page: 48, token: 16, head: n as u64 }))
            },
        ),
    ];
    for (name, refused, attempt) in cases {
        try_counts(name, &COUNTS, refused, attempt);
    }
    let alignments: [(&str, Try); 2] = [
        ("KvAppend.alignment", |room, n| appended(room, &of(1, 1, 8).alignment(n))),
        ("KvAppend.kv_alignment", |room, n| appended(room, &of(1, 1, 8).kv_alignment(n))),
    ];
    for (name, attempt) in alignments {
        try_counts(name, &ALIGNMENTS, bad_alignment, attempt);
    }

    fn indexed(room: &mut Room, indexer: &Indexer) -> Result<(), Error> {
        let plan = room.ctx.plan_indexer(indexer)?;
        let [result, ..] = &mut room.written[..] else { unreachable!() };
        let read: BufferRef<'_> = (&room.read).into();
        let mut args = IndexerArgs::new(read, read, read, result).workspace(&mut room.workspace);
        if plan.op().paging().width > 0 {
            (args.lengths, args.block_table) = (Some(read), Some(read));
        }
        plan.run(&room.ctx.default_stream(), args)
    }
    fn of_keys(queries: usize, keys: usize) -> Indexer {
        Indexer::new(KvFormat::Plain(DType::F16), queries, 1, 16, keys)
    }
    let cases: [(&str, Refused, Try); 12] = [
        ("Indexer.queries", beyond_31_bits, |room, n| indexed(room, &of_keys(n, 2))),
        (
            "Indexer.heads",
            |n| n == 0 || n > 1 << 16,
            |room, n| indexed(room, &Indexer::new(KvFormat::Plain(DType::F16), 1, n, 16, 2)),
        ),
        ("Indexer.features", |_| true, |room, n| indexed(room, &Indexer::new(KvFormat::Plain(DType::F16), 1, 1, n, 2))),
        ("Indexer.keys", beyond_31_bits, |room, n| indexed(room, &of_keys(1, n))),
        ("Indexer.best", |_| false, |room, n| indexed(room, &of_keys(1, 2).best(n))),
        ("Indexer.paged.sequences", |n| !matches!(n, 1 | 2), |room, n| indexed(room, &of_keys(2, 0).paged(n, 2, 2, 1))),
        ("Indexer.paged.pages", beyond_31_bits, |room, n| indexed(room, &of_keys(2, 0).paged(1, n, 2, 1))),
        (
            "Indexer.paged.page_size",
            |n| n == 0 || beyond_31_bits(n),
            |room, n| indexed(room, &of_keys(2, 0).paged(1, 2, n, 1)),
        ),
        (
            "Indexer.paged.width",
            |n| n > i32::MAX as usize / 2,
            |room, n| room.ctx.plan_indexer(&of_keys(2, 0).paged(1, 2, 2, n)).map(drop),
        ),
        ("Indexer.q_strides", |n| n >= 1 << 62, |room, n| indexed(room, &of_keys(2, 2).q_strides(n as u64, 0))),
        (
            "Indexer.weights_stride",
            |n| n < 1 || n >= 1 << 60,
            |room, n| indexed(room, &of_keys(2, 2).weights_stride(n as u64)),
        ),
        (
            "Indexer.scores_stride",
            |n| n < 2 || n >= 1 << 60,
            |room, n| indexed(room, &of_keys(2, 2).scores_stride(n as u64)),
        ),
    ];
    for (name, refused, attempt) in cases {
        try_counts(name, &COUNTS, refused, attempt);
    }
    try_counts(
        "Indexer.k_stride",
        &COUNTS,
        |n| n >= 1 << 62,
        |room, n| indexed(room, &of_keys(2, 2).k_stride(n as u64)),
    );
    try_counts(
        "Indexer.page_strides",
        &COUNTS,
        |n| n >= 1 << 61,
        |room, n| indexed(room, &of_keys(2, 0).paged(1, 2, 2, 1).page_strides(n as u64, n as u64)),
    );
    try_counts(
        "Indexer.alignment",
        &ALIGNMENTS,
        |n| !n.is_power_of_two() || n < 2,
        |room, n| indexed(room, &of_keys(2, 2).alignment(n)),
    );
}

#[test]
fn weights_devices_and_memory() {
    let ctx = Context::open("cpu").expect("always there");
    let format = "q8_0".parse().expect("a format");
    let room: Try = |room, n| room.ctx.allocate(n).map(drop);
    let too_large: Refused = |n| n > isize::MAX as usize / 2;
    let small = [0, 1, 3, 1 << 16, usize::MAX / 2 + 1, usize::MAX];
    try_counts("Context::allocate", &small, too_large, room);
    try_counts("Context::allocate_elements", &small, too_large, |room, n| {
        room.ctx.allocate_elements(DType::F16, n).map(drop)
    });
    try_counts("Context::workspace", &small, too_large, |room, n| room.ctx.workspace(n).map(drop));
    for (n, k) in COUNTS.into_iter().flat_map(|n| COUNTS.map(|k| (n, k))) {
        assert!(quantize(&[0.5], n, k, format).is_err(), "quantize({n}, {k})");
        assert!(HostWeight::new(format, n, k, vec![0; 34].into()).is_err(), "HostWeight::new({n}, {k})");
        let dense = ctx.load_dense(&[0; 4], DType::F32, n, k, WeightOrder::KN);
        assert_eq!(dense.is_ok(), (n, k) == (1, 1), "Context::load_dense({n}, {k})");
        let described = ctx.describe_weight(format, n, k);
        assert!(described.is_err() || (n > 0 && k.is_multiple_of(32)), "Context::describe_weight({n}, {k})");
        if let Ok(described) = described {
            assert!(described.gated().is_err() || n <= u32::MAX as usize, "DescribedWeight::gated of {n}");
        }
        assert!(format_for_k(format, k).is_err() || k.is_multiple_of(32), "format_for_k({k})");
    }
    let described = ctx.describe_weight(format, 32, 32).expect("valid");
    for count in COUNTS {
        let experts = described.experts(count);
        assert_eq!(experts.is_err(), count == 0 || count > 1 << 27, "DescribedWeight::experts({count})");
        assert!(HostExperts::of_stacked(&host(), count).is_err() || count == 1 || count == 2, "of_stacked({count})");
        assert!((1..=512).contains(&ctx.copies_beyond_cache(count)), "Context::copies_beyond_cache({count})");
        let limits = PrepareLimits::default().memory(count);
        assert!(matches!(ctx.prepare_within(&[described.problem(1)], limits, |_| ()), Ok(1)), "PrepareLimits.memory");
        let opened = cpu::open_with_threads(if count == 33 { 2 } else { count });
        assert_eq!(opened.is_err(), count > 4096, "cpu::open_with_threads({count})");
    }
    let packed = PackedWeight::pack(&host(), ctx.device().fragment_layout(format)).expect("it packs");
    for count in COUNTS {
        let changed = |change: fn(&mut qgemm_api::PackedParts, usize)| {
            let mut parts = (*packed).clone();
            change(&mut parts, count);
            PackedWeight::new(parts)
        };
        assert!(changed(|parts, n| parts.n = n).is_err(), "PackedParts.n = {count}");
        assert!(changed(|parts, n| parts.features = n).is_err(), "PackedParts.features = {count}");
        assert!(changed(|parts, n| parts.k = n).is_err(), "PackedParts.k = {count}");
        assert!(changed(|parts, n| parts.stored_k = n).is_err(), "PackedParts.stored_k = {count}");
    }
    for ordinal in [1, 7, u32::MAX] {
        for kind in [DeviceKind::Cpu, DeviceKind::Cuda, DeviceKind::Wgpu, DeviceKind::Emu] {
            assert!(Context::open(DeviceId { kind, ordinal }).is_err() || ordinal == 1, "{kind:?} {ordinal}");
        }
    }
}

#[test]
fn segments_ranges_and_budgets() {
    let ctx = Context::open("cpu").expect("always there");
    let fused = ctx.load_fused(&[&host(), &host()]).expect("alike");
    for segment in COUNTS {
        assert_eq!(fused.columns(segment).is_some(), segment < 2, "FusedWeight::columns({segment})");
        let problem = || FusedProblem::new(&fused, 1, DType::F32);
        for stated in [
            problem().output_dtype(segment, DType::F16),
            problem().output_row_stride(segment, 32),
            problem().output_alignment(segment, 4),
        ] {
            let planned = ctx.plan_fused(&stated);
            assert_eq!(planned.is_ok(), segment < 2, "FusedProblem.output of segment {segment}: {:?}", planned.err());
        }
        let m = ctx.plan_fused(&FusedProblem::new(&fused, segment, DType::F32));
        assert_eq!(m.is_err(), beyond_32_bits(segment), "FusedProblem.m = {segment}: {:?}", m.err());
        let mut buffer = ctx.allocate(8).expect("memory");
        assert_eq!(buffer.slice(segment..8).is_err(), segment > 8, "Buffer::slice({segment}..8)");
        assert_eq!(buffer.slice(0..segment).is_err(), segment > 8, "Buffer::slice(0..{segment})");
        assert_eq!(buffer.split_off(segment).is_err(), segment > 8, "Buffer::split_off({segment})");
        let linear = ctx.linear(&weight(&ctx), &[], segment, qgemm_api::XPrecision::Auto);
        assert_eq!(linear.is_ok(), segment == 0, "Context::linear of {segment} tokens");
    }
    let weights = [weight(&ctx)];
    for within in [0.0, -1.0, 0.5, 1.0, f64::MAX, f64::INFINITY, f64::NEG_INFINITY, f64::NAN] {
        for most in [0, 1, usize::MAX] {
            let mut budget = Budget::new(std::time::Duration::ZERO);
            (budget.within, budget.most) = (within, most);
            let tuned = ctx.tune(&[TuneProblem::new(Problem::new(&weights[0], 1), &weights)], budget, |_| ());
            let is_refused = matches!(tuned, Err(Error::TuneBudget { .. }));
            assert_eq!(is_refused, !(within >= 1.0), "Budget.within = {within}: {:?}", tuned.err());
        }
    }
}
