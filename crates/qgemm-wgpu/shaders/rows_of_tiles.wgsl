// One row in each of four consecutive W tiles.
// 16 neighbouring invocations have all rows of these tiles.
// Their loads read adjacent words at any access width.
// Packed layout Simd16: tiles of 16 rows, each with k-tiles of
// PACKED_K columns.

@group(0) @binding(1) var<storage, read> w_words: array<u32>;

// Lanes of `gemv` have one row of each tile.
const LANES_BESIDE: bool = false;

struct Rows {
    k_tiles: vec4<u32>,  // start of each tile's k-tile, in words
    row: u32,            // row in the tile
}

// Rows of lane `lane` from row `n0` on, in k-tile 0.
// Past the last tile the last one is used.
fn rows_of_lane(n0: u32, lane: u32) -> Rows {
    let last = (p.shape.stored_rows - 1u - rows_first()) / TILE_ROWS;
    let tiles = min(vec4<u32>((n0 - rows_first()) / TILE_ROWS) + vec4<u32>(0u, 1u, 2u, 3u), vec4<u32>(last));
    return Rows((vec4<u32>(w_first()) + tiles * (k_tiles() * PACKED_VECTORS)) * 4u, lane);
}

// `rows` of k-tile 0, moved to k-tile `k_tile`.
fn in_k_tile(rows: Rows, k_tile: u32) -> Rows {
    return Rows(rows.k_tiles + vec4<u32>(k_tile * (PACKED_VECTORS * 4u)), rows.row);
}

// Word `word` of the code plane at vector `plane` of the k-tile.
fn code_word(rows: Rows, plane: u32, word: u32) -> vec4<u32> {
    return at_each(rows, plane * 4u + word * TILE_ROWS + rows.row);
}

// Bits of each row's records from `byte` on, at least to the
// end of the word.
fn record_bits(rows: Rows, plane: Plane, byte: u32) -> vec4<u32> {
    if (by_words(plane)) {
        return at_each(rows, plane.at / 4u + byte / 4u * TILE_ROWS + rows.row) >> vec4<u32>(byte % 4u * 8u);
    }
    let at = plane.at + rows.row / plane.rows * plane.row + byte;
    return at_each(rows, at / 4u) >> vec4<u32>(at % 4u * 8u);
}

fn at_each(rows: Rows, word: u32) -> vec4<u32> {
    let at = rows.k_tiles + vec4<u32>(word);
    return vec4<u32>(w_words[at.x], w_words[at.y], w_words[at.z], w_words[at.w]);
}
