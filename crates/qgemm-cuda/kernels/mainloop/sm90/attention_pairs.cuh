// Few queries on Hopper, of pairs of heads of keys in blocks: a CTA has two heads that are neighbours in memory, so that the codes of a key of
// both are a line and their scales sixteen bytes. Two warps, of a head each, go through the same tiles of keys, and have a ring of these: one
// copies keys, the other values, lines by TMA.
#pragma once
#include "atoms/cp_async.cuh"
#include "atoms/cp_async_line.cuh"
#include "atoms/mbarrier.cuh"
#include "atoms/tma_stream5.cuh"
#include "mainloop/attention_bits.cuh"
#include "mainloop/attention_codes.cuh"

constexpr u32 ROWS = QG_ROWS, TILE = QG_TILE, WARPS = QG_THREADS / 32;
// Heads of keys of a CTA, and tiles of a head's keys that its warps have at once.
constexpr u32 KV_HEADS = 2, KEY_GROUPS = WARPS / KV_HEADS, STEP = KEY_GROUPS * TILE;
constexpr u32 ALL_THERE = ~0u;
constexpr bool IS_E4M3 = false, IS_TURNED = true;
static_assert(HAS_SCALES && ROWS == 8 && TILE == 32 && QG_QK == QG_V, "keys are in blocks, and rows of matrix instructions");
QG_DEVICE constexpr u32 bytes_of(u32 numbers) {
    return numbers * KV_BITS / 8;
}
QG_DEVICE u64 bytes_before(u64 element) {
    return element * KV_BITS / 8;
}
// Scales of a key or value of a head, and bytes from a key's to the next one's: those of both heads.
constexpr u32 SCALES = QG_QK / KV_BLOCK, SCALE_BYTES = SCALES * 2, SCALE_PITCH = KV_HEADS * SCALE_BYTES;
static_assert(SCALE_PITCH == 16, "a lane copies the scales of a key of both heads");
constexpr u32 LINE = 128, CHUNKS = bytes_of(QG_QK) / 16;
static_assert(KV_HEADS * bytes_of(QG_QK) == LINE, "codes of a pair are a line");
// A slot has the keys or the values of a tile, by turns; all codes lie before all scales, as the swizzle of TMA depends on the address.
constexpr u32 SLOTS = QG_SLOTS, CODE_BYTES = TILE * LINE, SCALES_BYTES = TILE * SCALE_PITCH;
static_assert(SLOTS % 2 == 0, "keys follow keys in a slot");
// Behind the slots, weights of each warp, and what is told of each slot. Bytes from a warp's result to the next one's, in the place of codes.
constexpr u32 ALL_CODES = KEY_GROUPS * SLOTS * CODE_BYTES, WEIGHTS_AT = ALL_CODES + KEY_GROUPS * SLOTS * SCALES_BYTES, WEIGHT_BYTES = TILE * ROWS * 2;
constexpr u32 RING_BYTES = ALL_CODES / WARPS;

// Of the two warps that share a ring.
// - `full` completes a phase when the first lane of the warp that copies has announced the bytes of codes (1), the scales that each of its lanes
//   copies have arrived (32), and TMA has brought the codes.
// - `empty` completes a phase when both warps have arrived once.
struct RingNotes {
    u64 full[SLOTS], empty[SLOTS];
    // Which keys of the slot's are there.
    u32 there[SLOTS];
};
constexpr u32 FILLING = 1 + 32, EMPTYING = KV_HEADS;
constexpr u32 NOTES_AT = WEIGHTS_AT + WARPS * WEIGHT_BYTES, ALL_RINGS = (NOTES_AT + KEY_GROUPS * (u32)sizeof(RingNotes) + 15) / 16 * 16;

// Tensor maps lie at multiples of 64 bytes.
struct alignas(64) LinesMap {
    u64 word[16];
};
// The parameter of the kernel.
struct TmaParams {
    KernelParams attention;
    // Keys of a box: those of a tile, or of half of one where pages have no more.
    u32 box_keys;
    // Keys and values: [page][row][pair of heads][bytes], boxes of so many rows, 128-byte swizzle, zeros outside.
    LinesMap k_map, v_map;
};

