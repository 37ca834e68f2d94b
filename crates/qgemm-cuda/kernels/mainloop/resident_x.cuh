// X resident in shared memory, normalized if required.
// For few tokens all of X is smaller than the rings of W.
// Columns form k-blocks of 64 in the order of `XStage`.
#pragma once
#include "mainloop/normalized_x.cuh"
#include "mainloop/x_ring.cuh"

constexpr u32 SLICE_THREADS = QG_WARPS_N * 32;

struct ResidentX {
    XStage k_block[QG_X_BLOCKS];
    RowStatistics rows;

    // Column groups that a thread reads at once.
    static constexpr u32 AT_ONCE = QG_X_ROWS == 1 ? 4 : 1, STEP = QG_THREADS * GROUP;

    QG_DEVICE u32x4* place(ResidentX& x, u32 token, u32 column) {
        return reinterpret_cast<u32x4*>(XStage::at(x.k_block[column / K_BLOCK], token, column % K_BLOCK / X_CHUNK_K));
    }

    // Loads the tokens from `first_token` on and
    // ends with a barrier.
    // Columns past K are zero.
    QG_DEVICE void fill(ResidentX& x, const GemmParams& p, u32 first_token, u32 thread) {
        const u32 tokens = p.shape.m - first_token, columns = p.shape.k_tiles * QG_K_TILE;
        const u8* rows = reinterpret_cast<const u8*>(p.at.x) + (u64)first_token * p.at.x_row * 2;
        float squares[QG_X_ROWS] = {};
        // Gamma is constant, so its load may precede the wait.
        Gamma first;
        const bool normalizes = normalizes_x(p);
        if (normalizes) Gamma::load(first, p, thread * GROUP);
        griddepcontrol_wait();
        // As in `gemm_sliced_k`, not earlier.
        griddepcontrol_launch_dependents();
#pragma unroll 1
        for (u32 column = thread * GROUP; column < columns; column += AT_ONCE * STEP) {
            u32x4 v[AT_ONCE][QG_X_ROWS];
#pragma unroll
            for (u32 i = 0; i < AT_ONCE; i++)
#pragma unroll
                for (u32 t = 0; t < QG_X_ROWS; t++) {
                    const u32 own = column + i * STEP;
                    v[i][t] = u32x4{0, 0, 0, 0};
                    if (t < tokens && own < p.shape.k) v[i][t] = ld_global_v4(rows + (t * p.at.x_row + own) * 2);
                }
#pragma unroll
            for (u32 i = 0; i < AT_ONCE; i++)
#pragma unroll
                for (u32 t = 0; t < QG_X_ROWS; t++) {
                    float value[GROUP];
                    decode(v[i][t], value);
                    if (normalizes) RowNormalizer::add(squares[t], value, 1.0f);
                    if (column + i * STEP < columns) st_shared(place(x, t, column + i * STEP), v[i][t]);
                }
        }
        if (normalizes) {
            RowNormalizer::find(x.rows, squares, p, first_token, thread);
            normalize(x, p, first, tokens, thread);
        }
        cta_barrier();
    }

    // Gamma of some column groups.
    struct Gamma {
        float value[AT_ONCE][GROUP];

        QG_DEVICE void load(Gamma& gamma, const GemmParams& p, u32 column) {
#pragma unroll
            for (u32 i = 0; i < AT_ONCE; i++) RowNormalizer::gamma_of_group(p, column + i * STEP, gamma.value[i]);
        }
    };

    // Normalizes the values that this thread has loaded.
    QG_DEVICE void normalize(ResidentX& x, const GemmParams& p, Gamma& gamma, u32 tokens, u32 thread) {
        float scale[QG_X_ROWS], inverse[QG_X_ROWS];
#pragma unroll
        for (u32 t = 0; t < QG_X_ROWS; t++) scale[t] = ld_shared(&x.rows.scale[t]), inverse[t] = ld_shared(&x.rows.inverse[t]);
#pragma unroll 1
        for (u32 column = thread * GROUP; column < p.shape.k; column += AT_ONCE * STEP) {
            if (column != thread * GROUP) Gamma::load(gamma, p, column);
#pragma unroll
            for (u32 i = 0; i < AT_ONCE; i++)
#pragma unroll
                for (u32 t = 0; t < QG_X_ROWS; t++) {
                    if (t >= tokens || column + i * STEP >= p.shape.k) continue;
                    u32x4* const at = place(x, t, column + i * STEP);
                    float value[GROUP];
                    decode(ld_shared(static_cast<const u32x4*>(at)), value);
                    u32 word[GROUP / 2];
#pragma unroll
                    for (u32 j = 0; j < GROUP / 2; j++) {
                        const float low = value[2 * j] * scale[t] * inverse[t] * gamma.value[i][2 * j];
                        const float high = value[2 * j + 1] * scale[t] * inverse[t] * gamma.value[i][2 * j + 1];
                        word[j] = f32_to_x(low) | f32_to_x(high) << 16;
                    }
                    st_shared(at, u32x4{word[0], word[1], word[2], word[3]});
                }
        }
    }

    QG_DEVICE void decode(const u32x4& v, float (&value)[GROUP]) {
        const u32 word[GROUP / 2] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (u32 i = 0; i < GROUP; i++) value[i] = x_to_f32(word[i / 2] >> (16 * (i % 2)) & 0xffffu);
    }
};
