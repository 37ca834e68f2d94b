//! Kernel modes, packed into one word of the parameters: `Params::modes`,
//! read by `mode()` of `shaders/modes.wgsl`.

use qgemm_formats::DType;
use qgemm_hal::abi::{activation_code, dtype_code, expert_form_code};
use qgemm_hal::{Activation, CheckedGemm, ClampedSwiglu, ExpertForm};

/// Bits of a mode.
const BITS: u32 = 4;

/// Name of each mode's first bit in shaders, lowest first.
const NAMES: [&str; 7] = ["ACTIVATION_MODE", "X_MODE", "D_MODE", "C_MODE", "BIAS_MODE", "RESIDUAL_MODE", "FORM_MODE"];

/// Indices of two modes in `NAMES`.
const X: u32 = 1;
const RESIDUAL: u32 = 5;

/// Types that shaders look up when they access operands.
/// Absent operands have no type.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Modes {
    pub activation: Activation,
    pub x: Option<DType>,
    pub d: Option<DType>,
    pub c: Option<DType>,
    pub bias: Option<DType>,
    pub residual: Option<DType>,
    /// Assignment of rows to experts, if there are any.
    pub form: Option<ExpertForm>,
}

impl Modes {
    /// The packed word.
    pub fn packed(self) -> u32 {
        let Self { activation, x, d, c, bias, residual, form } = self;
        let types = [x, d, c, bias, residual].map(|dtype| dtype.map_or(0, dtype_code));
        let form = form.map_or(0, expert_form_code);
        types.iter().rev().fold(form, |word, code| word << BITS | code) << BITS | activation_code(activation)
    }

    /// The packed word with these codes for the types of X
    /// and residual. Formats that are not a [`DType`] have codes, too.
    pub fn packed_with(self, x: u32, residual: u32) -> u32 {
        let word = Self { x: None, residual: None, ..self }.packed();
        word | x << (X * BITS) | residual << (RESIDUAL * BITS)
    }
}

/// Numbers of a gated pair's clamped SwiGLU, which take
/// the fields of C.
pub(super) fn swiglu_of(op: &CheckedGemm) -> Option<ClampedSwiglu> {
    match op.activation {
        Activation::ClampedSwiglu(swiglu) if op.gated => Some(swiglu),
        _ => None,
    }
}

/// The first bit of every mode, for shaders.
pub(crate) fn constants() -> impl Iterator<Item = (&'static str, u32)> {
    NAMES.into_iter().zip((0..).map(|i| i * BITS))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_mode_stands_where_shaders_look_for_it() {
        let first_bit = |name| constants().find(|(n, _)| *n == name).expect("a mode").1;
        let mode_of = |word: u32, name| word >> first_bit(name) & 15;
        let mode = |modes: Modes, name| mode_of(modes.packed(), name);
        let of = |change: fn(&mut Modes)| {
            let mut modes = Modes::default();
            change(&mut modes);
            modes
        };
        let bf16 = dtype_code(DType::BF16);
        let cases = [
            (of(|m| m.activation = Activation::GeluErf), "ACTIVATION_MODE", activation_code(Activation::GeluErf)),
            (of(|m| m.x = Some(DType::BF16)), "X_MODE", bf16),
            (of(|m| m.d = Some(DType::BF16)), "D_MODE", bf16),
            (of(|m| m.c = Some(DType::BF16)), "C_MODE", bf16),
            (of(|m| m.bias = Some(DType::BF16)), "BIAS_MODE", bf16),
            (of(|m| m.residual = Some(DType::BF16)), "RESIDUAL_MODE", bf16),
            (of(|m| m.form = Some(ExpertForm::Masked { capacity: 9 })), "FORM_MODE", 1),
        ];
        assert_eq!(mode_of(Modes::default().packed_with(3, 0), "X_MODE"), 3);
        assert_eq!(mode_of(Modes::default().packed_with(0, 3), "RESIDUAL_MODE"), 3);
        for (modes, own, code) in cases {
            for (name, _) in constants() {
                assert_eq!(mode(modes, name), if name == own { code } else { 0 }, "{name} of {modes:?}");
            }
        }
    }
}
