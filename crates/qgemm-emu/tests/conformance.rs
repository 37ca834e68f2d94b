//! The conformance suite on every emulated variant.

mod sm70 {
    qgemm_testkit::conformance!("emu:sm70");
}
mod sm75 {
    qgemm_testkit::conformance!("emu:sm75");
}
mod sm80 {
    qgemm_testkit::conformance!("emu:sm80");
}
mod sm89 {
    qgemm_testkit::conformance!("emu:sm89");
}
mod sm120 {
    qgemm_testkit::conformance!("emu:sm120");
}
