//! Drift of 32 norms and products against f64. With f32
//! statistics the residual stream is accurate; with f16
//! statistics it is not.

use qgemm_api::{Args, Context, DType, NormFunction, Problem, WeightOrder, XPrecision, half::f16};

const LAYERS: usize = 32;
const FEATURES: usize = 256;
const TOKENS: usize = 3;
const EPS: f32 = 1e-6;
/// Relative energy of the error. f32 statistics have
/// a hundredth of it, f16 statistics a hundred times it.
const LIMIT: f64 = 1e-9;

/// Values between -1 and 1, exact in f16.
fn values(count: usize, seed: u32) -> Vec<f32> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        f16::from_f32((state >> 8) as f32 / (1u32 << 23) as f32 - 1.0).to_f32()
    };
    (0..count).map(|_| next()).collect()
}

/// `x += rmsnorm(x) · Wᵀ`, with the mean square by `mean`.
fn layer(x: &mut [f64], w: &[f32], gamma: &[f32], mean: impl Fn(&[f64]) -> f64) {
    for row in x.chunks_exact_mut(FEATURES) {
        let inverse = 1.0 / (mean(row) + f64::from(EPS)).sqrt();
        let normed: Vec<f64> = row.iter().zip(gamma).map(|(x, &gamma)| x * inverse * f64::from(gamma)).collect();
        for (x, w) in row.iter_mut().zip(w.chunks_exact(FEATURES)) {
            *x += w.iter().zip(&normed).map(|(&w, x)| f64::from(w) * x).sum::<f64>();
        }
    }
}

fn mean_in_f64(row: &[f64]) -> f64 {
    row.iter().map(|x| x * x).sum::<f64>() / row.len() as f64
}

/// Mean square of a kernel that sums squares in f16.
fn mean_in_f16(row: &[f64]) -> f64 {
    let sum = row.iter().fold(f16::ZERO, |sum, &x| f16::from_f64(sum.to_f64() + f16::from_f64(x * x).to_f64()));
    sum.to_f64() / row.len() as f64
}

fn error(got: &[f64], expected: &[f64]) -> f64 {
    let difference: f64 = got.iter().zip(expected).map(|(got, expected)| (got - expected).powi(2)).sum();
    difference / expected.iter().map(|x| x * x).sum::<f64>()
}

#[test]
fn statistics_in_f32_do_not_drift() {
    let ctx = Context::open("cpu").expect("always there");
    let x = values(TOKENS * FEATURES, 1);
    let gammas: Vec<Vec<f32>> = (0..LAYERS).map(|layer| values(FEATURES, 100 + layer as u32)).collect();
    let scaled = |layer: usize| {
        let w = values(FEATURES * FEATURES, 1000 + layer as u32);
        w.into_iter().map(|w| f16::from_f32(w * 0.0625).to_f32()).collect::<Vec<f32>>()
    };
    let weights: Vec<Vec<f32>> = (0..LAYERS).map(scaled).collect();

    let mut exact: Vec<f64> = x.iter().map(|&x| f64::from(x)).collect();
    let mut in_f16 = exact.clone();
    for (w, gamma) in weights.iter().zip(&gammas) {
        layer(&mut exact, w, gamma, mean_in_f64);
        layer(&mut in_f16, w, gamma, mean_in_f16);
    }

    let stream = ctx.default_stream();
    let mut d = ctx.upload(&x).expect("memory");
    for (w, gamma) in weights.iter().zip(&gammas) {
        let bytes = DType::F16.encode(w);
        let weight = ctx.load_dense(&bytes, DType::F16, FEATURES, FEATURES, WeightOrder::NK).expect("memory");
        let problem = Problem::new(&weight, TOKENS)
            .norm(NormFunction::rms(EPS).gamma(DType::F32))
            .x_precision(XPrecision::Exact)
            .residual_in_d();
        let plan = ctx.plan(&problem).expect("served");
        let (before, gamma) = (ctx.upload(&ctx.download::<f32>(&d).expect("there")), ctx.upload(gamma));
        let (before, gamma) = (before.expect("memory"), gamma.expect("memory"));
        let mut workspace = ctx.workspace(plan.workspace_bytes()).expect("memory");
        let args = Args::new(&before, &weight, &mut d).gamma(&gamma).workspace(&mut workspace);
        plan.run(&stream, args).expect("fits");
    }
    let got: Vec<f64> = ctx.download::<f32>(&d).expect("there").into_iter().map(f64::from).collect();
    let (of_f32, of_f16) = (error(&got, &exact), error(&in_f16, &exact));
    assert!(of_f32 <= LIMIT, "{of_f32:e}");
    assert!(of_f16 > LIMIT, "f16 statistics would pass: {of_f16:e}");
}
