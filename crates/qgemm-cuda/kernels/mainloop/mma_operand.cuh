// MMA k-step of 16 columns, operands in the type of X:
// D[16 rows, 8 tokens] += A · B.
#pragma once
#include "atoms/mma.cuh"
#include "dequant/operand.cuh"
#if QG_OPERAND_TABLE
#include "dequant/operand_table.cuh"
#endif

static_assert(!QG_MMA_M8N8K4, "the MmaM8N8K4 layout is for m8n8k4, which these loops do not issue");

// Tokens per instruction.
constexpr u32 MMA_TOKENS = 8;

#if QG_X_DTYPE == 1
QG_DEVICE void mma_k_step(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
#if QG_VARIANT >= 80
    mma_m16n8k16_f16(d, a, b);
#else
    // Turing's instruction has k8: issue it twice.
    mma_m16n8k8_f16(d, {a[0], a[1]}, b[0]);
    mma_m16n8k8_f16(d, {a[2], a[3]}, b[1]);
#endif
}
constexpr u32 ONE_PAIR = 0x3c003c00u;
#else
QG_DEVICE void mma_k_step(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) { mma_m16n8k16_bf16(d, a, b); }
constexpr u32 ONE_PAIR = 0x3f803f80u;
#endif

QG_DEVICE u32 operand_pair(const KTile& s, u32 quad, u32 pair) {
#if QG_OPERAND_TABLE
    return OperandTable::pair(s, quad, pair);
#elif QG_INTEGER_OPERANDS
    return integer_operand_pair(s, quad, pair);
#elif QG_X_DTYPE == 1
    return Operands::pair_f16(s, quad, pair);
#else
    return Operands::pair_bf16(s, quad, pair);
#endif
}
