//! Attention, KV caches and indexers.

use qgemm_api::{
    Attention, AttentionArgs, BufferMut, BufferRef, Context, DType, Decay, Error, Indexer, IndexerArgs, Keys, KvAppend,
    KvAppendArgs, KvFormat, KvStrides, LinearAttention, LinearAttentionArgs, MaskBits, MergeAttention,
    MergeAttentionArgs, Queries,
};

use crate::{ALIGNMENTS, COUNTS, Refused, Room, Try, bad_alignment, beyond_31_bits, try_counts};

/// Runs attention with zeros in all operands.
fn attended(room: &mut Room, attention: &Attention, has_table: bool, has_lengths: bool) -> Result<(), Error> {
    let plan = room.ctx.plan_attention(attention)?;
    let [d, lse, ..] = &mut room.written[..] else { unreachable!() };
    let read: BufferRef<'_> = (&room.read).into();
    let mut args = AttentionArgs::new(read, read, read, d);
    let used = |is_used: bool| is_used.then_some(read);
    (args.block_table, args.kv_lengths) = (used(has_table), used(has_lengths));
    args.mask = used(plan.op().mask.is_some());
    args.lse = plan.op().lse.then(|| lse.into());
    args.workspace = Some(&mut room.workspace);
    plan.run(&room.ctx.default_stream(), args)
}

fn attention(heads: usize, kv_heads: usize, head_dim: usize) -> Attention {
    Attention::new(DType::F32, heads, kv_heads, head_dim, Queries::each(2, 2), Keys::each(3))
}

#[test]
fn attention_and_caches() {
    let cases: [(&str, Refused, Try); 12] = [
        (
            "Attention.heads",
            |n| !(1..=1 << 16).contains(&n),
            |room, n| attended(room, &attention(n, 1, 8), false, false),
        ),
        ("Attention.kv_heads", |n| !matches!(n, 1 | 2), |room, n| attended(room, &attention(2, n, 8), false, false)),
        ("Attention.head_dim", |_| true, |room, n| attended(room, &attention(1, 1, n), false, false)),
        ("Attention.v_dim", |_| true, |room, n| attended(room, &attention(1, 1, 8).v_dim(n), false, false)),
        ("Attention.window", |_| false, |room, n| attended(room, &attention(1, 1, 8).causal().window(n), false, false)),
        ("Queries::each.sequences", beyond_31_bits, |room, n| {
            let attention = Attention::new(DType::F32, 1, 1, 8, Queries::each(n, 1), Keys::each(1));
            attended(room, &attention, false, false)
        }),
        ("Queries::each.count", beyond_31_bits, |room, n| {
            let attention = Attention::new(DType::F32, 1, 1, 8, Queries::each(1, n), Keys::each(1));
            attended(room, &attention, false, false)
        }),
        ("Keys::each.count", beyond_31_bits, |room, n| {
            let attention = Attention::new(DType::F32, 1, 1, 8, Queries::each(1, 1), Keys::each(n));
            attended(room, &attention, false, false)
        }),
        ("Keys::lengths.capacity", beyond_31_bits, |room, n| {
            let attention = Attention::new(DType::F32, 1, 1, 8, Queries::each(1, 1), Keys::lengths(n));
            attended(room, &attention, false, true)
        }),
        ("Keys::paged.pages", beyond_31_bits, |room, n| {
            let attention = Attention::new(DType::F32, 1, 1, 8, Queries::each(1, 1), Keys::paged(n, 2, 1));
            attended(room, &attention, true, true)
        }),
        (
            "Keys::paged.page_size",
            |n| n == 0 || beyond_31_bits(n),
            |room, n| {
                let attention = Attention::new(DType::F32, 1, 1, 8, Queries::each(1, 1), Keys::paged(2, n, 1));
                attended(room, &attention, true, true)
            },
        ),
        (
            "Keys::paged.width",
            |n| n > i32::MAX as usize / 2,
            |room, n| {
                let attention = Attention::new(DType::F32, 1, 1, 8, Queries::each(1, 1), Keys::paged(2, 2, n));
                attended(room, &attention, true, true)
            },
        ),
    ];
    for (name, refused, attempt) in cases {
        try_counts(name, &COUNTS, refused, attempt);
    }
    let ctx = Context::open("cpu").expect("always there");
    let numbers = COUNTS.into_iter().filter(|&n| n <= i32::MAX as usize);
    for most in numbers {
        let keys = Keys::offsets(4, most);
        ctx.plan_attention(&Attention::new(DType::F32, 1, 1, 8, Queries::offsets(1, 4, most), keys.most(most)))
            .unwrap_or_else(|error| panic!("Queries::offsets.most, Keys::offsets.most, Keys.most = {most}: {error}"));
        ctx.plan_attention(&attention(1, 1, 8).mask(MaskBits::shared().per_head())).expect("valid");
    }
    let masked: Try = |room, n| {
        let queries = Queries::offsets(1, n, n);
        let attention = Attention::new(DType::F32, 1, 1, 8, queries, Keys::each(1 << 30)).mask(MaskBits::of_tokens());
        room.ctx.plan_attention(&attention).map(drop)
    };
    try_counts("Attention.mask", &COUNTS, beyond_31_bits, masked);
    // Strides of two tokens and two heads. The last
    // element must be addressable.
    let far: Refused = |n| n >= 1 << 60;
    let strided: [(&str, Refused, Try); 4] = [
        ("Attention.q_strides", far, |room, n| {
            attended(room, &attention(2, 2, 8).q_strides(n as u64, 8), false, false)
        }),
        (
            "Attention.d_strides",
            |n| !(16..1 << 60).contains(&n),
            |room, n| attended(room, &attention(2, 2, 8).d_strides(n as u64, 8), false, false),
        ),
        ("Attention.k_strides.page", far, |room, n| {
            let strides = KvStrides { page: n as u64, token: 16, head: 8 };
            attended(room, &attention(2, 2, 8).k_strides(strides), false, false)
        }),
        ("Attention.v_strides.token", far, |room, n| {
            let strides = KvStrides { page: 48, token: n as u64, head: 8 };
            attended(room, &attention(2, 2, 8).v_strides(strides), false, false)
        }),
    ];
    for (name, refused, attempt) in strided {
        try_counts(name, &COUNTS, refused, attempt);
    }
    let alignments: [(&str, Try); 2] = [
        ("Attention.alignment", |room, n| attended(room, &attention(1, 1, 8).alignment(n), false, false)),
        ("Attention.kv_alignment", |room, n| attended(room, &attention(1, 1, 8).kv_alignment(n), false, false)),
    ];
    for (name, attempt) in alignments {
        try_counts(name, &ALIGNMENTS, bad_alignment, attempt);
    }
}

