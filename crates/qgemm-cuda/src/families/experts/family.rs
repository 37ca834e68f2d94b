//! The kernel family: configs, launch sequences and
//! the list of kernels.

use qgemm_hal::{
    CheckedExperts, Device, DeviceInfo, ExpertsConfig, ExpertsPlan, Families, Family, HalError, LaunchSequence,
    TileConfig, Unsupported, Variant,
};

use super::convert::ConvertStage;
use super::list::list_bytes;
use super::stages::{NAME, sequence};
use super::{combine, convert, gather, product};
use crate::arch;
use crate::families::kernel_launch::load;
use crate::spec::KernelSpec;

/// Families of `experts`.
pub(in crate::families) const FAMILIES: Families<CheckedExperts> = &[&ExpertProducts];

/// The kernel family.
#[derive(Debug)]
pub(super) struct ExpertProducts;

/// All kernels of the family for `variant`.
pub(in crate::families) fn specs(variant: Variant) -> impl Iterator<Item = KernelSpec> {
    let around = [combine::spec(variant), gather::spec(variant)].into_iter().chain(convert::specs(variant));
    around.chain(product::specs(variant))
}

/// Checks whether each kernel that may serve experts fits in registers,
/// using its line of `kernels.spills`.
pub(in crate::families) fn ask_registers(variant: Variant, fits: &dyn Fn(String, KernelSpec) -> bool) {
    product::ask_registers(variant, fits);
}

impl Family<CheckedExperts> for ExpertProducts {
    fn name(&self) -> &'static str {
        NAME
    }

    fn configs(&self, op: &CheckedExperts, info: &DeviceInfo) -> Result<Vec<ExpertsConfig>, Unsupported> {
        let each = &op.each;
        let variant = info.variant.ok_or_else(|| Unsupported::new("runs on CUDA devices only"))?;
        let expected = arch::fragment_layout(variant);
        if each.class != expected {
            return Err(Unsupported::new(format!("reads weights in layout {expected:?}, not {:?}", each.class)));
        }
        if let Some(planes) = &each.x.planes {
            return product::quantized_configs(op, planes, info, variant);
        }
        let mut configs = product::plain_configs(op, info, variant)?;
        if let Some(convert) = ConvertStage::of(op, variant, list_bytes(op, info)) {
            let (scratch_bytes, x_prologue) = (convert.end(), Some(convert.prologue));
            let of_converted = product::plain_configs(&convert.product, info, variant)?.into_iter();
            configs.extend(of_converted.map(|config| {
                let tile = TileConfig { x_prologue, ..config.tile };
                ExpertsConfig { tile, scratch_bytes, ..config }
            }));
        }
        if configs.is_empty() {
            let why = "has no kernel of this format for so many rows, or with so little shared memory as the device's";
            return Err(Unsupported::new(why));
        }
        Ok(configs)
    }

    fn prepare(
        &self,
        device: &dyn Device,
        op: &CheckedExperts,
        plan: &ExpertsPlan,
    ) -> Result<LaunchSequence, HalError> {
        sequence(op, plan, device.info(), &mut load(device))
    }

    fn source_hash(&self, op: &CheckedExperts, config: &ExpertsConfig) -> u64 {
        product::spec_of(op, config).map_or(0, |spec| spec.source_hash().short())
    }
}
