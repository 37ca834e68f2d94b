//! [`CodeShape`]: codes of up to 8 bits, decoded from the planes of a packed k-tile to unsigned bytes, four columns of sixteen rows per vector. Products use them immediately, or as stored by [`unpack`] for many tokens.

use qgemm_formats::Encoding;
use qgemm_formats::prepack::PackedLayout;

use super::Prefetch;
use super::vector::{Vector, WORDS};

/// Columns whose codes are decoded together: whole words of every plane.
pub const UNIT: usize = 32;

/// Repeats `$body` for each of these numbers as a constant, because
/// compilers do not unroll loops with so many instructions.
macro_rules! each {
    ($name:ident in $($number:literal)* => $body:block) => {{
        $({
            const $name: usize = $number;
            $body
        })*
    }};
}
pub(super) use each;

/// Offset of codebook values, which makes them unsigned.
pub const TABLE_OFFSET: i32 = 128;

/// Compile-time shape of a format's codes. Kernels are specialized for it,
/// so that inner loops do not branch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CodeShape {
    /// Bits of the first plane, and of the second plane
    /// above it (0 for none).
    pub planes: [usize; 2],
    /// Whether codes index a codebook.
    pub table: bool,
    /// Columns of a span, whose products are summed
    /// before a scale applies.
    pub span: usize,
    /// Whether activations share a factor over several spans, so that
    /// it applies to their scaled sums.
    pub wide: bool,
    /// Whether sub-blocks have minimums; otherwise codes have an offset.
    pub minima: bool,
    /// Bits of the codes or of the codebook values. Unpacked
    /// codes have at least four.
    pub bits: usize,
    /// Whether codes are the bytes stored by [`super::Simd::unpack_codes`].
    pub unpacked: bool,
}

impl CodeShape {
    /// Number of packed shapes, the first ones of [`CodeShape::ALL`].
    pub const PACKED: usize = 22;
    /// The shapes of all formats, then their unpacked shapes.
    pub const ALL: [Self; 37] = [
        Self::of_integers([2, 0], 16, true, true),
        Self::of_integers([2, 0], 32, false, false),
        Self::of_integers([2, 0], 32, false, true),
        Self::of_integers([2, 0], 32, true, false),
        Self::of_integers([2, 0], 32, true, true),
        Self::of_integers([2, 1], 16, true, false),
        Self::of_integers([2, 1], 32, false, true),
        Self::of_integers([4, 0], 32, false, false),
        Self::of_integers([4, 0], 32, false, true),
        Self::of_integers([4, 0], 32, true, true),
        Self::of_integers([4, 1], 32, false, false),
        Self::of_integers([4, 1], 32, false, true),
        Self::of_integers([4, 1], 32, true, true),
        Self::of_integers([4, 2], 16, true, false),
        Self::of_integers([4, 2], 32, false, true),
        Self::of_integers([8, 0], 32, false, false),
        Self::of_integers([8, 0], 32, false, true),
        Self::of_table([1, 0], 32, false),
        Self::of_table([2, 1], 16, true),
        Self::of_table([4, 0], 32, false),
        Self::of_table([4, 0], 32, true),
        Self::of_table([4, 0], 16, true),
        Self::of_integers([4, 0], 32, false, false).unpacked(),
        Self::of_integers([4, 0], 32, false, true).unpacked(),
        Self::of_integers([4, 0], 32, true, false).unpacked(),
        Self::of_integers([4, 0], 32, true, true).unpacked(),
        Self::of_integers([4, 1], 32, false, false).unpacked(),
        Self::of_integers([4, 1], 32, false, true).unpacked(),
        Self::of_integers([4, 1], 32, true, true).unpacked(),
        Self::of_integers([2, 0], 16, true, true).unpacked(),
        Self::of_integers([2, 1], 16, true, false).unpacked(),
        Self::of_integers([4, 2], 16, true, false).unpacked(),
        Self::of_integers([4, 2], 32, false, true).unpacked(),
        Self::of_integers([8, 0], 32, false, false).unpacked(),
        Self::of_integers([8, 0], 32, false, true).unpacked(),
        Self::of_table([4, 0], 32, true).unpacked(),
        Self::of_table([4, 0], 16, true).unpacked(),
    ];

    const fn of_integers(planes: [usize; 2], span: usize, wide: bool, minima: bool) -> Self {
        Self { planes, table: false, span, wide, minima, bits: planes[0] + planes[1], unpacked: false }
    }

    const fn of_table(planes: [usize; 2], span: usize, wide: bool) -> Self {
        Self { table: true, bits: 8, ..Self::of_integers(planes, span, wide, false) }
    }

    /// Shape of codes with this `encoding` and bits per plane.
    pub fn new(encoding: Encoding, planes: [usize; 2], span: usize, wide: bool) -> Self {
        match encoding {
            Encoding::Codebook(_) => Self::of_table(planes, span, wide),
            _ => Self::of_integers(planes, span, wide, matches!(encoding, Encoding::IntAffine | Encoding::IntZero)),
        }
    }

    /// The shape of the unpacked codes.
    pub const fn unpacked(self) -> Self {
        let bits = if self.bits < 4 { 4 } else { self.bits };
        Self { planes: [8, 0], table: false, bits, unpacked: true, ..self }
    }

    /// Whether codes have an offset of 128.
    pub const fn is_centered(self) -> bool {
        self.bits == 8 && !self.minima
    }

    /// Index in `ALL`, if there are kernels for it.
    pub fn number(self) -> Option<usize> {
        Self::ALL.iter().position(|&other| other == self)
    }
}

