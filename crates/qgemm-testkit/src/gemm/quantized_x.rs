//! Quantized X of a case: quantized on the host, uploaded, and
//! dequantized for the oracle.

use qgemm_api::{Buffer, Context, Error, Quantization, QuantizedX, QuantizedXParts};
use qgemm_formats::{DType, XCode, XFactor, XFormat, XParts, XRow};

use super::case::Case;
use crate::activations::ActivationKind;

/// Poison in gaps: NaN in every format but integers.
const POISON: u8 = 0xff;
/// The given factor if sums need not be exact.
const GIVEN: f32 = 0.03125 * 0.9;
const WORD: usize = 4;

/// Planes of a quantized X in host memory.
pub(crate) struct HostX {
    quantization: Quantization,
    codes: Vec<u8>,
    scales: Vec<u8>,
    factors: Vec<u8>,
    sums: Vec<u8>,
    given: Option<f32>,
    parts: XParts,
    /// Dequantized values, contiguous rows of K.
    pub values: Vec<f64>,
}

/// Planes of a quantized X on a device.
pub(crate) struct DeviceX {
    pub x: QuantizedX,
    pub factor: Option<Buffer>,
}

/// Options of the format: a given factor, and sums over 16
/// columns. Cases with odd seeds use them.
fn parts(case: &Case, format: XFormat) -> XParts {
    let odd = case.seed % 2 == 1;
    format.parts(odd, odd.then_some(16)).expect("a format of codes and scales")
}

/// Quantization of the case's X; `None` if X is plain.
pub(crate) fn quantization(case: &Case) -> Option<Quantization> {
    let format = case.x_format?;
    let (parts, k, gap) = (parts(case, format), case.k, case.layout.x_gap);
    let mut all = Quantization::new(case.m, k, DType::F32, format);
    if parts.factor == XFactor::Given && parts.scale.is_some() {
        all = all.given_factor();
    }
    if let Some(span) = parts.sum_span {
        all = all.sums_of(span).sums_row_stride(((parts.sums(k) + gap) * WORD) as u64);
    }
    if parts.scale.is_some() {
        all = all.scales_row_stride((parts.scale_bytes(k) + gap * WORD) as u64);
    }
    Some(all.codes_row_stride((parts.code_bytes(k) + gap * 16) as u64))
}

impl HostX {
    /// Quantizes `x`, rows of `case.k` values; `None` if the case's X
    /// is plain.
    pub fn new(case: &Case, x: &[f32]) -> Option<Self> {
        let quantization = quantization(&Case { m: x.len() / case.k, ..*case })?;
        let format = quantization.format();
        let (parts, k, gap) = (parts(case, format), case.k, case.layout.x_gap);
        let exact = case.sums_are_exact();
        let given = (parts.factor == XFactor::Given).then_some(if exact { 1.0 } else { GIVEN });
        let rows = x.len() / k;
        let strides = [
            parts.code_bytes(k) + gap * 16,
            parts.scale_bytes(k) + gap * WORD,
            if parts.factor == XFactor::PerToken { WORD } else { 0 },
            (parts.sums(k) + gap) * WORD,
        ];
        let [mut codes, mut scales, mut factors, mut sums] = strides.map(|stride| vec![POISON; rows * stride]);
        let mut values = Vec::with_capacity(x.len());
        for (row, x) in x.chunks_exact(k).enumerate() {
            let [codes, scales, factors, sums] = [(&mut codes, 0), (&mut scales, 1), (&mut factors, 2), (&mut sums, 3)]
                .map(|(plane, i)| &mut plane[row * strides[i]..(row + 1) * strides[i]]);
            let planes = XRow { codes, scales, sums };
            let made = if exact { small_integers(&parts, x, planes) } else { parts.quantize_row(x, given, planes) };
            // NaN becomes a NaN scale if the format has one.
            if case.activations == ActivationKind::NotFinite && parts.code == XCode::E4M3 && row % 4 == 3 {
                codes[k / 3] = 0x7f | (row as u8 & 4) << 5;
            }
            let factor = if parts.factor == XFactor::PerToken { made } else { given };
            if let (Some(factor), false) = (factor, factors.is_empty()) {
                factors.copy_from_slice(&factor.to_le_bytes());
            }
            values.extend(parts.dequantize_row(codes, scales, factor, k).into_iter().map(f64::from));
        }
        Some(Self { quantization, codes, scales, factors, sums, given, parts, values })
    }

