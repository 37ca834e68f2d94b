//! Integer and f64 tensors: token ids, positions, masks. They are neither weights nor
//! activations and pass unchanged.

use super::layer::elements;
use crate::weight::SharedBytes;

/// Number type without arithmetic support.
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
    /// All types.
    pub const ALL: [Self; 5] = [Self::I8, Self::I16, Self::I32, Self::I64, Self::F64];

    /// Name in GGUF and safetensors files.
    pub const fn name(self) -> &'static str {
        match self {
            Self::I8 => "I8",
            Self::I16 => "I16",
            Self::I32 => "I32",
            Self::I64 => "I64",
            Self::F64 => "F64",
        }
    }

    /// Size of a number in bytes.
    pub const fn bytes(self) -> usize {
        match self {
            Self::I8 => 1,
            Self::I16 => 2,
            Self::I32 => 4,
            Self::I64 | Self::F64 => 8,
        }
    }

    /// GGUF type number (`enum ggml_type`).
    pub const fn ggml_type(self) -> u32 {
        match self {
            Self::I8 => 24,
            Self::I16 => 25,
            Self::I32 => 26,
            Self::I64 => 27,
            Self::F64 => 28,
        }
    }

    /// Type of this name.
    pub(super) fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.name() == name)
    }
}

/// Integer or f64 tensor.
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
    /// Tensor whose type the file calls `type_name`. `None` for other types, or too few
    /// bytes. Excess bytes are ignored.
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
