//! The parameter structs that kernels receive, defined once. `cargo xtask codegen` prints them as CUDA and
//! WGSL with offset assertions; `codegen --check` fails when the printed files are stale.

use bytemuck::{Pod, Zeroable};

/// A field of an ABI struct, as the generators see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AbiField {
    /// Name.
    pub name: &'static str,
    /// Rust type name: `u32`, `i32`, `f32` or `u64`.
    pub ty: &'static str,
    /// Byte offset.
    pub offset: usize,
    /// What it holds.
    pub doc: &'static str,
}

/// The table of a struct.
#[derive(Clone, Copy, Debug)]
pub struct AbiStruct {
    /// Name, the same in every language.
    pub name: &'static str,
    /// Fields in order.
    pub fields: &'static [AbiField],
    /// Size in bytes.
    pub size: usize,
}

impl AbiStruct {
    /// Whether WGSL can express it (no 64-bit fields).
    pub fn is_portable(&self) -> bool {
        self.fields.iter().all(|f| f.ty != "u64")
    }
}

macro_rules! abi_struct {
    ($(#[doc = $doc:literal])* pub struct $name:ident { $($(#[doc = $fdoc:literal])+ pub $field:ident: $ty:ident,)* }) => {
        $(#[doc = $doc])*
        #[repr(C)]
        #[derive(Clone, Copy, Debug, Default, PartialEq, Pod, Zeroable)]
        pub struct $name { $($(#[doc = $fdoc])+ pub $field: $ty,)* }

        impl $name {
            /// The field table that generators print.
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
    /// Shape, partition and scalars of one GEMM: the part that every backend's kernels share.
    pub struct GemmShape {
        /// Tokens.
        pub m: u32,
        /// Output features.
        pub n: u32,
        /// Input features.
        pub k: u32,
        /// Stored columns of W.
        pub stored_k: u32,
        /// Slabs of W along K.
        pub k_slabs: u32,
        /// Blocks that share one tile's K dimension.
        pub splits: u32,
        /// Optional operands: see the `FLAG_` constants.
        pub flags: u32,
        /// Function applied last: 0 = identity.
        pub activation: u32,
        /// Element type of D: 0 = f32, 1 = f16, 2 = bf16.
        pub d_dtype: u32,
        /// Element type of C.
        pub c_dtype: u32,
        /// Element type of the bias.
        pub bias_dtype: u32,
        /// Element type of X, for kernels not specialised on it.
        pub x_dtype: u32,
        /// Factor of the product.
        pub alpha: f32,
        /// Factor of C.
        pub beta: f32,
        /// Unused, zero.
        pub reserved0: u32,
        /// Unused, zero.
        pub reserved1: u32,
    }
}

abi_struct! {
    /// Device addresses and 64-bit strides (in elements) of one GEMM: CUDA only.
    pub struct GemmPointers {
        /// X.
        pub x: u64,
        /// W.
        pub w: u64,
        /// Row factors of W.
        pub row_scale: u64,
        /// Stored column → input feature.
        pub k_order: u64,
        /// C.
        pub c: u64,
        /// Bias.
        pub bias: u64,
        /// D.
        pub d: u64,
        /// Partial sums.
        pub partials: u64,
        /// Arrival counters of split tiles.
        pub counters: u64,
        /// Elements from one row of X to the next.
        pub x_row: u64,
        /// Elements from one column of X to the next.
        pub x_col: u64,
        /// Elements from one row of C to the next.
        pub c_row: u64,
        /// Elements from one row of D to the next.
        pub d_row: u64,
        /// Unused, zero.
        pub reserved: u64,
    }
}

/// [`GemmShape::flags`]: W has row factors.
pub const FLAG_ROW_SCALE: u32 = 1;
/// [`GemmShape::flags`]: W's columns are permuted.
pub const FLAG_K_ORDER: u32 = 2;
/// [`GemmShape::flags`]: C is read.
pub const FLAG_C: u32 = 4;
/// [`GemmShape::flags`]: a bias is added.
pub const FLAG_BIAS: u32 = 8;
/// [`GemmShape::flags`]: every row of X begins at a multiple of 16 bytes.
pub const FLAG_X_ALIGNED16: u32 = 16;

/// Every flag with its name, for the generators.
pub const FLAGS: &[(&str, u32)] = &[
    ("ROW_SCALE", FLAG_ROW_SCALE),
    ("K_ORDER", FLAG_K_ORDER),
    ("C", FLAG_C),
    ("BIAS", FLAG_BIAS),
    ("X_ALIGNED16", FLAG_X_ALIGNED16),
];

/// Every struct, for the generators.
pub const STRUCTS: &[AbiStruct] = &[GemmShape::ABI, GemmPointers::ABI];

/// The number by which kernels know an element type.
pub const fn dtype_code(dtype: qgemm_formats::DType) -> u32 {
    match dtype {
        qgemm_formats::DType::F32 => 0,
        qgemm_formats::DType::F16 => 1,
        qgemm_formats::DType::BF16 => 2,
    }
}
