//! Splitting an operation into dispatches: kernels index in 32 bits,
//! and bindings and grids are limited.

use std::ops::Range;

use qgemm_formats::DType;
use qgemm_formats::prepack::SHARED_ROWS;
use qgemm_hal::{CheckedGemm, Dense, GemmOperand, Operand, TileConfig, Unsupported};

use crate::families::dispatch::{MARGIN, MAX_GROUPS, rows_that_fit, too_large};
use crate::weight_code::WeightCode;

/// Granularity of a dispatch's first row of W:
/// whole tiles of its layout.
pub(crate) const TILE_ROWS: usize = 2 * SHARED_ROWS;

/// A product as kernels see it, with a converted
/// X if there is a prologue. A quantized X is
/// seen as rows of words.
#[derive(Clone, Copy)]
pub(super) struct Product<'a> {
    pub op: &'a CheckedGemm,
    pub code: &'a WeightCode,
    pub x: Dense,
    pub x_columns: usize,
}

impl<'a> Product<'a> {
    pub fn new(op: &'a CheckedGemm, code: &'a WeightCode) -> Result<Self, Unsupported> {
        let (x, x_columns) = x_matrix(op)?;
        Ok(Self { op, code, x, x_columns })
    }
}

/// X as a matrix with its number of columns: its elements,
/// or the words of its codes.
///
/// # Errors
/// When X is quantized but has no planes.
pub(crate) fn x_matrix(op: &CheckedGemm) -> Result<(Dense, usize), Unsupported> {
    let Some(planes) = op.x.planes else { return Ok((op.plain_x()?, op.k)) };
    let words = |bytes: u64| bytes / DType::F32.bytes() as u64;
    let row_stride = words(planes.codes_row);
    let x = Dense { dtype: DType::F32, row_stride, col_stride: 1, aligned16: true };
    Ok((x, words(planes.parts.code_bytes(op.k) as u64) as usize))
}

/// Bytes of the scales of `rows` rows of X; 0
/// for an unquantized X.
pub(crate) fn x_scale_bytes(op: &CheckedGemm, rows: usize) -> usize {
    op.x.planes.map_or(0, |planes| (rows - 1) * planes.scales_row as usize + planes.parts.scale_bytes(op.k))
}

/// The part of an operation that one dispatch computes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Launch {
    /// Tokens.
    pub m: Range<usize>,
    /// Stored rows of W.
    pub rows: Range<usize>,
    /// Output segment.
    pub segment: usize,
}

/// Bytes from the first to the last element that a dispatch
/// touches; 0 for absent operands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Extents {
    pub x: usize,
    pub w: usize,
    pub row_scale: usize,
    pub k_order: usize,
    pub c: usize,
    pub bias: usize,
    pub token_scale: usize,
    pub residual: usize,
    pub d: usize,
}

impl Extents {
    /// Extents of `launch`, whose operands are known to fit.
    pub fn of(&Product { op, code, x, x_columns }: &Product<'_>, launch: &Launch) -> Self {
        let m = launch.m.len();
        let (_, features, of_d) = launch.output(op);
        let dense = |dense: &Dense, columns: usize| {
            let last = (m - 1) as u64 * dense.row_stride + (columns - 1) as u64 * dense.col_stride;
            (last as usize + 1) * dense.dtype.bytes()
        };
        Self {
            x: dense(&x, x_columns),
            w: launch.rows.len().div_ceil(TILE_ROWS) * code.row_of_tiles_bytes(op.stored_k),
            c: op.c.as_ref().map_or(0, |c| dense(c, op.out_features)),
            residual: op.residual.as_ref().map_or(0, |residual| dense(residual, op.out_features)),
            d: dense(&of_d, features.len()),
            ..Self::of_vectors(op, m)
        }
    }

