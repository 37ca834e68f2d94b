//! Gates: values times an activation of others.

use qgemm_hal::GateFunction;

use super::activation::{Function, Silu, sigmoid};
use super::vector::{LANES, Vector};

/// Multiplies `values` by the activation of `z`, which is as long.
///
/// # Safety
/// The CPU must support the level's instructions.
#[inline(always)]
pub unsafe fn gate<V: Vector>(function: GateFunction, z: &[f32], values: &mut [f32]) {
    let whole = values.len() / LANES * LANES;
    for first in (0..whole).step_by(LANES) {
        // SAFETY: guaranteed by the caller; vectors from `first` on
        // are in both.
        unsafe { multiply::<V>(function, z.as_ptr().add(first), values.as_mut_ptr().add(first)) };
    }
    let rest = values.len() - whole;
    if rest > 0 {
        let (mut last_z, mut last) = ([0.0; LANES], [0.0; LANES]);
        last_z[..rest].copy_from_slice(&z[whole..][..rest]);
        last[..rest].copy_from_slice(&values[whole..]);
        // SAFETY: guaranteed by the caller; both are vectors.
        unsafe { multiply::<V>(function, last_z.as_ptr(), last.as_mut_ptr()) };
        values[whole..].copy_from_slice(&last[..rest]);
    }
}

/// Multiplies one vector.
///
/// # Safety
/// As for [`gate`]; both pointers are of vectors.
#[inline(always)]
unsafe fn multiply<V: Vector>(function: GateFunction, z: *const f32, values: *mut f32) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        let z = V::load(z);
        let factor = match function {
            GateFunction::Sigmoid => sigmoid::<V>(z),
            _ => Silu.of::<V>(z),
        };
        V::store(values, V::multiply(V::load(values), factor));
    }
}
