//! Hopper kernel of `wgmma_tile.rs` in the emulator: correct as it is, and every part
//! of its pipeline is needed.

mod hopper_tile;

use std::sync::Arc;

use half::f16;
use qgemm_cuda::{Geometry, KernelSpec};
use qgemm_emu::{Access, FaultKind, Region, Swizzle};
use qgemm_hal::{Device, HalError, Variant};

use hopper_tile::{BOX, Params, Problem, TensorMap, geometry, spec};

#[test]
fn a_tile_is_multiplied() {
    let Some(device) = emulator_or_skip("a_tile_is_multiplied") else { return };
    for problem in Problem::all() {
        problem.check(&emulated(&*device, &spec(), &problem).unwrap());
    }
}

/// Replaced lines of the kernel, and the resulting mistake.
#[test]
fn what_is_left_out_is_found() {
    let Some(device) = emulator_or_skip("what_is_left_out_is_found") else { return };
    let mistakes = [
        ("mbarrier_wait(&shared.full[stage], k_block / STAGES % 2);", "", FaultKind::InFlight),
        ("if (use > 0) mbarrier_wait(&shared.empty[stage], (use - 1) % 2);", "", FaultKind::BadOperand),
        ("mbarrier_arrive(&shared.empty[stage]);", "", FaultKind::Deadlock),
        ("fence_mbarrier_init();", "", FaultKind::Race),
        ("        wgmma_fence();", "", FaultKind::BadOperand),
        ("wgmma_wait_group<0>();", "", FaultKind::InFlight),
        ("wgmma_wait_group<0>();", "a[0][0] ^= 1;\n        wgmma_wait_group<0>();", FaultKind::BadOperand),
        ("sizeof(shared.x[0]));", "64);", FaultKind::Deadlock),
        ("shared.x[stage] + k16 * 32", "shared.x[stage] + 16384 + k16 * 32", FaultKind::OutOfBounds),
        (
            "wgmma_wait_group<0>();\n        mbarrier_arrive(&shared.empty[stage]);",
            "mbarrier_arrive(&shared.empty[stage]);\n        wgmma_wait_group<0>();",
            FaultKind::Race,
        ),
    ];
    let right = spec();
    let problem = &Problem::all()[1];
    let mut missed = Vec::new();
    for (line, instead, kind) in mistakes {
        assert_eq!(right.text.matches(line).count(), 1, "{line}");
        let text = right.text.replace(line, instead).leak();
        let wrong = KernelSpec { text, ..right.clone() };
        match emulated(&*device, &wrong, problem) {
            Err(HalError::KernelFault { fault, .. }) if fault.contains(kind.text()) => {}
            other => missed.push(format!("without `{line}`: expected {kind:?}, got {:?}", other.map(|_| "a result"))),
        }
    }
    assert!(missed.is_empty(), "{}", missed.join("\n"));
}

fn emulator_or_skip(test: &str) -> Option<Arc<dyn Device>> {
    match qgemm_emu::open(Variant::Sm90.number()) {
        Ok(device) => Some(device),
        Err(why @ HalError::NoDevice { .. }) => {
            qgemm_testkit::skipped(test, &why.to_string());
            None
        }
        Err(other) => panic!("{other}"),
    }
}

fn emulated(device: &dyn Device, spec: &KernelSpec, problem: &Problem) -> Result<Vec<f32>, HalError> {
    let mut outputs = problem.poisoned_output();
    let region = |name, start: *const u8, len, access| Region { name, start: start.expose_provenance(), len, access };
    let bytes = |values: &[f16]| size_of_val(values);
    let d_bytes = size_of_val(outputs.as_slice());
    let regions = [
        region("w", problem.w.as_ptr().cast(), bytes(&problem.w), Access::Weight),
        region("x", problem.x.as_ptr().cast(), bytes(&problem.x), Access::Read),
        region("d", outputs.as_mut_ptr().cast_const().cast(), d_bytes, Access::Write),
    ];
    let [w, x, d] = regions.each_ref().map(|region| region.start as u64);
    let map = qgemm_emu::TensorMap {
        address: x,
        element_bytes: 2,
        size: [problem.k as u64, problem.tokens as u64, 1, 1, 1],
        strides: [problem.k as u64 * 2, 0, 0, 0],
        tile: [BOX[0], BOX[1], 1, 1, 1],
        swizzle: Swizzle::Bytes128,
    };
    let params = Params::new(TensorMap(map.encode()), w, d, problem.k as u64);
    let Geometry { grid, threads, shared_bytes } = geometry();
    let params = bytemuck::bytes_of(&params);
    let launch = qgemm_emu::Geometry { blocks: grid, threads, shared_bytes, params, starts_early: false };
    // SAFETY: `Params` is the kernel's parameter; the regions are vectors that
    // nobody else uses meanwhile.
    unsafe { qgemm_emu::launch_spec(device, spec, launch, &regions)? };
    Ok(outputs)
}
