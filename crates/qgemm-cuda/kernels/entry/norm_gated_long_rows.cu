// RMSNorm and LayerNorm with a gate
// or groups of features: rows of any length,
// one CTA each, reloaded in each pass.
#include "epilogue/norm_gate.cuh"

// A thread has groups `thread`,
// `thread + threads`, ….
struct GatedRow {
    OperandRow x;
    Gate gate;
    u32 columns;

    QG_DEVICE void read(const GatedRow& row, u32 column, float (&value)[GROUP]) {
        StoredGroup::decode(StoredGroup::load(row.x, column, row.columns), row.x.dtype, value);
        if (row.gate.is_before) Gate::multiply(row.gate, column, row.columns, value);
    }
    template <class Visit>
    QG_DEVICE void each(const GatedRow& row, Visit visit) {
        for (u32 column = thread_index() * GROUP; column < row.columns; column += cta_threads() * GROUP) {
            float value[GROUP];
            read(row, column, value);
            visit(value, row.columns - column);
        }
    }
};

extern "C" __global__ void __launch_bounds__(QG_THREADS, QG_LEAST_CTAS)
    qg_norm_gated_long_rows(const __grid_constant__ NormGatedParams p) {
    NormStorage& storage = *reinterpret_cast<NormStorage*>(dynamic_shared());
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();

    const NormParams q = params_of_group(p, cta_index().x);
    const GatedRow own = {OperandRow::x(q, 0), Gate::of(p, cta_index().x), q.shape.columns};
    const Statistics statistics = Statistics::of(q, own, storage);
    for (u32 column = thread_index() * GROUP; column < q.shape.d_columns; column += cta_threads() * GROUP) {
        float value[GROUP] = {};
        if (column < own.columns) GatedRow::read(own, column, value);
        store_gated(q, own.gate, statistics, value, column);
    }
}
