// Interface of the emulated atoms to the emulator, which
// tracks every thread, checks every access, and counts.
//
// The host's C++ compiler builds kernels with these atoms
// instead of PTX. Every thread of a CTA has a separate stack.
// A call that waits for other threads switches to them.
#pragma once

// Source location: the last parameters of every atom that
// calls the emulator.
#define QG_AT const char *file = __builtin_FILE(), u32 line = __builtin_LINE()

struct EmuThread {
    u32 thread, threads;
    u32 cta[3], grid[3];
    u8* shared;
};

// Field order of `Runtime` in src/machine/callbacks.rs.
struct EmuRuntime {
    const EmuThread* (*place)();
    void (*load_shared)(const void* address, u32 bytes, void* out, const char* file, u32 line);
    void (*store_shared)(void* address, u32 bytes, const void* in, const char* file, u32 line);
    // `read_only`: non-coherent path, for memory that the
    // kernel does not write.
    void (*load_global)(const void* address, u32 bytes, void* out, u32 read_only, const char* file, u32 line);
    void (*store_global)(void* address, u32 bytes, const void* in, const char* file, u32 line);
    // `relaxed` 0: .acq_rel.gpu.
    u32 (*atomic_add)(u32* address, u32 value, u32 relaxed, const char* file, u32 line);
    u32 (*atomic_add_shared)(u32* address, u32 value, const char* file, u32 line);
    void (*store_relaxed)(u32* address, u32 value, const char* file, u32 line);
    void (*fence)();
    // `threads` 0: all threads of the CTA.
    // `waits` 0: arrive only.
    void (*barrier)(u32 id, u32 threads, u32 waits, const char* file, u32 line);
    void (*collective)(u32 op, const u32* in, u32 in_words, u32* out, u32 out_words, const char* file, u32 line);
    void (*ldmatrix)(u32 matrices, u32 transposed, const void* row, u32* out, const char* file, u32 line);
    void (*stmatrix)(u32 matrices, u32 transposed, void* row, const u32* in, const char* file, u32 line);
    void (*cp_async)(void* shared, const void* global, u32 bytes, u32 source_bytes, const char* file, u32 line);
    void (*cp_async_commit)();
    void (*cp_async_wait)(u32 groups, const char* file, u32 line);
    void (*cp_async_arrive)(u64* barrier, const char* file, u32 line);
    void (*bulk_copy)(u8* shared, const u8* global, u32 bytes, u64* barrier, const char* file, u32 line);
    void (*grid_wait)();
    void (*mbarrier_init)(u64* barrier, u32 count, const char* file, u32 line);
    void (*mbarrier_fence)();
    // Announces `bytes`, then arrives.
    void (*mbarrier_arrive)(u64* barrier, u32 bytes, const char* file, u32 line);
    void (*mbarrier_wait)(u64* barrier, u32 parity, const char* file, u32 line);
    // `at`: coordinates of the tile's first element.
    void (*tensor_copy)(u8* shared, const void* map, const i32* at, u32 dimensions, u64* barrier, const char* file,
                        u32 line);
    void (*proxy_fence)();
    void (*wgmma_fence)();
    // `operands`: WgmmaOperands in src/model/float.rs.
    // `adds` 0: D is overwritten. `b_mn` 1: B is MN-major.
    void (*wgmma)(float* d, u32 d_words, const u32* a, u64 b_descriptor, u32 b_mn, u32 operands, u32 adds,
                  const char* file, u32 line);
    // A and B in shared memory.
    // `a_mn`, `b_mn` 1: MN-major.
    void (*wgmma_shared)(float* d, u32 d_words, u64 a_descriptor, u64 b_descriptor, u32 a_mn, u32 b_mn, u32 operands,
                         u32 adds, const char* file, u32 line);
    void (*wgmma_commit)();
    void (*wgmma_wait)(u32 groups, const char* file, u32 line);
    // Sets the thread's register count; waits for missing registers.
    void (*set_registers)(u32 count, const char* file, u32 line);
};

static const EmuRuntime* emu;

extern "C" __attribute__((visibility("default"))) bool qg_emu_bind(const EmuRuntime* runtime, u64 bytes) {
    emu = runtime;
    return bytes == sizeof(EmuRuntime);
}

// Warp collective: every lane gives `in`, all lanes meet, the
// model computes, each lane receives `out`.
template <u32 IN, u32 OUT>
static inline void emu_collective(u32 op, const u32 (&in)[IN], u32 (&out)[OUT], const char* file, u32 line) {
    emu->collective(op, in, IN, out, OUT, file, line);
}
