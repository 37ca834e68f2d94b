//! Plan records, tuning within a budget, and ahead-of-time kernels.

use std::time::Duration;

use qgemm_api::tuning::TunedTable;
use qgemm_api::{
    Args, Attention, Budget, Context, Conversion, ConversionArgs, DType, Error, ExpertProblem, Experts, HostExperts,
    Keys, Matmul, Norm, NormFunction, PlanRecord, PrepareLimits, Problem, Quantization, Queries, Routing, TuneProblem,
    Weight, quantize, read_tuned,
};

const N: usize = 64;
const K: usize = 256;

fn weight(ctx: &Context) -> Weight {
    let values: Vec<f32> = (0..N * K).map(|i| (i % 13) as f32 - 6.0).collect();
    let (host, _) = quantize(&values, N, K, "q4_k".parse().expect("a format")).expect("K suits");
    ctx.load(&host).expect("memory")
}

fn problem(weight: &Weight, m: usize) -> Problem {
    Problem::new(weight, m).x_dtype(DType::F16)
}

#[test]
fn a_record_says_what_a_plan_runs() {
    let ctx = Context::open("cpu").expect("always there");
    let w = weight(&ctx);
    let plan = ctx.plan(&problem(&w, 7)).expect("served");
    let record = plan.record().expect("planned");
    assert_eq!(record.kernel_id, plan.kernel_id().map(|id| id.to_string()));
    assert_eq!(record.source_hash, plan.source_hash().map(|hash| format!("{hash:016x}")));
    assert_eq!(record.workspace_bytes, plan.workspace_bytes());
    assert_eq!(record.launches.len(), plan.sequence().expect("it launches").steps().len());
    let chosen = record.chosen().expect("one is");
    assert!((chosen.seconds - plan.launch().expect("it launches").estimate).abs() < 1e-12);
    assert_eq!(record.roof.bytes, plan.bytes());
    // The same without ready kernels, for a described weight.
    let described = ctx.describe_weight(w.format(), N, K).expect("K suits");
    assert_eq!(described.bytes(), w.bytes());
    let explained = ctx.explain(&described.problem(7).x_dtype(DType::F16)).expect("valid");
    let mut before = record.clone();
    before.launches.clear();
    assert_eq!(explained, before);
    let json = serde_json::to_string(&record).expect("JSON");
    assert_eq!(serde_json::from_str::<PlanRecord>(&json).expect("as written"), record);

    let candidates = ctx.candidates(&problem(&w, 7)).expect("served");
    let last = ctx.plan_candidate(candidates.last().expect("there are some")).expect("it is ready");
    let by_caller = last.record().expect("planned");
    assert_eq!(by_caller.kernel_id, last.kernel_id().map(|id| id.to_string()));
    assert!(candidates.len() == by_caller.candidates.len() && by_caller.why.contains("caller"), "{}", by_caller.why);

    let nothing = ctx.plan(&problem(&w, 0)).expect("valid").record().expect("planned");
    assert!(nothing.kernel_id.is_none() && nothing.why.contains("no tokens"));
}

#[test]
fn other_operations_have_records() {
    let ctx = Context::open("cpu").expect("always there");
    let conversion = Conversion::new(8, 64, DType::F32, DType::F16);
    let record = ctx.explain_conversion(&conversion).expect("valid");
    let plan = ctx.plan_conversion(&conversion).expect("served");
    assert_eq!(record.kernel_id, plan.kernel_id().map(|id| id.to_string()));
    let routing = Routing::from_logits(16, 32, 4, DType::F32);
    let record = ctx.explain_routing(&routing).expect("valid");
    let plan = ctx.plan_routing(&routing).expect("served");
    assert_eq!(record.workspace_bytes, plan.workspace_bytes());
    let described = ctx.describe_weight("q4_0".parse().expect("a format"), N, K).expect("K suits");
    let experts = described.gated().expect("small").experts(8).expect("some").indexed(4, 2);
    let problem = experts.each(|each| each.x_dtype(DType::F16).activation(qgemm_api::Activation::Silu));
    let record = ctx.explain_experts(&problem).expect("valid");
    let plan = ctx.plan_experts(&problem).expect("served");
    assert_eq!(record.kernel_id, plan.kernel_id().map(|id| id.to_string()));
}

