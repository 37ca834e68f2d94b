//! [`CodeShape`]: codes of up to eight bits, from the planes of a packed k-tile to unsigned bytes, four columns of sixteen rows a vector.
//! Products take them as they are decoded, or as [`unpack`] has stored them for many tokens.

use qgemm_formats::Encoding;
use qgemm_formats::prepack::PackedLayout;

use super::Prefetch;
use super::kernel::WORDS;
use super::vector::Vector;

/// Columns whose codes are decoded together: whole words of every plane.
pub const UNIT: usize = 32;

/// Does `$body` for each of these numbers, as a constant: compilers do not unroll loops of so many instructions.
macro_rules! each {
    ($name:ident in $($number:literal)* => $body:block) => {{
        $({
            const $name: usize = $number;
            $body
        })*
    }};
}
pub(super) use each;

/// What codes of tables are offset by, so that they are unsigned.
pub const TABLE_OFFSET: i32 = 128;

/// What products with a format are like: kernels are compiled for it, so that their inner loops decide nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CodeShape {
    /// Bits of the first plane, and of the second one above them; 0 for none.
    pub planes: [usize; 2],
    /// Whether a table says what numbers codes are.
    pub table: bool,
    /// Columns of a span, whose products are added up before a scale acts on them.
    pub span: usize,
    /// Whether activations have a factor for more than one span, so that it acts on their scaled sums.
    pub wide: bool,
    /// Whether sub-blocks have minima. Elsewhere codes have an offset.
    pub minima: bool,
    /// Bits of the codes, or of what tables make of them. Unpacked ones have at least four.
    pub bits: usize,
    /// Whether they are the bytes that [`unpack`] stores.
    pub unpacked: bool,
}

impl CodeShape {
    /// How many of [`CodeShape::ALL`], the first ones, are of packed codes.
    pub const PACKED: usize = 16;
    /// Those of all formats, then those of their unpacked codes.
    pub const ALL: [Self; 29] = [
        Self::of_integers([2, 0], 16, true, true),
        Self::of_integers([2, 0], 32, false, true),
        Self::of_integers([2, 1], 16, true, false),
        Self::of_integers([2, 1], 32, false, true),
        Self::of_integers([4, 0], 32, false, false),
        Self::of_integers([4, 0], 32, false, true),
        Self::of_integers([4, 0], 32, true, true),
        Self::of_integers([4, 1], 32, false, false),
        Self::of_integers([4, 1], 32, false, true),
        Self::of_integers([4, 1], 32, true, true),
        Self::of_integers([4, 2], 16, true, false),
        Self::of_integers([8, 0], 32, false, false),
        Self::of_integers([8, 0], 32, false, true),
        Self::of_table(32, false),
        Self::of_table(32, true),
        Self::of_table(16, true),
        Self::of_integers([4, 0], 32, false, false).unpacked(),
        Self::of_integers([4, 0], 32, false, true).unpacked(),
        Self::of_integers([4, 0], 32, true, true).unpacked(),
        Self::of_integers([4, 1], 32, false, false).unpacked(),
        Self::of_integers([4, 1], 32, false, true).unpacked(),
        Self::of_integers([4, 1], 32, true, true).unpacked(),
        Self::of_integers([2, 0], 16, true, true).unpacked(),
        Self::of_integers([2, 1], 16, true, false).unpacked(),
        Self::of_integers([4, 2], 16, true, false).unpacked(),
        Self::of_integers([8, 0], 32, false, false).unpacked(),
        Self::of_integers([8, 0], 32, false, true).unpacked(),
        Self::of_table(32, true).unpacked(),
        Self::of_table(16, true).unpacked(),
    ];

    const fn of_integers(planes: [usize; 2], span: usize, wide: bool, minima: bool) -> Self {
        Self { planes, table: false, span, wide, minima, bits: planes[0] + planes[1], unpacked: false }
    }

    const fn of_table(span: usize, wide: bool) -> Self {
        Self { table: true, bits: 8, ..Self::of_integers([4, 0], span, wide, false) }
    }

    /// That of codes of weights with this `encoding`, of planes of so many bits.
    pub fn new(encoding: Encoding, planes: [usize; 2], span: usize, wide: bool) -> Self {
        match encoding {
            Encoding::Codebook(_) => Self::of_table(span, wide),
            _ => Self::of_integers(planes, span, wide, matches!(encoding, Encoding::IntAffine | Encoding::IntZero)),
        }
    }

