//! Depthwise convolution: weighted sums of consecutive rows.

use super::activation::{Function, Silu};
use super::vector::{LANES, Vector};

/// Weights of a depthwise convolution, a row for each tap.
#[derive(Clone, Copy, Debug)]
pub struct Taps<'a> {
    /// `[tap][channel]`, oldest input first.
    pub weights: &'a [f32],
    /// `[channel]`.
    pub bias: &'a [f32],
    /// Number of taps.
    pub width: usize,
    /// Floats between rows of weights, and of inputs.
    pub pitch: usize,
    /// Whether SiLU follows.
    pub silu: bool,
}

/// `out[channel] = act(bias[channel] + Σ weights[tap][channel] ·
/// inputs[tap][channel])`, in the order of the taps.
///
/// # Safety
/// The CPU must support the level's instructions. `out` holds whole
/// vectors; bias and every row hold as many floats.
#[inline(always)]
pub unsafe fn convolve<V: Vector>(taps: &Taps<'_>, inputs: &[f32], out: &mut [f32]) {
    for first in (0..out.len()).step_by(LANES) {
        // SAFETY: guaranteed by the caller.
        unsafe {
            let mut sum = V::load(taps.bias.as_ptr().add(first));
            for tap in 0..taps.width {
                let at = tap * taps.pitch + first;
                sum = V::multiply_add(V::load(taps.weights.as_ptr().add(at)), V::load(inputs.as_ptr().add(at)), sum);
            }
            if taps.silu {
                sum = Silu.of::<V>(sum);
            }
            V::store(out.as_mut_ptr().add(first), sum);
        }
    }
}
