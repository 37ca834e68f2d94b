// FP8 E5M2: the upper byte of an f16.

fn begin(thread: u32) {}

fn number(low: vec4<u32>, high: vec4<u32>, low_bit: u32, high_bit: u32) -> vec4<f32> {
    return f16_to_f32(((low >> vec4<u32>(low_bit)) & vec4<u32>(0xffu)) << vec4<u32>(8u));
}
