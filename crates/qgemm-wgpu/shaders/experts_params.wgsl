// The parameter of products with experts, and what a workgroup's rows and expert make of it. As in `params.wgsl`, with
// the index where C would be.

struct Params {
    shape: GemmShape,     // `m` is the rows of all experts, or with FORM_MASKED the capacity of each
    modes: u32,           // `mode()` reads it
    x_row: u32,           // elements between rows of X
    x_sharers: u32,       // rows of D that share a row of X
    experts: u32,
    d_row: u32,           // elements between rows of D
    residual_row: u32,    // elements between rows of the residual
    row_pitch: u32,       // rows of W from one expert to the next: whole tiles
    x_base: u32,
    w_base: u32,          // vectors of four words
    row_scale_base: u32,
    k_order_base: u32,
    index_base: u32,
    bias_base: u32,
    token_scale_base: u32,
    residual_base: u32,
    d_base: u32,
}

var<immediate> p: Params;

@group(0) @binding(2) var<storage, read> row_scale: array<f32>;
// Products with experts have no C: its place is that of the index.
@group(0) @binding(4) var<storage, read> c_words: array<u32>;
@group(0) @binding(5) var<storage, read> bias_words: array<u32>;
@group(0) @binding(6) var<storage, read> token_scale: array<f32>;
@group(0) @binding(7) var<storage, read> residual_words: array<u32>;

// The workgroup's rows: all of one expert.
struct Own {
    expert: u32,
    first: u32,  // the first row of D, or its place in the list
    rows: u32,
}

var<private> own: Own;

fn index_word(place: u32) -> u32 {
    return c_words[p.index_base + place];
}

// Finds the rows of the workgroups at `place`, TILE_M at most; false where there are none.
fn take_rows(place: u32) -> bool {
    let form = mode(FORM_MODE);
    if (form == FORM_INDEXED) {
        if (place >= p.shape.m) {
            return false;
        }
        // A negative id is a large number here.
        own = Own(index_word(place), place, 1u);
        return own.expert < p.experts;
    }
    if (form == FORM_MASKED) {
        let tiles = (p.shape.m + TILE_M - 1u) / TILE_M;
        if (place / tiles >= p.experts) {
            return false;
        }
        let first = place % tiles * TILE_M;
        let count = min(index_word(place / tiles), p.shape.m);
        own = Own(place / tiles, place / tiles * p.shape.m + first, min(TILE_M, max(count, first) - first));
        return own.rows > 0u;
    }
    var before = 0u;
    var first = min(index_word(0u), p.shape.m);
    for (var expert = 0u; expert < p.experts; expert++) {
        let end = min(index_word(expert + 1u), p.shape.m);
        let rows = max(end, first) - first;
        let tiles = (rows + TILE_M - 1u) / TILE_M;
        if (place < before + tiles) {
            let skipped = (place - before) * TILE_M;
            own = Own(expert, first + skipped, min(TILE_M, rows - skipped));
            return true;
        }
        before += tiles;
        first = end;
    }
    return false;
}

// Whether the index is lists, as `list_parts` of qgemm-hal has them: offsets, and from a multiple of 64 words on the rows of each
// expert.
fn is_listed() -> bool {
    return has(FLAG_LISTS);
}

fn list_first() -> u32 {
    return (p.experts + 64u) / 64u * 64u;
}

// The first row of D, where rows follow one another; those of a list are found one by one.
fn rows_begin() -> u32 {
    return select(own.first, 0u, is_listed());
}

fn d_row_of(m: u32) -> u32 {
    if (!is_listed()) {
        return m;
    }
    let row = index_word(list_first() + own.first + m);
    return select(NO_ROW, row, row < p.shape.m);
}

// Of a row that is none, the first of X.
fn x_row_of(m: u32) -> u32 {
    if (!is_listed()) {
        return m;
    }
    let row = d_row_of(m);
    return select(row / p.x_sharers, 0u, row == NO_ROW);
}

fn tokens() -> u32 {
    return own.rows;
}

fn rows_first() -> u32 {
    return 0u;
}

fn x_first() -> u32 {
    return p.x_base + rows_begin() / p.x_sharers * p.x_row;
}

fn x_col() -> u32 {
    return 1u;
}

// Experts that share a weight have its bias and its order of columns, too.
fn own_weight() -> u32 {
    return select(0u, own.expert, p.row_pitch > 0u);
}

fn w_first() -> u32 {
    return p.w_base + own.expert * (p.row_pitch / TILE_ROWS) * k_tiles() * PACKED_VECTORS;
}

fn row_scale_first() -> u32 {
    return p.row_scale_base + own.expert * p.row_pitch;
}

fn k_order_first() -> u32 {
    return p.k_order_base + own_weight() * k_tiles() * PACKED_K;
}

fn c_first() -> u32 {
    return 0u;
}

fn c_row() -> u32 {
    return 0u;
}

fn bias_first() -> u32 {
    return p.bias_base + own_weight() * p.shape.out_features * select(1u, 2u, has(FLAG_GATED));
}

fn token_scale_first() -> u32 {
    return p.token_scale_base + rows_begin();
}

fn residual_first() -> u32 {
    return p.residual_base + rows_begin() * p.residual_row;
}

fn d_first() -> u32 {
    return p.d_base + rows_begin() * p.d_row;
}

// Columns of X.
fn x_columns() -> u32 {
    return p.shape.k;
}

// Columns in the order in which W stores them.
fn stored_columns() -> u32 {
    return p.shape.stored_k;
}

// Packed k-tiles of a row of W.
fn k_tiles() -> u32 {
    return (p.shape.stored_k + PACKED_K - 1u) / PACKED_K;
}
