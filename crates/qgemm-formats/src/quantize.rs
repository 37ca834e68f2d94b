//! Weight quantization to any format ([`quantize_matrix`]), with
//! llama.cpp's fallback formats, and by importance matrices
//! ([`quantize_by_importance`]).

use rayon::prelude::*;

use crate::desc::{Encoding, Format, FormatDesc, ScaleType};
use crate::error::FormatError;
use crate::formats::{
    iq4_nl, iq4_xs, matrix, plain, q2_k, q3_k, q4_0, q4_1, q4_k, q5_0, q5_1, q5_k, q6_k, q8_0, ternary,
};
use crate::weight::HostWeight;

/// Quantized weight, and its requested and actual formats.
#[derive(Clone, Debug)]
pub struct Quantized {
    /// Weight in the format `used`.
    pub weight: HostWeight,
    /// Requested format.
    pub requested: Format,
    /// Actual format. It differs when K is no multiple of the super-block.
    pub used: Format,
    /// Non-zero rows that became all zeros, because their values are too small
    /// for the format's scales.
    pub zeroed_rows: usize,
}

/// llama.cpp's fallbacks of super-block formats, for K that is no multiple of 256.
static FALLBACKS: [(&FormatDesc, &FormatDesc); 7] = [
    (&ternary::TQ2_0, &q4_0::Q4_0),
    (&q2_k::Q2_K, &q4_0::Q4_0),
    (&q3_k::Q3_K, &q4_0::Q4_0),
    (&q4_k::Q4_K, &q5_0::Q5_0),
    (&q5_k::Q5_K, &q5_1::Q5_1),
    (&q6_k::Q6_K, &q8_0::Q8_0),
    (&iq4_xs::IQ4_XS, &iq4_nl::IQ4_NL),
];

/// Storage format of rows of `k` values when `format` is requested.
///
/// It is `format` if its blocks divide `k`. Super-block formats fall back as in
/// llama.cpp (Q4_K → Q5_0, Q5_K → Q5_1, Q6_K → Q8_0, Q2_K, Q3_K and TQ2_0 → Q4_0,
/// IQ4_XS → IQ4_NL), or to F16 if 32 does not divide `k`.
///
/// # Errors
/// [`FormatError::KNotMultiple`] without a fallback (Q4_0 with K = 40);
/// [`FormatError::ZeroDimension`].
pub fn format_for_k(format: Format, k: usize) -> Result<Format, FormatError> {
    let error = match format.check_k(k) {
        Ok(()) => return Ok(format),
        Err(error) => error,
    };
    let fallback = FALLBACKS.iter().find(|(from, _)| Format::new(from) == format && k > 0);
    let (_, to) = fallback.ok_or(error)?;
    Ok(Format::new(if to.check_k(k).is_ok() { to } else { &plain::F16 }))
}

/// Quantizes a row-major `[n, k]` weight on all threads of the current rayon pool.
///
/// ```
/// use qgemm_formats::quantize_matrix;
/// let values: Vec<f32> = (0..2 * 384).map(|i| (i as f32).sin()).collect();
/// let q = quantize_matrix(&values, 2, 384, "q4_k".parse()?)?;
/// assert_eq!((q.requested.name, q.used.name), ("q4_k", "q5_0"));
/// # Ok::<(), qgemm_formats::FormatError>(())
/// ```
///
/// # Errors
/// A [`FormatError`] when dimensions do not match the values or the format
/// ([`format_for_k`]), a value is not finite or out of the format's range,
/// or the format has no quantizer. Rows of too small values are no error: they are
/// counted, with a warning.
pub fn quantize_matrix(values: &[f32], n: usize, k: usize, format: Format) -> Result<Quantized, FormatError> {
    let _span = tracing::debug_span!("quantize", %format, n, k).entered();
    let used = format_for_k(format, k)?;
    let weight = match (used.quantize_matrix, used.quantize_blocks) {
        (Some(quantize), _) => quantize(values, n, k)?,
        (None, Some(quantize)) => quantize_rows(values, n, k, used, quantize)?,
        (None, None) => {
            return Err(FormatError::NotQuantizable { format: used.desc().name, why: "it has no quantizer" });
        }
    };
    checked(values, weight, format)
}

