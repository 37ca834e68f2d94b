// Mask, sinks and gate, bound in place of an
// index buffer that the attention has not:
// no further storage buffer is available.

fn extra_word(binding: u32, index: u32) -> u32 {
    if (binding == 3u) {
        return q_offsets[index];
    }
    if (binding == 4u) {
        return kv_index[index];
    }
    return block_table[index];
}
