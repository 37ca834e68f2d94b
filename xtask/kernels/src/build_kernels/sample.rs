//! A sample of kernels, for a quick check.

use std::collections::BTreeMap;

use qgemm_cuda::{KernelSpec, Target};
use qgemm_hal::{KernelId, Spec};

use super::job::Job;

/// Days after which all of the sample has been drawn.
const DAYS: u64 = 6;

/// The part of the sample for a day.
pub(super) fn of_day(sample: Vec<Job>, day: u64) -> Vec<Job> {
    (day..).zip(sample).filter(|(number, _)| number.is_multiple_of(DAYS)).map(|(_, job)| job).collect()
}

/// One of `jobs` for each kind, with one tile and one
/// target. In name order, kinds rotate through the targets
/// and shift by one each round, so that repeating names meet
/// every target; so do tiles.
pub(super) fn sample(jobs: &[Job], targets: &[Target]) -> Vec<Job> {
    let mut of = BTreeMap::<String, Vec<&Job>>::new();
    for job in jobs {
        of.entry(kind(&job.spec)).or_default().push(job);
    }
    let count = targets.len();
    let chosen = of.values().enumerate().filter_map(|(i, jobs)| {
        let from = (i + i / count) % count;
        let of_target = |target: &Target| jobs.iter().filter(|job| job.target == *target).collect::<Vec<_>>();
        let tiles = targets[from..].iter().chain(&targets[..from]).map(of_target).find(|tiles| !tiles.is_empty())?;
        Some((**tiles[i % tiles.len()]).clone())
    });
    chosen.collect()
}

/// Kind of a kernel, without its tile and ring copies:
/// operation, family, mechanism and types.
fn kind(spec: &KernelSpec) -> String {
    /// Main loops whose CTAs share rings.
    const RINGS: [&str; 2] = ["sm80_cp_async", "sm120_tma_ws"];
    let Ok(id) = spec.name.parse::<KernelId>() else { return spec.name.clone() };
    match id.spec {
        Spec::Gemm(gemm) => {
            let mechanism = if RINGS.contains(&gemm.main_loop.as_str()) { "rings" } else { gemm.main_loop.as_str() };
            format!("{} {mechanism} {} {}", id.family, gemm.w, gemm.x)
        }
        Spec::Experts(experts) => format!("experts {} {} {} {}", id.family, experts.main_loop, experts.w, experts.x),
        other => format!("{} {} {other:?}", id.operation(), id.family),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use qgemm_cuda::manifest;

    use super::*;

    #[test]
    fn a_sample_holds_each_kind_once_and_every_chip() {
        let chips = ["70", "75", "80", "86", "89", "90", "120"];
        for arch in [chips.join(","), "70,86,120".into(), "80".into()] {
            let target = |chip: &str| Target::Cubin { arch: chip.parse().unwrap(), specific: false };
            let targets: Vec<Target> = arch.split(',').map(target).collect();
            let of = |&target: &Target| {
                manifest(target.variant().unwrap()).into_iter().map(move |spec| Job { spec, target })
            };
            let all: Vec<Job> = targets.iter().flat_map(of).collect();
            let chosen = sample(&all, &targets);
            let kinds = |jobs: &[Job]| jobs.iter().map(|j| kind(&j.spec)).collect::<BTreeSet<_>>();
            assert_eq!(kinds(&chosen), kinds(&all));
            assert_eq!(chosen.len(), kinds(&all).len());
            assert!(kinds(&all).contains("gemv gemv q4_k f16"), "a kind has no tile");
            for &target in &targets {
                let of_chip = chosen.iter().filter(|j| j.target == target);
                let activations: BTreeSet<&str> = of_chip
                    .filter_map(|j| ["x=f16,", "x=bf16,", "x=f32,"].into_iter().find(|a| j.spec.name.contains(a)))
                    .collect();
                assert_eq!(activations.len(), 3, "{target} of {arch}: {activations:?}");
            }
        }
    }
}
