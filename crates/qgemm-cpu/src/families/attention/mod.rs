//! Families of `attention`: a single one.
//!
//! | file | role |
//! |---|---|
//! | `job.rs` | operands of a launch, its tasks, results |
//! | `cost.rs` | the planner's cost model |
//! | `keys.rs` | sequences, pages, visible keys |
//! | `cache.rs` | tiles of keys and values in f32 |
//! | `rows.rs` | products, softmax and weighted values of a block of rows |
//! | `softmax.rs` | softmax state, and how states are merged |

mod cache;
mod cost;
mod job;
pub(super) mod keys;
mod rows;
mod softmax;

use std::sync::Arc;

use qgemm_hal::{
    AttentionConfig, AttentionOperand, AttentionPlan, AttentionSpec, CheckedAttention, Device, DeviceId, DeviceInfo,
    Families, Family, Geometry, HalError, HostStream, Kernel, KernelId, LaunchSequence, LaunchStep, Math, Operands,
    Spec, Stream, Unsupported,
};

use crate::pool::Pool;
use crate::processor::Processor;
use crate::simd::{Simd, TILE_KEYS};
use crate::source_hash::SOURCE_HASH;
use job::Job;
use rows::MOST_ROWS;

/// Families of the CPU.
pub const FAMILIES: Families<CheckedAttention> = &[&ATTENTION];

/// The family `attention`.
pub static ATTENTION: AttentionFamily = AttentionFamily;

/// Online softmax over tiles of keys, in f32.
#[derive(Debug)]
pub struct AttentionFamily;

impl Family<CheckedAttention> for AttentionFamily {
    fn name(&self) -> &'static str {
        "attention"
    }

    fn configs(&self, op: &CheckedAttention, info: &DeviceInfo) -> Result<Vec<AttentionConfig>, Unsupported> {
        let dims = [op.qk_dim, op.v_dim].map(|dim| dim as u32);
        let spec = AttentionSpec {
            masked: op.mask.is_some(),
            ..AttentionSpec::attend(op.kv, dims, MOST_ROWS as u32, TILE_KEYS as u32)
        };
        Ok(vec![AttentionConfig {
            kernel: KernelId::new(self.name(), None, Spec::Attention(spec)),
            launches: cost::launches(op, info),
            parts: 1,
            part_keys: op.most_keys as u32,
            workspace_bytes: 0,
            dequantized_bytes: 0,
            math: Math::FmaF32,
            padding: 1.0,
            efficiency: cost::efficiency(op, info),
        }])
    }

    fn prepare(
        &self,
        device: &dyn Device,
        op: &CheckedAttention,
        plan: &AttentionPlan,
    ) -> Result<LaunchSequence, HalError> {
        let cpu = Processor::of(device)?;
        let kernel = CpuAttention { op: op.clone(), simd: cpu.simd(), pool: cpu.pool().clone() };
        let tasks = u32::try_from(op.sequences * op.kv_heads * job::blocks(op)).unwrap_or(u32::MAX);
        let geometry = Geometry { grid: [tasks, 1, 1], threads: 1, shared_bytes: 0 };
        let step = LaunchStep::new::<AttentionOperand>(plan.config.kernel, geometry, Arc::new(kernel)).of_operation();
        Ok(LaunchSequence::new::<AttentionOperand>("attention", vec![step]))
    }

    fn source_hash(&self, _: &CheckedAttention, _: &AttentionConfig) -> u64 {
        SOURCE_HASH
    }
}

/// The family's loops, prepared for one operation.
struct CpuAttention {
    op: CheckedAttention,
    simd: &'static Simd,
    pool: Pool,
}

impl std::fmt::Debug for CpuAttention {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CpuAttention").field("op", &self.op).finish_non_exhaustive()
    }
}

impl Kernel for CpuAttention {
    fn launch(&self, stream: &Stream, operands: Operands<'_>) -> Result<(), HalError> {
        HostStream::check(DeviceId::CPU, stream)?;
        let job = Job::new(&self.op, self.simd, operands)?;
        self.pool.share(job.is_worth_sharing(), |threads| job.run(threads));
        Ok(())
    }
}
