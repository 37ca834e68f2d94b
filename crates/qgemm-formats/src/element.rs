//! [`Element`]: the Rust types whose slices are copied to and from devices as they are.

use crate::dtype::DType;

/// A type of numbers as they are stored in memory: [`f32`], [`half::f16`], [`half::bf16`], the `u32` of a column order, or bytes.
///
/// Memory of devices is little-endian, so that where the host's is not, only bytes are elements ([`DType::encode`] makes them).
pub trait Element: bytemuck::Pod + sealed::Sealed {
    /// As operands of problems call it; `None` for what is no number of a matrix.
    const DTYPE: Option<DType>;
}

mod sealed {
    pub trait Sealed {}
}

macro_rules! elements {
    ($($(#[$cfg:meta])? $type:ty: $dtype:expr;)*) => {$(
        $(#[$cfg])?
        impl sealed::Sealed for $type {}
        $(#[$cfg])?
        impl Element for $type {
            const DTYPE: Option<DType> = $dtype;
        }
    )*};
}

elements! {
    u8: None;
    #[cfg(target_endian = "little")]
    u32: None;
    #[cfg(target_endian = "little")]
    f32: Some(DType::F32);
    #[cfg(target_endian = "little")]
    half::f16: Some(DType::F16);
    #[cfg(target_endian = "little")]
    half::bf16: Some(DType::BF16);
}

/// The bytes of `values`.
pub fn bytes_of<T: Element>(values: &[T]) -> &[u8] {
    bytemuck::cast_slice(values)
}

/// The bytes of `values`, to be written.
pub fn bytes_of_mut<T: Element>(values: &mut [T]) -> &mut [u8] {
    bytemuck::cast_slice_mut(values)
}

/// The values that `bytes` are, unless they are no whole number of them or begin where none may.
pub fn values_of<T: Element>(bytes: &[u8]) -> Option<&[T]> {
    bytemuck::try_cast_slice(bytes).ok()
}

/// The values that `bytes` are, to be written; as [`values_of`].
pub fn values_of_mut<T: Element>(bytes: &mut [u8]) -> Option<&mut [T]> {
    bytemuck::try_cast_slice_mut(bytes).ok()
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};

    use super::*;

    #[test]
    fn bytes_are_those_that_types_encode() {
        let values = [1.0, -2.5, 65504.0, 0.0];
        assert_eq!(bytes_of(&values), DType::F32.encode(&values));
        assert_eq!(bytes_of(&values.map(f16::from_f32)), DType::F16.encode(&values));
        assert_eq!(bytes_of(&values.map(bf16::from_f32)), DType::BF16.encode(&values));
        let mut copy = [f16::ZERO; 4];
        bytes_of_mut(&mut copy).copy_from_slice(&DType::F16.encode(&values));
        assert_eq!(copy, values.map(f16::from_f32));
        assert_eq!([f16::DTYPE, bf16::DTYPE, u8::DTYPE], [Some(DType::F16), Some(DType::BF16), None]);
    }
}
