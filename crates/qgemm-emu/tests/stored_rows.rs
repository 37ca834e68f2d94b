//! `stmatrix`: every element is where the instruction's layout
//! has it, and `ldmatrix` restores the registers.

use bytemuck::{Pod, Zeroable};
use qgemm_cuda::KernelSpec;
use qgemm_emu::{Access, Geometry, Region, device_address, launch_spec};
use qgemm_hal::HalError;

const LANES: usize = 32;
const MATRICES: usize = 4;
const ROWS: usize = MATRICES * 8;

#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct Params {
    d: u64,
    transposed: u64,
}

#[test]
fn stored_matrices_are_transposed_and_loaded_again() {
    check("stored_matrices_are_transposed_and_loaded_again", true);
}

#[test]
fn stored_matrices_have_their_rows_and_are_loaded_again() {
    check("stored_matrices_have_their_rows_and_are_loaded_again", false);
}

fn check(test: &str, transposed: bool) {
    let device = match qgemm_emu::open(90) {
        Ok(device) => device,
        Err(why @ HalError::NoDevice { .. }) => return qgemm_testkit::skipped(test, &why.to_string()),
        Err(other) => panic!("{other}"),
    };
    let spec = KernelSpec {
        name: "stored_rows".into(),
        entry: "kernels/stored_rows.cu",
        text: include_str!("kernels/stored_rows.cu"),
        symbol: "stored_rows",
        prelude: "#define QG_VARIANT 90\n".into(),
        arch_specific: false,
    };
    // Restored registers, then the rows in shared memory.
    let mut words = [0u32; MATRICES * LANES + ROWS * 4];
    let d = device.allocate(size_of_val(&words), "a test").unwrap();
    let params = Params { d: device_address(&*device, (&d).into()).unwrap(), transposed: transposed.into() };
    let region = Region { name: "d", start: params.d as usize, len: d.len(), access: Access::Write };
    let geometry = Geometry {
        blocks: [1, 1, 1],
        threads: LANES as u32,
        shared_bytes: (ROWS * 16) as u32,
        params: bytemuck::bytes_of(&params),
        starts_early: false,
    };
    // SAFETY: `Params` is the kernel's parameter, and the region
    // is all that it accesses.
    unsafe { launch_spec(&*device, &spec, geometry, &[region]) }.unwrap();
    device.download(&device.default_stream(), (&d).into(), bytemuck::cast_slice_mut(&mut words)).unwrap();
    let (registers, rows) = words.split_at(MATRICES * LANES);
    let rows: &[u16] = bytemuck::cast_slice(rows);
    // Half i of register m in lane l holds the
    // number 64 l + 8 m + i.
    let number = |lane: usize, matrix: usize, half: usize| (64 * lane + 8 * matrix + half) as u16;
    for lane in 0..LANES {
        for matrix in 0..MATRICES {
            let [low, high] = [number(lane, matrix, 0), number(lane, matrix, 1)];
            let register = registers[matrix * LANES + lane];
            assert_eq!(register, u32::from(low) | u32::from(high) << 16, "register {matrix} of lane {lane}");
            for (half, value) in [low, high].into_iter().enumerate() {
                let (own, pair) = (lane / 4, lane % 4 * 2 + half);
                let (row, column) = if transposed { (pair, own) } else { (own, pair) };
                assert_eq!(rows[(matrix * 8 + row) * 8 + column], value, "matrix {matrix}, row {row}, column {column}");
            }
        }
    }
}
