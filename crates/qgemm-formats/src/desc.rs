//! Weight formats: [`FormatDesc`] describes one, [`Format`] is its handle.
//!
//! A row of W is a *row of blocks*. A block holds `block_len` consecutive
//! values along K in `block_bytes` bytes. Row `n` of a `[N, K]` weight begins at
//! `n × ⌈K / block_len⌉ × block_bytes` ([`FormatDesc::row_offset`]). A block splits
//! losslessly into *codes* and *scale records*. A code is one small integer a value.
//! A scale record is the bytes that a span of values shares. Readers, prepackers and
//! kernels of all backends use that split.

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

/// Scale plane: one record for every `span` consecutive values of a row. Records keep
/// the bytes of the format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScalePlane {
    /// Contents of the record, e.g. `"d"` or `"sub-scales"`. Also the stem
    /// of the kernels' constant.
    pub name: &'static str,
    /// Bytes of one record.
    pub bytes: usize,
    /// Values along K of one record: the block length or a divisor of it.
    pub span: usize,
    /// Rows that share the record: 128 for FP8 block scales, else 1.
    pub rows: usize,
}

/// Element type of a scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ScaleType {
    /// IEEE 754 binary32.
    F32,
    /// IEEE 754 binary16.
    F16,
    /// FP8 with 4 exponent bits, NaN at 0x7f and 0xff.
    E4M3,
    /// E8M0 power-of-two scale, `2^(byte − 127)`, NaN at 0xff.
    E8M0,
}

impl ScaleType {
    /// Element type of memory that holds these scales.
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

/// Floating-point scale or minimum in a block. Loading checks that it is finite.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FloatScale {
    /// First byte within the block.
    pub offset: usize,
    /// Element type.
    pub kind: ScaleType,
}

impl FloatScale {
    /// Whether this scale of `block` is finite.
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

    /// Value of this scale in `block`.
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

/// Block quantizer, the type of [`FormatDesc::quantize_blocks`].
/// `values` has whole blocks.
pub type QuantizeBlocks = fn(values: &[f32], out: &mut [u8]);

/// Quantizer of a whole row-major `[n, k]` weight, the type of
/// [`FormatDesc::quantize_matrix`].
pub type QuantizeMatrix = fn(values: &[f32], n: usize, k: usize) -> Result<HostWeight, FormatError>;

/// Encoding: the formula from code to value.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Encoding {
    /// `scale · (code − offset)`.
    IntOffset {
        /// Subtracted from each unsigned code before scaling (8 for Q4_0).
        offset: i32,
    },
    /// `scale · code − min` (or `+ min`), with a minimum per block or sub-block: Q4_1,
    /// Q4_K, affine groups.
    IntAffine,
    /// `scale · (code − zero)` with an integer zero point per group: GPTQ, AWQ.
    IntZero,
    /// `scale · table[code]`: IQ4_NL, MXFP4, NVFP4. Table entries are small integers.
    Codebook(&'static [i8; 16]),
    /// `scale · e4m3(code)`: no infinities, NaN at 0x7f and 0xff.
    E4M3,
    /// `scale · e5m2(code)`, with IEEE infinities and NaN.
    E5M2,
    /// Unquantized: the code is the bit pattern of the value.
    Plain(crate::DType),
}

impl Encoding {
    /// Whether codes are unsigned integers (with an offset, zero point or minimum).
    pub const fn is_integer(self) -> bool {
        matches!(self, Encoding::IntOffset { .. } | Encoding::IntAffine | Encoding::IntZero)
    }

