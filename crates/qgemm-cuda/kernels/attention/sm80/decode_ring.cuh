// Decode attention: cp.async ring of K and V tiles, one ring
// a warp. Slots alternate between keys and values of a tile,
// so that each is refilled as soon as it has been read.
#pragma once
#include "atoms/cp_async.cuh"
#include "atoms/cp_async_line.cuh"
#include "attention/mask.cuh"
#include "attention/codes.cuh"

constexpr u32 ROWS = QG_ROWS, TILE = QG_TILE, WARPS = QG_THREADS / 32;
// KV heads of a CTA, and K tiles of a
// head that its warps process at once.
constexpr u32 KV_HEADS = 1, KEY_GROUPS = WARPS;
QG_DEVICE u32 own_head() {
    return 0;
}
// Contiguous segment of keys: page sizes
// are 16, 32 or a larger power of two.
constexpr u32 RUN = 16, RUNS = TILE / RUN;
constexpr u32 ALL_PRESENT = TILE == 32 ? ~0u : (1u << TILE % 32) - 1;
constexpr bool IS_E4M3 = QG_KV == KV_E4M3;
// Transposed products Sᵀ = K · Qᵀ: keys are
// the rows of the MMA, queries its columns.
constexpr bool IS_TRANSPOSED = ROWS == 8;
static_assert(IS_TRANSPOSED || !IS_CODES, "of codes, keys are rows");
QG_DEVICE constexpr u32 bytes_of(u32 numbers) {
    return KV_BITS < 8 ? numbers * KV_BITS / 8 : numbers * (KV_BITS / 8);
}
QG_DEVICE u64 bytes_before(u64 element) {
    return KV_BITS < 8 ? element * KV_BITS / 8 : element * (KV_BITS / 8);
}
// Plain rows, and quantized rows of 128 bytes, have no
// padding: their 16-byte chunks are XOR-swizzled by the row
// to avoid bank conflicts. Other quantized rows are padded,
// because lanes read them four rows or four chunks apart.
QG_DEVICE constexpr bool is_swizzled(u32 numbers) {
    return !IS_CODES || bytes_of(numbers) == 128;
}
constexpr u32 K_PITCH = is_swizzled(QG_QK) || IS_E4M3 ? bytes_of(QG_QK) : bytes_of(QG_QK) + (KV_BITS == 8 ? 32 : 16);
constexpr u32 V_PITCH = is_swizzled(QG_V) ? bytes_of(QG_V) : bytes_of(QG_V) + 16;
// Scales of a key or value; they follow
// the codes of all rows of a slot.
constexpr u32 SCALES = QG_QK / KV_BLOCK, SCALE_BYTES = HAS_SCALES ? SCALES * 2 : 0, SCALE_PITCH = SCALE_BYTES;
static_assert(!HAS_SCALES || (QG_QK == QG_V && TILE == 32), "a lane copies the scales of a key and a value");
// Alignment in bytes that one copy of a key's scales needs.
constexpr u32 SCALES_ALIGNED = HAS_SCALES ? SCALE_BYTES : 1;
constexpr u32 SLOTS = QG_SLOTS, SLOT_BYTES = TILE * ((K_PITCH > V_PITCH ? K_PITCH : V_PITCH) + SCALE_BYTES);
// K tiles that are in flight or in shared memory at once.
constexpr u32 TILES_AHEAD = (SLOTS + 1) / 2;
// With transposed products, a buffer for P follows the slots.
constexpr u32 RING_BYTES = SLOTS * SLOT_BYTES + (IS_TRANSPOSED ? TILE * 8 * 2 : 0), ALL_RINGS = WARPS * RING_BYTES;
static_assert(TILE % RUN == 0 && TILE <= 32, "a lane has a key");
static_assert(QG_QK % 64 == 0 && QG_V % 64 == 0, "eight chunks are exchanged");

