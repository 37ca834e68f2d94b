//! Cost model of a launch. Figures are those of a
//! Zen 4 core; vector levels differ less than machines do.

use qgemm_hal::{CheckedAttention, DeviceInfo, Operation};

use super::rows::{CHUNK_KEYS, MOST_ROWS};

/// Multiply-adds below which only the calling thread works,
/// because waking others takes longer.
pub(super) const SERIAL: f64 = 262_144.0;

/// Bytes per second that a core reads from a cache of keys.
const CORE_BANDWIDTH: f64 = 1e10;
/// Share of the nominal FMA rate that products reach.
const PRODUCTS: f64 = 0.55;
/// Softmax of a score, in multiply-adds.
const SOFTMAX: f64 = 57.0;
/// Conversion of a key and its value, in rows of
/// products with them; and for each byte of a number.
const CONVERSION: [f64; 2] = [3.5, 3.0];

/// Wake-ups of the pool.
pub(super) fn launches(op: &CheckedAttention, info: &DeviceInfo) -> u32 {
    u32::from(info.units > 1 && op.macs() >= SERIAL)
}

/// Reached shares of bandwidth and arithmetic rate, per mille.
pub(super) fn efficiency(op: &CheckedAttention, info: &DeviceInfo) -> (u32, u32) {
    let units = f64::from(info.units.max(1));
    let rows = (op.most_queries() * op.group()).max(1);
    let blocks = rows.div_ceil(MOST_ROWS);
    let tasks = op.sequences * op.kv_heads * blocks * op.most_keys.div_ceil(CHUNK_KEYS);
    let busy = if launches(op, info) == 0 { 1.0 } else { units.min(tasks.max(1) as f64) };
    let bandwidth = (busy * CORE_BANDWIDTH / info.bandwidth).min(0.9);
    let conversion = CONVERSION[0] + CONVERSION[1] * (op.kv.k.mean_bytes() + op.kv.v.mean_bytes()) / 2.0;
    let work = 1.0 + SOFTMAX / (op.qk_dim + op.v_dim) as f64 + conversion * blocks as f64 / rows as f64;
    let per_mille = |share: f64| (share * 1000.0).round().clamp(1.0, 1000.0) as u32;
    (per_mille(bandwidth), per_mille(PRODUCTS * busy / units / work))
}
