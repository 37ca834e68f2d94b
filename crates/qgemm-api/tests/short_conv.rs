//! Short convolutions: steps continue one another, guesses are accepted
//! by any prefix, and what does not fit is refused.

use qgemm_api::{Context, DType, Error, Queries, ShortConv, ShortConvArgs};

const CHANNELS: usize = 19;
const WIDTH: usize = 4;
const STATE: usize = (WIDTH - 1) * CHANNELS;

/// Numbers from −1 to 1.
fn numbers(seed: u32, count: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(1);
    let next = |_| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..count).map(next).collect()
}

/// One sequence of LFM2's form, with its state.
struct Sequence {
    ctx: Context,
    dtype: DType,
    /// Gates and input of each token: `[tokens, 3 · channels]`.
    rows: Vec<u8>,
    state: Vec<u8>,
}

impl Sequence {
    fn new(dtype: DType, tokens: usize) -> Result<Self, Error> {
        let rows = dtype.encode(&numbers(1, tokens * 3 * CHANNELS));
        Ok(Self { ctx: Context::open("cpu")?, dtype, rows, state: vec![0; STATE * dtype.bytes()] })
    }

    /// Results of tokens, of which some enter the state.
    fn step(&mut self, tokens: std::ops::Range<usize>, entering: Option<u32>) -> Result<Vec<u8>, Error> {
        let (ctx, width, row) = (&self.ctx, self.dtype.bytes(), 3 * CHANNELS as u64);
        let conv = ShortConv::new(self.dtype, CHANNELS, WIDTH, Queries::each(1, tokens.len()))
            .x_row_stride(row)
            .input_gate_row_stride(row)
            .output_gate_row_stride(row)
            .alignment(width)
            .bias()
            .silu()
            .state(1);
        let plan = ctx.plan_short_conv(&if entering.is_some() { conv.advance() } else { conv })?;
        let row_bytes = 3 * CHANNELS * width;
        let rows = ctx.upload(&self.rows[tokens.start * row_bytes..tokens.end * row_bytes])?;
        // B, C and x beside one another.
        let part = |i: usize| rows.slice(i * CHANNELS * width..rows.len() - (2 - i) * CHANNELS * width);
        let weight = ctx.upload(&numbers(2, CHANNELS * WIDTH))?;
        let bias = ctx.upload(&numbers(3, CHANNELS))?;
        let (slots, advance) = (ctx.upload(&[0i32])?, ctx.upload(&[entering.unwrap_or(0)])?);
        let (mut d, mut state) = (ctx.allocate(tokens.len() * CHANNELS * width)?, ctx.upload(&self.state)?);
        let mut args = ShortConvArgs::new(part(2)?, &weight, &mut d)
            .input_gate(part(0)?)
            .output_gate(part(1)?)
            .bias(&bias)
            .state(&mut state)
            .slots(&slots);
        args.advance = entering.map(|_| (&advance).into());
        plan.run(&ctx.default_stream(), args)?;
        self.state = ctx.download(&state)?;
        ctx.download(&d)
    }
}

#[test]
fn any_cut_into_steps_has_the_same_bits() -> Result<(), Error> {
    for dtype in DType::ALL {
        let mut whole = Sequence::new(dtype, 23)?;
        let all = whole.step(0..23, None)?;
        for cuts in [vec![0, 23], vec![0, 1, 2, 3, 4, 5, 6, 23], vec![0, 2, 5, 21, 22, 23]] {
            let mut steps = Sequence::new(dtype, 23)?;
            let parts = cuts.windows(2).map(|cut| steps.step(cut[0]..cut[1], None)).collect::<Result<Vec<_>, _>>()?;
            assert!(parts.concat() == all && steps.state == whole.state, "{dtype} {cuts:?}");
        }
    }
    Ok(())
}

#[test]
fn any_prefix_of_guesses_can_be_accepted() -> Result<(), Error> {
    for accepted in 0..=6 {
        let mut sequence = Sequence::new(DType::BF16, 20)?;
        let all = sequence.step(0..20, None)?;
        let mut guessing = Sequence::new(DType::BF16, 20)?;
        guessing.step(0..5, None)?;
        let before = guessing.state.clone();
        let verified = guessing.step(5..11, Some(0))?;
        let row = CHANNELS * 2;
        assert!(verified == all[5 * row..11 * row] && guessing.state == before);
        guessing.step(5..11, Some(accepted))?;
        let next = 5 + accepted as usize;
        assert_eq!(guessing.step(next..20, None)?, all[next * row..], "{accepted}");
        assert_eq!(guessing.state, sequence.state);
    }
    Ok(())
}