#[test]
fn operations_without_a_weight_have_records() {
    // A chip with several candidates: matrix instructions and
    // FMA, whole and split-K.
    let ctx = match Context::open("emu:sm80") {
        Ok(ctx) => ctx,
        Err(why) => return qgemm_testkit::skipped("operations_without_a_weight_have_records", &why.to_string()),
    };
    let product = Matmul::new([64, 64, 4096], DType::F16, DType::F16, DType::F32);
    let record = ctx.explain_matmul(&product).expect("valid");
    assert!(record.candidates.len() > 2 && record.candidates.iter().any(|c| c.cut.contains("parts")), "{record}");
    let (queries, keys) = (Queries::each(1, 1), Keys::each(8192));
    let attention = Attention::new(DType::F16, 8, 2, 128, queries, keys);
    let record = ctx.explain_attention(&attention).expect("valid");
    assert!(record.chosen().is_some_and(|chosen| chosen.cut.contains("parts of")), "{record}");
    assert!(record.workspace_bytes > 0 && record.roof.bytes > 2.0 * 8192.0 * 2.0 * 128.0 * 2.0);
    let norm = Norm::new(8, 4096, DType::F16, NormFunction::rms(1e-6));
    let record = ctx.explain_norm(&norm).expect("valid");
    assert!(record.kernel_id.is_some_and(|id| id.starts_with("norm:")));
    let format = "e4m3_1x128".parse().expect("a format");
    let record = ctx.explain_quantization(&Quantization::new(8, 4096, DType::F16, format)).expect("valid");
    assert!(record.kernel_id.is_some_and(|id| id.starts_with("quantize:")));
}

#[test]
fn descriptions_that_cannot_be_are_refused() {
    let ctx = Context::open("noop").expect("always there");
    let q4_k = "q4_k".parse().expect("a format");
    assert!(matches!(ctx.describe_weight(q4_k, 8, 100), Err(Error::Format(_))));
    assert!(matches!(ctx.describe_weight(q4_k, 0, 256), Err(Error::OutOfRange { name: "N", .. })));
    assert!(matches!(ctx.describe_weight(q4_k, usize::MAX, 256), Err(Error::DimensionTooLarge { .. })));
    let large = ctx.describe_weight(q4_k, 1 << 31, 256).expect("it fits");
    assert!(large.gated().is_err() && large.experts(2).is_err() && large.experts(0).is_err());
}

#[test]
fn tuning_stops_with_its_budget_and_is_followed() {
    let ctx = Context::open("cpu").expect("always there");
    let weights = [weight(&ctx)];
    let problems = || [TuneProblem::new(problem(&weights[0], 8), &weights)];
    let none = ctx.tune(&problems(), Budget::new(Duration::ZERO), |_| ()).expect("nothing fails");
    assert!(none.tunings.is_empty() && none.table.is_empty());

    let mut told = Vec::new();
    let outcome =
        ctx.tune(&problems(), Budget::new(Duration::from_secs(5)), |share| told.push(share)).expect("it runs");
    let [tuning] = &outcome.tunings[..] else { panic!("{outcome:?}") };
    assert!(told == [1.0] && tuning.complete && tuning.measured > 0, "{tuning:?}");
    assert!(tuning.seconds > 0.0 && tuning.seconds <= tuning.first_seconds);
    let table = TunedTable::from_json(&outcome.table.to_json().expect("finite")).expect("as written");
    let plan = ctx.clone().with_tuned(table).plan(&problem(&weights[0], 8)).expect("served");
    assert_eq!(plan.kernel_id().map(|id| id.to_string()).as_ref(), Some(&tuning.kernel_id));
    let record = plan.record().expect("planned");
    let measured = record.chosen().and_then(|chosen| chosen.measured_seconds).expect("it was");
    assert!((measured - tuning.seconds).abs() < 1e-12 && record.why.starts_with("measured"));

    let no_weight = [TuneProblem::new(problem(&weights[0], 8), &[])];
    let refused = ctx.tune(&no_weight, Budget::new(Duration::from_secs(1)), |_| ());
    assert!(matches!(refused, Err(Error::MissingOperand { operand: "weight", .. })));
}

/// Experts and matmul are tuned like gemm; measurements are
/// followed and explained.
#[test]
fn experts_and_matmul_are_tuned_and_explained() {
    for device in ["cpu", "wgpu:0", "emu:sm80"] {
        match Context::open(device) {
            Ok(ctx) => experts_and_matmul_are_tuned_on(ctx),
            Err(why) => {
                qgemm_testkit::skipped("experts_and_matmul_are_tuned_and_explained", &format!("on {device}: {why}"));
            }
        }
    }
}

