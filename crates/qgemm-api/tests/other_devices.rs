//! Objects of another device: every plan refuses weights,
//! workspaces and buffers, and names both devices.
//! Contexts of one device share its memory. A tuning checks
//! weights before it measures.

use std::time::Duration;

use qgemm_api::{
    Args, Budget, Context, Conversion, ConversionArgs, DType, Error, ExpertArgs, ExpertProblem, Experts, FusedArgs,
    FusedProblem, Gradient, GradientArgs, HalError, HostExperts, HostWeight, Problem, Routing, RoutingArgs,
    RoutingLists, TuneProblem, Weight, XPrecision, quantize,
};

fn host(n: usize) -> HostWeight {
    quantize(&vec![0.5; n * 32], n, 32, "q8_0".parse().expect("a format")).expect("valid").0
}

fn weight(ctx: &Context) -> Weight {
    ctx.load(&host(32)).expect("memory")
}

fn experts(ctx: &Context) -> Experts {
    ctx.load_experts(&HostExperts::new(&[host(32), host(32)]).expect("alike")).expect("memory")
}

/// Pairs of distinct available devices.
fn pairs(test: &str) -> Vec<(Context, Context)> {
    let open = |name: &str| match Context::open(name) {
        Ok(ctx) => Some(ctx),
        Err(why @ (Error::Hal(HalError::NoDevice { .. }) | Error::BackendNotBuilt { .. })) => {
            qgemm_testkit::skipped(&format!("{test} on {name}"), &why.to_string());
            None
        }
        Err(other) => panic!("{name}: {other}"),
    };
    let there: Vec<Context> = ["cpu", "noop", "wgpu:0", "emu:sm80", "emu:sm90"].into_iter().filter_map(open).collect();
    let pair = |own: &Context, other: &Context| (own.clone(), other.clone());
    let all = there.iter().flat_map(|own| there.iter().map(move |other| pair(own, other)));
    all.filter(|(own, other)| own.info().id != other.info().id).collect()
}

/// Asserts that `result` names the operand and both devices.
fn assert_refused<T>(what: &str, operand: &str, result: Result<T, Error>, own: &Context, other: &Context) {
    match result.map(drop) {
        Err(Error::WrongDevice { operand: named, expected, got }) => {
            assert_eq!((named, expected, got), (operand, own.info().id, other.info().id), "{what}");
        }
        wrong => panic!("{what}: {} with a {operand} of {}: {wrong:?}", own.info().id, other.info().id),
    }
}

#[test]
fn weights_of_another_device_are_refused_when_planned() {
    for (own, other) in pairs("weights_of_another_device_are_refused_when_planned") {
        let (weight, experts) = (weight(&other), experts(&other));
        let fused = other.load_fused(&[&host(32), &host(32)]).expect("alike");
        let problem = || Problem::new(&weight, 1);
        let refused = |what, result| assert_refused(what, "weight", result, &own, &other);
        refused("plan", own.plan(&problem()).map(drop));
        refused("plan of no tokens", own.plan(&Problem::new(&weight, 0)).map(drop));
        refused("layer", own.layer(&weight, |problem| problem).map(drop));
        refused("linear", own.linear(&weight, &[1.0; 32], 1, XPrecision::Auto).map(drop));
        refused("fused", own.plan_fused(&FusedProblem::new(&fused, 1, DType::F32)).map(drop));
        refused("candidates", own.candidates(&problem()).map(drop));
        refused("explain", own.explain(&problem()).map(drop));
        refused("prepare", own.prepare(&[problem()]).map(drop));
        refused("experts", own.plan_experts(&ExpertProblem::indexed(&experts, 1, 1)).map(drop));
        refused("every way", own.plan_experts_candidates(&ExpertProblem::indexed(&experts, 1, 1)).map(drop));
        refused("explain experts", own.explain_experts(&ExpertProblem::indexed(&experts, 1, 1)).map(drop));
        refused("moe", own.moe_layer(&experts, &experts, 1, |moe| moe).map(drop));
        let gradient = Gradient::new(1, DType::F32, DType::F32);
        refused("gradient", own.plan_gradient(&weight, &gradient).map(drop));
        refused(
            "gradient of no tokens",
            own.plan_gradient(&weight, &Gradient::new(0, DType::F32, DType::F32)).map(drop),
        );
        refused("gradient through experts", own.plan_gradient(&experts, &gradient).map(drop));
        refused("download", own.download_packed(&weight).map(drop));
        let (weights, all) = ([weight.clone()], [experts.clone()]);
        let tunings =
            [TuneProblem::new(problem(), &weights), TuneProblem::experts(ExpertProblem::indexed(&experts, 1, 1), &all)];
        for tuning in tunings {
            refused("tune", own.tune(&[tuning], Budget::new(Duration::ZERO), |_| ()).map(drop));
        }
    }
}

