// What is left to do where the keys of a sequence are cut into parts, a CTA each: the CTA of some rows that arrives last adds up what those of
// all parts have written, in the order of the parts, so that bits do not depend on which it is. Nobody waits for another.
#pragma once
#include "atoms/cg_pair.cuh"
#include "mainloop/attention_keys.cuh"

// Parts that a row, or some of the rows of a CTA, see.
struct PartRange {
    u32 first, end;
};
QG_DEVICE PartRange parts_of(const AttentionParams& p, const KeyRange& keys) {
    if (keys.first >= keys.end) return {0, 0};
    return {keys.first / p.at.part_keys, (keys.end - 1) / p.at.part_keys + 1};
}

// True for the CTA that arrives last of `peers`: what all have written is then visible to all its threads. `flag` is a word of shared memory.
// The barriers make one thread's arrival that of all: the first of the last warp, while the other warps do what `meanwhile` does. The next
// launch finds the counter at zero.
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

// The results of a row's parts: a header each, the largest exponent, the sum of the weights and two words that are not used, then the sums of
// values of each. What is loaded together lies together, at distances that are constants.
struct PartResults {
    f32x4* headers;
    float* all_sums;

    // Of row `row` of all.
    QG_DEVICE PartResults of(const AttentionParams& p, u64 row) {
        float* from = reinterpret_cast<float*>(p.at.workspace) + QG_COUNTERS + row * (p.at.parts * (QG_V + 4));
        return {reinterpret_cast<f32x4*>(from), from + p.at.parts * 4};
    }
    __device__ __forceinline__ float* sums(u32 part, u32 c) const {
        return all_sums + part * QG_V + c;
    }
};

// What the parts of a row add up to in COLUMNS columns, which a lane has. Parts are added up in chains, every so many parts one, and chains in
// the end one after another, as `attention_combine` does.
template <u32 COLUMNS>
struct PartSums {
    static constexpr u32 CHAINS = 4, BATCH = 32;
    static_assert(COLUMNS == 2 || COLUMNS == 4, "a lane loads eight bytes or sixteen");
    float largest, total, sums[COLUMNS];

    QG_DEVICE void load_columns(float (&values)[COLUMNS], const float* from) {
        if constexpr (COLUMNS == 4) {
            const f32x4 v = ld_global_cg_f32x4(reinterpret_cast<const f32x4*>(from));
            values[0] = v.x, values[1] = v.y, values[2] = v.z, values[3] = v.w;
        } else {
            const f32x2 v = ld_global_cg_f32x2(reinterpret_cast<const f32x2*>(from));
            values[0] = v.x, values[1] = v.y;
        }
    }

    // Of the parts `parts`, from column `c` on, if it is there.
    QG_DEVICE PartSums of(const PartResults& results, const PartRange& parts, u32 c, bool has_columns, f32x4* weights) {
        const u32 lane = thread_index() % 32;
        PartSums row;
        row.largest = minus_infinity();
        float totals[CHAINS] = {}, sums[CHAINS][COLUMNS] = {};
#pragma unroll 1
        for (u32 batch = parts.first; batch < parts.end; batch += BATCH) {
            // All in flight at once. Parts that are not there have no weight, and zeros; a lane has exponent and total of a part.
            f32x4 own = {minus_infinity(), 0.0f, 0.0f, 0.0f};
            if (batch + lane < parts.end) own = ld_global_cg_f32x4(results.headers + batch + lane);
            float values[BATCH][COLUMNS];
            const float* from = results.sums(batch, c);
            if (has_columns && parts.end - batch >= BATCH) {
#pragma unroll
                for (u32 i = 0; i < BATCH; i++) load_columns(values[i], from + i * QG_V);
            } else {
                const u32 there = has_columns ? parts.end - batch : 0;
#pragma unroll
                for (u32 i = 0; i < BATCH; i++) {
#pragma unroll
                    for (u32 j = 0; j < COLUMNS; j++) values[i][j] = 0.0f;
                    if (i < there) load_columns(values[i], from + i * QG_V);
                }
            }
            if (batch == parts.first) {
                row.largest = own.x;
                for (u32 part = batch + BATCH + lane; part < parts.end; part += BATCH) {
                    const float other = ld_global_cg_f32(reinterpret_cast<const float*>(results.headers + part));
                    row.largest = other > row.largest ? other : row.largest;
                }
#pragma unroll
                for (u32 mask = 16; mask > 0; mask /= 2) {
                    const float other = shfl_xor(row.largest, mask);
                    row.largest = other > row.largest ? other : row.largest;
                }
            }
            const float base = row.largest == minus_infinity() ? 0.0f : row.largest;
            st_shared(reinterpret_cast<f32x2*>(weights) + lane, f32x2{ex2_approx(own.x - base), own.y});
            warp_barrier();
#pragma unroll
            for (u32 i = 0; i < BATCH; i += 2) {
                const f32x4 two = ld_shared(weights + i / 2);
                const float pair[4] = {two.x, two.y, two.z, two.w};
#pragma unroll
                for (u32 of = 0; of < 2; of++) {
                    float(&chain)[COLUMNS] = sums[(i + of) % CHAINS];
                    totals[(i + of) % CHAINS] = fma_f32(pair[of * 2], pair[of * 2 + 1], totals[(i + of) % CHAINS]);
#pragma unroll
                    for (u32 j = 0; j < COLUMNS; j++) chain[j] = fma_f32(pair[of * 2], values[i + of][j], chain[j]);
                }
            }
            // The next batch's take their place.
            warp_barrier();
        }
        row.total = totals[0];
#pragma unroll
        for (u32 j = 0; j < COLUMNS; j++) row.sums[j] = sums[0][j];
#pragma unroll
        for (u32 chain = 1; chain < CHAINS; chain++) {
            row.total += totals[chain];
#pragma unroll
            for (u32 j = 0; j < COLUMNS; j++) row.sums[j] += sums[chain][j];
        }
        return row;
    }
};