    /// Extents of one-dimensional operands for `m` tokens. A dispatch binds
    /// all of them, whatever its rows.
    fn of_vectors(op: &CheckedGemm, m: usize) -> Self {
        Self {
            row_scale: if op.row_scale { op.stored_rows * 4 } else { 0 },
            k_order: match op.x.planes {
                // Columns of a given quantized X are in order, so its
                // scales use the binding of the order.
                Some(_) => x_scale_bytes(op, m),
                None if op.k_order => op.stored_k * 4,
                None => 0,
            },
            bias: op.bias.map_or(0, |dtype| op.bias_len() * dtype.bytes()),
            token_scale: if op.token_scale { m * 4 } else { 0 },
            ..Self::default()
        }
    }

    /// Offsets of a dispatch's tokens and rows.
    pub fn before(&Product { op, code, x, .. }: &Product<'_>, launch: &Launch) -> Self {
        let tokens = |dense: Dense| launch.m.start * dense.row_stride as usize * dense.dtype.bytes();
        Self {
            x: tokens(x),
            w: launch.rows.start / TILE_ROWS * code.row_of_tiles_bytes(op.stored_k),
            c: op.c.map_or(0, tokens),
            k_order: op.x.planes.map_or(0, |planes| launch.m.start * planes.scales_row as usize),
            token_scale: launch.m.start * 4,
            residual: op.residual.map_or(0, tokens),
            d: tokens(launch.output(op).2),
            ..Self::default()
        }
    }
}

impl Launch {
    /// The output that it writes: operand, features and matrix.
    pub fn output(&self, op: &CheckedGemm) -> (GemmOperand, Range<usize>, Dense) {
        op.outputs().nth(self.segment).unwrap_or((GemmOperand::D, 0..op.out_features, op.d))
    }

    /// Dispatches of `product` with tiles of `config` and
    /// bindings of at most `limit` bytes.
    ///
    /// # Errors
    /// The operand that exceeds the limit however it is split.
    pub fn of(product: &Product<'_>, config: &TileConfig, limit: u64) -> Result<Vec<Launch>, Unsupported> {
        let op = product.op;
        let sizes = [("M", op.m), ("the number of stored rows", op.stored_rows), ("K", op.k.max(op.stored_k))];
        for (name, size) in sizes {
            if size >= 1 << 31 {
                return Err(Unsupported::new(format!("{name} is {size}, and kernels count in 31 bits")));
            }
        }
        let rows = rows_a_launch(product, config, limit)?;
        let tokens = tokens_a_launch(product, config, limit)?;
        let ranges = |len: usize, step: usize| (0..len).step_by(step).map(move |at| at..(at + step).min(len));
        // An output is one binding, so each segment gets separate dispatches.
        let outputs = op.outputs().enumerate().map(|(segment, (_, features, _))| match op.segments.is_empty() {
            true => (segment, 0..op.stored_rows),
            false => (segment, features),
        });
        let of_output = |(segment, all): (usize, Range<usize>)| {
            let parts = ranges(all.len(), rows).map(move |part| all.start + part.start..all.start + part.end);
            parts.flat_map(move |rows| ranges(op.m, tokens).map(move |m| Launch { m, rows: rows.clone(), segment }))
        };
        Ok(outputs.flat_map(of_output).collect())
    }
}

/// Rows of W that fit in one binding:
/// all, or whole tiles.
fn rows_a_launch(
    &Product { op, code, .. }: &Product<'_>,
    config: &TileConfig,
    limit: u64,
) -> Result<usize, Unsupported> {
    let bytes = code.row_of_tiles_bytes(op.stored_k) as u64;
    let tiles = limit.saturating_sub(MARGIN) / bytes;
    if op.stored_rows.div_ceil(TILE_ROWS) as u64 <= tiles {
        return Ok(op.stored_rows);
    }
    let rows = tiles as usize * TILE_ROWS;
    // Workgroups with a partial tile would idle.
    match (rows, rows / config.tile_n as usize * config.tile_n as usize) {
        (0, _) => Err(too_large(&format!("{TILE_ROWS} rows of W"), bytes, limit)),
        (rows, 0) => Ok(rows),
        (_, whole) => Ok(whole),
    }
}

