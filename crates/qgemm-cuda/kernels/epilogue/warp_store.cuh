// Epilogue of a warp's accumulators, held as [row][token].
// A warp passes a few token tiles at a time through
// shared memory, so that neighbouring lanes store
// neighbouring features.
#pragma once
#include "atoms/sync.cuh"
#include "atoms/warp.cuh"
#include "dequant/halves.cuh"
#include "epilogue/plain.cuh"
#include "epilogue/store.cuh"
#include "mainloop/warp_tile.cuh"
#include "sched/split.cuh"

constexpr u32 WARP_ROWS = ROW_TILES * QG_TILE_ROWS;
constexpr u32 WARP_RUNS = WARP_ROWS / RUN;
constexpr u32 THREAD_ACCUMULATORS = sizeof(Accumulators) / 4;
// Token tiles per round, and rounds per tile.
constexpr u32 STAGED = QG_STAGED;
constexpr u32 ROUND_TOKENS = STAGED * MMA_TOKENS;
constexpr u32 ROUNDS = TOKEN_TILES / STAGED;
// Rounds that are unrolled together: a quarter of them.
// A CTA with a single tile fetches all of this code once.
constexpr u32 ROUNDS_AT_ONCE = ROUNDS < 8 ? 1 : ROUNDS / 4;
static_assert(ROUNDS % ROUNDS_AT_ONCE == 0, "rounds that pass at once divide all");

struct WarpStaging {
    // Four words of padding:
    // the tokens 2t that lanes write together use different banks.
    static constexpr u32 PITCH = WARP_ROWS + 4;
    alignas(16) float acc[STAGED * MMA_TOKENS * PITCH];  // [token][row of W]
    // Factor and bias of each row for plain outputs, loaded once
    // per tile instead of once per token.
    alignas(16) float factor[WARP_ROWS];
    alignas(16) float bias[WARP_ROWS];

    // Publishes the accumulators of round `round` to all lanes.
    QG_DEVICE void put_round(WarpStaging& staging, const Accumulators& acc, u32 round, u32 lane) {
        warp_barrier();
#pragma unroll
        for (u32 tt = 0; tt < STAGED; tt++) {
            float* first = &staging.acc[(tt * MMA_TOKENS + lane % 4 * 2) * PITCH + lane / 4];
#pragma unroll
            for (u32 rt = 0; rt < ROW_TILES; rt++)
#pragma unroll
                for (u32 i = 0; i < 4; i++)
                    st_shared(first + i % 2 * PITCH + rt * 16 + i / 2 * 8, acc.value[rt][round * STAGED + tt][i]);
        }
        warp_barrier();
    }

    QG_DEVICE void take_run(const WarpStaging& staging, u32 token, u32 run, float (&values)[RUN]) {
#pragma unroll
        for (u32 i = 0; i < RUN; i += 4) {
            const f32x4 v = ld_shared(reinterpret_cast<const f32x4*>(&staging.acc[token * PITCH + run * RUN + i]));
            values[i] = v.x, values[i + 1] = v.y, values[i + 2] = v.z, values[i + 3] = v.w;
        }
    }

    QG_DEVICE void load_row_operands(WarpStaging& staging, const GemmParams& p, u32 first_row, u32 lane) {
        if (lane >= WARP_ROWS) return;
        const u32 flags = p.shape.flags, row = first_row + lane;
        const float scale = flags & QG_FLAG_ROW_SCALE ? load_dense(DTYPE_F32, p.at.row_scale, row) : 1.0f;
        st_shared(&staging.factor[lane], p.shape.alpha * scale);
        st_shared(&staging.bias[lane], flags & QG_FLAG_BIAS ? load_dense(p.shape.bias_dtype, p.at.bias, row) : 0.0f);
    }
    QG_DEVICE void take_plain_run(const WarpStaging& staging, u32 token, u32 run, float (&values)[RUN]) {
        take_run(staging, token, run, values);
#pragma unroll
        for (u32 i = 0; i < RUN; i += 4) {
            const f32x4 factor = ld_shared(reinterpret_cast<const f32x4*>(&staging.factor[run * RUN + i]));
            const f32x4 bias = ld_shared(reinterpret_cast<const f32x4*>(&staging.bias[run * RUN + i]));
            values[i] = factor.x * values[i] + bias.x;
            values[i + 1] = factor.y * values[i + 1] + bias.y;
            values[i + 2] = factor.z * values[i + 2] + bias.z;
            values[i + 3] = factor.w * values[i + 3] + bias.w;
        }
    }
};
static_assert(WARP_ROWS <= 32, "a lane loads the operands of a row");

QG_DEVICE void store_staged(const WarpStaging& staging, const GemmParams& p, u32 first_token, u32 first_row, u32 lane) {
    store_runs<STAGED * MMA_TOKENS, WARP_ROWS, 32, RUN>(
        p, first_token, first_row, lane,
        [&](u32 token, u32 run, float (&values)[RUN]) { WarpStaging::take_run(staging, token, run, values); });
}

