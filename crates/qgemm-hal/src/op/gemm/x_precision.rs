//! [`XPrecision`]: what a problem permits a product to do with X.

/// How far activations may be rounded before they are multiplied: a permission, of which kernels use what makes them fast.
/// Matrix instructions read f16 and bf16 only, and processors multiply integers of eight bits four times as fast as f32.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum XPrecision {
    /// Not at all.
    Exact,
    /// To f16, after each token was multiplied by a power of two of its own: what is beyond the range of f16 keeps eleven
    /// bits, too. bf16 activations lose nothing by it but what is 2³¹ times smaller than the token's largest value.
    F16,
    /// To bf16, where matrix instructions take it.
    BF16,
    /// To integers of eight bits, with a factor for every
    /// [`activation_block`](qgemm_formats::FormatDesc::activation_block) columns, where weights are such integers, too, and the
    /// device has no faster way that rounds less; elsewhere as [`XPrecision::F16`]. It costs an error of 1e-5 to 1e-4 of the
    /// output's square, 2.5e-4 seen for tokens with a few large values: little beside what weights of four bits cost (5e-3), and
    /// more than weights of eight (3e-5). It is what llama.cpp does.
    #[default]
    Int8,
}

impl XPrecision {
    /// All of them, each allowing more than those before.
    pub const ALL: [XPrecision; 4] = [XPrecision::Exact, XPrecision::F16, XPrecision::BF16, XPrecision::Int8];

    /// Lower-case name.
    pub const fn name(self) -> &'static str {
        match self {
            XPrecision::Exact => "exact",
            XPrecision::F16 => "f16",
            XPrecision::BF16 => "bf16",
            XPrecision::Int8 => "int8",
        }
    }
}
