// Dequantization of X.
// An invocation handles four columns per iteration, a
// workgroup part of a row.
// CODE, SCALE, FACTOR and BLOCK define the format
// (see quantize.wgsl).

struct Params {
    shape: DequantizeShape,  // of this dispatch
    codes_row: u32,          // words between rows of codes
    scales_row: u32,         // words between rows of scales
    codes_base: u32,
    scales_base: u32,
    factors_base: u32,
    d_base: u32,
}

var<immediate> p: Params;

@group(0) @binding(0) var<storage, read> codes: array<u32>;
@group(0) @binding(1) var<storage, read> scales: array<u32>;
@group(0) @binding(2) var<storage, read> factors: array<u32>;
@group(0) @binding(3) var<storage, read_write> d: array<u32>;

const INT8: u32 = 0u;
const E4M3: u32 = 1u;
const SCALE_NONE: u32 = 0u;
const SCALE_F32: u32 = 1u;
const SCALE_E8M0: u32 = 2u;
const FACTOR_GIVEN: u32 = 1u;
const NAN: u32 = 0x7fc00000u;

fn e4m3_bits(code: u32) -> u32 {
    return select(bitcast<u32>(finite_e4m3_to_f32(vec4<u32>(code)).x), NAN, (code & 0x7fu) == 0x7fu);
}

// Bits of a scale.
// Adapters may replace a computed NaN by any number.
fn scale_bits(row: u32, column: u32) -> u32 {
    if (SCALE == SCALE_NONE) {
        return 0x3f800000u;
    }
    let block = select(0u, column / max(BLOCK, 1u), BLOCK != 0u);
    let first = p.scales_base + row * p.scales_row;
    if (SCALE == SCALE_F32) {
        return scales[first + block];
    }
    let code = (scales[first + block / 4u] >> (block % 4u * 8u)) & 0xffu;
    if (SCALE == SCALE_E8M0) {
        return select(select(code << 23u, 0x00400000u, code == 0u), NAN, code == 0xffu);
    }
    return e4m3_bits(code);
}

fn number_bits(row: u32, column: u32) -> u32 {
    let first = p.codes_base + row * p.codes_row;
    if (CODE == INT8) {
        let code = bitcast<i32>(codes[first + column / 4u] << (24u - column % 4u * 8u)) >> 24u;
        return bitcast<u32>(f32(code));
    }
    if (CODE == E4M3) {
        return e4m3_bits((codes[first + column / 4u] >> (column % 4u * 8u)) & 0xffu);
    }
    let code = (codes[first + column / 8u] >> (column % 8u * 4u)) & 15u;
    let magnitude = code & 7u;
    // 0 and 1/2 take the second value.
    // The exponents of all other codes are at least that of 1.
    let bits = select((magnitude << 22u) + (126u << 23u), magnitude * (126u << 23u), magnitude < 2u);
    return bits | ((code & 8u) << 28u);
}

fn is_nan(bits: u32) -> bool {
    return (bits & 0x7fffffffu) > 0x7f800000u;
}

@compute @workgroup_size(THREADS)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let row = group.y + group.z * groups.y;
    if (row >= p.shape.rows) {
        return;
    }
    var factor = 0x3f800000u;
    if (FACTOR != 0u) {
        factor = factors[p.factors_base + select(row, 0u, FACTOR == FACTOR_GIVEN)];
    }
    let step = groups.x * THREADS;
    for (var column = group.x * THREADS + thread; column < p.shape.columns; column += step) {
        let scale = scale_bits(row, column);
        let number = number_bits(row, column);
        var value = bitcast<u32>(bitcast<f32>(factor) * (bitcast<f32>(scale) * bitcast<f32>(number)));
        if (is_nan(factor) || is_nan(scale) || is_nan(number)) {
            value = NAN;
        }
        d[p.d_base + row * p.shape.columns + column] = value;
    }
}
