//! [`StageKernel`]: kernel of a stage around the product.

use std::sync::Arc;

use qgemm_hal::{ExpertOperand, ExpertStepSpec, Geometry, KernelId, Name, Operand, Spec, Variant};

use crate::families::kernel_launch::{KernelLaunch, Params};
use crate::families::prelude::{constant_line, macro_line};
use crate::source;
use crate::spec::KernelSpec;

/// Constants of a kernel.
pub(super) type Constants = fn(Variant) -> Vec<(&'static str, u32)>;

/// A kernel of a stage around the product.
#[derive(Clone, Copy, Debug)]
pub(super) struct StageKernel {
    pub name: &'static str,
    pub entry: &'static str,
    pub symbol: &'static str,
    pub threads: u32,
    pub shared_bytes: u32,
    pub constants: Constants,
}

impl StageKernel {
    fn id(&self, variant: Variant) -> KernelId {
        KernelId::new("experts", Some(variant), Spec::ExpertStep(ExpertStepSpec { step: Name::new(self.name) }))
    }

    /// Source for `variant`.
    pub fn spec(&self, variant: Variant) -> KernelSpec {
        let mut prelude = String::new();
        macro_line(&mut prelude, "QG_VARIANT", &variant.number().to_string());
        constant_line(&mut prelude, "QG_THREADS", self.threads);
        (self.constants)(variant).into_iter().for_each(|(name, value)| constant_line(&mut prelude, name, value));
        KernelSpec {
            name: self.id(variant).to_string(),
            entry: self.entry,
            text: source::entry(self.entry),
            symbol: self.symbol,
            prelude,
            arch_specific: false,
        }
    }

    /// The launch with this grid.
    pub fn launch(&self, variant: Variant, grid: [u32; 3], params: Arc<dyn Params>) -> KernelLaunch {
        KernelLaunch {
            id: self.id(variant),
            spec: self.spec(variant),
            geometry: Geometry { grid, threads: self.threads, shared_bytes: self.shared_bytes },
            starts_early: variant >= Variant::Sm90,
            operands: ExpertOperand::ALL,
            updated: None,
            params,
        }
    }
}
