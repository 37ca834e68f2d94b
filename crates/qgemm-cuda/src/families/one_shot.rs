//! Kernel of the one-shot all-reduce, which a group of GPUs
//! launches (`nccl/one_shot.rs`).

use bytemuck::{Pod, Zeroable};
use qgemm_formats::DType;
use qgemm_hal::{AllReduceSpec, KernelId, Spec, Variant};

use super::prelude::Prelude;
use crate::source;
use crate::spec::KernelSpec;

/// Family name.
const NAME: &str = "one_shot";
const ENTRY: &str = "entry/all_reduce_one_shot.cu";
/// Most ranks of a group.
pub(crate) const MOST_RANKS: usize = 8;
/// Threads of a CTA, a packet each.
pub(crate) const THREADS: u32 = 256;
/// Bytes of the message in a packet.
pub(crate) const PACKET_MESSAGE: usize = 8;
/// Bytes of a packet: each word of the message has a number beside it.
pub(crate) const PACKET_BYTES: usize = 2 * PACKET_MESSAGE;

/// Kernel for `variant`.
pub(crate) fn spec(variant: Variant) -> KernelSpec {
    let id = KernelId::new(NAME, Some(variant), Spec::AllReduce(AllReduceSpec { ranks: MOST_RANKS as u32 }));
    KernelSpec {
        name: id.to_string(),
        entry: ENTRY,
        text: source::entry(ENTRY),
        symbol: "qg_all_reduce_one_shot",
        prelude: Prelude { threads: Some(THREADS), ..Prelude::of(variant) }.text(),
        arch_specific: false,
    }
}

/// `OneShotParams` in `entry/all_reduce_one_shot.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub(crate) struct OneShotParams {
    /// D, and its elements.
    pub d: u64,
    pub count: u64,
    /// Packets of each rank: `[2, ranks, packets]`.
    pub slots: [u64; MOST_RANKS],
    /// Calls of each of this rank's packets.
    pub calls: u64,
    /// Word of this rank: a silent rank plus one.
    pub failed: u64,
    /// Two words in host memory: whether to stop, and `failed`.
    pub host: u64,
    /// Longest wait in nanoseconds.
    pub limit: u64,
    pub dtype: u32,
    pub rank: u32,
    pub ranks: u32,
    /// Packets of a slot.
    pub packets: u32,
}

/// CTAs of a message.
pub(crate) fn ctas(count: usize, dtype: DType) -> u32 {
    (count * dtype.bytes()).div_ceil(PACKET_MESSAGE).div_ceil(THREADS as usize) as u32
}