/// Tokens whose rows of X, C, residual and D each fit
/// in a binding, and whose tiles fit in the grid.
fn tokens_a_launch(
    &Product { op, x, x_columns, .. }: &Product<'_>,
    config: &TileConfig,
    limit: u64,
) -> Result<usize, Unsupported> {
    let tile = config.tile_m as usize;
    let mut tokens = MAX_GROUPS as usize * tile;
    let d_like = |dense| (dense, op.out_features);
    let dense = [("X", Some((x, x_columns))), ("C", op.c.map(d_like)), ("the residual", op.residual.map(d_like))];
    let outputs = op.outputs().map(|(operand, features, d)| (output_name(operand), Some((d, features.len()))));
    let dense = dense.into_iter().chain(outputs);
    for (name, (dense, columns)) in dense.filter_map(|(name, dense)| Some((name, dense?))) {
        tokens = tokens.min(rows_that_fit(name, &dense, columns, limit)?);
    }
    let Extents { row_scale, k_order, bias, token_scale, .. } = Extents::of_vectors(op, tokens.min(op.m));
    let whole = [
        ("the row scales", row_scale),
        (if op.k_order { "the column order" } else { "the scales of X" }, k_order),
        ("the bias", bias),
        ("the token scales", token_scale),
    ];
    for (name, bytes) in whole {
        if bytes as u64 + MARGIN > limit {
            return Err(too_large(name, bytes as u64, limit));
        }
    }
    Ok(if tokens < op.m && tokens > tile { tokens / tile * tile } else { tokens.min(op.m) })
}

