//! MoE layers against an f64 computation, on every available backend.

use qgemm_api::{
    BufferRef, Context, DType, DeviceKind, Error, ExpertArgs, ExpertProblem, Experts, HalError, HostExperts,
    HostWeight, MoeArgs, MoeLayer, Quantization, Routing, XFormat, XPrecision, quantize,
};

const DEVICES: [&str; 7] = ["cpu", "wgpu:0", "cuda:0", "emu:sm70", "emu:sm80", "emu:sm90", "emu:sm120"];
const EXPERTS: usize = 5;
const TOP_K: usize = 2;
const HIDDEN: usize = 96;
const INNER: usize = 64;
/// Unsorted, and most of them below their plan's maximum.
const TOKENS: [usize; 6] = [1, 21, 4, 5, 17, 7];

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

/// `count` pseudo-random values in −1..1.
fn values(seed: usize, count: usize) -> Vec<f32> {
    (0..count).map(|i| ((i * 7919 + seed * 104_729) % 1999) as f32 / 999.5 - 1.0).collect()
}

fn weight(seed: usize, n: usize, k: usize) -> HostWeight {
    let scaled: Vec<f32> = values(seed, n * k).iter().map(|v| v * 0.2).collect();
    quantize(&scaled, n, k, "q8_0".parse().expect("a format")).expect("K suits").0
}

/// Weights of a layer, packed and as numbers.
struct Layer {
    gates: Vec<HostWeight>,
    ups: Vec<HostWeight>,
    downs: Vec<HostWeight>,
}

impl Layer {
    fn new(experts: usize) -> Self {
        let all = |first: usize, n, k| (0..experts).map(|e| weight(first + e, n, k)).collect();
        Self { gates: all(10, INNER, HIDDEN), ups: all(30, INNER, HIDDEN), downs: all(50, HIDDEN, INNER) }
    }

    fn load(&self, ctx: &Context) -> (Experts, Experts) {
        let pairs: Vec<_> = self.gates.iter().cloned().zip(self.ups.iter().cloned()).collect();
        let up = ctx.load_experts(&HostExperts::gated(&pairs).expect("pairs")).expect("memory");
        (up, ctx.load_experts(&HostExperts::new(&self.downs).expect("alike")).expect("memory"))
    }

    /// Output of expert `e` for a row.
    fn expert(&self, e: usize, x: &[f32]) -> Vec<f64> {
        let (gate, up) = (product(&self.gates[e], x), product(&self.ups[e], x));
        let hidden: Vec<f32> =
            gate.iter().zip(&up).map(|(gate, up)| (gate / (1.0 + (-gate).exp()) * up) as f32).collect();
        product(&self.downs[e], &hidden)
    }
}

fn product(weight: &HostWeight, x: &[f32]) -> Vec<f64> {
    let rows = weight.dequantize().expect("finite");
    rows.chunks_exact(weight.k())
        .map(|row| row.iter().zip(x).map(|(w, x)| f64::from(*w) * f64::from(*x)).sum())
        .collect()
}

/// Ids and renormalized softmax weights of a token.
fn routed(logits: &[f32]) -> Vec<(usize, f64)> {
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]).then(a.cmp(&b)));
    let chosen = &order[..TOP_K];
    let sum: f64 = chosen.iter().map(|&e| f64::from(logits[e]).exp()).sum();
    chosen.iter().map(|&e| (e, f64::from(logits[e]).exp() / sum)).collect()
}

fn expected(layer: &Layer, x: &[f32], of_token: impl Fn(usize) -> Vec<(usize, f64)>) -> Vec<f64> {
    let rows = x.chunks_exact(HIDDEN).enumerate();
    rows.flat_map(|(token, row)| {
        let mut sum = vec![0.0; HIDDEN];
        for (expert, weight) in of_token(token) {
            sum.iter_mut().zip(layer.expert(expert, row)).for_each(|(sum, v)| *sum += weight * v);
        }
        sum
    })
    .collect()
}

/// Relative error by energy.
fn nmse(got: &[f32], expected: &[f64]) -> f64 {
    let error: f64 = got.iter().zip(expected).map(|(got, e)| (f64::from(*got) - e).powi(2)).sum();
    error / expected.iter().map(|e| e * e).sum::<f64>()
}

const LIMIT: f64 = 1e-9;