/// Whatever offsets, slots and counts say, nothing else is touched.
#[test]
fn hostile_indices_are_harmless() -> Result<(), Error> {
    let ctx = Context::open("cpu")?;
    let (sequences, tokens) = (3, 9);
    let conv = ShortConv::new(DType::F32, CHANNELS, WIDTH, Queries::offsets(sequences, tokens, 5)).state(2).advance();
    let plan = ctx.plan_short_conv(&conv)?;
    let (x, weight) = (ctx.upload(&numbers(1, tokens * CHANNELS))?, ctx.upload(&numbers(2, CHANNELS * WIDTH))?);
    let all = [[0, 9, 3, 5], [u32::MAX, 0, 7, 2], [8, 8, 8, u32::MAX], [9, 9, 9, 9], [5, 4, 3, 2]];
    for (offsets, slots) in all.into_iter().zip([[0, 0, 1], [i32::MIN, 2, i32::MAX], [1, 1, 1], [-1, 0, 1], [0, 1, 0]])
    {
        let (offsets, slots) = (ctx.upload(&offsets)?, ctx.upload(&slots)?);
        let advance = ctx.upload(&[u32::MAX, 0, 2])?;
        let (mut d, mut state) = (ctx.allocate(tokens * CHANNELS * 4)?, ctx.allocate(2 * STATE * 4)?);
        let args = ShortConvArgs::new(&x, &weight, &mut d).state(&mut state).slots(&slots);
        plan.run(&ctx.default_stream(), args.q_offsets(&offsets).advance(&advance))?;
        d.raw().check_guards()?;
        state.raw().check_guards()?;
    }
    Ok(())
}

#[test]
fn what_does_not_fit_is_refused() -> Result<(), Error> {
    let ctx = Context::open("cpu")?;
    let of = |channels, width| ShortConv::new(DType::F16, channels, width, Queries::each(2, 3));
    let plan = |conv: ShortConv| ctx.plan_short_conv(&conv);
    for conv in [of(8, 1), of(8, 5), of(0, 4), of(8, 4).state(0)] {
        assert!(matches!(plan(conv), Err(Error::OutOfRange { .. })));
    }
    assert!(matches!(plan(of(8, 4).x_row_stride(7)), Err(Error::StrideTooSmall { .. })));
    assert!(matches!(plan(of(8, 4).state(2).slot_stride(23)), Err(Error::StrideTooSmall { .. })));
    assert!(matches!(plan(of(8, 4).state(9).slot_stride(1 << 61)), Err(Error::ExtentOverflow { .. })));
    assert!(matches!(plan(of(8, 4).alignment(1)), Err(Error::Misaligned { .. })));

    let ready = plan(of(8, 4).state(2))?;
    let (x, weight, short) = (ctx.allocate(96)?, ctx.allocate(128)?, ctx.allocate(124)?);
    let (mut d, mut state, mut small) = (ctx.allocate(96)?, ctx.allocate(96)?, ctx.allocate(95)?);
    let slots = ctx.upload(&[0i32, 1])?;
    let stream = ctx.default_stream();
    let run = |args: ShortConvArgs<'_>| ready.run(&stream, args);
    assert!(matches!(run(ShortConvArgs::new(&x, &weight, &mut d)), Err(Error::MissingOperand { .. })));
    let args = ShortConvArgs::new(&x, &short, &mut d).state(&mut state).slots(&slots);
    assert!(matches!(run(args), Err(Error::BufferTooShort { expected: 128, got: 124, .. })));
    let args = ShortConvArgs::new(&x, &weight, &mut d).state(&mut small).slots(&slots);
    assert!(matches!(run(args), Err(Error::BufferTooShort { expected: 96, got: 95, .. })));
    let args = ShortConvArgs::new(&x, &weight, &mut d).state(&mut state).slots(&slots).bias(&weight);
    assert!(matches!(run(args), Err(Error::UnexpectedOperand { .. })));
    run(ShortConvArgs::new(&x, &weight, &mut d).state(&mut state).slots(&slots))?;
    assert_eq!(plan(ShortConv::new(DType::F16, 8, 4, Queries::each(0, 3)))?.kernel_name(), "none");
    Ok(())
}
