// Hopper epilogue of a consumer warp.
// Three kinds of outputs in the type of X finish in registers:
//   - row scales and bias only
//   - with a residual or a token scale
//   - gated pairs (a lane has gate and up)
// They pass through shared memory in 16 bits; `stmatrix`
// transposes them.
// f32 outputs are stored directly: eight lanes fill a sector.
// All other outputs use `store_rounds`.
#pragma once
#include "atoms/exp2.cuh"
#include "atoms/ldmatrix.cuh"
#include "atoms/opaque_register.cuh"
#include "atoms/reciprocal.cuh"
#include "atoms/stmatrix.cuh"
#include "dequant/halves.cuh"
#include "epilogue/warp_store.cuh"
#include "sched/output_rows.cuh"

// Tokens per pass, and passes of a tile.
// The last pass may be partial.
constexpr u32 PASS_TILES = 4, PASS_TOKENS = PASS_TILES * MMA_TOKENS, PASSES = (TOKEN_TILES + PASS_TILES - 1) / PASS_TILES;

// An accumulator of the pass; 0 past the tile's last token.
QG_DEVICE float accumulator(const float (&of)[TOKEN_TILES][4], u32 token_tile, u32 i) {
    return token_tile < TOKEN_TILES ? of[token_tile < TOKEN_TILES ? token_tile : 0][i] : 0.0f;
}

// Rows of D by `find_row`.
struct FoundRows {
    QG_DEVICE bool find(const FoundRows&, const GemmParams& p, u32 token, u32& row) { return find_row(p, token, row); }
};

// Factors and biases of the lane's rows.
// In a gated pair the first row is the gate, the second the up.
struct RowOperands {
    float factor[ROW_TILES][2], bias[ROW_TILES][2];

    template <bool GATED>
    QG_DEVICE RowOperands load(const GemmParams& p, u32 first_row, u32 lane) {
        RowOperands o;
        const u32 flags = p.shape.flags;
#pragma unroll
        for (u32 rt = 0; rt < ROW_TILES; rt++)
#pragma unroll
            for (u32 i = 0; i < 2; i++) {
                const u32 row = first_row + rt * 16 + i * 8 + lane / 4;
                const u32 of_bias = GATED ? feature_of_gate(row - i * 8) + i * p.shape.out_features : row;
                const float scale = flags & QG_FLAG_ROW_SCALE ? load_dense(DTYPE_F32, p.at.row_scale, row) : 1.0f;
                o.factor[rt][i] = p.shape.alpha * scale;
                o.bias[rt][i] = flags & QG_FLAG_BIAS ? load_dense(p.shape.bias_dtype, p.at.bias, of_bias) : 0.0f;
            }
        return o;
    }
    QG_DEVICE float output(const RowOperands& o, u32 rt, u32 i, float acc) {
        return o.factor[rt][i] * acc + o.bias[rt][i];
    }
};

// v · sigmoid(x), fast, within 2^-20; outputs have 16 bits.
QG_DEVICE float activate_gate(const GemmParams& p, float v) {
    float x = v;
    if (is_clamped(p)) {
        v = clamped_gate(p, v);
        x = swiglu_alpha(p) * v;
    } else if (p.shape.activation != QG_ACTIVATION_SILU) {
        x = 1.59576912f * (v + 0.044715f * v * v * v);
    }
    return v * rcp_approx(1.0f + ex2_approx(-1.44269504f * x));
}

// Output kinds that finish in registers.
// TOKEN_SCALE uses 1 if no token scale is given.
enum class Finish { PLAIN, RESIDUAL, TOKEN_SCALE, GATED };
// Expert down projections scale outputs by router weights.
// A second path without token scales would spill.
constexpr Finish PLAIN_FINISH = QG_EXPERTS ? Finish::TOKEN_SCALE : Finish::PLAIN;

