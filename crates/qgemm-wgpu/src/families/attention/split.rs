//! Split-KV: partial results of parts of the keys go to the
//! workspace, and a second launch combines them.

use qgemm_hal::{CheckedAttention, DeviceInfo, WorkspaceLayout};

use super::launch::{THREADS, Writes, extra_bindings, extras, row_groups};

/// Workgroups that keep an adapter busy. Adapters do not
/// report how many they run at once.
const GROUPS: usize = 512;
/// Minimum keys of a part.
const LEAST_PART: usize = 256;
/// Numbers of a partial result beside its features:
/// row_max and row_sum.
const STATE: usize = 2;

/// Parts of the keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Split {
    /// Parts of a sequence's keys.
    pub parts: usize,
    /// Keys of a part: a multiple of a tile.
    pub part_keys: usize,
}

impl Split {
    /// The split of `op`; `None` if one launch serves it.
    ///
    /// A launch that writes partial results needs no binding for
    /// sinks, gate and log-sum-exp, so one part may be reason enough.
    pub fn of(op: &CheckedAttention, info: &DeviceInfo) -> Option<Self> {
        let keys = op.most_keys.max(1);
        let groups = (op.sequences * op.kv_heads * row_groups(op)).max(1);
        let parts = if op.batch_invariant { 1 } else { (GROUPS / groups).min(keys / LEAST_PART).max(1) };
        let part_keys = keys.div_ceil(parts).next_multiple_of(THREADS as usize);
        let split = Self { parts: keys.div_ceil(part_keys), part_keys };
        let fits = split.bytes(op) as u64 <= info.max_buffer_bytes;
        match split.parts > 1 && fits {
            true => Some(split),
            false if is_bound(op, Writes::All) => None,
            false => Some(Self { parts: 1, part_keys: keys.next_multiple_of(THREADS as usize) }),
        }
    }

    /// Bytes of the partial results.
    pub fn bytes(&self, op: &CheckedAttention) -> usize {
        [op.heads, self.parts, op.v_dim + STATE, size_of::<f32>()]
            .into_iter()
            .fold(op.tokens, usize::saturating_mul)
            .min(isize::MAX as usize)
    }

    /// Workspace bytes.
    pub fn workspace_bytes(&self, op: &CheckedAttention) -> usize {
        WorkspaceLayout::RESERVED + self.bytes(op)
    }
}

/// Whether mask, sinks and gate have bindings.
fn is_bound(op: &CheckedAttention, writes: Writes) -> bool {
    extras(op, writes).into_iter().zip(extra_bindings(op, writes)).all(|(has, binding)| !has || binding.is_some())
}
