//! Routing of a million tokens, with identical lists for
//! any number of threads.

use std::sync::Arc;

use qgemm_api::{Context, DType, Routing, RoutingArgs, RoutingLists};
use qgemm_cpu::CpuDevice;
use qgemm_testkit::{RoutingCase, Verdict, run_routing};

#[test]
fn a_million_tokens_are_routed() {
    let ctx = Context::open("cpu").expect("always there");
    for case in [RoutingCase::new(1 << 20, 8, 2), RoutingCase::of_ids(1 << 20, 64, 2)] {
        let outcome = run_routing(&ctx, &case);
        assert_eq!(outcome.verdict, Verdict::Pass, "{case}");
    }
}

#[test]
fn the_number_of_threads_changes_no_bit() {
    let (tokens, experts, top_k) = (3001, 48, 6);
    let values: Vec<f32> = (0..tokens * experts).map(|i| ((i * 2_654_435_761) % 1009) as f32 * 0.01).collect();
    let written = |threads: usize| -> [Vec<u8>; 6] {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a pool");
        let ctx = Context::from_device(Arc::new(CpuDevice::new().with_pool(Arc::new(pool))));
        let routing = Routing::from_logits(tokens, experts, top_k, DType::F32).renormalized().groups(8, 3).lists();
        let plan = ctx.plan_routing(&routing).expect("valid");
        let logits = ctx.upload(&DType::F32.encode(&values)).expect("memory");
        let words = |count: usize| ctx.allocate(4 * count).expect("memory");
        let slots = tokens * top_k;
        let (mut ids, mut weights, mut rows) = (words(slots), words(slots), words(slots));
        let (mut offsets, mut counts, mut status) = (words(experts + 1), words(experts), words(4));
        let lists =
            RoutingLists { offsets: (&mut offsets).into(), counts: (&mut counts).into(), rows: (&mut rows).into() };
        let args = RoutingArgs::of_logits(&logits, &mut ids, &mut weights, &mut status);
        plan.run(&ctx.default_stream(), args.lists(lists)).expect("runs");
        [&ids, &weights, &rows, &offsets, &counts, &status].map(|buffer| ctx.download(buffer).expect("host memory"))
    };
    let one = written(1);
    assert!([2, 3, 7].into_iter().all(|threads| written(threads) == one));
}
