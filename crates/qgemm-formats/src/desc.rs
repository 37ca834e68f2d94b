//! [`FormatDesc`], the single source of what a weight format is, and [`Format`], the handle to one.
//!
//! Every format is a *row of blocks*: `block_len` consecutive values of one output feature along K,
//! `block_bytes` bytes each, so that row `n` of a `[N, K]` weight begins at
//! `n × ⌈K / block_len⌉ × block_bytes` ([`FormatDesc::row_offset`]). A block splits losslessly into
//! *codes* (one small integer a value) and *scale records* (bytes shared by a span of values); readers,
//! prepackers and kernels of every backend are written against that split.

use std::fmt;
use std::str::FromStr;

use half::f16;

use crate::activation::{Q8_BLOCK, Q8_K_BLOCK};
use crate::dtype::DType;
use crate::element::ElementType;
use crate::error::FormatError;
use crate::float8::{e4m3_to_f32, e5m2_to_f32, e8m0_to_f32};
use crate::formats;
use crate::names::nearest;
use crate::sub_scale::SubScales;
use crate::weight::HostWeight;
use crate::x_format::XFormat;

/// Bytes that scale `span` consecutive values of a row, kept packed exactly as the format defines them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScalePlane {
    /// What the record holds, e.g. `"d"` or `"sub-scales"`; names the constant that kernels read.
    pub name: &'static str,
    /// Bytes of one record.
    pub bytes: usize,
    /// Values along K that one record covers: the block length or a divisor of it.
    pub span: usize,
    /// Rows of the weight that hold the same record (128 for FP8 block scales, else 1).
    pub rows: usize,
}

/// Number type of a scale that a block holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ScaleType {
    /// IEEE 754 binary32.
    F32,
    /// IEEE 754 binary16.
    F16,
    /// FP8 with 4 exponent bits, NaN at 0x7f and 0xff.
    E4M3,
    /// A bare power of two, `2^(byte − 127)`, NaN at 0xff.
    E8M0,
}

impl ScaleType {
    /// The element type of memory that holds such scales.
    pub const fn element(self) -> ElementType {
        match self {
            ScaleType::F32 => ElementType::Number(DType::F32),
            ScaleType::F16 => ElementType::Number(DType::F16),
            ScaleType::E4M3 | ScaleType::E8M0 => ElementType::Bytes,
        }
    }

    /// Bytes of a scale.
    pub const fn bytes(self) -> usize {
        match self {
            ScaleType::F32 => 4,
            ScaleType::F16 => 2,
            ScaleType::E4M3 | ScaleType::E8M0 => 1,
        }
    }
}

/// A floating-point scale (or minimum) within a block, for checking that it is finite.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FloatScale {
    /// First byte within the block.
    pub offset: usize,
    /// How it is stored.
    pub kind: ScaleType,
}

impl FloatScale {
    /// Whether this scale of `block` is neither infinite nor NaN.
    ///
    /// # Panics
    /// When `block` is shorter than the format's blocks.
    #[inline]
    pub fn is_finite(self, block: &[u8]) -> bool {
        match self.kind {
            ScaleType::F32 => block[self.offset + 3] & 0x7f != 0x7f || block[self.offset + 2] & 0x80 == 0,
            ScaleType::F16 => block[self.offset + 1] & 0x7c != 0x7c,
            ScaleType::E4M3 => block[self.offset] & 0x7f != 0x7f,
            ScaleType::E8M0 => block[self.offset] != 0xff,
        }
    }

    /// This scale of `block` as a number.
    ///
    /// # Panics
    /// When `block` is shorter than the format's blocks.
    #[inline]
    pub fn read(self, block: &[u8]) -> f32 {
        let at = &block[self.offset..];
        match self.kind {
            ScaleType::F32 => f32::from_le_bytes([at[0], at[1], at[2], at[3]]),
            ScaleType::F16 => f16::from_le_bytes([at[0], at[1]]).to_f32(),
            ScaleType::E4M3 => e4m3_to_f32(at[0]),
            ScaleType::E8M0 => e8m0_to_f32(at[0]),
        }
    }
}

/// Encodes values, a multiple of the block length, into blocks: what [`FormatDesc::quantize_blocks`] points to.
pub type QuantizeBlocks = fn(values: &[f32], out: &mut [u8]);

/// Quantizes the values of a whole `[n, k]` weight, row-major: what [`FormatDesc::quantize_matrix`] points to.
pub type QuantizeMatrix = fn(values: &[f32], n: usize, k: usize) -> Result<HostWeight, FormatError>;

