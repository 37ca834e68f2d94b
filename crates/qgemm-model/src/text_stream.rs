//! Incremental detokenization: text as tokens arrive, with
//! incomplete UTF-8 held back.

use crate::error::Error;

/// Tokens that may wait for the rest of a character: it has at most four bytes.
const MOST_HELD: usize = 3;

/// The text of a growing sequence of tokens.
///
/// Tokenizers decode a token by its neighbours (spaces, byte
/// fallback), so the tokens before are decoded with the new ones.
#[derive(Clone, Debug, Default)]
pub struct TextStream {
    ids: Vec<u32>,
    /// How many of the tokens have been emitted and are context.
    emitted: usize,
    /// Tokens since the last text that end in an incomplete character.
    held: usize,
}

impl TextStream {
    /// The text that follows the token `last`.
    pub fn after(last: u32) -> Self {
        Self { ids: vec![last], emitted: 1, held: 0 }
    }

    /// Adds a token. Returns the text that it completes, which is
    /// empty in the middle of a character.
    ///
    /// # Errors
    /// Those of `decode`.
    pub fn push(&mut self, id: u32, decode: impl Fn(&[u32]) -> Result<String, Error>) -> Result<String, Error> {
        self.ids.push(id);
        let text = self.new_text(&decode)?;
        if text.ends_with(char::REPLACEMENT_CHARACTER) && self.held < MOST_HELD {
            self.held += 1;
            return Ok(String::new());
        }
        if !text.is_empty() {
            self.ids.drain(..self.emitted);
            (self.emitted, self.held) = (self.ids.len(), 0);
        }
        Ok(text)
    }

    /// The text that is held back, at the end of the sequence; an
    /// incomplete character is U+FFFD.
    ///
    /// # Errors
    /// Those of `decode`.
    pub fn finish(&mut self, decode: impl Fn(&[u32]) -> Result<String, Error>) -> Result<String, Error> {
        let text = self.new_text(&decode)?;
        (self.emitted, self.held) = (self.ids.len(), 0);
        Ok(text)
    }

    fn new_text(&self, decode: &impl Fn(&[u32]) -> Result<String, Error>) -> Result<String, Error> {
        let before = decode(&self.ids[..self.emitted])?;
        let mut all = decode(&self.ids)?;
        let common = before.chars().zip(all.chars()).take_while(|(a, b)| a == b).map(|(a, _)| a.len_utf8()).sum();
        Ok(all.split_off(common))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A vocabulary in which token `i` is byte `i`, and a leading space is stripped as SentencePiece does.
    fn bytes(ids: &[u32]) -> Result<String, Error> {
        let bytes: Vec<u8> = ids.iter().map(|&id| id as u8).collect();
        let text = String::from_utf8_lossy(&bytes).into_owned();
        Ok(text.strip_prefix(' ').map_or(text.clone(), str::to_owned))
    }

    fn stream(mut stream: TextStream, text: &[u8]) -> Vec<String> {
        let mut out: Vec<String> = text.iter().map(|&byte| stream.push(byte.into(), bytes).expect("decoded")).collect();
        out.push(stream.finish(bytes).expect("decoded"));
        out
    }

    #[test]
    fn characters_come_whole() {
        assert_eq!(stream(TextStream::default(), "aé€😀b".as_bytes()).concat(), "aé€😀b");
        assert_eq!(stream(TextStream::default(), "é€".as_bytes()), ["", "é", "", "", "€", ""]);
        assert_eq!(stream(TextStream::default(), "😀".as_bytes()), ["", "", "", "😀", ""]);
    }

    #[test]
    fn an_incomplete_end_is_a_replacement_character() {
        assert_eq!(stream(TextStream::default(), &"a€".as_bytes()[..3]), ["a", "", "", "\u{fffd}"]);
    }

    #[test]
    fn invalid_text_is_not_held_forever() {
        let out = stream(TextStream::default(), &[0xff; 8]);
        assert!(out[..4].concat().chars().count() >= 1 && out.concat().chars().count() >= 8, "{out:?}");
    }

    #[test]
    fn spaces_depend_on_the_token_before() {
        assert_eq!(stream(TextStream::default(), b" a b").concat(), "a b");
        assert_eq!(stream(TextStream::after(b'x'.into()), b" a b").concat(), " a b");
    }
}
