//! Floating-point numbers: factors, shares, frequencies.

use qgemm_api::{
    Attention, Context, DType, Error, Gradient, Keys, KvAppend, Matmul, Norm, NormFunction, Optimizer, OptimizerStep,
    Problem, Queries, Rotary, RotaryScaling, Routing, UpdateRule,
};

use crate::weight;

/// Tries floating-point numbers. Those in `refused` must be refused.
fn try_floats(name: &str, refused: fn(f32) -> bool, attempt: impl Fn(f32) -> Result<(), Error>) {
    let numbers =
        [0.0, -0.0, 1.0, -1.0, f32::MAX, f32::MIN_POSITIVE, 1e-45, f32::INFINITY, f32::NEG_INFINITY, f32::NAN];
    for number in numbers {
        let result = attempt(number);
        assert_eq!(result.is_err(), refused(number), "{name} = {number}: {result:?}");
    }
}

#[test]
fn factors() {
    let ctx = Context::open("cpu").expect("always there");
    let weight = weight(&ctx);
    let not_finite: fn(f32) -> bool = |number| !number.is_finite();
    try_floats("Problem.alpha", not_finite, |v| ctx.plan(&Problem::new(&weight, 1).alpha(v)).map(drop));
    try_floats("Problem.c.beta", not_finite, |v| ctx.plan(&Problem::new(&weight, 1).c(v, DType::F32)).map(drop));
    let matmul = || Matmul::new([2, 2, 2], DType::F32, DType::F32, DType::F32);
    try_floats("Matmul.alpha", not_finite, |v| ctx.plan_matmul(&matmul().alpha(v)).map(drop));
    try_floats("Matmul.c.beta", not_finite, |v| ctx.plan_matmul(&matmul().c(v, DType::F32)).map(drop));
    try_floats("Matmul.accumulate", not_finite, |v| ctx.plan_matmul(&matmul().accumulate(v)).map(drop));
    let gradient = || Gradient::new(1, DType::F32, DType::F32);
    try_floats("Gradient.alpha", not_finite, |v| ctx.plan_gradient(&weight, &gradient().alpha(v)).map(drop));
    try_floats("Gradient.accumulate", not_finite, |v| ctx.plan_gradient(&weight, &gradient().accumulate(v)).map(drop));
    let routing = || Routing::from_logits(1, 4, 2, DType::F32);
    try_floats("Routing.scale", not_finite, |v| ctx.plan_routing(&routing().scale(v)).map(drop));
    let attention = || Attention::new(DType::F32, 1, 1, 8, Queries::each(1, 1), Keys::each(1));
    try_floats("Attention.scale", not_finite, |v| ctx.plan_attention(&attention().scale(v)).map(drop));
    let not_positive: fn(f32) -> bool = |number| !(number.is_finite() && number > 0.0);
    try_floats("Attention.soft_cap", not_positive, |v| ctx.plan_attention(&attention().soft_cap(v)).map(drop));
    let negative: fn(f32) -> bool = |number| !(number.is_finite() && number >= 0.0);
    let norm = |eps| Norm::new(1, 4, DType::F32, NormFunction::rms(eps));
    try_floats("NormFunction.eps", negative, |v| ctx.plan_norm(&norm(v)).map(drop));
    let normed = |eps| Problem::new(&weight, 1).norm(NormFunction::layer(eps));
    try_floats("Problem.norm.eps", negative, |v| ctx.plan(&normed(v)).map(drop));
    let no_share: fn(f32) -> bool = |number| !(0.0..1.0).contains(&number);
    let adamw = |beta1, beta2, eps| Optimizer::adamw(2).rule(UpdateRule::AdamW { beta1, beta2, eps });
    try_floats("AdamW.beta1", no_share, |v| ctx.plan_optimizer(&adamw(v, 0.9, 0.0)).map(drop));
    try_floats("AdamW.beta2", no_share, |v| ctx.plan_optimizer(&adamw(0.9, v, 0.0)).map(drop));
    try_floats("AdamW.eps", negative, |v| ctx.plan_optimizer(&adamw(0.9, 0.9, v)).map(drop));
    let sgd = |momentum| Optimizer::sgd(2).rule(UpdateRule::Sgd { momentum });
    try_floats("Sgd.momentum", no_share, |v| ctx.plan_optimizer(&sgd(v)).map(drop));
    let plan = ctx.plan_optimizer(&Optimizer::adamw(2)).expect("valid");
    try_floats("OptimizerStep.rate", not_finite, |v| plan.step(&OptimizerStep::new(1, v)).map(drop));
    let step = OptimizerStep::new(u64::MAX, 0.1);
    try_floats("OptimizerStep.weight_decay", not_finite, |v| plan.step(&step.weight_decay(v)).map(drop));
    try_floats("OptimizerStep.gradient_scale", not_finite, |v| plan.step(&step.gradient_scale(v)).map(drop));
    for number in [0, 1, 2, 1 << 31, u64::MAX] {
        let factors = plan.step(&OptimizerStep::new(number, 0.1));
        assert_eq!(factors.is_err(), number == 0, "OptimizerStep.number = {number}");
        assert!(factors.is_ok_and(|all| all.iter().all(|v| v.is_finite())) || number == 0);
    }
    let append = |rotary| KvAppend::new(DType::F32, 1, 1, 8, Queries::each(1, 1), Keys::each(1)).rotary(rotary);
    let neox = Rotary::neox(8);
    try_floats("Rotary.amplitude", not_finite, |v| ctx.plan_kv_append(&append(neox.amplitude(v))).map(drop));
}

