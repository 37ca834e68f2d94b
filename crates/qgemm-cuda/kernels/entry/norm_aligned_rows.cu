// RMSNorm and LayerNorm of rows in registers: one
// compile-time type, whole groups, 16-byte alignment. X,
// residual and sum have this type, D too unless X is f32.
// Values stay in their
// stored form, which halves the registers of 16-bit types
// and doubles the bytes in flight. Partial sums use the
// same tree whether a row gets few or twice as many
// threads, so the bits do not depend on the number of rows.
#include "atoms/reciprocal_root.cuh"
#include "mainloop/norm_packed_row.cuh"

// Partial sums per thread: each stands
// for one thread of the wider layout.
constexpr u32 PARTS = QG_GROUPS > 2 ? 2 : 1;
constexpr u32 MOST_SUMS = PARTS * QG_THREADS / 32;

struct AlignedStorage {
    NormStorage norm;
    // Partial sums of the warps, for each part of a thread.
    alignas(16) u32 sums[3][MOST_SUMS];
};

// Deterministic sum over the threads
// of a row; totals go to part 0.
template <u32 COUNT>
QG_DEVICE void add_up(const PackedRow& row, float (&value)[COUNT][PARTS], AlignedStorage& storage, u32 first) {
    const u32 in_warp = QG_GROUPS == 1 ? row.threads : 32;
#pragma unroll
    for (u32 mask = 16; mask > 0; mask /= 2) {
        if (QG_GROUPS == 1 && mask >= in_warp) continue;
#pragma unroll
        for (u32 i = 0; i < COUNT; i++)
#pragma unroll
            for (u32 part = 0; part < PARTS; part++) value[i][part] += shfl_xor(value[i][part], mask);
    }
    if (QG_GROUPS == 1 || row.threads <= 32) {
#pragma unroll
        for (u32 i = 0; i < COUNT; i++)
#pragma unroll
            for (u32 part = 1; part < PARTS; part++) value[i][0] += value[i][part];
        return;
    }
    const u32 lane = thread_index() % 32, warp = thread_index() / 32;
#pragma unroll
    for (u32 i = 0; i < COUNT; i++)
#pragma unroll
        for (u32 part = 0; part < PARTS; part++)
            if (lane == 0) st_shared(&storage.sums[first + i][part * (row.threads / 32) + warp], f32_to_bits(value[i][part]));
    cta_barrier();
    // A broadcast read by all threads is faster than
    // shuffles. Words beyond the row's warps are zero.
#pragma unroll
    for (u32 i = 0; i < COUNT; i++) {
        value[i][0] = 0.0f;
#pragma unroll
        for (u32 w = 0; w < MOST_SUMS; w += 4) {
            const u32x4 four = ld_shared(reinterpret_cast<const u32x4*>(&storage.sums[first + i][w]));
            value[i][0] += (bits_to_f32(four.x) + bits_to_f32(four.y)) + (bits_to_f32(four.z) + bits_to_f32(four.w));
        }
    }
}

// Row statistics without rescaling, as in
// `Statistics`, and whether rescaling is needed. FMAs
// are explicit, so that all instances round alike.
struct PackedStatistics {
    float mean, correction, inverse;
    bool needs_scale;

    QG_DEVICE PackedStatistics of(const NormParams& p, const PackedRow& row, float share, AlignedStorage& storage) {
        PackedStatistics s = {0.0f, 0.0f, 0.0f, false};
        float squares, variance;
        if (p.shape.flags & QG_FLAG_CENTERED) {
            float sum[1][PARTS] = {}, beside[2][PARTS] = {};
            each(row, [&](u32 part, float value) { sum[0][part] += value; });
            add_up<1>(row, sum, storage, 0);
            s.mean = mul_rn_f32(sum[0][0], share);
            each(row, [&](u32 part, float value) {
                const float difference = value - s.mean;
                beside[0][part] += difference;
                beside[1][part] = fma_f32(difference, difference, beside[1][part]);
            });
            add_up<2>(row, beside, storage, 1);
            s.correction = mul_rn_f32(beside[0][0], share);
            squares = beside[1][0];
            variance = fma_f32(squares, share, -mul_rn_f32(s.correction, s.correction));
            variance = (variance < 0.0f ? 0.0f : variance) + p.shape.eps;
        } else {
            float sum[1][PARTS] = {};
            each(row, [&](u32 part, float value) { sum[0][part] = fma_f32(value, value, sum[0][part]); });
            add_up<1>(row, sum, storage, 0);
            squares = sum[0][0];
            variance = fma_f32(squares, share, p.shape.eps);
        }
        // One Newton step. Values near the ends
        // of f32's range take the rescaled path.
        const float near = rsqrt_approx(variance), half = mul_rn_f32(0.5f * variance, near);
        s.inverse = fma_f32(near, fma_f32(-half, near, 0.5f), near);
        s.needs_scale = !(squares <= MOST_SQUARES) || (squares < LEAST_SQUARES && p.shape.eps < LEAST_SQUARES);
        return s;
    }

