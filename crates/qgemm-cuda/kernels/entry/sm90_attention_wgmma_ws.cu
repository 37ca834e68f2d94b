// Attention of many queries on Hopper, warp-specialized: one warp copies queries, keys and values with TMA, three look at the values that
// masks concern, and each warpgroup of consumers has 64 queries of a head. CTAs stay and take items in turn; while consumers store their
// results, the producer fills the ring for the next.
#include "atoms/registers.cuh"
#include "mainloop/sm90/attention_wgmma.cuh"

constexpr u32 PRODUCER_REGISTERS = WARPGROUPS == 2 ? 40 : 32, CONSUMER_REGISTERS = WARPGROUPS == 2 ? 232 : 160;

// Exchanges words of four lanes: lane t gives word i and gets word t of lane i.
QG_DEVICE void transpose(u32 (&words)[4], u32 t) {
#pragma unroll
    for (u32 distance = 1; distance <= 2; distance *= 2) {
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            if (i & distance) continue;
            u32 &low = words[i], &high = words[i + distance];
            const bool is_high = t & distance;
            const u32 came = shfl_xor_u32(is_high ? low : high, distance);
            if (is_high)
                low = came;
            else
                high = came;
        }
    }
}

// Stores the results of a warp's sixteen queries.
QG_DEVICE void store_rows(Rows& rows, const AttentionParams& p, const AttentionItem& item, u32 first_row, float factor,
                          u32 lane) {
    const u32 t = lane % 4;
#pragma unroll
    for (u32 row = 0; row < 2; row++) {
        float& total = rows.total[row];
#pragma unroll
        for (u32 mask = 1; mask <= 2; mask *= 2) total += shfl_xor(total, mask);
        const u32 query = item.first_query + first_row + lane / 4 + 8 * row;
        const bool is_there = query <= item.last_query;
        const float scale = total == 0.0f ? 0.0f : 1.0f / total;
        const u64 token = item.s.token + query;
        u8* to = reinterpret_cast<u8*>(p.at.d) + (token * p.at.d_token + item.head * p.at.d_head) * 2;
#pragma unroll
        for (u32 n = 0; n < QG_V / 8; n += 4) {
            // Neighbouring features of four lanes become eight of one.
            u32 words[4];
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                const float* pair = rows.sums + (n + i) * 4 + row * 2;
                words[i] = rounded_pair(pair[0] * scale, pair[1] * scale);
            }
            transpose(words, t);
            const u32 column = (n + t) * 8;
            if (!is_there || column >= p.shape.v_dim) continue;
            if (p.shape.flags & QG_FLAG_D_ALIGNED) {
                st_global_v4(to + column * 2, {words[0], words[1], words[2], words[3]});
            } else {
#pragma unroll
                for (u32 i = 0; i < 8; i++) st_global_u16(to + column * 2 + i * 2, words[i / 2] >> (i % 2 * 16));
            }
        }
        if (is_there && t == 0 && p.shape.flags & QG_FLAG_LSE) {
            const float largest = rows.largest[row] == minus_infinity() ? minus_infinity() : rows.largest[row] * factor;
            st_global_f32(reinterpret_cast<float*>(p.at.lse) + token * p.shape.heads + item.head,
                          log_sum_exp(largest, total));
        }
    }
}

QG_DEVICE void consume(AttentionRing& ring, const TmaAttentionParams& params, u32 thread) {
    const AttentionParams& p = params.attention;
    const u32 warp = shfl_idx_u32(thread / 32, 0);
    Consumer own = {warp / 4, thread % 32, {}, {}, QG_BOUNDED ? 1.0f : p.shape.factor};
    u32 q_parity = 0;
    ItemWalk walk = {};
    AttentionItem item;
    if (own.warpgroup + 1 == WARPGROUPS) pass_turn(own);
    while (ItemWalk::next(walk, params, item)) {
        Rows rows = {};
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            rows.largest[i] = minus_infinity();
            const u32 query = item.first_query + warp * 16 + own.lane / 4 + 8 * i;
            rows.seen[i] = keys_seen(p, item.s, least(query, item.last_query));
        }
        if (item.tiles > 0) {
            mbarrier_wait(&ring.q_full, q_parity);
            q_parity ^= 1;
            attend(rows, ring, own, p, item);
        }
        store_rows(rows, p, item, warp * 16, own.factor, own.lane);
    }
    // The last turn that was passed.
    if (own.warpgroup == 0) take_turn(own);
}

extern "C" __global__ void __launch_bounds__(QG_THREADS, 1)
    qg_sm90_attention_wgmma_ws(const __grid_constant__ TmaAttentionParams params) {
    AttentionRing& ring = *reinterpret_cast<AttentionRing*>(dynamic_shared());
    const u32 thread = thread_index();
    if (thread == 0) AttentionRing::init(ring);
    cta_barrier();
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    // The shuffle tells the compiler that the role is the same for the whole warp.
    if (shfl_idx_u32(thread / CONSUMERS, 0) == 0) {
        setmaxnreg_inc<CONSUMER_REGISTERS>();
        consume(ring, params, thread);
    } else {
        setmaxnreg_dec<PRODUCER_REGISTERS>();
        const u32 warp = shfl_idx_u32((thread - CONSUMERS) / 32, 0), lane = thread % 32;
        if (warp > 0)
            inspect(ring, params, warp - 1, lane);
        else if (lane == 0)
            produce(ring, params);
    }
}
