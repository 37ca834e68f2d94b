//! Routing: refusals at planning and at a run, and the status. Without
//! results, on the no-op device.

use qgemm_api::{
    Buffer, Context, DType, DeviceId, Error, Routing, RoutingArgs, RoutingLists, RoutingPlan, Scoring, Workspace,
};

const TOKENS: usize = 3;
const EXPERTS: usize = 40;
const TOP_K: usize = 4;

fn noop() -> Context {
    Context::open("noop").expect("always there")
}

fn routing(tokens: usize) -> Routing {
    Routing::from_logits(tokens, EXPERTS, TOP_K, DType::F16)
}

#[test]
fn routings_are_checked_when_planned() {
    type Expect = fn(&Error) -> bool;
    let of = |tokens, experts, top_k| Routing::from_logits(tokens, experts, top_k, DType::F32);
    let given = || Routing::from_ids(TOKENS, EXPERTS, TOP_K);
    let table: [(&str, Routing, Expect); 20] = [
        ("too many tokens", routing((1 << 20) + 1), |e| matches!(e, Error::OutOfRange { most: 0x10_0000, .. })),
        ("no experts", of(1, 0, 1), |e| matches!(e, Error::OutOfRange { name: "experts", .. })),
        ("too many experts", of(1, 1025, 1), |e| matches!(e, Error::OutOfRange { most: 1024, got: 1025, .. })),
        ("no experts of a token", of(1, 8, 0), |e| matches!(e, Error::OutOfRange { name: "experts of a token", .. })),
        ("more than there are", of(1, 8, 9), |e| matches!(e, Error::OutOfRange { most: 8, got: 9, .. })),
        ("more than kernels choose", of(1, 64, 33), |e| matches!(e, Error::OutOfRange { most: 32, got: 33, .. })),
        ("too many given ids", Routing::from_ids(1, 64, 33), |e| matches!(e, Error::OutOfRange { got: 33, .. })),
        ("an infinite scale", routing(1).scale(f32::INFINITY), |e| {
            matches!(e, Error::NonFiniteScalar { name: "scale", .. })
        }),
        ("groups that do not divide", routing(1).groups(7, 2), |e| {
            matches!(e, Error::ExpertGroups { experts: 40, groups: 7, .. })
        }),
        ("no groups", routing(1).groups(0, 0), |e| matches!(e, Error::ExpertGroups { groups: 0, .. })),
        ("no group chosen", routing(1).groups(4, 0), |e| matches!(e, Error::ExpertGroups { chosen: 0, .. })),
        ("more groups than there are", routing(1).groups(4, 5), |e| matches!(e, Error::ExpertGroups { chosen: 5, .. })),
        ("groups that hold too few", routing(1).groups(20, 1), |e| matches!(e, Error::ExpertGroups { top_k: 4, .. })),
        ("rows of logits overlap", routing(TOKENS).row_stride(39), |e| {
            matches!(e, Error::StrideTooSmall { operand: "logits", expected: 40, got: 39 })
        }),
        ("logits overflow the address space", routing(TOKENS).row_stride(1 << 62), |e| {
            matches!(e, Error::ExtentOverflow { operand: "logits", .. })
        }),
        ("an alignment below the element's", routing(1).alignment(1), |e| {
            matches!(e, Error::Misaligned { operand: "logits", expected: 2, got: 1 })
        }),
        ("ids with a scoring", given().scoring(Scoring::Sigmoid), |e| {
            matches!(e, Error::RoutingOfIds { what: "a scoring" })
        }),
        ("ids with a bias", given().biased(), |e| matches!(e, Error::RoutingOfIds { what: "a bias" })),
        ("ids with groups", given().groups(4, 2), |e| matches!(e, Error::RoutingOfIds { what: "groups" })),
        ("ids with weights", given().renormalized(), |e| matches!(e, Error::RoutingOfIds { .. })),
    ];
    let ctx = noop();
    for (what, routing, expected) in table {
        match ctx.plan_routing(&routing) {
            Ok(_) => panic!("{what}: planned"),
            Err(error) => assert!(expected(&error), "{what}: {error:?}"),
        }
    }
}

