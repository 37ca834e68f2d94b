//! Products on the caller's wgpu device, queue and buffers.
#![cfg(feature = "wgpu")]

use qgemm_api::wgpu::wgpu::{self, BufferUsages, Features};
use qgemm_api::wgpu::{from_device, wrap_buffer};
use qgemm_api::{
    Args, Context, DType, Error, ExpertArgs, ExpertProblem, HostExperts, HostWeight, Matmul, MatmulArgs, Problem,
    quantize,
};

#[test]
fn results_are_in_the_callers_buffer_for_what_is_submitted_next() -> Result<(), Error> {
    let Some((device, queue)) = engine(|_| ()) else { return Ok(()) };
    let ctx = Context::from_device(from_device(&device, &queue)?);
    let (host, _) = quantize(&[0.5; 48 * 128], 48, 128, "q8_0".parse()?)?;
    let weight = ctx.load(&host)?;
    let plan = ctx.plan(&Problem::new(&weight, 2).x_dtype(DType::F32).d_dtype(DType::F32))?;

    let make = |values: usize, usage| {
        let size = values as u64 * 4;
        device.create_buffer(&wgpu::BufferDescriptor { label: None, size, usage, mapped_at_creation: false })
    };
    let x = make(2 * 128, BufferUsages::STORAGE | BufferUsages::COPY_DST);
    let d = make(2 * 48, BufferUsages::STORAGE | BufferUsages::COPY_SRC);
    let read = make(2 * 48, BufferUsages::MAP_READ | BufferUsages::COPY_DST);
    let (ours_x, mut ours_d) = (wrap_buffer(&**ctx.device(), &x)?, wrap_buffer(&**ctx.device(), &d)?);

    // The caller's work before and after a launch,
    // in submission order.
    queue.write_buffer(&x, 0, &DType::F32.encode(&[1.0; 2 * 128]));
    plan.run(&ctx.default_stream(), Args::new(&ours_x, &weight, &mut ours_d))?;
    let mut encoder = device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
    encoder.copy_buffer_to_buffer(&d, 0, &read, 0, read.size());
    queue.submit([encoder.finish()]);
    read.slice(..).map_async(wgpu::MapMode::Read, |mapped| mapped.expect("maps"));
    device.poll(wgpu::PollType::wait_indefinitely()).expect("finishes");
    let view = read.slice(..).get_mapped_range().expect("mapped");
    let values = DType::F32.decode(&view);
    assert!(values.len() == 96 && values.iter().all(|v| (v - 64.0).abs() < 0.1), "{values:?}");
    Ok(())
}

/// The weights of all experts may exceed a binding. A dispatch gets
/// as many experts as fit; a single one must fit.
#[test]
fn a_stack_of_experts_may_be_larger_than_a_binding() -> Result<(), Error> {
    const LIMIT: u64 = 64 << 10;
    let (experts, n, k, tokens) = (7, 64, 256, 5);
    let values = |count: usize, seed: usize| -> Vec<f32> {
        (0..count).map(|i| ((i * 37 + seed * 11) % 101) as f32 / 50.0 - 1.0).collect()
    };
    let of_expert = |expert: usize, n: usize| -> Result<HostWeight, Error> {
        Ok(quantize(&values(n * k, expert), n, k, "q8_0".parse()?)?.0)
    };
    let all = |n: usize| -> Result<HostExperts, Error> {
        let weights: Vec<_> = (0..experts).map(|expert| of_expert(expert, n)).collect::<Result<_, _>>()?;
        Ok(HostExperts::new(&weights)?)
    };
    let ids: Vec<u32> = (0..tokens * 2).map(|slot| (slot as u32 * 5 + 2) % experts as u32).collect();
    let run = |ctx: &Context, grouped: bool| -> Result<Vec<f32>, Error> {
        let weights = ctx.load_experts(&all(n)?)?;
        let each = |each: Problem| each.x_dtype(DType::F32).d_dtype(DType::F32);
        let (rows, problem) = match grouped {
            true => (tokens * 2, ExpertProblem::contiguous(&weights, tokens * 2).each(each)),
            false => (tokens, ExpertProblem::indexed(&weights, tokens, 2).each(each)),
        };
        let plan = ctx.plan_experts(&problem)?;
        let x = ctx.upload(&values(rows * k, 3))?;
        let offsets: Vec<u32> = (0..=experts as u32).map(|e| (e * 2).min(tokens as u32 * 2)).collect();
        let index = if grouped { ctx.upload(&offsets)? } else { ctx.upload(&ids)? };
        let mut d = ctx.allocate(tokens * 2 * n * 4)?;
        let mut status = ctx.allocate(8)?;
        let mut workspace = ctx.workspace(plan.workspace_bytes())?;
        let args = ExpertArgs::new(&x, &weights, &index, &mut d).status(&mut status).workspace(&mut workspace);
        plan.run(&ctx.default_stream(), args)?;
        ctx.download(&d)
    };
    let Some((device, queue)) = engine(|limits| limits.max_storage_buffer_binding_size = LIMIT) else { return Ok(()) };
    let (small, whole) = (Context::from_device(from_device(&device, &queue)?), Context::open("wgpu:0")?);
    for grouped in [false, true] {
        let got = run(&small, grouped)?;
        assert!(got.iter().any(|&value| value != 0.0));
        assert_eq!(got, run(&whole, grouped)?);
    }
    // A single expert exceeds the binding.
    let large = small.load_experts(&all(512)?)?;
    let refused = small.plan_experts(&ExpertProblem::indexed(&large, 1, 1)).expect_err("too large");
    assert!(refused.to_string().contains("the weight of an expert takes"), "{refused}");
    Ok(())
}

