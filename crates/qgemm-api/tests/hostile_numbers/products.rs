//! GEMM, experts, matmul and routing.

use qgemm_api::{
    Args, BufferRef, Context, DType, Error, ExpertArgs, ExpertProblem, Matmul, MatmulArgs, Problem, Routing,
    RoutingArgs, expert_lists,
};

use crate::{
    ALIGNMENTS, COUNTS, Refused, Room, Try, bad_alignment, bad_stride, beyond_32_bits, experts, stride_below,
    try_counts, weight,
};

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

#[test]
fn products() {
    // Rows of D in f32 reach 2³² · 32 · 4 bytes, which
    // fit the address space.
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
    // 0 bytes leave kernels without a workspace.
    try_counts("Problem.max_workspace", &COUNTS, |_| false, |room, n| run_gemm(room, 2, |p| p.max_workspace(n)));
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
    let mut args = RoutingArgs::of_logits(&room.read, ids, weights, status);
    (args.tokens, args.workspace) = (tokens, Some(&mut room.workspace));
    plan.run(&ctx.default_stream(), args)
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
            |n| !(3..1 << 59).contains(&n),
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
            |n| !(6..1 << 61).contains(&n),
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
    try_counts("Matmul.b_scale_row_stride", &COUNTS, |n| !(1..1 << 60).contains(&n), planned);
}
