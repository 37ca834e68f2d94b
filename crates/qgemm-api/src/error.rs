//! The error type of the crate.

use std::fmt;

use qgemm_formats::prepack::FragmentLayout;
use qgemm_formats::{DType, ElementType, Format, FormatError, XFormat};
use qgemm_hal::{DeviceId, DeviceKind, ExpertFault, HalError, KvFormat};
use qgemm_sched::{SchedError, TunedError};
use thiserror::Error;

/// Errors between a model file and a result.
#[derive(Error)]
#[non_exhaustive]
pub enum Error {
    /// A format, a weight's bytes or a model file is wrong.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// A device is missing, failed, or ran out of memory.
    #[error(transparent)]
    Hal(#[from] HalError),
    /// No kernel family serves the problem.
    #[error(transparent)]
    Plan(#[from] SchedError),
    /// Unknown device name.
    #[error("`{name}` is no device: expected auto, or one of {}", .kinds.join(", "))]
    UnknownDevice {
        /// The name.
        name: String,
        /// Kinds of devices in this build, such as `cuda:N`.
        kinds: Vec<String>,
    },
    /// The build has no backend for this device.
    #[error("device {kind}: this build has no {kind} backend; enable the feature `{feature}` of qgemm-api", kind = .kind.name())]
    BackendNotBuilt {
        /// Requested backend.
        kind: DeviceKind,
        /// Cargo feature that adds the backend.
        feature: &'static str,
    },
    /// A file cannot be opened or read.
    #[error("{}: cannot be read", .path.display())]
    Io {
        /// The path.
        path: std::path::PathBuf,
        /// Error of the operating system.
        source: std::io::Error,
    },
    /// A file does not hold a packed weight.
    #[error("{}: no packed weight", .path.display())]
    NotPacked {
        /// The path.
        path: std::path::PathBuf,
        /// Format error of the file.
        source: FormatError,
    },
    /// A dimension exceeds the 32-bit range of kernels.
    #[error("{name} = {got}: expected at most {limit}")]
    DimensionTooLarge {
        /// M, N, K, rows or columns.
        name: &'static str,
        /// Given size.
        got: usize,
        /// Maximum size.
        limit: usize,
    },
    /// Tokens of a step do not divide evenly among sequences.
    #[error("{batch} tokens of {sequences} sequences: expected the same number of tokens of each")]
    UnevenSequences {
        /// Tokens.
        batch: usize,
        /// Sequences.
        sequences: usize,
    },
    /// Part of a model that cannot be divided among ranks.
    #[error("{what} among {world} ranks: {why}")]
    Indivisible {
        /// The part, with its numbers.
        what: String,
        /// Number of ranks.
        world: usize,
        /// The requirement.
        why: String,
    },
    /// Collective of a context that is of no group.
    #[error("a collective needs a context with a communicator")]
    NoCommunicator,
    /// An operation does not support this size.
    #[error("{name} = {got}: expected {least} to {most}")]
    OutOfRange {
        /// Tokens, experts, experts of a token, or columns of D.
        name: &'static str,
        /// Minimum size.
        least: usize,
        /// Maximum size.
        most: usize,
        /// Given size.
        got: usize,
    },
    /// Invalid expert groups.
    #[error(
        "{chosen} of {groups} groups of experts: expected groups that divide the {experts} experts, and so many of them chosen that they hold {top_k}"
    )]
    ExpertGroups {
        /// Experts.
        experts: usize,
        /// Experts of a token.
        top_k: usize,
        /// Given groups.
        groups: usize,
        /// Groups that a token may use.
        chosen: usize,
    },
    /// Local experts that a routing has not.
    #[error("local experts {} to {}: expected one or more of the {experts} experts", .got.start, .got.end)]
    LocalExperts {
        /// Experts.
        experts: usize,
        /// Given ids, without the end.
        got: std::ops::Range<usize>,
    },
    /// A routing of given ids chooses no experts.
    #[error("a routing of given ids chooses no experts: expected logits with {what}")]
    RoutingOfIds {
        /// Setting of the choice of experts.
        what: &'static str,
    },
    /// A given id names no expert. It is the first in order of tokens
    /// and slots. No list has its slot.
    #[error("token {token}, slot {slot}: expected an expert from 0 to {}, got {id}", .experts - 1)]
    UnknownExpert {
        /// The token.
        token: usize,
        /// The slot of the token.
        slot: usize,
        /// The id.
        id: i32,
        /// Experts.
        experts: usize,
    },
    /// A row of logits has no token. It is the first such row.
    #[error("row {row}: {fault}")]
    NotSampled {
        /// The row.
        row: usize,
        /// Reason.
        fault: crate::sampling::SamplingFault,
    },
    /// An id of [`GatherRows`](crate::GatherRows) is outside the
    /// weight. It is the first in order of rows.
    #[error("row {row}: expected an id from 0 to {}, got {id}", .rows - 1)]
    UnknownRow {
        /// The row of the result.
        row: usize,
        /// The id.
        id: u32,
        /// Rows of the weight.
        rows: usize,
    },
    /// The first token with too few experts: logits, biases or groups
    /// of the others are NaN.
    #[error("token {token}: expected {expected} experts to choose, got {got} whose logits are numbers")]
    TooFewExperts {
        /// The token.
        token: usize,
        /// Experts of a token.
        expected: usize,
        /// Experts with logits that are numbers.
        got: usize,
    },
    /// Heads of queries do not divide evenly among KV heads.
    #[error("{heads} heads over {kv_heads} heads of keys: expected heads of keys that divide the heads")]
    HeadsNotShared {
        /// Heads of queries.
        heads: usize,
        /// KV heads.
        kv_heads: usize,
    },
    /// Unsupported head dimension.
    #[error("{name} = {got}: expected a multiple of {step} from {step} to {most}")]
    HeadDim {
        /// Head dimension of queries or values.
        name: &'static str,
        /// Divisor of supported head dimensions.
        step: usize,
        /// Maximum head dimension.
        most: usize,
        /// Given head dimension.
        got: usize,
    },
    /// Unsupported format of the indexer's queries and keys.
    #[error("the indexer has no queries and keys in {got}: expected one of {}", crate::indexer::format_names())]
    IndexerFormat {
        /// Given format.
        got: KvFormat,
    },
    /// Sequences have unequal numbers of queries.
    #[error("{queries} queries of {sequences} sequences: expected a multiple of the sequences")]
    QueriesNotShared {
        /// All queries.
        queries: usize,
        /// Sequences.
        sequences: usize,
    },
    /// A factor is not above 0.
    #[error("{name} = {got}: expected a number above 0")]
    NotPositive {
        /// Name of the factor.
        name: &'static str,
        /// Given factor.
        got: f32,
    },
    /// Heads of an output overlap.
    #[error(
        "{operand}: heads of {columns} features overlap with strides of {token_stride} a token and {head_stride} a head"
    )]
    OverlappingHeads {
        /// The operand.
        operand: &'static str,
        /// Token stride, in elements.
        token_stride: u64,
        /// Head stride, in elements.
        head_stride: u64,
        /// Features of a head.
        columns: usize,
    },
    /// A stride of keys or values leads into a scale block.
    #[error("{operand}: a stride of {got} elements: expected a multiple of {step}, the features that share a scale")]
    StrideInBlock {
        /// The operand.
        operand: &'static str,
        /// Features that share a scale.
        step: u64,
        /// Given stride.
        got: u64,
    },
    /// A row stride is shorter than a row.
    #[error("{operand}: a row stride of {got} elements is less than a row of {expected}")]
    StrideTooSmall {
        /// X, C, residual or D.
        operand: &'static str,
        /// Elements of a row.
        expected: u64,
        /// Given stride.
        got: u64,
    },
    /// Slots of recurrent states overlap, or are misaligned.
    #[error("states: a slot stride of {got} elements: expected a multiple of 4 that is at least {expected}")]
    SlotStride {
        /// Elements of a slot.
        expected: u64,
        /// Given stride.
        got: u64,
    },
    /// β as a time step without a decay that is made of one.
    #[error("beta as the time step: expected a decay a head of `Decay::softplus`")]
    NoTimeStep,
    /// The extent of an operand does not fit the address space.
    #[error("{operand}: {rows} rows with a stride of {row_stride} elements overflow the address space")]
    ExtentOverflow {
        /// X, C, residual or D.
        operand: &'static str,
        /// Rows.
        rows: u64,
        /// Row stride, in elements.
        row_stride: u64,
    },
    /// The extent of an operand's matrices does not fit the address space.
    #[error("{operand}: {batch} matrices with a stride of {batch_stride} elements overflow the address space")]
    BatchOverflow {
        /// A, B, C or D.
        operand: &'static str,
        /// Matrices.
        batch: usize,
        /// Matrix stride, in elements.
        batch_stride: u64,
    },
    /// Matrices of an output overlap.
    #[error(
        "{operand}: matrices {batch_stride} elements apart, with a row stride of {row_stride}, overlap: expected them behind one another, or side by side in longer rows"
    )]
    OverlappingMatrices {
        /// D.
        operand: &'static str,
        /// Matrix stride, in elements.
        batch_stride: u64,
        /// Row stride, in elements.
        row_stride: u64,
    },
    /// X of a run differs from the planned X.
    #[error("the plan reads X in {expected}, as the problem states rows, columns, sums and strides; got {got}")]
    WrongX {
        /// Planned format.
        expected: XFormat,
        /// Description of the given X.
        got: String,
    },
    /// This operation does not read X in the given format.
    #[error("X is stated in {got}, which this operation does not read: expected one of {}", names(.served))]
    XFormatNotServed {
        /// Given format.
        got: XFormat,
        /// Supported formats.
        served: &'static [XFormat],
    },
    /// The format has no codes and scales.
    #[error("quantizing to {got}: expected a format of codes and scales; `plan_conversion` writes plain numbers")]
    NotQuantized {
        /// Given format.
        got: XFormat,
    },
    /// A format of activations lacks a feature.
    #[error("`{what}` is unsupported for `{format}`")]
    NotOfXFormat {
        /// Requested feature.
        what: &'static str,
        /// The format.
        format: XFormat,
    },
    /// Kernels cannot write rows of codes, scales or sums at this
    /// stride.
    #[error("{operand}: expected rows a multiple of {multiple} bytes apart, at least {least}, got {got}")]
    PlaneStride {
        /// Codes, scales or sums.
        operand: &'static str,
        /// Divisor of supported strides.
        multiple: u64,
        /// Bytes of a row.
        least: u64,
        /// Given stride.
        got: u64,
    },
    /// A conversion or norm writes columns, but X has none.
    #[error("D has {d_columns} columns: expected none, as X has none")]
    NoColumns {
        /// Columns of D.
        d_columns: usize,
    },
    /// Row factors suit another result type.
    #[error("row factors are for results in {expected}, got {got}")]
    RowFactorsOf {
        /// Type with row factors.
        expected: DType,
        /// The type of the result.
        got: DType,
    },
    /// A rotary embedding rotates an odd number of features, or more
    /// than a head has.
    #[error(
        "a rotary embedding turns {got} features: expected an even number from 2 to {head_dim}, the features of a head"
    )]
    RotaryDim {
        /// Features of a head.
        head_dim: usize,
        /// Given features.
        got: usize,
    },
    /// A rotary parameter is invalid.
    #[error(
        "rotary embedding: {name} = {got}: expected a finite number above 0, a base of at least 1, and bounds in order"
    )]
    RotaryNumber {
        /// `base`, `factor`, `low`, `high`, `slow` or `fast`.
        name: &'static str,
        /// Given value.
        got: f64,
    },
    /// A factor is infinite or not a number.
    #[error("{name} = {got}: expected a finite number")]
    NonFiniteScalar {
        /// `alpha`, `beta`, `scale` or `eps`.
        name: &'static str,
        /// Given value.
        got: f32,
    },
    /// Epsilon of a norm is negative.
    #[error("eps = {got}: expected 0 or a positive number")]
    NegativeEps {
        /// Given epsilon.
        got: f32,
    },
    /// Normalized rows exceed the workspace limit.
    #[error(
        "a workspace of at most {limit} bytes was allowed, and the normalized rows take {expected}: allow more \
         (`Problem::max_workspace`), or normalize X before (`Context::plan_norm`)"
    )]
    NoRoomForNorm {
        /// Workspace bytes with the rows.
        expected: usize,
        /// Allowed bytes.
        limit: usize,
    },
    /// A step before or after a product has no backward pass.
    #[error("{what} has no backward pass here: {instead}")]
    NoBackward {
        /// Name of the step.
        what: &'static str,
        /// Alternative.
        instead: &'static str,
    },
    /// A product by parts of K needs matrices stored by rows of K.
    #[error(
        "parts of K are rows of A and B as stored: store A as [k, m] (`Matmul::a_transposed`) and B as [k, n] (without \
         `Matmul::b_transposed`)"
    )]
    KGroupedLayout,
    /// A product by groups of rows needs A stored by rows.
    #[error("groups of rows are rows of A as stored: store A as [m, k] (without `Matmul::a_transposed`)")]
    RowsGroupedLayout,
    /// Invalid product of operands with block scales.
    #[error("a product of factors in e4m3_1x128: {why}")]
    BlockScaledProduct {
        /// Requirement.
        why: &'static str,
    },
    /// An operand of plain numbers has a scale.
    #[error("{operand} is {dtype} and has a factor for all of it: only E4M3 has one, fold it into alpha")]
    ScaledPlainFactor {
        /// The operand.
        operand: &'static str,
        /// Its element type.
        dtype: DType,
    },
    /// A copy of the parameters has their type.
    #[error("a copy of the parameters in f32: expected f16 or bf16")]
    CopyInF32,
    /// An optimizer parameter is out of range.
    #[error("{name} = {got}: expected {expected}")]
    OptimizerNumber {
        /// `beta1`, `beta2`, `eps`, `momentum`, `rate`, `weight decay`, `gradient scale` or `step`.
        name: &'static str,
        /// Valid values.
        expected: &'static str,
        /// Given value.
        got: f64,
    },
    /// A norm cannot read this X.
    #[error("a norm reads rows of plain numbers, and not {what}: make one first (`Context::plan_conversion`)")]
    NormOf {
        /// Description of the given X.
        what: &'static str,
    },
    /// A norm cannot run in place as stated.
    #[error("in place: {what}: {why}")]
    InPlace {
        /// Output that cannot overwrite its input.
        what: &'static str,
        /// Reason, and alternative.
        why: &'static str,
    },
    /// A gated pair has no activation.
    #[error("a gated pair needs an activation: state it with `Problem::activation`, be it the identity")]
    MissingActivation,
    /// An activation of gated pairs in an operation without them.
    #[error("{activation} needs gate and up: {got} has one output; load a gated pair (`Context::load_gated`)")]
    ActivationOfPairs {
        /// The activation.
        activation: qgemm_hal::Activation,
        /// Stated operation or weight.
        got: &'static str,
    },
    /// Invalid number of an activation.
    #[error("{name} of {activation}: expected {expected}, got {got}")]
    ActivationNumber {
        /// The activation's name.
        activation: &'static str,
        /// `alpha`, `beta` or `limit`.
        name: &'static str,
        /// Valid values.
        expected: &'static str,
        /// Given value.
        got: f32,
    },
    /// A gated pair has a C.
    #[error("a gated pair takes no C: expected none (a residual is added to the product), got beta = {beta}")]
    GatedWithC {
        /// Factor of the given C.
        beta: f32,
    },
    /// Feature that products with separate segment outputs lack.
    #[error("fused weights: {what} is not served: {why}")]
    NotForFused {
        /// Stated feature.
        what: &'static str,
        /// Alternative.
        why: &'static str,
    },
    /// Outputs of a run differ in number from the weight's segments.
    #[error("{got} outputs came for a weight of {expected} segments: give one for each, in their order")]
    OutputsMismatch {
        /// Segments.
        expected: usize,
        /// Given outputs.
        got: usize,
    },
    /// Feature that products with experts lack.
    #[error("experts: {what} is not served: {why}")]
    NotForExperts {
        /// Requested feature.
        what: &'static str,
        /// Reason, and alternative.
        why: &'static str,
    },
    /// An expert index is wrong. Rows without a fault were computed.
    #[error("experts: {}", fault_text(*.fault, *.place, *.top_k))]
    BadExpertIndex {
        /// Kind of fault.
        fault: ExpertFault,
        /// Index of the first fault: a slot, an offset or a count.
        place: usize,
        /// Slots of a token, if any.
        top_k: Option<usize>,
    },
    /// A buffer is shorter than its shape and strides require.
    #[error("{operand}: expected at least {expected} bytes, got {got}")]
    BufferTooShort {
        /// X, C, bias, token scales, residual, D, workspace, column order or row factors.
        operand: &'static str,
        /// Bytes that the plan reads or writes.
        expected: usize,
        /// Given bytes.
        got: usize,
    },
    /// A buffer has another element type.
    #[error("{operand}: expected {expected}, got {got}")]
    WrongElementType {
        /// The operand.
        operand: &'static str,
        /// Element type of the plan.
        expected: ElementType,
        /// Element type of the buffer.
        got: ElementType,
    },
    /// Host values differ in number from the shape.
    #[error("{operand}: expected {expected} values, got {got}")]
    WrongLength {
        /// The argument.
        operand: &'static str,
        /// Values of the shape.
        expected: usize,
        /// Given values.
        got: usize,
    },
    /// Bytes of a view are no multiple of the value size.
    #[error("values: expected a multiple of {width} bytes, which a value has, got {bytes}")]
    PartOfAValue {
        /// Bytes of the view.
        bytes: usize,
        /// Bytes of a value.
        width: usize,
    },
    /// A view's address is misaligned for its element type or plan.
    #[error("{operand}: expected an address that is a multiple of {expected} bytes, got one of {got}")]
    Misaligned {
        /// X, C, bias, token scales, residual, D, column order or row factors.
        operand: &'static str,
        /// Planned alignment, in bytes.
        expected: usize,
        /// Given alignment, in bytes.
        got: usize,
    },
    /// A required operand is missing.
    #[error("{operand} is missing: {why}")]
    MissingOperand {
        /// C, bias, token scales, residual, workspace, column order or row factors.
        operand: &'static str,
        /// Reason for the operand.
        why: &'static str,
    },
    /// The plan does not use a given operand.
    #[error(
        "{operand} was passed to a plan that does not use it: state it in the problem, conversion, routing or norm first"
    )]
    UnexpectedOperand {
        /// C, bias, token scales, residual, column order or row factors.
        operand: &'static str,
    },
    /// An operand is on another device than the plan.
    #[error("{operand}: expected device {expected}, got {got}")]
    WrongDevice {
        /// The operand.
        operand: &'static str,
        /// Device of the context or plan.
        expected: DeviceId,
        /// Device of the operand.
        got: DeviceId,
    },
    /// The device's kernels do not read the layout of a packed
    /// weight.
    #[error("packed weight of {format}: expected layout {expected:?}, which {device} reads, got {got:?}")]
    WrongLayout {
        /// The format of the weight.
        format: Format,
        /// The device.
        device: DeviceId,
        /// Layout of the device.
        expected: FragmentLayout,
        /// Layout of the weight.
        got: FragmentLayout,
    },
    /// A weight differs from the plan's in shape, format or layout.
    #[error("weight: expected {expected}, got {got}")]
    WrongWeight {
        /// Planned weight.
        expected: String,
        /// Given weight.
        got: String,
    },
    /// Model plans do not support this architecture.
    #[error("architecture `{architecture}`: expected one of {}", .served.join(", "))]
    UnknownArchitecture {
        /// Architecture of the model; empty if it states none.
        architecture: String,
        /// Supported architectures.
        served: &'static [&'static str],
    },
    /// The architecture is known, but needs an operation that plans do not have.
    #[error("architecture `{architecture}`: needs {missing} (served: {})", .served.join(", "))]
    UnservedArchitecture {
        /// Architecture of the model.
        architecture: String,
        /// The missing operation.
        missing: &'static str,
        /// Supported architectures.
        served: &'static [&'static str],
    },
    /// A hyperparameter is missing.
    #[error("the model does not state `{name}`")]
    MissingSetting {
        /// Its key.
        name: String,
    },
    /// A hyperparameter has a value that is not supported.
    #[error("`{name}` is {got}: expected {expected}")]
    UnservedSetting {
        /// Its key.
        name: String,
        /// The value.
        got: String,
        /// Supported values.
        expected: String,
    },
    /// A tensor that the architecture does not have. Without it the results would be wrong.
    #[error("tensor `{tensor}`: architecture `{architecture}` has no such tensor")]
    UnexpectedTensor {
        /// Its name.
        tensor: String,
        /// The architecture.
        architecture: &'static str,
    },
    /// A tensor has another shape than the hyperparameters state.
    #[error("tensor `{tensor}`: expected shape {expected:?}, got {got:?}")]
    WrongShape {
        /// Its name.
        tensor: String,
        /// By the hyperparameters.
        expected: Vec<usize>,
        /// In the file.
        got: Vec<usize>,
    },
    /// A model lacks a part of its architecture.
    #[error("model: {what}")]
    IncompleteModel {
        /// Missing part, and expectation.
        what: String,
    },
    /// A budget leaves no candidate to measure.
    #[error("budget: within = {within}: expected a number of at least 1")]
    TuneBudget {
        /// Given factor.
        within: f64,
    },
    /// A file has no tuned configs.
    #[error(transparent)]
    Tuned(#[from] TunedError),
    /// A text is no plan file.
    #[error("no plan file")]
    BadPlanFile(#[source] serde_json::Error),
    /// First mismatch of a plan file.
    #[error("plan file: {at}: expected {expected}, got {got}; make the plan anew")]
    PlanMismatch {
        /// Location in the file.
        at: String,
        /// Value of this device, these kernels or this model.
        expected: String,
        /// Value of the file.
        got: String,
    },
    /// A plan file lacks an operation or a region.
    #[error("the plan has no {what} `{name}`")]
    NotInPlan {
        /// `operation`, `product` or `region`.
        what: &'static str,
        /// Given name.
        name: String,
    },
    /// The caller runs this step, such as a norm, attention or a
    /// backward pass.
    #[error("`{step}` is the caller's: the plan names what it reads and writes, and no operation of it")]
    CallersStep {
        /// The step.
        step: String,
    },
    /// A rotary embedding was given another number of factors than pairs.
    #[error("factors of rotary frequencies: expected {expected}, one a pair, got {got}")]
    RotaryFactors {
        /// Pairs.
        expected: usize,
        /// Given factors.
        got: usize,
    },
    /// An operation of a plan was run without one of its weights.
    #[error("{op}: no {what} was given: `OpWeights` holds what an operation needs beside its arena")]
    MissingWeight {
        /// Weight, weights of experts, or gamma.
        what: &'static str,
        /// The operation.
        op: String,
    },
    /// A region of a plan's arena was overrun.
    #[error("{op}: byte {byte} behind the {len} bytes of `{region}` was overwritten")]
    CanaryOverwritten {
        /// Operation before the check.
        op: String,
        /// The region.
        region: String,
        /// Its length.
        len: usize,
        /// First wrong byte, counted from the region's end.
        byte: usize,
    },
}

/// The message and, after colons, its sources, for `expect` and
/// `fn main() -> Result<(), Error>`.
impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)?;
        let mut source = std::error::Error::source(self);
        while let Some(error) = source {
            write!(f, ": {error}")?;
            source = error.source();
        }
        Ok(())
    }
}

/// Comma-separated names.
fn names(formats: &[XFormat]) -> String {
    formats.iter().map(|format| format.name()).collect::<Vec<_>>().join(", ")
}

/// Message of a fault in an index, with its location.
fn fault_text(fault: ExpertFault, place: usize, top_k: Option<usize>) -> String {
    let slot = match top_k {
        Some(top_k) => format!("token {}, slot {}", place / top_k, place % top_k),
        None => format!("place {place}"),
    };
    match fault {
        ExpertFault::Id => format!("the id of {slot} names no expert; its row was left out"),
        ExpertFault::Offset => {
            format!("the offset at place {place} is below the one before or beyond the rows")
        }
        ExpertFault::Count => {
            format!("the count of expert {place} is beyond the capacity; rows beyond it were left out")
        }
        ExpertFault::RouterWeight => format!("the router weight of {slot} is NaN; it was left out"),
    }
}