// Outputs of a pass in a warp's shared memory:
// chunks of eight features per token.
// RESIDUAL: the residual occupies them first.
template <Finish FINISH>
struct OutputStaging {
    static constexpr bool GATED = FINISH == Finish::GATED;
    static constexpr u32 CHUNKS = WARP_ROWS / (GATED ? 16 : 8);
    static_assert(PASS_TOKENS * CHUNKS * 16 <= sizeof(WarpStaging::acc), "outputs take the place of accumulators");

    // Swizzle: the chunks of eight tokens use all banks.
    QG_DEVICE u8* chunk(WarpStaging& staging, u32 token, u32 index) {
        const u32 exchange = CHUNKS == 1 ? 0 : CHUNKS == 2 ? token / 4 % 2 : token / 2 % 4;
        return reinterpret_cast<u8*>(staging.acc) + (token * CHUNKS + (index ^ exchange)) * 16;
    }

    // All lanes call it. `token_scale` belongs to the
    // lane's own token.
    QG_DEVICE void put(WarpStaging& staging, const Accumulators& acc, u32 pass, const RowOperands& o, float token_scale,
                       const GemmParams& p, u32 lane) {
#pragma unroll
        for (u32 rt = 0; rt < ROW_TILES; rt++) {
            const float(&of)[TOKEN_TILES][4] = acc.value[rt];
            const u32 first = pass * PASS_TILES;
            if constexpr (GATED) {
                u32 pairs[PASS_TILES];
#pragma unroll
                for (u32 tt = 0; tt < PASS_TILES; tt++) {
                    float d[2];
#pragma unroll
                    for (u32 i = 0; i < 2; i++)
                        d[i] = activate_gate(p, RowOperands::output(o, rt, 0, accumulator(of, first + tt, i))) *
                               of_up(p, RowOperands::output(o, rt, 1, accumulator(of, first + tt, 2 + i)));
                    pairs[tt] = f32_to_halves<QG_X_DTYPE>(d[0], d[1]);
                }
                stmatrix_x4_trans(pairs, chunk(staging, lane, rt));
            } else {
#pragma unroll
                for (u32 tt = 0; tt < PASS_TILES; tt += 2) {
                    u8* const rows = chunk(staging, tt * 8 + lane / 16 * 8 + lane % 8, rt * 2 + lane / 8 % 2);
                    u32 pairs[4];
                    if constexpr (FINISH == Finish::RESIDUAL) ldmatrix_x4_trans(pairs, rows);
                    float scale[2][2] = {{1.0f, 1.0f}, {1.0f, 1.0f}};
                    if constexpr (FINISH == Finish::TOKEN_SCALE) {
#pragma unroll
                        for (u32 i = 0; i < 4; i++) {
                            const u32 of_token = shfl_idx_u32(f32_to_bits(token_scale), (tt + i / 2) * 8 + lane % 4 * 2 + i % 2);
                            scale[i / 2][i % 2] = bits_to_f32(of_token);
                        }
                    }
#pragma unroll
                    for (u32 m = 0; m < 4; m++) {
                        float d[2];
#pragma unroll
                        for (u32 i = 0; i < 2; i++) {
                            d[i] = RowOperands::output(o, rt, m % 2, scale[m / 2][i] * accumulator(of, first + tt + m / 2, m % 2 * 2 + i));
                            if constexpr (FINISH == Finish::RESIDUAL) d[i] += half_to_f32(QG_X_DTYPE, pairs[m] >> i * 16 & 0xffffu);
                        }
                        pairs[m] = f32_to_halves<QG_X_DTYPE>(d[0], d[1]);
                    }
                    stmatrix_x4_trans(pairs, rows);
                }
            }
        }
    }
};

// Passes that are unrolled together (see `ROUNDS_AT_ONCE`).
// Gated pairs have longer code, hence one pass.
template <Finish FINISH>
constexpr u32 PASSES_AT_ONCE = FINISH == Finish::GATED || PASSES < 4 ? 1 : (PASSES + 1) / 2;

