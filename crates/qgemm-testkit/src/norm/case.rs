//! A case of `norm`, as data.

use std::fmt;

use qgemm_api::{GateFunction, NormFunction, NormKind};
use qgemm_formats::{DType, XFormat, XParts};
use rand::SeedableRng;
use rand::rngs::StdRng;

use crate::activations::{ActivationKind, activations, normal};

/// Kind of rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum NormValues {
    /// Activations.
    Like(ActivationKind),
    /// Normal with mean 10⁴ and deviation 1: detects single-pass and
    /// rounded means.
    Offset,
    /// Rows around 10³⁷, around 10⁻³⁷ and around 1, in turn. Not in f16.
    Extreme,
    /// Every other row is zeros.
    ZeroRows,
}

impl NormValues {
    fn name(self) -> &'static str {
        match self {
            NormValues::Like(kind) => kind.name(),
            NormValues::Offset => "offset",
            NormValues::Extreme => "extreme",
            NormValues::ZeroRows => "zero-rows",
        }
    }
}

/// Operands that share memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum NormAliasing {
    /// No sharing.
    #[default]
    Apart,
    /// D is in X's memory.
    DInX,
    /// The sum is in the residual's memory.
    SumInResidual,
    /// The sum is in X's memory.
    SumInX,
    /// D is in X's memory, the sum in the residual's.
    Both,
}

impl NormAliasing {
    /// Whether D is in X's memory.
    pub(super) fn d_in_x(self) -> bool {
        matches!(self, NormAliasing::DInX | NormAliasing::Both)
    }

    /// Whether the sum is in the residual's memory.
    pub(super) fn sum_in_residual(self) -> bool {
        matches!(self, NormAliasing::SumInResidual | NormAliasing::Both)
    }
}

/// Memory layout of the operands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct NormLayout {
    /// Elements between the rows of X, filled with NaN.
    pub x_gap: usize,
    /// Elements between the rows of D, which must not be written.
    pub d_gap: usize,
    /// Elements between the rows of the residual and of z.
    pub residual_gap: usize,
    /// Elements between the rows of the sum.
    pub sum_gap: usize,
    /// Offset of X and the sum from an aligned address, in elements.
    pub x_offset: usize,
    /// Offset of D, the residual and z, in elements.
    pub d_offset: usize,
    /// Offset of gamma and beta, in elements.
    pub gamma_offset: usize,
}

/// Gate of a case.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct NormGateCase {
    /// The activation.
    pub function: GateFunction,
    /// Whether X is multiplied instead of the result.
    pub before: bool,
}

impl NormGateCase {
    /// Every activation at every place.
    pub const ALL: [Self; 4] = {
        let [silu, sigmoid] = GateFunction::ALL;
        [
            Self { function: silu, before: false },
            Self { function: silu, before: true },
            Self { function: sigmoid, before: false },
            Self { function: sigmoid, before: true },
        ]
    };
}

/// A norm to check.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NormCase {
    /// Rows of X and D.
    pub rows: usize,
    /// Columns of X.
    pub columns: usize,
    /// Groups of features.
    pub groups: usize,
    /// The gate, if any.
    pub gate: Option<NormGateCase>,
    /// Zero columns that D has past those of X.
    pub padding: usize,
    /// Type of X.
    pub x: DType,
    /// Type of D.
    pub d: DType,
    /// Quantized format of the result, if it is not D.
    pub to: Option<XFormat>,
    /// The norm.
    pub function: NormFunction,
    /// Types of the residual and the sum, if any.
    pub added: Option<[DType; 2]>,
    /// Shared memory. Operands that share it have one type and
    /// layout.
    pub place: NormAliasing,
    /// Kind of X.
    pub values: NormValues,
    /// Memory layout of the operands.
    pub layout: NormLayout,
    /// Seed of all random values.
    pub seed: u64,
}

impl NormCase {
    /// Normal values, contiguous, without a residual. Gamma is f32;
    /// LayerNorm has beta, too.
    pub fn new(rows: usize, columns: usize, kind: NormKind, x: DType, d: DType) -> Self {
        let function = NormFunction::new(kind, 1e-5).gamma(DType::F32);
        let function = if kind == NormKind::Layer { function.beta(DType::F32) } else { function };
        Self {
            rows,
            columns,
            groups: 1,
            gate: None,
            padding: 0,
            x,
            d,
            to: None,
            function,
            added: None,
            place: NormAliasing::Apart,
            values: NormValues::Like(ActivationKind::Normal),
            layout: NormLayout::default(),
            seed: 1,
        }
    }

