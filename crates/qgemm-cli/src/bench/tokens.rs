//! Token counts of a sweep: `1..256`, `1..64,80..256/16`.

use std::collections::BTreeSet;
use std::str::FromStr;

use anyhow::{Context, ensure};

/// Token counts, in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tokens(pub Vec<usize>);

impl FromStr for Tokens {
    type Err = anyhow::Error;

    fn from_str(s: &str) -> anyhow::Result<Self> {
        let mut tokens = BTreeSet::new();
        for part in s.split(',') {
            let expected = || format!("`{part}` is no range of tokens: expected `8`, `1..256` or `16..256/16`");
            let number = |text: &str| text.parse::<usize>().with_context(expected);
            let (range, step) = match part.split_once('/') {
                Some((range, step)) => (range, number(step)?),
                None => (part, 1),
            };
            let (first, last) = match range.split_once("..") {
                Some((first, last)) => (number(first)?, number(last)?),
                None => (number(range)?, number(range)?),
            };
            ensure!(0 < first && first <= last && step > 0, expected());
            tokens.extend((first..=last).step_by(step));
        }
        Ok(Self(tokens.into_iter().collect()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_include_their_ends_and_join() {
        let tokens = |s: &str| s.parse::<Tokens>().expect("tokens").0;
        assert_eq!(tokens("1..4"), [1, 2, 3, 4]);
        assert_eq!(tokens("8"), [8]);
        assert_eq!(tokens("16..64/16,2,1..3"), [1, 2, 3, 16, 32, 48, 64]);
        for bad in ["", "0..4", "4..1", "1..8/0", "a", "1..", "1.4"] {
            assert!(bad.parse::<Tokens>().is_err(), "{bad}");
        }
    }
}
