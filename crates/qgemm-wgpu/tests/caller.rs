//! The caller's devices and buffers: with its features and
//! limits, and without copies.

#[path = "common/case.rs"]
mod case;
mod common;

use std::sync::Arc;

use case::{Case, Options};
use common::{adapter, download};
use qgemm_formats::{DType, Format};
use qgemm_hal::{Device, DeviceKind, Feature, HalError};
use qgemm_wgpu::wgpu::{self, BufferUsages, Features, Limits};
use qgemm_wgpu::{from_device, report_loss, wrap_buffer};

/// Adapter as an engine finds it. `None` without one,
/// with the reason printed.
fn found() -> Option<wgpu::Adapter> {
    adapter()?;
    let instance = wgpu::Instance::new(wgpu::InstanceDescriptor::new_without_display_handle());
    let adapter = pollster::block_on(instance.request_adapter(&wgpu::RequestAdapterOptions::default()));
    Some(adapter.expect("one was found"))
}

/// Device as an engine opens it.
fn engine_on(
    adapter: &wgpu::Adapter,
    features: Features,
    change: impl FnOnce(&mut Limits),
) -> (wgpu::Device, wgpu::Queue) {
    let mut required_limits = adapter.limits();
    change(&mut required_limits);
    let descriptor = wgpu::DeviceDescriptor { required_features: features, required_limits, ..Default::default() };
    pollster::block_on(adapter.request_device(&descriptor)).expect("the adapter has them")
}

fn engine(features: Features, change: impl FnOnce(&mut Limits)) -> Option<(wgpu::Device, wgpu::Queue)> {
    Some(engine_on(&found()?, features, change))
}

fn open(features: Features, change: impl FnOnce(&mut Limits)) -> Option<Arc<dyn Device>> {
    let (device, queue) = engine(features, change)?;
    Some(from_device(&device, &queue).expect("has what kernels need"))
}

fn format(name: &str) -> Format {
    name.parse().expect("exists")
}

#[test]
fn sums_need_no_subgroups() {
    let Some(device) = open(Features::IMMEDIATES, |_| {}) else { return };
    assert!(!device.info().features.contains(&Feature::Subgroups));
    for m in [1, 2, 3, 7] {
        let case = Case::new(format("q4_0"), [m, 85, 1024], DType::F16, DType::F32, Options::default(), 1);
        assert!(case.check_all(&*device) >= 4);
    }
}

#[test]
fn little_workgroup_memory_suffices() {
    let change = |limits: &mut Limits| limits.max_compute_workgroup_storage_size = 16 << 10;
    let Some(device) = open(Features::IMMEDIATES, change) else { return };
    for (m, name) in [(1, "q4_0"), (2, "mxfp4"), (4, "f16"), (8, "q8_0"), (9, "iq4_nl")] {
        let case = Case::new(format(name), [m, 85, 1024], DType::F16, DType::F32, Options::default(), 1);
        assert!(case.check_all(&*device) >= 2);
    }
}

#[test]
fn operands_beyond_a_binding_take_several_launches() {
    let change = |limits: &mut Limits| limits.max_storage_buffer_binding_size = 64 << 10;
    let Some(device) = open(Features::IMMEDIATES | Features::SUBGROUP, change) else { return };
    let c = Some(DType::F32);
    // Tiles of W of 13 440 bytes, four to a binding. X, C and D exceed
    // a binding, with 40 rows of 4 KiB in one.
    for (m, n, options) in [
        (1, 300, Options::default()),
        (40, 301, Options { c, bias: Some(DType::F16), ..Options::default() }),
        (40, 75, Options { gaps: true, c, ..Options::default() }),
    ] {
        for d in [DType::F16, DType::F32] {
            let case = Case::new(format("q6_k"), [m, n, 1024], DType::F32, d, options, 2);
            case.check(&*device, 0, false);
        }
    }
    // A single row of D exceeds the binding.
    let case = Case::new(format("q8_0"), [1, 17_000, 32], DType::F32, DType::F32, Options::default(), 2);
    let why = device.catalog().gemm[0].configs(&case.op, device.info()).expect_err("68 kB").why;
    assert!(why.contains("a row of D takes 68000 bytes"), "{why}");
}