fn appended(room: &mut Room, append: &KvAppend) -> Result<(), Error> {
    let plan = room.ctx.plan_kv_append(append)?;
    let [q, k, v, ..] = &mut room.written[..] else { unreachable!() };
    let (q, k, v): (BufferMut<'_>, BufferMut<'_>, BufferMut<'_>) = (q.into(), k.into(), v.into());
    let mut args = KvAppendArgs::new(&room.read, &room.read, k, v);
    args.q = (plan.op().heads > 0).then_some(q);
    plan.run(&room.ctx.default_stream(), args)
}

#[test]
fn appends_and_indexers() {
    fn of(heads: usize, kv_heads: usize, head_dim: usize) -> KvAppend {
        KvAppend::new(DType::F32, heads, kv_heads, head_dim, Queries::each(2, 2), Keys::each(3))
    }
    fn in_place(room: &mut Room, heads: usize, head_dim: usize) -> Result<(), Error> {
        let append = KvAppend::in_place(DType::F32, heads, head_dim, Queries::each(2, 2), Keys::each(3)).hadamard();
        let plan = room.ctx.plan_kv_append(&append)?;
        plan.run(&room.ctx.default_stream(), KvAppendArgs::in_place(&mut room.written[0]))
    }
    let far: Refused = |n| n >= 1 << 60;
    let cases: [(&str, Refused, Try); 11] = [
        ("KvAppend::in_place.heads", |n| !(1..=1 << 16).contains(&n), |room, n| in_place(room, n, 8)),
        ("KvAppend::in_place.head_dim", |_| true, |room, n| in_place(room, 1, n)),
        ("KvAppend.heads", |n| n > 1 << 16, |room, n| appended(room, &of(n, 1, 8))),
        ("KvAppend.kv_heads", |n| !(1..=1 << 16).contains(&n), |room, n| appended(room, &of(2, n, 8))),
        ("KvAppend.head_dim", |_| true, |room, n| appended(room, &of(1, 1, n))),
        ("KvAppend.v_dim", |_| true, |room, n| appended(room, &of(1, 1, 8).v_dim(n))),
        (
            "KvAppend.q_strides",
            |n| !(16..1 << 60).contains(&n),
            |room, n| appended(room, &of(2, 1, 8).q_strides(n as u64, 8)),
        ),
        ("KvAppend.new_k_strides", far, |room, n| appended(room, &of(1, 2, 8).new_k_strides(n as u64, 8))),
        ("KvAppend.new_v_strides", far, |room, n| appended(room, &of(1, 2, 8).new_v_strides(16, n as u64))),
        (
            "KvAppend.k_strides",
            |n| !(48..1 << 60).contains(&n),
            |room, n| appended(room, &of(1, 2, 8).k_strides(KvStrides { page: n as u64, token: 16, head: 8 })),
        ),
        (
            "KvAppend.v_strides",
            |n| !(88..1 << 60).contains(&n),
            |room, n| {
                // The first heads of three tokens of two sequences span 88 elements.
                appended(room, &of(1, 2, 8).v_strides(KvStrides { page: 48, token: 16, head: n as u64 }))
            },
        ),
    ];
    for (name, refused, attempt) in cases {
        try_counts(name, &COUNTS, refused, attempt);
    }
    let alignments: [(&str, Try); 2] = [
        ("KvAppend.alignment", |room, n| appended(room, &of(1, 1, 8).alignment(n))),
        ("KvAppend.kv_alignment", |room, n| appended(room, &of(1, 1, 8).kv_alignment(n))),
    ];
    for (name, attempt) in alignments {
        try_counts(name, &ALIGNMENTS, bad_alignment, attempt);
    }

    fn indexed(room: &mut Room, indexer: &Indexer) -> Result<(), Error> {
        let plan = room.ctx.plan_indexer(indexer)?;
        let [result, ..] = &mut room.written[..] else { unreachable!() };
        let read: BufferRef<'_> = (&room.read).into();
        let mut args = IndexerArgs::new(read, read, read, result).workspace(&mut room.workspace);
        if plan.op().paging().width > 0 {
            (args.lengths, args.block_table) = (Some(read), Some(read));
        }
        plan.run(&room.ctx.default_stream(), args)
    }
    fn of_keys(queries: usize, keys: usize) -> Indexer {
        Indexer::new(KvFormat::Plain(DType::F16), queries, 1, 16, keys)
    }
    let cases: [(&str, Refused, Try); 12] = [
        ("Indexer.queries", beyond_31_bits, |room, n| indexed(room, &of_keys(n, 2))),
        (
            "Indexer.heads",
            |n| !(1..=1 << 16).contains(&n),
            |room, n| indexed(room, &Indexer::new(KvFormat::Plain(DType::F16), 1, n, 16, 2)),
        ),
        ("Indexer.features", |_| true, |room, n| indexed(room, &Indexer::new(KvFormat::Plain(DType::F16), 1, 1, n, 2))),
        ("Indexer.keys", beyond_31_bits, |room, n| indexed(room, &of_keys(1, n))),
        ("Indexer.best", |n| n > Indexer::MOST_CHOSEN, |room, n| indexed(room, &of_keys(1, 2).best(n))),
        ("Indexer.paged.sequences", |n| !matches!(n, 1 | 2), |room, n| indexed(room, &of_keys(2, 0).paged(n, 2, 2, 1))),
        ("Indexer.paged.pages", beyond_31_bits, |room, n| indexed(room, &of_keys(2, 0).paged(1, n, 2, 1))),
        (
            "Indexer.paged.page_size",
            |n| n == 0 || beyond_31_bits(n),
            |room, n| indexed(room, &of_keys(2, 0).paged(1, 2, n, 1)),
        ),
        (
            "Indexer.paged.width",
            |n| n > i32::MAX as usize / 2,
            |room, n| room.ctx.plan_indexer(&of_keys(2, 0).paged(1, 2, 2, n)).map(drop),
        ),
        ("Indexer.q_strides", |n| n >= 1 << 62, |room, n| indexed(room, &of_keys(2, 2).q_strides(n as u64, 0))),
        (
            "Indexer.weights_stride",
            |n| !(1..1 << 60).contains(&n),
            |room, n| indexed(room, &of_keys(2, 2).weights_stride(n as u64)),
        ),
        (
            "Indexer.scores_stride",
            |n| !(2..1 << 60).contains(&n),
            |room, n| indexed(room, &of_keys(2, 2).scores_stride(n as u64)),
        ),
    ];
    for (name, refused, attempt) in cases {
        try_counts(name, &COUNTS, refused, attempt);
    }
    try_counts(
        "Indexer.k_stride",
        &COUNTS,
        |n| n >= 1 << 62,
        |room, n| indexed(room, &of_keys(2, 2).k_stride(n as u64)),
    );
    try_counts(
        "Indexer.page_strides",
        &COUNTS,
        |n| n >= 1 << 61,
        |room, n| indexed(room, &of_keys(2, 0).paged(1, 2, 2, 1).page_strides(n as u64, n as u64)),
    );
    try_counts(
        "Indexer.alignment",
        &ALIGNMENTS,
        |n| !n.is_power_of_two() || n < 2,
        |room, n| indexed(room, &of_keys(2, 2).alignment(n)),
    );
}

#[test]
fn merges() {
    fn merged(room: &mut Room, merge: &MergeAttention) -> Result<(), Error> {
        let plan = room.ctx.plan_merge_attention(merge)?;
        let [d, lse, ..] = &mut room.written[..] else { unreachable!() };
        let args = MergeAttentionArgs::new(&room.read, &room.read, d);
        plan.run(&room.ctx.default_stream(), if plan.op().lse { args.lse(lse) } else { args })
    }
    fn of(parts: usize, tokens: usize, heads: usize, dim: usize) -> MergeAttention {
        MergeAttention::new(DType::F32, parts, tokens, heads, dim).log_sum_exp()
    }
    let far: Refused = |n| n >= 1 << 60;
    let cases: [(&str, Refused, Try); 9] = [
        (
            "MergeAttention.parts",
            |n| !(1..=MergeAttention::MOST_PARTS).contains(&n),
            |room, n| merged(room, &of(n, 2, 2, 8)),
        ),
        ("MergeAttention.tokens", beyond_31_bits, |room, n| merged(room, &of(2, n, 2, 8))),
        ("MergeAttention.heads", |n| !(1..=1 << 16).contains(&n), |room, n| merged(room, &of(2, 2, n, 8))),
        ("MergeAttention.dim", |_| true, |room, n| merged(room, &of(2, 2, 2, n))),
        ("MergeAttention.part_strides.part", far, |room, n| {
            merged(room, &of(2, 2, 2, 8).part_strides(n as u64, 16, 8))
        }),
        ("MergeAttention.part_strides.token", far, |room, n| {
            merged(room, &of(2, 2, 2, 8).part_strides(32, n as u64, 8))
        }),
        ("MergeAttention.part_strides.head", far, |room, n| {
            merged(room, &of(2, 2, 2, 8).part_strides(32, 16, n as u64))
        }),
        (
            "MergeAttention.d_strides.token",
            |n| !(16..1 << 60).contains(&n),
            |room, n| merged(room, &of(2, 2, 2, 8).d_strides(n as u64, 8)),
        ),
        (
            "MergeAttention.d_strides.head",
            // Heads follow tokens of 8 features, 16 in all.
            |n| !(16..1 << 60).contains(&n),
            |room, n| merged(room, &of(2, 2, 2, 8).d_strides(8, n as u64)),
        ),
    ];
    for (name, refused, attempt) in cases {
        try_counts(name, &COUNTS, refused, attempt);
    }
    let dims = [0, 4, 8, 12, 64, 568, 576, 584];
    try_counts(
        "MergeAttention.dim",
        &dims,
        |n| n == 0 || n > 576 || !n.is_multiple_of(8),
        |room, n| merged(room, &of(2, 2, 2, n)),
    );
    let alignments: [(&str, Try); 2] = [
        ("MergeAttention.alignment", |room, n| merged(room, &of(2, 2, 2, 8).alignment(n))),
        ("MergeAttention.d_alignment", |room, n| merged(room, &of(2, 2, 2, 8).d_alignment(n))),
    ];
    for (name, attempt) in alignments {
        try_counts(name, &ALIGNMENTS, bad_alignment, attempt);
    }
}

#[test]
fn linear_attention() {
    fn attended(room: &mut Room, attention: &LinearAttention) -> Result<(), Error> {
        let plan = room.ctx.plan_linear_attention(attention)?;
        let [states, d, ..] = &mut room.written[..] else { unreachable!() };
        let read: BufferRef<'_> = (&room.read).into();
        let mut args = LinearAttentionArgs::new(read, read, read, states, d).workspace(&mut room.workspace);
        let op = plan.op();
        let used = |is_used: bool| is_used.then_some(read);
        (args.decay, args.beta) = (used(op.decay.is_some()), used(op.beta.is_some()));
        (args.slots, args.advance, args.pending) = (used(op.slot_indices), used(op.advance), used(op.pending));
        plan.run(&room.ctx.default_stream(), args)
    }
    fn of(sequences: usize, each: usize, heads: usize, dim: usize) -> LinearAttention {
        LinearAttention::new(DType::F32, heads, dim, Queries::each(sequences, each), 0)
    }
    let far: Refused = |n| n >= 1 << 60;
    let cases: [(&str, Refused, Try); 10] = [
        ("LinearAttention.sequences", beyond_31_bits, |room, n| attended(room, &of(n, 1, 1, 16))),
        ("LinearAttention.tokens", beyond_31_bits, |room, n| attended(room, &of(1, n, 1, 16))),
        ("LinearAttention.heads", |n| !(1..=1 << 16).contains(&n), |room, n| attended(room, &of(1, 2, n, 16))),
        ("LinearAttention.key_heads", |n| !matches!(n, 1 | 2), |room, n| attended(room, &of(1, 2, 2, 16).key_heads(n))),
        (
            "LinearAttention.slots",
            |n| beyond_31_bits(n) || n == 1,
            |room, n| attended(room, &LinearAttention::new(DType::F32, 1, 16, Queries::each(2, 1), n)),
        ),
        (
            "LinearAttention.slot_stride",
            |n| n < 256 || n % 4 != 0 || n >= 1 << 60,
            |room, n| {
                let attention = LinearAttention::new(DType::F32, 1, 16, Queries::each(2, 1), 2);
                attended(room, &attention.slot_indices().slot_stride(n as u64))
            },
        ),
        ("LinearAttention.q_strides", far, |room, n| attended(room, &of(1, 2, 2, 16).q_strides(n as u64, n as u64))),
        ("LinearAttention.v_strides", far, |room, n| attended(room, &of(1, 2, 2, 16).v_strides(n as u64, n as u64))),
        ("LinearAttention.decay_stride", far, |room, n| {
            attended(room, &of(1, 2, 2, 16).decay(Decay::per_feature()).decay_stride(n as u64))
        }),
        ("LinearAttention.beta_stride", far, |room, n| {
            attended(room, &of(1, 2, 2, 16).beta().beta_stride(n as u64).advance().pending())
        }),
    ];
    for (name, refused, attempt) in cases {
        try_counts(name, &COUNTS, refused, attempt);
    }
    let dims = [0, 8, 16, 24, 64, 240, 256, 272];
    let refused: Refused = |n| n == 0 || n > 256 || !n.is_multiple_of(16);
    try_counts("LinearAttention.dim", &dims, refused, |room, n| attended(room, &of(1, 1, 1, n)));
    try_counts("LinearAttention.v_dim", &dims, refused, |room, n| attended(room, &of(1, 1, 1, 16).v_dim(n)));
    try_counts("LinearAttention.alignment", &ALIGNMENTS, bad_alignment, |room, n| {
        attended(room, &of(1, 2, 2, 16).alignment(n))
    });
}
