// Norms with a gate or groups of features: a group's
// operands, and the gate.
#pragma once
#include "epilogue/activation.cuh"
#include "mainloop/norm.cuh"

// Kernel parameter. A row of `norm` is a group of a row.
struct NormGatedParams {
    NormParams norm;
    NormGatePointers gate;
};

// The parameters of a group's operands, as row 0.
QG_DEVICE NormParams params_of_group(const NormGatedParams& p, u32 index) {
    NormParams q = p.norm;
    const u32 groups = (u32)p.gate.groups, row = index / groups;
    const u64 first = (u64)(index - row * groups) * q.shape.columns;
    q.at.x += (row * q.at.x_row + first) * bytes_of(type_of(q, TYPE_X));
    q.at.d += (row * q.at.d_row + first) * bytes_of(type_of(q, TYPE_D));
    q.at.gamma += first * bytes_of(type_of(q, TYPE_GAMMA));
    q.at.beta += first * bytes_of(type_of(q, TYPE_BETA));
    return q;
}

struct Gate {
    // z of the group.
    OperandRow z;
    bool is_before, is_after, is_sigmoid;

    QG_DEVICE Gate of(const NormGatedParams& p, u32 index) {
        const u32 flags = p.norm.shape.flags, dtype = type_of(p.norm, TYPE_X);
        const u32 groups = (u32)p.gate.groups, row = index / groups;
        const u64 first = row * p.gate.z_row + (u64)(index - row * groups) * p.norm.shape.columns;
        const bool is_any = flags & QG_FLAG_GATE, is_before = flags & QG_FLAG_GATE_BEFORE;
        u8* start = reinterpret_cast<u8*>(p.gate.z) + first * bytes_of(dtype);
        return {{start, dtype, (flags & QG_FLAG_GATE_ALIGNED) != 0}, is_any && is_before, is_any && !is_before,
                (flags & QG_FLAG_SIGMOID) != 0};
    }

    // Multiplies a column group; z behind `columns` is 0.
    QG_DEVICE void multiply(const Gate& gate, u32 column, u32 columns, float (&value)[GROUP]) {
        float z[GROUP];
        StoredGroup::decode(StoredGroup::load(gate.z, column, columns), gate.z.dtype, z);
#pragma unroll
        for (u32 i = 0; i < GROUP; i++) value[i] *= gate.is_sigmoid ? sigmoid(z[i]) : z[i] * sigmoid(z[i]);
    }
};

// Stores a normalized group to D, behind the gate.
QG_DEVICE void store_gated(const NormParams& q, const Gate& gate, const Statistics& s, const float (&value)[GROUP],
                           u32 column) {
    float out[GROUP];
    normalize_group(q, s, value, ColumnGroup::load(q, column), column, out);
    if (gate.is_after) Gate::multiply(gate, column, q.shape.columns, out);
    const OperandRow d = OperandRow::d(q, 0);
    StoredGroup::store(StoredGroup::encode(out, d.dtype), d, column, q.shape.d_columns);
}
