//! Training of a routed MoE layer: the loss falls, and learned
//! weights match an f64 reference.
//!
//! Steps between the products (row sorting, activation, combining slots, softmax)
//! are the same code for both.

use std::sync::Arc;

use qgemm_api::{
    Context, DType, ExpertArgs, ExpertProblem, Experts, Gradient, GradientArgs, HostExperts, HostWeight, Matmul,
    MatmulArgs, Routing, RoutingArgs, SharedBytes, XPrecision,
};

const TOKENS: usize = 40;
const TOP_K: usize = 2;
const SLOTS: usize = TOKENS * TOP_K;
const EXPERTS: usize = 5;
const FEATURES: usize = 24;
const INNER: usize = 19;
const STEPS: usize = 6;
const RATE: f64 = 0.5;

/// Numbers in [-1, 1) without a pattern.
fn numbers(count: usize, seed: u32) -> Vec<f64> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        f64::from((state >> 24) as u8 as i8) / 128.0
    };
    (0..count).map(|_| next()).collect()
}

/// Trained weights and inputs of a layer.
#[derive(Clone)]
struct Layer {
    x: Vec<f64>,
    router: Vec<f64>,
    gate: Vec<f64>,
    up: Vec<f64>,
    down: Vec<f64>,
}

impl Layer {
    fn parameters(&mut self) -> [&mut Vec<f64>; 5] {
        let Self { x, router, gate, up, down } = self;
        [x, router, gate, up, down]
    }
}

/// Products of a stack of weights `[experts, n, k]` with rows sorted by expert,
/// whose offsets are given.
trait Products {
    /// `Y = X·Wᵀ`.
    fn forward(&self, x: &[f64], w: &[f64], shape: [usize; 2], offsets: &[u32]) -> Vec<f64>;
    /// `dX = dY·W` of one stack, or of a gate and an up stack. For two stacks, dY has
    /// their gradients concatenated.
    fn dx(&self, dy: &[f64], stacks: &[&[f64]], shape: [usize; 2], offsets: &[u32]) -> Vec<f64>;
    /// `dW = dYᵀ·X`.
    fn dw(&self, dy: &[f64], x: &[f64], shape: [usize; 2], offsets: &[u32]) -> Vec<f64>;
    /// Expert ids of each token, and their weights.
    fn route(&self, logits: &[f64]) -> (Vec<usize>, Vec<f64>);
}

struct Reference;

fn owner(offsets: &[u32], row: usize) -> usize {
    offsets.iter().skip(1).position(|&end| row < end as usize).expect("each row has an expert")
}

impl Products for Reference {
    fn forward(&self, x: &[f64], w: &[f64], [n, k]: [usize; 2], offsets: &[u32]) -> Vec<f64> {
        let of_row = |(row, x): (usize, &[f64])| -> Vec<f64> {
            let w = &w[owner(offsets, row) * n * k..][..n * k];
            w.chunks(k).map(|w| x.iter().zip(w).map(|(x, w)| x * w).sum()).collect()
        };
        x.chunks(k).enumerate().flat_map(of_row).collect()
    }

    fn dx(&self, dy: &[f64], stacks: &[&[f64]], [n, k]: [usize; 2], offsets: &[u32]) -> Vec<f64> {
        let mut dx = vec![0.0; dy.len() / (n * stacks.len()) * k];
        for (row, (dx, dy)) in dx.chunks_mut(k).zip(dy.chunks(n * stacks.len())).enumerate() {
            for (w, dy) in stacks.iter().zip(dy.chunks(n)) {
                let w = &w[owner(offsets, row) * n * k..][..n * k];
                for (w, dy) in w.chunks(k).zip(dy) {
                    dx.iter_mut().zip(w).for_each(|(dx, w)| *dx += dy * w);
                }
            }
        }
        dx
    }

    fn dw(&self, dy: &[f64], x: &[f64], [n, k]: [usize; 2], offsets: &[u32]) -> Vec<f64> {
        let mut all = vec![0.0; (offsets.len() - 1) * n * k];
        for (row, (dy, x)) in dy.chunks(n).zip(x.chunks(k)).enumerate() {
            let dw = &mut all[owner(offsets, row) * n * k..][..n * k];
            for (dw, dy) in dw.chunks_mut(k).zip(dy) {
                dw.iter_mut().zip(x).for_each(|(dw, x)| *dw += dy * x);
            }
        }
        all
    }

