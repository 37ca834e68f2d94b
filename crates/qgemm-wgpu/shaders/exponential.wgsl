// Exponential function by a polynomial, because the built-in one
// may be off by several units in the last place.

// exp(x) for x ≤ 0.
// It is 0 below -87, where results would be subnormal.
// The reduction to multiples of 1/4 is exact in any evaluation
// order; CUDA's two-step reduction is not.
fn exp_nonpositive(x: f32) -> f32 {
    let bounded = max(x, -88.0);
    let quarters = round(bounded * -4.0);
    let r = bounded + quarters * 0.25;
    let bits = vec4<u32>(u32(quarters));
    let low = select(vec4<f32>(1.0), vec4<f32>(0.778800783, 0.606530660, 0.367879441, 0.135335283),
                     (bits & vec4<u32>(1u, 2u, 4u, 8u)) != vec4<u32>());
    let high = select(vec4<f32>(1.0), vec4<f32>(1.83156389e-2, 3.35462628e-4, 1.12535175e-7, 1.26641655e-14),
                      (bits & vec4<u32>(16u, 32u, 64u, 128u)) != vec4<u32>());
    let highest = select(1.0, 1.60381089e-28, bits.x >= 256u);
    let power = low.x * low.y * low.z * low.w * (high.x * high.y * high.z * high.w) * highest;
    var q = 8.33333333e-3;
    q = q * r + 4.16666667e-2;
    q = q * r + 0.166666667;
    q = q * r + 0.5;
    let fraction = q * r * r + r + 1.0;
    return select(0.0, fraction * power, x > -87.0);
}
