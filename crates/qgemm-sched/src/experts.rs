//! Kernel choice and workspace layout for `experts`.

use qgemm_hal::{
    CheckedExperts, CheckedGemm, DeviceInfo, ExpertForm, ExpertsConfig, ExpertsPlan, Family, Operation, Schedule,
    TileConfig,
};

use crate::candidates::Candidates;
use crate::error::SchedError;
use crate::families::wanted_families;
use crate::gemm::{Cost, First, INVARIANT_M, Preferences, TunedTable, processor};

/// Picks the family and config for `op` on
/// the device of `info`.
///
/// A tuned measurement decides if one exists. Otherwise the cost model
/// assumes that all experts get the same number of rows. The
/// contents of the index are unknown here: a plan works for
/// every index. The earlier candidate of equals wins.
///
/// # Errors
/// [`SchedError::UnknownFamily`] when the preferred family does not exist.
/// [`SchedError::NoFamily`] with the reason of every family.
pub fn choose<'f>(
    op: &CheckedExperts,
    info: &DeviceInfo,
    families: &[&'f dyn Family<CheckedExperts>],
    preferences: &Preferences,
    tuned: &TunedTable,
) -> Result<(&'f dyn Family<CheckedExperts>, ExpertsPlan), SchedError> {
    let families = &wanted_families(families, preferences.family.as_deref(), info)?;
    candidates(op, info, families, preferences, tuned).best(op, info)
}

/// All candidates that [`choose`] ranks for `op`.
///
/// They use X unchanged, a quantized X dequantized first, or X
/// quantized first where the operation allows it.
pub fn candidates<'f>(
    op: &CheckedExperts,
    info: &DeviceInfo,
    families: &[&'f dyn Family<CheckedExperts>],
    preferences: &Preferences,
    tuned: &TunedTable,
) -> Candidates<'f, CheckedExperts> {
    let plain = op.dequantized().map(|(plain, step)| (plain, First::Dequantize(step)));
    let quantized = op.quantized().map(|(quantized, step)| (quantized, First::Quantize(step)));
    let as_it_is = of_x(op, None, info, families, preferences);
    plain
        .into_iter()
        .chain(quantized)
        .fold(as_it_is, |all, (product, first)| all.and(of_x(&product, Some(&first), info, families, preferences)))
        .measured(op, info, tuned)
}

/// Candidates for one X step: none, dequantize, or quantize.
fn of_x<'f>(
    op: &CheckedExperts,
    before: Option<&First>,
    info: &DeviceInfo,
    families: &[&'f dyn Family<CheckedExperts>],
    preferences: &Preferences,
) -> Candidates<'f, CheckedExperts> {
    // Batch-invariant operations rank at a fixed M, so the
    // kernel does not depend on M.
    let typical = match op.each.batch_invariant {
        true => CheckedExperts { each: CheckedGemm { m: op.routed_to * INVARIANT_M, ..op.each.clone() }, ..op.clone() },
        false => op.clone(),
    };
    let is_wanted = |name: &str| preferences.family.as_ref().is_none_or(|wanted| name == wanted);
    let families: Vec<_> = families.iter().copied().filter(|family| is_wanted(family.name())).collect();
    let configs = |family: &dyn Family<CheckedExperts>| {
        let configs = family.configs(op, info)?;
        let scratch_bytes = configs.iter().map(|config| config.scratch_bytes).max().unwrap_or(0);
        let configs = match op.each.batch_invariant {
            true => family.configs(&typical, info).unwrap_or(configs),
            false => configs,
        };
        // The scratch size follows from these rows, whichever kernel is chosen.
        let kept = |config: &ExpertsConfig| if config.scratch_bytes == 0 { 0 } else { scratch_bytes };
        let configs = configs.into_iter().map(|config| ExpertsConfig { scratch_bytes: kept(&config), ..config });
        Ok(configs.filter(|config| preferences.math.is_none_or(|math| config.tile.math == math)).collect())
    };
    Candidates::ask(&families, configs, |config| {
        let mut cost = cost(&typical, info, &config);
        let seconds = before.map_or(0.0, |step| info.launch_seconds + step.traffic(op.x_rows()) / info.bandwidth);
        (cost.prologue, cost.seconds) = (cost.prologue + seconds, cost.seconds + seconds);
        let plan = ExpertsPlan::new(op, config, cost.seconds)?;
        let plan = match before {
            None => plan,
            Some(First::Dequantize(step)) => plan.with_dequantized(step)?,
            Some(First::Quantize(step)) => plan.with_quantized(step)?,
        };
        preferences.max_workspace.is_none_or(|most| plan.workspace_bytes <= most).then_some((plan, cost))
    })
}

