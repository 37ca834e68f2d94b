//! Matmul: refusals and their messages.

use qgemm_api::{Context, DType, Error, FactorFormat, Matmul, MatmulArgs};

const F32: DType = DType::F32;

fn matmul() -> Matmul {
    Matmul::new([3, 4, 5], F32, F32, F32)
}

#[test]
fn wrong_descriptions_say_what_was_expected() {
    type Check = fn(&Error) -> bool;
    let cases: [(&str, Matmul, Check); 9] = [
        ("rows of A overlap", matmul().a_row_stride(4), |e| {
            matches!(e, Error::StrideTooSmall { operand: "A", expected: 5, got: 4 })
        }),
        ("stored rows of B overlap", matmul().b_transposed().b_row_stride(4), |e| {
            matches!(e, Error::StrideTooSmall { operand: "B", expected: 5, got: 4 })
        }),
        ("alpha is infinite", matmul().alpha(f32::INFINITY), |e| {
            matches!(e, Error::NonFiniteScalar { name: "alpha", .. })
        }),
        ("beta is NaN", matmul().accumulate(f32::NAN), |e| matches!(e, Error::NonFiniteScalar { name: "beta", .. })),
        ("K is too large", Matmul::new([1, 1, 1 << 32], F32, F32, F32), |e| {
            matches!(e, Error::DimensionTooLarge { name: "K", .. })
        }),
        ("matrices of D overlap", matmul().batch(2).d_batch_stride(11), |e| {
            matches!(e, Error::OverlappingMatrices { operand: "D", batch_stride: 11, row_stride: 4 })
        }),
        (
            "they lie side by side in rows that are too short",
            matmul().batch(3).d_batch_stride(4).d_row_stride(11),
            |e| matches!(e, Error::OverlappingMatrices { operand: "D", .. }),
        ),
        ("plain numbers have a factor for all of them", matmul().b_scaled(), |e| {
            matches!(e, Error::ScaledPlainFactor { operand: "B", dtype: DType::F32 })
        }),
        ("the batch overflows", matmul().batch(1 << 30).a_batch_stride(1 << 40), |e| {
            matches!(e, Error::BatchOverflow { operand: "A", .. })
        }),
    ];
    let ctx = Context::open("cpu").expect("always there");
    for (what, matmul, is_right) in cases {
        let error = ctx.plan_matmul(&matmul).expect_err(what);
        assert!(is_right(&error), "{what}: {error}");
    }
    let beside = matmul().batch(3).d_batch_stride(4).d_row_stride(12);
    assert!(ctx.plan_matmul(&beside).is_ok());
}

#[test]
fn wrong_operands_are_refused_and_nothing_is_written() {
    let ctx = Context::open("cpu").expect("always there");
    let bytes = |values: usize| ctx.upload(&F32.encode(&vec![1.0; values])).expect("memory");
    let (a, b, c) = (bytes(15), bytes(20), bytes(12));
    let stream = ctx.default_stream();
    let run = |matmul: &Matmul, args: MatmulArgs<'_>| ctx.plan_matmul(matmul).expect("valid").run(&stream, args);
    let mut d = bytes(12);
    let short = run(&matmul().batch(2), MatmulArgs::new(&a, &b, &mut d));
    assert!(matches!(short, Err(Error::BufferTooShort { operand: "A", expected: 120, got: 60 })), "{short:?}");
    let missing = run(&matmul().c(1.0, F32), MatmulArgs::new(&a, &b, &mut d));
    assert!(matches!(missing, Err(Error::MissingOperand { operand: "C", .. })), "{missing:?}");
    let unexpected = run(&matmul(), MatmulArgs::new(&a, &b, &mut d).bias(&c));
    assert!(matches!(unexpected, Err(Error::UnexpectedOperand { operand: "bias" })), "{unexpected:?}");
    assert_eq!(F32.decode(&ctx.download(&d).expect("fits")), [1.0; 12]);
    // With beta = 0, C is optional.
    run(&matmul().c(0.0, F32), MatmulArgs::new(&a, &b, &mut d)).expect("runs");
    assert_eq!(F32.decode(&ctx.download(&d).expect("fits")), [5.0; 12]);
}

#[test]
fn factors_of_all_of_e4m3_come_if_and_only_if_the_product_has_them() {
    let ctx = Context::open("cpu").expect("always there");
    let stream = ctx.default_stream();
    // Ones, at any address.
    let codes = ctx.upload(&[0x38u8; 16]).expect("memory");
    let a = codes.slice(1..16).expect("fits");
    let b = ctx.upload(&F32.encode(&[1.0; 20])).expect("memory");
    let scale = ctx.upload(&[0.5f32, 3.0]).expect("memory");
    let of_e4m3 = Matmul::new([3, 4, 5], FactorFormat::E4M3, F32, F32).alignment(1, 16);
    let mut d = ctx.upload(&F32.encode(&[7.0; 12])).expect("memory");
    let plain = ctx.plan_matmul(&of_e4m3).expect("valid");
    let scaled = ctx.plan_matmul(&of_e4m3.a_scaled()).expect("valid");
    let missing = scaled.run(&stream, MatmulArgs::new(a, &b, &mut d));
    assert!(matches!(missing, Err(Error::MissingOperand { operand: "A's factor", .. })), "{missing:?}");
    let unexpected = plain.run(&stream, MatmulArgs::new(a, &b, &mut d).a_scale(&scale));
    assert!(matches!(unexpected, Err(Error::UnexpectedOperand { operand: "A's factor" })), "{unexpected:?}");
    assert_eq!(F32.decode(&ctx.download(&d).expect("fits")), [7.0; 12]);
    plain.run(&stream, MatmulArgs::new(a, &b, &mut d)).expect("runs");
    assert_eq!(F32.decode(&ctx.download(&d).expect("fits")), [5.0; 12]);
    let second = scale.slice(4..8).expect("fits");
    scaled.run(&stream, MatmulArgs::new(a, &b, &mut d).a_scale(second)).expect("runs");
    assert_eq!(F32.decode(&ctx.download(&d).expect("fits")), [15.0; 12]);
}

#[test]
fn what_is_empty_writes_nothing_and_what_adds_nothing_up_writes_zeros() {
    let ctx = Context::open("cpu").expect("always there");
    let empty = ctx.allocate(0).expect("memory");
    let mut d = ctx.upload(&F32.encode(&[7.0; 6])).expect("memory");
    for shape in [[0, 4, 5], [3, 0, 5]] {
        let plan = ctx.plan_matmul(&Matmul::new(shape, F32, F32, F32).a_batch_stride(0)).expect("valid");
        assert!(plan.sequence().is_none() && plan.kernel_id().is_none() && plan.workspace_bytes() == 0);
    }
    let plan = ctx.plan_matmul(&Matmul::new([2, 3, 0], F32, F32, F32)).expect("valid");
    plan.run(&ctx.default_stream(), MatmulArgs::new(&empty, &empty, &mut d)).expect("runs");
    assert_eq!(F32.decode(&ctx.download(&d).expect("fits")), [0.0; 6]);
    assert!(plan.to_string().starts_with("matmul_nn_f32_f32 for 1 x 2 x 3 x 0, nn"), "{plan}");
}
