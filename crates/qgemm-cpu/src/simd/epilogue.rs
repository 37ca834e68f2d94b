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
    // SAFETY: the caller's promise; every tile lies in its block.
    unsafe {
        let of_tile = |of_rows: &OfRows, tile: usize| V::load(of_rows.as_ptr().add(tile * LANES));
        let one = V::splat(1.0);
        let add = |a: V::Floats, b: V::Floats| V::multiply_add(a, one, b);
        let before_activation = |sums: &OfRows, tile: usize| {
            let mut v = of_tile(sums, tile);
            if let Some(scale) = how.row_scale {
                v = V::multiply(v, of_tile(scale, tile));
            }
            v = V::multiply(V::multiply(V::splat(how.alpha), v), V::splat(token.scale));
            if let Some(c) = token.c {
                v = V::multiply_add(V::splat(how.beta), of_tile(c, tile), v);
            }
            match how.bias {
                Some(bias) => add(of_tile(bias, tile), v),
                None => v,
            }
        };
        let store = |sums: &mut OfRows, tile: usize, mut v: V::Floats| {
            if let Some(residual) = token.residual {
                v = add(of_tile(residual, tile), v);
            }
            V::store(sums.as_mut_ptr().add(tile * LANES), v);
        };
        if how.gated {
            // Outputs never lie over what is read next: pairs are twice as long.
            for tile in 0..TILES / 2 {
                // Not `map`, into which compilers do not carry the level's instructions.
                let (first, second) = (before_activation(sums, 2 * tile), before_activation(sums, 2 * tile + 1));
                let [gate, up] = V::halves(first, second);
                store(sums, tile, V::multiply(F::of::<V>(gate), up));
            }
        } else {
            for tile in 0..TILES {
                let v = before_activation(sums, tile);
                store(sums, tile, F::of::<V>(v));
            }
        }
    }
}
