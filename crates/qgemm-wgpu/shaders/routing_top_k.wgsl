// Router top-k, one token per workgroup.
// Keys are bits that order like numbers; 0 is below
// every selectable key.
// Infinity and NaN are tested by bits, because adapters may
// assume that they do not occur.

@group(0) @binding(0) var<storage, read> logits: array<u32>;
@group(0) @binding(1) var<storage, read> biases: array<u32>;
@group(0) @binding(2) var<storage, read_write> ids: array<u32>;
@group(0) @binding(3) var<storage, read_write> weights: array<f32>;

const MOST_EXPERTS: u32 = 1024u;
const MOST_TOP_K: u32 = 32u;
const INFINITY: u32 = 0xff800000u;  // in the order of `ordered`
const MINUS_INFINITY: u32 = 0x007fffffu;

var<workgroup> keys: array<u32, MOST_EXPERTS>;
var<workgroup> scores: array<f32, MOST_EXPERTS>;
var<workgroup> group_sums: array<u32, MOST_EXPERTS>;
// Per invocation: the largest key and its expert,
// or a partial sum.
var<workgroup> best: array<u32, THREADS>;
var<workgroup> best_at: array<u32, THREADS>;
var<workgroup> sums: array<f32, THREADS>;
var<workgroup> chosen: array<u32, MOST_TOP_K>;
var<workgroup> chosen_scores: array<f32, MOST_TOP_K>;

// The last expert may be shared by all tokens.
// It has no logit, and uses the last slot.
fn shared_experts() -> u32 {
    return select(0u, 1u, has(FLAG_SHARED));
}

fn logit_experts() -> u32 {
    return p.shape.experts - shared_experts();
}

fn chosen_slots() -> u32 {
    return p.shape.top_k - shared_experts();
}

// Place of an expert among the local ones.
fn place_of(id: u32) -> u32 {
    let place = id - p.shape.first_local;
    return select(ELSEWHERE, place, place < p.shape.local);
}

// Bits in numeric order, equal for both zeros; 0 for NaN.
fn ordered(bits: u32) -> u32 {
    let magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) {
        return 0u;
    }
    if (magnitude == 0u) {
        return 0x80000000u;
    }
    return select(bits | 0x80000000u, ~bits, bits >= 0x80000000u);
}

fn number(key: u32) -> f32 {
    return bitcast<f32>(select(~key, key & 0x7fffffffu, key >= 0x80000000u));
}

// Logistic function.
fn sigmoid(key: u32) -> f32 {
    if (key == INFINITY) {
        return 1.0;
    }
    if (key == MINUS_INFINITY) {
        return 0.0;
    }
    let x = number(key);
    let e = exp_nonpositive(-abs(x));
    return select(1.0, e, x < 0.0) / (1.0 + e);
}

// sqrt(ln(1 + exp(x))).
// ln(1 + e) is 2 * atanh(s) with s = e / (2 + e) ≤ 1/3.
// Below -16 it is e up to rounding.
fn sqrt_softplus(key: u32) -> f32 {
    if (key == INFINITY) {
        return number(key);
    }
    if (key == MINUS_INFINITY) {
        return 0.0;
    }
    let x = number(key);
    if (x < -16.0) {
        return exp_nonpositive(max(0.5 * x, -100.0));
    }
    let e = exp_nonpositive(-abs(x));
    let s = e / (2.0 + e);
    let square = s * s;
    var q = 0.0666666667;
    q = q * square + 0.0769230769;
    q = q * square + 0.0909090909;
    q = q * square + 0.111111111;
    q = q * square + 0.142857143;
    q = q * square + 0.2;
    q = q * square + 0.333333333;
    q = q * square + 1.0;
    return sqrt(max(x, 0.0) + 2.0 * s * q);
}

// exp(logit - largest logit).
fn share(key: u32, largest: u32) -> f32 {
    if (key == largest) {
        return 1.0;
    }
    if (key == MINUS_INFINITY || largest == INFINITY) {
        return 0.0;
    }
    // Halving avoids overflow.
    if (number(key) * 0.5 - number(largest) * 0.5 < -50.0) {
        return 0.0;
    }
    return exp_nonpositive(number(key) - number(largest));
}

// Largest key, and the lowest expert with this key, in
// `best[0]` and `best_at[0]`.
fn find_best(thread: u32) {
    var key = 0u;
    var at = 0u;
    for (var e = thread; e < logit_experts(); e += THREADS) {
        if (keys[e] > key) {
            key = keys[e];
            at = e;
        }
    }
    best[thread] = key;
    best_at[thread] = at;
    for (var half = THREADS / 2u; half > 0u; half /= 2u) {
        workgroupBarrier();
        if (thread < half) {
            let other = best[thread + half];
            let other_at = best_at[thread + half];
            if (other > best[thread] || (other == best[thread] && other_at < best_at[thread])) {
                best[thread] = other;
                best_at[thread] = other_at;
            }
        }
    }
    workgroupBarrier();
}

