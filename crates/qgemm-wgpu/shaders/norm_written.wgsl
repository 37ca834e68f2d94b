// TARGET, an output that may alias an input.
// f32 has one element a word, f16 and bf16 two.

fn load_TARGET(index: u32, dtype: u32) -> f32 {
    return element(atomicLoad(&TARGET[word_of(index, dtype)]), index, dtype);
}

// Stores the first `count` of two values from `index` on.
// A plain store of a 16-bit word needs both elements.
// Otherwise the other half belongs to another invocation or
// lies outside, and must keep its bits.
fn store_TARGET(index: u32, count: u32, dtype: u32, pair: vec2<f32>) {
    if (dtype == F32) {
        for (var i = 0u; i < count; i++) {
            atomicStore(&TARGET[index + i], bitcast<u32>(pair[i]));
        }
        return;
    }
    if (count == 2u && (index & 1u) == 0u) {
        atomicStore(&TARGET[index >> 1u], half_of(pair.x, dtype) | (half_of(pair.y, dtype) << 16u));
        return;
    }
    for (var i = 0u; i < count; i++) {
        let at = index + i;
        let shift = (at & 1u) * 16u;
        atomicAnd(&TARGET[at >> 1u], ~(0xffffu << shift));
        atomicOr(&TARGET[at >> 1u], half_of(pair[i], dtype) << shift);
    }
}
