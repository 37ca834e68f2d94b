//! [`quantize_matrix`]: plain weights to any format, with llama.cpp's choice where K does not suit it.

use rayon::prelude::*;

use crate::desc::{Encoding, Format, FormatDesc, QuantizeBlocks, ScaleType};
use crate::error::FormatError;
use crate::formats::{iq4_nl, iq4_xs, matrix, plain, q2_k, q3_k, q4_0, q4_k, q5_0, q5_1, q5_k, q6_k, q8_0};
use crate::weight::HostWeight;

/// A quantized weight, and whether its format is the one asked for.
#[derive(Clone, Debug)]
pub struct Quantized {
    /// The weight, in the format `used`.
    pub weight: HostWeight,
    /// The format that was asked for.
    pub requested: Format,
    /// The format that was used: another one where K is no multiple of the super-block.
    pub used: Format,
    /// Rows of which every value became 0 though not all were: their values are too small for the format's scales.
    pub zeroed_rows: usize,
}

/// What llama.cpp stores instead of a format with super-blocks of 256 where K is no multiple of 256.
static FALLBACKS: [(&FormatDesc, &FormatDesc); 6] = [
    (&q2_k::Q2_K, &q4_0::Q4_0),
    (&q3_k::Q3_K, &q4_0::Q4_0),
    (&q4_k::Q4_K, &q5_0::Q5_0),
    (&q5_k::Q5_K, &q5_1::Q5_1),
    (&q6_k::Q6_K, &q8_0::Q8_0),
    (&iq4_xs::IQ4_XS, &iq4_nl::IQ4_NL),
];

/// The format that a row of `k` values is stored in when `format` is asked for.
///
/// The same as `format` where its blocks divide `k`; else, for super-block formats, the fallback of llama.cpp
/// (Q4_K → Q5_0, Q5_K → Q5_1, Q6_K → Q8_0, Q2_K and Q3_K → Q4_0, IQ4_XS → IQ4_NL), or F16 where `k` is no
/// multiple of 32 either.
///
/// # Errors
/// [`FormatError::KNotMultiple`] where there is no fallback (Q4_0 with K = 40), [`FormatError::ZeroDimension`].
pub fn format_for_k(format: Format, k: usize) -> Result<Format, FormatError> {
    let error = match format.check_k(k) {
        Ok(()) => return Ok(format),
        Err(error) => error,
    };
    let fallback = FALLBACKS.iter().find(|(from, _)| Format::new(from) == format && k > 0);
    let (_, to) = fallback.ok_or(error)?;
    Ok(Format::new(if to.check_k(k).is_ok() { to } else { &plain::F16 }))
}

/// Quantizes a `[n, k]` weight, row-major, on all threads of the current rayon pool.
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
/// A [`FormatError`] when the dimensions do not match the values or the format ([`format_for_k`]), when a value
/// is NaN or infinite or leaves the range of the format, or when the format has no quantizer. Rows whose values are all too
/// small are no error: they are counted, and warned of.
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
    check_range(&weight)?;
    check_largest(values, &weight)?;
    let zeroed_rows = (0..n).into_par_iter().filter(|&row| is_zeroed(&weight, row, &values[row * k..][..k])).count();
    if zeroed_rows > 0 {
        tracing::warn!(format = %used, n, k, zeroed_rows, "rows of values too small for the format are now rows of zeros");
    }
    Ok(Quantized { weight, requested: format, used, zeroed_rows })
}

impl HostWeight {
    /// This weight in another format, by way of its values in f32: what the first format lost stays lost, and the second
    /// rounds again. The columns come in the order of the input features.
    ///
    /// # Errors
    /// As [`quantize_matrix`]; also when the weight's own values are not finite.
    pub fn to_format(&self, format: Format) -> Result<Quantized, FormatError> {
        quantize_matrix(&self.dequantize()?, self.n(), self.k(), format)
    }
}

/// Whether row `row`, made of `values`, is one of zeros though these are not.
fn is_zeroed(weight: &HostWeight, row: usize, values: &[f32]) -> bool {
    let format = weight.format();
    let factor = weight.row_scale().map_or(1.0, |scales| scales[row]);
    let mut decoded = vec![0.0; format.block_len];
    // Nearly always the first block ends the search.
    let mut blocks = weight.row(row).chunks_exact(format.block_bytes);
    let is_zero = blocks.all(|block| {
        (format.dequantize_block)(block, &mut decoded);
        decoded.iter().all(|&value| value * factor == 0.0)
    });
    is_zero && values.iter().any(|&value| value != 0.0)
}

/// Checks that rows of values near the end of f32's range did not become infinite: the product of a scale, which is
/// rounded, and the largest code may exceed what the scale was made from.
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
    quantize: QuantizeBlocks,
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

/// Checks that no value is far beyond what f16 scales reach (2.7e8 for Q6_K, the widest): the quantizers' sums of
/// cubes would overflow, and their results could look valid.
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
