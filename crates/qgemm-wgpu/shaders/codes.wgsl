// Bytes of W at any offset, and the codes in them. A snippet in `dequant/` is written with these and offers
//
//     fn dequant8(block: u32, first: u32) -> Eight
//
// the values `first .. first + 8` (a multiple of 8) of the block that begins at byte `block`. Where blocks hold
// one value, `first` is 0 and the values are those of eight consecutive blocks.

fn w_u8(at: u32) -> u32 {
    return (w_words[at >> 2u] >> ((at & 3u) * 8u)) & 0xffu;
}

fn w_u32(at: u32) -> u32 {
    let shift = (at & 3u) * 8u;
    let low = w_words[at >> 2u];
    if (shift == 0u) {
        return low;
    }
    return (low >> shift) | (w_words[(at >> 2u) + 1u] << (32u - shift));
}

fn w_u16(at: u32) -> u32 {
    if ((at & 3u) == 3u) {
        return w_u8(at) | (w_u8(at + 1u) << 8u);
    }
    return (w_words[at >> 2u] >> ((at & 3u) * 8u)) & 0xffffu;
}

fn w_f16(at: u32) -> f32 {
    return f16_scalar(w_u16(at));
}

// Eight unsigned codes, one a byte.
struct Codes {
    lo: u32,
    hi: u32,
}

// The same bits of eight consecutive bytes: `mask` is repeated in every byte of it.
fn bit_field(at: u32, shift: u32, mask: u32) -> Codes {
    return Codes((w_u32(at) >> shift) & mask, (w_u32(at + 4u) >> shift) & mask);
}

// GGUF's nibble order within 32 values: byte j holds value j below value j + 16.
fn nibbles32(at: u32, first: u32) -> Codes {
    return bit_field(at + (first & 15u), (first >> 4u) * 4u, 0x0f0f0f0fu);
}

// Eight nibbles in order, low bits first.
fn nibbles_in_order(word: u32) -> Codes {
    return Codes(spread_nibbles(word & 0xffffu), spread_nibbles(word >> 16u));
}

fn spread_nibbles(halfword: u32) -> u32 {
    let pairs = (halfword | (halfword << 8u)) & 0x00ff00ffu;
    return (pairs | (pairs << 4u)) & 0x0f0f0f0fu;
}

// Bits 0 to 7 of `bits`, one a byte.
fn spread_bits(bits: u32) -> Codes {
    return Codes(spread_4_bits(bits), spread_4_bits(bits >> 4u));
}

fn spread_4_bits(bits: u32) -> u32 {
    return (bits & 1u) | ((bits & 2u) << 7u) | ((bits & 4u) << 14u) | ((bits & 8u) << 21u);
}

// Codes of two bit planes, `high` being worth `1 << shift`.
fn join(low: Codes, high: Codes, shift: u32) -> Codes {
    return Codes(low.lo | (high.lo << shift), low.hi | (high.hi << shift));
}

fn bytes4(word: u32) -> vec4<u32> {
    return (vec4<u32>(word) >> vec4<u32>(0u, 8u, 16u, 24u)) & vec4<u32>(0xffu);
}

// scale * (code - offset)
fn offset8(codes: Codes, offset: f32, scale: f32) -> Eight {
    return Eight(
        (vec4<f32>(bytes4(codes.lo)) - vec4<f32>(offset)) * scale,
        (vec4<f32>(bytes4(codes.hi)) - vec4<f32>(offset)) * scale,
    );
}

// scale * code - minimum
fn affine8(codes: Codes, scale: f32, minimum: f32) -> Eight {
    return Eight(
        vec4<f32>(bytes4(codes.lo)) * scale - vec4<f32>(minimum),
        vec4<f32>(bytes4(codes.hi)) * scale - vec4<f32>(minimum),
    );
}

fn scale8(values: Eight, scale: f32) -> Eight {
    return Eight(values.lo * scale, values.hi * scale);
}

fn e4m3_8(at: u32) -> Eight {
    return Eight(e4m3_to_f32(bytes4(w_u32(at))), e4m3_to_f32(bytes4(w_u32(at + 4u))));
}

fn e5m2_8(at: u32) -> Eight {
    return Eight(e5m2_to_f32(bytes4(w_u32(at))), e5m2_to_f32(bytes4(w_u32(at + 4u))));
}

// Integer groups end in an f16 scale and a byte of zero point.
fn zero_point8(codes: Codes, block: u32) -> Eight {
    let zero = f32(w_u8(block + BLOCK_BYTES - 1u));
    return offset8(codes, zero, w_f16(block + BLOCK_BYTES - 3u));
}

// Scale and minimum `sub` of the 12 bytes that Q4_K and Q5_K keep eight of each in, six bits wide.
fn k_scale_min(at: u32, sub: u32) -> vec2<f32> {
    if (sub < 4u) {
        return vec2<f32>(f32(w_u8(at + sub) & 63u), f32(w_u8(at + sub + 4u) & 63u));
    }
    let nibbles = w_u8(at + sub + 4u);
    let scale = (nibbles & 15u) | ((w_u8(at + sub - 4u) >> 6u) << 4u);
    let minimum = (nibbles >> 4u) | ((w_u8(at + sub) >> 6u) << 4u);
    return vec2<f32>(f32(scale), f32(minimum));
}
