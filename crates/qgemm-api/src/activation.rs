//! Validation of activations.

use qgemm_hal::{Activation, ClampedSwiglu};

use crate::error::Error;

/// Checks the numbers of `activation`, and that `pair`, gate and up,
/// exists if it needs one. `what` names the operation in errors.
pub(crate) fn check_activation(activation: Activation, pair: bool, what: &'static str) -> Result<(), Error> {
    if activation.is_of_pairs() && !pair {
        return Err(Error::ActivationOfPairs { activation, got: what });
    }
    let Activation::ClampedSwiglu(ClampedSwiglu { alpha, beta, limit }) = activation else { return Ok(()) };
    let wrong =
        |name, expected, got| Err(Error::ActivationNumber { activation: activation.name(), name, expected, got });
    for (name, got) in [("alpha", alpha), ("beta", beta)] {
        if !got.is_finite() {
            return wrong(name, "a finite number", got);
        }
    }
    if limit > 0.0 && limit.is_finite() { Ok(()) } else { wrong("limit", "a finite number above 0", limit) }
}