/// Grouped products may exceed a binding, with their
/// matrices and with the common rows. Each dispatch gets some
/// products and some rows.
#[test]
fn groups_of_rows_may_be_larger_than_a_binding() -> Result<(), Error> {
    const LIMIT: u64 = 64 << 10;
    let (products, m, n, k) = (6, 700, 40, 48);
    let values = |count: usize, seed: usize| -> Vec<f32> {
        (0..count).map(|i| ((i * 37 + seed * 11) % 101) as f32 / 50.0 - 1.0).collect()
    };
    // A descending offset, rows outside all groups, and groups that
    // end within a dispatch and beyond it.
    let offsets = [5u32, 300, 290, 310, 640, 640, 690];
    let run = |ctx: &Context| -> Result<Vec<f32>, Error> {
        let matmul = Matmul::new([m, n, k], DType::F32, DType::F32, DType::F32).b_transposed();
        let plan = ctx.plan_matmul(&matmul.rows_grouped(products).accumulate(1.0))?;
        let (a, b) = (ctx.upload(&values(m * k, 1))?, ctx.upload(&values(products * n * k, 2))?);
        let (offsets, mut d) = (ctx.upload(&offsets)?, ctx.upload(&values(m * n, 3))?);
        let mut workspace = ctx.workspace(plan.workspace_bytes())?;
        let args = MatmulArgs::new(&a, &b, &mut d).offsets(&offsets).workspace(&mut workspace);
        plan.run(&ctx.default_stream(), args)?;
        ctx.download(&d)
    };
    let Some((device, queue)) = engine(|limits| limits.max_storage_buffer_binding_size = LIMIT) else { return Ok(()) };
    let (small, whole) = (Context::from_device(from_device(&device, &queue)?), Context::open("wgpu:0")?);
    let (got, held) = (run(&small)?, values(m * n, 3));
    assert_eq!(got, run(&whole)?);
    let (a, b) = (values(m * k, 1), values(products * n * k, 2));
    let ends = [300, 300, 310, 640, 640, 690];
    for (row, got) in got.chunks(n).enumerate() {
        let owner = if row < 5 { None } else { ends.iter().position(|&end| row < end) };
        for (column, &got) in got.iter().enumerate() {
            let held = held[row * n + column];
            let Some(product) = owner else {
                assert_eq!(got, held, "row {row} is no one's");
                continue;
            };
            let b = &b[(product * n + column) * k..][..k];
            let sum: f32 = a[row * k..][..k].iter().zip(b).map(|(a, b)| a * b).sum();
            assert!((got - held - sum).abs() < 1e-3, "row {row}, column {column}: {got} is not {held} + {sum}");
        }
    }
    Ok(())
}

/// Device as an engine opens it. `None` without an adapter,
/// with the reason printed.
fn engine(change: impl FnOnce(&mut wgpu::Limits)) -> Option<(wgpu::Device, wgpu::Queue)> {
    let instance = wgpu::Instance::new(wgpu::InstanceDescriptor::new_without_display_handle());
    let adapter = match pollster::block_on(instance.request_adapter(&wgpu::RequestAdapterOptions::default())) {
        Ok(adapter) => adapter,
        Err(error) => {
            qgemm_testkit::skipped("tests on a caller's wgpu device", &error.to_string());
            return None;
        }
    };
    let mut required_limits = adapter.limits();
    change(&mut required_limits);
    let descriptor =
        wgpu::DeviceDescriptor { required_features: Features::IMMEDIATES, required_limits, ..Default::default() };
    Some(pollster::block_on(adapter.request_device(&descriptor)).expect("the adapter has them"))
}
