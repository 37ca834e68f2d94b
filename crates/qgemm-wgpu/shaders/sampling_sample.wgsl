// Sampling: one workgroup chooses the token of a row.
// Top-k and top-p find the last kept token by histograms
// over bytes of the orders.

@group(0) @binding(0) var<storage, read> logits: array<u32>;
@group(0) @binding(1) var<storage, read> parameters: array<u32>;
@group(0) @binding(2) var<storage, read> orders: array<u32>;
@group(0) @binding(3) var<storage, read_write> ids: array<u32>;
@group(0) @binding(4) var<storage, read_write> status: array<u32>;

const BINS: u32 = 256u;
const STATUS_NON_FINITE: u32 = 1u;
const STATUS_NO_CANDIDATE: u32 = 2u;
const STATUS_PARAMETER: u32 = 3u;

var<workgroup> bins_low: array<atomic<u32>, BINS>;
var<workgroup> bins_high: array<atomic<u32>, BINS>;
var<workgroup> found: u32;
var<workgroup> left: vec2<u32>;

var<private> row: u32;
// Kept tokens: larger orders than this one, and equal
// ones up to this id.
var<private> cut_order: u32;
var<private> cut_id: u32;
// What a kept token counts: 1, or a weight from `least` on.
var<private> is_count: bool;
var<private> least: u32;
var<private> best_logit: f32;
var<private> inverse: f32;
// Tokens of this order alone count, if it is not 0.
var<private> only: u32;

fn order_at(id: u32) -> u32 {
    if (p.shape.earlier > 0u) {
        return orders[p.orders_base + row * p.shape.vocabulary + id];
    }
    return order_of(logits[p.logits_base + row * p.logits_row + id]);
}

fn measure(id: u32, order: u32) -> u32 {
    let is_kept = order > cut_order || (order == cut_order && id <= cut_id);
    if (!is_kept || (only != 0u && order != only)) {
        return 0u;
    }
    if (is_count) {
        return 1u;
    }
    let weight = weight_of(logit_of(order) - best_logit, inverse);
    return select(0u, weight, weight >= least);
}

// Part of a total, in 2^-32, that top-p keeps at least.
fn kept_weight(total: vec2<u32>, part: u32) -> vec2<u32> {
    let kept = fraction_of(total, part);
    return select(kept, vec2<u32>(1u, 0u), all(kept == vec2<u32>(0u)));
}

fn measure_share(first: u32, last: u32) -> vec2<u32> {
    var own = vec2<u32>(0u);
    for (var id = first; id < last; id++) {
        own = sum64(own, vec2<u32>(measure(id, order_at(id)), 0u));
    }
    return own;
}

// Notes where the running sum reaches `target`, if this
// invocation's share does it.
fn note(place: u32, through: vec2<u32>, own: vec2<u32>, wanted: vec2<u32>) {
    let before = difference64(through, own);
    if (less64(before, wanted) && !less64(through, wanted)) {
        found = place;
        left = difference64(wanted, before);
    }
}

// The first token in order of ids whose running sum of
// measures reaches `wanted`, or with `draws` exceeds this
// part of the total.
fn find_token(wanted: vec2<u32>, draws: bool, word: u32, thread: u32) -> u32 {
    let share = (p.shape.vocabulary + THREADS - 1u) / THREADS;
    let begin = min(thread * share, p.shape.vocabulary);
    var own = measure_share(begin, min(begin + share, p.shape.vocabulary));
    var through = prefix_of(own, thread);
    let drawn = sum64(fraction_of(total_of_all(), word), vec2<u32>(1u, 0u));
    note(begin, through, own, select(wanted, drawn, draws));
    workgroupBarrier();
    let first = found;
    let missing = left;
    let end = min(first + share, p.shape.vocabulary);
    let each = (share + THREADS - 1u) / THREADS;
    let own_begin = min(first + thread * each, end);
    let own_end = min(own_begin + each, end);
    own = measure_share(own_begin, own_end);
    through = prefix_of(own, thread);
    var sum = difference64(through, own);
    if (less64(sum, missing) && !less64(through, missing)) {
        var id = own_begin;
        for (; id + 1u < own_end; id++) {
            sum = sum64(sum, vec2<u32>(measure(id, order_at(id)), 0u));
            if (!less64(sum, missing)) {
                break;
            }
        }
        found = id;
    }
    workgroupBarrier();
    return found;
}

