//! Element types of memory.
//!
//! [`Element`] is a Rust type whose slices are copied to and from devices unchanged.
//! [`ElementType`] is the tag that device memory carries.

use std::fmt;

use crate::dtype::DType;

/// Element type of a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ElementType {
    /// Untyped bytes: codes, or memory without a declared element type.
    Bytes,
    /// Floating-point numbers.
    Number(DType),
    /// 32-bit integers, signed or unsigned: ids, offsets, lengths, column orders.
    Int32,
    /// Signed 8-bit integers: INT8 codes.
    Int8,
}

impl ElementType {
    /// Size of an element in bytes.
    pub const fn bytes(self) -> usize {
        match self {
            ElementType::Bytes | ElementType::Int8 => 1,
            ElementType::Number(dtype) => dtype.bytes(),
            ElementType::Int32 => 4,
        }
    }

    /// Lower-case name.
    pub const fn name(self) -> &'static str {
        match self {
            ElementType::Bytes => "bytes",
            ElementType::Number(dtype) => dtype.name(),
            ElementType::Int32 => "i32",
            ElementType::Int8 => "i8",
        }
    }
}

impl fmt::Display for ElementType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl From<DType> for ElementType {
    fn from(dtype: DType) -> Self {
        ElementType::Number(dtype)
    }
}

/// Rust type of buffer elements: [`f32`], [`half::f16`], [`half::bf16`],
/// 32-bit integers, `i8` or `u8`.
///
/// Device memory is little-endian. On a big-endian host only bytes are elements;
/// [`DType::encode`] makes them.
pub trait Element: bytemuck::Pod + sealed::Sealed {
    /// Tag of memory that holds these values. `u8` has [`ElementType::Bytes`].
    const TYPE: ElementType;
}

mod sealed {
    pub trait Sealed {}
}

macro_rules! elements {
    ($($(#[$cfg:meta])? $type:ty: $element:expr;)*) => {$(
        $(#[$cfg])?
        impl sealed::Sealed for $type {}
        $(#[$cfg])?
        impl Element for $type {
            const TYPE: ElementType = $element;
        }
    )*};
}

elements! {
    u8: ElementType::Bytes;
    i8: ElementType::Int8;
    #[cfg(target_endian = "little")]
    u32: ElementType::Int32;
    #[cfg(target_endian = "little")]
    i32: ElementType::Int32;
    #[cfg(target_endian = "little")]
    f32: ElementType::Number(DType::F32);
    #[cfg(target_endian = "little")]
    half::f16: ElementType::Number(DType::F16);
    #[cfg(target_endian = "little")]
    half::bf16: ElementType::Number(DType::BF16);
}

/// Views `values` as bytes.
pub fn bytes_of<T: Element>(values: &[T]) -> &[u8] {
    bytemuck::cast_slice(values)
}

/// Views `values` as mutable bytes.
pub fn bytes_of_mut<T: Element>(values: &mut [T]) -> &mut [u8] {
    bytemuck::cast_slice_mut(values)
}

/// Views `bytes` as values. `None` when size or alignment do not match.
pub fn values_of<T: Element>(bytes: &[u8]) -> Option<&[T]> {
    bytemuck::try_cast_slice(bytes).ok()
}

/// Mutable view of `bytes` as values, with the checks of [`values_of`].
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
        assert_eq!([f16::TYPE, bf16::TYPE], [DType::F16.into(), DType::BF16.into()]);
        assert_eq!([i32::TYPE, u32::TYPE, i8::TYPE, u8::TYPE].map(ElementType::name), ["i32", "i32", "i8", "bytes"]);
    }

    #[test]
    fn element_types_are_as_wide_as_their_values() {
        fn agrees<T: Element>() -> bool {
            T::TYPE.bytes() == size_of::<T>()
        }
        assert!(agrees::<u8>() && agrees::<i8>() && agrees::<u32>() && agrees::<i32>());
        assert!(agrees::<f32>() && agrees::<f16>() && agrees::<bf16>());
    }
}
