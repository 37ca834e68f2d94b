// Normalizes rows that fit in registers, of one type that is known, in whole groups at multiples of 16 bytes. X, the residual,
// the sum and D have that type, and a thread keeps what it normalizes as it is stored: half the registers of f32 for 16 bits, so
// that twice as many bytes are in flight.
#include "mainloop/norm.cuh"

constexpr u32 VALUE_BYTES = QG_X_DTYPE == DTYPE_F32 ? 4 : 2;
constexpr u32 WORDS = GROUP * VALUE_BYTES / 4;

// A group as it is stored.
struct PackedGroup {
    u32 word[WORDS];

    QG_DEVICE PackedGroup load(const u8* row, u32 column) {
        PackedGroup group;
#pragma unroll
        for (u32 i = 0; i < WORDS; i += 4) {
            const u32x4 v = ld_global_once_v4(row + (u64)column * VALUE_BYTES + i * 4);
            group.word[i] = v.x, group.word[i + 1] = v.y, group.word[i + 2] = v.z, group.word[i + 3] = v.w;
        }
        return group;
    }

    QG_DEVICE void store(const PackedGroup& group, u8* row, u32 column) {
#pragma unroll
        for (u32 i = 0; i < WORDS; i += 4)
            st_global_v4(row + (u64)column * VALUE_BYTES + i * 4,
                         u32x4{group.word[i], group.word[i + 1], group.word[i + 2], group.word[i + 3]});
    }

    QG_DEVICE void decode(const PackedGroup& group, float (&value)[GROUP]) {
#pragma unroll
        for (u32 i = 0; i < GROUP; i++) {
            if constexpr (QG_X_DTYPE == DTYPE_F32) {
                value[i] = bits_to_f32(group.word[i % WORDS]);
            } else {
                const u32 bits = group.word[i / 2] >> (16 * (i % 2)) & 0xffffu;
                value[i] = QG_X_DTYPE == DTYPE_F16 ? f16_to_f32(bits) : bf16_to_f32(bits);
            }
        }
    }

    // Rounds to nearest even.
    QG_DEVICE PackedGroup encode(const float (&value)[GROUP]) {
        PackedGroup group;
#pragma unroll
        for (u32 i = 0; i < WORDS; i++) {
            if constexpr (QG_X_DTYPE == DTYPE_F32)
                group.word[i] = f32_to_bits(value[i]);
            else
                group.word[i] = pair(value[2 * i % GROUP], value[(2 * i + 1) % GROUP]);
        }
        return group;
    }

    QG_DEVICE u32 pair(float low, float high) {
#if QG_VARIANT >= 80
        return QG_X_DTYPE == DTYPE_F16 ? f32_to_f16x2(low, high) : f32_to_bf16x2(low, high);
#else
        return QG_X_DTYPE == DTYPE_F16 ? f32_to_f16(low) | f32_to_f16(high) << 16
                                       : f32_to_bf16(low) | f32_to_bf16(high) << 16;
#endif
    }
};

// Groups of a thread: `lane`, `lane + threads`, ….
struct PackedRow {
    PackedGroup group[QG_GROUPS];
    u32 lane, threads, columns;

    QG_DEVICE u32 column(const PackedRow& row, u32 i) {
        return (i * row.threads + row.lane) * GROUP;
    }

    template <class Visit>
    QG_DEVICE void each(const PackedRow& row, Visit visit) {
#pragma unroll
        for (u32 i = 0; i < QG_GROUPS; i++) {
            if (column(row, i) >= row.columns) continue;
            float value[GROUP];
            PackedGroup::decode(row.group[i], value);
            visit(value, GROUP);
        }
    }
};

extern "C" __global__ void __launch_bounds__(QG_THREADS, QG_LEAST_CTAS)
    qg_norm_aligned_rows(const __grid_constant__ NormParams p) {
    NormStorage& storage = *reinterpret_cast<NormStorage*>(dynamic_shared());
    PackedRow own;
    own.threads = p.shape.row_threads;
    const bool is_alone = own.threads == cta_threads();
    own.lane = is_alone ? thread_index() : thread_index() % own.threads;
    const u32 row = is_alone ? cta_index().x
                             : cta_index().x * (cta_threads() / own.threads) + thread_index() / own.threads;
    // Threads without a row take part in what their warp does.
    own.columns = row < p.shape.rows ? p.shape.columns : 0;

    griddepcontrol_launch_dependents();
    // Gamma and beta are constant operands, which come nearer before the kernel before ours is done.
#pragma unroll
    for (u32 i = 0; i < QG_GROUPS; i++) ColumnGroup::prefetch(p, PackedRow::column(own, i));
    griddepcontrol_wait();

    const u8* x = OperandRow::x(p, row).start;
#pragma unroll
    for (u32 i = 0; i < QG_GROUPS; i++)
        if (PackedRow::column(own, i) < own.columns) own.group[i] = PackedGroup::load(x, PackedRow::column(own, i));
    if (p.shape.flags & QG_FLAG_RESIDUAL) {
        const u8* residual = OperandRow::residual(p, row).start;
        u8* sum = OperandRow::sum(p, row).start;
        PackedGroup added[QG_GROUPS];
#pragma unroll
        for (u32 i = 0; i < QG_GROUPS; i++)
            if (PackedRow::column(own, i) < own.columns)
                added[i] = PackedGroup::load(residual, PackedRow::column(own, i));
#pragma unroll
        for (u32 i = 0; i < QG_GROUPS; i++) {
            if (PackedRow::column(own, i) >= own.columns) continue;
            float value[GROUP], other[GROUP];
            PackedGroup::decode(own.group[i], value);
            PackedGroup::decode(added[i], other);
#pragma unroll
            for (u32 j = 0; j < GROUP; j++) value[j] += other[j];
            own.group[i] = PackedGroup::encode(value);
            PackedGroup::store(own.group[i], sum, PackedRow::column(own, i));
        }
    }

    const Statistics statistics = Statistics::of(p, own, storage);
    const bool is_centered = p.shape.flags & QG_FLAG_CENTERED;
    u8* d = OperandRow::d(p, row).start;
#pragma unroll
    for (u32 i = 0; i < QG_GROUPS; i++) {
        const u32 column = PackedRow::column(own, i);
        if (column >= own.columns) continue;
        const ColumnGroup of_columns = ColumnGroup::load(p, column);
        float value[GROUP];
        PackedGroup::decode(own.group[i], value);
#pragma unroll
        for (u32 j = 0; j < GROUP; j++)
            value[j] = is_centered ? Statistics::normalized(statistics, value[j])
                                   : value[j] * statistics.scale * statistics.inverse;
        apply_columns(p, of_columns, value);
        PackedGroup::store(PackedGroup::encode(value), d, column);
    }
}
