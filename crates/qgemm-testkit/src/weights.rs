//! Weight generators for any format, from its description alone.

use half::f16;
use qgemm_api::quantize;
use qgemm_formats::{Encoding, FloatScale, Format, FormatError, HostWeight, NO_COLUMN, ScaleType};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use thiserror::Error;

use crate::activations::{normal, skip_normal};
use crate::gemm::ActOrder;

/// Kind of weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WeightKind {
    /// Normal values, quantized; [`WeightKind::Raw`] if the format
    /// has no quantizer.
    Quantized,
    /// Random codes and random finite scales, with bit patterns that
    /// no quantizer writes.
    Raw,
    /// Random codes, with one power of two for all scales: sums with
    /// small integers are exact.
    Exact,
    /// Random codes with the smallest scales the format can hold
    /// (subnormal in f16).
    TinyScales,
    /// Random codes, with scales so large that weights overflow f16.
    HugeScales,
    /// [`WeightKind::Raw`] with a NaN code or scale in every third
    /// row.
    Nan,
}

impl WeightKind {
    /// All finite kinds.
    pub const ALL: [WeightKind; 5] =
        [WeightKind::Quantized, WeightKind::Raw, WeightKind::Exact, WeightKind::TinyScales, WeightKind::HugeScales];

    /// Lower-case name for tables.
    pub const fn name(self) -> &'static str {
        match self {
            WeightKind::Quantized => "quantized",
            WeightKind::Raw => "raw",
            WeightKind::Exact => "exact",
            WeightKind::TinyScales => "tiny-scales",
            WeightKind::HugeScales => "huge-scales",
            WeightKind::Nan => "nan",
        }
    }

    /// Whether weights of `format` can be of this kind.
    pub fn suits(self, format: Format) -> bool {
        self != WeightKind::Nan || !nan_places(format).is_empty()
    }
}

/// Why no weight could be made.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum TestWeightError {
    /// The format cannot have this shape.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// Quantizing failed.
    #[error(transparent)]
    Api(#[from] qgemm_api::Error),
    /// Quantizing chose another format, so the wrong one would be
    /// tested.
    #[error("asked to quantize to {asked} with K = {k}, got {used}")]
    FellBack {
        /// The format asked for.
        asked: Format,
        /// The format used.
        used: Format,
        /// Input features.
        k: usize,
    },
    /// The format has no NaN, neither as code nor as scale.
    #[error("{0} has no code of NaN")]
    NoNan(Format),
    /// Such a weight cannot be loaded.
    #[error("a transposed weight cannot have a channel scale")]
    TransposedWithScale,
    /// A weight of the exact kind is not finite or too finely
    /// grained.
    #[error("{format}: weights of kind `{kind}` came out as {value}")]
    BadValue {
        /// The format.
        format: Format,
        /// The kind asked for.
        kind: &'static str,
        /// The offending value.
        value: f32,
    },
}

/// A weight `W[n, k]`. The same arguments give the same weight.
///
/// # Errors
/// When the format cannot have this `k`.
pub fn weight(
    kind: WeightKind,
    format: Format,
    n: usize,
    k: usize,
    act_order: Option<ActOrder>,
    seed: u64,
) -> Result<HostWeight, TestWeightError> {
    let mut rng = StdRng::seed_from_u64(seed ^ 0x3e16_4700_5eed_0000);
    let order = act_order.map(|order| column_order(order, format.block_len, k, &mut rng));
    let stored_k = order.as_ref().map_or(k, Vec::len);
    let quantizes = format.quantize_blocks.is_some() || format.quantize_matrix.is_some();
    let is_raw = kind != WeightKind::Quantized || !quantizes;
    // Codes of whole blocks are drawn later.
    let keeps_codes = !is_raw || order.is_some() || !stored_k.is_multiple_of(format.block_len);
    let (mut blocks, mut row_scale) = if quantizes && keeps_codes {
        let base = values(n, stored_k, order.as_deref(), &mut rng);
        let (quantized, used) = quantize(&base, n, stored_k, format)?;
        if used != format {
            return Err(TestWeightError::FellBack { asked: format, used, k: stored_k });
        }
        (quantized.blocks().to_vec(), quantized.row_scale().map(<[f32]>::to_vec))
    } else {
        format.check_k(stored_k)?;
        skip_normal(n * stored_k, &mut rng);
        (vec![0; format.row_offset(n, stored_k)], format.row_scale.then(|| vec![1.0; n]))
    };
    if is_raw {
        let scale = Scale::of(if kind == WeightKind::Quantized { WeightKind::Raw } else { kind });
        fill_raw(format, stored_k, &scale, order.as_deref(), &mut blocks, &mut rng);
        if let Some(scales) = &mut row_scale {
            let unit = code_magnitude(format, &mut rng);
            scales.iter_mut().for_each(|s| *s = scale.factor(unit, &mut rng));
        }
    }
    if kind == WeightKind::Nan {
        put_nan(format, stored_k, &mut blocks, &mut rng)?;
    }
    let mut weight = match order {
        None => HostWeight::new(format, n, k, blocks.into())?,
        Some(order) => HostWeight::with_k_order(format, n, k, blocks.into(), order)?,
    };
    if let Some(scales) = row_scale {
        weight = weight.with_row_scale(scales)?;
    }
    check(kind, &weight)?;
    Ok(weight)
}

