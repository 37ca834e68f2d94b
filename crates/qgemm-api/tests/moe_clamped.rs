//! A layer as in gpt-oss, against an f64 computation: alternating gate and
//! up rows, biases everywhere, clamped SwiGLU.

use qgemm_api::{
    Activation, Args, ClampedSwiglu, Context, DType, Error, HostExperts, HostWeight, Moe, MoeArgs, Problem, XPrecision,
    pair_bias, quantize,
};

const DEVICES: [&str; 5] = ["cpu", "wgpu:0", "emu:sm70", "emu:sm80", "emu:sm90"];
const EXPERTS: usize = 4;
const TOP_K: usize = 2;
const HIDDEN: usize = 64;
const INNER: usize = 32;
const SWIGLU: ClampedSwiglu = ClampedSwiglu::new(1.702, 1.0, 1.25);

fn devices(test: &str) -> impl Iterator<Item = Context> {
    DEVICES.into_iter().filter_map(move |name| match Context::open(name) {
        Ok(ctx) => Some(ctx),
        Err(why @ (Error::Hal(_) | Error::BackendNotBuilt { .. })) => {
            qgemm_testkit::skipped(&format!("{test} on {name}"), &why.to_string());
            None
        }
        Err(other) => panic!("{name}: {other}"),
    })
}

/// `count` pseudo-random values in −`most`..`most`.
fn values(seed: usize, count: usize, most: f32) -> Vec<f32> {
    (0..count).map(|i| (((i * 7919 + seed * 104_729) % 1999) as f32 / 999.5 - 1.0) * most).collect()
}

fn weight(seed: usize, n: usize, k: usize, format: &str) -> HostWeight {
    quantize(&values(seed, n * k, 0.4), n, k, format.parse().expect("a format")).expect("K suits").0
}

/// X·Wᵀ + bias of one row.
fn linear(weight: &HostWeight, bias: &[f32], x: &[f64]) -> Vec<f64> {
    let rows = weight.dequantize().expect("finite");
    let dot = |row: &[f32]| row.iter().zip(x).map(|(w, x)| f64::from(*w) * x).sum::<f64>();
    rows.chunks_exact(weight.k()).zip(bias).map(|(row, bias)| dot(row) + f64::from(*bias)).collect()
}

fn swiglu(gate: f64, up: f64) -> f64 {
    let (limit, alpha) = (f64::from(SWIGLU.limit), f64::from(SWIGLU.alpha));
    let g = gate.min(limit);
    (up.clamp(-limit, limit) + 1.0) * g / (1.0 + (-alpha * g).exp())
}

struct Layer {
    router: HostWeight,
    router_bias: Vec<f32>,
    gate_up: Vec<HostWeight>,
    gate_up_bias: Vec<f32>,
    down: Vec<HostWeight>,
    down_bias: Vec<f32>,
}

impl Layer {
    fn new(format: &str) -> Self {
        Self {
            router: weight(1, EXPERTS, HIDDEN, "f32"),
            router_bias: values(2, EXPERTS, 3.0),
            gate_up: (0..EXPERTS).map(|e| weight(10 + e, 2 * INNER, HIDDEN, format)).collect(),
            gate_up_bias: values(20, EXPERTS * 2 * INNER, 1.0),
            down: (0..EXPERTS).map(|e| weight(30 + e, HIDDEN, INNER, format)).collect(),
            down_bias: values(40, EXPERTS * HIDDEN, 1.0),
        }
    }

    fn expert(&self, e: usize, x: &[f64]) -> Vec<f64> {
        let bias = &self.gate_up_bias[e * 2 * INNER..(e + 1) * 2 * INNER];
        let both = linear(&self.gate_up[e], bias, x);
        let hidden: Vec<f64> = both.chunks_exact(2).map(|pair| swiglu(pair[0], pair[1])).collect();
        linear(&self.down[e], &self.down_bias[e * HIDDEN..(e + 1) * HIDDEN], &hidden)
    }

    fn expected(&self, x: &[f32]) -> Vec<f64> {
        let of_token = |row: &[f32]| {
            let x: Vec<f64> = row.iter().map(|&v| v.into()).collect();
            let logits = linear(&self.router, &self.router_bias, &x);
            let mut order: Vec<usize> = (0..EXPERTS).collect();
            order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]));
            let sum: f64 = order[..TOP_K].iter().map(|&e| logits[e].exp()).sum();
            let mut d = vec![0.0; HIDDEN];
            for &e in &order[..TOP_K] {
                let share = logits[e].exp() / sum;
                d.iter_mut().zip(self.expert(e, &x)).for_each(|(d, v)| *d += share * v);
            }
            d
        };
        x.chunks_exact(HIDDEN).flat_map(of_token).collect()
    }
}

fn described(moe: Moe) -> Moe {
    moe.x_precision(XPrecision::Exact)
        .activation(Activation::ClampedSwiglu(SWIGLU))
        .up_bias(DType::F32)
        .down_bias(DType::F32)
        .routed(DType::F32, |routing| routing.renormalized())
}

