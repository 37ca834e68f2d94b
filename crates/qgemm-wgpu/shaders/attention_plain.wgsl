// K and V in f32, f16 or bf16.

@group(0) @binding(7) var<storage, read_write> lse: array<u32>;

fn store_lse(index: u32, bits: u32) {
    lse[index] = bits;
}

fn key_factor(kv_head: u32) -> f32 {
    return 1.0;
}

fn value_factor(kv_head: u32) -> f32 {
    return 1.0;
}

fn load_key(index: u32) -> vec4<f32> {
    if (KV_DTYPE == F32) {
        return bitcast<vec4<f32>>(vec4<u32>(keys[index], keys[index + 1u], keys[index + 2u], keys[index + 3u]));
    }
    if (index % 2u == 0u) {
        return four_halves(keys[index / 2u], keys[index / 2u + 1u], KV_DTYPE);
    }
    let words = vec3<u32>(keys[index / 2u], keys[index / 2u + 1u], keys[index / 2u + 2u]);
    return four_halves((words.x >> 16u) | (words.y << 16u), (words.y >> 16u) | (words.z << 16u), KV_DTYPE);
}

// Adds q · k of every row for
// the key at element `at`.
fn add_products(at: u32, products: ptr<function, array<f32, ROWS>>) {
    for (var column = 0u; column < QK_DIM; column += 4u) {
        let k = load_key(p.k_base + at + column);
        for (var r = 0u; r < ROWS; r++) {
            (*products)[r] += dot(q[(r * COLUMNS + column) / 4u], k);
        }
    }
}

// Two adjacent features of a value.
fn load_value(at: u32) -> vec2<f32> {
    let index = p.v_base + at;
    if (V_DTYPE == F32) {
        return vec2<f32>(bitcast<f32>(values[index]), bitcast<f32>(values[index + 1u]));
    }
    if (index % 2u == 0u) {
        return four_halves(values[index / 2u], 0u, V_DTYPE).xy;
    }
    return four_halves((values[index / 2u] >> 16u) | (values[index / 2u + 1u] << 16u), 0u, V_DTYPE).xy;
}
