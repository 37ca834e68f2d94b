//! Option values: operations, formats, shapes and roundings.

use std::fmt;
use std::num::NonZeroUsize;
use std::path::Path;
use std::str::FromStr;
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use qgemm_api::{Format, Keys, NormKind, Tuned, XFormat, read_tuned};

use crate::operations::Op;

/// Checks that the operation has `--x-format`, and that the
/// format is quantized.
///
/// # Errors
/// When either is not so.
pub fn check_x_format(op: Op, format: Option<XFormat>) -> anyhow::Result<()> {
    let Some(format) = format else { return Ok(()) };
    let serves = matches!(op, Op::Quantize | Op::Gemm | Op::Experts | Op::Norm);
    ensure!(serves, "--x-format is an option of `--op gemm`, `--op experts`, `--op norm` and `--op quantize`");
    ensure!(format.plain().is_none(), "--x-format {format}: expected a format of codes and scales");
    Ok(())
}

/// Checks that only products normalize X.
///
/// # Errors
/// When the operation is another.
pub fn check_norm(op: Op, norm: Option<NormKind>) -> anyhow::Result<()> {
    ensure!(norm.is_none() || matches!(op, Op::Gemm | Op::Experts), "--norm is an option of `--op gemm` and `experts`");
    Ok(())
}

/// One format or all.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum FormatChoice {
    /// Every format.
    All,
    /// This one.
    One(Format),
}

impl FormatChoice {
    /// The selected formats.
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

/// Sizes separated by `x`. The operation defines their number.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sizes(Vec<usize>);

impl FromStr for Sizes {
    type Err = anyhow::Error;

    fn from_str(s: &str) -> anyhow::Result<Self> {
        let numbers: Result<Vec<usize>, _> = s.split('x').map(str::parse).collect();
        let numbers = numbers.with_context(|| format!("`{s}` is no shape: expected numbers, such as 8x4096x4096"))?;
        ensure!(numbers.iter().all(|&n| n > 0), "`{s}`: expected numbers above 0");
        // Kernels count in u32. The check precedes all allocations.
        let most = u32::MAX as usize;
        ensure!(numbers.iter().all(|&n| n <= most), "`{s}`: expected numbers up to {most}");
        Ok(Self(numbers))
    }
}

impl fmt::Display for Sizes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.iter().map(usize::to_string).collect::<Vec<_>>().join("x"))
    }
}

impl Sizes {
    /// Shape of a product.
    ///
    /// # Errors
    /// When there are not three.
    pub fn gemm(&self) -> anyhow::Result<Shape> {
        match self.0[..] {
            [m, n, k] => Ok(Shape { m, n, k }),
            _ => bail!("`{self}` is no shape of gemm: expected MxNxK, such as 8x4096x4096"),
        }
    }

    /// Rows and columns of a conversion.
    ///
    /// # Errors
    /// When there are not two.
    pub fn convert(&self) -> anyhow::Result<[usize; 2]> {
        match self.0[..] {
            [rows, columns] => Ok([rows, columns]),
            _ => bail!("`{self}` is no shape of convert: expected RxC, such as 4096x7168"),
        }
    }

    /// Rows and columns of an operation's matrix.
    ///
    /// # Errors
    /// When there are not two.
    pub fn matrix(&self, operation: &str) -> anyhow::Result<[usize; 2]> {
        match self.0[..] {
            [rows, columns] => Ok([rows, columns]),
            _ => bail!("`{self}` is no shape of {operation}: expected RxC, such as 4096x7168"),
        }
    }

    /// As many sizes as the operation has; `expected` says which.
    ///
    /// # Errors
    /// When there are others.
    pub fn exactly<const COUNT: usize>(&self, operation: &str, expected: &str) -> anyhow::Result<[usize; COUNT]> {
        match self.0.as_slice().try_into() {
            Ok(sizes) => Ok(sizes),
            Err(_) => bail!("`{self}` is no shape of {operation}: expected {expected}"),
        }
    }

    /// Rows and columns of a norm.
    ///
    /// # Errors
    /// When there are not two.
    pub fn norm(&self) -> anyhow::Result<[usize; 2]> {
        match self.0[..] {
            [rows, columns] => Ok([rows, columns]),
            _ => bail!("`{self}` is no shape of norm: expected RxC, such as 512x4096"),
        }
    }

    /// Parameters of an optimizer.
    ///
    /// # Errors
    /// When there is not one number.
    pub fn optimizer(&self) -> anyhow::Result<usize> {
        match self.0[..] {
            [len] => Ok(len),
            _ => bail!("`{self}` is no shape of optimizer: expected N, such as 1048576"),
        }
    }

    /// Tokens, experts and experts per token.
    ///
    /// # Errors
    /// When there are not three.
    pub fn routing(&self) -> anyhow::Result<[usize; 3]> {
        match self.0[..] {
            [tokens, experts, top_k] => Ok([tokens, experts, top_k]),
            _ => bail!("`{self}` is no shape of routing: expected TxExK, such as 512x128x8"),
        }
    }
}

impl Sizes {
    /// Sequences, queries and keys of each, heads, KV heads and head
    /// dimension.
    ///
    /// # Errors
    /// When there are not six, or the KV heads do not divide the
    /// heads.
    pub fn attention(&self) -> anyhow::Result<[usize; 6]> {
        match self.0[..] {
            [sequences, queries, keys, heads, kv_heads, dim] if heads % kv_heads == 0 => {
                Ok([sequences, queries, keys, heads, kv_heads, dim])
            }
            _ => bail!("`{self}` is no shape of attention: expected BxQxSxHxGxD, such as 32x1x8192x32x8x128"),
        }
    }
}

