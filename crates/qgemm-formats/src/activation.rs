//! Quantized activations (Q8): the operands of integer kernels.
//!
//! [`ActivationFormat`] names ggml's three block formats. Its encoder writes the same
//! bytes as ggml. [`QuantizedActivations`] has the layout of kernels: planes of codes,
//! scales and sums. Its scales are f32.

use crate::formats::field;
use crate::formats::fit::nearest;
use crate::formats::q8_0;
use crate::x_format::XFormat;

/// Block length of Q8_0 and Q8_1.
pub const Q8_BLOCK: usize = 32;
/// Block length of Q8_K.
pub const Q8_K_BLOCK: usize = 256;
/// Columns of one block sum of Q8_K.
const Q8_K_SUM_SPAN: usize = 16;

/// ggml block format of activations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ActivationFormat {
    /// 32 values: f16 scale, 32 codes.
    Q8_0,
    /// 32 values: f16 scale `d`, f16 `d · Σq`, 32 codes.
    Q8_1,
    /// 256 values: f32 scale, 256 codes, sixteen i16 sums of 16 codes each.
    Q8K,
}

impl ActivationFormat {
    /// All three formats.
    pub const ALL: [ActivationFormat; 3] = [ActivationFormat::Q8_0, ActivationFormat::Q8_1, ActivationFormat::Q8K];

    /// Lower-case name, as in kernel names.
    pub const fn name(self) -> &'static str {
        match self {
            ActivationFormat::Q8_0 => "q8_0",
            ActivationFormat::Q8_1 => "q8_1",
            ActivationFormat::Q8K => "q8_k",
        }
    }

    /// Values in a block.
    pub const fn block_len(self) -> usize {
        match self {
            ActivationFormat::Q8_0 | ActivationFormat::Q8_1 => Q8_BLOCK,
            ActivationFormat::Q8K => Q8_K_BLOCK,
        }
    }

    /// Bytes of a block.
    pub const fn block_bytes(self) -> usize {
        match self {
            ActivationFormat::Q8_0 => 34,
            ActivationFormat::Q8_1 => 36,
            ActivationFormat::Q8K => 292,
        }
    }

    /// Encodes finite values as ggml's `quantize_row_q8_*_ref` does.
    ///
    /// An incomplete last block is skipped. Encoding stops at the end of `out`.
    pub fn quantize_blocks(self, values: &[f32], out: &mut [u8]) {
        let blocks = values.chunks_exact(self.block_len()).zip(out.chunks_exact_mut(self.block_bytes()));
        match self {
            ActivationFormat::Q8_0 => blocks.for_each(|(x, block)| q8_0::quantize_blocks(x, block)),
            ActivationFormat::Q8_1 => blocks.for_each(|(x, block)| encode_q8_1(x, block)),
            ActivationFormat::Q8K => blocks.for_each(|(x, block)| encode_q8_k(x, block)),
        }
    }

    /// X format with the same codes and scales, in separate planes.
    pub const fn x_format(self) -> XFormat {
        match self {
            ActivationFormat::Q8_0 => XFormat::Q8_0,
            ActivationFormat::Q8_1 => XFormat::Q8_1,
            ActivationFormat::Q8K => XFormat::Q8_256,
        }
    }

    /// Splits blocks into the planes of [`ActivationFormat::x_format`].
    ///
    /// Scales become f32. Only [`ActivationFormat::Q8_1`] has sums: the sums of
    /// [`ActivationFormat::Q8K`] are dropped. An incomplete last block is skipped.
    ///
    /// ```
    /// use qgemm_formats::ActivationFormat;
    /// let mut block = [0; 36];
    /// ActivationFormat::Q8_1.quantize_blocks(&[2.0; 32], &mut block);
    /// let planes = ActivationFormat::Q8_1.planes(&block);
    /// assert_eq!((planes.codes[0], planes.scales.len(), planes.sums[0]), (127, 1, 64.0));
    /// ```
    pub fn planes(self, blocks: &[u8]) -> ActivationPlanes {
        let mut planes = ActivationPlanes::default();
        for block in blocks.chunks_exact(self.block_bytes()) {
            let (scale, codes) = self.split(block);
            planes.scales.push(scale);
            planes.codes.extend(codes[..self.block_len()].iter().map(|&code| code as i8));
            if self == ActivationFormat::Q8_1 {
                planes.sums.push(field::read_f16(block, 2));
            }
        }
        planes
    }

    /// Scale of a block, and its remaining bytes from the first code on.
    fn split(self, block: &[u8]) -> (f32, &[u8]) {
        match self {
            ActivationFormat::Q8_0 => (field::read_f16(block, 0), &block[2..]),
            ActivationFormat::Q8_1 => (field::read_f16(block, 0), &block[4..]),
            ActivationFormat::Q8K => (f32::from_le_bytes([block[0], block[1], block[2], block[3]]), &block[4..]),
        }
    }

    /// Decodes blocks to `d · q`.
    pub fn dequantize_blocks(self, blocks: &[u8], out: &mut [f32]) {
        for (block, values) in blocks.chunks_exact(self.block_bytes()).zip(out.chunks_exact_mut(self.block_len())) {
            let (d, codes) = self.split(block);
            for (value, &code) in values.iter_mut().zip(codes) {
                *value = d * f32::from(code as i8);
            }
        }
    }
}

/// Planes of quantized activations, each in block order.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct ActivationPlanes {
    /// Signed codes.
    pub codes: Vec<i8>,
    /// One scale a block.
    pub scales: Vec<f32>,
    /// `scale · Σ codes` of every block. Empty for formats without sums.
    pub sums: Vec<f32>,
}