    fn route(&self, logits: &[f64]) -> (Vec<usize>, Vec<f64>) {
        let (mut ids, mut weights) = (Vec::new(), Vec::new());
        for logits in logits.chunks(EXPERTS) {
            let mut order: Vec<usize> = (0..EXPERTS).collect();
            order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]));
            let exp: Vec<f64> = order[..TOP_K].iter().map(|&expert| logits[expert].exp()).collect();
            weights.extend(exp.iter().map(|e| e / exp.iter().sum::<f64>()));
            ids.extend_from_slice(&order[..TOP_K]);
        }
        (ids, weights)
    }
}

struct OnDevice(Context);

impl OnDevice {
    fn upload(&self, values: &[f64]) -> qgemm_api::Buffer {
        self.0.upload(&values.iter().map(|&value| value as f32).collect::<Vec<f32>>()).expect("fits")
    }

    fn values(&self, buffer: &qgemm_api::Buffer) -> Vec<f64> {
        self.0.download::<f32>(buffer).expect("fits").into_iter().map(f64::from).collect()
    }

    /// Matrices of a stack as f32 weights.
    fn weights(stack: &[f64], [n, k]: [usize; 2]) -> Vec<HostWeight> {
        let weight = |values: &[f64]| {
            let values: Vec<f32> = values.iter().map(|&value| value as f32).collect();
            let bytes = SharedBytes::new(Arc::new(DType::F32.encode(&values)));
            HostWeight::new("f32".parse().expect("a format"), n, k, bytes).expect("the right size")
        };
        stack.chunks(n * k).map(weight).collect()
    }

    fn load(&self, stacks: &[&[f64]], shape: [usize; 2]) -> Experts {
        let host = match stacks {
            [gate, up] => {
                let pairs = Self::weights(gate, shape).into_iter().zip(Self::weights(up, shape));
                HostExperts::gated(&pairs.collect::<Vec<_>>())
            }
            [stack] => HostExperts::new(&Self::weights(stack, shape)),
            _ => unreachable!("a stack or a pair of them"),
        };
        self.0.load_experts(&host.expect("alike")).expect("fits")
    }
}

impl Products for OnDevice {
    fn forward(&self, x: &[f64], w: &[f64], [n, k]: [usize; 2], offsets: &[u32]) -> Vec<f64> {
        let Self(ctx) = self;
        let (experts, rows) = (self.load(&[w], [n, k]), x.len() / k);
        let problem = ExpertProblem::contiguous(&experts, rows)
            .each(|each| each.x_dtype(DType::F32).d_dtype(DType::F32).x_precision(XPrecision::Exact));
        let plan = ctx.plan_experts(&problem).expect("is served");
        let (x, offsets) = (self.upload(x), ctx.upload(offsets).expect("fits"));
        let (mut d, mut status) = (ctx.allocate(rows * n * 4).expect("fits"), ctx.allocate(8).expect("fits"));
        let mut workspace = ctx.workspace(plan.workspace_bytes()).expect("fits");
        let args = ExpertArgs::new(&x, &experts, &offsets, &mut d).status(&mut status).workspace(&mut workspace);
        plan.run(&ctx.default_stream(), args).expect("runs");
        self.values(&d)
    }

    fn dx(&self, dy: &[f64], stacks: &[&[f64]], [n, k]: [usize; 2], offsets: &[u32]) -> Vec<f64> {
        let Self(ctx) = self;
        let (experts, rows) = (self.load(stacks, [n, k]), dy.len() / (n * stacks.len()));
        let plan = ctx.plan_gradient(&experts, &Gradient::new(rows, DType::F32, DType::F32)).expect("is served");
        let (dy, offsets) = (self.upload(dy), ctx.upload(offsets).expect("fits"));
        let mut dx = ctx.allocate(rows * k * 4).expect("fits");
        let mut workspace = ctx.workspace(plan.workspace_bytes()).expect("fits");
        let args = GradientArgs::new(&dy, &experts, &mut dx).offsets(&offsets).workspace(&mut workspace);
        plan.run(&ctx.default_stream(), args).expect("runs");
        self.values(&dx)
    }