impl Sizes {
    /// Tokens, heads, KV heads and head dimension.
    ///
    /// # Errors
    /// When there are not four, or the KV heads do not divide the
    /// heads.
    pub fn kv_append(&self) -> anyhow::Result<[usize; 4]> {
        match self.0[..] {
            [tokens, heads, kv_heads, dim] if heads % kv_heads == 0 => Ok([tokens, heads, kv_heads, dim]),
            _ => bail!("`{self}` is no shape of kv_append: expected TxHxGxD, such as 4096x32x8x128"),
        }
    }
}

/// Shape of an indexer run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IndexerShape {
    /// Sequences with paged keys; `None` if all queries share keys.
    pub sequences: Option<usize>,
    /// Queries, per sequence if there are sequences.
    pub queries: usize,
    /// Keys of each query.
    pub keys: usize,
    /// Heads.
    pub heads: usize,
    /// Features of a head.
    pub features: usize,
}

impl fmt::Display for IndexerShape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { sequences, queries, keys, heads, features } = self;
        sequences.map_or(Ok(()), |sequences| write!(f, "{sequences}x"))?;
        write!(f, "{queries}x{keys}x{heads}x{features}")
    }
}

impl Sizes {
    /// Queries, keys, heads and features; with pages, the number of
    /// sequences comes first.
    ///
    /// # Errors
    /// When there are neither four nor five.
    pub fn indexer(&self) -> anyhow::Result<IndexerShape> {
        let (sequences, rest) = match self.0[..] {
            [sequences, ref rest @ ..] if rest.len() == 4 => (Some(sequences), rest),
            ref all => (None, all),
        };
        match *rest {
            [queries, keys, heads, features] => Ok(IndexerShape { sequences, queries, keys, heads, features }),
            _ => bail!("`{self}` is no shape of an indexer: expected [Bx]QxSxHxD, such as 2048x65536x64x128"),
        }
    }
}

/// Shapes of products.
///
/// # Errors
/// When a shape is invalid.
pub fn gemm_shapes(sizes: &[Sizes]) -> anyhow::Result<Vec<Shape>> {
    sizes.iter().map(Sizes::gemm).collect()
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
        s.parse::<Sizes>()?.gemm()
    }
}

/// A time with its unit.
///
/// # Errors
/// When it is invalid, zero, or more than a day.
pub fn duration(text: &str) -> anyhow::Result<Duration> {
    const UNITS: [(&str, f64); 3] = [("ms", 1e-3), ("s", 1.0), ("m", 60.0)];
    let wrong = || format!("`{text}` is no time: expected a number and its unit, such as 2s, 500ms or 3m");
    let (number, scale) =
        UNITS.iter().find_map(|(unit, scale)| Some((text.strip_suffix(unit)?, scale))).with_context(wrong)?;
    let seconds = number.parse::<f64>().with_context(wrong)? * scale;
    ensure!(seconds > 0.0 && seconds <= 86_400.0, "`{text}`: expected more than 0 and at most a day");
    Ok(Duration::from_secs_f64(seconds))
}

/// `keys` keys per sequence, contiguous or paged.
pub fn keys_of(sequences: usize, keys: usize, page_size: Option<NonZeroUsize>) -> Keys {
    let Some(size) = page_size.map(NonZeroUsize::get) else { return Keys::each(keys) };
    let width = keys.div_ceil(size);
    Keys::paged(sequences.saturating_mul(width), size, width).most(keys)
}

/// The table that `--tuned` names: a file, or `auto`.
///
/// # Errors
/// When the file does not exist or is not a table.
pub fn tuned(path: &Path) -> anyhow::Result<Tuned> {
    if path == Path::new("auto") {
        return Ok(Tuned::Auto);
    }
    match read_tuned(path).with_context(|| path.display().to_string())? {
        Some(table) => Ok(table.into()),
        None => bail!("{}: there is no such file", path.display()),
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
        for bad in ["8x4096", "8x4096x256x1", "8x0x256", "ax1x1", "", "4294967296x32x32", "1x1x18446744073709551616"] {
            assert!(bad.parse::<Shape>().is_err(), "{bad}");
        }
        assert_eq!("3x7".parse::<Sizes>().and_then(|sizes| sizes.convert()).expect("two"), [3, 7]);
        let error = "3x7x1".parse::<Sizes>().and_then(|sizes| sizes.convert()).expect_err("three").to_string();
        assert!(error.contains("3x7x1") && error.contains("RxC"), "{error}");
    }

    #[test]
    fn all_formats_or_one() {
        let all: FormatChoice = "all".parse().expect("a choice");
        assert_eq!(all.formats().len(), Format::all().count());
        let one: FormatChoice = "Q4_K".parse().expect("a choice");
        assert_eq!(one.formats().len(), 1);
        assert!("q4_z".parse::<FormatChoice>().is_err());
    }

    #[test]
    fn times_have_units() {
        let millis = |text| duration(text).map(|d| d.as_millis());
        assert_eq!(
            (millis("2s").ok(), millis("500ms").ok(), millis("1.5m").ok()),
            (Some(2000), Some(500), Some(90_000))
        );
        for bad in ["2", "s", "-1s", "0s", "nans", "infs", "1e9m"] {
            assert!(duration(bad).is_err(), "{bad}");
        }
    }
}
