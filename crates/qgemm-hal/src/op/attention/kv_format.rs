//! Storage formats of keys and values.

use std::fmt;
use std::str::FromStr;

use qgemm_formats::formats::{q4_0, q8_0};
use qgemm_formats::{DType, ElementType};

/// Storage format of keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum KvFormat {
    /// Unquantized elements.
    Plain(DType),
    /// E4M3 with one f32 factor for each head.
    E4M3,
    /// INT8 with an f16 scale for every 32 features,
    /// in a separate tensor.
    Q8_0,
    /// 4-bit codes with offset 8 and an f16 scale for every
    /// 32 features, in a separate tensor. Two features share a byte,
    /// the first in the low nibble.
    Q4_0,
}

/// Features that share a scale.
pub const KV_BLOCK: usize = 32;
/// The type of scales.
pub const KV_SCALES: DType = DType::F16;
/// Bytes of a scale.
pub const KV_SCALE_BYTES: usize = KV_SCALES.bytes();

impl KvFormat {
    /// Every format.
    pub const ALL: [KvFormat; 6] = [
        KvFormat::Plain(DType::F32),
        KvFormat::Plain(DType::F16),
        KvFormat::Plain(DType::BF16),
        KvFormat::E4M3,
        KvFormat::Q8_0,
        KvFormat::Q4_0,
    ];

    /// Lower-case name.
    pub const fn name(self) -> &'static str {
        match self {
            KvFormat::Plain(dtype) => dtype.name(),
            KvFormat::E4M3 => "e4m3",
            KvFormat::Q8_0 => q8_0::Q8_0.name,
            KvFormat::Q4_0 => q4_0::Q4_0.name,
        }
    }

    /// The element type of memory that holds such keys or values.
    pub const fn element(self) -> ElementType {
        match self {
            KvFormat::Plain(dtype) => ElementType::Number(dtype),
            KvFormat::Q8_0 => ElementType::Int8,
            KvFormat::E4M3 | KvFormat::Q4_0 => ElementType::Bytes,
        }
    }

    /// Bits of an element, without scales.
    pub const fn bits(self) -> usize {
        match self {
            KvFormat::Plain(dtype) => 8 * dtype.bytes(),
            KvFormat::E4M3 | KvFormat::Q8_0 => 8,
            KvFormat::Q4_0 => 4,
        }
    }

    /// Bytes of `numbers` elements; even where two elements share a byte.
    pub const fn bytes_of(self, numbers: usize) -> usize {
        numbers * self.bits() / 8
    }

    /// Address alignment of an element, in bytes.
    pub const fn width(self) -> usize {
        if self.bits() < 8 { 1 } else { self.bits() / 8 }
    }

    /// Whether each block of [`KV_BLOCK`] features has a scale.
    pub const fn has_scales(self) -> bool {
        matches!(self, KvFormat::Q8_0 | KvFormat::Q4_0)
    }

    /// Feature counts and strides are multiples of this.
    pub const fn step(self) -> usize {
        if self.has_scales() { KV_BLOCK } else { 1 }
    }

    /// Scale bytes of `numbers` elements.
    pub const fn scale_bytes_of(self, numbers: usize) -> usize {
        if self.has_scales() { numbers / KV_BLOCK * KV_SCALE_BYTES } else { 0 }
    }

    /// Whether elements are unquantized.
    pub const fn is_plain(self) -> bool {
        matches!(self, KvFormat::Plain(_))
    }

    /// Average bytes of a feature, scales included.
    pub fn mean_bytes(self) -> f64 {
        let scales = if self.has_scales() { KV_SCALE_BYTES as f64 / KV_BLOCK as f64 } else { 0.0 };
        self.bits() as f64 / 8.0 + scales
    }

    /// Whether each head has a factor.
    pub const fn has_factors(self) -> bool {
        matches!(self, KvFormat::E4M3)
    }

    /// Alignment in bytes that vector loads of eight elements need: 16,
    /// or the size of eight elements if that is smaller.
    pub const fn vector_bytes(self) -> usize {
        let eight = self.bits();
        if eight < 16 { eight } else { 16 }
    }
}

/// Formats of the keys and values of a cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KvFormats {
    /// Format of keys.
    pub k: KvFormat,
    /// Format of values.
    pub v: KvFormat,
}

impl KvFormats {
    /// One format for both.
    pub const fn both(format: KvFormat) -> Self {
        Self { k: format, v: format }
    }

    /// The format of both keys and values; `None` if they differ.
    pub fn single(self) -> Option<KvFormat> {
        (self.k == self.v).then_some(self.k)
    }

    /// Whether both are unquantized.
    pub const fn are_plain(self) -> bool {
        self.k.is_plain() && self.v.is_plain()
    }

    /// Whether either has block scales.
    pub const fn have_scales(self) -> bool {
        self.k.has_scales() || self.v.has_scales()
    }
}

impl From<KvFormat> for KvFormats {
    fn from(format: KvFormat) -> Self {
        Self::both(format)
    }
}

/// Separates the formats of keys and values that differ.
const SEPARATOR: char = '+';

/// `q8_0` for both, `q8_0+q4_0` for keys and values.
impl fmt::Display for KvFormats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.single() {
            Some(format) => format.fmt(f),
            None => write!(f, "{}{SEPARATOR}{}", self.k, self.v),
        }
    }
}

impl FromStr for KvFormats {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once(SEPARATOR) {
            Some((k, v)) => Ok(Self { k: k.parse()?, v: v.parse()? }),
            None => text.parse().map(Self::both),
        }
    }
}

impl fmt::Display for KvFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for KvFormat {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|format| format.name() == text);
        found.ok_or_else(|| format!("`{text}` is no format of keys and values"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_formats_have_a_text_that_is_read_back() {
        let formats = || KvFormat::ALL.into_iter().flat_map(|k| KvFormat::ALL.map(|v| KvFormats { k, v }));
        assert!(formats().all(|formats| formats.to_string().parse() == Ok(formats)));
        assert_eq!(KvFormats::both(KvFormat::E4M3).to_string(), "e4m3");
        assert_eq!(KvFormats { k: KvFormat::Q8_0, v: KvFormat::Q4_0 }.to_string(), "q8_0+q4_0");
        assert!("q8_0+".parse::<KvFormats>().is_err());
    }
}
