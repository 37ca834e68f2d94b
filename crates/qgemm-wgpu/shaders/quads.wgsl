// W by quads of four neighbouring columns.

// Numbers of four consecutive columns, for four rows.
struct Quad {
    a: vec4<f32>,
    b: vec4<f32>,
    c: vec4<f32>,
    d: vec4<f32>,
}

// Words of a quad: `a` has codes of up to eight bits, `b` the
// second plane. Wider codes use more words.
struct QuadWords {
    a: vec4<u32>,
    b: vec4<u32>,
    c: vec4<u32>,
    d: vec4<u32>,
}

// Words of quad `quad` of a k-tile.
fn quad_words(rows: Rows, quad: u32) -> QuadWords {
    var words: QuadWords;
    if (LOW_BITS == 32u) {
        words.a = code_word(rows, LOW_PLANE, quad * 4u);
        words.b = code_word(rows, LOW_PLANE, quad * 4u + 1u);
        words.c = code_word(rows, LOW_PLANE, quad * 4u + 2u);
        words.d = code_word(rows, LOW_PLANE, quad * 4u + 3u);
    } else if (LOW_BITS == 16u) {
        words.a = code_word(rows, LOW_PLANE, quad * 2u);
        words.b = code_word(rows, LOW_PLANE, quad * 2u + 1u);
    } else {
        words.a = code_word(rows, LOW_PLANE, quad / LOW_QUADS) >> vec4<u32>(quad % LOW_QUADS * LOW_BITS);
        if (HIGH_BITS > 0u) {
            words.b = code_word(rows, HIGH_PLANE, quad / HIGH_QUADS) >> vec4<u32>(quad % HIGH_QUADS * HIGH_BITS);
        }
    }
    return words;
}

// Numbers of a quad. Values 0, 1, 2, 3 of a word are in
// bytes 0, 2, 1, 3.
fn numbers_of(w: QuadWords) -> Quad {
    if (LOW_BITS == 32u) {
        let none = vec4<u32>();
        return Quad(
            number(w.a, none, 0u, 0u),
            number(w.b, none, 0u, 0u),
            number(w.c, none, 0u, 0u),
            number(w.d, none, 0u, 0u),
        );
    }
    if (LOW_BITS == 16u) {
        let none = vec4<u32>();
        return Quad(
            number(w.a, none, 0u, 0u),
            number(w.a, none, 16u, 0u),
            number(w.b, none, 0u, 0u),
            number(w.b, none, 16u, 0u),
        );
    }
    return Quad(
        number(w.a, w.b, 0u, 0u),
        number(w.a, w.b, 16u, 16u),
        number(w.a, w.b, 8u, 8u),
        number(w.a, w.b, 24u, 24u),
    );
}
