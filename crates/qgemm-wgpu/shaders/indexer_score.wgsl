// Sparse-attention indexer: scores of keys. One invocation
// per key computes weighted ReLU products with eight heads
// at a time. Indices are clamped: no content of ranges,
// lengths or tables makes an access go out of bounds.

@group(0) @binding(0) var<storage, read> queries: array<u32>;
@group(0) @binding(1) var<storage, read> keys: array<u32>;
@group(0) @binding(2) var<storage, read> weights: array<f32>;
@group(0) @binding(3) var<storage, read> q_scales: array<f32>;
@group(0) @binding(4) var<storage, read> k_scales: array<f32>;
@group(0) @binding(5) var<storage, read> starts: array<u32>;  // or lengths
@group(0) @binding(6) var<storage, read> ends: array<u32>;  // or the block table
@group(0) @binding(7) var<storage, read_write> scores: array<u32>;

const TILE_HEADS: u32 = 8u;
const FOURS: u32 = FEATURES / 4u;

// Query heads in f32: [TILE_HEADS][FOURS].
var<workgroup> tile: array<vec4<f32>, TILE_HEADS * FOURS>;
var<workgroup> tile_weights: array<f32, TILE_HEADS>;

// Extracts four features from up to three adjacent words.
fn four_of(index: u32, words: vec3<u32>) -> vec4<f32> {
    if (E4M3) {
        let shift = index % 4u * 8u;
        let bytes = select((words.x >> shift) | (words.y << (32u - shift)), words.x, shift == 0u);
        return e4m3_to_f32(vec4<u32>(bytes, bytes >> 8u, bytes >> 16u, bytes >> 24u) & vec4<u32>(0xffu));
    }
    let is_odd = index % 2u == 1u;
    let low = select(words.x, (words.x >> 16u) | (words.y << 16u), is_odd);
    let high = select(words.y, (words.y >> 16u) | (words.z << 16u), is_odd);
    let halves = vec4<u32>(low & 0xffffu, low >> 16u, high & 0xffffu, high >> 16u);
    if (DTYPE == F16) {
        return f16_to_f32(halves);
    }
    return bitcast<vec4<f32>>(halves << vec4<u32>(16u));
}

// Indices of the words that hold four features
// from `index` on; the last index may repeat.
fn places_of(index: u32) -> vec3<u32> {
    let per_word = select(2u, 4u, E4M3);
    let first = index / per_word;
    let last = (index + 3u) / per_word;
    return vec3<u32>(first, min(first + 1u, last), last);
}

fn load_query(index: u32) -> vec4<f32> {
    let at = places_of(index);
    return four_of(index, vec3<u32>(queries[at.x], queries[at.y], queries[at.z]));
}

fn load_key(index: u32) -> vec4<f32> {
    let at = places_of(index);
    return four_of(index, vec3<u32>(keys[at.x], keys[at.y], keys[at.z]));
}

@compute @workgroup_size(THREADS)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let place = group.x + group.y * groups.x;
    let local_query = place / p.key_groups;
    let key = place % p.key_groups * THREADS + thread;
    if (local_query >= p.part_queries) {
        return;
    }
    let query = p.first_query + local_query;
    let first_key = key - thread;
    let visible = visible_range(query);
    let is_key = key < p.most_keys;
    var score = 0.0;
    var is_visible = false;
    // Uniform for the workgroup.
    if (visible.x < visible.y && visible.x < first_key + THREADS && visible.y > first_key) {
        is_visible = is_key && key >= visible.x && key < visible.y;
        var page = 0u;
        var row = key;
        if (PAGES && is_visible) {
            page = ends[p.ends_base + query / p.each * p.table_width + key / p.page_size];
            row = key % p.page_size;
            is_visible = page < p.pages;
        }
        let key_at = p.k_base + page * K_PAGE + row * K_ROW;
        for (var head = 0u; head < HEADS; head += TILE_HEADS) {
            workgroupBarrier();
            for (var i = thread; i < TILE_HEADS * FOURS; i += THREADS) {
                var four = vec4<f32>(0.0);
                if (head + i / FOURS < HEADS) {
                    four = load_query(p.q_base + query * Q_TOKEN + (head + i / FOURS) * Q_HEAD + i % FOURS * 4u);
                }
                tile[i] = four;
            }
            if (thread < TILE_HEADS && head + thread < HEADS) {
                var weight = weights[p.weights_base + query * WEIGHTS_ROW + head + thread];
                if (Q_SCALES) {
                    weight *= q_scales[p.q_scales_base + query * HEADS + head + thread];
                }
                tile_weights[thread] = weight;
            }
            workgroupBarrier();
            if (is_visible) {
                var products: array<f32, TILE_HEADS>;
                for (var four = 0u; four < FOURS; four++) {
                    let features = load_key(key_at + four * 4u);
                    for (var i = 0u; i < TILE_HEADS; i++) {
                        products[i] += dot(features, tile[i * FOURS + four]);
                    }
                }
                for (var i = 0u; i < min(TILE_HEADS, HEADS - head); i++) {
                    // Not `max`: it may drop NaN.
                    score += tile_weights[i] * select(products[i], 0.0, products[i] < 0.0);
                }
            }
        }
        if (K_SCALES && is_visible) {
            score *= k_scales[p.k_scales_base + page * K_SCALE_PAGE + row];
        }
    }
    if (is_key) {
        let bits = bitcast<u32>(score);
        let is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
        scores[p.scores_base + local_query * p.scores_row + key] = select(p.masked_score, select(bits, 0x7fffffffu, is_nan), is_visible);
    }
}
