// RMSNorm and LayerNorm with a gate or groups of
// features: rows in registers.
#include "epilogue/norm_gate.cuh"
#include "mainloop/norm_register_row.cuh"

extern "C" __global__ void __launch_bounds__(QG_THREADS, QG_LEAST_CTAS)
    qg_norm_gated_rows(const __grid_constant__ NormGatedParams p) {
    NormStorage& storage = *reinterpret_cast<NormStorage*>(dynamic_shared());
    u32 row;
    RegisterRow own = RegisterRow::of_thread(p.norm, row);
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();

    const NormParams q = params_of_group(p, row);
    const Gate gate = Gate::of(p, row);
    RegisterRow::load(own, q, 0);
    if (gate.is_before)
#pragma unroll
        for (u32 i = 0; i < QG_GROUPS; i++)
            Gate::multiply(gate, RegisterRow::column(own, i), own.columns, own.value[i]);

    const Statistics statistics = Statistics::of(q, own, storage);
    if (row >= q.shape.rows) return;
#pragma unroll
    for (u32 i = 0; i < QG_GROUPS; i++) {
        const u32 column = RegisterRow::column(own, i);
        if (column < q.shape.d_columns) store_gated(q, gate, statistics, own.value[i], column);
    }
}
