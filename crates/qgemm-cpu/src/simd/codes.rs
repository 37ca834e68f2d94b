//! [`CodeShape`]: codes of up to eight bits, from the planes of a packed slab to unsigned bytes, four columns of sixteen rows a vector.

use qgemm_formats::Encoding;
use qgemm_formats::prepack::PackedLayout;

use super::Ahead;
use super::kernel::WORDS;
use super::vector::Vector;

/// Columns whose codes are decoded together: whole words of every plane.
pub const UNIT: usize = 32;

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
}

impl CodeShape {
    /// Those of all formats.
    pub const ALL: [Self; 16] = [
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
        Self { table: true, ..Self::of_integers([4, 0], 32, false, false) },
        Self { table: true, ..Self::of_integers([4, 0], 32, true, false) },
        Self { table: true, ..Self::of_integers([4, 0], 16, true, false) },
    ];

    const fn of_integers(planes: [usize; 2], span: usize, wide: bool, minima: bool) -> Self {
        Self { planes, table: false, span, wide, minima }
    }

    /// Whether codes, or what tables make of them, are signed bytes, too.
    pub const fn is_below_128(self) -> bool {
        !self.table && self.planes[0] + self.planes[1] < 8
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

/// The code planes of a slab at the columns that are decoded next.
pub struct Planes<V: Vector> {
    low: *const u8,
    high: *const u8,
    /// Where the counterparts of both are that are brought from memory meanwhile, each line when the one here is decoded: a core
    /// that asks for many at once has to wait for them.
    low_ahead: Ahead,
    high_ahead: Ahead,
    /// Words that hold the quad that was decoded last, and perhaps the next one.
    low_word: V::Words,
    high_word: V::Words,
}

impl<V: Vector> Planes<V> {
    /// Those of `slab`, at its first column.
    ///
    /// # Safety
    /// As of [`Vector`]'s functions; `slab` is one of `layout`.
    #[inline(always)]
    pub unsafe fn new(layout: &PackedLayout, slab: &[u8], ahead: Ahead) -> Self {
        let low = layout.codes[0].offset;
        let high = layout.codes.get(1).map_or(low, |plane| plane.offset);
        // SAFETY: the caller's promise.
        unsafe {
            Self {
                low: slab.as_ptr().add(low),
                high: slab.as_ptr().add(high),
                low_ahead: ahead.skip(low),
                high_ahead: ahead.skip(high),
                low_word: V::splat_word(0),
                high_word: V::splat_word(0),
            }
        }
    }

    /// The unsigned codes of quad `quad` of a unit, a byte each. Quads are asked for in order, each with a constant for its number.
    ///
    /// # Safety
    /// As of [`Vector`]'s functions; the unit lies in the slab.
    #[inline(always)]
    pub unsafe fn quad(&mut self, shape: CodeShape, table: &[u8; 16], quad: usize) -> V::Words {
        let [low, high] = shape.planes;
        let mask = |bits: usize| ((1u32 << bits) - 1) * 0x0101_0101;
        // SAFETY: the caller's promise.
        unsafe {
            let (begins_word, shift) = place(quad, low);
            if begins_word {
                self.low_word = next_word::<V>(&mut self.low, &mut self.low_ahead);
            }
            let mut codes = V::and(V::shift_right(self.low_word, shift as u32), mask(low));
            if high > 0 {
                let (begins_word, shift) = place(quad, high);
                if begins_word {
                    self.high_word = next_word::<V>(&mut self.high, &mut self.high_ahead);
                }
                let upper = if shift < low {
                    V::shift_left(self.high_word, (low - shift) as u32)
                } else {
                    V::shift_right(self.high_word, (shift - low) as u32)
                };
                codes = V::or(codes, V::and(upper, mask(high) << low));
            }
            if shape.table { V::lookup_bytes(table, codes) } else { codes }
        }
    }
}

/// Whether `quad` is the first one of a word in a plane of `bits` bits, and its bits below the quad's.
#[inline(always)]
fn place(quad: usize, bits: usize) -> (bool, usize) {
    let quads = 8 / bits;
    (quad.is_multiple_of(quads), quad % quads * bits)
}

/// # Safety
/// As of [`Planes::quad`].
#[inline(always)]
unsafe fn next_word<V: Vector>(at: &mut *const u8, ahead: &mut Ahead) -> V::Words {
    ahead.fetch(WORDS);
    *ahead = ahead.skip(WORDS);
    // SAFETY: the caller's promise.
    unsafe {
        let word = V::load_words(*at);
        *at = at.add(WORDS);
        word
    }
}
