// Prefill through registers, shared memory or cp.async, by
// variant: shared memory of a CTA, and copies of its tiles.
#pragma once
#include "atoms/cp_async.cuh"
#include "attention/mask_tile.cuh"
#if QG_VARIANT >= 75
#include "attention/sm75/m16n8.cuh"
#else
#include "attention/sm70/m8n8k4.cuh"
#endif

constexpr u32 WARPS = QG_THREADS / 32;
static_assert(WARPS * WARP_ROWS == QG_ROWS, "each warp has its queries");
// Words with one bit per key of a tile,
// and the unused bits of the last word.
constexpr u32 PRESENT_WORDS = (QG_KEYS + 31) / 32, NO_KEYS = QG_KEYS < 32 ? ~0u << QG_KEYS % 32 : 0;

struct SharedStorage {
    u8 q[QG_ROWS * QK_PITCH];
#if QG_VARIANT >= 75
    u8 k[QG_KEYS * QK_PITCH];
    u8 v[QG_KEYS * V_PITCH];
#else
    // K and V share memory; each waits in registers until
    // the other has been read. Two CTAs fit on an SM.
    union {
        u8 k[QG_KEYS * QK_PITCH];
        u8 v[QG_KEYS * V_PITCH];
    };
#endif
    // Bits of keys that have a page.
    u32 present[2];
    // Whether a value row has infinities or NaN.
    u32 not_finite[QG_KEYS];
#if QG_BITS
    TileBits<QG_ROWS> tiles;
#endif
};

// Copies 16 bytes from global to shared memory, or zeros.
QG_DEVICE void copy_16(bool wanted, u8* to, const u8* from) {
#if QG_VARIANT >= 80
    cp_async_16_or_zeros(wanted, shared_address(to), from);
#else
    u32x4 v = {0, 0, 0, 0};
    if (wanted) v = ld_global_v4(from);
    st_shared(reinterpret_cast<u32x4*>(to), v);
#endif
}

// Closes the group of copies since the last commit.
QG_DEVICE void commit_copies() {
#if QG_VARIANT >= 80
    cp_async_commit_group();
#endif
}

// Waits for all copies of the CTA. The barrier also
// ensures that all reads of the previous tile are done.
QG_DEVICE void wait_for_copies() {
#if QG_VARIANT >= 80
    cp_async_wait_group<0>();
#endif
    cta_barrier();
}

// Copy of a K or V tile to shared memory.
// [QG_KEYS][COLUMNS], PITCH bytes a row
template <u32 COLUMNS, u32 PITCH>
struct TileCopy {
    static constexpr u32 CHUNKS = COLUMNS / 8;
#if QG_VARIANT < 75
    static constexpr u32 COUNT = QG_KEYS * CHUNKS / QG_THREADS;
    static_assert(QG_KEYS * CHUNKS % QG_THREADS == 0, "threads copy as many chunks each");
    u32x4 staged[COUNT];
#endif

    // Starts the copy of the tile at key `tile`. Keys outside
    // `keys` and features beyond `columns` become zeros.
    QG_DEVICE void begin(TileCopy& copy, const AttentionParams& p, const Sequence& s, const u8* base, u64 page_stride,
                         u64 token_stride, u32 columns, u32 tile, const KeyRange& keys, u8* to) {
#pragma unroll
        for (u32 i = 0; i < QG_KEYS * CHUNKS; i += QG_THREADS) {
            const u32 chunk = i + thread_index();
            if (QG_KEYS * CHUNKS % QG_THREADS != 0 && chunk >= QG_KEYS * CHUNKS) break;
            const u32 row = chunk / CHUNKS, column = chunk % CHUNKS * 8, key = tile + row;
            bool wanted = key >= keys.first && key < keys.end && column < columns;
            const u8* from = base;
            if (wanted) {
                const KeyAddress at = address_of_key(p, s, key);
                wanted = at.is_present;
                if (wanted) from += (at.page * page_stride + at.row * token_stride + column) * 2;
            }
#if QG_VARIANT >= 75
            copy_16(wanted, to + row * PITCH + column * 2, from);
#else
            copy.staged[i / QG_THREADS] = {0, 0, 0, 0};
            if (wanted) copy.staged[i / QG_THREADS] = ld_global_v4(from);
#endif
        }
        commit_copies();
    }

    // Completes the copy; `wait_for_copies` makes it visible.
    // All reads of the previous contents must be done.
    QG_DEVICE void end(const TileCopy& copy, u8* to) {
#if QG_VARIANT < 75
        cta_barrier();
#pragma unroll
        for (u32 i = 0; i < COUNT; i++) {
            const u32 chunk = i * QG_THREADS + thread_index();
            st_shared(reinterpret_cast<u32x4*>(to + chunk / CHUNKS * PITCH + chunk % CHUNKS * 16), copy.staged[i]);
        }
#endif
    }
};

// Stores the bits of keys that have a page.
QG_DEVICE void find_present_keys(const AttentionParams& p, const Sequence& s, u32 tile, const KeyRange& keys,
                          SharedStorage& shared) {
    if (p.shape.table_width == 0 || thread_index() / 32 >= PRESENT_WORDS) return;
    const u32 key = tile + thread_index();
    const bool is_visible = key >= keys.first && key < keys.end;
    const u32 present = ballot(is_visible && address_of_key(p, s, key).is_present);
    if (thread_index() % 32 == 0) st_shared(&shared.present[thread_index() / 32], present);
}

// Starts the copy of Q.
QG_DEVICE void copy_queries(const AttentionParams& p, const Sequence& s, SharedStorage& shared, u32 head, u32 first_query,
                            u32 last_query) {
    constexpr u32 CHUNKS = QG_QK / 8;
    const u8* q_base = reinterpret_cast<const u8*>(p.at.q) + (s.token * p.at.q_token + head * p.at.q_head) * 2;
    for (u32 chunk = thread_index(); chunk < QG_ROWS * CHUNKS; chunk += QG_THREADS) {
        const u32 row = chunk / CHUNKS, column = chunk % CHUNKS * 8, query = first_query + row;
        const bool wanted = query <= last_query && column < p.shape.qk_dim;
        const u64 element = wanted ? query * p.at.q_token + column : 0;
        copy_16(wanted, shared.q + row * QK_PITCH + column * 2, q_base + element * 2);
    }
    // A separate group: without keys, no later commit would
    // include it, and uncommitted copies are not waited for.
    commit_copies();
}
