//! `matmul`: products of two matrices in device memory, one or a batch of them, each stored by rows or by columns.

use std::fmt;
use std::hash::{Hash, Hasher};

use qgemm_formats::float8::{e4m3_to_f32, f32_to_e4m3};
use qgemm_formats::{DType, ElementType};

use super::gemm::{Activation, WorkspaceLayout, XPrecision};
use super::{Operation, operands};
use crate::caps::Math;
use crate::kernel_id::{KernelId, Name, spec};

/// How the elements of a factor are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum FactorFormat {
    /// Numbers as they are.
    Plain(DType),
    /// E4M3 numbers, a byte each.
    E4M3,
    /// E4M3 numbers, a byte each, of which 128 neighbours along K share an f32 scale ([`FactorFormat::BLOCK`]): what `quantize` writes as
    /// `e4m3_1x128`.
    E4M3Block,
}

impl From<FactorFormat> for ElementType {
    fn from(format: FactorFormat) -> Self {
        format.element()
    }
}

impl FactorFormat {
    /// Every format.
    pub const ALL: [FactorFormat; 5] = [
        FactorFormat::Plain(DType::F32),
        FactorFormat::Plain(DType::F16),
        FactorFormat::Plain(DType::BF16),
        FactorFormat::E4M3,
        FactorFormat::E4M3Block,
    ];
    /// Values along K that share a scale of [`FactorFormat::E4M3Block`].
    pub const BLOCK: usize = 128;

    /// Lower-case name.
    pub const fn name(self) -> &'static str {
        match self {
            FactorFormat::Plain(dtype) => dtype.name(),
            FactorFormat::E4M3 => "e4m3",
            FactorFormat::E4M3Block => "e4m3_1x128",
        }
    }

    /// The element type of memory that holds such a factor.
    pub const fn element(self) -> ElementType {
        match self {
            FactorFormat::Plain(dtype) => ElementType::Number(dtype),
            FactorFormat::E4M3 | FactorFormat::E4M3Block => ElementType::Bytes,
        }
    }

    /// Bytes of an element.
    pub const fn bytes(self) -> usize {
        self.element().bytes()
    }

    /// The type of plain numbers.
    pub const fn plain(self) -> Option<DType> {
        match self {
            FactorFormat::Plain(dtype) => Some(dtype),
            FactorFormat::E4M3 | FactorFormat::E4M3Block => None,
        }
    }

    /// Whether blocks of [`FactorFormat::BLOCK`] values along K have a scale. Both factors of a product have, or neither.
    pub const fn has_scales(self) -> bool {
        matches!(self, FactorFormat::E4M3Block)
    }

    /// Element `index` of `bytes`; of blocks with a scale the code's number.
    ///
    /// # Panics
    /// When `bytes` holds fewer than `index + 1` elements.
    #[inline]
    pub fn read(self, bytes: &[u8], index: usize) -> f32 {
        match self {
            FactorFormat::Plain(dtype) => dtype.read(bytes, index),
            FactorFormat::E4M3 | FactorFormat::E4M3Block => e4m3_to_f32(bytes[index]),
        }
    }

    /// Writes `value` as element `index` of `bytes`, rounded to nearest even. What E4M3 has no number for becomes its largest.
    ///
    /// # Panics
    /// When `bytes` holds fewer than `index + 1` elements.
    #[inline]
    pub fn write(self, bytes: &mut [u8], index: usize, value: f32) {
        match self {
            FactorFormat::Plain(dtype) => dtype.write(bytes, index, value),
            FactorFormat::E4M3 | FactorFormat::E4M3Block => bytes[index] = f32_to_e4m3(value),
        }
    }
}

impl From<DType> for FactorFormat {
    fn from(dtype: DType) -> Self {
        FactorFormat::Plain(dtype)
    }
}

impl fmt::Display for FactorFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl std::str::FromStr for FactorFormat {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|format| format.name().eq_ignore_ascii_case(text));
        found.ok_or_else(|| format!("`{text}` is no format of a factor: expected f32, f16, bf16, e4m3 or e4m3_1x128"))
    }
}