fn simple(ctx: &Context, layer: &Layer) -> MoeLayer {
    let (up, down) = layer.load(ctx);
    ctx.moe_layer(&up, &down, TOP_K, |moe| {
        moe.x_precision(XPrecision::Exact).routed(DType::F32, |routing| routing.renormalized())
    })
    .expect("valid")
}

#[test]
fn a_layer_from_logits_is_the_sum_of_its_experts() -> Result<(), Error> {
    let host = Layer::new(EXPERTS);
    for ctx in devices("a_layer_from_logits_is_the_sum_of_its_experts") {
        let (id, layer) = (ctx.info().id, simple(&ctx, &host));
        let mut workspace = layer.workspace(*TOKENS.iter().max().expect("some"))?;
        for tokens in TOKENS {
            let (x, logits) = (values(1, tokens * HIDDEN), values(2, tokens * EXPERTS));
            let wanted = expected(&host, &x, |t| routed(&logits[t * EXPERTS..(t + 1) * EXPERTS]));
            let (x, logits) = (ctx.upload(&x)?, ctx.upload(&logits)?);
            let mut d = ctx.upload(&vec![f32::NAN; tokens * HIDDEN])?;
            let stream = ctx.default_stream();
            let run = || layer.run(&stream, tokens, MoeArgs::from_logits(&x, &logits, &mut d), &mut workspace);
            let (done, profile) = ctx.profile(run)?;
            done?;
            layer.check_status(&workspace)?;
            let got: Vec<f32> = ctx.download(&d)?;
            let error = nmse(&got, &wanted);
            assert!(error < LIMIT, "{id}, {tokens} tokens: {error:e}");
            let plan = layer.plan(tokens)?;
            let launched: usize = profile.runs.iter().map(|run| run.steps.len()).sum();
            assert_eq!(plan.launches(), launched, "{id}");
            let routing = plan.routing().map_or(0, |routing| routing.sequence().expect("it launches").steps().len());
            assert!(launched - routing <= 4, "{id}: {launched} launches");
        }
    }
    Ok(())
}

#[test]
fn what_was_not_prepared_is_refused_and_not_planned() -> Result<(), Error> {
    let ctx = Context::open("noop")?;
    let (layer, other) = (simple(&ctx, &Layer::new(EXPERTS)), simple(&ctx, &Layer::new(EXPERTS)));
    let mut workspace = layer.workspace(7)?;
    assert_eq!((layer.plan(5)?.tokens(), layer.plan(7)?.tokens()), (6, 8));
    let (x, logits) = (ctx.allocate(8 * HIDDEN * 4)?, ctx.allocate(8 * EXPERTS * 4)?);
    let mut d = ctx.allocate(8 * HIDDEN * 4)?;
    let stream = ctx.default_stream();
    let mut run = |layer: &MoeLayer, tokens| {
        layer.run(&stream, tokens, MoeArgs::from_logits(&x, &logits, &mut d), &mut workspace)
    };
    assert!(run(&layer, 7).is_ok() && run(&layer, 0).is_ok());
    assert!(matches!(run(&layer, 8), Err(Error::OutOfRange { most: 7, got: 8, .. })));
    // Its plan for one token exists.
    assert!(matches!(run(&other, 7), Err(Error::OutOfRange { most: 1, got: 7, .. })));
    other.prepare(7)?;
    assert!(run(&other, 7).is_ok());
    Ok(())
}

#[test]
fn plans_of_products_and_routings_serve_fewer_tokens_than_they_are_for() -> Result<(), Error> {
    let ctx = Context::open("noop")?;
    let (_, down) = Layer::new(EXPERTS).load(&ctx);
    let plan = ctx.plan_experts(&ExpertProblem::contiguous(&down, 8).unchecked())?;
    let (x, index) = (ctx.allocate(5 * INNER * 4)?, ctx.allocate((EXPERTS + 1) * 4)?);
    let mut d = ctx.allocate(5 * HIDDEN * 4)?;
    let stream = ctx.default_stream();
    assert!(plan.run(&stream, ExpertArgs::new(&x, &down, &index, &mut d).tokens(5)).is_ok());
    let all = plan.run(&stream, ExpertArgs::new(&x, &down, &index, &mut d));
    assert!(matches!(all, Err(Error::BufferTooShort { .. })), "{all:?}");
    assert!(plan.run(&stream, ExpertArgs::new(&x, &down, &index, &mut d).tokens(0)).is_ok());
    let wrong = plan.run(&stream, ExpertArgs::new(&x, &down, &index, &mut d).tokens(9));
    assert!(matches!(wrong, Err(Error::OutOfRange { least: 0, most: 8, .. })), "{wrong:?}");
    let masked = ctx.plan_experts(&ExpertProblem::masked(&down, 8).unchecked())?;
    let wrong = masked.run(&stream, ExpertArgs::new(&x, &down, &index, &mut d).tokens(5));
    assert!(matches!(wrong, Err(Error::NotForExperts { .. })), "{wrong:?}");
    Ok(())
}