// Swizzled byte offset of a 16-byte chunk.
QG_DEVICE u32 key_place(u32 row, u32 chunk) {
    if constexpr (is_swizzled(QG_QK)) chunk ^= !IS_CODES ? row & 7u : IS_E4M3 ? (row & 1u) * 4 : (row & 3u) * 2;
    return row * K_PITCH + chunk * 16;
}
QG_DEVICE u32 value_place(u32 row, u32 chunk) {
    if constexpr (is_swizzled(QG_V)) chunk ^= row & 7u;
    return row * V_PITCH + chunk * 16;
}
template <bool OF_VALUES>
QG_DEVICE u32 place_of(u32 row, u32 chunk) {
    return OF_VALUES ? value_place(row, chunk) : key_place(row, chunk);
}

// K or V rows of one KV head of a sequence.
template <bool OF_VALUES>
struct Rows {
    static constexpr u32 CHUNKS = bytes_of(OF_VALUES ? QG_V : QG_QK) / 16;
    // Whether a row is shorter than a 128-byte line of L2.
    static constexpr bool IS_SHORT = CHUNKS < 8;
    // Copies of a warp for a row, and rows of a copy.
    static constexpr u32 ROW_COPIES = CHUNKS > 32 ? CHUNKS / 32 : 1, COPY_ROWS = CHUNKS > 32 ? 1 : 32 / CHUNKS;
    static_assert(32 * ROW_COPIES == CHUNKS * COPY_ROWS, "copies are whole rows, or rows whole copies");
    // Byte offset of the scales in a slot.
    static constexpr u32 SCALES_AT = TILE * (OF_VALUES ? V_PITCH : K_PITCH);
    static_assert(RUN * CHUNKS % 32 == 0, "every lane copies as many chunks of a run");
    const KernelParams& p;
    u32 kv_head;
    // The lane's chunk of the first rows of a segment.
    const u8* lane_base;

    __device__ __forceinline__ Rows(const KernelParams& p, u32 kv_head) : p(p), kv_head(kv_head) {
        const u32 lane = thread_index() % 32;
        lane_base = base() + bytes_before(lane / CHUNKS * token()) + (has_chunk() ? lane % CHUNKS * 16 : 0);
    }

    // Page stride, row stride and head offset, in elements.
    __device__ __forceinline__ u64 page() const {
        return OF_VALUES ? p.at.v_page : p.at.k_page;
    }
    __device__ __forceinline__ u64 token() const {
        return OF_VALUES ? p.at.v_token : p.at.k_token;
    }
    __device__ __forceinline__ u64 head() const {
        return kv_head * (OF_VALUES ? p.at.v_head : p.at.k_head);
    }
    // Features of a row, and whether the
    // lane's chunk of a copy has any of them.
    __device__ __forceinline__ u32 columns() const {
        return OF_VALUES ? p.shape.v_dim : p.shape.qk_dim;
    }
    __device__ __forceinline__ bool has_chunk(u32 copy = 0) const {
        return (copy * 32 + thread_index() % 32 % CHUNKS) * 16 < bytes_of(columns());
    }
    __device__ __forceinline__ const u8* base() const {
        return reinterpret_cast<const u8*>(OF_VALUES ? p.at.v : p.at.k) + bytes_before(head());
    }
    __device__ __forceinline__ u64 element_of(u32 page_index, u32 row) const {
        return page_index * page() + row * token();
    }

    // Copies one contiguous segment of a tile that begins
    // at `element`. Features beyond `columns` become zeros.
    __device__ __forceinline__ void copy_run(u32 run, u64 element, u8* to) const {
        const u32 lane = thread_index() % 32;
        const u8* from = lane_base + bytes_before(element);
        const u64 step = bytes_before(COPY_ROWS * token());
#pragma unroll
        for (u32 i = 0; i < RUN / COPY_ROWS; i++) {
            const u32 row = run * RUN + i * COPY_ROWS + lane / CHUNKS;
#pragma unroll
            for (u32 copy = 0; copy < ROW_COPIES; copy++) {
                const bool has = has_chunk(copy);
                const u32 place = shared_address(to + place_of<OF_VALUES>(row, copy * 32 + lane % CHUNKS));
                if constexpr (IS_SHORT)
                    cp_async_16_or_zeros_line(has, place, from);
                else
                    cp_async_16_or_zeros(has, place, from + (has ? copy * 512 : 0));
            }
            from += step;
        }
    }

