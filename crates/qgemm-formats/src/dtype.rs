//! Plain element types of activations, outputs, biases and unquantized weights.

use std::fmt;

/// Element type of a dense tensor: X, D, C or bias.
///
/// Exhaustive on purpose. Every backend reads and writes all of them in every
/// operation. A new one fails to compile until each backend handles it. Quantized X is
/// an [`XFormat`](crate::XFormat).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum DType {
    /// IEEE 754 binary32.
    F32,
    /// IEEE 754 binary16.
    F16,
    /// bfloat16: the upper half of a binary32.
    BF16,
}

impl DType {
    /// All element types, widest first.
    pub const ALL: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

    /// Size of one element in bytes.
    pub const fn bytes(self) -> usize {
        match self {
            DType::F32 => 4,
            DType::F16 | DType::BF16 => 2,
        }
    }

    /// Lower-case name, as in kernel names (`gemm_nt_q4_k_f16`).
    pub const fn name(self) -> &'static str {
        match self {
            DType::F32 => "f32",
            DType::F16 => "f16",
            DType::BF16 => "bf16",
        }
    }

    /// Reads element `index` of `bytes`, little-endian, as f32.
    ///
    /// # Panics
    /// When `bytes` holds fewer than `index + 1` elements.
    #[inline]
    pub fn read(self, bytes: &[u8], index: usize) -> f32 {
        let at = index * self.bytes();
        match self {
            DType::F32 => f32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]),
            DType::F16 => half::f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32(),
            DType::BF16 => half::bf16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32(),
        }
    }

    /// Writes `value` as element `index` of `bytes`, rounded to nearest even.
    ///
    /// # Panics
    /// When `bytes` holds fewer than `index + 1` elements.
    #[inline]
    pub fn write(self, bytes: &mut [u8], index: usize, value: f32) {
        let at = index * self.bytes();
        match self {
            DType::F32 => bytes[at..at + 4].copy_from_slice(&value.to_le_bytes()),
            DType::F16 => bytes[at..at + 2].copy_from_slice(&half::f16::from_f32(value).to_le_bytes()),
            DType::BF16 => bytes[at..at + 2].copy_from_slice(&half::bf16::from_f32(value).to_le_bytes()),
        }
    }

    /// Encodes `values` in this type, little-endian.
    pub fn encode(self, values: &[f32]) -> Vec<u8> {
        let mut bytes = vec![0; values.len() * self.bytes()];
        for (i, &v) in values.iter().enumerate() {
            self.write(&mut bytes, i, v);
        }
        bytes
    }

    /// Decodes `bytes` to f32, one value per element.
    pub fn decode(self, bytes: &[u8]) -> Vec<f32> {
        (0..bytes.len() / self.bytes()).map(|i| self.read(bytes, i)).collect()
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl std::str::FromStr for DType {
    type Err = crate::FormatError;

    fn from_str(s: &str) -> Result<Self, Self::Err> {
        DType::ALL
            .into_iter()
            .find(|d| d.name().eq_ignore_ascii_case(s))
            .ok_or_else(|| crate::FormatError::UnknownDType { name: s.to_owned() })
    }
}
