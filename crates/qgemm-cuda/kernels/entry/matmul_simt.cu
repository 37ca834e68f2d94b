// Matmul on CUDA cores: D = A · B for factors of any type,
// layout and alignment.
// A and B are converted to f32 in two shared stages:
// `[k][row]` and `[k][column]`.
// The next stage loads while the current one is multiplied.
// A thread has THREAD_ROWS × 8 outputs.
// Lanes form a 4 × 8 grid to limit shared-memory reads.
#include "atoms/e4m3.cuh"
#include "atoms/launch.cuh"
#include "atoms/numeric.cuh"
#include "epilogue/matmul_store.cuh"

// Format of E4M3 factors; other values are element types.
constexpr u32 FACTOR_E4M3 = 3;

constexpr u32 THREAD_ROWS = QG_TILE_M / 16;
constexpr u32 THREADS_N = QG_TILE_N / RUN;
constexpr u32 ACCUMULATORS = THREAD_ROWS * RUN;
static_assert(16 * THREADS_N == QG_THREADS, "a thread has 8 columns of a sixteenth of the rows");
// Four words of padding against bank conflicts.
constexpr u32 A_PITCH = QG_TILE_M + 4, B_PITCH = QG_TILE_N + 4;

struct Stage {
    alignas(16) float a[QG_TILE_K * A_PITCH];
    alignas(16) float b[QG_TILE_K * B_PITCH];
};
struct SharedStorage {
    Stage stage[2];
    u32 last;
};
static_assert(sizeof(SharedStorage) == QG_SHARED_BYTES, "the host computes another size");

// A factor of one product: [rows or columns of D][K].
struct Factor {
    const u8* first;
    u64 outer_stride, k_stride;
    u32 outer_len, outer_begin, k_len;
    bool aligned;
};

QG_DEVICE float element_to_f32(u32 dtype, u32 bits) {
    if (dtype == DTYPE_F32) return bits_to_f32(bits);
    if (dtype == FACTOR_E4M3) return e4m3_to_f32_or_nan(bits);
    return half_to_f32(dtype, bits);
}

// A thread's part of a factor tile: groups of elements that
// are contiguous in memory.
template <u32 DTYPE, u32 TILE>
struct FactorCopy {
    static constexpr u32 BYTES = DTYPE == DTYPE_F32 ? 4 : DTYPE == FACTOR_E4M3 ? 1 : 2;
    // At most 16 bytes; the smallest tile has at least one
    // group per thread.
    static constexpr u32 GROUP = BYTES == 4 ? 4 : 8;
    static constexpr u32 GROUPS = TILE * QG_TILE_K / GROUP / QG_THREADS;
    static_assert(GROUPS * QG_THREADS * GROUP == TILE * QG_TILE_K, "threads copy whole groups");

    u32x4 words[GROUPS];

    // Tile coordinates of a thread's group `i`.
    QG_DEVICE void place(bool along_k, u32 i, u32 thread, u32& outer, u32& k) {
        const u32 group = thread + i * QG_THREADS;
        outer = along_k ? group / (QG_TILE_K / GROUP) : group % (TILE / GROUP) * GROUP;
        k = along_k ? group % (QG_TILE_K / GROUP) * GROUP : group / (TILE / GROUP);
    }

    QG_DEVICE void load(FactorCopy& copy, const Factor& f, u32 k_begin, u32 thread) {
        const bool along_k = f.k_stride == 1;
#pragma unroll
        for (u32 i = 0; i < GROUPS; i++) {
            u32 outer, k;
            place(along_k, i, thread, outer, k);
            outer += f.outer_begin, k += k_begin;
            copy.words[i] = u32x4{0, 0, 0, 0};
            if (outer >= f.outer_len || k >= f.k_len) continue;
            const u32 left = along_k ? f.k_len - k : f.outer_len - outer;
            const u8* from = f.first + (outer * f.outer_stride + k * f.k_stride) * BYTES;
            if (f.aligned && left >= GROUP) {
                if constexpr (BYTES == 1)
                    copy.words[i] = u32x4{ld_global_u32(from), ld_global_u32(from + 4), 0, 0};
                else
                    copy.words[i] = ld_global_v4(from);
                continue;
            }
            u32 words[4] = {};
#pragma unroll
            for (u32 e = 0; e < GROUP; e++) {
                if (e >= left) continue;
                if constexpr (BYTES == 4)
                    words[e % 4] = ld_global_u32(from + e * 4);
                else if constexpr (BYTES == 1)
                    words[e / 4] |= ld_global_cached_u8(from + e) << (8 * (e % 4));
                else
                    words[e / 2] |= ld_global_cached_u16(from + e * 2) << (16 * (e % 2));
            }
            copy.words[i] = u32x4{words[0], words[1], words[2], words[3]};
        }
    }

    // `position` maps an outer index to its column in a
    // stage row. Groups of four stay contiguous.
    template <class Position>
    QG_DEVICE void store(const FactorCopy& copy, const Factor& f, float* stage, u32 pitch, u32 thread,
                         Position position) {
        const bool along_k = f.k_stride == 1;
#pragma unroll
        for (u32 i = 0; i < GROUPS; i++) {
            u32 outer, k;
            place(along_k, i, thread, outer, k);
            const u32 words[4] = {copy.words[i].x, copy.words[i].y, copy.words[i].z, copy.words[i].w};
            float v[GROUP];
#pragma unroll
            for (u32 e = 0; e < GROUP; e++) {
                if constexpr (BYTES == 1)
                    v[e] = element_to_f32(DTYPE, words[e / 4] >> (8 * (e % 4)) & 0xffu);
                else
                    v[e] = element_to_f32(DTYPE, BYTES == 4 ? words[e % 4] : words[e / 2 % 4] >> (16 * (e % 2)) & 0xffffu);
            }
            if (along_k) {
#pragma unroll
                for (u32 e = 0; e < GROUP; e++) st_shared(&stage[(k + e) * pitch + position(outer)], v[e]);
            } else {
#pragma unroll
                for (u32 e = 0; e < GROUP; e += 4)
                    st_shared(reinterpret_cast<f32x4*>(&stage[k * pitch + position(outer + e)]),
                              f32x4{v[e], v[e + 1], v[e + 2], v[e + 3]});
            }
        }
    }
};

