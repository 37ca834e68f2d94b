// Decode on Hopper with block-quantized K and V: TMA ring for
// a pair of KV heads. The two heads are adjacent in memory, so
// that the codes of a key are one 128-byte line and its scales
// 16 bytes. Two warps, one per head, process the same K tiles
// and share a ring: one warp copies keys, the other values.
#pragma once
#include "atoms/cp_async.cuh"
#include "atoms/cp_async_line.cuh"
#include "atoms/mbarrier.cuh"
#include "atoms/tma_stream5.cuh"
#include "attention/mask.cuh"
#include "attention/codes.cuh"

constexpr u32 ROWS = QG_ROWS, TILE = QG_TILE, WARPS = QG_THREADS / 32;
// KV heads of a CTA, and K tiles of a
// head that its warps process at once.
constexpr u32 KV_HEADS = 2, KEY_GROUPS = WARPS / KV_HEADS, STEP = KEY_GROUPS * TILE;
constexpr u32 ALL_PRESENT = ~0u;
constexpr bool IS_E4M3 = false, IS_TRANSPOSED = true;
static_assert(HAS_SCALES && ROWS == 8 && TILE == 32 && QG_QK == QG_V, "keys are in blocks, and rows of matrix instructions");
QG_DEVICE constexpr u32 bytes_of(u32 numbers) {
    return numbers * KV_BITS / 8;
}
QG_DEVICE u64 bytes_before(u64 element) {
    return element * KV_BITS / 8;
}
// Scales of a key or value of one head, and the
// pitch between keys, which covers both heads.
constexpr u32 SCALES = QG_QK / KV_BLOCK, SCALE_BYTES = SCALES * 2, SCALE_PITCH = KV_HEADS * SCALE_BYTES;
static_assert(SCALE_PITCH == 16, "a lane copies the scales of a key of both heads");
constexpr u32 LINE = 128, CHUNKS = bytes_of(QG_QK) / 16;
static_assert(KV_HEADS * bytes_of(QG_QK) == LINE, "codes of a pair are a line");
// Slots alternate between keys and values of a tile. All codes
// precede all scales: TMA's swizzle depends on the address.
constexpr u32 SLOTS = QG_SLOTS, CODE_BYTES = TILE * LINE, SCALES_BYTES = TILE * SCALE_PITCH;
static_assert(SLOTS % 2 == 0, "keys follow keys in a slot");
// After the slots: P of each warp, then the barriers. RING_BYTES
// is the stride between warp results, which overwrite the codes.
constexpr u32 ALL_CODES = KEY_GROUPS * SLOTS * CODE_BYTES, WEIGHTS_AT = ALL_CODES + KEY_GROUPS * SLOTS * SCALES_BYTES, WEIGHT_BYTES = TILE * ROWS * 2;
constexpr u32 RING_BYTES = ALL_CODES / WARPS;

// Barriers of the ring that two warps share.
// - `full` completes a phase after 33 arrivals: one of the
// lane that announces the bytes, 32 of the lanes whose
// scales have arrived. TMA's bytes must also have arrived.
// - `empty` completes a phase when both warps have arrived.
struct RingBarriers {
    u64 full[SLOTS], empty[SLOTS];
    // Present keys of each slot.
    u32 present[SLOTS];
};
constexpr u32 FULL_ARRIVALS = 1 + 32, EMPTY_ARRIVALS = KV_HEADS;
constexpr u32 BARRIERS_AT = WEIGHTS_AT + WARPS * WEIGHT_BYTES, ALL_RINGS = (BARRIERS_AT + KEY_GROUPS * (u32)sizeof(RingBarriers) + 15) / 16 * 16;

// Tensor maps must be 64-byte aligned.
struct alignas(64) LinesMap {
    u64 word[16];
};
// Kernel parameter.
struct TmaParams {
    KernelParams attention;
    // Keys of a TMA box: a tile, or half
    // a tile if pages have only 16 rows.
    u32 box_keys;
    // K and V: [page][row][pair of heads][bytes], boxes of
    // `box_keys` rows, 128-byte swizzle, zeros out of bounds.
    LinesMap k_map, v_map;
};

