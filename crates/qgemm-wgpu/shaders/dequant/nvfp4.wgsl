// NVFP4: 8 bytes of nibbles in order that select from the codebook of doubled FP4 numbers, an E4M3 scale.

fn dequant8(block: u32, first: u32) -> Eight {
    let scale = e4m3_to_f32(vec4<u32>(w_u8(block + 8u))).x * 0.5;
    return scale8(table8(nibbles_in_order(w_u32(block + first / 2u))), scale);
}
