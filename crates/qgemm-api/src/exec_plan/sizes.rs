//! Sizes of regions.

use qgemm_formats::FormatError;

use crate::error::Error;

/// Region operand: field name, region name, and minimum
/// bytes (`None` on overflow).
pub(super) type NamedRegion<'a> = (&'static str, &'a str, Option<usize>);

/// Bytes of a word: a token, a sequence length.
pub(super) const WORD: usize = 4;

/// Error of an arena whose size overflows.
pub(super) fn too_large() -> Error {
    FormatError::Overflow { what: "an arena".into(), dims: Vec::new() }.into()
}
