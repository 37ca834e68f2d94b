// Parameters of MoE GEMM, and a workgroup's rows and expert.
// As `params.wgsl`, but wgpu allows one storage binding fewer
// than the kernel has operands.
// So the index uses the binding of C.
// With C it uses the binding of the row factors, which then
// follow the index in one buffer.

struct Params {
    shape: GemmShape,       // `m`: rows of all experts; with FORM_MASKED the capacity of each
    modes: u32,             // `mode()` reads it
    x_row: u32,             // elements between rows of X; words if X is quantized
    x_sharers: u32,         // rows of D that share a row of X
    experts: u32,
    first_expert: u32,      // first expert of this dispatch whose weight is bound
    bound_experts: u32,     // number of such experts
    d_row: u32,             // elements between rows of D
    c_row: u32,             // elements between rows of C; bits of a clamped SwiGLU's alpha
    residual_row: u32,      // elements between rows of the residual
    row_pitch: u32,         // rows of W from expert to expert: whole tiles
    w_base: u32,            // vectors of four words
    token_scale_base: u32,
    bases: vec2<u32>,       // 8-bit offsets: X, row scales, orders, index; bias, C, residual, D
    x_scale_row: u32,       // words between scale rows of a quantized X (column-order binding)
    limit: f32,             // of a clamped SwiGLU
}

var<immediate> p: Params;

@group(0) @binding(2) var<storage, read> row_scale: array<f32>;
@group(0) @binding(4) var<storage, read> c_words: array<u32>;
@group(0) @binding(5) var<storage, read> bias_words: array<u32>;
@group(0) @binding(6) var<storage, read> token_scale_words: array<u32>;
@group(0) @binding(7) var<storage, read> residual_words: array<u32>;

// The workgroup's rows, all of one expert.
struct Own {
    expert: u32,
    first: u32,  // first row of D, or its list entry
    rows: u32,
}

fn base_of(word: u32, place: u32) -> u32 {
    return (word >> (place * 8u)) & 255u;
}

var<private> own: Own;

fn index_word(place: u32) -> u32 {
    let at = base_of(p.bases.x, 3u) + place;
    if (has(FLAG_C)) {
        return token_scale_words[at];
    }
    return c_words[at];
}

// Finds the rows of workgroup `place`, at most TILE_M.
// False without rows, or if another dispatch has the
// expert's weight.
fn take_rows(place: u32) -> bool {
    return find_rows(place) && own.expert - p.first_expert < p.bound_experts;
}

fn find_rows(place: u32) -> bool {
    let form = mode(FORM_MODE);
    if (form == FORM_INDEXED) {
        if (place >= p.shape.m) {
            return false;
        }
        // A negative id is a large unsigned number.
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

// Whether the index is lists (`list_parts` of qgemm-hal):
// offsets, then, at a multiple of 64 words, the
// rows of each expert.
fn is_listed() -> bool {
    return has(FLAG_LISTS);
}

fn list_first() -> u32 {
    return (p.experts + 64u) / 64u * 64u;
}

// First row of D for contiguous rows.
// Listed rows are looked up one by one.
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

// Row of X; an invalid row maps to row 0.
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
    return base_of(p.bases.x, 0u) + rows_begin() / p.x_sharers * p.x_row;
}

fn x_col() -> u32 {
    return 1u;
}

fn x_scales_first() -> u32 {
    return base_of(p.bases.x, 2u) + rows_begin() / p.x_sharers * p.x_scale_row;
}

fn x_scale_row() -> u32 {
    return p.x_scale_row;
}

// Experts that share a weight share its bias and column order.
fn own_weight() -> u32 {
    return select(0u, own.expert, p.row_pitch > 0u);
}

fn w_first() -> u32 {
    return p.w_base + (own.expert - p.first_expert) * (p.row_pitch / TILE_ROWS) * k_tiles() * PACKED_VECTORS;
}

fn row_scale_first() -> u32 {
    return base_of(p.bases.x, 1u) + own.expert * p.row_pitch;
}

fn k_order_first() -> u32 {
    return base_of(p.bases.x, 2u) + own_weight() * k_tiles() * PACKED_K;
}

fn c_first() -> u32 {
    return base_of(p.bases.y, 1u) + rows_begin() * p.c_row;
}

fn c_row() -> u32 {
    return p.c_row;
}

// A gated pair has no C.
// Its row stride holds alpha of a clamped SwiGLU.
fn swiglu_alpha() -> f32 {
    return bitcast<f32>(p.c_row);
}

fn swiglu_limit() -> f32 {
    return p.limit;
}

fn bias_first() -> u32 {
    return base_of(p.bases.y, 0u) + own_weight() * p.shape.out_features * select(1u, 2u, has(FLAG_GATED));
}

fn token_scale_of(m: u32) -> f32 {
    return bitcast<f32>(token_scale_words[p.token_scale_base + rows_begin() + m]);
}

fn residual_first() -> u32 {
    return base_of(p.bases.y, 2u) + rows_begin() * p.residual_row;
}

fn d_first() -> u32 {
    return base_of(p.bases.y, 3u) + rows_begin() * p.d_row;
}

// Columns of X.
fn x_columns() -> u32 {
    return p.shape.k;
}

// Columns in W's stored order.
fn stored_columns() -> u32 {
    return p.shape.stored_k;
}

// Packed k-tiles of a row of W.
fn k_tiles() -> u32 {
    return (p.shape.stored_k + PACKED_K - 1u) / PACKED_K;
}
