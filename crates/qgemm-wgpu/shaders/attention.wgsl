// Attention: a workgroup has ROWS rows (queries × heads of a
// KV head) and iterates over their visible keys, one key per
// invocation. `attention_plain.wgsl` or `attention_codes.wgsl`
// precedes this file and reads K and V; `attention_extra.wgsl`
// or `attention_extra_in_place.wgsl` reads mask, sinks and gate,
// and `attention_row_end.wgsl` finishes rows. With split-KV, a
// workgroup has a part of the keys and writes a partial result.
// Indices are clamped: no content of offsets,
// lengths or tables makes an access go out of bounds.

struct Params {
    sequences: u32,
    tokens: u32,  // of all sequences
    most_queries: u32,  // of one sequence; of every sequence without offsets
    most_keys: u32,
    pages: u32,
    page_size: u32,
    table_width: u32,  // 0 without a table
    factor: f32,  // score scale: to tanh's argument, or to a base-2 exponent
    soft_cap: f32,  // as a base-2 exponent
    q_base: u32,  // offsets in elements, as in `params.wgsl`
    k_base: u32,
    v_base: u32,
    q_offsets_base: u32,
    kv_index_base: u32,
    table_base: u32,
    d_base: u32,  // of partial results with split-KV
    lse_base: u32,
    k_scales_base: u32,
    v_scales_base: u32,
    mask_base: u32,
    sinks_base: u32,
    gate_base: u32,
}

var<immediate> p: Params;

@group(0) @binding(0) var<storage, read> queries: array<u32>;
@group(0) @binding(1) var<storage, read> keys: array<u32>;
@group(0) @binding(2) var<storage, read> values: array<u32>;
@group(0) @binding(3) var<storage, read> q_offsets: array<u32>;
@group(0) @binding(4) var<storage, read> kv_index: array<u32>;  // offsets or lengths
@group(0) @binding(5) var<storage, read> block_table: array<u32>;
@group(0) @binding(6) var<storage, read_write> d: array<atomic<u32>>;

const GROUP: u32 = HEADS / KV_HEADS;
const NOT_FOUND: u32 = 0xffffffffu;
// Features that a vector of every invocation's sums holds.
const SPAN: u32 = 4u * THREADS;
const SPANS: u32 = COLUMNS / SPAN;

var<workgroup> q: array<vec4<f32>, ROWS * COLUMNS / 4u>;
var<workgroup> scores: array<f32, ROWS * THREADS>;
// Per key: offset of its value, and
// bits of the rows that attend to it.
var<workgroup> value_at: array<u32, THREADS>;
var<workgroup> visible_to: array<u32, THREADS>;
var<workgroup> first_visible: array<u32, ROWS>;
var<workgroup> end_visible: array<u32, ROWS>;
var<workgroup> partials: array<f32, 64u>;
var<workgroup> row_max: array<f32, ROWS>;
var<workgroup> row_sum: array<f32, ROWS>;
var<workgroup> rescale: array<f32, ROWS>;
// 1 if a score of the row is NaN or +inf: the result is NaN.
var<workgroup> row_is_nan: array<atomic<u32>, ROWS>;
var<workgroup> bounds: vec2<u32>;
// Mask words of the tile, two per
// row, and whether any bit is set.
var<workgroup> tile_bits: array<u32, 2u * ROWS>;
var<workgroup> tile_has_bits: u32;

fn beyond(a: u32, b: u32) -> u32 {
    return a - min(a, b);
}

fn load_query(index: u32) -> f32 {
    return element(queries[word_of(index, DTYPE)], index, DTYPE);
}

fn load_gate(index: u32) -> f32 {
    return element(extra_word(GATE_AT, word_of(index, DTYPE)), index, DTYPE);
}

// Gate factors of two adjacent elements.
fn gate_factors(index: u32) -> vec2<f32> {
    if (!GATED) {
        return vec2<f32>(1.0);
    }
    return vec2<f32>(gate_factor(load_gate(index)), gate_factor(load_gate(index + 1u)));
}

