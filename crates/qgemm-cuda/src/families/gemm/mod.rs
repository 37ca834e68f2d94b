//! Kernels of the product, one file a main loop, and the list of all of them.

mod common;
mod gemm_simt;
mod gemm_sliced_k;
mod gemv;
mod instance;
mod sm120_tma_ws;
mod sm70_two_stage;
mod sm80_cp_async;
mod sm90_wgmma_ws;
mod spills;
mod types;

use std::collections::HashMap;
use std::sync::{LazyLock, OnceLock};

use qgemm_formats::{DType, Format};
use qgemm_hal::Variant;

pub(super) use common::K_BLOCK;
pub(super) use instance::{Instance, XAccess};
pub(super) use types::Engine;

use instance::{FitsRegisters, MainLoop};
use types::Types;

/// Every main loop. An instruction set that needs another adds its file here.
static MAIN_LOOPS: [&MainLoop; 7] = [
    &gemv::MAIN_LOOP,
    &sm70_two_stage::MAIN_LOOP,
    &gemm_sliced_k::MAIN_LOOP,
    &sm80_cp_async::MAIN_LOOP,
    &sm120_tma_ws::MAIN_LOOP,
    &sm90_wgmma_ws::MAIN_LOOP,
    &gemm_simt::MAIN_LOOP,
];

/// What kernels are listed by.
type Key = (Format, DType, Variant);

/// The kernels of each key, by format and then by the other two, listed once a process: planning asks for them again and again.
static INSTANCES: LazyLock<HashMap<Format, [OnceLock<Vec<Instance>>; DType::ALL.len() * Variant::ALL.len()]>> =
    LazyLock::new(|| Format::all().map(|format| (format, Default::default())).collect());

fn keys() -> impl Iterator<Item = Key> {
    let of_format = |format| DType::ALL.into_iter().flat_map(move |x| Variant::ALL.map(|variant| (format, x, variant)));
    Format::all().flat_map(of_format)
}

/// Every kernel for these types.
pub(super) fn instances(format: Format, x: DType, variant: Variant) -> &'static [Instance] {
    let slot = x as usize * Variant::ALL.len() + variant as usize;
    let of_format = INSTANCES.get(&format);
    of_format.map_or(&[], |slots| slots[slot].get_or_init(|| list((format, x, variant), &spills::fits_registers)))
}

/// Lists the kernels of `variant` anew, as they are where `fits` tells of each line of `kernels.spills` and its kernel whether it
/// fits in registers.
pub(super) fn ask_registers(variant: Variant, fits: &dyn Fn(String, &Instance) -> bool) {
    let fits = |instance: &Instance| fits(spills::key(instance), instance);
    keys().filter(|key| key.2 == variant).for_each(|key| drop(list(key, &fits)));
}

fn list((format, x, variant): Key, fits_registers: FitsRegisters<'_>) -> Vec<Instance> {
    let types = Types::new(format, x, variant);
    types.iter().flat_map(|types| MAIN_LOOPS.iter().flat_map(|l| (l.instances)(types, fits_registers))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_are_listed_once() {
        for (format, x, variant) in keys() {
            let listed = instances(format, x, variant);
            assert!(
                !listed.is_empty() && std::ptr::eq(listed, instances(format, x, variant)),
                "{format} {x} {variant}"
            );
        }
    }

    #[test]
    fn a_config_is_one_kernel_s() {
        for (format, x, variant) in keys() {
            for instance in instances(format, x, variant) {
                let (config, family) = (instance.config(), instance.main_loop.family);
                let of_family = instances(format, x, variant).iter().filter(|i| i.main_loop.family == family);
                assert_eq!(of_family.filter(|i| i.is(&config)).count(), 1, "{variant} {}", instance.name());
            }
        }
    }
}
