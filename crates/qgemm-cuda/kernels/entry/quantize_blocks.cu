// Block quantization of X: several CTAs per
// row. A thread loads eight adjacent columns
// for each of its turns, all in flight at once.
// Lanes that share a scale compare by shuffles.
#include "mainloop/quantize.cuh"

// Groups that a thread loads before it quantizes.
constexpr u32 TURNS = 2;

extern "C" __global__ void __launch_bounds__(QG_THREADS)
    qg_quantize_blocks(const __grid_constant__ QuantizeParams p) {
    const u32 row = cta_index().x / p.shape.chunks, chunk = cta_index().x % p.shape.chunks;
    // The grid may exceed the rows.
    if (row >= p.shape.rows) return;
    const u32 step = cta_threads() * GROUP;
    const u32 first = chunk * TURNS * step + thread_index() * GROUP;
    const u8* source = reinterpret_cast<const u8*>(p.at.x) + row * p.at.x_row * SOURCE_BYTES;

    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    SourceGroup groups[TURNS];
#pragma unroll
    for (u32 turn = 0; turn < TURNS; turn++) groups[turn] = SourceGroup::load(p, source, first + turn * step);
    const float inverse_factor = given_inverse(p.at);
#pragma unroll
    for (u32 turn = 0; turn < TURNS; turn++) {
        const u32 column = first + turn * step;
        const bool stores = column < p.shape.stored_columns;
        if constexpr (QG_SCALE == SCALE_NONE) {
            const BlockScale scale = {inverse_factor, 0.0f, 0, true};
            if (stores)
                store_codes(reinterpret_cast<u8*>(p.at.codes) + row * p.at.codes_row, column,
                            codes_of(groups[turn], scale));
        } else {
            quantize_in_warp(p.at, groups[turn], row, column, stores, inverse_factor);
        }
    }
}
