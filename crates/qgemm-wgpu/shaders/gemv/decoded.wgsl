// For three or more tokens.
// Weights are dequantized once for all tokens.

// Multiplies a unit by X.
// `x` is its vector of each token.
fn multiply(w: Unit, x: u32, sums: ptr<function, Accumulators>) {
    #for t TILE_M
    var sum$t = (*sums)[$t];
    #end
    #for s SPANS
    #for q SPAN_QUADS
    {
        let a = scaled(#number($s, $q, 0), 1.0, w.affine$s);
        let b = scaled(#number($s, $q, 1), 1.0, w.affine$s);
        let c = scaled(#number($s, $q, 2), 1.0, w.affine$s);
        let d = scaled(#number($s, $q, 3), 1.0, w.affine$s);
        #for t TILE_M
        let x$t = x_vector(x + $tu * TOKEN_PITCH + $su * SPAN_QUADS + $qu);
        sum$t = fma(a, vec4<f32>(x$t.x), sum$t);
        sum$t = fma(b, vec4<f32>(x$t.y), sum$t);
        sum$t = fma(c, vec4<f32>(x$t.z), sum$t);
        sum$t = fma(d, vec4<f32>(x$t.w), sum$t);
        #end
    }
    #end
    #end
    #for t TILE_M
    (*sums)[$t] = sum$t;
    #end
}
