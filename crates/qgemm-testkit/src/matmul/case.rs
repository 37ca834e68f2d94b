//! A case of `matmul`, as data.

use std::fmt;

use qgemm_formats::DType;
use qgemm_hal::{Activation, FactorFormat, MatmulLayout, XPrecision};

use super::blocks::Blocks;
use crate::activations::{ActivationKind, activations};

/// Memory layout of the operands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct MatmulStrides {
    /// Gaps of NaN between the stored rows of A, of B, and of C and
    /// D, in elements.
    pub gaps: [usize; 3],
    /// Rows of NaN between an operand's matrices.
    pub between: usize,
    /// Offset of operands from an aligned address, in elements.
    pub offset: usize,
    /// Whether all products share one A.
    pub one_a: bool,
    /// Whether all products share one B.
    pub one_b: bool,
    /// Whether all products share one C.
    pub one_c: bool,
    /// Whether the matrices of D are side by side, like attention
    /// heads.
    pub d_beside: bool,
}

/// A matmul to check.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MatmulCase {
    /// M, N and K.
    pub shape: [usize; 3],
    /// Number of products.
    pub batch: usize,
    /// Storage order of A and B.
    pub layout: MatmulLayout,
    /// Formats of A and B.
    pub types: [FactorFormat; 2],
    /// Per-tensor scales of A and B.
    pub scales: [Option<f32>; 2],
    /// Type of D.
    pub d_dtype: DType,
    /// Factor of the product (alpha).
    pub alpha: f32,
    /// Factor (beta) and type of C.
    pub c: Option<(f32, DType)>,
    /// Factor (beta) of the old D, if D accumulates.
    pub accumulate: Option<f32>,
    /// Type of the bias.
    pub bias: Option<DType>,
    /// Activation, applied last.
    pub activation: Activation,
    /// Whether C is an activation's input, whose derivative
    /// multiplies the product.
    pub slope: bool,
    /// Whether products have K ranges: A is stored by columns, B by
    /// rows, and each is one matrix.
    pub k_grouped: bool,
    /// Whether products have row ranges of one A, C and D, which are
    /// stored by rows.
    pub rows_grouped: bool,
    /// Permitted rounding of f32 factors.
    pub operand_precision: XPrecision,
    /// Kinds of A and B.
    pub values: [ActivationKind; 2],
    /// Memory layout of the operands.
    pub strides: MatmulStrides,
    /// Runs every kernel that the plan may choose.
    pub every_kernel: bool,
    /// Seed of all random values.
    pub seed: u64,
}

impl MatmulCase {
    /// One product of normal, row-major f32 matrices, `[m, n, k]`.
    pub fn new(shape: [usize; 3]) -> Self {
        Self {
            shape,
            batch: 1,
            layout: MatmulLayout::Nn,
            types: [DType::F32.into(); 2],
            scales: [None; 2],
            d_dtype: DType::F32,
            alpha: 1.0,
            c: None,
            accumulate: None,
            bias: None,
            activation: Activation::Identity,
            slope: false,
            k_grouped: false,
            rows_grouped: false,
            operand_precision: XPrecision::Exact,
            values: [ActivationKind::Normal; 2],
            strides: MatmulStrides::default(),
            every_kernel: false,
            seed: 1,
        }
    }

    /// A, B and D in one type.
    pub fn of_type(self, dtype: DType) -> Self {
        Self { types: [dtype.into(); 2], d_dtype: dtype, ..self }
    }

    /// Factors with exact sums.
    pub fn exact(self) -> Self {
        Self { values: [ActivationKind::SmallIntegers; 2], ..self }
    }

    /// Whether D is exact.
    pub(super) fn is_exact(&self) -> bool {
        let activation = matches!(self.activation, Activation::Identity | Activation::Relu);
        let [a_scale, b_scale] = self.scales;
        let factors = [Some(self.alpha), self.c.map(|(beta, _)| beta), self.accumulate, a_scale, b_scale];
        let factors = factors.into_iter().flatten();
        let whole = factors.into_iter().all(|factor| factor.fract() == 0.0 && factor.abs() < 16.0);
        activation && whole && !self.slope && self.values == [ActivationKind::SmallIntegers; 2]
    }

