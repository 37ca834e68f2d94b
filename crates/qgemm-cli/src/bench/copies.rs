//! Copies of operands that launches rotate through, so that none is
//! still in a cache.

use qgemm_api::{Context, DeviceKind, HostWeight, Weight};

use super::roof::HOST_BYTES;

/// Copies of a weight that no cache holds together.
///
/// # Errors
/// When memory runs out, or the device fails.
pub fn rotated(ctx: &Context, host: &HostWeight) -> anyhow::Result<Vec<Weight>> {
    let first = ctx.load(host)?;
    let count = copies(ctx, first.bytes());
    // Packed once: packing every copy takes longer than measuring.
    let packed = ctx.download_packed(&first)?;
    let mut weights = vec![first];
    while weights.len() < count {
        weights.push(ctx.load_packed(&packed)?);
    }
    Ok(weights)
}

/// Number of copies of a weight such that none is still in the
/// last-level cache when it is used again.
pub fn copies(ctx: &Context, bytes: usize) -> usize {
    copies_of_part(ctx, bytes, bytes)
}

/// As [`copies`], for weights of `bytes` bytes of which a launch
/// reads `part`. On CPUs, whose cache is not known, all bytes
/// count.
pub fn copies_of_part(ctx: &Context, part: usize, bytes: usize) -> usize {
    const CACHES: u64 = 2;
    const FEWEST: u64 = 2;
    const MOST: u64 = 512;
    let is_cpu = ctx.info().id.kind == DeviceKind::Cpu;
    let (bytes, part) = (bytes as u64, if is_cpu { bytes } else { part.max(1) } as u64);
    // Unknown device memory gives no bound.
    let in_memory = match ctx.info().memory_bytes {
        0 => MOST,
        memory => memory / 4 / bytes,
    };
    let host_bytes = if is_cpu { HOST_BYTES as u64 } else { 0 };
    let beyond_cache = (CACHES * ctx.info().cache_bytes).max(host_bytes).div_ceil(part);
    beyond_cache.min(in_memory).clamp(FEWEST, MOST) as usize
}
