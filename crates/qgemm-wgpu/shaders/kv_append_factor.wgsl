// E4M3 cache: a number times the inverse of its head's
// factor. Infinities and NaN are detected by their bits.

@group(0) @binding(8) var<storage, read> factors: array<u32>;

const INFINITY: u32 = 0x7f800000u;
const MAGNITUDE: u32 = 0x7fffffffu;

// Bits of 1 /
// factor
// ; infinity or 0 where factor or inverse is subnormal.
fn inverse_of(factor: u32) -> u32 {
    let magnitude = factor & MAGNITUDE;
    if (magnitude > INFINITY) {
        return magnitude;
    }
    if (magnitude < 0x800000u || magnitude > 0x7e800000u) {
        return select(0u, INFINITY, magnitude < 0x800000u);
    }
    return reciprocal(magnitude);
}

// Bits of
// x
// · inverse: NaN if the product is undefined, infinity on overflow.
fn product_of(x: f32, inverse: u32) -> u32 {
    let magnitude = bitcast<u32>(x) & MAGNITUDE;
    let larger = max(magnitude, inverse);
    if (larger > INFINITY || (larger == INFINITY && min(magnitude, inverse) == 0u)) {
        return MAGNITUDE;
    }
    if (larger == INFINITY) {
        return INFINITY;
    }
    return min(bitcast<u32>(bitcast<f32>(magnitude) * bitcast<f32>(inverse)), INFINITY);
}

fn four_codes(x: vec4<f32>, inverse: u32, sign: u32) -> u32 {
    let products =
        vec4<u32>(product_of(x.x, inverse), product_of(x.y, inverse), product_of(x.z, inverse), product_of(x.w, inverse));
    let finite = to_e4m3(bitcast<vec4<f32>>(min(products, vec4<u32>(0x7f7fffffu))));
    let signs = ((bitcast<vec4<u32>>(x) ^ vec4<u32>(sign)) >> vec4<u32>(31u)) << vec4<u32>(7u);
    let codes = select(finite | signs, vec4<u32>(0x7fu), products > vec4<u32>(INFINITY));
    return codes.x | (codes.y << 8u) | (codes.z << 16u) | (codes.w << 24u);
}

fn encoded(x: Eight, head: u32, at: u32, is_there: bool, thread: u32) -> vec2<u32> {
    if (!is_there) {
        return vec2<u32>();
    }
    let factor = factors[p.scales_base + head];
    let inverse = inverse_of(factor);
    return vec2<u32>(four_codes(x.lo, inverse, factor), four_codes(x.hi, inverse, factor));
}
