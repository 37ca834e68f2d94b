// The mask of an attention in a storage buffer of its own.

@group(0) @binding(8) var<storage, read> mask_bits: array<u32>;

fn mask_word(index: u32) -> u32 {
    return mask_bits[index];
}