    template <class Visit>
    QG_DEVICE void each(const PackedRow& row, Visit visit) {
#pragma unroll
        for (u32 i = 0; i < QG_GROUPS; i++) {
            if (!PackedRow::has(row, i)) continue;
            float value[GROUP];
            PackedGroup::decode(row.group[i], value);
#pragma unroll
            for (u32 j = 0; j < GROUP; j++) visit(i % PARTS, value[j]);
        }
    }
};

extern "C" __global__ void __launch_bounds__(QG_THREADS, QG_LEAST_CTAS)
    qg_norm_aligned_rows(const __grid_constant__ NormParams p) {
    AlignedStorage& storage = *reinterpret_cast<AlignedStorage*>(dynamic_shared());
    PackedRow own;
    own.threads = p.shape.row_threads;
    own.lane = thread_index();
    u32 row = cta_index().x;
    if (own.threads <= 32) {
        // log2 of the threads, a power of two.
        const u32 bits = (own.threads > 1) + (own.threads > 2) + (own.threads > 4) + (own.threads > 8) + (own.threads > 16);
        row = row * (cta_threads() >> bits) + (own.lane >> bits);
        own.lane &= own.threads - 1;
    }
    // Threads without a row still take part in shuffles.
    own.columns = row < p.shape.rows ? p.shape.columns : 0;

    griddepcontrol_launch_dependents();
    u8* copies = dynamic_shared() + sizeof(AlignedStorage) + thread_index() * 16;
    const ColumnOperand gamma = ColumnOperand::of(OperandRow::gamma(p), p.shape.flags & QG_FLAG_GAMMA, own, copies);
    if (gamma.is_copied) copies += PIECES * cta_threads() * 16;
    const ColumnOperand beta = ColumnOperand::of(OperandRow::beta(p), p.shape.flags & QG_FLAG_BETA, own, copies);
    const float share = 1.0f / (float)p.shape.columns;
    if (QG_GROUPS > 1 && own.threads > 32) {
        if (thread_index() < MOST_SUMS)
#pragma unroll
            for (u32 i = 0; i < 3; i++) st_shared(&storage.sums[i][thread_index()], 0u);
        cta_barrier();
    }
    griddepcontrol_wait();

    const u8* x = OperandRow::x(p, row).start;
#pragma unroll
    for (u32 i = 0; i < QG_GROUPS; i++)
        if (PackedRow::has(own, i)) own.group[i] = PackedGroup::load_once(x, PackedRow::column(own, i));
    if (p.shape.flags & QG_FLAG_RESIDUAL) {
        const u8* residual = OperandRow::residual(p, row).start;
        u8* sum = OperandRow::sum(p, row).start;
        PackedGroup added[QG_GROUPS];
#pragma unroll
        for (u32 i = 0; i < QG_GROUPS; i++)
            if (PackedRow::has(own, i)) added[i] = PackedGroup::load_once(residual, PackedRow::column(own, i));
#pragma unroll
        for (u32 i = 0; i < QG_GROUPS; i++) {
            if (!PackedRow::has(own, i)) continue;
            float value[GROUP], other[GROUP];
            PackedGroup::decode(own.group[i], value);
            PackedGroup::decode(added[i], other);
#pragma unroll
            for (u32 j = 0; j < GROUP; j++) value[j] += other[j];
            own.group[i] = PackedGroup::encode(value);
            PackedGroup::store(own.group[i], sum, PackedRow::column(own, i));
        }
    }

    const PackedStatistics s = PackedStatistics::of(p, own, share, storage);
    // No copy may be in flight when a CTA exits.
    ColumnOperand::wait();
    bool needs_scale = s.needs_scale;
    if (own.threads < 32) needs_scale = ballot(needs_scale) != 0;
    if (needs_scale || !gamma.in_groups || !beta.in_groups) {
        normalize_elements(p, storage.norm, own, row, Statistics{1.0f, s.mean, s.correction, s.inverse}, needs_scale);
        return;
    }
    const OperandRow d = OperandRow::d(p, row);
#pragma unroll
    for (u32 i = 0; i < QG_GROUPS; i++) {
        if (!PackedRow::has(own, i)) continue;
        float value[GROUP], factor[GROUP], addend[GROUP];
        PackedGroup::decode(own.group[i], value);
        if (p.shape.flags & QG_FLAG_CENTERED) {
#pragma unroll
            for (u32 j = 0; j < GROUP; j++) value[j] = value[j] - s.mean - s.correction;
        }
#pragma unroll
        for (u32 j = 0; j < GROUP; j++) value[j] = mul_rn_f32(value[j], s.inverse);
        if (p.shape.flags & QG_FLAG_GAMMA) {
            ColumnOperand::values(gamma, own, i, factor);
#pragma unroll
            for (u32 j = 0; j < GROUP; j++) value[j] = mul_rn_f32(value[j], factor[j]);
        }
        if (p.shape.flags & QG_FLAG_BETA) {
            ColumnOperand::values(beta, own, i, addend);
#pragma unroll
            for (u32 j = 0; j < GROUP; j++) value[j] += addend[j];
        }
        PackedGroup::store_as(d, value, PackedRow::column(own, i));
    }
}