// Stores numbers of a partial result.
fn store_partial(index: u32, numbers: vec2<f32>) {
    atomicStore(&d[index], bitcast<u32>(numbers.x));
    atomicStore(&d[index + 1u], bitcast<u32>(numbers.y));
}

// Base-2 exponent of a scaled score, with the soft cap.
fn exponent(product: f32) -> f32 {
    if (!SOFT_CAP) {
        return product;
    }
    let e = exp2(max(abs(product), 0.0) * -2.88539008);
    return select(1.0, -1.0, product < 0.0) * (1.0 - e) / (1.0 + e) * p.soft_cap;
}

@compute @workgroup_size(THREADS)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let place = group.x + group.y * groups.x;
    let row_groups = (p.most_queries * GROUP + ROWS - 1u) / ROWS;
    let group_count = p.sequences * KV_HEADS * row_groups * PARTS;
    let has_work = place < group_count;
    let part_of_keys = place % PARTS;
    let tile_of_rows = place / PARTS;
    let sequence = select(0u, tile_of_rows / row_groups / KV_HEADS, has_work);
    let kv_head = tile_of_rows / row_groups % KV_HEADS;
    var first_token = sequence * p.most_queries;
    var query_count = p.most_queries;
    if (Q_OFFSETS) {
        first_token = min(q_offsets[p.q_offsets_base + sequence], p.tokens);
        query_count = min(beyond(min(q_offsets[p.q_offsets_base + sequence + 1u], p.tokens), first_token), query_count);
    }
    var first_key_row = 0u;
    var key_count = p.most_keys;
    if (KV_OFFSETS) {
        first_key_row = min(kv_index[p.kv_index_base + sequence], p.page_size);
        key_count = min(beyond(min(kv_index[p.kv_index_base + sequence + 1u], p.page_size), first_key_row), key_count);
    } else if (KV_LENGTHS) {
        key_count = min(kv_index[p.kv_index_base + sequence], key_count);
    }
    let first_row = tile_of_rows % row_groups * ROWS;
    let rows = select(0u, min(beyond(query_count * GROUP, first_row), ROWS), has_work);

    if (thread < ROWS) {
        let query = (first_row + thread) / GROUP;
        let end = beyond(key_count + query + 1u, query_count);
        let last = select(key_count, min(end, key_count), CAUSAL);
        let is_row = thread < rows;
        end_visible[thread] = select(0u, last, is_row);
        first_visible[thread] = select(0u, min(beyond(end, WINDOW), last), is_row);
        row_max[thread] = MASKED;
        row_sum[thread] = 0.0;
        atomicStore(&row_is_nan[thread], 0u);
    }
    for (var i = thread; i < rows * (QK_DIM / 4u); i += THREADS) {
        let r = i / (QK_DIM / 4u);
        let column = i % (QK_DIM / 4u) * 4u;
        let row = first_row + r;
        let head = kv_head * GROUP + row % GROUP;
        let index = p.q_base + (first_token + row / GROUP) * Q_TOKEN + head * Q_HEAD + column;
        q[(r * COLUMNS + column) / 4u] = key_factor(kv_head)
            * vec4<f32>(load_query(index), load_query(index + 1u), load_query(index + 2u), load_query(index + 3u));
    }
    workgroupBarrier();
    if (thread == 0u) {
        var first = NOT_FOUND;
        var end = 0u;
        for (var r = 0u; r < rows; r++) {
            if (first_visible[r] < end_visible[r]) {
                first = min(first, first_visible[r]);
                end = max(end, end_visible[r]);
            }
        }
        first = min(first, end) / THREADS * THREADS;
        if (PARTIAL) {
            first = max(first, part_of_keys * PART_KEYS);
            end = min(end, (part_of_keys + 1u) * PART_KEYS);
        }
        bounds = vec2<u32>(first, end);
    }
    let range = workgroupUniformLoad(&bounds);

    // Of each span, columns 2 · thread and the next,
    // and the same two 2 · THREADS further on.
    var sums: array<vec4<f32>, ROWS * SPANS>;
    for (var i = 0u; i < ROWS * SPANS; i++) {
        sums[i] = vec4<f32>();
    }
    for (var tile = range.x; tile < range.y; tile += THREADS) {
        if (MASK) {
            if (thread < 2u * rows) {
                let row = first_row + thread / 2u;
                let query = row / GROUP + select(first_token, 0u, MASK_SHARED);
                let of_head = select(p.tokens, p.most_queries, MASK_SHARED) * (kv_head * GROUP + row % GROUP);
                let row_words = (p.most_keys + 31u) / 32u;
                let word = tile / 32u + thread % 2u;
                var bits = 0u;
                if (word < row_words) {
                    bits = extra_word(MASK_AT, p.mask_base + (select(0u, of_head, MASK_PER_HEAD) + query) * row_words + word);
                }
                tile_bits[thread] = bits;
            }
            workgroupBarrier();
            if (thread == 0u) {
                var any = 0u;
                for (var i = 0u; i < 2u * rows; i++) {
                    any |= tile_bits[i];
                }
                tile_has_bits = any;
            }
            if (workgroupUniformLoad(&tile_has_bits) == 0u) {
                continue;
            }
        }
        // One key per invocation.
        let key = tile + thread;
        var visible = 0u;
        for (var r = 0u; r < rows; r++) {
            var is_visible = key >= first_visible[r] && key < end_visible[r];
            if (MASK) {
                is_visible = is_visible && ((tile_bits[2u * r + thread / 32u] >> (thread % 32u)) & 1u) == 1u;
            }
            visible |= u32(is_visible) << r;
        }
        var page = sequence;
        var row = key;
        if (KV_OFFSETS) {
            page = 0u;
            row += first_key_row;
        } else if (TABLE) {
            if (visible != 0u) {
                page = block_table[p.table_base + sequence * p.table_width + key / p.page_size];
            }
            row = key % p.page_size;
            visible = select(0u, visible, page < p.pages);
        }
        value_at[thread] = page * V_PAGE + row * V_TOKEN + kv_head * V_HEAD;
        visible_to[thread] = visible;
        var products: array<f32, ROWS>;
        for (var r = 0u; r < ROWS; r++) {
            products[r] = 0.0;
        }
        if (visible != 0u) {
            add_products(page * K_PAGE + row * K_TOKEN + kv_head * K_HEAD, &products);
        }
        for (var r = 0u; r < ROWS; r++) {
            let product = products[r] * p.factor;
            var score = exponent(product);
            if (is_nan_or_infinite(product)) {
                let is_nan = bitcast<u32>(product) != 0xff800000u && !(SOFT_CAP && bitcast<u32>(product) == 0x7f800000u);
                if (is_nan && ((visible >> r) & 1u) == 1u) {
                    atomicStore(&row_is_nan[r], 1u);
                }
                if (!SOFT_CAP) {
                    score = MASKED;
                }
            }
            scores[r * THREADS + thread] = select(MASKED, score, ((visible >> r) & 1u) == 1u);
        }
        workgroupBarrier();
        // Eight invocations per row, each with every eighth key.
        let r = thread / 8u;
        var next_max = MASKED;
        if (r < rows) {
            for (var i = thread % 8u; i < THREADS; i += 8u) {
                next_max = max(next_max, scores[r * THREADS + i]);
            }
        }
        partials[thread] = next_max;
        workgroupBarrier();
        var previous_max = MASKED;
        if (r < rows) {
            previous_max = row_max[r];
            next_max = previous_max;
            for (var i = 0u; i < 8u; i++) {
                next_max = max(next_max, partials[r * 8u + i]);
            }
        }
        workgroupBarrier();
        var sum = 0.0;
        if (r < rows) {
            for (var i = thread % 8u; i < THREADS; i += 8u) {
                let score = scores[r * THREADS + i];
                let power = select(exp2(score - next_max), 0.0, score <= MASKED);
                scores[r * THREADS + i] = power;
                sum += power;
            }
        }
        partials[thread] = sum;
        workgroupBarrier();
        if (r < rows && thread % 8u == 0u) {
            let weight = select(exp2(previous_max - next_max), 0.0, previous_max <= MASKED);
            var all_sums = 0.0;
            for (var i = 0u; i < 8u; i++) {
                all_sums += partials[r * 8u + i];
            }
            rescale[r] = weight;
            row_sum[r] = row_sum[r] * weight + all_sums;
            row_max[r] = next_max;
        }
        workgroupBarrier();
        if (RESULTS) {
            for (var i = 0u; i < rows * SPANS; i++) {
                sums[i] *= rescale[i / SPANS];
            }
            for (var span = 0u; span < SPANS; span++) {
                let column = span * SPAN + thread * 2u;
                for (var i = 0u; i < THREADS; i++) {
                    let value_rows = visible_to[i];
                    if (value_rows == 0u || column >= V_DIM) {
                        continue;
                    }
                    var v = vec4<f32>(load_value(value_at[i] + column), 0.0, 0.0);
                    if (column + 2u * THREADS < V_DIM) {
                        v = vec4<f32>(v.xy, load_value(value_at[i] + column + 2u * THREADS));
                    }
                    for (var row_of_group = 0u; row_of_group < ROWS; row_of_group++) {
                        // 0 · NaN is NaN: skip masked values.
                        if (((value_rows >> row_of_group) & 1u) == 1u) {
                            sums[row_of_group * SPANS + span] += scores[row_of_group * THREADS + i] * v;
                        }
                    }
                }
            }
        }
        workgroupBarrier();
    }

    for (var row_of_group = 0u; row_of_group < rows; row_of_group++) {
        let row = first_row + row_of_group;
        let head = kv_head * GROUP + row % GROUP;
        let token = first_token + row / GROUP;
        let is_nan = atomicLoad(&row_is_nan[row_of_group]) == 1u;
        var end = RowEnd(value_factor(kv_head), row_max[row_of_group], row_sum[row_of_group], is_nan);
        if (SINKS && !PARTIAL) {
            end = with_sink(end, extra_word(SINKS_AT, p.sinks_base + head));
        }
        let partial = p.d_base + ((token * HEADS + head) * PARTS + part_of_keys) * (V_DIM + 2u);
        for (var span = 0u; span < SPANS; span++) {
            let own_sums = sums[row_of_group * SPANS + span];
            let column = span * SPAN + thread * 2u;
            let has_first = RESULTS && column < V_DIM;
            let has_second = RESULTS && column + 2u * THREADS < V_DIM;
            if (PARTIAL) {
                let weighted = own_sums * end.weight;
                if (has_first) {
                    store_partial(partial + column, weighted.xy);
                }
                if (has_second) {
                    store_partial(partial + column + 2u * THREADS, weighted.zw);
                }
                continue;
            }
            let result = divided(end, own_sums, thread);
            let to = p.d_base + token * D_TOKEN + head * D_HEAD + column;
            let gate = p.gate_base + token * GATE_TOKEN + head * GATE_HEAD + column;
            if (has_first) {
                store_result(to, result.xy * gate_factors(gate));
            }
            if (has_second) {
                store_result(to + 2u * THREADS, result.zw * gate_factors(gate + 2u * THREADS));
            }
        }
        if (PARTIAL && thread == 0u) {
            let row_max_or_nan = select(bitcast<u32>(end.row_max), NAN, end.is_nan);
            atomicStore(&d[partial + V_DIM], row_max_or_nan);
            atomicStore(&d[partial + V_DIM + 1u], bitcast<u32>(end.row_sum));
        }
        if (LSE && !PARTIAL && thread == 0u) {
            store_lse(p.lse_base + token * HEADS + head, lse_bits(end));
        }
    }
}
