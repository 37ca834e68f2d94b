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

// Column of the result → column of X.
@group(0) @binding(3) var<storage, read> k_order: array<u32>;

// Entry of `k_order` for a column that no column of X feeds.
const NO_COLUMN: u32 = 0xffffffffu;