/// Name of an output in messages.
fn output_name(operand: GemmOperand) -> &'static str {
    if operand == GemmOperand::D { "D" } else { operand.name() }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::families::gemm::{gemv, simt};
    use crate::weight_code::CLASS;
    use qgemm_formats::Format;
    use qgemm_hal::{Activation, Operation, Segment, XPrecision};

    pub fn op(m: usize, n: usize, k: usize) -> CheckedGemm {
        let dense = |dtype, row_stride| Dense { dtype, row_stride, col_stride: 1, aligned16: false };
        CheckedGemm {
            m,
            stored_rows: n,
            out_features: n,
            gated: false,
            k,
            stored_k: k,
            format: "q4_0".parse::<Format>().expect("exists"),
            class: CLASS,
            row_scale: false,
            k_order: false,
            weight_fits_f16: true,
            norm: None,
            x: dense(DType::F16, k as u64 + 3).into(),
            x_precision: XPrecision::default(),
            d: dense(DType::F32, n as u64),
            c: None,
            bias: Some(DType::BF16),
            token_scale: false,
            residual: None,
            segments: Vec::new(),
            residual_in_d: false,
            alpha: 1.0,
            beta: 0.0,
            activation: Activation::Identity,
            batch_invariant: false,
        }
    }

    fn launches(op: &CheckedGemm, config: &TileConfig, limit: u64) -> Result<Vec<Launch>, String> {
        let code = WeightCode::new(op.format).expect("q4_0");
        let product = Product::new(op, &code).expect("plain");
        let launches = Launch::of(&product, config, limit).map_err(|reason| reason.why)?;
        for launch in &launches {
            let extents = Extents::of(&product, launch);
            for bytes in [extents.x, extents.w, extents.d, extents.bias] {
                assert!(bytes as u64 + MARGIN <= limit, "{launch:?}: {extents:?}");
            }
        }
        // Every output is computed once.
        assert_eq!(launches.iter().map(|l| l.m.len() * l.rows.len()).sum::<usize>(), op.m * op.stored_rows);
        Ok(launches)
    }

    #[test]
    fn extents_count_strides_and_tiles() {
        let op = op(2, 5, 64);
        let code = WeightCode::new(op.format).expect("q4_0");
        let extents =
            Extents::of(&Product::new(&op, &code).expect("plain"), &Launch { m: 0..2, rows: 0..5, segment: 0 });
        let expected = Extents { x: (67 + 64) * 2, w: 16 * 36, bias: 10, d: 40, ..Extents::default() };
        assert_eq!(extents, expected);
    }

    #[test]
    fn what_fits_is_one_launch_and_what_does_not_is_cut() {
        let (gemm, gemv) = (&simt::CONFIGS[0], &gemv::CONFIGS[0]);
        assert_eq!(
            launches(&op(3, 1000, 4096), gemm, 128 << 20),
            Ok(vec![Launch { m: 0..3, rows: 0..1000, segment: 0 }])
        );
        // 2.25 GiB of weights.
        let cut = launches(&op(1, 1 << 20, 4096), gemv, 128 << 20).expect("cut");
        assert_eq!(cut.len(), 19);
        assert!(cut.iter().all(|l| l.rows.start % 64 == 0 && l.m == (0..1)), "{cut:?}");
        // X of 32 MiB and D of 256 MiB.
        let cut = launches(&op(4096, 1 << 14, 4096), gemm, 64 << 20).expect("cut");
        assert!(cut.len() > 4 && cut.iter().all(|l| l.m.start % 128 == 0), "{cut:?}");
        // More tiles than the grid supports.
        assert_eq!(launches(&op(65_536 * 128, 1, 1), gemm, u64::MAX).expect("cut").len(), 2);
        // Less than a workgroup's tile.
        let cut = launches(&op(1, 100, 4096), gemv, 80 << 10).expect("cut");
        assert_eq!(cut.iter().map(|l| l.rows.start).collect::<Vec<_>>(), [0, 32, 64, 96]);
    }

    #[test]
    fn segments_have_dispatches_of_their_own() {
        let mut op = op(2, 70, 64);
        let wide = |dtype, row_stride| Dense { dtype, row_stride, col_stride: 1, aligned16: false };
        op.d = wide(DType::F16, 20);
        op.segments =
            vec![Segment { first: 16, d: wide(DType::F32, 32) }, Segment { first: 48, d: wide(DType::BF16, 22) }];
        let all = launches(&op, &simt::CONFIGS[0], 128 << 20).expect("fits");
        let expected = [(0..16, 0), (16..48, 1), (48..70, 2)];
        assert_eq!(all, expected.map(|(rows, segment)| Launch { m: 0..2, rows, segment }));
        let code = WeightCode::new(op.format).expect("q4_0");
        let product = Product::new(&op, &code).expect("plain");
        let of_d = |launch: &Launch| (launch.output(&op).0, Extents::of(&product, launch).d);
        assert_eq!(
            all.iter().map(of_d).collect::<Vec<_>>(),
            [(GemmOperand::D, (20 + 16) * 2), (GemmOperand::D2, 64 * 4), (GemmOperand::D3, 44 * 2)]
        );
        assert_eq!(op.operands().len(), 6, "{:?}", op.operands());
    }

    #[test]
    fn what_no_cut_makes_fit_is_named() {
        let config = &simt::CONFIGS[0];
        let why = launches(&op(1, 1 << 20, 4096), config, 1 << 14).expect_err("a tile of W");
        assert!(why.contains("16 rows of W takes 36864 bytes") && why.contains("16384"), "{why}");
        let why = launches(&op(1, 1 << 14, 64), config, 1 << 15).expect_err("a row of D");
        assert!(why.contains("a row of D"), "{why}");
        assert!(launches(&op(1, 1 << 31, 32), config, u64::MAX).expect_err("31 bits").contains("stored rows is"));
        let mut op = op(3, 1, 32);
        op.x.col_stride = u64::MAX / 2;
        assert!(launches(&op, config, u64::MAX).expect_err("overflows").contains("extent of X"));
    }
}
