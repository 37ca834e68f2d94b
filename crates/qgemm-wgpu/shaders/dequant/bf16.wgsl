// bf16.

fn number(low: vec4<u32>, high: vec4<u32>, low_bit: u32, high_bit: u32) -> vec4<f32> {
    return bitcast<vec4<f32>>((low >> vec4<u32>(low_bit)) << vec4<u32>(16u));
}
