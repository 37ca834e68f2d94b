//! Weights that a [`Context`] loads, and gives back.

use qgemm_formats::packed_file::PackedWeight;
use qgemm_formats::{DType, HostExperts, HostWeight};
use qgemm_hal::Stream;

use super::Context;
use crate::error::Error;
use crate::experts::Experts;
use crate::fused::FusedWeight;
use crate::weight::{self, Weight, WeightOrder};

impl Context {
    /// Packs a weight for the device and uploads it; it is ready for every stream when this returns.
    ///
    /// # Errors
    /// [`Error::DimensionTooLarge`], or a device error such as exhausted memory.
    pub fn load(&self, weight: &HostWeight) -> Result<Weight, Error> {
        self.load_on(&self.default_stream(), weight)
    }

    /// [`Context::load`] through a stream of one's choice, beside the work of other streams: the next layer is loaded while
    /// this one multiplies.
    ///
    /// # Errors
    /// As [`Context::load`], and when the stream is another device's.
    pub fn load_on(&self, stream: &Stream, weight: &HostWeight) -> Result<Weight, Error> {
        Weight::load(&*self.device, stream, weight)
    }

    /// Packs the gate and the up of a gated layer (SwiGLU, GeGLU) as one weight, whose problems compute
    /// `activation(X·Wgᵀ) · (X·Wuᵀ)`, each with its bias and scales, in one pass over both: see
    /// [`Problem::activation`](crate::Problem::activation). The weight has the output features of one of them.
    ///
    /// # Errors
    /// [`FormatError::PairMismatch`](crate::FormatError::PairMismatch) when they differ in format, N, K or column
    /// order; and as [`Context::load`].
    pub fn load_gated(&self, gate: &HostWeight, up: &HostWeight) -> Result<Weight, Error> {
        self.load_gated_on(&self.default_stream(), gate, up)
    }

    /// [`Context::load_gated`] through a stream of one's choice; see [`Context::load_on`].
    ///
    /// # Errors
    /// As [`Context::load_gated`], and when the stream is another device's.
    pub fn load_gated_on(&self, stream: &Stream, gate: &HostWeight, up: &HostWeight) -> Result<Weight, Error> {
        Weight::load_gated(&*self.device, stream, gate, up)
    }

    /// Packs the rows of several weights with the same input features, such as Q, K and V, as one weight with segments, whose product
    /// is one pass. They may differ in N and in whether rows have scales.
    ///
    /// # Errors
    /// [`FormatError::PartMismatch`](crate::FormatError::PartMismatch) when format, K or column order differ, and the other refusals of
    /// [`HostWeight::concat_rows`]; and as [`Context::load`].
    pub fn load_fused(&self, parts: &[&HostWeight]) -> Result<FusedWeight, Error> {
        FusedWeight::load(self, parts)
    }

    /// Loads a weight that has been packed before, for this kind of device: by [`Context::download_packed`] or
    /// [`PackedWeight::pack`], and perhaps [written](PackedWeight::write) to a file since
    /// ([`open_packed`](crate::open_packed)).
    ///
    /// # Errors
    /// [`Error::WrongLayout`] when this device's kernels read another layout, or a device error such as exhausted
    /// memory.
    pub fn load_packed(&self, packed: &PackedWeight) -> Result<Weight, Error> {
        self.load_packed_on(&self.default_stream(), packed)
    }

    /// [`Context::load_packed`] through a stream of one's choice; see [`Context::load_on`].
    ///
    /// # Errors
    /// As [`Context::load_packed`], and when the stream is another device's.
    pub fn load_packed_on(&self, stream: &Stream, packed: &PackedWeight) -> Result<Weight, Error> {
        Weight::from_packed(&*self.device, stream, packed)
    }

    /// A copy of a weight in host memory, packed as it is on the device: to be [written](PackedWeight::write) to a
    /// file.
    ///
    /// # Errors
    /// When the weight is on another device, or a device error.
    pub fn download_packed(&self, weight: &Weight) -> Result<PackedWeight, Error> {
        self.check_weight(weight.device())?;
        weight.to_packed(&*self.device, &self.default_stream())
    }

    /// Loads an unquantized weight of `n` output and `k` input features from little-endian `values`, stored in
    /// `order`. Together with [`Problem::x_transposed`](crate::Problem::x_transposed) this gives the layouts NN, NT, TN and TT.
    ///
    /// # Errors
    /// When `values` is not `n × k` elements long, a dimension is 0 or overflows; and as [`Context::load`].
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

    /// Packs the weights of a layer of experts for the device and uploads them; they are ready for every stream when this
    /// returns. One packed copy serves every form of [`ExpertProblem`](crate::ExpertProblem).
    ///
    /// # Errors
    /// [`Error::DimensionTooLarge`], or a device error such as exhausted memory, which is found before anything is uploaded.
    pub fn load_experts(&self, experts: &HostExperts) -> Result<Experts, Error> {
        Experts::load(&*self.device, &self.default_stream(), experts)
    }
}
