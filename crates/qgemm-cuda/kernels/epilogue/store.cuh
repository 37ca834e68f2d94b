// GEMM epilogue in f32, converted once:
//   v = alpha · row_scale · token_scale · x_factor · acc
//       + beta · C + bias
//   D = activation(v) + residual
//   D = of_gate(v_gate) · of_up(v_up) + residual  (gated pair)
// Options are uniform branches. `row` counts rows of W.
// Rows of a gated pair form groups of 16:
// eight gate rows, then the up rows of the same eight features.
// Rows and tokens outside D are accepted but not stored.
// The thread that stores an element of D has read this element
// of the residual before.
// So the residual and D may be the same memory.
#pragma once
#include "atoms/warp.cuh"
#include "epilogue/gated_pair.cuh"
#include "epilogue/operands.cuh"
#include "sched/rows.cuh"

// Undoes the power of two that scaled X.
// It comes before all other factors, and is exact.
QG_DEVICE float x_factor(const GemmParams& p, u32 token) {
    return p.shape.flags & QG_FLAG_X_FACTOR ? load_dense(DTYPE_F32, p.at.x_factor, token) : 1.0f;
}

QG_DEVICE float token_factor(const GemmParams& p, u32 token) {
    if (!(p.shape.flags & QG_FLAG_TOKEN_SCALE)) return p.shape.alpha;
    return p.shape.alpha * load_dense(DTYPE_F32, p.at.token_scale, token);
}

// v of one accumulator. `bias_index` is the feature.
// For up rows it is offset by the number of features.
QG_DEVICE float linear_output(const GemmParams& p, u32 token, u32 row, u32 bias_index, float acc) {
    const u32 flags = p.shape.flags;
    float v = token_factor(p, token) * (x_factor(p, token) * acc);
    if (flags & QG_FLAG_ROW_SCALE) v *= load_dense(DTYPE_F32, p.at.row_scale, row);
    if (flags & QG_FLAG_C) v += p.shape.beta * load_dense(p.shape.c_dtype, p.at.c, token * p.at.c_row + row);
    if (flags & QG_FLAG_BIAS) v += load_dense(p.shape.bias_dtype, p.at.bias, bias_index);
    return v;
}

QG_DEVICE void store_feature(const GemmParams& p, u32 token, u32 feature, float v) {
    if (p.shape.flags & QG_FLAG_RESIDUAL)
        v += load_dense(p.shape.residual_dtype, p.at.residual, token * p.at.residual_row + feature);
    store_dense(p.shape.d_dtype, p.at.d, token * p.at.d_row + feature, v);
}

// Stores one output of an ungated weight.
// `find_row` maps the tile's token to a row of D.
QG_DEVICE void store_output(const GemmParams& p, u32 token, u32 row, float acc) {
    u32 own;
    if (row >= p.shape.out_features || !find_row(p, token, own)) return;
    store_feature(p, own, row, activate(p.shape.activation, linear_output(p, own, row, row, acc)));
}

QG_DEVICE u32 feature_of_gate(u32 gate_row) {
    return gate_row / 16 * 8 + gate_row % 8;
}

// Stores one output of a gated pair from rows `gate_row`
// and `gate_row` + 8.
QG_DEVICE void store_gated(const GemmParams& p, u32 token, u32 gate_row, float gate_acc, float up_acc) {
    const u32 feature = feature_of_gate(gate_row);
    u32 own;
    if (feature >= p.shape.out_features || !find_row(p, token, own)) return;
    const float gate = linear_output(p, own, gate_row, feature, gate_acc);
    const float up = linear_output(p, own, gate_row + 8, p.shape.out_features + feature, up_acc);
    store_feature(p, own, feature, of_gate(p, gate) * of_up(p, up));
}

// Stores one accumulator per lane. All lanes of a warp call
// it; `inside` tells whether the lane has an accumulator.
// Lanes l and l ^ 8 hold the same token and rows 8 apart
// in a group of 16.
QG_DEVICE_CALL void store_by_lane(const GemmParams& p, u32 token, u32 row, float acc, bool inside) {
    if (p.shape.flags & QG_FLAG_GATED) {
        const float up = shfl_xor(acc, 8);
        if (inside && row % 16 < 8) store_gated(p, token, row, acc, up);
    } else if (inside) {
        store_output(p, token, row, acc);
    }
}

// `linear_output` of a run of rows; `count` of them lie inside.
template <u32 WIDTH>
QG_DEVICE void linear_run(const GemmParams& p, u32 token, u32 row, u32 bias_index, u32 count, float (&v)[WIDTH]) {
    const u32 flags = p.shape.flags;
    const float factor = token_factor(p, token), inverse = x_factor(p, token);
    float operand[WIDTH];
#pragma unroll
    for (u32 i = 0; i < WIDTH; i++) v[i] = factor * (inverse * v[i]);
    if (flags & QG_FLAG_ROW_SCALE) {
        // Row scales are part of the weight's memory, which is aligned.
        load_dense_run(operand, DTYPE_F32, p.at.row_scale, row, true, count);
#pragma unroll
        for (u32 i = 0; i < WIDTH; i++) v[i] *= operand[i];
    }
    if (flags & QG_FLAG_C) {
        load_dense_run(operand, p.shape.c_dtype, p.at.c, token * p.at.c_row + row, flags & QG_FLAG_C_ALIGNED16, count);
#pragma unroll
        for (u32 i = 0; i < WIDTH; i++) v[i] += p.shape.beta * operand[i];
    }
    if (flags & QG_FLAG_BIAS) {
        load_dense_run(operand, p.shape.bias_dtype, p.at.bias, bias_index, flags & QG_FLAG_BIAS_ALIGNED16, count);
#pragma unroll
        for (u32 i = 0; i < WIDTH; i++) v[i] += operand[i];
    }
}