/// How a code becomes a number.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Encoding {
    /// `scale · (code − offset)`.
    IntOffset {
        /// Subtracted from each unsigned code before scaling (8 for Q4_0).
        offset: i32,
    },
    /// `scale · code − min` (or `+ min`), with a minimum per (sub-)block: Q4_1, Q4_K.
    IntAffine,
    /// `scale · (code − zero)` with an integer zero point per group: GPTQ, AWQ.
    IntZero,
    /// `scale · table[code]`: IQ4_NL, MXFP4, NVFP4. The table holds small integers.
    Codebook(&'static [i8; 16]),
    /// `scale · fp8(code)`, with 4 exponent and 3 mantissa bits, no infinities, NaN at 0x7f and 0xff.
    E4M3,
    /// `scale · fp8(code)`, with 5 exponent and 2 mantissa bits, IEEE infinities and NaN.
    E5M2,
    /// The code is the number's own bits.
    Plain(crate::DType),
}

impl Encoding {
    /// Whether codes are unsigned integers that scales, and offsets, zero points or minima act on.
    pub const fn is_integer(self) -> bool {
        matches!(self, Encoding::IntOffset { .. } | Encoding::IntAffine | Encoding::IntZero)
    }

    /// What scales act on: the unsigned code as a number, or what the table, FP8 or the type makes of it. Offsets, zero points
    /// and minima are not part of it but of [`SubScale::min`](crate::SubScale::min).
    pub fn number(self, code: u32) -> f32 {
        match self {
            Encoding::IntOffset { .. } | Encoding::IntAffine | Encoding::IntZero => code as f32,
            Encoding::Codebook(table) => f32::from(table[code as usize % table.len()]),
            Encoding::E4M3 => e4m3_to_f32(code as u8),
            Encoding::E5M2 => e5m2_to_f32(code as u8),
            Encoding::Plain(dtype) => dtype.read(&code.to_le_bytes(), 0),
        }
    }
}

/// Everything there is to know about one weight format. One `static` each, in `formats/<name>.rs`.
pub struct FormatDesc {
    /// Lower-case name, unique: `"q4_k"`, `"int4_g128"`, `"fp8_e4m3_block128"`.
    pub name: &'static str,
    /// One sentence for tables and error messages.
    pub summary: &'static str,
    /// Values in a block, along K.
    pub block_len: usize,
    /// Bytes of a block.
    pub block_bytes: usize,
    /// Whether a row may end inside a block (the rest of the block holds zero weights). False for GGUF
    /// formats, whose files cannot express it.
    pub ragged_k: bool,
    /// Whether each row also has an f32 factor outside its blocks (per-channel and per-tensor scales).
    pub row_scale: bool,
    /// How codes become numbers.
    pub encoding: Encoding,
    /// Values that share one scale: the sub-block of super-block formats, else `block_len`.
    pub sub_block: usize,
    /// The largest finite magnitude among products of code (offset by zero point or minimum) and sub-scale, when
    /// every floating-point scale is 1: times the largest such scale, a bound on a block's values and on its
    /// sub-blocks' scales and minima.
    pub unit_range: f32,
    /// Widths in bits of the bit planes that a code is stored as when prepacked, low bits first
    /// (6-bit codes are `[4, 2]`). Their sum is the width of a code.
    pub code_planes: &'static [u8],
    /// The scale records of a row, in the order in which [`FormatDesc::unpack_block`] writes them.
    pub scale_planes: &'static [ScalePlane],
    /// Stem of the kernels' dequantization source: `dequant/<stem>.cuh` and `dequant/<stem>.wgsl`.
    pub dequant: &'static str,
    /// The type number in GGUF files (`enum ggml_type`), where GGUF has the format.
    pub ggml_type: Option<u32>,
    /// Decodes one block into `block_len` values, without the row scale.
    pub dequantize_block: fn(block: &[u8], out: &mut [f32]),
    /// How scale and minimum of every sub-block follow from the records of one block.
    pub sub_scales: SubScales,
    /// Encodes values (a multiple of `block_len`) into blocks; `None` where weights cannot be quantized
    /// to the format from their values alone.
    pub quantize_blocks: Option<QuantizeBlocks>,
    /// Quantizes a whole weight, where blocks cannot be encoded one by one because scales cover a row or
    /// several rows; `None` for formats with `quantize_blocks`.
    pub quantize_matrix: Option<QuantizeMatrix>,
    /// Every floating-point scale and minimum of a block (none for plain types): what loading checks.
    pub float_scales: &'static [FloatScale],
    /// Splits one block: `codes` gets `block_len` codes in K order; `scales` gets, plane after plane in the
    /// order of `scale_planes`, the records of this block (`bytes × block_len / span` bytes a plane).
    pub unpack_block: fn(block: &[u8], codes: &mut [u32], scales: &mut [u8]),
}

