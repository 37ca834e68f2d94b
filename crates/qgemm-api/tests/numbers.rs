//! CPU results against a naive f64 product, for every kind of operand.
//! The conformance suites cover all formats.

use qgemm_api::{Args, Context, DType, Format, HostWeight, Plan, Problem, Weight, WeightOrder, XPrecision, quantize};

fn cpu() -> Context {
    Context::open("cpu").expect("always there")
}

/// `count` pseudo-random values in −1..1.
fn values(seed: u32, count: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..count).map(|_| next()).collect()
}

fn quantized(format: &str, n: usize, k: usize) -> HostWeight {
    let format: Format = format.parse().expect("a format");
    quantize(&values(7, n * k), n, k, format).expect("K suits").0
}

fn dequantized(weight: &HostWeight) -> Vec<f32> {
    (0..weight.n()).flat_map(|n| weight.dequantize_row(n)).collect()
}

/// `X[m,k] · W[n,k]ᵀ` in f64.
fn product(x: &[f32], w: &[f32], k: usize) -> Vec<f64> {
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum();
    x.chunks_exact(k).flat_map(|x| w.chunks_exact(k).map(move |w| dot(x, w))).collect()
}

/// `values` rounded to `dtype`.
fn rounded(dtype: DType, values: &[f32]) -> Vec<f32> {
    dtype.decode(&dtype.encode(values))
}

#[track_caller]
fn assert_close(got: &[f32], expected: &[f64], limit: f64) {
    assert_eq!(got.len(), expected.len());
    let error: f64 = got.iter().zip(expected).map(|(&g, &e)| (f64::from(g) - e).powi(2)).sum();
    let size: f64 = expected.iter().map(|e| e * e).sum();
    assert!(size > 0.0 && error <= limit * size, "NMSE {:e}, limit {limit:e}", error / size);
}

/// Limit of the NMSE: the kernel's error and the rounding of D.
fn limit(d: DType) -> f64 {
    1e-10
        + match d {
            DType::F32 => 0.0,
            DType::F16 => 2.4e-7,
            DType::BF16 => 1.6e-5,
        }
}

/// `rows` of `columns` values, each followed by `gap` filler elements, as bytes.
fn spread(dtype: DType, values: &[f32], columns: usize, gap: usize, filler: f32) -> Vec<u8> {
    let rows = values.chunks_exact(columns);
    let spread: Vec<f32> = rows.flat_map(|row| row.iter().copied().chain(std::iter::repeat_n(filler, gap))).collect();
    dtype.encode(&spread)
}

fn run(ctx: &Context, plan: &Plan, weight: &Weight, x: &[u8], d: &mut [u8]) {
    let x = ctx.upload(x).expect("memory");
    let mut device_d = ctx.upload(d).expect("memory");
    let mut workspace = ctx.workspace(plan.workspace_bytes()).expect("memory");
    let args = Args::new(&x, weight, &mut device_d).workspace(&mut workspace);
    plan.run(&ctx.default_stream(), args).expect("valid arguments");
    d.copy_from_slice(&ctx.download(&device_d).expect("a download"));
}

/// Problem with unrounded X, because the tests are about operands.
fn problem(weight: &Weight, m: usize) -> Problem {
    Problem::new(weight, m).x_precision(XPrecision::Exact)
}

/// NMSE of 8-bit activations, which [`Context::linear`] allows.
const QUANTIZED: f64 = 5e-5;

#[test]
fn host_slices_give_the_product() {
    let ctx = cpu();
    for (format, m, n, k) in [("q4_0", 1, 7, 64), ("q8_0", 5, 33, 96), ("int4_g128", 3, 5, 200), ("q6_k", 9, 4, 256)] {
        let host = quantized(format, n, k);
        let weight = ctx.load(&host).expect("memory");
        let (x, bias) = (values(1, m * k), values(2, n));
        for dtype in DType::ALL {
            let mut expected = product(&rounded(dtype, &x), &dequantized(&host), k);
            for row in expected.chunks_exact_mut(n) {
                row.iter_mut().zip(&bias).for_each(|(d, &b)| *d += f64::from(b));
            }
            for (allowed, limit) in [(XPrecision::Exact, limit(DType::F32)), (XPrecision::Auto, QUANTIZED)] {
                let got = ctx.linear_with(&weight, &x, m, dtype, allowed, Some(&bias)).expect("valid");
                assert_close(&got, &expected, limit);
            }
        }
    }
}

