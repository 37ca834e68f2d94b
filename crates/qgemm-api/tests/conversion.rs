//! Conversion: refusals at planning and at a run, and results. Without
//! results, on the no-op device.

use qgemm_api::tuning::KernelId;
use qgemm_api::{Buffer, Context, Conversion, ConversionArgs, ConversionPlan, DType, DeviceId, Error, NO_COLUMN};

const ROWS: usize = 3;
const COLUMNS: usize = 40;

fn noop() -> Context {
    Context::open("noop").expect("always there")
}

/// f32 to f16.
fn conversion(rows: usize) -> Conversion {
    Conversion::new(rows, COLUMNS, DType::F32, DType::F16)
}

#[test]
fn conversions_are_checked_when_planned() {
    type Expect = fn(&Error) -> bool;
    let huge = 1usize << 32;
    let f32_to = |to| Conversion::new(ROWS, COLUMNS, DType::F32, to);
    let table: [(&str, Conversion, Expect); 15] = [
        ("rows of X overlap", conversion(ROWS).x_row_stride(39), |e| {
            matches!(e, Error::StrideTooSmall { operand: "X", expected: 40, got: 39 })
        }),
        ("columns of a transposed X overlap", conversion(ROWS).x_transposed().x_row_stride(2), |e| {
            matches!(e, Error::StrideTooSmall { operand: "X", expected: 3, got: 2 })
        }),
        ("rows of D overlap", conversion(ROWS).d_columns(64).d_row_stride(63), |e| {
            matches!(e, Error::StrideTooSmall { operand: "D", expected: 64, got: 63 })
        }),
        ("0 rows do not excuse a bad stride", conversion(0).d_row_stride(1), |e| {
            matches!(e, Error::StrideTooSmall { operand: "D", expected: 40, got: 1 })
        }),
        ("X overflows 64 bits", conversion(ROWS).x_row_stride(u64::MAX), |e| {
            matches!(e, Error::ExtentOverflow { operand: "X", rows: 3, row_stride: u64::MAX })
        }),
        ("a transposed X overflows the address space", conversion(ROWS).x_transposed().x_row_stride(1 << 60), |e| {
            matches!(e, Error::ExtentOverflow { operand: "X", rows: 40, .. })
        }),
        ("D overflows the address space, not 64 bits", conversion(ROWS).d_row_stride(1 << 61), |e| {
            matches!(e, Error::ExtentOverflow { operand: "D", .. })
        }),
        ("too many rows for 32 bits", conversion(huge), |e| {
            matches!(e, Error::DimensionTooLarge { name: "rows", limit: 0xffff_ffff, .. })
        }),
        ("too many columns for 32 bits", Conversion::new(1, huge, DType::F32, DType::F32), |e| {
            matches!(e, Error::DimensionTooLarge { name: "columns", .. })
        }),
        ("too many columns of D for 32 bits", conversion(1).gathered(huge), |e| {
            matches!(e, Error::DimensionTooLarge { name: "columns of D", .. })
        }),
        ("D has columns and X has none", Conversion::new(ROWS, 0, DType::F32, DType::F32).d_columns(2), |e| {
            matches!(e, Error::NoColumns { d_columns: 2 })
        }),
        ("factors of rows in bf16", f32_to(DType::BF16).row_factors(), |e| {
            matches!(e, Error::RowFactorsOf { expected: DType::F16, got: DType::BF16 })
        }),
        ("factors of rows in f32", f32_to(DType::F32).row_factors(), |e| {
            matches!(e, Error::RowFactorsOf { got: DType::F32, .. })
        }),
        ("an alignment below the element's", conversion(ROWS).x_alignment(2), |e| {
            matches!(e, Error::Misaligned { operand: "X", expected: 4, got: 2 })
        }),
        ("an alignment that is no power of two", conversion(ROWS).d_alignment(6), |e| {
            matches!(e, Error::Misaligned { operand: "D", expected: 2, got: 6 })
        }),
    ];
    let ctx = noop();
    for (what, conversion, expected) in table {
        match ctx.plan_conversion(&conversion) {
            Ok(_) => panic!("{what}: planned"),
            Err(error) => assert!(expected(&error), "{what}: {error:?}"),
        }
    }
}

/// Operands of one run, each replaceable.
struct Operands {
    x: Buffer,
    d: Buffer,
    order: Option<Buffer>,
    row_factors: Option<Buffer>,
}