    /// Unscaled value of a code: the unsigned integer, the table entry or the FP8 number.
    ///
    /// Offsets, zero points and minima are in [`SubScale::min`](crate::SubScale::min).
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

/// Description of one weight format. Each format has one `static`, in
/// `formats/<name>.rs`.
pub struct FormatDesc {
    /// Lower-case name, unique: `"q4_k"`, `"int4_g128"`, `"fp8_e4m3_block128"`.
    pub name: &'static str,
    /// One-sentence summary for tables and error messages.
    pub summary: &'static str,
    /// Values in a block, along K.
    pub block_len: usize,
    /// Bytes of a block.
    pub block_bytes: usize,
    /// Whether a row may end inside a block, whose remaining values are zero. False for
    /// GGUF formats, whose files cannot express it.
    pub ragged_k: bool,
    /// Whether each row also has an f32 factor outside its blocks: a per-channel or
    /// per-tensor scale.
    pub row_scale: bool,
    /// Formula from code to value.
    pub encoding: Encoding,
    /// Values per scale: the sub-block of super-block formats, else `block_len`.
    pub sub_block: usize,
    /// Largest finite `|(code − offset) · sub-scale|` when every floating-point scale is 1.
    ///
    /// Times the largest such scale, it bounds a block's values, and its
    /// sub-blocks' scales and minima.
    pub unit_range: f32,
    /// Widths in bits of the packed bit planes of a code, low bits first.
    /// 6-bit codes have `[4, 2]`.
    pub code_planes: &'static [u8],
    /// Scale planes in the order in which [`FormatDesc::unpack_block`] writes them.
    pub scale_planes: &'static [ScalePlane],
    /// Stem of the dequantization source of kernels: `dequant/<stem>.cuh`
    /// and `dequant/<stem>.wgsl`.
    pub dequant: &'static str,
    /// GGUF type number (`enum ggml_type`), if GGUF has the format.
    pub ggml_type: Option<u32>,
    /// Whether files of this format are rare. Its kernels are compiled on first use
    /// instead of ahead.
    pub is_rare: bool,
    /// Dequantizes one block into `block_len` values, without the row scale.
    pub dequantize_block: fn(block: &[u8], out: &mut [f32]),
    /// Rule for scale and minimum of each sub-block, from the records of a block.
    pub sub_scales: SubScales,
    /// Block quantizer. `None` for formats that need more than the values.
    pub quantize_blocks: Option<QuantizeBlocks>,
    /// Whole-weight quantizer, for scales that span a row or several rows. `None` for
    /// formats with `quantize_blocks`.
    pub quantize_matrix: Option<QuantizeMatrix>,
    /// Floating-point scales and minima of a block. Loading checks that they are
    /// finite. Plain types have none.
    pub float_scales: &'static [FloatScale],
    /// Splits one block into `block_len` codes in K order and the scale records.
    ///
    /// `scales` receives plane after plane in the order of `scale_planes`. A plane has
    /// `bytes × block_len / span` bytes.
    pub unpack_block: fn(block: &[u8], codes: &mut [u32], scales: &mut [u8]),
}

impl FormatDesc {
    /// Blocks in a row of `k` values, including a ragged last block.
    pub const fn blocks_per_row(&self, k: usize) -> usize {
        k.div_ceil(self.block_len)
    }

    /// Bytes of a row of `k` values.
    pub const fn row_bytes(&self, k: usize) -> usize {
        self.blocks_per_row(k) * self.block_bytes
    }

    /// Byte offset of row `n` in a weight with `k` input features. All offsets of rows come
    /// from here.
    pub const fn row_offset(&self, n: usize, k: usize) -> usize {
        n * self.row_bytes(k)
    }

    /// Width of a code in bits.
    pub fn code_bits(&self) -> u32 {
        self.code_planes.iter().map(|&b| u32::from(b)).sum()
    }

    /// Largest allowed zero point, for formats that have one (in the last byte of a block).
    ///
    /// It is one past the largest code, because GPTQ v1 files store the zero point minus
    /// one.
    pub fn largest_zero_point(&self) -> Option<u8> {
        let past_codes = (1u32 << self.code_bits().min(8)).min(u32::from(u8::MAX)) as u8;
        (self.encoding == Encoding::IntZero).then_some(past_codes)
    }

    /// Stored bits per weight within blocks: 18 / 32 × 8 = 4.5 for Q4_0.
    pub fn bits_per_weight(&self) -> f64 {
        self.block_bytes as f64 * 8.0 / self.block_len as f64
    }

    /// Block length of quantized activations for this weight format: 256 for super-blocks
    /// of 256, else 32, as in ggml.
    pub const fn activation_block(&self) -> usize {
        if self.block_len == Q8_K_BLOCK { Q8_K_BLOCK } else { Q8_BLOCK }
    }

    /// X format with one scale for every [`FormatDesc::activation_block`] columns.
    pub const fn activation_format(&self) -> XFormat {
        if self.block_len == Q8_K_BLOCK { XFormat::Q8_256 } else { XFormat::Q8_0 }
    }