template <Finish FINISH, class Rows>
QG_DEVICE void store_passes(Accumulators& acc, const GemmParams& p, const Rows& rows, WarpStaging& staging, u32 first_token,
                            u32 first_row, u32 lane) {
    using Staging = OutputStaging<FINISH>;
    constexpr bool GATED = Staging::GATED;
    constexpr u32 CHUNKS = Staging::CHUNKS, AT_ONCE = PASSES_AT_ONCE<FINISH>;
    const RowOperands operands = RowOperands::load<GATED>(p, first_row, lane);
    const u32 feature = (GATED ? first_row / 2 : first_row) + lane % CHUNKS * 8;
    u8* const d = reinterpret_cast<u8*>(p.at.d) + feature * 2;
    const u8* const residual = reinterpret_cast<const u8*>(p.at.residual) + feature * 2;
    // Keep a loop even for one iteration; without it kernels of
    // 32 tokens spill.
    const u32 passes = PASSES > 1 ? PASSES : opaque_register(PASSES);
#pragma unroll 1
    for (u32 pass = 0; pass < passes; pass += AT_ONCE) {
        if (first_token + pass * PASS_TOKENS >= p.shape.m) break;
#pragma unroll
        for (u32 i = 0; i < AT_ONCE; i++) {
            if (PASSES % AT_ONCE != 0 && i > 0 && first_token + (pass + i) * PASS_TOKENS >= p.shape.m) break;
            // Rows and factors are looked up early.
            // The thread that stores an output reads its residual.
            u32 row[CHUNKS];
            bool is_there[CHUNKS];
            u32x4 v[CHUNKS];
            const u32 first = first_token + (pass + i) * PASS_TOKENS;
            const auto place = [&](u32 j) {
                return reinterpret_cast<u32x4*>(Staging::chunk(staging, (j * 32 + lane) / CHUNKS, lane % CHUNKS));
            };
#pragma unroll
            for (u32 j = 0; j < CHUNKS; j++) {
                is_there[j] = Rows::find(rows, p, first + (j * 32 + lane) / CHUNKS, row[j]);
                if constexpr (FINISH == Finish::RESIDUAL)
                    v[j] = is_there[j] ? ld_global_v4(residual + row[j] * p.at.residual_row * 2) : u32x4{0, 0, 0, 0};
            }
            float token_scale = 1.0f;
            u32 own;
            if (FINISH == Finish::TOKEN_SCALE && p.shape.flags & QG_FLAG_TOKEN_SCALE &&
                Rows::find(rows, p, first + lane, own))
                token_scale = load_dense(DTYPE_F32, p.at.token_scale, own);
            warp_barrier();
            if constexpr (FINISH == Finish::RESIDUAL) {
#pragma unroll
                for (u32 j = 0; j < CHUNKS; j++) st_shared(place(j), v[j]);
                warp_barrier();
            }
            Staging::put(staging, acc, i, operands, token_scale, p, lane);
            warp_barrier();
#pragma unroll
            for (u32 j = 0; j < CHUNKS; j++) {
                v[j] = ld_shared(static_cast<const u32x4*>(place(j)));
                if (is_there[j]) st_global_v4(d + row[j] * p.at.d_row * 2, v[j]);
            }
        }
        move_up<AT_ONCE * PASS_TILES>(acc);
    }
}

