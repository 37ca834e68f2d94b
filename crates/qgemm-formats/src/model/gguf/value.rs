//! GGUF metadata values.

use crate::weight::SharedBytes;

/// Number or boolean in its file type.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum GgufScalar {
    /// Type 0.
    U8(u8),
    /// Type 1.
    I8(i8),
    /// Type 2.
    U16(u16),
    /// Type 3.
    I16(i16),
    /// Type 4.
    U32(u32),
    /// Type 5.
    I32(i32),
    /// Type 6.
    F32(f32),
    /// Type 7.
    Bool(bool),
    /// Type 10.
    U64(u64),
    /// Type 11.
    I64(i64),
    /// Type 12.
    F64(f64),
}

/// Type number of strings.
pub(super) const STRING: u32 = 8;
/// Type number of arrays.
pub(super) const ARRAY: u32 = 9;

/// Bytes of a scalar of type `kind`. `None` for other types.
pub(super) fn scalar_bytes(kind: u32) -> Option<usize> {
    match kind {
        0 | 1 | 7 => Some(1),
        2 | 3 => Some(2),
        4..=6 => Some(4),
        10..=12 => Some(8),
        _ => None,
    }
}

impl GgufScalar {
    /// Decodes a scalar of type `kind`. `None` when kind or length do not match.
    pub(super) fn decode(kind: u32, bytes: &[u8]) -> Option<Self> {
        Some(match kind {
            0 => Self::U8(u8::from_le_bytes(bytes.try_into().ok()?)),
            1 => Self::I8(i8::from_le_bytes(bytes.try_into().ok()?)),
            2 => Self::U16(u16::from_le_bytes(bytes.try_into().ok()?)),
            3 => Self::I16(i16::from_le_bytes(bytes.try_into().ok()?)),
            4 => Self::U32(u32::from_le_bytes(bytes.try_into().ok()?)),
            5 => Self::I32(i32::from_le_bytes(bytes.try_into().ok()?)),
            6 => Self::F32(f32::from_le_bytes(bytes.try_into().ok()?)),
            7 => Self::Bool(u8::from_le_bytes(bytes.try_into().ok()?) != 0),
            10 => Self::U64(u64::from_le_bytes(bytes.try_into().ok()?)),
            11 => Self::I64(i64::from_le_bytes(bytes.try_into().ok()?)),
            12 => Self::F64(f64::from_le_bytes(bytes.try_into().ok()?)),
            _ => return None,
        })
    }

    /// GGUF type number.
    pub(super) fn kind(self) -> u32 {
        match self {
            Self::U8(_) => 0,
            Self::I8(_) => 1,
            Self::U16(_) => 2,
            Self::I16(_) => 3,
            Self::U32(_) => 4,
            Self::I32(_) => 5,
            Self::F32(_) => 6,
            Self::Bool(_) => 7,
            Self::U64(_) => 10,
            Self::I64(_) => 11,
            Self::F64(_) => 12,
        }
    }

    /// Appends the bytes of the value to `out`.
    pub(super) fn encode(self, out: &mut Vec<u8>) {
        match self {
            Self::U8(v) => out.push(v),
            Self::I8(v) => out.extend(v.to_le_bytes()),
            Self::U16(v) => out.extend(v.to_le_bytes()),
            Self::I16(v) => out.extend(v.to_le_bytes()),
            Self::U32(v) => out.extend(v.to_le_bytes()),
            Self::I32(v) => out.extend(v.to_le_bytes()),
            Self::F32(v) => out.extend(v.to_le_bytes()),
            Self::Bool(v) => out.push(u8::from(v)),
            Self::U64(v) => out.extend(v.to_le_bytes()),
            Self::I64(v) => out.extend(v.to_le_bytes()),
            Self::F64(v) => out.extend(v.to_le_bytes()),
        }
    }

