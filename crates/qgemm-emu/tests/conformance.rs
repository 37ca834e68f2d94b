//! The conformance suite on the emulated variants.

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
mod sm90 {
    // What only Hopper has are tiles for many tokens: the rest is sm120's, fed by the same copy engine.
    #[test]
    fn configurations() {
        qgemm_testkit::check_group("emu:sm90", "configurations");
    }
}
mod sm120 {
    qgemm_testkit::conformance!("emu:sm120");
}
