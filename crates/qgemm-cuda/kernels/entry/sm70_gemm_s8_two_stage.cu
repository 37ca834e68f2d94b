// sm70_gemm_two_stage with s8 X:
// integer MMA on Turing, dp4a on Volta.
#include "entry/sm70_gemm_two_stage.cu"