/// Operands of one run, each replaceable.
struct Operands {
    logits: Option<Buffer>,
    given_ids: Option<Buffer>,
    bias: Option<Buffer>,
    ids: Option<Buffer>,
    weights: Option<Buffer>,
    lists: Option<[Buffer; 3]>,
    status: Buffer,
    workspace: Option<Workspace>,
}

impl Operands {
    fn fitting(ctx: &Context, tokens: usize) -> Self {
        let words = |count: usize| ctx.allocate(4 * count).expect("memory");
        let slots = tokens * TOP_K;
        Self {
            logits: ctx.allocate(2 * tokens * EXPERTS).ok(),
            given_ids: None,
            bias: Some(words(EXPERTS)),
            ids: Some(words(slots)),
            weights: Some(words(slots)),
            lists: Some([words(EXPERTS + 1), words(EXPERTS), words(slots)]),
            status: words(4),
            workspace: ctx.workspace(1024).ok(),
        }
    }

    fn run(&mut self, ctx: &Context, plan: &RoutingPlan) -> Result<(), Error> {
        let lists = self.lists.as_mut().map(|[offsets, counts, rows]| RoutingLists::new(offsets, counts, rows));
        let mut args = RoutingArgs::new(&mut self.status);
        args.logits = self.logits.as_ref().map(Into::into);
        args.given_ids = self.given_ids.as_ref().map(Into::into);
        args.bias = self.bias.as_ref().map(Into::into);
        args.ids = self.ids.as_mut().map(Into::into);
        args.weights = self.weights.as_mut().map(Into::into);
        (args.lists, args.workspace) = (lists, self.workspace.as_mut());
        plan.run(&ctx.default_stream(), args)
    }
}

#[test]
fn operands_are_checked_when_run() {
    type Change = fn(&mut Operands, &Context);
    type Expect = fn(&Error) -> bool;
    let table: [(&str, Change, Expect); 15] = [
        (
            "the logits are a byte short",
            |o, ctx| o.logits = ctx.allocate(2 * 100 * EXPERTS - 1).ok(),
            |e| matches!(e, Error::BufferTooShort { operand: "logits", expected: 8000, got: 7999 }),
        ),
        ("no logits", |o, _| o.logits = None, |e| matches!(e, Error::MissingOperand { operand: "logits", .. })),
        (
            "ids beside logits",
            |o, ctx| o.given_ids = ctx.allocate(1600).ok(),
            |e| matches!(e, Error::UnexpectedOperand { operand: "given ids" }),
        ),
        ("no bias", |o, _| o.bias = None, |e| matches!(e, Error::MissingOperand { operand: "bias", .. })),
        (
            "the bias is one short",
            |o, ctx| o.bias = ctx.allocate(4 * EXPERTS - 4).ok(),
            |e| matches!(e, Error::BufferTooShort { operand: "bias", .. }),
        ),
        ("no ids", |o, _| o.ids = None, |e| matches!(e, Error::MissingOperand { operand: "ids", .. })),
        (
            "the ids are one short",
            |o, ctx| o.ids = ctx.allocate(1596).ok(),
            |e| matches!(e, Error::BufferTooShort { operand: "ids", expected: 1600, got: 1596 }),
        ),
        ("no weights", |o, _| o.weights = None, |e| matches!(e, Error::MissingOperand { operand: "weights", .. })),
        ("no lists", |o, _| o.lists = None, |e| matches!(e, Error::MissingOperand { operand: "offsets", .. })),
        (
            "offsets without an end",
            |o, ctx| o.lists.as_mut().expect("given")[0] = ctx.allocate(4 * EXPERTS).expect("memory"),
            |e| matches!(e, Error::BufferTooShort { operand: "offsets", expected: 164, got: 160 }),
        ),
        (
            "counts that are too few",
            |o, ctx| o.lists.as_mut().expect("given")[1] = ctx.allocate(8).expect("memory"),
            |e| matches!(e, Error::BufferTooShort { operand: "counts", .. }),
        ),
        (
            "rows that are too few",
            |o, ctx| o.lists.as_mut().expect("given")[2] = ctx.allocate(8).expect("memory"),
            |e| matches!(e, Error::BufferTooShort { operand: "rows", .. }),
        ),
        (
            "a status of three words",
            |o, ctx| o.status = ctx.allocate(12).expect("memory"),
            |e| matches!(e, Error::BufferTooShort { operand: "status", expected: 16, got: 12 }),
        ),
        (
            "no workspace",
            |o, _| o.workspace = None,
            |e| matches!(e, Error::MissingOperand { operand: "workspace", .. }),
        ),
        (
            "a workspace that is too small",
            |o, ctx| o.workspace = ctx.workspace(1023).ok(),
            |e| matches!(e, Error::BufferTooShort { operand: "workspace", expected: 1024, got: 1023 }),
        ),
    ];
    let ctx = noop();
    let plan = ctx.plan_routing(&routing(100).biased().lists()).expect("valid");
    Operands::fitting(&ctx, 100).run(&ctx, &plan).expect("everything is there");
    for (what, change, expected) in table {
        let mut operands = Operands::fitting(&ctx, 100);
        change(&mut operands, &ctx);
        match operands.run(&ctx, &plan) {
            Ok(()) => panic!("{what}: ran"),
            Err(error) => assert!(expected(&error), "{what}: {error:?}"),
        }
    }
    // Operands that the routing does not write are refused.
    let unlisted = ctx.plan_routing(&routing(100).biased()).expect("valid");
    let error = Operands::fitting(&ctx, 100).run(&ctx, &unlisted).expect_err("lists came");
    assert!(matches!(error, Error::UnexpectedOperand { operand: "offsets" }), "{error}");
}

