// Row in registers in its stored form: one
// compile-time type, whole groups, 16-byte alignment.
#pragma once
#include "dequant/halves.cuh"
#include "mainloop/norm.cuh"
#if QG_VARIANT >= 80
#include "atoms/cp_async.cuh"
#endif

constexpr u32 VALUE_BYTES = QG_X_DTYPE == DTYPE_F32 ? 4 : 2;
constexpr u32 WORDS = GROUP * VALUE_BYTES / 4;

// A group in its stored form.
struct PackedGroup {
    u32 word[WORDS];

    QG_DEVICE void set(PackedGroup& group, u32 first, u32x4 v) {
        group.word[first] = v.x, group.word[first + 1] = v.y, group.word[first + 2] = v.z, group.word[first + 3] = v.w;
    }
    QG_DEVICE u32x4 four(const PackedGroup& group, u32 first) {
        return {group.word[first], group.word[first + 1], group.word[first + 2], group.word[first + 3]};
    }

    // For rows that are read once (streaming load).
    QG_DEVICE PackedGroup load_once(const u8* row, u32 column) {
        PackedGroup group;
#pragma unroll
        for (u32 i = 0; i < WORDS; i += 4) set(group, i, ld_global_once_v4(row + (u64)column * VALUE_BYTES + i * 4));
        return group;
    }

    QG_DEVICE PackedGroup load(const u8* row, u32 column) {
        PackedGroup group;
#pragma unroll
        for (u32 i = 0; i < WORDS; i += 4) set(group, i, ld_global_v4(row + (u64)column * VALUE_BYTES + i * 4));
        return group;
    }

    QG_DEVICE void store(const PackedGroup& group, u8* row, u32 column) {
#pragma unroll
        for (u32 i = 0; i < WORDS; i += 4) st_global_v4(row + (u64)column * VALUE_BYTES + i * 4, four(group, i));
    }

    // Stores values in the type of D.
    // Rows of f32 may have a D of 16 bits.
    QG_DEVICE void store_as(const OperandRow& d, const float (&value)[GROUP], u32 column) {
        if (QG_X_DTYPE != DTYPE_F32 || d.dtype == DTYPE_F32) {
            store(encode(value), d.start, column);
            return;
        }
        u32 word[GROUP / 2];
#pragma unroll
        for (u32 i = 0; i < GROUP / 2; i++) word[i] = half_of(d.dtype, value[2 * i]) | half_of(d.dtype, value[2 * i + 1]) << 16;
        st_global_v4(d.start + (u64)column * 2, u32x4{word[0], word[1], word[2], word[3]});
    }
    QG_DEVICE u32 half_of(u32 dtype, float value) {
        return dtype == DTYPE_F16 ? f32_to_f16(value) : f32_to_bf16(value);
    }

    // `dtype` is as wide as the type of X.
    QG_DEVICE void decode(const PackedGroup& group, u32 dtype, float (&value)[GROUP]) {
#pragma unroll
        for (u32 i = 0; i < GROUP; i++) {
            if constexpr (QG_X_DTYPE == DTYPE_F32)
                value[i] = bits_to_f32(group.word[i % WORDS]);
            else if (dtype == DTYPE_F16)
                value[i] = f16_to_f32(group.word[i / 2] >> (16 * (i % 2)) & 0xffffu);
            else
                value[i] = bits_to_f32(i % 2 == 0 ? group.word[i / 2] << 16 : group.word[i / 2] & 0xffff0000u);
        }
    }
    QG_DEVICE void decode(const PackedGroup& group, float (&value)[GROUP]) {
        decode(group, QG_X_DTYPE, value);
    }

    // Rounds to nearest even.
    QG_DEVICE PackedGroup encode(const float (&value)[GROUP]) {
        PackedGroup group;
#pragma unroll
        for (u32 i = 0; i < WORDS; i++) {
            if constexpr (QG_X_DTYPE == DTYPE_F32)
                group.word[i] = f32_to_bits(value[i]);
            else
                group.word[i] = f32_to_halves<QG_X_DTYPE>(value[2 * i % GROUP], value[(2 * i + 1) % GROUP]);
        }
        return group;
    }
};

// A thread has groups `lane`, `lane + threads`, ….
struct PackedRow {
    PackedGroup group[QG_GROUPS];
    u32 lane, threads, columns;

    QG_DEVICE u32 column(const PackedRow& row, u32 i) {
        return (i * row.threads + row.lane) * GROUP;
    }
    QG_DEVICE bool has(const PackedRow& row, u32 i) {
        return column(row, i) < row.columns;
    }
};

// Whether cp.async brings gamma and beta to
// shared memory before the previous launch ends.
constexpr bool COPIES_COLUMNS = QG_VARIANT >= 80 && QG_X_DTYPE != DTYPE_F32;
// 16-byte copies per thread and operand.
constexpr u32 PIECES = QG_GROUPS * WORDS / 4;