/// Both weights of a gated pair, with the same column order.
///
/// # Errors
/// As [`weight`].
pub fn gated_weights(
    kind: WeightKind,
    format: Format,
    n: usize,
    k: usize,
    act_order: Option<ActOrder>,
    seed: u64,
) -> Result<[HostWeight; 2], TestWeightError> {
    let gate = weight(kind, format, n, k, act_order, seed)?;
    let up = weight(kind, format, n, k, act_order, seed ^ 0x00b0_7000)?;
    // Columns without a feature are at the same index in every
    // order.
    let Some(order) = gate.k_order() else { return Ok([gate, up]) };
    let ordered = HostWeight::with_k_order(format, n, k, up.blocks().to_vec().into(), order.to_vec())?;
    let up = match up.row_scale() {
        None => ordered,
        Some(scales) => ordered.with_row_scale(scales.to_vec())?,
    };
    Ok([gate, up])
}

/// Adds a random factor per output feature to `weight`. Factors
/// are powers of two: exact sums stay exact.
///
/// # Errors
/// When a product is not finite.
pub fn with_channel_scale(weight: HostWeight, seed: u64) -> Result<HostWeight, TestWeightError> {
    let mut rng = StdRng::seed_from_u64(seed ^ 0xc4a7);
    let own = weight.row_scale().map(<[f32]>::to_vec).unwrap_or_else(|| vec![1.0; weight.n()]);
    let scales = own.into_iter().map(|own| own * f32::from(rng.random_range(-2i8..=2)).exp2()).collect();
    Ok(weight.with_row_scale(scales)?)
}

/// Normal values, 0 in columns that take no input feature.
fn values(n: usize, stored_k: usize, order: Option<&[u32]>, rng: &mut StdRng) -> Vec<f32> {
    let mut values: Vec<f32> = (0..n * stored_k).map(|_| normal(rng)).collect();
    if let Some(order) = order {
        for row in values.chunks_exact_mut(stored_k) {
            for (value, _) in row.iter_mut().zip(order).filter(|(_, column)| **column == NO_COLUMN) {
                *value = 0.0;
            }
        }
    }
    values
}

/// Random order of input features, in groups of at most `group`.
fn column_order(order: ActOrder, group: usize, k: usize, rng: &mut StdRng) -> Vec<u32> {
    let mut columns: Vec<u32> = (0..k as u32).collect();
    for i in (1..k).rev() {
        columns.swap(i, rng.random_range(0..=i));
    }
    match order {
        ActOrder::Full => columns,
        // Every group lacks one column, as after tensor-parallel sharding.
        ActOrder::Padded => {
            let parts = columns.chunks((group - 1).max(1));
            parts.flat_map(|part| part.iter().copied().chain([NO_COLUMN])).collect()
        }
    }
}

/// Choice of scales.
struct Scale {
    kind: WeightKind,
    /// Root mean square of the weights.
    target: f32,
}

impl Scale {
    fn of(kind: WeightKind) -> Self {
        let target = match kind {
            WeightKind::Quantized | WeightKind::Raw | WeightKind::Exact | WeightKind::Nan => 1.0,
            WeightKind::TinyScales => 1e-6,
            WeightKind::HugeScales => 1e5,
        };
        Self { kind, target }
    }

    /// A factor for codes whose root mean square is `unit`.
    fn factor(&self, unit: f32, rng: &mut StdRng) -> f32 {
        let factor = self.target / unit;
        match self.kind {
            WeightKind::Exact => factor.log2().round().exp2(),
            _ => factor * rng.random_range(0.5..2.0),
        }
    }
}