    // Copies a tile row by row; keys that are not
    // in `present` become zeros. Each lane passes
    // the first element of key `lane % TILE`.
    __device__ __forceinline__ void copy_some(u64 element, u32 present, bool wide, u32 lane, u8* to) const {
        const u64 offset = bytes_before(element);
        const u8* base = this->base();
#pragma unroll 1
        for (u32 i = 0; i < TILE * CHUNKS / 32; i++) {
            const u32 row = (i * 32 + lane) / CHUNKS, chunk = (i % ROW_COPIES * 32 + lane) % CHUNKS;
            const u32 low = shfl_idx_u32((u32)offset, row), high = shfl_idx_u32((u32)(offset >> 32), row);
            const u8* from = base + ((u64)high << 32 | low) + chunk * 16;
            const u32 place = place_of<OF_VALUES>(row, chunk);
            const bool is_present = present >> row & 1u;
            if (wide) {
                const bool wanted = is_present && chunk * 16 < bytes_of(columns());
                cp_async_16_or_zeros(wanted, shared_address(to + place), wanted ? from : base);
            } else {
                // Byte rows are 8-byte aligned, 4-bit rows 4-byte aligned.
                constexpr u32 STEP = KV_BITS == 4 ? 4 : 8;
#pragma unroll
                for (u32 half = 0; half < 16; half += STEP) {
                    const bool wanted = is_present && chunk * 16 + half < bytes_of(columns());
                    if constexpr (STEP == 4)
                        cp_async_4(to + place + half, wanted ? from + half : base, wanted ? 4 : 0);
                    else
                        cp_async_8(to + place + half, wanted ? from + half : base, wanted ? 8 : 0);
                }
            }
        }
    }

    // Copies the scales of the lane's key or value;
    // absent scales become zeros. Without `wide`, scales
    // are 2-byte aligned and copied synchronously.
    __device__ __forceinline__ void copy_scales(u64 element, bool is_present, bool wide, u8* to) const {
        const u8* scales = reinterpret_cast<const u8*>(OF_VALUES ? p.at.v_scales : p.at.k_scales);
        const u8* from = scales + (head() + element) / KV_BLOCK * 2;
        const u32 bytes = columns() / KV_BLOCK * 2;
        if (!wide) {
#pragma unroll
            for (u32 i = 0; i < SCALE_BYTES; i += 2) {
                const u32 scale = is_present && i < bytes ? ld_global_u16(from + i) : 0;
                st_shared(reinterpret_cast<u16*>(to + i), (u16)scale);
            }
        } else if constexpr (SCALE_BYTES == 4) {
            cp_async_4_line(to, is_present ? from : scales, is_present ? bytes : 0);
        } else if constexpr (IS_SHORT) {
            cp_async_8_line(to, is_present ? from : scales, is_present ? bytes : 0);
        } else {
            cp_async_8(to, is_present ? from : scales, is_present ? bytes : 0);
        }
    }
};

// Whether the V tile (a format without scales)
// has infinities or NaN. Warp-collective.
QG_DEVICE bool has_not_finite(const u8* v_rows) {
    constexpr u32 CHUNKS = Rows<true>::CHUNKS;
    u32 found = 0;
    // The shuffle makes the lane opaque, so that the compiler
    // hoists none of this rare path out of the tile loop.
#pragma unroll 1
    for (u32 at = shfl_idx_u32(thread_index() % 32, thread_index()); at < TILE * CHUNKS; at += 32) {
        const u32x4 v = ld_shared(reinterpret_cast<const u32x4*>(v_rows + value_place(at / CHUNKS, at % CHUNKS)));
        found |= not_finite(v.x) | not_finite(v.y) | not_finite(v.z) | not_finite(v.w);
    }
    return ballot(found != 0) != 0;
}