/// Quantizer of a row by the importance of its columns. Both have whole blocks.
type QuantizeByImportance = fn(values: &[f32], importance: &[f32], out: &mut [u8]);

/// Formats whose quantizer in ggml uses an importance matrix.
static BY_IMPORTANCE: [(&FormatDesc, QuantizeByImportance); 11] = [
    (&q4_0::Q4_0, q4_0::quantize_by_importance),
    (&q4_1::Q4_1, q4_1::quantize_by_importance),
    (&q5_0::Q5_0, q5_0::quantize_by_importance),
    (&q5_1::Q5_1, q5_1::quantize_by_importance),
    (&q2_k::Q2_K, q2_k::quantize_by_importance),
    (&q3_k::Q3_K, q3_k::quantize_by_importance),
    (&q4_k::Q4_K, q4_k::quantize_by_importance),
    (&q5_k::Q5_K, q5_k::quantize_by_importance),
    (&q6_k::Q6_K, q6_k::quantize_by_importance),
    (&iq4_nl::IQ4_NL, iq4_nl::quantize_by_importance),
    (&iq4_xs::IQ4_XS, iq4_xs::quantize_by_importance),
];

/// [`quantize_matrix`] with an importance matrix: `k` weights of the columns'
/// squared errors, as ggml's `quantize_*` with `quant_weights`.
///
/// Formats whose ggml quantizer has no use for it are quantized without.
///
/// ```
/// use qgemm_formats::{quantize_by_importance, quantize_matrix};
/// let values: Vec<f32> = (0..2 * 256).map(|i| (i as f32).sin()).collect();
/// let importance: Vec<f32> = (0..256).map(|i| 1.0 / (i + 1) as f32).collect();
/// let q = quantize_by_importance(&values, 2, 256, "q4_k".parse()?, &importance)?;
/// assert_ne!(q.weight.blocks(), quantize_matrix(&values, 2, 256, "q4_k".parse()?)?.weight.blocks());
/// # Ok::<(), qgemm_formats::FormatError>(())
/// ```
///
/// # Errors
/// As [`quantize_matrix`]. [`FormatError::WrongLength`] for another number of
/// weights, [`FormatError::NotQuantizable`] for negative or non-finite ones.
pub fn quantize_by_importance(
    values: &[f32],
    n: usize,
    k: usize,
    format: Format,
    importance: &[f32],
) -> Result<Quantized, FormatError> {
    let used = format_for_k(format, k)?;
    let Some(&(_, quantize)) = BY_IMPORTANCE.iter().find(|(of, _)| Format::new(of) == used) else {
        return quantize_matrix(values, n, k, format);
    };
    if importance.len() != k {
        let (expected, got) = (k.saturating_mul(4), importance.len() * 4);
        return Err(FormatError::WrongLength { what: format!("importance of {k} columns"), expected, got });
    }
    if !importance.iter().all(|&weight| weight.is_finite() && weight >= 0.0) {
        let why = "an importance is negative, NaN or infinite";
        return Err(FormatError::NotQuantizable { format: used.desc().name, why });
    }
    let weight = quantize_rows(values, n, k, used, |row, blocks| quantize(row, importance, blocks))?;
    checked(values, weight, format)
}

/// Result of a quantizer, after checks of what it cannot check itself.
fn checked(values: &[f32], weight: HostWeight, requested: Format) -> Result<Quantized, FormatError> {
    let (n, k, used) = (weight.n(), weight.k(), weight.format());
    check_range(&weight)?;
    check_largest(values, &weight)?;
    let zeroed_rows = (0..n).into_par_iter().filter(|&row| is_zeroed(&weight, row, &values[row * k..][..k])).count();
    if zeroed_rows > 0 {
        tracing::warn!(format = %used, n, k, zeroed_rows, "rows of values too small for the format are now rows of zeros");
    }
    Ok(Quantized { weight, requested, used, zeroed_rows })
}