#[test]
fn strides_leave_the_gaps_alone() {
    let ctx = cpu();
    let (m, n, k) = (4, 9, 64);
    let host = quantized("q4_0", n, k);
    let weight = ctx.load(&host).expect("memory");
    let x = values(3, m * k);
    for dtype in DType::ALL {
        let expected = product(&rounded(dtype, &x), &dequantized(&host), k);
        for (x_gap, d_gap) in [(0, 0), (1, 3), (8, 7)] {
            let problem = problem(&weight, m)
                .x_dtype(dtype)
                .d_dtype(dtype)
                .x_row_stride((k + x_gap) as u64)
                .d_row_stride((n + d_gap) as u64);
            let plan = ctx.plan(&problem).expect("valid");
            let mut d = spread(dtype, &vec![f32::NAN; m * n], n, d_gap, 7.5);
            run(&ctx, &plan, &weight, &spread(dtype, &x, k, x_gap, f32::NAN), &mut d);
            let rows = dtype.decode(&d);
            let (got, gaps): (Vec<_>, Vec<_>) = rows.iter().enumerate().partition(|(i, _)| i % (n + d_gap) < n);
            assert!(gaps.iter().all(|&(_, &v)| v == 7.5), "{dtype}: a gap of {d_gap} was written");
            let got: Vec<f32> = got.into_iter().map(|(_, &v)| v).collect();
            assert_close(&got, &expected, limit(dtype));
        }
    }
}

#[test]
fn the_stride_of_a_single_row_may_be_anything() {
    let ctx = cpu();
    let (n, k) = (5, 32);
    let host = quantized("q4_0", n, k);
    let weight = ctx.load(&host).expect("memory");
    let x = values(4, k);
    for stride in [1 << 40, 1 << 62, u64::MAX - 15, u64::MAX] {
        let problem = problem(&weight, 1).x_row_stride(stride).d_row_stride(stride).c(1.0, DType::F32);
        let plan = ctx.plan(&problem.c_row_stride(stride)).expect("valid");
        let (x_buffer, c) = (DType::F32.encode(&x), DType::F32.encode(&[0.0; 5]));
        let upload = |bytes: &[u8]| ctx.upload(bytes).expect("memory");
        let (x_buffer, c, mut d) = (upload(&x_buffer), upload(&c), ctx.allocate(4 * n).expect("memory"));
        let mut workspace = ctx.workspace(plan.workspace_bytes()).expect("memory");
        let args = Args::new(&x_buffer, &weight, &mut d);
        let args = args.c(&c).workspace(&mut workspace);
        plan.run(&ctx.default_stream(), args).expect("valid");
        let got = DType::F32.decode(&ctx.download(&d).expect("done"));
        assert_close(&got, &product(&x, &dequantized(&host), k), limit(DType::F32));
    }
}

#[test]
fn the_last_row_needs_no_gap_behind_it() {
    let ctx = cpu();
    let (m, n, k) = (3, 5, 32);
    let host = quantized("q4_0", n, k);
    let weight = ctx.load(&host).expect("memory");
    let x = values(4, m * k);
    let plan = ctx.plan(&problem(&weight, m).x_row_stride(40).d_row_stride(8)).expect("valid");
    let mut bytes = spread(DType::F32, &x, k, 8, f32::NAN);
    bytes.truncate(4 * (2 * 40 + 32));
    let mut d = vec![0; 4 * (2 * 8 + 5)];
    run(&ctx, &plan, &weight, &bytes, &mut d);
    let got: Vec<f32> = DType::F32.decode(&d).chunks(8).flat_map(|row| row[..n].to_vec()).collect();
    assert_close(&got, &product(&x, &dequantized(&host), k), limit(DType::F32));
}

