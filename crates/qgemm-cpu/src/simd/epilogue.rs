//! What is made of accumulators before they are rounded to D: scales, C, biases, the activation, the residual.

use qgemm_hal::Activation;

use super::activation::{Function, GeluErf, GeluTanh, Identity, Relu, Silu};
use super::vector::{LANES, Vector};
use super::{BLOCK_ROWS, TILES};

/// A number for each row of a block, or for each of its outputs. What lies behind the last row is anything.
pub type OfRows = [f32; BLOCK_ROWS];

/// What all tokens of a block of rows have in common.
#[derive(Clone, Copy, Debug)]
pub struct Epilogue<'a> {
    /// Factor of the product.
    pub alpha: f32,
    /// Factor of C.
    pub beta: f32,
    /// Factors of the rows.
    pub row_scale: Option<&'a OfRows>,
    /// Biases, as rows follow one another: of a gated pair, eight of the gate, then the same of the up.
    pub bias: Option<&'a OfRows>,
    /// The function of the sum.
    pub activation: Activation,
    /// Whether eight rows of the gate and the same of the up follow one another.
    pub gated: bool,
}

/// What a token has of its own.
#[derive(Clone, Copy, Debug)]
pub struct OfToken<'a> {
    /// Its factor.
    pub scale: f32,
    /// C of the rows.
    pub c: Option<&'a OfRows>,
    /// What is added to the outputs.
    pub residual: Option<&'a OfRows>,
}

/// Makes outputs of a token's accumulators for a block of rows; of a gated pair, they are half as many.
///
/// # Safety
/// As of [`Vector`]'s functions.
#[inline(always)]
pub unsafe fn finish<V: Vector>(how: &Epilogue<'_>, token: &OfToken<'_>, sums: &mut OfRows) {
    // SAFETY: the caller's promise.
    unsafe {
        match how.activation {
            Activation::Identity => with::<V, Identity>(how, token, sums),
            Activation::Relu => with::<V, Relu>(how, token, sums),
            Activation::Silu => with::<V, Silu>(how, token, sums),
            Activation::GeluTanh => with::<V, GeluTanh>(how, token, sums),
            Activation::GeluErf => with::<V, GeluErf>(how, token, sums),
        }
    }
}

#[inline(always)]
unsafe fn with<V: Vector, F: Function>(how: &Epilogue<'_>, token: &OfToken<'_>, sums: &mut OfRows) {
    // Neither `map` nor closures, into which compilers do not carry the level's instructions.
    // SAFETY: the caller's promise; every tile lies in its block.
    unsafe {
        if how.gated {
            // Outputs never lie over what is read next: pairs are twice as long.
            for tile in 0..TILES / 2 {
                let first = before_activation::<V>(how, token, sums, 2 * tile);
                let second = before_activation::<V>(how, token, sums, 2 * tile + 1);
                let [gate, up] = V::halves(first, second);
                store::<V>(token, sums, tile, V::multiply(F::of::<V>(gate), up));
            }
        } else {
            for tile in 0..TILES {
                let v = before_activation::<V>(how, token, sums, tile);
                store::<V>(token, sums, tile, F::of::<V>(v));
            }
        }
    }
}

/// What a tile's outputs are functions of.
///
/// # Safety
/// As of [`Vector`]'s functions, and the tile lies in its block.
#[inline(always)]
unsafe fn before_activation<V: Vector>(
    how: &Epilogue<'_>,
    token: &OfToken<'_>,
    sums: &OfRows,
    tile: usize,
) -> V::Floats {
    // SAFETY: the caller's promise.
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

/// Writes a tile's outputs, the residual added.
///
/// # Safety
/// As of [`before_activation`].
#[inline(always)]
unsafe fn store<V: Vector>(token: &OfToken<'_>, sums: &mut OfRows, tile: usize, mut v: V::Floats) {
    // SAFETY: the caller's promise.
    unsafe {
        if let Some(residual) = token.residual {
            v = V::multiply_add(of_tile::<V>(residual, tile), V::splat(1.0), v);
        }
        V::store(sums.as_mut_ptr().add(tile * LANES), v);
    }
}

/// # Safety
/// As of [`before_activation`].
#[inline(always)]
unsafe fn of_tile<V: Vector>(of_rows: &OfRows, tile: usize) -> V::Floats {
    // SAFETY: the caller's promise.
    unsafe { V::load(of_rows.as_ptr().add(tile * LANES)) }
}
