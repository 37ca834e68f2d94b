//! The error type of the crate.

use thiserror::Error;

use crate::model::printable;
use crate::prepack::FragmentLayout;

/// What can be wrong with a format's name, a weight's bytes, or a model file.
#[derive(Debug, Error, Clone, PartialEq)]
#[non_exhaustive]
pub enum FormatError {
    /// No format has this name.
    #[error("no weight format is called `{name}`; {}", .near.as_ref().map_or("`qgemm devices --json` and `Format::all()` list them".into(), |n| format!("did you mean `{n}`?")))]
    UnknownFormat {
        /// The name asked for.
        name: String,
        /// The closest name there is.
        near: Option<String>,
    },
    /// No format of activations has this name.
    #[error("no format of activations is called `{name}`: expected one of {}", crate::XFormat::ALL.map(crate::XFormat::name).join(", "))]
    UnknownXFormat {
        /// The name asked for.
        name: String,
    },
    /// No element type has this name.
    #[error("no element type is called `{name}`: expected f32, f16 or bf16")]
    UnknownDType {
        /// The name asked for.
        name: String,
    },
    /// K does not fill whole blocks of the format.
    #[error("{format} stores K in blocks of {block}, and K = {k} is no multiple of it")]
    KNotMultiple {
        /// Name of the format.
        format: &'static str,
        /// Its block length.
        block: usize,
        /// The K that came.
        k: usize,
    },
    /// A dimension is zero where none may be.
    #[error("{name} is 0: a weight has at least one row and one column")]
    ZeroDimension {
        /// Which dimension.
        name: &'static str,
    },
    /// A byte count does not match the shape.
    #[error("{what}: expected {expected} bytes, got {got}")]
    WrongLength {
        /// What was measured.
        what: String,
        /// Bytes that shape and format ask for.
        expected: usize,
        /// Bytes that came.
        got: usize,
    },
    /// Dimensions whose product does not fit the address space.
    #[error("{what}: {dims:?} overflows the address space")]
    Overflow {
        /// What was measured.
        what: String,
        /// The dimensions.
        dims: Vec<u64>,
    },
    /// A scale is NaN or infinite.
    #[error("{what}: scale at row {row}, block {block} is not finite")]
    NonFiniteScale {
        /// The tensor.
        what: String,
        /// Output feature.
        row: usize,
        /// Block within the row.
        block: usize,
    },
    /// A zero point is no number that codes are near to.
    #[error(
        "{format} weight: zero point at row {row}, block {block} is {got}, expected at most {largest}: codes are offset by no more than one past the largest"
    )]
    ZeroPoint {
        /// Name of the format.
        format: &'static str,
        /// Output feature.
        row: usize,
        /// Block within the row.
        block: usize,
        /// The largest there may be.
        largest: u8,
        /// The zero point.
        got: u8,
    },
    /// A scale is no power of two where the checkpoint, or its blocks, ask for one.
    #[error(
        "tensor `{tensor}`: scale {index} is {value:e}, and expected is a power of two from 2^-127 to 2^127 (UE8M0); requantize the checkpoint, or correct its `scale_fmt`"
    )]
    ScaleNotPowerOfTwo {
        /// The tensor of scales.
        tensor: String,
        /// Which of its scales, in their order in the file.
        index: usize,
        /// Its value.
        value: f32,
    },
    /// The weights of a gated pair differ in what they must share.
    #[error("gated pair: the gate's {what} is {gate}, the up's {up}")]
    PairMismatch {
        /// `format`, `N`, `K`, `stored columns`, `column order` or `number of experts`.
        what: &'static str,
        /// The gate's.
        gate: String,
        /// The up's.
        up: String,
    },
    /// Weights whose rows are to be one weight differ in what they must share.
    #[error("rows of several weights: the {what} of the first is {first}, of number {number} {got}")]
    PartMismatch {
        /// `format`, `K`, `stored columns` or `column order`.
        what: &'static str,
        /// Which weight differs, counted from 1.
        number: usize,
        /// That of the first.
        first: String,
        /// That of this one.
        got: String,
    },
    /// A weight ends amid rows that share their scales, so that no rows can follow it.
    #[error(
        "rows of several weights: number {number} has {n} rows; as {format} shares scales among rows, expected a multiple of {rows} of all but the last"
    )]
    PartEndsInScale {
        /// Name of the format.
        format: &'static str,
        /// Which weight, counted from 1.
        number: usize,
        /// Rows it has.
        n: usize,
        /// Rows that share their scales when packed.
        rows: usize,
    },
    /// No weights where at least one is needed.
    #[error("rows of several weights: expected at least one weight, got none")]
    NoParts,
    /// An entry of a column order is no column, or not its first mention.
    #[error("column order: entry {at} is {column}, which {}", if *.column as usize >= *.k { format!("is not below K = {k}") } else { "an earlier entry is, too".into() })]
    ColumnOrder {
        /// Index of the entry.
        at: usize,
        /// The entry.
        column: u32,
        /// Input features.
        k: usize,
    },
    /// More columns than the 32-bit numbers of a column order can name.
    #[error("column order: K = {k} exceeds the {} columns that 32-bit entries can name", crate::NO_COLUMN)]
    TooManyColumns {
        /// Input features.
        k: usize,
    },
    /// A layer of experts without any.
    #[error("a layer of experts has at least one expert")]
    NoExperts,
    /// An expert's weight is not like the first one's.
    #[error("expert {expert}: expected {expected} like expert 0, got {got}")]
    ExpertMismatch {
        /// The expert's id.
        expert: usize,
        /// Format and size of the first expert's weight.
        expected: String,
        /// Those of this one.
        got: String,
    },
    /// A stacked weight whose rows are not shared out evenly.
    #[error("{rows} rows are not those of {experts} experts of equal size")]
    UnevenExperts {
        /// Rows of the weight.
        rows: usize,
        /// Experts that share them.
        experts: usize,
    },
    /// The format cannot be produced from plain values.
    #[error("weights cannot be quantized to {format}: {why}")]
    NotQuantizable {
        /// Name of the format.
        format: &'static str,
        /// The reason.
        why: &'static str,
    },
    /// A model file breaks its own format's rules.
    #[error("{file}: {what}")]
    BadFile {
        /// File kind or path.
        file: String,
        /// What was expected and what came.
        what: String,
    },
    /// A model file uses something that this reader does not support.
    #[error("{file}: {what}")]
    UnsupportedFile {
        /// File kind or path.
        file: String,
        /// What is not supported, and what to do instead.
        what: String,
    },
    /// A model file could not be written.
    #[error("{file}: writing failed: {why}")]
    WriteFailed {
        /// File kind or path.
        file: String,
        /// What the operating system said.
        why: String,
    },
    /// A file is no packed weight.
    #[error("packed weight: expected a file that begins with \"qgemm-pw\", got \"{}\"", .got.escape_ascii())]
    NotPacked {
        /// Its first bytes.
        got: [u8; 8],
    },
    /// A packed weight in another version of its file format.
    #[error("packed weight: expected version {expected} of the file format, got {got}; pack it again")]
    PackedVersion {
        /// The version that is read.
        expected: u32,
        /// The version that came.
        got: u32,
    },
    /// A packed weight in a layout that has changed since.
    #[error(
        "packed weight: expected layout {class:?} of {format} with fingerprint {expected:016x}, got {got:016x}: another version of the library packed it; pack it again"
    )]
    PackedLayout {
        /// Name of the format.
        format: &'static str,
        /// The layout.
        class: FragmentLayout,
        /// Fingerprint of the layout as it is now.
        expected: u64,
        /// The fingerprint that came.
        got: u64,
    },
    /// Bytes are not those that were written.
    #[error("{what}: expected checksum {expected:016x}, got {got:016x}: the file is damaged")]
    Checksum {
        /// What was summed.
        what: String,
        /// The checksum that is stored.
        expected: u64,
        /// That of the bytes.
        got: u64,
    },
    /// A tensor that a quantized layer needs is not in the files that were opened.
    #[error(
        "tensor `{layer}` is {format}: expected {} beside it, got none{}", quoted(.tensors),
        .shard.as_ref().map(|shard| format!("; {}", in_shard(shard))).unwrap_or_default()
    )]
    MissingTensor {
        /// The layer.
        layer: String,
        /// Its format, and what says so.
        format: String,
        /// The tensors one of which it needs.
        tensors: Vec<String>,
        /// The file of the checkpoint that has one, by the index of shards.
        shard: Option<String>,
    },
    /// A tensor is in a shard that was not opened.
    #[error("tensor `{}` is not in the files that were opened; {}", printable(name), in_shard(shard))]
    InOtherShard {
        /// The tensor.
        name: String,
        /// The file of the checkpoint that has it, by the index of shards.
        shard: String,
    },
    /// A layer of experts has a gap in its numbers, or an expert lacks a weight that others have.
    #[error("`{}`: expert {expert} is missing, but there is `{}`", printable(name), printable(there))]
    MissingExpert {
        /// The name of the experts' weights, with `{}` for a number.
        name: String,
        /// The first that is missing.
        expert: usize,
        /// A tensor that tells that there is such an expert, or a later one.
        there: String,
    },
    /// No tensor of this name.
    #[error(
        "no tensor is called `{}`{}", printable(name),
        .near.as_ref().map(|n| format!("; did you mean `{}`?", printable(n))).unwrap_or_default()
    )]
    NoSuchTensor {
        /// The name asked for.
        name: String,
        /// The closest name there is.
        near: Option<String>,
    },
}

