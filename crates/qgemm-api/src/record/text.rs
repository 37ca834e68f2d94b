//! Plan record as text.

use std::fmt;

use super::PlanRecord;

/// Maximum candidates in the text. The record has all.
const SHOWN: usize = 12;

impl fmt::Display for PlanRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let micro = |seconds: f64| format!("{:.2} us", seconds * 1e6);
        writeln!(f, "{}: {}", self.operation, self.problem)?;
        let device = &self.device;
        writeln!(f, "device      {} ({}), {}, {} units", device.name, device.id, device.arch, device.units)?;
        writeln!(f, "kernel      {}", self.kernel_id.as_deref().unwrap_or("none"))?;
        writeln!(f, "why         {}", self.why)?;
        if let Some(math) = &self.unused_math {
            writeln!(f, "slow path   FMA bounds the kernel; matrix instructions ({math}) are unused")?;
        }
        if let Some(chosen) = self.chosen() {
            let cost = &chosen.cost;
            let parts = [
                ("memory", cost.memory),
                ("math", cost.math),
                ("tiles", cost.tiles),
                ("fixup", cost.fixup),
                ("prologue", cost.prologue),
                ("launch", cost.launch),
            ];
            let parts = parts.iter().filter(|(_, seconds)| *seconds > 0.0);
            let parts: Vec<String> = parts.map(|(name, seconds)| format!("{name} {}", micro(*seconds))).collect();
            writeln!(f, "expected    {}: {}", micro(chosen.seconds), parts.join(", "))?;
            if let Some(measured) = chosen.measured_seconds {
                writeln!(f, "measured    {}", micro(measured))?;
            }
        }
        let roof = &self.roof;
        write!(f, "roof        {} of memory ({:.0} bytes)", micro(roof.memory_seconds), roof.bytes)?;
        if let Some(math) = roof.math_seconds {
            write!(f, ", {} of arithmetic ({:.3e} operations)", micro(math), roof.operations)?;
        }
        match roof.share {
            Some(share) => writeln!(f, "; the plan reaches {:.0} % of it", share * 100.0)?,
            None => writeln!(f)?,
        }
        if let Some(tile) = &self.tile {
            write!(f, "tile        {} x {} x {} (N x M x K), {} threads", tile.n, tile.m, tile.k, tile.threads)?;
            writeln!(
                f,
                ", {} CTAs a unit, {} stages, {} bytes shared",
                tile.ctas_per_unit, tile.stages, tile.shared_bytes
            )?;
        }
        if let Some(dispatch) = &self.dispatch {
            let schedule = match dispatch.schedule {
                super::DispatchSchedule::Static => "static",
                super::DispatchSchedule::StreamK => "stream-K",
                super::DispatchSchedule::Persistent => "persistent",
            };
            let axis = match dispatch.split_axis {
                super::SplitAxis::M => "M",
                super::SplitAxis::N => "N",
                super::SplitAxis::K => "K",
                super::SplitAxis::Head => "heads",
                super::SplitAxis::Range => "ranges",
            };
            write!(f, "dispatch    {schedule}, split along {axis}")?;
            if let Some(tiles) = dispatch.tiles {
                write!(f, ": {} x {} x {} tiles (N x M x K)", tiles.n, tiles.m, tiles.k)?;
            }
            if let Some([x, y, z]) = dispatch.grid {
                write!(f, ", grid {x} x {y} x {z}")?;
            }
            writeln!(f, ", {} CTAs a tile at most", dispatch.parts)?;
        }
        if let Some(reduction) = &self.reduction {
            let order = match reduction.order {
                None => "none: each output is one thread's or one instruction's sum",
                Some(super::ReductionOrder::FixedTree) => "sum over the warps of a CTA, fixed tree",
                Some(super::ReductionOrder::LastArriverInOrder) => "sum over CTAs by the last to arrive, in order",
                Some(super::ReductionOrder::InOrder) => "sum over parts once all are there, in order",
            };
            writeln!(f, "reduction   {order}")?;
        }
        if let Some(prologue) = &self.prologue {
            let factors = if prologue.row_factors { ", with a factor a token" } else { "" };
            writeln!(f, "prologue    {}: X as {}{factors}", prologue.name, prologue.x_format)?;
        }
        writeln!(f, "workspace   {} bytes", self.workspace_bytes)?;
        for region in &self.workspace {
            writeln!(f, "  {:>12} + {:<12} {}", region.offset, region.bytes, region.name)?;
        }
        for launch in &self.launches {
            let [x, y, z] = launch.grid;
            writeln!(f, "launch      {} grid {x} x {y} x {z}, {} threads", launch.kernel_id, launch.threads)?;
        }
        for permission in &self.permissions {
            let super::PermissionRecord { x_precision, x_format, seconds } = permission;
            writeln!(f, "permission  {x_precision} would take {}: X as {x_format}", micro(*seconds))?;
        }
        if !self.candidates.is_empty() {
            writeln!(f, "candidates  {}, the fastest expected first", self.candidates.len())?;
        }
        for (place, candidate) in self.candidates.iter().enumerate() {
            if place >= SHOWN && !candidate.chosen {
                continue;
            }
            let mark = if candidate.chosen { '*' } else { ' ' };
            let measured = candidate.measured_seconds.map(|s| format!(", measured {}", micro(s))).unwrap_or_default();
            let (time, bound) = (micro(candidate.seconds), candidate.bound.name());
            writeln!(f, "{mark} {time:>12} {bound:<8} {}, {}{measured}", candidate.kernel_id, candidate.cut)?;
        }
        if !self.refused.is_empty() {
            writeln!(f, "refused")?;
        }
        self.refused.iter().try_for_each(|refusal| writeln!(f, "  {} {}", refusal.family, refusal.why))
    }
}
