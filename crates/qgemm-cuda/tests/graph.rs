//! Plans in CUDA graphs: captured once, a replay computes with
//! the current contents of X.

use qgemm_api::{
    Args, Buffer, BufferMut, Context, DType, Error, HalError, HostExperts, MoeArgs, Problem, XPrecision, cuda, quantize,
};

/// Shapes and weights with different plans: without a workspace,
/// and with counters that every replay must reset to zero.
const CASES: [(usize, usize, usize, &str); 3] =
    [(1, 512, 1024, "q4_0"), (24, 1000, 4096, "q4_k"), (200, 4096, 4096, "int4_g128")];

fn values(seed: usize, count: usize) -> Vec<f32> {
    (0..count).map(|i| ((i * 7919 + seed * 104_729) % 1999) as f32 / 999.5 - 1.0).collect()
}

fn device(test: &str) -> Option<Context> {
    match Context::open("cuda:0") {
        Ok(ctx) => Some(ctx),
        Err(Error::Hal(why @ HalError::NoDevice { .. })) => {
            qgemm_testkit::skipped(test, &why.to_string());
            None
        }
        Err(other) => panic!("{other}"),
    }
}

#[test]
fn a_captured_plan_computes_from_what_x_holds_now() {
    let Some(ctx) = device("a_captured_plan_computes_from_what_x_holds_now") else { return };
    let with_workspace = CASES.map(|case| replay(&ctx, case)).into_iter().filter(|&bytes| bytes > 0).count();
    assert!(with_workspace > 0, "no plan has counters");
}

/// `capture_with`: the graph owns the buffers that
/// change between replays.
#[test]
fn a_graph_lends_its_buffers_between_replays() {
    let Some(ctx) = device("a_graph_lends_its_buffers_between_replays") else { return };
    let (m, n, k) = (3, 64, 256);
    let (host, _) = quantize(&values(1, n * k), n, k, "q8_0".parse().unwrap()).unwrap();
    let weight = ctx.load(&host).unwrap();
    let plan = ctx.plan(&Problem::new(&weight, m).x_dtype(DType::F32).x_precision(XPrecision::Exact)).unwrap();
    let mut workspace = ctx.workspace(plan.workspace_bytes()).unwrap();
    let stream = ctx.new_stream().unwrap();
    let mut buffers = [ctx.allocate(m * k * 4).unwrap(), ctx.allocate(m * n * 4).unwrap()];
    // The first launch of a kernel may load it,
    // which a capture forbids.
    let [x, d] = &mut buffers;
    plan.run(&stream, Args::new(&*x, &weight, d).workspace(&mut workspace)).unwrap();
    ctx.synchronize(&stream).unwrap();
    let mut graph = cuda::capture_with(&**ctx.device(), &stream, buffers, |[x, d]| {
        plan.run(&stream, Args::new(x.view(), &weight, d).workspace(&mut workspace))
    })
    .unwrap();
    for seed in [2, 3] {
        let activations = values(seed, m * k);
        let [x, _] = graph.buffers_mut();
        ctx.upload_on(&stream, &activations, x).unwrap();
        graph.replay(&stream).unwrap();
        let [_, d] = graph.buffers();
        let got: Vec<f32> = ctx.download_on(&stream, d).unwrap();
        let expected = ctx.linear(&weight, &activations, m, XPrecision::Exact).unwrap();
        assert_eq!(got, expected, "X number {seed}");
    }
}