#[test]
fn a_plan_says_what_it_is_and_is_found_again() {
    let ctx = noop();
    let plan = ctx.plan_routing(&routing(TOKENS).lists()).expect("valid");
    let text = plan.to_string();
    assert!(text.contains("noop for 3 tokens to 4 of 40 experts on noop"), "{text}");
    assert!(text.contains("read the logits") && text.contains("write the rows"), "{text}");
    assert_eq!(plan.device(), DeviceId { kind: qgemm_api::DeviceKind::Noop, ordinal: 0 });
    // Logits of 2 bytes, ids and weights, offsets, counts
    // and rows, and the status.
    assert_eq!(plan.bytes(), (3 * 40 * 2 + 12 * 8 + 12 * 4 + 40 * 8 + 16) as f64);
    let again = ctx.plan_routing(&routing(TOKENS).lists()).expect("valid");
    let of = |plan: &RoutingPlan| std::ptr::from_ref(plan.sequence().expect("it launches"));
    assert_eq!(of(&plan), of(&again));
    let other = ctx.plan_routing(&routing(TOKENS).lists().scale(2.0)).expect("valid");
    assert_ne!(of(&plan), of(&other));
}

#[test]
fn the_status_becomes_an_error_that_names_the_slot() {
    let ctx = Context::open("cpu").expect("always there");
    let plan = ctx.plan_routing(&Routing::from_logits(2, 4, 3, DType::F32)).expect("valid");
    let nan = f32::NAN;
    let logits = ctx.upload(&DType::F32.encode(&[1.0, 2.0, 3.0, 4.0, nan, 5.0, nan, nan])).expect("memory");
    let words = |count: usize| ctx.allocate(4 * count).expect("memory");
    let (mut ids, mut weights, mut status) = (words(6), words(6), words(4));
    let args = RoutingArgs::of_logits(&logits, &mut ids, &mut weights, &mut status);
    plan.run(&ctx.default_stream(), args).expect("runs");
    let error = plan.check_status(&ctx, &status).expect_err("a token has one expert");
    assert!(matches!(error, Error::TooFewExperts { token: 1, expected: 3, got: 1 }), "{error:?}");
    assert_eq!(error.to_string(), "token 1: expected 3 experts to choose, got 1 whose logits are numbers");
    let short = status.slice(0..12).expect("in range");
    assert!(matches!(plan.check_status(&ctx, short), Err(Error::BufferTooShort { operand: "status", .. })));
    assert!(matches!(plan.check_status(&noop(), &status), Err(Error::WrongDevice { operand: "context", .. })));
}
