// sm70_gemm_two_stage with s8 X:
// integer MMA on Turing, dp4a on Volta.
#define QG_X_PLANES 1
#include "entry/sm70_gemm_two_stage.cu"