fn encode_q8_1(x: &[f32], block: &mut [u8]) {
    let mut codes = [0; Q8_BLOCK];
    let d = quantize_32(x, &mut codes);
    let sum: i32 = codes.iter().map(|&q| i32::from(q)).sum();
    field::write_f16(block, 0, d);
    field::write_f16(block, 2, sum as f32 * d);
    for (byte, code) in block[4..].iter_mut().zip(codes) {
        *byte = code as u8;
    }
}

fn encode_q8_k(x: &[f32], block: &mut [u8]) {
    let mut codes = [0; Q8_K_BLOCK];
    let d = quantize_256(x, &mut codes);
    block[..4].copy_from_slice(&d.to_le_bytes());
    let (code_bytes, sums) = block[4..].split_at_mut(Q8_K_BLOCK);
    for (byte, code) in code_bytes.iter_mut().zip(codes) {
        *byte = code as u8;
    }
    for (bytes, codes) in sums.chunks_exact_mut(2).zip(codes.chunks_exact(Q8_K_SUM_SPAN)) {
        let sum: i16 = codes.iter().map(|&q| i16::from(q)).sum();
        bytes.copy_from_slice(&sum.to_le_bytes());
    }
}

/// Quantizes at most 32 values with scale `max|x| / 127`. Returns the scale.
/// Ties round away from zero.
fn quantize_32(x: &[f32], codes: &mut [i8]) -> f32 {
    let d = field::extreme(x).abs() / 127.0;
    let inverse = field::inverse(d);
    for (code, &v) in codes.iter_mut().zip(x) {
        *code = field::truncate((v * inverse).round()) as i8;
    }
    d
}

/// Quantizes at most 256 values. The scale maps the value of largest magnitude to
/// −127. Ties round to even.
fn quantize_256(x: &[f32], codes: &mut [i8]) -> f32 {
    let extreme = field::extreme(x);
    if extreme == 0.0 {
        codes.fill(0);
        return 0.0;
    }
    let inverse = -127.0 / extreme;
    for (code, &v) in codes.iter_mut().zip(x) {
        *code = nearest(inverse * v).min(127) as i8;
    }
    1.0 / inverse
}

/// Quantized row of activations for integer kernels:
/// `x[i] ≈ scales[i / block_len] · codes[i]`.
///
/// A block's scale is `max|x| / 127` in f32. Codes round to nearest even. A block
/// with a NaN or an infinity gets a NaN scale. The product is then NaN, as it would
/// be without quantization.
///
/// X block sums apply a weight's offset or minimum with one multiplication a block.
/// With `w = s · q − m`: `Σ w·x = s · d · Σ q·code − m · sum`. A sum is `d · Σ codes`
/// in f32. It is taken from codes, because sums of the unquantized values would not
/// match the quantized product.
///
/// ```
/// use qgemm_formats::QuantizedActivations;
/// let x: Vec<f32> = (0..64).map(|i| i as f32 - 20.0).collect();
/// let q = QuantizedActivations::new(&x, 32, 32);
/// assert_eq!((q.codes.len(), q.scales.len(), q.sums.len()), (64, 2, 2));
/// assert!(q.dequantize(64).iter().zip(&x).all(|(a, b)| (a - b).abs() <= 0.2));
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct QuantizedActivations {
    /// Signed codes in −127..=127, zero-padded to whole blocks.
    pub codes: Vec<i8>,
    /// One scale a block.
    pub scales: Vec<f32>,
    /// `scale · Σ codes` of every `sum_span` values.
    pub sums: Vec<f32>,
    /// Values that share a scale.
    pub block_len: usize,
    /// Columns of one X block sum.
    pub sum_span: usize,
}

impl QuantizedActivations {
    /// Quantizes `values` in blocks of `block_len`, with one sum per `sum_span` columns.
    ///
    /// The block length of a weight format is
    /// [`FormatDesc::activation_block`](crate::FormatDesc::activation_block).
    ///
    /// # Panics
    /// When `sum_span` does not divide `block_len`.
    pub fn new(values: &[f32], block_len: usize, sum_span: usize) -> Self {
        assert!(sum_span > 0 && block_len.is_multiple_of(sum_span), "sums of {sum_span} in blocks of {block_len}");
        let blocks = values.len().div_ceil(block_len);
        let mut codes = vec![0; blocks * block_len];
        let mut scales = Vec::with_capacity(blocks);
        let mut sums = Vec::with_capacity(blocks * block_len / sum_span);
        for (x, codes) in values.chunks(block_len).zip(codes.chunks_exact_mut(block_len)) {
            let scale = match x.iter().all(|v| v.is_finite()) {
                // Subnormal scales have no finite inverse.
                true => (field::extreme(x).abs() / 127.0).max(f32::MIN_POSITIVE),
                false => f32::NAN,
            };
            let inverse = 1.0 / scale;
            for (code, &v) in codes.iter_mut().zip(x) {
                *code = (v * inverse).round_ties_even() as i8;
            }
            scales.push(scale);
            let spans = codes.chunks_exact(sum_span);
            sums.extend(spans.map(|span| span.iter().map(|&q| i32::from(q)).sum::<i32>() as f32 * scale));
        }
        Self { codes, scales, sums, block_len, sum_span }
    }

    /// First `k` dequantized values: `scale · code`.
    pub fn dequantize(&self, k: usize) -> Vec<f32> {
        let blocks = self.codes.chunks_exact(self.block_len).zip(&self.scales);
        blocks.flat_map(|(codes, &d)| codes.iter().map(move |&q| d * f32::from(q))).take(k).collect()
    }
}
