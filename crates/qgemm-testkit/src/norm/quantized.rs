//! Checks a norm's quantized result. Every scale must follow from
//! its block's largest value, and every code must be the nearest,
//! within the error of a norm.

use qgemm_formats::{XCode, XFactor, XParts, XRow};

use crate::expected::Expected;
use crate::outcome::Failure;
use crate::planes::{PLANES, Plane};

/// Error limit of a value, relative to the root of its energy:
/// the root of the limit on a norm's squares.
const SHARE: f64 = 3e-5;
/// Error of a centered value from its f32 mean, relative to the
/// row's root mean square. A value next to the mean is a small
/// difference of two numbers.
const MEAN: f64 = f32::EPSILON as f64;
/// Errors that choose a scale are counted in 32nds of the scale,
/// rounded, from f16 values.
const COUNTED: f64 = 0.5 / 32.0 + 1.0 / 128.0;
/// Rounding error of a value's quotients by factor and scale.
const QUOTIENTS: f64 = 1e-6;

/// Compares planes with the oracle's rows. If these are centered,
/// a mean was subtracted.
/// Returns the relative energy of the error; `None` if it is not
/// finite.
pub(super) fn check(
    expected: &Expected,
    is_centered: bool,
    parts: &XParts,
    given: Option<f32>,
    planes: &[Plane; PLANES],
    buffers: &[Vec<u8>],
) -> Result<Option<f64>, Failure> {
    for (plane, buffer) in planes.iter().zip(buffers) {
        plane.check_outside(buffer)?;
    }
    let columns = expected.n;
    let (mut error, mut energy) = (0.0, 0.0);
    for row in 0..expected.m {
        let [codes, scales, factors, sums] = [0, 1, 2, 3].map(|plane| &buffers[plane][planes[plane].row(row)]);
        let of_row = row * columns..(row + 1) * columns;
        // Columns past the last are zeros.
        let stored = parts.columns(columns);
        let mut values = expected.values[of_row.clone()].to_vec();
        let finite = values.iter().filter(|value| value.is_finite());
        let mean = if is_centered { MEAN } else { 0.0 };
        let of_mean = mean * (finite.map(|value| value * value).sum::<f64>() / columns as f64).sqrt();
        let reach = |at: usize| SHARE * expected.energy[at].sqrt() + expected.floor[at] + of_mean;
        let mut reach: Vec<f64> = of_row.map(reach).collect();
        values.resize(stored, 0.0);
        reach.resize(stored, 0.0);
        let own = Row { parts, row, values: &values, reach: &reach };
        let factor = own.factor(given, factors)?;
        own.check_scales(scales, factor)?;
        let back = parts.dequantize_row(codes, scales, factor, stored);
        own.check_codes(&back, scales, factor)?;
        own.check_sums(codes, scales, sums)?;
        for (value, back) in values.iter().zip(&back) {
            error += (value - f64::from(*back)).powi(2);
            energy += value.powi(2);
        }
    }
    Ok(Some(error / energy).filter(|loss| loss.is_finite()))
}

/// A row of the oracle, with error limits of its values.
struct Row<'a> {
    parts: &'a XParts,
    row: usize,
    values: &'a [f64],
    reach: &'a [f64],
}

