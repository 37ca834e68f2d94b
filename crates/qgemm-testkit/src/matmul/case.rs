//! One product to check: everything that decides it, as data.

use std::fmt;

use qgemm_formats::DType;
use qgemm_hal::{Activation, FactorFormat, MatmulLayout, XPrecision};

use super::blocks::Blocks;
use crate::activations::{ActivationKind, activations};

/// Where operands lie.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct MatmulStrides {
    /// Elements between the stored rows of A, of B, and of C and D, filled with NaN.
    pub gaps: [usize; 3],
    /// Rows of NaN between the matrices of every operand.
    pub between: usize,
    /// Elements by which operands begin past an aligned address.
    pub offset: usize,
    /// Whether all products have the same A.
    pub one_a: bool,
    /// Whether all products have the same B.
    pub one_b: bool,
    /// Whether all products have the same C.
    pub one_c: bool,
    /// Whether the matrices of D lie side by side, as heads of attention do.
    pub d_beside: bool,
}

/// One product to check.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MatmulCase {
    /// Rows of D, columns of D, and what is added up.
    pub shape: [usize; 3],
    /// Products.
    pub batch: usize,
    /// How A and B are stored.
    pub layout: MatmulLayout,
    /// How A and B are stored.
    pub types: [FactorFormat; 2],
    /// Factors of all of A and of all of B.
    pub scales: [Option<f32>; 2],
    /// Type of D.
    pub d_dtype: DType,
    /// Factor of the product.
    pub alpha: f32,
    /// Factor and type of C.
    pub c: Option<(f32, DType)>,
    /// Factor of what D held.
    pub accumulate: Option<f32>,
    /// Type of the bias.
    pub bias: Option<DType>,
    /// Applied last.
    pub activation: Activation,
    /// Whether C is what the activation was applied to, whose derivative there multiplies the product.
    pub slope: bool,
    /// Whether products are of parts of K: A is stored by columns, B by rows, and each is one matrix.
    pub k_grouped: bool,
    /// Whether products have rows of one A, C and D, which is stored by rows.
    pub rows_grouped: bool,
    /// How far factors in f32 may be rounded.
    pub operand_precision: XPrecision,
    /// What A looks like, and B.
    pub values: [ActivationKind; 2],
    /// Where operands lie.
    pub strides: MatmulStrides,
    /// Whether every kernel that a plan has the choice of is run.
    pub every_kernel: bool,
    /// Seed of all random values.
    pub seed: u64,
}

impl MatmulCase {
    /// One product of normal f32 matrices by rows, `[m, n, k]`.
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

    /// With A, B and D of one type.
    pub fn of_type(self, dtype: DType) -> Self {
        Self { types: [dtype.into(); 2], d_dtype: dtype, ..self }
    }

    /// With factors whose sums are exact.
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

    /// So many products of parts of K.
    pub fn k_grouped(self, products: usize) -> Self {
        let strides = MatmulStrides { one_a: true, one_b: true, between: 0, ..self.strides };
        // Codes with scales lie along K.
        let layout = if self.has_scales() { MatmulLayout::Nt } else { MatmulLayout::Tn };
        Self { batch: products, k_grouped: true, layout, strides, ..self }
    }

    /// So many products of groups of rows.
    pub fn rows_grouped(self, products: usize) -> Self {
        let layout = MatmulLayout::of(true, self.layout.b_by_rows());
        let strides = MatmulStrides { one_a: true, one_c: true, d_beside: false, ..self.strides };
        Self { batch: products, rows_grouped: true, k_grouped: false, layout, strides, ..self }
    }

    /// Where parts of K or groups of rows begin, and the last one ends. Seeds decide whether they are alike, whether some are empty, whether
    /// they leave values out, whether they lead out of K or fall, and, of rows, whether one product has all of them.
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

    /// The part of K that a product multiplies.
    pub(super) fn k_of(&self, product: usize) -> std::ops::Range<usize> {
        let k = self.shape[2];
        if !self.k_grouped {
            return 0..k;
        }
        let offsets = self.offsets();
        let at = |i: usize| (offsets[i] as usize).min(k);
        at(product)..at(product + 1).max(at(product))
    }

    /// The rows of D that a product has. No two have one in common.
    pub(super) fn rows_of(&self, product: usize) -> std::ops::Range<usize> {
        let m = self.shape[0];
        if !self.rows_grouped {
            return 0..m;
        }
        let offsets = self.offsets();
        let at = |i: usize| offsets[..=i].iter().map(|&offset| (offset as usize).min(m)).max().unwrap_or(0);
        at(product)..at(product + 1)
    }

    /// Whether factors are codes whose blocks have scales.
    pub(super) fn has_scales(&self) -> bool {
        self.types[0].has_scales()
    }

    /// Codes and scales of A, and of B transposed, where they have some.
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

    /// B of a product, transposed: `[n, k]`, so that what is not finite stays in its column of D.
    pub(super) fn b(&self, product: usize) -> Vec<f32> {
        let [_, n, k] = self.shape;
        if let Some([_, b]) = self.blocks() {
            return b.values();
        }
        let own = if self.strides.one_b { 0 } else { product as u64 };
        factor(self.values[1], [n, k], self.types[1], self.seed ^ 0xb000 ^ own << 24)
    }

    /// C of a product, or what its D held.
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

    /// What added values look like.
    fn added(&self) -> ActivationKind {
        match self.values {
            [ActivationKind::SmallIntegers, _] => ActivationKind::SmallIntegers,
            _ => ActivationKind::Normal,
        }
    }
}

/// The values of a factor, all of which its format has.
fn factor(kind: ActivationKind, [rows, columns]: [usize; 2], format: FactorFormat, seed: u64) -> Vec<f32> {
    let values = activations(kind, rows, columns, format.plain().unwrap_or(DType::F32), seed);
    let rounded = |value: f32| {
        let mut bytes = [0; 4];
        format.write(&mut bytes, 0, value);
        format.read(&bytes, 0)
    };
    values.into_iter().map(rounded).collect()
}

/// A line for tables: `2x 64x32x128 tn bf16*bf16>f32`, then whatever is not the default.
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
