//! `matmul`: single or batched product of two matrices in device
//! memory, each row-major or column-major.

use std::fmt;
use std::hash::{Hash, Hasher};

use qgemm_formats::float8::{e4m3_to_f32, f32_to_e4m3};
use qgemm_formats::{DType, ElementType};

use super::gemm::{Activation, WorkspaceLayout, XPrecision};
use super::{Operation, operands};
use crate::caps::Math;
use crate::error::Unsupported;
use crate::kernel_id::{KernelId, Name, Spec, spec};

/// Element format of A or B.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum FactorFormat {
    /// Unquantized elements.
    Plain(DType),
    /// E4M3, one byte each.
    E4M3,
    /// E4M3 with an f32 scale for every 128 values along K
    /// ([`FactorFormat::BLOCK`]): the format `e4m3_1x128` of `quantize`.
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
    /// K elements that share a scale of [`FactorFormat::E4M3Block`].
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

    /// The element type, if unquantized.
    pub const fn plain(self) -> Option<DType> {
        match self {
            FactorFormat::Plain(dtype) => Some(dtype),
            FactorFormat::E4M3 | FactorFormat::E4M3Block => None,
        }
    }

    /// Whether blocks of [`FactorFormat::BLOCK`] values along K have scales.
    /// Either both factors of a product have scales, or neither.
    pub const fn has_scales(self) -> bool {
        matches!(self, FactorFormat::E4M3Block)
    }

    /// Element `index` of `bytes`, without block scales.
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

    /// Writes `value` as element `index` of `bytes`, rounded to nearest even.
    /// E4M3 saturates at its largest value.
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

/// A batch of matrices: element type, strides in elements, and alignment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BatchedDense<T = DType> {
    /// Element type, or the format of A and B.
    pub dtype: T,
    /// Row stride in elements.
    pub row_stride: u64,
    /// Column stride in elements. It or the row stride is 1.
    pub col_stride: u64,
    /// Elements between matrices; 0 when all products share one matrix.
    pub batch_stride: u64,
    /// Whether every contiguous row or column is 16-byte aligned.
    pub aligned16: bool,
}

impl From<BatchedDense> for BatchedDense<FactorFormat> {
    fn from(dense: BatchedDense) -> Self {
        let BatchedDense { dtype, row_stride, col_stride, batch_stride, aligned16 } = dense;
        Self { dtype: dtype.into(), row_stride, col_stride, batch_stride, aligned16 }
    }
}

impl<T> BatchedDense<T> {
    /// Elements spanned by `batch` matrices of
    /// `rows × columns`, or `None` on overflow.
    pub fn extent(&self, batch: usize, rows: usize, columns: usize) -> Option<u64> {
        if batch == 0 || rows == 0 || columns == 0 {
            return Some(0);
        }
        let last = |count: usize, stride: u64| (count as u64 - 1).checked_mul(stride);
        let within = last(rows, self.row_stride)?.checked_add(last(columns, self.col_stride)?)?;
        last(batch, self.batch_stride)?.checked_add(within)?.checked_add(1)
    }

    /// Whether rows are contiguous.
    pub fn is_row_major(&self) -> bool {
        self.col_stride == 1
    }
}

/// Batched matrix product:
/// `D[b] = activation(alpha · A[b]·B[b] + beta · C[b] + bias)`
/// with A `[m, k]` and B `[k, n]`;
/// validated by the API.
#[derive(Clone, Debug, PartialEq)]
pub struct CheckedMatmul {
    /// Products; at least 1.
    pub batch: usize,
    /// Rows of A and D; at least 1.
    pub m: usize,
    /// Columns of B and D; at least 1.
    pub n: usize,
    /// Columns of A and rows of B; with 0,
    /// the product is zero.
    pub k: usize,
    /// A, `[m, k]`.
    pub a: BatchedDense<FactorFormat>,
    /// B, `[k, n]`.
    pub b: BatchedDense<FactorFormat>,
    /// Whether A has one f32 factor, given at run time.
    pub a_scaled: bool,
    /// Whether B has one f32 factor.
    pub b_scaled: bool,
    /// Row stride of A's block scales in elements: one f32 for
    /// every [`FactorFormat::BLOCK`] values of K.
    pub a_scale_row: u64,
    /// Stride of B's block scales between columns, in elements.
    pub b_scale_row: u64,
    /// D, `[m, n]`, row-major; the matrices do not overlap.
    pub d: BatchedDense,
    /// C, `[m, n]`, row-major; `beta` is 0 without it.
    pub c: Option<BatchedDense>,
    /// Whether C is D itself: its old contents
    /// times `beta` are added.
    pub accumulates: bool,
    /// Element type of the bias: one element for each column of
    /// D, shared by all products.
    pub bias: Option<DType>,
    /// Scale of the product.
    pub alpha: f32,
    /// Scale of C, or of the old contents of D.
    pub beta: f32,
    /// Function applied last.
    pub activation: Activation,
    /// Whether C holds the input of the activation. The product plus
    /// bias is then multiplied with the activation's derivative at C, and
    /// nothing else is added or applied.
    pub slope: bool,
    /// K-grouped products: A and B are single matrices of `k` columns
    /// and rows, and product `b` uses the K range from offset
    /// `b` to offset `b + 1`. A is column-major and B
    /// row-major; with block scales it is the other way round.
    pub k_grouped: bool,
    /// M-grouped products: A, C and D are single matrices of `m`
    /// rows, and product `b` multiplies the rows from offset `b` to
    /// `b + 1` with B `b` ([`CheckedMatmul::groups`]). A is row-major. Rows
    /// outside all groups are unchanged.
    pub rows_grouped: bool,
    /// Permitted rounding of f32 factors.
    pub operand_precision: XPrecision,
}

