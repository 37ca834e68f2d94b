// X as codes of eight bits in workgroup memory. A unit of a token is two vectors of codes, in the order in which words of W hold a
// quad's, and one vector with their factor d and with `d * (sum of codes)` of its spans.

const UNIT_PITCH: u32 = 3u;
const CHUNK: u32 = TILE_M * CHUNK_UNITS;

// The codes of quad `quad` of a unit, whose vectors of codes are `low` and `high`.
fn x_quad(low: vec4<u32>, high: vec4<u32>, quad: u32) -> u32 {
    if (quad < 4u) {
        return low[quad];
    }
    return high[quad - 4u];
}

// Products of the codes of four rows with those of a quad of X.
fn dot4(codes: vec4<u32>, x: u32) -> vec4<i32> {
    return vec4<i32>(
        dot4I8Packed(codes.x, x),
        dot4I8Packed(codes.y, x),
        dot4I8Packed(codes.z, x),
        dot4I8Packed(codes.w, x),
    );
}
