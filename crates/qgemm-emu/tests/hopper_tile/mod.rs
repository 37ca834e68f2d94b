//! Kernel of `kernels/wgmma_tile.cu`: launch and expected result.

use bytemuck::{Pod, Zeroable};
use half::f16;
use qgemm_cuda::{Geometry, KernelSpec};

/// Output features of the tile.
pub const FEATURES: usize = 64;
/// Tokens of the tile.
pub const TOKENS: usize = 32;

/// TMA box: columns and tokens.
pub const BOX: [u32; 2] = [64, 32];

/// A `CUtensorMap`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct TensorMap(pub [u64; 16]);

/// Kernel parameter (`WgmmaTile`).
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct Params {
    x: TensorMap,
    w: u64,
    d: u64,
    k: u64,
    // The map is aligned to 64 bytes in the kernel.
    padding: [u64; 5],
}

impl Params {
    /// Parameter for these addresses.
    pub fn new(x: TensorMap, w: u64, d: u64, k: u64) -> Self {
        Self { x, w, d, k, padding: [0; 5] }
    }
}

/// Kernel for `sm_90a`.
pub fn spec() -> KernelSpec {
    KernelSpec {
        name: "wgmma_tile".into(),
        entry: "wgmma_tile.cu",
        text: include_str!("../kernels/wgmma_tile.cu"),
        symbol: "wgmma_tile",
        prelude: "#define QG_VARIANT 90\n".into(),
        arch_specific: true,
    }
}

/// Four consumer warps and one producer; two stages of X,
/// barriers, and alignment padding.
pub fn geometry() -> Geometry {
    Geometry { grid: [1, 1, 1], threads: 160, shared_bytes: 1024 + 2 * (TOKENS * 64 * 2) as u32 + 1024 }
}

/// Operands: W as `[64][k]`, X as `[tokens][k]`.
#[derive(Debug)]
pub struct Problem {
    /// Columns, a multiple of 64.
    pub k: usize,
    /// Valid tokens, at most 32.
    pub tokens: usize,
    /// Weights.
    pub w: Vec<f16>,
    /// Activations.
    pub x: Vec<f16>,
    /// Whether all numbers are small integers, with an exact result.
    exact: bool,
}

impl Problem {
    /// One step; more steps than stages; a tile with missing tokens.
    pub fn all() -> Vec<Self> {
        [(64, 32, true), (320, 27, true), (320, 27, false), (1024, 32, false)]
            .map(|(k, tokens, exact)| Self::new(k, tokens, exact))
            .into()
    }

    fn new(k: usize, tokens: usize, exact: bool) -> Self {
        let mut state = k as u32;
        let mut number = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let uniform = (state >> 8) as f32 / (1 << 23) as f32 - 1.0;
            f16::from_f32(if exact { (uniform * 8.0).round() } else { uniform })
        };
        let w = (0..FEATURES * k).map(|_| number()).collect();
        let x = (0..tokens * k).map(|_| number()).collect();
        Self { k, tokens, w, x, exact }
    }

    /// `[32][64]` NaN outputs for the kernel to overwrite.
    pub fn poisoned_output(&self) -> Vec<f32> {
        vec![f32::NAN; TOKENS * FEATURES]
    }

    /// Compares `[32][64]` outputs with an f64 product. Missing tokens count as zeros.
    pub fn check(&self, outputs: &[f32]) {
        assert_eq!(outputs.len(), TOKENS * FEATURES);
        for token in 0..TOKENS {
            for feature in 0..FEATURES {
                let got = f64::from(outputs[token * FEATURES + feature]);
                let products = |i: usize| {
                    let x = self.x.get(token * self.k..).map_or(0.0, |row| row.get(i).map_or(0.0, |x| x.to_f64()));
                    self.w[feature * self.k + i].to_f64() * x
                };
                let expected: f64 = (0..self.k).map(products).sum();
                let size: f64 = (0..self.k).map(|i| products(i).abs()).sum();
                // Matrix units truncate sums to 24 bits at best, once per 16 columns.
                let limit = if self.exact { 0.0 } else { size * 1e-5 };
                let what = format!("k {}, token {token}, feature {feature}: {got}, expected {expected}", self.k);
                assert!((got - expected).abs() <= limit, "{what}");
            }
        }
    }
}