    fn dw(&self, dy: &[f64], x: &[f64], [n, k]: [usize; 2], offsets: &[u32]) -> Vec<f64> {
        let Self(ctx) = self;
        let experts = offsets.len() - 1;
        let matmul = Matmul::new([n, k, x.len() / k], DType::F32, DType::F32, DType::F32);
        let plan = ctx.plan_matmul(&matmul.a_transposed().k_grouped(experts)).expect("is served");
        let (dy, x, offsets) = (self.upload(dy), self.upload(x), ctx.upload(offsets).expect("fits"));
        let mut dw = ctx.allocate(experts * n * k * 4).expect("fits");
        let mut workspace = ctx.workspace(plan.workspace_bytes()).expect("fits");
        let args = MatmulArgs::new(&dy, &x, &mut dw).offsets(&offsets).workspace(&mut workspace);
        plan.run(&ctx.default_stream(), args).expect("runs");
        self.values(&dw)
    }

    fn route(&self, logits: &[f64]) -> (Vec<usize>, Vec<f64>) {
        let Self(ctx) = self;
        let routing = Routing::from_logits(TOKENS, EXPERTS, TOP_K, DType::F32).renormalized();
        let plan = ctx.plan_routing(&routing).expect("is served");
        let logits = self.upload(logits);
        let [mut ids, mut weights] = [(); 2].map(|()| ctx.allocate(SLOTS * 4).expect("fits"));
        let mut status = ctx.allocate(16).expect("fits");
        let mut workspace = ctx.workspace(plan.workspace_bytes()).expect("fits");
        let mut args = RoutingArgs::of_logits(&logits, &mut ids, &mut weights, &mut status);
        args.workspace = Some(&mut workspace);
        plan.run(&ctx.default_stream(), args).expect("runs");
        let ids = ctx.download::<u32>(&ids).expect("fits").into_iter().map(|id| id as usize).collect();
        (ids, self.values(&weights))
    }
}

/// Runs a step. Returns the loss before it.
fn step(products: &impl Products, layer: &mut Layer, target: &[f64]) -> f64 {
    let (router_shape, up_shape, down_shape) = ([EXPERTS, FEATURES], [INNER, FEATURES], [FEATURES, INNER]);
    let everyone = [0, TOKENS as u32];
    let logits = products.forward(&layer.x, &layer.router, router_shape, &everyone);
    let (ids, weights) = products.route(&logits);
    // Slot of each row.
    let mut order: Vec<usize> = (0..SLOTS).collect();
    order.sort_by_key(|&slot| ids[slot]);
    let before = |expert: usize| ids.iter().filter(|&&id| id < expert).count() as u32;
    let offsets: Vec<u32> = (0..=EXPERTS).map(before).collect();
    let row_of = |all: &[f64], row: usize| all[row * FEATURES..(row + 1) * FEATURES].to_vec();
    let x: Vec<f64> = order.iter().flat_map(|slot| row_of(&layer.x, slot / TOP_K)).collect();
    let gate = products.forward(&x, &layer.gate, up_shape, &offsets);
    let up = products.forward(&x, &layer.up, up_shape, &offsets);
    let sigmoid = |g: f64| 1.0 / (1.0 + (-g).exp());
    let inner: Vec<f64> = gate.iter().zip(&up).map(|(&g, u)| g * sigmoid(g) * u).collect();
    let slots = products.forward(&inner, &layer.down, down_shape, &offsets);
    let mut y = vec![0.0; TOKENS * FEATURES];
    for (&slot, of_slot) in order.iter().zip(slots.chunks(FEATURES)) {
        let y = &mut y[slot / TOP_K * FEATURES..][..FEATURES];
        y.iter_mut().zip(of_slot).for_each(|(y, of_slot)| *y += weights[slot] * of_slot);
    }
    let dy: Vec<f64> = y.iter().zip(target).map(|(y, target)| (y - target) / TOKENS as f64).collect();
    let loss = y.iter().zip(target).map(|(y, target)| (y - target).powi(2)).sum::<f64>() / (2 * TOKENS) as f64;

    let scaled = |slot: &usize| row_of(&dy, slot / TOP_K).into_iter().map(|dy| dy * weights[*slot]).collect::<Vec<_>>();
    let d_slots: Vec<f64> = order.iter().flat_map(scaled).collect();
    let d_inner = products.dx(&d_slots, &[&layer.down], down_shape, &offsets);
    let d_down = products.dw(&d_slots, &inner, down_shape, &offsets);
    let slope = |g: f64| sigmoid(g) * (1.0 + g * (1.0 - sigmoid(g)));
    let d_gated: Vec<f64> = (0..gate.len()).map(|i| d_inner[i] * up[i] * slope(gate[i])).collect();
    let d_upped: Vec<f64> = (0..gate.len()).map(|i| d_inner[i] * gate[i] * sigmoid(gate[i])).collect();
    let both = d_gated.chunks(INNER).zip(d_upped.chunks(INNER));
    let both: Vec<f64> = both.flat_map(|(gate, up)| [gate, up].concat()).collect();
    let d_sorted = products.dx(&both, &[&layer.gate, &layer.up], up_shape, &offsets);
    let d_gate = products.dw(&d_gated, &x, up_shape, &offsets);
    let d_up = products.dw(&d_upped, &x, up_shape, &offsets);

    let mut d_weights = vec![0.0; SLOTS];
    for (&slot, of_slot) in order.iter().zip(slots.chunks(FEATURES)) {
        d_weights[slot] = row_of(&dy, slot / TOP_K).iter().zip(of_slot).map(|(dy, of_slot)| dy * of_slot).sum();
    }
    let mut d_logits = vec![0.0; TOKENS * EXPERTS];
    for slot in 0..SLOTS {
        let of_token = slot / TOP_K * TOP_K..(slot / TOP_K + 1) * TOP_K;
        let mean: f64 = of_token.map(|other| weights[other] * d_weights[other]).sum();
        d_logits[slot / TOP_K * EXPERTS + ids[slot]] = weights[slot] * (d_weights[slot] - mean);
    }
    let d_router = products.dw(&d_logits, &layer.x, router_shape, &everyone);
    let mut d_x = products.dx(&d_logits, &[&layer.router], router_shape, &everyone);
    for (&slot, of_row) in order.iter().zip(d_sorted.chunks(FEATURES)) {
        let d_x = &mut d_x[slot / TOP_K * FEATURES..][..FEATURES];
        d_x.iter_mut().zip(of_row).for_each(|(d_x, of_row)| *d_x += of_row);
    }
    for (parameter, gradient) in layer.parameters().into_iter().zip([d_x, d_router, d_gate, d_up, d_down]) {
        assert_eq!(parameter.len(), gradient.len());
        parameter.iter_mut().zip(gradient).for_each(|(parameter, gradient)| *parameter -= RATE * gradient);
    }
    loss
}