impl HostWeight {
    /// Requantizes this weight to another format through f32.
    /// Errors of both formats add up.
    ///
    /// Columns are in the order of input features.
    ///
    /// # Errors
    /// As [`quantize_matrix`]. Also when the weight's own values are not finite.
    pub fn to_format(&self, format: Format) -> Result<Quantized, FormatError> {
        quantize_matrix(&self.dequantize()?, self.n(), self.k(), format)
    }
}

/// Whether row `row` is all zeros though `values` are not.
fn is_zeroed(weight: &HostWeight, row: usize, values: &[f32]) -> bool {
    let format = weight.format();
    let factor = weight.row_scale().map_or(1.0, |scales| scales[row]);
    let mut decoded = vec![0.0; format.block_len];
    // The first block nearly always decides.
    let mut blocks = weight.row(row).chunks_exact(format.block_bytes);
    let is_zero = blocks.all(|block| {
        (format.dequantize_block)(block, &mut decoded);
        decoded.iter().all(|&value| value * factor == 0.0)
    });
    is_zero && values.iter().any(|&value| value != 0.0)
}

/// Checks that rows near the f32 limit did not overflow. A rounded scale times the
/// largest code may exceed the original maximum.
fn check_largest(values: &[f32], weight: &HostWeight) -> Result<(), FormatError> {
    const NEAR_THE_END: f32 = 1e38;
    let (format, k) = (weight.format(), weight.k());
    let infinite = values.par_chunks(k).enumerate().find_map_first(|(row, values)| {
        let is_near = values.iter().any(|value| value.abs() > NEAR_THE_END);
        let mut decoded = is_near.then(|| weight.dequantize_row(row)).into_iter().flatten();
        decoded.position(|value| !value.is_finite()).map(|column| (row, column / format.block_len))
    });
    infinite.map_or(Ok(()), |(row, block)| Err(out_of_range(format, row, block)))
}

fn quantize_rows(
    values: &[f32],
    n: usize,
    k: usize,
    format: Format,
    quantize: impl Fn(&[f32], &mut [u8]) + Sync,
) -> Result<HostWeight, FormatError> {
    let mut blocks = vec![0; matrix::check(format.desc(), values, n, k)?];
    check_magnitude(values, k, format)?;
    let padded = format.blocks_per_row(k) * format.block_len;
    let rows = blocks.par_chunks_mut(format.row_bytes(k)).zip(values.par_chunks(k));
    if padded == k {
        rows.for_each(|(blocks, row)| quantize(row, blocks));
    } else {
        rows.for_each(|(blocks, row)| {
            let mut row = row.to_vec();
            row.resize(padded, 0.0);
            quantize(&row, blocks);
        });
    }
    HostWeight::new(format, n, k, blocks.into())
}

/// Checks that no value is far beyond f16 scales (2.7e8 for Q6_K, the widest).
/// The quantizers' sums of cubes would overflow into results that look valid.
fn check_magnitude(values: &[f32], k: usize, format: Format) -> Result<(), FormatError> {
    const LIMIT: f32 = 1e10;
    if !format.float_scales.iter().any(|scale| scale.kind == ScaleType::F16) {
        return Ok(());
    }
    match values.par_iter().position_first(|v| v.abs() > LIMIT) {
        None => Ok(()),
        Some(at) => Err(out_of_range(format, at / k, at % k / format.block_len)),
    }
}

fn out_of_range(format: Format, row: usize, block: usize) -> FormatError {
    FormatError::NonFiniteScale { what: format!("values too large for {format}"), row, block }
}

/// Checks that no scale (and no value of a plain type) overflowed to infinity.
fn check_range(weight: &HostWeight) -> Result<(), FormatError> {
    let format = weight.format();
    let is_finite = |block: &[u8]| match format.encoding {
        Encoding::Plain(dtype) => dtype.read(block, 0).is_finite(),
        _ => format.float_scales.iter().all(|scale| scale.is_finite(block)),
    };
    let blocks = weight.blocks();
    match blocks.par_chunks_exact(format.block_bytes).position_first(|block| !is_finite(block)) {
        None => Ok(()),
        Some(at) => {
            let per_row = format.blocks_per_row(weight.stored_k());
            Err(out_of_range(format, at / per_row, at % per_row))
        }
    }
}