#[test]
fn rotary_numbers() {
    let ctx = Context::open("cpu").expect("always there");
    let planned = |rotary| {
        let append = KvAppend::new(DType::F32, 1, 1, 8, Queries::each(1, 1), Keys::each(1)).rotary(rotary);
        ctx.plan_kv_append(&append).map(drop)
    };
    let numbers = [0.0, 1.0, -1.0, 0.5, 4.0, f64::MAX, f64::MIN_POSITIVE, 5e-324, f64::INFINITY, f64::NAN];
    let of = Rotary::neox(8);
    for v in numbers {
        let refused = [
            ("base", !(v.is_finite() && v >= 1.0), of.base(v)),
            // A factor close to 0 makes frequencies overflow.
            (
                "Linear.factor",
                !(v.is_finite() && v >= f64::MIN_POSITIVE),
                of.scaling(RotaryScaling::Linear { factor: v }),
            ),
            (
                "Llama3.factor",
                !(v.is_finite() && v > 0.0),
                of.scaling(RotaryScaling::Llama3 { factor: v, low: 1.0, high: 4.0, original: 8192 }),
            ),
            (
                "Llama3.low",
                !(v > 0.0 && v < 4.0),
                of.scaling(RotaryScaling::Llama3 { factor: 8.0, low: v, high: 4.0, original: 8192 }),
            ),
            (
                "Llama3.high",
                !(v.is_finite() && v > 1.0),
                of.scaling(RotaryScaling::Llama3 { factor: 8.0, low: 1.0, high: v, original: 8192 }),
            ),
            (
                "Yarn.fast",
                !(v.is_finite() && v > 1.0),
                of.scaling(RotaryScaling::Yarn { factor: 8.0, fast: v, slow: 1.0, original: 8192, truncate: true }),
            ),
            (
                "Yarn.slow",
                !(v > 0.0 && v < 32.0),
                of.scaling(RotaryScaling::Yarn { factor: 8.0, fast: 32.0, slow: v, original: 8192, truncate: true }),
            ),
        ];
        for (name, expected, rotary) in refused {
            let result = planned(rotary);
            let is_doubtful = name == "Llama3.factor" && v > 0.0 && v < 1e-300;
            assert!(is_doubtful || result.is_err() == expected, "RotaryScaling::{name} = {v}: {result:?}");
        }
    }
    for original in [0, 1, usize::MAX] {
        planned(of.scaling(RotaryScaling::Llama3 { factor: 8.0, low: 1.0, high: 4.0, original })).expect("positions");
        planned(of.scaling(RotaryScaling::Yarn { factor: 8.0, fast: 32.0, slow: 1.0, original, truncate: true }))
            .expect("positions");
    }
    for dim in [0, 1, 2, 3, 8, 10, usize::MAX - 1, usize::MAX] {
        for rotary in [Rotary::neox(dim), Rotary::interleaved(dim), Rotary::neox(dim).tables(4)] {
            let result = planned(rotary);
            assert_eq!(result.is_err(), !matches!(dim, 2 | 8), "Rotary.dim = {dim}: {result:?}");
        }
    }
    for positions in [0, 1, u32::MAX as usize, 1 << 32, usize::MAX] {
        let result = planned(of.tables(positions));
        assert_eq!(result.is_err(), positions > u32::MAX as usize, "Rotary.tables = {positions}: {result:?}");
    }
    for stride in [0, 3, 4, 1 << 60, u64::MAX] {
        let result = planned(of.tables(3).table_row_stride(stride));
        assert_eq!(result.is_err(), !(4..1 << 60).contains(&stride), "Rotary.table_row_stride = {stride}: {result:?}");
    }
}
