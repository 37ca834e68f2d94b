//! Common parts of the adapter tests.

use std::sync::Arc;

use qgemm_hal::{Buffer, Device, HalError};

/// First adapter. `None` without one, with the reason printed.
pub fn adapter() -> Option<Arc<dyn Device>> {
    match qgemm_wgpu::open(0) {
        Ok(device) => Some(device),
        Err(HalError::NoDevice { device, why }) => {
            qgemm_testkit::skipped(&format!("tests on {device}"), &why);
            None
        }
        Err(error) => panic!("an adapter is there, but does not open: {error}"),
    }
}

/// New buffer with `bytes`.
pub fn upload(device: &dyn Device, bytes: &[u8]) -> Buffer {
    let mut buffer = device.allocate(bytes.len(), "test").expect("small");
    device.upload(&device.default_stream(), bytes, (&mut buffer).into()).expect("fits");
    buffer
}

/// Downloads all bytes of `buffer`.
pub fn download(device: &dyn Device, buffer: &Buffer) -> Vec<u8> {
    let mut bytes = vec![0; buffer.len()];
    device.download(&device.default_stream(), buffer.into(), &mut bytes).expect("fits");
    bytes
}
