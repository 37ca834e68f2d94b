//! Weight of an input gradient: one weight, or a stack of experts.

use std::fmt;

use qgemm_hal::{BufferRef, HalError, Operands, UnpackOperand};

use crate::experts::{Experts, ExpertsShape};
use crate::weight::{Memory, Weight, WeightShape};

/// Weight of an input gradient: a [`Weight`], or
/// [`Experts`] with their own rows.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum GradientWeight<'a> {
    /// One weight for all rows.
    One(&'a Weight),
    /// Stack of experts. Rows of dY and dX are sorted by expert.
    Experts(&'a Experts),
}

impl<'a> From<&'a Weight> for GradientWeight<'a> {
    fn from(weight: &'a Weight) -> Self {
        Self::One(weight)
    }
}

impl<'a> From<&'a Experts> for GradientWeight<'a> {
    fn from(experts: &'a Experts) -> Self {
        Self::Experts(experts)
    }
}

impl<'a> GradientWeight<'a> {
    pub(crate) fn shape(self) -> ThroughShape {
        match self {
            Self::One(weight) => (*weight.shape()).into(),
            Self::Experts(experts) => (*experts.shape()).into(),
        }
    }

    fn memory(self) -> &'a Memory {
        match self {
            Self::One(weight) => weight.memory(),
            Self::Experts(experts) => experts.memory(),
        }
    }

    /// Adds the operands of one of `copies` equal weights to
    /// its dequantization launch.
    pub(super) fn give_to_unpack(
        self,
        copy: usize,
        copies: usize,
        operands: &mut Operands<'a>,
    ) -> Result<(), HalError> {
        let Memory { data, row_scale, k_order } = self.memory();
        let own = |all: BufferRef<'a>| {
            let bytes = all.len() / copies;
            all.slice(copy * bytes..(copy + 1) * bytes)
        };
        operands.read(UnpackOperand::W, own(data.into())?);
        operands.read_if_any(UnpackOperand::RowScale, row_scale.as_ref().map(|all| own(all.into())).transpose()?);
        operands.read_if_any(UnpackOperand::KOrder, k_order.as_ref().map(|all| own(all.into())).transpose()?);
        Ok(())
    }
}

/// Properties of the weight that a plan depends on.
#[derive(Clone, Copy, Debug)]
pub(crate) enum ThroughShape {
    One(WeightShape),
    Experts(ExpertsShape),
}

impl From<WeightShape> for ThroughShape {
    fn from(shape: WeightShape) -> Self {
        Self::One(shape)
    }
}

impl From<ExpertsShape> for ThroughShape {
    fn from(shape: ExpertsShape) -> Self {
        Self::Experts(shape)
    }
}

/// Columns of all dequantized weights in a row of scratch memory.
pub(super) struct Columns {
    /// Number of launches: one per expert, or one for a whole
    /// stack without column orders.
    pub copies: usize,
    /// Output features per launch. A gated pair counts one of its weights.
    pub out_features: usize,
    /// Column distance between launches.
    pub copy_pitch: usize,
    /// Column distance between experts. 0 when they share a weight.
    pub expert_pitch: usize,
    /// First column of the up weights, if they do not follow each expert's gate.
    pub up: Option<usize>,
}

/// Column alignment of a launch's result, so that it is 16-byte aligned.
const COLUMN_STEP: usize = 16;

impl ThroughShape {
    /// Shape of one weight or expert.
    pub fn each(&self) -> &WeightShape {
        match self {
            Self::One(each) => each,
            Self::Experts(shape) => &shape.each,
        }
    }

    /// Number of experts, whose products share rows.
    pub(super) fn experts(&self) -> Option<usize> {
        match self {
            Self::One(_) => None,
            Self::Experts(shape) => Some(shape.experts),
        }
    }

    /// Columns of dY.
    pub(super) fn outputs(&self) -> usize {
        let WeightShape { n, gated, .. } = *self.each();
        if gated { 2 * n } else { n }
    }

    pub(super) fn serves(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::One(own), Self::One(other)) => own.serves(other),
            (Self::Experts(own), Self::Experts(other)) => own.serves(other),
            _ => false,
        }
    }

    /// Layout of the dequantized columns.
    ///
    /// A stack is dequantized as one weight: all gates come before all ups, as in
    /// a gated pair. Experts with column orders are dequantized one by one.
    pub(super) fn columns(&self) -> Columns {
        let (each, outputs) = (self.each(), self.outputs());
        let pitch = outputs.next_multiple_of(COLUMN_STEP);
        let one = Columns { copies: 1, out_features: each.n, copy_pitch: pitch, expert_pitch: 0, up: None };
        match *self {
            Self::Experts(ExpertsShape { experts, row_pitch, .. }) if row_pitch > 0 && each.k_order => {
                Columns { copies: experts, expert_pitch: pitch, ..one }
            }
            Self::Experts(ExpertsShape { experts, row_pitch, .. }) if row_pitch > 0 && each.gated => {
                let all = experts * row_pitch / 2;
                Columns { out_features: all, copy_pitch: 2 * all, expert_pitch: row_pitch / 2, up: Some(all), ..one }
            }
            Self::Experts(ExpertsShape { experts, row_pitch, .. }) if row_pitch > 0 => {
                let all = experts * row_pitch;
                Columns { out_features: all, copy_pitch: all, expert_pitch: row_pitch, ..one }
            }
            _ => one,
        }
    }
}

impl fmt::Display for ThroughShape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::One(each) => each.fmt(f),
            Self::Experts(shape) => shape.fmt(f),
        }
    }
}
