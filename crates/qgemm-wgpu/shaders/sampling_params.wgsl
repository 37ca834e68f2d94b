// Parameters of sampling kernels, and their arithmetic.
// `*_base` offsets count words (see `params.wgsl`).
// 64-bit integers are pairs of words, low word first.

struct Params {
    shape: SamplingShape,  // of this dispatch
    logits_row: u32,       // words between rows of the logits
    earlier_row: u32,      // ids between rows of earlier tokens
    logits_base: u32,
    parameters_base: u32,
    earlier_base: u32,
    lengths_base: u32,
    orders_base: u32,
    ids_base: u32,
    status_base: u32,
    own_base: u32,
    alternative_ids_base: u32,
    alternatives_base: u32,
}

var<immediate> p: Params;

const PARAMETER_WORDS: u32 = 10u;
const NO_TOKEN: u32 = 0xffffffffu;
const EXCLUDED: u32 = 0u;
const NON_FINITE: u32 = 0xffffffffu;
const LARGEST: f32 = 3.40282347e+38f;
const LEAST_EXPONENT: f32 = -23.0f;
const LN_2_HIGH: f32 = 0.6933594f;
const LN_2_LOW: f32 = -2.1219444e-4f;

// Order-preserving bits of a logit. Both zeros are equal.
fn order_of(bits: u32) -> u32 {
    let magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u || bits == 0x7f800000u) {
        return NON_FINITE;
    }
    if (bits == 0xff800000u) {
        return EXCLUDED;
    }
    if (magnitude == 0u) {
        return 0x80000000u;
    }
    return select(bits | 0x80000000u, ~bits, bits >= 0x80000000u);
}

fn logit_of(order: u32) -> f32 {
    return bitcast<f32>(select(~order, order & 0x7fffffffu, order >= 0x80000000u));
}

// exp(below * inverse) in units of 2^-31; `below` is at most 0.
fn weight_of(below: f32, inverse: f32) -> u32 {
    let exponent = below * inverse;
    if (!(exponent >= LEAST_EXPONENT)) {
        return 0u;
    }
    let halvings = i32(exponent * 1.44269504f - 0.5f);
    let halved = f32(halvings);
    let rest = exponent - halved * LN_2_HIGH - halved * LN_2_LOW;
    var power = 1.0f / 5040.0f;
    power = power * rest + 1.0f / 720.0f;
    power = power * rest + 1.0f / 120.0f;
    power = power * rest + 1.0f / 24.0f;
    power = power * rest + 1.0f / 6.0f;
    power = power * rest + 0.5f;
    power = power * rest + 1.0f;
    power = power * rest + 1.0f;
    return u32(power * bitcast<f32>(u32(158 + halvings) << 23u) + 0.5f);
}

fn sum64(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {
    let low = a.x + b.x;
    return vec2<u32>(low, a.y + b.y + select(0u, 1u, low < a.x));
}

// a - b, where a is at least b.
fn difference64(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {
    return vec2<u32>(a.x - b.x, a.y - b.y - select(0u, 1u, a.x < b.x));
}

fn less64(a: vec2<u32>, b: vec2<u32>) -> bool {
    return a.y < b.y || (a.y == b.y && a.x < b.x);
}

fn product64(a: u32, b: u32) -> vec2<u32> {
    let low = (a & 0xffffu) * (b & 0xffffu);
    let first = (a >> 16u) * (b & 0xffffu) + (low >> 16u);
    let second = (a & 0xffffu) * (b >> 16u) + (first & 0xffffu);
    return vec2<u32>((second << 16u) | (low & 0xffffu), (a >> 16u) * (b >> 16u) + (first >> 16u) + (second >> 16u));
}

// Whole part of total * fraction / 2^32.
fn fraction_of(total: vec2<u32>, fraction: u32) -> vec2<u32> {
    return sum64(product64(total.y, fraction), vec2<u32>(product64(total.x, fraction).y, 0u));
}