/// The matrices of a batch: element type, strides in elements, and the alignment of what lies contiguous in them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BatchedDense<T = DType> {
    /// Element type; of factors, their format.
    pub dtype: T,
    /// Elements from one row to the next.
    pub row_stride: u64,
    /// Elements from one column to the next. It or the row stride is 1.
    pub col_stride: u64,
    /// Elements from one matrix to the next; 0 where all products have the same.
    pub batch_stride: u64,
    /// Whether every contiguous row, or column, of every matrix begins at a multiple of 16 bytes.
    pub aligned16: bool,
}

impl From<BatchedDense> for BatchedDense<FactorFormat> {
    fn from(dense: BatchedDense) -> Self {
        let BatchedDense { dtype, row_stride, col_stride, batch_stride, aligned16 } = dense;
        Self { dtype: dtype.into(), row_stride, col_stride, batch_stride, aligned16 }
    }
}

impl<T> BatchedDense<T> {
    /// Elements from the first to the last of `batch` matrices of `rows × columns`, or `None` when the count overflows.
    pub fn extent(&self, batch: usize, rows: usize, columns: usize) -> Option<u64> {
        if batch == 0 || rows == 0 || columns == 0 {
            return Some(0);
        }
        let last = |count: usize, stride: u64| (count as u64 - 1).checked_mul(stride);
        let within = last(rows, self.row_stride)?.checked_add(last(columns, self.col_stride)?)?;
        last(batch, self.batch_stride)?.checked_add(within)?.checked_add(1)
    }

    /// Whether elements of a row are neighbours.
    pub fn is_row_major(&self) -> bool {
        self.col_stride == 1
    }
}

/// `D[b] = activation(alpha · A[b]·B[b] + beta · C[b] + bias)` with A `[m, k]` and B `[k, n]`; validated by the API.
#[derive(Clone, Debug, PartialEq)]
pub struct CheckedMatmul {
    /// Products; at least 1.
    pub batch: usize,
    /// Rows of A and D; at least 1.
    pub m: usize,
    /// Columns of B and D; at least 1.
    pub n: usize,
    /// Columns of A and rows of B; 0 makes a product of zeros.
    pub k: usize,
    /// A, `[m, k]`.
    pub a: BatchedDense<FactorFormat>,
    /// B, `[k, n]`.
    pub b: BatchedDense<FactorFormat>,
    /// Whether all of A has a factor, an f32 that a run is given.
    pub a_scaled: bool,
    /// Whether all of B has one.
    pub b_scaled: bool,
    /// Elements from one row of A's scales to the next, where blocks have some: an f32 for every [`FactorFormat::BLOCK`] values of K.
    pub a_scale_row: u64,
    /// Elements from the scales of one column of B to those of the next.
    pub b_scale_row: u64,
    /// D, `[m, n]`, row-major; its matrices do not overlap.
    pub d: BatchedDense,
    /// C, `[m, n]`, row-major; `beta` is 0 where there is none.
    pub c: Option<BatchedDense>,
    /// Whether D itself is C: what it held, times `beta`, is added to.
    pub accumulates: bool,
    /// Element type of the bias: an element a column of D, the same for every product.
    pub bias: Option<DType>,
    /// Factor of the product.
    pub alpha: f32,
    /// Factor of C, or of what D held.
    pub beta: f32,
    /// Function applied last.
    pub activation: Activation,
    /// Whether C is what the activation was applied to: the product, and the bias, are multiplied with the activation's derivative
    /// there. Nothing is then added or applied.
    pub slope: bool,
    /// Whether each product has a range of K of its own: A and B are one matrix of `k` columns and rows, and product `b` multiplies
    /// those from offset `b` to offset `b + 1`. A is then stored by columns and B by rows; where blocks have scales, A by rows and B by
    /// columns.
    pub k_grouped: bool,
    /// Whether each product has rows of its own: A, C and D are one matrix of `m` rows, and product `b` multiplies those from offset
    /// `b` to offset `b + 1` with B `b` ([`CheckedMatmul::groups`]). A is then stored by rows. Rows that no product has stay as they are.
    pub rows_grouped: bool,
    /// How far factors in f32 may be rounded before they are multiplied.
    pub operand_precision: XPrecision,
}