    /// `products` products of K ranges.
    pub fn k_grouped(self, products: usize) -> Self {
        let strides = MatmulStrides { one_a: true, one_b: true, between: 0, ..self.strides };
        // Block scales run along K.
        let layout = if self.has_scales() { MatmulLayout::Nt } else { MatmulLayout::Tn };
        Self { batch: products, k_grouped: true, layout, strides, ..self }
    }

    /// `products` products of row groups.
    pub fn rows_grouped(self, products: usize) -> Self {
        let layout = MatmulLayout::of(true, self.layout.b_by_rows());
        let strides = MatmulStrides { one_a: true, one_c: true, d_beside: false, ..self.strides };
        Self { batch: products, rows_grouped: true, k_grouped: false, layout, strides, ..self }
    }

    /// Offsets of K ranges or row groups, and the end of the last
    /// one.
    /// The seed decides whether these are equal, empty, leave gaps,
    /// exceed K or descend; whether one product has all rows.
    pub(super) fn offsets(&self) -> Vec<u32> {
        let (len, kinds) = if self.rows_grouped { (self.shape[0], 5) } else { (self.shape[2], 4) };
        let (k, products) = (len as u64, self.batch as u64);
        let drawn = |i: u64| (self.seed.wrapping_mul(31) + i * i * 17) % 5;
        (0..=products)
            .map(|i| {
                let even = k * i / products.max(1);
                let at = match self.seed % kinds {
                    0 => even,
                    1 => k * (i / 2 * 2).min(products) / products.max(1),
                    2 => k / 8 + (k - k / 4) * i / products.max(1),
                    4 => k * u64::from(i > products / 2),
                    _ if drawn(i) == 0 => k * 2 + 5,
                    _ => k * drawn(i) / 4,
                };
                at as u32
            })
            .collect()
    }

    /// K range of a product.
    pub(super) fn k_of(&self, product: usize) -> std::ops::Range<usize> {
        let k = self.shape[2];
        if !self.k_grouped {
            return 0..k;
        }
        let offsets = self.offsets();
        let at = |i: usize| (offsets[i] as usize).min(k);
        at(product)..at(product + 1).max(at(product))
    }

    /// Rows of D of a product. Products never overlap.
    pub(super) fn rows_of(&self, product: usize) -> std::ops::Range<usize> {
        let m = self.shape[0];
        if !self.rows_grouped {
            return 0..m;
        }
        let offsets = self.offsets();
        let at = |i: usize| offsets[..=i].iter().map(|&offset| (offset as usize).min(m)).max().unwrap_or(0);
        at(product)..at(product + 1)
    }

    /// Whether factors have block scales.
    pub(super) fn has_scales(&self) -> bool {
        self.types[0].has_scales()
    }

    /// Quantized A and transposed B, if factors have block scales.
    pub(super) fn blocks(&self) -> Option<[Blocks; 2]> {
        let [m, n, k] = self.shape;
        let of = |i: usize, outer: usize, seed: u64| Blocks::new(self.values[i], [outer, k], seed);
        self.has_scales().then(|| [of(0, m, self.seed), of(1, n, self.seed ^ 0xb000)])
    }

    /// A of a product, `[m, k]`.
    pub(super) fn a(&self, product: usize) -> Vec<f32> {
        let [m, _, k] = self.shape;
        if let Some([a, _]) = self.blocks() {
            return a.values();
        }
        let own = if self.strides.one_a { 0 } else { product as u64 };
        factor(self.values[0], [m, k], self.types[0], self.seed ^ own << 8)
    }