impl FormatDesc {
    /// Blocks in a row of `k` values, a ragged last block included.
    pub const fn blocks_per_row(&self, k: usize) -> usize {
        k.div_ceil(self.block_len)
    }

    /// Bytes of a row of `k` values.
    pub const fn row_bytes(&self, k: usize) -> usize {
        self.blocks_per_row(k) * self.block_bytes
    }

    /// Byte offset of row `n` in a weight with `k` input features: **the** offset function.
    pub const fn row_offset(&self, n: usize, k: usize) -> usize {
        n * self.row_bytes(k)
    }

    /// Width of a code in bits.
    pub fn code_bits(&self) -> u32 {
        self.code_planes.iter().map(|&b| u32::from(b)).sum()
    }

    /// The largest zero point that a block may have, where it has one (its last byte): one past the largest code, since GPTQ
    /// files hold zero points less one. `None` for formats without zero points.
    pub fn largest_zero_point(&self) -> Option<u8> {
        let past_codes = (1u32 << self.code_bits().min(8)).min(u32::from(u8::MAX)) as u8;
        (self.encoding == Encoding::IntZero).then_some(past_codes)
    }

    /// Stored bits per weight within blocks (18/32 × 8 = 4.5 for Q4_0).
    pub fn bits_per_weight(&self) -> f64 {
        self.block_bytes as f64 * 8.0 / self.block_len as f64
    }

    /// Columns that share a factor where activations are quantized to eight bits before they are multiplied with weights of
    /// this format: 256 for super-blocks of 256, else 32, as in ggml.
    pub const fn activation_block(&self) -> usize {
        if self.block_len == Q8_K_BLOCK { Q8_K_BLOCK } else { Q8_BLOCK }
    }

    /// The format in which activations are quantized so: a scale for every [`FormatDesc::activation_block`] columns.
    pub const fn activation_format(&self) -> XFormat {
        if self.block_len == Q8_K_BLOCK { XFormat::Q8_256 } else { XFormat::Q8_0 }
    }

    /// Bytes that [`FormatDesc::unpack_block`] writes to `scales`.
    pub fn scale_bytes(&self) -> usize {
        self.scale_planes.iter().map(|p| p.bytes * self.block_len / p.span).sum()
    }

    /// Checks that a row of `k` values can be stored in this format.
    ///
    /// # Errors
    /// [`FormatError::KNotMultiple`] when `k` is no multiple of the block and the format has no ragged rows,
    /// [`FormatError::ZeroDimension`] when `k` is 0.
    pub fn check_k(&self, k: usize) -> Result<(), FormatError> {
        if k == 0 {
            return Err(FormatError::ZeroDimension { name: "K" });
        }
        if !self.ragged_k && !k.is_multiple_of(self.block_len) {
            return Err(FormatError::KNotMultiple { format: self.name, block: self.block_len, k });
        }
        Ok(())
    }
}

impl fmt::Debug for FormatDesc {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}