operands! {
    /// What `matmul` reads and writes.
    pub enum MatmulOperand {
        /// The left factors.
        A: "a" Read,
        /// The right factors.
        B: "b" Read,
        /// The factor of all of A, an f32, or the scales of its blocks.
        AScale: "the factor of a" Read,
        /// The same of B.
        BScale: "the factor of b" Read,
        /// C.
        C: "c" Read,
        /// Bias.
        Bias: "the bias" Read,
        /// Where each product's range of K, or of rows, begins, and the last one ends: `u32` each, one more than products.
        Offsets: "the offsets" Read,
        /// Output; read where the operation accumulates.
        D: "d" Accumulate,
        /// Partial accumulators of tiles that are cut along K, and their counters; zeroed before the first launch.
        Workspace: "the workspace" Accumulate,
    }
}

spec! {
    /// What tells the kernels of `matmul` apart.
    pub struct MatmulSpec {
        /// The main loop: generation and mechanism, such as `sm80_cp_async`.
        main_loop: Name,
        /// How A is stored.
        a: FactorFormat,
        /// How B is stored.
        b: FactorFormat,
        /// How A and B are stored.
        layout: MatmulLayout,
        /// Rows of D that a CTA computes.
        m: u32,
        /// Columns of D that a CTA computes.
        n: u32,
        /// Values along K of a stage.
        k: u32,
    }
}

/// How A and B are stored, in BLAS's words: `N` by rows, `T` by columns. Kernels that look at run time are of `Any`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MatmulLayout {
    /// Both by rows.
    Nn,
    /// A by rows, B by columns.
    Nt,
    /// A by columns, B by rows.
    Tn,
    /// Both by columns.
    Tt,
    /// Either.
    Any,
}

impl MatmulLayout {
    /// Those of stored matrices.
    pub const ALL: [Self; 4] = [Self::Nn, Self::Nt, Self::Tn, Self::Tt];

    /// That of matrices stored by rows, or by columns.
    pub const fn of(a_by_rows: bool, b_by_rows: bool) -> Self {
        match (a_by_rows, b_by_rows) {
            (true, true) => Self::Nn,
            (true, false) => Self::Nt,
            (false, true) => Self::Tn,
            (false, false) => Self::Tt,
        }
    }

    /// Whether A is stored by rows.
    pub const fn a_by_rows(self) -> bool {
        matches!(self, Self::Nn | Self::Nt)
    }

    /// Whether B is stored by rows.
    pub const fn b_by_rows(self) -> bool {
        matches!(self, Self::Nn | Self::Tn)
    }

    /// Lower-case name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Nn => "nn",
            Self::Nt => "nt",
            Self::Tn => "tn",
            Self::Tt => "tt",
            Self::Any => "any",
        }
    }
}

impl fmt::Display for MatmulLayout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl std::str::FromStr for MatmulLayout {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().chain([Self::Any]).find(|layout| layout.name() == text);
        found.ok_or_else(|| format!("`{text}` is no layout: expected nn, nt, tn or tt"))
    }
}

/// A kernel of a family, as the scheduler sees it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MatmulConfig {
    /// The kernel.
    pub kernel: KernelId,
    /// Arithmetic of its inner loop.
    pub math: Math,
    /// Rows of D that a CTA computes.
    pub tile_m: u32,
    /// Columns of D that a CTA computes.
    pub tile_n: u32,
    /// Values along K between the places where a tile may be cut.
    pub tile_k: u32,
    /// CTAs that one unit runs at once.
    pub ctas_per_unit: u32,
    /// Most parts that a tile's K may be cut into; 1 where the kernel does not add parts up.
    pub max_splits: u32,
    /// Share of the arithmetic rate that it reaches, per mille.
    pub efficiency: u32,
    /// Bytes of A and B as the kernel reads them, which a launch before it writes; 0 where it reads them as they are.
    pub factor_bytes: u64,
}

