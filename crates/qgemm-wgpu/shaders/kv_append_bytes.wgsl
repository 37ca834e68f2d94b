// Codes of eight features. `kv_append_factor.wgsl` or
// `kv_append_blocks.wgsl` precedes this file and quantizes,
// bit for bit as the CPU does.

fn replace_bits(word: u32, mask: u32, bits: u32) {
    atomicAnd(&written[word], ~mask);
    atomicOr(&written[word], bits);
}

// Stores four bytes, unaligned; other
// bytes of their words keep their bits.
fn store_bytes(byte: u32, bytes: u32) {
    let word = byte / 4u;
    let shift = byte % 4u * 8u;
    if (shift == 0u) {
        atomicStore(&written[word], bytes);
        return;
    }
    replace_bits(word, 0xffffffffu << shift, bytes << shift);
    replace_bits(word + 1u, 0xffffffffu >> (32u - shift), bytes >> (32u - shift));
}

// All invocations of a workgroup call it: they share scales.
fn store_eight(x: Eight, head: u32, at: u32, is_there: bool, thread: u32) {
    let codes = encoded(x, head, at, is_there, thread);
    if (is_there) {
        let byte = p.written_base + code_byte(at);
        store_bytes(byte, codes.x);
        if (KV_DTYPE != KV_Q4_0) {
            store_bytes(byte + 4u, codes.y);
        }
    }
}
