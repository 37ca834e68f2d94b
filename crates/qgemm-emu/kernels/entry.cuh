// Comes after the kernel: starts it from the emulator, which gives the parameter as bytes.
template <class P>
static void emu_call(void (*kernel)(P), const void* params) {
    kernel(*static_cast<const P*>(params));
}
extern "C" __attribute__((visibility("default"))) void qg_emu_run(const void* params) {
    emu_call(QG_EMU_KERNEL, params);
}
