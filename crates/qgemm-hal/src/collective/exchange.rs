//! [`Exchange`]: how the ranks of a group on hosts reach each
//! other.

use std::fmt;
use std::sync::Arc;

use crate::error::HalError;

/// Message of a rank to all others.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Message {
    /// The collective in words, equal on all ranks.
    pub about: String,
    /// Operand.
    pub bytes: Vec<u8>,
}

/// One rank's end of a group whose messages pass through host
/// memory.
pub trait Exchange: Send + Sync + fmt::Debug {
    /// This rank.
    fn rank(&self) -> usize;

    /// Number of ranks.
    fn world(&self) -> usize;

    /// Gives `message` to all ranks. Returns those of all ranks in
    /// order, this one's included.
    ///
    /// # Errors
    /// [`HalError::RankGone`] at once when a rank is known to be
    /// gone, [`HalError::RankSilent`] when one does not come within
    /// the time limit.
    fn exchange(&self, message: Message) -> Result<Vec<Arc<Message>>, HalError>;

    /// Whether all ranks are there, without waiting.
    ///
    /// # Errors
    /// [`HalError::RankGone`], and the error that ended the group.
    fn check(&self) -> Result<(), HalError>;

    /// Ends the group.
    fn abort(&self, why: &str);
}