    /// Value of a non-negative integer.
    pub fn as_u64(self) -> Option<u64> {
        match self {
            Self::U8(v) => Some(v.into()),
            Self::U16(v) => Some(v.into()),
            Self::U32(v) => Some(v.into()),
            Self::U64(v) => Some(v),
            Self::I8(v) => v.try_into().ok(),
            Self::I16(v) => v.try_into().ok(),
            Self::I32(v) => v.try_into().ok(),
            Self::I64(v) => v.try_into().ok(),
            Self::F32(_) | Self::F64(_) | Self::Bool(_) => None,
        }
    }
}

/// Metadata array. Scalars share the file's bytes, so that an
/// array needs no extra memory.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum GgufArray {
    /// Scalars of one type.
    Scalars {
        /// GGUF type number of the elements.
        kind: u32,
        /// Elements, packed, little-endian.
        bytes: SharedBytes,
    },
    /// Strings.
    Strings(Vec<String>),
    /// Strings, at least one of which is not UTF-8.
    ByteStrings(Vec<Vec<u8>>),
    /// Arrays.
    Arrays(Vec<GgufArray>),
}

impl GgufArray {
    /// Number of elements.
    pub fn len(&self) -> usize {
        match self {
            Self::Scalars { kind, bytes } => bytes.len() / scalar_bytes(*kind).unwrap_or(1),
            Self::Strings(items) => items.len(),
            Self::ByteStrings(items) => items.len(),
            Self::Arrays(items) => items.len(),
        }
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Scalar `index`. `None` for other arrays or beyond the end.
    pub fn scalar(&self, index: usize) -> Option<GgufScalar> {
        let Self::Scalars { kind, bytes } = self else { return None };
        let size = scalar_bytes(*kind)?;
        let at = index.checked_mul(size)?;
        GgufScalar::decode(*kind, bytes.get(at..at.checked_add(size)?)?)
    }
}

impl PartialEq for GgufArray {
    fn eq(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Scalars { kind, bytes }, Self::Scalars { kind: other_kind, bytes: other_bytes }) => {
                kind == other_kind && **bytes == **other_bytes
            }
            (Self::Strings(a), Self::Strings(b)) => a == b,
            (Self::ByteStrings(a), Self::ByteStrings(b)) => a == b,
            (Self::Arrays(a), Self::Arrays(b)) => a == b,
            _ => false,
        }
    }
}

/// A metadata value.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum GgufValue {
    /// Number or boolean.
    Scalar(GgufScalar),
    /// A string.
    String(String),
    /// A string that is not UTF-8.
    ByteString(Vec<u8>),
    /// An array.
    Array(GgufArray),
}

impl GgufValue {
    /// Value of a non-negative integer.
    pub fn as_u64(&self) -> Option<u64> {
        match self {
            Self::Scalar(scalar) => scalar.as_u64(),
            _ => None,
        }
    }

    /// Value of a number.
    pub fn as_f64(&self) -> Option<f64> {
        match self {
            Self::Scalar(GgufScalar::F32(number)) => Some(f64::from(*number)),
            Self::Scalar(GgufScalar::F64(number)) => Some(*number),
            Self::Scalar(GgufScalar::I8(number)) => Some(f64::from(*number)),
            Self::Scalar(GgufScalar::I16(number)) => Some(f64::from(*number)),
            Self::Scalar(GgufScalar::I32(number)) => Some(f64::from(*number)),
            Self::Scalar(GgufScalar::I64(number)) => Some(*number as f64),
            other => other.as_u64().map(|number| number as f64),
        }
    }

    /// Truth value.
    pub fn as_bool(&self) -> Option<bool> {
        match self {
            Self::Scalar(GgufScalar::Bool(value)) => Some(*value),
            _ => None,
        }
    }

    /// Value of a string.
    pub fn as_str(&self) -> Option<&str> {
        match self {
            Self::String(text) => Some(text),
            _ => None,
        }
    }
}

impl From<&str> for GgufValue {
    fn from(text: &str) -> Self {
        Self::String(text.to_owned())
    }
}

impl From<GgufScalar> for GgufValue {
    fn from(scalar: GgufScalar) -> Self {
        Self::Scalar(scalar)
    }
}

impl From<u32> for GgufValue {
    fn from(number: u32) -> Self {
        Self::Scalar(GgufScalar::U32(number))
    }
}
