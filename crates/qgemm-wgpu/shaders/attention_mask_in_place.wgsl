// The mask of an attention in the place of an index that it has not, where there is no storage buffer more.

fn mask_word(index: u32) -> u32 {
    if (MASK_AT == 3u) {
        return q_offsets[index];
    }
    if (MASK_AT == 4u) {
        return kv_index[index];
    }
    return block_table[index];
}
