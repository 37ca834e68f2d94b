// Token-row epilogue for feature counts that are no
// multiple of a line: rounds of
// epilogue/token_rows_store.cuh and half a round.
#pragma once
#include "epilogue/token_rows_store.cuh"

// Stores 16 tokens × half a round of features.
// A lane has eight accumulators, and room for eight more.
template <bool EXCHANGED>
QG_DEVICE void store_half_round(float* acc, const GemmParams& p, u32 first_token, u32 first_row, u32 token, bool is_whole, WarpStaging& staging,
                                u32 lane) {
    constexpr u32 HALF = ROUND_FEATURES / 2;
    const bool activates = is_whole && (p.shape.flags & QG_FLAG_GATED) && are_halves_with<GATED_OPERANDS>(p);
    if (activates) activate_gated_round<EXCHANGED>(acc, p, first_row, lane);
    WarpStaging::put<EXCHANGED>(staging, acc, token, lane);
    if (!activates) {
        store_runs<WARP_TOKENS, HALF, 32, RUN>(
            p, first_token, first_row, lane,
            [&](u32 token, u32 run, float (&values)[RUN]) { WarpStaging::take(staging, token, run, values); });
        return;
    }
    u32 own;
    if (lane >= WARP_TOKENS || !find_row(p, first_token + lane, own)) return;
    float v[RUN];
    WarpStaging::take(staging, lane, 0, v);
    store_dense_run(p.shape.d_dtype, p.at.d, own * p.at.d_row + first_row / 2, true, RUN, v);
}

// `store_token_rows` for a multiple of 16 features.
// `acc` has room for whole rounds.
template <u32 FEATURES, bool EXCHANGED>
QG_DEVICE void store_token_parts(float* acc, const GemmParams& p, u32 first_token, u32 first_row, u32 token, bool is_whole,
                                 WarpStaging& staging, u32 lane) {
    constexpr u32 OF_LINE = LINE_BYTES / 2, LINES = FEATURES / OF_LINE * OF_LINE, ROUND = FEATURES - LINES >= ROUND_FEATURES ? ROUND_FEATURES : 0;
    if constexpr (LINES > 0)
        store_token_rows<LINES, EXCHANGED>(acc, p, first_token, first_row, token, is_whole, staging, lane);
    if constexpr (ROUND > 0)
        store_token_rows<ROUND, EXCHANGED>(acc + LINES / 2, p, first_token, first_row + LINES, token, is_whole, staging, lane);
    if constexpr (LINES + ROUND < FEATURES)
        store_half_round<EXCHANGED>(acc + (LINES + ROUND) / 2, p, first_token, first_row + LINES + ROUND, token, is_whole, staging, lane);
}
