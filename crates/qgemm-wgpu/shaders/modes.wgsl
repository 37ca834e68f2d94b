// Flags and modes of the parameters `p`, for all operations.
// A mode has four bits, from bit `*_MODE` of `p.modes` on
// (`families/modes.rs`).
// Element types: F32, F16, BF16 of `numbers.wgsl`.
// Activations: ACTIVATION_ constants.

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

// Stored column → column of X.
// The stored column is 0 if X has no such column.
@group(0) @binding(3) var<storage, read> k_order: array<u32>;
