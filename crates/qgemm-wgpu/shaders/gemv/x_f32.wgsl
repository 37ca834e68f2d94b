// X in f32. A padding vector follows each unit of a token,
// against bank conflicts.

const UNIT_PITCH: u32 = UNIT / 4u + 1u;

// Loads `units` units of X from column `s0` on.
fn load_x(m0: u32, s0: u32, units: u32, thread: u32) {
    let eights = CHUNK_UNITS * (UNIT / 8u);
    for (var i = thread; i < TILE_M * eights; i += THREADS) {
        let m = i / eights;
        let eight = i % eights;
        let values = x8(min(m0 + m, tokens() - 1u), s0 + eight * 8u);
        let at = m * TOKEN_PITCH + eight / (UNIT / 8u) * UNIT_PITCH + eight % (UNIT / 8u) * 2u;
        tile[at] = bitcast<vec4<u32>>(values.lo);
        tile[at + 1u] = bitcast<vec4<u32>>(values.hi);
    }
}

// Vector `vector` of a token in `tile`.
fn x_vector(vector: u32) -> vec4<f32> {
    return bitcast<vec4<f32>>(tile[vector]);
}
