//! Error type of the crate.

use thiserror::Error;

use crate::model::printable;
use crate::prepack::FragmentLayout;

/// Errors in a format name, a weight's bytes or a model file.
#[derive(Debug, Error, Clone, PartialEq)]
#[non_exhaustive]
pub enum FormatError {
    /// Unknown weight format.
    #[error("no weight format is called `{name}`; {}", .near.as_ref().map_or("`qgemm devices --json` and `Format::all()` list them".into(), |n| format!("did you mean `{n}`?")))]
    UnknownFormat {
        /// Requested name.
        name: String,
        /// Closest known name.
        near: Option<String>,
    },
    /// Unknown recipe.
    #[error("no recipe is called `{name}`{}: expected one of {}", .near.as_ref().map_or(String::new(), |n| format!(" (did you mean `{n}`?)")), crate::Recipe::all().map(crate::Recipe::name).collect::<Vec<_>>().join(", "))]
    UnknownRecipe {
        /// Requested name.
        name: String,
        /// Closest known name.
        near: Option<String>,
    },
    /// Recipe that gives poor results without an importance matrix.
    #[error("tensor `{tensor}`: the recipe {recipe} needs an importance matrix (`--imatrix`)")]
    NeedsImportance {
        /// Name of the recipe.
        recipe: &'static str,
        /// First tensor that needs it.
        tensor: String,
    },
    /// Unknown X format.
    #[error("no format of activations is called `{name}`: expected one of {}", crate::XFormat::ALL.map(crate::XFormat::name).join(", "))]
    UnknownXFormat {
        /// Requested name.
        name: String,
    },
    /// Unknown element type.
    #[error("no element type is called `{name}`: expected f32, f16 or bf16")]
    UnknownDType {
        /// Requested name.
        name: String,
    },
    /// K is no multiple of the block length.
    #[error("{format} stores K in blocks of {block}, and K = {k} is no multiple of it")]
    KNotMultiple {
        /// Format name.
        format: &'static str,
        /// Block length.
        block: usize,
        /// K as given.
        k: usize,
    },
    /// Dimension of zero.
    #[error("{name} is 0: a weight has at least one row and one column")]
    ZeroDimension {
        /// Dimension name.
        name: &'static str,
    },
    /// Byte count that does not match the shape.
    #[error("{what}: expected {expected} bytes, got {got}")]
    WrongLength {
        /// Subject of the measurement.
        what: String,
        /// Bytes by shape and format.
        expected: usize,
        /// Bytes as given.
        got: usize,
    },
    /// Product of dimensions that overflows the address space.
    #[error("{what}: {dims:?} overflows the address space")]
    Overflow {
        /// Subject of the measurement.
        what: String,
        /// Dimensions.
        dims: Vec<u64>,
    },
    /// Scale that is NaN or infinite.
    #[error("{what}: scale at row {row}, block {block} is not finite")]
    NonFiniteScale {
        /// Tensor name.
        what: String,
        /// Output feature.
        row: usize,
        /// Block index within the row.
        block: usize,
    },
    /// Zero point out of range.
    #[error(
        "{format} weight: zero point at row {row}, block {block}: expected at most {largest} (the largest code + 1), got {got}"
    )]
    ZeroPoint {
        /// Format name.
        format: &'static str,
        /// Output feature.
        row: usize,
        /// Block index within the row.
        block: usize,
        /// Largest allowed zero point.
        largest: u8,
        /// Zero point as given.
        got: u8,
    },
    /// Scale that is no power of two, where E8M0 or the settings require one.
    #[error(
        "tensor `{tensor}`: scale {index}: expected a power of two from 2^-127 to 2^127 (UE8M0), got {value:e}; requantize the checkpoint, or correct its `scale_fmt`"
    )]
    ScaleNotPowerOfTwo {
        /// Tensor of scales.
        tensor: String,
        /// Index of the scale, in file order.
        index: usize,
        /// Value of the scale.
        value: f32,
    },
    /// Gate and up weights that cannot be interleaved.
    #[error("gated pair: gate and up differ in {what}: {gate} and {up}")]
    PairMismatch {
        /// Property that differs: `format`, `N`, `K`, `stored columns`, `column order` or
        /// `number of experts`.
        what: &'static str,
        /// Value of the gate.
        gate: String,
        /// Value of the up projection.
        up: String,
    },
    /// Weights that cannot be concatenated along N.
    #[error("concatenated weights: expected {what} {first} as in weight 1, got {got} in weight {number}")]
    PartMismatch {
        /// Property that differs: `format`, `K`, `stored columns` or `column order`.
        what: &'static str,
        /// Position of the differing weight, from 1.
        number: usize,
        /// Value of the first weight.
        first: String,
        /// Value of the differing weight.
        got: String,
    },
    /// Concatenation inside a row group that shares scales: a weight must end at
    /// a multiple of that group.
    #[error(
        "concatenated weights: {format} shares scales among {rows} rows: expected a multiple of {rows} rows in all weights but the last, got {n} in weight {number}"
    )]
    PartEndsInScale {
        /// Format name.
        format: &'static str,
        /// Position of the weight, from 1.
        number: usize,
        /// Rows of the weight.
        n: usize,
        /// Packed rows that share a scale.
        rows: usize,
    },
    /// Empty list of weights.
    #[error("concatenated weights: expected at least one weight, got none")]
    NoParts,
    /// Column order with an entry that is out of range or a duplicate.
    #[error("column order: entry {at} is {column}: {}", if *.column as usize >= *.k { format!("expected less than K = {k}") } else { "expected no duplicate".into() })]
    ColumnOrder {
        /// Index of the entry.
        at: usize,
        /// Value of the entry.
        column: u32,
        /// Input features.
        k: usize,
    },
    /// K beyond the 32-bit entries of a column order.
    #[error("column order: K = {k} exceeds the {} columns that 32-bit entries can name", crate::NO_COLUMN)]
    TooManyColumns {
        /// Input features.
        k: usize,
    },
    /// Layer with zero experts.
    #[error("a layer of experts has at least one expert")]
    NoExperts,
    /// Expert whose weight differs from that of expert 0.
    #[error("expert {expert}: expected {expected} like expert 0, got {got}")]
    ExpertMismatch {
        /// Expert id.
        expert: usize,
        /// Format and size of expert 0.
        expected: String,
        /// Format and size of this expert.
        got: String,
    },
    /// Stacked weight whose rows are no multiple of the number of experts.
    #[error("{rows} rows cannot be split evenly among {experts} experts")]
    UnevenExperts {
        /// Rows of the weight.
        rows: usize,
        /// Number of experts.
        experts: usize,
    },
    /// Shard that a weight has not.
    #[error(
        "rank {rank} of {world}: expected a rank below the number of ranks and at least one unit each, got {units} {what}"
    )]
    NoShard {
        /// Units that are cut, such as rows or experts.
        what: &'static str,
        /// Number of units.
        units: usize,
        /// The rank.
        rank: usize,
        /// Number of ranks.
        world: usize,
    },
    /// Cut within what must stay together.
    #[error("{of} shares scales among {what}: expected whole runs that start at a multiple of {unit}, got one at {at}")]
    ShardBorder {
        /// Units that are cut.
        what: &'static str,
        /// Format name.
        of: &'static str,
        /// Start of the cut.
        at: usize,
        /// Length of a run.
        unit: usize,
    },
    /// Part of a weight that cannot be cut out.
    #[error("{what} {}..{} of {len}: expected a range whose borders are multiples of {unit}", .range.start, .range.end)]
    NoRange {
        /// Rows or columns.
        what: &'static str,
        /// The range.
        range: std::ops::Range<usize>,
        /// Rows or columns of the weight.
        len: usize,
        /// Length of what stays together.
        unit: usize,
    },
    /// Row that a weight has not.
    #[error("row {row}: expected a row below {n}")]
    NoRow {
        /// The row.
        row: usize,
        /// Rows of the weight.
        n: usize,
    },
    /// Format without a quantizer from plain values.
    #[error("weights cannot be quantized to {format}: {why}")]
    NotQuantizable {
        /// Format name.
        format: &'static str,
        /// The reason.
        why: &'static str,
    },
    /// Malformed model file.
    #[error("{file}: {what}")]
    BadFile {
        /// Kind or path of the file.
        file: String,
        /// Expected and actual contents.
        what: String,
    },
    /// Model file with an unsupported feature.
    #[error("{file}: {what}")]
    UnsupportedFile {
        /// Kind or path of the file.
        file: String,
        /// Unsupported feature, and an alternative.
        what: String,
    },
    /// Model file that could not be written.
    #[error("{file}: writing failed: {why}")]
    WriteFailed {
        /// Kind or path of the file.
        file: String,
        /// Message of the operating system.
        why: String,
    },
    /// File that is no packed weight.
    #[error("packed weight: expected a file that begins with \"qgemm-pw\", got \"{}\"", .got.escape_ascii())]
    NotPacked {
        /// First bytes of the file.
        got: [u8; 8],
    },
    /// Packed weight of another file version.
    #[error("packed weight: expected version {expected} of the file format, got {got}; pack it again")]
    PackedVersion {
        /// Supported version.
        expected: u32,
        /// Version of the file.
        got: u32,
    },
    /// Packed weight of an outdated layout.
    #[error(
        "packed weight: expected layout {class:?} of {format} with fingerprint {expected:016x}, got {got:016x}: another version of the library packed it; pack it again"
    )]
    PackedLayout {
        /// Format name.
        format: &'static str,
        /// Layout class.
        class: FragmentLayout,
        /// Current fingerprint of the layout.
        expected: u64,
        /// Fingerprint in the file.
        got: u64,
    },
    /// Checksum mismatch.
    #[error("{what}: expected checksum {expected:016x}, got {got:016x}: the file is damaged")]
    Checksum {
        /// Subject of the checksum.
        what: String,
        /// Stored checksum.
        expected: u64,
        /// Computed checksum.
        got: u64,
    },
    /// Missing tensor of a quantized layer.
    #[error(
        "tensor `{layer}` is {format}: expected {} beside it, got none{}", quoted(.tensors),
        .shard.as_ref().map(|shard| format!("; {}", in_shard(shard))).unwrap_or_default()
    )]
    MissingTensor {
        /// Layer name.
        layer: String,
        /// Format, and the setting or tensor that implies it.
        format: String,
        /// Tensors of which one is required.
        tensors: Vec<String>,
        /// Unopened shard with one of them, by the shard index.
        shard: Option<String>,
    },
    /// Tensor in an unopened shard.
    #[error("tensor `{}` is not in the files that were opened; {}", printable(name), in_shard(shard))]
    InOtherShard {
        /// Tensor name.
        name: String,
        /// File of the shard, by the shard index.
        shard: String,
    },
    /// Expert that is missing, or lacks a weight that other experts have.
    #[error("`{}`: expert {expert} is missing, but there is `{}`", printable(name), printable(there))]
    MissingExpert {
        /// Name pattern of the experts' weights, with `{}` for the id.
        name: String,
        /// First missing expert.
        expert: usize,
        /// Tensor that proves a later expert or another weight of this one.
        there: String,
    },
    /// Unknown tensor name.
    #[error(
        "no tensor is called `{}`{}", printable(name),
        .near.as_ref().map(|n| format!("; did you mean `{}`?", printable(n))).unwrap_or_default()
    )]
    NoSuchTensor {
        /// Requested name.
        name: String,
        /// Closest known name.
        near: Option<String>,
    },
}

/// Quoted list of names.
fn quoted(names: &[String]) -> String {
    names.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(" or ")
}

/// Hint: the shard of the tensor, and the remedy.
fn in_shard(shard: &str) -> String {
    format!("the index has it in {}: open the index, or the folder", printable(shard))
}

impl FormatError {
    /// Error of a layer that needs one of `tensors`.
    pub(crate) fn missing(layer: &str, format: &str, tensors: impl IntoIterator<Item = String>) -> Self {
        let tensors = tensors.into_iter().map(|name| printable(&name)).collect();
        Self::MissingTensor { layer: printable(layer), format: printable(format), tensors, shard: None }
    }

    /// Adds the shard that has the missing tensor.
    pub(crate) fn in_shard(self, shard: String) -> Self {
        match self {
            Self::MissingTensor { layer, format, tensors, .. } => {
                Self::MissingTensor { layer, format, tensors, shard: Some(shard) }
            }
            other => other,
        }
    }

    /// Adds the name of the file.
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
