// Q8_0 and Q4_0 cache: four invocations share a block and find its
// scale together. Each step is rounded separately, as on the CPU.

@group(0) @binding(8) var<storage, read_write> scales: array<atomic<u32>>;

// Below this magnitude, scales are 0 in f16
// anyway, and their inverses might overflow.
const LEAST: f32 = 0x1p-100f;

// Maximum and minimum of each invocation's eight numbers and 0.
var<workgroup> extremes: array<vec2<f32>, THREADS>;

// Stores the scale of a block; the
// word's other half keeps its bits.
fn store_scale(block: u32, scale: f32) {
    let index = p.scales_base + block;
    let shift = index % 2u * 16u;
    atomicAnd(&scales[index / 2u], ~(0xffffu << shift));
    atomicOr(&scales[index / 2u], f32_to_f16(scale) << shift);
}

fn signed_bytes(x: vec4<f32>, factor: f32) -> u32 {
    let codes = bitcast<vec4<u32>>(vec4<i32>(round(x * factor))) & vec4<u32>(0xffu);
    return codes.x | (codes.y << 8u) | (codes.z << 16u) | (codes.w << 24u);
}

fn nibbles(x: vec4<f32>, factor: f32) -> u32 {
    // Sets a bit that `p.tokens` never has, so that
    // adapters cannot fuse the product and the sum.
    let products = bitcast<vec4<f32>>(bitcast<vec4<u32>>(x * factor) | vec4<u32>(p.tokens & 0x80000000u));
    let codes = min(vec4<u32>(products + 8.5), vec4<u32>(15u));
    return codes.x | (codes.y << 4u) | (codes.z << 8u) | (codes.w << 12u);
}

fn encoded(x: Eight, head: u32, at: u32, is_there: bool, thread: u32) -> vec2<u32> {
    let four_high = max(max(x.lo, x.hi), vec4<f32>());
    let four_low = min(min(x.lo, x.hi), vec4<f32>());
    extremes[thread] = vec2<f32>(
        max(max(four_high.x, four_high.y), max(four_high.z, four_high.w)),
        min(min(four_low.x, four_low.y), min(four_low.z, four_low.w)),
    );
    workgroupBarrier();
    var high = 0.0;
    var low = 0.0;
    for (var i = 0u; i < KV_BLOCK / 8u; i++) {
        let of_eight = extremes[thread / (KV_BLOCK / 8u) * (KV_BLOCK / 8u) + i];
        high = max(high, of_eight.x);
        low = min(low, of_eight.y);
    }
    let magnitude = max(high, -low);
    let is_zero = magnitude < LEAST;
    // Above 2^126, scales are infinite in f16.
    let inverse = bitcast<f32>(reciprocal(bitcast<u32>(select(min(magnitude, 0x1p126f), 1.0, is_zero))));
    var scale: f32;
    var codes: vec2<u32>;
    if (KV_DTYPE == KV_Q8_0) {
        scale = magnitude * bitcast<f32>(0x3c010204u);  // 1 / 127
        let factor = select(127.0 * inverse, 0.0, is_zero);
        codes = vec2<u32>(signed_bytes(x.lo, factor), signed_bytes(x.hi, factor));
    } else {
        // The number of largest magnitude becomes -8.
        let furthest = select(low, high, high > -low);
        scale = furthest * -0.125;
        let factor = select(select(8.0, -8.0, furthest > 0.0) * inverse, 0.0, is_zero);
        codes = vec2<u32>(nibbles(x.lo, factor) | (nibbles(x.hi, factor) << 16u), 0u);
    }
    if (is_there && at % KV_BLOCK == 0u) {
        store_scale(at / KV_BLOCK, select(scale, 0.0, is_zero));
    }
    return codes;
}