#[test]
fn wrapped_buffers_are_read_and_written_in_place() {
    let Some((device, queue)) = engine(Features::IMMEDIATES, |_| {}) else { return };
    let ours = from_device(&device, &queue).expect("has what kernels need");
    assert!(ours.info().id.kind == DeviceKind::Wgpu && ours.info().id.ordinal >= 1000);
    let usage = BufferUsages::STORAGE | BufferUsages::COPY_DST | BufferUsages::COPY_SRC;
    let buffer =
        device.create_buffer(&wgpu::BufferDescriptor { label: None, size: 8, usage, mapped_at_creation: false });
    queue.write_buffer(&buffer, 0, &[1, 2, 3, 4, 5, 6, 7, 8]);
    let mut wrapped = wrap_buffer(&*ours, &buffer).expect("usable");
    assert_eq!(download(&*ours, &wrapped), [1, 2, 3, 4, 5, 6, 7, 8]);
    ours.upload(&ours.default_stream(), &[9; 3], wrapped.slice_mut(1..4).expect("inside")).expect("fits");
    let again = wrap_buffer(&*ours, &buffer).expect("usable");
    assert_eq!(download(&*ours, &again), [1, 9, 9, 9, 5, 6, 7, 8]);
}

#[test]
fn what_cannot_be_wrapped_is_refused_with_what_to_change() {
    let Some(adapter) = found() else { return };
    let (device, queue) = engine_on(&adapter, Features::IMMEDIATES, |_| {});
    let ours = from_device(&device, &queue).expect("has what kernels need");
    let make = |device: &wgpu::Device, size, usage| {
        device.create_buffer(&wgpu::BufferDescriptor { label: None, size, usage, mapped_at_creation: false })
    };
    let refusal = |buffer: &wgpu::Buffer| wrap_buffer(&*ours, buffer).expect_err("unusable");
    let error = refusal(&make(&device, 16, BufferUsages::COPY_DST));
    assert!(error.to_string().contains("add BufferUsages::STORAGE"), "{error}");
    let error = refusal(&make(&device, 6, BufferUsages::STORAGE));
    assert!(error.to_string().contains("multiple of 4"), "{error}");
    let (other, _queue) = engine_on(&adapter, Features::IMMEDIATES, |_| {});
    let error = refusal(&make(&other, 16, BufferUsages::STORAGE));
    assert!(matches!(error, HalError::WrongDevice { .. }), "{error}");

    let mut kernels_only = wrap_buffer(&*ours, &make(&device, 16, BufferUsages::STORAGE)).expect("usable by kernels");
    let stream = ours.default_stream();
    let error = ours.upload(&stream, &[0; 16], (&mut kernels_only).into()).expect_err("no COPY_DST");
    assert!(
        matches!(&error, HalError::Unsupported { why, .. } if why.contains("add BufferUsages(COPY_DST)")),
        "{error}"
    );
    let error = ours.download(&stream, (&kernels_only).into(), &mut [0; 16]).expect_err("no COPY_SRC");
    assert!(matches!(&error, HalError::Unsupported { why, .. } if why.contains("COPY_SRC")), "{error}");
}

#[test]
fn a_device_without_what_kernels_need_is_refused_with_what_to_ask_for() {
    let Some((device, queue)) = engine(Features::empty(), |limits| limits.max_immediate_size = 0) else { return };
    let error = from_device(&device, &queue).expect_err("no immediates");
    assert!(error.to_string().contains("request Features::IMMEDIATES"), "{error}");
    let few = |limits: &mut Limits| limits.max_storage_buffers_per_shader_stage = 8;
    let Some((device, queue)) = engine(Features::IMMEDIATES, few) else { return };
    let error = from_device(&device, &queue).expect_err("eight buffers");
    assert!(error.to_string().contains("at least 9"), "{error}");
}

#[test]
fn a_loss_that_the_caller_reports_is_an_error_of_every_call() {
    let Some((device, queue)) = engine(Features::IMMEDIATES, |_| {}) else { return };
    let ours = from_device(&device, &queue).expect("has what kernels need");
    let told = ours.clone();
    device.set_device_lost_callback(move |_, message| report_loss(&*told, &message).expect("our own"));
    device.destroy();
    device.poll(wgpu::PollType::wait_indefinitely()).expect("polls");
    let error = ours.allocate(8, "test").expect_err("lost");
    assert!(matches!(error, HalError::DeviceLost { call: "allocating a buffer", .. }), "{error}");
}
