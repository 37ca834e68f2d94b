// X whose rows begin at multiples of 16 bytes.

@group(0) @binding(0) var<storage, read> x_vectors: array<vec4<u32>>;

fn x_word(word: u32) -> u32 {
    return x_vectors[word / 4u][word % 4u];
}

// Eight elements from `index` on, a multiple of eight.
fn x_eight(index: u32) -> Eight {
    if (p.shape.x_dtype == F32) {
        let vector = index / 4u;
        return Eight(bitcast<vec4<f32>>(x_vectors[vector]), bitcast<vec4<f32>>(x_vectors[vector + 1u]));
    }
    let words = x_vectors[index / 8u];
    return Eight(four_halves(words.x, words.y, p.shape.x_dtype), four_halves(words.z, words.w, p.shape.x_dtype));
}