#[test]
fn an_expert_for_all_tokens_may_be_one_of_the_stack() -> Result<(), Error> {
    let host = Layer::new(EXPERTS + 1);
    for ctx in devices("an_expert_for_all_tokens_may_be_one_of_the_stack") {
        let id = ctx.info().id;
        let (up, down) = host.load(&ctx);
        let layer = ctx.moe_layer(&up, &down, TOP_K, |moe| {
            let moe = moe.x_precision(XPrecision::Exact).last_is_shared().residual(DType::F32);
            moe.routed(DType::F32, |routing| routing.renormalized().scale(2.0))
        })?;
        let mut workspace = layer.workspace(19)?;
        for tokens in [19, 2] {
            let (x, logits) = (values(5, tokens * HIDDEN), values(6, tokens * EXPERTS));
            let residual = values(7, tokens * HIDDEN);
            let of_token = |t: usize| {
                let chosen = routed(&logits[t * EXPERTS..(t + 1) * EXPERTS]).into_iter().map(|(e, w)| (e, 2.0 * w));
                chosen.chain([(EXPERTS, 1.0)]).collect()
            };
            let mut wanted = expected(&host, &x, of_token);
            wanted.iter_mut().zip(&residual).for_each(|(wanted, residual)| *wanted += f64::from(*residual));
            let (x, logits, residual) = (ctx.upload(&x)?, ctx.upload(&logits)?, ctx.upload(&residual)?);
            let mut d = ctx.allocate(tokens * HIDDEN * 4)?;
            let args = MoeArgs::from_logits(&x, &logits, &mut d).residual(&residual);
            layer.run(&ctx.default_stream(), tokens, args, &mut workspace)?;
            layer.check_status(&workspace)?;
            let error = nmse(&ctx.download::<f32>(&d)?, &wanted);
            assert!(error < LIMIT, "{id}, {tokens} tokens: {error:e}");
            let plan = layer.plan(tokens)?;
            let routing = plan.routing().map_or(0, |routing| routing.sequence().expect("it launches").steps().len());
            assert!(plan.launches() - routing <= 4, "{id}: {} launches", plan.launches());
        }
        let unrouted = ctx.moe_layer(&up, &down, TOP_K, qgemm_api::Moe::last_is_shared);
        assert!(matches!(unrouted, Err(Error::NotForExperts { .. })), "{unrouted:?}");
    }
    Ok(())
}

