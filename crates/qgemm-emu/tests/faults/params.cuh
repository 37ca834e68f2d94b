// The parameter of these tests' kernels: 64 numbers, room for 64 results, room for partial accumulators, and a counter
// that is zero.
#include "atoms/types.cuh"

struct Params {
    const u8* in;
    u8* out;
    u8* partials;
    u32* counter;
};
