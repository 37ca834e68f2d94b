// Dequantizes the keys and values of a step to plain
// rows, for attention by matrix instructions. A CTA takes
// every `sequence_ctas`-th tile of keys of a sequence; a
// thread takes eight features of a head. Plain keys or values
// beside quantized ones are converted alike. With pages, the
// plain rows have a block table, too: page numbers
// of absent pages stay invalid.
#include "attention/numbers.cuh"
#include "attention/problem.cuh"

struct DequantizeParams {
    AttentionParams attention;
    AttentionPlainKv plain;
};

// Keys of a tile: a few rounds of the CTA.
constexpr u32 TILE_KEYS = 8;
constexpr u32 INVALID_PAGE = ~0u;

// Keys or values of all heads: where they are stored, and
// where their plain rows go.
struct Side {
    u64 codes, scales, factors;
    u64 page, token, head;
    u64 plain;
    u32 format, features;
};

// Eight features of a head, times their scale or factor,
// rounded to the type of Q.
template <u32 FORMAT>
QG_DEVICE void dequantize(const Side& side, u64 element, float factor, bool aligned, u32 dtype, u8* to) {
    using Stored = Eight<FORMAT>;
    const u8* codes = reinterpret_cast<const u8*>(side.codes);
    const Stored eight = Stored::load(codes + Stored::offset_of(element), aligned);
    if constexpr (has_scales(FORMAT))
        factor = f16_to_f32(ld_global_u16(reinterpret_cast<const u8*>(side.scales) + element / KV_BLOCK * 2));
    u32 words[8];
#pragma unroll
    for (u32 i = 0; i < 8; i++) {
        const float number = Stored::number(eight, i) * factor;
        words[i] = dtype == DTYPE_F16 ? f32_to_f16(number) : f32_to_bf16(number);
    }
    st_global_v4(to, {words[0] | words[1] << 16, words[2] | words[3] << 16, words[4] | words[5] << 16,
                      words[6] | words[7] << 16});
}

// The keys of one tile within `keys`, for one side.
QG_DEVICE void dequantize_tile(const DequantizeParams& p, const Sequence& s, const Side& side, u32 tile,
                               const KeyRange& keys) {
    const AttentionParams& of = p.attention;
    const bool aligned = of.shape.flags & QG_FLAG_KV_ALIGNED;
    const u32 eights = side.features / 8, row = eights * of.shape.kv_heads;
    for (u32 i = thread_index(); i < TILE_KEYS * row; i += QG_THREADS) {
        const u32 key = tile + i / row, head = i % row / eights, column = i % eights * 8;
        if (key < keys.first || key >= keys.end) continue;
        const KeyAddress at = address_of_key(of, s, key);
        if (!at.is_present) continue;
        const u64 element = at.page * side.page + at.row * side.token + head * side.head + column;
        const float factor = side.factors ? bits_to_f32(index_at(side.factors, head)) : 1.0f;
        const u64 plain_row = s.index * p.plain.sequence_rows + s.row + key;
        u8* to = reinterpret_cast<u8*>(side.plain) + ((plain_row * of.shape.kv_heads + head) * side.features + column) * 2;
        if (side.format == DTYPE_F32)
            dequantize<DTYPE_F32>(side, element, factor, aligned, of.shape.dtype, to);
        else if (side.format == DTYPE_F16)
            dequantize<DTYPE_F16>(side, element, factor, aligned, of.shape.dtype, to);
        else if (side.format == DTYPE_BF16)
            dequantize<DTYPE_BF16>(side, element, factor, aligned, of.shape.dtype, to);
        else if (side.format == KV_E4M3)
            dequantize<KV_E4M3>(side, element, factor, aligned, of.shape.dtype, to);
        else if (side.format == KV_Q8_0)
            dequantize<KV_Q8_0>(side, element, factor, aligned, of.shape.dtype, to);
        else
            dequantize<KV_Q4_0>(side, element, factor, aligned, of.shape.dtype, to);
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
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    const Sequence s = sequence_of(of, cta_index().x / p.plain.sequence_ctas);
    if (own == 0) number_pages(p, s);
    if (s.queries == 0) return;
    const KeyRange keys = visible_keys_of(of, s, 0, s.queries - 1);
    const Side k = {of.at.k, of.at.k_scales, of.at.k_factors, of.at.k_page, of.at.k_token, of.at.k_head,
                    of.at.workspace + p.plain.keys, p.plain.key_format, of.shape.qk_dim};
    const Side v = {of.at.v, of.at.v_scales, of.at.v_factors, of.at.v_page, of.at.v_token, of.at.v_head,
                    of.at.workspace + p.plain.values, p.plain.value_format, of.shape.v_dim};
    const u32 first = keys.first / TILE_KEYS + own, end = (keys.end + TILE_KEYS - 1) / TILE_KEYS;
    for (u32 tile = first; tile < end; tile += p.plain.sequence_ctas) {
        dequantize_tile(p, s, k, tile * TILE_KEYS, keys);
        dequantize_tile(p, s, v, tile * TILE_KEYS, keys);
    }
}
