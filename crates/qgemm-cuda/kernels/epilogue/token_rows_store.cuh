// Epilogue for MMA rows that are tokens.
// Lanes hold two features of two tokens.
// A warp passes 32 features at a time through shared memory,
// so that neighbouring lanes store neighbouring features.
// Scaled-only outputs use epilogue/whole_rows.cuh.
#pragma once
#include "atoms/numeric.cuh"
#include "atoms/warp.cuh"
#include "epilogue/store.cuh"
#include "epilogue/whole_rows.cuh"
#if !QG_X_BITS
#include "mainloop/fp8_codes.cuh"
#endif
#include "sched/output_rows.cuh"
#include "sched/split.cuh"

// Tokens and features of a round, and its accumulators per lane.
constexpr u32 WARP_TOKENS = 16, ROUND_FEATURES = 32, ROUND_ACCUMULATORS = ROUND_FEATURES * WARP_TOKENS / 32;

struct WarpStaging {
    // Swizzle in units of four features.
    // Writes of half a warp and reads of a quarter use all banks.
    alignas(16) float value[WARP_TOKENS * ROUND_FEATURES];  // [token][feature], swizzled

    QG_DEVICE u32 unit(u32 token, u32 index) {
        const u32 exchange = (token % 2 | token / 4 % 2 << 1) << 1 | token % 2;
        return token * ROUND_FEATURES + (index ^ exchange) * 4;
    }

    // Publishes the first ROUND_ACCUMULATORS of every lane.
    // `token` is the lane's first token.
    template <bool EXCHANGED>
    QG_DEVICE void put(WarpStaging& staging, const float* acc, u32 token, u32 lane) {
        warp_barrier();
#pragma unroll
        for (u32 i = 0; i < ROUND_ACCUMULATORS; i += 2) {
            const u32 index = i / 4 * 2 + lane % 4 / 2, at = unit(token + i / 2 % 2 * 8, index) + lane % 2 * 2;
            const bool exchanged = EXCHANGED && i / 4 % 2 == 1;
            st_shared(reinterpret_cast<f32x2*>(&staging.value[at]), f32x2{acc[i + exchanged], acc[i + !exchanged]});
        }
        warp_barrier();
    }
    QG_DEVICE void take(const WarpStaging& staging, u32 token, u32 run, float (&values)[RUN]) {
#pragma unroll
        for (u32 i = 0; i < RUN / 4; i++) {
            const f32x4 v = ld_shared(reinterpret_cast<const f32x4*>(&staging.value[unit(token, run * 2 + i)]));
            values[i * 4] = v.x, values[i * 4 + 1] = v.y, values[i * 4 + 2] = v.z, values[i * 4 + 3] = v.w;
        }
    }
};

// Whether outputs have only the operands OPERANDS, in f16 or
// bf16, with aligned rows of D.
template <u32 OPERANDS>
QG_DEVICE bool are_halves_with(const GemmParams& p) {
    return has_only<OPERANDS>(p) && (p.shape.flags & QG_FLAG_D_ALIGNED16) && p.shape.d_dtype != DTYPE_F32;
}

// The accumulator times alpha and a row scale.
QG_DEVICE bool is_plain(const GemmParams& p) {
    return p.shape.activation == QG_ACTIVATION_IDENTITY && are_halves_with<QG_FLAG_ROW_SCALE>(p);
}

// Operands of the fast gated path.
// Block-scaled weights have no row scales, and their kernels
// no registers for them.
constexpr u32 GATED_OPERANDS = QG_FLAG_GATED | (QG_W_BLOCK_SCALES ? 0 : QG_FLAG_ROW_SCALE);

// Replaces a round's gate accumulators by activated outputs.
// Of each 16 features a lane has two gates and their two ups.
// In `store_runs` a lane would compute eight outputs serially.
template <bool EXCHANGED>
QG_DEVICE void activate_gated_round(float* acc, const GemmParams& p, u32 first_row, u32 lane) {
    const bool scales = p.shape.flags & GATED_OPERANDS & QG_FLAG_ROW_SCALE;
#pragma unroll
    for (u32 pair = 0; pair < ROUND_ACCUMULATORS / 8; pair++) {
        const u32 row = first_row + pair * 16 + lane % 4 * 2;
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            const float gate = p.shape.alpha * (scales ? load_dense(DTYPE_F32, p.at.row_scale, row + i) : 1.0f);
            const float up = p.shape.alpha * (scales ? load_dense(DTYPE_F32, p.at.row_scale, row + 8 + i) : 1.0f);
#pragma unroll
            for (u32 token = 0; token < 2; token++) {
                // With EXCHANGED the pair is swapped in odd groups
                // of eight features.
                float& value = acc[pair * 8 + token * 2 + i];
                const float other = acc[pair * 8 + 4 + token * 2 + (EXCHANGED ? 1 - i : i)];
                value = of_gate(p, gate * value) * of_up(p, up * other);
            }
        }
    }
}