    /// Transposed B of a product, `[n, k]`. Infinities and NaN thus
    /// stay in a column of D.
    pub(super) fn b(&self, product: usize) -> Vec<f32> {
        let [_, n, k] = self.shape;
        if let Some([_, b]) = self.blocks() {
            return b.values();
        }
        let own = if self.strides.one_b { 0 } else { product as u64 };
        factor(self.values[1], [n, k], self.types[1], self.seed ^ 0xb000 ^ own << 24)
    }

    /// C of a product, or its old D.
    pub(super) fn c_values(&self, product: usize, dtype: DType) -> Vec<f32> {
        let [m, n, _] = self.shape;
        let one = self.rows_grouped || (self.strides.one_c && self.c.is_some());
        let own = if one { 0 } else { product as u64 };
        activations(self.added(), m, n, dtype, self.seed ^ 0xc000 ^ own << 32)
    }

    /// The bias.
    pub(super) fn bias_values(&self, dtype: DType) -> Vec<f32> {
        activations(self.added(), 1, self.shape[1], dtype, self.seed ^ 0xb1a5)
    }

    /// Kind of addends.
    fn added(&self) -> ActivationKind {
        match self.values {
            [ActivationKind::SmallIntegers, _] => ActivationKind::SmallIntegers,
            _ => ActivationKind::Normal,
        }
    }
}

/// Values of a factor, all representable in its format.
fn factor(kind: ActivationKind, [rows, columns]: [usize; 2], format: FactorFormat, seed: u64) -> Vec<f32> {
    let values = activations(kind, rows, columns, format.plain().unwrap_or(DType::F32), seed);
    let rounded = |value: f32| {
        let mut bytes = [0; 4];
        format.write(&mut bytes, 0, value);
        format.read(&bytes, 0)
    };
    values.into_iter().map(rounded).collect()
}

/// A line for tables: `2x 64x32x128 tn bf16*bf16>f32`, then
/// non-default fields.
impl fmt::Display for MatmulCase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { shape: [m, n, k], batch, layout, types: [a, b], d_dtype, activation, strides, .. } = self;
        write!(f, "{batch}x {m}x{n}x{k} {layout} {a}*{b}>{d_dtype}")?;
        for values in self.values.iter().filter(|&&values| values != ActivationKind::Normal) {
            write!(f, " {}", values.name())?;
        }
        for (scale, name) in self.scales.into_iter().zip(["a", "b"]) {
            if let Some(scale) = scale {
                write!(f, " {name}-scale={scale}")?;
            }
        }
        if self.alpha != 1.0 {
            write!(f, " alpha={}", self.alpha)?;
        }
        if let Some((beta, dtype)) = self.c {
            write!(f, " c={beta}*{dtype}")?;
        }
        if let Some(beta) = self.accumulate {
            write!(f, " accumulate={beta}")?;
        }
        if let Some(dtype) = self.bias {
            write!(f, " bias={dtype}")?;
        }
        if *activation != Activation::Identity {
            write!(f, " {}", activation.name())?;
        }
        if self.slope {
            write!(f, " slope")?;
        }
        if self.k_grouped {
            write!(f, " k-grouped")?;
        }
        if self.rows_grouped {
            write!(f, " rows-grouped")?;
        }
        if self.operand_precision != XPrecision::Exact {
            write!(f, " precision={}", self.operand_precision)?;
        }
        let MatmulStrides { gaps, between, offset, one_a, one_b, one_c, d_beside } = *strides;
        if gaps != [0; 3] {
            write!(f, " gaps={gaps:?}")?;
        }
        for (name, value) in [("between", between), ("offset", offset)] {
            if value != 0 {
                write!(f, " {name}={value}")?;
            }
        }
        for (on, name) in [(one_a, "one-a"), (one_b, "one-b"), (one_c, "one-c"), (d_beside, "d-beside")] {
            if on {
                write!(f, " {name}")?;
            }
        }
        if self.every_kernel {
            write!(f, " every-kernel")?;
        }
        write!(f, " seed={}", self.seed)
    }
}
