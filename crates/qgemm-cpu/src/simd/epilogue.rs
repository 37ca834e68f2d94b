//! Epilogue of accumulators before rounding to D: scales, C,
//! bias, activation, residual.

use qgemm_hal::Activation;

use super::activation::{Function, GeluErf, GeluTanh, Identity, Relu, ReluSquared, Silu};
use super::vector::{LANES, Vector};
use super::{BLOCK_ROWS, TILES};

/// A number for each row of a block, or for each
/// of its outputs. Entries after the last row are unspecified.
pub type OfRows = [f32; BLOCK_ROWS];

/// Epilogue parameters shared by all tokens of a row block.
#[derive(Clone, Copy, Debug)]
pub struct Epilogue<'a> {
    /// Scale of the product.
    pub alpha: f32,
    /// Scale of C.
    pub beta: f32,
    /// Row scales.
    pub row_scale: Option<&'a OfRows>,
    /// Biases in row order; for a gated pair, eight of the
    /// gate, then the same eight of the up.
    pub bias: Option<&'a OfRows>,
    /// Activation.
    pub activation: Activation,
    /// Whether eight rows of the gate alternate with
    /// eight rows of the up.
    pub gated: bool,
}

/// Epilogue parameters of one token.
#[derive(Clone, Copy, Debug)]
pub struct OfToken<'a> {
    /// Token scale.
    pub scale: f32,
    /// C of the rows.
    pub c: Option<&'a OfRows>,
    /// Residual of the outputs.
    pub residual: Option<&'a OfRows>,
}

/// Epilogue of a token's accumulators for a row block. For a
/// gated pair there are half as many outputs.
///
/// # Safety
/// As for [`Vector`]'s functions.
#[inline(always)]
pub unsafe fn finish<V: Vector>(how: &Epilogue<'_>, token: &OfToken<'_>, sums: &mut OfRows) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        match how.activation {
            Activation::Identity => with::<V, _>(Identity, how, token, sums),
            Activation::Relu => with::<V, _>(Relu, how, token, sums),
            Activation::ReluSquared => with::<V, _>(ReluSquared, how, token, sums),
            Activation::Silu => with::<V, _>(Silu, how, token, sums),
            Activation::GeluTanh => with::<V, _>(GeluTanh, how, token, sums),
            Activation::GeluErf => with::<V, _>(GeluErf, how, token, sums),
            Activation::ClampedSwiglu(swiglu) => with::<V, _>(swiglu, how, token, sums),
        }
    }
}

#[inline(always)]
unsafe fn with<V: Vector, F: Function>(function: F, how: &Epilogue<'_>, token: &OfToken<'_>, sums: &mut OfRows) {
    // No `map` or closures, because compilers do not propagate the
    // level's instructions into them. SAFETY: guaranteed by the
    // caller; every tile is in its block.
    unsafe {
        if how.gated {
            // Outputs never overwrite later inputs, because pairs are twice as long.
            for tile in 0..TILES / 2 {
                let first = before_activation::<V>(how, token, sums, 2 * tile);
                let second = before_activation::<V>(how, token, sums, 2 * tile + 1);
                let [gate, up] = V::halves(first, second);
                store::<V>(token, sums, tile, V::multiply(function.of::<V>(gate), function.of_up::<V>(up)));
            }
        } else {
            for tile in 0..TILES {
                let v = before_activation::<V>(how, token, sums, tile);
                store::<V>(token, sums, tile, function.of::<V>(v));
            }
        }
    }
}

/// Input of the activation for a tile.
///
/// # Safety
/// As for [`Vector`]'s functions; the tile must be in its block.
#[inline(always)]
unsafe fn before_activation<V: Vector>(
    how: &Epilogue<'_>,
    token: &OfToken<'_>,
    sums: &OfRows,
    tile: usize,
) -> V::Floats {
    // SAFETY: guaranteed by the caller.
    unsafe {
        let mut v = of_tile::<V>(sums, tile);
        if let Some(scale) = how.row_scale {
            v = V::multiply(v, of_tile::<V>(scale, tile));
        }
        v = V::multiply(V::multiply(V::splat(how.alpha), v), V::splat(token.scale));
        if let Some(c) = token.c {
            v = V::multiply_add(V::splat(how.beta), of_tile::<V>(c, tile), v);
        }
        match how.bias {
            Some(bias) => V::multiply_add(of_tile::<V>(bias, tile), V::splat(1.0), v),
            None => v,
        }
    }
}

/// Writes a tile's outputs with the residual added.
///
/// # Safety
/// As for [`before_activation`].
#[inline(always)]
unsafe fn store<V: Vector>(token: &OfToken<'_>, sums: &mut OfRows, tile: usize, mut v: V::Floats) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        if let Some(residual) = token.residual {
            v = V::multiply_add(of_tile::<V>(residual, tile), V::splat(1.0), v);
        }
        V::store(sums.as_mut_ptr().add(tile * LANES), v);
    }
}

/// # Safety
/// As for [`before_activation`].
#[inline(always)]
unsafe fn of_tile<V: Vector>(of_rows: &OfRows, tile: usize) -> V::Floats {
    // SAFETY: guaranteed by the caller.
    unsafe { V::load(of_rows.as_ptr().add(tile * LANES)) }
}
