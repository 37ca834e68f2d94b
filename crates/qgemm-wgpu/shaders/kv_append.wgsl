// Rotary embedding and KV-cache append: STEP selects queries in
// place, or new keys or values to the cache. This file locates
// heads of tokens and their rotation; `kv_append_plain.wgsl`,
// `kv_append_codes.wgsl` or `kv_append_heads.wgsl` follows. Indices are clamped: no content
// of offsets, lengths or tables makes an access go out of bounds.

struct Params {
    sequences: u32,
    tokens: u32,  // of all sequences
    most_queries: u32,  // of one sequence; of every sequence without offsets
    most_keys: u32,
    pages: u32,
    page_size: u32,
    table_width: u32,  // 0 without a table
    table_positions: u32,  // rows of cosines and sines
    table_row: u32,  // elements between rows
    amplitude: f32,
    sine_amplitude: f32,  // negative for the inverse rotation
    source_base: u32,  // offsets in elements, as in `params.wgsl`
    written_base: u32,  // in bytes for quantized caches
    q_offsets_base: u32,
    kv_index_base: u32,
    block_table_base: u32,
    positions_base: u32,
    angles_base: u32,  // of cosines, or of frequency words
    sines_or_gamma_base: u32,
    scales_base: u32,  // of head factors, or of block scales
}

var<immediate> p: Params;

@group(0) @binding(0) var<storage, read> source: array<u32>;
@group(0) @binding(1) var<storage, read> q_offsets: array<u32>;
@group(0) @binding(2) var<storage, read> kv_index: array<u32>;  // offsets or lengths
@group(0) @binding(3) var<storage, read> block_table: array<u32>;
@group(0) @binding(4) var<storage, read> positions: array<u32>;
@group(0) @binding(5) var<storage, read> angles: array<u32>;  // cosines, or frequencies (low word first)
// Sines; of normalized heads gamma, as no angle comes from tables then.
@group(0) @binding(6) var<storage, read> sines_or_gamma: array<u32>;
@group(0) @binding(7) var<storage, read_write> written: array<atomic<u32>>;

const IN_PLACE: u32 = 0u;
const NOT_FOUND: u32 = 0xffffffffu;

fn beyond(a: u32, b: u32) -> u32 {
    return a - min(a, b);
}

// High 32 bits of a product.
fn mul_high(a: u32, b: u32) -> u32 {
    let low = (a & 0xffffu) * (b & 0xffffu);
    let first = (a >> 16u) * (b & 0xffffu) + (low >> 16u);
    let second = (a & 0xffffu) * (b >> 16u) + (first & 0xffffu);
    return (a >> 16u) * (b >> 16u) + (first >> 16u) + (second >> 16u);
}

// Cosine and sine of an angle in units of 2^-32 turns.
// Subtracts the nearest quarter turn; polynomials for
// the rest, at most an eighth of a turn, within 2^-24.
fn cos_sin(turns: u32) -> vec2<f32> {
    let quarter = (turns + (1u << 29u)) >> 30u;
    let x = f32(bitcast<i32>(turns - (quarter << 30u))) * 1.46291807926715968e-9;
    let square = x * x;
    let s = x + x * square * (-1.66666667e-1 + square * (8.33333333e-3 + square * (-1.98412698e-4 + square * 2.75573192e-6)));
    let c = 1.0 + square * (-0.5 + square * (4.16666667e-2 + square * (-1.38888889e-3 + square * (2.48015873e-5 - square * 2.75573192e-7))));
    let swapped = select(vec2<f32>(c, s), vec2<f32>(s, c), (quarter & 1u) != 0u);
    let cosine = select(swapped.x, -swapped.x, ((quarter + 1u) & 2u) != 0u);
    return vec2<f32>(cosine, select(swapped.y, -swapped.y, (quarter & 2u) != 0u));
}

// Cosine and sine of a rotary pair at
// a position, times their amplitudes.
fn angle_of(pair: u32, position: u32) -> vec2<f32> {
    if (TABLES) {
        let at = position * p.table_row + pair;
        let sine = bitcast<f32>(sines_or_gamma[p.sines_or_gamma_base + at]);
        return vec2<f32>(bitcast<f32>(angles[p.angles_base + at]) * p.amplitude, sine * p.sine_amplitude);
    }
    let low = angles[p.angles_base + 2u * pair];
    let high = angles[p.angles_base + 2u * pair + 1u];
    // Rounded to the nearest 2^-32 turn.
    let below = low * position;
    let angle = cos_sin(high * position + mul_high(low, position) + (below >> 31u));
    return angle * vec2<f32>(p.amplitude, p.sine_amplitude);
}

fn load(index: u32) -> f32 {
    if (STEP == IN_PLACE) {
        return element(atomicLoad(&written[word_of(index, DTYPE)]), index, DTYPE);
    }
    return element(source[word_of(index, DTYPE)], index, DTYPE);
}

// Source and destination of a head of a token.
struct Place {
    is_there: bool,  // whether it is written
    position: u32,
    source_at: u32,
    written_at: u32,  // without `written_base`
}

fn place_of(token: u32, head: u32) -> Place {
    let nowhere = Place();
    var sequence = token / p.most_queries;
    var query = token % p.most_queries;
    var query_count = p.most_queries;
    if (Q_OFFSETS) {
        // Binary search: the last sequence that begins
        // at or before the token. Offsets ascend.
        var first = 0u;
        var count = p.sequences;
        while (count > 1u) {
            let half = count / 2u;
            if (q_offsets[p.q_offsets_base + first + half] <= token) {
                first += half;
                count -= half;
            } else {
                count = half;
            }
        }
        sequence = first;
        let first_token = min(q_offsets[p.q_offsets_base + sequence], p.tokens);
        if (token < first_token) {
            return nowhere;
        }
        query = token - first_token;
        query_count = min(beyond(min(q_offsets[p.q_offsets_base + sequence + 1u], p.tokens), first_token), p.most_queries);
    }
    if (sequence >= p.sequences) {
        return nowhere;
    }
    var first_key_row = 0u;
    var key_count = p.most_keys;
    if (KV_OFFSETS) {
        first_key_row = min(kv_index[p.kv_index_base + sequence], p.page_size);
        key_count = min(beyond(min(kv_index[p.kv_index_base + sequence + 1u], p.page_size), first_key_row), key_count);
    } else if (KV_LENGTHS) {
        key_count = min(kv_index[p.kv_index_base + sequence], key_count);
    }
    if (query >= query_count || key_count + query < query_count) {
        return nowhere;
    }
    let key = key_count + query - query_count;
    var position = key;
    if (POSITIONS) {
        position = positions[p.positions_base + token];
    }
    if (TABLES && position >= p.table_positions) {
        return nowhere;
    }
    if (STEP == IN_PLACE) {
        let at = token * WRITTEN_TOKEN + head * WRITTEN_HEAD;
        return Place(true, position, p.written_base + at, at);
    }
    var page = sequence;
    var row = key;
    if (KV_OFFSETS) {
        page = 0u;
        row += first_key_row;
    } else if (TABLE) {
        page = block_table[p.block_table_base + sequence * p.table_width + key / p.page_size];
        row = key % p.page_size;
        if (page >= p.pages) {
            return nowhere;
        }
    }
    let source_at = p.source_base + token * SOURCE_TOKEN + head * SOURCE_HEAD;
    return Place(true, position, source_at, page * WRITTEN_PAGE + row * WRITTEN_TOKEN + head * WRITTEN_HEAD);
}
