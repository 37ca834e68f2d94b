//! Activation functions.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::str::FromStr;

/// Activation applied to
/// `alpha · X·Wᵀ + beta · C + bias`, before
/// the residual is added.
///
/// Exhaustive on purpose: every backend computes each function in
/// its innermost loops and cannot refuse one. The compiler then
/// names the backends that lack a new function. Adding one requires
/// a new version of this library.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Activation {
    /// None.
    #[default]
    Identity,
    /// `max(v, 0)`.
    Relu,
    /// `max(v, 0)²`.
    ReluSquared,
    /// `v / (1 + exp(−v))`, also called swish.
    Silu,
    /// GELU, tanh approximation:
    /// `v / 2 · (1 + tanh(√(2/π) · (v + 0.044715 v³)))`.
    GeluTanh,
    /// Exact GELU: `v / 2 · (1 + erf(v / √2))`.
    GeluErf,
    /// SwiGLU of clamped values; of gated pairs only.
    ClampedSwiglu(ClampedSwiglu),
}

impl Activation {
    /// Every activation of one value.
    pub const ALL: [Self; 6] =
        [Self::Identity, Self::Relu, Self::Silu, Self::GeluTanh, Self::GeluErf, Self::ReluSquared];

    /// Name in tables: `gelu_tanh`. It has no numbers; the
    /// [`Display`](fmt::Display) text has.
    pub fn name(self) -> &'static str {
        match self {
            Self::Identity => "identity",
            Self::Relu => "relu",
            Self::ReluSquared => "relu_squared",
            Self::Silu => "silu",
            Self::GeluTanh => "gelu_tanh",
            Self::GeluErf => "gelu_erf",
            Self::ClampedSwiglu(_) => CLAMPED_SWIGLU,
        }
    }

    /// Whether the function needs gate and up of a gated pair.
    pub fn is_of_pairs(self) -> bool {
        matches!(self, Self::ClampedSwiglu(_))
    }
}

/// Name of [`Activation::ClampedSwiglu`].
const CLAMPED_SWIGLU: &str = "clamped_swiglu";

/// The name, with numbers in brackets:
/// `clamped_swiglu(1.702,1,7)` is alpha, beta, limit.
impl fmt::Display for Activation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::ClampedSwiglu(ClampedSwiglu { alpha, beta, limit }) => {
                write!(f, "{CLAMPED_SWIGLU}({alpha},{beta},{limit})")
            }
            plain => f.write_str(plain.name()),
        }
    }
}

/// Text that names no activation.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "expected identity, relu, relu_squared, silu, gelu_tanh, gelu_erf or clamped_swiglu(alpha,beta,limit), got {0:?}"
)]
pub struct UnknownActivation(pub String);

/// Reads the [`Display`](fmt::Display) text.
impl FromStr for Activation {
    type Err = UnknownActivation;

    fn from_str(text: &str) -> Result<Self, UnknownActivation> {
        if let Some(plain) = Self::ALL.into_iter().find(|activation| activation.name() == text) {
            return Ok(plain);
        }
        let unknown = || UnknownActivation(text.to_owned());
        let numbers = text.strip_prefix(CLAMPED_SWIGLU).and_then(|rest| rest.strip_prefix('(')?.strip_suffix(')'));
        let numbers: Result<Vec<f32>, _> = numbers.ok_or_else(unknown)?.split(',').map(|n| n.trim().parse()).collect();
        match numbers.map_err(|_| unknown())?[..] {
            [alpha, beta, limit] => Ok(Self::ClampedSwiglu(ClampedSwiglu { alpha, beta, limit })),
            _ => Err(unknown()),
        }
    }
}

/// Numbers of a clamped SwiGLU:
/// `g · sigmoid(alpha · g) · (u + beta)`, with
/// `g = min(gate, limit)` and `u = clamp(up, −limit, limit)`.
///
/// Problems expect a finite alpha and beta, and a finite limit above 0.
/// NaN of gate or up gives NaN, as `torch.clamp` does. +∞ counts as the
/// limit; −∞ of the gate gives NaN, as in `torch`'s SiLU.
///
/// ```
/// use qgemm_hal::{Activation, ClampedSwiglu};
///
/// let gpt_oss = Activation::ClampedSwiglu(ClampedSwiglu::new(1.702, 1.0, 7.0));
/// assert_eq!(gpt_oss.to_string(), "clamped_swiglu(1.702,1,7)");
/// assert_eq!("clamped_swiglu(1.702,1,7)".parse(), Ok(gpt_oss));
/// ```
#[derive(Clone, Copy, Debug)]
pub struct ClampedSwiglu {
    /// Factor in the sigmoid.
    pub alpha: f32,
    /// Addend of the clamped up.
    pub beta: f32,
    /// Largest gate, and largest magnitude of the up.
    pub limit: f32,
}

impl ClampedSwiglu {
    /// gpt-oss has `new(1.702, 1.0, 7.0)`.
    pub const fn new(alpha: f32, beta: f32, limit: f32) -> Self {
        Self { alpha, beta, limit }
    }

    /// `silu(min(gate, limit)) · clamp(up, −limit, limit)`, as in
    /// DeepSeek V4.
    pub const fn silu(limit: f32) -> Self {
        Self::new(1.0, 0.0, limit)
    }

    fn bits(self) -> [u32; 3] {
        [self.alpha, self.beta, self.limit].map(f32::to_bits)
    }
}

/// Compared by bits, for keys of plans.
impl PartialEq for ClampedSwiglu {
    fn eq(&self, other: &Self) -> bool {
        self.bits() == other.bits()
    }
}

impl Eq for ClampedSwiglu {}

impl Hash for ClampedSwiglu {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.bits().hash(state);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_read_back() {
        let pairs = [ClampedSwiglu::new(1.702, 1.0, 7.0), ClampedSwiglu::silu(0.1)].map(Activation::ClampedSwiglu);
        for activation in Activation::ALL.into_iter().chain(pairs) {
            assert_eq!(activation.to_string().parse(), Ok(activation));
            assert!(activation.to_string().starts_with(activation.name()));
        }
        for text in ["", "swish", "clamped_swiglu", "clamped_swiglu()", "clamped_swiglu(1,2)", "clamped_swiglu(1,2,x)"]
        {
            assert_eq!(text.parse::<Activation>(), Err(UnknownActivation(text.to_owned())));
        }
    }

    #[test]
    fn numbers_are_compared_by_bits() {
        let of = |alpha| ClampedSwiglu::new(alpha, 0.0, 7.0);
        assert_eq!(of(f32::NAN), of(f32::NAN));
        assert_ne!(of(0.0), of(-0.0));
    }
}