// Ring of K and V tiles of a warp. Call
// `copy_keys`, then `copy_values` of the same tile.
struct TileRing {
    const KernelParams& p;
    const Sequence& s;
    const KeyRange& keys;
    u8* ring;
    Rows<false> k;
    Rows<true> v;
    // `wide`: all chunks are 16-byte aligned. `wide_scales`:
    // one copy brings the scales of a key. `has_runs`:
    // segments of RUN keys are contiguous. `has_pages`:
    // these segments lie in pages of a block table.
    bool wide, wide_scales, has_runs, has_pages;
    // Page of each segment of the next
    // tile, loaded one tile ahead.
    u32 next_pages[RUNS];
    // The last tile with copied keys: whether its
    // segments were contiguous, and their pages.
    u32 tile;
    bool are_runs;
    u32 pages[RUNS];
    // Present keys of the tiles in flight, oldest first.
    u32 present[TILES_AHEAD] = {};
#if QG_BITS
    // Mask bits of row `lane % ROWS` for these tiles.
    u32 row_bits[TILES_AHEAD] = {};
    KeyRange mask_range;
    const u8* mask;
#endif

    __device__ __forceinline__ TileRing(const KernelParams& p, const Sequence& s, const KeyRange& keys, u32 kv_head, u8* ring)
        : p(p), s(s), keys(keys), ring(ring), k(p, kv_head), v(p, kv_head) {
        const u64 strides = p.at.k_page | p.at.k_token | p.at.k_head | p.at.v_page | p.at.v_token | p.at.v_head;
        // Block formats have strides of whole chunks.
        const bool has_chunks = HAS_SCALES || (strides | p.shape.qk_dim | p.shape.v_dim) % 16 == 0;
        wide = !IS_CODES || ((p.at.k | p.at.v) % 16 == 0 && has_chunks);
        wide_scales = HAS_SCALES && ((p.at.k_scales | p.at.v_scales) % SCALES_ALIGNED == 0 && strides % QG_QK == 0);
        has_runs = wide && (wide_scales || !HAS_SCALES) && (p.shape.table_width == 0 || (p.at.page_shift < 32 && p.shape.page_size >= RUN));
        has_pages = has_runs && p.shape.table_width != 0;
        const u32 only_page = p.shape.table_width == 0 ? address_of_key(p, s, 0).page : 0;
#pragma unroll
        for (u32 run = 0; run < RUNS; run++) next_pages[run] = only_page;
    }

    // Depends on everything that is computed before the wait.
    __device__ __forceinline__ u32 digest() const {
        const u64 bases = reinterpret_cast<u64>(k.lane_base) ^ reinterpret_cast<u64>(v.lane_base) << 1;
        const u32 flags = wide | wide_scales << 1 | has_runs << 2 | has_pages << 3;
        return (u32)bases ^ (u32)(bases >> 32) ^ flags ^ next_pages[0];
    }

    // Byte offset from the rows of a slot to its scales.
    template <bool OF_VALUES>
    __device__ __forceinline__ u32 scales_at() const {
        return Rows<OF_VALUES>::SCALES_AT;
    }

    // Loads the pages of the segments of a tile.
    __device__ __forceinline__ void ask_pages(u32 tile) {
#pragma unroll
        for (u32 run = 0; run < RUNS; run++) {
            const u32 key = tile + run * RUN;
            if (key < keys.end)
                next_pages[run] = index_at(p.at.block_table, (u64)s.index * p.shape.table_width + (key >> p.at.page_shift));
        }
    }