// The warp's head of the pair, and the
// group of tiles that it processes.
QG_DEVICE u32 own_head() {
    return thread_index() / 32 % KV_HEADS;
}
QG_DEVICE u32 own_group() {
    return thread_index() / 32 / KV_HEADS;
}
// Swizzled byte offset of a chunk of the warp's head.
QG_DEVICE u32 key_place(u32 row, u32 chunk) {
    return row * LINE + ((own_head() * CHUNKS + chunk) ^ (row & 7u)) * 16;
}
QG_DEVICE u32 value_place(u32 row, u32 chunk) {
    return key_place(row, chunk);
}
QG_DEVICE bool has_not_finite(const u8*) {
    return false;
}

// Ring of two warps, from the view of one of them.
struct TileRing {
    const TmaParams& params;
    const KernelParams& p;
    const Sequence& s;
    const KeyRange& keys;
    // Index of the pair of KV heads.
    u32 pair;
    u8* rings;
    // Group and head of the warp, held as uniform values.
    u32 group, head;
    // Next slot to read, and the parity of its phase.
    u32 slot = 0, parity = 0;
    // Page of the lane's key in the next tile to copy.
    u32 next_page;

    __device__ __forceinline__ TileRing(const TmaParams& params, const Sequence& s, const KeyRange& keys, u32 pair, u8* rings)
        : params(params), p(params.attention), s(s), keys(keys), pair(pair), rings(rings), group(shfl_idx_u32(own_group(), 0)),
          head(shfl_idx_u32(own_head(), 0)) {
        next_page = p.shape.table_width == 0 && !(p.shape.flags & QG_FLAG_KV_OFFSETS) ? s.index : 0;
    }

    // Nothing here is expensive, so no
    // value must be forced before the wait.
    __device__ __forceinline__ u32 digest() const {
        return 0;
    }

    // Initializes the barriers; a CTA barrier must follow.
    QG_DEVICE void set_up(u8* rings) {
        RingBarriers& barriers = reinterpret_cast<RingBarriers*>(rings + BARRIERS_AT)[own_group()];
        const u32 lane = thread_index() % 32;
        if (own_head() != 0 || lane >= SLOTS) return;
        mbarrier_init(&barriers.full[lane], FULL_ARRIVALS);
        mbarrier_init(&barriers.empty[lane], EMPTY_ARRIVALS);
        fence_mbarrier_init();
    }
    __device__ __forceinline__ RingBarriers& barriers() const {
        return reinterpret_cast<RingBarriers*>(rings + BARRIERS_AT)[group];
    }
    __device__ __forceinline__ u8* codes_at(u32 slot) const {
        return rings + (group * SLOTS + slot) * CODE_BYTES;
    }
    __device__ __forceinline__ u8* scales_at(u32 slot) const {
        return rings + ALL_CODES + (group * SLOTS + slot) * SCALES_BYTES;
    }

    // Waits for the next slot and returns its codes.
    __device__ __forceinline__ const u8* wait() {
        mbarrier_wait(&barriers().full[slot], parity);
        return codes_at(slot);
    }
    // Byte offset from the codes of the slot
    // to the scales of the warp's head.
    template <bool OF_VALUES>
    __device__ __forceinline__ u32 scales_at() const {
        return ALL_CODES - (group * SLOTS + slot) * (CODE_BYTES - SCALES_BYTES) + head * SCALE_BYTES;
    }
    // Present keys of a K slot.
    __device__ __forceinline__ u32 present() const {
        return ld_shared(&barriers().present[slot]);
    }
    // Releases the slot.
    __device__ __forceinline__ void pass() {
        warp_barrier();
        if (thread_index() % 32 == 0) mbarrier_arrive(&barriers().empty[slot]);
        if (++slot == SLOTS) slot = 0, parity ^= 1;
    }
    // Refills the slot that was released last with the next tile
    // after `tile`. Only the warp that copies this operand acts.
    template <bool OF_KEYS>
    __device__ __forceinline__ void refill(u32 tile) {
        if (head != (OF_KEYS ? 0u : 1u)) return;
        tile += SLOTS / 2 * STEP;
        if (tile >= keys.end) return;
        const u32 passed = slot == 0 ? SLOTS - 1 : slot - 1;
        mbarrier_wait(&barriers().empty[passed], slot == 0 ? parity ^ 1 : parity);
        copy<!OF_KEYS>(tile, passed);
    }

