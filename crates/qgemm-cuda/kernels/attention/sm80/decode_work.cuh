// Decode attention: work of a CTA, its rows of a
// KV head and its part of the keys (split-KV).
#pragma once
#if QG_PAIRS
#include "attention/sm90/pairs.cuh"
#else
#include "attention/sm80/decode_ring.cuh"
#endif
#include "attention/finish.cuh"
#include "attention/partial_result.cuh"
#include "attention/split_kv.cuh"

// Work index of a CTA. It depends on no earlier launch,
// so the divisions run before griddepcontrol_wait.
struct WorkIndex {
    u32 sequence, kv_head, row_cta, part;
    // Query heads per KV head; rows iterate over them,
    // then over queries. Then the first row, and the
    // first and last query that the rows may have.
    u32 heads, first_row, first_query, last_query;

    // CTAs that follow one another take adjacent
    // KV heads, which are adjacent in memory.
    QG_DEVICE WorkIndex of(const KernelParams& p, u32 cta) {
        WorkIndex place;
        place.row_cta = cta % p.at.row_ctas;
        cta /= p.at.row_ctas;
        const u32 cta_heads = p.shape.kv_heads / KV_HEADS;
        place.kv_head = cta % cta_heads * KV_HEADS;
        cta /= cta_heads;
        place.part = cta % p.at.parts;
        place.sequence = cta / p.at.parts;
        place.heads = p.shape.heads / p.shape.kv_heads;
        place.first_row = place.row_cta * ROWS;
        place.first_query = place.first_row / place.heads;
        place.last_query = (place.first_row + ROWS - 1) / place.heads;
        return place;
    }
};

struct Work {
    WorkIndex place;
    Sequence s;
    // Keys that some row attends to.
    KeyRange visible;

    QG_DEVICE Work of(const KernelParams& p, const WorkIndex& place, const Sequence& s) {
        Work work = {place, s, {}};
        if (work.has_rows()) work.visible = visible_keys_of(p, work.s, place.first_query, work.last_query());
        return work;
    }
    // Whether the sequence bounds come from operands that an earlier
    // launch may write. Otherwise the shape alone gives them.
    QG_DEVICE bool depends_on_operands(const KernelParams& p) {
        return p.shape.flags & (QG_FLAG_Q_OFFSETS | QG_FLAG_KV_OFFSETS | QG_FLAG_KV_LENGTHS);
    }
    QG_DEVICE Work of_shape(const KernelParams& p, const WorkIndex& place) {
        return of(p, place, {place.sequence, place.sequence * p.shape.most_queries, p.shape.most_queries, 0, p.shape.most_keys});
    }

    __device__ __forceinline__ bool has_rows() const {
        return place.first_query < s.queries;
    }
    __device__ __forceinline__ u32 last_query() const {
        return least(place.last_query, s.queries - 1);
    }
    __device__ __forceinline__ u32 last_row() const {
        return least(place.first_row + ROWS, s.queries * place.heads) - 1;
    }
    // Visible keys within this part.
    __device__ __forceinline__ KeyRange keys(const KernelParams& p) const {
        const u32 part_first = place.part * p.at.part_keys;
        return {most(visible.first, part_first), least(visible.end, part_first + p.at.part_keys)};
    }
    __device__ __forceinline__ bool is_first_of_no_keys() const {
        return visible.first >= visible.end && place.part == 0;
    }
    // Depends on all fields and on `keys`.
    __device__ __forceinline__ u32 digest(const KeyRange& keys) const {
        return place.sequence ^ place.kv_head ^ place.part ^ place.heads ^ place.first_row ^ place.first_query ^ place.last_query ^ s.token ^
               s.queries ^ s.keys ^ visible.first ^ visible.end ^ keys.first ^ keys.end;
    }
};

// State that only the epilogue of a CTA needs. It waits
// in shared memory to save registers and divisions.
struct SavedWork {
    u32 token, queries, keys, kv_head;
    u32 heads, first_row, rows, part;
    // Parts with visible keys, and the index
    // of the CTA's row tile among all.
    u32 first_part, end_part, tile;
    // Dequantization factor of V (E4M3).
    float v_factor;

    QG_DEVICE SavedWork of(const KernelParams& p, const Work& work) {
        const PartRange parts = parts_of(p, work.visible);
        const WorkIndex& at = work.place;
        const u32 tile = (at.sequence * p.shape.kv_heads + at.kv_head) * p.at.row_ctas + at.row_cta;
        return {work.s.token, work.s.queries, work.s.keys, at.kv_head, at.heads, at.first_row, work.last_row() + 1 - at.first_row, at.part,
                parts.first,  parts.end,      tile,        value_factor(p, at.kv_head)};
    }

    __device__ __forceinline__ void save(u32* to) const {
        st_shared(reinterpret_cast<u32x4*>(to), u32x4{token, queries, keys, kv_head});
        st_shared(reinterpret_cast<u32x4*>(to + 4), u32x4{heads, first_row, rows, part});
        st_shared(reinterpret_cast<u32x4*>(to + 8), u32x4{first_part, end_part, tile, f32_to_bits(v_factor)});
    }
    QG_DEVICE SavedWork from(const u32* at) {
        const u32x4 a = ld_shared(reinterpret_cast<const u32x4*>(at)), b = ld_shared(reinterpret_cast<const u32x4*>(at + 4)),
                    c = ld_shared(reinterpret_cast<const u32x4*>(at + 8));
        return {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w, c.x, c.y, c.z, bits_to_f32(c.w)};
    }

    // With one counter per row tile, the CTA that arrives last combines
    // the parts. Without enough counters, `attention_combine` does.
    QG_DEVICE bool combines_in_kernel(const KernelParams& p) {
        return p.shape.sequences * p.shape.kv_heads * p.at.row_ctas <= QG_COUNTERS;
    }
    // Whether the result is a partial one that must be combined.
    __device__ __forceinline__ bool is_partial(const KernelParams& p) const {
        return p.at.parts > 1 && !(combines_in_kernel(p) && end_part - first_part <= 1);
    }
    // Decoding one query needs no division.
    __device__ __forceinline__ u32 query_of(u32 row) const {
        return queries == 1 ? 0 : (first_row + row) / heads;
    }
    __device__ __forceinline__ u64 token_of(u32 row) const {
        return (u64)token + query_of(row);
    }
    __device__ __forceinline__ u32 head_of(u32 row) const {
        return kv_head * heads + first_row + row - query_of(row) * heads;
    }
    // Partial results of a row for the combine in this
    // kernel. They follow the counters, row by row.
    __device__ __forceinline__ PartResults results_of(const KernelParams& p, u32 row) const {
        return PartResults::of(p, (u64)token * p.shape.heads + kv_head * (queries * heads) + first_row + row);
    }
    // Partial result of this part in the layout of `attention_combine`.
    __device__ __forceinline__ f32x4* result_of_launch(const KernelParams& p, u32 row) const {
        return reinterpret_cast<f32x4*>(partial_result(p, token_of(row), head_of(row), part) + QG_COUNTERS);
    }
    // This work for KV head `i` of the CTA.
    __device__ __forceinline__ SavedWork of_head(u32 i) const {
        SavedWork work = *this;
        work.kv_head += i;
        return work;
    }
    // Parts with keys that the row attends to.
    __device__ __forceinline__ PartRange parts_of_row(const KernelParams& p, u32 row) const {
        if (queries == 1) return {first_part, end_part};
        return parts_of(p, visible_keys(p, Sequence{0, token, queries, 0, keys}, query_of(row)));
    }
};
constexpr u32 SAVED_BYTES = sizeof(SavedWork);
