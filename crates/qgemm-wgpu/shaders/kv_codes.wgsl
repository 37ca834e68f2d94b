// Formats of caches whose numbers are codes, of which KV_DTYPE is one.

const KV_E4M3: u32 = 3u;
const KV_Q8_0: u32 = 4u;
const KV_Q4_0: u32 = 5u;
// Features that share a scale, in formats that have scales.
const KV_BLOCK: u32 = 32u;

// How many bytes of codes come before those of an element.
fn code_byte(element: u32) -> u32 {
    if (KV_DTYPE == KV_Q4_0) {
        return element / 2u;
    }
    return element;
}
