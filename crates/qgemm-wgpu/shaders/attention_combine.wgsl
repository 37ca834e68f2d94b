// Split-KV combine: a workgroup adds up the partial results of
// a query of a head, and finishes the row. A partial result
// has V_DIM sums, row_max and row_sum; a row_max of NaN
// makes the row NaN.

struct Params {
    sequences: u32,
    tokens: u32,  // of all sequences
    most_queries: u32,
    partials_base: u32,  // offsets in elements, as in `params.wgsl`
    q_offsets_base: u32,
    sinks_base: u32,
    gate_base: u32,
    d_base: u32,
    lse_base: u32,
}

var<immediate> p: Params;

@group(0) @binding(0) var<storage, read> partials: array<u32>;
@group(0) @binding(1) var<storage, read> q_offsets: array<u32>;
@group(0) @binding(2) var<storage, read> sinks: array<u32>;
@group(0) @binding(3) var<storage, read> gates: array<u32>;
@group(0) @binding(4) var<storage, read_write> d: array<atomic<u32>>;
@group(0) @binding(5) var<storage, read_write> lse: array<u32>;

const PITCH: u32 = V_DIM + 2u;

// Gate factors of two adjacent elements.
fn gate_factors(index: u32) -> vec2<f32> {
    if (!GATED) {
        return vec2<f32>(1.0);
    }
    return vec2<f32>(
        gate_factor(element(gates[word_of(index, DTYPE)], index, DTYPE)),
        gate_factor(element(gates[word_of(index + 1u, DTYPE)], index + 1u, DTYPE)),
    );
}

@compute @workgroup_size(THREADS)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let place = group.x + group.y * groups.x;
    let head = place % HEADS;
    let query = place / HEADS % p.most_queries;
    let sequence = place / HEADS / p.most_queries;
    if (sequence >= p.sequences) {
        return;
    }
    var token = sequence * p.most_queries + query;
    if (Q_OFFSETS) {
        token = min(q_offsets[p.q_offsets_base + sequence], p.tokens) + query;
        if (token >= min(q_offsets[p.q_offsets_base + sequence + 1u], p.tokens)) {
            return;
        }
    }
    let first = p.partials_base + (token * HEADS + head) * PARTS * PITCH;
    var row = RowEnd(1.0, MASKED, 0.0, false);
    for (var part = 0u; part < PARTS; part++) {
        let part_max = bitcast<f32>(partials[first + part * PITCH + V_DIM]);
        row.is_nan = row.is_nan || is_nan_or_infinite(part_max);
        row.row_max = max(row.row_max, part_max);
    }
    for (var part = 0u; part < PARTS; part++) {
        let at = first + part * PITCH + V_DIM;
        row.row_sum += bitcast<f32>(partials[at + 1u]) * rescale_factor(bitcast<f32>(partials[at]), row.row_max);
    }
    let combined_max = row.row_max;
    if (SINKS) {
        row = with_sink(row, sinks[p.sinks_base + head]);
    }
    for (var column = thread * 2u; column < V_DIM; column += 2u * THREADS) {
        var sums = vec2<f32>();
        for (var part = 0u; part < PARTS; part++) {
            let at = first + part * PITCH;
            let weight = rescale_factor(bitcast<f32>(partials[at + V_DIM]), combined_max);
            sums += weight * vec2<f32>(bitcast<f32>(partials[at + column]), bitcast<f32>(partials[at + column + 1u]));
        }
        let result = divided(row, vec4<f32>(sums, 0.0, 0.0), thread).xy;
        let gate = p.gate_base + token * GATE_TOKEN + head * GATE_HEAD + column;
        store_result(p.d_base + token * D_TOKEN + head * D_HEAD + column, result * gate_factors(gate));
    }
    if (LSE && thread == 0u) {
        lse[p.lse_base + token * HEADS + head] = lse_bits(row);
    }
}
