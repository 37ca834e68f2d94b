// Log-probabilities of a row's sampled token and of the
// most likely ones, from the logits alone.

@group(0) @binding(0) var<storage, read> logits: array<u32>;
@group(0) @binding(1) var<storage, read> sampled_ids: array<u32>;
@group(0) @binding(2) var<storage, read_write> own_values: array<u32>;
@group(0) @binding(3) var<storage, read_write> alternative_ids: array<u32>;
@group(0) @binding(4) var<storage, read_write> alternatives: array<u32>;

const MINUS_INFINITY: u32 = 0xff800000u;

// Natural logarithm of a sum of weights in units of the
// best one, which the sum contains.
fn log_sum(sum: vec2<u32>) -> f32 {
    let top = select(31u, 32u + firstLeadingBit(sum.y), sum.y != 0u);
    // The 24 bits from the top one on.
    let shift = top - 23u;
    let fraction = ((sum.x >> shift) | (sum.y << (32u - shift))) & 0x7fffffu;
    var exponent = f32(i32(top) - 31);
    var mantissa = bitcast<f32>(0x3f800000u | fraction);
    if (mantissa > 1.41421354f) {
        exponent += 1.0f;
        mantissa *= 0.5f;
    }
    let ratio = (mantissa - 1.0f) / (mantissa + 1.0f);
    let square = ratio * ratio;
    var series = 1.0f / 9.0f;
    series = series * square + 1.0f / 7.0f;
    series = series * square + 0.2f;
    series = series * square + 1.0f / 3.0f;
    series = series * square + 1.0f;
    return exponent * LN_2_HIGH + (exponent * LN_2_LOW + 2.0f * ratio * series);
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let row = group.x;
    let at = p.logits_base + row * p.logits_row;
    let listed = row * p.shape.alternatives;
    let id = sampled_ids[p.ids_base + row];
    let has_token = id < p.shape.vocabulary;
    var last = NON_FINITE;
    var last_id = 0u;
    var best = 0.0f;
    var normalizer = 0.0f;
    // One more: the best token is needed in any case.
    for (var place = 0u; place < max(p.shape.alternatives, 1u); place++) {
        var order = EXCLUDED;
        var next = NO_TOKEN;
        for (var other = thread; other < p.shape.vocabulary; other += THREADS) {
            let own = order_of(logits[at + other]);
            if (own > order && (own < last || (own == last && other > last_id))) {
                order = own;
                next = other;
            }
        }
        find_best(order, next, thread);
        last = sums_high[0];
        last_id = sums_low[0];
        workgroupBarrier();
        if (place == 0u) {
            best = logit_of(last);
            var own = vec2<u32>(0u);
            for (var other = thread; other < p.shape.vocabulary; other += THREADS) {
                let own_order = order_of(logits[at + other]);
                if (own_order != EXCLUDED) {
                    own = sum64(own, vec2<u32>(weight_of(logit_of(own_order) - best, 1.0f), 0u));
                }
            }
            let through = prefix_of(own, thread);
            normalizer = log_sum(total_of_all());
            workgroupBarrier();
        }
        if (thread == 0u && place < p.shape.alternatives) {
            let is_listed = has_token && last != EXCLUDED;
            let value = bitcast<u32>(logit_of(last) - best - normalizer);
            alternative_ids[p.alternative_ids_base + listed + place] = select(NO_TOKEN, last_id, is_listed);
            alternatives[p.alternatives_base + listed + place] = select(MINUS_INFINITY, value, is_listed);
        }
    }
    if (thread == 0u) {
        var value = MINUS_INFINITY;
        if (has_token) {
            value = bitcast<u32>(logit_of(order_of(logits[at + id])) - best - normalizer);
        }
        own_values[p.own_base + row] = value;
    }
}
