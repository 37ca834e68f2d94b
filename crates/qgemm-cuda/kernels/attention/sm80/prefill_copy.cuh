// Prefill with cp.async: copies of Q, K and V
// to swizzled rows of shared memory.
#pragma once
#include "atoms/cp_async.cuh"
#include "attention/sm80/prefill_work.cuh"

// Waits for all copies of the CTA. The barrier also
// ensures that all reads of the previous tile are done.
QG_DEVICE void wait_for_copies() {
    cp_async_wait_group<0>();
    cta_barrier();
}

// Copies a K or V tile. Keys that no query attends
// to and features beyond `columns` become zeros.
// [QG_KEYS][COLUMNS]
template <u32 COLUMNS>
QG_DEVICE void copy_tile(const AttentionParams& p, const Work& work, const u8* base, u64 page_stride, u64 token_stride,
                         u32 columns, u32 tile, u8* to) {
    constexpr u32 CHUNKS = COLUMNS / 8, STEP = QG_THREADS / CHUNKS;
    static_assert(STEP % 8 == 0, "the rows of a thread exchange their chunks alike");
    const u32 row = thread_index() / CHUNKS, chunk = thread_index() % CHUNKS;
    const u32 place = shared_address(to) + row * COLUMNS * 2 + (chunk ^ (row & 7u)) * 16;
    const bool is_column = chunk * 8 < columns;
    const u8* from = base + chunk * 16;
    if (p.shape.table_width == 0) {
        const KeyAddress at = address_of_key(p, work.s, tile);
        from += (at.page * page_stride + (u64)(at.row + row) * token_stride) * 2;
#pragma unroll
        for (u32 i = 0; i < QG_KEYS; i += STEP) {
            const u32 key = tile + row + i;
            const bool wanted = is_column && key >= work.keys.first && key < work.keys.end;
            cp_async_16_or_zeros(wanted, place + i * COLUMNS * 2, from + i * token_stride * 2);
        }
        return;
    }
#pragma unroll
    for (u32 i = 0; i < QG_KEYS; i += STEP) {
        const u32 key = tile + row + i;
        bool wanted = is_column && key >= work.keys.first && key < work.keys.end;
        u64 element = 0;
        if (wanted) {
            const KeyAddress at = address_of_key(p, work.s, key);
            wanted = at.is_present;
            if (wanted) element = at.page * page_stride + at.row * token_stride;
        }
        cp_async_16_or_zeros(wanted, place + i * COLUMNS * 2, from + element * 2);
    }
}

#if QG_BITS
QG_DEVICE MaskedRows masked_rows(const Work& work) {
    return {work.s, work.head, work.first_query, work.last_query, work.keys.end};
}
#endif

// Starts the copy of a K tile and
// stores its mask and page bits.
QG_DEVICE void copy_keys(const KernelParams& p, const Work& work, SharedStorage& shared, u32 tile) {
#if QG_BITS
    TileBits<ROWS>::store_row_bits(shared.tiles, p, masked_rows(work), tile);
#endif
    if (p.shape.table_width != 0 && thread_index() < QG_KEYS) {
        const u32 key = tile + thread_index();
        const bool is_visible = key >= work.keys.first && key < work.keys.end;
        const u32 present = ballot(is_visible && address_of_key(p, work.s, key).is_present);
        if (thread_index() % 32 == 0) st_shared(&shared.present[thread_index() / 32], present);
    }
    copy_tile<QG_QK>(p, work, work.k, p.at.k_page, p.at.k_token, p.shape.qk_dim, tile, shared.k);
    cp_async_commit_group();
}

QG_DEVICE void copy_queries(const AttentionParams& p, const Work& work, SharedStorage& shared) {
    constexpr u32 CHUNKS = QG_QK / 8, STEP = QG_THREADS / CHUNKS;
    const u32 row = thread_index() / CHUNKS, chunk = thread_index() % CHUNKS;
    const u32 place = shared_address(shared.q) + row * QK_PITCH + (chunk ^ (row & 7u)) * 16;
    const u64 element = (u64)(work.s.token + work.first_query + row) * p.at.q_token + work.head * p.at.q_head;
    const u8* from = reinterpret_cast<const u8*>(p.at.q) + element * 2 + chunk * 16;
#pragma unroll
    for (u32 i = 0; i < ROWS; i += STEP) {
        const bool wanted = work.first_query + row + i <= work.last_query && chunk * 8 < p.shape.qk_dim;
        cp_async_16_or_zeros(wanted, place + i * QK_PITCH, from + i * p.at.q_token * 2);
    }
    // A separate group: without keys, no later commit would
    // include it, and uncommitted copies are not waited for.
    cp_async_commit_group();
}
