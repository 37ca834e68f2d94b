// W in the packed layout Simd16 (`qgemm-formats`, `prepack.rs`): tiles of 16 rows, cut into k-tiles of PACKED_K columns.
// An invocation decodes four rows at a time; `rows_*.wgsl` before this file says which.

const TILE_ROWS: u32 = 16u;

// The place of the records of a scale plane in a k-tile.
struct Plane {
    at: u32,     // first byte
    row: u32,    // bytes of a row's records
    rows: u32,   // consecutive rows that share their records
}

// Whether a plane holds its records by words, as code planes do.
fn by_words(plane: Plane) -> bool {
    return plane.rows == 1u && plane.row % 4u == 0u;
}

// For sub-blocks of four rows. A value is `scale * number + min`, where the number is the unsigned code as an integer
// or what table, FP8 or type make of it. `dequant/<stem>.wgsl` reads these from the records; `encoding/` may transform
// them.
struct Affine {
    scale: vec4<f32>,
    min: vec4<f32>,
}

fn record_u8(rows: Rows, plane: Plane, byte: u32) -> vec4<u32> {
    return record_bits(rows, plane, byte) & vec4<u32>(0xffu);
}

fn record_f16(rows: Rows, plane: Plane, byte: u32) -> vec4<f32> {
    return finite_f16_to_f32(record_bits(rows, plane, byte) & vec4<u32>(0xffffu));
}

fn record_f32(rows: Rows, plane: Plane, byte: u32) -> vec4<f32> {
    return bitcast<vec4<f32>>(record_bits(rows, plane, byte));
}

// For codes from which an offset, or a zero point, is subtracted before they are scaled.
fn offset_scale(scale: vec4<f32>, offset: vec4<f32>) -> Affine {
    return Affine(scale, -scale * offset);
}

fn scale_alone(scale: vec4<f32>) -> Affine {
    return Affine(scale, vec4<f32>(0.0));
}

// Scale and minimum of Q4_K and Q5_K: f16 d, f16 dmin and 12 bytes with eight scales and minima of six bits each. Those
// of the second four sub-blocks have their lower four bits in the last four bytes, and the upper two above those of the
// first four. There is no branch: at a branch, an invocation would wait for its loads before it loads more.
fn k_scale_min(rows: Rows, plane: Plane, sub: u32) -> Affine {
    let byte = sub % 4u;
    let scales = record_u8(rows, plane, 4u + byte);
    let minima = record_u8(rows, plane, 8u + byte);
    let nibbles = record_u8(rows, plane, 12u + byte);
    let is_second = sub >= 4u;
    let second_scale = (nibbles & vec4<u32>(15u)) | ((scales >> vec4<u32>(6u)) << vec4<u32>(4u));
    let second_minimum = (nibbles >> vec4<u32>(4u)) | ((minima >> vec4<u32>(6u)) << vec4<u32>(4u));
    let scale = select(scales & vec4<u32>(63u), second_scale, is_second);
    let minimum = select(minima & vec4<u32>(63u), second_minimum, is_second);
    return Affine(
        record_f16(rows, plane, 0u) * vec4<f32>(scale),
        -record_f16(rows, plane, 2u) * vec4<f32>(minimum),
    );
}
