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
    use qgemm_testkit::check_group;

    // Its own are the conversions of FP8. Everything else is sm80's, with those tiles that sm120 has room for, too: both run
    // the whole suite, and three times would be minutes of every test run. `qgemm verify --device emu:sm89` runs the rest.
    #[test]
    fn shapes_float8() {
        check_group("emu:sm89", "shapes_float8");
    }

    #[test]
    fn exact() {
        check_group("emu:sm89", "exact");
    }

    // Codes of FP8 by `mma.sync`.
    #[test]
    fn x_formats() {
        check_group("emu:sm89", "x_formats");
    }

    #[test]
    fn configurations() {
        check_group("emu:sm89", "configurations");
    }
}
mod sm90 {
    use qgemm_testkit::check_group;

    // The groups that reach what only Hopper has: the rest is sm120's, copied by the same TMA. `qgemm verify --device emu:sm90` runs all.
    #[test]
    fn configurations() {
        check_group("emu:sm90", "configurations");
    }

    // Those of `matmul` do not serve what sm120's groups are small enough for.
    #[test]
    fn matmul_every_kernel() {
        check_group("emu:sm90", "matmul_every_kernel");
    }

    // Codes of X by `wgmma`.
    #[test]
    fn x_formats() {
        check_group("emu:sm90", "x_formats");
    }

    #[test]
    fn experts_every_way() {
        check_group("emu:sm90", "experts_every_way");
    }

    #[test]
    fn experts_x_formats() {
        check_group("emu:sm90", "experts_x_formats");
    }

    #[test]
    fn attention_every_kernel() {
        check_group("emu:sm90", "attention_every_kernel");
    }

    // Keys that are gathered while they are scored.
    #[test]
    fn indexer_best() {
        check_group("emu:sm90", "indexer_best");
    }
}
mod sm120 {
    qgemm_testkit::conformance!("emu:sm120");
}
