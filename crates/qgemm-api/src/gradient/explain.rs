//! What a plan of a gradient would be, without making anything ready.

use qgemm_hal::{Catalog, DeviceInfo};
use qgemm_sched::{Candidates, TunedTable, matmul, unpack};

use super::description::{Gradient, outputs};
use super::plan::{decoded_bytes, scratch};
use crate::error::Error;
use crate::record::{PlanRecord, PrologueRecord, Sizes, WorkspaceRegion, record};
use crate::weight::WeightShape;

impl Gradient {
    /// The record of the product with the first part of a weight of `shape`, with the time of all parts.
    pub(crate) fn explain(
        &self,
        shape: &WeightShape,
        info: &DeviceInfo,
        catalog: &Catalog,
        tuned: &TunedTable,
    ) -> Result<PlanRecord, Error> {
        let parts = self.check(shape)?;
        let (mut seconds, mut decoding, mut products, mut decoded) = (0.0, 0.0, 0, 0);
        let mut first = None;
        for part in &parts {
            if let Some(op) = &part.unpack {
                decoding += unpack::choose(op, info, catalog.unpack)?.1.estimate;
                decoded = decoded.max(decoded_bytes(op));
            }
            let candidates = matmul::candidates(&part.matmul, info, catalog.matmul, tuned);
            if let Some(best) = candidates.offered.first() {
                seconds += best.measured.unwrap_or(best.cost.seconds);
                products = products.max(best.plan.workspace.bytes);
            }
            first.get_or_insert_with(|| record(&part.matmul, info, &candidates));
        }
        let nothing = Candidates { offered: Vec::new(), refusals: Vec::new() };
        let whole = self.whole(shape)?;
        let mut found = first.unwrap_or_else(|| record(&whole, info, &nothing));
        found.operation = "gradient".into();
        found.problem = format!("dX of {} tokens through {shape}, in {} parts", self.tokens(), parts.len());
        found.shape = Some(Sizes { m: self.tokens(), n: shape.k, k: outputs(shape) });
        for chosen in found.candidates.iter_mut().filter(|candidate| candidate.chosen) {
            chosen.seconds = seconds + decoding;
            (chosen.cost.prologue, chosen.cost.seconds) = (decoding, seconds + decoding);
        }
        if decoded > 0 {
            let at = scratch(products, decoded);
            found.workspace_bytes = at.end;
            found.workspace.push(WorkspaceRegion::new("decoded weight", at.start, decoded));
            let x_format = whole.b.dtype.name().to_owned();
            found.prologue = Some(PrologueRecord { name: "unpack_w".into(), x_format, row_factors: false });
        }
        Ok(found)
    }
}