#[test]
fn alpha_c_and_bias_add_up() {
    let ctx = cpu();
    let (m, n, k, c_gap) = (6, 11, 96, 5);
    let host = quantized("q8_0", n, k);
    let weight = ctx.load(&host).expect("memory");
    let (x, c, bias) = (values(5, m * k), values(6, m * n), values(8, n));
    for (c_dtype, bias_dtype) in [(DType::F32, DType::F16), (DType::F16, DType::BF16), (DType::BF16, DType::F32)] {
        let problem =
            problem(&weight, m).alpha(-0.75).c(2.5, c_dtype).c_row_stride((n + c_gap) as u64).bias(bias_dtype);
        let plan = ctx.plan(&problem).expect("valid");
        let upload = |bytes: &[u8]| ctx.upload(bytes).expect("memory");
        let device_x = upload(&DType::F32.encode(&x));
        let device_c = upload(&spread(c_dtype, &c, n, c_gap, f32::NAN));
        let device_bias = upload(&bias_dtype.encode(&bias));
        let mut d = ctx.allocate(4 * m * n).expect("memory");
        let mut workspace = ctx.workspace(plan.workspace_bytes()).expect("memory");
        let args = Args::new(&device_x, &weight, &mut d).c(&device_c).bias(&device_bias).workspace(&mut workspace);
        plan.run(&ctx.default_stream(), args).expect("valid arguments");
        let (c, bias) = (rounded(c_dtype, &c), rounded(bias_dtype, &bias));
        let mut expected = product(&x, &dequantized(&host), k);
        for (i, d) in expected.iter_mut().enumerate() {
            *d = -0.75 * *d + 2.5 * f64::from(c[i]) + f64::from(bias[i % n]);
        }
        assert_close(&DType::F32.decode(&ctx.download(&d).expect("a download")), &expected, limit(DType::F32));
    }
}

#[test]
fn c_is_not_read_when_beta_is_zero() {
    let ctx = cpu();
    let (m, n, k) = (2, 4, 32);
    let host = quantized("q4_0", n, k);
    let weight = ctx.load(&host).expect("memory");
    let x = values(9, m * k);
    let plan = ctx.plan(&problem(&weight, m).c(0.0, DType::F32)).expect("valid");
    let device_x = ctx.upload(&DType::F32.encode(&x)).expect("memory");
    let c = ctx.upload(&DType::F32.encode(&vec![f32::NAN; m * n])).expect("memory");
    let mut d = ctx.allocate(4 * m * n).expect("memory");
    let mut workspace = ctx.workspace(plan.workspace_bytes()).expect("memory");
    let args = Args::new(&device_x, &weight, &mut d).c(&c).workspace(&mut workspace);
    plan.run(&ctx.default_stream(), args).expect("valid arguments");
    let got = DType::F32.decode(&ctx.download(&d).expect("a download"));
    assert_close(&got, &product(&x, &dequantized(&host), k), limit(DType::F32));
}

#[test]
fn unquantized_weights_take_every_layout() {
    let ctx = cpu();
    let (m, n, k) = (5, 7, 12);
    let transpose = |values: &[f32], columns: usize| -> Vec<f32> {
        (0..columns).flat_map(|c| values.iter().skip(c).step_by(columns).copied()).collect()
    };
    for dtype in DType::ALL {
        let (x, w) = (rounded(dtype, &values(10, m * k)), rounded(dtype, &values(11, n * k)));
        let expected = product(&x, &w, k);
        for order in [WeightOrder::NK, WeightOrder::KN] {
            let stored = match order {
                WeightOrder::NK => w.clone(),
                WeightOrder::KN => transpose(&w, k),
            };
            let weight = ctx.load_dense(&dtype.encode(&stored), dtype, n, k, order).expect("memory");
            for (transposed, gap) in [(false, 0), (false, 3), (true, 0), (true, 2)] {
                let mut problem = problem(&weight, m).x_dtype(dtype).d_dtype(DType::F32);
                let stored = if transposed {
                    problem = problem.x_transposed().x_row_stride((m + gap) as u64);
                    spread(dtype, &transpose(&x, k), m, gap, f32::NAN)
                } else {
                    problem = problem.x_row_stride((k + gap) as u64);
                    spread(dtype, &x, k, gap, f32::NAN)
                };
                let plan = ctx.plan(&problem).expect("valid");
                let mut d = vec![0; 4 * m * n];
                run(&ctx, &plan, &weight, &stored, &mut d);
                assert_close(&DType::F32.decode(&d), &expected, limit(DType::F32));
            }
        }
    }
}

