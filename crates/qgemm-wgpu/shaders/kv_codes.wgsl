// Quantized KV-cache formats; KV_DTYPE is one of them.

const KV_E4M3: u32 = 3u;
const KV_Q8_0: u32 = 4u;
const KV_Q4_0: u32 = 5u;
// Features per scale in Q8_0 and Q4_0.
const KV_BLOCK: u32 = 32u;

// Byte offset of an element's code.
fn code_byte(element: u32) -> u32 {
    if (KV_DTYPE == KV_Q4_0) {
        return element / 2u;
    }
    return element;
}