#[test]
fn alternating_rows_biases_and_clamps_are_those_of_gpt_oss() -> Result<(), Error> {
    for (ctx, format) in devices("gpt-oss").flat_map(|ctx| ["mxfp4", "q8_0"].map(|format| (ctx.clone(), format))) {
        let host = Layer::new(format);
        let up = ctx.load_experts(&HostExperts::interleaved(&host.gate_up)?)?;
        let down = ctx.load_experts(&HostExperts::new(&host.down)?)?;
        let router = ctx.load(&host.router)?;
        let layer = ctx.moe_layer(&up, &down, TOP_K, described)?;
        let bias: Result<Vec<_>, _> = host.gate_up_bias.chunks_exact(2 * INNER).map(pair_bias).collect();
        let (up_bias, down_bias) = (ctx.upload(&bias?.concat())?, ctx.upload(&host.down_bias)?);
        let router_bias = ctx.upload(&host.router_bias)?;
        for tokens in [1, 9] {
            let x = values(3, tokens * HIDDEN, 1.0);
            let wanted = host.expected(&x);
            let x = ctx.upload(&x)?;
            let mut logits = ctx.allocate(tokens * EXPERTS * 4)?;
            let plan = ctx.plan(&Problem::new(&router, tokens).bias(DType::F32).x_precision(XPrecision::Exact))?;
            let mut room = ctx.workspace(plan.workspace_bytes())?;
            let stream = ctx.default_stream();
            let args = Args::new(&x, &router, &mut logits).bias(&router_bias);
            plan.run(&stream, args.workspace(&mut room))?;
            let (mut d, mut workspace) = (ctx.allocate(tokens * HIDDEN * 4)?, layer.workspace(tokens)?);
            let args = MoeArgs::from_logits(&x, &logits, &mut d).up_bias(&up_bias).down_bias(&down_bias);
            layer.run(&stream, tokens, args, &mut workspace)?;
            layer.check_status(&workspace)?;
            let got: Vec<f32> = ctx.download(&d)?;
            let error: f64 = got.iter().zip(&wanted).map(|(got, e)| (f64::from(*got) - e).powi(2)).sum();
            let error = error / wanted.iter().map(|e| e * e).sum::<f64>();
            assert!(error < 1e-9, "{} {format}, {tokens} tokens: {error:e}", ctx.info().id);
        }
    }
    Ok(())
}

#[test]
fn a_weight_of_alternating_rows_is_the_pair_of_its_halves() -> Result<(), Error> {
    let ctx = Context::open("cpu")?;
    let both = weight(5, 2 * INNER, HIDDEN, "q4_0");
    let half = |first: usize| {
        let blocks: Vec<u8> = (0..INNER).flat_map(|i| both.row(2 * i + first).to_vec()).collect();
        HostWeight::new(both.format(), INNER, HIDDEN, blocks.into())
    };
    let run = |weight| -> Result<Vec<f32>, Error> {
        let problem = Problem::new(&weight, 3).activation(Activation::Silu);
        let plan = ctx.plan(&problem)?;
        let (x, mut d) = (ctx.upload(&values(6, 3 * HIDDEN, 1.0))?, ctx.allocate(3 * INNER * 4)?);
        let mut workspace = ctx.workspace(plan.workspace_bytes())?;
        plan.run(&ctx.default_stream(), Args::new(&x, &weight, &mut d).workspace(&mut workspace))?;
        ctx.download(&d)
    };
    assert_eq!(run(ctx.load_interleaved(&both)?)?, run(ctx.load_gated(&half(0)?, &half(1)?)?)?);
    let odd = ctx.load_interleaved(&weight(5, 3, HIDDEN, "q4_0"));
    assert!(odd.is_err_and(|error| error.to_string().contains("alternate rows")));
    Ok(())
}

#[test]
fn wrong_numbers_and_single_outputs_are_refused() -> Result<(), Error> {
    let ctx = Context::open("noop")?;
    let (gate, single) = (weight(1, 32, HIDDEN, "q8_0"), ctx.load(&weight(1, 32, HIDDEN, "q8_0"))?);
    let pair = ctx.load_gated(&gate, &gate)?;
    let plan = |weight, alpha, beta, limit| {
        let activation = Activation::ClampedSwiglu(ClampedSwiglu::new(alpha, beta, limit));
        ctx.plan(&Problem::new(weight, 1).activation(activation)).map(|_| ())
    };
    assert!(plan(&pair, 1.702, 1.0, 7.0).is_ok());
    assert!(matches!(plan(&single, 1.702, 1.0, 7.0), Err(Error::ActivationOfPairs { .. })));
    for limit in [0.0, -1.0, f32::INFINITY, f32::NAN] {
        let got = plan(&pair, 1.0, 0.0, limit);
        assert!(matches!(got, Err(Error::ActivationNumber { name: "limit", .. })), "{got:?}");
    }
    assert!(matches!(plan(&pair, f32::NAN, 0.0, 1.0), Err(Error::ActivationNumber { name: "alpha", .. })));
    assert!(matches!(plan(&pair, 1.0, f32::INFINITY, 1.0), Err(Error::ActivationNumber { name: "beta", .. })));
    let matmul = qgemm_api::Matmul::new([1, 2, 1], DType::F32, DType::F32, DType::F32);
    let refused = ctx.plan_matmul(&matmul.activation(Activation::ClampedSwiglu(SWIGLU)));
    assert!(matches!(refused, Err(Error::ActivationOfPairs { .. })), "{refused:?}");
    Ok(())
}
