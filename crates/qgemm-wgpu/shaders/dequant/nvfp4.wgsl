// NVFP4: E4M3 scale, halved because the codebook holds
// doubled FP4 values.

fn sub_scale(rows: Rows, sub: u32) -> Affine {
    return scale_alone(e4m3_to_f32(record_u8(rows, PLANE_D, sub)) * 0.5);
}
