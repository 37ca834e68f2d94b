//! The operation that the API hands down: validated, with every stride in elements.

use qgemm_formats::prepack::PackClass;
use qgemm_formats::{DType, Format};

/// A dense matrix operand: element type, strides in elements, and the alignment of its first byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Dense {
    /// Element type.
    pub dtype: DType,
    /// Elements from one row to the next.
    pub row_stride: u64,
    /// Elements from one column to the next: 1 for row-major.
    pub col_stride: u64,
    /// Whether every row begins at a multiple of 16 bytes (and columns are contiguous), so that kernels may
    /// use 16-byte accesses.
    pub aligned16: bool,
}

/// Function applied to `alpha · X·Wᵀ + beta · C + bias` at the end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Activation {
    /// None.
    #[default]
    Identity,
}

/// `D[M,N] = alpha · X[M,K] · W[N,K]ᵀ + beta · C[M,N] + bias[N]`, validated by the API.
#[derive(Clone, Debug, PartialEq)]
pub struct CheckedGemm {
    /// Tokens (rows of X); at least 1.
    pub m: usize,
    /// Output features (rows of W); at least 1.
    pub n: usize,
    /// Input features (columns of X); at least 1.
    pub k: usize,
    /// Length of a stored row of W (differs from `k` only with act-order padding).
    pub stored_k: usize,
    /// Format of W.
    pub format: Format,
    /// Layout of W.
    pub class: PackClass,
    /// Whether W has a factor per row.
    pub row_scale: bool,
    /// Whether W's columns are permuted (act-order).
    pub k_order: bool,
    /// X.
    pub x: Dense,
    /// D.
    pub d: Dense,
    /// C, read only when present; `beta` is 0 otherwise.
    pub c: Option<Dense>,
    /// Element type of the bias (contiguous, N elements).
    pub bias: Option<DType>,
    /// Factor of the product.
    pub alpha: f32,
    /// Factor of C.
    pub beta: f32,
    /// Function applied last.
    pub activation: Activation,
    /// Pins family and K partition whatever M is, so that a row's bits do not depend on its batch.
    pub batch_invariant: bool,
}

impl CheckedGemm {
    /// Kernel name of `family` for this operation: `gemm_nt_q4_k_f16`.
    pub fn kernel_name(&self, family: &str) -> String {
        format!("{family}_nt_{}_{}", self.format.name, self.x.dtype)
    }

    /// Bytes that the operation must move at least: W, X, D (and C) once each.
    pub fn bytes(&self) -> f64 {
        let w = self.n as f64 * self.format.row_bytes(self.stored_k) as f64;
        let x = self.m as f64 * self.k as f64 * self.x.dtype.bytes() as f64;
        let d = self.m as f64 * self.n as f64 * self.d.dtype.bytes() as f64;
        let c = self.c.map_or(0.0, |c| self.m as f64 * self.n as f64 * c.dtype.bytes() as f64);
        w + x + d + c
    }

    /// Multiply-adds of the operation.
    pub fn macs(&self) -> f64 {
        self.m as f64 * self.n as f64 * self.k as f64
    }
}