    // Loads the page of the lane's key in a tile.
    __device__ __forceinline__ void ask_page(u32 tile) {
        const u32 key = tile + thread_index() % 32;
        if (p.shape.table_width != 0 && key < keys.end)
            next_page = index_at(p.at.block_table, (u64)s.index * p.shape.table_width + (key >> p.at.page_shift));
    }
    // Starts the copies of the first tiles.
    __device__ __forceinline__ void fill(u32 first_tile) {
        ask_page(first_tile);
        // V copies start after the first keys have arrived: K comes
        // sooner, and its products overlap with the copy of V.
        if (head == 1 && first_tile < keys.end) mbarrier_wait(&barriers().full[0], 0);
#pragma unroll 1
        for (u32 i = 0; i < SLOTS / 2; i++) {
            const u32 tile = first_tile + i * STEP;
            if (tile >= keys.end) break;
            if (head == 0)
                copy<false>(tile, 2 * i);
            else
                copy<true>(tile, 2 * i + 1);
        }
    }

    // Copies K or V of a tile, both heads,
    // to a slot. Absent keys become zeros.
    template <bool OF_VALUES>
    __device__ __forceinline__ void copy(u32 tile, u32 slot) {
        const u32 lane = thread_index() % 32, key = tile + lane, page = next_page;
        const u32 row = p.shape.table_width == 0 ? s.row + key : key & (p.shape.page_size - 1);
        const bool has_page = page < p.shape.pages, is_present = has_page && key >= keys.first && key < keys.end;
        u64* const full = &barriers().full[slot];
        const u64 codes = OF_VALUES ? p.at.v : p.at.k, scales = OF_VALUES ? p.at.v_scales : p.at.k_scales;
        const u64 page_step = OF_VALUES ? p.at.v_page : p.at.k_page, token_step = OF_VALUES ? p.at.v_token : p.at.k_token;
        // Strides are multiples of a line.
        const bool has_lines = codes % 16 == 0, has_chunks = scales % 16 == 0;
        u8* const to = codes_at(slot);
        if constexpr (!OF_VALUES) {
            const u32 mask = ballot(is_present);
            if (lane == 0) st_shared(&barriers().present[slot], mask);
        }
        if (lane == 0) mbarrier_arrive_expect_tx(full, has_lines ? CODE_BYTES : 0);
        if (has_lines) {
            const auto copy_box = [&](u32 first, u32 of_page, u32 of_row) {
                // Out-of-bounds boxes become zeros.
                const i32 at[5] = {0, (i32)pair, (i32)of_row, of_page < p.shape.pages ? (i32)of_page : -1, 0};
                cp_async_bulk_tensor_5d_stream(to + first * LINE, OF_VALUES ? &params.v_map : &params.k_map, at, full, l2_evict_first());
            };
            if (lane == 0) copy_box(0, page, row);
            if (params.box_keys < TILE) {
                const u32 other_page = shfl_idx_u32(page, TILE / 2), other_row = shfl_idx_u32(row, TILE / 2);
                if (lane == 0) copy_box(TILE / 2, other_page, other_row);
            }
        }
        const u64 element = is_present ? page * page_step + row * token_step + (u64)(pair * KV_HEADS * QG_QK) : 0;
        const u8* const from = reinterpret_cast<const u8*>(scales) + element / KV_BLOCK * 2;
        u8* const place = scales_at(slot) + lane * SCALE_PITCH;
        if (has_lines && has_chunks) {
            cp_async_16_or_zeros_line(is_present, shared_address(place), from);
            cp_async_mbarrier_arrive(full);
        } else {
            copy_unaligned(reinterpret_cast<const u8*>(codes) + bytes_before(element), from, is_present, has_lines, to, place);
            mbarrier_arrive(full);
        }
        ask_page(tile + STEP);
    }
    // Synchronous copy for unaligned operands: the lane's
    // scales, and its codes unless TMA copies them.
    __device__ __forceinline__ void copy_unaligned(const u8* codes, const u8* scales, bool is_present, bool has_lines, u8* to, u8* place) const {
        const u32 lane = thread_index() % 32;
#pragma unroll 1
        for (u32 at = 0; at < SCALE_PITCH; at += 2) st_shared(reinterpret_cast<u16*>(place + at), (u16)(is_present ? ld_global_u16(scales + at) : 0));
        if (has_lines) return;
#pragma unroll 1
        for (u32 at = 0; at < LINE; at += 4) {
            const u32 word = is_present ? ld_global_u32(codes + at) : 0;
            st_shared(reinterpret_cast<u32*>(to + lane * LINE + (at / 16 ^ (lane & 7u)) * 16 + at % 16), word);
        }
    }
};
