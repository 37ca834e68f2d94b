// Codebook: codes index the format's 16-entry `TABLE`.
// Each entry has a separate bank of workgroup memory, so
// invocations can read different entries at once.

var<workgroup> table: array<f32, 16>;

fn begin(thread: u32) {
    if (thread < 16u) {
        var numbers = TABLE;
        table[thread] = numbers[thread];
    }
    workgroupBarrier();
}

fn number(low: vec4<u32>, high: vec4<u32>, low_bit: u32, high_bit: u32) -> vec4<f32> {
    var codes = (low >> vec4<u32>(low_bit)) & vec4<u32>((1u << LOW_BITS) - 1u);
    if (HIGH_BITS > 0u) {
        codes |= ((high >> vec4<u32>(high_bit)) & vec4<u32>((1u << HIGH_BITS) - 1u)) << vec4<u32>(LOW_BITS);
    }
    return vec4<f32>(table[codes.x], table[codes.y], table[codes.z], table[codes.w]);
}
