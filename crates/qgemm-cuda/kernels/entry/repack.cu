// Repacks rows of quantization blocks into the packed layout
// (qgemm-formats/src/prepack.rs). The kernel is bandwidth-bound:
// a CTA loads a strip of a tile's rows into shared memory with
// 16-byte loads, and each warp writes whole k-tiles, 16 bytes a
// lane. The bit mapping is data: QG_WINDOWS and QG_WORDS_<plane>
// in the prelude, from qgemm-formats/src/repack.rs.
#include "atoms/launch.cuh"
#include "atoms/memory.cuh"
#include "atoms/sync.cuh"
#include "generated/abi.cuh"

constexpr u32 WARPS = QG_THREADS / 32;
constexpr u32 K_TILE_BLOCKS = QG_K_TILE / QG_BLOCK_LEN;
// Bytes of a row per k-tile, and per strip.
constexpr u32 K_TILE_ROW_BYTES = K_TILE_BLOCKS * QG_BLOCK_BYTES;
constexpr u32 STRIP_BYTES = QG_STRIP_K_TILES * K_TILE_ROW_BYTES;
// Loads of a thread in flight.
constexpr u32 IN_FLIGHT = 4;

struct SharedStorage {
    // Rows keep their global-memory misalignment: each
    // begins up to 15 bytes after its first 16-byte chunk.
    u32x4 row[QG_TILE_ROWS][QG_ROW_CHUNKS];
};
static_assert(sizeof(SharedStorage) == QG_SHARED_BYTES, "the host computes another size");

// Part of a tile that this CTA repacks.
struct Strip {
    u32 tile;
    u32 first_k_tile;
    u64 row_bytes;

    QG_DEVICE u32 row(const Strip& strip, u32 tile_row) {
        return strip.tile * QG_TILE_ROWS + tile_row;
    }
    // Byte offset of the strip in global memory, for a row of the tile.
    QG_DEVICE u64 begin(const Strip& strip, u32 tile_row) {
        return row(strip, tile_row) * strip.row_bytes + (u64)strip.first_k_tile * K_TILE_ROW_BYTES;
    }
    QG_DEVICE u32 misalignment(const Strip& strip, u32 tile_row) {
        return (u32)begin(strip, tile_row) % 16;
    }
};

// Mask of the bytes of word `word` below byte `bytes`.
QG_DEVICE u32 bytes_before(u32 bytes, u32 word) {
    if (bytes >= word * 4 + 4) return ~0u;
    return bytes <= word * 4 ? 0 : (1u << (bytes - word * 4) * 8) - 1;
}

// A 16-byte chunk of a row of the strip. Bytes beyond
// the last row and beyond the row's end are zero.
QG_DEVICE u32x4 load_chunk(const RepackParams& p, const Strip& strip, u32 tile_row, u32 chunk) {
    u32x4 v = {0, 0, 0, 0};
    if (Strip::row(strip, tile_row) >= p.n) return v;
    const u64 begin = Strip::begin(strip, tile_row), row_end = (Strip::row(strip, tile_row) + 1ull) * strip.row_bytes;
    const u64 end = begin + STRIP_BYTES < row_end ? begin + STRIP_BYTES : row_end;
    const u64 at = begin / 16 * 16 + chunk * 16;
    if (at >= end) return v;
    v = ld_global_stream_v4(reinterpret_cast<const u8*>(p.rows) + at);
    if (end - at < 16) {
        const u32 bytes = (u32)(end - at);
        v.x &= bytes_before(bytes, 0), v.y &= bytes_before(bytes, 1);
        v.z &= bytes_before(bytes, 2), v.w &= bytes_before(bytes, 3);
    }
    return v;
}

QG_DEVICE void stage(SharedStorage& shared, const RepackParams& p, const Strip& strip, u32 thread) {
    constexpr u32 chunks = QG_TILE_ROWS * QG_ROW_CHUNKS;
    for (u32 first = thread; first < chunks; first += IN_FLIGHT * QG_THREADS) {
        u32x4 chunk[IN_FLIGHT];
#pragma unroll
        for (u32 i = 0; i < IN_FLIGHT; i++) {
            const u32 at = first + i * QG_THREADS;
            if (at < chunks) chunk[i] = load_chunk(p, strip, at / QG_ROW_CHUNKS, at % QG_ROW_CHUNKS);
        }
#pragma unroll
        for (u32 i = 0; i < IN_FLIGHT; i++) {
            const u32 at = first + i * QG_THREADS;
            if (at < chunks) st_shared(&shared.row[at / QG_ROW_CHUNKS][at % QG_ROW_CHUNKS], chunk[i]);
        }
    }
}

