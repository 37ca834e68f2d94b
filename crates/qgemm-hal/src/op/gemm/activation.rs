//! Functions of one output.

/// Function applied to the scaled sum with C and the bias added, before the residual is.
///
/// Exhaustive on purpose: every backend computes each of them within its innermost loops, where there is no place to refuse one, and
/// the compiler names the backends that lack a new one. One more is a new version of this library.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Activation {
    /// None.
    #[default]
    Identity,
    /// `max(v, 0)`.
    Relu,
    /// `v / (1 + exp(−v))`, also called swish.
    Silu,
    /// GELU by its approximation `v / 2 · (1 + tanh(√(2/π) · (v + 0.044715 v³)))`.
    GeluTanh,
    /// GELU itself: `v / 2 · (1 + erf(v / √2))`.
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