// A warp's head of the two, and which of the tiles is its.
QG_DEVICE u32 own_head() {
    return thread_index() / 32 % KV_HEADS;
}
QG_DEVICE u32 own_group() {
    return thread_index() / 32 / KV_HEADS;
}
// Where a chunk of the warp's head of a key, or of a value, is.
QG_DEVICE u32 key_place(u32 row, u32 chunk) {
    return row * LINE + ((own_head() * CHUNKS + chunk) ^ (row & 7u)) * 16;
}
QG_DEVICE u32 value_place(u32 row, u32 chunk) {
    return key_place(row, chunk);
}
QG_DEVICE bool has_not_finite(const u8*) {
    return false;
}

// The ring of a pair of warps, as one of them sees it.
struct TileRing {
    const TmaParams& params;
    const KernelParams& p;
    const Sequence& s;
    const KeyRange& keys;
    // The pair of heads of keys.
    u32 pair;
    u8* rings;
    // The warp's group and head, which are not found again each time.
    u32 group, head;
    // The slot that is read next, and the parity of its phase.
    u32 slot = 0, parity = 0;
    // The page of the key that the lane's scales are of, of the next tile to be copied.
    u32 next_page;

    __device__ __forceinline__ TileRing(const TmaParams& params, const Sequence& s, const KeyRange& keys, u32 pair, u8* rings)
        : params(params), p(params.attention), s(s), keys(keys), pair(pair), rings(rings), group(shfl_idx_u32(own_group(), 0)),
          head(shfl_idx_u32(own_head(), 0)) {
        next_page = p.shape.table_width == 0 && !(p.shape.flags & QG_FLAG_KV_OFFSETS) ? s.index : 0;
    }

    // Of what is computed before the launch before is waited for, nothing takes long.
    __device__ __forceinline__ u32 digest() const {
        return 0;
    }

    // Before anybody waits; a barrier of the CTA follows.
    QG_DEVICE void set_up(u8* rings) {
        RingNotes& notes = reinterpret_cast<RingNotes*>(rings + NOTES_AT)[own_group()];
        const u32 lane = thread_index() % 32;
        if (own_head() != 0 || lane >= SLOTS) return;
        mbarrier_init(&notes.full[lane], FILLING);
        mbarrier_init(&notes.empty[lane], EMPTYING);
        fence_mbarrier_init();
    }
    __device__ __forceinline__ RingNotes& notes() const {
        return reinterpret_cast<RingNotes*>(rings + NOTES_AT)[group];
    }
    __device__ __forceinline__ u8* codes_at(u32 slot) const {
        return rings + (group * SLOTS + slot) * CODE_BYTES;
    }
    __device__ __forceinline__ u8* scales_at(u32 slot) const {
        return rings + ALL_CODES + (group * SLOTS + slot) * SCALES_BYTES;
    }

    // The rows of the next slot, as soon as that is full.
    __device__ __forceinline__ const u8* wait() {
        mbarrier_wait(&notes().full[slot], parity);
        return codes_at(slot);
    }
    // From there to the scales of the warp's head.
    template <bool OF_VALUES>
    __device__ __forceinline__ u32 scales_at() const {
        return ALL_CODES - (group * SLOTS + slot) * (CODE_BYTES - SCALES_BYTES) + head * SCALE_BYTES;
    }
    // Which keys of a slot with keys are there.
    __device__ __forceinline__ u32 there() const {
        return ld_shared(&notes().there[slot]);
    }
    // Gives the slot back.
    __device__ __forceinline__ void pass() {
        warp_barrier();
        if (thread_index() % 32 == 0) mbarrier_arrive(&notes().empty[slot]);
        if (++slot == SLOTS) slot = 0, parity ^= 1;
    }
    // By the warp that copies them, in the slot that was passed last: keys, or values, of the tile whose turn it is after `tile`.
    template <bool OF_KEYS>
    __device__ __forceinline__ void refill(u32 tile) {
        if (head != (OF_KEYS ? 0u : 1u)) return;
        tile += SLOTS / 2 * STEP;
        if (tile >= keys.end) return;
        const u32 passed = slot == 0 ? SLOTS - 1 : slot - 1;
        mbarrier_wait(&notes().empty[passed], slot == 0 ? parity ^ 1 : parity);
        copy<!OF_KEYS>(tile, passed);
    }

