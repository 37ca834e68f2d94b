//! Norm kernels as prologues of products: gathered
//! columns, with columns of zeros. The conformance
//! suite checks the rest.

use qgemm_api::{Context, DType, ElementType, Error, NO_COLUMN, Norm, NormArgs, NormFunction, NormKind};
use qgemm_hal::{CheckedNorm, Dense, HalError, NormLaunch, NormOperand, Operands, XOverwrite};
use qgemm_testkit::normalized_row;

/// D for two rows of X, in f32.
fn gathered(ctx: &Context, function: NormFunction, x: &[f32], order: &[u32], [gamma, beta]: [&[f32]; 2]) -> Vec<f32> {
    let (rows, columns, d_columns) = (2, x.len() / 2, order.len());
    let op = CheckedNorm {
        rows,
        columns,
        d_columns,
        function,
        x: Dense::rows_of(DType::F32, columns),
        d: Dense::rows_of(DType::F32, d_columns),
        added: None,
        x_overwrite: XOverwrite::Own,
        gathers: true,
        quantized: None,
        groups: 1,
        gate: None,
    };
    let device = ctx.device();
    let family = device.catalog().norm[0];
    let config = family.configs(&op, ctx.info()).expect("served")[0];
    let sequence = family.prepare(&**device, &op, &NormLaunch { config, estimate: 0.0 }).expect("a kernel");
    let order: Vec<u8> = order.iter().flat_map(|column| column.to_le_bytes()).collect();
    let (x, order) = (ctx.upload(x).expect("memory"), ctx.upload(&order).expect("memory"));
    let (gamma, beta) = (ctx.upload(gamma).expect("memory"), ctx.upload(beta).expect("memory"));
    let mut d = ctx.upload(&vec![f32::NAN; rows * d_columns]).expect("memory");
    let mut operands = Operands::new();
    operands.read(NormOperand::X, (&x).into());
    operands.read(NormOperand::Order, (&order).into());
    operands.read(NormOperand::Gamma, (&gamma).into());
    operands.read(NormOperand::Beta, (&beta).into());
    operands.write(NormOperand::D, (&mut d).into());
    sequence.run(&ctx.default_stream(), operands).expect("a launch");
    ctx.download(&d).expect("a download")
}

#[test]
fn columns_are_gathered_whether_rows_are_short_or_long() {
    for device in ["emu:sm75", "emu:sm90"] {
        let ctx = match Context::open(device) {
            Ok(ctx) => ctx,
            Err(Error::Hal(why @ HalError::NoDevice { .. })) => {
                return qgemm_testkit::skipped("gathered columns of norms", &why.to_string());
            }
            Err(other) => panic!("{other}"),
        };
        for columns in [20_usize, 300, 2000, 17_000] {
            let function = NormFunction::layer(1e-5).gamma(DType::F32).beta(DType::F32);
            let x: Vec<f32> = (0..2 * columns).map(|i| (i * 37 % 101) as f32 * 0.1 - 3.0).collect();
            let [gamma, beta] =
                [0.5, -0.25].map(|by| (0..columns).map(|i| 1.0 + by * (i % 5) as f32).collect::<Vec<_>>());
            let mut order: Vec<u32> = (0..columns as u32).rev().collect();
            order.resize(columns.next_multiple_of(64) + 3, NO_COLUMN);
            let got = gathered(&ctx, function, &x, &order, [&gamma, &beta]);
            for (row, got) in got.chunks_exact(order.len()).enumerate() {
                let expected = normalized_row(&function, &x[row * columns..][..columns], &gamma, &beta);
                for (column, (&got, &source)) in got.iter().zip(&order).enumerate() {
                    let expected = expected.get(source as usize).copied().unwrap_or(0.0);
                    let error = (f64::from(got) - expected).abs();
                    assert!(error <= 1e-5, "{device}: {columns} columns, [{row}, {column}]: {got}, not {expected}");
                }
            }
        }
    }
}

/// Norm of identical bf16 rows, two numbers a word.
fn of_alike_rows(ctx: &Context, function: NormFunction, rows: usize, row: &[u32], of_columns: &[u32]) -> Vec<u32> {
    let norm = Norm::new(rows, row.len() * 2, DType::BF16, function);
    let plan = ctx.plan_norm(&norm).expect("a plan");
    let upload = |words: &[u32]| ctx.upload(words).expect("memory").typed(DType::BF16);
    let (x, of_columns) = (upload(&row.repeat(rows)), upload(of_columns));
    let mut d = upload(&vec![0u32; rows * row.len()]);
    let args = NormArgs::new(&x, &mut d).gamma(&of_columns);
    let args = if function.beta.is_some() { args.beta(&of_columns) } else { args };
    plan.run(&ctx.default_stream(), args).expect("a launch");
    ctx.download(&d.typed(ElementType::Bytes)).expect("a download")
}

#[test]
fn bits_of_a_row_do_not_depend_on_how_many_there_are() {
    let ctx = match Context::open("emu:sm80") {
        Ok(ctx) => ctx,
        Err(Error::Hal(why @ HalError::NoDevice { .. })) => {
            return qgemm_testkit::skipped("bits of rows of norms", &why.to_string());
        }
        Err(other) => panic!("{other}"),
    };
    // More rows than a GPU runs at once use another kernel.
    // In both, the last columns are less than a thread's share.
    let (columns, many) = (8184, ctx.info().units as usize * 2 + 1);
    for (function, factor) in
        [(NormFunction::rms(1e-6), 1.0), (NormFunction::layer(1e-6), 1.0), (NormFunction::rms(0.0), 1e30)]
    {
        let function = function.gamma(DType::BF16);
        let function = if function.kind == NormKind::Layer { function.beta(DType::BF16) } else { function };
        let bf16 = |value: f32| value.to_bits() >> 16;
        let pairs = |of: &dyn Fn(usize) -> f32| -> Vec<u32> {
            (0..columns).step_by(2).map(|i| bf16(of(i)) | bf16(of(i + 1)) << 16).collect()
        };
        let row = pairs(&|i| ((i * 37 % 1013) as f32 * 0.01 - 3.0) * factor);
        let of_columns = pairs(&|i| 0.5 + (i % 7) as f32);
        let few = of_alike_rows(&ctx, function, 1, &row, &of_columns);
        let all = of_alike_rows(&ctx, function, many, &row, &of_columns);
        assert!(all.chunks_exact(columns / 2).all(|row| row == few), "{function:?}");
    }
}