/// Experts of several devices, one of which has no row of some
/// batches.
#[test]
fn parts_of_the_experts_add_up_to_the_layer() -> Result<(), Error> {
    let host = Layer::new(EXPERTS);
    for ctx in devices("parts_of_the_experts_add_up_to_the_layer") {
        let id = ctx.info().id;
        let parts = [0..3, 3..4, 4..5].map(|ids| {
            let pairs: Vec<_> = ids.clone().map(|e| (host.gates[e].clone(), host.ups[e].clone())).collect();
            let up = ctx.load_experts(&HostExperts::gated(&pairs).expect("pairs")).expect("memory");
            let down = ctx.load_experts(&HostExperts::new(&host.downs[ids.clone()]).expect("alike")).expect("memory");
            let layer = ctx.moe_layer(&up, &down, TOP_K, |moe| {
                let moe = moe.x_precision(XPrecision::Exact).local(ids.start, EXPERTS);
                moe.routed(DType::F32, |routing| routing.renormalized())
            });
            layer.expect("valid")
        });
        for tokens in [40, 1, 5] {
            let (x, mut logits) = (values(1, tokens * HIDDEN), values(2, tokens * EXPERTS));
            // No token chooses the last expert.
            logits.chunks_mut(EXPERTS).for_each(|logits| logits[EXPERTS - 1] = -9.0);
            let wanted = expected(&host, &x, |t| routed(&logits[t * EXPERTS..(t + 1) * EXPERTS]));
            let (x, logits) = (ctx.upload(&x)?, ctx.upload(&logits)?);
            let mut sum = vec![0.0; tokens * HIDDEN];
            for (place, layer) in parts.iter().enumerate() {
                let mut d = ctx.upload(&vec![f32::NAN; tokens * HIDDEN])?;
                let mut workspace = layer.workspace(tokens)?;
                let stream = ctx.default_stream();
                layer.run(&stream, tokens, MoeArgs::from_logits(&x, &logits, &mut d), &mut workspace)?;
                layer.check_status(&workspace)?;
                let part: Vec<f32> = ctx.download(&d)?;
                assert!(place < 2 || part.iter().all(|&v| v == 0.0), "{id}: no rows");
                sum.iter_mut().zip(part).for_each(|(sum, v)| *sum += v);
            }
            let error = nmse(&sum, &wanted);
            assert!(error < LIMIT, "{id}, {tokens} tokens: {error:e}");
        }
    }
    Ok(())
}

#[test]
fn given_ids_may_change_and_wrong_ones_are_named() -> Result<(), Error> {
    let host = Layer::new(EXPERTS);
    for ctx in devices("given_ids_may_change_and_wrong_ones_are_named") {
        let (up, down) = host.load(&ctx);
        let layer = ctx.moe_layer(&up, &down, TOP_K, |moe| moe.x_precision(XPrecision::Exact))?;
        let mut workspace = layer.workspace(3)?;
        let x = values(3, 3 * HIDDEN);
        let (x_buffer, mut d) = (ctx.upload(&x)?, ctx.allocate(3 * HIDDEN * 4)?);
        let weights = [0.5f32, 0.25, 1.0, -0.5, 2.0, 0.0];
        let weight_buffer = ctx.upload(&weights)?;
        for ids in [[0, 1, 2, 3, 4, 0], [4, 4, 4, 0, 1, 1]] {
            let words = ctx.upload(&ids.map(|id: u32| id.to_le_bytes()).concat())?;
            let args = MoeArgs::given(&x_buffer, &words, &weight_buffer, &mut d);
            layer.run(&ctx.default_stream(), 3, args, &mut workspace)?;
            layer.check_status(&workspace)?;
            let of_token =
                |t: usize| (0..TOP_K).map(move |j| (ids[t * TOP_K + j] as usize, f64::from(weights[t * TOP_K + j])));
            let wanted = expected(&host, &x, |t| of_token(t).collect());
            let error = nmse(&ctx.download::<f32>(&d)?, &wanted);
            assert!(error < LIMIT, "{}: {error:e}", ctx.info().id);
        }
        let words = ctx.upload(&[0u32, 1, 2, 9, 4, 0].map(u32::to_le_bytes).concat())?;
        let args = MoeArgs::given(&x_buffer, &words, &weight_buffer, &mut d);
        layer.run(&ctx.default_stream(), 3, args, &mut workspace)?;
        let wrong = layer.check_status(&workspace);
        assert!(matches!(wrong, Err(Error::BadExpertIndex { place: 3, .. })), "{}: {wrong:?}", ctx.info().id);
        let logits: BufferRef<'_> = (&weight_buffer).into();
        let refused =
            layer.run(&ctx.default_stream(), 3, MoeArgs::from_logits(&x_buffer, logits, &mut d), &mut workspace);
        assert!(matches!(refused, Err(Error::UnexpectedOperand { operand: "logits" })), "{refused:?}");
    }
    Ok(())
}

