// Quantized K or V: one factor per head (E4M3)
// or one scale per block. The other may be plain. No storage buffer is
// left for log-sum-exps, so a launch writes
// either results or log-sum-exps to `d`.

@group(0) @binding(7) var<storage, read> k_scales: array<u32>;  // or factors
@group(0) @binding(8) var<storage, read> v_scales: array<u32>;

fn store_lse(index: u32, bits: u32) {
    atomicStore(&d[index], bits);
}

// Dequantization factor of a KV head.
fn key_factor(kv_head: u32) -> f32 {
    if (KV_DTYPE == KV_E4M3) {
        return bitcast<f32>(k_scales[p.k_scales_base + kv_head]);
    }
    return 1.0;
}

fn value_factor(kv_head: u32) -> f32 {
    if (V_DTYPE == KV_E4M3) {
        return bitcast<f32>(v_scales[p.v_scales_base + kv_head]);
    }
    return 1.0;
}

fn signed_bytes(bytes: u32) -> vec4<f32> {
    return vec4<f32>(bitcast<vec4<i32>>(vec4<u32>(bytes) << vec4<u32>(24u, 16u, 8u, 0u)) >> vec4<u32>(24u));
}

// Nibbles at bits 0, 4, 8 and 12, minus 8.
fn half_bytes(bits: u32) -> vec4<f32> {
    return vec4<f32>((vec4<u32>(bits) >> vec4<u32>(0u, 4u, 8u, 12u)) & vec4<u32>(15u)) - 8.0;
}

fn four_bytes(bytes: u32, dtype: u32) -> vec4<f32> {
    if (dtype == KV_E4M3) {
        return e4m3_to_f32((vec4<u32>(bytes) >> vec4<u32>(0u, 8u, 16u, 24u)) & vec4<u32>(0xffu));
    }
    return signed_bytes(bytes);
}

// Byte offset of an element's code.
fn byte_of(element: u32, dtype: u32) -> u32 {
    if (dtype == KV_Q4_0) {
        return element / 2u;
    }
    return element;
}

// Four bytes of K, unaligned.
fn key_bytes(byte: u32) -> u32 {
    let shift = byte % 4u * 8u;
    if (shift == 0u) {
        return keys[byte / 4u];
    }
    return (keys[byte / 4u] >> shift) | (keys[byte / 4u + 1u] << (32u - shift));
}

// Four adjacent features of a plain key.
fn four_keys(index: u32) -> vec4<f32> {
    var four = vec4<f32>();
    for (var i = 0u; i < 4u; i++) {
        four[i] = element(keys[word_of(index + i, KV_DTYPE)], index + i, KV_DTYPE);
    }
    return four;
}

// Eight adjacent features of a key, without the scale.
fn load_key(at: u32) -> Eight {
    if (KV_DTYPE < KV_E4M3) {
        return Eight(four_keys(p.k_base + at), four_keys(p.k_base + at + 4u));
    }
    let byte = p.k_base + byte_of(at, KV_DTYPE);
    let first = key_bytes(byte);
    if (KV_DTYPE == KV_Q4_0) {
        return Eight(half_bytes(first), half_bytes(first >> 16u));
    }
    return Eight(four_bytes(first, KV_DTYPE), four_bytes(key_bytes(byte + 4u), KV_DTYPE));
}

// Scale of the block that contains an element.
fn key_scale(at: u32) -> f32 {
    let index = p.k_scales_base + at / KV_BLOCK;
    return f16_scalar((k_scales[index / 2u] >> (index % 2u * 16u)) & 0xffffu);
}

fn value_scale(at: u32) -> f32 {
    let index = p.v_scales_base + at / KV_BLOCK;
    return f16_scalar((v_scales[index / 2u] >> (index % 2u * 16u)) & 0xffffu);
}

// Adds q · k of every row for the key at element `at`.
fn add_products(at: u32, products: ptr<function, array<f32, ROWS>>) {
    var scale = 1.0;
    for (var column = 0u; column < QK_DIM; column += 8u) {
        if (KV_DTYPE > KV_E4M3 && column % KV_BLOCK == 0u) {
            scale = key_scale(at + column);
        }
        let k = load_key(at + column);
        for (var r = 0u; r < ROWS; r++) {
            let four = (r * COLUMNS + column) / 4u;
            (*products)[r] += (dot(q[four], k.lo) + dot(q[four + 1u], k.hi)) * scale;
        }
    }
}

// Two adjacent features of a value.
fn load_value(at: u32) -> vec2<f32> {
    if (V_DTYPE < KV_E4M3) {
        let index = p.v_base + at;
        return vec2<f32>(
            element(values[word_of(index, V_DTYPE)], index, V_DTYPE),
            element(values[word_of(index + 1u, V_DTYPE)], index + 1u, V_DTYPE),
        );
    }
    let byte = p.v_base + byte_of(at, V_DTYPE);
    let shift = byte % 4u * 8u;
    var bits = values[byte / 4u] >> shift;
    if (V_DTYPE == KV_Q4_0) {
        return half_bytes(bits).xy * value_scale(at);
    }
    if (shift == 24u) {
        bits |= values[byte / 4u + 1u] << 8u;
    }
    let two = four_bytes(bits, V_DTYPE).xy;
    if (V_DTYPE == KV_Q8_0) {
        return two * value_scale(at);
    }
    return two;
}
