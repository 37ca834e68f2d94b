//! A training step of a multi-layer perceptron of two layers, of operations alone: master weights in f32, products of a copy in bf16.
//! The loss falls, and what was learned is what a reference in f64 learns.

use qgemm_api::{Activation, Buffer, Context, Conversion, ConversionArgs, DType, Matmul, MatmulArgs};

const TOKENS: usize = 24;
const INPUTS: usize = 40;
const HIDDEN: usize = 32;
const OUTPUTS: usize = 8;
const STEPS: usize = 4;
const RATE: f32 = 0.02;
const ACTIVATION: Activation = Activation::Silu;

/// Numbers in [-1, 1) without a pattern, exact in bf16.
fn numbers(count: usize, seed: u32) -> Vec<f32> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        f32::from((state >> 24) as u8 as i8) / 128.0
    };
    (0..count).map(|_| next()).collect()
}

/// A layer's master weights and biases, and the copy that products read.
struct Layer {
    outputs: usize,
    inputs: usize,
    weights: Buffer,
    bias: Buffer,
    copy: Buffer,
}

impl Layer {
    fn new(ctx: &Context, outputs: usize, inputs: usize, weights: &[f32]) -> Self {
        let upload = |values: &[f32]| ctx.upload(&DType::F32.encode(values)).expect("fits");
        let copy = ctx.allocate(outputs * inputs * DType::BF16.bytes()).expect("fits");
        Self { outputs, inputs, weights: upload(weights), bias: upload(&vec![0.0; outputs]), copy }
    }

    /// The copy, of what the weights are now.
    fn round(&mut self, ctx: &Context) {
        let plan = ctx.plan_conversion(&Conversion::new(self.outputs, self.inputs, DType::F32, DType::BF16));
        let args = ConversionArgs::new(&self.weights, &mut self.copy);
        plan.expect("is served").run(&ctx.default_stream(), args).expect("runs");
    }

    /// `W -= rate · dYᵀ·X` and `b -= rate · Σ dY`, with dY and X in bf16.
    fn descend(&mut self, ctx: &Context, dy: &Buffer, x: &Buffer, ones: &Buffer) {
        let shape = [self.outputs, self.inputs, TOKENS];
        let step = Matmul::new(shape, DType::BF16, DType::BF16, DType::F32).a_transposed();
        multiply(ctx, &step.alpha(-RATE).accumulate(1.0), MatmulArgs::new(dy, x, &mut self.weights));
        let sums = Matmul::new([1, self.outputs, TOKENS], DType::BF16, DType::BF16, DType::F32);
        multiply(ctx, &sums.alpha(-RATE).accumulate(1.0), MatmulArgs::new(ones, dy, &mut self.bias));
    }

    fn values(&self, ctx: &Context) -> [Vec<f32>; 2] {
        [&self.weights, &self.bias].map(|buffer| DType::F32.decode(&ctx.download(buffer).expect("fits")))
    }
}

fn multiply(ctx: &Context, matmul: &Matmul, args: MatmulArgs<'_>) {
    let plan = ctx.plan_matmul(matmul).expect("is served");
    let mut workspace = ctx.workspace(plan.workspace_bytes()).expect("fits");
    plan.run(&ctx.default_stream(), args.workspace(&mut workspace)).expect("runs");
}

