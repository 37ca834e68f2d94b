//! Memory as engines use it, on every available backend:
//! X and D in one arena, accumulation in D, host slices, events
//! between streams, and contexts that share a device.

use qgemm_api::half::f16;
use qgemm_api::{Buffer, Context, DType, DeviceKind, Error, HalError, Linear, Problem, cpu, quantize};

const DEVICES: [&str; 5] = ["cpu", "wgpu:0", "cuda:0", "emu:sm75", "emu:sm80"];
/// Rows of D are no whole words in f16, and no
/// whole vectors in f32.
const N: usize = 75;
const K: usize = 512;
/// From a one-token kernel to split-K.
const TOKENS: [usize; 3] = [1, 5, 19];

/// Every available device; the others are reported as skipped.
fn devices(test: &str) -> impl Iterator<Item = Context> {
    DEVICES.into_iter().filter_map(move |name| match Context::open(name) {
        Ok(ctx) => Some(ctx),
        Err(why @ (Error::Hal(HalError::NoDevice { .. }) | Error::BackendNotBuilt { .. })) => {
            qgemm_testkit::skipped(&format!("{test} on {name}"), &why.to_string());
            None
        }
        Err(other) => panic!("{name}: {other}"),
    })
}

/// `count` pseudo-random values in −1..1.
fn values(seed: usize, count: usize) -> Vec<f32> {
    (0..count).map(|i| ((i * 7919 + seed * 104_729) % 1999) as f32 / 999.5 - 1.0).collect()
}

fn layer(ctx: &Context, describe: fn(Problem) -> Problem) -> Result<Linear, Error> {
    let (host, _) = quantize(&values(1, N * K), N, K, "q4_k".parse()?)?;
    ctx.layer(&ctx.load(&host)?, describe)
}

/// Layer output from separate buffers. D holds `before`.
fn separately(ctx: &Context, layer: &Linear, m: usize, x: &[f16], before: &[f16]) -> Result<Vec<f16>, Error> {
    let (x, residual, mut d) = (ctx.upload(x)?, ctx.upload(before)?, ctx.allocate(2 * m * N)?);
    let mut workspace = ctx.workspace(layer.prepare([m])?)?;
    let args = layer.args(&x, &mut d).residual(&residual).workspace(&mut workspace);
    layer.run(&ctx.default_stream(), m, args)?;
    ctx.download(&d)
}

#[test]
fn x_and_d_of_one_arena_and_a_residual_in_d_give_the_same_bits() -> Result<(), Error> {
    for ctx in devices("x_and_d_of_one_arena_and_a_residual_in_d_give_the_same_bits") {
        let id = ctx.info().id;
        let stream = ctx.default_stream();
        let added = layer(&ctx, |p| p.x_dtype(DType::F16).residual(DType::F16))?;
        let in_place = layer(&ctx, |p| p.x_dtype(DType::F16).residual_in_d())?;
        let mut workspace = ctx.workspace(in_place.prepare(TOKENS)?)?;
        for m in TOKENS {
            let x: Vec<f16> = values(2, m * K).into_iter().map(f16::from_f32).collect();
            let before: Vec<f16> = values(3, m * N).into_iter().map(f16::from_f32).collect();
            let expected = separately(&ctx, &added, m, &x, &before)?;
            assert!(expected.iter().any(|v| *v != f16::ZERO), "{id}");

            // Views of one buffer. Bytes between and after
            // them must not change.
            let (x_len, d_at) = (2 * m * K, 2 * m * K + 16);
            let mut arena = ctx.upload(&vec![0x5au8; d_at + 2 * m * N + 6])?;
            ctx.upload_into(&x, &mut arena)?;
            ctx.upload_into(&before, arena.slice_mut(d_at..d_at + 2 * m * N)?)?;
            let (first, rest) = arena.split_at_mut(d_at)?;
            let args = in_place.args(first.view().slice(0..x_len)?, rest).workspace(&mut workspace);
            in_place.run(&stream, m, args)?;
            let bytes: Vec<u8> = ctx.download(&arena)?;
            let decoded = |bytes: &[u8]| DType::F16.decode(bytes);
            let wanted: Vec<f32> = expected.iter().map(|v| v.to_f32()).collect();
            assert_eq!(decoded(&bytes[d_at..][..2 * m * N]), wanted, "{id}, M={m}: views");
            let rest = bytes[x_len..d_at].iter().chain(&bytes[d_at + 2 * m * N..]);
            assert!(rest.into_iter().all(|&b| b == 0x5a), "{id}, M={m}: wrote elsewhere");

            // Buffers that own one part each.
            let mut x_part = ctx.allocate((2 * m * K).next_multiple_of(256) + 2 * m * N)?;
            let mut d_part: Buffer = x_part.split_off((2 * m * K).next_multiple_of(256))?;
            ctx.upload_into(&x, &mut x_part)?;
            ctx.upload_into(&before, &mut d_part)?;
            in_place.run(&stream, m, in_place.args(&x_part, &mut d_part).workspace(&mut workspace))?;
            drop(x_part);
            assert_eq!(ctx.download::<f16>(&d_part)?, expected, "{id}, M={m}: owned parts");
        }
    }
    Ok(())
}

