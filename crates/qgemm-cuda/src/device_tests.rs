//! Tests on a real GPU. They are skipped without
//! one, and print the reason.

use std::sync::Arc;
use std::time::Duration;

use qgemm_hal::{Buffer, Device, HalError};

use crate::function::Start;
use crate::gpu::Gpu;
use crate::stream::CudaStream;
use crate::{
    Geometry, Target, capture, device_address, devices, from_cudarc_stream, launch_spec, memory, open, probe,
    read_bandwidth, wrap_device_ptr, wrap_stream,
};

fn device_or_skip(test: &str) -> Option<Arc<dyn Device>> {
    match open(0) {
        Ok(device) => Some(device),
        Err(why @ HalError::NoDevice { .. }) => {
            qgemm_testkit::skipped(test, &why.to_string());
            None
        }
        Err(other) => panic!("{other}"),
    }
}

fn contents(device: &dyn Device, buffer: &Buffer) -> Vec<u8> {
    let mut bytes = vec![0; buffer.len()];
    device.download(&device.default_stream(), buffer.into(), &mut bytes).unwrap();
    bytes
}

fn address(buffer: &Buffer) -> u64 {
    memory::device_address(buffer.device(), buffer.into(), "the buffer").unwrap()
}

#[test]
fn a_device_knows_what_it_is() {
    let Some(device) = device_or_skip("a_device_knows_what_it_is") else { return };
    let info = device.info();
    eprintln!("{info:?}");
    assert_eq!(devices().unwrap()[0].name, info.name);
    assert!(info.units > 0 && info.memory_bytes > 1 << 30 && info.shared_bytes >= 48 * 1024);
    assert!((1e10..2e13).contains(&info.bandwidth) && info.rates.iter().all(|&(_, rate)| rate > 1e11), "{info:?}");
}

#[test]
fn an_ordinal_too_many_is_no_device() {
    let Some(_device) = device_or_skip("an_ordinal_too_many_is_no_device") else { return };
    assert!(matches!(open(1000), Err(HalError::NoDevice { .. })));
}

#[test]
fn memory_is_zeroed_aligned_and_copied() {
    let Some(device) = device_or_skip("memory_is_zeroed_aligned_and_copied") else { return };
    let stream = device.new_stream().unwrap();
    for len in [0, 1, 255, 4096, 1_000_003] {
        let mut buffer = device.allocate(len, "a test").unwrap();
        assert!(address(&buffer).is_multiple_of(256));
        assert_eq!(contents(&*device, &buffer), vec![0; len]);
        let bytes: Vec<u8> = (0..len).map(|i| (i * 7) as u8).collect();
        device.upload(&stream, &bytes, (&mut buffer).into()).unwrap();
        assert_eq!(contents(&*device, &buffer), bytes);
        device.fill(&stream, (&mut buffer).into(), 9).unwrap();
        device.synchronize(&stream).unwrap();
        assert_eq!(contents(&*device, &buffer), vec![9; len]);
        buffer.raw().check_guards().unwrap();
    }
}

#[test]
fn copies_that_do_not_fit_are_errors() {
    let Some(device) = device_or_skip("copies_that_do_not_fit_are_errors") else { return };
    let stream = device.default_stream();
    let mut buffer = device.allocate(16, "a test").unwrap();
    let error = device.upload(&stream, &[0; 17], (&mut buffer).into()).unwrap_err();
    assert!(matches!(error, HalError::OutOfBounds { end: 17, len: 16, .. }), "{error}");
    let error = device.download(&stream, (&buffer).into(), &mut [0; 17]).unwrap_err();
    assert!(matches!(error, HalError::OutOfBounds { end: 17, len: 16, .. }), "{error}");
    let part = buffer.slice_mut(8..16).unwrap();
    device.upload(&stream, &[5; 8], part).unwrap();
    assert_eq!(contents(&*device, &buffer), [0, 0, 0, 0, 0, 0, 0, 0, 5, 5, 5, 5, 5, 5, 5, 5]);
}

#[test]
fn exhausted_memory_is_an_error_that_passes() {
    let Some(device) = device_or_skip("exhausted_memory_is_an_error_that_passes") else { return };
    let bytes = device.info().memory_bytes as usize * 2;
    let error = device.allocate(bytes, "too much").unwrap_err();
    assert!(matches!(error, HalError::OutOfMemory { free: Some(_), what: "too much", .. }), "{error}");
    device.allocate(1 << 20, "enough").unwrap();
}

