// bf16: one value a block.

fn dequant8(block: u32, first: u32) -> Eight {
    return Eight(
        four_halves(w_u32(block), w_u32(block + 4u), BF16),
        four_halves(w_u32(block + 8u), w_u32(block + 12u), BF16),
    );
}