#[test]
fn a_residual_in_d_is_no_operand() -> Result<(), Error> {
    let ctx = Context::open("cpu")?;
    let in_place = layer(&ctx, |p| p.residual(DType::F16).residual_in_d())?;
    let (x, residual, mut d) = (ctx.allocate(4 * K)?, ctx.allocate(4 * N)?, ctx.allocate(4 * N)?);
    let refused = in_place.run(&ctx.default_stream(), 1, in_place.args(&x, &mut d).residual(&residual));
    assert!(matches!(refused, Err(Error::UnexpectedOperand { operand: "residual" })), "{refused:?}");
    Ok(())
}

#[test]
fn a_processor_multiplies_slices_in_place_with_threads_of_ones_own() -> Result<(), Error> {
    let m = 3;
    let (x, mut d) = (values(4, m * K), vec![f32::NAN; m * N]);
    let (shared, own) = (Context::open("cpu")?, Context::from_device(cpu::open_with_threads(2)?));
    assert_eq!(own.info().units, 2);
    let layer_of = |ctx| layer(ctx, |problem| problem.x_alignment(4).d_alignment(4));
    let layer = layer_of(&own)?;
    let mut workspace = own.workspace(layer.prepare([m])?)?;
    let (x_operand, mut d_operand) = (cpu::slice(&x), cpu::slice_mut(&mut d));
    layer.run(&own.default_stream(), m, layer.args(&x_operand, &mut d_operand).workspace(&mut workspace))?;

    // In buffers, on the shared threads.
    let layer = layer_of(&shared)?;
    let (buffer, mut out) = (shared.upload(&x)?, shared.allocate(4 * m * N)?);
    layer.run(&shared.default_stream(), m, layer.args(&buffer, &mut out))?;
    assert_eq!(cpu::values::<f32>(&out)?, d);
    assert!(matches!(cpu::values::<f32>(out.slice(0..6)?), Err(Error::PartOfAValue { bytes: 6, width: 4 })));
    assert!(matches!(cpu::values::<f32>(out.slice(2..6)?), Err(Error::Misaligned { expected: 4, got: 2, .. })));
    cpu::values_mut::<f32>(&mut out)?.fill(1.0);
    assert_eq!(shared.download::<f32>(&out)?, vec![1.0; m * N]);
    Ok(())
}

#[test]
fn a_stream_waits_for_an_event_of_another() -> Result<(), Error> {
    for ctx in devices("a_stream_waits_for_an_event_of_another") {
        let layer = layer(&ctx, |p| p.x_dtype(DType::F16).d_dtype(DType::F16))?;
        let (first, second) = (ctx.new_stream()?, ctx.new_stream()?);
        let x: Vec<f16> = values(5, K).into_iter().map(f16::from_f32).collect();
        let (x, mut d, mut copy) = (ctx.upload(&x)?, ctx.allocate(2 * N)?, ctx.allocate(2 * N)?);
        let mut workspace = ctx.workspace(layer.prepare([1])?)?;
        layer.run(&first, 1, layer.args(&x, &mut d).workspace(&mut workspace))?;
        ctx.wait(&second, &ctx.record(&first)?)?;
        let conversion = qgemm_api::Conversion::new(1, N, DType::F16, DType::F16);
        ctx.plan_conversion(&conversion)?.run(&second, qgemm_api::ConversionArgs::new(&d, &mut copy))?;
        let got: Vec<f16> = ctx.download_on(&second, &copy)?;
        ctx.synchronize(&first)?;
        assert_eq!(got, ctx.download::<f16>(&d)?, "{}", ctx.info().id);

        let noop = Context::open("noop")?;
        let foreign = noop.wait(&noop.default_stream(), &ctx.record(&first)?);
        let on_host = matches!(ctx.info().id.kind, DeviceKind::Cpu | DeviceKind::Emu);
        assert!(on_host || matches!(foreign, Err(Error::Hal(HalError::WrongDevice { .. }))), "{foreign:?}");
    }
    Ok(())
}

#[test]
fn contexts_of_a_device_share_its_memory() -> Result<(), Error> {
    for ctx in devices("contexts_of_a_device_share_its_memory") {
        let other = Context::open(ctx.info().id)?;
        let buffer = ctx.upload(&[1.5f32, -2.0])?;
        assert_eq!(other.download::<f32>(&buffer)?, [1.5, -2.0], "{}", ctx.info().id);
        let stream = other.new_stream()?;
        assert_eq!(ctx.download_on::<f32>(&stream, &buffer)?, [1.5, -2.0], "{}", ctx.info().id);
    }
    Ok(())
}