impl Row<'_> {
    fn wrong<T>(&self, what: String) -> Result<T, Failure> {
        Err(Failure::WrongCode(format!("row {}: {what}", self.row)))
    }

    /// Bounds of the largest magnitude over some columns; `None` if a
    /// bound is not finite.
    fn largest(&self, columns: std::ops::Range<usize>, of_finite: bool) -> Option<[f32; 2]> {
        let mut bounds = [0.0f64; 2];
        for (value, reach) in self.values[columns.clone()].iter().zip(&self.reach[columns]) {
            if value.is_finite() {
                bounds = [bounds[0].max(value.abs() - reach), bounds[1].max(value.abs() + reach)];
            } else if !of_finite {
                return None;
            }
        }
        let bounds = bounds.map(|bound| bound as f32);
        // Rounding to f32 widens the bounds.
        Some([bounds[0] * (1.0 - f32::EPSILON), bounds[1] * (1.0 + f32::EPSILON)])
    }

    /// The factor that divides values, if any.
    fn factor(&self, given: Option<f32>, stored: &[u8]) -> Result<Option<f32>, Failure> {
        if self.parts.factor != XFactor::PerToken {
            return Ok(given);
        }
        let got = word(stored, 0);
        let bounds = self.largest(0..self.values.len(), true).unwrap_or_default();
        let [least, most] = bounds.map(|largest| made(self.parts, largest, None).1.unwrap_or(f32::NAN));
        match (least..=most).contains(&got) {
            true => Ok(Some(got)),
            false => self.wrong(format!("its factor is {got:e}, expected {least:e} to {most:e}")),
        }
    }

    fn check_scales(&self, scales: &[u8], factor: Option<f32>) -> Result<(), Failure> {
        if self.parts.scale.is_none() {
            return Ok(());
        }
        let block = self.parts.block.unwrap_or(self.values.len());
        for at in 0..self.values.len() / block {
            let got = scale(self.parts, scales, at);
            match self.largest(at * block..(at + 1) * block, false) {
                None if got.is_nan() => {}
                None => return self.wrong(format!("scale {at} is {got:e} of what is not finite")),
                Some(bounds) => {
                    let [least, most] = bounds.map(|largest| choices(self.parts, largest, factor));
                    if !least.iter().zip(&most).any(|(least, most)| (*least..=*most).contains(&got)) {
                        return self.wrong(format!("scale {at} is {got:e}, expected {least:?} to {most:?}"));
                    }
                    let certain = least.iter().zip(&most).filter(|(least, most)| least == most);
                    let certain: Vec<f32> = certain.map(|(scale, _)| *scale).collect();
                    self.check_choice(at * block..(at + 1) * block, got, &certain, factor)?;
                }
            }
        }
        Ok(())
    }

    /// Checks that no scale of `choices` (certain for the block) has
    /// a smaller error than `got`, within the limits of errors and
    /// values.
    fn check_choice(
        &self,
        columns: std::ops::Range<usize>,
        got: f32,
        choices: &[f32],
        factor: Option<f32>,
    ) -> Result<(), Failure> {
        let numbers = numbers(self.parts.code);
        let values = || self.values[columns.clone()].iter().zip(&self.reach[columns.clone()]);
        let error = |scale: f32, slack: f64| {
            let unit = f64::from(factor.unwrap_or(1.0)) * f64::from(scale);
            let of = |(value, reach): (&f64, &f64)| {
                let off = numbers.iter().map(|number| (number * unit - value).abs()).fold(f64::INFINITY, f64::min);
                (off + slack * (reach + unit * COUNTED)).max(0.0).powi(2)
            };
            values().map(of).sum::<f64>()
        };
        let own = error(got, -1.0);
        match choices.iter().find(|&&scale| scale > 0.0 && error(scale, 1.0) < own) {
            None => Ok(()),
            Some(better) => {
                self.wrong(format!("columns {columns:?} have a scale of {got:e}, and {better:e} is better"))
            }
        }
    }

    /// Checks that no other code is nearer to a value.
    fn check_codes(&self, back: &[f32], scales: &[u8], factor: Option<f32>) -> Result<(), Failure> {
        let numbers = numbers(self.parts.code);
        for (column, (&got, (&value, reach))) in back.iter().zip(self.values.iter().zip(self.reach)).enumerate() {
            let of_block = self
                .parts
                .scale
                .map_or(1.0, |_| scale(self.parts, scales, self.parts.block.map_or(0, |block| column / block)));
            let unit = f64::from(factor.unwrap_or(1.0)) * f64::from(of_block);
            let is_right = if unit.is_nan() || !value.is_finite() {
                got.is_nan()
            } else {
                let place = numbers.partition_point(|number| number * unit < value);
                let beside = numbers[place.saturating_sub(1)..numbers.len().min(place + 1)].iter();
                let nearest = beside.map(|number| (number * unit - value).abs()).fold(f64::INFINITY, f64::min);
                let off = (f64::from(got) - value).abs();
                off <= nearest + reach * 2.0 + QUOTIENTS * (value.abs() + unit)
            };
            if !is_right {
                return self.wrong(format!("column {column} became {got:e}, and is {value:e} (unit {unit:e})"));
            }
        }
        Ok(())
    }

    /// Checks sums against the written codes.
    fn check_sums(&self, codes: &[u8], scales: &[u8], sums: &[u8]) -> Result<(), Failure> {
        let Some(span) = self.parts.sum_span else { return Ok(()) };
        for (at, codes) in codes.chunks_exact(span).enumerate() {
            let of_block = scale(self.parts, scales, self.parts.block.map_or(0, |block| at * span / block));
            let total: i32 = codes.iter().map(|&code| i32::from(code as i8)).sum();
            let (expected, got) = (total as f32 * of_block, word(sums, at));
            if got.to_bits() != expected.to_bits() && !(got.is_nan() && expected.is_nan()) {
                return self.wrong(format!("sum {at} is {got:e}, expected {expected:e}"));
            }
        }
        Ok(())
    }
}

