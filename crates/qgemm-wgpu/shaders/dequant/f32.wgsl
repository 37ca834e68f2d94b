// f32: one value a block.

fn dequant8(block: u32, first: u32) -> Eight {
    return Eight(
        bitcast<vec4<f32>>(vec4<u32>(w_u32(block), w_u32(block + 4u), w_u32(block + 8u), w_u32(block + 12u))),
        bitcast<vec4<f32>>(vec4<u32>(w_u32(block + 16u), w_u32(block + 20u), w_u32(block + 24u), w_u32(block + 28u))),
    );
}
