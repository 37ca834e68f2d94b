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
pub fn experts_sequence(
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
