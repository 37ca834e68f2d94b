//! Weights, devices, memory, segments and budgets.

use qgemm_api::{
    Budget, Context, DType, DeviceId, DeviceKind, Error, FusedProblem, HostExperts, HostWeight, PackedWeight,
    PrepareLimits, Problem, TuneProblem, WeightOrder, cpu, format_for_k, quantize,
};

use crate::{COUNTS, Refused, Try, beyond_32_bits, host, try_counts, weight};

#[test]
fn weights_devices_and_memory() {
    let ctx = Context::open("cpu").expect("always there");
    let format = "q8_0".parse().expect("a format");
    let room: Try = |room, n| room.ctx.allocate(n).map(drop);
    let too_large: Refused = |n| n > isize::MAX as usize / 2;
    let small = [0, 1, 3, 1 << 16, usize::MAX / 2 + 1, usize::MAX];
    try_counts("Context::allocate", &small, too_large, room);
    try_counts("Context::allocate_elements", &small, too_large, |room, n| {
        room.ctx.allocate_elements(DType::F16, n).map(drop)
    });
    try_counts("Context::workspace", &small, too_large, |room, n| room.ctx.workspace(n).map(drop));
    for (n, k) in COUNTS.into_iter().flat_map(|n| COUNTS.map(|k| (n, k))) {
        assert!(quantize(&[0.5], n, k, format).is_err(), "quantize({n}, {k})");
        assert!(HostWeight::new(format, n, k, vec![0; 34].into()).is_err(), "HostWeight::new({n}, {k})");
        let dense = ctx.load_dense(&[0; 4], DType::F32, n, k, WeightOrder::KN);
        assert_eq!(dense.is_ok(), (n, k) == (1, 1), "Context::load_dense({n}, {k})");
        let described = ctx.describe_weight(format, n, k);
        assert!(described.is_err() || (n > 0 && k.is_multiple_of(32)), "Context::describe_weight({n}, {k})");
        if let Ok(described) = described {
            assert!(described.gated().is_err() || n <= u32::MAX as usize, "DescribedWeight::gated of {n}");
        }
        assert!(format_for_k(format, k).is_err() || k.is_multiple_of(32), "format_for_k({k})");
    }
    let described = ctx.describe_weight(format, 32, 32).expect("valid");
    for count in COUNTS {
        let experts = described.experts(count);
        assert_eq!(experts.is_err(), count == 0 || count > 1 << 27, "DescribedWeight::experts({count})");
        assert!(HostExperts::of_stacked(&host(), count).is_err() || count == 1 || count == 2, "of_stacked({count})");
        assert!((1..=512).contains(&ctx.copies_beyond_cache(count)), "Context::copies_beyond_cache({count})");
        let limits = PrepareLimits::default().memory(count);
        assert!(matches!(ctx.prepare_within(&[described.problem(1)], limits, |_| ()), Ok(1)), "PrepareLimits.memory");
        let opened = cpu::open_with_threads(if count == 33 { 2 } else { count });
        assert_eq!(opened.is_err(), count > 4096, "cpu::open_with_threads({count})");
    }
    let packed = PackedWeight::pack(&host(), ctx.device().fragment_layout(format)).expect("it packs");
    for count in COUNTS {
        let changed = |change: fn(&mut qgemm_api::PackedParts, usize)| {
            let mut parts = (*packed).clone();
            change(&mut parts, count);
            PackedWeight::new(parts)
        };
        assert!(changed(|parts, n| parts.n = n).is_err(), "PackedParts.n = {count}");
        assert!(changed(|parts, n| parts.features = n).is_err(), "PackedParts.features = {count}");
        assert!(changed(|parts, n| parts.k = n).is_err(), "PackedParts.k = {count}");
        assert!(changed(|parts, n| parts.stored_k = n).is_err(), "PackedParts.stored_k = {count}");
    }
    for ordinal in [1, 7, u32::MAX] {
        for kind in [DeviceKind::Cpu, DeviceKind::Cuda, DeviceKind::Wgpu, DeviceKind::Emu] {
            assert!(Context::open(DeviceId { kind, ordinal }).is_err() || ordinal == 1, "{kind:?} {ordinal}");
        }
    }
}

#[test]
fn segments_ranges_and_budgets() {
    let ctx = Context::open("cpu").expect("always there");
    let fused = ctx.load_fused(&[&host(), &host()]).expect("alike");
    for segment in COUNTS {
        assert_eq!(fused.columns(segment).is_some(), segment < 2, "FusedWeight::columns({segment})");
        let problem = || FusedProblem::new(&fused, 1, DType::F32);
        for stated in [
            problem().output_dtype(segment, DType::F16),
            problem().output_row_stride(segment, 32),
            problem().output_alignment(segment, 4),
        ] {
            let planned = ctx.plan_fused(&stated);
            assert_eq!(planned.is_ok(), segment < 2, "FusedProblem.output of segment {segment}: {:?}", planned.err());
        }
        let m = ctx.plan_fused(&FusedProblem::new(&fused, segment, DType::F32));
        assert_eq!(m.is_err(), beyond_32_bits(segment), "FusedProblem.m = {segment}: {:?}", m.err());
        let mut buffer = ctx.allocate(8).expect("memory");
        assert_eq!(buffer.slice(segment..8).is_err(), segment > 8, "Buffer::slice({segment}..8)");
        assert_eq!(buffer.slice(0..segment).is_err(), segment > 8, "Buffer::slice(0..{segment})");
        assert_eq!(buffer.split_off(segment).is_err(), segment > 8, "Buffer::split_off({segment})");
        let linear = ctx.linear(&weight(&ctx), &[], segment, qgemm_api::XPrecision::Auto);
        assert_eq!(linear.is_ok(), segment == 0, "Context::linear of {segment} tokens");
    }
    let weights = [weight(&ctx)];
    for within in [0.0, -1.0, 0.5, 1.0, f64::MAX, f64::INFINITY, f64::NEG_INFINITY, f64::NAN] {
        for most in [0, 1, usize::MAX] {
            let mut budget = Budget::new(std::time::Duration::ZERO);
            (budget.within, budget.most) = (within, most);
            let tuned = ctx.tune(&[TuneProblem::new(Problem::new(&weights[0], 1), &weights)], budget, |_| ());
            let is_refused = matches!(tuned, Err(Error::TuneBudget { .. }));
            assert_eq!(is_refused, within.is_nan() || within < 1.0, "Budget.within = {within}: {:?}", tuned.err());
        }
    }
}
