// What kernels of every operation look up of their parameters `p`: flags, and modes of four bits each, which stand from
// bit `*_MODE` of `p.modes` on (`families/modes.rs`). Element types are F32, F16 and BF16 of `numbers.wgsl`, the
// activation one of the ACTIVATION_ constants.

fn has(flag: u32) -> bool {
    return (p.shape.flags & flag) != 0u;
}

fn mode(first_bit: u32) -> u32 {
    return (p.modes >> first_bit) & 15u;
}

fn x_dtype() -> u32 {
    return mode(X_MODE);
}

fn d_dtype() -> u32 {
    return mode(D_MODE);
}

// Stored column → column of X. Where X has no such column, the stored one is 0.
@group(0) @binding(3) var<storage, read> k_order: array<u32>;