/// Root mean square of decoded random codes, with scales of 1.
fn code_magnitude(format: Format, rng: &mut StdRng) -> f32 {
    let mut block = vec![0; format.block_bytes];
    let mut values = vec![0.0; format.block_len];
    let mut sum = 0.0;
    const SAMPLES: usize = 16;
    for _ in 0..SAMPLES {
        fill_codes(format, WeightKind::Raw, format.block_len, &mut block, rng);
        for scale in format.float_scales {
            write_scale(scale.kind, 1.0, &mut block[scale.offset..]);
        }
        (format.dequantize_block)(&block, &mut values);
        sum += values.iter().map(|v| v * v).sum::<f32>();
    }
    (sum / (SAMPLES * format.block_len) as f32).sqrt()
}

/// Overwrites whole blocks with random codes, and every scale.
/// The last block of a ragged row keeps the quantizer's codes,
/// because weights beyond K must stay zero. So does an act-order
/// weight.
fn fill_raw(
    format: Format,
    stored_k: usize,
    scale: &Scale,
    order: Option<&[u32]>,
    blocks: &mut [u8],
    rng: &mut StdRng,
) {
    let unit = code_magnitude(format, rng);
    let shared_rows = format.scale_planes.iter().map(|p| p.rows).max().unwrap_or(1);
    let per_row = format.blocks_per_row(stored_k);
    let mut factors = Vec::new();
    for (i, block) in blocks.chunks_exact_mut(format.block_bytes).enumerate() {
        let (row, column) = (i / per_row, i % per_row);
        let valid = format.block_len.min(stored_k - column * format.block_len);
        if order.is_none() {
            fill_codes(format, scale.kind, valid, block, rng);
        }
        // Rows that share a scale record hold copies.
        if row.is_multiple_of(shared_rows) && column == 0 {
            factors = (0..per_row * format.float_scales.len()).map(|_| scale.factor(unit, rng)).collect();
        }
        for (s, float) in format.float_scales.iter().enumerate() {
            write_scale(float.kind, factors[column * format.float_scales.len() + s], &mut block[float.offset..]);
        }
    }
}

/// Location of a NaN in a block.
#[derive(Clone, Copy)]
enum NanLocation {
    /// Any code; codes are bytes.
    Code,
    /// A one-byte scale: its offset and the code of NaN.
    Scale(usize, u8),
}

/// All locations; empty for integer codes with wider scales.
fn nan_places(format: Format) -> Vec<NanLocation> {
    let code = matches!(format.encoding, Encoding::E4M3 | Encoding::E5M2).then_some(NanLocation::Code);
    let scale = |scale: &FloatScale| match scale.kind {
        ScaleType::E4M3 => Some(NanLocation::Scale(scale.offset, 0x7f)),
        ScaleType::E8M0 => Some(NanLocation::Scale(scale.offset, 0xff)),
        ScaleType::F32 | ScaleType::F16 => None,
    };
    code.into_iter().chain(format.float_scales.iter().filter_map(scale)).collect()
}

/// Writes NaN of either sign into a block of every third row,
/// over all locations in turn.
fn put_nan(format: Format, stored_k: usize, blocks: &mut [u8], rng: &mut StdRng) -> Result<(), TestWeightError> {
    let places = nan_places(format);
    if places.is_empty() {
        return Err(TestWeightError::NoNan(format));
    }
    for (i, row) in blocks.chunks_exact_mut(format.row_bytes(stored_k)).step_by(3).enumerate() {
        let column = rng.random_range(0..stored_k);
        let block = &mut row[column / format.block_len * format.block_bytes..][..format.block_bytes];
        match places[i % places.len()] {
            NanLocation::Code => block[column % format.block_len] = if rng.random() { 0x7f } else { 0xff },
            NanLocation::Scale(offset, nan) => block[offset] = nan,
        }
    }
    Ok(())
}

