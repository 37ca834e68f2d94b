//! Models of warp-wide instructions, on the registers of 32 lanes.
//!
//! [`COLLECTIVES`] is the single table of them. Emulated atoms name an
//! operation by its index ([`header`]); the machine collects the lanes'
//! words and calls [`Collective::run`].

mod block_scaled;
mod decode;
mod exchange;
pub mod fit;
mod float;
mod fragment;
mod integer;
mod precision;
mod sum;
mod words;

use qgemm_hal::Variant;

pub(crate) use float::WgmmaOperands;
pub use precision::{Accumulator, Aligned, Order, Precision, Rounding, ScaledSum, Sum};
use words::WordCounts;
pub use words::{MAX_WORDS, NO_WORDS, WarpWords};

/// Class of an operation, for counting and comparing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// A matrix instruction with f32 accumulators.
    FloatMma,
    /// A matrix instruction with i32 accumulators.
    IntegerMma,
    /// A shuffle, vote or reduction.
    Exchange,
    /// A barrier without words.
    Barrier,
}

/// A warp-wide instruction.
#[derive(Clone, Copy)]
pub struct Collective {
    /// Name of its atom; of the integer atom, when two
    /// atoms share an instruction.
    pub name: &'static str,
    /// Class of the operation.
    pub class: Class,
    /// Words that each lane passes: for `mma`, those of A, B,
    /// the accumulators, the scale of A, the scale of B.
    pub inputs: usize,
    /// Words that each lane gets.
    pub outputs: usize,
    /// First variant that supports it.
    pub variant: Variant,
    /// Computes every lane's outputs from every lane's inputs.
    pub run: fn(&WarpWords, &mut WarpWords, &Precision),
}

type Run = fn(&WarpWords, &mut WarpWords, &Precision);

const fn mma(name: &'static str, class: Class, words: WordCounts, variant: Variant, run: Run) -> Collective {
    Collective { name, class, inputs: words.first_scale() + words.scales, outputs: words.d, variant, run }
}

const fn exchange(name: &'static str, inputs: usize, variant: Variant, run: Run) -> Collective {
    Collective { name, class: Class::Exchange, inputs, outputs: 1, variant, run }
}

/// Every operation, indexed by its number.
pub static COLLECTIVES: &[Collective] = {
    use Class::{FloatMma, IntegerMma};
    use Variant::{Sm70, Sm75, Sm80, Sm89, Sm120};
    &[
        mma("mma_m8n8k4_f16", FloatMma, float::M8N8K4, Sm70, float::m8n8k4_f16),
        mma("mma_m8n8k4_row_row_f16", FloatMma, float::M8N8K4, Sm70, float::m8n8k4_row_row_f16),
        mma("mma_m8n8k4_col_col_f16", FloatMma, float::M8N8K4, Sm70, float::m8n8k4_col_col_f16),
        mma("mma_m8n8k4_col_row_f16", FloatMma, float::M8N8K4, Sm70, float::m8n8k4_col_row_f16),
        mma("mma_m16n8k8_f16", FloatMma, float::M16N8K8, Sm75, float::m16n8k8_f16),
        mma("mma_m16n8k16_f16", FloatMma, float::M16N8K16, Sm80, float::m16n8k16_f16),
        mma("mma_m16n8k16_bf16", FloatMma, float::M16N8K16, Sm80, float::m16n8k16_bf16),
        mma("mma_m16n8k8_tf32", FloatMma, float::M16N8K8_TF32, Sm80, float::m16n8k8_tf32),
        mma("mma_m8n8k16_s8", IntegerMma, integer::M8N8K16, Sm75, integer::m8n8k16),
        mma("mma_m16n8k16_s8", IntegerMma, integer::M16N8K16, Sm80, integer::m16n8k16),
        mma("mma_m16n8k32_s8", IntegerMma, integer::M16N8K32, Sm80, integer::m16n8k32),
        mma("mma_m16n8k32_e4m3", FloatMma, float::M16N8K32, Sm89, float::m16n8k32_e4m3),
        mma("mma_m16n8k32_e5m2", FloatMma, float::M16N8K32, Sm89, float::m16n8k32_e5m2),
        mma("mma_m16n8k32_e4m3_e5m2", FloatMma, float::M16N8K32, Sm89, float::m16n8k32_e4m3_e5m2),
        mma("mma_m16n8k64_mxf4", FloatMma, block_scaled::M16N8K64, Sm120, block_scaled::m16n8k64_mxf4),
        mma("mma_m16n8k64_nvf4", FloatMma, block_scaled::M16N8K64, Sm120, block_scaled::m16n8k64_nvf4),
        mma("mma_m16n8k32_mxf8", FloatMma, block_scaled::M16N8K32, Sm120, block_scaled::m16n8k32_mxf8),
        mma("mma_m16n8k32_mxf8_e2m1", FloatMma, block_scaled::M16N8K32, Sm120, block_scaled::m16n8k32_mxf8_e2m1),
        exchange("shfl_xor", 2, Sm70, exchange::shfl_xor),
        exchange("shfl_idx", 2, Sm70, exchange::shfl_idx),
        exchange("ballot", 1, Sm70, exchange::ballot),
        exchange("match_any", 1, Sm70, exchange::match_any),
        exchange("redux_add", 1, Sm80, exchange::redux_add),
        exchange("redux_max_u32", 1, Sm80, exchange::redux_max_u32),
        Collective {
            name: "warp_barrier",
            class: Class::Barrier,
            inputs: 0,
            outputs: 0,
            variant: Sm70,
            run: exchange::warp_barrier,
        },
    ]
};

/// The operations' numbers as C++: a constant `EMU_<name>` for each.
pub fn header() -> String {
    COLLECTIVES
        .iter()
        .enumerate()
        .map(|(number, op)| format!("constexpr unsigned EMU_{} = {number};\n", op.name))
        .collect()
}

#[cfg(test)]
mod tests;
