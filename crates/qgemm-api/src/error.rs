//! The error type of the crate.

use std::fmt;

use qgemm_formats::prepack::FragmentLayout;
use qgemm_formats::{DType, ElementType, Format, FormatError, XFormat};
use qgemm_hal::{DeviceId, DeviceKind, ExpertFault, HalError, KvFormat};
use qgemm_sched::{SchedError, TunedError};
use thiserror::Error;

/// What can go wrong between a model file and a result.
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
    /// A text that names no device.
    #[error("`{name}` is no device: expected auto, or one of {}", .kinds.join(", "))]
    UnknownDevice {
        /// The text.
        name: String,
        /// Kinds of devices in this build, such as `cuda:N`.
        kinds: Vec<String>,
    },
    /// The backend of this device was left out when the crate was built.
    #[error("device {kind}: this build has no {kind} backend; enable the feature `{feature}` of qgemm-api", kind = .kind.name())]
    BackendNotBuilt {
        /// The backend asked for.
        kind: DeviceKind,
        /// The cargo feature that adds it.
        feature: &'static str,
    },
    /// A file cannot be opened or read.
    #[error("{}: cannot be read", .path.display())]
    Io {
        /// The path.
        path: std::path::PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A file does not hold a packed weight.
    #[error("{}: no packed weight", .path.display())]
    NotPacked {
        /// The path.
        path: std::path::PathBuf,
        /// What is wrong with it.
        source: FormatError,
    },
    /// A dimension exceeds what kernels count with (32 bits).
    #[error("{name} = {got}: expected at most {limit}")]
    DimensionTooLarge {
        /// M, N, K, rows or columns.
        name: &'static str,
        /// What came.
        got: usize,
        /// The largest possible.
        limit: usize,
    },
    /// Tokens of a step that are no equal parts of sequences.
    #[error("{batch} tokens of {sequences} sequences: expected the same number of tokens of each")]
    UnevenSequences {
        /// Tokens.
        batch: usize,
        /// Sequences.
        sequences: usize,
    },
    /// A size is not among those that an operation serves.
    #[error("{name} = {got}: expected {least} to {most}")]
    OutOfRange {
        /// Tokens, experts, experts of a token, or columns of D.
        name: &'static str,
        /// The smallest possible.
        least: usize,
        /// The largest possible.
        most: usize,
        /// What came.
        got: usize,
    },
    /// Experts cannot be grouped so.
    #[error(
        "{chosen} of {groups} groups of experts: expected groups that divide the {experts} experts, and so many of them chosen that they hold {top_k}"
    )]
    ExpertGroups {
        /// Experts.
        experts: usize,
        /// Experts of a token.
        top_k: usize,
        /// Groups that came.
        groups: usize,
        /// Groups that a token may use.
        chosen: usize,
    },
    /// Given ids are listed as they are.
    #[error("a routing of given ids chooses no experts: expected logits with {what}")]
    RoutingOfIds {
        /// What was stated of the choice.
        what: &'static str,
    },
    /// A given id is no expert's. It is the first in the order of tokens and slots; its slot is in no list.
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
    /// An id of [`GatherRows`](crate::GatherRows) is no row of the weight. It is the first in the order of rows.
    #[error("row {row}: expected an id from 0 to {}, got {id}", .rows - 1)]
    UnknownRow {
        /// The row of the result.
        row: usize,
        /// The id.
        id: u32,
        /// Rows of the weight.
        rows: usize,
    },
    /// A token, the first such one, has fewer experts than it should: the others' logits, biases or groups are NaN.
    #[error("token {token}: expected {expected} experts to choose, got {got} whose logits are numbers")]
    TooFewExperts {
        /// The token.
        token: usize,
        /// Experts of a token.
        expected: usize,
        /// Experts that it got.
        got: usize,
    },
    /// Heads of queries cannot share heads of keys evenly.
    #[error("{heads} heads over {kv_heads} heads of keys: expected heads of keys that divide the heads")]
    HeadsNotShared {
        /// Heads of queries.
        heads: usize,
        /// Heads of keys and values.
        kv_heads: usize,
    },
    /// Kernels do not serve heads of so many features.
    #[error("{name} = {got}: expected a multiple of {step} from {step} to {most}")]
    HeadDim {
        /// Of a query or a value.
        name: &'static str,
        /// What head dimensions are multiples of.
        step: usize,
        /// The largest.
        most: usize,
        /// What came.
        got: usize,
    },
    /// Queries and keys of the indexer have no such format.
    #[error("the indexer has no queries and keys in {got}: expected one of {}", crate::indexer::format_names())]
    IndexerFormat {
        /// What came.
        got: KvFormat,
    },
    /// Sequences do not have equally many queries.
    #[error("{queries} queries of {sequences} sequences: expected a multiple of the sequences")]
    QueriesNotShared {
        /// All queries.
        queries: usize,
        /// Sequences.
        sequences: usize,
    },
    /// A factor must be above 0.
    #[error("{name} = {got}: expected a number above 0")]
    NotPositive {
        /// Which one.
        name: &'static str,
        /// What came.
        got: f32,
    },
    /// Heads of an operand that is written share elements.
    #[error(
        "{operand}: heads of {columns} features overlap with strides of {token_stride} a token and {head_stride} a head"
    )]
    OverlappingHeads {
        /// The operand.
        operand: &'static str,
        /// Elements from one token to the next.
        token_stride: u64,
        /// Elements from one head to the next.
        head_stride: u64,
        /// Features of a head.
        columns: usize,
    },
    /// A stride of keys or values leads into a block that has one scale.
    #[error("{operand}: a stride of {got} elements: expected a multiple of {step}, the features that share a scale")]
    StrideInBlock {
        /// The operand.
        operand: &'static str,
        /// Features that share a scale.
        step: u64,
        /// The stride that came.
        got: u64,
    },
    /// A leading dimension is shorter than the row that it leads past.
    #[error("{operand}: a row stride of {got} elements is less than a row of {expected}")]
    StrideTooSmall {
        /// X, C, residual or D.
        operand: &'static str,
        /// Elements of a row.
        expected: u64,
        /// The stride that came.
        got: u64,
    },
    /// The extent of an operand does not fit the address space.
    #[error("{operand}: {rows} rows with a stride of {row_stride} elements overflow the address space")]
    ExtentOverflow {
        /// X, C, residual or D.
        operand: &'static str,
        /// Rows.
        rows: u64,
        /// Elements from one row to the next.
        row_stride: u64,
    },
    /// The extent of an operand's matrices does not fit the address space.
    #[error("{operand}: {batch} matrices with a stride of {batch_stride} elements overflow the address space")]
    BatchOverflow {
        /// A, B, C or D.
        operand: &'static str,
        /// Matrices.
        batch: usize,
        /// Elements from one matrix to the next.
        batch_stride: u64,
    },
    /// Matrices that are written overlap.
    #[error(
        "{operand}: matrices {batch_stride} elements apart, with a row stride of {row_stride}, overlap: expected them behind one another, or side by side in longer rows"
    )]
    OverlappingMatrices {
        /// D.
        operand: &'static str,
        /// Elements from one matrix to the next.
        batch_stride: u64,
        /// Elements from one row to the next.
        row_stride: u64,
    },
    /// The X of a run is not the one that was planned for.
    #[error("the plan reads X in {expected}, as the problem states rows, columns, sums and strides; got {got}")]
    WrongX {
        /// The format that was planned for.
        expected: XFormat,
        /// What came.
        got: String,
    },
    /// X is in a format that this operation does not read.
    #[error("X is stated in {got}, which this operation does not read: expected one of {}", names(.served))]
    XFormatNotServed {
        /// The format that came.
        got: XFormat,
        /// Those that plans read.
        served: &'static [XFormat],
    },
    /// Activations are quantized to a format of codes and scales.
    #[error("quantizing to {got}: expected a format of codes and scales; `plan_conversion` writes plain numbers")]
    NotQuantized {
        /// The format that came.
        got: XFormat,
    },
    /// What is asked of a format of activations is not to be had with it.
    #[error("{what} is not to be had with {format}")]
    NotOfXFormat {
        /// What was asked for.
        what: &'static str,
        /// The format.
        format: XFormat,
    },
    /// Rows of codes, scales or sums begin where kernels cannot write them.
    #[error("{operand}: expected rows a multiple of {multiple} bytes apart, at least {least}, got {got}")]
    PlaneStride {
        /// Codes, scales or sums.
        operand: &'static str,
        /// What strides are multiples of.
        multiple: u64,
        /// Bytes of a row.
        least: u64,
        /// The stride that came.
        got: u64,
    },
    /// A conversion or norm writes columns of a matrix that has none.
    #[error("D has {d_columns} columns: expected none, as X has none")]
    NoColumns {
        /// Columns of D.
        d_columns: usize,
    },
    /// Row factors bring values into the range of a type that the result has not.
    #[error("row factors are for results in {expected}, got {got}")]
    RowFactorsOf {
        /// The type that they are for.
        expected: DType,
        /// The type of the result.
        got: DType,
    },
    /// A rotary embedding turns no whole pairs, or more features than a head has.
    #[error(
        "a rotary embedding turns {got} features: expected an even number from 2 to {head_dim}, the features of a head"
    )]
    RotaryDim {
        /// Features of a head.
        head_dim: usize,
        /// What came.
        got: usize,
    },
    /// A number of a rotary embedding is none to compute frequencies with.
    #[error(
        "rotary embedding: {name} = {got}: expected a finite number above 0, a base of at least 1, and bounds in order"
    )]
    RotaryNumber {
        /// `base`, `factor`, `low`, `high`, `slow` or `fast`.
        name: &'static str,
        /// What came.
        got: f64,
    },
    /// A factor is infinite or not a number.
    #[error("{name} = {got}: expected a finite number")]
    NonFiniteScalar {
        /// `alpha`, `beta`, `scale` or `eps`.
        name: &'static str,
        /// What came.
        got: f32,
    },
    /// What is added to the mean of squares is negative.
    #[error("eps = {got}: expected 0 or a positive number")]
    NegativeEps {
        /// What came.
        got: f32,
    },
    /// Normalized rows, which a product reads from its workspace, take more than the problem allows.
    #[error(
        "a workspace of at most {limit} bytes was allowed, and the normalized rows take {expected}: allow more \
         (`Problem::max_workspace`), or normalize X before (`Context::plan_norm`)"
    )]
    NoRoomForNorm {
        /// Bytes that they end at.
        expected: usize,
        /// Bytes that were allowed.
        limit: usize,
    },
    /// Something before or after a product has no backward pass here.
    #[error("{what} has no backward pass here: {instead}")]
    NoBackward {
        /// What it is.
        what: &'static str,
        /// What to do.
        instead: &'static str,
    },
    /// The products of parts of K are of matrices that are not stored by rows of K.
    #[error(
        "parts of K are rows of A and B as stored: store A as [k, m] (`Matmul::a_transposed`) and B as [k, n] (without \
         `Matmul::b_transposed`)"
    )]
    KGroupedLayout,
    /// The products of groups of rows are of an A that is not stored by rows.
    #[error("groups of rows are rows of A as stored: store A as [m, k] (without `Matmul::a_transposed`)")]
    RowsGroupedLayout,
    /// A product of factors whose blocks have scales is not of the form that such products have.
    #[error("a product of factors in e4m3_1x128: {why}")]
    BlockScaledProduct {
        /// What it must be.
        why: &'static str,
    },
    /// A factor of plain numbers has a factor of its own.
    #[error("{operand} is {dtype} and has a factor for all of it: only E4M3 has one, fold it into alpha")]
    ScaledPlainFactor {
        /// The factor.
        operand: &'static str,
        /// Its element type.
        dtype: DType,
    },
    /// A copy of parameters would be what they are.
    #[error("a copy of the parameters in f32: expected f16 or bf16")]
    CopyInF32,
    /// A number of an optimizer is outside of its range.
    #[error("{name} = {got}: expected {expected}")]
    OptimizerNumber {
        /// `beta1`, `beta2`, `eps`, `momentum`, `rate`, `weight decay`, `gradient scale` or `step`.
        name: &'static str,
        /// What it may be.
        expected: &'static str,
        /// What came.
        got: f64,
    },
    /// X is to be normalized, and its rows do not lie as norms read them.
    #[error("a norm reads rows of plain numbers, and not {what}: make one first (`Context::plan_conversion`)")]
    NormOf {
        /// The X that came.
        what: &'static str,
    },
    /// Something of a norm cannot take the place that was stated.
    #[error("in place: {what}: {why}")]
    InPlace {
        /// What was to take a place.
        what: &'static str,
        /// Why it cannot, and what to do.
        why: &'static str,
    },
    /// The problem of a gated pair does not say what is applied to the gate.
    #[error("a gated pair needs an activation: state it with `Problem::activation`, be it the identity")]
    MissingActivation,
    /// The problem of a gated pair adds a C, which would have to be two.
    #[error("a gated pair takes no C: expected none (a residual is added to the product), got beta = {beta}")]
    GatedWithC {
        /// Factor of the C that came.
        beta: f32,
    },
    /// Something of a product that products with outputs of their own for each segment do not have.
    #[error("fused weights: {what} is not served: {why}")]
    NotForFused {
        /// What was stated.
        what: &'static str,
        /// What to do.
        why: &'static str,
    },
    /// A run of a fused weight has another number of outputs than the weight has segments.
    #[error("{got} outputs came for a weight of {expected} segments: give one for each, in their order")]
    OutputsMismatch {
        /// Segments.
        expected: usize,
        /// Outputs that came.
        got: usize,
    },
    /// Something of a dense product that products with experts do not have.
    #[error("experts: {what} is not served: {why}")]
    NotForExperts {
        /// What was asked for.
        what: &'static str,
        /// Why it cannot be, and what to do.
        why: &'static str,
    },
    /// An index that a run with experts was given is wrong; rows that it does not concern were computed.
    #[error("experts: {}", fault_text(*.fault, *.place, *.top_k))]
    BadExpertIndex {
        /// What is wrong.
        fault: ExpertFault,
        /// Where it is first: the slot, or the place in the offsets or counts.
        place: usize,
        /// Slots of a token, where there are any.
        top_k: Option<usize>,
    },
    /// A buffer is shorter than shape and strides ask for.
    #[error("{operand}: expected at least {expected} bytes, got {got}")]
    BufferTooShort {
        /// X, C, bias, token scales, residual, D, workspace, column order or row factors.
        operand: &'static str,
        /// Bytes that the plan reads or writes.
        expected: usize,
        /// Bytes that came.
        got: usize,
    },
    /// Memory that is known to hold elements of one type was passed for elements of another one.
    #[error("{operand}: expected {expected}, got {got}")]
    WrongElementType {
        /// Which operand.
        operand: &'static str,
        /// The element type that the plan reads or writes.
        expected: ElementType,
        /// The element type that the buffer was made with.
        got: ElementType,
    },
    /// Host values are not as many as the shape asks for.
    #[error("{operand}: expected {expected} values, got {got}")]
    WrongLength {
        /// Which argument.
        operand: &'static str,
        /// Values that the shape asks for.
        expected: usize,
        /// Values that came.
        got: usize,
    },
    /// Bytes are asked for as values of which they are no whole number.
    #[error("values: expected a multiple of {width} bytes, which a value has, got {bytes}")]
    PartOfAValue {
        /// Bytes of the view.
        bytes: usize,
        /// Bytes of a value.
        width: usize,
    },
    /// A view begins at an address that its element type or its plan does not allow.
    #[error("{operand}: expected an address that is a multiple of {expected} bytes, got one of {got}")]
    Misaligned {
        /// X, C, bias, token scales, residual, D, column order or row factors.
        operand: &'static str,
        /// The alignment that the plan was made for, in bytes.
        expected: usize,
        /// The alignment of what came, in bytes.
        got: usize,
    },
    /// The plan uses an operand that was not passed.
    #[error("{operand} is missing: {why}")]
    MissingOperand {
        /// C, bias, token scales, residual, workspace, column order or row factors.
        operand: &'static str,
        /// What makes it necessary.
        why: &'static str,
    },
    /// An operand was passed that the plan would not use.
    #[error(
        "{operand} was passed to a plan that does not use it: state it in the problem, conversion, routing or norm first"
    )]
    UnexpectedOperand {
        /// C, bias, token scales, residual, column order or row factors.
        operand: &'static str,
    },
    /// An operand lives on another device than the plan.
    #[error("{operand}: expected device {expected}, got {got}")]
    WrongDevice {
        /// Which operand.
        operand: &'static str,
        /// The device of the context or plan.
        expected: DeviceId,
        /// The device that came.
        got: DeviceId,
    },
    /// A packed weight in a layout that the device's kernels do not read.
    #[error("packed weight of {format}: expected layout {expected:?}, which {device} reads, got {got:?}")]
    WrongLayout {
        /// The format of the weight.
        format: Format,
        /// The device.
        device: DeviceId,
        /// The layout that it reads.
        expected: FragmentLayout,
        /// The layout that came.
        got: FragmentLayout,
    },
    /// A weight of another shape, format or layout than the plan was made for.
    #[error("weight: expected {expected}, got {got}")]
    WrongWeight {
        /// The weight that the plan was made for.
        expected: String,
        /// The weight that came.
        got: String,
    },
    /// Plans of whole models are made for some architectures.
    #[error("architecture `{architecture}`: expected one of {}", .served.join(", "))]
    UnknownArchitecture {
        /// The architecture that the model states; empty where it states none.
        architecture: String,
        /// Those that are served.
        served: &'static [&'static str],
    },
    /// A model lacks something that its architecture has.
    #[error("model: {what}")]
    IncompleteModel {
        /// What is missing, and what was expected.
        what: String,
    },
    /// A budget leaves no candidate to measure.
    #[error("budget: within = {within}: expected a number of at least 1")]
    TuneBudget {
        /// The factor that came.
        within: f64,
    },
    /// A file with measured configurations is something else.
    #[error(transparent)]
    Tuned(#[from] TunedError),
    /// Text that is no plan file.
    #[error("no plan file")]
    BadPlanFile(#[source] serde_json::Error),
    /// A plan file that does not fit. It is the first mismatch.
    #[error("plan file: {at}: expected {expected}, got {got}; make the plan anew")]
    PlanMismatch {
        /// Where in the file.
        at: String,
        /// What this device, these kernels or this model have.
        expected: String,
        /// What the file has.
        got: String,
    },
    /// A plan file has no such operation, or no such region.
    #[error("the plan has no {what} `{name}`")]
    NotInPlan {
        /// `operation`, `product` or `region`.
        what: &'static str,
        /// The name that came.
        name: String,
    },
    /// A step that a plan leaves to the caller, such as a norm, attention, or the backward pass of either, was to be run.
    #[error("`{step}` is the caller's: the plan names what it reads and writes, and no operation of it")]
    CallersStep {
        /// The step.
        step: String,
    },
    /// Something wrote beyond the end of a region of a plan's arena.
    #[error("{op}: byte {byte} behind the {len} bytes of `{region}` was overwritten")]
    CanaryOverwritten {
        /// The operation after which it was found.
        op: String,
        /// The region.
        region: String,
        /// Its length.
        len: usize,
        /// The first byte behind it that is wrong, counted from its end.
        byte: usize,
    },
}

/// The message, so that `fn main() -> Result<(), Error>` and `expect` print it; sources follow after a colon.
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

/// Names in a list for people.
fn names(formats: &[XFormat]) -> String {
    formats.iter().map(|format| format.name()).collect::<Vec<_>>().join(", ")
}

/// What is wrong with an index, and where, as a sentence.
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
