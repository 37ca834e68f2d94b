// W by units of UNIT columns, loaded at once.

// Four rows of a unit.
struct Unit {
    #for j LOW_WORDS
    low$j: vec4<u32>,
    #end
    #for j HIGH_WORDS
    high$j: vec4<u32>,
    #end
    #for s SPANS
    affine$s: Affine,
    #end
}

fn unit_of(rows: Rows, unit: u32) -> Unit {
    var w: Unit;
    #for j LOW_WORDS
    w.low$j = code_word(rows, LOW_PLANE, unit * LOW_WORDS + $ju);
    #end
    #for j HIGH_WORDS
    w.high$j = code_word(rows, HIGH_PLANE, unit * HIGH_WORDS + $ju);
    #end
    #for s SPANS
    w.affine$s = affine(rows, (unit * SPANS + $su) / SPANS_A_SUB);
    #end
    return w;
}
