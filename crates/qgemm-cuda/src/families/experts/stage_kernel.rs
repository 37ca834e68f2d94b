//! [`StageKernel`]: kernel of a stage around the product.

use std::sync::Arc;

use qgemm_hal::{ExpertOperand, ExpertStep, ExpertStepSpec, Geometry, KernelId, Operand, Spec, Variant};

use crate::families::kernel_launch::{KernelLaunch, Params};
use crate::families::prelude::Prelude;
use crate::source;
use crate::spec::KernelSpec;

/// A kernel of a stage around the product.
#[derive(Clone, Copy, Debug)]
pub(super) struct StageKernel {
    pub step: ExpertStep,
    pub entry: &'static str,
    pub symbol: &'static str,
    pub threads: u32,
    pub shared_bytes: u32,
    /// Constants beside the variant and the threads.
    pub constants: Prelude<'static>,
}

impl StageKernel {
    fn id(&self, variant: Variant) -> KernelId {
        KernelId::new("experts", Some(variant), Spec::ExpertStep(ExpertStepSpec { step: self.step }))
    }

    /// Source for `variant`.
    pub fn spec(&self, variant: Variant) -> KernelSpec {
        let variant_number = Some(variant.number());
        let prelude = Prelude { variant: variant_number, threads: Some(self.threads), ..self.constants };
        KernelSpec {
            name: self.id(variant).to_string(),
            entry: self.entry,
            text: source::entry(self.entry),
            symbol: self.symbol,
            prelude: prelude.text(),
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