QG_DEVICE u32 row_position(u32 row) {
    return row;
}
// Of every eight columns the first four are in the first
// half of a stage row, the other four in the second.
// A lane has eight adjacent columns, so the lanes of a warp
// read adjacent words.
QG_DEVICE u32 column_position(u32 column) {
    return column % 8 / 4 * (QG_TILE_N / 2) + column / 8 * 4 + column % 4;
}

using CopyA = FactorCopy<QG_A_DTYPE, QG_TILE_M>;
using CopyB = FactorCopy<QG_B_DTYPE, QG_TILE_N>;

QG_DEVICE void load_four(float* to, const float* from) {
    const f32x4 v = ld_shared(reinterpret_cast<const f32x4*>(from));
    to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
}

QG_DEVICE void multiply_stage(float (&acc)[ACCUMULATORS], const Stage& stage, u32 m_lane, u32 n_lane) {
#pragma unroll
    for (u32 k = 0; k < QG_TILE_K; k++) {
        float a[THREAD_ROWS], b[RUN];
#pragma unroll
        for (u32 i = 0; i < THREAD_ROWS; i += 4) load_four(&a[i], &stage.a[k * A_PITCH + i * 16 + m_lane * 4]);
#pragma unroll
        for (u32 j = 0; j < RUN; j += 4)
            load_four(&b[j], &stage.b[k * B_PITCH + j / 4 * (QG_TILE_N / 2) + n_lane * 4]);
#pragma unroll
        for (u32 i = 0; i < THREAD_ROWS; i++)
#pragma unroll
            for (u32 j = 0; j < RUN; j++) acc[i * RUN + j] = fma_f32(a[i], b[j], acc[i * RUN + j]);
    }
}

extern "C" __global__ void __launch_bounds__(QG_THREADS, QG_CTAS_PER_SM)
    qg_matmul_simt(const __grid_constant__ MatmulParams given) {
    SharedStorage& shared = *reinterpret_cast<SharedStorage*>(dynamic_shared());
    const u32 thread = thread_index(), lane = thread % 32, warp = thread / 32;
    const u32 m_lane = warp % 4 * 4 + lane / 8, n_lane = warp / 4 * 8 + lane % 8;
    QG_TAKE_MATMUL_TILE(p, tile, given);
    const u64 a_first = tile.product * p.at.a_batch + tile.k_first * p.at.a_col;
    const u64 b_first = tile.product * p.at.b_batch + tile.k_first * p.at.b_row;
    const Factor a = {reinterpret_cast<const u8*>(p.at.a) + a_first * CopyA::BYTES,
                      p.at.a_row, p.at.a_col, p.shape.m, tile.row, tile.k_len, p.tiles.a_aligned16 != 0};
    const Factor b = {reinterpret_cast<const u8*>(p.at.b) + b_first * CopyB::BYTES,
                      p.at.b_col, p.at.b_row, p.shape.n, tile.column, tile.k_len, p.tiles.b_aligned16 != 0};

    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    float acc[ACCUMULATORS] = {};
    CopyA copy_a;
    CopyB copy_b;
    if (tile.begin < tile.end) {
        CopyA::load(copy_a, a, tile.begin * QG_TILE_K, thread);
        CopyB::load(copy_b, b, tile.begin * QG_TILE_K, thread);
        CopyA::store(copy_a, a, shared.stage[0].a, A_PITCH, thread, row_position);
        CopyB::store(copy_b, b, shared.stage[0].b, B_PITCH, thread, column_position);
    }
    cta_barrier();
    u32 stage = 0;
#pragma unroll 1
    for (u32 k_tile = tile.begin; k_tile < tile.end; k_tile++) {
        const bool more = k_tile + 1 < tile.end;
        if (more) {
            CopyA::load(copy_a, a, (k_tile + 1) * QG_TILE_K, thread);
            CopyB::load(copy_b, b, (k_tile + 1) * QG_TILE_K, thread);
        }
        multiply_stage(acc, shared.stage[stage], m_lane, n_lane);
        stage ^= 1;
        if (more) {
            CopyA::store(copy_a, a, shared.stage[stage].a, A_PITCH, thread, row_position);
            CopyB::store(copy_b, b, shared.stage[stage].b, B_PITCH, thread, column_position);
        }
        cta_barrier();
    }
    if (p.tiles.splits > 1 && !add_matmul_partials<ACCUMULATORS>(acc, p, tile, thread, &shared.last)) return;
#pragma unroll
    for (u32 i = 0; i < THREAD_ROWS; i++) {
        float v[RUN];
#pragma unroll
        for (u32 j = 0; j < RUN; j++) v[j] = acc[i * RUN + j];
        store_matmul_run(p, tile.product, tile.row + i / 4 * 64 + m_lane * 4 + i % 4, tile.column + n_lane * RUN, v);
    }
}
