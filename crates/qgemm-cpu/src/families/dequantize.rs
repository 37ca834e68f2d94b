//! Families of `dequantize`: a single one, row by
//! row, as the formats define.

use std::sync::Arc;

use bytemuck::cast_slice;
use qgemm_formats::XFactor;
use qgemm_hal::{
    CheckedDequantize, DequantizeConfig, DequantizeOperand, DequantizePlan, DequantizeSpec, Device, DeviceId,
    DeviceInfo, Families, Family, Geometry, HalError, HostMemory, HostStream, Kernel, KernelId, LaunchSequence,
    LaunchStep, Operands, Operation, Spec, Stream, Unsupported,
};
use rayon::prelude::*;

use crate::operand::{PlaneRows, absent, host_bytes};
use crate::pool::Pool;
use crate::processor::Processor;
use crate::source_hash::SOURCE_HASH;

/// Elements below which only the calling thread works, because
/// waking others takes longer.
const SERIAL_ELEMENTS: usize = 1 << 14;

/// Families of the CPU.
pub const FAMILIES: Families<CheckedDequantize> = &[&DequantizeFamily];

/// Dequantization of X.
#[derive(Debug)]
pub struct DequantizeFamily;

impl Family<CheckedDequantize> for DequantizeFamily {
    fn name(&self) -> &'static str {
        "dequantize"
    }

    fn configs(&self, op: &CheckedDequantize, _: &DeviceInfo) -> Result<Vec<DequantizeConfig>, Unsupported> {
        let kernel = KernelId::new(self.name(), None, Spec::Dequantize(DequantizeSpec::of(op)));
        Ok(vec![DequantizeConfig { kernel, efficiency: 300 }])
    }

    fn prepare(
        &self,
        device: &dyn Device,
        op: &CheckedDequantize,
        plan: &DequantizePlan,
    ) -> Result<LaunchSequence, HalError> {
        let kernel = CpuDequantize { op: *op, pool: Processor::of(device)?.pool().clone() };
        let grid = [u32::try_from(op.rows).unwrap_or(u32::MAX), 1, 1];
        let geometry = Geometry { grid, threads: 1, shared_bytes: 0 };
        let step = LaunchStep::new::<DequantizeOperand>(plan.config.kernel, geometry, Arc::new(kernel));
        let step = step.bind_all(op.operands());
        Ok(LaunchSequence::new::<DequantizeOperand>(format!("dequantize_{}", op.format), vec![step]))
    }

    fn source_hash(&self, _: &CheckedDequantize, _: &DequantizeConfig) -> u64 {
        SOURCE_HASH
    }
}

/// The family's loop, prepared for one operation.
struct CpuDequantize {
    op: CheckedDequantize,
    pool: Pool,
}

impl std::fmt::Debug for CpuDequantize {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CpuDequantize").field("op", &self.op).finish_non_exhaustive()
    }
}

impl Kernel for CpuDequantize {
    fn launch(&self, stream: &Stream, mut operands: Operands<'_>) -> Result<(), HalError> {
        use DequantizeOperand as O;
        HostStream::check(DeviceId::CPU, stream)?;
        let CheckedDequantize { rows, columns, planes, .. } = self.op;
        let rows = operands.rows(rows);
        let parts = planes.parts;
        let mut plane = |operand: O, row_stride: u64, row_bytes: usize| {
            let what = qgemm_hal::Operand::name(operand);
            let bytes = match row_bytes {
                0 => &[],
                _ => host_bytes(operands.take(operand).ok_or(absent(what, row_bytes))?, what)?,
            };
            PlaneRows::new(bytes, rows, row_stride, row_bytes, what)
        };
        let codes = plane(O::Codes, planes.codes_row, parts.code_bytes(columns))?;
        let scales = plane(O::Scales, planes.scales_row, parts.scale_bytes(columns))?;
        let factors = match parts.factor {
            XFactor::None => plane(O::Factors, 0, 0)?,
            XFactor::Given => plane(O::Factors, 0, 4)?,
            XFactor::PerToken => plane(O::Factors, 4, 4)?,
        };
        let (what, d_columns) = (qgemm_hal::Operand::name(O::D), self.op.d_columns());
        let view = operands.take_mut(O::D).ok_or(absent(what, d_columns * 4))?;
        let bytes = HostMemory::of_device_mut(DeviceId::CPU, view, what)?;
        let (end, len) = (rows.saturating_mul(d_columns * 4), bytes.len());
        let d = bytes.get_mut(..end).ok_or(HalError::OutOfBounds { what, start: 0, end, len })?;
        let of_row = |(row, out): (usize, &mut [u8])| {
            let factor = factors.row(row).first_chunk().map(|word| f32::from_le_bytes(*word));
            let values = parts.dequantize_row(codes.row(row), scales.row(row), factor, d_columns);
            out.copy_from_slice(cast_slice(&values));
        };
        self.pool.share(rows.saturating_mul(columns) >= SERIAL_ELEMENTS, |threads| match threads {
            1 => d.chunks_exact_mut(d_columns * 4).enumerate().for_each(of_row),
            _ => d.par_chunks_exact_mut(d_columns * 4).enumerate().for_each(of_row),
        });
        Ok(())
    }

    fn takes_portions(&self) -> bool {
        true
    }
}
