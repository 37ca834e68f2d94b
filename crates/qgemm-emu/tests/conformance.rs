//! Conformance suite on the emulated variants.

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

    // FP8 conversions are specific to sm89. The rest is shared with sm80 and sm120, which
    // run the whole suite. `qgemm verify --device emu:sm89` runs the rest, too.
    #[test]
    fn shapes_float8() {
        check_group("emu:sm89", "shapes_float8");
    }

    #[test]
    fn exact() {
        check_group("emu:sm89", "exact");
    }

    // FP8 X by `mma.sync`.
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

    // Groups for Hopper-only kernels. The rest is shared with sm120, with the same TMA.
    // `qgemm verify --device emu:sm90` runs all.
    #[test]
    fn configurations() {
        check_group("emu:sm90", "configurations");
    }

    // Epilogues of warpgroups.
    #[test]
    fn whole_tiles() {
        check_group("emu:sm90", "whole_tiles");
    }

    // `matmul` kernels of Hopper do not serve the small groups of sm120.
    #[test]
    fn matmul_every_kernel() {
        check_group("emu:sm90", "matmul_every_kernel");
    }

    // Quantized X by `wgmma`.
    #[test]
    fn x_formats() {
        check_group("emu:sm90", "x_formats");
    }

    #[test]
    fn experts_every_kernel() {
        check_group("emu:sm90", "experts_every_kernel");
    }

    #[test]
    fn experts_x_formats() {
        check_group("emu:sm90", "experts_x_formats");
    }

    #[test]
    fn attention_every_kernel() {
        check_group("emu:sm90", "attention_every_kernel");
    }

    // Dequantized keys in front of `wgmma`.
    #[test]
    fn attention_dequantized() {
        check_group("emu:sm90", "attention_dequantized");
    }

    #[test]
    fn attention_sinks() {
        check_group("emu:sm90", "attention_sinks");
    }

    #[test]
    fn attention_gated() {
        check_group("emu:sm90", "attention_gated");
    }

    #[test]
    fn attention_mixed() {
        check_group("emu:sm90", "attention_mixed");
    }

    // Gathered keys of the indexer's top-k.
    #[test]
    fn indexer_best() {
        check_group("emu:sm90", "indexer_best");
    }
}
mod sm120 {
    qgemm_testkit::conformance!("emu:sm120");
}