/// Operands by address, as in an engine with its
/// own device pointers.
#[test]
fn a_plan_runs_on_addresses() {
    let Some(ctx) = device("a_plan_runs_on_addresses") else { return };
    let (m, n, k) = (5, 64, 256);
    let (host, _) = quantize(&values(1, n * k), n, k, "q8_0".parse().unwrap()).unwrap();
    let weight = ctx.load(&host).unwrap();
    let plan = ctx.plan(&Problem::new(&weight, m).x_precision(XPrecision::Exact)).unwrap();
    let mut workspace = ctx.workspace(plan.workspace_bytes()).unwrap();
    let activations = values(2, m * k);
    // X and D are parts of one arena, D after X.
    let arena = ctx.upload(&[&activations[..], &vec![f32::NAN; m * n]].concat()).unwrap();
    let device = &**ctx.device();
    let address = cuda::device_address(device, arena.view()).unwrap();
    let space = cuda::AddressSpace::new(device).unwrap();
    // SAFETY: both are parts of the arena, which outlives the run,
    // and nothing else uses it meanwhile.
    let (x, d) = unsafe { (space.view(address, m * k * 4), space.view_mut(address + (m * k * 4) as u64, m * n * 4)) };
    plan.run(&ctx.default_stream(), Args::new(x, &weight, d).workspace(&mut workspace)).unwrap();
    let got: Vec<f32> = ctx.download(&arena).unwrap();
    assert_eq!(got[..m * k], activations, "X stays as it is");
    assert_eq!(got[m * k..], ctx.linear(&weight, &activations, m, XPrecision::Exact).unwrap());
}

