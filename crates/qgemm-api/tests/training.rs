//! Training of a two-layer perceptron by library operations alone: f32 master
//! weights, products of a bf16 copy.
//!
//! The loss must fall. The learned weights must match those of an f64 reference,
//! for gradient descent and for AdamW.

use qgemm_api::{
    Activation, Buffer, Context, Conversion, ConversionArgs, DType, Matmul, MatmulArgs, Optimizer, OptimizerArgs,
    OptimizerStep, UpdateRule,
};

const TOKENS: usize = 24;
const INPUTS: usize = 40;
const HIDDEN: usize = 32;
const OUTPUTS: usize = 8;
const STEPS: usize = 4;
const RATE: f32 = 0.02;
const ACTIVATION: Activation = Activation::Silu;
const DECAY: f32 = 0.1;
/// Epsilon is large enough that small gradients move parameters little. Otherwise
/// their rounded signs would decide.
const ADAMW: [f32; 3] = [0.9, 0.99, 0.1];

/// Optimizer of the parameters.
#[derive(Clone, Copy, PartialEq)]
enum Descent {
    /// Gradient descent by an accumulating product.
    Product,
    /// AdamW with weight decay, which also writes the copy.
    AdamW,
}

/// Numbers in [-1, 1) without a pattern, exact in bf16.
fn numbers(count: usize, seed: u32) -> Vec<f32> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        f32::from((state >> 24) as u8 as i8) / 128.0
    };
    (0..count).map(|_| next()).collect()
}

/// Master weights and biases of a layer, and the copy that products read.
struct Layer {
    outputs: usize,
    inputs: usize,
    weights: Buffer,
    bias: Buffer,
    copy: Buffer,
    descent: Descent,
    /// First and second moments of weights and biases.
    moments: [[Buffer; 2]; 2],
}

impl Layer {
    fn new(ctx: &Context, outputs: usize, inputs: usize, weights: &[f32], descent: Descent) -> Self {
        let upload = |values: &[f32]| ctx.upload(&DType::F32.encode(values)).expect("fits");
        let copy = ctx.allocate(outputs * inputs * DType::BF16.bytes()).expect("fits");
        let moments = [outputs * inputs, outputs].map(|len| [(); 2].map(|()| upload(&vec![0.0; len])));
        let (weights, bias) = (upload(weights), upload(&vec![0.0; outputs]));
        Self { outputs, inputs, weights, bias, copy, descent, moments }
    }

    /// Refreshes the copy.
    fn round(&mut self, ctx: &Context) {
        let plan = ctx.plan_conversion(&Conversion::new(self.outputs, self.inputs, DType::F32, DType::BF16));
        let args = ConversionArgs::new(&self.weights, &mut self.copy);
        plan.expect("is served").run(&ctx.default_stream(), args).expect("runs");
    }

