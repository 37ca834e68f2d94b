// The codebook `TABLE` of the format: 16 signed bytes in four words.

fn table4(codes: vec4<u32>) -> vec4<f32> {
    let words = vec4<u32>(TABLE[codes.x >> 2u], TABLE[codes.y >> 2u], TABLE[codes.z >> 2u], TABLE[codes.w >> 2u]);
    let bytes = words << (vec4<u32>(24u) - (codes & vec4<u32>(3u)) * 8u);
    return vec4<f32>(bitcast<vec4<i32>>(bytes) >> vec4<u32>(24u));
}

fn table8(codes: Codes) -> Eight {
    return Eight(table4(bytes4(codes.lo)), table4(bytes4(codes.hi)));
}
