// Type and layout conversion of a column-major matrix. A CTA has
// eight rows, which are adjacent in memory: one 32-byte sector
// for 4-byte elements. With row factors it reads the rows twice,
// first for their maxima. A shared-memory tile transposes.
#include "atoms/sync.cuh"
#include "atoms/warp.cuh"
#include "mainloop/convert.cuh"

constexpr u32 ROWS = 8;
constexpr u32 WARPS = QG_THREADS / 32;
// Columns read at once, and columns of the tile.
constexpr u32 READ_COLUMNS = QG_THREADS / ROWS;
constexpr u32 TILE_COLUMNS = QG_THREADS / ROWS * GROUP;
// Element type of the tile.
template <u32 BYTES>
struct Element {
    using Type = u16;
};
template <>
struct Element<4> {
    using Type = u32;
};
using Converted = Element<D_BYTES>::Type;
// 16 bytes of padding put the rows that a
// warp stores at once into different banks.
constexpr u32 PITCH = TILE_COLUMNS + 16 / D_BYTES;

struct SharedStorage {
    alignas(16) Converted tile[ROWS * PITCH];
    u32 largest[WARPS * ROWS];
};
static_assert(sizeof(SharedStorage) == QG_SHARED_BYTES, "the host computes another size");

// Column `source` of a row; zero outside X.
QG_DEVICE float load_value(const ConvertParams& p, u32 row, u32 source) {
    if (row >= p.shape.rows || source >= p.shape.columns) return 0;
    const u64 index = row * p.at.x_row + source * p.at.x_col;
    return source_value(load_source(reinterpret_cast<const u8*>(p.at.x) + index * SOURCE_BYTES));
}

// Largest magnitude of the thread's row.
QG_DEVICE u32 largest_of_row(const ConvertParams& p, u32 row, SharedStorage& shared) {
    const u32 thread = thread_index(), lane = thread % 32;
    u32 largest = 0;
#pragma unroll 8
    for (u32 column = thread / ROWS; column < p.shape.columns; column += READ_COLUMNS)
        largest = larger_magnitude(largest, load_value(p, row, column));
#pragma unroll
    for (u32 mask = ROWS; mask < 32; mask *= 2) {
        const u32 other = shfl_xor_u32(largest, mask);
        largest = other > largest ? other : largest;
    }
    if (lane < ROWS) st_shared(&shared.largest[thread / 32 * ROWS + lane], largest);
    cta_barrier();
#pragma unroll
    for (u32 warp = 0; warp < WARPS; warp++) {
        const u32 other = ld_shared(&shared.largest[warp * ROWS + thread % ROWS]);
        largest = other > largest ? other : largest;
    }
    return largest;
}

extern "C" __global__ void __launch_bounds__(QG_THREADS)
    qg_convert_transposed(const __grid_constant__ ConvertParams p) {
    SharedStorage& shared = *reinterpret_cast<SharedStorage*>(dynamic_shared());
    const u32 thread = thread_index(), first_row = cta_index().x * ROWS;
    // Adjacent threads read adjacent rows
    // and write adjacent column groups.
    const u32 row = first_row + thread % ROWS;
    const u32 written_row = thread / READ_COLUMNS, written_column = thread % READ_COLUMNS * GROUP;

    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    float factor = 1;
    if constexpr (SCALED) {
        const RowScale scale = RowScale::of(largest_of_row(p, row, shared));
        if (thread < ROWS && row < p.shape.rows) store_factor(p, row, scale);
        factor = scale.factor;
    }
    for (u32 first = 0; first < p.shape.d_columns; first += TILE_COLUMNS) {
        float values[GROUP];
#pragma unroll
        for (u32 i = 0; i < GROUP; i++) {
            const u32 column = first + i * READ_COLUMNS + thread / ROWS;
            values[i] = column < p.shape.d_columns ? load_value(p, row, source_column(p, column)) : 0;
        }
#pragma unroll
        for (u32 i = 0; i < GROUP; i++)
            st_shared(&shared.tile[thread % ROWS * PITCH + i * READ_COLUMNS + thread / ROWS],
                      (Converted)converted(values[i] * factor));
        cta_barrier();
        if (first_row + written_row < p.shape.rows && first + written_column < p.shape.d_columns) {
            ConvertedGroup group;
#pragma unroll
            for (u32 i = 0; i < GROUP * D_BYTES / 4; i += 4) {
                const u32x4 v = ld_shared(reinterpret_cast<const u32x4*>(
                    &shared.tile[written_row * PITCH + written_column + i * 4 / D_BYTES]));
                group.word[i] = v.x, group.word[i + 1] = v.y, group.word[i + 2] = v.z, group.word[i + 3] = v.w;
            }
            ConvertedGroup::store(group, p, first_row + written_row, first + written_column);
        }
        cta_barrier();
    }
}