#[test]
fn an_expert_for_all_tokens_biases_and_a_residual_are_added() -> Result<(), Error> {
    let (host, shared) = (Layer::new(EXPERTS), Layer::new(EXPERTS + 1));
    let last = EXPERTS;
    for ctx in devices("an_expert_for_all_tokens_biases_and_a_residual_are_added") {
        let (up, down) = host.load(&ctx);
        let shared_up = ctx.load_gated(&shared.gates[last], &shared.ups[last])?;
        let shared_down = ctx.load(&shared.downs[last])?;
        let layer = ctx.moe_layer(&up, &down, TOP_K, |moe| {
            moe.x_precision(XPrecision::Exact)
                .routed(DType::F32, |routing| routing.renormalized())
                .shared(&shared_up, &shared_down)
                .residual(DType::F32)
                .down_bias(DType::F32)
        })?;
        let tokens = 5;
        let mut workspace = layer.workspace(tokens)?;
        let (x, logits, residual) =
            (values(5, tokens * HIDDEN), values(6, tokens * EXPERTS), values(7, tokens * HIDDEN));
        let bias = values(8, EXPERTS * HIDDEN);
        let of_token = |t: usize| routed(&logits[t * EXPERTS..(t + 1) * EXPERTS]);
        let mut wanted = expected(&host, &x, of_token);
        for (token, wanted) in wanted.chunks_exact_mut(HIDDEN).enumerate() {
            let of_shared = shared.expert(last, &x[token * HIDDEN..(token + 1) * HIDDEN]);
            for (i, wanted) in wanted.iter_mut().enumerate() {
                let biases: f64 = of_token(token).iter().map(|(e, w)| w * f64::from(bias[e * HIDDEN + i])).sum();
                *wanted += of_shared[i] + f64::from(residual[token * HIDDEN + i]) + biases;
            }
        }
        let (x, logits, residual) = (ctx.upload(&x)?, ctx.upload(&logits)?, ctx.upload(&residual)?);
        let (bias, mut d) = (ctx.upload(&bias)?, ctx.allocate(tokens * HIDDEN * 4)?);
        let args = MoeArgs::from_logits(&x, &logits, &mut d).residual(&residual).down_bias(&bias);
        let stream = ctx.default_stream();
        let (done, profile) = ctx.profile(|| layer.run(&stream, tokens, args, &mut workspace))?;
        done?;
        let launched: usize = profile.runs.iter().map(|run| run.steps.len()).sum();
        assert_eq!(layer.plan(tokens)?.launches(), launched, "{}", ctx.info().id);
        layer.check_status(&workspace)?;
        let error = nmse(&ctx.download::<f32>(&d)?, &wanted);
        assert!(error < LIMIT, "{}: {error:e}", ctx.info().id);
    }
    Ok(())
}

#[test]
fn a_layer_takes_activations_in_codes_and_scales() -> Result<(), Error> {
    let host = Layer::new(EXPERTS);
    let tokens = 5;
    for ctx in devices("a_layer_takes_activations_in_codes_and_scales") {
        let (up, down) = host.load(&ctx);
        for format in [XFormat::Q8_1, XFormat::E4M3Block] {
            let quantization = Quantization::new(tokens, HIDDEN, DType::F32, format);
            let layer = ctx.moe_layer(&up, &down, TOP_K, |moe| {
                let moe = moe.x_quantization(&quantization).x_precision(XPrecision::Exact);
                moe.routed(DType::F32, |routing| routing.renormalized())
            })?;
            let (x, logits) = (values(1, tokens * HIDDEN), values(2, tokens * EXPERTS));
            let plan = ctx.plan_quantization(&quantization)?;
            let mut quantized = ctx.allocate_x(&plan)?;
            let plain = ctx.upload(&x)?;
            plan.run(&ctx.default_stream(), quantized.args(&plain))?;
            // The layer multiplies the dequantized values.
            let [codes, scales] =
                [Some(quantized.codes()), quantized.scales()].map(|plane| plane.map(|p| ctx.download(p)));
            let (codes, scales): (Vec<u8>, Vec<u8>) =
                (codes.transpose()?.unwrap_or_default(), scales.transpose()?.unwrap_or_default());
            let parts = quantized.parts();
            let row = |row: usize| {
                let [codes, scales] = [(&codes, parts.code_bytes(HIDDEN)), (&scales, parts.scale_bytes(HIDDEN))]
                    .map(|(plane, bytes)| &plane[row * bytes..(row + 1) * bytes]);
                parts.dequantize_row(codes, scales, None, HIDDEN)
            };
            let meant: Vec<f32> = (0..tokens).flat_map(row).collect();
            let wanted = expected(&host, &meant, |t| routed(&logits[t * EXPERTS..(t + 1) * EXPERTS]));
            let logits = ctx.upload(&logits)?;
            let (mut d, mut workspace) = (ctx.allocate(tokens * HIDDEN * 4)?, layer.workspace(tokens)?);
            let stream = ctx.default_stream();
            layer.run(&stream, tokens, MoeArgs::from_logits(&quantized, &logits, &mut d), &mut workspace)?;
            layer.check_status(&workspace)?;
            let error = nmse(&ctx.download::<f32>(&d)?, &wanted);
            // E4M3 values may be rounded to f16.
            let limit = if format == XFormat::Q8_1 { LIMIT } else { 1e-6 };
            assert!(error < limit, "{}, {format}: {error:e}", ctx.info().id);
            let wrong = layer.run(&stream, tokens, MoeArgs::from_logits(&plain, &logits, &mut d), &mut workspace);
            assert!(matches!(wrong, Err(Error::WrongX { .. })), "{wrong:?}");
        }
    }
    Ok(())
}