/// The loss before each step, and the layers' values after the last.
fn train(ctx: &Context, [x, target, w1, w2]: [&[f32]; 4]) -> (Vec<f64>, [[Vec<f32>; 2]; 2]) {
    let half = |values: &[f32]| ctx.upload(&DType::BF16.encode(values)).expect("fits");
    let buffer = |values: usize, dtype: DType| ctx.allocate(values * dtype.bytes()).expect("fits");
    let (x, ones) = (half(x), half(&[1.0; TOKENS]));
    let target = ctx.upload(&DType::F32.encode(target)).expect("fits");
    let mut layers = [Layer::new(ctx, HIDDEN, INPUTS, w1), Layer::new(ctx, OUTPUTS, HIDDEN, w2)];
    let (mut z, mut hidden) = (buffer(TOKENS * HIDDEN, DType::F32), buffer(TOKENS * HIDDEN, DType::BF16));
    let (mut residual, mut dz) = (buffer(TOKENS * OUTPUTS, DType::BF16), buffer(TOKENS * HIDDEN, DType::BF16));
    let mut losses = Vec::new();
    for _ in 0..STEPS {
        layers.iter_mut().for_each(|layer| layer.round(ctx));
        let [first, second] = &mut layers;
        let forward = |shape, d| Matmul::new(shape, DType::BF16, DType::BF16, d).b_transposed().bias(DType::F32);
        let of_first = [TOKENS, HIDDEN, INPUTS];
        multiply(ctx, &forward(of_first, DType::F32), MatmulArgs::new(&x, &first.copy, &mut z).bias(&first.bias));
        let activated = forward(of_first, DType::BF16).activation(ACTIVATION);
        multiply(ctx, &activated, MatmulArgs::new(&x, &first.copy, &mut hidden).bias(&first.bias));
        // What is left of the output without the target: the gradient of half the squared error.
        let left = forward([TOKENS, OUTPUTS, HIDDEN], DType::BF16).c(-1.0, DType::F32);
        let args = MatmulArgs::new(&hidden, &second.copy, &mut residual).c(&target).bias(&second.bias);
        multiply(ctx, &left, args);
        let values = DType::BF16.decode(&ctx.download(&residual).expect("fits"));
        losses.push(values.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>() / 2.0);
        // Backwards: through the second layer and the activation, then both layers descend.
        let back = Matmul::new([TOKENS, HIDDEN, OUTPUTS], DType::BF16, DType::BF16, DType::BF16);
        let back = back.through(ACTIVATION, DType::F32);
        multiply(ctx, &back, MatmulArgs::new(&residual, &second.copy, &mut dz).c(&z));
        second.descend(ctx, &residual, &hidden, &ones);
        first.descend(ctx, &dz, &x, &ones);
    }
    (losses, layers.each_ref().map(|layer| layer.values(ctx)))
}

/// `A·B` of row-major matrices, `[m, k]` and `[k, n]`, in f64.
fn product([m, n, k]: [usize; 3], a: impl Fn(usize, usize) -> f64, b: impl Fn(usize, usize) -> f64) -> Vec<f64> {
    let one = |i: usize| (0..k).map(|l| a(i / n, l) * b(l, i % n)).sum();
    (0..m * n).map(one).collect()
}