#[test]
fn a_write_outside_a_buffer_is_found() {
    let Some(device) = device_or_skip("a_write_outside_a_buffer_is_found") else { return };
    if !cfg!(debug_assertions) {
        eprintln!("skipped: a_write_outside_a_buffer_is_found: no guard bands in release builds");
        return;
    }
    let stream = device.default_stream();
    for offset in [-1i64, 100] {
        let buffer = device.allocate(100, "a test").unwrap();
        // SAFETY: the byte is in a guard band of the allocation,
        // which lives to the end of the block.
        let mut outside =
            unsafe { wrap_device_ptr(&*device, address(&buffer).wrapping_add_signed(offset), 1) }.unwrap();
        device.fill(&stream, (&mut outside).into(), 1).unwrap();
        device.synchronize(&stream).unwrap();
        let error = buffer.raw().check_guards().unwrap_err();
        assert!(matches!(error, HalError::GuardBand { len: 100, .. }), "{error}");
    }
}

#[test]
fn the_callers_memory_is_used_in_place_and_not_freed() {
    let Some(device) = device_or_skip("the_callers_memory_is_used_in_place_and_not_freed") else { return };
    let owner = device.allocate(64, "the caller's").unwrap();
    // SAFETY: the bytes belong to `owner`, which lives longer.
    let mut borrowed = unsafe { wrap_device_ptr(&*device, address(&owner) + 32, 32) }.unwrap();
    device.upload(&device.default_stream(), &[3; 32], (&mut borrowed).into()).unwrap();
    drop(borrowed);
    assert_eq!(contents(&*device, &owner), [[0; 32], [3; 32]].concat());
}

#[test]
fn the_callers_streams_are_used() {
    let Some(device) = device_or_skip("the_callers_streams_are_used") else { return };
    let mut buffer = device.allocate(8, "a test").unwrap();
    let context = cudarc::driver::CudaContext::new(0).unwrap();
    let cudarc_stream = context.new_stream().unwrap();
    let raw = cudarc_stream.cu_stream();
    let stream = from_cudarc_stream(&*device, cudarc_stream.clone()).unwrap();
    assert_eq!(CudaStream::of(device.info().id, &stream).unwrap().handle(), raw);
    device.fill(&stream, (&mut buffer).into(), 4).unwrap();
    cudarc_stream.synchronize().unwrap();
    assert_eq!(contents(&*device, &buffer), [4; 8]);
    // The legacy default stream (0), the per-thread stream
    // (2), and a foreign handle.
    for handle in [std::ptr::null_mut(), std::ptr::without_provenance_mut(2), raw.cast()] {
        // SAFETY: these streams exist as long as the context and `cudarc_stream`.
        let stream = unsafe { wrap_stream(&*device, handle) }.unwrap();
        device.fill(&stream, (&mut buffer).into(), 6).unwrap();
        device.synchronize(&stream).unwrap();
    }
    assert_eq!(contents(&*device, &buffer), [6; 8]);
}

#[test]
fn events_measure_time() {
    let Some(device) = device_or_skip("events_measure_time") else { return };
    let stream = device.new_stream().unwrap();
    let mut buffer = device.allocate(64 << 20, "a test").unwrap();
    let start = device.record(&stream).unwrap();
    device.fill(&stream, (&mut buffer).into(), 1).unwrap();
    let end = device.record(&stream).unwrap();
    let time = device.elapsed(&start, &end).unwrap();
    assert!(time > Duration::from_micros(1) && time < Duration::from_secs(1), "{time:?}");
}

#[test]
fn a_kernel_is_loaded_once_and_reads_memory() {
    let Some(device) = device_or_skip("a_kernel_is_loaded_once_and_reads_memory") else { return };
    let gpu = Gpu::of(&*device).unwrap();
    let first = gpu.kernel(&probe::spec()).unwrap();
    let second = gpu.kernel(&probe::spec()).unwrap();
    assert!(first.is_same(&second));
    let rate = read_bandwidth(&*device, 1 << 30).unwrap();
    eprintln!("{}: read {:.0} GB/s, expected {:.0}", device.info().name, rate / 1e9, device.info().bandwidth / 1e9);
    assert!(rate > 0.3 * device.info().bandwidth, "{rate}");
}

