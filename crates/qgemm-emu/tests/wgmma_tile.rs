//! Hopper kernel on a GPU: `wgmma` with A in registers and B by
//! TMA through an `mbarrier` pipeline.
//!
//! It uses the atoms in one page of code, from which tests can
//! remove parts (`wgmma_emulated.rs`).

mod hopper_tile;

use std::env;
use std::mem::MaybeUninit;
use std::path::PathBuf;
use std::sync::Arc;

use qgemm_cuda::cudarc::driver::sys;
use qgemm_cuda::{CACHE_VARIABLE, Target, build, device_address, launch_spec};
use qgemm_hal::{Device, HalError, Variant};

use hopper_tile::{BOX, Params, Problem, TensorMap, geometry, spec};

#[test]
fn the_kernel_compiles_without_spills() {
    let test = "the_kernel_compiles_without_spills";
    let temporary = tempfile::tempdir().unwrap();
    // A user's cache may be copied to a machine
    // without this compiler.
    let cache = env::var_os(CACHE_VARIABLE).map_or_else(|| temporary.path().into(), PathBuf::from);
    match build::compiler() {
        Ok((_, chips)) if chips.contains(&90) => {
            let artifact =
                build::compile(&cache, &spec(), Target::Cubin { arch: 90, specific: true }).unwrap().artifact;
            assert_eq!(artifact.target.to_string(), "sm_90a");
            assert_eq!(artifact.resources.map(|r| r.spill_bytes), Some(0));
        }
        Ok((version, _)) => qgemm_testkit::skipped(test, &format!("NVRTC {version} does not know sm_90")),
        Err(why) => qgemm_testkit::skipped(test, &why.to_string()),
    }
}

#[test]
fn a_hopper_gpu_multiplies_a_tile() {
    let Some(device) = hopper_or_skip("a_hopper_gpu_multiplies_a_tile") else { return };
    for problem in Problem::all() {
        problem.check(&on_gpu(&*device, &problem));
    }
}

fn hopper_or_skip(test: &str) -> Option<Arc<dyn Device>> {
    let why = match qgemm_cuda::open(0) {
        Ok(device) if device.info().variant == Some(Variant::Sm90) => return Some(device),
        Ok(device) => format!("the GPU is {} as {:?}", device.info().arch, device.info().variant),
        Err(why @ HalError::NoDevice { .. }) => why.to_string(),
        Err(other) => panic!("{other}"),
    };
    qgemm_testkit::skipped(test, &why);
    None
}

fn on_gpu(device: &dyn Device, problem: &Problem) -> Vec<f32> {
    let stream = device.default_stream();
    let upload = |bytes: &[u8]| {
        let mut buffer = device.allocate(bytes.len(), "an operand").unwrap();
        device.upload(&stream, bytes, (&mut buffer).into()).unwrap();
        buffer
    };
    let (w, x) = (upload(bytemuck::cast_slice(&problem.w)), upload(bytemuck::cast_slice(&problem.x)));
    let mut outputs = problem.poisoned_output();
    let d = upload(bytemuck::cast_slice(&outputs));
    let address = |buffer| device_address(device, buffer).unwrap();
    let map = encode(address((&x).into()), problem);
    let params = Params::new(map, address((&w).into()), address((&d).into()), problem.k as u64);
    // SAFETY: `Params` is the kernel's parameter, and its buffers
    // are as long as the problem says and live until the result
    // has been waited for.
    unsafe { launch_spec(device, &stream, &spec(), None, geometry(), bytemuck::bytes_of(&params)) }.unwrap();
    device.download(&stream, (&d).into(), bytemuck::cast_slice_mut(&mut outputs)).unwrap();
    outputs
}

/// Tensor map of X with the 128-byte swizzle and zero fill.
fn encode(x: u64, problem: &Problem) -> TensorMap {
    let mut map = MaybeUninit::<sys::CUtensorMap>::zeroed();
    let sizes = [problem.k as u64, problem.tokens as u64];
    let row_bytes = [problem.k as u64 * 2];
    let steps = [1u32, 1];
    // SAFETY: the sizes, strides and boxes are arrays of as many
    // entries as the call reads for two dimensions; the map is
    // written where its type has its alignment.
    let status = unsafe {
        sys::cuTensorMapEncodeTiled(
            map.as_mut_ptr(),
            sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
            2,
            x as *mut _,
            sizes.as_ptr(),
            row_bytes.as_ptr(),
            BOX.as_ptr(),
            steps.as_ptr(),
            sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
            sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
            sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_NONE,
            sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    };
    status.result().unwrap();
    // SAFETY: all bytes were zeroed before, and the call has
    // written what it needs.
    TensorMap(unsafe { map.assume_init() }.opaque)
}