fn experts_and_matmul_are_tuned_on(ctx: Context) {
    let (host, _) = quantize(&vec![0.5; 64 * 64], 64, 64, "q8_0".parse().expect("a format")).expect("K suits");
    let experts = [ctx.load_experts(&HostExperts::new(&vec![host; 4]).expect("alike")).expect("memory")];
    let of_experts = || ExpertProblem::indexed(&experts[0], 8, 2).each(|each| each.x_dtype(DType::F32));
    let matmul = Matmul::new([64, 64, 64], DType::F32, DType::F32, DType::F32);
    let problems = [TuneProblem::experts(of_experts(), &experts), TuneProblem::Matmul(matmul.clone())];
    let outcome = ctx.tune(&problems, Budget::new(Duration::from_secs(20)), |_| ()).expect("it runs");
    assert!(outcome.tunings.len() == 2 && outcome.table.len() >= 2, "{outcome:?}");
    let text = outcome.table.to_json().expect("finite");
    let tuned = ctx.with_tuned(TunedTable::from_json(&text).expect("as written"));
    let records = [tuned.explain_experts(&of_experts()).expect("valid"), tuned.explain_matmul(&matmul).expect("valid")];
    for (record, tuning) in records.iter().zip(&outcome.tunings) {
        assert_eq!(record.kernel_id.as_ref(), Some(&tuning.kernel_id));
        let measured = record.chosen().and_then(|chosen| chosen.measured_seconds).expect("it was");
        assert!((measured - tuning.seconds).abs() < 1e-12 && record.why.starts_with("measured"), "{}", record.why);
    }
    let none: &[Experts] = &[];
    let refused = tuned.tune(&[TuneProblem::experts(of_experts(), none)], Budget::new(Duration::from_secs(1)), |_| ());
    assert!(matches!(refused, Err(Error::MissingOperand { operand: "weight", .. })));
}

#[test]
fn profiles_have_both_shares() {
    let ctx = Context::open("cpu").expect("always there");
    let weight = weight(&ctx);
    let plan = ctx.plan(&problem(&weight, 8)).expect("served");
    let convert = ctx.plan_conversion(&Conversion::new(8, K, DType::F32, DType::F16)).expect("served");
    let x = ctx.upload(&vec![1.0f32; 8 * K]).expect("memory");
    let (mut x16, mut d) = (ctx.allocate(8 * K * 2).expect("memory"), ctx.allocate(8 * N * 4).expect("memory"));
    let mut workspace = ctx.workspace(plan.workspace_bytes()).expect("memory");
    let stream = ctx.default_stream();
    let (_, profile) = ctx
        .profile(|| {
            convert.run(&stream, ConversionArgs::new(&x, &mut x16)).expect("all given");
            plan.run(&stream, Args::new(&x16, &weight, &mut d).workspace(&mut workspace)).expect("all given");
        })
        .expect("it runs");
    let [moved, multiplied] = &profile.runs[..] else { panic!("{profile}") };
    assert!(moved.math.is_none() && moved.arithmetic_share.is_none() && moved.bandwidth_share >= 0.0);
    let math = plan.launch().expect("not empty").config.math;
    assert_eq!(multiplied.math.as_deref(), Some(math.name()));
    let rate = ctx.info().rate(math).expect("it is known");
    let expected = multiplied.operations_per_second / (2.0 * rate);
    assert!((multiplied.arithmetic_share.expect("known") - expected).abs() <= 1e-9 * expected.max(1.0));
    assert!(profile.to_string().contains("of math") && profile.chrome_trace().contains("arithmetic_share"));
}

#[test]
fn tables_are_read_where_they_are() {
    let folder = tempfile::tempdir().expect("writable");
    let path = folder.path().join("tuned.json");
    assert!(matches!(read_tuned(&path), Ok(None)));
    std::fs::write(&path, "{").expect("writable");
    assert!(matches!(read_tuned(&path), Err(Error::Tuned(_))));
    std::fs::write(&path, TunedTable::new().to_json().expect("finite")).expect("writable");
    assert_eq!(read_tuned(&path).expect("readable"), Some(TunedTable::new()));
    assert!(matches!(read_tuned(folder.path()), Err(Error::Io { .. })));
}

#[test]
fn what_was_prepared_is_planned() {
    let ctx = Context::open("cpu").expect("always there");
    let w = weight(&ctx);
    let problems: Vec<Problem> = (1..20).map(|m| problem(&w, m)).collect();
    assert_eq!(ctx.prepare(&problems).expect("all are served"), problems.len());
    assert_eq!(ctx.prepare(&[]).expect("nothing to do"), 0);
    let no_time = {
        let limits = PrepareLimits::default().time(Duration::ZERO);
        ctx.prepare_within(&problems, limits, |_| panic!("nothing is begun")).expect("nothing fails")
    };
    let mut told = Vec::new();
    let one_by_one = PrepareLimits::default().memory(1);
    let all = ctx.prepare_within(&problems, one_by_one, |done| told.push(done)).expect("served");
    assert!(all == problems.len() && told == (1..=all).collect::<Vec<_>>(), "{told:?}");
    assert_eq!(no_time, 0);
    let wrong = [problem(&w, 1), problem(&w, 2).family("nonesuch"), problem(&w, 3)];
    let error = ctx.prepare(&wrong).expect_err("no such family").to_string();
    assert!(error.contains("nonesuch"), "{error}");
}