impl Operands {
    fn fitting(ctx: &Context) -> Self {
        let bytes = |count: usize| ctx.allocate(count).expect("memory");
        Self {
            x: bytes(4 * ROWS * COLUMNS),
            d: bytes(2 * ROWS * COLUMNS),
            order: Some(bytes(4 * COLUMNS)),
            row_factors: Some(bytes(4 * ROWS)),
        }
    }

    fn run(&mut self, ctx: &Context, plan: &ConversionPlan) -> Result<(), Error> {
        let mut args = ConversionArgs::new(&self.x, &mut self.d);
        args.order = self.order.as_ref().map(Into::into);
        args.row_factors = self.row_factors.as_mut().map(Into::into);
        plan.run(&ctx.default_stream(), args)
    }
}

#[test]
fn operands_are_checked_when_run() {
    type Change = fn(&mut Operands, &Context);
    type Expect = fn(&Error) -> bool;
    let table: [(&str, Change, Expect); 9] = [
        (
            "X is a byte short",
            |o, ctx| o.x = ctx.allocate(4 * ROWS * COLUMNS - 1).expect("memory"),
            |e| matches!(e, Error::BufferTooShort { operand: "X", expected: 480, got: 479 }),
        ),
        (
            "D is a byte short",
            |o, ctx| o.d = ctx.allocate(2 * ROWS * COLUMNS - 1).expect("memory"),
            |e| matches!(e, Error::BufferTooShort { operand: "D", expected: 240, got: 239 }),
        ),
        (
            "the order is an entry short",
            |o, ctx| o.order = ctx.allocate(4 * COLUMNS - 4).ok(),
            |e| matches!(e, Error::BufferTooShort { operand: "column order", expected: 160, got: 156 }),
        ),
        (
            "the row factors are one short",
            |o, ctx| o.row_factors = ctx.allocate(4 * ROWS - 4).ok(),
            |e| matches!(e, Error::BufferTooShort { operand: "row factors", expected: 12, got: 8 }),
        ),
        ("no order", |o, _| o.order = None, |e| matches!(e, Error::MissingOperand { operand: "column order", .. })),
        (
            "no row factors",
            |o, _| o.row_factors = None,
            |e| matches!(e, Error::MissingOperand { operand: "row factors", .. }),
        ),
        (
            "X on another device",
            |o, _| o.x = Context::open("cpu").and_then(|c| c.allocate(1 << 12)).expect("memory"),
            |e| matches!(e, Error::WrongDevice { operand: "X", got: DeviceId::CPU, .. }),
        ),
        (
            "the order on another device",
            |o, _| o.order = Context::open("cpu").and_then(|c| c.allocate(1 << 12)).ok(),
            |e| matches!(e, Error::WrongDevice { operand: "column order", got: DeviceId::CPU, .. }),
        ),
        (
            "the row factors on another device",
            |o, _| o.row_factors = Context::open("cpu").and_then(|c| c.allocate(1 << 12)).ok(),
            |e| matches!(e, Error::WrongDevice { operand: "row factors", got: DeviceId::CPU, .. }),
        ),
    ];
    let ctx = noop();
    let plan = ctx.plan_conversion(&conversion(ROWS).gathered(COLUMNS).row_factors()).expect("valid");
    Operands::fitting(&ctx).run(&ctx, &plan).expect("everything fits");
    for (what, change, expected) in table {
        let mut operands = Operands::fitting(&ctx);
        change(&mut operands, &ctx);
        let error = operands.run(&ctx, &plan).expect_err(what);
        assert!(expected(&error), "{what}: {error:?}");
    }
    let plain = ctx.plan_conversion(&conversion(ROWS)).expect("valid");
    for operand in ["column order", "row factors"] {
        let mut operands = Operands::fitting(&ctx);
        match operand {
            "column order" => operands.row_factors = None,
            _ => operands.order = None,
        }
        let error = operands.run(&ctx, &plain).expect_err(operand);
        assert!(matches!(error, Error::UnexpectedOperand { operand: got } if got == operand), "{error:?}");
    }
}

