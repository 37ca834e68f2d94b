//! One gradient to check, as data.

use std::fmt;

use qgemm_formats::{DType, Format};
use qgemm_hal::Activation;

use crate::gemm::{Case, Epilogue, Layout, random_case};

/// Scratch memory in which any weight of a case is one part.
const WHOLE: usize = 1 << 30;

/// One gradient to check.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GradientCase {
    /// The layer: its X is dY here, `[m, n]`, and its D is dX, `[m, k]`. Of its epilogue alpha counts, and whether output features have
    /// a factor.
    pub layer: Case,
    /// Factor of what dX held.
    pub accumulate: Option<f32>,
    /// Bytes that parts of the weight may take as numbers.
    pub max_scratch: usize,
}

impl GradientCase {
    /// A plain gradient of a quantized weight with normal values, all in f32.
    pub fn new(format: Format, tokens: usize, n: usize, k: usize) -> Self {
        Self::of(Case::new(format, tokens, n, k))
    }

    /// The gradient of a layer, of one part.
    pub(super) fn of(layer: Case) -> Self {
        Self { layer, accumulate: None, max_scratch: WHOLE }
    }

    /// With dY of this type, and dX.
    pub fn of_types(self, dy: DType, dx: DType) -> Self {
        Self { layer: Case { x_dtype: dy, d_dtype: dx, ..self.layer }, ..self }
    }

    /// The case that `seed` stands for, in one of `formats`.
    pub(super) fn random(formats: &[Format], seed: u64) -> Self {
        let drawn = random_case(formats, seed);
        let Epilogue { alpha, channel_scale, c, .. } = drawn.epilogue;
        let layout = Layout { x_transposed: false, w_transposed: false, c_gap: 0, residual_gap: 0, ..drawn.layout };
        let epilogue = Epilogue {
            alpha,
            channel_scale,
            c: None,
            bias: None,
            token_scale: false,
            activation: Activation::Identity,
            residual: None,
        };
        let layer = Case { batch_invariant: false, epilogue, layout, ..drawn };
        let max_scratch = if seed.is_multiple_of(3) { 0 } else { WHOLE };
        Self { layer, accumulate: c.map(|(beta, _)| beta), max_scratch }
    }
}

/// As the layer's, and then whatever is not the default.
impl fmt::Display for GradientCase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.layer)?;
        if let Some(beta) = self.accumulate {
            write!(f, " accumulate={beta}")?;
        }
        if self.max_scratch != WHOLE {
            write!(f, " max-scratch={}", self.max_scratch)?;
        }
        Ok(())
    }
}
