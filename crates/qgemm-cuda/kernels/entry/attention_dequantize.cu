// Dequantizes the keys and values of a step to plain
// rows, for attention by matrix instructions. A CTA takes
// every `sequence_ctas`-th tile of keys of a sequence, and
// of these the keys or the values. A thread takes eight
// features of a head. Plain keys or values beside
// quantized ones are converted alike. With pages, the
// plain rows have a block table, too: page numbers
// of absent pages stay invalid.
#include "attention/numbers.cuh"
#include "attention/problem.cuh"

struct DequantizeParams {
    AttentionParams attention;
    AttentionPlainKv plain;
};

// Keys of a tile.
constexpr u32 TILE_KEYS = 8;
// Loads of a thread that are in flight together.
constexpr u32 TOGETHER = 4;
constexpr u32 INVALID_PAGE = ~0u;

// Keys or values of all heads: where they are stored, and
// where their plain rows go.
struct Side {
    u64 codes, scales, factors;
    u64 page, token, head;
    u64 plain;
    u32 format, features;

    // Fields are selected one by one: an array of
    // both sides would lie in local memory.
    QG_DEVICE Side of(const DequantizeParams& p, bool is_values) {
        const AttentionPointers& at = p.attention.at;
        return {is_values ? at.v : at.k,
                is_values ? at.v_scales : at.k_scales,
                is_values ? at.v_factors : at.k_factors,
                is_values ? at.v_page : at.k_page,
                is_values ? at.v_token : at.k_token,
                is_values ? at.v_head : at.k_head,
                at.workspace + (is_values ? p.plain.values : p.plain.keys),
                is_values ? p.plain.value_format : p.plain.key_format,
                is_values ? p.attention.shape.v_dim : p.attention.shape.qk_dim};
    }
};

// Eight features of a head, and where they go; 0: nowhere.
template <u32 FORMAT>
struct Loaded {
    Eight<FORMAT> eight;
    float factor;
    u64 to;

    QG_DEVICE Loaded nothing() {
        return {Eight<FORMAT>::zeros(), 0.0f, 0};
    }

    // Number `i` of the eights of a tile.
    QG_DEVICE Loaded load(const DequantizeParams& p, const Sequence& s, const Side& side, u32 tile, const KeyRange& keys,
                          u32 i) {
        const AttentionParams& of = p.attention;
        const u32 eights = side.features / 8, row = eights * of.shape.kv_heads;
        const u32 key = tile * TILE_KEYS + i / row, head = i % row / eights, column = i % eights * 8;
        if (i >= TILE_KEYS * row || key < keys.first || key >= keys.end) return nothing();
        const KeyAddress at = address_of_key(of, s, key);
        if (!at.is_present) return nothing();
        const u64 element = at.page * side.page + at.row * side.token + head * side.head + column;
        const u8* codes = reinterpret_cast<const u8*>(side.codes) + Eight<FORMAT>::offset_of(element);
        float factor = side.factors ? bits_to_f32(index_at(side.factors, head)) : 1.0f;
        if constexpr (has_scales(FORMAT))
            factor = f16_to_f32(ld_global_u16(reinterpret_cast<const u8*>(side.scales) + element / KV_BLOCK * 2));
        const u64 plain_row = s.index * p.plain.sequence_rows + s.row + key;
        const u64 to = side.plain + ((plain_row * of.shape.kv_heads + head) * side.features + column) * 2;
        return {Eight<FORMAT>::load(codes, of.shape.flags & QG_FLAG_KV_ALIGNED), factor, to};
    }

    // Rounds to the type of Q.
    QG_DEVICE void store(const Loaded& from, u32 dtype) {
        if (from.to == 0) return;
        u32 pairs[4];
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            const float low = Eight<FORMAT>::number(from.eight, 2 * i) * from.factor;
            const float high = Eight<FORMAT>::number(from.eight, 2 * i + 1) * from.factor;
            pairs[i] = dtype == DTYPE_F16 ? f32_to_f16(low) | f32_to_f16(high) << 16
                                          : f32_to_bf16(low) | f32_to_bf16(high) << 16;
        }
        st_global_v4(reinterpret_cast<u8*>(from.to), {pairs[0], pairs[1], pairs[2], pairs[3]});
    }
};

// All tiles of a CTA within `keys`.
template <u32 FORMAT>
QG_DEVICE void dequantize(const DequantizeParams& p, const Sequence& s, const Side& side, u32 first, const KeyRange& keys) {
    const u32 eights = TILE_KEYS * p.attention.shape.kv_heads * (side.features / 8);
    const u32 end = (keys.end + TILE_KEYS - 1) / TILE_KEYS;
#pragma unroll 1
    for (u32 tile = first; tile < end; tile += p.plain.sequence_ctas) {
#pragma unroll 1
        for (u32 i = thread_index(); i < eights; i += TOGETHER * QG_THREADS) {
            Loaded<FORMAT> loaded[TOGETHER];
#pragma unroll
            for (u32 j = 0; j < TOGETHER; j++)
                loaded[j] = Loaded<FORMAT>::load(p, s, side, tile, keys, i + j * QG_THREADS);
#pragma unroll
            for (u32 j = 0; j < TOGETHER; j++) Loaded<FORMAT>::store(loaded[j], p.attention.shape.dtype);
        }
    }
}

// Block table of the plain rows: pages in order, with
// invalid numbers for pages that the cache lacks.
QG_DEVICE void number_pages(const DequantizeParams& p, const Sequence& s) {
    const AttentionShape& shape = p.attention.shape;
    for (u32 place = thread_index(); place < p.plain.table_width; place += QG_THREADS) {
        const u64 at = (u64)s.index * shape.table_width + place;
        const bool is_used = (u64)place * shape.page_size < s.keys;
        const bool is_present = is_used && index_at(p.attention.at.block_table, at) < shape.pages;
        const u32 own = s.index * p.plain.table_width + place;
        u8* table = reinterpret_cast<u8*>(p.attention.at.workspace + p.plain.table);
        st_global_u32(table + (u64)own * 4, is_present ? own : INVALID_PAGE);
    }
}

extern "C" __global__ void __launch_bounds__(QG_THREADS)
    qg_attention_dequantize(const __grid_constant__ DequantizeParams p) {
    const AttentionParams& of = p.attention;
    const u32 own = cta_index().x % p.plain.sequence_ctas;
    const bool is_values = cta_index().y == 1;
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    const Sequence s = sequence_of(of, cta_index().x / p.plain.sequence_ctas);
    if (own == 0 && !is_values) number_pages(p, s);
    if (s.queries == 0) return;
    const KeyRange keys = visible_keys_of(of, s, 0, s.queries - 1);
    const Side side = Side::of(p, is_values);
    const u32 first = keys.first / TILE_KEYS + own;
    if (side.format == DTYPE_F32)
        dequantize<DTYPE_F32>(p, s, side, first, keys);
    else if (side.format == DTYPE_F16)
        dequantize<DTYPE_F16>(p, s, side, first, keys);
    else if (side.format == DTYPE_BF16)
        dequantize<DTYPE_BF16>(p, s, side, first, keys);
    else if (side.format == KV_E4M3)
        dequantize<KV_E4M3>(p, s, side, first, keys);
    else if (side.format == KV_Q8_0)
        dequantize<KV_Q8_0>(p, s, side, first, keys);
    else
        dequantize<KV_Q4_0>(p, s, side, first, keys);
}
