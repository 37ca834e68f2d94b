// Byte products. Integer sums of a span are exact; scales and
// minimums act on them.

// Multiplies a unit by X; `x` is its vector of each token.
fn multiply(w: Unit, x: u32, sums: ptr<function, Accumulators>) {
    #for t TILE_M
    let low$t = tile[x + $tu * TOKEN_PITCH];
    let high$t = tile[x + $tu * TOKEN_PITCH + 1u];
    let factors$t = bitcast<vec4<f32>>(tile[x + $tu * TOKEN_PITCH + 2u]);
    #end
    #for s SPANS
    {
        #for t TILE_M
        var dots$t: vec4<i32>;
        #end
        #for q SPAN_QUADS
        {
            let codes = #quad($s, $q);
            #for t TILE_M
            dots$t += dot4(codes, x_quad(low$t, high$t, $su * SPAN_QUADS + $qu));
            #end
        }
        #end
        #for t TILE_M
        (*sums)[$t] += scaled(vec4<f32>(dots$t) * factors$t.x, factors$t[$s + 1], w.affine$s);
        #end
    }
    #end
}
