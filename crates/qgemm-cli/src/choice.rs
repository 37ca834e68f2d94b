//! Values of options: formats, shapes, and how far activations may be rounded.

use std::fmt;
use std::str::FromStr;

use anyhow::{Context, ensure};
use qgemm_api::{Format, XRounding};

/// One format or every one.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum FormatChoice {
    /// Every format.
    All,
    /// This one.
    One(Format),
}

impl FormatChoice {
    /// The formats meant.
    pub fn formats(self) -> Vec<Format> {
        match self {
            FormatChoice::All => Format::all().collect(),
            FormatChoice::One(format) => vec![format],
        }
    }
}

impl FromStr for FormatChoice {
    type Err = qgemm_api::FormatError;

    fn from_str(s: &str) -> Result<Self, Self::Err> {
        if s.eq_ignore_ascii_case("all") { Ok(FormatChoice::All) } else { s.parse().map(FormatChoice::One) }
    }
}

/// The rounding of this name.
///
/// # Errors
/// When there is none.
pub fn x_rounding(name: &str) -> Result<XRounding, String> {
    let found = XRounding::ALL.into_iter().find(|rounding| rounding.name() == name);
    found.ok_or_else(|| format!("expected one of {}", XRounding::ALL.map(XRounding::name).join(", ")))
}

/// `MxNxK`: tokens, output features, input features.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Tokens.
    pub m: usize,
    /// Output features.
    pub n: usize,
    /// Input features.
    pub k: usize,
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}x{}x{}", self.m, self.n, self.k)
    }
}

impl FromStr for Shape {
    type Err = anyhow::Error;

    fn from_str(s: &str) -> anyhow::Result<Self> {
        let expected = || format!("`{s}` is no shape: expected MxNxK, such as 8x4096x4096");
        let numbers: Result<Vec<usize>, _> = s.split('x').map(str::parse).collect();
        let numbers = numbers.with_context(expected)?;
        let &[m, n, k] = numbers.as_slice() else { anyhow::bail!(expected()) };
        ensure!(m > 0 && n > 0 && k > 0, "`{s}`: expected three numbers above 0");
        Ok(Self { m, n, k })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_parse_as_they_print() {
        let shape: Shape = "8x4096x256".parse().expect("a shape");
        assert_eq!((shape.m, shape.n, shape.k), (8, 4096, 256));
        assert_eq!(shape.to_string(), "8x4096x256");
        for bad in ["8x4096", "8x4096x256x1", "8x0x256", "ax1x1", ""] {
            assert!(bad.parse::<Shape>().is_err(), "{bad}");
        }
    }

    #[test]
    fn all_formats_or_one() {
        let all: FormatChoice = "all".parse().expect("a choice");
        assert_eq!(all.formats().len(), Format::all().count());
        let one: FormatChoice = "Q4_K".parse().expect("a choice");
        assert_eq!(one.formats().len(), 1);
        assert!("q4_z".parse::<FormatChoice>().is_err());
    }
}
