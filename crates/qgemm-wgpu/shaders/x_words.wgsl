// X at any address.

@group(0) @binding(0) var<storage, read> x_words: array<u32>;

fn x_word(word: u32) -> u32 {
    return x_words[word];
}

// Eight elements from `index` on.
fn x_eight(index: u32) -> Eight {
    return Eight(x_four(index), x_four(index + 4u));
}

fn x_four(index: u32) -> vec4<f32> {
    if (p.shape.x_dtype == F32) {
        return bitcast<vec4<f32>>(
            vec4<u32>(x_words[index], x_words[index + 1u], x_words[index + 2u], x_words[index + 3u]),
        );
    }
    let word = index >> 1u;
    let low = x_words[word];
    let middle = x_words[word + 1u];
    if ((index & 1u) == 0u) {
        return four_halves(low, middle, p.shape.x_dtype);
    }
    let high = x_words[word + 2u];
    return four_halves((low >> 16u) | (middle << 16u), (middle >> 16u) | (high << 16u), p.shape.x_dtype);
}