// Keeps as few of the most likely tokens as reach a sum:
// `count` tokens, or this part of the total.
fn cut_row(count: u32, part: u32, thread: u32) {
    var prefix = 0u;
    var missing = vec2<u32>(0u);
    for (var digit = 0u; digit < 4u; digit++) {
        let shift = 24u - 8u * digit;
        workgroupBarrier();
        atomicStore(&bins_low[thread], 0u);
        atomicStore(&bins_high[thread], 0u);
        workgroupBarrier();
        for (var id = thread; id < p.shape.vocabulary; id += THREADS) {
            let order = order_at(id);
            // A shift by 32 leaves nothing.
            let above = select(order >> ((shift + 8u) & 31u), 0u, digit == 0u);
            if (above == prefix) {
                let own = measure(id, order);
                let bin = BINS - 1u - ((order >> shift) & 255u);
                let old = atomicAdd(&bins_low[bin], own);
                if (old + own < old) {
                    atomicAdd(&bins_high[bin], 1u);
                }
            }
        }
        workgroupBarrier();
        // Highest orders first.
        let own = vec2<u32>(atomicLoad(&bins_low[thread]), atomicLoad(&bins_high[thread]));
        let through = prefix_of(own, thread);
        if (digit == 0u) {
            let total = total_of_all();
            let counted = vec2<u32>(count, 0u);
            missing = kept_weight(total, part);
            if (is_count) {
                missing = select(counted, total, less64(total, counted));
            }
        }
        note(BINS - 1u - thread, through, own, missing);
        workgroupBarrier();
        prefix = (prefix << 8u) | found;
        missing = left;
    }
    only = prefix;
    let id = find_token(missing, false, 0u, thread);
    only = 0u;
    cut_order = prefix;
    cut_id = id;
}

// The first word of Philox4x32-10.
fn random_word(seed: vec2<u32>, position: vec2<u32>) -> u32 {
    var c = vec4<u32>(position, 0u, 0u);
    var key = seed;
    for (var round = 0u; round < 10u; round++) {
        let first = product64(0xD2511F53u, c.x);
        let second = product64(0xCD9E8D57u, c.z);
        c = vec4<u32>(second.y ^ c.y ^ key.x, second.x, first.y ^ c.w ^ key.y, first.x);
        key += vec2<u32>(0x9E3779B9u, 0xBB67AE85u);
    }
    return c.x;
}

// Whether the bits are those of a finite number of at least 0.
fn is_positive(bits: u32) -> bool {
    return bits < 0x7f800000u || bits == 0x80000000u;
}

fn is_share(bits: u32) -> bool {
    return bits <= 0x3f800000u || bits == 0x80000000u;
}

fn write_row(id: u32, code: u32, index: u32, bits: u32) {
    ids[p.ids_base + row] = id;
    let at = p.status_base + row * 4u;
    status[at] = code;
    status[at + 1u] = index;
    status[at + 2u] = bits;
    status[at + 3u] = 0u;
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    row = group.x;
    let at = p.parameters_base + group.x * PARAMETER_WORDS;
    let temperature = parameters[at];
    let top_k = parameters[at + 1u];
    let top_p = parameters[at + 2u];
    let min_p = parameters[at + 3u];
    let penalty = parameters[at + 4u];
    let seed = vec2<u32>(parameters[at + 6u], parameters[at + 7u]);
    let position = vec2<u32>(parameters[at + 8u], parameters[at + 9u]);
    var valid = array<bool, 4>(is_positive(temperature), is_share(top_p), is_share(min_p),
                               is_positive(penalty) && (penalty & 0x7fffffffu) != 0u);
    var values = array<u32, 4>(temperature, top_p, min_p, penalty);
    var refused = 4u;
    for (var i = 4u; i > 0u; i--) {
        if (!valid[i - 1u]) {
            refused = i - 1u;
        }
    }

    var order = EXCLUDED;
    var best = NO_TOKEN;
    for (var id = thread; id < p.shape.vocabulary; id += THREADS) {
        let other = order_at(id);
        if (other > order) {
            order = other;
            best = id;
        }
    }
    find_best(order, best, thread);
    let best_order = sums_high[0];
    let best_id = sums_low[0];
    workgroupBarrier();
    best_logit = logit_of(best_order);
    inverse = 1.0f / bitcast<f32>(temperature);

    let is_argmax = temperature < 0x00800000u || temperature == 0x80000000u || top_k == 1u || (top_p & 0x7fffffffu) == 0u;
    var drawn = best_id;
    if (!is_argmax) {
        cut_order = EXCLUDED + 1u;
        cut_id = NO_TOKEN;
        only = 0u;
        least = 1u;
        is_count = true;
        if (top_k > 0u) {
            cut_row(top_k, 0u, thread);
        }
        is_count = false;
        if (top_p < 0x3f800000u) {
            cut_row(0u, u32(bitcast<f32>(top_p) * 4294967296.0f), thread);
        }
        // Bits of an invalid value may be those of a NaN.
        least = max(u32(clamp(bitcast<f32>(min_p), 0.0f, 1.0f) * 2147483648.0f + 0.5f), 1u);
        drawn = find_token(vec2<u32>(0u), true, random_word(seed, position), thread);
    }
    if (thread > 0u) {
        return;
    }
    if (refused < 4u) {
        write_row(NO_TOKEN, STATUS_PARAMETER, refused, values[refused]);
    } else if (best_order == EXCLUDED) {
        write_row(NO_TOKEN, STATUS_NO_CANDIDATE, 0u, 0u);
    } else if (best_order == NON_FINITE) {
        write_row(NO_TOKEN, STATUS_NON_FINITE, best_id, logits[p.logits_base + row * p.logits_row + best_id]);
    } else {
        write_row(drawn, 0u, 0u, 0u);
    }
}
