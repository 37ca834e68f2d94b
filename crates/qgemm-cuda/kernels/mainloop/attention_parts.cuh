// What is left to do where the keys of a sequence are cut into parts, a CTA each: the CTA of some rows that arrives last adds up what those of
// all parts have written, in the order of the parts, so that bits do not depend on which it is. Nobody waits for another.
#pragma once
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
// The barriers make one thread's arrival that of all. The next launch finds the counter at zero.
QG_DEVICE bool is_last_of(u32* counter, u32 peers, u32* flag) {
    cta_barrier();
    if (thread_index() == 0) {
        const bool is_last = atomic_add_acq_rel(counter, 1) == peers - 1;
        if (is_last) st_global_relaxed_u32(counter, 0);
        st_shared(flag, (u32)is_last);
    }
    cta_barrier();
    return ld_shared(flag) != 0;
}

// What becomes of the parts of ROWS rows of V columns. Results of parts are added up in chains, every so many parts one, and chains in the end
// one after another, as `attention_combine` does.
template <u32 ROWS, u32 V>
struct PartSums {
    static constexpr u32 CHAINS = 4, BATCH = 32, LANE_COLUMNS = 4;
    float sums[ROWS][CHAINS][V + 4];
    float totals[ROWS][CHAINS], largest[ROWS];

    // Adds up AT_ONCE chains of a row from `chain` on, by a warp. `results` is where the results of the row begin.
    template <u32 AT_ONCE>
    __device__ __forceinline__ void add_chains(u32 row, u32 chain, const float* results, u32 v_dim, const PartRange& parts) {
        constexpr u32 LOADS = BATCH / CHAINS;
        const u32 lane = thread_index() % 32, c = lane * LANE_COLUMNS;
        const bool has_columns = c < v_dim;
        const float* first = results + (u64)parts.first * (v_dim + 4);
        const u32 count = parts.end - parts.first;
        f32x4 values[AT_ONCE][LOADS];
        f32x4 own;
        // A lane has the largest exponent and the total of a part of the batch.
        const auto load = [&](u32 batch) {
#pragma unroll
            for (u32 i = 0; i < LOADS; i++) {
#pragma unroll
                for (u32 of = 0; of < AT_ONCE; of++) {
                    const u32 part = batch + i * CHAINS + chain + of;
                    values[of][i] = {};
                    if (has_columns && part < count)
                        values[of][i] = ld_global_cg_f32x4(reinterpret_cast<const f32x4*>(first + (u64)part * (v_dim + 4) + 4 + c));
                }
            }
            own = {minus_infinity(), 0.0f, 0.0f, 0.0f};
            if (batch + lane < count) own = ld_global_cg_f32x4(reinterpret_cast<const f32x4*>(first + (u64)(batch + lane) * (v_dim + 4)));
        };
        load(0);
        float most = own.x;
        for (u32 part = BATCH + lane; part < count; part += BATCH) {
            const float other = ld_global_cg_f32(first + (u64)part * (v_dim + 4));
            most = other > most ? other : most;
        }
#pragma unroll
        for (u32 mask = 16; mask > 0; mask /= 2) {
            const float other = shfl_xor(most, mask);
            most = other > most ? other : most;
        }
        const float base = most == minus_infinity() ? 0.0f : most;
        float total[AT_ONCE] = {}, sum[AT_ONCE][LANE_COLUMNS] = {};
#pragma unroll 1
        for (u32 batch = 0; batch < count; batch += BATCH) {
            if (batch != 0) load(batch);
            // Parts that are not there have no weight, and zeros.
            const u32 weight_bits = f32_to_bits(ex2_approx(own.x - base)), total_bits = f32_to_bits(own.y);
#pragma unroll
            for (u32 i = 0; i < LOADS; i++) {
#pragma unroll
                for (u32 of = 0; of < AT_ONCE; of++) {
                    const u32 from = i * CHAINS + chain + of;
                    const float weight = bits_to_f32(shfl_idx_u32(weight_bits, from));
                    const f32x4 v = values[of][i];
                    total[of] = fma_f32(weight, bits_to_f32(shfl_idx_u32(total_bits, from)), total[of]);
                    const float others[LANE_COLUMNS] = {v.x, v.y, v.z, v.w};
#pragma unroll
                    for (u32 j = 0; j < LANE_COLUMNS; j++) sum[of][j] = fma_f32(weight, others[j], sum[of][j]);
                }
            }
        }
#pragma unroll
        for (u32 of = 0; of < AT_ONCE; of++) {
            if (c < V) st_shared(reinterpret_cast<f32x4*>(&sums[row][chain + of][c]), f32x4{sum[of][0], sum[of][1], sum[of][2], sum[of][3]});
            if (lane == 0) st_shared(&totals[row][chain + of], total[of]);
        }
        if (lane == 0 && chain == 0) st_shared(&largest[row], most);
    }

    // The total of a row.
    __device__ __forceinline__ float total_of(u32 row) const {
        float total = ld_shared(&totals[row][0]);
#pragma unroll
        for (u32 chain = 1; chain < CHAINS; chain++) total += ld_shared(&totals[row][chain]);
        return total;
    }

    // Eight columns of a row's sums.
    __device__ __forceinline__ void columns_of(u32 row, u32 c, float (&values)[8]) const {
#pragma unroll
        for (u32 chain = 0; chain < CHAINS; chain++) {
            const f32x4* from = reinterpret_cast<const f32x4*>(&sums[row][chain][c]);
            const f32x4 low = ld_shared(from), high = ld_shared(from + 1);
            const float others[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
            for (u32 i = 0; i < 8; i++) values[i] = chain == 0 ? others[i] : values[i] + others[i];
        }
    }
};
