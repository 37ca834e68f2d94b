//! Weight loading and downloading of a [`Context`].

use qgemm_formats::packed_file::PackedWeight;
use qgemm_formats::{DType, HostExperts, HostWeight};
use qgemm_hal::Stream;

use super::Context;
use crate::error::Error;
use crate::experts::Experts;
use crate::fused::FusedWeight;
use crate::weight::{self, Weight, WeightOrder};

impl Context {
    /// Packs and uploads a weight. It is ready for every stream on return.
    ///
    /// # Errors
    /// [`Error::DimensionTooLarge`], or a device error such as out of memory.
    pub fn load(&self, weight: &HostWeight) -> Result<Weight, Error> {
        self.load_on(&self.default_stream(), weight)
    }

    /// [`Context::load`] on the given stream, concurrent with other streams. The next layer
    /// can load while this one computes.
    ///
    /// # Errors
    /// As [`Context::load`], and when the stream belongs to another device.
    pub fn load_on(&self, stream: &Stream, weight: &HostWeight) -> Result<Weight, Error> {
        Weight::load(&*self.device, stream, weight)
    }

    /// Packs gate and up of a gated layer (SwiGLU, GeGLU) as one weight.
    ///
    /// Its problems compute `activation(X·Wgᵀ) · (X·Wuᵀ)` in one pass, each product with
    /// its bias and scales: see [`Problem::activation`](crate::Problem::activation).
    /// The weight has the output features of one of them.
    ///
    /// # Errors
    /// [`FormatError::PairMismatch`](crate::FormatError::PairMismatch) when they differ in
    /// format, N, K or column order. Others as in [`Context::load`].
    pub fn load_gated(&self, gate: &HostWeight, up: &HostWeight) -> Result<Weight, Error> {
        self.load_gated_on(&self.default_stream(), gate, up)
    }

    /// [`Context::load_gated`] on the given stream; see [`Context::load_on`].
    ///
    /// # Errors
    /// As [`Context::load_gated`], and when the stream belongs to another device.
    pub fn load_gated_on(&self, stream: &Stream, gate: &HostWeight, up: &HostWeight) -> Result<Weight, Error> {
        Weight::load_pair(&*self.device, stream, &HostWeight::gated_pair(gate, up)?, gate.n())
    }

    /// [`Context::load_gated`] of one weight with alternating gate and up rows (gate
    /// first). [`pair_bias`](crate::pair_bias) reorders its bias.
    ///
    /// # Errors
    /// [`FormatError::PairMismatch`](crate::FormatError::PairMismatch) for an odd number of
    /// rows. Others as in [`Context::load`].
    pub fn load_interleaved(&self, gate_up: &HostWeight) -> Result<Weight, Error> {
        self.load_interleaved_on(&self.default_stream(), gate_up)
    }

    /// [`Context::load_interleaved`] on the given stream; see [`Context::load_on`].
    ///
    /// # Errors
    /// As [`Context::load_interleaved`], and when the stream belongs to another device.
    pub fn load_interleaved_on(&self, stream: &Stream, gate_up: &HostWeight) -> Result<Weight, Error> {
        Weight::load_pair(&*self.device, stream, &gate_up.interleaved_pair()?, gate_up.n() / 2)
    }

    /// Packs weights of the same input (e.g. Q, K and V) as segments with one X.
    ///
    /// They may differ in N, format, row scales and column order. Neighbours of one format
    /// and column order become one weight with one product.
    ///
    /// # Errors
    /// [`FormatError::PartMismatch`](crate::FormatError::PartMismatch) when K differs;
    /// [`FormatError::NoParts`](crate::FormatError::NoParts). Others as in [`Context::load`].
    pub fn load_fused(&self, parts: &[&HostWeight]) -> Result<FusedWeight, Error> {
        FusedWeight::load(self, parts)
    }

    /// Uploads a weight that is already packed for this kind of device.
    ///
    /// It comes from [`Context::download_packed`] or [`PackedWeight::pack`], or from a file
    /// ([`PackedWeight::write`], [`open_packed`](crate::open_packed)).
    ///
    /// # Errors
    /// [`Error::WrongLayout`] when this device's kernels read another layout, or a device
    /// error such as out of memory.
    pub fn load_packed(&self, packed: &PackedWeight) -> Result<Weight, Error> {
        self.load_packed_on(&self.default_stream(), packed)
    }

    /// [`Context::load_packed`] on the given stream; see [`Context::load_on`].
    ///
    /// # Errors
    /// As [`Context::load_packed`], and when the stream belongs to another device.
    pub fn load_packed_on(&self, stream: &Stream, packed: &PackedWeight) -> Result<Weight, Error> {
        Weight::from_packed(&*self.device, stream, packed)
    }

    /// Downloads a weight in its packed layout, e.g. to
    /// [write](PackedWeight::write) it to a file.
    ///
    /// # Errors
    /// When the weight is on another device, or a device error.
    pub fn download_packed(&self, weight: &Weight) -> Result<PackedWeight, Error> {
        self.check_weight(weight.device())?;
        weight.to_packed(&*self.device, &self.default_stream())
    }

    /// Loads an unquantized weight of `n` output and `k` input features from
    /// little-endian `values` in `order`.
    ///
    /// With [`Problem::x_transposed`](crate::Problem::x_transposed) this covers the
    /// layouts NN, NT, TN and TT.
    ///
    /// # Errors
    /// When `values` is not `n × k` elements long, or a dimension is 0 or overflows.
    /// Others as in [`Context::load`].
    pub fn load_dense(
        &self,
        values: &[u8],
        dtype: DType,
        n: usize,
        k: usize,
        order: WeightOrder,
    ) -> Result<Weight, Error> {
        self.load(&weight::dense(values, dtype, n, k, order)?)
    }

    /// Packs and uploads the weights of a layer of experts. They are ready
    /// for every stream on return.
    ///
    /// One packed copy serves every form of [`ExpertProblem`](crate::ExpertProblem).
    ///
    /// # Errors
    /// [`Error::DimensionTooLarge`], or a device error such as out of memory, which
    /// occurs before any upload.
    pub fn load_experts(&self, experts: &HostExperts) -> Result<Experts, Error> {
        Experts::load(&*self.device, &self.default_stream(), experts)
    }
}
