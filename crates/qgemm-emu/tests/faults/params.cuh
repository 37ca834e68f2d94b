// What the kernels of these tests take: 64 numbers, room for 64 results, and for partial sums; a counter that is zero.
struct Params {
    const u8* in;
    u8* out;
    u8* partials;
    u32* counter;
};
