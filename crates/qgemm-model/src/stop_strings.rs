//! Stop strings: text is emitted up to the first of them. A
//! possible beginning of one is held back.

/// The search for stop strings in streamed text.
#[derive(Clone, Debug, Default)]
pub struct StopStrings {
    strings: Vec<String>,
    held: String,
}

impl StopStrings {
    /// A search for `strings`; empty ones are ignored.
    pub fn new(strings: impl IntoIterator<Item = String>) -> Self {
        Self { strings: strings.into_iter().filter(|s| !s.is_empty()).collect(), held: String::new() }
    }

    /// Adds text. Returns the text that may be emitted, and the
    /// stop string that ends it. The stop string is not
    /// emitted.
    pub fn push(&mut self, text: &str) -> (String, Option<String>) {
        self.held.push_str(text);
        let found = self.strings.iter().filter_map(|s| Some((self.held.find(s.as_str())?, s)));
        // The earliest wins, then the longest.
        if let Some((at, stop)) = found.min_by_key(|(at, s)| (*at, usize::MAX - s.len())) {
            let stop = stop.clone();
            let mut text = std::mem::take(&mut self.held);
            text.truncate(at);
            return (text, Some(stop));
        }
        let rest = self.held.split_off(self.held.len() - self.longest_beginning());
        (std::mem::replace(&mut self.held, rest), None)
    }

    /// The text that is held back, when the session ends for
    /// another reason.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }

    /// Bytes of the longest end of the text with which a stop
    /// string begins.
    fn longest_beginning(&self) -> usize {
        let beginning = |stop: &String| {
            let lengths = stop.char_indices().map(|(at, _)| at).filter(|&at| at > 0);
            lengths.filter(|&length| self.held.ends_with(&stop[..length])).max().unwrap_or(0)
        };
        self.strings.iter().map(beginning).max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stream(stops: &[&str], pieces: &[&str]) -> (Vec<String>, Option<String>) {
        let mut search = StopStrings::new(stops.iter().map(|s| (*s).to_owned()));
        let mut emitted = Vec::new();
        for piece in pieces {
            let (text, stop) = search.push(piece);
            emitted.push(text);
            if stop.is_some() {
                return (emitted, stop);
            }
        }
        emitted.push(search.finish());
        (emitted, None)
    }

    #[test]
    fn text_ends_before_the_stop_string() {
        assert_eq!(stream(&["END"], &["abc", "ENDxyz"]), (vec!["abc".into(), "".into()], Some("END".into())));
        assert_eq!(stream(&["END"], &["a E", "N", "D"]), (vec!["a ".into(), "".into(), "".into()], Some("END".into())));
    }

    #[test]
    fn a_beginning_is_held_back_and_released() {
        assert_eq!(stream(&["END"], &["xEN", "GE", "EN"]).0, ["x", "ENG", "E", "EN"]);
        assert_eq!(stream(&["aab"], &["aa", "ab"]), (vec!["".into(), "a".into()], Some("aab".into())));
        assert_eq!(stream(&[], &["abc"]).0, ["abc", ""]);
        assert_eq!(stream(&[""], &["abc"]).0, ["abc", ""]);
    }

    #[test]
    fn the_earliest_stop_string_wins_and_then_the_longest() {
        assert_eq!(stream(&["b", "ab"], &["xab"]), (vec!["x".into()], Some("ab".into())));
        assert_eq!(stream(&["ab", "abc"], &["abc"]), (vec!["".into()], Some("abc".into())));
    }

    #[test]
    fn characters_are_not_cut() {
        assert_eq!(stream(&["é!"], &["aé", "?"]).0, ["a", "é?", ""]);
        assert_eq!(stream(&["日本"], &["日", "本"]), (vec!["".into(), "".into()], Some("日本".into())));
    }
}
