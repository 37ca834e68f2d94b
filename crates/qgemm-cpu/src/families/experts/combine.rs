//! Combine step: weighted sum of a token's slots, in slot order.

use qgemm_formats::DType;
use qgemm_hal::{CheckedExperts, Combine, Dense, ExpertFault, ExpertForm, ExpertOperand, HalError, Operand};
use rayon::prelude::*;

use super::index::{Fault, expert_at};
use crate::operand::{Input, Output};
use crate::simd::Simd;

/// Products below which only the calling thread works, because
/// waking others takes longer.
const SERIAL_PRODUCTS: usize = 1 << 15;
/// Features that are added together.
const PART: usize = 256;

/// Inputs of the combine step.
pub struct Source<'a> {
    /// Products of the slots, f32.
    pub products: &'a [u8],
    /// Experts of the slots.
    pub index: &'a [u8],
    /// Router weights of the slots, f32.
    pub weights: &'a [u8],
    /// Residual, added last.
    pub residual: &'a [u8],
}

/// Writes the sum of every token. Slots without an
/// expert or with a NaN weight are skipped; the first
/// NaN is returned as a fault.
///
/// # Errors
/// [`HalError::OutOfBounds`] for an operand that is too short.
pub fn run(op: &CheckedExperts, combine: Combine, source: &Source<'_>, d: &mut [u8]) -> Result<Fault, HalError> {
    use ExpertOperand as O;
    let ExpertForm::Indexed { top_k, .. } = op.form else { return Ok(None) };
    let (tokens, features) = (op.tokens(), op.each.out_features);
    let matrix = |bytes, dense, rows, what: O| Input::new(bytes, dense, [rows, features], what.name());
    let products = matrix(source.products, Dense::rows_of(DType::F32, features), op.each.m, O::Products)?;
    let residual = combine.residual.map(|dense| matrix(source.residual, dense, tokens, O::Residual)).transpose()?;
    let d = Output::new(d, combine.d, [tokens, features], O::D.name())?;
    let (len, end) = (source.weights.len(), op.each.m * 4);
    if len < end {
        return Err(HalError::OutOfBounds { what: O::RouterWeights.name(), start: 0, end, len });
    }
    let weight = |slot: usize| DType::F32.read(source.weights, slot);
    let simd = Simd::best();
    let token = |token: usize| {
        let (mut sums, mut added) = ([0.0f32; PART], [0.0f32; PART]);
        for first in (0..features).step_by(PART) {
            let width = PART.min(features - first);
            let (sums, added) = (&mut sums[..width], &mut added[..width]);
            sums.fill(0.0);
            for slot in token * top_k..(token + 1) * top_k {
                let weight = weight(slot);
                if weight.is_nan() || expert_at(source.index, slot, op.experts).is_none() {
                    continue;
                }
                products.part(simd, slot, first, added);
                sums.iter_mut().zip(&*added).for_each(|(sum, product)| *sum += weight * *product);
            }
            if let Some(residual) = &residual {
                residual.part(simd, token, first, added);
                sums.iter_mut().zip(&*added).for_each(|(sum, residual)| *sum += *residual);
            }
            // SAFETY: each token belongs to one thread.
            unsafe { d.store_part(token, first, sums) };
        }
    };
    if op.each.m * features < SERIAL_PRODUCTS {
        (0..tokens).for_each(token);
    } else {
        (0..tokens).into_par_iter().for_each(token);
    }
    let fault = (0..op.each.m).find(|&slot| weight(slot).is_nan());
    Ok(fault.map(|slot| (ExpertFault::RouterWeight, slot as u32)))
}