// A row in shared memory, from a bit offset on.
struct Bits {
    const u32* words;
    u32 first;

    // 32 bits at `offset`.
    QG_DEVICE u32 window(const Bits& bits, u32 offset) {
        const u32 at = bits.first + offset % 32;
        const u32* word = bits.words + at / 32 + offset / 32;
        const u64 both = ld_shared(word) | (u64)ld_shared(word + 1) << 32;
        return (u32)(both >> at % 32);
    }
};

// A k-tile of the strip.
struct KTile {
    const SharedStorage* shared;
    const Strip* strip;
    u32 index;
    u32 rows;
    u32 blocks;

    // Row `tile_row`, from bit `bit` after byte `byte` of the k-tile.
    QG_DEVICE Bits row(const KTile& s, u32 tile_row, u32 byte, u32 bit) {
        const u32 first = Strip::misalignment(*s.strip, tile_row) + s.index * K_TILE_ROW_BYTES + byte;
        return {&s.shared->row[tile_row][0].x, first * 8 + bit};
    }
    // XOR mask that turns moved bits into codes; 0 for padding.
    QG_DEVICE u32 flip(const KTile& s, u32 tile_row, u32 block) {
        if constexpr (QG_ZERO_CODE == 0) return 0;
        const bool is_padding = Strip::row(*s.strip, tile_row) >= s.rows ||
                                (s.strip->first_k_tile + s.index) * K_TILE_BLOCKS + block >= s.blocks;
        return is_padding ? 0 : QG_ZERO_CODE * 0x01010101u;
    }
};

template <int SHIFT>
QG_DEVICE u32 shifted(u32 word) {
    if constexpr (SHIFT < 0)
        return word >> -SHIFT;
    else
        return word << SHIFT;
}

// Tile row of the lane's row `row`.
QG_DEVICE u32 row_of_lane(u32 lane, u32 row) {
    return QG_MMA_M8N8K4 ? lane : lane / 4 + row * 8;
}

template <u32 P, u32 WORDS>
QG_DEVICE void store_words(u8* k_tile, u32 lane, const u32 (&word)[WORDS]) {
    constexpr u32 bytes = QgCodePlane<P>::WORD_BYTES;
    u8* at = k_tile + QgCodePlane<P>::OFFSET + lane * bytes;
#pragma unroll
    for (u32 i = 0; i < WORDS; i += bytes / 4, at += 32 * bytes) {
        if constexpr (bytes == 16) {
            st_global_v4(at, {word[i], word[i + 1], word[i + 2], word[i + 3]});
        } else {
#pragma unroll
            for (u32 part = 0; part < bytes / 4; part++) st_global_u32(at + part * 4, word[i + part]);
        }
    }
}

// Macros for the prelude's lists. `lane_row(row, lane_bits)`
// is the origin of a lane's windows in a row.
#define QG_WINDOW(index, row, bit, lane_bits) const u32 window##index = Bits::window(lane_row(row, lane_bits), bit);
#define QG_MOVE(index, shift, mask) | (shifted<shift>(window##index) & mask)
#define QG_WORD0(index, row, block, moves) \
    word0[index] = (0u moves) ^ KTile::flip(k_tile, row_of_lane(lane, row), block);
#define QG_WORD1(index, row, block, moves) \
    word1[index] = (0u moves) ^ KTile::flip(k_tile, row_of_lane(lane, row), block);

// Planes share windows, so all words
// are computed before the first store.
QG_DEVICE void store_codes(u8* out, const KTile& k_tile, u32 lane) {
    const auto lane_row = [&](u32 row, u32 lane_bits) {
        return KTile::row(k_tile, row_of_lane(lane, row), 0, lane_bits * (lane % 4));
    };
    constexpr u32 words = QG_K_TILE * QG_TILE_ROWS / 1024;
    QG_WINDOWS(QG_WINDOW)
    u32 word0[words * QgCodePlane<0>::BITS];
    QG_WORDS_0(QG_WORD0, QG_MOVE)
#if QG_CODE_PLANES > 1
    u32 word1[words * QgCodePlane<1>::BITS];
    QG_WORDS_1(QG_WORD1, QG_MOVE)
#endif
    store_words<0>(out, lane, word0);
#if QG_CODE_PLANES > 1
    store_words<1>(out, lane, word1);
#endif
}