// Stores plain outputs in f32.
template <class Rows>
QG_DEVICE void store_f32(Accumulators& acc, const GemmParams& p, const Rows& rows, u32 first_token, u32 first_row, u32 lane) {
    constexpr u32 NO_ROW = ~0u;
    const RowOperands operands = RowOperands::load<false>(p, first_row, lane);
    u8* const d = reinterpret_cast<u8*>(p.at.d) + (first_row + lane / 4) * 4;
#pragma unroll 1
    for (u32 pass = 0; pass < PASSES; pass++) {
        const u32 first = first_token + pass * PASS_TOKENS;
        if (first >= p.shape.m) break;
        u32 row_of_lane;
        if (!Rows::find(rows, p, first + lane, row_of_lane)) row_of_lane = NO_ROW;
#pragma unroll
        for (u32 tt = 0; tt < PASS_TILES; tt++)
#pragma unroll
            for (u32 i = 0; i < 2; i++) {
                const u32 row = shfl_idx_u32(row_of_lane, tt * 8 + lane % 4 * 2 + i);
                if (row == NO_ROW) continue;
                u8* const of_token = d + row * p.at.d_row * 4;
#pragma unroll
                for (u32 rt = 0; rt < ROW_TILES; rt++)
#pragma unroll
                    for (u32 half = 0; half < 2; half++) {
                        const float v = RowOperands::output(operands, rt, half, accumulator(acc.value[rt], tt, half * 2 + i));
                        st_global_u32(of_token + (rt * 16 + half * 8) * 4, f32_to_bits(v));
                    }
            }
        move_up<PASS_TILES>(acc);
    }
}

// Whether outputs need the operands NEEDED, and otherwise row
// operands and PLAIN_FINISH only.
// D has the type of X and aligned rows, or is f32.
template <u32 NEEDED, bool F32 = false>
QG_DEVICE bool needs_only(const GemmParams& p) {
    constexpr u32 OPERANDS = QG_FLAG_ROW_SCALE | QG_FLAG_K_ORDER | QG_FLAG_BIAS;
    constexpr u32 SET = NEEDED | (F32 ? 0 : QG_FLAG_D_ALIGNED16), D_DTYPE = F32 ? DTYPE_F32 : QG_X_DTYPE;
    constexpr u32 OPTIONAL = !F32 && NEEDED == 0 && PLAIN_FINISH == Finish::TOKEN_SCALE ? QG_FLAG_TOKEN_SCALE : 0;
    return (p.shape.flags & SET) == SET && has_only<OPERANDS | OPTIONAL | NEEDED>(p) && p.shape.d_dtype == D_DTYPE;
}

QG_DEVICE bool is_linear(const GemmParams& p) {
    return p.shape.activation == QG_ACTIVATION_IDENTITY;
}

QG_DEVICE bool is_gate(const GemmParams& p) {
    return p.shape.activation == QG_ACTIVATION_SILU || p.shape.activation == QG_ACTIVATION_GELU_TANH || is_clamped(p);
}

template <class Rows = FoundRows>
QG_DEVICE void store_warpgroup_tile(Accumulators& acc, const GemmParams& p, const WorkTile& work, WarpStaging& staging, u32 warp,
                                    u32 lane, const Rows& rows = {}) {
    const u32 first_row = (work.n_tile * QG_WARPS_N + warp) * WARP_ROWS, first_token = work.m_tile * QG_TILE_M;
    // Conditions are uniform over the CTA (see `store_tile`).
    const bool is_whole = (work.n_tile + 1) * QG_WARPS_N * WARP_ROWS <= rows_of_outputs(p);
    if (is_whole && needs_only<0>(p) && is_linear(p))
        store_passes<PLAIN_FINISH>(acc, p, rows, staging, first_token, first_row, lane);
    // Kernels of 32 tokens would spill here.
    else if (PASSES > 1 && is_whole && needs_only<0, true>(p) && is_linear(p))
        store_f32(acc, p, rows, first_token, first_row, lane);
    // Expert and segment kernels would spill with a residual.
    else if (!QG_EXPERTS && !QG_PROJECTION && is_whole && needs_only<QG_FLAG_RESIDUAL | QG_FLAG_RESIDUAL_ALIGNED16>(p) &&
             p.shape.residual_dtype == QG_X_DTYPE && is_linear(p))
        store_passes<Finish::RESIDUAL>(acc, p, rows, staging, first_token, first_row, lane);
    else if (is_whole && needs_only<QG_FLAG_GATED>(p) && is_gate(p))
        store_passes<Finish::GATED>(acc, p, rows, staging, first_token, first_row, lane);
    else
        store_rounds(acc, p, staging, first_token, first_row, lane);
}
