//! WordPiece tokenizer of lower-case BERT for English. It cleans the text,
//! splits at spaces and punctuation, and cuts each word into the longest
//! pieces of the vocabulary.

use std::collections::HashMap;
use std::error::Error;
use std::fs;
use std::path::Path;

use unicode_normalization::UnicodeNormalization;
use unicode_properties::{GeneralCategory, GeneralCategoryGroup, UnicodeGeneralCategory};

/// Maximum word length, as in the original. Longer words are unknown.
const LONGEST_WORD: usize = 100;

/// Vocabulary of word pieces.
pub struct WordPiece {
    ids: HashMap<String, usize>,
    begin: usize,
    end: usize,
    unknown: usize,
}

impl WordPiece {
    /// Reads `vocab.txt`, one piece per line.
    ///
    /// # Errors
    /// When the file cannot be read or lacks one of BERT's special tokens.
    pub fn open(path: &Path) -> Result<Self, Box<dyn Error>> {
        let text = fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()))?;
        let ids: HashMap<String, usize> = text.lines().enumerate().map(|(id, piece)| (piece.to_owned(), id)).collect();
        let id = |piece: &str| ids.get(piece).copied().ok_or_else(|| format!("{}: no `{piece}`", path.display()));
        let (begin, end, unknown) = (id("[CLS]")?, id("[SEP]")?, id("[UNK]")?);
        Ok(Self { ids, begin, end, unknown })
    }

    /// Token ids of `text` with the start and end tokens, at most `longest`.
    pub fn encode(&self, text: &str, longest: usize) -> Vec<usize> {
        let mut tokens = vec![self.begin];
        words(text).iter().for_each(|word| self.pieces(word, &mut tokens));
        tokens.truncate(longest.saturating_sub(1));
        tokens.push(self.end);
        tokens
    }

    fn pieces(&self, word: &str, tokens: &mut Vec<usize>) {
        let known = tokens.len();
        let mut rest = word;
        while !rest.is_empty() && word.chars().count() <= LONGEST_WORD {
            let prefix = if rest.len() == word.len() { "" } else { "##" };
            let ends = rest.char_indices().map(|(at, c)| at + c.len_utf8()).rev();
            let longest =
                ends.filter_map(|end| Some((end, *self.ids.get(&format!("{prefix}{}", &rest[..end]))?))).next();
            let Some((end, id)) = longest else { break };
            tokens.push(id);
            rest = &rest[end..];
        }
        if !rest.is_empty() {
            // One unknown piece makes the whole word unknown.
            tokens.truncate(known);
            tokens.push(self.unknown);
        }
    }
}

/// Words and punctuation marks, in lower case without accents.
fn words(text: &str) -> Vec<String> {
    let mut words = Vec::new();
    let mut word = String::new();
    let kept = text.nfd().filter(|c| c.general_category() != GeneralCategory::NonspacingMark);
    for c in kept.flat_map(char::to_lowercase) {
        let alone = is_punctuation(c) || is_ideograph(c);
        if (alone || c.is_whitespace()) && !word.is_empty() {
            words.push(std::mem::take(&mut word));
        }
        if alone {
            words.push(c.to_string());
        } else if !c.is_whitespace() && !is_control(c) {
            word.push(c);
        }
    }
    words.extend((!word.is_empty()).then_some(word));
    words
}

fn is_punctuation(c: char) -> bool {
    c.is_ascii_punctuation() || c.general_category_group() == GeneralCategoryGroup::Punctuation
}

fn is_control(c: char) -> bool {
    c == char::REPLACEMENT_CHARACTER || c.general_category_group() == GeneralCategoryGroup::Other
}

/// Whether `c` is a CJK ideograph, which is a word by itself.
fn is_ideograph(c: char) -> bool {
    matches!(u32::from(c),
        0x4E00..=0x9FFF | 0x3400..=0x4DBF | 0x20000..=0x2A6DF | 0x2A700..=0x2B73F | 0x2B740..=0x2B81F
        | 0x2B920..=0x2CEAF | 0xF900..=0xFAFF | 0x2F800..=0x2FA1F)
}