fn add_up(thread: u32, value: f32) -> f32 {
    sums[thread] = value;
    for (var half = THREADS / 2u; half > 0u; half /= 2u) {
        workgroupBarrier();
        if (thread < half) {
            sums[thread] += sums[thread + half];
        }
    }
    workgroupBarrier();
    return sums[0];
}

// Removes the keys of all groups but the best.
// A group's score is the sum of its two largest keys.
fn keep_best_groups(thread: u32) {
    let groups = p.shape.groups;
    let size = logit_experts() / groups;
    for (var g = thread; g < groups; g += THREADS) {
        var first = 0u;
        var second = 0u;
        for (var i = 0u; i < size; i++) {
            let key = keys[g * size + i];
            second = max(second, min(first, key));
            first = max(first, key);
        }
        group_sums[g] = select(ordered(bitcast<u32>(number(first) + number(second))), first, second == 0u);
    }
    workgroupBarrier();
    for (var g = thread; g < groups; g += THREADS) {
        let own = group_sums[g];
        var better = 0u;
        for (var other = 0u; other < groups; other++) {
            let sum = group_sums[other];
            better += select(0u, 1u, sum > own || (sum == own && other < g));
        }
        if (own == 0u || better >= p.shape.chosen_groups) {
            for (var i = 0u; i < size; i++) {
                keys[g * size + i] = 0u;
            }
        }
    }
    workgroupBarrier();
}

@compute @workgroup_size(THREADS)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let token = group.y * groups.x + group.x;
    if (token >= p.shape.tokens) {
        return;
    }
    let row = p.logits_base + token * p.logits_row;
    for (var e = thread; e < logit_experts(); e += THREADS) {
        let index = row + e;
        let word = logits[word_of(index, p.shape.dtype)];
        // f32 bits need no conversion.
        keys[e] = ordered(select(bitcast<u32>(element(word, index, p.shape.dtype)), word, p.shape.dtype == F32));
    }
    // Keys of other invocations are read from here on.
    workgroupBarrier();
    if (has(FLAG_SIGMOID)) {
        for (var e = thread; e < logit_experts(); e += THREADS) {
            scores[e] = select(sigmoid(keys[e]), 0.0, keys[e] == 0u);
        }
    } else if (has(FLAG_SQRT_SOFTPLUS)) {
        for (var e = thread; e < logit_experts(); e += THREADS) {
            scores[e] = select(sqrt_softplus(keys[e]), 0.0, keys[e] == 0u);
        }
    } else {
        find_best(thread);
        let largest = best[0];
        var own = 0.0;
        for (var e = thread; e < logit_experts(); e += THREADS) {
            scores[e] = select(share(keys[e], largest), 0.0, keys[e] == 0u);
            own += scores[e];
        }
        let sum = add_up(thread, own);
        for (var e = thread; e < logit_experts(); e += THREADS) {
            scores[e] = select(scores[e] / sum, 0.0, largest == 0u);
        }
    }
    let is_biased = has(FLAG_BIAS);
    if (is_biased || p.shape.groups != 0u) {
        for (var e = thread; e < logit_experts(); e += THREADS) {
            var bias = 0u;
            if (is_biased) {
                bias = biases[p.bias_base + e];
            }
            let sum = ordered(bitcast<u32>(scores[e] + bitcast<f32>(bias)));
            keys[e] = select(sum, 0u, keys[e] == 0u || ordered(bias) == 0u);
        }
    }
    workgroupBarrier();
    if (p.shape.groups != 0u) {
        keep_best_groups(thread);
    }
    for (var place = 0u; place < chosen_slots(); place++) {
        find_best(thread);
        if (thread == 0u) {
            let is_there = best[0] != 0u;
            chosen[place] = select(0xffffffffu, best_at[0], is_there);
            chosen_scores[place] = select(0.0, scores[best_at[0]], is_there);
            keys[best_at[0]] = 0u;
        }
        workgroupBarrier();
    }
    if (thread < p.shape.top_k) {
        var divisor = 1.0;
        if (has(FLAG_RENORMALIZE)) {
            var sum = 0.0;
            for (var place = 0u; place < chosen_slots(); place++) {
                sum += chosen_scores[place];
            }
            divisor = max(sum, 0x1p-126f);
        }
        let slot = token * p.shape.top_k + thread;
        let is_chosen = thread < chosen_slots();
        let id = select(logit_experts(), chosen[thread], is_chosen);
        let place = select(place_of(id), id, id == 0xffffffffu);
        let weight = select(1.0, chosen_scores[thread] / divisor * p.shape.scale, is_chosen);
        ids[p.ids_base + slot] = place;
        weights[p.weights_base + slot] = select(weight, 0.0, place == ELSEWHERE);
    }
}
