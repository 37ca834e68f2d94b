// E4M3: what a number is over its head's factor. NaN and infinities are told by their bits.

@group(0) @binding(8) var<storage, read> factors: array<u32>;

const INFINITY: u32 = 0x7f800000u;
const MAGNITUDE: u32 = 0x7fffffffu;

// The bits of |x| over a factor: of NaN where there is none, and of infinity beyond all numbers.
fn share_of(x: f32, factor: u32) -> u32 {
    let a = bitcast<u32>(x) & MAGNITUDE;
    let b = factor & MAGNITUDE;
    if (max(a, b) > INFINITY || (a == b && (a == 0u || a == INFINITY))) {
        return MAGNITUDE;
    }
    if (a == INFINITY || b == 0u) {
        return INFINITY;
    }
    if (b == INFINITY) {
        return 0u;
    }
    return quotient(a, b);
}

fn four_codes(x: vec4<f32>, factor: u32) -> u32 {
    let shares = vec4<u32>(share_of(x.x, factor), share_of(x.y, factor), share_of(x.z, factor), share_of(x.w, factor));
    let finite = to_e4m3(bitcast<vec4<f32>>(min(shares, vec4<u32>(0x7f7fffffu))));
    let signs = ((bitcast<vec4<u32>>(x) ^ vec4<u32>(factor)) >> vec4<u32>(31u)) << vec4<u32>(7u);
    let codes = select(finite | signs, vec4<u32>(0x7fu), shares > vec4<u32>(INFINITY));
    return codes.x | (codes.y << 8u) | (codes.z << 16u) | (codes.w << 24u);
}

fn encoded(x: Eight, head: u32, at: u32, is_there: bool, thread: u32) -> vec2<u32> {
    if (!is_there) {
        return vec2<u32>();
    }
    let factor = factors[p.scales_base + head];
    return vec2<u32>(four_codes(x.lo, factor), four_codes(x.hi, factor));
}
