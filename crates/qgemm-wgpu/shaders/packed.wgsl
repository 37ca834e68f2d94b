// W in packed layout Simd16 (`qgemm-formats`, `prepack.rs`):
// tiles of 16 rows, split into k-tiles of PACKED_K columns.
// An invocation decodes four rows at a time.
// The preceding `rows_*.wgsl` defines which.

const TILE_ROWS: u32 = 16u;

// Location of a scale plane's records in a k-tile.
struct Plane {
    at: u32,     // first byte
    row: u32,    // bytes of a row's records
    rows: u32,   // consecutive rows that share records
}

// Whether records are interleaved by words, as in code planes.
fn by_words(plane: Plane) -> bool {
    return plane.rows == 1u && plane.row % 4u == 0u;
}

// Scale and minimum of a sub-block, for four rows:
// `value = scale * number + min`.
// A number is the integer code, or the value of the code's
// table, FP8 or plain type.
// `dequant/<stem>.wgsl` decodes the records; `encoding/` may
// transform the result.
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

// For codes with an offset or zero point.
fn offset_scale(scale: vec4<f32>, offset: vec4<f32>) -> Affine {
    return Affine(scale, -scale * offset);
}

fn scale_alone(scale: vec4<f32>) -> Affine {
    return Affine(scale, vec4<f32>(0.0));
}

// Q4_K and Q5_K: f16 d, f16 dmin, 12 bytes of eight 6-bit
// scales and minimums.
// Sub-blocks 4..7: the low four bits are in the last four
// bytes, the upper two above sub-blocks 0..3.
// Branch-free: a branch would wait for its loads
// before it issues more.
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
