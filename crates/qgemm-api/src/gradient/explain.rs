//! Plan records of gradients, without kernels.

use qgemm_hal::{Catalog, DeviceInfo};
use qgemm_sched::{Candidates, TunedTable, matmul, memory_bound};

use super::description::Gradient;
use super::part::Scratch;
use super::through::ThroughShape;
use crate::error::Error;
use crate::record::{PlanRecord, PrologueRecord, Sizes, WorkspaceRegion, record};

impl Gradient {
    /// Record of the product with the first part of a weight of
    /// `shape`. Its time covers all parts.
    pub(crate) fn explain(
        &self,
        shape: &ThroughShape,
        info: &DeviceInfo,
        catalog: &Catalog,
        tuned: &TunedTable,
    ) -> Result<PlanRecord, Error> {
        let parts = self.check(shape)?;
        let (mut seconds, mut decoding, mut products, mut decoded, mut sums) = (0.0, 0.0, 0, 0, 0);
        let mut first = None;
        for part in &parts {
            if let Some(decode) = &part.decode {
                let estimate = memory_bound::choose(&decode.unpack, info, catalog.unpack)?.1.estimate;
                decoding += decode.copies as f64 * estimate;
            }
            (decoded, sums) = (decoded.max(part.decoded_bytes()), sums.max(part.sums_bytes()));
            for product in &part.products {
                let candidates = matmul::candidates(&product.matmul, info, catalog.matmul, tuned);
                if let Some(best) = candidates.offered.first() {
                    seconds += best.measured.unwrap_or(best.cost.seconds);
                    products = products.max(best.plan.workspace.bytes);
                }
                first.get_or_insert_with(|| record(&product.matmul, info, &candidates));
            }
        }
        let nothing = Candidates { offered: Vec::new(), refusals: Vec::new() };
        let whole = self.whole(shape)?;
        let mut found = first.unwrap_or_else(|| record(&whole, info, &nothing));
        found.operation = "gradient".into();
        found.problem = format!("dX of {} tokens through {shape}, in {} parts", self.tokens(), parts.len());
        found.shape = Some(Sizes { m: self.tokens(), n: shape.each().k, k: shape.outputs() });
        for chosen in found.candidates.iter_mut().filter(|candidate| candidate.chosen) {
            chosen.seconds = seconds + decoding;
            (chosen.cost.prologue, chosen.cost.seconds) = (decoding, seconds + decoding);
        }
        if decoded > 0 {
            let at = Scratch::new(products, decoded, sums);
            found.workspace_bytes = at.sums.end;
            found.workspace.push(WorkspaceRegion::new("decoded weight", at.decoded.start, decoded));
            if sums > 0 {
                found.workspace.push(WorkspaceRegion::new("sums of gates", at.sums.start, sums));
            }
            let x_format = whole.b.dtype.name().to_owned();
            found.prologue = Some(PrologueRecord { name: "unpack_w".into(), x_format, row_factors: false });
        }
        Ok(found)
    }
}