    /// The same of unpacked codes.
    pub const fn unpacked(self) -> Self {
        let bits = if self.bits < 4 { 4 } else { self.bits };
        Self { planes: [8, 0], table: false, bits, unpacked: true, ..self }
    }

    /// Whether codes are offset by 128.
    pub const fn is_centered(self) -> bool {
        self.bits == 8 && !self.minima
    }

    /// The number of this one among all, if there are kernels for it.
    pub fn number(self) -> Option<usize> {
        Self::ALL.iter().position(|&other| other == self)
    }
}

/// The numbers of a table as unsigned bytes.
pub fn unsigned_table(encoding: Encoding) -> [u8; 16] {
    match encoding {
        Encoding::Codebook(table) => table.map(|number| (i32::from(number) + TABLE_OFFSET) as u8),
        _ => [0; 16],
    }
}

/// The code planes of a k-tile at the columns that are decoded next; `SHAPE` is the number of their [`CodeShape`]. Packed codes are
/// prefetched if `ASKS`.
pub struct Planes<V: Vector, const SHAPE: usize, const ASKS: bool> {
    low: *const u8,
    high: *const u8,
    /// Where the counterparts of both are that are prefetched meanwhile, each line when the one here is decoded: a core
    /// that asks for many at once has to wait for them.
    low_prefetch: Prefetch,
    high_prefetch: Prefetch,
    /// Words that hold the quad that was decoded last, and perhaps the next one.
    low_word: V::Words,
    high_word: V::Words,
}

impl<V: Vector, const SHAPE: usize, const ASKS: bool> Planes<V, SHAPE, ASKS> {
    const SHAPE_OF_CODES: CodeShape = CodeShape::ALL[SHAPE];

    /// Those of `k_tile`, at its first column.
    ///
    /// # Safety
    /// As of [`Vector`]'s functions; `k_tile` is one of `layout`, with codes of the shape.
    #[inline(always)]
    pub unsafe fn new(layout: &PackedLayout, k_tile: &[u8], prefetch: Prefetch) -> Self {
        let low = if Self::SHAPE_OF_CODES.unpacked { 0 } else { layout.codes[0].offset };
        let high = if Self::SHAPE_OF_CODES.planes[1] > 0 { layout.codes[1].offset } else { low };
        // SAFETY: the caller's promise.
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

    /// The unsigned codes of quad `QUAD` of a unit, a byte each. Quads are asked for in order.
    ///
    /// # Safety
    /// As of [`Vector`]'s functions; the unit lies in the k-tile.
    #[inline(always)]
    pub unsafe fn quad<const QUAD: usize>(&mut self, table: &[u8; 16]) -> V::Words {
        let [low, high] = Self::SHAPE_OF_CODES.planes;
        let mask = |bits: usize| ((1u32 << bits) - 1) * 0x0101_0101;
        // SAFETY: the caller's promise.
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
    /// As of [`Planes::quad`].
    #[inline(always)]
    unsafe fn next_word(at: &mut *const u8, prefetch: &mut Prefetch) -> V::Words {
        if ASKS && !Self::SHAPE_OF_CODES.unpacked {
            prefetch.fetch(WORDS);
            *prefetch = prefetch.skip(WORDS);
        }
        // SAFETY: the caller's promise.
        unsafe {
            let word = V::load_words(*at);
            *at = at.add(WORDS);
            word
        }
    }
}

/// Whether `quad` is the first one of a word in a plane of `bits` bits, and its bits below the quad's.
#[inline(always)]
fn place(quad: usize, bits: usize) -> (bool, usize) {
    let quads = 8 / bits;
    (quad.is_multiple_of(quads), quad % quads * bits)
}

/// The unsigned codes of packed k-tiles of `layout`, to `[quad][lane]`, a byte each; `SHAPE` is the number of the format's
/// [`CodeShape`].
///
/// # Safety
/// As of [`Vector`]'s functions; the k-tiles are whole, and `out` has room.
#[inline(always)]
pub unsafe fn unpack<V: Vector, const SHAPE: usize>(layout: &PackedLayout, k_tiles: &[u8], out: &mut [u8]) {
    let table = unsigned_table(layout.format().encoding);
    let mut out = out.as_mut_ptr();
    for k_tile in k_tiles.chunks_exact(layout.k_tile_bytes) {
        // SAFETY: the caller's promise.
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