    /// Optimizer step `step`: weights by `dYᵀ·X`, biases by
    /// `Σ dY`, with dY and X in bf16.
    fn descend(&mut self, ctx: &Context, dy: &Buffer, x: &Buffer, ones: &Buffer, step: u64) {
        let shape = [self.outputs, self.inputs, TOKENS];
        let of_weights = Matmul::new(shape, DType::BF16, DType::BF16, DType::F32).a_transposed();
        let of_bias = Matmul::new([1, self.outputs, TOKENS], DType::BF16, DType::BF16, DType::F32);
        if self.descent == Descent::Product {
            multiply(ctx, &of_weights.alpha(-RATE).accumulate(1.0), MatmulArgs::new(dy, x, &mut self.weights));
            multiply(ctx, &of_bias.alpha(-RATE).accumulate(1.0), MatmulArgs::new(ones, dy, &mut self.bias));
            return;
        }
        let [mut dw, mut db] =
            [self.outputs * self.inputs, self.outputs].map(|len| ctx.allocate(len * DType::F32.bytes()).expect("fits"));
        multiply(ctx, &of_weights, MatmulArgs::new(dy, x, &mut dw));
        multiply(ctx, &of_bias, MatmulArgs::new(ones, dy, &mut db));
        let [beta1, beta2, eps] = ADAMW;
        let adamw = |len| Optimizer::adamw(len).rule(UpdateRule::AdamW { beta1, beta2, eps });
        let stream = ctx.default_stream();
        let plan = ctx.plan_optimizer(&adamw(self.outputs * self.inputs).copy(DType::BF16)).expect("is served");
        let numbers = plan.step(&OptimizerStep::new(step, RATE).weight_decay(DECAY)).expect("finite");
        let numbers = ctx.upload(&numbers).expect("fits");
        let [[m, v], [bias_m, bias_v]] = &mut self.moments;
        let args = OptimizerArgs::new(&mut self.weights, &dw, &numbers).moment1(m).moment2(v).copy(&mut self.copy);
        plan.run(&stream, args).expect("runs");
        let plan = ctx.plan_optimizer(&adamw(self.outputs)).expect("is served");
        let args = OptimizerArgs::new(&mut self.bias, &db, &numbers).moment1(bias_m).moment2(bias_v);
        plan.run(&stream, args).expect("runs");
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

/// Loss before each step, and the layers' values after the last.
fn train(ctx: &Context, descent: Descent, [x, target, w1, w2]: [&[f32]; 4]) -> (Vec<f64>, [[Vec<f32>; 2]; 2]) {
    let half = |values: &[f32]| ctx.upload(&DType::BF16.encode(values)).expect("fits");
    let buffer = |values: usize, dtype: DType| ctx.allocate(values * dtype.bytes()).expect("fits");
    let (x, ones) = (half(x), half(&[1.0; TOKENS]));
    let target = ctx.upload(&DType::F32.encode(target)).expect("fits");
    let mut layers = [Layer::new(ctx, HIDDEN, INPUTS, w1, descent), Layer::new(ctx, OUTPUTS, HIDDEN, w2, descent)];
    let (mut z, mut hidden) = (buffer(TOKENS * HIDDEN, DType::F32), buffer(TOKENS * HIDDEN, DType::BF16));
    let (mut residual, mut dz) = (buffer(TOKENS * OUTPUTS, DType::BF16), buffer(TOKENS * HIDDEN, DType::BF16));
    let mut losses = Vec::new();
    for step in 1..=STEPS as u64 {
        if descent == Descent::Product || step == 1 {
            layers.iter_mut().for_each(|layer| layer.round(ctx));
        }
        let [first, second] = &mut layers;
        let forward = |shape, d| Matmul::new(shape, DType::BF16, DType::BF16, d).b_transposed().bias(DType::F32);
        let of_first = [TOKENS, HIDDEN, INPUTS];
        multiply(ctx, &forward(of_first, DType::F32), MatmulArgs::new(&x, &first.copy, &mut z).bias(&first.bias));
        let activated = forward(of_first, DType::BF16).activation(ACTIVATION);
        multiply(ctx, &activated, MatmulArgs::new(&x, &first.copy, &mut hidden).bias(&first.bias));
        // Output minus target, the gradient of half the squared error.
        let left = forward([TOKENS, OUTPUTS, HIDDEN], DType::BF16).c(-1.0, DType::F32);
        let args = MatmulArgs::new(&hidden, &second.copy, &mut residual).c(&target).bias(&second.bias);
        multiply(ctx, &left, args);
        let values = DType::BF16.decode(&ctx.download(&residual).expect("fits"));
        losses.push(values.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>() / 2.0);
        // Backward through the second layer and the activation; then
        // both layers are updated.
        let back = Matmul::new([TOKENS, HIDDEN, OUTPUTS], DType::BF16, DType::BF16, DType::BF16);
        let back = back.through(ACTIVATION, DType::F32);
        multiply(ctx, &back, MatmulArgs::new(&residual, &second.copy, &mut dz).c(&z));
        second.descend(ctx, &residual, &hidden, &ones, step);
        first.descend(ctx, &dz, &x, &ones, step);
    }
    (losses, layers.each_ref().map(|layer| layer.values(ctx)))
}

/// `A·B` of row-major matrices `[m, k]` and `[k, n]`, in f64.
fn product([m, n, k]: [usize; 3], a: impl Fn(usize, usize) -> f64, b: impl Fn(usize, usize) -> f64) -> Vec<f64> {
    let one = |i: usize| (0..k).map(|l| a(i / n, l) * b(l, i % n)).sum();
    (0..m * n).map(one).collect()
}

/// The same steps in f64 without rounding: losses, and each
/// layer's weights and biases.
fn reference(descent: Descent, [x, target, w1, w2]: [&[f32]; 4]) -> (Vec<f64>, [[Vec<f64>; 2]; 2]) {
    let wide = |values: &[f32]| values.iter().map(|&v| f64::from(v)).collect::<Vec<f64>>();
    let (x, target) = (wide(x), wide(target));
    let mut layers = [[wide(w1), vec![0.0; HIDDEN]], [wide(w2), vec![0.0; OUTPUTS]]];
    // First and second moments of all parameters.
    let mut moments = layers.clone().map(|layer| layer.map(|values| vec![[0.0f64; 2]; values.len()]));
    let sigmoid = |v: f64| 1.0 / (1.0 + (-v).exp());
    let mut losses = Vec::new();
    for step in 1..=STEPS {
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
        let gradients = |[n, k]: [usize; 2], dy: &[f64], x: &[f64]| {
            let dw = product([n, k, TOKENS], |n_, t| dy[t * n + n_], |t, k_| x[t * k + k_]);
            let db = product([1, n, TOKENS], |_, _| 1.0, |t, n_| dy[t * n + n_]);
            [dw, db]
        };
        let all = [gradients([HIDDEN, INPUTS], &dz, &x), gradients([OUTPUTS, HIDDEN], &left, &hidden)];
        for ((layer, moments), gradients) in layers.iter_mut().zip(&mut moments).zip(&all) {
            for ((values, moments), gradient) in layer.iter_mut().zip(moments).zip(gradients) {
                for ((value, moments), g) in values.iter_mut().zip(moments).zip(gradient) {
                    *value -= f64::from(RATE) * update(descent, step, *value, moments, *g);
                }
            }
        }
    }
    (losses, layers)
}

/// Update of a parameter in units of the rate. It also updates the moments.
fn update(descent: Descent, step: usize, value: f64, [m, v]: &mut [f64; 2], g: f64) -> f64 {
    if descent == Descent::Product {
        return g;
    }
    let [beta1, beta2, eps] = ADAMW.map(f64::from);
    *m = beta1 * *m + (1.0 - beta1) * g;
    *v = beta2 * *v + (1.0 - beta2) * g * g;
    let corrected = |moment: f64, beta: f64| moment / (1.0 - beta.powi(step as i32));
    corrected(*m, beta1) / (corrected(*v, beta2).sqrt() + eps) + f64::from(DECAY) * value
}

fn learns_on(device: &str) {
    for descent in [Descent::Product, Descent::AdamW] {
        learns_by(device, descent);
    }
}

fn learns_by(device: &str, descent: Descent) {
    let ctx = match Context::open(device) {
        Ok(ctx) => ctx,
        Err(why) => return qgemm_testkit::skipped(&format!("training on {device}"), &why.to_string()),
    };
    let scaled = |values: Vec<f32>| values.into_iter().map(|v| v * 0.25).collect::<Vec<f32>>();
    let (x, target) = (numbers(TOKENS * INPUTS, 1), numbers(TOKENS * OUTPUTS, 2));
    let (w1, w2) = (scaled(numbers(HIDDEN * INPUTS, 3)), scaled(numbers(OUTPUTS * HIDDEN, 4)));
    let (losses, layers) = train(&ctx, descent, [&x, &target, &w1, &w2]);
    let (expected_losses, expected) = reference(descent, [&x, &target, &w1, &w2]);
    assert!(losses.windows(2).all(|pair| pair[1] < pair[0]), "{device}: {losses:?}");
    for (loss, expected) in losses.iter().zip(&expected_losses) {
        assert!((loss / expected - 1.0).abs() < 0.02, "{device}: {losses:?}, expected {expected_losses:?}");
    }
    // The difference must be explained by rounding operands to bf16.
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