/// Random codes and integer sub-scales for the first `valid`
/// values of a block. Float scales are written later.
fn fill_codes(format: Format, kind: WeightKind, valid: usize, block: &mut [u8], rng: &mut StdRng) {
    match format.encoding {
        Encoding::Plain(dtype) => {
            let value = match kind {
                WeightKind::Exact => rng.random_range(-8i32..=8) as f32,
                _ => normal(rng) * Scale::of(kind).target,
            };
            // f16 weights must not overflow.
            let largest = if dtype == qgemm_formats::DType::F16 { 60000.0 } else { f32::MAX };
            dtype.write(block, 0, value.clamp(-largest, largest));
        }
        Encoding::E4M3 | Encoding::E5M2 => {
            let codes = float8_codes(format, kind);
            block[..valid].iter_mut().for_each(|byte| *byte = codes[rng.random_range(0..codes.len())]);
        }
        _ if valid < format.block_len => {}
        _ => {
            rng.fill(block);
            if let Some(largest) = format.largest_zero_point() {
                let zero = &mut block[format.block_bytes - 1];
                *zero = (u16::from(*zero) % (u16::from(largest) + 1)) as u8;
            }
        }
    }
}

/// The finite codes of an FP8 format; for exact sums only small
/// integers.
fn float8_codes(format: Format, kind: WeightKind) -> Vec<u8> {
    let mut block = vec![0; format.block_bytes];
    for scale in format.float_scales {
        write_scale(scale.kind, 1.0, &mut block[scale.offset..]);
    }
    let mut values = vec![0.0; format.block_len];
    let usable = |code: &u8| {
        block[0] = *code;
        (format.dequantize_block)(&block, &mut values);
        let value = values[0];
        match kind {
            WeightKind::Exact => value.fract() == 0.0 && value.abs() <= 8.0,
            _ => value.is_finite() && value.abs() <= 448.0,
        }
    };
    (0..=255).filter(usable).collect()
}

/// Writes `value`, rounded and clamped to the scale type.
fn write_scale(kind: ScaleType, value: f32, to: &mut [u8]) {
    match kind {
        ScaleType::F32 => to[..4].copy_from_slice(&value.to_le_bytes()),
        ScaleType::F16 => {
            // A scale that rounds to 0 would make every weight vanish.
            let (smallest, largest) = (f16::MIN_POSITIVE_SUBNORMAL.to_f32(), f16::MAX.to_f32());
            let rounded = f16::from_f32(value.abs().clamp(smallest, largest).copysign(value));
            to[..2].copy_from_slice(&rounded.to_le_bytes());
        }
        ScaleType::E8M0 => to[0] = (value.abs().log2().round().clamp(-127.0, 127.0) + 127.0) as u8,
        ScaleType::E4M3 => to[0] = e4m3_at_most(value.abs()),
    }
}

/// The largest positive E4M3 number that is at most `value`.
fn e4m3_at_most(value: f32) -> u8 {
    let decode = |code: u8| match (code >> 3, f32::from(code & 7)) {
        (0, mantissa) => mantissa / 8.0 * 2.0f32.powi(-6),
        (exponent, mantissa) => (1.0 + mantissa / 8.0) * 2.0f32.powi(i32::from(exponent) - 7),
    };
    // 0x7f is NaN; 0 would make every weight vanish.
    (1..0x7f).rev().find(|&code| decode(code) <= value).unwrap_or(1)
}

/// Checks that weights are finite (but for [`WeightKind::Nan`])
/// and, for exact sums, multiples of 2^-10 of at most 2^10.
/// 2^13 products with integers up to 2 then fit the 24 bits of
/// f32.
fn check(kind: WeightKind, weight: &HostWeight) -> Result<(), TestWeightError> {
    let format = weight.format();
    let mut largest = 0.0f32;
    let mut finest = f32::MAX;
    for row in 0..weight.n() {
        for value in weight.dequantize_row(row) {
            let may_be_nan = kind == WeightKind::Nan && row % 3 == 0;
            if !(value.is_finite() || may_be_nan && value.is_nan()) {
                return Err(TestWeightError::BadValue { format, kind: kind.name(), value });
            }
            if value != 0.0 {
                largest = largest.max(value.abs());
                finest = finest.min(lowest_bit(value));
            }
        }
    }
    // Products with integers up to 2, summed over K in any order.
    let bits = (largest * 2.0 * weight.k() as f32 / finest).log2();
    if kind == WeightKind::Exact && largest > 0.0 && bits > 24.0 {
        return Err(TestWeightError::BadValue { format, kind: kind.name(), value: finest });
    }
    Ok(())
}