/// A configuration with the cut of K.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MatmulPlan {
    /// The configuration.
    pub config: MatmulConfig,
    /// Parts of each tile's K.
    pub splits: u32,
    /// Partial accumulators and counters, and behind them the factors that a launch before the kernel writes.
    pub workspace: WorkspaceLayout,
    /// Offset of those factors, a multiple of 256.
    pub factors: usize,
    /// Seconds that it is expected to take.
    pub estimate: f64,
}

impl CheckedMatmul {
    /// Values along K of a product; of groups as many as each has if all have the same.
    pub fn k_of_product(&self) -> usize {
        if self.k_grouped { self.k.div_ceil(self.batch.max(1)) } else { self.k }
    }

    /// Tiles of `tile_m` rows by `tile_n` columns that D has: of groups of rows, whose lengths are not known, as many as there may be.
    pub fn tiles(&self, tile_m: u32, tile_n: u32) -> u64 {
        let along = |len: usize, tile: u32| len.div_ceil(tile.max(1) as usize) as u64;
        let (products, along_m) = (self.batch as u64, along(self.m, tile_m));
        // The last tile of each group may be part of one.
        let of_rows =
            if self.rows_grouped { along_m.saturating_add(products) } else { products.saturating_mul(along_m) };
        of_rows.saturating_mul(along(self.n, tile_n))
    }

    /// The rows of each product in turn, of which `offset` knows the offsets: none leads out of D, or before one that precedes it, so
    /// that no two products have a row in common.
    pub fn groups(&self, offset: impl Fn(usize) -> u32) -> impl Iterator<Item = std::ops::Range<usize>> {
        let m = self.m;
        let mut reached = (offset(0) as usize).min(m);
        (0..self.batch).map(move |product| {
            let first = reached;
            reached = reached.max((offset(product + 1) as usize).min(m));
            first..reached
        })
    }

    /// How A and B are stored. A matrix of one row or column is stored either way, and counts as stored by rows.
    pub fn layout(&self) -> MatmulLayout {
        if self.has_block_scales() {
            return MatmulLayout::Nt;
        }
        // Parts of K are those of A's stored rows, be they of one element.
        let a_by_rows = self.rows_grouped || (self.a.is_row_major() && !self.k_grouped);
        MatmulLayout::of(a_by_rows, self.b.is_row_major())
    }

    /// Whether blocks of A and of B have scales.
    pub fn has_block_scales(&self) -> bool {
        self.a.dtype.has_scales()
    }

    /// Elements from the first to the last scale of `outer` rows of A, or columns of B, that lie `scale_row` apart; `None` when the
    /// count overflows.
    pub fn scales_extent(&self, outer: usize, scale_row: u64) -> Option<u64> {
        let blocks = self.k.div_ceil(FactorFormat::BLOCK) as u64;
        match outer as u64 {
            outer if outer == 0 || blocks == 0 => Some(0),
            outer => (outer - 1).checked_mul(scale_row)?.checked_add(blocks),
        }
    }

    /// Name of a product of `family` in tables and messages: `matmul_tn_bf16_bf16`.
    pub fn kernel_name(&self, family: &str) -> String {
        format!("{family}_{}_{}_{}", self.layout(), self.a.dtype, self.b.dtype)
    }

    /// Matrices of a batch that are different ones.
    fn matrices<T>(&self, dense: &BatchedDense<T>) -> f64 {
        if dense.batch_stride == 0 { 1.0 } else { self.batch as f64 }
    }
}

/// Descriptions are keys of plans: factors are finite, and are told apart by their bits.
impl Eq for CheckedMatmul {}