/// Expected cost when rows spread evenly over experts: the larger of
/// memory and arithmetic time, with whole tiles of rows.
fn cost(op: &CheckedExperts, info: &DeviceInfo, config: &ExpertsConfig) -> Cost {
    let tile = &config.tile;
    let (arithmetic, bandwidth) = tile.efficiency;
    let share = |per_mille: u32| f64::from(per_mille.max(1)) / 1000.0;
    let tile_m = tile.tile_m.max(1) as usize;
    let used = op.experts.min(op.each.m);
    let rate = info.rate(tile.math).unwrap_or(f64::MIN_POSITIVE);
    if tile.schedule == Schedule::Threads {
        // CPU threads work through the experts one by
        // one, without waking again.
        let each = CheckedGemm { m: op.mean_rows(), ..op.each.clone() };
        let used = used.min(op.expected_rows().ceil() as usize);
        return processor::cost(&each, info, tile, rate).repeated(used);
    }
    let is_indexed = matches!(op.form, ExpertForm::Indexed { .. });
    let tiles = match op.form {
        ExpertForm::Indexed { .. } if !config.grouped => op.expected_rows(),
        ExpertForm::Masked { capacity } => op.experts as f64 * capacity.div_ceil(tile_m) as f64,
        _ => op.experts as f64 * expected_tiles(op.expected_rows() / op.experts as f64, tile_m),
    };
    let n_tiles = op.each.stored_rows.div_ceil(tile.tile_n.max(1) as usize) as f64;
    let at_once = f64::from((info.units / tile.cluster.max(1)).max(1) * tile.ctas_per_unit.max(1));
    let waves = tiles * n_tiles / at_once;
    let (all, begun) = match tile.schedule {
        // Tiles are indivisible: the last wave leaves units idle.
        Schedule::StreamK => (waves.ceil() * at_once, 0.0),
        Schedule::Grid | Schedule::Threads => (tiles * n_tiles, TILE_LAUNCHES * info.launch_seconds * waves),
    };
    let macs = all * (tile_m * tile.tile_n.max(1) as usize) as f64 * columns(op, tile);
    // Each row tile reads the weight again, from
    // the L2 cache at best.
    let (most, expected) = (used as f64, op.used_experts());
    let weights = (expected - most + (tiles - expected).max(0.0) / CACHE_SPEEDUP) * op.each.weight_bytes();
    let memory = (op.traffic() + weights) / (info.bandwidth * share(bandwidth));
    let math = macs / (rate * share(arithmetic));
    let launches = match (is_indexed && config.grouped, op.lists) {
        (false, _) => 0.0,
        (true, true) => SEARCH_LAUNCHES,
        (true, false) => SEARCH_LAUNCHES + LIST_LAUNCHES,
    };
    let lists = launches * info.launch_seconds;
    // Persistent kernels on quantized X need an expert's rows contiguous. Rows
    // listed by slot are therefore gathered first.
    let gathers = is_indexed && tile.schedule == Schedule::StreamK && tile.x_format.plain().is_none();
    let gathered = 2.0 * op.each.m as f64 * op.each.x_row_bytes() / info.bandwidth;
    let lists = if gathers { lists + info.launch_seconds + gathered } else { lists };
    // An X prologue writes 16-bit values.
    let written = op.each.x_row_bytes() + 2.0 * op.each.k as f64;
    let converts = tile.x_prologue.map_or(0.0, |_| info.launch_seconds + op.x_rows() as f64 * written / info.bandwidth);
    let lists = lists + converts;
    let hidden = HIDDEN_SHARE * memory.min(math);
    let seconds = info.launch_seconds + lists + begun + memory.max(math) + hidden + latency(op, config);
    Cost { prologue: lists, tiles: begun, ..Cost::of_parts(memory, math, info.launch_seconds, seconds) }
}

/// Columns multiplied, plus the idle columns of warps that wait
/// for slices with one more k-tile.
fn columns(op: &CheckedExperts, tile: &TileConfig) -> f64 {
    let (k, tile_k) = (op.each.k, tile.tile_k.max(1) as usize);
    match tile.schedule {
        Schedule::Grid => (k.div_ceil(tile_k).next_multiple_of(tile.k_groups.max(1) as usize) * tile_k) as f64,
        Schedule::StreamK | Schedule::Threads => k as f64,
    }
}