fn word(bytes: &[u8], at: usize) -> f32 {
    f32::from_le_bytes([0, 1, 2, 3].map(|byte| bytes[at * 4 + byte]))
}

/// A scale as a number.
fn scale(parts: &XParts, scales: &[u8], at: usize) -> f32 {
    let one = XParts { code: XCode::Int8, block: None, factor: XFactor::None, sum_span: None, ..*parts };
    one.dequantize_row(&[1], &scales[at * parts.scale_width()..], None, 1)[0]
}

/// Possible scales of a block with this largest magnitude.
fn choices(parts: &XParts, largest: f32, factor: Option<f32>) -> Vec<f32> {
    match parts.code {
        XCode::E2M1 => parts.e2m1_scales(largest, factor).to_vec(),
        _ => vec![made(parts, largest, factor).0],
    }
}

/// Scale and factor of a block with this largest magnitude.
/// `factor` is the row's, if it has one.
fn made(parts: &XParts, largest: f32, factor: Option<f32>) -> (f32, Option<f32>) {
    let with_given = factor.filter(|_| parts.factor == XFactor::PerToken).map(|_| XFactor::Given);
    let parts = XParts { factor: with_given.unwrap_or(parts.factor), ..*parts };
    let mut codes = vec![0; parts.code_bytes(1)];
    let (mut scales, mut sums) = (vec![0; parts.scale_bytes(1)], vec![0; parts.sums(1) * 4]);
    let row = XRow { codes: &mut codes, scales: &mut scales, sums: &mut sums };
    let factor = parts.quantize_row(&[largest], factor, row);
    (scale(&parts, &scales, 0), factor)
}

/// Every value that a code can have, in order.
fn numbers(code: XCode) -> Vec<f64> {
    let parts = XParts { code, block: None, scale: None, factor: XFactor::None, sum_span: None };
    let codes: Vec<u8> = match code {
        XCode::Int8 => (-127..=127i8).map(|code| code as u8).collect(),
        XCode::E4M3 | XCode::E2M1 => (0..=255).collect(),
    };
    let all = parts.dequantize_row(&codes, &[], None, codes.len());
    let mut all: Vec<f64> = all.into_iter().filter(|number| !number.is_nan()).map(f64::from).collect();
    all.sort_by(f64::total_cmp);
    all
}

#[cfg(test)]
mod tests {
    use qgemm_formats::XFormat;

    use super::*;
    use crate::planes::planes_of;

    #[test]
    fn what_the_reference_writes_is_right_and_what_differs_is_not() {
        let values: Vec<f64> = (0..200).map(|i| f64::from(((i * i) as f32 * 0.37).sin())).collect();
        let energy = values.iter().map(|value| value * value).collect();
        let expected = Expected { m: 1, n: 200, floor: vec![0.0; 200], energy, values };
        for format in XFormat::ALL {
            for parts in [false, true].into_iter().filter_map(|given| format.parts(given, None)) {
                let given = (parts.factor == XFactor::Given).then_some(0.01);
                let planes = planes_of(&parts, [1, 200], 0, 0);
                let mut buffers: Vec<Vec<u8>> = planes.iter().map(Plane::poison).collect();
                let rows: Vec<f32> = expected.values.iter().map(|&value| value as f32).collect();
                let mut written = planes.map(|plane| vec![0u8; plane.row_bytes]);
                let [codes, scales, factors, sums] = &mut written;
                if let Some(factor) = parts.quantize_row(&rows, given, XRow { codes, scales, sums }) {
                    factors.copy_from_slice(&factor.to_le_bytes());
                }
                for ((buffer, plane), written) in buffers.iter_mut().zip(&planes).zip(&written) {
                    buffer[plane.row(0)].copy_from_slice(written);
                }
                let loss = check(&expected, false, &parts, given, &planes, &buffers).expect("the reference");
                assert!(loss.is_some_and(|loss| loss < 0.05), "{format}: {loss:?}");
                for plane in 0..PLANES {
                    let range = planes[plane].row(0);
                    if range.is_empty() {
                        continue;
                    }
                    let mut wrong = buffers.clone();
                    wrong[plane][range.start] ^= 0x21;
                    wrong[plane][range.start + 1] ^= 0x21;
                    assert!(
                        check(&expected, false, &parts, given, &planes, &wrong).is_err(),
                        "{format}: plane {plane}"
                    );
                }
            }
        }
    }
}
