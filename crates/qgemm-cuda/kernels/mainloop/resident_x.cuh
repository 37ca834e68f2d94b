// One row of X resident in shared memory, normalized if required.
// It is smaller than the rings of W.
// Columns form k-blocks of 64 in the order of `XStage`.
#pragma once
#include "mainloop/normalized_x.cuh"
#include "mainloop/x_ring.cuh"

constexpr u32 SLICE_THREADS = QG_WARPS_N * 32;

struct ResidentX {
    XStage k_block[QG_X_BLOCKS];
    RowStatistics rows;

    // Column groups that a thread reads at once.
    static constexpr u32 AT_ONCE = 4, STEP = QG_THREADS * GROUP;
    static_assert(QG_X_ROWS == 1, "one row");

    QG_DEVICE u32x4* place(ResidentX& x, u32 column) {
        return reinterpret_cast<u32x4*>(XStage::at(x.k_block[column / K_BLOCK], 0, column % K_BLOCK / X_CHUNK_K));
    }

    // Loads row `token` and ends with a barrier.
    // Columns past K are zero.
    QG_DEVICE void fill(ResidentX& x, const GemmParams& p, u32 token, u32 thread) {
        // Gamma is constant, so its load may precede the wait.
        Gamma gamma;
        const bool normalizes = normalizes_x(p);
        if (normalizes) Gamma::load(gamma, p, thread * GROUP);
        griddepcontrol_wait();
        // As in `gemm_sliced_k`, not earlier.
        griddepcontrol_launch_dependents();
        if (normalizes)
            normalize(x, p, gamma, token, thread);
        else
            copy(x, p, token, thread);
        cta_barrier();
    }

    QG_DEVICE void copy(ResidentX& x, const GemmParams& p, u32 token, u32 thread) {
        const u8* row = reinterpret_cast<const u8*>(p.at.x) + (u64)token * p.at.x_row * 2;
        const u32 columns = p.shape.k_tiles * QG_K_TILE;
#pragma unroll 1
        for (u32 column = thread * GROUP; column < columns; column += AT_ONCE * STEP) {
            u32x4 v[AT_ONCE];
#pragma unroll
            for (u32 i = 0; i < AT_ONCE; i++) {
                const u32 own = column + i * STEP;
                v[i] = own < p.shape.k ? ld_global_v4(row + own * 2) : u32x4{0, 0, 0, 0};
            }
#pragma unroll
            for (u32 i = 0; i < AT_ONCE; i++)
                if (column + i * STEP < columns) st_shared(place(x, column + i * STEP), v[i]);
        }
    }

    // Gamma of some column groups.
    struct Gamma {
        float value[AT_ONCE][GROUP];

        QG_DEVICE void load(Gamma& gamma, const GemmParams& p, u32 column) {
#pragma unroll
            for (u32 i = 0; i < AT_ONCE; i++) RowNormalizer::gamma_of_group(p, column + i * STEP, gamma.value[i]);
        }
    };

    // Columns of a group as f32; zero past K.
    QG_DEVICE void load_group(const GemmParams& p, u32 token, u32 column, float (&value)[GROUP]) {
        const bool wide = normalizes_f32(p);
        const u8* at = reinterpret_cast<const u8*>(p.at.x) + ((u64)token * p.at.x_row + column) * (wide ? 4 : 2);
        u32x4 low = {0, 0, 0, 0}, high = {0, 0, 0, 0};
        if (column < p.shape.k) {
            low = ld_global_v4(at);
            if (wide) high = ld_global_v4(at + 16);
        }
        const u32 word[GROUP] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
        for (u32 i = 0; i < GROUP; i++)
            value[i] = wide ? bits_to_f32(word[i]) : x_to_f32(word[i / 2] >> (16 * (i % 2)) & 0xffffu);
    }

    // Loads and normalizes the row. It is read twice, from L1 the
    // second time.
    QG_DEVICE void normalize(ResidentX& x, const GemmParams& p, Gamma& gamma, u32 token, u32 thread) {
        const u32 first = thread * GROUP, columns = p.shape.k_tiles * QG_K_TILE;
        float squares[QG_X_ROWS] = {};
#pragma unroll 1
        for (u32 column = first; column < p.shape.k; column += AT_ONCE * STEP) {
            float value[AT_ONCE][GROUP];
#pragma unroll
            for (u32 i = 0; i < AT_ONCE; i++) load_group(p, token, column + i * STEP, value[i]);
#pragma unroll
            for (u32 i = 0; i < AT_ONCE; i++) RowNormalizer::add(squares[0], value[i], 1.0f);
        }
        RowNormalizer::find(x.rows, squares, p, token, thread);
        const float scale = ld_shared(&x.rows.scale[0]), inverse = ld_shared(&x.rows.inverse[0]);
#pragma unroll 1
        for (u32 column = first; column < columns; column += AT_ONCE * STEP) {
            if (column != first) Gamma::load(gamma, p, column);
#pragma unroll
            for (u32 i = 0; i < AT_ONCE; i++) {
                const u32 at = column + i * STEP;
                float value[GROUP];
                load_group(p, token, at, value);
                u32 word[GROUP / 2];
#pragma unroll
                for (u32 j = 0; j < GROUP / 2; j++) {
                    const float low = value[2 * j] * scale * inverse * gamma.value[i][2 * j];
                    const float high = value[2 * j + 1] * scale * inverse * gamma.value[i][2 * j + 1];
                    word[j] = at < p.shape.k ? f32_to_x(low) | f32_to_x(high) << 16 : 0;
                }
                if (at < columns) st_shared(place(x, at), u32x4{word[0], word[1], word[2], word[3]});
            }
        }
    }
};
