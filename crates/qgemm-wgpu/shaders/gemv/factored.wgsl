// For one or two tokens.
// Scales and minimums act on span sums.
// Columns of a span share them.

// Multiplies a unit by X.
// `x` is its vector of each token.
fn multiply(w: Unit, x: u32, sums: ptr<function, Accumulators>) {
    #for s SPANS
    {
        #for t TILE_M
        var part$t: vec4<f32>;
        var sum_x$t: vec4<f32>;
        #end
        #for q SPAN_QUADS
        {
            let a = #number($s, $q, 0);
            let b = #number($s, $q, 1);
            let c = #number($s, $q, 2);
            let d = #number($s, $q, 3);
            #for t TILE_M
            let x$t = x_vector(x + $tu * TOKEN_PITCH + $su * SPAN_QUADS + $qu);
            part$t = fma(a, vec4<f32>(x$t.x), part$t);
            part$t = fma(b, vec4<f32>(x$t.y), part$t);
            part$t = fma(c, vec4<f32>(x$t.z), part$t);
            part$t = fma(d, vec4<f32>(x$t.w), part$t);
            sum_x$t += x$t;
            #end
        }
        #end
        #for t TILE_M
        (*sums)[$t] += scaled(part$t, dot(sum_x$t, vec4<f32>(1.0)), w.affine$s);
        #end
    }
    #end
}