#[test]
fn a_kernel_is_launched_by_its_specification() {
    let Some(device) = device_or_skip("a_kernel_is_launched_by_its_specification") else { return };
    let data = device.allocate(4096, "a test").unwrap();
    // Fresh memory is zero, so the kernel never
    // writes and needs no sink.
    let params = [device_address(&*device, (&data).into()).unwrap(), 4096 / 16, 0u64];
    let geometry = Geometry { grid: [2, 1, 1], threads: 128, shared_bytes: 0 };
    for target in [None, Some(Target::Ptx { arch: 80, specific: false })] {
        let stream = device.default_stream();
        let bytes = bytemuck::bytes_of(&params);
        // SAFETY: the three words are the kernel's parameter, and it reads
        // the 256 words of `data`, which live longer.
        unsafe { launch_spec(&*device, &stream, &probe::spec(), target, geometry, bytes) }.unwrap();
        device.synchronize(&stream).unwrap();
    }
}

#[test]
fn a_launch_the_driver_refuses_is_an_error() {
    let Some(device) = device_or_skip("a_launch_the_driver_refuses_is_an_error") else { return };
    let function = Gpu::of(&*device).unwrap().kernel(&probe::spec()).unwrap();
    // SAFETY: the launch is refused, so the zero addresses are never
    // used; 24 bytes are the kernel's parameter.
    let error =
        unsafe { function.launch(&device.default_stream(), [1, 1, 1], 4096, 0, &[0; 24], Start::InOrder) }.unwrap_err();
    assert!(matches!(&error, HalError::Driver { message, .. } if message.contains("probe:read:")), "{error}");
}

#[test]
fn a_graph_replays_what_was_captured() {
    let Some(device) = device_or_skip("a_graph_replays_what_was_captured") else { return };
    let stream = device.new_stream().unwrap();
    let mut owner = device.allocate(32, "a test").unwrap();
    // SAFETY: the bytes belong to `owner`, which lives longer.
    let mut captured = unsafe { wrap_device_ptr(&*device, address(&owner), 32) }.unwrap();
    let graph = capture::<_, HalError>(&*device, &stream, || device.fill(&stream, (&mut captured).into(), 8)).unwrap();
    for _ in 0..2 {
        device.fill(&stream, (&mut owner).into(), 0).unwrap();
        graph.replay(&stream).unwrap();
        device.synchronize(&stream).unwrap();
        assert_eq!(contents(&*device, &owner), [8; 32]);
    }
}

#[test]
fn a_failed_capture_leaves_the_stream_usable() {
    let Some(device) = device_or_skip("a_failed_capture_leaves_the_stream_usable") else { return };
    let stream = device.new_stream().unwrap();
    let error = capture(&*device, &stream, || Err(HalError::BadDeviceName { name: "stop".into() })).unwrap_err();
    assert!(matches!(error, HalError::BadDeviceName { .. }), "{error}");
    let mut buffer = device.allocate(4, "a test").unwrap();
    device.fill(&stream, (&mut buffer).into(), 2).unwrap();
    device.synchronize(&stream).unwrap();
    assert_eq!(contents(&*device, &buffer), [2; 4]);
}

#[test]
fn objects_of_other_backends_are_refused() {
    let Some(device) = device_or_skip("objects_of_other_backends_are_refused") else { return };
    let noop = qgemm_hal::noop::open("noop".parse().unwrap()).unwrap();
    let foreign = noop.allocate(16, "a test").unwrap();
    let wrong = |result: Result<(), HalError>| matches!(result, Err(HalError::WrongDevice { .. }));
    assert!(wrong(device.download(&device.default_stream(), (&foreign).into(), &mut [0; 4])));
    assert!(wrong(device.synchronize(&noop.default_stream())));
    assert!(wrong(read_bandwidth(&*noop, 1024).map(drop)));
    assert!(wrong(device_address(&*device, (&foreign).into()).map(drop)));
}

/// Shapes with partial tiles, k-tiles and strips, and one
/// with several million values.
#[test]
fn weights_are_packed_as_on_the_host() {
    let Some(device) = device_or_skip("weights_are_packed_as_on_the_host") else { return };
    let stream = device.default_stream();
    for format in qgemm_formats::Format::all() {
        let block = format.block_len;
        let ragged = if format.ragged_k { 2 * block + 5 } else { 3 * block };
        for (n, k) in [(1, block), (19, ragged), (33, 1088usize.next_multiple_of(block)), (1030, 4096 + 2 * block)] {
            let weight = qgemm_testkit::weight(qgemm_testkit::WeightKind::Raw, format, n, k, None, 1).unwrap();
            let packed = contents(&*device, &device.pack(&stream, &weight).unwrap());
            let layout = qgemm_formats::prepack::PackedLayout::new(format, device.fragment_layout(format)).unwrap();
            assert!(packed == layout.pack(&weight), "{format} of {n} x {k}");
        }
    }
}