// Row of the record at index `place` of a scale plane.
template <u32 P>
QG_DEVICE u32 row_of_record(u32 place) {
    if constexpr (QgScalePlane<P>::SHARED_BY > 1) return place * QgScalePlane<P>::SHARED_BY;
    return QG_MMA_M8N8K4 ? place : place % 2 * 8 + place / 2;
}

// Four bytes of a scale plane, assembled from
// the largest pieces that divide a record.
template <u32 P>
QG_DEVICE u32 record_word(const KTile& k_tile, u32 word) {
    constexpr u32 row_bytes = QgScalePlane<P>::ROW_BYTES, part = QgBlockRecords<P>::BYTES;
    constexpr u32 piece = part % 4 == 0 ? 4 : part % 2 == 0 ? 2 : 1;
    u32 value = 0;
#pragma unroll
    for (u32 i = 0; i < 4; i += piece) {
        const u32 row = row_of_record<P>((word * 4 + i) / row_bytes), at = (word * 4 + i) % row_bytes;
        const Bits bits =
            KTile::row(k_tile, row, at / part * QG_BLOCK_BYTES + QgBlockRecords<P>::OFFSET + at % part, 0);
        if constexpr (piece == 1)
            value |= (u32)ld_shared(reinterpret_cast<const u8*>(bits.words) + bits.first / 8) << 8 * i;
        else
            value |= (Bits::window(bits, 0) & (~0u >> (32 - 8 * piece))) << 8 * i;
    }
    return value;
}

// Records and padding of a plane, for `count` k-tiles.
// Records are few, so all threads of the CTA share them.
template <u32 P>
QG_DEVICE void store_records(u8* out, KTile k_tile, u32 count, u32 thread) {
    constexpr u32 bytes = QG_TILE_ROWS / QgScalePlane<P>::SHARED_BY * QgScalePlane<P>::ROW_BYTES;
    constexpr u32 words = bytes / 4, padded = (words + 3) / 4 * 4;
    static_assert(bytes % 4 == 0, "whole words");
    for (u32 i = thread; i < count * padded; i += QG_THREADS) {
        const u32 word = i % padded;
        k_tile.index = i / padded;
        st_global_u32(out + k_tile.index * QG_K_TILE_BYTES + QgScalePlane<P>::OFFSET + word * 4,
                      word < words ? record_word<P>(k_tile, word) : 0);
    }
}

extern "C" __global__ void __launch_bounds__(QG_THREADS, QG_CTAS_PER_SM)
    qg_repack(const __grid_constant__ RepackParams p) {
    SharedStorage& shared = *reinterpret_cast<SharedStorage*>(dynamic_shared());
    const u32 thread = thread_index(), lane = thread % 32;
    const u32 strips = (p.k_tiles + QG_STRIP_K_TILES - 1) / QG_STRIP_K_TILES;
    const Strip strip = {cta_index().x / strips, cta_index().x % strips * QG_STRIP_K_TILES,
                         (u64)p.blocks * QG_BLOCK_BYTES};
    stage(shared, p, strip, thread);
    cta_barrier();

    const u32 left = p.k_tiles - strip.first_k_tile, count = left < QG_STRIP_K_TILES ? left : QG_STRIP_K_TILES;
    u8* out = reinterpret_cast<u8*>(p.packed) + ((u64)strip.tile * p.k_tiles + strip.first_k_tile) * QG_K_TILE_BYTES;
    KTile k_tile = {&shared, &strip, 0, p.n, p.blocks};
#if QG_SCALE_PLANES > 0
    store_records<0>(out, k_tile, count, thread);
#endif
#if QG_SCALE_PLANES > 1
    store_records<1>(out, k_tile, count, thread);
#endif
    for (k_tile.index = thread / 32; k_tile.index < count; k_tile.index += WARPS)
        store_codes(out + k_tile.index * QG_K_TILE_BYTES, k_tile, lane);
}