QG_DEVICE void store_plain(const WarpStaging& staging, const GemmParams& p, u32 first_token, u32 first_row, u32 lane) {
#pragma unroll
    for (u32 i = lane; i < STAGED * MMA_TOKENS * WARP_RUNS; i += 32) {
        const u32 token = first_token + i / WARP_RUNS, run = i % WARP_RUNS;
        float v[RUN];
        WarpStaging::take_plain_run(staging, i / WARP_RUNS, run, v);
        u32 words[RUN / 2];
#pragma unroll
        for (u32 j = 0; j < RUN / 2; j++)
            words[j] = f32_to_halves<QG_X_DTYPE>(v[2 * j], v[2 * j + 1]);
        u32 own;
        if (find_row(p, token, own))
            st_global_v4(reinterpret_cast<u8*>(p.at.d) + (own * p.at.d_row + first_row + run * RUN) * 2,
                         u32x4{words[0], words[1], words[2], words[3]});
    }
}

// Shifts token tiles from TILES on to the front:
// registers cannot be indexed in a loop over rounds.
template <u32 TILES>
QG_DEVICE void move_up(Accumulators& acc) {
#pragma unroll
    for (u32 rt = 0; rt < ROW_TILES; rt++)
#pragma unroll
        for (u32 tt = TILES; tt < TOKEN_TILES; tt++)
#pragma unroll
            for (u32 i = 0; i < 4; i++) acc.value[rt][tt - TILES][i] = acc.value[rt][tt][i];
}

// Outputs with any operands.
QG_DEVICE void store_rounds(Accumulators& acc, const GemmParams& p, WarpStaging& staging, u32 first_token, u32 first_row,
                            u32 lane) {
#pragma unroll 1
    for (u32 round = 0; round < ROUNDS; round++) {
        const u32 token = first_token + round * ROUND_TOKENS;
        if (token >= p.shape.m) break;
        WarpStaging::put_round(staging, acc, 0, lane);
        store_staged(staging, p, token, first_row, lane);
        move_up<STAGED>(acc);
    }
}

// Plain outputs pass several rounds before accumulators shift:
// the shift costs as many instructions as the rest.
QG_DEVICE void store_tile(Accumulators& acc, const GemmParams& p, const WorkTile& work, WarpStaging& staging, u32 warp,
                          u32 lane) {
    const u32 first_row = (work.n_tile * QG_WARPS_N + warp) * WARP_ROWS;
    const u32 first_token = work.m_tile * QG_TILE_M;
    // The condition is uniform over the CTA.
    // With a barrier in a divergent branch the compiler loses
    // uniformity information, and the main loop gets slower.
    const bool plain = is_plain(p) && (work.n_tile + 1) * QG_WARPS_N * WARP_ROWS <= p.shape.stored_rows;
    // All lanes must have read the previous tile's row operands.
    warp_barrier();
    if (plain) {
        WarpStaging::load_row_operands(staging, p, first_row, lane);
#pragma unroll 1
        for (u32 round = 0; round < ROUNDS; round += ROUNDS_AT_ONCE) {
            if (first_token + round * ROUND_TOKENS >= p.shape.m) break;
#pragma unroll
            for (u32 i = 0; i < ROUNDS_AT_ONCE; i++) {
                WarpStaging::put_round(staging, acc, i, lane);
                store_plain(staging, p, first_token + (round + i) * ROUND_TOKENS, first_row, lane);
            }
            move_up<ROUNDS_AT_ONCE * STAGED>(acc);
        }
    } else {
        store_rounds(acc, p, staging, first_token, first_row, lane);
    }
}

// This thread's part of a peer's partial sums.
QG_DEVICE f32x4* partials(const GemmParams& p, const WorkTile& work, u32 peer, u32 thread) {
    return reinterpret_cast<f32x4*>(partial_slot(p, work, peer, THREAD_ACCUMULATORS * QG_CONSUMERS)) + thread;
}

QG_DEVICE void add_peer(Accumulators& acc, const GemmParams& p, const WorkTile& work, u32 peer, u32 thread) {
    float* const all = reinterpret_cast<float*>(&acc);
    const f32x4* theirs = partials(p, work, peer, thread);
#pragma unroll
    for (u32 i = 0; i < THREAD_ACCUMULATORS; i += 4) {
        const f32x4 v = ld_global_cg_f32x4(theirs + i / 4 * QG_CONSUMERS);
        all[i] += v.x, all[i + 1] += v.y, all[i + 2] += v.z, all[i + 3] += v.w;
    }
}

// Split-K fix-up: the last CTA to arrive adds all peers in
// order of their K ranges. Returns false in the other CTAs.
// The first two peers commute:
// they keep their sums in registers if they arrive last.
QG_DEVICE bool add_partials(Accumulators& acc, const GemmParams& p, const WorkTile& work, u32 thread, u32* flag) {
    const bool can_add_to_own = work.index < 2;
    const bool others_arrived = can_add_to_own && check_others_arrived(p, work, flag);
    if (!others_arrived) {
        const float* const mine = reinterpret_cast<const float*>(&acc);
        f32x4* slot = partials(p, work, work.index, thread);
#pragma unroll
        for (u32 i = 0; i < THREAD_ACCUMULATORS; i += 4)
            st_global_f32x4(slot + i / 4 * QG_CONSUMERS, f32x4{mine[i], mine[i + 1], mine[i + 2], mine[i + 3]});
        if (!arrive_and_check_last(p, work, flag)) return false;
    }
    // A later peer reloads all sums, to keep the order.
    u32 own = work.index;
    if (!can_add_to_own) {
        acc = {};
        own = work.peers;
    }
#pragma unroll 1
    for (u32 c = 0; c < work.peers; c++)
        if (c != own) add_peer(acc, p, work, c, thread);
    return true;
}
