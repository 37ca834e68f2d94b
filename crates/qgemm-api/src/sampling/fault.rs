//! [`SamplingFault`]: why a row of logits has no token.

use std::fmt;

use qgemm_hal::op::sampling::{STATUS_FINE, STATUS_NON_FINITE, STATUS_PARAMETER, STATUS_WORDS, SamplingParameters};

/// Reason why a row of logits has no token. Other rows are not
/// affected.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum SamplingFault {
    /// A logit is NaN or +∞. It is the first one of the row.
    NonFiniteLogit {
        /// Its token.
        id: u32,
        /// The logit.
        got: f32,
    },
    /// Every logit is −∞.
    NoCandidate,
    /// A parameter is invalid.
    Parameter {
        /// Name.
        name: &'static str,
        /// Value.
        got: f32,
        /// Valid values.
        expected: &'static str,
    },
}

impl SamplingFault {
    /// Fault of a row's status; `None` where the row has a token.
    pub(super) fn of_status(status: [u32; STATUS_WORDS]) -> Option<Self> {
        let [code, index, bits, _] = status;
        let got = f32::from_bits(bits);
        match code {
            STATUS_FINE => None,
            STATUS_NON_FINITE => Some(Self::NonFiniteLogit { id: index, got }),
            STATUS_PARAMETER => {
                let (name, expected) = SamplingParameters::NAMES[index as usize % SamplingParameters::NAMES.len()];
                Some(Self::Parameter { name, got, expected })
            }
            _ => Some(Self::NoCandidate),
        }
    }
}

impl fmt::Display for SamplingFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NonFiniteLogit { id, got } => write!(f, "expected a finite logit or −∞ for token {id}, got {got}"),
            Self::NoCandidate => f.write_str("expected a token that may be sampled: every logit is −∞"),
            Self::Parameter { name, got, expected } => write!(f, "{name} = {got}: expected {expected}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_names_the_fault() {
        let says = |status| SamplingFault::of_status(status).map(|fault| fault.to_string());
        assert_eq!(says([0, 7, 7, 7]), None);
        assert_eq!(
            says([1, 7, f32::NAN.to_bits(), 0]).as_deref(),
            Some("expected a finite logit or −∞ for token 7, got NaN")
        );
        assert!(says([2, 0, 0, 0]).is_some_and(|text| text.contains("every logit is −∞")));
        assert_eq!(says([3, 1, 2f32.to_bits(), 0]).as_deref(), Some("top-p = 2: expected 0 to 1"));
        // Memory that no run wrote.
        assert!(says([3, u32::MAX, 0, 0]).is_some() && says([9, 0, 0, 0]).is_some());
    }
}
