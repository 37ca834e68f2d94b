// INT8 X in workgroup memory.
// A unit of a token has three vectors:
// two of codes in W's word order, one with the factor d and `d
// * (sum of codes)` of its spans.

const UNIT_PITCH: u32 = 3u;
const CHUNK: u32 = TILE_M * CHUNK_UNITS;

// Codes of quad `quad` of a unit with code
// vectors `low`, `high`.
fn x_quad(low: vec4<u32>, high: vec4<u32>, quad: u32) -> u32 {
    if (quad < 4u) {
        return low[quad];
    }
    return high[quad - 4u];
}

// Dot products of four rows' codes with a quad of X.
fn dot4(codes: vec4<u32>, x: u32) -> vec4<i32> {
    return vec4<i32>(
        dot4I8Packed(codes.x, x),
        dot4I8Packed(codes.y, x),
        dot4I8Packed(codes.z, x),
        dot4I8Packed(codes.w, x),
    );
}