    // Starts the copy of a K tile to a slot.
    __device__ __forceinline__ void copy_keys(u32 tile, u32 slot) {
        const bool is_inside = tile >= keys.first && tile + TILE <= keys.end;
        u32 visible_to_any = ALL_PRESENT;
#pragma unroll
        for (u32 i = 0; i + 1 < TILES_AHEAD; i++) present[i] = present[i + 1];
#if QG_BITS
        const u32 own = tile < keys.end ? mask_bits(p, mask, mask_range, tile / WORD_KEYS * WORD_KEYS) >> tile % WORD_KEYS & ALL_PRESENT : 0;
#pragma unroll
        for (u32 i = 0; i + 1 < TILES_AHEAD; i++) row_bits[i] = row_bits[i + 1];
        row_bits[TILES_AHEAD - 1] = own;
        visible_to_any = own;
#pragma unroll
        for (u32 distance = 1; distance < ROWS; distance *= 2) visible_to_any |= shfl_xor_u32(visible_to_any, distance);
#endif
        this->tile = tile;
        are_runs = has_runs && is_inside && visible_to_any == ALL_PRESENT;
#pragma unroll
        for (u32 run = 0; run < RUNS; run++) pages[run] = next_pages[run];
        if (has_pages) {
#pragma unroll
            for (u32 run = 0; run < RUNS; run++) are_runs = are_runs && pages[run] < p.shape.pages;
            ask_pages(tile + WARPS * TILE);
        }
        if (are_runs)
            present[TILES_AHEAD - 1] = ALL_PRESENT;
        else
            present[TILES_AHEAD - 1] = ballot(visible_to_any >> thread_index() % 32 % TILE & 1u && place_of(tile + thread_index() % 32 % TILE).is_present) & ALL_PRESENT;
        copy(k, slot);
    }

    // Starts the copy of the V tile
    // that belongs to the last K tile.
    __device__ __forceinline__ void copy_values(u32 slot) {
        copy(v, slot);
    }

    // Commits an empty group when no tile is left, so
    // that the number of groups in flight stays constant.
    __device__ __forceinline__ void copy_nothing(bool of_keys) {
        if (of_keys) {
#pragma unroll
            for (u32 i = 0; i + 1 < TILES_AHEAD; i++) present[i] = present[i + 1];
#if QG_BITS
#pragma unroll
            for (u32 i = 0; i + 1 < TILES_AHEAD; i++) row_bits[i] = row_bits[i + 1];
#endif
            tile = keys.end;
        }
        cp_async_commit_group();
    }

    // Position of a key; absent if the
    // key is outside the warp's range.
    __device__ __forceinline__ KeyAddress place_of(u32 key) {
        if (key < keys.first || key >= keys.end) return {0, 0, false};
        return address_of_key(p, s, key);
    }

    template <bool OF_VALUES>
    __device__ __forceinline__ void copy(const Rows<OF_VALUES>& rows, u32 slot) {
        u8* to = ring + slot * SLOT_BYTES;
        if (are_runs) {
            u32 first_rows[RUNS];
#pragma unroll
            for (u32 run = 0; run < RUNS; run++) {
                const u32 key = tile + run * RUN;
                first_rows[run] = has_pages ? key & (p.shape.page_size - 1) : s.row + key;
                rows.copy_run(run, rows.element_of(pages[run], first_rows[run]), to);
            }
            if constexpr (HAS_SCALES) {
                const u32 lane = thread_index() % 32, page = lane < RUN ? pages[0] : pages[RUNS - 1];
                const u32 row = (lane < RUN ? first_rows[0] : first_rows[RUNS - 1]) + lane % RUN;
                rows.copy_scales(rows.element_of(page, row), true, true, to + rows.SCALES_AT + lane * SCALE_BYTES);
            }
        } else if (tile < keys.end) {
            copy_some(rows, to);
        }
        cp_async_commit_group();
    }

    // Copies a tile key by key: unaligned, partial or
    // masked tiles. The shuffles make lane and head opaque,
    // so that the compiler hoists none of this rare path
    // out of the tile loop, where it would hold registers.
    template <bool OF_VALUES>
    __device__ __forceinline__ void copy_some(Rows<OF_VALUES> rows, u8* to) {
        const u32 lane = shfl_idx_u32(thread_index() % 32, thread_index()), mask = present[TILES_AHEAD - 1];
        rows.kv_head = shfl_idx_u32(rows.kv_head, 0);
        const bool is_present = mask >> lane % TILE & 1u;
        u64 element = 0;
        if (is_present) {
            const KeyAddress at = address_of_key(p, s, tile + lane % TILE);
            element = rows.element_of(at.page, at.row);
        }
        rows.copy_some(element, mask, wide, lane, to);
        if constexpr (HAS_SCALES)
            rows.copy_scales(element, is_present, wide_scales, to + rows.SCALES_AT + lane * SCALE_BYTES);
    }
};