/// Latency in seconds that nothing hides.
///
/// In the last CTAs of a grid whose warps share K:
/// one wait for each refill of the copy ring. In a
/// persistent grid with one row tile per warp: finding the first
/// tile and multiplying the last.
fn latency(op: &CheckedExperts, config: &ExpertsConfig) -> f64 {
    let tile = &config.tile;
    if tile.schedule == Schedule::StreamK && tile.tile_n <= ROW_TILE {
        return if op.index_ready && config.prefetches_early { EARLY_ROW_TILE_LATENCY } else { ROW_TILE_LATENCY };
    }
    if tile.schedule != Schedule::Grid || tile.k_groups < 2 {
        return 0.0;
    }
    let k_tiles = op.each.k.div_ceil(tile.tile_k.max(1) as usize) as f64;
    k_tiles / f64::from(tile.k_groups * tile.stages.saturating_sub(1).max(1)) * MEMORY_LATENCY
}

/// Expected row tiles (`tile_m` rows) of one expert with `mean` rows
/// on average and random routing.
fn expected_tiles(mean: f64, tile_m: usize) -> f64 {
    // Row counts are Poisson distributed. Beyond this many tiles, the
    // last tile is half full on average.
    const MANY_TILES: f64 = 16.0;
    let tile = tile_m as f64;
    if mean > MANY_TILES * tile {
        return mean / tile + 0.5;
    }
    let most = (mean + 8.0 * mean.sqrt() + 8.0) as usize;
    let (mut probability, mut tiles) = ((-mean).exp(), 0.0);
    for rows in 1..=most {
        probability *= mean / rows as f64;
        tiles += probability * rows.div_ceil(tile_m) as f64;
    }
    // `exp(-mean)` underflows for a large mean.
    if mean < 700.0 { tiles } else { mean / tile + 0.5 }
}

/// Cost of starting a grid tile with an empty pipeline, in
/// launches (fitted on an H200).
const TILE_LAUNCHES: f64 = 0.27;
/// Seconds from issuing a copy to its arrival under
/// load (fitted on an H200).
const MEMORY_LATENCY: f64 = 7e-7;
/// Rows of a tile that a single warp owns, and the
/// extra seconds of such warps (fitted on an H200). The index
/// being ready before launch saves a part.
const ROW_TILE: u32 = 16;
const ROW_TILE_LATENCY: f64 = 3.8e-6;
const EARLY_ROW_TILE_LATENCY: f64 = 1.8e-6;
/// Rough speed of the L2 cache relative to memory.
const CACHE_SPEEDUP: f64 = 2.0;
/// Share of the shorter of memory and arithmetic time that still
/// shows. Of two memory-bound kernels, the one with fewer
/// multiply-adds is slightly faster.
const HIDDEN_SHARE: f64 = 0.02;
/// Cost of listing slots and of finding an expert in
/// the lists, in launches.
const LIST_LAUNCHES: f64 = 1.0;
const SEARCH_LAUNCHES: f64 = 0.18;

#[cfg(test)]
mod tests {
    use qgemm_formats::prepack::FragmentLayout;
    use qgemm_formats::{DType, Format};
    use qgemm_hal::{Activation, Combine, Dense, ExpertForm, XPrecision, noop};

    use super::*;

    fn op(form: ExpertForm, m: usize) -> CheckedExperts {
        let format: Format = "f32".parse().expect("a format");
        let each = CheckedGemm {
            m,
            stored_rows: 64,
            out_features: 64,
            gated: false,
            k: 32,
            stored_k: 32,
            format,
            class: FragmentLayout::Canonical,
            row_scale: false,
            k_order: false,
            weight_fits_f16: true,
            x: Dense::rows_of(DType::F32, 32).into(),
            norm: None,
            x_precision: XPrecision::Exact,
            d: Dense::rows_of(DType::F32, 64),
            c: None,
            bias: None,
            token_scale: false,
            residual: None,
            segments: Vec::new(),
            residual_in_d: false,
            alpha: 1.0,
            beta: 0.0,
            activation: Activation::Identity,
            batch_invariant: false,
        };
        CheckedExperts {
            each,
            experts: 8,
            routed_to: 8,
            row_pitch: 64,
            form,
            combine: None,
            checks_index: true,
            lists: false,
            index_ready: false,
        }
    }