#[test]
fn act_order_weights_multiply_their_own_columns() {
    let ctx = cpu();
    let (m, n, k) = (3, 6, 40);
    // 40 input features in groups of 32. The second group is
    // padded with 24 empty columns.
    let stored = quantized("int4_g32", n, 64);
    let order: Vec<u32> = (0..64).map(|i| if i < k { (i * 7 % k) as u32 } else { u32::MAX }).collect();
    let host = HostWeight::with_k_order(stored.format(), n, k, stored.blocks().to_vec().into(), order.clone())
        .expect("a permutation");
    let weight = ctx.load(&host).expect("memory");
    assert_eq!((weight.k(), weight.stored_k()), (40, 64));
    let x = values(12, m * k);
    // Independent of `dequantize_row`: multiplies stored columns
    // with permuted activations.
    let permuted: Vec<f32> =
        x.chunks_exact(k).flat_map(|x| order.iter().map(|&c| x.get(c as usize).copied().unwrap_or(0.0))).collect();
    let expected = product(&permuted, &dequantized(&stored), 64);
    assert_close(&ctx.linear(&weight, &x, m, XPrecision::Auto).expect("valid"), &expected, QUANTIZED);
}

#[test]
fn row_scales_are_applied() {
    let ctx = cpu();
    let (m, n, k) = (2, 5, 64);
    let host = quantized("int8_channel", n, k);
    assert!(host.row_scale().is_some());
    let weight = ctx.load(&host).expect("memory");
    let x = values(13, m * k);
    let expected = product(&x, &dequantized(&host), k);
    assert_close(&ctx.linear(&weight, &x, m, XPrecision::Auto).expect("valid"), &expected, QUANTIZED);
}

#[test]
fn offsets_beyond_31_bits_are_reached() {
    let ctx = cpu();
    let (m, n, k) = (2, 3, 32);
    let row_stride = (1usize << 31) + 8;
    // Two rows of f16, the second one beyond 4 GiB.
    let bytes = 2 * (row_stride + k);
    if ctx.info().memory_bytes < 3 * bytes as u64 {
        let why = format!("{} bytes of memory are too few", ctx.info().memory_bytes);
        qgemm_testkit::skipped("offsets beyond 31 bits", &why);
        return;
    }
    let host = quantized("q4_0", n, k);
    let weight = ctx.load(&host).expect("memory");
    let x = rounded(DType::F16, &values(40, m * k));
    let expected = product(&x, &dequantized(&host), k);
    let mut large = ctx.allocate(bytes).expect("memory");
    let stream = ctx.default_stream();

    let plan = ctx.plan(&problem(&weight, m).x_dtype(DType::F16).d_row_stride(row_stride as u64)).expect("valid");
    let small = ctx.upload(&DType::F16.encode(&x)).expect("memory");
    let args = Args::new(&small, &weight, &mut large);
    plan.run(&stream, args).expect("valid arguments");
    let rows = [0, row_stride].map(|start| {
        let row = large.slice(2 * start..2 * (start + n)).expect("in range");
        DType::F16.decode(&ctx.download(row).expect("a download"))
    });
    assert_close(&rows.concat(), &expected, limit(DType::F16));

    let problem = problem(&weight, m).x_dtype(DType::F16).d_dtype(DType::F32).x_row_stride(row_stride as u64);
    let plan = ctx.plan(&problem).expect("valid");
    for (row, start) in x.chunks_exact(k).zip([0, row_stride]) {
        let view = large.slice_mut(2 * start..2 * (start + k)).expect("in range");
        ctx.upload_into(&DType::F16.encode(row), view).expect("it fits");
    }
    let mut d = ctx.allocate(4 * m * n).expect("memory");
    let args = Args::new(&large, &weight, &mut d);
    plan.run(&stream, args).expect("valid arguments");
    assert_close(&DType::F32.decode(&ctx.download(&d).expect("a download")), &expected, limit(DType::F32));
}

