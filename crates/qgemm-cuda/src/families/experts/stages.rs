//! [`ExpertStages`]: the stages of a plan in launch order.

use qgemm_hal::{CheckedExperts, DeviceInfo, ExpertOperand, ExpertsPlan, HalError, LaunchSequence};

use super::combine::CombineStage;
use super::convert::ConvertStage;
use super::gather::GatherStage;
use super::list::{ListStage, lists};
use super::planned::{PlannedExperts, ProductX};
use super::product::ProductStage;
use super::stage::Source;
use crate::families::kernel_launch::MakeKernel;

/// Family name.
pub(super) const NAME: &str = "gemm";

/// Launch sequence of `plan` on a device like `info`.
/// `make` prepares its kernels.
///
/// # Errors
/// [`HalError::KernelUnavailable`] when the backend lacks the plan's
/// kernel, [`HalError::WrongDevice`] when the device has no kernel
/// variant, and errors of `make`.
pub(in crate::families) fn sequence(
    op: &CheckedExperts,
    plan: &ExpertsPlan,
    info: &DeviceInfo,
    make: &mut MakeKernel<'_>,
) -> Result<LaunchSequence, HalError> {
    ExpertStages::of(PlannedExperts::new(op, plan, info)?)?.sequence(make)
}

/// The stages of a plan in launch order. Each reads what the
/// caller gives or an earlier stage writes.
#[derive(Debug)]
struct ExpertStages<'a> {
    planned: PlannedExperts<'a>,
    convert: Option<ConvertStage>,
    list: Option<ListStage>,
    /// The expert lists, if slots are grouped.
    lists: Option<Source>,
    gather: Option<GatherStage>,
    product: ProductStage<'a>,
    combine: Option<CombineStage>,
}

impl<'a> ExpertStages<'a> {
    fn of(planned: PlannedExperts<'a>) -> Result<Self, HalError> {
        let convert = ConvertStage::of_plan(&planned);
        let list = ListStage::of_plan(&planned)?;
        let lists = lists(&planned, list.as_ref());
        let gather = GatherStage::of_plan(&planned);
        let x = match (&convert, &gather) {
            (Some(convert), _) => convert.product_x(&planned),
            (None, Some(gather)) => gather.product_x(&planned),
            (None, None) => ProductX::in_place(planned.op),
        };
        let product = ProductStage::of(&planned, x, lists.clone())?;
        Ok(Self { convert, list, lists, gather, product, combine: CombineStage::of(planned.op), planned })
    }

    fn sequence(self, make: &mut MakeKernel<'_>) -> Result<LaunchSequence, HalError> {
        let Self { planned, convert, list, lists, gather, product, combine } = self;
        let mut steps = Vec::new();
        if let Some(convert) = convert {
            steps.push(convert.stage(&planned).step(make)?);
        }
        if let Some(list) = list {
            steps.extend(list.steps(&planned, make)?);
        }
        if let Some((gather, lists)) = gather.zip(lists) {
            steps.push(gather.stage(&planned, lists).step(make)?);
        }
        steps.push(product.stage(&planned).step(make)?);
        if let Some(combine) = combine {
            steps.push(combine.stage(&planned).step(make)?);
        }
        Ok(LaunchSequence::new::<ExpertOperand>(planned.op.kernel_name(NAME), steps))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use qgemm_formats::{DType, Format, XFormat};
    use qgemm_hal::{
        Activation, CheckedGemm, Combine, Dense, ExpertForm, Family, Kernel, Operands, Stream, Variant, XPlanes,
        XPrecision, noop,
    };

    use super::super::family::ExpertProducts;
    use super::*;
    use crate::arch;

    #[derive(Debug)]
    struct Unlaunched;

    impl Kernel for Unlaunched {
        fn launch(&self, _: &Stream, _: Operands<'_>) -> Result<(), HalError> {
            Ok(())
        }
    }

    /// FP8 weights and activations, whose kernels read rows
    /// in the order of experts.
    fn op(form: ExpertForm, lists: bool, combines: bool) -> CheckedExperts {
        let (m, n, k) = (64, 256, 512);
        let x = XFormat::E4M3Block;
        let parts = x.parts(false, None).expect("a quantized format");
        let (codes_row, scales_row) = (parts.code_bytes(k) as u64, parts.scale_bytes(k) as u64);
        let format: Format = "fp8_e4m3_block128".parse().expect("a format");
        let each = CheckedGemm {
            m,
            stored_rows: n,
            out_features: n,
            gated: false,
            k,
            stored_k: k,
            format,
            class: arch::fragment_layout(Variant::Sm90),
            row_scale: false,
            k_order: false,
            weight_fits_f16: true,
            x: XPlanes { parts, codes_row, scales_row, sums_row: 0 }.operand(x),
            norm: None,
            x_precision: XPrecision::Auto,
            d: Dense::rows_of(if combines { DType::F32 } else { DType::BF16 }, n),
            segments: Vec::new(),
            c: None,
            bias: None,
            token_scale: false,
            residual: None,
            residual_in_d: false,
            alpha: 1.0,
            beta: 0.0,
            activation: Activation::Identity,
            batch_invariant: false,
        };
        let combine = combines.then(|| Combine { d: Dense::rows_of(DType::BF16, n), residual: None });
        let (checks_index, index_ready) = (true, false);
        CheckedExperts { each, experts: 8, routed_to: 8, row_pitch: n, form, combine, checks_index, lists, index_ready }
    }

    /// Kernel of each launch, and the text of the sequence.
    fn launches(op: &CheckedExperts) -> (Vec<String>, String) {
        let device = noop::open("noop".parse().expect("a name")).expect("always there");
        let (variant, shared_bytes) = (Some(Variant::Sm90), arch::most_shared(Variant::Sm90));
        let info = DeviceInfo { variant, shared_bytes, units: 132, ..device.info().clone() };
        let configs = ExpertProducts.configs(op, &info).expect("it is served");
        let plan = ExpertsPlan::new(op, configs[0], 0.0).expect("it fits");
        let sequence = sequence(op, &plan, &info, &mut |_| Ok(Arc::new(Unlaunched))).expect("it is launched");
        (sequence.steps().iter().map(|step| step.kernel_id().to_string()).collect(), sequence.to_string())
    }

    #[test]
    fn stages_are_launched_in_order() {
        let slots = ExpertForm::Indexed { top_k: 2, x_per_slot: false };
        let (kernels, text) = launches(&op(slots, false, true));
        let [list @ .., gather, product, combine] = &kernels[..] else { panic!("{text}") };
        assert!(!list.is_empty() && list.iter().all(|kernel| kernel.starts_with("routing:")), "{text}");
        assert!(gather.contains("gather") && combine.contains("combine"), "{text}");
        assert!(product.contains("main_loop=") && text.contains("the slots' products = the workspace["), "{text}");
    }

    #[test]
    fn stages_that_are_not_needed_are_absent() {
        let slots = ExpertForm::Indexed { top_k: 2, x_per_slot: false };
        let (kernels, text) = launches(&op(slots, true, false));
        assert_eq!(kernels.len(), 2, "{text}");
        assert!(kernels[0].contains("gather") && !text.contains("the lists = the workspace["), "{text}");
        let (kernels, text) = launches(&op(ExpertForm::Contiguous, false, false));
        assert_eq!(kernels.len(), 1, "{text}");
        assert!(!text.contains("= the workspace["), "{text}");
    }
}