    // Asks for the page of the lane's key of a tile.
    __device__ __forceinline__ void ask_page(u32 tile) {
        const u32 key = tile + thread_index() % 32;
        if (p.shape.table_width != 0 && key < keys.end)
            next_page = index_at(p.at.block_table, (u64)s.index * p.shape.table_width + (key >> p.at.page_shift));
    }
    // Copies what is not to be waited for: keys and values of the first tiles.
    __device__ __forceinline__ void fill(u32 first_tile) {
        ask_page(first_tile);
        // Values are asked for when the first keys are there, which come sooner so, and are multiplied while values come.
        if (head == 1 && first_tile < keys.end) mbarrier_wait(&notes().full[0], 0);
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

    // Copies the keys or values of a tile of both heads to a slot; zeros in the place of those that are not there.
    template <bool OF_VALUES>
    __device__ __forceinline__ void copy(u32 tile, u32 slot) {
        const u32 lane = thread_index() % 32, key = tile + lane, page = next_page;
        const u32 row = p.shape.table_width == 0 ? s.row + key : key & (p.shape.page_size - 1);
        const bool has_page = page < p.shape.pages, is_there = has_page && key >= keys.first && key < keys.end;
        u64* const full = &notes().full[slot];
        const u64 codes = OF_VALUES ? p.at.v : p.at.k, scales = OF_VALUES ? p.at.v_scales : p.at.k_scales;
        const u64 page_step = OF_VALUES ? p.at.v_page : p.at.k_page, token_step = OF_VALUES ? p.at.v_token : p.at.k_token;
        // Strides are multiples of lines.
        const bool has_lines = codes % 16 == 0, has_chunks = scales % 16 == 0;
        u8* const to = codes_at(slot);
        if constexpr (!OF_VALUES) {
            const u32 mask = ballot(is_there);
            if (lane == 0) st_shared(&notes().there[slot], mask);
        }
        if (lane == 0) mbarrier_arrive_expect_tx(full, has_lines ? CODE_BYTES : 0);
        if (has_lines) {
            const auto copy_box = [&](u32 first, u32 of_page, u32 of_row) {
                // What is outside of the tensor comes as zeros.
                const i32 at[5] = {0, (i32)pair, (i32)of_row, of_page < p.shape.pages ? (i32)of_page : -1, 0};
                cp_async_bulk_tensor_5d_stream(to + first * LINE, OF_VALUES ? &params.v_map : &params.k_map, at, full, l2_evict_first());
            };
            if (lane == 0) copy_box(0, page, row);
            if (params.box_keys < TILE) {
                const u32 other_page = shfl_idx_u32(page, TILE / 2), other_row = shfl_idx_u32(row, TILE / 2);
                if (lane == 0) copy_box(TILE / 2, other_page, other_row);
            }
        }
        const u64 element = is_there ? page * page_step + row * token_step + (u64)(pair * KV_HEADS * QG_QK) : 0;
        const u8* const from = reinterpret_cast<const u8*>(scales) + element / KV_BLOCK * 2;
        u8* const place = scales_at(slot) + lane * SCALE_PITCH;
        if (has_lines && has_chunks) {
            cp_async_16_or_zeros_line(is_there, shared_address(place), from);
            cp_async_mbarrier_arrive(full);
        } else {
            copy_unaligned(reinterpret_cast<const u8*>(codes) + bytes_before(element), from, is_there, has_lines, to, place);
            mbarrier_arrive(full);
        }
        ask_page(tile + STEP);
    }
    // Copies the lane's scales and, where TMA does not, its codes, which begin anywhere. They are there when this returns.
    __device__ __forceinline__ void copy_unaligned(const u8* codes, const u8* scales, bool is_there, bool has_lines, u8* to, u8* place) const {
        const u32 lane = thread_index() % 32;
#pragma unroll 1
        for (u32 at = 0; at < SCALE_PITCH; at += 2) st_shared(reinterpret_cast<u16*>(place + at), (u16)(is_there ? ld_global_u16(scales + at) : 0));
        if (has_lines) return;
#pragma unroll 1
        for (u32 at = 0; at < LINE; at += 4) {
            const u32 word = is_there ? ld_global_u32(codes + at) : 0;
            st_shared(reinterpret_cast<u32*>(to + lane * LINE + (at / 16 ^ (lane & 7u)) * 16 + at % 16), word);
        }
    }
};