impl Hash for CheckedMatmul {
    fn hash<H: Hasher>(&self, state: &mut H) {
        (self.batch, self.m, self.n, self.k, self.a, self.b, self.d, self.c).hash(state);
        (self.accumulates, self.bias, self.alpha.to_bits(), self.beta.to_bits(), self.activation, self.slope)
            .hash(state);
        (self.k_grouped, self.rows_grouped, self.operand_precision, self.a_scaled, self.b_scaled).hash(state);
        (self.a_scale_row, self.b_scale_row).hash(state);
    }
}

impl Operation for CheckedMatmul {
    const NAME: &'static str = "matmul";
    type Operand = MatmulOperand;
    type Config = MatmulConfig;
    type Plan = MatmulPlan;

    fn operands(&self) -> Vec<MatmulOperand> {
        use MatmulOperand as O;
        let optional = [
            (self.a_scaled || self.has_block_scales(), O::AScale),
            (self.b_scaled || self.has_block_scales(), O::BScale),
            (self.c.is_some(), O::C),
            (self.bias.is_some(), O::Bias),
            (self.k_grouped || self.rows_grouped, O::Offsets),
        ];
        let given = optional.into_iter().filter(|(is_given, _)| *is_given).map(|(_, operand)| operand);
        [O::A, O::B, O::D].into_iter().chain(given).collect()
    }

    /// A, B, their scales, C and D once each; D twice where it is added to.
    fn traffic(&self) -> f64 {
        let (m, n, k) = (self.m as f64, self.n as f64, self.k as f64);
        let of_factor = |dense: &BatchedDense<FactorFormat>, values: f64| {
            self.matrices(dense) * values * dense.dtype.bytes() as f64
        };
        let bytes = |dense: &BatchedDense, values: f64| self.matrices(dense) * values * dense.dtype.bytes() as f64;
        let d = bytes(&self.d, m * n) * if self.accumulates { 2.0 } else { 1.0 };
        let blocks = if self.has_block_scales() { self.k.div_ceil(FactorFormat::BLOCK) as f64 } else { 0.0 };
        let scales = (m + n) * blocks * size_of::<f32>() as f64;
        of_factor(&self.a, m * k) + of_factor(&self.b, k * n) + scales + self.c.map_or(0.0, |c| bytes(&c, m * n)) + d
    }

    fn macs(&self) -> f64 {
        // Groups share K out, or the rows.
        let products = if self.k_grouped || self.rows_grouped { 1.0 } else { self.batch as f64 };
        products * self.m as f64 * self.n as f64 * self.k as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extents_follow_strides() {
        let dense =
            BatchedDense { dtype: DType::F16, row_stride: 10, col_stride: 1, batch_stride: 100, aligned16: false };
        assert_eq!(dense.extent(2, 3, 4), Some(100 + 20 + 3 + 1));
        assert_eq!((dense.extent(0, 3, 4), dense.extent(2, 3, 0)), (Some(0), Some(0)));
        assert_eq!(BatchedDense { batch_stride: u64::MAX, ..dense }.extent(2, 3, 4), None);
    }

    #[test]
    fn formats_of_factors_survive_their_names_and_keep_their_numbers() {
        for format in FactorFormat::ALL {
            assert_eq!(format.name().parse(), Ok(format));
            let mut bytes = [0; 8];
            format.write(&mut bytes, 1, -1.5);
            assert_eq!((format.read(&bytes, 0), format.read(&bytes, 1)), (0.0, -1.5), "{format}");
        }
        assert!("e5m2".parse::<FactorFormat>().is_err());
        let mut code = [0];
        FactorFormat::E4M3.write(&mut code, 0, 1e9);
        assert_eq!(FactorFormat::E4M3.read(&code, 0), 448.0);
    }

    #[test]
    fn layouts_survive_their_names() {
        for layout in MatmulLayout::ALL {
            assert_eq!(layout.name().parse(), Ok(layout));
            assert_eq!(MatmulLayout::of(layout.a_by_rows(), layout.b_by_rows()), layout);
        }
        assert!("nx".parse::<MatmulLayout>().is_err());
    }
}