    /// With a quantized result. D's gap and offset then apply to
    /// planes, in their units.
    pub fn quantized(self, to: XFormat) -> Self {
        Self { to: Some(to), padding: 0, ..self }
    }

    /// Planes of the result. Cases with odd seeds use the options of
    /// the format: a given factor, and sums over 16 columns.
    pub(super) fn parts(&self) -> Option<XParts> {
        let odd = self.seed % 2 == 1;
        self.to?.parts(odd, odd.then_some(16))
    }

    /// Adds a residual and a sum of these types.
    pub fn adding(self, residual: DType, sum: DType) -> Self {
        Self { added: Some([residual, sum]), ..self }
    }

    /// `X[rows, columns]`, contiguous and representable in its type.
    pub(super) fn x_values(&self) -> Vec<f32> {
        let (rows, columns) = (self.rows, self.columns);
        let plain = || activations(ActivationKind::Normal, rows, columns, DType::F32, self.seed);
        let of_row = |value: fn(usize, f32) -> f32| -> Vec<f32> {
            plain().into_iter().enumerate().map(|(i, x)| value(i / columns.max(1), x)).collect()
        };
        let values = match self.values {
            NormValues::Like(kind) => return activations(kind, rows, columns, self.x, self.seed),
            NormValues::Offset => of_row(|_, x| 1e4 + x),
            NormValues::Extreme => of_row(|row, x| x * [1e37, 1e-37, 1.0][row % 3]),
            NormValues::ZeroRows => of_row(|row, x| if row % 2 == 0 { 0.0 } else { x }),
        };
        self.x.decode(&self.x.encode(&values))
    }

    /// The residual, if any.
    pub(super) fn residual_values(&self) -> Vec<f32> {
        let dtype = self.added.map_or(DType::F32, |[residual, _]| residual);
        activations(ActivationKind::Outliers, self.rows, self.columns, dtype, self.seed ^ 0x5e51_d0a1)
    }

    /// z of the gate, if any: beyond the range of the sigmoid, too.
    pub(super) fn gate_values(&self) -> Vec<f32> {
        activations(ActivationKind::Outliers, self.rows, self.columns, self.x, self.seed ^ 0x6a7e_0000)
    }

    /// Gamma and beta per column; 1 and 0 if absent.
    pub(super) fn of_columns(&self) -> [Vec<f32>; 2] {
        let mut rng = StdRng::seed_from_u64(self.seed ^ 0x6a44_a000);
        let mut drawn = |dtype: Option<DType>, mean: f32, deviation: f32| match dtype {
            Some(dtype) => {
                let values: Vec<f32> = (0..self.columns).map(|_| mean + deviation * normal(&mut rng)).collect();
                dtype.decode(&dtype.encode(&values))
            }
            None => vec![mean; self.columns],
        };
        [drawn(self.function.gamma, 1.0, 0.5), drawn(self.function.beta, 0.0, 0.3)]
    }
}

/// A line for tables: `17x33 rms f32->f16 normal`, then
/// non-default fields.
impl fmt::Display for NormCase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rows, columns, groups, gate, padding, x, d, to, function, added, place, values, layout, seed } =
            self;
        let to = to.unwrap_or((*d).into());
        write!(f, "{rows}x{columns} {} {x}->{to} {} eps={:e}", function.kind, values.name(), function.eps)?;
        for (name, dtype) in [("gamma", function.gamma), ("beta", function.beta)] {
            if let Some(dtype) = dtype {
                write!(f, " {name}={dtype}")?;
            }
        }
        if let Some([residual, sum]) = added {
            write!(f, " residual={residual} sum={sum}")?;
        }
        if let Some(NormGateCase { function, before }) = gate {
            write!(f, " gate={function}{}", if *before { " before" } else { "" })?;
        }
        if *groups > 1 {
            write!(f, " groups={groups}")?;
        }
        if *place != NormAliasing::Apart {
            write!(f, " place={place:?}")?;
        }
        let gaps = [
            ("padding", *padding),
            ("x-gap", layout.x_gap),
            ("d-gap", layout.d_gap),
            ("residual-gap", layout.residual_gap),
            ("sum-gap", layout.sum_gap),
            ("x-offset", layout.x_offset),
            ("d-offset", layout.d_offset),
            ("gamma-offset", layout.gamma_offset),
        ];
        for (name, value) in gaps {
            if value != 0 {
                write!(f, " {name}={value}")?;
            }
        }
        write!(f, " seed={seed}")
    }
}
