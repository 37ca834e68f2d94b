//! Tensors of numbers that are no weights and no activations: token identifiers, positions, masks. They are passed on as
//! they are.

use super::layer::elements;
use crate::weight::SharedBytes;

/// A number type that model files have and nothing here computes with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum NumberType {
    /// Signed integers of 8 bits.
    I8,
    /// Signed integers of 16 bits.
    I16,
    /// Signed integers of 32 bits.
    I32,
    /// Signed integers of 64 bits.
    I64,
    /// IEEE 754 binary64.
    F64,
}

impl NumberType {
    /// Every type.
    pub const ALL: [Self; 5] = [Self::I8, Self::I16, Self::I32, Self::I64, Self::F64];

    /// What GGUF and safetensors files call it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::I8 => "I8",
            Self::I16 => "I16",
            Self::I32 => "I32",
            Self::I64 => "I64",
            Self::F64 => "F64",
        }
    }

    /// Bytes of a number.
    pub const fn bytes(self) -> usize {
        match self {
            Self::I8 => 1,
            Self::I16 => 2,
            Self::I32 => 4,
            Self::I64 | Self::F64 => 8,
        }
    }

    /// The type number in GGUF files (`enum ggml_type`).
    pub const fn ggml_type(self) -> u32 {
        match self {
            Self::I8 => 24,
            Self::I16 => 25,
            Self::I32 => 26,
            Self::I64 => 27,
            Self::F64 => 28,
        }
    }

    /// The type of this name.
    pub(super) fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.name() == name)
    }
}

/// A tensor of such numbers.
#[derive(Clone, Debug)]
pub struct NumberTensor {
    /// Dimensions, outermost first.
    pub shape: Vec<usize>,
    /// Element type.
    pub kind: NumberType,
    /// The elements, little-endian.
    pub bytes: SharedBytes,
}

impl NumberTensor {
    /// The tensor that the file calls of type `type_name`; `bytes` may go on beyond it. `None` where the type is none of
    /// these, or the bytes are too few.
    pub(super) fn new(type_name: &str, shape: &[usize], bytes: &SharedBytes) -> Option<Self> {
        let kind = NumberType::named(type_name)?;
        let bytes = bytes.slice(0..elements(shape)?.checked_mul(kind.bytes())?)?;
        Some(Self { shape: shape.to_vec(), kind, bytes })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::gguf::ggml_type_name;

    #[test]
    fn names_are_those_of_ggml() {
        for kind in NumberType::ALL {
            assert_eq!(ggml_type_name(kind.ggml_type()), Some(kind.name()));
        }
    }

    #[test]
    fn tensors_end_where_their_numbers_do() {
        let bytes = SharedBytes::from(vec![1; 32]);
        let tensor = |name, shape: &[usize]| NumberTensor::new(name, shape, &bytes).map(|tensor| tensor.bytes.len());
        assert_eq!(tensor("I64", &[3]), Some(24));
        assert_eq!(tensor("I8", &[]), Some(1));
        assert_eq!(tensor("I64", &[5]), None);
        assert_eq!(tensor("I64", &[usize::MAX, 2]), None);
        assert_eq!(tensor("U8", &[1]), None);
    }
}
