//! [`Communicator`]: one rank's end of a group, and the
//! [`Collective`]s it runs.

use std::fmt;

use qgemm_formats::DType;

use crate::buffer::{BufferMut, BufferRef};
use crate::device::{Device, Stream};
use crate::error::HalError;

/// A collective with its shape, which all ranks state alike.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Collective {
    /// Sum of D of all ranks, in place on every rank.
    AllReduce {
        /// Type of the elements.
        dtype: DType,
        /// Number of elements.
        count: usize,
    },
    /// Matrix D `[rows, sum of columns]` from X `[rows, columns of a
    /// rank]`, side by side in the order of ranks.
    AllGather {
        /// Type of the elements.
        dtype: DType,
        /// Number of rows.
        rows: usize,
        /// Columns of each rank.
        columns: Vec<usize>,
    },
    /// Sum of X of all ranks, of which each rank's D is its part.
    ReduceScatter {
        /// Type of the elements.
        dtype: DType,
        /// Elements of each rank's part.
        counts: Vec<usize>,
    },
    /// D of one rank, copied to D of all others.
    Broadcast {
        /// Number of bytes.
        bytes: usize,
        /// The rank that has them.
        root: usize,
    },
}

impl Collective {
    /// Name of the operation.
    pub fn name(&self) -> &'static str {
        match self {
            Self::AllReduce { .. } => "all_reduce",
            Self::AllGather { .. } => "all_gather",
            Self::ReduceScatter { .. } => "reduce_scatter",
            Self::Broadcast { .. } => "broadcast",
        }
    }

    /// Exact bytes of X and D of a rank. `None` for a rank that it
    /// does not have, and on overflow.
    pub fn bytes(&self, rank: usize) -> Option<[usize; 2]> {
        let total = |parts: &[usize]| parts.iter().try_fold(0usize, |sum, part| sum.checked_add(*part));
        match self {
            Self::AllReduce { dtype, count } => Some([0, count.checked_mul(dtype.bytes())?]),
            Self::AllGather { dtype, rows, columns } => {
                let row = rows.checked_mul(dtype.bytes())?;
                Some([columns.get(rank)?.checked_mul(row)?, total(columns)?.checked_mul(row)?])
            }
            Self::ReduceScatter { dtype, counts } => {
                let each = dtype.bytes();
                Some([total(counts)?.checked_mul(each)?, counts.get(rank)?.checked_mul(each)?])
            }
            Self::Broadcast { bytes, .. } => Some([0, *bytes]),
        }
    }

    /// Whether it is one of a group of `world` ranks.
    fn is_of(&self, world: usize) -> bool {
        match self {
            Self::AllReduce { .. } => true,
            Self::AllGather { columns: parts, .. } | Self::ReduceScatter { counts: parts, .. } => parts.len() == world,
            Self::Broadcast { root, .. } => *root < world,
        }
    }

    /// Checks the operands of `rank` in a group of `world`.
    ///
    /// # Errors
    /// [`HalError::BadGroup`] when the collective is not one of such
    /// a group; [`HalError::OutOfBounds`] when an operand is too
    /// short.
    pub fn check(&self, [rank, world]: [usize; 2], x: usize, d: usize) -> Result<(), HalError> {
        let bytes = self.bytes(rank).filter(|_| self.is_of(world));
        let wrong = || HalError::BadGroup { expected: format!("a collective of {world} ranks"), got: self.to_string() };
        let [x_bytes, d_bytes] = bytes.ok_or_else(wrong)?;
        for (what, len, end) in [("X of a collective", x, x_bytes), ("D of a collective", d, d_bytes)] {
            if len < end {
                return Err(HalError::OutOfBounds { what, start: 0, end, len });
            }
        }
        Ok(())
    }
}

impl fmt::Display for Collective {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = self.name();
        match self {
            Self::AllReduce { dtype, count } => write!(f, "{name} of {count} {dtype}"),
            Self::AllGather { dtype, rows, columns } => write!(f, "{name} of {rows} rows of {columns:?} {dtype}"),
            Self::ReduceScatter { dtype, counts } => write!(f, "{name} of {counts:?} {dtype}"),
            Self::Broadcast { bytes, root } => write!(f, "{name} of {bytes} bytes of rank {root}"),
        }
    }
}

/// One rank's end of a group of ranks.
///
/// All ranks run the same collectives in the same order, on one stream
/// at a time: the caller orders those of several streams. After an
/// error a group is of no use: every later call on every rank
/// returns an error that names the rank which failed.
pub trait Communicator: Send + Sync + fmt::Debug {
    /// This rank, below [`Communicator::world`].
    fn rank(&self) -> usize;

    /// Number of ranks.
    fn world(&self) -> usize;

    /// Submits a collective to `stream` of `device`. X is of gathers
    /// and scatters alone.
    ///
    /// # Errors
    /// [`HalError::RankGone`], [`HalError::RankSilent`],
    /// [`HalError::CollectiveMismatch`]; errors of
    /// [`Collective::check`]; device errors.
    fn submit(
        &self,
        device: &dyn Device,
        stream: &Stream,
        collective: &Collective,
        x: Option<BufferRef<'_>>,
        d: BufferMut<'_>,
    ) -> Result<(), HalError>;

    /// How a collective of this group runs: `host_memory`, `nccl`,
    /// `one_shot`. All ranks choose alike.
    fn algorithm(&self, _collective: &Collective) -> &'static str {
        "other"
    }

    /// Whether collectives are work of the stream, which a graph can
    /// capture. Others are complete when [`Communicator::submit`]
    /// returns.
    fn is_captured(&self) -> bool {
        false
    }

    /// Compares `what` with that of all ranks, such as the shape of a
    /// plan.
    ///
    /// # Errors
    /// [`HalError::CollectiveMismatch`], [`HalError::RankGone`],
    /// [`HalError::RankSilent`].
    fn agree(&self, what: &str) -> Result<(), HalError>;

    /// Waits for the work of `stream`, but not for ranks that no
    /// longer answer.
    ///
    /// # Errors
    /// [`HalError::RankGone`], [`HalError::RankSilent`]; errors of
    /// that work.
    fn wait(&self, device: &dyn Device, stream: &Stream) -> Result<(), HalError> {
        device.synchronize(stream)
    }

    /// Ends the group: this rank takes part no longer, and `why` is
    /// told to the others.
    fn abort(&self, why: &str);
}
