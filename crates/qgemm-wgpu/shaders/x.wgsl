// X bound as vectors, with single-word access:
// it may start anywhere.
// Every shader has both ways to read X, because a second
// shader would take longer to compile.

@group(0) @binding(0) var<storage, read> x_vectors: array<vec4<u32>>;

fn x_word(word: u32) -> u32 {
    return x_vectors[word / 4u][word % 4u];
}

// Eight elements from `index` on.
fn x_eight(index: u32) -> Eight {
    if (!has(FLAG_X_ALIGNED16)) {
        return Eight(x_four(index), x_four(index + 4u));
    }
    if (x_dtype() == F32) {
        let vector = index / 4u;
        return Eight(bitcast<vec4<f32>>(x_vectors[vector]), bitcast<vec4<f32>>(x_vectors[vector + 1u]));
    }
    let words = x_vectors[index / 8u];
    return Eight(four_halves(words.x, words.y, x_dtype()), four_halves(words.z, words.w, x_dtype()));
}

fn x_four(index: u32) -> vec4<f32> {
    if (x_dtype() == F32) {
        return bitcast<vec4<f32>>(vec4<u32>(x_word(index), x_word(index + 1u), x_word(index + 2u), x_word(index + 3u)));
    }
    let word = index >> 1u;
    let low = x_word(word);
    let middle = x_word(word + 1u);
    if ((index & 1u) == 0u) {
        return four_halves(low, middle, x_dtype());
    }
    let high = x_word(word + 2u);
    return four_halves((low >> 16u) | (middle << 16u), (middle >> 16u) | (high << 16u), x_dtype());
}