#[test]
fn what_runs_brings_is_of_the_plans_device() {
    for (own, other) in pairs("what_runs_brings_is_of_the_plans_device") {
        let (at_home, foreign) = (weight(&own), weight(&other));
        let stream = own.default_stream();
        let plan = own.plan(&Problem::new(&at_home, 1)).expect("served");
        let (x, mut d) = (own.allocate(128).expect("memory"), own.allocate(128).expect("memory"));
        let (far_x, mut far_d) = (other.allocate(128).expect("memory"), other.allocate(128).expect("memory"));
        let mut workspace = own.workspace(plan.workspace_bytes()).expect("memory");
        let mut far = other.workspace(plan.workspace_bytes()).expect("memory");
        let refused = |operand: &str, args: Args<'_>| {
            assert_refused("run", operand, plan.run(&stream, args), &own, &other);
        };
        refused("weight", Args::new(&x, &foreign, &mut d).workspace(&mut workspace));
        refused("X", Args::new(&far_x, &at_home, &mut d).workspace(&mut workspace));
        refused("D", Args::new(&x, &at_home, &mut far_d).workspace(&mut workspace));
        // Whether or not the plan needs one.
        refused("workspace", Args::new(&x, &at_home, &mut d).workspace(&mut far));
        let on_far = plan.run(&other.default_stream(), Args::new(&x, &at_home, &mut d).workspace(&mut workspace));
        assert_refused("run", "stream", on_far, &own, &other);

        let fused = own.load_fused(&[&host(32), &host(32)]).expect("alike");
        let plan = own.plan_fused(&FusedProblem::new(&fused, 1, DType::F32)).expect("served");
        let far_fused = other.load_fused(&[&host(32), &host(32)]).expect("alike");
        let (mut second, mut scratch) =
            (own.allocate(128).expect("memory"), own.workspace(plan.workspace_bytes()).expect("memory"));
        let outputs = &mut [(&mut d).into(), (&mut second).into()];
        let args = FusedArgs::new(&x, &far_fused, outputs, &mut scratch);
        assert_refused("fused", "weight", plan.run(&stream, args), &own, &other);

        let (at_home, foreign) = (experts(&own), experts(&other));
        let plan = own.plan_experts(&ExpertProblem::indexed(&at_home, 1, 1).unchecked()).expect("served");
        let mut workspace = own.workspace(plan.workspace_bytes()).expect("memory");
        let args = ExpertArgs::new(&x, &foreign, &x, &mut d).workspace(&mut workspace);
        assert_refused("experts", "weight", plan.run(&stream, args), &own, &other);
        let plan = own.plan_gradient(&at_home, &Gradient::new(1, DType::F32, DType::F32)).expect("served");
        let mut workspace = own.workspace(plan.workspace_bytes()).expect("memory");
        let args = GradientArgs::new(&x, &foreign, &mut d).offsets(&x).workspace(&mut workspace);
        assert_refused("gradient", "weight", plan.run(&stream, args), &own, &other);

        let plan = own.plan_conversion(&Conversion::new(1, 1, DType::F32, DType::F32)).expect("served");
        assert_refused("convert", "D", plan.run(&stream, ConversionArgs::new(&x, &mut far_d)), &own, &other);
        let plan = own.plan_routing(&Routing::from_ids(0, 2, 1)).expect("valid");
        let (mut counts, mut rows) = (own.allocate(16).expect("memory"), own.allocate(16).expect("memory"));
        let lists =
            RoutingLists { offsets: (&mut far_d).into(), counts: (&mut counts).into(), rows: (&mut rows).into() };
        let args = RoutingArgs::of_ids(&x, lists, &mut d);
        assert_refused("routing of no tokens", "offsets", plan.run(&stream, args), &own, &other);
    }
}

#[test]
fn contexts_of_one_device_take_each_others_weights() {
    for name in ["cpu", "noop", "wgpu:0", "emu:sm80"] {
        let (Ok(one), Ok(other)) = (Context::open(name), Context::open(name)) else { continue };
        let weight = weight(&one);
        let y = other.linear(&weight, &[1.0; 32], 1, XPrecision::Exact).unwrap_or_else(|e| panic!("{name}: {e}"));
        assert!(name == "noop" || y.iter().all(|y| (y - 16.0).abs() < 0.1), "{name}: {y:?}");
    }
}

#[test]
fn a_tuning_refuses_weights_of_another_shape_before_it_measures() {
    for name in ["cpu", "noop", "wgpu:0", "emu:sm80"] {
        let Ok(ctx) = Context::open(name) else { continue };
        let (weights, others) = ([weight(&ctx)], [ctx.load(&host(64)).expect("memory")]);
        let problem = || Problem::new(&weights[0], 1);
        // There is no time for a launch, so the check must come first.
        let budget = || Budget::new(Duration::ZERO);
        let refused =
            ctx.tune(&[TuneProblem::new(problem(), &weights), TuneProblem::new(problem(), &others)], budget(), |_| ());
        assert!(matches!(refused, Err(Error::WrongWeight { .. })), "{name}: {refused:?}");
        let one = [experts(&ctx)];
        let three =
            [ctx.load_experts(&HostExperts::new(&[host(32), host(32), host(32)]).expect("alike")).expect("memory")];
        let refused =
            ctx.tune(&[TuneProblem::experts(ExpertProblem::indexed(&one[0], 1, 1), &three)], budget(), |_| ());
        assert!(matches!(refused, Err(Error::WrongWeight { .. })), "{name}: {refused:?}");
        assert!(ctx.tune(&[TuneProblem::new(problem(), &weights)], budget(), |_| ()).is_ok(), "{name}");
    }
}