/// Other devices have neither addresses nor graphs.
#[test]
fn only_cuda_devices_have_addresses_and_graphs() {
    let ctx = Context::open("cpu").unwrap();
    let device = &**ctx.device();
    assert!(matches!(cuda::AddressSpace::new(device), Err(HalError::WrongDevice { .. })));
    let nothing = |_: [BufferMut<'_>; 0]| Ok::<(), HalError>(());
    let captured = cuda::capture_with(device, &ctx.default_stream(), [], nothing);
    assert!(matches!(captured, Err(HalError::WrongDevice { .. })));
}

/// Captures and replays one plan. Returns the
/// bytes of its workspace.
fn replay(ctx: &Context, (m, n, k, format): (usize, usize, usize, &str)) -> usize {
    let (host, _) = quantize(&values(1, n * k), n, k, format.parse().unwrap()).unwrap();
    let weight = ctx.load(&host).unwrap();
    let plan = ctx.plan(&Problem::new(&weight, m).x_dtype(DType::F16).d_dtype(DType::F32)).unwrap();
    let mut workspace = ctx.workspace(plan.workspace_bytes()).unwrap();
    let mut x = ctx.allocate(m * k * 2).unwrap();
    let mut d = ctx.allocate(m * n * 4).unwrap();
    let (x_address, d_address) =
        [&x, &d].map(|b| qgemm_cuda::device_address(&**ctx.device(), b.into()).unwrap()).into();
    // SAFETY: the views are of `x` and `d`, which outlive the graph;
    // the graph is replayed only between the copies to `x` and from
    // `d`, each of which has ended when the next begins.
    let (x_view, mut d_view) = unsafe {
        (
            cuda::wrap_device_ptr(&**ctx.device(), x_address, x.len()).unwrap(),
            cuda::wrap_device_ptr(&**ctx.device(), d_address, d.len()).unwrap(),
        )
    };
    let stream = ctx.new_stream().unwrap();
    // The first launch of a kernel may load it,
    // which a capture forbids.
    let mut launch = || plan.run(&stream, Args::new(&x_view, &weight, &mut d_view).workspace(&mut workspace));
    launch().unwrap();
    ctx.synchronize(&stream).unwrap();
    let graph = cuda::capture(&**ctx.device(), &stream, launch).unwrap();

    for seed in [2, 3] {
        let activations = DType::F16.encode(&values(seed, m * k));
        ctx.upload_into(&activations, &mut x).unwrap();
        ctx.upload_into(&DType::F32.encode(&vec![f32::NAN; m * n]), &mut d).unwrap();
        graph.replay(&stream).unwrap();
        ctx.synchronize(&stream).unwrap();
        let got = DType::F32.decode(&ctx.download(&d).unwrap());
        let rounded = DType::F16.decode(&activations);
        let (mut error, mut size) = (0.0, 0.0);
        for feature in 0..n {
            let w = host.dequantize_row(feature);
            for token in 0..m {
                let x = &rounded[token * k..][..k];
                let expected: f64 = x.iter().zip(&w).map(|(&x, &w)| f64::from(x) * f64::from(w)).sum();
                error += (f64::from(got[token * n + feature]) - expected).powi(2);
                size += expected.powi(2);
            }
        }
        // A NaN error fails this comparison.
        assert!(error < 2e-5 * size, "{format} {m}x{n}x{k}, X number {seed}: NMSE {:e}", error / size);
    }
    plan.workspace_bytes()
}

/// View of a buffer that stays writable while a
/// graph uses the view.
///
/// # Safety
/// As for `cuda::wrap_device_ptr`.
unsafe fn wrapped(ctx: &Context, buffer: &Buffer) -> Buffer {
    let address = qgemm_cuda::device_address(&**ctx.device(), buffer.into()).unwrap();
    // SAFETY: the caller's promise.
    unsafe { cuda::wrap_device_ptr(&**ctx.device(), address, buffer.len()).unwrap() }
}

/// Kernels of each replay read the ids, given or routed.
/// The host does not take part in routing.
#[test]
fn a_captured_layer_of_experts_follows_the_ids_of_the_moment() {
    const EXPERTS: usize = 6;
    const TOP_K: usize = 2;
    const SIZE: usize = 256;
    let ctx = match Context::open("cuda:0") {
        Ok(ctx) => ctx,
        Err(Error::Hal(why @ HalError::NoDevice { .. })) => {
            let test = "a_captured_layer_of_experts_follows_the_ids_of_the_moment";
            return qgemm_testkit::skipped(test, &why.to_string());
        }
        Err(other) => panic!("{other}"),
    };
    let one = |seed| quantize(&values(seed, SIZE * SIZE), SIZE, SIZE, "int4_g128".parse().unwrap()).unwrap().0;
    let all = |first: usize| (0..EXPERTS).map(|e| one(first + e)).collect::<Vec<_>>();
    let (up, down) = (
        ctx.load_experts(&HostExperts::new(&all(1)).unwrap()).unwrap(),
        ctx.load_experts(&HostExperts::new(&all(20)).unwrap()).unwrap(),
    );
    let layer = ctx
        .moe_layer(&up, &down, TOP_K, |moe| {
            let moe = moe.x_dtype(DType::F16).x_precision(XPrecision::F16);
            moe.routed(DType::F32, |routing| routing.renormalized())
        })
        .unwrap();
    let stream = ctx.new_stream().unwrap();
    for tokens in [3, 40] {
        let mut workspace = layer.workspace(64).unwrap();
        let x = ctx.upload(&DType::F16.encode(&values(2, tokens * SIZE))).unwrap();
        let mut logits = ctx.upload(&values(3, tokens * EXPERTS)).unwrap();
        let mut d = ctx.allocate(tokens * SIZE * 4).unwrap();
        // SAFETY: the views are of buffers that outlive the graph, which
        // is replayed only between the copies to the logits and from `d`,
        // each of which has ended when the next begins.
        let (logits_view, mut d_view) = unsafe { (wrapped(&ctx, &logits), wrapped(&ctx, &d)) };
        let mut launch =
            || layer.run(&stream, tokens, MoeArgs::from_logits(&x, &logits_view, &mut d_view), &mut workspace);
        launch().unwrap();
        ctx.synchronize(&stream).unwrap();
        let graph = cuda::capture(&**ctx.device(), &stream, launch).unwrap();
        let mut results = Vec::new();
        for seed in [4, 5, 6] {
            let now = values(seed, tokens * EXPERTS);
            ctx.upload_into(&now, &mut logits).unwrap();
            ctx.upload_into(&vec![f32::NAN; tokens * SIZE], &mut d).unwrap();
            graph.replay(&stream).unwrap();
            ctx.synchronize(&stream).unwrap();
            let replayed: Vec<f32> = ctx.download(&d).unwrap();
            // Launched without a graph, with the same logits.
            let mut workspace = layer.workspace(64).unwrap();
            let (fresh, mut other) = (ctx.upload(&now).unwrap(), ctx.allocate(tokens * SIZE * 4).unwrap());
            layer.run(&stream, tokens, MoeArgs::from_logits(&x, &fresh, &mut other), &mut workspace).unwrap();
            ctx.synchronize(&stream).unwrap();
            assert_eq!(replayed, ctx.download::<f32>(&other).unwrap(), "{tokens} tokens, logits number {seed}");
            results.push(replayed);
        }
        assert!(results[0] != results[1] && results[1] != results[2], "other logits go elsewhere");
    }
}