/// The same steps in f64, nothing rounded: losses, and each layer's weights and biases.
fn reference([x, target, w1, w2]: [&[f32]; 4]) -> (Vec<f64>, [[Vec<f64>; 2]; 2]) {
    let wide = |values: &[f32]| values.iter().map(|&v| f64::from(v)).collect::<Vec<f64>>();
    let (x, target) = (wide(x), wide(target));
    let mut layers = [[wide(w1), vec![0.0; HIDDEN]], [wide(w2), vec![0.0; OUTPUTS]]];
    let sigmoid = |v: f64| 1.0 / (1.0 + (-v).exp());
    let mut losses = Vec::new();
    for _ in 0..STEPS {
        let [[w1, b1], [w2, b2]] = &layers;
        let z = product([TOKENS, HIDDEN, INPUTS], |t, k| x[t * INPUTS + k], |k, h| w1[h * INPUTS + k]);
        let z: Vec<f64> = z.iter().enumerate().map(|(i, z)| z + b1[i % HIDDEN]).collect();
        let hidden: Vec<f64> = z.iter().map(|&z| z * sigmoid(z)).collect();
        let y = product([TOKENS, OUTPUTS, HIDDEN], |t, h| hidden[t * HIDDEN + h], |h, o| w2[o * HIDDEN + h]);
        let left: Vec<f64> = y.iter().enumerate().map(|(i, y)| y + b2[i % OUTPUTS] - target[i]).collect();
        losses.push(left.iter().map(|v| v * v).sum::<f64>() / 2.0);
        let dh = product([TOKENS, HIDDEN, OUTPUTS], |t, o| left[t * OUTPUTS + o], |o, h| w2[o * HIDDEN + h]);
        let slope = |z: f64| sigmoid(z) + z * sigmoid(z) * (1.0 - sigmoid(z));
        let dz: Vec<f64> = dh.iter().zip(&z).map(|(dh, &z)| dh * slope(z)).collect();
        let descended = |[w, b]: &[Vec<f64>; 2], [n, k]: [usize; 2], dy: &[f64], x: &[f64]| {
            let dw = product([n, k, TOKENS], |n_, t| dy[t * n + n_], |t, k_| x[t * k + k_]);
            let db = product([1, n, TOKENS], |_, _| 1.0, |t, n_| dy[t * n + n_]);
            let descend = |v: &[f64], d: &[f64]| v.iter().zip(d).map(|(v, d)| v - f64::from(RATE) * d).collect();
            [descend(w, &dw), descend(b, &db)]
        };
        layers = [
            descended(&layers[0], [HIDDEN, INPUTS], &dz, &x),
            descended(&layers[1], [OUTPUTS, HIDDEN], &left, &hidden),
        ];
    }
    (losses, layers)
}

fn learns_on(device: &str) {
    let ctx = match Context::open(device) {
        Ok(ctx) => ctx,
        Err(why) => return qgemm_testkit::skipped(&format!("training on {device}"), &why.to_string()),
    };
    let scaled = |values: Vec<f32>| values.into_iter().map(|v| v * 0.25).collect::<Vec<f32>>();
    let (x, target) = (numbers(TOKENS * INPUTS, 1), numbers(TOKENS * OUTPUTS, 2));
    let (w1, w2) = (scaled(numbers(HIDDEN * INPUTS, 3)), scaled(numbers(OUTPUTS * HIDDEN, 4)));
    let (losses, layers) = train(&ctx, [&x, &target, &w1, &w2]);
    let (expected_losses, expected) = reference([&x, &target, &w1, &w2]);
    assert!(losses.windows(2).all(|pair| pair[1] < pair[0]), "{device}: {losses:?}");
    for (loss, expected) in losses.iter().zip(&expected_losses) {
        assert!((loss / expected - 1.0).abs() < 0.02, "{device}: {losses:?}, expected {expected_losses:?}");
    }
    // What was learned, beside what rounding operands to bf16 costs.
    for (i, (layer, expected)) in layers.iter().zip(&expected).enumerate() {
        let before: [Vec<f32>; 2] = [[&w1, &w2][i].clone(), vec![0.0; layer[1].len()]];
        for ((got, expected), before) in layer.iter().zip(expected).zip(&before) {
            let square = |values: &mut dyn Iterator<Item = f64>| values.map(|v| v * v).sum::<f64>();
            let off = square(&mut got.iter().zip(expected).map(|(&got, expected)| f64::from(got) - expected));
            let learned =
                square(&mut expected.iter().zip(before).map(|(expected, &before)| expected - f64::from(before)));
            assert!(off < 1e-3 * learned, "{device}, layer {i}: off by {off} of {learned}");
        }
    }
}

#[test]
fn a_perceptron_learns_on_the_cpu() {
    learns_on("cpu");
}

#[test]
fn a_perceptron_learns_on_wgpu() {
    learns_on("wgpu:0");
}

#[test]
fn a_perceptron_learns_on_a_gpu() {
    learns_on("cuda:0");
}

#[test]
fn a_perceptron_learns_on_emulated_gpus() {
    for device in ["emu:sm70", "emu:sm75", "emu:sm80", "emu:sm90"] {
        learns_on(device);
    }
}