// Not unrolled, to keep one copy of the activation code.
template <u32 WIDTH, class Function>
QG_DEVICE void activate_run(const GemmParams& p, float (&v)[WIDTH], Function function) {
    if (p.shape.activation == QG_ACTIVATION_IDENTITY) return;
#pragma unroll 1
    for (u32 turn = 0; turn < WIDTH; turn++) {
        const float value = function(v[0]);
#pragma unroll
        for (u32 i = 0; i + 1 < WIDTH; i++) v[i] = v[i + 1];
        v[WIDTH - 1] = value;
    }
}

template <u32 WIDTH>
QG_DEVICE void store_features(const GemmParams& p, u32 token, u32 feature, u32 count, float (&v)[WIDTH]) {
    const u32 flags = p.shape.flags;
    if (flags & QG_FLAG_RESIDUAL) {
        float residual[WIDTH];
        load_dense_run(residual, p.shape.residual_dtype, p.at.residual, token * p.at.residual_row + feature,
                       flags & QG_FLAG_RESIDUAL_ALIGNED16, count);
#pragma unroll
        for (u32 i = 0; i < WIDTH; i++) v[i] += residual[i];
    }
    store_dense_run(p.shape.d_dtype, p.at.d, token * p.at.d_row + feature, flags & QG_FLAG_D_ALIGNED16, count, v);
}

// Stores a run of outputs of one token of an ungated weight.
// `first_row` is a multiple of WIDTH.
template <u32 WIDTH>
QG_DEVICE void store_run(const GemmParams& p, u32 token, u32 first_row, const float (&acc)[WIDTH]) {
    u32 own;
    if (first_row >= p.shape.out_features || !find_row(p, token, own)) return;
    const u32 left = p.shape.out_features - first_row, count = left < WIDTH ? left : WIDTH;
    float v[WIDTH];
#pragma unroll
    for (u32 i = 0; i < WIDTH; i++) v[i] = acc[i];
    linear_run(p, own, first_row, first_row, count, v);
    activate_run(p, v, [&](float value) { return activate(p.shape.activation, value); });
    store_features(p, own, first_row, count, v);
}

// `store_run` of a gated pair: a run of gate rows, and the up
// rows eight rows further.
template <u32 WIDTH>
QG_DEVICE void store_gated_run(const GemmParams& p, u32 token, u32 first_row, const float (&gate_acc)[WIDTH],
                               const float (&up_acc)[WIDTH]) {
    const u32 feature = feature_of_gate(first_row);
    u32 own;
    if (feature >= p.shape.out_features || !find_row(p, token, own)) return;
    const u32 left = p.shape.out_features - feature, count = left < WIDTH ? left : WIDTH;
    float gate[WIDTH], up[WIDTH];
#pragma unroll
    for (u32 i = 0; i < WIDTH; i++) gate[i] = gate_acc[i], up[i] = up_acc[i];
    linear_run(p, own, first_row, feature, count, gate);
    activate_run(p, gate, [&](float value) { return of_gate(p, value); });
    linear_run(p, own, first_row + 8, p.shape.out_features + feature, count, up);
#pragma unroll
    for (u32 i = 0; i < WIDTH; i++) gate[i] *= of_up(p, up[i]);
    store_features(p, own, feature, count, gate);
}

// Stores TOKENS × ROWS outputs with THREADS threads.
// ROWS is a multiple of 16; a thread stores runs of WIDTH.
// `take(token, run, acc)` reads the accumulators of a run.
template <u32 TOKENS, u32 ROWS, u32 THREADS, u32 WIDTH, class Take>
QG_DEVICE void store_runs(const GemmParams& p, u32 first_token, u32 first_row, u32 thread, Take take) {
    constexpr u32 RUNS = ROWS / WIDTH, OF_EIGHT = 8 / WIDTH;
    if (p.shape.flags & QG_FLAG_GATED) {
#pragma unroll 1
        for (u32 i = thread; i < TOKENS * (RUNS / 2); i += THREADS) {
            const u32 token = i / (RUNS / 2), pair = i % (RUNS / 2);
            const u32 run = pair / OF_EIGHT * 2 * OF_EIGHT + pair % OF_EIGHT;
            float gate[WIDTH], up[WIDTH];
            take(token, run, gate);
            take(token, run + OF_EIGHT, up);
            store_gated_run(p, first_token + token, first_row + run * WIDTH, gate, up);
        }
    } else {
#pragma unroll 1
        for (u32 i = thread; i < TOKENS * RUNS; i += THREADS) {
            const u32 token = i / RUNS, run = i % RUNS;
            float values[WIDTH];
            take(token, run, values);
            store_run(p, first_token + token, first_row + run * WIDTH, values);
        }
    }
}