    /// Bytes that [`FormatDesc::unpack_block`] writes to `scales`.
    pub fn scale_bytes(&self) -> usize {
        self.scale_planes.iter().map(|p| p.bytes * self.block_len / p.span).sum()
    }

    /// Checks that rows of `k` values fit this format.
    ///
    /// # Errors
    /// [`FormatError::KNotMultiple`] when `k` is no multiple of the block and rows cannot
    /// be ragged. [`FormatError::ZeroDimension`] when `k` is 0.
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

/// Handle to a [`FormatDesc`]: cheap to copy, compared by name, parsed
/// from a name in any case.
///
/// | names | values |
/// |---|---|
/// | `f32`, `f16`, `bf16` | unquantized |
/// | `q4_0`, `q5_0`, `q8_0` | GGUF: 4, 5 and 8-bit integers in blocks of 32, one f16 scale a block |
/// | `q4_1`, `q5_1` | GGUF: 4 and 5-bit integers in blocks of 32, f16 scale and minimum |
/// | `q2_k`, `q3_k`, `q4_k`, `q5_k`, `q6_k` | GGUF K-quants: 2 to 6-bit integers in super-blocks of 256, quantized sub-block scales and (Q2, Q4, Q5) minimums |
/// | `iq4_nl`, `iq4_xs` | GGUF: a 16-entry table, in blocks of 32 and super-blocks of 256 |
/// | `iq1_s`, `iq1_m`, `iq2`, `iq3_xxs`, `iq3_s` | GGUF IQ1 to IQ3: 2 to 4-bit codes in super-blocks of 256, quantized sub-block scales; grids are looked up at load |
/// | `q1_0` | GGUF: signs in blocks of 128, one f16 scale |
/// | `tq2_0`, `q2_0_g64`, `q2_0_g128` | GGUF TQ2_0, TQ1_0 and Q2_0: −1, 0 and 1 (2-bit codes) in blocks of 256, 64 and 128, one f16 scale |
/// | `mxfp4` | E2M1 in blocks of 32, E8M0 scale |
/// | `int2_g32`, `int2_g64`, `int2_g128`, `int3_g32`, `int3_g64`, `int3_g128`, `int4_g32`, `int4_g64`, `int4_g128`, `int8_g32`, `int8_g64`, `int8_g128` | GPTQ and AWQ: 2, 3, 4 and 8-bit integers in groups of 32, 64 and 128, f16 scale and zero point; optional act-order |
/// | `affine2_g64`, `affine3_g64`, `affine4_g64`, `affine5_g64`, `affine6_g64`, `affine8_g32`, `affine8_g64` | MLX: 2 to 8-bit integers in groups of 32 and 64; f16 scale and minimum, one scale per output feature |
/// | `centered4_g32`, `centered4_g64` | torchao: 4-bit integers minus 8 in groups of 32 and 64; f16 scale and addend, one scale per output feature |
/// | `int8_channel` | INT8, one scale per output feature |
/// | `fp8_e4m3`, `fp8_e5m2` | FP8, one scale per tensor or output feature |
/// | `fp8_e4m3_block128`, `fp8_e5m2_block128` | FP8, one scale per 128×128 block |
/// | `mxfp8`, `mxfp8_e5m2` | E4M3 or E5M2, one E8M0 scale per 32 columns or per 32×32 block |
/// | `nvfp4` | E2M1 in blocks of 16, E4M3 scale, and one scale per tensor |
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
    /// Handle of a description.
    pub const fn new(desc: &'static FormatDesc) -> Self {
        Self(desc)
    }

    /// All formats, in the order of tables.
    pub fn all() -> impl Iterator<Item = Format> + Clone {
        formats::ALL.iter().map(|d| Format(d))
    }

    /// Format of a GGUF type number.
    pub fn from_ggml_type(ggml_type: u32) -> Option<Format> {
        Format::all().find(|f| f.ggml_type == Some(ggml_type))
    }

    /// Description, with a `'static` lifetime.
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
                    // Random scales may be infinite or NaN. Then the value is not finite on either path.
                    assert!(close || !expected.is_finite() || !size.is_finite(), "{format} {i}: {got} for {expected}");
                }
            }
        }
    }
}