#[test]
fn a_projection_is_one_launch_whatever_the_experts_are() -> Result<(), Error> {
    for ctx in devices("a_projection_is_one_launch_whatever_the_experts_are") {
        let (_, down) = Layer::new(EXPERTS).load(&ctx);
        // On wgpu the check of ids is a separate kernel. The CPU combines
        // slots within the product.
        let kind = ctx.info().id.kind;
        let (faults, combine) = (usize::from(kind == DeviceKind::Wgpu), usize::from(kind != DeviceKind::Cpu));
        let launches = |problem: ExpertProblem| -> Result<usize, Error> {
            let plan = ctx.plan_experts(&problem.each(|p| p.x_dtype(DType::F16)))?;
            Ok(plan.sequence().map_or(0, |sequence| sequence.steps().len()))
        };
        for rows in [1, 7, 300] {
            let indexed = || ExpertProblem::indexed(&down, rows, TOP_K).listed();
            let all = [ExpertProblem::contiguous(&down, rows), ExpertProblem::masked(&down, rows), indexed()];
            for problem in all {
                assert_eq!(launches(problem.clone().unchecked())?, 1, "{}, {rows} rows", ctx.info().id);
                assert_eq!(launches(problem)?, 1 + faults, "{}, {rows} rows", ctx.info().id);
            }
            assert_eq!(launches(indexed().combined())?, 1 + faults + combine, "{}, {rows} rows", ctx.info().id);
        }
    }
    Ok(())
}

#[test]
fn experts_that_do_not_fit_together_are_refused() -> Result<(), Error> {
    let ctx = Context::open("noop")?;
    let (up, down) = Layer::new(EXPERTS).load(&ctx);
    let (_, fewer) = Layer::new(EXPERTS - 1).load(&ctx);
    for (up, down) in [(&up, &fewer), (&down, &up), (&up, &up)] {
        let wrong = ctx.moe_layer(up, down, TOP_K, |moe| moe);
        assert!(matches!(wrong, Err(Error::WrongWeight { .. })), "{wrong:?}");
    }
    let wrong = ctx.moe_layer(&up, &down, EXPERTS + 1, |moe| moe.routed(DType::F32, |routing| routing));
    assert!(matches!(wrong, Err(Error::OutOfRange { .. })), "{wrong:?}");
    let wrong = ctx.moe_layer(&up, &down, TOP_K, |moe| moe.local(0, 2 * EXPERTS));
    assert!(matches!(wrong, Err(Error::NotForExperts { .. })), "{wrong:?}");
    let wrong = ctx.moe_layer(&up, &down, TOP_K, |moe| moe.routed(DType::F32, |routing| routing.local(0..2)));
    assert!(matches!(wrong, Err(Error::WrongWeight { .. })), "{wrong:?}");
    for first in [EXPERTS + 1, usize::MAX] {
        let wrong =
            ctx.moe_layer(&up, &down, TOP_K, |moe| moe.local(first, 2 * EXPERTS).routed(DType::F32, |routing| routing));
        assert!(matches!(wrong, Err(Error::LocalExperts { .. })), "{wrong:?}");
    }
    let wrong = ctx.plan_routing(&Routing::from_ids(1, EXPERTS, TOP_K).local(0..2));
    assert!(matches!(wrong, Err(Error::RoutingOfIds { .. })), "{wrong:?}");
    Ok(())
}