/// Codebook values as unsigned bytes.
pub fn unsigned_table(encoding: Encoding) -> [u8; 16] {
    match encoding {
        Encoding::Codebook(table) => table.map(|number| (i32::from(number) + TABLE_OFFSET) as u8),
        _ => [0; 16],
    }
}

/// Code planes of a k-tile, positioned at the next columns to
/// decode. `SHAPE` is the index of the [`CodeShape`].
/// Prefetches packed codes if `ASKS`.
#[derive(Clone, Copy)]
pub struct Planes<V: Vector, const SHAPE: usize, const ASKS: bool> {
    low: *const u8,
    high: *const u8,
    /// Prefetch positions of both planes. One line is requested for each
    /// decoded line, because a core that requests many at once stalls.
    low_prefetch: Prefetch,
    high_prefetch: Prefetch,
    /// Words with the last decoded quad, and perhaps the next one.
    low_word: V::Words,
    high_word: V::Words,
}

impl<V: Vector, const SHAPE: usize, const ASKS: bool> Planes<V, SHAPE, ASKS> {
    const SHAPE_OF_CODES: CodeShape = CodeShape::ALL[SHAPE];

    /// The planes of `k_tile`, at its first column.
    ///
    /// # Safety
    /// As for [`Vector`]'s functions; `k_tile` must be one of
    /// `layout`, with codes of the shape.
    #[inline(always)]
    pub unsafe fn new(layout: &PackedLayout, k_tile: &[u8], prefetch: Prefetch) -> Self {
        let low = if Self::SHAPE_OF_CODES.unpacked { 0 } else { layout.codes[0].offset };
        let high = if Self::SHAPE_OF_CODES.planes[1] > 0 { layout.codes[1].offset } else { low };
        // SAFETY: guaranteed by the caller.
        unsafe {
            Self {
                low: k_tile.as_ptr().add(low),
                high: k_tile.as_ptr().add(high),
                low_prefetch: prefetch.skip(low),
                high_prefetch: prefetch.skip(high),
                low_word: V::splat_word(0),
                high_word: V::splat_word(0),
            }
        }
    }

    /// Unsigned codes of quad `QUAD` of a unit, one byte each.
    /// Quads must be requested in order.
    ///
    /// # Safety
    /// As for [`Vector`]'s functions; the unit must be in the k-tile.
    #[inline(always)]
    pub unsafe fn quad<const QUAD: usize>(&mut self, table: &[u8; 16]) -> V::Words {
        let [low, high] = Self::SHAPE_OF_CODES.planes;
        let mask = |bits: usize| ((1u32 << bits) - 1) * 0x0101_0101;
        // SAFETY: guaranteed by the caller.
        unsafe {
            let (begins_word, shift) = place(QUAD, low);
            if begins_word {
                self.low_word = Self::next_word(&mut self.low, &mut self.low_prefetch);
            }
            let mut codes = V::and(V::shift_right(self.low_word, shift as u32), mask(low));
            if high > 0 {
                let (begins_word, shift) = place(QUAD, high);
                if begins_word {
                    self.high_word = Self::next_word(&mut self.high, &mut self.high_prefetch);
                }
                let upper = if shift < low {
                    V::shift_left(self.high_word, (low - shift) as u32)
                } else {
                    V::shift_right(self.high_word, (shift - low) as u32)
                };
                codes = V::or(codes, V::and(upper, mask(high) << low));
            }
            if Self::SHAPE_OF_CODES.table { V::lookup_bytes(table, codes) } else { codes }
        }
    }

    /// # Safety
    /// As for [`Planes::quad`].
    #[inline(always)]
    unsafe fn next_word(at: &mut *const u8, prefetch: &mut Prefetch) -> V::Words {
        if ASKS && !Self::SHAPE_OF_CODES.unpacked {
            prefetch.fetch(WORDS);
            *prefetch = prefetch.skip(WORDS);
        }
        // SAFETY: guaranteed by the caller.
        unsafe {
            let word = V::load_words(*at);
            *at = at.add(WORDS);
            word
        }
    }
}

/// Whether `quad` is the first of a word in a plane
/// of `bits` bits, and its bit position in the word.
#[inline(always)]
fn place(quad: usize, bits: usize) -> (bool, usize) {
    let quads = 8 / bits;
    (quad.is_multiple_of(quads), quad % quads * bits)
}

/// Unpacks the codes of packed k-tiles of `layout` to `[quad][lane]`, one
/// byte each. `SHAPE` is the index of the format's [`CodeShape`].
///
/// # Safety
/// As for [`Vector`]'s functions; the k-tiles must be
/// whole, and `out` large enough.
#[inline(always)]
pub unsafe fn unpack<V: Vector, const SHAPE: usize>(layout: &PackedLayout, k_tiles: &[u8], out: &mut [u8]) {
    let table = unsigned_table(layout.format().encoding);
    let mut out = out.as_mut_ptr();
    for k_tile in k_tiles.chunks_exact(layout.k_tile_bytes) {
        // SAFETY: guaranteed by the caller.
        unsafe {
            let mut planes = Planes::<V, SHAPE, false>::new(layout, k_tile, Prefetch::default());
            for _ in 0..layout.k_tile / UNIT {
                each!(QUAD in 0 1 2 3 4 5 6 7 => {
                    V::store_words(out, planes.quad::<QUAD>(&table));
                    out = out.add(WORDS);
                });
            }
        }
    }
}