operands! {
    /// Operands of `matmul`.
    pub enum MatmulOperand {
        /// The left factors.
        A: "a" Read,
        /// The right factors.
        B: "b" Read,
        /// The f32 factor of A, or the scales of its blocks.
        AScale: "the factor of a" Read,
        /// The f32 factor of B, or the scales of its blocks.
        BScale: "the factor of b" Read,
        /// C.
        C: "c" Read,
        /// Bias.
        Bias: "the bias" Read,
        /// Start of each product's K or row range, plus the
        /// end: u32 `[batch + 1]`.
        Offsets: "the offsets" Read,
        /// Output; read when the operation accumulates.
        D: "d" Accumulate,
        /// Split-K partial sums and counters; zeroed before the first launch.
        Workspace: "the workspace" Accumulate,
    }
}

spec! {
    /// Kernel identity keys of `matmul`.
    pub struct MatmulSpec {
        /// Main loop: variant and mechanism, such as `sm80_cp_async`.
        main_loop: Name,
        /// Element format of A.
        a: FactorFormat,
        /// Element format of B.
        b: FactorFormat,
        /// Storage order of A and B.
        layout: MatmulLayout,
        /// M tile: rows of D for each CTA.
        m: u32,
        /// N tile: columns of D for each CTA.
        n: u32,
        /// K elements of a stage.
        k: u32,
    }
}

/// Storage order of A and B: `N` for row-major, `T` for
/// column-major. `Any` is decided at run time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MatmulLayout {
    /// Both row-major.
    Nn,
    /// A row-major, B column-major.
    Nt,
    /// A column-major, B row-major.
    Tn,
    /// Both column-major.
    Tt,
    /// Decided at run time.
    Any,
}

impl MatmulLayout {
    /// All storage orders, without `Any`.
    pub const ALL: [Self; 4] = [Self::Nn, Self::Nt, Self::Tn, Self::Tt];

    /// The layout of row-major or column-major A and B.
    pub const fn of(a_by_rows: bool, b_by_rows: bool) -> Self {
        match (a_by_rows, b_by_rows) {
            (true, true) => Self::Nn,
            (true, false) => Self::Nt,
            (false, true) => Self::Tn,
            (false, false) => Self::Tt,
        }
    }

    /// Whether A is row-major.
    pub const fn a_by_rows(self) -> bool {
        matches!(self, Self::Nn | Self::Nt)
    }

    /// Whether B is row-major.
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

/// A candidate kernel of a family, with what the
/// scheduler ranks it by.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MatmulConfig {
    /// The kernel.
    pub kernel: KernelId,
    /// Arithmetic of its inner loop.
    pub math: Math,
    /// M tile: rows of D for each CTA.
    pub tile_m: u32,
    /// N tile: columns of D for each CTA.
    pub tile_n: u32,
    /// K elements between the points where a tile may be split.
    pub tile_k: u32,
    /// CTAs per unit.
    pub ctas_per_unit: u32,
    /// Maximum split-K parts; 1 when the kernel has no split-K.
    pub max_splits: u32,
    /// Reached share of the arithmetic rate, per mille.
    pub efficiency: u32,
    /// Bytes of A and B that a launch before the kernel
    /// copies; 0 when the kernel reads both in place.
    pub factor_bytes: u64,
}

/// A config with its split-K.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MatmulPlan {
    /// The config.
    pub config: MatmulConfig,
    /// Split-K parts of each tile.
    pub splits: u32,
    /// Partial sums and counters, then the copied factors.
    pub workspace: WorkspaceLayout,
    /// Offset of the copied factors, a multiple of 256.
    pub factors: usize,
    /// Estimated seconds.
    pub estimate: f64,
}

impl CheckedMatmul {
    /// K of one product; the average for K groups.
    pub fn k_of_product(&self) -> usize {
        if self.k_grouped { self.k.div_ceil(self.batch.max(1)) } else { self.k }
    }

