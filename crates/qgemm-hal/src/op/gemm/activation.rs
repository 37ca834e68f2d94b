//! Activation functions.

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
    /// `v / (1 + exp(−v))`, also called swish.
    Silu,
    /// GELU, tanh approximation:
    /// `v / 2 · (1 + tanh(√(2/π) · (v + 0.044715 v³)))`.
    GeluTanh,
    /// Exact GELU: `v / 2 · (1 + erf(v / √2))`.
    GeluErf,
}

impl Activation {
    /// Every activation.
    pub const ALL: [Self; 5] = [Self::Identity, Self::Relu, Self::Silu, Self::GeluTanh, Self::GeluErf];

    /// Name in tables: `gelu_tanh`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Identity => "identity",
            Self::Relu => "relu",
            Self::Silu => "silu",
            Self::GeluTanh => "gelu_tanh",
            Self::GeluErf => "gelu_erf",
        }
    }
}
