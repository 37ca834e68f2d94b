// Four neighbouring rows of a W tile; the first is a
// multiple of four.
// Their words are adjacent: one load reads all four.
// Packed layout Simd16: tiles of 16 rows, each with k-tiles of
// PACKED_K columns.

@group(0) @binding(1) var<storage, read> w_vectors: array<vec4<u32>>;

// Lanes of `gemv` have neighbouring rows.
const LANES_BESIDE: bool = true;

struct Rows {
    k_tile: u32,  // start of the k-tile, in vectors
    first: u32,   // first row in its tile
}

// Rows `row .. row + 4` in k-tile `k_tile`.
// Past the last tile the last one is used.
fn rows_of(row: u32, k_tile: u32) -> Rows {
    let tile = (min(row, p.shape.stored_rows - 1u) - rows_first()) / TILE_ROWS;
    return Rows(w_first() + (tile * k_tiles() + k_tile) * PACKED_VECTORS, row % TILE_ROWS);
}

// Rows of lane `lane` from row `n0` on, in k-tile 0.
fn rows_of_lane(n0: u32, lane: u32) -> Rows {
    return rows_of(n0 + lane * 4u, 0u);
}

// `rows` of k-tile 0, moved to k-tile `k_tile`.
fn in_k_tile(rows: Rows, k_tile: u32) -> Rows {
    return Rows(rows.k_tile + k_tile * PACKED_VECTORS, rows.first);
}

// Word `word` of the code plane at vector `plane` of the k-tile.
fn code_word(rows: Rows, plane: u32, word: u32) -> vec4<u32> {
    return w_vectors[rows.k_tile + plane + word * (TILE_ROWS / 4u) + rows.first / 4u];
}

// The word that contains `byte`, shifted to put `byte` lowest.
fn k_tile_bits(k_tile: u32, byte: u32) -> u32 {
    return w_vectors[k_tile + byte / 16u][(byte / 4u) % 4u] >> ((byte % 4u) * 8u);
}

// Bits of each row's records from `byte` on, at least to the
// end of the word.
fn record_bits(rows: Rows, plane: Plane, byte: u32) -> vec4<u32> {
    if (plane.rows > 1u) {
        return vec4<u32>(k_tile_bits(rows.k_tile, plane.at + rows.first / plane.rows * plane.row + byte));
    }
    if (by_words(plane)) {
        let word = byte / 4u * (TILE_ROWS / 4u) + rows.first / 4u;
        return w_vectors[rows.k_tile + plane.at / 16u + word] >> vec4<u32>(byte % 4u * 8u);
    }
    let first = plane.at + rows.first * plane.row + byte;
    return vec4<u32>(
        k_tile_bits(rows.k_tile, first),
        k_tile_bits(rows.k_tile, first + plane.row),
        k_tile_bits(rows.k_tile, first + 2u * plane.row),
        k_tile_bits(rows.k_tile, first + 3u * plane.row),
    );
}
