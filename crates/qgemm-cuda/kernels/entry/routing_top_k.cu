// Router top-k: one warp per token, every 32nd expert
// per lane. Keys are compared as order-preserving
// bits. A single CTA also builds the expert lists;
// its warps have one or two rows of slots.
#include "atoms/float.cuh"
#include "epilogue/activation.cuh"
#include "mainloop/expert_lists.cuh"
#include "mainloop/warp_max.cuh"

// Experts of a lane: `lane`, `lane + 32`, ….
constexpr u32 PER_LANE = QG_ROUTED_EXPERTS / 32;
// Below every valid key.
constexpr u32 NO_KEY = 0;
constexpr float SMALLEST_NORMAL = 1.17549435e-38f;

// Order-preserving bits; both zeros are equal, NaN is NO_KEY.
QG_DEVICE u32 ordered(float key) {
    const u32 bits = f32_to_bits(key), magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return NO_KEY;
    if (magnitude == 0) return 0x80000000u;
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

QG_DEVICE float number(u32 ordered) {
    return bits_to_f32(ordered & 0x80000000u ? ordered & 0x7fffffffu : ~ordered);
}

// Deterministic sum, equal in all lanes.
QG_DEVICE float warp_sum(float value) {
#pragma unroll
    for (u32 mask = 16; mask > 0; mask /= 2) value += shfl_xor(value, mask);
    return value;
}

// Optional shared expert of every token. It has no logit and
// takes one extra slot, the last; `p.shape` does not count it.
QG_DEVICE u32 shared_experts(const RoutingParams& p) {
    return p.shape.flags & QG_FLAG_SHARED ? 1 : 0;
}

// Place of an expert among the local ones.
QG_DEVICE u32 place_of(const RoutingParams& p, u32 id) {
    const u32 place = id - p.shape.first_local;
    return place < p.shape.local ? place : ELSEWHERE;
}

QG_DEVICE float load_logit(const RoutingParams& p, u64 row, u32 expert) {
    const u64 at = row + expert;
    if (p.shape.dtype == DTYPE_F32) return bits_to_f32(ld_global_u32(word_at(p.at.logits, at)));
    const u32 bits = ld_global_cached_u16(reinterpret_cast<const u8*>(p.at.logits) + at * 2);
    return p.shape.dtype == DTYPE_F16 ? f16_to_f32(bits) : bf16_to_f32(bits);
}

// Group-limited routing: clears the keys of all but the
// best groups, ranked by the sum of their two largest keys.
// `keys`: shared memory of the warp, one word per expert.
QG_DEVICE void keep_best_groups(const RoutingParams& p, u32 (&key)[PER_LANE], u32* keys) {
    const u32 lane = thread_index() % 32, experts = p.shape.experts, groups = p.shape.groups;
    const u32 size = experts / groups;
#pragma unroll
    for (u32 i = 0; i < PER_LANE; i++)
        if (i * 32 + lane < experts) st_shared(&keys[i * 32 + lane], key[i]);
    warp_barrier();
    for (u32 group = lane; group < groups; group += 32) {
        u32 first = NO_KEY, second = NO_KEY;
        for (u32 i = 0; i < size; i++) {
            // Rotated start per lane avoids bank conflicts.
            const u32 own = ld_shared(&keys[group * size + (i + lane) % size]);
            if (own > first)
                second = first, first = own;
            else if (own > second)
                second = own;
        }
        // The sum overwrites the group's first key.
        st_shared(&keys[group * size], second == NO_KEY ? first : ordered(number(first) + number(second)));
    }
    warp_barrier();
    u32 kept = 0;
    for (u32 group = lane, bit = 1; group < groups; group += 32, bit <<= 1) {
        const u32 own = ld_shared(&keys[group * size]);
        u32 better = 0;
        for (u32 other = 0; other < groups; other++) {
            const u32 sum = ld_shared(&keys[other * size]);
            better += sum > own || (sum == own && other < group);
        }
        if (own != NO_KEY && better < p.shape.chosen_groups) kept |= bit;
    }
    warp_barrier();
    for (u32 group = lane, bit = 1; group < groups; group += 32, bit <<= 1)
        st_shared(&keys[group * size], kept & bit ? 1u : 0u);
    warp_barrier();
#pragma unroll
    for (u32 i = 0; i < PER_LANE; i++) {
        const u32 expert = i * 32 + lane;
        if (expert < experts && ld_shared(&keys[expert / size * size]) == 0) key[i] = NO_KEY;
    }
    warp_barrier();
}

// sqrt(ln(1 + exp(x))).
QG_DEVICE float sqrt_softplus(float x) {
    return x < -16.0f ? exp_nonpositive(0.5f * x) : sqrt_f32(softplus(x));
}

// Scores from logits; 0 for NaN logits.
QG_DEVICE void score_logits(const RoutingParams& p, float (&score)[PER_LANE], const u32 (&key)[PER_LANE]) {
    if (p.shape.flags & QG_FLAG_SIGMOID) {
#pragma unroll
        for (u32 i = 0; i < PER_LANE; i++) score[i] = key[i] == NO_KEY ? 0.0f : sigmoid(score[i]);
        return;
    }
    if (p.shape.flags & QG_FLAG_SQRT_SOFTPLUS) {
#pragma unroll
        for (u32 i = 0; i < PER_LANE; i++) score[i] = key[i] == NO_KEY ? 0.0f : sqrt_softplus(score[i]);
        return;
    }
    u32 own = NO_KEY;
#pragma unroll
    for (u32 i = 0; i < PER_LANE; i++) own = key[i] > own ? key[i] : own;
    const u32 largest_key = warp_max(own);
    const float largest = largest_key == NO_KEY ? 0.0f : number(largest_key);
    float sum = 0.0f;
#pragma unroll
    for (u32 i = 0; i < PER_LANE; i++) {
        // inf − inf would be NaN.
        const float below = score[i] == largest ? 0.0f : score[i] - largest;
        score[i] = key[i] == NO_KEY ? 0.0f : exp_nonpositive(below);
        sum += score[i];
    }
    sum = warp_sum(sum);
    if (largest_key == NO_KEY) return;
#pragma unroll
    for (u32 i = 0; i < PER_LANE; i++) score[i] = score[i] / sum;
}

// Routes a token: stores ids and weights.
// Returns its first slot without an expert.
QG_DEVICE u32 route_token(const RoutingParams& p, u32 token, u32* keys) {
    const u32 lane = thread_index() % 32, experts = p.shape.experts, top_k = p.shape.top_k;
    const u64 row = token * p.at.logits_row;
    float score[PER_LANE];
    u32 key[PER_LANE];
#pragma unroll
    for (u32 i = 0; i < PER_LANE; i++) {
        const u32 expert = i * 32 + lane;
        score[i] = expert < experts ? load_logit(p, row, expert) : bits_to_f32(0x7fffffffu);
    }
#pragma unroll
    for (u32 i = 0; i < PER_LANE; i++) key[i] = ordered(score[i]);
    score_logits(p, score, key);
    const bool is_biased = p.shape.flags & QG_FLAG_BIAS;
    if (is_biased || p.shape.groups != 0) {
#pragma unroll
        for (u32 i = 0; i < PER_LANE; i++) {
            if (key[i] == NO_KEY) continue;
            const float bias = is_biased ? bits_to_f32(ld_global_u32(word_at(p.at.bias, i * 32 + lane))) : 0.0f;
            key[i] = ordered(score[i] + bias);
        }
    }
    if (p.shape.groups != 0) keep_best_groups(p, key, keys);

    // Lane j holds the j-th best expert.
    u32 own_id = ~0u;
    float own_score = 0.0f;
    for (u32 place = 0; place < top_k; place++) {
        u32 best = NO_KEY, at = 0;
#pragma unroll
        for (u32 i = 0; i < PER_LANE; i++)
            if (key[i] > best) best = key[i], at = i;
        const u32 largest = warp_max(best);
        if (largest == NO_KEY) break;
        // Ties go to the lowest id, which has the largest complement.
        const u32 expert = ~warp_max(best == largest ? ~(at * 32 + lane) : 0u);
        float chosen = 0.0f;
#pragma unroll
        for (u32 i = 0; i < PER_LANE; i++)
            if (i * 32 + lane == expert) chosen = score[i], key[i] = NO_KEY;
        chosen = bits_to_f32(shfl_idx_u32(f32_to_bits(chosen), expert % 32));
        if (lane == place) own_id = expert, own_score = chosen;
    }
    if (p.shape.flags & QG_FLAG_RENORMALIZE) {
        const float sum = warp_sum(own_score);
        own_score = own_score / (sum > SMALLEST_NORMAL ? sum : SMALLEST_NORMAL);
    }
    const u32 slots = top_k + shared_experts(p), slot = token * slots + lane;
    if (lane < slots) {
        const bool is_chosen = lane < top_k;
        const u32 id = is_chosen ? own_id : experts, place = id == ~0u ? id : place_of(p, id);
        const float weight = is_chosen ? own_score * p.shape.scale : 1.0f;
        st_global_u32(word_at(p.at.ids, slot), place);
        st_global_u32(word_at(p.at.weights, slot), f32_to_bits(place == ELSEWHERE ? 0.0f : weight));
    }
    const u32 missing = ballot(lane < top_k && own_id == ~0u);
    return missing == 0 ? NO_SLOT : token * slots + lowest(missing);
}

extern "C" __global__ void __launch_bounds__(QG_THREADS) qg_routing_top_k(const __grid_constant__ RoutingParams p) {
    const u32 warp = thread_index() / 32, warps = cta_threads() / 32, chunk = cta_index().x;
    u32* keys = reinterpret_cast<u32*>(dynamic_shared()) + warp * p.shape.experts;
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    const u32 first = chunk * p.shape.chunk_tokens, end = first + p.shape.chunk_tokens;
    const u32 last = end < p.shape.tokens ? end : p.shape.tokens;
    u32 bad = NO_SLOT;
    for (u32 token = first + warp; token < last; token += warps) {
        const u32 missing = route_token(p, token, keys);
        bad = missing < bad ? missing : bad;
    }
    const bool is_alone = p.shape.chunks == 1, counts = p.shape.flags & QG_FLAG_COUNTS;
    // Separate launches build the lists and the status.
    if (!is_alone && !counts) return;
    // All ids are written, and the shared memory of keys is free.
    cta_barrier();
    // Lists include the shared expert.
    RoutingParams all = p;
    all.shape.experts = p.shape.local, all.shape.top_k += shared_experts(p);
    const ListStorage storage = ListStorage::of(dynamic_shared(), all.shape.experts, warps);
    if (p.shape.flags & QG_FLAG_LISTS) {
        if (counts)
            count_chunk(all, p.at.ids, chunk, storage);
        else
            make_lists(all, p.at.ids, storage);
        return;
    }
    bad = least_of_warps(storage, bad);
    if (thread_index() != 0) return;
    if (counts)
        st_global_u32(chunk_bad(p, chunk), bad);
    else
        store_status(all, p.at.ids, bad);
}