/// The value of the lowest set bit of a nonzero number.
fn lowest_bit(value: f32) -> f32 {
    let bits = value.to_bits();
    let (exponent, mantissa) = (bits >> 23 & 0xff, bits & 0x7f_ffff);
    let (mantissa, exponent) = if exponent == 0 { (mantissa, 1) } else { (mantissa | 0x80_0000, exponent) };
    2.0f32.powi(exponent as i32 - 150 + mantissa.trailing_zeros() as i32)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A K that every format allows: two of the largest blocks, or a
    /// little more than one block if ragged.
    fn ks(format: Format) -> Vec<usize> {
        if format.ragged_k { vec![format.block_len + 5, 512] } else { vec![512] }
    }

    #[test]
    fn every_format_has_weights_of_every_kind() {
        for format in Format::all() {
            for kind in WeightKind::ALL {
                for k in ks(format) {
                    let weight = weight(kind, format, 5, k, None, 1).unwrap_or_else(|e| panic!("{format} {k}: {e}"));
                    let distinct: std::collections::BTreeSet<u32> =
                        weight.dequantize_row(3).iter().map(|v| v.to_bits()).collect();
                    let codes = 1usize << format.code_bits().min(2);
                    assert!(distinct.len() >= codes, "{format} {} of K {k} is all but constant", kind.name());
                }
            }
        }
    }

    /// `fits_f16` decides from the scales; the test uses the values.
    #[test]
    fn weights_that_fit_f16_are_close_to_it() {
        let mut unfit = std::collections::BTreeSet::new();
        for format in Format::all() {
            for kind in WeightKind::ALL {
                let weight = weight(kind, format, 5, 512, None, 3).expect("valid");
                let unscaled = HostWeight::new(format, 5, 512, weight.blocks().to_vec().into()).expect("the same");
                for row in (0..5).map(|n| unscaled.dequantize_row(n)).filter(|_| weight.fits_f16()) {
                    let error: f64 = row.iter().map(|&v| f64::from(v - f16::from_f32(v).to_f32()).powi(2)).sum();
                    let energy: f64 = row.iter().map(|&v| f64::from(v).powi(2)).sum();
                    assert!(error <= 3e-7 * energy, "{format} {}: {error} of {energy}", kind.name());
                }
                if !weight.fits_f16() {
                    unfit.insert((format.name, kind.name()));
                }
            }
            assert!(!unfit.contains(&(format.name, "quantized")), "{format}");
        }
        for name in ["q4_0", "q4_k", "q6_k", "mxfp4", "int4_g128", "fp8_e4m3_block128", "bf16", "f32"] {
            assert!(unfit.contains(&(name, "huge-scales")), "{name}");
        }
        for name in ["fp8_e4m3_block128", "f32", "bf16"] {
            assert!(unfit.contains(&(name, "tiny-scales")), "{name}");
        }
        assert!(!unfit.iter().any(|&(name, kind)| name.starts_with('q') && kind == "tiny-scales"));
    }

    #[test]
    fn nan_is_in_every_third_row() {
        let mut names = Vec::new();
        for format in Format::all().filter(|&format| WeightKind::Nan.suits(format)) {
            let weight = weight(WeightKind::Nan, format, 8, 512, None, 2).expect("valid");
            for row in 0..8 {
                let has_nan = weight.dequantize_row(row).iter().any(|value| value.is_nan());
                assert_eq!(has_nan, row % 3 == 0, "{format} row {row}");
            }
            names.push(format.name);
        }
        let float8 = ["fp8_e4m3", "fp8_e5m2", "fp8_e4m3_block128", "fp8_e5m2_block128"];
        assert!(float8.iter().chain(&["mxfp4", "mxfp8", "mxfp8_e5m2", "nvfp4"]).all(|name| names.contains(name)));
        assert!(weight(WeightKind::Nan, "q4_0".parse().expect("a format"), 8, 512, None, 2).is_err());
    }

    #[test]
    fn act_order_takes_every_feature_once() {
        let format: Format = "int4_g32".parse().expect("a format");
        for order in [ActOrder::Full, ActOrder::Padded] {
            let weight = weight(WeightKind::Raw, format, 3, 77, Some(order), 2).expect("valid");
            let mut features: Vec<u32> =
                weight.k_order().expect("permuted").iter().copied().filter(|&c| c != NO_COLUMN).collect();
            assert_ne!(features, (0..77).collect::<Vec<_>>());
            features.sort_unstable();
            assert_eq!(features, (0..77).collect::<Vec<_>>());
        }
    }

    #[test]
    fn lowest_bits() {
        for (value, bit) in [(1.0, 1.0), (12.0, 4.0), (-0.75, 0.25), (f32::from_bits(6), f32::from_bits(2))] {
            assert_eq!(lowest_bit(value), bit, "{value}");
        }
    }
}