// Stores the gated outputs of a round in `staging`.
// `first_feature` is its first feature.
QG_DEVICE void store_gated_round(const WarpStaging& staging, const GemmParams& p, u32 first_token, u32 first_feature, u32 lane) {
    constexpr u32 RUNS = ROUND_FEATURES / 16;
    static_assert(WARP_TOKENS * RUNS == 32, "a run a lane");
    const u32 token = lane / RUNS, run = lane % RUNS;
    u32 own;
    if (!find_row(p, first_token + token, own)) return;
    float v[RUN];
    WarpStaging::take(staging, token, run * 2, v);
    store_dense_run(p.shape.d_dtype, p.at.d, own * p.at.d_row + first_feature + run * RUN, true, RUN, v);
}

// Shifts the next round's accumulators to the front:
// registers cannot be indexed.
template <u32 ROUNDS>
QG_DEVICE void next_round(float* acc) {
#pragma unroll
    for (u32 i = ROUND_ACCUMULATORS; i < ROUNDS * ROUND_ACCUMULATORS; i++) acc[i - ROUND_ACCUMULATORS] = acc[i];
}

#if QG_EXPERTS
// Operands of the listed path.
// Block-scaled weights have no row scales, and their kernels
// no registers for them.
constexpr u32 LISTED_OPERANDS = QG_W_BLOCK_SCALES ? 0 : QG_FLAG_ROW_SCALE;

// Stores 16 tokens × FEATURES scaled-only features to the rows
// of D that a list names.
// Lanes look up the rows first: a lookup takes
// longer than a round.
template <u32 FEATURES, bool EXCHANGED>
QG_DEVICE void store_listed_rows(float* acc, const GemmParams& p, u32 first_token, u32 first_row, u32 token, WarpStaging& staging,
                                 u32 lane) {
    constexpr u32 ROUNDS = FEATURES / ROUND_FEATURES, RUNS = ROUND_FEATURES / RUN, AT_ONCE = 32 / RUNS, NO_ROW = ~0u;
    u32 row;
    if (!find_row(p, first_token + lane % WARP_TOKENS, row)) row = NO_ROW;
    const bool scales = p.shape.flags & LISTED_OPERANDS;
#pragma unroll 1
    for (u32 round = 0; round < ROUNDS; round++) {
        WarpStaging::put<EXCHANGED>(staging, acc, token, lane);
#pragma unroll 1
        for (u32 first = 0; first < WARP_TOKENS; first += AT_ONCE) {
            const u32 i = first + lane / RUNS, own = shfl_idx_u32(row, i), feature = first_row + round * ROUND_FEATURES + lane % RUNS * RUN;
            if (own == NO_ROW) continue;
            float v[RUN];
            WarpStaging::take(staging, i, lane % RUNS, v);
#pragma unroll
            for (u32 j = 0; j < RUN; j++)
                v[j] *= scales ? p.shape.alpha * load_dense(DTYPE_F32, p.at.row_scale, feature + j) : p.shape.alpha;
            store_dense_run(p.shape.d_dtype, p.at.d, own * p.at.d_row + feature, true, RUN, v);
        }
        next_round<ROUNDS>(acc);
    }
}

// Whether outputs are scaled only, of any type, with
// aligned rows of D.
QG_DEVICE bool is_listed_plain(const GemmParams& p) {
    return p.groups.list != 0 && p.shape.activation == QG_ACTIVATION_IDENTITY && (p.shape.flags & QG_FLAG_D_ALIGNED16) &&
           has_only<LISTED_OPERANDS>(p);
}
#endif

