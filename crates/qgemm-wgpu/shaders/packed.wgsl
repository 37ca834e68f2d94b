// W in layout R (`qgemm-formats`, `prepack.rs`): tiles of 16 rows, cut into slabs of SLAB_K columns. An invocation decodes four
// rows at a time, which `rows_*.wgsl` before this says.

const TILE_ROWS: u32 = 16u;

// Where the records of a scale plane stand in a slab.
struct Plane {
    at: u32,     // first byte
    row: u32,    // bytes of a row's records
    rows: u32,   // consecutive rows that share their records
}

// Whether a plane holds its records by words, as code planes do.
fn by_words(plane: Plane) -> bool {
    return plane.rows == 1u && plane.row % 4u == 0u;
}

// Of sub-blocks of four rows: a value is `scale * number + min`, the number being the unsigned code as an integer or what
// table, FP8 or type make of it. What `dequant/<stem>.wgsl` reads from the records; `encoding/` may keep it otherwise.
struct Affine {
    scale: vec4<f32>,
    min: vec4<f32>,
}

// Numbers of four consecutive columns, each of four rows.
struct Quad {
    a: vec4<f32>,
    b: vec4<f32>,
    c: vec4<f32>,
    d: vec4<f32>,
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

// Of codes from which an offset, or a zero point, is subtracted before they are scaled.
fn offset_scale(scale: vec4<f32>, offset: vec4<f32>) -> Affine {
    return Affine(scale, -scale * offset);
}

fn scale_alone(scale: vec4<f32>) -> Affine {
    return Affine(scale, vec4<f32>(0.0));
}

// The numbers of quad `quad` of a slab. Within a word, the values of a quad stand in bytes 0, 2, 1, 3.
fn quad_of(rows: Rows, quad: u32) -> Quad {
    if (LOW_BITS == 32u) {
        return Quad(
            number(code_word(rows, LOW_PLANE, quad * 4u), vec4<u32>(), 0u, 0u),
            number(code_word(rows, LOW_PLANE, quad * 4u + 1u), vec4<u32>(), 0u, 0u),
            number(code_word(rows, LOW_PLANE, quad * 4u + 2u), vec4<u32>(), 0u, 0u),
            number(code_word(rows, LOW_PLANE, quad * 4u + 3u), vec4<u32>(), 0u, 0u),
        );
    }
    if (LOW_BITS == 16u) {
        let ab = code_word(rows, LOW_PLANE, quad * 2u);
        let cd = code_word(rows, LOW_PLANE, quad * 2u + 1u);
        return Quad(
            number(ab, vec4<u32>(), 0u, 0u),
            number(ab, vec4<u32>(), 16u, 0u),
            number(cd, vec4<u32>(), 0u, 0u),
            number(cd, vec4<u32>(), 16u, 0u),
        );
    }
    let low = code_word(rows, LOW_PLANE, quad / LOW_QUADS) >> vec4<u32>(quad % LOW_QUADS * LOW_BITS);
    var high: vec4<u32>;
    if (HIGH_BITS > 0u) {
        high = code_word(rows, HIGH_PLANE, quad / HIGH_QUADS) >> vec4<u32>(quad % HIGH_QUADS * HIGH_BITS);
    }
    return Quad(
        number(low, high, 0u, 0u),
        number(low, high, 16u, 16u),
        number(low, high, 8u, 8u),
        number(low, high, 24u, 24u),
    );
}

// Scale and minimum of Q4_K and Q5_K: f16 d, f16 dmin and 12 bytes with eight scales and minima of six bits each.
fn k_scale_min(rows: Rows, plane: Plane, sub: u32) -> Affine {
    var scale: vec4<u32>;
    var minimum: vec4<u32>;
    if (sub < 4u) {
        scale = record_u8(rows, plane, 4u + sub) & vec4<u32>(63u);
        minimum = record_u8(rows, plane, 8u + sub) & vec4<u32>(63u);
    } else {
        let nibbles = record_u8(rows, plane, 8u + sub);
        scale = (nibbles & vec4<u32>(15u)) | ((record_u8(rows, plane, sub) >> vec4<u32>(6u)) << vec4<u32>(4u));
        minimum = (nibbles >> vec4<u32>(4u)) | ((record_u8(rows, plane, 4u + sub) >> vec4<u32>(6u)) << vec4<u32>(4u));
    }
    return Affine(
        record_f16(rows, plane, 0u) * vec4<f32>(scale),
        -record_f16(rows, plane, 2u) * vec4<f32>(minimum),
    );
}