/// Handle to a [`FormatDesc`]: cheap to copy, compared by name, parsed from a name in any case.
///
/// | names | values |
/// |---|---|
/// | `f32`, `f16`, `bf16` | plain numbers |
/// | `q4_0`, `q5_0`, `q8_0` | GGUF: integers of 4, 5 and 8 bits in blocks of 32, an f16 scale each |
/// | `q4_1`, `q5_1` | GGUF: the same with a minimum |
/// | `q2_k`, `q3_k`, `q4_k`, `q5_k`, `q6_k` | GGUF: integers of 2 to 6 bits in super-blocks of 256, whose sub-blocks have quantized scales and (Q2, Q4, Q5) minimums |
/// | `iq4_nl`, `iq4_xs` | GGUF: entries of a table of 16 numbers, in blocks of 32 and super-blocks of 256 |
/// | `mxfp4` | E2M1 numbers in blocks of 32 with an E8M0 scale |
/// | `int2_g32`, `int2_g64`, `int2_g128`, `int3_g32`, `int3_g64`, `int3_g128`, `int4_g32`, `int4_g64`, `int4_g128`, `int8_g32`, `int8_g64`, `int8_g128` | GPTQ and AWQ: integers of 2, 3, 4 and 8 bits in groups of 32, 64 and 128, with an f16 scale and a zero point each; columns may be permuted (act-order) |
/// | `int8_channel` | integers of 8 bits, a scale for each output feature |
/// | `fp8_e4m3`, `fp8_e5m2` | FP8 numbers, a scale for the tensor or for each output feature |
/// | `fp8_e4m3_block128`, `fp8_e5m2_block128` | FP8 numbers, a scale for each 128×128 block |
/// | `mxfp8`, `mxfp8_e5m2` | E4M3 or E5M2 numbers with an E8M0 scale for each 32, or for each 32×32 block |
/// | `nvfp4` | E2M1 numbers in blocks of 16 with an E4M3 scale, and a scale of the tensor |
///
/// ```
/// use qgemm_formats::Format;
/// let q4_0: Format = "Q4_0".parse()?;
/// assert_eq!((q4_0.block_len, q4_0.block_bytes), (32, 18));
/// assert_eq!(q4_0.row_offset(3, 64), 3 * 2 * 18);
/// # Ok::<(), qgemm_formats::FormatError>(())
/// ```
#[derive(Clone, Copy)]
pub struct Format(&'static FormatDesc);

impl Format {
    /// The handle of a description.
    pub const fn new(desc: &'static FormatDesc) -> Self {
        Self(desc)
    }

    /// Every format, in the order of tables.
    pub fn all() -> impl Iterator<Item = Format> + Clone {
        formats::ALL.iter().map(|d| Format(d))
    }

    /// The format that GGUF files call `ggml_type`.
    pub fn from_ggml_type(ggml_type: u32) -> Option<Format> {
        Format::all().find(|f| f.ggml_type == Some(ggml_type))
    }

    /// The description itself, with a `'static` lifetime.
    pub const fn desc(self) -> &'static FormatDesc {
        self.0
    }
}

impl std::ops::Deref for Format {
    type Target = FormatDesc;
    fn deref(&self) -> &FormatDesc {
        self.0
    }
}

impl PartialEq for Format {
    fn eq(&self, other: &Self) -> bool {
        self.0.name == other.0.name
    }
}
impl Eq for Format {}

impl std::hash::Hash for Format {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        self.0.name.hash(state);
    }
}

impl fmt::Debug for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0.name)
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.0.name)
    }
}

impl FromStr for Format {
    type Err = FormatError;

    fn from_str(s: &str) -> Result<Self, Self::Err> {
        Format::all().find(|f| f.name.eq_ignore_ascii_case(s)).ok_or_else(|| FormatError::UnknownFormat {
            name: s.to_owned(),
            near: nearest(&s.to_ascii_lowercase(), Format::all().map(|f| f.name)),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sub_scale::SubScale;

    #[test]
    fn the_documentation_names_every_format() {
        let text = include_str!("desc.rs");
        for format in Format::all() {
            assert!(text.contains(&format!("`{}`", format.name)), "{format} is not in the table of `Format`");
        }
    }

    #[test]
    fn sub_scales_and_codes_make_the_values() {
        for format in Format::all() {
            let desc = format.desc();
            let mut state = 12345u32;
            let mut byte = || {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                (state >> 24) as u8
            };
            for _ in 0..20 {
                let block: Vec<u8> = (0..desc.block_bytes).map(|_| byte()).collect();
                let (mut codes, mut records) = (vec![0; desc.block_len], vec![0; desc.scale_bytes()]);
                (desc.unpack_block)(&block, &mut codes, &mut records);
                let mut scales = vec![SubScale::default(); desc.block_len / desc.sub_block];
                desc.sub_scales.read(&records, &mut scales);
                let mut expected = vec![0.0; desc.block_len];
                (desc.dequantize_block)(&block, &mut expected);
                for (i, (&code, &expected)) in codes.iter().zip(&expected).enumerate() {
                    let number = desc.encoding.number(code);
                    let SubScale { scale, min } = scales[i / desc.sub_block];
                    let (got, size) = (scale * number + min, (scale * number).abs() + min.abs());
                    let close = (got - expected).abs() <= 4.0 * f32::EPSILON * size;
                    // Random scales may be infinite or no numbers; what they make is no number either way.
                    assert!(close || !expected.is_finite() || !size.is_finite(), "{format} {i}: {got} for {expected}");
                }
            }
        }
    }
}