    #[test]
    fn products_that_are_combined_wait_in_the_workspace() {
        let device = noop::open("noop".parse().expect("a name")).expect("always there");
        let (info, families) = (device.info(), device.catalog().experts);
        let form = ExpertForm::Indexed { top_k: 2, x_per_slot: false };
        let plain = op(form, 6);
        let (_, plan) =
            choose(&plain, info, families, &Preferences::default(), &TunedTable::new()).expect("it serves all");
        assert_eq!((plan.product_bytes, plan.workspace_bytes), (0, 0));
        let combined =
            CheckedExperts { combine: Some(Combine { d: Dense::rows_of(DType::F16, 64), residual: None }), ..plain };
        let (_, plan) =
            choose(&combined, info, families, &Preferences::default(), &TunedTable::new()).expect("it serves all");
        let bytes = 6 * 64 * 4;
        assert_eq!((plan.product_bytes, plan.scratch - plan.products), (bytes, bytes));
        // The counters of other plans stay zero.
        assert!(plan.products >= 1 << 16 && plan.workspace_bytes >= plan.scratch && plan.estimate > 0.0);
    }

    #[test]
    fn a_share_of_the_rows_costs_less_and_keeps_the_workspace() {
        let device = noop::open("noop".parse().expect("a name")).expect("always there");
        let (info, families) = (device.info(), device.catalog().experts);
        let form = ExpertForm::Indexed { top_k: 2, x_per_slot: false };
        let all = op(form, 4096);
        let share = CheckedExperts { routed_to: 32, ..all.clone() };
        assert_eq!((share.expected_rows(), share.mean_rows()), (1024.0, 128));
        assert!(share.used_experts() <= all.used_experts());
        let [all, share] = [all, share].map(|op| {
            choose(&op, info, families, &Preferences::default(), &TunedTable::new()).expect("it serves all").1
        });
        assert!(share.estimate < all.estimate, "{} and {}", share.estimate, all.estimate);
        assert_eq!(share.workspace_bytes, all.workspace_bytes);
    }

    #[test]
    fn rows_vary_from_expert_to_expert() {
        let about = |mean: f64, tile_m: usize, expected: f64| {
            let tiles = expected_tiles(mean, tile_m);
            assert!((tiles - expected).abs() < 0.01, "{mean} rows in tiles of {tile_m}: {tiles}");
        };
        // With few rows, an expert has a tile
        // exactly when it has a row.
        about(0.5, 64, 1.0 - (-0.5f64).exp());
        // Half of the experts have more rows than the mean.
        about(32.0, 32, 1.45);
        about(32.0, 64, 1.0);
        about(1000.0, 100, 10.5);
        about(2000.0, 100, 20.5);
    }

    #[test]
    fn slices_wait_for_those_that_have_a_k_tile_more() {
        let device = noop::open("noop".parse().expect("a name")).expect("always there");
        let of_six_k_tiles = op(ExpertForm::Contiguous, 6);
        let of_six_k_tiles = CheckedExperts { each: CheckedGemm { k: 768, ..of_six_k_tiles.each }, ..of_six_k_tiles };
        let configs = device.catalog().experts[0].configs(&of_six_k_tiles, device.info()).expect("it serves all");
        let multiplied = |schedule, k_groups| {
            columns(&of_six_k_tiles, &TileConfig { tile_k: 128, schedule, k_groups, ..configs[0].tile })
        };
        assert_eq!([1, 3, 4].map(|slices| multiplied(Schedule::Grid, slices)), [768.0, 768.0, 1024.0]);
        assert_eq!(multiplied(Schedule::StreamK, 4), 768.0);
    }

    #[test]
    fn what_is_not_served_says_why() {
        let device = noop::open("noop".parse().expect("a name")).expect("always there");
        let unknown = Preferences { family: Some("none".into()), ..Preferences::default() };
        let error = choose(
            &op(ExpertForm::Contiguous, 6),
            device.info(),
            device.catalog().experts,
            &unknown,
            &TunedTable::new(),
        );
        assert!(matches!(error, Err(SchedError::UnknownFamily { .. })), "{error:?}");
        let error =
            choose(&op(ExpertForm::Contiguous, 6), device.info(), &[], &Preferences::default(), &TunedTable::new());
        let text = error.expect_err("nobody").to_string();
        assert!(text.contains("contiguous products with 8 experts, each 6 x 64 x 32, f32"), "{text}");
    }
}
