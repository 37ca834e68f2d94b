// W by quads: four neighbouring columns.

// Numbers of four consecutive columns, each of four rows.
struct Quad {
    a: vec4<f32>,
    b: vec4<f32>,
    c: vec4<f32>,
    d: vec4<f32>,
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
