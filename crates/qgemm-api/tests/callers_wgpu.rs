//! Multiplying on a wgpu device, on a queue and in buffers that the caller made.
#![cfg(feature = "wgpu")]

use qgemm_api::wgpu::wgpu::{self, BufferUsages, Features};
use qgemm_api::wgpu::{from_device, wrap_buffer};
use qgemm_api::{Args, Context, DType, Error, Problem, quantize};

#[test]
fn results_are_in_the_callers_buffer_for_what_is_submitted_next() -> Result<(), Error> {
    let Some((device, queue)) = engine() else { return Ok(()) };
    let ctx = Context::from_device(from_device(&device, &queue)?);
    let (host, _) = quantize(&[0.5; 48 * 128], 48, 128, "q8_0".parse()?)?;
    let weight = ctx.load(&host)?;
    let plan = ctx.plan(&Problem::new(&weight, 2).x_dtype(DType::F32).d_dtype(DType::F32))?;

    let make = |values: usize, usage| {
        let size = values as u64 * 4;
        device.create_buffer(&wgpu::BufferDescriptor { label: None, size, usage, mapped_at_creation: false })
    };
    let x = make(2 * 128, BufferUsages::STORAGE | BufferUsages::COPY_DST);
    let d = make(2 * 48, BufferUsages::STORAGE | BufferUsages::COPY_SRC);
    let read = make(2 * 48, BufferUsages::MAP_READ | BufferUsages::COPY_DST);
    let (ours_x, mut ours_d) = (wrap_buffer(&**ctx.device(), &x)?, wrap_buffer(&**ctx.device(), &d)?);

    // The caller's work before and after a launch, in the order in which it is submitted.
    queue.write_buffer(&x, 0, &DType::F32.encode(&[1.0; 2 * 128]));
    plan.run(&ctx.default_stream(), Args::new(&ours_x, &weight, &mut ours_d))?;
    let mut encoder = device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
    encoder.copy_buffer_to_buffer(&d, 0, &read, 0, read.size());
    queue.submit([encoder.finish()]);
    read.slice(..).map_async(wgpu::MapMode::Read, |mapped| mapped.expect("maps"));
    device.poll(wgpu::PollType::wait_indefinitely()).expect("finishes");
    let view = read.slice(..).get_mapped_range().expect("mapped");
    let values = DType::F32.decode(&view);
    assert!(values.len() == 96 && values.iter().all(|v| (v - 64.0).abs() < 0.1), "{values:?}");
    Ok(())
}

/// A device as an engine opens it, or `None` with the reason printed where there is no adapter.
fn engine() -> Option<(wgpu::Device, wgpu::Queue)> {
    let instance = wgpu::Instance::new(wgpu::InstanceDescriptor::new_without_display_handle());
    let adapter = match pollster::block_on(instance.request_adapter(&wgpu::RequestAdapterOptions::default())) {
        Ok(adapter) => adapter,
        Err(error) => {
            qgemm_testkit::skipped("tests on a caller's wgpu device", &error.to_string());
            return None;
        }
    };
    let descriptor = wgpu::DeviceDescriptor {
        required_features: Features::IMMEDIATES,
        required_limits: adapter.limits(),
        ..Default::default()
    };
    Some(pollster::block_on(adapter.request_device(&descriptor)).expect("the adapter has them"))
}
