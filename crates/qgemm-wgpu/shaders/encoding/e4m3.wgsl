// E4M3 codes to f32. NaN stays NaN.

fn begin(thread: u32) {}

fn number(low: vec4<u32>, high: vec4<u32>, low_bit: u32, high_bit: u32) -> vec4<f32> {
    return e4m3_to_f32((low >> vec4<u32>(low_bit)) & vec4<u32>(0xffu));
}
