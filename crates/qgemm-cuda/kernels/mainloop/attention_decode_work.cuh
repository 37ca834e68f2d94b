// What a CTA of attention of few queries works on: rows of a sequence and head of keys, and a part of the keys.
#pragma once
#include "mainloop/attention_decode_ring.cuh"
#include "mainloop/attention_parts.cuh"

struct Work {
    u32 sequence, kv_head, row_cta, part;
    Sequence s;
    // Heads that share keys, whose queries are rows one after another, and which rows of them.
    u32 heads, first_row, last_row;
    bool has_rows;
    // Parts of the keys that some row sees, and the keys of this part.
    PartRange parts;
    KeyRange keys;

    // CTAs that read neighbours in memory, heads of the same keys, follow one another.
    QG_DEVICE Work of(const KernelParams& p, u32 cta) {
        Work work;
        work.row_cta = cta % p.at.row_ctas;
        cta /= p.at.row_ctas;
        work.kv_head = cta % p.shape.kv_heads;
        cta /= p.shape.kv_heads;
        work.part = cta % p.at.parts;
        work.sequence = cta / p.at.parts;
        work.s = sequence_of(p, work.sequence);
        work.heads = p.shape.heads / p.shape.kv_heads;
        work.first_row = work.row_cta * ROWS;
        const u32 all_rows = work.s.queries * work.heads;
        work.has_rows = work.first_row < all_rows;
        work.last_row = least(work.first_row + ROWS, all_rows) - 1;
        const u32 part_first = work.part * p.at.part_keys;
        const KeyRange all = keys_seen_by(p, work.s, work.first_row / work.heads, work.last_row / work.heads);
        work.parts = parts_of(p, all);
        work.keys = {most(all.first, part_first), least(all.end, part_first + p.at.part_keys)};
        return work;
    }

    // Where there is a counter for all CTAs of the same rows, the last of them adds the parts up; otherwise another launch does.
    __device__ __forceinline__ bool adds_up(const KernelParams& p) const {
        return p.shape.sequences * p.shape.kv_heads * p.at.row_ctas <= QG_COUNTERS;
    }
    // Whether the result is one of several parts, or one that another launch reads.
    __device__ __forceinline__ bool is_partial(const KernelParams& p) const {
        return p.at.parts > 1 && !(adds_up(p) && parts.end - parts.first <= 1);
    }
    __device__ __forceinline__ bool is_first_of_none() const {
        return parts.first == parts.end && part == 0;
    }
    __device__ __forceinline__ u64 token_of(u32 row) const {
        return (u64)s.token + (first_row + row) / heads;
    }
    __device__ __forceinline__ u32 head_of(u32 row) const {
        return kv_head * heads + (first_row + row) % heads;
    }
    // Where the results of the parts of a row begin, behind the counters.
    __device__ __forceinline__ float* partial_results(const KernelParams& p, u32 row) const {
        return partial_result(p, token_of(row), head_of(row), 0) + QG_COUNTERS;
    }
};
