//! Buffers, streams and events on an adapter.

mod common;

use std::time::Duration;

use common::{adapter, download, upload};
use qgemm_hal::{DeviceId, DeviceKind, HalError};

#[test]
fn adapters_are_listed_and_missing_ones_refused() {
    let count = match qgemm_wgpu::devices() {
        Ok(devices) => {
            assert!(!devices.is_empty());
            for (info, ordinal) in devices.iter().zip(0..) {
                assert_eq!((info.id.kind, info.id.ordinal), (DeviceKind::Wgpu, ordinal));
                assert!(
                    !info.name.is_empty()
                        && !info.driver.is_empty()
                        && info.bandwidth > 0.0
                        && info.max_buffer_bytes > 0
                );
            }
            devices.len()
        }
        Err(HalError::NoDevice { why, .. }) => {
            assert!(!why.is_empty());
            0
        }
        Err(error) => panic!("{error}"),
    };
    assert!(matches!(qgemm_wgpu::open(count as u32), Err(HalError::NoDevice { .. })));
}

#[test]
fn buffers_begin_zeroed_whatever_their_length() {
    let Some(device) = adapter() else { return };
    for len in [0, 1, 3, 4, 5, 1023] {
        let buffer = device.allocate(len, "test").expect("small");
        assert_eq!(buffer.len(), len);
        assert_eq!(download(&*device, &buffer), vec![0; len]);
    }
}

#[test]
fn uploads_and_fills_touch_their_bytes_only() {
    let Some(device) = adapter() else { return };
    let stream = device.default_stream();
    let original: Vec<u8> = (0..37).map(|i| i ^ 0x5a).collect();
    for start in 0..9 {
        for end in [start, start + 1, start + 2, start + 3, start + 5, start + 8, start + 11, 36, 37] {
            let fresh: Vec<u8> = (0..end - start).map(|i| 200 + i as u8).collect();
            let mut buffer = upload(&*device, &original);
            let mut expected = original.clone();
            device.upload(&stream, &fresh, buffer.slice_mut(start..end).expect("inside")).expect("fits");
            expected[start..end].copy_from_slice(&fresh);
            assert_eq!(download(&*device, &buffer), expected, "upload {start}..{end}");
            for value in [0, 0xff] {
                device.fill(&stream, buffer.slice_mut(start..end).expect("inside"), value).expect("fits");
                expected[start..end].fill(value);
                assert_eq!(download(&*device, &buffer), expected, "fill {start}..{end} with {value}");
            }
            let mut part = vec![0; end - start];
            device.download(&stream, buffer.slice(start..end).expect("inside"), &mut part).expect("fits");
            assert_eq!(part, expected[start..end], "download {start}..{end}");
        }
    }
}

#[test]
fn copies_that_do_not_fit_are_refused() {
    let Some(device) = adapter() else { return };
    let stream = device.default_stream();
    let mut buffer = upload(&*device, &[1, 2, 3]);
    let error = device.upload(&stream, &[0; 4], (&mut buffer).into()).expect_err("4 into 3");
    assert!(matches!(error, HalError::OutOfBounds { what: "upload", end: 4, len: 3, .. }), "{error}");
    let error = device.download(&stream, (&buffer).into(), &mut [0; 4]).expect_err("4 from 3");
    assert!(matches!(error, HalError::OutOfBounds { what: "download", end: 4, len: 3, .. }), "{error}");
    assert_eq!(download(&*device, &buffer), [1, 2, 3]);
}

#[test]
fn allocations_beyond_the_limit_are_refused() {
    let Some(device) = adapter() else { return };
    for bytes in [1 << 62, usize::MAX] {
        let error = device.allocate(bytes, "everything").expect_err("too large");
        let HalError::Unsupported { what, why, .. } = &error else { panic!("{error}") };
        assert!(what.contains("everything") && why.contains("max_buffer_size"), "{error}");
    }
}

#[test]
fn objects_of_another_device_are_refused() {
    let Some(ours) = adapter() else { return };
    let theirs = qgemm_hal::noop::open(DeviceId { kind: DeviceKind::Noop, ordinal: 0 }).expect("always there");
    let mut buffer = theirs.allocate(8, "test").expect("small");
    let stream = ours.default_stream();
    let error = ours.upload(&stream, &[0; 8], (&mut buffer).into()).expect_err("foreign buffer");
    assert!(matches!(error, HalError::WrongDevice { .. }), "{error}");
    let error = ours.synchronize(&theirs.default_stream()).expect_err("foreign stream");
    assert!(matches!(error, HalError::WrongDevice { .. }), "{error}");
}

#[test]
fn who_opens_an_open_adapter_shares_its_memory() {
    let (Some(ours), Some(theirs)) = (adapter(), adapter()) else { return };
    let mut buffer = theirs.allocate(8, "test").expect("small");
    ours.upload(&ours.default_stream(), &[7; 8], (&mut buffer).into()).expect("one device");
    assert_eq!(download(&*theirs, &buffer), [7; 8]);
}

#[test]
fn events_measure_the_work_between_them() {
    let Some(device) = adapter() else { return };
    let stream = device.new_stream().expect("streams are free");
    let mut buffer = device.allocate(32 << 20, "test").expect("32 MiB");
    let start = device.record(&stream).expect("event");
    for _ in 0..4 {
        device.fill(&stream, (&mut buffer).into(), 0).expect("fits");
    }
    let end = device.record(&stream).expect("event");
    device.synchronize(&stream).expect("healthy");
    let elapsed = device.elapsed(&start, &end).expect("recorded");
    assert!(elapsed > Duration::ZERO && elapsed < Duration::from_secs(60), "{elapsed:?}");
    assert_eq!(device.elapsed(&end, &start).expect("recorded"), Duration::ZERO);
}

#[test]
fn threads_share_a_device() {
    let Some(device) = adapter() else { return };
    std::thread::scope(|scope| {
        for thread in 0..4u8 {
            let device = &*device;
            scope.spawn(move || {
                for round in 0..50 {
                    let bytes: Vec<u8> = (0..100 + round).map(|i| i ^ thread).collect();
                    assert_eq!(download(device, &upload(device, &bytes)), bytes);
                }
            });
        }
    });
}
