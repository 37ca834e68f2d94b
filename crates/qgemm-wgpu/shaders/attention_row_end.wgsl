// Attention: the end of a row. The sink joins the sum, the sum
// divides the result, the gate multiplies it; then it is
// rounded and stored in `d`. Infinities and NaN are
// detected by their bits: adapters may assume finite math.

// Below every real exponent; its exp2 is 0.
const MASKED: f32 = -3.0e38;
const NAN: u32 = 0x7fc00000u;
const MINUS_INFINITY: u32 = 0xff800000u;

// State of a row: its sums times `weight`
// are still to be divided by `sum`.
struct RowEnd {
    weight: f32,
    row_max: f32,
    row_sum: f32,
    is_nan: bool,
}

fn is_nan_or_infinite(value: f32) -> bool {
    return (bitcast<u32>(value) & 0x7f800000u) == 0x7f800000u;
}

// exp2(from - to), 0 for masked.
fn rescale_factor(before: f32, after: f32) -> f32 {
    return select(exp2(before - after), 0.0, before <= MASKED);
}

// A sink is a score whose value is zero.
fn with_sink(row: RowEnd, bits: u32) -> RowEnd {
    let sink = select(bitcast<f32>(bits) * 1.44269504, MASKED, bits == MINUS_INFINITY);
    let row_max = max(row.row_max, sink);
    let rescale = rescale_factor(row.row_max, row_max);
    let is_nan = row.is_nan || (is_nan_or_infinite(bitcast<f32>(bits)) && bits != MINUS_INFINITY);
    return RowEnd(row.weight * rescale, row_max, row.row_sum * rescale + rescale_factor(sink, row_max), is_nan);
}

// Sums to results. `thread` keeps NaN from
// being a constant expression.
fn divided(row: RowEnd, sums: vec4<f32>, thread: u32) -> vec4<f32> {
    if (row.is_nan) {
        return bitcast<vec4<f32>>(vec4<u32>(NAN | (thread >> 31u)));
    }
    return sums * (row.weight * select(1.0 / row.row_sum, 0.0, row.row_sum == 0.0));
}

// Bits of the log-sum-exp: constant
// expressions must not be infinite.
fn lse_bits(row: RowEnd) -> u32 {
    let bits = bitcast<u32>((row.row_max + log2(max(row.row_sum, 1e-30))) * 0.693147181);
    return select(select(bits, MINUS_INFINITY, row.row_sum == 0.0), NAN, row.is_nan);
}

// Sigmoid of a gate.
fn gate_factor(gate: f32) -> f32 {
    if (is_nan_or_infinite(gate)) {
        // 0, 1 or NaN.
        let bits = bitcast<u32>(gate);
        return bitcast<f32>(select(select(NAN, 0u, bits == MINUS_INFINITY), 0x3f800000u, bits == 0x7f800000u));
    }
    return 1.0 / (1.0 + exp2(clamp(gate * -1.44269504, -126.0, 126.0)));
}

// Stores a half; the word's other half belongs to another row.
fn store_half(index: u32, half: u32) {
    let shift = index % 2u * 16u;
    atomicAnd(&d[index / 2u], ~(0xffffu << shift));
    atomicOr(&d[index / 2u], half << shift);
}

fn half_of(value: f32) -> u32 {
    if (DTYPE == F16) {
        return f32_to_f16(value);
    }
    return f32_to_bf16(value);
}

// Stores two adjacent results.
fn store_result(index: u32, result: vec2<f32>) {
    if (DTYPE == F32) {
        atomicStore(&d[index], bitcast<u32>(result.x));
        atomicStore(&d[index + 1u], bitcast<u32>(result.y));
        return;
    }
    let halves = vec2<u32>(half_of(result.x), half_of(result.y));
    if (index % 2u == 0u) {
        atomicStore(&d[index / 2u], halves.x | (halves.y << 16u));
        return;
    }
    store_half(index, halves.x);
    store_half(index + 1u, halves.y);
}