fn train(products: &impl Products, mut layer: Layer, target: &[f64]) -> (Vec<f64>, Layer) {
    let losses = (0..STEPS).map(|_| step(products, &mut layer, target)).collect();
    (losses, layer)
}

fn learns_on(device: &str) {
    let ctx = match Context::open(device) {
        Ok(ctx) => ctx,
        Err(why) => return qgemm_testkit::skipped(&format!("training experts on {device}"), &why.to_string()),
    };
    let scaled = |count, seed| numbers(count, seed).into_iter().map(|value| value * 0.5).collect::<Vec<f64>>();
    let stack = EXPERTS * INNER * FEATURES;
    let mut before = Layer {
        x: numbers(TOKENS * FEATURES, 1),
        router: scaled(EXPERTS * FEATURES, 2),
        gate: scaled(stack, 3),
        up: scaled(stack, 4),
        down: scaled(stack, 5),
    };
    let target = numbers(TOKENS * FEATURES, 6);
    let (expected_losses, mut expected) = train(&Reference, before.clone(), &target);
    let (losses, mut learned) = train(&OnDevice(ctx), before.clone(), &target);
    assert!(losses.windows(2).all(|pair| pair[1] < pair[0]), "{device}: {losses:?}");
    for (loss, expected) in losses.iter().zip(&expected_losses) {
        assert!((loss / expected - 1.0).abs() < 1e-5, "{device}: {losses:?}, expected {expected_losses:?}");
    }
    let all = learned.parameters().into_iter().zip(expected.parameters()).zip(before.parameters());
    for (i, ((got, expected), before)) in all.enumerate() {
        let apart = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| (a - b).powi(2)).sum::<f64>();
        let (off, learned) = (apart(got, expected), apart(expected, before));
        assert!(learned > 0.0 && off < 1e-9 * learned, "{device}, parameter {i}: off by {off} of {learned}");
    }
}

#[test]
fn experts_learn_on_the_cpu() {
    learns_on("cpu");
}

#[test]
fn experts_learn_on_wgpu() {
    learns_on("wgpu:0");
}

#[test]
fn experts_learn_on_an_emulated_gpu() {
    learns_on("emu:sm80");
}
