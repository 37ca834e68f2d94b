//! [`ListedSlots`]: the first launches of `experts`, which build
//! the expert lists when no router has.

use std::ops::Range;

use super::expert_lists::{ALIGNMENT, WORD, list_parts};
use super::experts::{CheckedExperts, ExpertForm, ExpertOperand, ExpertsPlan};
use super::routing::{
    CheckedRouting, MOST_EXPERTS, MOST_TOKENS, MOST_TOP_K, RoutingOperand, RoutingSource, STATUS_WORDS, Scoring,
};
use crate::sequence::LaunchStep;

/// The routing step that lists slots before a grouped product.
#[derive(Clone, Debug)]
pub struct ListedSlots {
    /// The routing operation whose kernels build the lists.
    pub routing: CheckedRouting,
    /// Byte ranges of offsets and slots as in [`list_parts`],
    /// relative to [`ExpertsPlan::scratch`].
    pub lists: [Range<usize>; 2],
    counts: Range<usize>,
    status: Range<usize>,
    workspace: Range<usize>,
}

impl ListedSlots {
    /// Lists of the slots of `op`. `workspace` returns the bytes
    /// that the routing kernels need. `None` unless rows are slots
    /// within the limits of `routing`.
    pub fn of(op: &CheckedExperts, workspace: impl FnOnce(&CheckedRouting) -> usize) -> Option<Self> {
        let ExpertForm::Indexed { top_k, .. } = op.form else { return None };
        let (tokens, experts) = (op.tokens(), op.experts);
        if top_k > MOST_TOP_K || tokens == 0 || tokens > MOST_TOKENS || experts > MOST_EXPERTS {
            return None;
        }
        let routing = CheckedRouting {
            tokens,
            experts,
            top_k,
            from: RoutingSource::Ids,
            scoring: Scoring::default(),
            renormalize: false,
            scale: 1.0,
            bias: false,
            groups: None,
            lists: true,
            shared: false,
            local: 0..experts,
        };
        let lists = list_parts(experts, op.each.m)?;
        let mut end = lists[1].end;
        let mut part = |bytes: usize| {
            let start = end.next_multiple_of(ALIGNMENT);
            end = start + bytes;
            start..end
        };
        let (counts, status) = (part(experts * WORD), part(STATUS_WORDS * WORD));
        let workspace = part(workspace(&routing));
        Some(Self { routing, lists, counts, status, workspace })
    }

    /// Total bytes.
    pub fn bytes(&self) -> usize {
        self.workspace.end
    }

    /// Byte range of the lists in the workspace of `plan`.
    pub fn in_workspace(&self, plan: &ExpertsPlan) -> Range<usize> {
        plan.scratch..plan.scratch + self.lists[1].end
    }

    /// Binds a routing step to operands of `experts` and to parts
    /// of the workspace of `plan`.
    pub fn bound(&self, step: LaunchStep, plan: &ExpertsPlan) -> LaunchStep {
        use RoutingOperand as R;
        let parts = [
            (R::Offsets, &self.lists[0]),
            (R::Rows, &self.lists[1]),
            (R::Counts, &self.counts),
            (R::Status, &self.status),
            (R::Workspace, &self.workspace),
        ];
        let place = |part: &Range<usize>| plan.scratch + part.start..plan.scratch + part.end;
        let step = step.bind(R::GivenIds, ExpertOperand::Index);
        let parts = parts.into_iter().filter(|(_, part)| !part.is_empty());
        parts.fold(step, |step, (operand, part)| step.bind_part(operand, ExpertOperand::Workspace, place(part)))
    }
}