// Gamma or beta (constant operands). Types as wide as X
// are copied to shared memory, by the thread that reads
// them later. The copies go through L1, which the CTAs
// of an SM share. Other types are only prefetched.
struct ColumnOperand {
    OperandRow from;
    u8* copies;
    // Whether it is copied; whether whole
    // groups can be loaded with one conversion.
    bool is_copied, in_groups;

    QG_DEVICE ColumnOperand of(const OperandRow& from, bool is_given, const PackedRow& row, u8* copies) {
        ColumnOperand operand = {from, copies, COPIES_COLUMNS && is_given && bytes_of(from.dtype) == VALUE_BYTES};
        operand.in_groups = !is_given || (from.aligned && (VALUE_BYTES == 2 || from.dtype == DTYPE_F32));
        if (!is_given || !from.aligned) return operand;
#pragma unroll
        for (u32 i = 0; i < QG_GROUPS; i++) {
            if (!PackedRow::has(row, i)) continue;
            const u8* at = from.start + (u64)PackedRow::column(row, i) * bytes_of(from.dtype);
#if QG_VARIANT >= 80
            if (operand.is_copied) {
                cp_async_16_or_zeros_l1(true, shared_address(copies + i * cta_threads() * 16), at);
                continue;
            }
#endif
            ld_global_u32(at);
        }
        return operand;
    }

    // Waits for the copies of this thread.
    QG_DEVICE void wait() {
#if QG_VARIANT >= 80
        cp_async_commit_group();
        cp_async_wait_group<0>();
#endif
    }

    QG_DEVICE void values(const ColumnOperand& operand, const PackedRow& row, u32 i, float (&value)[GROUP]) {
        const u8* at = operand.from.start + (u64)PackedRow::column(row, i) * bytes_of(operand.from.dtype);
        if (VALUE_BYTES == 2 && operand.from.dtype == DTYPE_F32) {
            const u32x4 low = ld_global_v4(at), high = ld_global_v4(at + 16);
            const u32 word[GROUP] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
            for (u32 j = 0; j < GROUP; j++) value[j] = bits_to_f32(word[j]);
            return;
        }
        PackedGroup group;
        if constexpr (COPIES_COLUMNS)
            PackedGroup::set(group, 0, ld_shared(reinterpret_cast<const u32x4*>(operand.copies + i * cta_threads() * 16)));
        else
            group = PackedGroup::load(at, 0);
        PackedGroup::decode(group, operand.from.dtype, value);
    }
};

// A row in memory, iterated by a subset of threads.
struct MemoryRow {
    const u8* start;
    u32 lane, threads, columns;

    template <class Visit>
    QG_DEVICE void each(const MemoryRow& row, Visit visit) {
#pragma unroll 1
        for (u32 column = row.lane * GROUP; column < row.columns; column += row.threads * GROUP) {
            float value[GROUP];
            PackedGroup::decode(PackedGroup::load_once(row.start, column), value);
            visit(value, GROUP);
        }
    }
};

// Slow path, element by element: the row needs rescaling, or gamma
// or beta cannot be loaded in groups. Each warp recomputes the
// statistics of the whole row, so the order of additions is fixed.
// Call with all threads of the row and of the warps that it shares.
QG_DEVICE void normalize_elements(const NormParams& p, NormStorage& storage, const PackedRow& own, u32 row, Statistics s, bool needs_scale) {
    OperandRow x = OperandRow::x(p, row);
    const OperandRow d = OperandRow::d(p, row), gamma = OperandRow::gamma(p), beta = OperandRow::beta(p);
    if (p.shape.flags & QG_FLAG_RESIDUAL) x.start = OperandRow::sum(p, row).start;
    if (needs_scale) {
        NormParams of_warp = p;
        if (own.threads > 32) of_warp.shape.row_threads = 32;
        const u32 threads = of_warp.shape.row_threads;
        // Wait until other threads have stored the sum. After
        // the statistics, wait again: D may overwrite X.
        if (own.threads > 32) cta_barrier();
        s = Statistics::rescaled(of_warp, MemoryRow{x.start, own.lane & (threads - 1), threads, own.columns}, storage);
        if (own.threads > 32) cta_barrier();
    }
#pragma unroll 1
    for (u32 column = own.lane * GROUP; column < own.columns; column += own.threads * GROUP) {
#pragma unroll 1
        for (u32 i = 0; i < GROUP; i++) {
            float value = Statistics::normalized(s, OperandRow::element(x, column + i));
            if (p.shape.flags & QG_FLAG_GAMMA) value *= OperandRow::element(gamma, column + i);
            if (p.shape.flags & QG_FLAG_BETA) value += OperandRow::element(beta, column + i);
            u8* to = d.start + (u64)(column + i) * bytes_of(d.dtype);
            if (QG_X_DTYPE == DTYPE_F32 && d.dtype == DTYPE_F32)
                st_global_u32(to, f32_to_bits(value));
            else
                st_global_u16(to, PackedGroup::half_of(d.dtype, value));
        }
    }
}
