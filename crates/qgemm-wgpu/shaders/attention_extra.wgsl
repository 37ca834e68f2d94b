// Mask, sinks and gate: in a storage buffer of
// their own, or bound in place of an
// index buffer that the attention has not.

@group(0) @binding(8) var<storage, read> extra: array<u32>;

fn extra_word(binding: u32, index: u32) -> u32 {
    if (binding == 8u) {
        return extra[index];
    }
    if (binding == 3u) {
        return q_offsets[index];
    }
    if (binding == 4u) {
        return kv_index[index];
    }
    return block_table[index];
}
