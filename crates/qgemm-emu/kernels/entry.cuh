// Appended after the kernel: the emulator's entry point.
// It passes the parameter as bytes.
template <class P>
static void emu_call(void (*kernel)(P), const void* params) {
    kernel(*static_cast<const P*>(params));
}
extern "C" __attribute__((visibility("default"))) void qg_emu_run(const void* params) {
    emu_call(QG_EMU_KERNEL, params);
}