// Stores 16 tokens × FEATURES features.
// Per eight features a lane has two accumulators of token
// `token` and two of the token eight further.
// `is_whole`: no row of the CTA's tile exceeds
// `rows_of_outputs`.
// EXCHANGED: pairs are swapped in odd groups of eight features.
template <u32 FEATURES, bool EXCHANGED>
QG_DEVICE void store_token_rows(float* acc, const GemmParams& p, u32 first_token, u32 first_row, u32 token, bool is_whole,
                                WarpStaging& staging, u32 lane) {
    constexpr u32 ROUNDS = FEATURES / ROUND_FEATURES;
#if QG_EXPERTS
    if (is_whole && is_listed_plain(p)) {
        store_listed_rows<FEATURES, EXCHANGED>(acc, p, first_token, first_row, token, staging, lane);
        return;
    }
    if (is_whole && p.groups.list == 0 && is_plain(p)) {
#else
    if (is_whole && is_plain(p)) {
#endif
        static_assert(sizeof(LineStaging) <= sizeof(WarpStaging), "lines pass through the same memory");
        LineStaging& lines = reinterpret_cast<LineStaging&>(staging);
        u8* d = reinterpret_cast<u8*>(p.at.d) + (first_token * p.at.d_row + first_row) * 2;
        const u32 tokens = first_token < p.shape.m ? p.shape.m - first_token : 0;
        const bool scales = p.shape.flags & QG_FLAG_ROW_SCALE;
        const auto factor = [&](u32 column, float (&of)[2]) {
            of[0] = of[1] = p.shape.alpha;
            if (!scales) return;
            of[0] *= load_dense(DTYPE_F32, p.at.row_scale, first_row + column);
            of[1] *= load_dense(DTYPE_F32, p.at.row_scale, first_row + column + 1);
        };
        if (p.shape.d_dtype == DTYPE_F16)
            store_whole_rows_16<FEATURES, EXCHANGED, true>(acc, lines, d, p.at.d_row * 2, tokens, token, lane, factor);
        else
            store_whole_rows_16<FEATURES, EXCHANGED, false>(acc, lines, d, p.at.d_row * 2, tokens, token, lane, factor);
        return;
    }
    // The largest tile of a cluster would spill here if X
    // has per-row scales.
    constexpr bool HAS_REGISTERS = FEATURES < 256 || QG_CLUSTER == 1 || QG_X_BLOCK_SCALES;
    if (HAS_REGISTERS && is_whole && (p.shape.flags & QG_FLAG_GATED) && are_halves_with<GATED_OPERANDS>(p)) {
#pragma unroll 1
        for (u32 round = 0; round < ROUNDS; round++) {
            const u32 row = first_row + round * ROUND_FEATURES;
            activate_gated_round<EXCHANGED>(acc, p, row, lane);
            WarpStaging::put<EXCHANGED>(staging, acc, token, lane);
            store_gated_round(staging, p, first_token, row / 2, lane);
            next_round<ROUNDS>(acc);
        }
        return;
    }
#pragma unroll 1
    for (u32 round = 0; round < ROUNDS; round++) {
        WarpStaging::put<EXCHANGED>(staging, acc, token, lane);
        store_runs<WARP_TOKENS, ROUND_FEATURES, 32, RUN>(
            p, first_token, first_row + round * ROUND_FEATURES, lane,
            [&](u32 token, u32 run, float (&values)[RUN]) { WarpStaging::take(staging, token, run, values); });
        next_round<ROUNDS>(acc);
    }
}

// This thread's part of a peer's partial sums, COUNT a thread.
template <u32 COUNT>
QG_DEVICE f32x4* token_row_partials(const GemmParams& p, const WorkTile& work, u32 peer, u32 thread) {
    const u32 rank = QG_CLUSTER > 1 ? cta_index().x % QG_CLUSTER : 0;
    float* slot = partial_slot(p, work, peer, COUNT * QG_CONSUMERS * QG_CLUSTER) + rank * (COUNT * QG_CONSUMERS);
    return reinterpret_cast<f32x4*>(slot) + thread;
}

// Split-K fix-up: the last CTA to arrive adds all peers in
// order of their K ranges. Returns false in the other CTAs.
template <u32 COUNT>
QG_DEVICE bool add_token_row_partials(float* acc, const GemmParams& p, const WorkTile& work, u32 thread, u32* flag) {
    f32x4* slot = token_row_partials<COUNT>(p, work, work.index, thread);
#pragma unroll
    for (u32 i = 0; i < COUNT; i += 4)
        st_global_f32x4(slot + i / 4 * QG_CONSUMERS, f32x4{acc[i], acc[i + 1], acc[i + 2], acc[i + 3]});
    if (!arrive_and_check_last(p, work, flag)) return false;
#pragma unroll
    for (u32 i = 0; i < COUNT; i++) acc[i] = 0.0f;
#pragma unroll 1
    for (u32 peer = 0; peer < work.peers; peer++) {
        const f32x4* theirs = token_row_partials<COUNT>(p, work, peer, thread);
#pragma unroll
        for (u32 i = 0; i < COUNT; i += 4) {
            const f32x4 v = ld_global_cg_f32x4(theirs + i / 4 * QG_CONSUMERS);
            acc[i] += v.x, acc[i + 1] += v.y, acc[i + 2] += v.z, acc[i + 3] += v.w;
        }
    }
    return true;
}
