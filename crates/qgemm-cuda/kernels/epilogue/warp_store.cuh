// From a warp's accumulators to rows of D. Lanes hold accumulators as [row][token]. They pass through a little shared
// memory of the warp, eight tokens at a time, so that neighbouring lanes store neighbouring features.
#pragma once
#include "atoms/sync.cuh"
#include "atoms/warp.cuh"
#include "epilogue/plain.cuh"
#include "epilogue/store.cuh"
#include "mainloop/warp_tile.cuh"
#include "sched/split.cuh"

constexpr u32 WARP_ROWS = ROW_TILES * QG_TILE_ROWS;
constexpr u32 WARP_RUNS = WARP_ROWS / RUN;
constexpr u32 THREAD_ACCUMULATORS = sizeof(Accumulators) / 4;
// Token tiles that pass in one round, and the rounds of a tile.
constexpr u32 STAGED = QG_STAGED;
constexpr u32 ROUND_TOKENS = STAGED * MMA_TOKENS;
constexpr u32 ROUNDS = TOKEN_TILES / STAGED;
// Rounds in one piece of code: a quarter of them. A CTA that has only one tile fetches all of this code for it (64
// tokens on an H200: 21.9 us with four rounds at once, 20.8 us with one).
constexpr u32 ROUNDS_AT_ONCE = ROUNDS < 8 ? 1 : ROUNDS / 4;
static_assert(ROUNDS % ROUNDS_AT_ONCE == 0, "rounds that pass at once divide all");

struct WarpStaging {
    // Four words of padding put the tokens that lanes write together, 2t, into different banks.
    static constexpr u32 PITCH = WARP_ROWS + 4;
    alignas(16) float acc[STAGED * MMA_TOKENS * PITCH];
    // The factor and the bias of each row, for plain outputs. They are loaded once a tile and not once a token (512
    // tokens of FP8 weights with a scale a row on an H200: 90 us and not 104 us).
    alignas(16) float factor[WARP_ROWS];
    alignas(16) float bias[WARP_ROWS];

    // Writes the accumulators of round `round`, for all lanes to read.
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
            words[j] =
                QG_X_DTYPE == DTYPE_F16 ? f32_to_f16x2(v[2 * j], v[2 * j + 1]) : f32_to_bf16x2(v[2 * j], v[2 * j + 1]);
        u32 own;
        if (find_row(p, token, own))
            st_global_v4(reinterpret_cast<u8*>(p.at.d) + (own * p.at.d_row + first_row + run * RUN) * 2,
                         u32x4{words[0], words[1], words[2], words[3]});
    }
}

// Moves the accumulators of token tiles from TILES on to the first place. Registers cannot be indexed, so a loop over
// rounds moves the accumulators.
template <u32 TILES>
QG_DEVICE void move_up(Accumulators& acc) {
#pragma unroll
    for (u32 rt = 0; rt < ROW_TILES; rt++)
#pragma unroll
        for (u32 tt = TILES; tt < TOKEN_TILES; tt++)
#pragma unroll
            for (u32 i = 0; i < 4; i++) acc.value[rt][tt - TILES][i] = acc.value[rt][tt][i];
}

// Outputs with whatever operands.
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

// Plain outputs pass in several rounds before accumulators move: moving took as many instructions as all the rest. On
// an H200, INT4 takes 92.8 us and not 96.0 us for 512 tokens, and 677 us and not 694 us for 4096.
QG_DEVICE void store_tile(Accumulators& acc, const GemmParams& p, const WorkTile& work, WarpStaging& staging, u32 warp,
                          u32 lane) {
    const u32 first_row = (work.n_tile * QG_WARPS_N + warp) * WARP_ROWS;
    const u32 first_token = work.m_tile * QG_TILE_M;
    // The condition is the same for the whole CTA. Behind a barrier in a branch that warps take differently, the
    // compiler no longer knows what is uniform, and the main loop pays for that (128 tokens on an H200: 27.0 us and not
    // 24.2 us).
    const bool plain = is_plain(p) && (work.n_tile + 1) * QG_WARPS_N * WARP_ROWS <= p.shape.stored_rows;
    // All lanes have read the row operands of the tile before.
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

// This thread's part of a peer's partial accumulators.
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

// Adds the accumulators of all peers, in the order of their K ranges, in the CTA that arrives last. False in the other
// CTAs, whose work on the tile is then done. The first two peers, whose order does not matter, keep their own
// accumulators in registers if they find that they are last.
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
    // Otherwise the accumulators of the first two peers come from memory, and those of the others are added.
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
