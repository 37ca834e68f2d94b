// Elements of an f32, f16 or bf16 cache, or of queries.

// Stores one element; the other
// half of its word keeps its bits.
fn store(index: u32, value: f32) {
    if (KV_DTYPE == F32) {
        atomicStore(&written[index], bitcast<u32>(value));
        return;
    }
    var half: u32;
    if (KV_DTYPE == F16) {
        half = f32_to_f16(value);
    } else {
        half = f32_to_bf16(value);
    }
    let shift = (index & 1u) * 16u;
    atomicAnd(&written[index >> 1u], ~(0xffffu << shift));
    atomicOr(&written[index >> 1u], half << shift);
}

fn store_eight(x: Eight, head: u32, at: u32, is_there: bool, thread: u32) {
    if (is_there) {
        for (var i = 0u; i < 4u; i++) {
            store(p.written_base + at + i, x.lo[i]);
            store(p.written_base + at + 4u + i, x.hi[i]);
        }
    }
}
