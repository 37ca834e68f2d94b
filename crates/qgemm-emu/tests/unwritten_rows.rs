//! Unwritten rows of a matrix operand: a missing token
//! affects only its own sums.

use bytemuck::{Pod, Zeroable};
use qgemm_cuda::KernelSpec;
use qgemm_emu::{Access, Geometry, Region, device_address, launch_spec};
use qgemm_hal::HalError;

const TOKENS: usize = 8;

#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct Params {
    d: u64,
}

#[test]
fn rows_that_nobody_has_written_are_no_numbers() {
    let device = match qgemm_emu::open(80) {
        Ok(device) => device,
        Err(why @ HalError::NoDevice { .. }) => {
            return qgemm_testkit::skipped("rows_that_nobody_has_written_are_no_numbers", &why.to_string());
        }
        Err(other) => panic!("{other}"),
    };
    for written in [3, TOKENS] {
        let spec = KernelSpec {
            name: format!("unwritten_rows of {written}"),
            entry: "kernels/unwritten_rows.cu",
            text: include_str!("kernels/unwritten_rows.cu"),
            symbol: "unwritten_rows",
            prelude: format!("#define QG_VARIANT 80\nconstexpr unsigned WRITTEN = {written};\n"),
            arch_specific: false,
        };
        let d = device.allocate(TOKENS * 4, "a test").unwrap();
        let params = Params { d: device_address(&*device, (&d).into()).unwrap() };
        let region = Region { name: "d", start: params.d as usize, len: d.len(), access: Access::Write };
        let geometry = Geometry {
            blocks: [1, 1, 1],
            threads: 32,
            shared_bytes: TOKENS as u32 * 32,
            params: bytemuck::bytes_of(&params),
            starts_early: false,
        };
        // SAFETY: `Params` is the kernel's parameter, and the region
        // is all that it accesses.
        unsafe { launch_spec(&*device, &spec, geometry, &[region]) }.unwrap();
        let mut sums = [0.0f32; TOKENS];
        device.download(&device.default_stream(), (&d).into(), bytemuck::cast_slice_mut(&mut sums)).unwrap();
        for (token, sum) in sums.into_iter().enumerate() {
            assert!(if token < written { sum == 16.0 } else { sum.is_nan() }, "token {token} of {written}: {sum}");
        }
    }
}
