// Attention mask bound in place of an unused index
// buffer, when no further storage buffer is available.

fn mask_word(index: u32) -> u32 {
    if (MASK_AT == 3u) {
        return q_offsets[index];
    }
    if (MASK_AT == 4u) {
        return kv_index[index];
    }
    return block_table[index];
}
