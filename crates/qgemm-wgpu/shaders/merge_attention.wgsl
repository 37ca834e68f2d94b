// Merge of partial attention results by log-sum-exp.
// A row is a head of a token. `row_threads` invocations
// share it, in pairs of columns.
// `*_base` offsets count elements (see `params.wgsl`).
// Infinity and NaN are tested by bits, because adapters may
// assume that they do not occur.

struct Params {
    shape: MergeAttentionShape,  // of this dispatch
    part_stride: u32,            // elements between parts
    token_stride: u32,
    head_stride: u32,
    d_token: u32,
    d_head: u32,
    lse_part: u32,               // rows of all dispatches
    partial_base: u32,
    partial_lse_base: u32,
    d_base: u32,
    lse_base: u32,
}

var<immediate> p: Params;

@group(0) @binding(0) var<storage, read> partial_words: array<u32>;
@group(0) @binding(1) var<storage, read> partial_lse: array<u32>;
@group(0) @binding(2) var<storage, read_write> d: array<atomic<u32>>;
@group(0) @binding(3) var<storage, read_write> lse: array<u32>;

const NAN: u32 = 0x7fc00000u;
const INFINITY: u32 = 0x7f800000u;
const MINUS_INFINITY: u32 = 0xff800000u;
const MOST_PARTS: u32 = 256u;
const LEAST_ROW_THREADS: u32 = 8u;
const LEAST: f32 = -3.40282347e+38f;
// States of a row: whether a part has weight, and
// whether the row is NaN.
const WEIGHED: u32 = 1u;
const BROKEN: u32 = 2u;

var<workgroup> weights: array<f32, THREADS / LEAST_ROW_THREADS * MOST_PARTS>;
var<workgroup> values: array<f32, THREADS>;
var<workgroup> states: array<u32, THREADS>;

// Row sums in a fixed order.
// All invocations of a workgroup take part.
fn row_sum(thread: u32, lane: u32, value: f32) -> f32 {
    workgroupBarrier();
    values[thread] = value;
    for (var half = p.shape.row_threads / 2u; half > 0u; half /= 2u) {
        workgroupBarrier();
        if (lane < half) {
            values[thread] += values[thread + half];
        }
    }
    workgroupBarrier();
    return values[thread - lane];
}

struct Row {
    maximum: f32,
    state: u32,
}

fn row_max(thread: u32, lane: u32, own: Row) -> Row {
    values[thread] = own.maximum;
    states[thread] = own.state;
    for (var half = p.shape.row_threads / 2u; half > 0u; half /= 2u) {
        workgroupBarrier();
        if (lane < half) {
            values[thread] = max(values[thread], values[thread + half]);
            states[thread] |= states[thread + half];
        }
    }
    workgroupBarrier();
    return Row(values[thread - lane], states[thread - lane]);
}

// The largest finite log-sum-exp of a row.
fn maximum_of(row: u32, thread: u32, lane: u32) -> Row {
    var own = Row(LEAST, 0u);
    for (var part = lane; part < p.shape.parts; part += p.shape.row_threads) {
        let bits = partial_lse[p.partial_lse_base + part * p.lse_part + row];
        if ((bits & 0x7fffffffu) > INFINITY || bits == INFINITY) {
            own.state |= BROKEN;
        } else if (bits != MINUS_INFINITY) {
            own.state |= WEIGHED;
            own.maximum = max(own.maximum, bitcast<f32>(bits));
        }
    }
    return row_max(thread, lane, own);
}

// exp(value - maximum); halves keep the difference finite.
fn weight_of(bits: u32, maximum: f32) -> f32 {
    if ((bits & 0x7fffffffu) >= INFINITY) {
        return 0.0;
    }
    let below = 2.0 * max(0.5 * bitcast<f32>(bits) - 0.5 * maximum, -64.0);
    return select(exp(below), 1.0, below == 0.0);
}

fn merged(row_weights: u32, rows: u32, inverse: f32, index: u32) -> vec2<f32> {
    var sums = vec2<f32>();
    for (var part = 0u; part < p.shape.parts; part++) {
        let weight = weights[row_weights + part * rows] * inverse;
        // Numbers without weight are not read.
        if (weight > 0.0) {
            let at = index + part * p.part_stride;
            let dtype = p.shape.dtype;
            for (var i = 0u; i < 2u; i++) {
                sums[i] += weight * element(partial_words[word_of(at + i, dtype)], at + i, dtype);
            }
        }
    }
    return sums;
}

@compute @workgroup_size(THREADS)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let row_threads = p.shape.row_threads;
    let rows = THREADS / row_threads;
    let own = thread / row_threads;
    let lane = thread % row_threads;
    let wanted = (group.x + group.y * groups.x) * rows + own;
    // No invocation may return before the barriers.
    let row = min(wanted, p.shape.rows - 1u);
    let found = maximum_of(row, thread, lane);

    var sum = 0.0;
    for (var part = lane; part < p.shape.parts; part += row_threads) {
        let weight = weight_of(partial_lse[p.partial_lse_base + part * p.lse_part + row], found.maximum);
        weights[own + part * rows] = weight;
        sum += weight;
    }
    sum = row_sum(thread, lane, sum);
    if (wanted >= p.shape.rows) {
        return;
    }

    let is_broken = (found.state & BROKEN) != 0u;
    let is_weighed = (found.state & WEIGHED) != 0u;
    let inverse = select(0.0, select(1.0 / sum, 1.0, sum == 1.0), is_weighed && !is_broken);
    let token = row / p.shape.heads;
    let head = row % p.shape.heads;
    let from_row = p.partial_base + token * p.token_stride + head * p.head_stride;
    let to_row = p.d_base + token * p.d_token + head * p.d_head;
    for (var column = lane * 2u; column < p.shape.dim; column += row_threads * 2u) {
        let sums = merged(own, rows, inverse, from_row + column);
        let nan = vec2<f32>(bitcast<f32>(NAN + (row & 0u)));
        store_d(to_row + column, 2u, p.shape.d_dtype, select(sums, nan, is_broken));
    }
    if ((p.shape.flags & FLAG_LSE) != 0u && lane == 0u) {
        var bits = bitcast<u32>(found.maximum + log(sum));
        bits = select(bits, MINUS_INFINITY, !is_weighed);
        lse[p.lse_base + row] = select(bits, NAN, is_broken);
    }
}