#[test]
fn views_are_as_aligned_as_the_plan_asks() {
    let ctx = noop();
    let x = ctx.allocate(4 * ROWS * COLUMNS + 4).expect("memory");
    let mut d = ctx.allocate(2 * ROWS * COLUMNS + 2).expect("memory");
    let mut run = |conversion: Conversion| {
        let plan = ctx.plan_conversion(&conversion).expect("valid");
        let args = ConversionArgs::new(x.slice(4..x.len()).expect("fits"), d.slice_mut(2..242).expect("fits"));
        plan.run(&ctx.default_stream(), args)
    };
    let error = run(conversion(ROWS)).expect_err("X begins at byte 4");
    assert!(matches!(error, Error::Misaligned { operand: "X", expected: 16, got: 4 }), "{error:?}");
    let error = run(conversion(ROWS).x_alignment(4)).expect_err("D begins at byte 2");
    assert!(matches!(error, Error::Misaligned { operand: "D", expected: 16, got: 2 }), "{error:?}");
    run(conversion(ROWS).x_alignment(4).d_alignment(2)).expect("as stated");
}

#[test]
fn nothing_to_write_launches_nothing() {
    let ctx = noop();
    for conversion in [conversion(0), conversion(0).gathered(7).row_factors(), conversion(ROWS).d_columns(0)] {
        let plan = ctx.plan_conversion(&conversion).expect("valid");
        assert!(plan.sequence().is_none() && plan.kernel_id().is_none() && plan.kernel_name() == "none");
    }
    let plan = ctx.plan_conversion(&conversion(0)).expect("valid");
    let (x, mut d) = (ctx.allocate(0).expect("nothing"), ctx.allocate(0).expect("nothing"));
    plan.run(&ctx.default_stream(), ConversionArgs::new(&x, &mut d)).expect("0 rows");
    assert!(plan.to_string().starts_with("none for 0 x 40"), "{plan}");
}

#[test]
fn a_plan_says_what_it_launches() {
    let ctx = noop();
    let plan = ctx.plan_conversion(&conversion(ROWS).gathered(8)).expect("valid");
    let id: KernelId = plan.kernel_id().expect("it launches one");
    assert_eq!(id.operation(), "convert");
    let text = plan.to_string();
    assert!(text.contains(&id.to_string()) && text.contains("constant the column order"), "{text}");
    assert!(text.contains("write d") && !text.contains("row factors"), "{text}");
    assert_eq!(plan.bytes(), f64::from(3 * 8 * 4 + 3 * 8 * 2 + 8 * 4));
}

/// All operands at once, on a device that computes.
#[test]
fn rows_are_gathered_scaled_and_padded_on_the_cpu() {
    let ctx = Context::open("cpu").expect("always there");
    let plan = ctx
        .plan_conversion(
            &Conversion::new(2, 3, DType::F32, DType::F16).x_transposed().gathered(5).d_row_stride(7).row_factors(),
        )
        .expect("served");
    // Stored as [columns, rows]: rows 1, 2, 3 and 4e30, 5e30, infinity.
    let x = ctx.upload(&DType::F32.encode(&[1.0, 4e30, 2.0, 5e30, 3.0, f32::INFINITY])).expect("memory");
    let order = ctx.upload(&[2, NO_COLUMN, 0, 3, 1].map(u32::to_le_bytes).concat()).expect("memory");
    let mut d = ctx.upload(&DType::F16.encode(&[-9.0; 14])).expect("memory");
    let mut row_factors = ctx.allocate(8).expect("memory");
    let args = ConversionArgs::new(&x, &mut d).order(&order).row_factors(&mut row_factors);
    plan.run(&ctx.default_stream(), args).expect("valid arguments");
    let d = DType::F16.decode(&ctx.download(&d).expect("bytes"));
    let factors = DType::F32.decode(&ctx.download(&row_factors).expect("bytes"));
    assert_eq!(factors[0], 2f32.powi(-13));
    let rows: Vec<f32> = d.iter().enumerate().map(|(i, v)| v * if i % 7 < 5 { factors[i / 7] } else { 1.0 }).collect();
    assert_eq!(rows[..7], [3.0, 0.0, 1.0, 0.0, 2.0, -9.0, -9.0]);
    let near = |got: f32, expected: f32| (got / expected - 1.0).abs() < 2f32.powi(-11);
    assert!(rows[7] == f32::INFINITY && near(rows[9], 4e30) && near(rows[11], 5e30), "{rows:?}");
    assert_eq!([rows[8], rows[10], rows[12], rows[13]], [0.0, 0.0, -9.0, -9.0]);
}