/// Names in a sentence.
fn quoted(names: &[String]) -> String {
    names.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(" or ")
}

/// Where the index of shards has a tensor, and what to do.
fn in_shard(shard: &str) -> String {
    format!("the index has it in {}: open the index, or the folder", printable(shard))
}

impl FormatError {
    /// The error of a layer of this format that needs one of `tensors`.
    pub(crate) fn missing(layer: &str, format: &str, tensors: impl IntoIterator<Item = String>) -> Self {
        let tensors = tensors.into_iter().map(|name| printable(&name)).collect();
        Self::MissingTensor { layer: printable(layer), format: printable(format), tensors, shard: None }
    }

    /// This error, naming the file that has the missing tensor.
    pub(crate) fn in_shard(self, shard: String) -> Self {
        match self {
            Self::MissingTensor { layer, format, tensors, .. } => {
                Self::MissingTensor { layer, format, tensors, shard: Some(shard) }
            }
            other => other,
        }
    }

    /// This error, naming `file`, whose contents it is about.
    pub(crate) fn in_file(self, file: &str) -> Self {
        match self {
            Self::BadFile { file: kind, what } => Self::BadFile { file: format!("{file}: {kind}"), what },
            Self::UnsupportedFile { file: kind, what } => {
                Self::UnsupportedFile { file: format!("{file}: {kind}"), what }
            }
            other => Self::BadFile { file: file.to_owned(), what: other.to_string() },
        }
    }
}
