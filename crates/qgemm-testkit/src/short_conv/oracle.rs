//! The oracle of `short_conv`, in f64.

use qgemm_hal::Activation;

use super::case::ShortConvCase;
use crate::expected::Expected;
use crate::gemm::activate;

/// Contents of a case's operands, contiguous.
pub(super) struct Inputs {
    pub x: Vec<f32>,
    /// `[channels, width]`.
    pub weight: Vec<f32>,
    pub bias: Vec<f32>,
    pub input_gate: Vec<f32>,
    pub output_gate: Vec<f32>,
    /// `[slots, width - 1, channels]`.
    pub state: Vec<f32>,
}

/// Results with the magnitude of their summands, and the state.
pub(super) struct Convolved {
    /// Rows of tokens outside all sequences are 0.
    pub d: Expected,
    pub state: Vec<f32>,
}

/// An input with its gate, rounded to the type of X.
fn gated(case: &ShortConvCase, inputs: &Inputs, token: usize, channel: usize) -> f32 {
    let at = token * case.channels + channel;
    match case.gates[0] {
        true => case.dtype.decode(&case.dtype.encode(&[inputs.x[at] * inputs.input_gate[at]]))[0],
        false => inputs.x[at],
    }
}

/// Convolves all sequences.
pub(super) fn convolve(case: &ShortConvCase, inputs: &Inputs) -> Convolved {
    let (channels, width, window) = (case.channels, case.width, case.width - 1);
    let len = case.tokens() * channels;
    let (mut values, mut energy, mut state) = (vec![0.0; len], vec![0.0; len], inputs.state.clone());
    let (slots, advance) = (case.slot_of_each(), case.advance());
    let from_zeros = case.state.is_some_and(|state| state.from_zeros);
    for (sequence, (first, count)) in case.spans().into_iter().enumerate().filter(|(_, (_, count))| *count > 0) {
        let slot = case.state.and_then(|_| usize::try_from(slots[sequence]).ok()).filter(|&slot| slot < case.slots());
        let old = slot.filter(|_| !from_zeros);
        for channel in 0..channels {
            // The old window, then the tokens.
            let before =
                (0..window).map(|row| old.map_or(0.0, |slot| inputs.state[(slot * window + row) * channels + channel]));
            let tokens = (first..first + count).map(|token| gated(case, inputs, token, channel));
            let all: Vec<f32> = before.chain(tokens).collect();
            for i in 0..count {
                let taps = inputs.weight[channel * width..][..width].iter().zip(&all[i..]);
                let bias = if case.bias { f64::from(inputs.bias[channel]) } else { 0.0 };
                let (mut sum, mut squares) = (bias, bias * bias);
                for (weight, input) in taps {
                    let product = f64::from(*weight) * f64::from(*input);
                    sum += product;
                    squares += product * product;
                }
                let (value, slope) = if case.silu { activate(Activation::Silu, sum) } else { (sum, 1.0) };
                let at = (first + i) * channels + channel;
                let gate = if case.gates[1] { f64::from(inputs.output_gate[at]) } else { 1.0 };
                values[at] = value * gate;
                energy[at] = (squares * slope * slope + value * value) * gate * gate;
            }
            let entering = advance.as_ref().map_or(count, |advance| count.min(advance[sequence] as usize));
            if let Some(slot) = slot {
                for row in 0..window {
                    state[(slot * window + row) * channels + channel] = all[entering + row];
                }
            }
        }
    }
    let floor = vec![0.0; len];
    Convolved { d: Expected { m: case.tokens(), n: channels, values, energy, floor }, state }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_continues_what_the_state_kept() {
        let conv = |x: &[f32], state: &[f32]| {
            let case = ShortConvCase { bias: false, silu: false, ..ShortConvCase::new([1, x.len()], 1, 3) };
            let slot = case.slot_of_each()[0] as usize;
            let mut both = vec![0.0; 2 * case.slots()];
            both[slot * 2..slot * 2 + 2].copy_from_slice(state);
            let none = Vec::new;
            let (weight, x) = (vec![100.0, 10.0, 1.0], x.to_vec());
            let inputs = Inputs { x, weight, bias: none(), input_gate: none(), output_gate: none(), state: both };
            let all = convolve(&case, &inputs);
            (all.d.values, all.state[slot * 2..slot * 2 + 2].to_vec())
        };
        let (whole, last) = conv(&[1.0, 2.0, 3.0, 4.0], &[8.0, 9.0]);
        assert_eq!((whole.as_slice(), last.as_slice()), (&[891.0, 912.0, 123.0, 234.0][..], &[3.0, 4.0][..]));
        let (first, state) = conv(&[1.0], &[8.0, 9.0]);
        let (rest, last) = conv(&[2.0, 3.0, 4.0], &state);
        assert_eq!(([first, rest].concat(), last), (whole, vec![3.0, 4.0]));
    }
}
