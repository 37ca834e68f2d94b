// Split-KV combine inside the attention kernel. The
// CTA that arrives last combines the partial results
// of all parts in order, so the bits do not depend
// on the arrival order. No CTA waits for another.
#pragma once
#include "atoms/cg_pair.cuh"
#include "attention/problem.cuh"

// Parts that contain visible keys of
// one row, or of all rows of a CTA.
struct PartRange {
    u32 first, end;
};
QG_DEVICE PartRange parts_of(const AttentionParams& p, const KeyRange& keys) {
    if (keys.first >= keys.end) return {0, 0};
    return {keys.first / p.at.part_keys, (keys.end - 1) / p.at.part_keys + 1};
}

// Arrives at `counter`. True for the last of `peers`
// CTAs, to which the writes of all peers are visible.
// One thread arrives for the CTA: the barrier before
// orders the writes of all threads, the barrier after
// publishes the result through `flag` (shared memory).
// It is thread 0 of the last warp; other warps run
// `meanwhile`. The counter is reset for the next launch.
template <class F>
QG_DEVICE bool is_last_of(u32* counter, u32 peers, u32* flag, F&& meanwhile) {
    cta_barrier();
    constexpr u32 ARRIVING = QG_THREADS - 32;
    if (thread_index() == ARRIVING) {
        const bool is_last = atomic_add_acq_rel(counter, 1) == peers - 1;
        if (is_last) st_global_relaxed_u32(counter, 0);
        st_shared(flag, (u32)is_last);
    }
    if (thread_index() < ARRIVING) meanwhile();
    cta_barrier();
    return ld_shared(flag) != 0;
}

// Partial results of a row: a header {row_max,
// row_sum, unused, unused} per part, then the
// accumulators of each part. Data that is loaded
// together is adjacent, at constant strides.
struct PartResults {
    f32x4* headers;
    float* all_sums;

    // `row`: index over all rows of all sequences.
    QG_DEVICE PartResults of(const AttentionParams& p, u64 row) {
        float* from = reinterpret_cast<float*>(p.at.workspace) + QG_COUNTERS + row * (p.at.parts * (QG_V + 4));
        return {reinterpret_cast<f32x4*>(from), from + p.at.parts * 4};
    }
    __device__ __forceinline__ float* sums(u32 part, u32 c) const {
        return all_sums + part * QG_V + c;
    }
};

// Combined result of a row in COLUMNS columns of a lane.
// Every CHAINS-th part goes into one chain; chains are summed
// last, in order. Bits therefore match `attention_combine`.
template <u32 COLUMNS>
struct PartSums {
    static constexpr u32 CHAINS = 4, BATCH = 32;
    static_assert(COLUMNS == 2 || COLUMNS == 4, "a lane loads eight bytes or sixteen");
    float row_max, row_sum, sums[COLUMNS];

    QG_DEVICE void load_columns(float (&values)[COLUMNS], const float* from) {
        if constexpr (COLUMNS == 4) {
            const f32x4 v = ld_global_cg_f32x4(reinterpret_cast<const f32x4*>(from));
            values[0] = v.x, values[1] = v.y, values[2] = v.z, values[3] = v.w;
        } else {
            const f32x2 v = ld_global_cg_f32x2(reinterpret_cast<const f32x2*>(from));
            values[0] = v.x, values[1] = v.y;
        }
    }

    // Combines `parts` from column `c` on, if the row has
    // this column. `weights`: shared scratch of the warp.
    QG_DEVICE PartSums of(const PartResults& results, const PartRange& parts, u32 c, bool has_columns, f32x4* weights) {
        const u32 lane = thread_index() % 32;
        PartSums row;
        row.row_max = minus_infinity();
        float row_sums[CHAINS] = {}, sums[CHAINS][COLUMNS] = {};
#pragma unroll 1
        for (u32 batch = parts.first; batch < parts.end; batch += BATCH) {
            // All loads of a batch are in flight at once.
            // Absent parts have weight 0 and zeros. Each
            // lane holds the header of one part.
            f32x4 own = {minus_infinity(), 0.0f, 0.0f, 0.0f};
            if (batch + lane < parts.end) own = ld_global_cg_f32x4(results.headers + batch + lane);
            float values[BATCH][COLUMNS];
            const float* from = results.sums(batch, c);
            if (has_columns && parts.end - batch >= BATCH) {
#pragma unroll
                for (u32 i = 0; i < BATCH; i++) load_columns(values[i], from + i * QG_V);
            } else {
                const u32 present = has_columns ? parts.end - batch : 0;
#pragma unroll
                for (u32 i = 0; i < BATCH; i++) {
#pragma unroll
                    for (u32 j = 0; j < COLUMNS; j++) values[i][j] = 0.0f;
                    if (i < present) load_columns(values[i], from + i * QG_V);
                }
            }
            if (batch == parts.first) {
                row.row_max = own.x;
                for (u32 part = batch + BATCH + lane; part < parts.end; part += BATCH) {
                    const float other = ld_global_cg_f32(reinterpret_cast<const float*>(results.headers + part));
                    row.row_max = other > row.row_max ? other : row.row_max;
                }
#pragma unroll
                for (u32 mask = 16; mask > 0; mask /= 2) {
                    const float other = shfl_xor(row.row_max, mask);
                    row.row_max = other > row.row_max ? other : row.row_max;
                }
            }
            const float base = row.row_max == minus_infinity() ? 0.0f : row.row_max;
            st_shared(reinterpret_cast<f32x2*>(weights) + lane, f32x2{ex2_approx(own.x - base), own.y});
            warp_barrier();
#pragma unroll
            for (u32 i = 0; i < BATCH; i += 2) {
                const f32x4 two = ld_shared(weights + i / 2);
                const float pair[4] = {two.x, two.y, two.z, two.w};
#pragma unroll
                for (u32 of = 0; of < 2; of++) {
                    float(&chain)[COLUMNS] = sums[(i + of) % CHAINS];
                    row_sums[(i + of) % CHAINS] = fma_f32(pair[of * 2], pair[of * 2 + 1], row_sums[(i + of) % CHAINS]);
#pragma unroll
                    for (u32 j = 0; j < COLUMNS; j++) chain[j] = fma_f32(pair[of * 2], values[i + of][j], chain[j]);
                }
            }
            // The next batch overwrites `weights`.
            warp_barrier();
        }
        row.row_sum = row_sums[0];
#pragma unroll
        for (u32 j = 0; j < COLUMNS; j++) row.sums[j] = sums[0][j];
#pragma unroll
        for (u32 chain = 1; chain < CHAINS; chain++) {
            row.row_sum += row_sums[chain];
#pragma unroll
            for (u32 j = 0; j < COLUMNS; j++) row.sums[j] += sums[chain][j];
        }
        return row;
    }
};
