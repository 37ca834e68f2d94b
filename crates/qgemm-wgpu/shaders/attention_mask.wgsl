// Attention mask in a separate storage buffer.

@group(0) @binding(8) var<storage, read> mask_bits: array<u32>;

fn mask_word(index: u32) -> u32 {
    return mask_bits[index];
}
