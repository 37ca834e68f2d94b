// What sm70_gemm_two_stage does, with X in signed bytes: on Turing's integer matrix instruction, and on Volta with dot products of four
// bytes.
#define QG_X_PLANES 1
#include "entry/sm70_gemm_two_stage.cu"