#[test]
fn one_workspace_serves_many_plans_and_runs() {
    let ctx = cpu();
    let (n, k) = (65, 512);
    let host = quantized("q4_0", n, k);
    let weight = ctx.load(&host).expect("memory");
    let plans: Vec<(usize, Plan)> = [1, 2, 9, 64].map(|m| (m, ctx.plan(&problem(&weight, m)).expect("valid"))).into();
    let bytes = plans.iter().map(|(_, plan)| plan.workspace_bytes()).max().unwrap_or(0);
    let mut workspace = ctx.workspace(bytes).expect("memory");
    let mut first: Vec<Vec<u8>> = Vec::new();
    for round in 0..3 {
        for (i, (m, plan)) in plans.iter().enumerate() {
            let x = values(14 + i as u32, m * k);
            let device_x = ctx.upload(&DType::F32.encode(&x)).expect("memory");
            let mut d = ctx.allocate(4 * m * n).expect("memory");
            let args = Args::new(&device_x, &weight, &mut d).workspace(&mut workspace);
            plan.run(&ctx.default_stream(), args).expect("valid arguments");
            let got = ctx.download(&d).expect("a download");
            if round == 0 {
                assert_close(&DType::F32.decode(&got), &product(&x, &dequantized(&host), k), limit(DType::F32));
                first.push(got);
            } else {
                assert!(got == first[i], "round {round}, {m} tokens: other bits than at first");
            }
        }
    }
}

#[test]
fn contexts_weights_and_plans_are_shared_between_threads() {
    fn assert_shared<T: Send + Sync>() {}
    assert_shared::<Context>();
    assert_shared::<Weight>();
    assert_shared::<Plan>();
    assert_shared::<Problem>();
    let ctx = cpu();
    let (m, n, k) = (3, 17, 64);
    let host = quantized("q8_0", n, k);
    let weight = ctx.load(&host).expect("memory");
    let plan = ctx.plan(&problem(&weight, m)).expect("valid");
    std::thread::scope(|scope| {
        for seed in 0..4 {
            let (ctx, plan, weight, host) = (&ctx, &plan, &weight, &host);
            scope.spawn(move || {
                let x = values(20 + seed, m * k);
                let mut d = vec![0; 4 * m * n];
                run(ctx, plan, weight, &DType::F32.encode(&x), &mut d);
                let expected = product(&x, &dequantized(host), k);
                assert_close(&DType::F32.decode(&d), &expected, limit(DType::F32));
            });
        }
    });
}

#[test]
fn batch_invariant_rows_do_not_depend_on_their_batch() {
    let ctx = cpu();
    let (n, k, batches) = (37, 256, [1, 2, 7, 40]);
    let weight = ctx.load(&quantized("q4_0", n, k)).expect("memory");
    let x = values(30, 40 * k);
    let rows = batches.map(|m| {
        let plan = ctx.plan(&problem(&weight, m).batch_invariant(true)).expect("valid");
        let mut d = vec![0; 4 * m * n];
        run(&ctx, &plan, &weight, &DType::F32.encode(&x[..m * k]), &mut d);
        d
    });
    for (m, row) in batches.iter().zip(&rows) {
        assert!(rows[3].starts_with(row), "the first {m} rows");
    }
}