    /// Tiles of D. For row groups of unknown length, the maximum.
    pub fn tiles(&self, tile_m: u32, tile_n: u32) -> u64 {
        let along = |len: usize, tile: u32| len.div_ceil(tile.max(1) as usize) as u64;
        let (products, along_m) = (self.batch as u64, along(self.m, tile_m));
        // The last tile of each group may be partial.
        let of_rows =
            if self.rows_grouped { along_m.saturating_add(products) } else { products.saturating_mul(along_m) };
        of_rows.saturating_mul(along(self.n, tile_n))
    }

    /// Row range of each product, from its offsets. Ranges are
    /// clamped to D and to the end of earlier ranges, so
    /// that no two products share a row.
    pub fn groups(&self, offset: impl Fn(usize) -> u32) -> impl Iterator<Item = std::ops::Range<usize>> {
        let m = self.m;
        let mut reached = (offset(0) as usize).min(m);
        (0..self.batch).map(move |product| {
            let first = reached;
            reached = reached.max((offset(product + 1) as usize).min(m));
            first..reached
        })
    }

    /// Storage order of A and B. A matrix with one row
    /// or column counts as row-major.
    pub fn layout(&self) -> MatmulLayout {
        if self.has_block_scales() {
            return MatmulLayout::Nt;
        }
        // K groups slice A's stored rows, even rows of one element.
        let a_by_rows = self.rows_grouped || (self.a.is_row_major() && !self.k_grouped);
        MatmulLayout::of(a_by_rows, self.b.is_row_major())
    }

    /// Whether A and B have block scales.
    pub fn has_block_scales(&self) -> bool {
        self.a.dtype.has_scales()
    }

    /// Elements spanned by the scales of `outer` rows of A or
    /// columns of B with stride `scale_row`; `None` on overflow.
    pub fn scales_extent(&self, outer: usize, scale_row: u64) -> Option<u64> {
        let blocks = self.k.div_ceil(FactorFormat::BLOCK) as u64;
        match outer as u64 {
            outer if outer == 0 || blocks == 0 => Some(0),
            outer => (outer - 1).checked_mul(scale_row)?.checked_add(blocks),
        }
    }

    /// Name in tables and messages: `matmul_tn_bf16_bf16`.
    pub fn kernel_name(&self, family: &str) -> String {
        format!("{family}_{}_{}_{}", self.layout(), self.a.dtype, self.b.dtype)
    }

    /// Number of distinct matrices of a batch.
    fn matrices<T>(&self, dense: &BatchedDense<T>) -> f64 {
        if dense.batch_stride == 0 { 1.0 } else { self.batch as f64 }
    }
}

/// Plan cache key: floats are finite and are
/// compared by their bits.
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
    type Operand = MatmulOperand;
    type Config = MatmulConfig;
    type Plan = MatmulPlan;
    const WORKSPACE: Option<MatmulOperand> = Some(MatmulOperand::Workspace);

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

    /// A, B, their scales, C and D once each; D
    /// twice when it accumulates.
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
        // Groups share K or the rows.
        let products = if self.k_grouped || self.rows_grouped { 1.0 } else { self.batch as f64 };
        products * self.m as f64 * self.n as f64 * self.k as f64
    }

    fn describe(&self) -> String {
        let Self { batch, m, n, k, a, b, .. } = self;
        format!("{batch} x {m} x {n} x {k}, {}, {} by {}", self.layout(), a.dtype, b.dtype)
    }

    fn is_nothing(&self) -> bool {
        self.batch == 0 || self.m == 0 || self.n == 0
    }

    fn config(plan: &MatmulPlan) -> &MatmulConfig {
        &plan.config
    }

    fn estimate(plan: &MatmulPlan) -> f64 {
        plan.estimate
    }

    fn kernel_id(&self, plan: &MatmulPlan) -> KernelId {
        plan.config.kernel
    }

    fn math(plan: &MatmulPlan) -> Option<Math> {
        Some(plan.config.math)
    }

    fn matrix_type(&self) -> Option<DType> {
        match (self.a.dtype, self.b.dtype) {
            (FactorFormat::Plain(a), FactorFormat::Plain(b)) => (a == b && a != DType::F32).then_some(a),
            _ => Some(DType::F16),
        }
    }

    fn workspace_bytes(&self, plan: &MatmulPlan) -> usize {
        plan.workspace.bytes
    }

    fn plan_name(&self, family: &str) -> String {
        self.kernel_name(family)
    }

    fn noop_config(&self) -> Result<MatmulConfig, Unsupported> {
        let (a, b, layout) = (self.a.dtype, self.b.dtype, self.layout());
        let spec = MatmulSpec { main_loop: Name::new("noop"), a, b, layout, m: 64, n: 64, k: 64 };
        Ok(MatmulConfig {
            kernel: KernelId::new("noop", None, Spec::Matmul(spec)),
            math: Math::FmaF32,
            tile_m: 64,
            tile_n: 64,
            tile_k: 64,
            ctas_per_unit: 1,
            max_splits: 4,
            efficiency: 1000,
            factor_bytes: 0,
        })
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
