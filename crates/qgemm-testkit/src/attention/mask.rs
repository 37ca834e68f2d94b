//! Bit masks of cases.

use qgemm_hal::MaskBits;

use super::case::{AttentionCase, AttentionStorage};

/// Pattern of a mask.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MaskPattern {
    /// A tree of speculative tokens after the known ones. A query
    /// attends to the known tokens, its ancestors and itself.
    Tree,
    /// A prefix that all attend to, then a causal mask.
    Prefix,
    /// Documents of this many keys. Tokens attend to their document
    /// only.
    Documents(usize),
    /// Random bits, with empty rows and words.
    Random,
}

impl MaskPattern {
    fn name(self) -> &'static str {
        match self {
            MaskPattern::Tree => "tree",
            MaskPattern::Prefix => "prefix",
            MaskPattern::Documents(_) => "documents",
            MaskPattern::Random => "random",
        }
    }
}

/// The mask of a case.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AttentionMask {
    /// Rows of the mask.
    pub bits: MaskBits,
    /// The pattern.
    pub pattern: MaskPattern,
}

impl AttentionMask {
    /// Label in a case's text.
    pub(super) fn label(&self) -> String {
        let size = if let MaskPattern::Documents(keys) = self.pattern { format!("-{keys}") } else { String::new() };
        let shared = if self.bits.is_shared { "-shared" } else { "" };
        let per_head = if self.bits.is_per_head { "-per-head" } else { "" };
        format!("mask={}{size}{shared}{per_head}", self.pattern.name())
    }

    /// Whether a query of a head attends to a key.
    pub(super) fn is_set(&self, case: &AttentionCase, sequence: usize, query: usize, head: usize, key: usize) -> bool {
        let AttentionMask { bits, pattern } = *self;
        let (sequence, (queries, keys)) = match bits.is_shared {
            true => (0, (case.most_queries(), case.most_keys())),
            false => (sequence, case.lengths[sequence]),
        };
        let head = if bits.is_per_head { head } else { 0 };
        // Heads have different masks.
        let key_of_head = key + 5 * head;
        let known = keys.saturating_sub(queries);
        match pattern {
            MaskPattern::Tree if key_of_head < known => true,
            MaskPattern::Tree => {
                let parent = |node: &usize| node.checked_sub(1).map(|node| node / 2);
                std::iter::successors(Some(query), parent).any(|node| known + node == key_of_head)
            }
            MaskPattern::Prefix => key_of_head < keys / 2 || key_of_head <= known + query,
            MaskPattern::Documents(size) => key_of_head / size == (known + query) / size,
            MaskPattern::Random => {
                let drawn = |place: usize| hash([case.seed as usize, sequence, head, query, place]);
                let has_word = !drawn(1 << 40).is_multiple_of(5) && drawn((1 << 41) + key / 96) % 3 > 0;
                has_word && drawn(key) % 3 > 0
            }
        }
    }

    /// The mask in memory. Bits past a sequence's last key are set,
    /// and so are bits of tokens of no sequence.
    pub(super) fn words(&self, case: &AttentionCase) -> Vec<u32> {
        let heads = if self.bits.is_per_head { case.heads.0 } else { 1 };
        // A row has bits for all allocated keys.
        let spare = if let AttentionStorage::Lengths(spare) = case.places { spare } else { 0 };
        let row_words = MaskBits::words(case.most_keys() + spare);
        let offsets = case.q_offsets();
        let rows = if self.bits.is_shared { case.most_queries() } else { case.tokens() };
        // Sequence and query of a row.
        let place = |row: usize| match self.bits.is_shared {
            true => Some((0, row, case.most_keys())),
            false => (0..case.lengths.len())
                .find(|&s| (offsets[s]..offsets[s + 1]).contains(&(row as u32)))
                .map(|s| (s, row - offsets[s] as usize, case.lengths[s].1)),
        };
        let mut words = vec![0u32; heads * rows * row_words];
        for (i, word) in words.iter_mut().enumerate() {
            let (row, first) = (i / row_words, i % row_words * MaskBits::WORD_KEYS);
            let (head, row) = (row / rows, row % rows);
            for bit in 0..MaskBits::WORD_KEYS {
                let is_set = place(row).is_none_or(|(sequence, query, keys)| {
                    first + bit >= keys || self.is_set(case, sequence, query, head, first + bit)
                });
                *word |= u32::from(is_set) << bit;
            }
        }
        words
    }
}

/// Hash of the numbers, as a random number.
fn hash(numbers: [usize; 5]) -> u64 {
    let mixed = numbers.into_iter().fold(0x9e37_79b9_7f4a_7c15u64, |hash, number| {
        (hash ^ number as u64).wrapping_mul(0xd6e8_feb8_6659_fd93).rotate_left(29)
    });
    (mixed ^ (mixed >> 32)).wrapping_mul(0xd6e8_feb8_6659_fd93) >> 32
}

#[cfg(test)]
mod tests {
    use qgemm_formats::DType;

    use super::*;

    #[test]
    fn words_hold_the_bits_of_keys_in_their_order() {
        let case = AttentionCase::new(&[(3, 40), (3, 7)], (2, 1), 8, DType::F32);
        let mask = AttentionMask { bits: MaskBits::of_tokens(), pattern: MaskPattern::Tree };
        let words = mask.words(&case);
        // Third query of the first sequence: 37 known keys, the root and
        // itself. The second sequence knows four.
        assert_eq!((words.len(), words[4], words[5] & 0xff), (12, u32::MAX, 0b1011_1111));
        assert_eq!(words[2 * 5] & 0x7f, 0b101_1111);
        let shared = AttentionMask { bits: MaskBits::shared().per_head(), ..mask };
        assert_eq!(shared.words(&case).len(), 2 * 3 * 2);
        let random = AttentionMask { pattern: MaskPattern::Random, ..mask };
        let set: u32 = random.words(&case).iter().map(|word| word.count_ones()).sum();
        assert!(set > 0 && set < 12 * 32);
    }
}
