//! CPU-only features: operands in the caller's memory, thread
//! counts, and measured bandwidth.
//!
//! With them a CPU engine copies no activations:
//!
//! ```
//! use qgemm_api::{Context, cpu, quantize};
//!
//! let ctx = Context::from_device(cpu::open_with_threads(2)?);
//! let weight = ctx.load(&quantize(&[0.25; 64 * 128], 64, 128, "q8_0".parse()?)?.0)?;
//! let layer = ctx.layer(&weight, |problem| problem)?;
//!
//! let (x, mut d) = ([1.0f32; 2 * 128], [0.0f32; 2 * 64]);
//! let (x, mut out) = (cpu::slice(&x), cpu::slice_mut(&mut d));
//! layer.run(&ctx.default_stream(), 2, layer.args(&x, &mut out))?; // D is there when this returns
//! assert!(d.iter().all(|v| (v - 32.0).abs() < 0.1));
//!
//! // The other way: the values of a buffer, in place.
//! let mut buffer = ctx.upload(&[1.0f32, 2.0])?;
//! cpu::values_mut::<f32>(&mut buffer)?[0] = 3.0;
//! assert_eq!(cpu::values::<f32>(&buffer)?, [3.0, 2.0]);
//! # Ok::<(), qgemm_api::Error>(())
//! ```
//!
//! Slices with less than 16-byte alignment need
//! [`Problem::x_alignment`](crate::Problem::x_alignment) and its siblings.

use qgemm_formats::Element;
use qgemm_formats::element::{bytes_of, bytes_of_mut, values_of, values_of_mut};
use qgemm_hal::{BufferMut, BufferRef, DeviceId, HostMemory};

pub use qgemm_cpu::{open_with_pool, open_with_threads, rayon, wrap};
pub use qgemm_hal::{HostSlice, HostSliceMut, read_bandwidth};

use crate::context::check_copied;
use crate::error::Error;

/// Read operand over `values`.
pub fn slice<T: Element>(values: &[T]) -> HostSlice<'_> {
    HostSlice::new(DeviceId::CPU, bytes_of(values), T::TYPE)
}

/// Written operand over `values`.
pub fn slice_mut<T: Element>(values: &mut [T]) -> HostSliceMut<'_> {
    HostSliceMut::new(DeviceId::CPU, bytes_of_mut(values), T::TYPE)
}

/// Values of a view of host memory.
///
/// # Errors
/// When it belongs to another device, has another element type, is no whole number
/// of values, or is misaligned.
pub fn values<'a, T: Element>(view: impl Into<BufferRef<'a>>) -> Result<&'a [T], Error> {
    let view = view.into();
    check_copied::<T>("the view", view)?;
    let bytes = HostMemory::of_device(DeviceId::CPU, view, "the view")?;
    check::<T>(bytes)?;
    Ok(values_of(bytes).unwrap_or_default())
}

/// Values of a writable view of host memory.
///
/// # Errors
/// As [`values`].
pub fn values_mut<'a, T: Element>(view: impl Into<BufferMut<'a>>) -> Result<&'a mut [T], Error> {
    let view = view.into();
    check_copied::<T>("the view", view.view())?;
    let bytes = HostMemory::of_device_mut(DeviceId::CPU, view, "the view")?;
    check::<T>(bytes)?;
    Ok(values_of_mut(bytes).unwrap_or_default())
}

/// Checks that `bytes` are aligned, whole values of `T`.
fn check<T: Element>(bytes: &[u8]) -> Result<(), Error> {
    let (width, address) = (size_of::<T>(), bytes.as_ptr().addr());
    if !bytes.len().is_multiple_of(width) {
        return Err(Error::PartOfAValue { bytes: bytes.len(), width });
    }
    if !address.is_multiple_of(align_of::<T>()) {
        let (expected, got) = (align_of::<T>(), 1 << address.trailing_zeros());
        return Err(Error::Misaligned { operand: "the view", expected, got });
    }
    Ok(())
}
