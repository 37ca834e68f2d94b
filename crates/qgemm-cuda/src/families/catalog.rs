//! The families of the product, and which of their kernels they offer for a problem.

use std::sync::Arc;

use qgemm_formats::DType;
use qgemm_hal::{
    CheckedGemm, Device, DeviceInfo, HalError, Kernel, KernelFamily, LaunchPlan, TileConfig, Unsupported, Variant,
};

use super::gemm::{Instance, instances};
use super::{kernel, staging};

/// The families, in no particular order: the scheduler ranks what they offer.
pub static FAMILIES: &[&dyn KernelFamily] = &[&Gemv, &Gemm];

/// A few tokens: the kernel with the smallest tile that takes all of them.
#[derive(Debug)]
struct Gemv;

/// Any number of tokens: every kernel that serves them.
#[derive(Debug)]
struct Gemm;

/// The kernels of a family for these types.
fn of_family(
    family: &dyn KernelFamily,
    op: &CheckedGemm,
    x: DType,
    variant: Variant,
) -> impl Iterator<Item = &'static Instance> {
    let name = family.name();
    instances(op.format, x, variant).iter().filter(move |i| i.main_loop.family == name)
}

fn unsupported_tokens(most: usize, op: &CheckedGemm) -> Unsupported {
    Unsupported::new(format!("serves at most {most} tokens, not {}", op.m))
}

impl Gemv {
    fn serving(&self, op: &CheckedGemm, info: &DeviceInfo) -> Result<&'static Instance, Unsupported> {
        let variant = kernel::variant(info)?;
        kernel::check_class(op, variant)?;
        let mut by_tokens = of_family(self, op, op.x.dtype, variant).peekable();
        let most = of_family(self, op, op.x.dtype, variant).map(|i| i.tile_m as usize).max();
        by_tokens.find(|i| i.tile_m as usize >= op.m).ok_or_else(|| unsupported_tokens(most.unwrap_or(0), op))
    }
}

impl KernelFamily for Gemv {
    fn name(&self) -> &'static str {
        "gemv"
    }

    fn supports(&self, op: &CheckedGemm, info: &DeviceInfo) -> Result<(), Unsupported> {
        self.serving(op, info).and_then(|i| kernel::check_shared(i, info))
    }

    fn candidates(&self, op: &CheckedGemm, info: &DeviceInfo) -> Vec<TileConfig> {
        self.serving(op, info).iter().map(|i| i.config()).collect()
    }

    fn prepare(&self, device: &dyn Device, op: &CheckedGemm, plan: &LaunchPlan) -> Result<Arc<dyn Kernel>, HalError> {
        kernel::prepare(self.name(), device, op, plan)
    }
}

/// Loads of X that a group of eight columns takes where its elements are not neighbours, instead of one.
const GATHER_LOADS: u32 = 8;

impl Gemm {
    /// The configurations for `op`: kernels that read X in place, and those for a copy of it.
    fn configs(&self, op: &CheckedGemm, info: &DeviceInfo) -> Result<Vec<TileConfig>, Unsupported> {
        let variant = kernel::variant(info)?;
        kernel::check_class(op, variant)?;
        let mut direct = self.serving(op, op.x.dtype, op.x.aligned16 && !op.k_order, variant, info);
        let Some(staged) = staging::staged_x(op, variant) else { return direct };
        if staging::gathers(op) {
            for config in direct.iter_mut().flatten() {
                config.efficiency.0 = (config.efficiency.0 / GATHER_LOADS).max(1);
            }
        }
        let copy = self.serving(op, staged.dtype, true, variant, info);
        let copy = copy.into_iter().flatten().map(|config| TileConfig { staged_x: Some(staged), ..config });
        let all: Vec<_> = direct.iter().flatten().copied().chain(copy).collect();
        if all.is_empty() { direct } else { Ok(all) }
    }

    /// The kernels that take activations of type `x`, whose rows are aligned and in the order of the weight's columns if
    /// `in_order` says so.
    fn serving(
        &self,
        op: &CheckedGemm,
        x: DType,
        in_order: bool,
        variant: Variant,
        info: &DeviceInfo,
    ) -> Result<Vec<TileConfig>, Unsupported> {
        let mut all: Vec<_> = of_family(self, op, x, variant).filter(|i| i.serves(op, in_order)).collect();
        let most = all.iter().map(|i| i.most_tokens()).max().unwrap_or(0);
        all.retain(|i| op.m <= i.most_tokens());
        if all.is_empty() {
            return Err(unsupported_tokens(most, op));
        }
        all.retain(|i| kernel::check_shared(i, info).is_ok());
        if all.is_empty() {
            return Err(Unsupported::new("needs more shared memory than the device has"));
        }
        Ok(all.into_iter().map(Instance::config).collect())
    }
}

impl KernelFamily for Gemm {
    fn name(&self) -> &'static str {
        "gemm"
    }

    fn supports(&self, op: &CheckedGemm, info: &DeviceInfo) -> Result<(), Unsupported> {
        self.configs(op, info).map(drop)
    }

    fn candidates(&self, op: &CheckedGemm, info: &DeviceInfo) -> Vec<TileConfig> {
        self.configs(op, info).unwrap_or_default()
    }

    fn prepare(&self, device: &dyn Device, op: &CheckedGemm, plan: &LaunchPlan) -> Result<Arc<dyn Kernel>, HalError> {
        kernel::prepare(self.name(), device, op, plan)
    }
}