    /// The planes in device memory.
    pub fn upload(&self, ctx: &Context) -> Result<DeviceX, Error> {
        let mut planes = QuantizedXParts::new(ctx.upload(&self.codes)?);
        let upload = |is_there: bool, plane: &[u8]| is_there.then(|| ctx.upload(plane)).transpose();
        planes.scales = upload(self.parts.scale.is_some(), &self.scales)?;
        planes.token_factors = upload(self.parts.factor == XFactor::PerToken, &self.factors)?;
        planes.sums = upload(self.parts.sum_span.is_some(), &self.sums)?;
        let factor = self.given.map(|factor| ctx.upload(&[factor])).transpose()?;
        Ok(DeviceX { x: QuantizedX::from_parts(&self.quantization, planes)?, factor })
    }
}

/// Writes integers from -2 to 2 with scales of 1, and returns a
/// factor of 1 if tokens have factors.
fn small_integers(parts: &XParts, x: &[f32], planes: XRow<'_>) -> Option<f32> {
    let XRow { codes, scales, sums } = planes;
    let k = x.len();
    codes[..parts.code_bytes(k)].fill(0);
    for (column, &value) in x.iter().enumerate() {
        let sign = value.is_sign_negative();
        let magnitude = value.abs();
        let by_size = |one: u8, two: u8| {
            if magnitude == 0.0 {
                0
            } else if magnitude == 1.0 {
                one
            } else {
                two
            }
        };
        match parts.code {
            XCode::Int8 => codes[column] = (value as i8) as u8,
            XCode::E4M3 => codes[column] = by_size(0x38, 0x40) | u8::from(sign) << 7,
            XCode::E2M1 => codes[column / 2] |= (by_size(2, 4) | u8::from(sign) << 3) << (4 * (column % 2)),
        }
    }
    let one: &[u8] = match parts.scale_width() {
        0 => &[],
        // E8M0 has no fraction, E4M3 three bits.
        1 if parts.factor == XFactor::None => &[127],
        1 => &[0x38],
        _ => &[0, 0, 0x80, 0x3f],
    };
    for (byte, one) in scales[..parts.scale_bytes(k)].iter_mut().zip(one.iter().cycle()) {
        *byte = *one;
    }
    if let Some(span) = parts.sum_span {
        let stored = &codes[..parts.code_bytes(k)];
        for (sum, codes) in sums.chunks_exact_mut(WORD).zip(stored.chunks(span)) {
            let total: i32 = codes.iter().map(|&code| i32::from(code as i8)).sum();
            sum.copy_from_slice(&(total as f32).to_le_bytes());
        }
    }
    (parts.factor == XFactor::PerToken).then_some(1.0)
}

#[cfg(test)]
mod tests {
    use qgemm_formats::Format;

    use super::*;

    #[test]
    fn small_integers_are_what_they_stand_for() {
        let format = Format::all().next().expect("some");
        for x_format in XFormat::ALL.into_iter().filter(|format| format.plain().is_none()) {
            for seed in [1, 2] {
                let case = Case { x_format: Some(x_format), seed, ..Case::new(format, 2, 1, 70) }.with_exact_sums();
                let x: Vec<f32> = (0..140).map(|i| (i % 5) as f32 - 2.0).collect();
                let host = HostX::new(&case, &x).expect("it is quantized");
                assert_eq!(host.values, x.iter().copied().map(f64::from).collect::<Vec<_>>(), "{x_format} {seed}");
            }
        }
    }
}
