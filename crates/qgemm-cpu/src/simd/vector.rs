//! [`Vector`]: sixteen lanes of f32 or of 32-bit words, as one register or several.

/// Lanes of a vector, each of which is a row of W.
pub const LANES: usize = 16;

/// Instructions on sixteen lanes. The functions are inlined into callers that are compiled for the level's instructions.
///
/// # Safety
/// Of every function: the processor has the level's instructions, and pointers may be read or written for sixteen lanes.
pub trait Vector: Copy {
    /// Sixteen f32.
    type Floats: Copy;
    /// Sixteen 32-bit words.
    type Words: Copy;

    /// Loads floats from anywhere.
    unsafe fn load(from: *const f32) -> Self::Floats;
    /// Stores floats anywhere.
    unsafe fn store(to: *mut f32, floats: Self::Floats);
    /// The same number in every lane.
    unsafe fn splat(number: f32) -> Self::Floats;
    /// `a · b + c`, rounded once where the level has an instruction for it.
    unsafe fn multiply_add(a: Self::Floats, b: Self::Floats, c: Self::Floats) -> Self::Floats;

    /// Loads words from anywhere.
    unsafe fn load_words(from: *const u8) -> Self::Words;
    /// `words >> by`.
    unsafe fn shift_right(words: Self::Words, by: u32) -> Self::Words;
    /// `words << by`.
    unsafe fn shift_left(words: Self::Words, by: u32) -> Self::Words;
    /// `words & mask`.
    unsafe fn and(words: Self::Words, mask: u32) -> Self::Words;
    /// `a | b`.
    unsafe fn or(a: Self::Words, b: Self::Words) -> Self::Words;
    /// Words below 2³¹ as numbers.
    unsafe fn to_floats(words: Self::Words) -> Self::Floats;
    /// Words as the bits of f32.
    unsafe fn bits_to_floats(words: Self::Words) -> Self::Floats;
    /// Words below 2¹⁶ as the bits of f16.
    unsafe fn half_bits_to_floats(words: Self::Words) -> Self::Floats;
    /// `table[word]` of words below 16.
    unsafe fn lookup(table: &[f32; 16], words: Self::Words) -> Self::Floats;
}
