//! Probe runs on a GPU and in the emulator. Results are words
//! `[case][lane][word]`.

use qgemm_cuda::{Geometry, launch_spec};
use qgemm_emu::model::Precision;
use qgemm_emu::{Access, Region};
use qgemm_hal::{Device, HalError, Variant};

use super::{Probe, geometry, spec, target};

/// GPU results for these inputs, from PTX of
/// the probe's variant.
pub fn on_gpu(device: &dyn Device, probe: &Probe, inputs: &[u32]) -> Result<Vec<u32>, HalError> {
    let cases = cases_of(probe, inputs);
    let mut outputs = vec![0u32; cases * probe.lanes() * probe.words_out];
    let stream = device.default_stream();
    let mut from = device.allocate(size_of_val(inputs), "the inputs")?;
    let to = device.allocate(size_of_val(outputs.as_slice()), "the outputs")?;
    device.upload(&stream, bytemuck::cast_slice(inputs), (&mut from).into())?;
    let address = |buffer| qgemm_cuda::device_address(device, buffer);
    let params = probe.params(address((&from).into())?, address((&to).into())?);
    let (spec, target) = (spec(probe.variant), target(probe.variant));
    // SAFETY: `Params` is the kernel's parameter; each of its
    // `cases` warps reads and writes its own words of the two
    // buffers, which are as long as all of them and live until
    // the results have been waited for.
    unsafe {
        let params = bytemuck::bytes_of(&params);
        launch_spec(device, &stream, &spec, Some(target), geometry(probe, cases), params)?;
    }
    device.download(&stream, (&to).into(), bytemuck::cast_slice_mut(&mut outputs))?;
    Ok(outputs)
}

/// Emulator results for these inputs, on the probe's variant.
pub fn on_emulator(probe: &Probe, inputs: &[u32]) -> Result<Vec<u32>, HalError> {
    let device = qgemm_emu::open(probe.variant.number())?;
    let device = &*device;
    // Recordings are an H200's, which has its own precision for
    // the instructions of older chips.
    qgemm_emu::set_precision(device, Precision::of(Variant::Sm90))?;
    let cases = cases_of(probe, inputs);
    let mut outputs = vec![0u32; cases * probe.lanes() * probe.words_out];
    let stream = device.default_stream();
    let mut from = device.allocate(size_of_val(inputs), "the inputs")?;
    let to = device.allocate(size_of_val(outputs.as_slice()), "the outputs")?;
    device.upload(&stream, bytemuck::cast_slice(inputs), (&mut from).into())?;
    let address = |buffer| qgemm_emu::device_address(device, buffer);
    let (from_address, to_address) = (address((&from).into())?, address((&to).into())?);
    let params = probe.params(from_address, to_address);
    let params = bytemuck::bytes_of(&params);
    let Geometry { grid: blocks, threads, shared_bytes } = geometry(probe, cases);
    let geometry = qgemm_emu::Geometry { blocks, threads, shared_bytes, params, starts_early: false };
    let region = |name, start, len, access| Region { name, start: start as usize, len, access };
    let regions = [
        region("the inputs", from_address, from.len(), Access::Read),
        region("the outputs", to_address, to.len(), Access::Write),
    ];
    // SAFETY: `Params` is the kernel's parameter, and nothing else
    // uses the two buffers.
    unsafe { qgemm_emu::launch_spec(device, &spec(probe.variant), geometry, &regions)? };
    device.download(&stream, (&to).into(), bytemuck::cast_slice_mut(&mut outputs))?;
    Ok(outputs)
}

fn cases_of(probe: &Probe, inputs: &[u32]) -> usize {
    inputs.len() / (probe.lanes() * probe.words_in())
}
