//! Kernel parameter structs, defined once. `cargo xtask codegen` generates
//! CUDA and WGSL from them, with offset assertions. `codegen --check` fails
//! when the generated files are stale.

mod flags;

use bytemuck::{Pod, Zeroable};

use crate::op::experts::{ExpertFault, ExpertForm};
use crate::op::gemm::{Activation, ClampedSwiglu};

pub use flags::*;

/// A field of an ABI struct, for code generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AbiField {
    /// Name.
    pub name: &'static str,
    /// Rust type name: `u32`, `i32`, `f32` or `u64`.
    pub ty: &'static str,
    /// Byte offset.
    pub offset: usize,
    /// Description.
    pub doc: &'static str,
}

/// Field table of a struct.
#[derive(Clone, Copy, Debug)]
pub struct AbiStruct {
    /// Name, equal in every language.
    pub name: &'static str,
    /// Fields in order.
    pub fields: &'static [AbiField],
    /// Size in bytes.
    pub size: usize,
}

macro_rules! abi_struct {
    ($(#[doc = $doc:literal])* pub struct $name:ident { $($(#[doc = $fdoc:literal])+ pub $field:ident: $ty:ident,)* }) => {
        $(#[doc = $doc])*
        #[repr(C)]
        #[derive(Clone, Copy, Debug, Default, PartialEq, Pod, Zeroable)]
        pub struct $name { $($(#[doc = $fdoc])+ pub $field: $ty,)* }

        impl $name {
            /// Field table for code generation.
            pub const ABI: AbiStruct = AbiStruct {
                name: stringify!($name),
                fields: &[$(AbiField {
                    name: stringify!($field),
                    ty: stringify!($ty),
                    offset: std::mem::offset_of!($name, $field),
                    doc: concat!($($fdoc),+),
                },)*],
                size: std::mem::size_of::<$name>(),
            };
        }
    };
}

abi_struct! {
    /// Shape and scalars of one GEMM, for the
    /// kernels of every backend.
    pub struct GemmShape {
        /// Tokens.
        pub m: u32,
        /// Stored rows of W: the output features, or both weights of
        /// a gated pair interleaved by eights.
        pub stored_rows: u32,
        /// Input features.
        pub k: u32,
        /// Stored columns of W.
        pub stored_k: u32,
        /// Optional operands: `FLAG_` constants.
        pub flags: u32,
        /// Columns of D: the stored rows, or half of
        /// them for a gated pair.
        pub out_features: u32,
        /// Scale of the product.
        pub alpha: f32,
        /// Scale of C; beta of a clamped SwiGLU, whose pairs
        /// have no C.
        pub beta: f32,
    }
}

abi_struct! {
    /// [`GemmShape`] plus fields that only CUDA kernels read: K split,
    /// activation, element types (0 = f32, 1 = f16, 2 =
    /// bf16). wgpu kernels have these in one word, or derive them.
    /// Fields that kernels load together are adjacent.
    pub struct CudaGemmShape {
        /// Tokens.
        pub m: u32,
        /// Stored rows of W.
        pub stored_rows: u32,
        /// Input features.
        pub k: u32,
        /// Stored columns of W.
        pub stored_k: u32,
        /// Packed k-tiles of W along K.
        pub k_tiles: u32,
        /// CTAs that share the K of a tile (split-K).
        pub splits: u32,
        /// Optional operands: `FLAG_` constants.
        pub flags: u32,
        /// Activation: `ACTIVATION_` constants.
        pub activation: u32,
        /// Element type of D.
        pub d_dtype: u32,
        /// Element type of C.
        pub c_dtype: u32,
        /// Element type of the bias.
        pub bias_dtype: u32,
        /// Element type of X, for kernels that are
        /// not specialized for it.
        pub x_dtype: u32,
        /// Scale of the product.
        pub alpha: f32,
        /// Scale of C; beta of a clamped SwiGLU, whose pairs
        /// have no C.
        pub beta: f32,
        /// Columns of D.
        pub out_features: u32,
        /// Element type of the residual.
        pub residual_dtype: u32,
    }
}

abi_struct! {
    /// Device addresses and 64-bit strides (in elements)
    /// of one GEMM; CUDA only.
    pub struct GemmPointers {
        /// X.
        pub x: u64,
        /// W.
        pub w: u64,
        /// Row scales of W.
        pub row_scale: u64,
        /// Stored column → input feature.
        pub k_order: u64,
        /// C.
        pub c: u64,
        /// Bias; for a gated pair the gate's, then the up's.
        pub bias: u64,
        /// Token scales, f32.
        pub token_scale: u64,
        /// Residual.
        pub residual: u64,
        /// D.
        pub d: u64,
        /// Partial sums.
        pub partials: u64,
        /// Arrival counters of split tiles.
        pub counters: u64,
        /// Stride between rows of X, in elements.
        pub x_row: u64,
        /// Stride between columns of X, in elements.
        pub x_col: u64,
        /// Stride between rows of C, in elements; of a clamped SwiGLU
        /// the bits of alpha (lower half) and limit.
        pub c_row: u64,
        /// Stride between rows of D, in elements.
        pub d_row: u64,
        /// Stride between rows of the residual, in elements.
        pub residual_row: u64,
        /// Factor of each token's accumulators, f32.
        pub x_factor: u64,
    }
}

abi_struct! {
    /// Shape of one `convert`, for the kernels of every backend.
    pub struct ConvertShape {
        /// Rows of X and D.
        pub rows: u32,
        /// Columns of X.
        pub columns: u32,
        /// Columns of D.
        pub d_columns: u32,
        /// `FLAG_` constants: `K_ORDER`, `X_ALIGNED16`, `ROW_IN_SHARED`; on wgpu
        /// also `D_ALIGNED16` and `X_FACTOR`.
        pub flags: u32,
    }
}

abi_struct! {
    /// Device addresses and 64-bit strides (in elements) of
    /// one `convert`; CUDA only.
    pub struct ConvertPointers {
        /// X.
        pub x: u64,
        /// Column of D → column of X, one
        /// entry per column of D.
        pub order: u64,
        /// D.
        pub d: u64,
        /// Row factors of D, f32.
        pub row_factors: u64,
        /// Stride between rows of X, in elements.
        pub x_row: u64,
        /// Stride between columns of X, in elements.
        pub x_col: u64,
        /// Stride between rows of D, in elements.
        pub d_row: u64,
    }
}

abi_struct! {
    /// Sizes and options of one `routing`, for the
    /// kernels of every backend.
    pub struct RoutingShape {
        /// Tokens.
        pub tokens: u32,
        /// Experts; of kernels that make lists, those with a list.
        pub experts: u32,
        /// Experts of a token.
        pub top_k: u32,
        /// `FLAG_` constants: `BIAS`, `SIGMOID`, `SQRT_SOFTPLUS`,
        /// `RENORMALIZE`, `LISTS`, `COUNTS`, `GIVEN_IDS`.
        pub flags: u32,
        /// Groups of experts; 0 without groups.
        pub groups: u32,
        /// Groups that a token may use.
        pub chosen_groups: u32,
        /// Scale of the weights.
        pub scale: f32,
        /// Element type of the logits (0 = f32,
        /// 1 = f16, 2 = bf16).
        pub dtype: u32,
        /// Tokens of a chunk, which a CTA processes.
        pub chunk_tokens: u32,
        /// Chunks.
        pub chunks: u32,
        /// First local expert.
        pub first_local: u32,
        /// Local experts.
        pub local: u32,
    }
}

abi_struct! {
    /// Device addresses of one `routing` kernel, and the row stride of
    /// the logits in elements; CUDA only.
    pub struct RoutingPointers {
        /// The logits.
        pub logits: u64,
        /// Given ids.
        pub given_ids: u64,
        /// Bias of the scores.
        pub bias: u64,
        /// Output ids.
        pub ids: u64,
        /// Weights.
        pub weights: u64,
        /// Start of each expert's list.
        pub offsets: u64,
        /// Length of each expert's list.
        pub counts: u64,
        /// The lists.
        pub rows: u64,
        /// Code, token, slot and id of the first fault.
        pub status: u64,
        /// First faulty slot of every chunk, counts of
        /// every chunk, total counts.
        pub workspace: u64,
        /// Stride between rows of the logits, in elements.
        pub logits_row: u64,
    }
}

mod attention;
mod gather_rows;
mod indexer;
mod kv_append;
mod linear_attention;
mod matmul;
mod merge_attention;
mod norm;
mod optimizer;
mod quantize;
mod sampling;
mod short_conv;
mod unpack;

pub use attention::*;
pub use gather_rows::*;
pub use indexer::*;
pub use kv_append::*;
pub use linear_attention::*;
pub use matmul::*;
pub use merge_attention::*;
pub use norm::*;
pub use optimizer::*;
pub use quantize::*;
pub use sampling::*;
pub use short_conv::*;
pub use unpack::*;

abi_struct! {
    /// Rows of blocks to pack into the packed layout; CUDA only.
    pub struct RepackParams {
        /// Address of the first row's first block, a multiple of 16.
        /// The rows are padded to a multiple of 16 bytes.
        pub rows: u64,
        /// Address of the packed tiles.
        pub packed: u64,
        /// Rows.
        pub n: u32,
        /// Blocks of a row.
        pub blocks: u32,
        /// Packed k-tiles along K.
        pub k_tiles: u32,
        /// Unused, zero.
        pub reserved: u32,
    }
}

abi_struct! {
    /// Tile schedule of one GEMM with a persistent grid; CUDA only.
    /// The K of the first `cut_tiles` tiles is split into `cut_ctas`
    /// equal ranges; the other tiles are whole.
    pub struct TileSchedule {
        /// Tiles along N.
        pub n_tiles: u32,
        /// Tiles along M.
        pub m_tiles: u32,
        /// N tiles that are processed together, for all
        /// tokens, before the next group.
        pub swizzle_group: u32,
        /// Split tiles, the first in swizzle order.
        pub cut_tiles: u32,
        /// CTAs that share the split tiles, the first of the grid.
        pub cut_ctas: u32,
        /// Packed k-tiles between the points where a tile may be split.
        pub cut_k_tiles: u32,
    }
}

abi_struct! {
    /// Fused norm and output segments of a projection kernel; CUDA only.
    pub struct ProjectionOperands {
        /// Address of gamma, or 0.
        pub gamma: u64,
        /// Address of the second output.
        pub d1: u64,
        /// Its row stride, in elements.
        pub d1_row: u64,
        /// Address of the third output.
        pub d2: u64,
        /// Its row stride, in elements.
        pub d2_row: u64,
        /// Address of the fourth output.
        pub d3: u64,
        /// Its row stride, in elements.
        pub d3_row: u64,
        /// First features of outputs 2 to 4, 21 bits each, in
        /// tiles of 16; all bits set for an absent output.
        pub firsts: u64,
        /// Element types, four bits each, lowest first: gamma, outputs 2
        /// to 4. Bit 16: X is normalized. Bits 17 to 19:
        /// rows of outputs 2 to 4 are 16-byte aligned. Bit 20:
        /// X is f32, whatever type is multiplied.
        pub types: u32,
        /// Epsilon, added to the mean of squares.
        pub eps: f32,
    }
}

abi_struct! {
    /// Assignment of rows to experts in MoE GEMM; CUDA only.
    pub struct ExpertGroups {
        /// Address of the offsets, counts or ids.
        pub index: u64,
        /// Address of the offsets in the list.
        pub offsets: u64,
        /// Address of the lists of each expert's rows; 0 when rows
        /// are contiguous or found by ids.
        pub list: u64,
        /// Address of the router weights (NaN is a fault), or 0.
        pub router_weights: u64,
        /// Address of the two words of the fault status, or 0.
        pub status: u64,
        /// Bytes of W between experts.
        pub w_bytes: u64,
        /// Bytes of the bias between experts.
        pub bias_bytes: u64,
        /// Rows of W between experts.
        pub row_pitch: u32,
        /// Stored columns between the column orders of experts.
        pub k_order_len: u32,
        /// Experts.
        pub experts: u32,
        /// Assignment of rows to experts: `FORM_` constants.
        pub form: u32,
        /// Rows of all experts; with `FORM_MASKED` the capacity of each expert.
        pub rows: u32,
        /// Rows of D that share a row of X.
        pub x_sharers: u32,
    }
}

abi_struct! {
    /// Combine step of MoE GEMM; CUDA only.
    pub struct ExpertCombine {
        /// Address of the slots' products, f32.
        pub products: u64,
        /// Address of the slots' ids.
        pub index: u64,
        /// Address of the slots' weights.
        pub router_weights: u64,
        /// Address of the residual, or 0.
        pub residual: u64,
        /// Address of D.
        pub d: u64,
        /// Stride between rows of D, in elements.
        pub d_row: u64,
        /// Stride between rows of the residual, in elements.
        pub residual_row: u64,
        /// Rows of D.
        pub tokens: u32,
        /// Columns of D.
        pub features: u32,
        /// Slots of a token.
        pub top_k: u32,
        /// Experts.
        pub experts: u32,
        /// Element type of D.
        pub d_dtype: u32,
        /// Element type of the residual.
        pub residual_dtype: u32,
        /// `FLAG_` constants: `D_ALIGNED16`, `RESIDUAL_ALIGNED16`.
        pub flags: u32,
        /// Unused, zero.
        pub reserved: u32,
    }
}

/// Every activation with its name, for code generation: values of
/// [`CudaGemmShape::activation`].
pub const ACTIVATIONS: &[(&str, Activation)] = &[
    ("IDENTITY", Activation::Identity),
    ("RELU", Activation::Relu),
    ("SILU", Activation::Silu),
    ("GELU_TANH", Activation::GeluTanh),
    ("GELU_ERF", Activation::GeluErf),
    ("RELU_SQUARED", Activation::ReluSquared),
    ("CLAMPED_SWIGLU", Activation::ClampedSwiglu(ClampedSwiglu::silu(1.0))),
];

/// Number of an activation in kernels.
pub const fn activation_code(activation: Activation) -> u32 {
    match activation {
        Activation::Identity => 0,
        Activation::Relu => 1,
        Activation::Silu => 2,
        Activation::GeluTanh => 3,
        Activation::GeluErf => 4,
        Activation::ReluSquared => 5,
        Activation::ClampedSwiglu(_) => 6,
    }
}

/// Structs for the kernels of every backend. They have no
/// 64-bit fields, which WGSL lacks.
pub const SHARED_STRUCTS: &[AbiStruct] = &[
    GemmShape::ABI,
    ConvertShape::ABI,
    RoutingShape::ABI,
    MatmulShape::ABI,
    QuantizeShape::ABI,
    DequantizeShape::ABI,
    NormShape::ABI,
    OptimizerShape::ABI,
    SamplingShape::ABI,
    ShortConvShape::ABI,
    MergeAttentionShape::ABI,
];

/// All structs, for CUDA.
pub const STRUCTS: &[AbiStruct] = &[
    CudaGemmShape::ABI,
    GemmPointers::ABI,
    TileSchedule::ABI,
    ConvertShape::ABI,
    ConvertPointers::ABI,
    RoutingShape::ABI,
    RoutingPointers::ABI,
    MatmulShape::ABI,
    MatmulTypes::ABI,
    MatmulTiles::ABI,
    MatmulScales::ABI,
    MatmulPointers::ABI,
    UnpackShape::ABI,
    UnpackPointers::ABI,
    GatherRowsShape::ABI,
    GatherRowsPointers::ABI,
    SamplingShape::ABI,
    SamplingPointers::ABI,
    QuantizeShape::ABI,
    QuantizePointers::ABI,
    DequantizeShape::ABI,
    DequantizePointers::ABI,
    XPlanePointers::ABI,
    AttentionShape::ABI,
    AttentionPointers::ABI,
    AttentionBits::ABI,
    AttentionPlainKv::ABI,
    MergeAttentionShape::ABI,
    MergeAttentionPointers::ABI,
    LinearAttentionShape::ABI,
    LinearAttentionPointers::ABI,
    LinearAttentionChunks::ABI,
    NormShape::ABI,
    NormPointers::ABI,
    NormGatePointers::ABI,
    KvAppendPointers::ABI,
    ShortConvShape::ABI,
    ShortConvPointers::ABI,
    IndexerParams::ABI,
    OptimizerShape::ABI,
    OptimizerPointers::ABI,
    RepackParams::ABI,
    ProjectionOperands::ABI,
    ExpertGroups::ABI,
    ExpertCombine::ABI,
];

/// Number of an element type in kernels.
pub const fn dtype_code(dtype: qgemm_formats::DType) -> u32 {
    match dtype {
        qgemm_formats::DType::F32 => 0,
        qgemm_formats::DType::F16 => 1,
        qgemm_formats::DType::BF16 => 2,
    }
}

/// Expert forms and index faults with their names and
/// numbers, for code generation.
pub const EXPERT_CONSTANTS: &[(&str, u32)] = &[
    ("FORM_CONTIGUOUS", expert_form_code(ExpertForm::Contiguous)),
    ("FORM_MASKED", expert_form_code(ExpertForm::Masked { capacity: 1 })),
    ("FORM_INDEXED", expert_form_code(ExpertForm::Indexed { top_k: 1, x_per_slot: false })),
    ("FAULT_ID", ExpertFault::Id as u32),
    ("FAULT_OFFSET", ExpertFault::Offset as u32),
    ("FAULT_COUNT", ExpertFault::Count as u32),
    ("FAULT_ROUTER_WEIGHT", ExpertFault::RouterWeight as u32),
];

/// Number of an expert form in kernels.
pub const fn expert_form_code(form: ExpertForm) -> u32 {
    match form {
        ExpertForm::Contiguous => 0,
        ExpertForm::Masked { .. } => 1,
        ExpertForm::Indexed { .. } => 2,
    }
}
